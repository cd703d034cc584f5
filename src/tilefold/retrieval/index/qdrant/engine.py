"""A collection in Qdrant: its layout and record, and what an engine is asked, in the names that
both clients share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from tilefold._internal.arguments import ArgumentError, check_choice, check_count, check_mapping
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.data.metadata import Filter, Wanted, check_field
from tilefold.retrieval.data.numbers import Bounds, rounded_range
from tilefold.retrieval.errors import ArgumentDataError, DataError
from tilefold.retrieval.vectors.sparse import check_same_vocabulary

SCHEMA_VERSION = 1
WEIGHTS = ("float32", "float16")
DISTANCES = ("dot", "cosine")
FIELDS = ("keyword", "integer", "float", "bool", "text")
ID = "_id"  # of the document, in the payload: Qdrant's own ids are numbers or UUIDs
SPARSE, DENSE, TOKENS = "sparse", "dense", "tokens"  # names of the vectors
Make = Callable[..., object]  # a class of an engine


@dataclass(frozen=True)
class Layout:
    """Vectors of a collection: any of sparse, dense and token vectors.

    Attributes:
        vocab_size, fingerprint: vocabulary of the sparse vectors, as in ``SparseVectors``; None
            without any.
        dense: length of the dense vectors, or None.
        tokens: length of a token vector (late interaction), or None.
        weights: how sparse weights are kept, ``"float32"`` or ``"float16"``.
        distance: of dense vectors, ``"dot"`` or ``"cosine"``.
        fields: fields of the payload that filters are quick on -> one of keyword, integer, float,
            bool, text.
        models: of ``"sparse"``, ``"dense"`` and ``"tokens"`` -> fingerprint of the model, as far as
            it is known.
        passages: cut of the documents whose passages are kept
            (:class:`tilefold.retrieval.Passages`); None for whole documents.

    No vectors at all, or a wrong value, is a ``ValueError``.
    """

    vocab_size: int | None = None
    fingerprint: str | None = None
    dense: int | None = None
    tokens: int | None = None
    weights: str = "float32"
    distance: str = "dot"
    fields: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    passages: str | None = None

    def __post_init__(self) -> None:
        for name, size in {
            "vocab_size": self.vocab_size,
            DENSE: self.dense,
            TOKENS: self.tokens,
        }.items():
            if size is not None:
                check_count(name, size)
        if not self.kinds:
            raise ArgumentError(
                "layout",
                "expected vocab_size, dense or tokens, got None for all three.",
            )
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("distance", self.distance, DISTANCES)
        check_mapping("fields", self.fields, "field of the payload -> kind")
        check_mapping("models", self.models, "kind of vectors -> fingerprint")
        for name, kind in self.fields.items():
            if kind not in FIELDS or name == ID:
                raise ArgumentError(
                    "fields",
                    f"expected a name and one of {', '.join(FIELDS)}, got {name!r}: {kind!r}.",
                )
            check_field(name, "fields")

    @property
    def sizes(self) -> dict[str, int | None]:
        return {SPARSE: self.vocab_size, DENSE: self.dense, TOKENS: self.tokens}

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, size in self.sizes.items() if size is not None]

    def check_same(self, other: Layout, place: str) -> None:
        """Raise an error unless `other` may be asked for where this is: of the same vectors,
        vocabulary and models.
        """
        check_same_vocabulary(self, other, place, "layout")
        for name in ("dense", "tokens", "weights", "distance", "passages"):
            own, got = getattr(self, name), getattr(other, name)
            if own != got:
                raise DataError(
                    f"layout: expected {name}={own!r} as in {place}, got {got!r}. Choose another.",
                )
        check_models(self.models, other.models, place)


def check_models(mine: Mapping[str, str], others: Mapping[str, str], place: str) -> None:
    """Raise ``DataError`` where a model is known on both sides and differs."""
    for kind, model in others.items():
        if mine.get(kind, model) != model:
            remedy = "Encode with the same model, or choose another collection."
            expected = f"{kind} vectors of the model that made {place} ({mine[kind][:12]})"
            raise ArgumentDataError(
                "documents",
                f"expected {expected}, got those of another ({model[:12]}). {remedy}",
            )


@dataclass(frozen=True)
class Record:
    """Description of a collection, which is stored with it.

    Attributes:
        layout: vectors of the collection.
        texts_sha256: digest of all its documents; None once single documents were added, replaced
            or deleted.
        vectors_sha256: digest of the vectors of a build, by which it is resumed; None as above.
        complete: whether no build is unfinished.
        precisions: of ``"sparse"``, ``"dense"`` and ``"tokens"`` -> number types in which the
            vectors were computed, such as ``"bf16"`` or ``"bf16, fp32"``, as far as they are known.
        kinds: field of the payload -> kinds of its values, of all documents that there were; None
            in a collection of a version that did not record them.
    """

    layout: Layout
    texts_sha256: str | None = None
    vectors_sha256: str | None = None
    complete: bool = True
    precisions: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, list[str]] | None = field(default_factory=dict)

    def to_dict(self) -> Json:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: Json, place: str) -> Record:
        remedy = "Build the index again (tilefold index), or update tilefold."
        if (got := value.get("schema_version")) != SCHEMA_VERSION:
            raise DataError(
                f"{place}: expected a collection of schema {SCHEMA_VERSION}, got {got!r}. {remedy}",
            )
        try:
            known = {item.name for item in fields(Layout)}
            layout = Layout(
                **{name: item for name, item in value["layout"].items() if name in known},
            )
            return cls(
                layout,
                value["texts_sha256"],
                value["vectors_sha256"],
                bool(value["complete"]),
                dict(value.get("precisions", {})),
                None if value.get("kinds") is None else dict(value["kinds"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            wrong = f"{dict(value)!r:.80} ({error!r})"
            raise DataError(
                f"{place}: expected the record of a collection, got {wrong}. {remedy}",
            ) from error


class Point(NamedTuple):
    """A document in the engine: a UUID, its payload with the document's id, and the vectors that it
    has.
    """

    key: str
    payload: Json
    vectors: Json  # sparse: (indices, weights); dense: [D]; tokens: [n, D]


class Stage(NamedTuple):
    """A ranking by a vector, or by the fusion of other rankings; of all documents, or of those of
    `stages`.
    """

    limit: int
    using: str = ""  # name of the vectors
    vector: object = None
    fusion: str = ""  # "rrf" or "dbsf" of `stages`
    rank_constant: int = 60  # of ranks that start at 1
    stages: tuple[Any, ...] = ()
    exact: bool = False  # without the approximation of a graph


class Engine(Protocol):
    """A collection in a folder or on a server.

    Changes are durable once a method has returned. The methods that begin with an underscore take
    and return objects of the client's package, and the others are shared by both engines.

    Attributes:
        place: where the collection is, for messages.
        api: module with the classes of requests.
        point_type: class of a point.
        range_type: class of a range of numbers.
        prefetch_argument: name of the argument of a request for its earlier stages.
        batch_queries: queries of a call.
    """

    place: str
    api: ModuleType
    point_type: Make
    range_type: Make
    prefetch_argument: str
    batch_queries: int

    def record(self) -> Record | None: ...  # None where there is no collection
    def create(self, record: Record) -> None: ...  # empty, with indexes of its fields
    def write_record(self, record: Record) -> None: ...
    def drop(self) -> None: ...
    def delete(self, keys: Sequence[str]) -> None: ...
    def optimize(self) -> None: ...  # make the final index of what was added
    def close(self) -> None: ...
    def _put(self, points: Sequence[object]) -> None: ...
    def _get(self, keys: list[str], vectors: bool) -> list[Any]: ...
    def _page(self, offset: object) -> tuple[list[Any], Any]: ...
    def _count(self, condition: object) -> int: ...
    def _query_batch(self, requests: Sequence[object]) -> list[Any]: ...
    def _query_arguments(self, stage: Stage) -> Json: ...

    def _vector_params(
        self,
        layout: Layout,
        kind: Make,
        dot: object,
        cosine: object,
        **maxsim: object,
    ) -> Json:
        vectors = {}
        if layout.dense is not None:
            vectors[DENSE] = kind(
                size=layout.dense,
                distance=dot if layout.distance == "dot" else cosine,
            )
        if layout.tokens is not None:
            vectors[TOKENS] = kind(size=layout.tokens, distance=dot, **maxsim)
        return vectors

    def upsert(self, points: Sequence[Point]) -> None:
        self._put(
            [
                self.point_type(
                    id=key,
                    vector={n: self._vector(n, v) for n, v in vectors.items()},
                    payload=payload,
                )
                for key, payload, vectors in points
            ],
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
        """Ids and scores for each last stage; only documents that match `where` are in any of its
        stages.
        """
        answers: list[list[tuple[str, float]]] = []
        kind, chosen = self.api.QueryRequest, self._filter(where)
        for start in range(0, len(stages), self.batch_queries):
            part = stages[start : start + self.batch_queries]
            found = self._query_batch(
                [self._request(kind, stage, chosen, with_payload=[ID]) for stage in part],
            )
            answers += [
                [(point.payload[ID], float(point.score)) for point in answer] for answer in found
            ]
        return answers

    def _request(self, kind: Make, stage: Stage, chosen: object, **more: object) -> object:
        earlier = [self._request(self.api.Prefetch, part, chosen) for part in stage.stages]
        params = self.api.SearchParams(exact=True) if stage.exact else None
        more |= {self.prefetch_argument: earlier or None, **self._query_arguments(stage)}
        return kind(limit=stage.limit, filter=chosen, params=params, **more)

    def _vector(self, name: str, vector: Any) -> object:
        return (
            self.api.SparseVector(indices=vector[0], values=vector[1]) if name == SPARSE else vector
        )

    def _filter(self, where: Filter | None) -> object:
        if where is None:
            return None
        must, must_not = ([self._condition(*item) for item in part] for part in where.conditions())
        return self.api.Filter(must=must or None, must_not=must_not or None)

    def _condition(self, name: str, values: Wanted) -> object:
        if not values:
            return self._empty(name)
        if isinstance(values, dict):
            return self._in_range(name, values)
        match = self._match(values[0]) if len(values) == 1 else self.api.MatchAny(any=values)
        return self.api.FieldCondition(key=name, match=match)

    def _in_range(self, name: str, bounds: Bounds) -> object:
        """Condition on a field whose numbers satisfy all bounds.

        Qdrant rounds integers to float64 before it compares them with a range. Those that would
        change sides are matched, or excluded, by their exact values.
        """
        exact = rounded_range(bounds)
        alternatives = []
        if exact.interval is not None:
            alternatives.append(self._in_interval(name, *exact.interval))
        if exact.integers:
            alternatives.append(self._one_of(name, exact.integers))
        for value, excluded in exact.boundaries:
            boundary = self.api.Filter(
                must=[self._in_interval(name, value, value)],
                must_not=[self._one_of(name, excluded)],
            )
            alternatives.append(boundary)
        if not alternatives:
            return self._one_of(name, [])  # matches nothing
        return alternatives[0] if len(alternatives) == 1 else self.api.Filter(should=alternatives)

    def _in_interval(self, name: str, low: float, high: float) -> object:
        interval = self.range_type(
            gte=low if math.isfinite(low) else None,  # JSON has no infinity
            lte=high if math.isfinite(high) else None,
        )
        return self.api.FieldCondition(key=name, range=interval)

    def _one_of(self, name: str, integers: list[int]) -> object:
        return self.api.FieldCondition(key=name, match=self.api.MatchAny(any=integers))

    def _empty(self, name: str) -> object:
        return self.api.IsEmptyCondition(is_empty=self.api.PayloadField(key=name))

    def _match(self, value: object) -> object:
        return self.api.MatchValue(value=value)


def last_stage(
    vectors: Json,
    k: int,
    fusion: str | None,
    rerank: bool,
    depth: int,
    rank_constant: int,
    exact: bool,
) -> Stage | None:
    """The last stage of a query; None where it has no vector to start from."""
    tokens = vectors.pop(TOKENS, None) if rerank else None
    limit = depth if fusion is not None or rerank else k
    firsts = [
        Stage(limit, kind, vector, exact=exact and kind != SPARSE)
        for kind, vector in vectors.items()
    ]
    if not firsts or (rerank and tokens is None):
        return None
    stage = firsts[0]
    if fusion is not None:
        stage = Stage(
            depth if rerank else k,
            fusion=fusion,
            rank_constant=rank_constant,
            stages=tuple(firsts),
        )
    if rerank:
        return Stage(k, TOKENS, tokens, stages=(stage,))
    return stage._replace(limit=k + 1) if stage.using == SPARSE else stage
