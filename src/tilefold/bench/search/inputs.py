"""Sparse vectors with the statistics of SPLADE, made from nothing, and queries for them.

A document has about 120 terms of 30,522, half of them from one Zipf distribution, half from one of 400 topics; a query
has 30, of which 20 are among the heaviest of one document. Topics made so are harder for Seismic than real texts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilefold.retrieval import SparseVectors

VOCABULARY, TERMS, TOPICS, TOPIC_TERMS = 30_522, 120, 400, 1_500
QUERY_TERMS, FROM_DOCUMENT = 30, 20
FINGERPRINT = "0" * 64
PIECE = 100_000  # documents made at a time, for memory


def made_documents(count: int, seed: int) -> SparseVectors:
    """`count` vectors of about 120 terms; a repeated term counts once."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(VOCABULARY)
    topics = np.stack([rng.permutation(VOCABULARY)[:TOPIC_TERMS] for _ in range(TOPICS)])
    indices, weights, lengths = [], [], []
    for start in range(0, count, PIECE):
        terms, values, counts = _piece(min(PIECE, count - start), names, topics, rng)
        indices.append(terms)
        weights.append(values)
        lengths.append(counts)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
    ids = [f"d{i}" for i in range(count)]
    return SparseVectors(ids, indptr, np.concatenate(indices), np.concatenate(weights), VOCABULARY, FINGERPRINT)


def _piece(
    count: int, names: npt.NDArray[np.int64], topics: npt.NDArray[np.int64], rng: np.random.Generator
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Terms, weights, and numbers of terms of `count` documents."""
    half = TERMS // 2
    common = names[_zipf(VOCABULARY, (count, half), rng)]
    own = topics[rng.integers(TOPICS, size=(count, 1)), _zipf(TOPIC_TERMS, (count, half), rng)]
    terms = np.concatenate([own, common], axis=1)
    weights = np.log1p(rng.exponential(1.0, terms.shape)).astype(np.float32)
    weights[:, :half] *= 1.5
    flat, first = np.unique((np.arange(count)[:, None] * VOCABULARY + terms).ravel(), return_index=True)
    counts = np.bincount(flat // VOCABULARY, minlength=count)
    return (flat % VOCABULARY).astype(np.int32), weights.ravel()[first], counts


def made_queries(documents: SparseVectors, count: int, seed: int) -> SparseVectors:
    """Vectors of up to 30 terms, 20 of them among the 40 heaviest of a document."""
    rng = np.random.default_rng(seed)
    rows: dict[str, dict[int, float]] = {}
    for at, document in enumerate(rng.integers(len(documents.ids), size=count)):
        terms, weights = documents.row(int(document))
        heavy = rng.permutation(terms[np.argsort(-weights)[: 2 * FROM_DOCUMENT]])[:FROM_DOCUMENT]
        other = rng.integers(VOCABULARY, size=QUERY_TERMS - FROM_DOCUMENT)
        values = np.log1p(rng.exponential(1.0, QUERY_TERMS)).tolist()
        rows[f"q{at}"] = dict(zip([*heavy.tolist(), *other.tolist()], values, strict=False))
    return SparseVectors.from_rows(rows, VOCABULARY, FINGERPRINT)


def _zipf(size: int, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Ranks from 0, with probabilities that fall as 1 / (rank + 10)."""
    mass = np.cumsum(1 / (np.arange(size) + 10))
    ranks: npt.NDArray[np.int64] = np.minimum(np.searchsorted(mass, rng.random(shape) * mass[-1]), size - 1)
    return ranks
