"""Ranks of a process group on one machine: started by a command of ours, or by torchrun, and
joined.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

RENDEZVOUS = "TILEFOLD_RANKS_MEET"  # names a file by which the ranks of a command find each other
INTERRUPTED = 130
_GRACE_SECONDS = 20.0  # for the other ranks to tell why they end too
_KILLED_SECONDS = (
    5.0  # the same where one was killed: others may wait on a GPU for what it never sends
)
_CTRL_C_SECONDS = 120.0  # to keep what is done
_POLL_SECONDS = 0.1


def is_rank() -> bool:
    """Whether this process is a rank, of :func:`run_ranks` or of torchrun."""
    return RENDEZVOUS in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def has_other_ranks() -> bool:
    """Whether this process is one of at least two ranks."""
    return is_rank() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_ranks(command: Sequence[str], count: int) -> int:
    """Run `command`, which calls :func:`join_ranks`, as `count` ranks of this machine; its exit code.

    The first rank writes to the terminal. What another one wrote to stderr is shown if it was the
    first to fail. Ctrl-C reaches all ranks once, and none of them outlives this process.
    """
    with tempfile.TemporaryDirectory(prefix="tilefold-ranks-") as name:
        home = Path(name)
        ranks = [_start(command, rank, count, home) for rank in range(count)]
        try:
            return _outcome(ranks, home)
        except KeyboardInterrupt:
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGINT)
            _wait(ranks, time.monotonic() + _CTRL_C_SECONDS)
            return INTERRUPTED
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                if rank.stdin is not None:
                    rank.stdin.close()


def _start(command: Sequence[str], rank: int, count: int, home: Path) -> subprocess.Popen[bytes]:
    share = str(share_of_cores(count))
    environment = os.environ | {
        RENDEZVOUS: str(home / "meet"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "RAYON_NUM_THREADS": os.environ.get("RAYON_NUM_THREADS", share),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share),
    }
    with (home / f"stderr-{rank}").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - the command is this program
            command,
            env=environment,
            stdin=subprocess.PIPE,  # closes when this process ends, however it does
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=None if rank == 0 else log,
            start_new_session=True,  # Ctrl-C comes from here, once
        )


def _outcome(ranks: list[subprocess.Popen[bytes]], home: Path) -> int:
    while all(rank.poll() in (None, 0) for rank in ranks):
        if all(rank.poll() == 0 for rank in ranks):
            return 0
        time.sleep(_POLL_SECONDS)
    number, failed = next((i, rank) for i, rank in enumerate(ranks) if rank.poll())
    code = int(failed.returncode)
    _wait(ranks, time.monotonic() + (_KILLED_SECONDS if code < 0 else _GRACE_SECONDS))
    first = ranks[0].poll()
    # the first rank, which writes to stderr itself, waits for another, or fails because of it
    text = (
        (home / f"stderr-{number}").read_text(encoding="utf-8", errors="replace") if number else ""
    )
    if code < 0 or (number and not text):
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        text += f"Error: rank {number} {ended}. Run the same command again to go on from what is complete.\n"
    sys.stderr.write(text)
    return (first or code) if (first or code) > 0 else 1


def _wait(ranks: list[subprocess.Popen[bytes]], until: float) -> None:
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def share_of_cores(count: int) -> int:
    """Cores of one of `count` ranks."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // count)


@contextmanager
def join_ranks(*, training: bool = False) -> Iterator[int]:
    """Join the other ranks, if this process is one; its number, 0 where it is alone.

    A rank takes the GPU of its number, which must be there, and its share of the cores. Where ranks
    are `training`, tensors on GPUs go over NCCL; a process group that there is already is used as
    it is.
    """
    if not has_other_ranks() and not training:
        yield 0
        return
    import torch
    import torch.distributed as dist

    if training and dist.is_available() and dist.is_initialized():
        yield dist.get_rank()
        return
    if not has_other_ranks():
        yield 0
        return

    if RENDEZVOUS in os.environ:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    local, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    share = share_of_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ.setdefault("RAYON_NUM_THREADS", str(share))  # of the tokenizers
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"expected at most {torch.cuda.device_count()} ranks, one for each GPU, got {local + 1}.",
            )
        torch.cuda.set_device(local)
    elif RENDEZVOUS not in os.environ:  # torchrun says one
        torch.set_num_threads(share)
    meet = os.environ.get(RENDEZVOUS)
    nccl, done = training and torch.cuda.is_available(), False
    backend, count = "cpu:gloo,cuda:nccl" if nccl else "gloo", int(os.environ["WORLD_SIZE"])
    place = None if meet is None else f"file://{meet}"
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=count)
    try:
        yield rank
        done = True
    finally:
        if done or not nccl:  # NCCL waits for the other ranks, and one that failed could not say so
            dist.destroy_process_group()


@contextmanager
def first_rank_first() -> Iterator[None]:
    """The first rank runs the block before the others do: what it leaves in a cache, they find
    there.
    """
    import torch.distributed as dist

    many = dist.is_available() and dist.is_initialized()
    if many and dist.get_rank():
        dist.barrier()
    try:
        yield
    finally:  # where the first one fails, the others must hear of it, and not wait
        if many and not dist.get_rank():
            dist.barrier()


@contextmanager
def as_single_process() -> Iterator[None]:
    """Libraries take this process for the only one within it: transformers saves a model on the
    first rank alone.
    """
    import torch.distributed as dist

    stock = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = stock


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
