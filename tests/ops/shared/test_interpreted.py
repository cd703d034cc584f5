"""Contracts of all operators' kernels on the CPU, in Triton's interpreter; those of launches for two workers."""

from __future__ import annotations

import pytest

from tests.kernels import release
from tests.ops.interpreter import NEEDS_INTERPRETER, assert_pass_interpreted

pytestmark = NEEDS_INTERPRETER
HOOKS_ARE_CHAINS = release() >= (3, 5)
# per entry of the contract's table, and of its sample; one of those needs hooks that are chains
TESTS, SAMPLED = 3, 9 + HOOKS_ARE_CHAINS


@pytest.mark.parametrize(
    ("operators", "entries", "sampled"),
    [("not (maxsim or entmax_attention)", 15, 3), ("maxsim or entmax_attention", 9, 2)],
)
def test_the_contract_of_repeated_launches_holds(operators: str, entries: int, sampled: int) -> None:
    assert_pass_interpreted(["shared/test_launches.py"], TESTS * entries + SAMPLED * sampled, "-k", operators)


def test_the_kernels_of_the_token_scatter_pass() -> None:
    assert_pass_interpreted(["token_scatter/test_implementations.py", "token_scatter/test_properties.py"], 142)


def test_the_toy_keeps_the_contracts_of_the_common_base() -> None:
    assert_pass_interpreted(["shared/test_operator.py"], 13)


def test_kernels_that_cannot_be_built_are_replaced() -> None:
    assert_pass_interpreted(["shared/test_unavailable_kernels.py"], 142)
