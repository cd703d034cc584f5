"""Rows with room for a fixed number of entries hold what lsr_head_sparse keeps, or say that they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.conftest import Target
from tilefold.ops import lsr_head, lsr_head_sparse
from tilefold.ops.lsr_head import rows as module
from tilefold.ops.lsr_head.rows import lsr_head_rows
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs


def both(inputs: LSRHeadInputs, target: Target, capacity: int, **options: Any) -> tuple[Any, torch.Tensor]:
    arguments = (inputs.hidden, inputs.weight, inputs.bias)
    options |= {**inputs.layout, "impl": target.impl}
    return lsr_head_rows(*arguments, capacity=capacity, **options), lsr_head_sparse(*arguments, **options).cpu()


@pytest.mark.parametrize("layout", ["right", "packed"])
@pytest.mark.parametrize(("top_k", "min_weight"), [(None, 0.0), (None, 0.8), (7, 0.0), (90, 0.0)])
def test_they_hold_what_is_kept_and_nobody_waits(
    target: Target, monkeypatch: pytest.MonkeyPatch, layout: str, top_k: int | None, min_weight: float
) -> None:
    if target.impl != "triton":
        pytest.skip("other implementations have no rows of fixed capacity")
    monkeypatch.setattr(module, "BLOCK_SCORES", 16)
    monkeypatch.setattr(module, "_ALIGNMENT", 16)
    inputs = lsr_head_inputs(5, 9, 16, 70, layout=layout, device=target.device)
    found, expected = both(inputs, target, 80, top_k=top_k, min_weight=min_weight)
    assert found.vocab_size == 70 and bool((found.counts <= 80).all())
    counts = expected.crow_indices().diff()
    assert found.kept.tolist() == counts.tolist()
    inside = torch.arange(found.columns.size(1)) < counts[:, None]
    assert found.columns.cpu()[inside].tolist() == expected.col_indices().tolist()
    torch.testing.assert_close(found.values.cpu()[inside], expected.values(), rtol=1e-6, atol=1e-6)


def test_a_row_that_does_not_fit_says_how_many_there_were(target: Target) -> None:
    if target.impl != "triton":
        pytest.skip("other implementations have no rows of fixed capacity")
    inputs = lsr_head_inputs(4, 6, 16, 70, layout="packed", device=target.device)
    found, expected = both(inputs, target, 3)
    counts = expected.crow_indices().diff()
    assert found.counts.tolist() == counts.tolist() and found.kept.tolist() == counts.clamp(max=3).tolist()
    for row in range(4):
        first = int(expected.crow_indices()[row])
        kept = int(found.kept[row])
        assert found.columns[row, :kept].tolist() == expected.col_indices()[first : first + kept].tolist()


def test_nan_is_kept_so_that_it_is_seen(target: Target) -> None:
    if target.impl != "triton":
        pytest.skip("other implementations have no rows of fixed capacity")
    inputs = lsr_head_inputs(2, 3, 16, 40, layout="packed", device=target.device)
    inputs.hidden[0, :] = float("nan")
    found, _ = both(inputs, target, 64)
    assert int(found.counts[0]) == 40 and bool(found.values[0, :40].isnan().all())


def test_where_no_kernels_run_there_are_none() -> None:
    inputs = lsr_head_inputs(2, 3, 16, 40, layout="packed", device=torch.device("cpu"))
    arguments = (inputs.hidden, inputs.weight, inputs.bias)
    assert lsr_head_rows(*arguments, capacity=4, **inputs.layout, impl="tiled") is None
    assert lsr_head(*arguments, **inputs.layout).shape == (2, 40)
    with pytest.raises(ValueError, match="capacity and top_k must be at least 1"):
        lsr_head_rows(*arguments, capacity=0, **inputs.layout)
