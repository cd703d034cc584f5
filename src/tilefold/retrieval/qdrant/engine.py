"""A collection in Qdrant: what it is asked, in the names that qdrant-edge and the models of qdrant-client share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tilefold.retrieval.qdrant.layout import ID, SPARSE, TOKENS, Filter, Record


class Point(NamedTuple):
    """A document in the engine: a UUID, its payload with the document's id, and the vectors that it has."""

    key: str
    payload: dict[str, Any]
    vectors: dict[str, Any]  # sparse: (indices, weights); dense: [D]; tokens: [n, D]


class Stage(NamedTuple):
    """A ranking by a vector, or by the fusion of other rankings; of all documents, or of those of `stages`.

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
    stages: tuple[Any, ...] = ()
    exact: bool = False


class Engine(ABC):
    """A collection in a folder or on a server. What a method has done when it returns is kept whatever comes later.

    Attributes:
        place: where it is, for messages.
        api: the module whose classes requests are made of.
        point, range: its classes of a point and of a range, which have two names.
        prefetch, at_once: name of the stages of a request; how many queries a call may have.
    """

    place: str
    api: Any
    point: Any
    range: Any
    prefetch: str
    at_once: int

    @abstractmethod
    def record(self) -> Record | None:
        """Record of the collection; None where there is no collection."""

    @abstractmethod
    def create(self, record: Record) -> None:
        """Make an empty collection, with indexes of its fields."""

    @abstractmethod
    def write_record(self, record: Record) -> None:
        """Replace the record of the collection."""

    @abstractmethod
    def drop(self) -> None:
        """Remove the collection."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Remove points, and wait until that is on disk."""

    @abstractmethod
    def optimize(self) -> None:
        """Make the final index of what was added."""

    @abstractmethod
    def close(self) -> None:
        """Give the folder or the connections back."""

    @abstractmethod
    def _put(self, points: list[Any]) -> None:
        """Add or replace points, and wait until that is on disk."""

    @abstractmethod
    def _get(self, keys: list[str], vectors: bool) -> list[Any]: ...

    @abstractmethod
    def _page(self, offset: Any) -> tuple[list[Any], Any]: ...

    @abstractmethod
    def _count(self, chosen: Any) -> int: ...

    @abstractmethod
    def _answers(self, requests: list[Any]) -> list[Any]: ...

    @abstractmethod
    def _scoring(self, stage: Stage) -> dict[str, Any]: ...

    def upsert(self, points: Sequence[Point]) -> None:
        """Add or replace points."""
        self._put([self.point(id=at.key, vector=self._vectors(at.vectors), payload=at.payload) for at in points])

    def fetch(self, keys: Sequence[str], vectors: bool) -> list[Point]:
        """Fetch the points that exist, in any order."""
        found = []
        for record in self._get(list(keys), vectors):
            parts = dict(record.vector or {})
            if SPARSE in parts:
                parts[SPARSE] = (list(parts[SPARSE].indices), list(parts[SPARSE].values))
            found.append(Point(str(record.id), dict(record.payload or {}), parts))
        return found

    def ids(self) -> Iterator[str]:
        """The ids of all documents."""
        offset: Any = None
        while True:
            page, offset = self._page(offset)
            yield from (record.payload[ID] for record in page)
            if offset is None:
                return

    def count(self, where: Filter | None) -> int:
        """Number of points that match."""
        return self._count(self._filter(where))

    def query(self, stages: Sequence[Stage], where: Filter | None) -> list[list[tuple[str, float]]]:
        """Ids and scores for each last stage; only documents that match `where` are in any of its stages."""
        answers: list[list[tuple[str, float]]] = []
        kind, chosen = self.api.QueryRequest, self._filter(where)
        for start in range(0, len(stages), self.at_once):
            part = stages[start : start + self.at_once]
            found = self._answers([self._request(kind, stage, chosen, with_payload=[ID]) for stage in part])
            answers += [[(point.payload[ID], float(point.score)) for point in answer] for answer in found]
        return answers

    def _request(self, kind: Any, stage: Stage, chosen: Any, **more: Any) -> Any:
        earlier = [self._request(self.api.Prefetch, part, chosen) for part in stage.stages]
        params = self.api.SearchParams(exact=True) if stage.exact else None
        more |= {self.prefetch: earlier or None, **self._scoring(stage)}
        return kind(limit=stage.limit, filter=chosen, params=params, **more)

    def _vectors(self, vectors: dict[str, Any]) -> dict[str, Any]:
        return {name: self._vector(name, vector) for name, vector in vectors.items()}

    def _vector(self, name: str, vector: Any) -> Any:
        return self.api.SparseVector(indices=vector[0], values=vector[1]) if name == SPARSE else vector

    def _filter(self, where: Filter | None) -> Any:
        if where is None:
            return None
        must, must_not = ([self._condition(*item) for item in part] for part in where.conditions())
        return self.api.Filter(must=must or None, must_not=must_not or None)

    def _condition(self, name: str, values: list[Any] | dict[str, float]) -> Any:
        if isinstance(values, dict):
            return self.api.FieldCondition(key=name, range=self.range(**values))
        match = self._match(values[0]) if len(values) == 1 else self.api.MatchAny(any=values)
        return self.api.FieldCondition(key=name, match=match)

    def _match(self, value: Any) -> Any:
        return self.api.MatchValue(value=value)


def last_stage(
    vectors: dict[str, Any], k: int, fusion: str | None, rerank: bool, depth: int, rank_constant: int, exact: bool
) -> Stage | None:
    """The last stage of a query; None where it has no vector to start from."""
    tokens = vectors.pop(TOKENS, None) if rerank else None
    limit = depth if fusion is not None or rerank else k
    firsts = [Stage(limit, kind, vector, exact=exact and kind != SPARSE) for kind, vector in vectors.items()]
    if not firsts or (rerank and tokens is None):
        return None
    stage = firsts[0]
    if fusion is not None:
        stage = Stage(depth if rerank else k, fusion=fusion, rank_constant=rank_constant, stages=tuple(firsts))
    if rerank:
        return Stage(k, TOKENS, tokens, stages=(stage,))
    return stage._replace(limit=k + 1) if stage.using == SPARSE else stage
