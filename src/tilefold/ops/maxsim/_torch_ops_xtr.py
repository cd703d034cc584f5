"""XTR scores as a ``torch.library`` operator; its gradient is that of the maximum, :mod:`._torch_ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.library import define_op, is_plain, run
from tilefold.ops.maxsim._problem import Operands, Problem, wide_dtype
from tilefold.ops.maxsim._torch_ops import (
    PROBLEM_ARGUMENTS,
    PROBLEM_SCHEMA,
    Call,
    check_values,
    gradients,
    impl_of,
    registered_gradients,
    save_problem,
    saved_problem,
)


@define_op(
    "maxsim_xtr",
    f"({PROBLEM_SCHEMA}, SymInt top_k, bool impute, bool with_saved, str impl)"
    " -> (Tensor scores, Tensor saved, Tensor divisor)",
)
def _xtr(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from tilefold.ops.maxsim import _tiled_xtr  # noqa: PLC0415

    problem, (top_k, impute, with_saved, impl) = Problem(*args[:PROBLEM_ARGUMENTS]), args[PROBLEM_ARGUMENTS:]
    impl_of(problem.queries, problem.documents, impl)
    check_values(problem, "tiled")  # forward runs in torch operations, which look at offsets anyway
    return _tiled_xtr.forward(problem, top_k, impute, with_saved)


@torch.library.register_fake("tilefold::maxsim_xtr")  # type: ignore[untyped-decorator]
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, (_, _, with_saved, _) = Problem(*args[:PROBLEM_ARGUMENTS]), args[PROBLEM_ARGUMENTS:]
    queries = problem.queries
    wide = wide_dtype(queries.dtype)
    return (
        queries.new_empty(problem.score_shape, dtype=wide),
        queries.new_empty(problem.saved_shape if with_saved else (0, 0), dtype=problem.saved_dtype),
        queries.new_empty(problem.score_shape, dtype=wide),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1], output[2])
    save_problem(ctx, inputs, output[1], output[2])
    _, ctx.impute, ctx.with_saved, ctx.impl = inputs[PROBLEM_ARGUMENTS:]


def _backward(ctx: Any, dscores: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (PROBLEM_ARGUMENTS + 2)  # the masks and whatever follows
    if dscores is None:
        return (None, None, *nothing)
    if ctx.impute or not ctx.with_saved:
        raise RuntimeError(
            "tilefold::maxsim_xtr needs with_saved=True and impute=False where a gradient is asked for; call "
            "xtr_scores."
        )
    (saved, divisor), problem = saved_problem(ctx)
    return *registered_gradients(dscores / divisor, saved, problem, ctx.needs_input_grad[:2], ctx.impl), *nothing


torch.library.register_autograd("tilefold::maxsim_xtr", _backward, setup_context=_setup_context)


class _XTR(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, ctx.call, top_k = inputs
        operands = Operands(*tensors)
        scores, saved, divisor = run(_compute, operands.queries, operands, ctx.call, top_k, False, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(saved, divisor, *operands)
        return scores  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        if dscores is None:
            return (None,) * 10
        saved, divisor, *tensors = ctx.saved_tensors
        operands, needs = Operands(*tensors), ctx.needs_input_grad[:2]
        return (*gradients(dscores / divisor, saved, operands, ctx.call, needs), *(None,) * 8)


def _compute(
    queries: Tensor, operands: Operands, call: Call, top_k: int, impute: bool, with_saved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _xtr(*Problem.of(operands, call.options).arguments, top_k, impute, with_saved, call.impl)  # type: ignore[no-any-return]


def scores(operands: Operands, call: Call, top_k: int, impute: bool) -> Tensor:
    """XTR scores of checked operands; what backward needs is kept only if a gradient can be asked for."""
    training = torch.is_grad_enabled() and (operands.queries.requires_grad or operands.documents.requires_grad)
    if not is_plain(*operands):
        arguments = Problem.of(operands, call.options).arguments
        return torch.ops.tilefold.maxsim_xtr(*arguments, top_k, impute, training, call.impl)[0]  # type: ignore[no-any-return]
    if training:
        return _XTR.apply(*operands, call, top_k)  # type: ignore[no-any-return, no-untyped-call]
    return run(_compute, operands.queries, operands, call, top_k, impute, False)[0]  # type: ignore[no-any-return]
