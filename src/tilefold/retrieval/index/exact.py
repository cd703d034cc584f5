"""Exact search: an inverted index, read from disk as far as queries need it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilefold._files import atomic_directory
from tilefold.retrieval._arrays import check_offsets
from tilefold.retrieval._ranking import top_positive
from tilefold.retrieval._sparse import SparseVectors
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index._postings import ID_FILES, Postings, StoredIds, fastest, save_ids
from tilefold.retrieval.index.protocol import (
    MANIFEST_NAME,
    REMEDY,
    Hit,
    check_buildable,
    check_search,
    read_manifest,
    write_manifest,
)
from tilefold.retrieval.provenance import Provenance

__all__ = ["ExactIndex"]

_OFFSETS, _DOCUMENTS, _WEIGHTS, _CHECKSUMS = "offsets.npy", "documents.npy", "weights.npy", "checksums.npy"
_LARGE = (_DOCUMENTS, _WEIGHTS)  # checked term by term, when a query reads them
_OWN_NAMES = (MANIFEST_NAME, *ID_FILES, _OFFSETS, _CHECKSUMS, *_LARGE)


class ExactIndex:
    """Term-at-a-time exact inner products: the ground truth for approximate backends.

    For every term the postings are the documents, ascending, and their weights; a query adds the postings of
    its terms, ascending, to one float32 score per document. Results do not depend on batch, threads or packages; equal
    scores are in document order. Time grows with the postings read and the number of documents. Disk holds 8 bytes per
    weight; memory, what the queries of a loaded index have read of that, and 4 bytes per document.
    """

    backend: ClassVar[str] = "exact"

    def __init__(self, ids: Sequence[str], postings: Postings, fingerprint: str | None, provenance: Provenance) -> None:
        self._ids, self._postings = ids, postings
        self.n_documents, self.vocab_size = len(ids), postings.n_terms
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
        return cls(list(vectors.ids), Postings.of(vectors), vectors.fingerprint, vectors.provenance)

    def search(self, queries: SparseVectors, k: int) -> list[list[Hit]]:
        """See :class:`SparseIndex`. Products that underflow float32 to 0 count as no shared term.

        Raises:
            ValueError: ``k < 1``.
            VocabularyMismatchError: the queries are over another vocabulary.
            DataError: the index was loaded, and a part of it that is read for the first time is damaged.
        """
        check_search(self, queries, k)
        scores = np.empty(self.n_documents, np.float32)
        results: list[list[Hit]] = []
        for i in range(len(queries)):
            scores.fill(0.0)
            self._postings.add(scores, *queries.row(i))
            results.append([Hit(self._ids[at], float(scores[at])) for at in top_positive(scores, k)])
        return results

    def save(self, path: str | Path) -> None:
        """Write the index as a directory of ``.npy`` files and JSON; only an earlier exact index is replaced."""
        postings = self._postings
        arrays: dict[str, npt.NDArray[Any]] = {
            _OFFSETS: postings.offsets,
            _DOCUMENTS: postings.documents,
            _WEIGHTS: postings.weights,
            _CHECKSUMS: postings.all_checksums(),
        }
        with atomic_directory(Path(path), own_names=_OWN_NAMES) as folder:
            for name, values in arrays.items():
                np.save(folder / name, values, allow_pickle=False)
            save_ids(self._ids, folder)
            write_manifest(folder, self, {"numpy": np.__version__}, {})

    @classmethod
    def load(cls, path: str | Path) -> ExactIndex:
        """Open an index that :meth:`save` wrote; its arrays are memory-mapped.

        The postings of a term are read, and compared with their checksum, when a query asks for them.

        Raises:
            FileNotFoundError, DataError: no index there, or a damaged one.
        """
        folder = Path(path)
        manifest = read_manifest(folder, cls.backend, unread=_LARGE)
        count, size = manifest["n_documents"], manifest["vocab_size"]
        offsets = _array(folder / _OFFSETS, np.int64, size + 1)
        try:
            check_offsets(offsets, int(offsets[-1]), "offsets")
        except DataError as error:
            raise DataError(f"{folder / _OFFSETS}: {error} {REMEDY}") from error
        fastest()  # its import is not part of the first query
        postings = Postings(
            offsets,
            _array(folder / _DOCUMENTS, np.int32, int(offsets[-1])),
            _array(folder / _WEIGHTS, np.float32, int(offsets[-1])),
            count,
            _array(folder / _CHECKSUMS, np.uint32, size),
        )
        return cls(StoredIds.load(folder, count), postings, manifest.get("fingerprint"), Provenance.from_dict(manifest))


def _array(file: Path, dtype: Any, size: int) -> npt.NDArray[Any]:
    """The flat array in `file`, memory-mapped."""
    try:
        values = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file}: expected an array of an exact index, got ({error}). {REMEDY}") from error
    if values.shape != (size,) or values.dtype != np.dtype(dtype):
        raise DataError(
            f"{file}: expected {size} numbers of {np.dtype(dtype)}, got {values.dtype} of shape {values.shape}. "
            + REMEDY
        )
    return values
