"""Token vectors and dense vectors, in memory and on disk as safetensors shards with a manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType, UnionType
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tilefold._internal.arguments import check_choice, check_instance, list_of, list_of_ids, path_of
from tilefold.ops import QuantizedTokens, quantize_tokens
from tilefold.pipeline.ragged import gather_positions, offsets_of
from tilefold.retrieval.common.array_checks import check_offsets
from tilefold.retrieval.common.files import require
from tilefold.retrieval.data.passages import document_of
from tilefold.retrieval.errors import ArgumentDataError, DataError
from tilefold.retrieval.vectors.shards import (
    REMEDY,
    Manifest,
    ShardWriter,
    check_complete,
    shard_file,
)
from tilefold.retrieval.vectors.sparse import check_ids

__all__ = [
    "DENSE_STORAGES",
    "STORAGES",
    "DenseManifest",
    "TokenManifest",
    "TokenStore",
    "TokenVectorWriter",
    "TokenVectors",
    "open_dense",
    "open_tokens",
]

STORAGES = ("fp16", "int8")
_DTYPES = {"fp16": torch.float16, "int8": torch.int8, "fp32": torch.float32}
DENSE_STORAGES = ("fp32", *STORAGES)


@dataclass
class TokenVectors:
    """The token vectors of N texts in memory, packed.

    Attributes:
        ids: N unique, non-empty strings.
        offsets: int64 ``[N + 1]``; text `i` has rows ``offsets[i]`` to ``offsets[i + 1]``, possibly
            none.
        values: ``[T, D]`` fp16, fp32 or int8.
        scales: ``[T]`` fp32 factors of int8 values, else None.

    Raises:
        DataError: for shapes, dtypes or offsets that do not fit, and an empty or repeated id.
    """

    ids: list[str]
    offsets: Tensor
    values: Tensor
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        """Check ids, offsets and dtypes."""
        self.ids = list_of("ids", self.ids)
        check_ids(self.ids)
        check_values(self.values, self.scales)
        n_texts = len(self.ids)
        if self.offsets.dtype != torch.int64 or tuple(self.offsets.shape) != (n_texts + 1,):
            raise DataError(
                f"offsets: expected {n_texts + 1} int64 offsets for {n_texts} ids, got "
                f"{_described(self.offsets)}.",
            )
        check_offsets(self.offsets.cpu().numpy(), self.values.size(0), "offsets")

    @classmethod
    def pack(
        cls,
        ids: Sequence[str],
        vectors: Sequence[Tensor],
        dimension: int,
        storage: str,
    ) -> TokenVectors:
        """Pack the token vectors of several texts into one tensor on the CPU, in a storage.

        Args:
            ids: N ids.
            vectors: N tensors ``[n_i, D]``, on any device.
            dimension: D.
            storage: ``"fp32"``, ``"fp16"`` or ``"int8"``.

        Raises:
            DataError: for a tensor of another shape, and an entry that is not finite in `storage`.
                It names the id.
        """
        ids = list_of("ids", ids)
        vectors = list_of("vectors", vectors)
        check_choice("storage", storage, DENSE_STORAGES)
        for name, rows in zip(ids, vectors, strict=True):
            check_instance(f"vectors of {name!r}", rows, Tensor, "a tensor [n, D]")
            if rows.dim() != 2 or rows.size(1) != dimension:
                raise ArgumentDataError(
                    "vectors",
                    f"expected [n, {dimension}] for {name!r}, got shape {list(rows.shape)}.",
                )
        lengths = torch.tensor([0, *(rows.size(0) for rows in vectors)], dtype=torch.int64)
        offsets = lengths.cumsum(0)
        packed = torch.zeros(0, dimension)
        if vectors:
            packed = torch.cat([rows.detach().float() for rows in vectors])
        rounded = packed.half() if storage == "fp16" else packed
        check_finite(ids, offsets, rounded.isfinite().all(dim=1).cpu(), storage, packed)
        if storage != "int8":
            return cls(ids, offsets, rounded.cpu())
        quantized = quantize_tokens(packed, "int8")
        return cls(ids, offsets, quantized.values.cpu(), quantized.scales.cpu())

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dimension(self) -> int:
        """D, the length of a vector."""
        return int(self.values.size(1))

    def rows(self, i: int) -> Tensor:
        """Return the vectors of text `i`, ``[n, D]`` fp32."""
        low = int(self.offsets[i])
        high = int(self.offsets[i + 1])
        values = self.values[low:high].float()
        return values if self.scales is None else values * self.scales[low:high, None]

    def packed(self) -> Tensor | QuantizedTokens:
        """Return the documents for :func:`tilefold.ops.maxsim`.

        ``offsets`` are their offsets.
        """
        return self.values if self.scales is None else QuantizedTokens(self.values, self.scales)

    def take(self, chosen: Sequence[int]) -> TokenVectors:
        """Return a copy of some texts.

        Args:
            chosen: positions of texts, in the order of the result.
        """
        positions, offsets = gather_positions(
            self.offsets.numpy(),
            np.asarray(chosen, np.int64),
        )
        tokens = torch.from_numpy(positions)
        return TokenVectors(
            [self.ids[row] for row in chosen],
            torch.from_numpy(offsets),
            self.values[tokens],
            None if self.scales is None else self.scales[tokens],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[TokenVectors]) -> TokenVectors:
        """Join the texts of several parts, in order.

        Args:
            parts: at least one set of vectors. All have one dimension and one dtype.
        """
        lengths = torch.cat([part.offsets.diff() for part in parts])
        scales = [part.scales for part in parts if part.scales is not None]
        # Autocast of the caller would make torch.cat fail for fp16, or widen it.
        with torch.autocast("cpu", enabled=False):
            values = torch.cat([part.values for part in parts])
        return cls(
            [name for part in parts for name in part.ids],
            torch.from_numpy(offsets_of(lengths.numpy())),
            values,
            torch.cat(scales) if scales else None,
        )


def check_values(values: Tensor, scales: Tensor | None) -> None:
    """Raise ``DataError`` unless values and scales have the shapes and dtypes of a storage.

    Args:
        values: must be ``[T, D]`` in fp32, fp16 or int8.
        scales: must be ``[T]`` in fp32 for int8 values, and None for floats.
    """
    if values.dim() != 2 or values.dtype not in _DTYPES.values():
        raise DataError(f"values: expected [T, D] in fp16, fp32 or int8, got {_described(values)}.")
    if (scales is not None) != (values.dtype == torch.int8):
        raise DataError(f"scales: expected for int8 values only, got values in {values.dtype}.")
    if scales is not None and (
        scales.dtype != torch.float32 or tuple(scales.shape) != (values.size(0),)
    ):
        raise DataError(f"scales: expected [{values.size(0)}] in fp32, got {_described(scales)}.")


def check_finite(
    ids: Sequence[str],
    offsets: Tensor,
    finite: Tensor,
    storage: str,
    numbers: Tensor,
) -> None:
    """Raise ``DataError`` unless all token vectors are finite in their storage.

    Args:
        ids: N ids.
        offsets: where the vectors of each text begin, ``[N + 1]``.
        finite: bool ``[T]``, whether each vector is finite after it was rounded to the storage.
        storage: ``"fp32"``, ``"fp16"`` or ``"int8"``.
        numbers: the vectors ``[T, D]`` before they were rounded, for the error.
    """
    if bool(finite.all()):
        return
    rounded = numbers.half() if storage == "fp16" else numbers
    got = named(ids, offsets, numbers, ~rounded.isfinite())
    raise ArgumentDataError(
        "vectors",
        f"expected finite numbers within the range of {storage}, got {got}. Check the model.",
    )


def named(ids: Sequence[str], offsets: Tensor, numbers: Tensor, wrong: Tensor) -> str:
    """Describe the first wrong number of token vectors, with the id of its text, for an error.

    Args:
        ids: N ids.
        offsets: where the vectors of each text begin, ``[N + 1]``.
        numbers: vectors ``[T, D]``, or scales ``[T]``.
        wrong: bool of the same shape, True for wrong numbers. At least one is.

    Returns:
        The number and the id, such as ``"nan for 'd1'"``.
    """
    position = wrong.nonzero()[0].tolist()
    token = position[0]
    text = int(torch.searchsorted(offsets.contiguous(), token, right=True)) - 1
    return f"{numbers[tuple(position)].item()} for {ids[text]!r}"


def _described(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor, for an error."""
    return f"{tensor.dtype} {list(tensor.shape)}"


@dataclass
class TokenManifest(Manifest):
    """Manifest of a folder of token vectors.

    The folder has the file ``manifest.json`` and the shards ``part-00000.safetensors``, ... A shard
    packs the T vectors of its N texts, so that :func:`tilefold.ops.maxsim` reads the mapped file.
    Its tensors are ``values`` ``[T, D]`` fp16 or int8; for int8 ``scales`` ``[T]`` fp32 (see
    :func:`tilefold.ops.quantize_tokens`); ``offsets`` ``[N + 1]`` int64; and ``ids``, the UTF-8
    bytes of a JSON list.

    Attributes:
        dimension: D, the length of a vector.
        storage: ``"fp16"`` or ``"int8"``.
        model_name: the model that made the vectors, if known.
        model_fingerprint: its :func:`tilefold.retrieval.common.provenance.model_fingerprint`.
        model_source: folder or name that the model was loaded from, if known.
        n_tokens: vectors in all shards. The entry of a shard has its number as ``tokens``.

    The other attributes are those of :class:`tilefold.retrieval.VectorManifest`.
    """

    LAYOUT = "tokens"
    CONTENTS = "token vectors of a multi-vector model"
    OTHER_KIND_REMEDY = (
        "Encode the collection with a multi-vector model (tilefold train --recipe colbert)."
    )
    IDENTITY = ("dimension", "storage", "model_name", "model_fingerprint", "kind")
    TOTALS: ClassVar = {"n_documents": "rows", "n_tokens": "tokens"}
    STORAGES: ClassVar[tuple[str, ...]] = STORAGES

    dimension: int
    storage: str
    model_name: str | None = None
    model_fingerprint: str | None = None
    model_source: str | None = None
    kind: str = "document"
    n_tokens: int = field(default=0, kw_only=True)
    layout: str = field(default="tokens", kw_only=True)

    def wrong(self, types: Mapping[str, type | UnionType]) -> list[str]:
        wrong = super().wrong(types)
        if not wrong and self.storage not in self.STORAGES:
            return ["storage"]
        return wrong


@dataclass
class DenseManifest(TokenManifest):
    """Manifest of a folder of dense vectors, stored like token vectors with one vector per text.

    ``storage`` may also be ``"fp32"``. If ``similarity`` is ``"cosine"``, vectors were brought to
    length 1 before they were rounded.
    """

    LAYOUT = "dense"
    CONTENTS = "dense vectors of a SentenceTransformer"
    OTHER_KIND_REMEDY = "Encode the collection with a dense model (tilefold encode --kind dense)."
    STORAGES = DENSE_STORAGES

    layout: str = field(default="dense", kw_only=True)

    @property
    def similarity(self) -> str:
        """How the model compares: ``"cosine"``, ``"dot"``, ``"euclidean"`` or ``"manhattan"``."""
        return str(self.settings.get("similarity"))


class TokenVectorWriter(ShardWriter[TokenManifest, TokenVectors]):
    """Write token vectors as :class:`tilefold.retrieval.SparseVectorWriter` does."""

    suffix = "safetensors"
    package = ("safetensors.torch", "safetensors", "Storing token vectors")
    manifest_type = TokenManifest

    def _check(self, vectors: TokenVectors) -> None:
        dimension = self.manifest.dimension
        dtype = _DTYPES[self.manifest.storage]
        if vectors.dimension != dimension or vectors.values.dtype != dtype:
            raise ArgumentDataError(
                "vectors",
                f"expected D={dimension} in {dtype} as in the folder, "
                f"got {_described(vectors.values)}.",
            )

    def _counts(self, vectors: TokenVectors) -> dict[str, int]:
        return {"rows": len(vectors), "tokens": int(vectors.values.size(0))}

    def _store(self, vectors: TokenVectors, path: Path) -> None:
        """Write a shard as a safetensors file, with the ids as a tensor of UTF-8 bytes."""
        names = json.dumps(vectors.ids, ensure_ascii=False).encode("utf-8", "surrogatepass")
        ids = torch.from_numpy(np.frombuffer(names, np.uint8).copy())
        save_tensors(
            path,
            values=vectors.values,
            offsets=vectors.offsets,
            ids=ids,
            scales=vectors.scales,
        )

    def _read(self, path: Path) -> TokenVectors:
        return _read_shard(path)


class TokenStore:
    """A memory-mapped folder of token vectors, as :func:`open_tokens` opens it.

    A shard is read and checked when it is first used.

    Attributes:
        folder: the folder.
        manifest: its manifest.
        dimension: D, the length of a vector.
        ids: id -> number of its shard, and row in the shard.
    """

    def __init__(self, folder: Path, manifest: TokenManifest) -> None:
        """Read the ids of all shards.

        Args:
            folder: a complete folder of vectors.
            manifest: manifest of the folder.

        Raises:
            DataError: for a shard with another number of ids than the manifest lists, or an id that
                occurs twice.
        """
        self.folder = folder
        self.manifest = manifest
        self.dimension = manifest.dimension
        self._shards: dict[int, TokenVectors] = {}
        self.ids: dict[str, tuple[int, int]] = {}
        for number, shard in enumerate(manifest.shards):
            names = _read_ids(shard_file(folder, shard, verify=False))
            if len(names) != shard["rows"]:
                raise DataError(
                    f"{folder / shard['file']}: expected {shard['rows']} texts, got {len(names)}. "
                    f"{REMEDY}",
                )
            for row, name in enumerate(names):
                if self.ids.setdefault(name, (number, row)) != (number, row):
                    raise DataError(
                        f"{folder / shard['file']}: {name!r} was given before. {REMEDY}",
                    )

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def passages(self) -> dict[str, list[str]]:
        """Document id -> ids of its passages, with those that could not be encoded."""
        passages: dict[str, list[str]] = {}
        for name in (*self.ids, *self.manifest.failed):
            passages.setdefault(document_of(name), []).append(name)
        return passages

    def shard(self, number: int) -> TokenVectors:
        """Return shard `number`, memory-mapped, which is checked the first time.

        Raises:
            FileNotFoundError: if its file is missing.
            DataError: if it is damaged.
        """
        if number not in self._shards:
            listed = self.manifest.shards[number]
            file = shard_file(self.folder, listed)
            vectors = _read_shard(file)
            expected = (
                self.dimension,
                _DTYPES[self.manifest.storage],
                listed["rows"],
                listed["tokens"],
            )
            actual = (vectors.dimension, vectors.values.dtype, len(vectors), vectors.values.size(0))
            if actual != expected:
                raise DataError(
                    f"{file}: expected (D, dtype, texts, vectors) {expected}, got {actual}. "
                    f"{REMEDY}",
                )
            _check_finite(vectors, file)
            self._shards[number] = vectors
        return self._shards[number]

    def iter_shards(self) -> Iterator[TokenVectors]:
        """Yield all shards.

        Those that were not mapped before are mapped one at a time.
        """
        for number in range(len(self.manifest.shards)):
            was_mapped = number in self._shards
            yield self.shard(number)
            if not was_mapped:
                del self._shards[number]

    def read(self, names: Iterable[str]) -> TokenVectors:
        """Copy the vectors of some texts into memory.

        Args:
            names: ids of the texts, in the order of the result.

        Raises:
            KeyError: for an unknown id.
        """
        ids = list_of_ids("names", names)
        if not ids:
            return TokenVectors.pack([], [], self.dimension, self.manifest.storage)
        rows_by_shard: dict[int, list[int]] = {}
        for name in ids:
            number, row = self.ids[name]
            rows_by_shard.setdefault(number, []).append(row)
        # In the order of the shards. The last step brings them into the order of the ids.
        vectors = TokenVectors.concatenate(
            [self.shard(number).take(rows) for number, rows in rows_by_shard.items()],
        )
        positions = {name: position for position, name in enumerate(vectors.ids)}
        return vectors.take([positions[name] for name in ids])


def open_tokens(path: str | Path) -> TokenStore:
    """Open a folder of token vectors without loading it.

    The checksum of a shard is compared when the shard is first used.
    """
    return _opened(TokenManifest, path_of("path", path))


def open_dense(path: str | Path) -> TokenStore:
    """Open a folder of dense vectors, one for each text, as :func:`open_tokens` does."""
    return _opened(DenseManifest, path_of("path", path))


def _opened(manifest_type: type[TokenManifest], folder: Path) -> TokenStore:
    """Open a complete folder whose manifest has a type."""
    manifest = manifest_type.read(folder)
    check_complete(folder, manifest)
    return TokenStore(folder, manifest)


def safetensors_package() -> ModuleType:
    """Import ``safetensors``, or raise an error that says how to install it."""
    require("safetensors.torch", "safetensors", "Storing token vectors")
    return require("safetensors", "safetensors", "Storing token vectors")


def save_tensors(path: Path, **tensors: Tensor | None) -> None:
    """Write the tensors of a shard by name.

    Those that are None are left out.
    """
    contiguous = {
        name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None
    }
    safetensors_package().torch.save_file(contiguous, str(path), metadata={"format": "pt"})


def read_tensors(path: Path, *names: str) -> dict[str, Tensor]:
    """Read tensors of a safetensors file by name, memory-mapped.

    Args:
        path: the file.
        names: names of tensors that the file must have. A tensor ``scales`` is read if there is
            one.

    Raises:
        DataError: for a file that cannot be read, or lacks one of the tensors.
    """
    try:
        with safetensors_package().safe_open(str(path), framework="pt") as file:
            stored = set(file.keys())
            tensors = {name: file.get_tensor(name) for name in stored & {*names, "scales"}}
    # safetensors raises its own exception, or OSError for a truncated file
    except Exception as error:
        raise DataError(
            f"{path}: expected a shard of token vectors, got ({error}). {REMEDY}",
        ) from error
    for name in names:
        if name not in tensors:
            raise DataError(f"{path}: expected a tensor {name!r}, got {sorted(stored)}. {REMEDY}")
    return tensors


def _read_ids(path: Path) -> list[str]:
    """Read the ids of a shard, which are a tensor with the UTF-8 bytes of a JSON list."""
    raw = read_tensors(path, "ids")["ids"]
    try:
        names = json.loads(raw.numpy().tobytes().decode("utf-8", "surrogatepass"))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path}: expected the ids of its texts, got ({error}). {REMEDY}",
        ) from error
    if not isinstance(names, list):
        raise DataError(f"{path}: expected a list of ids, got {type(names).__name__}. {REMEDY}")
    return names


def _read_shard(path: Path) -> TokenVectors:
    """Read the vectors and ids of a shard, memory-mapped.

    Raises:
        DataError: for a damaged file, which the error names.
    """
    tensors = read_tensors(path, "offsets", "values")
    try:
        return TokenVectors(
            _read_ids(path),
            tensors["offsets"],
            tensors["values"],
            tensors.get("scales"),
        )
    except DataError as error:
        if str(error).startswith(str(path)):
            raise
        raise DataError(f"{path}: {error} {REMEDY}") from error


def _check_finite(vectors: TokenVectors, path: Path) -> None:
    """Raise ``DataError`` for vectors of a file that are NaN or infinite.

    int8 values are always finite. Their scales are checked, which must not be negative either.

    Args:
        vectors: vectors of the file.
        path: the file, for the error.
    """
    if vectors.scales is None:
        numbers = vectors.values
        least = -math.inf
        prefix = ""
    else:
        numbers = vectors.scales
        least = 0.0
        prefix = "a scale of "
    if not numbers.numel():
        return
    low, high = numbers.aminmax()  # the least and the largest; both are NaN if any number is
    if not (math.isfinite(low) and math.isfinite(high) and low >= least):
        is_wrong = ~numbers.isfinite() | (numbers < least)
        got = named(vectors.ids, vectors.offsets, numbers, is_wrong)
        raise DataError(f"{path}: expected finite token vectors, got {prefix}{got}. {REMEDY}")
