"""Writes folders of vectors from a stream of batches: encoding, assembling and writing at the same time.

Three threads: one tokenises (inside the stream), the caller's encodes, and one assembles finished shards and writes
them. A shard counts when the manifest lists it, as always; what is reported as done never runs ahead of that by more
than a part of the first shard that is not written, which is kept by time and on Ctrl-C.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tilefold.pipeline.ahead import Behind
from tilefold.pipeline.rows import Begun, FailedText, Item, Window, WindowEnd
from tilefold.retrieval._shards import ShardWriter, Vectors
from tilefold.retrieval.errors import DataError

WAITING_SHARDS = 2  # that are encoded and not written
TOO_MANY = 16  # when every text of a shard of at least this size fails, the model is at fault, not the texts

Stream = Callable[[Iterator[Window]], Generator[Item, None, None]]
V = TypeVar("V", bound=Vectors)
Made_co = TypeVar("Made_co", bound=Vectors, covariant=True)


class Maker(Protocol[Made_co]):
    """Makes vectors of what a stream gives."""

    def vectors(self, names: list[str], batch: Any) -> Made_co:
        """Vectors of the texts of a batch; an error tells that one of them is at fault."""

    def alone(self, batch: Any, row: int) -> Any:
        """The batch of one text out of a batch, for finding which one."""

    def nothing(self) -> Made_co:
        """Vectors of no text."""


@dataclass
class Shard(Generic[V]):
    """Texts of one shard, and what is done of them.

    Attributes:
        number, ids: of the shard.
        strings: those of its texts that can be encoded at all.
        done, failed: vectors in batches, and id -> reason.
        kept, saved: how much of it is on disk, and since when.
    """

    number: int
    ids: list[str]
    strings: list[str] = field(default_factory=list)
    done: list[V] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    kept: int = 0
    saved: float = field(default_factory=time.monotonic)
    written: bool = False

    def __len__(self) -> int:
        return sum(map(len, self.done)) + len(self.failed)


class StreamedShards(Generic[V]):
    """Writes the shards that a folder lacks.

    Args:
        folder: where they are written.
        open_writer: of the folder. What identifies the texts takes a while to compute: if there is nothing in the
            folder that could be resumed, the model gets its first batches before that.
        look: what can be done for `open_writer` before the device is given anything.
        texts: id -> text.
        shard_size: texts of a shard.
        stream: windows of texts -> what was made of them.
        prepare: cuts texts before they are tokenised; called from another thread.
        maker: makes vectors of batches.
        report: called with the texts done and the texts in all.
        save_minutes: after this time, and on Ctrl-C, what is done of a shard is kept.
    """

    def __init__(
        self,
        folder: str | Path,
        open_writer: Callable[[], ShardWriter[Any, Any]],
        look: Callable[[], object],
        texts: Mapping[str, str],
        shard_size: int,
        stream: Stream,
        prepare: Callable[[Sequence[str]], Sequence[str]],
        maker: Maker[V],
        report: Callable[[int, int], None],
        save_minutes: float,
    ) -> None:
        self.texts, self.stream, self.prepare = texts, stream, prepare
        self.open_writer, self.look = open_writer, look
        self.fresh = not Path(folder).exists() or (Path(folder).is_dir() and not any(Path(folder).iterdir()))
        if not self.fresh:
            self.writer = open_writer()
        self.maker = maker
        self.report, self.save_seconds = report, 60 * save_minutes
        self.ids = list(texts)
        starts = range(0, len(self.ids), shard_size)
        self.last = len(starts) - 1
        self.shards: list[Shard[V]] = [
            Shard(number, self.ids[start : start + shard_size])
            for number, start in enumerate(starts)
            if self.fresh or not self.writer.has_shard(number)
        ]
        self.finished = len(self.ids) - sum(len(shard.ids) for shard in self.shards)
        self.reported = 0
        self.first = 0  # the first shard that was not seen to be written

    def run(self) -> None:
        """Encode and write.

        Raises:
            DataError: every text failed, or every one of a shard of at least 16.
        """
        for shard in self.shards:
            self._open(shard)
        with closing(self.stream(self._windows())) as items:
            next(items)
            first = []
            if self.fresh:
                self.look()  # while the first texts are tokenised: it reads the model, which waits for the device
                first = [next(items)]
                self.writer = self.open_writer()
            self.reported = self.finished
            self.report(self.finished, len(self.ids))
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

    def finish(self) -> Any:
        """Mark the folder as complete; its manifest."""
        return self.writer.finish()

    def _open(self, shard: Shard[V]) -> None:
        if not self.fresh:
            done, failed = self.writer.read_partial(shard.number)
            shard.done, shard.failed = list(done), failed
        shard.kept = len(shard)
        for name in shard.ids:
            if isinstance(self.texts[name], str):
                shard.strings.append(name)
            else:
                shard.failed[name] = f"expected a string, got {type(self.texts[name]).__name__}"

    def _windows(self) -> Iterator[Window]:
        """In the thread that works ahead."""
        for shard in self.shards:
            known = {name for vectors in shard.done for name in vectors.ids} if shard.kept else set()
            known |= shard.failed.keys()
            skip = frozenset(place for place, name in enumerate(shard.strings) if name in known)
            yield Window(self.prepare([self.texts[name] for name in shard.strings]), skip)

    def _take(self, item: Item, behind: Behind) -> None:
        if isinstance(item, Begun):
            return
        shard = self.shards[item.window]
        if isinstance(item, WindowEnd):
            self._finish(shard, behind)
        elif isinstance(item, FailedText):
            shard.failed[shard.strings[item.place]] = reason(item.error)
        else:
            self._add(shard, item)
        if not isinstance(item, WindowEnd) and time.monotonic() - shard.saved >= self.save_seconds:
            behind.drain()
            self._keep_part()
        self._report()

    def _add(self, shard: Shard[V], batch: Any) -> None:
        names = [shard.strings[place] for place in batch.places]
        try:
            shard.done.append(self.maker.vectors(names, batch))
        except Exception as error:  # such as NaN in a row, which must not lose the others
            if len(names) == 1:
                shard.failed[names[0]] = reason(error)
                return
            for row in range(len(names)):
                self._add(shard, self.maker.alone(batch, row))

    def _finish(self, shard: Shard[V], behind: Behind) -> None:
        if shard.failed and not shard.done:
            behind.drain()
            nothing_yet = self.writer.manifest.n_documents == 0 and shard.number == self.last
            if len(shard.ids) >= TOO_MANY or nothing_yet:
                name, why = next((name, shard.failed[name]) for name in shard.ids if name in shard.failed)
                raise DataError(
                    f"texts: all {len(shard.ids)} of shard {shard.number} failed, {name!r} first ({why}). "
                    "Check the model; earlier shards are kept."
                )
        behind.submit(lambda: self._write(shard))

    def _write(self, shard: Shard[V]) -> None:
        """In the thread that works behind, or after it."""
        self.writer.write_shard(shard.number, *self._assembled(shard))
        shard.written = True
        shard.done = []

    def _assembled(self, shard: Shard[V]) -> tuple[V, dict[str, str]]:
        """All vectors of a shard in the order of its texts, and the failed ones."""
        failed = {name: shard.failed[name] for name in shard.ids if name in shard.failed}
        if not shard.done:
            return self.maker.nothing(), failed
        whole: Any = type(shard.done[0]).concatenate(shard.done)  # type: ignore[attr-defined]
        row_of = {name: row for row, name in enumerate(whole.ids)}
        return whole.take([row_of[name] for name in shard.ids if name in row_of]), failed

    def _keep_part(self, *, at_the_end: bool = False) -> None:
        """Keep what is done of the first shard that is not written; everything submitted has run."""
        shard = next((shard for shard in self.shards if not shard.written), None)
        if shard is None:
            return
        if shard.done and shard.kept < len(shard) < len(shard.ids):
            part: Any = type(shard.done[0]).concatenate(shard.done)  # type: ignore[attr-defined]
            self.writer.write_partial(shard.number, part, shard.failed)
        elif shard.done and len(shard) == len(shard.ids) and at_the_end:  # else it is about to be submitted
            self._write(shard)
        shard.kept, shard.saved = len(shard), time.monotonic()

    def _report(self) -> None:
        """Texts of written shards, and what is done of the first one that is not."""
        while self.first < len(self.shards) and self.shards[self.first].written:
            self.finished += len(self.shards[self.first].ids)
            self.first += 1
        part = 0
        if self.first < len(self.shards):
            shard = self.shards[self.first]
            part = min(len(shard), len(shard.ids) - 1)
        if self.finished + part > self.reported:
            self.reported = self.finished + part
            self.report(self.reported, len(self.ids))


def reason(error: Exception) -> str:
    """As the manifest lists it."""
    return f"{type(error).__name__}: {error}"
