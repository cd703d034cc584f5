"""Training rows on disk: what is written comes back, files of other programs are read, damaged ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recipes.small import small_collection
from tilefold.retrieval.errors import DataError
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


def test_what_is_written_comes_back(tmp_path: Path) -> None:
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


def test_the_columns_are_those_of_the_table(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    write_training_rows(rows(), file)
    assert pq.read_table(file).to_pylist()[0] == {
        "query_id": "a", "document_id": "d1", "rank": None, "score": None, "relevant": True,
    }  # fmt: skip
    write_training_rows(rows(**SCORED), file)
    assert pq.read_table(file).to_pylist()[1] == {
        "query_id": "a", "document_id": "d2", "rank": 3, "score": 30.0, "relevant": False,
        "retriever_score": 1.5, "score:small": 2.0,
    }  # fmt: skip


def test_a_file_of_another_program_needs_three_columns_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "other.parquet"
    table = {"query_id": ["b", "a", "b"], "document_id": ["x", "y", "z"], "relevant": [True, True, False]}
    pq.write_table(pa.table(table), file)
    back = read_training_rows(file)
    assert [(group.query, group.documents) for group in back.groups()] == [("b", ["x", "z"]), ("a", ["y"])]
    assert not back.scored and back.rank.tolist() == [0, 0, 0] and np.isnan(back.retrieved).all()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"query_id": ["a"], "document_id": ["d"]}, r"got \['query_id', 'document_id'\] without 'relevant'"),
        ({"query_id": [1], "document_id": ["d"], "relevant": [True]}, "query_id: expected strings, got int64"),
        ({"query_id": ["a"], "document_id": ["d"], "relevant": [1]}, "relevant: expected true or false"),
        ({"query_id": ["a", "a"], "document_id": ["d", "d"], "relevant": [True, True]}, "'d' of query 'a' is given"),
        (
            {"query_id": ["a"], "document_id": ["d"], "relevant": [True], "score": [1.0], "score:t": [float("nan")]},
            "document 'd' of query 'a' has no finite score",
        ),
        (
            {"query_id": ["a"], "document_id": ["d"], "relevant": [True], "score:t": [1.0]},
            r"got \['query_id', .*\] without 'score'",
        ),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, table: Any, message: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=message) as caught:
        read_training_rows(tmp_path / "bad.parquet")
    assert "bad.parquet" in str(caught.value)


def test_no_file_and_no_parquet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tilefold mine"):
        read_training_rows(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("query_id")
    with pytest.raises(DataError, match="expected Parquet"):
        read_training_rows(tmp_path / "text.parquet")
    with pytest.raises(ValueError, match="at least one row, got an empty table"):
        write_training_rows(rows().take(np.zeros(3, bool)), tmp_path / "empty.parquet")


def test_rows_that_are_taken_keep_their_queries() -> None:
    (left,) = rows(**SCORED).take(np.array([False, False, True])).groups()
    assert (left.query, left.documents, left.relevant.tolist()) == ("b", ["d2"], [True])


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
    with pytest.raises(DataError, match="other queries"):
        own.check_collection(collection)
