"""Sparse tensors of torch, without torch's warnings about the first one of a process."""

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
    """Make a CSR tensor without checks.

    Args:
        row_starts: offsets of the rows, ``[R + 1]``.
        columns: column of each entry, ``[N]``.
        values: ``[N]``.
        shape: ``(R, V)``.

    Returns:
        ``[R, V]`` on the device of the values.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
        # Without the argument `device`, torch would use its default device.
        return torch.sparse_csr_tensor(
            row_starts,
            columns,
            values,
            shape,
            device=values.device,
            check_invariants=False,
        )


def to_csr(rows: Tensor) -> Tensor:
    """Convert dense ``[R, V]`` to CSR."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return rows.to_sparse_csr()


def coo_tensor(indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Make a coalesced COO tensor without checks.

    Args:
        indices: indices of the N entries in each of the D dimensions, ``[D, N]``, in lexicographic
            order and without repetition.
        values: ``[N]``.
        shape: D sizes.
    """
    _suppress_first_warning()
    return torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        is_coalesced=True,
        check_invariants=False,
    )


@functools.cache
def _suppress_first_warning() -> None:
    """Make a first sparse tensor while warnings are suppressed, once per process.

    torch warns only when the first one is made. Suppressing warnings for every tensor would take
    longer than making the tensor.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64),
            torch.zeros(0),
            (1,),
            is_coalesced=True,
            check_invariants=False,
        )
