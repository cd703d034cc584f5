"""Which changes of a log of documents an index has, although other processes change it, too.

``tilefold serve`` logs the documents that are put or deleted over HTTP, in the folder
``INDEX.documents``, and adds them to the index ``INDEX``. A reader of the log must know whether the
generation of the index that it has opened includes the last addition. The file ``published.json``
says so. It is written while the index is locked: before the addition with the generation of the
index, and after it with the outcome. If the process is killed in between, the next process that
changes the index compares the generations and writes the outcome, before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tilefold.retrieval.common.files import read_json_object, write_json_object
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.generations import read_generation

__all__ = ["Publication", "documents_folder", "publishing"]

_FILE = "published.json"
_REMEDY = "Remove the file: the server adds the pending documents again."


def documents_folder(index: Path) -> Path:
    """Return the folder of the documents that were put into an index over HTTP; it may be missing.

    Args:
        index: the folder of the index.
    """
    index = index.absolute()  # "." has no name
    return index.with_name(f"{index.name}.documents")


@dataclass(frozen=True)
class Publication:
    """The last attempt to add the documents of a server's log to an index.

    Attributes:
        sequence: sequence number, in the log, of the last change that was added.
        generation_before: id of the generation (committed state) of the index before the addition.
        succeeded: whether the index has the changes; ``None`` until this is known.
    """

    sequence: int
    generation_before: str
    succeeded: bool | None = None

    @classmethod
    def read(cls, index: Path) -> Publication | None:
        """Read the last addition to an index; ``None`` if there was none.

        Args:
            index: the folder of the index.

        Raises:
            DataError: if the file is damaged.
        """
        file = documents_folder(index) / _FILE
        if not file.exists():
            return None
        content = read_json_object(file, _REMEDY)
        try:
            return cls(**content)
        except TypeError as error:
            raise DataError(
                f"{file}: expected the last addition to the index ({error}). {_REMEDY}",
            ) from error

    def write(self, index: Path) -> None:
        """Write the file durably.

        Args:
            index: the folder of the index.
        """
        write_json_object(documents_folder(index) / _FILE, asdict(self), durable=True)

    def is_in(self, generation: str) -> bool:
        """Return whether a generation (committed state) of the index has the added changes.

        Args:
            generation: id of a generation that was current when this object was read.
        """
        # While the outcome is unknown, only the addition can have committed another generation.
        if self.succeeded is None:
            return generation != self.generation_before
        return self.succeeded and generation != self.generation_before


@contextmanager
def publishing(index: Path, log_sequence: int | None = None) -> Iterator[None]:
    """Change an index within the context, and record whether the change has succeeded.

    A server logs the documents that it adds. The record tells it later whether the index has them.
    The index has them if its generation, which is its committed state, is another one after the
    context. The caller holds the lock of the index, so that no other process commits a generation.

    Args:
        index: the folder of the index.
        log_sequence: sequence number in the server's log of the last change that is added to the
            index; ``None`` if the change does not come from the log, so that none is recorded.
    """
    _record_outcome(index)  # of an addition that was interrupted earlier
    if log_sequence is None:
        yield
        return
    Publication(log_sequence, read_generation(index).id).write(index)
    try:
        yield
    finally:
        _record_outcome(index)


def _record_outcome(index: Path) -> None:
    """Record whether the last addition of logged documents has succeeded, if it is not recorded."""
    publication = Publication.read(index)
    if publication is None or publication.succeeded is not None:
        return
    try:
        succeeded = publication.is_in(read_generation(index).id)
    except (DataError, FileNotFoundError):
        # The index is damaged or was removed. An index that replaces it lacks the documents.
        succeeded = False
    replace(publication, succeeded=succeeded).write(index)
