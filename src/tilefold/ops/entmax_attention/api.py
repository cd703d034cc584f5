"""Alpha-entmax attention, public function: arguments, checks and dispatch."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from tilefold.ops._shared.call_cache import call_key
from tilefold.ops._shared.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    dtype_name,
)
from tilefold.ops._shared.impl import IMPLS, check_interpreted, settled
from tilefold.ops.entmax_attention import _reference, _torch_ops
from tilefold.ops.entmax_attention._problem import AttentionTensors, Options, stats_shape
from tilefold.ops.entmax_attention._sparsity import count_blocks
from tilefold.ops.entmax_attention._stats import SPARSITY_BLOCK, EntmaxStats, Rows, described, of_rows
from tilefold.ops.entmax_attention._torch_ops import CALLS, Call
from tilefold.ops.entmax_attention._values import check_offsets, check_values

# A window of this size or more hides nothing: positions are int32, and so are their sums with a smaller one.
WIDEST_WINDOW = 1 << 30


def entmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    alpha: float | Tensor = 1.5,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    impl: str = "auto",
    return_stats: bool | Literal["blocks"] = False,
) -> Tensor | tuple[Tensor, EntmaxStats]:
    """Attention whose weights are alpha-entmax of the scores, exact zeros included (AdaSplash, arXiv 2502.12082).

    ``out_i = sum_j p_ij v_j`` with ``p_i = entmax_alpha(scale * q_i . k_j)`` over the keys j that query i may see. The
    scores are never written to memory. The root of every row is found to a residual of 1e-6 of its mass (on a GPU 1e-5
    for 16-bit input), for any scores, and the output is divided by the mass that is left; where only live blocks are
    visited, what is skipped is proved to be zero. Scores are scaled in fp32 (q is never rounded a second time), and
    backward makes them from the same operands. Backward is bitwise deterministic; one derivative, except for
    ``impl="reference"``.

    Query i has position ``i + Nk - Nq`` among the keys: causal attention and windows are aligned to the end, as
    decoding with a cache needs. A row with nothing to attend to is 0 and passes no gradient. NaN in a query, or in a
    key that a row may see, makes the row NaN; what a key masked by ``key_padding_mask`` holds is never read. Values
    hidden by causality or a window must be finite: their weight is 0, and 0 times NaN is NaN.

    Args:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]`` with ``cu_seqlens_q``; any strides; fp16, bf16, fp32 or fp64.
        k, v: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]`` with ``cu_seqlens_k``; ``H`` is a multiple of ``Hkv``.
        alpha: a number in [1, 2] (1 softmax, 2 sparsemax), or a tensor of one or ``[H]``, differentiable. On a GPU a
            tensor's value outside [1, 2] makes its head NaN instead of raising.
        causal: a query attends to no key after its own position.
        window: a query attends to keys at most this far from its position; 2^30 and more is no window.
        cu_seqlens_q: ``[B + 1]`` int32 offsets of packed queries. On the CPU, offsets that do not describe the rows
            raise; in the kernels, where checking would cost a synchronisation, they make every output NaN.
        cu_seqlens_k: the same of packed keys; both or neither.
        max_seqlen_k: a bound of the length of packed key sequences, which spares work; by default all of k. A longer
            sequence raises on the torch paths, and makes every output NaN in the kernels.
        key_padding_mask: ``[B, Nk]``, nonzero = keep, in any pattern; not for packed input.
        scale: multiplies the products; by default ``D ** -0.5``.
        dropout_p: probability in [0, 1) that a weight is dropped; the others grow by ``1 / (1 - dropout_p)``.
        generator: of the seed that dropout draws, on the device of ``q``; by default torch's own. The same seed drops
            the same weights in every implementation.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see
            :func:`tilefold.ops.entmax_attention.chosen_impl`.
        return_stats: also return :class:`EntmaxStats`; ``"blocks"`` also counts live blocks, which computes the
            scores once more, in fp32. Nothing synchronises with the device.

    Returns:
        A tensor shaped like ``q``; with ``return_stats`` also the statistics.

    Raises:
        TypeError: for arguments that are not tensors, or of a dtype that is not supported.
        ValueError: for shapes, devices, masks, offsets or options that do not fit together.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    learned = alpha if isinstance(alpha, Tensor) else None
    with_gradient = torch.is_grad_enabled() and (
        getattr(q, "requires_grad", False)
        or getattr(k, "requires_grad", False)
        or getattr(v, "requires_grad", False)
        or (learned is not None and learned.requires_grad)
    )
    given = (q, k, v, learned, key_padding_mask, cu_seqlens_q, cu_seqlens_k)
    number = None if learned is not None else alpha
    key = call_key(given, (number, causal, window, scale, dropout_p, max_seqlen_k, impl, return_stats, with_gradient))
    call = found = CALLS.find(key)
    if call is None:
        check_choice("impl", impl, IMPLS)
        check_choice("return_stats", return_stats, (False, True, "blocks"))
        _check_tensors(q, k, v, cu_seqlens_q is not None or cu_seqlens_k is not None)
        _check_layout(q, k, v, cu_seqlens_q, cu_seqlens_k, key_padding_mask)
        longest_k = _longest_k(max_seqlen_k, k, cu_seqlens_q is not None)
        dropout = _dropout(dropout_p)
        options = Options(_alpha_value(alpha), bool(causal), _window(window), _scale(scale, q), dropout, longest_k)
        if learned is not None:
            _check_alpha(learned, q)
        cast = _autocast_dtype(q, k, v)
        call = Call(
            options, _impl(q if cast is None else q[:0].to(cast), impl), with_gradient, bool(return_stats), cast
        )
    if call.cast is not None:
        q, k, v = q.to(call.cast), k.to(call.cast), v.to(call.cast)
    if learned is not None:
        learned = _one_per_head(learned, q)
    seed = None
    if dropout_p > 0:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=q.device, generator=generator)
    tensors = AttentionTensors(q, k, v, learned, key_padding_mask, cu_seqlens_q, cu_seqlens_k, seed)
    if found is None:
        call = _torch_ops.planned(key, tensors, call)
    if call.impl == "reference":
        out, rows = _by_reference(tensors, call.options)
    else:
        out, stats = _torch_ops.attention(tensors, call)
        if not return_stats:
            return out
        rows = of_rows(stats, learned, call.options)
    return (out, described(rows, tensors, call.options, return_stats)) if return_stats else out


def _by_reference(tensors: AttentionTensors, options: Options) -> tuple[Tensor, Rows]:
    q, k, v = tensors[:3]
    check_values(tensors, options.max_seqlen_k)
    check_offsets(tensors, options.max_seqlen_k)
    out, tau, support = _reference.attention(tensors, options)
    if out.numel() == 0 or k.numel() == 0:  # nothing was computed, which is part of the graph too
        out = out + q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
    return out, (tau, support, torch.zeros_like(tau))


def live_blocks(
    q: Tensor,
    k: Tensor,
    tau: Tensor,
    *,
    alpha: float | Tensor = 1.5,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    scale: float | None = None,
    block: int = SPARSITY_BLOCK,
) -> tuple[Tensor, Tensor]:
    """Count the blocks of an :func:`entmax_attention` that hold a positive weight (AdaSplash, arXiv 2502.12082).

    A block is ``block`` queries by ``block`` keys of one sequence and head. It is live if a weight in it is positive,
    ``(alpha - 1) s > tau`` (for alpha = 1, if ``exp(s - tau)`` is), up to the rounding of scores that are computed
    once more in fp32; it is visible if any of its pairs may attend. Nothing synchronises with the device.

    Args:
        q, k: as they were given to :func:`entmax_attention`.
        tau: ``[B, H, Nq]`` (packed ``[1, H, Tq]``), from :class:`EntmaxStats`.
        alpha, causal, window, cu_seqlens_q, cu_seqlens_k, key_padding_mask, scale: as they were given there.
        query_padding_mask: ``[B, Nq]`` (packed ``[Tq]``), nonzero = count this row.
        block: side of a block.

    Returns:
        int32 ``[B, H]`` (packed ``[1, H]``): live blocks, and visible ones.

    Raises:
        TypeError, ValueError: for arguments that do not fit together.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    _check_tensors(q, k, k, packed)
    _check_layout(q, k, k, cu_seqlens_q, cu_seqlens_k, key_padding_mask)
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be an integer of at least 1, got {block!r}.")
    check_tensor("tau", tau)
    shape = stats_shape(q, packed)
    check_shape("tau", tau, "B H Nq", B=shape[0], H=shape[1], Nq=shape[2])
    if query_padding_mask is not None:
        check_tensor("query_padding_mask", query_padding_mask)
        sizes = {"Tq": q.size(0)} if packed else {"B": q.size(0), "Nq": q.size(2)}
        check_shape("query_padding_mask", query_padding_mask, " ".join(sizes), **sizes)
    check_same_device("q", q, {"tau": tau, "query_padding_mask": query_padding_mask})
    longest_k = _longest_k(None, k, packed)
    options = Options(_alpha_value(alpha), bool(causal), _window(window), _scale(scale, q), 0.0, longest_k)
    learned = None
    if isinstance(alpha, Tensor):
        _check_alpha(alpha, q)
        learned = _one_per_head(alpha, q)
    tensors = AttentionTensors(q, k, k, learned, key_padding_mask, cu_seqlens_q, cu_seqlens_k, None)
    return count_blocks(tensors, options, tau, query_padding_mask, block)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
        check_dtype(name, value, FLOAT_DTYPES, "cast it with .to(torch.bfloat16) or another of these.")
    if packed:
        check_shape("q", q, "Tq H D")
        check_shape("k", k, "Tk Hkv D", D=q.size(2))
        check_shape("v", v, "Tk Hkv D", Tk=k.size(0), Hkv=k.size(1), D=q.size(2))
    else:
        check_shape("q", q, "B H Nq D")
        check_shape("k", k, "B Hkv Nk D", B=q.size(0), D=q.size(3))
        check_shape("v", v, "B Hkv Nk D", B=q.size(0), Hkv=k.size(1), Nk=k.size(2), D=q.size(3))
    if k.size(1) == 0 or q.size(1) % k.size(1):
        raise ValueError(
            f"H of q must be a multiple of Hkv of k and v, got {q.size(1)} and {k.size(1)} heads; repeat or slice them."
        )
    if q.size(-1) == 0:
        raise ValueError(f"D must be at least 1, got q of shape {list(q.shape)}.")
    if not (q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)):
        raise TypeError(
            f"k and v must have the dtype of q ({dtype_name(q.dtype)}), got {dtype_name(k.dtype)} and "
            f"{dtype_name(v.dtype)}; cast them, or run under torch.autocast."
        )


def _check_layout(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, key_padding_mask: Tensor | None
) -> None:
    others = {"k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "key_padding_mask": key_padding_mask}
    for name, value in others.items():
        if value is not None:
            check_tensor(name, value)
    check_same_device("q", q, others)
    if (cu_q is None) != (cu_k is None):
        missing = "cu_seqlens_q" if cu_q is None else "cu_seqlens_k"
        raise ValueError(
            f"{missing} must be given where the other one is, got None; pass the same twice if they agree."
        )
    if cu_q is not None and cu_k is not None:
        for name, offsets in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
            check_dtype(name, offsets, (torch.int32, torch.int64), f"use {name}.int().")
            if offsets.dim() != 1 or offsets.numel() == 0 or offsets.numel() != cu_q.numel():
                raise ValueError(f"{name} must have shape [B + 1], like the other one, got {list(offsets.shape)}.")
        if key_padding_mask is not None:
            raise ValueError("key_padding_mask must be None with packed input, got a tensor; cu_seqlens_k says it all.")
    if key_padding_mask is not None:
        check_shape("key_padding_mask", key_padding_mask, "B Nk", B=q.size(0), Nk=k.size(2))
        if key_padding_mask.is_complex():
            raise TypeError(f"key_padding_mask must be bool, integer or floating, got {key_padding_mask.dtype}.")


def _alpha_value(alpha: float | Tensor) -> float:
    if isinstance(alpha, Tensor):
        return 0.0
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha <= 2:
        raise ValueError(f"alpha must be a number in [1, 2] or a tensor of them, got {alpha!r}.")
    return float(alpha)


def _window(window: int | None) -> int:
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        raise ValueError(f"window must be an integer of at least 0 or None, got {window!r}.")
    return -1 if window is None or window >= WIDEST_WINDOW else window


def _scale(scale: float | None, q: Tensor) -> float:
    if scale is not None and (not isinstance(scale, (int, float)) or not -math.inf < scale < math.inf):
        raise ValueError(
            f"scale must be a finite Python number or None, got {scale!r}; multiply q by a tensor instead."
        )
    return q.size(-1) ** -0.5 if scale is None else float(scale)


def _dropout(dropout_p: float) -> float:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be a number in [0, 1), got {dropout_p!r}.")
    return float(dropout_p)


def _longest_k(max_seqlen_k: int | None, k: Tensor, packed: bool) -> int:
    rows = k.size(0 if packed else 2)
    if max_seqlen_k is None:
        return rows
    if isinstance(max_seqlen_k, bool) or not isinstance(max_seqlen_k, int) or max_seqlen_k < 0:
        raise ValueError(f"max_seqlen_k must be an integer of at least 0 or None, got {max_seqlen_k!r}.")
    return min(rows, max_seqlen_k) if packed else rows


def _check_alpha(alpha: Tensor, q: Tensor) -> None:
    check_dtype("alpha", alpha, FLOAT_DTYPES, "cast it with .float().")
    check_same_device("q", q, {"alpha": alpha})
    count, heads = alpha.numel(), q.size(1)
    if count != 1 and count != heads:  # noqa: PLR1714 (torch.compile answers `in` without a look at symbolic sizes)
        raise ValueError(f"alpha must hold one number or one per head ({q.size(1)}), got shape {list(alpha.shape)}.")


def _one_per_head(alpha: Tensor, q: Tensor) -> Tensor:
    """One alpha per head, ``[H]``."""
    heads = q.size(1)
    return alpha if alpha.shape == (heads,) else alpha.reshape(-1).expand(heads)


def _impl(q: Tensor, impl: str) -> str:
    """What runs; while a compiler traces what was asked for: the operators choose when they run."""
    if torch.compiler.is_compiling():  # a trace cannot ask a device
        return impl
    impl = settled(impl, _torch_ops.chosen_impl(q, impl))
    check_interpreted(impl, q.device, q.dtype)
    return impl


def _autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives q, k and v, if one of them has another."""
    device_type = q.device.type
    if q.dtype == torch.float64 or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return None if q.dtype == k.dtype == v.dtype == dtype else dtype
