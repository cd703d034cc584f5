"""Seismic keeps weights of any size to one part in a thousand, although it stores 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilefold import retrieval as r
from tilefold.retrieval.index._half_weights import HalfWeights
from tilefold.retrieval.vectors.sparse import SparseVectors

pytest.importorskip("seismic")
EXHAUSTIVE = {"heap_factor": 0.0, "query_cut": 1000, "n_postings": 10_000}
N_DOCUMENTS, VOCABULARY, TERMS = 300, 50, 8


def random_vectors(low: float, high: float, prefix: str = "d", seed: int = 0) -> SparseVectors:
    """Vectors with weights whose decimal exponents are uniform in [low, high]."""
    generator = np.random.default_rng(seed)
    terms = [
        np.sort(generator.choice(VOCABULARY, TERMS, replace=False)) for _ in range(N_DOCUMENTS)
    ]
    weights = 10.0 ** generator.uniform(low, high, N_DOCUMENTS * TERMS)
    return SparseVectors(
        [f"{prefix}{row}" for row in range(N_DOCUMENTS)],
        np.arange(N_DOCUMENTS + 1) * TERMS,
        np.concatenate(terms),
        weights.astype(np.float32),
        VOCABULARY,
        "fingerprint",
    )


def single_term_queries() -> SparseVectors:
    names = [f"q{term}" for term in range(VOCABULARY)]
    return SparseVectors.from_torch(names, torch.eye(VOCABULARY), "fingerprint")


def scores_of(index: Any, queries: SparseVectors, **options: Any) -> list[dict[str, float]]:
    return [dict(hits) for hits in index.search(queries, N_DOCUMENTS, **options)]


def check(index: Any, exact: Any, **options: Any) -> None:
    """The same documents as of exact search, with scores within 1e-3."""
    for queries in (single_term_queries(), random_vectors(-3, 1, "q", seed=9).take(range(20))):
        expected = scores_of(exact, queries, **options)
        assert scores_of(index, queries, **options) == [
            pytest.approx(row, rel=1e-3, abs=0) for row in expected
        ]
        hits = [hit for row in index.search(queries, 5, **options) for hit in row]
        assert min(hit.score for hit in hits) > 0


@pytest.mark.parametrize(
    ("low", "high"),
    [
        pytest.param(-3, 0.5, id="usual"),
        pytest.param(-8, -6, id="all tiny"),
        pytest.param(-20, -14, id="far below 16 bits"),
        pytest.param(-7, 0.5, id="some tiny"),
        pytest.param(-15, 4.5, id="too wide for one scale"),
        pytest.param(4, 7, id="above the largest of 16 bits"),
        pytest.param(-12, 8, id="too small and too large"),
    ],
)
def test_scores_are_within_a_thousandth_whatever_the_size_of_weights(
    low: float,
    high: float,
    tmp_path: Path,
) -> None:
    vectors = random_vectors(low, high)
    metadata = {name: {"even": int(name[1:]) % 2 == 0} for name in vectors.ids}
    exact = r.build_index(vectors, metadata=metadata)
    index = r.build_index(vectors, "seismic", metadata=metadata, **EXHAUSTIVE)
    check(index, exact)
    check(index, exact, where={"even": True})
    index.save(tmp_path / "index")
    loaded: Any = r.load_index(tmp_path / "index")
    check(loaded, exact)
    stored = loaded.stored()
    assert np.array_equal(stored.indices, vectors.indices)
    np.testing.assert_allclose(stored.data, vectors.data, rtol=1e-3)


def test_an_updated_index_keeps_small_weights(tmp_path: Path) -> None:
    first, second = random_vectors(-15, 4.5), random_vectors(-15, 4.5, "e", seed=1)
    r.build_index(first, "seismic", **EXHAUSTIVE).save(tmp_path / "index")
    r.update_index(tmp_path / "index", second)
    exact = r.build_index(SparseVectors.concatenate([first, second]))
    for _ in ("segments", "merged"):
        index = r.load_index(tmp_path / "index")
        queries = single_term_queries()
        rows = index.search(queries, 2 * N_DOCUMENTS)
        expected = exact.search(queries, 2 * N_DOCUMENTS)
        assert [dict(row) for row in rows] == [
            pytest.approx(dict(row), rel=1e-3, abs=0) for row in expected
        ]
        r.merge_segments(tmp_path / "index")


def test_a_document_whose_weights_are_all_too_small_is_found() -> None:
    rows = {"large": {0: 6e4, 1: 1.0}, "tiny": {1: 1e-12, 2: 1e-12}}
    vectors = SparseVectors.from_rows(rows, 3, "fingerprint")
    index = r.build_index(vectors, "seismic")
    query = SparseVectors.from_rows({"q": {1: 1.0, 2: 1.0}}, 3, "fingerprint")
    (hits,) = index.search(query, 5)
    assert hits == [("large", 1.0), ("tiny", pytest.approx(2e-12, rel=1e-6, abs=0))]
    alone = SparseVectors.from_rows({"q": {2: 1.0}}, 3, "fingerprint")
    assert [hit.id for hit in index.search(alone, 5)[0]] == ["tiny"]


def test_a_product_that_underflows_is_no_hit() -> None:
    vectors = SparseVectors.from_rows({"a": {0: 1e-30}, "b": {1: 1.0}}, 2, "fingerprint")
    query = SparseVectors.from_rows({"q": {0: 1e-30}}, 2, "fingerprint")
    for backend in ("exact", "seismic"):
        assert r.build_index(vectors, backend).search(query, 5) == [[]]


def test_weights_that_suit_16_bits_are_stored_as_they_are() -> None:
    vectors = random_vectors(-3, 0.5)
    half_weights, scaled = HalfWeights.split(vectors)
    assert half_weights.is_default
    assert scaled is vectors
