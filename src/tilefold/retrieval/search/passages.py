"""Documents ranked by their best passage (MaxP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilefold._internal.arguments import check_mapping
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.passages import document_of

__all__ = ["BestPassages", "best_passages"]

# Passages that are asked for at first, for each document that is wanted.
PASSAGES_PER_DOCUMENT = 4
# Factor on the number of passages where the first ones belong to too few documents.
GROWTH = 4

BestPassages = dict[str, dict[str, str]]
"""Query id -> document id -> id of the document's best passage."""


def best_passages(run: Mapping[str, Mapping[str, float]]) -> tuple[Run, BestPassages]:
    """Turn a run of passages into one of documents, scored by their best passage (MaxP).

    Args:
        run: query id -> passage id -> score.

    Returns:
        The run of documents, best first, and the best passage of each of them.

    Raises:
        TypeError: if `run` is not a mapping.
        DataError: if an id is not one of a passage.
    """
    check_mapping("run", run, "query id -> scores by passage")
    documents = Run()
    best: BestPassages = {}
    for query, scores in run.items():
        document_scores: dict[str, float] = {}
        passages: dict[str, str] = {}
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
    stage: str,
    best_by_stage: dict[str, BestPassages] | None,
) -> Run:
    """Return the `k` best documents of each query, searched through their passages.

    More and more passages are asked for, until they belong to `k` documents or there are no more.
    Passages that were not returned score no higher than those that were, so the ranking equals that
    over all passages.

    Args:
        search_passages: maps a number n to the n best passages of each query, best first.
        k: the number of documents per query.
        stage: name of the retriever, under which its best passages are stored.
        best_by_stage: receives the best passages of each document. ``None`` if the index holds
            whole documents, whose `k` best are then returned.
    """
    if best_by_stage is None:
        return search_passages(k)
    n_passages = PASSAGES_PER_DOCUMENT * k
    while True:
        passages = search_passages(n_passages)
        documents, best = best_passages(passages)
        complete = all(
            len(documents[query]) >= k or len(scores) < n_passages
            for query, scores in passages.items()
        )
        if complete:
            break
        n_passages *= GROWTH
    stage_best = best_by_stage.setdefault(stage, {})
    for query, passage_of in best.items():
        stage_best.setdefault(query, {}).update(passage_of)
    return {query: dict(list(scores.items())[:k]) for query, scores in documents.items()}


def as_passages(
    run: Mapping[str, Mapping[str, float]],
    best: Sequence[BestPassages],
) -> Run:
    """Replace the documents of a run by their best passages.

    Args:
        run: query id -> document id -> score.
        best: best passages by stage. The first one that knows a document decides; a document that
            none of them knows keeps its id.
    """

    def passage_of(query: str, document: str) -> str:
        for passages in best:
            passage = passages.get(query, {}).get(document)
            if passage is not None:
                return passage
        return document

    return {
        query: {passage_of(query, document): score for document, score in scores.items()}
        for query, scores in run.items()
    }
