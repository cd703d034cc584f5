"""Batches of training rows without repeated texts, and the same number of them in every epoch."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler

from tilefold.recipes._run import TrainingError

POOL_BATCHES = 8  # number of batches whose rows are sorted by length together
KEY_BATCH_SIZE = 4096  # rows whose keys are read together

RowNumbers = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int64]
TextKeys = Callable[[RowNumbers], npt.NDArray[np.uint64]]
"""Function that maps n row numbers to the keys ``[n, C]`` of their C texts.

Equal texts have equal keys.
"""


class Row(NamedTuple):
    """A training row: its number, and an integer key for each of its texts.

    Attributes:
        number: number of the row in the data.
        keys: key of each text; equal texts have equal keys.
    """

    number: int
    keys: list[int]


class _Batch:
    """Batch of rows that share no text with each other.

    Args:
        size: number of rows of a full batch.
    """

    def __init__(self, size: int) -> None:
        self.rows: list[Row] = []
        self._size = size
        self._keys: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether the batch has as many rows as it may have."""
        return len(self.rows) >= self._size

    def has(self, key: int) -> bool:
        """Return whether a row of the batch has a text with this key."""
        return key in self._keys

    def shared_key(self, row: Row) -> int | None:
        """Return the first key of `row` that is also in the batch, or ``None``."""
        if self._keys.isdisjoint(row.keys):  # true for nearly all rows, and fast
            return None
        return next(key for key in row.keys if key in self._keys)

    def add(self, row: Row) -> None:
        """Add a row that shares no text with the batch."""
        self.rows.append(row)
        self._keys.update(row.keys)


class RowStream:
    """The rows of an epoch in random order, from which batches without repeated texts are drawn.

    A row that shares a text with the current batch waits for a later batch, where it comes first.

    Args:
        text_keys: maps row numbers to the keys of their texts.
        n_rows: number of rows.
        generator: draws the random orders.
        repeats: whether a new random order follows when all rows were drawn.
    """

    def __init__(
        self,
        text_keys: TextKeys,
        n_rows: int,
        generator: torch.Generator,
        *,
        repeats: bool,
    ) -> None:
        """Create a stream of batches without repeated texts from shuffled rows.

        Args:
            text_keys: maps n row numbers to keys ``[n, C]``, one for each of the C texts of a row.
                A text's key is an integer that equal texts share.
            n_rows: number of rows.
            generator: draws the random orders.
            repeats: whether a new random order follows when all rows were drawn.
        """
        self._text_keys = text_keys
        self._n_rows = n_rows
        self._generator = generator
        self._repeats = repeats
        self._returned: list[Row] = []
        # key of a text -> rows that wait, because another row with this text was drawn before
        self._waiting: dict[int, deque[Row]] = {}
        self._order = self._shuffled_rows()

    def put_back(self, rows: list[Row]) -> None:
        """Return rows of the last draw to the stream. They come first in the next draw."""
        self._returned = rows

    def take(self, size: int) -> list[Row]:
        """Draw up to `size` rows that share no text with each other.

        Rows that were put back come first, then waiting rows, and then the next rows of the random
        order. A row that shares a text with a drawn row waits for a later draw.

        Args:
            size: largest number of rows.

        Returns:
            The rows. There are fewer than `size` if each remaining row shares a text with one of
            them, or if the rows are used up and do not repeat.
        """
        batch = _Batch(size)
        for row in self._returned:
            batch.add(row)
        self._returned = []
        self._add_waiting(batch)
        self._add_from_order(batch)
        if self._repeats and not batch.full:
            self._order = self._shuffled_rows()
            self._add_from_order(batch)
        return batch.rows

    def _add_waiting(self, batch: _Batch) -> None:
        """Move waiting rows that share no text with a batch into it, until it is full."""
        for key in list(self._waiting):
            queue = self._waiting[key]
            # All rows of a queue have its key, so at most one of them fits into the batch.
            while queue and not batch.full and not batch.has(key):
                self._add_or_defer(queue.popleft(), batch)
            if not queue:
                del self._waiting[key]

    def _add_from_order(self, batch: _Batch) -> None:
        """Fill a batch with the next rows of the random order."""
        while not batch.full:
            row = next(self._order, None)
            if row is None:
                return
            self._add_or_defer(row, batch)

    def _add_or_defer(self, row: Row, batch: _Batch) -> None:
        """Add a row to a batch, or let the row wait if it shares a text with the batch."""
        key = batch.shared_key(row)
        if key is None:
            batch.add(row)
        else:
            self._waiting.setdefault(key, deque()).append(row)

    def _shuffled_rows(self) -> Iterator[Row]:
        """Yield all rows, except for waiting ones, in a new random order."""
        order = torch.randperm(self._n_rows, generator=self._generator).numpy()
        waiting = [row.number for queue in self._waiting.values() for row in queue]
        if waiting:
            order = order[~np.isin(order, waiting)]
        for start in range(0, len(order), KEY_BATCH_SIZE):
            numbers = order[start : start + KEY_BATCH_SIZE]
            yield from map(Row, numbers.tolist(), self._text_keys(numbers).tolist())


class TrainingBatches(BatchSampler):
    """Batches of row numbers, exactly ``ceil(n_rows / batch_size)`` of them in every epoch.

    A trainer derives the epoch of a step from this number. A sampler that yields fewer or more
    batches than its length makes a run stop early, leave out rows, or resume at the wrong batch.

    No batch has a text twice. Rows that share texts can therefore lead to short batches at the end
    of an epoch. With ``fill_batches``, they are filled with rows of a new random order.

    Args:
        text_keys: maps row numbers to the keys of their texts; ``None`` allows equal texts in a
            batch.
        n_rows: number of rows.
        batch_size: number of rows of a full batch.
        fill_batches: whether short batches are filled with rows that the epoch already had.
        seed: seed of the order of rows, which differs between epochs.
        lengths: text length of each row, ``[n_rows]``, in any unit; batches then have rows of
            similar length. ``None`` for batches of random rows.
    """

    def __init__(
        self,
        text_keys: TextKeys | None,
        n_rows: int,
        batch_size: int,
        *,
        fill_batches: bool,
        seed: int = 0,
        lengths: Lengths | None = None,
    ) -> None:
        """Create the batches of all epochs; an epoch is drawn when it is iterated.

        Args:
            text_keys: maps n row numbers to keys ``[n, C]``, one for each of the C texts of a row;
                equal texts have equal keys. ``None`` allows equal texts in a batch.
            n_rows: number of rows.
            batch_size: number of rows of a full batch.
            fill_batches: whether short batches are filled with rows that the epoch already had.
            seed: seed of the order of rows, which differs between epochs.
            lengths: text length of each row, ``[n_rows]``, for batches of rows of similar length;
                ``None`` for batches of random rows.
        """
        # accelerate reads torch's `drop_last`, which is true if every batch is full.
        super().__init__(range(n_rows), batch_size, drop_last=fill_batches)
        self.epoch = 0
        self._text_keys = text_keys or _row_numbers_as_keys
        self._n_rows = n_rows
        self._fill_batches = fill_batches
        self._seed = seed
        self._lengths = lengths
        # epoch -> number of rows of each batch that was drawn
        self._sizes: dict[int, list[int]] = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of rows."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self._n_rows / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the row numbers of each batch of the current epoch, and record the batch sizes."""
        epoch = self.epoch
        stream = RowStream(
            self._text_keys,
            self._n_rows,
            torch.Generator().manual_seed(self._seed + epoch),
            repeats=self._fill_batches,  # rows of a second order fill the short batches
        )
        if self._lengths is None:
            batches = self._random_batches(stream)
        else:
            batches = self._batches_of_similar_length(stream, self._lengths)
        self._sizes[epoch] = []
        for rows in itertools.islice(batches, len(self)):
            self._sizes[epoch].append(len(rows))
            yield [row.number for row in rows]

    def pairs_of_step(self, step: int) -> int:
        """Return the number of rows in the batch of a step, which must have been drawn.

        Args:
            step: number of the step, from 1.
        """
        epoch, batch = divmod(step - 1, len(self))  # an epoch has len(self) batches
        return self._sizes[epoch][batch]

    def _random_batches(self, stream: RowStream) -> Iterator[list[Row]]:
        """Yield batches of rows in random order, until no rows are left."""
        while True:
            rows = stream.take(self.batch_size)
            if not rows:
                return
            self._check_full(rows)
            yield rows

    def _batches_of_similar_length(
        self,
        stream: RowStream,
        lengths: Lengths,
    ) -> Iterator[list[Row]]:
        """Yield batches of rows of similar length, until no rows are left.

        A pool of rows without repeated texts is drawn, sorted by length and split into batches,
        which come in random order. The rows that are too few for a batch go to the next pool.

        Args:
            stream: the rows in random order.
            lengths: text length of each row, ``[n_rows]``.
        """
        shuffler = random.Random(self._seed + self.epoch)  # noqa: S311 - reproducible, no secret
        remainder: list[Row] = []  # rows of the last pool that were too few for a batch
        while True:
            stream.put_back(remainder)
            pool = stream.take(POOL_BATCHES * self.batch_size)
            if not pool:
                return
            if len(pool) == len(remainder):  # no row can be added to the remainder
                self._check_full(remainder)
                yield remainder
                remainder = []
                continue
            batches = self._split_by_length(pool, lengths)
            shuffler.shuffle(batches)
            # The epoch may end before the last batches of a pool. Batches with rows of the
            # remainder come first, so that none of these rows is left out.
            comes_later = partial(_share_no_rows, remainder)  # False is sorted before True
            batches.sort(key=comes_later)
            yield from batches
            remainder = pool[len(batches) * self.batch_size :]

    def _split_by_length(self, pool: list[Row], lengths: Lengths) -> list[list[Row]]:
        """Sort the rows of a pool by length, and split them into full batches.

        Args:
            pool: rows without repeated texts. The last rows, too few for a batch, are left out.
            lengths: text length of each row, ``[n_rows]``.

        Returns:
            The batches, each with rows of similar length.
        """
        n_rows = len(pool) // self.batch_size * self.batch_size  # rows in full batches
        by_length = sorted(pool[:n_rows], key=lambda row: lengths[row.number])
        return [
            by_length[start : start + self.batch_size]
            for start in range(0, n_rows, self.batch_size)
        ]

    def _check_full(self, rows: list[Row]) -> None:
        """Raise an error if all batches must be full, and this one cannot be.

        Args:
            rows: the largest batch without repeated texts that could be drawn.

        Raises:
            TrainingError: if batches must be full, and the batch is short.
        """
        if self._fill_batches and len(rows) < self.batch_size:
            raise TrainingError(
                f"batch_size must be at most {len(rows)} for full batches of this data, in which "
                f"no query and no document occurs twice, got {self.batch_size}. Train with a "
                "smaller batch_size, or on more queries and documents.",
            )


def _share_no_rows(rows: list[Row], other_rows: list[Row]) -> bool:
    """Return whether no row is in both lists."""
    numbers = {row.number for row in rows}
    return numbers.isdisjoint(row.number for row in other_rows)


def _row_numbers_as_keys(rows: RowNumbers) -> npt.NDArray[np.uint64]:
    """Return the numbers of n rows as keys ``[n, 1]``, so that no two rows share a text."""
    return rows.astype(np.uint64)[:, None]
