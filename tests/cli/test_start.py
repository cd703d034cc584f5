"""What the start of a command imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.processes import environment

SEARCH = """
import sys
from tilefold import cli

try:
    cli.main(["search", "red apples", "--index", sys.argv[1], "--model", sys.argv[2]])
except SystemExit as leave:
    assert not leave.code
trainers = [name for name in sys.modules if name.endswith(".trainer")]
unneeded = [name for name in ("datasets", "pandas", "peft", "sklearn") if name in sys.modules]
assert not trainers and not unneeded, (trainers, unneeded)
"""


def test_a_search_imports_no_trainer_and_no_library_that_only_trainers_need(
    shared: Path,
    masked_lm: str,
) -> None:
    # A fresh interpreter, because this one has imported the trainers.
    process = subprocess.run(
        [sys.executable, "-c", SEARCH, str(shared / "index"), masked_lm],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
