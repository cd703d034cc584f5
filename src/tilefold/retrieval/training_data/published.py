"""Negatives in the formats of MS MARCO: triples of ids, and JSON lines with or without scores."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.data.tables import numbered_lines
from tilefold.retrieval.errors import DataError

TEACHER = "published"  # name of the teacher that computed published scores

# id of a document, its score if there is one, and whether it is relevant; a plain tuple, because
# files have hundreds of millions of rows
_PublishedRow = tuple[str, float | None, bool]
_LARGEST_SCORE = float(np.finfo(np.float32).max)
_N_TRIPLE_FIELDS = 3
_FORMATS = (
    "a line of three ids with tabs between them, or JSON: [query, relevant, negative, ...], "
    "[query, [document, score], ...], the relevant one first, or "
    '{"qid": .., "pos": [..], "neg": {retriever: [..]}}'
)


@dataclass
class _Columns:
    """Columns of the rows that were read from a file, with numbers in place of ids.

    Attributes:
        number_of_query: query id -> number, in the order of first rows.
        number_of_document: document id -> number, in the order of first rows.
        query_numbers: number of each row's query.
        document_numbers: number of each row's document.
        relevant: 1 for each relevant row, 0 for each negative.
        scores: score of each row; empty if rows have no scores.
    """

    number_of_query: dict[str, int] = field(default_factory=dict)
    number_of_document: dict[str, int] = field(default_factory=dict)
    query_numbers: array[int] = field(default_factory=lambda: array("i"))
    document_numbers: array[int] = field(default_factory=lambda: array("i"))
    relevant: bytearray = field(default_factory=bytearray)
    scores: array[float] = field(default_factory=lambda: array("f"))

    def add(self, query_id: str, document_id: str, score: float | None, relevant: bool) -> None:
        """Add a row.

        Args:
            query_id: id of the query.
            document_id: id of the document.
            score: score of the pair; ``None`` if the file has no scores.
            relevant: whether the document is relevant.

        Raises:
            ValueError: if this row has a score and earlier rows have none, or the reverse.
        """
        is_first_row = not self.query_numbers
        has_score = score is not None
        earlier_rows_have_scores = bool(self.scores)
        if not is_first_row and has_score != earlier_rows_have_scores:
            raise ValueError(_describe_mixed_scores(document_id, score))
        document = self.number_of_document.setdefault(document_id, len(self.number_of_document))
        query = self.number_of_query.setdefault(query_id, len(self.number_of_query))
        self.document_numbers.append(document)
        self.query_numbers.append(query)
        self.relevant.append(relevant)
        if score is not None:
            self.scores.append(score)


def read_published(path: Path) -> dict[str, Any]:
    """Read a file of negatives in one of the formats of MS MARCO.

    If a query lists a document several times, its first score is used, and it is relevant if any of
    the rows is.

    Args:
        path: path of the file.

    Returns:
        The fields of :class:`tilefold.retrieval.TrainingRows` except ``made_by``.

    Raises:
        DataError: if a line is malformed, or the file is empty.
    """
    columns = _Columns()
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            query_id, rows = _parse_line(line)
            for document_id, score, relevant in rows:
                columns.add(query_id, document_id, score, relevant)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise DataError(
                f"line {number}: expected {_FORMATS}, got {line.strip():.60} ({error}). Fix this "
                "line.",
            ) from error
    if not columns.query_numbers:
        raise DataError("expected at least one line, got an empty file. Download it again.")
    return _group_by_query(columns)


def _group_by_query(columns: _Columns) -> dict[str, Any]:
    """Sort the rows of a file by query, and keep the first row of each (query, document) pair.

    Args:
        columns: query, document, score and relevance of each row of the file.

    Returns:
        The fields of :class:`tilefold.retrieval.TrainingRows` except ``made_by``.
    """
    query_numbers = np.frombuffer(columns.query_numbers, np.int32)
    document_numbers = np.frombuffer(columns.document_numbers, np.int32)
    is_relevant = np.frombuffer(columns.relevant, np.bool_)
    n_documents = len(columns.number_of_document)
    # a number for each pair of a query and a document
    pair_keys = query_numbers.astype(np.int64) * n_documents + document_numbers
    _, first_rows, pair_of_row = np.unique(pair_keys, return_index=True, return_inverse=True)
    # A pair is relevant if any of its rows is.
    n_relevant_rows = np.bincount(pair_of_row, is_relevant)
    pair_is_relevant: npt.NDArray[np.bool_] = n_relevant_rows > 0
    # pairs by query, and within a query in the order of their first rows
    order = np.lexsort((first_rows, query_numbers[first_rows]))
    rows = first_rows[order]
    row_counts = np.bincount(query_numbers[rows], minlength=len(columns.number_of_query))
    scores = np.frombuffer(columns.scores, np.float32)[rows] if columns.scores else None
    return {
        "queries": list(columns.number_of_query),
        "documents": list(columns.number_of_document),
        "offsets": offsets_of(row_counts),
        "document": document_numbers[rows],
        "relevant": pair_is_relevant[order],
        # The files have no ranks and no scores of a retriever.
        "rank": np.zeros(len(rows), np.int32),
        "retrieved": np.full(len(rows), np.nan, np.float32),
        "teachers": {} if scores is None else {TEACHER: scores},
        "target": scores,
    }


def _describe_mixed_scores(document_id: str, score: float | None) -> str:
    """Return an error message for a row that has a score if earlier rows have none, or vice versa.

    Args:
        document_id: id of the row's document.
        score: score of the row.
    """
    remedy = "all rows must have a score, or none"
    if score is None:
        return f"{document_id!r} has no score, but earlier rows have one; {remedy}"
    return f"{document_id!r} has a score, but earlier rows have none; {remedy}"


def _parse_line(line: str) -> tuple[str, Iterator[_PublishedRow]]:
    """Return the query id of a line, and the rows of its documents."""
    value = _parse_values(line)
    if isinstance(value, dict):
        return _check_id(value["qid"]), _rows_of_lists(value["pos"], value["neg"])
    query, *documents = value
    if len(documents) < 2:
        raise ValueError("fewer than two documents")
    return _check_id(query), _rows_relevant_first(documents)


def _parse_values(line: str) -> Any:
    """Return the JSON value of a line, or the three ids of a line with tabs."""
    if line[0] in "[{":
        return json.loads(line)
    ids = line.rstrip("\r\n").split("\t")
    if len(ids) != _N_TRIPLE_FIELDS:
        raise ValueError(f"{len(ids)} fields")
    return ids


def _rows_of_lists(positives: Any, negatives: Any) -> Iterator[_PublishedRow]:
    """Yield the rows of relevant documents and of negatives.

    Args:
        positives: list of ids.
        negatives: list of ids, or name of a retriever -> list of ids.
    """
    negative_lists = list(negatives.values()) if isinstance(negatives, dict) else [negatives]
    if not all(isinstance(ids, list) for ids in (positives, *negative_lists)):
        raise TypeError("'pos' and 'neg' are not lists of ids")
    for document in positives:
        yield _check_id(document), None, True
    for ids in negative_lists:
        for document in ids:
            yield _check_id(document), None, False


def _rows_relevant_first(documents: list[Any]) -> Iterator[_PublishedRow]:
    """Yield the rows of a list whose first document is relevant, and whose others are not.

    Args:
        documents: ids, or pairs ``[id, score]``.
    """
    for position, value in enumerate(documents):
        document, score = _split_score(value)
        yield document, score, position == 0


def _split_score(value: Any) -> tuple[str, float | None]:
    """Return the id of a document, and its score if `value` is ``[document, score]``."""
    if not isinstance(value, list):
        return _check_id(value), None
    document, score = value
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        shown = json.dumps(score)
        raise ValueError(f"the score of {document!r} is {shown:.40}, which is not a number")
    if not abs(score) <= _LARGEST_SCORE:
        raise ValueError(
            f"the score of {document!r} is {score!r:.40}, which is not a finite float32",
        )
    return _check_id(document), float(score)


def _check_id(value: object) -> str:
    """Return an id as a string; ``ValueError`` if it is not an integer or a non-empty string."""
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise ValueError(f"not an id: {value!r}")
    return str(value)
