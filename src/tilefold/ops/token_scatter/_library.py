"""The token scatter as ``torch.library`` operators: schema, fake kernels and autograd, for full-graph compilation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilefold.ops._shared.fallback import triton_or_tiled
from tilefold.ops._shared.impl import settled
from tilefold.ops._shared.library import define_op, forbid_double_backward, gradient_needs_dispatcher, is_plain
from tilefold.ops.token_scatter import _tiled
from tilefold.ops.token_scatter._choice import chosen_impl
from tilefold.ops.token_scatter._layout import batch_size, check_cu_seqlens, check_ids, valid_tokens

T = TypeVar("T")
FORWARD = (
    "(Tensor weights, Tensor input_ids, Tensor? attention_mask, Tensor? cu_seqlens, SymInt vocab_size, str reduce,"
    " str activation, int[] ignore_ids, ScalarType out_dtype, bool with_counted, str impl)"
    " -> (Tensor scores, Tensor counted)"
)
BACKWARD = (
    "(Tensor dscores, Tensor weights, Tensor input_ids, Tensor counted, Tensor? cu_seqlens, str activation, str impl)"
    " -> Tensor"
)


def _compute(impl: str, weights: Tensor, call: Callable[[ModuleType], T]) -> T:
    """``call(module)`` with the module that computes with ``impl``."""
    impl = settled(impl, chosen_impl(weights, impl))

    def by_kernels() -> T:
        from tilefold.ops.token_scatter import _triton  # noqa: PLC0415

        return call(_triton)

    return triton_or_tiled("token_scatter", impl, weights.device, by_kernels, lambda: call(_tiled))


def looks_are_free(weights: Tensor) -> bool:
    """Whether the host may read values without a synchronisation; the tiled path reads them in any case."""
    return weights.device.type != "cuda"


@define_op("token_scatter", FORWARD)
def _forward(
    weights: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    vocab_size: int,
    reduce: str,
    activation: str,
    ignore_ids: Sequence[int],
    out_dtype: torch.dtype,
    with_counted: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    inputs = (weights, input_ids, attention_mask, cu_seqlens, vocab_size, reduce, activation, ignore_ids, out_dtype)

    def call(module: ModuleType) -> tuple[Tensor, Tensor]:
        if module is not _tiled and looks_are_free(weights):
            if cu_seqlens is not None:
                check_cu_seqlens(cu_seqlens, weights.size(0))
            check_ids(input_ids, valid_tokens(input_ids, attention_mask, ignore_ids), vocab_size)
        return module.forward(*inputs, with_counted)  # type: ignore[no-any-return]

    return _compute(impl, weights, call)


@torch.library.register_fake("tilefold::token_scatter")
def _(
    weights: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    vocab_size: int,
    reduce: str,
    activation: str,
    ignore_ids: Sequence[int],
    out_dtype: torch.dtype,
    with_counted: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    return (
        weights.new_empty((batch_size(weights, cu_seqlens), vocab_size), dtype=out_dtype),
        weights.new_empty(weights.shape if with_counted else (0,), dtype=torch.uint8),
    )


@define_op("token_scatter_backward", BACKWARD)
def _backward(
    dscores: Tensor,
    weights: Tensor,
    input_ids: Tensor,
    counted: Tensor,
    cu_seqlens: Tensor | None,
    activation: str,
    impl: str,
) -> Tensor:
    inputs = (dscores, weights, input_ids, counted, cu_seqlens, activation)
    result: Tensor = _compute(impl, weights, lambda module: module.backward(*inputs))
    return result


@torch.library.register_fake("tilefold::token_scatter_backward")
def _(
    dscores: Tensor,
    weights: Tensor,
    input_ids: Tensor,
    counted: Tensor,
    cu_seqlens: Tensor | None,
    activation: str,
    impl: str,
) -> Tensor:
    return weights.new_empty(weights.shape)


forbid_double_backward("token_scatter_backward", "token_scatter")


def _keep(ctx: Any, inputs: tuple[Any, ...], counted: Tensor) -> None:
    weights, input_ids, _, cu_seqlens, _, _, activation, _, _, with_counted, impl = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weights, input_ids, counted, cu_seqlens)
    ctx.activation, ctx.with_counted, ctx.impl = activation, with_counted, impl


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    _keep(ctx, inputs, output[1])


def _autograd(ctx: Any, dscores: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 10
    if dscores is None:
        return (None, *nothing)
    if not ctx.with_counted:
        raise RuntimeError(
            "tilefold::token_scatter needs with_counted=True where a gradient is asked for; call token_scatter."
        )
    inputs = (dscores, *ctx.saved_tensors, ctx.activation, ctx.impl)
    return (torch.ops.tilefold.token_scatter_backward(*inputs), *nothing)


torch.library.register_autograd("tilefold::token_scatter", _autograd, setup_context=_setup_context)


class _Scatter(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, which costs several times the kernels."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        scores, counted = _on_device(_forward, *inputs)
        _keep(ctx, inputs, counted)
        return scores  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        if dscores is None or gradient_needs_dispatcher(dscores):
            return _autograd(ctx, dscores, None)
        inputs = (dscores, *ctx.saved_tensors, ctx.activation, ctx.impl)
        return (_on_device(_backward, *inputs), *(None,) * 10)


def _on_device(function: Callable[..., Any], *args: Any) -> Any:
    """Call an implementation with the GPU of its first argument as the current one: kernels are launched there."""
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return function(*args)
    return function(*args)


def scatter(
    weights: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    vocab_size: int,
    reduce: str,
    activation: str,
    ignore_ids: tuple[int, ...],
    out_dtype: torch.dtype,
    impl: str,
) -> Tensor:
    """``[B, V]`` scores; what backward needs is kept only if a gradient can be asked for."""
    tensors = (weights, input_ids, attention_mask, cu_seqlens)
    with_counted = torch.is_grad_enabled() and weights.requires_grad
    options = (vocab_size, reduce, activation, list(ignore_ids), out_dtype, with_counted, impl)
    scores: Tensor
    if not is_plain(*tensors):
        scores, _ = torch.ops.tilefold.token_scatter(*tensors, *options)
    elif with_counted:
        scores = _Scatter.apply(*tensors, *options)  # type: ignore[no-untyped-call]
    else:
        scores, _ = _on_device(_forward, *tensors, *options)
    return scores
