"""Log of the changes of an index while it moves to another model.

A migration keeps a second index, the standby, in the folder ``NAME.migration`` next to the index
``NAME``. Every update of the index is recorded there with the texts of its documents, so that the
migration can encode them with the other model, too.

An entry is written before the update is published, as pending. Afterwards it is marked as
committed. If the process is killed in between, the generation of the index tells whether the update
was published.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tilefold._internal.files import naming_full_disk
from tilefold.retrieval.common.files import read_json_object, write_json_object
from tilefold.retrieval.data.documents import Document
from tilefold.retrieval.data.metadata import kept_fields
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.generations import read_generation

__all__ = ["MIGRATION_NAME", "Change", "ChangeLog", "check_texts_only", "migration_folder"]

# Name of the file that describes a migration. A folder without it is not a migration.
MIGRATION_NAME = "migration.json"
_SUFFIX = ".migration"
_CHANGES = "changes"
_COMMITTED = ".json"
_PENDING = ".pending"
_REMEDY = "Discard the migration (tilefold migrate --discard) and start it again."


def migration_folder(index: Path) -> Path:
    """Return the folder of the migration of an index, which need not exist.

    Args:
        index: the folder of the index, or a symbolic link to it.
    """
    folder = index.resolve()
    return folder.with_name(folder.name + _SUFFIX)


@dataclass(frozen=True)
class Change:
    """The documents that one or more updates first delete from an index, and then add to it.

    Attributes:
        deleted: ids of documents that were deleted.
        documents: id -> document, for documents that were added or replaced.
    """

    deleted: set[str] = field(default_factory=set)
    documents: dict[str, Document] = field(default_factory=dict)

    def followed_by(self, later: Change, *, has_passages: bool) -> Change:
        """Return one change equivalent to this change, then `later`.

        Args:
            later: the change that follows.
            has_passages: whether the entries of the index are passages. Then `deleted` has ids of
                documents, or of single passages, such as ``"d1#2"``.
        """
        # A replaced document moves to the end, because an index appends the new version.
        replaced_or_deleted = later.deleted | later.documents.keys()
        documents = {
            document_id: document
            for document_id, document in self.documents.items()
            if document_id not in replaced_or_deleted
        }
        documents.update(later.documents)
        # A document that is added again has all of its passages, so none of them is deleted.
        deleted = {
            document_id
            for document_id in self.deleted
            if document_id not in later.documents
            and not (has_passages and document_id.rpartition("#")[0] in later.documents)
        }
        deleted.update(later.deleted - later.documents.keys())
        return Change(deleted, documents)


class ChangeLog:
    """Changes of an index that its standby, the index of another model, does not have yet.

    The caller holds the lock of the index (:func:`lock_path`), so that no update runs at the same
    time. Only :meth:`read` and :meth:`remove` need no lock: they use committed entries, which
    updates do not change.

    Attributes:
        index: the folder of the index.
        folder: the folder of the entries.
    """

    def __init__(self, index: Path) -> None:
        self.index = index
        self._migration = migration_folder(index)
        self.folder = self._migration / _CHANGES

    @property
    def is_active(self) -> bool:
        """Whether the index has a migration, which needs the changes."""
        return (self._migration / MIGRATION_NAME).is_file()

    @contextmanager
    def recording(
        self,
        deleted: Collection[str],
        documents: Mapping[str, Document],
    ) -> Iterator[None]:
        """Record an update of the index, which is committed within the context.

        Nothing is recorded if the index has no migration, or if the update is not committed.

        Args:
            deleted: ids of the documents that the update deletes.
            documents: id -> document that the update adds or replaces.

        Raises:
            DataError: if a document is the image of a page.
            DiskFullError: if the entry cannot be written; the update must not be committed then.
        """
        if not self.is_active:
            yield
            return
        check_texts_only(documents)
        self.settle()  # an update that was interrupted may have left a pending entry
        numbers = [int(file.stem) for file in self.committed()]
        pending = self.folder / f"{max(numbers, default=0) + 1:06d}{_PENDING}"
        entry = {
            "generation_before": read_generation(self.index).id,
            "deleted": sorted(deleted),
            "documents": [_to_dict(document) for document in documents.values()],
        }
        with naming_full_disk(self.folder):
            self.folder.mkdir(exist_ok=True)
            write_json_object(pending, entry, durable=True)
        try:
            yield
        finally:
            self.settle()

    def settle(self) -> None:
        """Commit a pending entry of the log if its update was committed; otherwise remove it.

        An update commits another generation (state) of the index, which tells the two apart.
        """
        if not self.folder.is_dir():
            return
        for pending in sorted(self.folder.glob(f"*{_PENDING}")):  # at most one
            entry = read_json_object(pending, _REMEDY)
            if read_generation(self.index).id == entry["generation_before"]:
                pending.unlink()
            else:
                pending.replace(pending.with_suffix(_COMMITTED))

    def committed(self) -> list[Path]:
        """Return the files of the committed entries, the earliest first."""
        if not self.folder.is_dir():
            return []
        return sorted(self.folder.glob(f"*{_COMMITTED}"))

    @staticmethod
    def read(entries: Collection[Path], *, has_passages: bool) -> Change:
        """Return one change that is equivalent to all changes of committed entries.

        Args:
            entries: files of :meth:`committed`, the earliest first.
            has_passages: whether the entries of the index are passages.

        Raises:
            DataError: if an entry is damaged.
        """
        change = Change()
        for file in entries:
            values = read_json_object(file, _REMEDY)
            documents = {item["id"]: Document(**item) for item in values["documents"]}
            later = Change(set(values["deleted"]), documents)
            change = change.followed_by(later, has_passages=has_passages)
        return change

    @staticmethod
    def remove(entries: Collection[Path]) -> None:
        """Remove entries whose changes the standby has."""
        for file in entries:
            file.unlink()


def check_texts_only(documents: Mapping[str, Document]) -> None:
    """Raise ``DataError`` if a document is the image of a page, which a migration does not encode.

    Args:
        documents: document id -> document.
    """
    for document_id, document in documents.items():
        if document.page is not None:
            raise DataError(
                f"documents: expected texts, got the page image {document_id!r}. Page images are "
                "not migrated: encode them with the new model, build another index, and start a "
                "server with it.",
            )


def _to_dict(document: Document) -> dict[str, object]:
    """Return a document as a JSON object, with the metadata fields that an index stores."""
    return {
        "id": document.id,
        "title": document.title,
        "text": document.text,
        "metadata": kept_fields(document.metadata),
    }
