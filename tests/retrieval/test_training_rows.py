"""Training rows: negatives drawn from rankings by hand, and rows on disk, which come back or are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recipes.small import small_collection
from tests.refusals import refused
from tilefold.retrieval.collection import Collection, Document
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.mining import FalseNegatives, Mined, Window, drop_false_negatives, mine_negatives
from tilefold.retrieval.provenance import texts_digest
from tilefold.retrieval.training_rows import TrainingRows, queries_of, read_training_rows, write_training_rows


def rows(**changed: Any) -> TrainingRows:
    """Query a: d1 (relevant, not retrieved) and d2; query b: d2."""
    values: dict[str, Any] = {
        "queries": ["a", "b"],
        "documents": ["d1", "d2"],
        "offsets": np.array([0, 2, 3]),
        "document": np.array([0, 1, 1], np.int32),
        "relevant": np.array([True, False, True]),
        "rank": np.array([0, 3, 1], np.int32),
        "retrieved": np.array([np.nan, 1.5, 2.5], np.float32),
        "made_by": {"split": "train"},
    }
    return TrainingRows(**values | changed)


SCORED: dict[str, Any] = {
    "teachers": {"small": np.array([1, 2, 3], np.float32)},
    "target": np.array([0, 30, 7], np.float32),
}


def test_what_is_written_comes_back_from_the_columns_of_the_table(tmp_path: Path) -> None:
    for number, kept in enumerate((rows(), rows(**SCORED))):
        file = tmp_path / f"{number}.parquet"
        write_training_rows(kept, file)
        back = read_training_rows(file)
        assert (back.queries, back.documents, back.made_by) == (kept.queries, kept.documents, kept.made_by)
        for name in ("offsets", "document", "relevant", "rank", "retrieved", "target"):
            np.testing.assert_array_equal(getattr(back, name), getattr(kept, name))
        assert back.teachers.keys() == kept.teachers.keys() and back.scored == kept.scored
    first, second = read_training_rows(tmp_path / "1.parquet").groups()
    assert (first.query, first.documents, second.documents) == ("a", ["d1", "d2"], ["d2"])
    assert first.target is not None and first.target.tolist() == [0, 30] and first.teachers["small"].tolist() == [1, 2]
    (left,) = rows(**SCORED).take(np.array([False, False, True])).groups()
    assert (left.query, left.documents, left.relevant.tolist()) == ("b", ["d2"], [True])
    assert pq.read_table(tmp_path / "0.parquet").to_pylist()[0] == {
        "query_id": "a", "document_id": "d1", "rank": None, "score": None, "relevant": True,
    }  # fmt: skip
    assert pq.read_table(file).to_pylist()[1] == {
        "query_id": "a", "document_id": "d2", "rank": 3, "score": 30.0, "relevant": False,
        "retriever_score": 1.5, "score:small": 2.0,
    }  # fmt: skip


def test_a_file_of_another_program_needs_three_columns_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "other.parquet"
    queries = pa.DictionaryArray.from_arrays(pa.array([2, 0, 2]), ["a", "never", "b"])
    table = {"query_id": queries, "document_id": ["x", "y", "z"], "relevant": [True, True, False]}
    pq.write_table(pa.table(table), file, row_group_size=2)
    back = read_training_rows(file)
    assert [(group.query, group.documents) for group in back.groups()] == [("b", ["x", "z"]), ("a", ["y"])]
    assert (
        back.queries == ["b", "a"]
        and not back.scored
        and back.rank.tolist() == [0, 0, 0]
        and np.isnan(back.retrieved).all()
    )


ROW = {"query_id": ["a"], "document_id": ["d"], "relevant": [True]}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"query_id": ["a"], "document_id": ["d"]}, r"got \['query_id', 'document_id'\] without 'relevant'"),
        (ROW | {"query_id": [1]}, "query_id: expected strings, got int64"),
        (ROW | {"relevant": [1]}, "relevant: expected true or false"),
        ({"query_id": ["a", "a"], "document_id": ["d", "d"], "relevant": [True, True]}, "'d' of query 'a' is given"),
        (ROW | {"score": [1.0], "score:t": [math.nan]}, "document 'd' of query 'a' has no finite score"),
        (ROW | {"score:t": [1.0]}, r"got \['query_id', .*\] without 'score'"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, table: Any, message: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=message) as caught:
        read_training_rows(tmp_path / "bad.parquet")
    assert "bad.parquet" in str(caught.value)


def test_no_file_and_no_parquet_are_refused(tmp_path: Path) -> None:
    refused(FileNotFoundError, "tilefold mine", read_training_rows, tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("query_id")
    refused(DataError, "expected Parquet", read_training_rows, tmp_path / "text.parquet")
    with pytest.raises(ValueError, match="at least one row, got an empty table"):
        write_training_rows(rows().take(np.zeros(3, bool)), tmp_path / "empty.parquet")


def test_rows_of_another_collection_are_refused() -> None:
    collection = small_collection()
    query, document = next(iter(collection.queries)), next(iter(collection.documents))
    one: dict[str, Any] = {"offsets": np.array([0, 1]), "document": np.zeros(1, np.int32), "relevant": np.ones(1, bool)}
    one |= {"rank": np.ones(1, np.int32), "retrieved": np.ones(1, np.float32), "queries": [query]}
    own = rows(**one, documents=[document], made_by={"texts_sha256": texts_digest(collection.contents())})
    own.made_by["queries_sha256"] = texts_digest(queries_of(own, collection))
    own.check_collection(collection)
    with pytest.raises(DataError, match="document 'elsewhere' is not in"):
        rows(**one, documents=["elsewhere"]).check_collection(collection)
    collection.queries[query] += " changed"
    refused(DataError, "other queries", own.check_collection, collection)


N = 40
RANKING = {f"d{i}": float(N - i) for i in range(N)}  # d0 scores 40 and has rank 1


def collection() -> Collection:
    """Query a: d3 is relevant in train, d5 in test, d7 is judged and not relevant; b: d99, which nothing finds."""
    documents = {f"d{i}": Document(f"d{i}", "", f"text {i}") for i in [*range(N), 99]}
    documents["d8"] = Document("d8", "", "text 3 ")  # that of d3
    documents["d9"] = Document("d9", "", "what is a")
    queries = {"a": "what is a", "b": "what is b", "c": "what is c"}
    qrels = {"train": {"a": {"d3": 2, "d7": 0}, "b": {"d99": 1}, "c": {"d1": 0}}, "test": {"a": {"d5": 1}}}
    return Collection("made", documents, queries, qrels)


def mine(*windows: Window, ranking: Mapping[str, float] = RANKING, query: str = "a", **options: Any) -> Mined:
    return mine_negatives([(query, ranking)], collection(), "train", windows, **options)


def negatives(mined: Mined) -> list[str]:
    (group,) = mined.rows({}).groups()
    return [name for name, relevant in zip(group.documents, group.relevant, strict=True) if not relevant]


def test_a_window_takes_its_ranks_without_what_is_relevant_or_has_its_text() -> None:
    mined = mine(Window(3, 11, 20))
    assert negatives(mined) == ["d2", "d4", "d6", "d7", "d10"]
    assert (mined.same_text, mined.short, mined.without) == (2, 1, 0)
    (group,) = mined.rows({}).groups()
    assert (group.documents[0], group.rank[0], group.retrieved[0]) == ("d3", 4, 37.0), "its relevant document, first"
    assert group.rank.tolist()[1:] == [3, 5, 7, 8, 11] and group.retrieved.tolist()[1] == 38.0
    assert negatives(mine(Window(1, 2, 2), ranking={"d1": 1.0, "d2": 2.0, "d6": 1.0})) == ["d2", "d1"], "ties in order"


def test_windows_draw_by_seed_and_never_twice() -> None:
    windows = (Window(1, 20, 4), Window(1, 40, 10))
    drawn = negatives(mine(*windows, seed=1))
    assert len(set(drawn)) == 14 and drawn == sorted(drawn, key=lambda name: int(name[1:])), "by rank"
    assert sum(int(name[1:]) < 20 for name in drawn) >= 4
    assert drawn == negatives(mine(*windows, seed=1)) != negatives(mine(*windows, seed=2))
    others = [("b", RANKING), ("a", RANKING)]
    both = mine_negatives(others, collection(), "train", windows, seed=1)
    assert [group.documents for group in both.rows({}).groups()][1][1:] == drawn, "whatever the other queries are"
    first = [set(negatives(mine(Window(1, 40, 20), seed=seed))) for seed in range(50)]
    often = [sum(f"d{i}" in found for found in first) / 50 for i in range(N) if i not in (3, 5, 8, 9)]
    assert min(often) > 0.3 and max(often) < 0.85, "20 of 36, each as likely as the others"


@pytest.mark.parametrize(
    ("false_negatives", "best"),
    [
        (FalseNegatives(margin=10), "d13"),  # d3 scores 37, so at most 27
        (FalseNegatives(max_share=0.5), "d22"),  # at most 18.5
        (FalseNegatives(margin=10, max_share=0.5), "d22"),
        (FalseNegatives(margin=0), "d4"),
    ],
)
def test_what_scores_near_the_best_relevant_document_is_left_out(false_negatives: FalseNegatives, best: str) -> None:
    mined = mine(Window(1, N, N), false_negatives=false_negatives)
    assert negatives(mined)[0] == best
    # above it: all but the relevant ones, d3 and d5
    assert mined.filtered == int(best[1:]) - sum(int(name[1:]) < int(best[1:]) for name in ("d3", "d5"))


def test_queries_without_a_negative_are_counted_and_left_out() -> None:
    mined = mine(Window(1, 5, 2), query="b", false_negatives=FalseNegatives(margin=0))
    assert (mined.queries, mined.without, mined.filtered) == ([], 1, N), "its relevant document was not retrieved"
    (group,) = mine(Window(1, 5, 2), query="b").rows({}).groups()
    assert group.documents[0] == "d99" and group.rank[0] == 0 and math.isnan(group.retrieved[0])
    assert mine(Window(1, 5, 2), query="c").queries == [], "no relevant document"
    assert mine(Window(1, 5, 2), query="elsewhere").without == 0


def test_teachers_scores_filter_in_the_same_way() -> None:
    given = rows(
        documents=["p", "x", "y"], offsets=np.array([0, 3, 5]), document=np.array([0, 1, 2, 0, 1], np.int32),
        relevant=np.array([1, 0, 0, 1, 0], bool), rank=np.zeros(5, np.int32), retrieved=np.full(5, np.nan, np.float32),
        teachers={"t": np.zeros(5, np.float32)}, target=np.array([10, 9.6, 9.5, 3, 3], np.float32),
    )  # fmt: skip
    left = drop_false_negatives(given, FalseNegatives(max_share=0.95))
    assert [group.documents for group in left.groups()] == [["p", "y"]], "b has no negative left"
    with pytest.raises(ValueError, match="expected that some negative passes, got 0 of 3 with 5 and None"):
        drop_false_negatives(given, FalseNegatives(margin=5))
    assert given.target is not None
    given.target -= 20
    with pytest.raises(ValueError, match="best relevant document of query 'a' scores -10, and a share of that"):
        drop_false_negatives(given, FalseNegatives(max_share=0.95))


def test_wrong_arguments_are_refused() -> None:
    for first, last, count, message in ((0, 5, 1, "got 0-5"), (6, 5, 1, "got 6-5"), (1, 5, 0, "at least 1 negative")):
        refused(ValueError, message, Window, first, last, count)
    for options, message in (({"margin": -1}, "margin: expected"), ({"max_share": 1.5}, r"\(0, 1\], got 1.5")):
        refused(ValueError, message, FalseNegatives, **options)
    refused(ValueError, "windows: expected at least one", mine)
    refused(DataError, "document 'x' of query 'a' is not in made", mine, Window(1, 5, 2), ranking={"x": 1.0})
