"""Candidates of late interaction: token vectors by their nearest centroids, as lists of an exact
index.

A document is the set of centroids that are nearest to its tokens, a learned sparse vector
(ColBERTSaR, SMVE). A query token takes its nearest centroids alone, and a document without any of
these counts as the last of them (WARP, arXiv 2501.17788)::

    estimate(d) = sum_i max(S_ic for centroids c of d among the nearest n of q_i, else the n-th S_i)     S = q C^T
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
from tilefold.retrieval.index.protocol import read_array
from tilefold.retrieval.vectors.sparse import SparseVectors

Blocks = Callable[
    [],
    Iterator[tuple[npt.NDArray[np.int64], Tensor]],
]  # lengths of documents, and vectors of all tokens
_VECTORS, _LISTS = "centroids.npy", "candidates"
FILES = (_VECTORS, _LISTS)
FEWEST_TOKENS = 1 << 18  # fewer are read in milliseconds
_TOKENS_EACH = 208  # of a centroid, on average
_PARTS = 128  # centroids of a coarse cell
_MOST_CELLS = 512
_SAMPLES, _COARSE, _ROUNDS = (
    16,
    64,
    5,
)  # tokens per centroid, and per coarse one, and rounds of k-means
_NEAREST = 32  # centroids of a query token
_ROWS = 1 << 14  # that are multiplied at a time


class Centroids:
    """The centroids of a collection's tokens, fp32 ``[C, D]``, and for each the documents that have
    a token there.
    """

    def __init__(self, vectors: Tensor, lists: ExactIndex) -> None:
        self.vectors, self.lists = vectors, lists

    @classmethod
    def of(cls, blocks: Blocks, n_documents: int, n_tokens: int) -> Centroids:
        """K-means in two levels on a sample of the tokens, which are then assigned block by block."""
        cells = 1 << max(
            3,
            min(round(np.log2(n_tokens / _PARTS / _TOKENS_EACH)), _MOST_CELLS.bit_length() - 1),
        )
        wanted = cells * _PARTS * _SAMPLES
        chooser = torch.Generator().manual_seed(0)
        taken = [
            rows[torch.rand(len(rows), generator=chooser) < wanted / n_tokens].clone()
            for _, rows in blocks()
        ]
        sample = torch.cat(taken)
        coarse = _k_means(
            sample[torch.randperm(len(sample), generator=chooser)[: cells * _COARSE]],
            cells,
        )
        which = _nearest(sample, coarse)
        near = (torch.cat([coarse[cell, None], sample[which == cell]]) for cell in range(cells))
        fine = torch.stack([_k_means(rows, _PARTS) for rows in near])
        counts, terms = [], []
        for lengths, vectors in blocks():
            owner = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
            keys = np.unique(owner * (cells * _PARTS) + _assigned(vectors, coarse, fine).numpy())
            counts.append(np.bincount(keys // (cells * _PARTS), minlength=len(lengths)))
            terms.append((keys % (cells * _PARTS)).astype(np.int32))
        indptr, indices = offsets_of(np.concatenate(counts)), np.concatenate(terms)
        ones = np.ones(indices.size, np.float32)
        documents = SparseVectors(
            [str(row) for row in range(n_documents)],
            indptr,
            indices,
            ones,
            cells * _PARTS,
        )
        return cls(fine.flatten(0, 1), ExactIndex.build(documents))

    def save(self, folder: Path) -> None:
        """Write them into the folder of an index."""
        np.save(folder / _VECTORS, self.vectors.numpy())
        self.lists.save(folder / _LISTS)

    @classmethod
    def load(cls, folder: Path, dimension: int) -> Centroids | None:
        """Open those of the folder of an index, if it has some; its lists are mapped, and checked
        when read.
        """
        if not (folder / _VECTORS).exists():
            return None
        lists = ExactIndex.load(folder / _LISTS)
        vectors = read_array(folder / _VECTORS, np.float32, lists.vocab_size, dimension)
        return cls(torch.from_numpy(vectors.copy()), lists)

    def candidates(
        self,
        query: Tensor,
        count: int,
        allowed: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int64]:
        """Positions, rising, of the `count` `allowed` documents with the highest estimates for a
        query ``[L, D]``.
        """
        similar, nearest = (query.float() @ self.vectors.T).topk(
            min(_NEAREST, len(self.vectors)),
            dim=1,
        )
        total = np.zeros(self.lists.n_documents, np.float32)
        best = np.empty_like(total)
        above = similar - similar[:, -1:]
        for gains, terms in zip(
            above.flip(1).numpy(),
            nearest.flip(1).numpy().astype(np.int32),
            strict=True,
        ):
            best.fill(0.0)
            for gain, documents in zip(gains, self.lists.documents_of(terms), strict=True):
                best[documents] = gain  # rising, so that the largest stays
            total += best
        total[~allowed] = -1.0
        count = min(count, total.size)
        found = np.argpartition(total, total.size - count)[total.size - count :]
        found.sort()
        return found[allowed[found]]


def _k_means(rows: Tensor, count: int) -> Tensor:
    """`count` directions ``[count, D]`` of at least one row; without as many rows, some of them
    again.
    """
    centroids = normalize(rows[torch.arange(count) * max(1, len(rows) // count) % len(rows)])
    for _ in range(_ROUNDS if len(rows) > count else 0):
        which = _nearest(rows, centroids)
        sums = torch.zeros_like(centroids).index_add_(0, which, rows)
        there = torch.bincount(which, minlength=count) > 0
        centroids[there] = normalize(sums[there])
    return centroids


def _nearest(rows: Tensor, centroids: Tensor) -> Tensor:
    return torch.cat([(part @ centroids.T).argmax(1) for part in torch.split(rows, _ROWS)])


def _assigned(rows: Tensor, coarse: Tensor, fine: Tensor) -> Tensor:
    """Centroid of each token: the nearest in the nearest coarse cell."""
    if not len(rows):
        return torch.zeros(0, dtype=torch.int64)
    which = _nearest(rows, coarse)
    order = which.argsort(stable=True)
    found = torch.empty_like(which)
    low = 0
    for cell, high in enumerate(torch.bincount(which, minlength=len(coarse)).cumsum(0).tolist()):
        if high > low:
            at = order[low:high]
            found[at] = (rows[at] @ fine[cell].T).argmax(1) + cell * _PARTS
        low = high
    return found
