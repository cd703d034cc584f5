"""BM25 over bm25s: the lexical baseline, with Snowball stemming and stop words by language."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import check_k, check_share, check_texts_by_id, list_of_ids
from tilefold.retrieval.common.array_checks import (
    check_offsets,
    check_positions,
    check_weights,
    first_outside,
)
from tilefold.retrieval.common.files import Json, check_text_ids, require
from tilefold.retrieval.common.provenance import Provenance, ids_to_delete, provenance_of
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.metadata import Fields, Metadata, Where, allowed_by, check_metadata
from tilefold.retrieval.data.scripts import UNSPACED
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.exact import Postings, top_positive
from tilefold.retrieval.index.protocol import FolderIndex, StoredIds, naming_versions, read_array
from tilefold.retrieval.vectors.sparse import SparseVectors

__all__ = ["LANGUAGES", "BM25Index", "BM25Options", "Tokenizer"]

_WORD = re.compile(rf"[{UNSPACED}]+|[^\W{UNSPACED}]+")
_PAIRED = re.compile(rf"[{UNSPACED}]")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_")
# Language of bm25s's stop words -> its two letters. Snowball stems more languages, then without
# stop words.
_STOPPED = {
    "danish": "da",
    "dutch": "nl",
    "english": "en",
    "french": "fr",
    "german": "de",
    "italian": "it",
    "norwegian": "no",
    "portuguese": "pt",
    "russian": "ru",
    "spanish": "es",
    "swedish": "sv",
    "turkish": "tr",
}
Counts = npt.NDArray[np.int32]
LANGUAGES = (*_STOPPED, "none")
_ARRAYS = ("data", "indices", "indptr")
_COUNTS = "counts.npy"
_OWN_NAMES = (
    _COUNTS,
    "params.index.json",
    "vocab.index.json",
    *(f"{name}.csc.index.npy" for name in _ARRAYS),
)


@dataclass(frozen=True)
class BM25Options:
    """Options of BM25.

    Attributes:
        language: of stop words and Snowball stemmer: one of `LANGUAGES`, its two letters, any other
            that Snowball stems (without stop words), or ``"none"`` for neither.
        k1: saturation of term frequency; 0 ignores repetitions.
        b: normalisation by document length, in [0, 1].
        identifiers: also cut words at underscores and at capitals (``move_to_end``,
            ``OrderedDict``), for texts about programs.
    """

    language: str = "english"
    k1: float = 1.5
    b: float = 0.75
    identifiers: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.k1 < float("inf"):
            raise ValueError(f"k1: expected a finite number of at least 0, got {self.k1!r}.")
        check_share("b", self.b)


class Tokenizer:
    """Lower-cased words of at least two characters, without stop words, stemmed.

    Scripts without spaces give overlapping pairs of characters. A language that Snowball does not
    stem is a ``ValueError``.
    """

    def __init__(self, options: BM25Options) -> None:
        self._identifiers = options.identifiers
        self._stopwords, self._stem = _language(options.language)

    def __call__(self, text: str) -> list[str]:
        tokens: list[str] = []
        for match in _WORD.finditer((_CAMEL.sub(" ", text) if self._identifiers else text).lower()):
            word = match.group()
            if _PAIRED.match(word):
                tokens.extend(word[i : i + 2] for i in range(max(1, len(word) - 1)))
            elif len(word) > 1 and word not in self._stopwords:
                tokens.append(self._stem(word))
        return tokens


def _language(name: str) -> tuple[frozenset[str], Callable[[str], str]]:
    if name == "none":
        return frozenset(), str
    snowball = require("Stemmer", "PyStemmer", "BM25 with stemming")
    full = next((language for language, letters in _STOPPED.items() if name == letters), name)
    try:
        stem: Callable[[str], str] = snowball.Stemmer(full).stemWord
    except KeyError:
        known = ", ".join([*snowball.algorithms(), "none"])
        raise ValueError(f"language: expected one of {known}, got {name!r}.") from None
    if full not in _STOPPED:
        return frozenset(), stem
    _package()
    lists = require("bm25s.stopwords", "bm25s", "BM25")
    return frozenset(
        getattr(lists, "STOPWORDS_EN" if full == "english" else f"STOPWORDS_{full.upper()}"),
    ), stem


def _package() -> ModuleType:
    """The package, without JAX, which it starts where that is installed, and which takes 75% of a
    GPU's memory.
    """
    if hide := "jax" not in sys.modules:
        sys.modules["jax"] = None  # type: ignore[assignment]
    try:
        return require("bm25s", "bm25s", "BM25")
    finally:
        if hide:
            del sys.modules["jax"]


class BM25Index(FolderIndex):
    """BM25 (Lucene's variant) over texts, in memory or saved as a directory like the indexes of
    sparse vectors.
    """

    backend, package, own_files = "bm25", "bm25s", _OWN_NAMES

    def __init__(
        self,
        engine: Any,
        ids: Sequence[str],
        counts: Counts,
        options: BM25Options,
        provenance: Provenance,
    ) -> None:
        self._engine, self.ids, self.vocab_size = engine, ids, len(engine.vocab_dict)
        self._counts = counts  # how often a word is in a document, in the order of weights
        self.options, self.provenance = options, provenance
        self._tokenize = Tokenizer(options)

    @classmethod
    def build(
        cls,
        documents: Mapping[str, str],
        *,
        language: str = "english",
        k1: float = 1.5,
        b: float = 0.75,
        identifiers: bool = False,
        metadata: Mapping[str, Fields] | None = None,
    ) -> BM25Index:
        """Index ``{id: contents}`` of documents or passages, one of them with a word; options:
        :class:`BM25Options`.

        `metadata` is as in :func:`tilefold.retrieval.build_index`.
        """
        check_texts_by_id("documents", documents)
        options = BM25Options(language, k1, b, identifiers)
        tokenize = Tokenizer(options)
        if not documents:
            raise ValueError("documents: expected at least one, got an empty mapping.")
        check_text_ids("documents", documents)
        corpus = {name: tokenize(text) for name, text in documents.items()}
        if not any(corpus.values()):
            raise ValueError("documents: expected at least one with a word, got only empty ones.")
        made = cls._of_words(corpus, options, provenance_of(documents))
        made.metadata = Metadata.of(metadata, made.ids, made.provenance.passages)
        return made

    @classmethod
    def _of_words(
        cls,
        corpus: Mapping[str, list[str]],
        options: BM25Options,
        provenance: Provenance,
    ) -> BM25Index:
        engine = _package().BM25(
            k1=options.k1,
            b=options.b,
            method="lucene",
            idf_method="lucene",
            dtype="float32",
            int_dtype="int32",
            backend="numpy",
        )
        if any(corpus.values()):
            engine.index(list(corpus.values()), create_empty_token=True, show_progress=False)
        else:
            _make_wordless(engine, len(corpus))
        found = (
            (engine.vocab_dict[word], at)
            for at, words in enumerate(corpus.values())
            for word in words
        )
        places = [number * len(corpus) + at for number, at in found]
        counts = np.unique(np.array(places, np.int64), return_counts=True)[1].astype(np.int32)
        return cls(engine, list(corpus), counts, options, provenance)

    def updated(
        self,
        documents: Mapping[str, str],
        delete: Collection[str] = (),
        metadata: Mapping[str, Fields] | None = None,
    ) -> BM25Index:
        """An index without some documents, and with others and their metadata, which replace those
        of the same ids.

        Weights depend on all documents, so that it is made anew, of the words that are stored and
        those of the new texts: the scores are those of :meth:`build` of all. Its texts have no
        fingerprint. An index may end up without any document, or without a word. One that keeps
        metadata needs those of new documents, if only an empty mapping; none is a ``ValueError``.
        """
        check_texts_by_id("documents", documents)
        delete = set(list_of_ids("delete", delete))
        check_text_ids("documents", documents)
        if documents:
            check_metadata(self.metadata, metadata)
        _, at_documents, offsets = (np.asarray(self._engine.scores[name]) for name in _ARRAYS)
        words = {place: word for word, place in self._engine.vocab_dict.items()}
        corpus: dict[str, list[str]] = {name: [] for name in self.ids}
        for place in range(len(offsets) - 1):
            span = slice(offsets[place], offsets[place + 1])
            for at, count in zip(
                at_documents[span].tolist(),
                self._counts[span].tolist(),
                strict=True,
            ):
                corpus[self.ids[at]] += [words[place]] * count
        new, cut = (
            provenance_of(documents) if documents else self.provenance,
            self.provenance.passages,
        )
        if new.passages != cut:
            raise DataError(
                f"documents: expected passages {cut!r} as in the index, got {new.passages!r}.",
            )
        gone = ids_to_delete((*corpus, *documents), delete, documents, cut)
        left = {row: name for row, name in enumerate(self.ids) if name not in gone}
        kept = {name: corpus[name] for name in left.values()}
        kept |= {name: self._tokenize(text) for name, text in documents.items()}
        made = self._of_words(kept, self.options, Provenance(passages=cut))
        parts = (
            self.metadata and self.metadata.take(list(left)),
            Metadata.of(metadata, list(documents), cut),
        )
        made.metadata = Metadata.concatenate(parts, [len(left), len(documents)])
        return made

    def search(self, queries: Mapping[str, str], k: int, *, where: Where = None) -> Run:
        """At most `k` best documents per query, of those that match `where`, which share a word
        with it.
        """
        check_texts_by_id("queries", queries)
        check_k(k)
        allowed = allowed_by(self.metadata, where)
        run: Run = {}
        for query_id, text in queries.items():
            run[query_id] = {}
            if tokens := self._known(text):
                scores = np.asarray(self._engine.get_scores(tokens), dtype=np.float32)
                if allowed is not None:
                    scores = np.where(allowed, scores, np.float32(0))
                run[query_id] = {self.ids[i]: float(scores[i]) for i in top_positive(scores, k)}
        return run

    def document_vectors(self) -> SparseVectors:
        """BM25's weight of each word in each document: the inner product with :meth:`query_vectors`
        is the score.
        """
        data, documents, offsets = (np.asarray(self._engine.scores[name]) for name in _ARRAYS)
        return Postings(offsets, documents, data, len(self.ids)).vectors(
            self.ids,
            None,
            self.provenance,
        )

    def query_vectors(self, queries: Mapping[str, str]) -> SparseVectors:
        """Term frequencies of each query; words that the index lacks are left out."""
        check_texts_by_id("queries", queries)
        words = self._engine.vocab_dict
        counts = {
            name: Counter(words[token] for token in self._known(text))
            for name, text in queries.items()
        }
        return SparseVectors.from_rows(counts, len(self._engine.scores["indptr"]) - 1)

    def _known(self, text: str) -> list[str]:
        return [token for token in self._tokenize(text) if token in self._engine.vocab_dict]

    def _write(self, folder: Path) -> None:
        self._engine.save(folder)
        np.save(folder / _COUNTS, self._counts)

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> BM25Index:
        bm25s = _package()
        with naming_versions(
            folder,
            manifest,
            cls.package,
        ):  # which takes its files as they are, and fails later
            engine = bm25s.BM25.load(folder, mmap=True)
            options = BM25Options(**manifest["options"])
            _check_arrays(engine, len(ids))
        counts = read_array(folder / _COUNTS, np.int32, engine.scores["data"].size)
        return cls(engine, list(ids), counts, options, Provenance.from_dict(manifest))


def _make_wordless(engine: Any, n_documents: int) -> None:
    """Make an engine one of documents without any word, which bm25s cannot index itself.

    It has one word that is in no document, and that no text has: vectors need a vocabulary.
    """
    engine.vocab_dict = {" ": 0, "": 1}  # the second is in every engine, and has no postings
    engine.unique_token_ids_set = {0, 1}
    engine.nonoccurrence_array = None
    engine.scores = {
        "data": np.empty(0, np.float32),
        "indices": np.empty(0, np.int32),
        "indptr": np.zeros(2, np.int64),
        "num_docs": n_documents,
    }


def _check_arrays(engine: Any, n_documents: int) -> None:
    """Raise ``DataError`` unless a loaded engine holds weights of words of its vocabulary in
    documents.
    """
    data, documents, offsets = (np.asarray(engine.scores[name]) for name in _ARRAYS)
    kinds = data.dtype.kind, documents.dtype.kind, offsets.dtype.kind
    if (
        kinds != ("f", "i", "i")
        or data.shape != documents.shape
        or data.ndim != 1
        or offsets.ndim != 1
    ):
        raise DataError(
            f"expected weights, documents and offsets of words, got arrays of {data.dtype} {data.shape}.",
        )
    if engine.scores["num_docs"] != n_documents:
        raise DataError(f"num_docs: expected {n_documents}, got {engine.scores['num_docs']!r}.")
    check_offsets(offsets, data.size)
    check_positions("indices", documents, n_documents)
    check_weights("data", data)
    words = np.array(
        [place for word, place in engine.vocab_dict.items() if word],
        np.int64,
    )  # "" has no postings
    if words.size != offsets.size - 1 or first_outside(words, words.size) is not None:
        got = (
            f"{words.size}"
            if words.size != offsets.size - 1
            else f"one at {words[first_outside(words, words.size)]}"
        )
        raise DataError(
            f"vocab_dict: expected {offsets.size - 1} words in [0, {offsets.size - 1}), got {got}.",
        )
