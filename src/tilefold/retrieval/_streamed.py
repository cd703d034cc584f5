"""Writes folders of vectors from a stream of batches: encoding, assembling and writing at the same time.

Three threads: one tokenises (inside the stream), the caller's encodes, and one assembles finished shards and writes
them. A shard counts when the manifest lists it; what is reported as done never runs ahead of that by more than a part
of the first shard that is not written, which is kept by time and on Ctrl-C.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from tilefold.pipeline.ahead import Behind
from tilefold.pipeline.rows import Window, WindowEnd
from tilefold.retrieval._made import Maker, Prepare, Shard, Stream
from tilefold.retrieval._receipts import check_some
from tilefold.retrieval._shards import Part, ShardWriter, Vectors

WAITING_SHARDS = 2  # that are encoded and not written

V = TypeVar("V", bound=Vectors)


class Output(NamedTuple):
    """Destination of vectors, and save intervals.

    Attributes:
        folder: where they are written.
        shard_size: texts of a shard.
        save_minutes: after this time, and on Ctrl-C, what is done of a shard is kept.
        progress: called with the texts done and the texts in all.
        resume: keep what an earlier run wrote.
    """

    folder: Path
    shard_size: int = 1024
    save_minutes: float = 1.0
    progress: Callable[[int, int], None] | None = None
    resume: bool = True

    def check(self) -> None:
        """Raise ``ValueError`` for sizes and times that no shard has."""
        if self.shard_size < 1:
            raise ValueError(f"shard_size: expected at least 1, got {self.shard_size}.")
        if not self.save_minutes >= 0:
            raise ValueError(f"save_minutes: expected at least 0, got {self.save_minutes}.")

    def report(self, done: int, total: int) -> None:
        """Call `progress`, where there is one."""
        if self.progress is not None:
            self.progress(done, total)


@dataclass(frozen=True, kw_only=True)
class Job(Generic[V]):
    """Texts that become a folder of vectors.

    Attributes:
        texts: id -> text.
        output: where the vectors go.
        open_writer: of the folder; called with whether it lists shards.
        look: what can be done for `open_writer` before the device is given anything.
        stream: windows of texts -> batches of vectors.
        prepare: cuts texts before they are tokenised; may be called from another thread.
        maker: makes vectors of batches.
        ahead: whether the stream works ahead of the device. Else a shard is written before the next one begins.
    """

    texts: Mapping[str, str]
    output: Output
    open_writer: Callable[[bool], ShardWriter[Any, Any]]
    look: Callable[[], object]
    stream: Stream
    prepare: Prepare
    maker: Maker[V]
    ahead: bool

    def chunks(self) -> list[list[str]]:
        """Ids of the texts of each shard."""
        ids, size = list(self.texts), self.output.shard_size
        return [ids[start : start + size] for start in range(0, len(ids), size)]

    def opens_late(self) -> bool:
        """Whether the folder is opened when the device has its first texts: what identifies them takes a while.

        Not so if there is anything in the folder that could be resumed.
        """
        folder = self.output.folder
        return self.ahead and (not folder.exists() or (folder.is_dir() and not any(folder.iterdir())))


def encode_shards(
    job: Job[V],
    shards: Iterable[Shard[V]],
    write: Callable[[Shard[V]], None],
    *,
    open_late: Callable[[], None] | None = None,
    step: Callable[[Shard[V], Behind], None] | None = None,
    fail: Callable[[BaseException, Behind], None] | None = None,
) -> None:
    """Encode the shards of a source, and give each to a sink.

    Args:
        job: how; its texts and its output are not looked at.
        shards: taken by a thread that works ahead.
        write: called with each shard once it is whole, in a thread that works behind.
        open_late: opens the folder when the first texts are on the device.
        step: called after each batch, and after each shard.
        fail: called with an error before the threads end.
    """
    given: list[Shard[V]] = []

    def windows() -> Iterator[Window]:
        for shard in shards:
            given.append(shard)
            yield shard.window(job.prepare)

    with closing(job.stream(windows())) as items, Behind(WAITING_SHARDS, "tilefold-writer") as behind:
        try:
            next(items)  # the stream has begun
            first: list[Any] = []
            if open_late is not None:
                job.look()  # while the first texts are tokenised: it reads the model, which waits for the device
                first = list(islice(items, 1))
                open_late()
            for item in chain(first, items):
                shard = given[item.window]
                if isinstance(item, WindowEnd):
                    shard.end(item)
                    behind.submit(functools.partial(write, shard))
                    if not job.ahead:
                        behind.drain()
                else:
                    shard.take(item, job.maker)
                if step is not None:
                    step(shard, behind)
            behind.drain()
        except BaseException as error:
            if fail is not None:
                fail(error, behind)
            raise


class FolderShards(Generic[V]):
    """Shards of one process, which lists them and keeps a part of the one that it is at.

    Args:
        job: what is to be written.
    """

    def __init__(self, job: Job[V]) -> None:
        self.job, self.save_seconds = job, 60 * job.output.save_minutes
        self.total = len(job.texts)
        self.writer: Any = None  # a ShardWriter, once it is open
        self.shards: list[Shard[V]] = []
        self.finished = self.reported = 0
        self.first = 0  # the first shard that was not seen to be written

    def run(self) -> Any:
        """Encode and write; the complete manifest.

        Raises:
            DataError: every text failed, or every one of a shard of at least 16.
        """
        late = self.job.opens_late()
        if not late:
            self.writer = self.job.open_writer(True)
        self.shards = list(self._missing())
        self.finished = self.reported = self.total - sum(len(shard.ids) for shard in self.shards)
        if not late:
            self.job.output.report(self.finished, self.total)
        open_late = self._open_late if late else None
        encode_shards(self.job, self.shards, self._write, open_late=open_late, step=self._step, fail=self._fail)
        self._report()
        return self.writer.finish(self.total)

    def _missing(self) -> Iterator[Shard[V]]:
        for number, ids in enumerate(self.job.chunks()):
            if self.writer is None:
                yield Shard(number, ids, self.job.texts)
            elif not self.writer.has_shard(number):
                yield Shard(number, ids, self.job.texts).resumed(self.writer.read_partial(number))

    def _open_late(self) -> None:
        self.writer = self.job.open_writer(True)
        self.job.output.report(0, self.total)

    def _write(self, shard: Shard[V]) -> None:
        """In the thread that works behind, or after it."""
        vectors, failed = shard.assembled(self.job.maker)
        last = (shard.number + 1) * self.job.output.shard_size >= self.total
        check_some(shard.number, len(vectors), failed, nothing_yet=last and self.writer.manifest.n_documents == 0)
        self.writer.write_shard(shard.number, vectors, failed, shard.cut)
        shard.written()

    def _step(self, shard: Shard[V], behind: Behind) -> None:
        if len(shard) < len(shard.ids) and time.monotonic() - shard.saved >= self.save_seconds:
            behind.drain()
            self._keep_part()
        self._report()

    def _fail(self, error: BaseException, behind: Behind) -> None:
        if isinstance(error, KeyboardInterrupt):
            behind.drain()
            self._keep_part(at_the_end=True)

    def _keep_part(self, *, at_the_end: bool = False) -> None:
        """Keep what is done of the first shard that is not written; everything submitted has run."""
        shard = next((shard for shard in self.shards if not shard.is_written), None)
        if shard is None or self.writer is None:
            return
        if shard.done and shard.kept < len(shard) < len(shard.ids):
            self.writer.write_partial(shard.number, Part(shard.part(), shard.failed, shard.cut))
        elif shard.done and len(shard) == len(shard.ids) and at_the_end:  # else it is about to be submitted
            self._write(shard)
        shard.kept, shard.saved = len(shard), time.monotonic()

    def _report(self) -> None:
        """Texts of written shards, and what is done of the first one that is not."""
        while self.first < len(self.shards) and self.shards[self.first].is_written:
            self.finished += len(self.shards[self.first].ids)
            self.first += 1
        part = 0
        if self.first < len(self.shards):
            shard = self.shards[self.first]
            whole = len(shard) == len(shard.ids)
            part = len(shard) - (1 if self.job.ahead else len(shard)) * whole  # the whole counts once it is written
        if self.finished + part > self.reported:
            self.reported = self.finished + part
            self.job.output.report(self.reported, self.total)
