"""Writing of documents into a served index: encoded in the background, committed as a segment."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilefold._internal.files import InUseError
from tilefold._internal.processes import describe_exit
from tilefold.ops.row_groups import normalize_rows
from tilefold.retrieval.common.provenance import Provenance, model_fingerprint, provenance_of
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.data.passages import Passages
from tilefold.retrieval.encoding.job import Job, Output
from tilefold.retrieval.encoding.sparse import SparseEncoding, SparseJob
from tilefold.retrieval.encoding.tokens import DenseEncoding, TokenEncoding
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import LATE
from tilefold.retrieval.index.bm25 import BM25Index
from tilefold.retrieval.index.generations import read_generation
from tilefold.retrieval.vectors.sparse import SparseVectors
from tilefold.serve.bodies import Row, ServeError, invalid_input_error
from tilefold.serve.document_log import Change, DocumentLog, LoggedDocuments
from tilefold.serve.following import IndexFollower
from tilefold.serve.models import Served
from tilefold.serve.service import EncodeOptions, Service

__all__ = ["MAX_PENDING_DOCUMENTS", "DocumentWriter", "IndexChange", "Receipt"]

MAX_PENDING_DOCUMENTS = 10_000
"""Largest number of accepted documents that the index does not have yet."""
# Largest number of documents of a segment: a crash repeats the work of one segment.
_MAX_SEGMENT_DOCUMENTS = 1000
# Largest number of segments; more are merged, because a search visits each of them.
_MAX_SEGMENTS = 32
# Number of texts of a batch. Batches of documents and of queries take turns.
_ENCODED_TOGETHER = 8
# Short text that every working model and device can encode.
_PROBE_TEXT = "a"
# Time between two attempts to write the same changes.
_RETRY_SECONDS = 5.0
# Time between two checks for changes that another process has left, or for a new generation.
_IDLE_SECONDS = 1.0
# Expected duration of a segment, before one was measured.
_FIRST_ESTIMATE_SECONDS = 5.0
# Weight of the latest segment in the moving average of durations.
_SMOOTHING = 0.5
# Errors of files, of the model and of the process. Their messages say what is wrong.
_EXPECTED_ERRORS = (OSError, RuntimeError, ServeError, ValueError)
# Priority of the process that changes the index, which must not delay searches.
_NICENESS = 10

_logger = logging.getLogger("tilefold.serve")


@dataclass(frozen=True)
class IndexChange:
    """Documents that are added to an index and removed from it by one commit.

    Attributes:
        index: the folder of the index.
        backend: backend of the index.
        data: a BEIR folder with the new documents; ``None`` only removes documents.
        vectors: folder with the vectors of the new documents; ``None`` for a BM25 index, or if
            there are none.
        deleted: file with the id of a removed document in each line; ``None`` if there are none.
        log_sequence: sequence number of the last change in the log.
    """

    index: Path
    backend: str
    log_sequence: int
    data: Path | None
    vectors: Path | None
    deleted: Path | None

    def arguments(self) -> list[str]:
        """Return the arguments of ``tilefold index`` that commit the change."""
        arguments = ["--output", str(self.index), "--log-sequence", str(self.log_sequence)]
        if self.data is not None:
            arguments += ["--update", "--data", str(self.data)]
        if self.vectors is not None:
            option = "--tokens" if self.backend == LATE else "--vectors"
            arguments += [option, str(self.vectors)]
        if self.deleted is not None:
            arguments += ["--delete", str(self.deleted)]
        return arguments


@dataclass(frozen=True)
class Receipt:
    """Answer to an accepted request.

    Attributes:
        sequence: sequence number of the last change of the request.
        accepted: number of changes of the request.
        visible: whether searches see the changes.
        visible_in_seconds: estimated time until searches see the changes; 0 if they do already.
        generation: id of the generation that searches see.
        error: why the last attempt to write the changes failed; ``None`` without a failure. The
            server tries again.
    """

    sequence: int
    accepted: int
    visible: bool
    visible_in_seconds: float
    generation: str | None
    error: str | None = None


@dataclass
class _Batch:
    """Pending changes that become one segment.

    Attributes:
        sequence: sequence number of the last change.
        documents: id -> document to add. The last change of a document counts.
        deleted: ids of documents to remove.
        deleted_before_put: ids of documents that were deleted and then put again. They are removed
            from the index even if the new document cannot be encoded.
        failed: id -> reason, for documents that could not be encoded.
    """

    sequence: int
    documents: dict[str, Document] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    deleted_before_put: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_changes(cls, changes: Mapping[int, Change]) -> _Batch:
        """Merge changes; of several changes of one document, only the last one counts.

        Args:
            changes: sequence number -> change, in ascending order.
        """
        batch = cls(sequence=max(changes))
        # A later change of the same document overwrites an earlier one in this dictionary.
        last_document = {change.document_id: change.document for change in changes.values()}
        for document_id, document in last_document.items():
            if document is None:
                batch.deleted.append(document_id)
            else:
                batch.documents[document_id] = document
        deletions = {change.document_id for change in changes.values() if change.document is None}
        batch.deleted_before_put = deletions & batch.documents.keys()
        return batch


class DocumentWriter:
    """Writes documents into the index of a service.

    A request is accepted once its documents are in the log on the disk. A task on the event loop
    encodes them with the model of the service, in turns with queries. Another process then adds
    them to the index as one segment, and the follower opens the new generation (the committed state
    of the index). After a crash, the changes that the index does not have are read from the log.

    Attributes:
        service: the service.
        follower: opens the generations of the index.
        log: the log of the changes.
        visible: sequence number up to which searches see all changes.
        error: why pending changes could not be written; ``None`` if nothing went wrong.
    """

    def __init__(
        self,
        service: Service,
        follower: IndexFollower,
        log: DocumentLog,
        run_index: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """Prepare to write; :meth:`start` starts the task.

        Args:
            service: the service, whose model encoded the documents of the index.
            follower: opens the generations of the index.
            log: the log of the changes.
            run_index: function that runs ``tilefold index`` with arguments. By default it is run in
                a process of low priority.
        """
        self.service = service
        self.follower = follower
        self.log = log
        self.visible = log.applied
        self.error: str | None = None
        self._process = _IndexProcess(log)
        self._run_index = self._process.run if run_index is None else run_index
        self._segment_seconds = _FIRST_ESTIMATE_SECONDS
        # Sequence number of the last change that the latest attempt to write began with.
        self._attempted_sequence = 0
        # The same of the last attempt that failed. Later changes were not part of it.
        self._failed_sequence = 0
        # Whether the texts of served documents have changed, although the index files have not.
        self._must_reopen = False
        self._append_lock = asyncio.Lock()
        self._has_changes = asyncio.Event()
        self._progress = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        # A model that is no longer served must not stay in memory.
        self._fingerprints: weakref.WeakKeyDictionary[Served, str] = weakref.WeakKeyDictionary()
        service.writer = self
        service.metrics.gauge("tilefold_pending_documents", lambda: float(log.n_pending))

    @property
    def _index_path(self) -> Path:
        """The folder of the index."""
        return self.follower.source.path

    def start(self) -> None:
        """Start to write pending changes, on the event loop of the server."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop writing. The next process that writes continues with the pending changes."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._process.stop()
        self.log.unlock()

    def info(self) -> dict[str, object]:
        """Describe the state of the changes, for ``GET /documents``."""
        return {
            "accepted_sequence": self.log.last,
            "visible_sequence": self.visible,
            "pending": self.log.n_pending,
            "generation": self.follower.generation,
            "error": self.error,
            "failed": dict(self.log.failed),
            "max_pending": MAX_PENDING_DOCUMENTS,
        }

    async def accept(self, changes: Sequence[Change], *, wait: bool) -> Receipt:
        """Append changes to the log, from which they are written into the index.

        Args:
            changes: the changes of a request.
            wait: whether to wait until searches see the changes.

        Raises:
            ServeError: if the index takes no texts, there are too many pending changes, another
                process writes, or the disk cannot be written. None of the changes is then accepted.
        """
        self._check_takes_texts(changes)
        async with self._append_lock:
            if self.log.n_pending + len(changes) > MAX_PENDING_DOCUMENTS:
                raise ServeError(
                    "Overloaded",
                    f"{self.log.n_pending} documents are pending, and at most "
                    f"{MAX_PENDING_DOCUMENTS} may be: send these again later",
                )
            try:
                await self.service.run_in_background(self.log.lock)
                sequence = await self.service.run_in_background(self.log.append, list(changes))
            except InUseError as error:
                raise ServeError(
                    "Validation",
                    "another server process writes documents into this index: send them there",
                    status=409,
                ) from error
            except (OSError, DataError) as error:
                self.service.log_failure(error)
                raise ServeError(
                    "Backend",
                    f"nothing was accepted, since the log could not be written: {error}",
                    status=507,
                ) from error
        self._has_changes.set()
        if wait:
            await self._wait_for(sequence)
        return self._receipt(sequence, len(changes))

    def _check_takes_texts(self, changes: Sequence[Change]) -> None:
        """Raise ``ServeError`` if a text is put into an index of page images.

        The model of such an index encodes each text as a query. Its vectors are more similar to
        those of queries than a page is, so that the text would rank first.

        Args:
            changes: the changes of a request.
        """
        searchable = self.follower.served
        model = searchable.encoder
        if model is None or not model.takes_images or not searchable.has_only_images:
            return
        for change in changes:
            if change.document is not None:
                raise invalid_input_error(
                    f"document {change.document_id!r} is a text, and {model.name} encodes only "
                    "page images as documents: add the page to the folder of --data, encode it, "
                    "and run `tilefold index --update`",
                )

    def _receipt(self, sequence: int, accepted: int) -> Receipt:
        """Return the answer to a request.

        Args:
            sequence: sequence number of its last change.
            accepted: number of its changes.
        """
        is_visible = self.visible >= sequence
        n_changes_to_write = sequence - self.log.applied
        n_segments_to_write = math.ceil(n_changes_to_write / _MAX_SEGMENT_DOCUMENTS)
        # A written segment that searches do not see yet counts, too.
        seconds = 0.0 if is_visible else self._segment_seconds * max(1, n_segments_to_write)
        return Receipt(
            sequence,
            accepted,
            is_visible,
            round(seconds, 1),
            self.follower.generation,
            None if is_visible else self.error,
        )

    async def _wait_for(self, sequence: int) -> None:
        """Wait until searches see a change, or until an attempt to write it fails.

        The failure of an attempt that began before the change was in the log does not end the wait.

        Args:
            sequence: sequence number of the change.
        """
        async with self._progress:
            await self._progress.wait_for(
                lambda: self.visible >= sequence or self._failed_sequence >= sequence,
            )

    async def _run(self) -> None:
        """Write pending changes whenever there are some, until the task is cancelled."""
        while True:
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._has_changes.wait(), _IDLE_SECONDS)
            self._has_changes.clear()
            try:
                await self._write_pending()
                error = None
            except InUseError as in_use:  # another process writes the log or the index
                # Without the log's lock, another server writes the changes: no error.
                error = str(in_use) if self.log.is_locked else None
            except _EXPECTED_ERRORS as failure:
                error = str(failure).strip() or type(failure).__name__
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as failure:  # a panic of Rust code is not an Exception
                error = f"{type(failure).__name__}: {failure}"
                if error != self.error:
                    _logger.error("documents were not written: %s", error, exc_info=failure)
            await self._record_attempt(error)
            if error is not None:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _record_attempt(self, error: str | None) -> None:
        """Record the outcome of an attempt to write, and wake requests that wait for it.

        Args:
            error: why the attempt failed; ``None`` if it succeeded.
        """
        if error is not None and error != self.error:
            _logger.warning("documents could not be written, and will be again: %s", error)
        async with self._progress:
            self.error = error
            if error is not None:
                self._failed_sequence = self._attempted_sequence
            self._progress.notify_all()

    async def _write_pending(self) -> None:
        """Write all pending changes into the index, and let searches see them.

        Pending changes are in the log, but not in the index. They are written in batches, each of
        which becomes a segment of the index.
        """
        service = self.service
        self._attempted_sequence = self.log.last
        if not self.log.is_locked:
            # Another process may have written the log, or have left changes when it ended.
            await service.run_in_background(self.log.refresh)
            if not self.log.n_pending:
                self.visible = self.log.applied
                return
            await service.run_in_background(self.log.lock)
        while self.log.n_pending:
            started = time.perf_counter()
            self._attempted_sequence = self.log.last
            batch = _Batch.from_changes(self.log.pending(_MAX_SEGMENT_DOCUMENTS))
            await self._write_batch(batch)
            await service.run_in_background(self.log.mark_applied, batch.sequence, batch.failed)
            await self._open_latest_generation()
            seconds = time.perf_counter() - started
            # An exponential moving average, from which receipts estimate when changes are visible.
            self._segment_seconds += _SMOOTHING * (seconds - self._segment_seconds)
            await self._record_attempt(error=None)
            await self._compact_log()
            await self._merge_if_needed()
        if self.visible < self.log.applied:
            await self._open_latest_generation()

    async def _open_latest_generation(self) -> None:
        """Let searches see all changes that the index has.

        If the index has a newer generation (committed state) than the served one, it is opened.

        Raises:
            ServeError: if the new generation is refused, for example by another model.
        """
        applied = self.log.applied
        generation = await self.service.run_in_background(read_generation, self._index_path)
        if self._must_reopen or generation.id != self.follower.generation:
            await self.follower.reload()
            self._must_reopen = False
        self.visible = applied

    async def _compact_log(self) -> None:
        """Remove changes without effect from the log, if they are many."""
        documents = self.follower.served.documents
        collection_documents = documents
        if isinstance(documents, LoggedDocuments):  # those of the collection with logged changes
            collection_documents = documents.base
        try:
            # A server that shows no documents does not know those of the collection.
            await self.service.run_in_background(self.log.compact, collection_documents or None)
        except OSError as error:  # the log stays as it is, and nothing is lost
            _logger.warning("the log of documents could not be compacted: %s", error)

    async def _merge_if_needed(self) -> None:
        """Merge the segments of the index if there are many.

        An index whose documents were all deleted is not merged: some kinds of indexes cannot be
        empty.
        """
        is_empty = self.follower.served.index.n_documents == 0
        if self.follower.n_segments > _MAX_SEGMENTS and not is_empty:
            arguments = ["--merge", "--output", str(self._index_path)]
            await self.service.run_in_background(self._run_index, arguments)
            await self._open_latest_generation()

    async def _write_batch(self, batch: _Batch) -> None:
        """Encode the documents of a batch, and commit them to the index as one segment.

        Args:
            batch: the batch. Documents that cannot be encoded are moved from its ``documents`` to
                its ``failed``.

        Raises:
            RuntimeError: if the index could not be changed.
        """
        folder = self.log.folder / "segment"
        await self.service.run_in_background(_create_empty, folder)
        # Only the name is taken: a local variable with the served index would keep it in memory
        # while documents are encoded, even if searches already use a newer one.
        backend = self.follower.served.index.backend
        vectors = None
        if batch.documents and backend != BM25Index.backend:
            vectors = await self._encode(batch, folder / "vectors")
        change = await self.service.run_in_background(
            _write_change,
            self._index_path,
            backend,
            batch,
            folder,
            vectors,
        )
        adds_documents = change.data is not None
        removes_documents = change.deleted is not None
        if adds_documents or removes_documents:
            await self._commit(batch, change)
        await self.service.run_in_background(shutil.rmtree, folder)

    async def _commit(self, batch: _Batch, change: IndexChange) -> None:
        """Run ``tilefold index`` on the files of a batch.

        The log records before which changes are being written and which generation (committed
        state) the index had, so that a reader knows after a crash whether the index has them.

        Args:
            batch: the batch, for the log.
            change: the same changes as files.

        Raises:
            RuntimeError: if the index could not be changed.
        """
        run_in_background = self.service.run_in_background
        generation = await run_in_background(read_generation, self._index_path)
        await run_in_background(
            self.log.mark_writing,
            batch.sequence,
            batch.failed,
            generation.id,
        )
        await run_in_background(self._run_index, change.arguments())
        new_generation = await run_in_background(read_generation, self._index_path)
        # A BM25 index stays the same if a document got another title with the same words. The
        # server must then read the documents again, although there is no new generation.
        if batch.documents and new_generation == generation:
            self._must_reopen = True

    async def _encode(self, batch: _Batch, folder: Path) -> Path | None:
        """Encode the documents of a batch into a folder of vectors.

        Args:
            batch: the batch. Documents that cannot be encoded are moved from its ``documents`` to
                its ``failed``.
            folder: the folder to write.

        Returns:
            The folder; ``None`` if no document could be encoded.

        Raises:
            DataError: if the served model has not encoded the index.
        """
        model = self.follower.served.encoder
        if model is None:
            raise DataError(
                "the index has vectors, but the server has no model. Start it with --model.",
            )
        provenance = self.follower.served.index.provenance
        dimension = getattr(self.follower.served.index, "dimension", None)  # None if sparse
        await self._check_model(model, provenance)
        rows = await self._encode_documents(model, batch, provenance.passages)
        if not batch.documents:
            return None
        await self.service.run_in_background(
            _write_vectors,
            model,
            _texts_of(batch.documents, provenance.passages),
            rows,
            provenance,
            dimension,
            folder,
        )
        return folder

    async def _check_model(self, model: Served, provenance: Provenance) -> None:
        """Raise ``DataError`` if a model has not encoded the documents of the index.

        Args:
            model: the served model.
            provenance: provenance of the index.
        """
        if model not in self._fingerprints:
            fingerprint = await self.service.run_in_background(model_fingerprint, model.model)
            self._fingerprints[model] = fingerprint
        served = Provenance(model_fingerprint=self._fingerprints[model])
        if "model_fingerprint" in provenance.differing_fields(served):
            raise DataError(
                f"{model.name} with the options of this server is not the model that encoded the "
                "documents of the index. Start the server with that model, and without "
                "--other-model and --max-length.",
            )

    async def _encode_documents(
        self,
        model: Served,
        batch: _Batch,
        passages: str | None,
    ) -> dict[str, Any]:
        """Encode the documents of a batch, a few texts at a time.

        Args:
            model: the model.
            batch: the batch. Documents that cannot be encoded are moved from its ``documents`` to
                its ``failed``.
            passages: how documents are divided; ``None`` for whole documents.

        Returns:
            Id of each document or passage -> its vector or vectors.

        Raises:
            ServeError: if the service or its device is at fault.
        """
        texts = _texts_of(batch.documents, passages)
        rows: dict[str, Any] = {}
        try:
            return await self._encode_texts(model, texts)
        except ServeError as error:
            if not _may_be_fault_of_text(error):
                raise
        # To find the documents at fault, each of them is encoded alone.
        for document_id, document in list(batch.documents.items()):
            texts = _texts_of({document_id: document}, passages)
            try:
                rows.update(await self._encode_texts(model, texts))
            except ServeError as error:
                if not _may_be_fault_of_text(error):
                    raise
                if error.kind == "Backend":
                    # A broken device fails on every text. This call then raises, and the document
                    # is not marked as failed.
                    await self._encode_texts(model, {"probe": _PROBE_TEXT})
                _logger.warning("document %r could not be encoded: %s", document_id, error)
                batch.failed[document_id] = error.message
                del batch.documents[document_id]
                if document_id in batch.deleted_before_put:
                    batch.deleted.append(document_id)
        return rows

    async def _encode_texts(self, model: Served, texts: Mapping[str, str]) -> dict[str, Any]:
        """Encode texts in batches that take turns with queries.

        The texts do not count against :attr:`Service.input_limit`, the limit on waiting inputs,
        because only one batch waits at a time.

        Args:
            model: the model.
            texts: id -> text.

        Returns:
            Id -> vector or vectors of the text.
        """
        rows: dict[str, Any] = {}
        ids = list(texts)
        for start in range(0, len(ids), _ENCODED_TOGETHER):
            batch_ids = ids[start : start + _ENCODED_TOGETHER]
            outcome = await self.service.encode(
                model,
                [texts[text_id] or " " for text_id in batch_ids],  # empty texts are refused
                EncodeOptions("document", truncate=True, counted=None),
            )
            rows.update(zip(batch_ids, outcome.rows, strict=True))
        return rows


def _may_be_fault_of_text(error: ServeError) -> bool:
    """Return whether a text may have caused an error of encoding; a busy service has not."""
    return error.kind not in ("Overloaded", "Unhealthy")


class _IndexProcess:
    """Runs ``tilefold index`` in a process of low priority, one at a time."""

    def __init__(self, log: DocumentLog) -> None:
        """Prepare to run; no process is started.

        Args:
            log: the log, which stays locked while the process runs.
        """
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str]) -> None:
        """Run the command, and wait for it; called in a thread.

        Args:
            arguments: arguments of ``tilefold index``.

        Raises:
            RuntimeError: if the command fails, with its error message.
        """
        command = [sys.executable, "-m", "tilefold.cli", "index", *arguments]
        with subprocess.Popen(  # noqa: S603 - the paths are those of the server
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=self._log.inherited_descriptors,
        ) as process:
            self._process = process
            if hasattr(os, "setpriority"):
                with suppress(OSError):  # it has ended
                    os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            _, error_output = process.communicate()
        self._process = None
        if process.returncode < 0:
            raise RuntimeError(
                f"tilefold index was killed ({describe_exit(process.returncode)}), as happens "
                "when memory is short",
            )
        if process.returncode:
            lines = error_output.strip().splitlines()
            reason = lines[-1].removeprefix("Error: ") if lines else f"code {process.returncode}"
            raise RuntimeError(f"tilefold index: {reason}")

    def stop(self) -> None:
        """End the running process. A commit is atomic: the index has all of the change or none."""
        if self._process is not None:
            self._process.terminate()


def _create_empty(folder: Path) -> None:
    """Create an empty folder, and remove an earlier one that a killed process has left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _texts_of(documents: Mapping[str, Document], passages: str | None) -> Mapping[str, str]:
    """Return the texts of documents or of their passages, by id.

    Args:
        documents: id -> document.
        passages: how documents are divided; ``None`` for whole documents.
    """
    if passages is None:
        return {document_id: document.contents for document_id, document in documents.items()}
    return Passages.parse(passages).of(documents)


def _write_change(
    index: Path,
    backend: str,
    batch: _Batch,
    folder: Path,
    vectors: Path | None,
) -> IndexChange:
    """Write the documents and ids of a batch into files for ``tilefold index``.

    Args:
        index: the folder of the index.
        backend: backend of the index.
        batch: the batch.
        folder: folder of the files.
        vectors: folder with the vectors of the documents; ``None`` for a BM25 index.
    """
    data = None
    if batch.documents:
        data = folder / "data"
        Collection("documents", batch.documents, {}, {}).save_beir(data)
    deleted = None
    if batch.deleted:
        deleted = folder / "deleted.txt"
        # The command drops a byte order mark at the start of the file. With one in front (as
        # "utf-8-sig" writes it), an id that begins with the same character keeps it.
        lines = "".join(f"{document_id}\n" for document_id in batch.deleted)
        deleted.write_text(lines, encoding="utf-8-sig")
    return IndexChange(
        index=index,
        backend=backend,
        log_sequence=batch.sequence,
        data=data,
        vectors=vectors,
        deleted=deleted,
    )


def _write_vectors(
    model: Served,
    texts: Mapping[str, str],
    rows: Mapping[str, Any],
    provenance: Provenance,
    dimension: int | None,
    folder: Path,
) -> None:
    """Write encoded documents into a folder of vectors, as ``tilefold encode`` does.

    Args:
        model: the model.
        texts: id -> text.
        rows: id -> vector or vectors of the text.
        provenance: provenance of the index, which says whether it has weights of special tokens.
        dimension: dimension of the vectors of the index; ``None`` for sparse vectors.
        folder: the folder to write.
    """
    output = Output(folder)
    ids = list(texts)

    def provenance_of_texts() -> Provenance:
        return provenance_of(texts)

    job: Job[Any, Any]
    vectors: Any
    if model.kind == "sparse":
        has_special_tokens = provenance.special_tokens is not False
        encoding = SparseEncoding(special_tokens=has_special_tokens)
        sparse_job = encoding.create_job(model.model, texts, output, provenance_of_texts)
        vectors = _sparse_vectors_of({text_id: rows[text_id] for text_id in ids}, sparse_job)
        if not has_special_tokens:
            vectors = vectors.without(model.model.tokenizer.all_special_ids)
        job = sparse_job
    elif model.kind == "dense":
        dense_encoding = DenseEncoding(dimension=dimension)
        job = dense_encoding.create_job(model.model, texts, output, provenance_of_texts)
        vectors = job.to_vectors(ids, [_dense_row(model, rows[text_id], job) for text_id in ids])
    else:
        job = TokenEncoding().create_job(model.model, texts, output, provenance_of_texts)
        vectors = job.to_vectors(ids, [rows[text_id] for text_id in ids])
    writer = job.open_writer(writes_manifest=True)
    writer.write_shard(0, vectors)
    writer.finish(len(ids))


def _sparse_vectors_of(rows: Mapping[str, Row], job: SparseJob) -> SparseVectors:
    """Pack sparse vectors into one CSR matrix, without weights that are not positive.

    Args:
        rows: id -> sparse vector.
        job: encoding job, with the size and the fingerprint of the vocabulary.
    """
    row_lengths = [len(row.indices) for row in rows.values()]
    row_offsets = np.cumsum([0, *row_lengths])
    vectors = SparseVectors(
        list(rows),
        row_offsets,
        np.concatenate([row.indices for row in rows.values()]),
        np.concatenate([row.weights for row in rows.values()]),
        job.vector_size,
        job.vocabulary,
    )
    return vectors.above(0.0)


def _dense_row(model: Served, row: Any, job: Job[Any, Any]) -> torch.Tensor:
    """Return a dense vector ``[1, D]`` as it is stored: shortened, and normalised for cosine.

    Args:
        model: the model.
        row: the vector ``[D]`` that the service has encoded.
        job: encoding job, with the dimension of the stored vectors.
    """
    vector = torch.from_numpy(row)[None, : job.vector_size].float()
    if model.model.similarity_fn_name != "cosine":
        return vector
    # `invariant` is set for models that promise the same bits for a text in any batch. The norm is
    # then computed on the device, as by `tilefold encode`, so that both give the same bits.
    if model.invariant is not None:
        return normalize_rows(vector.to(model.model.device)).cpu()
    return torch.nn.functional.normalize(vector)
