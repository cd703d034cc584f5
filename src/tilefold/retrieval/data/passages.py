"""Passages of long texts: where documents are cut, and ids that name document and characters."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from tilefold._internal.arguments import check_choice, check_count, check_mapping
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.provenance import Provenance, texts_digest
from tilefold.retrieval.data.collection import Document, documents_by_id
from tilefold.retrieval.data.scripts import UNSPACED
from tilefold.retrieval.errors import DataError

__all__ = ["Passage", "PassageTexts", "Passages"]

CUTS = ("sentences", "words")
_LONGEST = 32  # letters of a word; the rest of a longer one is another
_WORD = re.compile(rf"[{UNSPACED}]{{1,2}}|[^\W{UNSPACED}]{{1,{_LONGEST}}}")
_CLOSING = "\"'\u2019\u201d\u00bb)\\]"
_SENTENCE_END = re.compile(
    rf"[.!?\u2026\u061f\u0964][{_CLOSING}]*\s+|[\u3002\uff01\uff1f][{_CLOSING}\u300d\u300f]*\s*|\n\s*\n\s*",
)
_ID = re.compile(r"(.*)#(\d+):(\d+)-(\d+)", re.DOTALL)


class Passage(NamedTuple):
    """Passage of a document: its number from 1, and its characters ``start`` to ``stop`` of the
    document's text.
    """

    document: str
    number: int
    start: int
    stop: int

    @property
    def id(self) -> str:
        """Id under which vectors and indexes of passages hold it; no two passages of a collection
        share one.
        """
        return f"{self.document}#{self.number}:{self.start}-{self.stop}"

    @classmethod
    def of(cls, name: str) -> Passage:
        """The passage of an :attr:`id`; ``DataError`` for another one."""
        if (match := _ID.fullmatch(name)) is None:
            raise DataError(
                f"ids: expected that of a passage, such as 'd#1:0-90', got {name!r}. Make the index again.",
            )
        return cls(match[1], *map(int, match.groups()[1:]))

    def of_document(self, document: Document) -> Document:
        """Title of its document and the passage, whose contents are the input of every encoder and
        of BM25.
        """
        return Document(self.id, document.title, document.text[self.start : self.stop])

    def shown(self, document: Document | None) -> Json:
        """JSON object for a result, with the text where the document is known."""
        place = {"number": self.number, "start": self.start, "stop": self.stop}
        return place | ({} if document is None else {"text": document.text[self.start : self.stop]})


class PassageTexts(dict[str, str]):
    """Passage id -> text, in the order of the documents; `provenance` names the documents and the
    cut.
    """

    def __init__(self, texts: Mapping[str, str], provenance: Provenance) -> None:
        check_mapping("texts", texts, "passage id -> text")
        super().__init__(texts)
        self.provenance = provenance


@dataclass(frozen=True)
class Passages:
    """Where texts are cut into passages (Dai and Callan, arXiv 1905.09217), alike for every model
    and for BM25.

    A word is a run of letters and digits, at most 32 of them, or two characters of a script without
    spaces. Passages begin and end with sentences; a sentence of more than `length` words is cut
    between words.

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
        check_count("length", self.length)
        if self.stride is not None:
            check_count("stride", self.stride)
            if self.stride > self.length:
                lost = f"above which words between two passages would be lost, got {self.stride}"
                raise ValueError(
                    f"stride: expected at most the length of a passage ({self.length}), {lost}.",
                )
        check_choice("cut", self.cut, CUTS)

    def __str__(self) -> str:
        """Word by which manifests and runs know it."""
        return f"{self.length}/{self.stride or self.length}/{self.cut}"

    @classmethod
    def parse(cls, text: str) -> Passages:
        """The cut that a manifest names; the inverse of ``str()``, ``DataError`` for another text."""
        try:
            length, stride, cut = text.split("/")
            return cls(int(length), int(stride), cut)  # type: ignore[arg-type]
        except ValueError as error:
            raise DataError(
                f"passages: expected such as '128/64/sentences', got {text!r} ({error}).",
            ) from error

    def ranges(self, text: str) -> list[tuple[int, int]]:
        """First and last character (exclusive) of each passage of a text; one passage of a text
        without words.
        """
        starts = [match.start() for match in _WORD.finditer(text)]
        count, stride = len(starts), self.stride or self.length
        if not starts:
            return [(0, len(text.rstrip()))]
        begins = dict(enumerate(starts)) | {
            0: 0,
            count: len(text),
        }  # word -> character at which a passage may begin
        if self.cut == "sentences":
            ends = [match.end() for match in _SENTENCE_END.finditer(text)]
            sentences = {bisect_left(starts, end): end for end in ends} | {0: 0, count: len(text)}
            long = (range(a, b) for a, b in pairwise(sorted(sentences)) if b - a > self.length)
            begins = {word: starts[word] for words in long for word in words} | sentences
        breaks = sorted(begins)
        found, at = [], 0
        while True:
            end = (
                bisect_right(breaks, breaks[at] + self.length) - 1
            )  # the last break that the passage reaches
            low, high = begins[breaks[at]], begins[breaks[end]]
            found.append((low, low + len(text[low:high].rstrip())))
            if breaks[end] >= count:
                return found
            at = bisect_left(breaks, breaks[at] + stride, hi=end)
            while (
                at < end and breaks[end + 1] - breaks[at] > self.length
            ):  # it would hold no word that this one lacks
                at += 1

    def of(self, documents: Mapping[str, Document]) -> PassageTexts:
        """Passage id -> title and passage, of all documents."""
        documents = documents_by_id("documents", documents)
        texts: dict[str, str] = {}
        for name, document in documents.items():
            for number, (start, stop) in enumerate(self.ranges(document.text), start=1):
                passage = Passage(name, number, start, stop)
                texts[passage.id] = passage.of_document(document).contents
        digest = texts_digest({name: document.contents for name, document in documents.items()})
        return PassageTexts(texts, Provenance(texts_sha256=digest, passages=str(self)))


def document_of(name: str) -> str:
    """The document of a passage's id; ``DataError`` for another id."""
    document, mark, _ = name.rpartition("#")
    return document if mark else Passage.of(name).document
