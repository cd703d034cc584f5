"""Data of a MaxSim call: tensors, options, layouts of sequences and pairs, and what is saved.

Queries and documents are rows ``[T, D]``. Sequence ``i`` of padded sequences is rows
``i * length`` to ``(i + 1) * length``, and of packed sequences rows ``cu[i]`` to ``cu[i + 1]``.

There are three layouts of pairs. The second one includes aligned pairs, which are groups of one:

- "all": every query with every document
- "grouped": document ``d`` with query ``d // group``
- "index": pairs that are listed in a tensor ``[P, 2]``

Backward needs one value for each pair and query token. It is saved in a matrix at a position that
follows from the pair and from the query token's row ``t``:

- "all": ``[d, t]`` of ``[Nd, Tq]``
- "grouped": ``[d % group, t]`` of ``[group, Tq]``
- "index": ``[p, t - first row of the query]`` of ``[P, longest query]``

The value is the winner, which is the position of the token in its document with padding counted,
or the smooth maximum. Entries past the end of a query hold "no winner", or infinity.
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


# Bits of "no winner" in every dtype of winners, as a signed integer.
NO_WINNER_BITS = -1


def winner_bits(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert winners, positions in documents, to the dtype in which they are saved.

    Few operations of torch support uint16. It is therefore returned as int16 with the same bits.
    """
    if dtype == torch.uint16:
        return positions.to(dtype).view(torch.int16)
    return positions.to(dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and sums: fp32, or fp64 for fp64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class MaxSimTensors(NamedTuple):
    """Tensors of a call, padded or packed.

    Attributes:
        queries: ``[.., D]`` token vectors.
        documents: ``[.., D]`` token vectors, or the values of quantized ones.
        query_mask: ``[..]``, nonzero = keep, or ``None``.
        document_mask: ``[..]``, nonzero = keep, or ``None``.
        cu_queries: ``[Nq + 1]`` offsets of packed queries, or ``None``.
        cu_documents: ``[Nd + 1]`` offsets of packed documents, or ``None``.
        pairs: ``[P, 2]`` listed (query, document) pairs, or ``None``.
        document_scale: ``[..]`` fp32 factors of the tokens of quantized documents, or ``None``.
    """

    queries: Tensor
    documents: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    cu_queries: Tensor | None
    cu_documents: Tensor | None
    pairs: Tensor | None
    document_scale: Tensor | None


def sequence_counts(tensors: MaxSimTensors) -> tuple[int, int]:
    """Return the number of queries and the number of documents."""
    if tensors.cu_queries is None:
        n_queries = tensors.queries.size(0)
    else:
        n_queries = tensors.cu_queries.numel() - 1
    if tensors.cu_documents is None:
        n_documents = math.prod(tensors.documents.shape[:-2])
    else:
        n_documents = tensors.cu_documents.numel() - 1
    return n_queries, n_documents


class MaxSimOptions(NamedTuple):
    """Checked options of a call.

    Attributes:
        pairing: ``"all"``, ``"aligned"``, ``"grouped"`` or ``"index"``.
        mask_zero: whether masked document tokens score 0; otherwise they are left out.
        temperature: temperature of the smooth maximum; 0 for the maximum.
        normalize: whether token vectors are divided by their Euclidean norm.
        mean: whether scores are divided by the length of padded queries.
        longest_query: upper bound of the tokens of a packed query. It is set only if pairs are
            listed and a gradient may be asked for.
    """

    pairing: str
    mask_zero: bool
    temperature: float
    normalize: bool
    mean: bool
    longest_query: int


class MaxSimSaved(NamedTuple):
    """Tensors saved for backward: tensors of the call, and results other than the scores.

    Attributes:
        queries: as in :class:`MaxSimTensors`, like the next six attributes.
        saved: for each query token, the position of the document token with the maximum (the
            winner), or the smooth maximum; the module's docstring has its layout.
        query_norms: ``[Tq]`` fp32 inverse norms, or ``None`` if rows are not normalized.
        document_norms: ``[Td]`` fp32 inverse norms, or ``None`` if rows are not normalized.
        row_query: ``[Tq]`` int32 query of each packed row, for all pairs, or ``None``.
    """

    queries: Tensor
    documents: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    cu_queries: Tensor | None
    cu_documents: Tensor | None
    pairs: Tensor | None
    saved: Tensor | None
    query_norms: Tensor | None = None
    document_norms: Tensor | None = None
    row_query: Tensor | None = None

    @property
    def tensors(self) -> MaxSimTensors:
        """Tensors of the call. Its documents were not quantized, since it has gradients."""
        return MaxSimTensors(
            queries=self.queries,
            documents=self.documents,
            query_mask=self.query_mask,
            document_mask=self.document_mask,
            cu_queries=self.cu_queries,
            cu_documents=self.cu_documents,
            pairs=self.pairs,
            document_scale=None,
        )


# Names of the operator's results: the scores, and what backward reads.
RESULTS = ("scores", "saved", "query_norms", "document_norms", "row_query")


class XtrOptions(NamedTuple):
    """Checked options of :func:`tilefold.ops.xtr_scores`."""

    top_k: int
    impute: bool
    normalize: bool

    @property
    def maxsim_options(self) -> MaxSimOptions:
        """Options of the MaxSim scores whose maxima XTR selects."""
        return MaxSimOptions(
            pairing="all",
            mask_zero=False,
            temperature=0.0,
            normalize=self.normalize,
            mean=False,
            longest_query=0,
        )


class XtrSaved(NamedTuple):
    """Tensors saved for the gradient of XTR scores.

    Attributes:
        queries: as in :class:`MaxSimTensors`, like the next five attributes.
        saved: ``[Nd, Tq]`` winners that were retrieved.
        divisor: ``[Nq, Nd]`` numbers that the sums were divided by.
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
    def maxsim_saved(self) -> MaxSimSaved:
        """Saved tensors in the form that backward of MaxSim reads."""
        return MaxSimSaved(
            queries=self.queries,
            documents=self.documents,
            query_mask=self.query_mask,
            document_mask=self.document_mask,
            cu_queries=self.cu_queries,
            cu_documents=self.cu_documents,
            pairs=None,
            saved=self.saved,
        )


@dataclass
class Problem:
    """Tensors and options of a call in one layout for padded and packed sequences.

    Attributes:
        queries: ``[Tq, D]`` rows.
        documents: ``[Td, D]`` rows.
        query_mask: ``[Tq]``, nonzero = keep, or ``None``.
        document_mask: ``[Td]``, nonzero = keep, or ``None``.
        cu_queries: ``[Nq + 1]`` offsets of packed queries, or ``None``.
        cu_documents: ``[Nd + 1]`` offsets of packed documents, or ``None``.
        query_length: number of rows of each padded query; 0 for packed queries.
        document_length: number of rows of each padded document; 0 for packed documents.
        n_queries: number of queries.
        n_documents: number of documents.
        group: number of documents of each query, for "grouped".
        index: ``[P, 2]`` listed (query, document) pairs, or ``None``.
        pairing: ``"all"``, ``"aligned"``, ``"grouped"`` or ``"index"``.
        mask_zero: whether masked document tokens score 0; otherwise they are left out.
        temperature: temperature of the smooth maximum; 0 for the maximum.
        normalize: whether rows are divided by their Euclidean norm.
        mean: whether scores are divided by ``query_length``.
        longest_query: upper bound of the number of tokens of a query, for "index".
        document_scale: ``[Td]`` fp32 factors of the rows of quantized documents, or ``None``.
        query_scale: ``[Tq]`` fp32 factors of the rows of quantized queries, or ``None``.
    """

    queries: Tensor
    documents: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    cu_queries: Tensor | None
    cu_documents: Tensor | None
    query_length: int
    document_length: int
    n_queries: int
    n_documents: int
    group: int
    index: Tensor | None
    pairing: str
    mask_zero: bool
    temperature: float
    normalize: bool
    mean: bool
    longest_query: int
    document_scale: Tensor | None = None
    query_scale: Tensor | None = None

    @classmethod
    def of(cls, tensors: MaxSimTensors, options: MaxSimOptions) -> Problem:
        """Return the tensors and options of a call, with padded or packed token vectors as rows.

        Args:
            tensors: tensors of the call.
            options: checked options.
        """
        queries = tensors.queries
        documents = tensors.documents
        n_queries, n_documents = sequence_counts(tensors)
        query_length = queries.size(-2) if tensors.cu_queries is None else 0
        document_length = documents.size(-2) if tensors.cu_documents is None else 0
        longest_query = options.longest_query
        if tensors.pairs is not None and tensors.cu_queries is None:
            longest_query = query_length
        is_padded_in_groups = documents.dim() == 4  # [Nq, group, Ld, D]
        group = documents.size(1) if is_padded_in_groups else n_documents // max(n_queries, 1)
        return cls(
            queries=queries.reshape(-1, queries.size(-1)),
            documents=documents.reshape(-1, documents.size(-1)),
            query_mask=_flat(tensors.query_mask),
            document_mask=_flat(tensors.document_mask),
            cu_queries=tensors.cu_queries,
            cu_documents=tensors.cu_documents,
            query_length=query_length,
            document_length=document_length,
            n_queries=n_queries,
            n_documents=n_documents,
            group=group,
            index=tensors.pairs,
            pairing=options.pairing,
            mask_zero=options.mask_zero,
            temperature=options.temperature,
            normalize=options.normalize,
            mean=options.mean,
            longest_query=longest_query,
            document_scale=_flat(tensors.document_scale),
        )

    @property
    def score_shape(self) -> tuple[int, ...]:
        """Shape of the scores."""
        if self.pairing == "all":
            return (self.n_queries, self.n_documents)
        if self.pairing == "grouped":
            return (self.n_queries, self.group)
        return (self.n_pairs,)

    @property
    def n_pairs(self) -> int:
        """Number of pairs, for "grouped", "aligned" and "index"."""
        return self.n_documents if self.index is None else self.index.size(0)

    @property
    def divisor(self) -> float:
        """Number that the operator divides its scores by."""
        return float(max(self.query_length, 1)) if self.mean else 1.0

    def result_names(self, training: bool) -> set[str]:
        """Return the names of those :data:`RESULTS` that this problem has."""
        names = {"scores"}
        if training:
            names.add("saved")
            if self.normalize:
                names |= {"query_norms", "document_norms"}
            if self.pairing == "all" and self.cu_queries is not None:
                names.add("row_query")
        return names

    @property
    def empty(self) -> bool:
        """Whether queries or documents have no element, so that every score is 0."""
        return self.queries.numel() == 0 or self.documents.numel() == 0

    @property
    def saved_shape(self) -> tuple[int, int]:
        """Shape of the saved winners or smooth maxima."""
        if self.index is not None:
            return (self.index.size(0), self.longest_query)
        return (self.n_documents if self.pairing == "all" else self.group, self.queries.size(0))

    @property
    def saved_dtype(self) -> torch.dtype:
        """Dtype of the saved values: uint16 or int32 winners, or smooth maxima in fp32 (fp64)."""
        if self.temperature:
            return wide_dtype(self.queries.dtype)
        bound = self.documents.size(0) if self.cu_documents is not None else self.document_length
        return winner_dtype(bound)


def _flat(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor with one dimension, or ``None``."""
    return None if tensor is None else tensor.reshape(-1)


def outputs(tensors: MaxSimTensors, options: MaxSimOptions, training: bool) -> tuple[Buffer, ...]:
    """Return the shape and dtype of each of the operator's results, in the order of ``RESULTS``.

    A result that this call does not have is empty.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: whether backward may follow.
    """
    problem = Problem.of(tensors, options)
    n_query_rows = problem.queries.size(0)
    n_document_rows = problem.documents.size(0)
    buffers = {
        "scores": Buffer(problem.score_shape, wide_dtype(problem.queries.dtype)),
        "saved": Buffer(problem.saved_shape, problem.saved_dtype),
        "query_norms": Buffer((n_query_rows,), torch.float32),
        "document_norms": Buffer((n_document_rows,), torch.float32),
        "row_query": Buffer((n_query_rows,), torch.int32),
    }
    names = problem.result_names(training)
    return tuple(
        buffers[name] if name in names else _without_elements(buffers[name]) for name in RESULTS
    )


def _without_elements(buffer: Buffer) -> Buffer:
    """Return a buffer with as many dimensions as ``buffer``, all of size 0."""
    return buffer._replace(shape=(0,) * len(buffer.shape))


def xtr_outputs(tensors: MaxSimTensors, options: XtrOptions, training: bool) -> tuple[Buffer, ...]:
    """Return the shape and dtype of scores, retrieved winners, and divisors of the sums."""
    scores, saved, *_ = outputs(tensors, options.maxsim_options, training)
    return scores, saved, scores


def check_values(tensors: MaxSimTensors, options: MaxSimOptions | None = None) -> None:
    """Check the values of offsets and pair indices, which waits for a GPU.

    Args:
        tensors: tensors of the call.
        options: ignored; part of the signature that all operators share.

    Raises:
        ValueError: if offsets do not divide the rows, or an index is out of range.
    """
    pairs = tensors.pairs
    if tensors.cu_queries is not None:
        check_cu_seqlens(
            "cu_seqlens_q",
            tensors.cu_queries,
            tensors.queries.size(0),
            "queries",
        )
    if tensors.cu_documents is not None:
        check_cu_seqlens(
            "cu_seqlens_d",
            tensors.cu_documents,
            tensors.documents.size(0),
            "documents",
        )
    if pairs is None or not pairs.numel():
        return
    counts = torch.tensor(sequence_counts(tensors), device=pairs.device)
    out_of_range = ((pairs < 0) | (pairs >= counts)).nonzero()
    if out_of_range.numel():
        pair, column = out_of_range[0].tolist()
        name = ("queries", "documents")[column]
        raise ValueError(
            f"pairing must hold indices below the number of {name} ({int(counts[column])}), got "
            f"{int(pairs[pair, column])} in pair {pair}; drop that pair or fix its index.",
        )


def new_saved_values(problem: Problem, like: Tensor, training: bool = True) -> Tensor:
    """Allocate the matrix of values that backward reads, filled with the mark "no winner".

    A winner is the document token that is most similar to a query token. For smooth maxima, the
    matrix is filled with infinity. For uint16 winners, it is int16 with the same bits, because few
    operations of torch support uint16.

    Args:
        problem: tensors and options of the call.
        like: a tensor on the device of the result.
        training: whether anything is saved; otherwise the matrix is empty.
    """
    dtype = problem.saved_dtype
    return like.new_full(
        problem.saved_shape if training else (0, 0),
        math.inf if problem.temperature else NO_WINNER_BITS,
        dtype=torch.int16 if dtype == torch.uint16 else dtype,
    )


def saved_positions(
    problem: Problem,
    pairs: Tensor,
    query_rows: Tensor,
    first_query_rows: Tensor,
) -> Tensor:
    """Return where the values of query tokens are in the flattened matrix that backward reads.

    The matrix is ``[P, longest query]`` for listed pairs (``"index"``). For ``"grouped"`` it is
    ``[group, Tq]``, with a row for each document of a group; ``"aligned"`` has groups of one.

    Args:
        problem: a call with one of these pairings.
        pairs: positions of the pairs.
        query_rows: rows of query tokens of the pairs.
        first_query_rows: first row of each pair's query.
    """
    if problem.index is not None:
        return pairs * problem.longest_query + (query_rows - first_query_rows)
    document_in_group = pairs % problem.group
    return document_in_group * problem.queries.size(0) + query_rows


def pair_sequences(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the query and the document of each pair, for "grouped", "aligned" and "index"."""
    if problem.index is not None:
        query, document = problem.index.long().unbind(1)
        return query, document
    document = torch.arange(problem.n_documents, device=problem.documents.device)
    return document // max(problem.group, 1), document
