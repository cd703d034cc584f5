"""JSON that a client is told: vectors, with numbers as short as their float32 allows, cosines, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilefold.serve.bodies import EmbedSparse

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ClientGoneError", "ServeError", "cosines", "empty", "invalid", "listed", "matrices", "numbers", "plain",
    "sparse_rows", "strongest", "vectors", "wrong_model",
]  # fmt: skip

Vector = npt.NDArray[np.float32]
Row = tuple[npt.NDArray[np.int32], Vector]
# kind -> HTTP code, and the label of te_request_failure
_KINDS = {
    "Unhealthy": (503, "unhealthy"),
    "Backend": (424, "inference"),
    "Overloaded": (429, "overloaded"),
    "Validation": (422, "validation"),
    "Tokenizer": (422, "tokenization"),
    "Empty": (400, "validation"),
}
_SHOWN = 300  # characters of a message


class ClientGoneError(Exception):
    """The client closed its connection before the answer was there."""


class ServeError(Exception):
    """An error of a request, or of the service, with the code of its kind and its label among metrics, or others."""

    def __init__(self, kind: str, message: str, *, status: int | None = None, label: str | None = None) -> None:
        super().__init__(message)
        own_status, own_label = _KINDS[kind]
        self.kind, self.status, self.label = kind, status or own_status, label or own_label
        self.message = message if len(message) <= _SHOWN else message[:_SHOWN] + " ..."

    def body(self) -> bytes:
        """The answer in the form of text-embeddings-inference."""
        return _json({"error": self.message, "error_type": self.kind})

    def openai_body(self) -> bytes:
        """The answer of its OpenAI route."""
        return _json({"message": self.message, "code": self.status, "type": self.kind})


def invalid(message: str, label: str | None = None) -> ServeError:
    """A request that means nothing here: 422."""
    return ServeError("Validation", f"Input validation error: {message}", label=label)


def empty(name: str) -> ServeError:
    """A text, or a list of token ids, without anything in it: 400."""
    return ServeError("Empty", f"Input validation error: `{name}` cannot be empty", label="tokenization")


def wrong_model(message: str) -> ServeError:
    """The service has no model of the kind that a route needs: 424."""
    return ServeError("Backend", message, label="model_type")


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def plain(value: object) -> bytes:
    """Any value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def numbers(values: Vector) -> list[str]:
    """The shortest decimals that read back as the same float32."""
    found: list[str] = values.astype(np.float32).astype("U32").tolist()
    return found


def strongest(row: Row, top_k: int | None, threshold: float | None) -> Row:
    """The `top_k` heaviest entries (equal weights: the lower index stays) above `threshold`, in index order."""
    indices, weights = row
    keep = np.flatnonzero(weights > min(threshold or 0.0, float(np.finfo(np.float32).max)))
    if top_k is not None and keep.size > top_k:
        keep = np.sort(keep[np.argsort(-weights[keep], kind="stable")[:top_k]])
    return indices[keep], weights[keep]


def listed(parts: Sequence[bytes]) -> bytes:
    """A list of what is JSON already."""
    return b"[" + b",".join(parts) + b"]"


def sparse_rows(rows: Sequence[Row], body: EmbedSparse, token: Callable[[int], str]) -> list[bytes]:
    """The parts of the answer of ``/embed_sparse``; `token` names a term."""
    return [_sparse_row(strongest(row, body.top_k, body.threshold), body, token) for row in rows]


def _sparse_row(row: Row, body: EmbedSparse, token: Callable[[int], str]) -> bytes:
    indices, weights = row[0].tolist(), numbers(row[1])
    named = body.tokens or body.format == "tokens"
    tokens = [json.dumps(token(index)) for index in indices] if named else None
    if body.format == "arrays":
        last = "" if tokens is None else f',"tokens":[{", ".join(tokens)}]'
        return f'{{"indices":{json.dumps(indices)},"values":[{",".join(weights)}]{last}}}'.encode()
    if body.format == "values":
        more = [""] * len(indices) if tokens is None else [f',"token":{name}' for name in tokens]
        entries = zip(indices, weights, more, strict=True)
        found = ",".join(f'{{"index":{index},"value":{weight}{name}}}' for index, weight, name in entries)
        return f"[{found}]".encode()
    if len(set(tokens or ())) < len(indices):
        raise ServeError("Validation", "`format`: two terms of a vector have the same text; take arrays")
    found = ",".join(f"{name}:{weight}" for name, weight in zip(tokens or (), weights, strict=True))
    return f"{{{found}}}".encode()


def vectors(rows: Sequence[Vector]) -> list[bytes]:
    """``[float]`` of each row."""
    return [f"[{','.join(numbers(row))}]".encode() for row in rows]


def matrices(rows: Sequence[Tensor]) -> list[bytes]:
    """``[[float]]`` of each tensor ``[tokens, D]``."""
    return [listed(vectors(list(row.numpy()))) for row in rows]


def cosines(rows: Sequence[Any], kind: str) -> list[float]:
    """Cosine similarity of the first row, ``"sparse"`` or not, with each of the others; that of an empty one is 0."""
    first, *others = rows
    if kind == "sparse":
        dots = [_sparse_dot(first, other) for other in others]
        lengths = [float(np.linalg.norm(weights.astype(np.float64))) for _, weights in rows]
    else:
        dots = (np.stack(others).astype(np.float64) @ first).tolist()
        lengths = [float(np.linalg.norm(row.astype(np.float64))) for row in rows]
    scales = [lengths[0] * length for length in lengths[1:]]
    return [dot / scale if scale > 0 else 0.0 for dot, scale in zip(dots, scales, strict=True)]


def _sparse_dot(one: Row, other: Row) -> float:
    _, mine, its = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    return float(one[1][mine].astype(np.float64) @ other[1][its])
