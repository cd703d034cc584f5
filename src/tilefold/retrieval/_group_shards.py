"""Writes a folder of vectors with all ranks of a process group: one manifest, and the bytes of one process alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, TypeVar

from tilefold._process_group import ranks_of
from tilefold.pipeline.ahead import Behind
from tilefold.pipeline.rows import IN_FLIGHT
from tilefold.retrieval._group import Desk, Line
from tilefold.retrieval._made import Shard
from tilefold.retrieval._meeting import meeting
from tilefold.retrieval._shards import Part, ShardWriter, Vectors
from tilefold.retrieval._streamed import Job, StreamedShards

# that a rank has taken and not yet encoded: few at the end of the work, but more than a stream holds back of one batch
OPEN_SHARDS = IN_FLIGHT + 2
_POLL_SECONDS = 0.2
V = TypeVar("V", bound=Vectors)


def write_folder(job: Job[V], group: object) -> Any:
    """Do a job with the ranks that `group` means, or alone; the complete manifest."""
    ranks = ranks_of(group)
    if ranks is None:
        return StreamedShards(job).run()
    with meeting(ranks, -(-len(job.texts) // job.shard_size)) as seat:
        return GroupShards(job, seat).run()


class GroupShards(StreamedShards[V]):
    """A rank's part of :class:`StreamedShards`: it encodes and stores the shards that it takes; the first rank lists.

    Only whole shards are kept, and only the first rank reports.

    Args:
        job: the same on all ranks.
        seat: how this rank takes shards and hands them in.
    """

    def __init__(self, job: Job[V], seat: Desk | Line) -> None:
        super().__init__(job)
        self.seat = seat
        self.save_seconds = float("inf")
        self._places = threading.Semaphore(OPEN_SHARDS)

    def run(self) -> Any:
        """As that of one process; what fails on one rank ends the others."""
        try:
            return super().run()
        except BaseException as error:
            self.seat.stop(error)
            raise

    def _begin(self) -> None:
        if isinstance(self.seat, Line):
            return
        if not (self.job.ahead and self.job.is_fresh()):
            self._open_writer()
        missing = [number for number in range(len(self.chunks)) if self._lacks(number)]
        self.finished = self.total - sum(len(self.chunks[number]) for number in missing)
        self.seat.begin(missing)

    def _open_writer(self) -> None:
        self.writer = self.job.open_writer(isinstance(self.seat, Desk))
        if isinstance(self.seat, Desk):
            self.seat.open(self.writer)
        else:
            self.seat.identify(self.seat.rank, self.writer.identified(self.writer.manifest))

    def _given(self) -> Iterator[Shard[V]]:
        while True:
            while not self._places.acquire(timeout=_POLL_SECONDS):
                self.seat.check()
            taken = self.seat.take()
            if taken is None:
                return
            number, partial = taken
            shard: Shard[V] = Shard(number, self.chunks[number])
            shard.open(self.job.texts, self._kept(number, partial))
            self.shards.append(shard)
            yield shard

    def _kept(self, number: int, partial: dict[str, Any]) -> Part[V] | None:
        """What an earlier run of one process kept of a shard."""
        if not partial:
            return None
        writer: ShardWriter[Any, V] = self.writer or self.job.open_writer(False)
        writer.manifest.partial = partial
        return writer.read_partial(number)

    def _run(self, items: Iterator[Any]) -> None:
        try:
            super()._run(items)
        except BaseException as error:
            self.seat.stop(error)  # first, because the thread that works ahead may wait for the desk
            raise

    def _take(self, item: Any, behind: Behind) -> None:
        self.seat.check()
        super()._take(item, behind)

    def _finish(self, shard: Shard[V], behind: Behind) -> None:
        behind.submit(lambda: self._write(shard))
        self._places.release()

    def _write(self, shard: Shard[V]) -> None:
        vectors, failed = shard.assembled(self.job.maker)
        shard.done = []
        self.seat.hand_in(shard.number, self.writer.store_shard(shard.number, vectors, shard.cut), failed)
        shard.written = True

    def _keep_part(self, *, at_the_end: bool = False) -> None:
        """Whole shards are kept, by the first rank."""

    def _start_report(self) -> None:
        if isinstance(self.seat, Desk):
            self.reported = -1
            self._tell(self.finished)  # what was there before: another rank may have handed in some already

    def _report(self) -> None:
        if isinstance(self.seat, Desk):
            self._tell(self.total - sum(len(self.chunks[number]) for number in self.seat.left))

    def _end(self) -> Any:
        if isinstance(self.seat, Line):
            self.seat.wait()
            return self.writer.listed()
        self.seat.wait(self._report)
        manifest = self.writer.finish(self.total)
        self.seat.over()
        return manifest
