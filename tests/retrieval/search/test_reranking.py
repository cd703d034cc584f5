"""Reranking by late interaction: MaxSim of stored vectors, and the order of other candidates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.retrieval.vectors.token_vectors import (
    DIMENSION,
    random_token_vectors,
    unit_rows,
    write_store,
)
from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError

# Products of unit vectors are summed in fp32. The error is the rounding of entries on both sides.
FP16_BUDGET = 2 * 2.0**-11
INT8_BUDGET = 2 * 0.5 / 127


def maxsim_score(query: torch.Tensor, document: torch.Tensor) -> float:
    """MaxSim in float64 of tokens ``[Lq, D]`` and ``[Ld, D]``."""
    return float((query.double() @ document.double().T).amax(dim=1).sum())


def score_budget(storage: str, n_query_tokens: int) -> float:
    """The error of a score that rounding allows."""
    if storage == "fp16":
        return n_query_tokens * 1e-6
    # int8 rounds the entries of the query too; a similarity is a sum of DIMENSION products.
    return n_query_tokens * math.sqrt(DIMENSION) * INT8_BUDGET


@pytest.mark.parametrize("storage", ["fp16", "int8"])
def test_reranking_a_store_gives_the_maxsim_of_the_stored_vectors(
    tmp_path: Path,
    storage: str,
) -> None:
    first = random_token_vectors([3, 1, 7], storage)
    second = random_token_vectors([5, 2], storage, "e", 100)
    store = write_store([first, second], tmp_path, storage)
    documents = r.TokenVectors.concatenate([first, second])
    queries = random_token_vectors([4, 1, 6], "fp16", "q", 500)
    candidates = {name: float(row) for row, name in enumerate(documents.ids)}
    run = dict.fromkeys(queries.ids, candidates)

    reranked = r.rerank(run, queries, store)
    reranked_in_memory = r.rerank(run, queries, documents)
    by_mean = r.rerank(run, queries, store, reduction="mean")

    for query_row, query in enumerate(queries.ids):
        tokens = queries.rows(query_row)
        scores = reranked[query]
        expected = {}
        for row, name in enumerate(documents.ids):
            expected[name] = maxsim_score(tokens, documents.rows(row))
        assert scores == pytest.approx(expected, abs=score_budget(storage, len(tokens)))
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        assert reranked_in_memory[query] == pytest.approx(scores, abs=1e-5)
        mean_scores = {name: score / len(tokens) for name, score in scores.items()}
        assert by_mean[query] == pytest.approx(mean_scores, rel=1e-5)


@pytest.fixture
def documents() -> r.TokenVectors:
    """Four documents, of which d1 has no tokens."""
    return random_token_vectors([3, 0, 4, 2])


@pytest.fixture
def store(documents: r.TokenVectors, tmp_path: Path) -> r.TokenStore:
    """A store of ``documents``; a document called ``lost`` could not be encoded."""
    return write_store([documents], tmp_path, failed={"lost": "RuntimeError: tokenizer gave up"})


@pytest.fixture
def query() -> r.TokenVectors:
    return random_token_vectors([4], prefix="q", seed=9)


CANDIDATES = {"lost": 9.0, "d1": 8.0, "d0": 7.0, "d2": 6.0, "d3": 5.0}


def test_candidates_below_the_depth_and_without_vectors_follow_in_their_first_order(
    documents: r.TokenVectors,
    store: r.TokenStore,
    query: r.TokenVectors,
) -> None:
    scores = r.rerank({"q0": CANDIDATES}, query, store, depth=4)["q0"]

    score_of_d0 = maxsim_score(query.rows(0), documents.rows(0))
    score_of_d2 = maxsim_score(query.rows(0), documents.rows(2))
    scored = ["d0", "d2"] if score_of_d0 > score_of_d2 else ["d2", "d0"]
    assert list(scores) == [*scored, "lost", "d1", "d3"]
    # Their scores fall, also in fp32, as trec_eval reads them, but by little.
    lowest_maxsim = scores[scored[-1]]
    tail = torch.tensor([lowest_maxsim, scores["lost"], scores["d1"], scores["d3"]])
    assert bool((tail.diff() < 0).all())
    largest_score = max(abs(score) for score in scores.values())
    assert lowest_maxsim - scores["d3"] <= 4 * 2**-21 * largest_score

    dropped = r.rerank({"q0": CANDIDATES}, query, store, depth=4, tail="drop")["q0"]
    assert dropped == {name: scores[name] for name in scored}


def test_a_query_without_candidates_that_have_vectors(
    store: r.TokenStore,
    query: r.TokenVectors,
) -> None:
    assert list(r.rerank({"q0": {"lost": 1.0}}, query, store)["q0"]) == ["lost"]
    assert r.rerank({"q0": {"lost": 1.0}}, query, store, tail="drop") == {"q0": {}}
    assert r.rerank({"q0": {}}, query, store) == {"q0": {}}
    assert r.rerank({}, query, store) == {}


def test_a_query_without_token_vectors_is_refused(
    store: r.TokenStore,
    query: r.TokenVectors,
) -> None:
    with pytest.raises(DataError, match="no token vectors of 'nothing'"):
        r.rerank({"q0": CANDIDATES, "nothing": {}}, query, store)


def test_equal_maxsim_scores_keep_the_first_order(query: r.TokenVectors) -> None:
    equal = r.TokenVectors.pack(["b", "a", "c"], [unit_rows(2, seed=1)] * 3, DIMENSION, "fp16")
    reranked = r.rerank({"q0": {"a": 1.0, "c": 3.0, "b": 2.0}}, query, equal)
    assert list(reranked["q0"]) == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"depth": 0}, "depth: expected at least 1", id="depth of 0"),
        pytest.param(
            {"tail": "cut"},
            "tail: expected one of keep, drop, got 'cut'",
            id="unknown tail",
        ),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any],
    message: str,
    documents: r.TokenVectors,
    query: r.TokenVectors,
) -> None:
    with pytest.raises(ValueError, match=message):
        r.rerank({"q0": {"d0": 1.0}}, query, documents, **options)


def test_a_candidate_without_vectors_is_refused(
    documents: r.TokenVectors,
    query: r.TokenVectors,
) -> None:
    message = r"no token vectors of candidate 'd0' \(1 of 1 candidates"
    with pytest.raises(ValueError, match=message):
        r.rerank({"q0": {"d0": 1.0}}, query, documents.take([3]))


def test_queries_that_do_not_fit_the_documents_are_refused(documents: r.TokenVectors) -> None:
    run = {"q0": {"d0": 1.0}}
    of_another_dimension = r.TokenVectors.pack(["q0"], [torch.ones(2, 24)], 24, "fp16")
    of_int8 = random_token_vectors([4], "int8", "q")
    with pytest.raises(ValueError, match=r"queries' dimension 24, got 16.*same model"):
        r.rerank(run, of_another_dimension, documents)
    with pytest.raises(ValueError, match="got int8"):
        r.rerank(run, of_int8, documents)


def test_a_query_with_nan_is_refused() -> None:
    with_nan = r.TokenVectors(["q0"], torch.tensor([0, 1]), torch.full((1, DIMENSION), math.nan))
    document = r.TokenVectors(["d0"], torch.tensor([0, 1]), torch.ones(1, DIMENSION))
    with pytest.raises(ValueError, match="expected finite token vectors"):
        r.rerank({"q0": {"d0": 1.0}}, with_nan, document)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["fp16", "int8"])
def test_a_gpu_scores_as_the_cpu_does(tmp_path: Path, storage: str) -> None:
    first = random_token_vectors([30, 1, 70], storage)
    second = random_token_vectors([5, 200], storage, prefix="e", seed=7)
    store = write_store([first, second], tmp_path, storage)
    queries = random_token_vectors([32, 4], prefix="q", seed=9)
    run = {query: dict.fromkeys(store.ids, 0.0) for query in queries.ids}
    by_cpu = r.rerank(run, queries, store, device="cpu")
    by_gpu = r.rerank(run, queries, store, device="cuda")
    for query in queries.ids:
        assert by_cpu[query] == pytest.approx(by_gpu[query], abs=32 * FP16_BUDGET)
