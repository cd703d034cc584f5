"""Which pairs of query and key may attend, and how a batch, padded or packed, is cut into sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """What an attention is, apart from its tensors.

    Attributes:
        constant: alpha, where it is a number.
        causal: whether query i sees no key behind its own place ``i + Nk - Nq``.
        window: largest distance from that place, or -1 for any.
        scale: multiplies the products.
        dropout_p: share of the probabilities that are dropped.
    """

    constant: float
    causal: bool
    window: int
    scale: float
    dropout_p: float


@dataclass(frozen=True)
class Sequence:
    """One sequence: views ``[H, Nq, D]``, ``[Hkv, Nk, D]`` of what belongs to it, and where that lies.

    Attributes:
        index: which sequence of the batch.
        q_at, k_at: indices of its rows in q-like and in k-like tensors.
        keep: ``[Nk]`` bool or ``None``.
    """

    index: int
    q_at: tuple[int | slice, ...]
    k_at: tuple[int | slice, ...]
    stats_at: tuple[int | slice, ...]
    keep: Tensor | None
    packed: bool

    def queries(self, tensor: Tensor) -> Tensor:
        """The part of a q-like tensor, ``[H, Nq, D]``."""
        part = tensor[self.q_at]
        return part.transpose(0, 1) if self.packed else part

    def keys(self, tensor: Tensor) -> Tensor:
        """The part of a k-like tensor, ``[Hkv, Nk, D]``."""
        part = tensor[self.k_at]
        return part.transpose(0, 1) if self.packed else part


def sequences(q: Tensor, key_mask: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None) -> Iterator[Sequence]:
    """The sequences of a batch; reads packed lengths on the host."""
    if cu_q is None or cu_k is None:
        for b in range(q.size(0)):
            keep = None if key_mask is None else key_mask[b] != 0
            yield Sequence(b, (b,), (b,), (b, slice(None), slice(None)), keep, packed=False)
        return
    q_ends, k_ends = cu_q.tolist(), cu_k.tolist()
    for b in range(len(q_ends) - 1):
        q_rows, k_rows = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        yield Sequence(b, (q_rows,), (k_rows,), (0, slice(None), q_rows), None, packed=True)


def allowed(nq: int, nk: int, first: int, last: int, options: Options, keep: Tensor | None, like: Tensor) -> Tensor:
    """``[last - first, Nk]`` bool: which keys the queries from ``first`` to ``last`` may attend to."""
    place = torch.arange(first, last, device=like.device)[:, None] + (nk - nq)
    j = torch.arange(nk, device=like.device)
    pairs = torch.ones(last - first, nk, dtype=torch.bool, device=like.device)
    if options.causal:
        pairs &= j <= place
    if options.window >= 0:
        pairs &= (j - place).abs() <= options.window
    return pairs if keep is None else pairs & keep


def stats_shape(q: Tensor, packed: bool) -> tuple[int, ...]:
    """``[B, H, Nq]``, or ``[1, H, Tq]`` of a packed batch."""
    return (1, q.size(1), q.size(0)) if packed else (q.size(0), q.size(1), q.size(2))
