"""Base classes of the encoder specs: one dataclass for each kind of encoder, with its builder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from tilefold._internal.arguments import ArgumentError, check_choice
from tilefold._internal.typing import Module, SparseEncoder, Transformer
from tilefold.recipes._settings import BOOLEAN, MODEL_NAME, Settings, checked

E = TypeVar("E", bound="EncoderSpec")


@dataclass(frozen=True)
class Base:
    """Settings of a model that its query encoder and document encoder have in common.

    Attributes:
        base_model: base model of encoders that have none of their own: ``"minilm"``, a folder or a
            Hugging Face name.
        max_length: maximum number of tokens per text; saved with the model.
        texts: sample documents, for the decoder bias of ``"minilm"`` and for document frequencies.
        seed: seed of new parameters and of samples.
        start_percentile: percentile of the untrained logits from which the initial decoder bias of
            ``"minilm"`` is computed (:func:`tilefold.recipes.minilm_splade`).
        vocab_size: vocabulary size of the encoder that is built first; 0 while it is built.
        network: ``Transformer`` of the encoder that is built first. The second encoder may share
            it, or take its tokenizer.
    """

    base_model: str
    max_length: int
    texts: Sequence[str] = ()
    seed: int = 0
    start_percentile: float = 99.95
    vocab_size: int = 0
    network: Transformer = None


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(Settings, ABC):
    """Configuration of the query encoder, the document encoder, or one encoder of both.

    Every kind of encoder has its own class, such as :class:`MlmSpec`. JSON names the kind:
    ``EncoderSpec.from_dict({"kind": "mlm", "top_k": 256})``.

    Attributes:
        kind: kind of the encoder, which determines its other fields: ``"mlm"``, ``"cls_mlm"``,
            ``"epic"``, ``"mlp"``, ``"binary"``, ``"idf"``, ``"causal"``, ``"bidirectional"``,
            ``"echo"``, ``"prosper"``, ``"bge_m3"``, ``"splate"`` or ``"sparse_encoder"``.
        base_model: base model of this encoder: ``"minilm"``, a folder or a Hugging Face name;
            ``None`` for the recipe's base model.
    """

    kind: ClassVar[str] = "mlm"
    has_network: ClassVar[bool] = True
    """Whether the encoder runs a Transformer."""
    has_routes: ClassVar[bool] = False
    """Whether an encoder of both sides encodes queries and documents in different ways."""
    measured: ClassVar[str] = ""
    """What was measured with such encoders, for the cards of their models."""
    classes: ClassVar[dict[str, type[EncoderSpec]]] = {}
    """Kind of encoder -> its class."""

    base_model: str | None = checked(None, MODEL_NAME)

    def __init_subclass__(cls, kind: str | None = None) -> None:
        """Register a class under the kind of encoder that it configures, unless it is abstract."""
        super().__init_subclass__()
        if kind is not None:
            cls.kind = kind
            EncoderSpec.classes[kind] = cls

    @abstractmethod
    def build(self, base: Base) -> list[Module]:
        """Build the modules of the encoder; the last one returns sparse vectors."""

    def model_name(self, base: Base) -> str:
        """Return the base model of this encoder, which is the recipe's if the encoder has none."""
        return self.base_model or base.base_model

    def build_model(self, base: Base, device: str | None = None) -> SparseEncoder:
        """Build a ``SparseEncoder`` that encodes queries and documents with this encoder.

        Args:
            base: the recipe's base model, maximum length, seed and sample texts.
            device: device of the model; default: chosen by sentence-transformers.

        Raises:
            ValueError: if the encoder has no network.
        """
        from sentence_transformers import SparseEncoder

        if not self.has_network:
            raise ValueError(
                f"kind {self.kind!r} has no network, so it cannot encode both queries and "
                "documents; set a document encoder with a network.",
            )
        return SparseEncoder(
            modules=self.build(base),
            device=device,
            similarity_fn_name="dot",
            max_active_dims=self.max_active_terms,
        )

    @property
    def max_active_terms(self) -> int | None:
        """Number of largest weights that the model keeps per text; ``None`` keeps all."""
        return None

    @property
    def shares_network(self) -> bool:
        """Whether this query encoder runs the network of the document encoder."""
        return False

    @property
    def adds_adapters(self) -> bool:
        """Whether training adds adapters to the encoder, and merges them at the end."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """The kind, and the fields that differ from their defaults, as a JSON object."""
        values = super().to_dict()
        for setting in fields(self):
            if values[setting.name] == setting.default:
                del values[setting.name]
        return {"kind": self.kind, **values}

    @classmethod
    def from_dict(cls: type[E], values: dict[str, Any]) -> E:
        """Create an encoder spec from a JSON object; the inverse of `to_dict`.

        The kind selects the class: ``{"kind": "mlm", "top_k": 256}`` becomes an :class:`MlmSpec`.

        Args:
            values: the kind and the fields. A field that is ``None`` takes its default. Without a
                kind, the result is a spec of this class.

        Raises:
            ValueError: if the kind is unknown, a field does not belong to the kind, or a value is
                out of range.
        """
        settings = {name: value for name, value in values.items() if value is not None}
        kind = settings.pop("kind", cls.kind)
        subclasses = {
            name: encoder_class
            for name, encoder_class in EncoderSpec.classes.items()
            if issubclass(encoder_class, cls)
        }
        check_choice("kind", kind, sorted(subclasses))
        encoder_class = subclasses[kind]
        field_names = [setting.name for setting in fields(encoder_class)]
        for name in settings:
            if name not in field_names:
                raise ArgumentError(
                    name,
                    f"does not apply to an encoder of kind {kind!r}, which has the fields "
                    f"{', '.join(field_names)}; leave it out.",
                )
        return encoder_class(**settings)


@dataclass(frozen=True, kw_only=True)
class SharableSpec(EncoderSpec):
    """Configuration of an encoder that can run the network of the document encoder.

    Attributes:
        shared_network: whether queries run the network of the document encoder, with their own
            pooling.
    """

    network_fields: ClassVar[tuple[str, ...]] = ("base_model",)
    """Fields that configure the network, rather than the pooling of its states or logits."""
    transformer_task: ClassVar[str | None] = None
    """Task of the ``Transformer`` module, such as ``"fill-mask"``; ``None`` for any task."""

    shared_network: bool = checked(False, BOOLEAN)

    def __post_init__(self) -> None:
        """Check each field, and raise an error for fields of a network that is not loaded."""
        super().__post_init__()
        if not self.shared_network:
            return
        for setting in fields(self):
            is_set = getattr(self, setting.name) != setting.default
            if is_set and setting.name in self.network_fields:
                raise ArgumentError(
                    setting.name,
                    "set it on the document encoder, whose network runs with shared_network.",
                )

    @property
    def shares_network(self) -> bool:
        """Whether this query encoder runs the network of the document encoder."""
        return self.shared_network

    def document_network(self, base: Base) -> Transformer:
        """Return the network of the document encoder, for a query encoder that shares it.

        Args:
            base: settings of the model. ``base.network`` is the document encoder's Transformer, or
                ``None`` if the document encoder has none.

        Raises:
            ValueError: if the document encoder has no network for this encoder's task.
        """
        network = base.network
        task = self.transformer_task
        if network is None or (task is not None and network.transformer_task != task):
            expected = "a network" if task is None else f"a network for the task {task!r}"
            raise ArgumentError(
                "shared_network",
                f"the document encoder must have {expected}, because query encoders of kind "
                f"{self.kind!r} need it; leave shared_network out, and the query encoder gets its "
                "own network.",
            )
        return network
