"""Tokens of texts: how many, which, and back; with a tokenizer of its own, so that any thread may ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilefold._typing import Tokenizer
from tilefold.serve.errors import ServeError, empty

__all__ = ["TextTokens"]


class TextTokens:
    """A copy of a model's tokenizer that neither truncates nor pads, for any thread; it must have a fast backend."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Tokenizer  # a package of transformers

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"model: expected a model with a fast tokenizer, got {type(tokenizer).__name__}. Save its "
                "tokenizer.json (transformers.AutoTokenizer with use_fast=True), and serve that."
            )
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_ids = set(tokenizer.all_special_ids)

    def lengths(self, texts: Sequence[str], prompt: str = "", special: bool = True) -> list[int]:
        """Tokens of each text with the prompt before it, with special tokens or without."""
        return [len(encoding.ids) for encoding in self._encode([prompt + text for text in texts], special)]

    def tokenize(
        self, texts: Sequence[str], special: bool, prompt: str = "", *, in_bytes: bool = False
    ) -> list[list[dict[str, Any]]]:
        """Tokens as ``/tokenize`` answers: id, text, whether special, and where the others start and stop."""
        whole = [prompt + text for text in texts]
        return [
            _described(text, encoding, _byte_places(text) if in_bytes else range(len(text) + 1))
            for text, encoding in zip(whole, self._encode(whole, special), strict=True)
        ]

    def known(self, ids: Sequence[int]) -> Sequence[int]:
        """Token ids as they are."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        wrong = next((id_ for id_ in ids if not 0 <= id_ < size), None)
        if wrong is not None:
            raise ServeError("Tokenizer", f"token ids: expected numbers from 0 to {size - 1}, got {wrong}")
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """The text of token ids."""
        if not ids:
            raise empty("input_ids")
        return str(self._tokenizer.decode(list(self.known(ids)), skip_special_tokens=skip_special))

    def token(self, id_: int) -> str:
        """The token of an id; the id as text where the tokenizer has none."""
        found = self._tokenizer.id_to_token(id_)
        return str(id_) if found is None else str(found)

    def words(self, text: str) -> set[int]:
        """The ids of the tokens of a text, without special ones."""
        return set(self._encode([text], False)[0].ids) - self.special_ids

    def _encode(self, texts: Sequence[str], special: bool) -> list[Any]:
        try:
            return list(self._tokenizer.encode_batch(list(texts), add_special_tokens=special))
        except Exception as error:
            raise ServeError("Tokenizer", f"Tokenization error: {type(error).__name__}") from error


def _described(text: str, encoding: Any, places: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {"id": id_, "text": token, "special": True, "start": None, "stop": None}
        if mask
        else {"id": id_, "text": text[start:stop], "special": False, "start": places[start], "stop": places[stop]}
        for id_, token, mask, (start, stop) in zip(
            encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True
        )
    ]


def _byte_places(text: str) -> Sequence[int]:
    """Offset of each code point of a text in its UTF-8, and where the text ends."""
    if text.isascii():
        return range(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return [0, *np.cumsum(sizes).tolist()]
