"""The benchmark that trains a model of page images from scratch."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.page_retriever import (
    FIRST_TEST_SEED,
    FORMS,
    chance_ndcg,
    page_of_seed,
    query_of_page,
    run_once,
    save_collection,
)
from tilefold.retrieval import evaluate, load_collection
from tilefold.testing.synthetic_pages import random_words

SMALL = FORMS["small"]
VOCABULARY = random_words(SMALL.n_words)


def test_all_pages_with_the_words_of_a_query_are_relevant(tmp_path: Path) -> None:
    seeds = list(range(60))
    save_collection(SMALL, VOCABULARY, tmp_path, seeds, "test")
    collection = load_collection(tmp_path)
    pages = {f"{seed}.png": page_of_seed(SMALL, VOCABULARY, seed) for seed in seeds}
    assert list(collection.queries.values()) == [
        " ".join(query_of_page(pages[f"{seed}.png"].words, seed)) for seed in seeds
    ]
    for query_id, text in collection.queries.items():
        relevant = {name for name, page in pages.items() if {*text.split()} <= {*page.words}}
        assert collection.qrels["test"][query_id].keys() == relevant
    assert max(len(grades) for grades in collection.qrels["test"].values()) > 1


def test_chance_is_the_mean_over_all_orders() -> None:
    qrels = {"one": {"a": 1}, "two": {"a": 1, "c": 1}}
    pages = ["a", "b", "c", "d"]
    measured = []
    for order in itertools.permutations(pages):
        scores = {page: -float(rank) for rank, page in enumerate(order)}
        run = dict.fromkeys(qrels, scores)
        measured.append(evaluate(run, qrels, ["nDCG@10"])["nDCG@10"])
    expected = chance_ndcg(qrels, n_documents=len(pages))
    assert statistics.fmean(measured) == pytest.approx(expected)


@pytest.mark.slow
def test_a_model_that_was_trained_from_scratch_finds_unseen_pages(tmp_path: Path) -> None:
    form = replace(SMALL, steps=300, n_train=3000, n_test=100)
    test_seeds = range(FIRST_TEST_SEED, FIRST_TEST_SEED + form.n_test)
    save_collection(form, VOCABULARY, tmp_path / "train", range(form.n_train), "train")
    save_collection(form, VOCABULARY, tmp_path / "test", test_seeds, "test")
    outcome = run_once(form, tmp_path, fused=True)
    assert outcome.ndcg >= 0.6
    assert outcome.ndcg_untrained < 0.3
