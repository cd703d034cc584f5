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
        fingerprint: digest of the vocabulary of the sparse vectors; None if it is unknown.
        dense: dimension of the dense vectors; None without dense vectors.
        tokens: dimension of the token vectors (late interaction); None without token vectors.
        weights: how sparse weights are stored, ``"float32"`` or ``"float16"``.
        distance: similarity of dense vectors, ``"dot"`` or ``"cosine"``.
        fields: field of the payload that has an index, for fast filters -> one of keyword, integer,
            float, bool, text.
        models: kind of vectors (``"sparse"``, ``"dense"`` or ``"tokens"``) -> fingerprint of the
            model, if it is known.
        passages: how documents were divided into passages (:class:`tilefold.retrieval.Passages`);
            None for whole documents.

    Raises:
        ValueError: if there is no kind of vectors, or if a value is wrong.
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
        """Raise ``ArgumentError`` if there is no kind of vectors, or if a value is wrong."""
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
            if name == ID:
                raise ArgumentError(
                    "fields",
                    f"expected names other than {ID!r}, which is reserved for the document's id.",
                )
            if kind not in FIELDS:
                raise ArgumentError(
                    "fields",
                    f"expected one of {', '.join(FIELDS)} for the field {name!r}, got {kind!r}.",
                )
            check_field(name, "fields")

    @property
    def sizes(self) -> dict[str, int | None]:
        """Kind of vectors -> their dimension; None for a kind that the collection does not have."""
        return {SPARSE: self.vocab_size, DENSE: self.dense, TOKENS: self.tokens}

    @property
    def kinds(self) -> list[str]:
        """Kinds of vectors of the collection, such as ``["sparse", "dense"]``."""
        return [kind for kind, size in self.sizes.items() if size is not None]

    def check_same(self, requested: Layout, location: str) -> None:
        """Raise an error if the layout of a collection differs from the one that a caller requests.

        Fingerprints are compared if both layouts have one. Fields of the payload may differ.

        Args:
            requested: the layout that the caller requests.
            location: folder or address of the collection, for the error.

        Raises:
            VocabularyMismatchError: if the vocabularies differ.
            DataError: if the vectors, models or passages differ.
        """
        check_same_vocabulary(self, requested, location, "layout")
        for name in ("dense", "tokens", "weights", "distance", "passages"):
            stored_value = getattr(self, name)
            requested_value = getattr(requested, name)
            if requested_value != stored_value:
                raise DataError(
                    f"layout: expected {name}={stored_value!r} as in {location}, got "
                    f"{requested_value!r}. Use that layout, or another collection.",
                )
        check_models(self.models, requested.models, location)


def check_models(
    collection_models: Mapping[str, str],
    models: Mapping[str, str],
    location: str,
) -> None:
    """Raise ``ArgumentDataError`` if vectors were made by a different model than the collection's.

    A kind of vectors whose model is unknown is not compared.

    Args:
        collection_models: kind of vectors -> fingerprint of the collection's model.
        models: kind of vectors -> fingerprint of the model that made the new vectors.
        location: folder or address of the collection, for the error.
    """
    for kind, model in models.items():
        if kind in collection_models and collection_models[kind] != model:
            raise ArgumentDataError(
                "documents",
                f"expected {kind} vectors of the model that made {location} "
                f"({collection_models[kind][:12]}), got those of another model ({model[:12]}). "
                "Encode with the same model, or choose another collection.",
            )


@dataclass(frozen=True)
class Record:
    """Description of a collection, which is stored with it.

    Attributes:
        layout: layout of the collection.
        texts_sha256: digest of the texts of a build; None after individual documents have been
            changed.
        vectors_sha256: digest of the input of a build, by which it is resumed; None after
            individual documents have been changed.
        complete: whether no build is unfinished.
        precisions: kind of vectors -> number types in which they were computed, such as ``"bf16"``
            or ``"bf16, fp32"``, if they are known.
        kinds: field of the payload -> types of its values in all documents that were ever stored;
            None if the collection was created by a version that did not record them.
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
    def from_dict(cls, value: Json, location: str) -> Record:
        """Read a record from the result of :meth:`to_dict`.

        Args:
            value: the JSON object.
            location: folder or address of the collection, for errors.

        Raises:
            DataError: if the record is damaged or has another schema.
        """
        remedy = "Build the index again (tilefold index), or update tilefold."
        schema = value.get("schema_version")
        if schema != SCHEMA_VERSION:
            raise DataError(
                f"{location}: expected a collection of schema {SCHEMA_VERSION}, got {schema!r}. "
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
                f"{location}: expected the record of a collection, got {dict(value)!r:.80} "
                f"({error!r}). {remedy}",
            ) from error


class Point(NamedTuple):
    """A document as an engine stores it.

    Attributes:
        key: UUID of the document.
        payload: fields of the document, with its id as :data:`ID`.
        vectors: kind -> vector. A sparse vector is a pair of indices and weights, a dense vector is
            a list ``[D]``, and token vectors are a list ``[n, D]``.
    """

    key: str
    payload: Json
    vectors: Json


class Stage(NamedTuple):
    """A stage of a search: a ranking by a vector, or by the fusion of earlier rankings.

    Attributes:
        limit: number of documents of the ranking.
        using: kind of the vectors that are compared; empty for a fusion.
        vector: vector of the query, as in :class:`Point`.
        fusion: how the earlier rankings are fused, ``"rrf"`` or ``"dbsf"``; empty for a ranking by
            a vector.
        rank_constant: constant of ``"rrf"``, for ranks from 1.
        earlier: the stages before this one, whose documents are ranked. Empty to rank all
            documents.
        exact: whether dense vectors are compared with every document, without a graph.
    """

    limit: int
    using: str = ""
    vector: object = None
    fusion: str = ""
    rank_constant: int = 60
    earlier: tuple[Any, ...] = ()
    exact: bool = False


class Engine(Protocol):
    """A collection in a folder or on a server.

    Changes are durable once a method has returned. Methods that begin with an underscore take and
    return objects of the client, which is qdrant-edge or qdrant-client.

    Attributes:
        location: folder or address of the collection, for messages.
        api: the client's module with the classes of requests.
        point_type: the client's class of points.
        range_type: the client's class of ranges of numbers.
        prefetch_argument: name of the argument of the client's requests for earlier stages.
        batch_queries: number of queries of one call.
    """

    location: str
    api: ModuleType
    point_type: ClientType
    range_type: ClientType
    prefetch_argument: str
    batch_queries: int

    def read_record(self) -> Record | None:
        """Read the record of the collection; None if there is no collection."""
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
    def _get(self, keys: list[str], with_vectors: bool) -> list[Any]: ...
    def _page(self, offset: object) -> tuple[list[Any], Any]: ...
    def _count(self, client_filter: object) -> int: ...
    def _query_batch(self, requests: Sequence[object]) -> list[Any]: ...
    def _create_query_arguments(self, stage: Stage) -> Json: ...

    def _create_vector_params(
        self,
        layout: Layout,
        params_type: ClientType,
        *,
        distances: Mapping[str, object],
        maxsim_options: Mapping[str, object],
    ) -> Json:
        """Create the client's parameters of dense and token vectors.

        Args:
            layout: the layout of the collection.
            params_type: the client's class of parameters.
            distances: ``"dot"`` and ``"cosine"`` -> the client's value for this similarity.
            maxsim_options: parameters that only token vectors have.

        Returns:
            ``"dense"`` and ``"tokens"`` -> parameters, for the kinds that the layout has.
        """
        params = {}
        if layout.dense is not None:
            params[DENSE] = params_type(size=layout.dense, distance=distances[layout.distance])
        if layout.tokens is not None:
            # MaxSim is a sum of dot products.
            params[TOKENS] = params_type(
                size=layout.tokens,
                distance=distances["dot"],
                **maxsim_options,
            )
        return params

    def upsert(self, points: Sequence[Point]) -> None:
        """Add documents, or replace documents with the same keys."""
        client_points = []
        for point in points:
            vectors = {
                kind: self._convert_vector(kind, vector) for kind, vector in point.vectors.items()
            }
            client_points.append(
                self.point_type(id=point.key, vector=vectors, payload=point.payload),
            )
        self._put(client_points)

    def fetch(self, keys: Sequence[str], *, with_vectors: bool) -> list[Point]:
        """Read documents with their payloads.

        Args:
            keys: keys of the documents. Keys without a document are ignored.
            with_vectors: whether to read the vectors, too.

        Returns:
            The documents that exist, in any order.
        """
        points = []
        for record in self._get(list(keys), with_vectors):
            vector_by_kind = dict(record.vector or {})
            if SPARSE in vector_by_kind:
                # A point has a pair of indices and weights.
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
        return self._count(self._to_client_filter(where))

    def query(
        self,
        queries: Sequence[Stage],
        where: Filter | None,
    ) -> list[list[tuple[str, float]]]:
        """Rank documents for several queries.

        Args:
            queries: the last stage of each query, in which its earlier stages are nested.
            where: filter of the documents in every stage.

        Returns:
            Ids and scores of documents for each query, best first.
        """
        client_filter = self._to_client_filter(where)
        results: list[list[tuple[str, float]]] = []
        for start in range(0, len(queries), self.batch_queries):
            requests = [
                self._convert_stage(self.api.QueryRequest, stage, client_filter, with_payload=[ID])
                for stage in queries[start : start + self.batch_queries]
            ]
            for points in self._query_batch(requests):
                results.append([(point.payload[ID], float(point.score)) for point in points])
        return results

    def _convert_stage(
        self,
        request_type: ClientType,
        stage: Stage,
        client_filter: object,
        **options: object,
    ) -> object:
        """Convert a search stage and, recursively, the stages before it to a request of the client.

        Qdrant calls the stages before a stage its prefetches.

        Args:
            request_type: the client's class, ``QueryRequest`` for the last stage and ``Prefetch``
                for earlier stages.
            stage: the stage to convert.
            client_filter: filter of the documents, in the client's type.
            options: additional arguments of the request.
        """
        prefetches = [
            self._convert_stage(self.api.Prefetch, earlier_stage, client_filter)
            for earlier_stage in stage.earlier
        ]
        return request_type(
            limit=stage.limit,
            filter=client_filter,
            params=self.api.SearchParams(exact=True) if stage.exact else None,
            **{self.prefetch_argument: prefetches or None},
            **options,
            **self._create_query_arguments(stage),
        )

    def _convert_vector(self, kind: str, vector: Any) -> object:
        """Convert a vector of a :class:`Point` to the client's type."""
        if kind != SPARSE:
            return vector
        indices, weights = vector
        return self.api.SparseVector(indices=indices, values=weights)

    def _to_client_filter(self, where: Filter | None) -> object:
        """Convert a filter to the client's type; None for no filter."""
        if where is None:
            return None
        required, excluded = where.conditions()
        must = [self._convert_condition(name, condition) for name, condition in required]
        must_not = [self._convert_condition(name, condition) for name, condition in excluded]
        return self.api.Filter(must=must or None, must_not=must_not or None)

    def _convert_condition(self, name: str, condition: Condition) -> object:
        """Convert the condition on a field to the client's type.

        Args:
            name: the name of the field.
            condition: a range, a list of values, or an empty condition for no value.
        """
        if not condition:
            return self._create_empty_condition(name)
        if isinstance(condition, dict):
            return self._create_range_condition(name, condition)
        if len(condition) == 1:
            match = self._create_match(condition[0])
        else:
            match = self.api.MatchAny(any=condition)
        return self.api.FieldCondition(key=name, match=match)

    def _create_range_condition(self, name: str, bounds: Bounds) -> object:
        """Create the condition that a number of a field satisfies all bounds.

        Qdrant rounds integers to float64 before it compares them with a range, so a large integer
        can end up on the wrong side of a bound. Such integers are matched or excluded by their
        exact values. The condition is met if one of several alternatives is met.

        Args:
            name: the name of the field.
            bounds: operators and limits.
        """
        rounded = rounded_range(bounds)
        alternatives = []
        if rounded.interval is not None:
            # Numbers whose float64 is in the interval.
            alternatives.append(self._create_interval_condition(name, *rounded.interval))
        if rounded.integers:
            # Integers in the range whose float64 is not in the interval.
            alternatives.append(self._create_value_condition(name, rounded.integers))
        for value, excluded in rounded.boundaries:
            # Numbers that round to a limit, except the integers that are really out of range.
            boundary = self.api.Filter(
                must=[self._create_interval_condition(name, value, value)],
                must_not=[self._create_value_condition(name, excluded)],
            )
            alternatives.append(boundary)
        if not alternatives:
            # An empty list of values matches nothing.
            return self._create_value_condition(name, [])
        return alternatives[0] if len(alternatives) == 1 else self.api.Filter(should=alternatives)

    def _create_interval_condition(self, name: str, low: float, high: float) -> object:
        """Create the condition that a number of a field is in a closed interval."""
        # Requests are written as JSON, which has no infinity.
        interval = self.range_type(
            gte=low if math.isfinite(low) else None,
            lte=high if math.isfinite(high) else None,
        )
        return self.api.FieldCondition(key=name, range=interval)

    def _create_value_condition(self, name: str, integers: list[int]) -> object:
        """Create the condition that a field has one of some integers."""
        return self.api.FieldCondition(key=name, match=self.api.MatchAny(any=integers))

    def _create_empty_condition(self, name: str) -> object:
        """Create the condition that a field has no value."""
        return self.api.IsEmptyCondition(is_empty=self.api.PayloadField(key=name))

    def _create_match(self, value: object) -> object:
        """Create the client's object that matches one value."""
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
    """Plan the stages of a query: rankings by each kind of vectors, their fusion, and reranking.

    Args:
        vectors: kind -> vector of the query, as in :class:`Point`.
        k: number of documents of the result.
        fusion: how the rankings of several kinds of vectors are fused; None for one kind.
        rerank: whether token vectors rerank the result of the other vectors.
        depth: number of documents of a ranking that is fused or reranked.
        rank_constant: constant of the fusion ``"rrf"``.
        exact: whether dense vectors are compared with every document.

    Returns:
        The last stage, in which the earlier stages are nested. None if the query has no vector for
        the first stage.
    """
    tokens = vectors.get(TOKENS) if rerank else None
    has_later_stage = fusion is not None or rerank
    limit = depth if has_later_stage else k
    first_stages = tuple(
        Stage(limit, kind, vector, exact=exact and kind != SPARSE)
        for kind, vector in vectors.items()
        if not (rerank and kind == TOKENS)  # token vectors that rerank are in the last stage
    )
    if not first_stages or (rerank and tokens is None):
        return None
    stage = first_stages[0]
    if fusion is not None:
        stage = Stage(
            depth if rerank else k,
            fusion=fusion,
            rank_constant=rank_constant,
            earlier=first_stages,
        )
    if rerank:
        return Stage(k, TOKENS, tokens, earlier=(stage,))
    if stage.using == SPARSE:
        # One extra document shows whether more documents share the last score.
        return stage._replace(limit=k + 1)
    return stage
