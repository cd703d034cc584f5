"""Sparse vectors for the clients of other libraries, from a model in this process or a server."""

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
# The indices of terms, ascending, and their weights.
Vector = tuple[list[int], list[float]]
# Printable ASCII without spaces, which an HTTP header can hold.
_API_KEY = re.compile(r"[\x21-\x7e]+")
# A busy server is tried again after a wait, which doubles with each attempt.
_MAX_ATTEMPTS = 5
_FIRST_WAIT_SECONDS = 0.2


class ServerError(RuntimeError):
    """A server refused a request, could not be reached, or sent no sparse vectors."""


class SparseSource:
    """Sparse vectors of texts, from a model or a server.

    Args:
        model: a ``SparseEncoder``, or the folder or Hugging Face name of one, which is loaded when
            it is first used.
        url: the address of ``tilefold serve``, instead of a model.
        api_key: the key of the server.
        top_k: the number of heaviest terms to keep per text; None keeps all.
        batch_size: the number of texts that are encoded at once.
        timeout: the number of seconds to wait for an answer of the server.
        sides: whether the server has separate paths for queries and documents, as ``tilefold
            serve`` has. Other servers with ``/embed_sparse`` have one path.

    Raises:
        TypeError: if ``model`` is neither a name nor a loaded ``SparseEncoder``.
        ValueError: if not exactly one of ``model`` and ``url`` is given, or a value is out of
            range.
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
        """Check the arguments. Neither the model nor the server is used yet.

        Args:
            model: a ``SparseEncoder``, or the folder or Hugging Face name of one.
            url: the address of the server, instead of a model.
            api_key: the key of the server.
            top_k: the number of heaviest terms to keep per text; None keeps all.
            batch_size: the number of texts that are encoded at once.
            timeout: the number of seconds to wait for an answer of the server.
            sides: whether the server has separate paths for queries and documents.
        """
        if model is None and url is None:
            raise ValueError("model, url: expected one of them, got neither.")
        if model is not None and url is not None:
            raise ValueError("model, url: expected one of them, got both.")
        if model is not None and not isinstance(model, str):
            check_encoder("model", model)
        if url is not None:
            _check_url(url)
        if api_key is not None and not _API_KEY.fullmatch(api_key):
            raise ValueError(
                "api_key: expected printable ASCII without spaces or line ends, got other text.",
            )
        for name, value in (("top_k", top_k), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}.")
        if not timeout > 0:
            raise ValueError(f"timeout: expected a number above 0, got {timeout}.")
        self.model = model
        # The loaded model; None if it is given by name and was not used yet.
        self._loaded_model: Model | None = None if isinstance(model, str) else model
        self.url = url
        self.api_key = api_key
        self.top_k = top_k
        self.batch_size = batch_size
        self.timeout = timeout
        self.sides = sides

    def encode(self, texts: Sequence[str], side: Side) -> list[Vector]:
        """Return the vector of each text.

        Args:
            texts: any number of texts.
            side: whether they are queries or documents.

        Raises:
            TypeError: if ``texts`` is not a sequence of strings.
            ServerError: if the server sent no vectors.
        """
        texts = list_of_texts("texts", texts)
        if not texts:
            return []
        if self.url is None:
            return self._encode_in_process(texts, side)
        vectors: list[Vector] = []
        for start in range(0, len(texts), self.batch_size):
            batch = texts[start : start + self.batch_size]
            answer = self._request(batch, side)
            for indices, weights in _parse_vectors(answer, len(batch)):
                # Servers other than ``tilefold serve`` do not know ``top_k``.
                vectors.append(_heaviest_terms(indices, weights, self.top_k))
        return vectors

    def _encode_in_process(self, texts: list[str], side: Side) -> list[Vector]:
        """Encode texts with the model in this process.

        Args:
            texts: at least one text.
            side: whether they are queries or documents.

        Returns:
            The vector of each text: ascending indices of terms, and their weights.
        """
        from tilefold.integrations.sentence_transformers import encode_sparse

        if self._loaded_model is None:
            self._loaded_model = _load_accelerated(str(self.model))
        rows = encode_sparse(
            self._loaded_model,
            texts,
            task=side,
            batch_size=self.batch_size,
            top_k=self.top_k,
        )
        columns = rows.col_indices().tolist()
        weights = rows.values().float().tolist()
        offsets = rows.crow_indices().tolist()
        return [(columns[start:end], weights[start:end]) for start, end in pairwise(offsets)]

    def _request(self, texts: list[str], side: Side) -> Any:
        """Ask the server for the vectors of a batch of texts, and return its answer as parsed JSON.

        A busy server (status 429) is tried again a few times, after waits of 0.2, 0.4, 0.8 and 1.6
        seconds.

        Args:
            texts: the texts.
            side: whether they are queries or documents.

        Raises:
            ServerError: if the server refused the request, could not be reached, or sent no JSON.
        """
        body: dict[str, object] = {"inputs": texts, "format": "arrays"}
        if self.top_k is not None:
            body["top_k"] = self.top_k
        encoded_body = json.dumps(body).encode()
        status, raw = self._post(encoded_body, side)
        for attempt in range(_MAX_ATTEMPTS - 1):
            if status != http.client.TOO_MANY_REQUESTS:
                break
            time.sleep(_FIRST_WAIT_SECONDS * 2**attempt)
            status, raw = self._post(encoded_body, side)
        try:
            answer = json.loads(raw)
        except ValueError as error:
            raise ServerError(
                f"url: {self.url} answered {status} and no JSON; is it a server of vectors?",
            ) from error
        if status != http.client.OK:
            reason = "no reason given"
            if isinstance(answer, dict):
                reason = answer.get("error", reason)
            raise ServerError(f"url: {self.url} answered {status}: {reason}")
        return answer

    def _post(self, body: bytes, side: Side) -> tuple[int, bytes]:
        """Send a request to the server once.

        Args:
            body: the request as JSON.
            side: whether its texts are queries or documents.

        Returns:
            The status and the body of the response.

        Raises:
            ServerError: if the server cannot be reached.
        """
        parts = urlsplit(self.url or "")
        is_https = parts.scheme == "https"
        connection_class = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
        prefix = parts.path.rstrip("/")
        path = f"{prefix}/{side}/embed_sparse" if self.sides else f"{prefix}/embed_sparse"
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        start = time.monotonic()
        connection = connection_class(parts.hostname or "", parts.port, timeout=self.timeout)
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            seconds = time.monotonic() - start
            raise ServerError(
                f"url: {self.url} gave no answer in {seconds:.1f} s "
                f"({error or type(error).__name__}). Is it running? tilefold serve --model MODEL",
            ) from error
        finally:
            connection.close()


def _load_accelerated(name: str) -> Model:
    """Load a SparseEncoder and accelerate it, if possible.

    Args:
        name: the folder or the Hugging Face name of the model.
    """
    from tilefold.integrations.sentence_transformers import accelerate
    from tilefold.modules import load_encoder

    model = load_encoder(name)
    with suppress(ValueError):  # a model that cannot be accelerated encodes as it is
        accelerate(model)
    return model


def _check_url(url: str) -> None:
    """Raise ``ValueError`` if a URL is not the address of a server.

    It must not have a name, a password, a query or a fragment, which would be ignored.

    Args:
        url: the address.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_address = False
    if not is_address:
        raise ValueError(f"url: expected an address such as http://localhost:8080, got {url!r}.")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "url: expected an address without a name, a password or a query in it; a key goes in "
            "api_key.",
        )


def _heaviest_terms(indices: list[int], weights: list[float], top_k: int | None) -> Vector:
    """Return the ``top_k`` heaviest terms of a vector, in ascending order of their indices.

    Among equal weights, the terms with lower indices are kept, as by a model in this process.

    Args:
        indices: the indices of the terms, ascending.
        weights: the weights of the terms.
        top_k: the number of terms to keep; None keeps all.
    """
    if top_k is None or len(indices) <= top_k:
        return indices, weights
    by_weight = sorted(
        range(len(indices)),
        key=lambda position: (-weights[position], indices[position]),
    )
    positions = sorted(by_weight[:top_k])
    heaviest_weights = [weights[position] for position in positions]
    return [indices[position] for position in positions], heaviest_weights


def _parse_vectors(answer: Any, n_texts: int) -> list[Vector]:
    """Convert the answer of a server to vectors.

    Args:
        answer: parsed JSON. For each text, ``tilefold serve`` sends an object with ``indices`` and
            ``values``, and other servers send a list of entries.
        n_texts: the number of texts of the request.

    Raises:
        ServerError: if the answer is not a list of vectors, or their number is wrong.
    """
    try:
        vectors = [_parse_vector(row) for row in answer]
    except (KeyError, TypeError) as error:
        raise ServerError(
            f"url: expected sparse vectors in the answer of the server, got {answer!r:.80}.",
        ) from error
    for vector in vectors:
        if not _is_valid(vector):
            raise ServerError(
                "url: expected whole numbers and finite weights in the answer of the server, got "
                f"{vector!r:.80}.",
            )
    if len(vectors) != n_texts:
        raise ServerError(
            f"url: expected {n_texts} vectors in the answer of the server, got {len(vectors)}.",
        )
    return vectors


def _parse_vector(row: Any) -> Vector:
    """Convert one vector of an answer, an object with two lists or a list of entries."""
    if isinstance(row, dict):
        return list(row["indices"]), list(row["values"])
    return [entry["index"] for entry in row], [entry["value"] for entry in row]


def _is_valid(vector: Vector) -> bool:
    """Whether a vector from a server has integer indices and equally many finite weights.

    Args:
        vector: the indices and the weights, whose types are not known yet.
    """
    indices, weights = vector
    if len(indices) != len(weights):
        return False
    # ``type`` instead of ``isinstance``, because bools are instances of int.
    are_integers = all(type(index) is int for index in indices)
    return are_integers and all(
        type(weight) in (int, float) and math.isfinite(weight) for weight in weights
    )
