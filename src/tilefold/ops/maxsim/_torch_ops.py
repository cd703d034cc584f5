"""MaxSim as ``torch.library`` operators: schemas, fake kernels, autograd, for full-graph ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilefold.ops._shared.call_cache import CallCache, Key, gradient_key, is_aligned
from tilefold.ops._shared.checks import check_cu_seqlens
from tilefold.ops._shared.fallback import SLOWER, KernelUnavailableError, give_up, triton_or_tiled
from tilefold.ops._shared.impl import chosen_impl, host_may_read, settled
from tilefold.ops._shared.internals import is_on_current
from tilefold.ops._shared.library import define_op, forbid_double_backward, gradient_needs_dispatcher, is_plain, run
from tilefold.ops.maxsim._problem import ARGUMENTS, Operands, Options, Problem, wide_dtype

if TYPE_CHECKING:
    from tilefold.ops.maxsim._triton.plan import Plan

PROBLEM_SCHEMA = (
    "Tensor queries, Tensor documents, Tensor? query_mask, Tensor? document_mask, Tensor? cu_queries,"
    " Tensor? cu_documents, SymInt query_length, SymInt document_length, Tensor? index, str pairing, bool mask_zero,"
    " float temperature, bool normalize, SymInt longest_query"
)
PROBLEM_ARGUMENTS = len(ARGUMENTS)

Needs = tuple[bool, bool]  # whether queries and documents want a gradient
Forward = tuple[Tensor, Tensor, Tensor | None]  # scores, and what is kept for backward: winners, facts of rows
Gradients = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class Call:
    """What a call asks for besides its tensors, checked.

    Attributes:
        options: of the problem.
        shape: of the scores.
        impl: the implementation that runs, or while a compiler traces the one that was asked for.
        empty: whether one side has no element, so that every score is 0 and nothing is computed.
        cast: the dtype that autocast gives both sides, if it is another one.
        plan: how the kernels score tensors like these, where that was worked out.
        divisor: what the plan divides scores by.
    """

    options: Options
    shape: tuple[int, ...]
    impl: str
    empty: bool
    cast: torch.dtype | None = None
    plan: Plan | None = None
    divisor: float = 1.0


CALLS: CallCache[Call] = CallCache()  # by the arguments of the public function


def check_values(problem: Problem, impl: str) -> None:
    """Check offsets and pair indices where the host may look: on the CPU, or where the implementation looks anyway."""
    if host_may_read(problem.queries.device, impl) or impl == "reference":
        check_values_of(problem, problem.n_queries, problem.n_documents)


def check_values_of(problem: Problem, n_queries: int, n_documents: int) -> None:
    """Check offsets and pair indices of ``problem`` on the host.

    Raises:
        ValueError: for offsets that are none, and indices out of range.
    """
    if problem.cu_queries is not None:
        check_cu_seqlens("cu_seqlens_q", problem.cu_queries, problem.queries.size(0), "queries")
    if problem.cu_documents is not None:
        check_cu_seqlens("cu_seqlens_d", problem.cu_documents, problem.documents.size(0), "documents")
    if problem.index is not None and problem.index.numel():
        sizes = torch.tensor([n_queries, n_documents], device=problem.index.device)
        bad = ((problem.index < 0) | (problem.index >= sizes)).nonzero()
        if bad.numel():
            pair, side = bad[0].tolist()
            name = ("queries", "documents")[side]
            raise ValueError(
                f"pairing must hold indices below the number of {name} ({int(sizes[side])}), got "
                f"{int(problem.index[pair, side])} in pair {pair}; drop that pair or fix its index."
            )


def impl_of(queries: Tensor, documents: Tensor, impl: str) -> str:
    """The implementation that runs, ``"auto"`` for kernels with the tiled path behind them.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`tilefold.ops._shared.impl.chosen_impl`; ``TypeError`` for
            kernels with fp8 documents on a device without fp8 products.
    """
    chosen = settled(impl, chosen_impl("maxsim", "queries", queries, impl))
    if chosen not in ("auto", "triton") or documents.dtype != torch.float8_e4m3fn or not documents.is_cuda:
        return chosen
    if torch.cuda.get_device_capability(documents.device) >= (8, 9):
        return chosen
    if chosen == "triton":
        raise TypeError(
            "documents must be quantized with dtype='int8' for impl='triton' before compute capability 8.9, got "
            "fp8; use int8 or impl='tiled'."
        )
    give_up("maxsim with fp8 documents", queries.device, "it has no fp8 products", SLOWER)
    return "tiled"


@functools.cache
def _kernels() -> ModuleType:
    from tilefold.ops.maxsim import _triton

    return _triton


@functools.cache
def _tiles() -> ModuleType:
    from tilefold.ops.maxsim import _tiled

    return _tiled


def compute(queries: Tensor, problem: Problem, with_saved: bool, impl: str) -> tuple[Tensor, Tensor]:
    """Scores, and what backward needs (empty unless asked for); ``queries`` tells :func:`run` the device."""
    check_values(problem, impl)
    result: tuple[Tensor, Tensor] = triton_or_tiled(
        "maxsim", impl, queries.device,
        lambda: _kernels().forward(problem, with_saved), lambda: _tiles().forward(problem, with_saved),
    )  # fmt: skip
    return result


def compute_gradients(
    dscores: Tensor,
    saved: Tensor,
    operands: Operands,
    options: Options,
    needs: Needs,
    impl: str,
    key: Key | None = None,
    divisor: float = 1.0,
    facts: Tensor | None = None,
) -> Gradients:
    """Gradients of queries and documents in their shapes, ``None`` where not needed.

    ``key`` is that of their plan; ``dscores`` are those of scores that were divided by ``divisor``, and ``facts``
    those of rows, from the plan of the call.
    """

    def kernels() -> Gradients:
        arguments = operands, options, dscores, saved, needs, key, divisor, facts
        return _kernels().backward(*arguments)  # type: ignore[no-any-return]

    def tiled() -> Gradients:
        problem, grad = Problem.of(operands, options), dscores if divisor == 1.0 else dscores / divisor
        return _in_shape(_tiles().backward(problem, grad.reshape(problem.score_shape), saved, *needs), operands)

    return triton_or_tiled("maxsim", impl, dscores.device, kernels, tiled)


def _in_shape(grads: Sequence[Tensor | None], operands: Operands) -> Gradients:
    sides = (operands.queries, operands.documents)
    dqueries, ddocuments = (
        None if grad is None else grad.reshape(rows.shape) for grad, rows in zip(grads, sides, strict=True)
    )
    return dqueries, ddocuments


@define_op("maxsim", f"({PROBLEM_SCHEMA}, bool with_saved, str impl) -> (Tensor scores, Tensor saved)")
def _maxsim(*args: Any) -> tuple[Tensor, Tensor]:
    problem, (with_saved, impl) = Problem(*args[:PROBLEM_ARGUMENTS]), args[PROBLEM_ARGUMENTS:]
    return compute(problem.queries, problem, with_saved, impl_of(problem.queries, problem.documents, impl))


@torch.library.register_fake("tilefold::maxsim")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    problem, with_saved = Problem(*args[:PROBLEM_ARGUMENTS]), args[PROBLEM_ARGUMENTS]
    queries = problem.queries
    saved = problem.saved_shape if with_saved else (0, 0)
    return (
        queries.new_empty(problem.score_shape, dtype=wide_dtype(queries.dtype)),
        queries.new_empty(saved, dtype=problem.saved_dtype),
    )


@define_op(
    "maxsim_backward",
    f"(Tensor dscores, Tensor saved, {PROBLEM_SCHEMA}, bool need_queries, bool need_documents, str impl)"
    " -> (Tensor dqueries, Tensor ddocuments)",
)
def _maxsim_backward(dscores: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    problem, (*needs, impl) = Problem(*args[:PROBLEM_ARGUMENTS]), args[PROBLEM_ARGUMENTS:]
    impl = impl_of(problem.queries, problem.documents, impl)
    grads = compute_gradients(dscores, saved, problem.operands, problem.options, (needs[0], needs[1]), impl)
    # operators return tensors only: an empty one stands for a gradient that nobody asked for
    dqueries, ddocuments = (dscores.new_empty(0) if grad is None else grad for grad in grads)
    return dqueries, ddocuments


@torch.library.register_fake("tilefold::maxsim_backward")
def _(dscores: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    problem, (need_queries, need_documents, _) = Problem(*args[:PROBLEM_ARGUMENTS]), args[PROBLEM_ARGUMENTS:]
    sides = ((problem.queries, need_queries), (problem.documents, need_documents))
    dqueries, ddocuments = (
        torch.empty_like(rows, memory_format=torch.contiguous_format) if needed else dscores.new_empty(0)
        for rows, needed in sides
    )
    return dqueries, ddocuments


forbid_double_backward("maxsim_backward", "maxsim")


def save_problem(ctx: Any, inputs: tuple[Any, ...], *results: Tensor) -> None:
    """Keep ``results`` and the arguments of the problem, which come first in ``inputs``, for a gradient."""
    ctx.set_materialize_grads(False)
    tensors = [value if isinstance(value, Tensor) else None for value in inputs[:PROBLEM_ARGUMENTS]]
    ctx.save_for_backward(*results, *tensors)
    ctx.others = [None if isinstance(value, Tensor) else value for value in inputs[:PROBLEM_ARGUMENTS]]


def saved_problem(ctx: Any) -> tuple[list[Tensor], Problem]:
    """What :func:`save_problem` kept: the results, and the problem."""
    saved = ctx.saved_tensors
    results, tensors = saved[:-PROBLEM_ARGUMENTS], saved[-PROBLEM_ARGUMENTS:]
    return list(results), Problem(*[other if t is None else t for t, other in zip(tensors, ctx.others, strict=True)])


def registered_gradients(dscores: Tensor, saved: Tensor, problem: Problem, needs: Needs, impl: str) -> Gradients:
    """Gradients by the registered operator, which refuses a second derivative."""
    grads = torch.ops.tilefold.maxsim_backward(dscores, saved, *problem.arguments, *needs, impl)
    dqueries, ddocuments = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return dqueries, ddocuments


def gradients(
    dscores: Tensor, saved: Tensor, operands: Operands, call: Call, needs: Needs, facts: Tensor | None = None
) -> Gradients:
    """Gradients of queries and documents in their shapes, ``None`` where not needed."""
    divisor = 1.0 if call.plan is None else call.divisor
    if gradient_needs_dispatcher(dscores):
        problem = Problem.of(operands, call.options)
        grad = (dscores / divisor).reshape(problem.score_shape)
        return _in_shape(registered_gradients(grad, saved, problem, needs, call.impl), operands)
    key = None if call.plan is None else gradient_key(call, needs, dscores, (saved, facts, *operands))
    plan = None if key is None else _kernels().GRADIENT_PLANS.find(key)
    if plan is not None and is_on_current(dscores):
        try:
            return plan(*operands, saved, dscores, facts)  # type: ignore[no-any-return]
        except KernelUnavailableError:  # looks for what can run
            pass
    arguments = dscores, saved, operands, call.options, needs, call.impl, key, divisor, facts
    return run(compute_gradients, *arguments)  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    save_problem(ctx, inputs, output[1])
    ctx.with_saved, ctx.impl = inputs[PROBLEM_ARGUMENTS:]


def _backward(ctx: Any, dscores: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * PROBLEM_ARGUMENTS  # the masks and whatever follows
    if dscores is None:
        return (None, None, *nothing)
    if not ctx.with_saved:
        raise RuntimeError("tilefold::maxsim needs with_saved=True where a gradient is asked for; call maxsim.")
    (saved,), problem = saved_problem(ctx)
    return *registered_gradients(dscores, saved, problem, ctx.needs_input_grad[:2], ctx.impl), *nothing


torch.library.register_autograd("tilefold::maxsim", _backward, setup_context=_setup_context)


class _MaxSim(torch.autograd.Function):
    """Scores and their gradient without the dispatcher, for plain tensors; see ``is_plain``."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, documents: Tensor, operands: Operands, call: Call) -> Tensor:
        # torch looks at every argument in Python: what has no gradient comes in one
        ctx.call = call
        scores, saved, facts = _run_forward(queries, operands, call, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(saved, facts, *operands)
        return scores

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        if dscores is None:
            return None, None, None, None
        saved, facts, *operands = ctx.saved_tensors
        grads = gradients(dscores, saved, Operands(*operands), ctx.call, ctx.needs_input_grad[:2], facts)
        return (*grads, None, None)


def _run_forward(queries: Tensor, operands: Operands, call: Call, with_saved: bool) -> Forward:
    """Scores, in their final shape if ``call`` has a plan, and what backward needs."""
    if call.plan is None:
        return *run(compute, queries, Problem.of(operands, call.options), with_saved, call.impl), None
    if not is_on_current(queries):
        return run(_run_forward, queries, operands, call, with_saved)  # type: ignore[no-any-return]
    if not queries.is_cuda and any(tensor is not None for tensor in operands[4:7]):  # offsets and pairs
        check_values(Problem.of(operands, call.options), call.impl)
    try:
        return call.plan(*operands)
    except KernelUnavailableError:  # gives up what cannot be built; calls that follow are planned without it
        scores, saved = run(compute, queries, Problem.of(operands, call.options), with_saved, call.impl)
        return scores.view(call.shape) / call.divisor, saved, None  # no view: it may be changed in place


def planned(key: Key | None, operands: Operands, call: Call, training: bool) -> Call:
    """``call`` with a plan for tensors like these, kept as ``key``; as it is where no kernels or no ``key`` are."""
    of_values = training and operands.pairs is not None and operands.cu_queries is not None  # its longest query
    if key is None or call.impl not in ("triton", "auto") or of_values:
        return call
    problem, aligned = Problem.of(operands, call.options), is_aligned(key)
    plan = _kernels().plan_forward(problem, operands, training, call.shape, aligned, call.divisor)
    return CALLS.keep(key, replace(call, plan=plan))


def scores(operands: Operands, call: Call, training: bool) -> Tensor:
    """Scores of checked operands; what backward needs is kept only if a gradient can be asked for."""
    if call.plan is None and not is_plain(*operands):
        problem = Problem.of(operands, call.options)
        if problem.document_scale is None:
            found = torch.ops.tilefold.maxsim(*problem.arguments, training, call.impl)[0]
        else:
            values = (problem.queries, problem.documents, problem.document_scale, *problem.arguments[2:-2])
            found = torch.ops.tilefold.maxsim_quantized(*values, call.impl)
    elif training:
        found = _MaxSim.apply(operands.queries, operands.documents, operands, call)  # type: ignore[no-untyped-call]
    else:
        found = _run_forward(operands.queries, operands, call, False)[0]
    return found if call.plan is not None else found.view(call.shape)  # type: ignore[no-any-return]


_MASKS_AND_LAYOUT = (
    "Tensor? query_mask, Tensor? document_mask, Tensor? cu_queries, Tensor? cu_documents, SymInt query_length,"
    " SymInt document_length, Tensor? index, str pairing, bool mask_zero, float temperature"
)


def _quantized_problem(queries: Tensor, values: Tensor, scales: Tensor, *rest: Any) -> Problem:
    """The problem of quantized documents; ``rest`` are its arguments from the masks on."""
    return Problem(queries, values, *rest, False, 0, scales)  # type: ignore[call-arg]


@define_op(
    "maxsim_quantized",
    f"(Tensor queries, Tensor values, Tensor scales, {_MASKS_AND_LAYOUT}, str impl) -> Tensor",
)
def _maxsim_quantized(queries: Tensor, values: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    problem = _quantized_problem(queries, values, scales, *rest[:-1])
    return compute(queries, problem, False, impl_of(queries, values, rest[-1]))[0]


@torch.library.register_fake("tilefold::maxsim_quantized")
def _(queries: Tensor, values: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    problem = _quantized_problem(queries, values, scales, *rest[:-1])
    return queries.new_empty(problem.score_shape, dtype=torch.float32)
