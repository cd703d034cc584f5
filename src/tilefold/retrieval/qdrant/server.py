"""A collection on a Qdrant server, through qdrant-client over HTTP."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tilefold.retrieval._files import require
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.qdrant.filters import Condition, Filter
from tilefold.retrieval.qdrant.layout import DENSE, ID, SPARSE, TOKENS, Layout, Record
from tilefold.retrieval.qdrant.plans import Plan, Point, Stage

KEY_VARIABLE = "QDRANT_API_KEY"
_META = "tilefold"  # in the metadata of the collection, as one text: servers merge objects
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
_KEY = re.compile(r"[\x21-\x7e]+")
_BUSY = (429, 502, 503, 504)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds between attempts
_PAGE = 1000
_QUERIES = 32  # of one request

T = TypeVar("T")


class UnreachableError(ConnectionError):
    """A server did not answer in time."""


class ServerEngine:
    """The collection `name` of a server.

    A request has `timeout` seconds. Where the server cannot be reached, or says that it is busy, it is asked again with
    growing pauses, and given up `patience` seconds after the first attempt began: a request takes
    ``timeout + patience`` at most. All of them may be repeated, as points have ids of their own.

    Args:
        url: ``http://host:6333`` or ``https://...``, without a key in it.
        name: letters, digits, ``.``, ``_`` and ``-``.
        api_key: by default what the environment has as ``QDRANT_API_KEY``. It is never part of a message or of a file.

    Raises:
        MissingPackageError: qdrant-client is not installed.
        ValueError: an argument of another form.
    """

    def __init__(
        self, url: str, name: str, api_key: str | None = None, timeout: float = 30.0, patience: float = 20.0
    ) -> None:
        self._package = require("qdrant_client", "qdrant-client", "A collection on a Qdrant server", "qdrant")
        if not _NAME.fullmatch(name):
            raise ValueError(f"name: expected letters, digits, '.', '_' or '-', got {name!r}.")
        for option, value, low in (("timeout", timeout, 0.0), ("patience", patience, -1.0)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value < 1e6:
                raise ValueError(f"{option}: expected seconds above {max(low, 0):.0f}, got {value!r}.")
        self.url, self.name, self.place = _checked_url(url), name, f"collection {name!r} at {_checked_url(url)}"
        self._key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE) or None
        if self._key is not None and not _KEY.fullmatch(self._key):
            raise ValueError(
                f"api_key: expected printable ASCII without spaces (or in {KEY_VARIABLE}), got other text."
            )
        self._patience, self._timeout = patience, timeout
        self._client = self._open()
        self._models: Any = self._package.models

    def _open(self) -> Any:
        parts = urlsplit(self.url)
        headers = {"api-key": self._key} if self._key else None
        if headers and parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
            warnings.warn(f"{self.url}: the API key is sent without encryption. Use https.", stacklevel=4)
        return self._package.QdrantClient(
            url=self.url,
            port=parts.port or (443 if parts.scheme == "https" else 6333),
            timeout=max(1, round(self._timeout)),
            headers=headers,
            check_compatibility=False,
        )

    def record(self) -> Record | None:
        """What the collection says of itself; None where there is none.

        Raises:
            DataError: a collection that tilefold did not make.
        """
        if not self._ask(lambda: self._client.collection_exists(self.name)):
            return None
        found = self._ask(lambda: self._client.get_collection(self.name))
        metadata = getattr(found.config, "metadata", None) or {}
        if _META not in metadata:
            raise DataError(
                f"{self.place}: expected a collection that tilefold made, got one that says nothing of its vocabulary. "
                "Choose another name; nothing was changed. (Qdrant keeps what it says from version 1.16 on.)"
            )
        try:
            value = json.loads(metadata[_META])
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{self.place}: expected the record of a collection, got another ({error}).") from error
        return Record.from_dict(value if isinstance(value, dict) else {}, self.place)

    def create(self, record: Record) -> None:
        """An empty collection, with indexes of its fields."""
        models, layout = self._models, record.layout
        vectors: dict[str, Any] = {}
        if layout.dense is not None:
            distance = models.Distance.DOT if layout.distance == "dot" else models.Distance.COSINE
            vectors[DENSE] = models.VectorParams(size=layout.dense, distance=distance)
        if layout.tokens is not None:
            vectors[TOKENS] = models.VectorParams(
                size=layout.tokens,
                distance=models.Distance.DOT,
                multivector_config=models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM),
                hnsw_config=models.HnswConfigDiff(m=0),  # no graph: MaxSim is exact
            )
        sparse = None
        if layout.vocab_size is not None:
            index = models.SparseIndexParams(datatype=models.Datatype(layout.weights))
            sparse = {SPARSE: models.SparseVectorParams(index=index)}
        self._ask(
            lambda: self._client.create_collection(
                self.name,
                vectors_config=vectors,
                sparse_vectors_config=sparse,
                metadata={_META: json.dumps(record.to_dict())},
            ),
            exists_is_fine=True,
        )
        if self.record() is None:
            raise DataError(f"{self.place}: was created and is not there. Is another program removing it?")
        for name, schema in layout.fields.items():
            self._ask(lambda name=name, schema=schema: self._client.create_payload_index(self.name, name, schema))  # type: ignore[misc]

    def write_record(self, record: Record) -> None:
        """Replace what the collection says of itself."""
        self._ask(lambda: self._client.update_collection(self.name, metadata={_META: json.dumps(record.to_dict())}))

    def drop(self) -> None:
        """Remove the collection."""
        self._ask(lambda: self._client.delete_collection(self.name))

    def upsert(self, points: Sequence[Point]) -> None:
        """Add or replace points, and wait until that is done."""
        models = self._models
        made = [
            models.PointStruct(id=point.key, vector=self._vectors(point.vectors), payload=point.payload)
            for point in points
        ]
        self._ask(lambda: self._client.upsert(self.name, made, wait=True))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove points, and wait until that is done."""
        chosen = self._models.PointIdsList(points=list(keys))
        self._ask(lambda: self._client.delete(self.name, points_selector=chosen, wait=True))

    def fetch(self, keys: Sequence[str], vectors: bool) -> list[Point]:
        """Those of the points that there are, in any order."""
        found = self._ask(lambda: self._client.retrieve(self.name, list(keys), with_payload=True, with_vectors=vectors))
        return [_point(record) for record in found]

    def scroll(self) -> Iterator[Point]:
        """All points, without vectors and with their ids alone."""
        offset: Any = None
        while True:
            page, offset = self._ask(
                lambda offset=offset: self._client.scroll(  # type: ignore[misc]
                    self.name, limit=_PAGE, offset=offset, with_payload=[ID], with_vectors=False
                )
            )
            yield from (_point(record) for record in page)
            if offset is None:
                return

    def count(self, where: Filter | None) -> int:
        """How many points match."""
        chosen = self._filter(where)
        return int(self._ask(lambda: self._client.count(self.name, count_filter=chosen, exact=True)).count)

    def query(self, plans: Sequence[Plan], layout: Layout) -> list[list[tuple[str, float]]]:
        """Ids and scores for each plan."""
        answers: list[list[tuple[str, float]]] = []
        for start in range(0, len(plans), _QUERIES):
            requests = [self._request(plan) for plan in plans[start : start + _QUERIES]]
            found = self._ask(lambda requests=requests: self._client.query_batch_points(self.name, requests))  # type: ignore[misc]
            answers += [[(point.payload[ID], float(point.score)) for point in answer.points] for answer in found]
        return answers

    def optimize(self) -> None:
        """Nothing: a server does that by itself."""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _vectors(self, vectors: dict[str, Any]) -> dict[str, Any]:
        sparse = vectors.get(SPARSE)
        return vectors if sparse is None else {**vectors, SPARSE: self._sparse(sparse)}

    def _sparse(self, vector: Any) -> Any:
        return self._models.SparseVector(indices=vector[0], values=vector[1])

    def _request(self, plan: Plan) -> Any:
        return self._stage(self._models.QueryRequest, plan.stage, self._filter(plan.where), with_payload=[ID])

    def _stage(self, kind: Any, stage: Stage, chosen: Any, **more: Any) -> Any:
        return kind(
            prefetch=[self._stage(self._models.Prefetch, part, chosen) for part in stage.stages] or None,
            query=self._scoring(stage),
            using=stage.using or None,
            filter=chosen,
            params=self._models.SearchParams(exact=True) if stage.exact else None,
            limit=stage.limit,
            **more,
        )

    def _scoring(self, stage: Stage) -> Any:
        models = self._models
        if stage.fusion == "rrf":  # its ranks start at 0
            return models.RrfQuery(rrf=models.Rrf(k=stage.rank_constant + 1))
        if stage.fusion:
            return models.FusionQuery(fusion=models.Fusion.DBSF)
        return models.NearestQuery(nearest=self._sparse(stage.vector) if stage.using == SPARSE else stage.vector)

    def _filter(self, where: Filter | None) -> Any:
        if where is None:
            return None
        must, must_not = ([self._condition(item) for item in where.conditions(must)] for must in (True, False))
        return self._models.Filter(must=must or None, must_not=must_not or None)

    def _condition(self, condition: Condition) -> Any:
        models = self._models
        if condition.values is None:
            return models.FieldCondition(key=condition.name, range=models.Range(**(condition.bounds or {})))
        single = len(condition.values) == 1
        match = models.MatchValue(value=condition.values[0]) if single else models.MatchAny(any=condition.values)
        return models.FieldCondition(key=condition.name, match=match)

    def _ask(self, request: Callable[[], T], exists_is_fine: bool = False) -> T | Any:
        """The answer to `request`, asked again while the server is away or busy, until patience ends."""
        started, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return request()
            except Exception as error:
                status = _status(error)
                if exists_is_fine and status == 409:
                    return None
                if status is None and not _is_transport(error):
                    if type(error).__name__ != "ResponseHandlingException":
                        raise
                    raise RuntimeError(
                        f"{self.place}: expected the answers of a Qdrant server, got others ({self._text(error)}). "
                        "Is it the right address?"
                    ) from None
                waited = time.monotonic() - started
                if status is not None and status not in _BUSY:
                    raise self._refusal(status, error) from None
                if waited + pause > self._patience:
                    raise UnreachableError(
                        f"{self.place}: no answer from the Qdrant server after {waited:.1f} s ({self._text(error)}). "
                        "Is it running there, and reachable from here? What was reported as done before is kept; the "
                        "same call goes on from there."
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _refusal(self, status: int, error: Exception) -> Exception:
        if status in (401, 403):
            how = f"the key given (api_key, or {KEY_VARIABLE})" if self._key else f"no key; set {KEY_VARIABLE}"
            return PermissionError(
                f"{self.place}: the Qdrant server answered {status} to {how}. Ask for a key with access."
            )
        if status == 404:
            return FileNotFoundError(
                f"{self.place}: there is no such collection, or no Qdrant server. Build it (tilefold index)."
            )
        return RuntimeError(f"{self.place}: the Qdrant server answered {status}: {self._text(error)}")

    def _text(self, error: BaseException) -> str:
        """What an error says, in one line and without the key."""
        source = getattr(error, "source", None)
        content = getattr(error, "content", None)
        text = content.decode("utf-8", "replace") if isinstance(content, bytes) and content else str(source or error)
        text = " ".join(text.split()) or type(source or error).__name__
        return (text.replace(self._key, "***") if self._key else text)[:300]


def _status(error: BaseException) -> int | None:
    if type(error).__name__ == "ResourceExhaustedResponse":
        return 429
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _is_transport(error: BaseException) -> bool:
    """Whether no answer came, rather than one that makes no sense."""
    source = getattr(error, "source", error)
    return isinstance(source, OSError) or type(source).__module__.partition(".")[0] in ("httpx", "httpcore")


def _point(record: Any) -> Point:
    vectors = dict(record.vector or {})
    if SPARSE in vectors:
        vectors[SPARSE] = (list(vectors[SPARSE].indices), list(vectors[SPARSE].values))
    return Point(str(record.id), dict(record.payload or {}), vectors)


def _checked_url(url: str) -> str:
    parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
    if parts.username or parts.password or parts.query:
        raise ValueError(f"url: expected an address without a key in it; give that as {KEY_VARIABLE} or api_key.")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url: expected http://host:6333 or https://host, got {url!r}.")
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
