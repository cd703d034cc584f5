"""Cut texts to what a model reads of them, before they are tokenized; and who is told how many a tokenizer cut."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tilefold.pipeline.rows import halved
from tilefold.pipeline.truncated import Call, Tally, Truncation, tallied, tell, unwatched, watching
from tilefold.retrieval._prefix import Beginnings

__all__ = ["Call", "Tally", "cut_texts", "tallied", "tell_truncated", "token_counts", "watching"]

_CHARACTERS_PER_TOKEN = 16  # of the first attempt at white space; shorter texts than twice that are left alone
_BEGINNINGS = (8, 32, 128, 512)  # characters per token of the attempts anywhere
_SPACE = re.compile(r"\s")


def cut_texts(model: Any, texts: Sequence[str]) -> list[str]:
    """`texts`, of which enormous ones lose the end that `model` would tokenize only to truncate it.

    A text is cut where its beginning is shown to have the first tokens of the whole, as many as the model reads
    (:mod:`tilefold.retrieval._prefix`), with white space or without. Where that cannot be shown (a tokenizer without a
    fast backend, one word that never ends, special tokens in the text), it is cut at white space, where tokenizers
    begin a new word, and is left whole if there is none. Texts of models that truncate on the left or not at all are
    left whole.
    """
    limit = _limit(model)
    tokenizer = getattr(model, "tokenizer", None)
    if limit is None or not callable(tokenizer) or getattr(tokenizer, "truncation_side", None) != "right":
        return list(texts)
    longest = 2 * _CHARACTERS_PER_TOKEN * limit
    if all(len(text) <= longest for text in texts):
        return list(texts)
    fast = getattr(tokenizer, "backend_tokenizer", None) is not None
    beginnings = Beginnings(tokenizer) if fast else None
    prompts = {"", *(getattr(model, "prompts", None) or {}).values()}
    most = limit + 1  # so that the tokenizer sees that there is more
    with unwatched():
        return [text if len(text) <= longest else _cut(tokenizer, beginnings, prompts, text, most) for text in texts]


def token_counts(model: Any, texts: Sequence[str]) -> list[int | Exception]:
    """How many tokens a model reads of each text; for a text that its tokenizer refuses, the tokenizer's exception."""
    limit = getattr(model, "max_seq_length", None)
    cut = {"truncation": True, "max_length": limit} if isinstance(limit, int) else {}

    def counts(part: list[str]) -> list[int]:
        return [len(ids) for ids in model.tokenizer(cut_texts(model, part), **cut)["input_ids"]]

    found: list[int | Exception] = []
    for _, outcome in halved(list(texts), counts):
        found += [outcome] if isinstance(outcome, Exception) else outcome
    return found


def tell_truncated(kind: str, texts: int, truncated: Mapping[str, int | None]) -> None:
    """Say to who counts (:func:`tallied`) how many of so many texts were cut, as a manifest or a result says it."""
    if truncated:
        tell(kind, texts, Truncation(count=truncated["count"] or 0, max_length=truncated["max_length"]))


def _limit(model: Any) -> int | None:
    """The most tokens that the model reads of any text."""
    first = next(iter(model.children()), None) if hasattr(model, "children") else None
    limits = [getattr(model, "max_seq_length", None)]
    limits += [getattr(first, name, None) for name in ("query_length", "document_length")]
    known = [limit for limit in limits if isinstance(limit, int)]
    return max(known) if known else None


def _cut(tokenizer: Any, beginnings: Beginnings | None, prompts: set[str], text: str, limit: int) -> str:
    if beginnings is not None:
        for size in (limit * characters for characters in _BEGINNINGS):
            start = text[:size]
            if size >= len(text) or all(beginnings.first(prompt + start, limit) is not None for prompt in prompts):
                return start
    return _cut_at_space(tokenizer, text, limit)


def _cut_at_space(tokenizer: Any, text: str, limit: int) -> str:
    size = _CHARACTERS_PER_TOKEN * limit
    while size < len(text):
        space = _SPACE.search(text, size)
        if space is None:
            return text
        start = text[: space.start()]
        tokens = tokenizer(start, add_special_tokens=False, truncation=True, max_length=limit)["input_ids"]
        if len(tokens) >= limit:
            return start
        size = 4 * space.start()
    return text
