"""The kernels of every operator on the CPU, in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.kernels import NEEDS_INTERPRETER, release
from tests.ops.contracts import CONTRACTS
from tests.ops.contracts.contract import OperatorContract

ROOT = Path(__file__).resolve().parents[3]
pytestmark = NEEDS_INTERPRETER
# Test files, and how many of their tests must pass at least, slow ones included.
RUNS_OF_OPERATORS = {
    contract.name: (contract.interpreted_files, contract.interpreted_least)
    for contract in CONTRACTS
}
SMALL_RUNS = {
    "inputs of operators": (("shared/test_inputs.py",), 76),
    "the toy": (("shared/test_operator.py",), 13),
    "builds ahead": (("shared/test_builds_ahead.py", "shared/test_warm_up.py"), 52),
}
# What one process runs: starting one takes seconds.
LARGE_RUNS = {name: [RUNS_OF_OPERATORS[name]] for name in ("maxsim", "lsr_head")}
OTHER_RUNS = [
    *SMALL_RUNS.values(),
    *(run for name, run in RUNS_OF_OPERATORS.items() if name not in LARGE_RUNS),
]
PROCESSES_OF_MAKE_TEST = {
    "maxsim and lsr_head": [*LARGE_RUNS["maxsim"], *LARGE_RUNS["lsr_head"]],
    "others": OTHER_RUNS,
}
PROCESSES_OF_SLOW_TESTS = {**LARGE_RUNS, "others": OTHER_RUNS}

# Tests of `test_launches.py` for every repeated call, and for every selected one. One of the
# latter needs hooks that are chains.
TESTS_OF_EVERY_CALL = 3
HOOKS_ARE_CHAINS = release() >= (3, 5)
TESTS_OF_SELECTED_CALLS = 10 + HOOKS_ARE_CHAINS
TOY_CALLS, SELECTED_TOY_CALLS = 3, 1
SLOW_TO_INTERPRET = ("maxsim", "entmax_attention")


def run_interpreted(names: Iterable[str], *arguments: str) -> tuple[int, int]:
    """Run files of ``tests/ops`` in one process, of which no test may fail.

    Args:
        names: The files.
        arguments: More arguments of pytest.

    Returns:
        How many tests passed, and how many the arguments deselected.
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
    deselected = re.search(r"(\d+) deselected", output)
    return int(passed[1]) if passed else 0, int(deselected[1]) if deselected else 0


def launch_tests(contracts: Iterable[OperatorContract]) -> int:
    """Return how many tests of `test_launches.py` the calls of these contracts take part in."""
    tests = 0
    for contract in contracts:
        tests += TESTS_OF_EVERY_CALL * len(contract.repeated)
        tests += TESTS_OF_SELECTED_CALLS * len(contract.repeated_in_interpreter)
    return tests


def assert_interpreted_kernels_pass(
    runs: Sequence[tuple[tuple[str, ...], int]],
    selection: str,
) -> None:
    """Run the selected tests of some files in one process, and expect as many as there should be.

    Args:
        runs: Test files, and how many tests they have at least, slow ones included.
        selection: The markers of the tests that run.
    """
    files = [file for run_files, _ in runs for file in run_files]
    passed, deselected = run_interpreted(files, "-m", selection)
    assert passed
    assert passed + deselected >= sum(least for _, least in runs)


@pytest.mark.parametrize("runs", PROCESSES_OF_MAKE_TEST.values(), ids=PROCESSES_OF_MAKE_TEST)
def test_interpreted_kernels_pass(runs: list[tuple[tuple[str, ...], int]]) -> None:
    assert_interpreted_kernels_pass(runs, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("runs", PROCESSES_OF_SLOW_TESTS.values(), ids=PROCESSES_OF_SLOW_TESTS)
def test_slow_tests_of_interpreted_kernels_pass(runs: list[tuple[tuple[str, ...], int]]) -> None:
    assert_interpreted_kernels_pass(runs, "slow")


@pytest.mark.slow
def test_launches_of_the_toy_are_repeated() -> None:
    passed, _ = run_interpreted(["shared/test_launches.py"], "-k", "toy")
    assert passed >= TESTS_OF_EVERY_CALL * TOY_CALLS + TESTS_OF_SELECTED_CALLS * SELECTED_TOY_CALLS


@pytest.mark.slow
def test_kernels_that_cannot_be_built_are_replaced() -> None:
    passed, _ = run_interpreted(["shared/test_unavailable_kernels.py"])
    assert passed >= 139


@pytest.mark.slow
def test_repeated_launches_of_operators_that_are_slow_to_interpret() -> None:
    """A test of its own, so that two workers share the work."""
    contracts = [contract for contract in CONTRACTS if contract.name in SLOW_TO_INTERPRET]
    expression = " or ".join(SLOW_TO_INTERPRET)
    passed, _ = run_interpreted(["shared/test_launches.py"], "-k", expression)
    assert passed >= launch_tests(contracts)


@pytest.mark.slow
def test_repeated_launches_of_other_operators() -> None:
    contracts = [contract for contract in CONTRACTS if contract.name not in SLOW_TO_INTERPRET]
    expression = f"not ({' or '.join((*SLOW_TO_INTERPRET, 'toy'))})"
    passed, _ = run_interpreted(["shared/test_launches.py"], "-k", expression)
    assert passed >= launch_tests(contracts)
