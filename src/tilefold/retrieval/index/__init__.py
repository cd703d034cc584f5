"""Sparse indexes with one interface.

The backends are ``exact`` (numpy), ``seismic`` (approximate, pyseismic-lsr) and ``qdrant``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
# Backends of indexes of dense vectors, and of token vectors.
DENSE = "dense"
LATE = "late"


def backend_class(name: str) -> Any:
    """Import the index class of a backend, such as ``exact.ExactIndex``."""
    return getattr(import_module(f"{__name__}.{name}"), f"{name.capitalize()}Index")


def build_index(
    vectors: SparseVectors,
    backend: str = "exact",
    *,
    metadata: Mapping[str, Mapping[str, object]] | None = None,
    **options: object,
) -> SparseIndex:
    """Build an index of document vectors.

    Args:
        vectors: sparse vectors of the documents.
        backend: ``"exact"``, ``"seismic"`` or ``"qdrant"``.
        metadata: document id -> fields, which ``search(where=...)`` filters by.
        options: options of the backend. ``"exact"`` has no options. Those of ``"seismic"`` are the
            fields of :class:`tilefold.retrieval.index.seismic.SeismicOptions`. Those of
            ``"qdrant"`` are the arguments of
            :meth:`tilefold.retrieval.index.qdrant.index.QdrantIndex.build`.

    Raises:
        ValueError: if the backend or an option is unknown, or if no weight is positive.
        MissingPackageError: if the package of the backend is not installed.
        TypeError: if `vectors` are not :class:`tilefold.retrieval.SparseVectors`.

    Examples:
        >>> from tilefold.retrieval import SparseVectors
        >>> documents = SparseVectors.from_rows({"d1": {0: 1.0}, "d2": {0: 2.0}}, vocab_size=3)
        >>> index = build_index(documents, metadata={"d1": {"lang": "en"}, "d2": {"lang": "de"}})
        >>> queries = SparseVectors.from_rows({"q1": {0: 1.0}}, vocab_size=3)
        >>> [(hit.id, hit.score) for hit in index.search(queries, k=2)[0]]
        [('d2', 2.0), ('d1', 1.0)]
        >>> [hit.id for hit in index.search(queries, k=2, where={"lang": "en"})[0]]
        ['d1']
    """
    check_vectors("vectors", vectors)
    check_choice("backend", backend, BACKENDS)
    index_type = backend_class(backend)
    if backend == "qdrant":
        # The build of a Qdrant collection stores the metadata as payloads of its documents.
        return cast("SparseIndex", index_type.build(vectors, metadata=metadata, **options))
    index = index_type.build(vectors, **options)
    index.metadata = Metadata.from_fields(metadata, vectors.ids, vectors.provenance.passages)
    return cast("SparseIndex", index)


def load_index(path: str | Path) -> SparseIndex:
    """Open a saved index of sparse vectors.

    Args:
        path: the folder of the index.

    Raises:
        DataError: if the index is damaged, was written by a newer release, or has dense vectors,
            token vectors or words (BM25) instead.

    Examples:
        >>> from tilefold.retrieval import SparseVectors, build_index
        >>> documents = SparseVectors.from_rows({"d1": {0: 1.0}, "d2": {0: 2.0}}, vocab_size=3)
        >>> build_index(documents).save("sparse-index")
        >>> list(load_index("sparse-index").ids)
        ['d1', 'd2']
    """
    backend = read_description(path)["backend"]
    # Backend without sparse vectors -> contents of its indexes, and the class that opens them.
    backends_without_sparse_vectors = {
        "bm25": ("BM25", "BM25Index"),
        DENSE: ("dense vectors", "DenseIndex"),
        LATE: ("tokens", "LateIndex"),
    }
    if backend in backends_without_sparse_vectors:
        contents, class_name = backends_without_sparse_vectors[backend]
        raise DataError(
            f"{path}: expected an index of sparse vectors, got one of {contents}. "
            f"Use {class_name}.load.",
        )
    check_choice(f"{path}: backend", backend, BACKENDS)
    return cast("SparseIndex", open_with_segments(path, backend))


def open_with_segments(
    path: str | Path,
    backend: str,
    load: Callable[[Path], Any] | None = None,
) -> Any:
    """Open a saved index with its segments, which are the parts that updates have added to it.

    Args:
        path: the folder of the index.
        backend: a backend of sparse, dense or token vectors.
        load: function that loads the index or a segment from its folder; None loads all files.
    """
    if load is None:
        load = backend_class(backend).load
    return open_segments(Path(path), load(Path(path)), load)
