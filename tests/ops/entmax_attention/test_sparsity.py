"""What ``return_stats`` says about sparsity, counted again from dense probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.refusals import refused
from tilefold.ops import entmax, entmax_attention
from tilefold.ops.entmax_attention import EntmaxStats, live_blocks
from tilefold.testing.entmax_attention import EntmaxAttentionInputs, entmax_attention_inputs

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="counts by torch operations")


def statistics(inputs: EntmaxAttentionInputs, impl: str, **options: Any) -> EntmaxStats:
    result = entmax_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        return_stats="blocks",
        impl=impl,
        **inputs.layout,
        **options,
    )
    assert isinstance(result, tuple)
    return result[1]


def dense(
    inputs: EntmaxAttentionInputs,
    alpha: float,
    causal: bool,
    window: int | None,
) -> list[tuple[Tensor, Tensor]]:
    """Probabilities ``[H, nq, nk]`` and which pairs may attend, of every sequence."""
    results = []
    packed = "cu_seqlens_q" in inputs.layout
    ends = [inputs.layout[f"cu_seqlens_{side}"].tolist() for side in "qk"] if packed else []
    for b in range(len(ends[0]) - 1 if packed else inputs.q.size(0)):
        if packed:
            q = inputs.q[ends[0][b] : ends[0][b + 1]].transpose(0, 1)
            k = inputs.k[ends[1][b] : ends[1][b + 1]].transpose(0, 1)
        else:
            q, k = inputs.q[b], inputs.k[b]
        k = k.repeat_interleave(q.size(0) // k.size(0), dim=0)
        nq, nk = q.size(1), k.size(1)
        i = torch.arange(nq, device=q.device)[:, None] + nk - nq
        j = torch.arange(nk, device=q.device)
        pairs = torch.ones(nq, nk, dtype=torch.bool, device=q.device)
        if causal:
            pairs &= j <= i
        if window is not None:
            pairs &= (i - j).abs() <= window
        if "key_padding_mask" in inputs.layout:
            pairs &= inputs.layout["key_padding_mask"][b] != 0
        scores = (q.double() @ k.double().mT) * q.size(-1) ** -0.5
        p = entmax(scores.masked_fill(~pairs, -math.inf), alpha, impl="reference") if nk else scores
        assert isinstance(p, Tensor)
        results.append((p, pairs))
    return results


def blocks(table: Tensor) -> int:
    """Blocks of 64 by 64 of ``[n, m]`` with anything in them."""
    return sum(bool(part.any()) for row in table.split(64) for part in row.split(64, dim=1))


CASES = [
    ("full", 1.5, False, None),
    ("holes", 1.5, True, None),
    ("left", 2.0, False, 9),
    ("packed", 1.5, True, 20),
    ("packed", 1.2, False, None),
    ("right", 1.0, False, None),
]


@pytest.mark.parametrize(("layout", "alpha", "causal", "window"), CASES)
def test_counts_are_those_of_the_dense_probabilities(
    target: Target,
    layout: str,
    alpha: float,
    causal: bool,
    window: int | None,
) -> None:
    inputs = entmax_attention_inputs(
        3,
        4,
        150,
        16,
        nk=200,
        kv_heads=2,
        layout=layout,
        correlated=True,
        sharpness=4.0,
        device=target.device,
    )
    stats = statistics(inputs, target.impl, alpha=alpha, causal=causal, window=window)
    truth = dense(inputs, alpha, causal, window)
    visible = sum(int(pairs.sum()) for _, pairs in truth)
    assert int(stats.visible[:, 0].sum()) == visible and stats.visible.shape == stats.support.shape
    assert stats.live_blocks is not None and stats.visible_blocks is not None
    for h in range(4):
        support = sum(int((p[h] > 0).sum()) for p, _ in truth)
        rows = sum(int(pairs.any(dim=-1).sum()) for _, pairs in truth)
        torch.testing.assert_close(
            float(stats.nonzero_share()[h]),
            support / visible,
            rtol=1e-3,
            atol=0,
        )
        torch.testing.assert_close(
            float(stats.mean_support()[h]),
            support / rows,
            rtol=1e-3,
            atol=0,
        )
        assert int(stats.visible_blocks[:, h].sum()) == sum(blocks(pairs) for _, pairs in truth)
        live = sum(blocks(p[h] > 0) for p, _ in truth)
        assert (
            abs(int(stats.live_blocks[:, h].sum()) - live) <= 1
        )  # a weight within rounding of zero
        if alpha == 1:
            assert stats.live_share()[h] == 1 and stats.nonzero_share()[h] == 1


def test_one_alpha_a_head_and_the_reference_count_alike(target: Target) -> None:
    inputs = entmax_attention_inputs(
        2,
        3,
        130,
        16,
        correlated=True,
        sharpness=4.0,
        device=target.device,
    )
    alpha = torch.tensor([1.0, 1.5, 2.0], device=target.device)
    mine, reference = (statistics(inputs, impl, alpha=alpha) for impl in (target.impl, "reference"))
    assert mine.live_blocks is not None and reference.live_blocks is not None
    assert int((mine.live_blocks - reference.live_blocks).abs().max()) <= 1
    share = mine.nonzero_share()
    assert share[0] == 1 and share[0] > share[1] > share[2] > 0
    one = statistics(inputs, target.impl, alpha=1.5).live_blocks
    assert one is not None and torch.equal(one[:, 1], mine.live_blocks[:, 1])


def test_shares_are_fp32_whatever_torchs_default_dtype() -> None:
    stats = statistics(entmax_attention_inputs(1, 2, 70, 16, correlated=True), "tiled")
    expected = [share() for share in (stats.nonzero_share, stats.mean_support, stats.live_share)]
    torch.set_default_dtype(torch.float64)
    try:
        actual = [share() for share in (stats.nonzero_share, stats.mean_support, stats.live_share)]
    finally:
        torch.set_default_dtype(torch.float32)
    for share, wanted in zip(actual, expected, strict=True):
        assert share.dtype == torch.float32 and torch.equal(share, wanted)


def test_autocast_and_gradients_do_not_change_what_is_counted() -> None:
    inputs = entmax_attention_inputs(
        1,
        2,
        200,
        16,
        correlated=True,
        sharpness=8.0,
        dtype=torch.bfloat16,
    )
    plain = statistics(inputs, "tiled")
    wide = inputs.cast(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, stats = entmax_attention(wide.q.requires_grad_(), wide.k, wide.v, return_stats="blocks")
    assert torch.equal(stats.live_blocks, plain.live_blocks) and stats.live_share()[0] < 1
    assert not stats.live_blocks.requires_grad and not stats.tau.requires_grad


def test_rows_that_do_not_count_and_other_blocks() -> None:
    inputs = entmax_attention_inputs(2, 1, 40, 8, layout="right")
    _, stats = entmax_attention(inputs.q, inputs.k, inputs.v, return_stats=True, **inputs.layout)
    assert stats.live_blocks is None
    rows = torch.zeros(2, 40)
    rows[:, 8:12] = 1
    live, visible = live_blocks(
        inputs.q,
        inputs.k,
        stats.tau,
        query_padding_mask=rows,
        block=4,
        **inputs.layout,
    )
    lengths = inputs.layout["key_padding_mask"].sum(dim=1)
    assert (
        torch.equal(visible[:, 0], (-(-lengths // 4)).int())
        and bool((live <= visible).all())
        and live.min() >= 1
    )
    refused(ValueError, "return_stats='blocks'", stats.live_share)


def test_nothing_to_count_and_wrong_arguments() -> None:
    q = torch.randn(2, 2, 5, 8)
    _, stats = entmax_attention(q, q[:, :, :0], q[:, :, :0], return_stats="blocks")
    assert int(stats.visible.sum()) == 0 and torch.equal(
        stats.live_blocks,
        torch.zeros(2, 2, dtype=torch.int32),
    )
    assert bool(stats.nonzero_share().isnan().all())
    _, stats = entmax_attention(q[:0], q[:0], q[:0], return_stats="blocks")
    assert stats.live_blocks.shape == (0, 2)
    with pytest.raises(
        ValueError,
        match=r"return_stats must be one of False, True, 'blocks', got 'all'",
    ):
        entmax_attention(q, q, q, return_stats="all")  # type: ignore[call-overload]
    refused(
        ValueError,
        r"tau must have shape \[B, H, Nq\] with B=2, H=2, Nq=5",
        live_blocks,
        q,
        q,
        torch.zeros(2, 5),
    )
    refused(
        ValueError,
        "block must be an integer of at least 1",
        live_blocks,
        q,
        q,
        torch.zeros(2, 2, 5),
        block=0,
    )
    with pytest.raises(ValueError, match="query_padding_mask must have shape"):
        live_blocks(q, q, torch.zeros(2, 2, 5), query_padding_mask=torch.ones(2, 6))
