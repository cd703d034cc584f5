"""Indexes that are changed by segments, and several folders of vectors as one."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._internal.arguments import list_of, list_of_ids, path_of
from tilefold._internal.files import lock_path
from tilefold.retrieval.common.files import write_json_object
from tilefold.retrieval.common.provenance import (
    Provenance,
    ids_to_delete,
    warn_of_other_precision,
)
from tilefold.retrieval.data.metadata import Fields, Metadata, check_fields_by_id, check_metadata
from tilefold.retrieval.errors import DataError
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

GROWING = ("exact", "seismic", "dense", "late")

_OF_TEXTS = {"texts_sha256", "shard_size"}  # settings in which folders may differ


def merge_vectors(
    folders: Sequence[str | Path],
    output_dir: str | Path,
    *,
    overwrite: bool = False,
) -> Manifest:
    """Write the vectors of several folders, of any one kind, as those of one folder; they are
    copied shard by shard.

    The folders must be complete and differ in their texts alone; other precisions are a
    ``PrecisionWarning``. The texts of the new one have no fingerprint. After an interrupt, the same call begins again; until it is finished, the new
    folder is refused as incomplete.

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
    places = [Path(folder) for folder in list_of("folders", folders)]
    if len(places) < 2:
        raise ValueError(f"folders: expected two or more, got {len(places)}.")
    if Path(output_dir).resolve() in {place.resolve() for place in places}:
        raise DataError(
            f"output_dir: expected another folder than those that are merged, got {output_dir}.",
        )
    sources = [_Source(place) for place in places]
    first, seen = sources[0], dict[str, _Source]()
    for source in sources[1:]:
        if source.layout != first.layout:
            got = f"{source.layout} ones in {source.folder}"
            raise DataError(
                f"folders: expected {first.layout} vectors as in {first.folder}, got {got}.",
            )
        both = first.manifest.identity, source.manifest.identity
        if changed := differences(*both, f"in {first.folder}", f"in {source.folder}"):
            raise DataError(
                f"folders: expected vectors that were made alike, got others ({changed}).",
            )
        warn_of_other_precision(
            f"folders: the vectors of {source.folder}",
            source.manifest.precision,
            str(first.folder),
            first.manifest.precision,
            stacklevel=2,
        )
    for source in sources:
        for name in (*source.ids(), *source.manifest.failed):
            if seen.setdefault(name, source) is not source:
                where = f"{seen[name].folder} and {source.folder}"
                raise DataError(
                    f"folders: {name!r} is in {where}. Leave one out, or add to an index: index "
                    "--update",
                )
    writer = first.writer(Path(output_dir), overwrite=overwrite)
    for source in sources:
        writer.precision = source.manifest.precision
        for vectors in source.shards():
            writer.write_shard(len(writer.manifest.shards), vectors)
        writer.manifest.failed |= source.manifest.failed
    return writer.finish(len(seen))  # type: ignore[no-any-return]


class _Source:
    """A folder of vectors of any kind."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.layout = folder, layout_of(folder)
        self.store: Any = None
        self.manifest: Any
        if self.layout == "sparse":
            self.manifest = VectorManifest.read(folder)
            check_complete(folder, self.manifest)
        else:
            from tilefold.retrieval.vectors.tokens import open_dense, open_tokens  # needs torch

            self.store = (open_dense if self.layout == "dense" else open_tokens)(folder)
            self.manifest = self.store.manifest
        kept = {
            name: value for name, value in self.manifest.settings.items() if name not in _OF_TEXTS
        }
        self.manifest = replace(self.manifest, settings=kept)

    def shards(self) -> Iterator[Any]:
        return (
            iter_shards(self.folder, self.manifest)
            if self.store is None
            else self.store.iter_shards()
        )

    def ids(self) -> Iterator[str]:
        of_shards = (name for vectors in self.shards() for name in vectors.ids)
        return of_shards if self.store is None else iter(self.store.ids)

    def writer(self, output: Path, *, overwrite: bool) -> ShardWriter[Any, Any]:
        own = {name: getattr(self.manifest, name) for name in self.manifest.IDENTITY}
        made = type(self.manifest)(**own, settings=self.manifest.settings)
        if self.store is None:
            return SparseVectorWriter(output, made, overwrite=overwrite)
        from tilefold.retrieval.vectors.tokens import TokenVectorWriter

        made.model_source = self.manifest.model_source
        return TokenVectorWriter(output, made, overwrite=overwrite)


def update_index(
    path: str | Path,
    vectors: SparseVectors | TokenStore | TokenVectors | None = None,
    delete: Collection[str] = (),
    *,
    metadata: Mapping[str, Fields] | None = None,
) -> dict[str, int]:
    """Remove documents from a saved index, then add `vectors` with `metadata`, which replace those
    of the same ids.

    Only the new documents are indexed, as a segment with the options of the index. An error or a
    kill leaves the index as it was. Vectors of another precision than those of the index are a
    ``PrecisionWarning``.

    Args:
        path: the folder of the index.
        vectors: the new documents; ``None`` to remove some only.
        delete: ids of documents to remove; those that are not there are ignored.
        metadata: document id -> fields of the new documents. An index that keeps metadata needs it,
            if only an empty mapping.

    Returns:
        How many documents there are now (``n_documents``), and how many were ``written`` and
        ``deleted`` (of those to `delete` that were there).

    Raises:
        DataError: for vectors of another kind or model.
        ValueError: for a backend that has no segments, or no `metadata` where the index keeps some.
        VocabularyMismatchError: for vectors over another vocabulary.
    """
    deleted_ids = set(list_of_ids("delete", delete))
    check_fields_by_id(metadata)
    folder = path_of("path", path)
    if (backend := read_description(folder)["backend"]) not in GROWING:
        raise ValueError(
            f"path: expected an index of {', '.join(GROWING)}, got one of {backend} in {folder}.",
        )
    with lock_path(folder):
        index: Any = open_index(folder)
        held = index if isinstance(index, Segments) else Segments([index], [()])
        if vectors is not None:
            for part in held.parts:
                check_metadata(part.metadata, metadata)
        listed, inside = listed_parts(folder), folder / SEGMENTS
        number = int(listed["written"]) + (vectors is not None)
        names = [str(part["folder"]) for part in listed["parts"]] or [""]
        if inside.is_dir():
            for stale in inside.iterdir():  # of updates that were killed
                if stale.is_dir() and stale.name not in names:
                    shutil.rmtree(stale)
        inside.mkdir(exist_ok=True)
        added = (
            None if vectors is None else _segment(held, vectors, metadata, inside / f"{number:05d}")
        )
        asked, new = deleted_ids, set() if added is None else set(added.ids)
        deleted = 0
        for part, gone in held.pairs():
            there = ids_to_delete(part.ids, asked, new, held.provenance.passages) - gone
            deleted += len(ids_to_delete(there, asked, (), held.provenance.passages))
            gone.update(there)
        if added is not None:
            names.append(f"{number:05d}")
            added.save(inside / names[-1])
            held.parts.append(added)
            held.removed.append(set())
        parts = [
            {"folder": name, "removed": sorted(gone)}
            for name, gone in zip(names, held.removed, strict=True)
        ]
        write_json_object(
            inside / "current.json",
            {"parts": parts, "written": number},
            durable=True,
        )
    return {"n_documents": held.n_documents, "written": len(new), "deleted": deleted}


def merge_segments(path: str | Path) -> int:
    """Put one index in the place of an index and its segments; how many documents it has. A kill
    loses nothing.
    """
    folder = path_of("path", path)
    with lock_path(folder):
        index: Any = open_index(folder)
        if isinstance(index, Segments):
            index = index.merged(folder)
            index.save(folder, overwrite=True)
    return int(index.n_documents)


def _segment(
    held: Segments,
    vectors: _Vectors,
    metadata: Mapping[str, Fields] | None,
    folder: Path,
) -> Any:
    """A part of new documents for those of `held`, to be saved in `folder`."""
    first, made_by = held.parts[0], held.provenance
    if isinstance(vectors, SparseVectors) is (held.backend in ("dense", "late")):
        raise DataError(
            f"vectors: expected vectors for an index of backend {held.backend}, got others.",
        )
    manifest = getattr(vectors, "manifest", None)
    theirs: Provenance = getattr(manifest or vectors, "provenance", Provenance())
    if theirs.passages != made_by.passages:
        raise DataError(
            f"vectors: expected passages {made_by.passages!r} as in the index, got "
            f"{theirs.passages!r}.",
        )
    if "model_fingerprint" in made_by.differs(theirs):
        raise DataError(
            "vectors: were made by another model than the index. Encode documents with its own.",
        )
    warn_of_other_precision(
        "vectors",
        theirs.precision,
        str(folder.parent.parent),
        made_by.precision,
        stacklevel=3,
    )
    if isinstance(vectors, SparseVectors):
        check_same_vocabulary(held, vectors, "the index", "vectors")
    else:
        there = vectors.dimension, getattr(manifest, "similarity", None)
        if there != (ours := (held.dimension, held.similarity)):
            raise DataError(
                f"vectors: expected (dimension, similarity) {ours} as in the index, got {there}.",
            )
        if held.backend == "late":
            return first.build_segment(vectors, folder, metadata)
    build = type(first).of_any if isinstance(vectors, SparseVectors) else type(first).build
    made = build(vectors, **first.settings)
    made.metadata = Metadata.of(metadata, made.ids, made_by.passages)
    return made
