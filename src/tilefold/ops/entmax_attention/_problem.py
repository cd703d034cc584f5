"""The records of an attention, checks of their values, which pairs may attend, and the sequences of
a batch.
"""

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


class AttentionTensors(NamedTuple):
    """The tensors of an attention."""

    q: Tensor  # [B, H, Nq, D], packed [Tq, H, D]
    k: Tensor  # [B, Hkv, Nk, D], packed [Tk, Hkv, D]
    v: Tensor
    alpha: Tensor | None  # one per head, [H], or None where it is a number
    key_padding_mask: Tensor | None  # [B, Nk], nonzero = keep, or None
    cu_seqlens_q: Tensor | None  # [B + 1] offsets of a packed batch, or None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None  # [1] int64, of dropout, or None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        return self.q.size(0) if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    @property
    def stats_shape(self) -> tuple[int, ...]:
        """One number per row: ``[B, H, Nq]``, or ``[1, H, Tq]`` of a packed batch."""
        q = self.q
        return (1, q.size(1), q.size(0)) if self.packed else (q.size(0), q.size(1), q.size(2))


def dense(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last dimension does not lie in one piece, in which kernels read
    and write it.
    """
    return tensor if tensor.stride(-1) == 1 or tensor.size(-1) == 1 else tensor.contiguous()


def result_like(tensor: Tensor) -> Buffer:
    """Memory of a result: laid out as ``torch.empty_like`` lays it out where that is dense, else
    contiguous.
    """
    return Buffer.like(dense(torch.empty_like(tensor, device="meta")))


class Options(NamedTuple):
    """Options of an attention, besides its tensors."""

    alpha_value: float  # alpha, where it is a number
    causal: bool  # whether query i sees no key behind its own place i + Nk - Nq
    window: int  # largest distance from that place, or -1 for any
    scale: float  # multiplies the products
    dropout_p: float  # share of the probabilities that are dropped
    max_seqlen_k: int  # no sequence has more keys
    support: bool = False  # whether the support is counted where no gradient is asked for


class AttentionSaved(NamedTuple):
    """Tensors saved for gradients: those of the call, and what the kernels leave for them."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor | None
    key_padding_mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    out2: Tensor | None  # what delta is made from, like q; the tiled path has none
    stats: Tensor  # peak, root, mass and support of every row, [4, B, H, Nq]
    live: Tensor | None  # the map of live blocks; None or empty where nothing reads it

    @property
    def tensors(self) -> AttentionTensors:
        return AttentionTensors(*self[:8])


@dataclass(frozen=True)
class Group:
    """Sequences that are computed together: neighbours of a padded batch, or one of a packed batch."""

    first: int  # the number of the first one
    q_at: slice  # where their rows lie in q-like and k-like tensors: sequences of a padded batch, else rows
    k_at: slice
    stats_at: tuple[slice, ...]  # where they lie in [4, B, H, Nq] statistics
    keep: Tensor | None  # [b, Nk] bool or None
    packed: bool

    def queries(self, tensor: Tensor) -> Tensor:
        """The part of a q-like tensor, ``[b, H, Nq, D]``."""
        part = tensor[self.q_at]
        return part.transpose(0, 1)[None] if self.packed else part

    def keys(self, tensor: Tensor) -> Tensor:
        """The part of a k-like tensor, ``[b, Hkv, Nk, D]``."""
        part = tensor[self.k_at]
        return part.transpose(0, 1)[None] if self.packed else part


def groups(tensors: AttentionTensors, elements: int) -> Iterator[Group]:
    """Groups of as many sequences as ``elements`` scores leave room for; reads packed lengths on
    the host.
    """
    q, k, mask, cu_q, cu_k = (
        tensors.q,
        tensors.k,
        tensors.key_padding_mask,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
    )
    every = slice(None)
    if cu_q is None or cu_k is None:
        together = max(1, elements // max(1, q.size(1) * q.size(2) * k.size(2)))
        for b in range(0, q.size(0), together):
            part = slice(b, min(b + together, q.size(0)))
            keep = None if mask is None else mask[part] != 0
            yield Group(b, part, part, (every, part), keep, packed=False)
        return
    q_ends, k_ends = cu_q.tolist(), cu_k.tolist()
    for b in range(len(q_ends) - 1):
        rows = slice(q_ends[b], q_ends[b + 1])
        yield Group(
            b,
            rows,
            slice(k_ends[b], k_ends[b + 1]),
            (every, every, every, rows),
            None,
            packed=True,
        )


def allowed(
    nq: int,
    nk: int,
    first: int,
    last: int,
    options: Options,
    keep: Tensor | None,
    like: Tensor,
) -> Tensor:
    """``[last - first, Nk]`` bool: which keys the queries from ``first`` to ``last`` may attend to."""
    place = torch.arange(first, last, device=like.device)[:, None] + (nk - nq)
    j = torch.arange(nk, device=like.device)
    pairs = torch.ones(last - first, nk, dtype=torch.bool, device=like.device)
    if options.causal:
        pairs &= j <= place
    if options.window >= 0:
        pairs &= (j - place).abs() <= options.window
    return pairs if keep is None else pairs & keep


def exponents(alpha: Tensor | None, options: Options, like: Tensor) -> Tensor:
    """``alpha - 1`` as ``[H, 1, 1]`` or ``[1, 1, 1]``, in the dtype of ``like``."""
    return (
        like.new_full((1, 1, 1), options.alpha_value - 1)
        if alpha is None
        else alpha.to(like.dtype).view(-1, 1, 1) - 1
    )


def check_values(tensors: AttentionTensors, options: Options) -> None:
    """Check alphas on the CPU, and packed offsets and their longest keys, with a synchronisation on
    a GPU.
    """
    check_alphas(tensors.alpha)
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if cu_q is None or cu_k is None:
        return
    check_cu_seqlens("cu_seqlens_q", cu_q, tensors.q.size(0), "q")
    check_cu_seqlens("cu_seqlens_k", cu_k, tensors.k.size(0), "k")
    longest = max(
        (after - before for before, after in itertools.pairwise(cu_k.tolist())),
        default=0,
    )
    bound = options.max_seqlen_k
    if longest > bound:
        raise ValueError(
            f"max_seqlen_k must be at least {longest}, the longest sequence of keys, got {bound}.",
        )
