"""Columns of text files: whether their first line names them, and which field of a line is which."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence

from tilefold.retrieval.errors import DataError

_logger = logging.getLogger(__name__)

# What a column is -> names that BEIR, TREC, MS MARCO, datasets and data frames give it.
_DOCUMENT = ("corpus-id", "corpus_id", "docid", "doc_id", "doc-id", "docno", "document_id", "pid", "passage_id")
_QUERY = ("query-id", "query_id", "qid", "queryid", "topic_id", "topic-id")
TEXTS = {
    "_id": ("_id", "id", *_DOCUMENT, *_QUERY),
    "title": ("title",),
    "text": ("text", "contents", "content", "body", "passage", "document", "query", "question"),
}
JUDGEMENTS = {
    "query-id": (*_QUERY, "query", "topic"),
    "corpus-id": (*_DOCUMENT, "document", "passage", "id"),
    "score": ("score", "grade", "relevance", "rel", "label", "judgment", "judgement"),
}


def named_columns(fields: Sequence[str], known: Mapping[str, Sequence[str]]) -> list[str | None]:
    """The column that each of the `fields` of a first line names, None for a field that names none."""
    kind_of = {name: kind for kind, names in known.items() for name in names}
    return [kind_of.get(field.strip().strip('"').lower()) for field in fields]


def text_columns(fields: Sequence[str], where: str) -> list[str | None] | None:
    """The columns that a first line names, None where it is a row: ``id``, ``text``, and perhaps ``title`` and others.

    Raises:
        DataError: it may be either.
    """
    kinds = named_columns(fields, TEXTS)
    if kinds.count("_id") == kinds.count("text") == 1 and kinds.count("title") <= 1:
        return kinds
    if len(fields) > 1 and (kinds[0] == "_id" or "text" in kinds[1:]):
        raise DataError(
            f"{where}: expected a row, or names of columns with one id and one text, got {fields}, which may be "
            "either. Name the columns id, title and text; remove the line; or put it below another one, if it is a row."
        )
    return None


@functools.cache
def say_once(where: str, fields: tuple[str, ...]) -> None:
    """Say which line is no row; files are read several times."""
    kinds = named_columns(fields, TEXTS)
    used = ", ".join(name.strip() for name, kind in zip(fields, kinds, strict=True) if kind)
    left = ", ".join(repr(name.strip()) for name, kind in zip(fields, kinds, strict=True) if not kind)
    _logger.warning(
        "%s: this line is taken as names of columns (%s)%s", where, used, f", {left} unread" if left else ""
    )


def row_of(fields: Sequence[str], columns: Sequence[str | None], where: str) -> dict[str, str]:
    """Column -> field of a line.

    Raises:
        DataError: more or fewer fields than columns.
    """
    if len(fields) != len(columns):
        raise DataError(
            f"{where}: expected {len(columns)} fields as in the first line, which names them, got {len(fields)}. Fix "
            "that line."
        )
    return {column: field for column, field in zip(columns, fields, strict=True) if column}
