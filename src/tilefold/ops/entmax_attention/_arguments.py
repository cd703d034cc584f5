"""Checks of the arguments of alpha-entmax attention, and what they mean to the operator."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from tilefold.ops._shared.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    dtype_name,
)
from tilefold.ops._shared.operator import Checked
from tilefold.ops.entmax_attention._problem import AttentionTensors, Options

# A window of this size or more hides nothing: positions are int32, and so are their sums with a smaller one.
WIDEST_WINDOW = 1 << 30


def checked(
    tensors: AttentionTensors,
    alpha: float,
    causal: bool,
    window: int | None,
    scale: float | None,
    dropout_p: float,
    max_seqlen_k: int | None,
    return_stats: object,
) -> Checked:
    """Check all that needs no value; the operator has one alpha per head, ``alpha`` where it is none of the tensors."""
    q, k, v, learned, mask, cu_q, cu_k, _ = tensors
    check_choice("return_stats", return_stats, (False, True, "blocks"))
    _check_tensors(q, k, v, cu_q is not None or cu_k is not None)
    _check_layout(q, k, v, cu_q, cu_k, mask)
    longest_k = _longest_k(max_seqlen_k, k, cu_q is not None)
    dropout, places = _dropout(dropout_p), (bool(causal), _window(window), _scale(scale, q))
    if learned is not None:
        _check_alpha(learned, q)
    alpha_value = 0.0 if learned is not None else _alpha_value(alpha)
    options = Options(alpha_value, *places, dropout, longest_k, bool(return_stats))
    cast = _autocast_dtype(q, k, v)
    done = cast is None and (learned is None or learned.shape == (q.size(1),))
    return Checked(options, None if done else partial(ready, cast))


def ready(cast: torch.dtype | None, tensors: AttentionTensors) -> AttentionTensors:
    """q, k and v in the dtype that autocast gives them, and one alpha per head."""
    q, k, v, alpha, *others = tensors
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    if alpha is not None and alpha.shape != (q.size(1),):
        alpha = alpha.reshape(-1).expand(q.size(1))
    return AttentionTensors(q, k, v, alpha, *others)


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


def _alpha_value(alpha: float) -> float:
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


def _autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives q, k and v, if one of them has another."""
    device_type = q.device.type
    if q.dtype == torch.float64 or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return None if q.dtype == k.dtype == v.dtype == dtype else dtype
