"""A collection in Qdrant: what it is asked, in the names that qdrant-edge and the models of qdrant-client share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from tilefold.retrieval.qdrant.layout import ID, SPARSE, TOKENS, Filter, Record


class Point(NamedTuple):
    """A document in the engine: a UUID, its payload with the document's id, and the vectors that it has."""

    key: str
    payload: dict[str, Any]
    vectors: dict[str, Any]  # sparse: (indices, weights); dense: [D]; tokens: [n, D]


class Stage(NamedTuple):
    """A ranking by a vector, or by the fusion of other rankings; of all documents, or of those of `stages`."""

    limit: int
    using: str = ""  # name of the vectors
    vector: Any = None
    fusion: str = ""  # "rrf" or "dbsf" of `stages`
    rank_constant: int = 60  # of ranks that start at 1
    stages: tuple[Any, ...] = ()
    exact: bool = False  # without the approximation of a graph


class Engine(Protocol):
    """A collection in a folder or on a server. What a method has done when it returns is kept whatever comes later."""

    place: str  # for messages
    api: Any  # module whose classes requests are made of
    point: Any  # its class of a point, and of a range, which have two names
    range: Any
    prefetch: str  # name of the stages of a request
    at_once: int  # queries of a call

    def record(self) -> Record | None: ...  # None where there is no collection
    def create(self, record: Record) -> None: ...  # empty, with indexes of its fields
    def write_record(self, record: Record) -> None: ...
    def drop(self) -> None: ...
    def delete(self, keys: Sequence[str]) -> None: ...
    def optimize(self) -> None: ...  # make the final index of what was added
    def close(self) -> None: ...
    def _put(self, points: list[Any]) -> None: ...
    def _get(self, keys: list[str], vectors: bool) -> list[Any]: ...
    def _page(self, offset: object) -> tuple[list[Any], Any]: ...
    def _count(self, chosen: object) -> int: ...
    def _answers(self, requests: list[Any]) -> list[Any]: ...
    def _scoring(self, stage: Stage) -> dict[str, Any]: ...

    def upsert(self, points: Sequence[Point]) -> None:
        self._put(
            [
                self.point(id=key, vector={n: self._vector(n, v) for n, v in vectors.items()}, payload=payload)
                for key, payload, vectors in points
            ]
        )

    def fetch(self, keys: Sequence[str], vectors: bool) -> list[Point]:
        """The points that exist, in any order."""
        found = []
        for record in self._get(list(keys), vectors):
            parts = dict(record.vector or {})
            if SPARSE in parts:
                parts[SPARSE] = (list(parts[SPARSE].indices), list(parts[SPARSE].values))
            found.append(Point(str(record.id), dict(record.payload or {}), parts))
        return found

    def ids(self) -> Iterator[str]:
        page, offset = self._page(None)
        yield from (record.payload[ID] for record in page)
        while offset is not None:
            page, offset = self._page(offset)
            yield from (record.payload[ID] for record in page)

    def count(self, where: Filter | None) -> int:
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

    def _request(self, kind: Any, stage: Stage, chosen: object, **more: object) -> object:
        earlier = [self._request(self.api.Prefetch, part, chosen) for part in stage.stages]
        params = self.api.SearchParams(exact=True) if stage.exact else None
        more |= {self.prefetch: earlier or None, **self._scoring(stage)}
        return kind(limit=stage.limit, filter=chosen, params=params, **more)

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
