"""Scores of all pairs without a gradient, which implementations may compute in another way than with one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.ops.conftest import Target
from tilefold.ops import maxsim
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.maxsim import tiles
from tilefold.testing import assert_within_budget, nan_poisoned_empty
from tilefold.testing.maxsim import MaxSimInputs, maxsim_inputs
from tilefold.testing.padding import LAYOUTS

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="the other files interpret the kernels")
OPTIONS: list[dict[str, Any]] = [{}, {"mask_mode": "zero"}, {"normalize": True, "reduction": "mean"}]
SHAPES = [(1, 1, 1, 1, 8), (1, 60, 5, 90, 16), (7, 3, 33, 5, 24), (3, 40, 4, 12, 40)]


def assert_scores(inputs: MaxSimInputs, target: Target, **options: Any) -> None:
    with torch.no_grad(), nan_poisoned_empty():
        found = maxsim(inputs.queries, inputs.documents, **inputs.layout, **options, impl=target.impl)
    exact = inputs.cast(torch.float64)
    truth = maxsim(exact.queries, exact.documents, **exact.layout, **options, impl="reference")
    assert found.is_contiguous()
    assert_within_budget(found, truth)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_of_every_layout(target: Target, layout: str, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = maxsim_inputs(*shape, layout=layout, dtype=dtype, device=target.device)
        for options in OPTIONS:
            assert_scores(inputs, target, **options)
        assert_scores(inputs.packed("d") if layout != "packed" else inputs, target)


@pytest.mark.parametrize("layout", ["full", "holes", "packed"])
def test_small_tiles_give_what_large_ones_give(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    inputs = maxsim_inputs(4, 60, 7, 90, 16, layout=layout)
    whole = maxsim(inputs.queries, inputs.documents, **inputs.layout)
    sizes = {"TILE_ELEMENTS": 2000, "BLOCK_ROWS": 150, "BLOCK_COLUMNS": 5, "GROUP_ELEMENTS": 900}
    for name, size in sizes.items():
        monkeypatch.setattr(tiles, name, size)
        found = maxsim(inputs.queries, inputs.documents, **inputs.layout)
        torch.testing.assert_close(found, whole)


def test_documents_of_very_different_lengths(target: Target) -> None:
    lengths = torch.tensor([0, 1, 700, 0, 2, 3, 5, 8, 300, 1, 299, 310, 0, 17])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(int(lengths.sum()), 16, generator=generator).to(target.device)
    queries = torch.randn(3, 4, 16, generator=generator).to(target.device)
    found = maxsim(queries, rows, cu_seqlens_d=offsets.to(target.device), impl=target.impl)
    exact = maxsim(queries.double(), rows.double(), cu_seqlens_d=offsets.to(target.device), impl="reference")
    assert_within_budget(found, exact)
    assert not found[:, lengths.to(target.device) == 0].any()


def test_nan_and_infinity_stay_in_their_document(target: Target) -> None:
    inputs = maxsim_inputs(2, 6, 3, 9, 16, layout="packed", device=target.device)
    starts = inputs.cu_seqlens_d[:-1].long()
    counts = inputs.cu_seqlens_d.diff()
    document = int(counts.argmax())
    inputs.documents[starts[document] + 1] = math.nan
    scores = maxsim(inputs.queries, inputs.documents, **inputs.layout, impl=target.impl)
    expected = maxsim(inputs.queries, inputs.documents, **inputs.layout, impl="reference")
    assert expected.isnan().any() and torch.equal(scores.isnan(), expected.isnan())
