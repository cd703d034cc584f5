"""Tests of the work of repeated calls on the CPU: functions, operations of torch and launches.

They are counted without a GPU.
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
# columns of the name in the script's output
NAME_WIDTH = 44
# functions and files that a warm call may enter: in inference, and in training
FUNCTIONS = (14, 10)
FILES = (7, 5)
# Bounds of each call in inference and in training: functions of Python, functions of C, operations
# of torch, and launches. In training, the functions of an empty autograd.Function are not counted.
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
    """Run the script in another process, since it replaces kernels, and return its rows.

    Returns:
        Counts of each call by its name: functions of Python and of C, operations of torch,
        launches, and the functions and files that a call enters.
    """
    command = [sys.executable, "-m", "benchmarks.host_steps", "--samples", "1", "--calls", "1"]
    for name in ("maxsim", "entmax", "lsr_head", "token_scatter", EMPTY):
        command += ["--only", name]
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
        # a call whose package is missing has an error
        if "Error" in line:
            continue
        name = line[:NAME_WIDTH].strip()
        _, *counts = line[NAME_WIDTH:].split()
        rows[name] = tuple(int(count) for count in counts)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("name", "training"), CALLS)
def test_a_repeated_call_takes_no_more_of_the_host(
    name: str,
    training: int,
    counted: dict[str, tuple[int, ...]],
) -> None:
    mode = "f+b" if training else "inference"
    python_calls, c_calls, operations, launches, functions, files = counted[f"{name}, {mode}"]
    assert functions <= FUNCTIONS[training]
    assert files <= FILES[training]
    if training:
        empty_python_calls, empty_c_calls, *_ = counted[EMPTY]
        python_calls -= empty_python_calls
        c_calls -= empty_c_calls
    bounds = BOUNDS[name][training]
    assert bounds is not None
    max_python_calls, max_c_calls, max_operations, max_launches = bounds
    assert python_calls <= max_python_calls
    assert c_calls <= max_c_calls
    assert operations <= max_operations
    assert launches <= max_launches
