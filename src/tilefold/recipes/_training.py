"""Training of any recipe: a resumable run on one or several ranks, which saves a model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._internal.arguments import ArgumentError, check_instance
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
from tilefold.recipes._evaluation import create_evaluation
from tilefold.recipes._rows import Examples, document_texts, pair_examples
from tilefold.recipes._settings import TrainingSettings
from tilefold.recipes._steps import check_batches, total_steps
from tilefold.recipes.adapters import check_trainable, unfreeze_adapters
from tilefold.recipes.loading import quiet_libraries, supports_bf16
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.training_data.rows import RowsAhead

if TYPE_CHECKING:
    from tilefold.recipes._sharding import ShardedModel

DEFAULT_ALPHA = 1.5  # alpha of entmax attention, if the recipe sets none
EXPLODED = 4.0  # a ranking loss that grew by this factor means a model worse than at the start
_logger = logging.getLogger(__name__)
Losses = _run.Losses
Progress = _run.Progress


@dataclass(frozen=True)
class TrainResult:
    """Result of :func:`train`.

    Attributes:
        model_dir: folder of the finished model.
        steps: optimiser steps; fewer than the recipe's if patience stopped the training.
        loss: mean loss of the last logged steps.
        seconds: wall time of this call.
        resumed_from: step from which this call resumed; 0 for a new run.
        reused: whether the folder already held the finished model of this recipe and data.
        bf16: whether the run used bf16.
        fused: whether the run used the fused head or similarity.
        first_ranking_loss: ranking loss of this call's first step, without penalties.
        ranking_loss: ranking loss of the last logged steps, without penalties.
        penalties: weighted penalties of the last logged steps; None without penalties.
        warnings: problems of the training, with remedies.
        truncated: ``{"texts", "count", "max_length"}`` for each maximum length: the number of texts
            that this call's steps read, including repetitions, and how many were truncated.
        ranks: number of processes of the last call.
        pairs: pairs of the largest step, on all ranks.
        fewest_pairs: pairs of the smallest step.
        trained_pairs: sum of the pairs of all steps; repeated pairs count again.
        negatives: negatives of each query in the largest step, on all ranks.
        fewest_negatives: negatives of each query in the smallest step.
        trained_weights: number of weights that were trained.
        weights: number of all weights.
        evaluated: description of the evaluated queries and documents; empty without evaluations.
        evaluations: ``{"step", "nDCG@10", "kept"}`` of each evaluation.
        kept_step: step of the saved model, which has the best evaluation.
    """

    model_dir: str
    steps: int
    loss: float | None
    seconds: float
    resumed_from: int
    reused: bool
    bf16: bool
    fused: bool
    first_ranking_loss: float | None = None
    ranking_loss: float | None = None
    penalties: float | None = None
    warnings: tuple[str, ...] = ()
    truncated: tuple[dict[str, int | None], ...] = ()
    ranks: int = 1
    pairs: int | None = None
    fewest_pairs: int | None = None
    trained_pairs: int | None = None
    negatives: int | None = None
    fewest_negatives: int | None = None
    trained_weights: int | None = None
    weights: int | None = None
    evaluated: str = ""
    evaluations: tuple[dict[str, Any], ...] = ()
    kept_step: int | None = None

    @property
    def exploded(self) -> bool:
        """Whether the ranking loss rose so much that the model is worse than at the start."""
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
    """Training job: one model, its training rows, and everything else that training needs.

    Attributes:
        recipe: the recipe.
        model: the model, which is trained in place.
        examples: the training rows.
        run: the run, with its checkpoints and logs.
        result: the result so far; training adds its losses and counts.
        progress: function that is called after every step, on rank 0; ``None`` on other ranks.
        world: all ranks.
        call: arguments of :func:`train` that do not change the model.
        evaluator: evaluator of sentence-transformers; ``None`` without evaluations.
        sharded: the model with parameters divided among ranks; ``None`` if each rank has all.
    """

    recipe: Recipe
    model: Model
    examples: Examples
    run: _run.TrainingRun
    result: TrainResult
    progress: Progress | None
    world: World
    call: Call
    evaluator: Any
    sharded: ShardedModel | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingSettings):
    """Configuration that :func:`train` accepts."""

    @property
    def reads_negatives(self) -> bool:
        """Whether training reads mined negatives."""
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        """The data that training reads: ``"pairs"``, ``"negatives"``, ``"scores"``."""
        return ("pairs",)

    def preparation(self, data: str) -> list[str]:
        """Return the commands that create the data in :attr:`needs` other than pairs.

        Args:
            data: name or folder of the collection.
        """
        return []

    def negatives_among(self, pairs: int) -> int:
        """Return the number of negatives of each query in a step with this many pairs."""
        return pairs - 1

    @property
    def adds_adapters(self) -> bool:
        """Whether training adds adapters to the base model, which are merged at the end."""
        return False

    def build_model(self, texts: Sequence[str]) -> Model:
        """Build the untrained model of the recipe.

        Args:
            texts: documents, from which some models compute initial weights.
        """
        raise NotImplementedError

    def examples(
        self,
        collection: Collection,
        negatives: str | Path | RowsAhead | None,
    ) -> Examples:
        """Return the training rows.

        Args:
            collection: collection with the training pairs.
            negatives: mined negatives, or their file; ``None`` without negatives.
        """
        return pair_examples(collection, "document")

    def fit(self, job: TrainingJob) -> TrainResult:
        """Train the job's model in place, and return its result with losses and warnings."""
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
    """Train a recipe on the pairs of a collection's ``"train"`` split, and save the model.

    sentence-transformers can load the model. Checkpoints are in ``<output_dir>.training``, and the
    finished model appears atomically. A call with the same recipe and data resumes an interrupted
    run from the last complete checkpoint, or returns the result of a finished run. Equal recipes,
    data and machines give equal models. ``max_steps=0`` saves the untrained model.

    Under ``torchrun`` or ``accelerate launch``, every rank makes this call, and the ranks share the
    pairs of each step. Batches, negatives and penalties are the same as in one process, except that
    short batches are filled with pairs that the epoch has already had. Rank 0 writes all files. A
    run may be resumed with another number of ranks.

    Args:
        recipe: the recipe.
        collection: collection with training pairs.
        output_dir: folder of the model.
        negatives: negatives of the training queries, mined or with teacher scores
            (:mod:`tilefold.retrieval.training_data.rows`).
        resume: whether to resume an earlier run, or to return its result; False discards its
            checkpoints.
        overwrite: whether to replace a finished model in `output_dir`.
        progress: called as ``progress(step, steps, losses)`` after every step, on rank 0; the
            :class:`tilefold.recipes.Losses` are ``None`` until the first log.
        verbose: whether libraries may log.
        hours: time limit of this call, after which a checkpoint is saved and
            :class:`OutOfTimeError` is raised.
        report_to: ``"tensorboard"`` (in ``<output_dir>.logs``), ``"wandb"`` or another integration
            of the trainer.
        command: command that is shown in the model's card, ``README.md``.

    Raises:
        TypeError: if `recipe` is not a recipe (for example a name), or `collection` is not a
            collection.
        ValueError: if data are missing (the message has the command that creates them), the
            checkpoints belong to another recipe or other data, the recipe does not read
            `negatives`, graphs are requested without a GPU, or the batches are not possible.
        FileExistsError: if `output_dir` holds something other than a model of this recipe and data.
        ImportError: if sentence-transformers is not installed, or older than 6.2; or if the
            packaged model is not installed.
        OutOfTimeError: if the time limit is reached; the same call resumes.
        TrainingError: if the loss is not finite, or if the batches ran out before the last step.
        RankError: if another rank failed or ended; checkpoints are kept.
        RuntimeError: if no known launcher started the processes.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> from tilefold.recipes import get_recipe
        >>> from tilefold.retrieval import load_collection
        >>> recipe = get_recipe("splade", base_model="masked-lm", max_steps=2, batch_size=2)
        >>> result = train(recipe, load_collection("bank"), "new-model")
        >>> result.steps
        2
        >>> model = SparseEncoder("new-model", device="cpu")  # a stock model
    """
    _check_arguments(recipe, collection, negatives, hours, report_to)
    _check_launcher()
    check_sentence_transformers()
    with join_ranks(training=True):
        call = Call(resume, overwrite, verbose, hours, report_to, command)
        return _train_as_rank(recipe, collection, Path(output_dir), negatives, call, progress)


def _check_arguments(
    recipe: Any,
    collection: object,
    negatives: object,
    hours: float | None,
    report_to: str,
) -> None:
    """Check the arguments of :func:`train` before anything is read or written.

    Args:
        recipe: the recipe, which must be an instance of :class:`Recipe`.
        collection: the collection, which must be a ``Collection``.
        negatives: mined negatives, or their file; ``None`` without negatives.
        hours: time limit of the call; ``None`` for no limit.
        report_to: ``"none"``, ``"all"`` or an integration of transformers, such as ``"wandb"``.

    Raises:
        TypeError: if the recipe or the collection has another type.
        ValueError: if the recipe reads no negatives, or a value is out of range.
    """
    if not isinstance(recipe, Recipe):
        remedy = f"get_recipe({recipe!r})" if isinstance(recipe, str) else "get_recipe(name)"
        raise TypeError(
            f"recipe: expected a recipe, got {type(recipe).__name__}; pass {remedy}.",
        )
    check_instance("collection", collection, Collection, "load_collection(path)")
    if negatives is not None and not recipe.reads_negatives:
        name = getattr(recipe, "name", type(recipe).__name__)
        remedy = "omit them"
        if hasattr(recipe, "negatives"):
            remedy += ", or set its field negatives to at least 1"
        raise ArgumentError(
            "negatives",
            f"the recipe {name!r} does not read mined negatives; {remedy}.",
        )
    if hours is not None and not hours > 0:
        raise ArgumentError("hours", f"must be above 0, or None for no limit, got {hours}.")
    if report_to not in ("none", "all"):
        from transformers.integrations import INTEGRATION_TO_CALLBACK

        if report_to not in INTEGRATION_TO_CALLBACK:
            names = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ArgumentError(
                "report_to", f"must be none, all or one of {names}, got {report_to!r}."
            )


def _check_launcher() -> None:
    """Raise an error if there are several processes that cannot form a process group.

    They would all train the same model, and write to the same folder.

    Raises:
        RuntimeError: if ``WORLD_SIZE`` is above 1, but the process has neither a process group nor
            the environment variables from which one is created.
    """
    import torch.distributed as dist

    n_processes = int(os.environ.get("WORLD_SIZE") or 1)
    can_create_group = has_other_ranks()  # a launcher has set RANK and other variables
    has_group = dist.is_available() and dist.is_initialized()
    if n_processes > 1 and not can_create_group and not has_group:
        raise RuntimeError(
            f"several processes must come from a known launcher, got WORLD_SIZE={n_processes}. "
            "Start the program with torchrun, accelerate launch or tilefold train --devices, or "
            "unset WORLD_SIZE.",
        )


def _train_as_rank(
    recipe: Recipe,
    collection: Collection,
    output_dir: Path,
    negatives: str | Path | RowsAhead | None,
    call: Call,
    progress: Progress | None,
) -> TrainResult:
    """Train a recipe on one of several ranks, with a process group by which they communicate.

    No variable outside of this function refers to the group, so that :func:`join_ranks` can end
    the group's threads afterwards.

    Args:
        recipe: the recipe.
        collection: collection with the training pairs.
        output_dir: folder of the model.
        negatives: mined negatives, or their file; ``None`` without negatives.
        call: arguments of :func:`train` that do not change the model.
        progress: function that rank 0 calls after every step; ``None`` for no function.
    """
    world = World()
    try:
        return _train(
            recipe,
            collection,
            output_dir,
            negatives,
            world,
            call,
            progress if world.rank == 0 else None,
        )
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
    """Train a recipe as one of several ranks.

    Args:
        recipe: the recipe.
        collection: collection with the training pairs.
        output_dir: folder of the model.
        negatives: mined negatives, or their file; ``None`` without negatives.
        world: all ranks.
        call: arguments of :func:`train` that do not change the model.
        progress: function that is called after every step; ``None`` for no function.

    Returns:
        The result, which is a saved one if the run has been finished before.
    """
    started = time.monotonic()
    examples = Examples({}, 0)
    batches_warning = ""
    if recipe.max_steps != 0:
        examples = recipe.examples(collection, negatives)
        batches_warning = _check_batches(recipe, examples, world)
    evaluation = create_evaluation(recipe, collection)
    if recipe.max_steps != 0:
        data_digest = examples.digest() + evaluation.digest
    else:
        data_digest = texts_digest(collection.content())
    bf16 = supports_bf16() if recipe.bf16 is None else recipe.bf16
    run = _run.TrainingRun(output_dir, {**recipe.to_dict(), "bf16": bf16}, data_digest)
    _check_same_run(run, world)
    saved_result = world.call_on_first(
        lambda: run.finished_result(overwrite=call.overwrite, resume=call.resume)
    )
    if saved_result is not None:
        return _reused_result(saved_result, output_dir, time.monotonic() - started)
    check_graphs(recipe.graphs)
    fill_batches = world.size > 1 or recipe.fill_batches
    run.resume_point = world.call_on_first(
        lambda: run.lock_and_resume(resume=call.resume, fill_batches=fill_batches),
    )
    with quiet_libraries(call.verbose):
        model, notes = _prepare_model(recipe, collection, run, world, bf16=bf16)
        warnings = [*examples.notes]
        if run.resume_point.fill_batches and batches_warning:
            # Without filling, the result will have a warning about the steps that were short.
            warnings.append(batches_warning)
        warnings += notes
        job = TrainingJob(
            recipe=recipe,
            model=model,
            examples=examples,
            run=run,
            result=TrainResult(
                model_dir=str(output_dir),
                steps=total_steps(recipe, examples.pairs),
                loss=None,
                seconds=0.0,
                resumed_from=run.resume_point.step,
                reused=False,
                bf16=bf16,
                fused=recipe.fused,
                warnings=tuple(warnings),
                ranks=world.size,
                evaluated=evaluation.description,
            ),
            progress=progress,
            world=world,
            call=call,
            evaluator=evaluation.evaluator,
        )
        return _fit_and_save(job, collection.name, started)


def _fit_and_save(job: TrainingJob, collection_name: str, started: float) -> TrainResult:
    """Train the model of a job, unless its recipe has no steps, and save it with its model card.

    Args:
        job: the training job, with the result before the first step.
        collection_name: name of the collection, for the model card.
        started: time at which the training was called, from ``time.monotonic()``.

    Returns:
        The final result.
    """
    run = job.run
    with naming_full_disk(run.work_dir), job.world.explaining_lost_ranks():
        result = job.result if job.recipe.max_steps == 0 else job.recipe.fit(job)
        result = replace(result, seconds=time.monotonic() - started)
        card = describe(
            job.recipe,
            result,
            collection_name,
            job.examples.pairs,
            run.history,
            job.call.command,
        )
        job.world.call_on_first(lambda: run.finish(job.model, asdict(result), card))
    return result


def _prepare_model(
    recipe: Recipe,
    collection: Collection,
    run: _run.TrainingRun,
    world: World,
    *,
    bf16: bool,
) -> tuple[Model, list[str]]:
    """Build the untrained model of a recipe, unfreeze its adapters, and convert it to fp32.

    Args:
        recipe: the recipe.
        collection: collection whose documents some models compute initial weights from.
        run: the run, which is closed if an error is raised.
        world: all ranks.
        bf16: whether the run computes in bf16 (autocast).

    Returns:
        The model, and notes about it for the user.

    Raises:
        ValueError: if the recipe trains, and all weights of the model are frozen.
    """
    adapters: tuple[str, ...] = ()
    try:
        model = _build_model(recipe, collection)
        if recipe.max_steps != 0:
            adapters = unfreeze_adapters(model)
            check_trainable(model)
            has_adapters = recipe.adds_adapters or bool(adapters)
            use_fp32_weights(model, frozen=not (bf16 and has_adapters))
    except BaseException:  # also Ctrl-C, after which the folder must not stay locked
        if world.rank == 0:
            _close_unbegun(run)
        raise
    notes = [_truncation_note(recipe, model), _adapters_note(recipe, adapters)]
    return model, [note for note in notes if note]


def use_fp32_weights(model: Model, *, frozen: bool) -> None:
    """Convert weights in 16 bits to fp32, in place.

    A step of the optimiser is often smaller than the distance of two numbers in 16 bits, so that
    the weight would never change. Layers still compute in bf16, with autocast.

    Args:
        model: the model. Checkpoints of language models are usually in bf16.
        frozen: whether frozen weights are converted, too.
    """
    for parameter in model.parameters():
        if parameter.dtype.itemsize == 2 and (frozen or parameter.requires_grad):
            parameter.data = parameter.data.float()


def _close_unbegun(run: _run.TrainingRun) -> None:
    """Unlock the work folder of a run whose training did not begin, and remove it if it is new.

    A failure is only logged, because another error is being raised.
    """
    try:
        run.close()
    except OSError as close_error:
        _logger.warning("%s could not be removed: %s", run.work_dir, close_error)


def _check_batches(recipe: Recipe, examples: Examples, world: World) -> str:
    """Check that the batches of a recipe are possible, and log a warning about short batches.

    Args:
        recipe: the recipe, with the batch size.
        examples: the training rows.
        world: all ranks, which share each batch. Rank 0 logs the warning.

    Returns:
        The warning; empty if there is none.

    Raises:
        ValueError: if the ranks cannot share a batch evenly, or if full batches are required and
            impossible.
    """
    warning = check_batches(recipe, examples, ranks=world.size)
    if warning and world.rank == 0:
        _logger.warning("%s", warning)  # the result repeats it, but after hours of training
    return warning


def _check_same_run(run: _run.TrainingRun, world: World) -> None:
    """Raise a ``ValueError`` if ranks were called with different recipes or data."""
    if any(settings != run.settings for settings in world.gather(run.settings)):
        raise ValueError(
            "recipe and data must be the same on all ranks, but they differ; make the same call on "
            "each rank.",
        )


def _build_model(recipe: Recipe, collection: Collection) -> Model:
    """Build the untrained model of a recipe, with the recipe's attention.

    Args:
        recipe: the recipe.
        collection: collection whose documents some models compute initial weights from.
    """
    from tilefold.integrations.transformers import register

    register()  # lets transformers load models with entmax attention
    # Rank 0 downloads the model before the other ranks read it. Every rank must be able to save a
    # temporary model, which transformers does on rank 0 only if it sees the process group.
    with first_rank_first(), as_single_process():
        model = recipe.build_model(document_texts(collection))
    _use_attention(model, recipe)
    return model


def _reused_result(saved: dict[str, Any], model_dir: Path, seconds: float) -> TrainResult:
    """Return the saved result of a finished run, for a call that did not train."""
    fields = {**saved, "model_dir": str(model_dir), "seconds": seconds, "reused": True}
    for name in ("warnings", "truncated", "evaluations"):
        fields[name] = tuple(saved.get(name, ()))
    return TrainResult(**fields)


def _use_attention(model: Model, recipe: TrainingSettings) -> None:
    """Replace the attention of a model by entmax or softmax attention, in place.

    Args:
        model: the model, which may have been saved with entmax attention.
        recipe: the recipe. Its ``attention`` is ``"entmax"``, ``"softmax"``, or ``None`` to keep
            the attention of the model.

    Raises:
        ValueError: if the model's attention cannot be replaced.
    """
    if recipe.attention is None:
        return
    from tilefold.integrations.transformers import runs_entmax, use_entmax, use_softmax

    if recipe.attention == "entmax":
        use_entmax(model, DEFAULT_ALPHA if recipe.alpha is None else recipe.alpha)
    elif runs_entmax(model):  # other models have softmax attention already
        use_softmax(model)


def _adapters_note(recipe: Recipe, adapters: Sequence[str]) -> str:
    """Return a note on adapters of the base model; empty without adapters.

    Args:
        recipe: the recipe.
        adapters: names of the adapters of the base model.
    """
    if not adapters or recipe.adds_adapters:
        return ""
    return (
        f"base_model has adapters ({', '.join(adapters)}): they are trained on and saved as "
        "adapters, and the weights below them are not trained. Merge them first to train all "
        "weights (tilefold.recipes.adapters.merge_adapters)."
    )


def _truncation_note(recipe: TrainingSettings, model: Model) -> str:
    """Return a note if the model reads fewer tokens than the recipe's limit; empty otherwise.

    Args:
        recipe: the recipe, with its maximum length.
        model: the model.
    """
    limit = getattr(model[0], "document_length", None) or model.max_seq_length
    if not isinstance(limit, int) or limit >= recipe.max_length:
        return ""
    return (
        f"the model reads at most {limit} tokens of a text, fewer than max_length "
        f"({recipe.max_length})."
    )


def check_graphs(graphs: bool) -> None:
    """Raise a ``ValueError`` for graphs without a CUDA GPU."""
    import torch

    if graphs and (torch.version.cuda is None or not torch.cuda.is_available()):
        raise ArgumentError(
            "graphs",
            "must be False without a CUDA GPU, got True; leave graphs out on this machine.",
        )
