"""The tokens that a text begins with, whatever follows it: how much of an enormous text must be read.

A fast tokenizer normalises a text, splits it into pieces, and gives each piece tokens of its own. Pieces that end well
before the end of a text stay as they are when the text goes on, because normalisers and splitters look only a few
characters ahead. The last piece is open: more text makes it longer, and its last tokens may change.

For BPE and Unigram, if ``t1 ... tk`` are the tokens of a piece, then ``t1 ... tj`` are those of the characters that
they stand for, for each j: merges to the left of a boundary that no merge crosses do not depend on what is right of it,
and the best path to a boundary does not depend on what follows. No token is longer than the longest of the vocabulary,
M characters, so that the tokens of the whole piece have a boundary among any M positions in a row. If all M beginnings
that end there agree on their first n tokens, the whole piece begins with those n. Tokens that a tokenizer fuses
(unknown characters) are closed by the next one, which is therefore asked for.

For WordPiece and WordLevel, whose words are known or unknown as a whole, nothing is said of an open piece.
"""

from __future__ import annotations

from typing import Any

MARGIN = 64  # characters at the end of a text that normalisers and splitters may treat differently when it goes on
_PLAIN = 8  # of them at least are letters or digits, so that no cluster of combining characters fills the margin
_BYTES = 4  # of a character, each of them a character of a byte-level piece


class Beginnings:
    """What a tokenizer's first tokens are, as far as a beginning of a text decides them.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        added = map(len, tokenizer.get_added_vocab())
        self.margin = max([MARGIN, *added])
        self.longest = max(map(len, self.backend.get_vocab(with_added_tokens=False)), default=1)
        kind = type(self.backend.model).__name__
        self.open = kind == "Unigram" or (kind == "BPE" and not self.backend.model.end_of_word_suffix)

    def first(self, text: str, count: int) -> list[int] | None:
        """The first `count` tokens of every text that begins with `text`; None if they cannot be told from it."""
        if sum(map(str.isalnum, text[-self.margin :])) < _PLAIN:
            return None
        found = self._of_pieces(text, count)
        if found is None:
            return None
        settings = {"add_special_tokens": False, "truncation": True, "max_length": count}
        return found if list(self.tokenizer(text, **settings)["input_ids"]) == found else None  # no added tokens

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
        end = len(piece) - _BYTES * self.margin
        if end <= 2 * self.longest:
            return None
        agreed: list[int] | None = None
        for stop in range(end, end - self.longest, -1):
            ids = [token.id for token in self.backend.model.tokenize(piece[:stop])]
            if len(ids) <= count or (agreed is not None and ids[:count] != agreed):
                return None
            agreed = ids[:count]
        return agreed
