"""Rows of the files of collections: JSON lines, CSV, TSV, Parquet, saved datasets, TREC topics."""

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
from itertools import chain, islice
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

Row = tuple[str, Json]  # where it was read, for errors; field -> value
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
    """Find a table in a folder, which is a file with one of some suffixes, or a folder of files.

    Args:
        folder: the folder of the collection.
        name: name of the table without a suffix.
        suffixes: suffixes that the file may have.

    Returns:
        Path of the table, or None if there is none.

    Raises:
        DataError: if there are several.
    """
    files = [folder / f"{name}{suffix}" for suffix in suffixes]
    tables = [file for file in files if file.is_file()]
    if (folder / name).is_dir():
        tables.append(folder / name)
    if len(tables) > 1:
        names = ", ".join(path.name for path in tables)
        raise DataError(f"{folder}: expected one of {names}, got all. Keep one.")
    return tables[0] if tables else None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers from 1.

    A file whose name ends in ``.gz`` is decompressed. A byte order mark is left out.

    Raises:
        DataError: for text that is not UTF-8, and a damaged gzip file.
    """
    start = 0  # position of the line's first byte in the text
    is_gzip = path.name.endswith(".gz")
    try:
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    byte, position = line[error.start], start + error.start
                    got = f"the byte {byte:#04x} at byte {position} of the text"
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
    """Return the files, or the saved dataset, whose rows :func:`table_rows` yields in turn."""
    if not path.is_dir() or is_saved_dataset(path):
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(ROWS))
    if not files:
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
        path: the file or folder, whose suffix says of which kind it is.
        skip: number of rows to leave out at the beginning of each file.
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
        for number, line in islice(_filled_lines(numbered_lines(path)), skip, None):
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
    allow_missing_ids: bool = False,
    fields: DocumentFields = USUAL_FIELDS,
) -> Iterator[Row]:
    """Yield the rows of a text file whose lines have fields with tabs between them.

    The first line may name the columns. Without such a line, a row has an id and a text. Blanks
    belong to ids and texts. Only the end of a line is left out.

    Args:
        lines: lines with their numbers.
        path: name of the file, for errors.
        allow_missing_ids: whether a line may be a text without a tab, whose id is the number of
            the line. By default such a line is an error.
        fields: names of columns that are not the usual ones.

    Yields:
        File and line, and the fields of the row by name.
    """
    names: list[str] = []
    is_first = True
    for number, line in _filled_lines(lines):
        where = f"{path}:{number}"
        values = _fields_of(line)
        if is_first:
            is_first = False
            columns = text_columns(values, where, fields)
            if columns:
                _log_column_names(where, tuple(values), tuple(columns))
                names = [name.strip().strip('"') for name in values]
                if fields == USUAL_FIELDS:  # usual names of any case become _id, title and text
                    names = [column or name for column, name in zip(columns, names, strict=True)]
                continue
        if names:
            yield where, row_of(values, names, where)
        elif len(values) > 1:
            yield where, {"_id": values[0], "text": "\t".join(values[1:])}
        elif allow_missing_ids:
            yield where, {"_id": str(number), "text": values[0]}
        else:
            raise DataError(
                f"{where}: expected an id, a tab and a text, got no tab. Fix that line.",
            )


def _filled_lines(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers."""
    return ((number, line) for number, line in lines if line.strip())


def _csv_rows(path: Path) -> Iterator[Row]:
    """Yield the records of a CSV file (RFC 4180), whose first record names the columns.

    Args:
        path: the file.

    Yields:
        File and first line of the record, and its fields by name, all as strings.

    Raises:
        DataError: for malformed CSV, or two columns of one name.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    records = csv.reader((line for _, line in numbered_lines(path)), strict=True)
    names: list[str] = []
    end = 0  # last line of the previous record
    while True:
        where = f"{path}:{end + 1}"
        try:
            record = next(records, None)
        except csv.Error as error:
            raise DataError(
                f"{where}: expected comma-separated values (RFC 4180), got ({error}). Put a field "
                "with "
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
                    f"{where}: expected names of columns that differ, got {twice!r} twice. Rename "
                    "one.",
                )
            continue
        yield where, row_of(record, names, where)


def json_object(line: str, where: str) -> Json:
    """Return the JSON object in a line.

    The ``DataError`` for anything else begins with `where`.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number with thousands of digits
        raise DataError(
            f"{where}: expected one JSON object per line, got malformed JSON ({error}). Fix that "
            "line.",
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: expected one JSON object per line, got {type(row).__name__}. Fix that line.",
        )
    return row


def _parquet_rows(path: Path, skip: int) -> Iterator[Row]:
    """Yield the rows of a Parquet file.

    Row groups that are skipped entirely are not read.

    Args:
        path: the file.
        skip: number of rows to leave out at the beginning.

    Yields:
        File and number of the row, from 1, and the fields of the row by name.
    """
    pa, parquet = arrow("Reading Parquet")
    number = 0  # of the last row that was read or skipped
    try:
        with parquet.ParquetFile(path) as file:
            groups = list(range(file.num_row_groups))
            while groups:
                group_rows = file.metadata.row_group(groups[0]).num_rows
                if number + group_rows > skip:
                    break
                number += group_rows
                del groups[0]
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
    """Yield the rows of a dataset that ``save_to_disk`` of the package ``datasets`` wrote.

    Args:
        path: folder of the dataset, which must have one split.
        skip: number of rows to leave out at the beginning.

    Yields:
        Folder and number of the row, from 1, and the fields of the row by name.
    """
    saved = require("datasets", "datasets", "Reading a saved dataset").load_from_disk(str(path))
    if hasattr(saved, "keys"):  # a DatasetDict
        if len(saved) != 1:
            raise DataError(
                f"{path}: expected a dataset of one split, got {', '.join(saved)}. Save one of "
                "them.",
            )
        (saved,) = saved.values()
    rows = saved.skip(skip) if skip else saved
    for number, row in enumerate(rows, start=skip + 1):
        yield f"{path}, row {number}", dict(row)


def named_columns(
    fields: Sequence[str],
    names_by_column: Mapping[str, Sequence[str]],
) -> list[str | None]:
    """Return the column that each field of a first line names, None for a field that names none.

    Args:
        fields: the fields of the line.
        names_by_column: column -> names that it may have.
    """
    columns = {name: column for column, names in names_by_column.items() for name in names}
    return [columns.get(field.strip().strip('"').lower()) for field in fields]


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
        For each field ``"_id"``, ``"title"``, ``"text"`` or None for another column. None instead
        of the list if the line names no columns, and so is a row.

    Raises:
        DataError: for a line that may be either, or without a column that is `named`.
    """
    if named != USUAL_FIELDS:
        return _named_text_columns(fields, where, named)
    kinds = named_columns(fields, TEXTS)
    if kinds.count("_id") == kinds.count("text") == 1 and kinds.count("title") <= 1:
        return kinds
    if len(fields) > 1 and (kinds[0] == "_id" or "text" in kinds[1:]):
        raise DataError(
            f"{where}: expected a row, or names of columns with one id and one text, got {fields}, "
            "which may be either. Name the columns id, title and text; remove the line; or put it "
            "below another one, if it is a row.",
        )
    return None


def _named_text_columns(
    fields: Sequence[str],
    where: str,
    named: DocumentFields,
) -> list[str | None]:
    """Find the columns of a first line that must have names which the caller gave.

    Args:
        fields: the fields of the line.
        where: file and line, for the error.
        named: names of the fields of documents.

    Returns:
        For each field ``"_id"``, ``"title"``, ``"text"`` or None for another column.
    """
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
def _log_column_names(
    where: str,
    fields: tuple[str, ...],
    columns: tuple[str | None, ...],
) -> None:
    """Log that a line is taken as names of columns, once for a file that is read several times.

    The cache of the function skips a repeated call.

    Args:
        where: file and line.
        fields: the names in the line.
        columns: for each name, the column that it means, None for a column of metadata.
    """
    names = [field.strip() for field in fields]
    used = [name for name, column in zip(names, columns, strict=True) if column]
    metadata = [repr(name) for name, column in zip(names, columns, strict=True) if not column]
    others = f", {', '.join(metadata)} as metadata" if metadata else ""
    _logger.warning(
        "%s: this line is taken as names of columns (%s)%s",
        where,
        ", ".join(used),
        others,
    )


def row_of(fields: Sequence[str], columns: Sequence[str | None], where: str) -> dict[str, str]:
    """Return column -> field of a line, without the columns that have no name."""
    if len(fields) != len(columns):
        raise DataError(
            f"{where}: expected {len(columns)} fields as in the first line, which names them, got "
            f"{len(fields)}. Fix that line.",
        )
    return {column: field for column, field in zip(columns, fields, strict=True) if column}


def _topic_rows(path: Path) -> Iterator[Row]:
    """Yield rows of ``_id`` and ``text`` for TREC topics.

    A topic is ``<top>`` or ``<topic>`` with a number, and a title or query. Blanks next to a tag
    are layout, and a line break is one blank. Blanks within a line are kept.
    """
    text = "".join(line for _, line in numbered_lines(path))
    n_topics = 0
    for n_topics, topic in enumerate(_TOPIC.finditer(text), start=1):
        where = f"{path}, topic {n_topics}"
        number = _NUMBER.search(topic[0])
        title = _TITLE.search(topic[2])
        if number is None or title is None or not title[1].strip():
            raise DataError(
                f"{where}: expected a <num> and a <title> (or <query>), got one without.",
            )
        on_one_line = _LINE_BREAK.sub(" ", title[1].strip())
        yield where, {"_id": number[1] or number[2], "text": html.unescape(on_one_line)}
    if not n_topics:
        raise DataError(
            f"{path}: expected TREC topics (<top> ... </top>), got {text[:40]!r}. Name a table "
            ".tsv.",
        )


def query_rows(path: Path, *, allow_missing_ids: bool = False) -> Iterator[Row]:
    """Yield the rows of queries: TREC topics of a ``.trec`` file, or a table.

    Args:
        path: the file, or a folder of files.
        allow_missing_ids: whether a line of a text file may be a query without an id, as in
            :func:`text_rows`. It has no effect on topics, JSON, CSV and Parquet.

    Yields:
        File and line, and the fields of the query by name.
    """
    if path.name.endswith(TOPICS) and not path.is_dir():
        return _topic_rows(path)
    if allow_missing_ids and not path.is_dir() and not path.name.endswith(ROWS):
        return text_rows(numbered_lines(path), path, allow_missing_ids=True)
    return table_rows(path)


def check_queries_have_ids(path: Path) -> None:
    """Raise ``DataError`` for a file with a query that is a line without an id."""
    is_text = not path.is_dir() and not path.name.endswith((TOPICS, *ROWS))
    if is_text:
        for _ in text_rows(numbered_lines(path), path, allow_missing_ids=False):
            pass


def query_of_line(line: str, number: int) -> tuple[str, str]:
    """Read a query from a line: ``id<tab>text``, or a text alone, whose id is the line's number.

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
    """Return the fields between the tabs of a line, without the line's end."""
    return line.rstrip("\r\n").split("\t")


def read_splits(
    folder: Path,
    queries: Container[str],
    documents: Container[str],
    *,
    drop_unknown: bool,
    names: Sequence[str] | None,
) -> dict[str, Qrels]:
    """Read the judgements of a collection by split.

    Args:
        folder: the folder ``qrels``. Without it, MS MARCO's files ``qrels.<split>.tsv`` are read.
        queries: ids of the queries.
        documents: ids of the documents.
        drop_unknown: leave out judgements of other ids, which are an error otherwise.
        names: the splits to read. None reads all. All are also read if one of the names is not
            a split, so that the caller can list the existing ones in an error.

    Returns:
        Split -> query id -> document id -> grade.
    """
    files = _files_by_split(folder)
    chosen = names if names and all(split in files for split in names) else files
    return {split: _read_split(files[split], queries, documents, drop_unknown) for split in chosen}


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Find the files with the judgements of each split.

    A split may be divided into files whose names end in ``-00000-of-00002`` and so on.

    Args:
        folder: the folder ``qrels``. If there is none, files such as ``qrels.dev.tsv`` next to it
            are found.

    Returns:
        Split -> its files, in order.
    """
    prefix = "" if folder.is_dir() else f"{folder.name}."
    files = folder.iterdir() if folder.is_dir() else folder.parent.glob(f"{prefix}*.tsv")
    splits: dict[str, list[Path]] = {}
    for file in sorted(files):
        suffixes = [suffix for suffix in _SUFFIXES if file.name.endswith(suffix)]
        if suffixes and not file.name.startswith("."):
            name = file.name.removeprefix(prefix).removesuffix(max(suffixes, key=len))
            split = re.sub(r"-\d{5}-of-\d{5}$", "", name)
            splits.setdefault(split, []).append(file)
    return splits


def _read_split(
    files: list[Path],
    queries: Container[str],
    documents: Container[str],
    drop_unknown: bool,
) -> Qrels:
    """Read the judgements in the files of a split.

    Args:
        files: the files.
        queries: ids of the queries.
        documents: ids of the documents.
        drop_unknown: whether judgements of other ids are left out. Otherwise they are an error.

    Returns:
        Query id -> document id -> grade.

    Raises:
        DataError: for judgements of unknown ids, unless they are dropped, for pairs with several
            grades, and where no judgement is left.
    """
    qrels: Qrels = {}
    unknown: list[str] = []
    contradictory: dict[tuple[str, str], None] = {}  # an ordered set
    for where, query, document, grade in chain.from_iterable(map(_judgements, files)):
        if query not in queries:
            unknown.append(f"{where}: unknown query {query!r}")
        elif document not in documents:
            unknown.append(f"{where}: unknown document {document!r}")
        elif qrels.setdefault(query, {}).setdefault(document, grade) != grade:
            contradictory[query, document] = None
    if contradictory:
        raise _contradiction(files, list(contradictory))
    if unknown and drop_unknown:
        _logger.warning(
            "%s; %d judgement(s) of what the collection lacks are left out",
            unknown[0],
            len(unknown),
        )
    elif unknown:
        raise DataError(
            f"{unknown[0]}; {len(unknown)} judgement(s) in this file name queries or documents "
            "that are not in the collection. Complete it, or load it with --drop-unknown to leave "
            "them out (unknown='drop').",
        )
    if not qrels:
        got = f"{len(unknown)} of others, the first in {unknown[0]}" if unknown else "no judgement"
        raise DataError(
            f"{files[0]}: expected at least one judgement of a known query and document, got "
            f"{got}.",
        )
    return qrels


def _contradiction(files: list[Path], pairs: list[tuple[str, str]]) -> DataError:
    """Create the error for pairs that are judged with several grades, with all their lines.

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
    """Read the judgements in a file.

    Files of JSON, CSV or Parquet have rows. Other files have lines of three fields, or of four as
    in TREC, which tabs or blanks separate. Their first line may name columns.

    Yields:
        File and line, query id, document id and grade.
    """
    if path.name.endswith(ROWS):
        for where, row in table_rows(path):
            yield _judgement_of_row(row, where)
        return
    columns: list[str | None] | None = None
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        fields = _fields_of(line)
        if len(fields) == 1:  # separated by blanks
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
                f"{where}: expected 3 tab-separated fields (query-id, corpus-id, score), or the 4 "
                f"fields of TREC (with an iteration), got {len(fields)}. Fix that line.",
            )
        yield where, fields[0], fields[1], _grade(fields[2], "score", where)


def _judgement_of_row(row: Json, where: str) -> Judgement:
    """Return the judgement in a row of JSON, CSV, Parquet or a saved dataset.

    Args:
        row: field -> value.
        where: file and line, for the error.

    Returns:
        File and line, query id, document id and grade.
    """
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
    """Return the id in a field of a judgement as text.

    Args:
        value: text or a whole number. It may be a float such as 1.0, which data frames write.
        field: name of the field, for the error.
        where: file and line, for the error.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{where}: expected an id in {field!r}, text or a whole number, got {_shown(value)}. "
            "Fix that row.",
        )
    return value


def _grade(value: object, field: str, where: str) -> int:
    """Return the grade in a field of a judgement, by one rule for all formats.

    A grade is a whole number or its decimal digits, also as ``1.0``, which data frames write.
    Everything else that Python's ``int()`` would read, such as ``1_0`` or True, is refused.
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
