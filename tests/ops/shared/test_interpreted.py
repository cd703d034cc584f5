"""The contract of repeated launches on the CPU, in Triton's interpreter: operator by operator, which workers share."""

from __future__ import annotations

import pytest

from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
TESTS = 13  # per entry of the contract's table


@pytest.mark.parametrize(
    ("operator", "entries"),
    [("lsr_head", 8), ("maxsim", 6), ("entmax_attention", 2), ("token_scatter", 2)],
)
def test_the_contract_of_repeated_launches_holds(operator: str, entries: int) -> None:
    assert_pass_interpreted(["shared/test_launches.py"], TESTS * entries, "-k", operator)
