"""The token scatter as ``torch.library`` operators: schema, fake kernels and autograd, for full-graph compilation."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilefold.ops._shared import impl as implementations
from tilefold.ops._shared.fallback import triton_or_tiled
from tilefold.ops._shared.impl import host_may_read, settled
from tilefold.ops._shared.library import define_op, forbid_double_backward, gradient_needs_dispatcher, is_plain, run
from tilefold.ops.token_scatter import _tiled
from tilefold.ops.token_scatter._problem import Problem, check_values

T = TypeVar("T")
PROBLEM = (
    "Tensor weights, Tensor input_ids, Tensor? attention_mask, Tensor? cu_seqlens, SymInt vocab_size, str reduce,"
    " str activation, int[] ignore_ids, ScalarType out_dtype"
)
COUNT = len(Problem._fields)


def chosen_impl(weights: Tensor, impl: str = "auto") -> str:
    """Which implementation ``token_scatter(weights, ..., impl=impl)`` runs.

    ``"auto"`` takes ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that has it, else ``"tiled"``.

    Raises:
        ValueError: for an unknown name.
        RuntimeError, TypeError: for ``"triton"`` on a device, or with a dtype, that it does not support.
    """
    return implementations.chosen_impl("token_scatter", "weights", weights, impl)


def _compute(impl: str, weights: Tensor, call: Callable[[ModuleType], T]) -> T:
    """``call(module)`` with the module that computes with ``impl``."""
    impl = settled(impl, chosen_impl(weights, impl))

    def by_kernels() -> T:
        from tilefold.ops.token_scatter import _triton

        return call(_triton)

    return triton_or_tiled("token_scatter", impl, weights.device, by_kernels, lambda: call(_tiled))


@define_op("token_scatter", f"({PROBLEM}, bool with_counted, str impl) -> (Tensor scores, Tensor counted)")
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    problem, (with_counted, impl) = Problem(*args[:COUNT]), args[COUNT:]

    def call(module: ModuleType) -> tuple[Tensor, Tensor]:
        # the tiled path looks where it reads
        if module is not _tiled and host_may_read(problem.weights.device, impl):
            check_values(problem)
        return module.forward(problem, with_counted)  # type: ignore[no-any-return]

    return _compute(impl, problem.weights, call)


@torch.library.register_fake("tilefold::token_scatter")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    problem, with_counted = Problem(*args[:COUNT]), args[COUNT]
    weights = problem.weights
    return (
        weights.new_empty((problem.batch, problem.vocab_size), dtype=problem.out_dtype),
        weights.new_empty(weights.shape if with_counted else (0,), dtype=torch.uint8),
    )


@define_op(
    "token_scatter_backward",
    "(Tensor dscores, Tensor weights, Tensor input_ids, Tensor counted, Tensor? cu_seqlens, str activation, str impl)"
    " -> Tensor",
)
def _backward(*args: Any) -> Tensor:
    *inputs, impl = args
    return _compute(impl, inputs[1], lambda module: module.backward(*inputs))  # type: ignore[no-any-return]


@torch.library.register_fake("tilefold::token_scatter_backward")
def _(dscores: Tensor, weights: Tensor, *_: Any) -> Tensor:
    return weights.new_empty(weights.shape)


forbid_double_backward("token_scatter_backward", "token_scatter")


def _keep(ctx: Any, inputs: tuple[Any, ...], counted: Tensor) -> None:
    problem = Problem(*inputs[:COUNT])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(problem.weights, problem.input_ids, counted, problem.cu_seqlens)
    ctx.activation, (ctx.with_counted, ctx.impl) = problem.activation, inputs[COUNT:]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    _keep(ctx, inputs, output[1])


def _autograd(ctx: Any, dscores: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (COUNT + 1)
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
        scores, counted = run(_forward, *inputs)
        _keep(ctx, inputs, counted)
        return scores  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        if dscores is None or gradient_needs_dispatcher(dscores):
            return _autograd(ctx, dscores, None)
        inputs = (dscores, *ctx.saved_tensors, ctx.activation, ctx.impl)
        return (run(_backward, *inputs), *(None,) * (COUNT + 1))


def scatter(problem: Problem, impl: str) -> Tensor:
    """``[B, V]`` scores; what backward needs is kept only if a gradient can be asked for."""
    with_counted = torch.is_grad_enabled() and problem.weights.requires_grad
    inputs = (*problem, with_counted, impl)
    scores: Tensor
    if not is_plain(problem.weights, problem.input_ids, problem.attention_mask, problem.cu_seqlens):
        scores, _ = torch.ops.tilefold.token_scatter(*inputs)
    elif with_counted:
        scores = _Scatter.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        scores, _ = run(_forward, *inputs)
    return scores
