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
TEXTS = {
    "_id": ("_id", "id", *_DOCUMENT_IDS, *_QUERY_IDS),
    "title": ("title",),
    "text": ("text", "contents", "content", "body", "passage", "document", "query", "question"),
}
"""Field of a document or a query -> names that it may have."""

JUDGEMENTS = {
    "query-id": (*_QUERY_IDS, "query", "topic"),
    "corpus-id": (*_DOCUMENT_IDS, "document", "passage", "id"),
    "score": ("score", "grade", "relevance", "rel", "label", "judgment", "judgement"),
}
"""Field of a judgement -> names that it may have."""

_PREFERRED = {"_id": ("_id", "id"), "title": ("title",), "text": ("text",)}
_OPTIONS = {"_id": "--id-field", "title": "--title-field", "text": "--text-field"}
_MEANINGS = {"_id": "an id", "title": "a title", "text": "a text"}
_CACHED_ROWS = 1024  # sets of names of fields; rows of one file have few


class FieldError(ValueError):
    """Fields of a row that are missing or may be either.

    The text names no file and no line.
    """


@dataclass(frozen=True)
class DocumentFields:
    """Names of the fields of documents in a file, where they are not the usual ones.

    Attributes:
        id: field of the id; None recognises ``_id``, ``id``, ``docid`` and other usual names.
        title: field of the title; None takes ``title`` where it is there.
        text: field of the text; None recognises ``text``, ``contents``, ``body`` and other usual
            names.
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
        """Field (``_id``, ``title``, ``text``) -> its name, of those that are named."""
        named = {"_id": self.id, "title": self.title, "text": self.text}
        return {field: name for field, name in named.items() if name is not None}


class TextColumns(NamedTuple):
    """Names of the fields of a row that hold a document or a query."""

    id: str
    title: str | None
    text: str


def _recognised(names: Sequence[str], aliases: Sequence[str]) -> list[str]:
    """The names that are, without case and surrounding blanks or quotes, one of the aliases."""
    return [name for name in names if name.strip().strip('"').lower() in aliases]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


@functools.lru_cache(maxsize=_CACHED_ROWS)
def text_columns_of(names: tuple[str, ...], fields: DocumentFields) -> TextColumns:
    """Find the fields of a row with the id, the title and the text of a document.

    A field that `fields` names must exist. Otherwise the names ``_id``, ``id``, ``title`` and
    ``text`` are looked for first, and then other usual names, of which the row may have one.

    Args:
        names: names of the fields of the row.
        fields: names of fields that are not the usual ones.

    Raises:
        FieldError: fields that the row lacks, all of them in one error, or a field that several
            names may mean.
    """
    chosen: dict[str, str] = {}
    missing: list[str] = []
    for field, aliases in TEXTS.items():
        explicit = fields.names.get(field)
        preferred = [name for name in _PREFERRED[field] if name in names]
        candidates = preferred[:1] or _recognised(names, aliases)
        if explicit is not None:
            candidates = [explicit] if explicit in names else []
        if len(candidates) > 1:
            raise FieldError(
                f"expected one field with {_MEANINGS[field]}, got {_quoted(candidates)}. Name one: "
                f"{_OPTIONS[field]}.",
            )
        if candidates:
            chosen[field] = candidates[0]
        elif explicit is not None:
            missing.append(f"{_MEANINGS[field]} ({explicit!r})")
        elif field != "title":
            missing.append(f"{_MEANINGS[field]} ({_quoted(aliases[:4])} or another usual name)")
    if missing:
        options = ", ".join(_OPTIONS.values())
        raise FieldError(
            f"expected fields with {' and '.join(missing)}, got {_quoted(names)}. Rename them, or "
            f"name those that are there: {options} (from Python DocumentFields).",
        )
    return TextColumns(chosen["_id"], chosen.get("title"), chosen["text"])


@functools.lru_cache(maxsize=_CACHED_ROWS)
def judgement_columns(names: tuple[str, ...]) -> Mapping[str, str]:
    """Find the fields of a row with the query's id, the document's id and the grade.

    The names ``query-id``, ``corpus-id`` and ``score`` are looked for first, and then other usual
    names, of which the row may have one.

    Args:
        names: names of the fields of the row.

    Returns:
        ``query-id``, ``corpus-id`` and ``score`` -> name of the field in the row.

    Raises:
        FieldError: fields that the row lacks, all of them in one error, or a field that several
            names may mean.
    """
    chosen: dict[str, str] = {}
    missing: list[str] = []
    for field, aliases in JUDGEMENTS.items():
        candidates = [field] if field in names else _recognised(names, aliases)
        if len(candidates) > 1:
            raise FieldError(
                f"expected one field that is the {field}, got {_quoted(candidates)}. Rename one to "
                f"{field!r}.",
            )
        if candidates:
            chosen[field] = candidates[0]
        else:
            others = [alias for alias in aliases if alias != field]
            missing.append(f"{field} (or {_quoted(others[:3])})")
    if missing:
        raise FieldError(
            f"expected the fields {', '.join(missing)}, got {_quoted(names)}. Rename those that "
            "are there, or add them.",
        )
    return chosen
