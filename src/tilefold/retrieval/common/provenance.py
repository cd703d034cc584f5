"""Fingerprints of the models and texts that vectors, indexes and runs were made from."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tilefold._internal.precision import inference_precision
from tilefold._internal.typing import Model
from tilefold.retrieval.common.files import Json, not_a_string_error
from tilefold.retrieval.errors import PrecisionWarning

__all__ = ["Provenance", "TextsDigest", "model_fingerprint", "provenance_of", "texts_digest"]

TAG = "tilefold"
_TAG_DIGITS = 16
# Separates the precisions of several parts in a manifest, and in a tag, which has no spaces.
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
        model_fingerprint: :func:`model_fingerprint` of the model.
        texts_sha256: :func:`texts_digest` of the documents that were encoded or searched.
        passages: :class:`tilefold.retrieval.Passages` that documents were cut into; None for
            documents that were not cut.
        precision: number types of the model's products, such as ``"bf16"`` or ``"bf16, fp32"``. It
            is not compared.
    """

    model_fingerprint: str | None = None
    texts_sha256: str | None = None
    passages: str | None = None
    precision: str | None = None

    @classmethod
    def from_dict(cls, values: Json) -> Provenance:
        """Read the provenance in a manifest or its settings.

        Other keys are ignored.
        """
        return cls(**{item.name: values.get(item.name) for item in fields(cls)})

    def to_dict(self) -> dict[str, str | None]:
        """Return the fields for a manifest.

        Passages and precision are left out if they are unknown.
        """
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None or name not in ("passages", "precision")
        }

    @classmethod
    def shared(cls, parts: Iterable[Provenance]) -> Provenance:
        """Return the fields that are equal in all parts, and the precisions of all parts."""
        provenances = list(parts)
        first = provenances[0]
        shared = {}
        for item in fields(cls):
            value = getattr(first, item.name)
            if all(getattr(part, item.name) == value for part in provenances):
                shared[item.name] = value
        shared["precision"] = joined_precisions(part.precision for part in provenances)
        return cls(**shared)

    def differs(self, other: Provenance) -> list[str]:
        """Compare two provenances, except their precision.

        A field that one of them does not know is not compared. A provenance from a tag has only the
        first digits of a fingerprint, which are then compared.

        Args:
            other: provenance of other vectors.

        Returns:
            Names of the fields that differ.
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
            tag: last column of a TREC run. The tag of another program gives an empty provenance.
        """
        name, *parts = tag.split(":")
        values: dict[str, str] = {}
        if name == TAG:
            for part in parts:
                field_name, _, value = part.partition("=")
                values[field_name] = value
        return cls(
            model_fingerprint=values.get("model"),
            texts_sha256=values.get("texts"),
            passages=values.get("passages"),
            precision=joined_precisions(
                values.get("precision", "").split(_PRECISION_SEPARATOR_OF_TAG),
            ),
        )


def joined_precisions(precisions: Iterable[str | None]) -> str | None:
    """Join the precisions of several parts, each once, in alphabetical order.

    Args:
        precisions: names of :func:`tilefold._internal.precision.inference_precision`, several of
            which may be joined already.

    Returns:
        The names, such as ``"bf16, fp32"``; None if no precision is known.
    """
    names = {
        name
        for precision in precisions
        if precision
        for name in precision.split(_PRECISION_SEPARATOR)
    }
    return _PRECISION_SEPARATOR.join(sorted(names)) or None


def warn_of_other_precision(
    vectors: str,
    precision: str | None,
    index: str,
    index_precision: str | None,
    stacklevel: int,
) -> None:
    """Warn where vectors were computed in another precision than those they are put together with.

    Args:
        vectors: what the new vectors are, for the message.
        precision: of the new vectors; None if it is unknown.
        index: what holds the other vectors, for the message.
        index_precision: of the other vectors; None if it is unknown.
        stacklevel: of ``warnings.warn``, seen from the caller of this function.
    """
    if None in (precision, index_precision) or precision == index_precision:
        return
    warnings.warn(
        f"{vectors}: were computed in {precision}, and those of {index} in {index_precision}: "
        "their scores differ from those of vectors in one precision. Encode all in one precision.",
        PrecisionWarning,
        stacklevel=stacklevel + 1,
    )


def warn_of_query_precision(
    model: Model,
    vectors: str,
    precision: str | None,
    stacklevel: int,
) -> None:
    """Warn where a model encodes queries in another precision than the vectors that they search.

    Args:
        model: encodes queries.
        vectors: what is searched, for the message.
        precision: of what is searched; None if it is unknown.
        stacklevel: of ``warnings.warn``, seen from the caller of this function.
    """
    if precision is None:
        return
    query_precision = inference_precision(model)
    if query_precision == precision:
        return
    warnings.warn(
        f"{vectors} was computed in {precision}, and queries are encoded in {query_precision}: "
        "scores differ from those of a search in one precision. Encode both in one precision.",
        PrecisionWarning,
        stacklevel=stacklevel + 1,
    )


def encoded_texts(names: Iterable[bytes], texts: Iterable[bytes]) -> bytes:
    """Return ids and texts, in UTF-8, as one string of bytes for a digest.

    The length of each comes before it, so that different texts have different bytes.
    """
    parts = (part for pair in zip(names, texts, strict=True) for part in pair)
    return b"".join([piece for part in parts for piece in (len(part).to_bytes(8, "big"), part)])


class TextsDigest:
    """SHA-256 over ids and texts, to which texts are added one by one."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: object, text: object) -> None:
        """Add a text and its id to the digest.

        Args:
            name: the id, a string.
            text: the text. Of another input, such as an image, its ``repr`` is added.

        Raises:
            TypeError: for an id that is not a string.
        """
        if not isinstance(name, str):
            raise not_a_string_error("texts", name)
        content = text if isinstance(text, str) else repr(text)
        self._digest.update(
            encoded_texts(
                [name.encode("utf-8", "surrogatepass")],
                [content.encode("utf-8", "surrogatepass")],
            ),
        )

    def add_encoded(self, texts: bytes) -> None:
        """Add the bytes of :func:`encoded_texts`."""
        self._digest.update(texts)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def texts_digest(texts: Mapping[str, str]) -> str:
    """Return the SHA-256 over ids and texts, in order.

    Args:
        texts: id -> text. A mapping of documents in a file already knows its digest, and is not
            read again.
    """
    digest_of_file = getattr(texts, "sha256", None)
    if isinstance(digest_of_file, str):
        return digest_of_file
    digest = TextsDigest()
    for name, text in texts.items():
        digest.add(name, text)
    return digest.hexdigest()


def model_fingerprint(model: Model) -> str:
    """Return a digest of a model: of its weights, its modules' settings, prompts and length limit.

    The names and shapes of all weights are hashed, and up to 1,024 evenly spaced values of each
    tensor: cheap for a large model, and any training step changes it. Deliberate forgery is not
    detected. Of the modules, the classes and the settings that they save are hashed, so that a
    model has one fingerprint before and after saving, accelerated or not, and on every device.
    A module of another class is another model, also where it computes the same vectors.

    Args:
        model: of sentence-transformers; an ONNX graph of full precision with the settings of the
            model that it was exported from has that model's fingerprint.
    """
    settings = model_settings(model)
    graph = next((module for module in model.modules() if hasattr(module, "made_of")), None)
    if graph is not None:
        made_of: dict[str, Any] = graph.made_of
        if made_of["settings"] == settings and made_of["quantize"] is None:
            return str(made_of["model"])
        return hashlib.sha256(f"{made_of['model']} {graph.sha256} {settings}".encode()).hexdigest()
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(flat[::step].cpu().double().numpy().tobytes())
    digest.update(settings.encode())
    digest.update(_module_settings(model).encode())
    return digest.hexdigest()


def _module_settings(model: Model) -> str:
    """Return the classes and settings of a model's modules as JSON, by the names of the modules.

    The modules of the pipeline are described, also those without settings, and modules within
    them that have settings, such as those of a Router's routes.
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
    # JSON, in which a tuple and the list that is loaded in its place are the same. A setting that
    # JSON has no form for is described by its class, because its repr may name a memory address.
    return json.dumps(
        descriptions,
        sort_keys=True,
        default=lambda value: type(value).__qualname__,
    )


def model_settings(model: Model) -> str:
    """Return the prompts and limits of a model as a text for :func:`model_fingerprint`."""
    names = ("prompts", "default_prompt_name", "max_seq_length", "max_active_dims")
    return "".join(f"{name}={getattr(model, name, None)!r}\n" for name in names)


def provenance_of(texts: Mapping[str, str]) -> Provenance:
    """Return the provenance of texts, which may be :class:`tilefold.retrieval.PassageTexts`."""
    provenance = getattr(texts, "provenance", None)
    if isinstance(provenance, Provenance):
        return provenance
    return Provenance(texts_sha256=texts_digest(texts))


def ids_to_delete(
    names: Iterable[str],
    delete: Collection[str],
    replaced: Collection[str],
    passages: str | None,
) -> set[str]:
    """Find the entries of an index that an update deletes or replaces.

    Args:
        names: ids in the index, of documents or passages.
        delete: ids of documents or passages to delete.
        replaced: ids of the new entries.
        passages: how documents were cut; None for an index of documents. All passages of a document
            are deleted or replaced together.
    """
    if passages is None:
        return {*delete, *replaced}.intersection(names)
    documents = {*delete, *(name.rpartition("#")[0] for name in replaced)}
    return {name for name in names if name in delete or name.rpartition("#")[0] in documents}
