"""XTR scores as a ``torch.library`` operator; its gradient is that of the maximum, :mod:`._library`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.library import define_op, is_plain, run
from tilefold.ops.maxsim._choice import chosen_impl
from tilefold.ops.maxsim._library import (
    PROBLEM_ARGUMENTS,
    PROBLEM_SCHEMA,
    check_values,
    gradients,
    save_problem,
    saved_problem,
)
from tilefold.ops.maxsim._problem import Problem, wide_dtype


@define_op(
    "maxsim_xtr",
    f"({PROBLEM_SCHEMA}, SymInt top_k, bool impute, bool with_saved, str impl)"
    " -> (Tensor scores, Tensor saved, Tensor divisor)",
)
def _xtr(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from tilefold.ops.maxsim import _tiled_xtr  # noqa: PLC0415

    problem, (top_k, impute, with_saved, impl) = Problem(*args[:PROBLEM_ARGUMENTS]), args[PROBLEM_ARGUMENTS:]
    chosen_impl(problem.queries, impl)
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
    _save(ctx, inputs, output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    save_problem(ctx, inputs, output[1], output[2])
    _, ctx.impute, ctx.with_saved, ctx.impl = inputs[PROBLEM_ARGUMENTS:]


def _gradients(ctx: Any, dscores: Tensor | None, *, registered: bool) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (PROBLEM_ARGUMENTS + 2)  # the masks and whatever follows
    if dscores is None:
        return (None, None, *nothing)
    (saved, divisor), arguments = saved_problem(ctx)
    needs = ctx.needs_input_grad[:2]
    return *gradients(dscores / divisor, saved, arguments, needs, ctx.impl, registered=registered), *nothing


def _backward(ctx: Any, dscores: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dscores is not None and (ctx.impute or not ctx.with_saved):
        raise RuntimeError(
            "tilefold::maxsim_xtr needs with_saved=True and impute=False where a gradient is asked for; call "
            "xtr_scores."
        )
    return _gradients(ctx, dscores, registered=True)


torch.library.register_autograd("tilefold::maxsim_xtr", _backward, setup_context=_setup_context)


class _XTR(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = run(_xtr, *inputs)
        _save(ctx, inputs, output)
        return output[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dscores, registered=False)


def scores(problem: Problem, top_k: int, impute: bool, impl: str) -> Tensor:
    """XTR scores of ``problem``; what backward needs is kept only if a gradient can be asked for."""
    p = problem
    with_saved = torch.is_grad_enabled() and (p.queries.requires_grad or p.documents.requires_grad)
    inputs = (
        p.queries, p.documents, p.query_mask, p.document_mask, p.cu_queries, p.cu_documents, p.query_length,
        p.document_length, p.index, p.pairing, p.mask_zero, p.temperature, p.normalize, p.longest_query, top_k,
        impute, with_saved, impl,
    )  # fmt: skip
    if not is_plain(p.queries, p.documents, p.query_mask, p.document_mask, p.cu_queries, p.cu_documents):
        return torch.ops.tilefold.maxsim_xtr(*inputs)[0]  # type: ignore[no-any-return]
    return _XTR.apply(*inputs) if with_saved else run(_xtr, *inputs)[0]  # type: ignore[no-any-return, no-untyped-call]
