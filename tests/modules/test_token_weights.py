"""TokenWeights beside a loop over tokens, with gradients; StaticQuery in sparse rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.modules.batches import IGNORED, Batch, batch, same
from tests.modules.test_head_pooling import ACT
from tilefold.losses import TermRecallLoss
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
    module = TokenWeights(6, 19, activation, scale, IGNORED).double().eval()
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


@pytest.mark.parametrize("form", ["features", "packed"])
def test_negative_weights_keep_their_gradient_while_training(form: str) -> None:
    case = batch(vocab=19)
    case.ids[2, 1:4] = 7
    module = TokenWeights(6, 19, "none", ignore_ids=IGNORED).double()
    rows = []
    for b in range(len(case.mask)):
        row = [torch.zeros((), dtype=torch.float64)] * 19
        for v in set(case.ids[b].tolist()) - set(IGNORED):
            found = case.mask[b].bool() & (case.ids[b] == v)
            row[v] = (case.hidden[b][found] @ module.linear.weight[0] + module.linear.bias[0]).max()
        rows.append(torch.stack(row))
    expected = torch.stack(rows)
    assert (expected < 0).any() and (expected > 0).any()
    same(module(getattr(case, form)(case.hidden))["sentence_embedding"], expected, [case.hidden, *module.parameters()])
    module.eval()
    torch.testing.assert_close(module(getattr(case, form)(case.hidden))["sentence_embedding"], expected.clamp(min=0))


@pytest.mark.parametrize("form", ["features", "packed"])
def test_weights_saturate_as_frequencies_do_in_bm25_and_train_as_they_are(form: str) -> None:
    case = batch(vocab=19)
    case.ids[2, 1:4] = 7
    plain = TokenWeights(6, 19, "none", ignore_ids=IGNORED).double()
    module = TokenWeights(6, 19, "none", ignore_ids=IGNORED, saturation=0.1).double()
    module.load_state_dict(plain.state_dict())
    inputs = getattr(case, form)
    same(
        module(inputs(case.hidden))["sentence_embedding"],
        plain(inputs(case.hidden))["sentence_embedding"],
        [case.hidden],
    )
    k1, frequency = 10.0, 100 * plain.eval()(inputs(case.hidden))["sentence_embedding"]
    expected = frequency * (k1 + 1) / (frequency + k1)  # BM25 without length normalisation
    module.eval()
    weights = module(inputs(case.hidden))["sentence_embedding"]
    torch.testing.assert_close(weights * (k1 + 1), expected)
    assert 0 < (weights > 0).sum() < (case.hidden.size(0) * 19) and weights.max() < 1
    rows = module.fused_scores(inputs(case.hidden), None, out_dtype=None, impl="auto", sparse=SparseOptions(None, 0.0))
    torch.testing.assert_close(rows.to_dense(), weights)
    with pytest.raises(ValueError, match="saturation must be a finite number above 0 or None, got 0"):
        TokenWeights(6, 19, saturation=0)


def test_the_loss_of_deepct_reaches_terms_below_zero() -> None:
    case = batch(vocab=19)
    module = TokenWeights(6, 19, "none", ignore_ids=IGNORED).double()
    with torch.no_grad():
        module.linear.weight.zero_()
        module.linear.bias.fill_(-0.5)
    documents = module(case.features(case.hidden))["sentence_embedding"]
    queries = torch.zeros(4, 19, dtype=torch.float64)
    queries[0, case.ids[0, 1]] = 1.0
    loss = TermRecallLoss().compute_loss_from_embeddings([queries, documents])
    terms = int((documents != 0).sum())
    assert loss.item() == pytest.approx((0.25 * (terms - 1) + 2.25) / terms)  # (-.5 - 0)^2, once (-.5 - 1)^2
    loss.backward()
    assert module.linear.bias.grad.item() == pytest.approx((-1.0 * (terms - 1) - 3.0) / terms)
