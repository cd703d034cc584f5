"""Limits of a service on numbers, sizes and times of requests."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from tilefold._internal.arguments import ArgumentError

_MAY_BE_ZERO = ("cached_queries", "grace_seconds")
_ORIGIN = re.compile(r"\*|https?://[^/\s]+")


def check_origins(origins: Sequence[str]) -> None:
    """Raise ``ValueError`` unless every origin is that of a site, or ``*``."""
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ArgumentError(
                "origins",
                f"expected * or an origin such as https://example.org, got {origin!r}.",
            )


@dataclass(frozen=True)
class Limits:
    """Limits of a service. The first six are those of text-embeddings-inference, with its defaults.

    Attributes:
        max_concurrent_requests: inputs (texts, not HTTP requests) that are encoded or wait; further
            ones get status 429.
        max_batch_tokens: tokens of a batch, padding included.
        max_client_batch_size: inputs of a request.
        payload_limit: bytes of a body.
        auto_truncate: whether inputs that are too long are truncated if a request does not say;
            otherwise they are refused.
        cached_queries: number of latest queries whose answers are cached.
        tokenization_workers: threads that count tokens and write answers; ``/tokenize`` and
            ``/decode`` have as many of their own.
        max_hits: documents that a search may ask for.
        max_connections: open connections; further ones get status 429 and are closed.
        header_seconds: time for the head of a request, from its first byte or from the opening of
            the connection.
        body_seconds: time for the body of a request, and for a client to read more of an answer.
        keep_alive_seconds: time after which an idle connection is closed.
        grace_seconds: time after SIGTERM in which requests are still accepted, but health checks
            get status 503.
        shutdown_seconds: time for running requests, once no more are accepted.

    Raises:
        ValueError: a value below 1 (times: not above 0; ``cached_queries`` and ``grace_seconds``:
            below 0), or more inputs in a request than there may be at once.
    """

    max_concurrent_requests: int = 512
    max_batch_tokens: int = 16384
    max_client_batch_size: int = 32
    payload_limit: int = 2_000_000
    auto_truncate: bool = True
    cached_queries: int = 0
    tokenization_workers: int = 2
    max_hits: int = 1000
    max_connections: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    keep_alive_seconds: float = 15.0
    grace_seconds: float = 5.0
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "auto_truncate":
                _check_limit(field.name, getattr(self, field.name))
        if self.max_client_batch_size > self.max_concurrent_requests:
            raise ArgumentError(
                "max_client_batch_size",
                f"expected at most max_concurrent_requests ({self.max_concurrent_requests}), got "
                f"{self.max_client_batch_size}: such a request would never be taken.",
            )


def _check_limit(name: str, value: float) -> None:
    """Raise ``ValueError`` for a limit that is too low, or a time that is not finite."""
    may_be_zero = name in _MAY_BE_ZERO
    if name.endswith("_seconds"):
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            expected = "of at least 0" if may_be_zero else "above 0"
            raise ArgumentError(name, f"expected a finite number {expected}, got {value!r}.")
        return
    least = 0 if may_be_zero else 1
    if value < least:
        raise ArgumentError(name, f"expected at least {least}, got {value!r}.")
