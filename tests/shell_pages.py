"""Pages whose commands are run in a shell, and whose outputs are compared with the page."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.cli.program import run_steps
from tests.processes import environment
from tests.test_tutorial_trainer import BLOCK, run_python, shrink

FILE = re.compile(r"as `([\w.-]+)`[^`\n]*:\s*\Z")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
ANY_TEXT = "\0"  # stands for the three dots of a page
PROGRAMS = {
    "tilefold": "-m tilefold.cli",
    "python": "",
    "torchrun": "-m torch.distributed.run",
    "accelerate": "-m accelerate.commands.accelerate_cli",
}
TIMEOUT_SECONDS = 600


def skip_without(*programs: str) -> None:
    """Skip a test if a program is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs the programs {missing}")


class ShellPage:
    """Runs the blocks of a page one after another.

    Blocks after "as `name`:" are written to files, and blocks of commands are run. Blocks of output
    must have been printed by the commands before them. A block of commands may only fail if the
    page shows its error.
    """

    def __init__(
        self,
        page: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        *,
        sizes: Mapping[str, Mapping[str, str]],
        replacements: Mapping[str, str],
    ) -> None:
        """Prepare to run a page on the CPU, with one thread in each process.

        Args:
            page: the page.
            folder: an empty folder, which becomes the working directory.
            monkeypatch: changes the working directory and the environment of this process.
            capsys: reads the output of commands that run in this process.
            sizes: name of a file -> the text before a number in it -> a smaller number.
            replacements: text of the page -> text of this test.
        """
        self._text = page.read_text(encoding="utf-8")
        for old, new in replacements.items():
            assert old in self._text
            self._text = self._text.replace(old, new)
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self._sizes = sizes
        programs = folder / "bin"
        _write_programs(programs)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(folder / "cache"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self._environment = environment(PATH=path, OMP_NUM_THREADS="1")

    def run(
        self,
        *,
        after_file: Callable[[str], None] = lambda name: None,
        check_output: Callable[[str], None] = lambda output: None,
    ) -> None:
        """Run all blocks.

        Args:
            after_file: function that is called with the name of each file that was written.
            check_output: function that is called with the output of each block of commands.
        """
        code, output = 0, ""
        for block in BLOCK.finditer(self._text):
            language, body = block.groups()
            file = FILE.search(self._text[: block.start()])
            if file:
                content = shrink(body, dict(self._sizes.get(file[1], {})))
                Path(file[1]).write_text(content, encoding="utf-8")
                after_file(file[1])
            elif language == "sh" and not body.startswith(("pip ", "export ")):
                assert code == 0, output
                code, output = self._run_commands(body)
                check_output(output)
            elif language in ("text", "json"):
                assert _lines_not_printed(body, output) == [], output
                if "Error: " in body:
                    code = 0
        assert code == 0, output

    def _run_commands(self, commands: str) -> tuple[int, str]:
        """Run the commands of a block, and return the exit code and what they print."""
        if not _is_plain(commands):
            return self._run_in_shell(commands)
        for line in commands.splitlines():
            program, *words = shlex.split(line)
            if program == "tilefold":
                run_steps(tuple(words))
            else:
                self._monkeypatch.setattr(sys, "argv", words)
                run_python(Path(words[0]).read_text(encoding="utf-8"), {}, words[0])
        return 0, "".join(self._capsys.readouterr())

    def _run_in_shell(self, commands: str) -> tuple[int, str]:
        """Run commands in bash until one fails, and return the exit code and what they print.

        The output goes to a file, because a server in the background would keep a pipe open.
        """
        output = self._folder / "output.txt"
        with output.open("w", encoding="utf-8") as file:
            process = subprocess.run(
                ["bash", "-e", "-c", commands],
                env=self._environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        return process.returncode, output.read_text(encoding="utf-8")


def _write_programs(folder: Path) -> None:
    """Write the programs of this environment that pages use into a new folder."""
    folder.mkdir()
    for name, options in PROGRAMS.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n', encoding="utf-8")
        program.chmod(0o755)


def _is_plain(commands: str) -> bool:
    """Return whether all commands may run in this process, which has imported the libraries.

    They are commands of tilefold, except servers and several processes, and Python scripts.
    """
    needs_shell = re.search(r"[|&;<>$]|tilefold serve|--devices", commands)
    programs = {line.split()[0] for line in commands.splitlines()}
    return not needs_shell and programs <= {"tilefold", "python"}


def _lines_not_printed(shown: str, output: str) -> list[str]:
    """Return the lines that a page shows and a program did not print, whatever their numbers are.

    Args:
        shown: lines of the page, in which ``...`` is any text.
        output: what the program printed.
    """
    output = NUMBER.sub("0", output)
    missing = []
    for line in shown.splitlines():
        parts = NUMBER.sub("0", line.replace("...", ANY_TEXT)).split(ANY_TEXT)
        if not re.search(".*".join(re.escape(part) for part in parts), output):
            missing.append(line)
    return missing
