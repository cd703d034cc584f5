"""Softmax attention within packed sequences, for encoders without padding.

The specification is torch's ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention

from tilefold.ops._shared.fallback import FallbackWarning
from tilefold.ops._shared.internals import Heads, efficient_attention_varlen, flash_attention_varlen
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

    Args:
        query: ``[T, H, D]`` floating, of any strides.
        key: ``[T, H, D]``, with as many heads as ``query``.
        value: ``[T, H, D]``, with as many heads as ``query``.
        cu_seqlens: int32 ``[B + 1]``, from 0 to T, of any stride, on the device of ``query``.
        max_seqlen: at least the length of the longest sequence.
        scale: factor of the scores; ``D ** -0.5`` by default.
        window: largest distance of a query and a key; no limit by default.
        dropout_p: probability that a weight is dropped.

    Returns:
        ``[T, H, D]`` in the dtype of ``query``.

    Raises:
        ValueError: if a shape is wrong, or the offsets are not int32.
    """
    if query.dim() != 3 or key.shape != query.shape or value.shape != query.shape:
        raise ValueError(
            f"query, key and value must have one shape [T, H, D], got {list(query.shape)}, "
            f"{list(key.shape)} and {list(value.shape)}; repeat the heads of key and value first.",
        )
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens must be int32 of shape [B + 1], got {cu_seqlens.dtype} of shape "
            f"{list(cu_seqlens.shape)}.",
        )
    if window is not None and window >= max_seqlen - 1:
        window = None
    qkv = _dense_heads(query), _dense_heads(key), _dense_heads(value)
    cu_seqlens = cu_seqlens.contiguous()
    if query.is_cuda and torch.version.cuda is not None:
        out = _attend_on_cuda(qkv, cu_seqlens, max_seqlen, dropout_p, scale, window)
        if out is not None:
            return out
    attend = partial(scaled_dot_product_attention, dropout_p=dropout_p, scale=scale)
    if query.device.type == "cpu":
        return _attend_by_sequence(qkv, cu_seqlens, window, attend)
    return _attend_padded(qkv, cu_seqlens, max_seqlen, window, attend)


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


def _attend_on_cuda(
    qkv: Heads,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    scale: float | None,
    window: int | None,
) -> Tensor | None:
    """Compute attention by a variable-length kernel of torch, or return ``None`` if none can.

    Args:
        qkv: query, key and value, ``[T, H, D]`` each.
        cu_seqlens: int32 ``[B + 1]``, contiguous.
        max_seqlen: at least the length of the longest sequence.
        dropout_p: probability that a weight is dropped.
        scale: factor of the scores; ``None`` uses ``D ** -0.5``.
        window: largest distance at which a query attends to a key; ``None`` for no limit.
    """
    query = qkv[0]
    if query.size(2) % 8 != 0:  # the kernels need head sizes that are multiples of 8
        return None
    if query.dtype in _HALF and _flash_runs_on(query):
        out = _flash_attention(qkv, cu_seqlens, max_seqlen, dropout_p, scale, window)
        if out is not None:
            return out
    if window is None and query.dtype in (*_HALF, torch.float32):
        return efficient_attention_varlen(qkv, cu_seqlens, max_seqlen, dropout_p, scale)
    return None


def _flash_attention(
    qkv: Heads,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    scale: float | None,
    window: int | None,
) -> Tensor | None:
    """Compute flash attention, or return ``None`` if the activated replacement cannot run.

    ``torch.nn.attention.activate_flash_attention_impl`` makes torch's operator run FlashAttention-3
    or -4. They have no dropout, and run on some generations of GPUs only. Torch's own kernels
    support every call.

    Args:
        qkv: query, key and value, ``[T, H, D]`` each.
        cu_seqlens: int32 ``[B + 1]``, contiguous.
        max_seqlen: at least the length of the longest sequence.
        dropout_p: probability that a weight is dropped.
        scale: factor of the scores; ``None`` uses ``D ** -0.5``.
        window: largest distance at which a query attends to a key; ``None`` for no limit.
    """
    arguments = qkv, cu_seqlens, max_seqlen, dropout_p, scale, window
    replacement = _activated_flash_attention()
    if replacement is None:
        return flash_attention_varlen(*arguments)
    if dropout_p > 0.0:
        _warn_of_replacement(replacement, "it has no dropout")
        return None
    try:
        return flash_attention_varlen(*arguments)
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


def _attend_by_sequence(
    qkv: Heads,
    cu_seqlens: Tensor,
    window: int | None,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Compute attention sequence by sequence, without padding.

    Reading the offsets would synchronise with a GPU, so this is for the CPU.

    Args:
        qkv: query, key and value, ``[T, H, D]`` each.
        cu_seqlens: int32 ``[B + 1]``.
        window: largest distance at which a query attends to a key; ``None`` for no limit.
        attend: attention of ``[1, H, L, D]`` query, key and value, and a mask.
    """
    lengths = cu_seqlens.diff().tolist()
    queries, keys, values = (  # [H, L, D] of each sequence
        torch.split(operand.transpose(0, 1), lengths, dim=1) for operand in qkv
    )
    outputs = []
    for length, query, key, value in zip(lengths, queries, keys, values, strict=True):
        if length == 0:
            outputs.append(query.new_zeros(query.shape))
            continue
        mask = None
        if window is not None and window < length - 1:
            mask = _window_mask(window, length, query.device)
        outputs.append(attend(query[None], key[None], value[None], mask)[0])
    if not outputs:
        return torch.zeros_like(qkv[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _attend_padded(
    qkv: Heads,
    cu_seqlens: Tensor,
    max_seqlen: int,
    window: int | None,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Pad the sequences, compute attention under a mask, and pack the result.

    Args:
        qkv: query, key and value, ``[T, H, D]`` each.
        cu_seqlens: int32 ``[B + 1]``.
        max_seqlen: at least the length of the longest sequence.
        window: largest distance at which a query attends to a key; ``None`` for no limit.
        attend: attention of ``[B, H, S, D]`` query, key and value, and a mask.
    """
    query, key, value = qkv
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
    if window is not None:
        near = _window_mask(window, max_seqlen, query.device)
        mask = mask & (near | ~is_token[:, None, :, None])
    out = attend(
        query[rows].transpose(1, 2),
        key[rows].transpose(1, 2),
        value[rows].transpose(1, 2),
        mask,
    )  # [B, H, S, D]
    sequences, token_position = token_positions(cu_seqlens, query.size(0))
    return out.transpose(1, 2).flatten(0, 1)[sequences * max_seqlen + token_position]


def _window_mask(window: int, length: int, device: torch.device) -> Tensor:
    """Return which queries and keys are at most ``window`` apart, ``[L, L]`` bool."""
    positions = torch.arange(length, device=device)
    is_near: Tensor = (positions[:, None] - positions).abs() <= window
    return is_near
