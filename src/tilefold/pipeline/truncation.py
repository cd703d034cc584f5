"""Counts of the texts that a tokenizer truncates at a model's limit.

:func:`counting_truncation` counts the texts that a thread tokenises. :func:`report_truncation` adds
such counts to the tally that a command has opened by :func:`tally_truncation`.
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
    """A call of a tokenizer, and which of its texts were truncated.

    Attributes:
        n_texts: number of texts that the call tokenised.
        truncated: positions of the truncated texts.
        max_length: number of tokens at which texts are truncated; ``None`` without a limit.
        add_special_tokens: whether special tokens were added.
    """

    n_texts: int
    truncated: Sequence[int]
    max_length: int | None
    add_special_tokens: bool = True


@dataclass
class Truncation:
    """How many texts were tokenised, and how many of them were truncated.

    Attributes:
        texts: number of texts that were tokenised.
        count: number of truncated texts.
        max_length: largest limit, in tokens; ``None`` if there was no limit.
        calls: the calls of the tokenizer.
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
        """Record a call of a tokenizer, and add its texts to the counts."""
        self.calls.append(call)
        self.add(call.n_texts, len(call.truncated), call.max_length)

    def truncated_positions(self, n_texts: int) -> set[int]:
        """Return the positions of the texts that calls for `n_texts` texts truncated.

        Calls for another number of texts are ignored: some models tokenise their prompt in an
        additional call, to learn its length.
        """
        calls = [call for call in self.calls if call.n_texts == n_texts]
        return {position for call in calls for position in call.truncated}

    def add_encodings(
        self,
        encodings: Sequence[Any],
        truncation: dict[str, Any] | None,
        add_special_tokens: bool = True,
    ) -> None:
        """Record one call of a Rust tokenizer, and which texts it truncated.

        No text is tokenised again, because each encoding holds the tokens that were cut off.

        Args:
            encodings: one ``tokenizers.Encoding`` per text.
            truncation: truncation settings of the tokenizer; ``None`` if it does not truncate.
            add_special_tokens: whether special tokens were added.
        """
        truncated: list[int] = []
        max_length = None
        if truncation is not None:
            max_length = truncation["max_length"]
            truncated = [
                position for position, encoding in enumerate(encodings) if encoding.overflowing
            ]
        self.add_call(TokenizerCall(len(encodings), truncated, max_length, add_special_tokens))


# Counter of the texts that the current thread tokenises; None if it does not count them.
_thread_counter: ContextVar[Truncation | None] = ContextVar("tilefold_truncation", default=None)


class _TokenizerPatch:
    """Makes transformers' tokenizers count truncated texts while any thread needs it.

    The first thread that counts replaces ``__call__`` of the tokenizers' base class, and the last
    one restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_users = 0
        self._original_call: Any = None

    def acquire(self) -> None:
        """Patch the class if it is not patched yet."""
        # transformers is slow to import, and not needed by every importer of this module.
        from transformers import PreTrainedTokenizerBase as Tokenizer

        with self._lock:
            if self._n_users == 0:
                self._original_call = Tokenizer.__call__
                # mypy refuses to assign to a method
                setattr(Tokenizer, "__call__", _counting_call(Tokenizer.__call__))  # noqa: B010
            self._n_users += 1

    def release(self) -> None:
        """Restore the class if no other context uses the patch."""
        from transformers import PreTrainedTokenizerBase as Tokenizer

        with self._lock:
            self._n_users -= 1
            if self._n_users == 0:
                setattr(Tokenizer, "__call__", self._original_call)  # noqa: B010


_tokenizer_patch = _TokenizerPatch()


def current_truncation() -> Truncation | None:
    """Return the counter of the texts that this thread tokenises; ``None`` if it has none."""
    return _thread_counter.get()


@contextmanager
def counting_truncation(truncation: Truncation | None = None) -> Iterator[Truncation]:
    """Count the texts that transformers' tokenizers truncate in this thread.

    Args:
        truncation: the counter to add to; ``None`` creates a new one.

    Yields:
        The counter.
    """
    if truncation is None:
        truncation = Truncation()
    _tokenizer_patch.acquire()
    token = _thread_counter.set(truncation)
    try:
        yield truncation
    finally:
        _thread_counter.reset(token)
        _tokenizer_patch.release()


@contextmanager
def ignoring_truncation() -> Iterator[None]:
    """Do not count the texts that this thread tokenises within the context."""
    token = _thread_counter.set(None)
    try:
        yield
    finally:
        _thread_counter.reset(token)


def _counting_call(original_call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``__call__`` of transformers' tokenizers to record which texts it truncates.

    Args:
        original_call: the method of the tokenizers' class.

    Returns:
        A method with the same results. It adds each call to the counter of the calling thread.
    """

    @functools.wraps(original_call)
    def counting_call(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Tokenise texts, and record which of them were truncated."""
        outputs = original_call(tokenizer, *args, **kwargs)
        truncation = _thread_counter.get()
        if truncation is None:
            return outputs
        encodings = getattr(outputs, "encodings", None)
        if encodings is not None:  # a Rust tokenizer's
            truncation.add_encodings(
                encodings,
                tokenizer.backend_tokenizer.truncation,
                add_special_tokens=bool(kwargs.get("add_special_tokens", True)),
            )
        else:
            tokenize = functools.partial(original_call, tokenizer)
            max_length = tokenizer.model_max_length
            call = _python_tokenizer_call(tokenize, outputs, max_length, *args, **kwargs)
            truncation.add_call(call)
        return outputs

    return counting_call


def _python_tokenizer_call(
    tokenize: Callable[..., Any],
    outputs: Any,
    model_max_length: int,
    /,
    text: Any,
    text_pair: Any = None,
    *_: Any,
    **kwargs: Any,
) -> TokenizerCall:
    """Find out which texts a tokenizer without a Rust backend truncated.

    Such a tokenizer does not report it. Texts with as many tokens as the limit are therefore
    tokenised again without truncation.

    Args:
        tokenize: the original ``__call__`` of the tokenizer.
        outputs: the result of the call.
        model_max_length: the limit in tokens if the call had no ``max_length``.
        text: first argument of the call: a text, or a list of texts.
        text_pair: second argument of the call.
        **kwargs: other arguments of the call.
    """
    texts, pairs = text, text_pair
    has_mask = "attention_mask" in outputs
    rows = outputs["attention_mask" if has_mask else "input_ids"]
    if isinstance(text, str):
        texts = [text]
        pairs = None if text_pair is None else [text_pair]
        rows = np.atleast_2d(np.asarray(rows))  # a list, or a tensor [1, S]
    if kwargs.get("truncation") in (None, False, "do_not_truncate"):
        return TokenizerCall(len(texts), truncated=(), max_length=None)
    max_length = kwargs.get("max_length") or model_max_length
    lengths = [int(sum(row)) if has_mask else len(row) for row in rows]
    full = [position for position, length in enumerate(lengths) if length >= max_length]
    truncated: list[int] = []
    if full:
        options = {}
        if "add_special_tokens" in kwargs:
            options["add_special_tokens"] = kwargs["add_special_tokens"]
        full_pairs = None if pairs is None else [pairs[position] for position in full]
        full_texts = [texts[position] for position in full]
        all_ids = tokenize(full_texts, full_pairs, verbose=False, **options)["input_ids"]
        truncated = [
            position for position, ids in zip(full, all_ids, strict=True) if len(ids) > max_length
        ]
    return TokenizerCall(len(texts), truncated, max_length)


@dataclass
class Tally:
    """Counts of truncated texts by kind and limit.

    Attributes:
        counts: the counts by kind of text, such as ``"query"``, and limit in tokens.
    """

    counts: dict[tuple[str, int | None], Truncation] = field(default_factory=dict)

    def add(self, kind: str, n_texts: int, count: int, max_length: int | None) -> None:
        """Add `n_texts` texts of a kind, of which `count` were truncated at `max_length` tokens."""
        truncation = self.counts.setdefault((kind, max_length), Truncation())
        truncation.add(n_texts, count, max_length)

    def sentences(self) -> list[str]:
        """Describe the truncated texts, such as "3 of 1,000 queries were truncated at 32 tokens".

        Returns:
            A sentence for each kind of text and limit, if any of its texts were truncated.
        """
        sentences = []
        for (kind, limit), truncation in self.counts.items():
            if truncation.count == 0:
                continue
            plural = _IRREGULAR_PLURALS.get(kind, f"{kind}s")
            verb = "was" if truncation.count == 1 else "were"
            sentences.append(
                f"{truncation.count:,} of {truncation.texts:,} {plural} "
                f"{verb} truncated at {limit} tokens",
            )
        return sentences


_IRREGULAR_PLURALS = {
    "query": "queries",
    "use of training texts": "uses of training texts",
}
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
        kind: the kind of the texts, such as ``"document"`` or ``"query"``.
        n_texts: number of texts that were encoded.
        truncation: how many of them were truncated, and at how many tokens.
    """
    for tally in _active_tallies:
        tally.add(kind, n_texts, truncation.count, truncation.max_length)
