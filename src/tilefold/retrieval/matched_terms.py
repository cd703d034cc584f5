"""Which terms a sparse query and a document share, and what each adds to the score."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__ = ["matched_terms"]


def matched_terms(query: Any, document: Any, without: Collection[int] = ()) -> list[tuple[int, float]]:
    """``(term, query weight * document weight)`` of the terms of both, largest first, equal ones by term.

    The products add up to the score of :class:`tilefold.retrieval.SparseIndex`, but for what is left out.

    Args:
        query, document: a row each, ``(indices, weights)`` of :meth:`tilefold.retrieval.SparseVectors.row`.
        without: terms to leave out, such as special tokens, which match in every text.
    """
    asked = dict(zip(*(part.tolist() for part in query), strict=True))
    stored = dict(zip(*(part.tolist() for part in document), strict=True))
    shared = stored.keys() & (asked.keys() - set(without))
    return sorted(((term, asked[term] * stored[term]) for term in shared), key=lambda item: (-item[1], item[0]))
