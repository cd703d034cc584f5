"""Properties of operators over odd sizes, masks and numbers that hypothesis thinks of; MaxSim has
its own file.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import ACTIVATIONS, POOLINGS, close
from tests.ops.matching import (
    TokenScatterInputs,
    assert_entmax_attention_matches,
    assert_lsr_head_matches,
    assert_token_scatter_matches,
    token_scatter_inputs,
)
from tilefold.ops import entmax, entmax_attention, token_scatter, token_scatter_sparse
from tilefold.testing import assert_within_budget
from tilefold.testing.entmax_attention import entmax_attention_inputs
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs, lsr_head_results

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

INTERPRETED = triton_interpreted()
EXAMPLES = settings(max_examples=8 if INTERPRETED else 60)
here_only = pytest.mark.skipif(
    INTERPRETED,
    reason="no kernels, or the interpreter has its own, fewer, cases",
)
ALPHAS = st.sampled_from([1.0, 1.1, 1.5, 1.7, 2.0])
ANY_ACTIVATION = st.sampled_from(ACTIVATIONS)
REDUCTIONS = st.sampled_from(["max", "sum"])


@st.composite
def masked(draw: st.DrawFn, kind: str, whole_numbers: bool = False) -> Any:
    """Small problems with any mask, padded or packed; with whole numbers, ties and exact sums."""
    batch, length = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    vocab, seed = draw(st.integers(1, 40)), draw(st.integers(0, 2**20))
    inputs: Any
    if kind == "head":
        dim = draw(
            st.sampled_from([1, 7, 16, 24]),
        )  # each value is one more compilation of every kernel
        inputs = lsr_head_inputs(batch, length, dim, vocab, seed=seed, bias=draw(st.booleans()))
        full = {
            "hidden": inputs.hidden.round(),
            "weight": (2 * inputs.weight).round(),
            "bias": None,
        }
    else:
        inputs = token_scatter_inputs(batch, length, vocab, seed=seed)
        full = {"weights": (2 * inputs.weights).round()}
    rows = st.lists(st.booleans(), min_size=length, max_size=length)
    mask = torch.tensor(draw(st.lists(rows, min_size=batch, max_size=batch)))
    inputs = dataclasses.replace(inputs, attention_mask=mask, **full if whole_numbers else {})
    return inputs.packed() if draw(st.booleans()) else inputs


@EXAMPLES
@given(
    inputs=masked("head"),
    pooling=st.sampled_from(POOLINGS),
    activation=ANY_ACTIVATION,
    scale=st.sampled_from([1.0, -0.5, 3.0]),
)
def test_any_problem_of_the_head_is_exact(
    target: Target,
    inputs: LSRHeadInputs,
    pooling: str,
    activation: str,
    scale: float,
) -> None:
    inputs = inputs.to(target.device)
    assert_lsr_head_matches(
        inputs,
        pooling=pooling,
        activation=activation,
        logit_scale=scale,
        impl=target.impl,
    )


@EXAMPLES
@given(inputs=masked("head", whole_numbers=True), activation=ANY_ACTIVATION)
def test_ties_are_settled_as_in_the_reference(
    target: Target,
    inputs: LSRHeadInputs,
    activation: str,
) -> None:
    inputs = inputs.to(target.device)
    actual, truth = (
        lsr_head_results(inputs, activation=activation, impl=impl)
        for impl in (target.impl, "reference")
    )
    close(actual, truth, rtol=1e-4, atol=1e-5)


@EXAMPLES
@given(
    inputs=masked("scatter"),
    reduce=REDUCTIONS,
    activation=ANY_ACTIVATION,
    ignored=st.sampled_from([(), (0,), (1, 3)]),
)
def test_every_token_scatter_stays_within_budget(
    target: Target,
    inputs: TokenScatterInputs,
    reduce: str,
    activation: str,
    ignored: tuple[int, ...],
) -> None:
    options = {
        "reduce": reduce,
        "activation": activation,
        "ignore_ids": ignored,
        "impl": target.impl,
    }
    assert_token_scatter_matches(inputs.to(target.device), **options)


@here_only
@EXAMPLES
@given(
    inputs=masked("scatter", whole_numbers=True),
    reduce=REDUCTIONS,
    top_k=st.one_of(st.none(), st.integers(1, 35)),
    min_weight=st.sampled_from([0.0, 0.7, 2.0]),
)
def test_sparse_rows_are_the_best_of_the_dense_ones(
    target: Target,
    inputs: TokenScatterInputs,
    reduce: str,
    top_k: int | None,
    min_weight: float,
) -> None:
    inputs = inputs.to(target.device)
    dense = token_scatter(*inputs.operands, **inputs.layout, reduce=reduce)
    sparse = token_scatter_sparse(
        *inputs.operands,
        **inputs.layout,
        reduce=reduce,
        top_k=top_k,
        min_weight=min_weight,
    )
    kept = dense > min_weight
    if top_k is not None:
        kept &= dense.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1) < top_k
    assert torch.equal(sparse.to_dense(), torch.where(kept, dense, 0))


@here_only
@EXAMPLES
@given(
    rows=st.lists(
        st.lists(st.floats(-1e4, 1e4, width=32), min_size=7, max_size=7),
        min_size=1,
        max_size=5,
    ),
    alpha=ALPHAS,
    shift=st.sampled_from([0.0, -512.0, 4096.0]),
)
def test_rows_sum_to_one_keep_their_order_and_ignore_shifts(
    target: Target,
    rows: list[list[float]],
    alpha: float,
    shift: float,
) -> None:
    x = (torch.tensor(rows) / 64).round() + shift  # exact in fp32 after the shift
    p = entmax(x.to(target.device), alpha, impl=target.impl).cpu()
    assert float((p.sum(dim=-1) - 1).abs().max()) <= 1e-6
    assert (p >= 0).all() and (p.gather(-1, x.argsort(dim=-1)).diff(dim=-1) >= -1e-6).all()
    assert_within_budget(p, entmax((x - shift).double(), alpha, impl="reference"))


SIZES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads": st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
        "nq": st.integers(1, 40),
        "dim": st.sampled_from([8, 24]),  # each value is one more compilation of every kernel
        "nk": st.sampled_from([1, 5, 64, 70, 200]),
        "layout": st.sampled_from(["full", "right", "left", "holes", "packed"]),
        "seed": st.integers(0, 2**20),
    },
)


@here_only
@EXAMPLES
@given(sizes=SIZES, alpha=ALPHAS, causal=st.booleans(), window=st.sampled_from([None, 0, 3, 30]))
def test_every_problem_stays_within_budget_and_outputs_lie_between_the_values(
    target: Target,
    sizes: dict[str, Any],
    alpha: float,
    causal: bool,
    window: int | None,
) -> None:
    heads = dict(zip(("heads", "kv_heads"), sizes["heads"], strict=True))
    inputs = entmax_attention_inputs(**sizes | heads, device=target.device)
    options = {"impl": target.impl, "alpha": alpha, "causal": causal, "window": window}
    needs = (
        ("v",) if alpha > 1 else ("q", "k", "v")
    )  # a support that rounding decides moves dq and dk, not dv
    assert_entmax_attention_matches(inputs, needs=needs, **options)
    out = entmax_attention(
        inputs.q,
        inputs.k,
        torch.ones_like(inputs.v),
        **inputs.layout,
        **options,
    )
    empty = (out == 0).all(dim=-1)
    torch.testing.assert_close(out[~empty], torch.ones_like(out[~empty]), rtol=1e-5, atol=1e-5)
