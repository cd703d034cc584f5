"""Sparse indexes with one interface: ``exact`` (numpy), ``seismic`` (approximate, pyseismic-lsr)
and ``qdrant``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from tilefold._internal.arguments import check_choice
from tilefold.retrieval.data.metadata import Metadata
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import Hit, SparseIndex, hits_to_run, read_description
from tilefold.retrieval.index.segments import open_segments
from tilefold.retrieval.vectors.sparse import check_vectors
from tilefold.retrieval.vectors.sparse_files import SparseVectors

__all__ = [
    "BACKENDS",
    "DENSE",
    "LATE",
    "Hit",
    "SparseIndex",
    "build_index",
    "hits_to_run",
    "load_index",
]

BACKENDS = ("exact", "seismic", "qdrant")
DENSE, LATE = "dense", "late"  # backends of indexes of dense vectors, and of token vectors


def _backend(name: str) -> Any:
    return getattr(import_module(f"{__name__}.{name}"), f"{name.capitalize()}Index")


def build_index(
    vectors: SparseVectors,
    backend: str = "exact",
    *,
    metadata: Mapping[str, Mapping[str, object]] | None = None,
    **options: object,
) -> SparseIndex:
    """Build an index of document vectors, with `metadata` (document id -> fields) that
    ``search(where=...)`` reads.

    The backend ``"exact"`` has no options, ``"seismic"`` those of
    :class:`tilefold.retrieval.index.seismic.SeismicOptions`, and ``"qdrant"`` those of
    :meth:`tilefold.retrieval.index.qdrant.index.QdrantIndex.build`. An unknown backend or option, or no
    vector with a positive weight, is a ``ValueError``; a package that is not installed a
    ``MissingPackageError``, other vectors than :class:`tilefold.retrieval.SparseVectors` a
    ``TypeError``.
    """
    check_vectors("vectors", vectors)
    check_choice("backend", backend, BACKENDS)
    kind = _backend(backend)
    if backend == "qdrant":
        return cast("SparseIndex", kind.build(vectors, metadata=metadata, **options))
    built = kind.build(vectors, **options)
    built.metadata = Metadata.of(metadata, vectors.ids, vectors.provenance.passages)
    return cast("SparseIndex", built)


def load_index(path: str | Path) -> SparseIndex:
    """Read a saved index of sparse vectors; a damaged one, or one of a newer schema, is a
    ``DataError``.
    """
    name = read_description(path)["backend"]
    others = {
        "bm25": "BM25. Use BM25Index",
        DENSE: "dense vectors. Use DenseIndex",
        LATE: "tokens. Use LateIndex",
    }
    if other := others.get(name):
        raise DataError(f"{path}: expected an index of sparse vectors, got one of {other}.load.")
    check_choice(f"{path}: backend", name, BACKENDS)
    return cast("SparseIndex", open_parts(path, name))


def open_parts(path: str | Path, backend: str) -> Any:
    """The saved index of a backend of vectors, sparse or not, with its segments."""
    load = _backend(backend).load
    return open_segments(Path(path), load(path), load)
