"""MaxSim against documents in int8 and fp8, and the best documents of a query."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.base import has_int8_products, int8_products
from tests.ops.conftest import Target
from tilefold.ops import maxsim
from tilefold.ops.maxsim import QuantizedTokens, maxsim_topk, quantize_tokens, tiles
from tilefold.testing import assert_within_budget
from tilefold.testing.maxsim import PAIRINGS, maxsim_inputs

INTERPRETED = triton_interpreted()
KINDS = ("int8",) if INTERPRETED else ("int8", "fp8")


@pytest.fixture
def tokens() -> Tensor:
    return torch.randn(5, 7, 33, generator=torch.Generator().manual_seed(0))


def test_int8_tokens_are_off_by_at_most_half_a_step(tokens: Tensor) -> None:
    quantized = quantize_tokens(tokens)
    assert quantized.values.dtype == torch.int8
    assert quantized.scales.shape == (5, 7)
    step = tokens.abs().amax(dim=-1, keepdim=True) / 127
    assert bool(((quantized.dequantize() - tokens).abs() <= 0.5001 * step).all())
    assert quantized.values.abs().amax(dim=-1).eq(127).all()
    assert quantized.nbytes == tokens.numel() + 4 * 35


def test_fp8_tokens_are_off_by_at_most_a_sixteenth(tokens: Tensor) -> None:
    quantized = quantize_tokens(tokens, "fp8")
    finest_step = tokens.abs().amax(dim=-1, keepdim=True) * 2**-18
    errors = (quantized.dequantize() - tokens).abs()
    assert bool((errors <= tokens.abs() / 16 + finest_step).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["holes", "packed"])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="maximum"),
        pytest.param({"mask_mode": "zero"}, id="masked tokens are zero"),
        pytest.param({"temperature": 0.5, "reduction": "mean"}, id="smooth mean"),
    ],
)
def test_scores_are_computed_from_the_stored_numbers(
    target: Target,
    pairing: str,
    layout: str,
    kind: str,
    options: dict[str, Any],
) -> None:
    if target.device == "cuda" and kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this GPU")
    inputs = maxsim_inputs(
        3,
        2,
        5,
        21,
        40,
        pairing=pairing,
        layout=layout,
        dtype=torch.float16,
        device=target.device,
    )
    documents = quantize_tokens(inputs.documents, kind)
    assert_within_budget(
        maxsim(inputs.queries, documents, **inputs.layout, impl=target.impl, **options),
        maxsim(inputs.queries, documents, **inputs.layout, impl="reference", **options),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_queries_in_fp64_score_quantized_documents(pairing: str, kind: str) -> None:
    inputs = maxsim_inputs(3, 2, 5, 21, 40, pairing=pairing, layout="holes", dtype=torch.float64)
    documents = quantize_tokens(inputs.documents, kind)
    scores = maxsim(inputs.queries, documents, **inputs.layout, impl="tiled")
    expected = maxsim(inputs.queries, documents, **inputs.layout, impl="reference")
    assert scores.dtype == torch.float64
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def document_count(target: Target) -> int:
    """Number of documents of a test of many: on a GPU, as many as kernels with warp roles need."""
    if INTERPRETED:
        return 66
    return 203 if target.device == "cpu" else 65536 + 5


def unusual_documents(documents: Tensor) -> QuantizedTokens:
    """Quantize at least 62 documents, of which some are negative, tiny, huge, NaN or infinite.

    Products below 0 take other steps in the kernels. Documents 60 and 61 are not finite.
    """
    documents[:50] = -documents[:50].abs()
    quantized = quantize_tokens(documents.float())
    quantized.scales[40:45] *= 2.0**-100
    quantized.scales[45:47] *= 2.0**115
    quantized.scales[60, 1] = math.nan
    quantized.scales[61, 2] = math.inf
    quantized.values[61, 2] = 0  # a token with an infinity is rounded to this
    return quantized


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("queries", "tokens", "length", "dim"),
    [(1, 32, 9, 128), (4, 20, 3, 96), (9, 17, 8, 128), (3, 70, 17, 64), (12, 9, 5, 64)],
)
def test_many_documents_in_one_pass(
    target: Target,
    queries: int,
    tokens: int,
    length: int,
    dim: int,
    masked: bool,
) -> None:
    inputs = maxsim_inputs(
        queries,
        document_count(target),
        tokens,
        length,
        dim,
        layout="holes" if masked else "full",
        dtype=torch.float16,
        device=target.device,
    )
    inputs.queries[0] = inputs.queries[0].abs()
    documents = unusual_documents(inputs.documents)
    choices: list[dict[str, str]] = [{}, {"mask_mode": "zero"}, {"reduction": "mean"}]
    if INTERPRETED:  # which is slow
        choices = [choices[(queries + masked) % 3]]
    for choice in choices:
        options = inputs.layout | choice
        scores = maxsim(inputs.queries, documents, **options, impl=target.impl)
        truth = maxsim(inputs.queries, documents, **options, impl="reference")
        assert torch.equal(scores.isnan(), truth.isnan())
        assert masked or scores[:, 60:62].isnan().all()
        assert_within_budget(scores.nan_to_num(), truth.nan_to_num())
        repeated = maxsim(inputs.queries, documents, **options, impl=target.impl)
        assert torch.equal(scores.view(torch.int32), repeated.view(torch.int32))


def test_many_queries_and_long_documents(target: Target) -> None:
    sizes = (5, 3, 20, 33, 40) if INTERPRETED else (20, 9, 32, 300, 128)
    inputs = maxsim_inputs(*sizes, dtype=torch.float16, device=target.device)
    documents = quantize_tokens(inputs.documents)
    scores = maxsim(inputs.queries, documents, impl=target.impl)
    assert_within_budget(scores, maxsim(inputs.queries, documents, impl="reference"))
    unquantized = maxsim(inputs.queries.double(), inputs.documents.double(), impl="reference")
    assert float((scores - unquantized).norm() / unquantized.norm()) < 0.02


def test_nan_documents_score_nan_and_zero_documents_zero(target: Target) -> None:
    inputs = maxsim_inputs(2, 3, 4, 9, 40, dtype=torch.float16, device=target.device)
    inputs.documents[1] = 0
    inputs.documents[2, 3, 5] = math.nan
    scores = maxsim(inputs.queries, quantize_tokens(inputs.documents), impl=target.impl)
    assert scores[:, 0].isfinite().all()
    assert not scores[:, 1].any()
    assert scores[:, 2].isnan().all()


def queries_near_rounding_boundaries(rows: int, dtype: torch.dtype) -> Tensor:
    """``[rows, 64]`` queries whose entries are halfway between two int8 numbers.

    Row 1 is tiny, row 2 is zero, row 3 has a NaN, and row 4 an infinity.
    """
    generator = torch.Generator().manual_seed(rows)
    queries = torch.randn(rows, 64, generator=generator)
    half_steps = torch.randint(-127, 127, (rows, 63), generator=generator) + 0.5
    queries[:, :-1] = half_steps * queries[:, -1:]
    queries[:, -1] *= 127
    queries = queries.to(dtype)
    queries[1] *= 2.0**-14 if dtype == torch.float16 else 2.0**-140
    queries[2] = 0
    queries[3, 5] = math.nan
    queries[4, 5] = math.inf
    return queries


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(7, torch.float16), (7, torch.float32), (33, torch.float32)],
    ids=str,
)
def test_queries_are_rounded_to_the_bits_of_quantize_tokens(
    target: Target,
    rows: int,
    dtype: torch.dtype,
) -> None:
    columns = 4 if INTERPRETED else 64
    queries = queries_near_rounding_boundaries(rows, dtype)
    # A document has one entry of 127, so that its scores show one entry of each query.
    documents = quantize_tokens(torch.eye(64)[:columns, None]).to(target.device)
    scores = maxsim(queries.to(target.device)[:, None], documents, impl=target.impl).cpu()
    rounded = quantize_tokens(queries)
    products = rounded.values[:, :columns] * 127.0
    expected = products * documents.scales.cpu()[:, 0] * rounded.scales[:, None]
    finite = rounded.scales.isfinite()
    assert finite.sum() == rows - 2
    assert torch.equal(scores[finite], expected[finite])
    assert scores[~finite].isnan().all()


@pytest.fixture
def queries() -> Tensor:
    return torch.randn(2, 3, 8)


@pytest.fixture
def documents() -> QuantizedTokens:
    return quantize_tokens(torch.randn(2, 4, 8))


def test_quantized_documents_refuse_gradients_and_normalisation(
    queries: Tensor,
    documents: QuantizedTokens,
) -> None:
    with pytest.raises(
        ValueError,
        match="documents must be a floating tensor if a gradient is needed",
    ):
        maxsim(queries.clone().requires_grad_(), documents)
    with pytest.raises(ValueError, match="normalize must be False with quantized documents"):
        maxsim(queries, documents, normalize=True)


def test_quantized_tokens_refuse_wrong_dtypes_and_shapes(
    queries: Tensor,
    documents: QuantizedTokens,
) -> None:
    with pytest.raises(ValueError, match="dtype must be one of 'int8', 'fp8', got 'int4'"):
        quantize_tokens(queries, "int4")
    with pytest.raises(TypeError, match="values must have dtype int8, float8_e4m3fn, got float32"):
        QuantizedTokens(queries, queries[..., 0])
    with pytest.raises(
        ValueError,
        match=r"scales must have shape \[2, 4\] on cpu, got \[2, 3\] on cpu",
    ):
        dataclasses.replace(documents, scales=documents.scales[:, :3])


def test_maxsim_topk_refuses_wrong_arguments(queries: Tensor, documents: QuantizedTokens) -> None:
    with pytest.raises(ValueError, match="k must be a positive integer, got 0"):
        maxsim_topk(queries, documents, 0)
    not_a_tensor: Any = [1.0]
    with pytest.raises(TypeError, match=r"documents must be a torch\.Tensor, got list"):
        maxsim_topk(queries, not_a_tensor, 2)


@pytest.mark.skipif(INTERPRETED, reason="this part needs no interpreter")
@pytest.mark.parametrize("block", [65536, 4])
@pytest.mark.parametrize("layout", ["holes", "packed"])
def test_topk_are_the_documents_with_the_largest_scores(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    block: int,
) -> None:
    inputs = maxsim_inputs(3, 11, 4, 7, 16, layout="holes", device=target.device)
    if layout == "packed":
        inputs = inputs.packed()
    options = inputs.layout
    del options["pairing"]
    all_scores = maxsim(inputs.queries, inputs.documents, **options, impl=target.impl)
    monkeypatch.setattr(tiles, "TOPK_DOCUMENTS", block)
    monkeypatch.setattr(tiles, "TOPK_SCORES", 3 * block)
    scores, indices = maxsim_topk(
        inputs.queries,
        inputs.documents,
        5,
        **options,
        impl=target.impl,
    )
    torch.testing.assert_close(scores, all_scores.sort(dim=1, descending=True).values[:, :5])
    torch.testing.assert_close(all_scores.gather(1, indices), scores)


@pytest.mark.skipif(INTERPRETED, reason="this part needs no interpreter")
def test_topk_of_quantized_documents_is_the_same_in_blocks(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = maxsim_inputs(3, 11, 4, 7, 16, layout="holes", device=target.device)
    documents = quantize_tokens(inputs.documents)
    scores, indices = maxsim_topk(inputs.queries, documents, 3, impl=target.impl)
    monkeypatch.setattr(tiles, "TOPK_DOCUMENTS", 4)
    monkeypatch.setattr(tiles, "TOPK_SCORES", 12)
    block_scores, block_indices = maxsim_topk(inputs.queries, documents, 3, impl=target.impl)
    torch.testing.assert_close(block_scores, scores)
    torch.testing.assert_close(block_indices, indices)


@pytest.mark.skipif(INTERPRETED, reason="this part needs no interpreter")
def test_topk_of_groups_with_ties_lists_no_document_twice(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = maxsim_inputs(3, 11, 4, 7, 16, device=target.device)
    monkeypatch.setattr(tiles, "TOPK_GROUP", 2)
    whole_numbers = torch.randint(-2, 3, (301, 1, 16), device=target.device)
    documents = whole_numbers.to(inputs.queries.dtype)
    scores, indices = maxsim_topk(inputs.queries, documents, 4, impl=target.impl)
    all_scores = maxsim(inputs.queries, documents, impl=target.impl)
    torch.testing.assert_close(scores, all_scores.topk(4, dim=1).values)
    torch.testing.assert_close(all_scores.gather(1, indices), scores)
    assert all(len(set(row)) == 4 for row in indices.tolist())


@pytest.mark.skipif(INTERPRETED, reason="this part needs no interpreter")
def test_topk_of_no_query_and_of_fewer_documents_than_k(target: Target) -> None:
    inputs = maxsim_inputs(3, 11, 4, 7, 16, device=target.device)
    scores, _ = maxsim_topk(inputs.queries[:0], inputs.documents, 4, impl=target.impl)
    assert scores.shape == (0, 4)
    scores, indices = maxsim_topk(inputs.queries, inputs.documents, 50, impl=target.impl)
    assert scores.shape == (3, 11)
    assert indices.sort(dim=1).values.tolist() == [list(range(11))] * 3


def random_int8(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


def one_row_repeated(rows: int, dim: int) -> Tensor:
    return random_int8(1, dim).expand(rows, dim)


def one_number_repeated(rows: int, dim: int) -> Tensor:
    return random_int8(rows, 1).expand(rows, dim)


def every_second_row(rows: int, dim: int) -> Tensor:
    return random_int8(2 * rows, dim)[::2]


def every_second_column(rows: int, dim: int) -> Tensor:
    return random_int8(rows, 2 * dim)[:, ::2]


def some_columns(rows: int, dim: int) -> Tensor:
    return random_int8(rows, dim + 3)[:, :dim]


def transposed(rows: int, dim: int) -> Tensor:
    return random_int8(dim, rows).T


@pytest.mark.skipif(not has_int8_products(), reason="no fast products of int8 on this CPU")
@pytest.mark.parametrize("dim", [0, 1, 2, 3, 17, 128])
@pytest.mark.parametrize(
    "matrix",
    [
        random_int8,
        one_row_repeated,
        one_number_repeated,
        every_second_row,
        every_second_column,
        some_columns,
        transposed,
    ],
)
def test_integer_products_are_exact_for_any_strides(
    matrix: Callable[[int, int], Tensor],
    dim: int,
) -> None:
    for n_rows, n_columns in ((1, 1), (1, 5), (5, 1), (3, 2), (17, 40), (0, 4), (4, 0)):
        rows = matrix(n_rows, dim)
        columns = matrix(n_columns, dim)
        product = int8_products(rows, columns)
        assert product.dtype == torch.int32
        assert torch.equal(product.long(), rows.long() @ columns.long().T), (n_rows, n_columns)


@pytest.mark.parametrize("dim", [1, 2, 8])
@pytest.mark.parametrize("repeated", ["documents", "tokens", "dimensions"])
def test_int8_documents_that_repeat_their_memory_score_like_copies(
    target: Target,
    repeated: str,
    dim: int,
) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 3, dim, generator=generator).to(target.device)
    stored_shapes = {
        "documents": (1, 4, dim),
        "tokens": (5, 1, dim),
        "dimensions": (5, 4, 1),
    }
    stored = random_int8(*stored_shapes[repeated]).to(target.device)
    scales = torch.rand(5, 4, generator=generator).to(target.device)
    documents = QuantizedTokens(stored.expand(5, 4, dim), scales)
    copies = QuantizedTokens(documents.values.contiguous(), scales)
    assert_within_budget(
        maxsim(queries, documents, impl=target.impl),
        maxsim(queries, copies, impl="reference"),
    )
