"""Sparse tensors of torch, without the warnings that torch gives for every first one of a process."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

__all__ = ["coo_tensor", "csr_tensor", "to_csr"]


def csr_tensor(
    row_starts: Tensor,
    columns: Tensor,
    values: Tensor,
    shape: tuple[int, int],
) -> Tensor:
    """``[R, V]`` CSR of ``row_starts`` ``[R + 1]``, ``columns`` and ``values`` ``[N]``, unchecked,
    on their device.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
        # without a device, torch would take its default one
        return torch.sparse_csr_tensor(
            row_starts,
            columns,
            values,
            shape,
            device=values.device,
            check_invariants=False,
        )


def to_csr(rows: Tensor) -> Tensor:
    """Dense ``[R, V]`` as CSR."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return rows.to_sparse_csr()


def coo_tensor(indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """COO of ``indices`` ``[D, N]`` in rising order and ``values`` ``[N]``, unchecked, on their
    device.
    """
    _warned()
    return torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        is_coalesced=True,
        check_invariants=False,
    )


@functools.cache
def _warned() -> None:
    """Have the warnings of a first tensor behind us; to look away at every one takes longer than to
    make it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        none = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0)
        torch.sparse_coo_tensor(*none, (1,), is_coalesced=True, check_invariants=False)
