"""Alpha-entmax as ``torch.library`` operators: schema, fake kernels and autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilefold.ops._shared import impl as implementations
from tilefold.ops._shared.fallback import triton_or_tiled
from tilefold.ops._shared.impl import settled
from tilefold.ops._shared.library import define_op, forbid_double_backward
from tilefold.ops.entmax import _tiled

T = TypeVar("T")


def chosen_impl(x: Tensor, impl: str = "auto") -> str:
    """Which implementation ``entmax(x, ..., impl=impl)`` runs: ``"reference"``, ``"tiled"`` or ``"triton"``.

    ``"auto"`` takes ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that has it, else ``"tiled"``.

    Raises:
        ValueError: for an unknown name.
        RuntimeError, TypeError: for ``"triton"`` on a device, or with a dtype, that it does not support.
    """
    return implementations.chosen_impl("entmax", "x", x, impl)


def _compute(impl: str, x: Tensor, call: Callable[[ModuleType], T]) -> T:
    """``call(module)`` with the module that computes with ``impl``."""
    impl = settled(impl, chosen_impl(x, impl))

    def by_kernels() -> T:
        from tilefold.ops.entmax import _triton

        return call(_triton)

    return triton_or_tiled("entmax", impl, x.device, by_kernels, lambda: call(_tiled))


@define_op("entmax", "(Tensor x, Tensor? alpha, float alpha_value, str impl) -> (Tensor p, Tensor support)")
def _forward(x: Tensor, alpha: Tensor | None, alpha_value: float, impl: str) -> tuple[Tensor, Tensor]:
    if alpha is not None and alpha.device.type == "cpu" and not bool(((alpha >= 1) & (alpha <= 2)).all()):
        bad = alpha[~((alpha >= 1) & (alpha <= 2))][0].item()
        raise ValueError(f"alpha must lie in [1, 2], got {bad}; parametrise it, for instance as 1 + sigmoid(theta).")
    given = None if alpha is None else alpha.contiguous()  # one alpha for all rows comes expanded
    result: tuple[Tensor, Tensor] = _compute(impl, x, lambda m: m.forward(x.contiguous(), given, alpha_value))
    return result


@torch.library.register_fake("tilefold::entmax")
def _(x: Tensor, alpha: Tensor | None, alpha_value: float, impl: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.size(0), dtype=torch.int32)


@define_op(
    "entmax_backward",
    "(Tensor dp, Tensor p, Tensor? alpha, float alpha_value, bool need_x, bool need_alpha, str impl)"
    " -> (Tensor dx, Tensor dalpha)",
)
def _backward(
    dp: Tensor, p: Tensor, alpha: Tensor | None, alpha_value: float, need_x: bool, need_alpha: bool, impl: str
) -> tuple[Tensor, Tensor]:
    given = None if alpha is None else alpha.contiguous()
    inputs = (dp, p, given, alpha_value, need_x, need_alpha)
    grads: tuple[Tensor | None, Tensor | None] = _compute(impl, p, lambda m: m.backward(*inputs))
    dx, dalpha = grads
    wide = torch.promote_types(p.dtype, torch.float32)
    dalpha = p.new_empty(0, dtype=wide) if dalpha is None else dalpha
    return p.new_empty(0) if dx is None else dx, dalpha if alpha is None else dalpha.to(alpha.dtype)


@torch.library.register_fake("tilefold::entmax_backward")
def _(
    dp: Tensor, p: Tensor, alpha: Tensor | None, alpha_value: float, need_x: bool, need_alpha: bool, impl: str
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(p.dtype, torch.float32) if alpha is None else alpha.dtype
    return (
        p.new_empty(p.shape if need_x else 0),
        p.new_empty(p.size(0) if need_alpha else 0, dtype=dtype),
    )


forbid_double_backward("entmax_backward", "entmax")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, alpha, ctx.alpha_value, ctx.impl = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], alpha)


def _autograd(ctx: Any, dp: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dp is None:
        return None, None, None, None
    need_x, need_alpha = ctx.needs_input_grad[:2]
    p, alpha = ctx.saved_tensors
    dx, dalpha = torch.ops.tilefold.entmax_backward(dp, p, alpha, ctx.alpha_value, need_x, need_alpha, ctx.impl)
    return dx if need_x else None, dalpha if need_alpha else None, None, None


torch.library.register_autograd("tilefold::entmax", _autograd, setup_context=_setup_context)


def entmax_rows(x: Tensor, alpha: Tensor | None, alpha_value: float, impl: str) -> tuple[Tensor, Tensor]:
    """Probabilities ``[R, n]`` and support sizes ``[R]`` of the rows of ``x``; ``alpha`` is ``[R]`` or ``None``."""
    return torch.ops.tilefold.entmax(x, alpha, alpha_value, impl)  # type: ignore[no-any-return]
