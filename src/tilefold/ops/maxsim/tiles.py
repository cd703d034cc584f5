"""Sizes of the tiles of the tiled path, the tokens of queries and documents, and sums of rows.

The constants bound the memory that the tiled path holds apart from inputs, outputs and what
backward saves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from tilefold.ops.maxsim._problem import Problem, wide_dtype

# A call holds at most SCRATCH_BYTES (twice that in fp64), and BOOKKEEPING_BYTES per token, sequence
# and pair, whatever the lengths, the layout and the pairing. Three things come on top: gradients
# of 16-bit inputs are summed in fp32 before they are rounded, queries are also stored in int8 if
# the documents are int8, and a row of more than two million numbers is not split.
SCRATCH_BYTES = 96 << 20
BOOKKEEPING_BYTES = 200

# Similarities of a tile: 8 MiB in fp32, so that they stay in the last-level cache.
TILE_ELEMENTS = 1 << 21
# Similarities that are gathered together: 1 MiB in fp32, for the second-level cache.
GROUP_ELEMENTS = 1 << 18
# Numbers of queries or documents that are copied to fp32 at a time, but at least one row.
ROW_ELEMENTS = 1 << 21
# Largest numbers of document tokens and of query tokens of a tile.
BLOCK_ROWS = 16384
BLOCK_COLUMNS = 4096
# Winners of (document, query token) whose gradients are sorted at a time.
SLAB_ENTRIES = 1 << 19

# Query tokens and similarities of a tile of XTR scores. Rows are long there, since a search for the
# largest few of a row costs less per entry in a long one.
CPU_TILE = (1024, 1 << 22)
DEVICE_TILE = (4096, 1 << 26)
# Maxima of (query token, document) that XTR scores hold at a time on the CPU.
MAXIMA = 1 << 21

# `maxsim_topk` scores TOPK_DOCUMENTS at a time, or more for few queries, as long as there are at
# most TOPK_SCORES scores.
TOPK_DOCUMENTS = 65536
TOPK_SCORES = 1 << 24
# Documents of a group: the best documents are in the groups with the highest best scores.
TOPK_GROUP = 256

NEVER = torch.iinfo(torch.int64).max  # a position past the end of any sequence


def row_limit(dim: int) -> int:
    """Return the number of rows of ``dim`` numbers that may be copied at a time."""
    return max(1, min(BLOCK_ROWS, ROW_ELEMENTS // max(dim, 1)))


def column_limit(dim: int) -> int:
    """Return the largest number of query tokens of a tile."""
    return min(BLOCK_COLUMNS, row_limit(dim))


@dataclass(frozen=True)
class SequenceTokens:
    """Unmasked tokens of all queries, or of all documents.

    Unmasked tokens are numbered over all sequences. Without a mask, the number of a token is its
    row.

    Attributes:
        rows: ``[T, D]`` token vectors, masked ones included.
        starts: ``[N]`` int64 first row of each sequence.
        sizes: ``[N]`` int64 number of tokens of each sequence, masked ones included.
        offsets: ``[N]`` int64 number of the first unmasked token of each sequence.
        counts: ``[N]`` int64 number of unmasked tokens of each sequence.
        unmasked_rows: rows of the unmasked tokens, or ``None`` if no token is masked.
        scale: ``[T, 1]`` factors of the rows, or ``None``.
        vector_dtype: fp32 or fp64, the dtype of products. Rows of either side are converted to it.
    """

    rows: Tensor
    starts: Tensor
    sizes: Tensor
    offsets: Tensor
    counts: Tensor
    unmasked_rows: Tensor | None
    scale: Tensor | None
    vector_dtype: torch.dtype

    @cached_property
    def sequence_of_row(self) -> Tensor:
        """``[T]`` sequence of each row."""
        sequences = torch.arange(self.sizes.numel(), device=self.sizes.device)
        return sequences.repeat_interleave(self.sizes)

    def token_numbers(
        self,
        sequences: Tensor | slice,
        start: int,
        stop: int,
        all_exist: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the numbers of the unmasked tokens ``start`` to ``stop`` of some sequences.

        The number of a token counts the unmasked tokens of all sequences before it.

        Args:
            sequences: ``n`` sequences, each with at least one unmasked token.
            start: first unmasked token, counted from 0 in each sequence.
            stop: end of the unmasked tokens.
            all_exist: whether every sequence has at least ``stop`` unmasked tokens.

        Returns:
            The numbers ``[n, stop - start]``, and a mask ``[n, stop - start]`` of the tokens that
            exist. The mask is ``None`` if all exist. Past the end of a sequence, the number of its
            last token is repeated.
        """
        positions = torch.arange(start, stop, device=self.counts.device)
        first_numbers = self.offsets[sequences][:, None]
        if all_exist:
            return first_numbers + positions, None
        counts = self.counts[sequences][:, None]
        return first_numbers + torch.minimum(positions, counts - 1), positions < counts

    def all_offsets(self) -> list[int]:
        """Return the number of the first unmasked token of each sequence, and the total."""
        return [*self.offsets.tolist(), int(self.counts.sum())]

    def rows_of(self, token_numbers: Tensor) -> Tensor:
        """Return the rows of unmasked tokens that are given by their numbers."""
        return token_numbers if self.unmasked_rows is None else self.unmasked_rows[token_numbers]

    def vectors(self, start: int, stop: int) -> Tensor:
        """Return the scaled vectors of the unmasked tokens ``start`` to ``stop``.

        They are ``[n, D]`` in ``vector_dtype``. The result is a view if nothing is masked,
        converted or scaled.
        """
        if self.unmasked_rows is not None:
            return self.gather(self.unmasked_rows[start:stop])
        rows = self.rows[start:stop].to(self.vector_dtype)
        return rows if self.scale is None else rows * self.scale[start:stop]

    def gather(self, rows: Tensor) -> Tensor:
        """Return the scaled vectors of rows of any shape, ``[.., D]`` in ``vector_dtype``."""
        flat_rows = rows.reshape(-1)
        vectors = self.rows.index_select(0, flat_rows).to(self.vector_dtype)
        if self.scale is not None:
            vectors = vectors.mul_(self.scale.index_select(0, flat_rows))
        return vectors.view(*rows.shape, vectors.size(1))

    def vectors_limit(self) -> int:
        """Return the largest number of tokens to call :meth:`vectors` for.

        It is limited only if :meth:`vectors` copies them.
        """
        copied = (
            self.rows.dtype != self.vector_dtype
            or self.unmasked_rows is not None
            or self.scale is not None
        )
        return row_limit(self.rows.size(1)) if copied else self.rows.size(0)

    def masked_counts(self) -> Tensor | None:
        """Count the masked tokens of each sequence: ``[N, 1]``, or ``None`` if there are none."""
        if self.unmasked_rows is None:
            return None
        return (self.sizes - self.counts)[:, None]

    def first_masked_positions(self) -> Tensor:
        """Return the position of the first masked token of each sequence.

        Returns:
            int64 ``[N]``, ``NEVER`` for a sequence without masked tokens.
        """
        first_positions = torch.full_like(self.counts, NEVER)
        if self.unmasked_rows is None:
            return first_positions
        rows = torch.arange(self.rows.size(0), device=self.starts.device)
        masked_positions = rows - self.starts[self.sequence_of_row]
        masked_positions[self.unmasked_rows] = NEVER
        return first_positions.scatter_reduce_(
            dim=0,
            index=self.sequence_of_row,
            src=masked_positions,
            reduce="amin",
        )


def _enumerate_unmasked(
    rows: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    length: int,
    normalize: bool,
    scale: Tensor | None,
    vector_dtype: torch.dtype,
) -> SequenceTokens:
    """Find the unmasked tokens of queries or of documents, and number them over all sequences.

    Args:
        rows: ``[T, D]`` token vectors.
        mask: ``[T]``, nonzero = keep, or ``None``.
        cu_seqlens: ``[N + 1]`` offsets of packed sequences, or ``None``.
        length: number of rows of each padded sequence.
        normalize: whether rows are divided by their Euclidean norm.
        scale: ``[T]`` factors of the rows, or ``None``.
        vector_dtype: dtype of products.
    """
    if cu_seqlens is None:
        starts = torch.arange(0, rows.size(0), length, device=rows.device)
        sizes = torch.full_like(starts, length)
    else:
        starts = cu_seqlens[:-1].long()
        sizes = cu_seqlens.diff().long()
    factors = None  # of the rows
    if normalize:
        slabs = torch.split(rows, row_limit(rows.size(1)))
        factors = torch.cat([inverse_norms(slab) for slab in slabs])
    elif scale is not None:
        factors = scale[:, None]
    unmasked = None if mask is None else mask != 0
    if unmasked is None or bool(unmasked.all()):
        return SequenceTokens(
            rows=rows,
            starts=starts,
            sizes=sizes,
            offsets=starts,
            counts=sizes,
            unmasked_rows=None,
            scale=factors,
            vector_dtype=vector_dtype,
        )
    n_unmasked_before = pad(unmasked.cumsum(0), (1, 0))
    offsets = n_unmasked_before[starts]
    return SequenceTokens(
        rows=rows,
        starts=starts,
        sizes=sizes,
        offsets=offsets,
        counts=n_unmasked_before[starts + sizes] - offsets,
        unmasked_rows=unmasked.nonzero().squeeze(1),
        scale=factors,
        vector_dtype=vector_dtype,
    )


def inverse_norms(rows: Tensor) -> Tensor:
    """Return the inverse Euclidean norms of rows ``[T, 1]``, in fp32, or fp64 for fp64 rows.

    The inverse is 0 for a zero row, and if it would overflow.
    """
    wide = rows.to(wide_dtype(rows.dtype))
    norm = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    # The square of a norm overflows or loses digits near tiny^0.5. The fourth root is far enough
    # from both limits.
    smallest_safe = torch.finfo(wide.dtype).tiny ** 0.25
    is_safe = (norm > smallest_safe) & (norm < 1 / smallest_safe)
    unsafe = ~is_safe.view(-1)  # squares in these rows may overflow or underflow
    inverse: Tensor = norm.reciprocal_()
    if bool(unsafe.any()):
        # These rows are divided by their largest entry before they are squared.
        wide = wide[unsafe]
        largest = torch.linalg.vector_norm(wide, math.inf, dim=1, keepdim=True)
        squares = (wide / largest).square_().sum(dim=1, keepdim=True)
        unsafe_inverse = largest.reciprocal() * squares.rsqrt()
        is_zero = (largest == 0) | unsafe_inverse.isinf()
        inverse[unsafe] = torch.where(is_zero, 0, unsafe_inverse)
    return inverse


def enumerate_unmasked_tokens(problem: Problem) -> tuple[SequenceTokens, SequenceTokens]:
    """Find the unmasked tokens of queries and of documents, and number them over all sequences.

    This waits for a GPU if there are masks.

    Returns:
        The tokens of queries, and the tokens of documents.
    """
    vector_dtype = wide_dtype(problem.queries.dtype)  # quantised documents do not determine it
    queries = _enumerate_unmasked(
        problem.queries,
        mask=problem.query_mask,
        cu_seqlens=problem.cu_queries,
        length=problem.query_length,
        normalize=problem.normalize,
        scale=problem.query_scale,
        vector_dtype=vector_dtype,
    )
    documents = _enumerate_unmasked(
        problem.documents,
        mask=problem.document_mask,
        cu_seqlens=problem.cu_documents,
        length=problem.document_length,
        normalize=problem.normalize,
        scale=problem.document_scale,
        vector_dtype=vector_dtype,
    )
    return queries, documents


def add_rows(
    out: Tensor,
    table: Tensor,
    out_rows: Tensor,
    table_rows: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Compute ``out[out_rows] += weights * table[table_rows]``, deterministically.

    Args:
        out: ``[T, D]``.
        table: ``[M, D]``.
        out_rows: ``[n]`` rows of ``out``, which may repeat.
        table_rows: ``[n]`` rows of ``table``, or ``None`` for all rows in order.
        weights: ``[n]``, or ``None`` for 1.
    """
    if out_rows.numel() == 0:
        return
    # Each row of `out` is written once. Its addends are summed in the order of the arguments, by
    # one call of embedding_bag for all rows.
    sorted_rows, order = out_rows.sort(stable=True)
    unique_rows, counts = torch.unique_consecutive(sorted_rows, return_counts=True)
    out[unique_rows] += embedding_bag(
        order if table_rows is None else table_rows[order],
        table,
        counts.cumsum(0) - counts,  # the first addend of each row
        mode="sum",
        per_sample_weights=None if weights is None else weights[order],
    )
