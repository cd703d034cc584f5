"""Settings as checked dataclasses: rules for fields, dictionaries for files, and the fields of every training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

__all__ = ["ATTENTIONS", "POSITIVE", "Check", "Settings", "TrainingSettings", "flag", "number", "whole"]

ATTENTIONS = ("softmax", "entmax")
Check = Callable[[str, Any], None]
S = TypeVar("S", bound="Settings")


def whole(least: int = 1, *, optional: bool = False) -> Check:
    """A rule: a whole number of at least `least`, or ``None`` where that is allowed."""

    def check(name: str, value: Any) -> None:
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            allowed = f"at least {least}{' or None' if optional else ''}"
            raise ValueError(f"{name} must be a whole number of {allowed}, got {value!r}.")

    return check


def number(accept: Callable[[float], bool], expected: str, *, optional: bool = False) -> Check:
    """A rule: a finite number that `accept` takes, or ``None`` where that is allowed."""

    def check(name: str, value: Any) -> None:
        if optional and value is None:
            return
        finite = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not finite or not accept(value):
            raise ValueError(f"{name} must be a number {expected}, got {value!r}.")

    return check


def flag(name: str, value: Any) -> None:
    """A rule: True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def _base_model(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be 'minilm', a folder or a model name, got {value!r}.")


def _seed(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"{name} must be a whole number of at least 0 and below 2^32, got {value!r}.")


def _bf16(name: str, value: Any) -> None:
    if value not in (None, True, False):
        raise ValueError(f"{name} must be True, False or None (by hardware), got {value!r}.")


def _attention(name: str, value: Any) -> None:
    if value not in (None, *ATTENTIONS):
        raise ValueError(f"{name} must be 'softmax', 'entmax' or None, got {value!r}.")


POSITIVE = number(lambda value: value > 0, "greater than 0")


@dataclass(frozen=True)
class Settings:
    """A dataclass whose fields are checked on construction, and that a file keeps as a JSON object.

    Attributes:
        CHECKS: a rule for each field that has one; those of base classes hold too.
    """

    CHECKS: ClassVar[Mapping[str, Check]] = {}

    def __post_init__(self) -> None:
        for kind in reversed(type(self).__mro__):
            for name, check in vars(kind).get("CHECKS", {}).items():
                check(name, getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Field names and values, as a JSON object."""
        return asdict(self)

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
        max_steps: optimiser steps; ``None`` uses ``epochs``, 0 leaves the untrained start, which needs no pairs.
        epochs: passes over the training pairs when ``max_steps`` is ``None``.
        batch_size: pairs per step, at least 2; every other document of a batch is a negative.
        learning_rate: peak of the linear schedule.
        warmup_ratio: share of the steps over which the learning rate rises.
        similarity_scale: factor on the scores before the softmax.
        max_length: maximum tokens per text (of a ColBERT: per document) of the saved model.
        train_max_length: the same while training; ``None`` takes ``max_length``.
        bf16: bf16 autocast; ``None`` uses it where the hardware has it.
        fused: train with the fused head, or the fused similarity on packed tokens where the model allows.
        graphs: repeat forward and backward of the encoder as CUDA graphs, see :func:`collate_ahead`. Needs a GPU and
            ``fused``. A resumed run draws other numbers for dropout than one that was not interrupted.
        save_steps: steps between checkpoints, from which an interrupted run is resumed.
        save_minutes: time between checkpoints at the latest.
        seed: of fresh parameters, the data order, dropout and the sample for the decoder bias.
        attention: ``"softmax"``, ``"entmax"``, or ``None`` for that of the base model (softmax in a stock one).
        alpha: of entmax, in [1, 2]; ``None`` takes 1.5.
        anneal_alpha: share of the steps, in [0, 1], over which alpha rises from 1, which is softmax; 0 for none.
    """

    max_steps: int | None = None
    epochs: float = 4.0
    batch_size: int = 64
    learning_rate: float = 1e-4
    warmup_ratio: float = 0.1
    similarity_scale: float = 1.0
    max_length: int = 128
    train_max_length: int | None = None
    bf16: bool | None = None
    fused: bool = True
    graphs: bool = False
    save_steps: int = 25
    save_minutes: float = 5.0
    seed: int = 0
    attention: str | None = None
    alpha: float | None = None
    anneal_alpha: float = 0.0

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "base_model": _base_model,
        "max_steps": whole(0, optional=True),
        "epochs": POSITIVE,
        "batch_size": whole(2),  # the others of a batch are the negatives
        "learning_rate": POSITIVE,
        "warmup_ratio": number(lambda value: 0 <= value < 1, "in [0, 1)"),
        "similarity_scale": POSITIVE,
        "max_length": whole(),
        "train_max_length": whole(optional=True),
        "bf16": _bf16,
        "graphs": flag,
        "save_steps": whole(),
        "save_minutes": number(lambda value: value >= 0, "of at least 0"),
        "seed": _seed,
        "attention": _attention,
        "alpha": number(lambda value: 1 <= value <= 2, "in [1, 2]", optional=True),
        "anneal_alpha": number(lambda value: 0 <= value <= 1, "in [0, 1]"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "anneal_alpha"):
            if getattr(self, name) and self.attention != "entmax":
                raise ValueError(f"{name} must be left out without attention='entmax', got {getattr(self, name)!r}.")
        if self.train_max_length is not None and self.train_max_length > self.max_length:
            raise ValueError(
                f"train_max_length must not exceed max_length ({self.max_length}), got {self.train_max_length}."
            )
        if self.graphs and not self.fused:
            raise ValueError("graphs must be False without fused, got True; leave --graphs or --plain out.")
