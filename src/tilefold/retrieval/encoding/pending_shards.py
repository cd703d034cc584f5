"""Shards while they are encoded: the common loop from texts to assembled vectors.

One thread tokenises, the caller's thread encodes, and one thread assembles and writes shards.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Generic, cast

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.typing import Model
from tilefold.pipeline.rows import Batch, Window, WindowEnd, bisect_failures
from tilefold.pipeline.threads import BackgroundWorker
from tilefold.pipeline.truncation import Truncation, report_truncation
from tilefold.retrieval.common.files import check_text_ids
from tilefold.retrieval.data.documents import Document
from tilefold.retrieval.data.pages import Page
from tilefold.retrieval.encoding.job import Job
from tilefold.retrieval.encoding.truncation import shorten_texts
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.shards import PartialShard, V

__all__ = [
    "WAITING_SHARDS",
    "PendingShard",
    "describe_error",
    "encode_in_memory",
    "encode_shards",
]

WAITING_SHARDS = 2  # maximum number of encoded shards that wait for the thread that writes


def _describe_wrong_type(value: object) -> str:
    """Return the reason why a value cannot be encoded, and for a document how to get its text."""
    reason = f"expected a string, got {type(value).__name__}"
    if isinstance(value, Document):
        reason += "; pass the texts, such as collection.contents() or document.contents"
    return reason


def _shorten_long_texts(model: Model, contents: Sequence[Any]) -> list[Any]:
    """Shorten texts that are much longer than a model reads, and leave pages unchanged.

    Args:
        model: a model of sentence-transformers.
        contents: texts and pages.
    """
    texts = [content for content in contents if isinstance(content, str)]
    short_texts = iter(shorten_texts(model, texts))
    return [next(short_texts) if isinstance(content, str) else content for content in contents]


@dataclass
class PendingShard(Generic[V]):
    """Texts of one shard, and the vectors of those that have been encoded.

    Attributes:
        number: position of the shard in its folder.
        ids: ids of its texts, in their order.
        texts: id -> text. It may have texts of other shards, too.
        encodable_ids: ids of the values that are texts or pages.
        encoded: vectors of the batches that are done.
        failed: id -> reason for each text that could not be encoded.
        truncation: how many texts were truncated.
        n_saved: number of finished texts that are on disk.
        last_saved: time of the last save, by the monotonic clock.
        is_written: whether the shard is on disk, and its vectors were released.
    """

    number: int
    ids: list[str]
    texts: Mapping[str, object]
    encodable_ids: list[str] = field(default_factory=list)
    encoded: list[V] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    truncation: Truncation = field(default_factory=Truncation)
    n_saved: int = 0
    last_saved: float = field(default_factory=time.monotonic)
    is_written: bool = False

    def __post_init__(self) -> None:
        """Separate texts and pages from values of other types, which fail."""
        for text_id in self.ids:
            text = self.texts[text_id]
            if isinstance(text, str | Page):
                self.encodable_ids.append(text_id)
            else:
                self.failed[text_id] = _describe_wrong_type(text)

    @property
    def n_finished(self) -> int:
        """Number of texts that are encoded or have failed."""
        return sum(len(vectors) for vectors in self.encoded) + len(self.failed)

    @property
    def is_finished(self) -> bool:
        """Whether every text is encoded or has failed."""
        return self.n_finished == len(self.ids)

    def restore(self, partial: PartialShard[V] | None) -> None:
        """Continue from the part of this shard that an earlier run saved, if there is one."""
        if partial is None:
            return
        self.encoded = [partial.vectors]
        self.failed = {**partial.failed, **self.failed}
        self.truncation = partial.truncation
        self.n_saved = self.n_finished

    def window(self, model: Model) -> Window:
        """Return the texts and pages of this shard as a window, the input of a stream.

        Args:
            model: a model of sentence-transformers. Very long texts are shortened for it.

        Returns:
            All texts and pages, and the positions of the finished ones, which are skipped.
        """
        finished_ids = set(self.failed)  # failed texts are not encoded again
        for vectors in self.encoded:
            finished_ids.update(vectors.ids)
        finished_positions = (
            position
            for position, text_id in enumerate(self.encodable_ids)
            if text_id in finished_ids
        )
        return Window(
            texts=cast("list[str]", [self.texts[text_id] for text_id in self.encodable_ids]),
            skip=frozenset(finished_positions),
            prepare=functools.partial(_shorten_long_texts, model),
        )

    def add_batch(self, batch: Batch, job: Job[Any, V]) -> None:
        """Add the vectors of a batch.

        A text fails if its row is invalid, such as one with NaN. The other texts of the batch are
        added.

        Args:
            batch: rows of some texts of this shard.
            job: converts the rows to vectors, and refuses invalid ones.
        """
        # Only truncated texts are counted here. Their total is known from the ids.
        self.truncation.add(n_texts=0, count=batch.cut, max_length=batch.max_length)
        ids = [self.encodable_ids[position] for position in batch.positions]

        def to_vectors(rows: range) -> V:
            return job.to_vectors(ids[rows.start : rows.stop], batch.rows_of(rows))

        for rows, outcome in bisect_failures(range(len(ids)), to_vectors):
            if isinstance(outcome, Exception):  # of a single row
                self.failed[ids[rows.start]] = describe_error(outcome)
            else:
                self.encoded.append(outcome)

    def assemble(self, job: Job[Any, V]) -> tuple[V, dict[str, str]]:
        """Return the result of a finished shard, in the order of its texts.

        Args:
            job: creates the empty result if all texts failed.

        Returns:
            The vectors, and id -> reason for each failed text.
        """
        failed = {text_id: self.failed[text_id] for text_id in self.ids if text_id in self.failed}
        if not self.encoded:
            return job.empty_vectors(), failed
        vectors = self.concatenate()
        row_of_id = {text_id: row for row, text_id in enumerate(vectors.ids)}
        rows = [row_of_id[text_id] for text_id in self.ids if text_id not in failed]
        return vectors.take(rows), failed

    def concatenate(self) -> V:
        """Return all vectors in the order in which they were encoded. There must be some."""
        return type(self.encoded[0]).concatenate(self.encoded)

    def mark_written(self) -> None:
        """Note that the shard is on disk, and release its vectors."""
        self.is_written = True
        self.encoded = []


def describe_error(error: Exception) -> str:
    """Return the type and the message of an error, for a manifest or a report."""
    return f"{type(error).__name__}: {error}"


def encode_shards(
    job: Job[Any, V],
    shards: Iterable[PendingShard[V] | None],
    write: Callable[[PendingShard[V]], None],
    writer_thread: BackgroundWorker,
    open_folder: Callable[[], None] | None = None,
) -> Generator[PendingShard[V], None, None]:
    """Encode shards, and yield a shard whenever a batch of it is done.

    The texts of a shard are a window of the job's stream, which encodes them in batches.

    Args:
        job: the model and its options.
        shards: the shards to encode, read by the thread that tokenises. None means that the next
            shard is not ready yet.
        write: writes a finished shard. It runs in `writer_thread`.
        writer_thread: the thread that writes.
        open_folder: opens the folder. It is called once the device has its first batch, because
            opening takes a while. None if the folder is open.
    """
    started_shards: list[PendingShard[V]] = []  # the shard of each window

    def windows() -> Iterator[Window | None]:
        """Yield the window of each shard, or None while the next shard is not ready."""
        for shard in shards:
            if shard is None:
                yield None
            else:
                started_shards.append(shard)
                yield shard.window(job.model)

    with closing(job.stream(windows())) as items:
        next(items)  # a StreamStart: the threads of the stream have started
        first_items: list[Batch | WindowEnd] = []
        if open_folder is not None:
            # The fingerprint copies the weights from the device, and would have to wait for a batch
            # that is computed there. So it is computed and cached here, while the threads of the
            # stream tokenise the first texts. The folder is opened after the first batch started.
            _ = job.fingerprint
            first_items = list(islice(items, 1))
            open_folder()
        for item in chain(first_items, items):
            shard = started_shards[item.window]
            if isinstance(item, Batch):
                shard.add_batch(item, job)
            else:
                writer_thread.submit(functools.partial(write, shard))
                if not job.is_streaming:
                    writer_thread.drain()
            yield shard
        writer_thread.drain()


def encode_in_memory(job: Job[Any, V], argument: str) -> V:
    """Return the vectors of all texts of a job, in their order.

    Args:
        job: the model and the texts. Its output folder is not used.
        argument: name of the argument that has the texts, for errors.

    Raises:
        ValueError: if there is no text.
        DataError: if a text cannot be encoded.
    """
    if not job.texts:
        raise ArgumentError(argument, "expected at least one, got an empty mapping.")
    check_text_ids(argument, job.texts)
    shard: PendingShard[V] = PendingShard(0, list(job.texts), job.texts)
    for batch in job.encode_window(0, shard.window(job.model)):
        shard.add_batch(batch, job)
    report_truncation(job.encoding.kind, len(job.texts), shard.truncation)
    vectors, failed = shard.assemble(job)
    if failed:
        text_id, failure = next(iter(failed.items()))
        raise DataError(
            f"{argument}: {len(failed)} of {len(job.texts)} failed; the first is {text_id!r} "
            f"({failure}).",
        )
    return vectors
