"""Sparse search in Qdrant: embedded in a folder (qdrant-edge), or on a server (qdrant-client)."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import closing
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
from tilefold.retrieval.index.qdrant.collection import QdrantCollection
from tilefold.retrieval.index.qdrant.documents import Documents
from tilefold.retrieval.index.qdrant.edge import (
    OWN_NAMES,
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

_NAMES = (MANIFEST_NAME, *OWN_NAMES)
_OF_SERVERS = ("collection", "api_key", "timeout", "patience")
_OPTIONS = (
    "folder",
    "url",
    *_OF_SERVERS,
    "overwrite",
    "weights",
    "metadata",
    "progress",
    "resumes",
)
_BLOCK = 1 << 20


class QdrantIndex:
    """A :class:`tilefold.retrieval.index.qdrant.QdrantCollection` of sparse vectors, :attr:`collection`.

    Search is exact, with the rounding and the order that the collection promises. The folder of an
    embedded one is open in one process at a time; that of one on a server holds its address alone,
    and the API key is read from ``QDRANT_API_KEY``. Documents may be added, replaced and deleted
    through :attr:`collection`.
    """

    backend: ClassVar[str] = "qdrant"
    metadata: ClassVar[None] = None  # are in the collection

    def __init__(
        self,
        collection: QdrantCollection,
        *,
        folder: Path | None = None,
        address: dict[str, str] | None = None,
    ) -> None:
        self.collection, self._folder, self._address = collection, folder, address
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
        """Build the index; the same call resumes a build that was interrupted, beside `folder` or
        on the server.

        Args:
            vectors: the documents.
            folder: of an embedded index; a temporary one, until :meth:`save`, without folder and
                url.
            url, collection, api_key, timeout, patience: as in :meth:`QdrantCollection.server`, with
                the name there.
            weights: ``"float32"``, or ``"float16"`` in what is searched (relative error 2^-11).
            metadata: document id -> fields, kept as payload.
            overwrite: replace other vectors in the collection of the server, or an earlier index in
                `folder`.
            progress, resumes: as in :meth:`QdrantCollection.build`.

        No positive weight or a wrong option is a ``ValueError``, a place that holds something else
        a ``DataError`` or ``FileExistsError``, one where another process builds an ``InUseError``.
        """
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise ArgumentError(
                "options",
                f"Qdrant has {', '.join(_OPTIONS)}; got {', '.join(unknown)}.",
            )
        check_buildable(vectors)
        kept, cut = options.get("weights", "float32"), vectors.provenance.passages
        layout = Layout(vectors.vocab_size, vectors.fingerprint, weights=kept, passages=cut)
        payloads = fields_by_id(options.get("metadata") or {}, vectors.ids, cut)
        documents = Documents(vectors.ids, vectors, payloads=payloads)
        report = {name: options.get(name) for name in ("progress", "resumes")}
        url, folder = options.get("url"), options.get("folder")
        if url is not None:
            if folder is not None:
                raise ArgumentError(
                    "folder",
                    f"expected either a folder or the url of a server, got both, {folder!r}.",
                )
            return cls._on_server(url, documents, layout, report, options)
        for name in _OF_SERVERS:
            if options.get(name) not in (None, False):
                raise ArgumentError(name, "goes with url, the address of a server. Leave it out.")
        if folder is not None:
            overwrite = bool(options.get("overwrite"))
            return cls._in_folder(
                path_of("folder", folder), documents, layout, report, overwrite=overwrite
            )
        temporary = tempfile.mkdtemp(prefix="tilefold-qdrant-")
        try:
            index = cls._in_folder(
                Path(temporary) / "index",
                documents,
                layout,
                report,
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
        documents: Documents,
        layout: Layout,
        report: Json,
        options: Json,
    ) -> QdrantIndex:
        if not (name := options.get("collection")):
            raise ArgumentError(
                "collection", f"expected a name for it on the server, got {name!r}."
            )
        given = {
            key: options[key]
            for key in ("api_key", "timeout", "patience")
            if options.get(key) is not None
        }
        engine = ServerEngine(url, name, **given)
        record = engine.record() if options.get("overwrite") else None
        if record is not None and record.vectors_sha256 != documents.digest(layout):
            engine.drop()
        opened = QdrantCollection.of(engine, layout)
        try:
            opened.build(documents, **report)
        except BaseException:
            opened.close()
            raise
        return cls(opened, address={"url": url, "collection": name})

    @classmethod
    def _in_folder(
        cls,
        folder: Path,
        documents: Documents,
        layout: Layout,
        report: Json,
        *,
        overwrite: bool,
    ) -> QdrantIndex:
        check_replaceable(folder, _NAMES, overwrite=overwrite)
        documents.check(layout, str(folder))
        unfinished = folder.parent / f".{folder.name}.building"
        with lock_path(folder):
            check_replaceable(folder, _NAMES, overwrite=overwrite)  # another process may be done
            try:
                with QdrantCollection.of(
                    _unfinished(unfinished, documents.digest(layout)),
                    layout,
                ) as opened:
                    opened.build(documents, **report)
                    cls(opened)._describe(unfinished)
            except BaseException:
                if not (unfinished / RECORD).exists():  # nothing to go on with
                    shutil.rmtree(unfinished, ignore_errors=True)
                raise
            swap_directory(unfinished, folder)
        return cls(QdrantCollection.embedded(folder, verify=False), folder=folder)  # just written

    def search(self, queries: SparseVectors, k: int, *, where: Where = None) -> list[list[Hit]]:
        """See :class:`SparseIndex`; of the documents whose payload matches `where` if that is
        given.
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
        with atomic_directory(path, own_names=_NAMES, overwrite=overwrite) as folder:
            if self._folder is not None:  # every change was flushed
                need_space(folder, allocated(self._folder / SHARD), named=path)
                shutil.copytree(self._folder / SHARD, folder / SHARD, copy_function=_copy_sparse)
                shutil.copyfile(self._folder / RECORD, folder / RECORD)
                with closing(
                    EdgeEngine(folder, verify=False),
                ) as copy:  # closing makes the checksums
                    copy.optimize()
            self._describe(folder)

    @classmethod
    def load(cls, path: str | Path) -> QdrantIndex:
        """Open a finished index that :meth:`save` or :meth:`build` wrote; errors as of
        :class:`QdrantCollection`.
        """
        manifest = read_manifest(path, cls.backend)
        folder = Path(path)
        address = {name: manifest["options"].get(name) for name in ("url", "collection")}
        for name, value in address.items():
            if not isinstance(value, str) and any(other is not None for other in address.values()):
                raise DataError(
                    f"{path}: expected a text as {name} of the options, got {value!r:.80}. "
                    f"{REMEDY}",
                )
        url, name = address.values()
        opened = (
            QdrantCollection.embedded(folder) if url is None else QdrantCollection.server(url, name)
        )
        if not opened.complete or opened.layout.vocab_size != manifest["vocab_size"]:
            opened.close()
            what = (
                "one of another vocabulary"
                if opened.complete
                else "one whose build is not finished"
            )
            raise DataError(
                f"{opened.place}: expected the collection of {path}, got {what}. Run tilefold "
                "index again.",
            )
        return cls(opened, folder=folder) if url is None else cls(opened, address=address)

    def close(self) -> None:
        """Let other processes open the folder; a temporary one is removed."""
        self.collection.close()
        if self._discard is not None:
            self._discard()

    def _describe(self, folder: Path) -> None:
        package = "qdrant-edge-py" if self._address is None else "qdrant-client"
        options = {"weights": self.collection.layout.weights, **(self._address or {})}
        write_manifest(folder, self, package, options, changing=_NAMES)


def _unfinished(folder: Path, digest: str) -> EdgeEngine:
    """The engine of an interrupted build; an empty one where that was of other vectors, or is
    damaged.
    """
    try:
        engine = EdgeEngine(folder)
    except DataError:
        shutil.rmtree(folder)
        engine = EdgeEngine(folder)
    if (record := engine.record()) is not None and record.vectors_sha256 not in (None, digest):
        engine.drop()
    return engine


def _remove(collection: QdrantCollection, folder: str) -> None:
    collection.close()
    shutil.rmtree(folder, ignore_errors=True)


def _copy_sparse(source: str, target: str) -> str:
    """Copy a file; blocks of zeros, of which the engine keeps many, take no space."""
    with Path(source).open("rb") as read, Path(target).open("wb") as written:
        while block := read.read(_BLOCK):
            if block.strip(b"\0"):
                written.write(block)
            else:
                written.seek(len(block), 1)
        written.truncate()
    return target
