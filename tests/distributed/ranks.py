"""Processes that form a torch.distributed process group and run functions together.

They live from test to test.
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

# Time limit of a job. On a busy machine, importing torch takes a minute in every process.
SECONDS = 300.0
# Vocabulary of the models that ranks train: a prime, which no number of ranks divides.
VOCABULARY = 131
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
    """The process that runs a job.

    Attributes:
        rank: Number of the process.
        size: Number of processes in the group.
        device: Device of the process.
    """

    rank: int
    size: int
    device: torch.device


class Ranks:
    """A group of processes, with gloo on the CPU, and with NCCL too on GPUs.

    Args:
        size: Number of processes.
        device_type: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, size: int, device_type: str) -> None:
        self.size = size
        self.device_type = device_type
        self._pools: list[ProcessPoolExecutor] = []
        self._pids: list[int] = []

    def start(self, job: Callable[..., Any], *args: Any) -> list[Future[Any]]:
        """Start ``job(rank, *args)`` on every rank."""
        ranks = [Rank(number, self.size, self._device(number)) for number in range(self.size)]
        if not self._pools:
            store = f"file://{tempfile.mkdtemp(prefix='tilefold-ranks-')}/store"
            self._pools = [
                ProcessPoolExecutor(1, programs.context(), _join, (rank, store)) for rank in ranks
            ]
            pids = [pool.submit(os.getpid) for pool in self._pools]
            self._pids = [pid.result() for pid in pids]
        return [
            pool.submit(_run, rank, job, args)
            for pool, rank in zip(self._pools, ranks, strict=True)
        ]

    def _device(self, number: int) -> torch.device:
        if self.device_type == "cuda":
            return torch.device("cuda", number)
        return torch.device(self.device_type)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``job(rank, *args)`` on every rank, and return the results in their order.

        Raises:
            AssertionError: If a rank fails or does not answer.
        """
        futures = self.start(job, *args)
        done, late = wait(futures, SECONDS, FIRST_EXCEPTION)
        errors = [str(future.exception()) for future in done if future.exception()]
        if errors or late:
            self.close()  # the others may wait in a collective
            raise AssertionError("\n".join(errors) or "no answer: a deadlock?")
        return [future.result() for future in futures]

    def close(self) -> None:
        """Kill the processes, since orderly exits take seconds. The next job starts new ones."""
        for pid, pool in zip(self._pids, self._pools, strict=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pool.shutdown()
        self._pools = []
        self._pids = []


def _join(rank: Rank, store: str) -> None:
    """Join the process group, as the first job of a process."""
    torch.set_num_threads(1)
    on_gpu = rank.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank.device)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=store,
        rank=rank.rank,
        world_size=rank.size,
        timeout=timedelta(seconds=SECONDS),
    )


def _run(rank: Rank, job: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a job, and turn any error into one whose text can be sent to the test."""
    torch.manual_seed(0)
    try:
        return job(rank, *args)
    except BaseException:  # the test must learn of every error
        raise AssertionError(f"rank {rank.rank}: {traceback.format_exc()}") from None
