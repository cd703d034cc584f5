"""What is known of Triton's releases stands in one file, and holds for the one that is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tilefold.ops._shared._triton import releases

SOURCES = Path(releases.__file__).parents[4]


def test_no_other_file_asks_for_the_release_of_triton() -> None:
    asks = re.compile(r"triton\.__version__|version\(\"triton\"\)")
    asking = [path.name for path in SOURCES.rglob("*.py") if asks.search(path.read_text()) and "ops" in path.parts]
    assert asking in ([], ["releases.py"])


@pytest.mark.parametrize(
    ("installed", "warp_roles", "new_numpy"),
    [((3, 4), False, False), ((3, 5), False, False), ((3, 6), True, False), ((3, 7), True, True), ((3, 8), True, True),
     ((3, 9), True, True)],
)  # fmt: skip
def test_the_table_of_releases(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[int, int], warp_roles: bool, new_numpy: bool
) -> None:
    monkeypatch.setattr(releases, "release", lambda: installed)
    assert installed in releases.TESTED
    assert (releases.why_no_warp_roles() is None) == warp_roles
    assert releases.interpreter_breaks_with("2.4.1") != new_numpy
    assert not releases.interpreter_breaks_with("2.3.5")
    assert releases.interpreted_rows_count_elements() == (installed < (3, 6))


@pytest.mark.parametrize("count_elements", [False, True])
def test_rows_fit_a_descriptor_as_the_release_counts_them(
    monkeypatch: pytest.MonkeyPatch, count_elements: bool
) -> None:
    launch = pytest.importorskip("tilefold.ops._shared._triton.launch")
    monkeypatch.setattr(launch, "_COUNT_ELEMENTS", count_elements)
    for width, dtype, in_bytes, in_elements in (
        (8, torch.bfloat16, True, False), (24, torch.float32, True, False), (16, torch.int8, True, True),
        (9, torch.bfloat16, False, False), (32, torch.float32, True, True),
    ):  # fmt: skip
        fits = launch.rows_fit_descriptor(torch.empty(3, width, dtype=dtype))
        assert fits == (in_elements if count_elements else in_bytes)


def test_without_triton_nothing_is_known_and_nothing_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "release", lambda: (0, 0))
    assert releases.why_no_warp_roles()
    assert not releases.interpreter_breaks_with("2.4.1")
