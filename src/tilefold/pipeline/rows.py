"""Windows of texts that go into a stream, batches and ends of windows that come out; sparse rows of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilefold.pipeline.copies import Fetched

R = TypeVar("R")
Items = TypeVar("Items", bound=Sequence[object])
IN_FLIGHT = 3  # batches that a stream launches at most before it gives the one ahead of them


class Batch(NamedTuple):
    """Some texts of a window, and what was made of them.

    Attributes:
        window: number of the window.
        places: of the texts in it, in the order of the rows.
        rows: :class:`SparseRows`, :class:`tilefold.pipeline.tokens.TokenRows`, or a row of a list or of a matrix for
            each text; an exception where a text could not be encoded, alone too.
        cut: how many of the texts were cut by the tokenizer.
    """

    window: int
    places: Sequence[int]
    rows: Any
    cut: int = 0

    def rows_of(self, texts: range) -> Any:
        """The rows of some of its texts, which follow one another; raises what they failed with."""
        rows = self.rows
        if isinstance(rows, Exception):
            raise rows
        if len(texts) == len(self.places):
            return rows
        if isinstance(rows, Tensor) and rows.layout != torch.strided:
            rows = rows.to_dense()
        chosen = slice(texts.start, texts.stop)
        return rows.part(chosen) if hasattr(rows, "part") else rows[chosen]


def halved(texts: Items, attempt: Callable[[Items], R]) -> Iterator[tuple[Items, R | Exception]]:
    """Parts of `texts` with what came of them: what fails is halved until the failing text is alone.

    Args:
        texts: a sequence whose slices are of its kind, such as a list or a range.
        attempt: may raise any exception.
    """
    try:
        outcome: R | Exception = attempt(texts)
    except Exception as error:  # of one text, which must not lose the others
        if len(texts) > 1:
            for part in halves(texts):
                yield from halved(part, attempt)
            return
        outcome = error
    yield texts, outcome


def halves(texts: Items) -> tuple[Items, Items]:
    """Two parts of a sequence."""
    middle = len(texts) // 2
    return texts[:middle], texts[middle:]  # type: ignore[return-value]


class WindowEnd(NamedTuple):
    """Everything of a window, which held so many texts, was given before; `max_length` tokens were read of a text."""

    window: int
    texts: int
    max_length: int | None = None


class Begun(NamedTuple):
    """Texts are being tokenised: the first item of a stream, before the device was given anything."""


Item = Begun | Batch | WindowEnd


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


class SparseRows(NamedTuple):
    """Sparse rows on the CPU.

    Attributes:
        counts: int64 ``[n]``, entries of each row.
        columns: int32 ``[sum(counts)]``, rising in each row.
        values: ``[sum(counts)]``.
        vocab_size: V.
    """

    counts: Tensor
    columns: Tensor
    values: Tensor
    vocab_size: int

    def part(self, chosen: slice) -> SparseRows:
        """Some rows."""
        at = entries_of(self.counts, chosen)
        return SparseRows(self.counts[chosen], self.columns[at], self.values[at], self.vocab_size)


def entries_of(counts: Tensor, chosen: slice) -> slice:
    """Slice of the entries of some rows, of rows with so many one after the other."""
    start = int(counts[: chosen.start].sum())
    return slice(start, start + int(counts[chosen].sum()))


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

    def get(self) -> SparseRows:
        """All rows.

        Raises:
            NoRoomError: a row has more entries than there was room for.
        """
        if self.capacity is None:
            counts, columns, values = self._fetched.get()
            return SparseRows(counts.to(torch.int64), columns, values, self.vocab_size)
        counts, kept, columns, values = self._fetched.get()
        most = int(counts.max()) if counts.numel() else 0
        if most > self.capacity:
            raise NoRoomError(most)
        inside = np.arange(columns.size(1)) < kept.numpy()[:, None]
        return SparseRows(kept.to(torch.int64), _chosen(columns, inside), _chosen(values, inside), self.vocab_size)


def _chosen(tensor: Tensor, inside: npt.NDArray[np.bool_]) -> Tensor:
    """``tensor[inside]`` by numpy, which starts no threads of its own beside those of the tokenizer."""
    plain = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return torch.from_numpy(plain.numpy()[inside]).view(tensor.dtype)


def stacked(batches: Sequence[Batch], total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets ``[total + 1]``, columns and values of sparse rows in the order of the texts, of batches of one window.

    Row `places[i]` of the result is row `i` of its batch; a text that no batch has gets an empty row.
    """
    if not batches:
        return torch.zeros(total + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    counts = torch.cat([batch.rows.counts for batch in batches])
    columns = torch.cat([batch.rows.columns for batch in batches])
    values = torch.cat([batch.rows.values for batch in batches])
    order = torch.cat([torch.as_tensor(batch.places, dtype=torch.int64) for batch in batches])
    wanted = torch.zeros(total, dtype=torch.int64)
    wanted[order] = counts
    starts = torch.zeros(total, dtype=torch.int64)
    starts[order] = counts.cumsum(0) - counts
    offsets = torch.cat([counts.new_zeros(1), wanted.cumsum(0)])
    source = torch.repeat_interleave(starts - offsets[:-1], wanted) + torch.arange(len(values))
    return offsets, columns[source], values[source]
