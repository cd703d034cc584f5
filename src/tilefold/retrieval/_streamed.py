"""Folders of vectors from a stream of batches, by one process or by ranks: encodes and writes at the same time.

Three threads: one tokenises (inside the stream), the caller's encodes, and one assembles finished shards and writes
them. A shard counts when the manifest lists it; what is reported as done never runs ahead of that by more than a part
of the first shard that is not written, which is kept by time and on Ctrl-C.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from tilefold.pipeline.ahead import Behind
from tilefold.pipeline.rows import IN_FLIGHT, Batch, Window
from tilefold.retrieval._made import Job, Shard
from tilefold.retrieval._meeting import POLL_SECONDS, Meeting
from tilefold.retrieval._shards import Part, Receipt, Vectors, check_some, differences
from tilefold.retrieval.errors import DataError

WAITING_SHARDS = 2  # that are encoded and not written
# that a rank has taken and not yet encoded: few at the end of the work, but more than a stream holds back of one batch
OPEN_SHARDS = IN_FLIGHT + 2

V = TypeVar("V", bound=Vectors)


def encode_shards(
    job: Job[V],
    shards: Iterable[Shard[V] | None],
    write: Callable[[Shard[V]], None],
    behind: Behind,
    open_late: Callable[[], None] | None = None,
) -> Generator[Shard[V], None, None]:
    """Encode shards of a source, which gives None where there is none yet, and `write` each when it is whole.

    The shard of each batch is yielded, and once more when it is whole. A thread ahead takes shards, one `behind` writes
    them; `open_late` opens the folder when the first texts are on the device.
    """
    given: list[Shard[V]] = []

    def windows() -> Iterator[Window | None]:
        for shard in shards:
            if shard is not None:
                given.append(shard)
            yield None if shard is None else shard.window(job.model)

    with closing(job.stream(windows())) as items:
        next(items)  # the stream has begun
        first: list[Any] = []
        if open_late is not None:
            _ = job.fingerprint  # while the first texts are tokenised: it reads the model, which waits for the device
            first = list(islice(items, 1))
            open_late()
        for item in chain(first, items):
            shard = given[item.window]
            if isinstance(item, Batch):
                shard.take(item, job)
            else:
                behind.submit(functools.partial(write, shard))
                if not job.ahead:
                    behind.drain()
            yield shard
        behind.drain()


class FolderShards(Generic[V]):
    """Shards of one process, which lists them and keeps a part of the one that it is at."""

    def __init__(self, job: Job[V]) -> None:
        self.job, self.save_seconds = job, 60 * job.output.save_minutes
        self.total = len(job.texts)
        self.writer: Any = None  # a ShardWriter, once it is open
        self.left: deque[Shard[V]] = deque()  # the first was not seen to be written
        self.finished = self.reported = 0

    def run(self) -> Any:
        """Encode and write; the complete manifest."""
        late = self.job.opens_late()
        self.writer = None if late else self.job.open_writer(True)
        self.left.extend(self._missing())
        self.finished = self.reported = self.total - sum(len(shard.ids) for shard in self.left)
        if not late:
            self._begin()
        shards, begin = list(self.left), self._begin if late else None
        try:
            with (
                Behind(WAITING_SHARDS, "tilefold-writer") as behind,
                closing(encode_shards(self.job, shards, self._write, behind, begin)) as steps,
            ):
                for shard in steps:
                    if not shard.is_whole and time.monotonic() - shard.saved >= self.save_seconds:
                        behind.drain()
                        self._keep_part()
                    self._report()
        except KeyboardInterrupt:  # everything that was submitted has run
            self._keep_part(at_the_end=True)
            raise
        self._report()
        return self.writer.finish(self.total)

    def _begin(self) -> None:
        self.writer = self.writer or self.job.open_writer(True)
        self.job.output.report(self.finished, self.total)

    def _missing(self) -> Iterator[Shard[V]]:
        for number, ids in enumerate(self.job.chunks()):
            if self.writer is None:
                yield Shard(number, ids, self.job.texts)
            elif not self.writer.has_shard(number):
                yield Shard(number, ids, self.job.texts).resumed(self.writer.read_partial(number))

    def _write(self, shard: Shard[V]) -> None:
        """In the thread that works behind, or after it."""
        vectors, failed = shard.assembled(self.job)
        last = (shard.number + 1) * self.job.output.shard_size >= self.total
        check_some(shard.number, len(vectors), failed, nothing_yet=last and self.writer.manifest.n_documents == 0)
        self.writer.write_shard(shard.number, vectors, failed, shard.cut)
        shard.written()

    def _keep_part(self, *, at_the_end: bool = False) -> None:
        """Keep what is done of the first shard that is not written; everything submitted has run."""
        shard = next((shard for shard in self.left if not shard.is_written), None)
        if shard is None or self.writer is None:
            return
        if shard.done and shard.kept < len(shard) and not shard.is_whole:
            self.writer.write_partial(shard.number, Part(shard.part(), shard.failed, shard.cut))
        elif shard.done and shard.is_whole and at_the_end:  # else it is about to be submitted
            self._write(shard)
        shard.kept, shard.saved = len(shard), time.monotonic()

    def _report(self) -> None:
        """Texts of written shards, and what is done of the first one that is not."""
        while self.left and self.left[0].is_written:
            self.finished += len(self.left.popleft().ids)
        part = 0
        if self.left:
            part = len(self.left[0])
            if self.left[0].is_whole:  # which counts once it is written
                part -= 1 if self.job.ahead else part
        if self.finished + part > self.reported:
            self.reported = self.finished + part
            self.job.output.report(self.reported, self.total)


class RankShards(Generic[V]):
    """Shards of one rank of a process group; only whole ones are kept, and only the first rank reports.

    Each rank takes the next shard when it is ready for one, so none waits while there is one, whatever their lengths,
    and leaves it with a receipt. The first rank holds the folder, and lists shards in their order.
    """

    def __init__(self, job: Job[V], ranks: Meeting) -> None:
        self.job, self.ranks = job, ranks
        self.chunks = job.chunks()
        self.writer: Any = None  # a ShardWriter, once it is open
        self.left: list[int] = []  # at the first rank: shards that the manifest does not list
        self.reported = -1
        self._agreed = False
        self._places = threading.Semaphore(OPEN_SHARDS)

    def lead(self) -> Any:
        """Encode, list what all ranks leave, and report; the complete manifest."""
        late = self.job.opens_late()
        if not late:
            self.writer = self.job.open_writer(True)
        numbers = range(len(self.chunks))
        self.left = [number for number in numbers if self.writer is None or not self.writer.has_shard(number)]
        partial = {} if self.writer is None else self.writer.manifest.partial
        self.ranks.say("missing", {"shards": self.left, "partial": partial})
        if not late:
            self._open()
        self._encode(self._open if late else None)
        while self._list():
            self._step()
            time.sleep(POLL_SECONDS)
        self._step()
        manifest = self.writer.finish(len(self.job.texts))
        self.ranks.say("over", True)
        return manifest

    def help(self) -> Any:
        """Encode; the complete manifest, once the first rank has listed all."""
        self._encode(self._join)
        self.ranks.heard("over")
        return self.writer.listed()

    def _encode(self, open_late: Callable[[], None] | None) -> None:
        shards = self._taken()
        with (
            Behind(WAITING_SHARDS, "tilefold-writer") as behind,
            closing(encode_shards(self.job, shards, self._write, behind, open_late)) as steps,
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

    def _identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = json.loads(json.dumps(self.writer.identified(self.writer.manifest)))
        return identity

    def _taken(self) -> Iterator[Shard[V] | None]:
        """In the thread that works ahead."""
        missing = self.ranks.heard("missing")
        while True:
            while not self._places.acquire(timeout=POLL_SECONDS):
                self.ranks.check()
                yield None
            place = self.ranks.count()
            if place >= len(missing["shards"]):
                return
            number = missing["shards"][place]
            shard: Shard[V] = Shard(number, self.chunks[number], self.job.texts)
            if number == missing["partial"].get("shard"):  # which an earlier run of one process kept
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
        """At the first rank, list the shards that have receipts, in order; whether there are others."""
        if not self.left or not self._agree():
            return bool(self.left)
        folder, key = self.writer.path, self.writer.key
        while self.left and (receipt := Receipt.read(folder, self.left[0], key)) is not None:
            number, rows = self.left[0], int(receipt.shard["rows"])
            nothing_yet = number == len(self.chunks) - 1 and self.writer.manifest.n_documents == 0
            try:
                check_some(number, rows, receipt.failed, nothing_yet=nothing_yet)
            except DataError:
                Receipt.file_of(folder, number).unlink()
                raise
            self.writer.receive([number])
            self.left = self.left[1:]
        return bool(self.left)

    def _agree(self) -> bool:
        """Whether all ranks have said that they write the same; ``DataError`` if one writes something else."""
        others = self.ranks.watched
        if self._agreed or not self.ranks.said(*(f"identity of {rank}" for rank in others)):
            return self._agreed
        for rank in others:
            changed = differences(
                self._identity(), self.ranks.heard(f"identity of {rank}"), "on rank 0", f"on rank {rank}"
            )
            if changed:
                raise DataError(
                    f"rank {rank} encodes something else ({changed}). Give all ranks of the group the same model, "
                    "texts and settings, or group=None to a rank on its own."
                )
        self._agreed = True
        return True
