"""token_scatter_sparse keeps what the dense scores would have kept, and never makes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.sparse_rows import entries, expected_entries, warnings_are_errors
from tilefold.ops import token_scatter, token_scatter_sparse
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.testing.token_scatter import REDUCTIONS, TokenScatterInputs, token_scatter_inputs

pytestmark = [
    pytest.mark.skipif(triton_interpreted(), reason="nothing here depends on the kernels"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),  # what the tests themselves do with CSR tensors
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run(inputs: TokenScatterInputs, **options: Any) -> Tensor:
    return token_scatter_sparse(*inputs.operands, **inputs.layout, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["full", "left", "holes", "packed"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize(("top_k", "min_weight"), [(None, 0.0), (None, 0.8), (1, 0.0), (7, 0.5), (500, 0.0)])
def test_it_keeps_the_best_entries_of_the_dense_scores(
    top_k: int | None, min_weight: float, reduce: str, layout: str, device: str
) -> None:
    inputs = token_scatter_inputs(5, 60, 40, layout=layout, device=device)
    options = {"reduce": reduce, "activation": "log1p_relu", "ignore_ids": [0, 2]}
    sparse = run(inputs, top_k=top_k, min_weight=min_weight, **options)
    scores = token_scatter(*inputs.operands, **inputs.layout, **options)
    assert sparse.layout == torch.sparse_csr and sparse.shape == scores.shape
    kept = sparse.to_dense()
    torch.testing.assert_close(kept, torch.where(kept != 0, scores, 0), rtol=1e-6, atol=0)
    assert entries(sparse) == expected_entries(scores, top_k, min_weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [1, 2, 3, 10])
def test_ties_keep_the_lowest_vocabulary_index_and_nan_comes_first(top_k: int, device: str) -> None:
    weights = torch.tensor([[1.0, 2.0, 2.0, 2.0, math.nan, 1.0]], device=device)
    ids = torch.tensor([[1, 9, 4, 6, 8, 0]], device=device)
    sparse = token_scatter_sparse(weights, ids, 10, top_k=top_k)
    assert entries(sparse) == [sorted([8, 4, 6, 9, 0, 1][:top_k])]
    assert sparse.values().isnan().sum() == 1


def test_a_negative_minimum_keeps_zeros_of_entries_that_occur_and_no_others() -> None:
    weights, ids = torch.tensor([[-1.0, 2.0, -3.0]]), torch.tensor([[3, 1, 3]])
    assert entries(token_scatter_sparse(weights, ids, 5, min_weight=-math.inf)) == [[1, 3]]
    sums = token_scatter_sparse(weights, ids, 5, min_weight=-math.inf, reduce="sum", activation="none")
    assert sums.values().tolist() == [2.0, -4.0]


@pytest.mark.parametrize(("shape", "rows"), [((0, 3), 0), ((2, 0), 2)])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_empty_batches_give_empty_tensors(reduce: str, shape: tuple[int, ...], rows: int, top_k: int | None) -> None:
    ids = torch.zeros(shape, dtype=torch.int64)
    sparse = token_scatter_sparse(torch.randn(shape), ids, 5, top_k=top_k, reduce=reduce)
    assert sparse.shape == (rows, 5) and sparse.values().numel() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_dtype_is_that_of_the_weights_or_the_one_asked_for(dtype: torch.dtype) -> None:
    inputs = token_scatter_inputs(2, 30, 20, dtype=dtype)
    assert run(inputs).values().dtype == dtype
    wide = run(inputs, out_dtype=torch.float32)
    assert wide.values().dtype == torch.float32 and wide.col_indices().dtype == torch.int64


def test_the_result_is_a_valid_csr_tensor_without_a_graph_that_others_can_use() -> None:
    inputs = token_scatter_inputs(4, 60, 70, layout="right")
    inputs.weights.requires_grad_()
    with warnings_are_errors():
        sparse = run(inputs, top_k=9)
    assert not sparse.requires_grad
    torch._validate_sparse_csr_tensor_args(
        sparse.crow_indices(), sparse.col_indices(), sparse.values(), list(sparse.shape)
    )
    torch.testing.assert_close(sparse @ torch.ones(70, 1), sparse.to_dense().sum(dim=1, keepdim=True))


def test_nothing_of_the_size_of_the_vocabulary_is_allocated() -> None:
    inputs = token_scatter_inputs(16, 64, 250_002)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run(inputs, top_k=32)
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sizes and max(sizes) <= 16 * 64 * 8


@pytest.mark.parametrize(
    ("name", "bad", "said"),
    [("top_k", bad, "top_k must be a positive integer or None, got ") for bad in (0, -1, 1.5, True, "3")]
    + [("min_weight", bad, "min_weight must be a Python number, got .*-inf keeps every entry")
       for bad in (math.nan, "a", None, torch.tensor(1.0))],
)  # fmt: skip
def test_a_bad_limit_is_refused(name: str, bad: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(token_scatter_inputs(1, 2, 5), **{name: bad})


@pytest.mark.parametrize("device", DEVICES)
def test_broken_ids_and_offsets_raise_on_every_device(device: str) -> None:
    weights, ids = torch.randn(3, device=device), torch.tensor([0, 7, 1], device=device)
    offsets = torch.tensor([0, 3], device=device)
    with pytest.raises(ValueError, match=r"got 7 at \[1\]"):
        token_scatter_sparse(weights, ids, 5, cu_seqlens=offsets)
    with pytest.raises(ValueError, match="cu_seqlens must start with 0"):
        token_scatter_sparse(weights, ids, 9, cu_seqlens=offsets + 1)
