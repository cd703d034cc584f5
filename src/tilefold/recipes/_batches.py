"""Batches of training rows: as many in every epoch as announced, and full ones where required."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler

from tilefold.recipes._run import TrainingError

POOL_BATCHES = 8  # batches whose rows are sorted by length together
KEY_BATCH_SIZE = 4096  # rows whose keys are read together

RowNumbers = npt.NDArray[np.int64]
KeysOfRows = Callable[[RowNumbers], npt.NDArray[np.uint64]]
"""Function of the numbers of n rows that returns the keys ``[n, C]`` of their C texts."""


class Row(NamedTuple):
    """A training row, with keys by which equal texts are found.

    Attributes:
        number: number of the row in the data.
        keys: key of each text; equal texts have equal keys.
    """

    number: int
    keys: list[int]


class _Batch:
    """Batch of rows that have no text in common.

    Args:
        size: number of rows of a full batch.
    """

    def __init__(self, size: int) -> None:
        self.rows: list[Row] = []
        self._size = size
        self._keys: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether no row fits in any more."""
        return len(self.rows) >= self._size

    def has(self, key: int) -> bool:
        """Return whether a row of the batch has a text with this key."""
        return key in self._keys

    def shared_key(self, row: Row) -> int | None:
        """Return the first key of `row` that the batch has too; ``None`` without one."""
        if self._keys.isdisjoint(row.keys):  # true for nearly all rows, and fast
            return None
        return next(key for key in row.keys if key in self._keys)

    def add(self, row: Row) -> None:
        """Add a row that shares no text with the batch."""
        self.rows.append(row)
        self._keys.update(row.keys)


class RowStream:
    """The rows of an epoch in random order, from which batches of distinct texts are drawn.

    A row that shares a text with a batch waits for a later batch. Waiting rows come first there.

    Args:
        keys_of: returns the keys ``[n, C]`` of the texts of n rows.
        n_rows: number of rows.
        generator: draws the random orders.
        repeats: whether the rows begin again, in a new order, when all of them were drawn.
    """

    def __init__(
        self,
        keys_of: KeysOfRows,
        n_rows: int,
        generator: torch.Generator,
        *,
        repeats: bool,
    ) -> None:
        """Draw the first random order of the rows.

        Keys are read when a batch needs them. A key is a number for a text, equal for equal texts.

        Args:
            keys_of: returns the keys ``[n, C]`` of the C texts of each of n rows.
            n_rows: number of rows.
            generator: draws the random orders.
            repeats: whether the rows begin again, in a new order, when all of them were drawn.
        """
        self._keys_of = keys_of
        self._n_rows = n_rows
        self._generator = generator
        self._repeats = repeats
        # key of a text -> rows with this text that wait, because a batch already had it
        self._waiting: dict[int, deque[Row]] = {}
        self._order = self._shuffled_rows()

    def take(self, size: int, carried: Sequence[Row] = ()) -> list[Row]:
        """Draw up to `size` rows that share no text with each other.

        Rows that waited since an earlier call come first, then the next rows of the random order.
        A row that shares a text with a drawn row waits for a later call.

        Args:
            size: largest number of rows.
            carried: rows that an earlier call returned and that no batch has used. They are the
                first rows of the result.

        Returns:
            The rows. There are fewer than `size` if every other row shares a text with one of them
            or, where rows do not repeat, if no other row is left.
        """
        batch = _Batch(size)
        for row in carried:
            batch.add(row)
        self._add_waiting(batch)
        self._add_from_order(batch)
        if self._repeats and not batch.full:
            self._order = self._shuffled_rows()
            self._add_from_order(batch)
        return batch.rows

    def _add_waiting(self, batch: _Batch) -> None:
        """Move waiting rows into a batch, as far as they fit."""
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
        """Add a row to a batch, or let it wait if they share a text."""
        key = batch.shared_key(row)
        if key is None:
            batch.add(row)
        else:
            self._waiting.setdefault(key, deque()).append(row)

    def _shuffled_rows(self) -> Iterator[Row]:
        """Yield all rows that do not wait, in a new random order."""
        order = torch.randperm(self._n_rows, generator=self._generator).numpy()
        waiting = [row.number for queue in self._waiting.values() for row in queue]
        if waiting:
            order = order[~np.isin(order, waiting)]
        for start in range(0, len(order), KEY_BATCH_SIZE):
            numbers = order[start : start + KEY_BATCH_SIZE]
            yield from map(Row, numbers.tolist(), self._keys_of(numbers).tolist())


class TrainingBatches(BatchSampler):
    """Batches of row numbers, exactly ``ceil(n_rows / batch_size)`` of them in every epoch.

    A trainer derives the epoch of a step from this number. A sampler that promises another number
    than it yields makes a run stop early, leave out rows, or resume in the wrong place.

    No batch has a text twice. Rows that share texts can therefore make short batches at the end of
    an epoch. With ``drop_last`` all batches are full instead: where the rows of an epoch run out,
    the batch is filled with rows of a new random order.

    Args:
        keys_of: returns the keys ``[n, C]`` of the texts of n rows; ``None`` allows equal texts in
            a batch.
        n_rows: number of rows.
        batch_size: rows of a full batch.
        drop_last: whether all batches are full.
        seed: seed of the order of rows, which differs between epochs.
        lengths: text length of each row, ``[n_rows]``, in any unit; batches then have rows of
            similar length.
    """

    def __init__(
        self,
        keys_of: KeysOfRows | None,
        n_rows: int,
        batch_size: int,
        *,
        drop_last: bool,
        seed: int = 0,
        lengths: RowNumbers | None = None,
    ) -> None:
        """Store how batches are drawn. They are drawn anew whenever an epoch is iterated.

        Args:
            keys_of: returns the keys ``[n, C]`` of the C texts of each of n rows, which are equal
                for equal texts; ``None`` allows equal texts in a batch.
            n_rows: number of rows.
            batch_size: rows of a full batch.
            drop_last: whether all batches are full (torch's name). No rows are dropped: short
                batches are filled.
            seed: seed of the order of rows, which differs between epochs.
            lengths: text length of each row, ``[n_rows]``, if batches have rows of similar length.
        """
        super().__init__(range(n_rows), batch_size, drop_last)
        self.epoch = 0
        self._keys_of = keys_of or _row_numbers_as_keys
        self._n_rows = n_rows
        self._seed = seed
        self._lengths = lengths
        # epoch -> number of rows of each batch that was drawn
        self._sizes: dict[int, list[int]] = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides about the order of rows."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self._n_rows / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the row numbers of each batch of the current epoch, and record the batch sizes."""
        stream = RowStream(
            self._keys_of,
            self._n_rows,
            torch.Generator().manual_seed(self._seed + self.epoch),
            repeats=self.drop_last,
        )
        if self._lengths is None:
            batches = self._random_batches(stream)
        else:
            batches = self._grouped_batches(stream, self._lengths)
        sizes: list[int] = []
        self._sizes[self.epoch] = sizes
        for rows in itertools.islice(batches, len(self)):
            sizes.append(len(rows))
            yield [row.number for row in rows]

    def pairs_of_step(self, step: int) -> int:
        """Number of rows of a step, counted from 1, whose batch was drawn."""
        epoch, batch = divmod(step - 1, len(self))
        return self._sizes[epoch][batch]

    def _random_batches(self, stream: RowStream) -> Iterator[list[Row]]:
        """Yield batches of rows in random order, as long as there are rows."""
        while True:
            rows = stream.take(self.batch_size)
            if not rows:
                return
            self._check_full(rows)
            yield rows

    def _grouped_batches(self, stream: RowStream, lengths: RowNumbers) -> Iterator[list[Row]]:
        """Yield batches of rows of similar length, as long as there are rows.

        A pool is a few batches' worth of rows with distinct texts. It is sorted by length and cut
        into batches, which come in random order. Rows that fill no batch are carried to the next
        pool.

        Args:
            stream: the rows in random order.
            lengths: text length of each row, ``[n_rows]``.
        """
        generator = random.Random(self._seed + self.epoch)  # noqa: S311 - reproducible, no secret
        carried: list[Row] = []  # the last rows of a pool, too few for a batch
        while True:
            pool = stream.take(POOL_BATCHES * self.batch_size, carried)
            if not pool:
                return
            has_new_rows = len(pool) > len(carried)
            if not has_new_rows:  # every other row shares a text with a carried row
                self._check_full(carried)
                yield carried
                carried = []
                continue
            batches = self._cut_pool(pool, lengths)
            generator.shuffle(batches)
            carried_numbers = {row.number for row in carried}
            with_carried_rows = []
            without_carried_rows = []
            for batch in batches:
                if carried_numbers.isdisjoint(row.number for row in batch):
                    without_carried_rows.append(batch)
                else:
                    with_carried_rows.append(batch)
            # The epoch may end before the last batches of a pool. Rows that were carried before
            # come first, so that they are not left out.
            yield from with_carried_rows
            yield from without_carried_rows
            carried = pool[len(batches) * self.batch_size :]

    def _cut_pool(self, pool: list[Row], lengths: RowNumbers) -> list[list[Row]]:
        """Sort the rows of a pool by length, and cut them into full batches.

        Args:
            pool: rows with distinct texts. The last rows, too few for a batch, are left out.
            lengths: text length of each row, ``[n_rows]``.

        Returns:
            The batches, each with rows of similar length.
        """
        n_rows = len(pool) // self.batch_size * self.batch_size  # in full batches
        by_length = sorted(pool[:n_rows], key=lambda row: lengths[row.number])
        return [
            by_length[start : start + self.batch_size]
            for start in range(0, n_rows, self.batch_size)
        ]

    def _check_full(self, rows: list[Row]) -> None:
        """Refuse a short batch if all batches must be full.

        Args:
            rows: rows of the batch; every other row shares a text with one of them.

        Raises:
            TrainingError: if the data have no full batch of distinct texts.
        """
        if self.drop_last and len(rows) < self.batch_size:
            raise TrainingError(
                f"batch_size must be at most {len(rows)} for full batches of this data, in which "
                f"no query and no document occurs twice, got {self.batch_size}. Train with a "
                "smaller batch_size, or on more queries and documents.",
            )


def _row_numbers_as_keys(rows: RowNumbers) -> npt.NDArray[np.uint64]:
    """Return keys ``[n, 1]`` of n rows by which different rows never share a text."""
    return rows.astype(np.uint64)[:, None]
