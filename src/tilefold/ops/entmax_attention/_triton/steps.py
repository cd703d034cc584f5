"""Launches that are worked out once for calls of one kind, so that each call only fills in its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.direct import direct, hooked
from tilefold.ops._shared._triton.launch import Grid, launcher
from tilefold.ops._shared.entmax_root import kind_of
from tilefold.ops._shared.philox import dropout_threshold
from tilefold.ops.entmax_attention._geometry import Options, stats_shape


class Step:
    """A launch but for its tensors, which come first among a kernel's arguments; then numbers, then constants.

    ``step(settled, *tensors)`` launches. Calls of one kind differ in nothing that Triton builds another kernel for but
    in where tensors begin; see :func:`are_settled`.
    """

    __slots__ = ("_bound", "_grid", "_launcher", "_numbers", "_ran")

    def __init__(self, kernel: Any, grid: Grid, numbers: tuple[int | float, ...], constants: dict[str, Any]) -> None:
        self._launcher, self._grid, self._numbers = launcher(kernel, constants), grid, numbers
        self._bound: Callable[[tuple[Tensor | None, ...]], None] | None = None
        self._ran = False

    def __call__(self, settled: bool, *tensors: Tensor | None) -> None:
        bound = self._bound
        if settled and bound is not None:
            bound(tensors)
            return
        arguments = (*tensors, *self._numbers)
        self._launcher(self._grid, arguments)
        if self._ran and settled and (found := self._launcher.compiled(arguments)) is not None:
            kernel, constants = found
            self._bound = direct(kernel, self._grid, (*self._numbers, *constants))
        self._ran = True  # batches of ever other sizes need not pay for what is not repeated


def are_settled(*tensors: Tensor | None) -> bool:
    """Whether all begin at multiples of 16 bytes, as what a call allocates itself does, and nobody listens to launches.

    A launch may then be repeated as it was.
    """
    together = 0
    for tensor in tensors:
        if tensor is not None:
            together |= tensor.data_ptr()
    return together & 15 == 0 and not hooked()


@dataclass(frozen=True)
class Layout:
    """What every kernel of a call is told, but for tensors: numbers by the order of the kernels' parameters."""

    packed: bool
    batch: int
    sizes: tuple[int, int, int, int, int]
    scalars: tuple[int, float, float, int, float, int]
    flags: dict[str, Any]


def layout_of(
    q: Tensor,
    k: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    seed: Tensor | None,
    options: Options,
) -> Layout:
    """What the kernels are told of tensors like these."""
    packed = cu_q is not None
    batch = q.size(0) if cu_q is None else cu_q.numel() - 1
    sizes = (0, 0, q.size(0), k.size(0), batch) if packed else (q.size(2), k.size(2), 0, 0, batch)
    heads, dim, p = q.size(1), q.size(-1), options.dropout_p
    stat_size = math.prod(stats_shape(q, packed))
    scalars = (options.window, options.scale, options.constant, dropout_threshold(p), 1 / (1 - p), stat_size)
    flags = {
        "H": heads,
        "GROUP": heads // k.size(1),
        "D": dim,
        "BLOCK_D": power_of_two(dim),
        "KIND": kind_of(None if alpha is not None else options.constant),
        "HAS_ALPHA": alpha is not None,
        "CAUSAL": options.causal,
        "WINDOW": options.window >= 0,
        "HAS_MASK": key_mask is not None,
        "PACKED": packed,
        "DROPOUT": seed is not None,
        "EXACT": _is_exact(options.scale),
    }
    return Layout(packed, batch, sizes, scalars, flags)


def _is_exact(scale: float) -> bool:
    """Whether multiplying by ``scale`` never rounds and keeps the order of scores."""
    return scale > 0 and math.frexp(scale)[0] == 0.5


def power_of_two(n: int, least: int = 16) -> int:
    """The first power of two that is no less than ``n``."""
    return max(least, 1 << (n - 1).bit_length())


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A mask that the kernels can read, nonzero = keep: contiguous bytes."""
    if mask is None:
        return None
    if mask.dtype not in (torch.bool, torch.uint8, torch.int8):
        mask = mask != 0
    mask = mask.contiguous()
    return mask if mask.dtype == torch.uint8 else mask.view(torch.uint8)


def as_offsets(offsets: Tensor | None) -> Tensor | None:
    """Offsets that the kernels can read: contiguous."""
    return None if offsets is None else offsets.contiguous()


def is_readable(tensor: Tensor) -> bool:
    """The kernels take any strides but of the last dimension, which they read in one piece."""
    return tensor.stride(-1) == 1 or tensor.size(-1) == 1


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that the kernels can read."""
    return tensor if is_readable(tensor) else tensor.contiguous()


def room_for(tensor: Tensor) -> Tensor:
    """A tensor that the kernels can write, with the strides of ``empty_like`` where that is possible."""
    made = torch.empty_like(tensor)
    return made if made.stride(-1) == 1 else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def read_strides(tensor: Tensor, packed: bool) -> tuple[int, int, int]:
    """Strides of sequence, head and token of what :func:`readable` gives."""
    return strides_of(tensor if is_readable(tensor) else _contiguous_outline(tensor), packed)


def room_strides(tensor: Tensor, packed: bool) -> tuple[int, int, int]:
    """The same of what :func:`room_for` gives."""
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
