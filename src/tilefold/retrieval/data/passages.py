"""Passages of long documents: where texts are divided, and ids with document and characters."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_count,
    check_instance,
    check_mapping,
)
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.provenance import Provenance, texts_digest
from tilefold.retrieval.data.collection import documents_by_id
from tilefold.retrieval.data.documents import Document, text_of
from tilefold.retrieval.data.scripts import UNSPACED
from tilefold.retrieval.errors import DataError

__all__ = ["Passage", "PassageTexts", "Passages"]

CUTS = ("sentences", "words")
_LONGEST_WORD = 32  # characters; the rest of a longer word counts as another word
_WORD = re.compile(rf"[{UNSPACED}]{{1,2}}|[^\W{UNSPACED}]{{1,{_LONGEST_WORD}}}")
_CLOSING = "\"'\u2019\u201d\u00bb)\\]"
_SENTENCE_END = re.compile(
    rf"[.!?\u2026\u061f\u0964][{_CLOSING}]*\s+|[\u3002\uff01\uff1f][{_CLOSING}\u300d\u300f]*\s*|\n\s*\n\s*",
)
_ID = re.compile(r"(.*)#(\d+):(\d+)-(\d+)", re.DOTALL)


class Passage(NamedTuple):
    """A passage of a document.

    Attributes:
        document: id of the document.
        number: number of the passage in the document, from 1.
        start: first character in the document's text.
        stop: the character after the last one.
    """

    document: str
    number: int
    start: int
    stop: int

    @property
    def id(self) -> str:
        """Id of the passage in vectors and indexes, unique in a collection."""
        return f"{self.document}#{self.number}:{self.start}-{self.stop}"

    @classmethod
    def of(cls, name: str) -> Passage:
        """Parse the id of a passage, such as ``d#1:0-90``.

        Args:
            name: id of the passage: id of the document, ``#``, number of the passage, and the range
                of its characters.

        Raises:
            DataError: if `name` is not a passage id.
        """
        check_instance("name", name, str, "the id of a passage, such as 'd#1:0-90'")
        match = _ID.fullmatch(name)
        if match is None:
            raise DataError(
                f"ids: expected a passage id, such as 'd#1:0-90', got {name!r}. Build the index "
                "again.",
            )
        document, number, start, stop = match.groups()
        return cls(document, int(number), int(start), int(stop))

    def of_document(self, document: Document) -> Document:
        """Return the passage as a document, with the title of the document it is from."""
        return Document(self.id, document.title, document.text[self.start : self.stop])

    def shown(self, document: Document | None) -> Json:
        """Return the passage as a JSON object, with its text if the document is passed."""
        value: Json = {"number": self.number, "start": self.start, "stop": self.stop}
        if document is not None:
            value["text"] = document.text[self.start : self.stop]
        return value


class PassageTexts(dict[str, str]):
    """Passage id -> text, in the order of the documents.

    Attributes:
        provenance: fingerprint of the documents, and how they were divided into passages.
    """

    def __init__(self, texts: Mapping[str, str], provenance: Provenance) -> None:
        check_mapping("texts", texts, "passage id -> text")
        super().__init__(texts)
        self.provenance = provenance


class _Break(NamedTuple):
    """A point of a text at which a passage may begin or end.

    Attributes:
        word: number of the word after the break, from 0. At the end of the text, the number of
            words.
        character: character offset at which a passage that begins at the break starts.
    """

    word: int
    character: int


@dataclass(frozen=True)
class Passages:
    """How texts are divided into passages (Dai and Callan, arXiv 1905.09217).

    All models and BM25 get the same passages. A word is a run of at most 32 letters and digits, or
    two characters of a script without spaces. Passages begin and end at sentence boundaries. A
    sentence of more than `length` words is divided between words.

    Attributes:
        length: maximum number of words per passage, without the title that is put before each
            passage.
        stride: minimum number of words from the beginning of a passage to the beginning of the next
            one. It is smaller if words would otherwise be skipped. The default is `length`: no
            overlap.
        cut: ``"sentences"``, or ``"words"`` for passages of `length` words each.

    Raises:
        ValueError: if a number is below 1, the stride is above the length, or the cut is unknown.

    Examples:
        >>> text = "Block a lost card. A new one comes by post."
        >>> passages = Passages(length=6)
        >>> [text[start:stop] for start, stop in passages.ranges(text)]
        ['Block a lost card.', 'A new one comes by post.']
    """

    length: int
    stride: int | None = None
    cut: Literal["sentences", "words"] = "sentences"

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a length, stride or cut that is out of range."""
        check_count("length", self.length)
        if self.stride is not None:
            check_count("stride", self.stride)
            if self.stride > self.length:
                raise ArgumentError(
                    "stride",
                    f"expected at most the length of a passage ({self.length}), because a larger "
                    f"stride skips words, got {self.stride}.",
                )
        check_choice("cut", self.cut, CUTS)

    def __str__(self) -> str:
        """Return the settings as in manifests and runs, such as ``128/64/sentences``."""
        return f"{self.length}/{self.stride or self.length}/{self.cut}"

    @classmethod
    def parse(cls, text: str) -> Passages:
        """Parse the text form of these settings, such as ``128/64/sentences``.

        This is the inverse of ``str()``.

        Args:
            text: length, stride and cut, separated by slashes.

        Raises:
            DataError: if the text has another form.
        """
        check_instance("text", text, str, "a text such as '128/64/sentences'")
        try:
            length, stride, cut = text.split("/")
            return cls(int(length), int(stride), cut)  # type: ignore[arg-type]
        except ValueError as error:
            raise DataError(
                f"passages: expected a text such as '128/64/sentences', got {text!r} ({error}).",
            ) from error

    def ranges(self, text: str) -> list[tuple[int, int]]:
        """Divide a text into passages.

        A passage ends at the last break (the end of a sentence, or the gap between two words) that
        leaves it at most `length` words. The next passage begins about `stride` words after the
        beginning of this one, at a break.

        Args:
            text: the text.

        Returns:
            First character, and the character after the last one, of each passage. A text without
            words is one passage.
        """
        word_starts = [match.start() for match in _WORD.finditer(text)]
        if not word_starts:
            return [(0, len(text.rstrip()))]
        breaks = self._breaks(text, word_starts)
        break_words = [point.word for point in breaks]  # number of the word after each break
        ranges = []
        begin = 0  # index of the break at which the passage begins
        while True:
            # index of the last break within `length` words of the beginning
            end = bisect_right(break_words, break_words[begin] + self.length) - 1
            start = breaks[begin].character
            stop = breaks[end].character
            ranges.append((start, start + len(text[start:stop].rstrip())))
            if end == len(breaks) - 1:
                return ranges
            begin = self._next_begin(break_words, begin, end)

    def _next_begin(self, break_words: list[int], begin: int, end: int) -> int:
        """Choose the break at which the next passage begins.

        Args:
            break_words: number of the word after each break, ascending.
            begin: index of the break at which this passage begins.
            end: index of the break at which this passage ends; not the last break.

        Returns:
            Index of the break, at most `end`, so that no word is skipped.
        """
        stride = self.stride or self.length
        next_begin = bisect_left(break_words, break_words[begin] + stride, hi=end)
        # Skip breaks from which the next passage would end at the same break as this one.
        while next_begin < end and break_words[end + 1] - break_words[next_begin] > self.length:
            next_begin += 1
        return next_begin

    def _breaks(self, text: str, word_starts: list[int]) -> list[_Break]:
        """Return the points of a text at which passages may begin or end, in order.

        The first one is the beginning of the text, and the last one its end.

        Args:
            text: the text.
            word_starts: character offset of each word.
        """
        text_end = _Break(len(word_starts), len(text))
        if self.cut == "words":
            word_breaks = [_Break(word, start) for word, start in enumerate(word_starts)]
            return [_Break(0, 0), *word_breaks[1:], text_end]
        breaks: list[_Break] = []
        for sentence, next_sentence in pairwise(_sentence_breaks(text, word_starts)):
            breaks.append(sentence)
            if next_sentence.word - sentence.word > self.length:
                # A sentence that is longer than a passage may be divided between any two words.
                for word in range(sentence.word + 1, next_sentence.word):
                    breaks.append(_Break(word, word_starts[word]))
        breaks.append(text_end)
        return breaks

    def of(self, documents: Mapping[str, Document]) -> PassageTexts:
        """Divide documents into passages.

        Args:
            documents: document id -> :class:`Document` or text.

        Returns:
            Passage id -> title and text of the passage.

        Raises:
            DataError: if a document is a page without a text.
        """
        documents = documents_by_id("documents", documents)
        digest = texts_digest(
            {document_id: text_of(document) for document_id, document in documents.items()}
        )
        texts: dict[str, str] = {}
        for document_id, document in documents.items():
            for number, (start, stop) in enumerate(self.ranges(document.text), start=1):
                passage = Passage(document_id, number, start, stop)
                texts[passage.id] = passage.of_document(document).contents
        return PassageTexts(texts, Provenance(texts_sha256=digest, passages=str(self)))


def _sentence_breaks(text: str, word_starts: list[int]) -> list[_Break]:
    """Return the breaks between the sentences of a text, with its beginning and its end.

    Args:
        text: the text.
        word_starts: character offset of each word.
    """
    # First word of a sentence -> character offset of the sentence. Of several sentences without
    # words in between, only the last one remains.
    sentence_starts = {
        bisect_left(word_starts, match.end()): match.end() for match in _SENTENCE_END.finditer(text)
    }
    sentence_starts[0] = 0
    sentence_starts[len(word_starts)] = len(text)
    return [_Break(word, sentence_starts[word]) for word in sorted(sentence_starts)]


def document_of(name: str) -> str:
    """Return the id of the document in the id of a passage.

    Raises:
        DataError: if `name` is not a passage id.
    """
    document, mark, _ = name.rpartition("#")
    if not mark:
        return Passage.of(name).document  # raises an error that shows the form of an id
    return document
