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
from tilefold.retrieval.data.metadata import (
    Fields,
    Mask,
    Metadata,
    Where,
    allowed_by,
    check_metadata,
)
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
# Languages with stop words in bm25s, and their two-letter codes. Snowball stems more languages, for
# which there are no stop words.
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
# The scores of bm25s are an inverted index in CSC layout: weights, documents, and offsets of words.
_ARRAYS = ("data", "indices", "indptr")
_COUNTS = "counts.npy"
_STEMMING = "stemming.json"
# Number of words of an index whose stems are recorded.
_MAX_STEMS = 2000
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
        language: language of the stop words and the Snowball stemmer: one of `LANGUAGES`, its
            two-letter code, or another language that Snowball stems, which has no stop words.
            ``"none"`` uses neither stop words nor a stemmer.
        k1: saturation of term frequency; 0 ignores repetitions.
        b: normalisation by document length, in [0, 1].
        identifiers: whether to split words at underscores and capitals, too (``move_to_end``,
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

    Another release of bm25s may have other stop words, and another release of PyStemmer other
    stems. Queries would then miss words of the index.

    Attributes:
        stopwords: the stop words, sorted.
        stems: word -> stem, for at most 2,000 words of the documents.
        version: version of PyStemmer.
    """

    stopwords: list[str]
    stems: dict[str, str]
    version: str

    @classmethod
    def load(cls, file: Path) -> Stemming:
        """Load the record from a file of an index.

        Raises:
            DataError: if the file does not hold such a record.
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

    Stop words are left out. A text in a script without spaces is split into overlapping pairs of
    characters.

    Args:
        options: options of the index.
        stopwords: stop words of an existing index; None uses those of the language.

    Raises:
        ValueError: if Snowball does not stem the language.
    """

    def __init__(self, options: BM25Options, stopwords: Iterable[str] | None = None) -> None:
        self._identifiers = options.identifiers
        self._stopwords, self._stem = _load_stopwords_and_stemmer(options.language)
        if stopwords is not None:
            self._stopwords = frozenset(stopwords)

    def __call__(self, text: str) -> list[str]:
        """Return the index terms of a text: stems, and pairs of characters of unspaced scripts."""
        tokens: list[str] = []
        for word in self._words(text):
            if _UNSPACED_CHARACTER.match(word):
                n_pairs = max(1, len(word) - 1)  # a single character is a token itself
                tokens.extend(word[start : start + 2] for start in range(n_pairs))
            elif self._is_stemmed(word):
                tokens.append(self._stem(word))
        return tokens

    def _is_stemmed(self, word: str) -> bool:
        """Return whether a word becomes a token: not a stop word, and not a single character."""
        is_unspaced = _UNSPACED_CHARACTER.match(word) is not None
        return len(word) > 1 and not is_unspaced and word not in self._stopwords

    def _words(self, text: str) -> Iterator[str]:
        """Iterate over the lower-cased words of a text, with stop words and single characters."""
        if self._identifiers:
            text = _IDENTIFIER_BOUNDARY.sub(" ", text)
        for match in _WORD.finditer(text.lower()):
            yield match.group()

    def record_stemming(
        self,
        texts: Iterable[str],
        earlier_stems: Mapping[str, str] | None = None,
    ) -> Stemming:
        """Record the stop words and the stems of some words, for :meth:`check_stems`.

        Args:
            texts: texts of the index. Words are stemmed until the record has 2,000 stems.
            earlier_stems: word -> stem of an earlier record, to which the words are added.
        """
        stems = dict(earlier_stems or {})
        stemmed_words = (
            word for text in texts for word in self._words(text) if self._is_stemmed(word)
        )
        for word in stemmed_words:
            if len(stems) >= _MAX_STEMS:
                break
            stems[word] = self._stem(word)
        return Stemming(sorted(self._stopwords), stems, package_version("PyStemmer"))

    def check_stems(self, stemming: Stemming, folder: Path) -> None:
        """Raise ``DataError`` if the installed stemmer gives other stems than an index has.

        Args:
            stemming: the record of the index.
            folder: the folder of the index, for the error.
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


def _load_stopwords_and_stemmer(name: str) -> tuple[frozenset[str], Callable[[str], str]]:
    """Return the stop words and the stemmer of a language.

    Args:
        name: a language of Snowball such as ``"english"``, its two-letter code such as ``"en"``, or
            ``"none"`` for no stop words and no stemming.

    Returns:
        The stop words, and a function from a word to its stem. There are no stop words for
        languages without a list in bm25s.

    Raises:
        ArgumentError: if Snowball does not stem the language.
    """
    if name == "none":
        return frozenset(), str
    snowball = require("Stemmer", "PyStemmer", "BM25 with stemming")
    language_by_code = {code: language for language, code in _STOPWORD_LANGUAGES.items()}
    language = language_by_code.get(name, name)
    try:
        stem: Callable[[str], str] = snowball.Stemmer(language).stemWord
    except KeyError:
        languages = ", ".join([*snowball.algorithms(), "none"])
        raise ArgumentError("language", f"expected one of {languages}, got {name!r}.") from None
    if language not in _STOPWORD_LANGUAGES:
        return frozenset(), stem
    # The import of the submodule would import bm25s, too, but not without JAX.
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
    """BM25 (Lucene's variant) over texts, in memory or stored in a folder.

    Examples:
        >>> index = BM25Index.build({"cards": "Block a lost card.", "pin": "A forgotten PIN."})
        >>> run = index.search({"q1": "lost cards"}, k=10)
        >>> list(run["q1"])
        ['cards']
    """

    backend = "bm25"
    package = "bm25s"
    own_files = _OWN_NAMES

    def __init__(
        self,
        engine: Any,
        ids: Sequence[str],
        term_frequencies: Counts,
        options: BM25Options,
        provenance: Provenance,
        stemming: Stemming | None = None,
    ) -> None:
        """Wrap an engine that was built or loaded by bm25s.

        Args:
            engine: ``bm25s.BM25`` with the weights of the words in the documents.
            ids: ids of the documents.
            term_frequencies: int32, for each weight of the engine, how often the word occurs in the
                document. :meth:`updated` restores the documents from them.
            options: options of the build.
            provenance: digest of the texts, and how they were divided into passages.
            stemming: record of the stop words and the stemmer; None if they are unknown.
        """
        self._engine = engine
        self.ids = ids
        self.vocab_size = len(engine.vocab_dict)
        self._term_frequencies = term_frequencies
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
        """Build an index of texts.

        Args:
            documents: id -> text of a document or passage. At least one must have a word.
            language: language of the stop words and the stemmer, as in :class:`BM25Options`.
            k1: saturation of term frequency.
            b: normalisation by document length, in [0, 1].
            identifiers: whether to split words at underscores and capitals, too.
            metadata: document id -> fields, which ``search(where=...)`` filters by.

        Raises:
            ValueError: if there is no word, or an option is wrong.
        """
        check_texts_by_id("documents", documents)
        check_text_ids("documents", documents)
        options = BM25Options(language, k1, b, identifiers)
        tokenize = Tokenizer(options)
        if not documents:
            raise ArgumentError("documents", "expected at least one, got an empty mapping.")
        corpus = {document_id: tokenize(text) for document_id, text in documents.items()}
        if not any(corpus.values()):
            raise ArgumentError(
                "documents",
                "expected at least one document with a word, got only documents without words. "
                "Check that the field of the text is the right one.",
            )
        stemming = tokenize.record_stemming(documents.values())
        index = cls._build_from_words(corpus, options, provenance_of(documents), stemming)
        index.metadata = Metadata.from_fields(metadata, index.ids, index.provenance.passages)
        return index

    @classmethod
    def _build_from_words(
        cls,
        corpus: Mapping[str, list[str]],
        options: BM25Options,
        provenance: Provenance,
        stemming: Stemming | None,
    ) -> BM25Index:
        """Build an index of documents that are split into words.

        Args:
            corpus: document id -> words of the document.
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
            # bm25s then adds the empty token, a word without postings, to every vocabulary.
            engine.index(list(corpus.values()), create_empty_token=True, show_progress=False)
        else:
            _fill_without_words(engine, len(corpus))
        return cls(
            engine,
            list(corpus),
            _count_terms(corpus, engine.vocab_dict),
            options,
            provenance,
            stemming,
        )

    def updated(
        self,
        documents: Mapping[str, str],
        delete: Collection[str] = (),
        metadata: Mapping[str, Fields] | None = None,
    ) -> BM25Index:
        """Return an index with documents added, replaced or deleted.

        Weights depend on all documents, so the index is built again from the stored words and the
        words of the new texts. Scores equal those of :meth:`build` with all documents. No digest of
        the texts is recorded. The new index may have no documents, or no words.

        Args:
            documents: id -> text of the new documents, which replace documents with the same ids.
            delete: ids of documents to delete.
            metadata: document id -> fields of the new documents. It is required if the index has
                metadata, but may be empty.

        Raises:
            ValueError: if `metadata` is required and missing.
            ArgumentDataError: if the documents have other passages than those of the index.
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
        stored_words = self._restore_words()
        # Documents that are replaced are removed, too.
        removed = ids_to_delete((*stored_words, *documents), delete, documents, passages)
        retained_rows = [
            row for row, document_id in enumerate(self.ids) if document_id not in removed
        ]
        corpus = {self.ids[row]: stored_words[self.ids[row]] for row in retained_rows}
        for document_id, text in documents.items():
            corpus[document_id] = self._tokenize(text)
        stemming = self._stemming
        if stemming is not None:
            stemming = self._tokenize.record_stemming(documents.values(), stemming.stems)
        index = self._build_from_words(
            corpus,
            self.options,
            Provenance(passages=passages),
            stemming,
        )
        retained_metadata = None
        if self.metadata is not None:
            retained_metadata = self.metadata.take(retained_rows)
        new_metadata = Metadata.from_fields(metadata, list(documents), passages)
        index.metadata = Metadata.concatenate(
            (retained_metadata, new_metadata),
            [len(retained_rows), len(documents)],
        )
        return index

    def _restore_words(self) -> dict[str, list[str]]:
        """Return document id -> words of the document, in the order of the vocabulary.

        A word is repeated as often as it occurs in the document.
        """
        _, rows, offsets = (np.asarray(self._engine.scores[name]) for name in _ARRAYS)
        word_of_number = {number: word for word, number in self._engine.vocab_dict.items()}
        words: dict[str, list[str]] = {document_id: [] for document_id in self.ids}
        for number in range(len(offsets) - 1):
            span = slice(offsets[number], offsets[number + 1])
            word_rows = rows[span].tolist()
            frequencies = self._term_frequencies[span].tolist()
            for row, frequency in zip(word_rows, frequencies, strict=True):
                words[self.ids[row]].extend([word_of_number[number]] * frequency)
        return words

    def content_digest(self) -> str:
        """Return the SHA-256 over the ids and the words of the documents.

        The digest does not depend on the order of the vocabulary, which differs between processes.
        """
        stored_words = self._restore_words()
        return texts_digest({name: " ".join(sorted(words)) for name, words in stored_words.items()})

    def search(self, queries: Mapping[str, str], k: int, *, where: Where = None) -> Run:
        """Return the `k` best documents that share a word with each query.

        Args:
            queries: query id -> text.
            k: number of documents per query.
            where: filter of the documents' metadata.

        Returns:
            Query id -> document id -> score, best first.
        """
        check_texts_by_id("queries", queries)
        check_k(k)
        allowed = allowed_by(self.metadata, where)
        return {query_id: self._search_text(text, k, allowed) for query_id, text in queries.items()}

    def _search_text(self, text: str, k: int, allowed: Mask | None) -> dict[str, float]:
        """Return the scores of the `k` best documents for one query, best first.

        Args:
            text: text of the query.
            k: number of documents.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.
        """
        tokens = self._indexed_tokens(text)
        if not tokens:
            return {}
        scores = np.asarray(self._engine.get_scores(tokens), dtype=np.float32)
        if allowed is not None:
            # Documents with a score of 0 are not returned.
            scores = np.where(allowed, scores, np.float32(0))
        return {self.ids[position]: float(scores[position]) for position in top_positive(scores, k)}

    def document_vectors(self) -> SparseVectors:
        """Return BM25's weights of the words in the documents, as sparse vectors.

        The scores of a search are their inner products with :meth:`query_vectors`.
        """
        weights, documents, offsets = (np.asarray(self._engine.scores[name]) for name in _ARRAYS)
        postings = Postings(offsets, documents, weights, len(self.ids))
        return postings.vectors(self.ids, None, self.provenance)

    def query_vectors(self, queries: Mapping[str, str]) -> SparseVectors:
        """Return the term frequencies of queries, without words that are not in the index."""
        check_texts_by_id("queries", queries)
        number_of = self._engine.vocab_dict
        frequencies: dict[str, Counter[int]] = {}
        for query_id, text in queries.items():
            tokens = self._indexed_tokens(text)
            frequencies[query_id] = Counter(number_of[token] for token in tokens)
        return SparseVectors.from_rows(frequencies, len(self._engine.scores["indptr"]) - 1)

    def _indexed_tokens(self, text: str) -> list[str]:
        """Return the tokens of a text that are in the index."""
        return [token for token in self._tokenize(text) if token in self._engine.vocab_dict]

    def _write(self, folder: Path) -> None:
        self._engine.save(folder)
        np.save(folder / _COUNTS, self._term_frequencies)
        if self._stemming is not None:
            write_json_object(folder / _STEMMING, asdict(self._stemming))

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> BM25Index:
        """Load the engine of a saved index, and check that the installed stemmer fits.

        Args:
            folder: the folder of the index.
            manifest: the manifest of the index.
            ids: ids of the documents.

        Raises:
            DataError: if the files are damaged, or the stemmer gives other stems.
        """
        bm25s = _import_bm25s()
        # bm25s does not check its files, and would fail in a search.
        with naming_versions(folder, manifest, cls.package):
            engine = bm25s.BM25.load(folder, mmap=True)
            options = BM25Options(**manifest["options"])
            _check_postings(engine, len(ids))
            _check_vocabulary(engine)
        stemming = None
        # Earlier releases wrote no such record.
        if _STEMMING in manifest["files"]:
            stemming = Stemming.load(folder / _STEMMING)
        index = cls(
            engine=engine,
            ids=list(ids),
            term_frequencies=read_array(folder / _COUNTS, np.int32, engine.scores["data"].size),
            options=options,
            provenance=Provenance.from_dict(manifest),
            stemming=stemming,
        )
        if stemming is not None:
            index._tokenize.check_stems(stemming, folder)
        return index


def _count_terms(corpus: Mapping[str, list[str]], vocabulary: Mapping[str, int]) -> Counts:
    """Count how often each word occurs in each document that has it.

    Args:
        corpus: document id -> words of the document.
        vocabulary: word -> number of the word.

    Returns:
        The term frequencies, ordered by word and then by document, as the weights of bm25s are.
    """
    # Each occurrence is packed into one integer, which sorts by word and then by document. A word
    # that occurs several times in a document repeats its integer.
    occurrences = [
        vocabulary[word] * len(corpus) + row
        for row, words in enumerate(corpus.values())
        for word in words
    ]
    _, frequencies = np.unique(np.array(occurrences, np.int64), return_counts=True)
    return frequencies.astype(np.int32)


def _fill_without_words(engine: Any, n_documents: int) -> None:
    """Fill an engine with documents that have no words, which bm25s cannot index.

    Args:
        engine: an empty ``bm25s.BM25``.
        n_documents: number of documents.
    """
    # The vocabulary needs a word. No text has the word " ", which has no postings. "" is the empty
    # token of every engine.
    engine.vocab_dict = {" ": 0, "": 1}
    engine.unique_token_ids_set = {0, 1}
    engine.nonoccurrence_array = None
    engine.scores = {
        "data": np.empty(0, np.float32),
        "indices": np.empty(0, np.int32),
        "indptr": np.zeros(2, np.int64),
        "num_docs": n_documents,
    }


def _check_postings(engine: Any, n_documents: int) -> None:
    """Raise ``DataError`` if the weights, documents and offsets of an engine are inconsistent.

    Args:
        engine: a ``bm25s.BM25`` that was loaded from files.
        n_documents: number of documents of the index.
    """
    weights, documents, offsets = (np.asarray(engine.scores[name]) for name in _ARRAYS)
    # numpy's kinds of dtypes: "f" is a float and "i" a signed integer.
    dtype_kinds = (weights.dtype.kind, documents.dtype.kind, offsets.dtype.kind)
    are_flat = weights.ndim == documents.ndim == offsets.ndim == 1
    if dtype_kinds != ("f", "i", "i") or not are_flat or weights.size != documents.size:
        raise DataError(
            "expected float weights, as many integer documents, and integer offsets, got "
            f"{weights.dtype} {weights.shape}, {documents.dtype} {documents.shape} and "
            f"{offsets.dtype} {offsets.shape}.",
        )
    if engine.scores["num_docs"] != n_documents:
        raise DataError(f"num_docs: expected {n_documents}, got {engine.scores['num_docs']!r}.")
    check_offsets(offsets, weights.size)
    check_positions("indices", documents, n_documents)
    check_weights("data", weights)


def _check_vocabulary(engine: Any) -> None:
    """Raise ``DataError`` if the numbers of an engine's words do not match its offsets.

    Args:
        engine: a ``bm25s.BM25`` that was loaded from files.
    """
    n_words = len(engine.scores["indptr"]) - 1
    # The empty token has no postings.
    numbers = np.array([number for word, number in engine.vocab_dict.items() if word], np.int64)
    if numbers.size != n_words:
        raise DataError(f"vocab_dict: expected {n_words} words, got {numbers.size}.")
    invalid_position = first_outside(numbers, n_words)
    if invalid_position is not None:
        raise DataError(
            f"vocab_dict: expected numbers of words in [0, {n_words}), got "
            f"{numbers[invalid_position]}.",
        )
