"""BM25 over bm25s: the lexical baseline."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilefold.retrieval._files import require
from tilefold.retrieval._ranking import check_k, top_positive
from tilefold.retrieval.fusion import Run

__all__ = ["BM25Index", "tokenize"]

# Scripts that are written without spaces: Thai, Lao, Khmer, kana, CJK ideographs; cut into character pairs.
_UNSPACED = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]+|[^\W_{_UNSPACED}]+")
_PAIRED = re.compile(rf"[{_UNSPACED}]")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def tokenize(text: str, stopwords: frozenset[str] = frozenset()) -> list[str]:
    """Lower-cased words of at least two characters without `stopwords`, English plurals made singular.

    Identifiers are cut at underscores and at capitals (``move_to_end``, ``OrderedDict``). Runs of a script
    that is written without spaces give overlapping pairs of characters instead of words.
    """
    tokens: list[str] = []
    for match in _WORD.finditer(_CAMEL.sub(" ", text).lower()):
        word = match.group()
        if _PAIRED.match(word):
            tokens.extend(word[i : i + 2] for i in range(max(1, len(word) - 1)))
        elif len(word) > 1 and word not in stopwords:
            tokens.append(_singular(word))
    return tokens


def _singular(word: str) -> str:
    """The S-stemmer of Harman (JASIS 1991)."""
    if len(word) < 4 or word[-1] != "s":
        return word
    if word.endswith("ies") and not word.endswith(("eies", "aies")):
        return word[:-3] + "y"
    if word.endswith("es") and not word.endswith(("aes", "ees", "oes")):
        return word[:-1]
    return word if word.endswith(("us", "ss")) else word[:-1]


@contextmanager
def _without_jax() -> Iterator[None]:
    """Import as if JAX were absent: where it is installed, bm25s runs it at import, and it takes 75% of a free GPU.

    The scores here come from numpy. A JAX that was already imported is left as it is.
    """
    hide = "jax" not in sys.modules
    if hide:
        sys.modules["jax"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hide:
            del sys.modules["jax"]


class BM25Index:
    """BM25 (Lucene's variant) in memory, with English stop words left out."""

    def __init__(self, engine: Any, ids: list[str], stopwords: frozenset[str]) -> None:
        self._engine, self._ids, self._stopwords = engine, ids, stopwords

    @classmethod
    def build(cls, documents: Mapping[str, str], *, k1: float = 1.5, b: float = 0.75) -> BM25Index:
        """Index ``{document id: contents}``.

        Raises:
            ValueError: there is no document, or no document has a word.
        """
        with _without_jax():
            bm25s = require("bm25s", "bm25s", "BM25")
        if not documents:
            raise ValueError("documents: expected at least one, got none.")
        stopwords = frozenset(require("bm25s.stopwords", "bm25s", "BM25").STOPWORDS_EN)
        corpus = [tokenize(text, stopwords) for text in documents.values()]
        if not any(corpus):
            raise ValueError("documents: expected at least one with a word, got only empty ones.")
        engine = bm25s.BM25(k1=k1, b=b)
        engine.index(corpus, show_progress=False)
        return cls(engine, list(documents), stopwords)

    @property
    def n_documents(self) -> int:
        return len(self._ids)

    def search(self, queries: Mapping[str, str], k: int) -> Run:
        """The at most `k` best documents for each query; documents that share no word are not returned."""
        check_k(k)
        run: Run = {}
        for query_id, text in queries.items():
            tokens = [t for t in tokenize(text, self._stopwords) if t in self._engine.vocab_dict]
            if not tokens:
                run[query_id] = {}
                continue
            scores = np.asarray(self._engine.get_scores(tokens), dtype=np.float32)
            run[query_id] = {self._ids[i]: float(scores[i]) for i in top_positive(scores, k)}
        return run
