"""The kernels of every operator on the CPU, in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kernels import NEEDS_INTERPRETER, release
from tests.ops.contracts import CONTRACTS
from tests.ops.contracts.contract import OperatorContract

ROOT = Path(__file__).resolve().parents[3]
pytestmark = NEEDS_INTERPRETER
# Test files, and how many of their tests must pass at least.
SHARED_RUNS = {
    "inputs of operators": (("shared/test_inputs.py",), 76),
    "the toy": (("shared/test_operator.py",), 13),
    "kernels that cannot be built": (("shared/test_unavailable_kernels.py",), 139),
}
RUNS = SHARED_RUNS | {
    contract.name: (contract.interpreted_files, contract.interpreted_least)
    for contract in CONTRACTS
}

# Tests of `test_launches.py` for every repeated call, and for every selected one. One of the
# latter needs hooks that are chains.
TESTS_OF_EVERY_CALL = 3
HOOKS_ARE_CHAINS = release() >= (3, 5)
TESTS_OF_SELECTED_CALLS = 10 + HOOKS_ARE_CHAINS
TOY_CALLS, SELECTED_TOY_CALLS = 3, 1
SLOW_TO_INTERPRET = ("maxsim", "entmax_attention")


def assert_pass_interpreted(names: Iterable[str], least: int, *arguments: str) -> None:
    """Run files of ``tests/ops`` in one process; ``least`` tests or more must pass.

    One process for several files, since starting one takes seconds.
    """
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment = {
        key: value for key, value in environment.items() if not key.startswith("PYTEST_")
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [*(f"tests/ops/{name}" for name in names), *arguments]
    child = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    output = child.stdout + child.stderr
    assert child.returncode == 0, output[-20000:]
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) >= least, f"too few tests ran: {output[-500:]}"


def launch_tests(contracts: Iterable[OperatorContract]) -> int:
    """Return how many tests of `test_launches.py` the calls of these contracts take part in."""
    tests = 0
    for contract in contracts:
        tests += TESTS_OF_EVERY_CALL * len(contract.repeated)
        tests += TESTS_OF_SELECTED_CALLS * len(contract.repeated_in_interpreter)
    return tests


@pytest.mark.parametrize("run", RUNS)
def test_interpreted_kernels_pass(run: str) -> None:
    files, least = RUNS[run]
    assert_pass_interpreted(files, least)


def test_repeated_launches_of_operators_that_are_slow_to_interpret() -> None:
    """A test of its own, so that two workers share the work."""
    contracts = [contract for contract in CONTRACTS if contract.name in SLOW_TO_INTERPRET]
    expression = " or ".join(SLOW_TO_INTERPRET)
    assert_pass_interpreted(["shared/test_launches.py"], launch_tests(contracts), "-k", expression)


def test_repeated_launches_of_other_operators() -> None:
    contracts = [contract for contract in CONTRACTS if contract.name not in SLOW_TO_INTERPRET]
    expression = f"not ({' or '.join(SLOW_TO_INTERPRET)})"
    least = launch_tests(contracts)
    least += TESTS_OF_EVERY_CALL * TOY_CALLS + TESTS_OF_SELECTED_CALLS * SELECTED_TOY_CALLS
    assert_pass_interpreted(["shared/test_launches.py"], least, "-k", expression)
