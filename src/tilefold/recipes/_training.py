"""The ``train`` of every recipe: pairs, one resumable run, a stock model."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tilefold._files import naming_full_disk
from tilefold._typing import Model, Module
from tilefold.recipes import _run
from tilefold.recipes._settings import TrainingSettings
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

    Args:
        negatives: of the training queries, mined or with teacher scores (:mod:`tilefold.retrieval.training_rows`).
        resume: go on with, or return, an earlier run; False discards its checkpoints.
        overwrite: replace a finished model in `output_dir`.
        progress: called as ``progress(step, steps, losses)`` after every step; the :class:`tilefold.recipes.Losses`
            are ``None`` until they are known.
        verbose: let the libraries log.

    Raises:
        ValueError: no training pairs, missing data (the message has the command that makes them), checkpoints of
            another recipe or data, `negatives` for a recipe that reads none, or graphs without a GPU.
        FileExistsError: `output_dir` holds something other than a model of this recipe and data.
        MissingPackageError: sentence-transformers or the packaged model is not installed.
        RuntimeError: this is one of several processes of a launcher.
    """
    if negatives is not None and not recipe.reads_negatives:
        raise ValueError(f"negatives must be left out for a {type(recipe).__name__}, which reads none.")
    check_one_process()
    started = time.monotonic()
    untrained = recipe.max_steps == 0
    made = Examples({}, 0) if untrained else recipe.examples(collection, negatives)
    read = _run.digest(zip(*made.columns.values(), strict=True)) + made.documents
    data = texts_digest(collection.contents()) if untrained else read
    bf16 = supports_bf16() if recipe.bf16 is None else recipe.bf16
    run = _run.TrainingRun(Path(output_dir), recipe.to_dict() | {"bf16": bf16}, data)
    finished = run.finished(overwrite=overwrite, resume=resume)
    if finished is not None:
        now = {"seconds": time.monotonic() - started, "reused": True, "model_dir": str(output_dir)}
        lists = {name: tuple(finished.get(name, ())) for name in ("warnings", "truncated")}
        return TrainResult(**finished | now | lists)
    check_graphs(recipe.graphs)
    run.open(resume=resume)
    with quiet_libraries(verbose):
        register_entmax()
        try:
            model = recipe.start(list(collection.contents().values()))
            _use_attention(model, recipe)
        except Exception:
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
        )
        with naming_full_disk(run.work_dir):
            if not untrained:
                result = recipe.fit(TrainingJob(recipe, model, made, run, result, progress, verbose))
            result = replace(result, seconds=time.monotonic() - started)
            run.finish(model, asdict(result))
    return result


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
    recipe, read = job.recipe, job.examples.columns
    card = job.model.model_card_data
    card.widget = card.widget or [{"text": read["query"][0]}]  # else the card draws examples with a progress bar
    watcher = Watcher(job.progress, job.run, recipe.save_minutes)
    annealed = [AlphaSchedule(recipe.alpha or 1.5, until=float(recipe.anneal_alpha))] if recipe.anneal_alpha else []
    columns = {name: values if name == "label" else cut_texts(job.model, values) for name, values in read.items()}
    trainer = trainer_class(
        model=job.model,
        args=one_gpu(arguments_class)(**_settings(job), batch_sampler=batch_sampler, **settings),
        train_dataset=Dataset.from_dict(columns),
        loss=loss,
        callbacks=[*callbacks, *annealed, watcher],
    )
    collate(trainer, recipe.graphs)
    if not job.verbose:
        trainer.remove_callback(PrinterCallback)
    with watcher.heeding_interrupts():
        trainer.train(resume_from_checkpoint=str(job.run.checkpoint) if job.run.checkpoint else None)
    logged = (row for row in trainer.state.log_history if "loss" in row)
    job.run.history = [{NAMES.get(name, name): value for name, value in row.items()} for row in logged]
    warnings = job.result.warnings
    if recipe.graphs and trainer.model[0].forward.graphs.failed:
        warnings += ("the training ran without CUDA graphs, which could not be captured; leave --graphs out.",)
    return replace(
        job.result,
        loss=None if watcher.losses is None else watcher.losses.loss,
        first_ranking_loss=watcher.first_ranking_loss,
        ranking_loss=watcher.ranking_loss,
        penalties=None if watcher.losses is None else watcher.losses.penalties,
        warnings=warnings,
        truncated=tuple(
            {"texts": found.texts, "count": found.count, "max_length": found.max_length}
            for found in trainer.data_collator.cut.seen.values()
        ),
    )


def _settings(job: TrainingJob) -> dict[str, object]:
    """The trainer's arguments, without the sampler."""
    import torch

    recipe, steps, on_gpu = job.recipe, job.result.steps, torch.cuda.is_available()
    return {
        "output_dir": str(job.run.work_dir),
        "max_steps": steps,
        "per_device_train_batch_size": recipe.batch_size,
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


def check_one_process() -> None:
    """Raise a ``RuntimeError`` in one of several processes of a launcher, which would share a run and its folder."""
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    if processes > 1:
        remedy = "For several GPUs, write it with accelerate(model) and a stock trainer, as docs/scale-out.md shows."
        got = f"WORLD_SIZE={processes}; start this without torchrun or accelerate launch"
        raise RuntimeError(f"recipes train in one process, got {got}. {remedy}")


def say_unused_gpus() -> None:
    """Log one line if more GPUs are visible than the one that a recipe uses."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus > 1:
        _logger.warning(
            "%d GPUs are visible and one is used, cuda:0: recipes train in one process. For all of them, write the "
            "training with accelerate(model) and a trainer of sentence-transformers (docs/scale-out.md), and start it "
            "with: torchrun --nproc-per-node %d SCRIPT",
            gpus,
            gpus,
        )
