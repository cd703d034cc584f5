"""Writes some shards of a folder that another process holds, each with a receipt, from ranges of texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tilefold.pipeline.ahead import Behind
from tilefold.pipeline.rows import Window
from tilefold.retrieval._made import Shard
from tilefold.retrieval._receipts import Receipt
from tilefold.retrieval._shards import Vectors
from tilefold.retrieval._streamed import Job, StreamedShards, check_some
from tilefold.retrieval.text_ranges import Range

V = TypeVar("V", bound=Vectors)


class ApartShards(StreamedShards[V]):
    """A worker's part of :class:`StreamedShards`: nothing is listed here, and only whole shards are kept.

    Texts are read where they are tokenised, ahead of the device. The process that holds the folder takes what has a
    receipt (:meth:`ShardWriter.receive`), and after a kill the next one that opens it does.

    Args:
        job: without texts.
        writer: that does not list shards.
        ranges: texts of the shards.
    """

    def __init__(self, job: Job[V], writer: Any, ranges: Iterable[Range]) -> None:
        super().__init__(job)
        self.writer, self.ranges = writer, ranges
        self.save_seconds = float("inf")

    def _begin(self) -> None:
        """The folder is held by another process."""

    def _windows(self) -> Iterator[Window]:
        for part in self.ranges:
            texts = part.read()
            shard: Shard[V] = Shard(part.number, list(texts))
            shard.open(texts)
            self.shards.append(shard)
            yield shard.window(texts, self.job.prepare)

    def _finish(self, shard: Shard[V], behind: Behind) -> None:
        if shard.failed and not shard.done:
            check_some(shard.number, shard.failures(), False)
        behind.submit(lambda: self._write(shard))

    def _write(self, shard: Shard[V]) -> None:
        vectors, failed = shard.assembled(self.job.maker)
        shard.done = []
        stored = self.writer.store_shard(shard.number, vectors, shard.cut)
        size = (self.writer.path / stored["file"]).stat().st_size
        Receipt(self.writer.key, size, stored, failed).write(self.writer.path, shard.number)
        shard.written = True

    def _keep_part(self, *, at_the_end: bool = False) -> None:
        """Whole shards are kept."""

    def _start_report(self) -> None:
        """The process that holds the folder reports."""

    def _report(self) -> None:
        """The process that holds the folder reports."""

    def _end(self) -> None:
        """The process that holds the folder finishes."""
