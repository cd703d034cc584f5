"""Texts that a tokenizer cut at the model's limit: seen where their tokens are made, and told to
who says so.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Call", "Tally", "Truncation", "tallied", "tell", "unwatched", "watched", "watching"]


class Call(NamedTuple):
    """Texts that a tokenizer got together, the places of those that it cut, and the most tokens
    that it kept of one.

    `special` is whether it was to put its special tokens around them.
    """

    texts: int
    cut: Sequence[int]
    max_length: int | None
    special: bool = True


@dataclass
class Truncation:
    """Number of texts that were tokenised, and `count` of those that were cut; no limit has a
    `max_length` of None.
    """

    texts: int = 0
    count: int = 0
    max_length: int | None = None
    calls: list[Call] = field(default_factory=list)

    def add(self, texts: int, count: int, max_length: int | None) -> None:
        self.texts += texts
        self.count += count
        self.max_length = max(
            (length for length in (self.max_length, max_length) if length is not None),
            default=None,
        )

    def see(self, call: Call) -> None:
        self.calls.append(call)
        self.add(call.texts, len(call.cut), call.max_length)

    def places(self, texts: int) -> set[int]:
        """Places of texts cut in a call with so many: models tokenise their prompt alone, too, for
        its length.
        """
        return {place for call in self.calls if call.texts == texts for place in call.cut}

    def see_encodings(
        self,
        encodings: Sequence[Any],
        truncation: dict[str, Any] | None,
        special: bool = True,
    ) -> None:
        """Count what the Rust tokenizer made; what it cut off stays with each text, and is not
        tokenised again.
        """
        cut = (
            []
            if truncation is None
            else [at for at, made in enumerate(encodings) if made.overflowing]
        )
        self.see(
            Call(
                len(encodings),
                cut,
                None if truncation is None else truncation["max_length"],
                special,
            ),
        )


_watch: ContextVar[Truncation | None] = ContextVar("tilefold_truncation", default=None)
_lock = threading.Lock()
_stock: list[Callable[..., Any]] = []  # the method of transformers, once for each watcher


def watched() -> Truncation | None:
    """The counter of the texts that this thread tokenises."""
    return _watch.get()


@contextmanager
def watching(into: Truncation | None = None) -> Iterator[Truncation]:
    """Within it, what tokenizers of transformers cut in this thread is counted."""
    from transformers import (
        PreTrainedTokenizerBase as Tokenizer,
    )  # there is no tokenizer without it

    found = Truncation() if into is None else into
    with _lock:  # what tokenizers give is looked at as long as somebody watches, in whatever thread
        _stock.append(_stock[0] if _stock else Tokenizer.__call__)
        if len(_stock) == 1:
            setattr(Tokenizer, "__call__", _counting(_stock[0]))  # noqa: B010 - of a class
    token = _watch.set(found)
    try:
        yield found
    finally:
        _watch.reset(token)
        with _lock:
            stock = _stock.pop()
            if not _stock:
                setattr(Tokenizer, "__call__", stock)  # noqa: B010 - of a class


@contextmanager
def unwatched() -> Iterator[None]:
    """Within it, this thread tokenises for itself, and nothing is counted."""
    token = _watch.set(None)
    try:
        yield
    finally:
        _watch.reset(token)


def _counting(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, *args, **kwargs)
        if (watch := _watch.get()) is not None:
            if (encodings := getattr(found, "encodings", None)) is not None:
                special = bool(kwargs.get("add_special_tokens", True))
                watch.see_encodings(encodings, self.backend_tokenizer.truncation, special)
            else:
                _see_slow(
                    watch,
                    functools.partial(stock, self),
                    found,
                    self.model_max_length,
                    *args,
                    **kwargs,
                )
        return found

    return call


def _see_slow(
    watch: Truncation,
    stock: Callable[..., Any],
    found: Any,
    limit: int,
    text: Any,
    text_pair: Any = None,
    *_: Any,
    **kwargs: Any,
) -> None:
    """Count what a tokenizer without Rust made; texts of as many tokens as it may give are
    tokenised again, whole.
    """
    masked = "attention_mask" in found
    rows = found["attention_mask" if masked else "input_ids"]
    if isinstance(text, str):
        text, text_pair = [text], None if text_pair is None else [text_pair]
        rows = np.atleast_2d(np.asarray(rows))  # a list, or a tensor [1, S]
    if kwargs.get("truncation") in (None, False, "do_not_truncate"):
        watch.see(Call(len(text), (), None))
        return
    limit = kwargs.get("max_length") or limit
    full = [at for at, row in enumerate(rows) if (int(sum(row)) if masked else len(row)) >= limit]
    cut: list[int] = []
    if full:
        same = {name: kwargs[name] for name in ("add_special_tokens",) if name in kwargs}
        other = None if text_pair is None else [text_pair[at] for at in full]
        whole = stock([text[at] for at in full], other, verbose=False, **same)["input_ids"]
        cut = [at for at, ids in zip(full, whole, strict=True) if len(ids) > limit]
    watch.see(Call(len(text), cut, limit))


@dataclass
class Tally:
    """Counts of texts that were cut, by kind and by how many tokens are read of each."""

    seen: dict[tuple[str, int | None], Truncation] = field(default_factory=dict)

    def add(self, kind: str, texts: int, count: int, max_length: int | None) -> None:
        """So many texts of a kind, such as ``"query"``, of which so many were cut."""
        self.seen.setdefault((kind, max_length), Truncation()).add(texts, count, max_length)

    def lines(self) -> list[str]:
        """A sentence for all texts of a kind that some were cut of."""
        return [
            f"{found.count:,} of {found.texts:,} {_PLURAL.get(kind, f'{kind}s')} "
            f"{'was' if found.count == 1 else 'were'} cut at {limit} tokens"
            for (kind, limit), found in self.seen.items()
            if found.count
        ]


_PLURAL = {"query": "queries"}
_tallies: list[Tally] = []


@contextmanager
def tallied() -> Iterator[Tally]:
    """Within it, what this package encodes is counted, in whatever thread."""
    tally = Tally()
    _tallies.append(tally)
    try:
        yield tally
    finally:
        _tallies.remove(tally)


def tell(kind: str, texts: int, found: Truncation) -> None:
    """Say to who counts what was found of so many texts of a kind."""
    for tally in _tallies:
        tally.add(kind, texts, found.count, found.max_length)
