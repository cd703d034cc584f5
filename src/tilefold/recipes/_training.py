"""The common part of every recipe's ``train``: pairs, one resumable run, a stock model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tilefold.recipes import _run
from tilefold.recipes._attention import register_entmax, use_attention
from tilefold.recipes.precision import supports_bf16
from tilefold.recipes.quiet import quiet_libraries

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection

__all__ = ["Progress", "Recipe", "TrainResult", "run_training", "total_steps", "training_pairs"]

Progress = Callable[[int, int, "float | None"], None]


class Recipe(Protocol):
    """The fields that every recipe has."""

    @property
    def max_steps(self) -> int | None: ...

    @property
    def epochs(self) -> float: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def bf16(self) -> bool | None: ...

    @property
    def fused(self) -> bool: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class TrainResult:
    """The result of ``train``.

    Attributes:
        model_dir: the finished stock model.
        steps: optimiser steps of the model.
        loss: mean training loss of the last steps that were logged.
        seconds: wall time of this call.
        resumed_from: the step that this call resumed from, 0 for a new run.
        reused: whether the folder already held the finished model of this recipe and data.
        bf16, fused: whether the run used them.
    """

    model_dir: str
    steps: int
    loss: float | None
    seconds: float
    resumed_from: int
    reused: bool
    bf16: bool
    fused: bool


def run_training(
    recipe: Recipe,
    collection: Collection,
    output_dir: str | Path,
    *,
    resume: bool,
    overwrite: bool,
    verbose: bool,
    load: Callable[[], Any],
    fit: Callable[[Any, list[tuple[str, str]], _run.TrainingRun, _run.Checkpoint | None, bool], float | None],
) -> TrainResult:
    """Return a finished run's result, or ``load()``, ``fit(model, pairs, run, checkpoint, bf16)`` and save a model.

    Raises:
        ValueError, FileExistsError: see ``train`` of a recipe.
    """
    started = time.monotonic()
    pairs = training_pairs(collection)
    bf16 = supports_bf16() if recipe.bf16 is None else recipe.bf16
    run = _run.TrainingRun(Path(output_dir), recipe.to_dict() | {"bf16": bf16}, _run.digest(pairs))
    finished = run.finished(overwrite=overwrite, resume=resume)
    if finished is not None:
        return TrainResult(
            **finished | {"seconds": time.monotonic() - started, "reused": True, "model_dir": str(output_dir)}
        )
    checkpoint = run.open(resume=resume)
    with quiet_libraries(verbose):
        register_entmax()
        model = load()
        use_attention(model, recipe)
        loss = fit(model, pairs, run, checkpoint, bf16)
        result = TrainResult(
            model_dir=str(output_dir),
            steps=total_steps(recipe, len(pairs)),
            loss=loss,
            seconds=time.monotonic() - started,
            resumed_from=checkpoint.step if checkpoint else 0,
            reused=False,
            bf16=bf16,
            fused=recipe.fused,
        )
        run.finish(model, asdict(result))
    return result


def training_pairs(collection: Collection) -> list[tuple[str, str]]:
    """Texts of the (query, relevant document) pairs of the ``"train"`` split."""
    named = collection.pairs("train") if "train" in collection.qrels else []
    if not named:
        raise ValueError(
            f"collection {collection.name!r} has no pairs in its 'train' split (splits: "
            f"{sorted(collection.qrels) or 'none'}); add qrels/train.tsv with at least one positive judgement."
        )
    return [(collection.queries[query], collection.documents[doc].contents) for query, doc in named]


def total_steps(recipe: Recipe, n_pairs: int) -> int:
    """Optimiser steps of a recipe over `n_pairs` pairs."""
    if recipe.max_steps is not None:
        return recipe.max_steps
    return max(1, math.ceil(recipe.epochs * math.ceil(n_pairs / recipe.batch_size)))
