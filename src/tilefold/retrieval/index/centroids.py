"""Candidates of late interaction: documents by the centroids nearest to their token vectors.

A document is represented by the set of centroids that are nearest to its tokens, as a learned
sparse vector (ColBERTSaR, SMVE). An exact index has these sets. A query token is compared with its
``n`` nearest centroids only. A document without any of them gets the similarity of the ``n``-th one
(WARP, arXiv 2501.17788)::

    S = q C^T
    estimate(d) = sum over query tokens i of
        the largest S[i, c] over centroids c of d among the n nearest ones of i,
        or the n-th largest S[i, :] if d has none of these
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.index.exact import ExactIndex
from tilefold.retrieval.index.protocol import CANDIDATES_FOLDER, read_array
from tilefold.retrieval.vectors.sparse import SparseVectors

# A function that iterates over a collection. It yields the lengths of some documents, and the fp32
# vectors of all their tokens.
Blocks = Callable[[], Iterator[tuple[npt.NDArray[np.int64], Tensor]]]

_CENTROIDS_FILE = "centroids.npy"
CENTROID_FILES = (_CENTROIDS_FILE, CANDIDATES_FOLDER)
# Smaller collections have no centroids, because their tokens are read in milliseconds.
FEWEST_TOKENS = 1 << 18

# Centroids are in cells: k-means finds the cells, and then the centroids of each cell.
_CENTROIDS_PER_CELL = 128
_TOKENS_PER_CENTROID = 208
_MIN_LOG2_CELLS = 3
_MAX_LOG2_CELLS = 9
# Number of sampled tokens per centroid, and the number of them per cell that the cells are computed
# from.
_SAMPLES_PER_CENTROID = 16
_SAMPLES_PER_CELL = 64
_K_MEANS_ROUNDS = 5
# Number of rows of a product with centroids.
_PRODUCT_ROWS = 1 << 14
# Number of nearest centroids that a query token is compared with, n above.
_CENTROIDS_PER_QUERY_TOKEN = 32


class Centroids:
    """Centroids of the token vectors of a collection, and the documents near each centroid.

    Attributes:
        vectors: the centroids, normalized to unit length, fp32 ``[C, D]``.
        documents: an exact index of N documents whose C terms are the centroids. A document has the
            term of each centroid that is nearest to one of its tokens.
    """

    def __init__(self, vectors: Tensor, documents: ExactIndex) -> None:
        self.vectors = vectors
        self.documents = documents

    @classmethod
    def fit(cls, blocks: Blocks, n_documents: int, n_tokens: int) -> Centroids:
        """Find the centroids of a collection by two-level k-means on a sample of its tokens.

        Args:
            blocks: a function that iterates over the documents. It is called twice.
            n_documents: number of documents, N.
            n_tokens: number of tokens of all documents.
        """
        # Both levels of k-means run on a sample. First, the tokens are divided into cells, then
        # each cell gets its centroids. The number of cells is a power of two.
        log2_cells = round(np.log2(n_tokens / _CENTROIDS_PER_CELL / _TOKENS_PER_CENTROID))
        n_cells = 1 << max(_MIN_LOG2_CELLS, min(log2_cells, _MAX_LOG2_CELLS))
        n_centroids = n_cells * _CENTROIDS_PER_CELL
        generator = torch.Generator().manual_seed(0)
        sampled_fraction = n_centroids * _SAMPLES_PER_CENTROID / n_tokens
        sample = torch.cat(
            [
                vectors[torch.rand(len(vectors), generator=generator) < sampled_fraction].clone()
                for _, vectors in blocks()
            ],
        )
        shuffled = torch.randperm(len(sample), generator=generator)
        cells = _k_means(sample[shuffled[: n_cells * _SAMPLES_PER_CELL]], n_cells)
        sample_cells = _find_nearest(sample, cells)
        centroids_of_cells = []
        for cell in range(n_cells):
            # The center of the cell comes first, so that an empty cell has centroids, too.
            rows = torch.cat([cells[cell, None], sample[sample_cells == cell]])
            centroids_of_cells.append(_k_means(rows, _CENTROIDS_PER_CELL))
        centroids = torch.stack(centroids_of_cells)

        # A sparse vector per document: its terms are the nearest centroids of its tokens.
        counts = []
        terms = []
        for lengths, vectors in blocks():
            documents = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
            nearest = _find_nearest_of_cells(vectors, cells, centroids).numpy()
            # Pairs of a document and a centroid as one number, without repetitions, and ordered by
            # document.
            keys = np.unique(documents * n_centroids + nearest)
            counts.append(np.bincount(keys // n_centroids, minlength=len(lengths)))
            terms.append((keys % n_centroids).astype(np.int32))
        indices = np.concatenate(terms)
        documents_as_sets = SparseVectors(
            [str(row) for row in range(n_documents)],
            offsets_of(np.concatenate(counts)),
            indices,
            np.ones(indices.size, np.float32),
            n_centroids,
        )
        return cls(centroids.flatten(0, 1), ExactIndex.build(documents_as_sets))

    def save(self, folder: Path) -> None:
        """Write the centroids and their documents into the folder of an index."""
        np.save(folder / _CENTROIDS_FILE, self.vectors.numpy())
        self.documents.save(folder / CANDIDATES_FOLDER)

    @classmethod
    def load(cls, folder: Path, dimension: int) -> Centroids | None:
        """Open the centroids in the folder of an index.

        The documents of each centroid are memory-mapped, and checked when they are read.

        Args:
            folder: the folder of the index.
            dimension: number of entries of a token vector, D.

        Returns:
            The centroids, or None if the index has none.
        """
        if not (folder / _CENTROIDS_FILE).exists():
            return None
        documents = ExactIndex.load(folder / CANDIDATES_FOLDER)
        # The terms of this index are the centroids.
        n_centroids = documents.vocab_size
        vectors = read_array(folder / _CENTROIDS_FILE, np.float32, n_centroids, dimension)
        return cls(torch.from_numpy(vectors.copy()), documents)

    def candidates(
        self,
        query: Tensor,
        count: int,
        allowed: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int64]:
        """Find the documents with the highest estimated scores for a query.

        A document's estimate is a sum over the tokens of the query. A token contributes its largest
        similarity to a centroid of the document, among the token's ``n`` nearest centroids. If the
        document has none of these centroids, the token contributes its ``n``-th largest similarity.

        Args:
            query: token vectors, ``[L, D]``.
            count: number of documents. Fewer are returned if fewer are allowed.
            allowed: bool ``[N]``, the documents that may be returned.

        Returns:
            Rows of documents, ascending.
        """
        n_nearest = min(_CENTROIDS_PER_QUERY_TOKEN, len(self.vectors))
        similarities, nearest = (query.float() @ self.vectors.T).topk(n_nearest, dim=1)
        # The n-th similarity is subtracted, so that documents without a nearest centroid gain 0.
        # All estimates decrease by the same amount, so the ranking does not change.
        gains = similarities - similarities[:, -1:]
        # A document may have several of the centroids. In ascending order, its largest gain is
        # assigned last, and replaces the smaller ones.
        ascending_gains = gains.flip(1).numpy()
        ascending_centroids = nearest.flip(1).numpy().astype(np.int32)
        estimates = np.zeros(self.documents.n_documents, np.float32)
        token_gains = np.empty_like(estimates)
        for gains_of_token, centroids in zip(ascending_gains, ascending_centroids, strict=True):
            token_gains.fill(0.0)
            rows_by_centroid = self.documents.documents_of(centroids)
            for gain, rows in zip(gains_of_token, rows_by_centroid, strict=True):
                token_gains[rows] = gain
            estimates += token_gains
        # Estimates are at least 0, so these documents come last.
        estimates[~allowed] = -1.0
        count = min(count, estimates.size)
        # argpartition moves the positions of the `count` highest estimates to the end.
        first_of_highest = estimates.size - count
        best_rows = np.argpartition(estimates, first_of_highest)[first_of_highest:]
        best_rows.sort()
        return best_rows[allowed[best_rows]]


def _k_means(rows: Tensor, count: int) -> Tensor:
    """Find centroids by spherical k-means, which compares vectors by inner products.

    The search starts from evenly spaced rows. A centroid that is nearest to no row does not change.

    Args:
        rows: at least one vector, ``[M, D]``.
        count: number of centroids.

    Returns:
        Centroids ``[count, D]``, normalized to unit length. If there are fewer rows than `count`,
        the centroids are the rows themselves, repeated.
    """
    stride = max(1, len(rows) // count)
    # The modulo repeats the rows if there are fewer than `count`.
    centroids = normalize(rows[torch.arange(count) * stride % len(rows)])
    if len(rows) <= count:
        return centroids
    for _ in range(_K_MEANS_ROUNDS):
        nearest = _find_nearest(rows, centroids)
        sums = torch.zeros_like(centroids).index_add_(0, nearest, rows)
        has_rows = torch.bincount(nearest, minlength=count) > 0
        centroids[has_rows] = normalize(sums[has_rows])
    return centroids


def _find_nearest(rows: Tensor, centroids: Tensor) -> Tensor:
    """Return the centroid with the largest inner product for each row, ``[M]``."""
    return torch.cat([(part @ centroids.T).argmax(1) for part in torch.split(rows, _PRODUCT_ROWS)])


def _find_nearest_of_cells(rows: Tensor, cells: Tensor, centroids: Tensor) -> Tensor:
    """Return the nearest centroid within the nearest cell of each row.

    A row is compared with the centroids of its cell only, which is an approximation, but faster.

    Args:
        rows: vectors ``[M, D]``.
        cells: centers of the cells, ``[n_cells, D]``.
        centroids: centroids of each cell, ``[n_cells, centroids per cell, D]``.

    Returns:
        Positions ``[M]`` in ``centroids.flatten(0, 1)``.
    """
    if not len(rows):
        return torch.zeros(0, dtype=torch.int64)
    nearest_cells = _find_nearest(rows, cells)
    # The rows of a cell are consecutive in `rows_by_cell`. `ends` has their exclusive ends.
    rows_by_cell = nearest_cells.argsort(stable=True)
    ends = torch.bincount(nearest_cells, minlength=len(cells)).cumsum(0).tolist()
    nearest = torch.empty_like(nearest_cells)
    begin = 0
    for cell, end in enumerate(ends):
        if end > begin:
            positions = rows_by_cell[begin:end]
            products = rows[positions] @ centroids[cell].T
            nearest[positions] = products.argmax(1) + cell * _CENTROIDS_PER_CELL
        begin = end
    return nearest
