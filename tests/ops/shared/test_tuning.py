"""Tables of launch configurations, and what is known of Triton's releases, for the one that is
installed too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.base import Between, ConfigRow, lookup, releases

TABLE = (
    ConfigRow({}, {"warps": 8, "stages": 1}, "everywhere"),
    ConfigRow(
        {"capability": (9, 0), "head_dim": Between(most=64)},
        {"warps": 4, "registers": 128},
        "H200, 3.6",
    ),
    ConfigRow(
        {"capability": (9, 0), "release": Between(least=(3, 9))},
        {"registers": 168},
        "compiled with 3.9",
    ),
    ConfigRow(
        {"dtype": frozenset({"fp16", "bf16"}), "head_dim": Between(65, 128)},
        {"stages": 2},
        "compiled",
    ),
)


@pytest.mark.parametrize(
    ("release", "facts", "expected"),
    [
        ((3, 6), {"capability": (8, 0), "head_dim": 64}, {"warps": 8, "stages": 1}),
        (
            (3, 6),
            {"capability": (9, 0), "head_dim": 64},
            {"warps": 4, "stages": 1, "registers": 128},
        ),
        (
            (3, 9),
            {"capability": (9, 0), "head_dim": 64},
            {"warps": 4, "stages": 1, "registers": 168},
        ),
        (
            (3, 9),
            {"capability": (9, 0), "head_dim": 65},
            {"warps": 8, "stages": 2, "registers": 168},
        ),
        ((3, 6), {"capability": (8, 0), "head_dim": 128}, {"warps": 8, "stages": 2}),
        (
            (3, 6),
            {"capability": (8, 0), "head_dim": 128, "dtype": "fp32"},
            {"warps": 8, "stages": 1},
        ),
        ((3, 6), {"capability": (8, 0), "head_dim": 129}, {"warps": 8, "stages": 1}),
    ],
)
def test_the_last_row_that_holds_sets_a_field(
    monkeypatch: pytest.MonkeyPatch,
    release: tuple[int, int],
    facts: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    monkeypatch.setattr(releases, "release", lambda: release)
    assert lookup(TABLE, **({"dtype": "bf16"} | facts)) == expected
    with pytest.raises(KeyError, match="head_dim"):  # a fact that a row asks for and nobody knows
        lookup(TABLE, capability=(9, 0))


@pytest.mark.parametrize(
    ("installed", "warp_roles"),
    [
        ((3, 4), False),
        ((3, 5), False),
        ((3, 6), True),
        ((3, 7), True),
        ((3, 8), True),
        ((3, 9), True),
    ],
)
def test_the_table_of_releases(
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[int, int],
    warp_roles: bool,
) -> None:
    monkeypatch.setattr(releases, "release", lambda: installed)
    assert installed in releases.TESTED
    assert (releases.why_no_warp_roles() is None) == warp_roles
    assert releases.interpreted_rows_count_elements() == (installed < (3, 6))
    monkeypatch.setattr(
        releases,
        "release",
        lambda: (0, 0),
    )  # without Triton nothing is known and nothing raises
    assert releases.why_no_warp_roles()


@pytest.mark.parametrize("count_elements", [False, True])
def test_rows_fit_a_descriptor_as_the_release_counts_them(
    monkeypatch: pytest.MonkeyPatch,
    count_elements: bool,
) -> None:
    launch = pytest.importorskip("tilefold.ops._shared._triton.launch")
    monkeypatch.setattr(launch, "_DESCRIPTOR_ALIGNS_ELEMENTS", count_elements)
    for width, dtype, in_bytes, in_elements in (
        (8, torch.bfloat16, True, False),
        (24, torch.float32, True, False),
        (16, torch.int8, True, True),
        (9, torch.bfloat16, False, False),
        (32, torch.float32, True, True),
    ):
        fits = launch.rows_fit_descriptor(torch.empty(3, width, dtype=dtype))
        assert fits == (in_elements if count_elements else in_bytes)
