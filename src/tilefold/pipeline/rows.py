"""What a stream of texts gives: sparse rows of a batch, texts that failed, and the ends of windows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilefold.pipeline.copies import Fetched

IN_FLIGHT = 3  # batches that a stream launches at most before it gives the one ahead of them


class SparseBatch(NamedTuple):
    """Rows of some texts of a window, on the CPU.

    Attributes:
        window: number of the window.
        places: of the texts in it, in the order of the rows.
        counts: int64 ``[n]``, entries of each row.
        columns: int32 ``[sum(counts)]``, rising in each row.
        values: ``[sum(counts)]``.
        vocab_size: V.
        cut: how many of the texts were cut by the tokenizer.
    """

    window: int
    places: Sequence[int]
    counts: Tensor
    columns: Tensor
    values: Tensor
    vocab_size: int
    cut: int = 0

    def alone(self, row: int) -> SparseBatch:
        """One of its texts."""
        part = part_of(self.counts, row)
        return self._replace(
            places=[self.places[row]],
            counts=self.counts[row : row + 1],
            columns=self.columns[part],
            values=self.values[part],
        )


def part_of(counts: Tensor, row: int) -> slice:
    """Where the entries of a row are, of rows with so many one after the other."""
    start = int(counts[:row].sum())
    return slice(start, start + int(counts[row]))


class FailedText(NamedTuple):
    """A text that could not be encoded, alone too; it may have been cut before that."""

    window: int
    place: int
    error: Exception
    cut: int = 0


class WindowEnd(NamedTuple):
    """Everything of a window, which held so many texts, was given before; `max_length` tokens were read of a text."""

    window: int
    texts: int
    max_length: int | None = None


class Begun(NamedTuple):
    """Texts are being tokenised: the first item of a stream, before the device was given anything."""


Item = Begun | SparseBatch | FailedText | WindowEnd


class Window(NamedTuple):
    """Texts that are tokenised together and cut into batches.

    Attributes:
        texts: any number.
        skip: places of texts whose rows are known. Batches are cut as if they were not, so that the others get the
            same companions, and with them the same bits, as in a run that was not interrupted.
        prepare: cuts the texts before they are tokenised; may ask the tokenizer for that.
    """

    texts: Sequence[str]
    skip: frozenset[int] = frozenset()
    prepare: Callable[[Sequence[str]], Sequence[str]] | None = None

    def prepared(self) -> list[str]:
        """The texts that are tokenised."""
        return list(self.texts if self.prepare is None else self.prepare(self.texts))


def say_unused_batch_tokens() -> None:
    """Warn of a number of tokens that bounds no batch."""
    warnings.warn(
        "batch_tokens does nothing for a model whose texts are padded: its batches are cut by batch_size.",
        stacklevel=3,
    )


class NoRoomError(Exception):
    """Rows had more entries than there was room for."""

    def __init__(self, most: int) -> None:
        super().__init__(f"a row has {most} entries, more than there was room for.")
        self.most = most


class PendingRows:
    """Sparse rows on their way to the host.

    Args:
        rows: ``[B, V]`` CSR, or rows of fixed capacity: (counts, kept, columns, values, V).
        capacity: of the latter.
    """

    def __init__(self, rows: Tensor | tuple[Tensor, Tensor, Tensor, Tensor, int], capacity: int = 0) -> None:
        if isinstance(rows, Tensor):
            self.vocab_size = int(rows.size(1))
            self.capacity: int | None = None
            parts = [rows.crow_indices().diff(), rows.col_indices().to(torch.int32), rows.values()]
            self._fetched = Fetched(parts)
        else:
            counts, kept, columns, values, self.vocab_size = rows
            self.capacity = capacity
            self._fetched = Fetched([counts, kept, columns, values])

    def get(self) -> tuple[Tensor, Tensor, Tensor]:
        """Counts int64 ``[B]``, columns int32 and values of all rows, one after the other.

        Raises:
            NoRoomError: a row has more entries than there was room for.
        """
        if self.capacity is None:
            counts, columns, values = self._fetched.get()
            return counts.to(torch.int64), columns, values
        counts, kept, columns, values = self._fetched.get()
        most = int(counts.max()) if counts.numel() else 0
        if most > self.capacity:
            raise NoRoomError(most)
        inside = np.arange(columns.size(1)) < kept.numpy()[:, None]
        return kept.to(torch.int64), _chosen(columns, inside), _chosen(values, inside)


def _chosen(tensor: Tensor, inside: npt.NDArray[np.bool_]) -> Tensor:
    """``tensor[inside]`` by numpy, which starts no threads of its own beside those of the tokenizer."""
    plain = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return torch.from_numpy(plain.numpy()[inside]).view(tensor.dtype)


def stacked(batches: Sequence[SparseBatch], total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets ``[total + 1]``, columns and values of rows in the order of the texts; `batches` are of one window.

    Row `places[i]` of the result is row `i` of its batch; a text that no batch has gets an empty row.
    """
    if not batches:
        return torch.zeros(total + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    counts = torch.cat([batch.counts for batch in batches])
    columns = torch.cat([batch.columns for batch in batches])
    values = torch.cat([batch.values for batch in batches])
    order = torch.cat([torch.as_tensor(batch.places, dtype=torch.int64) for batch in batches])
    wanted = torch.zeros(total, dtype=torch.int64)
    wanted[order] = counts
    starts = torch.zeros(total, dtype=torch.int64)
    starts[order] = counts.cumsum(0) - counts
    offsets = torch.cat([counts.new_zeros(1), wanted.cumsum(0)])
    source = torch.repeat_interleave(starts - offsets[:-1], wanted) + torch.arange(len(values))
    return offsets, columns[source], values[source]
