"""The ``train`` of every recipe: pairs, one resumable run, a stock model."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tilefold._files import naming_full_disk
from tilefold._ranks import each_for_itself, first_rank_first, joined, several
from tilefold._typing import Model, Module
from tilefold.recipes import _run
from tilefold.recipes._settings import TrainingSettings
from tilefold.recipes._world import World
from tilefold.recipes.loading import quiet_libraries, register_entmax, supports_bf16
from tilefold.retrieval.provenance import texts_digest
from tilefold.retrieval.truncation import cut_texts

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tilefold.retrieval.collection import Collection

EXPLODED = 4.0
_logger = logging.getLogger(__name__)
Losses = _run.Losses
Progress = _run.Progress


@dataclass(frozen=True)
class TrainResult:
    """The result of ``train``."""

    model_dir: str  # of the finished stock model
    steps: int  # of the optimiser
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
    #: ``{"texts", "count", "max_length"}`` for each length: texts that this call's steps read, repeated ones too, and
    #: how many of them were cut there
    truncated: tuple[dict[str, int | None], ...] = ()
    ranks: int = 1  # processes that the last call trained with, each with its share of every step
    pairs: int | None = None  # of a step, on all ranks together
    negatives: int | None = None  # documents that a step compares each query with, beside its own; on all ranks too

    @property
    def exploded(self) -> bool:
        """Whether the ranking loss rose several times over: the model has lost what it knew."""
        if self.ranking_loss is None or self.first_ranking_loss is None:
            return False
        return self.ranking_loss > EXPLODED * max(self.first_ranking_loss, 1.0)


@dataclass(frozen=True)
class Examples:
    """Rows that a trainer reads."""

    columns: dict[str, list[Any]]  # in the order that the loss reads them: texts, and teacher scores as "label"
    pairs: int  # of one epoch; there may be several rows, with other negatives, for each
    note: str = ""  # what the user should know of them
    documents: str = ""  # digest of the collection's documents, for a model that is fitted on them


@dataclass(frozen=True)
class TrainingJob:
    """The model, which is trained in place, its data, and where checkpoints go."""

    recipe: Recipe
    model: Model
    examples: Examples
    run: _run.TrainingRun
    result: TrainResult  # but for what the trainer tells
    progress: Progress | None
    verbose: bool
    world: World


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingSettings):
    """A configuration that :func:`train` takes."""

    reads_negatives: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The data that training takes: ``"pairs"``, ``"negatives"``, ``"scores"``."""
        return ("pairs",)

    def preparation(self, data: str) -> list[str]:
        """Commands that make what :attr:`needs` has beside pairs of a collection, offline; the last writes the file."""
        return []

    @property
    def step_negatives(self) -> int:
        """Documents that a step compares each query with, beside its own."""
        return self.batch_size - 1

    def start(self, texts: list[str]) -> Model:
        """The untrained model; `texts` are the documents of the collection."""
        raise NotImplementedError

    def examples(self, collection: Collection, negatives: str | Path | None) -> Examples:
        """The rows that training reads."""
        return pair_examples(collection)

    def fit(self, job: TrainingJob) -> TrainResult:
        """Train the job's model in place; its result with losses and warnings."""
        raise NotImplementedError


def train(
    recipe: Recipe,
    collection: Collection,
    output_dir: str | Path,
    *,
    negatives: str | Path | None = None,
    resume: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
    verbose: bool = False,
) -> TrainResult:
    """Train any recipe on the pairs of the collection's ``"train"`` split, and save a stock model in `output_dir`.

    Checkpoints lie in ``<output_dir>.training``; the finished model is moved into place atomically. The same call
    (recipe and data) goes on from the last complete checkpoint of an interrupted run, and returns a finished one
    unchanged. Equal recipes, data and machines give equal models; ``max_steps=0`` saves the model as it starts.

    Under ``torchrun`` or ``accelerate launch``, every rank makes this call. The ranks share the pairs of each step:
    batches, negatives and penalties are those of one process with the same recipe, but for the short last batch of an
    epoch, which several ranks leave out. The first rank writes; another number of ranks may resume.

    Args:
        negatives: of the training queries, mined or with teacher scores (:mod:`tilefold.retrieval.training_rows`).
        resume: go on with, or return, an earlier run; False discards its checkpoints.
        overwrite: replace a finished model in `output_dir`.
        progress: called as ``progress(step, steps, losses)`` after every step, on the first rank; the
            :class:`tilefold.recipes.Losses` are ``None`` until they are known.
        verbose: let the libraries log.

    Raises:
        ValueError: no training pairs, missing data (the message has the command that makes them), checkpoints of
            another recipe or data, `negatives` for a recipe that reads none, graphs without a GPU, or a batch
            that the ranks cannot share.
        FileExistsError: `output_dir` holds something other than a model of this recipe and data.
        MissingPackageError: sentence-transformers or the packaged model is not installed.
        RankError: another rank failed or ended; its checkpoints are kept.
        RuntimeError: the environment names several processes, and no launcher that is known started them.
    """
    if negatives is not None and not recipe.reads_negatives:
        raise ValueError(f"negatives must be left out for a {type(recipe).__name__}, which reads none.")
    check_launcher()
    with joined(training=True):
        world = World()
        try:
            if world.rank:
                progress = None
            call: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "progress": progress, "verbose": verbose}
            return _train(recipe, collection, Path(output_dir), negatives, world, **call)
        finally:
            world.close()


def _train(
    recipe: Recipe,
    collection: Collection,
    output_dir: Path,
    negatives: str | Path | None,
    world: World,
    *,
    resume: bool,
    overwrite: bool,
    progress: Progress | None,
    verbose: bool,
) -> TrainResult:
    started = time.monotonic()
    untrained = recipe.max_steps == 0
    made = Examples({}, 0) if untrained else recipe.examples(collection, negatives)
    if not untrained:
        _check_share(recipe, made, world.size)
    read = _run.digest(zip(*made.columns.values(), strict=True)) + made.documents
    data = texts_digest(collection.contents()) if untrained else read
    bf16 = supports_bf16() if recipe.bf16 is None else recipe.bf16
    run = _run.TrainingRun(output_dir, recipe.to_dict() | {"bf16": bf16}, data)
    if any(settings != run.settings for settings in world.all(run.settings)):
        raise ValueError("recipe and data must be the same on all ranks, got others; give each rank the same call.")
    finished = world.first(lambda: run.finished(overwrite=overwrite, resume=resume))
    if finished is not None:
        now = {"seconds": time.monotonic() - started, "reused": True, "model_dir": str(output_dir)}
        lists = {name: tuple(finished.get(name, ())) for name in ("warnings", "truncated")}
        return TrainResult(**finished | now | lists)
    check_graphs(recipe.graphs)
    run.checkpoint, run.resumed_from, run.whole_batches = world.first(lambda: run.open(resume=resume, ranks=world.size))
    with quiet_libraries(verbose):
        register_entmax()
        try:
            with first_rank_first(), each_for_itself():  # what it fetches, the others find
                model = recipe.start(list(collection.contents().values()))
            _use_attention(model, recipe)
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
            warnings=tuple(filter(None, (made.note, _lowered(recipe, model)))),
            ranks=world.size,
            pairs=None if untrained else recipe.batch_size,
            negatives=None if untrained else recipe.step_negatives,
        )
        with naming_full_disk(run.work_dir), world.telling():
            if not untrained:
                result = recipe.fit(TrainingJob(recipe, model, made, run, result, progress, verbose, world))
            result = replace(result, seconds=time.monotonic() - started)
            world.first(lambda: run.finish(model, asdict(result)))
    return result


def _check_share(recipe: TrainingSettings, examples: Examples, ranks: int) -> None:
    """Raise a ``ValueError`` for steps that so many ranks cannot share evenly."""
    if recipe.batch_size % ranks:
        remedy = f"take {ranks * max(1, recipe.batch_size // ranks)}, or another number of ranks."
        raise ValueError(f"batch_size must be a multiple of the {ranks} ranks, got {recipe.batch_size}; {remedy}")
    rows = len(next(iter(examples.columns.values()), ()))
    if ranks > 1 and rows and rows < recipe.batch_size:
        why = "and several ranks train on whole batches alone"
        raise ValueError(f"batch_size must be at most the {rows} rows of the data, {why}, got {recipe.batch_size}.")


def _use_attention(model: Model, recipe: TrainingSettings) -> None:
    """Give `model` the attention of a recipe; a ``ValueError`` for one whose attention cannot be chosen."""
    if recipe.attention is None:
        return
    from tilefold.integrations.transformers import runs_entmax, use_entmax, use_softmax

    if recipe.attention == "entmax":
        use_entmax(model, 1.5 if recipe.alpha is None else recipe.alpha)
    elif runs_entmax(model):
        use_softmax(model)


def _lowered(recipe: TrainingSettings, model: Model) -> str:
    """A note on a model that reads fewer tokens than the recipe asks for; empty for others."""
    limit = getattr(model[0], "document_length", None) or model.max_seq_length
    if not isinstance(limit, int) or limit >= recipe.max_length:
        return ""
    return f"the model reads at most {limit} tokens of a text, fewer than max_length ({recipe.max_length})."


def run_trainer(
    job: TrainingJob,
    trainer_class: Callable[..., Trainer],
    arguments_class: Callable[..., TrainingArguments],
    loss: Module,
    callbacks: Sequence[TrainerCallback] = (),
    batch_sampler: object = "no_duplicates",
    **settings: object,
) -> TrainResult:
    """Run a stock trainer over the job's model in place; `settings` are further arguments of the trainer."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback

    from tilefold.integrations.transformers import AlphaSchedule, one_gpu
    from tilefold.recipes._watch import NAMES, Watcher

    say_unused_gpus()
    recipe, read, world = job.recipe, job.examples.columns, job.world
    card = job.model.model_card_data
    card.widget = card.widget or [{"text": read["query"][0]}]  # else the card draws examples with a progress bar
    watcher = Watcher(job.progress, job.run, recipe.save_minutes, world)
    annealed = [AlphaSchedule(recipe.alpha or 1.5, until=float(recipe.anneal_alpha))] if recipe.anneal_alpha else []
    columns = {name: values if name == "label" else cut_texts(job.model, values) for name, values in read.items()}
    trainer = trainer_class(
        model=job.model,
        args=one_gpu(arguments_class)(**_settings(job), batch_sampler=batch_sampler, **settings),
        train_dataset=Dataset.from_dict(columns),
        loss=loss,
        callbacks=[*callbacks, *annealed, watcher],
    )
    trainer.get_train_dataloader = functools.partial(_batches_by_epoch, trainer.get_train_dataloader)
    collate(trainer, recipe.graphs)
    if not job.verbose:
        trainer.remove_callback(PrinterCallback)
    with watcher.heeding_interrupts():
        trainer.train(resume_from_checkpoint=str(job.run.checkpoint) if job.run.checkpoint else None)
    logged = (row for row in trainer.state.log_history if "loss" in row)
    job.run.history = [{NAMES.get(name, name): value for name, value in row.items()} for row in logged]
    warnings = job.result.warnings
    cuts = [found for rank in world.all(list(trainer.data_collator.cut.seen.values())) for found in rank]
    if recipe.graphs and trainer.model[0].forward.graphs.failed:
        warnings += ("the training ran without CUDA graphs, which could not be captured; leave --graphs out.",)
    return replace(
        job.result,
        loss=None if watcher.losses is None else watcher.losses.loss,
        first_ranking_loss=watcher.first_ranking_loss,
        ranking_loss=watcher.ranking_loss,
        penalties=None if watcher.losses is None else watcher.losses.penalties,
        warnings=warnings,
        truncated=tuple(_summed(cuts)),
    )


def _summed(cuts: list[Any]) -> Iterator[dict[str, int | None]]:
    """The texts that the ranks read, and those that they cut, for each length."""
    for length in dict.fromkeys(found.max_length for found in cuts):
        same = [found for found in cuts if found.max_length == length]
        texts, count = sum(found.texts for found in same), sum(found.count for found in same)
        yield {"texts": texts, "count": count, "max_length": length}


def _batches_by_epoch(make: Callable[[], Any]) -> Any:
    """A loader of a trainer, whose sampler hears of every epoch, where a rank takes a part of each batch, too."""
    loader = make()
    inner: Any = getattr(loader.batch_sampler, "batch_sampler", None)
    if hasattr(inner, "set_epoch") and not hasattr(loader.batch_sampler, "set_epoch"):
        loader.batch_sampler.set_epoch = inner.set_epoch
    return loader


def _settings(job: TrainingJob) -> dict[str, object]:
    """The trainer's arguments, without the sampler."""
    import torch

    recipe, steps, on_gpu = job.recipe, job.result.steps, torch.cuda.is_available()
    shared = {"accelerator_config": {"split_batches": True}, "ddp_backend": None if on_gpu else "gloo"}
    return {
        **(shared if job.world.size > 1 else {}),
        "dataloader_drop_last": job.run.whole_batches,
        "output_dir": str(job.run.work_dir),
        "max_steps": steps,
        "per_device_train_batch_size": recipe.batch_size,  # of all ranks, if there are several
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": int(recipe.warmup_ratio * steps),
        "weight_decay": 0.0,
        "bf16": job.result.bf16,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "save_strategy": "steps",
        "save_steps": recipe.save_steps,
        "save_total_limit": 2,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "logging_steps": max(1, min(10, steps)),
        "report_to": "none",
        "disable_tqdm": not job.verbose,
        "seed": recipe.seed,
    }


def training_pairs(collection: Collection) -> list[tuple[str, str]]:
    """Texts of the (query, relevant document) pairs of the ``"train"`` split."""
    named = collection.pairs("train") if "train" in collection.qrels else []
    if not named:
        got = f"(splits: {sorted(collection.qrels) or 'none'})"
        remedy = "add qrels/train.tsv with at least one positive judgement."
        raise ValueError(f"collection {collection.name!r} has no pairs in its 'train' split {got}; {remedy}")
    if len(named) < 2:
        why = "which no other document is a negative for; give at least 2 positive judgements."
        raise ValueError(f"collection {collection.name!r} has a single pair in its 'train' split, {why}")
    return [(collection.queries[query], collection.documents[doc].contents) for query, doc in named]


def pair_examples(collection: Collection, document: str = "document") -> Examples:
    """The columns ``"query"`` and `document` of the pairs."""
    queries, documents = zip(*training_pairs(collection), strict=True)
    return Examples({"query": list(queries), document: list(documents)}, len(queries))


def total_steps(recipe: TrainingSettings, n_pairs: int) -> int:
    """Optimiser steps of a recipe over `n_pairs` pairs."""
    if recipe.max_steps is not None:
        return recipe.max_steps
    return max(1, math.ceil(recipe.epochs * math.ceil(n_pairs / recipe.batch_size)))


def check_graphs(graphs: bool) -> None:
    """Raise a ``ValueError`` where graphs are asked for and there is no GPU of CUDA."""
    import torch

    if graphs and (torch.version.cuda is None or not torch.cuda.is_available()):
        raise ValueError("graphs must be False without a GPU of CUDA, got True; leave --graphs out on this machine.")


def collate(trainer: Trainer, graphs: bool) -> None:
    """Make the trainer's batches ahead, and with `graphs` repeat the launches of its encoder."""
    from tilefold.integrations.sentence_transformers import collate_ahead

    try:
        collate_ahead(trainer, graphs=graphs)
    except ValueError as error:
        if not graphs:
            raise
        remedy = "whose batches stay padded, got True; leave --graphs out."
        raise ValueError(f"graphs must be False for a model of several encoders, or of one {remedy}") from error


def check_launcher() -> None:
    """Raise a ``RuntimeError`` where the environment names several processes that cannot meet each other."""
    import torch.distributed as dist

    processes = int(os.environ.get("WORLD_SIZE") or 1)
    if processes > 1 and not several() and not (dist.is_available() and dist.is_initialized()):
        remedy = "Start it with torchrun, accelerate launch or tilefold train --devices, or unset WORLD_SIZE."
        raise RuntimeError(f"several processes must come from a known launcher, got WORLD_SIZE={processes}. {remedy}")


def say_unused_gpus() -> None:
    """Log one line if more GPUs are visible than the one that a recipe uses."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus > 1 and not several():
        _logger.warning(
            "%d GPUs are visible and one is used, cuda:0. For all of them: tilefold train --devices all, or "
            "torchrun --nproc-per-node %d SCRIPT",
            gpus,
            gpus,
        )
