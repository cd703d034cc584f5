"""Hits with the query's own id, which BEIR ignores, because a query may be a document too."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilefold.retrieval.common.runs import Run

_RunLike = Mapping[str, Mapping[str, float]]
_QrelsLike = Mapping[str, Mapping[str, int]]
Search = Callable[[int], Run]


def ignores_identical_ids(qrels: _QrelsLike, ignore: bool | None = None) -> bool:
    """Return whether hits with the query's own id are left out before a run is measured.

    BEIR always leaves them out: in ArguAna or Quora a query is one of the documents, and would
    retrieve itself. They must be kept if such a document is judged relevant. Then queries and
    documents were numbered independently, or the document is an answer.

    Args:
        qrels: query id -> document id -> grade.
        ignore: the caller's choice; None follows BEIR unless a query's own id is judged relevant.
    """
    if ignore is not None:
        return ignore
    return not any(grades.get(query, 0) > 0 for query, grades in qrels.items())


def queries_with_identical_ids(run: _RunLike) -> set[str]:
    """Return the queries that have a hit with their own id."""
    return {query for query, scores in run.items() if query in scores}


def without_identical_ids(run: _RunLike) -> Run:
    """Return a run without hits that have the query's own id, in the same order."""
    return {
        query: {name: score for name, score in scores.items() if name != query}
        for query, scores in run.items()
    }


def search_without_identical_ids(
    search: Search,
    document_of: Callable[[str], str],
    ignored: set[str],
) -> Search:
    """Wrap a search so that it leaves out the query's own document.

    As many results are returned as without this, by searching deeper.

    Args:
        search: returns the `n` best results of each query, best first.
        document_of: id of the document of a result, which may be a passage.
        ignored: set to which each search adds the queries whose own document was left out.

    Returns:
        A function that takes `n`, as `search` does.
    """

    def search_others(n: int) -> Run:
        depth = n + 1  # enough if the query's own document is one result
        while True:
            run = search(depth)
            others = {
                query: {name: score for name, score in scores.items() if document_of(name) != query}
                for query, scores in run.items()
            }
            ignored.update(query for query in run if len(others[query]) < len(run[query]))
            if all(len(others[query]) >= n or len(run[query]) < depth for query in run):
                return {query: dict(list(scores.items())[:n]) for query, scores in others.items()}
            # The query's own document has more passages than the extra results.
            depth *= 2

    return search_others
