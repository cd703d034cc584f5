"""Tables of launch configurations: which rows hold, and which of them has the last word."""

from __future__ import annotations

from typing import Any

import pytest

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared.tuning import Between, Row, lookup

TABLE = (
    Row({}, {"warps": 8, "stages": 1}, "everywhere"),
    Row({"capability": (9, 0), "head_dim": Between(most=64)}, {"warps": 4, "registers": 128}, "H200, 3.6"),
    Row({"capability": (9, 0), "release": Between(least=(3, 9))}, {"registers": 168}, "compiled with 3.9"),
    Row({"dtype": frozenset({"fp16", "bf16"}), "head_dim": Between(65, 128)}, {"stages": 2}, "compiled"),
)


@pytest.mark.parametrize(
    ("release", "facts", "expected"),
    [
        ((3, 6), {"capability": (8, 0), "head_dim": 64}, {"warps": 8, "stages": 1}),
        ((3, 6), {"capability": (9, 0), "head_dim": 64}, {"warps": 4, "stages": 1, "registers": 128}),
        ((3, 9), {"capability": (9, 0), "head_dim": 64}, {"warps": 4, "stages": 1, "registers": 168}),
        ((3, 9), {"capability": (9, 0), "head_dim": 65}, {"warps": 8, "stages": 2, "registers": 168}),
        ((3, 6), {"capability": (8, 0), "head_dim": 128}, {"warps": 8, "stages": 2}),
        ((3, 6), {"capability": (8, 0), "head_dim": 128, "dtype": "fp32"}, {"warps": 8, "stages": 1}),
        ((3, 6), {"capability": (8, 0), "head_dim": 129}, {"warps": 8, "stages": 1}),
    ],
)
def test_the_last_row_that_holds_sets_a_field(
    monkeypatch: pytest.MonkeyPatch, release: tuple[int, int], facts: dict[str, Any], expected: dict[str, Any]
) -> None:
    monkeypatch.setattr(releases, "release", lambda: release)
    assert lookup(TABLE, **({"dtype": "bf16"} | facts)) == expected


def test_a_fact_that_a_row_asks_for_and_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError, match="head_dim"):
        lookup(TABLE, capability=(9, 0))
