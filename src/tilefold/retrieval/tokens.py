"""Token vectors of a multi-vector model on disk: safetensors shards, and a manifest that lists complete ones.

A folder of token vectors holds ``part-00000.safetensors``, ... and ``manifest.json`` (:class:`TokenManifest`). A shard
packs the vectors of its N texts, T in all: ``values`` ``[T, D]`` fp16 or int8, for int8 ``scales`` ``[T]`` fp32 (see
:func:`tilefold.ops.quantize_tokens`), ``offsets`` ``[N + 1]`` int64, and ``ids``, the UTF-8 bytes of a JSON list.
That is the packed layout of :func:`tilefold.ops.maxsim`, which scores a shard in place while it is memory-mapped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilefold.retrieval._arrays import no_weight
from tilefold.retrieval._files import require
from tilefold.retrieval._shards import (
    REMEDY,
    SCHEMA_VERSION,
    ShardWriter,
    check_whole,
    parse_manifest,
    read_layout,
    shard_file,
)
from tilefold.retrieval._token_vectors import STORAGES, TokenVectors, named
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.provenance import Provenance

__all__ = ["STORAGES", "TokenManifest", "TokenStore", "TokenVectorWriter", "TokenVectors", "open_tokens"]

LAYOUT = "tokens"
_DTYPES = {"fp16": torch.float16, "int8": torch.int8}


@dataclass
class TokenManifest:
    """The manifest of a folder of token vectors.

    Attributes:
        dimension: D, the length of a vector.
        storage: ``"fp16"`` or ``"int8"``.
        model_name: the model that made the vectors, if known.
        model_fingerprint: its :func:`tilefold.retrieval.token_encoding.token_model_fingerprint`.
        model_source: folder or name that the model was loaded from, if known.
        kind: ``"document"`` or ``"query"``.
        n_texts: texts that were given: those in shards and failed ones; None if unknown.
        n_documents, n_tokens: texts and vectors in all shards.
        shards: ``{"file", "rows", "tokens", "sha256", "truncated"}`` for each shard, in order.
        settings, failed, partial, truncated, complete: as in :class:`tilefold.retrieval.VectorManifest`.
        layout, schema_version: the format of this folder.
    """

    dimension: int
    storage: str
    model_name: str | None = None
    model_fingerprint: str | None = None
    model_source: str | None = None
    kind: str = "document"
    n_documents: int = 0
    n_tokens: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    partial: dict[str, Any] = field(default_factory=dict)
    truncated: dict[str, int | None] = field(default_factory=dict)
    complete: bool = False
    n_texts: int | None = None
    layout: str = LAYOUT
    schema_version: int = SCHEMA_VERSION

    @property
    def provenance(self) -> Provenance:
        """Model and texts, as far as they are known."""
        return Provenance(self.model_fingerprint, self.settings.get("texts_sha256"))


class TokenVectorWriter(ShardWriter[TokenManifest, TokenVectors]):
    """Write token vectors shard by shard; one process at a time may use a folder.

    Args:
        path: the folder, made when missing.
        manifest: the manifest of a new folder.
        resume: keep the shards of an earlier writer; other settings are an error. With False, they are discarded.
        lists: with False, files of shards are made for a writer in another process, which lists them.

    Raises:
        FileExistsError: `path` holds files but no manifest.
        DataError: the earlier vectors have other settings, or are sparse vectors.
    """

    suffix = "safetensors"
    identity = ("dimension", "storage", "model_name", "model_fingerprint", "kind")
    totals = (("n_documents", "rows"), ("n_tokens", "tokens"))

    def __init__(self, path: str | Path, manifest: TokenManifest, *, resume: bool = False, lists: bool = True) -> None:
        _safetensors()
        super().__init__(Path(path), manifest, resume, lists)

    def _load(self, folder: Path) -> TokenManifest:
        return read_token_manifest(folder)

    def _check(self, vectors: TokenVectors) -> None:
        expected = (self.manifest.dimension, _DTYPES[self.manifest.storage])
        if (vectors.dimension, vectors.values.dtype) != expected:
            raise DataError(
                f"vectors: expected D={expected[0]} in {expected[1]} as in the folder, got "
                f"{vectors.values.dtype} {list(vectors.values.shape)}."
            )

    def _counts(self, vectors: TokenVectors) -> dict[str, int]:
        return {"rows": len(vectors), "tokens": int(vectors.values.size(0))}

    def _store(self, vectors: TokenVectors, path: Path) -> None:
        _write_shard(vectors, path)

    def _read(self, path: Path) -> TokenVectors:
        return _read_shard(path)


def read_token_manifest(path: str | Path) -> TokenManifest:
    """The manifest of the folder `path`, complete or not.

    Raises:
        FileNotFoundError: no manifest.
        DataError: a damaged one, or one of sparse vectors.
    """
    folder = Path(path)
    value, layout = read_layout(folder)
    if layout != LAYOUT:
        raise DataError(
            f"{folder}: expected token vectors of a multi-vector model, got {layout} vectors. "
            "Encode the collection with a multi-vector model (tilefold train --recipe colbert)."
        )
    types = {"dimension": int, "model_fingerprint": str | None, "model_source": str | None, "n_tokens": int}
    manifest = parse_manifest(TokenManifest, folder, value, types)
    if manifest.storage not in STORAGES or not all(isinstance(part.get("tokens"), int) for part in manifest.shards):
        raise DataError(
            f"{folder}: expected a manifest of token vectors, got fields of other types (storage, shards). {REMEDY}"
        )
    return manifest


class TokenStore:
    """A memory-mapped folder of token vectors: a shard is read when it is scored, and its checksum compared once.

    Created by :func:`open_tokens`. ``ids`` maps each id to (shard, row); ``manifest`` is that of the folder.
    """

    def __init__(self, folder: Path, manifest: TokenManifest, *, verify: bool = True) -> None:
        self.folder, self.manifest = folder, manifest
        self._verify = verify
        self._shards: dict[int, TokenVectors] = {}
        self.ids: dict[str, tuple[int, int]] = {}
        for number, shard in enumerate(manifest.shards):
            names = _read_ids(shard_file(folder, shard, verify=False))
            if len(names) != shard["rows"]:
                raise DataError(f"{folder / shard['file']}: expected {shard['rows']} texts, got {len(names)}. {REMEDY}")
            for row, name in enumerate(names):
                if self.ids.setdefault(name, (number, row)) != (number, row):
                    raise DataError(f"{folder / shard['file']}: {name!r} was given before. {REMEDY}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dimension(self) -> int:
        """D."""
        return self.manifest.dimension

    def shard(self, number: int) -> TokenVectors:
        """Shard `number`, memory-mapped.

        Raises:
            FileNotFoundError, DataError: its file is missing or damaged; the checksum is compared the first time.
        """
        if number not in self._shards:
            listed = self.manifest.shards[number]
            file = shard_file(self.folder, listed, verify=self._verify)
            vectors = _read_shard(file)
            expected = (self.dimension, _DTYPES[self.manifest.storage], listed["rows"], listed["tokens"])
            found = (vectors.dimension, vectors.values.dtype, len(vectors), vectors.values.size(0))
            if found != expected:
                raise DataError(f"{file}: expected (D, dtype, texts, vectors) {expected}, got {found}. {REMEDY}")
            if self._verify:
                _check_finite(vectors, file)
            self._shards[number] = vectors
        return self._shards[number]

    def read(self, names: Iterable[str]) -> TokenVectors:
        """The vectors of some texts, copied into memory, in the given order.

        Raises:
            KeyError: a text is not in the store.
        """
        wanted = list(names)
        rows: dict[int, list[int]] = {}
        for number, row in (self.ids[name] for name in wanted):
            rows.setdefault(number, []).append(row)
        if not wanted:
            empty = torch.zeros(0, self.dimension, dtype=_DTYPES[self.manifest.storage])
            scales = torch.zeros(0) if self.manifest.storage == "int8" else None
            return TokenVectors([], torch.zeros(1, dtype=torch.int64), empty, scales)
        found = TokenVectors.concatenate([self.shard(number).take(chosen) for number, chosen in rows.items()])
        place = {name: at for at, name in enumerate(found.ids)}
        return found.take([place[name] for name in wanted])


def open_tokens(path: str | Path, *, verify: bool = True) -> TokenStore:
    """Open a folder of token vectors without loading it.

    Args:
        verify: compare a shard's checksum the first time that it is used.

    Raises:
        FileNotFoundError: no manifest, or a listed shard is missing.
        DataError: the writer did not finish, the folder holds sparse vectors, or a shard is damaged; names the file.
    """
    folder = Path(path)
    manifest = read_token_manifest(folder)
    check_whole(folder, manifest)
    return TokenStore(folder, manifest, verify=verify)


def _safetensors() -> Any:
    require("safetensors", "safetensors", "Storing token vectors")
    return require("safetensors.torch", "safetensors", "Storing token vectors")


def _write_shard(vectors: TokenVectors, path: Path) -> None:
    names = np.frombuffer(json.dumps(vectors.ids, ensure_ascii=False).encode("utf-8", "surrogatepass"), np.uint8)
    tensors = {
        "values": vectors.values.contiguous(),
        "offsets": vectors.offsets.contiguous(),
        "ids": torch.from_numpy(names.copy()),
    }
    if vectors.scales is not None:
        tensors["scales"] = vectors.scales.contiguous()
    _safetensors().save_file(tensors, str(path), metadata={"format": "pt"})


def _open(path: Path) -> Any:
    _safetensors()
    try:
        return require("safetensors", "safetensors", "Reading token vectors").safe_open(str(path), framework="pt")
    except Exception as error:  # safetensors raises its own exception, or OSError for a truncated file
        raise DataError(f"{path}: expected a shard of token vectors, got ({error}). {REMEDY}") from error


def _tensor(file: Any, name: str, path: Path) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except Exception as error:
        raise DataError(f"{path}: expected a tensor {name!r}, got ({error}). {REMEDY}") from error
    return tensor


def _read_ids(path: Path) -> list[str]:
    with _open(path) as file:
        raw = _tensor(file, "ids", path)
    try:
        names = json.loads(raw.numpy().tobytes().decode("utf-8", "surrogatepass"))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: expected the ids of its texts, got ({error}). {REMEDY}") from error
    if not isinstance(names, list):
        raise DataError(f"{path}: expected a list of ids, got {type(names).__name__}. {REMEDY}")
    return names


def _check_finite(vectors: TokenVectors, path: Path) -> None:
    """Raise ``DataError`` for numbers, or factors of int8 values, that are NaN or infinite."""
    if vectors.scales is not None:
        whole = no_weight(vectors.scales.numpy()) is None
    else:  # the least and the largest are NaN where there is one
        whole = not vectors.values.numel() or all(math.isfinite(end) for end in vectors.values.aminmax())
    if not whole:
        numbers, what = (vectors.values, "") if vectors.scales is None else (vectors.scales, "a scale of ")
        wrong = ~numbers.isfinite() if vectors.scales is None else ~numbers.isfinite() | (numbers < 0)
        got = named(vectors.ids, vectors.offsets, numbers, wrong)
        raise DataError(f"{path}: expected finite token vectors, got {what}{got}. {REMEDY}")


def _read_shard(path: Path) -> TokenVectors:
    names = _read_ids(path)
    with _open(path) as file:
        scales = _tensor(file, "scales", path) if "scales" in file.keys() else None  # noqa: SIM118 - no mapping
        offsets, values = _tensor(file, "offsets", path), _tensor(file, "values", path)
    try:
        return TokenVectors(names, offsets, values, scales)
    except DataError as error:
        raise DataError(f"{path}: {error} {REMEDY}") from error
