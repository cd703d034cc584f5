"""Collections on a Qdrant server, through qdrant-client over HTTP."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

from tilefold._internal.arguments import ArgumentError, check_instance
from tilefold.retrieval.common.files import Json, require
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.qdrant.engine import ID, SPARSE, Engine, Record, Stage

KEY_VARIABLE = "QDRANT_API_KEY"
# Key in a collection's metadata of the record. The record is stored as a string of JSON, because
# servers merge objects.
_RECORD_KEY = "tilefold"
_NAME_PATTERN = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
# Printable ASCII without spaces.
_API_KEY_PATTERN = re.compile(r"[\x21-\x7e]+")
# HTTP statuses after which a request is retried.
_TOO_MANY_REQUESTS = 429
_BUSY_STATUSES = (_TOO_MANY_REQUESTS, 502, 503, 504)
# HTTP status if a collection of the same name exists.
_NAME_IN_USE = 409
# Pauses between attempts in seconds. They double from the first to the longest one.
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
# Number of documents of a page of ids.
_PAGE_SIZE = 1000
_MAX_ERROR_CHARACTERS = 300


class UnreachableError(ConnectionError):
    """A server did not answer in time."""


class _NameInUseError(RuntimeError):
    """A collection of the same name exists."""


class ServerEngine(Engine):
    """A collection of a Qdrant server.

    A request is retried, with growing pauses, while the server cannot be reached or is busy. It
    takes at most ``timeout + patience`` seconds. All requests may be repeated, because the ids of
    points are chosen here. The API key is never part of a message or of a file.
    """

    prefetch_argument = "prefetch"
    batch_queries = 32

    def __init__(
        self,
        url: str,
        name: str,
        api_key: str | None = None,
        timeout: float = 30.0,
        patience: float = 20.0,
    ) -> None:
        """Check the arguments, and create the client without sending a request.

        Args:
            url: URL of the server, ``http://host:port`` or ``https://host``.
            name: name of the collection.
            api_key: API key of the server; None uses the environment variable ``QDRANT_API_KEY``.
            timeout: time-out of a request, in seconds.
            patience: number of seconds for which a request is retried while the server is
                unreachable or busy.

        Raises:
            ArgumentError: if an argument is invalid.
        """
        package = require(
            "qdrant_client",
            "qdrant-client",
            "A collection on a Qdrant server",
            "qdrant",
        )
        check_instance("name", name, str, "the name of a collection")
        if not _NAME_PATTERN.fullmatch(name):
            raise ArgumentError("name", f"expected letters, digits, '.', '_' or '-', got {name!r}.")
        _check_seconds("timeout", timeout, above=0.0)
        _check_seconds("patience", patience, above=-1.0)
        url_parts = _split_url(url)
        is_encrypted = url_parts.scheme == "https"
        self.url = url.rstrip("/")
        self.name = name
        self.location = f"collection {name!r} at {self.url}"
        self._key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE) or None
        if self._key is not None and not _API_KEY_PATTERN.fullmatch(self._key):
            raise ArgumentError(
                "api_key",
                f"expected printable ASCII without spaces (here or in {KEY_VARIABLE}), got other "
                "characters.",
            )
        if self._key and not is_encrypted and not _is_loopback(str(url_parts.hostname)):
            warnings.warn(
                f"{self.url}: the API key is sent without encryption. Use https.",
                stacklevel=3,
            )
        self._patience = patience
        self.api = package.models
        self.point_type = self.api.PointStruct
        self.range_type = self.api.Range
        default_port = 443 if is_encrypted else 6333
        self._client = package.QdrantClient(
            url=self.url,
            port=url_parts.port or default_port,
            timeout=max(1, round(timeout)),
            headers={"api-key": self._key} if self._key else None,
            check_compatibility=False,
        )

    def read_record(self) -> Record | None:
        """Read the record that tilefold stores in the metadata of the collection.

        Returns:
            The record, or None if the collection does not exist.

        Raises:
            DataError: if tilefold did not create the collection, or if the record is damaged.
        """
        if not self._send("collection_exists"):
            return None
        metadata = getattr(self._send("get_collection").config, "metadata", None) or {}
        if _RECORD_KEY not in metadata:
            raise DataError(
                f"{self.location}: expected a collection that tilefold made, got one without "
                "tilefold's metadata (they need Qdrant 1.16 or later). Choose another name; "
                "nothing was changed.",
            )
        text = metadata[_RECORD_KEY]
        try:
            value = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"{self.location}: expected a record, got {text!r:.80} ({error}). Choose another "
                "name.",
            ) from error
        return Record.from_dict(value if isinstance(value, dict) else {}, self.location)

    def create(self, record: Record) -> None:
        """Create an empty collection.

        If another process has created the collection in the meantime, that collection is used.

        Args:
            record: the record of the collection, which the server stores in its metadata.

        Raises:
            DataError: if the collection does not exist afterwards.
        """
        qdrant = self.api
        layout = record.layout
        vectors = self._create_vector_params(
            layout,
            qdrant.VectorParams,
            distances={"dot": qdrant.Distance.DOT, "cosine": qdrant.Distance.COSINE},
            maxsim_options={
                "multivector_config": qdrant.MultiVectorConfig(
                    comparator=qdrant.MultiVectorComparator.MAX_SIM,
                ),
                # With m = 0 links per node, no HNSW graph is built. MaxSim then compares all
                # documents and is exact.
                "hnsw_config": qdrant.HnswConfigDiff(m=0),
            },
        )
        sparse_vectors = None
        if layout.vocab_size is not None:
            index = qdrant.SparseIndexParams(datatype=qdrant.Datatype(layout.weights))
            sparse_vectors = {SPARSE: qdrant.SparseVectorParams(index=index)}
        with suppress(_NameInUseError):
            self._send(
                "create_collection",
                vectors_config=vectors,
                sparse_vectors_config=sparse_vectors,
                metadata=_metadata_of(record),
            )
        if self.read_record() is None:
            raise DataError(
                f"{self.location}: does not exist after it was created. Is another program "
                "removing it?",
            )
        for name, field_kind in layout.fields.items():
            self._send("create_payload_index", name, field_kind)

    def write_record(self, record: Record) -> None:
        self._send("update_collection", metadata=_metadata_of(record))

    def drop(self) -> None:
        self._send("delete_collection")

    def delete(self, keys: Sequence[str]) -> None:
        self._send("delete", points_selector=self.api.PointIdsList(points=list(keys)), wait=True)

    def _put(self, points: Sequence[object]) -> None:
        self._send("upsert", points, wait=True)

    def _get(self, keys: list[str], with_vectors: bool) -> list[Any]:
        return list(self._send("retrieve", keys, with_payload=True, with_vectors=with_vectors))

    def _page(self, offset: object) -> tuple[list[Any], Any]:
        """Return a page of points with their ids, and the offset of the next page."""
        points, next_offset = self._send(
            "scroll",
            limit=_PAGE_SIZE,
            offset=offset,
            with_payload=[ID],
            with_vectors=False,
        )
        return points, next_offset

    def _count(self, client_filter: object) -> int:
        return int(self._send("count", count_filter=client_filter, exact=True).count)

    def _query_batch(self, requests: Sequence[object]) -> list[Any]:
        return [answer.points for answer in self._send("query_batch_points", requests)]

    def optimize(self) -> None:
        """Do nothing, because a server optimizes its collections by itself."""

    def close(self) -> None:
        self._client.close()

    def _create_query_arguments(self, stage: Stage) -> Json:
        """Return the arguments with which the client searches or fuses in a stage."""
        qdrant = self.api
        if stage.fusion == "rrf":
            # The server counts ranks from 0.
            return {"query": qdrant.RrfQuery(rrf=qdrant.Rrf(k=stage.rank_constant + 1))}
        if stage.fusion:
            return {"query": qdrant.FusionQuery(fusion=qdrant.Fusion.DBSF)}
        vector = self._convert_vector(stage.using, stage.vector)
        return {"query": qdrant.NearestQuery(nearest=vector), "using": stage.using}

    def _send(self, method: str, *arguments: object, **options: object) -> Any:
        """Call a method of the client, and retry while the server is unreachable or busy.

        Pauses between the attempts double up to a limit.

        Args:
            method: the name of the method, whose first argument is the name of the collection.
            arguments: the other positional arguments.
            options: keyword arguments.

        Returns:
            The result of the method.

        Raises:
            UnreachableError: if no attempt succeeded within the seconds of ``patience``.
            RuntimeError: if the server is not Qdrant, or reports another error.
            PermissionError: if the server refuses the key.
            FileNotFoundError: if there is no such collection.
        """
        started = time.monotonic()
        pause = _FIRST_PAUSE
        while True:
            try:
                return getattr(self._client, method)(self.name, *arguments, **options)
            except Exception as error:  # the client has many types of errors
                if not _is_temporary(error):
                    self._raise_permanent_error(error)
                waited = time.monotonic() - started
                if waited + pause > self._patience:
                    raise UnreachableError(
                        f"{self.location}: no answer from the Qdrant server after {waited:.1f} s "
                        f"({self._error_text(error)}). Is it running? Work already reported is "
                        "kept; repeat the call to continue.",
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _raise_permanent_error(self, error: Exception) -> NoReturn:
        """Convert a permanent error of the client to the public error, and raise it.

        Args:
            error: an error for which :func:`_is_temporary` is False.

        Raises:
            PermissionError: if the server refuses the key.
            FileNotFoundError: if there is no such collection.
            RuntimeError: if the server is not Qdrant, or answers another HTTP status.
            Exception: the error itself if it does not concern the network.
        """
        status = _http_status(error)
        if status is not None:
            raise self._error_of_status(status, error) from None
        # The client raises ResponseHandlingException for answers that it cannot read.
        if type(error).__name__ == "ResponseHandlingException":
            raise RuntimeError(
                f"{self.location}: the answer is not from a Qdrant server "
                f"({self._error_text(error)}). Is it the right address?",
            ) from None
        raise error

    def _error_of_status(self, status: int, error: Exception) -> Exception:
        """Return the public error for an HTTP status that is not worth a retry.

        Args:
            status: the HTTP status.
            error: the error of the client, whose text is quoted.
        """
        if status in (401, 403) and self._key:
            return PermissionError(
                f"{self.location}: the Qdrant server refused the API key (status {status}). Pass "
                f"another api_key, or set {KEY_VARIABLE}.",
            )
        if status in (401, 403):
            return PermissionError(
                f"{self.location}: the Qdrant server requires an API key (status {status}). Pass "
                f"api_key, or set {KEY_VARIABLE}.",
            )
        if status == 404:
            return FileNotFoundError(
                f"{self.location}: there is no such collection, or no Qdrant server. Build the "
                "collection (tilefold index), or check the URL.",
            )
        error_type = _NameInUseError if status == _NAME_IN_USE else RuntimeError
        return error_type(
            f"{self.location}: the Qdrant server answered {status}: {self._error_text(error)}",
        )

    def _error_text(self, error: BaseException) -> str:
        """Return the most specific text of an error of the client, for a message.

        The text is one line of limited length, in which asterisks replace the API key.
        """
        # The body of the server's answer, or else the error that the client wrapped, says more than
        # the error itself.
        content = getattr(error, "content", None)
        source = getattr(error, "source", None)
        if isinstance(content, bytes) and content:
            text = content.decode("utf-8", "replace")
        else:
            text = str(source or error)
        text = " ".join(text.split()) or type(source or error).__name__
        if self._key:
            text = text.replace(self._key, "***")
        return text[:_MAX_ERROR_CHARACTERS]


def _split_url(url: object) -> SplitResult:
    """Split the URL of a server, ``http://host:port`` or ``https://host``, into its parts.

    Raises:
        ArgumentError: if the URL has any other form. A user name, a password or a query is refused,
            because it may be a secret, and URLs are shown in messages.
    """
    if not isinstance(url, str):
        raise ArgumentError("url", f"expected http://host:6333 or https://host, got {url!r}.")
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        raise ArgumentError(
            "url",
            f"expected an address without a key in it; pass the key as {KEY_VARIABLE} or api_key.",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ArgumentError("url", f"expected http://host:6333 or https://host, got {url!r}.")
    return parts


def _metadata_of(record: Record) -> dict[str, str]:
    """Return the metadata of a collection, which contain its record."""
    return {_RECORD_KEY: json.dumps(record.to_dict())}


def _check_seconds(option: str, value: object, above: float) -> None:
    """Raise ``ArgumentError`` if an option is not a number of seconds above a limit."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not above < value < 1e6:  # type: ignore[operator]
        raise ArgumentError(
            option,
            f"expected seconds above {max(above, 0):.0f}, got {value!r}.",
        )


def _http_status(error: Exception) -> int | None:
    """Return the HTTP status of an error of the client; None if there was no answer."""
    status: int | None = getattr(error, "status_code", None)
    return status


def _is_temporary(error: Exception) -> bool:
    """Return whether an error of the client means that the server is unreachable or busy."""
    # The server limits the rate of requests. The class is compared by its name, so that no module
    # of the client is imported.
    if type(error).__name__ == "ResourceExhaustedResponse":
        return True
    status = _http_status(error)
    if status is not None:
        return status in _BUSY_STATUSES
    return _is_transport_error(error)


def _is_transport_error(error: BaseException) -> bool:
    """Return whether an error means that no answer came, not that an answer cannot be read."""
    source = getattr(error, "source", error)
    package = type(source).__module__.partition(".")[0]
    return isinstance(source, OSError) or package in ("httpx", "httpcore")


def _is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
