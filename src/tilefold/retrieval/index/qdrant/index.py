"""Indexes of sparse vectors in Qdrant, in a folder (qdrant-edge) or on a server (qdrant-client)."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tilefold._internal.arguments import ArgumentError, path_of
from tilefold._internal.files import atomic_directory, check_replaceable, lock_path, swap_directory
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.metadata import Where, fields_by_id
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import (
    MANIFEST_NAME,
    REMEDY,
    Hit,
    read_manifest,
    write_manifest,
)
from tilefold.retrieval.index.qdrant.collection import Progress, QdrantCollection
from tilefold.retrieval.index.qdrant.documents import Documents
from tilefold.retrieval.index.qdrant.edge import (
    COLLECTION_NAMES,
    RECORD,
    SHARD,
    EdgeEngine,
    allocated,
    need_space,
)
from tilefold.retrieval.index.qdrant.engine import Layout
from tilefold.retrieval.index.qdrant.server import ServerEngine
from tilefold.retrieval.vectors.sparse import SparseVectors, check_buildable, check_search

__all__ = ["QdrantIndex"]

# Names in the folder of an index, whose files change while it is used.
_OWN_NAMES = (MANIFEST_NAME, *COLLECTION_NAMES)
_CONNECTION_OPTIONS = ("api_key", "timeout", "patience")
_SERVER_OPTIONS = ("collection", *_CONNECTION_OPTIONS)
_OPTIONS = (
    "folder",
    "url",
    *_SERVER_OPTIONS,
    "overwrite",
    "weights",
    "metadata",
    "progress",
    "resumes",
)
# Number of bytes of a file that are copied at a time.
_COPIED_BYTES = 1 << 20


@dataclass(frozen=True)
class _Callbacks:
    """Functions that a build of a collection reports its progress to.

    Attributes:
        progress: called after each request as ``progress(n_stored, n_total)``.
        resumes: called first, with the same arguments, if an interrupted build is resumed.
    """

    progress: Progress | None
    resumes: Progress | None


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` for unknown options of a build, and for options that conflict.

    Args:
        options: the options of :meth:`QdrantIndex.build`.
    """
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ArgumentError(
            "options",
            f"Qdrant has {', '.join(_OPTIONS)}; got {', '.join(unknown)}.",
        )
    if options.get("url") is None:
        for name in _SERVER_OPTIONS:
            if options.get(name) not in (None, False):
                raise ArgumentError(name, "needs url, the address of a server. Leave it out.")
    elif options.get("folder") is not None:
        raise ArgumentError(
            "folder",
            f"expected either a folder or the url of a server, got both ({options['folder']!r}).",
        )


class QdrantIndex:
    """An index of sparse vectors in a Qdrant collection, embedded or on a server.

    Search is exact, with the rounding and the order that the collection promises. One process at a
    time can open the folder of an embedded index. The folder of an index on a server has only its
    address, and the API key is read from ``QDRANT_API_KEY``. Documents can be added, replaced and
    deleted through :attr:`collection`.

    Attributes:
        collection: the :class:`tilefold.retrieval.index.qdrant.QdrantCollection`.
    """

    backend: ClassVar[str] = "qdrant"
    # The metadata of the documents are payloads of the collection.
    metadata: ClassVar[None] = None

    def __init__(
        self,
        collection: QdrantCollection,
        *,
        folder: Path | None = None,
        address: dict[str, str] | None = None,
    ) -> None:
        """Wrap an open collection as an index.

        Args:
            collection: an open collection of sparse vectors.
            folder: the folder of an embedded index; None for an index on a server.
            address: the ``url`` and the name (``collection``) of a collection on a server; None for
                an embedded index.
        """
        self.collection = collection
        self._folder = folder
        self._address = address
        # Function that closes the collection and removes its folder; None if the folder is kept.
        # Set by :meth:`build` for a temporary folder.
        self._remove_temporary_folder: Callable[[], object] | None = None

    @property
    def n_documents(self) -> int:
        return len(self.collection)

    @property
    def vocab_size(self) -> int:
        return int(self.collection.layout.vocab_size or 0)

    @property
    def fingerprint(self) -> str | None:
        return self.collection.layout.fingerprint

    @property
    def provenance(self) -> Provenance:
        """Fingerprints of the model and the texts, and the precision of the vectors.

        There is no digest of the texts after individual documents have been changed.
        """
        return self.collection.provenance

    @classmethod
    def build(cls, vectors: SparseVectors, **options: Any) -> QdrantIndex:
        """Build an index, or resume an interrupted build of the same vectors.

        The files of an interrupted build are in a hidden folder next to `folder`, or on the server.

        Args:
            vectors: sparse vectors of the documents.
            folder: the folder of an embedded index. If there is no `folder` and no `url`, the index
                is temporary until it is saved.
            url: URL of a server.
            collection: name of the collection on the server.
            api_key: API key of the server; None uses the environment variable ``QDRANT_API_KEY``.
            timeout: time-out of a request, in seconds.
            patience: number of seconds for which a request is retried.
            weights: how weights are stored for searches, ``"float32"`` or ``"float16"`` (relative
                error 2^-11).
            metadata: document id -> fields, which are stored as payload.
            overwrite: whether to replace a collection with other vectors on the server, or an
                existing index in `folder`.
            progress: called after each request as ``progress(n_stored, n_total)``.
            resumes: called first, with the same arguments, if an interrupted build is resumed.

        Raises:
            ValueError: if no weight is positive, or an option is wrong.
            DataError: if the collection has other vectors.
            FileExistsError: if the folder has other files, or an index and `overwrite` is False.
            InUseError: if another process builds in the folder.
        """
        _check_options(options)
        check_buildable(vectors)
        passages = vectors.provenance.passages
        layout = Layout(
            vectors.vocab_size,
            vectors.fingerprint,
            weights=options.get("weights", "float32"),
            passages=passages,
        )
        payloads = fields_by_id(
            options.get("metadata") or {},
            vectors.ids,
            ids_are_passages=passages is not None,
        )
        documents = Documents(vectors.ids, vectors, payloads=payloads)
        callbacks = _Callbacks(options.get("progress"), options.get("resumes"))
        overwrite = bool(options.get("overwrite"))
        url = options.get("url")
        folder = options.get("folder")
        if url is not None:
            server_options = {
                name: options[name] for name in _CONNECTION_OPTIONS if options.get(name) is not None
            }
            return cls._build_on_server(
                url,
                options.get("collection"),
                server_options,
                documents,
                layout,
                callbacks,
                overwrite=overwrite,
            )
        if folder is not None:
            return cls._build_in_folder(
                path_of("folder", folder),
                documents,
                layout,
                callbacks,
                overwrite=overwrite,
            )
        return cls._build_in_temporary_folder(documents, layout, callbacks)

    @classmethod
    def _build_in_temporary_folder(
        cls,
        documents: Documents,
        layout: Layout,
        callbacks: _Callbacks,
    ) -> QdrantIndex:
        """Build an embedded index in a folder that is removed with the index.

        Args:
            documents: all documents of the index.
            layout: the layout of the collection.
            callbacks: functions that the build reports its progress to.
        """
        temporary = tempfile.mkdtemp(prefix="tilefold-qdrant-")
        try:
            index = cls._build_in_folder(
                Path(temporary) / "index",
                documents,
                layout,
                callbacks,
                overwrite=False,
            )
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        # The folder is removed when the index is garbage-collected. The collection must release its
        # files before.
        index._remove_temporary_folder = weakref.finalize(
            index,
            _close_and_remove,
            index.collection,
            temporary,
        )
        return index

    @classmethod
    def _build_on_server(
        cls,
        url: str,
        name: str | None,
        server_options: Mapping[str, Any],
        documents: Documents,
        layout: Layout,
        callbacks: _Callbacks,
        *,
        overwrite: bool,
    ) -> QdrantIndex:
        """Build an index on a server, or resume an interrupted build of the same documents.

        Args:
            url: URL of the server.
            name: name of the collection.
            server_options: ``api_key``, ``timeout`` and ``patience`` of :class:`ServerEngine`.
            documents: all documents of the index.
            layout: the layout of the collection.
            callbacks: functions that the build reports its progress to.
            overwrite: whether to drop an existing collection with other documents.
        """
        if not name:
            raise ArgumentError(
                "collection",
                f"expected the name of the collection, got {name!r}.",
            )
        engine = ServerEngine(url, name, **server_options)
        # With `overwrite`, a collection is dropped, unless it has the same documents.
        record = engine.read_record() if overwrite else None
        if record is not None and record.vectors_sha256 != documents.digest(layout):
            engine.drop()
        collection = QdrantCollection.open(engine, layout)
        # A collection with an unfinished build of the same documents is resumed.
        try:
            collection.build(
                documents,
                progress=callbacks.progress,
                resumes=callbacks.resumes,
            )
        except BaseException:
            collection.close()
            raise
        return cls(collection, address={"url": url, "collection": name})

    @classmethod
    def _build_in_folder(
        cls,
        folder: Path,
        documents: Documents,
        layout: Layout,
        callbacks: _Callbacks,
        *,
        overwrite: bool,
    ) -> QdrantIndex:
        """Build an embedded index, or resume an interrupted build of the same documents.

        The index is built in a hidden folder next to `folder`, which is renamed at the end. An
        interrupted build leaves the hidden folder, from which the next build resumes.

        Args:
            folder: the folder of the index.
            documents: all documents of the index.
            layout: the layout of the collection.
            callbacks: functions that the build reports its progress to.
            overwrite: whether to replace an existing index.
        """
        check_replaceable(folder, _OWN_NAMES, overwrite=overwrite)
        documents.check_compatible(layout, str(folder))
        unfinished = folder.parent / f".{folder.name}.building"
        with lock_path(folder):
            # Another process may have finished an index in the meantime.
            check_replaceable(folder, _OWN_NAMES, overwrite=overwrite)
            try:
                engine = _resume_or_restart(unfinished, documents.digest(layout))
                with QdrantCollection.open(engine, layout) as collection:
                    collection.build(
                        documents,
                        progress=callbacks.progress,
                        resumes=callbacks.resumes,
                    )
                    cls(collection)._describe(unfinished)
            except BaseException:
                # The engine writes its record before any document. Without the record, there is
                # nothing that the next build could resume.
                has_progress = (unfinished / RECORD).exists()
                if not has_progress:
                    shutil.rmtree(unfinished, ignore_errors=True)
                raise
            swap_directory(unfinished, folder)
        # The files have just been written, so they are not compared with their checksums.
        return cls(QdrantCollection.embedded(folder, verify=False), folder=folder)

    def search(self, queries: SparseVectors, k: int, *, where: Where = None) -> list[list[Hit]]:
        """Return at most `k` documents for each query, best first.

        Args:
            queries: sparse vectors over the vocabulary of the index.
            k: number of documents per query.
            where: filter of the documents' payloads.
        """
        check_search(self, queries, k)
        return self.collection.search(queries, int(k), where=where)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write an embedded index, or the address of an index on a server, into a folder.

        An embedded index is copied. If `path` is its own folder, only the manifest is updated.

        Args:
            path: the folder, new or empty.
            overwrite: whether to replace an existing index of this backend.

        Raises:
            FileExistsError: if `path` has an index and `overwrite` is False, or if it has anything
                else.
        """
        path = path_of("path", path)
        if self._folder is not None and path.resolve() == self._folder.resolve():
            self._describe(self._folder)
            return
        with atomic_directory(path, own_names=_OWN_NAMES, overwrite=overwrite) as folder:
            if self._folder is not None:
                _copy_collection(self._folder, folder, reported_path=path)
            self._describe(folder)

    @classmethod
    def load(cls, path: str | Path) -> QdrantIndex:
        """Open a finished index that :meth:`save` or :meth:`build` wrote.

        Args:
            path: the folder of an embedded index, or of the address of an index on a server.

        Raises:
            DataError: if the index is damaged or unfinished, or if the collection has another
                vocabulary.
            InUseError: if an embedded index is open elsewhere.
            UnreachableError: if the server does not answer.
            PermissionError: if the server refuses the key.
        """
        manifest = read_manifest(path, cls.backend)
        options = manifest["options"]
        if "url" in options or "collection" in options:
            index = cls._load_from_server(path, options)
        else:
            folder = Path(path)
            index = cls(QdrantCollection.embedded(folder), folder=folder)
        collection = index.collection
        if not collection.complete:
            actual = "a collection whose build is not finished"
        elif collection.layout.vocab_size != manifest["vocab_size"]:
            actual = "a collection with another vocabulary"
        else:
            return index
        collection.close()
        raise DataError(
            f"{collection.location}: expected the collection of {path}, got {actual}. Run "
            "tilefold index again.",
        )

    @classmethod
    def _load_from_server(cls, path: str | Path, options: Json) -> QdrantIndex:
        """Open an index on a server by the address in its manifest.

        Args:
            path: the folder of the manifest, for the error.
            options: options of the manifest, with ``url`` and ``collection``.

        Raises:
            DataError: if the address is damaged.
        """
        address: dict[str, str] = {}
        for name in ("url", "collection"):
            value = options.get(name)
            if not isinstance(value, str):
                raise DataError(
                    f"{path}: expected a string for the option {name}, got {value!r:.80}. {REMEDY}",
                )
            address[name] = value
        collection = QdrantCollection.server(address["url"], address["collection"])
        return cls(collection, address=address)

    def close(self) -> None:
        """Let other processes open the folder, and remove a temporary folder."""
        self.collection.close()
        if self._remove_temporary_folder is not None:
            self._remove_temporary_folder()

    def _describe(self, folder: Path) -> None:
        """Write the manifest of the index into its folder.

        An index on a server records its address in the manifest.
        """
        package = "qdrant-edge-py" if self._address is None else "qdrant-client"
        options = {"weights": self.collection.layout.weights, **(self._address or {})}
        write_manifest(folder, self, package, options, changing=_OWN_NAMES)


def _resume_or_restart(folder: Path, digest: str) -> EdgeEngine:
    """Open an interrupted build to resume it, or restart if it is damaged or has other documents.

    Args:
        folder: the hidden folder of the build. It may be missing.
        digest: digest of the documents of the new build.

    Returns:
        The engine of the folder. It has no collection if there is no build to resume.
    """
    try:
        engine = EdgeEngine(folder)
    except DataError:
        shutil.rmtree(folder)
        engine = EdgeEngine(folder)
    record = engine.read_record()
    if record is not None:
        # A build that was interrupted before the first document has no digest.
        has_other_documents = record.vectors_sha256 not in (None, digest)
        if has_other_documents:
            # The engine can create a new collection afterwards.
            engine.drop()
    return engine


def _copy_collection(source: Path, target: Path, *, reported_path: Path) -> None:
    """Copy the collection of an embedded index.

    Args:
        source: the folder of the index. Every change was flushed, so its files are complete.
        target: the new folder.
        reported_path: the path that the error about a full disk names.
    """
    need_space(target, allocated(source / SHARD), reported_path=reported_path)
    shutil.copytree(source / SHARD, target / SHARD, copy_function=_copy_sparse)
    shutil.copyfile(source / RECORD, target / RECORD)
    # Closing the copy writes its checksums.
    with closing(EdgeEngine(target, verify=False)) as copy:
        copy.optimize()


def _close_and_remove(collection: QdrantCollection, folder: str) -> None:
    """Close a collection, and remove its temporary folder."""
    collection.close()
    shutil.rmtree(folder, ignore_errors=True)


def _copy_sparse(source: str, target: str) -> str:
    """Copy a file as a sparse file, because the engine's files are mostly blocks of zeros.

    Args:
        source: the file.
        target: the copy, which does not exist.
    """
    with Path(source).open("rb") as source_file, Path(target).open("wb") as target_file:
        while block := source_file.read(_COPIED_BYTES):
            if block.strip(b"\0"):
                target_file.write(block)
            else:
                target_file.seek(len(block), os.SEEK_CUR)
        target_file.truncate()
    return target
