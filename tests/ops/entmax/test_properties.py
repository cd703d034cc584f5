"""Properties of entmax and of its attention over sizes, masks and numbers that hypothesis thinks of."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tilefold.ops import entmax, entmax_attention
from tilefold.testing import assert_within_budget
from tilefold.testing.entmax_attention import (
    EntmaxAttentionInputs,
    assert_entmax_attention_matches,
    entmax_attention_inputs,
)

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


@st.composite
def problems(draw: st.DrawFn) -> EntmaxAttentionInputs:
    kv_heads = draw(st.integers(1, 2))
    return entmax_attention_inputs(
        draw(st.integers(1, 3)),
        kv_heads * draw(st.integers(1, 2)),
        draw(st.integers(1, 40)),
        draw(st.sampled_from([8, 24])),  # each value is one more compilation of every kernel
        nk=draw(st.sampled_from([1, 5, 64, 70, 200])),
        kv_heads=kv_heads,
        layout=draw(st.sampled_from(["full", "right", "left", "holes", "packed"])),
        seed=draw(st.integers(0, 2**20)),
    )


@EXAMPLES
@given(inputs=problems(), alpha=ALPHAS, causal=st.booleans(), window=st.sampled_from([None, 0, 3, 30]))
def test_every_problem_stays_within_budget(
    target: Target, inputs: EntmaxAttentionInputs, alpha: float, causal: bool, window: int | None
) -> None:
    fields = {name: getattr(inputs, name).to(target.device) for name in ("q", "k", "v", "dout")}
    layout = {name: tensor.to(target.device) for name, tensor in inputs.layout.items()}
    moved = EntmaxAttentionInputs(**fields, layout=layout)
    needs = ("v",) if alpha > 1 else ("q", "k", "v")  # a support that rounding decides moves dq and dk, not dv
    assert_entmax_attention_matches(moved, impl=target.impl, alpha=alpha, causal=causal, window=window, needs=needs)


@EXAMPLES
@given(inputs=problems(), alpha=ALPHAS)
def test_outputs_lie_between_the_values(target: Target, inputs: EntmaxAttentionInputs, alpha: float) -> None:
    ones = torch.ones_like(inputs.v, device=target.device)
    layout = {name: tensor.to(target.device) for name, tensor in inputs.layout.items()}
    q, k = inputs.q.to(target.device), inputs.k.to(target.device)
    out = entmax_attention(q, k, ones, alpha=alpha, impl=target.impl, **layout)
    empty = (out == 0).all(dim=-1)
    torch.testing.assert_close(out[~empty], torch.ones_like(out[~empty]), rtol=1e-5, atol=1e-5)
