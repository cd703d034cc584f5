"""Updates of indexes by segments, and merging of folders of vectors."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._internal.arguments import ArgumentError, list_of, list_of_ids, path_of
from tilefold._internal.files import lock_path
from tilefold.retrieval.common.files import write_json_object
from tilefold.retrieval.common.provenance import (
    Provenance,
    ids_to_delete,
    warn_of_other_precision,
)
from tilefold.retrieval.data.metadata import Fields, Metadata, check_fields_by_id, check_metadata
from tilefold.retrieval.errors import ArgumentDataError
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.index.protocol import SEGMENTS, read_description
from tilefold.retrieval.index.segments import Segments, listed_parts
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

# Settings in which folders that are merged may differ.
_SETTINGS_OF_TEXTS = {"texts_sha256", "shard_size"}


def merge_vectors(
    folders: Sequence[str | Path],
    output_dir: str | Path,
    *,
    overwrite: bool = False,
) -> Manifest:
    """Merge several folders of vectors of one kind into one folder, shard by shard.

    The folders must be complete, and may differ in their texts only. Other precisions are a
    ``PrecisionWarning``. The texts of the new folder have no fingerprint. After an interrupt, the
    same call begins again. Until it is finished, the new folder is refused as incomplete.

    Args:
        folders: two or more folders of vectors.
        output_dir: the folder to write, new or empty.
        overwrite: replace vectors that are in `output_dir`.

    Returns:
        The manifest of the new folder.

    Raises:
        DataError: for other models or settings, an id that two folders have, or an output that is
            one of the folders.
        FileExistsError: if `output_dir` holds other files, or without `overwrite` other vectors.
    """
    paths = [path_of("folders", folder) for folder in list_of("folders", folders)]
    output_dir = path_of("output_dir", output_dir)
    if len(paths) < 2:
        raise ArgumentError("folders", f"expected two or more, got {len(paths)}.")
    if output_dir.resolve() in {path.resolve() for path in paths}:
        raise ArgumentDataError(
            "output_dir",
            f"expected another folder than those that are merged, got {output_dir}.",
        )
    sources = [_Source(path) for path in paths]
    first = sources[0]
    for source in sources[1:]:
        _check_same_kind(first, source)
        warn_of_other_precision(
            f"folders: the vectors of {source.folder}",
            source.manifest.precision,
            str(first.folder),
            first.manifest.precision,
            stacklevel=2,
        )
    n_texts = _check_distinct_ids(sources)
    writer = first.writer(output_dir, overwrite=overwrite)
    for source in sources:
        writer.precision = source.manifest.precision
        for vectors in source.shards():
            writer.write_shard(len(writer.manifest.shards), vectors)
        writer.manifest.failed.update(source.manifest.failed)
    return writer.finish(n_texts)  # type: ignore[no-any-return]


class _Source:
    """A folder of vectors that is merged with others.

    Attributes:
        folder: the folder.
        layout: ``"sparse"``, ``"dense"`` or ``"tokens"``.
        store: the open folder of dense or token vectors; None for sparse vectors.
        manifest: of the folder, without the settings that describe its texts.
    """

    def __init__(self, folder: Path) -> None:
        """Open a complete folder of vectors of any layout.

        Args:
            folder: folder that an encoding command wrote.

        Raises:
            DataError: for a folder that is no finished folder of vectors.
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
        settings = {
            name: value
            for name, value in manifest.settings.items()
            if name not in _SETTINGS_OF_TEXTS
        }
        self.manifest: Any = replace(manifest, settings=settings)

    def shards(self) -> Iterator[Any]:
        """Iterate over the vectors, one shard at a time."""
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
        """Create a writer of vectors of the same kind, model and settings."""
        identity = {name: getattr(self.manifest, name) for name in self.manifest.IDENTITY}
        manifest = type(self.manifest)(**identity, settings=self.manifest.settings)
        if self.store is None:
            return SparseVectorWriter(output, manifest, overwrite=overwrite)
        from tilefold.retrieval.vectors.tokens import TokenVectorWriter

        manifest.model_source = self.manifest.model_source
        return TokenVectorWriter(output, manifest, overwrite=overwrite)


def _check_same_kind(first: _Source, source: _Source) -> None:
    """Raise ``DataError`` unless two folders have vectors of one kind, model and settings.

    Args:
        first: folder that all others must match.
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
            "folders", f"expected vectors that were made alike, got others ({changed})."
        )


def _check_distinct_ids(sources: Sequence[_Source]) -> int:
    """Count the texts of folders, or raise ``DataError`` if two folders have the same id.

    Texts that failed to be encoded count too, because a merged folder lists them.
    """
    source_by_id: dict[str, _Source] = {}
    for source in sources:
        for name in (*source.ids(), *source.manifest.failed):
            earlier_source = source_by_id.setdefault(name, source)
            if earlier_source is not source:
                raise ArgumentDataError(
                    "folders",
                    f"{name!r} is in {earlier_source.folder} and {source.folder}. "
                    "Leave one out, or add to an index: index --update",
                )
    return len(source_by_id)


def update_index(
    path: str | Path,
    vectors: SparseVectors | TokenStore | TokenVectors | None = None,
    delete: Collection[str] = (),
    *,
    metadata: Mapping[str, Fields] | None = None,
) -> dict[str, int]:
    """Remove documents from a saved index, then add documents or replace those with the same ids.

    Only the new documents are indexed, as a segment with the options of the index. An error or a
    kill leaves the index as it was. Vectors of another precision than those of the index are a
    ``PrecisionWarning``.

    Args:
        path: the folder of the index.
        vectors: the new documents; ``None`` to remove some only.
        delete: ids of documents to remove; unknown ids are ignored.
        metadata: document id -> fields of the new documents. An index that keeps metadata needs it,
            if only an empty mapping.

    Returns:
        How many documents the index has now (``n_documents``), how many were ``written``, and how
        many of those to `delete` were in the index (``deleted``).

    Raises:
        DataError: for vectors of another kind or model.
        ValueError: for a backend that has no segments, or no `metadata` where the index keeps some.
        VocabularyMismatchError: for vectors over another vocabulary.
    """
    delete_ids = set(list_of_ids("delete", delete))
    check_fields_by_id("metadata", metadata)
    folder = path_of("path", path)
    backend = read_description(folder)["backend"]
    if backend not in GROWING:
        raise ArgumentError(
            "path",
            f"expected an index of {', '.join(GROWING)}, got one of {backend} in {folder}.",
        )
    with lock_path(folder):
        index: Any = open_index(folder)
        segments = index if isinstance(index, Segments) else Segments([index], [()])
        if vectors is not None:
            for part in segments.parts:
                check_metadata(part.metadata, metadata)
            _check_segment_vectors(segments, vectors)
            warn_of_other_precision(
                "vectors",
                _provenance_of(vectors).precision,
                str(folder),
                segments.provenance.precision,
                stacklevel=2,
            )
        listed = listed_parts(folder)
        segments_folder = folder / SEGMENTS
        # The first part is the index itself, whose folder has no name.
        names = [str(part["folder"]) for part in listed["parts"]] or [""]
        _remove_unlisted(segments_folder, names)
        segments_folder.mkdir(exist_ok=True)
        n_written_segments = int(listed["written"])
        new_part = None
        new_ids: set[str] = set()
        if vectors is not None:
            n_written_segments += 1
            new_folder = segments_folder / f"{n_written_segments:05d}"
            new_part = _build_segment(segments, vectors, metadata, new_folder)
            new_ids = set(new_part.ids)
        n_deleted = _remove_documents(segments, delete_ids, new_ids)
        if new_part is not None:
            new_part.save(new_folder)
            names.append(new_folder.name)
            segments.parts.append(new_part)
            segments.removed.append(set())
        parts = [
            {"folder": name, "removed": sorted(removed)}
            for name, removed in zip(names, segments.removed, strict=True)
        ]
        write_json_object(
            segments_folder / "current.json",
            {"parts": parts, "written": n_written_segments},
            durable=True,
        )
    return {
        "n_documents": segments.n_documents,
        "written": len(new_ids),
        "deleted": n_deleted,
    }


def _remove_unlisted(segments_folder: Path, names: Collection[str]) -> None:
    """Remove the folders of segments that updates wrote before they were killed.

    Args:
        segments_folder: folder with one folder per segment.
        names: names of the segments' folders that the index lists, which stay.
    """
    if not segments_folder.is_dir():
        return
    for entry in segments_folder.iterdir():
        if entry.is_dir() and entry.name not in names:
            shutil.rmtree(entry)


def _remove_documents(segments: Segments, delete: Collection[str], replaced: set[str]) -> int:
    """Mark documents of an index as removed, in ``segments.removed``.

    If the index has passages, the id of a document stands for all its passages.

    Args:
        segments: the index, which is changed.
        delete: ids of documents or passages that the caller deletes.
        replaced: ids of new documents. Earlier documents with these ids are removed too.

    Returns:
        How many documents of `delete` were in the index.
    """
    passages = segments.provenance.passages
    n_deleted = 0
    for part, removed in segments.pairs():
        newly_removed = ids_to_delete(part.ids, delete, replaced, passages) - removed
        # Documents that are only replaced do not count as deleted.
        n_deleted += len(ids_to_delete(newly_removed, delete, (), passages))
        removed.update(newly_removed)
    return n_deleted


def merge_segments(path: str | Path) -> int:
    """Merge an index and its segments into one index, which replaces them.

    The new index is written to a new folder that then takes the place of the old one, so a process
    that is killed leaves the old index.

    Args:
        path: folder of the index. An index without segments stays as it is.

    Returns:
        The number of documents.
    """
    folder = path_of("path", path)
    with lock_path(folder):
        index: Any = open_index(folder)
        if isinstance(index, Segments):
            index = index.merged(folder)
            index.save(folder, overwrite=True)
    return int(index.n_documents)


def _build_segment(
    segments: Segments,
    vectors: _Vectors,
    metadata: Mapping[str, Fields] | None,
    folder: Path,
) -> Any:
    """Build an index of new documents, with the options of an existing index.

    Args:
        segments: the existing index.
        vectors: vectors of the new documents.
        metadata: document id -> fields of the new documents.
        folder: folder of the segment. An index of token vectors is written into it here. The
            caller saves the others.

    Returns:
        The new index, of the same class as the parts of `segments`.
    """
    first_part = segments.parts[0]
    if segments.backend == "late":
        return first_part.build_segment(vectors, folder, metadata)
    index_type = type(first_part)
    # Sparse vectors of an update may all be empty, which the public build() refuses.
    build = index_type.of_any if isinstance(vectors, SparseVectors) else index_type.build
    part = build(vectors, **first_part.settings)
    part.metadata = Metadata.from_fields(metadata, part.ids, segments.provenance.passages)
    return part


def _check_segment_vectors(segments: Segments, vectors: _Vectors) -> None:
    """Raise an error unless vectors can be added to an index.

    Args:
        segments: the index.
        vectors: vectors of the new documents.

    Raises:
        DataError: for vectors of another kind, model, dimension or similarity, or of documents that
            were divided into other passages.
        VocabularyMismatchError: for sparse vectors over another vocabulary.
    """
    has_sparse_index = segments.backend not in ("dense", "late")
    if isinstance(vectors, SparseVectors) != has_sparse_index:
        raise ArgumentDataError(
            "vectors",
            f"expected vectors for an index of backend {segments.backend}, got others.",
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
            "were made by another model than the index. Encode documents with its own.",
        )
    if isinstance(vectors, SparseVectors):
        check_same_vocabulary(segments, vectors, "the index", "vectors")
        return
    expected = (segments.dimension, segments.similarity)
    manifest = getattr(vectors, "manifest", None)  # vectors in memory have none
    actual = (vectors.dimension, getattr(manifest, "similarity", None))
    if actual != expected:
        raise ArgumentDataError(
            "vectors",
            f"expected (dimension, similarity) {expected} as in the index, got {actual}.",
        )


def _provenance_of(vectors: _Vectors) -> Provenance:
    """Return the provenance of vectors.

    Token vectors in memory have none.
    """
    described = getattr(vectors, "manifest", vectors)
    provenance: Provenance = getattr(described, "provenance", Provenance())
    return provenance
