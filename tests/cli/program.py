"""The command line, run in this process."""

from __future__ import annotations

import json
import shlex
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

    @property
    def notes(self) -> list[str]:
        """The lines on stderr, except those that show in which dtype a model computes."""
        return [line for line in self.err.splitlines() if " computes in " not in line]


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


def commands_of(name: str) -> list[list[str]]:
    """Return the commands of a file in the folder ``commands``, as words after ``tilefold``."""
    path = Path(__file__).with_name("commands") / f"{name}.sh"
    commands: list[list[str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        program, *words = shlex.split(line)
        assert program == "tilefold"
        commands.append(words)
    return commands


def done(outcome: Outcome) -> Outcome:
    """The outcome of a command, which must have succeeded."""
    assert outcome.code == 0, outcome.err
    return outcome


def measured(outcome: Outcome) -> Any:
    """The JSON that a command printed."""
    return json.loads(done(outcome).out)


def fails(outcome: Outcome, code: int, *messages: str) -> None:
    """Assert that a command left with this code, printed nothing if it failed, and said all of
    this.
    """
    assert outcome.code == code and (code == 0 or outcome.out == ""), outcome.err
    assert all(message in outcome.err for message in messages), outcome.err


def write_articles() -> None:
    """Write articles.jsonl, 8 documents with metadata, and new-articles.jsonl of 2, here."""
    fields = [
        {"lang": ["de", "fr", "en"][at % 3], "year": 1998 + at, "tags": ["tea", "cup"][: at % 3]}
        for at in range(8)
    ]
    rows: list[dict[str, object]] = [
        {
            "_id": f"k{at}",
            "text": f"How to work with kettles of {at} litres, and tea.",
            "metadata": each,
        }
        for at, each in enumerate(fields)
    ]
    new = [
        {"_id": "k0", "text": "New kettles", "lang": "en"},
        {"_id": "k9", "text": "Kettles again"},
    ]
    for name, lines in (("articles", rows), ("new-articles", new)):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
