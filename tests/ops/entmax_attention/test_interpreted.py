"""The entmax kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
# files that share a process, and the least number of tests that must pass in it
FILES = {
    ("entmax_attention/test_implementations.py", "entmax_attention/test_corner_cases.py"): 44,
    (
        "entmax/test_rows.py",
        "entmax_attention/test_triton.py",
        "entmax_attention/test_calls.py",
        "entmax_attention/test_packing.py",
    ): 75,
}


@pytest.mark.parametrize(("names", "least"), FILES.items(), ids=str)
def test_interpreted_kernels_pass(names: tuple[str, ...], least: int) -> None:
    assert_pass_interpreted(names, least)
