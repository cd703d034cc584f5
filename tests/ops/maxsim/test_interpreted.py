"""The MaxSim kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
# files that share a process, and the least number of tests that must pass in it
FILES = {
    ("maxsim/test_implementations.py",): 98,
    ("maxsim/test_properties.py", "maxsim/test_quantized.py", "maxsim/test_xtr.py", "maxsim/test_plans.py"): 33,
}


@pytest.mark.parametrize(("names", "least"), FILES.items(), ids=str)
def test_interpreted_kernels_pass(names: tuple[str, ...], least: int) -> None:
    assert_pass_interpreted(names, least)
