"""Hits with the query's own id.

BEIR ignores them, because in some collections the queries are documents, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

from tilefold.retrieval.common.runs import Run

_RunLike = Mapping[str, Mapping[str, float]]
_QrelsLike = Mapping[str, Mapping[str, int]]
Search = Callable[[int], Run]


def ignores_identical_ids(qrels: _QrelsLike, choice: bool | None = None) -> bool:
    """Decide whether hits with the query's own id are ignored when a run is measured.

    BEIR always ignores them: in ArguAna or Quora a query is one of the documents, and would
    retrieve itself. If such a hit is judged relevant, though, it must count: either queries and
    documents have equal ids by coincidence, or the document answers the query.

    Args:
        qrels: query id -> document id -> grade.
        choice: the user's choice; None ignores the hits unless one of them is judged relevant.
    """
    if choice is not None:
        return choice
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


class SearchWithoutIdenticalIds:
    """A search whose results do not include the query's own document.

    Attributes:
        ignored: ids of the queries whose own document was left out of a search so far.
    """

    def __init__(self, search: Search, document_of: Callable[[str], str]) -> None:
        """Wrap a search.

        Args:
            search: function that returns the `n` best results of each query, best first.
            document_of: function that returns the document id of a result, which may be a passage.
        """
        self._search = search
        self._document_of = document_of
        self.ignored: set[str] = set()

    def __call__(self, n: int) -> Run:
        """Return the `n` best results of each query other than the query's own document.

        The search is repeated with twice as many results until enough of them remain.
        """
        # One extra result replaces the query's own document. More are needed only if several
        # passages of that document are results.
        depth = n + 1
        while True:
            run = self._search(depth)
            others = {query: self._other_results(query, scores) for query, scores in run.items()}
            self.ignored.update(query for query in run if len(others[query]) < len(run[query]))
            incomplete = [
                query
                for query in run
                # A search that returns fewer results than requested has no more of them.
                if len(others[query]) < n and len(run[query]) >= depth
            ]
            if not incomplete:
                return {query: dict(islice(scores.items(), n)) for query, scores in others.items()}
            depth *= 2

    def _other_results(self, query: str, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the results, in the same order, that are not the query's own document."""
        return {
            result: score for result, score in scores.items() if self._document_of(result) != query
        }
