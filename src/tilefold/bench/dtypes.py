"""Dtypes by name, as shapes and the command line give them."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


def parse_dtype(name: str) -> str:
    """``"bf16"`` or ``"bfloat16"`` -> ``"bfloat16"``; ``ValueError`` for an unknown name."""
    full = _DTYPE_ALIASES.get(name, name)
    if full not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}.")
    return full
