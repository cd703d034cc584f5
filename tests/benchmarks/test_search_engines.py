"""The made vectors and the rows of the benchmark of search engines."""

from __future__ import annotations

import numpy as np

from benchmarks import search_engines
from tilefold.retrieval.index.protocol import Hit


def test_made_vectors_have_the_statistics_that_the_benchmark_states() -> None:
    rng = np.random.default_rng(0)
    documents = search_engines.made_documents(500, rng)
    terms = np.diff(documents.indptr)
    assert 100 < terms.mean() <= search_engines.TERMS and documents.vocab_size == 30_522
    assert all(np.all(np.diff(documents.row(row)[0]) > 0) for row in range(500))
    queries = search_engines.made_queries(documents, 20, rng)
    assert 25 < np.diff(queries.indptr).mean() <= search_engines.QUERY_TERMS


def test_exact_search_is_measured_and_repeats_itself() -> None:
    (first,) = search_engines.measure(400, 10, [0.7], ["exact"])
    (again,) = search_engines.measure(400, 10, [0.7], ["exact"])
    assert first["recall_at_10"] == 1.0 and first["p50_ms"] > 0 and first["disk_mib"] == again["disk_mib"]


def test_recall_counts_ties_for_either_and_misses_for_none() -> None:
    best = [Hit("a", 3.0), Hit("b", 2.0)]
    assert search_engines.recall([best], [[Hit("a", 3.0), Hit("c", 2.0)]]) == 1.0
    assert search_engines.recall([best], [[Hit("a", 3.0), Hit("c", 1.0)]]) == 0.5
    assert search_engines.recall([best], [[]]) == 0.0
