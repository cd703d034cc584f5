"""Measures of rankings and of sparsity against computations by hand; input that is refused."""

from __future__ import annotations

import math
import re
import shutil
from typing import Any

import ir_measures
import numpy as np
import pytest

from tilefold import retrieval as r
from tilefold.retrieval.errors import VocabularyMismatchError
from tilefold.retrieval.evaluation.measures import check_measures, choose_weights, usual_names

RUN = {"q": {"a": 1.0}}
QRELS = {"q": {"a": 1}}
TEN_DOCUMENTS = {f"d{position}": 10.0 - position for position in range(10)}


def test_evaluation_follows_the_hand_computation() -> None:
    qrels = {"q1": {"a": 1}, "q2": {"b": 2, "c": 1}, "no hits": {"a": 1}}
    run = {"q1": {"x": 2.0, "a": 1.0}, "q2": {"b": 3.0}, "not judged": {"a": 1.0}}

    rows = r.evaluate_per_query(run, qrels)

    assert rows["q1"] == pytest.approx({"nDCG@10": 1 / math.log2(3), "R@100": 1.0, "RR@10": 0.5})
    ideal_gain_of_q2 = 2 + 1 / math.log2(3)
    assert rows["q2"] == pytest.approx(
        {"nDCG@10": 2 / ideal_gain_of_q2, "R@100": 0.5, "RR@10": 1.0},
    )
    assert rows["no hits"] == {"nDCG@10": 0.0, "R@100": 0.0, "RR@10": 0.0}
    assert r.evaluate(run, qrels)["RR@10"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)


def test_measures_are_reported_in_the_order_and_under_the_names_of_the_call() -> None:
    run = {"q": {"x": 2.0, "a": 1.0}}
    assert list(r.evaluate(run, QRELS, ["AP", "nDCG@10"])) == ["AP", "nDCG@10"]
    values = r.evaluate(run, QRELS, ["RR@10", "MRR@10"])
    assert values == pytest.approx({"RR@10": 0.5, "MRR@10": 0.5})


def test_a_query_id_may_contain_a_space() -> None:
    values = r.evaluate({"no query": {"a": 1.0}}, {"no query": {"a": 1}})
    assert values == {"nDCG@10": 1.0, "R@100": 1.0, "RR@10": 1.0}


def test_an_empty_run_has_measures_of_zero() -> None:
    assert r.evaluate({}, QRELS) == {"nDCG@10": 0.0, "R@100": 0.0, "RR@10": 0.0}


def test_scores_and_grades_may_be_numbers_of_numpy() -> None:
    run: Any = {"q": {"a": np.float32(2.0), "b": np.float64(1.0)}}
    qrels: Any = {"q": {"b": np.int64(1)}}
    assert r.evaluate(run, qrels, ["RR"]) == {"RR": 0.5}


@pytest.mark.parametrize("grade", [-1, -2, -7])
def test_a_query_with_negative_grades_only_has_no_relevant_document(grade: int) -> None:
    run = dict.fromkeys(("a", "b", "c"), TEN_DOCUMENTS)
    measures = ["nDCG@10", "RR", "AP", "infAP", "Judged@10", "NumRet", "NumRel"]
    qrels = {
        "a": {"d0": 1, "d1": 2},
        "b": {"d1": grade, "d2": grade, "d3": grade},
        "c": {"d1": 1},
    }
    for _ in range(20):  # memory that an earlier evaluation left may show a fault
        rows = r.evaluate_per_query(run, qrels, measures)
    assert rows["b"] == dict.fromkeys(measures, 0.0) | {"Judged@10": 0.3, "NumRet": 10.0}
    assert rows["a"]["AP"] == 1.0
    assert rows["c"]["AP"] == 0.5
    _, mean_ap = choose_weights([run, run], qrels, measure="AP")
    assert mean_ap == pytest.approx((1.0 + 0.0 + 0.5) / 3)


def test_a_negative_grade_is_of_a_document_in_the_pool_that_was_not_judged() -> None:
    qrels = {"q": {"d0": -1, "d1": 1, "d2": -2, "d3": 1}}
    measures = ["AP", "P(judged_only=True)@2", "Judged@10", "infAP"]
    precision_at_d1 = 1 / 2 + 1 / 2 * 1 / 2
    precision_at_d3 = 1 / 4 + 3 / 4 * 3 / 3
    expected = {
        "AP": 0.5,
        "P(judged_only=True)@2": 1.0,
        "Judged@10": 0.4,
        "infAP": (precision_at_d1 + precision_at_d3) / 2,
    }
    assert r.evaluate({"q": TEN_DOCUMENTS}, qrels, measures) == pytest.approx(expected, abs=1e-4)


def test_chosen_weights_are_the_best_of_the_grid() -> None:
    qrels: dict[str, dict[str, int]] = {"q1": {"a": 1}, "q2": {"b": 1}}
    good_run = {"q1": {"a": 2.0, "b": 1.0, "c": 0.5}, "q2": {"b": 3.0, "a": 1.0, "c": 0.5}}
    bad_run = {"q1": {"b": 2.0, "c": 1.5, "a": 1.0}, "q2": {"a": 3.0, "c": 2.0, "b": 1.0}}
    weights, score = choose_weights((bad_run, good_run), qrels, step=0.5)
    assert weights == (0.0, 1.0)
    assert score == 1.0
    assert r.evaluate(good_run, qrels, ("nDCG@10",))["nDCG@10"] == 1.0


def test_a_grid_of_too_many_weights_is_refused() -> None:
    message = "expected 1 to 300 combinations of weights, got 1001 for 5 runs"
    with pytest.raises(ValueError, match=message):
        choose_weights([RUN] * 5, QRELS)


@pytest.mark.parametrize("step", [0.0, 0.3, math.nan, 2.0])
def test_a_step_that_does_not_divide_1_is_refused(step: float) -> None:
    with pytest.raises(ValueError, match="step: expected 1 divided by a whole"):
        choose_weights([RUN, RUN], QRELS, step=step)


def test_weights_are_not_chosen_for_a_run_of_other_queries() -> None:
    message = r"runs\[1\]: expected results for a judged query, but .* '2', .* '1'"
    with pytest.raises(ValueError, match=message):
        choose_weights([{"1": {"a": 1.0}}, {"2": {"a": 1.0}}], {"1": {"a": 1}})


@pytest.mark.parametrize(
    ("run", "qrels", "message"),
    [
        pytest.param(
            {"q": {"a\0b": 1.0}},
            QRELS,
            "run: expected ids that UTF-8 can encode, without zero bytes",
            id="id with a zero byte",
        ),
        pytest.param(
            {"q": {"a\ud800": 1.0}},
            QRELS,
            "run: expected ids that UTF-8 can encode, without zero bytes",
            id="id with half a surrogate pair",
        ),
        pytest.param(
            RUN,
            {"q": {"a": 1 << 62}},
            "qrels: expected grades between -1,000,000 and 1,000,000 for query 'q', got 4611686018",
            id="grade that overflows",
        ),
        pytest.param(
            RUN,
            {"q": {}},
            "judged query, got only queries without grades, such as 'q'",
            id="query without a grade",
        ),
        pytest.param(
            {"1": {"a": 1.0}},
            {"2": {"a": 1}},
            "its first query is '1', and the first judged query is '2'",
            id="run of other queries",
        ),
    ],
)
def test_input_that_would_crash_or_mislead_the_evaluating_library_is_refused(
    run: Any,
    qrels: Any,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        r.evaluate(run, qrels)


@pytest.mark.parametrize("score", [math.nan, "high", None, [1.0]])
def test_a_score_that_is_not_a_number_is_refused(score: Any) -> None:
    message = "run: expected a number as each score, got .* for 'a' of query 'q'"
    with pytest.raises(ValueError, match=message):
        r.evaluate({"q": {"a": score}}, QRELS)


def test_arguments_of_evaluation_of_another_type_are_refused() -> None:
    fractional_grades: Any = {"q": {"a": 1.5}}
    with pytest.raises(TypeError, match="measures: expected a list"):
        r.evaluate(RUN, QRELS, "nDCG@10")
    message = r"qrels: expected integer grades for query 'q', got 1\.5"
    with pytest.raises(TypeError, match=message):
        r.evaluate(RUN, fractional_grades)


@pytest.mark.skipif(shutil.which("perl") is None, reason="gdeval is a Perl program")
@pytest.mark.parametrize(
    ("document", "grade"),
    [
        pytest.param("a", 5, id="grade above 4"),
        pytest.param("a b", 1, id="id with a space"),
    ],
)
def test_what_gdeval_cannot_read_is_an_error_of_the_measures(document: str, grade: int) -> None:
    message = r"measures: .* failed with code .* up to 4, and ids without white space"
    with pytest.raises(ValueError, match=message):
        r.evaluate({"q": {document: 1.0}}, {"q": {document: grade}}, ["ERR@10"])


def test_the_deepest_cut_off_of_measures_is_how_many_documents_a_search_must_retrieve() -> None:
    assert check_measures(["nDCG@10", "R@500", "AP"]) == 500
    assert check_measures(["AP"]) == 0


@pytest.mark.parametrize(
    "name",
    [
        "best",
        "nDCG@0",
        "Success@0",
        "RR@0",
        "P@-1",
        "nDCG@2.5",
        "R(rel=0)@10",
        "IPrec@1.5",
        "alpha_nDCG@10",
        "ndgc@10",
    ],
)
def test_an_unknown_measure_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"such as nDCG@10.*got '" + re.escape(name)):
        check_measures(["nDCG@10", name])


@pytest.mark.parametrize(
    ("name", "usual_name"),
    [
        ("ndcg@10", "nDCG@10"),
        ("Ndcg@10", "nDCG@10"),
        ("MRR@10", "MRR@10"),
        ("recall@100", "R@100"),
        ("mrr@10", "RR@10"),
        ("map", "AP"),
        ("p(rel=2)@5", "P(rel=2)@5"),
        ("ndcg(gains={1:2})@10", "nDCG(gains={1:2})@10"),
        ("RR@10", "RR@10"),
    ],
)
def test_a_measure_is_read_in_any_case(name: str, usual_name: str) -> None:
    assert usual_names([name]) == [usual_name]
    assert r.evaluate(RUN, QRELS, [name]) == {
        name: r.evaluate(RUN, QRELS, [usual_name])[usual_name]
    }


def test_two_spellings_of_a_measure_have_one_usual_name() -> None:
    assert usual_names(["ndcg@10", "AP", "nDCG@10"]) == ["nDCG@10", "AP"]


def test_measures_whose_names_differ_in_case_only_are_the_same() -> None:
    registry = ir_measures.measures.registry
    measures_by_name: dict[str, set[str]] = {}
    for name, measure in registry.items():
        measures_by_name.setdefault(name.lower(), set()).add(str(measure))
    assert all(len(measures) == 1 for measures in measures_by_name.values())


def test_a_measure_with_a_gain_that_overflows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grades and gains must be at most 1,000,000"):
        check_measures(["nDCG(gains={1: 4611686018427387904})@10"])


def test_sparsity_figures_follow_the_hand_computation() -> None:
    documents = r.SparseVectors.from_rows(
        {"a": {0: 1.0, 1: 0.0}, "b": {0: 1.0, 2: 1.0}, "c": {}, "d": {2: 1.0}},
        4,
    )
    queries = r.SparseVectors.from_rows({"q": {0: 1.0}, "p": {0: 1.0, 2: 3.0}}, 4)
    assert r.active_terms(documents) == 1.0
    # Term 0 is in all queries and half of the documents, term 2 in half of both.
    assert r.flops(queries, documents) == pytest.approx(1.0 * 0.5 + 0.5 * 0.5)


def test_sparsity_figures_of_no_vectors_are_zero() -> None:
    no_vectors = r.SparseVectors.from_rows({}, 4)
    documents = r.SparseVectors.from_rows({"a": {0: 1.0}}, 4)
    assert r.active_terms(no_vectors) == 0.0
    assert r.flops(no_vectors, documents) == 0.0


def test_flops_of_vectors_of_different_vocabularies_are_refused() -> None:
    of_five_terms = r.SparseVectors.from_rows({}, 5)
    of_four_terms = r.SparseVectors.from_rows({"a": {0: 1.0}}, 4)
    message = "documents: expected the vocabulary of queries"
    with pytest.raises(VocabularyMismatchError, match=message):
        r.flops(of_five_terms, of_four_terms)
