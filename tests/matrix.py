"""Runs tests in several ways, and prints a row for each: ``python tests/matrix.py cpus`` or
``triton``.

``cpus`` (``make test-portable``): what depends on arithmetic, as other CPUs would add up. Four
libraries multiply: OpenBLAS under numpy (which Triton's interpreter uses), and MKL, oneDNN and
ATen's own loops under torch. Each chooses kernels by the CPU, and each has a variable to choose
others; a row sets all four. What each changes, seen with torch 2.13: MKL fp32 and fp64 products,
and exp; oneDNN products in 16 bits, and gelu; ATen softmax, and without vectors every sum, norm and
function and the random numbers too; OpenBLAS numpy's products.

``triton`` (``make test-triton``): builds the kernels of every operator for compute capability 8.0,
9.0 and 10.0 with each release of Triton; the oldest and the newest run them in the interpreter as
well. A release lies in a folder of its own, ``.triton/<release>``, before the packages of this
environment; what it compiles is kept there too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Outcomes = list[tuple[bool, tuple[str, ...]]]  # whether all passed, and the cells of a row
COUNTS = re.compile(r"\d+ (?:passed|failed|skipped|errors?)\b")


def run(arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[bool, str]:
    """Whether tests passed, and how many did what."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not gpu",
        "-n",
        "auto",
        "--dist",
        "loadfile",
        *arguments,
    ]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    result = ""
    for line in child.stdout or ():
        print(line, end="", flush=True)  # noqa: T201
        result = ", ".join(COUNTS.findall(line)) or result
    status = child.wait()
    return status == 0, result or f"ended with {status}"


# what multiplies; not what is built for GPUs, and not the files that only read errors and documents
WHAT = [
    "tests/ops",
    "tests/losses",
    "tests/nn",
    "tests/integrations",
    "tests/retrieval",
    "tests/recipes",
]
NOT = ["*_compile.py", "*_errors.py", "*/data/test_collection.py"]
VARIABLES = (
    "OPENBLAS_CORETYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
)

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
        {
            "OPENBLAS_CORETYPE": "SkylakeX",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "ATEN_CPU_CAPABILITY": "avx512",
        },
        "AVX512",
    ),
    "avx2": Row(
        "Intel with AVX2 alone",
        {
            "OPENBLAS_CORETYPE": "Haswell",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
        },
        "AVX2",
    ),
    "amd": Row(
        "AMD with AVX2, where MKL runs what it runs on any CPU: long sums, term after term",
        {
            "OPENBLAS_CORETYPE": "Zen",
            "MKL_CBWR": "COMPATIBLE",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
        },
        "AVX2",
    ),
    "sse": Row(
        "neither AVX nor fused multiply-adds",
        {
            "OPENBLAS_CORETYPE": "Nehalem",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "ATEN_CPU_CAPABILITY": "default",
        },
    ),
}


def instructions() -> list[str]:
    """What this CPU has of ``CAPABILITIES``; one that has the next ones has those before."""
    import torch

    return CAPABILITIES[: CAPABILITIES.index(torch.backends.cpu.get_cpu_capability()) + 1]


def cpus(chosen: Sequence[str], arguments: Sequence[str]) -> Outcomes:
    """For each CPU, whether its tests passed or were not run, and its row."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    here = instructions()
    results: Outcomes = []
    for name in chosen or ROWS:
        row, start = ROWS[name], time.monotonic()
        passed, outcome = True, f"not run: this CPU has no {row.needs}"
        if row.needs in here:
            print(f"\n== {name}: {' '.join(f'{k}={v}' for k, v in row.sets.items())}", flush=True)  # noqa: T201
            passed, outcome = run(
                [*(f"--ignore-glob={each}" for each in NOT), *(arguments or WHAT)],
                row.sets,
            )
        results.append((passed, (name, row.is_like, outcome, f"{time.monotonic() - start:.0f} s")))
    return results


RELEASES = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
OLD_NUMPY = ("3.4.0", "3.5.1", "3.6.0")  # interpret loops with what numpy 2.4 removed
SHARED = (
    "test_cross_compile.py",
    "test_cuda_driver.py",
    "test_tuning.py",
    "test_fallback.py",
    "test_graph_memory.py",
)
INTERPRETED = "tests/ops/shared/test_interpreted.py"


def folder_of(release: str) -> Path:
    """The folder with that release, installed where it is not there yet."""
    folder = ROOT / ".triton" / release
    if not (folder / "triton").is_dir():
        wanted = [f"triton=={release}"] + ["numpy<2.4"] * (release in OLD_NUMPY)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        subprocess.run([*command, "--target", str(folder), *wanted], check=True)
    return folder


def triton(chosen: Sequence[str], arguments: Sequence[str]) -> Outcomes:
    """For each release, whether its tests passed, and its row."""
    built = [f"tests/ops/shared/{name}" for name in SHARED]
    built += [
        str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/ops/*/test_compile.py"))
    ]
    results: Outcomes = []
    for release in chosen or RELEASES:
        start, folder = time.monotonic(), folder_of(release)
        print(f"\n== Triton {release}", flush=True)  # noqa: T201
        path = os.pathsep.join(
            [str(ROOT / "src"), str(folder), os.environ.get("PYTHONPATH", "")],
        ).rstrip(os.pathsep)
        variables = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")}
        passed, cells = run([*built, *arguments], variables)
        ran, outcome = True, "not run"
        if release in (RELEASES[0], RELEASES[-1]):
            ran, outcome = run([INTERPRETED, *arguments], variables)
            ran &= "passed" in outcome
        results.append(
            (passed and ran, (release, cells, outcome, f"{time.monotonic() - start:.0f} s")),
        )
    return results


WAYS = {
    "cpus": (cpus, tuple(ROWS), "| CPU | stands for | outcome | took |"),
    "triton": (triton, RELEASES, "| Triton | built | interpreted (groups of tests) | took |"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("way", choices=WAYS)
    parser.add_argument(
        "--row",
        action="append",
        default=[],
        help="this CPU or release alone (may be repeated)",
    )
    options, arguments = parser.parse_known_args()
    rows, known, head = WAYS[options.way]
    if options.way == "cpus" and (unknown := set(options.row) - set(known)):
        parser.error(f"--row: expected one of {', '.join(known)}, got {', '.join(unknown)}")
    result = rows(options.row, arguments)
    print(f"\n{head}\n|---|---|---|---|")  # noqa: T201
    for _, row in result:
        print(f"| {' | '.join(row)} |")  # noqa: T201
    return int(not all(passed for passed, _ in result))


if __name__ == "__main__":
    sys.exit(main())
