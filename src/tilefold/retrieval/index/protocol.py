"""The interface of every sparse index, and the folder with ids, metadata and a manifest that all of
them write.
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
SEGMENTS = "segments"  # folder of what was added to an index since it was built
SCHEMA_VERSION = 1
_TYPES: dict[str, type | UnionType] = {
    "backend": str,
    **dict.fromkeys(("n_documents", "vocab_size"), int),
    **dict.fromkeys(("options", "files"), dict),
    "versions": dict | None,
    **dict.fromkeys(("fingerprint", "model_fingerprint", "texts_sha256", "passages"), str | None),
}
REMEDY = "Build the index again (tilefold index --overwrite)."
_IDS, _OFFSETS = ID_FILES = "ids.npy", "id_offsets.npy"
_ERRORS = "surrogatepass"  # an id may hold half a surrogate pair

N = TypeVar("N", bound=np.generic)
F = TypeVar("F", bound="FolderIndex")


class Hit(NamedTuple):
    """A document, and the inner product of its vector and the query's (an estimate if the backend
    is approximate).
    """

    id: str
    score: float


@runtime_checkable
class SparseIndex(Protocol):
    """A searchable set of sparse vectors.

    ``search`` returns for each query at most `k` documents by inner product, best first; documents
    that share no term with the query are not returned, and an empty query finds nothing; with
    `where` (:class:`Filter`), the best of those whose metadata match. It raises ``ValueError`` for
    ``k < 1``, and ``VocabularyMismatchError`` for queries over another vocabulary. ``save`` writes
    a new directory atomically, or with `overwrite` replaces an earlier index of the backend;
    ``load`` (or :func:`tilefold.retrieval.load_index`) reads it.
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
    """``{query id: {document id: score}}`` of the result of ``index.search(queries, k)``."""
    check_vectors("queries", queries, "those that were searched")
    hits = list_of("hits", hits)
    for row in hits:
        for hit in list_of("hits", row)[:1]:  # of a row, all are of one search
            check_instance("hits", hit, Hit, "the result of index.search(queries, k)")
    return {
        qid: {hit.id: hit.score for hit in row} for qid, row in zip(queries.ids, hits, strict=True)
    }


def write_manifest(
    folder: Path,
    index: SparseIndex | FolderIndex,
    package: str,
    options: Mapping[str, object],
    *,
    changing: Collection[str] = (),
) -> None:
    """Write ``index.json``, with a checksum of every other file in `folder` that is not `changing`.
    Call it last.
    """
    files = (
        file for file in sorted(folder.iterdir()) if file.is_file() and file.name not in changing
    )
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
    """The ``index.json`` of the index at `path`, without a look at its other files."""
    folder = path_of("path", path)
    check_folder(folder, MANIFEST_NAME, "an index, as tilefold index writes it")
    file = folder / MANIFEST_NAME
    manifest = read_json_object(file, REMEDY)
    wrong = [
        f"wrong {key}: expected {getattr(kind, '__name__', kind)}, got {manifest.get(key)!r:.80}"
        for key, kind in _TYPES.items()
        if not isinstance(manifest.get(key), kind) or isinstance(manifest.get(key), bool)
    ]
    if wrong or (schema := manifest.get("schema_version")) != SCHEMA_VERSION:
        got = wrong[0] if wrong else f"schema {schema!r}"
        raise DataError(
            f"{file}: expected an index of schema {SCHEMA_VERSION}, got {got}. {REMEDY}",
        )
    return manifest


def read_manifest(path: str | Path, backend: str, *, unread: Collection[str] = ()) -> Json:
    """The ``index.json`` at `path`, after its files but those `unread` were compared with their
    checksums.
    """
    manifest = read_description(path)
    if manifest["backend"] != backend:
        got = f"{manifest['backend']!r}. Load it as such"
        raise DataError(f"{path}: expected an index of backend {backend!r}, got {got}.")
    for name, digest in manifest["files"].items():
        listed_file(Path(path), name, None if name in unread else digest, MANIFEST_NAME, REMEDY)
    return manifest


def read_array(file: Path, dtype: type[N], *shape: int) -> npt.NDArray[N]:
    """The array of an index in `file`, memory-mapped; ``DataError`` for another one."""
    try:
        found = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{file}: expected an array of an index, got ({error}). {REMEDY}",
        ) from error
    if found.shape != shape or found.dtype != np.dtype(dtype):
        got = f"{found.dtype} of shape {list(found.shape)}"
        raise DataError(
            f"{file}: expected {np.dtype(dtype)} of shape {list(shape)}, got {got}. {REMEDY}",
        )
    return found


def read_offsets(file: Path, count: int) -> npt.NDArray[np.int64]:
    """Offsets ``[count + 1]`` of an index that rise from 0; ``DataError`` for others."""
    offsets = read_array(file, np.int64, count + 1)
    try:
        check_offsets(offsets, max(0, int(offsets[-1])), "offsets")
    except DataError as error:
        raise DataError(f"{file}: {error} {REMEDY}") from error
    return offsets


class StoredIds(Sequence[str]):
    """Strings as UTF-8, one after the other (uint8), and offsets (int64 ``[N + 1]``)."""

    def __init__(self, text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> None:
        self._text, self._offsets = text, offsets

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        at = at + len(self) if at < 0 else at
        if not 0 <= at < len(self):
            raise IndexError(f"at: expected a position among {len(self)} ids, got {at}.")
        try:
            return (
                self._text[self._offsets[at] : self._offsets[at + 1]]
                .tobytes()
                .decode("utf-8", _ERRORS)
            )
        except UnicodeDecodeError as error:
            raise DataError(f"{_IDS}: expected ids in UTF-8, got ({error}). {REMEDY}") from error

    def named(self, at: npt.NDArray[np.integer]) -> Sequence[str]:
        """The ids at some positions, in less than half the time."""
        text, starts, ends = (
            self._text.data,
            self._offsets[at].tolist(),
            self._offsets[at + 1].tolist(),
        )
        try:
            return [
                str(text[low:high], "utf-8", _ERRORS)
                for low, high in zip(starts, ends, strict=True)
            ]
        except UnicodeDecodeError:
            return [self[each] for each in at.tolist()]  # which names the file

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @classmethod
    def load(cls, folder: Path, count: int) -> StoredIds:
        """Load ids that :func:`save_ids` wrote, memory-mapped; ``DataError`` unless they are
        `count`, none empty.
        """
        offsets = read_offsets(folder / _OFFSETS, count)
        if (np.diff(offsets) < 1).any():
            raise DataError(
                f"{folder / _OFFSETS}: expected ids of one byte at least, got an empty one. {REMEDY}",
            )
        return cls(read_array(folder / _IDS, np.uint8, int(offsets[-1])), offsets)


def hits_of(
    ids: Sequence[str],
    documents: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
) -> list[list[Hit]]:
    """Hits of each row of documents ``[Nq, k]`` and scores, but for those below 0 and scores of
    -infinity or NaN.
    """
    found, collects, there = (
        list[list[Hit]](),
        gc.isenabled(),
        (documents >= 0) & (scores > -np.inf),
    )
    gc.disable()  # thousands of hits would have it look through all objects of the process, and hold no circles
    try:
        for at, score, keep in zip(documents, scores, there, strict=True):
            names = (
                ids.named(at[keep])
                if isinstance(ids, StoredIds)
                else map(ids.__getitem__, at[keep].tolist())
            )
            found.append(list(map(Hit._make, zip(names, score[keep].tolist(), strict=True))))
    finally:
        if collects:
            gc.enable()
    return found


def save_ids(ids: Iterable[str], folder: Path) -> None:
    """Write `ids` for :meth:`StoredIds.load`."""
    encoded = [name.encode("utf-8", _ERRORS) for name in ids]
    np.save(folder / _IDS, np.frombuffer(b"".join(encoded), np.uint8))
    np.save(folder / _OFFSETS, offsets_of([len(name) for name in encoded]))


class FolderIndex(ABC):
    """Base of the indexes that are written as a folder: their ids, metadata, and files of their
    own.
    """

    backend: ClassVar[str]
    package: ClassVar[str] = "numpy"  # that reads and writes its files
    own_files: ClassVar[tuple[str, ...]]  # names of them
    unread: ClassVar[
        tuple[str, ...]
    ] = ()  # of these, those that are checked when a query asks for them
    fingerprint: str | None = None  # of the vocabulary
    metadata: Metadata | None = None  # of the documents, for `where`
    ids: Sequence[str]
    vocab_size: int
    provenance: Provenance
    options: Any = MappingProxyType({})  # a mapping or a data class

    @property
    def n_documents(self) -> int:
        return len(self.ids)

    @property
    def settings(self) -> dict[str, Any]:
        """Options, with which another index like this one is built; of late interaction also what
        was measured.
        """
        return dict(self.options) if isinstance(self.options, Mapping) else asdict(self.options)

    @abstractmethod
    def _write(self, folder: Path) -> None: ...
    @classmethod
    @abstractmethod
    def _read(cls: type[F], folder: Path, manifest: Json, ids: StoredIds) -> F: ...

    @classmethod
    def _new_folder(cls, path: str | Path, *, overwrite: bool) -> AbstractContextManager[Path]:
        """A folder to write an index into, which then becomes `path`.

        See :func:`tilefold._internal.files.atomic_directory`.
        """
        return atomic_directory(
            Path(path),
            own_names=[MANIFEST_NAME, SEGMENTS, FILE, *ID_FILES, *cls.own_files],
            overwrite=overwrite,
        )

    def _finish(self, folder: Path) -> None:
        """Write what all indexes have into a folder that has the rest."""
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
            FileExistsError: if there is something else at `path`, or an index without `overwrite`.
        """
        with self._new_folder(path, overwrite=overwrite) as folder:
            self._write(folder)
            self._finish(folder)

    @classmethod
    def load(cls: type[F], path: str | Path) -> F:
        """Open an index that :meth:`save` wrote; a ``DataError`` for a damaged one, at the latest
        when it is read.
        """
        folder = Path(path)
        manifest = read_manifest(folder, cls.backend, unread=cls.unread)
        index = cls._read(folder, manifest, StoredIds.load(folder, manifest["n_documents"]))
        index.metadata = Metadata.load(folder, index.n_documents)
        return index


@contextmanager
def naming_versions(folder: Path, manifest: Json, package: str) -> Iterator[None]:
    """Say of what goes wrong with files of `package` which of its versions wrote them, and which
    reads them.
    """
    try:
        yield
    except (
        Exception
    ) as error:  # whatever the package raises of files that are not as it expects them
        written = f"written by {package} {(manifest.get('versions') or {}).get(package, 'unknown')}"
        read = f"read by {package_version(package)}"
        raise DataError(
            f"{folder}: could not be read ({error}); {written}, {read}. {REMEDY}",
        ) from error
