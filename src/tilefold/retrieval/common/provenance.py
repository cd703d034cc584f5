"""Fingerprints of the model and the texts behind vectors, indexes and runs, so that mismatches are
detected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tilefold._internal.typing import Model
from tilefold.retrieval.common.files import Json, not_a_string_error

__all__ = ["Provenance", "TextsDigest", "model_fingerprint", "provenance_of", "texts_digest"]

TAG = "tilefold"
_TAG_DIGITS = 16
_SAMPLES_PER_TENSOR = 1024


@dataclass(frozen=True)
class Provenance:
    """Fingerprints of the model and the texts behind a file, None if unknown, and how these were
    cut.
    """

    model_fingerprint: str | None = None  # :func:`model_fingerprint`
    texts_sha256: str | None = (
        None  # :func:`texts_digest` of the documents that were encoded or searched
    )
    passages: str | None = (
        None  # :class:`tilefold.retrieval.Passages` that they were cut into; None for whole ones
    )
    precision: str | None = (
        None  # number types of the model's products, such as "bf16" or "bf16, fp32"; not compared
    )

    @classmethod
    def from_dict(cls, values: Json) -> Provenance:
        """From a manifest or its settings; other keys are ignored."""
        return cls(**{item.name: values.get(item.name) for item in fields(cls)})

    def to_dict(self) -> dict[str, str | None]:
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None or name not in ("passages", "precision")
        }

    @classmethod
    def shared(cls, parts: Iterable[Provenance]) -> Provenance:
        """The fields that are equal in all `parts`, and every precision of theirs."""
        values = [asdict(part) for part in parts]
        equal = {
            name: value
            for name, value in values[0].items()
            if all(v[name] == value for v in values)
        }
        precision = joined_precisions(v["precision"] for v in values)
        return cls(**equal | {"precision": precision})

    def differs(self, other: Provenance) -> list[str]:
        """The fields that are known on both sides and differ; a tag holds the first digits of a
        fingerprint. The precision is reported, and not compared.
        """
        pairs = {name: (value, getattr(other, name)) for name, value in asdict(self).items()}
        del pairs["precision"]
        return [
            name
            for name, (a, b) in pairs.items()
            if a and b and not (a.startswith(b) or b.startswith(a))
        ]

    @property
    def tag(self) -> str:
        """One word for the last column of a TREC run, such as ``tilefold:texts=0123456789abcdef``."""
        known = {"model": self.model_fingerprint, "texts": self.texts_sha256}
        parts = [f"{name}={value[:_TAG_DIGITS]}" for name, value in known.items() if value]
        return ":".join([TAG, *parts, *([f"passages={self.passages}"] if self.passages else [])])

    @classmethod
    def from_tag(cls, tag: str) -> Provenance:
        """The inverse of :attr:`tag`; nothing is known from the tags of other programs."""
        name, *parts = tag.split(":")
        values = dict(part.partition("=")[::2] for part in parts) if name == TAG else {}
        return cls(values.get("model"), values.get("texts"), values.get("passages"))


def joined_precisions(precisions: Iterable[str | None]) -> str | None:
    """Join the precisions of several parts, each once: "bf16, fp32"; None where none is known.

    Args:
        precisions: names of :func:`tilefold._internal.precision.inference_precision`, several of which may
            be joined already.
    """
    names = {name for precision in precisions if precision for name in precision.split(", ")}
    return ", ".join(sorted(names)) or None


def encoded_texts(names: Iterable[bytes], texts: Iterable[bytes]) -> bytes:
    """The bytes that a digest of ids and texts, in UTF-8, is of."""
    parts = (part for pair in zip(names, texts, strict=True) for part in pair)
    return b"".join([piece for part in parts for piece in (len(part).to_bytes(8, "big"), part)])


class TextsDigest:
    """SHA-256 over ids and texts, in order, as they come."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: object, text: object) -> None:
        if not isinstance(name, str):
            raise not_a_string_error("texts", name)
        given = (name, text if isinstance(text, str) else repr(text))
        parts = [part.encode("utf-8", "surrogatepass") for part in given]
        self._digest.update(encoded_texts(parts[:1], parts[1:]))

    def add_encoded(self, texts: bytes) -> None:
        """Add the bytes of :func:`encoded_texts`."""
        self._digest.update(texts)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def texts_digest(texts: Mapping[str, str]) -> str:
    """SHA-256 over ids and texts, in order; of texts that stay in their file, the one that they
    come with.
    """
    if isinstance(known := getattr(texts, "sha256", None), str):
        return known
    digest = TextsDigest()
    for name, text in texts.items():
        digest.add(name, text)
    return digest.hexdigest()


def model_fingerprint(model: Model) -> str:
    """SHA-256 over the names, shapes and a sample of every weight, the prompts and the length
    limit.

    Up to 1,024 evenly spaced values of each tensor are hashed, so that it is cheap for a large
    model and any training step changes it; it does not detect deliberate forgery. Of a
    ``MultiVectorEncoder`` the settings of every module are hashed too, without paths.
    """
    weights = _weights_fingerprint(model)
    if not any(kind.__name__ == "MultiVectorEncoder" for kind in type(model).__mro__):
        return weights
    digest = hashlib.sha256(weights.encode())
    for module in model.children():
        settings: Json = getattr(module, "get_config_dict", dict)()
        named = {
            "type": type(module).__name__,
            **{key: repr(value) for key, value in settings.items()},
        }
        digest.update(json.dumps(named, sort_keys=True).encode())
    return digest.hexdigest()


def _weights_fingerprint(model: Model) -> str:
    settings = model_settings(model)
    if (
        graph := next((each for each in model.modules() if hasattr(each, "made_of")), None)
    ) is not None:
        made_of: dict[str, Any] = graph.made_of  # the model's own, while settings and vectors are
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
    return digest.hexdigest()


def model_settings(model: Model) -> str:
    """The prompts and limits of a model, as :func:`model_fingerprint` reads them."""
    names = ("prompts", "default_prompt_name", "max_seq_length", "max_active_dims")
    return "".join(f"{name}={getattr(model, name, None)!r}\n" for name in names)


def provenance_of(texts: Mapping[str, str]) -> Provenance:
    """The documents behind id -> text, which may be passages of them
    (:class:`tilefold.retrieval.PassageTexts`).
    """
    known = getattr(texts, "provenance", None)
    return known if isinstance(known, Provenance) else Provenance(texts_sha256=texts_digest(texts))


def ids_to_delete(
    names: Iterable[str],
    delete: Collection[str],
    replaced: Collection[str],
    passages: str | None,
) -> set[str]:
    """Find the `names` that are in `delete`, or replaced; of `passages`, also all passages of such
    documents.
    """
    if passages is None:
        return {*delete, *replaced}.intersection(names)
    documents = {*delete, *(name.rpartition("#")[0] for name in replaced)}
    return {name for name in names if name in delete or name.rpartition("#")[0] in documents}
