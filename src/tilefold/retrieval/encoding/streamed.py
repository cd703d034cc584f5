"""Texts into a folder of vectors: one thread tokenises, the caller's encodes, and one assembles and
writes shards.

A shard counts when the manifest lists it; what is reported as done never runs ahead of that by more
than a part of the first shard that is not written, which is kept by time and on Ctrl-C.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal

from torch import Tensor

from tilefold._internal.arguments import check_choice, check_least
from tilefold._internal.precision import inference_precision
from tilefold._internal.typing import Model
from tilefold.pipeline.rows import (
    Batch,
    Item,
    StreamStart,
    Window,
    WindowEnd,
    bisect_failures,
    warn_unused_batch_tokens,
)
from tilefold.pipeline.threads import BackgroundWorker
from tilefold.pipeline.truncation import Truncation, counting_truncation, report_truncation
from tilefold.retrieval.common.files import check_text_ids
from tilefold.retrieval.common.provenance import Provenance, model_fingerprint
from tilefold.retrieval.encoding.truncation import cut_texts
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.shards import M, PartialShard, ShardWriter, V, check_not_all_failed

WAITING_SHARDS = 2  # that are encoded and not written
PLAIN_TEXTS = 32  # of a batch of a model that is not accelerated

Kind = Literal["document", "query"]
MadeOf = Callable[[], Provenance]  # of the texts; called when a folder is opened
Stream = Callable[[Iterator[Window | None]], Generator[Any, None, None]]  # items


@dataclass(frozen=True)
class Output:
    """Folder of vectors, and how it is written, in the words of
    :func:`tilefold.retrieval.encode_collection`.
    """

    folder: Path
    shard_size: int = 1024
    save_minutes: float = 1.0
    progress: Callable[[int, int], None] | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        check_least("shard_size", self.shard_size)
        check_least("save_minutes", self.save_minutes, 0)

    def report(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)


IN_MEMORY = Output(Path())


@dataclass(frozen=True)
class Encoding(ABC):
    """Options of encoding texts, apart from the model, in the words of
    :func:`tilefold.retrieval.encode_collection`.
    """

    MODEL: ClassVar[str] = "SparseEncoder"  # class of sentence-transformers that it is for

    kind: Kind = "document"
    batch_size: int | None = None
    batch_tokens: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_least("max_length", self.max_length)
        check_choice("kind", self.kind, ("document", "query"))
        check_least("batch_size", self.batch_size)
        check_least("batch_tokens", self.batch_tokens)

    @abstractmethod
    def job(
        self,
        model: Model,
        texts: Mapping[str, str],
        output: Output,
        made_of: MadeOf,
    ) -> Job[Any, Any]:
        """The work of a sentence-transformers `model`, which is looked at, so that a wrong one is
        an error.
        """

    def settings(self, made_of: Provenance) -> dict[str, object]:
        """Settings of a manifest for every kind of vectors: the documents, their cut, and a limit
        of its own.
        """
        given = {"passages": made_of.passages, "max_length": self.max_length}
        return {"texts_sha256": made_of.texts_sha256} | {
            name: value for name, value in given.items() if value
        }


@dataclass
class Job(ABC, Generic[M, V]):
    """A model and what it is to make of texts: vectors in memory, or a folder of them."""

    fused: ClassVar[str]  # attribute of an accelerated model that has a stream
    options: ClassVar[tuple[str, ...]]  # that the stream takes beside its limits

    how: Encoding
    model: Model
    size: int  # of a vector
    texts: Mapping[str, object]  # id -> text
    output: Output = IN_MEMORY
    made_of: MadeOf = Provenance

    def __post_init__(self) -> None:
        how = self.how
        stream = getattr(getattr(self.model, self.fused, None), "stream", None)
        self.ahead = (
            stream is not None
        )  # of the device; else a shard is written before the next one begins
        self.stream: Stream = self.plain
        if stream is not None:
            options = {
                name: getattr(how, name) for name in ("batch_size", "batch_tokens", *self.options)
            }
            self.stream = functools.partial(stream, task=how.kind, **options)
        elif how.batch_tokens is not None:
            warn_unused_batch_tokens()

    @abstractmethod
    def run(self, texts: list[str]) -> Tensor | list[Tensor]:
        """Rows of some texts of similar length, longest first, by a model that is not accelerated."""

    def plain(self, windows: Iterator[Window | None]) -> Generator[Item, None, None]:
        """Batches of all texts without threads, as :class:`tilefold.pipeline.rows.Item` says."""
        yield StreamStart()
        size, seen = self.how.batch_size or PLAIN_TEXTS, Truncation()

        def attempt(part: list[int]) -> Tensor | list[Tensor]:
            nonlocal seen
            with counting_truncation() as seen:
                return self.run([texts[place] for place in part])

        for number, window in enumerate(filter(None, windows)):
            texts = window.prepared_texts()
            order = sorted(range(len(texts)), key=lambda place: len(texts[place]), reverse=True)
            for start in range(0, len(order), size):
                places = [
                    place for place in order[start : start + size] if place not in window.skip
                ]
                for part, rows in bisect_failures(places, attempt) if places else ():
                    yield Batch(number, part, rows, seen.count, seen.max_length)
            yield WindowEnd(number)

    @abstractmethod
    def vectors(self, names: list[str], rows: Any) -> V:
        """Vectors of some texts, of the rows of a batch; an error tells that one of them is at
        fault.
        """

    @abstractmethod
    def nothing(self) -> V:
        """Vectors of no text."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of the model, which takes a while."""
        return model_fingerprint(self.model)

    @functools.cached_property
    def precision(self) -> str | None:
        """Number type in which the model computes in this process, such as ``"bf16"``."""
        return inference_precision(self.model)

    @abstractmethod
    def open_writer(self, lists: bool) -> ShardWriter[M, V]:
        """The writer of the folder, which `lists` shards, or leaves them to another one."""

    def chunks(self) -> list[list[str]]:
        ids, size = list(self.texts), self.output.shard_size
        return [ids[start : start + size] for start in range(0, len(ids), size)]

    def opens_late(self) -> bool:
        """Whether the folder, which holds nothing to resume, is opened when the device has its
        first texts.
        """
        folder = self.output.folder
        return self.ahead and (
            not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        )

    def in_memory(self, what: str) -> V:
        """The vectors of all texts, in their order; an error says `what` they are."""
        if not self.texts:
            raise ValueError(f"{what}: expected at least one, got an empty mapping.")
        check_text_ids(what, self.texts)
        shard: Shard[V] = Shard(0, list(self.texts), self.texts)
        with closing(self.plain(iter([shard.window(self.model)]))) as items:
            for item in items:
                if isinstance(item, Batch):
                    shard.take(item, self)
        report_truncation(self.how.kind, len(self.texts), shard.cut)
        vectors, failed = shard.assembled(self)
        if failed:
            name, why = next(iter(failed.items()))
            raise DataError(
                f"{what}: {len(failed)} of {len(self.texts)} failed, {name!r} first ({why}).",
            )
        return vectors


@dataclass
class Shard(Generic[V]):
    """Texts of one shard, and what is done of them."""

    number: int
    ids: list[str]
    texts: Mapping[str, object]  # id -> text, of these and perhaps of others
    strings: list[str] = field(default_factory=list)  # ids of those that can be encoded at all
    done: list[V] = field(default_factory=list)  # in batches
    failed: dict[str, str] = field(default_factory=dict)  # id -> reason
    cut: Truncation = field(default_factory=Truncation)
    kept: int = 0  # how much of it is on disk
    saved: float = field(default_factory=time.monotonic)
    is_written: bool = False

    def __post_init__(self) -> None:
        for name in self.ids:
            text = self.texts[name]
            if isinstance(text, str):
                self.strings.append(name)
            else:
                self.failed[name] = f"expected a string, got {type(text).__name__}"

    def __len__(self) -> int:
        return sum(map(len, self.done)) + len(self.failed)

    @property
    def is_whole(self) -> bool:
        return len(self) == len(self.ids)

    def resumed(self, before: PartialShard[V] | None) -> Shard[V]:
        """The shard, of which an earlier run kept a part."""
        if before is not None:
            self.done, self.failed, self.cut = (
                [before.vectors],
                dict(before.failed) | self.failed,
                before.cut,
            )
            self.kept = len(self)
        return self

    def window(self, model: Model) -> Window:
        known = {name for vectors in self.done for name in vectors.ids} | self.failed.keys()
        skip = frozenset(place for place, name in enumerate(self.strings) if name in known)
        return Window(
            [str(self.texts[name]) for name in self.strings],
            skip,
            functools.partial(cut_texts, model),
        )

    def take(self, batch: Batch, job: Job[Any, V]) -> None:
        """A batch of the stream; what fails of it, such as NaN in a row, loses no other text."""
        self.cut.add(0, batch.cut, batch.max_length)
        names = [self.strings[place] for place in batch.positions]

        def vectors(texts: range) -> V:
            return job.vectors(names[texts.start : texts.stop], batch.rows_of(texts))

        for texts, outcome in bisect_failures(range(len(names)), vectors):
            if isinstance(outcome, Exception):
                self.failed[names[texts.start]] = reason(outcome)
            else:
                self.done.append(outcome)

    def assembled(self, job: Job[Any, V]) -> tuple[V, dict[str, str]]:
        """All vectors in the order of the texts, and the failed ones."""
        failed = {name: self.failed[name] for name in self.ids if name in self.failed}
        if not self.done:
            return job.nothing(), failed
        whole = self.part()
        row_of = {name: row for row, name in enumerate(whole.ids)}
        return whole.take([row_of[name] for name in self.ids if name in row_of]), failed

    def part(self) -> V:
        """All vectors in the order in which they were made; there are some."""
        return type(self.done[0]).concatenate(self.done)

    def written(self) -> None:
        self.is_written, self.done = True, []


def reason(error: Exception) -> str:
    """An error in the words of the manifest."""
    return f"{type(error).__name__}: {error}"


def encode_shards(
    job: Job[Any, V],
    shards: Iterable[Shard[V] | None],
    write: Callable[[Shard[V]], None],
    behind: BackgroundWorker,
    open_late: Callable[[], None] | None = None,
) -> Generator[Shard[V], None, None]:
    """Encode shards of a source, which gives None where there is none yet, and yield them as
    batches are done.

    A thread ahead takes shards, one `behind` writes whole ones; `open_late` opens the folder when
    the device has texts.
    """
    given: list[Shard[V]] = []

    def windows() -> Iterator[Window | None]:
        for shard in shards:
            if shard is not None:
                given.append(shard)
            yield None if shard is None else shard.window(job.model)

    with closing(job.stream(windows())) as items:
        next(items)  # the stream has begun
        first: list[Batch | WindowEnd] = []
        if open_late is not None:
            _ = (
                job.fingerprint
            )  # while the first texts are tokenised: it reads the model, which waits for the device
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


class FolderShards(Generic[M, V]):
    """Shards of one process, which lists them and keeps a part of the one that it is at."""

    def __init__(self, job: Job[M, V]) -> None:
        self.job, self.save_seconds = job, 60 * job.output.save_minutes
        self.total = len(job.texts)
        self.writer: Any = None  # a ShardWriter, once it is open
        self.left: deque[Shard[V]] = deque()  # the first was not seen to be written
        self.finished = self.reported = 0

    def run(self) -> M:
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
                BackgroundWorker(WAITING_SHARDS, "tilefold-writer") as behind,
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
        manifest: M = self.writer.finish(self.total)
        return manifest

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
        check_not_all_failed(
            shard.number,
            len(vectors),
            failed,
            nothing_yet=last and self.writer.manifest.n_documents == 0,
        )
        self.writer.write_shard(shard.number, vectors, failed, shard.cut)
        shard.written()

    def _keep_part(self, *, at_the_end: bool = False) -> None:
        """Keep what is done of the first shard that is not written; everything submitted has run."""
        shard = next((shard for shard in self.left if not shard.is_written), None)
        if shard is None or self.writer is None:
            return
        if shard.done and shard.kept < len(shard) and not shard.is_whole:
            self.writer.write_partial(
                shard.number, PartialShard(shard.part(), shard.failed, shard.cut)
            )
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
