"""EpicPooling beside its formula in the order of the framework, with gradients: plain, fused, padded and packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from tests.modules.batches import IGNORED, Batch, batch, same
from tilefold.modules import EpicPooling
from tilefold.modules.fused_pooling import Head


def by_hand(case: Batch, module: EpicPooling, states: Tensor, bias: bool = True) -> Tensor:
    """Logits times importance, softplus and log1p, the maximum over all positions, masked ones 0; then the quality."""
    rows = []
    for b in range(len(case.mask)):
        values = []
        for s in range(case.mask.size(1)):
            logit = case.weight @ case.hidden[b, s] + (case.bias if bias else 0)
            inner = softplus(module.importance.weight[0] @ states[b, s] + module.importance.bias[0])
            counts = bool(case.mask[b, s]) and int(case.ids[b, s]) not in IGNORED
            logit = logit * torch.log(1 + inner) if counts else torch.zeros_like(logit)
            values.append(torch.log(1 + softplus(logit)))
        first = int(case.mask[b].nonzero()[0])
        quality = torch.sigmoid(module.quality.weight[0] @ states[b, first] + module.quality.bias[0])
        rows.append(torch.stack(values).max(dim=0).values * quality)
    return torch.stack(rows)


@pytest.fixture
def module() -> EpicPooling:
    torch.manual_seed(3)
    return EpicPooling(6, IGNORED).double()


def states_of(case: Batch) -> Tensor:
    return torch.randn(case.hidden.shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("form", ["features", "packed"])
def test_plain_and_fused_are_the_formula(module: EpicPooling, form: str, left: bool) -> None:
    case = batch(left=left)
    states = states_of(case)
    leaves = [*case.leaves, states, *module.parameters()]
    expected = by_hand(case, module, states)
    assert (expected >= 0.5265 * torch.sigmoid(module.quality(states)).min()).all()

    def features(tokens: Tensor) -> dict[str, Any]:
        made: dict[str, Any] = getattr(case, form)(tokens, states=states)
        return made | {"all_layer_embeddings": (None, made["states"])}

    same(module(features(case.logits()))["sentence_embedding"], expected, leaves)
    asked = features(case.hidden)
    hidden = asked.pop("token_embeddings")
    head = Head(hidden.squeeze(0) if form == "packed" else hidden, case.weight, case.bias)
    same(module.fused_scores(asked, head, out_dtype=None, impl="auto", sparse=None), expected, leaves)


def test_a_head_without_a_bias(module: EpicPooling) -> None:
    case = batch()
    states = states_of(case)
    features = case.features(case.hidden) | {"all_layer_embeddings": (states,)}
    head = Head(features.pop("token_embeddings"), case.weight, None)
    got = module.fused_scores(features, head, out_dtype=None, impl="auto", sparse=None)
    same(got, by_hand(case, module, states, bias=False), [*case.leaves, states, *module.parameters()])


def test_hidden_states_that_are_not_put_out_are_asked_for(module: EpicPooling) -> None:
    case = batch()
    with pytest.raises(
        ValueError,
        match=r"got \['attention_mask', .*'token_embeddings'.*\]; .*" r'config_kwargs=\{"output_hidden_states": True\}',
    ):
        module(case.features(case.logits()))


def test_under_autocast_scores_are_fp32_on_both_ways(module: EpicPooling) -> None:
    case = batch()
    module.float()
    hidden, weight, bias = (leaf.detach().float() for leaf in case.leaves)
    states = (torch.randn(case.hidden.shape),)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = torch.nn.functional.linear(hidden, weight, bias)
        plain = module(case.features(logits) | {"all_layer_embeddings": states})["sentence_embedding"]
        features = case.features(hidden) | {"all_layer_embeddings": states}
        head = Head(features.pop("token_embeddings"), weight, bias)
        fused = module.fused_scores(features, head, out_dtype=None, impl="auto", sparse=None)
    assert plain.dtype == fused.dtype == torch.float32
    torch.testing.assert_close(fused, plain, rtol=0.03, atol=0.03)  # bf16 logits
