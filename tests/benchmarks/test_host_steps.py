"""What a repeated call may take of the host: functions, operations of torch and launches, counted
without a GPU.
"""

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
# name: of inference and of training, functions of Python, and of C, beyond what an empty function
# takes; operations of torch; launches
BOUNDS = {
    "maxsim all pairs": ((20, 30, 2, 1), (38, 59, 10, 3)),
    "maxsim all pairs, masked": ((20, 34, 2, 1), (38, 67, 10, 3)),
    "maxsim all pairs, mean": ((21, 30, 2, 1), (39, 59, 10, 3)),
    "maxsim all pairs, normalised": ((21, 34, 4, 2), (39, 66, 14, 4)),
    "maxsim all pairs, temperature": ((20, 30, 2, 1), (38, 58, 8, 3)),
    "maxsim packed documents": ((20, 32, 2, 1), (38, 64, 11, 3)),
    "maxsim packed": ((20, 34, 2, 1), (38, 70, 13, 3)),
    "maxsim aligned": ((20, 30, 2, 1), (37, 55, 8, 3)),
    "maxsim grouped": ((20, 30, 2, 1), (38, 58, 8, 3)),
    "maxsim int8": ((19, 32, 2, 1), None),
    "maxsim fp8": ((19, 32, 2, 1), None),
    "entmax": ((14, 28, 16, 1), (20, 40, 26, 2)),
    "entmax learned alpha": ((14, 36, 24, 1), (22, 50, 42, 2)),
    "entmax_attention N=128": ((18, 33, 2, 1), (40, 70, 14, 3)),
    "lsr_head": ((16, 30, 2, 1), (34, 62, 12, 5)),
    "lsr_head masked": ((17, 36, 4, 2), (35, 68, 14, 6)),
    "lsr_head packed": ((17, 36, 4, 2), (35, 70, 14, 6)),
    "lsr_head sum": ((16, 30, 2, 1), (34, 60, 10, 5)),
    "lsr_head mean masked": ((16, 32, 2, 1), (34, 64, 10, 5)),
    "lsr_head cls": ((16, 30, 2, 1), (33, 57, 10, 4)),
    "lsr_head last masked": ((16, 32, 2, 1), (33, 61, 12, 4)),
    "lsr_head last packed": ((16, 32, 2, 1), (33, 61, 10, 4)),
    "token_scatter": ((15, 25, 7, 1), (23, 44, 9, 2)),
    "token_scatter masked": ((15, 27, 7, 1), (23, 46, 9, 2)),
    "token_scatter packed": ((15, 27, 7, 1), (23, 48, 9, 2)),
    "token_scatter sum": ((16, 27, 7, 1), (24, 46, 9, 2)),
    "maxsim all pairs fp16": (None, (38, 60, 12, 3)),
}
CALLS = [
    (name, mode)
    for name, pair in BOUNDS.items()
    for mode, bound in enumerate(pair)
    if bound is not None
]


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[int, ...]]:
    """The rows of the script, run in a process of its own, which it leaves without kernels."""
    command = [sys.executable, "-m", "benchmarks.host_steps", "--samples", "1", "--calls", "1"]
    command += [
        word
        for name in ("maxsim", "entmax", "lsr_head", "token_scatter", EMPTY)
        for word in ("--only", name)
    ]
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    child = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    rows: dict[str, tuple[int, ...]] = {}
    for line in child.stdout.splitlines()[1:]:
        numbers = line[44:].split()
        if "Error" not in line:  # of packages that are missing
            rows[line[:44].strip()] = tuple(map(int, numbers[1:]))
    return rows


@pytest.mark.parametrize(("name", "training"), CALLS)
def test_a_repeated_call_takes_no_more_of_the_host(
    name: str,
    training: int,
    counted: dict[str, tuple[int, ...]],
) -> None:
    python, of_c, *rest, functions, files = counted[f"{name}, {('inference', 'f+b')[training]}"]
    assert functions <= FUNCTIONS[training] and files <= FILES[training], (functions, files)
    if training:
        python, of_c = python - counted[EMPTY][0], of_c - counted[EMPTY][1]
    found, bounds = (python, of_c, *rest), BOUNDS[name][training]
    assert bounds is not None
    assert all(number <= bound for number, bound in zip(found, bounds, strict=True)), (
        found,
        bounds,
    )
