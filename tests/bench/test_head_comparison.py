"""The plain head beside the fused one, as the demo and the README show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilefold.bench import head_comparison, timing
from tilefold.bench.head_comparison import HeadMeasurement, compare_heads, plot_heads

SHAPES = [(4, 64, 32, 9000), (2, 64, 32, 9000)]


def test_both_sides_are_measured_in_order_of_size_and_plotted(tmp_path: Path) -> None:
    said: list[str] = []
    rows = compare_heads(SHAPES, progress=said.append)
    assert [(row.impl, row.batch) for row in rows] == [("eager", 2), ("eager", 4), ("fused", 2), ("fused", 4)]
    for row in rows:
        assert row.skipped_reason is None
        assert row.forward_ms > 0
        assert row.forward_backward_ms > 0  # which of the two is longer is noise on a busy machine
        assert row.peak_mb > 0
    assert said
    path = plot_heads(rows, tmp_path / "plots" / "heads.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in path.parent.iterdir()] == ["heads.png"]


@pytest.mark.whole_gpu
def test_a_plain_head_that_would_not_fit_is_left_out_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "free_memory_bytes", lambda device: 40_000_000)
    rows = compare_heads([(2, 64, 32, 9000), (64, 64, 32, 9000)])
    by_key = {(row.impl, row.batch): row for row in rows}
    assert by_key["eager", 64].skipped_reason.startswith("needs about 0.")
    assert by_key["eager", 64].peak_mb is None
    assert by_key["fused", 64].peak_mb is not None
    assert by_key["eager", 2].peak_mb is not None
    assert "1 measurements left out" in head_comparison._conditions(rows)


def test_nothing_measured_is_an_error_not_an_empty_plot(tmp_path: Path) -> None:
    rows = [HeadMeasurement("eager", 1, 1, 1, 1, skipped_reason="too big")]
    with pytest.raises(ValueError, match="rows must hold at least one measurement"):
        plot_heads(rows, tmp_path / "heads.png")
    assert not list(tmp_path.iterdir())
