"""lsr_head_sparse keeps what the dense scores would have kept, block of the vocabulary by block."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tests.ops.sparse_rows import entries, expected_entries, warnings_are_errors
from tilefold.ops import lsr_head, lsr_head_sparse
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.lsr_head import api
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs

pytestmark = [
    pytest.mark.skipif(triton_interpreted(), reason="nothing here depends on the kernels"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),  # what the tests themselves do with CSR tensors
]


@pytest.fixture
def narrow_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of 16 vocabulary entries, so that small problems cross their borders."""
    monkeypatch.setattr(api, "SPARSE_BLOCK_V", 16)
    return 16


def run(inputs: LSRHeadInputs, **options: Any) -> Tensor:
    return lsr_head_sparse(inputs.hidden, inputs.weight, inputs.bias, **inputs.layout, **options)


def dense(inputs: LSRHeadInputs, **options: Any) -> Tensor:
    return lsr_head(inputs.hidden, inputs.weight, inputs.bias, **inputs.layout, **options)


@pytest.mark.parametrize("layout", ["full", "right", "packed"])
@pytest.mark.parametrize("pooling", ["max", "sum", "mean", "cls", "last"])
@pytest.mark.parametrize(("top_k", "min_weight"), [(None, 0.0), (None, 0.8), (1, 0.0), (7, 0.0), (40, 0.5), (500, 0.0)])
@pytest.mark.usefixtures("narrow_blocks")
def test_it_keeps_the_best_entries_of_the_dense_scores(
    target: Target, top_k: int | None, min_weight: float, pooling: str, layout: str
) -> None:
    inputs = lsr_head_inputs(5, 9, 16, 70, layout=layout, device=target.device)
    options = {"pooling": pooling, "impl": target.impl}
    sparse, scores = run(inputs, top_k=top_k, min_weight=min_weight, **options), dense(inputs, **options)
    assert sparse.layout == torch.sparse_csr and sparse.shape == scores.shape
    kept = sparse.to_dense()
    torch.testing.assert_close(kept, torch.where(kept != 0, scores, 0), rtol=1e-5, atol=1e-6)
    assert entries(sparse) == expected_entries(scores, top_k, min_weight)


@pytest.mark.parametrize("block", [1, 3, 16, 64, 1000])
@pytest.mark.parametrize("top_k", [None, 1, 5, 20])
def test_ties_keep_the_lowest_vocabulary_index_at_every_block_size(
    monkeypatch: pytest.MonkeyPatch, top_k: int | None, block: int
) -> None:
    monkeypatch.setattr(api, "SPARSE_BLOCK_V", block)
    # whole numbers between 0 and 2: many equal scores in every row
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 3, (64, 1), generator=generator).float()
    hidden = torch.ones(3, 2, 1)
    scores = lsr_head(hidden, weight, activation="relu")
    sparse = lsr_head_sparse(hidden, weight, activation="relu", top_k=top_k)
    assert entries(sparse) == expected_entries(scores, top_k, 0.0)
    if top_k == 5:
        twos = (weight[:, 0] == 2).nonzero()[:5, 0].tolist()
        assert entries(sparse)[0] == twos


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.usefixtures("narrow_blocks")
def test_nan_is_kept_so_that_it_is_seen(top_k: int | None) -> None:
    inputs = lsr_head_inputs(3, 4, 8, 50)
    inputs.hidden[1, 2] = math.nan
    sparse = run(inputs, top_k=top_k, min_weight=0.1)
    assert len(entries(sparse)[1]) == (50 if top_k is None else 3)
    assert sparse.to_dense()[1].isnan().sum() == (50 if top_k is None else 3)
    assert sparse.to_dense()[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("narrow_blocks")
def test_rows_without_a_valid_token_are_empty() -> None:
    inputs = lsr_head_inputs(5, 9, 16, 70, layout="packed")
    counts = run(inputs).crow_indices().diff().tolist()
    assert [count == 0 for count in counts] == [True, False, True, False, True]


def test_a_minimum_of_minus_infinity_keeps_zeros_but_not_minus_infinity() -> None:
    inputs = lsr_head_inputs(2, 3, 8, 20)
    assert run(inputs, min_weight=-math.inf).values().numel() == 40


@pytest.mark.parametrize(("shape", "rows"), [((0, 3, 4), 0), ((2, 0, 4), 2)])
@pytest.mark.parametrize("top_k", [None, 3])
def test_empty_batches_give_empty_tensors(shape: tuple[int, ...], rows: int, top_k: int | None) -> None:
    sparse = lsr_head_sparse(torch.randn(shape), torch.randn(5, 4), top_k=top_k)
    assert sparse.shape == (rows, 5) and sparse.values().numel() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_dtype_is_that_of_the_input_or_the_one_asked_for(dtype: torch.dtype) -> None:
    inputs = lsr_head_inputs(2, 3, 8, 20, dtype=dtype)
    assert run(inputs).values().dtype == dtype
    wide = run(inputs, out_dtype=torch.float32)
    assert wide.values().dtype == torch.float32
    assert wide.col_indices().dtype == torch.int64


def test_half_precision_selects_on_scores_that_are_not_rounded_yet() -> None:
    # logits 2048 and 2049 are one number in fp16 and in bf16: rounded, the lower index would win
    hidden, weight = torch.ones(1, 1, 2, dtype=torch.float16), torch.tensor([[2048.0, 0.0], [2048.0, 1.0]]).half()
    assert entries(lsr_head_sparse(hidden, weight, activation="relu", top_k=1)) == [[1]]


def test_it_raises_no_warning_and_carries_no_graph() -> None:
    inputs = lsr_head_inputs(2, 3, 8, 20)
    inputs.weight.requires_grad_()
    with warnings_are_errors():
        sparse = run(inputs, top_k=3)
    assert not sparse.requires_grad


def test_the_result_is_a_valid_csr_tensor_that_others_can_use() -> None:
    inputs = lsr_head_inputs(4, 9, 16, 70, layout="right")
    sparse = run(inputs, top_k=9)
    torch._validate_sparse_csr_tensor_args(
        sparse.crow_indices(), sparse.col_indices(), sparse.values(), list(sparse.shape)
    )
    torch.testing.assert_close(sparse @ torch.ones(70, 1), sparse.to_dense().sum(dim=1, keepdim=True))


def test_the_dense_scores_are_never_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, length, vocab, block = 64, 4, 200_000, 1024
    monkeypatch.setattr(api, "SPARSE_BLOCK_V", block)
    inputs = lsr_head_inputs(batch, length, 8, vocab)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        sparse = run(inputs, top_k=16)
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sparse.values().numel() == batch * 16
    assert sizes and max(sizes) <= 4 * batch * length * (block + 16)  # fp32 logits of a block, not scores of [B, V]
    assert max(sizes) < 4 * batch * vocab / 10


@pytest.mark.parametrize("top_k", [0, -1, 1.5, True, "3"])
def test_a_bad_top_k_is_refused(top_k: Any) -> None:
    with pytest.raises(ValueError, match=r"top_k must be a positive integer or None, got "):
        run(lsr_head_inputs(1, 2, 4, 5), top_k=top_k)


@pytest.mark.parametrize("min_weight", [math.nan, "a", None, torch.tensor(1.0)])
def test_a_bad_min_weight_is_refused(min_weight: Any) -> None:
    with pytest.raises(ValueError, match=r"min_weight must be a Python number, got .*-inf keeps every entry"):
        run(lsr_head_inputs(1, 2, 4, 5), min_weight=min_weight)


def test_arguments_are_checked_as_by_the_dense_function() -> None:
    inputs = lsr_head_inputs(1, 2, 4, 5)
    with pytest.raises(ValueError, match=r"pooling must be one of 'max', .*got 'avg'"):
        run(inputs, pooling="avg")
    with pytest.raises(TypeError, match=r"out_dtype must be one of float16, .* got torch.int32"):
        run(inputs, out_dtype=torch.int32)
