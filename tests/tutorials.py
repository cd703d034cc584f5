"""Runs the commands of a tutorial in order, and compares what they print with its page."""

from __future__ import annotations

import filecmp
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.program import run_steps
from tests.test_tutorial_trainer import run_python, shrink

DOCS = Path(__file__).parents[1] / "docs"
# `make test-tutorials` runs the pages as they are, and compares the numbers that they print.
FULL_SIZE = os.environ.get("TILEFOLD_FULL_TUTORIALS") == "1"
# Largest differences from a number of a page. Scores and trainings differ between CPUs.
_TOLERANCE = 0.02
_RELATIVE_TOLERANCE = 0.05

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"as `([\w.-]+\.py)`:\s*\Z")
_NUMBER = re.compile(r"(?<![\w@])[+-]?\d(?:[\d.,]*\d)?(?:\*| [kM]B)?")
_FRAME = re.compile(r"[\s┏┓┗┛┡┩├┤└┘━─┳┻╇┴┼]*")
# Lines that depend on the documents.
_LINE_OF_DATA = re.compile(
    r"│ (?:#|q\d*|q-\S+) │.*"  # a row of a table whose first cell is a rank or a query id
    r"|│ │ │.*"  # a further line of such a row
    r"|# of # [a-z ]+ (?:was|were) truncated at # tokens",
)
# Largest value of these options in a test.
_SIZES_OF_TRAINING = {"--steps": 4, "--batch-size": 4, "--evaluate-steps": 2}


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        language: language of the block: ``"sh"`` for commands, ``"text"`` for what they print.
        body: text of the block.
        file_name: the file that the page asks to save the block as; None for other blocks.
    """

    language: str
    body: str
    file_name: str | None


def blocks_of(page: str, *, until: str | None = None) -> list[Block]:
    """Return the blocks of a page of docs/.

    Args:
        page: file name of the page.
        until: heading of the first section that is left out; None for the complete page.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    if until is not None:
        assert f"\n{until}\n" in text, f"{page} has no heading {until!r}"
        text = text.partition(f"\n{until}\n")[0]
    blocks = []
    for match in _BLOCK.finditer(text):
        file_name = _FILE_NAME.search(text[: match.start()])
        blocks.append(Block(match[1], match[2], file_name[1] if file_name else None))
    return blocks


def missing_lines(expected: str, printed: str, *, same_numbers: bool = False) -> list[str]:
    """Return the lines of a block that were not printed.

    ``...`` in a line stands for any text, and frames of tables are not compared. By default numbers
    may differ, and lines that depend on the documents are not compared either.

    Args:
        expected: the block of the page.
        printed: output of the commands above it.
        same_numbers: whether the numbers must be those of the page, within a tolerance.
    """
    printed_lines = [_with_single_blanks(line) for line in printed.splitlines()]
    missing = []
    for line in expected.splitlines():
        if _FRAME.fullmatch(line):
            continue
        if not same_numbers and _LINE_OF_DATA.fullmatch(
            _with_single_blanks(_NUMBER.sub("#", line))
        ):
            continue
        pattern = _pattern_of(line)
        matches = filter(None, map(pattern.fullmatch, printed_lines))
        if same_numbers:
            shown = [number[0] for number in _NUMBER.finditer(line)]
            found = any(_are_close(shown, match.groups()) for match in matches)
        else:
            found = any(matches)
        if not found:
            missing.append(line)
    return missing


def _with_single_blanks(line: str) -> str:
    """Return a line with one blank between its words."""
    return " ".join(line.split())


def _pattern_of(line: str) -> re.Pattern[str]:
    """Return the pattern of a line of a page, with a group for each number."""
    pattern = re.escape(_with_single_blanks(_NUMBER.sub("\0", line)))
    pattern = pattern.replace(r"\.\.\.", ".*")
    return re.compile(pattern.replace("\0", f"({_NUMBER.pattern})"))


def _are_close(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Return whether numbers differ by little, as they do between two kinds of CPU."""
    return all(
        math.isclose(_value(a), _value(b), rel_tol=_RELATIVE_TOLERANCE, abs_tol=_TOLERANCE)
        for a, b in zip(shown, printed, strict=True)
    )


def _value(number: str) -> float:
    """Return the value of a printed number, without its unit and its star."""
    return float(re.sub(r"[^\d.+-]", "", number))


class TutorialRunner:
    """Runs blocks of tutorials in the current folder.

    Attributes:
        printed: output of the commands since the last block of output.
    """

    def __init__(
        self,
        capsys: pytest.CaptureFixture[str],
        *,
        sizes_of_files: Mapping[str, dict[str, str]],
        replaced_words: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            capsys: pytest's fixture, which captures the output.
            sizes_of_files: script -> text before a number -> the smaller number of the test.
            replaced_words: word of a command -> the word that replaces it.
        """
        self._capsys = capsys
        self._sizes_of_files = sizes_of_files
        self._replaced_words = dict(replaced_words or {})
        self.printed = ""

    def run(self, blocks: list[Block]) -> None:
        """Save scripts, run commands, and compare their output with the blocks of the page."""
        for block in blocks:
            if block.file_name is not None:
                sizes = {} if FULL_SIZE else self._sizes_of_files.get(block.file_name, {})
                script = shrink(block.body, sizes)
                Path(block.file_name).write_text(script, encoding="utf-8")
            elif block.language == "sh":
                for line in block.body.splitlines():
                    self._run_command(line)
            elif block.language == "text" and self.printed:
                missing = missing_lines(block.body, self.printed, same_numbers=FULL_SIZE)
                assert missing == [], f"not printed: {missing}\n{self.printed}"
                self.printed = ""

    def _run_command(self, line: str) -> None:
        """Run a line of a shell block in this process; ``pip`` is left out."""
        command, _, output_file = line.partition(" > ")
        program, *words = shlex.split(command)
        if not FULL_SIZE:
            words = self._smaller(words)
        if program == "tilefold":
            run_steps(tuple(words))
        elif program == "python":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", words)
                run_python(Path(words[0]).read_text(encoding="utf-8"), {}, words[0])
        elif program == "cmp":
            assert filecmp.cmp(*words, shallow=False), f"{line}: the files differ"
        else:
            assert program == "pip", f"{line}: the test cannot run {program}"
        output, errors = self._capsys.readouterr()
        if output_file:
            Path(output_file).write_text(output, encoding="utf-8")
        else:
            self.printed += output
        self.printed += errors

    def _smaller(self, words: list[str]) -> list[str]:
        """Return the words of a command with few steps of training, and with replaced words."""
        result = [self._replaced_words.get(word, word) for word in words]
        for position, word in enumerate(words[:-1]):
            if word in _SIZES_OF_TRAINING:
                size = min(int(words[position + 1]), _SIZES_OF_TRAINING[word])
                result[position + 1] = str(size)
        return result
