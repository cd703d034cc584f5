"""The token scatter as ``torch.library`` operators: schema, fake kernels and autograd, for full-graph compilation."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilefold.ops._shared import impl as implementations
from tilefold.ops._shared.call_cache import CallCache, Key, call_key, gradient_key, is_aligned
from tilefold.ops._shared.fallback import triton_or_tiled
from tilefold.ops._shared.impl import host_may_read, settled
from tilefold.ops._shared.library import define_op, forbid_double_backward, gradient_needs_dispatcher, is_plain, run
from tilefold.ops.token_scatter import _tiled
from tilefold.ops.token_scatter._problem import Problem, check_values

if TYPE_CHECKING:
    from tilefold.ops._shared._triton.launch import Step
    from tilefold.ops.token_scatter._triton.scatter import ForwardPlan

PROBLEM = (
    "Tensor weights, Tensor input_ids, Tensor? attention_mask, Tensor? cu_seqlens, SymInt vocab_size, str reduce,"
    " str activation, int[] ignore_ids, ScalarType out_dtype"
)
COUNT = len(Problem._fields)
Saved = tuple[Tensor, Tensor, Tensor, Tensor | None]  # weights, input_ids, counted, cu_seqlens


def chosen_impl(weights: Tensor, impl: str = "auto") -> str:
    """Which implementation ``token_scatter(weights, ..., impl=impl)`` runs.

    ``"auto"`` takes ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that has it, else ``"tiled"``.

    Raises:
        ValueError: for an unknown name.
        RuntimeError, TypeError: for ``"triton"`` on a device, or with a dtype, that it does not support.
    """
    return implementations.chosen_impl("token_scatter", "weights", weights, impl)


@functools.cache
def _kernels() -> ModuleType:
    from tilefold.ops.token_scatter import _triton

    return _triton


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """How a call runs, checked. Equal to itself only, so that it may be part of a key.

    Attributes:
        impl: the implementation, or while a compiler traces the one that was asked for.
        out_dtype: of the scores.
        with_counted: whether what backward needs is kept.
        plan: how the kernels are launched for tensors like these, where that was worked out.
    """

    impl: str
    out_dtype: torch.dtype
    with_counted: bool
    plan: ForwardPlan | None = None


CALLS: CallCache[Call] = CallCache()  # by the arguments of the public function, or of the registered operator
_BACKWARD: CallCache[Step | None] = CallCache()


def planned(key: Key | None, problem: Problem, call: Call) -> Call:
    """``call`` with a plan for tensors like these, kept as ``key``; as it is where no kernels or no ``key`` are."""
    if key is None or call.impl not in ("triton", "auto"):
        return call

    def plan() -> Call:
        made = _kernels().plan_forward(problem, call.with_counted, is_aligned(key))
        return CALLS.keep(key, dataclasses.replace(call, plan=made))

    return triton_or_tiled("token_scatter", call.impl, problem.weights.device, plan, lambda: call)


def _run_forward(weights: Tensor, problem: Problem, call: Call) -> tuple[Tensor, Tensor]:
    """Scores, and which tokens the gradient goes to; ``weights`` tells :func:`run` the device."""

    def kernels() -> tuple[Tensor, Tensor]:
        if host_may_read(weights.device, "triton"):
            check_values(problem)
        plan = _kernels().plan_forward(problem, call.with_counted, False) if call.plan is None else call.plan
        return _kernels().forward(plan, problem)  # type: ignore[no-any-return]

    return triton_or_tiled(
        "token_scatter", call.impl, weights.device, kernels, lambda: _tiled.forward(problem, call.with_counted)
    )


def _run_backward(dscores: Tensor, saved: Saved, activation: str, impl: str, key: Key | None) -> Tensor:
    """The gradient of the weights; ``key`` is that of the launch, which is worked out anew without one."""
    weights, _, _, cu_seqlens = saved

    def kernels() -> Tensor:
        gather = _BACKWARD.find(key)
        if gather is None:
            gather = _kernels().plan_backward(dscores, weights, cu_seqlens, activation)
            if key is not None:
                _BACKWARD.keep(key, gather)
        return _kernels().backward(gather, dscores, *saved)  # type: ignore[no-any-return]

    return triton_or_tiled(
        "token_scatter", impl, weights.device, kernels, lambda: _tiled.backward(dscores, *saved, activation)
    )


@define_op("token_scatter", f"({PROBLEM}, bool with_counted, str impl) -> (Tensor scores, Tensor counted)")
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    problem, (with_counted, asked) = Problem(*args[:COUNT]), args[COUNT:]
    impl = settled(asked, chosen_impl(problem.weights, asked))
    options = (*problem[4:7], tuple(problem.ignore_ids), problem.out_dtype, with_counted, impl)
    key = call_key(problem[:4], ("registered", *options))
    call = CALLS.find(key) or planned(key, problem, Call(impl, problem.out_dtype, with_counted))
    return _run_forward(problem.weights, problem, call)


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
def _backward(dscores: Tensor, *args: Any) -> Tensor:
    saved, (activation, impl) = args[:4], args[4:]
    key = call_key((dscores, *saved), (activation,))
    return _run_backward(dscores, saved, activation, settled(impl, chosen_impl(saved[0], impl)), key)


@torch.library.register_fake("tilefold::token_scatter_backward")
def _(dscores: Tensor, weights: Tensor, *_: Any) -> Tensor:
    return weights.new_empty(weights.shape)


forbid_double_backward("token_scatter_backward", "token_scatter")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    problem = Problem(*inputs[:COUNT])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(problem.weights, problem.input_ids, output[1], problem.cu_seqlens)
    ctx.activation, (ctx.with_counted, ctx.impl) = problem.activation, inputs[COUNT:]


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
    def forward(ctx: Any, weights: Tensor, problem: Problem, call: Call) -> Tensor:
        scores, counted = run(_run_forward, weights, problem, call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weights, problem.input_ids, counted, problem.cu_seqlens)
        ctx.activation, ctx.call = problem.activation, call
        return scores  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        if dscores is None:
            return None, None, None
        saved, activation, call = ctx.saved_tensors, ctx.activation, ctx.call
        if gradient_needs_dispatcher(dscores):
            inputs = (dscores, *saved, activation, call.impl)
            return torch.ops.tilefold.token_scatter_backward(*inputs), None, None
        key = None if call.plan is None else gradient_key(call, (), dscores, saved)
        return run(_run_backward, dscores, saved, activation, call.impl, key), None, None


def scatter(problem: Problem, call: Call) -> Tensor:
    """``[B, V]`` scores; a ``call`` that has a plan has plain tensors."""
    scores: Tensor
    if call.plan is None and not is_plain(*problem[:4]):
        scores, _ = torch.ops.tilefold.token_scatter(*problem, call.with_counted, call.impl)
    elif call.with_counted:
        scores = _Scatter.apply(problem.weights, problem, call)  # type: ignore[no-untyped-call]
    else:
        scores, _ = run(_run_forward, problem.weights, problem, call)
    return scores
