from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.manifests import edit
from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError

D = 16
# products of unit vectors accumulate in fp32: what is left is the rounding of each entry on both
# sides
FP16_BUDGET = 2 * 2.0**-11
INT8_BUDGET = 2 * 0.5 / 127


def unit(n: int, seed: int) -> torch.Tensor:
    rows = torch.randn(n, D, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=-1)


def make(
    lengths: list[int],
    storage: str = "fp16",
    prefix: str = "d",
    seed: int = 0,
) -> r.TokenVectors:
    rows = [unit(n, seed + 31 * i) for i, n in enumerate(lengths)]
    return r.TokenVectors.pack([f"{prefix}{i}" for i in range(len(lengths))], rows, D, storage)


def store_of(
    vectors: list[r.TokenVectors],
    path: Path,
    storage: str = "fp16",
    **manifest: Any,
) -> r.TokenStore:
    writer = r.TokenVectorWriter(path, r.TokenManifest(D, storage, **manifest))
    for number, part in enumerate(vectors):
        writer.write_shard(number, part)
    writer.finish()
    return r.open_tokens(path)


def brute_force(query: torch.Tensor, document: torch.Tensor) -> float:
    return float((query.double() @ document.double().T).amax(dim=1).sum())


@pytest.mark.parametrize(("storage", "budget"), [("fp16", FP16_BUDGET), ("int8", INT8_BUDGET)])
def test_reranking_a_store_gives_the_maxsim_of_the_stored_vectors(
    tmp_path: Path,
    storage: str,
    budget: float,
) -> None:
    parts = [make([3, 1, 7], storage), make([5, 2], storage, "e", 100)]
    store = store_of(parts, tmp_path / "t", storage)
    queries = make([4, 1, 6], "fp16", "q", 500)
    names = [*parts[0].ids, *parts[1].ids]
    run = {query: {name: float(i) for i, name in enumerate(names)} for query in queries.ids}
    found = r.rerank(run, queries, store)
    rows = {name: part.rows(i) for part in parts for i, name in enumerate(part.ids)}
    for at, query in enumerate(queries.ids):
        expected = {name: brute_force(queries.rows(at), rows[name]) for name in names}
        # int8 rounds the query's entries too: each similarity is a sum of D products
        slack = len(queries.rows(at)) * (1e-6 if storage == "fp16" else math.sqrt(D) * budget)
        assert found[query] == pytest.approx(expected, abs=slack)
        assert list(found[query].values()) == sorted(found[query].values(), reverse=True)
    in_memory = r.rerank(run, queries, r.TokenVectors.concatenate(parts))
    assert {q: pytest.approx(scores, abs=1e-5) for q, scores in in_memory.items()} == found
    mean = r.rerank(run, queries, store, reduction="mean")
    for at, query in enumerate(queries.ids):
        tokens = len(queries.rows(at))
        assert mean[query] == pytest.approx(
            {name: score / tokens for name, score in found[query].items()},
            rel=1e-5,
        )


def test_candidates_below_the_depth_and_without_vectors_follow_in_their_first_order(
    tmp_path: Path,
) -> None:
    part = make([3, 0, 4, 2])
    store = store_of([part], tmp_path / "t", failed={"lost": "RuntimeError: tokenizer gave up"})
    queries = make([4], prefix="q", seed=9)
    run = {"q0": {"lost": 9.0, "d1": 8.0, "d0": 7.0, "d2": 6.0, "d3": 5.0}, "nothing": {}}
    refused(DataError, "no token vectors of 'nothing'", r.rerank, run, queries, store)
    found = r.rerank({"q0": run["q0"]}, queries, store, depth=4)["q0"]
    scored = sorted(
        ("d0", "d2"),
        key=lambda name: -brute_force(queries.rows(0), part.rows(int(name[1]))),
    )
    assert list(found) == [*scored, "lost", "d1", "d3"]
    low = min(found[name] for name in scored)
    tail = torch.tensor(
        [low, *(found[name] for name in ("lost", "d1", "d3"))],
    )  # fp32, as trec_eval reads scores
    assert bool((tail.diff() < 0).all())
    assert low - found["d3"] <= 4 * 2**-21 * max(map(abs, found.values()))
    dropped = r.rerank({"q0": run["q0"]}, queries, store, depth=4, tail="drop")["q0"]
    assert dropped == {name: found[name] for name in scored}
    assert list(r.rerank({"q0": {"lost": 1.0}}, queries, store)["q0"]) == ["lost"]
    assert r.rerank({"q0": {"lost": 1.0}}, queries, store, tail="drop") == {"q0": {}}
    assert r.rerank({}, queries, store) == {}
    assert r.rerank({"q0": {}}, queries, store) == {"q0": {}}
    same = r.TokenVectors.pack(["b", "a", "c"], [unit(2, 1)] * 3, D, "fp16")
    assert list(r.rerank({"q0": {"a": 1.0, "c": 3.0, "b": 2.0}}, queries, same)["q0"]) == [
        "c",
        "b",
        "a",
    ]


def test_what_cannot_be_reranked_is_an_error(tmp_path: Path) -> None:
    documents, queries = make([3, 2]), make([4], prefix="q")
    wider = r.TokenVectors.pack(["q0"], [torch.ones(2, 24)], 24, "fp16")
    one = r.TokenVectors(["d0"], torch.tensor([0, 1]), torch.ones(1, D))
    poisoned = r.TokenVectors(["q0"], torch.tensor([0, 1]), torch.full((1, D), math.nan))
    calls: list[tuple[Any, Any, dict[str, Any], str]] = [
        (
            queries,
            documents.take([1]),
            {},
            r"no token vectors of candidate 'd0' \(1 of 1 candidates",
        ),
        (wider, documents, {}, r"queries' dimension 24, got 16.*same model"),
        (queries, documents, {"depth": 0}, "depth: expected at least 1"),
        (queries, documents, {"tail": "cut"}, "tail: expected one of keep, drop, got 'cut'"),
        (make([4], "int8", "q"), documents, {}, "got int8"),
        (poisoned, one, {}, "expected finite token vectors"),
    ]
    for asked, stored, options, message in calls:
        refused(ValueError, message, r.rerank, {"q0": {"d0": 1.0}}, asked, stored, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["fp16", "int8"])
def test_a_gpu_scores_as_the_cpu_does(tmp_path: Path, storage: str) -> None:
    parts = [make([30, 1, 70], storage), make([5, 200], storage, prefix="e", seed=7)]
    store = store_of(parts, tmp_path / "t", storage)
    queries = make([32, 4], prefix="q", seed=9)
    run = {query: dict.fromkeys(store.ids, 0.0) for query in queries.ids}
    one, other = (r.rerank(run, queries, store, device=device) for device in ("cpu", "cuda"))
    for query in queries.ids:
        assert one[query] == pytest.approx(other[query], abs=32 * FP16_BUDGET)


def test_vectors_that_are_not_finite_or_of_another_width_name_their_text() -> None:
    rows = unit(2, 0)
    for bad, storage in (
        (math.nan, "int8"),
        (-math.inf, "int8"),
        (math.inf, "fp16"),
        (1e6, "fp16"),
    ):
        poisoned = rows.clone()
        poisoned[1, 3] = bad
        refused(
            DataError,
            f"got {bad} for 'b'",
            r.TokenVectors.pack,
            ["a", "b"],
            [rows, poisoned],
            D,
            storage,
        )
    with pytest.raises(DataError, match=r"expected \[n, 16\] for 'b', got shape \[2, 8\]"):
        r.TokenVectors.pack(["a", "b"], [rows, rows[:, :8]], D, "fp16")
    with pytest.raises(DataError, match=r"offsets that rise from 0 to 2, got 2 after 3"):
        r.TokenVectors(["a", "b"], torch.tensor([0, 3, 2]), rows)
    refused(
        DataError,
        "was given before",
        r.TokenVectors,
        ["a", "a"],
        torch.tensor([0, 1, 2]),
        rows,
    )


def test_a_store_reads_what_was_written_and_maps_it_from_the_file(tmp_path: Path) -> None:
    parts = [make([3, 0, 7]), make([5], prefix="ü", seed=3)]
    store = store_of(parts, tmp_path / "t", model_name="m", kind="document")
    assert (len(store), store.dimension, list(store.ids)) == (4, D, ["d0", "d1", "d2", "ü0"])
    assert (store.manifest.n_documents, store.manifest.n_tokens) == (4, 15)
    assert torch.equal(store.shard(0).values, parts[0].values)
    assert (
        store.shard(0).values.untyped_storage().nbytes()
        <= (tmp_path / "t/part-00000.safetensors").stat().st_size
    )
    picked = store.read(["ü0", "d1", "d0"])
    assert (picked.ids, picked.offsets.tolist()) == (["ü0", "d1", "d0"], [0, 5, 5, 8])
    assert torch.equal(picked.rows(2), parts[0].rows(0))
    assert len(store.read([])) == 0
    with pytest.raises(KeyError):
        store.read(["absent"])


def test_damage_is_named_by_its_file(tmp_path: Path) -> None:
    store_of([make([3, 2]), make([4], prefix="e")], tmp_path / "t")

    def copy(name: str) -> Path:
        shutil.copytree(tmp_path / "t", tmp_path / name)
        return tmp_path / name

    flipped = copy("flipped")
    shard = flipped / "part-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-20] ^= 1
    shard.write_bytes(raw)
    store = r.open_tokens(flipped)
    assert len(store.shard(0)) == 2  # another shard is whole
    refused(DataError, r"part-00001.safetensors: damaged; its checksum", store.shard, 1)
    (copy("cut") / "part-00000.safetensors").write_bytes(b"torn")
    (copy("gone") / "part-00000.safetensors").unlink()
    (copy("bare") / "manifest.json").unlink()
    tensors = load_file(tmp_path / "t/part-00000.safetensors")
    del tensors["ids"]
    save_file(tensors, copy("headless") / "part-00000.safetensors")
    for name, error, message in (
        ("cut", DataError, "part-00000.safetensors: expected a shard of token vectors"),
        ("gone", FileNotFoundError, "part-00000.safetensors: listed in the manifest"),
        ("bare", FileNotFoundError, "manifest.json"),
        ("headless", DataError, "expected a tensor 'ids'"),
    ):
        refused(error, message, r.open_tokens, tmp_path / name)
    unfinished = copy("unfinished")
    for change, message in (
        ({"complete": False}, "unfinished run"),
        ({"schema_version": 99}, "schema_version 1, got 99"),
        ({"storage": "fp4"}, "fields of other types"),
        ({"dimension": 8}, r"expected \(D, dtype, texts, vectors\) \(8,"),
    ):
        shutil.copy(tmp_path / "t/manifest.json", unfinished)
        edit(unfinished / "manifest.json", **change)
        refused(DataError, message, lambda: r.open_tokens(unfinished).shard(0))


def test_sparse_and_token_vectors_are_told_apart(tmp_path: Path, make_vectors: Any) -> None:
    from tilefold.retrieval import SparseVectorWriter, VectorManifest, write_vectors

    store_of([make([3])], tmp_path / "t")
    write_vectors(make_vectors(3), tmp_path / "s")
    for call, message in (
        (
            lambda: r.read_vectors(tmp_path / "t"),
            r"expected sparse vectors, got token vectors.*--rerank",
        ),
        (
            lambda: r.open_tokens(tmp_path / "s"),
            "expected token vectors of a multi-vector model, got sparse",
        ),
        (lambda: SparseVectorWriter(tmp_path / "t", VectorManifest(500)), "got token vectors"),
        (lambda: r.TokenVectorWriter(tmp_path / "s", r.TokenManifest(D, "fp16")), "got sparse"),
        (lambda: store_of([make([3], "int8")], tmp_path / "n"), r"expected D=16 in torch.float16"),
    ):
        refused(DataError, message, call)
    assert len(r.open_tokens(tmp_path / "t")) == 1
