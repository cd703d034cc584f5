"""Whether fp32 products on a GPU may run in TF32, by whichever of PyTorch's switches was used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tilefold.ops._shared.internals import precision_reader


def _reader() -> Callable[[], str]:
    """Reads the precision of fp32 products on a GPU, as cheaply as possible, because microseconds per call count."""
    matmul = torch.backends.cuda.matmul
    # PyTorch 2.9 and newer: one setting behind all switches. Once it was used, the old ones refuse to be read.
    setting = precision_reader()
    if setting is not None:
        return partial(setting, "cuda", "matmul")
    if hasattr(matmul, "fp32_precision"):
        return lambda: str(matmul.fp32_precision)
    return lambda: "tf32" if matmul.allow_tf32 else "ieee"


_precision = _reader()


def tf32_allowed(dtype: torch.dtype) -> bool:
    """Whether products of ``dtype`` may run in TF32, as cuBLAS would now; never for another dtype than fp32.

    ``torch.backends.cuda.matmul.fp32_precision``, ``torch.backends.fp32_precision``, ``allow_tf32`` and
    ``torch.set_float32_matmul_precision`` are all heeded.
    """
    return dtype == torch.float32 and _precision() == "tf32"
