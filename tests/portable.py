"""Runs what depends on arithmetic as other CPUs would add up, and prints a row for each CPU (`make test-portable`).

Four libraries multiply: OpenBLAS under numpy (which Triton's interpreter uses), and MKL, oneDNN and ATen's own loops
under torch. Each chooses kernels by the CPU, and each has a variable to choose others; a row sets all four. What each
changes, seen with torch 2.13: MKL fp32 and fp64 products, and exp; oneDNN products in 16 bits, and gelu; ATen softmax,
and without vectors every sum, norm and function and the random numbers too; OpenBLAS numpy's products.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# what multiplies; not what is built for GPUs, and not the files that only read errors and documents
WHAT = ["tests/ops", "tests/losses", "tests/nn", "tests/integrations", "tests/retrieval", "tests/recipes"]
NOT = ["*_compile.py", "*_errors.py", "*/test_retrieval_collection.py"]
VARIABLES = ("OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")

CAPABILITIES = ["DEFAULT", "AVX2", "AVX512"]


@dataclass(frozen=True)
class Row:
    """A CPU."""

    is_like: str
    sets: dict[str, str]  # variables of the environment
    needs: str = "DEFAULT"  # instructions, as torch names them, without which the libraries' kernels cannot run here


ROWS = {
    "avx512": Row(
        "Intel with AVX-512, without AMX and 16-bit dot products",
        {"OPENBLAS_CORETYPE": "SkylakeX", "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
         "ATEN_CPU_CAPABILITY": "avx512"},
        "AVX512",
    ),
    "avx2": Row(
        "Intel with AVX2 alone",
        {"OPENBLAS_CORETYPE": "Haswell", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
         "ATEN_CPU_CAPABILITY": "avx2"},
        "AVX2",
    ),
    "amd": Row(
        "AMD with AVX2, where MKL runs what it runs on any CPU: long sums, term after term",
        {"OPENBLAS_CORETYPE": "Zen", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2",
         "ATEN_CPU_CAPABILITY": "avx2"},
        "AVX2",
    ),
    "sse": Row(
        "neither AVX nor fused multiply-adds",
        {"OPENBLAS_CORETYPE": "Nehalem", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41",
         "ATEN_CPU_CAPABILITY": "default"},
    ),
}  # fmt: skip


def instructions() -> list[str]:
    """What this CPU has of ``CAPABILITIES``; one that has the next ones has those before."""
    import torch

    return CAPABILITIES[: CAPABILITIES.index(torch.backends.cpu.get_cpu_capability()) + 1]


def run(row: Row, arguments: list[str]) -> tuple[int, str]:
    """The exit status of the tests on that CPU, and their last line."""
    environment = os.environ | row.sets
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-n", "auto", "--dist", "loadfile"]
    command += [f"--ignore-glob={name}" for name in NOT] + (arguments or WHAT)
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    last = ""
    for line in child.stdout or ():
        print(line, end="", flush=True)  # noqa: T201
        if re.search(r"\d+ (passed|failed|error|skipped)", line):
            last = re.sub(r"[=\s]* in .*", "", line).strip("= \n")
    return child.wait(), last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=ROWS, action="append", help="this CPU alone (may be repeated)")
    chosen, arguments = parser.parse_known_args()
    for name in VARIABLES:
        os.environ.pop(name, None)
    here = instructions()
    outcomes: list[tuple[str, ...]] = []
    failed = False
    for name in chosen.row or ROWS:
        row, start = ROWS[name], time.monotonic()
        if row.needs not in here:
            outcomes.append((name, row.is_like, f"not run: this CPU has no {row.needs}", ""))
            continue
        print(f"\n== {name}: {' '.join(f'{k}={v}' for k, v in row.sets.items())}", flush=True)  # noqa: T201
        status, last = run(row, arguments)
        failed |= status != 0
        outcomes.append((name, row.is_like, last or f"ended with {status}", f"{time.monotonic() - start:.0f} s"))
    print("\n| CPU | stands for | outcome | took |\n|---|---|---|---|")  # noqa: T201
    for outcome in outcomes:
        print(f"| {' | '.join(outcome)} |")  # noqa: T201
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
