"""Data of an attention: tensors, options, visible pairs, and the sequences of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_cu_seqlens
from tilefold.ops._shared.entmax_root import check_alphas
from tilefold.ops._shared.plan import Buffer

# Value of ``AttentionOptions.alpha_value`` if alpha is a tensor, which nothing reads: an option of
# an operator cannot be None.
ALPHA_IS_TENSOR = 0.0


class AttentionTensors(NamedTuple):
    """Tensors of an attention, padded or packed.

    Attributes:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``.
        k: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``.
        v: as ``k``.
        alpha: ``[H]`` alpha of each head, or ``None`` if it is a number.
        key_padding_mask: ``[B, Nk]``, nonzero = keep, or ``None``.
        cu_seqlens_q: ``[B + 1]`` offsets of packed queries, or ``None``.
        cu_seqlens_k: ``[B + 1]`` offsets of packed keys, or ``None``.
        seed: ``[1]`` int64 seed of dropout, or ``None``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor | None
    key_padding_mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None

    @property
    def packed(self) -> bool:
        """Whether the batch is packed."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.q.size(0) if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    @property
    def stats_shape(self) -> tuple[int, ...]:
        """Shape of one number per row: ``[B, H, Nq]``, or ``[1, H, Tq]`` for a packed batch."""
        q = self.q
        return (1, q.size(1), q.size(0)) if self.packed else (q.size(0), q.size(1), q.size(2))


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its last dimension is not contiguous, as kernels need it."""
    return tensor if tensor.stride(-1) == 1 or tensor.size(-1) == 1 else tensor.contiguous()


def result_like(tensor: Tensor) -> Buffer:
    """Describe a result laid out like ``torch.empty_like``, or contiguous if that is not dense."""
    return Buffer.like(dense(torch.empty_like(tensor, device="meta")))


class AttentionOptions(NamedTuple):
    """Checked options of an attention.

    Query ``i`` has position ``i + Nk - Nq`` among the keys.

    Attributes:
        alpha_value: alpha of all heads, or ``ALPHA_IS_TENSOR``.
        causal: whether a query attends to no key after its position.
        window: largest distance of a visible key from a query's position, or -1 for any.
        scale: factor of the products.
        dropout_p: probability that a weight is dropped.
        max_seqlen_k: upper bound of the number of keys of a sequence.
        support: whether the support is counted even if no gradient is needed.
    """

    alpha_value: float
    causal: bool
    window: int
    scale: float
    dropout_p: float
    max_seqlen_k: int
    support: bool = False

    @property
    def has_window(self) -> bool:
        """Whether a window limits the visible keys."""
        return self.window >= 0


class AttentionSaved(NamedTuple):
    """Tensors saved for backward: tensors of the call, and results other than the output.

    Attributes:
        q: as in :class:`AttentionTensors`, like the next seven attributes.
        out2: second output, from which kernels compute delta, like ``q``. The tiled path has none.
        stats: ``[4, B, H, Nq]`` peak, root, mass and support of every row.
        live: map of live blocks; ``None`` or empty if nothing reads it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor | None
    key_padding_mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    out2: Tensor | None
    stats: Tensor
    live: Tensor | None

    @property
    def tensors(self) -> AttentionTensors:
        """Tensors of the call."""
        return AttentionTensors(
            q=self.q,
            k=self.k,
            v=self.v,
            alpha=self.alpha,
            key_padding_mask=self.key_padding_mask,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
            seed=self.seed,
        )


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences that are computed together: neighbours in a padded batch, or a packed sequence.

    Attributes:
        first_sequence: position of the first sequence in the batch.
        query_slice: the group in q-like tensors: sequences of a padded batch, or packed rows.
        key_slice: the group in k-like tensors: sequences of a padded batch, or packed rows.
        stats_index: the group in statistics ``[4, B, H, Nq]``.
        keep: ``[b, Nk]`` bools, false for masked keys, or ``None``.
        packed: whether the batch is packed.
    """

    first_sequence: int
    query_slice: slice
    key_slice: slice
    stats_index: tuple[slice, ...]
    keep: Tensor | None
    packed: bool

    def queries(self, tensor: Tensor) -> Tensor:
        """Return the group's view of a q-like tensor, ``[b, H, Nq, D]``."""
        view = tensor[self.query_slice]
        return view.transpose(0, 1)[None] if self.packed else view

    def keys(self, tensor: Tensor) -> Tensor:
        """Return the group's view of a k-like tensor, ``[b, Hkv, Nk, D]``."""
        view = tensor[self.key_slice]
        return view.transpose(0, 1)[None] if self.packed else view


def group_sequences(tensors: AttentionTensors, max_scores: int) -> Iterator[SequenceGroup]:
    """Divide a batch into groups of sequences.

    If the batch is packed, each sequence is a group, and this waits for a GPU to read the lengths.

    Args:
        tensors: tensors of the call.
        max_scores: largest number of scores of a group of several sequences.
    """
    if tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None:
        return _packed_sequences(tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    return _groups_of_padded(tensors, max_scores)


def _groups_of_padded(tensors: AttentionTensors, max_scores: int) -> Iterator[SequenceGroup]:
    """Divide a padded batch into groups of neighbouring sequences with a bounded number of scores.

    Args:
        tensors: tensors of the call.
        max_scores: the largest number of scores of a group of several sequences.
    """
    batch, n_heads, n_queries, _ = tensors.q.shape
    mask = tensors.key_padding_mask
    scores_per_sequence = n_heads * n_queries * tensors.k.size(2)
    group_size = max(1, max_scores // max(1, scores_per_sequence))
    for first_sequence in range(0, batch, group_size):
        sequences = slice(first_sequence, min(first_sequence + group_size, batch))
        yield SequenceGroup(
            first_sequence=first_sequence,
            query_slice=sequences,
            key_slice=sequences,
            stats_index=(slice(None), sequences),  # of [4, B, H, Nq]
            keep=None if mask is None else mask[sequences] != 0,
            packed=False,
        )


def _packed_sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[SequenceGroup]:
    """Yield each sequence of a packed batch as a group.

    Args:
        cu_seqlens_q: ``[B + 1]`` offsets of the queries.
        cu_seqlens_k: ``[B + 1]`` offsets of the keys.
    """
    query_spans = itertools.pairwise(cu_seqlens_q.tolist())
    key_spans = itertools.pairwise(cu_seqlens_k.tolist())
    for sequence, (query_span, key_span) in enumerate(zip(query_spans, key_spans, strict=True)):
        query_rows = slice(*query_span)
        yield SequenceGroup(
            first_sequence=sequence,
            query_slice=query_rows,
            key_slice=slice(*key_span),
            stats_index=(slice(None), slice(None), slice(None), query_rows),  # of [4, 1, H, Tq]
            keep=None,
            packed=True,
        )


def visible_pairs(
    n_queries: int,
    n_keys: int,
    start: int,
    stop: int,
    options: AttentionOptions,
    keep: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return which keys of a sequence the queries from ``start`` to ``stop`` may attend to.

    Args:
        n_queries: number of queries of the sequence.
        n_keys: number of keys of the sequence.
        start: first query.
        stop: end of the queries.
        options: checked options.
        keep: ``[Nk]`` bools, false for masked keys, or ``None``.
        device: device of the result.

    Returns:
        ``[stop - start, Nk]`` bools.
    """
    # the last query has the position of the last key
    query_positions = torch.arange(start, stop, device=device)[:, None] + (n_keys - n_queries)
    key_positions = torch.arange(n_keys, device=device)
    visible = torch.ones(stop - start, n_keys, dtype=torch.bool, device=device)
    if options.causal:
        visible &= key_positions <= query_positions
    if options.has_window:
        visible &= (key_positions - query_positions).abs() <= options.window
    return visible if keep is None else visible & keep


def exponents(alpha: Tensor | None, options: AttentionOptions, like: Tensor) -> Tensor:
    """Return ``alpha - 1`` as ``[H, 1, 1]`` or ``[1, 1, 1]``, in the dtype of ``like``."""
    if alpha is None:
        return like.new_full((1, 1, 1), options.alpha_value - 1)
    return alpha.to(like.dtype).view(-1, 1, 1) - 1


def check_values(tensors: AttentionTensors, options: AttentionOptions) -> None:
    """Check the values of alphas and of packed offsets.

    Alphas are checked on the CPU only. Reading offsets waits for a GPU.

    Args:
        tensors: tensors of the call.
        options: checked options.

    Raises:
        ValueError: if an alpha is outside [1, 2], offsets do not divide the rows, or a sequence has
            more keys than ``max_seqlen_k``.
    """
    check_alphas(tensors.alpha)
    cu_q = tensors.cu_seqlens_q
    cu_k = tensors.cu_seqlens_k
    if cu_q is None or cu_k is None:
        return
    check_cu_seqlens("cu_seqlens_q", cu_q, tensors.q.size(0), "q")
    check_cu_seqlens("cu_seqlens_k", cu_k, tensors.k.size(0), "k")
    lengths = [end - start for start, end in itertools.pairwise(cu_k.tolist())]
    longest = max(lengths, default=0)
    if longest > options.max_seqlen_k:
        raise ValueError(
            f"max_seqlen_k must be at least {longest}, the longest sequence of keys, got "
            f"{options.max_seqlen_k}.",
        )
