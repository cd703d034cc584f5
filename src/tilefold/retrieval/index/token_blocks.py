"""Packed token vectors in the files of an index, and blocks of them on a device.

Three storages are read and written: int8, fp16 and int4. The files are memory-mapped, and each
document is compared with its checksum when it is first read.
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
from tilefold.retrieval.index.protocol import REMEDY, read_array, read_offsets
from tilefold.retrieval.vectors.tokens import TokenVectors

STORAGES = ("int8", "fp16", "int4")
VALUES = "values.bin"
SCALES = "scales.bin"
OFFSETS = "offsets.npy"
CHECKSUMS = "checksums.npy"
FILES = (VALUES, SCALES, OFFSETS, CHECKSUMS)
# Types of the values and of the scales in the files. The scales of int4 are bfloat16, which numpy
# lacks.
_FILE_DTYPES: dict[str, tuple[type, type | None]] = {
    "int8": (np.int8, np.float32),
    "fp16": (np.float16, None),
    "int4": (np.uint8, np.uint16),
}
# Tokens of a block that is copied to a GPU.
STREAMED_TOKENS = 1 << 21
# Tokens of a block of a GPU's memory; int4 is decoded block by block.
_RESIDENT_TOKENS = 1 << 30
_DECODED_TOKENS = 1 << 24
# Blocks that are in a GPU's memory at a time while documents are streamed.
_STREAM_SLOTS = 3
# Free memory that locking needs, as a multiple of the size of the files.
_LOCK_MARGIN = 1.5
# Flag cudaHostRegisterPortable: the memory is locked for all GPUs.
_CUDA_HOST_REGISTER_PORTABLE = 1
# Checksums are compared by threads, in parts of so many documents.
_CHECK_THREADS = min(12, os.cpu_count() or 1)
_CHECK_DOCUMENTS = 512

Rows = npt.NDArray[np.int64]


class StoredTokens(NamedTuple):
    """Token vectors in a storage of an index.

    Packed vectors are described. Documents of L tokens each may also be padded, with ``[N, L]``
    in the place of ``[T]``.

    Attributes:
        values: ``[T, D]`` int8 or fp16, or ``[T, D / 2]`` uint8 for int4.
        scales: ``[T]`` factors of the values, fp32 for int8 and bfloat16 for int4. None for fp16.
    """

    values: Tensor
    scales: Tensor | None = None

    def decoded(self) -> Tensor | QuantizedTokens:
        """Return the vectors as the document argument of :func:`tilefold.ops.maxsim`.

        int4 vectors become int8 vectors, and the other storages stay as they are.
        """
        if self.scales is None:
            return self.values
        if self.values.dtype == torch.uint8:
            # A nibble n in [0, 15] stands for 2 n - 15. In the high half of a byte it is 16 n. As
            # int8, an XOR with 136 = 0x88 turns that into 16 n - 128 + 8 = 8 (2 n - 15): bit 7
            # subtracts 128, and the low bit 3 adds 8. The scale is divided by this factor of 8.
            nibbles = torch.cat([self.values << 4, self.values & 0xF0], dim=-1)
            return QuantizedTokens(
                nibbles.bitwise_xor_(136).view(torch.int8),
                self.scales.float() / 8,
            )
        return QuantizedTokens(self.values, self.scales)

    def floats(self) -> Tensor:
        """Return the vectors in fp32, ``[T, D]``."""
        decoded = self.decoded()
        return decoded.dequantize() if isinstance(decoded, QuantizedTokens) else decoded.float()

    def map(self, function: Callable[[Tensor], Tensor]) -> StoredTokens:
        """Apply a function to the values, and to the scales unless they are None."""
        scales = None if self.scales is None else function(self.scales)
        return StoredTokens(function(self.values), scales)

    def tokens(self, low: int, high: int) -> StoredTokens:
        """Return a view of the tokens from `low` to `high`."""
        return self.map(lambda tensor: tensor[low:high])


class Chunk(NamedTuple):
    """Documents that are written into an index together.

    Attributes:
        ids: of the N documents.
        lengths: tokens of each document, ``[N]``.
        vectors: of all tokens, packed.
    """

    ids: list[str]
    lengths: Rows
    vectors: StoredTokens


def to_storage(vectors: Tensor | QuantizedTokens, storage: str) -> StoredTokens:
    """Convert token vectors to the storage of an index.

    An entry in int8 is an integer times an fp32 scale of its token.

    An entry in int4 is one of the 16 odd integers from -15 to 15, times a bfloat16 scale of its
    token, which is a 15th of the token's largest entry. The error is at most the scale. A token of
    128 entries takes 66 bytes.

    Args:
        vectors: ``[T, D]``, floats or int8 with scales.
        storage: ``"int8"``, ``"fp16"`` or ``"int4"``.

    Raises:
        DataError: for an entry that fp16 cannot represent.
    """
    if storage == "int8" and isinstance(vectors, QuantizedTokens):
        return StoredTokens(vectors.values, vectors.scales)
    rows = vectors.dequantize() if isinstance(vectors, QuantizedTokens) else vectors.float()
    if storage == "fp16":
        halves = rows.half()
        if not bool(halves.isfinite().all()):
            largest = float(rows.abs().max())
            raise ArgumentDataError(
                "tokens",
                f"expected entries within 65504 for fp16, got {largest:.3g}. "
                "Take storage='int8', or normalize the vectors.",
            )
        return StoredTokens(halves)
    if storage == "int8":
        quantized = quantize_tokens(rows, "int8")
        return StoredTokens(quantized.values, quantized.scales)
    # int4: an entry divided by its scale is in [-15, 15], about. The nibble n stands for 2 n - 15.
    scales = (rows.abs().amax(dim=1) / 15).bfloat16()
    divisors = scales.float().clamp_min(torch.finfo(torch.float32).tiny)  # not 0 for zero vectors
    steps = rows / divisors[:, None]
    nibbles = ((steps + 15) / 2).round_().clamp_(0, 15).to(torch.uint8)
    # Entry i is in the low half of a byte, and entry D / 2 + i in its high half.
    half = rows.size(1) // 2
    return StoredTokens(nibbles[:, :half] | (nibbles[:, half:] << 4), scales)


class TokenFiles:
    """Memory-mapped token vectors of the N documents of an index.

    Each document has a checksum, which is compared when the document is first read.

    Attributes:
        folder: of the index.
        dimension: D, the length of a vector.
        storage: ``"int8"``, ``"fp16"`` or ``"int4"``.
        offsets: int64 ``[N + 1]``, where the tokens of each document begin.
        lengths: tokens of each document, ``[N]``.
        n_tokens: tokens of all documents.
        values: as in :class:`StoredTokens`.
        scales: as in :class:`StoredTokens`; uint16 in the place of bfloat16.

    Raises:
        DataError: for files of another size than the documents need.
    """

    def __init__(self, folder: Path, n_documents: int, dimension: int, storage: str) -> None:
        """Map the files of an index into memory, and check their sizes.

        Args:
            folder: folder of the index.
            n_documents: number of documents of the index, N.
            dimension: length of a token vector, D.
            storage: ``"int8"``, ``"fp16"`` or ``"int4"``.

        Raises:
            DataError: for files of another size than the documents need.
        """
        self.folder = folder
        self.dimension = dimension
        self.storage = storage
        self.offsets = read_offsets(folder / OFFSETS, n_documents)
        self._checksums = read_array(folder / CHECKSUMS, np.uint32, n_documents)
        self.lengths = np.diff(self.offsets)
        self.n_tokens = int(self.offsets[-1])
        value_dtype, scale_dtype = _FILE_DTYPES[storage]
        width = dimension // 2 if storage == "int4" else dimension
        self.values = self._mapped(VALUES, value_dtype, (self.n_tokens, width))
        self.scales: npt.NDArray[Any] | None = None
        if scale_dtype is not None:
            self.scales = self._mapped(SCALES, scale_dtype, (self.n_tokens,))
        self._is_verified = np.zeros(n_documents, bool)
        # Whether the mapped memory is locked; None before the first attempt.
        self._is_locked: bool | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def _mapped(self, name: str, dtype: type, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Map a file as an array, or raise ``DataError`` for a file of another size."""
        path = self.folder / name
        expected_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        n_bytes = path.stat().st_size
        if n_bytes != expected_bytes:
            raise DataError(f"{path}: expected {expected_bytes} bytes, got {n_bytes}. {REMEDY}")
        if not expected_bytes:
            return np.empty(shape, dtype)  # an empty file cannot be mapped
        return np.asarray(np.memmap(path, dtype, mode="c", shape=shape))

    def check(self, documents: Rows) -> None:
        """Compare documents with their checksums, unless that was done before.

        Args:
            documents: rows of the documents.

        Raises:
            DataError: if the vectors of a document are not those that were saved.
        """
        unverified = documents[~self._is_verified[documents]]
        parts = [
            unverified[low : low + _CHECK_DOCUMENTS]
            for low in range(0, len(unverified), _CHECK_DOCUMENTS)
        ]
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:
            for damaged in pool.map(self._damaged, parts):
                if damaged.size:
                    raise DataError(
                        f"{self.folder / VALUES}: damaged; the token vectors of document "
                        f"{damaged[0]} are not those that were saved. {REMEDY}",
                    )
        self._is_verified[unverified] = True

    def _damaged(self, documents: Rows) -> Rows:
        """Return the rows of the documents that differ from their checksums."""
        computed = checksums(
            self._arrays(),
            self.offsets[documents],
            self.offsets[documents + 1],
        )
        damaged: Rows = documents[computed != self._checksums[documents]]
        return damaged

    def lock(self) -> None:
        """Lock the mapped files in memory (pinned memory), from where GPUs copy faster.

        The pages become private to this process. They take the size of the files once more, for as
        long as this object lives. Only the first call tries this. If it fails, a ``UserWarning``
        says why, and copies are slower.
        """
        if self._is_locked is not None:
            return
        with contextlib.ExitStack() as stack:
            # Windows has no fcntl, and some network file systems have no locks.
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                file = stack.enter_context((self.folder / VALUES).open("rb"))
                # Processes that open the index at the same time measure the free memory in turn.
                fcntl.flock(file, fcntl.LOCK_EX)
            refusal = self._lock_pages()
        self._is_locked = refusal is None
        if refusal is not None:
            warnings.warn(
                f"{self.folder} is not locked in memory ({refusal}): its vectors are copied to the "
                "GPU more slowly.",
                UserWarning,
                stacklevel=2,
            )

    def _lock_pages(self) -> str | None:
        """Lock all arrays in memory, or none of them.

        Arrays are unlocked when this object is destroyed, but not at the end of the process, where
        CUDA may be gone already.

        Returns:
            The reason why nothing was locked, or None after success.
        """
        free_bytes = memory_left()
        needed_bytes = int(_LOCK_MARGIN * self.nbytes)
        if free_bytes is None or free_bytes < needed_bytes:
            free = "an unknown number of" if free_bytes is None else free_bytes
            return f"{free} bytes are left, {needed_bytes} are wanted"
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        unlocks: list[Any] = []
        for array in self._arrays():
            address = array.ctypes.data
            error = int(
                runtime.cudaHostRegister(address, array.nbytes, _CUDA_HOST_REGISTER_PORTABLE),
            )
            if error:
                for unlock in unlocks:
                    unlock()
                # CUDA reports the error once more at the next launch. This launch takes it, so that
                # no launch of the caller fails.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device="cuda").add_(1)
                return f"cudaHostRegister gave error {error}"
            unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)
            unlock.atexit = False
            unlocks.append(unlock)
        return None

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the lock, which a copy in another process does not have."""
        return vars(self) | {"_is_locked": None}

    def take(self, documents: Rows) -> tuple[StoredTokens, Tensor]:
        """Copy the vectors of some documents into one packed array.

        Args:
            documents: rows of the documents, in any order, ``[M]``.

        Returns:
            The packed vectors, and their int32 offsets ``[M + 1]``.
        """
        self.check(documents)
        begins = self.offsets[documents].tolist()
        ends = self.offsets[documents + 1].tolist()
        arrays = []
        for array in self._arrays():
            # The empty part first, because there may be no documents to concatenate.
            parts = [array[:0]]
            parts += [array[begin:end] for begin, end in zip(begins, ends, strict=True)]
            arrays.append(np.concatenate(parts))
        offsets = offsets_of(self.lengths[documents]).astype(np.int32)
        return self._tensors(arrays), torch.from_numpy(offsets)

    def document_range(self, low: int, high: int) -> StoredTokens:
        """Return the vectors of documents `low` to `high`, which are views of the files."""
        self.check(np.arange(low, high))
        begin = int(self.offsets[low])
        end = int(self.offsets[high])
        return self._tensors([array[begin:end] for array in self._arrays()])

    def _arrays(self) -> list[npt.NDArray[Any]]:
        """Return the values, and the scales if there are some."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    def _tensors(self, arrays: Sequence[npt.NDArray[Any]]) -> StoredTokens:
        """Wrap arrays in the order of :meth:`_arrays` as tensors, without a copy."""
        values = torch.from_numpy(arrays[0])
        if self.scales is None:
            return StoredTokens(values)
        scales = torch.from_numpy(arrays[1])
        if self.storage == "int4":
            scales = scales.view(torch.bfloat16)
        return StoredTokens(values, scales)

    def blocks(self, n_tokens: int) -> Iterator[tuple[Rows, Tensor]]:
        """Iterate over all documents.

        Args:
            n_tokens: most tokens of a block; a longer document is a block by itself.

        Yields:
            Lengths of some documents, and the vectors of all their tokens in fp32.
        """
        for low, high in row_ranges(self.offsets, n_tokens):
            yield self.lengths[low:high], self.document_range(low, high).floats()


def file_arrays(vectors: StoredTokens) -> list[npt.NDArray[Any]]:
    """Return the values, and the scales if there are some, as they are written into files."""
    arrays = [np.ascontiguousarray(vectors.values.numpy())]
    scales = vectors.scales
    if scales is not None:
        if scales.dtype == torch.bfloat16:
            scales = scales.view(torch.int16)  # numpy has no bfloat16
        arrays.append(np.ascontiguousarray(scales.numpy()))
    return arrays


def checksums(
    arrays: Sequence[npt.NDArray[Any]],
    starts: Rows,
    ends: Rows,
) -> npt.NDArray[np.uint32]:
    """Compute the CRC-32 of documents, over their values and then their scales.

    Args:
        arrays: values ``[T, ...]`` and, unless there are none, scales ``[T]``, as
            :func:`file_arrays` returns them.
        starts: first token of each document, ``[N]``.
        ends: token after the last one of each document, ``[N]``.

    Returns:
        uint32 ``[N]``.
    """
    results = np.zeros(len(starts), np.uint32)
    # For each array, a view of all its bytes and the number of bytes per token.
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
        low: first document.
        high: document after the last one.
        vectors: packed or padded, on the device.
        offsets: int32 ``[high - low + 1]`` of packed documents; None for padded ones.
    """

    low: int
    high: int
    vectors: StoredTokens
    offsets: Tensor | None


class DeviceDocuments:
    """Consecutive documents of an index that one device searches.

    A GPU keeps them in its memory if they fit. Otherwise it computes with one block while the next
    ones are copied, each by a CUDA stream of its own. From the second search on, the files are
    locked in memory (:meth:`TokenFiles.lock`), and are then copied at the rate of the bus. A CPU
    reads the mapped files.

    Args:
        files: of the index.
        device: that searches.
        low: first document.
        high: document after the last one.
        fits: whether the device keeps the documents in its memory.
    """

    def __init__(
        self,
        files: TokenFiles,
        device: torch.device,
        low: int,
        high: int,
        fits: bool,
    ) -> None:
        """Copy the vectors of the documents to the device if they fit.

        Args:
            files: token vectors of all documents of the index.
            device: device that searches.
            low: first document.
            high: document after the last one.
            fits: whether the device keeps the vectors in its memory. Otherwise each search reads
                them from the files.
        """
        self.files = files
        self.device = device
        self.low = low
        self.high = high
        self.offsets = torch.from_numpy(files.offsets[low : high + 1].copy()).to(device)
        lengths = files.lengths[low:high]
        # Mask of the documents without tokens; None if all have tokens.
        self.without_tokens: Tensor | None = None
        if not lengths.all():
            self.without_tokens = torch.from_numpy(lengths == 0).to(device)
        # Vectors in the memory of the device; None if they are read from the files.
        self.resident: StoredTokens | None = None
        if fits:
            vectors = files.document_range(low, high)
            self.resident = vectors.map(lambda tensor: tensor.to(device))
        # Number of tokens of every document, if all have the same number and a GPU searches. Such
        # documents count as padded ones, whose kernels are faster. 0 otherwise.
        self._common_length = 0
        if device.type != "cpu" and (lengths == lengths[0]).all():
            self._common_length = int(lengths[0])
        self._was_streamed = False

    def blocks(self, n_tokens: int = STREAMED_TOKENS) -> Iterator[Block]:
        """Iterate over the documents in blocks, in order.

        Args:
            n_tokens: the most tokens of a block, unless the device has all documents in its memory.
                Then blocks are as large as the computation allows.
        """
        if self.resident is not None:
            yield from self._resident_blocks(self.resident)
            return
        ranges = list(row_ranges(self.files.offsets, n_tokens, self.low, self.high))
        vectors_of_ranges: Iterator[StoredTokens]
        if self.device.type == "cpu":
            vectors_of_ranges = (self.files.document_range(low, high) for low, high in ranges)
        else:
            vectors_of_ranges = self._streamed(ranges)
        for (low, high), vectors in zip(ranges, vectors_of_ranges, strict=True):
            yield self._block(low, high, vectors)

    def _resident_blocks(self, resident: StoredTokens) -> Iterator[Block]:
        """Iterate over documents in the memory of the device."""
        n_tokens = _DECODED_TOKENS if self.files.storage == "int4" else _RESIDENT_TOKENS
        first_token = int(self.files.offsets[self.low])
        for low, high in row_ranges(self.files.offsets, n_tokens, self.low, self.high):
            begin = int(self.files.offsets[low]) - first_token
            end = int(self.files.offsets[high]) - first_token
            yield self._block(low, high, resident.tokens(begin, end))

    def _block(self, low: int, high: int, vectors: StoredTokens) -> Block:
        """Wrap packed vectors of documents `low` to `high`, padded if they are of one length."""
        length = self._common_length
        if length:
            # The kernels of padded documents are faster.
            padded = vectors.map(lambda tensor: tensor.view(-1, length, *tensor.shape[1:]))
            return Block(low, high, padded, None)
        offsets = self.offsets[low - self.low : high - self.low + 1]
        return Block(low, high, vectors, (offsets - offsets[0]).int())

    def _streamed(self, ranges: Sequence[tuple[int, int]]) -> Iterator[StoredTokens]:
        """Copy ranges of documents to the GPU, ahead of the computation.

        Each slot is a buffer on the GPU with a CUDA stream that copies into it. A yielded block is
        overwritten after the next one has been asked for.

        Args:
            ranges: first document and end of each range.

        Yields:
            The packed vectors of each range.
        """
        # The first search may be the only one, for which locking would not pay.
        if self._was_streamed:
            with torch.cuda.device(self.device):
                self.files.lock()
        self._was_streamed = True
        compute_stream = torch.cuda.current_stream(self.device)
        file_offsets = self.files.offsets
        most_tokens = max(int(file_offsets[high] - file_offsets[low]) for low, high in ranges)
        n_slots = min(_STREAM_SLOTS, len(ranges))
        copy_streams = [
            torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for _ in range(n_slots)
        ]
        no_documents = self.files.document_range(0, 0)
        buffers = [
            no_documents.map(
                lambda tensor: tensor.new_empty(most_tokens, *tensor.shape[1:], device=self.device),
            )
            for _ in range(n_slots)
        ]

        def start_copy(number: int) -> StoredTokens:
            """Start to copy the range with a number into its slot.

            Returns:
                The part of the slot's buffer that the range fills, before the copy is complete.
            """
            slot = number % n_slots
            vectors = self.files.document_range(*ranges[number])
            target = buffers[slot].tokens(0, len(vectors.values))
            # The copy waits for the computation that was launched so far, because that may read
            # the earlier block in the slot.
            copy_streams[slot].wait_stream(compute_stream)
            with torch.cuda.stream(copy_streams[slot]):
                target.values.copy_(vectors.values, non_blocking=True)
                if target.scales is not None and vectors.scales is not None:
                    target.scales.copy_(vectors.scales, non_blocking=True)
            return target

        pending: deque[StoredTokens] = deque()
        try:
            for number in range(n_slots):
                pending.append(start_copy(number))
            for number in range(len(ranges)):
                compute_stream.wait_stream(copy_streams[number % n_slots])
                yield pending.popleft()
                if number + n_slots < len(ranges):
                    pending.append(start_copy(number + n_slots))
        finally:
            # A search that ended early must not leave copies that write to freed memory, or read
            # memory that is no longer locked.
            for stream in copy_streams:
                compute_stream.wait_stream(stream)
                if pending:
                    stream.synchronize()


class QueryBatch(NamedTuple):
    """Queries that are scored together, padded.

    Attributes:
        vectors: ``[Nq, L, D]`` fp32.
        mask: bool ``[Nq, L]``, False for padding. None if all queries have L tokens.
    """

    vectors: Tensor
    mask: Tensor | None

    @classmethod
    def pad(cls, queries: Sequence[Tensor], device: torch.device) -> QueryBatch:
        """Pad the token vectors of queries with zeros, and copy them to a device.

        Args:
            queries: token vectors ``[n_i, D]`` of each query.
            device: device of the result.
        """
        lengths = np.array([len(rows) for rows in queries])
        dimension = queries[0].size(1)
        # numpy pads, because torch would wake all its threads.
        padded = np.zeros((len(queries), lengths.max(), dimension), np.float32)
        for padded_rows, rows in zip(padded, queries, strict=True):
            padded_rows[: len(rows)] = rows.detach().cpu().numpy()
        mask = np.arange(padded.shape[1]) < lengths[:, None]
        return cls(
            torch.from_numpy(padded).to(device),
            None if mask.all() else torch.from_numpy(mask).to(device),
        )


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
        offsets: int32 ``[Nd + 1]`` of packed documents; None for padded ones.
        reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.

    Returns:
        fp32 ``[Nq, Nd]``.
    """
    decoded = documents.decoded()
    query_vectors = queries.vectors
    if not isinstance(decoded, QuantizedTokens):
        query_vectors = query_vectors.to(decoded.dtype)
    with torch.no_grad(), torch.autocast(query_vectors.device.type, enabled=False):
        return maxsim(
            query_vectors,
            decoded,
            query_mask=queries.mask,
            cu_seqlens_d=offsets,
            reduction=reduction,
        )


# How the vectors of a document are pooled; stored with the index, because vectors that were pooled
# in another way do not belong into it.
POOLING: Json = {"clusters": "ward", "protected_tokens": 1, "normalized": True}


def pool_documents(documents: list[Tensor], pool_factor: int) -> list[Tensor]:
    """Replace clusters of a document's token vectors by their means.

    Clusters are found by Ward's method. The first token of a document is in no cluster.

    Args:
        documents: token vectors ``[n_i, D]`` fp32 of each document.
        pool_factor: number of token vectors per cluster, on average.

    Returns:
        The pooled vectors of each document, of length 1.

    Raises:
        ImportError: sentence-transformers is not installed, or older than 6.2.
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
    """Pool the vectors of shards and convert them to a storage.

    Args:
        shards: token vectors of documents.
        storage: of the index.
        pool_factor: see :func:`pool_documents`; 1 does not pool.

    Yields:
        The documents of each shard.
    """
    for shard in shards:
        vectors = shard.packed()
        lengths = shard.offsets.diff().numpy()
        if pool_factor > 1:
            pooled = pool_documents([shard.rows(row) for row in range(len(shard))], pool_factor)
            lengths = np.array([len(rows) for rows in pooled], np.int64)
            vectors = torch.cat(pooled) if pooled else torch.zeros(0, shard.dimension)
        yield Chunk(shard.ids, lengths, to_storage(vectors, storage))
