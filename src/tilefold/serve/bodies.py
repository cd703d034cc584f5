"""Bodies of requests with their checks, errors, and the JSON of vectors and similarities."""

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
    """A sparse vector of n entries.

    Attributes:
        indices: terms in rising order, ``[n]``.
        weights: weight of each term, ``[n]``.
        json: answer of ``/embed_sparse`` without options; empty if it was not computed.
    """

    indices: npt.NDArray[np.int32]
    weights: Vector
    json: bytes = b""


# Kind of an error -> HTTP status, and the label of the metric te_request_failure.
_STATUS_AND_LABEL = {
    "Unhealthy": (503, "unhealthy"),
    "Backend": (424, "inference"),
    "Overloaded": (429, "overloaded"),
    "Validation": (422, "validation"),
    "Tokenizer": (422, "tokenization"),
    "Empty": (400, "validation"),
}
_MAX_MESSAGE_CHARACTERS = 300
_TEXT_OR_IDS = {
    "oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}],
}
_INPUTS_SCHEMA = {"oneOf": [*_TEXT_OR_IDS["oneOf"], {"type": "array", "items": _TEXT_OR_IDS}]}
_TEXTS_SCHEMA = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _is_text(value: object) -> bool:
    """Return whether a value of a body is a text."""
    return isinstance(value, str)


def _is_ids(value: object) -> bool:
    """Return whether a value of a body is a list of token ids."""
    if not isinstance(value, list):
        return False
    return all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in value)


def _is_nonempty_ids(value: object) -> bool:
    """Return whether a value is a list of at least one token id.

    An empty list is a list of no inputs.
    """
    return bool(value) and _is_ids(value)


def _is_text_or_ids(value: object) -> bool:
    """Return whether a value is a text or a list of token ids."""
    return _is_text(value) or _is_ids(value)


def _is_text_or_nonempty_ids(value: object) -> bool:
    """Return whether a value is a text or a list of at least one token id."""
    return _is_text(value) or _is_nonempty_ids(value)


class Single(list[Any]):
    """List of the only input of a request that has no list; metrics count such requests apart."""


def _one_or_list(
    is_input: Callable[[object], bool],
    is_item: Callable[[object], bool],
    expected: str,
) -> PlainValidator:
    """Create a validator of a field that holds one input or a list of inputs.

    The validated field is always a list. One input becomes a :class:`Single`.

    Args:
        is_input: returns whether a value is one input.
        is_item: returns whether an item of a list is an input.
        expected: description of a valid value, for the error.
    """

    def check(value: object) -> list[Any]:
        if is_input(value):
            return Single([value])
        if isinstance(value, list) and all(map(is_item, value)):
            return value
        raise ValueError(f"expected {expected}")

    return PlainValidator(check)


def _check_documents(value: object) -> list[Any]:
    """Return the texts of a reranker's documents, which are texts or objects with a text.

    Raises:
        ValueError: for another value.
    """
    expected = "expected a list of texts, or of objects with a text"
    if not isinstance(value, list):
        raise ValueError(expected)
    texts = [item.get("text") if isinstance(item, dict) else item for item in value]
    if not all(map(_is_text, texts)):
        raise ValueError(expected)
    return texts


def _check_direction(value: object) -> str:
    """Return a direction of truncation in lower case, or raise ``ValueError``."""
    if isinstance(value, str) and value.lower() in ("left", "right"):
        return value.lower()
    raise ValueError("expected 'left' or 'right'")


Inputs = Annotated[
    list[Any],
    _one_or_list(
        _is_text_or_nonempty_ids,
        _is_text_or_ids,
        "a text, a list of texts, or lists of token ids",
    ),
    WithJsonSchema(_INPUTS_SCHEMA),
]
Texts = Annotated[
    list[Any],
    _one_or_list(_is_text, _is_text, "a text or a list of texts"),
    WithJsonSchema(_TEXTS_SCHEMA),
]
IdLists = Annotated[
    list[Any],
    _one_or_list(
        _is_nonempty_ids,
        _is_ids,
        "a list of token ids, or a list of such lists",
    ),
]
Contents = Annotated[list[Any], PlainValidator(_check_documents)]
Direction = Annotated[
    Any,
    PlainValidator(_check_direction),
    WithJsonSchema({"enum": ["left", "right", "Left", "Right"]}),
]


class Body(BaseModel):
    """Body of a request; unknown fields are ignored, and types are not converted."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class Cut(Body):
    """Options for texts that are too long."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"


class Encoded(Cut):
    """Options of encoding."""

    prompt_name: str | None = None


class EmbedAll(Encoded):
    """Body of ``/embed_all``."""

    inputs: Inputs


class EmbedSparse(EmbedAll):
    """Body of ``/embed_sparse``; text-embeddings-inference lacks the last four fields."""

    # Largest number of entries of a vector, and weight that they exceed; then whether entries have
    # their token, and whether the answer is a list of entries, lists, or weights by token.

    top_k: int | None = Field(default=None, ge=1)
    threshold: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    tokens: bool = False
    format: Literal["values", "arrays", "tokens"] = "values"


class Embed(EmbedAll):
    """Body of ``/embed``."""

    normalize: bool = True
    dimensions: int | None = Field(default=None, ge=1)


class OpenAIEmbeddings(Body):
    """Body of ``/v1/embeddings``."""

    input: Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None


class SimilarityInputs(Body):
    """Field ``inputs`` of ``/similarity``."""

    source_sentence: str
    sentences: list[str]


class Similarity(Body):
    """Body of ``/similarity``."""

    inputs: SimilarityInputs
    parameters: Encoded | None = None


class Predict(Body):
    """Body of ``/predict``, which no model of a service answers."""

    inputs: Any = None


class Vertex(Body):
    """Body of ``/vertex``: a list of bodies of ``/rerank`` or of the first model's route."""

    instances: list[Any]


class Tokenize(Body):
    """Body of ``/tokenize``; text-embeddings-inference has no field ``offsets``."""

    inputs: Texts
    add_special_tokens: bool = True
    prompt_name: str | None = None
    offsets: Literal["bytes", "characters"] = "bytes"


class Decode(Body):
    """Body of ``/decode``."""

    ids: IdLists
    skip_special_tokens: bool = True


class Rerank(Cut):
    """Body of ``/rerank``.

    It has ``texts`` in the form of text-embeddings-inference, and ``documents`` in that of Cohere,
    Jina and vLLM.
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
    """Body of ``/score``, under all names that vLLM accepts for its fields.

    It has one query for all documents, or a query for each document.
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
    """Error of a request or of the service, which the client is answered.

    Args:
        kind: error type of text-embeddings-inference, such as ``"Validation"``.
        message: message for the client; it is shortened.
        status: HTTP status; ``None`` takes that of the kind.
        label: label in the metrics; ``None`` takes that of the kind.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        status: int | None = None,
        label: str | None = None,
    ) -> None:
        """Create the error.

        Args:
            kind: error type of text-embeddings-inference, a key of :data:`_STATUS_AND_LABEL`.
            message: message for the client. It may repeat values of the request, so it is cut.
            status: HTTP status; ``None`` takes that of the kind.
            label: label in the metrics; ``None`` takes that of the kind.
        """
        super().__init__(message)
        default_status, default_label = _STATUS_AND_LABEL[kind]
        self.kind = kind
        self.status = status or default_status
        self.label = label or default_label
        self.message = message
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            self.message = message[:_MAX_MESSAGE_CHARACTERS] + " ..."

    def body(self) -> bytes:
        """Return the answer in the form of text-embeddings-inference."""
        return plain({"error": self.message, "error_type": self.kind})

    def openai_body(self) -> bytes:
        """Return the answer in the form of OpenAI's routes of text-embeddings-inference."""
        return plain({"message": self.message, "code": self.status, "type": self.kind})


def invalid(message: str, label: str | None = None) -> ServeError:
    """Return the error for a body with a wrong value, with status 422."""
    return ServeError("Validation", f"Input validation error: {message}", label=label)


def empty(name: str) -> ServeError:
    """Return the error for an empty text or an empty list of token ids, with status 400."""
    return ServeError(
        "Empty",
        f"Input validation error: `{name}` cannot be empty",
        label="tokenization",
    )


def wrong_model(message: str) -> ServeError:
    """Return the error for a route whose kind of model the service lacks, with status 424."""
    return ServeError("Backend", message, label="model_type")


def plain(value: object) -> bytes:
    """Return a value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8",
        "replace",
    )


def numbers(values: Vector) -> list[str]:
    """Return the shortest decimals that read back as the same float32."""
    return list(map(_number, values.astype(np.float32).tolist()))


# The cache has room for all weights of 16 bits.
@functools.lru_cache(1 << 16)
def _number(value: float) -> str:
    """Return the shortest decimal of a float32."""
    return str(np.float32(value))


def strongest(row: Row, top_k: int | None, threshold: float | None) -> Row:
    """Return the heaviest entries of a sparse vector, in the order of their indices.

    Args:
        row: the vector.
        top_k: largest number of entries; of equal weights, lower indices stay. ``None`` keeps all.
        threshold: entries have larger weights; ``None`` is 0.
    """
    # A larger threshold would become infinite in the comparison with float32 weights.
    largest_float32 = float(np.finfo(np.float32).max)
    positions = np.flatnonzero(row.weights > min(threshold or 0.0, largest_float32))
    if top_k is not None and positions.size > top_k:
        # A stable sort leaves equal weights in the order of their indices.
        by_weight = np.argsort(-row.weights[positions], kind="stable")
        positions = np.sort(positions[by_weight[:top_k]])
    return Row(row.indices[positions], row.weights[positions])


def json_list(items: Sequence[bytes]) -> bytes:
    """Return a JSON list of items that are JSON already."""
    return b"[" + b",".join(items) + b"]"


def sparse_rows(rows: Sequence[Row], body: EmbedSparse, token: Callable[[int], str]) -> list[bytes]:
    """Return the JSON of each sparse vector, as ``/embed_sparse`` answers.

    Args:
        rows: the vectors.
        body: options of the request.
        token: returns the name of a term.
    """
    if body.top_k is not None or body.threshold is not None:
        rows = [strongest(row, body.top_k, body.threshold) for row in rows]
    return [_sparse_row(row, body, token) for row in rows]


def _sparse_row(row: Row, body: EmbedSparse, token: Callable[[int], str]) -> bytes:
    """Return the JSON of a sparse vector in the format of a request.

    The formats are:

    - ``"tokens"``: ``{"token": weight, ...}``
    - ``"arrays"``: ``{"indices": [...], "values": [...]}``, with ``"tokens"`` on demand
    - ``"values"``: ``[{"index": index, "value": weight}, ...]``, with ``"token"`` on demand

    Args:
        row: the vector.
        body: options of the request: the format, and whether tokens are returned too.
        token: returns the name of a term.
    """
    has_tokens = body.tokens or body.format == "tokens"
    if row.json and not has_tokens and body.format == "values":
        return row.json  # written before, together with the JSON of its batch
    indices = row.indices.tolist()
    weights = numbers(row.weights)
    tokens = [json.dumps(token(index)) for index in indices] if has_tokens else []
    if body.format == "tokens":
        entries = [f"{name}:{weight}" for name, weight in zip(tokens, weights, strict=True)]
        return f"{{{','.join(entries)}}}".encode()
    if body.format == "arrays":
        token_list = f',"tokens":[{", ".join(tokens)}]' if has_tokens else ""
        value_list = ",".join(weights)
        return f'{{"indices":{json.dumps(indices)},"values":[{value_list}]{token_list}}}'.encode()
    token_fields = [f',"token":{name}' for name in tokens] if has_tokens else [""] * len(indices)
    entries = [
        f'{{"index":{index},"value":{weight}{token_field}}}'
        for index, weight, token_field in zip(indices, weights, token_fields, strict=True)
    ]
    return f"[{','.join(entries)}]".encode()


_MAX_BATCH_ENTRIES = 1 << 17  # entries of a batch whose JSON is written at once


class _ShortNumbers:
    """Decimals of float32 numbers with 16 significant bits, such as bf16 weights.

    A number is formatted once, and then read from a table by its upper 16 bits.
    """

    def __init__(self) -> None:
        self._decimals = np.zeros(1 << 16, "S16")
        self._is_formatted = np.zeros(1 << 16, bool)
        # numpy copies without Python's lock: no thread may read half of a decimal.
        self._lock = threading.Lock()

    def format(self, bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.bytes_]:
        """Return the decimals of numbers, and format those that are new.

        Args:
            bits: the numbers as their 32 bits, ``[n]``. The lower 16 bits are 0, so that the upper
                16 bits are the position in the table.

        Returns:
            The decimals as text of 16 bytes, ``[n]``, padded with zero bytes.
        """
        with self._lock:
            is_formatted = self._is_formatted[bits >> 16]
            if not is_formatted.all():
                new_bits = bits[~is_formatted]
                self._decimals[new_bits >> 16] = numbers(new_bits.view(np.float32))
                self._is_formatted[new_bits >> 16] = True
            decimals: npt.NDArray[np.bytes_] = self._decimals[bits >> 16]
        return decimals


_short_numbers = _ShortNumbers()


@functools.lru_cache(4)
def _entry_openings(size: int) -> npt.NDArray[np.bytes_]:
    """Return the JSON before the weight of an entry, for each index below `size`.

    It closes the previous entry, and is padded with zero bytes.
    """
    indices = np.arange(size).astype("S")
    return np.char.add(np.char.add(b'},{"index":', indices), b',"value":')


def rows_of(offsets: Sequence[int], indices: npt.NDArray[np.int32], weights: Vector) -> list[Row]:
    """Split a batch of sparse vectors into rows, with their JSON where that is fast to write.

    It is fast for weights that a model computed in bf16. There are only 65,536 such numbers, whose
    decimals are read from a table.

    Rows are copied, so that a cache that keeps some of them does not keep the batch.

    Args:
        offsets: where each row begins, and the end of the last one.
        indices: terms of all rows, ``[n]``.
        weights: weights of all rows, ``[n]``, in fp32.
    """
    bits = weights.view(np.uint32)
    json_entries = None
    if 0 < len(bits) <= _MAX_BATCH_ENTRIES:
        # An fp32 number that is also a bf16 number has zeros as its lower 16 bits.
        has_16_bit_weights = not np.bitwise_or.reduce(bits) & 0xFFFF
        if has_16_bit_weights:
            json_entries = _json_entries(indices, bits)
    rows = []
    for start, stop in itertools.pairwise(offsets):
        row_json = b""
        if json_entries is not None and start < stop:
            row_json = _join_entries(json_entries[start:stop])
        rows.append(Row(indices[start:stop].copy(), weights[start:stop].copy(), row_json))
    return rows


def _json_entries(
    indices: npt.NDArray[np.int32],
    bits: npt.NDArray[np.uint32],
) -> npt.NDArray[np.void]:
    """Return the JSON of entries as a structured array, ``[n]``.

    An entry ``{"index":7,"value":0.5}`` has two parts: the opening up to the weight, and the weight
    as a decimal. Both are read from tables with numpy, which is faster than formatting in Python.
    Parts have fixed sizes and are padded with zero bytes, which :func:`_join_entries` removes.

    Args:
        indices: term of each entry, ``[n]``.
        bits: weight of each entry as its 32 bits, ``[n]``; the lower 16 are 0.
    """
    values = _short_numbers.format(bits)
    # The size of the table is a power of 2, so that few different tables are computed and cached.
    n_openings = 1 << int(indices.max()).bit_length()
    openings = _entry_openings(n_openings)[indices]
    entries = np.empty(
        len(bits),
        np.dtype([("opening", openings.dtype), ("value", values.dtype)]),
    )
    entries["opening"] = openings
    entries["value"] = values
    return entries


def _join_entries(entries: npt.NDArray[np.void]) -> bytes:
    """Return a JSON list of the entries of a row, without their padding."""
    joined = entries.tobytes().translate(None, b"\0")
    return b"[" + joined.removeprefix(b"},") + b"}]"


def vectors(rows: Sequence[Vector]) -> list[bytes]:
    """Return the JSON list of each dense vector ``[D]``."""
    return [f"[{','.join(numbers(row))}]".encode() for row in rows]


def matrices(rows: Sequence[Tensor]) -> list[bytes]:
    """Return the JSON list of lists of each tensor of token vectors ``[tokens, D]``."""
    return [json_list(vectors(list(row.numpy()))) for row in rows]


def cosines(rows: Sequence[Any], kind: str) -> list[float]:
    """Compute the cosine similarity of the first vector with each of the others.

    Products and sums are in fp64. The similarity with an empty vector is 0.

    Args:
        rows: :class:`Row` of sparse vectors, or dense vectors ``[D]``.
        kind: ``"sparse"``, or the kind of another model.

    Returns:
        One similarity per vector after the first.
    """
    source, *others = rows
    if kind == "sparse":
        dots = [_sparse_dot(source, other) for other in others]
        weights = [row.weights for row in rows]
    else:
        dots = (np.stack(others).astype(np.float64) @ source).tolist()
        weights = list(rows)
    source_length, *other_lengths = (
        float(np.linalg.norm(vector.astype(np.float64))) for vector in weights
    )
    similarities = []
    for dot, other_length in zip(dots, other_lengths, strict=True):
        product_of_lengths = source_length * other_length
        similarity = dot / product_of_lengths if product_of_lengths > 0 else 0.0
        similarities.append(similarity)
    return similarities


def _sparse_dot(first: Row, second: Row) -> float:
    """Compute the inner product of two sparse vectors in fp64."""
    _, first_positions, second_positions = np.intersect1d(
        first.indices,
        second.indices,
        assume_unique=True,
        return_indices=True,
    )
    first_weights = first.weights[first_positions].astype(np.float64)
    return float(first_weights @ second.weights[second_positions])
