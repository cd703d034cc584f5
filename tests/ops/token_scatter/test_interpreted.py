"""The token scatter's kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
# files that share a process, and the least number of tests that must pass in it
FILES = {
    ("token_scatter/test_implementations.py", "token_scatter/test_properties.py"): 132,
}


@pytest.mark.parametrize(("names", "least"), FILES.items(), ids=str)
def test_interpreted_kernels_pass(names: tuple[str, ...], least: int) -> None:
    assert_pass_interpreted(names, least)
