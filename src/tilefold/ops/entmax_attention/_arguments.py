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
    check_offsets,
    check_same_device,
    check_shape,
    check_tensor,
    dtype_name,
)
from tilefold.ops._shared.entmax_root import alpha_number
from tilefold.ops._shared.operator import Checked
from tilefold.ops.entmax_attention._problem import AttentionTensors, Options

# A window of this size or more hides nothing: positions are int32, and so are their sums with a
# smaller one.
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
    """Check all that needs no value; the operator has one alpha per head, ``alpha`` where it is
    none of the tensors.
    """
    q, k, v, learned, _, cu_q, cu_k, _ = tensors
    check_choice("return_stats", return_stats, (False, True, "blocks"))
    packed = cu_q is not None or cu_k is not None
    _check_tensors(q, k, v, packed)
    _check_layout(tensors)
    rows, bound = k.size(0 if packed else 2), _count("max_seqlen_k", max_seqlen_k)
    longest = rows if bound is None or not packed else min(rows, bound)
    dropout, width = _dropout(dropout_p), _count("window", window)
    width = -1 if width is None or width >= WIDEST_WINDOW else width
    value = 0.0 if learned is not None else alpha_number(alpha)
    options = Options(
        value,
        bool(causal),
        width,
        _scale(scale, q),
        dropout,
        longest,
        bool(return_stats),
    )
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
        check_dtype(
            name,
            value,
            FLOAT_DTYPES,
            "cast it with .to(torch.bfloat16) or another of these.",
        )
    check_shape("q", q, "Tq H D" if packed else "B H Nq D")
    layout, known = (
        ("Tk Hkv D", {"D": q.size(2)})
        if packed
        else ("B Hkv Nk D", {"B": q.size(0), "D": q.size(3)})
    )
    check_shape("k", k, layout, **known)
    check_shape("v", v, layout, **dict(zip(layout.split(), k.shape, strict=True)))
    if k.size(1) == 0 or q.size(1) % k.size(1):
        raise ValueError(
            f"H of q must be a multiple of Hkv of k and v, got {q.size(1)} and {k.size(1)} heads; repeat or slice them.",
        )
    if q.size(-1) == 0:
        raise ValueError(f"D must be at least 1, got q of shape {list(q.shape)}.")
    if not (q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)):
        raise TypeError(
            f"k and v must have the dtype of q ({dtype_name(q.dtype)}), got {dtype_name(k.dtype)} and "
            f"{dtype_name(v.dtype)}; cast them, or run under torch.autocast.",
        )


def _check_layout(tensors: AttentionTensors) -> None:
    q, k, v, alpha, mask, cu_q, cu_k, _ = tensors
    others = {
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "key_padding_mask": mask,
        "alpha": alpha,
    }
    for name, value in others.items():
        if value is not None:
            check_tensor(name, value)
    check_same_device("q", q, others)
    if (cu_q is None) != (cu_k is None):
        missing = "cu_seqlens_q" if cu_q is None else "cu_seqlens_k"
        raise ValueError(
            f"{missing} must be given where the other one is, got None; pass the same twice if they agree.",
        )
    if cu_q is not None and cu_k is not None:
        for name, offsets in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
            check_offsets(name, offsets, "[B + 1], like the other one")
            if offsets.numel() != cu_q.numel():
                raise ValueError(
                    f"{name} must have shape [B + 1], like the other one, got {list(offsets.shape)}.",
                )
        if mask is not None:
            raise ValueError(
                "key_padding_mask must be None with packed input, got a tensor; cu_seqlens_k says it all.",
            )
    if mask is not None:
        check_shape("key_padding_mask", mask, "B Nk", B=q.size(0), Nk=k.size(2))
        if mask.is_complex():
            raise TypeError(
                f"key_padding_mask must be bool, integer or floating, got {mask.dtype}.",
            )
    if alpha is not None:
        check_dtype("alpha", alpha, FLOAT_DTYPES, "cast it with .float().")
        count, heads = alpha.numel(), q.size(1)
        if count != 1 and count != heads:  # noqa: PLR1714 (torch.compile answers `in` without a look at symbolic sizes)
            raise ValueError(
                f"alpha must hold one number or one per head ({heads}), got shape {list(alpha.shape)}.",
            )


def _count(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"{name} must be an integer of at least 0 or None, got {value!r}.")
    return value


def _scale(scale: float | None, q: Tensor) -> float:
    if scale is not None and (
        not isinstance(scale, (int, float)) or not -math.inf < scale < math.inf
    ):
        raise ValueError(
            f"scale must be a finite Python number or None, got {scale!r}; multiply q by a tensor instead.",
        )
    return q.size(-1) ** -0.5 if scale is None else float(scale)


def _dropout(dropout_p: float) -> float:
    if (
        isinstance(dropout_p, bool)
        or not isinstance(dropout_p, (int, float))
        or not 0 <= dropout_p < 1
    ):
        raise ValueError(f"dropout_p must be a number in [0, 1), got {dropout_p!r}.")
    return float(dropout_p)


def _autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives q, k and v, if one of them has another."""
    device_type = q.device.type
    if (
        q.dtype == torch.float64
        or device_type == "meta"
        or not torch.is_autocast_enabled(device_type)
    ):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return None if q.dtype == k.dtype == v.dtype == dtype else dtype
