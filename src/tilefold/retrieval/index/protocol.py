"""Interface of sparse indexes, and the folder that all indexes are stored in.

The folder has a manifest, the ids and the metadata of the documents, and files of the backend.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import check_instance, list_of, path_of
from tilefold._internal.files import atomic_directory, sha256_file
from tilefold._internal.lazy import package_version
from tilefold._version import __version__
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.array_checks import check_offsets
from tilefold.retrieval.common.files import (
    Json,
    check_folder,
    listed_file,
    read_json_object,
    write_json_object,
)
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.metadata import FILE, Metadata, Where
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.sparse import SparseVectors, check_vectors

__all__ = ["Hit", "SparseIndex", "hits_to_run"]

MANIFEST_NAME = "index.json"
# Folder of the segments that were added to an index since it was built.
SEGMENTS = "segments"
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
# How ids are encoded as UTF-8. An id may contain half a surrogate pair.
_ENCODING_ERRORS = "surrogatepass"

N = TypeVar("N", bound=np.generic)
F = TypeVar("F", bound="FolderIndex")


class Hit(NamedTuple):
    """A retrieved document.

    Attributes:
        id: of the document.
        score: inner product of its vector and the query's; an estimate by some backends.
    """

    id: str
    score: float


@runtime_checkable
class SparseIndex(Protocol):
    """A searchable set of sparse vectors.

    ``search`` returns at most `k` documents for each query by inner product, best first. With
    `where` (:class:`Filter`), they are the best documents whose metadata match. Documents that
    share no term with the query are not returned, and an empty query has no results. It raises
    ``ValueError`` for ``k < 1``, and ``VocabularyMismatchError`` for queries over another
    vocabulary.

    ``save`` writes a new directory atomically, or replaces an earlier index of the backend with
    `overwrite`. ``load`` (or :func:`tilefold.retrieval.load_index`) reads it.
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
    """Turn the hits of a search into a run, which evaluation and fusion take.

    Args:
        queries: the queries of the search.
        hits: the result of ``index.search(queries, k)``.

    Returns:
        query id -> document id -> score.
    """
    check_vectors("queries", queries, "those that were searched")
    hits = list_of("hits", hits)
    for query_hits in hits:
        # Checks the first hit only, since those of a query come from one search.
        for hit in list_of("hits", query_hits)[:1]:
            check_instance("hits", hit, Hit, "the result of index.search(queries, k)")
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
    """Write ``index.json``, which describes an index and has a checksum of every other file.

    It is called after all other files were written.

    Args:
        folder: folder of the index.
        index: the index that the manifest describes.
        package: package that wrote the files, whose version is recorded.
        options: options that the index was built with.
        changing: names of files that change later, and get no checksum.
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
    """Read the ``index.json`` of the index at `path`, without a check of the other files.

    Raises:
        DataError: if the folder is no index, or the manifest is damaged or of another schema.
    """
    folder = path_of("path", path)
    check_folder(folder, MANIFEST_NAME, "an index, as tilefold index writes it")
    file = folder / MANIFEST_NAME
    manifest = read_json_object(file, REMEDY)
    problem = _problem_of(manifest)
    if problem is not None:
        raise DataError(
            f"{file}: expected an index of schema {SCHEMA_VERSION}, got {problem}. {REMEDY}",
        )
    return manifest


def _problem_of(manifest: Json) -> str | None:
    """Describe the first entry of a manifest that is wrong, if there is one."""
    for key, expected_type in _TYPES.items():
        value = manifest.get(key)
        if not isinstance(value, expected_type) or isinstance(value, bool):
            type_name = getattr(expected_type, "__name__", expected_type)
            return f"wrong {key}: expected {type_name}, got {value!r:.80}"
    schema = manifest.get("schema_version")
    if schema != SCHEMA_VERSION:
        return f"schema {schema!r}"
    return None


def read_manifest(path: str | Path, backend: str, *, unread: Collection[str] = ()) -> Json:
    """Read the ``index.json`` at `path`, and compare the files with their checksums.

    Args:
        path: folder of the index.
        backend: name of the backend that the index must have.
        unread: names of files whose checksums are not compared. They must exist.

    Returns:
        The manifest.

    Raises:
        DataError: for an index of another backend, or a file that is damaged or missing.
    """
    manifest = read_description(path)
    if manifest["backend"] != backend:
        raise DataError(
            f"{path}: expected an index of backend {backend!r}, got {manifest['backend']!r}. "
            "Load it as such.",
        )
    for name, digest in manifest["files"].items():
        expected_digest = None if name in unread else digest
        listed_file(Path(path), name, expected_digest, MANIFEST_NAME, REMEDY)
    return manifest


def read_array(file: Path, dtype: type[N], *shape: int) -> npt.NDArray[N]:
    """Open the array of an index in `file`, memory-mapped.

    Args:
        file: a ``.npy`` file.
        dtype: dtype that the array must have.
        shape: lengths of the dimensions that the array must have.

    Raises:
        DataError: for a file that is no array, or an array of another dtype or shape.
    """
    try:
        array = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{file}: expected an array of an index, got ({error}). {REMEDY}",
        ) from error
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise DataError(
            f"{file}: expected {np.dtype(dtype)} of shape {list(shape)}, "
            f"got {array.dtype} of shape {list(array.shape)}. {REMEDY}",
        )
    return array


def read_offsets(file: Path, count: int) -> npt.NDArray[np.int64]:
    """Open offsets ``[count + 1]``, and raise ``DataError`` unless they rise from 0."""
    offsets = read_array(file, np.int64, count + 1)
    try:
        check_offsets(offsets, max(0, int(offsets[-1])), "offsets")
    except DataError as error:
        raise DataError(f"{file}: {error} {REMEDY}") from error
    return offsets


class StoredIds(Sequence[str]):
    """Ids that are read from files when they are used.

    Args:
        text: uint8, the ids in UTF-8, one after the other.
        offsets: int64 ``[N + 1]``, where each id begins in the text.
    """

    def __init__(self, text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> None:
        self._text = text
        self._offsets = offsets

    def __getitem__(self, position: Any) -> Any:
        """Decode the id at a position, or the ids of a slice.

        Raises:
            IndexError: for a position outside of the ids.
            DataError: for bytes that are not UTF-8.
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
            raise DataError(f"{_IDS}: expected ids in UTF-8, got ({error}). {REMEDY}") from error

    def at_positions(self, positions: npt.NDArray[np.integer]) -> Sequence[str]:
        """Return the ids at some positions, in less than half the time of single ids.

        Args:
            positions: int ``[n]``, not negative.

        Raises:
            DataError: for bytes that are not UTF-8.
        """
        text = self._text.data
        begins = self._offsets[positions].tolist()
        ends = self._offsets[positions + 1].tolist()
        try:
            return [
                str(text[begin:end], "utf-8", _ENCODING_ERRORS)
                for begin, end in zip(begins, ends, strict=True)
            ]
        except UnicodeDecodeError:
            # Decoding them one by one raises the error that names the file.
            return [self[position] for position in positions.tolist()]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @classmethod
    def load(cls, folder: Path, count: int) -> StoredIds:
        """Open ids that :func:`save_ids` wrote, memory-mapped.

        Args:
            folder: folder of the index.
            count: number of ids.

        Raises:
            DataError: for another number of ids than `count`, or an empty id.
        """
        offsets = read_offsets(folder / _OFFSETS, count)
        if (np.diff(offsets) < 1).any():
            raise DataError(
                f"{folder / _OFFSETS}: expected ids of one byte at least, got an empty one. "
                f"{REMEDY}",
            )
        return cls(read_array(folder / _IDS, np.uint8, int(offsets[-1])), offsets)


def hits_of(
    ids: Sequence[str],
    documents: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
) -> list[list[Hit]]:
    """Convert the positions and scores of a search to hits.

    Args:
        ids: ids of all documents of the index.
        documents: ``[Nq, k]``, positions of documents in `ids`, best first. A negative position
            stands for no document.
        scores: ``[Nq, k]``, scores of these documents. Documents with a score of -infinity or NaN
            are left out.

    Returns:
        The hits of each query, best first.
    """
    hits: list[list[Hit]] = []
    is_hit = (documents >= 0) & (scores > -np.inf)
    collects_garbage = gc.isenabled()
    # Thousands of new hits would start collections that visit all objects of the process. Hits are
    # in no reference cycles, so nothing is lost.
    gc.disable()
    try:
        for query_row, is_query_hit in enumerate(is_hit):
            positions = documents[query_row][is_query_hit]
            query_scores = scores[query_row][is_query_hit].tolist()
            names: Iterable[str]
            if isinstance(ids, StoredIds):
                names = ids.at_positions(positions)
            else:
                names = map(ids.__getitem__, positions.tolist())
            # Hit._make takes a pair, and is the fastest way to create many hits.
            hits.append(list(map(Hit._make, zip(names, query_scores, strict=True))))
    finally:
        if collects_garbage:
            gc.enable()
    return hits


def save_ids(ids: Iterable[str], folder: Path) -> None:
    """Write `ids` for :meth:`StoredIds.load`."""
    encoded = [name.encode("utf-8", _ENCODING_ERRORS) for name in ids]
    np.save(folder / _IDS, np.frombuffer(b"".join(encoded), np.uint8))
    np.save(folder / _OFFSETS, offsets_of([len(name) for name in encoded]))


class FolderIndex(ABC):
    """Base of the indexes that are stored as a folder.

    Attributes:
        backend: name of the type of index.
        package: package that reads and writes the backend's files.
        own_files: names of the backend's files.
        unread: names of the backend's files that are checked when a query reads them.
        fingerprint: of the vocabulary.
        metadata: metadata of the documents, for `where`.
        ids: ids of the documents.
        vocab_size: number of terms of the vocabulary.
        provenance: fingerprints of the model and of the documents.
        options: options of the build, a mapping or a dataclass.
    """

    backend: ClassVar[str]
    package: ClassVar[str] = "numpy"
    own_files: ClassVar[tuple[str, ...]]
    unread: ClassVar[tuple[str, ...]] = ()
    fingerprint: str | None = None
    metadata: Metadata | None = None
    ids: Sequence[str]
    vocab_size: int
    provenance: Provenance
    options: Any = MappingProxyType({})

    @property
    def n_documents(self) -> int:
        return len(self.ids)

    @property
    def settings(self) -> dict[str, Any]:
        """Options to build another index like this one.

        Those of late interaction include measurements of the build.
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
        """Create a folder to write an index into, which is renamed to `path` at the end.

        See :func:`tilefold._internal.files.atomic_directory`.
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
        """Write the index as a directory, atomically.

        Args:
            path: the directory, new or empty.
            overwrite: replace an earlier index of this backend.

        Raises:
            FileExistsError: if `path` is not empty and not an index of this backend, or is one and
                `overwrite` is False.
        """
        with self._new_folder(path, overwrite=overwrite) as folder:
            self._write(folder)
            self._finish(folder)

    @classmethod
    def load(cls: type[F], path: str | Path) -> F:
        """Open an index that :meth:`save` wrote.

        Args:
            path: folder of the index.

        Raises:
            DataError: for an index that is damaged or of another backend. Damage of the files that
                the class lists as :attr:`unread` is noticed when a query reads them.
        """
        manifest = read_manifest(path, cls.backend, unread=cls.unread)
        folder = Path(path)
        index = cls._read(folder, manifest, StoredIds.load(folder, manifest["n_documents"]))
        index.metadata = Metadata.load(folder, index.n_documents)
        return index


@contextmanager
def naming_versions(folder: Path, manifest: Json, package: str) -> Iterator[None]:
    """Turn any error within the block into a ``DataError`` that names versions of a package.

    The block reads files of the package, which another version may have written differently.

    Args:
        folder: folder of the index, for the error.
        manifest: manifest of the index, with the version of the package that wrote the files.
        package: name of the package that reads the files.
    """
    try:
        yield
    except Exception as error:  # a package may raise any error for files it does not understand
        versions = manifest.get("versions") or {}
        raise DataError(
            f"{folder}: could not be read ({error}); written by {package} "
            f"{versions.get(package, 'unknown')}, read by {package_version(package)}. {REMEDY}",
        ) from error
