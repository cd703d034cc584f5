"""The kernels of the LSR head on the CPU, in Triton's interpreter."""

from __future__ import annotations

from tests.kernels import release
from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
FILES = (
    "lsr_head/test_calls.py",
    "lsr_head/test_corner_cases.py",
    "lsr_head/test_implementations.py",
    "lsr_head/test_properties.py",
    "lsr_head/test_quantized.py",
    "lsr_head/test_sparse.py",
    "shared/test_quick_interpreter.py",
)
LEAST = 297 + 11 * (release() == (3, 6))  # tests that must pass


def test_interpreted_kernels_pass() -> None:
    assert_pass_interpreted(FILES, LEAST)
