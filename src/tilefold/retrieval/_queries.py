"""Queries from files: rows with ids, TREC topics, or one query per line."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from tilefold.retrieval._columns import text_columns
from tilefold.retrieval._tables import ROWS, Row, numbered_lines, table_rows, text_rows
from tilefold.retrieval.errors import DataError

TOPICS = ".trec"
_TOPIC = re.compile(r"<top(?:ic)?\b([^>]*)>(.*?)</top(?:ic)?>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"<num(?:ber)?>\s*(?:Number:)?\s*([^\s<]+)|\bnumber=[\"']([^\"']+)", re.IGNORECASE)
_TITLE = re.compile(r"<(?:title|query)>\s*(?:Topic:)?(.*?)(?=<|\Z)", re.DOTALL | re.IGNORECASE)


def topic_rows(path: Path) -> Iterator[Row]:
    """Rows of ``_id`` and ``text`` for TREC topics: ``<top>`` or ``<topic>`` with a number, and a title or query.

    Raises:
        DataError: no topic, or one without a number or a title.
    """
    lines = [line for _, line in numbered_lines(path)]
    found = 0
    for match in _TOPIC.finditer("".join(lines)):
        found += 1
        number, title = _NUMBER.search(match[0]), _TITLE.search(match[2])
        if number is None or title is None or not title[1].strip():
            raise DataError(f"{path}, topic {found}: expected a <num> and a <title> (or <query>), got one without.")
        yield (
            f"{path}, topic {found}",
            {
                "_id": number[1] or number[2],
                "text": " ".join(html.unescape(title[1]).split()),
            },
        )
    if not found:
        raise DataError(
            f"{path}: expected TREC topics (<top> ... </top>), got {''.join(lines)[:40]!r}. Name a table .tsv."
        )


def query_rows(path: Path) -> Iterator[Row]:
    """Rows of ``_id`` and ``text``: TREC topics of a ``.trec`` file, or a table."""
    return topic_rows(path) if path.name.endswith(TOPICS) else table_rows(path)


def loose_query_rows(path: Path) -> Iterator[Row]:
    """Query rows, also of other text files' lines: ``id<tab>text``, or a text, whose id is its number."""
    if path.is_dir() or path.name.endswith((*ROWS, TOPICS)):
        yield from query_rows(path)
        return
    yield from text_rows(numbered_lines(path), path, bare=True)


def query_of_line(line: str, number: int) -> tuple[str, str]:
    """Id and text of a query: ``id<tab>text``, or a text with the number of its line.

    Raises:
        DataError: a first line that names columns, or may do so.
    """
    if number == 1 and text_columns(line.strip().split("\t"), "line 1"):
        raise DataError(f"line 1: expected a query, got names of columns, {line.strip()!r}. Leave that line out.")
    name, tab, text = line.strip().partition("\t")
    return (name, text) if tab else (str(number), name)
