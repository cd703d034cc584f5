"""The command line, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


Call = Callable[..., Outcome]


def run_steps(*steps: tuple[str | Path, ...]) -> None:
    """Run commands one after the other, each of which must succeed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        for step in steps:
            assert run_cli(*step) == 0, step


def done(outcome: Outcome) -> Outcome:
    """The outcome of a command, which must have succeeded."""
    assert outcome.code == 0, outcome.err
    return outcome


def measured(outcome: Outcome) -> Any:
    """The JSON that a command printed."""
    return json.loads(done(outcome).out)


def fails(outcome: Outcome, code: int, *messages: str) -> None:
    """Assert that a command left with this code, printed nothing if it failed, and said all of this."""
    assert outcome.code == code and (code == 0 or outcome.out == ""), outcome.err
    assert all(message in outcome.err for message in messages), outcome.err
