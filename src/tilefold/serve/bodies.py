"""Bodies of requests, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

__all__ = ["Body", "Single"]

_TEXT_OR_IDS = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]}
_INPUTS_SCHEMA = {"oneOf": [*_TEXT_OR_IDS["oneOf"], {"type": "array", "items": _TEXT_OR_IDS}]}
_TEXTS_SCHEMA = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in value)


class Single(list[Any]):
    """The one input of a request that gave no list of them, which metrics count apart."""


def _listed(is_one: Callable[[object], bool], is_each: Callable[[object], bool], expected: str) -> PlainValidator:
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
    found = [each.get("text") if isinstance(each, dict) else each for each in value] if isinstance(value, list) else []
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
Texts = Annotated[list[Any], _listed(_is_text, _is_text, "a text or a list of texts"), WithJsonSchema(_TEXTS_SCHEMA)]
IdLists = Annotated[
    list[Any],
    _listed(lambda value: bool(value and _is_ids(value)), _is_ids, "a list of token ids, or a list of such lists"),
]
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
