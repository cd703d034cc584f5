"""Bulk files and the mapping of an OpenSearch index of sparse vectors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilefold._files import write_json
from tilefold.retrieval._sparse import SparseVectors
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.export._files import (
    Documents,
    Exported,
    choice,
    export_folder,
    line,
    name_terms,
    origin,
    survey,
    write_record,
)

__all__ = ["export_opensearch"]

FIELD_TYPES = ("rank_features", "sparse_vector")
DOTS = ("refuse", "keep")
MAPPING = "mapping.json"
_LONGEST_ID = 512  # bytes
_LONGEST_NAME = 32_766  # bytes of a Lucene term
_SPARSE_VECTOR_TERMS = 32_768  # numbers of terms are folded beyond
_SMALLEST_WEIGHT = float(np.finfo(np.float32).tiny)
_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_TAKEN = ("id", "text")
_REMEDY = "Leave tokens out, so that terms are named by their numbers"


def export_opensearch(
    vectors: SparseVectors | str | Path,
    output: str | Path,
    tokens: Sequence[str] | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    field: str = "sparse",
    field_type: str = "rank_features",
    dots: str = "refuse",
    part_bytes: int = 50_000_000,
) -> Exported:
    """Write ``mapping.json`` and ``bulk-00000.ndjson``, ... for ``PUT /INDEX`` and ``POST /INDEX/_bulk``.

    Scores of ``neural_sparse`` queries with ``query_tokens`` are inner products. The engine keeps 9 significant bits
    of a weight in ``rank_features`` (relative error below 2^-8), and 8 bits in ``sparse_vector``.

    Args:
        vectors: documents, in memory or as a folder that ``encode`` wrote, of which a shard at a time is in memory.
        output: a new folder, or an earlier export, which is replaced when all is written.
        tokens: token of each term; terms are called by their numbers without. ``sparse_vector`` knows numbers alone.
        texts: id -> text, for a field ``text``.
        field: name of the field of the vectors.
        field_type: ``"rank_features"`` (exact search, OpenSearch 2.11), or ``"sparse_vector"`` (Seismic, 3.3).
        dots: ``"refuse"`` tokens such as ``.``, which Elasticsearch's ``rank_features`` rejects and ``rank_feature``
            queries cannot name; or ``"keep"`` them, for ``neural_sparse`` queries on OpenSearch.
        part_bytes: size of a bulk file, below the ``http.max_content_length`` of the cluster (100 MB).

    Raises:
        ValueError: a wrong option.
        VocabularyMismatchError: another number of tokens than the vectors have terms.
        DataError: two terms with one name, a name or id that the engine does not take, a weight too small for it,
            a vocabulary that ``sparse_vector`` would fold, or vectors that are not whole.
    """
    choice("field_type", field_type, FIELD_TYPES)
    choice("dots", dots, DOTS)
    if not _FIELD.fullmatch(field) or field in _TAKEN:
        raise ValueError(f"field: expected letters, digits, - or _, and none of {', '.join(_TAKEN)}, got {field!r}.")
    if part_bytes < 1:
        raise ValueError(f"part_bytes: expected at least 1, got {part_bytes}.")
    documents = survey(vectors, _bad_id, "OpenSearch")
    _check_weights(documents)
    if field_type == "sparse_vector":
        _check_folding(documents, tokens)
    more = "" if dots == "keep" else " (or dots=keep, for neural_sparse on OpenSearch)"
    names = name_terms(documents.used, tokens, lambda name: _bad_name(name, dots), "OpenSearch", _REMEDY, more)
    made_of = origin(documents, tokens)
    actions = (
        (line({"index": {"_id": name}}), line({**fields, field: weights}))
        for name, fields, weights in documents.fields(names, texts)
    )
    with export_folder(Path(output)) as folder:
        write_json(folder / MAPPING, _mapping(documents, field, field_type, made_of, texts is not None))
        files = [MAPPING, *_write_parts(folder, actions, part_bytes)]
        settings = {"field": field, "field_type": field_type, "dots": dots}
        return write_record(folder, "opensearch", documents, files, made_of, **settings)


def _mapping(
    documents: Documents, field: str, field_type: str, made_of: Mapping[str, Any], texts: bool
) -> dict[str, Any]:
    vectors: dict[str, Any] = {"type": field_type}
    settings: dict[str, Any] = {}
    if field_type == "sparse_vector":
        ceiling = math.ceil(documents.heaviest * 100) / 100 or 1.0  # weights above it would be cut off; 0 is refused
        vectors["method"] = {"name": "seismic", "parameters": {"quantization_ceiling_ingest": ceiling}}
        settings = {"settings": {"index": {"sparse": True}}}
    properties = {"id": {"type": "keyword"}, field: vectors}
    if texts:
        properties["text"] = {"type": "text"}
    return {**settings, "mappings": {"_meta": {"tilefold": dict(made_of)}, "properties": properties}}


def _write_parts(folder: Path, actions: Iterator[tuple[bytes, bytes]], part_bytes: int) -> list[str]:
    """Write files of at most `part_bytes`, or of one document that is longer; their names."""
    names: list[str] = []
    pair = next(actions, None)
    while pair is not None:
        names.append(f"bulk-{len(names):05d}.ndjson")
        with (folder / names[-1]).open("wb") as stream:
            size = 0
            while pair is not None and (not size or size + len(pair[0]) + len(pair[1]) <= part_bytes):
                size += stream.write(pair[0]) + stream.write(pair[1])
                pair = next(actions, None)
    return names


def _bad_id(name: str) -> str | None:
    return f"more than {_LONGEST_ID} bytes" if len(name.encode()) > _LONGEST_ID else None


def _bad_name(name: str, dots: str) -> str | None:
    if len(name.encode()) > _LONGEST_NAME:
        return f"has more than {_LONGEST_NAME} bytes"
    return "holds a dot" if dots == "refuse" and "." in name else None


def _check_weights(documents: Documents) -> None:
    if documents.n_weights and documents.lightest < _SMALLEST_WEIGHT:
        raise DataError(
            f"vectors: OpenSearch takes weights of at least {_SMALLEST_WEIGHT:.3g} (a normal float32), "
            f"got {documents.lightest:.3g}. Encode with a larger minimum, or drop such weights."
        )


def _check_folding(documents: Documents, tokens: Sequence[str] | None) -> None:
    if tokens is not None:
        raise ValueError("tokens: expected None with field_type='sparse_vector', whose terms are numbers, got tokens.")
    if documents.used.size > _SPARSE_VECTOR_TERMS:
        raise DataError(
            f"vectors: sparse_vector of OpenSearch takes the numbers of terms modulo {_SPARSE_VECTOR_TERMS:,}, so that "
            f"different terms would match in a vocabulary of {documents.used.size:,}. Use field_type='rank_features'."
        )
