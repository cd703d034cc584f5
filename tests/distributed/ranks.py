"""Processes that form a torch.distributed world and run functions together; kept alive from test to
test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from tests import programs

SECONDS = (
    300.0  # of a job; on a busy machine torch alone takes a minute to be imported in every process
)
VOCABULARY = 131  # of the models that ranks train; prime: no number of ranks divides it
TEXTS = [
    "the quick brown fox",
    "jumps over a lazy dog again and again until the dog weighs words",
    "fox",
    "sparse retrieval weighs the words of a vocabulary",
    "a lazy dog again",
    "the vocabulary of a quick fox",
]


@dataclass(frozen=True)
class Rank:
    """What a job knows about its place."""

    rank: int
    size: int
    device: torch.device


class Ranks:
    """A world of ``size`` processes on ``device_type``: gloo on the CPU, NCCL (with gloo beside it)
    on GPUs.
    """

    def __init__(self, size: int, device_type: str) -> None:
        self.size, self.device_type = size, device_type
        self._pools: list[ProcessPoolExecutor] = []
        self._pids: list[int] = []

    def start(self, job: Callable[..., Any], *args: Any) -> list[Future[Any]]:
        """``job(rank, *args)`` on every rank."""
        cuda = self.device_type == "cuda"
        places = [
            Rank(i, self.size, torch.device(self.device_type, *([i] if cuda else [])))
            for i in range(self.size)
        ]
        if not self._pools:
            meeting = f"file://{tempfile.mkdtemp(prefix='tilefold-ranks-')}/meeting"
            self._pools = [
                ProcessPoolExecutor(1, programs.context(), _join, (place, meeting))
                for place in places
            ]
            self._pids = [
                future.result() for future in [pool.submit(os.getpid) for pool in self._pools]
            ]
        return [
            pool.submit(_run, place, job, args)
            for pool, place in zip(self._pools, places, strict=True)
        ]

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of a job by rank. Raises AssertionError if one of them fails or does not
        answer.
        """
        futures = self.start(job, *args)
        done, late = wait(futures, SECONDS, FIRST_EXCEPTION)
        errors = [str(future.exception()) for future in done if future.exception()]
        if errors or late:
            self.close()  # the others may wait in a collective
            raise AssertionError("\n".join(errors) or "no answer: a deadlock?")
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the processes at once, since orderly exits take seconds; the next job starts new
        ones.
        """
        for pid, pool in zip(self._pids, self._pools, strict=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pool.shutdown()
        self._pools, self._pids = [], []


def _join(place: Rank, meeting: str) -> None:
    torch.set_num_threads(1)
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if place.device.type == "cuda" else "gloo",
        init_method=meeting,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=SECONDS),
    )


def _run(place: Rank, job: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    try:
        return job(place, *args)
    except BaseException:  # whatever it is, the test must hear of it
        raise AssertionError(f"rank {place.rank}: {traceback.format_exc()}") from None
