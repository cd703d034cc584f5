"""Points and queries as both engines understand them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tilefold.retrieval.qdrant.filters import Filter
from tilefold.retrieval.qdrant.layout import Layout, Record


class Point(NamedTuple):
    """A document in the engine: a UUID, its payload with the document's id, and the vectors that it has."""

    key: str
    payload: dict[str, Any]
    vectors: dict[str, Any]  # sparse: (indices, weights); dense: [D]; tokens: [n, D]


@dataclass(frozen=True)
class Stage:
    """A ranking: by a vector, or by the fusion of other rankings; of all documents, or of those of `stages`.

    Attributes:
        limit: documents.
        using, vector: name of the vectors, and that of the query; or
        fusion, rank_constant: ``"rrf"`` or ``"dbsf"`` of `stages`, and the k of reciprocal ranks, which start at 1.
        stages: rankings that this one starts from.
        exact: without the approximation of a graph.
    """

    limit: int
    using: str = ""
    vector: Any = None
    fusion: str = ""
    rank_constant: int = 60
    stages: tuple[Stage, ...] = ()
    exact: bool = False


class Plan(NamedTuple):
    """A query: its last stage, and which documents may be in any of them."""

    stage: Stage
    where: Filter | None = None


class Engine(Protocol):
    """Where a collection is. What a method has done when it returns is kept whatever happens afterwards."""

    place: str

    def record(self) -> Record | None: ...

    def create(self, record: Record) -> None: ...

    def write_record(self, record: Record) -> None: ...

    def drop(self) -> None: ...

    def upsert(self, points: Sequence[Point]) -> None: ...

    def delete(self, keys: Sequence[str]) -> None: ...

    def fetch(self, keys: Sequence[str], vectors: bool) -> list[Point]: ...

    def scroll(self) -> Iterable[Point]: ...

    def count(self, where: Filter | None) -> int: ...

    def query(self, plans: Sequence[Plan], layout: Layout) -> list[list[tuple[str, float]]]: ...

    def optimize(self) -> None: ...

    def close(self) -> None: ...
