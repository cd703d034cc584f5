"""Records of a call, which travel from the public function to the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_cu_seqlens
from tilefold.ops._shared.plan import Buffer
from tilefold.ops._shared.winners import winner_dtype


class Pooling(NamedTuple):
    """Data that a pooling keeps for its backward pass."""

    reads: frozenset[str]
    winners: str  # of an "entry", of a "sequence" (only where a mask hides which), or "none": all tokens take part


_ALWAYS = frozenset({"hidden", "cu_seqlens", "weight"})
_BY_WINNERS, _BY_ALL = _ALWAYS | {"scores", "winners"}, _ALWAYS | {"bias", "attention_mask"}
POOLINGS = {
    "max": Pooling(_BY_WINNERS, "entry"),
    "sum": Pooling(_BY_ALL, "none"),
    "mean": Pooling(_BY_ALL, "none"),
    "cls": Pooling(_BY_WINNERS, "sequence"),
    "last": Pooling(_BY_WINNERS, "sequence"),
}


class Tokens(NamedTuple):
    """Token states, and which of them belong to which sequence."""

    hidden: Tensor  # padded [B, S, D], or packed [T, D]
    attention_mask: Tensor | None  # [B, S], nonzero = valid
    cu_seqlens: Tensor | None  # [B + 1] of packed input

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
        """An upper bound of the sequence length that needs no look at the device: S padded, T
        packed.
        """
        return self.hidden.size(1) if self.hidden.dim() == 3 else self.hidden.size(0)

    @property
    def n_rows(self) -> int:
        """Rows of hidden, padding counted."""
        return self.hidden.numel() // self.hidden.size(-1)


class HeadTensors(NamedTuple):
    """The tensors of a call."""

    hidden: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    weight: Tensor  # [V, D], of a quantised head in fp8
    weight_scale: Tensor | None  # [V] fp32 of a quantised head
    bias: Tensor | None  # [V]

    @property
    def tokens(self) -> Tokens:
        return Tokens(*self[:3])


class HeadOptions(NamedTuple):
    """Options that passed the checks; products take operands of ``compute_dtype``."""

    pooling: str
    activation: str
    logit_scale: float
    out_dtype: torch.dtype
    compute_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    screen: bool = False  # scores that an 8-bit product shows not to be positive need no other


class HeadSaved(NamedTuple):
    """Tensors saved for backward: those that :data:`POOLINGS` names, and always token states,
    offsets and weight.

    A winner is the position of its token in its own sequence, padding counted: the column of a
    padded input, the distance to ``cu_seqlens[b]`` of a packed one.
    """

    hidden: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    weight: Tensor
    bias: Tensor | None
    scores: Tensor | None
    winners: Tensor | None

    @property
    def tokens(self) -> Tokens:
        return Tokens(*self[:3])


class Needs(NamedTuple):
    """Gradients that are asked for."""

    hidden: bool
    weight: bool
    bias: bool


Gradients = tuple[
    Tensor | None,
    Tensor | None,
    Tensor | None,
]  # of hidden, weight and bias, where asked for


def outputs(tensors: HeadTensors, options: HeadOptions, training: bool) -> tuple[Buffer, Buffer]:
    """Scores ``[B, V]``, and winners where backward reads them, else none."""
    tokens, vocab, kind = tensors.tokens, tensors.weight.size(0), POOLINGS[options.pooling].winners
    shape = (tokens.batch if training else 0), vocab if kind == "entry" else 1
    if kind == "none" or (kind == "sequence" and tokens.attention_mask is None):
        shape = 0, 1
    return Buffer((tokens.batch, vocab), options.out_dtype), Buffer(
        shape,
        winner_dtype(tokens.length_bound),
    )


def reads(options: HeadOptions) -> frozenset[str]:
    """Names of saved tensors."""
    return POOLINGS[options.pooling].reads


def bias_gradient(saved: HeadSaved, options: HeadOptions) -> Buffer:
    """The bias's gradient, which max pooling and poolings of one token make without the bias."""
    return Buffer((saved.weight.size(0),), options.bias_dtype or options.compute_dtype)


def check_values(tensors: HeadTensors, options: HeadOptions) -> None:
    """Raise ``ValueError`` for broken ``cu_seqlens``."""
    if tensors.cu_seqlens is not None:
        check_cu_seqlens("cu_seqlens", tensors.cu_seqlens, tensors.hidden.size(0), "hidden")
