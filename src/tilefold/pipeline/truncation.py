"""Counts of the texts that a tokenizer truncates at a model's limit.

:func:`counting_truncation` counts in the thread that tokenises. :func:`report_truncation` adds such
counts to the tallies of a command, which :func:`tally_truncation` opens.
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

__all__ = [
    "Tally",
    "TokenizerCall",
    "Truncation",
    "counting_truncation",
    "current_truncation",
    "ignoring_truncation",
    "report_truncation",
    "tally_truncation",
]


class TokenizerCall(NamedTuple):
    """One call of a tokenizer, and which of its texts were truncated.

    Attributes:
        n_texts: number of texts of the call.
        cut: positions of the truncated texts.
        max_length: number of tokens at which texts are truncated; ``None`` if they are not.
        special: whether special tokens were added.
    """

    n_texts: int
    cut: Sequence[int]
    max_length: int | None
    special: bool = True


@dataclass
class Truncation:
    """How many texts were tokenised, and how many of them were truncated.

    Attributes:
        texts: number of texts that were tokenised.
        count: number of truncated texts.
        max_length: largest limit, in tokens; ``None`` if there was no limit.
        calls: the tokenizer's calls that were counted.
    """

    texts: int = 0
    count: int = 0
    max_length: int | None = None
    calls: list[TokenizerCall] = field(default_factory=list)

    def add(self, n_texts: int, count: int, max_length: int | None) -> None:
        """Add `n_texts`, of which `count` were truncated at `max_length` tokens."""
        self.texts += n_texts
        self.count += count
        limits = [limit for limit in (self.max_length, max_length) if limit is not None]
        self.max_length = max(limits, default=None)

    def add_call(self, call: TokenizerCall) -> None:
        """Add the texts of a tokenizer's call."""
        self.calls.append(call)
        self.add(call.n_texts, len(call.cut), call.max_length)

    def cut_positions(self, n_texts: int) -> set[int]:
        """Return the positions of truncated texts in the calls with `n_texts` texts.

        Other calls are left out because models also tokenise their prompt by itself, for its
        length.
        """
        calls = [call for call in self.calls if call.n_texts == n_texts]
        return {position for call in calls for position in call.cut}

    def add_encodings(
        self,
        encodings: Sequence[Any],
        truncation: dict[str, Any] | None,
        special: bool = True,
    ) -> None:
        """Add the texts of a call of a Rust tokenizer, and count those that it truncated.

        Nothing is tokenised again, because each encoding holds the tokens that were cut off.

        Args:
            encodings: an encoding for each text.
            truncation: truncation settings of the tokenizer; ``None`` if it does not truncate.
            special: whether special tokens were added.
        """
        cut: list[int] = []
        max_length = None
        if truncation is not None:
            cut = [position for position, encoding in enumerate(encodings) if encoding.overflowing]
            max_length = truncation["max_length"]
        self.add_call(TokenizerCall(len(encodings), cut, max_length, special))


_current: ContextVar[Truncation | None] = ContextVar("tilefold_truncation", default=None)
_lock = threading.Lock()

# The unpatched ``__call__`` of transformers' tokenizers, once for each active counter.
_stock_calls: list[Callable[..., Any]] = []


def current_truncation() -> Truncation | None:
    """Return the counter of the texts that this thread tokenises, if it counts them."""
    return _current.get()


@contextmanager
def counting_truncation(truncation: Truncation | None = None) -> Iterator[Truncation]:
    """Count the texts that transformers' tokenizers truncate in this thread.

    While any thread counts, ``__call__`` of the tokenizers' class is replaced by one that adds to
    the counter of the calling thread.

    Args:
        truncation: the counter to add to; ``None`` makes a new one.

    Yields:
        The counter.
    """
    # transformers is imported here, because it is slow to import and not needed before.
    from transformers import PreTrainedTokenizerBase as Tokenizer

    if truncation is None:
        truncation = Truncation()
    # The first counter patches the class, and the last one restores it.
    with _lock:
        stock = _stock_calls[0] if _stock_calls else Tokenizer.__call__
        _stock_calls.append(stock)
        if len(_stock_calls) == 1:
            setattr(Tokenizer, "__call__", _counting_call(stock))  # noqa: B010 - of a class
    token = _current.set(truncation)
    try:
        yield truncation
    finally:
        _current.reset(token)
        with _lock:
            stock = _stock_calls.pop()
            if not _stock_calls:
                setattr(Tokenizer, "__call__", stock)  # noqa: B010 - of a class


@contextmanager
def ignoring_truncation() -> Iterator[None]:
    """Do not count the texts that this thread tokenises within the context."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def _counting_call(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``__call__`` of the tokenizers so that it adds to the counter of the calling thread.

    Args:
        stock: the original method.

    Returns:
        A method that returns the same results.
    """

    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = stock(self, *args, **kwargs)
        truncation = _current.get()
        if truncation is None:
            return outputs
        encodings = getattr(outputs, "encodings", None)
        if encodings is not None:
            special = bool(kwargs.get("add_special_tokens", True))
            truncation.add_encodings(encodings, self.backend_tokenizer.truncation, special)
        else:
            tokenize = functools.partial(stock, self)
            _count_slow(truncation, tokenize, outputs, self.model_max_length, *args, **kwargs)
        return outputs

    return call


def _count_slow(
    truncation: Truncation,
    tokenize: Callable[..., Any],
    outputs: Any,
    model_max_length: int,
    /,
    text: Any,
    text_pair: Any = None,
    *_: Any,
    **kwargs: Any,
) -> None:
    """Count the results of a tokenizer without a Rust backend.

    Texts with as many tokens as the limit are tokenised again without truncation, since the
    tokenizer does not say whether it has truncated them.

    Args:
        truncation: the counter to add to.
        tokenize: the tokenizer's unpatched ``__call__``.
        outputs: what it returned.
        model_max_length: limit if the call has no ``max_length``.
        text: first argument of the call: a text, or a list of texts.
        text_pair: second argument of the call.
        **kwargs: other arguments of the call.
    """
    masked = "attention_mask" in outputs
    rows = outputs["attention_mask" if masked else "input_ids"]
    if isinstance(text, str):
        text = [text]
        text_pair = None if text_pair is None else [text_pair]
        rows = np.atleast_2d(np.asarray(rows))  # a list, or a tensor [1, S]
    if kwargs.get("truncation") in (None, False, "do_not_truncate"):
        truncation.add_call(TokenizerCall(len(text), (), None))
        return
    max_length = kwargs.get("max_length") or model_max_length
    lengths = [int(sum(row)) if masked else len(row) for row in rows]
    full = [i for i, length in enumerate(lengths) if length >= max_length]
    cut: list[int] = []
    if full:
        options = {}
        if "add_special_tokens" in kwargs:
            options["add_special_tokens"] = kwargs["add_special_tokens"]
        untruncated = tokenize(
            [text[i] for i in full],
            None if text_pair is None else [text_pair[i] for i in full],
            verbose=False,
            **options,
        )
        all_ids = untruncated["input_ids"]
        cut = [i for i, ids in zip(full, all_ids, strict=True) if len(ids) > max_length]
    truncation.add_call(TokenizerCall(len(text), cut, max_length))


@dataclass
class Tally:
    """Counts of truncated texts by kind and limit.

    Attributes:
        counts: truncation of each kind of text, such as ``"query"``, and limit in tokens.
    """

    counts: dict[tuple[str, int | None], Truncation] = field(default_factory=dict)

    def add(self, kind: str, n_texts: int, count: int, max_length: int | None) -> None:
        """Add `n_texts` of a kind, of which `count` were truncated at `max_length` tokens."""
        truncation = self.counts.setdefault((kind, max_length), Truncation())
        truncation.add(n_texts, count, max_length)

    def lines(self) -> list[str]:
        """Describe the truncated texts, such as "3 of 1,000 queries were cut at 32 tokens".

        Returns:
            A sentence for each kind of text and limit, without those that truncated none.
        """
        sentences = []
        for (kind, limit), truncation in self.counts.items():
            if truncation.count == 0:
                continue
            plural = _IRREGULAR_PLURALS.get(kind, f"{kind}s")
            verb = "was" if truncation.count == 1 else "were"
            sentences.append(
                f"{truncation.count:,} of {truncation.texts:,} {plural} "
                f"{verb} cut at {limit} tokens",
            )
        return sentences


_IRREGULAR_PLURALS = {"query": "queries"}
_active_tallies: list[Tally] = []


@contextmanager
def tally_truncation() -> Iterator[Tally]:
    """Collect what :func:`report_truncation` reports within the context, in any thread."""
    tally = Tally()
    _active_tallies.append(tally)
    try:
        yield tally
    finally:
        _active_tallies.remove(tally)


def report_truncation(kind: str, n_texts: int, truncation: Truncation) -> None:
    """Add truncation counts to every active tally.

    Args:
        kind: what the texts are, such as ``"document"`` or ``"query"``.
        n_texts: number of texts that were encoded.
        truncation: how many of them were truncated, and at how many tokens.
    """
    for tally in _active_tallies:
        tally.add(kind, n_texts, truncation.count, truncation.max_length)
