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
# Member of a collection's metadata that has the record, as text because servers merge objects.
_RECORD_MEMBER = "tilefold"
_NAME_PATTERN = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
_API_KEY_PATTERN = re.compile(r"[\x21-\x7e]+")  # printable ASCII without spaces
# HTTP statuses after which a request is sent again, and the status of a name that is in use.
_TOO_MANY_REQUESTS = 429
_BUSY_STATUSES = (_TOO_MANY_REQUESTS, 502, 503, 504)
_CONFLICT = 409
# Seconds between attempts: they double from the first to the longest pause.
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
# Documents of a page of ids.
_PAGE_SIZE = 1000
_MAX_ERROR_CHARACTERS = 300


class UnreachableError(ConnectionError):
    """A server did not answer in time."""


class _ExistsError(RuntimeError):
    """A collection of that name is there already."""


class ServerEngine(Engine):
    """A collection of a Qdrant server.

    A request is sent again, with growing pauses, while the server cannot be reached or is busy. It
    takes ``timeout + patience`` seconds at most. All requests may be repeated, because points have
    ids of their own. The API key is never part of a message or of a file.

    Args:
        url: of the server.
        name: of the collection.
        api_key: by default ``QDRANT_API_KEY`` of the environment.
        timeout: seconds for a request.
        patience: seconds in which a request is sent again.

    Raises:
        ArgumentError: for an argument of another form.
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
            url: address of the server, ``http://host:port`` or ``https://host``.
            name: name of the collection.
            api_key: key of the server; by default the environment variable ``QDRANT_API_KEY``.
            timeout: seconds for a request.
            patience: seconds for which a request is repeated while the server is unreachable or
                busy.

        Raises:
            ArgumentError: for an argument of another form.
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
        parts, host = _split_url(url)
        self.url = url.rstrip("/")
        self.name = name
        self.place = f"collection {name!r} at {self.url}"
        self._key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE) or None
        if self._key is not None and not _API_KEY_PATTERN.fullmatch(self._key):
            raise ArgumentError(
                "api_key",
                f"expected printable ASCII, no spaces (or {KEY_VARIABLE}), got other text.",
            )
        if self._key and parts.scheme == "http" and not _is_loopback(host):
            warnings.warn(
                f"{self.url}: the API key is sent without encryption. Use https.",
                stacklevel=3,
            )
        self._patience = patience
        self.api = package.models
        self.point_type = self.api.PointStruct
        self.range_type = self.api.Range
        default_port = 443 if parts.scheme == "https" else 6333
        self._client = package.QdrantClient(
            url=self.url,
            port=parts.port or default_port,
            timeout=max(1, round(timeout)),
            headers={"api-key": self._key} if self._key else None,
            check_compatibility=False,
        )

    def record(self) -> Record | None:
        """Read the record of the collection.

        Returns:
            The record, or None if the collection does not exist.

        Raises:
            DataError: for a collection that tilefold did not create, or a damaged record.
        """
        if not self._send("collection_exists"):
            return None
        metadata = getattr(self._send("get_collection").config, "metadata", None) or {}
        if _RECORD_MEMBER not in metadata:
            raise DataError(
                f"{self.place}: expected a collection that tilefold made, got one that says "
                "nothing of its vocabulary (Qdrant keeps that from version 1.16 on). Choose "
                "another name; nothing was changed.",
            )
        text = metadata[_RECORD_MEMBER]
        try:
            value = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"{self.place}: expected a record, got {text!r:.80} ({error}). Choose another "
                "name.",
            ) from error
        return Record.from_dict(value if isinstance(value, dict) else {}, self.place)

    def create(self, record: Record) -> None:
        """Create an empty collection.

        A collection that another process creates at the same moment is used as it is.

        Args:
            record: description of the collection, which the server stores as its metadata.

        Raises:
            DataError: if the collection does not exist afterwards.
        """
        models = self.api
        layout = record.layout
        vectors = self._vector_params(
            layout,
            models.VectorParams,
            models.Distance.DOT,
            models.Distance.COSINE,
            multivector_config=models.MultiVectorConfig(
                comparator=models.MultiVectorComparator.MAX_SIM,
            ),
            # m is the number of links per node of the HNSW graph. Without a graph, MaxSim compares
            # all documents and is exact.
            hnsw_config=models.HnswConfigDiff(m=0),
        )
        sparse = None
        if layout.vocab_size is not None:
            index = models.SparseIndexParams(datatype=models.Datatype(layout.weights))
            sparse = {SPARSE: models.SparseVectorParams(index=index)}
        # Another process may have created the collection.
        with suppress(_ExistsError):
            self._send(
                "create_collection",
                vectors_config=vectors,
                sparse_vectors_config=sparse,
                metadata=_metadata(record),
            )
        if self.record() is None:
            raise DataError(
                f"{self.place}: was created and is not there. Is another program removing it?",
            )
        for name, schema in layout.fields.items():
            self._send("create_payload_index", name, schema)

    def write_record(self, record: Record) -> None:
        self._send("update_collection", metadata=_metadata(record))

    def drop(self) -> None:
        self._send("delete_collection")

    def delete(self, keys: Sequence[str]) -> None:
        self._send("delete", points_selector=self.api.PointIdsList(points=list(keys)), wait=True)

    def _put(self, points: Sequence[object]) -> None:
        self._send("upsert", points, wait=True)

    def _get(self, keys: list[str], vectors: bool) -> list[Any]:
        return list(self._send("retrieve", keys, with_payload=True, with_vectors=vectors))

    def _page(self, offset: object) -> tuple[list[Any], Any]:
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

    def _query_arguments(self, stage: Stage) -> Json:
        models = self.api
        if stage.fusion == "rrf":
            # The server counts ranks from 0.
            return {"query": models.RrfQuery(rrf=models.Rrf(k=stage.rank_constant + 1))}
        if stage.fusion:
            return {"query": models.FusionQuery(fusion=models.Fusion.DBSF)}
        vector = self._vector(stage.using, stage.vector)
        return {"query": models.NearestQuery(nearest=vector), "using": stage.using}

    def _send(self, method: str, *arguments: object, **options: object) -> Any:
        """Call a method of the client, and repeat it while the server is unreachable or busy.

        Pauses between the attempts double up to a limit.

        Args:
            method: name of the method, whose first argument is the name of the collection.
            arguments: the other positional arguments.
            options: keyword arguments.

        Returns:
            The result of the method.

        Raises:
            UnreachableError: if no attempt succeeded within the seconds of ``patience``.
            RuntimeError: if the answer is not one of a Qdrant server, or for another error of it.
            PermissionError: if the server refused the key.
            FileNotFoundError: if there is no such collection.
        """
        started = time.monotonic()
        pause = _FIRST_PAUSE
        while True:
            try:
                return getattr(self._client, method)(self.name, *arguments, **options)
            except Exception as error:  # the client has many types of errors
                if not _is_temporary(error):
                    self._raise_lasting_error(error)
                waited = time.monotonic() - started
                if waited + pause > self._patience:
                    raise UnreachableError(
                        f"{self.place}: no answer from the Qdrant server after {waited:.1f} s "
                        f"({self._text(error)}). Is it running? What was reported as done before "
                        "is kept; the same call goes on from there.",
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _raise_lasting_error(self, error: Exception) -> NoReturn:
        """Raise what the caller sees for an error that another attempt would not change.

        Args:
            error: error of the client, for which :func:`_is_temporary` is False.

        Raises:
            PermissionError: if the server refused the key.
            FileNotFoundError: if there is no such collection.
            RuntimeError: for another HTTP status, or an answer that is not of a Qdrant server.
            Exception: the error itself if it does not concern the network.
        """
        status = _http_status(error)
        if status is not None:
            raise self._error_of_status(status, error) from None
        # The client raises ResponseHandlingException for answers that it cannot read.
        if type(error).__name__ == "ResponseHandlingException":
            raise RuntimeError(
                f"{self.place}: expected the answers of a Qdrant server, got "
                f"({self._text(error)}). Is it the right address?",
            ) from None
        raise error

    def _error_of_status(self, status: int, error: Exception) -> Exception:
        """Create the error that the caller sees for an HTTP status.

        Args:
            status: HTTP status that another attempt would not change.
            error: error of the client, whose text is quoted.
        """
        if status in (401, 403):
            key = f"no key; set {KEY_VARIABLE}"
            if self._key:
                key = f"the key given (api_key, or {KEY_VARIABLE})"
            return PermissionError(
                f"{self.place}: the Qdrant server answered {status} to {key}. Ask for access.",
            )
        if status == 404:
            return FileNotFoundError(
                f"{self.place}: there is no such collection, or no Qdrant server. Build it "
                "(tilefold index).",
            )
        error_type = _ExistsError if status == _CONFLICT else RuntimeError
        return error_type(
            f"{self.place}: the Qdrant server answered {status}: {self._text(error)}",
        )

    def _text(self, error: BaseException) -> str:
        """Return the message of an error of the client, for a message to the user.

        It is one line of limited length, in which the API key is replaced by asterisks.

        Args:
            error: the error. The body of the server's answer, or else the error that the client
                wrapped, says more than the error itself.
        """
        source = getattr(error, "source", None)  # the error that the client wrapped
        content = getattr(error, "content", None)  # body of the answer
        if isinstance(content, bytes) and content:
            text = content.decode("utf-8", "replace")
        else:
            text = str(source or error)
        text = " ".join(text.split()) or type(source or error).__name__
        if self._key:
            text = text.replace(self._key, "***")
        return text[:_MAX_ERROR_CHARACTERS]


def _split_url(url: str) -> tuple[SplitResult, str]:
    """Split the address of a server.

    Args:
        url: ``http://host:port`` or ``https://host``.

    Returns:
        The parts of the address, and its host.

    Raises:
        ArgumentError: for an address of another form. An address with a user name, a password or a
            query is refused too, because these may be secrets and addresses are shown in messages.
    """
    parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
    if parts.username or parts.password or parts.query:
        raise ArgumentError(
            "url",
            f"expected an address without a key in it; give that as {KEY_VARIABLE} or api_key.",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ArgumentError("url", f"expected http://host:6333 or https://host, got {url!r}.")
    return parts, parts.hostname


def _metadata(record: Record) -> dict[str, str]:
    """Return the metadata of a collection with a record."""
    return {_RECORD_MEMBER: json.dumps(record.to_dict())}


def _check_seconds(option: str, value: object, above: float) -> None:
    """Raise ``ArgumentError`` unless an option is a number of seconds above a limit."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not above < value < 1e6:  # type: ignore[operator]
        raise ArgumentError(
            option,
            f"expected seconds above {max(above, 0):.0f}, got {value!r}.",
        )


def _http_status(error: Exception) -> int | None:
    """Return the HTTP status of an answer that the client raised as an error; None without one."""
    status: int | None = getattr(error, "status_code", None)
    return status


def _is_temporary(error: Exception) -> bool:
    """Return whether the same request may succeed later.

    This is so if the server was not reached or says that it is busy.

    Args:
        error: error of the client.
    """
    # The server limits the rate of requests. The class is compared by its name, so that no module
    # of the client is imported.
    if type(error).__name__ == "ResourceExhaustedResponse":
        return True
    status = _http_status(error)
    if status is not None:
        return status in _BUSY_STATUSES
    return _is_transport_error(error)


def _is_transport_error(error: BaseException) -> bool:
    """Whether an error means that no answer came, rather than one that cannot be read."""
    source = getattr(error, "source", error)
    package = type(source).__module__.partition(".")[0]
    return isinstance(source, OSError) or package in ("httpx", "httpcore")


def _is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
