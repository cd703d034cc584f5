"""Opening a saved index of any backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tilefold.retrieval.common.files import FileIdentity
from tilefold.retrieval.index import (
    DENSE,
    LATE,
    SparseIndex,
    backend_class,
    load_index,
    open_with_segments,
)
from tilefold.retrieval.index.bm25 import BM25Index
from tilefold.retrieval.index.generations import IndexGeneration, open_current
from tilefold.retrieval.index.protocol import MANIFEST_NAME, FolderIndex
from tilefold.retrieval.index.segments import Segments

if TYPE_CHECKING:
    from torch import Tensor

    from tilefold.retrieval.index.dense import DenseIndex
    from tilefold.retrieval.index.late import LateIndex

__all__ = ["gpus_of", "mapped_tensors", "open_index", "opened_parts"]


def open_index(
    path: str | Path,
    *,
    opened: object = None,
) -> SparseIndex | BM25Index | DenseIndex | LateIndex:
    """Open a saved index of any backend: sparse, BM25, dense or late interaction.

    If an update or a merge commits another generation meanwhile, the index is opened again, so that
    all its files are of one generation.

    Args:
        path: the folder of the index.
        opened: the index as it was opened earlier. Its parts never change, so parts that the index
            still has are used again, which takes no time and no memory.

    Raises:
        DataError: if the folder is not an index, is damaged, or was written by a newer release.
    """
    parts = opened_parts(opened)

    def open_generation(generation: IndexGeneration) -> Any:
        """Open one committed state of the index, with the parts that are open already."""
        if generation.backend == BM25Index.backend:
            return BM25Index.load(path)
        if not parts and generation.backend not in (DENSE, LATE):
            return load_index(path)
        return open_with_segments(
            path,
            generation.backend,
            partial(_load_or_reuse, parts, generation.backend) if parts else None,
        )

    index: SparseIndex | BM25Index | DenseIndex | LateIndex = open_current(path, open_generation)
    return index


def opened_parts(index: object) -> dict[FileIdentity, FolderIndex]:
    """Return the parts of an open index by their manifests: the index itself and its segments.

    Args:
        index: an index of any kind. Only indexes that were loaded from a folder have parts.
    """
    parts = index.parts if isinstance(index, Segments) else [index]
    return {
        part.manifest_identity: part
        for part in parts
        if isinstance(part, FolderIndex) and part.manifest_identity is not None
    }


def gpus_of(index: object) -> list[str]:
    """Return the GPUs whose memory has a copy of an index, or of a part of it.

    Args:
        index: an index of any kind, which was searched before.

    Returns:
        Different names such as ``"cuda:0"``.
    """
    from tilefold.retrieval.index.dense import TorchIndex
    from tilefold.retrieval.index.on_device import DeviceIndex

    parts = index.parts if isinstance(index, Segments) else [index]
    names: dict[str, None] = {}  # a set in the order of insertion
    for part in parts:
        if isinstance(part, TorchIndex | DeviceIndex):
            names.update(dict.fromkeys(map(str, part.gpus)))
    return list(names)


def mapped_tensors(index: object) -> list[Tensor]:
    """Return the tensors of an index, or of its parts, that may map files into memory.

    Args:
        index: an index of any kind. Only dense indexes keep their files as tensors.
    """
    from tilefold.retrieval.index.dense import DenseIndex

    parts = index.parts if isinstance(index, Segments) else [index]
    return [
        tensor for part in parts if isinstance(part, DenseIndex) for tensor in part.stored_tensors
    ]


def _load_or_reuse(
    parts: Mapping[FileIdentity, FolderIndex],
    backend: str,
    folder: Path,
) -> FolderIndex:
    """Load a part of an index, unless it is open already.

    Args:
        parts: manifest -> open part.
        backend: backend of the index.
        folder: the folder of the part.

    Raises:
        DataError: if the part is damaged.
        FileNotFoundError: if the folder has no manifest.
    """
    manifest = folder / MANIFEST_NAME
    part = parts.get(FileIdentity.of(manifest)) if manifest.is_file() else None
    if part is not None and part.backend == backend:
        return part
    return cast("FolderIndex", backend_class(backend).load(folder))
