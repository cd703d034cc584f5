"""Packed token vectors in files, one document after the other: storage, checks, and blocks of them on a device."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tilefold.ops import QuantizedTokens, maxsim, quantize_tokens
from tilefold.pipeline.ragged import offsets_of, spans
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import REMEDY, read_array, read_offsets
from tilefold.retrieval.tokens import TokenVectors

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

Places = npt.NDArray[np.int64]


class Packed(NamedTuple):
    """Token vectors as they are stored."""

    values: Tensor  # [T, D] int8 or fp16, or [T, D / 2] uint8
    scales: Tensor | None = None  # [T] fp32, or bfloat16 of int4

    def decoded(self) -> Tensor | QuantizedTokens:
        """The document argument of :func:`tilefold.ops.maxsim`."""
        if self.scales is None:
            return self.values
        if self.values.dtype == torch.uint8:
            pair = torch.cat([self.values << 4, self.values & 240], dim=1)  # 16 n; two bits turned: 8 (2 n - 15)
            return QuantizedTokens(pair.bitwise_xor_(136).view(torch.int8), self.scales.float() / 8)
        return QuantizedTokens(self.values, self.scales)

    def floats(self) -> Tensor:
        """The vectors ``[T, D]`` in fp32."""
        found = self.decoded()
        return found.dequantize() if isinstance(found, QuantizedTokens) else found.float()

    def to(self, device: torch.device) -> Packed:
        return Packed(self.values.to(device), None if self.scales is None else self.scales.to(device))

    def part(self, low: int, high: int) -> Packed:
        return Packed(self.values[low:high], None if self.scales is None else self.scales[low:high])


Chunk = tuple[list[str], Places, Packed]  # ids, tokens of each, and these


def packed(vectors: Tensor | QuantizedTokens, storage: str) -> Packed:
    """Token vectors in a storage.

    In 4 bits, an entry is one of the 16 odd integers from -15 to 15, times 1/15 of the largest entry of its token in
    bfloat16: off by at most that 15th, 66 bytes for 128 entries.
    """
    if storage == "int8" and isinstance(vectors, QuantizedTokens):
        return Packed(vectors.values, vectors.scales)
    rows = vectors.dequantize() if isinstance(vectors, QuantizedTokens) else vectors.float()
    if storage == "fp16":
        return Packed(rows.half(), None)
    if storage == "int8":
        made = quantize_tokens(rows, "int8")
        return Packed(made.values, made.scales)
    scales = (rows.abs().amax(dim=1) / 15).bfloat16()
    steps = rows / scales.float().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    numbers = ((steps + 15) / 2).round_().clamp_(0, 15).to(torch.uint8)
    half = rows.size(1) // 2
    return Packed(numbers[:, :half] | (numbers[:, half:] << 4), scales)


class TokenFiles:
    """Token vectors of N documents, memory-mapped, in the files of an index; ``DataError`` for what does not fit.

    Each document has a checksum, which is compared when it is first read.
    """

    def __init__(self, folder: Path, count: int, dimension: int, storage: str) -> None:
        self.folder, self.dimension, self.storage = folder, dimension, storage
        self.offsets, self._sums = read_offsets(folder / OFFSETS, count), read_array(folder / SUMS, np.uint32, count)
        self.lengths, self.n_tokens = np.diff(self.offsets), int(self.offsets[-1])  # of each document, and of all
        kind, factors = _DTYPES[storage]
        self.values = self._mapped(VALUES, kind, (self.n_tokens, dimension // 2 if storage == "int4" else dimension))
        self.scales = None if factors is None else self._mapped(SCALES, factors, (self.n_tokens,))
        self._trusted = np.zeros(count, bool)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def _mapped(self, name: str, dtype: type, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        path, wanted = self.folder / name, int(np.prod(shape)) * np.dtype(dtype).itemsize
        if (got := path.stat().st_size) != wanted:
            raise DataError(f"{path}: expected {wanted} bytes, got {got}. {REMEDY}")
        return np.memmap(path, dtype, mode="c", shape=shape) if wanted else np.empty(shape, dtype)

    def check(self, documents: Places) -> None:
        """Raise ``DataError`` for documents whose vectors are not those that were saved."""
        for at in documents[~self._trusted[documents]].tolist():
            span = slice(self.offsets[at], self.offsets[at + 1])
            if checksum(self.values[span], None if self.scales is None else self.scales[span]) != self._sums[at]:
                said = f"damaged; the token vectors of document {at} are not those that were saved"
                raise DataError(f"{self.folder / VALUES}: {said}. {REMEDY}")
            self._trusted[at] = True

    def take(self, documents: Places) -> tuple[Packed, Tensor]:
        """Vectors of some documents, copied, and their offsets in int32."""
        self.check(documents)
        found = [slice(*span) for span in zip(self.offsets[documents], self.offsets[documents + 1], strict=True)]
        parts = [array if not found else np.concatenate([array[span] for span in found]) for array in self._arrays()]
        offsets = offsets_of(self.lengths[documents]).astype(np.int32)
        return self._tensors(parts), torch.from_numpy(offsets)

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
        for low, high in spans(self.offsets, tokens):
            yield self.lengths[low:high], self.between(low, high).floats()


def arrays(found: Packed) -> list[npt.NDArray[Any]]:
    """Values, and scales if there are some, as they are written."""
    parts = [
        found.values,
        *(part.view(torch.int16) if part.dtype == torch.bfloat16 else part for part in found[1:] if part is not None),
    ]
    return [np.ascontiguousarray(part.numpy()) for part in parts]


def checksum(values: npt.NDArray[Any], scales: npt.NDArray[Any] | None = None) -> int:
    """CRC-32 of the vectors of a document."""
    found = zlib.crc32(np.ascontiguousarray(values).data) if values.size else 0
    return found if scales is None or not scales.size else zlib.crc32(np.ascontiguousarray(scales).data, found)


class Share:
    """Documents `low` to `high` of a collection on one device: all in its memory if they fit, else block by block.

    A GPU computes with one block while the next is copied: from the files to one of two pinned buffers, and from there
    by a stream of its own.
    """

    def __init__(self, files: TokenFiles, device: torch.device, low: int, high: int, fits: bool) -> None:
        self.files, self.device, self.low, self.high = files, device, low, high
        self.offsets = torch.from_numpy(files.offsets[low : high + 1].copy()).to(device)
        self.held = files.between(low, high).to(device) if fits and device.type != "cpu" else None

    def blocks(self, tokens: int = STREAMED) -> Iterator[tuple[int, int, Packed, Tensor]]:
        """First and last document (excluded), their vectors on the device, and int32 offsets there."""
        first = int(self.files.offsets[self.low])
        if self.held is not None:
            size = _DECODED if self.files.storage == "int4" else 1 << 30
            for low, high in spans(self.files.offsets, size, self.low, self.high):
                span = (int(self.files.offsets[at]) - first for at in (low, high))
                yield low, high, self.held.part(*span), self._offsets(low, high)
            return
        ranges = spans(self.files.offsets, tokens, self.low, self.high)
        yield from self._streamed(ranges) if self.device.type == "cuda" else map(self._mapped, ranges)

    def _mapped(self, span: tuple[int, int]) -> tuple[int, int, Packed, Tensor]:
        return *span, self.files.between(*span).to(self.device), self._offsets(*span)

    def _offsets(self, low: int, high: int) -> Tensor:
        found = self.offsets[low - self.low : high - self.low + 1]
        return (found - found[0]).int()

    def _streamed(self, ranges: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int, Packed, Tensor]]:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        main = torch.cuda.current_stream(self.device)
        buffers: list[list[Tensor]] = [[], []]
        sent: list[Any] = [None, None]
        ahead: tuple[int, int, Packed, Tensor, Any] | None = None
        for number, (low, high) in enumerate(ranges):
            slot = number % 2
            if sent[slot] is not None:
                sent[slot].synchronize()
            parts = [part for part in self.files.between(low, high) if part is not None]
            for place, part in enumerate(parts):
                if len(buffers[slot]) <= place or len(buffers[slot][place]) < len(part):
                    buffers[slot][place:] = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True)]
                buffers[slot][place][: len(part)].copy_(part)
            with torch.cuda.stream(stream):
                copied = [
                    buffers[slot][at][: len(part)].to(self.device, non_blocking=True) for at, part in enumerate(parts)
                ]
                sent[slot] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                sent[slot].record(stream)
            for part in copied:
                part.record_stream(main)
            following = low, high, Packed(*copied), self._offsets(low, high), sent[slot]
            if ahead is not None:
                yield self._awaited(ahead, main)
            ahead = following
        if ahead is not None:
            yield self._awaited(ahead, main)

    def _awaited(self, block: tuple[int, int, Packed, Tensor, Any], main: Any) -> tuple[int, int, Packed, Tensor]:
        main.wait_event(block[4])
        return block[:4]


class Asked(NamedTuple):
    """Queries of one pass: padded, ``[Nq, L, D]`` with a mask where they differ in length."""

    vectors: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, queries: Sequence[Tensor], device: torch.device) -> Asked:
        lengths = torch.tensor([len(rows) for rows in queries])
        vectors = pad_sequence([rows.float() for rows in queries], batch_first=True).to(device)
        ragged = int(lengths.min()) < int(lengths.max())
        mask = torch.arange(vectors.size(1)) < lengths[:, None] if ragged else None
        return cls(vectors, None if mask is None else mask.to(device))


def scores_of(asked: Asked, vectors: Packed, offsets: Tensor, reduction: str) -> Tensor:
    """Scores ``[Nq, Nd]`` of packed documents."""
    documents = vectors.decoded()
    queries = asked.vectors if isinstance(documents, QuantizedTokens) else asked.vectors.to(documents.dtype)
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        return maxsim(queries, documents, query_mask=asked.mask, cu_seqlens_d=offsets, reduction=reduction)


def chunks_of(shards: Iterable[TokenVectors], storage: str, pool_factor: int) -> Iterator[Chunk]:
    """The vectors of all shards, pooled and as they are stored."""
    for shard in shards:
        vectors = shard.packed()
        lengths = shard.offsets.diff().numpy()
        if pool_factor > 1:
            from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

            pooled = HierarchicalTokenPooling(pool_factor).pool([shard.rows(row) for row in range(len(shard))])
            lengths = np.array([len(rows) for rows in pooled], np.int64)
            vectors = torch.cat(pooled) if pooled else torch.zeros(0, shard.dimension)
        yield shard.ids, lengths, packed(vectors, storage)
