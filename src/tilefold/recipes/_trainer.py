"""The sentence-transformers trainer of a training run: its arguments, batches and callbacks."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilefold._internal.files import read_json
from tilefold._internal.typing import Module
from tilefold.distributed.ranks import has_other_ranks
from tilefold.distributed.world import World
from tilefold.recipes._rows import BalancedBatches, Column, Reader
from tilefold.recipes._run import COMPLETE_FILE, NDCG, TrainingError, TrainingRun
from tilefold.recipes._settings import TrainingSettings
from tilefold.recipes._sharding import ShardedModel
from tilefold.recipes._steps import PairCounts, expected_pairs, step_warnings
from tilefold.recipes._training import DEFAULT_ALPHA, TrainingJob, TrainResult
from tilefold.recipes.adapters import count_weights
from tilefold.retrieval.encoding.truncation import Tally

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tilefold.recipes._batches import TrainingBatches
    from tilefold.recipes._watch import Watcher

GRADIENT_BUCKETS = 16  # buckets of DDP with CUDA graphs, which return many gradients at once
BYTES_PER_GRADIENT = 4  # fp32
NEVER = 10**9  # steps

_logger = logging.getLogger(__name__)


class _GraphBuckets:
    """Lets CUDA graphs write their gradients directly into DDP's buckets.

    A bucket is one buffer with the gradients of several parameters.

    Args:
        graphs: the :class:`StepGraphs` of the encoder.
    """

    def __init__(self, graphs: Any) -> None:
        self._graphs = graphs
        self._addresses: dict[int, int] = {}  # index of a bucket -> address of its buffer

    def register(self, bucket: Any) -> None:
        """Pass the gradients of a bucket to the graphs, unless they already write into it.

        DDP rebuilds its buckets after the first step, so the addresses of their buffers change.

        Args:
            bucket: DDP's ``GradBucket``.
        """
        parameters = bucket.parameters()
        address = bucket.buffer().data_ptr()
        has_moved = self._addresses.get(bucket.index()) != address
        is_unknown = id(parameters[0]) not in self._graphs.bucket_gradients
        if not has_moved and not is_unknown:
            return
        self._addresses[bucket.index()] = address
        bucket_gradients = dict(self._graphs.bucket_gradients)
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            bucket_gradients[id(parameter)] = gradient
        self._graphs.use_bucket_gradients(bucket_gradients)


# This communication hook has no annotations, because DDP rejects annotations that are strings.
def _average_bucket(graph_buckets, bucket):  # type: ignore[no-untyped-def]
    """Average the gradients of a bucket over all ranks.

    Args:
        graph_buckets: the :class:`_GraphBuckets` of CUDA graphs, which learn of new buckets;
            ``None`` without graphs.
        bucket: DDP's ``GradBucket``: one buffer with the gradients of several parameters.

    Returns:
        A future of the averaged buffer.
    """
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    if graph_buckets is not None:
        graph_buckets.register(bucket)
    buffer = bucket.buffer()
    group: Any = dist.group.WORLD
    has_nccl = buffer.is_cuda and "nccl" in dist.get_backend_config(group)
    if not has_nccl:  # other backends cannot average
        return allreduce_hook(group, bucket)
    work = dist.all_reduce(buffer, dist.ReduceOp.AVG, group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _ddp_options(graphs: Any, n_weights: int) -> Any:
    """Create the options of DDP, with a hook that averages buckets of gradients.

    Args:
        graphs: CUDA graphs of the encoder, which write their gradients into the buckets; or
            ``None``.
        n_weights: number of fp32 weights, which determines the size of a bucket.

    Returns:
        A handler for ``Accelerator.ddp_handler``.
    """
    from accelerate import DistributedDataParallelKwargs

    class BucketOptions(DistributedDataParallelKwargs):
        """DDP's options, and what changes in the wrapped model."""

        def register_comm_hook(self, model: Any) -> None:
            """Register the hook on a DDP model, and turn off needless broadcasts of buffers.

            accelerate calls this method after it has wrapped the model.

            Args:
                model: the ``DistributedDataParallel`` model.
            """
            graph_buckets = None if graphs is None else _GraphBuckets(graphs)
            model.register_comm_hook(graph_buckets, _average_bucket)
            # Among buffers, training changes only the running means of norms.
            model.broadcast_buffers = any(
                hasattr(module, "running_mean") for module in model.modules()
            )

    # A static graph spares DDP the search for parameters without a gradient. It must be set,
    # because the trainer of transformers 5.0 to 5.2 enables that search otherwise.
    if graphs is None:
        return BucketOptions(static_graph=True, gradient_as_bucket_view=True)
    bytes_per_bucket = BYTES_PER_GRADIENT * n_weights // GRADIENT_BUCKETS
    return BucketOptions(
        static_graph=True,
        gradient_as_bucket_view=True,
        bucket_cap_mb=max(1, bytes_per_bucket >> 20),
    )


@contextmanager
def sharded_job(job: TrainingJob) -> Iterator[TrainingJob]:
    """Let a job train a copy of its model whose weights are divided among the ranks.

    The copy is divided later, by :meth:`ShardedModel.shard`, so that it can be accelerated before.
    At the end of the context, the job's own model has the trained weights, on the CPU of rank 0.

    Args:
        job: the training job. The field ``fsdp`` of its recipe asks for the copy.

    Yields:
        A job with the copy; without ``fsdp``, or with one rank, the job itself.
    """
    if not job.recipe.fsdp or job.world.size == 1:
        yield job
        return
    sharded = ShardedModel(job.model, job.world)
    yield replace(job, model=sharded.model, sharded=sharded)
    sharded.gather()


def run_trainer(
    job: TrainingJob,
    trainer_class: Callable[..., Trainer],
    arguments_class: Callable[..., TrainingArguments],
    loss: Module,
    callbacks: Sequence[TrainerCallback] = (),
    **settings: object,
) -> TrainResult:
    """Train the job's model in place, with a trainer of sentence-transformers.

    Args:
        job: the training job: recipe, model and training rows.
        trainer_class: trainer class of sentence-transformers for the kind of model.
        arguments_class: class of the trainer's arguments.
        loss: the loss.
        callbacks: callbacks besides those that every recipe has.
        settings: fields of `arguments_class` besides those that every recipe sets.

    Returns:
        The job's result with the steps, losses and warnings of the training.

    Raises:
        TrainingError: if the batches ran out before the last step.
    """
    from tilefold.recipes._watch import Watcher

    warn_unused_gpus()
    _prepare_logging(job)
    reader = Reader(job.examples.columns, job.model, job.examples.digest())
    batches = _create_batches(job, reader)
    watcher = Watcher(job, batches)
    metric = _metric_name(job)
    trainer = _create_trainer(
        job,
        trainer_class,
        arguments_class,
        loss,
        [*callbacks, *_create_recipe_callbacks(job), watcher],
        reader,
        {**_common_arguments(job), **settings, "metric_for_best_model": metric},
    )
    trainer.get_batch_sampler = lambda *_, **__: batches
    graphs = _accelerate(trainer, job)
    n_weights = sum(parameter.numel() for parameter in job.model.parameters())
    trainer.accelerator.ddp_handler = _ddp_options(graphs, n_weights)
    trainer.get_train_dataloader = functools.partial(
        _create_loader,
        trainer.get_train_dataloader,
        reader,
        job.world,
    )
    if job.world.rank > 0:
        trainer._save = _save_nothing
    if job.sharded is not None:
        job.sharded.attach(trainer)
    stopped_early = _train_or_restore(trainer, watcher, job, graphs)
    _check_all_steps(trainer.state.global_step, job.result.steps, stopped_early=stopped_early)
    _record_history(trainer, job, metric)
    return _complete_result(trainer, job, watcher)


def _save_nothing(*arguments: object, **options: object) -> None:
    """Write nothing, in place of a trainer's method ``_save`` on all ranks but rank 0.

    Trainers of transformers call ``_save`` on every rank, and models of sentence-transformers write
    files on every rank. Of a sharded model, only rank 0 has the trained weights.
    """


def _metric_name(job: TrainingJob) -> str | None:
    """Return the name of nDCG@10 in the trainer's logs, or ``None`` without evaluations."""
    if not job.evaluator:
        return None
    return f"eval_{job.evaluator.name}_{job.model.similarity_fn_name}_ndcg@10"


def _train_or_restore(trainer: Trainer, watcher: Watcher, job: TrainingJob, graphs: Any) -> bool:
    """Train from the resume point on, or restore a run whose last step was done before.

    Args:
        trainer: the trainer, whose model and state are changed.
        watcher: the callback that counts pairs and handles interrupts.
        job: the training job, with the resume point of its run.
        graphs: CUDA graphs of the encoder, or ``None``.

    Returns:
        Whether early stopping may have ended the training.
    """
    from transformers.trainer_callback import EarlyStoppingCallback, TrainerState

    checkpoint = job.run.resume_point.checkpoint
    record = (read_json(checkpoint / COMPLETE_FILE) if checkpoint else None) or {}
    watcher.counts = PairCounts.from_json(record.get("pairs"))
    if checkpoint and record.get("ended"):  # a trainer that resumes there would train further steps
        trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        _load_best(trainer, job.run)
        return job.recipe.patience is not None
    try:
        with watcher.handle_interrupts():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        if graphs is not None:
            graphs.use_bucket_gradients({})  # the model outlives DDP's buckets
    # A resumed trainer restores its callbacks from the checkpoint, as new objects.
    return any(
        callback.early_stopping_patience_counter >= callback.early_stopping_patience
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, EarlyStoppingCallback)
    )


def _prepare_logging(job: TrainingJob) -> None:
    """Set the folder of TensorBoard's logs, and an example query for the model card."""
    card = job.model.model_card_data
    if not card.widget:  # without an example, the card searches for some with a progress bar
        card.widget = [{"text": job.examples.columns["query"][0]}]
    # The logs are not in the work folder, which is removed with the checkpoints.
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", f"{job.run.output_dir}.logs")


def _create_recipe_callbacks(job: TrainingJob) -> list[TrainerCallback]:
    """Create the callbacks that a recipe enables: rising alpha of entmax, and early stopping.

    Args:
        job: the training job. The fields ``anneal_alpha`` and ``patience`` of its recipe enable
            the callbacks.
    """
    from transformers.trainer_callback import EarlyStoppingCallback

    from tilefold.integrations.transformers import AlphaSchedule

    recipe = job.recipe
    callbacks: list[TrainerCallback] = []
    if recipe.anneal_alpha:
        # Alpha rises from 1 (softmax) to its final value over this share of the steps.
        share_of_steps = float(recipe.anneal_alpha)
        final_alpha = recipe.alpha or DEFAULT_ALPHA
        callbacks.append(AlphaSchedule(final_alpha, until=share_of_steps))
    if recipe.patience:
        callbacks.append(EarlyStoppingCallback(recipe.patience))
    return callbacks


def _create_trainer(
    job: TrainingJob,
    trainer_class: Callable[..., Trainer],
    arguments_class: Callable[..., TrainingArguments],
    loss: Module,
    callbacks: Sequence[TrainerCallback],
    reader: Reader,
    settings: Mapping[str, object],
) -> Trainer:
    """Create the trainer of a job, over a data set whose texts are read batch by batch.

    The data set holds positions of texts. The reader replaces them by texts when a batch needs
    them.

    Args:
        job: the training job: its model, training rows and evaluator.
        trainer_class: trainer class of sentence-transformers for the kind of model.
        arguments_class: class of the trainer's arguments.
        loss: the loss.
        callbacks: callbacks of the trainer.
        reader: replaces the positions of texts in a batch by the texts.
        settings: fields of `arguments_class`.
    """
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback

    from tilefold.integrations.transformers import one_gpu

    columns = {
        name: column.positions if isinstance(column, Column) else column
        for name, column in job.examples.columns.items()
    }
    dataset = Dataset.from_dict(columns)
    dataset.set_transform(reader)
    trainer = trainer_class(
        model=job.model,
        args=one_gpu(arguments_class)(**settings),
        train_dataset=dataset,
        evaluator=job.evaluator,
        loss=loss,
        callbacks=list(callbacks),
    )
    if not job.call.verbose:
        trainer.remove_callback(PrinterCallback)
    # The trainer's own method would only log a failure.
    trainer._load_best_model = functools.partial(_load_best, trainer, job.run)
    return trainer


def _accelerate(trainer: Trainer, job: TrainingJob) -> Any:
    """Accelerate a trainer, or only its collator if the model runs without fused operators.

    The collator then tokenises batches in a thread, ahead of the training step.

    Args:
        trainer: the trainer, changed in place.
        job: the training job. Its recipe enables the fused operators, and CUDA graphs.

    Returns:
        The CUDA graphs of the encoder, which run its forward and backward pass; ``None`` without
        graphs.
    """
    from tilefold.integrations.sentence_transformers import (
        accelerate,
        collate_ahead,
        is_accelerated,
    )

    if is_accelerated(job.model):
        accelerate(trainer, graphs=job.recipe.graphs, compiled=False)
    else:
        collate_ahead(trainer)
    return _graphs_of(job.model)


def _graphs_of(model: Any) -> Any:
    """Return the CUDA graphs that run the encoder of a model in training; ``None`` without graphs.

    A graph encodes the texts of all columns of a batch.
    """
    return getattr(model[0].forward, "graphs", None)


def _check_all_steps(steps: int, expected_steps: int, *, stopped_early: bool) -> None:
    """Raise a ``TrainingError`` if steps are missing, unless early stopping is the reason."""
    if steps < expected_steps and not stopped_early:
        raise TrainingError(
            f"the training ended after {steps:,} of {expected_steps:,} steps, because the batches "
            "of the data ran out; no model was saved. Train with a smaller batch_size.",
        )


def _record_history(trainer: Trainer, job: TrainingJob, metric: str | None) -> None:
    """Add the losses and evaluations in a trainer's logs to the history of its run.

    Args:
        trainer: the trainer, after training.
        job: the training job, with its run, model and evaluator.
        metric: name of nDCG@10 in the trainer's logs; ``None`` without evaluations.
    """
    from tilefold.recipes._watch import LOG_NAMES

    best_step = trainer.state.best_global_step
    for row in trainer.state.log_history:
        if "loss" in row:
            job.run.history.append({LOG_NAMES.get(name, name): row[name] for name in row})
        elif metric is not None and metric in row:
            is_best = row["step"] == best_step
            job.run.history.append({"step": row["step"], NDCG: row[metric], "kept": is_best})
            if is_best:
                _set_evaluation_of_card(job, row)


def _set_evaluation_of_card(job: TrainingJob, log_row: Mapping[str, float]) -> None:
    """Replace the evaluation in the model card, which is the trainer's last one, by another.

    Args:
        job: the training job, with its model and evaluator.
        log_row: row of the trainer's log with the measures of an evaluation, such as
            ``"eval_dev_dot_ndcg@10"``.
    """
    job.model.model_card_data.eval_results_dict[job.evaluator] = {
        name.removeprefix("eval_"): value for name, value in log_row.items() if "@" in name
    }


def _complete_result(trainer: Trainer, job: TrainingJob, watcher: Watcher) -> TrainResult:
    """Return the job's result with the steps, pairs, losses and warnings of its training.

    All ranks must call this, because truncated texts are counted over all ranks.

    Args:
        trainer: the trainer, after training.
        job: the training job, with a result that has what was known before training.
        watcher: the callback that counted pairs, and stored the last losses.
    """
    recipe = job.recipe
    counts = watcher.counts
    trained_weights, weights = count_weights(job.model)
    warnings = job.result.warnings
    if getattr(_graphs_of(trainer.model), "failed", False):
        warnings += (
            "the training ran without CUDA graphs, which could not be captured; leave --graphs "
            "out.",
        )
    n_rows = len(job.examples.columns["query"])
    warnings += step_warnings(
        counts,
        expected_pairs=expected_pairs(counts.steps, n_rows, recipe.batch_size),
        n_pairs=job.examples.pairs,
        batch_size=recipe.batch_size,
        negatives_in_step=recipe.negatives_among,
    )
    losses = watcher.losses
    return replace(
        job.result,
        steps=trainer.state.global_step,
        trained_weights=trained_weights,
        weights=weights,
        pairs=counts.most,
        fewest_pairs=counts.fewest,
        trained_pairs=counts.total,
        negatives=recipe.negatives_among(counts.most),
        fewest_negatives=recipe.negatives_among(counts.fewest),
        evaluations=tuple(row for row in job.run.history if NDCG in row),
        kept_step=trainer.state.best_global_step,
        loss=None if losses is None else losses.loss,
        first_ranking_loss=watcher.first_ranking_loss,
        ranking_loss=watcher.ranking_loss,
        penalties=None if losses is None else losses.penalties,
        warnings=warnings,
        truncated=_truncations_of_all_ranks(trainer, job),
    )


def _truncations_of_all_ranks(trainer: Trainer, job: TrainingJob) -> tuple[dict[str, Any], ...]:
    """Add up the counts of truncated texts over all ranks, which must all call this.

    Args:
        trainer: the trainer, whose collator has counted the texts of this rank.
        job: the training job, with the ranks.

    Returns:
        For each limit of tokens, the number of ``texts``, the ``count`` of truncated ones, and the
        limit, ``max_length``.
    """
    tally = Tally()
    tally_of_rank = getattr(trainer.data_collator, "cut", Tally())
    for truncations in job.world.gather(list(tally_of_rank.counts.values())):
        for truncation in truncations:
            tally.add("text", truncation.texts, truncation.count, truncation.max_length)
    return tuple(
        {
            "texts": truncation.texts,
            "count": truncation.count,
            "max_length": truncation.max_length,
        }
        for truncation in tally.counts.values()
    )


def _load_best(trainer: Trainer, run: TrainingRun) -> None:
    """Load the best checkpoint of a run, or the last one of a run without evaluations.

    The trainer's own path of the best checkpoint is not used, because the folder of the run may
    have been moved since the checkpoint was written.

    Args:
        trainer: the trainer, whose model is changed in place.
        run: the run, with the folder of its checkpoints.
    """
    step = trainer.state.best_global_step or trainer.state.global_step
    trainer.model.model_card_data.set_best_model_step(step)
    trainer._load_from_checkpoint(str(run.work_dir / f"checkpoint-{step}"))


def _create_batches(job: TrainingJob, reader: Reader) -> TrainingBatches:
    """Create the batch sampler of a job, which yields the same row numbers on all ranks.

    Args:
        job: the training job. Its recipe has the batch size and the seed.
        reader: computes keys and lengths of the texts of rows.
    """
    from tilefold.recipes._batches import TrainingBatches

    recipe = job.recipe
    group_by_length = getattr(recipe, "group_by_length", False)  # a field of some recipes
    return TrainingBatches(
        text_keys=reader.text_keys if recipe.distinct_texts else None,
        n_rows=len(reader),
        batch_size=recipe.batch_size,
        fill_batches=job.run.resume_point.fill_batches,
        seed=recipe.seed,
        lengths=reader.document_lengths() if group_by_length else None,
    )


def _create_loader(
    create_loader: Callable[[], Any],
    reader: Reader,
    world: World,
) -> Any:
    """Create the data loader of a trainer, which gives every rank about the same amount of text.

    A collator of this package reads the rows of a batch in its own thread. Any other collator gets
    them from the data set.

    Args:
        create_loader: the trainer's own ``get_train_dataloader``.
        reader: reads the rows of a batch.
        world: all ranks.
    """
    loader = create_loader()
    _prepare_sampler(loader.batch_sampler, reader, world)
    if hasattr(loader.collate_fn, "read"):
        _read_in_collator(loader, reader)
    return loader


def _prepare_sampler(batch_sampler: Any, reader: Reader, world: World) -> None:
    """Let a data loader's sampler follow the epoch, and balance the amounts of text of the ranks.

    Args:
        batch_sampler: the sampler, changed in place. With several ranks, it is accelerate's
            sampler, whose ``batch_sampler`` is the trainer's sampler.
        reader: estimates the sizes of rows.
        world: all ranks.
    """
    trainer_sampler: Any = getattr(batch_sampler, "batch_sampler", batch_sampler)
    # accelerate calls set_epoch() of the outer sampler. Its own sampler has no such method.
    if hasattr(trainer_sampler, "set_epoch") and not hasattr(batch_sampler, "set_epoch"):
        batch_sampler.set_epoch = trainer_sampler.set_epoch
    if world.size > 1:
        batch_sampler.batch_sampler = BalancedBatches(trainer_sampler, reader, world.size)


def _read_in_collator(loader: Any, reader: Reader) -> None:
    """Let the collator of a data loader read the texts of a batch, in its own thread.

    Args:
        loader: the data loader, changed in place. Its collator gets row numbers from the data set
            and reads the rows.
        reader: reads the rows of a batch.
    """
    # The data set returns the row numbers themselves in place of the rows.
    loader.dataset.__getitems__ = list
    loader.collate_fn.read = reader.rows


def _common_arguments(job: TrainingJob) -> dict[str, object]:
    """Return the trainer's arguments that every recipe sets.

    Args:
        job: the training job: its recipe, number of steps, run and ranks.

    Returns:
        Name -> value of fields of ``TrainingArguments``.
    """
    import torch

    recipe = job.recipe
    steps = job.result.steps
    on_gpu = torch.cuda.is_available()
    distributed_settings: dict[str, object] = {}
    if job.world.size > 1:
        distributed_settings = {
            "accelerator_config": {"split_batches": True},
            "ddp_backend": None if on_gpu else "gloo",
        }
    return {
        **distributed_settings,
        **_checkpointing_settings(recipe),
        "batch_sampler": "no_duplicates" if recipe.distinct_texts else "batch_sampler",
        "dataloader_drop_last": job.run.resume_point.fill_batches,
        "output_dir": str(job.run.work_dir),
        "max_steps": steps,
        "per_device_train_batch_size": recipe.batch_size,  # split_batches divides it among ranks
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": int(recipe.warmup_ratio * steps),
        "weight_decay": 0.0,
        "bf16": job.result.bf16,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "eval_strategy": "steps" if job.evaluator else "no",
        "eval_steps": recipe.evaluate_steps,
        # Models are compared once alpha has its final value.
        "eval_delay": math.ceil(recipe.anneal_alpha * steps),
        "load_best_model_at_end": job.evaluator is not None,
        # Early stopping continues to count after a resume.
        "restore_callback_states_from_checkpoint": True,
        "save_strategy": "steps",
        # The watcher requests checkpoints by time.
        "save_steps": recipe.evaluate_steps or recipe.save_steps or NEVER,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "logging_steps": max(1, min(recipe.log_steps, steps)),
        "report_to": job.call.report_to,
        "disable_tqdm": not job.call.verbose,
        "seed": recipe.seed,
    }


def _checkpointing_settings(recipe: TrainingSettings) -> dict[str, object]:
    """Return the trainer's arguments for layers that are recomputed in the backward pass.

    Args:
        recipe: the recipe, with the field ``gradient_checkpointing``.

    Returns:
        Name -> value of fields of ``TrainingArguments``; empty if no layer is recomputed.
    """
    from transformers import TrainingArguments

    if not recipe.gradient_checkpointing:
        return {}
    # transformers 5.23 renamed the fields, and warns of the old names.
    is_renamed = hasattr(TrainingArguments, "activation_checkpointing")
    name = "activation_checkpointing" if is_renamed else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}}


def warn_unused_gpus() -> None:
    """Warn if several GPUs are visible, because one process trains on a single GPU."""
    import torch

    n_gpus = torch.cuda.device_count()
    if n_gpus > 1 and not has_other_ranks():
        _logger.warning(
            "%d GPUs are visible and one is used, cuda:0. For all of them: tilefold train "
            "--devices all, or torchrun --nproc-per-node %d SCRIPT",
            n_gpus,
            n_gpus,
        )
