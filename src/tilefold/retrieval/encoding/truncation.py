"""Truncation of texts: cutting over-long texts before tokenisation, limits, and reported counts."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    "TokenizerCall",
    "counting_truncation",
    "cut_texts",
    "limit_length",
    "limited",
    "report_manifest_truncation",
    "tally_truncation",
    "text_cutter",
    "token_counts",
]

# Characters per token at which a cut at white space is tried first. Texts up to twice that are not
# cut.
_CHARACTERS_PER_TOKEN = 16
_CHARACTERS_PER_TOKEN_ANYWHERE = (8, 32, 128, 512)  # at which cuts anywhere are tried
_SPACE = re.compile(r"\s")
# Characters at the end of a text that normalisers and splitters may treat differently when the text
# goes on.
MARGIN = 64
# Letters and digits in the margin, at least, so that it is more than one cluster of combining
# characters.
_MIN_PLAIN_IN_MARGIN = 8
_BYTES_PER_CHARACTER = 4  # at most; a byte is a character of a byte-level piece


def cut_texts(model: Model, texts: Sequence[str]) -> list[str]:
    """Cut texts that are much longer than the model reads, before they are tokenised.

    A text is cut where its beginning provably has the same first tokens as the complete text, as
    many as the model reads (:class:`Beginnings`). Where that cannot be proved (a tokenizer without
    a fast backend, one word that never ends, special tokens in the text), it is cut at white space,
    where tokenizers begin a new word, if there is some. Texts are not cut for models that truncate
    on the left or not at all.
    """
    return text_cutter(model)(texts)


def text_cutter(
    model: Model, *, copy_tokenizer: bool = False
) -> Callable[[Sequence[str]], list[str]]:
    """Return :func:`cut_texts` with the present limits of `model`, for many calls.

    Args:
        model: a model of sentence-transformers.
        copy_tokenizer: whether to use a copy of the tokenizer, because another thread tokenises at
            the same time.
    """
    limit = _token_limit(model)
    tokenizer = getattr(model, "tokenizer", None)
    truncates_right = getattr(tokenizer, "truncation_side", None) == "right"
    if limit is None or not callable(tokenizer) or not truncates_right:
        return list
    max_characters = 2 * _CHARACTERS_PER_TOKEN * limit
    prompts = {"", *(getattr(model, "prompts", None) or {}).values()}

    @functools.cache
    def create_cutter() -> _TextCutter:
        """Create the cutter when the first long text comes, because it reads the vocabulary."""
        # One token more than the limit, so that the tokenizer sees that the text was longer.
        return _TextCutter(
            copy.deepcopy(tokenizer) if copy_tokenizer else tokenizer, prompts, limit + 1
        )

    def cut(texts: Sequence[str]) -> list[str]:
        """Cut long texts, and leave the others."""
        with ignoring_truncation():
            return [
                text if len(text) <= max_characters else create_cutter().cut(text) for text in texts
            ]

    return cut


def token_counts(model: Model, texts: Sequence[str]) -> list[int | Exception]:
    """Count the tokens that a model reads of each text.

    Args:
        model: a model of sentence-transformers.
        texts: texts to count tokens of. Tokens beyond the model's limit are not counted.

    Returns:
        The number of tokens of each text, or the exception of the tokenizer for that text.
    """
    from tilefold.pipeline.rows import bisect_failures  # it needs torch, which --help does not load

    limit = getattr(model, "max_seq_length", None)

    def count_tokens(batch: list[str]) -> list[int]:
        cut_batch = cut_texts(model, batch)
        if isinstance(limit, int):
            encoded = model.tokenizer(cut_batch, truncation=True, max_length=limit)
        else:
            encoded = model.tokenizer(cut_batch)
        return [len(ids) for ids in encoded["input_ids"]]

    counts: list[int | Exception] = []
    for _, outcome in bisect_failures(list(texts), count_tokens):
        if isinstance(outcome, Exception):
            counts.append(outcome)
        else:
            counts += outcome
    return counts


def report_manifest_truncation(kind: str, texts: int, truncated: Mapping[str, int | None]) -> None:
    """Add the truncation counts of a manifest or a result to every active tally.

    Args:
        kind: what the texts are, such as ``"document"``.
        texts: number of texts that were encoded.
        truncated: ``count`` and ``max_length`` of the truncated texts; empty if there are none.
    """
    if truncated:
        report_truncation(
            kind,
            texts,
            Truncation(count=truncated["count"] or 0, max_length=truncated["max_length"]),
        )


def limit_length(model: Model, kind: str, max_length: int | None) -> dict[Model, int | None]:
    """Let a model read at most `max_length` tokens per text of a kind.

    Args:
        model: a model of sentence-transformers, whose modules are changed.
        kind: ``"document"`` or ``"query"``.
        max_length: number of tokens, special tokens included; None changes nothing.

    Returns:
        The limits before, by module.

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
    attribute = f"{kind}_length"
    modules = [module for module in model.modules() if hasattr(module, attribute)]
    if not modules:
        raise ArgumentError(
            "max_length",
            f"expected a model whose tokenizer takes a length for a {kind}, got "
            f"{type(model).__name__} without one. Set its max_seq_length.",
        )
    former_limits = {module: getattr(module, attribute) for module in modules}
    for module in modules:
        setattr(module, attribute, max_length)
    return former_limits


@contextmanager
def limited(
    model: Model,
    kind: str,
    max_length: int | None,
    *,
    before: Callable[[], object],
) -> Iterator[None]:
    """Limit the tokens that a model reads within the block.

    Args:
        model, kind, max_length: as for :func:`limit_length`.
        before: called while the model still has its own limits, if they are changed.
    """
    if max_length is not None:
        before()
    former_limits = limit_length(model, kind, max_length)
    try:
        yield
    finally:
        for module, limit in former_limits.items():
            setattr(module, f"{kind}_length", limit)


def _token_limit(model: Model) -> int | None:
    """Return the largest number of tokens that the model reads of a text of any kind."""
    limits = [getattr(model, "max_seq_length", None)]
    first_module = next(iter(model.children()), None) if hasattr(model, "children") else None
    for attribute in ("query_length", "document_length"):
        limits.append(getattr(first_module, attribute, None))
    return max((limit for limit in limits if isinstance(limit, int)), default=None)


class _TextCutter:
    """Cuts texts that are much longer than a token limit.

    Args:
        tokenizer: the tokenizer of the model.
        prompts: texts that the model may put before a text.
        limit: number of leading tokens that a cut must preserve.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: set[str], limit: int) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._limit = limit
        self._beginnings: Beginnings | None = None
        if getattr(tokenizer, "backend_tokenizer", None) is not None:
            self._beginnings = Beginnings(tokenizer)

    def cut(self, text: str) -> str:
        """Return a beginning of `text` with the same first tokens, or `text` without one."""
        beginning = self._cut_anywhere(text)
        return self._cut_at_white_space(text) if beginning is None else beginning

    def _cut_anywhere(self, text: str) -> str | None:
        """Return a beginning whose first tokens do not depend on what follows it."""
        if self._beginnings is None:
            return None
        for characters_per_token in _CHARACTERS_PER_TOKEN_ANYWHERE:
            size = characters_per_token * self._limit
            beginning = text[:size]
            if size >= len(text) or self._has_fixed_tokens(self._beginnings, beginning):
                return beginning
        return None

    def _has_fixed_tokens(self, beginnings: Beginnings, text: str) -> bool:
        """Return whether the first tokens of `text` are fixed, with each prompt before it."""
        return all(
            beginnings.first(prompt + text, self._limit) is not None for prompt in self._prompts
        )

    def _cut_at_white_space(self, text: str) -> str:
        """Return a beginning that ends before white space and has enough tokens.

        Longer beginnings are tried until one has as many tokens as the limit.

        Returns:
            The beginning, or the complete text if no white space follows or it is too short.
        """
        size = _CHARACTERS_PER_TOKEN * self._limit
        while size < len(text):
            space = _SPACE.search(text, size)
            if space is None:
                return text
            beginning = text[: space.start()]
            encoded = self._tokenizer(
                beginning,
                add_special_tokens=False,
                truncation=True,
                max_length=self._limit,
            )
            if len(encoded["input_ids"]) >= self._limit:
                return beginning
            size = 4 * space.start()
        return text


class Beginnings:
    """The tokens that a text begins with, whatever follows it.

    A fast tokenizer normalises a text, splits it into pieces, and tokenises each piece by itself.
    Pieces that end well before the end of a text stay the same when the text goes on. The last
    piece is open: its last tokens may change.

    For BPE and Unigram, if ``t1 ... tk`` are the tokens of a piece, then ``t1 ... tj`` are the
    tokens of their characters, for each j: neither merges left of a boundary nor the best path to
    it depend on the characters after it. No token is longer than the longest of the vocabulary, M
    characters, so that the complete piece has a boundary among any M consecutive positions. If all
    M beginnings that end there agree on their first n tokens, the complete piece begins with these
    n tokens. Tokens that a tokenizer fuses (unknown characters) are closed by the next token, which
    is therefore required. WordPiece and WordLevel know a word or do not, as a unit, so that nothing
    is known of their open piece.

    Args:
        tokenizer: a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read from a tokenizer how long its tokens are, and whether open pieces can be read."""
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        added_tokens = tokenizer.get_added_vocab()
        self.margin = max([MARGIN, *(len(token) for token in added_tokens)])
        vocabulary = self.backend.get_vocab(with_added_tokens=False)
        self.longest_token = max((len(token) for token in vocabulary), default=1)
        algorithm = type(self.backend.model).__name__
        self.reads_open_pieces = algorithm == "Unigram" or (
            algorithm == "BPE" and not self.backend.model.end_of_word_suffix
        )

    def first(self, text: str, count: int) -> list[int] | None:
        """Return the first `count` tokens of every text that begins with `text`.

        Args:
            text: beginning of a longer text.
            count: number of tokens.

        Returns:
            Token ids, or None if they depend on how the text goes on.
        """
        n_plain = sum(character.isalnum() for character in text[-self.margin :])
        if n_plain < _MIN_PLAIN_IN_MARGIN:
            return None
        tokens = self._tokens_of_pieces(text, count)
        if tokens is None:
            return None
        # Added tokens, such as [MASK] in a text, are not respected by the pieces above. With them,
        # the tokenizer's own result differs, and nothing is known.
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            truncation=True,
            max_length=count,
        )
        return tokens if list(encoded["input_ids"]) == tokens else None

    def _tokens_of_pieces(self, text: str, count: int) -> list[int] | None:
        """Tokenise a text piece by piece, as far as its pieces do not depend on what follows.

        Args:
            text: beginning of a longer text.
            count: number of tokens.

        Returns:
            The first `count` tokens, or None if any of them may change when the text goes on.
        """
        normalizer = self.backend.normalizer
        normalized = normalizer.normalize_str(text) if normalizer else text
        pre_tokenizer = self.backend.pre_tokenizer
        pieces = [(normalized, (0, len(normalized)))]
        if pre_tokenizer:
            pieces = pre_tokenizer.pre_tokenize_str(normalized)
        tokens: list[int] = []
        for piece, (_, end) in pieces:
            if len(tokens) > count:  # one token more, after which the last one cannot change
                break
            # A piece that ends in the margin may change when the text goes on.
            if end > len(normalized) - self.margin:
                if not self.reads_open_pieces:
                    return None
                open_tokens = self._tokens_of_open_piece(piece, max(count - len(tokens), 1))
                if open_tokens is None:
                    return None
                tokens += open_tokens
                break
            tokens += [token.id for token in self.backend.model.tokenize(piece)]
        return tokens[:count] if len(tokens) >= count else None

    def _tokens_of_open_piece(self, piece: str, count: int) -> list[int] | None:
        """Return the first `count` tokens of every piece that begins like `piece`.

        The complete piece has the boundary of a token at one of as many consecutive positions as
        the longest token has characters. If the piece has the same first tokens when it is cut at
        any of these positions, the complete piece has them too.

        Args:
            piece: last piece of a text. The margin at its end is not used, because it may change.
            count: number of tokens.

        Returns:
            The tokens, or None if the beginnings differ or are too short.
        """
        end = len(piece) - _BYTES_PER_CHARACTER * self.margin
        if end <= 2 * self.longest_token:
            return None
        agreed: list[int] | None = None
        for stop in range(end, end - self.longest_token, -1):
            tokens = [token.id for token in self.backend.model.tokenize(piece[:stop])]
            if len(tokens) <= count:
                return None
            if agreed is not None and tokens[:count] != agreed:
                return None
            agreed = tokens[:count]
        return agreed
