"""Products of fp32 on the CPU by oneDNN, which compiles a kernel for each number of rows.

Times are in benchmarks/notes/performance.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tilefold.ops._shared.internals import (
    can_use_onednn_linear,
    has_onednn_linear,
    onednn_linear,
    onednn_packed,
)

# A product with fewer rows is as fast in torch.
FEWEST_ROWS = 256


def onednn_is_faster(
    rows: Tensor,
    n_rows: int,
    weight: Tensor,
    bias: Tensor | None = None,
) -> bool:
    """Return whether a linear layer without gradients should run in oneDNN and not in torch.

    oneDNN is faster for many rows, if it has a kernel for these tensors and is enabled.

    Args:
        rows: inputs of the layer, or any tensor with their dtype, device and last dimension.
        n_rows: number of rows that are multiplied at once.
        weight: ``[N, K]``.
        bias: ``[N]``, or anything else that ``torch.nn.functional.linear`` accepts.
    """
    is_enabled = bool(getattr(torch.backends.mkldnn, "enabled", True))
    return (
        n_rows >= FEWEST_ROWS
        and can_use_onednn_linear(rows, weight, bias)
        and is_enabled
        and has_onednn_linear()
    )


def fast_product(like: Tensor, max_rows: int, weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return a function that multiplies rows by one weight faster than torch does, if there is one.

    Args:
        like: tensor with the dtype, device and last dimension of the rows.
        max_rows: maximum number of rows of a product.
        weight: ``[N, K]``, which is packed once.

    Returns:
        ``rows -> rows @ weight.T``, or ``None`` if torch is as fast.
    """
    if _mkl_is_fast() or not onednn_is_faster(like, max_rows, weight):
        return None
    packed = onednn_packed(weight, max_rows)
    return lambda rows: onednn_linear(rows, packed, None)


@functools.cache
def _mkl_is_fast() -> bool:
    """Return whether this is an Intel CPU and torch has MKL.

    MKL is an eighth faster there if it writes to memory that was written before.
    """
    try:
        is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return is_intel and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
