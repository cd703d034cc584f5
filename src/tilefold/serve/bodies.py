"""Bodies of requests, checked; and JSON that a client is told: vectors, as short as float32 allows,
cosines, errors.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from tilefold._internal.typing import Tensor

Vector = npt.NDArray[np.float32]


class Row(NamedTuple):
    """A sparse vector of n entries."""

    indices: npt.NDArray[np.int32]  # [n], rising
    weights: Vector  # [n]
    written: bytes = b""  # the answer of ``/embed_sparse`` that no option changes, if it was made with the vector


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
_TEXT_OR_IDS = {
    "oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}],
}
_INPUTS_SCHEMA = {"oneOf": [*_TEXT_OR_IDS["oneOf"], {"type": "array", "items": _TEXT_OR_IDS}]}
_TEXTS_SCHEMA = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(id_, int) and not isinstance(id_, bool) for id_ in value
    )


class Single(list[Any]):
    """The one input of a request that gave no list of them, which metrics count apart."""


def _listed(
    is_one: Callable[[object], bool],
    is_each: Callable[[object], bool],
    expected: str,
) -> PlainValidator:
    """A check of one input or a list of inputs, which makes it a list."""

    def check(value: object) -> list[Any]:
        if is_one(value):
            return Single([value])
        if isinstance(value, list) and all(map(is_each, value)):
            return value
        raise ValueError(f"expected {expected}")

    return PlainValidator(check)


def _contents(value: object) -> list[Any]:
    """Documents of a reranker: texts, or objects with a text."""
    found = (
        [each.get("text") if isinstance(each, dict) else each for each in value]
        if isinstance(value, list)
        else []
    )
    if not isinstance(value, list) or not all(map(_is_text, found)):
        raise ValueError("expected a list of texts, or of objects with a text")
    return found


def _direction(value: object) -> str:
    if isinstance(value, str) and value.lower() in ("left", "right"):
        return value.lower()
    raise ValueError("expected 'left' or 'right'")


Inputs = Annotated[
    list[Any],
    _listed(
        lambda value: _is_text(value) or bool(value and _is_ids(value)),
        lambda each: _is_text(each) or _is_ids(each),
        "a text, a list of texts, or lists of token ids",
    ),
    WithJsonSchema(_INPUTS_SCHEMA),
]
Texts = Annotated[
    list[Any],
    _listed(_is_text, _is_text, "a text or a list of texts"),
    WithJsonSchema(_TEXTS_SCHEMA),
]
IdLists = Annotated[
    list[Any],
    _listed(
        lambda value: bool(value and _is_ids(value)),
        _is_ids,
        "a list of token ids, or a list of such lists",
    ),
]
Contents = Annotated[list[Any], PlainValidator(_contents)]
Direction = Annotated[
    Any,
    PlainValidator(_direction),
    WithJsonSchema({"enum": ["left", "right", "Left", "Right"]}),
]


class Body(BaseModel):
    """A body of text-embeddings-inference: fields that it does not know are ignored, types are not
    converted.
    """

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class Cut(Body):
    """Options for texts that are too long."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"


class Encoded(Cut):
    """Options of encoding."""

    prompt_name: str | None = None


class EmbedAll(Encoded):
    """``/embed_all``."""

    inputs: Inputs


class EmbedSparse(EmbedAll):
    """``/embed_sparse``; the last four fields are ours."""

    top_k: int | None = Field(default=None, ge=1)
    threshold: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    tokens: bool = False
    format: Literal["values", "arrays", "tokens"] = "values"


class Embed(EmbedAll):
    """``/embed``."""

    normalize: bool = True
    dimensions: int | None = Field(default=None, ge=1)


class OpenAIEmbeddings(Body):
    """``/v1/embeddings``."""

    input: Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None


class SimilarityInputs(Body):
    """The inputs of ``/similarity``."""

    source_sentence: str
    sentences: list[str]


class Similarity(Body):
    """``/similarity``."""

    inputs: SimilarityInputs
    parameters: Encoded | None = None


class Predict(Body):
    """``/predict``, which no model here answers."""

    inputs: Any = None


class Vertex(Body):
    """``/vertex``: bodies of ``/rerank``, and of what the first model makes."""

    instances: list[Any]


class Tokenize(Body):
    """``/tokenize``; the last field is ours."""

    inputs: Texts
    add_special_tokens: bool = True
    prompt_name: str | None = None
    offsets: Literal["bytes", "characters"] = "bytes"


class Decode(Body):
    """``/decode``."""

    ids: IdLists
    skip_special_tokens: bool = True


class Rerank(Cut):
    """``/rerank``: with ``texts`` as text-embeddings-inference, with ``documents`` as Cohere, Jina
    and vLLM.
    """

    query: str
    texts: Texts | None = None
    documents: Contents | None = None
    model: str | None = None
    top_n: int | None = Field(default=None, ge=1)
    raw_scores: bool = False
    return_text: bool = False
    return_documents: bool = True


class Score(Cut):
    """``/score`` of vLLM: one query with every document, or each with its own; under any of the
    names that it takes.
    """

    queries: Texts | None = Field(
        None,
        validation_alias=AliasChoices("queries", "text_1", "data_1"),
    )
    documents: Texts | None = Field(
        None,
        validation_alias=AliasChoices("documents", "items", "text_2", "data_2"),
    )
    model: str | None = None
    raw_scores: bool = False


class ClientGoneError(Exception):
    """The client closed its connection before the answer was there."""


class ServeError(Exception):
    """An error of a request, or of the service, with the code of its kind and its label among
    metrics, or others.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        status: int | None = None,
        label: str | None = None,
    ) -> None:
        super().__init__(message)
        own_status, own_label = _KINDS[kind]
        self.kind, self.status, self.label = kind, status or own_status, label or own_label
        self.message = message if len(message) <= _SHOWN else message[:_SHOWN] + " ..."

    def body(self) -> bytes:
        """The answer in the form of text-embeddings-inference."""
        return plain({"error": self.message, "error_type": self.kind})

    def openai_body(self) -> bytes:
        """The answer of its OpenAI route."""
        return plain({"message": self.message, "code": self.status, "type": self.kind})


def invalid(message: str, label: str | None = None) -> ServeError:
    """A request that means nothing here: 422."""
    return ServeError("Validation", f"Input validation error: {message}", label=label)


def empty(name: str) -> ServeError:
    """A text, or a list of token ids, without anything in it: 400."""
    return ServeError(
        "Empty",
        f"Input validation error: `{name}` cannot be empty",
        label="tokenization",
    )


def wrong_model(message: str) -> ServeError:
    """The service has no model of the kind that a route needs: 424."""
    return ServeError("Backend", message, label="model_type")


def plain(value: object) -> bytes:
    """Any value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8",
        "replace",
    )


def numbers(values: Vector) -> list[str]:
    """The shortest decimals that read back as the same float32."""
    return list(map(_number, values.astype(np.float32).tolist()))


@functools.lru_cache(1 << 16)  # weights of 16 bits are so few that nearly all were written before
def _number(value: float) -> str:
    return str(np.float32(value))


def strongest(row: Row, top_k: int | None, threshold: float | None) -> Row:
    """The `top_k` heaviest entries (equal weights: the lower index stays) above `threshold`, in
    index order.
    """
    indices, weights, _ = row
    keep = np.flatnonzero(weights > min(threshold or 0.0, float(np.finfo(np.float32).max)))
    if top_k is not None and keep.size > top_k:
        keep = np.sort(keep[np.argsort(-weights[keep], kind="stable")[:top_k]])
    return Row(indices[keep], weights[keep])


def listed(parts: Sequence[bytes]) -> bytes:
    """A list of what is JSON already."""
    return b"[" + b",".join(parts) + b"]"


def sparse_rows(rows: Sequence[Row], body: EmbedSparse, token: Callable[[int], str]) -> list[bytes]:
    """The parts of the answer of ``/embed_sparse``; `token` names a term."""
    if body.top_k is not None or body.threshold is not None:
        rows = [strongest(row, body.top_k, body.threshold) for row in rows]
    return [_sparse_row(row, body, token) for row in rows]


def _sparse_row(row: Row, body: EmbedSparse, token: Callable[[int], str]) -> bytes:
    named = body.tokens or body.format == "tokens"
    if row.written and not named and body.format == "values":
        return row.written
    indices, weights = row.indices.tolist(), numbers(row.weights)
    tokens = [json.dumps(token(index)) for index in indices] if named else None
    if body.format == "arrays":
        last = "" if tokens is None else f',"tokens":[{", ".join(tokens)}]'
        return f'{{"indices":{json.dumps(indices)},"values":[{",".join(weights)}]{last}}}'.encode()
    if body.format == "values":
        more = [""] * len(indices) if tokens is None else [f',"token":{name}' for name in tokens]
        entries = zip(indices, weights, more, strict=True)
        found = ",".join(
            f'{{"index":{index},"value":{weight}{name}}}' for index, weight, name in entries
        )
        return f"[{found}]".encode()
    found = ",".join(f"{name}:{weight}" for name, weight in zip(tokens or (), weights, strict=True))
    return f"{{{found}}}".encode()


_written, _known = (
    np.zeros(1 << 16, "S16"),
    np.zeros(1 << 16, bool),
)  # weights of 16 bits that were written before
_WRITTEN_AT_ONCE = 1 << 17  # entries of a batch
_writing = threading.Lock()  # numpy copies without Python's lock: nobody may read half a number


@functools.lru_cache(4)
def _openings(size: int) -> npt.NDArray[np.bytes_]:
    return np.char.add(np.char.add(b'},{"index":', np.arange(size).astype("S")), b',"value":')


def rows_of(offsets: Sequence[int], indices: npt.NDArray[np.int32], weights: Vector) -> list[Row]:
    """Each row by itself, copied for a cache to keep no batch; written if all weights are of 16
    bits, as of bf16.

    ``[{"index", "value"}]`` of all rows at once: parts of fixed sizes, without their padding.
    """
    bits, parts = weights.view(np.uint32), np.empty(0, np.void)
    if 0 < len(bits) <= _WRITTEN_AT_ONCE and not np.bitwise_or.reduce(bits) & 0xFFFF:
        with _writing:
            if np.count_nonzero(known := _known[bits >> 16]) < len(known):
                new = bits[~known]
                _written[new >> 16], _known[new >> 16] = numbers(new.view(np.float32)), True
            values = _written[bits >> 16]
        openings = _openings(1 << int(indices.max()).bit_length())[indices]
        parts = np.empty(
            len(bits),
            np.dtype([("opening", openings.dtype), ("value", values.dtype)]),
        )
        parts["opening"], parts["value"] = openings, values
    found = []
    for a, b in itertools.pairwise(offsets):
        written = (
            b"[" + parts[a:b].tobytes().translate(None, b"\0")[2:] + b"}]"
            if len(parts) and a < b
            else b""
        )
        found.append(Row(indices[a:b].copy(), weights[a:b].copy(), written))
    return found


def vectors(rows: Sequence[Vector]) -> list[bytes]:
    """``[float]`` of each row."""
    return [f"[{','.join(numbers(row))}]".encode() for row in rows]


def matrices(rows: Sequence[Tensor]) -> list[bytes]:
    """``[[float]]`` of each tensor ``[tokens, D]``."""
    return [listed(vectors(list(row.numpy()))) for row in rows]


def cosines(rows: Sequence[Any], kind: str) -> list[float]:
    """Cosine similarity of the first row, ``"sparse"`` or not, with each of the others; that of an
    empty one is 0.
    """
    first, *others = rows
    if kind == "sparse":
        both = [(other, *np.intersect1d(first[0], other[0], True, True)[1:]) for other in others]
        dots = [
            float(first[1][mine].astype(np.float64) @ other[1][its]) for other, mine, its in both
        ]
        rows = [row[1] for row in rows]
    else:
        dots = (np.stack(others).astype(np.float64) @ first).tolist()
    lengths = [float(np.linalg.norm(row.astype(np.float64))) for row in rows]
    scales = [lengths[0] * length for length in lengths[1:]]
    return [dot / scale if scale > 0 else 0.0 for dot, scale in zip(dots, scales, strict=True)]
