"""Hard negatives of judged queries, drawn from the ranking of any retriever."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilefold._internal.arguments import check_instance, check_mapping, list_of
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.files import check_text_ids
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data.rows import TrainingRows, check_rows

__all__ = ["FalseNegatives", "Window", "drop_false_negatives", "mine_negatives"]


@dataclass(frozen=True)
class Window:
    """Up to `count` negatives, 1 or more, of the ranks `first` to `last`, from 1, which count
    judged documents too.
    """

    first: int
    last: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ValueError(
                f"ranks: expected FIRST-LAST with 1 <= FIRST <= LAST, got {self.first}-{self.last}.",
            )
        if self.count < 1:
            raise ValueError(f"count: expected at least 1 negative, got {self.count}.")


@dataclass(frozen=True)
class FalseNegatives:
    """A filter of documents that score so close to a query's best judged one that they may be
    relevant themselves.

    A negative is kept if its score is at most ``s - margin`` and at most ``max_share * s``
    (NV-Retriever's TopK-PercPos, arXiv 2407.15831), where s is the highest score of the query's
    judged-relevant documents. Where none of those was retrieved, all that was retrieved scored
    higher, and nothing is kept. A negative margin, or a share outside of (0, 1], is a
    ``ValueError``.
    """

    margin: float | None = None
    max_share: float | None = None

    def __post_init__(self) -> None:
        if self.margin is not None and not 0 <= self.margin < math.inf:
            raise ValueError(
                f"margin: expected a finite number of at least 0, got {self.margin!r}.",
            )
        if self.max_share is not None and not 0 < self.max_share <= 1:
            raise ValueError(
                f"max_score_share: expected a number in (0, 1], got {self.max_share!r}.",
            )

    def limit(self, relevant: Iterable[float], query: str) -> float:
        """The highest score that a negative of `query` may have, given the scores of its relevant
        documents.
        """
        if self.margin is None and self.max_share is None:
            return math.inf
        best = max((score for score in relevant if not math.isnan(score)), default=-math.inf)
        if best == -math.inf:
            return best
        if self.max_share is not None and best <= 0:
            why = f"the best relevant document of query {query!r} scores {best:g}, and a share of that is no limit"
            raise ValueError(
                f"max_score_share: {why}. Filter by margin, or by scores that are positive.",
            )
        return min(
            math.inf if self.margin is None else best - self.margin,
            math.inf if self.max_share is None else best * self.max_share,
        )


@dataclass
class Mined:
    """Rows as they are found, and numbers of queries and candidates that were left out."""

    queries: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # rows of each query
    found: list[tuple[str, bool, int, float]] = field(
        default_factory=list,
    )  # document, relevant, rank, score
    short: int = 0  # queries with fewer negatives than asked for
    without: int = 0  # queries without any, which are left out
    filtered: int = 0  # candidates that may be false negatives
    same_id: int = 0  # candidates with the id of the query, which is a document itself
    same_text: int = 0  # candidates whose text is the query's or a relevant document's

    def rows(self, made_by: Mapping[str, object]) -> TrainingRows:
        names, relevant, rank, score = (
            zip(*self.found, strict=True) if self.found else ((), (), (), ())
        )
        documents = {name: at for at, name in enumerate(dict.fromkeys(names))}
        document = np.array([documents[name] for name in names], np.int32)
        arrays = (
            document,
            np.array(relevant, bool),
            np.array(rank, np.int32),
            np.array(score, np.float32),
        )
        return TrainingRows(
            self.queries,
            list(documents),
            offsets_of(self.counts),
            *arrays,
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
    """Draw negatives for the queries of `split`, and list its relevant documents beside them.

    A document that any split judges relevant for the query is never a negative, nor is one with the
    text of such a document or of the query, one with the query's id, or one that `false_negatives`
    leave out. Windows draw
    in their order, without what earlier ones drew; a window with more candidates than it wants
    draws at random, for each query from a generator of its own (`seed` and the query's id), so that
    neither the order nor the other queries change the outcome. Negatives come in the order of their
    ranks, after the relevant documents.

    `rankings` are query ids with document id -> score, one after the other, so that not all need be
    in memory; equal scores keep their order, and queries without a relevant document in `split` are
    skipped. No window, an unknown split, or a share of a score that is not positive is a
    ``ValueError``; a document that is not in the collection a ``DataError``.
    """
    check_instance("collection", collection, Collection, "load_collection(path)")
    windows = list_of("windows", windows)
    for window in windows:
        check_instance("windows", window, Window, "[Window(first, last, count)]")
    if not windows:
        raise ValueError("windows: expected at least one, got an empty list.")
    judged, mined, false_negatives = (
        collection.split_qrels(split),
        Mined(),
        false_negatives or FalseNegatives(),
    )
    for query, scores in _pairs(rankings):
        check_mapping("rankings", scores, "document id -> score")
        check_text_ids("rankings", [query, *scores])
        if not (positives := [name for name, grade in judged.get(query, {}).items() if grade > 0]):
            continue
        ranked = sorted(scores.items(), key=lambda item: -item[1])
        drawn = _draw(
            _candidates(mined, query, ranked, collection, false_negatives),
            windows,
            seed,
            query,
        )
        mined.without += not drawn
        mined.short += 0 < len(drawn) < sum(window.count for window in windows)
        if drawn:
            place = {name: (rank, score) for rank, (name, score) in enumerate(ranked, start=1)}
            mined.queries.append(query)
            mined.counts.append(len(positives) + len(drawn))
            mined.found += [(name, True, *place.get(name, (0, math.nan))) for name in positives]
            mined.found += [
                (ranked[rank - 1][0], False, rank, ranked[rank - 1][1]) for rank in drawn
            ]
    return mined


def _pairs(rankings: object) -> Iterator[tuple[str, Mapping[str, float]]]:
    """The pairs of a query and its scores, one after the other; ``TypeError`` for anything else."""
    pairs = rankings.items() if isinstance(rankings, Mapping) else rankings
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise TypeError(
            f"rankings: expected pairs of a query and its scores, got {type(rankings).__name__}; pass "
            "run.items().",
        )
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"rankings: expected pairs of a query and its scores, got {pair!r:.60}; pass "
                "run.items().",
            )
        yield pair[0], pair[1]


def _candidates(
    mined: Mined,
    query: str,
    ranked: list[tuple[str, float]],
    collection: Collection,
    false_negatives: FalseNegatives,
) -> list[int]:
    """Ranks, from 1, that can be negatives."""
    splits = (judged.get(query, {}) for judged in collection.qrels.values())
    excluded = {name for grades in splits for name, grade in grades.items() if grade > 0}
    texts = {collection.documents[name].contents.strip() for name in excluded} | {
        collection.queries[query].strip(),
    }
    limit = false_negatives.limit((score for name, score in ranked if name in excluded), query)
    candidates = []
    for rank, (name, score) in enumerate(ranked, start=1):
        if name in excluded:
            continue
        if name not in collection.documents:
            stray = f"document {name!r} of query {query!r} is not in {collection.name}"
            raise DataError(f"rankings: {stray}. Give the collection that was searched.")
        if name == query:
            mined.same_id += 1
        elif score > limit:
            mined.filtered += 1
        elif collection.documents[name].contents.strip() in texts:
            mined.same_text += 1
        else:
            candidates.append(rank)
    return candidates


def _draw(candidates: list[int], windows: Sequence[Window], seed: int, query: str) -> list[int]:
    """The ranks that the windows draw, ascending."""
    generator = np.random.default_rng([seed, zlib.crc32(query.encode("utf-8", "surrogatepass"))])
    drawn: set[int] = set()
    for window in windows:
        left = [
            rank for rank in candidates if window.first <= rank <= window.last and rank not in drawn
        ]
        if len(left) > window.count:
            left = generator.choice(left, window.count, replace=False).tolist()
        drawn.update(left)
    return sorted(drawn)


def drop_false_negatives(rows: TrainingRows, false_negatives: FalseNegatives) -> TrainingRows:
    """The rows without negatives that score too high, by the teachers' score if there is one, else
    the retriever's.

    Queries that lose all their negatives are left out; ``ValueError`` where no row is left.
    """
    check_rows("rows", rows)
    keep = rows.relevant.copy()
    for group, low in zip(rows.groups(), rows.offsets[:-1].tolist(), strict=True):
        scores = group.retrieved if group.target is None else group.target
        limit = false_negatives.limit(scores[group.relevant].tolist(), group.query)
        kept = group.relevant | (scores <= np.float32(limit))
        keep[low : low + len(kept)] = kept if kept.sum() > group.relevant.sum() else False
    if not keep.any():
        given = f"{false_negatives.margin!r} and {false_negatives.max_share!r}; relax one"
        got = f"0 of {int((~rows.relevant).sum())} with {given}"
        raise ValueError(f"margin, max_score_share: expected that some negative passes, got {got}.")
    return rows.take(keep)
