"""encode_collection through the stream of an accelerated model: the rows of the plain one, whatever happens."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import programs
from tests.retrieval.test_retrieval_encoding import BUDGET, TEXTS, dense
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.retrieval import encode_collection, read_manifest, read_vectors
from tilefold.retrieval.errors import DataError

MANY = {f"d{i}": "cats sleep and dogs run " * (i % 7) + f"text {i}" for i in range(40)}
OPTIONS: dict[str, Any] = {"shard_size": 8, "top_k": 20, "batch_tokens": 60}


@pytest.fixture
def fast(splade: Any) -> Iterator[Any]:
    with accelerate(splade):
        yield splade
    assert splade[0].model.config._attn_implementation == "sdpa"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tilefold-")]


def assert_same_bits(one: Any, other: Any) -> None:
    assert one.ids == other.ids
    assert np.array_equal(one.indptr, other.indptr)
    assert np.array_equal(one.indices, other.indices) and np.array_equal(one.data, other.data)


@pytest.mark.parametrize("batch", [{}, {"batch_tokens": 20}, {"batch_size": 2}])
def test_rows_are_those_of_the_plain_model_in_the_order_of_the_texts(
    fast: Any, tmp_path: Path, batch: dict[str, int]
) -> None:
    calls: list[tuple[int, int]] = []
    manifest = encode_collection(
        fast, TEXTS, tmp_path, shard_size=3, progress=lambda *done: calls.append(done), **batch
    )
    assert manifest.complete and manifest.n_documents == 7 and [part["rows"] for part in manifest.shards] == [3, 3, 1]
    assert calls[0] == (0, 7) and calls[-1] == (7, 7) and calls == sorted(set(calls))
    vectors = read_vectors(tmp_path)
    assert vectors.ids == list(TEXTS)
    stock = type(fast).encode(fast, list(TEXTS.values()), convert_to_sparse_tensor=False)
    torch.testing.assert_close(dense(vectors), stock, rtol=BUDGET, atol=BUDGET)


def test_what_is_reported_is_written_or_kept(fast: Any, tmp_path: Path) -> None:
    def look(done: int, total: int) -> None:
        manifest = read_manifest(tmp_path)
        partial = manifest.partial.get("shard")
        assert done // 8 <= len(manifest.shards) and (done % 8 == 0 or partial == len(manifest.shards) or done < total)

    encode_collection(fast, MANY, tmp_path, progress=look, **OPTIONS)


@pytest.mark.parametrize("at", [1, 3, 5, 8])
def test_an_interrupted_run_goes_on_and_its_bits_are_the_same(fast: Any, tmp_path: Path, at: int) -> None:
    calls = 0

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_collection(fast, MANY, tmp_path / "v", progress=stop, **OPTIONS)
    encode_collection(fast, MANY, tmp_path / "v", **OPTIONS)
    encode_collection(fast, MANY, tmp_path / "whole", **OPTIONS)
    assert_same_bits(read_vectors(tmp_path / "v"), read_vectors(tmp_path / "whole"))
    assert sorted(file.suffix for file in (tmp_path / "v").iterdir()) == [".json", *[".parquet"] * 5]


def test_what_is_done_is_kept_by_time_before_it_is_reported(fast: Any, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    seen = 0

    def kill(done: int, total: int) -> None:
        nonlocal seen
        seen = done
        if done % 8 and done > 8:
            raise Killed

    with pytest.raises(Killed):
        encode_collection(fast, MANY, tmp_path, save_minutes=0.0, progress=kill, **OPTIONS)
    manifest = read_manifest(tmp_path)
    assert manifest.n_documents == seen // 8 * 8 and manifest.partial["shard"] == len(manifest.shards)


def test_bad_texts_lose_no_others(fast: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: dict[str, Any] = {"half": "cats \ud800", "number": 3, **TEXTS, "nothing": None, "poison": "boom"}
    preprocess = fast.preprocess

    def explode(batch: list[str], **options: Any) -> Any:
        if any("boom" in text for text in batch):
            raise RuntimeError("tokenizer gave up")
        return preprocess(batch, **options)

    monkeypatch.setattr(fast, "preprocess", explode)
    manifest = encode_collection(fast, texts, tmp_path / "a", shard_size=20, top_k=20)
    assert set(manifest.failed) == {"half", "number", "nothing", "poison"}
    assert manifest.failed["poison"] == "RuntimeError: tokenizer gave up"
    assert manifest.failed["number"] == "expected a string, got int"
    assert "half" in manifest.failed and read_vectors(tmp_path / "a").ids == list(TEXTS)


def test_a_batch_that_the_device_refuses_is_encoded_in_parts(
    fast: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = fast[1].forward
    whole = type(head).__call__

    def small_only(self: Any, features: dict[str, Any]) -> Any:
        count = features["cu_seq_lens_q"].numel() - 1 if "cu_seq_lens_q" in features else len(features["input_ids"])
        if count > 3:
            raise torch.OutOfMemoryError("too much")
        return whole(self, features)

    monkeypatch.setattr(type(head), "__call__", small_only)
    manifest = encode_collection(fast, TEXTS, tmp_path, top_k=20)
    assert not manifest.failed and manifest.n_documents == 7


def test_a_text_with_nan_is_listed_and_a_model_of_nan_is_an_error(fast: Any, tmp_path: Path) -> None:
    broken = copy.deepcopy(fast)
    word = fast.tokenizer.convert_tokens_to_ids("trees")
    with torch.no_grad():
        broken[0].model.bert.embeddings.word_embeddings.weight[word] = float("nan")
        broken[0].model.cls.predictions.decoder.weight = torch.nn.Parameter(
            fast[0].model.cls.predictions.decoder.weight
        )
    manifest = encode_collection(broken, TEXTS, tmp_path / "a", top_k=20)
    assert list(manifest.failed) == ["d6"] and "got nan for 'd6'" in manifest.failed["d6"]
    with torch.no_grad():
        broken[0].model.bert.embeddings.word_embeddings.weight.fill_(float("nan"))
    with pytest.raises(DataError, match=r"all 7 of shard 0 failed, 'd0' first .*Check the model"):
        encode_collection(broken, TEXTS, tmp_path / "b")


def test_an_error_of_the_writer_ends_everything(fast: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilefold.retrieval.vectors import SparseVectorWriter

    write = SparseVectorWriter.write_shard

    def full(self: Any, number: int, *rest: Any) -> None:
        if number == 2:
            raise OSError("no space left on device")
        write(self, number, *rest)

    monkeypatch.setattr(SparseVectorWriter, "write_shard", full)
    with pytest.raises(OSError, match="no space left"):
        encode_collection(fast, MANY, tmp_path, **OPTIONS)
    assert len(read_manifest(tmp_path).shards) == 2


KILLED = """
import os, random, signal, sys, time
import torch
from sentence_transformers import SparseEncoder
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.retrieval import encode_collection
torch.set_num_threads(1)
model = SparseEncoder(sys.argv[1], device="cpu")
accelerate(model)
texts = {f"d{i}": "cats sleep and dogs run " * (i % 7) + f"text {i}" for i in range(160)}
chance = random.Random(0)
for run in range(4):
    folder = f"{sys.argv[2]}/{run}"
    seen, said = os.pipe()
    child = os.fork()
    if child == 0:
        encode_collection(
            model, texts, folder, shard_size=8, top_k=20, batch_tokens=60, save_minutes=0.0 if run % 2 else 1.0,
            progress=lambda done, total: os.write(said, f"{done} ".encode()),
        )
        os._exit(0)
    os.close(said)
    first = os.read(seen, 1)
    time.sleep(chance.uniform(0.02, 0.4))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = first
    while part := os.read(seen, 65536):
        told += part
    os.close(seen)
    print(run, told.split(b" ")[-2].decode(), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, so that one import serves all")
def test_a_kill_at_any_moment_loses_nothing_that_was_reported(splade: Any, tmp_path: Path) -> None:
    splade.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    texts = {f"d{i}": "cats sleep and dogs run " * (i % 7) + f"text {i}" for i in range(160)}
    given = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    done = programs.run("-c", KILLED, tmp_path / "model", tmp_path, env=given)
    assert done.returncode == 0, done.stderr
    stopped = []
    with accelerate(splade):
        whole = encode_collection(splade, texts, tmp_path / "whole", **OPTIONS)
        for line in done.stdout.splitlines():
            run, reported = line.split()
            manifest = read_manifest(tmp_path / run)
            assert manifest.n_documents >= int(reported) // 8 * 8
            if int(run) % 2:  # with save_minutes=0.0 also a part of a shard
                kept = int(reported) % 8 == 0 or manifest.n_documents > int(reported) or manifest.partial
                assert kept, (reported, manifest.n_documents)
            stopped.append(manifest.n_documents)
            assert encode_collection(splade, texts, tmp_path / run, **OPTIONS).shards == whole.shards
    assert len(stopped) == 4 and min(stopped) < 160
