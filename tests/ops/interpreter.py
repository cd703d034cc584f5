"""Runs tests of kernels in Triton's interpreter: in a child process, since TRITON_INTERPRET must precede the import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kernels import triton_installed, triton_interpreted
from tests.ops.base import interpreter_breaks_with

ROOT = Path(__file__).resolve().parents[2]


def numpy_is_too_new() -> bool:
    """Whether interpreted loops would fail beside the numpy that is installed."""
    return importlib.util.find_spec("numpy") is not None and interpreter_breaks_with(
        importlib.metadata.version("numpy")
    )


NEEDS_INTERPRETER = [
    pytest.mark.skipif(not triton_installed(), reason="triton is not installed"),
    pytest.mark.skipif(triton_interpreted(), reason="this is the interpreted run"),
    pytest.mark.skipif(numpy_is_too_new(), reason="Triton 3.6 and older interpret loops with what numpy 2.4 removed"),
]


def assert_pass_interpreted(names: Iterable[str], least: int, *arguments: str) -> None:
    """The files of ``tests/ops`` pass in one process, since starting one takes seconds, and ``least`` tests or more."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [*(f"tests/ops/{name}" for name in names), *arguments]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = child.stdout + child.stderr
    assert child.returncode == 0, output[-20000:]
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) >= least, f"too few tests ran: {output[-500:]}"
