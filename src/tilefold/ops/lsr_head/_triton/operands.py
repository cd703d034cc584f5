"""What kernels read, made of the tensors of a call: nothing but the tensors themselves, where they fit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.tensors import as_bytes, contiguous
from tilefold.ops._shared.internals import hooked
from tilefold.ops.lsr_head._problem import Tokens, Vocabulary


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
