"""One side of a learned sparse encoder, as a checked record, and what both sides are built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from tilefold._typing import Tokenizer
from tilefold.recipes._settings import Check, Settings, flag, number, whole

__all__ = ["KINDS", "Base", "EncoderSpec"]

_NETWORK = frozenset({"activation", "layers", "shared_network"})
_HEAD = _NETWORK | {"logit_scale", "top_k", "normalize"}
_CAUSAL = (_HEAD - {"layers"}) | {"pooling", "drop_special_tokens", "lora"}
# kind -> the fields, beside `kind` and `base_model`, that apply to it
KINDS: Mapping[str, frozenset[str]] = {
    "mlm": _HEAD | {"pooling", "drop_special_tokens"},
    "cls_mlm": _HEAD,
    "epic": frozenset({"layers", "drop_special_tokens", "top_k"}),
    "mlp": _NETWORK | {"scale", "drop_special_tokens", "saturation"},
    "binary": frozenset({"scale", "trainable"}),
    "idf": frozenset({"idf", "trainable"}),
    "causal": _CAUSAL,
    "bidirectional": _CAUSAL,
    "echo": _CAUSAL,
    "prosper": frozenset({"pooling", "logit_scale", "top_k", "normalize", "literal_residual", "shared_network"}),
    "bge_m3": frozenset({"shared_network"}),
    "splate": frozenset({"head_model", "trainable"}),
}


def _optional_flag(name: str, value: Any) -> None:
    if value is not None:
        flag(name, value)


@dataclass(frozen=True)
class EncoderSpec(Settings):
    """The encoder of queries, of documents, or of both; every field is checked on construction.

    Fields that say nothing (None) have the value of the kind. One that the kind does not have is an error.

    Attributes:
        kind: ``"mlm"`` (an LM head over all tokens: SPLADE), ``"cls_mlm"`` (over the first one: TILDE), ``"epic"``
            (over all, weighted by learned importance and quality), ``"mlp"`` (a weight for each token: uniCOIL,
            DeepImpact), ``"binary"`` (1 for each distinct token, times a number), ``"idf"`` (a number of its own for
            each distinct token; these two need no network), ``"causal"``, ``"bidirectional"`` or ``"echo"`` (the LM
            head of a causal language model, see :mod:`tilefold.recipes.decoders`), ``"prosper"``
            (:class:`tilefold.modules.ProsperTransformer`), ``"bge_m3"`` (a weight for each token, with BGE-M3's own
            where the base model has them) or ``"splate"`` (an adapter on a frozen ColBERT, the base model).
        base_model: of this side alone: ``"minilm"``, a folder or a Hugging Face name; None takes the recipe's.
        pooling: of the LM head, see :class:`tilefold.modules.HeadPooling`; ``"max"``, and ``"last"`` for ``"prosper"``.
        activation: ``"log1p_relu"`` of heads, ``"relu"`` of ``"mlp"``.
        logit_scale: factor on the logits: 1, but 1/16 for ModernBERT and Ettin (arXiv 2606.18811).
        drop_special_tokens: whether positions of special tokens do not count; False for heads, as in SPLADE, True for
            ``"mlp"`` and ``"epic"``.
        top_k: keep the largest weights of a text that has more than this many. Of ``"epic"``, whose weights are all
            positive: the ``max_active_dims`` of the model, 1,000.
        normalize: ``"l2"`` for vectors of length 1.
        scale: start of the learned factor on the weights of ``"mlp"`` (None: no such factor); the number of
            ``"binary"``, 0.3.
        saturation: of ``"mlp"``: the weight that counts half when texts are encoded, as BM25 counts frequencies; the
            loss sees the weights as they are. All tokens start with this one. None counts weights as they are.
        trainable: whether the numbers of ``"binary"`` (False) or ``"idf"`` (False), or the bias of the head of
            ``"splate"`` (False), are learned.
        idf: a JSON file of token -> weight; None counts document frequencies in the sample texts.
        layers: keep only so many of the lowest layers of the base model.
        shared_network: of the query side: runs the network of the document side, with a pooling of its own.
        lora: rank of low-rank updates, which alone are trained; they are merged into the model that is saved.
        literal_residual: of ``"prosper"``: False leaves the literal residual network out.
        head_model: of ``"splate"``: the masked language model whose head decodes; ``"minilm"``.
    """

    kind: str = "mlm"
    base_model: str | None = None
    pooling: str | None = None
    activation: str | None = None
    logit_scale: float | None = None
    drop_special_tokens: bool | None = None
    top_k: int | None = None
    normalize: str | None = None
    scale: float | None = None
    trainable: bool | None = None
    idf: str | None = None
    layers: int | None = None
    shared_network: bool = False
    lora: int | None = None
    literal_residual: bool | None = None
    head_model: str | None = None
    saturation: float | None = None

    CHECKS: ClassVar[Mapping[str, Check]] = {
        **dict.fromkeys(("top_k", "layers", "lora"), whole(optional=True)),
        "shared_network": flag,
        **dict.fromkeys(("drop_special_tokens", "trainable", "literal_residual"), _optional_flag),
        **dict.fromkeys(
            ("logit_scale", "scale", "saturation"),
            number(lambda value: value > 0, "greater than 0", optional=True),
        ),
    }

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {sorted(KINDS)}, got {self.kind!r}.")
        allowed = KINDS[self.kind] | {"kind", "base_model"}
        given = {field.name for field in fields(self) if getattr(self, field.name) not in (None, field.default)}
        if extra := sorted(given - allowed):
            raise ValueError(f"{extra[0]} does not apply to an encoder of kind {self.kind!r}; leave it out.")
        super().__post_init__()

    @property
    def has_network(self) -> bool:
        """Whether texts of this side run through a Transformer."""
        return self.kind not in ("binary", "idf")


@dataclass(frozen=True)
class Base:
    """The start of the encoders of both sides.

    Attributes:
        base_model: of sides that name none: ``"minilm"``, a folder or a Hugging Face name.
        max_length: maximum tokens per text; saved with the model.
        texts: sample documents: they set the decoder bias of ``"minilm"`` and the document frequencies of an IDF.
        seed: of fresh parameters and samples.
        start_percentile, start_deviations: decoder bias of ``"minilm"``, see :func:`tilefold.recipes.minilm_splade`.
        tokenizer, vocab_size: of the side with a network, which is built first; :func:`build_encoder` sets them.
        network: the Transformer of that side, for a query side that shares it.
    """

    base_model: str
    max_length: int
    texts: Sequence[str] = ()
    seed: int = 0
    start_percentile: float = 99.95
    start_deviations: float | None = None
    tokenizer: Tokenizer = None
    vocab_size: int | None = None
    network: Any = None
