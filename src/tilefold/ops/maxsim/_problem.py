"""Layouts of MaxSim: rows of tokens, where each sequence lies among them, which pairs are scored,
what is saved.

Queries and documents are rows ``[T, D]``. Sequence ``i`` of a padded side is rows ``i * length`` to
``(i + 1) * length``; of a packed side, ``cu[i]`` to ``cu[i + 1]``. Pairs are "all" of them,
"grouped" (document ``d`` belongs to query ``d // group``; "aligned" ones are groups of one) or an
"index" ``[P, 2]``. What backward needs of each (pair, query token) is saved in one place of a
tensor: "all" ``[Nd, Tq]`` at ``[d, t]``, "grouped" ``[group, Tq]`` at ``[d % group, t]``, "index"
``[P, longest]`` at ``[p, t - first row of the query]``. A winner is the position of the token in
its document, padding counted; places past the end of a query hold "no winner", or infinity for
smooth maxima.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_cu_seqlens
from tilefold.ops._shared.plan import Buffer
from tilefold.ops._shared.winners import winner_dtype

QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)


def winner_bits(position: Tensor, dtype: torch.dtype) -> Tensor:
    """Positions as they are stored; uint16, which few operations know, in the bits of int16, where
    no winner is -1.
    """
    return position.to(dtype).view(torch.int16) if dtype == torch.uint16 else position.to(dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums: fp32, or fp64 for fp64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class MaxSimTensors(NamedTuple):
    """The tensors of a call, padded or packed."""

    queries: Tensor  # [.., D]; documents may be the values of quantized ones
    documents: Tensor
    query_mask: Tensor | None  # their shapes without D, or None
    document_mask: Tensor | None
    cu_queries: Tensor | None  # first rows of packed sequences, or None
    cu_documents: Tensor | None
    pairs: Tensor | None  # [P, 2] (query, document), or None
    document_scale: Tensor | None  # factors of quantized documents' rows, or None


def sequences(tensors: MaxSimTensors) -> tuple[int, int]:
    """How many queries there are, and how many documents."""
    queries, documents, _, _, cu_queries, cu_documents, _, _ = tensors
    n_queries = queries.size(0) if cu_queries is None else cu_queries.numel() - 1
    return n_queries, math.prod(
        documents.shape[:-2],
    ) if cu_documents is None else cu_documents.numel() - 1


class MaxSimOptions(NamedTuple):
    """Options of MaxSim besides the tensors; see :class:`Problem`."""

    pairing: str
    mask_zero: bool
    temperature: float
    normalize: bool
    mean: bool  # whether scores are divided by the length of padded queries
    longest_query: int  # a bound of the tokens of packed queries, where pairs are listed and a gradient is asked for


class MaxSimSaved(NamedTuple):
    """Tensors saved for backward: those of the call, and results beside the scores, ``None`` if
    they were not made.

    ``saved`` are winners, or smooth maxima; norms ``[Tq]`` and ``[Td]`` fp32, inverse, of rows that
    are normalised; ``row_query`` ``[Tq]`` int32 query of each packed row, for all pairs.
    """

    queries: Tensor
    documents: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    cu_queries: Tensor | None
    cu_documents: Tensor | None
    pairs: Tensor | None
    saved: Tensor | None
    query_norms: Tensor | None
    document_norms: Tensor | None
    row_query: Tensor | None

    @property
    def tensors(self) -> MaxSimTensors:
        return MaxSimTensors(*self[:7], None)


RESULTS = ("scores", *MaxSimSaved._fields[7:])


class XtrOptions(NamedTuple):
    """Options of :func:`tilefold.ops.xtr_scores` besides the tensors."""

    top_k: int
    impute: bool
    normalize: bool

    @property
    def maximum(self) -> MaxSimOptions:
        return MaxSimOptions("all", False, 0.0, self.normalize, False, 0)


class XtrSaved(NamedTuple):
    """Tensors saved for the gradient of XTR scores, with the winners that count, and the divisor of
    the sums.
    """

    queries: Tensor
    documents: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    cu_queries: Tensor | None
    cu_documents: Tensor | None
    saved: Tensor | None
    divisor: Tensor

    @property
    def maximum(self) -> MaxSimSaved:
        return MaxSimSaved(*self[:6], None, self.saved, None, None, None)


@dataclass
class Problem:
    """Problem for a MaxSim operator to score."""

    queries: Tensor  # [Tq, D] and [Td, D] rows
    documents: Tensor
    query_mask: Tensor | None  # [Tq] and [Td], nonzero = keep, or None
    document_mask: Tensor | None
    cu_queries: Tensor | None  # first rows of packed sequences, or None
    cu_documents: Tensor | None
    query_length: int  # rows of every padded sequence; 0 on a packed side
    document_length: int
    n_queries: int  # number of sequences
    n_documents: int
    group: int  # documents of each query, for "grouped"
    index: Tensor | None  # [P, 2] (query, document), or None
    pairing: str  # "all", "aligned", "grouped" or "index"
    mask_zero: bool  # whether a masked document token scores 0 and takes part; else it is left out
    temperature: float  # of the smooth maximum; 0 for the maximum itself
    normalize: bool  # whether rows are divided by their Euclidean norm
    mean: bool  # whether scores are divided by `query_length`
    longest_query: int  # for "index", a bound of the tokens of a query
    document_scale: Tensor | None = None  # [Td] fp32 factors of quantized documents' rows, or None
    query_scale: Tensor | None = (
        None  # [Tq] fp32 factors of the rows of queries that were quantized too, or None
    )

    @classmethod
    def of(cls, tensors: MaxSimTensors, options: MaxSimOptions) -> Problem:
        """The problem of tensors in whatever shape."""
        queries, documents, query_mask, document_mask, cu_queries, cu_documents, pairs, scale = (
            tensors
        )
        query_length = 0 if cu_queries is not None else queries.size(-2)
        n_queries, n_documents = sequences(tensors)
        longest = (
            query_length if pairs is not None and cu_queries is None else options.longest_query
        )
        document_length = 0 if cu_documents is not None else documents.size(-2)
        group = documents.size(1) if documents.dim() == 4 else n_documents // max(n_queries, 1)
        query_mask, document_mask, scale = (
            None if x is None else x.reshape(-1) for x in (query_mask, document_mask, scale)
        )
        return cls(
            queries.reshape(-1, queries.size(-1)),
            documents.reshape(-1, documents.size(-1)),
            query_mask,
            document_mask,
            cu_queries,
            cu_documents,
            query_length,
            document_length,
            n_queries,
            n_documents,
            group,
            pairs,
            *options[:5],
            longest,
            scale,
        )

    @property
    def score_shape(self) -> tuple[int, ...]:
        if self.pairing == "all":
            return (self.n_queries, self.n_documents)
        if self.pairing == "grouped":
            return (self.n_queries, self.group)
        return (self.n_pairs,)

    @property
    def n_pairs(self) -> int:
        return self.n_documents if self.index is None else self.index.size(0)

    @property
    def divisor(self) -> float:
        return float(max(self.query_length, 1)) if self.mean else 1.0

    def made(self, training: bool) -> tuple[bool, ...]:
        """Which :data:`RESULTS` there are."""
        norms = training and self.normalize
        return (
            True,
            training,
            norms,
            norms,
            training and self.pairing == "all" and self.cu_queries is not None,
        )

    @property
    def empty(self) -> bool:
        """Whether one side has no element, so that every score is 0."""
        return self.queries.numel() == 0 or self.documents.numel() == 0

    @property
    def saved_shape(self) -> tuple[int, int]:
        """Shape of what backward needs."""
        if self.index is not None:
            return (self.index.size(0), self.longest_query)
        return (self.n_documents if self.pairing == "all" else self.group, self.queries.size(0))

    @property
    def saved_dtype(self) -> torch.dtype:
        """Winners in uint16 or int32, or the smooth maxima in fp32 (fp64)."""
        if self.temperature:
            return wide_dtype(self.queries.dtype)
        bound = self.documents.size(0) if self.cu_documents is not None else self.document_length
        return winner_dtype(bound)


def outputs(tensors: MaxSimTensors, options: MaxSimOptions, training: bool) -> tuple[Buffer, ...]:
    """Scores, and what backward reads besides the tensors of the call, empty where it is not there."""
    p = Problem.of(tensors, options)
    _, _, normalized, _, ragged = p.made(training)
    return (
        Buffer(p.score_shape, wide_dtype(p.queries.dtype)),
        Buffer(p.saved_shape if training else (0, 0), p.saved_dtype),
        Buffer((p.queries.size(0) if normalized else 0,), torch.float32),
        Buffer((p.documents.size(0) if normalized else 0,), torch.float32),
        Buffer((p.queries.size(0) if ragged else 0,), torch.int32),
    )


def xtr_outputs(tensors: MaxSimTensors, options: XtrOptions, training: bool) -> tuple[Buffer, ...]:
    """Scores, winners that count, and what the sums were divided by."""
    scores, saved, *_ = outputs(tensors, options.maximum, training)
    return scores, saved, scores


def check_values(tensors: MaxSimTensors, options: MaxSimOptions | None = None) -> None:
    """Check offsets and pair indices on the host.

    Raises:
        ValueError: for offsets that are none, and indices out of range.
    """
    queries, documents, _, _, cu_queries, cu_documents, pairs, _ = tensors
    if cu_queries is not None:
        check_cu_seqlens("cu_seqlens_q", cu_queries, queries.size(0), "queries")
    if cu_documents is not None:
        check_cu_seqlens("cu_seqlens_d", cu_documents, documents.size(0), "documents")
    if pairs is None or not pairs.numel():
        return
    sizes = torch.tensor(sequences(tensors), device=pairs.device)
    bad = ((pairs < 0) | (pairs >= sizes)).nonzero()
    if bad.numel():
        pair, side = bad[0].tolist()
        name = ("queries", "documents")[side]
        raise ValueError(
            f"pairing must hold indices below the number of {name} ({int(sizes[side])}), got "
            f"{int(pairs[pair, side])} in pair {pair}; drop that pair or fix its index.",
        )


def no_winners(problem: Problem, like: Tensor, training: bool = True) -> Tensor:
    """``saved`` where nothing won: infinity, or -1 in any width; uint16, which few operations know,
    in int16's bits.
    """
    dtype, value = problem.saved_dtype, math.inf if problem.temperature else -1
    shape = problem.saved_shape if training else (0, 0)
    return like.new_full(shape, value, dtype=torch.int16 if dtype == torch.uint16 else dtype)


def saved_place(problem: Problem, item: Tensor, row: Tensor, start: Tensor) -> Tensor:
    """Place in the flattened saved tensor of "grouped" or "index" of (pair, row of its query that
    begins at start).
    """
    if problem.index is not None:
        return item * problem.longest_query + row - start
    return item % problem.group * problem.queries.size(0) + row
