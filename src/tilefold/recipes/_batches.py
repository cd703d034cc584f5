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
_ROWS_AT_ONCE = 4096  # rows whose keys are read together

RowNumbers = npt.NDArray[np.int64]
KeysOfRows = Callable[[RowNumbers], npt.NDArray[np.uint64]]


class Row(NamedTuple):
    """A training row and the keys of its texts; equal texts have equal keys."""

    number: int
    keys: list[int]


class _Batch:
    """Rows that have no text in common, up to a number of them."""

    def __init__(self, size: int) -> None:
        self.rows: list[Row] = []
        self._size = size
        self._keys: set[int] = set()

    @property
    def full(self) -> bool:
        return len(self.rows) >= self._size

    def has(self, key: int) -> bool:
        return key in self._keys

    def shared_key(self, row: Row) -> int | None:
        """The first key of `row` that a row of the batch has too."""
        if self._keys.isdisjoint(row.keys):  # nearly always, and much faster
            return None
        return next(key for key in row.keys if key in self._keys)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._keys.update(row.keys)


class RowStream:
    """The rows of an epoch in random order, from which batches of distinct texts are drawn.

    A row that shares a text with the batch waits for a later one. Waiting rows come first.

    Args:
        keys_of: returns the keys ``[n, C]`` of the texts of `n` rows.
        n_rows: number of rows.
        generator: draws the orders.
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
        self._keys_of = keys_of
        self._n_rows = n_rows
        self._generator = generator
        self._repeats = repeats
        self._waiting: dict[int, deque[Row]] = {}  # by the key that a batch had already
        self._order = self._shuffled_rows()

    def take(self, size: int, first: Sequence[Row] = ()) -> list[Row]:
        """Return up to `size` rows without a common text, beginning with the rows `first`.

        Fewer than `size` rows mean that every other row shares a text with one of them or, if the
        rows do not repeat, that no other row is left.
        """
        batch = _Batch(size)
        for row in first:
            batch.add(row)
        self._add_waiting(batch)
        self._add_from_order(batch)
        if self._repeats and not batch.full:
            self._order = self._shuffled_rows()
            self._add_from_order(batch)
        return batch.rows

    def _add_waiting(self, batch: _Batch) -> None:
        for key in list(self._waiting):
            queue = self._waiting[key]
            # all rows of a queue have its key: at most one of them fits into the batch
            while queue and not batch.full and not batch.has(key):
                self._add_or_defer(queue.popleft(), batch)
            if not queue:
                del self._waiting[key]

    def _add_from_order(self, batch: _Batch) -> None:
        while not batch.full:
            row = next(self._order, None)
            if row is None:
                return
            self._add_or_defer(row, batch)

    def _add_or_defer(self, row: Row, batch: _Batch) -> None:
        key = batch.shared_key(row)
        if key is None:
            batch.add(row)
        else:
            self._waiting.setdefault(key, deque()).append(row)

    def _shuffled_rows(self) -> Iterator[Row]:
        """All rows but the waiting ones, in random order."""
        order = torch.randperm(self._n_rows, generator=self._generator).numpy()
        waiting = [row.number for queue in self._waiting.values() for row in queue]
        if waiting:
            order = order[~np.isin(order, waiting)]
        for start in range(0, len(order), _ROWS_AT_ONCE):
            numbers = order[start : start + _ROWS_AT_ONCE]
            yield from map(Row, numbers.tolist(), self._keys_of(numbers).tolist())


class TrainingBatches(BatchSampler):
    """Batches of row numbers, exactly ``ceil(n_rows / batch_size)`` of them in every epoch.

    A trainer derives the epoch of a step from this number. A sampler that promises another number
    than it yields makes a run stop early, leave out rows, or resume in the wrong place.

    No batch has a text twice. Rows that share texts can therefore make short batches at the end of
    an epoch. With ``drop_last`` all batches are full instead: where the rows of an epoch run out,
    the batch is filled with rows of a new random order.

    Args:
        keys_of: returns the keys ``[n, C]`` of the texts of `n` rows; ``None`` allows equal texts
            in a batch.
        n_rows: number of rows.
        batch_size: rows of a full batch.
        drop_last: whether all batches are full.
        seed: of the order of rows, which differs between epochs.
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
        super().__init__(range(n_rows), batch_size, drop_last)
        self.epoch = 0
        self._keys_of = keys_of or _row_numbers_as_keys
        self._n_rows = n_rows
        self._seed = seed
        self._lengths = lengths
        self._sizes: dict[int, list[int]] = {}  # of the batches of an epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self._n_rows / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        stream = RowStream(
            self._keys_of,
            self._n_rows,
            torch.Generator().manual_seed(self._seed + self.epoch),
            repeats=self.drop_last,
        )
        if self._lengths is None:
            batches = self._random(stream)
        else:
            batches = self._grouped(stream, self._lengths)
        sizes = self._sizes[self.epoch] = []
        for rows in itertools.islice(batches, len(self)):
            sizes.append(len(rows))
            yield [row.number for row in rows]

    def pairs_of_step(self, step: int) -> int:
        """Number of rows of a step, counted from 1, whose batch was drawn."""
        epoch, batch = divmod(step - 1, len(self))
        return self._sizes[epoch][batch]

    def _random(self, stream: RowStream) -> Iterator[list[Row]]:
        while rows := stream.take(self.batch_size):
            self._check_full(rows)
            yield rows

    def _grouped(self, stream: RowStream, lengths: RowNumbers) -> Iterator[list[Row]]:
        """Batches that are cut from pools of distinct texts, which are sorted by length."""
        shuffle = random.Random(self._seed + self.epoch).shuffle  # noqa: S311 - reproducible order, no secret
        rest: list[Row] = []  # the last rows of a pool, too few for a batch
        while pool := stream.take(POOL_BATCHES * self.batch_size, rest):
            if len(pool) == len(rest) < self.batch_size:  # no other row fits to them
                self._check_full(rest)
                yield rest
                rest = []
                continue
            n_rows = len(pool) // self.batch_size * self.batch_size
            ordered = sorted(pool[:n_rows], key=lambda row: lengths[row.number])
            batches = [
                ordered[start : start + self.batch_size]
                for start in range(0, n_rows, self.batch_size)
            ]
            shuffle(batches)
            # the epoch may end within this pool: rows that have waited come first
            late = {row.number for row in rest}
            batches.sort(key=lambda batch: late.isdisjoint(row.number for row in batch))
            yield from batches
            rest = pool[n_rows:]

    def _check_full(self, rows: list[Row]) -> None:
        if self.drop_last and len(rows) < self.batch_size:
            raise TrainingError(
                f"batch_size must be at most {len(rows)} for full batches of this data, in which "
                f"no query and no document occurs twice, got {self.batch_size}. Train with a "
                "smaller batch_size, or on more queries and documents.",
            )


def _row_numbers_as_keys(rows: RowNumbers) -> npt.NDArray[np.uint64]:
    """Keys ``[n, 1]`` by which different rows never share a text."""
    return rows.astype(np.uint64)[:, None]
