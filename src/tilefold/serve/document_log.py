"""Durable log of the documents that were put or deleted over HTTP, next to the folder of an index.

The log of ``INDEX`` is the folder ``INDEX.documents``. Its file ``log.jsonl`` has a line for each
document: ``{"sequence": 7, "put": {"_id", "title", "text", "metadata"}}`` or ``{"sequence": 8,
"delete": ID}``. A request is acknowledged once its lines are on the disk. The file
``applied.json`` has the sequence number up to which the index has all changes. After a crash the
later lines are applied again, with the same result.

One process writes the log, and any number of processes read it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from tilefold._internal.files import InUseError, lock_folder, naming_full_disk, sync
from tilefold.retrieval.common.files import json_line, read_json_object, write_json_object
from tilefold.retrieval.data.collection import Document
from tilefold.retrieval.errors import DataError

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = ["Change", "DocumentLog", "LoggedDocuments"]

_LOG = "log.jsonl"
_APPLIED = "applied.json"
_CHILD_LOCK = ".child.lock"
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
    """Position of the last line that puts a document.

    Attributes:
        offset: position of the line in bytes.
        size: length of the line in bytes.
    """

    offset: int
    size: int


class DocumentLog:
    """Log of the documents that were put or deleted; safe to use from several threads.

    Attributes:
        folder: the folder of the log.
        applied: sequence number up to which the index has all changes.
        last: sequence number of the last change.
        failed: id -> reason, for documents that could not be encoded.
    """

    def __init__(self, index_path: Path) -> None:
        """Read the log of an index, if there is one.

        Args:
            index_path: the folder of the index.

        Raises:
            DataError: if the log is damaged.
        """
        index_path = index_path.absolute()  # "." has no name
        self.folder = index_path.with_name(f"{index_path.name}.documents")
        self.applied = 0
        self.last = 0
        self.failed: dict[str, str] = {}
        self._path = self.folder / _LOG
        self._size = 0  # number of bytes that were read; complete lines only
        self._puts: dict[str, _Line] = {}  # id -> the last line that puts the document
        # id -> sequence number of the first change that deletes it after its last line in _puts
        self._deletions: dict[str, int] = {}
        self._pending: dict[int, Change] = {}  # by sequence number, ascending
        self._guard = threading.RLock()
        self._lock: FileLock | None = None
        self._child_lock: IO[bytes] | None = None
        self.refresh()

    @property
    def is_locked(self) -> bool:
        """Whether this process writes the log."""
        return self._lock is not None

    @property
    def n_pending(self) -> int:
        """Number of changes that the index does not have."""
        return len(self._pending)

    @property
    def inherited_descriptors(self) -> tuple[int, ...]:
        """File descriptors for a child process that changes the index.

        While the child lives, no other process can lock the log, even if this process was killed.
        Otherwise the child could commit old changes after newer ones.
        """
        return () if self._child_lock is None else (self._child_lock.fileno(),)

    def lock(self) -> None:
        """Become the process that writes the log; it stays so until :meth:`unlock`.

        A line that a killed process has left incomplete is removed. It was not acknowledged.

        Raises:
            InUseError: if another process writes the log.
            DataError: if lines that this process has read were removed.
            OSError: if the folder cannot be written.
        """
        with self._guard:
            if self._lock is not None:
                return
            is_new = not self.folder.exists()
            lock = lock_folder(self.folder, reentrant=False)
            child_lock = None
            try:
                child_lock = _lock_inheritable(self.folder / _CHILD_LOCK)
                if is_new:
                    sync(self.folder.parent)
                self.refresh()
                with self._path.open("ab") as file:
                    self._check_lines_remain(file)
                    file.truncate(self._size)
                sync(self.folder)  # the file may be new
            except BaseException:
                lock.release()
                if child_lock is not None:
                    child_lock.close()
                raise
            self._lock = lock
            self._child_lock = child_lock

    def _check_lines_remain(self, file: IO[bytes]) -> None:
        """Check that a file has all lines that this process has read.

        Args:
            file: the open file of the log.

        Raises:
            DataError: if the file is shorter, because the log was removed or replaced meanwhile.
        """
        size = os.fstat(file.fileno()).st_size
        if size < self._size:
            raise DataError(
                f"{self._path}: expected at least {self._size} bytes, which this process has read, "
                f"got {size}: the log was removed or replaced meanwhile. Restart the server.",
            )

    def unlock(self) -> None:
        """Let another process write the log."""
        with self._guard:
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            if self._child_lock is not None:
                self._child_lock.close()
                self._child_lock = None

    def refresh(self) -> None:
        """Read what another process has written since."""
        with self._guard:
            self._read_applied()
            if self._path.exists():
                self._read_new_lines()
            for sequence in [number for number in self._pending if number <= self.applied]:
                del self._pending[sequence]

    def _read_applied(self) -> None:
        """Read how far the index has the changes."""
        path = self.folder / _APPLIED
        if not path.exists():
            return
        content = read_json_object(path, _REMEDY)
        self.applied = int(content["sequence"])
        self.failed = dict(content["failed"])

    def _read_new_lines(self) -> None:
        """Read the complete lines that were added to the file.

        Raises:
            DataError: if a line is damaged.
        """
        with self._path.open("rb") as file:
            file.seek(self._size)
            for line in file:
                if not line.endswith(b"\n"):  # incomplete: it is being written, or was never
                    break
                try:
                    content = json.loads(line)
                    change = Change.from_json(content)
                    sequence = int(content["sequence"])
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(
                        f"{self._path}: expected a change at byte {self._size}, got {line[:80]!r} "
                        f"({error}). {_REMEDY}",
                    ) from error
                self._add(sequence, change, len(line))

    def _add(self, sequence: int, change: Change, size: int) -> None:
        """Register a change whose line is in the file.

        Args:
            sequence: sequence number of the change.
            change: the change.
            size: length of the line in bytes.
        """
        if change.document is None:
            self._deletions.setdefault(change.document_id, sequence)
        else:
            self._puts[change.document_id] = _Line(self._size, size)
            self._deletions.pop(change.document_id, None)
        self._size += size
        self.last = sequence
        if sequence > self.applied:
            self._pending[sequence] = change

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
        """
        with self._guard:
            first = self.last + 1
            lines = [
                json_line(change.to_json(sequence)).encode()
                for sequence, change in enumerate(changes, first)
            ]
            with naming_full_disk(self._path), self._path.open("ab", buffering=0) as file:
                try:
                    _write_completely(file.fileno(), b"".join(lines))
                    os.fsync(file.fileno())
                except BaseException:
                    file.truncate(self._size)
                    raise
            for sequence, (change, line) in enumerate(zip(changes, lines, strict=True), first):
                self._add(sequence, change, len(line))
            return self.last

    def pending(self, max_changes: int) -> dict[int, Change]:
        """Return the first changes that the index does not have, by sequence number.

        Args:
            max_changes: largest number of changes.
        """
        with self._guard:
            sequences = list(self._pending)[:max_changes]
            return {sequence: self._pending[sequence] for sequence in sequences}

    def mark_applied(self, sequence: int, failed: Mapping[str, str]) -> None:
        """Record that the index has all changes up to one.

        Args:
            sequence: sequence number of the change.
            failed: id -> reason, for documents that could not be encoded and are not in the index.
        """
        with self._guard:
            applied_numbers = [number for number in self._pending if number <= sequence]
            failures = dict(self.failed)
            for number in applied_numbers:
                # A document that was put again, or was deleted, has not failed any more.
                failures.pop(self._pending[number].document_id, None)
            failures.update(failed)
            write_json_object(
                self.folder / _APPLIED,
                {"sequence": sequence, "failed": failures},
                durable=True,
            )
            self.applied = sequence
            self.failed = failures
            for number in applied_numbers:
                del self._pending[number]

    def documents(self, base: Mapping[str, Document]) -> Mapping[str, Document]:
        """Return the documents of a collection with those of the log.

        A document is hidden once the index does not have it any more. While its deletion is
        pending, it is the one that was put last.

        Args:
            base: documents of the collection.
        """
        with self._guard:
            self.refresh()
            if not self._puts and not self._deletions:
                return base
            deleted = {
                document_id
                for document_id, sequence in self._deletions.items()
                if sequence <= self.applied
            }
            puts = {name: line for name, line in self._puts.items() if name not in deleted}
        return LoggedDocuments(base, self._path, puts, deleted)


class LoggedDocuments(Mapping[str, Document]):
    """Documents of a collection with those of a log, which are read when they are used.

    Attributes:
        base: documents of the collection.
    """

    def __init__(
        self,
        base: Mapping[str, Document],
        path: Path,
        puts: Mapping[str, _Line],
        deleted: set[str],
    ) -> None:
        """Combine two sources of documents.

        Args:
            base: documents of the collection.
            path: the file of the log.
            puts: id -> the last line that puts the document, without deleted documents.
            deleted: ids of documents that the index does not have any more.
        """
        self.base = base
        self._path = path
        self._puts = puts
        self._deleted = deleted

    def __getitem__(self, document_id: str) -> Document:
        """Return a document, from the log if it is there."""
        if document_id in self._deleted:
            raise KeyError(document_id)
        line = self._puts.get(document_id)
        if line is None:
            return self.base[document_id]
        with self._path.open("rb") as file:
            file.seek(line.offset)
            change = Change.from_json(json.loads(file.read(line.size)))
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
        """Return whether there are documents, without counting them: each search asks."""
        return bool(self._puts) or bool(self.base)


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
        raise InUseError(f"{path.parent}: another process is still changing the index.") from None
    return file


def _write_completely(descriptor: int, content: bytes) -> None:
    """Write all bytes to a file; the system may write fewer bytes per call."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
