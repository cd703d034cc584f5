"""What a repeated call may take of the host: functions, operations of torch and launches, counted without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the launchers need triton")

ROOT = Path(__file__).resolve().parents[2]
EMPTY = "empty autograd.Function, f+b"
FUNCTIONS, FILES = (14, 10), (7, 5)  # that a warm inference enters, and a warm backward pass
# name: of inference and of training, functions of Python, and of C, beyond what an empty function takes; operations of
# torch; launches
BOUNDS = {
    "maxsim all pairs": ((24, 33, 2, 1), (40, 66, 10, 3)),
    "maxsim all pairs, masked": ((24, 37, 2, 1), (40, 76, 10, 3)),
    "maxsim all pairs, mean": ((25, 33, 2, 1), (41, 66, 10, 3)),
    "maxsim all pairs, normalised": ((26, 37, 4, 2), (41, 83, 14, 4)),
    "maxsim all pairs, temperature": ((24, 33, 2, 1), (39, 65, 8, 3)),
    "maxsim packed documents": ((24, 35, 2, 1), (40, 72, 11, 3)),
    "maxsim packed": ((24, 37, 2, 1), (40, 84, 13, 3)),
    "maxsim aligned": ((24, 33, 2, 1), (38, 62, 8, 3)),
    "maxsim grouped": ((24, 33, 2, 1), (39, 65, 8, 3)),
    "maxsim int8": ((23, 36, 2, 1), None),
    "maxsim fp8": ((23, 36, 2, 1), None),
    "entmax": ((23, 30, 16, 1), (33, 40, 26, 2)),
    "entmax learned alpha": ((23, 38, 24, 1), (35, 53, 42, 2)),
    "entmax_attention N=128": ((20, 33, 2, 1), (51, 91, 14, 3)),
    "lsr_head": ((21, 35, 2, 1), (49, 76, 12, 5)),
    "lsr_head masked": ((24, 42, 4, 2), (52, 83, 14, 6)),
    "lsr_head packed": ((24, 42, 4, 2), (52, 86, 14, 6)),
    "lsr_head sum": ((23, 33, 2, 1), (52, 69, 10, 5)),
    "lsr_head mean masked": ((23, 35, 2, 1), (52, 74, 10, 5)),
    "lsr_head cls": ((21, 33, 2, 1), (48, 66, 10, 4)),
    "lsr_head last masked": ((21, 35, 2, 1), (48, 73, 12, 4)),
    "lsr_head last packed": ((21, 35, 2, 1), (48, 71, 10, 4)),
    "token_scatter": ((25, 28, 7, 1), (35, 45, 9, 2)),
    "token_scatter masked": ((25, 30, 7, 1), (35, 47, 9, 2)),
    "token_scatter packed": ((25, 30, 7, 1), (35, 50, 9, 2)),
    "token_scatter sum": ((26, 30, 7, 1), (36, 47, 9, 2)),
    "maxsim all pairs fp16": (None, (43, 68, 12, 3)),
}
CALLS = [(name, mode) for name, pair in BOUNDS.items() for mode, bound in enumerate(pair) if bound is not None]


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[int, ...]]:
    """The rows of the script, run in a process of its own, which it leaves without kernels."""
    command = [sys.executable, "-m", "benchmarks.host_steps", "--samples", "1", "--calls", "1"]
    command += [word for name in ("maxsim", "entmax", "lsr_head", "token_scatter", EMPTY) for word in ("--only", name)]
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    rows: dict[str, tuple[int, ...]] = {}
    for line in child.stdout.splitlines()[1:]:
        numbers = line[44:].split()
        if "Error" not in line:  # of packages that are missing
            rows[line[:44].strip()] = tuple(map(int, numbers[1:]))
    return rows


@pytest.mark.parametrize(("name", "training"), CALLS)
def test_a_repeated_call_takes_no_more_of_the_host(
    name: str, training: int, counted: dict[str, tuple[int, ...]]
) -> None:
    python, of_c, *rest, functions, files = counted[f"{name}, {('inference', 'f+b')[training]}"]
    assert functions <= FUNCTIONS[training] and files <= FILES[training], (functions, files)
    if training:
        python, of_c = python - counted[EMPTY][0], of_c - counted[EMPTY][1]
    found, bounds = (python, of_c, *rest), BOUNDS[name][training]
    assert bounds is not None
    assert all(number <= bound for number, bound in zip(found, bounds, strict=True)), (found, bounds)
