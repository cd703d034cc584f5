"""JSON of vectors, with numbers as short as their float32 allows, and their cosines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefold.serve.bodies import EmbedSparse
from tilefold.serve.errors import ServeError
from tilefold.serve.text import TextTokens

__all__ = ["cosines", "listed", "matrices", "numbers", "plain", "sparse_rows", "strongest", "vectors"]

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def plain(value: Any) -> bytes:
    """Any value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def numbers(values: npt.NDArray[np.float32]) -> list[str]:
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


def sparse_rows(rows: Sequence[Row], body: EmbedSparse, text: TextTokens) -> list[bytes]:
    """The parts of the answer of ``/embed_sparse``."""
    named = body.tokens or body.format == "tokens"
    return [_sparse_row(strongest(row, body.top_k, body.threshold), body, text if named else None) for row in rows]


def _sparse_row(row: Row, body: EmbedSparse, text: TextTokens | None) -> bytes:
    indices, weights = row[0].tolist(), numbers(row[1])
    tokens = None if text is None else [json.dumps(text.token(index)) for index in indices]
    if body.format == "arrays":
        named = "" if tokens is None else f',"tokens":[{", ".join(tokens)}]'
        return f'{{"indices":{json.dumps(indices)},"values":[{",".join(weights)}]{named}}}'.encode()
    if body.format == "values":
        more = [""] * len(indices) if tokens is None else [f',"token":{token}' for token in tokens]
        entries = zip(indices, weights, more, strict=True)
        found = ",".join(f'{{"index":{index},"value":{weight}{token}}}' for index, weight, token in entries)
        return f"[{found}]".encode()
    if len(set(tokens or ())) < len(indices):
        raise ServeError("Validation", "`format`: two terms of a vector have the same text; take arrays")
    found = ",".join(f"{token}:{weight}" for token, weight in zip(tokens or (), weights, strict=True))
    return f"{{{found}}}".encode()


def vectors(rows: Sequence[npt.NDArray[np.float32]]) -> list[bytes]:
    """``[float]`` of each row."""
    return [f"[{','.join(numbers(row))}]".encode() for row in rows]


def matrices(rows: Sequence[Any]) -> list[bytes]:
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
