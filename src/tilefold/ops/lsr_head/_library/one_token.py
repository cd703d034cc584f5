"""One token a sequence (cls and last pooling): ``tilefold::lsr_head_token``, a plain product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.library import define_op, forbid_double_backward, gradient_needs_dispatcher, is_plain, run
from tilefold.ops.lsr_head._activation import activate, slope_from_score
from tilefold.ops.lsr_head._library.common import asked_for, fake_grads, present, product
from tilefold.ops.lsr_head._range import largest_finite, unit_of


@define_op(
    "lsr_head_token",
    "(Tensor token, Tensor weight, Tensor? bias, str activation, float logit_scale, ScalarType out_dtype,"
    " ScalarType compute_dtype) -> Tensor",
)
def _token_forward(
    token: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> Tensor:
    logits = product(token.to(compute_dtype), weight.to(compute_dtype).T)
    if logit_scale != 1.0:
        logits *= logit_scale
    if bias is not None:
        logits += bias
    return activate(logits, activation).to(out_dtype)


@torch.library.register_fake("tilefold::lsr_head_token")
def _(
    token: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> Tensor:
    return token.new_empty((token.size(0), weight.size(0)), dtype=out_dtype)


@define_op(
    "lsr_head_token_backward",
    "(Tensor dscores, Tensor scores, Tensor token, Tensor weight, str activation, float logit_scale,"
    " ScalarType compute_dtype, bool need_token, bool need_weight, ScalarType? bias_dtype)"
    " -> (Tensor dtoken, Tensor dweight, Tensor dbias)",
)
def _token_backward(
    dscores: Tensor,
    scores: Tensor,
    token: Tensor,
    weight: Tensor,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    need_token: bool,
    need_weight: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(compute_dtype, torch.float32)
    grad = dscores.to(wide) * slope_from_score(scores.to(wide), activation)
    dbias = grad.sum(dim=0) if bias_dtype is not None else None
    grad = grad * logit_scale
    if compute_dtype == torch.float16 and grad.numel():
        dtoken = _product_in_fp16(grad, weight).to(token.dtype) if need_token else None
        dweight = _product_in_fp16(grad.T, token).to(weight.dtype) if need_weight else None
    else:
        grad = grad.to(compute_dtype)
        dtoken = product(grad, weight.to(compute_dtype)).to(token.dtype) if need_token else None
        dweight = product(grad.T, token.to(compute_dtype)).to(weight.dtype) if need_weight else None
    return present((dtoken, dweight, dbias), token, bias_dtype)


def _product_in_fp16(grad: Tensor, other: Tensor) -> Tensor:
    """``grad @ other`` in fp32 by fp16 products; every row of ``grad`` has a range of its own."""
    unit = unit_of(largest_finite(grad, dim=1))  # [rows, 1]
    return product((grad / unit).half(), other.half()).mul_(unit)


@torch.library.register_fake("tilefold::lsr_head_token_backward")
def _(
    dscores: Tensor,
    scores: Tensor,
    token: Tensor,
    weight: Tensor,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    need_token: bool,
    need_weight: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_grads(token, weight, need_token, need_weight, bias_dtype)


forbid_double_backward("lsr_head_token_backward", "lsr_head")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    token, weight, bias, activation, logit_scale, _, compute_dtype = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output, token, weight)
    ctx.options = (activation, logit_scale, compute_dtype)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, dscores: Tensor | None, *, registered: bool) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 4
    if dscores is None:
        return (None, None, None, *nothing)
    needs = ctx.needs_input_grad[:3]
    inputs = (dscores, *ctx.saved_tensors, *ctx.options, *needs[:2], ctx.bias_dtype if needs[2] else None)
    if registered or gradient_needs_dispatcher(dscores):
        grads = torch.ops.tilefold.lsr_head_token_backward(*inputs)
    else:
        grads = run(_token_backward, *inputs)
    return (*asked_for(grads, needs), *nothing)


def _token_autograd(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, dscores, registered=True)


torch.library.register_autograd("tilefold::lsr_head_token", _token_autograd, setup_context=_save)


class _TokenHead(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors; see ``is_plain``."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        scores: Tensor = run(_token_forward, *inputs)
        _save(ctx, inputs, scores)
        return scores

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dscores, registered=False)


def token_head(
    token: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> Tensor:
    """Scores ``[B, V]`` of one token a sequence, ``token`` ``[B, D]``."""
    inputs = (token, weight, bias, activation, logit_scale, out_dtype, compute_dtype)
    if not is_plain(token, weight, bias):
        return torch.ops.tilefold.lsr_head_token(*inputs)  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (token, weight, bias)):
        return _TokenHead.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]
    return run(_token_forward, *inputs)  # type: ignore[no-any-return]
