"""XTR scores: cases by hand, and every implementation within budget of the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.ops.maxsim.matching import assert_xtr_matches, xtr_results
from tests.ops.samples import assert_same_bits, saved_for_backward
from tilefold.ops import maxsim, xtr_scores
from tilefold.ops.maxsim import quantize_tokens, tiles
from tilefold.testing import assert_within_budget, nan_poisoned_empty
from tilefold.testing.maxsim import maxsim_inputs
from tilefold.testing.padding import LAYOUTS

INTERPRETED = triton_interpreted()
without_interpreter = pytest.mark.skipif(INTERPRETED, reason="this part needs no interpreter")
SIZES = (3, 4, 5, 9, 16) if INTERPRETED else (5, 7, 6, 23, 40)
HALF_DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]

# one query of three tokens, three documents of two tokens, D = 1: similarities are products
Q = torch.tensor([[[1.0], [2.0], [-1.0]]], dtype=torch.float64)
D = torch.tensor([[[3.0], [1.0]], [[2.0], [-4.0]], [[0.5], [-1.0]]], dtype=torch.float64)


def score(top_k: int, queries: Tensor = Q, documents: Tensor = D, **options: Any) -> list[float]:
    """Scores of the reference, with which the tiled path agrees."""
    expected = xtr_scores(queries, documents, top_k=top_k, impl="reference", **options)
    tiled = xtr_scores(queries, documents, top_k=top_k, impl="tiled", **options)
    torch.testing.assert_close(tiled, expected, equal_nan=True)
    return expected.flatten().tolist()


@without_interpreter
def test_scores_by_hand() -> None:
    # token 0: 3 1 | 2 -4 | .5 -1; token 1: 6 2 | 4 -8 | 1 -2; token 2: -3 -1 | -2 4 | -.5 1
    assert score(1) == [(3 + 6) / 2, 4.0, 0.0]
    assert score(2) == [(3 + 6) / 2, (2 + 4 + 4) / 3, 1.0]
    assert score(3) == [(3 + 6) / 2, (2 + 4 + 4) / 3, 1.0]  # tokens 0 and 1 find document 0 twice
    assert score(6) == score(99) == [(3 + 6 - 1) / 3, (2 + 4 + 4) / 3, (0.5 + 1 + 1) / 3]
    assert score(99) == maxsim(Q, D, reduction="mean").flatten().tolist()


@without_interpreter
def test_imputed_scores_by_hand() -> None:
    # the second largest are 2, 4 and 1
    assert score(2, impute=True) == pytest.approx(
        [(3 + 6 + 1) / 3, (2 + 4 + 4) / 3, (2 + 4 + 1) / 3],
    )
    assert score(99, impute=True) == score(99)
    assert score(2, impute=True, query_mask=torch.tensor([[1, 0, 1]])) == [
        (3 + 1) / 2,
        (2 + 4) / 2,
        (2 + 1) / 2,
    ]


@without_interpreter
def test_masked_tokens_take_no_place_and_empty_documents_score_zero() -> None:
    mask = torch.tensor([[0, 1], [0, 0], [1, 1]])
    # token 0: 1 | .5 -1; token 1: 2 | 1 -2; token 2: -1 | -.5 1
    assert score(1, document_mask=mask) == [(1 + 2) / 2, 0.0, 1.0]
    assert score(1, document_mask=mask, impute=True) == pytest.approx(
        [(1 + 2 + 1) / 3, 0.0, (1 + 2 + 1) / 3],
    )
    assert score(2, document_mask=mask, query_mask=torch.tensor([[1, 0, 0]])) == [1.0, 0.0, 0.5]
    assert score(2, query_mask=torch.zeros(1, 3)) == [0.0, 0.0, 0.0]
    assert score(2, document_mask=torch.zeros(3, 2), impute=True) == [0.0, 0.0, 0.0]


@without_interpreter
def test_all_similarities_equal_to_the_last_retrieved_one_are_retrieved() -> None:
    documents = torch.tensor([[[2.0], [1.0]], [[1.0], [1.0]], [[1.0], [0.0]]], dtype=torch.float64)
    query = Q[:, :1]
    assert score(2, query, documents) == [2.0, 1.0, 1.0]
    assert score(1, query, documents) == [2.0, 0.0, 0.0]


@without_interpreter
@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_the_first_of_equal_tokens_of_a_document_takes_the_gradient(impl: str) -> None:
    documents = torch.tensor([[[2.0], [1.0]], [[1.0], [1.0]], [[1.0], [0.0]]], dtype=torch.float64)
    documents.requires_grad_()
    xtr_scores(Q[:, :1], documents, top_k=2, impl=impl).sum().backward()
    assert documents.grad is not None
    assert documents.grad.flatten().tolist() == [1, 0, 1, 0, 1, 0]


@without_interpreter
def test_a_document_token_of_nan_is_retrieved_unless_it_is_masked() -> None:
    documents = D.clone()
    documents[1, 0] = math.nan
    scores = score(1, documents=documents)
    assert scores[0] == 0
    assert math.isnan(scores[1])
    assert scores[2] == 0
    scores = score(2, documents=documents)
    assert scores[0] == (3 + 6) / 2
    assert math.isnan(scores[1])
    mask = torch.tensor([[1, 1], [0, 1], [1, 1]])
    assert all(math.isfinite(x) for x in score(2, documents=documents, document_mask=mask))


@without_interpreter
def test_a_query_token_of_nan_makes_all_scores_nan_unless_it_is_masked() -> None:
    queries = Q.clone()
    queries[0, 1] = math.nan
    assert all(math.isnan(x) for x in score(1, queries))
    mask = torch.tensor([[1, 0, 1]])
    assert all(math.isfinite(x) for x in score(1, queries, query_mask=mask))


@pytest.mark.parametrize("top_k", [1, 17, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_gradients_are_within_budget(target: Target, layout: str, top_k: int) -> None:
    inputs = maxsim_inputs(*SIZES, layout=layout, device=target.device)
    with nan_poisoned_empty():
        assert_xtr_matches(inputs, top_k, impl=target.impl)
    assert_xtr_matches(inputs, top_k, impl=target.impl, normalize=True, needs="d")
    assert_xtr_matches(inputs, top_k, impl=target.impl, impute=True, needs="")


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_half_precision_retrieves_on_exact_similarities_and_repeats_to_the_bit(
    target: Target,
    dtype: torch.dtype,
) -> None:
    inputs = maxsim_inputs(*SIZES, layout="holes", dtype=dtype, device=target.device)
    first = assert_xtr_matches(inputs, 12, impl=target.impl, kind="gradient_bound")
    second = assert_xtr_matches(inputs, 12, impl=target.impl, kind="gradient_bound")
    assert first["scores"].dtype == torch.float32
    assert first["dqueries"].dtype == dtype
    assert_same_bits(second, first)


@without_interpreter
@pytest.mark.parametrize("layout", ["holes", "packed"])
def test_small_tiles_give_the_results_of_large_ones(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    inputs = maxsim_inputs(*SIZES, layout=layout)
    expected = xtr_results(inputs, 12)
    monkeypatch.setattr(tiles, "CPU_TILE", (4, 100))
    results = xtr_results(inputs, 12)
    torch.testing.assert_close(results, expected)


def test_a_batch_wider_than_a_tile(target: Target) -> None:
    # Without the interpreter: 1,280 query tokens, 2,800 document tokens.
    sizes = (3, 4, 5, 9, 16) if INTERPRETED else (40, 70, 32, 40, 16)
    inputs = maxsim_inputs(*sizes, layout="right", device=target.device, seed=3)
    assert_xtr_matches(inputs, 256, impl=target.impl)


@without_interpreter
def test_no_tensor_of_the_size_of_the_similarities_is_saved() -> None:
    inputs = maxsim_inputs(4, 5, 6, 70, 8)
    queries = inputs.queries.requires_grad_()
    saved = saved_for_backward(lambda: xtr_scores(queries, inputs.documents, top_k=9))
    statistics = [tensor for tensor in saved if tensor.size(-1) != 8]
    assert sorted(tuple(tensor.shape) for tensor in statistics) == [(4, 5), (5, 24)]
    assert {tensor.dtype for tensor in statistics} == {torch.float32, torch.uint16}


@without_interpreter
def test_autocast_scores_in_half_precision_and_leaves_gradients_in_fp32() -> None:
    inputs = maxsim_inputs(3, 4, 5, 9, 16, dtype=torch.bfloat16).cast(torch.float32)
    queries = inputs.queries.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = xtr_scores(queries, inputs.documents.bfloat16(), top_k=7)
    truth = xtr_scores(
        inputs.queries.double(),
        inputs.documents.double(),
        top_k=7,
        impl="reference",
    )
    assert_within_budget(scores, truth)
    (gradient,) = torch.autograd.grad(scores.sum(), queries)
    assert gradient.dtype == torch.float32


QUERIES = torch.ones(2, 3, 8)
DOCUMENTS = torch.ones(2, 4, 8)


@without_interpreter
@pytest.mark.parametrize("top_k", [0, -1, 2.0, True, None])
def test_top_k_must_be_a_positive_integer(top_k: Any) -> None:
    with pytest.raises(ValueError, match="top_k must be a positive integer, got"):
        xtr_scores(QUERIES, DOCUMENTS, top_k=top_k)


@without_interpreter
@pytest.mark.parametrize(
    ("queries", "documents", "error", "message"),
    [
        pytest.param(
            QUERIES,
            quantize_tokens(DOCUMENTS),
            TypeError,
            r"documents must be a torch\.Tensor, got QuantizedTokens",
            id="quantized documents",
        ),
        pytest.param(
            QUERIES,
            DOCUMENTS[..., :6],
            ValueError,
            r"documents must have the last dimension D of queries \(8\), got 6",
            id="another dimension",
        ),
        pytest.param(
            QUERIES.long(),
            DOCUMENTS,
            TypeError,
            r"queries must have dtype .*, got int64",
            id="integers",
        ),
    ],
)
def test_wrong_tensors_are_named(
    queries: Tensor,
    documents: Any,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        xtr_scores(queries, documents, top_k=2)


@without_interpreter
def test_imputed_scores_have_no_gradient() -> None:
    queries = QUERIES.clone().requires_grad_()
    with pytest.raises(ValueError, match="impute must be False if a gradient is needed"):
        xtr_scores(queries, DOCUMENTS, top_k=2, impute=True)


@without_interpreter
@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_offsets_must_end_at_the_number_of_rows(impl: str) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens_d\[-1\] = 5 with 8 rows"):
        xtr_scores(
            QUERIES,
            DOCUMENTS.flatten(0, 1),
            top_k=2,
            cu_seqlens_d=torch.tensor([0, 5]),
            impl=impl,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["tiled", "triton"])
def test_a_training_batch_on_a_gpu_is_within_budget(impl: str) -> None:
    inputs = maxsim_inputs(
        16,
        32,
        32,
        180,
        128,
        layout="right",
        dtype=torch.bfloat16,
        device="cuda",
    )
    assert_xtr_matches(inputs, 256, impl=impl, kind="gradient_bound")


def test_the_threshold_is_right_if_tiles_hold_exactly_the_tokens_to_retrieve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries = torch.ones(1, 1, 1)
    documents = torch.tensor([1.0, 3.0, 2.0]).view(3, 1, 1)
    monkeypatch.setattr(tiles, "CPU_TILE", (1, 1))
    assert xtr_scores(queries, documents, top_k=3).tolist() == [[1, 3, 2]]
    assert xtr_scores(queries, documents, top_k=2).tolist() == [[0, 3, 2]]
