"""Alpha-entmax attention as ``torch.library`` operators: schema, fake kernels and autograd."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.checks import dtype_name
from tilefold.ops._shared.impl import resolve_impl
from tilefold.ops._shared.library import define_op, forbid_double_backward, is_plain, run
from tilefold.ops.entmax_attention import _tiled
from tilefold.ops.entmax_attention._geometry import Options, stats_shape
from tilefold.ops.entmax_attention.configs import is_simple, live_shape

__all__ = ["attention", "chosen_impl"]

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
    resolved = resolve_impl(impl, q.device)
    if resolved == "triton" and q.dtype not in TRITON_DTYPES:
        if impl == "auto":
            return "tiled"
        names = ", ".join(dtype_name(dtype) for dtype in TRITON_DTYPES)
        raise TypeError(
            f"q must have dtype {names} for impl='triton', got {dtype_name(q.dtype)}; use impl='auto' or impl='tiled'."
        )
    return resolved


def _implementation(impl: str, q: Tensor) -> ModuleType:
    if chosen_impl(q, impl) == "tiled":
        return _tiled
    from tilefold.ops.entmax_attention import _triton

    return _triton


def check_values(alpha: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Check what can be read without a synchronisation.

    Raises:
        ValueError: for alphas outside [1, 2], or offsets that do not describe the rows.
    """
    if alpha is not None and alpha.device.type == "cpu" and not bool(((alpha >= 1) & (alpha <= 2)).all()):
        bad = alpha[~((alpha >= 1) & (alpha <= 2))][0].item()
        raise ValueError(f"alpha must lie in [1, 2], got {bad}; parametrise it, for instance as 1 + sigmoid(theta).")
    for name, offsets, rows in (("cu_seqlens_q", cu_q, q.size(0)), ("cu_seqlens_k", cu_k, k.size(0))):
        if offsets is None or offsets.device.type != "cpu":
            continue
        values = offsets.tolist()
        if values[0] != 0 or values[-1] != rows or bool((offsets.diff() < 0).any()):
            raise ValueError(
                f"{name} must start with 0, never fall and end at the number of rows {rows}, got {values}; build it as "
                "the cumulative sum of the sequence lengths with a 0 in front."
            )


@define_op(
    "entmax_attention",
    f"({_TENSORS}, {_OPTIONS}, bool with_gradient, SymInt longest_k, str impl)"
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
    longest_k: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_values(alpha, cu_q, cu_k, q, k)
    options = Options(constant, causal, window, scale, dropout_p)
    return _implementation(impl, q).forward(  # type: ignore[no-any-return]
        q, k, v, alpha, key_mask, cu_q, cu_k, seed, options, with_gradient, longest_k
    )


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
    longest_k: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    stats = q.new_empty((4, *stats_shape(q, cu_q is not None)), dtype=wide)
    out = torch.empty_like(q)
    if q.device.type != "meta" and chosen_impl(q, impl) == "triton":
        batch = q.size(0) if cu_q is None else cu_q.size(0) - 1
        simple = is_simple(None if alpha is not None else constant, causal, window, seed is not None)
        live = live_shape(q, batch, longest_k, cu_q is not None, window, simple)
        out2 = torch.empty_like(q) if with_gradient else q.new_empty(0)
        return out, out2, stats, q.new_empty(live, dtype=torch.int32)
    return out, q.new_empty(0), stats, q.new_empty(0, dtype=torch.int32)


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
    options = Options(constant, causal, window, scale, dropout_p)
    needs = (need_q, need_k, need_v, need_alpha)
    *grads, dalpha = _implementation(impl, q).backward(
        dout, q, k, v, alpha, key_mask, cu_q, cu_k, seed, out2, stats, live, options, needs, longest_k
    )
    dq, dk, dv = (
        q.new_empty(0) if g is None else torch.empty_like(like).copy_(g) if g.stride() != like.stride() else g
        for g, like in zip(grads, (q, k, v), strict=True)
    )
    if dalpha is None or alpha is None:
        return dq, dk, dv, q.new_empty(0, dtype=stats.dtype if alpha is None else alpha.dtype)
    return dq, dk, dv, dalpha.to(alpha.dtype)


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, constant, causal, window, scale, dropout_p, ctx.with_gradient, ctx.longest_k, ctx.impl = inputs
    _, out2, stats, live = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out2, stats, live)
    ctx.options = (constant, causal, window, scale, dropout_p)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    _save(ctx, inputs, output)


def _gradients(ctx: Any, dout: Tensor | None, *, registered: bool) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 12
    if dout is None:
        return (None, None, None, None, *nothing)
    needs = tuple(ctx.needs_input_grad[:4])
    arguments = (dout, *ctx.saved_tensors, *ctx.options, *needs, ctx.longest_k, ctx.impl)
    if registered or torch.is_grad_enabled():  # the registered operator refuses a second derivative
        grads = torch.ops.tilefold.entmax_attention_backward(*arguments)
    else:
        grads = run(_backward, *arguments)
    return (*(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *nothing)


def _autograd(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is not None and not ctx.with_gradient:
        raise RuntimeError(
            "entmax_attention needs with_gradient=True where a gradient is asked for; call the public function."
        )
    return _gradients(ctx, dout, registered=True)


torch.library.register_autograd("tilefold::entmax_attention", _autograd, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors; see ``is_plain``."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = run(_forward, *inputs)
        ctx.mark_non_differentiable(output[2])
        _save(ctx, inputs, output)
        return output[0], output[2]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dout, registered=False)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    options: Options,
    longest_k: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Output and statistics ``[4, B, H, Nq]``; what backward needs is kept only if a gradient can be asked for."""
    with_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, alpha))
    tensors = (q, k, v, alpha, key_mask, cu_q, cu_k, seed)
    numbers = (options.constant, options.causal, options.window, options.scale, options.dropout_p)
    arguments = (*tensors, *numbers, with_gradient, longest_k, impl)
    if not is_plain(*tensors):
        out, _, stats, _ = torch.ops.tilefold.entmax_attention(*arguments)
    elif with_gradient:
        out, stats = _Attention.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        out, _, stats, _ = run(_forward, *arguments)
    return out, stats
