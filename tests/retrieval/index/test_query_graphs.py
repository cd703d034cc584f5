"""Graphs of single queries: when they are captured, who uses them, and that results are the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tilefold.retrieval import SparseVectors
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.exact import ExactIndex
from tilefold.retrieval.index.on_device import DeviceIndex
from tilefold.retrieval.index.query_graphs import MAX_GRAPHS, SEARCHES_BEFORE_CAPTURE, GraphPool

MakeVectors = Callable[..., SparseVectors]
GPU = torch.device("cuda")
KIND = "one kind of search"


def pool_after_first_searches(kind: str = KIND) -> GraphPool[object]:
    """Return a pool that captures a graph for the next search of a kind."""
    pool: GraphPool[object] = GraphPool(GPU)
    for _ in range(SEARCHES_BEFORE_CAPTURE):
        assert pool.take(kind, object) is None
    return pool


def test_a_graph_is_captured_after_a_few_searches_and_lent_again() -> None:
    pool = pool_after_first_searches()
    graph = pool.take(KIND, object)
    assert graph is not None
    pool.give_back(KIND, graph)
    assert pool.take(KIND, object) is graph


def test_a_graph_in_use_is_not_lent_to_another_search() -> None:
    pool = pool_after_first_searches()
    graphs = [pool.take(KIND, object) for _ in range(MAX_GRAPHS)]
    assert None not in graphs
    assert len(set(map(id, graphs))) == MAX_GRAPHS
    assert pool.take(KIND, object) is None


def test_other_kinds_of_searches_get_other_graphs() -> None:
    pool = pool_after_first_searches()
    graph = pool.take(KIND, object)
    assert graph is not None
    pool.give_back(KIND, graph)
    assert pool.take("another kind", object) is None


def test_a_failed_capture_is_reported_once_and_searches_go_on_without_graphs() -> None:
    pool = pool_after_first_searches()

    def fail() -> object:
        raise RuntimeError("out of memory")

    with pytest.warns(UserWarning, match="without CUDA graphs, .* out of memory"):
        assert pool.take(KIND, fail) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pool.take(KIND, fail) is None


def test_a_cpu_has_no_graphs() -> None:
    pool: GraphPool[object] = GraphPool(torch.device("cpu"))
    for _ in range(SEARCHES_BEFORE_CAPTURE + 1):
        assert pool.take(KIND, object) is None


@pytest.mark.gpu
@pytest.mark.parametrize("n_removed", [0, 5])
def test_graphs_find_the_same_bits_in_all_threads(
    n_removed: int,
    make_vectors: MakeVectors,
) -> None:
    documents = make_vectors(300)
    queries = make_vectors(20, seed=1, prefix="q")
    exact_index = ExactIndex.build(documents)
    present = np.arange(300) >= n_removed
    index = DeviceIndex(documents.ids, exact_index.postings(), exact_index, GPU, present)
    singles = [queries.take([row]) for row in range(20)]
    dense = torch.zeros(20, queries.vocab_size, device=GPU)
    for row in range(20):
        terms, weights = queries.row(row)
        dense[row, terms.tolist()] = torch.from_numpy(weights.copy()).to(GPU)
    expected_hits = index.search(queries, 9)
    expected_scores, expected_positions = index.search_tensor(dense, 9)

    def search_all(first: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(200):
                row = (first + turn) % 20
                assert index.search(singles[row], 9) == [expected_hits[row]]
                scores, positions = index.search_tensor(dense[row : row + 1], 9)
                assert torch.equal(scores[0], expected_scores[row])
                assert torch.equal(positions[0], expected_positions[row])

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(search_all, range(6)))
    assert index._graphs._n_graphs == MAX_GRAPHS


@pytest.mark.gpu
def test_graphs_refuse_wrong_weights_and_queries_on_the_cpu(make_vectors: MakeVectors) -> None:
    index = ExactIndex.build(make_vectors(300)).on("cuda")
    query = torch.zeros(1, index.vocab_size, device=GPU)
    query[0, 3] = 1.0
    expected, _ = index.search_tensor(query, 5)
    for _ in range(SEARCHES_BEFORE_CAPTURE + 1):
        wrong = query.clone()
        wrong[0, 7] = float("nan")
        with pytest.raises(DataError, match="got nan for query 0"):
            index.search_tensor(wrong, 5)
        with pytest.raises(ValueError, match="queries must be on the device of postings"):
            index.search_tensor(query.cpu(), 5)
        scores, _ = index.search_tensor(query, 5)
        assert torch.equal(scores, expected)
    assert index._graphs._n_graphs == 1
