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
    """A text with its id, and the row of a file that it is from.

    Attributes:
        id: id of the text.
        text: the text.
        file: the file; None for a text in memory.
        number: number of the row in the file, from 0.
    """

    id: str
    text: str
    file: Path | None = None
    number: int = 0


@dataclass(frozen=True)
class ShardTexts:
    """The texts of one shard, in files or in memory.

    Attributes:
        number: number of the shard.
        count: number of texts.
        sha256: :func:`texts_digest` of the texts.
        row_ranges: rows of one or several files.
        in_memory: id -> text; None for texts in files.
        fields: custom names of the document fields.
    """

    number: int
    count: int
    sha256: str
    row_ranges: tuple[RowRange, ...] = ()
    in_memory: Mapping[str, str] | None = None
    fields: DocumentFields = USUAL_FIELDS

    def read(self) -> dict[str, str]:
        """Read the texts of the shard from their files, or return those in memory.

        Returns:
            Id -> text.

        Raises:
            DataError: if the texts have changed since the shards were planned.
        """
        if self.in_memory is not None:
            return dict(self.in_memory)
        texts: dict[str, str] = {}
        for file, start, stop in self.row_ranges:
            rows = table_rows(file, start, self.fields)
            for where, row in islice(rows, stop - start):
                document = document_of_row(row, where, texts, self.fields)
                texts[document.id] = document.contents
        if texts_digest(texts) != self.sha256:
            file, start, _ = self.row_ranges[0]
            raise DataError(
                f"{file}: from row {start + 1} on, the {self.count} rows differ from those that "
                "were read at the beginning: the file has changed, or differs on this machine. "
                "Start again.",
            )
        return texts


@dataclass
class ShardPlan:
    """Texts divided into shards, in one pass over them.

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
        """Divide the texts into shards.

        Args:
            shard_size: number of texts per shard.
            sample: minimum number of texts in the sample, or all texts if there are fewer. Up to
                twice as many may be returned.

        Raises:
            ValueError: if there are no texts.
        """
        rows = (_Row(name, text) for name, text in self.texts.items())
        plan, _ = _plan_shards(rows, shard_size, sample, USUAL_FIELDS)
        return plan


class FileTexts:
    """Texts in files, as :func:`tilefold.retrieval.load_documents` reads them.

    Other processes read the rows of their shards themselves.

    Args:
        path: file, folder or saved dataset.
        fields: custom names of the document fields.
    """

    def __init__(self, path: Path, fields: DocumentFields = USUAL_FIELDS) -> None:
        self.path = path.resolve()
        self.fields = fields

    def plan_shards(self, shard_size: int, sample: int = 0) -> ShardPlan:
        """Read all texts once and divide them into shards.

        Args:
            shard_size: number of texts per shard.
            sample: minimum number of texts in the sample, or all texts if there are fewer. Up to
                twice as many may be returned.

        Raises:
            DataError: if a row is malformed, or an id is missing or repeated. The message names
                file and line.
            ValueError: if there are no texts.
        """
        plan, id_keys = _plan_shards(self._rows(), shard_size, sample, self.fields)
        n_distinct = len(np.unique(np.frombuffer(id_keys, np.uint64)))
        if n_distinct < len(id_keys):  # a repeated id, or two ids that share a key
            self._check_ids_differ()
        return plan

    def _rows(self) -> Iterator[_Row]:
        """Yield the rows of all files."""
        for file in table_files(self.path):
            for number, (where, row) in enumerate(table_rows(file, fields=self.fields)):
                document = document_of_row(row, where, (), self.fields)
                yield _Row(document.id, document.contents, file, number)

    def _check_ids_differ(self) -> None:
        """Raise ``DataError`` if two rows have the same id."""
        ids: set[str] = set()
        for where, row in table_rows(self.path, fields=self.fields):
            ids.add(document_of_row(row, where, ids, self.fields).id)


Texts = InMemoryTexts | FileTexts  # texts that can be sent to other processes


class _Sample:
    """An evenly spaced sample of a stream of unknown length.

    Every n-th text is kept. Once there are twice as many as needed, every second one of them is
    dropped, and n doubles.

    Args:
        size: minimum number of texts to keep; 0 keeps none.
    """

    def __init__(self, size: int) -> None:
        self.texts: list[str] = []
        self._size = size
        self._step = 1

    def add(self, position: int, text: str) -> None:
        """Add the text at a position of the stream, if the position is in the sample."""
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
) -> tuple[ShardPlan, array[int]]:
    """Divide rows into shards, and compute the digests of their texts.

    Args:
        rows: the texts, in order.
        shard_size: number of texts per shard.
        sample_size: minimum number of texts in the sample.
        fields: custom names of the document fields.

    Returns:
        The plan, and the :func:`id_key` of each text. Keys take less memory than ids.

    Raises:
        ValueError: if there are no texts.
    """
    plan = ShardPlan()
    id_keys = array("Q")
    digest = TextsDigest()
    sample = _Sample(sample_size)
    while shard_rows := list(islice(rows, shard_size)):
        shard_digest = TextsDigest()
        for row in shard_rows:
            digest.add(row.id, row.text)
            shard_digest.add(row.id, row.text)
            id_keys.append(id_key(row.id))
            if isinstance(row.text, str):
                sample.add(plan.count, row.text)
            plan.count += 1
        texts_in_memory = {row.id: row.text for row in shard_rows if row.file is None}
        shard = ShardTexts(
            number=len(plan.ranges),
            count=len(shard_rows),
            sha256=shard_digest.hexdigest(),
            row_ranges=_row_ranges(shard_rows),
            in_memory=texts_in_memory or None,
            fields=fields,
        )
        plan.ranges.append(shard)
    if not plan.count:
        raise ArgumentError("texts", "expected at least one, got an empty collection.")
    plan.sha256 = digest.hexdigest()
    plan.sample = sample.texts
    return plan, id_keys


def _row_ranges(rows: list[_Row]) -> tuple[RowRange, ...]:
    """Return the range of the rows of each file. The rows of a file must be consecutive."""
    ranges = []
    for file, group in groupby(rows, key=lambda row: row.file):
        if file is not None:
            numbers = [row.number for row in group]
            ranges.append(RowRange(file, numbers[0], numbers[-1] + 1))
    return tuple(ranges)
