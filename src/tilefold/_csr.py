"""``torch.sparse_csr`` tensors, without the warnings that torch gives for every first one of a process."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = ["csr_tensor"]


def csr_tensor(row_starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """``[R, V]`` CSR of ``row_starts`` ``[R + 1]``, ``columns`` and ``values`` ``[N]``, unchecked, on their device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
        # without a device, torch would take its default one
        return torch.sparse_csr_tensor(
            row_starts, columns, values, size=shape, device=values.device, check_invariants=False
        )
