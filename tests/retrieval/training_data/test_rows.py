"""Training rows: files of Parquet, rows of relevant documents, and the collection they are of."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recipes.small import small_collection
from tilefold import retrieval as r
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data.mining import Window, mine_negatives
from tilefold.retrieval.training_data.rows import (
    TrainingRows,
    queries_of,
    read_training_rows,
    write_training_rows,
)
from tilefold.retrieval.training_data.teachers import with_relevant


def mined_rows() -> TrainingRows:
    """Query a: d1 (relevant, not retrieved) and d2; query b: d2, which is relevant."""
    return TrainingRows(
        queries=["a", "b"],
        documents=["d1", "d2"],
        offsets=np.array([0, 2, 3]),
        document=np.array([0, 1, 1], np.int32),
        relevant=np.array([True, False, True]),
        rank=np.array([0, 3, 1], np.int32),
        retrieved=np.array([np.nan, 1.5, 2.5], np.float32),
        made_by={"split": "train"},
    )


def scored_rows() -> TrainingRows:
    """Mined rows with scores of one teacher."""
    return replace(
        mined_rows(),
        teachers={"small": np.array([1, 2, 3], np.float32)},
        target=np.array([0, 30, 7], np.float32),
    )


@pytest.mark.parametrize(
    "rows",
    [pytest.param(mined_rows(), id="mined"), pytest.param(scored_rows(), id="scored")],
)
def test_rows_survive_writing_and_reading(rows: TrainingRows, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    write_training_rows(rows, file)
    loaded = read_training_rows(file)
    assert loaded.queries == rows.queries
    assert loaded.documents == rows.documents
    assert loaded.made_by == rows.made_by
    assert loaded.scored == rows.scored
    assert loaded.teachers.keys() == rows.teachers.keys()
    np.testing.assert_array_equal(loaded.offsets, rows.offsets)
    np.testing.assert_array_equal(loaded.document, rows.document)
    np.testing.assert_array_equal(loaded.relevant, rows.relevant)
    np.testing.assert_array_equal(loaded.rank, rows.rank)
    np.testing.assert_array_equal(loaded.retrieved, rows.retrieved)
    np.testing.assert_array_equal(loaded.target, rows.target)


def test_groups_of_a_file_have_the_scores_of_their_query(tmp_path: Path) -> None:
    write_training_rows(scored_rows(), tmp_path / "rows.parquet")
    first, second = read_training_rows(tmp_path / "rows.parquet").groups()
    assert first.query == "a"
    assert first.documents == ["d1", "d2"]
    assert second.documents == ["d2"]
    assert first.target is not None
    assert first.target.tolist() == [0, 30]
    assert first.teachers["small"].tolist() == [1, 2]


def test_selected_rows_keep_their_query() -> None:
    (group,) = scored_rows().take(np.array([False, False, True])).groups()
    assert group.query == "b"
    assert group.documents == ["d2"]
    assert group.relevant.tolist() == [True]


def test_a_file_of_mined_rows_has_five_columns(tmp_path: Path) -> None:
    write_training_rows(mined_rows(), tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist()[0] == {
        "query_id": "a",
        "document_id": "d1",
        "rank": None,
        "score": None,
        "relevant": True,
    }


def test_a_file_of_scored_rows_has_a_column_for_every_teacher(tmp_path: Path) -> None:
    write_training_rows(scored_rows(), tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist()[1] == {
        "query_id": "a",
        "document_id": "d2",
        "rank": 3,
        "score": 30.0,
        "relevant": False,
        "retriever_score": 1.5,
        "score:small": 2.0,
    }


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        pytest.param("x", "y", "z", id="words"),
        pytest.param("10", "3", "7", id="numbers"),
        pytest.param("10", "3", "07", id="number with a leading zero"),
        pytest.param("10", "99", "7", id="large number"),
        pytest.param("10", "3", "-1", id="negative number"),
    ],
)
def test_a_file_of_another_program_needs_three_columns_in_any_order(
    tmp_path: Path,
    first: str,
    second: str,
    third: str,
) -> None:
    file = tmp_path / "other.parquet"
    queries = pa.DictionaryArray.from_arrays(pa.array([2, 0, 2]), ["a", "never", "b"])
    columns = {
        "query_id": queries,
        "document_id": [first, second, third],
        "relevant": [True, True, False],
    }
    pq.write_table(pa.table(columns), file, row_group_size=2)

    rows = read_training_rows(file)

    group_of_b, group_of_a = rows.groups()
    assert rows.queries == ["b", "a"]
    assert group_of_b.query == "b"
    assert group_of_b.documents == [first, third]
    assert group_of_a.query == "a"
    assert group_of_a.documents == [second]
    assert not rows.scored
    assert rows.rank.tolist() == [0, 0, 0]
    assert np.isnan(rows.retrieved).all()


COLUMNS: dict[str, list[Any]] = {"query_id": ["a"], "document_id": ["d"], "relevant": [True]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param(
            {"query_id": ["a"], "document_id": ["d"]},
            r"got \['query_id', 'document_id'\] without 'relevant'",
            id="no column of relevance",
        ),
        pytest.param(
            COLUMNS | {"query_id": [1]},
            "query_id: expected strings, got int64",
            id="integers as ids",
        ),
        pytest.param(
            COLUMNS | {"relevant": [1]},
            "relevant: expected true or false",
            id="integers as relevance",
        ),
        pytest.param(
            {"query_id": ["a", "a"], "document_id": ["d", "d"], "relevant": [True, True]},
            "'d' of query 'a' is given",
            id="document twice",
        ),
        pytest.param(
            COLUMNS | {"score": [1.0], "score:t": [math.nan]},
            "document 'd' of query 'a' has no finite score",
            id="score of nan",
        ),
        pytest.param(
            COLUMNS | {"score:t": [1.0]},
            r"got \['query_id', .*\] without 'score'",
            id="score of a teacher without a target",
        ),
    ],
)
def test_a_file_of_other_columns_is_refused(tmp_path: Path, columns: Any, message: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=message) as error:
        read_training_rows(tmp_path / "bad.parquet")
    assert "bad.parquet" in str(error.value)


def test_a_missing_file_and_one_that_is_no_parquet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tilefold mine"):
        read_training_rows(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("query_id")
    with pytest.raises(DataError, match="expected Parquet"):
        read_training_rows(tmp_path / "text.parquet")


def test_an_empty_table_is_not_written(tmp_path: Path) -> None:
    no_rows = mined_rows().take(np.zeros(3, bool))
    with pytest.raises(ValueError, match="at least one row, got an empty table"):
        write_training_rows(no_rows, tmp_path / "empty.parquet")


def row_of(query: str, document: str) -> TrainingRows:
    """One relevant document of one query."""
    return TrainingRows(
        queries=[query],
        documents=[document],
        offsets=np.array([0, 1]),
        document=np.zeros(1, np.int32),
        relevant=np.ones(1, bool),
        rank=np.ones(1, np.int32),
        retrieved=np.ones(1, np.float32),
        made_by={"split": "train"},
    )


def test_rows_of_another_collection_are_refused() -> None:
    collection = small_collection()
    query = next(iter(collection.queries))
    document = next(iter(collection.documents))
    rows = row_of(query, document)
    rows.made_by = {
        "texts_sha256": texts_digest(collection.contents()),
        "queries_sha256": texts_digest(queries_of(rows, collection)),
    }
    rows.check_collection(collection)
    with pytest.raises(DataError, match="document 'elsewhere' is not in"):
        row_of(query, "elsewhere").check_collection(collection)
    collection.queries[query] += " changed"
    with pytest.raises(DataError, match="other queries"):
        rows.check_collection(collection)


@pytest.fixture(scope="module")
def rows_of_bm25() -> TrainingRows:
    """Rows of the small collection, mined from a ranking of BM25."""
    collection = small_collection()
    index = r.BM25Index.build(collection.contents(), language="none")
    run = index.search(collection.queries, 16)
    mined = mine_negatives(run.items(), collection, "train", [Window(1, 16, 5)])
    return mined.rows({"split": "train"})


def test_relevant_documents_that_lack_a_row_get_one(rows_of_bm25: TrainingRows) -> None:
    collection = small_collection()
    negatives = rows_of_bm25.take(~rows_of_bm25.relevant)

    completed = with_relevant(negatives, collection, "train")

    documents = [group.documents for group in completed.groups()]
    assert documents == [group.documents for group in rows_of_bm25.groups()]
    assert completed.relevant.tolist() == rows_of_bm25.relevant.tolist()
    assert not completed.rank[completed.relevant].any()
    assert with_relevant(rows_of_bm25, collection, "train") is rows_of_bm25


def test_scored_rows_get_no_relevant_documents(rows_of_bm25: TrainingRows) -> None:
    negatives = rows_of_bm25.take(~rows_of_bm25.relevant)
    negatives.teachers = {"t": negatives.retrieved}
    negatives.target = negatives.retrieved
    with pytest.raises(ValueError, match="Score the mined file again"):
        with_relevant(negatives, small_collection(), "train")
