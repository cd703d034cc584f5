"""What every sparse index offers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from tilefold.retrieval.fusion import Run
from tilefold.retrieval.vectors import SparseVectors


class Hit(NamedTuple):
    id: str
    score: float


@runtime_checkable
class SparseIndex(Protocol):
    backend: ClassVar[str]

    @property
    def n_documents(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str | None: ...

    @classmethod
    def build(cls, vectors: SparseVectors, **options: Any) -> SparseIndex: ...

    def search(self, queries: SparseVectors, k: int) -> list[list[Hit]]: ...

    def save(self, path: str | Path) -> None: ...

    @classmethod
    def load(cls, path: str | Path) -> SparseIndex: ...


def hits_to_run(queries: SparseVectors, hits: Sequence[Sequence[Hit]]) -> Run:
    """``{query id: {document id: score}}`` of a search's answer."""
    return {qid: {hit.id: hit.score for hit in row} for qid, row in zip(queries.ids, hits, strict=True)}
