"""Settings as checked dataclasses: rules for fields, dictionaries for files; trainings, encoders,
penalties.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

Check = Callable[..., None]  # of a name, a value, and whether None is allowed
S = TypeVar("S", bound="Settings")
T = TypeVar("T")


def rule(accept: Callable[[Any], bool], expected: str) -> Check:
    """A check of a field: the value must be what is `expected`, which `accept` tells, or None where
    that is allowed.
    """

    def check(name: str, value: object, optional: bool = False) -> None:
        if not (optional and value is None) and not accept(value):
            raise ValueError(
                f"{name} must be {expected}{' or None' if optional else ''}, got {value!r}.",
            )

    return check


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole(least: int = 1) -> Check:
    """A rule: a whole number of at least `least`."""
    return rule(lambda value: is_whole(value, least), f"a whole number of at least {least}")


def number(accept: Callable[[float], bool], expected: str) -> Check:
    """A rule: a finite number that `accept` takes."""

    def taken(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return math.isfinite(value) and accept(value)

    return rule(taken, f"a number {expected}")


def one_of(*names: str) -> Check:
    """A rule: one of these names."""
    return rule(lambda value: value in names, f"one of {', '.join(names)}")


def text(expected: str) -> Check:
    """A rule: a text that is not empty."""
    return rule(lambda value: isinstance(value, str) and value != "", expected)


flag = rule(lambda value: isinstance(value, bool), "True or False")
POSITIVE = number(lambda value: value > 0, "greater than 0")
NOT_NEGATIVE = number(lambda value: value >= 0, "of at least 0")
RATIO = number(lambda value: 0 < value <= 1, "in (0, 1]")
REGULARIZERS = ("flops", "l1", "l2", "df_flops", "anti_zero", "none")
NAME = text("'minilm', a folder or a model name")
SEED = rule(
    lambda value: is_whole(value, 0) and value < 2**32,
    "a whole number of at least 0 and below 2^32",
)


def checked(default: T, check: Check) -> T:
    """A field of :class:`Settings` with a default and a rule; None is allowed where it is the
    default.
    """
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class Settings:
    """A dataclass whose fields are checked on construction, and that a file keeps as a JSON object."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if check := each.metadata.get("check"):
                check(each.name, getattr(self, each.name), each.default is None)

    def to_dict(self) -> dict[str, Any]:
        """Field names and values, as a JSON object."""
        return asdict(self)

    @classmethod
    def described(cls) -> dict[str, str]:
        """Field -> what it does, from the section "Attributes" of the docstrings of the class and
        its bases.
        """
        found: dict[str, str] = {}
        for each in reversed(cls.__mro__):
            _, _, section = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")
            for names, text in re.findall(
                r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)",
                section,
                re.MULTILINE,
            ):
                plain = re.sub(r":\w+:`~?([^`]*)`", r"\1", " ".join(text.split())).replace("`", "")
                found.update(dict.fromkeys(names.split(", "), plain))
        return found

    @classmethod
    def from_dict(cls: type[S], values: dict[str, Any]) -> S:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: for an unknown field, or a value out of range.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown recipe fields {unknown}; the fields are {sorted(known)}.")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Settings):
    """The settings of every training; a recipe inherits them, and has a `base_model` too.

    Attributes:
        max_steps: optimiser steps; 0 leaves the untrained start, which needs no pairs.
        epochs: passes over the training pairs where ``max_steps`` is ``None``.
        batch_size: pairs per step, at least 2; every other document of a batch is a negative.
        fill_batches: fill the short batches of an epoch with pairs that it has already had, so that
            every query has as many negatives; several ranks always do. ``False`` leaves the last
            batch of an epoch short, and others where queries or documents occur in very many pairs.
        mini_batch_size: texts of each forward and backward, for batches that do not fit: all
            vectors are made first, and once more for their gradients (GradCache, arXiv 2101.06983).
            ``None`` takes each batch at once.
        learning_rate: peak of the linear schedule.
        warmup_ratio: share of the steps over which the learning rate rises.
        similarity_scale: factor on the scores before the softmax.
        max_length: maximum tokens per text (of a ColBERT: per document) of the saved model.
        train_max_length: the same while training; ``None`` takes ``max_length``.
        bf16: bf16 autocast; ``None`` uses it where the hardware has it.
        fused: train with the fused head, or the fused similarity on packed tokens where the model
            allows.
        graphs: repeat forward and backward of the encoder as CUDA graphs, see
            :func:`collate_ahead`. Needs a GPU and ``fused``. A resumed run draws other numbers for
            dropout than one that was not interrupted.
        save_steps: steps between checkpoints, from which an interrupted run is resumed; ``None``
            takes 25, or more where they would take over a twentieth of the time.
        save_minutes: time between checkpoints at the latest.
        log_steps: steps between rows of the log, for each of which the GPU stands still for some
            milliseconds; a loss that is not finite, or a model that is all zero, is noticed then.
        evaluate_steps: steps between evaluations (nDCG@10; the best is kept) once penalties are
            full, or ``None``.
        evaluate_split: whose queries search; ``None`` takes ``"dev"``, or the one beside train and
            test.
        evaluate_documents: how many are searched, judged ones and others by the seed; ``None``
            takes 10,000.
        patience: stop after so many evaluations in a row that are not better; ``None`` for never.
        seed: of fresh parameters, the data order, dropout and the sample for the decoder bias.
        attention: ``"softmax"``, ``"entmax"``, or ``None`` for that of the base model (softmax in a
            stock one).
        alpha: of entmax, in [1, 2]; ``None`` takes 1.5.
        anneal_alpha: share of the steps, in [0, 1], over which alpha rises from 1, which is
            softmax; 0 for none.
    """

    late: ClassVar[bool] = False  # whether a text has a vector for each token
    max_steps: int | None = checked(None, whole(0))
    epochs: float = checked(4.0, POSITIVE)
    batch_size: int = checked(64, whole(2))
    fill_batches: bool = checked(False, flag)
    mini_batch_size: int | None = checked(None, whole())
    learning_rate: float = checked(1e-4, POSITIVE)
    warmup_ratio: float = checked(0.1, number(lambda value: 0 <= value < 1, "in [0, 1)"))
    similarity_scale: float = checked(1.0, POSITIVE)
    max_length: int = checked(128, whole())
    train_max_length: int | None = checked(None, whole())
    bf16: bool | None = checked(None, flag)
    fused: bool = checked(True, flag)
    graphs: bool = checked(False, flag)
    save_steps: int | None = checked(None, whole())
    save_minutes: float = checked(5.0, NOT_NEGATIVE)
    log_steps: int = checked(10, whole())
    evaluate_steps: int | None = checked(None, whole())
    evaluate_split: str | None = None
    evaluate_documents: int | None = checked(None, whole())
    patience: int | None = checked(None, whole())
    seed: int = checked(0, SEED)
    attention: str | None = checked(None, one_of("softmax", "entmax"))
    alpha: float | None = checked(None, number(lambda value: 1 <= value <= 2, "in [1, 2]"))
    anneal_alpha: float = checked(0.0, number(lambda value: 0 <= value <= 1, "in [0, 1]"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "anneal_alpha"):
            if getattr(self, name) and self.attention != "entmax":
                raise ValueError(
                    f"{name} must be left out without attention='entmax', got {getattr(self, name)!r}.",
                )
        for name in ("evaluate_split", "evaluate_documents", "patience"):
            if getattr(self, name) is not None and self.evaluate_steps is None:
                raise ValueError(
                    f"{name} must be None without evaluate_steps, got {getattr(self, name)!r}.",
                )
        if self.train_max_length is not None and self.train_max_length > self.max_length:
            most = f"max_length ({self.max_length})"
            raise ValueError(
                f"train_max_length must not exceed {most}, got {self.train_max_length}.",
            )
        if self.graphs and not self.fused:
            raise ValueError(
                "graphs: expected the fused forward, got fused=False; leave one of the two out.",
            )
        if self.graphs and self.mini_batch_size is not None:
            raise ValueError(
                "graphs: expected no mini_batch_size, whose parts run without graphs, got "
                f"{self.mini_batch_size}.",
            )


# those of HeadPooling, which imports torch
POOLINGS = ("max", "sum", "mean", "cls", "last")
ACTIVATIONS = ("log1p_relu", "log1p_log1p_relu", "relu", "softplus", "log1p_softplus", "none")
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
    "prosper": frozenset(
        {"pooling", "logit_scale", "top_k", "normalize", "literal_residual", "shared_network"},
    ),
    "bge_m3": frozenset({"shared_network"}),
    "splate": frozenset({"head_model", "trainable"}),
}


@dataclass(frozen=True)
class EncoderSpec(Settings):
    """The encoder of queries, of documents, or of both; every field is checked on construction.

    Fields that say nothing (None) have the value of the kind. One that the kind does not have is an
    error. Kinds are ``"mlm"`` (an LM head over all tokens: SPLADE), ``"cls_mlm"`` (over the first
    one: TILDE), ``"epic"`` (over all, weighted by learned importance and quality), ``"mlp"`` (a
    weight for each token: uniCOIL, DeepImpact), ``"binary"`` (1 for each distinct token, times a
    number), ``"idf"`` (a number of its own for each distinct token; these two need no network),
    ``"causal"``, ``"bidirectional"`` or ``"echo"`` (the LM head of a causal language model, see
    :mod:`tilefold.recipes.decoders`), ``"prosper"`` (:class:`tilefold.modules.ProsperTransformer`),
    ``"bge_m3"`` (a weight for each token, with BGE-M3's own where the base model has them) and
    ``"splate"`` (an adapter on a frozen ColBERT, the base model).

    Attributes:
        kind: ``"mlm"``, ``"cls_mlm"``, ``"epic"``, ``"mlp"``, ``"binary"``, ``"idf"``,
            ``"causal"``, ``"bidirectional"``, ``"echo"``, ``"prosper"``, ``"bge_m3"`` or
            ``"splate"``.
        base_model: of this side alone: ``"minilm"``, a folder or a Hugging Face name; None takes
            the recipe's.
        pooling: of the LM head (:class:`tilefold.modules.HeadPooling`): ``"max"``, of ``"prosper"``
            ``"last"``.
        activation: ``"log1p_relu"`` of heads, ``"relu"`` of ``"mlp"``.
        logit_scale: factor on the logits: 1, but 1/16 for ModernBERT and Ettin (arXiv 2606.18811).
        drop_special_tokens: they do not count; True for ``"mlp"`` and ``"epic"``.
        top_k: keep the largest weights of a text that has more than this many; of ``"epic"``, whose
            weights are all positive, the ``max_active_dims`` of the model, 1,000.
        normalize: ``"l2"`` for vectors of length 1.
        scale: start of a learned factor (``"mlp"``); of ``"binary"``, 0.3.
        trainable: learn the numbers of ``"binary"`` and ``"idf"``; of ``"splate"``, the bias.
        idf: a JSON file of token -> weight; None counts document frequencies in the sample texts.
        layers: keep only so many of the lowest of the base model.
        shared_network: queries run the network of documents, with a pooling of their own.
        lora: rank of updates, trained alone, merged when it is saved; None trains all weights.
        literal_residual: of ``"prosper"``: False leaves out that network.
        head_model: of ``"splate"``: the masked language model whose head decodes; by default
            ``"minilm"``.
        saturation: of ``"mlp"``: the weight that counts half when texts are encoded, as BM25 counts
            frequencies, and that all tokens start with; the loss sees weights as they are.
    """

    kind: str = "mlm"
    base_model: str | None = checked(None, NAME)
    pooling: str | None = checked(None, one_of(*POOLINGS))
    activation: str | None = checked(None, one_of(*ACTIVATIONS))
    logit_scale: float | None = checked(None, POSITIVE)
    drop_special_tokens: bool | None = checked(None, flag)
    top_k: int | None = checked(None, whole())
    normalize: str | None = checked(None, one_of("l2"))
    scale: float | None = checked(None, POSITIVE)
    trainable: bool | None = checked(None, flag)
    idf: str | None = checked(None, text("the path of a file"))
    layers: int | None = checked(None, whole())
    shared_network: bool = checked(False, flag)
    lora: int | None = checked(None, whole())
    literal_residual: bool | None = checked(None, flag)
    head_model: str | None = checked(None, NAME)
    saturation: float | None = checked(None, POSITIVE)

    def __post_init__(self) -> None:
        one_of(*sorted(KINDS))("kind", self.kind)
        allowed = KINDS[self.kind] | {"kind", "base_model"}
        given = {
            field.name
            for field in fields(self)
            if getattr(self, field.name) not in (None, field.default)
        }
        if extra := sorted(given - allowed):
            raise ValueError(
                f"{extra[0]} does not apply to an encoder of kind {self.kind!r}; leave it out.",
            )
        super().__post_init__()
        if self.kind == "prosper" and self.pooling in ("sum", "mean"):
            raise ValueError(
                f"pooling must be last, cls or max for kind 'prosper', got {self.pooling!r}.",
            )
        if self.pooling == "cls" and self.drop_special_tokens:
            raise ValueError(
                "drop_special_tokens must be left out with pooling 'cls', which reads one of them, got True.",
            )

    @property
    def has_network(self) -> bool:
        """Whether texts of this side run through a Transformer."""
        return self.kind not in ("binary", "idf")


@dataclass(frozen=True)
class RegularizerSpec(Settings):
    """The sparsity penalty of one side.

    Attributes:
        kind: ``"flops"``, ``"l1"``, ``"l2"``, ``"df_flops"``, ``"anti_zero"`` (added to FLOPS, as
            naver's trainer does) or ``"none"``.
        weight: of the penalty, once the warm-up is over.
        warmup_ratio: share of the steps over which the weight rises quadratically.
        threshold: rows up to so many terms go free (arXiv 2504.14839).
        per_position: of documents: relevant ones, first negatives and so on are penalised by
            themselves, and the values added (:class:`tilefold.losses.PositionSum`); False takes all
            documents of a batch together.
    """

    kind: str = checked("flops", one_of(*REGULARIZERS))
    weight: float = checked(0.1, NOT_NEGATIVE)
    warmup_ratio: float = checked(1 / 3, RATIO)
    threshold: int | None = checked(None, whole())
    per_position: bool = checked(False, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "anti_zero" and self.threshold is not None:
            raise ValueError(
                f"threshold must be None for kind {self.kind!r}, got {self.threshold}.",
            )
        if self.kind == "df_flops" and self.per_position:
            raise ValueError(
                "per_position must be False for kind 'df_flops', whose frequencies are of all documents.",
            )
