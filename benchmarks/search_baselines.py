"""Sparse search without an index of tilefold: a product of scipy, an inverted index in numba.

Both read the postings that an exact index has saved, into memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Best = list[tuple[int, float]]  # positions of documents and their scores, best first
Search = Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32], int], Best]


def scipy_product(folder: Path) -> Search:
    """Query times transposed documents as a product of scipy's sparse matrices."""
    from scipy import sparse

    offsets, documents, weights = _postings(folder)
    width = int(documents.max()) + 1
    postings = sparse.csr_matrix((weights, documents, offsets), shape=(len(offsets) - 1, width))

    def search(terms: npt.NDArray[np.int32], values: npt.NDArray[np.float32], k: int) -> Best:
        query = sparse.csr_matrix((values, terms, [0, len(terms)]), shape=(1, len(offsets) - 1))
        scores = query @ postings
        return _best(scores.indices, scores.data, k)

    return search


def numba_postings(folder: Path) -> Search:
    """The postings of the query's terms, one after the other, and then the best of all scores, in
    compiled loops.
    """
    numba: Any = importlib.import_module("numba")
    offsets, documents, weights = _postings(folder)
    scores = np.zeros(int(documents.max()) + 1, np.float32)

    @numba.njit  # type: ignore[untyped-decorator]
    def add(
        scores: Any,
        terms: Any,
        values: Any,
        offsets: Any,
        documents: Any,
        weights: Any,
    ) -> None:  # pragma: no cover - compiled
        for j in range(len(terms)):
            for at in range(offsets[terms[j]], offsets[terms[j] + 1]):
                scores[documents[at]] += values[j] * weights[at]

    @numba.njit  # type: ignore[untyped-decorator]
    def best(scores: Any, found: Any, values: Any) -> None:  # pragma: no cover - compiled
        for at in range(len(scores)):
            place = len(found) - 1
            if scores[at] > values[place]:
                while place > 0 and values[place - 1] < scores[at]:
                    values[place], found[place] = values[place - 1], found[place - 1]
                    place -= 1
                values[place], found[place] = scores[at], at

    def search(terms: npt.NDArray[np.int32], values: npt.NDArray[np.float32], k: int) -> Best:
        scores.fill(0.0)
        add(scores, terms, values, offsets, documents, weights)
        found, highest = np.zeros(k, np.int64), np.zeros(k, np.float32)
        best(scores, found, highest)
        return [
            (int(at), float(score)) for at, score in zip(found, highest, strict=True) if score > 0
        ]

    return search


BASELINES: dict[str, Callable[[Path], Search]] = {"scipy": scipy_product, "numba": numba_postings}


def _postings(folder: Path) -> list[Any]:
    return [
        np.load(folder / f"{name}.npy", allow_pickle=False)
        for name in ("offsets", "documents", "weights")
    ]


def _best(found: npt.NDArray[Any], scores: npt.NDArray[np.float32], k: int) -> Best:
    if scores.size > k:
        top = np.argpartition(scores, scores.size - k)[scores.size - k :]
        found, scores = found[top], scores[top]
    order = np.argsort(-scores)
    return [(int(found[i]), float(scores[i])) for i in order]
