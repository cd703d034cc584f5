"""Texts in ranges of rows, one per shard, each with a digest: what other processes are told to
encode.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tilefold.retrieval.common.provenance import TextsDigest, texts_digest
from tilefold.retrieval.data.collection import document_of_row
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.data.lazy_documents import id_key
from tilefold.retrieval.data.tables import USUAL_FIELDS, table_files, table_rows
from tilefold.retrieval.errors import DataError

__all__ = ["FileTexts", "InMemoryTexts", "RowRange", "ShardPlan", "ShardTexts", "Texts"]


_Row = tuple[tuple[Path, int] | None, str, str]  # file and row, id, text


class RowRange(NamedTuple):
    """RowRange ``start`` to ``stop`` of a file."""

    file: Path
    start: int
    stop: int


@dataclass(frozen=True)
class ShardTexts:
    """The texts of a shard, in rows of files, or `held` where they are in no file."""

    number: int
    count: int
    sha256: str  # texts_digest
    rows: tuple[RowRange, ...] = ()
    held: Mapping[str, str] | None = None
    fields: DocumentFields = USUAL_FIELDS  # names of the fields of the rows

    def read(self) -> dict[str, str]:
        """Id -> text; ``DataError`` where they are not those of the digest."""
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
            said = f"from row {start + 1} on, the {self.count} rows are not those that were read at the beginning"
            raise DataError(
                f"{file}: {said}: the file has changed, or is another one on this machine. Start again.",
            )
        return texts


@dataclass
class ShardPlan:
    """Ranges of shards, counts, the digest of all texts and an evenly spaced sample, from one
    reading.
    """

    ranges: list[ShardTexts] = field(default_factory=list)
    count: int = 0
    sha256: str = ""
    sample: list[str] = field(default_factory=list)


class InMemoryTexts:
    """Texts in the memory of this process, id -> text in a fixed order; they travel with the
    ranges.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts

    def plan_shards(self, shard_size: int, sample: int = 0) -> ShardPlan:
        """Read all texts once; `sample` of them are kept, at most twice as many."""
        return _survey(
            ((None, name, text) for name, text in self.texts.items()),
            shard_size,
            sample,
        )


class FileTexts:
    """Documents as :func:`tilefold.retrieval.load_documents` reads them, which others read for
    themselves.

    Args:
        path: file, folder or saved dataset.
        fields: names of the fields of documents that are not the usual ones.
    """

    def __init__(self, path: Path, fields: DocumentFields = USUAL_FIELDS) -> None:
        self.path = path.resolve()
        self.fields = fields

    def plan_shards(self, shard_size: int, sample: int = 0) -> ShardPlan:
        """See :class:`InMemoryTexts`; ``DataError`` names the line of a malformed row, or of a missing
        or repeated id.
        """
        keys = array("Q")  # of ids: the texts are not kept
        found = _survey(self._rows(keys), shard_size, sample, self.fields)
        if len(np.unique(np.frombuffer(keys, np.uint64))) < len(
            keys,
        ):  # an id twice, or two ids of one key
            seen: set[str] = set()
            for where, row in table_rows(self.path, fields=self.fields):
                seen.add(document_of_row(row, where, seen, self.fields).id)
        return found

    def _rows(self, keys: array[int]) -> Iterator[_Row]:
        for file in table_files(self.path):
            for at, (where, row) in enumerate(table_rows(file, fields=self.fields)):
                document = document_of_row(row, where, {}, self.fields)
                keys.append(id_key(document.id))
                yield (file, at), document.id, document.contents


Texts = InMemoryTexts | FileTexts  # that can be given to other processes


def _survey(
    given: Iterator[_Row],
    shard_size: int,
    wanted: int,
    fields: DocumentFields = USUAL_FIELDS,
) -> ShardPlan:
    """Ranges of texts; every n-th text is kept, n doubling when there are more than twice as many
    as wanted.
    """
    found, digest, every = ShardPlan(), TextsDigest(), 1
    while part := list(islice(given, shard_size)):
        own = TextsDigest()
        for _, name, text in part:
            digest.add(name, text)
            own.add(name, text)
            if isinstance(text, str) and wanted and found.count % every == 0:
                found.sample.append(text)
                if len(found.sample) >= 2 * wanted:
                    found.sample, every = found.sample[::2], 2 * every
            found.count += 1
        held = {name: text for place, name, text in part if place is None}
        places = (place for place, _, _ in part if place is not None)
        grouped = (
            (file, [at for _, at in group]) for file, group in groupby(places, itemgetter(0))
        )
        spans = tuple(
            RowRange(file, rows[0], rows[-1] + 1) for file, rows in grouped
        )  # consecutive rows of each file
        found.ranges.append(
            ShardTexts(len(found.ranges), len(part), own.hexdigest(), spans, held or None, fields),
        )
    found.sha256 = digest.hexdigest()
    if not found.count:
        raise ValueError("texts: expected at least one, got an empty collection.")
    return found
