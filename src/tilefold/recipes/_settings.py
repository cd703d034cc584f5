"""Recipe settings as frozen dataclasses whose fields are validated and stored as JSON."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from tilefold._internal.arguments import ArgumentError, suggestion

Validator = Callable[..., None]
"""Validator of a field: ``validate(name, value, optional=False)`` raises a ``ValueError``."""
S = TypeVar("S", bound="Settings")
T = TypeVar("T")

_ATTRIBUTE_ENTRY = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", re.MULTILINE)
_SPHINX_ROLE = re.compile(r":\w+:`~?([^`]*)`")


def validator(accept: Callable[[Any], bool], expected: str) -> Validator:
    """Create a validator of a field from a condition.

    Args:
        accept: returns whether a value is valid.
        expected: description of a valid value, for the error message.

    Returns:
        A function of a field's name, its value and whether ``None`` is valid too. It raises an
        ``ArgumentError`` if the value is not valid.
    """

    def validate(name: str, value: object, optional: bool = False) -> None:
        """Raise an ``ArgumentError`` if the value of a field is not valid."""
        if optional and value is None:
            return
        if not accept(value):
            alternative = " or None" if optional else ""
            raise ArgumentError(name, f"expected {expected}{alternative}, got {value!r}.")

    return validate


def is_integer(value: object, minimum: int) -> bool:
    """Return whether a value is an ``int``, not a ``bool``, of at least ``minimum``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def integer(minimum: int = 1) -> Validator:
    """Create a validator of integers of at least ``minimum``."""
    return validator(
        lambda value: is_integer(value, minimum),
        f"a whole number of at least {minimum}",
    )


def finite_number(is_in_range: Callable[[float], bool], expected: str) -> Validator:
    """Create a validator of finite numbers in a range.

    Args:
        is_in_range: function that defines the range, such as ``lambda value: value > 0``.
        expected: description of the range for the error message, such as ``"greater than 0"``.
    """

    def is_valid(value: object) -> bool:
        """Return whether a value is a finite number in the range; booleans are not numbers."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return math.isfinite(value) and is_in_range(value)

    return validator(is_valid, f"a number {expected}")


def one_of(*names: str) -> Validator:
    """Create a validator of a choice among names."""
    return validator(lambda value: value in names, f"one of {', '.join(names)}")


def nonempty_text(expected: str) -> Validator:
    """Create a validator of strings that are not empty.

    Args:
        expected: description of a valid string, for the error message.
    """
    return validator(lambda value: isinstance(value, str) and value != "", expected)


BOOLEAN = validator(lambda value: isinstance(value, bool), "True or False")
POSITIVE = finite_number(lambda value: value > 0, "greater than 0")
NOT_NEGATIVE = finite_number(lambda value: value >= 0, "of at least 0")
RATIO = finite_number(lambda value: 0 < value <= 1, "in (0, 1]")
MODEL_NAME = nonempty_text("'minilm', a folder or a model name")
SEED = validator(
    lambda value: is_integer(value, 0) and value < 2**32,
    "a whole number of at least 0 and below 2^32",
)
REGULARIZERS = ("flops", "l1", "l2", "df_flops", "anti_zero", "none")


def checked(default: T, validate: Validator) -> T:
    """Declare a field of :class:`Settings` with a default and a validator.

    ``None`` is a valid value if it is the default.
    """
    return field(default=default, metadata={"validate": validate})


def _to_json(value: object) -> object:
    """Return the JSON value of a field: nested settings and mappings become dictionaries."""
    if isinstance(value, Settings):
        return value.to_dict()
    if isinstance(value, Mapping):
        return dict(value)
    return value


@dataclass(frozen=True)
class Settings:
    """Dataclass that validates its fields on construction and converts to a JSON object."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            validate = setting.metadata.get("validate")
            if validate is not None:
                validate(setting.name, getattr(self, setting.name), setting.default is None)

    def to_dict(self) -> dict[str, Any]:
        """Field names and values, as a JSON object."""
        return {setting.name: _to_json(getattr(self, setting.name)) for setting in fields(self)}

    @classmethod
    def field_descriptions(cls) -> dict[str, str]:
        """Return the description of each field in plain text, for ``--help`` and messages.

        Descriptions come from the section "Attributes" of the docstrings of the class and of its
        bases. A class overrides the descriptions of its bases.

        Returns:
            Name of a field -> description.
        """
        descriptions: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            docstring = inspect.cleandoc(base.__doc__ or "")
            _, _, section = docstring.partition("Attributes:\n")
            # An entry may describe several fields: "first_field, second_field: description".
            for names, description in _ATTRIBUTE_ENTRY.findall(section):
                joined_lines = " ".join(description.split())
                plain_text = _SPHINX_ROLE.sub(r"\1", joined_lines).replace("`", "")
                for name in names.split(", "):
                    descriptions[name] = plain_text
        return descriptions

    @classmethod
    def from_dict(cls: type[S], values: dict[str, Any]) -> S:
        """Create settings from field names and values; the inverse of :meth:`to_dict`.

        Args:
            values: name -> value. Fields that are left out take their defaults.

        Raises:
            ValueError: if a field is unknown, or a value is out of range.
        """
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise ValueError(
                f"unknown recipe fields {unknown}; the fields are {sorted(names)}."
                f"{suggestion(unknown[0], sorted(names))}",
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Settings):
    """Settings that all recipes have; a recipe adds a ``base_model`` and other fields.

    Attributes:
        max_steps: number of optimiser steps; 0 saves the untrained model, which needs no pairs.
        epochs: number of passes over the training pairs, if ``max_steps`` is ``None``.
        batch_size: number of pairs per step, at least 2; every other document of a batch is a
            negative.
        fill_batches: whether the short batches of an epoch are filled with pairs that it has
            already had, so that every query has as many negatives. Several ranks always fill them.
            ``False`` leaves the last batch of an epoch short, and more batches if queries or
            documents occur in very many pairs.
        mini_batch_size: number of texts per forward and backward, for batches that do not fit into
            memory: all vectors are computed first, and again for their gradients (GradCache, arXiv
            2101.06983). ``None`` processes each batch at once.
        learning_rate: peak of the linear schedule.
        warmup_ratio: share of the steps over which the learning rate rises.
        similarity_scale: factor on the scores before the softmax.
        max_length: maximum number of tokens per text of the saved model (per document for a
            ColBERT).
        train_max_length: maximum number of tokens during training; ``None`` for ``max_length``.
        bf16: whether to train with bf16 autocast; ``None`` uses it if the hardware supports it.
        fused: whether to train with the fused head, or with the fused similarity on packed tokens,
            if the model supports it.
        gradient_checkpointing: whether the backward pass computes the activations of each layer
            again, so that a step takes less memory and more time. The losses are the same.
        fsdp: whether several ranks divide weights, gradients and optimiser state among them (FSDP2
            of torch), for models that do not fit on one GPU. Otherwise each rank has a copy. The
            losses are the same, and one rank has nothing to divide.
        graphs: whether to run forward and backward of the encoder as CUDA graphs, see
            :func:`tilefold.integrations.sentence_transformers.accelerate`. Needs a GPU and
            ``fused``. A resumed run draws other numbers for
            dropout than an uninterrupted one.
        save_steps: number of steps between checkpoints, from which an interrupted run is resumed;
            ``None`` for 25, or more if checkpoints would take over 5% of the time.
        save_minutes: longest time between checkpoints, in minutes.
        log_steps: number of steps between rows of the log; each row synchronizes the GPU, and
            detects a loss that is not finite or vectors that are all zero.
        evaluate_steps: number of steps between evaluations by nDCG@10, the best of which determines
            the saved model. They begin when the weights of penalties no longer rise. ``None`` for
            no evaluations.
        evaluate_split: split of the evaluated queries; ``None`` for ``"dev"``, or the only split
            other than train and test.
        evaluate_documents: number of searched documents: judged documents, and a random sample of
            other documents; ``None`` for 10,000.
        patience: number of consecutive evaluations without improvement after which training stops;
            ``None`` never stops early.
        seed: seed of new parameters, the data order, dropout and the sample for the decoder bias.
        attention: ``"softmax"``, ``"entmax"``, or ``None`` for the attention of the base model.
        alpha: alpha of entmax, in [1, 2]; ``None`` for 1.5.
        anneal_alpha: share of the steps, in [0, 1], over which alpha rises from 1 (softmax) to its
            final value; 0 for a constant alpha.
    """

    late: ClassVar[bool] = False
    """Whether the model computes a vector for each token (late interaction)."""
    max_steps: int | None = checked(None, integer(0))
    epochs: float = checked(4.0, POSITIVE)
    batch_size: int = checked(64, integer(2))
    fill_batches: bool = checked(False, BOOLEAN)
    mini_batch_size: int | None = checked(None, integer())
    learning_rate: float = checked(1e-4, POSITIVE)
    warmup_ratio: float = checked(0.1, finite_number(lambda value: 0 <= value < 1, "in [0, 1)"))
    similarity_scale: float = checked(1.0, POSITIVE)
    max_length: int = checked(128, integer())
    train_max_length: int | None = checked(None, integer())
    bf16: bool | None = checked(None, BOOLEAN)
    fused: bool = checked(True, BOOLEAN)
    gradient_checkpointing: bool = checked(False, BOOLEAN)
    fsdp: bool = checked(False, BOOLEAN)
    graphs: bool = checked(False, BOOLEAN)
    save_steps: int | None = checked(None, integer())
    save_minutes: float = checked(5.0, NOT_NEGATIVE)
    log_steps: int = checked(10, integer())
    evaluate_steps: int | None = checked(None, integer())
    evaluate_split: str | None = None
    evaluate_documents: int | None = checked(None, integer())
    patience: int | None = checked(None, integer())
    seed: int = checked(0, SEED)
    attention: str | None = checked(None, one_of("softmax", "entmax"))
    alpha: float | None = checked(None, finite_number(lambda value: 1 <= value <= 2, "in [1, 2]"))
    anneal_alpha: float = checked(0.0, finite_number(lambda value: 0 <= value <= 1, "in [0, 1]"))

    def __post_init__(self) -> None:
        """Check each field, and then fields that depend on each other."""
        super().__post_init__()
        self._check_attention()
        self._check_evaluation()
        if self.train_max_length is not None and self.train_max_length > self.max_length:
            raise ArgumentError(
                "train_max_length",
                f"must not exceed max_length ({self.max_length}), got {self.train_max_length}.",
            )
        if self.graphs and not self.fused:
            raise ArgumentError(
                ("graphs", "fused"),
                "graphs need the fused forward; set fused=True, or leave graphs out.",
            )
        if self.graphs and self.mini_batch_size is not None:
            raise ArgumentError(
                ("graphs", "mini_batch_size"),
                "expected one of them, got both; mini-batches run without graphs.",
            )
        if self.graphs and self.gradient_checkpointing:
            raise ArgumentError(
                ("graphs", "gradient_checkpointing"),
                "expected one of them, got both; layers that are computed again run without "
                "graphs.",
            )
        if self.graphs and self.fsdp:
            raise ArgumentError(
                ("fsdp", "graphs"),
                "expected one of them, got both; layers that gather their weights run without "
                "graphs.",
            )

    @property
    def distinct_texts(self) -> bool:
        """Whether a text may occur only once in a batch, because of in-batch negatives."""
        return True

    def _check_attention(self) -> None:
        """Raise an error for options of entmax if the attention is not entmax."""
        for name in ("alpha", "anneal_alpha"):
            value = getattr(self, name)
            if value and self.attention != "entmax":
                raise ArgumentError(
                    name,
                    f"must be left out without attention 'entmax', got {value!r}.",
                )

    def _check_evaluation(self) -> None:
        """Raise an error for options of evaluations if there are no evaluations."""
        for name in ("evaluate_split", "evaluate_documents", "patience"):
            value = getattr(self, name)
            if value is not None and self.evaluate_steps is None:
                raise ArgumentError(name, f"must be None without evaluate_steps, got {value!r}.")


@dataclass(frozen=True)
class RegularizerSpec(Settings):
    """Sparsity penalty on the vectors of queries or of documents.

    Attributes:
        kind: ``"flops"``, ``"l1"``, ``"l2"``, ``"df_flops"``, ``"anti_zero"`` (added to FLOPS, as
            naver's trainer does) or ``"none"``.
        weight: weight of the penalty after the warm-up.
        warmup_ratio: share of the steps over which the weight rises quadratically.
        threshold: number of active terms up to which a row is not penalised (arXiv 2504.14839).
        per_position: whether relevant documents, first negatives and so on are penalised
            separately and the values added (:class:`tilefold.losses.PositionSum`); False penalises
            all documents of a batch together. Documents only.
    """

    kind: str = checked("flops", one_of(*REGULARIZERS))
    weight: float = checked(0.1, NOT_NEGATIVE)
    warmup_ratio: float = checked(1 / 3, RATIO)
    threshold: int | None = checked(None, integer())
    per_position: bool = checked(False, BOOLEAN)

    def __post_init__(self) -> None:
        """Check each field, and raise an error for options that the kind of penalty lacks."""
        super().__post_init__()
        if self.kind == "anti_zero" and self.threshold is not None:
            raise ArgumentError(
                "threshold",
                f"must be None for kind 'anti_zero', which penalises all rows, got "
                f"{self.threshold}.",
            )
        if self.kind == "df_flops" and self.per_position:
            raise ArgumentError(
                "per_position",
                "must be False for kind 'df_flops', which counts terms over all documents.",
            )
