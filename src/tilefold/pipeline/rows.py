"""Windows of texts, batches of encoded rows, and copies between the CPU and a device."""

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

# Number of batches that a stream has launched at most when it waits for the first of them.
IN_FLIGHT = 3


class Batch(NamedTuple):
    """Encoded texts of a window.

    Attributes:
        window: number of the window.
        positions: positions of the texts in the window, in the order of the rows.
        rows: :class:`SparseRows`, :class:`TokenRows`, a list or a matrix with a row for each text;
            the exception if the batch is one text that could not be encoded.
        cut: number of texts that the tokenizer truncated.
        max_length: tokens at which texts are truncated; ``None`` without a limit.
    """

    window: int
    positions: Sequence[int]
    rows: Any
    cut: int = 0
    max_length: int | None = None

    def rows_of(self, texts: range) -> Any:
        """Return the rows of consecutive texts of the batch.

        Args:
            texts: positions in the batch.

        Raises:
            Exception: the error of a text that could not be encoded.
        """
        rows = self.rows
        if isinstance(rows, Exception):
            raise rows
        if len(texts) == len(self.positions):
            return rows
        selected = slice(texts.start, texts.stop)
        if hasattr(rows, "part"):
            return rows.part(selected)
        if isinstance(rows, Tensor) and rows.layout != torch.strided:
            rows = rows.to_dense()
        return rows[selected]


def bisect_failures(
    items: Items,
    function: Callable[[Items], R],
) -> Iterator[tuple[Items, R | Exception]]:
    """Apply a function to items, and halve items that fail until the failing one is isolated.

    Args:
        items: the items, such as the texts of a batch.
        function: takes items and returns their result.

    Yields:
        Consecutive parts of the items with their result. A part that failed has one item, and its
        result is the exception.
    """
    result: R | Exception
    try:
        result = function(items)
    except Exception as error:  # an error of one item must not lose the others
        if len(items) > 1:
            for half in split_in_half(items):
                yield from bisect_failures(half, function)
            return
        result = error
    yield items, result


def split_in_half(items: Items) -> tuple[Items, Items]:
    """Return the first and the second half of a sequence."""
    middle = len(items) // 2
    return items[:middle], items[middle:]  # type: ignore[return-value]


class WindowEnd(NamedTuple):
    """Item of a stream after the last batch of a window."""

    window: int


class StreamStart(NamedTuple):
    """First item of a stream: tokenisation has begun, and the device has no work yet."""


Item = StreamStart | Batch | WindowEnd


class Window(NamedTuple):
    """Texts that are tokenised together and divided into batches.

    Attributes:
        texts: the texts.
        skip: positions of texts that need no rows, since an interrupted run has stored them.
            Batches are composed as if they did, so that the other texts get the same batches, and
            with them the same bits, as in a run without interruption.
        prepare: changes texts before they are tokenised, for example by shortening them.
    """

    texts: Sequence[str]
    skip: frozenset[int] = frozenset()
    prepare: Callable[[Sequence[str]], Sequence[str]] | None = None

    def prepared_texts(self) -> list[str]:
        """Return the texts that are tokenised."""
        return list(self.texts if self.prepare is None else self.prepare(self.texts))


def warn_unused_batch_tokens() -> None:
    """Warn that ``batch_tokens`` has no effect for a model whose texts are padded."""
    warnings.warn(
        "batch_tokens does nothing for a model whose texts are padded: "
        "its batches are cut by batch_size.",
        stacklevel=3,
    )


class SparseRows(NamedTuple):
    """Sparse rows on the CPU, or with entries on a device.

    Attributes:
        counts: number of entries of each row, int64 ``[N]`` on the CPU.
        columns: columns in ascending order within a row, int32 ``[sum(counts)]``. Those of a single
            row on a device are int64.
        values: ``[sum(counts)]``.
        vocab_size: number of columns V.
    """

    counts: Tensor
    columns: Tensor
    values: Tensor
    vocab_size: int

    def part(self, rows: slice) -> SparseRows:
        """Return consecutive rows."""
        entries = entry_slice(self.counts, rows)
        return SparseRows(
            self.counts[rows],
            self.columns[entries],
            self.values[entries],
            self.vocab_size,
        )


def entry_slice(counts: Tensor, rows: slice) -> slice:
    """Return the slice of the entries of consecutive rows in packed storage.

    Args:
        counts: number of entries of each row, ``[N]``.
        rows: the rows.
    """
    start = int(counts[: rows.start].sum())
    return slice(start, start + int(counts[rows].sum()))


class RowCapacityError(Exception):
    """A sparse row has more entries than fit into storage of fixed capacity.

    Attributes:
        max_entries: number of entries of the longest row.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__(f"a row has {max_entries} entries, more than its capacity.")
        self.max_entries = max_entries


class HostCopy:
    """Asynchronous copy of tensors to the CPU.

    Tensors of a GPU are copied to pinned memory, in the order of the GPU's current CUDA stream.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start the copies. Only copies from a GPU are asynchronous.

        Args:
            tensors: tensors of one device, at least one. Those on the CPU are not copied.
        """
        self._event: Any = None
        self._host = list(tensors)
        device = tensors[0].device
        if device.type == "cuda":
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            # The event marks the end of the copies. A thread that waits for it does not spin.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        elif device.type != "cpu":
            self._host = [tensor.cpu() for tensor in tensors]

    def ready(self) -> bool:
        """Return whether the copies have finished."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> list[Tensor]:
        """Wait for the copies, but for no later work of the device, and return them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class PendingSparseRows(HostCopy):
    """Sparse rows that are being copied to the CPU.

    Args:
        rows: CSR ``[B, V]``, or rows of fixed capacity: (counts, stored counts, columns, values,
            V), as :func:`unpack_capacity_rows` takes them.
        capacity: number of entries that each row of fixed capacity can store.
        to_host: whether columns and values are copied too. Otherwise they stay on the device.
    """

    def __init__(
        self,
        rows: Tensor | tuple[Tensor, Tensor, Tensor, Tensor, int],
        capacity: int = 0,
        to_host: bool = True,
    ) -> None:
        """Start copying the rows to the CPU.

        Args:
            rows: CSR tensor ``[B, V]``, or rows of fixed capacity: the number of entries of each
                row ``[B]``, the number that is stored of each row ``[B]``, their columns and their
                values ``[B, capacity]``, and the vocabulary size V.
            capacity: number of entries that each row of fixed capacity can store.
            to_host: whether columns and values are copied too. Otherwise they stay on the device.
        """
        self.capacity: int | None  # None for a CSR tensor
        if isinstance(rows, Tensor):
            self.capacity = None
            self.vocab_size = int(rows.size(1))
            counts = [rows.crow_indices().diff()]
            columns = rows.col_indices().to(torch.int32)
            values = rows.values()
        else:
            self.capacity = capacity
            all_counts, stored_counts, columns, values, self.vocab_size = rows
            counts = [all_counts, stored_counts]
        # Columns and values that stay on the device.
        self._device_entries = [] if to_host else [columns, values]
        super().__init__([*counts, columns, values] if to_host else counts)

    def get(self) -> SparseRows:
        """Wait for the copies and return the rows.

        Raises:
            RowCapacityError: if a row has more entries than the capacity.
        """
        # The tensors in the order in which __init__() lists them.
        tensors = [*self.wait(), *self._device_entries]
        if self.capacity is None:
            counts, columns, values = tensors
            return SparseRows(counts.to(torch.int64), columns, values, self.vocab_size)
        counts, stored_counts, columns, values = tensors
        return unpack_capacity_rows(
            counts,
            stored_counts,
            columns,
            values,
            self.capacity,
            self.vocab_size,
        )


def unpack_capacity_rows(
    counts: Tensor,
    stored_counts: Tensor,
    columns: Tensor,
    values: Tensor,
    capacity: int,
    vocab_size: int,
) -> SparseRows:
    """Convert rows of fixed capacity to packed rows.

    Columns and values may be on a device. The results then stay there as copies, since a graph
    overwrites its buffers, and nothing waits for the device.

    Args:
        counts: number of non-zero entries of each row, ``[N]`` on the CPU.
        stored_counts: number of entries that are kept of each row, ``[N]`` on the CPU.
        columns: ``[N, capacity]``.
        values: ``[N, capacity]``.
        capacity: number of entries that each row can store.
        vocab_size: number of columns V.

    Raises:
        RowCapacityError: if a row has more entries than `capacity`.
    """
    max_entries = max(counts.tolist(), default=0)
    if max_entries > capacity:
        raise RowCapacityError(max_entries)
    if columns.device.type == "cpu":
        sizes = stored_counts.tolist()
        return SparseRows(
            stored_counts.to(torch.int64),
            _row_beginnings(columns, sizes),
            _row_beginnings(values, sizes),
            vocab_size,
        )
    stored_counts = stored_counts.to(torch.int64)
    if len(stored_counts) == 1:
        size = int(stored_counts)
        return SparseRows(
            stored_counts,
            columns[0, :size].to(torch.int64, copy=True),  # int64, as sparse tensors need it
            values[0, :size].clone(),
            vocab_size,
        )
    starts = torch.arange(len(stored_counts)) * columns.size(1)
    new_starts = stored_counts.cumsum(0) - stored_counts
    sources = source_positions(starts - new_starts, stored_counts, columns.device)
    return SparseRows(
        stored_counts,
        columns.flatten()[sources],
        values.flatten()[sources],
        vocab_size,
    )


def _row_beginnings(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Concatenate the first ``sizes[i]`` entries of each row ``i`` of a CPU matrix.

    numpy does it, since torch would start threads that compete with the tokenizer's.
    """
    # numpy has no bfloat16: the entries are copied as integers of the same size.
    integer_types = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    array = rows.view(integer_types[rows.element_size()]).numpy()
    parts = [row[:size] for row, size in zip(array, sizes, strict=True)]
    packed = np.concatenate(parts) if parts else array.reshape(-1)
    return torch.from_numpy(packed).view(rows.dtype)


def concatenate_rows(batches: Sequence[Batch], total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate the sparse rows of batches in the order of the texts.

    Args:
        batches: batches with :class:`SparseRows`. Their positions are those of `total` texts.
        total: number of texts N.

    Returns:
        Offsets ``[N + 1]`` of the rows on the CPU, and the columns and values of their E entries,
        ``[E]`` each.
    """
    if not batches:
        return (
            torch.zeros(total + 1, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0),
        )
    if len(batches) == 1 and batches[0].positions == range(total):
        rows = batches[0].rows
        return (
            torch.from_numpy(offsets_of(rows.counts.numpy())),
            rows.columns.clone(),
            rows.values.clone(),
        )
    batch_counts = torch.cat([batch.rows.counts for batch in batches])
    columns = torch.cat([batch.rows.columns for batch in batches])
    values = torch.cat([batch.rows.values for batch in batches])
    # Position of the text of each row of the batches.
    order = torch.cat([torch.as_tensor(batch.positions, dtype=torch.int64) for batch in batches])
    counts = torch.zeros(total, dtype=torch.int64)
    counts[order] = batch_counts
    # Position of each text's first entry in the concatenated batches.
    starts = torch.zeros(total, dtype=torch.int64)
    starts[order] = batch_counts.cumsum(0) - batch_counts
    offsets = torch.cat([batch_counts.new_zeros(1), counts.cumsum(0)])
    sources = source_positions(starts - offsets[:-1], counts, values.device)
    return offsets, columns[sources], values[sources]


def source_positions(shifts: Tensor, counts: Tensor, device: torch.device) -> Tensor:
    """Compute where each entry of packed rows is copied from.

    Args:
        shifts: position of a row's first entry in the source minus that in the result, ``[N]``.
        counts: number of entries of each row, ``[N]``.
        device: device of the result.

    Returns:
        Positions in the source, int64 ``[sum(counts)]``.
    """
    positions = repeat_interleave(shifts, counts, device)
    return positions.add_(torch.arange(len(positions), device=device))


def repeat_interleave(
    values: Tensor,
    counts: Tensor,
    device: torch.device | None = None,
) -> Tensor:
    """Compute ``torch.repeat_interleave`` of CPU tensors on a device, without waiting for it.

    torch would wait for the device to learn the size of the result, which is computed here from the
    counts on the CPU.

    Args:
        values: int64 ``[N]`` on the CPU.
        counts: how often each value is repeated, int64 ``[N]`` on the CPU.
        device: device of the result; ``None`` means the CPU.

    Returns:
        ``[sum(counts)]``.
    """
    if device is None or device.type == "cpu":
        # numpy computes it, since torch wakes all threads for a few rows, which can take
        # milliseconds.
        return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))
    # One copy to the device instead of two.
    stacked = np.stack([values.numpy(), counts.numpy()])
    device_values, device_counts = to_device(stacked, device)
    return torch.repeat_interleave(device_values, device_counts, output_size=int(counts.sum()))


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy a numpy array to a device, in the order of its current CUDA stream."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class TokenRows(NamedTuple):
    """Packed token vectors of N texts on the CPU, T altogether.

    Attributes:
        counts: number of vectors of each text, int64 ``[N]``.
        finite: whether all elements of a vector are finite, bool ``[T]``.
        values: vectors in the stored number type, ``[T, D]``.
        scales: scales of int8 vectors, ``[T]``.
    """

    counts: Tensor
    finite: Tensor
    values: Tensor
    scales: Tensor | None = None

    def part(self, texts: slice) -> TokenRows:
        """Return the vectors of consecutive texts."""
        tokens = entry_slice(self.counts, texts)
        scales = None if self.scales is None else self.scales[tokens]
        return TokenRows(self.counts[texts], self.finite[tokens], self.values[tokens], scales)


class PendingTokenRows(HostCopy):
    """Stored token vectors that are being copied to the CPU.

    They are packed on the device. The CPU learns their number when it has received them.

    Args:
        vectors: ``[B, S, D]``.
        mask: which tokens count, ``[B, S]``.
        to_stored: converts fp32 vectors ``[T, D]`` to (finite ``[T]``, values ``[T, D]``), and
            scales ``[T]`` for int8, as in :class:`TokenRows`.
    """

    def __init__(
        self,
        vectors: Tensor,
        mask: Tensor,
        to_stored: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> None:
        mask = mask.bool()
        counts = mask.sum(1)
        packed = packed_rows(vectors, mask)
        super().__init__([counts, *to_stored(packed.float())])

    def get(self) -> TokenRows:
        """Wait for the copies and return the vectors."""
        counts, *tensors = self.wait()
        total = int(counts.sum())
        return TokenRows(counts, *(tensor[:total] for tensor in tensors))


class PendingTokenVectors(HostCopy):
    """Token vectors, packed on a device, whose counts are being copied to the CPU.

    Args:
        vectors: ``[B, S, D]``.
        mask: which tokens count, ``[B, S]``.
        to_host: whether the vectors are copied too. Otherwise they stay on the device.
    """

    def __init__(self, vectors: Tensor, mask: Tensor, to_host: bool) -> None:
        mask = mask.bool()
        self._packed = packed_rows(vectors, mask)
        counts = mask.sum(1)
        super().__init__([counts, self._packed] if to_host else [counts])

    def get(self) -> list[Tensor]:
        """Wait for the copies and return vectors ``[n, D]`` of each text, views of one tensor."""
        counts, *copies = self.wait()
        vectors = copies[0] if copies else self._packed
        total = int(counts.sum())
        if vectors.size(0) != total:
            vectors = vectors[:total].clone()  # a copy, so that the spare rows are freed
        return list(torch.split(vectors, counts.tolist()))


def packed_rows(vectors: Tensor, mask: Tensor) -> Tensor:
    """Pack the vectors of the tokens that a mask selects, one text after another.

    Args:
        vectors: vectors of padded texts, ``[B, S, D]``.
        mask: bool ``[B, S]``, True for T tokens to keep.

    Returns:
        ``[T, D]`` for tensors on the CPU, and ``[B * S, D]`` on a device, where the rows from T on
        are undefined. The CPU would have to wait for the device to learn T.
    """
    if vectors.device.type == "cpu":
        return vectors[mask]
    flat_mask = mask.reshape(-1)
    size = flat_mask.numel()
    # The row of each token to keep is the number of such tokens before it. The others go to an
    # additional last row, which is dropped.
    targets = torch.where(flat_mask, flat_mask.cumsum(0) - 1, size)
    rows = vectors.new_zeros(size + 1, vectors.size(-1))
    return rows.index_copy_(0, targets, vectors.flatten(0, 1))[:size]
