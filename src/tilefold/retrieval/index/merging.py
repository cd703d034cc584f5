"""Updates of indexes by segments, and merging of folders of vectors."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from tilefold._internal.arguments import ArgumentError, list_of, list_of_ids, path_of
from tilefold._internal.files import lock_path, sync, sync_tree
from tilefold.retrieval.common.provenance import (
    Provenance,
    ids_to_delete,
    unknown_ids,
    warn_of_other_precision,
)
from tilefold.retrieval.data.documents import Document
from tilefold.retrieval.data.metadata import Fields, check_fields_by_id, check_metadata
from tilefold.retrieval.data.passages import document_of
from tilefold.retrieval.errors import ArgumentDataError, DataError
from tilefold.retrieval.index import DENSE, LATE
from tilefold.retrieval.index.changes import ChangeLog
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.index.protocol import SEGMENTS, read_description
from tilefold.retrieval.index.publishing import publishing
from tilefold.retrieval.index.segments import ListedPart, PartList, Segments
from tilefold.retrieval.vectors.shards import Manifest, ShardWriter, check_complete, differences
from tilefold.retrieval.vectors.sparse import SparseVectors, check_same_vocabulary
from tilefold.retrieval.vectors.sparse_files import (
    SparseVectorWriter,
    VectorManifest,
    iter_shards,
    layout_of,
)

if TYPE_CHECKING:
    from tilefold.retrieval.vectors.tokens import TokenStore, TokenVectors

    _Vectors = SparseVectors | TokenStore | TokenVectors

__all__ = ["merge_segments", "merge_vectors", "update_index"]

# Backends whose indexes are updated by segments.
GROWING = ("exact", "seismic", "dense", "late")

# Settings that may differ between merged folders, because they do not describe the encoder.
_SETTINGS_OF_TEXTS = {"texts_sha256", "shard_size"}


def merge_vectors(
    folders: Sequence[str | Path],
    output_dir: str | Path,
    *,
    overwrite: bool = False,
) -> Manifest:
    """Merge several folders of vectors of one kind into one folder, shard by shard.

    The folders must be complete, and may differ in their texts only. The texts of the new folder
    have no fingerprint. After an interrupt, the same call begins from the start. Until the call is
    finished, the new folder is refused as incomplete.

    Args:
        folders: two or more folders of vectors.
        output_dir: the folder to write, new or empty.
        overwrite: whether to replace vectors that are in `output_dir`.

    Returns:
        The manifest of the new folder.

    Warns:
        PrecisionWarning: if the vectors of the folders were computed in different precisions.

    Raises:
        DataError: if models or settings differ, if an id is in two folders, or if the output is
            one of the folders.
        FileExistsError: if `output_dir` holds other files, or if it holds vectors and `overwrite`
            is False.

    Examples:
        >>> from tilefold.retrieval import SparseVectors, read_vectors, write_vectors
        >>> for name in ("d1", "d2"):
        ...     _ = write_vectors(SparseVectors.from_rows({name: {0: 1.0}}, vocab_size=3), name)
        >>> _ = merge_vectors(["d1", "d2"], "both")
        >>> read_vectors("both").ids
        ['d1', 'd2']
    """
    paths = [path_of("folders", folder) for folder in list_of("folders", folders)]
    output_dir = path_of("output_dir", output_dir)
    if len(paths) < 2:
        raise ArgumentError("folders", f"expected two or more, got {len(paths)}.")
    if output_dir.resolve() in {path.resolve() for path in paths}:
        raise ArgumentDataError(
            "output_dir",
            f"expected a folder that is not merged itself, got {output_dir}.",
        )
    sources = [_Source(path) for path in paths]
    first = sources[0]
    for source in sources[1:]:
        _check_same_settings(first, source)
        warn_of_other_precision(
            f"folders: the vectors of {source.folder}",
            source.manifest.precision,
            str(first.folder),
            first.manifest.precision,
            stacklevel=2,
        )
    n_texts = _count_distinct_ids(sources)
    writer = first.writer(output_dir, overwrite=overwrite)
    for source in sources:
        writer.precision = source.manifest.precision
        for vectors in source.shards():
            writer.write_shard(len(writer.manifest.shards), vectors)
        writer.manifest.failed.update(source.manifest.failed)
    return writer.finish(n_texts)  # type: ignore[no-any-return]


class _Source:
    """A folder of vectors that is to be merged.

    Attributes:
        folder: the folder.
        layout: ``"sparse"``, ``"dense"`` or ``"tokens"``.
        store: the open folder of dense or token vectors; None for sparse vectors.
        manifest: the manifest of the folder, without the settings that describe its texts.
    """

    def __init__(self, folder: Path) -> None:
        """Open a complete folder of sparse, dense or token vectors.

        Args:
            folder: a folder that an encoding command wrote.

        Raises:
            DataError: if the folder is incomplete or does not hold vectors.
        """
        self.folder = folder
        self.layout = layout_of(folder)
        self.store: Any = None
        manifest: Any
        if self.layout == "sparse":
            manifest = VectorManifest.read(folder)
            check_complete(folder, manifest)
        else:
            from tilefold.retrieval.vectors.tokens import open_dense, open_tokens  # needs torch

            open_store = open_dense if self.layout == "dense" else open_tokens
            self.store = open_store(folder)
            manifest = self.store.manifest
        # The settings of sources are compared. They may have different texts.
        settings = {
            name: value
            for name, value in manifest.settings.items()
            if name not in _SETTINGS_OF_TEXTS
        }
        self.manifest: Any = replace(manifest, settings=settings)

    def shards(self) -> Iterator[Any]:
        """Iterate over the shards of vectors."""
        if self.store is not None:
            return self.store.iter_shards()  # type: ignore[no-any-return]
        return iter_shards(self.folder, self.manifest)

    def ids(self) -> Iterator[str]:
        """Iterate over the ids of the vectors."""
        if self.store is not None:
            yield from self.store.ids
            return
        for vectors in self.shards():
            yield from vectors.ids

    def writer(self, output: Path, *, overwrite: bool) -> ShardWriter[Any, Any]:
        """Create a writer of vectors with the layout, model and settings of this folder.

        Args:
            output: the folder to write.
            overwrite: whether to replace vectors that are in it.
        """
        identity = {name: getattr(self.manifest, name) for name in self.manifest.IDENTITY}
        manifest = type(self.manifest)(**identity, settings=self.manifest.settings)
        if self.store is None:
            return SparseVectorWriter(output, manifest, overwrite=overwrite)
        from tilefold.retrieval.vectors.tokens import TokenVectorWriter

        manifest.model_source = self.manifest.model_source
        return TokenVectorWriter(output, manifest, overwrite=overwrite)


def _check_same_settings(first: _Source, source: _Source) -> None:
    """Raise ``ArgumentDataError`` if the layout, model or settings of two folders differ.

    Args:
        first: the first folder, which every other folder must match.
        source: another folder.
    """
    if source.layout != first.layout:
        raise ArgumentDataError(
            "folders",
            f"expected {first.layout} vectors as in {first.folder}, "
            f"got {source.layout} ones in {source.folder}.",
        )
    changed = differences(
        first.manifest.identity,
        source.manifest.identity,
        f"in {first.folder}",
        f"in {source.folder}",
    )
    if changed:
        raise ArgumentDataError(
            "folders",
            f"expected vectors made with the same settings, got different ones ({changed}).",
        )


def _count_distinct_ids(sources: Sequence[_Source]) -> int:
    """Count the texts of folders whose ids must be distinct.

    Texts that failed to be encoded count too, because a merged folder lists them.

    Raises:
        ArgumentDataError: if an id is in two folders.
    """
    source_by_id: dict[str, _Source] = {}
    for source in sources:
        for text_id in (*source.ids(), *source.manifest.failed):
            earlier_source = source_by_id.setdefault(text_id, source)
            if earlier_source is not source:
                raise ArgumentDataError(
                    "folders",
                    f"{text_id!r} is in {earlier_source.folder} and {source.folder}. "
                    "Leave out one folder, or update an index with it: tilefold index --update",
                )
    return len(source_by_id)


class IndexUpdate(TypedDict):
    """Result of an update of an index.

    Attributes:
        n_documents: number of documents in the updated index.
        written: number of new documents.
        deleted: number of documents that were deleted, without those that were replaced.
        unknown_ids: ids to delete that were not in the index.
    """

    n_documents: int
    written: int
    deleted: int
    unknown_ids: list[str]


def update_index(
    path: str | Path,
    vectors: SparseVectors | TokenStore | TokenVectors | None = None,
    delete: Collection[str] = (),
    *,
    metadata: Mapping[str, Fields] | None = None,
    documents: Mapping[str, Document] | None = None,
    log_sequence: int | None = None,
) -> IndexUpdate:
    """Remove documents from a saved index, then add documents or replace those with the same ids.

    Only the new documents are indexed, as a segment with the options of the index. If the update
    fails or the process is killed, the index does not change.

    Args:
        path: the folder of the index.
        vectors: vectors of the new documents; None only removes documents.
        delete: ids of documents to remove. Unknown ids are not an error, but are returned.
        metadata: document id -> fields of the new documents. It is required if the index stores
            metadata, but may be empty.
        documents: document id -> the documents of `vectors`. They are required while the index
            moves to another model (``tilefold migrate``), because that model encodes them as well.
            Otherwise they have no effect.
        log_sequence: for ``tilefold serve``: sequence number in its log of documents of the last
            change that the update adds.

    Returns:
        ``n_documents``: number of documents in the updated index; ``written``: number of new
        documents; ``deleted``: number of documents of `delete` that were in the index;
        ``unknown_ids``: ids of `delete` that were not in the index.

    Warns:
        PrecisionWarning: if the new vectors have another precision than the index.

    Raises:
        DataError: if the vectors have another kind or were made by another model.
        ValueError: if the backend has no segments, or if `metadata` or `documents` are required and
            missing.
        VocabularyMismatchError: if the vocabularies of the vectors and the index differ.

    Examples:
        >>> from tilefold.retrieval import SparseVectors, build_index, load_index
        >>> first = SparseVectors.from_rows({"d1": {0: 1.0}, "d2": {0: 2.0}}, vocab_size=3)
        >>> build_index(first).save("growing-index")
        >>> new = SparseVectors.from_rows({"d3": {0: 3.0}}, vocab_size=3)
        >>> _ = update_index("growing-index", new, delete=["d1"])
        >>> sorted(load_index("growing-index").ids)
        ['d2', 'd3']
    """
    listed_ids = list_of_ids("delete", delete)
    delete_ids = set(listed_ids)
    check_fields_by_id("metadata", metadata)
    folder = path_of("path", path)
    backend = read_description(folder)["backend"]
    if backend not in GROWING:
        raise ArgumentError(
            "path",
            f"expected an index of backend {', '.join(GROWING)}, got {backend} in {folder}.",
        )
    change_log = ChangeLog(folder)
    with lock_path(folder.resolve()):
        index: Any = open_index(folder)
        segments = index if isinstance(index, Segments) else Segments([index], [()])
        new_documents: dict[str, Document] = {}
        if vectors is not None:
            _check_new_documents(segments, vectors, metadata, folder)
            if change_log.is_active:
                passages = segments.provenance.passages
                new_documents = _documents_of(vectors.ids, documents, passages, folder)
        part_list = PartList.read(folder)
        # Updates that were killed may have left segments that the index does not list.
        _remove_unlisted(folder / SEGMENTS, part_list.segment_names)
        (folder / SEGMENTS).mkdir(exist_ok=True)
        names = [part.name for part in part_list.parts]
        n_segments_written = part_list.n_segments_written  # numbers the new segment
        new_part = None
        new_ids: set[str] = set()
        if vectors is not None:
            n_segments_written += 1
            names.append(f"{n_segments_written:05d}")
            new_part = _write_segment(segments, vectors, metadata, folder / SEGMENTS / names[-1])
            new_ids = set(new_part.ids)
        unknown = unknown_ids(segments.ids, listed_ids, segments.provenance.passages)
        n_deleted = _remove_documents(segments, delete_ids, new_ids)
        if new_part is not None:
            segments.append(new_part)
        parts = [
            ListedPart(name, removed) for name, removed in zip(names, segments.removed, strict=True)
        ]
        # Writing the list commits the update. Both contexts record whether this has succeeded.
        with (
            publishing(folder, log_sequence),
            change_log.recording(delete_ids, new_documents),
        ):
            PartList(parts, n_segments_written, is_updated=True).write(folder)
    return {
        "n_documents": segments.n_documents,
        "written": len(new_ids),
        "deleted": n_deleted,
        "unknown_ids": unknown,
    }


def _documents_of(
    vector_ids: Collection[str],
    documents: Mapping[str, Document] | None,
    passages: str | None,
    folder: Path,
) -> dict[str, Document]:
    """Return the documents of new vectors, which a migration encodes with another model, too.

    Args:
        vector_ids: ids of the new documents, or of their passages.
        documents: the documents that the caller has passed.
        passages: how documents were divided into passages; None for whole documents.
        folder: the folder of the index, for the error.

    Raises:
        ArgumentError: if a document is missing.
    """
    document_ids = list(vector_ids)
    if passages is not None:
        document_ids = list(dict.fromkeys(document_of(vector_id) for vector_id in vector_ids))
    available = documents or {}
    missing = [document_id for document_id in document_ids if document_id not in available]
    if missing:
        raise ArgumentError(
            "documents",
            f"expected the documents of all new vectors, because {folder} moves to another model, "
            f"which has to encode them, too; {len(missing)} are missing, such as {missing[0]!r}. "
            "Pass them, or end the migration first (tilefold migrate).",
        )
    return {document_id: available[document_id] for document_id in document_ids}


def _write_segment(
    segments: Segments,
    vectors: _Vectors,
    metadata: Mapping[str, Fields] | None,
    segment_folder: Path,
) -> Any:
    """Write new documents as a segment durably. The index does not list the segment yet.

    Args:
        segments: the index, whose first part gives the options of the segment.
        vectors: vectors of the new documents.
        metadata: document id -> fields of the new documents.
        segment_folder: the folder to write.

    Returns:
        The index of the new documents.
    """
    segment = segments.parts[0].build_segment(vectors, segment_folder, metadata)
    segment.save(segment_folder)
    # The segment must survive a loss of power before the index lists it.
    sync_tree(segment_folder)
    index_folder = segment_folder.parent.parent
    sync(index_folder)  # the folder of all segments may be new
    return segment


def _remove_unlisted(segments_folder: Path, names: Collection[str]) -> None:
    """Remove the folders of segments that updates wrote before they were killed.

    Args:
        segments_folder: the folder with one folder per segment.
        names: names of the segments' folders that the index lists, which are not removed.
    """
    if not segments_folder.is_dir():
        return
    for entry in segments_folder.iterdir():
        if entry.is_dir() and entry.name not in names:
            shutil.rmtree(entry)


def _remove_documents(segments: Segments, delete: Collection[str], replaced: set[str]) -> int:
    """Mark documents of an index as removed, in ``segments.removed``.

    If the entries of the index are passages, the id of a document means all its passages.

    Args:
        segments: the index, which is changed.
        delete: ids of documents or passages to delete.
        replaced: ids of new documents. Documents that the index has under these ids are removed.

    Returns:
        Number of entries of the index that were deleted. Entries that are only replaced do not
        count.
    """
    passages = segments.provenance.passages
    n_deleted = 0
    for part, removed in segments.parts_with_removed():
        deleted_ids = ids_to_delete(part.ids, delete, (), passages) - removed
        replaced_ids = ids_to_delete(part.ids, (), replaced, passages)
        n_deleted += len(deleted_ids)
        removed.update(deleted_ids, replaced_ids)
    return n_deleted


def merge_segments(path: str | Path) -> int:
    """Replace an index and its segments by one index.

    The new index is written to a temporary folder, which then replaces the old one. If the process
    is killed, the old index stays.

    Args:
        path: the folder of the index. An index without segments is not changed.

    Returns:
        The number of documents.

    Raises:
        DataError: if all documents of an index of dense or token vectors were deleted.
    """
    folder = path_of("path", path)
    with lock_path(folder.resolve()):
        # An interrupted update may have left a pending log entry. It counts as committed if the
        # generation (state) of the index has changed. A merge changes the generation, so the entry
        # is resolved before.
        ChangeLog(folder).settle()
        index: Any = open_index(folder)
        if isinstance(index, Segments):
            _check_has_documents(index, folder)
            with publishing(folder):
                index = index.merged(folder)  # replaces an index of token vectors already
                index.save(folder, overwrite=True)
    return int(index.n_documents)


def _check_has_documents(segments: Segments, folder: Path) -> None:
    """Raise ``DataError`` if the merged index would be empty, and its backend cannot be.

    Args:
        segments: the index.
        folder: its folder, for the error.
    """
    if segments.backend in (DENSE, LATE) and not segments.n_documents:
        raise DataError(
            f"{folder}: expected an index with documents to merge, got one whose documents were "
            "all deleted. Add documents first (tilefold index --update), or build the index again "
            "(tilefold index --overwrite).",
        )


def _check_new_documents(
    segments: Segments,
    vectors: _Vectors,
    metadata: Mapping[str, Fields] | None,
    folder: Path,
) -> None:
    """Raise an error if documents cannot be added to an index; warn of another precision.

    Args:
        segments: the index.
        vectors: vectors of the new documents.
        metadata: document id -> fields of the new documents.
        folder: the folder of the index, for the warning.

    Raises:
        DataError: if the vectors have another kind or were made by another model.
        ValueError: if the index stores metadata and `metadata` is None.
        VocabularyMismatchError: if the vocabularies of the vectors and the index differ.
    """
    for part in segments.parts:
        check_metadata(part.metadata, metadata)
    _check_segment_vectors(segments, vectors)
    warn_of_other_precision(
        "vectors",
        _provenance_of(vectors).precision,
        str(folder),
        segments.provenance.precision,
        stacklevel=3,  # the caller of update_index
    )


def _check_segment_vectors(segments: Segments, vectors: _Vectors) -> None:
    """Raise an error if vectors cannot be added to an index.

    Args:
        segments: the index.
        vectors: vectors of the new documents.

    Raises:
        ArgumentDataError: if the vectors differ from the index in kind, passages, model, dimension
            or similarity.
        VocabularyMismatchError: if the vocabularies of sparse vectors and the index differ.
    """
    has_sparse_index = segments.backend not in ("dense", "late")
    if isinstance(vectors, SparseVectors) != has_sparse_index:
        raise ArgumentDataError(
            "vectors",
            f"expected vectors for an index of backend {segments.backend}, got "
            f"{type(vectors).__name__}.",
        )
    index_provenance = segments.provenance
    provenance = _provenance_of(vectors)
    if provenance.passages != index_provenance.passages:
        raise ArgumentDataError(
            "vectors",
            f"expected passages {index_provenance.passages!r} as in the index, got "
            f"{provenance.passages!r}.",
        )
    if "model_fingerprint" in index_provenance.differing_fields(provenance):
        raise ArgumentDataError(
            "vectors",
            "were made by another model than the index. Encode documents with the model of the "
            "index.",
        )
    if isinstance(vectors, SparseVectors):
        check_same_vocabulary(segments, vectors, "the index", "vectors")
        _check_same_special_tokens(index_provenance, provenance)
        return
    manifest = getattr(vectors, "manifest", None)  # vectors in memory have none
    similarity = getattr(manifest, "similarity", None)  # token vectors have none
    expected = (segments.dimension, segments.similarity)
    actual = (vectors.dimension, similarity)
    if actual != expected:
        raise ArgumentDataError(
            "vectors",
            f"expected (dimension, similarity) {expected} as in the index, got {actual}.",
        )


def _check_same_special_tokens(index: Provenance, vectors: Provenance) -> None:
    """Raise ``ArgumentDataError`` if only one of index and vectors has no special tokens.

    Scores with and without them are not comparable. Vectors of an unknown model are not checked.

    Args:
        index: the provenance of the index.
        vectors: the provenance of the new vectors.
    """
    is_known = bool(index.model_fingerprint and vectors.model_fingerprint)
    index_keeps = index.special_tokens is not False
    vectors_keep = vectors.special_tokens is not False
    if not is_known or index_keeps == vectors_keep:
        return
    contents = {True: "weights of special tokens", False: "no weights of special tokens"}
    option = "without" if index_keeps else "with"
    raise ArgumentDataError(
        "vectors",
        f"expected {contents[index_keeps]}, as in the index, got {contents[vectors_keep]}. Encode "
        f"the documents again {option} special_tokens=False (--no-special-tokens).",
    )


def _provenance_of(vectors: _Vectors) -> Provenance:
    """Return the provenance of vectors, which is empty for token vectors in memory."""
    described = getattr(vectors, "manifest", vectors)
    provenance: Provenance = getattr(described, "provenance", Provenance())
    return provenance
