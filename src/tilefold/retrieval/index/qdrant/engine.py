"""Layout and record of a collection in Qdrant, and the interface that both clients implement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from tilefold._internal.arguments import ArgumentError, check_choice, check_count, check_mapping
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.data.metadata import Condition, Filter, check_field
from tilefold.retrieval.data.numbers import Bounds, rounded_range
from tilefold.retrieval.errors import ArgumentDataError, DataError
from tilefold.retrieval.vectors.sparse import check_same_vocabulary

SCHEMA_VERSION = 1
WEIGHTS = ("float32", "float16")
DISTANCES = ("dot", "cosine")
FIELDS = ("keyword", "integer", "float", "bool", "text")
# Field of the payload with the document's id, because Qdrant's own ids are numbers or UUIDs.
ID = "_id"
# Names of the kinds of vectors.
SPARSE = "sparse"
DENSE = "dense"
TOKENS = "tokens"
# A class of a client's package.
ClientType = Callable[..., object]


@dataclass(frozen=True)
class Layout:
    """Kinds and sizes of the vectors of a collection: any of sparse, dense and token vectors.

    Attributes:
        vocab_size: number of terms of the sparse vectors; None without sparse vectors.
        fingerprint: of their vocabulary, as in ``SparseVectors``.
        dense: length of the dense vectors, or None.
        tokens: length of a token vector (late interaction), or None.
        weights: how sparse weights are stored, ``"float32"`` or ``"float16"``.
        distance: of dense vectors, ``"dot"`` or ``"cosine"``.
        fields: fields of the payload that have an index, for fast filters -> one of keyword,
            integer, float, bool, text.
        models: of ``"sparse"``, ``"dense"`` and ``"tokens"`` -> fingerprint of the model, as far as
            it is known.
        passages: how documents were divided into passages (:class:`tilefold.retrieval.Passages`);
            None for whole documents.

    Raises:
        ValueError: without any vectors, or for a wrong value.
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
        """Raise ``ValueError`` for a wrong value, or if there are no vectors."""
        if self.vocab_size is not None:
            check_count("vocab_size", self.vocab_size)
        if self.dense is not None:
            check_count("dense", self.dense)
        if self.tokens is not None:
            check_count("tokens", self.tokens)
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
        """Kind of vectors -> their length, None for a kind that the collection lacks."""
        return {SPARSE: self.vocab_size, DENSE: self.dense, TOKENS: self.tokens}

    @property
    def kinds(self) -> list[str]:
        """Kinds of vectors of the collection, of ``"sparse"``, ``"dense"`` and ``"tokens"``."""
        return [kind for kind, size in self.sizes.items() if size is not None]

    def check_same(self, other: Layout, place: str) -> None:
        """Raise an error unless the layout of a collection equals the one that a caller expects.

        Fingerprints are compared where both layouts have them. Fields of the payload may differ.

        Args:
            other: layout that the caller expects.
            place: folder or address of the collection, for the error.

        Raises:
            VocabularyMismatchError: for another vocabulary.
            DataError: for other vectors, models or passages.
        """
        check_same_vocabulary(self, other, place, "layout")
        for name in ("dense", "tokens", "weights", "distance", "passages"):
            expected = getattr(self, name)
            actual = getattr(other, name)
            if expected != actual:
                raise DataError(
                    f"layout: expected {name}={expected!r} as in {place}, got {actual!r}. "
                    "Choose another.",
                )
        check_models(self.models, other.models, place)


def check_models(
    collection_models: Mapping[str, str],
    models: Mapping[str, str],
    place: str,
) -> None:
    """Raise ``DataError`` if vectors were made by another model than those of a collection.

    A kind of vectors whose model is unknown on one side is not compared.

    Args:
        collection_models: kind of vectors -> fingerprint of the model, of the collection.
        models: kind of vectors -> fingerprint of the model, of the vectors.
        place: folder or address of the collection, for the error.
    """
    for kind, model in models.items():
        collection_model = collection_models.get(kind, model)
        if collection_model != model:
            raise ArgumentDataError(
                "documents",
                f"expected {kind} vectors of the model that made {place} "
                f"({collection_model[:12]}), got those of another ({model[:12]}). "
                "Encode with the same model, or choose another collection.",
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
        """Read a record from the result of :meth:`to_dict`.

        Args:
            value: the JSON object.
            place: where the collection is, for errors.

        Raises:
            DataError: for a record of another schema, or a damaged one.
        """
        remedy = "Build the index again (tilefold index), or update tilefold."
        schema = value.get("schema_version")
        if schema != SCHEMA_VERSION:
            raise DataError(
                f"{place}: expected a collection of schema {SCHEMA_VERSION}, got {schema!r}. "
                f"{remedy}",
            )
        try:
            # Fields that another version added are ignored.
            layout_names = {field.name for field in fields(Layout)}
            layout_values = {
                name: item for name, item in value["layout"].items() if name in layout_names
            }
            return cls(
                layout=Layout(**layout_values),
                texts_sha256=value["texts_sha256"],
                vectors_sha256=value["vectors_sha256"],
                complete=bool(value["complete"]),
                precisions=dict(value.get("precisions", {})),
                kinds=None if value.get("kinds") is None else dict(value["kinds"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"{place}: expected the record of a collection, got {dict(value)!r:.80} "
                f"({error!r}). {remedy}",
            ) from error


class Point(NamedTuple):
    """A document as an engine stores it.

    Attributes:
        key: UUID of the document.
        payload: fields of the document, with its id as :data:`ID`.
        vectors: kind -> vector: sparse as (indices, weights), dense as a list ``[D]``, and tokens
            as a list ``[n, D]``.
    """

    key: str
    payload: Json
    vectors: Json


class Stage(NamedTuple):
    """A ranking by a vector, or by the fusion of earlier rankings.

    Attributes:
        limit: documents of the ranking.
        using: kind of the vectors that are compared; empty for a fusion.
        vector: of the query, as in :class:`Point`.
        fusion: ``"rrf"`` or ``"dbsf"`` of `stages`; empty for a ranking by a vector.
        rank_constant: of ``"rrf"``, for ranks from 1.
        stages: earlier rankings, whose documents are ranked. Empty to rank all documents.
        exact: whether dense vectors are compared without the approximation of a graph.
    """

    limit: int
    using: str = ""
    vector: object = None
    fusion: str = ""
    rank_constant: int = 60
    stages: tuple[Any, ...] = ()
    exact: bool = False


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
    point_type: ClientType
    range_type: ClientType
    prefetch_argument: str
    batch_queries: int

    def record(self) -> Record | None:
        """Read the record.

        The result is None if there is no collection.
        """
        ...

    def create(self, record: Record) -> None:
        """Create an empty collection, with indexes of its fields."""
        ...

    def write_record(self, record: Record) -> None: ...
    def drop(self) -> None: ...
    def delete(self, keys: Sequence[str]) -> None: ...
    def optimize(self) -> None:
        """Build the final index of documents that were added."""
        ...

    def close(self) -> None: ...
    def _put(self, points: Sequence[object]) -> None: ...
    def _get(self, keys: list[str], vectors: bool) -> list[Any]: ...
    def _page(self, offset: object) -> tuple[list[Any], Any]: ...
    def _count(self, client_filter: object) -> int: ...
    def _query_batch(self, requests: Sequence[object]) -> list[Any]: ...
    def _query_arguments(self, stage: Stage) -> Json: ...

    def _vector_params(
        self,
        layout: Layout,
        params_type: ClientType,
        dot: object,
        cosine: object,
        **maxsim: object,
    ) -> Json:
        """Return the parameters of dense and token vectors, by kind.

        Args:
            layout: of the collection.
            params_type: class of parameters of the embedded engine or of the server's client.
            dot: value by which this client names dot products.
            cosine: value by which this client names cosines.
            maxsim: further parameters of token vectors, which are compared by MaxSim.

        Returns:
            ``"dense"`` and ``"tokens"`` -> parameters, for the kinds that the layout has.
        """
        params = {}
        if layout.dense is not None:
            distance = dot if layout.distance == "dot" else cosine
            params[DENSE] = params_type(size=layout.dense, distance=distance)
        if layout.tokens is not None:
            params[TOKENS] = params_type(size=layout.tokens, distance=dot, **maxsim)
        return params

    def upsert(self, points: Sequence[Point]) -> None:
        """Add documents, or replace documents of the same keys."""
        client_points = []
        for point in points:
            vectors = {kind: self._vector(kind, vector) for kind, vector in point.vectors.items()}
            client_points.append(
                self.point_type(id=point.key, vector=vectors, payload=point.payload),
            )
        self._put(client_points)

    def fetch(self, keys: Sequence[str], vectors: bool) -> list[Point]:
        """Read documents with their payloads.

        Args:
            keys: keys of the documents. Keys without a document are ignored.
            vectors: whether to read the vectors too.

        Returns:
            The documents that exist, in any order.
        """
        points = []
        for record in self._get(list(keys), vectors):
            vector_by_kind = dict(record.vector or {})
            if SPARSE in vector_by_kind:
                sparse = vector_by_kind[SPARSE]
                vector_by_kind[SPARSE] = (list(sparse.indices), list(sparse.values))
            points.append(Point(str(record.id), dict(record.payload or {}), vector_by_kind))
        return points

    def ids(self) -> Iterator[str]:
        """Iterate over the ids of all documents, page by page."""
        records, offset = self._page(None)
        yield from (record.payload[ID] for record in records)
        while offset is not None:
            records, offset = self._page(offset)
            yield from (record.payload[ID] for record in records)

    def count(self, where: Filter | None) -> int:
        return self._count(self._filter(where))

    def query(self, stages: Sequence[Stage], where: Filter | None) -> list[list[tuple[str, float]]]:
        """Rank documents for several queries.

        Args:
            stages: the last stage of each query, which contains the earlier ones.
            where: filter of the documents in every stage.

        Returns:
            Ids and scores of documents for each query, best first.
        """
        client_filter = self._filter(where)
        results: list[list[tuple[str, float]]] = []
        for start in range(0, len(stages), self.batch_queries):
            requests = [
                self._request(self.api.QueryRequest, stage, client_filter, with_payload=[ID])
                for stage in stages[start : start + self.batch_queries]
            ]
            for points in self._query_batch(requests):
                results.append([(point.payload[ID], float(point.score)) for point in points])
        return results

    def _request(
        self,
        request_type: ClientType,
        stage: Stage,
        client_filter: object,
        **options: object,
    ) -> object:
        """Convert a stage of a search, with its earlier stages, to a request of the client.

        Qdrant names the earlier stages of a request its prefetches.

        Args:
            request_type: the client's class: ``QueryRequest`` for the last stage, or ``Prefetch``.
            stage: the stage.
            client_filter: filter of the documents, in the client's type.
            options: further arguments of the request.
        """
        earlier_stages = [
            self._request(self.api.Prefetch, earlier_stage, client_filter)
            for earlier_stage in stage.stages
        ]
        options[self.prefetch_argument] = earlier_stages or None
        return request_type(
            limit=stage.limit,
            filter=client_filter,
            params=self.api.SearchParams(exact=True) if stage.exact else None,
            **options,
            **self._query_arguments(stage),
        )

    def _vector(self, kind: str, vector: Any) -> object:
        """Convert a vector of a :class:`Point`."""
        if kind != SPARSE:
            return vector
        indices, weights = vector
        return self.api.SparseVector(indices=indices, values=weights)

    def _filter(self, where: Filter | None) -> object:
        """Convert a filter."""
        if where is None:
            return None
        required, excluded = where.conditions()
        must = [self._condition(name, condition) for name, condition in required]
        must_not = [self._condition(name, condition) for name, condition in excluded]
        return self.api.Filter(must=must or None, must_not=must_not or None)

    def _condition(self, name: str, condition: Condition) -> object:
        """Convert the condition on a field: no value, a range, one value or several."""
        if not condition:
            return self._empty(name)
        if isinstance(condition, dict):
            return self._in_range(name, condition)
        if len(condition) == 1:
            match = self._match(condition[0])
        else:
            match = self.api.MatchAny(any=condition)
        return self.api.FieldCondition(key=name, match=match)

    def _in_range(self, name: str, bounds: Bounds) -> object:
        """Create the condition that a number of a field satisfies all bounds.

        Qdrant rounds integers to float64 before it compares them with a range. A large integer near
        a bound may thereby move to the other side of it. Such integers are matched, or excluded, by
        their exact values.

        Args:
            name: name of the field.
            bounds: operators and limits.
        """
        exact = rounded_range(bounds)
        alternatives = []
        if exact.interval is not None:
            alternatives.append(self._in_interval(name, *exact.interval))
        if exact.integers:
            alternatives.append(self._one_of(name, exact.integers))
        for value, excluded in exact.boundaries:
            # All numbers that round to `value`, without the integers that violate a bound.
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
    """Plan the stages of a query.

    Args:
        vectors: kind -> vector of the query, as in :class:`Point`. Its token vectors are removed if
            they rerank.
        k: documents of the result.
        fusion: see :meth:`QdrantCollection.search`, as for the other options.
        rerank: whether token vectors rerank the result of the other vectors.
        depth: documents of a ranking that is fused or reranked.
        rank_constant: of the fusion ``"rrf"``.
        exact: whether all dense vectors are compared.

    Returns:
        The last stage, or None for a query without a vector to begin with.
    """
    tokens = vectors.pop(TOKENS, None) if rerank else None
    limit = depth if fusion is not None or rerank else k
    first_stages = tuple(
        Stage(limit, kind, vector, exact=exact and kind != SPARSE)
        for kind, vector in vectors.items()
    )
    if not first_stages or (rerank and tokens is None):
        return None
    stage = first_stages[0]
    if fusion is not None:
        stage = Stage(
            depth if rerank else k,
            fusion=fusion,
            rank_constant=rank_constant,
            stages=first_stages,
        )
    if rerank:
        return Stage(k, TOKENS, tokens, stages=(stage,))
    if stage.using == SPARSE:
        # One document more, which shows whether others share the last score.
        return stage._replace(limit=k + 1)
    return stage
