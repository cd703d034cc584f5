"""Checks of the arguments of alpha-entmax attention, and the operator's options."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from tilefold.ops._shared.autocast import autocast_dtype
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
from tilefold.ops.entmax_attention._problem import (
    ALPHA_IS_TENSOR,
    AttentionOptions,
    AttentionTensors,
)

# A window of this size or more hides nothing. Positions are int32, and so are their sums with a
# smaller window.
WIDEST_WINDOW = 1 << 30


def check_arguments(
    tensors: AttentionTensors,
    alpha: float,
    causal: bool,
    window: int | None,
    scale: float | None,
    dropout_p: float,
    max_seqlen_k: int | None,
    return_stats: object,
) -> Checked:
    """Check everything that can be checked without reading a value of a tensor.

    Args:
        tensors: the tensors, as the caller passed them.
        alpha: a number in [1, 2]; ignored if ``tensors`` has alphas.
        causal: whether a query attends to no key after its position.
        window: largest distance of a key from a query's position, or ``None`` for any.
        scale: factor of the products; ``None`` for ``D ** -0.5``.
        dropout_p: probability that a weight is dropped.
        max_seqlen_k: bound of the keys of a packed sequence; ``None`` for the number of all keys.
        return_stats: ``True`` or ``"blocks"`` if statistics of rows are returned.

    Returns:
        The options of the operator, and the function that casts q, k and v under autocast and
        expands alpha to one number per head.

    Raises:
        TypeError: for arguments that are not tensors, or have a dtype that is not supported.
        ValueError: for shapes, devices or options that are not supported together.
    """
    q, k, v = tensors.q, tensors.k, tensors.v
    check_choice("return_stats", return_stats, (False, True, "blocks"))
    packed = tensors.cu_seqlens_q is not None or tensors.cu_seqlens_k is not None
    _check_qkv(q, k, v, packed)
    _check_layout(tensors)
    longest = k.size(0 if packed else 2)
    key_bound = _check_count("max_seqlen_k", max_seqlen_k)
    if packed and key_bound is not None:
        longest = min(longest, key_bound)
    checked_dropout = _check_dropout(dropout_p)
    width = _check_count("window", window)
    if width is None or width >= WIDEST_WINDOW:
        width = -1
    options = AttentionOptions(
        alpha_value=alpha_number(alpha) if tensors.alpha is None else ALPHA_IS_TENSOR,
        causal=bool(causal),
        window=width,
        scale=_check_scale(scale, q),
        dropout_p=checked_dropout,
        max_seqlen_k=longest,
        support=bool(return_stats),
    )
    autocast = autocast_dtype(q, k, v)
    if q.dtype == k.dtype == v.dtype == autocast:
        autocast = None  # nothing to cast
    alpha_is_per_head = tensors.alpha is None or tensors.alpha.shape == (q.size(1),)
    if autocast is None and alpha_is_per_head:
        return Checked(options, None)
    return Checked(options, partial(prepare_tensors, autocast))


def prepare_tensors(autocast: torch.dtype | None, tensors: AttentionTensors) -> AttentionTensors:
    """Cast q, k and v to the dtype of autocast, if any, and expand alpha to one per head.

    Args:
        autocast: dtype of autocast, or ``None`` if nothing is cast.
        tensors: tensors of the call.
    """
    alpha = tensors.alpha
    n_heads = tensors.q.size(1)
    if autocast is not None:
        tensors = tensors._replace(
            q=tensors.q.to(autocast),
            k=tensors.k.to(autocast),
            v=tensors.v.to(autocast),
        )
    if alpha is not None and alpha.shape != (n_heads,):
        tensors = tensors._replace(alpha=alpha.reshape(-1).expand(n_heads))
    return tensors


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Check dtypes and shapes of q, k and v, padded ``[B, H, N, D]`` or packed ``[T, H, D]``."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
        check_dtype(
            name,
            value,
            FLOAT_DTYPES,
            "cast it with .to(torch.bfloat16) or another of these.",
        )
    check_shape("q", q, "Tq H D" if packed else "B H Nq D")
    if packed:
        check_shape("k", k, "Tk Hkv D", D=q.size(2))
        check_shape("v", v, "Tk Hkv D", Tk=k.size(0), Hkv=k.size(1), D=k.size(2))
    else:
        check_shape("k", k, "B Hkv Nk D", B=q.size(0), D=q.size(3))
        check_shape(
            "v",
            v,
            "B Hkv Nk D",
            B=k.size(0),
            Hkv=k.size(1),
            Nk=k.size(2),
            D=k.size(3),
        )
    if k.size(1) == 0 or q.size(1) % k.size(1):
        raise ValueError(
            f"H of q must be a multiple of Hkv of k and v, got {q.size(1)} and {k.size(1)} heads; "
            "repeat or slice them.",
        )
    if q.size(-1) == 0:
        raise ValueError(f"D must be at least 1, got q of shape {list(q.shape)}.")
    if not q.dtype == k.dtype == v.dtype and autocast_dtype(q, k, v) is None:
        raise TypeError(
            f"k and v must have the dtype of q ({dtype_name(q.dtype)}), got {dtype_name(k.dtype)} "
            f"and {dtype_name(v.dtype)}; cast them, or run under torch.autocast.",
        )


def _check_layout(tensors: AttentionTensors) -> None:
    """Check the tensors apart from q, k and v, and that all tensors are on one device."""
    q = tensors.q
    tensors_by_name = {
        "k": tensors.k,
        "v": tensors.v,
        "cu_seqlens_q": tensors.cu_seqlens_q,
        "cu_seqlens_k": tensors.cu_seqlens_k,
        "key_padding_mask": tensors.key_padding_mask,
        "alpha": tensors.alpha,
    }
    for name, value in tensors_by_name.items():
        if value is not None:
            check_tensor(name, value)
    check_same_device("q", q, tensors_by_name)
    _check_offsets(tensors)
    mask = tensors.key_padding_mask
    if mask is not None:
        check_shape("key_padding_mask", mask, "B Nk", B=q.size(0), Nk=tensors.k.size(2))
        if mask.is_complex():  # every other dtype can be compared with 0
            raise TypeError(
                f"key_padding_mask must be bool, integer or floating, got {mask.dtype}.",
            )
    if tensors.alpha is not None:
        _check_alpha(tensors.alpha, n_heads=q.size(1))


def _check_alpha(alpha: Tensor, n_heads: int) -> None:
    """Check that a tensor of alphas has a floating dtype, and one number or one per head.

    Args:
        alpha: the tensor.
        n_heads: the number of heads.
    """
    check_dtype("alpha", alpha, FLOAT_DTYPES, "cast it with .float().")
    count = alpha.numel()
    # Not `count in (1, n_heads)`: torch.compile answers that without looking at symbolic sizes.
    if count != 1 and count != n_heads:  # noqa: PLR1714
        raise ValueError(
            f"alpha must hold one number or one per head ({n_heads}), got shape "
            f"{list(alpha.shape)}.",
        )


def _check_offsets(tensors: AttentionTensors) -> None:
    """Check that a packed batch has offsets of queries and keys, of one shape, and no mask."""
    cu_q = tensors.cu_seqlens_q
    cu_k = tensors.cu_seqlens_k
    if (cu_q is None) != (cu_k is None):
        missing = "cu_seqlens_q" if cu_q is None else "cu_seqlens_k"
        raise ValueError(
            f"{missing} must be given together with the other offsets, got None; pass the same "
            "tensor twice if they are equal.",
        )
    if cu_q is None or cu_k is None:
        return
    for name, offsets in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        check_offsets(name, offsets, "[B + 1], like the other offsets")
        if offsets.numel() != cu_q.numel():
            raise ValueError(
                f"{name} must have shape [B + 1], like the other offsets, got "
                f"{list(offsets.shape)}.",
            )
    if tensors.key_padding_mask is not None:
        raise ValueError(
            "key_padding_mask must be None with packed input, got a tensor; cu_seqlens_k already "
            "defines the keys.",
        )


def _check_count(name: str, value: int | None) -> int | None:
    """Return ``value`` if it is an integer of at least 0, or ``None``."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"{name} must be an integer of at least 0 or None, got {value!r}.")
    return value


def _check_scale(scale: float | None, q: Tensor) -> float:
    """Return the factor of the products, ``D ** -0.5`` by default.

    Args:
        scale: the argument of the call.
        q: the queries.
    """
    if scale is None:
        default: float = q.size(-1) ** -0.5
        return default
    if not isinstance(scale, (int, float)) or not -math.inf < scale < math.inf:
        raise ValueError(
            f"scale must be a finite Python number or None, got {scale!r}; multiply q by a tensor "
            "instead.",
        )
    return float(scale)


def _check_dropout(dropout_p: float) -> float:
    """Return the probability of dropout if it is a number in [0, 1)."""
    if (
        isinstance(dropout_p, bool)
        or not isinstance(dropout_p, (int, float))
        or not 0 <= dropout_p < 1
    ):
        raise ValueError(f"dropout_p must be a number in [0, 1), got {dropout_p!r}.")
    return float(dropout_p)
