"""Fingerprints of the models and texts that vectors, indexes and runs were made from."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tilefold._internal.precision import (
    DTYPES,
    inference_precision,
    onnx_graph_of,
    stored_dtypes,
)
from tilefold._internal.typing import Model
from tilefold.retrieval.common.files import Json, not_a_string_error
from tilefold.retrieval.errors import PrecisionWarning

__all__ = ["Provenance", "TextsDigest", "model_fingerprint", "provenance_of", "texts_digest"]

TAG = "tilefold"
_TAG_DIGITS = 16  # first digits of a fingerprint that a tag has
# Separator of the precisions of several parts in a manifest, and in a tag, which has no spaces.
_PRECISION_SEPARATOR = ", "
_PRECISION_SEPARATOR_OF_TAG = "+"
_SAMPLES_PER_TENSOR = 1024
# Settings that do not change the vectors: of training, of speed, and the dimension, which some
# modules set at their first batch and which the shapes of the weights determine.
_SETTINGS_WITHOUT_EFFECT = frozenset(
    {
        "dead_threshold",
        "dropout",
        "embedding_dimension",
        "frozen",
        "k_aux",
        "train_bias",
        "unpad_inputs",
        "update_embeddings",
    },
)


@dataclass(frozen=True)
class Provenance:
    """The model and the texts from which a file was made.

    A field is None if it is unknown.

    Attributes:
        model_fingerprint: the model's :func:`model_fingerprint`.
        texts_sha256: the :func:`texts_digest` of the documents that were encoded or searched.
        passages: the :class:`tilefold.retrieval.Passages` into which documents were divided; None
            if they were not divided.
        precision: number types of the model's matrix products, such as ``"bf16"`` or
            ``"bf16, fp32"``. Provenances that differ in it only are considered equal.
        special_tokens: False if weights of special tokens, such as ``[CLS]``, were left out; None
            if they were kept, or if this is unknown. Only vectors that are added to an index have
            to agree in it.
        dpi: dots per inch at which pages of PDFs were rendered; None for texts. Models of dynamic
            grids have more token vectors for a page at a larger number.
    """

    model_fingerprint: str | None = None
    texts_sha256: str | None = None
    passages: str | None = None
    precision: str | None = None
    special_tokens: bool | None = None
    dpi: int | None = None

    @classmethod
    def from_dict(cls, values: Json) -> Provenance:
        """Read the fields from a manifest or its settings, ignoring other keys."""
        return cls(**{item.name: values.get(item.name) for item in fields(cls)})

    def to_dict(self) -> dict[str, str | bool | None]:
        """Return the fields for a manifest.

        Passages, precision, special tokens and dpi are left out if they are None.
        """
        optional_fields = ("passages", "precision", "special_tokens", "dpi")
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None or name not in optional_fields
        }

    @classmethod
    def shared(cls, parts: Iterable[Provenance]) -> Provenance:
        """Return the provenance of vectors that are joined from several parts, at least one.

        Fields that differ become None, but the precision lists the precisions of all parts.
        """
        all_parts = list(parts)
        equal_fields = {}
        for item in fields(cls):
            value = getattr(all_parts[0], item.name)
            if all(getattr(part, item.name) == value for part in all_parts):
                equal_fields[item.name] = value
        equal_fields["precision"] = joined_precisions(part.precision for part in all_parts)
        return cls(**equal_fields)

    def differing_fields(self, other: Provenance) -> list[str]:
        """Return the names of the fields in which two provenances differ.

        Compared are the model, the texts and the passages, if both provenances know them. If one
        has only the first digits of a digest, because it was read from a :attr:`tag`, these digits
        are compared.
        """
        differing = []
        for name in ("model_fingerprint", "texts_sha256", "passages"):
            left = getattr(self, name)
            right = getattr(other, name)
            if left and right and not (left.startswith(right) or right.startswith(left)):
                differing.append(name)
        return differing

    @property
    def tag(self) -> str:
        """Return a tag for the last column of a TREC run: ``tilefold:texts=0123456789abcdef``."""
        parts = [TAG]
        if self.model_fingerprint:
            parts.append(f"model={self.model_fingerprint[:_TAG_DIGITS]}")
        if self.texts_sha256:
            parts.append(f"texts={self.texts_sha256[:_TAG_DIGITS]}")
        if self.passages:
            parts.append(f"passages={self.passages}")
        if self.precision:
            names = self.precision.split(_PRECISION_SEPARATOR)
            parts.append(f"precision={_PRECISION_SEPARATOR_OF_TAG.join(names)}")
        return ":".join(parts)

    @classmethod
    def from_tag(cls, tag: str) -> Provenance:
        """Parse a :attr:`tag`, such as ``tilefold:texts=0123456789abcdef``.

        Args:
            tag: last column of a TREC run.

        Returns:
            The provenance. All its fields are None if another program wrote the tag.
        """
        name, *parts = tag.split(":")
        values: dict[str, str] = {}
        if name == TAG:
            for part in parts:
                field_name, _, value = part.partition("=")
                values[field_name] = value
        precisions = values.get("precision", "").split(_PRECISION_SEPARATOR_OF_TAG)
        return cls(
            model_fingerprint=values.get("model"),
            texts_sha256=values.get("texts"),
            passages=values.get("passages"),
            precision=joined_precisions(precisions),
        )


def joined_precisions(precisions: Iterable[str | None]) -> str | None:
    """Join the names of precisions in alphabetical order, without duplicates.

    Args:
        precisions: names such as ``"bf16"``, joined names such as ``"bf16, fp32"``, and None or an
            empty string for an unknown precision.

    Returns:
        The joined names, such as ``"bf16, fp32"``; None if no precision is known.
    """
    names = {
        name
        for precision in precisions
        if precision
        for name in precision.split(_PRECISION_SEPARATOR)
    }
    return _PRECISION_SEPARATOR.join(sorted(names)) or None


def warn_of_other_precision(
    description: str,
    precision: str | None,
    index_name: str,
    index_precision: str | None,
    stacklevel: int,
) -> None:
    """Warn if new vectors were computed in another precision than the vectors they are added to.

    Args:
        description: description of the new vectors, for the message.
        precision: the precision in which the new vectors were computed; None if it is unknown.
        index_name: name of the index or folder with the other vectors, for the message.
        index_precision: the precision in which the other vectors were computed; None if it is
            unknown.
        stacklevel: the argument of ``warnings.warn``, counted from the caller of this function.
    """
    if None in (precision, index_precision) or precision == index_precision:
        return
    warnings.warn(
        f"{description}: were computed in {precision}, and those of {index_name} in "
        f"{index_precision}: their scores differ from those of vectors in one precision. "
        "Encode all in one precision.",
        PrecisionWarning,
        stacklevel=stacklevel + 1,
    )


def warn_of_query_precision(
    model: Model,
    description: str,
    precision: str | None,
    stacklevel: int,
) -> None:
    """Warn if a model encodes queries in another precision than the vectors to be searched.

    Vectors in fp8 are exempt: fp8 makes encoding of many documents faster, while queries are few.

    Args:
        model: the model that encodes the queries.
        description: description of the searched vectors, for the message.
        precision: the precision in which these vectors were computed; None if it is unknown.
        stacklevel: the argument of ``warnings.warn``, counted from the caller of this function.
    """
    if precision is None or precision == "fp8":
        return
    query_precision = inference_precision(model)
    if query_precision == precision:
        return
    warnings.warn(
        f"{description} was computed in {precision}, and queries are encoded in "
        f"{query_precision}: scores differ from those of a search in one precision. Encode both "
        f"in one precision{_dtype_hint(precision)}.",
        PrecisionWarning,
        stacklevel=stacklevel + 1,
    )


def _dtype_hint(precision: str) -> str:
    """Return how to encode queries in the precision of documents; empty if that is impossible."""
    if precision not in DTYPES:
        return ""
    return f", such as with --dtype {precision} or set_precision(model, {precision!r})"


def encoded_texts(names: Iterable[bytes], texts: Iterable[bytes]) -> bytes:
    """Concatenate ids and texts in UTF-8 to bytes for a digest.

    Each id and each text is preceded by its length, so that different texts have different bytes.

    Args:
        names: ids of the texts, in UTF-8.
        texts: the texts, in UTF-8.
    """
    pieces: list[bytes] = []
    for name, text in zip(names, texts, strict=True):
        pieces += (len(name).to_bytes(8, "big"), name, len(text).to_bytes(8, "big"), text)
    return b"".join(pieces)


class TextsDigest:
    """SHA-256 over ids and texts, to which texts are added one by one."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, text_id: object, text: object) -> None:
        """Add a text and its id to the digest.

        Args:
            text_id: the id, a string.
            text: the text; or a page, whose ``fingerprint`` is used. For another input, its
                ``repr`` is used.

        Raises:
            TypeError: if the id is not a string.
        """
        if not isinstance(text_id, str):
            raise not_a_string_error("texts", text_id)
        content = text if isinstance(text, str) else getattr(text, "fingerprint", repr(text))
        self._digest.update(
            encoded_texts(
                [text_id.encode("utf-8", "surrogatepass")],
                [content.encode("utf-8", "surrogatepass")],
            ),
        )

    def add_encoded(self, texts: bytes) -> None:
        """Add the bytes of :func:`encoded_texts`."""
        self._digest.update(texts)

    def hexdigest(self) -> str:
        """Return the digest of all texts so far, in hexadecimal digits."""
        return self._digest.hexdigest()


def texts_digest(texts: Mapping[str, object]) -> str:
    """Return the SHA-256 over ids and texts, in their order.

    Args:
        texts: id -> text or page. Mappings that read documents from a file have the digest as an
            attribute ``sha256``, and are not read again.
    """
    stored_digest = getattr(texts, "sha256", None)
    if isinstance(stored_digest, str):
        return stored_digest
    digest = TextsDigest()
    for text_id, text in texts.items():
        digest.add(text_id, text)
    return digest.hexdigest()


def model_fingerprint(model: Model) -> str:
    """Return a digest of a model's weights, module settings, prompts and length limit.

    The names and shapes of all weights are hashed, and up to 1,024 evenly spaced values of each
    tensor. This is fast for a large model, and any training step changes the digest. Deliberate
    forgery is not detected. For each module, its class and the settings that it saves are hashed,
    so that a model has the same fingerprint before and after saving, accelerated or not, and on
    every device. Models with modules of different classes have different fingerprints, even if
    they compute the same vectors.

    Args:
        model: a sentence-transformers model. A model that was exported to ONNX has the fingerprint
            of the original model, unless it was quantized or its settings were changed.
    """
    graph = onnx_graph_of(model)
    if graph is not None:
        return _graph_fingerprint(graph, model_settings(model))
    digest = hashlib.sha256()
    dtypes = stored_dtypes(model)  # of weights that were widened, without a change of values
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)  # between two hashed values
        dtype = dtypes.get(name, tensor.dtype)
        digest.update(f"{name} {tuple(tensor.shape)} {dtype}\n".encode())
        digest.update(flat[::step].cpu().double().numpy().tobytes())
    digest.update(model_settings(model).encode())
    digest.update(_describe_modules(model).encode())
    return digest.hexdigest()


def _graph_fingerprint(graph: Any, settings: str) -> str:
    """Return the fingerprint of a model that was exported to ONNX.

    Args:
        graph: the model's :class:`tilefold.modules.OnnxGraph`.
        settings: the model's current :func:`model_settings`.
    """
    original: dict[str, Any] = graph.made_of  # settings and fingerprint of the original model
    if original["settings"] == settings and original["quantize"] is None:
        return str(original["model"])
    return hashlib.sha256(f"{original['model']} {graph.sha256} {settings}".encode()).hexdigest()


def _describe_modules(model: Model) -> str:
    """Describe the classes and settings of a model's modules as JSON, by module name.

    Every module of the pipeline is described, and every nested module with settings, such as the
    modules in a Router's routes.
    """
    pipeline = {id(module) for module in model.children()}
    descriptions: Json = {}
    for name, module in model.named_modules():
        settings: Json | None = None
        if hasattr(module, "get_config_dict"):
            settings = {
                key: value
                for key, value in module.get_config_dict().items()
                if key not in _SETTINGS_WITHOUT_EFFECT
            }
        if settings is not None or id(module) in pipeline:
            descriptions[name] = {"class": type(module).__name__, "settings": settings}
    # In JSON, a tuple equals the list that is loaded in its place. A setting that JSON cannot
    # serialize is described by its class, because its repr may contain a memory address.
    return json.dumps(
        descriptions,
        sort_keys=True,
        default=lambda value: type(value).__qualname__,
    )


def model_settings(model: Model) -> str:
    """Describe the prompts and limits of a model as a string for :func:`model_fingerprint`."""
    names = ("prompts", "default_prompt_name", "max_seq_length", "max_active_dims")
    return "".join(f"{name}={getattr(model, name, None)!r}\n" for name in names)


def provenance_of(texts: Mapping[str, object]) -> Provenance:
    """Return the provenance of texts.

    Args:
        texts: id -> text or page. :class:`tilefold.retrieval.PassageTexts` have their provenance as
            an attribute.
    """
    provenance = getattr(texts, "provenance", None)
    if isinstance(provenance, Provenance):
        return provenance
    return Provenance(texts_sha256=texts_digest(texts))


def ids_to_delete(
    index_ids: Iterable[str],
    deleted_ids: Collection[str],
    new_ids: Collection[str],
    passages: str | None,
) -> set[str]:
    """Return the ids of the entries that an update removes from an index.

    An update removes entries that it deletes or replaces. If a document is replaced or deleted, all
    of its passages are removed.

    Args:
        index_ids: ids of the entries: document ids, or passage ids such as ``"d1#0"``.
        deleted_ids: ids of documents to delete, or of single passages.
        new_ids: ids of the entries that the update adds.
        passages: how documents were divided into passages; None if the entries are documents.
    """
    if passages is None:
        return {*deleted_ids, *new_ids}.intersection(index_ids)
    removed_documents = {*deleted_ids, *map(_document_of_passage, new_ids)}
    return {
        entry_id
        for entry_id in index_ids
        if entry_id in deleted_ids or _document_of_passage(entry_id) in removed_documents
    }


def unknown_ids(
    index_ids: Iterable[str],
    deleted_ids: Iterable[str],
    passages: str | None,
) -> list[str]:
    """Return the ids to delete that name no document and no passage of an index.

    Args:
        index_ids: ids of the entries: document ids, or passage ids such as ``"d1#0"``.
        deleted_ids: ids of documents to delete, or of single passages.
        passages: how documents were divided into passages; None if the entries are documents.

    Returns:
        The unknown ids in the order of `deleted_ids`, each once.
    """
    ids = set(index_ids)
    if passages is not None:
        ids.update([_document_of_passage(entry_id) for entry_id in ids])
    return [name for name in dict.fromkeys(deleted_ids) if name not in ids]


def _document_of_passage(passage_id: str) -> str:
    """Return the document's id ``"d1"`` for a passage's id ``"d1#0"``."""
    return passage_id.rpartition("#")[0]
