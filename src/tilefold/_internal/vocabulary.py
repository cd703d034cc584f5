"""Vocabulary of a tokenizer: its fingerprint, its size, and the names of its terms."""

from __future__ import annotations

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from tilefold._internal.arguments import check_count
from tilefold._internal.typing import Tokenizer

# Caches: tokenizer -> its number of tokens when the value was computed, and the value.
_fingerprints: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()
_term_names: weakref.WeakKeyDictionary[Any, tuple[int, TermNames]] = weakref.WeakKeyDictionary()


def vocabulary_fingerprint(tokenizer: Tokenizer) -> str | None:
    """Return the SHA-256 over the (token, index) pairs of a tokenizer's vocabulary.

    It is cached until tokens are added to the tokenizer, which changes its length.

    Args:
        tokenizer: a transformers tokenizer.

    Returns:
        The digest, or None if the tokenizer has no vocabulary.
    """
    get_vocab = getattr(tokenizer, "get_vocab", None)
    if get_vocab is None:
        return None
    if not hasattr(tokenizer, "__len__"):
        return _digest(get_vocab())
    n_tokens = len(tokenizer)
    cached_n_tokens, fingerprint = _fingerprints.get(tokenizer, (-1, ""))
    if cached_n_tokens != n_tokens:
        vocabulary = _read_token_by_token(tokenizer)
        fingerprint = _digest(get_vocab() if vocabulary is None else vocabulary)
        _fingerprints[tokenizer] = (n_tokens, fingerprint)
    return fingerprint


def _read_token_by_token(tokenizer: Any) -> dict[str, int] | None:
    """Read the vocabulary of a tokenizer that the package `tokenizers` implements.

    ``get_vocab`` holds the GIL until it has read all tokens, for 12 ms and more. A server that
    loads another model could not answer requests meanwhile.

    Args:
        tokenizer: a transformers tokenizer.

    Returns:
        token -> index, as ``get_vocab`` returns it. None if the tokenizer has another
        implementation, if its indices have gaps, or if two tokens have one index.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    defining_module = getattr(type(tokenizer).get_vocab, "__module__", "")
    if backend is None or not defining_module.startswith("transformers.tokenization_utils"):
        return None
    vocabulary = {}
    n_tokens = backend.get_vocab_size()
    for index in range(n_tokens):
        token = backend.id_to_token(index)
        # Two tokens may have one index, of which the tokenizer returns one.
        if token is None or backend.token_to_id(token) != index:
            return None
        vocabulary[token] = index
    return vocabulary if len(vocabulary) == n_tokens else None


def _digest(vocabulary: dict[str, int]) -> str:
    """Return the SHA-256 over the tokens of a vocabulary, sorted by index and then by token."""
    # Sorting all pairs at once would hold the GIL for long, so that no other thread could run.
    tokens_by_index: defaultdict[int, list[str]] = defaultdict(list)
    for token, index in vocabulary.items():
        tokens_by_index[index].append(token)
    digest = hashlib.sha256()
    for index in sorted(tokens_by_index):
        for token in sorted(tokens_by_index[index]):
            digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def id_bound(vocabulary: Mapping[str, int]) -> int:
    """Return the smallest number above all ids of a vocabulary.

    It exceeds the number of tokens if the ids have gaps.

    Args:
        vocabulary: token -> id.
    """
    return max(vocabulary.values(), default=-1) + 1


class TermNames:
    """Distinct names of the terms of a model's vectors.

    A term is named by its token. Vectors may have more terms than the tokenizer has tokens, if the
    head has more rows or the token ids have gaps. A term without a token has a name with its
    number, such as ``[term_905]``.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        token_of: Callable[[int], str | None],
    ) -> None:
        """Prepare the names.

        Args:
            vocabulary: token -> id.
            token_of: function that returns the token of an id. It chooses one if several tokens
                have the same id.
        """
        self._vocabulary = vocabulary
        self._token_of = token_of
        self._ids = frozenset(vocabulary.values())
        self.id_bound = id_bound(vocabulary)

    def has_token(self, term: int) -> bool:
        """Return whether a term has a token."""
        return term in self._ids

    def __getitem__(self, term: int) -> str:
        """Return the name of a term.

        Args:
            term: number of the term, which may be larger than all token ids.
        """
        if term in self._ids:
            token = self._token_of(term)
            # A tokenizer may return a token that belongs to another id.
            if token is not None and self._vocabulary.get(token) == term:
                return token
        return _name_with_number(term, self._vocabulary)


def term_names_of(tokenizer: Tokenizer) -> TermNames:
    """Return the names of a tokenizer's terms, which are cached until tokens are added to it."""
    n_tokens = len(tokenizer)
    cached_n_tokens, names = _term_names.get(tokenizer, (-1, None))
    if names is None or cached_n_tokens != n_tokens:
        names = _create_term_names(tokenizer)
        _term_names[tokenizer] = (n_tokens, names)
    return names


def _create_term_names(tokenizer: Tokenizer) -> TermNames:
    """Create the names of a tokenizer's terms, without keeping the tokenizer alive."""
    tokenizer_ref = weakref.ref(tokenizer)

    def token_of(term: int) -> str | None:
        tokenizer: Any = tokenizer_ref()
        token: str | None = tokenizer.convert_ids_to_tokens(term)
        return token

    return TermNames(tokenizer.get_vocab(), token_of)


def term_names(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Return a distinct name for every term of a model's vectors.

    A term is named by its token. A term without a token, such as a row of a head with more rows
    than the tokenizer has tokens, has a name with its number, such as ``[term_905]``.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of terms of the vectors, V.

    Returns:
        V names, in the order of the terms.

    Raises:
        TypeError: if `tokenizer` is something else, such as the name of a model.
        ValueError: if `vocab_size` is not an integer of at least 1.
    """
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise TypeError(
            f"tokenizer: expected a tokenizer, got {type(tokenizer).__name__}; "
            "pass model.tokenizer.",
        )
    check_count("vocab_size", vocab_size)
    names = term_names_of(tokenizer)
    return [names[term] for term in range(vocab_size)]


def fill_missing_names(tokens: Sequence[str | None]) -> list[str]:
    """Name every term by its token, or by its number if it has no token.

    Args:
        tokens: the token of each term; ``None`` for a term without a token, as
            ``tokenizer.convert_ids_to_tokens`` returns it.
    """
    known_tokens = {token for token in tokens if token is not None}
    return [
        _name_with_number(term, known_tokens) if token is None else str(token)
        for term, token in enumerate(tokens)
    ]


def _name_with_number(term: int, tokens: Container[str]) -> str:
    """Return a name with a term's number, such as ``[term_905]``, that no token has."""
    name = f"[term_{term}]"
    while name in tokens:
        name = f"[{name}]"
    return name
