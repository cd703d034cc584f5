"""Packed token vectors in the files of an index, and blocks of them on a device.

The vectors are stored as int8, fp16 or int4. The files are memory-mapped, and each document is
compared with its checksum when it is first read.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilefold._internal.memory import memory_left
from tilefold._internal.sentence_transformers import check_sentence_transformers
from tilefold.ops import QuantizedTokens, maxsim, quantize_tokens
from tilefold.pipeline.ragged import offsets_of, row_ranges
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.errors import ArgumentDataError, DataError
from tilefold.retrieval.index.devices import copy_to_device
from tilefold.retrieval.index.protocol import REMEDY, read_array, read_offsets
from tilefold.retrieval.vectors.tokens import TokenVectors

STORAGES = ("int8", "fp16", "int4")
VALUES = "values.bin"
SCALES = "scales.bin"
OFFSETS = "offsets.npy"
CHECKSUMS = "checksums.npy"
FILES = (VALUES, SCALES, OFFSETS, CHECKSUMS)
# Types of the values and of the scales in the files. The scales of int4 are bfloat16, which is
# stored as uint16, because numpy has no bfloat16.
_FILE_DTYPES: dict[str, tuple[type, type | None]] = {
    "int8": (np.int8, np.float32),
    "fp16": (np.float16, None),
    "int4": (np.uint8, np.uint16),
}
# Number of tokens of a block that is copied to a GPU.
STREAMED_TOKENS = 1 << 21
# Number of tokens of a block in a GPU's memory.
_RESIDENT_TOKENS = 1 << 30
# The same for int4, which is decoded block by block.
_DECODED_TOKENS = 1 << 24
# Number of blocks in a GPU's memory while documents are streamed.
_STREAM_SLOTS = 3
# Free memory that locking needs, as a multiple of the size of the files.
_LOCK_MARGIN = 1.5
# Flag cudaHostRegisterPortable: the memory is locked for all GPUs.
_CUDA_HOST_REGISTER_PORTABLE = 1
# Checksums are compared by several threads. Each takes this number of documents at a time.
_CHECK_DOCUMENTS = 512
_CHECK_THREADS = min(12, os.cpu_count() or 1)
# An int4 entry is one of the odd integers from -15 to 15, times a scale.
_LARGEST_INT4 = 15

Rows = npt.NDArray[np.int64]


class StoredTokens(NamedTuple):
    """Token vectors of T tokens as an index stores them: int8, fp16 or int4.

    Documents that all have L tokens may also be padded, with shapes ``[N, L, ...]``.

    Attributes:
        values: ``[T, D]`` int8 or fp16, or ``[T, D / 2]`` uint8 for int4.
        scales: ``[T]`` factors of the values, fp32 for int8 and bfloat16 for int4. None for fp16.
    """

    values: Tensor
    scales: Tensor | None = None

    def for_maxsim(self) -> Tensor | QuantizedTokens:
        """Return the vectors as the document argument of :func:`tilefold.ops.maxsim`.

        int4 vectors become int8 vectors. Other vectors are not copied.
        """
        if self.scales is None:
            return self.values
        if self.values.dtype == torch.uint8:
            # A nibble n in [0, 15] means 2 n - 15. In the high half of a byte, its value is 16 n.
            # An XOR with 0x88 turns this byte, as int8, into 16 n - 128 + 8 = 8 (2 n - 15).
            nibbles = torch.cat([self.values << 4, self.values & 0xF0], dim=-1)
            return QuantizedTokens(
                nibbles.bitwise_xor_(0x88).view(torch.int8),
                self.scales.float() / 8,
            )
        return QuantizedTokens(self.values, self.scales)

    def floats(self) -> Tensor:
        """Return the vectors in fp32, ``[T, D]``."""
        vectors = self.for_maxsim()
        return vectors.dequantize() if isinstance(vectors, QuantizedTokens) else vectors.float()

    def map(self, function: Callable[[Tensor], Tensor]) -> StoredTokens:
        """Apply a function to the values and, if there are some, to the scales."""
        scales = None if self.scales is None else function(self.scales)
        return StoredTokens(function(self.values), scales)

    def tokens(self, start: int, end: int) -> StoredTokens:
        """Return a view of the tokens from `start` to `end`, exclusive."""
        return self.map(lambda tensor: tensor[start:end])


class Chunk(NamedTuple):
    """Documents that are written into an index together.

    Attributes:
        ids: ids of the N documents.
        lengths: number of tokens of each document, ``[N]``.
        vectors: vectors of all tokens, packed.
    """

    ids: list[str]
    lengths: Rows
    vectors: StoredTokens


def to_storage(vectors: Tensor | QuantizedTokens, storage: str) -> StoredTokens:
    """Convert token vectors to the storage of an index.

    An int8 entry is an integer times an fp32 scale of its token. An int4 entry is an odd integer
    from -15 to 15, times a bfloat16 scale of its token.

    Args:
        vectors: ``[T, D]``, floats or int8 with scales.
        storage: ``"int8"``, ``"fp16"`` or ``"int4"``.

    Raises:
        ArgumentDataError: if fp16 cannot represent an entry.
    """
    if storage == "int8" and isinstance(vectors, QuantizedTokens):
        return StoredTokens(vectors.values, vectors.scales)
    rows = vectors.dequantize() if isinstance(vectors, QuantizedTokens) else vectors.float()
    if storage == "int8":
        quantized = quantize_tokens(rows, "int8")
        return StoredTokens(quantized.values, quantized.scales)
    if storage == "int4":
        return _to_int4(rows)
    halves = rows.half()
    if not bool(halves.isfinite().all()):
        largest = float(rows.abs().max())
        raise ArgumentDataError(
            "tokens",
            f"expected entries within 65504 for fp16, got {largest:.3g}. "
            "Use storage='int8', or normalize the vectors.",
        )
    return StoredTokens(halves)


def _to_int4(rows: Tensor) -> StoredTokens:
    """Quantize token vectors to int4, with an error of at most the scale of the token.

    A token of 128 entries takes 66 bytes.

    Args:
        rows: fp32 ``[T, D]`` with an even D.
    """
    # The largest entry of a token becomes 15 times the scale.
    scales = (rows.abs().amax(dim=1) / _LARGEST_INT4).bfloat16()
    # The divisor of a zero vector is not 0.
    divisors = scales.float().clamp_min(torch.finfo(torch.float32).tiny)
    # Multiples of the scale, roughly within [-15, 15], because the scale is rounded.
    multiples = rows / divisors[:, None]
    # A nibble n in [0, 15] means 2 n - 15.
    nibbles = ((multiples + _LARGEST_INT4) / 2).round_().clamp_(0, 15).to(torch.uint8)
    # A byte has entry i in its low half and entry D / 2 + i in its high half.
    half = rows.size(1) // 2
    return StoredTokens(nibbles[:, :half] | (nibbles[:, half:] << 4), scales)


class TokenFiles:
    """Memory-mapped token vectors of the N documents of an index.

    Each document has a checksum, which is compared when the document is first read.

    Attributes:
        folder: the folder of the index.
        dimension: number of entries of a vector, D.
        storage: ``"int8"``, ``"fp16"`` or ``"int4"``.
        offsets: int64 ``[N + 1]``, where the tokens of each document begin.
        lengths: number of tokens of each document, ``[N]``.
        n_tokens: number of tokens of all documents.
        values: values of all tokens, ``[T, D]`` int8 or fp16, or ``[T, D / 2]`` uint8 for int4.
        scales: factors of the values, ``[T]`` fp32 for int8, and the bits of bfloat16 in uint16 for
            int4; None for fp16.
    """

    def __init__(self, folder: Path, n_documents: int, dimension: int, storage: str) -> None:
        """Map the files of an index into memory, and check their sizes.

        Args:
            folder: the folder of the index.
            n_documents: number of documents of the index, N.
            dimension: number of entries of a vector, D.
            storage: ``"int8"``, ``"fp16"`` or ``"int4"``.

        Raises:
            DataError: if the size of a file does not match the number of documents or tokens.
        """
        self.folder = folder
        self.dimension = dimension
        self.storage = storage
        self.offsets = read_offsets(folder / OFFSETS, n_documents)
        self.lengths = np.diff(self.offsets)
        self.n_tokens = int(self.offsets[-1])
        self._checksums = read_array(folder / CHECKSUMS, np.uint32, n_documents)
        # Whether the vectors of each document were compared with their checksum, in check().
        self._is_verified = np.zeros(n_documents, bool)
        # Whether lock() was called, which tries only once to lock the mapped files in memory.
        self._lock_was_tried = False
        value_dtype, scale_dtype = _FILE_DTYPES[storage]
        # int4 packs two entries of a vector into one byte.
        values_per_token = dimension // 2 if storage == "int4" else dimension
        self.values = self._map_file(VALUES, value_dtype, (self.n_tokens, values_per_token))
        self.scales: npt.NDArray[Any] | None = None
        if scale_dtype is not None:
            self.scales = self._map_file(SCALES, scale_dtype, (self.n_tokens,))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def _map_file(self, name: str, dtype: type, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Map a file as an array, or raise ``DataError`` if its size does not match the shape."""
        path = self.folder / name
        expected_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        n_bytes = path.stat().st_size
        if n_bytes != expected_bytes:
            raise DataError(f"{path}: expected {expected_bytes} bytes, got {n_bytes}. {REMEDY}")
        if not expected_bytes:
            # An empty file cannot be mapped.
            return np.empty(shape, dtype)
        return np.asarray(np.memmap(path, dtype, mode="c", shape=shape))

    def check(self, rows: Rows) -> None:
        """Compare documents with their checksums, if that was not done before.

        Args:
            rows: rows of the documents.

        Raises:
            DataError: if the vectors of a document do not match their checksum.
        """
        unverified = rows[~self._is_verified[rows]]
        parts = [
            unverified[start : start + _CHECK_DOCUMENTS]
            for start in range(0, len(unverified), _CHECK_DOCUMENTS)
        ]
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:
            for damaged_rows in pool.map(self._find_damaged, parts):
                if damaged_rows.size:
                    raise DataError(
                        f"{self.folder / VALUES}: damaged; the token vectors of the document in "
                        f"row {damaged_rows[0]} do not match their checksum. {REMEDY}",
                    )
        self._is_verified[unverified] = True

    def _find_damaged(self, rows: Rows) -> Rows:
        """Return the rows of the documents that do not match their checksums."""
        computed = checksums(self._arrays(), self.offsets[rows], self.offsets[rows + 1])
        damaged_rows: Rows = rows[computed != self._checksums[rows]]
        return damaged_rows

    def lock(self) -> None:
        """Lock the mapped files in memory (pinned memory), so that GPUs copy from it faster.

        The pages become private to this process, so this uses as much extra memory as the files are
        large until the object is deleted. Only the first call tries to lock. If it fails, a
        ``UserWarning`` says why, and copies are slower.
        """
        if self._lock_was_tried:
            return
        self._lock_was_tried = True
        # Processes that open the index at the same time measure the free memory in turn.
        with _locked_file(self.folder / VALUES):
            refusal = self._lock_pages()
        if refusal is not None:
            warnings.warn(
                f"{self.folder} is not locked in memory ({refusal}): its vectors are copied to the "
                "GPU more slowly.",
                UserWarning,
                stacklevel=2,
            )

    def _lock_pages(self) -> str | None:
        """Lock all arrays in memory, or none of them.

        Arrays are unlocked when this object is deleted, but not at the end of the process, when
        CUDA may be gone already.

        Returns:
            The reason why nothing was locked; None if the arrays were locked.
        """
        free_bytes = memory_left()
        needed_bytes = int(_LOCK_MARGIN * self.nbytes)
        if free_bytes is None or free_bytes < needed_bytes:
            free = "an unknown number of" if free_bytes is None else free_bytes
            return f"{free} bytes free, {needed_bytes} needed"
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        finalizers: list[Any] = []
        for array in self._arrays():
            address = array.ctypes.data
            error = int(
                runtime.cudaHostRegister(address, array.nbytes, _CUDA_HOST_REGISTER_PORTABLE),
            )
            if error:
                for unlock in finalizers:
                    unlock()
                _consume_cuda_error()
                return f"cudaHostRegister returned error {error}"
            finalizer = weakref.finalize(self, runtime.cudaHostUnregister, address)
            finalizer.atexit = False
            finalizers.append(finalizer)
        return None

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the lock, which a copy in another process does not have."""
        return vars(self) | {"_lock_was_tried": False}

    def take(self, rows: Rows) -> tuple[StoredTokens, Tensor]:
        """Copy the vectors of some documents into one packed array.

        Args:
            rows: rows of the documents, in any order, ``[M]``.

        Returns:
            The packed vectors, and their int32 offsets ``[M + 1]``.
        """
        self.check(rows)
        starts = self.offsets[rows].tolist()
        ends = self.offsets[rows + 1].tolist()
        packed_arrays = []
        for array in self._arrays():
            # The empty part comes first so that concatenate works without documents.
            parts = [array[:0]]
            parts += [array[start:end] for start, end in zip(starts, ends, strict=True)]
            packed_arrays.append(np.concatenate(parts))
        offsets = offsets_of(self.lengths[rows]).astype(np.int32)
        return self._stored_tokens(packed_arrays), torch.from_numpy(offsets)

    def document_range(self, first_document: int, end_document: int) -> StoredTokens:
        """Return the vectors of consecutive documents, as views of the files.

        Args:
            first_document: row of the first document.
            end_document: row after the last document.
        """
        self.check(np.arange(first_document, end_document))
        start = int(self.offsets[first_document])
        end = int(self.offsets[end_document])
        return self._stored_tokens([array[start:end] for array in self._arrays()])

    def _arrays(self) -> list[npt.NDArray[Any]]:
        """Return the values and, if there are some, the scales."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    def _stored_tokens(self, arrays: Sequence[npt.NDArray[Any]]) -> StoredTokens:
        """Wrap values and, if there are some, scales as tensors, without a copy."""
        values = torch.from_numpy(arrays[0])
        if self.scales is None:
            return StoredTokens(values)
        scales = torch.from_numpy(arrays[1])
        if self.storage == "int4":
            scales = scales.view(torch.bfloat16)
        return StoredTokens(values, scales)

    def blocks(self, n_tokens: int) -> Iterator[tuple[Rows, Tensor]]:
        """Iterate over all documents in blocks.

        Args:
            n_tokens: largest number of tokens of a block. A longer document is a block by itself.

        Yields:
            Lengths of the documents of a block, and the vectors of all their tokens in fp32.
        """
        for first_document, end_document in row_ranges(self.offsets, n_tokens):
            vectors = self.document_range(first_document, end_document).floats()
            yield self.lengths[first_document:end_document], vectors


@contextlib.contextmanager
def _locked_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file within the block, if the system has such locks."""
    with contextlib.ExitStack() as stack:
        # Windows has no fcntl, and some network file systems have no locks.
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            file = stack.enter_context(path.open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _consume_cuda_error() -> None:
    """Consume the error of a failed CUDA call with a launch that may fail.

    CUDA reports the error again at the next launch, which would otherwise be one of the caller.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


def file_arrays(vectors: StoredTokens) -> list[npt.NDArray[Any]]:
    """Return the values and, if there are some, the scales as they are written into files."""
    arrays = [np.ascontiguousarray(vectors.values.numpy())]
    scales = vectors.scales
    if scales is not None:
        if scales.dtype == torch.bfloat16:
            # numpy has no bfloat16.
            scales = scales.view(torch.int16)
        arrays.append(np.ascontiguousarray(scales.numpy()))
    return arrays


def checksums(
    arrays: Sequence[npt.NDArray[Any]],
    starts: Rows,
    ends: Rows,
) -> npt.NDArray[np.uint32]:
    """Compute the CRC-32 of documents, over their values and then their scales.

    Args:
        arrays: values ``[T, ...]`` and, if there are some, scales ``[T]``, as :func:`file_arrays`
            returns them.
        starts: offset of the first token of each document, ``[N]``.
        ends: exclusive end of the tokens of each document, ``[N]``.

    Returns:
        The checksums, uint32 ``[N]``.
    """
    results = np.zeros(len(starts), np.uint32)
    # Bytes of each array, and the number of bytes per token.
    buffers = [(array.reshape(-1).view(np.uint8).data, array[:1].nbytes) for array in arrays]
    for document, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        crc = 0
        for data, token_bytes in buffers:
            crc = zlib.crc32(data[start * token_bytes : end * token_bytes], crc)
        results[document] = crc
    return results


class Block(NamedTuple):
    """Consecutive documents that are scored together.

    Attributes:
        first_document: row of the first document.
        end_document: row after the last document.
        vectors: vectors of the n documents on the device, packed or padded.
        offsets: int32 ``[n + 1]``, offsets of packed documents; None for padded documents.
    """

    first_document: int
    end_document: int
    vectors: StoredTokens
    offsets: Tensor | None


class DeviceDocuments:
    """Consecutive documents of an index that one device searches.

    A GPU has them in its memory if they fit. Otherwise it computes with one block while the next
    blocks are copied. From the second search on, the files are locked in memory
    (:meth:`TokenFiles.lock`), and are then copied at the rate of the bus. A CPU reads the mapped
    files.

    Attributes:
        first_document: row of the first document.
        end_document: row after the last document.
        without_tokens: bool ``[n]`` on the device, True for documents without tokens; None if all
            documents have tokens.
    """

    def __init__(
        self,
        files: TokenFiles,
        device: torch.device,
        first_document: int,
        end_document: int,
        *,
        copy: bool,
    ) -> None:
        """Prepare the search of documents on a device.

        Args:
            files: token vectors of all documents of the index.
            device: the device that searches.
            first_document: row of the first document.
            end_document: row after the last document.
            copy: whether to copy the vectors into the memory of the device. Otherwise each search
                reads them from the files.
        """
        self.files = files
        self.device = device
        self.first_document = first_document
        self.end_document = end_document
        file_offsets = files.offsets[first_document : end_document + 1]
        self.offsets = torch.from_numpy(file_offsets.copy()).to(device)
        lengths = files.lengths[first_document:end_document]
        self.without_tokens: Tensor | None = None
        if not lengths.all():
            self.without_tokens = torch.from_numpy(lengths == 0).to(device)
        # Vectors in the memory of the device; None if they are read from the files.
        self.resident: StoredTokens | None = None
        if copy:
            vectors = files.document_range(first_document, end_document)
            self.resident = vectors.map(lambda tensor: copy_to_device(tensor, device))
        # Number of tokens of every document; 0 if the numbers differ, or on a CPU. Kernels for
        # documents of one length, which count as padded documents, are faster.
        self._common_length = 0
        if device.type != "cpu" and (lengths == lengths[0]).all():
            self._common_length = int(lengths[0])
        # Whether a search has copied the documents block by block.
        self._was_streamed = False

    def blocks(self, n_tokens: int = STREAMED_TOKENS) -> Iterator[Block]:
        """Iterate over the documents in blocks, in order.

        If the documents are in the memory of the device, blocks are as large as the computation
        allows.

        Args:
            n_tokens: maximum number of tokens per block that is read from the files.
        """
        if self.resident is not None:
            yield from self._divide_resident(self.resident)
            return
        ranges = list(
            row_ranges(self.files.offsets, n_tokens, self.first_document, self.end_document),
        )
        vectors_of_ranges: Iterator[StoredTokens]
        if self.device.type == "cpu":
            vectors_of_ranges = (self.files.document_range(*documents) for documents in ranges)
        else:
            vectors_of_ranges = self._stream(ranges)
        for documents, vectors in zip(ranges, vectors_of_ranges, strict=True):
            yield self._wrap_block(*documents, vectors)

    def _divide_resident(self, resident: StoredTokens) -> Iterator[Block]:
        """Divide documents in the memory of the device into blocks, and iterate over them.

        Args:
            resident: vectors of all documents of the device.
        """
        n_tokens = _DECODED_TOKENS if self.files.storage == "int4" else _RESIDENT_TOKENS
        offsets = self.files.offsets
        first_token = int(offsets[self.first_document])
        for documents in row_ranges(offsets, n_tokens, self.first_document, self.end_document):
            first_document, end_document = documents
            start = int(offsets[first_document]) - first_token
            end = int(offsets[end_document]) - first_token
            yield self._wrap_block(first_document, end_document, resident.tokens(start, end))

    def _wrap_block(self, first_document: int, end_document: int, vectors: StoredTokens) -> Block:
        """Wrap packed vectors as a block, padded if all documents have the same length.

        Args:
            first_document: row of the first document.
            end_document: row after the last document.
            vectors: packed vectors of these documents.
        """
        length = self._common_length
        if length:
            padded = vectors.map(lambda tensor: tensor.view(-1, length, *tensor.shape[1:]))
            return Block(first_document, end_document, padded, None)
        start = first_document - self.first_document
        end = end_document - self.first_document
        offsets = self.offsets[start : end + 1]
        return Block(first_document, end_document, vectors, (offsets - offsets[0]).int())

    def _stream(self, ranges: Sequence[tuple[int, int]]) -> Iterator[StoredTokens]:
        """Copy ranges of documents to the GPU, ahead of the computation.

        Yielded vectors are overwritten after the next ones have been requested.

        Args:
            ranges: first document and exclusive end of each range.

        Yields:
            The packed vectors of each range.
        """
        # Page-locked (pinned) memory is copied faster. Locking takes longer than it saves in a
        # single search, so the first search does without.
        if self._was_streamed:
            with torch.cuda.device(self.device):
                self.files.lock()
        self._was_streamed = True
        copies = _CopiesAhead(self.files, self.device, ranges)
        pending: deque[StoredTokens] = deque()
        try:
            for number in range(copies.n_slots):  # there are at most as many slots as ranges
                pending.append(copies.start(number))
            for number in range(len(ranges)):
                copies.make_computation_wait_for(number)
                yield pending.popleft()
                if number + copies.n_slots < len(ranges):
                    pending.append(copies.start(number + copies.n_slots))
        finally:
            # Copies are pending if the caller stopped early. They must end before their source
            # memory is released.
            copies.close(wait=bool(pending))


class _CopiesAhead:
    """Copies of ranges of documents to a GPU that run ahead of the computation.

    There are a few slots, each a buffer on the GPU with a CUDA stream that copies into it. Range i
    is copied into slot ``i % n_slots``.
    """

    def __init__(
        self,
        files: TokenFiles,
        device: torch.device,
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        """Allocate the buffers.

        Args:
            files: token vectors of all documents of the index.
            device: the GPU. Its current stream is that of the computation.
            ranges: first document and exclusive end of each range.
        """
        self.files = files
        self.ranges = ranges
        self.n_slots = min(_STREAM_SLOTS, len(ranges))
        self._compute_stream = torch.cuda.current_stream(device)
        self._copy_streams = [
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(self.n_slots)
        ]
        most_tokens = max(int(files.offsets[end] - files.offsets[first]) for first, end in ranges)
        no_documents = files.document_range(0, 0)
        self._buffers = [
            no_documents.map(
                lambda tensor: tensor.new_empty(most_tokens, *tensor.shape[1:], device=device),
            )
            for _ in range(self.n_slots)
        ]

    def start(self, number: int) -> StoredTokens:
        """Start to copy a range into its slot.

        Args:
            number: number of the range.

        Returns:
            The part of the slot's buffer that the range fills, before the copy is complete.
        """
        slot = number % self.n_slots
        copy_stream = self._copy_streams[slot]
        vectors = self.files.document_range(*self.ranges[number])
        target = self._buffers[slot].tokens(0, len(vectors.values))
        # Kernels that were launched so far may still read the range that this slot had before.
        copy_stream.wait_stream(self._compute_stream)
        with torch.cuda.stream(copy_stream):
            target.values.copy_(vectors.values, non_blocking=True)
            if target.scales is not None and vectors.scales is not None:
                target.scales.copy_(vectors.scales, non_blocking=True)
        return target

    def make_computation_wait_for(self, number: int) -> None:
        """Make kernels that are launched from now on wait for the copy of a range."""
        self._compute_stream.wait_stream(self._copy_streams[number % self.n_slots])

    def close(self, *, wait: bool) -> None:
        """Order later computation after all copies, so that the buffers can be freed.

        Args:
            wait: whether the CPU waits for the copies. It must if a search ended early, because the
                copies read memory that may be unlocked now.
        """
        for copy_stream in self._copy_streams:
            self._compute_stream.wait_stream(copy_stream)
            if wait:
                copy_stream.synchronize()


class QueryBatch(NamedTuple):
    """Padded token vectors of queries that are scored together.

    Attributes:
        vectors: fp32 ``[Nq, L, D]``.
        mask: bool ``[Nq, L]``, False for padding; None if all queries have L tokens.
    """

    vectors: Tensor
    mask: Tensor | None

    @classmethod
    def pad(cls, queries: Sequence[Tensor], device: torch.device) -> QueryBatch:
        """Pad the token vectors of queries with zeros, and copy them to a device.

        Args:
            queries: token vectors ``[n_i, D]`` of each query.
            device: the device of the result.
        """
        lengths = np.array([len(rows) for rows in queries])
        dimension = queries[0].size(1)
        # numpy pads, because torch would wake all its threads.
        padded = np.zeros((len(queries), lengths.max(), dimension), np.float32)
        for padded_rows, rows in zip(padded, queries, strict=True):
            padded_rows[: len(rows)] = rows.detach().cpu().numpy()
        mask = np.arange(padded.shape[1]) < lengths[:, None]
        batch = cls(
            torch.from_numpy(padded),
            None if mask.all() else torch.from_numpy(mask),
        )
        return batch.to(device)

    def to(self, device: torch.device) -> QueryBatch:
        """Return the queries on a device."""
        mask = None if self.mask is None else self.mask.to(device)
        return QueryBatch(self.vectors.to(device), mask)


def maxsim_scores(
    queries: QueryBatch,
    documents: StoredTokens,
    offsets: Tensor | None,
    reduction: str,
) -> Tensor:
    """Score every query with every document by MaxSim.

    Args:
        queries: padded token vectors of Nq queries.
        documents: token vectors of Nd documents on the same device, packed or padded.
        offsets: int32 ``[Nd + 1]``, offsets of packed documents; None for padded documents.
        reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.

    Returns:
        Scores, fp32 ``[Nq, Nd]``.
    """
    document_vectors = documents.for_maxsim()
    query_vectors = queries.vectors
    if not isinstance(document_vectors, QuantizedTokens):
        query_vectors = query_vectors.to(document_vectors.dtype)
    with torch.no_grad(), torch.autocast(query_vectors.device.type, enabled=False):
        return maxsim(
            query_vectors,
            document_vectors,
            query_mask=queries.mask,
            cu_seqlens_d=offsets,
            reduction=reduction,
        )


# Settings of the pooling of documents. An index records them, because vectors that were pooled with
# other settings cannot be added to it.
POOLING: Json = {"clusters": "ward", "protected_tokens": 1, "normalized": True}


def pool_documents(documents: list[Tensor], pool_factor: int) -> list[Tensor]:
    """Replace clusters of a document's token vectors by their means.

    Clusters are found by Ward's method. The first token of a document is kept as it is.

    Args:
        documents: fp32 token vectors ``[n_i, D]`` of each document.
        pool_factor: number of token vectors per cluster, on average.

    Returns:
        The pooled vectors of each document, normalized to unit length.

    Raises:
        ImportError: if sentence-transformers is not installed or is older than 6.2.
    """
    check_sentence_transformers()
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    pooling = HierarchicalTokenPooling(
        pool_factor,
        num_protected_tokens=POOLING["protected_tokens"],
        normalize_embeddings=POOLING["normalized"],
        tasks="document",
    )
    pooled: list[Tensor] = pooling.pool(documents, task="document")
    return pooled


def chunks_of(shards: Iterable[TokenVectors], storage: str, pool_factor: int) -> Iterator[Chunk]:
    """Pool the vectors of shards, and convert them to the storage of an index.

    Args:
        shards: token vectors of documents.
        storage: ``"int8"``, ``"fp16"`` or ``"int4"``.
        pool_factor: number of a document's token vectors that are replaced by one mean, on average.
            1 does not pool.

    Yields:
        The documents of each shard.
    """
    for shard in shards:
        vectors: Tensor | QuantizedTokens
        if pool_factor == 1:
            vectors = shard.packed()
            lengths = shard.offsets.diff().numpy()
        else:
            pooled = pool_documents([shard.rows(row) for row in range(len(shard))], pool_factor)
            vectors = torch.cat(pooled) if pooled else torch.zeros(0, shard.dimension)
            lengths = np.array([len(rows) for rows in pooled], np.int64)
        yield Chunk(shard.ids, lengths, to_storage(vectors, storage))
