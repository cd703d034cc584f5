"""Queries that are documents as well: their own hits are left out, as by BEIR, and are counted."""

from __future__ import annotations

from typing import Any

import pytest

from tilefold import retrieval as r
from tilefold.retrieval.common.identical_ids import (
    SearchWithoutIdenticalIds,
    without_identical_ids,
)
from tilefold.retrieval.evaluation.measures import choose_weights, conventions
from tilefold.retrieval.training_data.mining import FalseNegatives, Window

# as in ArguAna: a query finds itself first, then its counter-argument
RUN = {
    "a": {"a": 9.0, "b": 5.0, "c": 1.0},
    "b": {"b": 9.0, "a": 5.0, "c": 1.0},
    "other": {"b": 2.0, "c": 1.0},
}
QRELS = {"a": {"b": 1}, "b": {"a": 1}, "other": {"b": 1}}
TEXTS = {
    "a": "tea should be hot with milk",
    "b": "tea should be cold without milk",
    "c": "tea ships sail with milk",
    "d": "boats sail",
}


def test_measures_follow_beir_by_default() -> None:
    assert r.evaluate(RUN, QRELS, ["nDCG@10"])["nDCG@10"] == pytest.approx(1.0)
    counted = r.evaluate(RUN, QRELS, ["nDCG@10"], ignore_identical_ids=False)["nDCG@10"]
    assert counted == pytest.approx((2 * 0.6309 + 1) / 3, abs=1e-4)
    table = r.evaluate_per_query(RUN, QRELS, ["RR@10"])
    assert {query: row["RR@10"] for query, row in table.items()} == {"a": 1, "b": 1, "other": 1}
    assert RUN["a"]["a"] == 9.0, "the caller's run is unchanged"


def test_a_judgement_that_calls_the_query_relevant_counts_its_hit() -> None:
    """Queries and documents that are numbered independently share ids by chance."""
    qrels = QRELS | {"a": {"a": 1}}
    assert r.evaluate(RUN, qrels, ["RR@10"])["RR@10"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert conventions(RUN, qrels)["counted_identical_ids"] == 2
    ignored = r.evaluate(RUN, qrels, ["RR@10"], ignore_identical_ids=True)["RR@10"]
    assert ignored == pytest.approx((0 + 1 + 1) / 3)


def test_conventions_count_ignored_hits_and_look_at_the_others() -> None:
    actual = conventions(RUN, QRELS)
    assert actual["ignored_identical_ids"] == 2
    assert actual["counted_identical_ids"] == 0
    assert actual["judged@10"] == pytest.approx(1 / 2)
    counted = conventions(RUN, QRELS, ignore_identical_ids=False)
    assert counted["judged@10"] == pytest.approx((1 / 3 + 1 / 3 + 1 / 2) / 3)
    assert counted["counted_identical_ids"] == 2


def test_weights_are_chosen_without_hits_of_the_query_itself() -> None:
    """Its own hit would press all others together where scores are normalised."""
    good = {"a": {"a": 1000.0, "b": 3.0, "c": 1.0}}
    bad = {"a": {"c": 3.0, "b": 2.0, "d": 1.0}}
    weights, value = choose_weights([good, bad], {"a": {"b": 1}}, step=0.5)
    without, same = choose_weights([without_identical_ids(good), bad], {"a": {"b": 1}}, step=0.5)
    assert (weights, value) == (without, same) == ((1.0, 0.0), 1.0)


def test_a_search_finds_as_many_others_also_among_passages() -> None:
    ranked = ["q#1", "q#2", "q#3", "x#1", "y#1"]
    depths = []

    def search(n: int) -> r.Run:
        depths.append(n)
        return {"q": {name: 9.0 - rank for rank, name in enumerate(ranked[:n])}}

    others = SearchWithoutIdenticalIds(search, lambda name: name.partition("#")[0])
    assert list(others(2)["q"]) == ["x#1", "y#1"]
    assert depths == [3, 6]
    assert others.ignored == {"q"}
    assert list(others(9)["q"]) == ["x#1", "y#1"], "there are no more"


@pytest.mark.parametrize("feedback", [None, r.Feedback(depth=1)], ids=["plain", "feedback"])
def test_a_searcher_leaves_the_document_out_of_results_and_of_feedback(feedback: Any) -> None:
    searcher = r.Searcher(r.BM25Index.build(TEXTS))
    queries = {"a": TEXTS["a"], "q": TEXTS["a"]}
    ranking = searcher.rank(queries, r.SearchRequest(2, feedback, ignore_identical_ids=True))
    assert ranking.ignored_identical_ids == {"a"}
    assert "a" not in ranking.run["a"]
    assert len(ranking.run["a"]) == 2
    assert next(iter(ranking.run["q"])) == "a", "another query finds it"
    if feedback is not None:
        without = r.Searcher(r.BM25Index.build({n: t for n, t in TEXTS.items() if n != "a"}))
        expected = without.rank({"a": TEXTS["a"]}, r.SearchRequest(2, feedback)).run["a"]
        assert list(ranking.run["a"]) == list(expected)


def test_a_second_ranking_leaves_the_document_out() -> None:
    index = r.BM25Index.build(TEXTS)
    request = r.SearchRequest(2, fusion=r.Fusion(), ignore_identical_ids=True)
    for second in (index, {"a": {"a": 9.0, "c": 1.0}}):
        ranking = r.Searcher(index, second=second).rank({"a": TEXTS["a"]}, request)
        assert "a" not in ranking.run["a"]
        assert "a" not in ranking.stages["words"]["a"]


def test_no_query_is_mined_as_its_own_negative() -> None:
    documents = {name: r.Document(name, "title", text) for name, text in TEXTS.items()}
    queries = {"a": TEXTS["a"]}
    collection = r.Collection("arguments", documents, queries, {"train": {"a": {"b": 1}}})
    rankings = [("a", {"a": 9.0, "b": 5.0, "c": 1.0, "d": 0.5})]
    mined = r.mine_negatives(
        rankings,
        collection,
        "train",
        [Window(1, 4, 3)],
        false_negatives=FalseNegatives(),
    )
    assert [name for name, relevant, *_ in mined.mined_rows if not relevant] == ["c", "d"]
    assert mined.same_id == 1


def test_passages_of_the_document_with_the_id_of_the_query_are_no_negatives() -> None:
    documents = {
        "a": r.Document("a", "", "one two three four five six"),
        "b": r.Document("b", "", "seven eight nine"),
    }
    queries = {"a": "one six"}
    full = r.Collection("c", documents, queries, {"train": {"a": {"b": 1}}})
    cut = r.training_passages(r.Passages(3), full)
    assert len(cut.documents) == 3
    scores = {name: float(number) for number, name in enumerate(cut.documents)}
    mined = r.mine_negatives({"a": scores}.items(), cut, "train", [r.Window(1, 3, 3)])
    assert mined.same_id == 2
    assert mined.without == 1
