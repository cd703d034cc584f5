"""Properties of entmax and of its attention over sizes, masks and numbers that hypothesis thinks of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tilefold.ops import entmax, entmax_attention
from tilefold.testing import assert_within_budget
from tilefold.testing.entmax_attention import assert_entmax_attention_matches, entmax_attention_inputs

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="the interpreter has its own, fewer, cases")
EXAMPLES = settings(max_examples=40)
ALPHAS = st.sampled_from([1.0, 1.1, 1.5, 1.7, 2.0])


@EXAMPLES
@given(
    rows=st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=7, max_size=7), min_size=1, max_size=5),
    alpha=ALPHAS,
    shift=st.sampled_from([0.0, -512.0, 4096.0]),
)
def test_rows_sum_to_one_keep_their_order_and_ignore_shifts(
    target: Target, rows: list[list[float]], alpha: float, shift: float
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
    }
)


@EXAMPLES
@given(sizes=SIZES, alpha=ALPHAS, causal=st.booleans(), window=st.sampled_from([None, 0, 3, 30]))
def test_every_problem_stays_within_budget_and_outputs_lie_between_the_values(
    target: Target, sizes: dict[str, Any], alpha: float, causal: bool, window: int | None
) -> None:
    heads = dict(zip(("heads", "kv_heads"), sizes["heads"], strict=True))
    inputs = entmax_attention_inputs(**sizes | heads, device=target.device)
    options = {"impl": target.impl, "alpha": alpha, "causal": causal, "window": window}
    needs = ("v",) if alpha > 1 else ("q", "k", "v")  # a support that rounding decides moves dq and dk, not dv
    assert_entmax_attention_matches(inputs, needs=needs, **options)
    out = entmax_attention(inputs.q, inputs.k, torch.ones_like(inputs.v), **inputs.layout, **options)
    empty = (out == 0).all(dim=-1)
    torch.testing.assert_close(out[~empty], torch.ones_like(out[~empty]), rtol=1e-5, atol=1e-5)
