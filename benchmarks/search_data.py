"""Sparse vectors made with published statistics of SPLADE's on MS MARCO, and queries for them.

Bruch, Nardini, Rulli and Venturini (SIGIR 2024) count 119 terms in a document and 43 in a query; the heaviest 50 and 10
of them hold 75% of the weights, and products of the 20 and 9 heaviest 85% of the scores of the best documents. The
numbers below were chosen to meet these (tested). What the papers do not say is ours: terms fall as Zipf's law, so that
the commonest is in two fifths of the documents with small weights, as expansions are; half of a document's terms are of
one of `documents / 200` topics, heavier; and a query asks for one document, by its heavy terms.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilefold.retrieval import SparseVectors

VOCABULARY, FINGERPRINT = 30_522, "0" * 64
TERMS, TOPIC_TERMS, TOPIC_VOCABULARY, TOPIC_DOCUMENTS = 178, 75, 400, 200
SHORTEST, COMMON_WEIGHT = 0.5, 0.45  # of the terms drawn, in a document; of a common term beside one of the topic
QUERY_TERMS, ASKED, HEAVIEST = 44, 12, 14
ASKED_WEIGHT = 8.0  # of a term of the document that is asked for, beside a common one
PIECE = 50_000  # documents made at a time, for memory
_STEP = 1 / 8192  # weights are multiples of it: a term and a weight are sorted as one integer of 32 bits

Integers = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float32]


def made_documents(count: int, seed: int) -> SparseVectors:
    """`count` vectors of about 119 terms."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(VOCABULARY).astype(np.uint32)
    topics = rng.integers(VOCABULARY, size=(1 + count // TOPIC_DOCUMENTS, TOPIC_VOCABULARY), dtype=np.uint32)
    pieces = [_piece(min(PIECE, count - start), names, topics, rng) for start in range(0, count, PIECE)]
    terms, weights, lengths = (np.concatenate(part) for part in zip(*pieces, strict=True))
    del pieces
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return SparseVectors([f"d{i}" for i in range(count)], offsets, terms, weights, VOCABULARY, FINGERPRINT)


def _piece(
    count: int, names: npt.NDArray[np.uint32], topics: npt.NDArray[np.uint32], rng: np.random.Generator
) -> tuple[npt.NDArray[np.int32], Floats, npt.NDArray[np.int64]]:
    """Terms, weights, and numbers of terms of `count` documents."""
    terms = np.empty((count, TERMS), np.uint32)
    own = rng.integers(len(topics), size=(count, 1))
    terms[:, :TOPIC_TERMS] = topics[own, _zipf(TOPIC_VOCABULARY, (count, TOPIC_TERMS), rng)]
    terms[:, TOPIC_TERMS:] = names[_zipf(VOCABULARY, (count, TERMS - TOPIC_TERMS), rng)]
    weights = np.log1p(rng.standard_exponential(terms.shape, np.float32))
    weights[:, TOPIC_TERMS:] *= COMMON_WEIGHT
    kept = rng.random((count, TERMS), np.float32) < rng.uniform(SHORTEST, 1, (count, 1))
    return _rows(terms, weights, kept)


def _rows(
    terms: npt.NDArray[np.uint32], weights: Floats, kept: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int32], Floats, npt.NDArray[np.int64]]:
    """Rows in the order of their terms, each term once, with its largest weight."""
    keys = terms << 16 | np.clip(weights / _STEP, 1, 65535).astype(np.uint32)
    keys[~kept] = np.iinfo(np.uint32).max
    keys.sort(axis=1)
    last = np.ones(keys.shape, bool)
    last[:, :-1] = keys[:, 1:] >> 16 != keys[:, :-1] >> 16
    last &= keys != np.iinfo(np.uint32).max
    flat = keys[last]
    return (flat >> 16).astype(np.int32), (flat & 65535).astype(np.float32) * np.float32(_STEP), last.sum(axis=1)


def made_queries(documents: SparseVectors, count: int, seed: int) -> SparseVectors:
    """Vectors of about 43 terms, 12 of them among the 14 heaviest of a document, and by far heavier than the others."""
    rng = np.random.default_rng([seed, 1])
    common = np.bincount(documents.indices, minlength=VOCABULARY).argsort()[::-1]
    terms = common[_zipf(VOCABULARY, (count, QUERY_TERMS), rng)].astype(np.uint32)
    weights = rng.standard_exponential(terms.shape, np.float32)
    for at, document in enumerate(rng.integers(len(documents), size=count)):
        own, theirs = documents.row(int(document))
        heavy = rng.permutation(np.argsort(-theirs)[:HEAVIEST])[:ASKED]
        terms[at, : len(heavy)] = own[heavy]
        weights[at, : len(heavy)] *= ASKED_WEIGHT * theirs[heavy]
    indices, data, lengths = _rows(terms, weights * np.float32(1 / 8), np.ones(terms.shape, bool))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return SparseVectors([f"q{i}" for i in range(count)], offsets, indices, data, VOCABULARY, FINGERPRINT)


def _zipf(size: int, shape: tuple[int, int], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Ranks from 0, with probabilities that fall as 1 / (rank + 10)."""
    ranks = 10 * np.exp(rng.random(shape, np.float32) * np.float32(np.log((size + 10) / 10))) - 10
    whole: npt.NDArray[np.int64] = np.minimum(ranks.astype(np.int64), size - 1)
    return whole
