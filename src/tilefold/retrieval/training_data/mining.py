"""Hard negatives for judged queries, drawn from the rankings of any retriever."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tilefold._internal.arguments import (
    ArgumentError,
    check_instance,
    check_integer,
    check_mapping,
    check_number,
    list_of,
)
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.files import check_text_ids
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data.rows import TrainingRows, check_rows

__all__ = ["FalseNegatives", "Window", "drop_false_negatives", "mine_negatives"]


@dataclass(frozen=True)
class Window:
    """A range of ranks from which negatives are drawn.

    Attributes:
        first, last: first and last rank, from 1. Judged documents also have ranks.
        count: largest number of negatives to draw.

    Raises:
        TypeError: if a value is not an integer.
        ValueError: if the ranks are not a range, or the count is below 1.
    """

    first: int
    last: int
    count: int

    def __post_init__(self) -> None:
        """Raise an error if a value is not an integer, or out of range."""
        for name in ("first", "last", "count"):
            check_integer(name, getattr(self, name))
        if not 1 <= self.first <= self.last:
            raise ArgumentError(
                "ranks",
                f"expected FIRST-LAST with 1 <= FIRST <= LAST, got {self.first}-{self.last}.",
            )
        if self.count < 1:
            raise ArgumentError("count", f"expected at least 1 negative, got {self.count}.")


@dataclass(frozen=True)
class FalseNegatives:
    """Filter of documents that may be relevant because of their high score.

    Let s be the highest score of the query's relevant documents. A negative is kept if its score is
    at most ``s - margin`` and at most ``max_share * s`` (NV-Retriever's TopK-PercPos, arXiv
    2407.15831). If no relevant document was retrieved, all retrieved documents scored higher, and
    none of them is kept.

    Attributes:
        margin: smallest difference from s, at least 0; None for no such condition.
        max_share: largest share of s, in (0, 1]; None for no such condition.

    Raises:
        TypeError: if a value is neither a number nor None.
        ValueError: if a number is out of range.

    Examples:
        >>> limits = FalseNegatives(max_share=0.95)
        >>> limits.limit([10.0], "q1")  # negatives with a higher score are left out
        9.5
    """

    margin: float | None = None
    max_share: float | None = None

    def __post_init__(self) -> None:
        """Raise an error if the margin is negative or infinite, or the share is not in (0, 1]."""
        for name in ("margin", "max_share"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        if self.margin is not None and not 0 <= self.margin < math.inf:
            raise ArgumentError(
                "margin",
                f"expected a finite number of at least 0, got {self.margin!r}.",
            )
        if self.max_share is not None and not 0 < self.max_share <= 1:
            raise ArgumentError(
                "max_share",
                f"expected a number in (0, 1], got {self.max_share!r}.",
            )

    def limit(self, relevant: Iterable[float], query: str) -> float:
        """Return the highest score that a negative of a query may have.

        Args:
            relevant: scores of the relevant documents; NaN if a document was not retrieved.
            query: id of the query, for error messages.

        Raises:
            ValueError: if `max_share` is set, and the highest relevant score is not positive.
        """
        if self.margin is None and self.max_share is None:
            return math.inf
        retrieved_scores = [score for score in relevant if not math.isnan(score)]
        highest = max(retrieved_scores, default=-math.inf)
        if highest == -math.inf:
            return -math.inf  # without a relevant score, no negative is safe
        limits = []
        if self.margin is not None:
            limits.append(highest - self.margin)
        if self.max_share is not None:
            if highest <= 0:
                raise ArgumentError(
                    "max_share",
                    f"needs a positive score, but the best relevant document of query {query!r} "
                    f"scores {highest:g}. Filter by margin, or by scores that are positive.",
                )
            limits.append(highest * self.max_share)
        return min(limits)


class _MinedRow(NamedTuple):
    """A document that was mined for a query.

    Attributes:
        document_id: id of the document.
        relevant: whether the document is relevant; otherwise it is a negative.
        rank: rank in the retriever's list, from 1; 0 if the document was not retrieved.
        retrieval_score: score of the retriever; NaN if the document was not retrieved.
    """

    document_id: str
    relevant: bool
    rank: int
    retrieval_score: float


@dataclass
class Mined:
    """Mined rows, and counts of queries and candidates that were left out.

    Attributes:
        queries: ids of the queries with negatives.
        row_counts: number of rows of each of these queries.
        mined_rows: rows of all queries, one query after the other.
        short: number of queries with fewer negatives than requested.
        without: number of queries without any negative, which are left out.
        filtered: number of candidates left out because they may be false negatives.
        same_id: number of candidates left out because they are the document with the query's id, or
            a passage of it.
        same_text: number of candidates left out because they have the text of the query or of a
            relevant document.
    """

    queries: list[str] = field(default_factory=list)
    row_counts: list[int] = field(default_factory=list)
    mined_rows: list[_MinedRow] = field(default_factory=list)
    short: int = 0
    without: int = 0
    filtered: int = 0
    same_id: int = 0
    same_text: int = 0

    def rows(self, made_by: Mapping[str, object]) -> TrainingRows:
        """Return the mined rows as a table of training rows.

        Args:
            made_by: JSON object that describes how the rows were made.
        """
        documents = list(dict.fromkeys(row.document_id for row in self.mined_rows))
        position_of_document = {document: position for position, document in enumerate(documents)}
        return TrainingRows(
            queries=self.queries,
            documents=documents,
            offsets=offsets_of(self.row_counts),
            document=np.array(
                [position_of_document[row.document_id] for row in self.mined_rows],
                np.int32,
            ),
            relevant=np.array([row.relevant for row in self.mined_rows], bool),
            rank=np.array([row.rank for row in self.mined_rows], np.int32),
            retrieved=np.array([row.retrieval_score for row in self.mined_rows], np.float32),
            made_by=dict(made_by),
        )


def mine_negatives(
    rankings: Iterable[tuple[str, Mapping[str, float]]],
    collection: Collection,
    split: str,
    windows: Sequence[Window],
    *,
    seed: int = 0,
    false_negatives: FalseNegatives | None = None,
) -> Mined:
    """Draw negatives for the judged queries of a split, and list their relevant documents.

    A document cannot be a negative if it is relevant for the query in any split, if it has the text
    of the query or of a relevant document, if it has the id of the query or is a passage of the
    document with that id, or if `false_negatives` excludes it. The relevant documents of a query
    come first, and then its negatives in the order of their ranks.

    Args:
        rankings: pairs of a query id and document id -> score. They are read one after another, so
            they need not fit in memory. Documents with equal scores keep their order. Queries
            without a relevant document in `split` are skipped.
        collection: documents, queries and judgements.
        split: name of the judgements.
        windows: ranges of ranks, from which negatives are drawn in turn. A window with more
            candidates than its count draws at random, without those that earlier windows drew.
        seed: seed of the draws. Each query has its own generator, so that the draws of a query do
            not depend on other queries.
        false_negatives: filter of candidates; ``None`` for no filter.

    Raises:
        ValueError: if there is no window, the split is unknown, or the filter needs positive
            scores.
        DataError: if a ranked document is not in the collection.

    Examples:
        >>> from tilefold.retrieval import BM25Index, Window, load_collection
        >>> collection = load_collection("bank")
        >>> index = BM25Index.build(collection.contents())
        >>> run = index.search(collection.split_queries("train"), k=10)
        >>> mined = mine_negatives(run.items(), collection, "train", [Window(1, 10, 2)])
        >>> [(row.document_id, row.relevant) for row in mined.mined_rows]
        [('cards', True), ('joint', False)]
    """
    check_instance("collection", collection, Collection, "load_collection(path)")
    windows = _check_windows(windows)
    check_integer("seed", seed)
    if false_negatives is not None:
        check_instance(
            "false_negatives",
            false_negatives,
            FalseNegatives,
            "FalseNegatives(margin)",
        )
    qrels = collection.split_qrels(split)
    n_requested = sum(window.count for window in windows)
    false_negatives = false_negatives or FalseNegatives()
    mined = Mined()
    for query, scores in _check_rankings(rankings):
        check_mapping("rankings", scores, "document id -> score")
        check_text_ids("rankings", [query, *scores])
        relevant = [document for document, grade in qrels.get(query, {}).items() if grade > 0]
        if not relevant:
            continue
        ranking = sorted(scores.items(), key=lambda item: -item[1])
        candidates = _candidate_ranks(mined, query, ranking, collection, false_negatives)
        negative_ranks = _draw(candidates, windows, seed, query)
        if not negative_ranks:
            mined.without += 1
            continue
        if len(negative_ranks) < n_requested:
            mined.short += 1
        _add_query(mined, query, relevant, ranking, negative_ranks)
    return mined


def _check_windows(windows: Sequence[Window]) -> list[Window]:
    """Return windows as a list, or raise an error if there is none or one has another type."""
    windows = list_of("windows", windows)
    for window in windows:
        check_instance("windows", window, Window, "[Window(first, last, count)]")
    if not windows:
        raise ArgumentError("windows", "expected at least one, got an empty list.")
    return windows


def _add_query(
    mined: Mined,
    query: str,
    relevant: Sequence[str],
    ranking: Sequence[tuple[str, float]],
    negative_ranks: Sequence[int],
) -> None:
    """Add the relevant documents of a query, and then its negatives.

    Args:
        mined: the mined rows, extended in place.
        query: id of the query.
        relevant: ids of the relevant documents.
        ranking: retrieved documents and scores, best first.
        negative_ranks: ranks, from 1, of the negatives in the ranking.
    """
    mined.queries.append(query)
    mined.row_counts.append(len(relevant) + len(negative_ranks))
    rank_of_document = {document: rank for rank, (document, _) in enumerate(ranking, start=1)}
    scores = dict(ranking)
    for document in relevant:
        row = _MinedRow(
            document_id=document,
            relevant=True,
            rank=rank_of_document.get(document, 0),
            retrieval_score=scores.get(document, math.nan),
        )
        mined.mined_rows.append(row)
    for rank in negative_ranks:
        document, score = ranking[rank - 1]
        row = _MinedRow(
            document_id=document,
            relevant=False,
            rank=rank,
            retrieval_score=score,
        )
        mined.mined_rows.append(row)


def _check_rankings(rankings: object) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield the rankings of queries, after a check of their type.

    Args:
        rankings: query id -> scores, or an iterable of pairs of a query id and its scores.

    Yields:
        The id of a query, and its scores.

    Raises:
        TypeError: if `rankings` is something else.
    """
    expected = "rankings: expected pairs of a query and its scores"
    pairs = rankings.items() if isinstance(rankings, Mapping) else rankings
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise TypeError(f"{expected}, got {type(rankings).__name__}; pass run.items().")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{expected}, got {pair!r:.60}; pass run.items().")
        query, scores = pair
        yield query, scores


def _candidate_ranks(
    mined: Mined,
    query: str,
    ranking: Sequence[tuple[str, float]],
    collection: Collection,
    false_negatives: FalseNegatives,
) -> list[int]:
    """Find the ranks of the retrieved documents that can be negatives of a query.

    Relevant documents are left out, and so are the document with the id of the query, documents
    that score too high, and documents with the text of the query or of a relevant document.

    Args:
        mined: the mined rows, whose counts of candidates that were left out are updated.
        query: id of the query.
        ranking: retrieved documents and scores, best first.
        collection: documents, queries and judgements.
        false_negatives: filter of candidates.

    Returns:
        Ranks of the candidates, from 1, ascending.

    Raises:
        DataError: if a document is not in the collection.
    """
    relevant: set[str] = set()
    for qrels in collection.qrels.values():
        relevant.update(document for document, grade in qrels.get(query, {}).items() if grade > 0)
    excluded_texts = {collection.queries[query].strip()}
    excluded_texts.update(collection.documents[document].contents.strip() for document in relevant)
    limit = false_negatives.limit(
        (score for document, score in ranking if document in relevant),
        query,
    )
    ranks = []
    for rank, (document, score) in enumerate(ranking, start=1):
        if document in relevant:
            continue
        if document not in collection.documents:
            raise DataError(
                f"rankings: document {document!r} of query {query!r} is not in {collection.name}. "
                "Pass the collection that was searched.",
            )
        if collection.whole_document_of(document) == query:
            mined.same_id += 1
        elif score > limit:
            mined.filtered += 1
        elif collection.documents[document].contents.strip() in excluded_texts:
            mined.same_text += 1
        else:
            ranks.append(rank)
    return ranks


def _draw(ranks: list[int], windows: Sequence[Window], seed: int, query: str) -> list[int]:
    """Draw the ranks of a query's negatives at random, the same ranks for the same seed.

    Args:
        ranks: ranks of the documents that can be negatives.
        windows: ranges of ranks, each with the number of ranks to draw.
        seed: seed of all queries, which is combined with a digest of the query's id.
        query: id of the query.

    Returns:
        The drawn ranks, ascending. All ranks of a window are drawn if it has too few.
    """
    query_digest = zlib.crc32(query.encode("utf-8", "surrogatepass"))
    generator = np.random.default_rng([seed, query_digest])
    drawn: set[int] = set()
    for window in windows:
        available = [
            rank for rank in ranks if window.first <= rank <= window.last and rank not in drawn
        ]
        if len(available) > window.count:
            available = generator.choice(available, window.count, replace=False).tolist()
        drawn.update(available)
    return sorted(drawn)


def drop_false_negatives(rows: TrainingRows, false_negatives: FalseNegatives) -> TrainingRows:
    """Return training rows without the negatives that score too high.

    Rows with scores of teachers are filtered by the teachers' combined score, and other rows by the
    retriever's score. Queries that lose all their negatives are left out.

    Args:
        rows: training rows, with or without scores of teachers.
        false_negatives: limits of a negative's score, relative to the relevant documents.

    Raises:
        ValueError: if no negative is left.
    """
    check_rows("rows", rows)
    keep = np.zeros(len(rows), bool)
    for query_rows, start in zip(rows.groups(), rows.offsets[:-1].tolist(), strict=True):
        scores = query_rows.retrieved if query_rows.target is None else query_rows.target
        limit = false_negatives.limit(scores[query_rows.relevant].tolist(), query_rows.query)
        keep_of_query = query_rows.relevant | (scores <= np.float32(limit))
        has_negatives = keep_of_query.sum() > query_rows.relevant.sum()
        if has_negatives:
            keep[start : start + len(keep_of_query)] = keep_of_query
    if not keep.any():
        n_negatives = int((~rows.relevant).sum())
        raise ArgumentError(
            ("margin", "max_share"),
            f"none of {n_negatives} negatives passes margin={false_negatives.margin!r} and "
            f"max_share={false_negatives.max_share!r}; relax one of them.",
        )
    return rows.take(keep)
