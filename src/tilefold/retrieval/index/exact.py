"""Exact search: an inverted index in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilefold._files import atomic_directory, write_json
from tilefold.retrieval._ranking import top_positive
from tilefold.retrieval._sparse import SparseVectors
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import (
    MANIFEST_NAME,
    Hit,
    check_buildable,
    check_search,
    read_ids,
    read_manifest,
    write_manifest,
)
from tilefold.retrieval.provenance import Provenance

__all__ = ["ExactIndex"]

_ARRAYS = ("offsets", "documents", "weights")
_OWN_NAMES = (MANIFEST_NAME, "ids.json", *(f"{name}.npy" for name in _ARRAYS))


class ExactIndex:
    """Term-at-a-time exact inner products: the ground truth for approximate backends.

    For every term the postings are the documents, ascending, and their weights; a query adds the postings of
    its terms, ascending, to one float32 score per document. Results do not depend on batch or threads; equal
    scores are in document order. Time grows with the postings read and the number of documents; memory is
    8 bytes per weight and 8 bytes per term.
    """

    backend: ClassVar[str] = "exact"

    def __init__(
        self,
        ids: list[str],
        offsets: npt.NDArray[np.int64],
        documents: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        fingerprint: str | None,
        provenance: Provenance,
    ) -> None:
        self._ids = ids
        self._offsets, self._documents, self._weights = offsets, documents, weights
        self.n_documents, self.vocab_size = len(ids), len(offsets) - 1
        self.fingerprint, self.provenance = fingerprint, provenance

    @classmethod
    def build(cls, vectors: SparseVectors, **options: Any) -> ExactIndex:
        """Transpose `vectors`; there are no options. Zero weights are dropped.

        Raises:
            ValueError: no vector has a positive weight, or options are given.
        """
        if options:
            raise ValueError(f"options: the exact index has none, got {', '.join(sorted(options))}.")
        check_buildable(vectors)
        keep = vectors.data > 0
        rows = np.repeat(np.arange(len(vectors), dtype=np.int32), np.diff(vectors.indptr))[keep]
        terms, weights = vectors.indices[keep], vectors.data[keep]
        order = np.argsort(terms, kind="stable")
        counts = np.bincount(terms, minlength=vectors.vocab_size)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        return cls(list(vectors.ids), offsets, rows[order], weights[order], vectors.fingerprint, vectors.provenance)

    def search(self, queries: SparseVectors, k: int) -> list[list[Hit]]:
        """See :class:`SparseIndex`. Products that underflow float32 to 0 count as no shared term.

        Raises:
            ValueError: ``k < 1``.
            VocabularyMismatchError: the queries are over another vocabulary.
        """
        check_search(self, queries, k)
        scores = np.zeros(self.n_documents, dtype=np.float32)
        results: list[list[Hit]] = []
        for i in range(len(queries)):
            scores.fill(0.0)
            terms, weights = queries.row(i)
            for term, weight in zip(terms.tolist(), weights, strict=True):
                low, high = self._offsets[term], self._offsets[term + 1]
                np.add.at(scores, self._documents[low:high], weight * self._weights[low:high])
            results.append([Hit(self._ids[at], float(scores[at])) for at in top_positive(scores, k)])
        return results

    def save(self, path: str | Path) -> None:
        """Write the index as a directory of ``.npy`` and JSON files; only an earlier exact index is replaced."""
        with atomic_directory(Path(path), own_names=_OWN_NAMES) as folder:
            np.save(folder / "offsets.npy", self._offsets, allow_pickle=False)
            np.save(folder / "documents.npy", self._documents, allow_pickle=False)
            np.save(folder / "weights.npy", self._weights, allow_pickle=False)
            write_json(folder / "ids.json", {"ids": self._ids})
            write_manifest(folder, self, {"numpy": np.__version__}, {})

    @classmethod
    def load(cls, path: str | Path) -> ExactIndex:
        """Read an index that :meth:`save` wrote; its arrays are memory-mapped.

        Raises:
            FileNotFoundError, DataError: no index there, or a damaged one.
        """
        folder = Path(path)
        manifest = read_manifest(folder, cls.backend)
        ids = read_ids(folder / "ids.json", manifest["n_documents"])
        try:
            offsets, documents, weights = (
                np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)) for name in _ARRAYS
            )
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{folder}: expected the arrays of an exact index, got ({error}).") from error
        fits = (
            offsets.shape == (manifest["vocab_size"] + 1,)
            and documents.shape == weights.shape == (int(offsets[-1]),)
            and documents.dtype == np.dtype(np.int32)
            and weights.dtype == np.dtype(np.float32)
        )
        if not fits:
            raise DataError(f"{folder}: arrays do not fit together. Build the index again (tilefold index).")
        origin = Provenance.from_dict(manifest)
        return cls(ids, offsets, documents, weights, manifest.get("fingerprint"), origin)
