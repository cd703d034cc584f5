"""The kernels of every operator on the CPU, in Triton's interpreter; launches' contracts are for two workers."""

from __future__ import annotations

import pytest

from tests.kernels import release
from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
# files, and the tests of theirs that must pass at least
RUNS: dict[str, tuple[list[str], int]] = {
    "entmax": (
        [*(f"entmax_attention/test_{name}.py" for name in ("implementations", "corner_cases", "calls")),
         "entmax/test_rows.py"], 125,
    ),
    "lsr_head": (
        [*(f"lsr_head/test_{name}.py" for name in ("calls", "corner_cases", "implementations", "quantized", "sparse")),
         "test_properties.py"], 260,
    ),
    "maxsim": ([f"maxsim/test_{name}.py" for name in ("implementations", "properties", "quantized", "xtr", "plans")],
               120),
    "token_scatter": (["token_scatter/test_implementations.py", "shared/test_inputs.py"], 184),
    "the toy": (["shared/test_operator.py"], 13),
    "kernels that cannot be built": (["shared/test_unavailable_kernels.py"], 142),
}  # fmt: skip
HOOKS_ARE_CHAINS = release() >= (3, 5)
# per entry of the contract's table, and of its sample; one of those needs hooks that are chains
TESTS, SAMPLED = 3, 9 + HOOKS_ARE_CHAINS


@pytest.mark.parametrize("run", RUNS)
def test_interpreted_kernels_pass(run: str) -> None:
    assert_pass_interpreted(*RUNS[run])


@pytest.mark.parametrize(
    ("operators", "entries", "sampled"),
    [("not (maxsim or entmax_attention)", 15, 3), ("maxsim or entmax_attention", 9, 2)],
)
def test_the_contract_of_repeated_launches_holds(operators: str, entries: int, sampled: int) -> None:
    assert_pass_interpreted(["shared/test_launches.py"], TESTS * entries + SAMPLED * sampled, "-k", operators)
