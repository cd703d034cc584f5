"""Negatives drawn from rankings by hand, and those that score near a relevant document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data.mining import (
    FalseNegatives,
    Mined,
    Window,
    drop_false_negatives,
    mine_negatives,
)
from tilefold.retrieval.training_data.rows import TrainingRows

N_DOCUMENTS = 40
# Document d0 scores 40 and has rank 1, d39 scores 1 and has rank 40.
RANKING = {f"d{number}": float(N_DOCUMENTS - number) for number in range(N_DOCUMENTS)}


def number_of(document: str) -> int:
    """The number in an id such as ``d12``."""
    return int(document[1:])


def mined_collection() -> Collection:
    """Three queries: a with relevant documents, b with one that is not retrieved, c without.

    For query a, document d3 is relevant in the training split and d5 in the test split. Document d7
    is judged and not relevant, d8 has the text of d3, and d9 that of the query.
    """
    documents = {}
    for number in [*range(N_DOCUMENTS), 99]:
        documents[f"d{number}"] = Document(f"d{number}", "", f"text {number}")
    documents["d8"] = Document("d8", "", "text 3 ")
    documents["d9"] = Document("d9", "", "what is a")
    queries = {"a": "what is a", "b": "what is b", "c": "what is c"}
    qrels = {
        "train": {"a": {"d3": 2, "d7": 0}, "b": {"d99": 1}, "c": {"d1": 0}},
        "test": {"a": {"d5": 1}},
    }
    return Collection("made", documents, queries, qrels)


def mine(
    *windows: Window,
    ranking: Mapping[str, float] = RANKING,
    query: str = "a",
    **options: Any,
) -> Mined:
    """Mine the ranking of one query."""
    return mine_negatives([(query, ranking)], mined_collection(), "train", windows, **options)


def negatives_of(mined: Mined) -> list[str]:
    """The negatives of the only query that has some."""
    (group,) = mined.rows({}).groups()
    pairs = zip(group.documents, group.relevant, strict=True)
    return [name for name, is_relevant in pairs if not is_relevant]


def test_a_window_takes_its_ranks_without_relevant_documents_and_equal_texts() -> None:
    mined = mine(Window(3, 11, 20))
    assert negatives_of(mined) == ["d2", "d4", "d6", "d7", "d10"]
    assert mined.same_text == 2
    assert mined.short == 1
    assert mined.without == 0


def test_a_relevant_document_comes_first_and_all_have_ranks_and_scores() -> None:
    (group,) = mine(Window(3, 11, 20)).rows({}).groups()
    assert group.documents == ["d3", "d2", "d4", "d6", "d7", "d10"]
    assert group.rank.tolist() == [4, 3, 5, 7, 8, 11]
    assert group.retrieved.tolist() == [37.0, 38.0, 36.0, 34.0, 33.0, 30.0]


def test_equal_scores_are_ranked_in_the_order_of_the_run() -> None:
    mined = mine(Window(1, 2, 2), ranking={"d1": 1.0, "d2": 2.0, "d6": 1.0})
    assert negatives_of(mined) == ["d2", "d1"]


def test_windows_draw_by_seed_and_no_document_twice() -> None:
    windows = (Window(1, 20, 4), Window(1, 40, 10))
    drawn = negatives_of(mine(*windows, seed=1))
    assert len(set(drawn)) == 14
    assert drawn == sorted(drawn, key=number_of), "by rank"
    assert len([name for name in drawn if number_of(name) < 20]) >= 4
    assert negatives_of(mine(*windows, seed=1)) == drawn
    assert negatives_of(mine(*windows, seed=2)) != drawn


def test_negatives_of_a_query_do_not_depend_on_other_queries() -> None:
    windows = (Window(1, 20, 4), Window(1, 40, 10))
    rankings = [("b", RANKING), ("a", RANKING)]
    mined = mine_negatives(rankings, mined_collection(), "train", windows, seed=1)
    _, group_of_a = mined.rows({}).groups()
    assert group_of_a.documents[1:] == negatives_of(mine(*windows, seed=1))


def test_a_window_draws_every_document_equally_often() -> None:
    n_draws = 50
    draws = [set(negatives_of(mine(Window(1, 40, 20), seed=seed))) for seed in range(n_draws)]
    for number in range(N_DOCUMENTS):
        if number in (3, 5, 8, 9):  # relevant, or of an equal text
            continue
        share = sum(f"d{number}" in drawn for drawn in draws) / n_draws
        assert 0.3 < share < 0.85, "20 of 36 documents are drawn"


@pytest.mark.parametrize(
    ("false_negatives", "best_negative"),
    [
        # The best relevant document, d3, scores 37.
        pytest.param(FalseNegatives(margin=10), "d13", id="at most 27"),
        pytest.param(FalseNegatives(max_share=0.5), "d22", id="at most 18.5"),
        pytest.param(FalseNegatives(margin=10, max_share=0.5), "d22", id="at most both"),
        pytest.param(FalseNegatives(margin=0), "d4", id="at most 37"),
    ],
)
def test_documents_that_score_near_the_best_relevant_one_are_left_out(
    false_negatives: FalseNegatives,
    best_negative: str,
) -> None:
    mined = mine(Window(1, N_DOCUMENTS, N_DOCUMENTS), false_negatives=false_negatives)
    assert negatives_of(mined)[0] == best_negative
    better_documents = set(range(number_of(best_negative)))
    assert mined.filtered == len(better_documents - {3, 5}), "all but the relevant ones"


def test_a_query_whose_negatives_are_all_left_out_is_counted() -> None:
    # Its relevant document was not retrieved, so that every document scores above it.
    mined = mine(Window(1, 5, 2), query="b", false_negatives=FalseNegatives(margin=0))
    assert mined.queries == []
    assert mined.without == 1
    assert mined.filtered == N_DOCUMENTS


def test_a_relevant_document_that_was_not_retrieved_has_no_rank_and_score() -> None:
    (group,) = mine(Window(1, 5, 2), query="b").rows({}).groups()
    assert group.documents[0] == "d99"
    assert group.rank[0] == 0
    assert math.isnan(group.retrieved[0])


def test_queries_without_a_relevant_document_are_left_out() -> None:
    assert mine(Window(1, 5, 2), query="c").queries == []
    assert mine(Window(1, 5, 2), query="elsewhere").without == 0


@pytest.fixture
def scored_rows() -> TrainingRows:
    """Query a with documents p (relevant), x and y; query b with p (relevant) and x."""
    return TrainingRows(
        queries=["a", "b"],
        documents=["p", "x", "y"],
        offsets=np.array([0, 3, 5]),
        document=np.array([0, 1, 2, 0, 1], np.int32),
        relevant=np.array([1, 0, 0, 1, 0], bool),
        rank=np.zeros(5, np.int32),
        retrieved=np.full(5, np.nan, np.float32),
        made_by={"split": "train"},
        teachers={"t": np.zeros(5, np.float32)},
        target=np.array([10, 9.6, 9.5, 3, 3], np.float32),
    )


def test_scores_of_teachers_leave_out_false_negatives(scored_rows: TrainingRows) -> None:
    filtered = drop_false_negatives(scored_rows, FalseNegatives(max_share=0.95))
    (group,) = filtered.groups()
    assert group.query == "a", "query b has no negative left"
    assert group.documents == ["p", "y"]


def test_a_margin_that_no_negative_passes_is_refused(scored_rows: TrainingRows) -> None:
    message = "none of 3 negatives passes margin=5 and max_share=None"
    with pytest.raises(ValueError, match=message):
        drop_false_negatives(scored_rows, FalseNegatives(margin=5))


def test_a_share_of_a_negative_score_is_refused(scored_rows: TrainingRows) -> None:
    assert scored_rows.target is not None
    scored_rows.target -= 20
    message = "best relevant document of query 'a' scores -10"
    with pytest.raises(ValueError, match=message):
        drop_false_negatives(scored_rows, FalseNegatives(max_share=0.95))


@pytest.mark.parametrize(
    ("first", "last", "count", "message"),
    [
        pytest.param(0, 5, 1, "got 0-5", id="rank 0"),
        pytest.param(6, 5, 1, "got 6-5", id="last rank before the first"),
        pytest.param(1, 5, 0, "at least 1 negative", id="no negatives"),
    ],
)
def test_wrong_windows_are_refused(first: int, last: int, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Window(first, last, count)


def test_wrong_limits_of_false_negatives_are_refused() -> None:
    with pytest.raises(ValueError, match="margin: expected"):
        FalseNegatives(margin=-1)
    with pytest.raises(ValueError, match=r"\(0, 1\], got 1.5"):
        FalseNegatives(max_share=1.5)


def test_mining_needs_a_window_and_documents_of_the_collection() -> None:
    with pytest.raises(ValueError, match="windows: expected at least one"):
        mine()
    with pytest.raises(DataError, match="document 'x' of query 'a' is not in made"):
        mine(Window(1, 5, 2), ranking={"x": 1.0})
