"""What kernels read, made of the tensors of a call: nothing but the tensors themselves, where they fit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.tensors import as_bytes, contiguous
from tilefold.ops._shared.internals import hooked
from tilefold.ops.lsr_head._problem import Needs, Saved, Tokens, Vocabulary


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in contiguous memory."""
    return tensor.to(dtype).contiguous()


class Operands(NamedTuple):
    """How the tensors of a call become operands, for all calls that have the key of the first.

    Attributes:
        dtype: of the operands of products.
        as_is: whether no tensor has to be cast or copied.
        aligned: whether all begin at multiples of 16 bytes.
    """

    dtype: torch.dtype
    as_is: bool
    aligned: bool

    def ready(self, tokens: Tokens, vocabulary: Vocabulary) -> tuple[Tokens, Vocabulary]:
        """The operands: contiguous, in the dtype of products, the mask no bool."""
        return (tokens, vocabulary) if self.as_is else _cast(tokens, vocabulary, self.dtype)

    def same(self) -> bool:
        """Whether launches may be repeated: kernels are compiled for aligned addresses, and hooks hear of all else."""
        return self.aligned and not hooked()


def _cast(tokens: Tokens, vocabulary: Vocabulary, dtype: torch.dtype) -> tuple[Tokens, Vocabulary]:
    hidden, mask, cu_seqlens = tokens
    weight, scale, bias = vocabulary
    return (
        Tokens(in_dtype(hidden, dtype), as_bytes(mask), contiguous(cu_seqlens)),
        Vocabulary(in_dtype(weight, weight.dtype if scale is not None else dtype), contiguous(scale), contiguous(bias)),
    )


def plan_operands(
    tokens: Tokens, vocabulary: Vocabulary, dtype: torch.dtype, aligned: bool
) -> tuple[Operands, Tokens, Vocabulary]:
    """How the operands of such a call are made, and those of this one."""
    cast = _cast(tokens, vocabulary, dtype)
    given, made = (*tokens, *vocabulary), (*cast[0], *cast[1])
    as_is = all(one is other for one, other in zip(given, made, strict=True))
    return Operands(dtype, as_is, aligned), *cast


class SavedOperands(NamedTuple):
    """The same of what backward reads: scores, winners, offsets, hidden and weight.

    Attributes:
        dtype: of the operands of products.
        as_is: whether no tensor has to be cast or copied.
        aligned: whether all begin at multiples of 16 bytes.
        reads_hidden, reads_weight: whether these two are read.
    """

    dtype: torch.dtype
    as_is: bool
    aligned: bool
    reads_hidden: bool
    reads_weight: bool

    def ready(self, saved: Saved, tokens: Tokens, vocabulary: Vocabulary) -> tuple[Tensor | None, ...]:
        """The operands, in that order."""
        given = (*saved, tokens.cu_seqlens, tokens.hidden, vocabulary.weight)
        if self.as_is:
            return given
        *won, hidden, weight = given
        hidden = in_dtype(hidden, self.dtype) if self.reads_hidden else hidden
        weight = in_dtype(weight, self.dtype) if self.reads_weight else weight
        return *map(contiguous, won), hidden, weight

    def same(self) -> bool:
        """Whether launches may be repeated."""
        return self.aligned and not hooked()


class AllOperands(NamedTuple):
    """The same of what backward reads that computes logits again: tokens, weight and bias.

    Attributes:
        operands: of forward.
    """

    operands: Operands

    def ready(self, saved: Saved, tokens: Tokens, vocabulary: Vocabulary) -> tuple[Tensor | None, ...]:
        """The operands, in that order."""
        tokens, (weight, _, bias) = self.operands.ready(tokens, vocabulary)
        return *tokens, weight, bias

    def same(self) -> bool:
        """Whether launches may be repeated."""
        return self.operands.same()


def plan_saved_operands(
    saved: Saved, tokens: Tokens, vocabulary: Vocabulary, needs: Needs, dtype: torch.dtype, aligned: bool
) -> SavedOperands:
    """How such operands are made."""
    hidden, weight = tokens.hidden, vocabulary.weight
    laid_out = all(t is None or t.is_contiguous() for t in (*saved, tokens.cu_seqlens, hidden, weight))
    as_is = hidden.dtype == weight.dtype == dtype and laid_out
    return SavedOperands(dtype, as_is, aligned, needs.weight or needs.bias is not None, needs.hidden)
