"""Products in groups of rows: the groups, the bits of a row, and sizes that are not used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from tests.refusals import refused
from tilefold.ops._shared import fallback, row_groups, row_probes, row_products, rowwise
from tilefold.ops._shared._triton import releases
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.ordered_product import can_order_products, ordered_product
from tilefold.ops._shared.row_groups import (
    LinearLayers,
    RowGroup,
    filled_row_count,
    group_rows,
    grouped_linear,
    grouping_rows,
    is_row_grouping_enabled,
    padded_row_count,
    usable_sizes,
)
from tilefold.ops._shared.rowwise import apply_rowwise, normalize_rows

SIZES = (4, 8, 16, 32)


@pytest.mark.parametrize(
    ("n_rows", "groups"),
    [
        pytest.param(0, [], id="no rows"),
        pytest.param(1, [(0, 1, 4)], id="fewer than the smallest size"),
        pytest.param(8, [(0, 8, 8)], id="a size"),
        pytest.param(15, [(0, 15, 16)], id="little padding"),
        pytest.param(5, [(0, 5, 8)], id="less padding than the smallest size"),
        pytest.param(9, [(0, 8, 8), (8, 9, 4)], id="two groups waste less"),
        pytest.param(79, [(0, 32, 32), (32, 64, 32), (64, 79, 16)], id="more than the largest"),
    ],
)
def test_rows_are_divided_into_groups(n_rows: int, groups: list[tuple[int, int, int]]) -> None:
    assert group_rows(n_rows, SIZES) == [RowGroup(*group) for group in groups]


@pytest.mark.parametrize("n_rows", range(1, 200, 7))
def test_groups_cover_all_rows_in_order(n_rows: int) -> None:
    groups = group_rows(n_rows, SIZES)
    covered = [row for group in groups for row in range(group.start, group.stop)]
    assert covered == list(range(n_rows))
    assert all(group.size in SIZES and group.stop - group.start <= group.size for group in groups)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("n_inputs", [72, 128])
def test_a_row_has_the_same_bits_with_any_other_rows(
    n_inputs: int,
    device: str,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, n_inputs, generator=generator).to(device, dtype)
    weight = torch.randn(40, n_inputs, generator=generator).to(device, dtype)
    bias = torch.randn(40, generator=generator).to(device, dtype) if has_bias else None
    together = grouped_linear(rows, weight, bias)
    for start in range(0, 290, 37):
        for n_rows in (1, 2, 5, 9):
            part = slice(start, start + n_rows)
            assert torch.equal(grouped_linear(rows[part], weight, bias), together[part])
    exact = linear(rows.double(), weight.double(), None if bias is None else bias.double())
    allowed = 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert (together.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("n_outputs", [1, 128])
def test_a_row_of_a_narrow_layer_has_the_same_bits_if_its_terms_cancel(
    n_outputs: int,
    device: str,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    """The outputs are rounding errors of sums, which another order of addition would change."""
    generator = torch.Generator().manual_seed(0)
    half_rows = 8 * torch.randn(1100, 192, generator=generator)
    half_weight = 8 * torch.randn(n_outputs, 192, generator=generator)
    rows = torch.cat([half_rows, half_rows], dim=1).to(device, dtype)
    weight = torch.cat([half_weight, -half_weight], dim=1).to(device, dtype)
    bias = torch.full((n_outputs,), 2.0**-12).to(device, dtype) if has_bias else None
    together = grouped_linear(rows, weight, bias)
    assert not torch.equal(together, together[:1].expand_as(together))
    for n_rows in (1, 2, 3, 7, 17, 64, 100, 300, 1000):
        part = slice(41, 41 + n_rows)
        assert torch.equal(grouped_linear(rows[part], weight, bias), together[part])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_outputs", [1, 40])
@pytest.mark.parametrize("offset", [1, 2, 12])
def test_the_address_of_a_weight_does_not_change_the_bits(
    offset: int,
    n_outputs: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """A weight that is mapped from a file begins at any multiple of 8 bytes."""
    rows = torch.randn(129, 384).to(device, dtype)
    weight = torch.randn(n_outputs, 384).to(device, dtype)
    memory = torch.empty(offset + weight.numel(), device=device, dtype=dtype)
    moved_weight = memory[offset:].view_as(weight).copy_(weight)
    for n_rows in (1, 2, 3, 7, 8, 31, 129):
        outputs = grouped_linear(rows[:n_rows], moved_weight)
        assert torch.equal(outputs, grouped_linear(rows[:n_rows], weight))


def test_a_setting_for_16_bits_has_sizes_of_its_own() -> None:
    weight = torch.empty(8, 16, dtype=torch.float16, device="meta")
    kind = row_probes.product_kind_of(weight, has_bias=False)
    assert row_probes.product_kind_of(weight, has_bias=False) == kind
    was_allowed = torch.backends.cuda.matmul.allow_fp16_accumulation
    try:
        torch.backends.cuda.matmul.allow_fp16_accumulation = not was_allowed
        other_kind = row_probes.product_kind_of(weight, has_bias=False)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = was_allowed
    assert other_kind != kind


def test_rows_may_have_any_shape_and_strides() -> None:
    rows, weight = torch.randn(3, 16, 5).transpose(1, 2), torch.randn(8, 16)
    outputs = grouped_linear(rows, weight)
    assert outputs.shape == (3, 5, 8)
    assert torch.equal(outputs[1, 2], grouped_linear(rows[1, 2], weight))


def test_autocast_decides_the_dtype() -> None:
    rows, weight = torch.randn(3, 16), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = grouped_linear(rows, weight)
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(outputs, grouped_linear(rows.bfloat16(), weight.bfloat16()))


def _without_probes(monkeypatch: pytest.MonkeyPatch, multiply: object) -> None:
    """Replace the product, and forget which sizes were usable before."""
    _forget_sizes()
    for module in (row_groups, row_probes):
        monkeypatch.setattr(module, "multiply_rows", multiply)


@pytest.fixture
def forgotten_sizes() -> Iterator[None]:
    """Sizes that a test finds usable are forgotten after it."""
    yield
    _forget_sizes()


def _forget_sizes() -> None:
    row_probes.probe_of.cache_clear()
    row_groups._groups_with_equal_bits.cache_clear()


def test_padding_that_is_free_avoids_a_second_group() -> None:
    assert group_rows(9, SIZES, free_padding=7) == [RowGroup(0, 9, 16)]
    assert group_rows(17, SIZES, free_padding=7) == [RowGroup(0, 16, 16), RowGroup(16, 17, 4)]


@pytest.mark.parametrize(
    ("n_rows", "sizes", "expected"),
    [
        pytest.param(32, (4, 8, 16, 24, 32), [32], id="a size"),
        pytest.param(31, (4, 8, 16, 24, 32), [24, 8], id="as many rows in two groups"),
        pytest.param(15, (4, 8, 16, 24, 32), [16], id="few rows are padded"),
        pytest.param(31, (16, 24, 32), [32], id="two groups would have more rows"),
    ],
)
def test_large_groups_are_divided_in_place_of_padding(
    n_rows: int,
    sizes: tuple[int, ...],
    expected: list[int],
) -> None:
    groups = group_rows(n_rows, sizes, free_padding=7, largest_padded=16)
    assert [group.size for group in groups] == expected
    assert groups[-1].stop == n_rows


def test_groups_of_a_gpu_with_few_rows_have_small_sizes() -> None:
    sizes = row_probes.GPU_SIZES
    free_padding = row_groups._GPU_FREE_PADDING
    for n_rows, expected in (
        (1, [16]),
        (100, [128]),
        (129, [256]),
        (300, [512]),
        (2100, [2048, 64]),
    ):
        groups = group_rows(n_rows, sizes, free_padding)
        assert [group.size for group in groups] == expected


def test_few_rows_are_padded_to_the_number_that_takes_the_least_time(
    monkeypatch: pytest.MonkeyPatch,
    forgotten_sizes: None,
) -> None:
    multiply = row_products.multiply_rows

    def differs_for_few_rows_of_wide_weights(
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        products = multiply(rows, weight, bias)
        is_other_kernel = rows.size(0) <= 64 and weight.size(0) == 24
        return products * (1 + 2**-20) if is_other_kernel else products

    _without_probes(monkeypatch, differs_for_few_rows_of_wide_weights)
    uncached = row_groups._fastest_row_count.__wrapped__
    monkeypatch.setattr(row_groups, "_fastest_row_count", uncached)
    narrow = LinearLayers(torch.randn(8, 16), has_bias=False, n_layers=1)
    wide = LinearLayers(torch.randn(24, 16), has_bias=True, n_layers=1)
    assert [padded_row_count([narrow], n_rows) for n_rows in (1, 33, 129)] == [16, 64, 256]
    # The wide layer cannot multiply fewer than 128 rows, and padding them takes more time than the
    # narrow one saves.
    assert padded_row_count([narrow, wide], 1) == 128
    monkeypatch.setattr(row_probes, "_FP32_PADDING_TIME", 100)
    assert padded_row_count([narrow, wide], 1) == 16


def test_rows_are_padded_to_a_number_that_layers_multiply_in_several_groups(
    monkeypatch: pytest.MonkeyPatch,
    forgotten_sizes: None,
) -> None:
    multiply = row_products.multiply_rows

    def differs_by_position_in_many_rows(
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        products = multiply(rows, weight, bias)
        if rows.size(0) > 128:
            products[-1] *= 1 + 2**-20
        return products

    _without_probes(monkeypatch, differs_by_position_in_many_rows)
    uncached = row_groups._fastest_row_count.__wrapped__
    monkeypatch.setattr(row_groups, "_fastest_row_count", uncached)
    layers = LinearLayers(torch.randn(8, 16), has_bias=False, n_layers=1)
    assert padded_row_count([layers], 129) == 256


def test_a_bias_may_be_strided_or_expanded() -> None:
    rows, weight, bias = torch.randn(5, 16), torch.randn(8, 16), torch.randn(16)
    assert torch.equal(
        grouped_linear(rows, weight, bias[::2]),
        grouped_linear(rows, weight, bias[::2].clone()),
    )
    assert torch.equal(
        grouped_linear(rows, weight, bias[:1]),
        grouped_linear(rows, weight, bias[:1].expand(8).clone()),
    )


@pytest.mark.parametrize(
    "operands",
    [
        pytest.param((torch.randn(4, 8), torch.randn(6, 16), None), id="another K"),
        pytest.param((torch.randn(4, 8), torch.randn(6, 8).bfloat16(), None), id="another dtype"),
        pytest.param((torch.randn(4, 8), torch.randn(6, 8), torch.randn(5)), id="another bias"),
    ],
)
def test_operands_that_do_not_fit_together_raise_the_error_of_torch(
    operands: tuple[Tensor, Tensor, Tensor | None],
) -> None:
    with pytest.raises(RuntimeError):
        grouped_linear(*operands)


def test_sizes_with_other_bits_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
    forgotten_sizes: None,
) -> None:
    multiply = row_products.multiply_rows

    def differs_below_16(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products = multiply(rows, weight, bias)
        return products * (1 + 2**-20) if rows.size(0) < 16 else products

    _without_probes(monkeypatch, differs_below_16)
    sizes = usable_sizes(torch.randn(8, 16), has_bias=False)
    assert sizes[0] == 16
    assert sizes[-1] == 4096
    rows = torch.randn(9, 16)
    assert grouped_linear(rows, torch.randn(8, 16)).shape == (9, 8)


def test_a_size_is_not_used_if_the_memory_is_too_small_for_its_test(
    monkeypatch: pytest.MonkeyPatch,
    forgotten_sizes: None,
) -> None:
    multiply = row_products.multiply_rows

    def lacks_memory(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if rows.size(0) in (1024, 2048):
            raise torch.OutOfMemoryError
        return multiply(rows, weight, bias)

    _without_probes(monkeypatch, lacks_memory)
    rows, weight = torch.randn(2048, 16), torch.randn(8, 16)
    products = grouped_linear(rows, weight)
    assert torch.equal(grouped_linear(rows[5:9], weight), products[5:9])


@pytest.mark.parametrize(
    ("n_rows", "n_filled"),
    [
        pytest.param(256, 256, id="a size"),
        pytest.param(8195, 8448, id="a multiple of 256"),
        pytest.param(130561, 131072, id="little less than a size"),
        pytest.param(130560, 130560, id="512 rows less than a size"),
        pytest.param(131073, 131328, id="more than the largest size"),
    ],
)
def test_many_rows_are_padded_to_a_size_or_a_multiple_of_256(n_rows: int, n_filled: int) -> None:
    assert filled_row_count(n_rows) == n_filled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("n_inputs", [128, 257])
def test_sizes_that_add_in_another_order_are_not_used_in_16_bits(
    dtype: torch.dtype,
    has_bias: bool,
    n_inputs: int,
    monkeypatch: pytest.MonkeyPatch,
    forgotten_sizes: None,
) -> None:
    """Rounding to 16 bits would hide the difference for most random rows."""

    def multiply_in_order(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        columns = range(rows.size(1))
        sums = torch.zeros(rows.size(0), weight.size(0))
        for column in reversed(columns) if rows.size(0) == 2 else columns:
            sums += rows[:, column, None].float() * weight[:, column].float()
        return (sums if bias is None else sums + bias.float()).to(rows.dtype)

    _without_probes(monkeypatch, multiply_in_order)
    weight = torch.randn(48, n_inputs).to(dtype)
    sizes = usable_sizes(weight, has_bias=has_bias)
    assert 2 not in sizes
    assert {4, 6, 8, 4096} <= set(sizes)


def test_sizes_whose_rows_depend_on_their_position_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
    forgotten_sizes: None,
) -> None:
    multiply = row_products.multiply_rows

    def differs_in_later_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products = multiply(rows, weight, bias)
        products[512:] *= 1 + 2**-20
        return products

    _without_probes(monkeypatch, differs_in_later_rows)
    sizes = usable_sizes(torch.randn(8, 16), has_bias=False)
    assert sizes[-1] == 512


def _order_products(monkeypatch: pytest.MonkeyPatch, ordered_product: object) -> None:
    """Let fewer than 512 rows of a library have other bits, and replace the ordered product."""
    multiply = row_products.multiply_rows

    def differs_below_512(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products = multiply(rows, weight, bias)
        return products * (1 + 2**-20) if rows.size(0) < 512 else products

    _without_probes(monkeypatch, differs_below_512)
    monkeypatch.setattr(row_probes, "can_order_products", lambda dtype, device, n_inputs: True)
    for module in (row_groups, row_probes):
        monkeypatch.setattr(module, "ordered_product", ordered_product)


def test_few_rows_are_multiplied_in_the_order_of_large_products(
    monkeypatch: pytest.MonkeyPatch,
    forgotten_sizes: None,
) -> None:
    multiply = row_products.multiply_rows
    numbers_of_rows = []

    def large_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        numbers_of_rows.append(rows.size(0))
        return multiply(row_products.pad_rows(rows, 512), weight, bias)[: rows.size(0)]

    _order_products(monkeypatch, large_product)
    rows, weight, bias = torch.randn(600, 64), torch.randn(8, 64), torch.randn(8)
    together = grouped_linear(rows, weight, bias)
    numbers_of_rows.clear()
    assert torch.equal(grouped_linear(rows[3:9], weight, bias), together[3:9])
    assert numbers_of_rows[-1] == 6
    numbers_of_rows.clear()
    assert torch.equal(grouped_linear(rows[:200], weight, bias), together[:200])
    assert numbers_of_rows == []  # a library multiplies more than 128 rows


def test_an_ordered_product_with_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    forgotten_sizes: None,
) -> None:
    def other_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(rows, weight, bias) * (1 + 2**-20)

    _order_products(monkeypatch, other_product)
    rows, weight = torch.randn(600, 64), torch.randn(8, 64)
    assert torch.equal(grouped_linear(rows[:6], weight), grouped_linear(rows, weight)[:6])


def test_rows_are_padded_with_a_warning_if_the_kernel_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch,
    forgotten_sizes: None,
) -> None:
    def unavailable_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise KernelUnavailableError("ordered_product_kernel", "no such instruction")

    monkeypatch.setattr(fallback, "FAILURES", {})
    _order_products(monkeypatch, unavailable_product)
    rows, weight = torch.randn(600, 64), torch.randn(8, 64)
    together = grouped_linear(rows, weight)
    with pytest.warns(fallback.FallbackWarning, match="Few rows are padded instead"):
        few = grouped_linear(rows[:6], weight)
    assert torch.equal(few, together[:6])


@pytest.mark.parametrize(
    ("dtype", "device", "n_inputs"),
    [
        pytest.param(torch.float32, "cpu", 64, id="on a CPU"),
        pytest.param(torch.bfloat16, "cuda", 64, id="in 16 bits"),
        pytest.param(torch.float32, "cuda", 96, id="inputs that are no multiple of 64"),
    ],
)
def test_ordered_products_are_refused(dtype: torch.dtype, device: str, n_inputs: int) -> None:
    assert not can_order_products(dtype, torch.device(device), n_inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 64), (1, 32, 64), (14, 96, 128), (37, 70, 320), (128, 515, 1024)],
    ids=str,
)
def test_ordered_products_equal_those_of_torch(
    shape: tuple[int, int, int],
    has_bias: bool,
) -> None:
    n_rows, n_outputs, n_inputs = shape
    rows = torch.randn(n_rows, n_inputs, device="cuda")
    weight = torch.randn(n_outputs, n_inputs, device="cuda")
    bias = torch.randn(n_outputs, device="cuda") if has_bias else None
    outputs = ordered_product(rows, weight, bias)
    assert torch.equal(ordered_product(rows[-1:].clone(), weight, bias)[0], outputs[-1])
    exact = linear(rows.double(), weight.double(), None if bias is None else bias.double())
    assert (outputs.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.gpu
def test_ordered_products_add_in_the_order_of_the_inputs() -> None:
    n_rows, n_outputs, n_inputs = 20, 40, 192
    # In fp32, 2^24 + 1 is 2^24, so that nearly every other order gives other sums.
    numbers = torch.tensor([2.0**24, -(2.0**24), 1.0, 0.5])
    rows = numbers[torch.randint(len(numbers), (n_rows, n_inputs))]
    weight = torch.tensor([1.0, -1.0])[torch.randint(2, (n_outputs, n_inputs))]
    sums = torch.zeros(n_rows, n_outputs)
    for k in range(n_inputs):
        sums += rows[:, k, None] * weight[None, :, k]
    outputs = ordered_product(rows.cuda(), weight.cuda(), None)
    assert torch.equal(outputs.cpu(), sums)
    assert not torch.equal(linear(rows.double(), weight.double()), sums.double())


@pytest.mark.gpu
def test_ordered_products_read_operands_at_odd_addresses() -> None:
    rows = torch.randn(5 * 64 + 1, device="cuda")[1:].view(5, 64)
    weight = torch.randn(9 * 64 + 1, device="cuda")[1:].view(9, 64)
    expected = ordered_product(rows.clone(), weight.clone(), None)
    assert torch.equal(ordered_product(rows, weight, None), expected)


def test_ordered_products_need_asynchronous_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "why_no_async_loads", lambda: "Triton 3.4 cannot copy")
    with pytest.raises(KernelUnavailableError, match="cannot copy"):
        ordered_product(torch.randn(3, 64), torch.randn(5, 64), None)


@pytest.fixture
def forgotten_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least numbers of rows that a test finds are forgotten after it."""
    monkeypatch.setattr(rowwise, "_least_numbers", {})


def test_few_rows_are_padded_if_sums_of_few_rows_have_other_bits(forgotten_numbers: None) -> None:
    numbers_of_rows = []

    def differs_below_16(rows: Tensor) -> Tensor:
        numbers_of_rows.append(len(rows))
        doubled = 2 * rows
        return doubled * (1 + 2**-20) if len(rows) < 16 else doubled

    rows = torch.randn(40, 8)
    together = apply_rowwise(differs_below_16, rows, "doubled")
    for n_rows in (1, 3, 15, 16, 17):
        part = apply_rowwise(differs_below_16, rows[5 : 5 + n_rows], "doubled")
        assert torch.equal(part, together[5 : 5 + n_rows])
    assert numbers_of_rows[-5:] == [16, 16, 16, 16, 17]


def test_functions_whose_bits_always_depend_on_the_number_of_rows_are_refused(
    forgotten_numbers: None,
) -> None:
    rows = torch.randn(3, 8)
    refused(
        RuntimeError,
        "sums of a row do not depend on the number of rows",
        apply_rowwise,
        lambda matrix: matrix + torch.rand(len(matrix), 1),
        rows,
        "noise",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_normalized_rows_are_those_of_torch(dtype: torch.dtype) -> None:
    vectors = torch.randn(2, 3, 17).to(dtype)
    expected = normalize(vectors.double(), dim=-1)
    assert (normalize_rows(vectors).double() - expected).abs().max() <= torch.finfo(dtype).eps
    assert torch.equal(normalize_rows(vectors[1, 2]), normalize_rows(vectors)[1, 2])
    assert normalize_rows(vectors[:, :0]).shape == (2, 0, 17)


def test_a_device_without_usable_sizes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    forgotten_sizes: None,
) -> None:
    _without_probes(monkeypatch, lambda rows, weight, bias: torch.randn(len(rows), len(weight)))
    weight = torch.randn(8, 16)
    refused(RuntimeError, "no number of rows gives equal bits", usable_sizes, weight, False)


def test_contexts_nest() -> None:
    with grouping_rows():
        with grouping_rows(False):
            assert is_row_grouping_enabled()
        assert is_row_grouping_enabled()
    assert not is_row_grouping_enabled()
