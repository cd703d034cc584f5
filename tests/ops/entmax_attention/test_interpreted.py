"""The entmax kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
FILES = (
    "entmax_attention/test_implementations.py",
    "entmax_attention/test_corner_cases.py",
    "entmax/test_rows.py",
    "entmax_attention/test_calls.py",
)
LEAST = 127  # tests that must pass


def test_interpreted_kernels_pass() -> None:
    assert_pass_interpreted(FILES, LEAST)
