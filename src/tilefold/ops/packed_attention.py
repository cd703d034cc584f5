"""Softmax attention within packed sequences, for transformers models without padding.

The specification is torch's ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention

from tilefold.ops._shared.autocast import autocast_dtype
from tilefold.ops._shared.checks import check_cu_seqlens, check_tensor, dtype_name
from tilefold.ops._shared.fallback import FallbackWarning
from tilefold.ops._shared.internals import (
    AttentionOptions,
    Heads,
    efficient_attention_varlen,
    flash_attention_varlen,
)
from tilefold.ops._shared.offsets import sequences_of_rows

__all__ = ["packed_softmax_attention", "token_positions"]

_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256  # largest head of torch's flash kernels


def packed_softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """``softmax(scale * q k^T) v`` within each sequence of a pack, forward and backward.

    On a GPU torch's own variable-length kernels run: flash attention in 16 bits, memory-efficient
    attention in fp32. A flash attention that was activated in place of torch's
    (``torch.nn.attention.activate_flash_attention_impl``) runs if it can, that is without dropout.
    If it cannot, the memory-efficient kernel runs, after one warning. On the CPU, attention is
    computed sequence by sequence. Otherwise (a window in fp32, a head dimension that is not a
    multiple of 8, other devices) the sequences are padded within this function. No path
    synchronises with the GPU.

    Under autocast, query, key and value are cast to its dtype first, as
    ``scaled_dot_product_attention`` does. Rotary embeddings leave query and key in fp32 there.

    Args:
        query: ``[T, H, D]`` floating, of any strides.
        key: ``[T, Hkv, D]``. Hkv divides H: consecutive heads of ``query`` share a head of ``key``
            and ``value`` (grouped-query attention). Flash attention and the CPU do not copy them.
        value: ``[T, Hkv, D]``.
        cu_seqlens: int32 ``[B + 1]``, from 0 to T, of any stride, on the device of ``query``. Their
            values are checked on the CPU only, since reading them would wait for a GPU.
        max_seqlen: at least the length of the longest sequence.
        scale: factor of the scores; ``D ** -0.5`` by default.
        window: largest distance of a query and a key; no limit by default.
        causal: whether a query attends to no later key.
        dropout_p: probability that a weight is dropped.

    Returns:
        ``[T, H, D]`` in the dtype of ``query``, or of autocast.

    Raises:
        ValueError: if a shape is wrong, or the offsets are not int32, or do not describe the rows.
        TypeError: if the offsets are not a tensor, or the dtypes differ without autocast.
    """
    _check_shapes(query, key, value)
    query, key, value = _in_one_dtype(query, key, value)
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(
            f"cu_seqlens must be int32 of shape [B + 1], got {cu_seqlens.dtype} of shape "
            f"{list(cu_seqlens.shape)}; use cu_seqlens.int().",
        )
    if window is not None and window >= max_seqlen - 1:
        window = None
    options = AttentionOptions(scale, window, causal, dropout_p)
    qkv = _dense_heads(query), _dense_heads(key), _dense_heads(value)
    cu_seqlens = cu_seqlens.contiguous()
    if query.is_cuda and torch.version.cuda is not None:
        out = _attend_on_cuda(qkv, cu_seqlens, max_seqlen, options)
        if out is not None:
            return out
    if query.device.type == "cpu":
        return _attend_by_sequence(qkv, cu_seqlens, options)
    return _attend_padded(qkv, cu_seqlens, max_seqlen, options)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ``ValueError`` unless query, key and value are packed heads that fit together.

    Args:
        query: must be ``[T, H, D]``.
        key: must be ``[T, Hkv, D]``, where Hkv divides H.
        value: must have the shape of ``key``.
    """
    fits = (
        query.dim() == 3
        and key.dim() == 3
        and key.shape == value.shape
        and (key.size(0), key.size(2)) == (query.size(0), query.size(2))
        and key.size(1) > 0
        and query.size(1) % key.size(1) == 0
    )
    if not fits:
        raise ValueError(
            "query must be [T, H, D], and key and value must have one shape [T, Hkv, D], where Hkv "
            f"divides H, got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}.",
        )


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> Heads:
    """Return query, key and value in the dtype of autocast, or as they are without autocast.

    Torch's variable-length kernels neither cast their operands nor compare their dtypes.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hkv, D]``.
        value: ``[T, Hkv, D]``.

    Raises:
        TypeError: if the dtypes differ without autocast.
    """
    autocast = autocast_dtype(query, key, value)
    if autocast is not None:
        return query.to(autocast), key.to(autocast), value.to(autocast)
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"key and value must have the dtype of query ({dtype_name(query.dtype)}), got "
            f"{dtype_name(key.dtype)} and {dtype_name(value.dtype)}; cast them, or run under "
            "torch.autocast.",
        )
    return query, key, value


def token_positions(cu_seqlens: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of each packed token, and its position in the sequence.

    This does not synchronise with the device.

    Args:
        cu_seqlens: ``[B + 1]`` offsets.
        n_tokens: T.

    Returns:
        Sequences and positions, int64 ``[T]`` each.
    """
    sequences = sequences_of_rows(cu_seqlens, n_tokens)
    token_numbers = torch.arange(n_tokens, device=cu_seqlens.device)
    return sequences, token_numbers - cu_seqlens.long()[sequences]


def _dense_heads(tensor: Tensor) -> Tensor:
    """Return ``[T, H, D]`` with a last stride of 1, as torch's kernels need.

    It is a copy if the tensor has another stride.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _with_repeated_heads(qkv: Heads) -> Heads:
    """Copy the heads of key and value that several heads of the query share, ``[T, H, D]`` each.

    Args:
        qkv: query ``[T, H, D]``, key and value ``[T, Hkv, D]``.
    """
    query, key, value = qkv
    n_repeats = query.size(1) // key.size(1)
    if n_repeats == 1:
        return qkv
    return (
        query,
        key.repeat_interleave(n_repeats, dim=1),
        value.repeat_interleave(n_repeats, dim=1),
    )


def _attend_on_cuda(
    qkv: Heads,
    cu_seqlens: Tensor,
    max_seqlen: int,
    options: AttentionOptions,
) -> Tensor | None:
    """Compute attention by a variable-length kernel of torch, or return ``None`` if none can.

    Args:
        qkv: query ``[T, H, D]``, key and value ``[T, Hkv, D]``.
        cu_seqlens: int32 ``[B + 1]``, contiguous.
        max_seqlen: at least the length of the longest sequence.
        options: which keys a query attends to, the scale and the dropout.
    """
    query = qkv[0]
    if query.size(2) % 8 != 0:  # the kernels need head sizes that are multiples of 8
        return None
    if query.dtype in _HALF and _flash_runs_on(query):
        out = _flash_attention(qkv, cu_seqlens, max_seqlen, options)
        if out is not None:
            return out
    if options.window is None and query.dtype in (*_HALF, torch.float32):
        return efficient_attention_varlen(
            _with_repeated_heads(qkv),
            cu_seqlens,
            max_seqlen,
            options,
        )
    return None


def _flash_attention(
    qkv: Heads,
    cu_seqlens: Tensor,
    max_seqlen: int,
    options: AttentionOptions,
) -> Tensor | None:
    """Compute flash attention, or return ``None`` if the activated replacement cannot run.

    ``torch.nn.attention.activate_flash_attention_impl`` makes torch's operator run FlashAttention-3
    or -4. They have no dropout, and run on some generations of GPUs only. Torch's own kernels
    support every call.

    Args:
        qkv: query ``[T, H, D]``, key and value ``[T, Hkv, D]``.
        cu_seqlens: int32 ``[B + 1]``, contiguous.
        max_seqlen: at least the length of the longest sequence.
        options: which keys a query attends to, the scale and the dropout.
    """
    replacement = _activated_flash_attention()
    if replacement is None:
        return flash_attention_varlen(qkv, cu_seqlens, max_seqlen, options)
    if options.dropout_p > 0.0:
        _warn_of_replacement(replacement, "it has no dropout")
        return None
    try:
        return flash_attention_varlen(qkv, cu_seqlens, max_seqlen, options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _warn_of_replacement(replacement, str(error))
        return None


def _activated_flash_attention() -> str | None:
    """Return the name of the flash attention that was activated in place of torch's, if any."""
    current = getattr(attention, "current_flash_attention_impl", None)  # from torch 2.11 on
    return None if current is None else current()


@functools.cache
def _warn_of_replacement(name: str, reason: str) -> None:
    """Warn, once per reason, that the activated flash attention does not run."""
    warnings.warn(
        f"The flash attention {name!r}, which was activated in torch, cannot run this packed "
        f"attention: {reason}. Torch's memory-efficient attention runs instead, which gives the "
        "same results up to rounding, but is slower. "
        "torch.nn.attention.restore_flash_attention_impl() restores torch's own flash attention.",
        FallbackWarning,
        stacklevel=5,  # the caller of the public function
    )


def _flash_runs_on(query: Tensor) -> bool:
    """Return whether the device has flash attention for the head dimension of the query."""
    capability = torch.cuda.get_device_capability(query.get_device())
    return query.size(2) <= _FLASH_HEAD_DIM and capability >= (8, 0)


def _attend_by_sequence(qkv: Heads, cu_seqlens: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention sequence by sequence, without padding.

    Reading the offsets would synchronise with a GPU, so this is for the CPU.

    Args:
        qkv: query ``[T, H, D]``, key and value ``[T, Hkv, D]``.
        cu_seqlens: int32 ``[B + 1]``.
        options: which keys a query attends to, the scale and the dropout.
    """
    check_cu_seqlens("cu_seqlens", cu_seqlens, qkv[0].size(0), "query", "tokens")
    lengths = cu_seqlens.diff().tolist()
    queries, keys, values = (  # [H, L, D] or [Hkv, L, D] of each sequence
        torch.split(operand.transpose(0, 1), lengths, dim=1) for operand in qkv
    )
    outputs = []
    for length, query, key, value in zip(lengths, queries, keys, values, strict=True):
        if length == 0:
            outputs.append(query.new_zeros(query.shape))
            continue
        mask = None
        if options.window is not None and options.window < length - 1:
            mask = _visible_keys(length, options, query.device)
        output = scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            mask,
            dropout_p=options.dropout_p,
            is_causal=options.is_causal and mask is None,
            scale=options.scale,
            enable_gqa=query.size(0) != key.size(0),
        )
        outputs.append(output[0])
    if not outputs:
        return torch.zeros_like(qkv[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _attend_padded(
    qkv: Heads,
    cu_seqlens: Tensor,
    max_seqlen: int,
    options: AttentionOptions,
) -> Tensor:
    """Pad the sequences, compute attention under a mask, and pack the result.

    Args:
        qkv: query ``[T, H, D]``, key and value ``[T, Hkv, D]``.
        cu_seqlens: int32 ``[B + 1]``.
        max_seqlen: at least the length of the longest sequence.
        options: which keys a query attends to, the scale and the dropout.
    """
    query, key, value = _with_repeated_heads(qkv)
    batch = cu_seqlens.numel() - 1
    if query.size(0) == 0 or batch == 0:
        return query.new_zeros(query.shape)
    offsets = cu_seqlens.long()
    positions = torch.arange(max_seqlen, device=query.device)
    rows = (offsets[:-1, None] + positions).clamp(max=query.size(0) - 1)  # [B, S]
    is_token = positions < offsets.diff()[:, None]  # [B, S]
    # A query without keys would be NaN, so empty sequences see one row, and padding sees all keys.
    # Their results are not used.
    mask = (is_token | (positions == 0))[:, None, None]
    if options.window is not None or options.is_causal:
        visible = _visible_keys(max_seqlen, options, query.device)
        mask = mask & (visible | ~is_token[:, None, :, None])
    out = scaled_dot_product_attention(
        query[rows].transpose(1, 2),
        key[rows].transpose(1, 2),
        value[rows].transpose(1, 2),
        mask,
        dropout_p=options.dropout_p,
        scale=options.scale,
    )  # [B, H, S, D]
    sequences, token_position = token_positions(cu_seqlens, query.size(0))
    return out.transpose(1, 2).flatten(0, 1)[sequences * max_seqlen + token_position]


def _visible_keys(length: int, options: AttentionOptions, device: torch.device) -> Tensor:
    """Return which keys each query attends to in a sequence without padding, ``[L, L]`` bool.

    Args:
        length: the length L of the sequence.
        options: the window, and whether attention is causal.
        device: the device of the mask.
    """
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions  # of a query to an earlier key
    is_visible = torch.ones_like(distance, dtype=torch.bool)
    if options.window is not None:
        is_visible &= distance.abs() <= options.window
    if options.is_causal:
        is_visible &= distance >= 0
    return is_visible
