"""The fingerprint of a tokenizer's vocabulary."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

from tilefold._typing import Tokenizer

_known: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()


def vocabulary_fingerprint(tokenizer: Tokenizer) -> str | None:
    """SHA-256 over the (token, index) pairs of a tokenizer's vocabulary; None when it has no
    vocabulary.
    """
    if (get_vocab := getattr(tokenizer, "get_vocab", None)) is None:
        return None
    if not hasattr(tokenizer, "__len__"):
        return _digest(get_vocab())
    size, fingerprint = _known.get(tokenizer, (-1, ""))
    if size != len(tokenizer):
        fingerprint = _digest(get_vocab())
        _known[tokenizer] = (len(tokenizer), fingerprint)
    return fingerprint


def _digest(vocabulary: dict[str, int]) -> str:
    digest = hashlib.sha256()
    for token, index in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
