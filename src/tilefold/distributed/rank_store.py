"""Key-value store of the ranks of a process group, which ends all ranks if one fails.

It is used by ranks that share work without collectives, so that no rank waits for the batch of
another.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tilefold._internal.files import LOCK, InUseError, lock_folder, scratch_folder
from tilefold.distributed.errors import RankError

__all__ = ["POLL_SECONDS", "RESUME_HINT", "RankStore", "open_rank_store"]

JOIN_SECONDS = 300.0  # for all ranks to join: loading a model may take minutes
POLL_SECONDS = 0.1
RESUME_HINT = "What was reported is kept: run the same again, with any number of ranks, to go on."
FINISHED = "finished"  # key that rank 0 puts when the work of all ranks is complete

# Longest time that rank 0 waits for the other ranks to leave before it removes the store. After a
# failure they may still encode a batch before they look for it.
_LEAVE_SECONDS = 20.0
# The same when the work is complete. It is long, because a rank that is late finds no store, and
# reports that rank 0 has ended early.
_LEAVE_WHEN_COMPLETE_SECONDS = 300.0
_STORE_SECONDS = 1.0  # time-out of one access to the store
# Keys of the store.
_COUNTER = "counter"
_FAILURE = "failure"  # {"message": ..., "is_interrupt": ...} of the failure that ends all ranks
_N_FAILURES = "n_failures"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RankStore:
    """Key-value store shared by all ranks of a process group, for use from any thread.

    Every rank holds the lock of a folder while it works. Rank 0 watches the locks of all other
    ranks, and they watch rank 0's, so that a rank that dies ends the others with an error instead
    of a time-out.
    """

    def __init__(self, rank: int, rank_folders: Sequence[Path]) -> None:
        """Open the store, a file in the folder of rank 0.

        Args:
            rank: the rank of this process.
            rank_folders: the folder whose lock each rank holds, in the order of the ranks.
        """
        self.rank = rank
        self._watched_folders = _watched_folders(rank, rank_folders)
        self._store = dist.FileStore(  # type: ignore[attr-defined]
            str(rank_folders[0] / "store"),
            len(rank_folders),
        )
        self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self._last_watch = 0.0  # time.monotonic() when the locks were last checked

    @property
    def watched_ranks(self) -> list[int]:
        """The ranks that this rank watches: rank 0 watches all others, and they watch rank 0."""
        return list(self._watched_folders)

    def put(self, key: str, value: object) -> None:
        """Store a JSON value under `key`, for all ranks."""
        self._store.set(key, json.dumps(value))

    def has(self, *keys: str) -> bool:
        """Return whether values have been put for all `keys`.

        Raises:
            RankError: if rank 0 has ended.
        """
        try:
            return bool(self._store.check(list(keys)))
        except RuntimeError:  # rank 0 has removed the store
            raise _ended_early(0) from None

    def wait_for(self, key: str) -> Any:
        """Return the value of `key` once a rank has put it.

        Raises:
            RankError: if a rank failed or died in the meantime.
            KeyboardInterrupt: if a rank was interrupted.
        """
        while not self.has(key):
            self.raise_failure()
            time.sleep(POLL_SECONDS)
        return json.loads(self._store.get(key))

    def count_up(self) -> int:
        """Increment the counter that all ranks share, and return its previous value."""
        return int(self._store.add(_COUNTER, 1)) - 1

    @contextmanager
    def sharing_failures(self) -> Iterator[None]:
        """Report an error in the block to all ranks, and raise it on this rank.

        The other ranks end with this error at their next :meth:`raise_failure`. Only the first
        failure of all ranks is reported, because the others usually follow from it.
        """
        try:
            yield
        except BaseException as error:
            message = " ".join(str(error).split())
            # A RankError is about another rank, which its message names already.
            if not isinstance(error, RankError):
                message = f"rank {self.rank}: {type(error).__name__}: {message}"
            is_interrupt = isinstance(error, KeyboardInterrupt)  # by Ctrl-C or SIGTERM
            with suppress(RuntimeError):  # rank 0 has removed the store
                is_first_failure = self._store.add(_N_FAILURES, 1) == 1
                if is_first_failure:
                    self.put(_FAILURE, {"message": message, "is_interrupt": is_interrupt})
            raise

    def raise_failure(self) -> None:
        """Raise the failure that ended the work, if there was one.

        Raises:
            RankError: if a rank failed or died; the message names the rank.
            KeyboardInterrupt: if a rank was interrupted.
        """
        # A rank that fails reports its failure before it ends. Looking for dead ranks first, and
        # for reports afterwards, therefore finds the report of every rank that seems dead.
        dead_rank = self._find_dead_rank()
        if self.has(_FAILURE):
            failure = self.wait_for(_FAILURE)
            if failure["is_interrupt"]:
                raise KeyboardInterrupt
            message: str = failure["message"]
            raise RankError(message if RESUME_HINT in message else f"{message} {RESUME_HINT}")
        if dead_rank is not None and not self.has(FINISHED):
            raise _ended_early(dead_rank)

    def wait_until_others_left(self, seconds: float) -> None:
        """Wait until the watched ranks have released their locks, but no longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(has_left(folder) for folder in self._watched_folders.values()):
                return
            time.sleep(POLL_SECONDS / 4)

    def _find_dead_rank(self) -> int | None:
        """Return a watched rank that has released the lock of its folder, or None.

        The locks are checked at most once in ``POLL_SECONDS``; in between the result is None.
        """
        if time.monotonic() - self._last_watch < POLL_SECONDS:
            return None
        self._last_watch = time.monotonic()
        for rank, folder in self._watched_folders.items():
            if has_left(folder):
                return rank
        return None


def _watched_folders(rank: int, rank_folders: Sequence[Path]) -> Mapping[int, Path]:
    """Return rank -> folder for the ranks that `rank` watches.

    Rank 0 watches all others, and each of them watches rank 0.
    """
    watched_ranks = list(range(1, len(rank_folders))) if rank == 0 else [0]
    return {watched: rank_folders[watched] for watched in watched_ranks}


def _ended_early(rank: int) -> RankError:
    """Return the error for a rank that ended before the work was complete."""
    return RankError(f"rank {rank} ended before the work was done. {RESUME_HINT}")


def has_left(rank_folder: Path) -> bool:
    """Return whether the rank that held the lock of a folder has released it, or died.

    The lock of a process that dies is released by the system. Locking the folder here therefore
    fails only while the rank lives.
    """
    try:
        if (rank_folder / LOCK).exists():
            lock_folder(rank_folder, reentrant=False).release()
    except InUseError:
        return False
    except FileNotFoundError:  # the folder is being removed
        pass
    return True


@contextmanager
def open_rank_store(group: dist.ProcessGroup) -> Iterator[RankStore]:
    """Wait for all ranks of a process group, and yield the store that they share.

    Rank 0 leaves the block last, because the store is a file in its folder. When it leaves without
    an error, the work of all ranks must be complete.

    Args:
        group: process group whose ranks are on one machine.

    Raises:
        RankError: if a rank does not join within ``JOIN_SECONDS``, or runs on another machine.
    """
    rank = dist.get_rank(group)
    with scratch_folder(Path(tempfile.gettempdir()) / "tilefold-rank") as rank_folder:
        store = RankStore(rank, _gather_rank_folders(group, rank_folder))
        leave_seconds = _LEAVE_SECONDS
        try:
            yield store
            leave_seconds = _LEAVE_WHEN_COMPLETE_SECONDS
        finally:
            if rank == 0:
                store.wait_until_others_left(leave_seconds)


def _gather_rank_folders(group: dist.ProcessGroup, rank_folder: Path) -> list[Path]:
    """Wait until all ranks have joined, and exchange the folders whose locks they hold.

    Args:
        group: process group of the ranks.
        rank_folder: folder of this rank.

    Returns:
        The folder of each rank, in the order of the ranks.

    Raises:
        RankError: if a rank does not join in time, or runs on another machine.
    """
    cpu_group = _cpu_group(group)
    try:
        with _timeout_as_rank_error():
            dist.monitored_barrier(
                cpu_group,
                timeout=timedelta(seconds=JOIN_SECONDS),
                wait_all_ranks=True,
            )
        # The machine and folder of each rank; all_gather_object replaces the placeholders.
        locations = [("", "")] * dist.get_world_size(cpu_group)
        dist.all_gather_object(locations, (_machine_digest(), str(rank_folder)), group=cpu_group)
    finally:
        if cpu_group is not group:
            dist.destroy_process_group(cpu_group)
    machines = {machine for machine, _ in locations}
    if len(machines) > 1:
        raise RankError(
            f"group: expected all ranks on one machine, got {len(machines)} machines. Encode a "
            "part of the texts on each machine, or use an engine that is made for several.",
        )
    return [Path(folder) for _, folder in locations]


def _cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks, which communicates between CPUs.

    Args:
        group: process group of the ranks.

    Returns:
        `group` if it uses gloo. Otherwise a new group, which the caller must destroy.

    Raises:
        RankError: if a rank does not join in time.
    """
    if dist.get_backend(group) == "gloo":
        return group
    with _timeout_as_rank_error():
        cpu_group: dist.ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timedelta(seconds=JOIN_SECONDS),
            backend="gloo",
            use_local_synchronization=True,
        )
    return cpu_group


@contextmanager
def _timeout_as_rank_error() -> Iterator[None]:
    """Convert torch's error about ranks that do not join in time to a ``RankError``.

    torch raises a ``RuntimeError``. The ``RankError`` says what to do.
    """
    try:
        yield
    except RuntimeError as error:
        cause = " ".join(str(error).split())[:200]
        raise RankError(
            "group: expected a call on every rank of the process group within "
            f"{JOIN_SECONDS:.0f} s, but some ranks did not join ({cause}). Call it on all ranks, "
            "or with group=None on a single one.",
        ) from error


def _machine_digest() -> str:
    """Return a digest that identifies this machine since it was booted."""
    name = platform.node()
    with suppress(OSError):
        name += _BOOT_ID.read_text(encoding="ascii")
    return hashlib.sha256(name.encode()).hexdigest()
