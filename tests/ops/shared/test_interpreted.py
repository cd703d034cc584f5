"""The kernels of every operator on the CPU, in Triton's interpreter; launches' contracts are for
two workers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kernels import NEEDS_INTERPRETER, release

ROOT = Path(__file__).resolve().parents[3]
pytestmark = NEEDS_INTERPRETER
# files, and the tests of theirs that must pass at least
RUNS: dict[str, tuple[list[str], int]] = {
    "entmax": (
        [
            *(
                f"entmax_attention/test_{name}.py"
                for name in ("implementations", "corner_cases", "calls")
            ),
            "entmax/test_rows.py",
        ],
        125,
    ),
    "lsr_head": (
        [
            *(
                f"lsr_head/test_{name}.py"
                for name in (
                    "calls",
                    "corner_cases",
                    "implementations",
                    "quantized",
                    "screen_kernels",
                    "sparse",
                )
            ),
            "test_properties.py",
        ],
        278,
    ),
    "maxsim": (
        [
            f"maxsim/test_{name}.py"
            for name in ("implementations", "properties", "quantized", "xtr", "plans")
        ],
        120,
    ),
    "sparse_search": (["sparse_search/test_sparse_search.py"], 8),
    "token_scatter": (["token_scatter/test_implementations.py", "shared/test_inputs.py"], 183),
    "the toy": (["shared/test_operator.py"], 13),
    "kernels that cannot be built": (["shared/test_unavailable_kernels.py"], 139),
}
HOOKS_ARE_CHAINS = release() >= (3, 5)
# per entry of the contract's table, and of its sample; one of those needs hooks that are chains
TESTS, SAMPLED = 3, 9 + HOOKS_ARE_CHAINS


def assert_pass_interpreted(names: Iterable[str], least: int, *arguments: str) -> None:
    """The files of ``tests/ops`` pass in one process, since starting one takes seconds, and
    ``least`` tests or more.
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


@pytest.mark.parametrize("run", RUNS)
def test_interpreted_kernels_pass(run: str) -> None:
    assert_pass_interpreted(*RUNS[run])


@pytest.mark.parametrize(
    ("operators", "entries", "sampled"),
    [("not (maxsim or entmax_attention)", 15, 3), ("maxsim or entmax_attention", 9, 2)],
)
def test_the_contract_of_repeated_launches_holds(
    operators: str,
    entries: int,
    sampled: int,
) -> None:
    assert_pass_interpreted(
        ["shared/test_launches.py"],
        TESTS * entries + SAMPLED * sampled,
        "-k",
        operators,
    )
