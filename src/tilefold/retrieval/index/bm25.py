"""BM25 over bm25s: the lexical baseline, with Snowball stemming and stop words by language."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import (
    ArgumentError,
    check_instance,
    check_k,
    check_number,
    check_share,
    check_texts_by_id,
    list_of_ids,
)
from tilefold._internal.lazy import package_version
from tilefold.retrieval.common.array_checks import (
    check_offsets,
    check_positions,
    check_weights,
    first_outside,
)
from tilefold.retrieval.common.files import (
    Json,
    check_text_ids,
    read_json_object,
    require,
    write_json_object,
)
from tilefold.retrieval.common.provenance import (
    Provenance,
    ids_to_delete,
    provenance_of,
    texts_digest,
)
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.metadata import Fields, Metadata, Where, allowed_by, check_metadata
from tilefold.retrieval.data.scripts import UNSPACED
from tilefold.retrieval.errors import ArgumentDataError, DataError
from tilefold.retrieval.index.exact import Postings, top_positive
from tilefold.retrieval.index.protocol import (
    REMEDY,
    FolderIndex,
    StoredIds,
    naming_versions,
    read_array,
)
from tilefold.retrieval.vectors.sparse import SparseVectors

__all__ = ["LANGUAGES", "BM25Index", "BM25Options", "Tokenizer"]

_WORD = re.compile(rf"[{UNSPACED}]+|[^\W{UNSPACED}]+")
_UNSPACED_CHARACTER = re.compile(rf"[{UNSPACED}]")
_IDENTIFIER_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_")
# Languages with stop words in bm25s, and their two letters. Snowball stems more languages, which
# then have no stop words.
_STOPWORD_LANGUAGES = {
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
LANGUAGES = (*_STOPWORD_LANGUAGES, "none")
# Arrays of bm25s's scores: weights, documents, and offsets of the words.
_ARRAYS = ("data", "indices", "indptr")
_COUNTS = "counts.npy"
_STEMMING = "stemming.json"
_MAX_STEMS = 2000  # words of an index whose stems are recorded
_OWN_NAMES = (
    _COUNTS,
    _STEMMING,
    "params.index.json",
    "vocab.index.json",
    *(f"{name}.csc.index.npy" for name in _ARRAYS),
)


@dataclass(frozen=True)
class BM25Options:
    """Options of BM25.

    Attributes:
        language: language of the stop words and the Snowball stemmer: one of `LANGUAGES`, its two
            letters, or another language that Snowball stems, then without stop words. ``"none"``
            uses neither.
        k1: saturation of term frequency; 0 ignores repetitions.
        b: normalisation by document length, in [0, 1].
        identifiers: also split words at underscores and capitals (``move_to_end``,
            ``OrderedDict``), for texts about programs.
    """

    language: str = "english"
    k1: float = 1.5
    b: float = 0.75
    identifiers: bool = False

    def __post_init__(self) -> None:
        check_instance("language", self.language, str, "the name of a language, or 'none'")
        check_instance("identifiers", self.identifiers, bool, "True or False")
        check_number("k1", self.k1)
        if not 0 <= self.k1 < float("inf"):
            raise ArgumentError("k1", f"expected a finite number of at least 0, got {self.k1!r}.")
        check_share("b", self.b)


@dataclass(frozen=True)
class Stemming:
    """Record of the stop words and the stemmer that an index was built with.

    Another release of bm25s may have other stop words, and one of PyStemmer other stems. Queries
    that are cut in another way than the documents would miss words of the index.

    Attributes:
        stopwords: the stop words, sorted.
        stems: word -> stem, for at most 2,000 words of the documents.
        version: of PyStemmer.
    """

    stopwords: list[str]
    stems: dict[str, str]
    version: str

    @classmethod
    def load(cls, file: Path) -> Stemming:
        """Read the record that an index has in `file`.

        Raises:
            DataError: for a file that is no such record.
        """
        record = read_json_object(file, REMEDY)
        stopwords, stems, version = (record.get(name) for name in ("stopwords", "stems", "version"))
        if (
            not isinstance(stopwords, list)
            or not isinstance(stems, dict)
            or not isinstance(version, str)
            or not all(isinstance(word, str) for word in (*stopwords, *stems.values()))
        ):
            raise DataError(
                f"{file}: expected stop words, stems of words and a version, "
                f"got {record!r:.80}. {REMEDY}",
            )
        return cls(stopwords, stems, version)


class Tokenizer:
    """Splits a text into lower-cased, stemmed words of at least two characters.

    Stop words are left out. Scripts without spaces give overlapping pairs of characters.

    Args:
        options: options of the index.
        stopwords: stop words of an index that was built before; by default those of the language.

    Raises:
        ValueError: for a language that Snowball does not stem.
    """

    def __init__(self, options: BM25Options, stopwords: Iterable[str] | None = None) -> None:
        self._identifiers = options.identifiers
        self._stopwords, self._stem = _stopwords_and_stemmer(options.language)
        if stopwords is not None:
            self._stopwords = frozenset(stopwords)

    def __call__(self, text: str) -> list[str]:
        tokens: list[str] = []
        for word in self._words(text):
            if _UNSPACED_CHARACTER.match(word):
                n_pairs = max(1, len(word) - 1)
                tokens.extend(word[begin : begin + 2] for begin in range(n_pairs))
            elif self._is_stemmed(word):
                tokens.append(self._stem(word))
        return tokens

    def _is_stemmed(self, word: str) -> bool:
        """Whether the stem of a word is a token."""
        is_unspaced = _UNSPACED_CHARACTER.match(word) is not None
        return len(word) > 1 and not is_unspaced and word not in self._stopwords

    def _words(self, text: str) -> Iterator[str]:
        """Yield the lower-cased words of a text, also stop words and single characters."""
        if self._identifiers:
            text = _IDENTIFIER_BOUNDARY.sub(" ", text)
        for match in _WORD.finditer(text.lower()):
            yield match.group()

    def stemming(
        self,
        texts: Iterable[str],
        earlier_stems: Mapping[str, str] | None = None,
    ) -> Stemming:
        """Return a record of the stop words and of sample stems, to recognize another stemmer.

        Args:
            texts: texts of the index. Their first words are stemmed, until there are 2,000 stems.
            earlier_stems: word -> stem of an earlier record, to which the words are added.
        """
        stems = dict(earlier_stems or {})
        for text in texts:
            if len(stems) >= _MAX_STEMS:
                break
            words = filter(self._is_stemmed, self._words(text))
            stems.update((word, self._stem(word)) for word in words)
        first_stems = dict(list(stems.items())[:_MAX_STEMS])
        return Stemming(sorted(self._stopwords), first_stems, package_version("PyStemmer"))

    def check_stems(self, stemming: Stemming, folder: Path) -> None:
        """Raise ``DataError`` unless the installed stemmer gives the stems that an index has.

        Args:
            stemming: stems that were recorded when the index was built.
            folder: folder of the index, for the error.
        """
        for word, stem in stemming.stems.items():
            installed_stem = self._stem(word)
            if installed_stem != stem:
                raise DataError(
                    f"{folder}: expected the stem {stem!r} of {word!r}, as PyStemmer "
                    f"{stemming.version} gave when the index was built, got {installed_stem!r} "
                    f"from PyStemmer {package_version('PyStemmer')}, so that queries would miss "
                    f"words of the index. {REMEDY}",
                )


def _stopwords_and_stemmer(name: str) -> tuple[frozenset[str], Callable[[str], str]]:
    """Return the stop words and the stemmer of a language.

    Args:
        name: a language of Snowball such as ``"english"``, its two letters such as ``"en"``, or
            ``"none"``, which has no stop words and returns words unchanged.

    Returns:
        The stop words, which are empty for languages without a list in bm25s, and a function from
        a word to its stem.

    Raises:
        ValueError: for a language that Snowball does not stem.
    """
    if name == "none":
        return frozenset(), str
    snowball = require("Stemmer", "PyStemmer", "BM25 with stemming")
    language_by_letters = {letters: language for language, letters in _STOPWORD_LANGUAGES.items()}
    language = language_by_letters.get(name, name)
    try:
        stem: Callable[[str], str] = snowball.Stemmer(language).stemWord
    except KeyError:
        languages = ", ".join([*snowball.algorithms(), "none"])
        raise ArgumentError("language", f"expected one of {languages}, got {name!r}.") from None
    if language not in _STOPWORD_LANGUAGES:
        return frozenset(), stem
    _import_bm25s()
    stopwords = require("bm25s.stopwords", "bm25s", "BM25")
    # bm25s abbreviates English only: STOPWORDS_EN, but STOPWORDS_GERMAN.
    name_in_bm25s = "EN" if language == "english" else language.upper()
    return frozenset(getattr(stopwords, f"STOPWORDS_{name_in_bm25s}")), stem


def _import_bm25s() -> ModuleType:
    """Import bm25s without JAX.

    bm25s imports JAX if it is installed, and JAX takes 75% of a GPU's memory. JAX is hidden only
    while bm25s is imported, and not if the program has imported it before.
    """
    hides_jax = "jax" not in sys.modules
    if hides_jax:
        # None makes ``import jax`` raise ImportError, which bm25s handles.
        sys.modules["jax"] = None  # type: ignore[assignment]
    try:
        return require("bm25s", "bm25s", "BM25")
    finally:
        if hides_jax:
            del sys.modules["jax"]


class BM25Index(FolderIndex):
    """BM25 (Lucene's variant) over texts, in memory or stored as a directory."""

    backend = "bm25"
    package = "bm25s"
    own_files = _OWN_NAMES

    def __init__(
        self,
        engine: Any,
        ids: Sequence[str],
        counts: Counts,
        options: BM25Options,
        provenance: Provenance,
        stemming: Stemming | None = None,
    ) -> None:
        """Create an index of an engine that bm25s has built or loaded.

        Args:
            engine: ``bm25s.BM25`` with the weights of the words in the documents.
            ids: ids of the documents.
            counts: int32, occurrences of a word in a document, in the order of the engine's
                weights. :meth:`updated` restores the documents from them.
            options: options of the build.
            provenance: digest of the texts, and how they were divided into passages.
            stemming: record of the stop words and the stemmer; None if they are unknown.
        """
        self._engine = engine
        self.ids = ids
        self.vocab_size = len(engine.vocab_dict)
        self._counts = counts
        self.options = options
        self.provenance = provenance
        self._stemming = stemming
        self._tokenize = Tokenizer(options, None if stemming is None else stemming.stopwords)

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
        """Index texts.

        Args:
            documents: id -> contents of documents or passages; at least one has a word.
            language: see :class:`BM25Options`.
            k1: see :class:`BM25Options`.
            b: see :class:`BM25Options`.
            identifiers: see :class:`BM25Options`.
            metadata: as in :func:`tilefold.retrieval.build_index`.
        """
        check_texts_by_id("documents", documents)
        options = BM25Options(language, k1, b, identifiers)
        tokenize = Tokenizer(options)
        if not documents:
            raise ArgumentError("documents", "expected at least one, got an empty mapping.")
        check_text_ids("documents", documents)
        corpus = {name: tokenize(text) for name, text in documents.items()}
        if not any(corpus.values()):
            raise ArgumentError(
                "documents", "expected at least one with a word, got only empty ones."
            )
        stemming = tokenize.stemming(documents.values())
        index = cls._of_words(corpus, options, provenance_of(documents), stemming)
        index.metadata = Metadata.from_fields(metadata, index.ids, index.provenance.passages)
        return index

    @classmethod
    def _of_words(
        cls,
        corpus: Mapping[str, list[str]],
        options: BM25Options,
        provenance: Provenance,
        stemming: Stemming | None,
    ) -> BM25Index:
        """Index documents that are split into words.

        Args:
            corpus: id -> words of the document.
            options: options of the build.
            provenance: digest of the texts, and how they were divided into passages.
            stemming: record of the stop words and the stemmer; None if they are unknown.
        """
        engine = _import_bm25s().BM25(
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
        # One number for each pair of a word and a document, in the order of the engine's weights.
        # A number that repeats is a word that occurs several times in the document.
        occurrences = [
            engine.vocab_dict[word] * len(corpus) + row
            for row, words in enumerate(corpus.values())
            for word in words
        ]
        _, counts = np.unique(np.array(occurrences, np.int64), return_counts=True)
        return cls(engine, list(corpus), counts.astype(np.int32), options, provenance, stemming)

    def updated(
        self,
        documents: Mapping[str, str],
        delete: Collection[str] = (),
        metadata: Mapping[str, Fields] | None = None,
    ) -> BM25Index:
        """Return an index with documents added, replaced or deleted.

        Weights depend on all documents, so the index is built again from the stored words and those
        of the new texts. Scores equal those of :meth:`build` with all documents. The texts of the
        result have no fingerprint. It may have no documents, or no words.

        Args:
            documents: id -> contents; replace documents with the same ids.
            delete: ids of documents to delete.
            metadata: of the new documents. Required if the index has metadata; an empty mapping
                will do.

        Raises:
            ValueError: without metadata for an index that has metadata.
            DataError: for passages that are divided in another way than those of the index.
        """
        check_texts_by_id("documents", documents)
        delete = set(list_of_ids("delete", delete))
        check_text_ids("documents", documents)
        if documents:
            check_metadata(self.metadata, metadata)
        passages = self.provenance.passages
        new_passages = provenance_of(documents).passages if documents else passages
        if new_passages != passages:
            raise ArgumentDataError(
                "documents",
                f"expected passages {passages!r} as in the index, got {new_passages!r}.",
            )
        stored_words = self._stored_words()
        removed = ids_to_delete((*stored_words, *documents), delete, documents, passages)
        retained_rows = [row for row, name in enumerate(self.ids) if name not in removed]
        corpus = {self.ids[row]: stored_words[self.ids[row]] for row in retained_rows}
        for name, text in documents.items():
            corpus[name] = self._tokenize(text)
        stemming = self._stemming
        if stemming is not None:
            stemming = self._tokenize.stemming(documents.values(), stemming.stems)
        index = self._of_words(corpus, self.options, Provenance(passages=passages), stemming)
        retained_metadata = self.metadata and self.metadata.take(retained_rows)
        new_metadata = Metadata.from_fields(metadata, list(documents), passages)
        index.metadata = Metadata.concatenate(
            (retained_metadata, new_metadata),
            [len(retained_rows), len(documents)],
        )
        return index

    def _stored_words(self) -> dict[str, list[str]]:
        """Return id -> words of the documents, in the order of the vocabulary."""
        _, rows, offsets = (np.asarray(self._engine.scores[name]) for name in _ARRAYS)
        word_of = {number: word for word, number in self._engine.vocab_dict.items()}
        words: dict[str, list[str]] = {name: [] for name in self.ids}
        for number in range(len(offsets) - 1):
            span = slice(offsets[number], offsets[number + 1])
            for row, count in zip(rows[span].tolist(), self._counts[span].tolist(), strict=True):
                words[self.ids[row]].extend([word_of[number]] * count)
        return words

    def content_digest(self) -> str:
        """Return the SHA-256 over the ids and the words of the documents.

        It does not depend on the order of the vocabulary, which differs between processes.
        """
        stored_words = self._stored_words()
        return texts_digest({name: " ".join(sorted(words)) for name, words in stored_words.items()})

    def search(self, queries: Mapping[str, str], k: int, *, where: Where = None) -> Run:
        """Search the best documents that share a word with each query.

        Args:
            queries: id -> text.
            k: documents per query.
            where: filter of the documents' metadata.
        """
        check_texts_by_id("queries", queries)
        check_k(k)
        allowed = allowed_by(self.metadata, where)
        run: Run = {}
        for query_id, text in queries.items():
            run[query_id] = {}
            tokens = self._indexed_tokens(text)
            if not tokens:
                continue
            scores = np.asarray(self._engine.get_scores(tokens), dtype=np.float32)
            if allowed is not None:
                scores = np.where(allowed, scores, np.float32(0))
            run[query_id] = {
                self.ids[position]: float(scores[position]) for position in top_positive(scores, k)
            }
        return run

    def document_vectors(self) -> SparseVectors:
        """Return BM25's weight of each word in each document.

        Inner products with :meth:`query_vectors` are the scores.
        """
        weights, documents, offsets = (np.asarray(self._engine.scores[name]) for name in _ARRAYS)
        postings = Postings(offsets, documents, weights, len(self.ids))
        return postings.vectors(self.ids, None, self.provenance)

    def query_vectors(self, queries: Mapping[str, str]) -> SparseVectors:
        """Return term frequencies of queries, without words that the index lacks."""
        check_texts_by_id("queries", queries)
        number_of = self._engine.vocab_dict
        counts: dict[str, Counter[int]] = {}
        for query_id, text in queries.items():
            tokens = self._indexed_tokens(text)
            counts[query_id] = Counter(number_of[token] for token in tokens)
        return SparseVectors.from_rows(counts, len(self._engine.scores["indptr"]) - 1)

    def _indexed_tokens(self, text: str) -> list[str]:
        """Tokens of a text that are in the index."""
        return [token for token in self._tokenize(text) if token in self._engine.vocab_dict]

    def _write(self, folder: Path) -> None:
        self._engine.save(folder)
        np.save(folder / _COUNTS, self._counts)
        if self._stemming is not None:
            write_json_object(folder / _STEMMING, asdict(self._stemming))

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> BM25Index:
        """Load the engine of a saved index, and compare its stems with the installed stemmer's."""
        bm25s = _import_bm25s()
        # bm25s does not check its files, and would fail in a search.
        with naming_versions(folder, manifest, cls.package):
            engine = bm25s.BM25.load(folder, mmap=True)
            options = BM25Options(**manifest["options"])
            _check_arrays(engine, len(ids))
        counts = read_array(folder / _COUNTS, np.int32, engine.scores["data"].size)
        stemming = None
        # Earlier releases wrote no such record.
        if _STEMMING in manifest["files"]:
            stemming = Stemming.load(folder / _STEMMING)
        provenance = Provenance.from_dict(manifest)
        index = cls(engine, list(ids), counts, options, provenance, stemming)
        if stemming is not None:
            index._tokenize.check_stems(stemming, folder)
        return index


def _make_wordless(engine: Any, n_documents: int) -> None:
    """Fill an engine with documents that have no words, which bm25s cannot index.

    Vectors need a vocabulary, so the engine gets one word that no text can have.
    """
    engine.vocab_dict = {" ": 0, "": 1}  # every engine has "", without postings
    engine.unique_token_ids_set = {0, 1}
    engine.nonoccurrence_array = None
    engine.scores = {
        "data": np.empty(0, np.float32),
        "indices": np.empty(0, np.int32),
        "indptr": np.zeros(2, np.int64),
        "num_docs": n_documents,
    }


def _check_arrays(engine: Any, n_documents: int) -> None:
    """Raise ``DataError`` unless the arrays of a loaded engine are consistent.

    The arrays are an inverted index in CSC: weights, documents and the offset of each word.

    Args:
        engine: ``bm25s.BM25``.
        n_documents: number of documents of the index.
    """
    weights, documents, offsets = (np.asarray(engine.scores[name]) for name in _ARRAYS)
    kinds = (weights.dtype.kind, documents.dtype.kind, offsets.dtype.kind)
    if (
        kinds != ("f", "i", "i")
        or weights.shape != documents.shape
        or weights.ndim != 1
        or offsets.ndim != 1
    ):
        raise DataError(
            "expected weights, documents and offsets of words, "
            f"got arrays of {weights.dtype} {weights.shape}.",
        )
    if engine.scores["num_docs"] != n_documents:
        raise DataError(f"num_docs: expected {n_documents}, got {engine.scores['num_docs']!r}.")
    check_offsets(offsets, weights.size)
    check_positions("indices", documents, n_documents)
    check_weights("data", weights)
    n_words = offsets.size - 1
    # The word "" has no postings.
    numbers = np.array([number for word, number in engine.vocab_dict.items() if word], np.int64)
    outside = first_outside(numbers, numbers.size)
    if numbers.size != n_words:
        problem = f"{numbers.size}"
    elif outside is not None:
        problem = f"one at {numbers[outside]}"
    else:
        return
    raise DataError(f"vocab_dict: expected {n_words} words in [0, {n_words}), got {problem}.")
