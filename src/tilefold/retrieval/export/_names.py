"""What the terms of a vocabulary are called in another engine, refused where two would become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tilefold.retrieval._files import is_unicode
from tilefold.retrieval.errors import DataError, VocabularyMismatchError

SHOWN = 3


def name_terms(
    used: npt.NDArray[np.bool_],
    tokens: Sequence[str] | None,
    complaint: Callable[[str], str | None],
    engine: str,
    remedy: str,
    more: str = "",
) -> list[str]:
    """The name of each term of the vocabulary: its token, or its number where there are no tokens.

    Args:
        used: ``[V]``, whether some document has the term.
        tokens: V tokens, or None.
        complaint: why the engine does not take a name, or None; asked for the terms in use.
        engine, remedy: for the message.
        more: of the remedy for a name that the engine does not take.

    Raises:
        VocabularyMismatchError: another number of tokens than V.
        DataError: a name that the engine does not take, or the name of a term in use that another term has too: a
            query with either term would match documents of both.
    """
    if tokens is None:
        return [str(term) for term in range(used.size)]
    if len(tokens) != used.size:
        raise VocabularyMismatchError(
            f"tokens: expected one for each of the {used.size} terms of the vectors, got {len(tokens)}. "
            "Pass the vocabulary of the model that made the vectors."
        )
    names = [str(token) for token in tokens]
    bad: dict[str, list[str]] = {}
    for term in np.flatnonzero(used).tolist():
        name = names[term]
        why = "is empty" if not name else "holds half a surrogate pair" if not is_unicode(name) else complaint(name)
        if why is not None:
            bad.setdefault(why, []).append(f"{name!r} (term {term})")
    if bad:
        why, owners = next(iter(bad.items()))
        raise DataError(
            f"tokens: {engine} takes no term whose name {why}, got {_some(owners)}"
            f"{f', and {len(bad) - 1} other kinds of such names' if len(bad) > 1 else ''}. {remedy}{more}."
        )
    first: dict[str, int] = {}
    same: list[str] = []
    for term, name in enumerate(names):
        earlier = first.setdefault(name, term)
        if earlier != term and (used[term] or used[earlier]):
            same.append(f"{name!r} (terms {earlier} and {term})")
    if same:
        raise DataError(f"tokens: expected a name of its own for every term, got {_some(same)} twice. {remedy}.")
    return names


def control_character(text: str) -> str | None:
    """The first character of `text` that JSON carries but text fields of engines refuse, or None."""
    for character in text:
        code = ord(character)
        if (code < 0x20 and character not in "\t\n\r") or code == 0x7F or 0xFDD0 <= code <= 0xFDEF:
            return character
        if code & 0xFFFE == 0xFFFE:
            return character
    return None


def _some(items: list[str]) -> str:
    left = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {left} more" if left > 0 else "")
