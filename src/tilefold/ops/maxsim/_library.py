"""MaxSim as ``torch.library`` operators: schemas, fake kernels, autograd, for full-graph ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.fallback import SLOWER, give_up, triton_or_tiled
from tilefold.ops._shared.impl import settled
from tilefold.ops._shared.internals import no_dispatch_mode
from tilefold.ops._shared.library import define_op, gradient_needs_dispatcher, is_plain, run
from tilefold.ops.maxsim._choice import chosen_impl
from tilefold.ops.maxsim._problem import GRADIENTS, IMPL, REPLAY, TRAINING, Problem, wide_dtype
from tilefold.ops.maxsim.quantized import QuantizedTokens

PROBLEM_SCHEMA = (
    "Tensor queries, Tensor documents, Tensor? query_mask, Tensor? document_mask, Tensor? cu_queries,"
    " Tensor? cu_documents, SymInt query_length, SymInt document_length, Tensor? index, str pairing, bool mask_zero,"
    " float temperature, bool normalize, SymInt longest_query"
)
PROBLEM_ARGUMENTS = PROBLEM_SCHEMA.count(",") + 1


def check_cu_seqlens(name: str, cu_seqlens: Tensor, rows: int, side: str) -> None:
    """Check the values of packed offsets on the host.

    Raises:
        ValueError: unless they start with 0, never fall, and end at the number of rows.
    """
    values = cu_seqlens.tolist()
    falls = next((i for i in range(1, len(values)) if values[i] < values[i - 1]), None)
    if values[0] != 0:
        problem = f"{name}[0] = {values[0]}"
    elif falls is not None:
        problem = f"{name}[{falls}] = {values[falls]} after {values[falls - 1]}"
    elif values[-1] != rows:
        problem = f"{name}[-1] = {values[-1]} with {rows} rows in {side}"
    else:
        return
    raise ValueError(
        f"{name} must start with 0, never fall and end at the number of rows T of {side}, got {problem}; "
        "build it as the cumulative sum of the lengths with a 0 in front."
    )


def check_values(problem: Problem, impl: str) -> None:
    """Check offsets and pair indices where the host may look: on the CPU, or where the implementation looks anyway."""
    if not (problem.queries.device.type == "cuda" and impl in ("triton", "auto")):
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


@functools.cache
def _implementation(impl: str) -> ModuleType:
    if impl == "tiled":
        from tilefold.ops.maxsim import _tiled  # noqa: PLC0415

        return _tiled
    from tilefold.ops.maxsim import _triton  # noqa: PLC0415 (needs triton)

    return _triton


def _by(impl: str, problem: Problem, call: Callable[[ModuleType], Any]) -> Any:
    """``call(module)`` with the module that computes with ``impl``."""
    device = problem.queries.device
    kernels, tiled = (functools.partial(_called, call, name) for name in ("triton", "tiled"))
    return triton_or_tiled("maxsim", impl, device, kernels, tiled)


def _called(call: Callable[[ModuleType], Any], impl: str) -> Any:
    return call(_implementation(impl))


@define_op("maxsim", f"({PROBLEM_SCHEMA}, bool with_saved, str impl) -> (Tensor scores, Tensor saved)")
def _maxsim(*args: Any) -> tuple[Tensor, Tensor]:
    problem, with_saved = Problem(*args[:PROBLEM_ARGUMENTS]), args[PROBLEM_ARGUMENTS]
    impl = args[PROBLEM_ARGUMENTS + 1]
    return compute(problem.queries, problem, with_saved, settled(impl, chosen_impl(problem.queries, impl)))


def compute(queries: Tensor, problem: Problem, with_saved: bool, impl: str) -> tuple[Tensor, Tensor]:
    """Scores, and what backward needs (empty unless asked for); ``queries`` for :func:`run` to find the device."""
    check_values(problem, impl)
    result: tuple[Tensor, Tensor] = _by(impl, problem, lambda module: module.forward(problem, with_saved))
    return result


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
    problem, (need_queries, need_documents, impl) = Problem(*args[:PROBLEM_ARGUMENTS]), args[PROBLEM_ARGUMENTS:]
    impl = settled(impl, chosen_impl(problem.queries, impl))
    grads = compute_gradients(dscores, saved, problem, need_queries, need_documents, impl)
    # operators return tensors only: an empty one stands for a gradient that nobody asked for
    dqueries, ddocuments = (dscores.new_empty(0) if grad is None else grad for grad in grads)
    return dqueries, ddocuments


def compute_gradients(
    dscores: Tensor, saved: Tensor, problem: Problem, need_queries: bool, need_documents: bool, impl: str
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, ``None`` where not needed."""
    grads: tuple[Tensor | None, Tensor | None] = _by(
        impl, problem, lambda module: module.backward(problem, dscores, saved, need_queries, need_documents)
    )
    return grads


@torch.library.register_fake("tilefold::maxsim_backward")
def _(dscores: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    problem, (need_queries, need_documents, _) = Problem(*args[:PROBLEM_ARGUMENTS]), args[PROBLEM_ARGUMENTS:]
    sides = ((problem.queries, need_queries), (problem.documents, need_documents))
    dqueries, ddocuments = (
        torch.empty_like(rows, memory_format=torch.contiguous_format) if needed else dscores.new_empty(0)
        for rows, needed in sides
    )
    return dqueries, ddocuments


def _no_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "tilefold::maxsim_backward has no derivative: maxsim can be differentiated once. Leave out create_graph=True, "
        "or use impl='reference', which can be differentiated again."
    )


def _setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)


torch.library.register_autograd("tilefold::maxsim_backward", _no_second_derivative, setup_context=_setup_nothing)


def save_problem(ctx: Any, inputs: tuple[Any, ...], *results: Tensor) -> None:
    """Keep ``results`` and the arguments of the problem, which come first in ``inputs``, for a gradient."""
    ctx.set_materialize_grads(False)
    tensors = [value if isinstance(value, Tensor) else None for value in inputs[:PROBLEM_ARGUMENTS]]
    ctx.save_for_backward(*results, *tensors)
    ctx.others = [None if isinstance(value, Tensor) else value for value in inputs[:PROBLEM_ARGUMENTS]]


def saved_problem(ctx: Any) -> tuple[list[Tensor], list[Any]]:
    """What :func:`save_problem` kept: the results, and the arguments of the problem."""
    saved = ctx.saved_tensors
    results, tensors = saved[:-PROBLEM_ARGUMENTS], saved[-PROBLEM_ARGUMENTS:]
    return list(results), [other if t is None else t for t, other in zip(tensors, ctx.others, strict=True)]


def gradients(
    dscores: Tensor,
    saved: Tensor,
    arguments: list[Any],
    needs: tuple[bool, bool],
    impl: str,
    *,
    registered: bool,
    plans: dict[Any, Any] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, ``None`` where not needed."""
    if not (registered or gradient_needs_dispatcher(dscores)):
        problem = Problem(*arguments)
        problem.plans = plans
        impl = settled(impl, chosen_impl(problem.queries, impl))
        return run(compute_gradients, dscores, saved, problem, *needs, impl)  # type: ignore[no-any-return]
    # the registered operator refuses a second derivative
    grads = torch.ops.tilefold.maxsim_backward(dscores, saved, *arguments, *needs, impl)
    dqueries, ddocuments = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return dqueries, ddocuments


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save_problem(ctx, inputs, output[1])
    ctx.with_saved, ctx.impl, *_ = inputs[PROBLEM_ARGUMENTS:]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    _save(ctx, inputs, output)


def _gradients(ctx: Any, dscores: Tensor | None, *, registered: bool) -> tuple[Tensor | None, ...]:
    nothing = (None,) * PROBLEM_ARGUMENTS  # the masks and whatever follows
    if dscores is None:
        return (None, None, *nothing)
    (saved,), arguments = saved_problem(ctx)
    plans = None if registered else ctx.plans
    needs = ctx.needs_input_grad[:2]
    return *gradients(dscores, saved, arguments, needs, ctx.impl, registered=registered, plans=plans), *nothing


def _backward(ctx: Any, dscores: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dscores is not None and not ctx.with_saved:
        raise RuntimeError("tilefold::maxsim needs with_saved=True where a gradient is asked for; call maxsim.")
    return _gradients(ctx, dscores, registered=True)


torch.library.register_autograd("tilefold::maxsim", _backward, setup_context=_setup_context)


class _MaxSim(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors; see ``is_plain``."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        problem = Problem(*inputs[:PROBLEM_ARGUMENTS])
        with_saved, impl, problem.plans, problem.final_shape = inputs[PROBLEM_ARGUMENTS:]
        output = run(compute, problem.queries, problem, with_saved, impl)
        _save(ctx, inputs, output)
        ctx.plans = problem.plans
        return output[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, dscores, registered=False), None, None


def scores(problem: Problem, impl: str) -> Tensor:
    """Scores of ``problem``; what backward needs is kept only if a gradient can be asked for."""
    p = problem
    with_saved = torch.is_grad_enabled() and (p.queries.requires_grad or p.documents.requires_grad)
    if p.plans is not None:  # plain tensors were asked for when they were made
        plain = no_dispatch_mode()
    else:
        plain = is_plain(p.queries, p.documents, p.query_mask, p.document_mask, p.cu_queries, p.cu_documents, p.index)
    if plain and not with_saved:
        return run(compute, p.queries, p, False, impl)[0]  # type: ignore[no-any-return]
    inputs = (
        p.queries, p.documents, p.query_mask, p.document_mask, p.cu_queries, p.cu_documents, p.query_length,
        p.document_length, p.index, p.pairing, p.mask_zero, p.temperature, p.normalize, p.longest_query, with_saved,
        impl,
    )  # fmt: skip
    if plain:
        return _MaxSim.apply(*inputs, p.plans, p.final_shape)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.tilefold.maxsim(*inputs)[0]  # type: ignore[no-any-return]


class _Replayed(torch.autograd.Function):
    """Scores and gradients by launches that a call of the same signature made before; see ``_triton/replay.py``."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, documents: Tensor, plans: dict[Any, Any], addresses: Any, *others: Tensor | None
    ) -> Tensor:
        scores, saved = plans[TRAINING](addresses, documents)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(saved, queries, documents, *others)
        ctx.plans = plans
        return scores  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Any, ...]:
        nothing = (None,) * 6
        if dscores is None:
            return (None, None, *nothing)
        saved, queries, documents, *others = ctx.saved_tensors
        need_queries, need_documents, *_ = ctx.needs_input_grad
        plans = ctx.plans
        gradients_again = plans.get(GRADIENTS)
        if gradients_again is not None and not gradient_needs_dispatcher(dscores):
            grads = gradients_again(dscores, saved, queries, documents, *others, need_queries, need_documents)
            if grads is not None:
                return (*grads, *nothing)
        query_mask, document_mask, *offsets = others
        fixed = plans[TRAINING].fixed
        arguments = [
            queries.reshape(-1, queries.size(-1)), documents.reshape(-1, documents.size(-1)),
            None if query_mask is None else query_mask.reshape(-1),
            None if document_mask is None else document_mask.reshape(-1), *offsets, *fixed,
        ]  # fmt: skip
        dqueries, ddocuments = gradients(
            dscores.reshape(plans[TRAINING].score_shape), saved, arguments, (need_queries, need_documents), plans[IMPL],
            registered=torch.compiler.is_compiling(), plans=plans,
        )  # fmt: skip
        return (
            None if dqueries is None else dqueries.reshape(queries.shape),
            None if ddocuments is None else ddocuments.reshape(documents.shape),
            *nothing,
        )


def scores_again(
    plans: dict[Any, Any],
    queries: Tensor,
    documents: Tensor | QuantizedTokens,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    cu_queries: Tensor | None,
    cu_documents: Tensor | None,
) -> Tensor | None:
    """Scores, in their final shape, of a call like the one that ``plans`` come from, or ``None`` if it must be planned.

    All that can differ from that call is where the tensors lie, and who wants a gradient.
    """
    scale = None
    if isinstance(documents, QuantizedTokens):
        scale, documents = documents.scales, documents.values
        if scale.data_ptr() % 16 or not scale.is_contiguous():
            return None
    training = (queries.requires_grad or documents.requires_grad) and torch.is_grad_enabled()
    replay = plans.get(TRAINING if training else REPLAY)
    if replay is None or not no_dispatch_mode():
        return None
    try:
        addresses = replay.addresses(queries, documents, query_mask, document_mask, cu_queries, cu_documents)
    except RuntimeError:  # a tensor without memory of its own, that a transform left behind
        return None
    if addresses is None:
        return None
    if not training:
        return replay(addresses, documents, scale)[0]  # type: ignore[no-any-return]
    return _apply_replayed(  # type: ignore[no-any-return]
        queries, documents, plans, addresses, query_mask, document_mask, cu_queries, cu_documents
    )


# Function.apply without its look at functorch, which no_dispatch_mode has had
_apply_replayed: Any = super(torch.autograd.Function, _Replayed).apply


_MASKS_AND_LAYOUT = (
    "Tensor? query_mask, Tensor? document_mask, Tensor? cu_queries, Tensor? cu_documents, SymInt query_length,"
    " SymInt document_length, Tensor? index, str pairing, bool mask_zero, float temperature"
)


def quantized_problem(queries: Tensor, values: Tensor, scales: Tensor, *rest: Any, int8_rows: Any) -> Problem:
    """The problem whose queries are in int8 too where the documents are; ``int8_rows`` quantizes them."""
    if values.dtype == torch.int8:
        rows, query_scale = int8_rows(queries)
    else:
        rows, query_scale = queries, torch.ones(queries.size(0), dtype=torch.float32, device=queries.device)
    return Problem(rows, values, *rest, False, 0, query_scale, scales)  # type: ignore[call-arg]


@define_op(
    "maxsim_quantized",
    f"(Tensor queries, Tensor values, Tensor scales, {_MASKS_AND_LAYOUT}, str impl) -> Tensor",
)
def _maxsim_quantized(queries: Tensor, values: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    impl = settled(rest[-1], chosen_impl(queries, rest[-1]))
    return compute_quantized(queries, values, scales, rest[:-1], impl)


def compute_quantized(
    queries: Tensor,
    values: Tensor,
    scales: Tensor,
    rest: tuple[Any, ...],
    impl: str,
    plans: dict[Any, Any] | None = None,
    final_shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Scores against quantized documents; ``rest`` are the arguments of a problem from its masks on."""
    old = values.is_cuda and torch.cuda.get_device_capability(values.device) < (8, 9)
    if values.dtype != torch.int8 and old and impl == "triton":
        raise TypeError(
            "documents must be quantized with dtype='int8' for impl='triton' before compute capability 8.9, got "
            "fp8; use int8 or impl='tiled'."
        )

    def scores_by(int8_rows: Callable[[Tensor], tuple[Tensor, Tensor]], name: str) -> Tensor:
        problem = quantized_problem(queries, values, scales, *rest, int8_rows=int8_rows)
        problem.query_source, problem.plans, problem.final_shape = queries, plans, final_shape
        check_values(problem, name)
        return _implementation(name).forward(problem, False)[0]  # type: ignore[no-any-return]

    def kernels() -> Tensor:
        from tilefold.ops.maxsim._triton import quantize_rows as int8_rows  # noqa: PLC0415 (needs triton)

        return scores_by(int8_rows, "triton")

    def tiled() -> Tensor:
        from tilefold.ops.maxsim._tiled import quantized_rows as int8_rows  # noqa: PLC0415 (the other needs no tiles)

        return scores_by(int8_rows, "tiled")

    if values.dtype != torch.int8 and old and impl == "auto":
        give_up("maxsim with fp8 documents", queries.device, "it has no fp8 products", SLOWER)
        return tiled()
    return triton_or_tiled("maxsim", impl, queries.device, kernels, tiled)


@torch.library.register_fake("tilefold::maxsim_quantized")
def _(queries: Tensor, values: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    problem = Problem(queries, values, *rest[:-1], False, 0)  # type: ignore[call-arg]
    return queries.new_empty(problem.score_shape, dtype=torch.float32)


def quantized_scores(problem: Problem, scales: Tensor, impl: str) -> Tensor:
    """Scores against quantized documents, ``problem.documents`` being their values."""
    p = problem
    rest = (
        p.query_mask, p.document_mask, p.cu_queries, p.cu_documents, p.query_length, p.document_length, p.index,
        p.pairing, p.mask_zero, p.temperature,
    )  # fmt: skip
    if is_plain(p.queries, p.documents, scales, p.query_mask, p.document_mask, p.cu_queries, p.cu_documents, p.index):
        impl = settled(impl, chosen_impl(p.queries, impl))
        return run(compute_quantized, p.queries, p.documents, scales, rest, impl, p.plans, p.final_shape)  # type: ignore[no-any-return]
    return torch.ops.tilefold.maxsim_quantized(p.queries, p.documents, scales, *rest, impl)  # type: ignore[no-any-return]
