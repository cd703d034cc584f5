"""The texts of one shard, and what was made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from tilefold.pipeline.rows import Batch, Begun, Window, WindowEnd, halved
from tilefold.pipeline.truncated import Truncation, tell, watching
from tilefold.retrieval._ids import check_text_ids
from tilefold.retrieval._shards import Part, Vectors
from tilefold.retrieval.errors import DataError

V = TypeVar("V", bound=Vectors)
Made_co = TypeVar("Made_co", bound=Vectors, covariant=True)
Stream = Callable[[Iterator[Window]], Generator[Any, None, None]]
Prepare = Callable[[Sequence[str]], Sequence[str]]


class Maker(Protocol[Made_co]):
    """Makes vectors of what a stream gives."""

    def vectors(self, names: list[str], rows: Any) -> Made_co:
        """Vectors of some texts, of the rows of a batch; an error tells that one of them is at fault."""

    def nothing(self) -> Made_co:
        """Vectors of no text."""


@dataclass
class Shard(Generic[V]):
    """Texts of one shard, and what is done of them.

    Attributes:
        number, ids: of the shard.
        texts: id -> text, of these texts and perhaps of others.
        strings: those of its texts that can be encoded at all.
        done, failed: vectors in batches, and id -> reason.
        cut: how many of these texts the tokenizer cut, and at how many tokens; None where an earlier version did them.
        kept, saved: how much of it is on disk, and since when.
        is_written: whether all of it is.
    """

    number: int
    ids: list[str]
    texts: Mapping[str, Any]
    strings: list[str] = field(default_factory=list)
    done: list[V] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    cut: Truncation | None = field(default_factory=Truncation)
    kept: int = 0
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

    def resumed(self, before: Part[V] | None) -> Shard[V]:
        """The shard, of which an earlier run kept a part."""
        if before is not None:
            self.done, self.failed, self.cut = [before.vectors], dict(before.failed) | self.failed, before.cut
            self.kept = len(self)
        return self

    def window(self, prepare: Prepare) -> Window:
        """Its texts for a stream."""
        known = {name for vectors in self.done for name in vectors.ids} | self.failed.keys()
        skip = frozenset(place for place, name in enumerate(self.strings) if name in known)
        return Window([self.texts[name] for name in self.strings], skip, prepare)

    def written(self) -> None:
        """Forget the vectors, which are on disk."""
        self.is_written, self.done = True, []

    def take(self, batch: Batch, maker: Maker[V]) -> None:
        """A batch of the stream; what fails of it, such as NaN in a row, loses no other text."""
        if self.cut is not None:
            self.cut.add(0, batch.cut, None)
        names = [self.strings[place] for place in batch.places]

        def vectors(texts: range) -> V:
            return maker.vectors(names[texts.start : texts.stop], batch.rows_of(texts))

        for texts, outcome in halved(range(len(names)), vectors):
            if isinstance(outcome, Exception):
                self.failed[names[texts.start]] = reason(outcome)
            else:
                self.done.append(outcome)

    def end(self, item: WindowEnd) -> None:
        """The last batch was taken."""
        if self.cut is not None:
            self.cut.add(0, 0, item.max_length)

    def assembled(self, maker: Maker[V]) -> tuple[V, dict[str, str]]:
        """All vectors in the order of the texts, and the failed ones."""
        failed = self.failures()
        if not self.done:
            return maker.nothing(), failed
        whole: Any = self.part()
        row_of = {name: row for row, name in enumerate(whole.ids)}
        return whole.take([row_of[name] for name in self.ids if name in row_of]), failed

    def failures(self) -> dict[str, str]:
        """Reasons of the failed texts, in the order of the texts."""
        return {name: self.failed[name] for name in self.ids if name in self.failed}

    def part(self) -> V:
        """All vectors in the order in which they were made; there are some."""
        whole: V = type(self.done[0]).concatenate(self.done)  # type: ignore[attr-defined]
        return whole


class PlainStream:
    """Windows of texts to batches by a function of texts, without threads; a text that fails loses no other.

    Args:
        run: texts of similar length, longest first -> rows.
        batch_size: texts given to it at a time.
    """

    def __init__(self, run: Callable[[list[str]], Any], batch_size: int) -> None:
        self.run, self.batch_size = run, batch_size
        self.max_length: int | None = None  # of a text in tokens, once some of the window were tokenised

    def __call__(self, windows: Iterator[Window]) -> Generator[Any, None, None]:
        """Batches of all texts, window by window, as :class:`tilefold.pipeline.rows.Item` says."""
        yield Begun()
        for number, window in enumerate(windows):
            self.max_length = None
            texts = window.prepared()
            order = sorted(range(len(texts)), key=lambda place: len(texts[place]), reverse=True)
            for start in range(0, len(order), self.batch_size):
                places = [place for place in order[start : start + self.batch_size] if place not in window.skip]
                if places:
                    yield from self._encoded(number, texts, places)
            yield WindowEnd(number, len(texts), self.max_length)

    def _encoded(self, window: int, texts: Sequence[str], places: list[int]) -> Iterator[Batch]:
        seen = Truncation()

        def attempt(part: list[int]) -> Any:
            nonlocal seen
            with watching() as seen:
                return self.run([texts[place] for place in part])

        for part, rows in halved(places, attempt):
            self.max_length = seen.max_length or self.max_length
            yield Batch(window, part, rows, seen.count)


def in_memory(what: str, kind: str, texts: Mapping[str, str], stream: Stream, prepare: Prepare, maker: Maker[V]) -> V:
    """The vectors of all texts, in their order.

    Raises:
        DataError: a text cannot be encoded; the message says `what` it is one of, and names it.
        TypeError: an id that is not a string.
    """
    check_text_ids(what, texts)
    shard: Shard[V] = Shard(0, list(texts), texts)
    with closing(stream(iter([shard.window(prepare)]))) as items:
        for item in items:
            if isinstance(item, WindowEnd):
                shard.end(item)
            elif not isinstance(item, Begun):
                shard.take(item, maker)
    if shard.cut is not None:
        tell(kind, len(texts), shard.cut)
    vectors, failed = shard.assembled(maker)
    if failed:
        name, why = next(iter(failed.items()))
        raise DataError(f"{what}: {len(failed)} of {len(texts)} failed, {name!r} first ({why}).")
    return vectors


def reason(error: Exception) -> str:
    """An error in the words of the manifest."""
    return f"{type(error).__name__}: {error}"
