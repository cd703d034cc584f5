"""Sum and mean pooling: ``tilefold::lsr_head_sum`` and its backward, which computes the logits again."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.library import define_op, forbid_double_backward, gradient_needs_dispatcher, is_plain, run
from tilefold.ops.lsr_head import _tiled
from tilefold.ops.lsr_head._layout import Plans, batch_size
from tilefold.ops.lsr_head._library.common import (
    HEAD,
    LAYOUT,
    OPTIONS,
    NotAgainError,
    asked_for,
    compute,
    fake_grads,
    present,
)
from tilefold.ops.lsr_head._library.cu_seqlens import check_cu_seqlens, looks_are_free


@define_op(
    "lsr_head_sum",
    f"({HEAD}, {LAYOUT}, {OPTIONS}, ScalarType out_dtype, ScalarType compute_dtype, bool mean, str impl) -> Tensor",
)
def _sum_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    mean: bool,
    impl: str,
    plans: Plans | None = None,
) -> Tensor:
    if cu_seqlens is not None and looks_are_free(hidden, impl):
        check_cu_seqlens(cu_seqlens, hidden.size(0))
    inputs = (hidden, weight, bias, attention_mask, cu_seqlens, activation, logit_scale, out_dtype, compute_dtype)

    def call(module: ModuleType) -> Tensor:
        kept = {} if plans is None or module is _tiled else {"plans": plans}
        return module.sum_forward(*inputs, mean, **kept)  # type: ignore[no-any-return]

    return compute(impl, hidden, call)


@torch.library.register_fake("tilefold::lsr_head_sum")
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    mean: bool,
    impl: str,
) -> Tensor:
    return hidden.new_empty((batch_size(hidden, cu_seqlens), weight.size(0)), dtype=out_dtype)


@define_op(
    "lsr_head_sum_backward",
    f"(Tensor dscores, {HEAD}, {LAYOUT}, {OPTIONS}, ScalarType compute_dtype, bool mean, bool need_hidden,"
    " bool need_weight, bool need_bias, str impl) -> (Tensor dhidden, Tensor dweight, Tensor dbias)",
)
def _sum_backward(
    dscores: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    mean: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (dscores, hidden, weight, bias, attention_mask, cu_seqlens, activation, logit_scale, compute_dtype, mean)
    needs = (need_hidden, need_weight, need_bias)

    def call(module: ModuleType) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return module.sum_backward(*inputs, needs)  # type: ignore[no-any-return]

    return present(compute(impl, hidden, call), hidden, bias.dtype if need_bias and bias is not None else None)


@torch.library.register_fake("tilefold::lsr_head_sum_backward")
def _(
    dscores: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    mean: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_grads(hidden, weight, need_hidden, need_weight, bias.dtype if need_bias and bias is not None else None)


forbid_double_backward("lsr_head_sum_backward", "lsr_head")


def _sum_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    activation, logit_scale, _, compute_dtype, mean, impl = inputs[5:]
    _save(ctx, inputs[:5], (activation, logit_scale, compute_dtype, mean), impl)


def _save(ctx: Any, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], impl: str) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.options, ctx.impl = options, impl


def _gradients(ctx: Any, dscores: Tensor | None, n_inputs: int, *, registered: bool) -> tuple[Tensor | None, ...]:
    """Gradients of hidden, weight and bias, then ``None`` for the other inputs."""
    nothing = (None,) * (n_inputs - 3)
    if dscores is None:
        return (None, None, None, *nothing)
    needs = ctx.needs_input_grad[:3]
    inputs = (dscores, *ctx.saved_tensors, *ctx.options, *needs, ctx.impl)
    if registered or gradient_needs_dispatcher(dscores):
        grads = torch.ops.tilefold.lsr_head_sum_backward(*inputs)
    else:
        grads = run(_sum_backward, *inputs)
    return (*asked_for(grads, needs), *nothing)


def _sum_autograd(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, dscores, 11, registered=True)


torch.library.register_autograd("tilefold::lsr_head_sum", _sum_autograd, setup_context=_sum_setup_context)


class _SumHead(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors; see ``is_plain``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plans: Plans | None, *rest: Any
    ) -> Tensor:
        inputs = (hidden, weight, bias, *rest)
        scores: Tensor = run(_sum_forward, *inputs, plans)
        _sum_setup_context(ctx, inputs, scores)
        return scores

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dscores, 12, registered=False)


class _SumHeadAgain(torch.autograd.Function):
    """Scores by launches that a call of the same signature made before."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plans: Plans, others: tuple[Tensor | None, ...]
    ) -> Tensor | None:
        attention_mask, cu_seqlens, _ = others
        found = plans["forward", True](hidden, weight, None, bias, attention_mask, cu_seqlens)
        if found is None:
            raise NotAgainError
        _save(ctx, (hidden, weight, bias, attention_mask, cu_seqlens), plans["options"], plans["impl"])
        return found[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dscores, 5, registered=False)


# Function.apply without its look at functorch, which the call's signature has had
_apply_again: Any = super(torch.autograd.Function, _SumHeadAgain).apply


def sum_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    mean: bool,
    impl: str,
    plans: Plans | None = None,
) -> Tensor:
    """Sum- or mean-pooled scores ``[B, V]``."""
    if is_plain(hidden, weight, bias, attention_mask, cu_seqlens):
        inputs = (hidden, weight, bias, attention_mask, cu_seqlens)
        options = (activation, logit_scale, out_dtype, compute_dtype, mean, impl)
        if plans is not None:
            plans["apply"], plans["options"] = _apply_again, (activation, logit_scale, compute_dtype, mean)
            plans["impl"] = impl
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs[:3]):
            return _SumHead.apply(*inputs[:3], plans, *inputs[3:], *options)  # type: ignore[no-any-return, no-untyped-call]
        return run(_sum_forward, *inputs, *options, plans)  # type: ignore[no-any-return]
    return torch.ops.tilefold.lsr_head_sum(  # type: ignore[no-any-return]
        hidden,
        weight,
        bias,
        attention_mask,
        cu_seqlens,
        activation,
        logit_scale,
        out_dtype,
        compute_dtype,
        mean,
        impl,
    )
