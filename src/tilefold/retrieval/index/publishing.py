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
    """Return the folder of the documents of an index that were put over HTTP; it may be missing.

    Args:
        index: the folder of the index.
    """
    index = index.absolute()  # "." has no name
    return index.with_name(f"{index.name}.documents")


@dataclass(frozen=True)
class Publication:
    """The last addition of logged documents to an index, or the attempt at it.

    Attributes:
        sequence: sequence number of the last change in the log that it adds.
        generation_before: id of the generation of the index before.
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
        """Return whether a generation of the index has the changes.

        Args:
            generation: id of a generation that was current when this object was read.
        """
        if self.succeeded is None:  # nothing else has changed the index since
            return generation != self.generation_before
        return self.succeeded and generation != self.generation_before


@contextmanager
def publishing(index: Path, log_sequence: int | None = None) -> Iterator[None]:
    """Record within the context, in which an index is changed, whether it has logged documents.

    The caller holds the lock of the index. The generation of the index changes within the context
    only.

    Args:
        index: the folder of the index.
        log_sequence: sequence number of the last change in the log that is added to the index;
            ``None`` if the change of the index is not one of the log.
    """
    _settle(index)
    if log_sequence is None:
        yield
        return
    Publication(log_sequence, read_generation(index).id).write(index)
    try:
        yield
    finally:
        _settle(index)


def _settle(index: Path) -> None:
    """Record the outcome of the last addition, if it is not known."""
    publication = Publication.read(index)
    if publication is None or publication.succeeded is not None:
        return
    try:
        succeeded = publication.is_in(read_generation(index).id)
    except (DataError, FileNotFoundError):
        # The index is damaged or was removed. The one that is built in its place has no changes.
        succeeded = False
    replace(publication, succeeded=succeeded).write(index)
