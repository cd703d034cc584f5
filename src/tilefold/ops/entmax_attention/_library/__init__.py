"""Alpha-entmax attention as ``torch.library`` operators: schema, fake kernels and autograd."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.checks import dtype_name
from tilefold.ops._shared.fallback import triton_or_tiled
from tilefold.ops._shared.impl import resolve_impl, settled
from tilefold.ops._shared.library import define_op, forbid_double_backward, gradient_needs_dispatcher, is_plain, run
from tilefold.ops.entmax_attention import _tiled
from tilefold.ops.entmax_attention._calls import Known, plans_of
from tilefold.ops.entmax_attention._geometry import Options, stats_shape
from tilefold.ops.entmax_attention._library.values import check_offsets, check_values
from tilefold.ops.entmax_attention.configs import is_simple, live_shape

__all__ = ["attention", "check_offsets", "check_values", "chosen_impl"]

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? alpha, Tensor? key_mask, Tensor? cu_q, Tensor? cu_k, Tensor? seed"
_OPTIONS = "float constant, bool causal, int window, float scale, float dropout_p"


def chosen_impl(q: Tensor, impl: str = "auto") -> str:
    """Which implementation ``entmax_attention(q, ..., impl=impl)`` runs: ``"reference"``, ``"tiled"``, ``"triton"``.

    ``"auto"`` takes ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that has it, else ``"tiled"``.

    Raises:
        ValueError: for an unknown name.
        RuntimeError, TypeError: for ``"triton"`` on a device, or with a dtype, that it does not support.
    """
    return _chosen(q, impl, "entmax_attention")


def _chosen(q: Tensor, impl: str, operator: str) -> str:
    """See :func:`chosen_impl`; without an ``operator``, as if no kernel of it had been given up."""
    resolved = resolve_impl(impl, q.device, operator)
    if resolved == "triton" and q.dtype not in TRITON_DTYPES:
        if impl == "auto":
            return "tiled"
        names = ", ".join(dtype_name(dtype) for dtype in TRITON_DTYPES)
        raise TypeError(
            f"q must have dtype {names} for impl='triton', got {dtype_name(q.dtype)}; use impl='auto' or impl='tiled'."
        )
    return resolved


@functools.cache
def _kernels() -> ModuleType:
    from tilefold.ops.entmax_attention import _triton

    return _triton


Tensors = tuple[
    Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]  # q, k, v, alpha, key_mask, cu_q, cu_k, seed


Forward = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def _run_forward(q: Tensor, tensors: Tensors, known: Known, with_gradient: bool, with_support: bool) -> Forward:
    """Output, what else backward needs and statistics, by the implementation of ``known``; ``q`` tells the device."""
    _, k, _, alpha, _, cu_q, cu_k, _ = tensors
    if alpha is not None or cu_q is not None:
        check_values(alpha, cu_q, cu_k, q, k, known.longest_k)
    options, longest_k, impl, plans = known

    def tiled() -> Forward:
        check_offsets(cu_q, cu_k, q, k, longest_k)  # which it reads on the host, wherever they lie
        return _tiled.forward(*tensors, options, with_gradient, longest_k)

    def kernels() -> Forward:
        given = plans_of(tensors, options, longest_k) if plans is None else plans
        return _kernels().forward(*tensors, options, with_gradient, with_support, longest_k, given)  # type: ignore[no-any-return]

    return triton_or_tiled("entmax_attention", impl, q.device, kernels, tiled)


def _run_backward(
    dout: Tensor, saved: tuple[Any, ...], known: Known, needs: tuple[bool, bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and alpha, each laid out like its tensor; ``None`` where not needed."""
    options, longest_k, impl, plans = known
    arguments: tuple[Any, ...] = (dout, *saved, options, needs, longest_k)

    def tiled() -> tuple[Tensor | None, ...]:
        *found, of_alpha = _tiled.backward(*arguments)
        laid_out = [
            torch.empty_like(like).copy_(g) if g is not None and g.stride() != like.stride() else g
            for g, like in zip(found, saved, strict=False)
        ]
        return *laid_out, of_alpha

    def kernels() -> tuple[Tensor | None, ...]:
        given = plans_of(saved[:8], options, longest_k) if plans is None else plans
        return _kernels().backward(*arguments, given)  # type: ignore[no-any-return]

    *grads, dalpha = triton_or_tiled("entmax_attention", impl, dout.device, kernels, tiled)
    return *grads, None if dalpha is None else dalpha.to(saved[3].dtype)


@define_op(
    "entmax_attention",
    f"({_TENSORS}, {_OPTIONS}, bool with_gradient, bool with_support, SymInt longest_k, str impl)"
    " -> (Tensor out, Tensor out2, Tensor stats, Tensor live)",
)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    constant: float,
    causal: bool,
    window: int,
    scale: float,
    dropout_p: float,
    with_gradient: bool,
    with_support: bool,
    longest_k: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    asked, impl = impl, settled(impl, chosen_impl(q, impl))
    known = Known(Options(constant, causal, window, scale, dropout_p), longest_k, impl)
    tensors = (q, k, v, alpha, key_mask, cu_q, cu_k, seed)
    out, out2, stats, live = _run_forward(q, tensors, known, with_gradient, with_support)
    if out2 is None or live is None:  # operators return tensors only
        nothing = _promised(q, alpha, cu_q, seed, known, with_gradient, asked)
        out2, live = nothing[0] if out2 is None else out2, nothing[1] if live is None else live
    return out, out2, stats, live


def _promised(
    q: Tensor, alpha: Tensor | None, cu_q: Tensor | None, seed: Tensor | None, known: Known, with_gradient: bool,
    asked: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Unwritten tensors like ``out2`` and ``live`` of the registered operator.

    Their shapes are those of the kernels where ``asked`` leads to kernels: a graph is compiled for these, before or
    after the tiled path takes over, which needs neither tensor.
    """
    if q.device.type == "meta" or _chosen(q, asked, "") != "triton":
        return q.new_empty(0), q.new_empty(0, dtype=torch.int32)
    options, longest_k, _, _ = known
    batch = q.size(0) if cu_q is None else cu_q.size(0) - 1
    simple = is_simple(
        None if alpha is not None else options.constant, options.causal, options.window, seed is not None
    )
    live = live_shape(q, batch, longest_k, cu_q is not None, options.window, simple)
    return torch.empty_like(q) if with_gradient else q.new_empty(0), q.new_empty(live, dtype=torch.int32)


@torch.library.register_fake("tilefold::entmax_attention")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    constant: float,
    causal: bool,
    window: int,
    scale: float,
    dropout_p: float,
    with_gradient: bool,
    with_support: bool,
    longest_k: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    stats = q.new_empty((4, *stats_shape(q, cu_q is not None)), dtype=wide)
    known = Known(Options(constant, causal, window, scale, dropout_p), longest_k, impl)
    out2, live = _promised(q, alpha, cu_q, seed, known, with_gradient, impl)
    return torch.empty_like(q), out2, stats, live


@define_op(
    "entmax_attention_backward",
    f"(Tensor dout, {_TENSORS}, Tensor out2, Tensor stats, Tensor live, {_OPTIONS}, bool need_q, bool need_k,"
    " bool need_v, bool need_alpha, SymInt longest_k, str impl) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dalpha)",
)
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    out2: Tensor,
    stats: Tensor,
    live: Tensor,
    constant: float,
    causal: bool,
    window: int,
    scale: float,
    dropout_p: float,
    need_q: bool,
    need_k: bool,
    need_v: bool,
    need_alpha: bool,
    longest_k: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    impl = settled(impl, chosen_impl(q, impl))
    known = Known(Options(constant, causal, window, scale, dropout_p), longest_k, impl)
    saved = (q, k, v, alpha, key_mask, cu_q, cu_k, seed, out2, stats, live)
    *grads, dalpha = _run_backward(dout, saved, known, (need_q, need_k, need_v, need_alpha))
    dq, dk, dv = (q.new_empty(0) if grad is None else grad for grad in grads)
    if dalpha is None:
        dalpha = q.new_empty(0, dtype=stats.dtype if alpha is None else alpha.dtype)
    return dq, dk, dv, dalpha


@torch.library.register_fake("tilefold::entmax_attention_backward")
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    out2: Tensor,
    stats: Tensor,
    live: Tensor,
    constant: float,
    causal: bool,
    window: int,
    scale: float,
    dropout_p: float,
    need_q: bool,
    need_k: bool,
    need_v: bool,
    need_alpha: bool,
    longest_k: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.empty_like(t) if needed else q.new_empty(0) for t, needed in ((q, need_q), (k, need_k), (v, need_v))
    )
    dtype = stats.dtype if alpha is None else alpha.dtype
    return dq, dk, dv, q.new_empty(q.size(1) if need_alpha else 0, dtype=dtype)


forbid_double_backward("entmax_attention_backward", "entmax_attention")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    *tensors, constant, causal, window, scale, dropout_p, ctx.with_gradient, _, ctx.longest_k, ctx.impl = inputs
    _, out2, stats, live = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out2, stats, live)
    ctx.options = (constant, causal, window, scale, dropout_p)


def _registered_gradients(
    dout: Tensor, saved: tuple[Any, ...], rest: tuple[Any, ...], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    grads = torch.ops.tilefold.entmax_attention_backward(dout, *saved, *rest[:-2], *needs, *rest[-2:])
    return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def _autograd(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 13  # the masks and whatever follows
    if dout is None:
        return (None,) * 4 + nothing
    if not ctx.with_gradient:
        raise RuntimeError(
            "entmax_attention needs with_gradient=True where a gradient is asked for; call the public function."
        )
    rest, needs = (*ctx.options, ctx.longest_k, ctx.impl), tuple(ctx.needs_input_grad[:4])
    return _registered_gradients(dout, ctx.saved_tensors, rest, needs) + nothing


torch.library.register_autograd("tilefold::entmax_attention", _autograd, setup_context=_setup_context)


def _numbers(options: Options) -> tuple[float, bool, int, float, float]:
    return options.constant, options.causal, options.window, options.scale, options.dropout_p


@dataclass
class _Call:
    """What a call holds besides the tensors that may have a gradient, and the statistics that it leaves.

    ``torch.autograd`` looks at every argument and every output on its own: few are fast.
    """

    others: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    known: Known
    with_support: bool
    stats: Tensor | None = None


class _Attention(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors; see ``is_plain``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, call: _Call) -> Tensor:
        tensors = (q, k, v, alpha, *call.others)
        out, out2, call.stats, live = run(_run_forward, q, tensors, call.known, True, call.with_support)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out2, call.stats, live)
        ctx.known = call.known
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 5
        needs, saved, known = ctx.needs_input_grad[:4], ctx.saved_tensors, ctx.known
        if not gradient_needs_dispatcher(dout):
            return *run(_run_backward, dout, saved, known, needs), None
        # the registered operator refuses a second derivative
        nothing = dout.new_empty(0)
        saved = (*saved[:8], *(nothing if tensor is None else tensor for tensor in saved[8:]))
        rest = (*_numbers(known.options), known.longest_k, known.impl)
        return *_registered_gradients(dout, saved, rest, needs), None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    known: Known,
    with_support: bool,
) -> tuple[Tensor, Tensor]:
    """Output and statistics ``[4, B, H, Nq]``; what backward needs is kept only if a gradient can be asked for.

    The kernels count the support only ``with_support``. ``known`` has plans for tensors that are plain only.
    """
    with_gradient = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (alpha is not None and alpha.requires_grad)
    )
    tensors = (q, k, v, alpha, key_mask, cu_q, cu_k, seed)
    if known.plans is None and not is_plain(*tensors):
        arguments = (*tensors, *_numbers(known.options), with_gradient, with_support, known.longest_k, known.impl)
        out, _, stats, _ = torch.ops.tilefold.entmax_attention(*arguments)
    elif with_gradient:
        call = _Call((key_mask, cu_q, cu_k, seed), known, with_support)
        out = _Attention.apply(q, k, v, alpha, call)  # type: ignore[no-untyped-call]
        stats = call.stats
    else:
        out, _, stats, _ = run(_run_forward, q, tensors, known, False, with_support)
    return out, stats
