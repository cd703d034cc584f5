"""Lines of a file of documents: their offsets, keys of ids and contents, and bytes to digest.

Several processes, which run :func:`main`, read a large file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from tilefold.distributed.ranks import share_of_cores
from tilefold.retrieval.common.files import check_text_ids
from tilefold.retrieval.common.provenance import encoded_texts
from tilefold.retrieval.data.collection import Document, document_of_row
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.data.tables import USUAL_FIELDS, json_object
from tilefold.retrieval.errors import DataError

RANGE_BYTES = 1 << 18  # bytes of a file that are read at once
SINGLE_PROCESS_BYTES = 1 << 27  # this process reads smaller files itself
MAX_PROCESSES = 8
_RANGES_AHEAD = 4  # ranges that fit into the pipe of a process

# A process writes a message for each range: the header, three uint64 arrays [n] (the offsets, the
# keys of ids and the keys of contents), and the bytes to digest.
_MARK = b"\0lines\0\0"
_HEADER = struct.Struct("<8sQQ")  # the mark, the number of lines n, and the bytes to digest
_BYTES_PER_LINE = 3 * 8  # a number in each of the three arrays

_LONGEST_NUMBER = 18  # digits; every number of this length fits 64 bits
_FIRST_PRINTABLE = b"!"  # the first printable ASCII character after the space
_LAST_PRINTABLE = b"~"
_logger = logging.getLogger(__name__)


class Lines(NamedTuple):
    """The n lines of a range of bytes, without blank lines.

    Attributes:
        offsets: offset of each line in bytes, uint64 ``[n]``.
        id_keys: :func:`id_key` of the id of each line, uint64 ``[n]``.
        text_keys: :func:`id_key` of the contents of each line, uint64 ``[n]``.
        encoded: ids and contents as :func:`encoded_texts` encodes them for a digest.
    """

    offsets: npt.NDArray[np.uint64]
    id_keys: npt.NDArray[np.uint64]
    text_keys: npt.NDArray[np.uint64]
    encoded: bytes


class _ParsedLines(NamedTuple):
    """The n parsed lines of a range of bytes, without blank lines.

    Attributes:
        offsets: offset of each line in bytes ``[n]``.
        ids: ids in UTF-8 ``[n]``.
        contents: titles and texts in UTF-8 ``[n]``.
    """

    offsets: Sequence[int]
    ids: Sequence[bytes]
    contents: Sequence[bytes]


def all_lines(
    file: Path,
    size: int,
    fields: DocumentFields = USUAL_FIELDS,
) -> Iterator[Lines]:
    """Yield the lines of each range of ``RANGE_BYTES`` bytes of a file, in order.

    Several worker processes read a large file. If they cannot be started or end early, this process
    reads the remaining ranges.

    Args:
        file: JSON lines, or lines ``id<tab>text``.
        size: size of the file in bytes.
        fields: custom names of the document fields.
    """
    n_processes = _number_of_processes(size)
    range_starts = range(0, size, RANGE_BYTES)
    n_received = 0
    if n_processes > 1:
        ranges = _read_in_processes(file, size, n_processes, len(range_starts), fields)
        with closing(ranges):  # ends the worker processes if the caller stops early
            for lines_of_range in ranges:
                yield lines_of_range
                n_received += 1
    remaining = range_starts[n_received:]
    with file.open("rb") as stream:
        for start in remaining:
            yield _read_lines(stream, str(file), start, start + RANGE_BYTES, fields)
    # A worker process also ends at a malformed line, but then `_read_lines` has raised the error.
    if n_processes > 1 and remaining:
        _logger.warning(
            "%s: a process that read its lines ended early; this one has read the rest.",
            file,
        )


def _number_of_processes(size: int) -> int:
    """Return how many processes read a file of `size` bytes."""
    can_start_python = sys.executable and not getattr(sys, "frozen", False)
    if size < SINGLE_PROCESS_BYTES or not can_start_python:
        return 1
    ranks_of_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return min(MAX_PROCESSES, share_of_cores(max(1, ranks_of_machine)))


def _read_in_processes(
    file: Path,
    size: int,
    n_processes: int,
    n_ranges: int,
    fields: DocumentFields,
) -> Generator[Lines, None, None]:
    """Start processes that read a file, and yield the lines of each range in order.

    The file is divided into ranges of ``RANGE_BYTES`` bytes. Process p reads the ranges p,
    p + n_processes, p + 2 n_processes, and so on. The generator stops at the first range that a
    process does not deliver. It kills all processes at the end.

    Args:
        file: path of the file.
        size: size of the file in bytes.
        n_processes: number of processes.
        n_ranges: number of ranges of the file.
        fields: custom names of the document fields.
    """
    workers: list[subprocess.Popen[bytes]] = []
    try:
        with suppress(OSError, ValueError):  # a process cannot be started
            for number in range(n_processes):
                workers.append(_start_reader(file, size, number, n_processes, fields))
        if len(workers) < n_processes:
            return
        for range_number in range(n_ranges):
            lines = _receive_lines(workers[range_number % n_processes].stdout)
            if lines is None:
                return
            yield lines
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _start_reader(
    file: Path,
    size: int,
    number: int,
    n_processes: int,
    fields: DocumentFields,
) -> subprocess.Popen[bytes]:
    """Start a process that runs :func:`main` to read its share of a file.

    Args:
        file: path of the file.
        size: size of the file in bytes.
        number: number of this process, from 0.
        n_processes: number of all processes.
        fields: custom names of the document fields.

    Returns:
        The process, which writes the lines to its stdout.
    """
    # Give the child this process's import path.
    import_path = [entry for entry in sys.path if isinstance(entry, str)]
    code = (
        f"import sys; sys.path[:] = {import_path!r}; "
        f"from {__spec__.name} import main; main(sys.argv[1:])"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(file.absolute()),
        str(size),
        str(number),
        str(n_processes),
        str(RANGE_BYTES),
        json.dumps(asdict(fields)),
    ]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # noqa: S603 - this program
    if sys.platform == "linux" and worker.stdout:
        import fcntl

        # A larger pipe lets the process work ahead. The limit on pipe size may forbid it.
        pipe_bytes = _RANGES_AHEAD * RANGE_BYTES
        with suppress(OSError):
            fcntl.fcntl(worker.stdout, fcntl.F_SETPIPE_SZ, pipe_bytes)
    return worker


def _receive_lines(stream: IO[bytes] | None) -> Lines | None:
    """Read the lines of the next range from the stdout of a process.

    Returns:
        The lines, or None if the process has ended or wrote invalid data.
    """
    if stream is None:
        return None
    try:
        header = stream.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MARK):
            return None
        _, n_lines, n_encoded = _HEADER.unpack(header)
        arrays = stream.read(_BYTES_PER_LINE * n_lines)
        encoded = stream.read(n_encoded)
    except (OSError, ValueError):  # a broken pipe
        return None
    if len(arrays) != _BYTES_PER_LINE * n_lines or len(encoded) != n_encoded:
        return None
    offsets, id_keys, text_keys = np.frombuffer(arrays, np.uint64).reshape(3, n_lines)
    return Lines(offsets, id_keys, text_keys, encoded)


def main(arguments: Sequence[str]) -> None:
    """Write the lines of this process's share of a file to stdout.

    Args:
        arguments: the path, the size of the file, the number of this process, the number of
            processes, the bytes of a range, and the custom field names as JSON.
    """
    path, size, number, n_processes, range_bytes, custom_names = arguments
    range_length = int(range_bytes)
    first_start = int(number) * range_length
    stride = int(n_processes) * range_length
    fields = DocumentFields(**json.loads(custom_names))
    with Path(path).open("rb") as stream:
        for start in range(first_start, int(size), stride):
            lines = _read_lines(stream, path, start, start + range_length, fields)
            sys.stdout.buffer.write(_HEADER.pack(_MARK, len(lines.offsets), len(lines.encoded)))
            sys.stdout.buffer.write(lines.offsets.tobytes())
            sys.stdout.buffer.write(lines.id_keys.tobytes())
            sys.stdout.buffer.write(lines.text_keys.tobytes())
            sys.stdout.buffer.write(lines.encoded)
    sys.stdout.buffer.flush()


def _read_lines(
    stream: IO[bytes],
    path: str,
    start: int,
    stop: int,
    fields: DocumentFields,
) -> Lines:
    """Read the lines that begin in a range of bytes, and compute their keys.

    Args:
        stream: the open file.
        path: path of the file. A ``.jsonl`` file has JSON lines, other files ``id<tab>text``.
        start: first byte of the range.
        stop: the byte after the range.
        fields: custom names of the document fields.
    """
    first_offset, lines = _lines_beginning_in(stream, start, stop)
    line_ends = list(accumulate(map(len, lines), initial=first_offset))
    offsets = line_ends[:-1]  # a line begins where the line before it ends
    parsed = None if path.endswith(".jsonl") else _split_plain_lines(offsets, lines)
    if parsed is None:
        parsed = _parse_lines(offsets, lines, path, fields)
    return Lines(
        offsets=np.array(parsed.offsets, np.uint64),
        id_keys=np.array([id_key(name) for name in parsed.ids], np.uint64),
        text_keys=np.array([id_key(text) for text in parsed.contents], np.uint64),
        encoded=encoded_texts(parsed.ids, parsed.contents),
    )


def _lines_beginning_in(stream: IO[bytes], start: int, stop: int) -> tuple[int, list[bytes]]:
    """Read the lines that begin in a range of bytes. The last line may end after the range.

    Args:
        stream: the open file.
        start: first byte of the range.
        stop: the byte after the range.

    Returns:
        The offset of the first line, and the lines with their line breaks.
    """
    first_offset = start
    if start:
        # Skip the rest of the line with the byte before the range. If this byte is a line break, a
        # line begins with the range, and nothing of the range is skipped.
        stream.seek(start - 1)
        first_offset = start - 1 + len(stream.readline())
    n_bytes = stop - first_offset
    if n_bytes < 1:
        return first_offset, []
    if n_bytes == 1:  # readlines(0) would read the rest of the file
        return first_offset, [stream.readline()]
    # readlines(n) stops at the first line end after more than n bytes: here, at or after `stop`.
    return first_offset, stream.readlines(n_bytes - 1)


def _parse_lines(
    offsets: Sequence[int],
    lines: list[bytes],
    path: str,
    fields: DocumentFields,
) -> _ParsedLines:
    """Parse lines one by one, and leave out blank lines.

    Args:
        offsets: offset of each line in the file.
        lines: the lines.
        path: path of the file. A ``.jsonl`` file has JSON lines, other files ``id<tab>text``.
        fields: custom names of the document fields.
    """
    filled_offsets: list[int] = []
    ids: list[str] = []
    contents: list[bytes] = []
    for offset, line in zip(offsets, lines, strict=True):
        text = line.decode(encoding_at(offset))
        if text.strip():
            name, content = id_and_contents_of_line(text, path, fields)
            filled_offsets.append(offset)
            ids.append(name)
            contents.append(_utf8(content))
    if any("\0" in name for name in ids):  # no id may contain a zero byte
        check_text_ids("documents", ids)  # raises an error that names the id
    return _ParsedLines(filled_offsets, [_utf8(name) for name in ids], contents)


def _split_plain_lines(offsets: Sequence[int], lines: list[bytes]) -> _ParsedLines | None:
    """Split lines ``id<tab>text`` as bytes, which is much faster than to decode each.

    Args:
        offsets: offset of each line in the file.
        lines: the lines.

    Returns:
        The lines. None if they must be parsed one by one, because one is blank, has no tab, has a
        zero byte, or has an id that does not begin with a printable ASCII character.

    Raises:
        UnicodeDecodeError: if the lines are not UTF-8.
    """
    if not lines:
        return _ParsedLines((), (), ())
    # A text may contain more tabs.
    ids, tabs, texts = zip(
        *(line.rstrip(b"\r\n").partition(b"\t") for line in lines),
        strict=True,
    )
    joined_lines = b"".join(lines)
    # The least and the greatest id show how all ids begin, without a loop over them.
    ids_begin_printable = min(ids) >= _FIRST_PRINTABLE and max(ids) <= _LAST_PRINTABLE
    all_have_tabs = all(tabs)
    has_zero_byte = b"\0" in joined_lines
    if not ids_begin_printable or not all_have_tabs or has_zero_byte:
        return None
    if not joined_lines.isascii():
        joined_lines.decode()  # raises UnicodeDecodeError if the lines are not UTF-8
    return _ParsedLines(offsets, ids, texts)


def encoding_at(offset: int) -> str:
    """Return the encoding of the line at an offset. Only a file's first line may have a BOM."""
    return "utf-8" if offset else "utf-8-sig"


def id_and_document_of_line(
    text: str,
    file: str,
    fields: DocumentFields = USUAL_FIELDS,
) -> tuple[str, Document]:
    """Parse the id and the document in a line of a file.

    Args:
        text: the line.
        file: path of the file. A ``.jsonl`` file has JSON lines, other files ``id<tab>text``.
        fields: custom names of the document fields.

    Returns:
        Id of the document, and the document.
    """
    if file.endswith(".jsonl"):
        row = json_object(text, file)
    else:
        name, content = _split_at_tab(text)
        row = {"_id": name, "text": content}
    # Repeated ids raise an error later, when the ids of all lines are known.
    document = document_of_row(row, file, earlier_ids=(), fields=fields)
    return document.id, document


def id_and_contents_of_line(
    text: str,
    file: str,
    fields: DocumentFields = USUAL_FIELDS,
) -> tuple[str, str]:
    """Parse the id and the text to encode in a line of a file.

    Args:
        text: the line.
        file: path of the file. A ``.jsonl`` file has JSON lines, other files ``id<tab>text``.
        fields: custom names of the document fields.

    Returns:
        Id of the document, and its contents: title and text.
    """
    if not file.endswith(".jsonl"):
        return _split_at_tab(text)
    name, document = id_and_document_of_line(text, file, fields)
    return name, document.contents


def _split_at_tab(line: str) -> tuple[str, str]:
    """Split a line ``id<tab>text`` at its first tab, and return the id and the text."""
    name, tab, text = line.rstrip("\r\n").partition("\t")
    if not (name and tab):
        raise DataError(f"expected an id, a tab and a text, got {line!r}.")
    return name, text


def _utf8(text: str) -> bytes:
    """Encode a text in UTF-8, also if it has half a surrogate pair, which strict UTF-8 refuses."""
    return text.encode("utf-8", "surrogatepass")


def id_key(name: str | bytes) -> int:
    """Return a 64-bit key of an id or a text.

    The key of a number of up to 18 digits without a leading zero is the number itself. The key of
    another text is a digest, which two different texts share with a probability of 2^-64.
    """
    text = name if isinstance(name, bytes) else _utf8(name)
    if len(text) <= _LONGEST_NUMBER and text.isdigit() and not text.startswith(b"0"):
        return int(text)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
