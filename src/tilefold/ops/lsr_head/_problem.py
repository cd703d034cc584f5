"""Records of a call's tensors, options and gradients, from the public function to the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_cu_seqlens
from tilefold.ops._shared.plan import Buffer
from tilefold.ops._shared.winners import winner_dtype


class Pooling(NamedTuple):
    """Tensors that the backward pass of a pooling reads.

    Attributes:
        reads: names of the tensors.
        winners: ``"entry"`` if every score has a winner, ``"sequence"`` if a sequence has one
            winner (which is stored only if a mask hides it), or ``"none"`` if all tokens take part.
    """

    reads: frozenset[str]
    winners: str


_ALWAYS_READ = frozenset({"hidden", "cu_seqlens", "weight"})
_READ_WITH_WINNERS = _ALWAYS_READ | {"scores", "winners"}
_READ_WITHOUT_WINNERS = _ALWAYS_READ | {"bias", "attention_mask"}
POOLINGS = {
    "max": Pooling(_READ_WITH_WINNERS, "entry"),
    "sum": Pooling(_READ_WITHOUT_WINNERS, "none"),
    "mean": Pooling(_READ_WITHOUT_WINNERS, "none"),
    "cls": Pooling(_READ_WITH_WINNERS, "sequence"),
    "last": Pooling(_READ_WITH_WINNERS, "sequence"),
}


class Tokens(NamedTuple):
    """Token states, padded or packed, and their division into sequences.

    Attributes:
        hidden: padded ``[B, S, D]`` or packed ``[T, D]`` token states.
        attention_mask: ``[B, S]``, nonzero = valid, of padded input; ``None`` if all are valid.
        cu_seqlens: ``[B + 1]`` offsets of packed input.
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
        """S of padded input, 0 of packed input."""
        return self.hidden.size(1) if self.cu_seqlens is None else 0

    @property
    def length_bound(self) -> int:
        """Upper bound of the sequences' lengths, without reading values: S padded, T packed."""
        return self.hidden.size(1) if self.hidden.dim() == 3 else self.hidden.size(0)

    @property
    def n_rows(self) -> int:
        """Number of token states, padding included."""
        return self.hidden.numel() // self.hidden.size(-1)


class HeadTensors(NamedTuple):
    """The tensors of a call.

    Attributes:
        hidden: token states; see :class:`Tokens`.
        attention_mask: mask of padded input; see :class:`Tokens`.
        cu_seqlens: offsets of packed input; see :class:`Tokens`.
        weight: ``[V, D]``, in fp8 if quantised.
        weight_scale: ``[V]`` fp32 scales of a quantised weight, or ``None``.
        bias: ``[V]``, or ``None``.
    """

    hidden: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    weight: Tensor
    weight_scale: Tensor | None
    bias: Tensor | None

    @property
    def tokens(self) -> Tokens:
        """The token states and their division into sequences."""
        return Tokens(self.hidden, self.attention_mask, self.cu_seqlens)


class HeadOptions(NamedTuple):
    """Options that passed the checks.

    Attributes:
        pooling: reduction over the tokens of a sequence, a key of :data:`POOLINGS`.
        activation: function applied to logits.
        logit_scale: factor of the products, before the bias is added.
        out_dtype: dtype of the scores.
        compute_dtype: dtype of the operands of products.
        bias_dtype: dtype of the bias, or ``None`` without one.
        screen: whether an 8-bit product first excludes scores that cannot be positive.
    """

    pooling: str
    activation: str
    logit_scale: float
    out_dtype: torch.dtype
    compute_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    screen: bool = False


class HeadSaved(NamedTuple):
    """Tensors that are saved for backward.

    Token states, offsets and weight always are, the others if :data:`POOLINGS` names them. A winner
    is a token's position in its sequence, padding included. In packed input that is the distance
    from ``cu_seqlens[b]``.
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
        """The token states and their division into sequences."""
        return Tokens(self.hidden, self.attention_mask, self.cu_seqlens)


class Needs(NamedTuple):
    """Which gradients are computed."""

    hidden: bool
    weight: bool
    bias: bool


# of hidden, weight and bias; None for a gradient that is not needed
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def outputs(tensors: HeadTensors, options: HeadOptions, training: bool) -> tuple[Buffer, Buffer]:
    """Return shapes and dtypes of the results: scores ``[B, V]`` and winners.

    A winner is the position of the token whose logit determines a score. Winners are ``[B, V]``, or
    ``[B, 1]`` for a pooling that selects one token per sequence. They have no elements if backward
    does not read them.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: whether a backward pass may follow.
    """
    tokens = tensors.tokens
    vocab = tensors.weight.size(0)
    kind = POOLINGS[options.pooling].winners
    # Without a mask, the lengths determine the token that a pooling selects for a sequence.
    backward_reads_winners = training and (
        kind == "entry" or (kind == "sequence" and tokens.attention_mask is not None)
    )
    n_rows = tokens.batch if backward_reads_winners else 0
    n_columns = vocab if kind == "entry" else 1
    scores = Buffer((tokens.batch, vocab), options.out_dtype)
    winners = Buffer((n_rows, n_columns), winner_dtype(tokens.length_bound))
    return scores, winners


def reads(options: HeadOptions) -> frozenset[str]:
    """Return the names of the tensors that backward reads."""
    return POOLINGS[options.pooling].reads


def bias_gradient(saved: HeadSaved, options: HeadOptions) -> Buffer:
    """Return shape and dtype of the bias's gradient.

    The bias itself is not saved by max pooling and by poolings of one token.
    """
    return Buffer((saved.weight.size(0),), options.bias_dtype or options.compute_dtype)


def check_values(tensors: HeadTensors, options: HeadOptions) -> None:
    """Raise ``ValueError`` for invalid ``cu_seqlens``, whose values are read."""
    if tensors.cu_seqlens is not None:
        check_cu_seqlens("cu_seqlens", tensors.cu_seqlens, tensors.hidden.size(0), "hidden")
