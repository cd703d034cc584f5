"""Rows of the files of collections: JSON lines, TSV, Parquet, saved datasets, TREC topics;
judgements by split.
"""

from __future__ import annotations

import functools
import gzip
import html
import json
import logging
import re
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from tilefold.retrieval._files import Json, arrow, require
from tilefold.retrieval.errors import DataError

_logger = logging.getLogger(__name__)

Row = tuple[str, Json]
Qrels = dict[str, dict[str, int]]
Judgement = tuple[str, str, str, int]  # where, query, document, grade

TEXT = (".tsv", ".tsv.gz", ".txt", ".txt.gz")
ROWS = (".jsonl", ".jsonl.gz", ".parquet")
TOPICS = ".trec"
_SAVED = ("dataset_dict.json", "state.json")  # of a DatasetDict, of a Dataset
_ROWS_PER_BATCH = 1024
_TOPIC = re.compile(r"<top(?:ic)?\b([^>]*)>(.*?)</top(?:ic)?>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(
    r"<num(?:ber)?>\s*(?:Number:)?\s*([^\s<]+)|\bnumber=[\"']([^\"']+)",
    re.IGNORECASE,
)
_TITLE = re.compile(r"<(?:title|query)>\s*(?:Topic:)?(.*?)(?=<|\Z)", re.DOTALL | re.IGNORECASE)
_LINE_BREAK = re.compile(r"[^\S\n]*\n\s*")  # in a topic, with the blanks around it
# What a column is -> names that BEIR, TREC, MS MARCO, datasets and data frames give it.
_DOCUMENT = (
    "corpus-id",
    "corpus_id",
    "docid",
    "doc_id",
    "doc-id",
    "docno",
    "document_id",
    "pid",
    "passage_id",
)
_QUERY = ("query-id", "query_id", "qid", "queryid", "topic_id", "topic-id")
TEXTS = {
    "_id": ("_id", "id", *_DOCUMENT, *_QUERY),
    "title": ("title",),
    "text": ("text", "contents", "content", "body", "passage", "document", "query", "question"),
}
JUDGEMENTS = {
    "query-id": (*_QUERY, "query", "topic"),
    "corpus-id": (*_DOCUMENT, "document", "passage", "id"),
    "score": ("score", "grade", "relevance", "rel", "label", "judgment", "judgement"),
}
_SUFFIXES = (*TEXT, ".qrels", TOPICS, *ROWS)
_COLUMNS = tuple(JUDGEMENTS)
_NAMED = f"Fix that line; names of columns are {', '.join(_COLUMNS)}."


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by ``save_to_disk`` of the package datasets."""
    return any((path / name).is_file() for name in _SAVED)


def find_table(folder: Path, name: str, suffixes: tuple[str, ...]) -> Path | None:
    """The table `name` in `folder`: a file with one of `suffixes`, or a folder; None if there is
    nothing.
    """
    found = [path for suffix in suffixes if (path := folder / f"{name}{suffix}").is_file()]
    found += [folder / name] if (folder / name).is_dir() else []
    if len(found) > 1:
        raise DataError(
            f"{folder}: expected one of {', '.join(path.name for path in found)}, got all. Keep one.",
        )
    return found[0] if found else None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a text file, gzipped where its name ends in ``.gz``, with their numbers from 1."""
    start = 0
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    got = f"the byte {line[error.start]:#04x} at byte {start + error.start} of the text"
                    remedy = "Convert it: iconv -f LATIN1 -t UTF-8"
                    raise DataError(
                        f"{path}:{number}: expected UTF-8 text, got {got}. {remedy}",
                    ) from error
                yield number, text
                start += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: expected a whole gzip file, got ({error}). Fetch it again.",
        ) from error


def table_files(path: Path) -> list[Path]:
    """The files, or the saved dataset, whose rows :func:`table_rows` gives one after the other."""
    if not path.is_dir() or is_saved_dataset(path):
        return [path]
    if not (files := sorted(file for file in path.iterdir() if file.name.endswith(ROWS))):
        got = sorted(file.name for file in path.iterdir())[:3] or "an empty folder"
        raise DataError(
            f"{path}: expected files that end in {', '.join(ROWS)}, or a saved dataset, got {got}.",
        )
    return files


def table_rows(path: Path, skip: int = 0) -> Iterator[Row]:
    """``(where, row)`` of each row, but the first `skip` of each file, of a file, folder of files
    or saved dataset.
    """
    if path.is_dir():
        if is_saved_dataset(path):
            yield from _dataset_rows(path, skip)
            return
        for file in table_files(path):
            yield from table_rows(file, skip)
    elif path.name.endswith(".parquet"):
        yield from _parquet_rows(path, skip)
    elif path.name.endswith(ROWS):
        filled = ((number, line) for number, line in numbered_lines(path) if line.strip())
        for number, line in islice(filled, skip, None):
            yield f"{path}:{number}", json_object(line, f"{path}:{number}")
    elif path.name.endswith(TEXT):
        yield from islice(text_rows(numbered_lines(path), path), skip, None)
    else:
        raise DataError(
            f"{path}: expected a file that ends in {', '.join((*ROWS, *TEXT))}, got {path.name!r}.",
        )


def text_rows(
    lines: Iterable[tuple[int, str]],
    path: object,
    *,
    bare: bool = False,
) -> Iterator[Row]:
    """Rows of lines: an id, a tab and a text; a `bare` text, by its number; or the columns that the
    first names.

    Blanks belong to ids and texts: only the end of a line is left out.
    """
    columns: list[str | None] | None = None
    for place, (number, line) in enumerate(
        ((number, line) for number, line in lines if line.strip()),
    ):
        where, fields = f"{path}:{number}", _fields_of(line)
        if place == 0 and (columns := text_columns(fields, where)):
            _say_once(where, tuple(fields))
            columns = [
                kind or name.strip().strip('"') for kind, name in zip(columns, fields, strict=True)
            ]
            continue
        if columns:
            yield where, row_of(fields, columns, where)
        elif len(fields) > 1:
            yield where, {"_id": fields[0], "text": "\t".join(fields[1:])}
        elif bare:
            yield where, {"_id": str(number), "text": fields[0]}
        else:
            raise DataError(
                f"{where}: expected an id, a tab and a text, got no tab. Fix that line.",
            )


def json_object(line: str, where: str) -> Json:
    """The JSON object in a line; a ``DataError`` that begins with `where` for anything else."""
    try:
        row = json.loads(line)
    except (
        ValueError,
        RecursionError,
    ) as error:  # malformed JSON, a number with thousands of digits, too deep nesting
        got = f"malformed JSON ({error})"
        raise DataError(
            f"{where}: expected one JSON object per line, got {got}. Fix that line.",
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: expected one JSON object per line, got {type(row).__name__}. Fix that line.",
        )
    return row


def _parquet_rows(path: Path, skip: int) -> Iterator[Row]:
    pa, parquet = arrow("Reading Parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            groups = list(range(file.num_row_groups))
            while groups and number + file.metadata.row_group(groups[0]).num_rows <= skip:
                number += file.metadata.row_group(groups.pop(0)).num_rows
            for batch in file.iter_batches(_ROWS_PER_BATCH, row_groups=groups):
                for row in batch.to_pylist():
                    number += 1
                    if number > skip:
                        yield f"{path}, row {number}", row
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: expected a Parquet file, got ({error}). Fetch it again.",
        ) from error


def _dataset_rows(path: Path, skip: int) -> Iterator[Row]:
    saved = require("datasets", "datasets", "Reading a saved dataset").load_from_disk(str(path))
    if hasattr(saved, "keys"):  # a DatasetDict
        if len(saved) != 1:
            raise DataError(
                f"{path}: expected a dataset of one split, got {', '.join(saved)}. Save one of them.",
            )
        (saved,) = saved.values()
    for number, row in enumerate(saved.skip(skip) if skip else saved, start=skip + 1):
        yield f"{path}, row {number}", dict(row)


def named_columns(fields: Sequence[str], known: Mapping[str, Sequence[str]]) -> list[str | None]:
    """The column that each of the `fields` of a first line names, None for a field that names none."""
    kind_of = {name: kind for kind, names in known.items() for name in names}
    return [kind_of.get(field.strip().strip('"').lower()) for field in fields]


def text_columns(fields: Sequence[str], where: str) -> list[str | None] | None:
    """The columns that a first line names, None where it is a row, and a ``DataError`` where it may
    be either.
    """
    kinds = named_columns(fields, TEXTS)
    if kinds.count("_id") == kinds.count("text") == 1 and kinds.count("title") <= 1:
        return kinds
    if len(fields) > 1 and (kinds[0] == "_id" or "text" in kinds[1:]):
        wanted = f"a row, or names of columns with one id and one text, got {fields}, which may be either"
        remedy = "Name the columns id, title and text; remove the line; or put it below another one, if it is a row."
        raise DataError(f"{where}: expected {wanted}. {remedy}")
    return None


@functools.cache
def _say_once(where: str, fields: tuple[str, ...]) -> None:
    """Say which line is no row; files are read several times."""
    kinds = named_columns(fields, TEXTS)
    used = ", ".join(name.strip() for name, kind in zip(fields, kinds, strict=True) if kind)
    left = ", ".join(
        repr(name.strip()) for name, kind in zip(fields, kinds, strict=True) if not kind
    )
    others = f", {left} as metadata" if left else ""
    _logger.warning("%s: this line is taken as names of columns (%s)%s", where, used, others)


def row_of(fields: Sequence[str], columns: Sequence[str | None], where: str) -> dict[str, str]:
    """Column -> field of a line."""
    if len(fields) != len(columns):
        wanted = f"{len(columns)} fields as in the first line, which names them"
        raise DataError(f"{where}: expected {wanted}, got {len(fields)}. Fix that line.")
    return {column: field for column, field in zip(columns, fields, strict=True) if column}


def _topic_rows(path: Path) -> Iterator[Row]:
    """Rows of ``_id`` and ``text`` for TREC topics: ``<top>`` or ``<topic>`` with a number, and a
    title or query.

    Blanks next to a tag are layout, and a line break is one blank; blanks within a line are kept.
    """
    text, found = "".join(line for _, line in numbered_lines(path)), 0
    for found, match in enumerate(_TOPIC.finditer(text), start=1):
        where, number, title = (
            f"{path}, topic {found}",
            _NUMBER.search(match[0]),
            _TITLE.search(match[2]),
        )
        if number is None or title is None or not title[1].strip():
            raise DataError(
                f"{where}: expected a <num> and a <title> (or <query>), got one without.",
            )
        on_one_line = _LINE_BREAK.sub(" ", title[1].strip())
        yield where, {"_id": number[1] or number[2], "text": html.unescape(on_one_line)}
    if not found:
        raise DataError(
            f"{path}: expected TREC topics (<top> ... </top>), got {text[:40]!r}. Name a table .tsv.",
        )


def query_rows(path: Path, *, bare: bool = False) -> Iterator[Row]:
    """Rows of ``_id`` and ``text``: TREC topics of a ``.trec`` file, or a table; `bare` as in
    :func:`text_rows`.
    """
    if path.name.endswith(TOPICS) and not path.is_dir():
        return _topic_rows(path)
    if bare and not path.is_dir() and not path.name.endswith(ROWS):
        return text_rows(numbered_lines(path), path, bare=True)
    return table_rows(path)


def query_of_line(line: str, number: int) -> tuple[str, str]:
    """Id and text of a query: ``id<tab>text``, or a text with its line's number; no names of
    columns.

    Blanks belong to the id and the text, as in a file of queries.

    Args:
        line: the line, with or without its end.
        number: of the line, from 1; the id of a text without one.

    Returns:
        The id and the text, which is empty where nothing follows the tab.

    Raises:
        DataError: if the first line names columns, or nothing precedes the tab.
    """
    fields = _fields_of(line.removeprefix("\ufeff") if number == 1 else line)
    shown = "\t".join(fields)
    if number == 1 and text_columns(fields, "line 1"):
        raise DataError(
            f"line 1: expected a query, got names of columns, {shown!r}. Leave that line out.",
        )
    if len(fields) == 1:
        return str(number), fields[0]
    if not fields[0]:
        raise DataError(
            f"line {number}: expected an id before the tab, got {shown!r}. "
            "Give the query an id, or remove the tab.",
        )
    return fields[0], "\t".join(fields[1:])


def _fields_of(line: str) -> list[str]:
    """The fields between the tabs of a line, without the line's end."""
    return line.rstrip("\r\n").split("\t")


def read_splits(
    folder: Path,
    known: tuple[Container[str], Container[str]],
    drop: bool,
    wanted: Sequence[str] | None,
) -> dict[str, Qrels]:
    """Split -> judgements in `folder` of `known` ids, others are errors or to `drop`: the `wanted`
    splits, or all.

    Without the folder ``qrels``, those of MS MARCO's files beside it, ``qrels.<split>.tsv``.
    """
    splits: dict[str, list[Path]] = {}
    for file in sorted(
        folder.iterdir() if folder.is_dir() else folder.parent.glob(f"{folder.name}.*.tsv"),
    ):
        suffix = max((end for end in _SUFFIXES if file.name.endswith(end)), key=len, default=None)
        if suffix is not None and not file.name.startswith("."):
            name = file.name if folder.is_dir() else file.name.removeprefix(f"{folder.name}.")
            split = re.sub(r"-\d{5}-of-\d{5}$", "", name.removesuffix(suffix))
            splits.setdefault(split, []).append(file)
    chosen = wanted if wanted and all(split in splits for split in wanted) else splits
    return {split: _read_split(splits[split], *known, drop) for split in chosen}


def _read_split(
    files: list[Path],
    queries: Container[str],
    documents: Container[str],
    drop: bool,
) -> Qrels:
    qrels: Qrels = {}
    strays: list[str] = []
    for where, query, document, grade in (row for file in files for row in _judgements(file)):
        if query not in queries or document not in documents:
            strange = f"document {document!r}" if query in queries else f"query {query!r}"
            strays.append(f"{where}: unknown {strange}")
            continue
        judged = qrels.setdefault(query, {})
        if judged.get(document, grade) != grade:
            before = (
                f"were judged {judged[document]} before, got {grade}. Keep one of the two lines."
            )
            raise DataError(f"{where}: query {query!r} and document {document!r} {before}")
        judged[document] = grade
    if strays and drop:
        _logger.warning(
            "%s; %d judgement(s) of what the collection lacks are left out",
            strays[0],
            len(strays),
        )
    if strays and not drop:
        said = f"{len(strays)} judgement(s) in this file name queries or documents that are not in the collection"
        remedy = "Complete it, or load it with --drop-unknown to leave them out (unknown='drop')."
        raise DataError(f"{strays[0]}; {said}. {remedy}")
    if not qrels:
        got = f"{len(strays)} of others, the first in {strays[0]}" if strays else "no judgement"
        raise DataError(
            f"{files[0]}: expected at least one judgement of a known query and document, got {got}.",
        )
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
        where, fields = f"{path}:{number}", _fields_of(line)
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
            wanted = "3 tab-separated fields (query-id, corpus-id, score), or the 4 fields of TREC (with an iteration)"
            raise DataError(f"{where}: expected {wanted}, got {len(fields)}. Fix that line.")
        yield _judgement(fields, where)


def _field(row: Json, name: str, where: str) -> str:
    value = row.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None:
        raise DataError(
            f"{where}: expected the fields {', '.join(_COLUMNS)}, got {', '.join(row)}. Rename them.",
        )
    return str(value)


def _judgement(fields: list[str], where: str) -> Judgement:
    try:
        return where, fields[0], fields[1], int(fields[2])
    except ValueError:
        raise DataError(
            f"{where}: expected an integer grade, got {fields[2]!r}. {_NAMED}",
        ) from None
