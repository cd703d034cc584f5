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
from tilefold.retrieval.data.tables import numbered_lines
from tilefold.retrieval.errors import DataError

TEACHER = "published"
_Row = tuple[str, float | None, bool]  # document, score, whether it is relevant
_LARGEST_SCORE = float(np.finfo(np.float32).max)
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
            query_id, judged = _group(_fields_of(line))
            for document_id, score, is_relevant in judged:
                if query and (score is None) != (not scores):
                    raise ValueError(_unlike_before(document_id, score))
                document.append(documents.setdefault(document_id, len(documents)))
                query.append(queries.setdefault(query_id, len(queries)))
                relevant.append(is_relevant)
                if score is not None:
                    scores.append(score)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            got = f"{line.strip():.60} ({error})"
            raise DataError(
                f"line {number}: expected {_KINDS}, got {got}. Fix that line.",
            ) from error
    if not query:
        raise DataError("expected a line at least, got an empty file. Fetch it again.")
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


def _fields_of(line: str) -> Any:
    """The JSON value of a line, or the three ids between its tabs."""
    if line[0] in "[{":
        return json.loads(line)
    fields = line.rstrip("\r\n").split("\t")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields")
    return fields


def _unlike_before(document_id: str, score: float | None) -> str:
    """Why a document is refused that has a score where those before it have none, or lacks one."""
    if score is None:
        return (
            f"{document_id!r} has no score, those before it have one; give all of them one, or none"
        )
    return f"{document_id!r} has a score, those before it have none; give all of them one, or none"


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
        return _id(value["qid"]), ((_id(name), None, is_relevant) for name, is_relevant in listed)
    query, *documents = value
    if len(documents) < 2:
        raise ValueError("fewer than two documents")
    return _id(query), (
        (*_scored(document), position == 0) for position, document in enumerate(documents)
    )


def _scored(value: Any) -> tuple[str, float | None]:
    """The id of a document, and its score where it is given as ``[document, score]``."""
    if not isinstance(value, list):
        return _id(value), None
    document, score = value
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        shown = json.dumps(score)
        raise ValueError(f"the score of {document!r} is {shown:.40} and no number")
    if not abs(score) <= _LARGEST_SCORE:
        raise ValueError(f"the score of {document!r} is {score!r:.40} and no finite float32")
    return _id(document), float(score)


def _id(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise ValueError(f"no id: {value!r}")
    return str(value)
