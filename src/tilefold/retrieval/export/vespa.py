"""The feed and the schema of a Vespa application with sparse vectors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilefold.retrieval._sparse import SparseVectors
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.export._files import (
    Exported,
    control_character,
    export_folder,
    line,
    name_terms,
    origin,
    survey,
    write_record,
)

__all__ = ["export_vespa"]

FEED = "feed.jsonl"
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]+")
_TAKEN = ("id", "text", "token")
_LONGEST_ID = 65_000  # bytes of a document id, of at most 64 KiB with its namespace and type

_SCHEMA = """\
schema {document} {{
    document {document} {{
        field id type string {{
            indexing: summary | attribute
            match: word
        }}
{text}        field {field} type tensor<float>(token{{}}) {{
            indexing: attribute | summary
        }}
    }}
    rank-profile {field} {{
        inputs {{
            query(q) tensor<float>(token{{}})
        }}
        first-phase {{
            expression: sum(query(q) * attribute({field}))
        }}
    }}
}}
"""
_TEXT = """\
        field text type string {
            indexing: index | summary
            index: enable-bm25
        }
"""


def export_vespa(
    vectors: SparseVectors | str | Path,
    output: str | Path,
    tokens: Sequence[str] | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    document: str = "doc",
    namespace: str = "tilefold",
    field: str = "sparse",
) -> Exported:
    """Write ``DOCUMENT.sd``, the schema, and ``feed.jsonl`` with a ``put`` per document for ``vespa feed``.

    A vector is a mapped tensor ``tensor<float>(token{})``, and the rank profile named `field` scores with the inner
    product of it and ``query(q)``; float32 weights are kept. The profile ranks what a query's ``where`` matches: a
    tensor has no postings of its own.

    Args:
        vectors, output, tokens, texts: as in :func:`tilefold.retrieval.export.export_opensearch`.
        document: name of the schema and its document type.
        namespace: of the document ids ``id:NAMESPACE:DOCUMENT::ID``.
        field: name of the field of the vectors.

    Raises:
        ValueError: a wrong option.
        VocabularyMismatchError: another number of tokens than the vectors have terms.
        DataError: two terms with one name, an empty name, a name, an id or a text with a control character, an id
            that is too long, or vectors that are not whole.
    """
    for option, value, form in (("document", document, _WORD), ("namespace", namespace, _NAMESPACE)):
        if not form.fullmatch(value):
            raise ValueError(f"{option}: expected a letter, then letters, digits or _, got {value!r}.")
    if not _WORD.fullmatch(field) or field in _TAKEN:
        raise ValueError(f"field: expected letters, digits or _, and none of {', '.join(_TAKEN)}, got {field!r}.")
    documents = survey(vectors, _bad_id, "Vespa")
    remedy = "Leave tokens out, so that terms are named by their numbers"
    names = name_terms(documents.used, tokens, _bad_name, "Vespa", remedy)
    schema, prefix = f"{document}.sd", f"id:{namespace}:{document}::"
    with export_folder(Path(output)) as folder:
        text = _TEXT if texts is not None else ""
        (folder / schema).write_text(_SCHEMA.format(document=document, field=field, text=text), encoding="utf-8")
        with (folder / FEED).open("wb") as stream:
            for name, fields, weights in documents.fields(names, texts):
                _check_text(fields.get("text", ""), name)
                # below "cells", because a token may be called cells, values or type itself
                stream.write(line({"put": f"{prefix}{name}", "fields": {**fields, field: {"cells": weights}}}))
        settings = {"document": document, "namespace": namespace, "field": field}
        return write_record(folder, "vespa", documents, [schema, FEED], origin(documents, tokens), **settings)


def _bad_id(name: str) -> str | None:
    if len(name.encode()) > _LONGEST_ID:
        return f"more than {_LONGEST_ID} bytes"
    bad = control_character(name)
    return None if bad is None else f"the control character {bad!r}"


def _bad_name(name: str) -> str | None:
    bad = control_character(name)
    return None if bad is None else f"holds the control character {bad!r}"


def _check_text(text: str, name: str) -> None:
    bad = control_character(text)
    if bad is not None:
        raise DataError(
            f"texts: Vespa takes no text with the control character {bad!r}, got one for {name!r}. Mend it."
        )
