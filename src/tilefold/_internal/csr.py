"""Creation of torch's sparse tensors without the warnings of torch about the first of them."""

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
    """Create a CSR tensor from valid parts, skipping torch's validation.

    Args:
        row_starts: offsets of the rows, ``[R + 1]``.
        columns: column of each of the N entries, ``[N]``.
        values: value of each entry, ``[N]``.
        shape: numbers of rows R and columns V.

    Returns:
        The tensor ``[R, V]`` on the device of the values.
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
    """Convert a dense matrix ``[R, V]`` to a CSR tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return rows.to_sparse_csr()


def coo_tensor(indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Create a coalesced COO tensor from valid parts, skipping torch's validation.

    Args:
        indices: indices of the N entries in each of the D dimensions, ``[D, N]``, in lexicographic
            order and without duplicates.
        values: value of each entry, ``[N]``.
        shape: size of each of the D dimensions.
    """
    _consume_beta_warning()
    return torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        is_coalesced=True,
        check_invariants=False,
    )


@functools.cache
def _consume_beta_warning() -> None:
    """Create a sparse tensor while warnings are suppressed, once per process.

    torch warns about sparse tensors when the first one of a process is created. Suppressing
    warnings around every tensor would take longer than creating the tensor.
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
