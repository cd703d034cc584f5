"""Linear layers in which the bits of a row do not depend on the other rows.

A library chooses the kernel of a matrix product by the number of rows, and kernels add in different
orders. Here, rows are multiplied in groups of a few sizes, and a group that is too small is padded.
Only sizes are used that give equal rows the same bits (:mod:`tilefold.ops._shared.row_probes`). In
fp32, the libraries of GPUs often give few rows other bits. A kernel that adds in the order of large
products then multiplies them (:mod:`tilefold.ops._shared.ordered_product`), if it gives their bits.

This module alone decides how rows are grouped, for linear layers on CPUs and GPUs, and for the
tiles of :func:`tilefold.ops.lsr_head`.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.autocast import autocast_dtype
from tilefold.ops._shared.ordered_product import ordered_product
from tilefold.ops._shared.row_probes import (
    FEW_GPU_ROWS,
    GPU_SIZES,
    LEAST_GPU_ROWS,
    MOST_ORDERED_ROWS,
    ProductKind,
    probe_of,
    product_kind_of,
)
from tilefold.ops._shared.row_products import align, is_aligned, multiply_rows, pad_rows

__all__ = [
    "LinearLayers",
    "RowGroup",
    "filled_row_count",
    "group_rows",
    "grouped_linear",
    "grouped_product",
    "grouping_rows",
    "is_row_grouping_enabled",
    "padded_row_count",
    "usable_sizes",
]

# A batch on a GPU is padded to the next size if that takes fewer rows than this.
_MOST_FILLER_ROWS = 2 * LEAST_GPU_ROWS
# A group may be padded by this share of its rows, and always by less than the smallest size. More
# rows are multiplied in two groups.
_MAX_PADDING_SHARE = 1 / 8
# GPUs multiply this number of rows more in less time than a second group.
_GPU_FREE_PADDING = LEAST_GPU_ROWS - 1
# To copy more rows, for padding, takes a GPU longer than one more group.
_GPU_LARGEST_PADDED = 8192

_row_grouping: ContextVar[bool] = ContextVar("tilefold_groups_rows", default=False)


class RowGroup(NamedTuple):
    """Consecutive rows that are multiplied together.

    Attributes:
        start: the first row.
        stop: the row after the last one.
        size: the number of rows of the product: ``stop - start``, and zeros as padding.
        is_ordered: whether a kernel that adds in the order of K multiplies them, in place of a
            library.
    """

    start: int
    stop: int
    size: int
    is_ordered: bool = False


class LinearLayers(NamedTuple):
    """Linear layers of one shape.

    Attributes:
        weight: ``[N, K]`` of one of them.
        has_bias: whether they have a bias.
        n_layers: their number.
    """

    weight: Tensor
    has_bias: bool
    n_layers: int


@contextmanager
def grouping_rows(enabled: bool = True) -> Iterator[None]:
    """Let operators of the current context multiply rows in groups until the block ends.

    Args:
        enabled: False keeps the setting of an outer block.
    """
    token = _row_grouping.set(enabled or _row_grouping.get())
    try:
        yield
    finally:
        _row_grouping.reset(token)


def is_row_grouping_enabled() -> bool:
    """Return whether operators of the current context multiply rows in groups."""
    return _row_grouping.get()


def group_rows(
    n_rows: int,
    sizes: Sequence[int],
    free_padding: int = 0,
    largest_padded: int | None = None,
) -> list[RowGroup]:
    """Divide rows into groups whose products have one of a few sizes.

    A group is as large as possible. The remaining rows are one padded group. They are divided again
    if the padding would be more than an eighth of them, more than the free padding, and at least
    the smallest size. Many remaining rows are also divided if the padding does not grow by it,
    because padding copies all rows of a group.

    Args:
        n_rows: the number of rows.
        sizes: numbers of rows that a product may have, ascending.
        free_padding: number of padding rows that take less time than one more group.
        largest_padded: a group of more rows is padded only if dividing it needs more padding; by
            default there is no such limit.

    Examples:
        >>> groups = group_rows(47, sizes=(8, 16, 32, 64))
        >>> [(group.start, group.stop, group.size) for group in groups]
        [(0, 32, 32), (32, 47, 16)]
    """
    groups = []
    start = 0
    while start < n_rows:
        remaining = n_rows - start
        # The first size that holds all remaining rows, or the largest size.
        position = bisect.bisect_left(sizes, remaining)
        size = sizes[min(position, len(sizes) - 1)]
        max_padding = max(free_padding, sizes[0] - 1, remaining * _MAX_PADDING_SHARE)
        if position > 0 and size > remaining:
            smaller_size = sizes[position - 1]
            rest_size = sizes[bisect.bisect_left(sizes, remaining - smaller_size)]
            copies_many_rows = largest_padded is not None and size > largest_padded
            can_be_divided = copies_many_rows and smaller_size + rest_size <= size
            if can_be_divided or size - remaining > max_padding:
                size = smaller_size
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
        RuntimeError: if the device multiplies equal rows differently in one product, or if the
            first product of a shape is in the capture of a CUDA graph.

    Examples:
        >>> import torch
        >>> rows, weight = torch.randn(100, 32), torch.randn(16, 32)
        >>> bool((grouped_linear(rows, weight)[7] == grouped_linear(rows[7:8], weight)[0]).all())
        True
    """
    dtype = autocast_dtype(rows)
    if dtype is not None:
        # Autocast leaves operands of its own dtype as they are.
        rows = rows.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    n_rows = math.prod(rows.shape[:-1])
    outputs = grouped_product(rows.reshape(n_rows, rows.size(-1)), weight, bias)
    return outputs.view(*rows.shape[:-1], weight.size(0))


def grouped_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``rows @ weight.T + bias``, with the same bits in a row for any number of rows.

    A library chooses its kernel, and so the order of additions, by the number of rows. Rows are
    therefore multiplied in groups of sizes that were tested to give equal bits, and a group with
    fewer rows is padded with zeros. A few fp32 rows on a GPU are multiplied by
    :func:`ordered_product` instead, if it gives the bits of the library. The product has no
    gradient.

    The kernel also depends on the address of the weight: see :func:`align`, which is called for it.

    Args:
        rows: ``[T, K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[T, N]``.

    Raises:
        RuntimeError: if the operands do not fit together, or as :func:`grouped_linear`.
    """
    if torch.is_grad_enabled():  # writing into `out` is an error while autograd records
        with torch.no_grad():
            return grouped_product(rows, weight, bias)
    if not _fit_together(rows, weight, bias):
        return multiply_rows(rows, weight, bias)  # raises the error of torch
    weight = align(weight)
    if bias is not None:
        bias = align(bias.expand(weight.size(0)))
    n_rows = rows.size(0)
    groups = _groups_with_equal_bits(n_rows, product_kind_of(weight, bias is not None))
    if len(groups) == 1:  # the product is the result, without a copy
        size = groups[0].size
        if groups[0].is_ordered:
            return ordered_product(pad_rows(rows, size), weight, bias)
        product = multiply_rows(pad_rows(rows, size), weight, bias)
        return product if size == n_rows else product[:n_rows]
    outputs = rows.new_empty(n_rows, weight.size(0))
    for group in groups:
        n_grouped = group.stop - group.start
        operand = pad_rows(rows[group.start : group.stop], group.size)
        group_outputs = outputs[group.start : group.stop]
        if n_grouped == group.size and is_aligned(group_outputs):
            multiply_rows(operand, weight, bias, out=group_outputs)
        else:
            group_outputs.copy_(multiply_rows(operand, weight, bias)[:n_grouped])
    return outputs


def _fit_together(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether operands of a product have one dtype, one device and the same K.

    Args:
        rows: ``[T, K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
    """
    others = [weight] if bias is None else [weight, bias]
    return rows.size(-1) == weight.size(-1) and all(
        other.dtype == rows.dtype and other.device == rows.device for other in others
    )


@functools.lru_cache(maxsize=4096)
def _groups_with_equal_bits(n_rows: int, kind: ProductKind) -> list[RowGroup]:
    """Divide rows into groups of sizes whose products have the same bits in equal rows.

    Few rows are one group without padding, if our kernel, which adds in the order of K, gives the
    bits of the library. Otherwise, a size is tested when it is needed for the first time. If it
    fails, rows are divided again.

    Args:
        n_rows: the number of rows.
        kind: shape, dtype and device of the weight.
    """
    probe = probe_of(kind)
    has_outputs = n_rows > 0 and kind.n_outputs > 0
    if has_outputs and n_rows <= MOST_ORDERED_ROWS and probe.is_order_usable:
        return [RowGroup(0, n_rows, n_rows, is_ordered=True)]
    is_on_cpu = kind.device.type == "cpu"
    free_padding = 0 if is_on_cpu else _GPU_FREE_PADDING
    largest_padded = None if is_on_cpu else _GPU_LARGEST_PADDED
    while True:
        groups = group_rows(n_rows, probe.sizes, free_padding, largest_padded)
        # `is_usable` removes a size that fails from `probe.sizes`, so that this loop ends.
        if all(probe.is_usable(group.size) for group in groups):
            return groups


def usable_sizes(weight: Tensor, has_bias: bool) -> tuple[int, ...]:
    """Return the numbers of rows whose products with a weight have the same bits in every row.

    Args:
        weight: ``[N, K]``, of which only the shape, the dtype and the device matter.
        has_bias: whether a bias is added.

    Raises:
        RuntimeError: if there is no such number.
    """
    probe = probe_of(product_kind_of(weight, has_bias))
    return tuple(size for size in probe.sizes if probe.is_usable(size))


def filled_row_count(n_rows: int) -> int:
    """Return the number of rows to which many rows on a GPU are padded before they pass all layers.

    It is one of the sizes of a product if that is little larger. A layer then multiplies all rows
    at once. Otherwise it is a multiple of :data:`LEAST_GPU_ROWS`, so that layers can divide the
    rows into groups without padding, which would copy the rows of a group.

    Args:
        n_rows: the number of rows, at least :data:`LEAST_GPU_ROWS`.

    Examples:
        >>> filled_row_count(130700), filled_row_count(100000)
        (131072, 100096)
    """
    position = bisect.bisect_left(GPU_SIZES, n_rows)
    if position < len(GPU_SIZES):
        size = GPU_SIZES[position]
        if size - n_rows < _MOST_FILLER_ROWS:
            return size
    return math.ceil(n_rows / LEAST_GPU_ROWS) * LEAST_GPU_ROWS


def padded_row_count(layers: Iterable[LinearLayers], n_rows: int) -> int:
    """Return the number of rows to which few rows on a GPU are padded before they pass all layers.

    Of the possible numbers, the one with the least estimated time is returned. A layer whose bits
    differ for this number pads the rows further, which takes time too.

    Args:
        layers: the linear layers that multiply the rows.
        n_rows: the number of rows, at most :data:`LEAST_GPU_ROWS`.

    Returns:
        16, 32, 64, 128 or :data:`LEAST_GPU_ROWS`, and not less than `n_rows`.

    Raises:
        RuntimeError: if no number of rows gives equal bits for one of the layers.
    """
    numbers_of_layers = []
    for layer in layers:
        kind = product_kind_of(layer.weight, layer.has_bias)
        dtype = autocast_dtype(layer.weight) or layer.weight.dtype
        numbers_of_layers.append((kind._replace(dtype=dtype), layer.n_layers))
    return _fastest_row_count(tuple(numbers_of_layers), n_rows)


@functools.lru_cache(maxsize=4096)
def _fastest_row_count(numbers_of_layers: tuple[tuple[ProductKind, int], ...], n_rows: int) -> int:
    """Return the padded number of rows with which all layers take the least estimated time.

    Args:
        numbers_of_layers: shape, dtype and device of each kind of weight, and how many layers have
            such a weight.
        n_rows: the number of rows before padding.
    """

    def time_of(size: int) -> int:
        """Return the time of all layers after padding to a size, in multiply-adds."""
        return sum(
            n_layers * probe_of(kind).time_of_few_rows(size) for kind, n_layers in numbers_of_layers
        )

    candidates = [size for size in (*FEW_GPU_ROWS, LEAST_GPU_ROWS) if size >= n_rows]
    return min(candidates, key=time_of)
