"""Windows of texts that go into a stream, batches that come out, their rows, and copies between
host and device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilefold.pipeline.ragged import offsets_of

R = TypeVar("R")
Items = TypeVar("Items", bound=Sequence[object])
IN_FLIGHT = 3  # batches that a stream launches at most before it waits for the one ahead of them


class Batch(NamedTuple):
    """Some texts of a window, and what was made of them."""

    window: int
    places: Sequence[int]  # of the texts in the window, in the order of the rows
    rows: Any  # SparseRows, TokenRows, a row of a list or a matrix for each; of a text that fails alone, an exception
    cut: int = 0  # how many of the texts were cut by the tokenizer
    max_length: int | None = None  # tokens that it keeps of a text

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
    """Parts of `texts` with what came of them: what fails is halved until the failing text is
    alone.
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
    """Everything of a window was given before."""

    window: int


class Begun(NamedTuple):
    """Texts are being tokenised: the first item of a stream, before the device was given anything."""


Item = Begun | Batch | WindowEnd


class Window(NamedTuple):
    """Texts that are tokenised together and cut into batches.

    Rows are known of those at the places to `skip`. Batches are cut as if they were not, so that
    the others get the same companions, and with them the same bits, as in a run that was not
    interrupted.
    """

    texts: Sequence[str]
    skip: frozenset[int] = frozenset()
    prepare: Callable[[Sequence[str]], Sequence[str]] | None = (
        None  # cuts texts before they are tokenised
    )

    def prepared(self) -> list[str]:
        """The texts that are tokenised."""
        return list(self.texts if self.prepare is None else self.prepare(self.texts))


def say_unused_batch_tokens() -> None:
    """Warn of a number of tokens that bounds no batch."""
    why = "a model whose texts are padded: its batches are cut by batch_size."
    warnings.warn(f"batch_tokens does nothing for {why}", stacklevel=3)


class SparseRows(NamedTuple):
    """Sparse rows, on the CPU but for entries that were to stay on the device."""

    counts: Tensor  # int64 [n], entries of each row
    columns: Tensor  # int32 [sum(counts)], rising in each row; int64 of one row on a device
    values: Tensor  # [sum(counts)]
    vocab_size: int

    def part(self, chosen: slice) -> SparseRows:
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


class Fetched:
    """Tensors on their way to the host: from a GPU into pinned memory, in the order of its current
    stream.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: Any = None
        self._host = list(tensors)
        device = tensors[0].device
        if device.type == "cuda":
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        elif device.type != "cpu":
            self._host = [tensor.cpu() for tensor in tensors]

    def ready(self) -> bool:
        """Whether they are there."""
        return self._event is None or bool(self._event.query())

    def fetched(self) -> list[Tensor]:
        """The tensors on the CPU; waits for the copies, and for nothing after them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class PendingRows(Fetched):
    """Sparse rows on their way to the host: ``[B, V]`` CSR, or (counts, kept, columns, values, V)
    of fixed capacity.
    """

    def __init__(
        self,
        rows: Tensor | tuple[Tensor, Tensor, Tensor, Tensor, int],
        capacity: int = 0,
        to_host: bool = True,
    ) -> None:
        self.capacity: int | None = None if isinstance(rows, Tensor) else capacity
        if isinstance(rows, Tensor):
            self.vocab_size = int(rows.size(1))
            parts = [rows.crow_indices().diff(), rows.col_indices().to(torch.int32), rows.values()]
        else:
            *parts, self.vocab_size = rows
        self._there = [] if to_host else parts[-2:]
        super().__init__(parts if to_host else parts[:-2])

    def get(self) -> SparseRows:
        """All rows; :class:`NoRoomError` if one has more entries than there was room for."""
        parts = [*self.fetched(), *self._there]
        if self.capacity is None:
            counts, columns, values = parts
            return SparseRows(counts.to(torch.int64), columns, values, self.vocab_size)
        return rows_in_room(parts, self.capacity, self.vocab_size)


def rows_in_room(parts: Sequence[Tensor], capacity: int, vocab_size: int) -> SparseRows:
    """Rows of (counts, kept, columns, values) of a `capacity`; :class:`NoRoomError` if one has
    more.

    Columns and values may lie on a device, and stay there; nothing waits for it.
    """
    counts, kept, columns, values = parts
    if (most := max(counts.tolist(), default=0)) > capacity:
        raise NoRoomError(most)
    if columns.device.type != "cpu":
        kept = kept.to(torch.int64)
        if len(kept) == 1:
            size = int(
                kept,
            )  # copies, since what is lent is written again; of columns as sparse tensors take them
            return SparseRows(
                kept,
                columns[0, :size].to(torch.int64, copy=True),
                values[0, :size].clone(),
                vocab_size,
            )
        behind = torch.arange(len(kept)) * columns.size(1) - (kept.cumsum(0) - kept)
        at = places(behind, kept, columns.device)
        return SparseRows(kept, columns.flatten()[at], values.flatten()[at], vocab_size)
    sizes = kept.tolist()
    return SparseRows(
        kept.to(torch.int64),
        _firsts(columns, sizes),
        _firsts(values, sizes),
        vocab_size,
    )


def _firsts(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """The first entries of each row, by numpy: it starts no threads beside those of the tokenizer."""
    plain = rows.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]).numpy()
    parts = [row[:size] for row, size in zip(plain, sizes, strict=True)]
    return torch.from_numpy(np.concatenate(parts) if parts else plain.reshape(-1)).view(rows.dtype)


def stacked(batches: Sequence[Batch], total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets ``[total + 1]``, columns and values of the rows of batches, in the order of `total`
    texts.
    """
    if not batches:
        return (
            torch.zeros(total + 1, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0),
        )
    if len(batches) == 1 and batches[0].places == range(total):
        rows = batches[0].rows
        return (
            torch.from_numpy(offsets_of(rows.counts.numpy())),
            rows.columns.clone(),
            rows.values.clone(),
        )
    counts = torch.cat([batch.rows.counts for batch in batches])
    columns = torch.cat([batch.rows.columns for batch in batches])
    values = torch.cat([batch.rows.values for batch in batches])
    order = torch.cat([torch.as_tensor(batch.places, dtype=torch.int64) for batch in batches])
    wanted = torch.zeros(total, dtype=torch.int64)
    wanted[order] = counts
    starts = torch.zeros(total, dtype=torch.int64)
    starts[order] = counts.cumsum(0) - counts
    offsets = torch.cat([counts.new_zeros(1), wanted.cumsum(0)])
    source = places(starts - offsets[:-1], wanted, values.device)
    return offsets, columns[source], values[source]


def places(behind: Tensor, counts: Tensor, device: torch.device) -> Tensor:
    """Where the entries of rows with so many come from, which lie so many places `behind` where
    they will.
    """
    found = repeated(behind, counts, device)
    return found.add_(torch.arange(len(found), device=device))


def repeated(values: Tensor, counts: Tensor, device: torch.device | None = None) -> Tensor:
    """``torch.repeat_interleave`` of values on the CPU, on `device`, which nothing waits for."""
    if (
        device is None or device.type == "cpu"
    ):  # by numpy: torch wakes all threads for a few rows, which can take ms
        return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))
    there, of_each = to_device(np.stack([values.numpy(), counts.numpy()]), device)
    return torch.repeat_interleave(there, of_each, output_size=int(counts.sum()))


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A numpy array on `device`, in the order of the current stream."""
    tensor = torch.from_numpy(array)
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


class TokenRows(NamedTuple):
    """Token vectors of some texts, packed, on the CPU."""

    counts: Tensor  # int64 [n], vectors of each text
    finite: Tensor  # bool [T]
    values: Tensor  # [T, D] as they are stored
    scales: Tensor | None = None  # [T] of int8 values

    def part(self, chosen: slice) -> TokenRows:
        at = entries_of(self.counts, chosen)
        scales = None if self.scales is None else self.scales[at]
        return TokenRows(self.counts[chosen], self.finite[at], self.values[at], scales)


class PendingTokens(Fetched):
    """Token vectors ``[B, S, D]`` that count, packed and stored on the device, of unknown number
    there.

    `stored` makes of ``[T, D]`` fp32 which are finite ``[T]``, values, and scales if any.
    """

    def __init__(
        self,
        vectors: Tensor,
        mask: Tensor,
        stored: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> None:
        keep = mask.bool()
        super().__init__([keep.sum(1), *stored(packed_rows(vectors, keep).float())])

    def get(self) -> TokenRows:
        counts, *others = self.fetched()
        return TokenRows(
            counts,
            *(part[:total] for total in [int(counts.sum())] for part in others),
        )


class PendingVectors(Fetched):
    """Token vectors ``[B, S, D]`` that count, packed on the device, of whose numbers the host does
    not know yet.
    """

    def __init__(self, vectors: Tensor, mask: Tensor, to_host: bool) -> None:
        keep = mask.bool()
        self._rows = packed_rows(vectors, keep)
        super().__init__([keep.sum(1), *([self._rows] if to_host else [])])

    def get(self) -> list[Tensor]:
        """``[n, D]`` of each text, parts of one tensor."""
        counts, *rows = self.fetched()
        total = int(counts.sum())
        found = (rows or [self._rows])[0]
        # a copy where rows are spare, so that nobody keeps them
        found = found if found.size(0) == total else found[:total].clone()
        return list(torch.split(found, counts.tolist()))


def packed_rows(vectors: Tensor, keep: Tensor) -> Tensor:
    """``[T, D]`` vectors that count; on a GPU as many rows as there are places, the last of which
    mean nothing.
    """
    if vectors.device.type == "cpu":
        return vectors[keep]
    flat = keep.reshape(-1)
    spare = flat.numel()
    at = torch.where(flat, flat.cumsum(0) - 1, spare)
    return vectors.new_zeros(spare + 1, vectors.size(-1)).index_copy_(0, at, vectors.flatten(0, 1))[
        :spare
    ]
