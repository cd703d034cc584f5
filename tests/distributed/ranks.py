"""Processes that form a torch.distributed world and run functions together; kept alive from test to test."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests import programs

START_SECONDS = 300.0  # a busy machine may take a minute to import torch in every process
JOB_SECONDS = 300.0


@dataclass(frozen=True)
class Rank:
    """What a job knows about its place."""

    rank: int
    size: int
    device: torch.device


class Ranks:
    """A world of ``size`` processes on ``device_type``: gloo on the CPU, NCCL (with gloo beside it) on GPUs."""

    def __init__(self, size: int, device_type: str) -> None:
        self.size = size
        self.device_type = device_type
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """``job(rank, *args)`` on every rank; the results in their order. Raises AssertionError if one rank fails."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((job, args))
        answers = [pipe.recv() if pipe.poll(JOB_SECONDS) else (False, "no answer: a deadlock?") for pipe in self._pipes]
        failures = [f"rank {rank}: {answer}" for rank, (well, answer) in enumerate(answers) if not well]
        if failures:
            self.close()  # the others may wait in a collective
            raise AssertionError("\n".join(failures))
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes; the next job starts new ones."""
        with contextlib.suppress(OSError, EOFError):
            for pipe in self._pipes:
                pipe.send((None, ()))
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = programs.context()
        handle, meeting = tempfile.mkstemp(prefix="tilefold-ranks-")
        os.close(handle)
        Path(meeting).unlink()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self.device_type, meeting, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            if not pipe.poll(START_SECONDS):
                self.close()
                raise AssertionError("the ranks did not start")
            pipe.recv()


def _serve(rank: int, size: int, device_type: str, meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    cuda = device_type == "cuda"
    device = torch.device(device_type, rank) if cuda else torch.device(device_type)
    if cuda:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size
    )
    pipe.send(rank)
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            break
        if job is None:
            break
        try:
            torch.manual_seed(0)
            answer = (True, job(Rank(rank, size, device), *args))
        except BaseException:  # whatever it is, the test must hear of it
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    torch.distributed.destroy_process_group()
    pipe.send(rank)
    os._exit(0)  # an orderly exit of the interpreter takes seconds once compilers are loaded
