"""Lines of a file of documents: their offsets, keys of ids and contents, and bytes to digest.

A large file is read by several processes, which run :func:`main`.
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

RANGE_BYTES = 1 << 18  # read at once
SINGLE_PROCESS_BYTES = 1 << 27  # smaller files are read by this process
MAX_PROCESSES = 8
_RANGES_AHEAD = 4  # ranges that fit into the pipe of a process

# The message of a process for one range: the header, the numbers [3, n] and the bytes to digest.
_MARK = b"\0lines\0\0"
_HEADER = struct.Struct("<8sQQ")  # the mark, the number of lines n, and the bytes to digest
_BYTES_PER_LINE = 3 * 8  # three uint64 numbers

_LONGEST_NUMBER = 18  # digits that fit 64 bits
_logger = logging.getLogger(__name__)


class Lines(NamedTuple):
    """The n lines of a range of bytes that are not blank.

    Attributes:
        numbers: uint64 ``[3, n]``: the offset of each line in bytes, the :func:`id_key` of its id,
            and that of its contents.
        encoded: ids and contents as :func:`encoded_texts` encodes them for a digest.
    """

    numbers: npt.NDArray[np.uint64]
    encoded: bytes


def all_lines(
    file: Path,
    size: int,
    fields: DocumentFields = USUAL_FIELDS,
) -> Iterator[Lines]:
    """Yield the lines of a file in order, range by range.

    Several processes read a large file. If they cannot be started or end early, this process reads
    the remaining ranges.

    Args:
        file: JSON lines, or lines of an id, a tab and a text.
        size: bytes of the file.
        fields: names of the fields of documents that are not the usual ones.
    """
    n_processes = _number_of_processes(size)
    range_starts = range(0, size, RANGE_BYTES)
    n_received = 0
    if n_processes > 1:
        from_processes = _lines_of_processes(file, size, n_processes, len(range_starts), fields)
        with closing(from_processes):  # ends the processes if the caller stops early
            for lines in from_processes:
                yield lines
                n_received += 1
    remaining = range_starts[n_received:]
    with file.open("rb") as stream:
        for start in remaining:
            yield _lines(stream, str(file), start, start + RANGE_BYTES, fields)
    if n_processes > 1 and remaining:  # a malformed line has raised its error by now
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


def _lines_of_processes(
    file: Path,
    size: int,
    n_processes: int,
    n_ranges: int,
    fields: DocumentFields,
) -> Generator[Lines, None, None]:
    """Yield the lines that processes read, in order, until a process fails to deliver a range.

    Process p reads the ranges p, p + n_processes, p + 2 n_processes, and so on. The caller reads
    the ranges that are not delivered. All processes are ended at the end.

    Args:
        file: path of the file.
        size: bytes of the file.
        n_processes: number of processes.
        n_ranges: number of ranges of the file.
        fields: names of the fields of documents that are not the usual ones.
    """
    workers: list[subprocess.Popen[bytes]] = []
    try:
        with suppress(OSError, ValueError):  # no further process can be started, or a broken pipe
            for number in range(n_processes):
                workers.append(_start(file, size, number, n_processes, fields))
            for range_number in range(n_ranges):
                lines = _received(workers[range_number % n_processes].stdout)
                if lines is None:
                    return
                yield lines
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _start(
    file: Path,
    size: int,
    number: int,
    n_processes: int,
    fields: DocumentFields,
) -> subprocess.Popen[bytes]:
    """Start a process that reads every n-th range of a file by :func:`main`.

    Args:
        file: path of the file.
        size: bytes of the file.
        number: number of this process, from 0.
        n_processes: number of all processes.
        fields: names of the fields of documents that are not the usual ones.

    Returns:
        The process, whose stdout has the lines.
    """
    # The process imports this module from the same folders as the present one.
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

        # A larger pipe lets a process work ahead. A user may not be allowed to have one.
        pipe_bytes = _RANGES_AHEAD * RANGE_BYTES
        with suppress(OSError):
            fcntl.fcntl(worker.stdout, fcntl.F_SETPIPE_SZ, pipe_bytes)
    return worker


def _received(stream: IO[bytes] | None) -> Lines | None:
    """Read the lines of the next range from the stdout of a process.

    Returns:
        The lines, or None if the process has ended or wrote something else.
    """
    if stream is None:
        return None
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MARK):
        return None
    _, n_lines, n_encoded = _HEADER.unpack(header)
    numbers = stream.read(_BYTES_PER_LINE * n_lines)
    encoded = stream.read(n_encoded)
    if len(numbers) != _BYTES_PER_LINE * n_lines or len(encoded) != n_encoded:
        return None
    return Lines(np.frombuffer(numbers, np.uint64).reshape(3, n_lines), encoded)


def main(arguments: Sequence[str]) -> None:
    """Write every n-th range of a file to stdout.

    Args:
        arguments: the path, the size of the file, the number of this process, the number of
            processes, the bytes of a range, and the named fields as JSON.
    """
    path, size, number, n_processes, range_bytes, named_fields = arguments
    length = int(range_bytes)
    fields = DocumentFields(**json.loads(named_fields))
    with Path(path).open("rb") as stream:
        for start in range(int(number) * length, int(size), int(n_processes) * length):
            numbers, encoded = _lines(stream, path, start, start + length, fields)
            header = _HEADER.pack(_MARK, numbers.shape[1], len(encoded))
            sys.stdout.buffer.write(header + numbers.tobytes() + encoded)
    sys.stdout.buffer.flush()


def _lines(
    stream: IO[bytes],
    path: str,
    start: int,
    stop: int,
    fields: DocumentFields,
) -> Lines:
    """Read the lines that begin in a range of bytes.

    Args:
        stream: the open file.
        path: its path, whose suffix says what its lines are.
        start: first byte of the range.
        stop: the byte after the range.
        fields: names of the fields of documents that are not the usual ones.

    Returns:
        Three numbers of each line (its offset, the key of its id and the key of its text), and the
        ids and texts in the form that a digest reads.
    """
    offset, lines = _lines_beginning_in(stream, start, stop)
    *offsets, _ = accumulate(map(len, lines), initial=offset)
    # Most lines with tabs can be split without parsing. None means that they are parsed one by one.
    columns = None if path.endswith(".jsonl") else _split_plain_lines(lines)
    if columns is None:
        offsets, columns = _parse_lines(offsets, lines, path, fields)
    ids, contents = columns
    numbers = [offsets, [id_key(name) for name in ids], [id_key(text) for text in contents]]
    return Lines(np.array(numbers, np.uint64), encoded_texts(ids, contents))


def _lines_beginning_in(stream: IO[bytes], start: int, stop: int) -> tuple[int, list[bytes]]:
    """Read the lines that begin in a range of bytes; the last one may end after it.

    Args:
        stream: the open file.
        start: first byte of the range.
        stop: the byte after the range.

    Returns:
        The offset of the first line, and the lines with their ends.
    """
    if start:
        # The line that begins before the range may end in it. The byte before the range is read
        # too, because it may be the line break after which the range's first line begins.
        stream.seek(start - 1)
        start += len(stream.readline()) - 1
    n_bytes = stop - start
    if n_bytes < 1:
        return start, []
    if n_bytes == 1:
        return start, [stream.readline()]
    return start, stream.readlines(n_bytes - 1)  # stops once more bytes than that are read


def _parse_lines(
    offsets: list[int],
    lines: list[bytes],
    path: str,
    fields: DocumentFields,
) -> tuple[list[int], tuple[Sequence[bytes], Sequence[bytes]]]:
    """Parse lines one by one, and leave out blank lines.

    Args:
        offsets: offset of each line in the file.
        lines: the lines.
        path: path of the file, whose suffix says what its lines are.
        fields: names of the fields of documents that are not the usual ones.

    Returns:
        Offsets of the lines that are not blank, and their ids and contents in UTF-8.
    """
    kept_offsets: list[int] = []
    ids: list[str] = []
    contents: list[bytes] = []
    for offset, line in zip(offsets, lines, strict=True):
        text = line.decode(encoding(offset))
        if text.strip():
            name, content = contents_of_line(text, path, fields)
            kept_offsets.append(offset)
            ids.append(name)
            contents.append(_bytes(content))
    if any("\0" in name for name in ids):
        check_text_ids("documents", ids)
    return kept_offsets, ([_bytes(name) for name in ids], contents)


def _split_plain_lines(lines: list[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]] | None:
    """Split lines of an id, a tab and a text without decoding each, which is much faster.

    Returns:
        Ids and texts; None if a line is blank or has no tab, a zero byte or an id that does not
        begin with a printable ASCII character.

    Raises:
        UnicodeDecodeError: for lines that are not UTF-8.
    """
    if not lines:
        return (), ()
    # The columns of all lines. A text may contain further tabs.
    ids, tabs, texts = zip(
        *(line.rstrip(b"\r\n").partition(b"\t") for line in lines),
        strict=True,
    )
    joined = b"".join(lines)
    # "!" and "~" are the first and the last printable ASCII characters after the blank. The
    # smallest of the tabs is empty if a line has none.
    if min(ids) < b"!" or max(ids) > b"~" or not min(tabs) or b"\0" in joined:
        return None
    if not joined.isascii():
        joined.decode()  # raises UnicodeDecodeError for lines that are not UTF-8
    return ids, texts


def encoding(offset: int) -> str:
    """Return the encoding of a line: only the first one of a file may have a byte order mark."""
    return "utf-8" if offset else "utf-8-sig"


def document_of_line(
    text: str,
    file: str,
    fields: DocumentFields = USUAL_FIELDS,
) -> tuple[str, Document]:
    """Parse a line of a file that has a document per line.

    Args:
        text: the line.
        file: path of the file. Lines of ``.jsonl`` are JSON, and others have an id, a tab and a
            text.
        fields: names of the fields of documents that are not the usual ones.

    Returns:
        Id of the document, and the document.
    """
    if file.endswith(".jsonl"):
        row = json_object(text, file)
    else:
        name, content = _id_and_text(text)
        row = {"_id": name, "text": content}
    # Repeated ids are found later, when the ids of all lines are known.
    document = document_of_row(row, file, earlier_ids=(), fields=fields)
    return document.id, document


def contents_of_line(
    text: str,
    file: str,
    fields: DocumentFields = USUAL_FIELDS,
) -> tuple[str, str]:
    """Parse a line of a file that has a document per line, for the text to encode.

    The arguments are those of :func:`document_of_line`.

    Returns:
        Id of the document, and its contents: title and text.
    """
    if not file.endswith(".jsonl"):
        return _id_and_text(text)
    name, document = document_of_line(text, file, fields)
    return name, document.contents


def _id_and_text(line: str) -> tuple[str, str]:
    """Split a line at its first tab."""
    name, tab, text = line.rstrip("\r\n").partition("\t")
    if not (name and tab):
        raise DataError(f"expected an id, a tab and a text, got {line!r}.")
    return name, text


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def id_key(name: str | bytes) -> int:
    """Return a 64-bit key of an id or a text.

    The key of a number of up to 18 digits without a leading zero is the number itself. Others have
    a digest, which two different texts share with a probability of 2^-64.
    """
    text = name if isinstance(name, bytes) else _bytes(name)
    if len(text) <= _LONGEST_NUMBER and text.isdigit() and not text.startswith(b"0"):
        return int(text)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
