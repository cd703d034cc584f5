"""The ``train`` of every recipe: pairs, one resumable run, a stock model, on one rank or on
several.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from tilefold._internal.arguments import check_instance
from tilefold._internal.files import naming_full_disk
from tilefold._internal.sentence_transformers import check_sentence_transformers
from tilefold._internal.typing import Model
from tilefold.distributed.ranks import (
    as_single_process,
    first_rank_first,
    has_other_ranks,
    join_ranks,
)
from tilefold.distributed.world import World
from tilefold.recipes import _run
from tilefold.recipes._card import describe
from tilefold.recipes._evaluation import choose
from tilefold.recipes._rows import Examples, document_texts, pair_examples
from tilefold.recipes._settings import TrainingSettings
from tilefold.recipes._steps import check_batches, total_steps
from tilefold.recipes.adapters import check_trainable, train_adapters
from tilefold.recipes.loading import quiet_libraries, supports_bf16
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.training_data.rows import RowsAhead

EXPLODED = 4.0
_logger = logging.getLogger(__name__)
Losses = _run.Losses
Progress = _run.Progress


@dataclass(frozen=True)
class TrainResult:
    """The result of ``train``."""

    model_dir: str  # of the finished stock model
    steps: int  # of the optimiser; fewer than the recipe's where patience stopped it
    loss: float | None  # mean of the last steps that were logged
    seconds: float  # wall time of this call
    resumed_from: int  # the step that this call resumed from, 0 for a new run
    reused: bool  # whether the folder already held the finished model of this recipe and data
    bf16: bool  # whether the run used it
    fused: bool  # and this
    first_ranking_loss: float | None = None  # without regularisers, of the first step of this call
    ranking_loss: float | None = None  # and of the last ones
    penalties: float | None = None  # of the last ones, weighted; None without any
    warnings: tuple[str, ...] = ()  # what went wrong in the training, and what to do about it
    # : ``{"texts", "count", "max_length"}`` for each length: texts that this call's steps read,
    # repeated ones too, and : how many of them were cut there
    truncated: tuple[dict[str, int | None], ...] = ()
    ranks: int = 1  # processes that the last call trained with, each with its share of every step
    pairs: int | None = None  # of the largest step that was done, on all ranks together
    fewest_pairs: int | None = None  # of the smallest one
    trained_pairs: int | None = None  # of all steps together; a pair counts in each of its steps
    # documents that the largest step compared each query with, beside its own; on all ranks too
    negatives: int | None = None
    fewest_negatives: int | None = None  # and the smallest step
    trained_weights: int | None = None  # numbers in all parameters that were trained
    weights: int | None = None  # and in all parameters
    evaluated: str = ""  # what nDCG@10 is of; empty without evaluations
    evaluations: tuple[dict[str, Any], ...] = ()  # ``{"step", "nDCG@10", "kept"}`` of each
    kept_step: int | None = None  # whose model this is: the best evaluation

    @property
    def exploded(self) -> bool:
        """Whether the ranking loss rose several times over: the model has lost what it knew."""
        if self.ranking_loss is None or self.first_ranking_loss is None:
            return False
        return self.ranking_loss > EXPLODED * max(self.first_ranking_loss, 1.0)


@dataclass(frozen=True)
class Call:
    """Arguments of :func:`train` that do not change the model."""

    resume: bool = True
    overwrite: bool = False
    verbose: bool = False
    hours: float | None = None
    report_to: str = "none"
    command: str = ""


@dataclass(frozen=True)
class TrainingJob:
    """The model, which is trained in place, its data, and where checkpoints go."""

    recipe: Recipe
    model: Model
    examples: Examples
    run: _run.TrainingRun
    result: TrainResult  # but for what the trainer tells
    progress: Progress | None
    world: World
    call: Call
    evaluator: Any  # stock, or None


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingSettings):
    """A configuration that :func:`train` takes."""

    reads_negatives: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The data that training takes: ``"pairs"``, ``"negatives"``, ``"scores"``."""
        return ("pairs",)

    def preparation(self, data: str) -> list[str]:
        """Commands that make what :attr:`needs` has beside pairs of a collection, offline; the last
        writes the file.
        """
        return []

    @property
    def distinct_texts(self) -> bool:
        """Whether no text may occur twice in a batch, whose documents are negatives of each other."""
        return True

    def negatives_among(self, pairs: int) -> int:
        """Documents that a step of so many pairs compares each query with, beside its own."""
        return pairs - 1

    @property
    def adds_adapters(self) -> bool:
        """Whether training puts adapters into the base model, which are merged at the end."""
        return False

    def start(self, texts: Sequence[str]) -> Model:
        """The untrained model; `texts` are the documents of the collection."""
        raise NotImplementedError

    def examples(
        self,
        collection: Collection,
        negatives: str | Path | RowsAhead | None,
    ) -> Examples:
        """The rows that training reads."""
        return pair_examples(collection, "document")

    def fit(self, job: TrainingJob) -> TrainResult:
        """Train the job's model in place; its result with losses and warnings."""
        raise NotImplementedError


def train(
    recipe: Recipe,
    collection: Collection,
    output_dir: str | Path,
    *,
    negatives: str | Path | RowsAhead | None = None,
    resume: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
    verbose: bool = False,
    hours: float | None = None,
    report_to: str = "none",
    command: str = "",
) -> TrainResult:
    """Train any recipe on the pairs of the collection's ``"train"`` split, and save a stock model
    in `output_dir`.

    Checkpoints lie in ``<output_dir>.training``; the finished model is moved into place atomically.
    The same call (recipe and data) goes on from the last complete checkpoint of an interrupted run,
    and returns a finished one unchanged. Equal recipes, data and machines give equal models;
    ``max_steps=0`` saves the model as it starts.

    Under ``torchrun`` or ``accelerate launch``, every rank makes this call. The ranks share the
    pairs of each step: batches, negatives and penalties are those of one process with the same
    recipe, but for the short last batch of an epoch, which several ranks fill with pairs that the
    epoch has already had. The first rank writes; another number of ranks may resume.

    Args:
        negatives: of the training queries, mined or with teacher scores
            (:mod:`tilefold.retrieval.training_data.rows`).
        resume: go on with, or return, an earlier run; False discards its checkpoints.
        overwrite: replace a finished model in `output_dir`.
        progress: called as ``progress(step, steps, losses)`` after every step, on the first rank;
            the :class:`tilefold.recipes.Losses` are ``None`` until they are known.
        verbose: let the libraries log.
        hours: of this call's training, at most; then a checkpoint is kept, and
            :class:`OutOfTimeError` raised.
        report_to: ``"tensorboard"`` (in ``<output_dir>.logs``), ``"wandb"`` or another name that
            the trainer knows.
        command: for the card of the model, ``README.md``, that made it.

    Raises:
        TypeError: `recipe` is no recipe, such as its name, or `collection` no collection.
        ValueError: no training pairs, missing data (the message has the command that makes them),
            no split to evaluate, checkpoints of another recipe or data, `negatives` for a recipe
            that reads none, graphs without a GPU, a batch that the ranks cannot share, or that must
            be full and cannot be.
        FileExistsError: `output_dir` holds something other than a model of this recipe and data.
        ImportError: sentence-transformers is not installed, or older than 6.2; or the packaged
            model is not installed.
        OutOfTimeError: `hours` are over; the same call goes on.
        TrainingError: the loss is not finite, or fewer steps were done than the recipe has.
        RankError: another rank failed or ended; its checkpoints are kept.
        RuntimeError: the environment names several processes, and no launcher that is known started
            them.
    """
    import torch.distributed as dist

    if not hasattr(recipe, "fit") or isinstance(recipe, type):
        remedy = f"get_recipe({recipe!r})" if isinstance(recipe, str) else "get_recipe(name)"
        raise TypeError(
            f"recipe: expected a recipe, got {type(recipe).__name__}; pass {remedy}.",
        )
    check_instance("collection", collection, Collection, "load_collection(path)")
    if negatives is not None and not recipe.reads_negatives:
        raise ValueError(
            f"negatives must be left out for a {type(recipe).__name__}, which reads none.",
        )
    if hours is not None and not hours > 0:
        raise ValueError(f"hours must be above 0 or None, got {hours}.")
    if report_to not in ("none", "all"):
        from transformers.integrations import INTEGRATION_TO_CALLBACK

        if report_to not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ValueError(f"report_to must be none, all or one of {known}, got {report_to!r}.")
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    if (
        processes > 1
        and not has_other_ranks()
        and not (dist.is_available() and dist.is_initialized())
    ):
        remedy = "Start it with torchrun, accelerate launch or tilefold train --devices, or unset WORLD_SIZE."
        raise RuntimeError(
            f"several processes must come from a known launcher, got WORLD_SIZE={processes}. {remedy}",
        )
    check_sentence_transformers()
    with join_ranks(training=True):
        world = World()
        try:
            call, shown = (
                Call(resume, overwrite, verbose, hours, report_to, command),
                None if world.rank else progress,
            )
            return _train(recipe, collection, Path(output_dir), negatives, world, call, shown)
        finally:
            world.close()


def _train(
    recipe: Recipe,
    collection: Collection,
    output_dir: Path,
    negatives: str | Path | RowsAhead | None,
    world: World,
    call: Call,
    progress: Progress | None,
) -> TrainResult:
    started = time.monotonic()
    untrained = recipe.max_steps == 0
    made = Examples({}, 0) if untrained else recipe.examples(collection, negatives)
    short_batches = ""
    if not untrained:
        short_batches = check_batches(
            recipe,
            made,
            ranks=world.size,
            distinct_texts=recipe.distinct_texts,
        )
        if short_batches and world.rank == 0:
            _logger.warning("%s", short_batches)  # before hours of training
    evaluator, evaluated, texts = choose(recipe, collection)
    data = texts_digest(collection.contents()) if untrained else made.digest() + texts
    bf16 = supports_bf16() if recipe.bf16 is None else recipe.bf16
    run = _run.TrainingRun(output_dir, recipe.to_dict() | {"bf16": bf16}, data)
    if any(settings != run.settings for settings in world.gather(run.settings)):
        raise ValueError(
            "recipe and data must be the same on all ranks, got others; give each rank the same call.",
        )
    finished = world.call_on_first(
        lambda: run.finished(overwrite=call.overwrite, resume=call.resume)
    )
    if finished is not None:
        now = {"seconds": time.monotonic() - started, "reused": True, "model_dir": str(output_dir)}
        lists = {
            name: tuple(finished.get(name, ())) for name in ("warnings", "truncated", "evaluations")
        }
        return TrainResult(**finished | now | lists)
    check_graphs(recipe.graphs)
    full_batches = world.size > 1 or recipe.fill_batches
    opened = world.call_on_first(lambda: run.open(resume=call.resume, full_batches=full_batches))
    run.checkpoint, run.resumed_from, run.full_batches = opened
    with quiet_libraries(call.verbose):
        from tilefold.integrations.transformers import register

        register()  # of entmax attention
        try:
            with first_rank_first(), as_single_process():  # what it fetches, the others find
                model = recipe.start(document_texts(collection))
            _use_attention(model, recipe)
            adapters = () if untrained else train_adapters(model)
            if not untrained:
                check_trainable(model)
        except Exception:
            if world.rank == 0:
                run.close()
            raise
        result = TrainResult(
            model_dir=str(output_dir),
            steps=total_steps(recipe, made.pairs),
            loss=None,
            seconds=0.0,
            resumed_from=run.resumed_from,
            reused=False,
            bf16=bf16,
            fused=recipe.fused,
            warnings=tuple(
                filter(
                    None,
                    (
                        *made.notes,
                        short_batches if run.full_batches else "",  # else the steps tell of it
                        _lowered(recipe, model),
                        _adapters_note(recipe, adapters),
                    ),
                ),
            ),
            ranks=world.size,
            evaluated=evaluated,
        )
        with naming_full_disk(run.work_dir), world.naming_lost_ranks():
            if not untrained:
                result = recipe.fit(
                    TrainingJob(recipe, model, made, run, result, progress, world, call, evaluator),
                )
            result = replace(result, seconds=time.monotonic() - started)
            told = describe(recipe, result, collection.name, made.pairs, run.history, call.command)
            world.call_on_first(lambda: run.finish(model, asdict(result), told))
    return result


def _use_attention(model: Model, recipe: TrainingSettings) -> None:
    """Give `model` the attention of a recipe; a ``ValueError`` for one whose attention cannot be
    chosen.
    """
    if recipe.attention is None:
        return
    from tilefold.integrations.transformers import runs_entmax, use_entmax, use_softmax

    if recipe.attention == "entmax":
        use_entmax(model, 1.5 if recipe.alpha is None else recipe.alpha)
    elif runs_entmax(model):
        use_softmax(model)


def _adapters_note(recipe: Recipe, adapters: Sequence[str]) -> str:
    """A note on adapters that came with the base model; empty without any."""
    if not adapters or recipe.adds_adapters:
        return ""
    return (
        f"base_model has adapters ({', '.join(adapters)}): they are trained on and saved as "
        "adapters, and the weights below them stay as they are. Merge them first to train all "
        "weights (tilefold.recipes.adapters.merge_adapters)."
    )


def _lowered(recipe: TrainingSettings, model: Model) -> str:
    """A note on a model that reads fewer tokens than the recipe asks for; empty for others."""
    limit = getattr(model[0], "document_length", None) or model.max_seq_length
    if not isinstance(limit, int) or limit >= recipe.max_length:
        return ""
    return f"the model reads at most {limit} tokens of a text, fewer than max_length ({recipe.max_length})."


def check_graphs(graphs: bool) -> None:
    """Raise a ``ValueError`` where graphs are asked for and there is no GPU of CUDA."""
    import torch

    if graphs and (torch.version.cuda is None or not torch.cuda.is_available()):
        raise ValueError(
            "graphs: expected a GPU of CUDA, got none; leave graphs out on this machine.",
        )
