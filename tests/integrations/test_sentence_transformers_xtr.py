"""XTR scoring functions for MultiVectorEncoder losses equal the stock ones: scores, gradients, losses."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.multi_vector_models import (
    NEGATIVES,
    POSITIVES,
    QUERIES,
    build_colbert,
    needs_stock,
    problem,
    results,
)
from tests.integrations.splade_models import FP32_BUDGET, assert_close
from tilefold.integrations.sentence_transformers import multi_vector

scoring = pytest.importorskip("sentence_transformers.multi_vector_encoder.scoring")

NAMES = ["xtr_scores", "xtr_kd_scores", "xtr_scores_pairwise"]
pytestmark = [needs_stock, pytest.mark.filterwarnings("ignore:.*documents without any scoreable token.*")]


@pytest.mark.parametrize("masked", ["both", "neither", "weights"])
@pytest.mark.parametrize("top_k", [1, 7, 500])
@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_equal_those_of_the_stock_function(name: str, top_k: int, masked: str) -> None:
    arguments = problem(name)
    if masked == "neither":  # zero rows, which both then read as padding
        for side in ("queries", "documents"):
            arguments[f"{side}_embeddings"] *= arguments.pop(f"{side}_mask")[..., None]
    if masked == "weights":
        weights = torch.rand(3, 5, generator=torch.Generator().manual_seed(3))
        arguments["queries_mask"] = arguments["queries_mask"] * weights
    expected = results(getattr(scoring, name), arguments, top_k=top_k)
    found = results(getattr(multi_vector, name), arguments, top_k=top_k)
    assert (expected[0] < -1e7).any()
    torch.testing.assert_close(found[0], expected[0])
    for mine, stock in zip(found[1:], expected[1:], strict=True):
        assert_close(mine, stock, FP32_BUDGET, "gradients")


def test_losses_with_configured_scores_equal_the_stock_ones() -> None:
    from sentence_transformers.multi_vector_encoder import losses

    model = build_colbert()
    features = [dict(model.preprocess(texts)) for texts in (QUERIES, POSITIVES, NEGATIVES)]
    teacher = torch.tensor([[2.0, 0.5], [1.0, 1.5], [0.1, 0.0], [3.0, -1.0]])
    for kind, name, labels in (
        ("MultiVectorMultipleNegativesRankingLoss", "XTRScores", None),
        ("MultiVectorDistillKLDivLoss", "XTRKDScores", teacher),
    ):
        both = []
        for module in (scoring, multi_vector):
            model.zero_grad(set_to_none=True)
            loss = getattr(losses, kind)(model, similarity_fct=getattr(module, name)(top_k=8))
            value = loss([dict(part) for part in features], labels)
            value.backward()
            both.append((value.detach(), model[1].linear.weight.grad.clone(), loss.get_config_dict()["similarity_fct"]))
        torch.testing.assert_close(both[1][0], both[0][0])
        assert_close(both[1][1], both[0][1], FP32_BUDGET, "gradient of the projection")
        assert both[1][2] == both[0][2]


def test_arguments_that_do_not_fit_are_named() -> None:
    arguments = problem("xtr_scores")
    with pytest.raises(ValueError, match="top_k must be a positive integer, got 0"):
        multi_vector.xtr_scores(**arguments, top_k=0)
    with pytest.raises(ValueError, match=r"documents_mask must have shape \[3, 2, 9\]"):
        multi_vector.xtr_scores(**{**arguments, "documents_mask": arguments["documents_mask"][..., 1:]})
    queries = {key: arguments[key][:2] for key in ("queries_embeddings", "queries_mask")}
    with pytest.raises(ValueError, match="one group for each of the 2 queries"):
        multi_vector.xtr_kd_scores(**{**arguments, **queries})


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_scores_and_gradients_equal_the_reference_on_the_cpu(name: str) -> None:
    expected = results(getattr(multi_vector, name), problem(name), top_k=7, impl="reference")
    for mine, truth in zip(
        results(getattr(multi_vector, name), problem(name, device="cuda"), top_k=7), expected, strict=True
    ):
        torch.testing.assert_close(mine.cpu(), truth, rtol=1e-4, atol=1e-4)
