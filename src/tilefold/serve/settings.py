"""Limits of a service on the number, size and duration of requests."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from tilefold._internal.arguments import ArgumentError

_MAY_BE_ZERO = ("cached_queries", "grace_seconds")
_ORIGIN = re.compile(r"\*|https?://[^/\s]+")


def check_origins(origins: Sequence[str]) -> None:
    """Raise ``ValueError`` unless every origin is ``*`` or the origin of a site."""
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ArgumentError(
                "origins",
                f"expected * or an origin such as https://example.org, got {origin!r}.",
            )


@dataclass(frozen=True)
class Limits:
    """Limits of a service. The first six have the defaults of text-embeddings-inference.

    Attributes:
        max_concurrent_requests: largest number of inputs (texts, not HTTP requests) that are
            encoded or wait. A request over the limit gets status 429.
        max_batch_tokens: largest number of tokens of a batch, padding included.
        max_client_batch_size: largest number of inputs of a request.
        payload_limit: largest number of bytes of a body.
        auto_truncate: whether inputs that are too long are truncated, rather than refused, if a
            request does not choose.
        cached_queries: number of the latest queries whose encoding is cached.
        tokenization_workers: number of threads that count tokens and serialize responses. The same
            number of other threads serves ``/tokenize`` and ``/decode``.
        max_hits: largest number of documents that a search may ask for.
        max_image_pixels: largest number of pixels of an image of a request or of a page that is
            shown.
        max_connections: largest number of open connections. A connection over the limit gets
            status 429 and is closed.
        header_seconds: time for the head of a request, from its first byte or from the opening of
            the connection.
        body_seconds: time for the body of a request, and for a client to read more of a response.
        keep_alive_seconds: time after which an idle connection is closed.
        grace_seconds: time after SIGTERM in which requests are still accepted, but health checks
            get status 503.
        shutdown_seconds: time for running requests to end, once no more are accepted.

    Raises:
        ValueError: if a number is below 1 or a time is not above 0, except that ``cached_queries``
            and ``grace_seconds`` may be 0; or if a request may have more inputs than may be encoded
            or wait.
    """

    max_concurrent_requests: int = 512
    max_batch_tokens: int = 16384
    max_client_batch_size: int = 32
    payload_limit: int = 2_000_000
    auto_truncate: bool = True
    cached_queries: int = 0
    tokenization_workers: int = 2
    max_hits: int = 1000
    max_image_pixels: int = 50_000_000
    max_connections: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    keep_alive_seconds: float = 15.0
    grace_seconds: float = 5.0
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if a limit is out of range."""
        for field in fields(self):
            if field.name != "auto_truncate":
                _check_limit(field.name, getattr(self, field.name))
        if self.max_client_batch_size > self.max_concurrent_requests:
            raise ArgumentError(
                "max_client_batch_size",
                f"expected at most max_concurrent_requests ({self.max_concurrent_requests}), got "
                f"{self.max_client_batch_size}: such a request would always be refused.",
            )


def _check_limit(name: str, value: float) -> None:
    """Raise ``ValueError`` if a limit is too low, or a time is not finite.

    Args:
        name: name of the limit. Names of times end in ``_seconds``.
        value: its value.
    """
    may_be_zero = name in _MAY_BE_ZERO
    if name.endswith("_seconds"):
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            expected = "of at least 0" if may_be_zero else "above 0"
            raise ArgumentError(name, f"expected a finite number {expected}, got {value!r}.")
        return
    least = 0 if may_be_zero else 1
    if value < least:
        raise ArgumentError(name, f"expected at least {least}, got {value!r}.")
