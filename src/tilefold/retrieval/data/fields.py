"""Names that fields of documents, queries and judgements have in files."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilefold._internal.arguments import check_optional_text

__all__ = ["DocumentFields"]

# Names that BEIR, TREC, MS MARCO, Anserini, datasets and data frames give a field.
_DOCUMENT_IDS = (
    "docid",
    "doc_id",
    "doc-id",
    "docno",
    "document_id",
    "corpus-id",
    "corpus_id",
    "pid",
    "passage_id",
)
_QUERY_IDS = ("query-id", "query_id", "qid", "queryid", "topic_id", "topic-id")


class _TextField(NamedTuple):
    """A field of a document or a query, and how it is recognised.

    Attributes:
        meaning: the field in words, for errors.
        option: the command-line option that gives a custom name.
        preferred_names: names that win over other recognised names of the same row.
        recognised_names: all names that the field may have.
    """

    meaning: str
    option: str
    preferred_names: tuple[str, ...]
    recognised_names: tuple[str, ...]


_TEXT_FIELDS = {
    "_id": _TextField(
        meaning="an id",
        option="--id-field",
        preferred_names=("_id", "id"),
        recognised_names=("_id", "id", *_DOCUMENT_IDS, *_QUERY_IDS),
    ),
    "title": _TextField(
        meaning="a title",
        option="--title-field",
        preferred_names=("title",),
        recognised_names=("title",),
    ),
    "text": _TextField(
        meaning="a text",
        option="--text-field",
        preferred_names=("text",),
        recognised_names=(
            "text",
            "contents",
            "content",
            "body",
            "passage",
            "document",
            "query",
            "question",
        ),
    ),
}
TEXT_NAMES = {name: field.recognised_names for name, field in _TEXT_FIELDS.items()}
"""Field of a document or a query -> names that it may have."""

JUDGEMENT_NAMES = {
    "query-id": (*_QUERY_IDS, "query", "topic"),
    "corpus-id": (*_DOCUMENT_IDS, "document", "passage", "id"),
    "score": ("score", "grade", "relevance", "rel", "label", "judgment", "judgement"),
}
"""Field of a judgement -> names that it may have."""

_CACHED_ROWS = 1024  # distinct tuples of field names; the rows of a file have only a few


class FieldError(ValueError):
    """Fields of a row are missing or ambiguous.

    The caller adds the file and the line to the message.
    """


@dataclass(frozen=True)
class DocumentFields:
    """Custom names of the document fields in a file.

    Attributes:
        id: field of the id; None recognises ``_id``, ``id``, ``docid`` and other usual names.
        title: field of the title; None uses ``title`` if it exists.
        text: field of the text; None recognises ``text``, ``contents``, ``body`` and other usual
            names.

    Examples:
        >>> from pathlib import Path
        >>> from tilefold.retrieval import load_documents
        >>> _ = Path("papers.csv").write_text("pk,abstract\\np1,Terms with weights\\n")
        >>> load_documents("papers.csv", DocumentFields(id="pk", text="abstract"))["p1"].text
        'Terms with weights'
    """

    id: str | None = None
    title: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        check_optional_text("id", self.id)
        check_optional_text("title", self.title)
        check_optional_text("text", self.text)

    @property
    def names(self) -> dict[str, str]:
        """Field (``_id``, ``title``, ``text``) -> custom name, if it has one."""
        names = {"_id": self.id, "title": self.title, "text": self.text}
        return {field: name for field, name in names.items() if name is not None}


class TextColumns(NamedTuple):
    """Names of the fields of a row that hold a document or a query."""

    id: str
    title: str | None
    text: str


def _find_aliases(names: Sequence[str], aliases: Sequence[str]) -> list[str]:
    """Return the names that equal an alias, ignoring case and surrounding blanks and quotes."""
    return [name for name in names if name.strip().strip('"').lower() in aliases]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


@functools.lru_cache(maxsize=_CACHED_ROWS)
def text_columns_of(names: tuple[str, ...], fields: DocumentFields) -> TextColumns:
    """Find which fields of a row hold the id, the title and the text of a document.

    A field with a custom name must exist. Other fields are recognised by their usual names, of
    which the row may have at most one. ``_id``, ``id``, ``title`` and ``text`` are preferred.

    Args:
        names: names of the fields of the row.
        fields: custom names of the document fields.

    Raises:
        FieldError: if fields are missing, or several fields could be the same one.
    """
    columns: dict[str, str] = {}
    missing: list[str] = []
    for field, description in _TEXT_FIELDS.items():
        custom_name = fields.names.get(field)
        if custom_name is not None:
            if custom_name in names:
                columns[field] = custom_name
            else:
                missing.append(f"{description.meaning} ({custom_name!r})")
            continue
        usual_name = _usual_name(names, description)
        if usual_name is not None:
            columns[field] = usual_name
        elif field != "title":
            examples = _quoted(description.recognised_names[:4])
            missing.append(f"{description.meaning} ({examples} or another usual name)")
    if missing:
        options = ", ".join(description.option for description in _TEXT_FIELDS.values())
        raise FieldError(
            f"expected fields with {' and '.join(missing)}, got {_quoted(names)}. Rename "
            f"or add the fields, or pass their names: {options} (from Python DocumentFields).",
        )
    return TextColumns(columns["_id"], columns.get("title"), columns["text"])


def _usual_name(names: Sequence[str], field: _TextField) -> str | None:
    """Find the name of a row's field that is a usual name of a document field.

    Args:
        names: names of the fields of the row.
        field: the document field.

    Returns:
        The name, or None if the row does not have the field.

    Raises:
        FieldError: if several names are usual and none of them is preferred.
    """
    for preferred_name in field.preferred_names:
        if preferred_name in names:
            return preferred_name
    candidates = _find_aliases(names, field.recognised_names)
    if len(candidates) > 1:
        raise FieldError(
            f"expected one field with {field.meaning}, got {_quoted(candidates)}. Choose one: "
            f"{field.option}.",
        )
    return candidates[0] if candidates else None


@functools.lru_cache(maxsize=_CACHED_ROWS)
def judgement_columns(names: tuple[str, ...]) -> Mapping[str, str]:
    """Find which fields of a row hold the query's id, the document's id and the grade.

    The names ``query-id``, ``corpus-id`` and ``score`` are preferred. Without them, the row may
    have at most one of the other usual names.

    Args:
        names: names of the fields of the row.

    Returns:
        ``query-id``, ``corpus-id`` and ``score`` -> name of the field in the row.

    Raises:
        FieldError: if fields are missing, or several fields could be the same one.
    """
    columns: dict[str, str] = {}
    missing: list[str] = []
    for field, aliases in JUDGEMENT_NAMES.items():
        candidates = [field] if field in names else _find_aliases(names, aliases)
        if len(candidates) > 1:
            raise FieldError(
                f"expected one {field} field, got {_quoted(candidates)}. Rename one to {field!r}.",
            )
        if candidates:
            columns[field] = candidates[0]
        else:
            examples = [alias for alias in aliases if alias != field][:3]
            missing.append(f"{field} (or {_quoted(examples)})")
    if missing:
        raise FieldError(
            f"expected the fields {', '.join(missing)}, got {_quoted(names)}. Rename the fields, "
            "or add the missing ones.",
        )
    return columns
