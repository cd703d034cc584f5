"""Sparse scores keep what dense ones would have kept, block by block; rows of a fixed capacity say
what they lack.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import BF16, F16, F32, F64, INTERPRETED
from tests.ops.samples import allocations
from tests.ops.sparse_rows import (
    BAD_LIMITS,
    LIMITS,
    assert_best,
    entries,
    expected_entries,
    valid_csr,
)
from tests.refusals import refused
from tilefold.ops import lsr_head, lsr_head_sparse
from tilefold.ops.lsr_head import api, lsr_head_rows
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse:UserWarning",
)  # what the tests themselves do with CSR tensors
no_kernels = pytest.mark.skipif(INTERPRETED, reason="nothing here depends on the kernels")


@pytest.fixture
def narrow_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 vocabulary entries, so that small problems cross their borders."""
    monkeypatch.setattr(api, "SPARSE_BLOCK_V", 16)
    monkeypatch.setattr(api, "ROWS_BLOCK_SCORES", 16)
    monkeypatch.setattr(api, "ROWS_BLOCK_ALIGNMENT", 16)


def run(inputs: LSRHeadInputs, **options: Any) -> Tensor:
    return lsr_head_sparse(inputs.hidden, inputs.weight, inputs.bias, **inputs.layout, **options)


def rows(inputs: LSRHeadInputs, capacity: int, **options: Any) -> Any:
    return lsr_head_rows(
        inputs.hidden,
        inputs.weight,
        inputs.bias,
        capacity=capacity,
        **inputs.layout,
        **options,
    )


def dense(inputs: LSRHeadInputs, **options: Any) -> Tensor:
    return lsr_head(inputs.hidden, inputs.weight, inputs.bias, **inputs.layout, **options)


@no_kernels
@pytest.mark.parametrize("layout", ["full", "right", "packed"])
@pytest.mark.parametrize("pooling", ["max", "sum", "mean", "cls", "last"])
@pytest.mark.parametrize(("top_k", "min_weight"), LIMITS)
@pytest.mark.usefixtures("narrow_blocks")
def test_the_best_dense_scores(
    target: Target,
    top_k: int | None,
    min_weight: float,
    pooling: str,
    layout: str,
) -> None:
    inputs = lsr_head_inputs(5, 9, 16, 70, layout=layout, device=target.device)
    options = {"pooling": pooling, "impl": target.impl}
    sparse, scores = (
        run(inputs, top_k=top_k, min_weight=min_weight, **options),
        dense(inputs, **options),
    )
    assert_best(sparse, scores, top_k, min_weight, rtol=1e-5, atol=1e-6)


@no_kernels
@pytest.mark.parametrize("block", [1, 3, 16, 64, 1000])
@pytest.mark.parametrize("top_k", [None, 1, 5, 20])
def test_ties_keep_the_lowest_index_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
    top_k: int | None,
    block: int,
) -> None:
    monkeypatch.setattr(api, "SPARSE_BLOCK_V", block)
    # whole numbers between 0 and 2: many equal scores in every row
    weight = torch.randint(0, 3, (64, 1), generator=torch.Generator().manual_seed(0)).float()
    hidden = torch.ones(3, 2, 1)
    scores = lsr_head(hidden, weight, activation="relu")
    sparse = lsr_head_sparse(hidden, weight, activation="relu", top_k=top_k)
    assert entries(sparse) == expected_entries(scores, top_k, 0.0)
    if top_k == 5:
        assert entries(sparse)[0] == (weight[:, 0] == 2).nonzero()[:5, 0].tolist()


@no_kernels
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.usefixtures("narrow_blocks")
def test_nan_is_kept_so_that_it_is_seen(top_k: int | None) -> None:
    inputs = lsr_head_inputs(3, 4, 8, 50)
    inputs.hidden[1, 2] = math.nan
    sparse = run(inputs, top_k=top_k, min_weight=0.1)
    assert (
        len(entries(sparse)[1])
        == sparse.to_dense()[1].isnan().sum()
        == (50 if top_k is None else 3)
    )
    assert sparse.to_dense()[[0, 2]].isfinite().all()


@no_kernels
@pytest.mark.usefixtures("narrow_blocks")
def test_rows_without_a_valid_token_are_empty_and_a_minimum_of_minus_infinity_keeps_zeros() -> None:
    counts = run(lsr_head_inputs(5, 9, 16, 70, layout="packed")).crow_indices().diff().tolist()
    assert [count == 0 for count in counts] == [True, False, True, False, True]
    assert run(lsr_head_inputs(2, 3, 8, 20), min_weight=-math.inf).values().numel() == 40


@no_kernels
@pytest.mark.parametrize(("shape", "rows"), [((0, 3, 4), 0), ((2, 0, 4), 2)])
@pytest.mark.parametrize("top_k", [None, 3])
def test_empty_batches_give_empty_tensors(
    shape: tuple[int, ...],
    rows: int,
    top_k: int | None,
) -> None:
    sparse = lsr_head_sparse(torch.randn(shape), torch.randn(5, 4), top_k=top_k)
    assert sparse.shape == (rows, 5) and sparse.values().numel() == 0


@no_kernels
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
def test_the_dtype_is_that_of_the_input_or_the_one_asked_for(dtype: torch.dtype) -> None:
    inputs = lsr_head_inputs(2, 3, 8, 20, dtype=dtype)
    wide = run(inputs, out_dtype=F32)
    assert run(inputs).values().dtype == dtype and wide.values().dtype == F32
    assert wide.col_indices().dtype == torch.int64


@no_kernels
def test_half_precision_selects_on_scores_that_are_not_rounded_yet() -> None:
    # logits 2048 and 2049 are one number in fp16 and in bf16: rounded, the lower index would win
    hidden, weight = (
        torch.ones(1, 1, 2, dtype=torch.float16),
        torch.tensor([[2048.0, 0.0], [2048.0, 1.0]]).half(),
    )
    assert entries(lsr_head_sparse(hidden, weight, activation="relu", top_k=1)) == [[1]]


@no_kernels
def test_the_result_is_a_valid_csr_tensor_that_others_can_use_without_a_warning_or_a_graph() -> (
    None
):
    inputs = lsr_head_inputs(4, 9, 16, 70, layout="right")
    inputs.weight.requires_grad_()
    valid_csr(lambda: run(inputs, top_k=9))


@no_kernels
def test_the_dense_scores_are_never_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, length, vocab, block = 64, 4, 200_000, 1024
    monkeypatch.setattr(api, "SPARSE_BLOCK_V", block)
    inputs, kept = lsr_head_inputs(batch, length, 8, vocab), list[int]()
    sizes = allocations(lambda: kept.append(run(inputs, top_k=16).values().numel()))
    assert kept == [batch * 16]
    assert sizes and max(sizes) <= 4 * batch * length * (
        block + 16
    )  # fp32 logits of a block, not scores of [B, V]
    assert max(sizes) < 4 * batch * vocab / 10


REFUSED: list[tuple[dict[str, Any], str]] = [
    *BAD_LIMITS,
    ({"pooling": "avg"}, r"pooling must be one of 'max', .*got 'avg'"),
    ({"out_dtype": torch.int32}, r"out_dtype must be one of float16, .* got torch.int32"),
]


@no_kernels
@pytest.mark.parametrize(("options", "said"), REFUSED, ids=str)
def test_bad_options_are_refused_as_by_the_dense_function(
    options: dict[str, Any],
    said: str,
) -> None:
    refused(
        TypeError if "out_dtype" in options else ValueError,
        said,
        run,
        lsr_head_inputs(1, 2, 4, 5),
        **options,
    )


# Rows of a fixed capacity


@pytest.mark.parametrize("layout", ["right", "packed"])
@pytest.mark.parametrize(("top_k", "min_weight"), [(None, 0.0), (None, 0.8), (7, 0.0), (90, 0.0)])
@pytest.mark.usefixtures("narrow_blocks")
def test_rows_of_a_capacity_hold_the_kept(
    kernels: Target,
    layout: str,
    top_k: int | None,
    min_weight: float,
) -> None:
    inputs = lsr_head_inputs(5, 9, 16, 70, layout=layout, device=kernels.device)
    options = {"top_k": top_k, "min_weight": min_weight, "impl": kernels.impl}
    actual, expected = rows(inputs, 80, **options), run(inputs, **options).cpu()
    assert actual.vocab_size == 70 and bool((actual.counts <= 80).all())
    counts = expected.crow_indices().diff()
    assert actual.n_stored.tolist() == counts.tolist()
    inside = torch.arange(actual.columns.size(1)) < counts[:, None]
    assert actual.columns.cpu()[inside].tolist() == expected.col_indices().tolist()
    torch.testing.assert_close(actual.values.cpu()[inside], expected.values(), rtol=1e-6, atol=1e-6)


def test_a_row_that_does_not_fit_says_how_many_there_were_and_nan_is_kept(kernels: Target) -> None:
    inputs = lsr_head_inputs(4, 6, 16, 70, layout="packed", device=kernels.device)
    actual, expected = (
        rows(inputs, 3, impl=kernels.impl),
        entries(run(inputs, impl=kernels.impl).cpu()),
    )
    counts = [len(row) for row in expected]
    assert actual.counts.tolist() == counts and actual.n_stored.tolist() == [
        min(count, 3) for count in counts
    ]
    for columns, kept, row in zip(actual.columns, actual.n_stored, expected, strict=True):
        assert columns[:kept].tolist() == row[:3]
    inputs.hidden[0, :] = math.nan
    first = next(b for b, count in enumerate(counts) if count)
    actual = rows(inputs, 80, impl=kernels.impl)
    assert int(actual.counts[first]) == 70 and bool(actual.values[first, :70].isnan().all())


def test_where_no_kernels_run_there_are_no_rows_of_a_capacity() -> None:
    inputs = lsr_head_inputs(2, 3, 16, 40, layout="packed")
    assert rows(inputs, 4, impl="tiled") is None
    refused(ValueError, "capacity and top_k must be at least 1", rows, inputs, 0)
