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
from tests.ops.samples import saved_for_backward
from tests.refusals import refused
from tilefold.ops import maxsim, xtr_scores
from tilefold.ops.maxsim import quantize_tokens, tiles
from tilefold.testing import assert_within_budget, nan_poisoned_empty
from tilefold.testing.maxsim import maxsim_inputs
from tilefold.testing.padding import LAYOUTS

INTERPRETED = triton_interpreted()
here = pytest.mark.skipif(INTERPRETED, reason="this part needs no interpreter")
SIZES = (3, 4, 5, 9, 16) if INTERPRETED else (5, 7, 6, 23, 40)

# one query of three tokens, three documents of two tokens, D = 1: similarities are products
Q = torch.tensor([[[1.0], [2.0], [-1.0]]], dtype=torch.float64)
D = torch.tensor([[[3.0], [1.0]], [[2.0], [-4.0]], [[0.5], [-1.0]]], dtype=torch.float64)


def score(top_k: int, queries: Tensor = Q, documents: Tensor = D, **options: Any) -> list[float]:
    found = [
        xtr_scores(queries, documents, top_k=top_k, impl=impl, **options)
        for impl in ("reference", "tiled")
    ]
    torch.testing.assert_close(found[1], found[0], equal_nan=True)
    return found[0].flatten().tolist()


@here
def test_scores_by_hand() -> None:
    # token 0: 3 1 | 2 -4 | .5 -1; token 1: 6 2 | 4 -8 | 1 -2; token 2: -3 -1 | -2 4 | -.5 1
    assert score(1) == [(3 + 6) / 2, 4.0, 0.0]
    assert score(2) == [(3 + 6) / 2, (2 + 4 + 4) / 3, 1.0]
    assert score(3) == [(3 + 6) / 2, (2 + 4 + 4) / 3, 1.0]  # tokens 0 and 1 find document 0 twice
    assert score(6) == score(99) == [(3 + 6 - 1) / 3, (2 + 4 + 4) / 3, (0.5 + 1 + 1) / 3]
    assert score(99) == maxsim(Q, D, reduction="mean").flatten().tolist()


@here
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


@here
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


@here
def test_all_similarities_equal_to_the_last_place_are_retrieved() -> None:
    documents = torch.tensor([[[2.0], [1.0]], [[1.0], [1.0]], [[1.0], [0.0]]], dtype=torch.float64)
    one = Q[:, :1]
    assert score(2, one, documents) == [2.0, 1.0, 1.0]
    assert score(1, one, documents) == [2.0, 0.0, 0.0]
    for impl in ("reference", "tiled"):
        leaf = documents.clone().requires_grad_()
        xtr_scores(one, leaf, top_k=2, impl=impl).sum().backward()
        assert leaf.grad.flatten().tolist() == [1, 0, 1, 0, 1, 0]  # the lowest of equal tokens


@here
def test_nan_is_retrieved_takes_a_place_and_is_seen() -> None:
    documents = D.clone()
    documents[1, 0] = math.nan
    found = score(1, documents=documents)
    assert found[0] == 0 and math.isnan(found[1]) and found[2] == 0
    found = score(2, documents=documents)
    assert found[0] == (3 + 6) / 2 and math.isnan(found[1])
    masked = torch.tensor([[1, 1], [0, 1], [1, 1]])
    assert not any(math.isnan(x) for x in score(2, documents=documents, document_mask=masked))
    queries = Q.clone()
    queries[0, 1] = math.nan
    assert all(math.isnan(x) for x in score(1, queries))
    assert not any(math.isnan(x) for x in score(1, queries, query_mask=torch.tensor([[1, 0, 1]])))


@pytest.mark.parametrize("top_k", [1, 17, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_gradients_are_within_budget(target: Target, layout: str, top_k: int) -> None:
    inputs = maxsim_inputs(*SIZES, layout=layout, device=target.device)
    with nan_poisoned_empty():
        assert_xtr_matches(inputs, top_k, impl=target.impl)
    assert_xtr_matches(inputs, top_k, impl=target.impl, normalize=True, needs="d")
    assert_xtr_matches(inputs, top_k, impl=target.impl, impute=True, needs="")


@pytest.mark.parametrize(
    "dtype",
    [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16],
    ids=str,
)
def test_half_precision_retrieves_on_exact_similarities_and_repeats_to_the_bit(
    target: Target,
    dtype: torch.dtype,
) -> None:
    inputs = maxsim_inputs(*SIZES, layout="holes", dtype=dtype, device=target.device)
    results, again = (
        assert_xtr_matches(inputs, 12, impl=target.impl, kind="gradient_bound") for _ in range(2)
    )
    assert results["scores"].dtype == torch.float32 and results["dqueries"].dtype == dtype
    assert all(torch.equal(value, again[name]) for name, value in results.items())


@here
def test_small_tiles_give_what_large_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in ("holes", "packed"):
        inputs = maxsim_inputs(*SIZES, layout=layout)
        whole = xtr_results(inputs, 12)
        monkeypatch.setattr(tiles, "CPU_TILE", (4, 100))
        for name, value in xtr_results(inputs, 12).items():
            torch.testing.assert_close(value, whole[name])
        monkeypatch.undo()


def test_a_batch_wider_than_a_tile(target: Target) -> None:
    sizes = (
        (3, 4, 5, 9, 16) if INTERPRETED else (40, 70, 32, 40, 16)
    )  # 1,280 query tokens, 2,800 document tokens
    assert_xtr_matches(
        maxsim_inputs(*sizes, layout="right", device=target.device, seed=3),
        256,
        impl=target.impl,
    )


@here
def test_nothing_of_the_size_of_the_similarities_is_kept() -> None:
    inputs = maxsim_inputs(4, 5, 6, 70, 8)
    saved = saved_for_backward(
        lambda: xtr_scores(inputs.queries.requires_grad_(), inputs.documents, top_k=9),
    )
    own = [t for t in saved if t.size(-1) != 8]
    assert sorted(tuple(t.shape) for t in own) == [(4, 5), (5, 24)]
    assert {t.dtype for t in own} == {torch.float32, torch.uint16}


@here
def test_autocast() -> None:
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


@here
def test_arguments_that_do_not_fit_are_named() -> None:
    queries, documents = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    for bad in (0, -1, 2.0, True, None):
        refused(
            ValueError,
            "top_k must be a positive integer, got",
            xtr_scores,
            queries,
            documents,
            top_k=bad,
        )
    with pytest.raises(TypeError, match=r"documents must be a torch\.Tensor, got QuantizedTokens"):
        xtr_scores(queries, quantize_tokens(documents), top_k=2)
    with pytest.raises(ValueError, match="impute must be False where a gradient is asked for"):
        xtr_scores(queries.clone().requires_grad_(), documents, top_k=2, impute=True)
    with pytest.raises(ValueError, match=r"documents must have the D of queries \(8\), got 6"):
        xtr_scores(queries, documents[..., :6], top_k=2)
    refused(
        TypeError,
        r"queries must have dtype .*, got int64",
        xtr_scores,
        queries.long(),
        documents,
        top_k=2,
    )
    for impl in ("reference", "tiled"):
        with pytest.raises(ValueError, match=r"cu_seqlens_d\[-1\] = 5 with 8 rows"):
            xtr_scores(
                queries,
                documents.flatten(0, 1),
                top_k=2,
                cu_seqlens_d=torch.tensor([0, 5]),
                impl=impl,
            )


@pytest.mark.gpu
def test_a_training_batch_on_a_gpu_is_within_budget() -> None:
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
    for impl in ("tiled", "triton"):
        assert_xtr_matches(inputs, 256, impl=impl, kind="gradient_bound")


def test_the_threshold_is_right_where_tiles_make_up_exactly_the_tokens_to_retrieve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries, documents = torch.ones(1, 1, 1), torch.tensor([1.0, 3.0, 2.0]).view(3, 1, 1)
    monkeypatch.setattr(tiles, "CPU_TILE", (1, 1))
    assert xtr_scores(queries, documents, top_k=3).tolist() == [[1, 3, 2]]
    assert xtr_scores(queries, documents, top_k=2).tolist() == [[0, 3, 2]]
