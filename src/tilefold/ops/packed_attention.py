"""Softmax attention of packed sequences, for encoders that should see no padding; the specification
is torch's SDPA.
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

__all__ = ["packed_softmax_attention", "places_of_tokens"]

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
    attention in fp32. A flash attention that was activated in the place of torch's
    (``torch.nn.attention.activate_flash_attention_impl``) runs where it can: without dropout. Where
    it cannot, the memory-efficient kernel runs, after one warning. On the CPU, sequences are attended to one after the other. What neither can
    do (a window in fp32, heads that are no multiple of 8, other devices) is padded inside this
    function alone. No path waits for the GPU.

    Args:
        query, key, value: ``[T, H, D]`` floating, of any strides; one number of heads.
        cu_seqlens: int32 ``[B + 1]``, from 0 to T, of any stride, on the device of ``query``.
        max_seqlen: at least the length of the longest sequence.
        scale: of the scores; ``D ** -0.5`` by default.
        window: keys at a distance of at most this are seen; all by default.
        dropout_p: probability that a weight is dropped.

    Returns:
        ``[T, H, D]`` in the dtype of ``query``.

    Raises:
        ValueError: for other shapes, or offsets of another dtype.
    """
    if query.dim() != 3 or key.shape != query.shape or value.shape != query.shape:
        raise ValueError(
            f"query, key and value must have one shape [T, H, D], got {list(query.shape)}, {list(key.shape)} and "
            f"{list(value.shape)}; repeat the heads of key and value first.",
        )
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens must be int32 of shape [B + 1], got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}.",
        )
    if window is not None and window >= max_seqlen - 1:
        window = None
    operands = _dense_heads(query), _dense_heads(key), _dense_heads(value)
    cu_seqlens = cu_seqlens.contiguous()
    if query.is_cuda and torch.version.cuda is not None:
        out = _attend_on_cuda(operands, cu_seqlens, max_seqlen, dropout_p, scale, window)
        if out is not None:
            return out
    attend = partial(scaled_dot_product_attention, dropout_p=dropout_p, scale=scale)
    if query.device.type == "cpu":
        return _one_by_one(operands, cu_seqlens, window, attend)
    return _padded(operands, cu_seqlens, max_seqlen, window, attend)


def places_of_tokens(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Sequence and place of each token of a pack, int64 ``[T]`` each, without waiting for the
    device.
    """
    sequence = sequences_of_rows(cu_seqlens, tokens)
    token_numbers = torch.arange(tokens, device=cu_seqlens.device)
    return sequence, token_numbers - cu_seqlens.long()[sequence]


def _dense_heads(tensor: Tensor) -> Tensor:
    """``[T, H, D]`` whose last stride is 1, which torch's kernels demand; copied where it is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _attend_on_cuda(
    operands: Heads,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    scale: float | None,
    window: int | None,
) -> Tensor | None:
    """Attention by a variable-length CUDA kernel of torch, or ``None`` where none takes the operands.

    Args:
        operands: query, key and value, ``[T, H, D]`` each.
        cu_seqlens: int32 ``[B + 1]``, contiguous.
        max_seqlen: at least the length of the longest sequence.
        dropout_p: probability that a weight is dropped.
        scale: of the scores; ``D ** -0.5`` for ``None``.
        window: largest distance between a query and a key that it sees; ``None`` is no limit.
    """
    query = operands[0]
    if query.size(2) % 8 != 0:
        return None
    if query.dtype in _HALF and _flash_runs_on(query):
        out = _flash_attention(operands, cu_seqlens, max_seqlen, dropout_p, scale, window)
        if out is not None:
            return out
    if window is None and query.dtype in (*_HALF, torch.float32):
        return efficient_attention_varlen(operands, cu_seqlens, max_seqlen, dropout_p, scale)
    return None


def _flash_attention(
    operands: Heads,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    scale: float | None,
    window: int | None,
) -> Tensor | None:
    """Flash attention, by torch or by what the user activated in its place; ``None`` where that cannot.

    Torch's kernels take every call. Those that replace them, FlashAttention-3 and -4, refuse
    dropout, and devices of other generations.
    """
    arguments = operands, cu_seqlens, max_seqlen, dropout_p, scale, window
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
    """Name of the implementation that was activated in the place of torch's flash attention, if any."""
    current = getattr(attention, "current_flash_attention_impl", None)  # from torch 2.11 on
    return None if current is None else current()


@functools.cache
def _warn_of_replacement(name: str, reason: str) -> None:
    """Warn, once per reason, that the activated flash attention does not run."""
    warnings.warn(
        f"The flash attention {name!r}, which was activated in torch, cannot run this packed attention: "
        f"{reason}. Torch's memory-efficient attention runs instead: the same results within rounding, slower. "
        "torch.nn.attention.restore_flash_attention_impl() brings torch's own flash attention back.",
        FallbackWarning,
        stacklevel=5,
    )


def _flash_runs_on(query: Tensor) -> bool:
    return query.size(2) <= _FLASH_HEAD_DIM and torch.cuda.get_device_capability(
        query.get_device(),
    ) >= (8, 0)


def _one_by_one(
    operands: Heads,
    cu_seqlens: Tensor,
    window: int | None,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Each sequence by itself: no padding, and one cut of the pack forward and backward."""
    lengths = cu_seqlens.diff().tolist()
    parts = [
        torch.split(tensor.transpose(0, 1), lengths, dim=1) for tensor in operands
    ]  # [H, L, D] each
    found = []
    for length, q, k, v in zip(lengths, *parts, strict=True):
        mask = (
            _within(window, length, q.device)
            if window is not None and window < length - 1
            else None
        )
        found.append(attend(q[None], k[None], v[None], mask)[0] if length else q.new_zeros(q.shape))
    return torch.cat(found, dim=1).transpose(0, 1) if found else torch.zeros_like(operands[0])


def _padded(
    operands: Heads,
    cu_seqlens: Tensor,
    max_seqlen: int,
    window: int | None,
    attend: Callable[..., Tensor],
) -> Tensor:
    query = operands[0]
    count = cu_seqlens.numel() - 1
    if query.size(0) == 0 or count == 0:
        return query.new_zeros(query.shape)
    offsets = cu_seqlens.long()
    places = torch.arange(max_seqlen, device=query.device)
    rows = (offsets[:-1, None] + places).clamp(max=query.size(0) - 1)  # [B, S]
    inside = places < offsets.diff()[:, None]  # [B, S]
    mask = (inside | (places == 0))[
        :,
        None,
        None,
    ]  # an empty sequence sees something, which nobody reads
    if window is not None:  # so do the queries of padding
        mask = mask & (_within(window, max_seqlen, query.device) | ~inside[:, None, :, None])
    out = attend(*(tensor[rows].transpose(1, 2) for tensor in operands), mask).transpose(
        1,
        2,
    )  # of [B, H, S, D]
    sequence, place = places_of_tokens(cu_seqlens, query.size(0))
    return out.flatten(0, 1)[sequence * max_seqlen + place]


def _within(window: int, length: int, device: torch.device) -> Tensor:
    """``[L, L]`` whether query and key are at most ``window`` apart."""
    places = torch.arange(length, device=device)
    near: Tensor = (places[:, None] - places).abs() <= window
    return near
