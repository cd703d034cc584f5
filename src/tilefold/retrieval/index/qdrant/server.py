"""A collection on a Qdrant server, through qdrant-client over HTTP."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tilefold._internal.arguments import ArgumentError
from tilefold.retrieval.common.files import Json, require
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.qdrant.engine import ID, SPARSE, Engine, Record, Stage

KEY_VARIABLE = "QDRANT_API_KEY"
_META = "tilefold"  # in the metadata of the collection, as one text: servers merge objects
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
_KEY = re.compile(r"[\x21-\x7e]+")
_BUSY, _CONFLICT = (429, 502, 503, 504), 409
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds between attempts
_PAGE = 1000


class UnreachableError(ConnectionError):
    """A server did not answer in time."""


class _ExistsError(RuntimeError):
    """A collection of that name is there already."""


class ServerEngine(Engine):
    """The collection `name` of a server; arguments and errors as of
    :meth:`QdrantCollection.server`.

    Where the server cannot be reached, or says that it is busy, it is asked again with growing
    pauses: a request takes ``timeout + patience`` seconds at most. All may be repeated, as points
    have ids of their own. The key is never part of a message or of a file.
    """

    prefetch, at_once = "prefetch", 32

    def __init__(
        self,
        url: str,
        name: str,
        api_key: str | None = None,
        timeout: float = 30.0,
        patience: float = 20.0,
    ) -> None:
        package = require(
            "qdrant_client",
            "qdrant-client",
            "A collection on a Qdrant server",
            "qdrant",
        )
        if not _NAME.fullmatch(name):
            raise ArgumentError("name", f"expected letters, digits, '.', '_' or '-', got {name!r}.")
        for option, value, low in (("timeout", timeout, 0.0), ("patience", patience, -1.0)):
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not low < value < 1e6
            ):
                raise ArgumentError(
                    option,
                    f"expected seconds above {max(low, 0):.0f}, got {value!r}.",
                )
        parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
        if parts.username or parts.password or parts.query:
            raise ArgumentError(
                "url",
                f"expected an address without a key in it; give that as {KEY_VARIABLE} or api_key.",
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError("url", f"expected http://host:6333 or https://host, got {url!r}.")
        self.url, self.name = url.rstrip("/"), name
        self.place = f"collection {name!r} at {self.url}"
        self._key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE) or None
        if self._key is not None and not _KEY.fullmatch(self._key):
            raise ArgumentError(
                "api_key",
                f"expected printable ASCII, no spaces (or {KEY_VARIABLE}), got other text.",
            )
        if self._key and parts.scheme == "http" and not _is_loopback(parts.hostname):
            warnings.warn(
                f"{self.url}: the API key is sent without encryption. Use https.",
                stacklevel=3,
            )
        self._patience, self.api = patience, package.models
        self.point, self.range = self.api.PointStruct, self.api.Range
        self._client = package.QdrantClient(
            url=self.url,
            port=parts.port or (443 if parts.scheme == "https" else 6333),
            timeout=max(1, round(timeout)),
            headers={"api-key": self._key} if self._key else None,
            check_compatibility=False,
        )

    def record(self) -> Record | None:
        """Record of the collection; ``DataError`` for one that tilefold did not make."""
        if not self._ask("collection_exists"):
            return None
        metadata = getattr(self._ask("get_collection").config, "metadata", None) or {}
        if _META not in metadata:
            got = "one that says nothing of its vocabulary (Qdrant keeps that from version 1.16 on)"
            remedy = "Choose another name; nothing was changed."
            raise DataError(
                f"{self.place}: expected a collection that tilefold made, got {got}. {remedy}",
            )
        try:
            value = json.loads(metadata[_META])
        except (TypeError, ValueError, RecursionError) as error:
            got = f"{metadata[_META]!r:.80} ({error})"
            raise DataError(
                f"{self.place}: expected a record, got {got}. Choose another name.",
            ) from error
        return Record.from_dict(value if isinstance(value, dict) else {}, self.place)

    def create(self, record: Record) -> None:
        models, layout = self.api, record.layout
        maxsim = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
        no_graph = models.HnswConfigDiff(m=0)  # MaxSim is exact
        kinds = models.VectorParams, models.Distance.DOT, models.Distance.COSINE
        vectors = self._vector_params(
            layout,
            *kinds,
            multivector_config=maxsim,
            hnsw_config=no_graph,
        )
        sparse = None
        if layout.vocab_size is not None:
            index = models.SparseIndexParams(datatype=models.Datatype(layout.weights))
            sparse = {SPARSE: models.SparseVectorParams(index=index)}
        configs = {"vectors_config": vectors, "sparse_vectors_config": sparse}
        with suppress(_ExistsError):  # of another process
            self._ask(
                "create_collection",
                **configs,
                metadata={_META: json.dumps(record.to_dict())},
            )
        if self.record() is None:
            raise DataError(
                f"{self.place}: was created and is not there. Is another program removing it?",
            )
        for name, schema in layout.fields.items():
            self._ask("create_payload_index", name, schema)

    def write_record(self, record: Record) -> None:
        self._ask("update_collection", metadata={_META: json.dumps(record.to_dict())})

    def drop(self) -> None:
        self._ask("delete_collection")

    def delete(self, keys: Sequence[str]) -> None:
        self._ask("delete", points_selector=self.api.PointIdsList(points=list(keys)), wait=True)

    def _put(self, points: Sequence[object]) -> None:
        self._ask("upsert", points, wait=True)

    def _get(self, keys: list[str], vectors: bool) -> list[Any]:
        return list(self._ask("retrieve", keys, with_payload=True, with_vectors=vectors))

    def _page(self, offset: object) -> tuple[list[Any], Any]:
        page, offset = self._ask(
            "scroll",
            limit=_PAGE,
            offset=offset,
            with_payload=[ID],
            with_vectors=False,
        )
        return page, offset

    def _count(self, chosen: object) -> int:
        return int(self._ask("count", count_filter=chosen, exact=True).count)

    def _answers(self, requests: Sequence[object]) -> list[Any]:
        return [answer.points for answer in self._ask("query_batch_points", requests)]

    def optimize(self) -> None:
        """Nothing: a server does that by itself."""

    def close(self) -> None:
        self._client.close()

    def _scoring(self, stage: Stage) -> Json:
        models = self.api
        if stage.fusion == "rrf":  # its ranks start at 0
            return {"query": models.RrfQuery(rrf=models.Rrf(k=stage.rank_constant + 1))}
        if stage.fusion:
            return {"query": models.FusionQuery(fusion=models.Fusion.DBSF)}
        return {
            "query": models.NearestQuery(nearest=self._vector(stage.using, stage.vector)),
            "using": stage.using,
        }

    def _ask(self, method: str, *args: object, **options: object) -> Any:
        """The answer to a method of the client, asked again while the server is away or busy, until
        patience ends.
        """
        started, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return getattr(self._client, method)(self.name, *args, **options)
            except Exception as error:
                named = 429 if type(error).__name__ == "ResourceExhaustedResponse" else None
                status = named or getattr(error, "status_code", None)
                if status is None and not _is_transport(error):
                    if type(error).__name__ != "ResponseHandlingException":
                        raise
                    said = f"expected the answers of a Qdrant server, got ({self._text(error)})"
                    raise RuntimeError(f"{self.place}: {said}. Is it the right address?") from None
                if status is not None and status not in _BUSY:
                    raise self._refusal(status, error) from None
                waited = time.monotonic() - started
                if waited + pause > self._patience:
                    said = f"no answer from the Qdrant server after {waited:.1f} s ({self._text(error)})"
                    kept = "Is it running? What was reported as done before is kept; the same call goes on from there."
                    raise UnreachableError(f"{self.place}: {said}. {kept}") from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _refusal(self, status: int, error: Exception) -> Exception:
        if status in (401, 403):
            how = (
                f"the key given (api_key, or {KEY_VARIABLE})"
                if self._key
                else f"no key; set {KEY_VARIABLE}"
            )
            return PermissionError(
                f"{self.place}: the Qdrant server answered {status} to {how}. Ask for access.",
            )
        if status == 404:
            said = "there is no such collection, or no Qdrant server"
            return FileNotFoundError(f"{self.place}: {said}. Build it (tilefold index).")
        kind = _ExistsError if status == _CONFLICT else RuntimeError
        return kind(f"{self.place}: the Qdrant server answered {status}: {self._text(error)}")

    def _text(self, error: BaseException) -> str:
        """Message of an error, in one line and without the key."""
        source = getattr(error, "source", None)
        content = getattr(error, "content", None)
        text = (
            content.decode("utf-8", "replace")
            if isinstance(content, bytes) and content
            else str(source or error)
        )
        text = " ".join(text.split()) or type(source or error).__name__
        return (text.replace(self._key, "***") if self._key else text)[:300]


def _is_transport(error: BaseException) -> bool:
    """Whether no answer came, rather than one that makes no sense."""
    source = getattr(error, "source", error)
    return isinstance(source, OSError) or type(source).__module__.partition(".")[0] in (
        "httpx",
        "httpcore",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
