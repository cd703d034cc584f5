"""Whether fp32 products on a GPU may run in TF32, by whichever of PyTorch's switches was used."""

from __future__ import annotations

import torch

_MATMUL = torch.backends.cuda.matmul
# PyTorch 2.9 and newer: one setting behind all switches. Once it was used, the old ones refuse to be read.
_HAS_PRECISION = hasattr(_MATMUL, "fp32_precision")


def tf32_allowed(dtype: torch.dtype) -> bool:
    """Whether products of ``dtype`` may run in TF32, as cuBLAS would now; never for another dtype than fp32.

    ``torch.backends.cuda.matmul.fp32_precision``, ``torch.backends.fp32_precision``, ``allow_tf32`` and
    ``torch.set_float32_matmul_precision`` are all heeded.
    """
    if dtype != torch.float32:
        return False
    if _HAS_PRECISION:
        return bool(_MATMUL.fp32_precision == "tf32")
    return bool(_MATMUL.allow_tf32)
