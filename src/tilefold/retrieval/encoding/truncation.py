"""Truncation of texts: shortening before tokenisation, token limits, and reported counts."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tilefold._internal.arguments import ArgumentError, check_least_count
from tilefold._internal.typing import Model, Tokenizer
from tilefold.pipeline.truncation import (
    Tally,
    TokenizerCall,
    Truncation,
    counting_truncation,
    ignoring_truncation,
    report_truncation,
    tally_truncation,
)

__all__ = [
    "Tally",
    "TextShortener",
    "TokenizerCall",
    "counting_truncation",
    "limit_length",
    "limited",
    "report_manifest_truncation",
    "shorten_texts",
    "tally_truncation",
    "token_counts",
]

# Characters per token of a prefix that ends at white space. Tokens rarely have as many, so such a
# prefix usually has enough tokens.
_CHARACTERS_PER_TOKEN = 16
# Texts of at most twice as many characters per token are not shortened, which would save little.
_MAX_CHARACTERS_PER_TOKEN = 2 * _CHARACTERS_PER_TOKEN
# Characters per token of the prefixes that are tried one after the other, and may end anywhere.
_PREFIX_CHARACTERS_PER_TOKEN = (8, 32, 128, 512)
_LONGER_PREFIX = 4  # a prefix at white space that has too few tokens is made this much longer
_SPACE = re.compile(r"\s")
# Characters at the end of a prefix that a tokenizer may normalise or split differently when the
# text goes on.
UNSTABLE_CHARACTERS = 64
# Minimum number of letters and digits among them. With fewer, one cluster of combining characters
# could span all of them, so that the text before could change, too.
_MIN_ALPHANUMERIC = 8
_BYTES_PER_CHARACTER = 4  # maximum in UTF-8


def shorten_texts(model: Model, texts: Sequence[str]) -> list[str]:
    """Shorten texts that are much longer than a model reads, to save time in the tokenizer.

    The tokenizer then truncates the short text to the same tokens as the complete text. A text is
    shortened to a prefix whose first tokens do not depend on the rest (:class:`PrefixTokenizer`).
    If no such prefix is known (the tokenizer has no fast backend, or the text has special tokens or
    one very long word), the prefix ends at white space, where tokenizers begin a new word. A text
    without white space stays as it is.

    Args:
        model: a model of sentence-transformers. If it does not truncate texts, or truncates them on
            the left, no text is shortened.
        texts: the texts.
    """
    return TextShortener(model).shorten(texts)


class TextShortener:
    """Shortens texts like :func:`shorten_texts`, in many calls.

    It uses the token limit that the model has when this object is created.

    Args:
        model: a model of sentence-transformers.
        copy_tokenizer: whether to use a copy of the tokenizer, because another thread tokenises at
            the same time.
    """

    def __init__(self, model: Model, *, copy_tokenizer: bool = False) -> None:
        self._limit = _token_limit(model) or 0
        self._tokenizer = getattr(model, "tokenizer", None)
        self._copies_tokenizer = copy_tokenizer
        self._prompts = {"", *(getattr(model, "prompts", None) or {}).values()}
        truncates_right = getattr(self._tokenizer, "truncation_side", None) == "right"
        self._shortens = self._limit > 0 and callable(self._tokenizer) and truncates_right

    def shorten(self, texts: Sequence[str]) -> list[str]:
        """Return the texts, with a prefix in place of each very long text."""
        if not self._shortens:
            return list(texts)
        max_characters = _MAX_CHARACTERS_PER_TOKEN * self._limit
        with ignoring_truncation():
            return [
                text if len(text) <= max_characters else self._prefix_finder.find(text)
                for text in texts
            ]

    @functools.cached_property
    def _prefix_finder(self) -> _PrefixFinder:
        """Finds prefixes; created for the first long text, because it reads the vocabulary."""
        tokenizer = self._tokenizer
        if self._copies_tokenizer:
            tokenizer = copy.deepcopy(tokenizer)
        # One token more than the limit, so that the tokenizer still truncates the text, and reports
        # it as truncated.
        return _PrefixFinder(tokenizer, self._prompts, self._limit + 1)


def token_counts(model: Model, texts: Sequence[str], kind: str) -> list[int | Exception]:
    """Count the tokens that a model reads of each text.

    Args:
        model: a model of sentence-transformers.
        texts: the texts. Tokens beyond the model's limit are not counted.
        kind: ``"document"`` or ``"query"``, which may have different limits.

    Returns:
        The number of tokens of each text, or the exception of the tokenizer for that text.
    """
    from tilefold.pipeline.rows import bisect_failures  # it needs torch, which --help does not load

    limit = _token_limit_of_kind(model, kind)

    def count_tokens(batch: list[str]) -> list[int]:
        short_batch = shorten_texts(model, batch)
        if limit is None:
            encoded = model.tokenizer(short_batch)
        else:
            encoded = model.tokenizer(short_batch, truncation=True, max_length=limit)
        return [len(ids) for ids in encoded["input_ids"]]

    counts: list[int | Exception] = []
    for _, outcome in bisect_failures(list(texts), count_tokens):
        if isinstance(outcome, Exception):
            counts.append(outcome)
        else:
            counts += outcome
    return counts


def report_manifest_truncation(kind: str, texts: int, truncated: Mapping[str, int | None]) -> None:
    """Report the truncated texts of a manifest or a result, which a command then shows.

    Args:
        kind: what the texts are, such as ``"document"``.
        texts: number of texts that were encoded.
        truncated: ``count`` and ``max_length`` of the truncated texts; empty if they were not
            counted.
    """
    if truncated:
        report_truncation(
            kind,
            texts,
            Truncation(count=truncated["count"] or 0, max_length=truncated["max_length"]),
        )


def limit_length(model: Model, kind: str, max_length: int | None) -> dict[Model, int | None]:
    """Limit the tokens that a model reads per text of a kind.

    Args:
        model: a model of sentence-transformers, whose modules are changed.
        kind: ``"document"`` or ``"query"``.
        max_length: maximum number of tokens, special tokens included; None changes nothing.

    Returns:
        The previous limit of each module that was changed.

    Raises:
        ValueError: if the model reads fewer tokens, or has no limit for this kind of texts.
    """
    check_least_count("max_length", max_length)
    if max_length is None:
        return {}
    model_limit = getattr(model, "max_seq_length", None)
    if isinstance(model_limit, int) and max_length > model_limit:
        raise ArgumentError(
            "max_length",
            f"expected at most {model_limit}, the tokens that the model reads, got {max_length}.",
        )
    attribute = _length_attribute(kind)
    modules = [module for module in model.modules() if hasattr(module, attribute)]
    if not modules:
        raise ArgumentError(
            "max_length",
            f"expected a model whose tokenizer module has a {attribute}, got "
            f"{type(model).__name__} without one. Set its max_seq_length.",
        )
    previous_limits = {module: getattr(module, attribute) for module in modules}
    for module in modules:
        setattr(module, attribute, max_length)
    return previous_limits


@contextmanager
def limited(model: Model, kind: str, max_length: int | None) -> Iterator[None]:
    """Limit the tokens that a model reads per text of a kind, until the end of the block.

    Args:
        model: a model of sentence-transformers, whose modules are changed.
        kind: ``"document"`` or ``"query"``.
        max_length: maximum number of tokens, special tokens included; None changes nothing.
    """
    previous_limits = limit_length(model, kind, max_length)
    try:
        yield
    finally:
        for module, limit in previous_limits.items():
            setattr(module, _length_attribute(kind), limit)


def _length_attribute(kind: str) -> str:
    """Return the attribute of a tokenizer module with the token limit for a kind of texts."""
    return f"{kind}_length"


def _token_limit_of_kind(model: Model, kind: str) -> int | None:
    """Return the token limit of a model for a kind of texts, or None without a limit.

    A limit for this kind replaces the general limit of the model, as in sentence-transformers.

    Args:
        model: a model of sentence-transformers.
        kind: ``"document"`` or ``"query"``.
    """
    first_module = next(iter(model.children()), None)
    for limit in (
        getattr(first_module, _length_attribute(kind), None),
        getattr(model, "max_seq_length", None),
    ):
        if isinstance(limit, int):
            return limit
    return None


def _token_limit(model: Model) -> int | None:
    """Return the largest token limit of a model for any kind of texts, or None without a limit."""
    limits = [getattr(model, "max_seq_length", None)]
    first_module = next(iter(model.children()), None) if hasattr(model, "children") else None
    for attribute in ("query_length", "document_length"):
        limits.append(getattr(first_module, attribute, None))
    return max((limit for limit in limits if isinstance(limit, int)), default=None)


class _PrefixFinder:
    """Finds prefixes of texts that have the same first tokens.

    Args:
        tokenizer: the tokenizer of the model.
        prompts: texts that the model may put before a text.
        n_tokens: number of first tokens that a prefix must keep.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: set[str], n_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._n_tokens = n_tokens
        self._prefix_tokenizer: PrefixTokenizer | None = None
        if getattr(tokenizer, "backend_tokenizer", None) is not None:
            self._prefix_tokenizer = PrefixTokenizer(tokenizer)

    def find(self, text: str) -> str:
        """Return a prefix of a text with the same first tokens, or the text if there is none."""
        prefix = self._find_anywhere(text)
        return self._find_at_white_space(text) if prefix is None else prefix

    def _find_anywhere(self, text: str) -> str | None:
        """Return a prefix whose first tokens do not depend on the rest of the text.

        The prefix may end within a word. Prefixes of a few lengths are tried. None if the first
        tokens of none of them are certain.
        """
        if self._prefix_tokenizer is None:  # the tokenizer has no fast backend
            return None
        for characters_per_token in _PREFIX_CHARACTERS_PER_TOKEN:
            n_characters = characters_per_token * self._n_tokens
            prefix = text[:n_characters]
            if n_characters >= len(text) or self._has_fixed_tokens(self._prefix_tokenizer, prefix):
                return prefix
        return None

    def _has_fixed_tokens(self, prefix_tokenizer: PrefixTokenizer, prefix: str) -> bool:
        """Return whether the first tokens of a prefix do not depend on the rest of the text.

        They must not depend on it after any of the prompts that the model puts before a text.
        """
        return all(
            prefix_tokenizer.first_tokens(prompt + prefix, self._n_tokens) is not None
            for prompt in self._prompts
        )

    def _find_at_white_space(self, text: str) -> str:
        """Return a prefix that ends before white space and has enough tokens.

        Longer prefixes are tried until one has enough tokens.

        Returns:
            The prefix, or the complete text if no white space follows.
        """
        search_from = _CHARACTERS_PER_TOKEN * self._n_tokens
        while search_from < len(text):
            space = _SPACE.search(text, search_from)
            if space is None:
                return text
            prefix = text[: space.start()]
            encoded = self._tokenizer(
                prefix,
                add_special_tokens=False,
                truncation=True,
                max_length=self._n_tokens,
            )
            if len(encoded["input_ids"]) >= self._n_tokens:
                return prefix
            search_from = _LONGER_PREFIX * space.start()
        return text


class PrefixTokenizer:
    """Finds the first tokens of texts from a prefix, if they do not depend on the rest of the text.

    A fast tokenizer normalises a text, splits it into pieces, and tokenises each piece by itself.
    Pieces that end well before the end of the prefix are complete: they stay the same, whatever
    follows. The next piece is unfinished: the text may continue it, so its last tokens may change.

    The first tokens of an unfinished piece can be found for BPE and Unigram:

    1. If a piece has the tokens ``t1 ... tk``, its beginning up to the end of ``tj`` has the tokens
       ``t1 ... tj``. Neither merges before a token boundary nor the best path to it depend on the
       characters after it.
    2. The longest token of the vocabulary has M characters. The complete piece therefore has a
       token boundary at one of any M consecutive positions.
    3. If the beginnings of the piece up to M consecutive positions all have the same first n
       tokens, one of them ends at a token boundary, so that the complete piece has these tokens.

    A tokenizer may fuse a token with the next one (unknown characters), so one more token must
    follow. WordPiece and WordLevel look up a whole word, so an unfinished word tells nothing.

    Args:
        tokenizer: a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the length of the longest token, and whether unfinished pieces can be tokenised."""
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        # An added token may begin at the end of the prefix.
        added_tokens = tokenizer.get_added_vocab()
        self.n_unstable = max([UNSTABLE_CHARACTERS, *(len(token) for token in added_tokens)])
        vocabulary = self.backend.get_vocab(with_added_tokens=False)
        self.longest_token = max((len(token) for token in vocabulary), default=1)
        algorithm = type(self.backend.model).__name__
        # With a suffix for the end of a word, BPE tokenises a part of a piece as a complete word.
        marks_word_ends = algorithm == "BPE" and self.backend.model.end_of_word_suffix
        self.can_tokenize_unfinished = algorithm in ("BPE", "Unigram") and not marks_word_ends

    def first_tokens(self, prefix: str, count: int) -> list[int] | None:
        """Return the first `count` tokens of every text that begins with `prefix`.

        Args:
            prefix: beginning of a longer text.
            count: number of tokens.

        Returns:
            Token ids, or None if the rest of the text could change them.
        """
        unstable_characters = prefix[-self.n_unstable :]
        n_alphanumeric = sum(character.isalnum() for character in unstable_characters)
        if n_alphanumeric < _MIN_ALPHANUMERIC:
            return None
        tokens = self._tokenize_pieces(prefix, count)
        if tokens is None:
            return None
        # _tokenize_pieces() ignores added tokens, such as [MASK] in a text. If the tokenizer
        # disagrees for this or any other reason, nothing is proved.
        encoded = self.tokenizer(
            prefix,
            add_special_tokens=False,
            truncation=True,
            max_length=count,
        )
        return tokens if list(encoded["input_ids"]) == tokens else None

    def _tokenize_pieces(self, prefix: str, count: int) -> list[int] | None:
        """Tokenise a prefix piece by piece, until the rest of the text could change a piece.

        Args:
            prefix: beginning of a longer text.
            count: number of tokens.

        Returns:
            The first `count` tokens, or None if the rest of the text could change them.
        """
        normalizer = self.backend.normalizer
        normalized = normalizer.normalize_str(prefix) if normalizer else prefix
        pre_tokenizer = self.backend.pre_tokenizer
        pieces = [(normalized, (0, len(normalized)))]
        if pre_tokenizer:
            pieces = pre_tokenizer.pre_tokenize_str(normalized)
        stable_end = len(normalized) - self.n_unstable
        tokens: list[int] = []
        for piece, (_, piece_end) in pieces:
            if len(tokens) > count:  # the token after the last one shows that it is not fused
                break
            if piece_end > stable_end:  # an unfinished piece
                n_missing = max(count - len(tokens), 1)  # at least the token after the last one
                unfinished_tokens = self._tokenize_unfinished_piece(piece, n_missing)
                if unfinished_tokens is None:
                    return None
                tokens += unfinished_tokens
                break
            tokens += self._tokenize_piece(piece)
        return tokens[:count] if len(tokens) >= count else None

    def _tokenize_piece(self, piece: str) -> list[int]:
        """Return the token ids of a piece that is complete."""
        return [token.id for token in self.backend.model.tokenize(piece)]

    def _tokenize_unfinished_piece(self, piece: str, count: int) -> list[int] | None:
        """Return the first `count` tokens of a piece of which only the beginning is known.

        The piece is tokenised up to each of M consecutive positions, for the M characters of the
        longest token. At one of them, the complete piece has a token boundary, so tokens that are
        the same at all of them are its first tokens.

        Args:
            piece: the known beginning of the piece.
            count: number of tokens.

        Returns:
            The tokens, or None if they differ between the positions, or are too few.
        """
        if not self.can_tokenize_unfinished:
            return None
        # A byte-level piece has a character per byte, so a character may be several of them.
        stable_end = len(piece) - _BYTES_PER_CHARACTER * self.n_unstable
        if stable_end <= 2 * self.longest_token:
            return None
        first_tokens: list[int] | None = None
        for end in range(stable_end, stable_end - self.longest_token, -1):
            tokens = self._tokenize_piece(piece[:end])
            if len(tokens) <= count:
                return None
            if first_tokens is not None and tokens[:count] != first_tokens:
                return None
            first_tokens = tokens[:count]
        return first_tokens
