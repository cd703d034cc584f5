"""Packed token vectors in files, one document after the other: storage, checks, and blocks of them
on a device.
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
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import REMEDY, read_array, read_offsets
from tilefold.retrieval.vectors.tokens import TokenVectors

STORAGES = ("int8", "fp16", "int4")
VALUES, SCALES, OFFSETS, SUMS = "values.bin", "scales.bin", "offsets.npy", "checksums.npy"
FILES = (VALUES, SCALES, OFFSETS, SUMS)
_DTYPES: dict[str, tuple[type, type | None]] = {  # of values, and of scales: int4 has bfloat16
    "int8": (np.int8, np.float32),
    "fp16": (np.float16, None),
    "int4": (np.uint8, np.uint16),
}
STREAMED = 1 << 21  # tokens of a block that is copied to a GPU
_DECODED = 1 << 24  # and of one that is unpacked there
_SLOTS = 3  # blocks on a GPU at a time
_LEFT = 1.5  # times the bytes of the files that must be left to lock them
_ANY_GPU = 1  # cudaHostRegisterPortable
_THREADS = min(12, os.cpu_count() or 1)  # that check
_MANY = 512  # documents that a thread checks

Places = npt.NDArray[np.int64]


class Packed(NamedTuple):
    """Token vectors as they are stored; also padded, ``[N, L, D]``, of documents of equally many."""

    values: Tensor  # [T, D] int8 or fp16, or [T, D / 2] uint8
    scales: Tensor | None = None  # [T] fp32, or bfloat16 of int4

    def decoded(self) -> Tensor | QuantizedTokens:
        """The document argument of :func:`tilefold.ops.maxsim`."""
        if self.scales is None:
            return self.values
        if self.values.dtype == torch.uint8:
            pair = torch.cat(
                [self.values << 4, self.values & 240],
                dim=-1,
            )  # 16 n; two bits turned: 8 (2 n - 15)
            return QuantizedTokens(pair.bitwise_xor_(136).view(torch.int8), self.scales.float() / 8)
        return QuantizedTokens(self.values, self.scales)

    def floats(self) -> Tensor:
        """The vectors ``[T, D]`` in fp32."""
        found = self.decoded()
        return found.dequantize() if isinstance(found, QuantizedTokens) else found.float()

    def each(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """Change the values, and the scales if there are some."""
        return Packed(change(self.values), None if self.scales is None else change(self.scales))

    def part(self, low: int, high: int) -> Packed:
        return self.each(lambda part: part[low:high])


Chunk = tuple[list[str], Places, Packed]  # ids, tokens of each, and these


def packed(vectors: Tensor | QuantizedTokens, storage: str) -> Packed:
    """Token vectors in a storage.

    In 4 bits, an entry is one of the 16 odd integers from -15 to 15, times 1/15 of the largest
    entry of its token in bfloat16: off by at most that 15th, 66 bytes for 128 entries.
    """
    if storage == "int8" and isinstance(vectors, QuantizedTokens):
        return Packed(vectors.values, vectors.scales)
    rows = vectors.dequantize() if isinstance(vectors, QuantizedTokens) else vectors.float()
    if storage == "fp16":
        halves = rows.half()
        if not bool(halves.isfinite().all()):
            largest = float(rows.abs().max())
            raise DataError(
                f"tokens: expected entries within 65504 for fp16, got {largest:.3g}. "
                "Take storage='int8', or normalize the vectors.",
            )
        return Packed(halves, None)
    if storage == "int8":
        made = quantize_tokens(rows, "int8")
        return Packed(made.values, made.scales)
    scales = (rows.abs().amax(dim=1) / 15).bfloat16()
    steps = rows / scales.float().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    numbers = ((steps + 15) / 2).round_().clamp_(0, 15).to(torch.uint8)
    half = rows.size(1) // 2
    return Packed(numbers[:, :half] | (numbers[:, half:] << 4), scales)


class TokenFiles:
    """Token vectors of N documents, memory-mapped, in the files of an index; ``DataError`` for what
    does not fit.

    Each document has a checksum, which is compared when it is first read.
    """

    def __init__(self, folder: Path, count: int, dimension: int, storage: str) -> None:
        self.folder, self.dimension, self.storage = folder, dimension, storage
        self.offsets, self._sums = (
            read_offsets(folder / OFFSETS, count),
            read_array(folder / SUMS, np.uint32, count),
        )
        self.lengths, self.n_tokens = (
            np.diff(self.offsets),
            int(self.offsets[-1]),
        )  # of each document, and of all
        kind, factors = _DTYPES[storage]
        self.values = self._mapped(
            VALUES,
            kind,
            (self.n_tokens, dimension // 2 if storage == "int4" else dimension),
        )
        self.scales = None if factors is None else self._mapped(SCALES, factors, (self.n_tokens,))
        self._trusted = np.zeros(count, bool)
        self._locked: bool | None = None  # not tried yet

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def _mapped(self, name: str, dtype: type, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        path, wanted = self.folder / name, int(np.prod(shape)) * np.dtype(dtype).itemsize
        if (got := path.stat().st_size) != wanted:
            raise DataError(f"{path}: expected {wanted} bytes, got {got}. {REMEDY}")
        return (
            np.asarray(np.memmap(path, dtype, mode="c", shape=shape))
            if wanted
            else np.empty(shape, dtype)
        )

    def check(self, documents: Places) -> None:
        """Raise ``DataError`` for documents whose vectors are not those that were saved."""
        new = documents[~self._trusted[documents]]
        parts = [new[low : low + _MANY] for low in range(0, len(new), _MANY)]

        def damaged(some: Places) -> list[int]:
            sums = checksums(self._arrays(), self.offsets[some], self.offsets[some + 1])
            return list(some[sums != self._sums[some]].tolist())

        with ThreadPoolExecutor(_THREADS) as pool:
            for wrong in pool.map(damaged, parts):
                if wrong:
                    said = f"damaged; the token vectors of document {wrong[0]} are not those that were saved"
                    raise DataError(f"{self.folder / VALUES}: {said}. {REMEDY}")
        self._trusted[new] = True

    def lock(self) -> None:
        """Lock what the files are mapped to in memory, whence GPUs copy at the rate of the bus, if
        there is room.

        Pages become this process's own: the size of the files once more, for as long as this object
        lives. It is tried once; a ``UserWarning`` says why it was not done.
        """
        if self._locked is not None:
            return
        with contextlib.ExitStack() as alone:
            with contextlib.suppress(
                ImportError,
                OSError,
            ):  # Windows, and some network file systems
                import fcntl

                file = alone.enter_context((self.folder / VALUES).open("rb"))
                fcntl.flock(
                    file,
                    fcntl.LOCK_EX,
                )  # processes that open an index together look one after the other
            refused = self._refused()
        self._locked = not refused
        if refused:
            said = f"{self.folder} is not locked in memory ({refused}): its vectors are copied to the GPU more slowly."
            warnings.warn(said, UserWarning, stacklevel=2)

    def _refused(self) -> str:
        """Why nothing was locked, empty where all was."""
        left, wanted = memory_left(), int(_LEFT * self.nbytes)
        if left is None or left < wanted:
            return f"{'an unknown number of' if left is None else left} bytes are left, {wanted} are wanted"
        runtime, held = torch.cuda.cudart(), list[Any]()  # type: ignore[no-untyped-call]
        for array in self._arrays():
            if error := int(runtime.cudaHostRegister(array.ctypes.data, array.nbytes, _ANY_GPU)):
                for each in held:
                    each()
                with contextlib.suppress(
                    RuntimeError,
                ):  # the error stays until something is launched
                    torch.ones(1, device="cuda").add_(1)
                return f"cudaHostRegister gave error {error}"
            held.append(weakref.finalize(self, runtime.cudaHostUnregister, array.ctypes.data))
            held[-1].atexit = False
        return ""

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_locked": None}

    def take(self, documents: Places) -> tuple[Packed, Tensor]:
        """Vectors of some documents, copied, and their offsets in int32."""
        self.check(documents)
        found = [
            slice(*span)
            for span in zip(self.offsets[documents], self.offsets[documents + 1], strict=True)
        ]
        parts = [
            np.concatenate([array[:0], *(array[span] for span in found)])
            for array in self._arrays()
        ]
        return self._tensors(parts), torch.from_numpy(
            offsets_of(self.lengths[documents]).astype(np.int32),
        )

    def between(self, low: int, high: int) -> Packed:
        """Vectors of documents number `low` to `high`, as they lie in the files."""
        self.check(np.arange(low, high))
        span = slice(int(self.offsets[low]), int(self.offsets[high]))
        return self._tensors([array[span] for array in self._arrays()])

    def _arrays(self) -> list[npt.NDArray[Any]]:
        return [self.values] if self.scales is None else [self.values, self.scales]

    def _tensors(self, parts: Sequence[npt.NDArray[Any]]) -> Packed:
        values, *scales = map(torch.from_numpy, parts)
        if self.storage == "int4":
            scales = [scales[0].view(torch.bfloat16)]
        return Packed(values, *scales)

    def blocks(self, tokens: int) -> Iterator[tuple[Places, Tensor]]:
        """Lengths of documents, and the vectors of all their tokens in fp32."""
        for low, high in row_ranges(self.offsets, tokens):
            yield self.lengths[low:high], self.between(low, high).floats()


def arrays(found: Packed) -> list[npt.NDArray[Any]]:
    """Values, and scales if there are some, as they are written."""
    parts = (
        part.view(torch.int16) if part.dtype == torch.bfloat16 else part
        for part in found
        if part is not None
    )
    return [np.ascontiguousarray(part.numpy()) for part in parts]


def checksums(
    arrays: Sequence[npt.NDArray[Any]],
    starts: Places,
    ends: Places,
) -> npt.NDArray[np.uint32]:
    """CRC-32 of the vectors of documents, whose rows are from `starts` to `ends`, and then of their
    scales.
    """
    views = [(each.reshape(-1).view(np.uint8).data, each[:1].nbytes) for each in arrays]
    found = [0] * len(starts)
    for number, (low, high) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        for data, width in views:
            found[number] = zlib.crc32(data[low * width : high * width], found[number])
    return np.array(found, np.uint32)


class Share:
    """Documents `low` to `high` of a collection on one device: all in its memory if they fit, else
    block by block.

    A GPU computes with one block while the next are copied there, by a stream each: slower for the
    first search, then at the rate of the bus from files whose memory is locked
    (:meth:`TokenFiles.lock`).
    """

    def __init__(
        self,
        files: TokenFiles,
        device: torch.device,
        low: int,
        high: int,
        fits: bool,
    ) -> None:
        self.files, self.device, self.low, self.high = files, device, low, high
        lengths = files.lengths[low:high]
        self.offsets = torch.from_numpy(files.offsets[low : high + 1].copy()).to(device)
        self.without = (
            None if lengths.all() else torch.from_numpy(lengths == 0).to(device)
        )  # tokens
        self.held = files.between(low, high).each(lambda part: part.to(device)) if fits else None
        self._streams = False  # for the first time, which may be the only one
        self.length = (
            int(lengths[0]) if device.type != "cpu" and (lengths == lengths[0]).all() else 0
        )  # of all

    def blocks(self, tokens: int = STREAMED) -> Iterator[tuple[int, int, Packed, Tensor | None]]:
        """First and last document (excluded), their vectors on the device, and int32 offsets,
        unless padded.
        """
        first = int(self.files.offsets[self.low])
        if self.held is not None:
            size = _DECODED if self.files.storage == "int4" else 1 << 30
            for low, high in row_ranges(self.files.offsets, size, self.low, self.high):
                span = (int(self.files.offsets[at]) - first for at in (low, high))
                yield self._block(low, high, self.held.part(*span))
            return
        ranges = list(row_ranges(self.files.offsets, tokens, self.low, self.high))
        there = (
            (self.files.between(*each) for each in ranges)
            if self.device.type == "cpu"
            else self._streamed(ranges)
        )
        for each, vectors in zip(ranges, there, strict=True):
            yield self._block(*each, vectors)

    def _block(
        self,
        low: int,
        high: int,
        vectors: Packed,
    ) -> tuple[int, int, Packed, Tensor | None]:
        if self.length:  # kernels of padded documents are faster
            return (
                low,
                high,
                vectors.each(lambda part: part.view(-1, self.length, *part.shape[1:])),
                None,
            )
        found = self.offsets[low - self.low : high - self.low + 1]
        return low, high, vectors, (found - found[0]).int()

    def _streamed(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Packed]:
        if self._streams:
            with torch.cuda.device(self.device):
                self.files.lock()
        self._streams = True
        main, bounds = torch.cuda.current_stream(self.device), self.files.offsets
        most = max(int(bounds[high] - bounds[low]) for low, high in ranges)
        streams = [torch.cuda.Stream(self.device) for _ in ranges[:_SLOTS]]  # type: ignore[no-untyped-call]
        none = self.files.between(0, 0)
        rooms = [
            none.each(lambda part: part.new_empty(most, *part.shape[1:], device=self.device))
            for _ in streams
        ]

        def sent(number: int) -> Packed:
            stream, block = streams[number % _SLOTS], self.files.between(*ranges[number])
            stream.wait_stream(main)  # for what reads the block that was there
            there = rooms[number % _SLOTS].part(0, len(block.values))
            with torch.cuda.stream(stream):
                for part, into in zip(block, there, strict=True):
                    if part is not None and into is not None:
                        into.copy_(part, non_blocking=True)
            return there

        ahead = deque[Packed]()
        try:
            ahead.extend(map(sent, range(len(streams))))
            for number in range(len(ranges)):
                main.wait_stream(streams[number % _SLOTS])
                yield ahead.popleft()
                if number + _SLOTS < len(ranges):
                    ahead.append(sent(number + _SLOTS))
        finally:  # nothing may write to memory that others are given, or read what is locked no more
            for stream in streams:
                main.wait_stream(stream)
                if ahead:
                    stream.synchronize()


class Asked(NamedTuple):
    """Queries of one pass: padded, ``[Nq, L, D]`` with a mask where they differ in length."""

    vectors: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, queries: Sequence[Tensor], device: torch.device) -> Asked:
        lengths = np.array([len(rows) for rows in queries])
        vectors = np.zeros(
            (len(queries), lengths.max(), queries[0].size(1)),
            np.float32,
        )  # torch wakes all threads
        for place, rows in zip(vectors, queries, strict=True):
            place[: len(rows)] = rows.detach().cpu().numpy()
        mask = np.arange(vectors.shape[1]) < lengths[:, None]
        return cls(
            torch.from_numpy(vectors).to(device),
            None if mask.all() else torch.from_numpy(mask).to(device),
        )


def scores_of(asked: Asked, vectors: Packed, offsets: Tensor | None, reduction: str) -> Tensor:
    """Scores ``[Nq, Nd]`` of packed documents, or padded ones without offsets."""
    documents = vectors.decoded()
    queries = (
        asked.vectors
        if isinstance(documents, QuantizedTokens)
        else asked.vectors.to(documents.dtype)
    )
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        return maxsim(
            queries,
            documents,
            query_mask=asked.mask,
            cu_seqlens_d=offsets,
            reduction=reduction,
        )


# How the vectors of a document are pooled; stored with the index, because vectors that were pooled
# in another way do not belong into it.
POOLING: Json = {"clusters": "ward", "protected_tokens": 1, "normalized": True}


def pool_documents(documents: list[Tensor], pool_factor: int) -> list[Tensor]:
    """Replace clusters of a document's token vectors by their means, as :data:`POOLING` says.

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
    """The vectors of all shards, pooled and as they are stored."""
    for shard in shards:
        vectors = shard.packed()
        lengths = shard.offsets.diff().numpy()
        if pool_factor > 1:
            pooled = pool_documents([shard.rows(row) for row in range(len(shard))], pool_factor)
            lengths = np.array([len(rows) for rows in pooled], np.int64)
            vectors = torch.cat(pooled) if pooled else torch.zeros(0, shard.dimension)
        yield shard.ids, lengths, packed(vectors, storage)
