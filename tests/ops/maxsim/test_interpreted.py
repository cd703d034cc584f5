"""The MaxSim kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
FILES = (
    "maxsim/test_implementations.py",
    "maxsim/test_properties.py",
    "maxsim/test_quantized.py",
    "maxsim/test_xtr.py",
    "maxsim/test_plans.py",
)
LEAST = 131  # tests that must pass


def test_interpreted_kernels_pass() -> None:
    assert_pass_interpreted(FILES, LEAST)
