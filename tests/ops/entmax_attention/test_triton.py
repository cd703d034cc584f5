"""Every way of the kernels through a row, whatever its length: without a map of live blocks, and with one.

On a GPU the tiles are large, so that lengths of a test would take one way only: here each is forced in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ops.conftest import Target
from tilefold.ops._shared.impl import triton_interpreted
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
