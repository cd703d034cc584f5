"""Files that feed other engines with sparse vectors: OpenSearch (bulk) and Vespa (feed)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import (
    check_choice,
    check_instance,
    check_least,
    check_mapping,
    list_of,
)
from tilefold._internal.files import atomic_directory, read_json, sha256_file, write_json
from tilefold._internal.vocabulary import fill_missing_names
from tilefold._version import __version__
from tilefold.retrieval.common.files import Json, is_unicode
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.vectors.shards import check_complete
from tilefold.retrieval.vectors.sparse import SparseVectors
from tilefold.retrieval.vectors.sparse_files import VectorManifest, iter_shards, read_manifest

__all__ = ["Exported", "export_opensearch", "export_vespa"]

RECORD, MAPPING, FEED = "export.json", "mapping.json", "feed.jsonl"
SCHEMA_VERSION = 1
FIELD_TYPES = ("rank_features", "sparse_vector")
DOTS = ("refuse", "keep")
_SHOWN = 3  # names in a message
_LONGEST_IDS = {
    "OpenSearch": 512,
    "Vespa": 65_000,
}  # bytes; 64 KiB with namespace and type in Vespa
_LONGEST_NAME = 32_766  # bytes of a Lucene term
_SPARSE_VECTOR_TERMS = 32_768  # numbers of terms are folded beyond
_SMALLEST_WEIGHT = float(np.finfo(np.float32).tiny)
_REMEDY = "Leave tokens out, so that terms are named by their numbers"
_FIELD, _WORD, _NAMESPACE = map(
    re.compile,
    (r"[A-Za-z][A-Za-z0-9_-]*", r"[A-Za-z][A-Za-z0-9_]*", r"[A-Za-z0-9_-]+"),
)

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


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    engine: str  # "opensearch" or "vespa"
    n_documents: int  # that were written, and the weights of all of them
    n_weights: int
    files: list[str] = field(
        default_factory=list,
    )  # names in the folder, in the order in which the engine wants them


def export_opensearch(
    vectors: SparseVectors | str | Path,
    output: str | Path,
    tokens: Sequence[str | None] | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    field: str = "sparse",
    field_type: str = "rank_features",
    dots: str = "refuse",
    part_bytes: int = 50_000_000,
    overwrite: bool = False,
) -> Exported:
    """Write ``mapping.json`` and ``bulk-00000.ndjson``, ... for ``PUT /INDEX`` and ``POST
    /INDEX/_bulk``.

    Scores of ``neural_sparse`` queries with ``query_tokens`` are inner products. The engine keeps 9
    significant bits of a weight in ``rank_features`` (relative error below 2^-8), and 8 bits in
    ``sparse_vector``.

    Args:
        vectors: documents, in memory or as a folder that ``encode`` wrote, of which a shard at a
            time is in memory.
        output: a new or empty folder.
        tokens: token of each term, as :func:`tilefold.retrieval.term_names` gives them; terms are
            called by their numbers without. A term whose token is None is named ``[term_905]``
            after its number. ``sparse_vector`` knows numbers alone.
        texts: id -> text, for a field ``text``.
        field: name of the field of the vectors.
        field_type: ``"rank_features"`` (exact search, OpenSearch 2.11), or ``"sparse_vector"``
            (Seismic, 3.3).
        dots: ``"refuse"`` tokens such as ``.``, which Elasticsearch's ``rank_features`` rejects and
            ``rank_feature`` queries cannot name; or ``"keep"`` them, for ``neural_sparse`` queries
            on OpenSearch.
        part_bytes: size of a bulk file, below the ``http.max_content_length`` of the cluster (100
            MB).
        overwrite: replace an earlier export in `output` when all is written; without, that is a
            ``FileExistsError``.

    Another number of tokens than the vectors have terms is a ``VocabularyMismatchError``; two terms
    with one name, a name, id or weight that the engine does not take, a vocabulary that
    ``sparse_vector`` would fold, or vectors that are not whole are a ``DataError``.
    """
    check_choice("field_type", field_type, FIELD_TYPES)
    check_choice("dots", dots, DOTS)
    _check_form("field", field, _FIELD, ("id", "text"), ", -")
    check_least("part_bytes", part_bytes)
    documents = _survey(vectors, "OpenSearch", lambda text: None, texts)
    if 0 < (lightest := documents.weights[0]) < _SMALLEST_WEIGHT:
        least = f"weights of at least {_SMALLEST_WEIGHT:.3g} (a normal float32)"
        raise DataError(
            f"vectors: OpenSearch takes {least}, got {lightest:.3g}. Drop such weights.",
        )
    if field_type == "sparse_vector" and tokens is not None:
        raise ValueError(
            "tokens: expected None with field_type='sparse_vector', whose terms are numbers, got "
            "tokens.",
        )
    if field_type == "sparse_vector" and documents.used.size > _SPARSE_VECTOR_TERMS:
        why = f"modulo {_SPARSE_VECTOR_TERMS:,}, so that some would match in a vocabulary of {documents.used.size:,}"
        raise DataError(
            f"vectors: sparse_vector takes numbers of terms {why}. Use field_type='rank_features'.",
        )

    def bad_name(name: str) -> str | None:
        if len(name.encode()) > _LONGEST_NAME:
            return f"has more than {_LONGEST_NAME} bytes"
        return "holds a dot" if dots == "refuse" and "." in name else None

    remedy = _REMEDY + (
        "" if dots == "keep" else " (or dots=keep, for neural_sparse on OpenSearch)"
    )
    names = _name_terms(documents, tokens, bad_name, remedy)
    sources = (
        (name, {**fields, field: weights})
        for name, fields, weights in documents.fields(names, texts)
    )
    actions = (_line({"index": {"_id": name}}) + _line(source) for name, source in sources)
    with _export_folder(Path(output), overwrite=overwrite) as folder:
        origin = _origin(documents, tokens)
        write_json(
            folder / MAPPING,
            _mapping(documents, field, field_type, origin, texts is not None),
        )
        files = [MAPPING, *_write_parts(folder, actions, part_bytes)]
        return _record(
            folder,
            documents,
            files,
            tokens,
            field=field,
            field_type=field_type,
            dots=dots,
        )


def export_vespa(
    vectors: SparseVectors | str | Path,
    output: str | Path,
    tokens: Sequence[str | None] | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    document: str = "doc",
    namespace: str = "tilefold",
    field: str = "sparse",
    overwrite: bool = False,
) -> Exported:
    """Write ``DOCUMENT.sd``, the schema, and ``feed.jsonl`` with a ``put`` per document for ``vespa
    feed``.

    A vector is a mapped tensor ``tensor<float>(token{})``, and the rank profile named `field`
    scores with the inner product of it and ``query(q)``; float32 weights are kept. The profile
    ranks what a query's ``where`` matches: a tensor has no postings of its own. Ids of documents
    are ``id:NAMESPACE:DOCUMENT::ID``, where `document` names the schema and its type; names, ids
    and texts have no control character. The other arguments and errors are those of
    :func:`tilefold.retrieval.vectors.export.export_opensearch`.
    """
    _check_form("document", document, _WORD)
    _check_form("namespace", namespace, _NAMESPACE)
    _check_form("field", field, _WORD, ("id", "text", "token"))
    documents = _survey(vectors, "Vespa", _control_character, texts)

    def bad_name(name: str) -> str | None:
        bad = _control_character(name)
        return bad and f"holds {bad}"

    names = _name_terms(documents, tokens, bad_name, _REMEDY)
    schema, prefix = f"{document}.sd", f"id:{namespace}:{document}::"
    with _export_folder(Path(output), overwrite=overwrite) as folder:
        text = "" if texts is None else _TEXT
        (folder / schema).write_text(
            _SCHEMA.format(document=document, field=field, text=text),
            encoding="utf-8",
        )
        with (folder / FEED).open("wb") as stream:
            for name, fields, weights in documents.fields(names, texts):
                if bad := _control_character(fields.get("text", "")):
                    raise DataError(
                        f"texts: Vespa takes no text with {bad}, got one for {name!r}. Mend it.",
                    )
                # below "cells", because a token may be called cells, values or type itself
                stream.write(
                    _line(
                        {"put": f"{prefix}{name}", "fields": {**fields, field: {"cells": weights}}},
                    ),
                )
        settings = {"document": document, "namespace": namespace, "field": field}
        return _record(folder, documents, [schema, FEED], tokens, **settings)


@dataclass(frozen=True)
class _Documents:
    """Vectors in memory, or the shards of a folder; weights of 0, which no score can feel, are left
    out.
    """

    engine: str
    source: SparseVectors | Path
    fingerprint: str | None
    provenance: Provenance
    used: npt.NDArray[np.bool_]  # [V], whether a document has a positive weight for the term
    weights: tuple[float, float]  # the lightest and the heaviest that are positive; 0 without any
    n_documents: int
    n_weights: int  # positive ones

    def fields(
        self,
        names: Sequence[str],
        texts: Mapping[str, str] | None,
    ) -> Iterator[tuple[str, dict[str, str], dict[str, float]]]:
        """Id, fields of texts, and positive weights (the shortest decimals of their float32) by
        name of a document.
        """
        for part in _parts(self.source):
            for row, name in enumerate(part.ids):
                terms, weights = part.row(row)
                keep = weights > 0
                decimals = map(float, weights[keep].astype(str).tolist())
                fields = (
                    {"id": name} if texts is None else {"id": name, "text": _text_of(texts, name)}
                )
                yield (
                    name,
                    fields,
                    dict(zip((names[at] for at in terms[keep].tolist()), decimals, strict=True)),
                )


def _survey(
    vectors: SparseVectors | str | Path,
    engine: str,
    complaint: Callable[[str], str | None],
    texts: Mapping[str, str] | None,
) -> _Documents:
    """Read `vectors` once, and refuse ids that the engine does not take."""
    if texts is not None:
        check_mapping("texts", texts, "id -> text")
    check_instance("vectors", vectors, (SparseVectors, str, Path), "the folder of vectors")
    source = vectors if isinstance(vectors, SparseVectors) else Path(vectors)
    about = source if isinstance(source, SparseVectors) else read_manifest(source)
    if isinstance(source, Path) and isinstance(about, VectorManifest):
        check_complete(source, about)
        if about.kind != "document":
            raise DataError(
                f"{source}: expected vectors of documents, got vectors of kind {about.kind!r}.",
            )
    used = np.zeros(about.vocab_size, dtype=np.bool_)
    low, high, documents, weights, longest = float("inf"), 0.0, 0, 0, _LONGEST_IDS[engine]
    for part in _parts(source):
        for name in part.ids:
            why = "half a surrogate pair" if not is_unicode(name) else complaint(name)
            if why is None and len(name.encode()) > longest:
                why = f"more than {longest} bytes"
            if why is not None:
                raise DataError(
                    f"ids: {engine} takes no id with {why}, got {name!r}. Rename that document.",
                )
        positive = part.data > 0
        used[part.indices[positive]] = True
        if positive.any():
            low, high = (
                min(low, float(part.data[positive].min())),
                max(high, float(part.data.max())),
            )
        documents, weights = documents + len(part), weights + int(positive.sum())
    if not documents:
        where = source if isinstance(source, Path) else "vectors"
        raise DataError(
            f"{where}: expected at least one document, got 0 rows. Encode a collection (tilefold "
            "encode).",
        )
    span = (low if weights else 0.0, high)
    return _Documents(
        engine,
        source,
        about.fingerprint,
        about.provenance,
        used,
        span,
        documents,
        weights,
    )


def _parts(source: SparseVectors | Path) -> Iterator[SparseVectors]:
    return iter([source]) if isinstance(source, SparseVectors) else iter_shards(source)


def _text_of(texts: Mapping[str, str], name: str) -> str:
    if (text := texts.get(name)) is None:
        raise DataError(
            f"texts: expected one per document, got no text for {name!r}. Give the collection "
            "encoded.",
        )
    if not is_unicode(text):
        raise DataError(
            f"texts: expected Unicode, got half a surrogate pair in that of {name!r}. Mend the "
            "text.",
        )
    return text


def _name_terms(
    documents: _Documents,
    tokens: Sequence[str | None] | None,
    complaint: Callable[[str], str | None],
    remedy: str,
) -> list[str]:
    """Name of each term: its token, or its number; refused by `complaint`, and where two have the
    same one.
    """
    used = documents.used
    if tokens is None:
        return [str(term) for term in range(used.size)]
    tokens = list_of("tokens", tokens)
    if len(tokens) != used.size:
        said = f"expected one for each of the {used.size} terms of the vectors, got {len(tokens)}"
        raise VocabularyMismatchError(f"tokens: {said}. Pass the vocabulary of the model.")
    names = fill_missing_names(tokens)
    bad: dict[str, list[str]] = {}
    for term in np.flatnonzero(used).tolist():
        name = names[term]
        why = (
            "is empty"
            if not name
            else "holds half a surrogate pair"
            if not is_unicode(name)
            else complaint(name)
        )
        if why is not None:
            bad.setdefault(why, []).append(f"{name!r} (term {term})")
    if bad:
        why, owners = next(iter(bad.items()))
        got = _some(owners) + (
            f", and {len(bad) - 1} other kinds of such names" if len(bad) > 1 else ""
        )
        raise DataError(
            f"tokens: {documents.engine} takes no term whose name {why}, got {got}. {remedy}.",
        )
    first: dict[str, int] = {}
    same = [
        f"{name!r} (terms {first[name]} and {term})"
        for term, name in enumerate(names)
        if first.setdefault(name, term) != term and (used[term] or used[first[name]])
    ]
    if same:
        raise DataError(
            f"tokens: expected a name of its own for every term, got {_some(same)} twice. "
            f"{_REMEDY}.",
        )
    return names


def _some(items: list[str]) -> str:
    left = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {left} more" if left > 0 else "")


def _control_character(text: str) -> str | None:
    """Name of the first character of `text` that JSON carries but text fields of engines refuse, or
    None.
    """
    for character in text:
        code = ord(character)
        control = (code < 0x20 and character not in "\t\n\r") or code == 0x7F
        if control or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE:
            return f"the control character {character!r}"
    return None


def _check_form(
    option: str,
    value: str,
    form: re.Pattern[str],
    taken: Sequence[str] = (),
    more: str = "",
) -> None:
    if not form.fullmatch(value) or value in taken:
        none_of = f", and none of {', '.join(taken)}" if taken else ""
        raise ValueError(
            f"{option}: expected letters, digits{more} or _, a letter first{none_of}, got "
            f"{value!r}.",
        )


def _mapping(documents: _Documents, field: str, field_type: str, origin: Json, texts: bool) -> Json:
    vectors: Json = {"type": field_type}
    settings = {}
    if field_type == "sparse_vector":
        ceiling = (
            math.ceil(documents.weights[1] * 100) / 100 or 1.0
        )  # weights above it would be cut off; 0 is refused
        vectors["method"] = {
            "name": "seismic",
            "parameters": {"quantization_ceiling_ingest": ceiling},
        }
        settings = {"settings": {"index": {"sparse": True}}}
    properties = {"id": {"type": "keyword"}, field: vectors} | (
        {"text": {"type": "text"}} if texts else {}
    )
    return {**settings, "mappings": {"_meta": {"tilefold": origin}, "properties": properties}}


def _line(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _write_parts(folder: Path, actions: Iterator[bytes], part_bytes: int) -> list[str]:
    """Write files of at most `part_bytes`, or of one document that is longer; their names."""
    names: list[str] = []
    action = next(actions, None)
    while action is not None:
        names.append(f"bulk-{len(names):05d}.ndjson")
        with (folder / names[-1]).open("wb") as stream:
            size = 0
            while action is not None and (not size or size + len(action) <= part_bytes):
                size += stream.write(action)
                action = next(actions, None)
    return names


def _export_folder(output: Path, *, overwrite: bool) -> AbstractContextManager[Path]:
    """An empty folder that becomes `output`, which may be new, empty or with `overwrite` an earlier
    export.
    """
    files = (read_json(output / RECORD) or {}).get("files")
    listed = files if isinstance(files, dict) else ()
    return atomic_directory(output, own_names=[RECORD, *listed], overwrite=overwrite)


def _origin(documents: _Documents, tokens: Sequence[str | None] | None) -> Json:
    """Facts of the vectors that the engine keeps with them."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tilefold": __version__,
        "n_documents": documents.n_documents,
        "vocab_size": int(documents.used.size),
        "fingerprint": documents.fingerprint,
        **documents.provenance.to_dict(),
        "names": "numbers" if tokens is None else "tokens",
    }


def _record(
    folder: Path,
    documents: _Documents,
    names: list[str],
    tokens: Sequence[str | None] | None,
    **settings: str,
) -> Exported:
    """Write ``export.json``: the origin of the files, which have these `names`, and their
    checksums.
    """
    exported = Exported(documents.engine.lower(), documents.n_documents, documents.n_weights, names)
    files = {name: sha256_file(folder / name) for name in names}
    record = {
        **asdict(exported),
        **_origin(documents, tokens),
        "settings": settings,
        "files": files,
    }
    write_json(folder / RECORD, record)
    return exported
