"""Export of sparse vectors to other engines: bulk files of OpenSearch, and a feed of Vespa."""

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
    ArgumentError,
    check_choice,
    check_instance,
    check_integer,
    check_least,
    check_mapping,
    list_of,
    path_of,
)
from tilefold._internal.files import atomic_directory, read_json, sha256_file, write_json
from tilefold._internal.vocabulary import fill_missing_names
from tilefold._version import __version__
from tilefold.retrieval.common.files import Json, is_unicode
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.errors import ArgumentDataError, DataError, VocabularyMismatchError
from tilefold.retrieval.vectors.shards import check_complete
from tilefold.retrieval.vectors.sparse import SparseVectors
from tilefold.retrieval.vectors.sparse_files import VectorManifest, iter_shards, read_manifest

__all__ = ["Exported", "export_opensearch", "export_vespa"]

RECORD = "export.json"
MAPPING = "mapping.json"
FEED = "feed.jsonl"
SCHEMA_VERSION = 1
FIELD_TYPES = ("rank_features", "sparse_vector")
DOTS = ("refuse", "keep")

# Maximum length of ids in bytes. Vespa accepts 64 KiB with the namespace and the document type.
_MAX_ID_BYTES = {"OpenSearch": 512, "Vespa": 65_000}
_MAX_NAME_BYTES = 32_766  # maximum length of a term of Lucene
# OpenSearch stores the number of a term modulo this in a field of type sparse_vector.
_MAX_SPARSE_VECTOR_TERMS = 32_768
_MIN_OPENSEARCH_WEIGHT = float(np.finfo(np.float32).tiny)  # OpenSearch refuses subnormal numbers
_LISTED_NAMES = 3  # names that an error lists

# Last sentences of errors about names of terms, without the full stop.
_NUMBERS_REMEDY = "Name terms by their numbers: tokens=None, or --names numbers"
_DOTS_REMEDY = f"{_NUMBERS_REMEDY} (for neural_sparse on OpenSearch dots='keep', or --dots keep)"

_FIELD_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_WORD_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NAMESPACE_PATTERN = re.compile(r"[A-Za-z0-9_-]+")

# Returns the problem that an engine has with a name or an id, such as "holds a dot", or None.
ProblemOf = Callable[[str], str | None]

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
_TEXT_FIELD = """\
        field text type string {
            indexing: index | summary
            index: enable-bm25
        }
"""


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        engine: ``"opensearch"`` or ``"vespa"``.
        n_documents: number of documents that were written.
        n_weights: number of weights of all documents.
        files: names in the folder, in the order in which the engine reads them.
    """

    engine: str
    n_documents: int
    n_weights: int
    files: list[str] = field(default_factory=list)


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
    """Write files for OpenSearch: a mapping of an index, and bulk files of documents.

    ``mapping.json`` is for ``PUT /INDEX``, and ``bulk-00000.ndjson``, ... for ``POST
    /INDEX/_bulk``. Scores of ``neural_sparse`` queries with ``query_tokens`` are inner products.
    The engine keeps 9 significant bits of a weight in ``rank_features`` (relative error below
    2^-8), and 8 bits in ``sparse_vector``.

    Args:
        vectors: vectors of documents, in memory or as a folder that ``encode`` wrote. One shard of
            a folder is in memory at a time.
        output: a new or empty folder.
        tokens: token of each term, as :func:`tilefold.retrieval.term_names` returns them. A term
            whose token is None is named ``[term_905]`` after its number. By default, and always for
            ``sparse_vector``, terms are named by their numbers.
        texts: id -> text, for a field ``text``.
        field: name of the field of the vectors.
        field_type: ``"rank_features"`` (exact search, OpenSearch 2.11), or ``"sparse_vector"``
            (Seismic, 3.3).
        dots: ``"refuse"`` tokens such as ``.``, which Elasticsearch's ``rank_features`` rejects and
            ``rank_feature`` queries cannot name; or ``"keep"`` them, for ``neural_sparse`` queries
            on OpenSearch.
        part_bytes: size of a bulk file, below the ``http.max_content_length`` of the cluster (100
            MB).
        overwrite: replace an earlier export in `output` once all files are written.

    Raises:
        VocabularyMismatchError: if the number of tokens is not the number of terms.
        DataError: if two terms share a name; the engine does not accept a name, id or weight; the
            vocabulary is too large for ``sparse_vector``; or the vectors are incomplete.
        FileExistsError: if `output` has an earlier export and `overwrite` is False.

    Examples:
        >>> from pathlib import Path
        >>> from tilefold.retrieval import SparseVectors
        >>> vectors = SparseVectors.from_rows({"d1": {0: 1.0, 2: 0.5}}, vocab_size=3)
        >>> _ = export_opensearch(vectors, "opensearch", ["card", "lost", "pin"])
        >>> sorted(path.name for path in Path("opensearch").iterdir())
        ['bulk-00000.ndjson', 'export.json', 'mapping.json']
    """
    check_choice("field_type", field_type, FIELD_TYPES)
    check_choice("dots", dots, DOTS)
    _check_form(
        "field",
        field,
        _FIELD_PATTERN,
        form="letters, digits, - or _, a letter first",
        reserved=("id", "text"),
    )
    check_integer("part_bytes", part_bytes)
    check_least("part_bytes", part_bytes)
    documents = _survey(vectors, "OpenSearch", lambda _: None, texts)
    if 0 < documents.min_weight < _MIN_OPENSEARCH_WEIGHT:
        raise ArgumentDataError(
            "vectors",
            f"OpenSearch accepts weights of at least {_MIN_OPENSEARCH_WEIGHT:.3g} (a normal "
            f"float32), got {documents.min_weight:.3g}. Drop such weights.",
        )
    if field_type == "sparse_vector":
        _check_sparse_vector(documents, tokens)

    def name_problem(name: str) -> str | None:
        """Return why OpenSearch does not accept the name of a term, or None."""
        if len(name.encode()) > _MAX_NAME_BYTES:
            return f"has more than {_MAX_NAME_BYTES} bytes"
        return "holds a dot" if dots == "refuse" and "." in name else None

    remedy = _NUMBERS_REMEDY if dots == "keep" else _DOTS_REMEDY
    term_names = _name_terms(documents, tokens, name_problem, remedy)

    def bulk_lines() -> Iterator[bytes]:
        """Yield the two lines of each document in a bulk file: the action and the fields."""
        for document_id, fields, weights in documents.iter_documents(term_names, texts):
            action = {"index": {"_id": document_id}}
            yield _json_line(action) + _json_line({**fields, field: weights})

    with _export_folder(path_of("output", output), overwrite=overwrite) as folder:
        index_body = _create_index_body(
            documents,
            field,
            field_type,
            origin=_describe_origin(documents, tokens),
            has_texts=texts is not None,
        )
        write_json(folder / MAPPING, index_body)
        return _write_record(
            folder,
            documents,
            [MAPPING, *_write_parts(folder, bulk_lines(), part_bytes)],
            tokens,
            {"field": field, "field_type": field_type, "dots": dots},
        )


def _check_sparse_vector(documents: _Documents, tokens: Sequence[str | None] | None) -> None:
    """Raise an error if a field of the type ``sparse_vector`` cannot store the vectors' terms.

    Args:
        documents: documents whose vectors are exported.
        tokens: must be None, because ``sparse_vector`` names terms by their numbers.
    """
    if tokens is not None:
        raise ArgumentError(
            "tokens",
            "must be left out with field_type='sparse_vector', whose terms are numbers.",
        )
    vocab_size = documents.is_used.size
    if vocab_size > _MAX_SPARSE_VECTOR_TERMS:
        raise ArgumentDataError(
            "vectors",
            f"sparse_vector stores the number of a term modulo {_MAX_SPARSE_VECTOR_TERMS:,}, so "
            f"some terms would collide in a vocabulary of {vocab_size:,}. Use "
            "field_type='rank_features'.",
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
    """Write files for Vespa: a schema, and a feed of documents.

    ``DOCUMENT.sd`` is the schema. ``feed.jsonl`` has a ``put`` per document for ``vespa feed``. A
    vector is a mapped tensor ``tensor<float>(token{})``, with its float32 weights. The rank profile
    named `field` scores with the inner product of the tensor and ``query(q)``. The profile ranks
    the documents that a query's ``where`` matches, because a tensor has no postings. Ids of
    documents are ``id:NAMESPACE:DOCUMENT::ID``.

    Args:
        vectors: vectors of documents, in memory or as a folder that ``encode`` wrote.
        output: a new or empty folder.
        tokens: token of each term; None names terms by their numbers.
        texts: id -> text, for a field ``text``.
        document: name of the schema and its document type.
        namespace: namespace of the ids.
        field: name of the field of the vectors, and of the rank profile.
        overwrite: replace an earlier export in `output` once all files are written.

    Raises:
        DataError: if two terms share a name; a name, id or text has a control character; or the
            vectors are incomplete.
        VocabularyMismatchError: if the number of tokens is not the number of terms.
        FileExistsError: if `output` has an earlier export and `overwrite` is False.

    Examples:
        >>> from pathlib import Path
        >>> from tilefold.retrieval import SparseVectors
        >>> vectors = SparseVectors.from_rows({"d1": {0: 1.0, 2: 0.5}}, vocab_size=3)
        >>> _ = export_vespa(vectors, "vespa", document="article")
        >>> sorted(path.name for path in Path("vespa").iterdir())
        ['article.sd', 'export.json', 'feed.jsonl']
    """
    word_form = "letters, digits or _, a letter first"
    _check_form("document", document, _WORD_PATTERN, form=word_form)
    _check_form("namespace", namespace, _NAMESPACE_PATTERN, form="letters, digits, - or _")
    _check_form(
        "field",
        field,
        _WORD_PATTERN,
        form=word_form,
        reserved=("id", "text", "token"),
    )
    documents = _survey(vectors, "Vespa", _first_refused_character, texts)

    def name_problem(name: str) -> str | None:
        """Return why Vespa does not accept the name of a term, or None."""
        refused_character = _first_refused_character(name)
        return None if refused_character is None else f"holds {refused_character}"

    term_names = _name_terms(documents, tokens, name_problem, _NUMBERS_REMEDY)
    with _export_folder(path_of("output", output), overwrite=overwrite) as folder:
        schema_file = f"{document}.sd"
        schema = _SCHEMA.format(
            document=document,
            field=field,
            text="" if texts is None else _TEXT_FIELD,
        )
        (folder / schema_file).write_text(schema, encoding="utf-8")
        with (folder / FEED).open("wb") as stream:
            for document_id, fields, weights in documents.iter_documents(term_names, texts):
                refused_character = _first_refused_character(fields.get("text", ""))
                if refused_character is not None:
                    raise DataError(
                        f"texts: Vespa does not accept texts with {refused_character}, got one for "
                        f"{document_id!r}. Remove the character.",
                    )
                # The weights are nested in "cells", because a token may be "cells" or "values".
                operation = {
                    "put": f"id:{namespace}:{document}::{document_id}",
                    "fields": {**fields, field: {"cells": weights}},
                }
                stream.write(_json_line(operation))
        return _write_record(
            folder,
            documents,
            [schema_file, FEED],
            tokens,
            {"document": document, "namespace": namespace, "field": field},
        )


@dataclass(frozen=True)
class _Documents:
    """Documents that are exported, with statistics from a first pass over their vectors.

    Weights of 0 are left out, because no score depends on them.

    Attributes:
        engine: ``"OpenSearch"`` or ``"Vespa"``.
        source: vectors in memory, or a folder of shards.
        fingerprint: digest of the vocabulary; None if unknown.
        provenance: model and texts of the vectors, as far as they are known.
        is_used: whether a document has a positive weight for each term, bool ``[V]``.
        min_weight: lightest positive weight; 0 if no weight is positive.
        max_weight: heaviest weight; 0 if no weight is positive.
        n_documents: number of documents.
        n_weights: number of positive weights.
    """

    engine: str
    source: SparseVectors | Path
    fingerprint: str | None
    provenance: Provenance
    is_used: npt.NDArray[np.bool_]
    min_weight: float
    max_weight: float
    n_documents: int
    n_weights: int

    def iter_documents(
        self,
        term_names: Sequence[str],
        texts: Mapping[str, str] | None,
    ) -> Iterator[tuple[str, dict[str, str], dict[str, float]]]:
        """Iterate over the documents in the form that OpenSearch and Vespa accept.

        Args:
            term_names: name of each term.
            texts: id -> text of a document; None to leave texts out.

        Yields:
            The document's id; its fields ``id`` and, with texts, ``text``; and name of a term ->
            positive weight.
        """
        for vectors in _shards_of(self.source):
            for row, document_id in enumerate(vectors.ids):
                terms, weights = vectors.row(row)
                is_positive = weights > 0
                weight_by_name: dict[str, float] = {}
                # numpy writes a float32 with the shortest digits that identify it, such as 0.1. A
                # direct conversion to a Python float would give 0.10000000149011612.
                decimals = weights[is_positive].astype(str).tolist()
                for term, decimal in zip(terms[is_positive].tolist(), decimals, strict=True):
                    weight_by_name[term_names[term]] = float(decimal)
                fields = {"id": document_id}
                if texts is not None:
                    fields["text"] = _read_text(texts, document_id)
                yield document_id, fields, weight_by_name


def _survey(
    vectors: SparseVectors | str | Path,
    engine: str,
    id_problem: ProblemOf,
    texts: Mapping[str, str] | None,
) -> _Documents:
    """Read all vectors once before an export, to check the ids and to collect statistics.

    Args:
        vectors: vectors of documents, in memory or as a folder.
        engine: ``"OpenSearch"`` or ``"Vespa"``.
        id_problem: function from an id to what the engine refuses in it; None if nothing.
        texts: id -> text. Only the type of the mapping is checked.

    Returns:
        The documents, with the terms in use, the range of the weights and the counts.

    Raises:
        DataError: if the vectors are of queries, there are no documents, the folder is incomplete,
            or the engine does not accept an id.
    """
    if texts is not None:
        check_mapping("texts", texts, "id -> text")
    check_instance("vectors", vectors, (SparseVectors, str, Path), "the folder of vectors")
    source: SparseVectors | Path
    description: SparseVectors | VectorManifest
    if isinstance(vectors, SparseVectors):
        source = vectors
        description = vectors
    else:
        source = Path(vectors)
        description = _read_document_manifest(source)
    is_used = np.zeros(description.vocab_size, dtype=np.bool_)
    min_weight = math.inf
    max_weight = 0.0
    n_documents = 0
    n_weights = 0
    for shard in _shards_of(source):
        for document_id in shard.ids:
            _check_id(document_id, engine, id_problem)
        is_positive = shard.data > 0
        is_used[shard.indices[is_positive]] = True
        if is_positive.any():
            min_weight = min(min_weight, float(shard.data[is_positive].min()))
            max_weight = max(max_weight, float(shard.data.max()))
        n_documents += len(shard)
        n_weights += int(is_positive.sum())
    if not n_documents:
        name = source if isinstance(source, Path) else "vectors"
        raise DataError(
            f"{name}: expected at least one document, got 0 rows. Encode a collection (tilefold "
            "encode).",
        )
    return _Documents(
        engine=engine,
        source=source,
        fingerprint=description.fingerprint,
        provenance=description.provenance,
        is_used=is_used,
        min_weight=min_weight if n_weights else 0.0,
        max_weight=max_weight,
        n_documents=n_documents,
        n_weights=n_weights,
    )


def _read_document_manifest(folder: Path) -> VectorManifest:
    """Read the manifest of a folder of vectors, which must be complete and of documents.

    Args:
        folder: the folder.

    Raises:
        DataError: if the folder is incomplete, or its vectors are of queries.
    """
    manifest = read_manifest(folder)
    check_complete(folder, manifest)
    if manifest.kind != "document":
        raise DataError(
            f"{folder}: expected vectors of documents, got vectors of kind {manifest.kind!r}.",
        )
    return manifest


def _shards_of(source: SparseVectors | Path) -> Iterator[SparseVectors]:
    """Iterate over vectors, one shard of a folder at a time."""
    if isinstance(source, SparseVectors):
        yield source
    else:
        yield from iter_shards(source)


def _check_id(document_id: str, engine: str, id_problem: ProblemOf) -> None:
    """Raise ``DataError`` if an engine does not accept an id.

    Args:
        document_id: id of a document.
        engine: ``"OpenSearch"`` or ``"Vespa"``.
        id_problem: function from an id to what the engine refuses in it, such as a character; None
            if nothing. The length is checked here.
    """
    max_bytes = _MAX_ID_BYTES[engine]
    # A string may hold half a surrogate pair, which no UTF-8 can encode.
    if not is_unicode(document_id):
        problem: str | None = "half a surrogate pair"
    else:
        problem = id_problem(document_id)
        if problem is None and len(document_id.encode()) > max_bytes:
            problem = f"more than {max_bytes} bytes"
    if problem is not None:
        raise DataError(
            f"ids: {engine} does not accept ids with {problem}, got {document_id!r}. Rename that "
            "document.",
        )


def _read_text(texts: Mapping[str, str], document_id: str) -> str:
    """Return the text of a document.

    Args:
        texts: id -> text.
        document_id: id of the document.

    Raises:
        DataError: if the text is missing or not valid Unicode.
    """
    text = texts.get(document_id)
    if text is None:
        raise DataError(
            f"texts: expected one per document, got no text for {document_id!r}. Pass the "
            "collection that was encoded.",
        )
    if not is_unicode(text):
        raise DataError(
            f"texts: expected Unicode, got half a surrogate pair in the text of {document_id!r}. "
            "Fix the text.",
        )
    return text


def _name_terms(
    documents: _Documents,
    tokens: Sequence[str | None] | None,
    name_problem: ProblemOf,
    remedy: str,
) -> list[str]:
    """Name all terms by their tokens, or by their numbers.

    Args:
        documents: documents whose terms are named. Names of terms in use are checked.
        tokens: token of each term; None to name terms by their numbers.
        name_problem: function from a name to what the engine refuses in it, such as "holds a dot";
            None if nothing.
        remedy: last sentence of an error, without the full stop.

    Returns:
        The name of each of the V terms.

    Raises:
        VocabularyMismatchError: if the number of tokens is not the number of terms.
        ArgumentDataError: if the engine does not accept a name, or two terms share a name.
    """
    vocab_size = documents.is_used.size
    if tokens is None:
        return [str(term) for term in range(vocab_size)]
    tokens = list_of("tokens", tokens)
    if len(tokens) != vocab_size:
        raise VocabularyMismatchError(
            f"tokens: expected one for each of the {vocab_size} terms of the vectors, got "
            f"{len(tokens)}. Pass the vocabulary of the model.",
        )
    names = fill_missing_names(tokens)
    refused: dict[str, list[str]] = {}  # problem -> descriptions of the terms that have it
    for term in np.flatnonzero(documents.is_used).tolist():
        name = names[term]
        if not name:
            problem: str | None = "is empty"
        elif not is_unicode(name):
            problem = "holds half a surrogate pair"
        else:
            problem = name_problem(name)
        if problem is not None:
            refused.setdefault(problem, []).append(f"{name!r} (term {term})")
    if refused:
        first_problem, descriptions = next(iter(refused.items()))
        n_more = len(refused) - 1
        more_problems = f", and names with {n_more} other problems" if n_more else ""
        raise ArgumentDataError(
            "tokens",
            f"{documents.engine} does not accept a term whose name {first_problem}, got "
            f"{_join_first_items(descriptions)}{more_problems}. {remedy}.",
        )
    _check_distinct(names, documents.is_used)
    return names


def _check_distinct(names: Sequence[str], is_used: npt.NDArray[np.bool_]) -> None:
    """Raise ``ArgumentDataError`` if two terms share a name, and documents use one of them.

    Args:
        names: name of each term.
        is_used: whether a document has a positive weight for each term, bool ``[V]``.
    """
    term_by_name: dict[str, int] = {}
    repeated = []
    for term, name in enumerate(names):
        first_term = term_by_name.setdefault(name, term)
        if first_term != term and (is_used[term] or is_used[first_term]):
            repeated.append(f"{name!r} (terms {first_term} and {term})")
    if repeated:
        raise ArgumentDataError(
            "tokens",
            f"expected distinct names of terms, got {_join_first_items(repeated)} twice. "
            f"{_NUMBERS_REMEDY}.",
        )


def _join_first_items(items: list[str]) -> str:
    """Join the first items for an error, with the number of the remaining ones."""
    shown = ", ".join(items[:_LISTED_NAMES])
    n_more = len(items) - _LISTED_NAMES
    return f"{shown} and {n_more} more" if n_more > 0 else shown


def _first_refused_character(text: str) -> str | None:
    """Describe the first character of a text that is valid in JSON but refused by Vespa.

    These are control characters, except tabs and line breaks, and Unicode's noncharacters.

    Returns:
        The description, or None if there is no such character.
    """
    for character in text:
        code = ord(character)
        if (code < 0x20 and character not in "\t\n\r") or code == 0x7F:
            return f"the control character {character!r}"
        # U+FDD0 to U+FDEF, and the last two code points of each plane.
        if 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE:
            return f"the noncharacter {character!r}"
    return None


def _check_form(
    option: str,
    value: str,
    pattern: re.Pattern[str],
    *,
    form: str,
    reserved: Sequence[str] = (),
) -> None:
    """Raise ``ArgumentError`` if an option does not have the form of names of an engine.

    Args:
        option: name of the option, for the error.
        value: value of the option.
        pattern: regular expression that the value must match completely.
        form: the form in words, for the error.
        reserved: values that are refused.
    """
    if pattern.fullmatch(value) and value not in reserved:
        return
    reserved_names = f", and none of {', '.join(reserved)}" if reserved else ""
    raise ArgumentError(option, f"expected {form}{reserved_names}, got {value!r}.")


def _create_index_body(
    documents: _Documents,
    field: str,
    field_type: str,
    *,
    origin: Json,
    has_texts: bool,
) -> Json:
    """Create the mappings and the settings of an OpenSearch index, the body of ``PUT /INDEX``.

    Args:
        documents: documents of the index.
        field: name of the field of the vectors.
        field_type: ``"rank_features"`` or ``"sparse_vector"``.
        origin: description of the vectors, which becomes metadata of the mappings.
        has_texts: whether documents have a field ``text``.
    """
    index_body: Json = {}
    vector_field: Json = {"type": field_type}
    if field_type == "sparse_vector":
        # OpenSearch stores weights in 8 bits, and clips them at the ceiling. The heaviest weight is
        # rounded up to two decimals. OpenSearch refuses a ceiling of 0.
        ceiling = math.ceil(documents.max_weight * 100) / 100 or 1.0
        vector_field["method"] = {
            "name": "seismic",
            "parameters": {"quantization_ceiling_ingest": ceiling},
        }
        index_body["settings"] = {"index": {"sparse": True}}
    properties: Json = {"id": {"type": "keyword"}, field: vector_field}
    if has_texts:
        properties["text"] = {"type": "text"}
    index_body["mappings"] = {"_meta": {"tilefold": origin}, "properties": properties}
    return index_body


def _json_line(value: object) -> bytes:
    """Return a value as one line of compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _write_parts(folder: Path, documents: Iterator[bytes], part_bytes: int) -> list[str]:
    """Write documents into several bulk files of a limited size.

    Args:
        folder: folder of the export.
        documents: the lines of each document.
        part_bytes: maximum number of bytes of a file. A file with a single document may be longer.

    Returns:
        Names of the files.
    """
    names: list[str] = []
    lines = next(documents, None)
    while lines is not None:
        name = f"bulk-{len(names):05d}.ndjson"
        names.append(name)
        with (folder / name).open("wb") as stream:
            size = 0
            # The first document of a file is written even if it is too long.
            while lines is not None and (not size or size + len(lines) <= part_bytes):
                size += stream.write(lines)
                lines = next(documents, None)
    return names


def _export_folder(output: Path, *, overwrite: bool) -> AbstractContextManager[Path]:
    """Create an empty folder that is renamed to `output` at the end of the block.

    Args:
        output: path of a new or empty folder or, with `overwrite`, of an earlier export.
        overwrite: replace an earlier export.
    """
    # The record of an earlier export lists its files, which may be replaced.
    record = read_json(output / RECORD) or {}
    files = record.get("files")
    earlier_files = files if isinstance(files, dict) else ()
    return atomic_directory(output, own_names=[RECORD, *earlier_files], overwrite=overwrite)


def _describe_origin(documents: _Documents, tokens: Sequence[str | None] | None) -> Json:
    """Describe the exported vectors: versions, counts, fingerprints, and how terms are named.

    Args:
        documents: documents that are exported.
        tokens: token of each term; None if terms are named by their numbers.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "tilefold": __version__,
        "n_documents": documents.n_documents,
        "vocab_size": int(documents.is_used.size),
        "fingerprint": documents.fingerprint,
        **documents.provenance.to_dict(),
        "names": "numbers" if tokens is None else "tokens",
    }


def _write_record(
    folder: Path,
    documents: _Documents,
    file_names: list[str],
    tokens: Sequence[str | None] | None,
    settings: Mapping[str, str],
) -> Exported:
    """Write ``export.json``: the origin and the settings of the files, and their checksums.

    Args:
        folder: folder of the export.
        documents: documents that were exported.
        file_names: files of the export, in the order in which the engine reads them.
        tokens: token of each term; None if terms are named by their numbers.
        settings: options of the export.

    Returns:
        The result of the export.
    """
    exported = Exported(
        engine=documents.engine.lower(),
        n_documents=documents.n_documents,
        n_weights=documents.n_weights,
        files=file_names,
    )
    record = {
        **asdict(exported),
        **_describe_origin(documents, tokens),
        "settings": settings,
        "files": {name: sha256_file(folder / name) for name in file_names},
    }
    write_json(folder / RECORD, record)
    return exported
