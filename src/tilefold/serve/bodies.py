"""Bodies of requests and their checks, errors, and the JSON of vectors and similarities."""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from tilefold._internal.typing import Tensor

Vector = npt.NDArray[np.float32]


class Row(NamedTuple):
    """A sparse vector of n entries.

    Attributes:
        indices: indices of the terms in ascending order, ``[n]``.
        weights: weight of each term, ``[n]``.
        json: the vector in the default format of ``/embed_sparse``; empty if it was not written.
    """

    indices: npt.NDArray[np.int32]
    weights: Vector
    json: bytes = b""


@dataclass(frozen=True)
class ImageData:
    """An image of a request in the bytes of its file.

    Attributes:
        content: the file, such as a PNG.
    """

    content: bytes

    @classmethod
    def parse(cls, text: str) -> ImageData:
        """Read base64, or a data URL with base64.

        Raises:
            ValueError: if the text is something else, such as a URL. A server fetches nothing.
        """
        prefix = _DATA_URL.match(text)
        encoded = text if prefix is None else text[prefix.end() :]
        try:
            content = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(
                "expected an image in base64, or as data:image/png;base64,...; URLs are not "
                "fetched",
            ) from None
        if not content:
            raise ValueError("expected an image in base64, got an empty text")
        return cls(content)

    def __len__(self) -> int:
        """Return the number of bytes of the file."""
        return len(self.content)


_DATA_URL = re.compile(r"data:[\w.+/-]*;base64,")
# Kind of an error -> its HTTP status, and its label in the metric te_request_failure.
_STATUS_AND_LABEL = {
    "Unhealthy": (503, "unhealthy"),
    "Backend": (424, "inference"),
    "Overloaded": (429, "overloaded"),
    "Validation": (422, "validation"),
    "Tokenizer": (422, "tokenization"),
    "Empty": (400, "validation"),
}
_MAX_MESSAGE_CHARACTERS = 300
_IMAGE = {
    "type": "object",
    "properties": {"image": {"type": "string", "contentEncoding": "base64"}},
    "required": ["image"],
}
_TEXT_OR_IDS = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        _IMAGE,
    ],
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


def _is_image(value: object) -> bool:
    """Return whether a value is an image of a form, or an object ``{"image": base64}``."""
    if isinstance(value, ImageData):
        return True
    return isinstance(value, dict) and value.keys() == {"image"} and _is_text(value["image"])


def _is_item(value: object) -> bool:
    """Return whether a value is a text, a list of token ids or an image."""
    return _is_text(value) or _is_ids(value) or _is_image(value)


def _is_input(value: object) -> bool:
    """Return whether a value is a text, a list of at least one token id or an image."""
    return _is_text(value) or _is_nonempty_ids(value) or _is_image(value)


def _with_image_data(value: Any) -> Any:
    """Replace an object ``{"image": base64}`` by its image, and return other values unchanged."""
    if isinstance(value, dict) and _is_image(value):
        return ImageData.parse(value["image"])
    return value


class Single(list[Any]):
    """List of one input that a request has sent without a list, which metrics count separately."""


def _one_or_list_validator(
    is_input: Callable[[object], bool],
    is_item: Callable[[object], bool],
    expected: str,
) -> PlainValidator:
    """Create a validator for a field that is one input or a list of inputs.

    The validated field is always a list: a single input is wrapped in a :class:`Single`.

    The two functions may differ for an empty list. The field ``[]`` is a list without inputs, and
    not an input without token ids. The field ``[[]]`` is a list of one input without token ids,
    which is refused later with a better message.

    Args:
        is_input: function that returns whether the value of the field is a single input.
        is_item: function that returns whether an item of the list is an input.
        expected: description of a valid field, for the error message.
    """

    def to_list(value: object) -> list[Any]:
        """Return the inputs of a field, with images decoded from base64, or raise ``ValueError``.

        A single input becomes a list of the class :class:`Single`, which metrics count separately.
        """
        if is_input(value):
            return Single([_with_image_data(value)])
        if isinstance(value, list) and all(map(is_item, value)):
            return [_with_image_data(item) for item in value]
        raise ValueError(f"expected {expected}")

    return PlainValidator(to_list)


def _parse_documents(value: object) -> list[Any]:
    """Return the texts and images of the field ``documents`` of ``/rerank``.

    The field is a list of texts, or of objects with a text or an image.

    Raises:
        ValueError: if the value is anything else.
    """
    expected = "expected a list of texts, or of objects with a text or an image"
    if not isinstance(value, list):
        raise ValueError(expected)
    documents = []
    for item in value:
        has_text = isinstance(item, dict) and "text" in item
        documents.append(_with_image_data(item["text"] if has_text else item))
    if not all(isinstance(document, (str, ImageData)) for document in documents):
        raise ValueError(expected)
    return documents


def _check_direction(value: object) -> str:
    """Return the field ``truncation_direction`` in lower case, or raise ``ValueError``."""
    if isinstance(value, str) and value.lower() in ("left", "right"):
        return value.lower()
    raise ValueError("expected 'left' or 'right'")


Inputs = Annotated[
    list[Any],
    _one_or_list_validator(
        _is_input,
        _is_item,
        'a text, a list of texts, lists of token ids, or images as {"image": base64}',
    ),
    WithJsonSchema(_INPUTS_SCHEMA),
]
Texts = Annotated[
    list[Any],
    _one_or_list_validator(_is_text, _is_text, "a text or a list of texts"),
    WithJsonSchema(_TEXTS_SCHEMA),
]
IdLists = Annotated[
    list[Any],
    _one_or_list_validator(
        _is_nonempty_ids,
        _is_ids,
        "a list of token ids, or a list of such lists",
    ),
]
Contents = Annotated[list[Any], PlainValidator(_parse_documents)]
Direction = Annotated[
    Any,
    PlainValidator(_check_direction),
    WithJsonSchema({"enum": ["left", "right", "Left", "Right"]}),
]


class Body(BaseModel):
    """Body of a request. Unknown fields are ignored, and types are not converted."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class StrictBody(Body):
    """Body that refuses unknown fields, and whose types are not converted."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class TruncationOptions(Body):
    """Options for texts that are too long."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"


class Encoded(TruncationOptions):
    """Options of encoding."""

    prompt_name: str | None = None


class EmbedAll(Encoded):
    """Body of ``/embed_all``."""

    inputs: Inputs


class EmbedSparse(EmbedAll):
    """Body of ``/embed_sparse``. text-embeddings-inference does not have the last four fields."""

    # Comments, since the docstring of a body becomes part of the OpenAPI description.
    top_k: int | None = Field(default=None, ge=1)  # largest number of entries of a vector
    # Entries with this weight or less are left out.
    threshold: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    tokens: bool = False  # whether entries have their token
    format: Literal["values", "arrays", "tokens"] = "values"  # see _sparse_vector_json()


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
    """Body of ``/tokenize``. text-embeddings-inference does not have the field ``offsets``."""

    inputs: Texts
    add_special_tokens: bool = True
    prompt_name: str | None = None
    offsets: Literal["bytes", "characters"] = "bytes"


class Decode(Body):
    """Body of ``/decode``."""

    ids: IdLists
    skip_special_tokens: bool = True


class Rerank(TruncationOptions):
    """Body of ``/rerank``.

    ``texts`` selects the response format of text-embeddings-inference, and ``documents`` the
    format of Cohere, Jina and vLLM.
    """

    query: str
    texts: Texts | None = None
    documents: Contents | None = None
    model: str | None = None
    top_n: int | None = Field(default=None, ge=1)
    raw_scores: bool = False
    return_text: bool = False
    return_documents: bool = True


class Score(TruncationOptions):
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
    """Raised if the client closes its connection before it has the response."""


class ServeError(Exception):
    """Error of a request or of the service that is reported to the client.

    Attributes:
        kind: error type of text-embeddings-inference, such as ``"Validation"``.
        status: HTTP status.
        label: label in the metrics.
        message: message for the client.
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
            message: message for the client. A long one is shortened, as it may repeat long values
                of the request.
            status: HTTP status; ``None`` uses the status of the kind.
            label: label in the metrics; ``None`` uses the label of the kind.
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
        """Return the body of the response in the format of text-embeddings-inference."""
        return to_json({"error": self.message, "error_type": self.kind})

    def openai_body(self) -> bytes:
        """Return the body in the format of text-embeddings-inference's OpenAI routes."""
        return to_json({"message": self.message, "code": self.status, "type": self.kind})


def invalid_input_error(message: str, label: str | None = None) -> ServeError:
    """Create the error for a body with a wrong value, with status 422."""
    return ServeError("Validation", f"Input validation error: {message}", label=label)


def empty_input_error(name: str) -> ServeError:
    """Create the error for an empty text or an empty list of token ids, with status 400."""
    return ServeError(
        "Empty",
        f"Input validation error: `{name}` cannot be empty",
        label="tokenization",
    )


def wrong_model_error(message: str) -> ServeError:
    """Create the error for a route whose kind of model the service lacks, with status 424."""
    return ServeError("Backend", message, label="model_type")


def to_json(value: object) -> bytes:
    """Serialize a value to compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8",
        "replace",
    )


def format_numbers(values: Vector) -> list[str]:
    """Format each float32 as the shortest decimal text that reads back as the same number."""
    return list(map(_format_number, values.astype(np.float32).tolist()))


# The cache has space for all numbers of 16 bits.
@functools.lru_cache(1 << 16)
def _format_number(value: float) -> str:
    """Format a float32 as the shortest decimal text that reads back as the same number."""
    return str(np.float32(value))


def keep_largest(row: Row, top_k: int | None, threshold: float | None) -> Row:
    """Return the entries of a sparse vector with the largest weights, ordered by index.

    Args:
        row: the vector.
        top_k: largest number of entries; ``None`` keeps all. Ties keep the lower index.
        threshold: entries whose weight is not above it are removed; ``None`` means 0.
    """
    # numpy would convert a threshold above the largest float32 to infinity, with a warning.
    largest_float32 = float(np.finfo(np.float32).max)
    min_weight = min(threshold or 0.0, largest_float32)
    positions = np.flatnonzero(row.weights > min_weight)
    if top_k is not None and positions.size > top_k:
        # A stable sort keeps equal weights in the order of their indices.
        by_weight = np.argsort(-row.weights[positions], kind="stable")
        positions = np.sort(positions[by_weight[:top_k]])
    return Row(row.indices[positions], row.weights[positions])


def json_list(items: Sequence[bytes]) -> bytes:
    """Return a JSON list of items that have already been serialized."""
    return b"[" + b",".join(items) + b"]"


def sparse_vectors_json(
    rows: Sequence[Row],
    body: EmbedSparse,
    token_of_index: Callable[[int], str],
) -> list[bytes]:
    """Serialize sparse vectors to the JSON of ``/embed_sparse``.

    Args:
        rows: the vectors.
        body: body of the request, whose options select entries and the format.
        token_of_index: function that returns the token of a vocabulary index.
    """
    if body.top_k is not None or body.threshold is not None:
        rows = [keep_largest(row, body.top_k, body.threshold) for row in rows]
    return [_sparse_vector_json(row, body, token_of_index) for row in rows]


def _sparse_vector_json(
    row: Row,
    body: EmbedSparse,
    token_of_index: Callable[[int], str],
) -> bytes:
    """Serialize a sparse vector to JSON in the format that a request asks for.

    The formats are ``"values"`` (a list of entries), ``"arrays"`` (an object of lists) and
    ``"tokens"`` (an object of token -> weight).

    Args:
        row: the vector.
        body: body of the request, with the format and whether to add tokens to the first two.
        token_of_index: function that returns the token of a vocabulary index.
    """
    # The batch worker has serialized `row.json` in the default format, which has no tokens.
    is_default_format = body.format == "values" and not body.tokens
    if row.json and is_default_format:
        return row.json
    indices = row.indices.tolist()
    weights = format_numbers(row.weights)
    if body.format == "tokens":
        return _weights_by_token_json(weights, _tokens_json(indices, token_of_index))
    tokens = _tokens_json(indices, token_of_index) if body.tokens else None
    if body.format == "arrays":
        return _arrays_json(indices, weights, tokens)
    return _entries_json(indices, weights, tokens)


def _tokens_json(indices: Sequence[int], token_of_index: Callable[[int], str]) -> list[str]:
    """Return the token of each vocabulary index as a JSON string."""
    return [json.dumps(token_of_index(index)) for index in indices]


def _weights_by_token_json(weights: Sequence[str], tokens: Sequence[str]) -> bytes:
    """Return ``{"token": weight, ...}``.

    Args:
        weights: decimal text of each weight.
        tokens: JSON text of each token.
    """
    members = [f"{token}:{weight}" for token, weight in zip(tokens, weights, strict=True)]
    return f"{{{','.join(members)}}}".encode()


def _arrays_json(
    indices: Sequence[int],
    weights: Sequence[str],
    tokens: Sequence[str] | None,
) -> bytes:
    """Return ``{"indices": [...], "values": [...], "tokens": [...]}``.

    Args:
        indices: index of each term.
        weights: decimal text of each weight.
        tokens: JSON text of each token; ``None`` leaves out ``"tokens"``.
    """
    token_list = "" if tokens is None else f',"tokens":[{", ".join(tokens)}]'
    weight_list = ",".join(weights)
    return f'{{"indices":{json.dumps(indices)},"values":[{weight_list}]{token_list}}}'.encode()


def _entries_json(
    indices: Sequence[int],
    weights: Sequence[str],
    tokens: Sequence[str] | None,
) -> bytes:
    """Return ``[{"index": index, "value": weight, "token": token}, ...]``.

    Args:
        indices: index of each term.
        weights: decimal text of each weight.
        tokens: JSON text of each token; ``None`` leaves out ``"token"``.
    """
    token_fields = [""] * len(indices)
    if tokens is not None:
        token_fields = [f',"token":{token}' for token in tokens]
    entries = [
        f'{{"index":{index},"value":{weight}{token_field}}}'
        for index, weight, token_field in zip(indices, weights, token_fields, strict=True)
    ]
    return f"[{','.join(entries)}]".encode()


_MAX_BATCH_ENTRIES = 1 << 17  # largest number of entries of a batch that is serialized at once


class _Bfloat16Texts:
    """Table of the decimal texts of all 65,536 bfloat16 numbers, which is filled on demand."""

    def __init__(self) -> None:
        """Create an empty table."""
        self._texts = np.zeros(1 << 16, "S16")
        self._is_formatted = np.zeros(1 << 16, bool)
        # numpy copies without the GIL: no thread may read a text that another one is writing.
        self._lock = threading.Lock()

    def format(self, bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.bytes_]:
        """Format bfloat16 numbers as decimal texts.

        Args:
            bits: bit patterns of the numbers as float32, ``[n]``. The lower 16 bits are 0, and the
                upper 16 bits are the position in the table.

        Returns:
            Texts of 16 bytes, ``[n]``, padded with zero bytes.
        """
        with self._lock:
            is_formatted = self._is_formatted[bits >> 16]
            if not is_formatted.all():
                new_bits = bits[~is_formatted]
                self._texts[new_bits >> 16] = format_numbers(new_bits.view(np.float32))
                self._is_formatted[new_bits >> 16] = True
            texts: npt.NDArray[np.bytes_] = self._texts[bits >> 16]
        return texts


_bfloat16_texts = _Bfloat16Texts()


@functools.lru_cache(4)
def _entry_openings(size: int) -> npt.NDArray[np.bytes_]:
    """Return the JSON before the weight of an entry, for each index below `size`.

    An opening such as ``},{"index":7,"value":`` also closes the previous entry. It is padded with
    zero bytes.
    """
    indices = np.arange(size).astype("S")
    return np.char.add(np.char.add(b'},{"index":', indices), b',"value":')


def split_rows(
    offsets: Sequence[int],
    indices: npt.NDArray[np.int32],
    weights: Vector,
) -> list[Row]:
    """Split a batch of sparse vectors into rows, and serialize them if all weights are bfloat16.

    There are only 65,536 bfloat16 numbers, so that their decimal texts are read from a table. Rows
    with other weights get an empty ``json``, and are serialized when a response needs it.

    Rows are copied, so that a cache of some rows does not keep the memory of the whole batch.

    Args:
        offsets: CSR offsets of the rows: where each row begins, and last the number of entries n.
        indices: indices of the terms of all rows, ``[n]``.
        weights: weights of all rows in fp32, ``[n]``.
    """
    bits = weights.view(np.uint32)
    json_entries = None
    if 0 < len(bits) <= _MAX_BATCH_ENTRIES:
        # A bfloat16 number that is stored as float32 has zeros as its lower 16 bits.
        has_bfloat16_weights = not np.bitwise_or.reduce(bits) & 0xFFFF
        if has_bfloat16_weights:
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
    """Format the entries of sparse vectors as JSON, in a structured array ``[n]``.

    An entry ``},{"index":7,"value":0.5`` has two parts: the opening, which ends before the weight,
    and the weight. Both are read from tables with numpy, which is faster than formatting in Python.
    The parts have fixed sizes, and are padded with zero bytes that :func:`_join_entries` removes.

    Args:
        indices: index of each entry's term, ``[n]``.
        bits: bit patterns of the weights, ``[n]``: bfloat16 numbers that are stored as float32.
    """
    values = _bfloat16_texts.format(bits)
    # The table has an opening for every index up to the largest one of the batch. Its size is
    # rounded up to a power of 2, so that only a few different tables are computed and cached.
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
    """Join the entries of a row to a JSON list, without their padding.

    Args:
        entries: entries such as ``},{"index":7,"value":0.5``, padded with zero bytes. Each closes
            the one before it.
    """
    joined = entries.tobytes().translate(None, b"\0")
    return b"[" + joined.removeprefix(b"},") + b"}]"


def dense_vectors_json(rows: Sequence[Vector]) -> list[bytes]:
    """Serialize each dense vector ``[D]`` to a JSON list."""
    return [f"[{','.join(format_numbers(row))}]".encode() for row in rows]


def token_vectors_json(rows: Sequence[Tensor]) -> list[bytes]:
    """Serialize each tensor of token vectors ``[tokens, D]`` to a JSON list of lists."""
    return [json_list(dense_vectors_json(list(row.numpy()))) for row in rows]


def sparse_cosines(source: Row, others: Sequence[Row]) -> list[float]:
    """Compute the cosine similarities, in fp64, of a sparse vector with other vectors."""
    dots = [_sparse_dot(source, other) for other in others]
    return _divide_by_norms(dots, source.weights, [other.weights for other in others])


def dense_cosines(source: Vector, others: Sequence[Vector]) -> list[float]:
    """Compute the cosine similarities, in fp64, of a dense vector with other vectors."""
    dots = (np.stack(others).astype(np.float64) @ source).tolist()
    return _divide_by_norms(dots, source, others)


def _divide_by_norms(
    dots: Sequence[float],
    source: Vector,
    others: Sequence[Vector],
) -> list[float]:
    """Compute cosine similarities from inner products; with a zero vector they are 0.

    Args:
        dots: inner product of the source with each of the other vectors.
        source: elements of the source; zeros may be left out.
        others: elements of each of the other vectors.
    """
    source_norm = _norm(source)
    similarities = []
    for dot, other in zip(dots, others, strict=True):
        product_of_norms = source_norm * _norm(other)
        similarities.append(dot / product_of_norms if product_of_norms > 0 else 0.0)
    return similarities


def _norm(vector: Vector) -> float:
    """Compute the Euclidean norm of a vector in fp64."""
    return float(np.linalg.norm(vector.astype(np.float64)))


def _sparse_dot(first: Row, second: Row) -> float:
    """Compute the inner product of two sparse vectors in fp64.

    Args:
        first: a sparse vector.
        second: another one over the same vocabulary.
    """
    _, first_positions, second_positions = np.intersect1d(
        first.indices,
        second.indices,
        assume_unique=True,
        return_indices=True,
    )
    first_weights = first.weights[first_positions].astype(np.float64)
    return float(first_weights @ second.weights[second_positions])
