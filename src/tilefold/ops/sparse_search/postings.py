"""Postings of sparse vectors on a device, divided into blocks of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.plan import cdiv

BLOCK = 8192  # documents of a block, whose sums are in shared memory: 32 KB
SLAB = 1 << 25  # postings that are sorted into blocks at a time


@dataclass(frozen=True)
class BlockedPostings:
    """Postings in blocks of 8,192 documents, and in each block by term and document.

    Attributes:
        offsets: ``[blocks * V + 1]`` int64. Postings of block `b` and term `t` are
            ``offsets[b * V + t]`` to the next offset.
        local_documents: ``[nnz]`` int16 documents, counted from the first one of their block.
        weights: ``[nnz]`` fp32, positive.
        largest: ``[V]`` fp32 largest weight of each term, 0 for a term without postings.
        counts: ``[V]`` int64 number of documents of each term.
        term_order: ``[V]`` int32 terms, those of most documents first; lower terms first among
            equal ones.
        n_documents: number of documents.
    """

    offsets: Tensor
    local_documents: Tensor
    weights: Tensor
    largest: Tensor
    counts: Tensor
    term_order: Tensor
    n_documents: int

    @property
    def n_terms(self) -> int:
        """Size of the vocabulary."""
        return self.largest.numel()

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return cdiv(self.n_documents, BLOCK)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (self.offsets, self.local_documents, self.weights, self.largest)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @classmethod
    def of(
        cls,
        offsets: Tensor,
        documents: Tensor,
        weights: Tensor,
        n_documents: int,
        device: torch.device | str,
    ) -> BlockedPostings:
        """Make blocked postings from one list of documents for each term.

        They take 6 bytes per posting and 8 bytes per block and term on ``device``. Sorting them
        takes up to 2 GB more.

        Args:
            offsets: ``[V + 1]`` int64. The list of term `t` is ``offsets[t]`` to
                ``offsets[t + 1]``.
            documents: ``[nnz]`` documents, ascending in each list.
            weights: ``[nnz]`` positive weights.
            n_documents: number of documents.
            device: device of the postings.
        """
        device = torch.device(device)
        n_terms = offsets.numel() - 1
        n_blocks = cdiv(n_documents, BLOCK)
        n_postings = documents.numel()
        document_counts = offsets.diff().to(device)
        key_counts = torch.zeros(n_blocks * n_terms, dtype=torch.int64, device=device)
        for slab in _copy_by_slab(offsets, documents, weights, n_terms, device):
            key_counts += torch.bincount(slab.keys, minlength=key_counts.numel())
        starts = torch.nn.functional.pad(key_counts.cumsum(0), (1, 0))
        # The list of a term is divided by block. Added to the position of a posting in the lists,
        # the shift of its block and term gives its position in the blocked postings. It is computed
        # in place, because it takes 8 bytes per block and term.
        by_block = key_counts.view(n_blocks, n_terms)
        shift = by_block.cumsum(0).sub_(by_block)  # postings of the term in earlier blocks
        shift.add_(offsets[:-1].to(device))  # the position in the lists
        shift.neg_().add_(starts[:-1].view_as(by_block))
        shift = shift.view(-1)
        local_documents = torch.empty(n_postings, dtype=torch.int16, device=device)
        values = torch.empty(n_postings, dtype=torch.float32, device=device)
        largest = torch.zeros(n_terms, dtype=torch.float32, device=device)
        for slab in _copy_by_slab(offsets, documents, weights, n_terms, device):
            end = slab.start + slab.keys.numel()
            positions = shift[slab.keys] + torch.arange(slab.start, end, device=device)
            local_documents[positions] = (slab.documents % BLOCK).to(torch.int16)
            values[positions] = slab.weights
            largest.scatter_reduce_(0, slab.terms, slab.weights, "amax")
        return cls(
            offsets=starts,
            local_documents=local_documents,
            weights=values,
            largest=largest,
            counts=document_counts,
            term_order=document_counts.argsort(descending=True, stable=True).int(),
            n_documents=n_documents,
        )


class _Slab(NamedTuple):
    """Consecutive postings of the lists of terms, on the device.

    Attributes:
        start: number of the first posting.
        terms: term of each posting.
        keys: block and term of each posting as one number, ``block * V + term``.
        documents: document of each posting.
        weights: weight of each posting.
    """

    start: int
    terms: Tensor
    keys: Tensor
    documents: Tensor
    weights: Tensor


def _copy_by_slab(
    offsets: Tensor,
    documents: Tensor,
    weights: Tensor,
    n_terms: int,
    device: torch.device,
) -> Iterator[_Slab]:
    """Copy the postings to the device, ``SLAB`` of them at a time.

    Args:
        offsets: ``[V + 1]``, where the postings of each term begin.
        documents: ``[nnz]`` document of each posting.
        weights: ``[nnz]`` weight of each posting.
        n_terms: V.
        device: device of the slabs.
    """
    term_ends = offsets[1:].to(device).contiguous()
    for start in range(0, documents.numel(), SLAB):
        slab_documents = documents[start : start + SLAB].to(device).long()
        positions = torch.arange(start, start + slab_documents.numel(), device=device)
        # The term of a posting is the number of terms whose postings end at or before it.
        terms = torch.searchsorted(term_ends, positions, right=True)
        blocks = slab_documents // BLOCK
        yield _Slab(
            start=start,
            terms=terms,
            keys=blocks * n_terms + terms,
            documents=slab_documents,
            weights=weights[start : start + SLAB].to(device),
        )
