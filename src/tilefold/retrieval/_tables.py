"""Rows of the files that collections come in: JSON lines, TSV, Parquet, folders of those, and saved datasets."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

from tilefold.retrieval._columns import row_of, say_once, text_columns
from tilefold.retrieval._files import require
from tilefold.retrieval.errors import DataError

Row = tuple[str, dict[str, Any]]

TEXT = (".tsv", ".tsv.gz", ".txt", ".txt.gz")
ROWS = (".jsonl", ".jsonl.gz", ".parquet")
_SAVED = ("dataset_dict.json", "state.json")  # of a DatasetDict, of a Dataset
_ROWS_PER_BATCH = 1024


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by ``save_to_disk`` of the package datasets."""
    return any((path / name).is_file() for name in _SAVED)


def find_table(folder: Path, name: str, suffixes: tuple[str, ...]) -> Path | None:
    """The table `name` in `folder`: a file with one of `suffixes`, or a folder; None if there is nothing.

    Raises:
        DataError: there are several.
    """
    found = [path for suffix in suffixes if (path := folder / f"{name}{suffix}").is_file()]
    found += [path for path in (folder / name,) if path.is_dir()]
    if len(found) > 1:
        raise DataError(f"{folder}: expected one of {', '.join(path.name for path in found)}, got all. Keep one.")
    return found[0] if found else None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a text file, gzipped where its name ends in ``.gz``, with their numbers from 1.

    Raises:
        DataError: bytes that are not UTF-8, by line and by byte of the file; a damaged gzip file.
    """
    start = 0
    with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as stream:
        lines = enumerate(stream, start=1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f"{path}: expected a whole gzip file, got ({error}). Fetch it again.") from error
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: expected UTF-8 text, got the byte {line[error.start]:#04x} at byte "
                    f"{start + error.start} of the text. Convert it, for example: iconv -f LATIN1 -t UTF-8"
                ) from error
            start += len(line)


def table_files(path: Path) -> list[Path]:
    """The files, or the saved dataset, whose rows :func:`table_rows` gives one after the other."""
    if not path.is_dir() or is_saved_dataset(path):
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(ROWS))
    if not files:
        got = sorted(file.name for file in path.iterdir())[:3] or "an empty folder"
        raise DataError(f"{path}: expected files that end in {', '.join(ROWS)}, or a saved dataset, got {got}.")
    return files


def table_rows(path: Path, skip: int = 0) -> Iterator[Row]:
    """``(where, row)`` of each row, with `where` for messages: file and line, or file and row.

    Args:
        path: a file, a folder of files, or a saved dataset.
        skip: rows at the beginning of each file that are passed over without being looked at.

    Raises:
        DataError: a malformed line or file, a file of another kind, a dataset with several splits.
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
        for number, line in _filled_lines(path, skip):
            yield f"{path}:{number}", _json_object(line, path, number)
    elif path.name.endswith(TEXT):
        yield from islice(text_rows(numbered_lines(path), path), skip, None)
    else:
        raise DataError(f"{path}: expected a file that ends in {', '.join((*ROWS, *TEXT))}, got {path.name!r}.")


def text_rows(lines: Iterable[tuple[int, str]], path: object, *, bare: bool = False) -> Iterator[Row]:
    """Rows of lines of an id, a tab and a text; or of the columns that the first of them names.

    Args:
        lines: with their numbers; empty ones are passed over.
        path: where they come from, for messages.
        bare: a line without a tab is a text, whose id is the line's number, and not an error.

    Raises:
        DataError: a line without a tab, or with other columns than the first one names.
    """
    columns: list[str | None] | None = None
    first = True
    for number, line in lines:
        where, fields = f"{path}:{number}", line.rstrip("\r\n").split("\t")
        if not line.strip():
            continue
        if first:
            first, columns = False, text_columns(fields, where)
            if columns:
                say_once(where, tuple(fields))
                continue
        if columns:
            yield where, row_of(fields, columns, where)
        elif len(fields) > 1:
            yield where, {"_id": fields[0], "text": "\t".join(fields[1:])}
        elif bare:
            yield where, {"_id": str(number), "text": line.strip()}
        else:
            raise DataError(f"{where}: expected an id, a tab and a text, got no tab. Fix that line.")


def _filled_lines(path: Path, skip: int) -> Iterator[tuple[int, str]]:
    return islice(((number, line) for number, line in numbered_lines(path) if line.strip()), skip, None)


def _json_object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # malformed JSON, a number with thousands of digits, too deep nesting
        raise DataError(
            f"{path}:{number}: expected one JSON object per line, got malformed JSON ({error}). Fix that line."
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: expected one JSON object per line, got {type(row).__name__}. Fix that line.")
    return row


def _parquet_rows(path: Path, skip: int) -> Iterator[Row]:
    arrow, parquet = (require(name, "pyarrow", "Reading Parquet") for name in ("pyarrow", "pyarrow.parquet"))
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
    except arrow.ArrowException as error:
        raise DataError(f"{path}: expected a Parquet file, got ({error}). Fetch it again.") from error


def _dataset_rows(path: Path, skip: int) -> Iterator[Row]:
    saved = require("datasets", "datasets", "Reading a saved dataset").load_from_disk(str(path))
    if hasattr(saved, "keys"):  # a DatasetDict
        if len(saved) != 1:
            raise DataError(f"{path}: expected a dataset of one split, got {', '.join(saved)}. Save one of them.")
        (saved,) = saved.values()
    for number, row in enumerate(saved.skip(skip) if skip else saved, start=skip + 1):
        yield f"{path}, row {number}", cast(dict[str, Any], row)
