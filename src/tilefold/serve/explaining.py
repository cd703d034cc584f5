"""Why a document was found: terms with their parts of the score, and where they stand in the texts."""

from __future__ import annotations

from typing import Any

from tilefold.retrieval.searcher import Ranking, matched_terms
from tilefold.serve.searchable import QUERY, Searchable
from tilefold.serve.text import TextTokens

__all__ = ["explain_document", "explain_query"]

_MARKED = 4000  # characters of a text in which terms are marked
_TERMS = 512  # of a query's vector that are shown


def explain_query(searchable: Searchable, ranking: Ranking, query: str) -> dict[str, Any]:
    """The terms of the query as searched, heaviest first, and where they stand in its text.

    A term is expanded when it is not among the tokens of the query, and of feedback when the query lacked it before.
    """
    if searchable.encoder is None:
        return {}
    text, query = searchable.encoder.text, query[:_MARKED]
    own, before = text.words(query), set(ranking.before.row(0)[0].tolist())
    weights = dict(zip(*(part.tolist() for part in ranking.after.row(0)), strict=True))
    ordered = sorted(weights, key=lambda term: (-weights[term], term))
    shown = [term for term in ordered if term not in text.special_ids][:_TERMS]
    terms = [
        {
            "id": term,
            "term": text.token(term),
            "weight": weights[term],
            "expanded": term not in own,
            "feedback": term not in before,
        }
        for term in shown
    ]
    return {"terms": terms, "terms_in_all": len(weights), "marks": _marks(text, query, set(shown))}


def explain_document(searchable: Searchable, ranking: Ranking, name: str) -> dict[str, Any]:
    """The rank and score of a document in every stage, and the terms that it shares with the query as searched.

    ``share`` is of the sparse score. A term is expanded when it is not among the tokens of the document: the model put
    it into its vector. Special tokens are left out.
    """
    found: dict[str, Any] = {"stages": _stages(ranking, name)}
    row = searchable.rows.get(name)
    if searchable.vectors is None or searchable.encoder is None or row is None:
        return found | {"terms": []}
    text, document = searchable.encoder.text, searchable.documents.get(name)
    matched = matched_terms(ranking.after.row(0), searchable.vectors.row(row), text.special_ids)
    own = text.words(document.contents[:_MARKED]) if document else None
    score = ranking.stages["sparse"][QUERY].get(name)
    found["terms"] = [
        {"id": term, "term": text.token(term), "contribution": part}
        | ({} if score is None else {"share": part / score})
        | ({} if own is None else {"expanded": term not in own})
        for term, part in matched
    ]
    if document:
        terms = {term for term, _ in matched}
        found["marks"] = {
            "title": _marks(text, document.title, terms),
            "text": _marks(text, document.text[:_MARKED], terms),
        }
    return found


def _stages(ranking: Ranking, name: str) -> dict[str, Any]:
    return {
        stage: {"rank": list(run[QUERY]).index(name) + 1, "score": run[QUERY][name]}
        for stage, run in ranking.stages.items()
        if name in run[QUERY]
    }


def _marks(text: TextTokens, content: str, terms: set[int]) -> list[list[int]]:
    """First and last character (in code points) and id of the tokens that are among `terms`."""
    if not content:
        return []
    (tokens,) = text.tokenize([content], False)
    return [[token["start"], token["stop"], token["id"]] for token in tokens if token["id"] in terms]
