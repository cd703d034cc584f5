"""The records of a call, which travel from the public function to the kernels, and where valid tokens lie.

A winner is stored as the position of its token *within its own sequence* (padding counted): the column of a padded
input, the distance to ``cu_seqlens[b]`` of a packed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Pooling(NamedTuple):
    """What a pooling keeps for its backward pass.

    Attributes:
        reads: what backward reads besides token states, weight and offsets.
        winners: scores that share a winner: those of one "entry", of one "sequence" (only where a mask hides which), or
            "none", where all tokens take part.
    """

    reads: frozenset[str]
    winners: str


POOLINGS = {
    "max": Pooling(frozenset({"scores", "winners"}), "entry"),
    "sum": Pooling(frozenset({"bias", "attention_mask"}), "none"),
    "mean": Pooling(frozenset({"bias", "attention_mask"}), "none"),
    "cls": Pooling(frozenset({"scores", "winners"}), "sequence"),
    "last": Pooling(frozenset({"scores", "winners"}), "sequence"),
}


class Tokens(NamedTuple):
    """Token states, and which of them belong to which sequence.

    Attributes:
        hidden: padded ``[B, S, D]``, or packed ``[T, D]``.
        attention_mask: ``[B, S]``, nonzero = valid, or ``None``.
        cu_seqlens: ``[B + 1]`` of packed input, else ``None``.
    """

    hidden: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.hidden.size(0) if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def length(self) -> int:
        """S of padded input, 0 of packed."""
        return self.hidden.size(1) if self.cu_seqlens is None else 0

    @property
    def length_bound(self) -> int:
        """An upper bound of the sequence length that needs no look at the device: S padded, T packed."""
        return self.hidden.size(1) if self.hidden.dim() == 3 else self.hidden.size(0)

    @property
    def n_rows(self) -> int:
        """Rows of hidden, padding counted."""
        return self.hidden.numel() // self.hidden.size(-1)


class Vocabulary(NamedTuple):
    """The decoder.

    Attributes:
        weight: ``[V, D]``, of a quantised head in fp8.
        weight_scale: ``[V]`` fp32 of a quantised head, else ``None``.
        bias: ``[V]`` or ``None``.
    """

    weight: Tensor
    weight_scale: Tensor | None
    bias: Tensor | None


class Asked(NamedTuple):
    """Options as the caller gave them."""

    pooling: str
    activation: str
    logit_scale: float
    out_dtype: torch.dtype | None
    impl: str


class HeadOptions(NamedTuple):
    """Options that passed the checks.

    Attributes:
        compute_dtype: of the operands of products.
        training: whether a gradient can be asked for.
        impl: "auto" where the tiled path stands behind the kernels; see :func:`tilefold.ops._shared.impl.settled`.
    """

    pooling: str
    activation: str
    logit_scale: float
    out_dtype: torch.dtype
    compute_dtype: torch.dtype
    training: bool
    impl: str


class Saved(NamedTuple):
    """What forward keeps for backward, of those that :data:`POOLINGS` names."""

    scores: Tensor | None
    winners: Tensor | None


class Needs(NamedTuple):
    """Which gradients are asked for; that of the bias by its dtype."""

    hidden: bool
    weight: bool
    bias: torch.dtype | None


class BackwardCall(NamedTuple):
    """What gradients are made of, those of ``dscores`` ``[B, V]``, and which of them."""

    dscores: Tensor
    saved: Saved
    tokens: Tokens
    vocabulary: Vocabulary
    options: HeadOptions
    needs: Needs


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight and bias, where asked for


class ForwardPlan(Protocol):
    """Launches that make scores, and winners where they are kept. Equal to itself only, so that a key may hold it."""

    @property
    def options(self) -> HeadOptions:
        """Of the calls that it is for."""

    def __call__(self, tokens: Tokens, vocabulary: Vocabulary) -> tuple[Tensor, Tensor | None]:
        """Launch."""


class BackwardPlan(Protocol):
    """Launches that make gradients."""

    def __call__(
        self, dscores: Tensor, saved: Saved, tokens: Tokens, vocabulary: Vocabulary, main_grad: Tensor | None
    ) -> Gradients:
        """Launch; the weight's gradient is added to ``main_grad``, if given, and not returned."""


def winners_shape(tokens: Tokens, vocab: int, options: HeadOptions) -> tuple[int, int]:
    """Shape of the winners that forward hands out."""
    kind = POOLINGS[options.pooling].winners
    batch = tokens.batch if options.training else 0  # backward alone reads them
    if kind == "entry":
        return batch, vocab
    return (batch if kind == "sequence" and tokens.attention_mask is not None else 0), 1


def sequence_mask(cu_seqlens: Tensor, length: int) -> Tensor:
    """``[B, length]`` bool: which of the first ``length`` places of each packed sequence hold a token."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.arange(length, device=cu_seqlens.device) < lengths[:, None]


@dataclass(frozen=True)
class PackedRows:
    """The valid tokens of a batch, with the host's knowledge of where sequences begin.

    Attributes:
        rows: ``[T, D]``.
        offsets: ``B + 1`` row numbers.
        index: ``[T]`` int64, the row of the flattened input that each row came from, or ``None`` for the identity.
    """

    rows: Tensor
    offsets: list[int]
    index: Tensor | None

    @property
    def uniform_length(self) -> int | None:
        """The length that all sequences share, or ``None``."""
        lengths = {end - start for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True)}
        return lengths.pop() if len(lengths) == 1 else None


def pack_rows(tokens: Tokens) -> PackedRows:
    """Gather the valid tokens (a copy only where there is padding); reads the lengths on the host."""
    hidden, attention_mask, cu_seqlens = tokens
    if cu_seqlens is not None:
        return PackedRows(hidden, cu_seqlens.tolist(), None)
    batch, length, dim = hidden.shape
    rows = hidden.reshape(batch * length, dim)
    if attention_mask is None or bool((valid := attention_mask != 0).all()):
        return PackedRows(rows, [b * length for b in range(batch + 1)], None)
    index = valid.flatten().nonzero().squeeze(1)
    offsets = [0, *valid.sum(dim=1).cumsum(0).tolist()]
    return PackedRows(rows[index], offsets, index)
