"""The command line, run in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tilefold import cli


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code, and what it wrote to stdout and stderr."""

    code: int
    out: str
    err: str


def run_cli(*args: str | Path) -> int:
    """The exit code of the command line, as its entry point gives it."""
    with pytest.raises(SystemExit) as leave:
        cli.main([str(arg) for arg in args])
    return int(leave.value.code or 0)
