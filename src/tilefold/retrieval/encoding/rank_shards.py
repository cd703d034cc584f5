"""Rendezvous of the ranks of a process group that share the work on a folder, and the shards of
each of them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic

import torch.distributed as dist

from tilefold._internal.files import LOCK, InUseError, lock_folder, scratch_folder
from tilefold.pipeline.rows import IN_FLIGHT
from tilefold.pipeline.threads import BackgroundWorker
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.encoding.streamed import WAITING_SHARDS, Job, Shard, encode_shards
from tilefold.retrieval.errors import DataError, RankError
from tilefold.retrieval.vectors.shards import M, Receipt, V, check_not_all_failed, differences

# that a rank has taken and not yet encoded: few at the end of the work, but more than a stream
# holds back of one batch
OPEN_SHARDS = IN_FLIGHT + 2
MEET_SECONDS = 300.0  # in which all ranks must come: models may take a while to load
POLL_SECONDS = 0.1
KEPT = "What was reported is kept: run the same again, with any number of ranks, to go on."
_LEAVE_SECONDS = 20.0  # in which ranks must hear that the first one ends: a batch may take a while
_STORE_SECONDS = 1.0


class Meeting:
    """Values that all ranks see, from any thread; the first rank watches the locked folders of all
    others, they its.
    """

    def __init__(self, rank: int, homes: Sequence[Path]) -> None:
        self.rank = rank
        self.watched = {
            other: homes[other] for other in (range(1, len(homes)) if rank == 0 else (0,))
        }
        self._store = dist.FileStore(str(homes[0] / "store"), len(homes))  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self._looked = 0.0  # when it was seen that the others live

    def say(self, name: str, value: object) -> None:
        self._store.set(name, json.dumps(value))

    def said(self, *names: str) -> bool:
        try:
            return bool(self._store.check(list(names)))
        except RuntimeError:  # the first rank, which is gone, has removed the store
            raise _ended(0) from None

    def heard(self, name: str) -> Any:
        """A value, once a rank has said it; raises what ended the work before that."""
        while not self.said(name):
            self.check()
            time.sleep(POLL_SECONDS)
        return json.loads(self._store.get(name))

    def count(self) -> int:
        """Count; return how often any rank did before."""
        return int(self._store.add("count", 1)) - 1

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """An error within the block ends the work of all ranks; the first one counts."""
        try:
            yield
        except BaseException as error:
            text = " ".join(str(error).split())
            if not isinstance(error, RankError):
                text = f"rank {self.rank}: {type(error).__name__}: {text}"
            with suppress(RuntimeError):  # the first rank is gone
                if self._store.add("problems", 1) == 1:
                    self.say("problem", text)
            raise

    def check(self) -> None:
        """Raise what ended the work, if something did: Ctrl-C for all, else an error that names its
        rank.
        """
        gone = None
        if time.monotonic() - self._looked >= POLL_SECONDS:
            self._looked = time.monotonic()
            gone = next((rank for rank, home in self.watched.items() if _has_left(home)), None)
        if self.said("problem"):
            text = self.heard("problem")
            if "KeyboardInterrupt: " in text:
                raise KeyboardInterrupt
            raise RankError(text if KEPT in text else f"{text} {KEPT}")
        if gone is not None and not self.said("over"):
            raise _ended(gone)


def _ended(rank: int) -> RankError:
    return RankError(f"rank {rank} ended before the work was done. {KEPT}")


def _has_left(home: Path) -> bool:
    try:
        if (home / LOCK).exists():
            lock_folder(home, again=False).release()
    except InUseError:
        return False
    except FileNotFoundError:  # it is being removed
        pass
    return True


@contextmanager
def meeting(group: dist.ProcessGroup) -> Iterator[Meeting]:
    """Meet the other ranks of `group`; :class:`RankError` if one did not come in time, or runs on
    another machine.
    """
    rank = dist.get_rank(group)
    with scratch_folder(Path(tempfile.gettempdir()) / "tilefold-rank") as home:
        ranks = Meeting(rank, _homes(group, home))
        try:
            yield ranks
        finally:
            until = time.monotonic() + (0 if rank else _LEAVE_SECONDS)
            while time.monotonic() < until and not all(map(_has_left, ranks.watched.values())):
                time.sleep(POLL_SECONDS / 4)


def _homes(group: dist.ProcessGroup, home: Path) -> list[Path]:
    """The folder of each rank, once all have come."""
    cpu, own = _cpu_group(group)
    try:
        with _come_in_time():
            dist.monitored_barrier(
                cpu,
                timeout=timedelta(seconds=MEET_SECONDS),
                wait_all_ranks=True,
            )
        places = [("", "")] * dist.get_world_size(cpu)
        dist.all_gather_object(places, (_machine(), str(home)), group=cpu)
    finally:
        if own:
            dist.destroy_process_group(cpu)
    if len({machine for machine, _ in places}) > 1:
        remedy = (
            "Give each machine a part of the texts, or encode with an engine that is made for it."
        )
        raise RankError(f"group: expected ranks of one machine, got several machines. {remedy}")
    return [Path(path) for _, path in places]


def _cpu_group(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, bool]:
    """A group of the same ranks over gloo, and whether it was made for this."""
    if dist.get_backend(group) == "gloo":
        return group, False
    timeout = timedelta(seconds=MEET_SECONDS)
    ranks = dist.get_process_group_ranks(group)
    with _come_in_time():
        made = dist.new_group(
            ranks,
            timeout=timeout,
            backend="gloo",
            use_local_synchronization=True,
        )
    return made, True


@contextmanager
def _come_in_time() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        said = f"within {MEET_SECONDS:.0f} s, and some did not come ({' '.join(str(error).split())[:200]})"
        remedy = "Call it on all ranks, or with group=None on one alone."
        raise RankError(
            f"group: expected a call on every rank of the process group {said}. {remedy}",
        ) from error


def _machine() -> str:
    """Tells this machine, since it was booted, from others."""
    name = platform.node()
    with suppress(OSError):
        name += Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return hashlib.sha256(name.encode()).hexdigest()


class RankShards(Generic[M, V]):
    """Shards of one rank, which takes the next when it is ready; the first rank lists what all
    leave, and reports.
    """

    def __init__(self, job: Job[M, V], ranks: Meeting) -> None:
        self.job, self.ranks = job, ranks
        self.chunks = job.chunks()
        self.writer: Any = None  # a ShardWriter, once it is open
        self.left: list[int] = []  # at the first rank: shards that the manifest does not list
        self.reported = -1
        self._agreed = False
        self._places = threading.Semaphore(OPEN_SHARDS)

    def lead(self) -> M:
        """Encode, list what all ranks leave, and report; the complete manifest."""
        if not (late := self.job.opens_late()):
            self.writer = self.job.open_writer(True)
        numbers = range(len(self.chunks))
        self.left = [
            number for number in numbers if self.writer is None or not self.writer.has_shard(number)
        ]
        partial = {} if self.writer is None else self.writer.manifest.partial
        self.ranks.say("missing", {"shards": self.left, "partial": partial})
        if not late:
            self._open()
        self._encode(self._open if late else None)
        while self._list():
            self._step()
            time.sleep(POLL_SECONDS)
        self._step()
        manifest: M = self.writer.finish(len(self.job.texts))
        self.ranks.say("over", True)
        return manifest

    def help(self) -> M:
        """Encode; the complete manifest, once the first rank has listed all."""
        self._encode(self._join)
        self.ranks.heard("over")
        manifest: M = self.writer.listed()
        return manifest

    def _encode(self, open_late: Callable[[], None] | None) -> None:
        with (
            BackgroundWorker(WAITING_SHARDS, "tilefold-writer") as behind,
            closing(
                encode_shards(self.job, self._taken(), self._write, behind, open_late),
            ) as steps,
        ):
            for _ in steps:
                self._step()

    def _open(self) -> None:
        self.writer = self.writer or self.job.open_writer(True)
        self._step()
        self.ranks.say("open", self._identity())

    def _join(self) -> None:
        """Another rank stores nothing before the first one has opened the folder, for the same."""
        self.writer = self.writer or self.job.open_writer(False)
        mine = self._identity()
        self.ranks.say(f"identity of {self.ranks.rank}", mine)
        if self.ranks.heard("open") != mine:
            self.ranks.heard("over")  # the first rank says what differs

    def _identity(self) -> Json:
        identity: Json = json.loads(json.dumps(self.writer.manifest.identity))
        return identity

    def _taken(self) -> Iterator[Shard[V] | None]:
        """In the thread that works ahead."""
        missing = self.ranks.heard("missing")
        while True:
            while not self._places.acquire(timeout=POLL_SECONDS):
                self.ranks.check()
                yield None
            if (place := self.ranks.count()) >= len(missing["shards"]):
                return
            number = missing["shards"][place]
            shard: Shard[V] = Shard(number, self.chunks[number], self.job.texts)
            if number == missing["partial"].get(
                "shard",
            ):  # which an earlier run of one process kept
                writer = self.job.open_writer(False)
                writer.manifest.partial = missing["partial"]
                shard = shard.resumed(writer.read_partial(number))
            yield shard

    def _write(self, shard: Shard[V]) -> None:
        """In the thread that works behind."""
        self._places.release()
        vectors, failed = shard.assembled(self.job)
        self.writer.leave_shard(shard.number, vectors, failed, shard.cut)
        shard.written()
        self._list()

    def _step(self) -> None:
        self.ranks.check()
        done = len(self.job.texts) - sum(len(self.chunks[number]) for number in self.left)
        if self.ranks.rank == 0 and done > self.reported:  # only the first one knows what is left
            self.reported = done
            self.job.output.report(done, len(self.job.texts))

    def _list(self) -> bool:
        """At the first rank, list the shards that have receipts, in order; whether there are
        others.
        """
        if not self.left or not self._agree():
            return bool(self.left)
        folder, key = self.writer.path, self.writer.key
        while self.left and (receipt := Receipt.read(folder, self.left[0], key)) is not None:
            number, rows = self.left[0], int(receipt.shard["rows"])
            nothing_yet = number == len(self.chunks) - 1 and self.writer.manifest.n_documents == 0
            try:
                check_not_all_failed(number, rows, receipt.failed, nothing_yet=nothing_yet)
            except DataError:
                Receipt.file_of(folder, number).unlink()
                raise
            self.writer.receive([number])
            self.left = self.left[1:]
        return bool(self.left)

    def _agree(self) -> bool:
        """Whether all ranks have said that they write the same; ``DataError`` if one writes
        something else.
        """
        others = self.ranks.watched
        if self._agreed or not self.ranks.said(*(f"identity of {rank}" for rank in others)):
            return self._agreed
        for rank in others:
            other = self.ranks.heard(f"identity of {rank}")
            if changed := differences(self._identity(), other, "on rank 0", f"on rank {rank}"):
                remedy = "Give all ranks of the group the same model, texts and settings, or group=None to one alone."
                raise DataError(f"rank {rank} encodes something else ({changed}). {remedy}")
        self._agreed = True
        return True
