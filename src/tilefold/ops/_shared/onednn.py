"""fp32 products on the CPU by oneDNN instead of torch's choice, MKL.

One core of an EPYC encodes texts of 128 tokens 1.1 times as fast with it: MKL reaches 80 to 97 GFLOP/s there, oneDNN 90
to 104. It makes a kernel for each number of rows, so a few rows stay with torch (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilefold.ops._shared.internals import has_onednn_linear, onednn_linear, onednn_packed

FEWEST_ROWS = 256


def serves(rows: Tensor, count: int, weight: Tensor) -> bool:
    """Whether oneDNN multiplies ``count`` rows like `rows` by `weight` ``[N, K]``, without a gradient."""
    return (
        count >= FEWEST_ROWS
        and rows.device.type == "cpu"
        and rows.dtype == weight.dtype == torch.float32
        and weight.is_contiguous()
        and bool(getattr(torch.backends.mkldnn, "enabled", True))
        and has_onednn_linear()
    )


def tile_product(like: Tensor, count: int, weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Function for repeated products of rows ``[n, K]`` and ``weight.T``, or None where torch does as well.

    Args:
        like: rows, for device and dtype.
        count: rows of a product, at most.
        weight: ``[N, K]``; copied into blocks, once.
    """
    if not serves(like, count, weight):
        return None
    packed = onednn_packed(weight, count)
    return lambda rows: onednn_linear(rows, packed, None)
