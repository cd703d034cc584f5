"""Postings on a device, cut into blocks of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 8192  # documents of a block, whose sums are in shared memory: 32 KB
PIECE = 1 << 25  # postings that are put in their places at a time


@dataclass(frozen=True)
class BlockedPostings:
    """Postings of blocks of 8,192 documents one after the other, those of a block by term and
    document.

    Attributes:
        offsets: ``[blocks * V + 1]`` int64: of block `b` and term `t` from ``offsets[b * V + t]``
            to the next.
        places: ``[nnz]`` int16, documents counted from the first of their block.
        weights: ``[nnz]`` fp32, positive.
        largest: ``[V]`` fp32 largest weight of each term, 0 without one.
        counts: ``[V]`` int64 documents of each term.
        n_documents: how many there are.
    """

    offsets: Tensor
    places: Tensor
    weights: Tensor
    largest: Tensor
    counts: Tensor
    n_documents: int

    @property
    def n_terms(self) -> int:
        return self.largest.numel()

    @property
    def n_blocks(self) -> int:
        return -(-self.n_documents // BLOCK)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(
            x.numel() * x.element_size()
            for x in (self.offsets, self.places, self.weights, self.largest)
        )

    @classmethod
    def of(
        cls,
        offsets: Tensor,
        documents: Tensor,
        weights: Tensor,
        n_documents: int,
        device: torch.device | str,
    ) -> BlockedPostings:
        """From lists of terms: ``documents[offsets[t]:offsets[t + 1]]``, rising, and their positive
        weights.

        Takes 6 bytes per posting and 8 per block and term on `device`, and less than 2 GB besides
        while it is made.
        """
        device, n_terms = torch.device(device), offsets.numel() - 1
        blocks = -(-n_documents // BLOCK)
        counts = offsets.diff().to(device)
        inside = torch.zeros(blocks * n_terms, dtype=torch.int64, device=device)
        for _, _, keys, _, _ in _pieces(offsets, documents, weights, n_terms, device):
            inside += torch.bincount(keys, minlength=inside.numel())
        starts = torch.nn.functional.pad(inside.cumsum(0), (1, 0))
        # what is added to a posting's place in the list of its term
        inside = inside.view(blocks, n_terms)
        shift = (
            inside.cumsum(0)
            .sub_(inside)
            .add_(offsets[:-1].to(device))
            .neg_()
            .add_(starts[:-1].view_as(inside))
        )
        places = torch.empty(documents.numel(), dtype=torch.int16, device=device)
        values = torch.empty(documents.numel(), dtype=torch.float32, device=device)
        largest = torch.zeros(n_terms, dtype=torch.float32, device=device)
        for low, terms, keys, rows, part in _pieces(offsets, documents, weights, n_terms, device):
            at = shift.view(-1)[keys] + torch.arange(low, low + keys.numel(), device=device)
            places[at] = (rows % BLOCK).to(torch.int16)
            values[at] = part
            largest.scatter_reduce_(0, terms, part, "amax")
        return cls(starts, places, values, largest, counts, n_documents)


def _pieces(
    offsets: Tensor,
    documents: Tensor,
    weights: Tensor,
    n_terms: int,
    device: torch.device,
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
    """First posting, terms, blocks and terms as one number, documents and weights of pieces of the
    lists.
    """
    ends = offsets[1:].to(device).contiguous()
    for low in range(0, documents.numel(), PIECE):
        rows = documents[low : low + PIECE].to(device).long()
        terms = torch.searchsorted(
            ends,
            torch.arange(low, low + rows.numel(), device=device),
            right=True,
        )
        yield (
            low,
            terms,
            rows // BLOCK * n_terms + terms,
            rows,
            weights[low : low + PIECE].to(device),
        )
