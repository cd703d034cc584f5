"""The kernels of the LSR head on the CPU, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted
from tilefold.ops._shared._triton.releases import release

pytestmark = NEEDS_INTERPRETER
QUICK = 11 * (release() == (3, 6))
# files that share a process, and the least number of tests that must pass in it
FILES = {
    ("lsr_head/test_calls.py", "lsr_head/test_corner_cases.py", "lsr_head/test_rows.py"): 245,
    ("lsr_head/test_implementations.py", "lsr_head/test_properties.py", "lsr_head/test_quantized.py"): 67,
    ("lsr_head/test_range.py", "lsr_head/test_capacity_rows.py", "shared/test_quick_interpreter.py"): 20 + QUICK,
}


@pytest.mark.parametrize(("names", "least"), FILES.items(), ids=str)
def test_interpreted_kernels_pass(names: tuple[str, ...], least: int) -> None:
    assert_pass_interpreted(names, least)
