"""Ranks of a process group on one machine: starting them, waiting for them and joining them."""

from __future__ import annotations

import gc
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

# Environment variable with the path of the file by which the ranks find each other.
RENDEZVOUS = "TILEFOLD_RANKS_MEET"
INTERRUPTED = 130  # exit code after Ctrl-C
# After a rank has failed, the other ranks have this time to end with an error message.
_GRACE_SECONDS = 20.0
# After a rank was killed it is shorter: others may wait on a GPU for a message that never comes.
_KILLED_SECONDS = 5.0
_SAVE_SECONDS = 120.0  # after Ctrl-C or SIGTERM, for the ranks to save finished work
_POLL_SECONDS = 0.1


def is_rank() -> bool:
    """Return whether this process was started as a rank, by :func:`run_ranks` or torchrun."""
    return RENDEZVOUS in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def has_other_ranks() -> bool:
    """Return whether this process is one of at least two ranks."""
    return is_rank() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_ranks(command: Sequence[str], count: int) -> int:
    """Run a command as several ranks (processes of one group) of this machine, and wait for them.

    Rank 0 writes to the terminal. The stderr of another rank is shown if that rank is the first to
    fail. Ctrl-C, and a SIGTERM that raises :class:`Terminated` in this process, are forwarded to
    every rank. The ranks then have ``_SAVE_SECONDS`` to save finished work before they are killed.

    Args:
        command: program and arguments. The program calls :func:`join_ranks`.
        count: number of ranks.

    Returns:
        The exit code: 0 if all ranks succeeded, the code of a rank that failed, ``INTERRUPTED``
        after Ctrl-C, or ``TERMINATED`` after SIGTERM.
    """
    with tempfile.TemporaryDirectory(prefix="tilefold-ranks-") as name:
        folder = Path(name)  # of the rendezvous and stderr files
        ranks = [_start(command, rank, count, folder) for rank in range(count)]
        try:
            return _wait_for_ranks(ranks, folder)
        except Terminated:
            _signal_ranks(ranks, signal.SIGTERM)
            return TERMINATED
        except KeyboardInterrupt:
            _signal_ranks(ranks, signal.SIGINT)
            return INTERRUPTED
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
        folder: folder for the rendezvous file, by which the ranks find each other, and for files
            with the stderr of all ranks except rank 0.
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
    uses_terminal = rank == 0
    with _stderr_file(folder, rank).open("wb") as stderr_file:
        return subprocess.Popen(  # noqa: S603 - the command is this program
            command,
            env=environment,
            # The rank ends when its stdin closes, which happens however this process ends.
            stdin=subprocess.PIPE,
            stdout=None if uses_terminal else subprocess.DEVNULL,
            stderr=None if uses_terminal else stderr_file,
            start_new_session=True,  # the terminal sends no Ctrl-C; this process forwards it once
        )


def _stderr_file(folder: Path, rank: int) -> Path:
    """Return the path of the file with the stderr of a rank; the file of rank 0 stays empty."""
    return folder / f"stderr-{rank}"


def _signal_ranks(ranks: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Send a signal to all ranks, and give them ``_SAVE_SECONDS`` to save finished work."""
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)
    _wait_until_ended(ranks, _SAVE_SECONDS)


def _wait_for_ranks(ranks: list[subprocess.Popen[bytes]], folder: Path) -> int:
    """Wait until all ranks succeed or one fails, and report the failure on stderr.

    After a failure, the other ranks have some seconds to end by themselves.

    Args:
        ranks: the processes, in the order of the ranks.
        folder: folder with the stderr files of the ranks.

    Returns:
        The exit code for this process: 0 if all ranks succeeded.
    """
    while all(rank.poll() in (None, 0) for rank in ranks):  # None while a rank runs
        if all(rank.poll() == 0 for rank in ranks):
            return 0
        time.sleep(_POLL_SECONDS)
    failed_rank, code = next(
        (number, rank.returncode)
        for number, rank in enumerate(ranks)
        if rank.poll() not in (None, 0)
    )
    was_killed = code < 0
    _wait_until_ended(ranks, _KILLED_SECONDS if was_killed else _GRACE_SECONDS)
    sys.stderr.write(_failure_report(failed_rank, code, _stderr_file(folder, failed_rank)))
    # The code of rank 0 is preferred, since it may tell that rank 0 has lost another rank.
    exit_code = ranks[0].poll() or code
    # A negative code is the signal that ended the rank, which no process can return itself.
    return 1 if exit_code < 0 else exit_code


def _failure_report(rank: int, code: int, stderr_file: Path) -> str:
    """Return the messages of a failed rank that have not been printed yet, and why it ended.

    Args:
        rank: number of the rank. Rank 0 has written its messages to the terminal itself.
        code: return code of the process; a negative signal number if a signal ended it.
        stderr_file: file with the stderr of the process; empty for rank 0.
    """
    messages = stderr_file.read_text(encoding="utf-8", errors="replace")
    if code < 0:
        reason = f"was ended by signal {-code}"
    elif rank > 0 and not messages:
        reason = f"ended with code {code}"
    else:
        return messages  # the rank has reported its error
    return f"{messages}Error: rank {rank} {reason}. Run the same command again to resume.\n"


def _wait_until_ended(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all ranks have ended, but no longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def share_of_cores(count: int) -> int:
    """Return the number of cores, at least 1, for each of `count` ranks on this machine."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // count)


@contextmanager
def join_ranks(*, training: bool = False) -> Iterator[int]:
    """Join the process group of the other ranks while the context is open.

    The rank is bound to its GPU and its share of the CPU cores.

    Args:
        training: whether the ranks reduce gradients. Tensors on GPUs then go over NCCL, and a
            process group that is already initialised is used and left open.

    Yields:
        The number of this rank; 0 if there are no other ranks.

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
        if succeeded:
            # torch ends the threads of a group when nothing refers to it. DDP and the trainer refer
            # to it and to each other. A thread that is left may abort the process at its end.
            gc.collect()


def _process_group_exists() -> bool:
    """Return whether torch.distributed is initialised in this process."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _use_local_devices() -> None:
    """Bind this rank to its GPU and its share of the CPU cores.

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
    elif RENDEZVOUS not in os.environ:
        # torchrun has set OMP_NUM_THREADS to 1, which is too few. run_ranks() sets it to the share.
        torch.set_num_threads(cores)


@contextmanager
def first_rank_first() -> Iterator[None]:
    """Run the block on rank 0, and then on the other ranks.

    Rank 0 can fill a cache, such as the cache of downloads, which the others then read. If rank 0
    fails, the others go on. Without a process group, the block just runs.
    """
    import torch.distributed as dist

    if not _process_group_exists():
        yield
        return
    is_first = dist.get_rank() == 0
    # Rank 0 reaches the barrier after its block, and the other ranks before theirs.
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

    ``torch.distributed.is_initialized`` is patched in the whole process. Any rank can then save a
    model, for example: if transformers sees a process group, only rank 0 writes the files.
    """
    import torch.distributed as dist

    is_initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = is_initialized


def _end_with_parent() -> None:
    """End this rank when the process that started it closes stdin; runs in a thread.

    SIGTERM lets the rank save finished work. A rank that waits for others in a collective may never
    handle the signal, and is killed after ``_SAVE_SECONDS``.
    """
    stdin = 0  # file descriptor
    while os.read(stdin, 1024):  # blocks until there is input; empty when stdin is closed
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SAVE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
