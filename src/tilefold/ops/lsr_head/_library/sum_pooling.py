"""Sum and mean pooling: ``tilefold::lsr_head_sum`` and its backward, which computes the logits again."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.library import define_op, forbid_double_backward
from tilefold.ops.lsr_head._layout import batch_size
from tilefold.ops.lsr_head._library.common import HEAD, LAYOUT, OPTIONS, asked_for, fake_grads, implementation, present
from tilefold.ops.lsr_head._library.cu_seqlens import broken_cu_seqlens, check_cu_seqlens, looks_are_free


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
) -> Tensor:
    if cu_seqlens is not None and looks_are_free(hidden, impl):
        check_cu_seqlens(cu_seqlens, hidden.size(0))
    scores: Tensor = implementation(impl, hidden).sum_forward(
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
    )
    if cu_seqlens is not None and not looks_are_free(hidden, impl):
        scores.masked_fill_(broken_cu_seqlens(cu_seqlens, hidden.size(0)), math.nan)
    return scores


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
    grads = implementation(impl, hidden).sum_backward(
        dscores,
        hidden,
        weight,
        bias,
        attention_mask,
        cu_seqlens,
        activation,
        logit_scale,
        compute_dtype,
        mean,
        (need_hidden, need_weight, need_bias),
    )
    return present(grads, hidden, bias.dtype if need_bias and bias is not None else None)


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
    hidden, weight, bias, mask, cu_seqlens, activation, logit_scale, _, compute_dtype, mean, impl = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, mask, cu_seqlens)
    ctx.options = (activation, logit_scale, compute_dtype, mean)
    ctx.impl = impl


def _sum_autograd(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 8
    if dscores is None:
        return (None, None, None, *nothing)
    needs = ctx.needs_input_grad[:3]
    grads = torch.ops.tilefold.lsr_head_sum_backward(dscores, *ctx.saved_tensors, *ctx.options, *needs, ctx.impl)
    return (*asked_for(grads, needs), *nothing)


torch.library.register_autograd("tilefold::lsr_head_sum", _sum_autograd, setup_context=_sum_setup_context)


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
) -> Tensor:
    """Sum- or mean-pooled scores ``[B, V]``."""
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
