"""Interface of sparse indexes, and the folder that all indexes are stored in.

The folder has a manifest, the ids and the metadata of the documents, and files of the backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import check_instance, list_of, path_of
from tilefold._internal.files import atomic_directory, sha256_file
from tilefold._internal.garbage import garbage_collection_paused
from tilefold._internal.lazy import package_version
from tilefold._version import __version__
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.array_checks import check_offsets
from tilefold.retrieval.common.files import (
    FileIdentity,
    Json,
    check_folder,
    listed_file,
    read_json_object,
    require,
    write_json_object,
)
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.metadata import FILE, Fields, Metadata, Where
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.sparse import SparseVectors, check_vectors

__all__ = ["Hit", "SparseIndex", "hits_to_run"]

MANIFEST_NAME = "index.json"
# Folder of the segments that were added to an index since it was built.
SEGMENTS = "segments"
# Folder of the sparse index that finds candidates, in a large index of token vectors.
CANDIDATES_FOLDER = "candidates"
SCHEMA_VERSION = 1
# Entries of a manifest and their types.
_TYPES: dict[str, type | UnionType] = {
    "backend": str,
    **dict.fromkeys(("n_documents", "vocab_size"), int),
    **dict.fromkeys(("options", "files"), dict),
    "versions": dict | None,
    **dict.fromkeys(("fingerprint", "model_fingerprint", "texts_sha256", "passages"), str | None),
}
REMEDY = "Build the index again (tilefold index --overwrite)."
_IDS = "ids.npy"
_OFFSETS = "id_offsets.npy"
ID_FILES = (_IDS, _OFFSETS)
# How ids are encoded as UTF-8. An id may contain an unpaired surrogate.
_ENCODING_ERRORS = "surrogatepass"

N = TypeVar("N", bound=np.generic)
F = TypeVar("F", bound="FolderIndex")
G = TypeVar("G", bound="GrowingIndex")


class Hit(NamedTuple):
    """A retrieved document.

    Attributes:
        id: the id of the document.
        score: the similarity of the document and the query, such as the inner product of their
            vectors.
    """

    id: str
    score: float


@runtime_checkable
class SparseIndex(Protocol):
    """A searchable set of sparse vectors.

    ``search`` returns at most `k` documents for each query by inner product, best first. With
    `where` (:class:`Filter`), they are the best documents whose metadata match. Documents that
    share no term with the query are not returned, and an empty query has no results. It raises
    ``ValueError`` if ``k < 1``, and ``VocabularyMismatchError`` if the vocabularies of queries and
    index differ.

    ``save`` writes the index into a folder atomically. With `overwrite`, it replaces an index of
    the same backend. ``load`` (or :func:`tilefold.retrieval.load_index`) opens the folder.
    """

    backend: ClassVar[str]

    @property
    def metadata(self) -> Metadata | None: ...
    @property
    def n_documents(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str | None: ...
    @property
    def provenance(self) -> Provenance: ...
    @classmethod
    def build(cls, vectors: SparseVectors, **options: object) -> SparseIndex: ...
    def search(self, queries: SparseVectors, k: int, *, where: Where = None) -> list[list[Hit]]: ...
    def save(self, path: str | Path, *, overwrite: bool = False) -> None: ...
    @classmethod
    def load(cls, path: str | Path) -> SparseIndex: ...


def hits_to_run(queries: SparseVectors, hits: Sequence[Sequence[Hit]]) -> Run:
    """Turn the hits of a search into a run for evaluation and fusion.

    Args:
        queries: the queries of the search.
        hits: the result of ``index.search(queries, k)``.

    Returns:
        Query id -> document id -> score.

    Examples:
        >>> from tilefold.retrieval import SparseVectors, build_index
        >>> documents = SparseVectors.from_rows({"d1": {0: 1.0}, "d2": {0: 2.0}}, vocab_size=3)
        >>> queries = SparseVectors.from_rows({"q1": {0: 1.0}}, vocab_size=3)
        >>> hits_to_run(queries, build_index(documents).search(queries, k=2))
        {'q1': {'d2': 2.0, 'd1': 1.0}}
    """
    remedy = "the result of index.search(queries, k)"
    check_vectors("queries", queries, "the queries of the search")
    hits = list_of("hits", hits)
    for query_hits in hits:
        list_of_hits = list_of("hits", query_hits)
        if list_of_hits:
            # All hits of a query come from one search, so the first one is enough.
            check_instance("hits", list_of_hits[0], Hit, remedy)
    return {
        query_id: {hit.id: hit.score for hit in query_hits}
        for query_id, query_hits in zip(queries.ids, hits, strict=True)
    }


def write_manifest(
    folder: Path,
    index: SparseIndex | FolderIndex,
    package: str,
    options: Mapping[str, object],
    *,
    changing: Collection[str] = (),
) -> None:
    """Write the manifest of an index, with checksums of all files in its folder.

    All other files must be written before.

    Args:
        folder: the folder of the index.
        index: the index that the manifest describes.
        package: the package that wrote the files, whose version is recorded.
        options: the options that the index was built with.
        changing: names of files that get no checksum, because they will change.
    """
    files = [
        file for file in sorted(folder.iterdir()) if file.is_file() and file.name not in changing
    ]
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "backend": index.backend,
        "n_documents": index.n_documents,
        "vocab_size": index.vocab_size,
        "fingerprint": index.fingerprint,
        **index.provenance.to_dict(),
        "versions": {"tilefold": __version__, package: package_version(package)},
        "options": options,
        "files": {file.name: sha256_file(file) for file in files},
    }
    write_json_object(folder / MANIFEST_NAME, manifest)


def read_description(path: str | Path) -> Json:
    """Read the manifest of an index. The other files are neither read nor checked.

    Args:
        path: the folder of the index.

    Raises:
        DataError: if the folder is not an index, or the manifest is damaged or has another schema.
    """
    folder = path_of("path", path)
    check_folder(folder, MANIFEST_NAME, "an index, as tilefold index writes it")
    file = folder / MANIFEST_NAME
    manifest = read_json_object(file, REMEDY)
    problem = _describe_invalid_manifest(manifest)
    if problem is not None:
        raise DataError(
            f"{file}: expected an index of schema {SCHEMA_VERSION}, got {problem}. {REMEDY}",
        )
    return manifest


def _describe_invalid_manifest(manifest: Json) -> str | None:
    """Describe the first fault of a manifest as a phrase for an error; None if it is valid."""
    for key, expected_type in _TYPES.items():
        value = manifest.get(key)
        # bool is a subclass of int, but True is no number.
        if not isinstance(value, expected_type) or isinstance(value, bool):
            type_name = getattr(expected_type, "__name__", expected_type)
            return f"wrong {key}: expected {type_name}, got {value!r:.80}"
    special_tokens = manifest.get("special_tokens")
    if not isinstance(special_tokens, bool | None):
        return f"wrong special_tokens: expected bool | None, got {special_tokens!r:.80}"
    dpi = manifest.get("dpi")
    if not isinstance(dpi, int | None) or isinstance(dpi, bool) or dpi == 0:
        return f"wrong dpi: expected a positive int | None, got {dpi!r:.80}"
    schema = manifest.get("schema_version")
    if schema != SCHEMA_VERSION:
        return f"schema {schema!r}"
    return None


def read_manifest(path: str | Path, backend: str, *, unverified: Collection[str] = ()) -> Json:
    """Read the manifest of an index, and compare the index's files with their checksums.

    Args:
        path: the folder of the index.
        backend: the backend that the index must have.
        unverified: names of files that must exist, but whose checksums are not compared here.

    Raises:
        DataError: if the index has another backend, or a file is damaged or missing.
    """
    manifest = read_description(path)
    if manifest["backend"] != backend:
        raise DataError(
            f"{path}: expected an index of backend {backend!r}, got {manifest['backend']!r}. "
            f"Load it with backend {manifest['backend']!r}.",
        )
    for name, digest in manifest["files"].items():
        expected_digest = None if name in unverified else digest
        listed_file(Path(path), name, expected_digest, MANIFEST_NAME, REMEDY)
    return manifest


def read_array(file: Path, dtype: type[N], *shape: int) -> npt.NDArray[N]:
    """Memory-map one array file of an index.

    Args:
        file: a ``.npy`` file.
        dtype: the dtype that the array must have.
        shape: the shape that the array must have.

    Raises:
        DataError: if the file is not an array, or the array has another dtype or shape.
    """
    try:
        array = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file}: cannot be read as an array ({error}). {REMEDY}") from error
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise DataError(
            f"{file}: expected {np.dtype(dtype)} of shape {list(shape)}, "
            f"got {array.dtype} of shape {list(array.shape)}. {REMEDY}",
        )
    return array


def read_offsets(file: Path, count: int) -> npt.NDArray[np.int64]:
    """Memory-map the offsets of an index: where each row begins, and the end of the last row.

    Args:
        file: a ``.npy`` file with int64 offsets ``[count + 1]``.
        count: the number of rows that the offsets delimit.

    Raises:
        DataError: if the offsets do not begin with 0, or if an offset is below the one before it.
    """
    offsets = read_array(file, np.int64, count + 1)
    # Any end is accepted here. A negative one fails the check, because offsets begin with 0.
    end = max(0, int(offsets[-1]))
    try:
        check_offsets(offsets, end, "offsets")
    except DataError as error:
        raise DataError(f"{file}: {error} {REMEDY}") from error
    return offsets


class StoredIds(Sequence[str]):
    """Ids that are read from files when they are used.

    Args:
        file: the file of the ids, for errors.
        text: the ids in UTF-8, one after the other, as uint8.
        offsets: int64 ``[N + 1]``, where each id begins in `text`.
    """

    def __init__(
        self,
        file: Path,
        text: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
    ) -> None:
        """Wrap the mapped arrays of ids; see :meth:`load`."""
        self._file = file
        self._text = text
        self._offsets = offsets

    def __getitem__(self, position: Any) -> Any:
        """Decode the id at a position, or the ids of a slice.

        Raises:
            IndexError: if there is no such position.
            DataError: if the bytes are not UTF-8.
        """
        if isinstance(position, slice):
            return [self[item] for item in range(*position.indices(len(self)))]
        position = position + len(self) if position < 0 else position
        if not 0 <= position < len(self):
            raise IndexError(
                f"position: expected a position among {len(self)} ids, got {position}."
            )
        encoded = self._text[self._offsets[position] : self._offsets[position + 1]].tobytes()
        try:
            return encoded.decode("utf-8", _ENCODING_ERRORS)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._file}: expected ids in UTF-8, got ({error}). {REMEDY}",
            ) from error

    def at_positions(self, positions: npt.NDArray[np.integer]) -> Sequence[str]:
        """Return the ids at some positions, more than twice as fast as one by one.

        Args:
            positions: integers ``[n]``, not negative.

        Raises:
            DataError: if the bytes are not UTF-8.
        """
        text = self._text.data
        starts = self._offsets[positions].tolist()
        ends = self._offsets[positions + 1].tolist()
        try:
            return [
                str(text[start:end], "utf-8", _ENCODING_ERRORS)
                for start, end in zip(starts, ends, strict=True)
            ]
        except UnicodeDecodeError:
            # Reading the ids one by one raises a DataError that names the file.
            return [self[position] for position in positions.tolist()]

    def are_among(self, sought: Iterable[str]) -> npt.NDArray[np.bool_]:
        """Return whether each id is one of the sought ones, ``[N]``.

        The bytes are compared without decoding all ids in Python, which would delay other threads.

        Args:
            sought: the ids that are sought.
        """
        purpose = "An index with removed documents"  # for the error if pyarrow is not installed
        pyarrow = require("pyarrow", "pyarrow", purpose)
        compute = require("pyarrow.compute", "pyarrow", purpose)
        offsets = np.ascontiguousarray(self._offsets)
        no_nulls = None
        buffers = [no_nulls, pyarrow.py_buffer(offsets), pyarrow.py_buffer(self._text)]
        ids = pyarrow.Array.from_buffers(pyarrow.large_binary(), len(self), buffers)
        encoded = [document_id.encode("utf-8", _ENCODING_ERRORS) for document_id in sought]
        value_set = pyarrow.array(encoded, pyarrow.large_binary())
        is_sought = compute.is_in(ids, value_set=value_set)
        mask: npt.NDArray[np.bool_] = is_sought.to_numpy(zero_copy_only=False)
        return mask

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @classmethod
    def load(cls, folder: Path, count: int) -> StoredIds:
        """Memory-map the ids that :func:`save_ids` wrote.

        Args:
            folder: the folder of the index.
            count: the number of ids that the folder must have.

        Raises:
            DataError: if the number of ids is not `count`, or an id is empty.
        """
        offsets = read_offsets(folder / _OFFSETS, count)
        if (np.diff(offsets) < 1).any():
            raise DataError(f"{folder / _OFFSETS}: an id is empty. {REMEDY}")
        file = folder / _IDS
        return cls(file, read_array(file, np.uint8, int(offsets[-1])), offsets)


def are_among(ids: Sequence[str], sought: Collection[str]) -> npt.NDArray[np.bool_]:
    """Return whether each id is one of the sought ones, ``[N]``.

    Args:
        ids: ids of the documents of an index.
        sought: the ids that are sought.
    """
    if not sought:
        return np.zeros(len(ids), bool)
    if isinstance(ids, StoredIds):
        return ids.are_among(sought)
    return np.array([document_id in sought for document_id in ids], bool)


# Creates a hit from a pair of an id and a score, without a call of a Python function.
_hit_of_pair = cast("Callable[[tuple[str, float]], Hit]", partial(tuple.__new__, Hit))


def hits_of(
    ids: Sequence[str],
    positions: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
) -> list[list[Hit]]:
    """Convert the positions and scores of a search to hits.

    Args:
        ids: ids of all documents of the index.
        positions: ``[Nq, k]``, positions of documents in `ids`, best first. A negative position
            means no document.
        scores: ``[Nq, k]``, scores of these documents. A score of -infinity or NaN means no
            document, too.

    Returns:
        The hits of each query, best first.
    """
    hits: list[list[Hit]] = []
    is_hit = (positions >= 0) & (scores > -np.inf)
    all_are_hits = bool(is_hit.all())
    # Thousands of new hits would start the garbage collector, which visits all objects of the
    # process.
    with garbage_collection_paused():
        for query_row, is_query_hit in enumerate(is_hit):
            query_positions = positions[query_row]
            query_scores = scores[query_row]
            if not all_are_hits:
                query_positions = query_positions[is_query_hit]
                query_scores = query_scores[is_query_hit]
            query_ids: Iterable[str]
            if isinstance(ids, StoredIds):
                query_ids = ids.at_positions(query_positions)
            else:
                query_ids = map(ids.__getitem__, query_positions.tolist())
            hits.append(list(map(_hit_of_pair, zip(query_ids, query_scores.tolist(), strict=True))))
    return hits


def save_ids(ids: Iterable[str], folder: Path) -> None:
    """Write ids into the folder of an index, for :meth:`StoredIds.load`."""
    encoded_ids = [document_id.encode("utf-8", _ENCODING_ERRORS) for document_id in ids]
    np.save(folder / _IDS, np.frombuffer(b"".join(encoded_ids), np.uint8))
    np.save(folder / _OFFSETS, offsets_of([len(encoded_id) for encoded_id in encoded_ids]))


class FolderIndex(ABC):
    """Base of the indexes that are stored as a folder.

    Attributes:
        backend: name of the type of index.
        package: name of the package that reads and writes the backend's files.
        own_files: names of the backend's files.
        checked_lazily: names of the backend's files that are checked when a query reads them.
        fingerprint: digest of the vocabulary; None if it is unknown.
        metadata: metadata of the documents, which `where` filters by; None if there are none.
        ids: ids of the documents.
        vocab_size: number of terms of the vocabulary. An index of dense or token vectors has their
            dimension here.
        provenance: fingerprints of the model and of the documents.
        options: options of the build, a mapping or a dataclass.
        manifest_identity: the manifest of the folder that the index was loaded from; None if it was
            not loaded.
    """

    backend: ClassVar[str]
    package: ClassVar[str] = "numpy"
    own_files: ClassVar[tuple[str, ...]]
    checked_lazily: ClassVar[tuple[str, ...]] = ()
    fingerprint: str | None = None
    metadata: Metadata | None = None
    ids: Sequence[str]
    vocab_size: int
    provenance: Provenance
    options: Any = MappingProxyType({})
    manifest_identity: FileIdentity | None = None

    @property
    def n_documents(self) -> int:
        return len(self.ids)

    @property
    def settings(self) -> dict[str, Any]:
        """Options to build another index like this one, as a mapping.

        The options of an index of token vectors also include measurements of its build.
        """
        if isinstance(self.options, Mapping):
            return dict(self.options)
        return asdict(self.options)

    @abstractmethod
    def _write(self, folder: Path) -> None: ...

    @classmethod
    @abstractmethod
    def _read(cls: type[F], folder: Path, manifest: Json, ids: StoredIds) -> F: ...

    @classmethod
    def _new_folder(cls, path: str | Path, *, overwrite: bool) -> AbstractContextManager[Path]:
        """Create a temporary folder to write an index into; it is renamed to `path` at the end.

        Args:
            path: the folder of the index.
            overwrite: whether an index of this backend in `path` is replaced.
        """
        return atomic_directory(
            path_of("path", path),
            own_names=[MANIFEST_NAME, SEGMENTS, FILE, *ID_FILES, *cls.own_files],
            overwrite=overwrite,
        )

    def _finish(self, folder: Path) -> None:
        """Write the ids, metadata and manifest into a folder that has the backend's files."""
        save_ids(self.ids, folder)
        if self.metadata is not None:
            self.metadata.save(folder)
        write_manifest(folder, self, self.package, self.settings)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the index into a folder, atomically.

        Args:
            path: the folder, new or empty.
            overwrite: whether to replace an existing index of this backend.

        Raises:
            FileExistsError: if `path` has an index of this backend and `overwrite` is False, or if
                it has anything else.
        """
        with self._new_folder(path, overwrite=overwrite) as folder:
            self._write(folder)
            self._finish(folder)

    @classmethod
    def load(cls: type[F], path: str | Path) -> F:
        """Open an index that :meth:`save` wrote.

        Args:
            path: the folder of the index.

        Raises:
            DataError: if the index is damaged or has another backend. Files in
                :attr:`checked_lazily` are checked when a query reads them.
        """
        manifest = read_manifest(path, cls.backend, unverified=cls.checked_lazily)
        folder = Path(path)
        manifest_identity = FileIdentity.of(folder / MANIFEST_NAME)
        index = cls._read(folder, manifest, StoredIds.load(folder, manifest["n_documents"]))
        index.metadata = Metadata.load(folder, index.n_documents)
        index.manifest_identity = manifest_identity
        return index


class GrowingIndex(FolderIndex):
    """Base of the indexes that are built in memory and can grow by segments.

    A segment is an index of the same class, with the same options. An index and its segments can be
    merged into one index.
    """

    @classmethod
    @abstractmethod
    def build_unchecked(cls: type[G], vectors: Any, **options: Any) -> G:
        """Build an index of vectors, which may all be empty after an update."""

    @abstractmethod
    def stored(self) -> Any:
        """Return the vectors of the documents as they are stored."""

    def build_segment(
        self: G,
        vectors: Any,
        folder: Path,
        metadata: Mapping[str, Fields] | None,
    ) -> G:
        """Build an index of new documents with the options of this index.

        Args:
            vectors: vectors of the new documents.
            folder: not used here. The index of a class that is not built in memory is written into
                it.
            metadata: document id -> fields of the new documents.
        """
        index = self.build_unchecked(vectors, **self.settings)
        index.metadata = Metadata.from_fields(metadata, index.ids, self.provenance.passages)
        return index

    @classmethod
    def merge(
        cls: type[G],
        parts: Sequence[G],
        rows_by_part: Sequence[Sequence[int]],
        folder: Path,
        provenance: Provenance,
        metadata: Metadata | None,
    ) -> G:
        """Build one index of selected documents of several indexes.

        Args:
            parts: the indexes, built with the same options.
            rows_by_part: the rows of the documents that are copied from each part.
            folder: not used here. The index of a class that is not built in memory is written into
                it.
            provenance: model and texts that the vectors were computed from.
            metadata: metadata of the copied documents; None if there are none.
        """
        vectors_by_part = [
            part.stored().take(rows) for part, rows in zip(parts, rows_by_part, strict=True)
        ]
        vectors = type(vectors_by_part[0]).concatenate(vectors_by_part)
        index = cls.build_unchecked(vectors, **parts[0].settings)
        index.provenance = provenance
        index.metadata = metadata
        return index


@contextmanager
def naming_versions(folder: Path, manifest: Json, package: str) -> Iterator[None]:
    """Turn any error within the block into a ``DataError`` that names the versions of a package.

    The block reads files of the package. Another version may have written them in another format.

    Args:
        folder: the folder of the index, for the error.
        manifest: the manifest of the index, with the version of the package that wrote the files.
        package: the name of the package that reads the files.
    """
    try:
        yield
    except Exception as error:  # a package may raise any error for files it does not understand
        versions = manifest.get("versions") or {}
        raise DataError(
            f"{folder}: could not be read ({error}); written by {package} "
            f"{versions.get(package, 'unknown')}, read by {package_version(package)}. {REMEDY}",
        ) from error
