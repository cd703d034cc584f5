"""Numbers of rows whose products have the same bits in equal rows, found by random rows.

Before a number of rows ("size") is used with weights of a shape for the first time, it multiplies
the same random rows as a large size, at other positions. A size that gives other bits is never used
(:mod:`tilefold.ops._shared.row_groups`).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.fallback import KernelUnavailableError, warn_and_record_failure
from tilefold.ops._shared.internals import (
    cpu_matmul_precision,
    half_matmul_settings,
    matmul_precision,
)
from tilefold.ops._shared.ordered_product import can_order_products, ordered_product
from tilefold.ops._shared.row_products import multiply_rows, refuse_probe_in_capture

__all__ = [
    "FEW_GPU_ROWS",
    "GPU_SIZES",
    "LEAST_GPU_ROWS",
    "MOST_ORDERED_ROWS",
    "N_RANDOM_ROWS",
    "ROW_SHIFT",
    "ProductKind",
    "SizeProbe",
    "probe_of",
    "product_kind_of",
    "random_row_indices",
]


def _candidate_sizes(smallest: int, largest: int, steps: int) -> tuple[int, ...]:
    """Return sizes that grow in equal steps at first, and then by `steps` sizes per doubling.

    Sizes up to ``2 * steps * smallest`` are the multiples of `smallest`. Above, a size exceeds the
    one before it by at most ``1 / steps``.

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
# In 16 bits, a GPU multiplies this number of rows by a small weight about as fast as one row. More
# rows are padded to multiples of it.
LEAST_GPU_ROWS = 256
# In fp32 and with large weights, fewer rows take less time, but their kernels may give other bits.
FEW_GPU_ROWS = (16, 32, 64, 128)
GPU_SIZES = FEW_GPU_ROWS + _candidate_sizes(smallest=LEAST_GPU_ROWS, largest=131072, steps=4)
# The largest number of rows with which other sizes are compared. Larger sizes take much memory, and
# are tested only if a batch has so many rows.
_MOST_REFERENCE_ROWS = 32768
# Number of different random rows with which sizes are compared.
N_RANDOM_ROWS = 64
# The sizes multiply these rows at positions that differ by this number.
ROW_SHIFT = 3
# Standard deviations of rows and weights whose products cancel, and of their bias. The remaining
# rounding errors are then about as large as the bias, and within the range of fp16.
_CANCELLING_SCALE = 8.0
_CANCELLING_BIAS_SCALE = 2.0**-14
# Multiply-adds that take as long on a GPU as the two kernels with which a layer pads its rows: in
# fp32, and in 16 bits, where few rows of small weights take hardly less time than more.
_FP32_PADDING_TIME = 1 << 27
_HALF_PADDING_TIME = 1 << 31
_HALF_BYTES = 2
# Up to this number of rows are multiplied by our kernel that adds in the order of K. It usually
# takes less time than the smallest product of the library with the same bits.
MOST_ORDERED_ROWS = 128
# The name of this kernel in the warning that it cannot be built, and what runs in its place.
_ORDERED_PRODUCT_NAME = "the product of few rows of invariant=True"
_PADDED_INSTEAD = "Few rows are padded instead: the same bits, several times slower."


class _Operands(NamedTuple):
    """Random operands of a product.

    Attributes:
        rows: ``[N_RANDOM_ROWS, K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None


class ProductKind(NamedTuple):
    """Everything that decides which kernel a library runs, besides the number of rows.

    Attributes:
        n_outputs: rows N of the weight ``[N, K]``.
        n_inputs: columns K of the weight.
        has_bias: whether a bias is added.
        dtype: the dtype of the operands.
        device: the device.
        n_threads: the number of threads of a CPU; 0 for other devices.
        precision: torch's setting for products of fp32, such as TF32.
        half_settings: torch's settings for products in 16 bits on a GPU; empty for CPUs.
    """

    n_outputs: int
    n_inputs: int
    has_bias: bool
    dtype: torch.dtype
    device: torch.device
    n_threads: int
    precision: str
    half_settings: tuple[Hashable, ...]


def product_kind_of(weight: Tensor, has_bias: bool) -> ProductKind:
    """Return what decides, besides the number of rows, which kernel multiplies by a weight.

    Args:
        weight: ``[N, K]``.
        has_bias: whether a bias is added.
    """
    on_cpu = weight.device.type == "cpu"
    return ProductKind(
        n_outputs=weight.size(0),
        n_inputs=weight.size(1),
        has_bias=has_bias,
        dtype=weight.dtype,
        device=weight.device,
        n_threads=torch.get_num_threads() if on_cpu else 0,
        precision=cpu_matmul_precision() if on_cpu else matmul_precision(),
        half_settings=() if on_cpu else half_matmul_settings(),
    )


@functools.cache
def probe_of(kind: ProductKind) -> SizeProbe:
    """Return the probe of a kind of products, the same for each call."""
    return SizeProbe(kind)


class SizeProbe:
    """Test of which numbers of rows ("sizes") give the same bits, by products of random rows.

    A product of some size multiplies the same few random rows, repeated until the size is reached.
    A size that is smaller than their number multiplies all of them in several products. In 16 bits,
    the terms of a product cancel each other, so that its bits show the order of additions. The
    reference is the largest size of at most 32,768 rows in whose product equal rows have equal
    results at all positions. Another size is usable if its results equal those of the reference.

    Attributes:
        sizes: the sizes that have not failed, ascending.

    Args:
        kind: the shape, the dtype and the device of the weight.

    Raises:
        RuntimeError: if the products of every size depend on the position of a row.
    """

    def __init__(self, kind: ProductKind) -> None:
        """Choose the reference: the largest size whose product is alike at all positions."""
        self._kind = kind
        self.sizes = _CPU_SIZES if kind.device.type == "cpu" else GPU_SIZES
        self._usable_sizes: set[int] = set()
        self._expected: Tensor | None = None  # [N_RANDOM_ROWS, N]
        while self._expected is None:
            reference = max((x for x in self.sizes if x <= _MOST_REFERENCE_ROWS), default=0)
            if reference < 2 * N_RANDOM_ROWS:  # a row must occur at two positions
                raise RuntimeError(
                    "invariant=True needs a device whose products do not depend on the position of "
                    f"a row, got {kind.device} and a weight of shape [{kind.n_outputs}, "
                    f"{kind.n_inputs}] in {kind.dtype}, for which no number of rows gives equal "
                    "bits; use another dtype or accelerate(model).",
                )
            products = self._products(self._operands(), reference, shift=0)
            first_products = products[0][:N_RANDOM_ROWS].clone()
            indices = random_row_indices(reference, 0, kind.device)
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
            expected: the product of the random rows in the reference, ``[N_RANDOM_ROWS, N]``.
        """
        device = self._kind.device
        try:
            operands = self._operands()
            return all(
                torch.equal(product, expected[random_row_indices(size, shift, device)])
                for shift in range(ROW_SHIFT, ROW_SHIFT + N_RANDOM_ROWS, size)
                for product in self._products(operands, size, shift)
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
        if size <= MOST_ORDERED_ROWS and self.is_order_usable:
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
        operands = self._operands()
        try:
            product = ordered_product(operands.rows, operands.weight, operands.bias)
        except KernelUnavailableError as error:
            warn_and_record_failure(_ORDERED_PRODUCT_NAME, kind.device, str(error), _PADDED_INSTEAD)
            return False
        return torch.equal(product, self._expected)

    def _products(self, operands: _Operands, size: int, shift: int) -> list[Tensor]:
        """Return the product of repeated random rows, ``[size, N]``, for each way to compute it.

        On a GPU, a product is also written to memory that exists, as for one of several groups.

        Args:
            operands: the random rows, the weight and the bias.
            size: the number of rows.
            shift: index of the random row that comes first.
        """
        rows = operands.rows[random_row_indices(size, shift, self._kind.device)]
        products = [multiply_rows(rows, operands.weight, operands.bias)]
        if self._kind.device.type != "cpu":
            out = torch.empty_like(products[0])
            products.append(multiply_rows(rows, operands.weight, operands.bias, out=out))
        return products

    def _operands(self) -> _Operands:
        """Return random rows, a random weight and a random bias, the same for each call.

        The random numbers are drawn again each time, because storing a weight of every shape would
        take as much memory as the model.

        Raises:
            RuntimeError: if a CUDA graph is being captured.
        """
        kind = self._kind
        refuse_probe_in_capture(
            kind.device,
            f"product with a weight of shape [{kind.n_outputs}, {kind.n_inputs}]",
        )
        generator = torch.Generator(kind.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, device=kind.device)
            return values.to(kind.dtype)

        weight = random(kind.n_outputs, kind.n_inputs)
        bias = random(kind.n_outputs) if kind.has_bias else None
        rows = random(N_RANDOM_ROWS, kind.n_inputs)
        if kind.dtype.itemsize == _HALF_BYTES:
            _cancel_products(rows, weight, bias, generator)
        return _Operands(rows, weight, bias)


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


def random_row_indices(size: int, shift: int, device: torch.device) -> Tensor:
    """Return the index of the random row at each position of a product, int64 ``[size]``.

    Args:
        size: the number of rows of the product.
        shift: the random row at the first position.
        device: the device.
    """
    return torch.arange(shift, shift + size, device=device) % N_RANDOM_ROWS
