"""The contract of repeated launches on the CPU, in Triton's interpreter: two groups of operators, for two workers."""

from __future__ import annotations

import pytest

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted
from tilefold.ops._shared._triton.releases import release

pytestmark = NEEDS_INTERPRETER
HOOKS_ARE_CHAINS = release() >= (3, 5)
# per entry of the contract's table, and of its sample; one of those needs hooks that are chains
TESTS, SAMPLED = 3, 9 + HOOKS_ARE_CHAINS


@pytest.mark.parametrize(
    ("operators", "entries", "sampled"),
    [("lsr_head or token_scatter", 10, 3), ("maxsim or entmax_attention", 9, 2)],
)
def test_the_contract_of_repeated_launches_holds(operators: str, entries: int, sampled: int) -> None:
    assert_pass_interpreted(["shared/test_launches.py"], TESTS * entries + SAMPLED * sampled, "-k", operators)
