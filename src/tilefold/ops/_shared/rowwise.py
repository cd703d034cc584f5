"""Functions of rows, such as norms, in which the bits of a row do not depend on the other rows.

Sums along the columns of a row depend on the number of rows only if there are few of them. So few
rows are padded to a least number. Before it is used for the first time, matrices of this number of
rows and of larger numbers, up to 1,024, are compared, which repeat the same random rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tilefold.ops._shared.row_probes import N_RANDOM_ROWS, ROW_SHIFT, random_row_indices
from tilefold.ops._shared.row_products import pad_rows, refuse_probe_in_capture

__all__ = ["apply_rowwise", "normalize_rows"]

# Candidates for the least number of rows of a function of rows, by the type of the device. On GPUs,
# the reductions of torch divide a row among other threads if there are fewer than 8 or 16 rows.
_CPU_LEAST_ROWS = (1, 2, 4, 8, 16, 32)
_GPU_LEAST_ROWS = (16, 32, 64, 128, 256)
# The largest number of rows with which such candidates are compared.
_MOST_COMPARED_ROWS = 1024


class _FunctionKind(NamedTuple):
    """Everything that decides which kernels a function of rows runs, besides the number of rows.

    Attributes:
        name: the name of the function.
        n_columns: the number of columns of the rows.
        dtype: the dtype of the rows.
        device: the device.
        n_threads: the number of threads of a CPU, which may divide a long row; 0 for other devices.
    """

    name: str
    n_columns: int
    dtype: torch.dtype
    device: torch.device
    n_threads: int


# The least numbers of rows of functions.
_least_numbers: dict[_FunctionKind, int] = {}


def normalize_rows(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1, in the same bits for any number of vectors.

    Args:
        vectors: ``[..., D]``.

    Returns:
        ``[..., D]``.

    Examples:
        >>> import torch
        >>> normalize_rows(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """
    return apply_rowwise(_normalize, vectors, "normalize")


def _normalize(rows: Tensor) -> Tensor:
    """Scale rows ``[n, D]`` to length 1."""
    return normalize(rows, p=2.0, dim=-1)


def apply_rowwise(function: Callable[[Tensor], Tensor], rows: Tensor, name: str) -> Tensor:
    """Apply a function of rows, in which the bits of a row do not depend on the number of rows.

    Args:
        function: computes a row ``[D]`` of its result from each row of a matrix ``[n, D]``.
        rows: ``[..., D]``.
        name: the name of the function. Functions of one name must run the same kernels.

    Returns:
        ``[..., D]``.

    Raises:
        RuntimeError: if the bits depend on the number of rows, however many there are.
    """
    packed_rows = rows.reshape(-1, rows.size(-1))
    n_rows = packed_rows.size(0)
    kind = _FunctionKind(
        name=name,
        n_columns=rows.size(-1),
        dtype=rows.dtype,
        device=rows.device,
        n_threads=torch.get_num_threads() if rows.device.type == "cpu" else 0,
    )
    n_least = _least_numbers.get(kind)
    if n_least is None:
        n_least = _least_number_of_rows(function, kind)
        _least_numbers[kind] = n_least
    if n_rows < n_least:
        packed_rows = pad_rows(packed_rows, n_least)
    return function(packed_rows)[:n_rows].reshape(rows.shape)


@torch.no_grad()
def _least_number_of_rows(function: Callable[[Tensor], Tensor], kind: _FunctionKind) -> int:
    """Return the least number of rows from which on a row has equal bits.

    Candidates are tested with random rows, repeated in matrices of this number of rows and of
    larger numbers up to 1,024. Still more rows are taken to behave like 1,024.

    Args:
        function: computes a row of its result from each row of a matrix.
        kind: name of the function, and the columns, dtype and device of the rows.

    Raises:
        RuntimeError: if there is no such number.
    """
    refuse_probe_in_capture(kind.device, f"{kind.name} of rows with {kind.n_columns} columns")
    generator = torch.Generator(kind.device).manual_seed(0)
    shape = (N_RANDOM_ROWS, kind.n_columns)
    rows = torch.randn(shape, generator=generator, device=kind.device).to(kind.dtype)

    def has_equal_bits(n_rows: int, first_row: int) -> bool:
        """Whether the results have the expected bits for a matrix of the repeated random rows."""
        indices = random_row_indices(n_rows, first_row, kind.device)
        return torch.equal(function(rows[indices]), expected[indices])

    all_indices = random_row_indices(_MOST_COMPARED_ROWS, 0, kind.device)
    expected = function(rows[all_indices])[:N_RANDOM_ROWS]
    candidates = _CPU_LEAST_ROWS if kind.device.type == "cpu" else _GPU_LEAST_ROWS
    for n_least in candidates:
        # Number of rows of a matrix, and the index of the random row with which it begins.
        comparisons = [(n_least, first_row) for first_row in range(0, N_RANDOM_ROWS, n_least)]
        comparisons += [(n_least + n_more, ROW_SHIFT) for n_more in (1, 2, 3, 5, 7)]
        comparisons += [(n_least * factor, ROW_SHIFT) for factor in (2, 3, 5, 8)]
        comparisons.append((_MOST_COMPARED_ROWS, ROW_SHIFT))
        if all(has_equal_bits(n_rows, first_row) for n_rows, first_row in comparisons):
            return n_least
    raise RuntimeError(
        "invariant=True needs a device whose sums of a row do not depend on the number of rows, "
        f"got {kind.device} and {kind.name} of {kind.n_columns} columns in {kind.dtype}, for which "
        f"rows differ up to {candidates[-1]} rows; use another dtype or accelerate(model).",
    )
