"""TokenWeights beside a loop over tokens, with gradients; StaticQuery in sparse rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.modules.batches import IGNORED, Batch, batch, same
from tests.modules.test_head_pooling import ACT
from tilefold.modules import TokenWeights
from tilefold.modules.fused_pooling import SparseOptions


def by_hand(case: Batch, module: TokenWeights, activation: str, ignored: tuple[int, ...]) -> Tensor:
    rows = []
    for b in range(len(case.mask)):
        row = [torch.zeros((), dtype=torch.float64)] * 19
        for s in range(case.mask.size(1)):
            v = int(case.ids[b, s])
            if case.mask[b, s] and v not in ignored:
                weight = ACT[activation](module.linear.weight[0] @ case.hidden[b, s] + module.linear.bias[0])
                weight = weight if module.scale is None else weight * module.scale[0]
                row[v] = weight if weight > row[v] else row[v]
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize("form", ["features", "packed"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("activation", ACT)
def test_a_term_has_the_largest_weight_of_its_tokens(activation: str, scale: float | None, form: str) -> None:
    case = batch(vocab=19)
    case.ids[2, 1:4] = 7  # a term that stands three times
    module = TokenWeights(6, 19, activation, scale, IGNORED).double()
    leaves = [case.hidden, *module.parameters()]
    expected = by_hand(case, module, activation, IGNORED)
    assert (expected != 0).any() and not expected[:, list(IGNORED)].any()
    features: dict[str, Any] = module(getattr(case, form)(case.hidden))
    same(features["sentence_embedding"], expected, leaves)
    tokens = features["token_weights"]
    assert tokens.shape == (case.mask.shape if form == "features" else (int(case.mask.sum()),))
    rows = module.fused_scores(
        getattr(case, form)(case.hidden), None, out_dtype=None, impl="auto", sparse=SparseOptions(None, 0.0)
    )
    assert rows.layout == torch.sparse_csr
    torch.testing.assert_close(rows.to_dense(), expected.detach(), rtol=1e-12, atol=0)


def test_more_special_tokens_than_the_operator_compares_with() -> None:
    case = batch(vocab=19)
    few, many = (TokenWeights(6, 19, "softplus", ignore_ids=ids) for ids in (IGNORED, [*IGNORED, *range(100, 180)]))
    many.load_state_dict(few.state_dict())
    for form in ("features", "packed"):
        got, expected = (module.double()(getattr(case, form)(case.hidden)) for module in (many, few))
        same(got["sentence_embedding"], expected["sentence_embedding"], [case.hidden])
