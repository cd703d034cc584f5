"""Max pooling: ``tilefold::lsr_head_max`` and its backward, which needs the scores and winners only."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.library import (
    define_op,
    forbid_double_backward,
    gradient_needs_dispatcher,
    is_plain,
    run,
)
from tilefold.ops.lsr_head import _tiled
from tilefold.ops.lsr_head._layout import Plans, batch_size, length_bound, winner_dtype
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
from tilefold.ops.lsr_head._quantized import QuantizedWeight


@define_op(
    "lsr_head_max",
    f"({HEAD}, {LAYOUT}, {OPTIONS}, ScalarType out_dtype, ScalarType compute_dtype, bool with_winners, str impl)"
    " -> (Tensor scores, Tensor winners)",
)
def _max_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    with_winners: bool,
    impl: str,
    plans: Plans | None = None,
) -> tuple[Tensor, Tensor]:
    if cu_seqlens is not None and looks_are_free(hidden, impl):
        check_cu_seqlens(cu_seqlens, hidden.size(0))
    inputs = (hidden, weight, bias, attention_mask, cu_seqlens, activation, logit_scale, out_dtype, compute_dtype)

    def call(module: ModuleType) -> tuple[Tensor, Tensor]:
        kept = {} if plans is None or module is _tiled else {"plans": plans}
        return module.max_forward(*inputs, with_winners, length_bound(hidden), **kept)  # type: ignore[no-any-return]

    return compute(impl, hidden, call)


@torch.library.register_fake("tilefold::lsr_head_max")
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
    with_winners: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    shape = (batch_size(hidden, cu_seqlens), weight.size(0))
    dtype = winner_dtype(length_bound(hidden))
    return (
        hidden.new_empty(shape, dtype=out_dtype),
        hidden.new_empty((shape[0] if with_winners else 0, shape[1]), dtype=dtype),
    )


@define_op(
    "lsr_head_max_backward",
    "(Tensor dscores, Tensor scores, Tensor winners, Tensor hidden, Tensor weight, Tensor? cu_seqlens,"
    f" {OPTIONS}, ScalarType compute_dtype, bool need_hidden, bool need_weight, ScalarType? bias_dtype, str impl)"
    " -> (Tensor dhidden, Tensor dweight, Tensor dbias)",
)
def _max_backward(
    dscores: Tensor,
    scores: Tensor,
    winners: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    need_hidden: bool,
    need_weight: bool,
    bias_dtype: torch.dtype | None,
    impl: str,
    main_grad: Tensor | None = None,
    plans: Plans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (dscores, scores, winners, hidden, weight, cu_seqlens, activation, logit_scale, compute_dtype)
    needs = (need_hidden, need_weight, bias_dtype is not None)

    def call(module: ModuleType) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        more = {} if module is _tiled else {"bias_dtype": bias_dtype, "plans": plans}
        return module.max_backward(*inputs, needs, main_grad, **more)  # type: ignore[no-any-return]

    return present(compute(impl, hidden, call), hidden, bias_dtype)


@torch.library.register_fake("tilefold::lsr_head_max_backward")
def _(
    dscores: Tensor,
    scores: Tensor,
    winners: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    need_hidden: bool,
    need_weight: bool,
    bias_dtype: torch.dtype | None,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_grads(hidden, weight, need_hidden, need_weight, bias_dtype)


forbid_double_backward("lsr_head_max_backward", "lsr_head")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, _, cu_seqlens, activation, logit_scale, _, compute_dtype, with_winners, impl = inputs
    scores, winners = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(scores, winners, hidden, weight, cu_seqlens)
    ctx.options = (activation, logit_scale, compute_dtype)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.with_winners, ctx.impl = with_winners, impl


def _max_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    _save(ctx, inputs, output)


def _gradients(
    ctx: Any,
    dscores: Tensor | None,
    n_inputs: int,
    *,
    registered: bool,
    main_grad: Tensor | None = None,
    plans: Plans | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of hidden, weight and bias, then ``None`` for the other inputs."""
    nothing = (None,) * (n_inputs - 3)
    if dscores is None:
        return (None, None, None, *nothing)
    needed = need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    saved = ctx.saved_tensors
    registered = registered or gradient_needs_dispatcher(dscores)
    if plans is not None and not registered:
        again = plans.get(("gradients", dscores.stride(), needed))
        if again is not None and (known := again(dscores, *saved, main_grad)) is not None:
            return (*known, *nothing)
    inputs = (dscores, *saved, *ctx.options)
    needs = (need_hidden, need_weight, ctx.bias_dtype if need_bias else None)
    if registered:
        if main_grad is not None:
            raise RuntimeError(
                "weight_main_grad cannot be used with create_graph=True or is_grads_batched=True; leave one of them "
                "out."
            )
        grads = torch.ops.tilefold.lsr_head_max_backward(*inputs, *needs, ctx.impl)
    else:
        grads = run(_max_backward, *inputs, *needs, ctx.impl, main_grad, plans)
    if main_grad is not None:
        need_weight = False
    return (*asked_for(grads, (need_hidden, need_weight, need_bias)), *nothing)


def _max_autograd(ctx: Any, dscores: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dscores is not None and not ctx.with_winners:
        raise RuntimeError("lsr_head_max needs with_winners=True where a gradient is asked for; call lsr_head.")
    return _gradients(ctx, dscores, 11, registered=True)


torch.library.register_autograd("tilefold::lsr_head_max", _max_autograd, setup_context=_max_setup_context)


class _MaxHead(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors; see ``is_plain``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main_grad: Tensor | None,
        plans: Plans | None,
        *rest: Any,
    ) -> Tensor:
        inputs = (hidden, weight, bias, *rest)
        output = run(_max_forward, *inputs, plans)
        _save(ctx, inputs, output)
        ctx.main_grad, ctx.plans = main_grad, plans
        return output[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dscores, 13, registered=False, main_grad=ctx.main_grad, plans=ctx.plans)


class _MaxHeadAgain(torch.autograd.Function):
    """Scores and gradients by launches that a call of the same signature made before."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plans: Plans, others: tuple[Tensor | None, ...]
    ) -> Tensor | None:
        attention_mask, cu_seqlens, main_grad = others
        found = plans["forward", True](hidden, weight, None, bias, attention_mask, cu_seqlens)
        if found is None:
            raise NotAgainError
        scores, winners = found
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scores, winners, hidden, weight, cu_seqlens)
        ctx.options, ctx.impl = plans["options"], plans["impl"]
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.main_grad, ctx.plans = main_grad, plans
        return scores  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dscores, 5, registered=False, main_grad=ctx.main_grad, plans=ctx.plans)


# Function.apply without its look at functorch, which the call's signature has had
_apply_again: Any = super(torch.autograd.Function, _MaxHeadAgain).apply


def scores_again(
    plans: Plans,
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    main_grad: Tensor | None,
) -> Tensor | None:
    """Scores of a call like the one that ``plans`` come from, or ``None`` if it must be planned.

    All that can differ from that call is where the tensors lie, and who wants a gradient.
    """
    scale = None
    if isinstance(weight, QuantizedWeight):
        scale, weight = weight.scale, weight.values
        training = False
    else:
        training = torch.is_grad_enabled() and (
            hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )
    replay = plans.get(("forward", training))
    if replay is None:
        return None
    if not training:
        found = replay(hidden, weight, scale, bias, attention_mask, cu_seqlens)
        return None if found is None else found[0]
    try:
        return plans["apply"](hidden, weight, bias, plans, (attention_mask, cu_seqlens, main_grad))  # type: ignore[no-any-return]
    except NotAgainError:
        return None


def max_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    impl: str,
    weight_main_grad: Tensor | None = None,
    plans: Plans | None = None,
) -> Tensor:
    """Max-pooled scores ``[B, V]``; winners are kept only if a gradient can be asked for."""
    with_winners = torch.is_grad_enabled() and (
        hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    place = (attention_mask, cu_seqlens)
    options = (activation, logit_scale, out_dtype, compute_dtype, with_winners, impl)
    if is_plain(hidden, weight, bias, *place):
        if plans is not None:
            plans["apply"], plans["options"] = _apply_again, (activation, logit_scale, compute_dtype)
            plans["impl"] = impl
        if with_winners:
            return _MaxHead.apply(hidden, weight, bias, weight_main_grad, plans, *place, *options)  # type: ignore[no-any-return, no-untyped-call]
        return run(_max_forward, hidden, weight, bias, *place, *options, plans)[0]  # type: ignore[no-any-return]
    if weight_main_grad is not None:
        raise RuntimeError(
            "weight_main_grad cannot be used under torch.compile or with tensor subclasses; leave it out there, "
            "and add weight.grad to it after backward."
        )
    scores, _ = torch.ops.tilefold.lsr_head_max(hidden, weight, bias, *place, *options)
    return scores  # type: ignore[no-any-return]
