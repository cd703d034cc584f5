"""Negatives as MS MARCO and its systems publish them: triples of ids, and JSON lines with or
without scores.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval._tables import numbered_lines
from tilefold.retrieval.errors import DataError

TEACHER = "published"
_Row = tuple[str, bool, float | None]  # document, whether it is relevant, score
_KINDS = (
    "a line of three ids with tabs between them, or JSON: [query, relevant, negative, ...], [query, [document, score], "
    '...], the relevant one first, or {"qid": .., "pos": [..], "neg": {retriever: [..]}}'
)


def read_published(path: Path) -> dict[str, Any]:
    """The fields of :class:`tilefold.retrieval.TrainingRows`, but for one that says what made the
    rows.

    The rows of a query stand together; a document that comes several times is relevant if it once
    was.
    """
    queries, documents = dict[str, int](), dict[str, int]()
    query, document, relevant, scores = array("i"), array("i"), bytearray(), array("f")
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            is_json = line[0] in "[{"
            fields = json.loads(line) if is_json else line.rstrip("\r\n").split("\t")
            if not is_json and len(fields) != 3:
                raise ValueError(f"{len(fields)} fields")
            name, found = _group(fields)
            for other, is_relevant, score in found:
                document.append(documents.setdefault(other, len(documents)))
                query.append(queries.setdefault(name, len(queries)))
                relevant.append(is_relevant)
                scores.extend(() if score is None else (score,))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            got = f"{line.strip():.60} ({error})"
            raise DataError(
                f"line {number}: expected {_KINDS}, got {got}. Fix that line.",
            ) from error
    if not query:
        raise DataError("expected a line at least, got an empty file. Fetch it again.")
    if len(scores) not in (0, len(query)):
        got = f"{len(scores)} for {len(query)} documents"
        raise DataError(
            f"expected a score for every document, or none, got {got}. Give all of them one, or none.",
        )
    of, at = np.frombuffer(query, np.int32), np.frombuffer(document, np.int32)
    _, first, same = np.unique(
        of.astype(np.int64) * len(documents) + at,
        return_index=True,
        return_inverse=True,
    )
    marked = np.bincount(same, np.frombuffer(relevant, np.bool_)) > 0
    order = np.lexsort((first, of[first]))
    rows = first[order]
    target = np.frombuffer(scores, np.float32)[rows] if len(scores) else None
    return {
        "queries": list(queries),
        "documents": list(documents),
        "offsets": offsets_of(np.bincount(of[rows], minlength=len(queries))),
        "document": at[rows],
        "relevant": marked[order],
        "rank": np.zeros(len(rows), np.int32),
        "retrieved": np.full(len(rows), np.nan, np.float32),
        "teachers": {} if target is None else {TEACHER: target},
        "target": target,
    }


def _group(value: Any) -> tuple[str, Iterator[_Row]]:
    """The query of a line, and its documents."""
    if isinstance(value, dict):
        negatives = value["neg"]
        others = negatives.values() if isinstance(negatives, dict) else [negatives]
        if not all(isinstance(names, list) for names in (value["pos"], *others)):
            raise TypeError("no lists")
        listed = [(name, True) for name in value["pos"]] + [
            (name, False) for names in others for name in names
        ]
        return _id(value["qid"]), ((_id(name), is_relevant, None) for name, is_relevant in listed)
    name, *found = value
    if len(found) < 2:
        raise ValueError("fewer than two documents")
    pairs = (each if isinstance(each, list) else (each, None) for each in found)
    return _id(name), ((_id(each), place == 0, score) for place, (each, score) in enumerate(pairs))


def _id(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise ValueError(f"no id: {value!r}")
    return str(value)
