"""Linear layers in which the bits of a row do not depend on the other rows.

A library chooses the kernel of a matrix product by the number of rows, and kernels add in different
orders. Here, rows are multiplied in groups of a few sizes, and a group that is too small is padded.
Before the first product with a weight of a shape, all sizes multiply the same random rows, at
different positions. Sizes that give other bits than the largest one are not used.

This module alone decides how rows are grouped, for linear layers on CPUs and GPUs, and for the
tiles of :func:`tilefold.ops.lsr_head`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.internals import (
    can_use_onednn_linear,
    has_onednn_linear,
    onednn_linear,
)

__all__ = [
    "RowGroup",
    "group_rows",
    "grouped_linear",
    "grouped_product",
    "grouping_rows",
    "groups_rows",
    "usable_sizes",
]

# Candidates for the number of rows of a product, by the type of the device.
# On CPUs, a query of few tokens costs little more than its rows, and from 512 rows on a product is
# as fast as with more. GPUs take as long for 256 rows as for 1.
_CPU_SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_GPU_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# A group may be padded by this share of its rows. More rows are multiplied in two groups.
_MAX_PADDING_SHARE = 1 / 4
# The sizes multiply the same rows at positions that differ by this number, which is less than the
# smallest size.
_PROBE_SHIFT = 3
# Alignment of the rows of a product in bytes: libraries also choose kernels by it.
_ALIGNMENT = 64

_groups_rows: ContextVar[bool] = ContextVar("tilefold_groups_rows", default=False)


class RowGroup(NamedTuple):
    """Consecutive rows that are multiplied together.

    Attributes:
        start: the first row.
        stop: the row after the last one.
        size: the number of rows of the product: ``stop - start``, and zeros as padding.
    """

    start: int
    stop: int
    size: int


class _ProductKind(NamedTuple):
    """Everything that decides which kernel a library runs, besides the number of rows.

    Attributes:
        n_outputs: rows N of the weight ``[N, K]``.
        n_inputs: columns K of the weight.
        has_bias: whether a bias is added.
        dtype: the dtype of the operands.
        device: the device.
        n_threads: the number of threads of a CPU; 0 for other devices.
        fp32_precision: torch's setting for products of fp32, such as TF32.
    """

    n_outputs: int
    n_inputs: int
    has_bias: bool
    dtype: torch.dtype
    device: torch.device
    n_threads: int
    fp32_precision: str


@contextmanager
def grouping_rows(enabled: bool = True) -> Iterator[None]:
    """Let operators of this thread multiply rows in groups while the context is open.

    Args:
        enabled: False changes nothing.
    """
    token = _groups_rows.set(enabled or _groups_rows.get())
    try:
        yield
    finally:
        _groups_rows.reset(token)


def groups_rows() -> bool:
    """Return whether operators of this thread multiply rows in groups."""
    return _groups_rows.get()


def group_rows(n_rows: int, sizes: Sequence[int]) -> list[RowGroup]:
    """Divide rows into groups whose products have one of a few sizes.

    A group is as large as possible. The rest is padded, unless two groups waste less.

    Args:
        n_rows: the number of rows.
        sizes: the sizes, ascending.

    Examples:
        >>> group_rows(21, sizes=(4, 8, 16))
        [RowGroup(start=0, stop=16, size=16), RowGroup(start=16, stop=21, size=8)]
    """
    groups = []
    start = 0
    while start < n_rows:
        remaining = n_rows - start
        larger_sizes = [size for size in sizes if size >= remaining]
        smaller_sizes = [size for size in sizes if size < remaining]
        size = larger_sizes[0] if larger_sizes else smaller_sizes[-1]
        if smaller_sizes and size - remaining > remaining * _MAX_PADDING_SHARE:
            size = smaller_sizes[-1]
        stop = min(start + size, n_rows)
        groups.append(RowGroup(start, stop, size))
        start = stop
    return groups


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer whose rows do not depend on each other, not even in the last bit.

    The result equals ``torch.nn.functional.linear(rows, weight, bias)`` up to the order of sums,
    also under autocast. It has no gradient.

    Args:
        rows: ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]``.

    Raises:
        RuntimeError: if the device multiplies equal rows differently in one product.

    Examples:
        >>> import torch
        >>> rows, weight = torch.randn(100, 32), torch.randn(16, 32)
        >>> bool((grouped_linear(rows, weight)[7] == grouped_linear(rows[7:8], weight)[0]).all())
        True
    """
    dtype = _dtype_of_product(rows)
    with torch.autocast(rows.device.type, enabled=False):
        outputs = grouped_product(
            rows.reshape(-1, rows.size(-1)).to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
        )
    return outputs.view(*rows.shape[:-1], weight.size(0))


@torch.no_grad()
def grouped_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``rows @ weight.T + bias`` in the dtype of the operands, see :func:`grouped_linear`.

    Args:
        rows: ``[T, K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[T, N]``.
    """
    weight = weight.contiguous()
    sizes = usable_sizes(weight, bias is not None)
    n_rows = rows.size(0)
    groups = group_rows(n_rows, sizes)
    if len(groups) == 1:  # no copy of the result
        return _multiply(_padded(rows, groups[0].size), weight, bias)[:n_rows]
    outputs = rows.new_empty(n_rows, weight.size(0))
    for group in groups:
        n_grouped = group.stop - group.start
        operand = _padded(rows[group.start : group.stop], group.size)
        group_outputs = outputs[group.start : group.stop]
        if n_grouped == group.size:
            _multiply(operand, weight, bias, out=group_outputs)
        else:
            group_outputs.copy_(_multiply(operand, weight, bias)[:n_grouped])
    return outputs


def _dtype_of_product(rows: Tensor) -> torch.dtype:
    """Return the dtype in which autocast, if it is on, lets a linear layer multiply rows."""
    device_type = rows.device.type
    is_converted = torch.is_autocast_enabled(device_type) and rows.dtype != torch.float64
    return torch.get_autocast_dtype(device_type) if is_converted else rows.dtype


def _padded(rows: Tensor, size: int) -> Tensor:
    """Return rows ``[n, K]`` with zeros after them, ``[size, K]``, contiguous and aligned."""
    is_aligned = rows.is_contiguous() and rows.data_ptr() % _ALIGNMENT == 0
    if rows.size(0) == size and is_aligned:
        return rows
    padded = rows.new_zeros(size, rows.size(1))
    padded[: rows.size(0)] = rows
    return padded


def _multiply(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute one product by the library that is the fastest for many rows.

    Args:
        rows: ``[size, K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        out: ``[size, N]``, contiguous; by default a new tensor.

    Returns:
        The product ``[size, N]``; ``out`` if it is not None.
    """
    if can_use_onednn_linear(rows, weight, bias) and has_onednn_linear():
        product = onednn_linear(rows, weight, bias)
        return product if out is None else out.copy_(product)
    if out is None:
        out = rows.new_empty(rows.size(0), weight.size(0))
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


def usable_sizes(weight: Tensor, has_bias: bool) -> tuple[int, ...]:
    """Return the numbers of rows whose products with a weight have the same bits in every row.

    Args:
        weight: ``[N, K]``, of which only the shape, the dtype and the device matter.
        has_bias: whether a bias is added.

    Raises:
        RuntimeError: if there is no such number.
    """
    on_cpu = weight.device.type == "cpu"
    return _usable_sizes(
        _ProductKind(
            n_outputs=weight.size(0),
            n_inputs=weight.size(1),
            has_bias=has_bias,
            dtype=weight.dtype,
            device=weight.device,
            n_threads=torch.get_num_threads() if on_cpu else 0,
            fp32_precision=torch.get_float32_matmul_precision(),
        ),
    )


@functools.cache
def _usable_sizes(kind: _ProductKind) -> tuple[int, ...]:
    """Return the usable sizes for a kind of product, after multiplying random rows by all sizes.

    The largest size whose rows do not depend on their positions is the reference.

    Args:
        kind: the shape, the dtype and the device of the weight.
    """
    if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rows of products must be grouped before a CUDA graph is captured, got the first "
            f"product with a weight of shape [{kind.n_outputs}, {kind.n_inputs}] in a capture; "
            "encode a text before.",
        )
    sizes: tuple[int, ...] = _CPU_SIZES if kind.device.type == "cpu" else _GPU_SIZES
    while sizes:
        *smaller_sizes, largest = sizes
        probe = _Probe(kind, largest)
        if probe.gives_equal_rows(largest):
            return (*filter(probe.gives_equal_rows, smaller_sizes), largest)
        sizes = tuple(smaller_sizes)
    raise RuntimeError(
        "invariant=True needs a device whose products do not depend on the position of a row, got "
        f"{kind.device} and a weight of shape [{kind.n_outputs}, {kind.n_inputs}] in {kind.dtype}, "
        "for which no number of rows gives equal bits; use another dtype or accelerate(model).",
    )


class _Probe:
    """Random rows, and their product in one group of a size.

    Args:
        kind: the shape, the dtype and the device of the weight.
        size: the number of rows of the product.
    """

    def __init__(self, kind: _ProductKind, size: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator)
            return values.to(kind.device, kind.dtype)

        self._rows = random(size + _PROBE_SHIFT, kind.n_inputs)
        self._weight = random(kind.n_outputs, kind.n_inputs)
        self._bias = random(kind.n_outputs) if kind.has_bias else None
        self._expected = _multiply(self._rows[:size].contiguous(), self._weight, self._bias)

    def gives_equal_rows(self, size: int) -> bool:
        """Return whether a product of a size gives the same bits, with rows at other positions.

        Args:
            size: the number of rows, at most that of the probe.
        """
        shifted_rows = self._rows[_PROBE_SHIFT : _PROBE_SHIFT + size].clone()
        products = _multiply(shifted_rows, self._weight, self._bias)
        expected = self._expected[_PROBE_SHIFT : _PROBE_SHIFT + size]
        return torch.equal(products[: expected.size(0)], expected)
