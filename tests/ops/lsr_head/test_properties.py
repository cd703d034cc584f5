"""Properties of the LSR head over odd sizes, masks and numbers that hypothesis thinks of."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import ACTIVATIONS, INTERPRETED, POOLINGS, close
from tilefold.ops import lsr_head, lsr_head_sparse
from tilefold.testing.lsr_head import LSRHeadInputs, assert_lsr_head_matches, lsr_head_inputs, lsr_head_results

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = settings(max_examples=8 if INTERPRETED else 60)
ANY_POOLING, ANY_ACTIVATION = st.sampled_from(POOLINGS), st.sampled_from(ACTIVATIONS)


@st.composite
def problems(draw: st.DrawFn, whole_numbers: bool = False) -> LSRHeadInputs:
    """Small problems with any mask, padded or packed; with whole numbers, equal logits are exactly equal."""
    batch, length = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    dim = draw(st.sampled_from([1, 7, 16, 24]))  # each value is one more compilation of every kernel
    vocab = draw(st.integers(1, 40))
    inputs = lsr_head_inputs(batch, length, dim, vocab, seed=draw(st.integers(0, 2**20)), bias=draw(st.booleans()))
    if whole_numbers:
        inputs = dataclasses.replace(
            inputs, hidden=inputs.hidden.round(), weight=(2 * inputs.weight).round(), bias=None
        )
    rows = st.lists(st.booleans(), min_size=length, max_size=length)
    mask = torch.tensor(draw(st.lists(rows, min_size=batch, max_size=batch)))
    inputs = dataclasses.replace(inputs, attention_mask=mask)
    return inputs.packed() if draw(st.booleans()) else inputs


@EXAMPLES
@given(inputs=problems(), pooling=ANY_POOLING, activation=ANY_ACTIVATION, scale=st.sampled_from([1.0, -0.5, 3.0]))
def test_every_problem_stays_within_budget(
    target: Target, inputs: LSRHeadInputs, pooling: str, activation: str, scale: float
) -> None:
    inputs = inputs.to(target.device)
    assert_lsr_head_matches(inputs, pooling=pooling, activation=activation, logit_scale=scale, impl=target.impl)


@EXAMPLES
@given(inputs=problems(whole_numbers=True), activation=ANY_ACTIVATION)
def test_ties_are_settled_as_in_the_reference(target: Target, inputs: LSRHeadInputs, activation: str) -> None:
    inputs = inputs.to(target.device)
    found, truth = (lsr_head_results(inputs, activation=activation, impl=impl) for impl in (target.impl, "reference"))
    close(found, truth, rtol=1e-4, atol=1e-5)


@EXAMPLES
@given(inputs=problems(), extra=st.integers(0, 20))
def test_padding_changes_nothing(target: Target, inputs: LSRHeadInputs, extra: int) -> None:
    inputs = inputs.to(target.device)
    if inputs.attention_mask is None:
        return
    longer = dataclasses.replace(
        inputs,
        hidden=torch.nn.functional.pad(inputs.hidden, (0, 0, 0, extra), value=float("nan")),
        attention_mask=torch.nn.functional.pad(inputs.attention_mask, (0, extra)),
    )
    close(*(lsr_head_results(each, needs=(), impl=target.impl) for each in (longer, inputs)))


@EXAMPLES
@given(inputs=problems(), data=st.data())
def test_sequences_do_not_see_each_other(target: Target, inputs: LSRHeadInputs, data: st.DataObject) -> None:
    if inputs.attention_mask is None:
        return
    order = torch.tensor(data.draw(st.permutations(range(inputs.hidden.size(0)))))
    inputs, order = inputs.to(target.device), order.to(target.device)
    shuffled = lsr_head(
        inputs.hidden[order], inputs.weight, inputs.bias, attention_mask=inputs.attention_mask[order], impl=target.impl
    )
    straight = lsr_head(inputs.hidden, inputs.weight, inputs.bias, **inputs.layout, impl=target.impl)
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-5, atol=1e-6)


def top_entries(dense: Tensor, top_k: int | None, min_weight: float) -> Tensor:
    """What lsr_head_sparse should keep of ``dense``, as a dense tensor with zeros elsewhere."""
    kept = dense > min_weight
    if top_k is not None:
        rank = dense.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
        kept &= rank < top_k
    return torch.where(kept, dense, 0)


@EXAMPLES
@given(
    inputs=problems(whole_numbers=True),
    top_k=st.one_of(st.none(), st.integers(1, 45)),
    min_weight=st.sampled_from([0.0, 0.7, 1.5]),
)
def test_sparse_rows_are_the_best_of_the_dense_ones(
    target: Target, inputs: LSRHeadInputs, top_k: int | None, min_weight: float
) -> None:
    inputs = inputs.to(target.device)
    operands = (inputs.hidden, inputs.weight, inputs.bias)
    dense = lsr_head(*operands, **inputs.layout, impl=target.impl)
    sparse = lsr_head_sparse(*operands, **inputs.layout, top_k=top_k, min_weight=min_weight, impl=target.impl)
    assert torch.equal(sparse.to_dense(), top_entries(dense, top_k, min_weight))
