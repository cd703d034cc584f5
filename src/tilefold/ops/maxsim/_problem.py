"""One description of every layout: rows of tokens, where each sequence lies among them, and which pairs are scored.

Queries and documents are rows ``[T, D]``. Sequence ``i`` of a padded side is rows ``i * length`` to
``(i + 1) * length``; of a packed side, ``cu[i]`` to ``cu[i + 1]``. A mask has one entry per row.

Pairs are "all" of them, "grouped" (document ``d`` belongs to query ``d // group``; aligned pairs are groups of one) or
an "index" ``[P, 2]``. What backward needs of each (pair, query token) is saved in one place of a tensor:

========  ============  ==================================
pairing   saved shape   place of token ``t`` (row of queries)
========  ============  ==================================
all       [Nd, Tq]      ``[d, t]``
grouped   [group, Tq]   ``[d % group, t]``
index     [P, longest]  ``[p, t - first row of the query]``
========  ============  ==================================

A winner is the position of the token in its document, padding counted. Places of the index layout past the end of their
query hold "no winner" too, or infinity where smooth maxima are saved.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.winners import winner_dtype


def winner_bits(position: Tensor, dtype: torch.dtype) -> Tensor:
    """Positions as they are stored; uint16, which few operations know, in the bits of int16, where no winner is -1."""
    return position.to(dtype).view(torch.int16) if dtype == torch.uint16 else position.to(dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums: fp32, or fp64 for fp64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Operands(NamedTuple):
    """The tensors of a call, as the caller gave them: padded or packed.

    Attributes:
        queries, documents: ``[.., D]``; documents may be the values of quantized ones.
        query_mask, document_mask: their shapes without D, or ``None``.
        cu_queries, cu_documents: first rows of packed sequences, or ``None``.
        pairs: ``[P, 2]`` (query, document), or ``None``.
        document_scale: factors of quantized documents' rows, or ``None``.
    """

    queries: Tensor
    documents: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    cu_queries: Tensor | None
    cu_documents: Tensor | None
    pairs: Tensor | None
    document_scale: Tensor | None = None


class Options(NamedTuple):
    """What a problem says besides its tensors; see :class:`Problem`."""

    query_length: int
    document_length: int
    pairing: str
    mask_zero: bool
    temperature: float
    normalize: bool
    longest_query: int


@dataclass
class Problem:
    """What a MaxSim operator is asked to score.

    Attributes:
        queries, documents: ``[Tq, D]`` and ``[Td, D]`` rows.
        query_mask, document_mask: ``[Tq]`` and ``[Td]``, nonzero = keep, or ``None``.
        cu_queries, cu_documents: first rows of packed sequences, or ``None``.
        query_length, document_length: rows of every padded sequence; 0 on a packed side.
        index: ``[P, 2]`` (query, document), or ``None``.
        pairing: ``"all"``, ``"grouped"`` or ``"index"``.
        mask_zero: whether a masked document token scores 0 and takes part; else it is left out.
        temperature: of the smooth maximum; 0 for the maximum itself.
        normalize: whether rows are divided by their Euclidean norm.
        longest_query: for "index", a bound of the tokens of a query.
        document_scale: ``[Td]`` fp32 factors of quantized documents' rows, or ``None``.
        query_scale: ``[Tq]`` fp32 factors of the rows of queries that were quantized too, or ``None``.
    """

    queries: Tensor
    documents: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    cu_queries: Tensor | None
    cu_documents: Tensor | None
    query_length: int
    document_length: int
    index: Tensor | None
    pairing: str
    mask_zero: bool
    temperature: float
    normalize: bool
    longest_query: int
    document_scale: Tensor | None = None
    query_scale: Tensor | None = None

    @classmethod
    def of(cls, operands: Operands, options: Options) -> Problem:
        """The problem of operands in whatever shape."""
        queries, documents, query_mask, document_mask, cu_queries, cu_documents, pairs, scale = operands
        return cls(
            queries.reshape(-1, queries.size(-1)),
            documents.reshape(-1, documents.size(-1)),
            None if query_mask is None else query_mask.reshape(-1),
            None if document_mask is None else document_mask.reshape(-1),
            cu_queries,
            cu_documents,
            options.query_length,
            options.document_length,
            pairs,
            *options[2:],
            None if scale is None else scale.reshape(-1),
        )

    @property
    def operands(self) -> Operands:
        """The tensors."""
        return Operands(
            self.queries, self.documents, self.query_mask, self.document_mask, self.cu_queries, self.cu_documents,
            self.index, self.document_scale,
        )  # fmt: skip

    @property
    def options(self) -> Options:
        """All but the tensors."""
        return Options(
            self.query_length, self.document_length, self.pairing, self.mask_zero, self.temperature, self.normalize,
            self.longest_query,
        )  # fmt: skip

    @property
    def arguments(self) -> tuple[Tensor | int | float | str | None, ...]:
        """What the registered operators take, in the order of their schema."""
        return tuple([getattr(self, name) for name in ARGUMENTS])

    @property
    def n_queries(self) -> int:
        """Number of queries."""
        return _count(self.queries, self.cu_queries, self.query_length)

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return _count(self.documents, self.cu_documents, self.document_length)

    @property
    def group(self) -> int:
        """Documents of each query, for "grouped"."""
        return self.n_documents // max(self.n_queries, 1)

    @property
    def score_shape(self) -> tuple[int, ...]:
        """Shape of the scores."""
        if self.pairing == "all":
            return (self.n_queries, self.n_documents)
        return (self.n_documents if self.index is None else self.index.size(0),)

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


ARGUMENTS = tuple(field.name for field in fields(Problem))[:-2]  # all but the scales


def saved_place(problem: Problem, item: Tensor, row: Tensor, start: Tensor) -> Tensor:
    """Where the flattened saved tensor of "grouped" or "index" holds (pair, row of its query that begins at start)."""
    if problem.index is not None:
        return item * problem.longest_query + row - start
    return item % problem.group * problem.queries.size(0) + row


def _count(rows: Tensor, cu: Tensor | None, length: int) -> int:
    return rows.size(0) // length if cu is None else cu.numel() - 1
