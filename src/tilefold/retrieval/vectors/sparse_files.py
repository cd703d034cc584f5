"""Sparse vectors on disk: Parquet shards, and a manifest that lists complete ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tilefold._internal.arguments import (
    ArgumentError,
    check_integer,
    check_least,
    check_mapping,
    list_of,
    list_of_ids,
    path_of,
)
from tilefold._internal.files import exported_file
from tilefold._internal.vocabulary import fill_missing_names, term_names, vocabulary_fingerprint
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.files import Json, arrow, json_line
from tilefold.retrieval.errors import ArgumentDataError, DataError, VocabularyMismatchError
from tilefold.retrieval.vectors.shards import (
    REMEDY,
    Manifest,
    ShardWriter,
    check_complete,
    layout_of,
    shard_file,
)
from tilefold.retrieval.vectors.sparse import (
    Floats,
    Ints,
    Longs,
    SparseVectors,
    check_same_vocabulary,
    check_vectors,
)

__all__ = [
    "SparseVectorWriter",
    "SparseVectors",
    "VectorManifest",
    "check_same_vocabulary",
    "export_jsonl",
    "iter_shards",
    "layout_of",
    "read_manifest",
    "read_rows",
    "read_vectors",
    "term_names",
    "vocabulary_fingerprint",
    "write_vectors",
]


@dataclass
class VectorManifest(Manifest):
    """Manifest of a folder of sparse vectors.

    The folder has the file ``manifest.json`` and the shards ``part-00000.parquet``,
    ``part-00001.parquet``, ... A shard has the columns ``id`` (string), ``indices`` (list of int32)
    and ``weights`` (list of float32).

    Attributes:
        vocab_size: number of terms of the vocabulary.
        fingerprint: digest of the vocabulary; see :class:`SparseVectors`.
        model_name: name of the model that computed the vectors, if known.
        kind: ``"document"`` or ``"query"``.
        n_texts: number of texts to encode, including failed ones; None if only the rows are known.
        n_documents: number of rows of all shards.
        shards: ``{"file", "rows", "nonzeros", "sha256", "truncated", "precision"}`` for each shard,
            in order. ``precision`` is the number type in which the model computed, such as
            ``"bf16"``.
        settings: how the vectors were computed. A folder is resumed only if the settings are equal.
        failed: id -> reason for each text that could not be encoded.
        partial: the file of the finished part of the next shard, its checksum and its failed
            texts. Empty if no part is stored.
        truncated: ``{"count", "max_length"}``, how many texts were truncated before they were
            encoded, and to how many tokens (None for a model without a limit). Empty if they were
            not counted.
        complete: whether the writer finished.
    """

    LAYOUT = "sparse"
    CONTENTS = "sparse vectors"
    OTHER_KIND_REMEDY = (
        "Index token vectors with tilefold index --backend late --tokens, or rerank with --rerank."
    )
    IDENTITY = ("vocab_size", "fingerprint", "model_name", "kind")

    vocab_size: int
    fingerprint: str | None = None
    model_name: str | None = None
    kind: str = "document"
    layout: str = field(default="sparse", kw_only=True)

    def vectors(
        self,
        ids: list[str],
        indptr: Longs,
        indices: Ints,
        weights: Floats,
    ) -> SparseVectors:
        """Wrap CSR arrays as vectors with the vocabulary and the provenance of this manifest.

        Args:
            ids: N ids.
            indptr: where the entries of each row begin, ``[N + 1]``.
            indices: term of each entry, ``[nnz]``.
            weights: weight of each entry, ``[nnz]``.
        """
        return SparseVectors(
            ids,
            indptr,
            indices,
            weights,
            self.vocab_size,
            self.fingerprint,
            self.provenance,
        )

    def no_vectors(self) -> SparseVectors:
        """Return the vectors of a folder without rows."""
        return self.vectors(
            [],
            np.zeros(1, np.int64),
            np.zeros(0, np.int32),
            np.zeros(0, np.float32),
        )


class SparseVectorWriter(ShardWriter[VectorManifest, SparseVectors]):
    """Writer of a folder of sparse vectors, which one process at a time may use.

    Shards and manifest are replaced atomically, and a shard counts only once the manifest lists it.
    Arguments, methods and errors are described in
    :class:`tilefold.retrieval.vectors.shards.ShardWriter`.
    """

    suffix = "parquet"
    package = ("pyarrow.parquet", "pyarrow", "Storing vectors")
    manifest_type = VectorManifest

    def _check(self, vectors: SparseVectors) -> None:
        check_same_vocabulary(self.manifest, vectors, "the folder", "vectors")

    def _counts(self, vectors: SparseVectors) -> dict[str, int]:
        return {"rows": len(vectors), "nonzeros": int(vectors.indices.size)}

    def _store(self, vectors: SparseVectors, path: Path) -> None:
        """Write a shard as a Parquet file with the columns id, indices and weights.

        Args:
            vectors: the rows of the shard.
            path: the file to write.
        """
        pa, parquet = arrow("Storing vectors")
        if vectors.indices.size > np.iinfo(np.int32).max:
            raise ArgumentError(
                "vectors",
                f"expected fewer than 2^31 weights per shard, got {vectors.indices.size}.",
            )
        offsets = pa.array(vectors.indptr.astype(np.int32))
        indices = pa.array(vectors.indices, pa.int32())
        weights = pa.array(vectors.data, pa.float32())
        table = pa.table(
            {
                "id": pa.array(vectors.ids, pa.string()),
                "indices": pa.ListArray.from_arrays(offsets, indices),
                "weights": pa.ListArray.from_arrays(offsets, weights),
            },
        )
        parquet.write_table(
            table,
            path,
            compression="zstd",
            # Few weights are equal. Without dictionaries, writing takes a third of the time and
            # two thirds of the bytes.
            use_dictionary=False,
            column_encoding={
                "indices.list.element": "DELTA_BINARY_PACKED",
                "weights.list.element": "BYTE_STREAM_SPLIT",
            },
        )

    def _read(self, path: Path) -> SparseVectors:
        return _read_parquet(path, self.manifest)


def read_manifest(path: str | Path) -> VectorManifest:
    """Read the manifest of a folder of sparse vectors, complete or not.

    Raises:
        FileNotFoundError: if there is no manifest.
        DataError: if the manifest is damaged or for another kind of vectors.
    """
    return VectorManifest.read(path_of("path", path))


def read_vectors(path: str | Path) -> SparseVectors:
    """Read a folder of sparse vectors into memory.

    Raises:
        FileNotFoundError: if a file is missing.
        DataError: if the writer did not finish, or a shard is damaged or has invalid vectors.

    Examples:
        >>> from tilefold.retrieval import SparseVectors, write_vectors
        >>> vectors = SparseVectors.from_rows({"d1": {0: 1.0, 2: 0.5}}, vocab_size=3)
        >>> _ = write_vectors(vectors, "stored-vectors")
        >>> read_vectors("stored-vectors").indices.tolist()
        [0, 2]
    """
    folder = path_of("path", path)
    manifest = read_manifest(folder)
    check_complete(folder, manifest)
    return SparseVectors.concatenate([manifest.no_vectors(), *iter_shards(folder, manifest)])


def read_rows(path: str | Path, names: Iterable[str]) -> SparseVectors:
    """Read the vectors of some texts from a folder, shard by shard.

    Of a shard with none of the texts, only the ids are read.

    Args:
        path: folder of sparse vectors.
        names: ids of the texts. Unknown ids are ignored.

    Returns:
        The vectors, in the order of the folder.
    """
    folder = path_of("path", path)
    missing_ids = set(list_of_ids("names", names))
    manifest = read_manifest(folder)
    check_complete(folder, manifest)
    _, parquet = arrow("Reading vectors")
    parts = [manifest.no_vectors()]
    for shard in manifest.shards:
        if not missing_ids:
            break
        file = shard_file(folder, shard, verify=False)
        with _as_data_error(file):
            shard_ids = parquet.read_table(file, columns=["id"]).column("id").to_pylist()
        rows = [row for row, text_id in enumerate(shard_ids) if text_id in missing_ids]
        if rows:
            vectors = _read_shard(folder, shard, manifest).take(rows)
            parts.append(vectors)
            missing_ids.difference_update(vectors.ids)
    return SparseVectors.concatenate(parts)


def iter_shards(
    path: str | Path,
    manifest: VectorManifest | None = None,
) -> Iterator[SparseVectors]:
    """Read the shards of a folder one at a time, for collections larger than memory.

    Args:
        path: folder of sparse vectors.
        manifest: manifest of the folder; None reads it from the folder.

    Raises:
        DataError: if a shard is damaged.
    """
    folder = path_of("path", path)
    manifest = manifest or read_manifest(folder)
    for shard in manifest.shards:
        yield _read_shard(folder, shard, manifest)


def _read_shard(folder: Path, shard: Json, manifest: VectorManifest) -> SparseVectors:
    """Read a shard.

    Args:
        folder: folder of sparse vectors.
        shard: entry of the shard in the manifest.
        manifest: manifest of the folder.

    Raises:
        DataError: if the shard is damaged.
    """
    file = shard_file(folder, shard)
    vectors = _read_parquet(file, manifest)
    if len(vectors) != shard["rows"]:
        raise DataError(f"{file}: expected {shard['rows']} rows, got {len(vectors)}. {REMEDY}")
    return vectors


def write_vectors(
    vectors: SparseVectors,
    path: str | Path,
    *,
    model_name: str | None = None,
    kind: str = "document",
    shard_size: int = 65536,
    overwrite: bool = False,
) -> VectorManifest:
    """Write vectors in memory to a folder.

    Args:
        vectors: sparse vectors.
        path: the folder, new or empty.
        model_name: name of the model that computed the vectors.
        kind: whether the vectors are of documents or queries: ``"document"`` or ``"query"``.
        shard_size: number of vectors per file.
        overwrite: replace vectors that are in the folder.

    Returns:
        The manifest of the folder.

    Raises:
        FileExistsError: if the folder has vectors and `overwrite` is False.

    Examples:
        >>> from tilefold.retrieval import SparseVectors, read_vectors
        >>> rows = {"d1": {0: 1.0, 2: 0.5}, "d2": {1: 2.0}}  # text -> term -> weight
        >>> vectors = SparseVectors.from_rows(rows, vocab_size=3)
        >>> _ = write_vectors(vectors, "stored-vectors")
        >>> read_vectors("stored-vectors").ids
        ['d1', 'd2']
    """
    check_vectors("vectors", vectors)
    check_integer("shard_size", shard_size)
    check_least("shard_size", shard_size)
    # The precision is recorded with each shard, and not among the settings.
    provenance = replace(vectors.provenance, precision=None).to_dict()
    settings = {name: value for name, value in provenance.items() if value is not None}
    manifest = VectorManifest(
        vocab_size=vectors.vocab_size,
        fingerprint=vectors.fingerprint,
        model_name=model_name,
        kind=kind,
        settings=settings,
    )
    writer = SparseVectorWriter(
        path,
        manifest,
        overwrite=overwrite,
        precision=vectors.provenance.precision,
    )
    for number, start in enumerate(range(0, len(vectors), shard_size)):
        end = min(start + shard_size, len(vectors))
        writer.write_shard(number, vectors.take(range(start, end)))
    return writer.finish()


def _check_distinct_names(term_names: Sequence[str], vectors: SparseVectors) -> None:
    """Raise ``ArgumentDataError`` if two terms that occur in the vectors have the same name.

    Args:
        term_names: name of each term.
        vectors: vectors whose terms are checked.
    """
    term_of_name: dict[str, int] = {}
    for term in np.unique(vectors.indices).tolist():
        first_term = term_of_name.setdefault(term_names[term], term)
        if first_term != term:
            raise ArgumentDataError(
                "tokens",
                f"terms {first_term} and {term} have the same text {term_names[term]!r}. "
                "Pass tokens=None.",
            )


def export_jsonl(
    vectors: SparseVectors,
    path: str | Path,
    tokens: Sequence[str | None] | None = None,
    *,
    contents: Mapping[str, str] | None = None,
    scale: float | None = None,
    overwrite: bool = False,
) -> None:
    """Write vectors as JSON lines, which Anserini and Pyserini read.

    A line is ``{"id", "contents", "vector": {token: weight}}``.

    Args:
        vectors: vectors of documents or queries.
        path: the file, which is replaced atomically.
        tokens: token of each term, as :func:`term_names` returns them. A term whose token is None
            is named ``[term_905]`` after its number. By default terms are named by their numbers.
        contents: id -> text for the ``contents`` field. By default the field is empty.
        scale: weights become ``round(weight * scale)``, for engines with integer impacts (100 is
            usual), and terms that round to 0 are dropped. By default weights are floats.
        overwrite: replace an existing file.

    Raises:
        VocabularyMismatchError: if there are too few tokens.
        DataError: if two terms of the vectors have the same token, so that a reader could not tell
            them apart.
        FileExistsError: if the file exists and `overwrite` is False.

    Examples:
        >>> from pathlib import Path
        >>> from tilefold.retrieval import SparseVectors
        >>> vectors = SparseVectors.from_rows({"d1": {0: 1.0, 2: 0.5}}, vocab_size=3)
        >>> _ = export_jsonl(vectors, "vectors.jsonl", ["card", "lost", "pin"])
        >>> print(Path("vectors.jsonl").read_text())
        {"id": "d1", "contents": "", "vector": {"card": 1.0, "pin": 0.5}}
    """
    check_vectors("vectors", vectors)
    if contents is not None:
        check_mapping("contents", contents, "id -> text")
    term_names = None if tokens is None else _name_terms(vectors, tokens)
    with (
        exported_file(path_of("path", path), overwrite=overwrite) as temporary,
        temporary.open("w", encoding="utf-8") as stream,
    ):
        for row, row_id in enumerate(vectors.ids):
            terms, weights = vectors.row(row)
            if term_names is None:
                names = [str(term) for term in terms.tolist()]
            else:
                names = [term_names[term] for term in terms.tolist()]
            vector: dict[str, float] = dict(zip(names, weights.tolist(), strict=True))
            if scale is not None:
                impacts = {name: round(weight * scale) for name, weight in vector.items()}
                vector = {name: impact for name, impact in impacts.items() if impact > 0}
            text = "" if contents is None else contents.get(row_id, "")
            stream.write(json_line({"id": row_id, "contents": text, "vector": vector}))


def _name_terms(vectors: SparseVectors, tokens: Sequence[str | None]) -> list[str]:
    """Return the name of each term: its token, or ``[term_5]`` for a term without a token.

    Args:
        vectors: vectors whose terms are named.
        tokens: token of each term, or None.

    Raises:
        VocabularyMismatchError: if a term of the vectors has no entry in `tokens`.
        DataError: if two terms of the vectors have the same token.
    """
    tokens = list_of("tokens", tokens)
    highest_term = int(vectors.indices.max()) if vectors.indices.size else -1
    if highest_term >= len(tokens):
        raise VocabularyMismatchError(
            f"tokens: expected a token for every index up to {highest_term}, got {len(tokens)} "
            "tokens. "
            "Pass the vocabulary of the model that computed the vectors.",
        )
    names = fill_missing_names(tokens)
    _check_distinct_names(names, vectors)
    return names


@contextmanager
def _as_data_error(path: Path) -> Iterator[None]:
    """Convert Arrow's errors in the block to a ``DataError`` that names the file."""
    pa, _ = arrow("Reading vectors")
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path}: expected Parquet with id, indices and weights, which could not be read "
            f"({error}). {REMEDY}",
        ) from error


def _read_parquet(path: Path, manifest: VectorManifest) -> SparseVectors:
    """Read the Parquet file of a shard.

    Args:
        path: the file, with the columns ``id``, ``indices`` and ``weights``.
        manifest: manifest of the folder, for the vocabulary and the provenance of the vectors.

    Raises:
        DataError: if the file is not a shard, or has nulls or invalid vectors.
    """
    _, parquet = arrow("Reading vectors")
    columns = ["id", "indices", "weights"]
    with _as_data_error(path):
        table = parquet.read_table(path, columns=columns).combine_chunks()
        ids, indices, weights = (table.column(name).combine_chunks() for name in columns)
        n_indices = indices.value_lengths().to_numpy(zero_copy_only=False)
        n_weights = weights.value_lengths().to_numpy(zero_copy_only=False)
        is_unequal = n_indices != n_weights
        flat_indices = indices.flatten().to_numpy(zero_copy_only=False)
        flat_weights = weights.flatten().to_numpy(zero_copy_only=False)
    columns_with_nulls = [name for name in columns if table.column(name).null_count]
    if columns_with_nulls:
        raise DataError(
            f"{path}: expected no nulls, got nulls in {', '.join(columns_with_nulls)}. {REMEDY}",
        )
    if bool(is_unequal.any()):
        row = int(np.argmax(is_unequal))
        raise DataError(
            f"{path}: expected as many weights as indices, got {n_weights[row]} weights and "
            f"{n_indices[row]} indices for {ids[row].as_py()!r}. {REMEDY}",
        )
    try:
        return manifest.vectors(ids.to_pylist(), offsets_of(n_indices), flat_indices, flat_weights)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
