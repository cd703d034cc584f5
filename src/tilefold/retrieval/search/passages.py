"""Documents ranked by their best passage (MaxP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilefold._internal.arguments import check_mapping
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.passages import document_of
from tilefold.retrieval.search.fusion import check_scores

__all__ = ["BestPassages", "best_passages"]

# Number of passages that the first search retrieves for each document that is needed.
PASSAGES_PER_DOCUMENT = 4
# Factor by which the number of passages grows if they belong to too few documents.
GROWTH = 4

BestPassages = dict[str, dict[str, str]]
"""Query id -> document id -> id of the document's best passage."""


def best_passages(run: Mapping[str, Mapping[str, float]]) -> tuple[Run, BestPassages]:
    """Turn a run of passages into a run of documents, scored by their best passage (MaxP).

    Args:
        run: query id -> passage id -> score.

    Returns:
        The run of documents, best first, and the best passage of each document.

    Raises:
        TypeError: if `run` is not a mapping of queries to mappings, or an id is not a string.
        ValueError: if a score is not a number.
        DataError: if an id is not the id of a passage.

    Examples:
        >>> run = {"q1": {"cards#1:0-18": 0.4, "cards#2:19-43": 0.9, "pin#1:0-16": 0.5}}
        >>> documents, passages = best_passages(run)
        >>> documents
        {'q1': {'cards': 0.9, 'pin': 0.5}}
        >>> passages["q1"]["cards"]
        'cards#2:19-43'
    """
    check_mapping("run", run, "query id -> scores by passage")
    for query, scores in run.items():
        check_scores("run", query, scores, finite=False)
    return _best_passages(run)


def _best_passages(run: Mapping[str, Mapping[str, float]]) -> tuple[Run, BestPassages]:
    """Score each document by its best passage, without checks of the run.

    Args:
        run: query id -> passage id -> score.

    Returns:
        The run of documents, best first, and query id -> document id -> id of its best passage.
    """
    documents = Run()
    best: BestPassages = {}
    for query, scores in run.items():
        document_scores: dict[str, float] = {}
        passages: dict[str, str] = {}
        # By descending score, the first passage of a document is its best one.
        for passage in sorted(scores, key=lambda passage: -scores[passage]):
            document = document_of(passage)
            if document not in document_scores:
                document_scores[document] = scores[passage]
                passages[document] = passage
        documents[query] = document_scores
        best[query] = passages
    return documents, best


def search_documents(
    search_passages: Callable[[int], Run],
    k: int,
) -> tuple[Run, BestPassages]:
    """Return the `k` best documents of each query, searched through their passages.

    The number of passages grows until they belong to `k` documents, or there are no more passages.
    Passages that were not retrieved score no higher than retrieved ones, so the ranking is the same
    as over all passages.

    Args:
        search_passages: a function that maps a number n to the n best passages of each query, best
            first.
        k: the number of documents per query.

    Returns:
        The run of documents, best first, and the best passage of each retrieved document, also of
        documents below the `k` best.
    """
    n_passages = PASSAGES_PER_DOCUMENT * k
    while True:
        passages = search_passages(n_passages)
        documents, best = _best_passages(passages)
        # A search that returns fewer passages than requested has no more of them.
        is_complete = all(
            len(documents[query]) >= k or len(scores) < n_passages
            for query, scores in passages.items()
        )
        if is_complete:
            break
        n_passages *= GROWTH
    run = {query: dict(list(scores.items())[:k]) for query, scores in documents.items()}
    return run, best


def as_passages(
    run: Mapping[str, Mapping[str, float]],
    best_passages_of_stages: Sequence[BestPassages],
) -> Run:
    """Replace the documents of a run by their best passages.

    Args:
        run: query id -> document id -> score.
        best_passages_of_stages: the best passages of each searched index, query id -> document id
            -> passage id. The first index that has a passage of the document decides. A document
            without a passage in any of them keeps its id.

    Returns:
        Query id -> passage id -> score.
    """

    def passage_of(query: str, document: str) -> str:
        for best_passages_of_stage in best_passages_of_stages:
            passage = best_passages_of_stage.get(query, {}).get(document)
            if passage is not None:
                return passage
        return document

    return {
        query: {passage_of(query, document): score for document, score in scores.items()}
        for query, scores in run.items()
    }
