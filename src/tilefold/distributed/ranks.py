"""Ranks of a process group on one machine: starting them, waiting for them and joining them."""

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

from tilefold._internal.termination import TERMINATED, Terminated

RENDEZVOUS = "TILEFOLD_RANKS_MEET"  # variable with the file by which ranks find each other
INTERRUPTED = 130  # exit code after Ctrl-C
_GRACE_SECONDS = 20.0  # after a rank failed, for the others to report why they end too
# The same after a rank was killed: the others may wait on a GPU for a message that never comes.
_KILLED_SECONDS = 5.0
_SAVE_SECONDS = 120.0  # after Ctrl-C or SIGTERM, for ranks to save finished work
_POLL_SECONDS = 0.1


def is_rank() -> bool:
    """Whether this process was started as a rank, by :func:`run_ranks` or by torchrun."""
    return RENDEZVOUS in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def has_other_ranks() -> bool:
    """Whether this process is one of at least two ranks."""
    return is_rank() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_ranks(command: Sequence[str], count: int) -> int:
    """Run a command as several ranks (processes of one group) of this machine, and wait for them.

    The first rank writes to the terminal. The stderr of another rank is shown if that rank is the
    first to fail. Ctrl-C, and a SIGTERM that raises :class:`Terminated` in this process, are
    forwarded to every rank. The ranks then have ``_SAVE_SECONDS`` to save finished work before they
    are killed.

    Args:
        command: program and arguments; it calls :func:`join_ranks`.
        count: number of ranks.

    Returns:
        The exit code: 0, that of the first rank that failed, ``INTERRUPTED`` after Ctrl-C, or
        ``TERMINATED`` after SIGTERM.
    """
    with tempfile.TemporaryDirectory(prefix="tilefold-ranks-") as name:
        folder = Path(name)
        ranks = [_start(command, rank, count, folder) for rank in range(count)]
        try:
            return _outcome(ranks, folder)
        except KeyboardInterrupt as interruption:
            is_termination = isinstance(interruption, Terminated)
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGTERM if is_termination else signal.SIGINT)
            _wait(ranks, time.monotonic() + _SAVE_SECONDS)
            return TERMINATED if is_termination else INTERRUPTED
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                if rank.stdin is not None:
                    rank.stdin.close()


def _start(
    command: Sequence[str],
    rank: int,
    count: int,
    folder: Path,
) -> subprocess.Popen[bytes]:
    """Start the process of one rank, with the environment variables that torchrun sets.

    Args:
        command: program and arguments.
        rank: number of the rank.
        count: number of ranks.
        folder: folder for the rendezvous file, by which the ranks find each other, and for the
            stderr of each rank but the first.
    """
    cores = str(share_of_cores(count))
    environment = {
        **os.environ,
        RENDEZVOUS: str(folder / "meet"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("RAYON_NUM_THREADS", cores)
    environment.setdefault("OMP_NUM_THREADS", cores)
    is_first = rank == 0
    with _stderr_file(folder, rank).open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - the command is this program
            command,
            env=environment,
            stdin=subprocess.PIPE,  # closes when this process ends, in whatever way
            stdout=None if is_first else subprocess.DEVNULL,
            stderr=None if is_first else log,
            start_new_session=True,  # the terminal sends no Ctrl-C; this process forwards it once
        )


def _stderr_file(folder: Path, rank: int) -> Path:
    """Return the file with the stderr of a rank; that of the first rank stays empty."""
    return folder / f"stderr-{rank}"


def _outcome(ranks: list[subprocess.Popen[bytes]], folder: Path) -> int:
    """Wait until all ranks succeed or one fails, and report the failure on stderr.

    After a failure, the other ranks have some seconds to end by themselves.

    Args:
        ranks: the processes, in the order of the ranks.
        folder: folder with the stderr of each rank but the first.

    Returns:
        The exit code of this process: 0 if all ranks succeeded.
    """
    while all(rank.poll() in (None, 0) for rank in ranks):
        if all(rank.poll() == 0 for rank in ranks):
            return 0
        time.sleep(_POLL_SECONDS)
    number, failed = next((number, rank) for number, rank in enumerate(ranks) if rank.poll())
    code = int(failed.returncode)
    was_killed = code < 0
    _wait(ranks, time.monotonic() + (_KILLED_SECONDS if was_killed else _GRACE_SECONDS))
    # The first rank writes to stderr itself.
    is_first = number == 0
    text = ""
    if not is_first:
        text = _stderr_file(folder, number).read_text(encoding="utf-8", errors="replace")
    if was_killed or not (is_first or text):
        end = f"was ended by signal {-code}" if was_killed else f"ended with code {code}"
        text += (
            f"Error: rank {number} {end}. Run the same command again to go on from what is "
            "complete.\n"
        )
    sys.stderr.write(text)
    # The first rank may know a better code: its error may be that another rank is lost.
    exit_code = ranks[0].poll() or code
    # Codes below 0 are signals.
    return exit_code if exit_code > 0 else 1


def _wait(ranks: list[subprocess.Popen[bytes]], until: float) -> None:
    """Wait until all ranks have ended, or until a time of ``time.monotonic``."""
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def share_of_cores(count: int) -> int:
    """Return how many cores each of `count` ranks of this machine may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // count)


@contextmanager
def join_ranks(*, training: bool = False) -> Iterator[int]:
    """Join the process group of the other ranks while the context is open.

    A rank uses the GPU of its local number and its share of the cores.

    Args:
        training: whether the ranks reduce gradients. Tensors on GPUs then go over NCCL, and a
            process group that is already initialised is used and left open.

    Yields:
        The number of this rank; 0 where there are no others.

    Raises:
        ValueError: if there are fewer GPUs than ranks.
    """
    if training and _process_group_exists():
        import torch.distributed as dist

        yield dist.get_rank()
        return
    if not has_other_ranks():
        yield 0
        return
    import torch
    import torch.distributed as dist

    if RENDEZVOUS in os.environ:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    _use_local_devices()
    rank = int(os.environ["RANK"])
    uses_nccl = training and torch.cuda.is_available()
    rendezvous = os.environ.get(RENDEZVOUS)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if uses_nccl else "gloo",
        init_method=None if rendezvous is None else f"file://{rendezvous}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    succeeded = False
    try:
        yield rank
        succeeded = True
    finally:
        # NCCL would wait for the other ranks, so that a failed rank could not report its error.
        if succeeded or not uses_nccl:
            dist.destroy_process_group()


def _process_group_exists() -> bool:
    """Whether torch.distributed is initialised in this process."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _use_local_devices() -> None:
    """Make torch use the GPU with this rank's local number, and this rank's share of the cores.

    Raises:
        ValueError: if there are fewer GPUs than ranks.
    """
    import torch

    cores = share_of_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ.setdefault("RAYON_NUM_THREADS", str(cores))  # threads of the tokenizers
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        n_gpus = torch.cuda.device_count()
        if local_rank >= n_gpus:
            raise ValueError(
                f"expected at most {n_gpus} ranks, one for each GPU, got {local_rank + 1}.",
            )
        torch.cuda.set_device(local_rank)
    elif RENDEZVOUS not in os.environ:  # torchrun sets OMP_NUM_THREADS to 1
        torch.set_num_threads(cores)


@contextmanager
def first_rank_first() -> Iterator[None]:
    """Run the block on the first rank, and then on the others.

    The first rank can fill a cache, such as that of downloads, which the others then read. If it
    fails, the others go on. Without a process group, the block just runs.
    """
    import torch.distributed as dist

    if not _process_group_exists():
        yield
        return
    is_first = dist.get_rank() == 0
    # The barrier is where the first rank, after its block, meets the others before theirs.
    if not is_first:
        dist.barrier()
    try:
        yield
    finally:
        if is_first:
            dist.barrier()


@contextmanager
def as_single_process() -> Iterator[None]:
    """Hide the process group from libraries while the context is open.

    For example, transformers saves a model on the first rank only if it sees a process group.
    """
    import torch.distributed as dist

    is_initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = is_initialized


def _end_with_parent() -> None:
    """End this rank when the process that started it closes stdin.

    SIGTERM lets the rank save finished work. A rank that waits for others in a collective may never
    handle it, and is killed after ``_SAVE_SECONDS``.
    """
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SAVE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
