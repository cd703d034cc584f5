"""Properties of MaxSim over odd sizes, masks and numbers that hypothesis thinks of."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tilefold.ops import maxsim
from tilefold.testing.maxsim import PAIRINGS, MaxSimInputs, assert_maxsim_matches, maxsim_inputs, maxsim_results

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = settings(max_examples=3 if triton_interpreted() else 60)
MODES = st.sampled_from(["exclude", "zero"])


@st.composite
def problems(draw: st.DrawFn, whole_numbers: bool = False) -> MaxSimInputs:
    """Small problems with any masks, padded or packed; with whole numbers, equal similarities are exactly equal."""
    sizes = [draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 20)), draw(st.integers(1, 40))]
    dim = draw(st.sampled_from([1, 7, 16, 24]))
    inputs = maxsim_inputs(
        *sizes, dim, pairing=draw(st.sampled_from(PAIRINGS)), layout="holes", seed=draw(st.integers(0, 2**20))
    )
    if whole_numbers:
        inputs = dataclasses.replace(inputs, queries=inputs.queries.round(), documents=(2 * inputs.documents).round())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    kept = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    masks = {
        name: torch.rand(getattr(inputs, name).shape, generator=generator) < kept
        for name in ("query_mask", "document_mask")
        if draw(st.booleans())
    }
    inputs = dataclasses.replace(inputs, **masks)
    return inputs.packed(draw(st.sampled_from(["", "q", "d", "qd"])))


@EXAMPLES
@given(inputs=problems(), mode=MODES, temperature=st.sampled_from([None, None, 0.3]), normalize=st.booleans())
def test_every_problem_stays_within_budget(
    target: Target, inputs: MaxSimInputs, mode: str, temperature: float | None, normalize: bool
) -> None:
    normalize = normalize and inputs.queries.size(-1) > 1  # unit vectors of one entry have no gradient but noise
    options = {"mask_mode": mode, "temperature": temperature, "normalize": normalize}
    assert_maxsim_matches(inputs.to(target.device), impl=target.impl, **options)


@EXAMPLES
@given(inputs=problems(whole_numbers=True), mode=MODES)
def test_ties_are_settled_as_in_the_reference(target: Target, inputs: MaxSimInputs, mode: str) -> None:
    inputs = inputs.to(target.device)
    found = maxsim_results(inputs, mask_mode=mode, impl=target.impl)
    for name, value in maxsim_results(inputs, mask_mode=mode, impl="reference").items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@EXAMPLES
@given(inputs=problems(), data=st.data())
def test_pairs_do_not_see_each_other(target: Target, inputs: MaxSimInputs, data: st.DataObject) -> None:
    if inputs.pairing != "all":
        return
    inputs = inputs.to(target.device)
    straight = maxsim(inputs.queries, inputs.documents, **inputs.layout, impl=target.impl)
    every = torch.cartesian_prod(*(torch.arange(n) for n in straight.shape)).view(-1, 2)
    order = torch.tensor(data.draw(st.permutations(range(every.size(0)))))
    pairs = every[order].to(target.device)
    layout = inputs.layout | {"pairing": pairs}
    shuffled = maxsim(inputs.queries, inputs.documents, **layout, impl=target.impl)
    torch.testing.assert_close(shuffled, straight[pairs[:, 0], pairs[:, 1]], rtol=1e-5, atol=1e-5)
