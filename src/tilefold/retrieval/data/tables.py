"""Rows of the files of collections: JSON lines, CSV, TSV, Parquet, saved datasets, TREC topics;
judgements by split.
"""

from __future__ import annotations

import csv
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

from tilefold._internal.arguments import check_instance
from tilefold.retrieval.common.files import Json, arrow, require
from tilefold.retrieval.data.fields import (
    JUDGEMENTS,
    TEXTS,
    DocumentFields,
    FieldError,
    judgement_columns,
    text_columns_of,
)
from tilefold.retrieval.errors import DataError

_logger = logging.getLogger(__name__)

Row = tuple[str, Json]
Qrels = dict[str, dict[str, int]]
Judgement = tuple[str, str, str, int]  # where, query, document, grade

TEXT = (".tsv", ".tsv.gz", ".txt", ".txt.gz")
CSV = (".csv", ".csv.gz")
ROWS = (".jsonl", ".jsonl.gz", ".parquet", *CSV)
USUAL_FIELDS = DocumentFields()
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
_SUFFIXES = (*TEXT, ".qrels", TOPICS, *ROWS)
_COLUMNS = tuple(JUDGEMENTS)
_NAMED = f"Fix that line; names of columns are {', '.join(_COLUMNS)}."
_GRADE = re.compile(r"[+-]?[0-9]{1,18}(?:\.0*)?")
_LONGEST_CELL = (1 << 31) - 1  # characters of a field of CSV, where the csv module allows 131,072
_SHOWN_PAIRS = 10  # of those with contradictory judgements


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


def table_rows(
    path: Path,
    skip: int = 0,
    fields: DocumentFields = USUAL_FIELDS,
) -> Iterator[Row]:
    """Yield ``(where, row)`` of each row of a file, a folder of files or a saved dataset.

    Args:
        path: the file or folder; its name says what it is.
        skip: rows at the beginning of each file that are left out.
        fields: names of fields that the first line of a table with tabs may have.
    """
    if path.is_dir():
        if is_saved_dataset(path):
            yield from _dataset_rows(path, skip)
            return
        for file in table_files(path):
            yield from table_rows(file, skip, fields)
    elif path.name.endswith(".parquet"):
        yield from _parquet_rows(path, skip)
    elif path.name.endswith(CSV):
        yield from islice(_csv_rows(path), skip, None)
    elif path.name.endswith(ROWS):
        filled = ((number, line) for number, line in numbered_lines(path) if line.strip())
        for number, line in islice(filled, skip, None):
            yield f"{path}:{number}", json_object(line, f"{path}:{number}")
    elif path.name.endswith(TEXT):
        yield from islice(text_rows(numbered_lines(path), path, fields=fields), skip, None)
    else:
        raise DataError(
            f"{path}: expected a file that ends in {', '.join((*ROWS, *TEXT))}, got {path.name!r}.",
        )


def text_rows(
    lines: Iterable[tuple[int, str]],
    path: object,
    *,
    bare: bool = False,
    fields: DocumentFields = USUAL_FIELDS,
) -> Iterator[Row]:
    """Rows of lines: an id, a tab and a text; a `bare` text, by its number; or the columns that the
    first names.

    Blanks belong to ids and texts: only the end of a line is left out.
    """
    names: list[str] | None = None
    for place, (number, line) in enumerate(
        ((number, line) for number, line in lines if line.strip()),
    ):
        where, values = f"{path}:{number}", _fields_of(line)
        if place == 0 and (columns := text_columns(values, where, fields)):
            _say_once(where, tuple(values), tuple(columns))
            names = [name.strip().strip('"') for name in values]
            if fields == USUAL_FIELDS:  # usual names of any case become _id, title and text
                names = [column or name for column, name in zip(columns, names, strict=True)]
            continue
        if names:
            yield where, row_of(values, names, where)
        elif len(values) > 1:
            yield where, {"_id": values[0], "text": "\t".join(values[1:])}
        elif bare:
            yield where, {"_id": str(number), "text": values[0]}
        else:
            raise DataError(
                f"{where}: expected an id, a tab and a text, got no tab. Fix that line.",
            )


def _csv_rows(path: Path) -> Iterator[Row]:
    """Yield the records of a CSV file (RFC 4180) by the names in its first one, all as strings."""
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    records = csv.reader((line for _, line in numbered_lines(path)), strict=True)
    names: list[str] = []
    end = 0  # line at which the record before ended
    while True:
        where = f"{path}:{end + 1}"
        try:
            record = next(records, None)
        except csv.Error as error:
            raise DataError(
                f"{where}: expected comma-separated values (RFC 4180), got ({error}). Put a field with "
                'a comma, a quote or a line break in quotes, and write a quote in it as "".',
            ) from error
        if record is None:
            return
        end = records.line_num
        if not record:  # a blank line
            continue
        if not names:
            names = [name.strip() for name in record]
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise DataError(
                    f"{where}: expected names of columns that differ, got {twice!r} twice. Rename one.",
                )
            continue
        yield where, row_of(record, names, where)


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


def text_columns(
    fields: Sequence[str],
    where: str,
    named: DocumentFields = USUAL_FIELDS,
) -> list[str | None] | None:
    """Find the columns that a first line names.

    Args:
        fields: the fields of the line.
        where: file and line, for the error.
        named: names of columns that are not the usual ones; with any, the line must have them.

    Returns:
        For each field ``"_id"``, ``"title"``, ``"text"`` or None for another column; None in all
        where the line is a row and names nothing.

    Raises:
        DataError: for a line that may be either, or without a column that is `named`.
    """
    if named != USUAL_FIELDS:
        return _named_text_columns(fields, where, named)
    kinds = named_columns(fields, TEXTS)
    if kinds.count("_id") == kinds.count("text") == 1 and kinds.count("title") <= 1:
        return kinds
    if len(fields) > 1 and (kinds[0] == "_id" or "text" in kinds[1:]):
        wanted = f"a row, or names of columns with one id and one text, got {fields}, which may be either"
        remedy = "Name the columns id, title and text; remove the line; or put it below another one, if it is a row."
        raise DataError(f"{where}: expected {wanted}. {remedy}")
    return None


def _named_text_columns(
    fields: Sequence[str],
    where: str,
    named: DocumentFields,
) -> list[str | None]:
    """The columns of a first line that must name columns, as of :func:`text_columns`."""
    names = tuple(field.strip().strip('"') for field in fields)
    try:
        chosen = text_columns_of(names, named)
    except FieldError as error:
        raise DataError(f"{where}: {error}") from error
    kinds = {chosen.id: "_id", chosen.text: "text"}
    if chosen.title is not None:
        kinds[chosen.title] = "title"
    return [kinds.get(name) for name in names]


@functools.cache
def _say_once(where: str, fields: tuple[str, ...], kinds: tuple[str | None, ...]) -> None:
    """Log which line is no row, once, although files are read several times."""
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
    check_instance("line", line, str, "a line of text")
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
    contradictory: dict[tuple[str, str], None] = {}
    for where, query, document, grade in (row for file in files for row in _judgements(file)):
        if query not in queries or document not in documents:
            strange = f"document {document!r}" if query in queries else f"query {query!r}"
            strays.append(f"{where}: unknown {strange}")
            continue
        judged = qrels.setdefault(query, {})
        if judged.setdefault(document, grade) != grade:
            contradictory[query, document] = None
    if contradictory:
        raise _contradiction(files, list(contradictory))
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


def _contradiction(files: list[Path], pairs: list[tuple[str, str]]) -> DataError:
    """Error that names all lines of pairs that are judged with several grades.

    Args:
        files: the files of the split, which are read again.
        pairs: queries and documents, in the order of their first contradictory line.
    """
    shown = pairs[:_SHOWN_PAIRS]
    lines: dict[tuple[str, str], list[str]] = {pair: [] for pair in shown}
    for file in files:
        for where, query, document, grade in _judgements(file):
            if (query, document) in lines:
                lines[query, document].append(f"{grade} in {where}")
    described = [
        f"query {query!r} and document {document!r}: {', '.join(judged)}"
        for (query, document), judged in lines.items()
    ]
    others = len(pairs) - len(shown)
    more = f"; and {others} more pairs" if others else ""
    return DataError(
        f"{files[0]}: expected one grade of a query and a document, got several of {len(pairs)} "
        f"pair(s): {'; '.join(described)}{more}. Keep one line of each.",
    )


def _judgements(path: Path) -> Iterator[Judgement]:
    if path.name.endswith(ROWS):
        for where, row in table_rows(path):
            yield _judgement_of_row(row, where)
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
            wanted = "3 tab-separated fields (query-id, corpus-id, score), or the 4 fields of TREC (with an iteration)"
            raise DataError(f"{where}: expected {wanted}, got {len(fields)}. Fix that line.")
        yield where, fields[0], fields[1], _grade(fields[2], "score", where)


def _judgement_of_row(row: Json, where: str) -> Judgement:
    """The judgement in a row of JSON, CSV, Parquet or a saved dataset."""
    try:
        columns = judgement_columns(tuple(row))
    except FieldError as error:
        raise DataError(f"{where}: {error}") from error
    query, document, score = (columns[name] for name in _COLUMNS)
    return (
        where,
        _judged_id(row[query], query, where),
        _judged_id(row[document], document, where),
        _grade(row[score], score, where),
    )


def _judged_id(value: object, field: str, where: str) -> str:
    """The id in a field of a judgement: text, or a whole number, also one as data frames store it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{where}: expected an id in {field!r}, text or a whole number, got {_shown(value)}. Fix "
            "that row.",
        )
    return value


def _grade(value: object, field: str, where: str) -> int:
    """The grade in a field of a judgement, by one rule for all formats.

    A whole number, or its decimal digits, also as ``1.0``, which data frames write. Everything
    else that Python's ``int()`` would read, such as ``1_0`` or True, is refused.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _GRADE.fullmatch(value.strip(" ")):
        return int(value.strip(" ").partition(".")[0])
    raise DataError(
        f"{where}: expected an integer grade, got {_shown(value)} in {field!r}. {_NAMED}",
    )


def _shown(value: object) -> str:
    return "null" if value is None else repr(value)
