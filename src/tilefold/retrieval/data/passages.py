"""Passages of long documents: where texts are cut, and ids that name document and characters."""

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
from tilefold.retrieval.data.collection import Document, documents_by_id
from tilefold.retrieval.data.scripts import UNSPACED
from tilefold.retrieval.errors import DataError

__all__ = ["Passage", "PassageTexts", "Passages"]

CUTS = ("sentences", "words")
_LONGEST_WORD = 32  # characters; the rest of a longer word is another word
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
            name: id of the document, ``#``, number of the passage, and the range of its characters.

        Raises:
            DataError: for an id that is not of a passage.
        """
        check_instance("name", name, str, "the id of a passage, such as 'd#1:0-90'")
        match = _ID.fullmatch(name)
        if match is None:
            raise DataError(
                f"ids: expected that of a passage, such as 'd#1:0-90', got {name!r}. Make the "
                "index again.",
            )
        document, number, start, stop = match.groups()
        return cls(document, int(number), int(start), int(stop))

    def of_document(self, document: Document) -> Document:
        """Return the passage as a document with the title of its document."""
        return Document(self.id, document.title, document.text[self.start : self.stop])

    def shown(self, document: Document | None) -> Json:
        """Return a JSON object for a result, with the text where the document is known."""
        value: Json = {"number": self.number, "start": self.start, "stop": self.stop}
        if document is not None:
            value["text"] = document.text[self.start : self.stop]
        return value


class PassageTexts(dict[str, str]):
    """Passage id -> text, in the order of the documents.

    Attributes:
        provenance: fingerprint of the documents, and how they were cut.
    """

    def __init__(self, texts: Mapping[str, str], provenance: Provenance) -> None:
        check_mapping("texts", texts, "passage id -> text")
        super().__init__(texts)
        self.provenance = provenance


@dataclass(frozen=True)
class Passages:
    """How texts are cut into passages (Dai and Callan, arXiv 1905.09217).

    All models and BM25 get the same passages. A word is a run of letters and digits, at most 32 of
    them, or two characters of a script without spaces. Passages begin and end with sentences. A
    sentence of more than `length` words is cut between words.

    Attributes:
        length: the most words of a passage, without the title, which is put before each.
        stride: words from the beginning of a passage to that of the next, at least, as far as
            passages leave no gap; by default `length`, without overlap.
        cut: ``"sentences"``, or ``"words"`` for passages of `length` words each.

    A number below 1, a stride above the length, or another cut is a ``ValueError``.
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
                lost = f"above which words between two passages would be lost, got {self.stride}"
                raise ArgumentError(
                    "stride",
                    f"expected at most the length of a passage ({self.length}), {lost}.",
                )
        check_choice("cut", self.cut, CUTS)

    def __str__(self) -> str:
        """Return the name of the cut in manifests and runs, such as ``128/64/sentences``."""
        return f"{self.length}/{self.stride or self.length}/{self.cut}"

    @classmethod
    def parse(cls, text: str) -> Passages:
        """Parse the text form of these options, such as ``128/64/sentences``.

        It is the inverse of ``str()``.

        Args:
            text: length, stride and cut, with slashes between them.

        Raises:
            DataError: for another text.
        """
        check_instance("text", text, str, "a text such as '128/64/sentences'")
        try:
            length, stride, cut = text.split("/")
            return cls(int(length), int(stride), cut)  # type: ignore[arg-type]
        except ValueError as error:
            raise DataError(
                f"passages: expected such as '128/64/sentences', got {text!r} ({error}).",
            ) from error

    def ranges(self, text: str) -> list[tuple[int, int]]:
        """Cut a text into passages.

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
        n_words = len(word_starts)
        stride = self.stride or self.length
        characters = self._break_characters(text, word_starts)
        # Breaks are numbers of words: a passage may begin with such a word, or end before it.
        breaks = sorted(characters)
        ranges = []
        begin = 0  # position in `breaks` of the break at which the passage begins
        while True:
            # Position in `breaks` of the last break within `length` words of the first word.
            end = bisect_right(breaks, breaks[begin] + self.length) - 1
            start = characters[breaks[begin]]
            stop = characters[breaks[end]]
            ranges.append((start, start + len(text[start:stop].rstrip())))
            if breaks[end] >= n_words:
                return ranges
            # The next passage begins `stride` words later, at the end of this one at the latest.
            begin = bisect_left(breaks, breaks[begin] + stride, hi=end)
            # It is moved on while it would end where this one ends, because it would add no word.
            while begin < end and breaks[end + 1] - breaks[begin] > self.length:
                begin += 1

    def _break_characters(self, text: str, word_starts: list[int]) -> dict[int, int]:
        """Find the words at which passages may begin and end.

        Args:
            text: the text.
            word_starts: first character of each word ``[n_words]``.

        Returns:
            Number of a word, from 0 -> character at which a passage that begins with the word
            starts. The key ``n_words`` maps to the end of the text.
        """
        n_words = len(word_starts)
        text_ends = {0: 0, n_words: len(text)}
        if self.cut == "words":
            return {**dict(enumerate(word_starts)), **text_ends}
        sentence_ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        # First word of each sentence -> character at which the sentence starts.
        sentences = {bisect_left(word_starts, end): end for end in sentence_ends}
        sentences.update(text_ends)
        characters = {}
        for first_word, end_word in pairwise(sorted(sentences)):
            if end_word - first_word > self.length:  # a long sentence is cut between words
                for word in range(first_word, end_word):
                    characters[word] = word_starts[word]
        characters.update(sentences)
        return characters

    def of(self, documents: Mapping[str, Document]) -> PassageTexts:
        """Cut all documents, and return passage id -> title and text of the passage."""
        documents = documents_by_id("documents", documents)
        texts: dict[str, str] = {}
        for name, document in documents.items():
            for number, (start, stop) in enumerate(self.ranges(document.text), start=1):
                passage = Passage(name, number, start, stop)
                texts[passage.id] = passage.of_document(document).contents
        digest = texts_digest({name: document.contents for name, document in documents.items()})
        return PassageTexts(texts, Provenance(texts_sha256=digest, passages=str(self)))


def document_of(name: str) -> str:
    """Return the document in a passage's id.

    Raises ``DataError`` for an id that is not of a passage.
    """
    document, mark, _ = name.rpartition("#")
    return document if mark else Passage.of(name).document
