"""Kernels of attention: every way through a row, with a map of live blocks or without; packed tables and offsets.

On a GPU the tiles are large, so that lengths of a test would take one way only: here each is forced in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tilefold.ops import entmax_attention
from tilefold.ops._shared import operator
from tilefold.ops._shared.tuning import Row
from tilefold.ops.entmax_attention import configs
from tilefold.ops.entmax_attention.api import ATTENTION
from tilefold.testing.entmax_attention import (
    assert_entmax_attention_matches,
    entmax_attention_inputs,
    entmax_attention_results,
)

INTERPRETED = triton_interpreted()
LENGTH = 44 if INTERPRETED else 330
WAYS: dict[str, dict[str, int]] = {
    "short": {"resident": 0, "short": 1 << 20},
    "listed": {"resident": 0, "short": 0},
}


@pytest.fixture(params=["short"] if INTERPRETED else WAYS)  # interpreted, other tests walk lists
def way(request: pytest.FixtureRequest, target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if target.impl != "triton":
        pytest.skip("only the kernels have ways")
    monkeypatch.setattr(configs, "TABLE", (*configs.TABLE, Row({}, WAYS[request.param], "forced")))
    configs.config_for.cache_clear()
    ATTENTION.forget()
    yield str(request.param)
    configs.config_for.cache_clear()
    ATTENTION.forget()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "scale": 0.3},
    {"window": 9},
    {"alpha": 2.0},
    {"alpha": 1.3, "causal": True},
    {"alpha": 1.0, "scale": -0.2},
    {"dropout_p": 0.2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option(target: Target, way: str, options: dict[str, Any]) -> None:
    inputs = entmax_attention_inputs(1, 1 if INTERPRETED else 2, LENGTH, 16, device=target.device)
    assert_entmax_attention_matches(inputs, impl=target.impl, **options)


@pytest.mark.parametrize("layout", ["holes", "packed"])
def test_masks_and_packed_rows(target: Target, way: str, layout: str) -> None:
    inputs = entmax_attention_inputs(2, 2, LENGTH - 7, 16, nk=LENGTH, kv_heads=1, layout=layout, device=target.device)
    assert_entmax_attention_matches(inputs, impl=target.impl, causal=layout == "packed")


@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("scale", [0.25, 0.2, 1e-3])
def test_any_scale_of_the_scores(target: Target, way: str, scale: float, correlated: bool) -> None:
    if INTERPRETED and (scale < 0.2 or correlated):
        pytest.skip("interpreting takes seconds a case")
    inputs = entmax_attention_inputs(1, 1, LENGTH, 16, correlated=correlated, sharpness=6.0, device=target.device)
    found = assert_entmax_attention_matches(inputs, impl=target.impl, scale=scale)
    assert float(found["residual"].max()) <= 2e-5


def test_all_ways_agree_on_the_support(target: Target, way: str) -> None:
    inputs = entmax_attention_inputs(1, 1, LENGTH, 16, dtype=torch.float16, device=target.device)
    found = entmax_attention_results(inputs, impl=target.impl, needs=())
    truth = entmax_attention_results(inputs.cast(torch.float64), impl="reference", needs=())
    assert int((found["support"] - truth["support"]).abs().max()) <= 1


def test_broken_offsets_of_a_gpu_make_everything_nan_at_every_call(target: Target) -> None:
    if target.device == "cpu" or target.impl != "triton":
        pytest.skip("the host looks")
    rows = torch.randn(100, 2, 16, device=target.device)
    good = torch.tensor([0, 40, 100], device=target.device)
    for _ in range(2):
        for bad in ([0, 40, 99], [1, 40, 100], [0, 120, 100]):
            wrong = torch.tensor(bad, device=target.device)
            for pair in ((wrong, good), (good, wrong)):
                out = entmax_attention(rows, rows, rows, cu_seqlens_q=pair[0], cu_seqlens_k=pair[1])
                assert isinstance(out, Tensor) and bool(out.isnan().all())
        for bound, broken in ((59, True), (60, False), (None, False)):  # the longest has 60 keys
            out = entmax_attention(rows, rows, rows, cu_seqlens_q=good, cu_seqlens_k=good, max_seqlen_k=bound)
            assert isinstance(out, Tensor) and bool(out.isnan().all()) == broken == bool(out.isnan().any())


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([0, 2**32 + 20]),  # cut to 32 bits these two describe the rows
        torch.tensor([0, 7 - 2**32, 20]),
        torch.tensor([0, 2**31 - 1, -2, 20], dtype=torch.int32),  # in 32 bits no difference is negative
    ],
    ids=["too large", "too small", "wraps"],
)
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_offsets_beyond_32_bits_give_nan_and_no_plausible_number(
    target: Target, monkeypatch: pytest.MonkeyPatch, bad: Tensor, side: str
) -> None:
    if target.impl != "triton":
        pytest.skip("the host looks")
    # on the CPU too it must not look, as it does not on a GPU
    monkeypatch.setattr(operator, "may_look", lambda first: False)
    rows = torch.randn(20, 1, 16, device=target.device, requires_grad=True)
    good = torch.arange(bad.numel()).clamp(max=1) * 20
    cu_q, cu_k = (bad if side in (name, "both") else good for name in "qk")
    offsets = {"cu_seqlens_q": cu_q.to(target.device), "cu_seqlens_k": cu_k.to(target.device)}
    out = entmax_attention(rows, rows, rows, impl=target.impl, **offsets)
    assert isinstance(out, Tensor) and bool(out.isnan().all())
    out.sum().backward()  # reads nothing elsewhere


def torch_table(offsets: Tensor, block: int, tiles: int) -> tuple[Tensor, Tensor]:
    ends = ((offsets.diff() + (block - 1)) // block).clamp_(min=0).cumsum(0)
    every = torch.arange(tiles, device=offsets.device)
    of_tile = torch.searchsorted(ends, every, right=True)
    return of_tile.to(torch.int32), torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


@pytest.mark.parametrize("keys", [32, 0])
@pytest.mark.parametrize("lengths", [[5], [0, 70, 0, 16, 15, 0], [33] * 70, [20, -7, 40], []], ids=str)
def test_tables_of_packed_batches(target: Target, lengths: list[int], keys: int) -> None:
    if target.impl != "triton":
        pytest.skip("only the kernels need tables")
    from tilefold.ops._shared._triton.launch import launch
    from tilefold.ops.entmax_attention._triton.tiles import tables_kernel

    cu_q = torch.tensor([0, *lengths], device=target.device).cumsum(0).to(torch.int32)
    cu_k = 2 * cu_q
    batch = len(lengths)
    sizes = (int(cu_q.max()) // 16 + batch + 2, int(cu_k.max()) // 32 + batch + 3)
    wanted: tuple[Tensor, ...] = torch_table(cu_q, 16, sizes[0])
    if keys:
        wanted += torch_table(cu_k, keys, sizes[1])
    made = [torch.full_like(table, -1) for table in wanted]
    tables = (*made, None, None)[:4]
    constants = {"ROWS": 16, "KEYS": keys, "BLOCK": 64, "num_warps": 4, "num_stages": 1}
    grid = (max(sizes) // 64 + 1, 2 if keys else 1, 1)
    launch(tables_kernel, grid, (cu_q, cu_k, *tables, batch, sizes[0], sizes[1] if keys else 0), constants)
    assert all(torch.equal(found, table) for found, table in zip(made, wanted, strict=True))
