"""Writes folders of vectors from a stream of batches: encoding, assembling and writing at the same time.

Three threads: one tokenises (inside the stream), the caller's encodes, and one assembles finished shards and writes
them. A shard counts when the manifest lists it, as always; what is reported as done never runs ahead of that by more
than a part of the first shard that is not written, which is kept by time and on Ctrl-C.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from tilefold.pipeline.ahead import Behind
from tilefold.pipeline.rows import Begun, FailedText, Window, WindowEnd
from tilefold.retrieval._made import Maker, Prepare, Shard, Stream
from tilefold.retrieval._shards import Part, ShardWriter, Vectors
from tilefold.retrieval.errors import DataError

WAITING_SHARDS = 2  # that are encoded and not written
TOO_MANY = 16  # when every text of a shard of at least this size fails, the model is at fault, not the texts

V = TypeVar("V", bound=Vectors)


@dataclass(frozen=True)
class Job(Generic[V]):
    """Texts that become a folder of vectors.

    Attributes:
        folder: where they are written.
        open_writer: of the folder; called with whether it lists shards.
        look: what can be done for `open_writer` before the device is given anything.
        texts: id -> text.
        shard_size: texts of a shard.
        stream: windows of texts -> what was made of them.
        prepare: cuts texts before they are tokenised; may be called from another thread.
        maker: makes vectors of batches.
        report: called with the texts done and the texts in all.
        save_minutes: after this time, and on Ctrl-C, what is done of a shard is kept.
        ahead: whether the stream works ahead of the device. What identifies the texts takes a while to compute: if
            there is nothing in the folder that could be resumed, the model then gets its first batches before that.
            Else a shard is written before the next one begins.
    """

    folder: Path
    open_writer: Callable[[bool], ShardWriter[Any, Any]]
    look: Callable[[], object]
    texts: Mapping[str, str]
    shard_size: int
    stream: Stream
    prepare: Prepare
    maker: Maker[V]
    report: Callable[[int, int], None]
    save_minutes: float
    ahead: bool

    def is_fresh(self) -> bool:
        """Whether the folder is missing or empty."""
        return not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir()))


class StreamedShards(Generic[V]):
    """Writes the shards that a folder lacks.

    Args:
        job: what is to be written.
    """

    def __init__(self, job: Job[V]) -> None:
        self.job, self.save_seconds = job, 60 * job.save_minutes
        ids = list(job.texts)
        self.total = len(ids)
        self.chunks = [ids[start : start + job.shard_size] for start in range(0, len(ids), job.shard_size)]
        self.writer: Any = None  # a ShardWriter, once it is open
        self.shards: list[Shard[V]] = []  # in the order in which the stream gets them
        self.finished = self.reported = 0
        self.first = 0  # the first shard that was not seen to be written

    def run(self) -> Any:
        """Encode and write; the complete manifest.

        Raises:
            DataError: every text failed, or every one of a shard of at least 16.
        """
        self._begin()
        with closing(self.job.stream(self._windows())) as items:
            self._run(items)
        return self._end()

    def _begin(self) -> None:
        if not (self.job.ahead and self.job.is_fresh()):
            self.writer = self.job.open_writer(True)
        missing = [number for number in range(len(self.chunks)) if self._lacks(number)]
        self.shards = [self._opened(number) for number in missing]
        self.finished = self.total - sum(len(shard.ids) for shard in self.shards)

    def _lacks(self, number: int) -> bool:
        return self.writer is None or not self.writer.has_shard(number)

    def _opened(self, number: int) -> Shard[V]:
        shard: Shard[V] = Shard(number, self.chunks[number])
        shard.open(self.job.texts, None if self.writer is None else self.writer.read_partial(number))
        return shard

    def _given(self) -> Iterator[Shard[V]]:
        """In the thread that works ahead."""
        yield from self.shards

    def _windows(self) -> Iterator[Window]:
        for shard in self._given():
            yield shard.window(self.job.texts, self.job.prepare)

    def _run(self, items: Iterator[Any]) -> None:
        next(items)  # the stream has begun
        first: list[Any] = []
        if self.writer is None:
            self.job.look()  # while the first texts are tokenised: it reads the model, which waits for the device
            first = list(islice(items, 1))
            self._open_writer()
        self._start_report()
        with Behind(WAITING_SHARDS, "tilefold-writer") as behind:
            try:
                for item in chain(first, items):
                    self._take(item, behind)
                behind.drain()
                self._report()
            except KeyboardInterrupt:
                behind.drain()
                self._keep_part(at_the_end=True)
                raise

    def _open_writer(self) -> None:
        self.writer = self.job.open_writer(True)

    def _end(self) -> Any:
        return self.writer.finish(self.total)

    def _take(self, item: Any, behind: Behind) -> None:
        if isinstance(item, Begun):
            return
        shard = self.shards[item.window]
        if isinstance(item, WindowEnd):
            shard.end(item)
            self._finish(shard, behind)
        else:
            self._add(shard, item)
            if time.monotonic() - shard.saved >= self.save_seconds:
                behind.drain()
                self._keep_part()
        self._report()

    def _add(self, shard: Shard[V], item: FailedText | Any) -> None:
        shard.take(item, self.job.maker)

    def _finish(self, shard: Shard[V], behind: Behind) -> None:
        if shard.failed and not shard.done:
            behind.drain()
            last = shard.number == len(self.chunks) - 1
            check_some(shard.number, shard.failures(), self.writer.manifest.n_documents == 0 and last)
        behind.submit(lambda: self._write(shard))
        if not self.job.ahead:
            behind.drain()

    def _write(self, shard: Shard[V]) -> None:
        """In the thread that works behind, or after it."""
        self.writer.write_shard(shard.number, *shard.assembled(self.job.maker), shard.cut)
        shard.written = True
        shard.done = []

    def _keep_part(self, *, at_the_end: bool = False) -> None:
        """Keep what is done of the first shard that is not written; everything submitted has run."""
        shard = next((shard for shard in self.shards if not shard.written), None)
        if shard is None or self.writer is None:
            return
        if shard.done and shard.kept < len(shard) < len(shard.ids):
            self.writer.write_partial(shard.number, Part(shard.part(), shard.failed, shard.cut))
        elif shard.done and len(shard) == len(shard.ids) and at_the_end:  # else it is about to be submitted
            self._write(shard)
        shard.kept, shard.saved = len(shard), time.monotonic()

    def _start_report(self) -> None:
        self.reported = self.finished
        self.job.report(self.finished, self.total)

    def _report(self) -> None:
        """Texts of written shards, and what is done of the first one that is not."""
        while self.first < len(self.shards) and self.shards[self.first].written:
            self.finished += len(self.shards[self.first].ids)
            self.first += 1
        part = 0
        if self.first < len(self.shards):
            shard = self.shards[self.first]
            whole = len(shard) == len(shard.ids)
            part = len(shard) - (1 if self.job.ahead else len(shard)) * whole  # the whole counts once it is written
        self._tell(self.finished + part)

    def _tell(self, done: int) -> None:
        if done > self.reported:
            self.reported = done
            self.job.report(done, self.total)


def check_some(number: int, failed: Mapping[str, str], nothing_yet: bool) -> None:
    """Raise an error where all texts of a shard failed, and so the model, or all texts.

    Args:
        number: of the shard.
        failed: its texts and why.
        nothing_yet: whether it is the last shard and no shard before it has a row.
    """
    if len(failed) >= TOO_MANY or nothing_yet:
        name, why = next(iter(failed.items()))
        raise DataError(
            f"texts: all {len(failed)} of shard {number} failed, {name!r} first ({why}). "
            "Check the model; earlier shards are kept."
        )
