"""Cut texts to what a model reads of them, before they are tokenized; and who is told how many a
tokenizer cut.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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

_CHARACTERS_PER_TOKEN = (
    16  # of the first attempt at white space; shorter texts than twice that are left alone
)
_BEGINNINGS = (8, 32, 128, 512)  # characters per token of the attempts anywhere
_SPACE = re.compile(r"\s")
MARGIN = 64  # characters at the end of a text that normalisers and splitters may treat differently when it goes on
_PLAIN = 8  # of them at least are letters or digits, so that no cluster of combining characters fills the margin
_BYTES = 4  # of a character, each of them a character of a byte-level piece


def cut_texts(model: Model, texts: Sequence[str]) -> list[str]:
    """`texts`, of which enormous ones lose the end that `model` would tokenize only to truncate it.

    A text is cut where its beginning is shown to have the first tokens of the whole, as many as the
    model reads (:class:`Beginnings`). Where that cannot be shown (a tokenizer without a fast
    backend, one word that never ends, special tokens in the text), it is cut at white space, where
    tokenizers begin a new word, if there is some. Texts of models that truncate on the left or not
    at all are left whole.
    """
    return text_cutter(model)(texts)


def text_cutter(model: Model, *, beside: bool = False) -> Callable[[Sequence[str]], list[str]]:
    """:func:`cut_texts` of `model` as it is now, for many calls; `beside` a thread that tokenizes,
    by a copy.
    """
    limit = _limit(model)
    tokenizer = getattr(model, "tokenizer", None)
    if (
        limit is None
        or not callable(tokenizer)
        or getattr(tokenizer, "truncation_side", None) != "right"
    ):
        return list
    longest, most = (
        2 * _CHARACTERS_PER_TOKEN * limit,
        limit + 1,
    )  # so that the tokenizer sees that there is more
    prompts = {"", *(getattr(model, "prompts", None) or {}).values()}

    @functools.cache
    def tools() -> tuple[Tokenizer, Beginnings | None]:
        own = copy.deepcopy(tokenizer) if beside else tokenizer
        return own, None if getattr(own, "backend_tokenizer", None) is None else Beginnings(own)

    def cut(texts: Sequence[str]) -> list[str]:
        with ignoring_truncation():
            return [
                text if len(text) <= longest else _cut(*tools(), prompts, text, most)
                for text in texts
            ]

    return cut


def token_counts(model: Model, texts: Sequence[str]) -> list[int | Exception]:
    """Count the tokens a model reads of each text; for a text that its tokenizer refuses, the
    tokenizer's exception.
    """
    limit = getattr(model, "max_seq_length", None)
    cut = {"truncation": True, "max_length": limit} if isinstance(limit, int) else {}

    def counts(part: list[str]) -> list[int]:
        return [len(ids) for ids in model.tokenizer(cut_texts(model, part), **cut)["input_ids"]]

    from tilefold.pipeline.rows import bisect_failures  # it needs torch, which --help does not load

    found: list[int | Exception] = []
    for _, outcome in bisect_failures(list(texts), counts):
        found += [outcome] if isinstance(outcome, Exception) else outcome
    return found


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
    """Let a model read at most `max_length` tokens of a text of `kind`, special ones too; its
    modules' limits before.

    More tokens than the model reads, or a model without a limit for a kind of texts, is a
    ``ValueError``.
    """
    if max_length is None:
        return {}
    own, name = getattr(model, "max_seq_length", None), f"{kind}_length"
    if isinstance(own, int) and max_length > own:
        raise ValueError(
            f"max_length: expected at most {own}, the tokens that the model reads, got {max_length}.",
        )
    if not (modules := [module for module in model.modules() if hasattr(module, name)]):
        of = f"a model whose tokenizer takes a length for a {kind}, got {type(model).__name__} without one"
        raise ValueError(f"max_length: expected {of}. Set its max_seq_length.")
    before = {module: getattr(module, name) for module in modules}
    for module in modules:
        setattr(module, name, max_length)
    return before


@contextmanager
def limited(
    model: Model,
    kind: str,
    max_length: int | None,
    *,
    before: Callable[[], object],
) -> Iterator[None]:
    """Within it, the model is that of :func:`limit_length`; `before` is called while it still has
    its own limits.
    """
    if max_length is not None:
        before()
    former = limit_length(model, kind, max_length)
    try:
        yield
    finally:
        for module, length in former.items():
            setattr(module, f"{kind}_length", length)


def _limit(model: Model) -> int | None:
    """The most tokens that the model reads of any text."""
    first = next(iter(model.children()), None) if hasattr(model, "children") else None
    limits = [getattr(model, "max_seq_length", None)]
    limits += [getattr(first, name, None) for name in ("query_length", "document_length")]
    known = [limit for limit in limits if isinstance(limit, int)]
    return max(known) if known else None


def _cut(
    tokenizer: Tokenizer,
    beginnings: Beginnings | None,
    prompts: set[str],
    text: str,
    limit: int,
) -> str:
    if beginnings is not None:
        for size in (limit * characters for characters in _BEGINNINGS):
            start = text[:size]
            if size >= len(text) or all(
                beginnings.first(prompt + start, limit) is not None for prompt in prompts
            ):
                return start
    size = _CHARACTERS_PER_TOKEN * limit
    while size < len(text):
        if (space := _SPACE.search(text, size)) is None:
            return text
        start = text[: space.start()]
        tokens = tokenizer(start, add_special_tokens=False, truncation=True, max_length=limit)[
            "input_ids"
        ]
        if len(tokens) >= limit:
            return start
        size = 4 * space.start()
    return text


class Beginnings:
    """The tokens that a text begins with, whatever follows it.

    A fast tokenizer normalises a text, splits it into pieces, and gives each piece tokens of its
    own. Pieces that end well before the end of a text stay as they are when it goes on. The last
    one is open: its last tokens may change.

    For BPE and Unigram, if ``t1 ... tk`` are the tokens of a piece, then ``t1 ... tj`` are those of
    their characters, for each j: neither merges left of a boundary nor the best path to it depend
    on what follows. No token is longer than the longest of the vocabulary, M characters, so that
    the whole piece has a boundary among any M positions in a row. If all M beginnings that end
    there agree on their first n tokens, the whole piece begins with those n. Tokens that a
    tokenizer fuses (unknown characters) are closed by the next one, which is therefore asked for.
    Of an open piece of WordPiece and WordLevel, whose words are known or unknown as a whole,
    nothing is said.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.margin = max([MARGIN, *map(len, tokenizer.get_added_vocab())])
        self.longest = max(map(len, self.backend.get_vocab(with_added_tokens=False)), default=1)
        kind = type(self.backend.model).__name__
        self.open = kind == "Unigram" or (
            kind == "BPE" and not self.backend.model.end_of_word_suffix
        )

    def first(self, text: str, count: int) -> list[int] | None:
        """The first `count` tokens of every text that begins with `text`; None if they cannot be
        told from it.
        """
        if (
            sum(map(str.isalnum, text[-self.margin :])) < _PLAIN
            or (found := self._of_pieces(text, count)) is None
        ):
            return None
        settings = {"add_special_tokens": False, "truncation": True, "max_length": count}
        return (
            found if list(self.tokenizer(text, **settings)["input_ids"]) == found else None
        )  # no added tokens

    def _of_pieces(self, text: str, count: int) -> list[int] | None:
        backend = self.backend
        normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
        whole = [(normal, (0, len(normal)))]
        pieces = backend.pre_tokenizer.pre_tokenize_str(normal) if backend.pre_tokenizer else whole
        found: list[int] = []
        for piece, (_, end) in pieces:
            if len(found) > count:  # one more, with which the last could not be fused any more
                break
            if end > len(normal) - self.margin:
                rest = self._of_open(piece, max(count - len(found), 1)) if self.open else None
                if rest is None:
                    return None
                found += rest
                break
            found += [token.id for token in backend.model.tokenize(piece)]
        return found[:count] if len(found) >= count else None

    def _of_open(self, piece: str, count: int) -> list[int] | None:
        """The first `count` tokens of every piece that begins with `piece` but for its margin."""
        if (end := len(piece) - _BYTES * self.margin) <= 2 * self.longest:
            return None
        agreed: list[int] | None = None
        for stop in range(end, end - self.longest, -1):
            ids = [token.id for token in self.backend.model.tokenize(piece[:stop])]
            if len(ids) <= count or (agreed is not None and ids[:count] != agreed):
                return None
            agreed = ids[:count]
        return agreed
