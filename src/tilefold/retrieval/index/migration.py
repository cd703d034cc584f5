"""Migration of an index to another model, while the index is searched and updated.

The migration of an index ``NAME`` is in the folder ``NAME.migration`` next to it:

* ``migration.json``: the models, the collection and the options of encoding,
* ``base``: the ids of the documents that the index had at the start, and a hash of each text,
* ``vectors``: these documents, encoded with the new model; encoding resumes after a kill,
* ``changes``: a log of the updates of the index since the start, see
  :mod:`tilefold.retrieval.index.changes`,
* ``index``: the standby. This is the new index, and after the cut-over the old one.

The cut-over and the rollback are the same step: the index and the standby are exchanged by one
atomic rename. Nothing else changes the index that is searched. The fingerprint in the manifest of
the index tells whether it is the new one, so that no other record can contradict it.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilefold._internal.files import (
    InUseError,
    exchange,
    lock_path,
    naming_full_disk,
    scratch_folder,
    sync,
    sync_tree,
)
from tilefold.retrieval.common.files import Json, read_json_object, write_json_object
from tilefold.retrieval.common.provenance import Provenance, texts_digest
from tilefold.retrieval.data.documents import Document
from tilefold.retrieval.data.passages import Passages
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import LATE, build_index
from tilefold.retrieval.index.changes import (
    MIGRATION_NAME,
    Change,
    ChangeLog,
    check_texts_only,
    migration_folder,
)
from tilefold.retrieval.index.checking import check_index
from tilefold.retrieval.index.merging import GROWING, merge_segments, update_index
from tilefold.retrieval.index.protocol import (
    MANIFEST_NAME,
    StoredIds,
    read_array,
    read_description,
    save_ids,
)
from tilefold.retrieval.index.publishing import publishing
from tilefold.retrieval.index.segments import PartList
from tilefold.retrieval.vectors.sparse import SparseVectors

__all__ = [
    "DocumentEncoder",
    "Migration",
    "MigrationRecord",
    "check_is_migratable",
    "check_same_documents",
    "recorded_model",
]

_BASE = "base"
_TEXT_KEYS = "text_keys.npy"
_VECTORS = "vectors"
_CHANGED_VECTORS = "changed-vectors"
_STANDBY = "index"
_REMEDY = "Discard the migration (tilefold migrate --discard) and start it again."
# How long a migration waits for an update of the index, and the time between two attempts.
_LOCK_SECONDS = 60.0
_PAUSE_SECONDS = 0.05
# Rounds in which the change log is applied while updates of the index go on. At the cut-over, the
# changes that arrive during the last round are applied while updates wait.
_MAX_ROUNDS = 5
# Number of ids that an error lists.
_SHOWN_IDS = 5


class DocumentEncoder(Protocol):
    """A model that encodes the documents of a migration.

    It may be loaded when it is first used: a migration without anything to encode does not use it.
    """

    @property
    def fingerprint(self) -> str:
        """Digest of the model."""

    def encode(self, texts: Mapping[str, str], folder: Path) -> Any:
        """Encode texts into a folder, and return the vectors that are stored there.

        After an interruption, the same call resumes: stored vectors are not computed again.

        Args:
            texts: id -> text of documents or passages.
            folder: the folder of vectors.
        """


@dataclass(frozen=True)
class MigrationRecord:
    """Record that a migration writes at its start.

    Attributes:
        model: folder or name of the new model.
        model_fingerprint: digest of the new model.
        old_model: folder or name of the model that encoded the index; None if it is not known.
        old_model_fingerprint: digest of this model; None if the index does not record it.
        data: the collection from which the texts are read.
        n_documents: number of documents of the index at the start.
        texts_sha256: digest of the texts that are encoded.
        options: options of encoding, for the program that resumes the migration.
    """

    model: str
    model_fingerprint: str
    old_model: str | None
    old_model_fingerprint: str | None
    data: str
    n_documents: int
    texts_sha256: str
    options: Json = field(default_factory=dict)

    @classmethod
    def read(cls, index: Path) -> MigrationRecord | None:
        """Return the record of the migration of an index; None if it has no migration.

        Raises:
            DataError: if the record is damaged.
        """
        file = migration_folder(index) / MIGRATION_NAME
        if not file.is_file():
            return None
        values = read_json_object(file, _REMEDY)
        try:
            return cls(**values)
        except TypeError as error:
            raise DataError(f"{file}: expected a migration, got {error}. {_REMEDY}") from error


def recorded_model(index: Path) -> str | None:
    """Return the model that encoded an index, if a migration of the index has recorded it.

    Args:
        index: the folder of the index.

    Returns:
        The folder or the name of the model whose fingerprint is in the manifest of the index; None
        if the index has no migration, or its model was not recorded.

    Raises:
        DataError: if the migration or the index is damaged.
    """
    record = MigrationRecord.read(index)
    if record is None:
        return None
    fingerprint = Provenance.from_dict(read_description(index)).model_fingerprint
    if fingerprint == record.model_fingerprint:
        return record.model
    if fingerprint == record.old_model_fingerprint:
        return record.old_model
    return None


class Migration:
    """The migration of an index to another model.

    Attributes:
        index: the folder of the index that is searched.
        folder: the folder of the migration.
        standby: the folder of the other index.
        record: what was recorded at the start.
    """

    def __init__(self, index: Path, record: MigrationRecord) -> None:
        self.index = index.resolve()
        self.folder = migration_folder(index)
        self.standby = self.folder / _STANDBY
        self.record = record
        self._log = ChangeLog(self.index)

    @classmethod
    def open(cls, index: Path) -> Migration:
        """Open the migration of an index.

        Raises:
            FileNotFoundError: if the index has no migration.
        """
        record = MigrationRecord.read(index)
        if record is None:
            raise FileNotFoundError(
                f"{migration_folder(index)}: expected a migration of {index}, got none. Start one "
                f"with: tilefold migrate --index {index} --model MODEL --data DATA",
            )
        return cls(index, record)

    @classmethod
    def start(
        cls,
        index: Path,
        documents: Mapping[str, Document],
        encoder: DocumentEncoder,
        *,
        model: str,
        data: str,
        old_model: str | None = None,
        options: Json | None = None,
        absent: Collection[str] = (),
    ) -> Migration:
        """Create the folder of a migration. From then on, updates of the index are recorded.

        Args:
            index: the folder of an index of backend exact, seismic, dense or late.
            documents: document id -> document, exactly those of the index.
            encoder: the new model.
            model: folder or name of the new model.
            data: the collection of the documents.
            old_model: folder or name of the model that encoded the index, if it is known.
            options: options of encoding, which are recorded.
            absent: ids of documents that the index may lack, because they are not indexed yet, or
                because the old model cannot encode them. They are left out in that case.

        Raises:
            DataError: if the documents are not those of the index, or if the new model is the one
                that encoded the index.
            FileExistsError: if the index has a migration already.
            ValueError: if the backend has no segments.
        """
        folder = migration_folder(index)
        manifest = check_is_migratable(index)
        if manifest.get("model_fingerprint") == encoder.fingerprint:
            raise DataError(
                f"{index}: expected an index of another model, got one that this model has "
                "encoded. Pass another model.",
            )
        with cls._exclusively(index), _waiting_for_lock(index):
            if folder.exists():
                raise FileExistsError(
                    f"{folder}: expected no migration of {index}, got one. Resume it (tilefold "
                    f"migrate --index {index}), or discard it first (--discard).",
                )
            passages = _passages_of(manifest)
            not_indexed = set(absent) - _document_ids_of(index, passages)
            if not_indexed:
                documents = {
                    document_id: document
                    for document_id, document in documents.items()
                    if document_id not in not_indexed
                }
            check_same_documents(index, documents, data)
            record = MigrationRecord(
                model=model,
                model_fingerprint=encoder.fingerprint,
                old_model=old_model,
                old_model_fingerprint=manifest.get("model_fingerprint"),
                data=data,
                n_documents=len(documents),
                texts_sha256=texts_digest(_texts_of(documents, passages)),
                options=options or {},
            )
            with naming_full_disk(folder), scratch_folder(folder) as scratch:
                # The folder appears complete, so that a killed process leaves no half migration.
                complete_folder = scratch / "new"
                _write_start(complete_folder, record, documents)
                complete_folder.replace(folder)
        return cls(index, record)

    @property
    def is_cut_over(self) -> bool:
        """Whether the index that is searched is the one of the new model."""
        provenance = Provenance.from_dict(read_description(self.index))
        return bool(provenance.model_fingerprint == self.record.model_fingerprint)

    @property
    def is_built(self) -> bool:
        """Whether the standby, the index that is not searched, is written completely."""
        return (self.standby / MANIFEST_NAME).is_file()

    @property
    def unit(self) -> str:
        """Name of the texts with one vector each: ``"documents"`` or ``"passages"``."""
        has_passages = _passages_of(read_description(self.index)) is not None
        return "passages" if has_passages else "documents"

    def n_documents(self) -> int:
        """Return the number of documents or passages of the index that is searched."""
        return len(_ids_of(self.index))

    def n_changes(self) -> int:
        """Return how many updates of the index the standby (the other index) does not have yet."""
        with _waiting_for_lock(self.index):
            self._log.settle()  # an update that was interrupted is committed or dropped
            return len(self._log.committed())

    def build(
        self,
        documents: Mapping[str, Document],
        encoder: DocumentEncoder,
    ) -> None:
        """Encode the documents with the new model, and build the standby from their vectors.

        The standby gets the documents that the index had at the start. An interrupted call is
        resumed. Nothing is done if the standby exists.

        Args:
            documents: document id -> document, at least those that the index had at the start.
            encoder: the new model.

        Raises:
            DataError: if the model or the texts are not those of the start.
            InUseError: if another process works on this migration.
        """
        with self._exclusively(self.index):
            if self.is_built:
                return
            _check_encoder(encoder, self.record.model_fingerprint, "new")
            manifest = read_description(self.index)
            passages = _passages_of(manifest)
            base_documents = self._restore_base_documents(
                documents, has_passages=passages is not None
            )
            texts = _texts_of(base_documents, passages)
            if texts_digest(texts) != self.record.texts_sha256:
                # Some documents have changed since the start. Encoding may still be resumed,
                # because changed documents are encoded again with the change log.
                texts = _TextsWithOriginalDigest(texts, self.record.texts_sha256)
            vectors = encoder.encode(texts, self.folder / _VECTORS)
            self._build_standby(vectors, manifest, base_documents)

    def _restore_base_documents(
        self,
        documents: Mapping[str, Document],
        *,
        has_passages: bool,
    ) -> Mapping[str, Document]:
        """Return the documents that the index had when the migration started, in that order.

        A document that has changed since has its new text, and a deleted one is empty. Both are
        only placeholders: the updates in the change log, which are applied to the standby (the
        index of the new model) afterwards, replace or delete them.

        Args:
            documents: document id -> document; documents that the index did not have are ignored.
            has_passages: whether the entries of the index are passages.

        Raises:
            DataError: if a document differs without an update of the index in the change log. With
                passages, if any document differs, because its passages may be numbered differently.
        """
        ids = StoredIds.load(self.folder / _BASE, self.record.n_documents)
        keys = read_array(self.folder / _BASE / _TEXT_KEYS, np.uint64, len(ids))
        base_documents = {
            document_id: documents.get(document_id, Document(document_id, "", ""))
            for document_id in ids
        }
        is_changed = _hash_texts(base_documents) != keys
        is_changed |= np.array([document_id not in documents for document_id in ids], bool)
        changed_ids = {ids[position] for position in np.flatnonzero(is_changed).tolist()}
        if not changed_ids:
            # A collection with exactly these documents is returned itself: it may read them lazily.
            is_same_collection = list(documents) == list(ids)
            return documents if is_same_collection else base_documents
        with _waiting_for_lock(self.index):
            self._log.settle()  # an update that was interrupted is committed or dropped
            change = self._log.read(self._log.committed(), has_passages=has_passages)
        # The change log encodes an updated document again, but cannot renumber its passages.
        updated_ids = change.documents.keys() | change.deleted
        unusable_ids = changed_ids if has_passages else changed_ids - updated_ids
        if unusable_ids:
            raise DataError(
                f"{self.record.data}: expected the texts that the documents had when the migration "
                f"started, but {len(unusable_ids)} are missing or have changed"
                f"{_list_first_ids(sorted(unusable_ids))}. Give the collection of that time "
                "(--data), or discard the migration and start it again (--discard).",
            )
        return base_documents

    def _build_standby(
        self,
        vectors: Any,
        manifest: Json,
        documents: Mapping[str, Document],
    ) -> None:
        """Build an index of the new vectors, with the options and the metadata of the old one.

        Options are copied only if both indexes have the same backend.

        Args:
            vectors: the vectors of the documents that the index had when the migration started.
            manifest: the manifest of the index that is searched.
            documents: the documents of the vectors, with their metadata.
        """
        metadata = None
        if _has_metadata(self.index):
            metadata = {
                document_id: document.metadata
                for document_id, document in documents.items()
                if document.metadata
            }
        options = manifest["options"]
        if isinstance(vectors, SparseVectors):
            is_seismic = manifest["backend"] == "seismic"
            backend = "seismic" if is_seismic else "exact"
            seismic_options = options if is_seismic else {}
            index: Any = build_index(vectors, backend, metadata=metadata, **seismic_options)
            index.save(self.standby)
            return
        if vectors.manifest.layout == "tokens":
            from tilefold.retrieval.index.late import LateIndex

            is_late = manifest["backend"] == LATE
            LateIndex.build(
                vectors,
                self.standby,
                storage=options["storage"] if is_late else "int8",
                pool_factor=options["pool_factor"] if is_late else 1,
                metadata=metadata,
            )
            return
        from tilefold.retrieval.index.dense import DenseIndex

        DenseIndex.build(vectors, metadata=metadata).save(self.standby)

    def catch_up(self, encoder: DocumentEncoder | None) -> int:
        """Apply the logged updates of the index to the standby, and merge the standby's segments.

        The standby is the index of the migration that is not searched.

        Args:
            encoder: the model of the standby; None if there is nothing to encode.

        Returns:
            Number of documents that were added, replaced or deleted.

        Raises:
            DataError: if documents have to be encoded, and `encoder` is None or another model.
        """
        with self._exclusively(self.index):
            return self._replay_log_in_rounds(encoder)

    def _replay_log_in_rounds(self, encoder: DocumentEncoder | None) -> int:
        """Apply the logged updates to the standby, the index that is not searched.

        Further updates may be logged meanwhile, so this takes up to ``_MAX_ROUNDS`` rounds. The
        index is locked only while the log is read.

        Args:
            encoder: the model of the standby.

        Returns:
            Number of documents that were added, replaced or deleted.
        """
        n_changed = 0
        for _ in range(_MAX_ROUNDS):
            with _waiting_for_lock(self.index):
                self._log.settle()  # an update that was interrupted is committed or dropped
                entries = self._log.committed()
            if not entries:
                break
            n_changed += self._replay(entries, encoder)
        # An earlier call may have been killed before the merge.
        if PartList.read(self.standby).is_updated:
            merge_segments(self.standby)
        return n_changed

    def _replay(self, entries: list[Path], encoder: DocumentEncoder | None) -> int:
        """Apply logged changes to the standby (the index that is not searched), and unlog them.

        After an interruption, the same changes can be applied again.

        Args:
            entries: files of committed entries of the change log, the earliest first.
            encoder: the model of the standby.

        Returns:
            Number of documents that were added, replaced or deleted.
        """
        passages = _passages_of(read_description(self.standby))
        change = self._log.read(entries, has_passages=passages is not None)
        vectors = None
        metadata = None
        if change.documents:
            vectors = self._encode_change(change, passages, encoder)
            if _has_metadata(self.standby):
                metadata = {
                    document_id: item.metadata for document_id, item in change.documents.items()
                }
        # A document that the model cannot encode must not keep the vectors of its earlier text. It
        # is then missing, which _check_standby_is_complete reports.
        outdated = change.deleted | change.documents.keys()
        if outdated:
            update_index(self.standby, vectors, outdated, metadata=metadata)
        self._log.remove(entries)
        shutil.rmtree(self.folder / _CHANGED_VECTORS, ignore_errors=True)
        return len(change.documents) + len(change.deleted)

    def _encode_change(
        self,
        change: Change,
        passages: str | None,
        encoder: DocumentEncoder | None,
    ) -> Any:
        """Encode the documents of a change with the model of the standby.

        The standby is the index that is not searched: the new one, and after the cut-over the old.

        Args:
            change: the change.
            passages: how documents are divided into passages; None for whole documents.
            encoder: the model of the standby.
        """
        fingerprint = self.record.model_fingerprint
        name = "new"
        if self.is_cut_over:
            fingerprint = str(self.record.old_model_fingerprint)
            name = "old"
        if encoder is None:
            raise DataError(
                f"{self.index}: {len(change.documents)} documents were added or replaced, which "
                f"the {name} index does not have. Give the {name} model, which encodes them "
                f"({'--old-model' if name == 'old' else '--model'}).",
            )
        if name == "new" or self.record.old_model_fingerprint is not None:
            _check_encoder(encoder, fingerprint, name)
        folder = self.folder / _CHANGED_VECTORS
        # An interrupted call may have left the vectors of fewer changes.
        shutil.rmtree(folder, ignore_errors=True)
        texts = _texts_of(change.documents, passages)
        remaining_texts = texts
        # Single passages of a new document may have been deleted later.
        if not change.deleted.isdisjoint(texts):
            remaining_texts = {
                text_id: text for text_id, text in texts.items() if text_id not in change.deleted
            }
        return encoder.encode(remaining_texts, folder) if remaining_texts else None

    def exchange(self, encoder: DocumentEncoder | None = None) -> None:
        """Exchange the index and the standby by one atomic rename: the cut-over, or the rollback.

        All logged changes are applied to the standby before.

        Args:
            encoder: the model of the standby; None if there are no documents to encode.

        Raises:
            DataError: if the standby is damaged, or if it does not have the same documents.
            FileNotFoundError: if the standby was not built.
            OSError: if two folders cannot be exchanged in one step on this system.
        """
        with self._exclusively(self.index):
            if not self.is_built:
                raise FileNotFoundError(
                    f"{self.standby}: the new index is not built yet. Run tilefold migrate "
                    f"--index {self.index} until it is.",
                )
            self._replay_log_in_rounds(encoder)
            self._check_standby_is_intact()
            with _waiting_for_lock(self.index):
                self._log.settle()
                entries = self._log.committed()
                if entries:  # logged during the last round
                    self._replay(entries, encoder)
                self._check_standby_is_complete()
                sync_tree(self.standby)  # so that the rename survives a loss of power
                with publishing(self.index):
                    was_exchanged = exchange(self.standby, self.index)
                if not was_exchanged:
                    raise OSError(
                        f"{self.index}: could not be exchanged with {self.standby} in one step; "
                        "the index was not changed. This needs Linux, a file system with "
                        "renameat2 (such as ext4, xfs, btrfs or tmpfs), and a folder that is not a "
                        "mount point itself. Move the index to such a folder.",
                    )
                sync(self.index.parent)
                sync(self.folder)

    def _check_standby_is_intact(self) -> None:
        """Raise ``DataError`` if a file of the standby, which is to take over, is damaged."""
        check = check_index(self.standby)
        if not check.is_intact:
            raise DataError(
                f"{self.standby}: the index that should take over is damaged: {check.damage[0]} "
                "Discard the migration (--discard) and start it again. The index that is searched "
                "was not changed.",
            )

    def _check_standby_is_complete(self) -> None:
        """Raise ``DataError`` if the index and the standby have different documents or passages."""
        ids = _ids_of(self.index)
        standby_ids = _ids_of(self.standby)
        if ids == standby_ids:
            return
        missing = sorted(ids - standby_ids)
        surplus = sorted(standby_ids - ids)
        unit = self.unit
        raise DataError(
            f"{self.standby}: expected the {unit} of {self.index}; {len(missing)} are missing"
            f"{_list_first_ids(missing)}, and {len(surplus)} are too many"
            f"{_list_first_ids(surplus)}. The new model may have failed on {unit} (see "
            "vectors/manifest.json), or the index was built again meanwhile. Replace or delete "
            "the documents (tilefold index --update), or discard the migration (--discard). The "
            "index that is searched was not changed.",
        )

    def discard(self) -> None:
        """Remove the folder of the migration, with the standby. The index is not changed."""
        with (
            self._exclusively(self.index),
            _waiting_for_lock(self.index),
            scratch_folder(self.folder) as scratch,
        ):
            # After the rename, there is no migration. A killed process leaves a hidden folder,
            # which the next temporary folder next to it removes.
            self.folder.replace(scratch / "discarded")

    @staticmethod
    @contextmanager
    def _exclusively(index: Path) -> Iterator[None]:
        """Hold the lock of the migration of an index within the context.

        Raises:
            InUseError: if another process holds it.
        """
        folder = migration_folder(index)
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_path(folder))
            except InUseError as error:
                raise InUseError(
                    f"{folder}: another process works on the migration of {index}. Wait until it "
                    "ends.",
                ) from error
            yield


@contextmanager
def _waiting_for_lock(index: Path) -> Iterator[None]:
    """Hold the lock of an index within the context, after waiting for a running update.

    Raises:
        InUseError: if another process holds the lock for longer than a minute.
    """
    give_up = time.monotonic() + _LOCK_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_path(index.resolve()))
                break
            except InUseError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(_PAUSE_SECONDS)
        yield


def check_is_migratable(index: Path) -> Json:
    """Check that an index can move to another model, and return the manifest of the index.

    Args:
        index: the folder of the index.

    Raises:
        DataError: if the folder is a symbolic link, or if the backend has no segments.
        FileNotFoundError: if the folder is not an index.
    """
    if index.is_symlink():
        raise DataError(
            f"{index}: expected the folder of an index, got a symbolic link. Name the folder that "
            f"it points to: {index.resolve()}.",
        )
    manifest = read_description(index)
    if manifest["backend"] == "bm25":
        raise DataError(
            f"{index}: expected an index of vectors, got one of BM25, which has no model, so that "
            "there is nothing to migrate.",
        )
    if manifest["backend"] not in GROWING:
        raise DataError(
            f"{index}: expected an index of backend {', '.join(GROWING)}, got "
            f"{manifest['backend']}. Build another index and replace this one.",
        )
    return manifest


def _write_start(folder: Path, record: MigrationRecord, documents: Mapping[str, Document]) -> None:
    """Write the files of a migration that has just started.

    Args:
        folder: the folder to create.
        record: the description of the migration.
        documents: document id -> document, those that the index has at the start.
    """
    base = folder / _BASE
    base.mkdir(parents=True)
    save_ids(documents, base)
    np.save(base / _TEXT_KEYS, _hash_texts(documents))
    write_json_object(folder / MIGRATION_NAME, asdict(record), durable=True)


def check_same_documents(index: Path, documents: Mapping[str, Document], data: str) -> None:
    """Check that a collection has the ids of an index, and no other ids.

    Args:
        index: the folder of the index.
        documents: the documents of the collection.
        data: the path or the name of the collection, for the error.

    Raises:
        DataError: if documents are missing or not in the index.
    """
    indexed_ids = _document_ids_of(index, _passages_of(read_description(index)))
    missing = sorted(document_id for document_id in indexed_ids if document_id not in documents)
    if missing:
        raise DataError(
            f"{data}: expected the texts of all {len(indexed_ids):,} documents of {index}, got "
            f"{len(indexed_ids) - len(missing):,}; {len(missing):,} are missing"
            f"{_list_first_ids(missing)}. Add them to the collection.",
        )
    surplus = sorted(document_id for document_id in documents if document_id not in indexed_ids)
    if surplus:
        raise DataError(
            f"{data}: expected only the {len(indexed_ids):,} documents of {index}; "
            f"{len(surplus):,} are not in the index{_list_first_ids(surplus)}. Add them to the "
            "index (tilefold index --update), or remove them from the collection.",
        )


def _check_encoder(encoder: DocumentEncoder, fingerprint: str, name: str) -> None:
    """Raise ``DataError`` if a model is not the one that a migration has recorded.

    Args:
        encoder: the model.
        fingerprint: the recorded fingerprint.
        name: ``"new"`` or ``"old"``, for the error.
    """
    if encoder.fingerprint != fingerprint:
        raise DataError(
            f"model: expected the {name} model of the migration, got another one (its weights or "
            "settings differ). Give that model, or discard the migration (--discard).",
        )


def _passages_of(manifest: Json) -> str | None:
    """Return how the documents of an index were divided into passages; None for whole documents."""
    return Provenance.from_dict(manifest).passages


def _texts_of(documents: Mapping[str, Document], passages: str | None) -> Mapping[str, str]:
    """Return the texts of documents, or of their passages, as an index is made from them.

    Args:
        documents: document id -> document. A mapping with a method ``contents``, which reads
            documents when they are used, is not read here.
        passages: how documents are divided into passages; None for whole documents.

    Raises:
        DataError: if a document is the image of a page.
    """
    read_lazily: Callable[[], Mapping[str, str]] | None = getattr(documents, "contents", None)
    if read_lazily is None:
        check_texts_only(documents)
    if passages is not None:
        return Passages.parse(passages).of(documents)
    if read_lazily is not None:
        return read_lazily()
    return {document_id: document.contents for document_id, document in documents.items()}


def _ids_of(index: Path) -> set[str]:
    """Return the ids of the documents or passages of an index, without opening its vectors."""
    ids: set[str] = set()
    for part in PartList.read(index).parts:
        folder = part.folder_in(index)
        part_ids = StoredIds.load(folder, read_description(folder)["n_documents"])
        ids.update(vector_id for vector_id in part_ids if vector_id not in part.removed)
    return ids


def _document_ids_of(index: Path, passages: str | None) -> set[str]:
    """Return the ids of the documents of an index, also if its entries are passages.

    Args:
        index: the folder of the index.
        passages: how documents were divided into passages; None for whole documents.
    """
    ids = _ids_of(index)
    return ids if passages is None else {vector_id.rpartition("#")[0] for vector_id in ids}


def _hash_texts(documents: Mapping[str, Document]) -> npt.NDArray[np.uint64]:
    """Return a hash of each document's contents, uint64 ``[N]``, to recognise changed texts."""
    keys = (
        int.from_bytes(
            hashlib.sha256(document.contents.encode("utf-8", "surrogatepass")).digest()[:8],
            "big",
        )
        for document in documents.values()
    )
    return np.fromiter(keys, np.uint64, len(documents))


class _TextsWithOriginalDigest(dict[str, str]):
    """Texts that carry the digest with which their encoding was started, though some have changed.

    An interrupted encoding is resumed only if the digest of the texts is the same.

    Args:
        texts: id -> text.
        texts_sha256: the digest at the start.
    """

    def __init__(self, texts: Mapping[str, str], texts_sha256: str) -> None:
        super().__init__(texts)
        self.provenance = Provenance(texts_sha256=texts_sha256)


def _has_metadata(index: Path) -> bool:
    """Whether an index stores metadata of its documents."""
    from tilefold.retrieval.data.metadata import FILE

    return any((part.folder_in(index) / FILE).is_file() for part in PartList.read(index).parts)


def _list_first_ids(ids: list[str]) -> str:
    """Return the first ids in parentheses, after a space; empty if there are none."""
    if not ids:
        return ""
    dots = ", ..." if len(ids) > _SHOWN_IDS else ""
    return f" ({', '.join(ids[:_SHOWN_IDS])}{dots})"
