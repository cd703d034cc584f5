"""Sources of sparse vectors for other libraries' clients: a model in this process, or a server."""

from __future__ import annotations

import http.client
import json
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

from tilefold._internal.arguments import check_encoder, list_of_texts
from tilefold._internal.typing import Model

Side = Literal["query", "document"]
Vector = tuple[list[int], list[float]]
_BUSY = 429
_KEY = re.compile(r"[\x21-\x7e]+")
_TRIES = 5  # of a server that is busy
_FIRST_WAIT = 0.2  # seconds, doubled each time


class ServerError(RuntimeError):
    """A server refused a request, could not be reached, or answered something else; the message
    says which.
    """


class SparseSource:
    """Sparse vectors of texts, from a model or a server.

    Args:
        model: a ``SparseEncoder``, or a folder or Hugging Face name of one, which is loaded at
            first use.
        url: of ``tilefold serve``, instead of a model.
        api_key, timeout: of the server; seconds for an answer.
        top_k, batch_size: heaviest terms kept per text; texts at a time.
        sides: False for other servers with ``/embed_sparse``, which do not tell queries from
            documents.

    Raises:
        TypeError: a model that is neither a name nor a loaded ``SparseEncoder``.
        ValueError: not one of `model` and `url`, or a value out of range.
    """

    def __init__(
        self,
        model: Model | None = None,
        url: str | None = None,
        *,
        api_key: str | None = None,
        top_k: int | None = None,
        batch_size: int = 32,
        timeout: float = 60.0,
        sides: bool = True,
    ) -> None:
        if (model is None) == (url is None):
            raise ValueError(
                "model, url: expected one of them, got "
                + ("neither." if model is None else "both."),
            )
        if model is not None and not isinstance(model, str):
            check_encoder("model", model)
        if url is not None:
            _check_url(url)
        if api_key is not None and not _KEY.fullmatch(api_key):
            raise ValueError(
                "api_key: expected printable ASCII without spaces or line ends, got other text.",
            )
        for name, value in (("top_k", top_k), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}.")
        if not timeout > 0:
            raise ValueError(f"timeout: expected a number above 0, got {timeout}.")
        self.model, self.url, self.api_key, self.top_k = model, url, api_key, top_k
        self.batch_size, self.timeout, self.sides = batch_size, timeout, sides

    def encode(self, texts: Sequence[str], side: Side) -> list[Vector]:
        """Indices, ascending, and weights of each text, by position.

        Raises:
            TypeError: `texts` is one string, no sequence, or holds what is no string.
        """
        texts = list_of_texts("texts", texts)
        if not texts:
            return []
        if self.url is None:
            return self._encode(texts, side)
        found: list[Vector] = []
        for start in range(0, len(texts), self.batch_size):
            batch = texts[start : start + self.batch_size]
            answer = self._ask({"inputs": batch, "format": "arrays", "top_k": self.top_k}, side)
            found += [_strongest(*row, self.top_k) for row in _vectors(answer, len(batch))]
        return found

    def _encode(self, texts: Sequence[str], side: Side) -> list[Vector]:
        from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
        from tilefold.modules import load_encoder

        if isinstance(self.model, str):
            self.model = load_encoder(self.model)
            with suppress(ValueError):  # an architecture without a fused head encodes with its own
                accelerate(self.model)
        rows = encode_sparse(
            self.model,
            texts,
            task=side,
            batch_size=self.batch_size,
            top_k=self.top_k,
        )
        columns, weights = rows.col_indices().tolist(), rows.values().float().tolist()
        return [
            (columns[low:high], weights[low:high])
            for low, high in pairwise(rows.crow_indices().tolist())
        ]

    def _ask(self, body: dict[str, object], side: Side) -> Any:
        """The answer of the server; a busy one is asked again, later."""
        sent = json.dumps(
            {name: value for name, value in body.items() if value is not None},
        ).encode()
        for attempt in range(_TRIES):
            status, raw = self._post(sent, side)
            if status != _BUSY or attempt == _TRIES - 1:
                break
            time.sleep(_FIRST_WAIT * 2**attempt)
        try:
            answer = json.loads(raw)
        except ValueError as error:
            raise ServerError(
                f"url: {self.url} answered {status} and no JSON; is it a server of vectors?",
            ) from error
        if status != http.client.OK:
            reason = (
                answer.get("error", "no reason given")
                if isinstance(answer, dict)
                else "no reason given"
            )
            raise ServerError(f"url: {self.url} answered {status}: {reason}")
        return answer

    def _post(self, body: bytes, side: Side) -> tuple[int, bytes]:
        parts = urlsplit(self.url or "")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        path = parts.path.rstrip("/") + (f"/{side}" if self.sides else "") + "/embed_sparse"
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        began = time.monotonic()
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        try:
            connection.request("POST", path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            why = f"in {time.monotonic() - began:.1f} s ({error or type(error).__name__})"
            text = (
                f"url: {self.url} gave no answer {why}. Is it running? tilefold serve --model MODEL"
            )
            raise ServerError(text) from error
        finally:
            connection.close()


def _check_url(url: str) -> None:
    """Refuse what is no address, and one with parts that a request would lose."""
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:  # of the port
        wrong = True
    if wrong:
        raise ValueError(f"url: expected an address such as http://localhost:8080, got {url!r}.")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "url: expected an address without a name, a password or a query in it; a key goes in "
            "api_key.",
        )


def _strongest(indices: list[int], weights: list[float], top_k: int | None) -> Vector:
    """The heaviest entries, as the model in process keeps them: a server that does not know `top_k`
    sends all.
    """
    if top_k is None or len(indices) <= top_k:
        return indices, weights
    kept = sorted(sorted(range(len(indices)), key=lambda at: (-weights[at], indices[at]))[:top_k])
    return [indices[at] for at in kept], [weights[at] for at in kept]


def _vectors(answer: Any, expected: int) -> list[Vector]:
    """Vectors of either form: arrays, or a list of entries as servers answer that do not know
    `format`.
    """
    try:
        found = [
            (list(row["indices"]), list(row["values"]))
            if isinstance(row, dict)
            else ([entry["index"] for entry in row], [entry["value"] for entry in row])
            for row in answer
        ]
    except (KeyError, TypeError) as error:
        raise ServerError(
            f"url: expected sparse vectors in the answer of the server, got {answer!r:.80}.",
        ) from error
    for indices, weights in found:
        numbers = all(type(weight) in (int, float) and math.isfinite(weight) for weight in weights)
        if (
            not numbers
            or len(indices) != len(weights)
            or any(type(index) is not int for index in indices)
        ):
            text = "url: expected whole numbers and finite weights in the answer of the server"
            raise ServerError(f"{text}, got {(indices, weights)!r:.80}.")
    if len(found) != expected:
        raise ServerError(
            f"url: expected {expected} vectors in the answer of the server, got {len(found)}.",
        )
    return found
