"""Texts of shards as ranges of rows of files, each with a digest, for other processes to read."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tilefold._internal.arguments import ArgumentError
from tilefold.retrieval.common.provenance import TextsDigest, texts_digest
from tilefold.retrieval.data.collection import document_of_row
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.data.lazy_documents import id_key
from tilefold.retrieval.data.tables import USUAL_FIELDS, table_files, table_rows
from tilefold.retrieval.errors import DataError

__all__ = ["FileTexts", "InMemoryTexts", "RowRange", "ShardPlan", "ShardTexts", "Texts"]


class RowRange(NamedTuple):
    """Rows ``start`` to ``stop`` of a file."""

    file: Path
    start: int
    stop: int


class _Row(NamedTuple):
    """A text with its id, and where it was read."""

    file: Path | None  # None for a text in memory
    number: int  # of the row in the file, from 0
    id: str
    text: str


@dataclass(frozen=True)
class ShardTexts:
    """The texts of one shard: rows of files, or `held` for texts in memory.

    Attributes:
        number: number of the shard.
        count: number of texts.
        sha256: :func:`texts_digest` of the texts.
        rows: ranges of rows, of one or several files.
        held: id -> text, for texts that are in no file.
        fields: names of the fields of the rows that are not the usual ones.
    """

    number: int
    count: int
    sha256: str
    rows: tuple[RowRange, ...] = ()
    held: Mapping[str, str] | None = None
    fields: DocumentFields = USUAL_FIELDS

    def read(self) -> dict[str, str]:
        """Read the texts of the shard from their files, or return those in memory.

        Returns:
            Id -> text.

        Raises:
            DataError: if the texts have changed since the shards were planned.
        """
        if self.held is not None:
            return dict(self.held)
        texts: dict[str, str] = {}
        for file, start, stop in self.rows:
            rows = table_rows(file, start, self.fields)
            for where, row in islice(rows, stop - start):
                document = document_of_row(row, where, texts, self.fields)
                texts[document.id] = document.contents
        if texts_digest(texts) != self.sha256:
            file, start, _ = self.rows[0]
            raise DataError(
                f"{file}: from row {start + 1} on, the {self.count} rows are not those that were "
                "read at the beginning: the file has changed, or is another one on this machine. "
                "Start again.",
            )
        return texts


@dataclass
class ShardPlan:
    """Shards of texts, from one pass over them.

    Attributes:
        ranges: the texts of each shard.
        count: number of all texts.
        sha256: digest of all texts.
        sample: an evenly spaced sample of the texts.
    """

    ranges: list[ShardTexts] = field(default_factory=list)
    count: int = 0
    sha256: str = ""
    sample: list[str] = field(default_factory=list)


class InMemoryTexts:
    """Texts in the memory of this process, which are sent to other processes with their shards.

    Args:
        texts: id -> text, in a fixed order.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts

    def plan_shards(self, shard_size: int, sample: int = 0) -> ShardPlan:
        """Cut the texts into shards.

        Args:
            shard_size: texts of a shard.
            sample: how many texts to sample at least, where there are that many. At most twice as
                many are kept.

        Raises:
            ValueError: if there are no texts.
        """
        rows = (_Row(file=None, number=0, id=name, text=text) for name, text in self.texts.items())
        return _plan_shards(rows, shard_size, sample, USUAL_FIELDS)


class FileTexts:
    """Texts in files, as :func:`tilefold.retrieval.load_documents` reads them.

    Other processes read the rows of their shards themselves.

    Args:
        path: file, folder or saved dataset.
        fields: names of the fields of documents that are not the usual ones.
    """

    def __init__(self, path: Path, fields: DocumentFields = USUAL_FIELDS) -> None:
        self.path = path.resolve()
        self.fields = fields

    def plan_shards(self, shard_size: int, sample: int = 0) -> ShardPlan:
        """Read all texts once and cut them into shards, as :meth:`InMemoryTexts.plan_shards`.

        Raises:
            DataError: for a malformed row, or a missing or repeated id; it names file and line.
            ValueError: if there are no texts.
        """
        # 64-bit hashes, because the ids themselves may need much memory. _rows() appends them.
        id_keys = array("Q")
        plan = _plan_shards(self._rows(id_keys), shard_size, sample, self.fields)
        n_different = len(np.unique(np.frombuffer(id_keys, np.uint64)))
        if n_different < len(id_keys):  # an id twice, or two ids that share a key
            self._check_ids_differ()
        return plan

    def _rows(self, id_keys: array[int]) -> Iterator[_Row]:
        """Yield the rows of all files, and append the key of each id to `id_keys`."""
        for file in table_files(self.path):
            for number, (where, row) in enumerate(table_rows(file, fields=self.fields)):
                document = document_of_row(row, where, (), self.fields)
                id_keys.append(id_key(document.id))
                yield _Row(file, number, document.id, document.contents)

    def _check_ids_differ(self) -> None:
        """Raise ``DataError`` for the first row whose id an earlier row has."""
        ids: set[str] = set()
        for where, row in table_rows(self.path, fields=self.fields):
            ids.add(document_of_row(row, where, ids, self.fields).id)


Texts = InMemoryTexts | FileTexts  # that can be given to other processes


class _Sample:
    """An evenly spaced sample of a stream of unknown length.

    Every n-th text is kept. Once there are twice as many as needed, every second one of them is
    dropped, and n doubles.

    Args:
        size: texts to keep; 0 for none.
    """

    def __init__(self, size: int) -> None:
        self.texts: list[str] = []
        self._size = size
        self._step = 1

    def add(self, position: int, text: str) -> None:
        """Keep the text at a position of the stream if it is in the sample."""
        if not self._size or position % self._step:
            return
        self.texts.append(text)
        if len(self.texts) >= 2 * self._size:
            self.texts = self.texts[::2]
            self._step *= 2


def _plan_shards(
    rows: Iterator[_Row],
    shard_size: int,
    sample_size: int,
    fields: DocumentFields,
) -> ShardPlan:
    """Cut rows into shards, and compute the digests of their texts.

    Args:
        rows: id, text and position in a file of each text, in order.
        shard_size: texts per shard.
        sample_size: how many texts to sample.
        fields: names of the fields of documents that are not the usual ones.

    Returns:
        The shards, the number and the digest of all texts, and the sample.

    Raises:
        ValueError: if there are no texts.
    """
    plan = ShardPlan()
    digest = TextsDigest()
    sample = _Sample(sample_size)
    while shard_rows := list(islice(rows, shard_size)):
        shard_digest = TextsDigest()
        for row in shard_rows:
            digest.add(row.id, row.text)
            shard_digest.add(row.id, row.text)
            if isinstance(row.text, str):
                sample.add(plan.count, row.text)
            plan.count += 1
        held = {row.id: row.text for row in shard_rows if row.file is None}
        shard = ShardTexts(
            len(plan.ranges),
            len(shard_rows),
            shard_digest.hexdigest(),
            _row_ranges(shard_rows),
            held or None,
            fields,
        )
        plan.ranges.append(shard)
    if not plan.count:
        raise ArgumentError("texts", "expected at least one, got an empty collection.")
    plan.sha256 = digest.hexdigest()
    plan.sample = sample.texts
    return plan


def _row_ranges(rows: list[_Row]) -> tuple[RowRange, ...]:
    """Return the range of consecutive rows of each file."""
    ranges = []
    for file, group in groupby(rows, key=lambda row: row.file):
        if file is not None:
            numbers = [row.number for row in group]
            ranges.append(RowRange(file, numbers[0], numbers[-1] + 1))
    return tuple(ranges)
