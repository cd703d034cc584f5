"""Texts in ranges of rows, one per shard, each with a digest: what other processes are told to encode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tilefold.retrieval._tables import table_files, table_rows
from tilefold.retrieval.collection import document_of_row
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.provenance import TextsDigest, texts_digest
from tilefold.retrieval.stored_documents import id_key

__all__ = ["HeldTexts", "Range", "Rows", "StoredTexts", "Survey", "Texts"]


class Rows(NamedTuple):
    """Rows ``start`` to ``stop`` of a file."""

    file: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Range:
    """The texts of a shard.

    Attributes:
        number: of the shard.
        count: texts.
        sha256: :func:`texts_digest` of them.
        rows: where they are, in order.
        held: id -> text instead, of texts that are in no file.
    """

    number: int
    count: int
    sha256: str
    rows: tuple[Rows, ...] = ()
    held: Mapping[str, str] | None = None

    def read(self) -> dict[str, str]:
        """Id -> text.

        Raises:
            DataError: they are not those of the digest.
            FileNotFoundError: a file is not there.
        """
        if self.held is not None:
            return dict(self.held)
        texts: dict[str, str] = {}
        for file, start, stop in self.rows:
            for where, row in islice(table_rows(file, start), stop - start):
                document = document_of_row(row, where, texts)
                texts[document.id] = document.contents
        if texts_digest(texts) != self.sha256:
            raise DataError(
                f"{self.rows[0].file}: from row {self.rows[0].start + 1} on, the {self.count} rows are not those that "
                "were read at the beginning: the file has changed, or is another one on this machine. Start again."
            )
        return texts


@dataclass
class Survey:
    """What was found out by reading all texts once.

    Attributes:
        ranges: of shards, in order.
        count, characters: texts, and their length in all.
        sha256: :func:`texts_digest` of all.
        sample: some of them, evenly spaced.
    """

    ranges: list[Range] = field(default_factory=list)
    count: int = 0
    characters: int = 0
    sha256: str = ""
    sample: list[str] = field(default_factory=list)


class Texts(ABC):
    """Texts that can be given to other processes."""

    @abstractmethod
    def survey(self, shard_size: int, sample: int = 0) -> Survey:
        """Read all texts once; `sample` of them are kept, at most twice as many."""


class HeldTexts(Texts):
    """Texts in the memory of this process; they travel with the ranges.

    Args:
        texts: id -> text, in a fixed order.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts

    def survey(self, shard_size: int, sample: int = 0) -> Survey:
        """See :class:`Texts`."""
        found = _Sampled(sample)
        items = iter(self.texts.items())
        while held := dict(islice(items, shard_size)):
            for name, text in held.items():
                found.add(name, text)
            found.survey.ranges.append(Range(len(found.survey.ranges), len(held), texts_digest(held), held=held))
        return found.finished()


class StoredTexts(Texts):
    """The documents of a table, which other processes read for themselves; only keys of their ids are kept here.

    Args:
        path: what :func:`tilefold.retrieval.load_documents` reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    def survey(self, shard_size: int, sample: int = 0) -> Survey:
        """See :class:`Texts`.

        Raises:
            DataError: malformed rows, missing or repeated ids, or no row. Messages name file and line.
        """
        found, keys = _Sampled(sample), array("Q")
        part, digest = _Part(), TextsDigest()
        for file in table_files(self.path):
            part.begin(file)
            for where, row in table_rows(file):
                document = document_of_row(row, where, {})
                keys.append(id_key(document.id))
                found.add(document.id, document.contents)
                digest.add(document.id, document.contents)
                if part.more() == shard_size:
                    found.survey.ranges.append(part.taken(len(found.survey.ranges), digest))
                    digest = TextsDigest()
            part.end()
        if part.count:
            found.survey.ranges.append(part.taken(len(found.survey.ranges), digest))
        self._check_unique(keys)
        return found.finished()

    def _check_unique(self, keys: array[int]) -> None:
        ordered = np.sort(np.frombuffer(keys, np.uint64)) if keys else np.zeros(0, np.uint64)
        twice = {int(key) for key in ordered[1:][ordered[1:] == ordered[:-1]]}
        if twice:  # or two ids of one key
            seen: dict[str, None] = {}
            for where, row in table_rows(self.path):
                document = document_of_row(row, where, seen)
                if id_key(document.id) in twice:
                    seen[document.id] = None


class _Part:
    """Rows of the next shard, which may begin in one file and end in another."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.count = self.start = self.at = 0
        self.file = Path()

    def begin(self, file: Path) -> None:
        self.file, self.start, self.at = file, 0, 0

    def more(self) -> int:
        self.at += 1
        self.count += 1
        return self.count

    def end(self) -> None:
        if self.at > self.start:
            self.rows.append(Rows(self.file, self.start, self.at))
            self.start = self.at

    def taken(self, number: int, digest: TextsDigest) -> Range:
        self.end()
        made = Range(number, self.count, digest.hexdigest(), tuple(self.rows))
        self.rows, self.count = [], 0
        return made


class _Sampled:
    """A survey in the making: every n-th text is kept, n doubling when there are too many."""

    def __init__(self, wanted: int) -> None:
        self.survey, self.wanted, self.every = Survey(), wanted, 1
        self.digest = TextsDigest()

    def add(self, name: str, text: str) -> None:
        survey = self.survey
        self.digest.add(name, text)
        if isinstance(text, str):
            survey.characters += len(text)
            if self.wanted and survey.count % self.every == 0:
                survey.sample.append(text)
                if len(survey.sample) >= 2 * self.wanted:
                    survey.sample, self.every = survey.sample[::2], 2 * self.every
        survey.count += 1

    def finished(self) -> Survey:
        self.survey.sha256 = self.digest.hexdigest()
        if not self.survey.count:
            raise ValueError("texts: expected at least one, got none.")
        return self.survey
