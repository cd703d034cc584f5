"""Cut texts to what a model reads of them, before they are tokenized."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["cut_texts"]

_CHARACTERS_PER_TOKEN = 16  # of the first attempt; shorter texts than twice that are left alone
_SPACE = re.compile(r"\s")


def cut_texts(model: Any, texts: Sequence[str]) -> list[str]:
    """`texts`, of which enormous ones lose the end that `model` would tokenize only to truncate it.

    A text is cut at white space, where tokenizers begin a new word, after at least as many tokens as the model reads,
    so that it reads the same ones. A text without white space there is left whole, as are those of models that
    truncate on the left or not at all.
    """
    limit = _limit(model)
    tokenizer = getattr(model, "tokenizer", None)
    if limit is None or not callable(tokenizer) or getattr(tokenizer, "truncation_side", None) != "right":
        return list(texts)
    longest = 2 * _CHARACTERS_PER_TOKEN * limit
    return [text if len(text) <= longest else _cut(tokenizer, text, limit) for text in texts]


def _limit(model: Any) -> int | None:
    """The most tokens that the model reads of any text."""
    first = next(iter(model.children()), None) if hasattr(model, "children") else None
    limits = [getattr(model, "max_seq_length", None)]
    limits += [getattr(first, name, None) for name in ("query_length", "document_length")]
    known = [limit for limit in limits if isinstance(limit, int)]
    return max(known) if known else None


def _cut(tokenizer: Any, text: str, limit: int) -> str:
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
