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

# Maximum number of batches that a stream launches before it waits for the first of them.
IN_FLIGHT = 3


class Batch(NamedTuple):
    """Encoded texts of a window, which is a sequence of texts that are tokenised together.

    Attributes:
        window: number of the window.
        positions: positions of the texts in the window, in the order of the rows.
        rows: :class:`SparseRows`, :class:`TokenRows`, or a list or matrix with a row for each text.
            A batch of one text that could not be encoded has the exception instead.
        cut: number of texts that the tokenizer truncated.
        max_length: number of tokens at which texts are truncated; ``None`` without a limit.
    """

    window: int
    positions: Sequence[int]
    rows: Any
    cut: int = 0
    max_length: int | None = None

    def rows_of(self, texts: range) -> Any:
        """Return the rows of consecutive texts of the batch.

        Args:
            texts: positions in the batch of the texts.

        Raises:
            Exception: if the batch is a text that could not be encoded.
        """
        rows = self.rows
        if isinstance(rows, Exception):
            raise rows
        if len(texts) == len(self.positions):
            return rows
        selected = slice(texts.start, texts.stop)
        if isinstance(rows, SparseRows | TokenRows):
            return rows.part(selected)
        if isinstance(rows, Tensor) and rows.layout != torch.strided:
            rows = rows.to_dense()  # torch cannot slice the rows of a sparse tensor
        return rows[selected]


def bisect_failures(
    items: Items,
    function: Callable[[Items], R],
) -> Iterator[tuple[Items, R | Exception]]:
    """Apply a function to items, halving a batch that fails until the failing item is isolated.

    Args:
        items: the items, such as the texts of a batch.
        function: takes items and returns their result.

    Yields:
        Consecutive parts of the items, each with its result. A part whose result is an exception
        has one item.
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
        texts: the texts; also pages, for a stream that encodes pages.
        skip: positions of texts whose rows an interrupted run has already stored. Batches are
            composed as if these texts were encoded again, so that the other texts get the same
            batches, and so the same bits, as in a run without interruption.
        prepare: function that changes texts before they are tokenised, for example by shortening
            them.
    """

    texts: Sequence[str]
    skip: frozenset[int] = frozenset()
    prepare: Callable[[Sequence[str]], Sequence[str]] | None = None

    def prepared_texts(self) -> list[str]:
        """Return the texts as they are tokenised."""
        return list(self.texts if self.prepare is None else self.prepare(self.texts))


def warn_unused_batch_tokens() -> None:
    """Warn that ``batch_tokens`` has no effect for a model whose texts are padded."""
    warnings.warn(
        "batch_tokens does nothing for a model whose texts are padded: "
        "batch_size divides them into batches.",
        stacklevel=3,
    )


class SparseRows(NamedTuple):
    """Packed sparse rows, whose entries are on the CPU or on a device.

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
        """Return consecutive rows, which share the memory of these."""
        entries = entry_slice(self.counts, rows)
        return SparseRows(
            self.counts[rows],
            self.columns[entries],
            self.values[entries],
            self.vocab_size,
        )


def entry_slice(counts: Tensor, rows: slice) -> slice:
    """Return the slice of packed storage that holds the entries of consecutive rows.

    Args:
        counts: number of entries of each row, ``[N]``.
        rows: slice of the row numbers.
    """
    start = int(counts[: rows.start].sum())
    return slice(start, start + int(counts[rows].sum()))


class RowCapacityError(Exception):
    """Raised if a sparse row has more entries than its fixed capacity.

    Attributes:
        max_entries: number of entries of the longest row.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__(f"a row has {max_entries} entries, more than its capacity.")
        self.max_entries = max_entries


class HostCopy:
    """Tensors that are being copied to the CPU.

    A GPU writes them to pinned memory in the order of its current CUDA stream, while the CPU goes
    on. Tensors of the CPU are not copied.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start copying tensors to the CPU.

        Args:
            tensors: at least one tensor. All are on the same device.
        """
        self._event: Any = None
        device = tensors[0].device
        if device.type == "cuda":
            self._copies = [_start_pinned_copy(tensor) for tensor in tensors]
            # The event marks the end of the copies. A thread that waits for a blocking event
            # sleeps, and leaves its core to others.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._copies = [tensor.cpu() for tensor in tensors]

    def ready(self) -> bool:
        """Return whether the copies have finished."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> list[Tensor]:
        """Wait until the tensors have been copied, but not for later work of the device.

        Returns:
            The copies, in the order of the tensors.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def _start_pinned_copy(tensor: Tensor) -> Tensor:
    """Start copying a GPU tensor to pinned memory, and return the copy."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


class PendingSparseRows(HostCopy):
    """Rows of a CSR matrix that are being copied to the CPU."""

    def __init__(self, matrix: Tensor, to_host: bool = True) -> None:
        """Start copying the rows to the CPU.

        Args:
            matrix: ``torch.sparse_csr`` matrix ``[B, V]``.
            to_host: whether columns and values are copied, too. Otherwise they stay on the device.
        """
        self._vocab_size = int(matrix.size(1))
        counts = matrix.crow_indices().diff()
        entries = (matrix.col_indices().to(torch.int32), matrix.values())
        self._device_entries = None if to_host else entries
        super().__init__([counts, *entries] if to_host else [counts])

    def get(self) -> SparseRows:
        """Wait for the copies and return the rows."""
        counts, *copied_entries = self.wait()
        columns, values = self._device_entries or copied_entries
        return SparseRows(counts.to(torch.int64), columns, values, self._vocab_size)


class PendingCapacityRows(HostCopy):
    """Sparse rows that are being copied to the CPU, from tensors with `capacity` entries per row.

    A CUDA graph needs such tensors of a fixed size. A row with fewer entries leaves some unused.
    """

    def __init__(
        self,
        counts: Tensor,
        stored_counts: Tensor,
        columns: Tensor,
        values: Tensor,
        *,
        capacity: int,
        vocab_size: int,
        to_host: bool = True,
    ) -> None:
        """Start copying the rows to the CPU.

        Args:
            counts: number of non-zero entries of each row, ``[B]``, which may exceed `capacity`.
            stored_counts: number of entries that are stored of each row, ``[B]``.
            columns: columns of the stored entries, ``[B, capacity]``.
            values: values of the stored entries, ``[B, capacity]``.
            capacity: largest number of entries that are stored of a row.
            vocab_size: number of columns V.
            to_host: whether columns and values are copied, too. Otherwise they stay on the device.
        """
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._device_entries = None if to_host else (columns, values)
        tensors = [counts, stored_counts]
        if to_host:
            tensors += [columns, values]
        super().__init__(tensors)

    def get(self) -> SparseRows:
        """Wait for the copies and return the rows.

        Raises:
            RowCapacityError: if a row has more entries than the capacity.
        """
        counts, stored_counts, *copied_entries = self.wait()
        columns, values = self._device_entries or copied_entries
        return unpack_capacity_rows(
            counts,
            stored_counts,
            columns,
            values,
            self._capacity,
            self._vocab_size,
        )


def unpack_capacity_rows(
    counts: Tensor,
    stored_counts: Tensor,
    columns: Tensor,
    values: Tensor,
    capacity: int,
    vocab_size: int,
) -> SparseRows:
    """Convert sparse rows in tensors with `capacity` entries per row to packed rows.

    The packed rows are copies on the same device as `columns` and `values`, because a CUDA graph
    overwrites its tensors in the next run. The CPU does not wait for the device.

    Args:
        counts: number of non-zero entries of each row, ``[N]`` on the CPU. It may exceed
            `capacity`.
        stored_counts: number of entries that are stored of each row, ``[N]`` on the CPU.
        columns: columns of the stored entries, ``[N, capacity]``.
        values: values of the stored entries, ``[N, capacity]``.
        capacity: largest number of entries that are stored of a row.
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
    sources = source_positions(
        source_starts=torch.arange(len(stored_counts)) * columns.size(1),
        result_starts=stored_counts.cumsum(0) - stored_counts,
        counts=stored_counts,
        device=columns.device,
    )
    return SparseRows(
        stored_counts,
        columns.flatten()[sources],
        values.flatten()[sources],
        vocab_size,
    )


def _row_beginnings(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Concatenate the first ``sizes[i]`` entries of each row ``i`` of a CPU matrix.

    numpy is used because torch would start threads, which compete with those of the tokenizer.
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
        batches: batches with :class:`SparseRows`. Together they have every text once.
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
    counts = torch.cat([batch.rows.counts for batch in batches])
    columns = torch.cat([batch.rows.columns for batch in batches])
    values = torch.cat([batch.rows.values for batch in batches])
    text_of_row = np.concatenate([np.asarray(batch.positions) for batch in batches])
    offsets = offsets_of(counts.numpy())
    if np.array_equal(text_of_row, np.arange(total)):
        return torch.from_numpy(offsets), columns, values
    row_of_text = np.argsort(text_of_row)  # sorting a permutation gives its inverse
    text_counts = counts.numpy()[row_of_text]
    text_offsets = offsets_of(text_counts)
    # for each entry of the result, in the order of the texts, its position in the batches
    sources = source_positions(
        source_starts=torch.from_numpy(offsets[row_of_text]),
        result_starts=torch.from_numpy(text_offsets[:-1]),
        counts=torch.from_numpy(text_counts),
        device=values.device,
    )
    return torch.from_numpy(text_offsets), columns[sources], values[sources]


def source_positions(
    source_starts: Tensor,
    result_starts: Tensor,
    counts: Tensor,
    device: torch.device,
) -> Tensor:
    """Compute the positions from which the entries of packed rows are gathered.

    Rows may be anywhere in `source`. ``source[source_positions(...)]`` holds the entries of row 0,
    then the entries of row 1, and so on.

    Args:
        source_starts: position of each row's first entry in the source, ``[N]``.
        result_starts: position of each row's first entry in the result, ``[N]``.
        counts: number of entries of each row, ``[N]``.
        device: device of the positions.

    Returns:
        Positions in the source, int64 ``[sum(counts)]``.
    """
    # Entry i of the result moves by the same distance as the first entry of its row.
    distances = repeat_interleave(source_starts - result_starts, counts, device)
    return distances.add_(torch.arange(len(distances), device=device))


def repeat_interleave(
    values: Tensor,
    counts: Tensor,
    device: torch.device | None = None,
) -> Tensor:
    """Compute ``torch.repeat_interleave`` of CPU tensors on a device, without waiting for it.

    torch would wait for the device to learn the size of the result, which is computed here from the
    counts on the CPU.

    Args:
        values: values to repeat, int64 ``[N]`` on the CPU.
        counts: how often each value is repeated, int64 ``[N]`` on the CPU.
        device: device of the result; ``None`` means the CPU.

    Returns:
        The repeated values, ``[sum(counts)]``.
    """
    if device is None or device.type == "cpu":
        # torch would wake all threads even for a few rows, which can take milliseconds.
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
    """Packed token vectors of N texts with T tokens altogether, on the CPU.

    Attributes:
        counts: number of vectors of each text, int64 ``[N]``.
        finite: whether all elements of each vector are finite, bool ``[T]``.
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
    """Token vectors in their stored number type that are being copied to the CPU.

    They are packed on the device. The CPU learns their number when it has received them.
    """

    def __init__(
        self,
        vectors: Tensor,
        mask: Tensor,
        to_stored: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> None:
        """Remove padding, convert the vectors to their stored type, and start the copy to the CPU.

        Args:
            vectors: vectors of padded texts, ``[B, S, D]``.
            mask: which tokens have a vector, ``[B, S]``.
            to_stored: function that converts fp32 vectors ``[T, D]`` to the attributes ``finite``
                and ``values`` of :class:`TokenRows`, and for int8 ``scales``.
        """
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
    """Token vectors that are packed on a device, and being copied to the CPU."""

    def __init__(self, vectors: Tensor, mask: Tensor, to_host: bool) -> None:
        """Pack the vectors, and start copying their counts to the CPU.

        Args:
            vectors: vectors of padded texts, ``[B, S, D]``.
            mask: which tokens have a vector, ``[B, S]``.
            to_host: whether the vectors are copied, too. Otherwise they stay on the device.
        """
        mask = mask.bool()
        self._packed = packed_rows(vectors, mask)
        counts = mask.sum(1)
        super().__init__([counts, self._packed] if to_host else [counts])

    def get(self) -> list[Tensor]:
        """Wait for the copies and return the vectors of each text.

        Returns:
            A tensor ``[n_tokens, D]`` for each text. They share the memory of one tensor.
        """
        counts, *copies = self.wait()
        vectors = copies[0] if copies else self._packed
        total = int(counts.sum())
        if vectors.size(0) != total:
            vectors = vectors[:total].clone()  # a copy, so that the unused rows are freed
        return list(torch.split(vectors, counts.tolist()))


def packed_rows(vectors: Tensor, mask: Tensor) -> Tensor:
    """Pack the vectors of the tokens that a mask selects, one text after another.

    Args:
        vectors: vectors of padded texts, ``[B, S, D]``.
        mask: bool ``[B, S]``, True for the T tokens to keep.

    Returns:
        Vectors ``[T, D]`` for tensors on the CPU. Vectors ``[B * S, D]`` for tensors on a GPU, of
        which the last ``B * S - T`` are undefined: to return only T vectors, the CPU would have to
        wait for the GPU to count them.
    """
    if vectors.device.type == "cpu":
        return vectors[mask]
    flat_mask = mask.reshape(-1)
    size = flat_mask.numel()
    # The row of a token to keep is the number of tokens to keep before it. All other tokens are
    # written to an additional last row, which is dropped.
    targets = torch.where(flat_mask, flat_mask.cumsum(0) - 1, size)
    rows = vectors.new_zeros(size + 1, vectors.size(-1))
    return rows.index_copy_(0, targets, vectors.flatten(0, 1))[:size]
