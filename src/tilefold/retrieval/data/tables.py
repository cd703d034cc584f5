"""Rows of the files of collections: JSON lines, CSV, TSV, Parquet, saved datasets, TREC topics."""

from __future__ import annotations

import codecs
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
from typing import NamedTuple

from tilefold._internal.arguments import check_instance
from tilefold.retrieval.common.files import Json, arrow, require
from tilefold.retrieval.data.fields import (
    JUDGEMENT_NAMES,
    TEXT_NAMES,
    DocumentFields,
    FieldError,
    judgement_columns,
    text_columns_of,
)
from tilefold.retrieval.errors import DataError

_logger = logging.getLogger(__name__)

Row = tuple[str, Json]  # file and line, for errors; field -> value
Qrels = dict[str, dict[str, int]]


class Judgement(NamedTuple):
    """A line of a file of judgements.

    Attributes:
        where: file and line, for errors.
        query: id of the query.
        document: id of the document.
        grade: how relevant the document is; 0 is not relevant.
    """

    where: str
    query: str
    document: str
    grade: int


TEXT_SUFFIXES = (".tsv", ".tsv.gz", ".txt", ".txt.gz")
CSV_SUFFIXES = (".csv", ".csv.gz")
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", *CSV_SUFFIXES)
USUAL_FIELDS = DocumentFields()
TOPICS_SUFFIX = ".trec"
_SAVED = ("dataset_dict.json", "state.json")  # files of a DatasetDict and of a Dataset
_ROWS_PER_BATCH = 1024
_TOPIC = re.compile(
    r"<top(?:ic)?\b[^>]*>(?P<content>.*?)</top(?:ic)?>",
    re.DOTALL | re.IGNORECASE,
)
_NUMBER = re.compile(
    r"<num(?:ber)?>\s*(?:Number:)?\s*(?P<element>[^\s<]+)|\bnumber=[\"'](?P<attribute>[^\"']+)",
    re.IGNORECASE,
)
_TITLE = re.compile(
    r"<(?:title|query)>\s*(?:Topic:)?(?P<text>.*?)(?=<|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_LINE_BREAK = re.compile(r"[^\S\n]*\n\s*")  # in a topic, with the blanks around it
_SUFFIXES = (*TEXT_SUFFIXES, ".qrels", TOPICS_SUFFIX, *ROW_SUFFIXES)
_JUDGEMENT_COLUMNS = tuple(JUDGEMENT_NAMES)
_TREC_FIELDS = 4  # query, iteration, document, grade
_GRADE = re.compile(r"[+-]?[0-9]{1,18}(?:\.0*)?")
_LONGEST_CELL = (1 << 31) - 1  # characters of a CSV field; the csv module's default is 131,072
_SHOWN_PAIRS = 10  # pairs with contradictory judgements that an error lists


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by ``save_to_disk`` of the package datasets."""
    return any((path / name).is_file() for name in _SAVED)


def find_table(folder: Path, name: str, suffixes: tuple[str, ...]) -> Path | None:
    """Find a table of a collection: a file with one of the suffixes, or a folder of files.

    Args:
        folder: the folder of the collection.
        name: name of the table without a suffix.
        suffixes: suffixes that the file may have.

    Returns:
        Path of the table, or None if it does not exist.

    Raises:
        DataError: if several files or folders match.
    """
    files = [folder / f"{name}{suffix}" for suffix in suffixes]
    tables = [file for file in files if file.is_file()]
    if (folder / name).is_dir():
        tables.append(folder / name)
    if len(tables) > 1:
        names = ", ".join(path.name for path in tables)
        raise DataError(f"{folder}: expected one of {names}, got all of them. Keep one.")
    return tables[0] if tables else None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers from 1.

    A file whose name ends in ``.gz`` is decompressed. A byte order mark is removed.

    Raises:
        DataError: if the text is not UTF-8, or the gzip file is damaged.
    """
    line_start = 0  # byte offset of the line in the decompressed text
    is_gzip = path.name.endswith(".gz")
    try:
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}:{number}: expected UTF-8 text, got the byte "
                        f"{line[error.start]:#04x} at byte {line_start + error.start} of the text. "
                        f"Convert it: iconv -f {_encoding_of(line)} -t UTF-8",
                    ) from error
                yield number, text
                line_start += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: expected a complete gzip file, got a damaged one ({error}). Fetch it again.",
        ) from error


def _encoding_of(line: bytes) -> str:
    """Return the name of the encoding of a line that is not UTF-8, for ``iconv``.

    A byte order mark at the start of a file marks UTF-16. Otherwise, LATIN1 is most likely.
    """
    return "UTF-16" if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"


def table_files(path: Path) -> list[Path]:
    """Return the files, or the saved dataset, whose rows :func:`table_rows` yields in turn."""
    if not path.is_dir() or is_saved_dataset(path):
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(ROW_SUFFIXES))
    if not files:
        got = sorted(file.name for file in path.iterdir())[:3] or "an empty folder"
        raise DataError(
            f"{path}: expected files that end in {', '.join(ROW_SUFFIXES)}, or a saved dataset, "
            f"got {got}.",
        )
    return files


def table_rows(
    path: Path,
    skip: int = 0,
    fields: DocumentFields = USUAL_FIELDS,
) -> Iterator[Row]:
    """Yield ``(where, row)`` of each row of a file, a folder of files or a saved dataset.

    Args:
        path: the file or folder. The suffix of a file gives its format.
        skip: number of rows to leave out at the beginning of each file.
        fields: custom names of the document fields, which the header of a ``.tsv`` or ``.txt`` file
            must then have.
    """
    if path.is_dir():
        if is_saved_dataset(path):
            yield from _dataset_rows(path, skip)
            return
        for file in table_files(path):
            yield from table_rows(file, skip, fields)
    elif path.name.endswith(".parquet"):
        yield from _parquet_rows(path, skip)
    elif path.name.endswith(CSV_SUFFIXES):
        yield from islice(_csv_rows(path), skip, None)
    elif path.name.endswith(ROW_SUFFIXES):
        for number, line in islice(_filled_lines(numbered_lines(path)), skip, None):
            yield f"{path}:{number}", json_object(line, f"{path}:{number}")
    elif path.name.endswith(TEXT_SUFFIXES):
        yield from islice(text_rows(numbered_lines(path), path, fields=fields), skip, None)
    else:
        remedy = ""
        if path.suffix == ".json":
            remedy = " Write one JSON object per line into a .jsonl file."
        raise DataError(
            f"{path}: expected a file that ends in {', '.join((*ROW_SUFFIXES, *TEXT_SUFFIXES))}, "
            f"got {path.name!r}.{remedy}",
        )


def text_rows(
    lines: Iterable[tuple[int, str]],
    path: object,
    *,
    allow_missing_ids: bool = False,
    fields: DocumentFields = USUAL_FIELDS,
) -> Iterator[Row]:
    """Yield the rows of a text file with tab-separated fields.

    The first line may be a header. Without a header, a row has an id and a text. Blanks are part of
    ids and texts. Only line breaks are removed.

    Args:
        lines: lines with their numbers.
        path: name of the file, for errors.
        allow_missing_ids: whether a line may be a text without a tab. Its id is then the number of
            the line. By default such a line is an error.
        fields: custom names of the document fields.

    Yields:
        ``(where, row)``: file and line, and the fields of the row by name.
    """
    names: list[str] = []  # names of the columns in the header, if there is one
    for position, (number, line) in enumerate(_filled_lines(lines)):
        where = f"{path}:{number}"
        values = _split_fields(line)
        if position == 0:
            columns = header_columns(values, where, fields)
            if columns:
                _warn_of_header(where, tuple(values), tuple(columns))
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
        ``(where, row)``: file and first line of the record, and its fields by name. All values are
        strings.

    Raises:
        DataError: if the CSV is malformed, two columns have the same name, or semicolons separate
            the columns.
    """
    records = _csv_records(path)
    where, header = next(records, ("", []))
    if len(header) == 1 and ";" in header[0]:
        raise DataError(
            f"{where}: expected columns that are separated by commas, got {header[0]!r}. Save the "
            "file with commas instead of semicolons.",
        )
    names = [name.strip() for name in header]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise DataError(
            f"{where}: expected distinct column names, got {repeated!r} twice. Rename one.",
        )
    for where, record in records:
        yield where, row_of(record, names, where)


def _csv_records(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the records of a CSV file that are not blank.

    Yields:
        File and first line of the record, and its fields.

    Raises:
        DataError: if the CSV is malformed.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    records = csv.reader((line for _, line in numbered_lines(path)), strict=True)
    while True:
        where = f"{path}:{records.line_num + 1}"
        try:
            record = next(records, None)
        except csv.Error as error:
            raise DataError(
                f"{where}: expected comma-separated values (RFC 4180), got malformed CSV "
                f"({error}). Put a field with a comma, a quote or a line break in quotes, and "
                'write a quote in it as "".',
            ) from error
        if record is None:
            return
        if record:
            yield where, record


def json_object(line: str, where: str) -> Json:
    """Parse a line as a JSON object.

    Args:
        line: the line.
        where: file and line, for the error.

    Raises:
        DataError: if the line is not a JSON object.
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
        ``(where, row)``: file and number of the row, from 1, and its fields by name.
    """
    pa, parquet = arrow("Reading Parquet")
    row_number = 0  # number of the last row that was read or skipped
    try:
        with parquet.ParquetFile(path) as file:
            groups = list(range(file.num_row_groups))
            while groups:
                group_rows = file.metadata.row_group(groups[0]).num_rows
                if row_number + group_rows > skip:
                    break
                row_number += group_rows
                del groups[0]
            for batch in file.iter_batches(_ROWS_PER_BATCH, row_groups=groups):
                for row in batch.to_pylist():
                    row_number += 1
                    if row_number > skip:
                        yield f"{path}, row {row_number}", row
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: expected a Parquet file, which could not be read ({error}). Fetch it again.",
        ) from error


def _dataset_rows(path: Path, skip: int) -> Iterator[Row]:
    """Yield the rows of a dataset that ``save_to_disk`` of the package ``datasets`` wrote.

    Args:
        path: folder of the dataset, which must have one split.
        skip: number of rows to leave out at the beginning.

    Yields:
        ``(where, row)``: folder and number of the row, from 1, and its fields by name.
    """
    saved = require("datasets", "datasets", "Reading a saved dataset").load_from_disk(str(path))
    if hasattr(saved, "keys"):  # a DatasetDict
        if len(saved) != 1:
            raise DataError(
                f"{path}: expected a dataset of one split, got {', '.join(saved)}. Save one split.",
            )
        (saved,) = saved.values()
    rows = saved.skip(skip) if skip else saved
    for number, row in enumerate(rows, start=skip + 1):
        yield f"{path}, row {number}", dict(row)


def named_columns(
    fields: Sequence[str],
    names_by_column: Mapping[str, Sequence[str]],
) -> list[str | None]:
    """Return which column each field of a header line names.

    Args:
        fields: the fields of the line.
        names_by_column: column -> names that it may have, in lower case.

    Returns:
        For each field its column, or None if the name is unknown.
    """
    columns = {name: column for column, names in names_by_column.items() for name in names}
    return [columns.get(field.strip().strip('"').lower()) for field in fields]


def is_header(fields: Sequence[str], where: str) -> bool:
    """Whether the first line of a text file names columns, and is not a row.

    Args:
        fields: the fields of the line.
        where: file and line, for the error.

    Raises:
        DataError: if the line could be a header or a row.
    """
    return bool(header_columns(fields, where))


def header_columns(
    fields: Sequence[str],
    where: str,
    custom_names: DocumentFields = USUAL_FIELDS,
) -> list[str | None]:
    """Return which column each field of a header line names.

    Args:
        fields: the fields of the first line of a file.
        where: file and line, for the error.
        custom_names: custom names of the document fields. If there are any, the line must be a
            header that has them.

    Returns:
        For each field ``"_id"``, ``"title"``, ``"text"`` or None for a column of metadata. The list
        is empty if the line is a row, and not a header.

    Raises:
        DataError: if the line could be a header or a row, or lacks a custom name.
    """
    if custom_names != USUAL_FIELDS:
        return _custom_header_columns(fields, where, custom_names)
    columns = named_columns(fields, TEXT_NAMES)
    if columns.count("_id") == columns.count("text") == 1 and columns.count("title") <= 1:
        return columns
    # Such as "id", "txt": a header with a misspelled name, or a row whose id is "id".
    is_ambiguous = columns[0] == "_id" or "text" in columns[1:]
    if len(fields) > 1 and is_ambiguous:
        raise DataError(
            f"{where}: expected a row, or names of columns with one id and one text, got {fields}, "
            "which may be either. If they are names, use id, title and text, or remove the line. "
            "If they are a row, put it below another one.",
        )
    return []


def _custom_header_columns(
    fields: Sequence[str],
    where: str,
    custom_names: DocumentFields,
) -> list[str | None]:
    """Return which column each field of a header names, for custom names of the columns.

    Args:
        fields: the fields of the header.
        where: file and line, for the error.
        custom_names: custom names of the document fields.

    Returns:
        For each field ``"_id"``, ``"title"``, ``"text"`` or None for a column of metadata.

    Raises:
        DataError: if the header lacks a column.
    """
    names = tuple(field.strip().strip('"') for field in fields)
    try:
        text_columns = text_columns_of(names, custom_names)
    except FieldError as error:
        raise DataError(f"{where}: {error}") from error
    column_of_name = {text_columns.id: "_id", text_columns.text: "text"}
    if text_columns.title is not None:
        column_of_name[text_columns.title] = "title"
    return [column_of_name.get(name) for name in names]


@functools.cache
def _warn_of_header(
    where: str,
    fields: tuple[str, ...],
    columns: tuple[str | None, ...],
) -> None:
    """Warn that a line is read as a header.

    ``functools.cache`` makes it warn once for a file that is read several times.

    Args:
        where: file and line.
        fields: the names in the line.
        columns: for each name, the column that it means, or None for a column of metadata.
    """
    document_columns: list[str] = []
    metadata_columns: list[str] = []
    for field, column in zip(fields, columns, strict=True):
        name = field.strip()
        if column:
            document_columns.append(name)
        else:
            metadata_columns.append(repr(name))
    metadata = f", {', '.join(metadata_columns)} as metadata" if metadata_columns else ""
    _logger.warning(
        "%s: this line is taken as names of columns (%s)%s",
        where,
        ", ".join(document_columns),
        metadata,
    )


def row_of(fields: Sequence[str], columns: Sequence[str | None], where: str) -> dict[str, str]:
    """Return column -> value of a line.

    Args:
        fields: the values of the line, one per column.
        columns: name of each column. Columns without a name are left out.
        where: file and line, for the error.

    Raises:
        DataError: if the line does not have a field for each column.
    """
    if len(fields) != len(columns):
        raise DataError(
            f"{where}: expected {len(columns)} fields as in the header, got {len(fields)}. Fix "
            "that line.",
        )
    return {column: field for column, field in zip(columns, fields, strict=True) if column}


def _topic_rows(path: Path) -> Iterator[Row]:
    """Yield rows of ``_id`` and ``text`` for TREC topics.

    A topic is ``<top>`` or ``<topic>`` with a number, and a title or query. White space next to a
    tag is dropped, and a line break becomes a space. Other blanks are kept.
    """
    text = "".join(line for _, line in numbered_lines(path))
    n_topics = 0
    for n_topics, topic in enumerate(_TOPIC.finditer(text), start=1):
        where = f"{path}, topic {n_topics}"
        number = _NUMBER.search(topic[0])
        title = _TITLE.search(topic["content"])
        if number is None or title is None or not title["text"].strip():
            raise DataError(
                f"{where}: expected a <num> and a <title> (or <query>), but one is missing.",
            )
        on_one_line = _LINE_BREAK.sub(" ", title["text"].strip())
        yield (
            where,
            {
                "_id": number["element"] or number["attribute"],
                "text": html.unescape(on_one_line),
            },
        )
    if not n_topics:
        raise DataError(
            f"{path}: expected TREC topics (<top> ... </top>), got {text[:40]!r}. If the "
            "file is a table, give it the ending .tsv.",
        )


def query_rows(path: Path, *, allow_missing_ids: bool = False) -> Iterator[Row]:
    """Yield the rows of queries: TREC topics of a ``.trec`` file, or a table.

    Args:
        path: the file, or a folder of files.
        allow_missing_ids: whether a line of a text file may be a query without an id. The number of
            the line is then its id. Has no effect on topics, JSON, CSV and Parquet.

    Yields:
        ``(where, row)``: file and line, and the fields of the query by name.
    """
    if _is_topics_file(path):
        return _topic_rows(path)
    if allow_missing_ids and _is_text_file(path):
        return text_rows(numbered_lines(path), path, allow_missing_ids=True)
    return table_rows(path)


def _is_topics_file(path: Path) -> bool:
    """Whether a path is a file of TREC topics."""
    return path.name.endswith(TOPICS_SUFFIX) and not path.is_dir()


def _is_text_file(path: Path) -> bool:
    """Whether a path is a file of lines, and not of JSON, CSV, Parquet or TREC topics."""
    return not path.is_dir() and not path.name.endswith((TOPICS_SUFFIX, *ROW_SUFFIXES))


def check_queries_have_ids(path: Path) -> None:
    """Raise ``DataError`` if a line of a file of queries has no id."""
    if _is_text_file(path):
        for _ in text_rows(numbered_lines(path), path, allow_missing_ids=False):
            pass


def query_of_line(line: str, number: int) -> tuple[str, str]:
    """Read a query from a line: ``id<tab>text``, or a text without an id.

    Blanks are part of the id and the text, as in a file of queries.

    Args:
        line: the line, with or without its line break.
        number: line number, from 1. It is used as the id if the line has none.

    Returns:
        The id and the text. The text is empty if nothing follows the tab.

    Raises:
        DataError: if the first line is a header, or nothing precedes the tab.
    """
    check_instance("line", line, str, "a line of text")
    fields = _split_fields(line.removeprefix("\ufeff") if number == 1 else line)
    line_without_break = "\t".join(fields)
    if number == 1 and is_header(fields, "line 1"):
        raise DataError(
            f"line 1: expected a query, got names of columns, {line_without_break!r}. Leave that "
            "line out.",
        )
    if len(fields) == 1:
        return str(number), fields[0]
    if not fields[0]:
        raise DataError(
            f"line {number}: expected an id before the tab, got {line_without_break!r}. "
            "Give the query an id, or remove the tab.",
        )
    return fields[0], "\t".join(fields[1:])


def _split_fields(line: str) -> list[str]:
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
        drop_unknown: leave out judgements of other ids, which otherwise raise an error.
        names: the splits to read; None reads all. If a name is unknown, all splits are read, and
            :meth:`Collection.split_qrels` later raises an error that lists them.

    Returns:
        Split -> query id -> document id -> grade.
    """
    files = _files_by_split(folder)
    splits = names if names and all(split in files for split in names) else files
    return {split: _read_split(files[split], queries, documents, drop_unknown) for split in splits}


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Find the files with the judgements of each split.

    A split may be divided into files whose names end in ``-00000-of-00002`` and so on.

    Args:
        folder: the folder ``qrels``. If it does not exist, files such as ``qrels.dev.tsv`` in its
            parent folder are used.

    Returns:
        Split -> its files, in order.
    """
    if folder.is_dir():
        named_files = [(file.name, file) for file in folder.iterdir()]
    else:  # MS MARCO's files
        prefix = f"{folder.name}."
        files = folder.parent.glob(f"{prefix}*.tsv")
        named_files = [(file.name.removeprefix(prefix), file) for file in files]
    files_by_split: dict[str, list[Path]] = {}
    for name, file in sorted(named_files):
        suffixes = [suffix for suffix in _SUFFIXES if name.endswith(suffix)]
        if suffixes and not name.startswith("."):
            stem = name.removesuffix(max(suffixes, key=len))
            split = re.sub(r"-\d{5}-of-\d{5}$", "", stem)
            files_by_split.setdefault(split, []).append(file)
    return files_by_split


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
        DataError: if a pair has several grades, an id is unknown and is not to be dropped, or no
            judgement remains.
    """
    qrels: Qrels = {}
    unknown: list[str] = []
    contradictory: dict[tuple[str, str], None] = {}  # an ordered set
    for where, query, document, grade in chain.from_iterable(map(_read_judgements, files)):
        if query not in queries:
            unknown.append(f"{where}: unknown query {query!r}")
        elif document not in documents:
            unknown.append(f"{where}: unknown document {document!r}")
        elif qrels.setdefault(query, {}).setdefault(document, grade) != grade:
            contradictory[query, document] = None
    if contradictory:
        raise _contradiction_error(files, list(contradictory))
    if unknown and drop_unknown:
        _logger.warning(
            "%s; %d judgement(s) of unknown queries or documents are left out",
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
        got = f"{len(unknown)} unknown, the first in {unknown[0]}" if unknown else "no judgement"
        raise DataError(
            f"{files[0]}: expected at least one judgement of a known query and document, got "
            f"{got}.",
        )
    return qrels


def _contradiction_error(files: list[Path], pairs: list[tuple[str, str]]) -> DataError:
    """Create the error for pairs that are judged with several grades.

    The files are read again, to list all grades of a pair with their lines. The message lists the
    first ``_SHOWN_PAIRS`` pairs.

    Args:
        files: the files of the split.
        pairs: the ids of the query and the document of each pair.
    """
    grades: dict[tuple[str, str], list[str]] = {pair: [] for pair in pairs[:_SHOWN_PAIRS]}
    for file in files:
        for where, query, document, grade in _read_judgements(file):
            if (query, document) in grades:
                grades[query, document].append(f"{grade} in {where}")
    descriptions = [
        f"query {query!r} and document {document!r}: {', '.join(pair_grades)}"
        for (query, document), pair_grades in grades.items()
    ]
    n_unlisted = len(pairs) - len(grades)
    if n_unlisted:
        descriptions.append(f"and {n_unlisted} more pairs")
    return DataError(
        f"{files[0]}: expected one grade of a query and a document, got several of {len(pairs)} "
        f"pair(s): {'; '.join(descriptions)}. Keep one line of each.",
    )


def _read_judgements(path: Path) -> Iterator[Judgement]:
    """Yield the judgements in a file.

    Files of JSON, CSV or Parquet have rows. Other files have lines of three fields, or four (TREC),
    which are separated by tabs or spaces. Their first line may be a header.
    """
    if path.name.endswith(ROW_SUFFIXES):
        for where, row in table_rows(path):
            yield _judgement_of_row(row, where)
        return
    header: list[str | None] = []
    for position, (number, line) in enumerate(_filled_lines(numbered_lines(path))):
        fields = _split_fields(line)
        if len(fields) == 1:  # separated by spaces
            fields = line.split()
        if position == 0:
            columns = named_columns(fields, JUDGEMENT_NAMES)
            if all(columns.count(name) == 1 for name in _JUDGEMENT_COLUMNS):
                header = columns
                continue
        yield _judgement_of_fields(fields, header, f"{path}:{number}")


def _judgement_of_fields(
    fields: list[str],
    header: Sequence[str | None],
    where: str,
) -> Judgement:
    """Return the judgement in the fields of a line.

    Args:
        fields: fields of the line.
        header: the column of each field; empty if the file has no header.
        where: file and line, for the error.

    Raises:
        DataError: if the number of fields is wrong, or the grade is not an integer.
    """
    if header:
        row = row_of(fields, header, where)
        fields = [row[name] for name in _JUDGEMENT_COLUMNS]
    if len(fields) == _TREC_FIELDS:
        query, _iteration, document, grade = fields
    elif len(fields) == len(_JUDGEMENT_COLUMNS):
        query, document, grade = fields
    else:
        raise DataError(
            f"{where}: expected 3 tab-separated fields (query-id, corpus-id, score), or the 4 "
            f"fields of TREC (with an iteration), got {len(fields)}. Fix that line.",
        )
    return Judgement(where, query, document, _parse_grade(grade, "score", where))


def _judgement_of_row(row: Json, where: str) -> Judgement:
    """Return the judgement in a row of JSON, CSV, Parquet or a saved dataset.

    Args:
        row: field -> value.
        where: file and line, for the error.
    """
    try:
        columns = judgement_columns(tuple(row))
    except FieldError as error:
        raise DataError(f"{where}: {error}") from error
    query_column = columns["query-id"]
    document_column = columns["corpus-id"]
    score_column = columns["score"]
    return Judgement(
        where,
        query=_parse_id(row[query_column], query_column, where),
        document=_parse_id(row[document_column], document_column, where),
        grade=_parse_grade(row[score_column], score_column, where),
    )


def _parse_id(value: object, field: str, where: str) -> str:
    """Return the id in a field of a judgement as text.

    Args:
        value: a string or a whole number. Data frames may write the number as a float, such as 1.0.
        field: name of the field, for the error.
        where: file and line, for the error.

    Raises:
        DataError: if the value is neither.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{where}: expected an id in {field!r}, text or a whole number, got "
            f"{_format_value(value)}. Fix that row.",
        )
    return value


def _parse_grade(value: object, field: str, where: str) -> int:
    """Return the grade in a field of a judgement.

    A grade is a whole number or its decimal digits. A fraction of zeros, as in ``1.0``, is allowed,
    because data frames write whole numbers so. Everything else that Python's ``int()`` would
    accept, such as ``1_0`` or True, is refused.

    Args:
        value: value of the field.
        field: name of the field, for the error.
        where: file and line, for the error.

    Raises:
        DataError: if the value is not a grade.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        digits = value.strip(" ")
        if _GRADE.fullmatch(digits):
            return int(digits.partition(".")[0])  # _GRADE allows only zeros after the point
    raise DataError(
        f"{where}: expected an integer grade, got {_format_value(value)} in {field!r}. Fix that "
        f"line; names of columns are {', '.join(_JUDGEMENT_COLUMNS)}.",
    )


def _format_value(value: object) -> str:
    """Return a value of a field for an error message; None is shown as JSON's null."""
    return "null" if value is None else repr(value)
