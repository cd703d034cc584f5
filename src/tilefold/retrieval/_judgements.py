"""Relevance judgements: BEIR's three columns or TREC's four, JSON lines and Parquet, by split."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tilefold.retrieval._tables import JUDGEMENTS, ROWS, TEXT, named_columns, numbered_lines, row_of, table_rows
from tilefold.retrieval.errors import DataError

_logger = logging.getLogger(__name__)

Qrels = dict[str, dict[str, int]]
Judgement = tuple[str, str, str, int]  # where, query, document, grade

_SUFFIXES = (*TEXT, ".qrels", ".trec", *ROWS)
_COLUMNS = tuple(JUDGEMENTS)
_NAMED = f"Fix that line; names of columns are {', '.join(_COLUMNS)}."


@dataclass(frozen=True)
class Known:
    """Ids of the collection, and what becomes of judgements of others."""

    queries: Container[str]
    documents: Container[str]
    unknown: Literal["error", "drop"]


def read_splits(folder: Path, known: Known, wanted: Sequence[str] | None = None) -> dict[str, Qrels]:
    """Split -> judgements in `folder`: the `wanted` splits, or all where one of those is missing."""
    splits: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        suffix = max((end for end in _SUFFIXES if file.name.endswith(end)), key=len, default=None)
        if suffix is not None and not file.name.startswith("."):
            split = re.sub(r"-\d{5}-of-\d{5}$", "", file.name.removesuffix(suffix))
            splits.setdefault(split, []).append(file)
    chosen = wanted if wanted and all(split in splits for split in wanted) else splits
    return {split: _read_split(splits[split], known) for split in chosen}


def _read_split(files: list[Path], known: Known) -> Qrels:
    qrels: Qrels = {}
    strays: list[str] = []
    for where, query, document, grade in (row for file in files for row in _judgements(file)):
        if query not in known.queries or document not in known.documents:
            strange = f"document {document!r}" if query in known.queries else f"query {query!r}"
            strays.append(f"{where}: unknown {strange}")
            continue
        judged = qrels.setdefault(query, {})
        if judged.get(document, grade) != grade:
            before = f"were judged {judged[document]} before, got {grade}. Keep one of the two lines."
            raise DataError(f"{where}: query {query!r} and document {document!r} {before}")
        judged[document] = grade
    if strays and known.unknown == "drop":
        _logger.warning("%s; %d judgement(s) of what the collection lacks are left out", strays[0], len(strays))
    if strays and known.unknown == "error":
        raise DataError(
            f"{strays[0]}; {len(strays)} judgement(s) in this file name queries or documents that are not in "
            "the collection. Complete it, or load it with --drop-unknown to leave them out (unknown='drop')."
        )
    if not qrels:
        got = f"{len(strays)} of others, the first in {strays[0]}" if strays else "no judgement"
        raise DataError(f"{files[0]}: expected at least one judgement of a known query and document, got {got}.")
    return qrels


def _judgements(path: Path) -> Iterator[Judgement]:
    if path.name.endswith(ROWS):
        for where, row in table_rows(path):
            yield _judgement([_field(row, name, where) for name in _COLUMNS], where)
        return
    columns: list[str | None] | None = None
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where, fields = f"{path}:{number}", line.rstrip("\r\n").split("\t")
        if len(fields) == 1:
            fields = line.split()
        if columns is None:
            columns = named_columns(fields, JUDGEMENTS)
            if all(columns.count(name) == 1 for name in _COLUMNS):
                continue
            columns = []
        if columns:
            row = row_of(fields, columns, where)
            fields = [row[name] for name in _COLUMNS]
        if len(fields) == 4:  # TREC: query, iteration, document, grade
            del fields[1]
        if len(fields) != 3:
            raise DataError(
                f"{where}: expected 3 tab-separated fields (query-id, corpus-id, score), or the 4 fields of TREC "
                f"(query, iteration, document, grade), got {len(fields)}. Fix that line."
            )
        yield _judgement(fields, where)


def _field(row: dict[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None:
        raise DataError(f"{where}: expected the fields {', '.join(_COLUMNS)}, got {', '.join(row)}. Rename them.")
    return str(value)


def _judgement(fields: list[str], where: str) -> Judgement:
    try:
        return where, fields[0], fields[1], int(fields[2])
    except ValueError:
        raise DataError(f"{where}: expected an integer grade, got {fields[2]!r}. {_NAMED}") from None
