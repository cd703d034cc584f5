"""Lines of a file of documents: where they begin, keys of ids and texts, and what their digest is
of.

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
from collections.abc import Iterator, Sequence
from contextlib import suppress
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

RANGE, ALONE, MOST = (
    1 << 18,
    1 << 27,
    8,
)  # bytes read at once, and of a file that one process reads; processes
_MARK = b"\0lines\0\0"
_HEADER = struct.Struct("<8sQQ")  # the mark, lines, and bytes of what a digest is of
_logger = logging.getLogger(__name__)


class Lines(NamedTuple):
    """n lines that are not blank."""

    numbers: npt.NDArray[
        np.uint64
    ]  # [3, n]: the bytes before each, the key of its id, and of its contents
    encoded: bytes  # ids and contents as a digest takes them


def all_lines(
    file: Path,
    size: int,
    fields: DocumentFields = USUAL_FIELDS,
) -> Iterator[Lines]:
    """The lines of a file of so many bytes, in order; `fields` as in ``load_documents``."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    alone = size < ALONE or not sys.executable or getattr(sys, "frozen", False)
    count = 1 if alone else min(MOST, share_of_cores(ranks))
    place, begins, workers = 0, range(0, size, RANGE), list[subprocess.Popen[bytes]]()
    try:
        with suppress(OSError, ValueError):  # no process more, or broken pipes
            workers.extend(
                _start(file, size, number, count, fields) for number in range(count) if count > 1
            )
            while (
                workers
                and place < len(begins)
                and (found := _received(workers[place % count].stdout))
            ):
                yield found
                place += 1
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    with file.open("rb") as stream:
        yield from (
            _lines(stream, str(file), begin, begin + RANGE, fields) for begin in begins[place:]
        )
    if count > 1 and place < len(begins):  # else an error said which line is broken
        _logger.warning(
            "%s: a process that read its lines ended early; this one has read the rest.",
            file,
        )


def _start(
    file: Path,
    size: int,
    number: int,
    count: int,
    fields: DocumentFields,
) -> subprocess.Popen[bytes]:
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = (
        f"import sys; sys.path[:] = {path!r}; from {__spec__.name} import main; main(sys.argv[1:])"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(file.absolute()),
        *map(str, (size, number, count, RANGE)),
        json.dumps(asdict(fields)),
    ]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # noqa: S603 - this program
    if sys.platform == "linux" and worker.stdout:
        import fcntl

        with suppress(
            OSError,
        ):  # as far as a user may have pipes of this size; in smaller ones they wait for another
            fcntl.fcntl(worker.stdout, fcntl.F_SETPIPE_SZ, 4 * RANGE)
    return worker


def _received(stream: IO[bytes] | None) -> Lines | None:
    header = stream.read(_HEADER.size) if stream else b""
    if not stream or len(header) < _HEADER.size or not header.startswith(_MARK):
        return None
    _, count, length = _HEADER.unpack(header)
    numbers, encoded = stream.read(24 * count), stream.read(length)
    if len(numbers) != 24 * count or len(encoded) != length:
        return None
    return Lines(np.frombuffer(numbers, np.uint64).reshape(3, count), encoded)


def main(arguments: Sequence[str]) -> None:
    """Write every n-th range of a file to stdout."""
    path, *numbers_of_ranges, named_fields = arguments
    size, number, count, length = map(int, numbers_of_ranges)
    fields = DocumentFields(**json.loads(named_fields))
    with Path(path).open("rb") as stream:
        for begin in range(number * length, size, count * length):
            numbers, encoded = _lines(stream, path, begin, begin + length, fields)
            header = _HEADER.pack(_MARK, numbers.shape[1], len(encoded))
            sys.stdout.buffer.write(header + numbers.tobytes() + encoded)
    sys.stdout.buffer.flush()


def _lines(
    stream: IO[bytes],
    path: str,
    begin: int,
    end: int,
    fields: DocumentFields,
) -> Lines:
    """The lines that begin in a range of bytes."""
    if begin:
        stream.seek(begin - 1)
        begin += len(stream.readline()) - 1
    lines = [stream.readline()] if end - begin == 1 else []
    if end - begin > 1:
        lines = stream.readlines(end - begin - 1)  # until more bytes than that are read
    *starts, _ = accumulate(map(len, lines), initial=begin)
    found = None if path.endswith(".jsonl") else _plain(lines)
    if found is None:
        texts = [(at, line.decode(encoding(at))) for at, line in zip(starts, lines, strict=True)]
        kept = [(at, *contents_of_line(text, path, fields)) for at, text in texts if text.strip()]
        if any("\0" in name for _, name, _ in kept):
            check_text_ids("documents", [name for _, name, _ in kept])
        starts = [at for at, _, _ in kept]
        found = [_bytes(name) for _, name, _ in kept], [_bytes(text) for _, _, text in kept]
    names, contents = found
    keys = ([id_key(text) for text in texts] for texts in (names, contents))
    return Lines(np.array([starts, *keys], np.uint64), encoded_texts(names, contents))


def _plain(lines: list[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]] | None:
    """Ids and texts of lines of an id, which begins with an ASCII letter or so, a tab and a text;
    None for others.
    """
    if not lines:
        return (), ()
    names, tabs, texts = zip(
        *(line.rstrip(b"\r\n").partition(b"\t") for line in lines),
        strict=True,
    )
    whole = b"".join(lines)
    if min(names) < b"!" or max(names) > b"~" or not min(tabs) or b"\0" in whole:
        return None
    if not whole.isascii():
        whole.decode()
    return names, texts


def encoding(start: int) -> str:
    """The encoding of a line that begins there."""
    return "utf-8" if start else "utf-8-sig"


def document_of_line(
    text: str,
    file: str,
    fields: DocumentFields = USUAL_FIELDS,
) -> tuple[str, Document]:
    """Id and document of a line."""
    row = (
        json_object(text, file)
        if file.endswith(".jsonl")
        else dict(zip(("_id", "text"), _pair(text), strict=True))
    )
    document = document_of_row(row, file, (), fields)
    return document.id, document


def contents_of_line(
    text: str,
    file: str,
    fields: DocumentFields = USUAL_FIELDS,
) -> tuple[str, str]:
    """Id and contents of the document of a line."""
    if not file.endswith(".jsonl"):
        return _pair(text)
    name, document = document_of_line(text, file, fields)
    return name, document.contents


def _pair(text: str) -> tuple[str, str]:
    name, tab, rest = text.rstrip("\r\n").partition("\t")
    if not (name and tab):
        raise DataError(f"expected an id, a tab and a text, got {text!r}.")
    return name, rest


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def id_key(name: str | bytes) -> int:
    """64 bits of an id or a text, which another one shares once in 2^64: a number of up to 18
    digits is its own.
    """
    text = name if isinstance(name, bytes) else _bytes(name)
    if len(text) < 19 and text.isdigit() and text[0] != 48:
        return int(text)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
