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
_SERVER_OPTIONS = ("collection", "api_key", "timeout", "patience")
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
# Bytes of a file that are copied at a time.
_COPIED_BYTES = 1 << 20


@dataclass(frozen=True)
class _Callbacks:
    """Functions that a build of a collection reports its progress to.

    Attributes:
        progress: is called after each request with the number of documents stored, and of all.
        resumes: is called first, with the same arguments, if an interrupted build is resumed.
    """

    progress: Progress | None
    resumes: Progress | None


class QdrantIndex:
    """An index of sparse vectors in a Qdrant collection, embedded or on a server.

    Search is exact, with the rounding and the order that the collection promises. The folder of an
    embedded index is open in one process at a time. The folder of an index on a server has only its
    address, and the API key is read from ``QDRANT_API_KEY``. Documents may be added, replaced and
    deleted through :attr:`collection`.

    Attributes:
        collection: the :class:`tilefold.retrieval.index.qdrant.QdrantCollection`.
    """

    backend: ClassVar[str] = "qdrant"
    # Metadata are in the collection.
    metadata: ClassVar[None] = None

    def __init__(
        self,
        collection: QdrantCollection,
        *,
        folder: Path | None = None,
        address: dict[str, str] | None = None,
    ) -> None:
        """Create an index of an open collection.

        Args:
            collection: collection of sparse vectors.
            folder: folder of an embedded index that was saved; None otherwise.
            address: ``url`` and ``collection`` (its name) of an index on a server; None otherwise.
        """
        self.collection = collection
        self._folder = folder
        self._address = address
        # Removes a temporary folder.
        self._discard: Callable[[], object] | None = None

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
        """Fingerprints of model and texts, and the precision of the vectors.

        The texts are unknown once single documents were changed.
        """
        return self.collection.provenance

    @classmethod
    def build(cls, vectors: SparseVectors, **options: Any) -> QdrantIndex:
        """Build an index, or resume an interrupted build of the same vectors.

        An interrupted build is next to `folder`, or on the server.

        Args:
            vectors: of the documents.
            folder: of an embedded index. Without `folder` and `url` it is temporary until
                :meth:`save`.
            url: of a server.
            collection: name of the collection on the server.
            api_key: see :meth:`QdrantCollection.server`.
            timeout: see :meth:`QdrantCollection.server`.
            patience: see :meth:`QdrantCollection.server`.
            weights: ``"float32"``, or ``"float16"`` in what is searched (relative error 2^-11).
            metadata: document id -> fields, which are stored as payload.
            overwrite: replace other vectors in the collection of the server, or an earlier index in
                `folder`.
            progress: see :meth:`QdrantCollection.build`.
            resumes: see :meth:`QdrantCollection.build`.

        Raises:
            ValueError: without a positive weight, and for a wrong option.
            DataError: if the collection has other vectors.
            FileExistsError: if the folder has other files, or an index without `overwrite`.
            InUseError: if another process builds there.
        """
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise ArgumentError(
                "options",
                f"Qdrant has {', '.join(_OPTIONS)}; got {', '.join(unknown)}.",
            )
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
            if folder is not None:
                raise ArgumentError(
                    "folder",
                    f"expected either a folder or the url of a server, got both, {folder!r}.",
                )
            server_options = {
                name: options[name]
                for name in _SERVER_OPTIONS
                if name != "collection" and options.get(name) is not None
            }
            return cls._on_server(
                url,
                options.get("collection"),
                server_options,
                documents,
                layout,
                callbacks,
                overwrite=overwrite,
            )
        for name in _SERVER_OPTIONS:
            if options.get(name) not in (None, False):
                raise ArgumentError(name, "goes with url, the address of a server. Leave it out.")
        if folder is not None:
            return cls._in_folder(
                path_of("folder", folder),
                documents,
                layout,
                callbacks,
                overwrite=overwrite,
            )
        temporary = tempfile.mkdtemp(prefix="tilefold-qdrant-")
        try:
            index = cls._in_folder(
                Path(temporary) / "index",
                documents,
                layout,
                callbacks,
                overwrite=False,
            )
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        index._discard = weakref.finalize(index, _remove, index.collection, temporary)
        return index

    @classmethod
    def _on_server(
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
            url: address of the server.
            name: name of the collection.
            server_options: ``api_key``, ``timeout`` and ``patience`` of :class:`ServerEngine`.
            documents: all documents of the index.
            layout: layout of the collection.
            callbacks: functions that are called with the progress.
            overwrite: drop an existing collection of other documents.
        """
        if not name:
            raise ArgumentError(
                "collection",
                f"expected a name for it on the server, got {name!r}.",
            )
        engine = ServerEngine(url, name, **server_options)
        record = engine.record() if overwrite else None
        if record is not None and record.vectors_sha256 != documents.digest(layout):
            engine.drop()
        collection = QdrantCollection.of(engine, layout)
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
    def _in_folder(
        cls,
        folder: Path,
        documents: Documents,
        layout: Layout,
        callbacks: _Callbacks,
        *,
        overwrite: bool,
    ) -> QdrantIndex:
        """Build an embedded index, or resume an interrupted build of the same documents.

        The index is built in a hidden folder next to `folder`, and takes its place at the end. An
        interrupted build leaves the hidden folder, from which the next build goes on.

        Args:
            folder: folder of the index.
            documents: all documents of the index.
            layout: layout of the collection.
            callbacks: functions that are called with the progress.
            overwrite: replace an earlier index.
        """
        check_replaceable(folder, _OWN_NAMES, overwrite=overwrite)
        documents.check(layout, str(folder))
        unfinished = folder.parent / f".{folder.name}.building"
        with lock_path(folder):
            # Another process may have finished an index meanwhile.
            check_replaceable(folder, _OWN_NAMES, overwrite=overwrite)
            try:
                engine = _open_unfinished(unfinished, documents.digest(layout))
                with QdrantCollection.of(engine, layout) as collection:
                    collection.build(
                        documents,
                        progress=callbacks.progress,
                        resumes=callbacks.resumes,
                    )
                    cls(collection)._describe(unfinished)
            except BaseException:
                # Without a record, there is nothing that the next build could go on from.
                has_progress = (unfinished / RECORD).exists()
                if not has_progress:
                    shutil.rmtree(unfinished, ignore_errors=True)
                raise
            swap_directory(unfinished, folder)
        # The files were written just now, and are not compared with their checksums.
        return cls(QdrantCollection.embedded(folder, verify=False), folder=folder)

    def search(self, queries: SparseVectors, k: int, *, where: Where = None) -> list[list[Hit]]:
        """Search documents whose payload matches `where`.

        See :class:`SparseIndex`.
        """
        check_search(self, queries, k)
        return self.collection.search(queries, int(k), where=where)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a copy of an embedded index, or the address of one on a server.

        The folder of an embedded index itself is brought up to date without a copy.

        Args:
            path: the directory, new or empty.
            overwrite: replace an earlier index of this backend.

        Raises:
            FileExistsError: if there is something else at `path`, or an index without `overwrite`.
        """
        path = path_of("path", path)
        if self._folder is not None and path.resolve() == self._folder.resolve():
            self._describe(self._folder)
            return
        with atomic_directory(path, own_names=_OWN_NAMES, overwrite=overwrite) as folder:
            if self._folder is not None:
                # Every change was flushed, so the files are complete.
                need_space(folder, allocated(self._folder / SHARD), named=path)
                shutil.copytree(self._folder / SHARD, folder / SHARD, copy_function=_copy_sparse)
                shutil.copyfile(self._folder / RECORD, folder / RECORD)
                # Closing the copy writes its checksums.
                with closing(EdgeEngine(folder, verify=False)) as copy:
                    copy.optimize()
            self._describe(folder)

    @classmethod
    def load(cls, path: str | Path) -> QdrantIndex:
        """Open a finished index that :meth:`save` or :meth:`build` wrote.

        Args:
            path: folder with the index, or with the address of an index on a server.

        Raises:
            DataError: for a damaged or unfinished index, or one of another vocabulary. The other
                errors are those of :class:`QdrantCollection`.
        """
        manifest = read_manifest(path, cls.backend)
        folder = Path(path)
        url = manifest["options"].get("url")
        name = manifest["options"].get("collection")
        is_on_server = url is not None or name is not None
        for option, value in (("url", url), ("collection", name)):
            if is_on_server and not isinstance(value, str):
                raise DataError(
                    f"{path}: expected a text as {option} of the options, got {value!r:.80}. "
                    f"{REMEDY}",
                )
        if is_on_server:
            collection = QdrantCollection.server(url, name)
        else:
            collection = QdrantCollection.embedded(folder)
        if not collection.complete or collection.layout.vocab_size != manifest["vocab_size"]:
            collection.close()
            got = "one whose build is not finished"
            if collection.complete:
                got = "one of another vocabulary"
            raise DataError(
                f"{collection.place}: expected the collection of {path}, got {got}. Run tilefold "
                "index again.",
            )
        if is_on_server:
            return cls(collection, address={"url": url, "collection": name})
        return cls(collection, folder=folder)

    def close(self) -> None:
        """Let other processes open the folder, and remove a temporary folder."""
        self.collection.close()
        if self._discard is not None:
            self._discard()

    def _describe(self, folder: Path) -> None:
        """Write the manifest into a folder of the index."""
        package = "qdrant-edge-py" if self._address is None else "qdrant-client"
        options = {"weights": self.collection.layout.weights, **(self._address or {})}
        write_manifest(folder, self, package, options, changing=_OWN_NAMES)


def _open_unfinished(folder: Path, digest: str) -> EdgeEngine:
    """Open the folder of an interrupted build, or a new one.

    Args:
        folder: hidden folder of the build.
        digest: digest of the documents of the new build. An interrupted build of other documents,
            or a damaged one, is removed.
    """
    try:
        engine = EdgeEngine(folder)
    except DataError:
        shutil.rmtree(folder)
        engine = EdgeEngine(folder)
    record = engine.record()
    if record is not None and record.vectors_sha256 not in (None, digest):
        engine.drop()
    return engine


def _remove(collection: QdrantCollection, folder: str) -> None:
    """Close a collection, and remove its temporary folder."""
    collection.close()
    shutil.rmtree(folder, ignore_errors=True)


def _copy_sparse(source: str, target: str) -> str:
    """Copy a file, with holes for blocks of zeros, of which the engine's files have many."""
    with Path(source).open("rb") as source_file, Path(target).open("wb") as target_file:
        while block := source_file.read(_COPIED_BYTES):
            if block.strip(b"\0"):
                target_file.write(block)
            else:
                target_file.seek(len(block), os.SEEK_CUR)
        target_file.truncate()
    return target
