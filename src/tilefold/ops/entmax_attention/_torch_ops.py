"""Alpha-entmax attention as ``torch.library`` operators: schema, fake kernels and autograd."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilefold.ops._shared import impl as implementations
from tilefold.ops._shared.call_cache import CallCache, Key, call_key, gradient_key, is_aligned
from tilefold.ops._shared.fallback import KernelUnavailableError, triton_or_tiled
from tilefold.ops._shared.impl import settled
from tilefold.ops._shared.internals import is_on_current
from tilefold.ops._shared.library import define_op, forbid_double_backward, gradient_needs_dispatcher, is_plain, run
from tilefold.ops.entmax_attention import _tiled
from tilefold.ops.entmax_attention._problem import AttentionTensors, Options
from tilefold.ops.entmax_attention._values import check_offsets, check_values
from tilefold.ops.entmax_attention.configs import live_shape

if TYPE_CHECKING:
    from tilefold.ops.entmax_attention._triton.launch import ForwardPlan
    from tilefold.ops.entmax_attention._triton.launch_backward import BackwardPlan

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? alpha, Tensor? key_padding_mask, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " Tensor? seed"
)
OPTIONS = "float alpha_value, bool causal, int window, float scale, float dropout_p, SymInt max_seqlen_k"
COUNT = len(AttentionTensors._fields)  # of tensors, and
END = COUNT + len(Options._fields)  # of options after them

Needs = tuple[bool, bool, bool, bool]  # which of q, k, v and alpha want a gradient
Saved = tuple[Tensor | None, Tensor, Tensor | None]  # what delta is made from, statistics, map of live blocks
Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # output, and what is saved
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def chosen_impl(q: Tensor, impl: str = "auto") -> str:
    """Which implementation ``entmax_attention(q, ..., impl=impl)`` runs: ``"reference"``, ``"tiled"``, ``"triton"``.

    ``"auto"`` takes ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that has it, else ``"tiled"``.

    Raises:
        ValueError: for an unknown name.
        RuntimeError, TypeError: for ``"triton"`` on a device, or with a dtype, that it does not support.
    """
    return implementations.chosen_impl("entmax_attention", "q", q, impl)


@functools.cache
def _kernels() -> ModuleType:
    from tilefold.ops.entmax_attention import _triton

    return _triton


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """What a call asks for besides its tensors, checked. Equal to itself only, so that it may be part of a key.

    Attributes:
        options: of the attention.
        impl: the implementation that runs, or while a compiler traces the one that was asked for.
        with_gradient: whether what backward needs is kept.
        with_support: whether the support is counted. Without either there are no statistics.
        cast: the dtype that autocast gives q, k and v, if it is another one.
        plan: how the kernels are launched for tensors like these, where that was worked out.
    """

    options: Options
    impl: str
    with_gradient: bool
    with_support: bool
    cast: torch.dtype | None = None
    plan: ForwardPlan | None = None


CALLS: CallCache[Call] = CallCache()  # by the arguments of the public function, or of the registered operator
_BACKWARD: CallCache[BackwardPlan] = CallCache()


def _plan(tensors: AttentionTensors, call: Call, aligned: bool) -> ForwardPlan:
    plan: ForwardPlan = _kernels().plan_forward(tensors, call.options, call.with_gradient, call.with_support, aligned)
    return plan


def planned(key: Key | None, tensors: AttentionTensors, call: Call) -> Call:
    """``call`` with a plan for tensors like these, kept as ``key``; as it is where no kernels or no ``key`` are."""
    if key is None or call.impl not in ("triton", "auto"):
        return call

    def plan() -> Call:
        made = _plan(tensors, call, is_aligned(key))
        return CALLS.keep(key, dataclasses.replace(call, plan=made))

    return triton_or_tiled("entmax_attention", call.impl, tensors.q.device, plan, lambda: call)


def _again(q: Tensor, tensors: AttentionTensors, call: Call) -> Forward:
    """Output and what is saved for a gradient, by the plan of ``call`` if there is one."""
    if call.plan is not None and is_on_current(q):
        if not q.is_cuda:
            check_values(tensors, call.options.max_seqlen_k)
        try:
            return _kernels().forward(call.plan, tensors)  # type: ignore[no-any-return]
        except KernelUnavailableError:  # looks for what can run
            pass
    return run(_run_forward, q, tensors, call)  # type: ignore[no-any-return]


def _run_forward(q: Tensor, tensors: AttentionTensors, call: Call) -> Forward:
    """Output and what is saved for a gradient; ``q`` tells :func:`run` the device."""
    if tensors.alpha is not None or tensors.cu_seqlens_q is not None:
        check_values(tensors, call.options.max_seqlen_k)

    def tiled() -> Forward:
        check_offsets(tensors, call.options.max_seqlen_k)  # which it reads on the host, wherever they lie
        return _tiled.forward(tensors, call.options)

    def kernels() -> Forward:
        plan = call.plan
        if plan is None:
            plan = _plan(tensors, call, aligned=False)
        return _kernels().forward(plan, tensors)  # type: ignore[no-any-return]

    return triton_or_tiled("entmax_attention", call.impl, q.device, kernels, tiled)


def _run_backward(
    dout: Tensor, tensors: AttentionTensors, saved: Saved, call: Call, needs: Needs, key: Key | None
) -> Gradients:
    """Gradients of q, k, v and alpha, each laid out like its tensor; ``None`` where not needed.

    ``key`` is that of the plan, which is worked out anew without one.
    """

    def tiled() -> Gradients:
        *found, of_alpha = _tiled.backward(dout, tensors, saved[1], call.options, needs)
        dq, dk, dv = (
            torch.empty_like(like).copy_(grad) if grad is not None and grad.stride() != like.stride() else grad
            for grad, like in zip(found, tensors[:3], strict=True)
        )
        return dq, dk, dv, of_alpha if of_alpha is None or tensors.alpha is None else of_alpha.to(tensors.alpha.dtype)

    def kernels() -> Gradients:
        plan = _BACKWARD.find(key)
        if plan is None:
            plan = _kernels().plan_backward(dout, tensors, saved, call.options, needs)
            if key is not None:
                _BACKWARD.keep(key, plan)
        return _gradients(plan, dout, tensors, saved)

    return triton_or_tiled("entmax_attention", call.impl, dout.device, kernels, tiled)


def _gradients(plan: BackwardPlan, dout: Tensor, tensors: AttentionTensors, saved: Saved) -> Gradients:
    dq, dk, dv, dalpha = _kernels().backward(plan, dout, tensors, saved)
    return dq, dk, dv, dalpha if dalpha is None or tensors.alpha is None else dalpha.to(tensors.alpha.dtype)


@define_op(
    "entmax_attention",
    f"({TENSORS}, {OPTIONS}, bool with_gradient, bool with_support, str impl)"
    " -> (Tensor out, Tensor out2, Tensor stats, Tensor live)",
)
def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, options = AttentionTensors(*args[:COUNT]), Options(*args[COUNT:END])
    with_gradient, with_support, asked = args[END:]
    impl = settled(asked, chosen_impl(tensors.q, asked))
    key = call_key(tensors, ("registered", *options, with_gradient, with_support, impl))
    call = CALLS.find(key) or planned(key, tensors, Call(options, impl, with_gradient, with_support))
    out, out2, stats, live = _run_forward(tensors.q, tensors, call)
    if out2 is None or live is None:  # operators return tensors only
        promised = _promised(tensors, options, with_gradient, asked)
        out2, live = promised[0] if out2 is None else out2, promised[1] if live is None else live
    if stats is None or not (with_gradient or with_support):
        stats = out.new_empty(0, dtype=torch.promote_types(out.dtype, torch.float32))
    return out, out2, stats, live


def _promised(tensors: AttentionTensors, options: Options, with_gradient: bool, asked: str) -> tuple[Tensor, Tensor]:
    """Unwritten tensors like ``out2`` and ``live`` of the registered operator.

    Their shapes are those of the kernels where ``asked`` leads to kernels: a graph is compiled for these, before or
    after the tiled path takes over, which needs neither tensor.
    """
    q = tensors.q
    if q.device.type == "meta" or implementations.chosen_impl("", "q", q, asked) != "triton":
        return q.new_empty(0), q.new_empty(0, dtype=torch.int32)
    live = live_shape(tensors, options)
    return torch.empty_like(q) if with_gradient else q.new_empty(0), q.new_empty(live, dtype=torch.int32)


@torch.library.register_fake("tilefold::entmax_attention")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, options = AttentionTensors(*args[:COUNT]), Options(*args[COUNT:END])
    with_gradient, with_support, impl = args[END:]
    wide = torch.promote_types(tensors.q.dtype, torch.float32)
    stats = tensors.q.new_empty((4, *tensors.stats_shape) if with_gradient or with_support else (0,), dtype=wide)
    out2, live = _promised(tensors, options, with_gradient, impl)
    return torch.empty_like(tensors.q), out2, stats, live


@define_op(
    "entmax_attention_backward",
    f"(Tensor dout, {TENSORS}, Tensor out2, Tensor stats, Tensor live, {OPTIONS}, bool need_q, bool need_k,"
    " bool need_v, bool need_alpha, str impl) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dalpha)",
)
def _backward(dout: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, saved, options, needs, impl = _backward_arguments(args)
    call = Call(options, settled(impl, chosen_impl(tensors.q, impl)), with_gradient=True, with_support=False)
    key = call_key((dout, *tensors, *saved), (*options, *needs))
    *grads, dalpha = _run_backward(dout, tensors, saved, call, needs, key)
    dq, dk, dv = (dout.new_empty(0) if grad is None else grad for grad in grads)
    return dq, dk, dv, dout.new_empty(0, dtype=_dalpha_dtype(tensors, saved)) if dalpha is None else dalpha


@torch.library.register_fake("tilefold::entmax_attention_backward")
def _(dout: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, saved, _, needs, _ = _backward_arguments(args)
    dq, dk, dv = (
        torch.empty_like(tensor) if needed else dout.new_empty(0)
        for tensor, needed in zip(tensors[:3], needs[:3], strict=True)
    )
    heads = tensors.q.size(1) if needs[3] else 0
    return dq, dk, dv, dout.new_empty(heads, dtype=_dalpha_dtype(tensors, saved))


def _backward_arguments(args: tuple[Any, ...]) -> tuple[AttentionTensors, Saved, Options, Needs, str]:
    """The arguments of the gradient operator after the first."""
    saved, end = args[COUNT : COUNT + 3], END + 3
    return AttentionTensors(*args[:COUNT]), saved, Options(*args[COUNT + 3 : end]), args[end : end + 4], args[end + 4]


def _dalpha_dtype(tensors: AttentionTensors, saved: Saved) -> torch.dtype:
    return saved[1].dtype if tensors.alpha is None else tensors.alpha.dtype


forbid_double_backward("entmax_attention_backward", "entmax_attention")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:COUNT], *output[1:])
    ctx.options = Options(*inputs[COUNT:END])
    ctx.with_gradient, _, ctx.impl = inputs[END:]


def _registered_gradients(
    dout: Tensor, saved: tuple[Tensor | None, ...], options: Options, needs: Needs, impl: str
) -> Gradients:
    grads = torch.ops.tilefold.entmax_attention_backward(dout, *saved, *options, *needs, impl)
    dq, dk, dv, dalpha = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return dq, dk, dv, dalpha


def _autograd(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (END - 1)  # the gradients of what follows q, k, v and alpha
    if dout is None:
        return (None,) * 4 + nothing
    if not ctx.with_gradient:
        raise RuntimeError(
            "entmax_attention needs with_gradient=True where a gradient is asked for; call the public function."
        )
    needs = ctx.needs_input_grad[:4]
    return _registered_gradients(dout, ctx.saved_tensors, ctx.options, tuple(needs), ctx.impl) + nothing


torch.library.register_autograd("tilefold::entmax_attention", _autograd, setup_context=_setup_context)


class _Request:
    """What :class:`_Attention` takes besides the tensors that may have a gradient, and the statistics that it leaves.

    ``torch.autograd`` looks at every argument and every output on its own: few are fast.
    """

    __slots__ = ("call", "stats", "tensors")
    tensors: AttentionTensors
    call: Call
    stats: Tensor | None


class _Attention(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors; see ``is_plain``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, request: _Request) -> Tensor:
        out, out2, request.stats, live = _again(q, request.tensors, request.call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*request.tensors, out2, request.stats, live)
        ctx.call = request.call
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 5
        needs, saved, call = ctx.needs_input_grad[:4], ctx.saved_tensors, ctx.call
        if gradient_needs_dispatcher(dout):  # the registered operator refuses a second derivative
            nothing = dout.new_empty(0)
            given = (*saved[:COUNT], *(nothing if tensor is None else tensor for tensor in saved[COUNT:]))
            return *_registered_gradients(dout, given, call.options, needs, call.impl), None
        tensors, rest, key = AttentionTensors(*saved[:COUNT]), saved[COUNT:], None
        if call.plan is not None:
            key = gradient_key(call, needs, dout, saved)
            plan = _BACKWARD.find(key)
            if plan is not None and is_on_current(dout):
                try:
                    return *_gradients(plan, dout, tensors, rest), None
                except KernelUnavailableError:  # looks for what can run
                    pass
        return *run(_run_backward, dout, tensors, rest, call, needs, key), None


def attention(tensors: AttentionTensors, call: Call) -> tuple[Tensor, Tensor]:
    """Output and statistics ``[4, B, H, Nq]``, if the call has any; a ``call`` that has a plan has plain tensors."""
    q, k, v, alpha = tensors[:4]
    if call.plan is None and not is_plain(*tensors):
        arguments = (*tensors, *call.options, call.with_gradient, call.with_support, call.impl)
        out, _, stats, _ = torch.ops.tilefold.entmax_attention(*arguments)
        return out, stats
    if call.with_gradient:
        request = _Request()  # without a function of its own, which would take longer
        request.tensors, request.call = tensors, call
        out = _Attention.apply(q, k, v, alpha, request)  # type: ignore[no-untyped-call]
        return out, request.stats  # type: ignore[return-value]
    out, _, stats, _ = _again(q, tensors, call)
    return out, stats  # type: ignore[return-value]
