"""The Triton kernels on the CPU: their tests run in a child process, since TRITON_INTERPRET must precede the import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.interpreter import numpy_is_too_new
from tilefold.ops._shared.impl import triton_installed, triton_interpreted

pytestmark = [
    pytest.mark.skipif(not triton_installed(), reason="triton is not installed"),
    pytest.mark.skipif(triton_interpreted(), reason="this is the interpreted run"),
    pytest.mark.skipif(numpy_is_too_new(), reason="Triton 3.6 and older interpret loops with what numpy 2.4 removed"),
]
ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "test_lsr_head_implementations.py": 50,
    "test_lsr_head_inputs.py": 140,
    "test_lsr_head_properties.py": 5,
    "test_lsr_head_quantized.py": 12,
    "test_lsr_head_replay.py": 10,
    "test_lsr_head_rows.py": 25,
}


@pytest.mark.parametrize(("name", "least"), FILES.items(), ids=str)
def test_interpreted_kernels_pass(name: str, least: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"tests/ops/{name}"]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = child.stdout + child.stderr
    assert child.returncode == 0, output[-20000:]
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) >= least, f"too few tests ran: {output[-500:]}"
