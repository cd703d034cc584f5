"""Memory and CSR results of the token scatter: it keeps what the dense scores would have kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.matching import REDUCTIONS, TokenScatterInputs, token_scatter_inputs
from tests.ops.samples import allocations, saved_for_backward
from tests.ops.sparse_rows import BAD_LIMITS, LIMITS, assert_best, entries, valid_csr
from tests.refusals import refused
from tilefold.ops import token_scatter, token_scatter_sparse

pytestmark = [
    pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter"),
    pytest.mark.filterwarnings(
        "ignore:Sparse:UserWarning",
    ),  # what the tests themselves do with CSR tensors
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def leaf(inputs: TokenScatterInputs) -> Tensor:
    return inputs.weights.detach().clone().requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
def test_one_byte_a_token_is_kept_for_backward_beside_the_inputs(device: str) -> None:
    inputs = token_scatter_inputs(3, 12, 50_000, layout="right", device=device)
    weights = leaf(inputs)
    kept = saved_for_backward(
        lambda: token_scatter(weights, inputs.input_ids, 50_000, **inputs.layout),
    )
    own = [t for t in kept if t.data_ptr() not in (weights.data_ptr(), inputs.input_ids.data_ptr())]
    assert sum(t.numel() * t.element_size() for t in own) == 3 * 12


def run(inputs: TokenScatterInputs, **options: Any) -> Tensor:
    return token_scatter_sparse(*inputs.operands, **inputs.layout, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["full", "left", "holes", "packed"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize(("top_k", "min_weight"), LIMITS)
def test_it_keeps_the_best_entries_of_the_dense_scores(
    top_k: int | None,
    min_weight: float,
    reduce: str,
    layout: str,
    device: str,
) -> None:
    inputs = token_scatter_inputs(5, 60, 40, layout=layout, device=device)
    options = {"reduce": reduce, "activation": "log1p_relu", "ignore_ids": [0, 2]}
    scores = token_scatter(*inputs.operands, **inputs.layout, **options)
    assert_best(
        run(inputs, top_k=top_k, min_weight=min_weight, **options),
        scores,
        top_k,
        min_weight,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [1, 2, 3, 10])
def test_ties_keep_the_lowest_vocabulary_index_and_nan_comes_first(top_k: int, device: str) -> None:
    weights = torch.tensor([[1.0, 2.0, 2.0, 2.0, math.nan, 1.0]], device=device)
    sparse = token_scatter_sparse(
        weights,
        torch.tensor([[1, 9, 4, 6, 8, 0]], device=device),
        10,
        top_k=top_k,
    )
    assert entries(sparse) == [sorted([8, 4, 6, 9, 0, 1][:top_k])]
    assert sparse.values().isnan().sum() == 1


def test_a_negative_minimum_keeps_zeros_of_entries_that_occur_and_no_others() -> None:
    weights, ids = torch.tensor([[-1.0, 2.0, -3.0]]), torch.tensor([[3, 1, 3]])
    assert entries(token_scatter_sparse(weights, ids, 5, min_weight=-math.inf)) == [[1, 3]]
    sums = token_scatter_sparse(
        weights,
        ids,
        5,
        min_weight=-math.inf,
        reduce="sum",
        activation="none",
    )
    assert sums.values().tolist() == [2.0, -4.0]


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=str,
)
def test_the_result_is_a_valid_csr_tensor_of_the_dtype_asked_for_that_others_can_use(
    dtype: torch.dtype,
) -> None:
    inputs = token_scatter_inputs(4, 60, 70, layout="right", dtype=dtype)
    inputs.weights.requires_grad_()
    assert run(inputs).values().dtype == dtype
    assert valid_csr(lambda: run(inputs, top_k=9, out_dtype=torch.float32)).dtype == torch.float32


def test_nothing_of_the_size_of_the_membership_nor_sparsely_of_the_vocabulary_is_allocated() -> (
    None
):
    dense, sparse = token_scatter_inputs(8, 128, 20_000), token_scatter_inputs(16, 64, 250_002)
    weights = leaf(dense)
    for call, most in (
        (
            lambda: token_scatter(weights, dense.input_ids, 20_000).backward(dense.dscores),
            4 * 8 * 20_000,
        ),
        (lambda: run(sparse, top_k=32), 16 * 64 * 8),
    ):
        sizes = allocations(call)
        assert sizes and max(sizes) <= most


@pytest.mark.parametrize(("options", "said"), BAD_LIMITS, ids=str)
def test_a_bad_limit_is_refused(options: dict[str, Any], said: str) -> None:
    refused(ValueError, said, run, token_scatter_inputs(1, 2, 5), **options)


@pytest.mark.parametrize("device", DEVICES)
def test_broken_ids_and_offsets_raise_on_every_device(device: str) -> None:
    weights, ids = torch.randn(3, device=device), torch.tensor([0, 7, 1], device=device)
    offsets = torch.tensor([0, 3], device=device)
    refused(
        ValueError,
        r"got 7 at \[1\]",
        token_scatter_sparse,
        weights,
        ids,
        5,
        cu_seqlens=offsets,
    )
    refused(
        ValueError,
        "cu_seqlens must start with 0",
        token_scatter_sparse,
        weights,
        ids,
        9,
        cu_seqlens=offsets + 1,
    )
