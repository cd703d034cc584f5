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
from tilefold._internal.files import give_default_permissions
from tilefold.ops import QuantizedTokens, quantize_tokens
from tilefold.pipeline.ragged import gather_positions, offsets_of
from tilefold.retrieval.common.array_checks import check_offsets
from tilefold.retrieval.common.files import FileIdentity, Json, require
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
# A safetensors file begins with the length of its header, in this number of bytes.
_LENGTH_BYTES = 8


@dataclass
class TokenVectors:
    """The token vectors of N texts in memory, packed.

    Attributes:
        ids: N unique, non-empty strings.
        offsets: int64 ``[N + 1]``; text `i` has rows ``offsets[i]`` to ``offsets[i + 1]``, possibly
            none.
        values: ``[T, D]`` fp16, fp32 or int8.
        scales: ``[T]`` fp32 factors of int8 values; None for floats.

    Raises:
        DataError: if shapes, dtypes or offsets are inconsistent, or an id is empty or repeated.

    Examples:
        >>> import torch
        >>> tokens = [torch.randn(3, 16), torch.randn(5, 16)]  # two texts of 3 and 5 tokens
        >>> vectors = TokenVectors.pack(["a", "b"], tokens, dimension=16, storage="fp16")
        >>> vectors.offsets.tolist(), vectors.values.shape
        ([0, 3, 8], torch.Size([8, 16]))
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
                f"{_describe(self.offsets)}.",
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
        """Pack the token vectors of several texts into one tensor on the CPU.

        Args:
            ids: N ids.
            vectors: N tensors ``[n_i, D]``, on any device.
            dimension: length of a vector, D.
            storage: number type to which the vectors are converted: ``"fp32"``, ``"fp16"`` or
                ``"int8"``.

        Raises:
            ArgumentDataError: if a tensor has a wrong shape, or if a number is NaN, infinite or,
                for fp16, too large. The message names the id.
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
        lengths = np.array([rows.size(0) for rows in vectors], np.int64)
        offsets = torch.from_numpy(offsets_of(lengths))
        packed = torch.zeros(0, dimension)
        if vectors:
            packed = torch.cat([rows.detach().float() for rows in vectors])
        # int8 values are computed from the fp32 vectors, below.
        stored_floats = packed.half() if storage == "fp16" else packed
        check_finite(
            ids,
            offsets,
            packed,
            is_finite=stored_floats.isfinite().all(dim=1).cpu(),
            storage=storage,
        )
        if storage != "int8":
            return cls(ids, offsets, stored_floats.cpu())
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
        """Return the vectors of all texts as :func:`tilefold.ops.maxsim` reads them.

        ``offsets`` says where the vectors of each text begin.
        """
        return self.values if self.scales is None else QuantizedTokens(self.values, self.scales)

    def take(self, texts: Sequence[int]) -> TokenVectors:
        """Return a copy of the token vectors of some texts.

        Args:
            texts: positions of texts, in the order of the result.
        """
        token_rows, new_offsets = gather_positions(
            self.offsets.numpy(),
            np.asarray(texts, np.int64),
        )
        rows = torch.from_numpy(token_rows)
        return TokenVectors(
            [self.ids[text] for text in texts],
            torch.from_numpy(new_offsets),
            self.values[rows],
            None if self.scales is None else self.scales[rows],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[TokenVectors]) -> TokenVectors:
        """Join the texts of several parts, in order.

        Args:
            parts: at least one set of vectors. All have the same dimension and dtype. So all of
                them or none of them have scales.
        """
        lengths = torch.cat([part.offsets.diff() for part in parts])
        scales = [part.scales for part in parts if part.scales is not None]
        # If the caller uses autocast, torch.cat would fail for fp16 or return fp32.
        with torch.autocast("cpu", enabled=False):
            values = torch.cat([part.values for part in parts])
        return cls(
            [name for part in parts for name in part.ids],
            torch.from_numpy(offsets_of(lengths.numpy())),
            values,
            torch.cat(scales) if scales else None,
        )


def check_values(values: Tensor, scales: Tensor | None) -> None:
    """Raise ``DataError`` if values or scales have invalid shapes or dtypes.

    Args:
        values: must be ``[T, D]`` in fp32, fp16 or int8.
        scales: must be ``[T]`` in fp32 for int8 values, and None for floats.
    """
    if values.dim() != 2 or values.dtype not in _DTYPES.values():
        raise DataError(f"values: expected [T, D] in fp16, fp32 or int8, got {_describe(values)}.")
    if (scales is not None) != (values.dtype == torch.int8):
        raise DataError(f"scales: expected for int8 values only, got values in {values.dtype}.")
    if scales is not None and (
        scales.dtype != torch.float32 or tuple(scales.shape) != (values.size(0),)
    ):
        raise DataError(f"scales: expected [{values.size(0)}] in fp32, got {_describe(scales)}.")


def check_finite(
    ids: Sequence[str],
    offsets: Tensor,
    numbers: Tensor,
    *,
    is_finite: Tensor,
    storage: str,
) -> None:
    """Raise ``ArgumentDataError`` if a number of a token vector is not finite as it is stored.

    Args:
        ids: N ids.
        offsets: where the vectors of each text begin, ``[N + 1]``.
        numbers: vectors ``[T, D]`` before they were converted to the storage, or scales ``[T]``.
            They are used for the message.
        is_finite: whether each vector is finite in the storage, bool ``[T]``.
        storage: ``"fp32"``, ``"fp16"`` or ``"int8"``.
    """
    if bool(is_finite.all()):
        return
    # A number that is finite in fp32 may overflow in fp16, but not in int8, which has scales.
    stored_numbers = numbers.half() if storage == "fp16" else numbers
    got = describe_first_invalid(ids, offsets, numbers, is_invalid=~stored_numbers.isfinite())
    raise ArgumentDataError(
        "vectors",
        f"expected finite numbers within the range of {storage}, got {got}. Check the model.",
    )


def describe_first_invalid(
    ids: Sequence[str],
    offsets: Tensor,
    numbers: Tensor,
    *,
    is_invalid: Tensor,
) -> str:
    """Describe the first invalid number of token vectors for an error, such as ``nan for 'd1'``.

    Args:
        ids: N ids.
        offsets: where the vectors of each text begin, ``[N + 1]``.
        numbers: vectors ``[T, D]``, or scales ``[T]``.
        is_invalid: whether each number is invalid, bool of the same shape. At least one is.
    """
    first_index = tuple(is_invalid.nonzero()[0].tolist())
    token = first_index[0]
    # The text of a token is the last one that begins at or before it.
    text = int(torch.searchsorted(offsets.contiguous(), token, right=True)) - 1
    return f"{numbers[first_index].item()} for {ids[text]!r}"


def _describe(tensor: Tensor) -> str:
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
        model_name: name of the model that computed the vectors, if known.
        model_fingerprint: digest of that model
            (:func:`tilefold.retrieval.common.provenance.model_fingerprint`).
        model_source: folder or name that the model was loaded from, if known.
        n_tokens: number of vectors in all shards. The entry of a shard has its number of vectors as
            ``tokens``.

    The other attributes are described in :class:`tilefold.retrieval.VectorManifest`.
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

    def invalid_fields(self, types: Mapping[str, type | UnionType]) -> list[str]:
        invalid_fields = super().invalid_fields(types)
        if not invalid_fields and self.storage not in self.STORAGES:
            return ["storage"]
        return invalid_fields


@dataclass
class DenseManifest(TokenManifest):
    """Manifest of a folder of dense vectors, stored like token vectors with one vector per text.

    ``storage`` may also be ``"fp32"``. If ``similarity`` is ``"cosine"``, vectors were normalized
    before they were rounded.
    """

    LAYOUT = "dense"
    CONTENTS = "dense vectors of a SentenceTransformer"
    OTHER_KIND_REMEDY = "Encode the collection with a dense model (tilefold encode --kind dense)."
    STORAGES = DENSE_STORAGES

    layout: str = field(default="dense", kw_only=True)

    @property
    def similarity(self) -> str:
        """The model's similarity: ``"cosine"``, ``"dot"``, ``"euclidean"`` or ``"manhattan"``."""
        return str(self.settings.get("similarity"))


class TokenVectorWriter(ShardWriter[TokenManifest, TokenVectors]):
    """Writer of a folder of token vectors, which one process at a time may use.

    Arguments, methods and errors are described in
    :class:`tilefold.retrieval.vectors.shards.ShardWriter`.
    """

    suffix = "safetensors"
    package = ("safetensors.torch", "safetensors", "Storing token vectors")
    manifest_type = TokenManifest

    def _check(self, vectors: TokenVectors) -> None:
        """Raise ``ArgumentDataError`` if the dimension or the dtype is not that of the folder."""
        dimension = self.manifest.dimension
        dtype = _DTYPES[self.manifest.storage]
        if vectors.dimension != dimension or vectors.values.dtype != dtype:
            raise ArgumentDataError(
                "vectors",
                f"expected D={dimension} in {dtype} as in the folder, "
                f"got {_describe(vectors.values)}.",
            )

    def _counts(self, vectors: TokenVectors) -> dict[str, int]:
        return {"rows": len(vectors), "tokens": int(vectors.values.size(0))}

    def _store(self, vectors: TokenVectors, path: Path) -> None:
        """Write a shard as a safetensors file, with the ids as a tensor of UTF-8 bytes.

        Args:
            vectors: the rows of the shard.
            path: the file to write.
        """
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
        manifest: manifest of the folder.
        dimension: D, the length of a vector.
        ids: id -> index of the shard with the text, and position of the text in the shard.
    """

    def __init__(self, folder: Path, manifest: TokenManifest) -> None:
        """Read the ids of all shards.

        Args:
            folder: a complete folder of vectors.
            manifest: manifest of the folder.

        Raises:
            DataError: if a shard has a different number of ids than the manifest lists, or an id is
                repeated.
        """
        self.folder = folder
        self.manifest = manifest
        self.dimension = manifest.dimension
        self._mapped_shards: dict[int, TokenVectors] = {}  # index -> shard that was checked
        self.ids: dict[str, tuple[int, int]] = {}
        for shard_index, entry in enumerate(manifest.shards):
            file = shard_file(folder, entry, verify=False)
            ids = _decode_ids(read_tensors(file, "ids")["ids"], file)
            if len(ids) != entry["rows"]:
                raise DataError(
                    f"{file}: expected {entry['rows']} texts, got {len(ids)}. {REMEDY}",
                )
            for position, text_id in enumerate(ids):
                if text_id in self.ids:
                    raise DataError(f"{file}: the id {text_id!r} is a duplicate. {REMEDY}")
                self.ids[text_id] = (shard_index, position)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def passages(self) -> dict[str, list[str]]:
        """Document id -> ids of its passages, including those that could not be encoded."""
        passages: dict[str, list[str]] = {}
        for name in (*self.ids, *self.manifest.failed):
            passages.setdefault(document_of(name), []).append(name)
        return passages

    def shard(self, index: int) -> TokenVectors:
        """Return a memory-mapped shard. It is checked on first access.

        Args:
            index: index of the shard in the manifest.

        Raises:
            FileNotFoundError: if the file of the shard is missing.
            DataError: if the file is damaged.
        """
        if index not in self._mapped_shards:
            self._mapped_shards[index] = self._map_shard(self.manifest.shards[index])
        return self._mapped_shards[index]

    def _map_shard(self, entry: Json) -> TokenVectors:
        """Map the file of a shard into memory, and check it.

        Args:
            entry: entry of the shard in the manifest.
        """
        file = shard_file(self.folder, entry)
        vectors = _read_shard(file)
        expected = (
            self.dimension,
            _DTYPES[self.manifest.storage],
            entry["rows"],
            entry["tokens"],
        )
        actual = (vectors.dimension, vectors.values.dtype, len(vectors), vectors.values.size(0))
        if actual != expected:
            raise DataError(
                f"{file}: expected (D, dtype, texts, token vectors) {expected}, got {actual}. "
                f"{REMEDY}",
            )
        _check_stored_values(vectors, file)
        return vectors

    def iter_shards(self) -> Iterator[TokenVectors]:
        """Yield all shards. A shard that was not mapped before is mapped only while it is used."""
        for index in range(len(self.manifest.shards)):
            was_mapped = index in self._mapped_shards
            yield self.shard(index)
            if not was_mapped:
                del self._mapped_shards[index]

    def read(self, names: Iterable[str]) -> TokenVectors:
        """Copy the vectors of some texts into memory.

        Args:
            names: ids of the texts, in the order of the result.

        Raises:
            KeyError: if an id is unknown.
        """
        ids = list_of_ids("names", names)
        if not ids:
            return TokenVectors.pack([], [], self.dimension, self.manifest.storage)
        positions_by_shard: dict[int, list[int]] = {}
        for text_id in ids:
            shard_index, position = self.ids[text_id]
            positions_by_shard.setdefault(shard_index, []).append(position)
        # Read shard by shard, then reorder.
        vectors = TokenVectors.concatenate(
            [
                self.shard(shard_index).take(positions)
                for shard_index, positions in positions_by_shard.items()
            ],
        )
        position_of_id = {text_id: position for position, text_id in enumerate(vectors.ids)}
        return vectors.take([position_of_id[text_id] for text_id in ids])


def open_tokens(path: str | Path) -> TokenStore:
    """Open a folder of token vectors without loading it.

    The checksum of a shard is compared when the shard is first used.
    """
    return _open_store(TokenManifest, path_of("path", path))


def open_dense(path: str | Path) -> TokenStore:
    """Open a folder of dense vectors without loading it.

    The checksum of a shard is compared when the shard is first used.
    """
    return _open_store(DenseManifest, path_of("path", path))


def _open_store(manifest_type: type[TokenManifest], folder: Path) -> TokenStore:
    """Open a folder of vectors.

    Args:
        manifest_type: class of the manifest, which the folder must have.
        folder: the folder.

    Raises:
        DataError: if the folder is incomplete, or has another kind of vectors.
    """
    manifest = manifest_type.read(folder)
    check_complete(folder, manifest)
    return TokenStore(folder, manifest)


def safetensors_package() -> ModuleType:
    """Import ``safetensors``, or raise an error that says how to install it."""
    require("safetensors.torch", "safetensors", "Storing token vectors")
    return require("safetensors", "safetensors", "Storing token vectors")


def save_tensors(path: Path, **tensors: Tensor | None) -> None:
    """Write tensors into a safetensors file.

    Args:
        path: the file.
        tensors: tensors by name. None is left out.
    """
    contiguous = {
        name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None
    }
    safetensors_package().torch.save_file(contiguous, str(path), metadata={"format": "pt"})
    give_default_permissions(path)


def read_tensors(path: Path, *names: str, optional: Sequence[str] = ()) -> dict[str, Tensor]:
    """Read tensors of a safetensors file by name, memory-mapped.

    Args:
        path: the file.
        names: names of tensors that the file must have.
        optional: names of tensors that are read if the file has them.

    Raises:
        DataError: if the file cannot be read, or lacks one of the tensors.
    """
    try:
        identity = FileIdentity.of(path)
        with safetensors_package().safe_open(str(path), framework="pt") as file:
            stored_names = set(file.keys())
            read_names = stored_names & {*names, *optional}
            tensors = _map_again(path, {name: file.get_tensor(name) for name in read_names})
        if FileIdentity.of(path) != identity:
            raise OSError("another file replaced it in the meantime")
    # safetensors raises an exception of its own, or OSError if the file is truncated.
    except Exception as error:
        raise DataError(
            f"{path}: expected a safetensors file of vectors, which could not be read ({error}). "
            f"{REMEDY}",
        ) from error
    for name in names:
        if name not in tensors:
            raise DataError(
                f"{path}: expected a tensor {name!r}, got {sorted(stored_names)}. {REMEDY}",
            )
    return tensors


def _map_again(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map tensors of a safetensors file into memory by torch, in place of safetensors.

    A server deletes the vectors of an old index while it answers requests. Python holds the GIL
    while it unmaps the memory of safetensors, for which it has an object. It has none for that of
    ``torch.from_file``, which is unmapped without the GIL. Unaligned tensors keep the memory of
    safetensors.

    Args:
        path: the file, whose header safetensors has checked.
        tensors: name -> the tensor as safetensors has mapped it.
    """
    file_bytes = torch.from_file(
        str(path),
        shared=False,
        size=path.stat().st_size,
        dtype=torch.uint8,
    )
    n_header_bytes = int.from_bytes(file_bytes[:_LENGTH_BYTES].numpy().tobytes(), "little")
    first_data_byte = _LENGTH_BYTES + n_header_bytes
    header = json.loads(file_bytes[_LENGTH_BYTES:first_data_byte].numpy().tobytes())
    mapped = {}
    for name, tensor in tensors.items():
        start, stop = (first_data_byte + offset for offset in header[name]["data_offsets"])
        is_aligned = start % tensor.dtype.itemsize == 0  # as in all files that safetensors writes
        if is_aligned:
            view = file_bytes[start:stop].view(tensor.dtype).view(tensor.shape)
            mapped[name] = view.detach()  # a view would keep `file_bytes` as its base
        else:
            mapped[name] = tensor
    return mapped


def _decode_ids(encoded_ids: Tensor, path: Path) -> list[str]:
    """Decode the ids of a shard, which are stored as the UTF-8 bytes of a JSON list.

    Args:
        encoded_ids: the bytes, a tensor of the file.
        path: the file, for errors.

    Raises:
        DataError: if the bytes are not a JSON list.
    """
    try:
        # Ids in memory may have half a surrogate pair, which strict UTF-8 cannot encode.
        ids = json.loads(encoded_ids.numpy().tobytes().decode("utf-8", "surrogatepass"))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path}: could not read the ids of its texts ({error}). {REMEDY}"
        ) from error
    if not isinstance(ids, list):
        raise DataError(f"{path}: expected a list of ids, got {type(ids).__name__}. {REMEDY}")
    return ids


def _read_shard(path: Path) -> TokenVectors:
    """Read the vectors and ids of a shard, memory-mapped.

    Raises:
        DataError: if the file is damaged. The message names the file.
    """
    tensors = read_tensors(path, "ids", "offsets", "values", optional=("scales",))
    ids = _decode_ids(tensors["ids"], path)
    try:
        return TokenVectors(
            ids,
            tensors["offsets"],
            tensors["values"],
            tensors.get("scales"),
        )
    except DataError as error:  # it does not name the file yet
        raise DataError(f"{path}: {error} {REMEDY}") from error


def _check_stored_values(vectors: TokenVectors, path: Path) -> None:
    """Raise ``DataError`` if token vectors of a file are NaN or infinite.

    int8 values are always finite, so their scales are checked: they must be finite and not
    negative.

    Args:
        vectors: vectors of the file.
        path: the file, for the error.
    """
    if vectors.scales is None:
        numbers = vectors.values
        lower_bound = -math.inf
        description = ""
    else:
        numbers = vectors.scales
        lower_bound = 0.0
        description = "a scale of "
    if not numbers.numel():
        return
    minimum, maximum = numbers.aminmax()  # both are NaN if any number is
    are_finite = math.isfinite(minimum) and math.isfinite(maximum)
    if are_finite and minimum >= lower_bound:
        return
    is_invalid = ~numbers.isfinite() | (numbers < lower_bound)
    invalid = describe_first_invalid(
        vectors.ids,
        vectors.offsets,
        numbers,
        is_invalid=is_invalid,
    )
    raise DataError(f"{path}: expected finite token vectors, got {description}{invalid}. {REMEDY}")
