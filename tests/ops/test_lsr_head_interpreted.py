"""The kernels of the LSR head on the CPU, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
# files that share a process, and the least number of tests that must pass in it
FILES = {
    ("test_lsr_head_inputs.py", "test_lsr_head_replay.py", "test_lsr_head_rows.py"): 175,
    ("test_lsr_head_implementations.py", "test_lsr_head_properties.py", "test_lsr_head_quantized.py"): 67,
    ("test_lsr_head_range.py",): 10,
}


@pytest.mark.parametrize(("names", "least"), FILES.items(), ids=str)
def test_interpreted_kernels_pass(names: tuple[str, ...], least: int) -> None:
    assert_pass_interpreted(names, least)
