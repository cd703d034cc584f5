"""Tiled path: sizes of its tiles, what it may hold, and the rows of either side, kept tokens and
their factors.

It holds no more beyond inputs, outputs and what backward saves than is said here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilefold.ops.maxsim._problem import Problem, wide_dtype

# Whatever the lengths, the layout and the pairing, a call holds no more (twice that in fp64), and
# so much per token, sequence and pair; besides, gradients of 16-bit inputs are in fp32 before they
# are rounded, and queries in int8 where the documents are. A row of more than two million numbers
# is not cut.
SCRATCH_BYTES = 96 << 20
BOOKKEEPING_BYTES = 200
TILE_ELEMENTS = (
    1 << 21
)  # similarities of one tile: 8 MiB in fp32, so that it stays in the last-level cache
GROUP_ELEMENTS = (
    1 << 18
)  # of those that are gathered together: 1 MiB in fp32, for the second-level cache
ROW_ELEMENTS = (
    1 << 21
)  # numbers of either side that are copied to fp32 at a time (one row at least)
BLOCK_ROWS = 16384  # document tokens of a tile at most
BLOCK_COLUMNS = 4096  # query tokens of a tile at most
SLAB_ENTRIES = 1 << 19  # (document, query token) winners whose gradients are sorted at a time
# XTR's query tokens of a tile, and its similarities, on the CPU and elsewhere: long rows keep the
# searches of the largest few; and (query token, document) maxima held at a time on the CPU
CPU_TILE = (1024, 1 << 22)
DEVICE_TILE = (4096, 1 << 26)
MAXIMA = 1 << 21
# documents scored at a time for the best of them, and scores of a few queries: [Nq, 65536] or 64 MB
# of them are held; documents of a group, of many
TOPK_DOCUMENTS, TOPK_SCORES, TOPK_GROUP = 65536, 1 << 24, 256


def row_limit(dim: int) -> int:
    """Rows of ``dim`` numbers that may be copied at a time."""
    return max(1, min(BLOCK_ROWS, ROW_ELEMENTS // max(dim, 1)))


def column_limit(dim: int) -> int:
    """Query tokens of a tile at most."""
    return min(BLOCK_COLUMNS, row_limit(dim))


@dataclass(frozen=True)
class Side:
    """The kept tokens of all sequences of one side."""

    rows: Tensor  # [T, D], masked tokens included
    starts: Tensor  # [N] int64 first row and tokens of each sequence, masked ones included
    sizes: Tensor
    offsets: Tensor  # [N] int64 first place in index, and kept tokens, of each sequence
    counts: Tensor
    index: Tensor | None  # [kept] rows of the kept tokens, or None where every token is kept
    scale: Tensor | None  # [T, 1] factors of the rows, or None

    def places(
        self,
        which: Tensor | slice,
        start: int,
        stop: int,
        whole: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """``[n, stop - start]`` numbers of kept tokens of sequences that have one, and which exist
        (``None``: all).
        """
        places, first = (
            torch.arange(start, stop, device=self.counts.device),
            self.offsets[which][:, None],
        )
        if whole:
            return first + places, None
        counts = self.counts[which][:, None]
        return first + torch.minimum(places, counts - 1), places < counts

    def at(self, place: Tensor) -> Tensor:
        """Rows of kept tokens."""
        return place if self.index is None else self.index[place]

    def kept(self, start: int, stop: int) -> Tensor:
        """Kept tokens number ``start`` to ``stop``, ``[.., D]`` in fp32 (fp64), scaled."""
        if self.index is not None:
            return self.take(self.index[start:stop])
        rows = self.rows[start:stop].to(
            wide_dtype(self.rows.dtype),
        )  # no copy of what is wide already
        return rows if self.scale is None else rows * self.scale[start:stop]

    def masked(self, counts: bool) -> Tensor | None:
        """``[N, 1]`` masked tokens of each sequence, ``None`` where there are none or none
        ``counts``.
        """
        return (self.sizes - self.counts)[:, None] if counts and self.index is not None else None

    def rows_at_a_time(self) -> int:
        """Kept tokens that :meth:`kept` may be asked for: a view, where nothing is copied, may have
        any number.
        """
        copied = (
            self.rows.dtype != wide_dtype(self.rows.dtype)
            or self.index is not None
            or self.scale is not None
        )
        return row_limit(self.rows.size(1)) if copied else self.rows.size(0)

    def first_masked(self) -> Tensor:
        """``[N]`` position of the first masked token of each sequence, or a huge number where there
        is none.
        """
        if self.index is None:
            return torch.full_like(self.counts, torch.iinfo(torch.int64).max)
        # kept tokens before the first masked one lie where they would lie if nothing were masked
        shift = (self.starts - self.offsets).repeat_interleave(self.counts)
        in_place = self.index == shift + torch.arange(self.index.numel(), device=shift.device)
        before = pad(in_place.cumsum(0), (1, 0))
        prefix = before[self.offsets + self.counts] - before[self.offsets]
        return torch.where(self.counts < self.sizes, prefix, torch.iinfo(torch.int64).max)

    def take(self, rows: Tensor) -> Tensor:
        """Tokens ``[.., D]`` in fp32 (fp64), scaled."""
        flat = rows.reshape(-1)
        taken = self.rows.index_select(0, flat).to(wide_dtype(self.rows.dtype))
        taken = taken if self.scale is None else taken.mul_(self.scale.index_select(0, flat))
        return taken.view(*rows.shape, taken.size(1))


def _side(
    rows: Tensor,
    mask: Tensor | None,
    cu: Tensor | None,
    length: int,
    normalize: bool,
    scale: Tensor | None,
) -> Side:
    if cu is None:
        starts = torch.arange(0, rows.size(0), length, device=rows.device)
        sizes = torch.full_like(starts, length)
    else:
        starts, sizes = cu[:-1].long(), cu.diff().long()
    if normalize:
        scale = torch.cat(
            [inverse_norms(part) for part in torch.split(rows, row_limit(rows.size(1)))],
        )
    elif scale is not None:
        scale = scale[:, None]
    if mask is None or bool((kept := mask != 0).all()):
        return Side(rows, starts, sizes, starts, sizes, None, scale)
    before = pad(kept.cumsum(0), (1, 0))
    offsets = before[starts]
    return Side(
        rows,
        starts,
        sizes,
        offsets,
        before[starts + sizes] - offsets,
        kept.nonzero().squeeze(1),
        scale,
    )


def inverse_norms(rows: Tensor) -> Tensor:
    """``[T, 1]`` inverse norms in fp32 (fp64); 0 for a zero row, and where the inverse is no number
    of that dtype.
    """
    wide = rows.to(wide_dtype(rows.dtype))
    norm = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    low = torch.finfo(wide.dtype).tiny ** 0.25
    unusual = ~((norm > low) & (norm < 1 / low)).view(-1)  # squares may overflow or vanish
    scale: Tensor = norm.reciprocal_()
    if bool(unusual.any()):  # divided by the largest entry first
        wide = wide[unusual]
        largest = torch.linalg.vector_norm(wide, math.inf, dim=1, keepdim=True)
        inverse = largest.reciprocal() * (wide / largest).square_().sum(dim=1, keepdim=True).rsqrt()
        scale[unusual] = torch.where((largest == 0) | inverse.isinf(), 0, inverse)
    return scale


def sides(problem: Problem) -> tuple[Side, Side]:
    """Queries and documents; reads masks and offsets on the host."""
    p = problem
    return (
        _side(p.queries, p.query_mask, p.cu_queries, p.query_length, p.normalize, p.query_scale),
        _side(
            p.documents,
            p.document_mask,
            p.cu_documents,
            p.document_length,
            p.normalize,
            p.document_scale,
        ),
    )


def pairs(problem: Problem) -> tuple[Tensor, Tensor]:
    """Query and document of each pair, for "grouped" and "index"."""
    if problem.index is not None:
        query, document = problem.index.long().unbind(1)
        return query, document
    document = torch.arange(problem.n_documents, device=problem.documents.device)
    return document // max(problem.group, 1), document
