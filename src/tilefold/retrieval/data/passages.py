"""Passages of long texts: where they are cut, which document they belong to, and documents by their
best passage.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from tilefold._internal.arguments import check_instance, check_mapping
from tilefold.retrieval.common.checks import check_choice, check_count
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.provenance import Provenance, texts_digest
from tilefold.retrieval.data.collection import Collection, Document, documents_by_id
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.bm25 import UNSPACED, BM25Index
from tilefold.retrieval.search.fusion import Run

__all__ = ["Found", "Passage", "PassageTexts", "Passages", "best_passages"]

CUTS = ("sentences", "words")
_LONGEST = 32  # letters of a word; the rest of a longer one is another
_WORD = re.compile(rf"[{UNSPACED}]{{1,2}}|[^\W{UNSPACED}]{{1,{_LONGEST}}}")
_CLOSING = "\"'\u2019\u201d\u00bb)\\]"
_SENTENCE_END = re.compile(
    rf"[.!?\u2026\u061f\u0964][{_CLOSING}]*\s+|[\u3002\uff01\uff1f][{_CLOSING}\u300d\u300f]*\s*|\n\s*\n\s*",
)
_ID = re.compile(r"(.*)#(\d+):(\d+)-(\d+)", re.DOTALL)
_FIRST, _MORE = (
    4,
    4,
)  # passages asked for per document that is wanted, and how many times as many the next time

Found = dict[str, dict[str, str]]  # query id -> document id -> id of its best passage


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

    def training(self, collection: Collection) -> Collection:
        """The collection with passages as documents, for training: relevant is the passage that
        BM25 scores highest.

        Of passages of a relevant document with equal scores, none shared word among them, the first
        is taken; grades stay, and of what was judged not relevant no passage is judged.
        """
        check_instance("collection", collection, Collection, "load_collection(path)")
        texts = self.of(collection.documents)
        words = BM25Index.build(texts)
        stored, asked = words.document_vectors(), words.query_vectors(collection.queries)
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(stored.ids):
            rows.setdefault(document_of(name), []).append(row)
        weights = np.zeros(stored.vocab_size)

        def best(query: str, document: str) -> str:
            terms, values = asked.row(asked.row_of[query])
            weights[terms] = values
            scores = [
                float(weights[terms_] @ parts) for terms_, parts in map(stored.row, rows[document])
            ]
            weights[terms] = 0
            return stored.ids[rows[document][int(np.argmax(scores))]]

        qrels = {
            split: {
                query: {best(query, name): grade for name, grade in grades.items() if grade > 0}
                for query, grades in judged.items()
            }
            for split, judged in collection.qrels.items()
        }
        cut = {
            each.id: each.of_document(collection.documents[each.document])
            for each in map(Passage.of, texts)
        }
        return Collection(collection.name, cut, collection.queries, qrels)


def document_of(name: str) -> str:
    """The document of a passage's id; ``DataError`` for another id."""
    document, mark, _ = name.rpartition("#")
    return document if mark else Passage.of(name).document


def best_passages(run: Mapping[str, Mapping[str, float]]) -> tuple[Run, Found]:
    """Documents of a run of passages by their best one (MaxP), best first, and which passage that
    is.
    """
    check_mapping("run", run, "query id -> scores by passage")
    documents, found = Run(), Found()
    for query, scores in run.items():
        documents[query], found[query] = {}, {}
        for name in sorted(scores, key=lambda name: -scores[name]):
            if (document := document_of(name)) not in documents[query]:
                documents[query][document], found[query][document] = scores[name], name
    return documents, found


def found_by(
    search: Callable[[int], Run],
    k: int,
    stage: str,
    best: dict[str, Found] | None,
) -> Run:
    """The `k` best results of each query of a search, or with `best` documents by their best
    passage.

    ``search(n)`` gives the `n` best passages of each query, best first. More are asked for until
    they are of `k` documents, or there are no more: a passage that is not among them is no better
    than any that is, so that the ranking is that of all passages. `best` learns which passages they
    are, as those of `stage`.
    """
    if best is None:
        return search(k)
    asked, known = _FIRST * k, best.setdefault(stage, {})
    while True:
        passages = search(asked)
        documents, found = best_passages(passages)
        if all(
            len(documents[query]) >= k or len(scores) < asked for query, scores in passages.items()
        ):
            break
        asked *= _MORE
    for query, names in found.items():
        known[query] = known.get(query, {}) | names
    return {query: dict(list(scores.items())[:k]) for query, scores in documents.items()}


def as_passages(run: Mapping[str, Mapping[str, float]], found: Sequence[Found]) -> Run:
    """A run of documents as one of passages, by the first of `found` that has one of a document;
    others as they are.
    """

    def passage(query: str, name: str) -> str:
        return next((best[query][name] for best in found if name in best.get(query, {})), name)

    return {
        query: {passage(query, name): score for name, score in scores.items()}
        for query, scores in run.items()
    }
