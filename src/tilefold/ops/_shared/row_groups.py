"""Linear layers and norms in which the bits of a row do not depend on the other rows.

A library chooses the kernel of a matrix product by the number of rows, and kernels add in different
orders. Here, rows are multiplied in groups of a few sizes, and a group that is too small is padded.
Before a size is used with weights of a shape for the first time, it multiplies the same random rows
as a large size, at other positions. A size that gives other bits is never used. In fp32, the
libraries of GPUs often give few rows other bits. A kernel that adds in the order of large products
then multiplies them (:mod:`tilefold.ops._shared.ordered_product`), if it gives their bits.

Sums along the columns of a row, as in RMSNorm, depend on the number of rows only if there are few
of them. So few rows are padded to a least number, which is compared in the same way.

This module alone decides how rows are grouped, for linear layers on CPUs and GPUs, and for the
tiles of :func:`tilefold.ops.lsr_head`.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tilefold.ops._shared.autocast import autocast_dtype
from tilefold.ops._shared.fallback import KernelUnavailableError, warn_and_record_failure
from tilefold.ops._shared.internals import (
    can_use_onednn_linear,
    cpu_matmul_precision,
    has_onednn_linear,
    matmul_precision,
    onednn_linear,
)
from tilefold.ops._shared.ordered_product import can_order_products, ordered_product

__all__ = [
    "LEAST_GPU_ROWS",
    "LinearLayers",
    "RowGroup",
    "apply_rowwise",
    "filled_row_count",
    "group_rows",
    "grouped_linear",
    "grouped_product",
    "grouping_rows",
    "is_row_grouping_enabled",
    "normalize_rows",
    "padded_row_count",
    "usable_sizes",
]


def _candidate_sizes(smallest: int, largest: int, steps: int) -> tuple[int, ...]:
    """Return sizes that grow in equal steps at first, and then by a share of their double.

    Sizes up to ``2 * steps * smallest`` are the multiples of `smallest`. Above, there are `steps`
    sizes in each doubling, so that a size exceeds the one before it by at most ``1 / steps``.

    Args:
        smallest: the smallest size.
        largest: the largest size, which is `smallest` times a power of two.
        steps: number of sizes from a size, inclusive, to its double, exclusive.
    """
    sizes = list(range(smallest, 2 * steps * smallest, smallest))
    start = 2 * steps * smallest
    while start < largest:
        sizes += range(start, 2 * start, start // steps)
        start *= 2
    return (*sizes, largest)


# Candidates for the number of rows of a product, by the type of the device. On CPUs, the time of a
# product of few rows follows their number.
_CPU_SIZES = _candidate_sizes(smallest=2, largest=4096, steps=8)
# A GPU multiplies this number of rows by a small weight in 16 bits about as fast as one row.
LEAST_GPU_ROWS = 256
# In fp32 and with large weights, fewer rows take less time, but their kernels may give other bits.
_FEW_GPU_ROWS = (16, 32, 64, 128)
_GPU_SIZES = _FEW_GPU_ROWS + _candidate_sizes(smallest=LEAST_GPU_ROWS, largest=131072, steps=4)
# The largest number of rows with which other sizes are compared. Larger sizes take much memory, and
# are tested only if a batch has so many rows.
_MOST_REFERENCE_ROWS = 32768
# A batch on a GPU is padded to the next size if that takes fewer rows than this.
_MOST_FILLER_ROWS = 2 * LEAST_GPU_ROWS
# A group may be padded by this share of its rows, and always by less than the smallest size. More
# rows are multiplied in two groups.
_MAX_PADDING_SHARE = 1 / 8
# GPUs multiply this number of rows more in less time than a second group.
_GPU_FREE_PADDING = LEAST_GPU_ROWS - 1
# Candidates for the least number of rows of a function of rows, by the type of the device. On GPUs,
# the reductions of torch divide a row among other threads if there are fewer than 8 or 16 rows.
_CPU_LEAST_ROWS = (1, 2, 4, 8, 16, 32)
_GPU_LEAST_ROWS = (16, 32, 64, 128, 256)
# The largest number of rows with which such candidates are compared.
_MOST_COMPARED_ROWS = 1024
# Number of different random rows with which sizes are compared.
_PROBE_ROWS = 64
# The sizes multiply these rows at positions that differ by this number.
_PROBE_SHIFT = 3
# Standard deviations of rows and weights whose products cancel, and of their bias. The remaining
# rounding errors are then about as large as the bias, and within the range of fp16.
_CANCELLING_SCALE = 8.0
_CANCELLING_BIAS_SCALE = 2.0**-14
# Multiply-adds that take as long on a GPU as the two kernels with which a layer pads its rows: in
# fp32, and in 16 bits, where few rows of small weights take hardly less time than more.
_FP32_PADDING_TIME = 1 << 27
_HALF_PADDING_TIME = 1 << 31
_HALF_BYTES = 2
# To copy more rows, for padding, takes a GPU longer than one more group.
_GPU_LARGEST_PADDED = 8192
# Up to this number of rows, a product that adds in the order of K takes no more time than that of a
# library, which would need more rows for the same bits.
_MOST_ORDERED_ROWS = 128
# Its name in a warning, and what runs in its place.
_ORDERED = "the product of few rows of invariant=True"
_PADDED_INSTEAD = "Few rows are padded instead: the same bits, several times slower."
# Alignment of the rows of a product in bytes: libraries also choose kernels by it.
_ALIGNMENT = 64

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


class _FunctionKind(NamedTuple):
    """Everything that decides which kernels a function of rows runs, besides the number of rows.

    Attributes:
        name: the name of the function.
        n_columns: the number of columns of the rows.
        dtype: the dtype of the rows.
        device: the device.
    """

    name: str
    n_columns: int
    dtype: torch.dtype
    device: torch.device


class _ProductKind(NamedTuple):
    """Everything that decides which kernel a library runs, besides the number of rows.

    Attributes:
        n_outputs: rows N of the weight ``[N, K]``.
        n_inputs: columns K of the weight.
        has_bias: whether a bias is added.
        dtype: the dtype of the operands.
        device: the device.
        n_threads: the number of threads of a CPU; 0 for other devices.
        precision: torch's setting for products of fp32, such as TF32.
    """

    n_outputs: int
    n_inputs: int
    has_bias: bool
    dtype: torch.dtype
    device: torch.device
    n_threads: int
    precision: str


@contextmanager
def grouping_rows(enabled: bool = True) -> Iterator[None]:
    """Let operators of this thread multiply rows in groups while the context is open.

    Args:
        enabled: False changes nothing.
    """
    token = _row_grouping.set(enabled or _row_grouping.get())
    try:
        yield
    finally:
        _row_grouping.reset(token)


def is_row_grouping_enabled() -> bool:
    """Return whether operators of this thread multiply rows in groups."""
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
        RuntimeError: if the device multiplies equal rows differently in one product.

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
    n_outputs, n_inputs = weight.shape
    outputs = grouped_product(rows.reshape(-1, n_inputs), weight, bias)
    return outputs.view(*rows.shape[:-1], n_outputs)


def grouped_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``rows @ weight.T + bias``, with the same bits in a row for any number of rows.

    A library chooses its kernel, and so the order of additions, by the number of rows. Rows are
    therefore multiplied in groups of sizes that were tested to give equal bits, and a group with
    fewer rows is padded with zeros. The product has no gradient.

    Args:
        rows: ``[T, K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[T, N]``.
    """
    if torch.is_grad_enabled():  # writing into `out` is an error while autograd records
        with torch.no_grad():
            return grouped_product(rows, weight, bias)
    weight = weight.contiguous()
    n_rows = rows.size(0)
    groups = _groups_with_equal_bits(n_rows, _product_kind(weight, bias is not None))
    if len(groups) == 1:  # the product is the result, without a copy
        size = groups[0].size
        if groups[0].is_ordered:
            # Our kernel adds in the order of K, as the library does for many rows.
            return ordered_product(_padded(rows, size), weight, bias)
        product = _multiply(_padded(rows, size), weight, bias)
        return product if size == n_rows else product[:n_rows]
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
    is_on_cpu = rows.device.type == "cpu"
    if is_on_cpu and can_use_onednn_linear(rows, weight, bias) and has_onednn_linear():
        product = onednn_linear(rows, weight, bias)
        return product if out is None else out.copy_(product)
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


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
    kind = _FunctionKind(name, rows.size(-1), rows.dtype, rows.device)
    n_least = _least_numbers.get(kind)
    if n_least is None:
        n_least = _least_number_of_rows(function, kind)
        _least_numbers[kind] = n_least
    if n_rows < n_least:
        packed_rows = _padded(packed_rows, n_least)
    return function(packed_rows)[:n_rows].reshape(rows.shape)


# The least numbers of rows of functions.
_least_numbers: dict[_FunctionKind, int] = {}


@torch.no_grad()
def _least_number_of_rows(function: Callable[[Tensor], Tensor], kind: _FunctionKind) -> int:
    """Return the least number of rows for which, and for all larger numbers, a row has equal bits.

    Candidates are tested with random rows, repeated in matrices of this number of rows and of
    larger numbers.

    Args:
        function: computes a row of its result from each row of a matrix.
        kind: name of the function, and the columns, dtype and device of the rows.

    Raises:
        RuntimeError: if there is no such number.
    """
    _refuse_capture(kind.device, f"{kind.name} of rows with {kind.n_columns} columns")
    generator = torch.Generator(kind.device).manual_seed(0)
    shape = (_PROBE_ROWS, kind.n_columns)
    rows = torch.randn(shape, generator=generator, device=kind.device).to(kind.dtype)

    def has_equal_bits(n_rows: int, first_row: int) -> bool:
        """Whether the results have the expected bits for a matrix of the repeated random rows."""
        indices = _probe_row_indices(n_rows, first_row, kind.device)
        return torch.equal(function(rows[indices]), expected[indices])

    all_indices = _probe_row_indices(_MOST_COMPARED_ROWS, 0, kind.device)
    expected = function(rows[all_indices])[:_PROBE_ROWS]
    candidates = _CPU_LEAST_ROWS if kind.device.type == "cpu" else _GPU_LEAST_ROWS
    for n_least in candidates:
        # Number of rows of a matrix, and the index of the random row with which it begins.
        comparisons = [(n_least, first_row) for first_row in range(0, _PROBE_ROWS, n_least)]
        comparisons += [(n_least + n_more, _PROBE_SHIFT) for n_more in (1, 2, 3, 5, 7)]
        comparisons += [(n_least * factor, _PROBE_SHIFT) for factor in (2, 3, 5, 8)]
        comparisons.append((_MOST_COMPARED_ROWS, _PROBE_SHIFT))
        if all(has_equal_bits(n_rows, first_row) for n_rows, first_row in comparisons):
            return n_least
    raise RuntimeError(
        "invariant=True needs a device whose sums of a row do not depend on the number of rows, "
        f"got {kind.device} and {kind.name} of {kind.n_columns} columns in {kind.dtype}, for which "
        f"rows differ up to {candidates[-1]} rows; use another dtype or accelerate(model).",
    )


def _refuse_capture(device: torch.device, operation: str) -> None:
    """Raise ``RuntimeError`` if a CUDA graph is captured, which cannot read results.

    Args:
        device: the device of the operation.
        operation: description of the first operation of its kind, for the error.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "numbers of rows must be compared before a CUDA graph is captured, got the first "
            f"{operation} in a capture; encode a text before.",
        )


def usable_sizes(weight: Tensor, has_bias: bool) -> tuple[int, ...]:
    """Return the numbers of rows whose products with a weight have the same bits in every row.

    Args:
        weight: ``[N, K]``, of which only the shape, the dtype and the device matter.
        has_bias: whether a bias is added.

    Raises:
        RuntimeError: if there is no such number.
    """
    probe = _probe_of(_product_kind(weight, has_bias))
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
    position = bisect.bisect_left(_GPU_SIZES, n_rows)
    if position < len(_GPU_SIZES):
        size = _GPU_SIZES[position]
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
        kind = _product_kind(layer.weight, layer.has_bias)
        dtype = autocast_dtype(layer.weight) or layer.weight.dtype
        numbers_of_layers.append((kind._replace(dtype=dtype), layer.n_layers))
    return _fastest_row_count(tuple(numbers_of_layers), n_rows)


@functools.lru_cache(maxsize=4096)
def _fastest_row_count(numbers_of_layers: tuple[tuple[_ProductKind, int], ...], n_rows: int) -> int:
    """Return the padded number of rows with which all layers take the least estimated time.

    Args:
        numbers_of_layers: shape, dtype and device of each kind of weight, and how many layers have
            such a weight.
        n_rows: the number of rows before padding.
    """

    def time_of(size: int) -> int:
        """Return the time of all layers after padding to a size, in multiply-adds."""
        return sum(
            n_layers * _probe_of(kind).time_of_few_rows(size)
            for kind, n_layers in numbers_of_layers
        )

    candidates = [size for size in (*_FEW_GPU_ROWS, LEAST_GPU_ROWS) if size >= n_rows]
    return min(candidates, key=time_of)


def _product_kind(weight: Tensor, has_bias: bool) -> _ProductKind:
    """Return what decides, besides the number of rows, which kernel multiplies by a weight.

    Args:
        weight: ``[N, K]``.
        has_bias: whether a bias is added.
    """
    on_cpu = weight.device.type == "cpu"
    return _ProductKind(
        n_outputs=weight.size(0),
        n_inputs=weight.size(1),
        has_bias=has_bias,
        dtype=weight.dtype,
        device=weight.device,
        n_threads=torch.get_num_threads() if on_cpu else 0,
        precision=cpu_matmul_precision() if on_cpu else matmul_precision(),
    )


@functools.lru_cache(maxsize=4096)
def _groups_with_equal_bits(n_rows: int, kind: _ProductKind) -> list[RowGroup]:
    """Divide rows into groups of sizes whose products have the same bits in equal rows.

    Few rows are one group without padding, if our kernel, which adds in the order of K, gives the
    bits of the library. Otherwise, a size is tested when it is needed for the first time. If it
    fails, rows are divided again.

    Args:
        n_rows: the number of rows.
        kind: shape, dtype and device of the weight.
    """
    probe = _probe_of(kind)
    if 0 < n_rows <= _MOST_ORDERED_ROWS and probe.is_order_usable:
        return [RowGroup(0, n_rows, n_rows, is_ordered=True)]
    is_on_cpu = kind.device.type == "cpu"
    free_padding = 0 if is_on_cpu else _GPU_FREE_PADDING
    largest_padded = None if is_on_cpu else _GPU_LARGEST_PADDED
    while True:
        groups = group_rows(n_rows, probe.sizes, free_padding, largest_padded)
        # `is_usable` removes a size that fails from `probe.sizes`, so that this loop ends.
        if all(probe.is_usable(group.size) for group in groups):
            return groups


@functools.cache
def _probe_of(kind: _ProductKind) -> _Probe:
    """Return the probe of a kind of products, the same for each call."""
    return _Probe(kind)


class _Probe:
    """Test of which numbers of rows ("sizes") give the same bits, by products of random rows.

    A product of some size multiplies the same few random rows, repeated until the size is reached.
    On a CPU in 16 bits, the terms of a product cancel each other, so that its bits show the order
    of additions. The reference is the largest size of at most 32,768 rows in whose product equal
    rows have equal results at all positions. Another size is usable if its results equal those of
    the reference.

    Attributes:
        sizes: the sizes that have not failed, ascending.

    Args:
        kind: the shape, the dtype and the device of the weight.

    Raises:
        RuntimeError: if the products of every size depend on the position of a row.
    """

    def __init__(self, kind: _ProductKind) -> None:
        """Choose the reference: the largest size whose product is alike at all positions."""
        self._kind = kind
        self.sizes = _CPU_SIZES if kind.device.type == "cpu" else _GPU_SIZES
        self._usable_sizes: set[int] = set()
        self._expected: Tensor | None = None  # [_PROBE_ROWS, N]
        while self._expected is None:
            reference = max((x for x in self.sizes if x <= _MOST_REFERENCE_ROWS), default=0)
            if reference < 2 * _PROBE_ROWS:  # a row must occur at two positions
                raise RuntimeError(
                    "invariant=True needs a device whose products do not depend on the position of "
                    f"a row, got {kind.device} and a weight of shape [{kind.n_outputs}, "
                    f"{kind.n_inputs}] in {kind.dtype}, for which no number of rows gives equal "
                    "bits; use another dtype or accelerate(model).",
                )
            products = self._products(reference, shift=0)
            first_products = products[0][:_PROBE_ROWS].clone()
            indices = _probe_row_indices(reference, 0, kind.device)
            expected = first_products[indices]
            if all(torch.equal(product, expected) for product in products):
                self._expected = first_products
                self._usable_sizes.add(reference)
            else:
                self._drop(reference)

    def is_usable(self, size: int) -> bool:
        """Return whether a size gives the same bits as the reference, at all positions.

        A size that fails is removed from :attr:`sizes`.

        Args:
            size: a number of rows.
        """
        if size in self._usable_sizes:
            return True
        if self._expected is None or size not in self.sizes:
            return False
        if self._equals_reference(size, self._expected):
            self._usable_sizes.add(size)
            return True
        self._drop(size)
        return False

    def _equals_reference(self, size: int, expected: Tensor) -> bool:
        """Return whether the product of a size has the bits of the reference at all positions.

        The test of a large size takes several times the memory of its product. Without this memory,
        the size counts as different, and rows are divided into more groups.

        Args:
            size: a number of rows.
            expected: the product of the random rows in the reference, ``[_PROBE_ROWS, N]``.
        """
        indices = _probe_row_indices(size, _PROBE_SHIFT, self._kind.device)
        try:
            repeated = expected[indices]
            return all(
                torch.equal(product, repeated) for product in self._products(size, _PROBE_SHIFT)
            )
        except torch.OutOfMemoryError:
            return False

    def _drop(self, size: int) -> None:
        """Remove a size from :attr:`sizes`."""
        self.sizes = tuple(other for other in self.sizes if other != size)

    def time_of_few_rows(self, size: int) -> int:
        """Return an estimate of the time of a product of few rows on a GPU, in multiply-adds.

        Args:
            size: the number of rows, which are padded if it is not usable.
        """
        row_time = self._kind.n_outputs * self._kind.n_inputs
        if size <= _MOST_ORDERED_ROWS and self.is_order_usable:
            return size * row_time
        larger_sizes = (other for other in self.sizes if other >= size)
        # If no larger size is usable, smaller ones multiply the rows in several groups.
        usable_size = next(filter(self.is_usable, larger_sizes), size)
        multiply_adds = usable_size * row_time
        if usable_size == size:
            return multiply_adds
        is_fp32 = self._kind.dtype.itemsize >= torch.float32.itemsize
        return multiply_adds + (_FP32_PADDING_TIME if is_fp32 else _HALF_PADDING_TIME)

    @functools.cached_property
    def is_order_usable(self) -> bool:
        """Whether a kernel that adds in the order of K gives the bits of the reference."""
        kind = self._kind
        if self._expected is None or not can_order_products(kind.dtype, kind.device, kind.n_inputs):
            return False
        rows, weight, bias = self._operands(_PROBE_ROWS, shift=0)
        try:
            product = ordered_product(rows, weight, bias)
        except KernelUnavailableError as error:
            warn_and_record_failure(_ORDERED, kind.device, str(error), _PADDED_INSTEAD)
            return False
        return torch.equal(product, self._expected)

    def _products(self, size: int, shift: int) -> list[Tensor]:
        """Return the product of repeated random rows, ``[size, N]``, for each way to compute it.

        On a GPU, a product is also written to memory that exists, as for one of several groups.

        Args:
            size: the number of rows.
            shift: index of the random row that comes first.

        Raises:
            RuntimeError: if a CUDA graph is being captured.
        """
        rows, weight, bias = self._operands(size, shift)
        products = [_multiply(rows, weight, bias)]
        if self._kind.device.type != "cpu":
            out = torch.empty_like(products[0])
            products.append(_multiply(rows, weight, bias, out=out))
        return products

    def _operands(self, size: int, shift: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return repeated random rows, and a random weight and bias.

        The random numbers are drawn again each time, because storing a weight of every shape would
        take as much memory as the model.

        Args:
            size: the number of rows.
            shift: index of the random row that comes first.

        Returns:
            The rows ``[size, K]``, the weight ``[N, K]`` and the bias ``[N]`` or None.

        Raises:
            RuntimeError: if a CUDA graph is being captured.
        """
        kind = self._kind
        _refuse_capture(
            kind.device,
            f"product of {size} rows with a weight of shape [{kind.n_outputs}, {kind.n_inputs}]",
        )
        generator = torch.Generator(kind.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, device=kind.device)
            return values.to(kind.dtype)

        weight = random(kind.n_outputs, kind.n_inputs)
        bias = random(kind.n_outputs) if kind.has_bias else None
        rows = random(_PROBE_ROWS, kind.n_inputs)
        if kind.device.type == "cpu" and kind.dtype.itemsize == _HALF_BYTES:
            _cancel_products(rows, weight, bias, generator)
        return rows[_probe_row_indices(size, shift, kind.device)], weight, bias


def _cancel_products(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    generator: torch.Generator,
) -> None:
    """Change random operands in place, so that the exact products are 0 or the bias.

    The computed products are then the rounding errors of their sums in fp32, which depend on the
    order of addition. In other products, rounding to 16 bits hides nearly all of these errors.

    Args:
        rows: ``[R, K]`` in 16 bits.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        generator: draws the pairs of columns that cancel each other.
    """
    n_inputs = rows.size(1)
    columns = torch.randperm(n_inputs, generator=generator, device=rows.device)
    n_pairs = n_inputs // 2
    first, second = columns[:n_pairs], columns[n_pairs : 2 * n_pairs]
    rows *= _CANCELLING_SCALE
    weight *= _CANCELLING_SCALE
    rows[:, second] = rows[:, first]
    weight[:, second] = -weight[:, first]
    weight[:, columns[2 * n_pairs :]] = 0  # the last column of an odd number
    if bias is not None:
        bias *= _CANCELLING_BIAS_SCALE


def _probe_row_indices(size: int, shift: int, device: torch.device) -> Tensor:
    """Return the index of the random row at each position of a product, int64 ``[size]``.

    Args:
        size: the number of rows of the product.
        shift: the random row at the first position.
        device: the device.
    """
    return torch.arange(shift, shift + size, device=device) % _PROBE_ROWS
