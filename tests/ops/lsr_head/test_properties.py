"""Properties of the LSR head over odd sizes, masks and numbers that hypothesis thinks of."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import ACTIVATIONS, INTERPRETED, POOLINGS, close
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
def test_any_problem_is_exact(
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
