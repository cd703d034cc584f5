"""What the operators' registrations share: schema pieces, autocast, the choice of implementation, absent gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from tilefold.ops._shared.fallback import triton_or_tiled
from tilefold.ops._shared.impl import settled
from tilefold.ops.lsr_head import _tiled
from tilefold.ops.lsr_head._choice import chosen_impl

T = TypeVar("T")
HEAD = "Tensor hidden, Tensor weight, Tensor? bias"
LAYOUT = "Tensor? attention_mask, Tensor? cu_seqlens"
OPTIONS = "str activation, float logit_scale"


class NotAgainError(Exception):
    """Tensors that lie where the compiled kernels cannot take them: the call goes the long way."""


def compute(impl: str, hidden: Tensor, call: Callable[[ModuleType], T]) -> T:
    """``call(module)`` with the module that computes with ``impl`` on ``hidden``."""
    impl = settled(impl, chosen_impl(hidden, impl))

    def by_kernels() -> T:
        from tilefold.ops.lsr_head import _triton

        return call(_triton)

    return triton_or_tiled("lsr_head", impl, hidden.device, by_kernels, lambda: call(_tiled))


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` with fp32 (fp64) accumulation that is also handed out in fp32 (fp64)."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def present(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None], like: Tensor, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Operators return tensors only: an empty one stands for a gradient that nobody asked for."""
    dhidden, dweight, dbias = (like.new_empty(0) if grad is None else grad for grad in grads)
    return dhidden, dweight, dbias if bias_dtype is None else dbias.to(bias_dtype)


def fake_grads(
    hidden: Tensor, weight: Tensor, need_hidden: bool, need_weight: bool, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if need_hidden else hidden.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else hidden.new_empty(0),
        hidden.new_empty(0) if bias_dtype is None else weight.new_empty(weight.size(0), dtype=bias_dtype),
    )


def asked_for(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))
