"""Sparse vectors on disk: Parquet shards, and a manifest that lists complete ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tilefold._internal.arguments import check_least, check_mapping, list_of, list_of_ids, path_of
from tilefold._internal.files import exported_file
from tilefold._internal.vocabulary import fill_missing_names, term_names, vocabulary_fingerprint
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.files import Json, arrow, json_line
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
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
]
__all__ += [
    "iter_shards",
    "layout_of",
    "read_manifest",
    "read_rows",
    "read_vectors",
    "term_names",
    "vocabulary_fingerprint",
]
__all__ += ["write_vectors"]


@dataclass
class VectorManifest(Manifest):
    """The manifest of a folder of vectors, ``manifest.json`` beside ``part-00000.parquet``,
    ``part-00001.parquet``, ...

    A shard has the columns ``id`` (string), ``indices`` (list of int32) and ``weights`` (list of
    float32).

    Attributes:
        vocab_size, fingerprint: of the vocabulary; see :class:`SparseVectors`.
        model_name: the model that made the vectors, if known.
        kind: ``"document"`` or ``"query"``.
        n_texts, n_documents: texts that were given, failed ones too (None if only rows are known),
            and rows.
        shards: ``{"file", "rows", "nonzeros", "sha256", "truncated", "precision"}`` for each shard,
            in order; the precision, such as ``"bf16"``, is that of the model's products.
        settings: how the vectors were computed; a writer resumes a folder only if these are equal.
        failed: id -> reason, for texts that could not be encoded.
        partial: the file that keeps a part of the next shard, its checksum and its failed texts;
            empty without one.
        truncated: ``{"count", "max_length"}``: how many texts were cut before they were encoded,
            and at how many tokens (None for a model that reads any number); empty where they were
            not counted.
        complete: whether the writer finished.
    """

    LAYOUT = "sparse"
    CONTENTS = "sparse vectors"
    OTHER_KIND_REMEDY = (
        "Token vectors are for reranking (--rerank); encode with a SparseEncoder for an index."
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
        """CSR arrays as vectors of this folder's vocabulary, model and texts."""
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
        """The vectors of a folder without rows."""
        return self.vectors(
            [],
            np.zeros(1, np.int64),
            np.zeros(0, np.int32),
            np.zeros(0, np.float32),
        )


class SparseVectorWriter(ShardWriter[VectorManifest, SparseVectors]):
    """Write vectors shard by shard into the folder `path`; one process at a time may use it.

    `manifest` is that of a new folder. Shards and manifest are replaced atomically and a shard
    counts only once the manifest lists it: `resume` keeps those of an earlier writer. Without, those
    of an interrupted writer with the same settings are discarded, and all others only with
    `overwrite`. With ``lists=False``, shards are made for a writer in another process.
    ``FileExistsError`` for a folder with other files or vectors, ``DataError`` where it goes on with
    other settings.
    """

    suffix, package = "parquet", ("pyarrow.parquet", "pyarrow", "Storing vectors")
    manifest_type = VectorManifest

    def _check(self, vectors: SparseVectors) -> None:
        check_same_vocabulary(self.manifest, vectors, "the folder", "vectors")

    def _counts(self, vectors: SparseVectors) -> dict[str, int]:
        return {"rows": len(vectors), "nonzeros": int(vectors.indices.size)}

    def _store(self, vectors: SparseVectors, path: Path) -> None:
        pa, parquet = arrow("Storing vectors")
        if vectors.indices.size > np.iinfo(np.int32).max:
            raise ValueError(
                f"vectors: expected fewer than 2^31 weights per shard, got {vectors.indices.size}.",
            )
        offsets = pa.array(vectors.indptr.astype(np.int32))
        columns = {
            "id": pa.array(vectors.ids, pa.string()),
            "indices": pa.ListArray.from_arrays(offsets, pa.array(vectors.indices, pa.int32())),
            "weights": pa.ListArray.from_arrays(offsets, pa.array(vectors.data, pa.float32())),
        }
        # a third of the time and two thirds of the bytes of the usual dictionaries, which hold no
        # float twice
        encodings = {
            "indices.list.element": "DELTA_BINARY_PACKED",
            "weights.list.element": "BYTE_STREAM_SPLIT",
        }
        table = pa.table(columns)
        parquet.write_table(
            table,
            path,
            compression="zstd",
            use_dictionary=False,
            column_encoding=encodings,
        )

    def _read(self, path: Path) -> SparseVectors:
        return _read_parquet(path, self.manifest)


def read_manifest(path: str | Path) -> VectorManifest:
    """The manifest of the folder `path`, complete or not; FileNotFoundError, or ``DataError`` for a
    damaged one.
    """
    return VectorManifest.read(path_of("path", path))


def read_vectors(path: str | Path) -> SparseVectors:
    """Read a folder of vectors into memory; ``FileNotFoundError`` where a file is missing.

    ``DataError`` names the folder of a writer that did not finish, or a shard that is damaged or
    holds bad vectors.
    """
    folder = path_of("path", path)
    manifest = read_manifest(folder)
    check_complete(folder, manifest)
    return SparseVectors.concatenate([manifest.no_vectors(), *iter_shards(folder, manifest)])


def read_rows(path: str | Path, names: Iterable[str]) -> SparseVectors:
    """The vectors of those `names` that a folder holds, in its order; only ids are read of shards
    without one.
    """
    folder, wanted = path_of("path", path), set(list_of_ids("names", names))
    manifest = read_manifest(folder)
    check_complete(folder, manifest)
    parts = [manifest.no_vectors()]
    for shard in manifest.shards:
        if not wanted:
            break
        file = shard_file(folder, shard, verify=False)
        with _as_data_error(file):
            there = (
                arrow("Storing vectors")[1]
                .read_table(file, columns=["id"])
                .column("id")
                .to_pylist()
            )
        if rows := [row for row, name in enumerate(there) if name in wanted]:
            parts.append(_read_shard(folder, shard, manifest).take(rows))
            wanted -= set(parts[-1].ids)
    return SparseVectors.concatenate(parts)


def iter_shards(
    path: str | Path,
    manifest: VectorManifest | None = None,
) -> Iterator[SparseVectors]:
    """Yield the listed shards one at a time, checked, for collections larger than memory."""
    folder = path_of("path", path)
    manifest = manifest or read_manifest(folder)
    yield from (_read_shard(folder, shard, manifest) for shard in manifest.shards)


def _read_shard(folder: Path, shard: Json, manifest: VectorManifest) -> SparseVectors:
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
        vectors: what to write.
        path: the folder, new or empty.
        model_name: name of the model that made the vectors.
        kind: what the vectors are of, ``"document"`` or ``"query"``.
        shard_size: vectors of a file.
        overwrite: replace vectors that are in the folder; without, that is a ``FileExistsError``.

    Returns:
        The manifest of the folder.
    """
    check_vectors("vectors", vectors)
    check_least("shard_size", shard_size)
    made_by = vectors.provenance
    known = replace(made_by, precision=None).to_dict()
    settings = {name: value for name, value in known.items() if value}
    manifest = VectorManifest(
        vectors.vocab_size,
        vectors.fingerprint,
        model_name,
        kind,
        settings=settings,
    )
    writer = SparseVectorWriter(
        path,
        manifest,
        overwrite=overwrite,
        precision=made_by.precision,
    )
    for number, start in enumerate(range(0, len(vectors), shard_size)):
        writer.write_shard(
            number,
            vectors.take(range(start, min(start + shard_size, len(vectors)))),
        )
    return writer.finish()


def _check_distinct_names(term_names: Sequence[str], vectors: SparseVectors) -> None:
    """Raise ``DataError`` if two terms that occur in the vectors have one name."""
    term_of_name: dict[str, int] = {}
    for term in np.unique(vectors.indices).tolist():
        other = term_of_name.setdefault(term_names[term], term)
        if other != term:
            raise DataError(
                f"tokens: terms {other} and {term} have the same text {term_names[term]!r}. "
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
    """Write one line ``{"id", "contents", "vector": {token: weight}}`` per vector, as Anserini and
    Pyserini read it.

    Args:
        tokens: token of each index, as :func:`term_names` gives them; the index itself, as text,
            when None. An index whose token is None is named ``[term_905]`` after its number.
            ``VocabularyMismatchError`` for too few tokens, ``DataError`` for two terms of the
            vectors with one text, which a reader could not tell apart.
        contents: id -> text for the ``contents`` field, which is empty otherwise.
        scale: weights become ``round(weight * scale)``, for engines of integer impacts (100 is
            usual); terms that round to 0 are dropped. Floats are written when None.
        overwrite: replace a file that exists.

    Raises:
        FileExistsError: if the file exists, without `overwrite`.
    """
    check_vectors("vectors", vectors)
    tokens = None if tokens is None else list_of("tokens", tokens)
    if contents is not None:
        check_mapping("contents", contents, "id -> text")
    highest = int(vectors.indices.max()) if vectors.indices.size else -1
    if tokens is not None and highest >= len(tokens):
        got = f"{len(tokens)} tokens. Pass the vocabulary of the model that made the vectors"
        raise VocabularyMismatchError(
            f"tokens: expected a token for every index up to {highest}, got {got}.",
        )
    term_names = None if tokens is None else fill_missing_names(tokens)
    if term_names is not None:
        _check_distinct_names(term_names, vectors)
    with (
        exported_file(path_of("path", path), overwrite=overwrite) as temporary,
        temporary.open("w", encoding="utf-8") as stream,
    ):
        for i, row_id in enumerate(vectors.ids):
            terms, weights = vectors.row(i)
            if term_names is None:
                names = [str(term) for term in terms.tolist()]
            else:
                names = [term_names[term] for term in terms.tolist()]
            vector: dict[str, float] = dict(zip(names, weights.tolist(), strict=True))
            if scale is not None:
                vector = {name: q for name, w in vector.items() if (q := round(w * scale)) > 0}
            stream.write(
                json_line(
                    {"id": row_id, "contents": (contents or {}).get(row_id, ""), "vector": vector},
                ),
            )


@contextmanager
def _as_data_error(path: Path) -> Iterator[None]:
    """Turn Arrow's errors for a damaged or foreign file into one ``DataError`` that names it."""
    pa, _ = arrow("Storing vectors")
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path}: expected Parquet with id, indices and weights, got ({error}). {REMEDY}",
        ) from error


def _read_parquet(path: Path, manifest: VectorManifest) -> SparseVectors:
    _, pq = arrow("Storing vectors")
    with _as_data_error(path):
        table = pq.read_table(path, columns=["id", "indices", "weights"]).combine_chunks()
        columns = [table.column(name).combine_chunks() for name in ("id", "indices", "weights")]
        ids, indices, weights = columns
        lengths = indices.value_lengths().to_numpy(zero_copy_only=False)
        counts = weights.value_lengths().to_numpy(zero_copy_only=False)
        same = bool((lengths == counts).all())
        arrays = [column.flatten().to_numpy(zero_copy_only=False) for column in (indices, weights)]
    if not same or any(column.null_count for column in columns):
        nulls = [
            name
            for name, column in zip(("id", "indices", "weights"), columns, strict=True)
            if column.null_count
        ]
        at = int(np.argmax(lengths != counts))
        got = (
            f"nulls in {', '.join(nulls)}"
            if nulls
            else f"{counts[at]} and {lengths[at]} for {ids[at].as_py()!r}"
        )
        raise DataError(
            f"{path}: expected as many weights as indices and no nulls, got {got}. {REMEDY}",
        )
    try:
        return manifest.vectors(ids.to_pylist(), offsets_of(lengths), *arrays)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
