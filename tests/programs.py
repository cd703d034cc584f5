"""Python programs that tests start, kill and listen to: forked from a process that has imported the
slow libraries.

A fresh interpreter needs six seconds to import sentence-transformers; a fork of one that has done
so needs none. What is forked has imported nothing of ours, computed nothing and has one thread.
Where processes cannot be forked safely, on other systems and beside a GPU, the interpreter is a
fresh one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch

from tests.processes import ROOT, environment

PIPE = subprocess.PIPE
# Time limit of a program that runs to its end, for a busy machine.
LONGEST_SECONDS = 900.0
Stream = Path | int | None


class Forked:
    """A program that was forked, with what tests use of ``subprocess.Popen``; for arguments see
    :func:`start`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None,
        stdout: Stream,
        stderr: Stream,
    ) -> None:
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        ends: list[Any] = []
        for name, asked in (("stdout", stdout), ("stderr", stderr)):
            end: Any = asked if isinstance(asked, Path) else os.devnull
            if asked == PIPE:
                ours, end = multiprocessing.Pipe(duplex=False)
                setattr(self, name, os.fdopen(os.dup(ours.fileno()), encoding="utf-8"))
                ours.close()
            ends.append(end)
        where = str(cwd or Path.cwd())
        self._process: Any = _context().Process(
            target=_become,
            args=(list(arguments), dict(env), where, *ends),
        )
        self._process.start()
        self.pid: int = self._process.pid
        for end in ends:
            if isinstance(end, Connection):
                end.close()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code = self._process.exitcode
        return None if code is None else int(code)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return code

    def send_signal(self, sent: int) -> None:
        # The server of forks may have reaped the process before its exit code arrives here.
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, sent)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self._process.join()


def start(
    *arguments: str | Path | int,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: Stream = None,
    stderr: Stream = None,
) -> Any:
    """Start Python with these arguments, ``-c code ...`` or ``-m module ...``: a ``Popen``, or what
    looks like one.

    Args:
        arguments: of the interpreter.
        env: its whole environment; by default that of this process.
        cwd: where it runs.
        stdout, stderr: ``PIPE``, a file that is written, or None for nowhere.
    """
    given, environ = list(map(str, arguments)), os.environ if env is None else env
    if _can_fork():
        return Forked(given, environ, cwd, stdout, stderr)
    with ExitStack() as opened:
        out, err = (
            opened.enter_context(asked.open("w"))
            if isinstance(asked, Path)
            else asked or subprocess.DEVNULL
            for asked in (stdout, stderr)
        )
        return subprocess.Popen(
            [sys.executable, *given],
            env=environ,
            cwd=cwd,
            stdout=out,
            stderr=err,
            text=True,
        )


def run(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = LONGEST_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end; its code and what it wrote."""
    with tempfile.TemporaryDirectory(prefix="tilefold-test-") as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        with start(*arguments, env=env, cwd=cwd, stdout=out, stderr=err) as process:
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess(
            list(map(str, arguments)),
            code,
            out.read_text(),
            err.read_text(),
        )


def context() -> Any:
    """That of ``multiprocessing``, for processes which have the slow libraries; fresh ones beside a
    GPU.
    """
    return _context() if _can_fork() else multiprocessing.get_context("spawn")


@cache
def _can_fork() -> bool:
    return sys.platform == "linux" and not torch.cuda.is_available()


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with mock.patch.dict(os.environ, environment(ROOT)):
        forkserver.ensure_running()
    return context


def _become(arguments: list[str], env: dict[str, str], cwd: str, *ends: Any) -> None:
    """Be the program, in the forked process."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    _redirect(0, os.open(os.devnull, os.O_RDONLY))
    for number, end in enumerate(ends, 1):
        connected = isinstance(end, Connection)
        _redirect(
            number,
            end.fileno()
            if connected
            else os.open(end, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
        )
    streams: list[Any] = [
        os.fdopen(os.dup(number), "w", 1 if number == 2 else -1) for number in (1, 2)
    ]
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = streams
    if threads := env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    kind, what, *rest = arguments
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["-c", *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(what, "<string>", "exec"), vars(main))  # noqa: S102


def _redirect(number: int, to: int) -> None:
    os.dup2(to, number)
