"""Sparse search without an index of tilefold: a product of scipy, and an inverted index in numba.

Both load the postings that an exact index has saved.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# positions of documents and their scores, best first
Best = list[tuple[int, float]]
# a function of terms, their weights and the number of documents to return
Search = Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32], int], Best]


def scipy_product(folder: Path) -> Search:
    """Return a search by a product of scipy's sparse matrices: the query and the documents."""
    from scipy import sparse

    offsets, documents, weights = _load_postings(folder)
    vocab_size = len(offsets) - 1
    n_documents = int(documents.max()) + 1
    postings = sparse.csr_matrix((weights, documents, offsets), shape=(vocab_size, n_documents))

    def search(terms: npt.NDArray[np.int32], values: npt.NDArray[np.float32], k: int) -> Best:
        query = sparse.csr_matrix((values, terms, [0, len(terms)]), shape=(1, vocab_size))
        scores = query @ postings
        return _select_best(scores.indices, scores.data, k)

    return search


def numba_postings(folder: Path) -> Search:
    """Return a search by compiled loops over the postings of the query's terms.

    Args:
        folder: the folder with the postings.

    Returns:
        A function of a query's terms and weights, and of the number of documents to return.
    """
    numba: Any = importlib.import_module("numba")
    offsets, documents, weights = _load_postings(folder)
    scores = np.zeros(int(documents.max()) + 1, np.float32)

    @numba.njit  # type: ignore[untyped-decorator]
    def add_scores(
        scores: Any,
        terms: Any,
        values: Any,
        offsets: Any,
        documents: Any,
        weights: Any,
    ) -> None:  # pragma: no cover - compiled
        for j in range(len(terms)):
            for posting in range(offsets[terms[j]], offsets[terms[j] + 1]):
                scores[documents[posting]] += values[j] * weights[posting]

    @numba.njit  # type: ignore[untyped-decorator]
    def select_best(
        scores: Any,
        best_documents: Any,
        best_scores: Any,
    ) -> None:  # pragma: no cover - compiled
        # a sorted list of the best so far, into which a better document is inserted
        for document in range(len(scores)):
            rank = len(best_documents) - 1
            if scores[document] > best_scores[rank]:
                while rank > 0 and best_scores[rank - 1] < scores[document]:
                    best_scores[rank] = best_scores[rank - 1]
                    best_documents[rank] = best_documents[rank - 1]
                    rank -= 1
                best_scores[rank] = scores[document]
                best_documents[rank] = document

    def search(terms: npt.NDArray[np.int32], values: npt.NDArray[np.float32], k: int) -> Best:
        scores.fill(0.0)
        add_scores(scores, terms, values, offsets, documents, weights)
        best_documents = np.zeros(k, np.int64)
        best_scores = np.zeros(k, np.float32)
        select_best(scores, best_documents, best_scores)
        return [
            (int(document), float(score))
            for document, score in zip(best_documents, best_scores, strict=True)
            if score > 0
        ]

    return search


BASELINES: dict[str, Callable[[Path], Search]] = {"scipy": scipy_product, "numba": numba_postings}


def _load_postings(folder: Path) -> list[Any]:
    """Load the offsets ``[V + 1]``, documents and weights of an exact index."""
    return [
        np.load(folder / f"{name}.npy", allow_pickle=False)
        for name in ("offsets", "documents", "weights")
    ]


def _select_best(documents: npt.NDArray[Any], scores: npt.NDArray[np.float32], k: int) -> Best:
    """Return the ``k`` documents with the highest scores, best first."""
    if scores.size > k:
        first_of_best = scores.size - k
        best = np.argpartition(scores, first_of_best)[first_of_best:]
        documents, scores = documents[best], scores[best]
    order = np.argsort(-scores)
    return [(int(documents[i]), float(scores[i])) for i in order]
