"""Sparse vectors in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class SparseVectors:
    ids: list[str]
    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]
    data: npt.NDArray[np.float32]
    vocab_size: int
    fingerprint: str | None = None

    @classmethod
    def from_rows(
        cls,
        rows: Mapping[str, Mapping[int, float]],
        vocab_size: int,
        fingerprint: str | None = None,
    ) -> SparseVectors:
        raise NotImplementedError

    @classmethod
    def from_torch(
        cls, ids: Sequence[str], matrix: Any, fingerprint: str | None = None, min_weight: float = 0.0
    ) -> SparseVectors:
        raise NotImplementedError

    @classmethod
    def concatenate(cls, parts: Iterable[SparseVectors]) -> SparseVectors:
        raise NotImplementedError

    def row(self, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class VectorManifest:
    vocab_size: int
    fingerprint: str | None
    model_name: str | None
    kind: str = "document"
    n_documents: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    schema_version: int = 1


class SparseVectorWriter:
    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        fingerprint: str | None = None,
        model_name: str | None = None,
        kind: str = "document",
        settings: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        raise NotImplementedError

    def has_shard(self, number: int) -> bool:
        raise NotImplementedError

    def write_shard(self, number: int, vectors: SparseVectors, failed: Mapping[str, str] | None = None) -> None:
        raise NotImplementedError

    def finish(self) -> VectorManifest:
        raise NotImplementedError


def read_manifest(path: str | Path) -> VectorManifest:
    raise NotImplementedError


def read_vectors(path: str | Path) -> SparseVectors:
    raise NotImplementedError


def write_vectors(
    vectors: SparseVectors,
    path: str | Path,
    *,
    model_name: str | None = None,
    kind: str = "document",
    shard_size: int = 65536,
) -> VectorManifest:
    raise NotImplementedError


def export_jsonl(vectors: SparseVectors, path: str | Path, tokens: Sequence[str] | None = None) -> None:
    raise NotImplementedError


def vocabulary_fingerprint(tokenizer: Any) -> str | None:
    raise NotImplementedError
