"""Opening a saved index of any backend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from tilefold.retrieval.index import DENSE, LATE, SparseIndex, load_index, open_with_segments
from tilefold.retrieval.index.bm25 import BM25Index
from tilefold.retrieval.index.generations import open_current

if TYPE_CHECKING:
    from tilefold.retrieval.index.dense import DenseIndex
    from tilefold.retrieval.index.late import LateIndex

__all__ = ["open_index"]


def open_index(path: str | Path) -> SparseIndex | BM25Index | DenseIndex | LateIndex:
    """Open a saved index of any backend: sparse, BM25, dense or late interaction.

    If an update or a merge commits another generation meanwhile, the index is opened again, so that
    all its files are of one generation.

    Args:
        path: the folder of the index.

    Raises:
        DataError: if the folder is not an index, is damaged, or was written by a newer release.
    """
    return open_current(path, lambda generation: _open(path, generation.backend))


def _open(
    path: str | Path,
    backend: str,
) -> SparseIndex | BM25Index | DenseIndex | LateIndex:
    """Open a saved index.

    Args:
        path: the folder of the index.
        backend: the backend of the index.
    """
    if backend in (DENSE, LATE):
        return cast("DenseIndex | LateIndex", open_with_segments(path, backend))
    if backend == BM25Index.backend:
        return BM25Index.load(path)
    return load_index(path)
