"""Durable log of the documents that were put or deleted over HTTP, next to the folder of an index.

The log of ``INDEX`` is the folder ``INDEX.documents``. Its file ``log.jsonl`` has a line for each
document: ``{"sequence": 7, "put": {"_id", "title", "text", "metadata"}}`` or ``{"sequence": 8,
"delete": ID}``. A request is acknowledged once its lines are on the disk. The file
``applied.json`` has the sequence number up to which the index has all changes. After a crash the
later lines are applied again, with the same result. While a segment is added, ``published.json``
says whether the index has it (:mod:`tilefold.retrieval.index.publishing`).

Lines without effect are removed now and then: those that later changes have replaced, and deletions
of documents that the collection does not have. Another file with the remaining lines takes the
place of ``log.jsonl``. A text that a generation of the index shows is read from the
file that was there when the generation was opened.

One process writes the log, and any number of processes read it.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from tilefold._internal.files import (
    InUseError,
    atomic_file,
    lock_folder,
    naming_full_disk,
    sync,
)
from tilefold.retrieval.common.files import json_line, read_json_object, write_json_object
from tilefold.retrieval.data.collection import Document
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.publishing import Publication, documents_folder

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = ["Change", "DocumentLog", "LoggedDocuments"]

_LOG = "log.jsonl"
_APPLIED = "applied.json"
_CHILD_LOCK = ".child.lock"
# The log is rewritten if replaced lines take at least this number of bytes, and half of all bytes.
_MIN_REPLACED_BYTES = 1 << 20
_REMEDY = "Restore the file from a backup, or remove the folder to forget changes that are pending."


@dataclass(frozen=True)
class Change:
    """A document that was put or deleted.

    Attributes:
        document_id: id of the document.
        document: the document; ``None`` if it was deleted.
    """

    document_id: str
    document: Document | None

    def to_json(self, sequence: int) -> dict[str, object]:
        """Return the line of the log as an object.

        Args:
            sequence: sequence number of the change.
        """
        if self.document is None:
            return {"sequence": sequence, "delete": self.document_id}
        fields = {
            "_id": self.document_id,
            "title": self.document.title,
            "text": self.document.text,
            "metadata": dict(self.document.metadata),
        }
        return {"sequence": sequence, "put": fields}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Change:
        """Create the change that a line of the log describes."""
        if "delete" in line:
            return cls(str(line["delete"]), None)
        fields = line["put"]
        document = Document(fields["_id"], fields["title"], fields["text"], fields["metadata"])
        return cls(document.id, document)


class _Line(NamedTuple):
    """Position of a line of the log, and its change without the text.

    Attributes:
        sequence: sequence number of the change.
        document_id: id of the document.
        is_deletion: whether the document was deleted.
        offset: position of the line in bytes.
        size: length of the line in bytes.
    """

    sequence: int
    document_id: str
    is_deletion: bool
    offset: int
    size: int


class _LogFile:
    """An open file of the log. It can be read after another file has taken its place.

    Threads may share it.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Args:
            path: the file.

        Raises:
            FileNotFoundError: if there is no such file.
        """
        self._path = path
        self._file = path.open("rb")
        self._guard = threading.Lock()
        weakref.finalize(self, self._file.close)

    def is_current(self) -> bool:
        """Return whether the path of the file still leads to this file."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def read(self, line: _Line) -> Change:
        """Read the change of a line."""
        return Change.from_json(json.loads(self.read_bytes(line)))

    def read_bytes(self, line: _Line) -> bytes:
        """Read a line."""
        with self._guard:
            self._file.seek(line.offset)
            return self._file.read(line.size)

    def lines_from(self, offset: int) -> Iterator[bytes]:
        """Read the complete lines from a position on. The last line may still be written."""
        with self._guard:
            self._file.seek(offset)
            for line in self._file:
                if not line.endswith(b"\n"):
                    break
                yield line


@dataclass(frozen=True)
class _UnfinishedSegment:
    """A segment that a process is adding to the index, or was adding when it was killed.

    Attributes:
        sequence: sequence number of the last change of the segment.
        failed: ids of documents that the segment lacks, because they could not be encoded; a list
            in the file.
        sequence_before: sequence number of the last change that the index has without the segment.
    """

    sequence: int
    failed: Collection[str]
    sequence_before: int

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> _UnfinishedSegment:
        """Create the record from ``applied.json``; fields of earlier versions are ignored."""
        return cls(fields["sequence"], fields["failed"], fields["sequence_before"])

    def last_change_in(self, generation: str, publication: Publication | None) -> int:
        """Return the sequence number of the last change that a generation of the index has.

        Args:
            generation: id of the generation, a committed state of the index.
            publication: record of the last segment that was added to the index, which says whether
                a generation has it; ``None`` if none was added.
        """
        if publication is None or publication.sequence != self.sequence:
            return self.sequence_before  # the process has not begun to publish the segment
        return self.sequence if publication.is_in(generation) else self.sequence_before


@dataclass(frozen=True)
class _AppliedChanges:
    """Which changes the index has, as ``applied.json`` says.

    Attributes:
        sequence: sequence number up to which the index has all changes.
        failed: id -> reason, for documents that could not be encoded.
        failed_since: id -> sequence number of the first of the latest changes of the document that
            the index does not have, because the document could not be encoded.
        writing: the segment that is being added; ``None`` if there is none.
    """

    sequence: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    failed_since: Mapping[str, int] = field(default_factory=dict)
    writing: _UnfinishedSegment | None = None

    @classmethod
    def read(cls, path: Path) -> _AppliedChanges:
        """Read which changes the index has: none if there is no file.

        Args:
            path: the file ``applied.json`` of the log.

        Raises:
            DataError: if the file is damaged.
        """
        if not path.exists():
            return cls()
        content = read_json_object(path, _REMEDY)
        try:
            writing = content.get("writing")
            return cls(
                sequence=int(content["sequence"]),
                failed=content["failed"],
                failed_since=content.get("failed_since", {}),
                writing=None if writing is None else _UnfinishedSegment.from_json(writing),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}: expected which changes the index has, got other fields or values "
                f"({type(error).__name__}: {error}). {_REMEDY}",
            ) from error

    def write(self, path: Path) -> None:
        """Write the file durably."""
        write_json_object(path, asdict(self), durable=True)


@dataclass
class _LogContents:
    """Changes that a process has read from a log.

    Attributes:
        file: the open file; ``None`` if there is none.
        size: number of bytes that were read, of complete lines only.
        replaced_bytes: number of bytes of lines that later changes have replaced.
        last: sequence number of the last change.
        applied: which changes the index has.
        latest: id -> line of the last change that the index has.
        pending: sequence number -> line of a change that the index does not have, ascending.
        changes: sequence number -> pending change.
    """

    file: _LogFile | None = None
    size: int = 0
    replaced_bytes: int = 0
    last: int = 0
    applied: _AppliedChanges = field(default_factory=_AppliedChanges)
    latest: dict[str, _Line] = field(default_factory=dict)
    pending: dict[int, _Line] = field(default_factory=dict)
    changes: dict[int, Change] = field(default_factory=dict)

    def add(self, sequence: int, change: Change, size: int) -> None:
        """Register a change whose line is in the file.

        Args:
            sequence: sequence number of the change.
            change: the change.
            size: length of the line in bytes.
        """
        is_deletion = change.document is None
        line = _Line(sequence, change.document_id, is_deletion, self.size, size)
        self.size += size
        self.last = max(self.last, sequence)
        self.pending[sequence] = line
        self.changes[sequence] = change

    def move_applied_to_latest(self) -> None:
        """Move the changes that the index has from ``pending`` to ``latest``.

        A change whose document could not be encoded is only removed: the index does not have it, so
        that an earlier change of the document stays the latest one.
        """
        applied = self.applied
        self.last = max(self.last, applied.sequence)  # the last line may have been removed
        for sequence in [number for number in self.pending if number <= applied.sequence]:
            line = self.pending.pop(sequence)
            del self.changes[sequence]
            first_failed = applied.failed_since.get(line.document_id)
            has_failed = first_failed is not None and sequence >= first_failed
            if has_failed:
                self.replaced_bytes += line.size
                continue
            replaced_line = self.latest.get(line.document_id)
            if replaced_line is not None:
                self.replaced_bytes += replaced_line.size
            self.latest[line.document_id] = line

    @property
    def removable_bytes(self) -> int:
        """Upper limit on the bytes that compaction can remove: replaced lines and all deletions."""
        deletions = (line for line in self.latest.values() if line.is_deletion)
        return self.replaced_bytes + _total_bytes(deletions)

    def needless_deletions(self, collection_ids: Container[str] | None) -> dict[str, _Line]:
        """Return id -> line of the deletions that hide no document of the collection.

        Args:
            collection_ids: ids of the documents of the collection that was indexed first; ``None``
                if they are unknown, so that every deletion may hide one.
        """
        if collection_ids is None:
            return {}
        return {
            document_id: line
            for document_id, line in self.latest.items()
            if line.is_deletion and document_id not in collection_ids
        }

    def latest_in(
        self,
        generation: str | None,
        publication: Publication | None,
    ) -> dict[str, _Line]:
        """Return document id -> line of the last change that a generation of the index has.

        A generation is a committed state of the index. It may already have the segment that is
        being added, whose changes are still pending in the log.

        Args:
            generation: id of the generation; ``None`` for the one before that segment.
            publication: record of the last segment that was added to the index; ``None`` if none
                was.
        """
        latest = dict(self.latest)
        segment = self.applied.writing
        if segment is None or generation is None:
            return latest
        last_sequence = segment.last_change_in(generation, publication)
        for line in self.pending.values():
            is_in_index = line.sequence <= last_sequence and line.document_id not in segment.failed
            if is_in_index:
                latest[line.document_id] = line
        return latest


class DocumentLog:
    """Log of the documents that were put or deleted; safe to use from several threads.

    Attributes:
        folder: the folder of the log.
    """

    def __init__(self, index_path: Path) -> None:
        """Read the log of an index, if there is one.

        Args:
            index_path: the folder of the index.

        Raises:
            DataError: if the log is damaged.
        """
        self._index = index_path
        self.folder = documents_folder(index_path)
        self._path = self.folder / _LOG
        self._contents = _LogContents()
        self._thread_lock = threading.RLock()  # among the threads of this process
        self._folder_lock: FileLock | None = None  # among processes; None if this one only reads
        self._child_lock: IO[bytes] | None = None  # the same, also held by child processes
        self.refresh()

    @property
    def applied(self) -> int:
        """Sequence number up to which the index has all changes."""
        return self._contents.applied.sequence

    @property
    def last(self) -> int:
        """Sequence number of the last change."""
        return self._contents.last

    @property
    def failed(self) -> Mapping[str, str]:
        """Id -> reason, for documents that could not be encoded."""
        return self._contents.applied.failed

    @property
    def n_bytes(self) -> int:
        """Size of the log in bytes."""
        return self._contents.size

    @property
    def is_locked(self) -> bool:
        """Whether this process writes the log."""
        return self._folder_lock is not None

    @property
    def n_pending(self) -> int:
        """Number of changes that the index does not have."""
        return len(self._contents.pending)

    @property
    def inherited_descriptors(self) -> tuple[int, ...]:
        """File descriptors for a child process that changes the index.

        While the child lives, no other process can lock the log, even if this process was killed.
        Otherwise the child could commit old changes after newer ones.
        """
        return () if self._child_lock is None else (self._child_lock.fileno(),)

    def lock(self) -> None:
        """Lock the log, so that only this process writes it until :meth:`unlock`.

        A line that a killed process has left incomplete is removed. It was not acknowledged.

        Raises:
            InUseError: if another process writes the log.
            DataError: if lines that this process has read were removed.
            OSError: if the folder cannot be written.
        """
        with self._thread_lock:
            if self._folder_lock is not None:
                return
            is_new = not self.folder.exists()
            folder_lock = lock_folder(self.folder, reentrant=False)
            child_lock = None
            try:
                child_lock = _lock_inheritable(self.folder / _CHILD_LOCK)
                if is_new:
                    sync(self.folder.parent)
                self.refresh()
                n_bytes = self._contents.size  # of complete lines
                if n_bytes and not self._path.exists():
                    raise DataError(self._replaced_message())
                with self._path.open("ab") as file:  # creates a file that is missing
                    file.truncate(n_bytes)
                sync(self.folder)  # the file may be new
                self.refresh()  # opens a new file
            except BaseException:
                folder_lock.release()
                if child_lock is not None:
                    child_lock.close()
                raise
            self._folder_lock = folder_lock
            self._child_lock = child_lock

    def _replaced_message(self) -> str:
        """Describe that another log has taken the place of the one that was read."""
        return (
            f"{self._path}: expected the changes that this process has read, up to number "
            f"{self.last}, but the log was removed or replaced meanwhile. Restart the server."
        )

    def unlock(self) -> None:
        """Let another process write the log."""
        with self._thread_lock:
            if self._folder_lock is not None:
                self._folder_lock.release()
                self._folder_lock = None
            if self._child_lock is not None:
                self._child_lock.close()
                self._child_lock = None

    def refresh(self) -> None:
        """Read the changes that another process has written since the last call.

        The other process may replace the file of the log while it is read. It is then read again.

        Raises:
            DataError: if the log is damaged, or if another log has taken its place.
        """
        with self._thread_lock:
            while self._path.exists():
                contents = self._contents
                file = contents.file
                if file is None or not file.is_current():
                    file = _LogFile(self._path)
                    contents = _LogContents(file)
                # The number of applied changes is read before the lines: a writer appends lines
                # first, so all of these changes are among the lines that are read now.
                contents.applied = _AppliedChanges.read(self.folder / _APPLIED)
                self._read_new_lines(file, contents)
                contents.move_applied_to_latest()
                if not file.is_current():
                    continue  # it was replaced while it was read, and may lack lines
                if contents.last < self._contents.last:
                    raise DataError(self._replaced_message())
                self._contents = contents
                return

    def _read_new_lines(self, file: _LogFile, contents: _LogContents) -> None:
        """Read the complete lines that were added to the log since the last call.

        Args:
            file: the open file of the log.
            contents: the changes that were read from this file, to which the new ones are added.

        Raises:
            DataError: if a line is damaged.
        """
        for line in file.lines_from(contents.size):
            try:
                content = json.loads(line)
                change = Change.from_json(content)
                sequence = int(content["sequence"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self._path}: expected a change at byte {contents.size}, got {line[:80]!r} "
                    f"({error}). {_REMEDY}",
                ) from error
            contents.add(sequence, change, len(line))

    def append(self, changes: Sequence[Change]) -> int:
        """Write changes to the disk; the log must be locked.

        If writing fails, none of the changes remains.

        Args:
            changes: the changes of a request.

        Returns:
            The sequence number of the last change.

        Raises:
            DiskFullError: if the disk or the quota is full.
            OSError: if the file cannot be written.
            DataError: if the log is damaged, or if another log has taken its place.
        """
        with self._thread_lock:
            self.refresh()  # a compaction may have failed after it had replaced the file
            contents = self._contents
            first_sequence = contents.last + 1
            lines = [
                json_line(change.to_json(sequence)).encode()
                for sequence, change in enumerate(changes, first_sequence)
            ]
            with naming_full_disk(self._path), self._path.open("ab", buffering=0) as file:
                try:
                    _write_completely(file.fileno(), b"".join(lines))
                    os.fsync(file.fileno())
                except BaseException:
                    file.truncate(contents.size)
                    raise
            changes_and_lines = zip(changes, lines, strict=True)
            for sequence, (change, line) in enumerate(changes_and_lines, first_sequence):
                contents.add(sequence, change, len(line))
            return contents.last

    def pending(self, max_changes: int) -> dict[int, Change]:
        """Return the first changes that the index does not have, by sequence number.

        Args:
            max_changes: largest number of changes.
        """
        with self._thread_lock:
            changes = self._contents.changes
            return {sequence: changes[sequence] for sequence in list(changes)[:max_changes]}

    def mark_writing(self, sequence: int, failed: Collection[str], generation: str) -> None:
        """Record that pending changes are being added to the index; the log must be locked.

        The file ``published.json`` (:class:`Publication`) says later whether a generation, a
        committed state of the index, has these changes.

        Args:
            sequence: sequence number of the last of the changes.
            failed: ids of documents that could not be encoded, and are not added.
            generation: id of the current generation of the index.
        """
        with self._thread_lock:
            applied = self._contents.applied
            sequence_before = applied.sequence
            earlier_segment = applied.writing
            if earlier_segment is not None:  # an attempt failed, or its process was killed
                publication = Publication.read(self._index)
                sequence_before = earlier_segment.last_change_in(generation, publication)
            segment = _UnfinishedSegment(sequence, list(failed), sequence_before)
            self._write_applied(replace(applied, writing=segment))

    def mark_applied(self, sequence: int, failed: Mapping[str, str]) -> None:
        """Record that the index has all changes up to a sequence number; the log must be locked.

        Args:
            sequence: sequence number of the last of these changes.
            failed: id -> reason, for documents that could not be encoded. The index still has their
                earlier version; it has none if there was none, or it was deleted.
        """
        with self._thread_lock:
            contents = self._contents
            reasons = dict(contents.applied.failed)
            failed_since = dict(contents.applied.failed_since)
            for line in contents.pending.values():
                if line.sequence > sequence:
                    continue
                if line.document_id in failed and not line.is_deletion:
                    failed_since.setdefault(line.document_id, line.sequence)
                else:  # an earlier failure does not count if the document was put again or deleted
                    reasons.pop(line.document_id, None)
                    failed_since.pop(line.document_id, None)
            reasons.update(failed)
            self._write_applied(_AppliedChanges(sequence, reasons, failed_since))
            contents.move_applied_to_latest()

    def _write_applied(self, applied: _AppliedChanges) -> None:
        """Write to the disk which changes the index has."""
        applied.write(self.folder / _APPLIED)
        self._contents.applied = applied

    def compact(
        self,
        collection_ids: Container[str] | None = None,
        *,
        min_replaced_bytes: int = _MIN_REPLACED_BYTES,
    ) -> bool:
        """Remove lines without effect, if they are many; the log must be locked.

        Lines without effect are those that later changes have replaced, and deletions of documents
        that the collection does not have.

        The new file replaces the old one atomically. If the process is killed, one of the two files
        is complete.

        Args:
            collection_ids: ids of the documents of the collection; ``None`` if they are unknown, so
                that all deletions remain.
            min_replaced_bytes: number of bytes of removed lines from which on the log is
                rewritten, if they are also more than half of all bytes.

        Returns:
            Whether the log was rewritten.

        Raises:
            DiskFullError: if the disk or the quota is full. The log is not changed then.
            OSError: if the file cannot be written.
            DataError: if the log is damaged, or if another log has taken its place.
        """
        with self._thread_lock:
            self.refresh()  # an earlier compaction may have failed after it had replaced the file
            contents = self._contents
            min_removed_bytes = max(min_replaced_bytes, contents.size / 2)
            # Looking up ids in the collection takes time: do it only if enough could be removed.
            if contents.file is None or contents.removable_bytes < min_removed_bytes:
                return False
            needless_deletions = contents.needless_deletions(collection_ids)
            n_removed_bytes = contents.replaced_bytes + _total_bytes(needless_deletions.values())
            if n_removed_bytes < min_removed_bytes:
                return False
            latest = [
                line
                for document_id, line in contents.latest.items()
                if document_id not in needless_deletions
            ]
            lines = sorted([*latest, *contents.pending.values()])  # by sequence number
            with atomic_file(self._path, durable=True) as temporary, temporary.open("wb") as file:
                for line in lines:
                    file.write(contents.file.read_bytes(line))
            compacted = _LogContents(
                file=_LogFile(self._path),
                last=contents.last,
                applied=contents.applied,
                changes=contents.changes,
            )
            offset = 0
            for line in lines:
                moved_line = line._replace(offset=offset)
                offset += line.size
                if line.sequence in contents.pending:
                    compacted.pending[line.sequence] = moved_line
                else:
                    compacted.latest[line.document_id] = moved_line
            compacted.size = offset
            self._contents = compacted
            return True

    def documents(
        self,
        base: Mapping[str, Document],
        generation: str | None = None,
    ) -> Mapping[str, Document]:
        """Return the documents of a collection, updated by the changes that the index has.

        Changes that the index does not have yet are left out, so that the text of a document is
        always the one whose vector is searched.

        Args:
            base: documents of the collection.
            generation: id of the generation (committed state) of the index that is searched, which
                must still be the current one after this call. ``None`` if no process is adding
                documents to the index.
        """
        with self._thread_lock:
            # `published.json`, which names only the last segment, is read before the log. In the
            # opposite order, it could name a segment that began in between, and so would not say
            # that the index has the segment that the log calls unfinished.
            publication = Publication.read(self._index)
            self.refresh()
            contents = self._contents
            latest = contents.latest_in(generation, publication)
            if contents.file is None or not latest:
                return base
            deleted = {name for name, line in latest.items() if line.is_deletion}
            puts = {name: line for name, line in latest.items() if not line.is_deletion}
        return LoggedDocuments(base, contents.file, puts, deleted)


class LoggedDocuments(Mapping[str, Document]):
    """Documents of a collection, updated by a log whose documents are read on access.

    Attributes:
        base: documents of the collection.
    """

    def __init__(
        self,
        base: Mapping[str, Document],
        file: _LogFile,
        puts: Mapping[str, _Line],
        deleted: set[str],
    ) -> None:
        """Combine two sources of documents.

        Args:
            base: documents of the collection.
            file: the open file of the log.
            puts: id -> the line that puts the document, without deleted documents.
            deleted: ids of documents that the index does not have any more.
        """
        self.base = base
        self._file = file
        self._puts = puts
        self._deleted = deleted

    def __getitem__(self, document_id: str) -> Document:
        """Return a document, from the log if it is there."""
        if document_id in self._deleted:
            raise KeyError(document_id)
        line = self._puts.get(document_id)
        if line is None:
            return self.base[document_id]
        change = self._file.read(line)
        if change.document is None:
            raise KeyError(document_id)
        return change.document

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids: those of the collection, then those that are only in the log."""
        for document_id in self.base:
            if document_id not in self._deleted:
                yield document_id
        for document_id in self._puts:
            if document_id not in self.base:
                yield document_id

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        """Return whether there are documents, without counting them, for every search."""
        return bool(self._puts) or bool(self.base)


def _total_bytes(lines: Iterable[_Line]) -> int:
    """Return the number of bytes of some lines."""
    return sum(line.size for line in lines)


def _lock_inheritable(path: Path) -> IO[bytes] | None:
    """Lock a file, until this process and all children that have inherited it have closed it.

    Args:
        path: the file, which is created if it is missing.

    Returns:
        The open file; ``None`` on Windows, which has no such locks.

    Raises:
        InUseError: if another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:
        return None
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InUseError(
            f"{path.parent}: another process is still changing the index. Wait until it ends."
        ) from None
    return file


def _write_completely(descriptor: int, content: bytes) -> None:
    """Write all bytes to a file; the system may write fewer bytes per call."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
