"""Builds and interprets the kernels with each release of Triton, and prints a row for each (`make test-triton`).

A release lies in a folder of its own, ``.triton/<release>``, before the packages of this environment; what it compiles
is kept there too. Every release builds the kernels of every operator for compute capability 8.0, 9.0 and 10.0; the
oldest and the newest run them in the interpreter as well.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
OLD_NUMPY = ("3.4.0", "3.5.1", "3.6.0")  # interpret loops with what numpy 2.4 removed
SHARED = ("test_cross_compile.py", "test_cuda_driver.py", "test_tuning.py", "test_fallback.py", "test_graph_memory.py")
BUILT = [f"tests/ops/shared/{name}" for name in SHARED]
BUILT += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/ops/*/test_compile.py"))]
INTERPRETED = ["tests/ops/shared/test_interpreted.py"]
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


def folder_of(release: str, packages: Path) -> Path:
    """The folder with that release, installed where it is not there yet."""
    folder = packages / release
    if not (folder / "triton").is_dir():
        wanted = [f"triton=={release}"] + ["numpy<2.4"] * (release in OLD_NUMPY)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), *wanted], check=True)
    return folder


def run(folder: Path, files: list[str], arguments: list[str]) -> dict[str, int]:
    """How many tests passed, failed and were skipped; a run that ends in another way counts as a failure."""
    path = os.pathsep.join([str(ROOT / "src"), str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-n", "auto", "--dist", "loadfile"]
    child = subprocess.Popen(
        [*command, *files, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    last = ""
    for line in child.stdout or ():
        print(line, end="", flush=True)  # noqa: T201
        last = line if COUNTS.search(line) else last
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for number, what in COUNTS.findall(last):
        counts["failed" if what == "error" else what] += int(number)
    if child.wait() and not counts["failed"]:
        counts["failed"] = 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", action="append", help="this release alone (may be repeated)")
    parser.add_argument("--packages", type=Path, default=ROOT / ".triton", help="where the releases lie")
    chosen, arguments = parser.parse_known_args()
    rows, failed = [], 0
    for release in chosen.triton or RELEASES:
        start, folder = time.monotonic(), folder_of(release, chosen.packages)
        print(f"\n== Triton {release}", flush=True)  # noqa: T201
        built = run(folder, BUILT, arguments)
        cells = [f"{built['passed']} passed, {built['failed']} failed, {built['skipped']} skipped", "not run"]
        failed += built["failed"]
        if release in (RELEASES[0], RELEASES[-1]):
            interpreted = run(folder, INTERPRETED, arguments)
            cells[1] = f"{interpreted['passed']} passed, {interpreted['failed']} failed"
            failed += interpreted["failed"] + (interpreted["passed"] == 0)
        rows.append((release, *cells, f"{time.monotonic() - start:.0f} s"))
    print("\n| Triton | built | interpreted (groups of tests) | took |\n|---|---|---|---|")  # noqa: T201
    for row in rows:
        print(f"| {' | '.join(row)} |")  # noqa: T201
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
