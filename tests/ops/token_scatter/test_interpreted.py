"""The token scatter's kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
FILES = (
    "token_scatter/test_implementations.py",
    "token_scatter/test_properties.py",
)
LEAST = 132  # tests that must pass


def test_interpreted_kernels_pass() -> None:
    assert_pass_interpreted(FILES, LEAST)
