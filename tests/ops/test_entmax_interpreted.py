"""The entmax kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
# files that share a process, and the least number of tests that must pass in it
FILES = {
    ("test_entmax_attention_implementations.py", "test_entmax_silent_failures.py"): 44,
    ("test_entmax_rows.py", "test_entmax_attention_triton.py", "test_entmax_attention_replay.py"): 89,
}


@pytest.mark.parametrize(("names", "least"), FILES.items(), ids=str)
def test_interpreted_kernels_pass(names: tuple[str, ...], least: int) -> None:
    assert_pass_interpreted(names, least)
