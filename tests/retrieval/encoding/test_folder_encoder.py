"""Encoding into a folder, by plain and accelerated models of both kinds: the same promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.tokens import TokenManifest

TEXTS = {
    "d0": "a cat sleeps",
    "d1": "x",
    "d2": "dogs chase cats and birds and, on some days, each other all around the house",
    "d3": "sparse retrieval weighs the words of a vocabulary",
    "d4": "",
    "d5": "the quick brown fox jumps over the lazy dog",
    "d6": "trees grow slowly",
}
MANY = {f"d{i}": "cats sleep and dogs run " * (i % 7) + f"text {i}" for i in range(40)}
# sums of 32 products in another order within a batch of other lengths: sqrt(32) eps, with a margin
BUDGET = 1e-5


def dense(vectors: Any) -> torch.Tensor:
    matrix = np.zeros((len(vectors), vectors.vocab_size), np.float32)
    for i in range(len(vectors)):
        terms, weights = vectors.row(i)
        matrix[i, terms] = weights
    return torch.from_numpy(matrix)


class Way:
    """A model that encodes, of sparse or token vectors, plain or accelerated (fast), and how what
    it wrote is read.
    """

    def __init__(self, model: Any, sparse: bool, fast: bool) -> None:
        self.model, self.sparse, self.fast = model, sparse, fast
        self.suffix = "parquet" if sparse else "safetensors"
        self.batches = {"batch_tokens": 60} if fast else {"batch_size": 3}
        # entries of unit vectors are rounded to fp16
        self.budget = BUDGET if sparse else 2.0**-11

    def encode(self, texts: Any, folder: Path, **options: Any) -> Any:
        encode: Any = r.encode_collection if self.sparse else r.encode_tokens
        return encode(self.model, texts, folder, **options)

    def manifest(self, folder: Path) -> Any:
        return r.read_manifest(folder) if self.sparse else TokenManifest.read(folder)

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """Id -> numbers, in the order of the folder."""
        if self.sparse:
            vectors = r.read_vectors(folder)
            return dict(zip(vectors.ids, dense(vectors), strict=True))
        store = r.open_tokens(folder)
        found = store.read(store.ids)
        return {name: found.rows(i) for i, name in enumerate(found.ids)}

    def stock(self, texts: dict[str, str]) -> dict[str, torch.Tensor]:
        """What the stock ``encode_document`` gives."""
        options = {"convert_to_sparse_tensor": False} if self.sparse else {}
        found = type(self.model).encode(
            self.model,
            list(texts.values()),
            task="document",
            **options,
        )
        return dict(zip(texts, found, strict=True))


@pytest.fixture(params=["sparse", "sparse, accelerated", "tokens", "tokens, accelerated"])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    kind, _, fast = request.param.partition(", ")
    model = request.getfixturevalue("splade" if kind == "sparse" else "late")
    if not fast:
        yield Way(model, kind == "sparse", False)
        return
    with accelerate(model):
        yield Way(model, kind == "sparse", True)
    assert model[0].model.config._attn_implementation == "sdpa"
    assert not hasattr(model, "encode_token_batch") and not hasattr(model, "encode_sparse_batch")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tilefold-")]


@pytest.fixture
def fast(splade: Any) -> Iterator[Any]:
    with accelerate(splade):
        yield splade


def contents(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob(pattern)}


@pytest.mark.parametrize("batch", [{}, {"batch_tokens": 20}, {"batch_size": 2}])
@pytest.mark.filterwarnings("ignore:batch_tokens does nothing")
def test_rows_are_those_of_the_stock_model_in_their_order(
    way: Way,
    tmp_path: Path,
    batch: dict[str, int],
) -> None:
    calls: list[tuple[int, int]] = []
    report = {"progress": lambda *done: calls.append(done)}
    manifest = way.encode(TEXTS, tmp_path, shard_size=3, **report, **batch)
    assert manifest.complete and not manifest.failed and way.manifest(tmp_path) == manifest
    assert manifest.n_documents == 7 and [part["rows"] for part in manifest.shards] == [3, 3, 1]
    assert calls[0] == (0, 7) and calls[-1] == (7, 7) and calls == sorted(set(calls))
    if not way.fast and batch == {"batch_size": 2}:
        assert calls == [(0, 7), (2, 7), (3, 7), (5, 7), (6, 7), (7, 7)]
    found, expected = way.read(tmp_path), way.stock(TEXTS)
    assert list(found) == list(TEXTS)
    for name, rows in expected.items():
        torch.testing.assert_close(found[name], rows, rtol=way.budget, atol=way.budget)


@pytest.mark.parametrize("storage", ["fp16", "int8"])
@pytest.mark.parametrize("kind", ["document", "query"])
def test_a_stream_stores_token_vectors_as_a_plain_model(
    late: Any,
    tmp_path: Path,
    storage: str,
    kind: Any,
) -> None:
    options: dict[str, Any] = {"storage": storage, "kind": kind, "shard_size": 3}
    r.encode_tokens(late, TEXTS, tmp_path / "plain", **options)
    with accelerate(late):
        r.encode_tokens(late, TEXTS, tmp_path / "fast", **options)
    one, other = (r.open_tokens(tmp_path / name).read(TEXTS) for name in ("plain", "fast"))
    assert one.values.dtype == other.values.dtype and torch.equal(one.offsets, other.offsets)
    for i in range(len(one)):
        torch.testing.assert_close(one.rows(i), other.rows(i), rtol=0, atol=2 / 127)
    with torch.autocast("cpu", torch.bfloat16):
        assert r.encode_texts(late, TEXTS, kind=kind, storage=storage, batch_size=2).ids == list(
            TEXTS,
        )


def test_queries_get_the_query_prompt_and_are_thinned(splade: Any) -> None:
    vectors = r.encode_queries(splade, TEXTS, top_k=50)
    expected = splade.encode_query(
        list(TEXTS.values()),
        convert_to_sparse_tensor=False,
        max_active_dims=50,
    )
    torch.testing.assert_close(dense(vectors), expected, rtol=BUDGET, atol=BUDGET)
    assert int(np.diff(vectors.indptr).max()) == 50
    document = splade.encode_document("a cat sleeps", convert_to_sparse_tensor=False)
    assert not torch.allclose(dense(vectors)[0], document)
    threshold = float(np.median(vectors.data))
    thin = r.encode_queries(splade, TEXTS, top_k=50, min_weight=threshold)
    assert thin.data.min() > threshold and thin.indices.size == int(
        (vectors.data > threshold).sum(),
    )


@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_interrupted_run_goes_on_and_its_bits_are_the_same(
    way: Way,
    tmp_path: Path,
    at: int,
) -> None:
    calls: list[int] = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == at:
            raise KeyboardInterrupt

    options = {"shard_size": 8, **way.batches}
    with pytest.raises(KeyboardInterrupt):
        way.encode(MANY, tmp_path / "v", progress=stop, **options)
    refused(DataError, "unfinished run", way.read, tmp_path / "v")
    done = {
        file: file.stat().st_mtime_ns for file in (tmp_path / "v").glob(f"part-0000?.{way.suffix}")
    }
    assert len(done) == len(way.manifest(tmp_path / "v").shards)
    again: list[int] = []
    way.encode(MANY, tmp_path / "v", progress=lambda done, total: again.append(done), **options)
    # a whole shard counts in full once it is written
    assert again[1] >= calls[-1], "what was reported is not encoded again"
    assert all(file.stat().st_mtime_ns == written for file, written in done.items())

    def on_disk(done: int, total: int) -> None:
        there = way.manifest(tmp_path / "whole") if done else None
        assert there is None or there.n_documents >= done // 8 * 8, "reported before it is listed"
        part = at == 1 and there is not None and done % 8 != 0
        assert not part or there.n_documents > done or there.partial, "reported before it is kept"
        assert at == 1 or there is None or not there.partial, "kept before its time"

    way.encode(MANY, tmp_path / "whole", progress=on_disk, save_minutes=float(at > 1), **options)
    assert (
        contents(tmp_path / "v") == contents(tmp_path / "whole")
        and len(contents(tmp_path / "v", "part-*")) == 5
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("splade", {"top_k": 5}, "top_k: 20 before, 5 now"),
        ("splade", {"min_weight": 0.5}, "min_weight: 0.0 before, 0.5 now"),
        ("splade", {"kind": "query"}, "kind: 'document' before, 'query' now"),
        ("splade", {"texts": {**TEXTS, "d0": "changed"}}, "texts_sha256"),
        ("late", {"storage": "int8"}, "storage: 'fp16' before, 'int8' now"),
        ("late", {"shard_size": 3}, "shard_size: 2 before, 3 now"),
        ("late", {"kind": "query"}, "kind: 'document' before"),
        ("late", {"document_length": 12}, "model_fingerprint"),
    ],
)
def test_resuming_with_other_settings_is_refused(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    name: str,
    change: dict[str, Any],
    message: str,
    monkeypatch: Any,
) -> None:
    way = Way(request.getfixturevalue(name), name == "splade", False)
    options = {"texts": TEXTS, "folder": tmp_path} | (
        {"top_k": 20} if way.sparse else {"shard_size": 2}
    )
    way.encode(**options)
    if "document_length" in change:
        monkeypatch.setattr(way.model[0], "document_length", change["document_length"])
    options |= {key: value for key, value in change.items() if key != "document_length"}
    refused(DataError, message, way.encode, **options)
    assert way.encode(**options, resume=False).complete


def test_bad_texts_lose_no_others(
    way: Way,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preprocess, made = way.model.preprocess, {}

    def explode(batch: list[str], **options: Any) -> Any:
        if any("boom" in text for text in batch):
            raise RuntimeError("tokenizer gave up")
        return preprocess(batch, **options)

    good = {**TEXTS, "long": "cats " * 100}
    texts: dict[str, Any] = {
        "half": "cats \ud800",
        "number": 3,
        **good,
        "nothing": None,
        "poison": "boom " * 20,
    }
    truncated = way.encode(good, tmp_path / "good").truncated
    monkeypatch.setattr(way.model, "preprocess", explode)
    for size in (20, 1):
        folder = tmp_path / str(size)
        manifest = way.encode(texts, folder, shard_size=size)
        assert set(manifest.failed) == {"half", "number", "nothing", "poison"}
        assert manifest.failed["poison"] == "RuntimeError: tokenizer gave up"
        assert manifest.failed["number"] == "expected a string, got int"
        assert manifest.failed["nothing"] == "expected a string, got NoneType"
        assert way.manifest(folder).failed == manifest.failed
        made[size] = [part["rows"] for part in manifest.shards]
        assert list(way.read(folder)) == list(good)
        assert manifest.truncated == truncated and truncated["count"] > 0, "of the others"
    assert made == {20: [8], 1: [0, 0, *[1] * 8, 0, 0]}


def test_texts_that_all_fail_are_an_error(
    way: Way,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preprocess = way.model.preprocess
    fails = lambda batch, **options: preprocess(batch, **options) if batch == ["a"] else 1 / 0  # noqa: E731
    monkeypatch.setattr(way.model, "preprocess", fails)
    with pytest.raises(
        DataError,
        match=r"all 7 of shard 0 failed, 'd0' first .ZeroDivisionError.*Check the model",
    ):
        way.encode(TEXTS, tmp_path / "v")
    encode = r.encode_queries if way.sparse else lambda *given: r.encode_texts(*given, kind="query")
    refused(
        DataError,
        r"1 of 2 failed, 'b' first .expected a string",
        encode,
        way.model,
        {"a": "a", "b": 5},
    )


def test_a_text_with_nan_is_listed_and_a_model_of_nan_is_an_error(way: Way, tmp_path: Path) -> None:
    network = way.model[0].model
    if way.sparse:  # whose decoder has the weights of the embeddings
        tied = network.cls.predictions.decoder.weight
        network.cls.predictions.decoder.weight = torch.nn.Parameter(tied.detach().clone())
    weight = network.get_input_embeddings().weight
    whole = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[way.model.tokenizer.convert_tokens_to_ids("trees")] = float("nan")
        manifest = way.encode(TEXTS, tmp_path / "a")
        assert list(manifest.failed) == ["d6"] and "got nan for 'd6'" in manifest.failed["d6"]
        assert list(way.read(tmp_path / "a")) == list(TEXTS)[:6]
        with torch.no_grad():
            weight.fill_(float("nan"))
        refused(
            DataError,
            r"all 7 of shard 0 failed, 'd0' first .*Check the model",
            way.encode,
            TEXTS,
            tmp_path / "b",
        )
    finally:
        with torch.no_grad():
            weight.copy_(whole)
        if way.sparse:
            network.cls.predictions.decoder.weight = tied


def test_a_batch_that_the_device_refuses_is_divided(
    fast: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = fast[1].forward
    whole = type(head).__call__

    def small_only(self: Any, features: dict[str, Any]) -> Any:
        count = (
            features["cu_seq_lens_q"].numel() - 1
            if "cu_seq_lens_q" in features
            else len(features["input_ids"])
        )
        if count > 3:
            raise torch.OutOfMemoryError("too much")
        return whole(self, features)

    monkeypatch.setattr(type(head), "__call__", small_only)
    manifest = r.encode_collection(fast, TEXTS, tmp_path, top_k=20)
    assert not manifest.failed and manifest.n_documents == 7


def test_an_accelerated_model_gives_the_same_vectors(splade: Any, tmp_path: Path) -> None:
    plain = r.encode_queries(splade, TEXTS)
    stored = r.encode_collection(splade, TEXTS, tmp_path)
    with accelerate(splade):
        fast = r.encode_queries(splade, TEXTS)
        assert (
            r.encode_collection(splade, TEXTS, tmp_path) == stored
        )  # the same model: nothing to do
    assert fast.ids == plain.ids and fast.fingerprint == plain.fingerprint
    torch.testing.assert_close(dense(fast), dense(plain), rtol=BUDGET, atol=BUDGET)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("both", {"kind": "passage"}, "kind: expected one of document, query, got 'passage'"),
        ("both", {"batch_size": 0}, "batch_size: expected at least 1"),
        ("both", {"shard_size": 0}, "shard_size: expected at least 1"),
        ("both", {"texts": {}}, "texts: expected at least one, got an empty mapping"),
        ("splade", {"top_k": 0}, "top_k: expected at least 1"),
        ("splade", {"min_weight": float("nan")}, "min_weight: expected at least 0"),
        ("late", {"storage": "fp8"}, "storage: expected one of fp16, int8, got 'fp8'"),
    ],
)
def test_wrong_arguments_are_refused_before_any_file_is_written(
    splade: Any,
    late: Any,
    tmp_path: Path,
    name: str,
    change: dict[str, Any],
    message: str,
) -> None:
    calls: dict[str, Any] = {
        "splade": (r.encode_collection, splade),
        "late": (r.encode_tokens, late),
    }
    for encode, model in calls.values() if name == "both" else [calls[name]]:
        refused(
            ValueError,
            message,
            encode,
            **{"model": model, "texts": TEXTS, "output_dir": tmp_path / "v"} | change,
        )
        assert not (tmp_path / "v").exists()


def test_the_dense_baseline_ranks_by_the_models_own_similarity() -> None:
    from tests.recipes.small import ranked_by_itself
    from tilefold.recipes.backbone import load_dense_minilm

    model = load_dense_minilm("cpu")
    documents = {name: text for name, text in TEXTS.items() if text}
    queries = {"q1": "an animal asleep", "q2": "growing plants", "q3": "inverted index"}
    searcher = r.Searcher(r.encoded_index(model, documents), model)
    run = searcher.rank(queries, r.SearchRequest(2)).run
    assert {query: next(iter(found)) for query, found in run.items()} == {
        "q1": "d0",
        "q2": "d6",
        "q3": "d3",
    }
    assert run == {
        q: pytest.approx(own) for q, own in ranked_by_itself(model, documents, queries, 2).items()
    }
    assert len(searcher.rank({"q": "cat"}, r.SearchRequest(100)).run["q"]) == len(documents)
    refused(
        ValueError,
        "texts: expected at least one, got an empty mapping",
        r.encoded_index,
        model,
        {},
    )
    refused(
        ValueError,
        "texts: expected at least one, got an empty mapping",
        r.encode_dense,
        model,
        {},
        kind="query",
    )
