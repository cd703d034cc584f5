"""Properties of the token scatter over odd sizes, masks and numbers that hypothesis thinks of."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tilefold.ops import token_scatter, token_scatter_sparse
from tilefold.testing.token_scatter import TokenScatterInputs, assert_token_scatter_matches, token_scatter_inputs

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = settings(max_examples=8 if triton_interpreted() else 60)
REDUCTIONS = st.sampled_from(["max", "sum"])
ACTIVATIONS = st.sampled_from(["relu", "log1p_relu", "log1p_log1p_relu", "softplus", "none"])
IGNORED = st.sampled_from([(), (0,), (1, 3)])


@st.composite
def problems(draw: st.DrawFn, whole_numbers: bool = False) -> TokenScatterInputs:
    """Small problems with any mask, padded or packed; with whole numbers, ties and exact sums."""
    batch, length, vocab = draw(st.integers(1, 5)), draw(st.integers(1, 40)), draw(st.integers(1, 30))
    inputs = token_scatter_inputs(batch, length, vocab, seed=draw(st.integers(0, 2**20)))
    if whole_numbers:
        inputs = dataclasses.replace(inputs, weights=(2 * inputs.weights).round())
    rows = st.lists(st.booleans(), min_size=length, max_size=length)
    mask = torch.tensor(draw(st.lists(rows, min_size=batch, max_size=batch)))
    inputs = dataclasses.replace(inputs, attention_mask=mask)
    return inputs.packed() if draw(st.booleans()) else inputs


@EXAMPLES
@given(inputs=problems(), reduce=REDUCTIONS, activation=ACTIVATIONS, ignored=IGNORED)
def test_every_problem_stays_within_budget(
    target: Target, inputs: TokenScatterInputs, reduce: str, activation: str, ignored: tuple[int, ...]
) -> None:
    options = {"reduce": reduce, "activation": activation, "ignore_ids": ignored, "impl": target.impl}
    assert_token_scatter_matches(inputs.to(target.device), **options)


@pytest.mark.skipif(triton_interpreted(), reason="the sparse function has no kernels")
@EXAMPLES
@given(
    inputs=problems(whole_numbers=True),
    reduce=REDUCTIONS,
    top_k=st.one_of(st.none(), st.integers(1, 35)),
    min_weight=st.sampled_from([0.0, 0.7, 2.0]),
)
def test_sparse_rows_are_the_best_of_the_dense_ones(
    target: Target, inputs: TokenScatterInputs, reduce: str, top_k: int | None, min_weight: float
) -> None:
    inputs = inputs.to(target.device)
    dense = token_scatter(*inputs.operands, **inputs.layout, reduce=reduce)
    sparse = token_scatter_sparse(*inputs.operands, **inputs.layout, reduce=reduce, top_k=top_k, min_weight=min_weight)
    kept = dense > min_weight
    if top_k is not None:
        kept &= dense.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1) < top_k
    assert torch.equal(sparse.to_dense(), torch.where(kept, dense, 0))
