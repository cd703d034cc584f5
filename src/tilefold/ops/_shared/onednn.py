"""fp32 products on the CPU by oneDNN, which makes a kernel for each number of rows; times:
docs/performance.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tilefold.ops._shared.internals import has_onednn_linear, onednn_linear, onednn_packed

FEWEST_ROWS = 256


def serves(rows: Tensor, count: int, weight: Tensor) -> bool:
    """Whether oneDNN multiplies ``count`` rows like `rows` by `weight` ``[N, K]``, without a
    gradient.
    """
    return (
        count >= FEWEST_ROWS
        and rows.device.type == "cpu"
        and rows.dtype == weight.dtype == torch.float32
        and weight.is_contiguous()
        and bool(getattr(torch.backends.mkldnn, "enabled", True))
        and has_onednn_linear()
    )


def tile_product(like: Tensor, count: int, weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Function for repeated products of at most ``count`` rows and ``weight.T``, or None where
    torch does as well.
    """
    if _mkl_is_at_home() or not serves(like, count, weight):
        return None
    packed = onednn_packed(weight, count)
    return lambda rows: onednn_linear(rows, packed, None)


@functools.cache
def _mkl_is_at_home() -> bool:
    """Whether this is a CPU of Intel, where MKL into memory that was written before is an eighth
    faster.
    """
    try:
        intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return intel and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
