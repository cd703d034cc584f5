"""Which implementation of MaxSim runs."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared.checks import dtype_name
from tilefold.ops._shared.impl import resolve_impl

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def chosen_impl(queries: Tensor, impl: str = "auto") -> str:
    """Which implementation ``maxsim(queries, ..., impl=impl)`` runs: ``"reference"``, ``"tiled"`` or ``"triton"``.

    ``"auto"`` takes ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that has it, else ``"tiled"``.

    Raises:
        ValueError: for an unknown name.
        RuntimeError, TypeError: for ``"triton"`` on a device, or with a dtype, that it does not support.
    """
    resolved = resolve_impl(impl, queries.device, "maxsim")
    if resolved == "triton" and queries.dtype not in TRITON_DTYPES:
        if impl == "auto":
            return "tiled"
        names = ", ".join(dtype_name(dtype) for dtype in TRITON_DTYPES)
        raise TypeError(
            f"queries must have dtype {names} for impl='triton', got {dtype_name(queries.dtype)}; "
            "use impl='auto' or impl='tiled'."
        )
    return resolved
