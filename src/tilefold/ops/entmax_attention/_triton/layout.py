"""How tensors lie in memory, and what every kernel of a call is told besides tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.tensors import contiguous, one_byte, power_of_two
from tilefold.ops._shared.entmax_root import kernel_kind
from tilefold.ops._shared.philox import dropout_threshold
from tilefold.ops.entmax_attention._problem import AttentionTensors, Options


@dataclass(frozen=True)
class Layout:
    """What every kernel of a call is told, but for tensors: numbers by the order of the kernels' parameters."""

    batch: int
    sizes: tuple[int, int, int, int, int]
    scalars: tuple[int, float, float, int, float, int]
    flags: dict[str, Any]


def layout_of(tensors: AttentionTensors, options: Options) -> Layout:
    """What the kernels are told of tensors like these."""
    q, k, alpha, packed, batch = tensors.q, tensors.k, tensors.alpha, tensors.packed, tensors.batch
    sizes = (0, 0, q.size(0), k.size(0), batch) if packed else (q.size(2), k.size(2), 0, 0, batch)
    heads, dim, p = q.size(1), q.size(-1), options.dropout_p
    stat_size = math.prod(tensors.stats_shape)
    scalars = (options.window, options.scale, options.alpha_value, dropout_threshold(p), 1 / (1 - p), stat_size)
    flags = {
        "H": heads,
        "GROUP": heads // k.size(1),
        "D": dim,
        "BLOCK_D": power_of_two(dim),
        "KIND": kernel_kind(q.dtype, alpha, options.alpha_value),
        "HAS_ALPHA": alpha is not None,
        "CAUSAL": options.causal,
        "WINDOW": options.window >= 0,
        "HAS_MASK": tensors.key_padding_mask is not None,
        "PACKED": packed,
        "DROPOUT": tensors.seed is not None,
        "EXACT": _is_exact(options.scale),
    }
    return Layout(batch, sizes, scalars, flags)


def _is_exact(scale: float) -> bool:
    """Whether multiplying by ``scale`` never rounds and keeps the order of scores."""
    return scale > 0 and math.frexp(scale)[0] == 0.5


def is_readable(tensor: Tensor) -> bool:
    """The kernels take any strides but of the last dimension, which they read in one piece."""
    return tensor.stride(-1) == 1 or tensor.size(-1) == 1


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that the kernels can read."""
    return tensor if is_readable(tensor) else tensor.contiguous()


def packed_densely(
    alpha: Tensor | None, mask: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As the kernels read them: contiguous, and the mask in bytes."""
    return contiguous(alpha), one_byte(mask), contiguous(cu_q), contiguous(cu_k)


def empty_like_writable(tensor: Tensor) -> Tensor:
    """A tensor that the kernels can write, with the strides of ``empty_like`` where that is possible."""
    made = torch.empty_like(tensor)
    return made if made.stride(-1) == 1 else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def read_strides(tensor: Tensor, packed: bool) -> tuple[int, int, int]:
    """Strides of sequence, head and token of what :func:`readable` gives."""
    return strides_of(tensor if is_readable(tensor) else _contiguous_outline(tensor), packed)


def write_strides(tensor: Tensor, packed: bool) -> tuple[int, int, int]:
    """The same of what :func:`empty_like_writable` gives."""
    made = outline(tensor)
    return strides_of(made if made.stride(-1) == 1 else _contiguous_outline(tensor), packed)


def strides_of(tensor: Tensor, packed: bool) -> tuple[int, int, int]:
    """Strides of sequence, head and token."""
    if packed:
        return 0, tensor.stride(1), tensor.stride(0)
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def outline(tensor: Tensor) -> Tensor:
    """What is laid out as ``torch.empty_like(tensor)``, without memory."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")


def _contiguous_outline(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, device="meta")
