"""The limits of a service: what it takes at once, how large, and how slowly."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

_MAY_BE_ZERO = ("cached_queries", "grace_seconds")
_ORIGIN = re.compile(r"\*|https?://[^/\s]+")


def check_origins(origins: Sequence[str]) -> None:
    """Raise ``ValueError`` for what is neither the origin of a site nor ``*``."""
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"origins: expected * or an origin such as https://example.org, got {origin!r}.",
            )


@dataclass(frozen=True)
class Limits:
    """Limits of a service. The first six are those of text-embeddings-inference, with its defaults.

    Raises:
        ValueError: a value below 1 (times: not above 0; ``cached_queries`` and ``grace_seconds``:
            below 0), or more inputs in a request than there may be at once.
    """

    max_concurrent_requests: int = (
        512  # inputs (texts, not HTTP requests) in work or waiting; the next one gets a 429
    )
    max_batch_tokens: int = 16384  # padding included
    max_client_batch_size: int = 32  # inputs of one request
    payload_limit: int = 2_000_000  # bytes of a body
    auto_truncate: bool = (
        True  # cut inputs that are too long where a request does not say; else they are refused
    )
    cached_queries: int = 0  # of which the last answers are kept, for those that are asked again
    tokenization_workers: int = (
        2  # threads that count tokens and write answers; `/tokenize` and `/decode` have as many
    )
    max_hits: int = 1000  # documents that a search may ask for
    max_connections: int = 1024  # open ones; the next one is told so and closed
    header_seconds: float = (
        10.0  # for the head of a request, from the first byte or the opening of the connection
    )
    body_seconds: float = 30.0  # for its body, and to read some more of an answer
    keep_alive_seconds: float = 15.0  # that an idle connection is kept
    grace_seconds: float = (
        5.0  # after SIGTERM, in which requests are still taken, but health checks get a 503
    )
    shutdown_seconds: float = 30.0  # for running requests, once no more are taken

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "auto_truncate":
                _check_limit(field.name, getattr(self, field.name))
        if self.max_client_batch_size > self.max_concurrent_requests:
            most = f"max_concurrent_requests ({self.max_concurrent_requests})"
            got = f"{self.max_client_batch_size}: such a request would never be taken."
            raise ValueError(f"max_client_batch_size: expected at most {most}, got {got}")


def _check_limit(name: str, value: float) -> None:
    """Raise ``ValueError`` for a limit that is too low, or a time that is not finite."""
    may_be_zero = name in _MAY_BE_ZERO
    if name.endswith("_seconds"):
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            expected = "of at least 0" if may_be_zero else "above 0"
            raise ValueError(f"{name}: expected a finite number {expected}, got {value!r}.")
        return
    least = 0 if may_be_zero else 1
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value!r}.")
