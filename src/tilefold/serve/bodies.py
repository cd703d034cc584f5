"""Bodies of requests: read with limits of size and time, and checked."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from tilefold.serve.errors import ClientGoneError, ServeError, invalid
from tilefold.serve.settings import Limits

__all__ = ["Single", "explained", "read"]

B = TypeVar("B", bound=BaseModel)
_TEXT_OR_IDS = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]}
_INPUTS_SCHEMA = {"oneOf": [*_TEXT_OR_IDS["oneOf"], {"type": "array", "items": _TEXT_OR_IDS}]}
_TEXTS_SCHEMA = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in value)


class Single(list[Any]):
    """The one input of a request that gave no list of them, which metrics count apart."""


def _inputs(value: Any) -> list[Any]:
    """Texts and lists of token ids, always as a list of inputs."""
    if isinstance(value, str) or (value and _is_ids(value)):
        return Single([value])
    if isinstance(value, list) and all(isinstance(each, str) or _is_ids(each) for each in value):
        return value
    raise ValueError("expected a text, a list of texts, or lists of token ids")


def _texts(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    raise ValueError("expected a text or a list of texts")


def _id_lists(value: Any) -> list[Any]:
    if value and _is_ids(value):
        return [value]
    if isinstance(value, list) and all(_is_ids(each) for each in value):
        return value
    raise ValueError("expected a list of token ids, or a list of such lists")


def _contents(value: Any) -> list[Any]:
    """Documents of a reranker: texts, or objects with a text."""
    found = [each.get("text") if isinstance(each, dict) else each for each in value] if isinstance(value, list) else []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in found):
        raise ValueError("expected a list of texts, or of objects with a text")
    return found


def _direction(value: Any) -> str:
    if isinstance(value, str) and value.lower() in ("left", "right"):
        return value.lower()
    raise ValueError("expected 'left' or 'right'")


Inputs = Annotated[list[Any], PlainValidator(_inputs), WithJsonSchema(_INPUTS_SCHEMA)]
Texts = Annotated[list[Any], PlainValidator(_texts), WithJsonSchema(_TEXTS_SCHEMA)]
IdLists = Annotated[list[Any], PlainValidator(_id_lists)]
Contents = Annotated[list[Any], PlainValidator(_contents)]
Direction = Annotated[Any, PlainValidator(_direction), WithJsonSchema({"enum": ["left", "right", "Left", "Right"]})]


class Body(BaseModel):
    """A body of text-embeddings-inference: fields that it does not know are ignored, types are not converted."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class Encoded(Body):
    """Options of encoding."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"
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


class Rerank(Body):
    """``/rerank``: with ``texts`` as text-embeddings-inference, with ``documents`` as Cohere, Jina and vLLM."""

    query: str
    texts: Texts | None = None
    documents: Contents | None = None
    model: str | None = None
    top_n: int | None = Field(default=None, ge=1)
    raw_scores: bool = False
    return_text: bool = False
    return_documents: bool = True
    truncate: bool | None = None
    truncation_direction: Direction = "right"


class Score(Body):
    """``/score`` of vLLM: one query with every document, or each with its own."""

    queries: Texts | None = None
    text_1: Texts | None = None
    data_1: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    text_2: Texts | None = None
    data_2: Texts | None = None
    model: str | None = None
    raw_scores: bool = False
    truncate: bool | None = None
    truncation_direction: Direction = "right"


async def read(request: Request, model: type[B], limits: Limits) -> B:
    """The body of a request."""
    _check_type(request)
    raw = await _read(request, limits)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise ServeError("Validation", f"the body is not valid JSON: {first['msg']}", status=400) from None
        raise invalid(explained(error)) from None


def explained(error: ValidationError, place: str = "") -> str:
    """First wrong field of a body, or of the part of one at `place`, and how many more there are."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(filter(None, [place, *map(str, first["loc"])])) or "body"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"`{where}`: {first['msg'].removeprefix('Value error, ')}{more}"


def _check_type(request: Request) -> None:
    kind, *rest = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    charsets = {part.partition("=")[2].strip('"') for part in rest if part.startswith("charset=")}
    json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not json or not charsets <= {"utf-8", "utf8"}:
        raise ServeError("Validation", "expected a body of Content-Type: application/json in UTF-8", status=415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ServeError("Validation", "expected a body without Content-Encoding", status=415)


async def _read(request: Request, limits: Limits) -> bytes:
    """The bytes of the body, no more of them than the limit, in no more time than there is."""
    too_large = ServeError("Validation", f"the body has more than {limits.payload_limit} bytes", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.payload_limit:
        raise too_large
    body, until, more = bytearray(), time.monotonic() + limits.body_seconds, True
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), max(0.001, until - time.monotonic()))
        except asyncio.TimeoutError:
            raise ServeError("Validation", f"the body took more than {limits.body_seconds:g} s", status=408) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limits.payload_limit:
            raise too_large
    return bytes(body)
