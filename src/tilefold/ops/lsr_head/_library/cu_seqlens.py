"""The values of ``cu_seqlens``: checked on the host where that needs no synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared.library import define_op


def check_cu_seqlens(cu_seqlens: Tensor, rows: int) -> None:
    """Check the values of ``cu_seqlens`` on the host.

    Raises:
        ValueError: unless it starts with 0, never falls, and ends at the number of rows.
    """
    values = cu_seqlens.tolist()
    falls = next((i for i in range(1, len(values)) if values[i] < values[i - 1]), None)
    if values[0] != 0:
        problem = f"cu_seqlens[0] = {values[0]}"
    elif falls is not None:
        problem = f"cu_seqlens[{falls}] = {values[falls]} after {values[falls - 1]}"
    elif values[-1] != rows:
        problem = f"cu_seqlens[-1] = {values[-1]} with {rows} rows in hidden"
    else:
        return
    raise ValueError(
        f"cu_seqlens must start with 0, never fall and end at the number of rows T of hidden, got {problem}; "
        "build it as the cumulative sum of the sequence lengths with a 0 in front."
    )


def broken_cu_seqlens(cu_seqlens: Tensor, rows: int) -> Tensor:
    """Whether ``cu_seqlens`` does not describe ``rows`` rows, as a bool on its device that nobody waits for."""
    return (cu_seqlens[0] != 0) | (cu_seqlens[-1] != rows) | (cu_seqlens[1:] < cu_seqlens[:-1]).any()


def looks_are_free(tensor: Tensor, impl: str) -> bool:
    """Whether the host may read values: on the CPU, and where the implementation reads them anyway."""
    return tensor.device.type != "cuda" or impl == "tiled"


@define_op("check_cu_seqlens", "(Tensor cu_seqlens, SymInt rows) -> Tensor")
def _checked_copy(cu_seqlens: Tensor, rows: int) -> Tensor:
    if looks_are_free(cu_seqlens, impl="auto"):
        check_cu_seqlens(cu_seqlens, rows)
    return cu_seqlens.clone(memory_format=torch.contiguous_format)


@torch.library.register_fake("tilefold::check_cu_seqlens")
def _(cu_seqlens: Tensor, rows: int) -> Tensor:
    return torch.empty_like(cu_seqlens, memory_format=torch.contiguous_format)


def checked_cu_seqlens(cu_seqlens: Tensor, rows: int) -> Tensor:
    """A copy of ``cu_seqlens``, whose values are checked where that needs no synchronisation."""
    return torch.ops.tilefold.check_cu_seqlens(cu_seqlens, rows)  # type: ignore[no-any-return]
