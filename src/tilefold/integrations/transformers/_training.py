"""Trainers of transformers: alpha annealed while they run, and one GPU where they would take several."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback

from tilefold.integrations.transformers.alpha import check_alphas, has_learned_alpha, runs_entmax, set_alpha

SHAPES = ("linear", "cosine")


class AlphaSchedule(TrainerCallback):
    """Anneal alpha from softmax to its target while a trainer runs, as AdaSplash's encoders do (arXiv 2502.12082).

    A callback for ``transformers.Trainer`` and the trainers of sentence-transformers, ``callbacks=[AlphaSchedule()]``,
    of models that run entmax attention (:func:`use_entmax`). Alpha follows the number of optimiser steps done, in
    checkpoints, evaluations and resumed runs too, and stays at the target after ``until``. Alpha = 1 is softmax.

    Args:
        alpha: the target, in [1, 2]; one number, or one per attention layer.
        start: alpha at the first step.
        until: where the target is reached: a share of all steps in (0, 1] if it is a float, else a number of steps.
        shape: ``"linear"``, or ``"cosine"``, which starts and ends slowly.

    Raises:
        ValueError: for values out of range; when training starts, for a model without entmax attention, with learned
            alphas or another number of layers, or an ``until`` after the last step.
    """

    def __init__(
        self, alpha: float | Sequence[float] = 1.5, *, start: float = 1.0, until: float = 0.5, shape: str = "linear"
    ) -> None:
        self.targets = check_alphas(alpha, len(alpha) if isinstance(alpha, Sequence) else 1)
        self.alpha = alpha
        (self.start,) = check_alphas(start, 1)
        share = isinstance(until, float) and 0 < until <= 1
        if not share and (isinstance(until, bool) or not isinstance(until, int) or until < 1):
            raise ValueError(f"until must be a share of the steps in (0, 1] or a whole number of them, got {until!r}.")
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(map(repr, SHAPES))}, got {shape!r}.")
        self.until, self.shape = until, shape

    def alpha_at(self, step: int, steps: int) -> float | list[float]:
        """Alpha after ``step`` of ``steps`` optimiser steps: a number, or a list if the target is one."""
        last = max(1, math.ceil(self.until * steps) if isinstance(self.until, float) else self.until)
        share = min(1.0, step / last)
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        values = [target if share == 1 else self.start + share * (target - self.start) for target in self.targets]
        return values if isinstance(self.alpha, Sequence) else values[0]

    def on_train_begin(
        self, args: object, state: Any, control: object, model: nn.Module | None = None, **_: object
    ) -> None:
        """Check the model, and set the alpha of the first step, or of the step that training resumes from."""
        if model is None:
            raise ValueError("model must be passed to the callback by its trainer, got None.")
        if not runs_entmax(model):
            raise ValueError("model must run entmax attention, got one that runs none; call use_entmax(model) first.")
        if has_learned_alpha(model):
            raise ValueError("model must not have learned alphas, got some; a schedule would overwrite them.")
        if isinstance(self.until, int) and self.until > state.max_steps:
            raise ValueError(f"until must not lie after the last step, {state.max_steps}, got {self.until}.")
        set_alpha(model, self.alpha_at(state.global_step, state.max_steps))

    def on_step_end(
        self, args: object, state: Any, control: object, model: nn.Module | None = None, **_: object
    ) -> None:
        """Set the alpha of the next step."""
        if model is not None:
            set_alpha(model, self.alpha_at(state.global_step, state.max_steps))


@functools.cache
def one_gpu(arguments_class: Any) -> Any:
    """Training arguments with which a Trainer that no launcher started uses one GPU, however many are visible.

    There transformers' Trainer would wrap the model in ``torch.nn.DataParallel``, which an accelerated model refuses.
    Under a launcher (``torchrun``, ``accelerate launch``), on one GPU and on the CPU they change nothing::

        arguments = one_gpu(SparseEncoderTrainingArguments)(output_dir="model", per_device_train_batch_size=32)

    Args:
        arguments_class: ``transformers.TrainingArguments``, or a class derived from it.

    Returns:
        A class derived from it, whose ``n_gpu`` is at most 1. What is pickled of its instances (``training_args.bin``)
        is an instance of ``arguments_class``, and loads without tilefold.

    Raises:
        TypeError: for anything else.
    """
    from transformers import TrainingArguments

    if not (isinstance(arguments_class, type) and issubclass(arguments_class, TrainingArguments)):
        raise TypeError(f"arguments_class must be transformers.TrainingArguments or derived, got {arguments_class!r}.")

    class OneGpu(arguments_class):
        @property
        def n_gpu(self) -> int:
            return min(1, int(super().n_gpu))

        def __reduce__(self) -> Any:
            stock = object.__new__(arguments_class)
            vars(stock).update(vars(self))
            return stock.__reduce_ex__(1)  # from protocol 2 on pickle wants the class of the object itself

    OneGpu.__name__ = OneGpu.__qualname__ = f"OneGpu{arguments_class.__name__}"
    OneGpu.__doc__ = f"``{arguments_class.__name__}`` whose ``n_gpu`` is at most 1; see :func:`one_gpu`."
    return OneGpu
