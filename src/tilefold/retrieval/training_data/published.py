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

TEACHER = "published"

# Document, score if there is one, and whether it is relevant. A plain tuple, because files have
# hundreds of millions of them.
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
    """Rows of the lines that were read, with ids as numbers.

    Attributes:
        queries: id -> number, in the order of their first row.
        documents: id -> number, in the order of their first row.
        query: number of each row's query.
        document: number of each row's document.
        relevant: 1 for each relevant row, else 0.
        scores: score of each row; empty if rows have no score.
    """

    queries: dict[str, int] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    query: array[int] = field(default_factory=lambda: array("i"))
    document: array[int] = field(default_factory=lambda: array("i"))
    relevant: bytearray = field(default_factory=bytearray)
    scores: array[float] = field(default_factory=lambda: array("f"))

    def add(self, query: str, document: str, score: float | None, relevant: bool) -> None:
        """Add a row; ``ValueError`` if it has a score and earlier rows have none, or lacks one."""
        is_first_row = not self.query
        if not is_first_row and (score is None) != (not self.scores):
            raise ValueError(_describe_unlike_score(document, score))
        self.document.append(self.documents.setdefault(document, len(self.documents)))
        self.query.append(self.queries.setdefault(query, len(self.queries)))
        self.relevant.append(relevant)
        if score is not None:
            self.scores.append(score)


def read_published(path: Path) -> dict[str, Any]:
    """Read published negatives.

    A document that a query has several times is relevant if one of its rows is, and has the score
    of its first row.

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
                f"line {number}: expected {_FORMATS}, got {line.strip():.60} ({error}). Fix that "
                "line.",
            ) from error
    if not columns.query:
        raise DataError("expected a line at least, got an empty file. Fetch it again.")
    return _group_by_query(columns)


def _group_by_query(columns: _Columns) -> dict[str, Any]:
    """Arrange rows by query, with each document of a query once.

    Args:
        columns: query, document, score and relevance of each row of the file.

    Returns:
        The fields of :class:`tilefold.retrieval.TrainingRows` except ``made_by``.
    """
    query = np.frombuffer(columns.query, np.int32)
    document = np.frombuffer(columns.document, np.int32)
    n_documents = len(columns.documents)
    # A group has the rows with the same query and document.
    _, first_rows, group_of_row = np.unique(
        query.astype(np.int64) * n_documents + document,
        return_index=True,
        return_inverse=True,
    )
    group_is_relevant: npt.NDArray[np.bool_] = (
        np.bincount(group_of_row, np.frombuffer(columns.relevant, np.bool_)) > 0
    )
    # Groups by query, and within a query in the order of their first rows.
    order = np.lexsort((first_rows, query[first_rows]))
    rows = first_rows[order]
    scores = np.frombuffer(columns.scores, np.float32)[rows] if columns.scores else None
    return {
        "queries": list(columns.queries),
        "documents": list(columns.documents),
        "offsets": offsets_of(np.bincount(query[rows], minlength=len(columns.queries))),
        "document": document[rows],
        "relevant": group_is_relevant[order],
        "rank": np.zeros(len(rows), np.int32),
        "retrieved": np.full(len(rows), np.nan, np.float32),
        "teachers": {} if scores is None else {TEACHER: scores},
        "target": scores,
    }


def _describe_unlike_score(document: str, score: float | None) -> str:
    """Return why a row is refused whose score, or lack of one, is unlike earlier rows."""
    remedy = "give all of them one, or none"
    if score is None:
        return f"{document!r} has no score, those before it have one; {remedy}"
    return f"{document!r} has a score, those before it have none; {remedy}"


def _parse_line(line: str) -> tuple[str, Iterator[_PublishedRow]]:
    """Return the query of a line, and its documents."""
    value = _fields_of(line)
    if isinstance(value, dict):
        return _check_id(value["qid"]), _rows_of_lists(value["pos"], value["neg"])
    query, *documents = value
    if len(documents) < 2:
        raise ValueError("fewer than two documents")
    return _check_id(query), _rows_relevant_first(documents)


def _fields_of(line: str) -> Any:
    """Return the JSON value of a line, or the three ids between its tabs."""
    if line[0] in "[{":
        return json.loads(line)
    fields = line.rstrip("\r\n").split("\t")
    if len(fields) != _N_TRIPLE_FIELDS:
        raise ValueError(f"{len(fields)} fields")
    return fields


def _rows_of_lists(positives: Any, negatives: Any) -> Iterator[_PublishedRow]:
    """Yield the rows of lists of ids; negatives may be one list per retriever."""
    negative_lists = list(negatives.values()) if isinstance(negatives, dict) else [negatives]
    if not all(isinstance(ids, list) for ids in (positives, *negative_lists)):
        raise TypeError("no lists")
    for document in positives:
        yield _check_id(document), None, True
    for ids in negative_lists:
        for document in ids:
            yield _check_id(document), None, False


def _rows_relevant_first(documents: list[Any]) -> Iterator[_PublishedRow]:
    """Yield the rows of ids, or of pairs of an id and a score; the first one is relevant."""
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
        raise ValueError(f"the score of {document!r} is {shown:.40} and no number")
    if not abs(score) <= _LARGEST_SCORE:
        raise ValueError(f"the score of {document!r} is {score!r:.40} and no finite float32")
    return _check_id(document), float(score)


def _check_id(value: object) -> str:
    """Return an id as a string; ``ValueError`` unless it is an integer or a non-empty string."""
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise ValueError(f"no id: {value!r}")
    return str(value)
