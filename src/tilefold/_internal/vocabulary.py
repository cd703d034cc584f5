"""Vocabulary of a tokenizer: its fingerprint, its size, and the names of its terms."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from tilefold._internal.arguments import check_count
from tilefold._internal.typing import Tokenizer

_fingerprints: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()
_names: weakref.WeakKeyDictionary[Any, tuple[int, TermNames]] = weakref.WeakKeyDictionary()


def vocabulary_fingerprint(tokenizer: Tokenizer) -> str | None:
    """Return the SHA-256 over the (token, index) pairs of a tokenizer's vocabulary.

    It is cached until tokens are added to the tokenizer, which changes its length.

    Args:
        tokenizer: a tokenizer of transformers.

    Returns:
        The digest, or None for a tokenizer without a vocabulary.
    """
    get_vocab = getattr(tokenizer, "get_vocab", None)
    if get_vocab is None:
        return None
    if not hasattr(tokenizer, "__len__"):
        return _digest(get_vocab())
    not_cached = (-1, "")
    cached_size, fingerprint = _fingerprints.get(tokenizer, not_cached)
    if cached_size != len(tokenizer):
        fingerprint = _digest(get_vocab())
        _fingerprints[tokenizer] = (len(tokenizer), fingerprint)
    return fingerprint


def _digest(vocabulary: dict[str, int]) -> str:
    """Return the SHA-256 over a vocabulary, by index and then by token."""
    digest = hashlib.sha256()
    for token, index in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def id_bound(vocabulary: Mapping[str, int]) -> int:
    """Return the smallest number above all ids of a vocabulary of token -> id.

    It exceeds the number of tokens where the ids have gaps.
    """
    return max(vocabulary.values(), default=-1) + 1


class TermNames:
    """Distinct names of the terms of a vocabulary.

    A term is named by its token. A vector may have more terms than its tokenizer has tokens: the
    head has more rows, or the ids have gaps. A term without a token is named ``[term_905]`` after
    its number.

    Args:
        vocabulary: token -> id.
        token_of: returns the token of an id of the vocabulary; where several tokens have one id,
            it chooses among them.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        token_of: Callable[[int], str | None],
    ) -> None:
        self._vocabulary = vocabulary
        self._token_of = token_of
        self._ids = frozenset(vocabulary.values())
        self.id_bound = id_bound(vocabulary)

    def has_token(self, term: int) -> bool:
        """Whether the term has a token."""
        return term in self._ids

    def __getitem__(self, term: int) -> str:
        """Return the name of a term.

        Args:
            term: number of any size from 0, of a token or not.
        """
        if term in self._ids:
            token = self._token_of(term)
            if token is not None and self._vocabulary.get(token) == term:
                return token
        return _numbered(term, self._vocabulary)


def term_names_of(tokenizer: Tokenizer) -> TermNames:
    """Return the names of a tokenizer's terms, which are cached until tokens are added to it."""
    not_cached = (-1, None)
    cached_size, names = _names.get(tokenizer, not_cached)
    if names is None or cached_size != len(tokenizer):
        owner = weakref.ref(tokenizer)  # the cache must not keep the tokenizer alive

        def token_of(term: int) -> str | None:
            token: str | None = owner().convert_ids_to_tokens(term)  # type: ignore[union-attr]
            return token

        names = TermNames(tokenizer.get_vocab(), token_of)
        _names[tokenizer] = (len(tokenizer), names)
    return names


def term_names(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Return a distinct name for every term of a model's vectors.

    A term is named by its token. A term without one, such as a row of a head with more rows than
    the tokenizer has tokens, is named ``[term_905]`` after its number.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: number of terms of the vectors, V.

    Returns:
        V names, in the order of the terms.

    Raises:
        TypeError: for anything but a tokenizer, such as the name of a model.
        ValueError: for a size that is no integer of at least 1.
    """
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise TypeError(
            f"tokenizer: expected a tokenizer, got {type(tokenizer).__name__}; pass "
            "model.tokenizer.",
        )
    check_count("vocab_size", vocab_size)
    names = term_names_of(tokenizer)
    return [names[term] for term in range(vocab_size)]


def fill_missing_names(tokens: Sequence[str | None]) -> list[str]:
    """Return tokens in which every ``None`` is replaced by a name after its number.

    Args:
        tokens: token of each term, or ``None`` for a term without one, as
            ``tokenizer.convert_ids_to_tokens`` gives them.
    """
    named = {token for token in tokens if token is not None}
    return [
        _numbered(term, named) if token is None else str(token) for term, token in enumerate(tokens)
    ]


def _numbered(term: int, tokens: Container[str]) -> str:
    """Return a name of a term after its number that is no token."""
    name = f"[term_{term}]"
    while name in tokens:
        name = f"[{name}]"
    return name
