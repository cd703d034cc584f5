"""The stock trainer of a run: its arguments, batches and callbacks, on one rank of several."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilefold._internal.files import read_json
from tilefold._internal.typing import Module
from tilefold.distributed.ranks import has_other_ranks
from tilefold.distributed.world import World
from tilefold.recipes._rows import BalancedBatches, Column, Reader
from tilefold.recipes._run import COMPLETE_FILE, NDCG, TrainingError, TrainingRun
from tilefold.recipes._steps import PairCounts, announced_pairs, step_warnings
from tilefold.recipes._training import TrainingJob, TrainResult
from tilefold.recipes.adapters import count_weights
from tilefold.retrieval.encoding.truncation import Tally

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tilefold.recipes._batches import TrainingBatches
    from tilefold.recipes._watch import Watcher

GRADIENT_BUCKETS = 16  # of DDP, where CUDA graphs return many gradients at once
NEVER = 10**9  # steps
_logger = logging.getLogger(__name__)


def _ddp_options(graphs: Any, n_weights: int) -> Any:
    """Create DDP's options: whole buckets of gradients are averaged, the same ones in every step.

    So DDP need not look for parameters without a gradient. Buffers are only broadcast where
    training changes them.

    Args:
        graphs: CUDA graphs of the encoder, which write their gradients into the buckets; or
            ``None``.
        n_weights: number of fp32 weights, which determines the size of a bucket.
    """
    import torch.distributed as dist
    from accelerate import DistributedDataParallelKwargs
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    class BucketOptions(DistributedDataParallelKwargs):
        """DDP's options with a hook that averages buckets."""

        def register_comm_hook(self, model: Any) -> None:
            """Register a hook on a model that DDP wraps, which averages each bucket of gradients.

            A bucket is one buffer with the gradients of several parameters. CUDA graphs must write
            gradients into it directly, so that they get the addresses of new buckets.
            """
            bucket_addresses: dict[int, int] = {}  # number of a bucket -> address of its buffer

            # DDP refuses annotations that are strings.
            def reduce_bucket(group, bucket):  # type: ignore[no-untyped-def]
                """Average the gradients of a bucket over all ranks of a process group.

                Args:
                    group: the process group, as DDP passes it to the hook.
                    bucket: DDP's ``GradBucket``: one buffer with the gradients of some parameters.

                Returns:
                    A future of the averaged buffer.
                """
                buffer = bucket.buffer()
                parameters = bucket.parameters()
                if graphs is not None:  # `bucket_gradients`: id of a parameter -> its gradient
                    address = buffer.data_ptr()
                    is_new = bucket_addresses.get(bucket.index()) != address
                    if is_new or id(parameters[0]) not in graphs.bucket_gradients:
                        bucket_addresses[bucket.index()] = address
                        gradients = dict(
                            zip(map(id, parameters), bucket.gradients(), strict=True),
                        )
                        # The graphs write their gradients into the bucket from now on.
                        graphs.use_bucket_gradients({**graphs.bucket_gradients, **gradients})
                has_nccl = buffer.is_cuda and "nccl" in dist.get_backend_config(group)
                if not has_nccl:  # other backends cannot average
                    return allreduce_hook(group, bucket)
                work = dist.all_reduce(buffer, dist.ReduceOp.AVG, group, async_op=True)
                return work.get_future().then(lambda future: future.value()[0])

            model.register_comm_hook(None, reduce_bucket)
            # Of all buffers, only the running means of norms change in training.
            model.broadcast_buffers = any(
                hasattr(module, "running_mean") for module in model.modules()
            )

    # static_graph: the trainer of transformers 5.0 to 5.2 sets options of its own, which look for
    # parameters without a gradient
    if graphs is None:
        return BucketOptions(static_graph=True, gradient_as_bucket_view=True)
    bytes_per_bucket = 4 * n_weights // GRADIENT_BUCKETS
    return BucketOptions(
        static_graph=True,
        gradient_as_bucket_view=True,
        bucket_cap_mb=max(1, bytes_per_bucket >> 20),
    )


def run_trainer(
    job: TrainingJob,
    trainer_class: Callable[..., Trainer],
    arguments_class: Callable[..., TrainingArguments],
    loss: Module,
    callbacks: Sequence[TrainerCallback] = (),
    **settings: object,
) -> TrainResult:
    """Run a stock trainer over the job's model, which is trained in place.

    Args:
        job: the training.
        trainer_class: trainer of the kind of model.
        arguments_class: its arguments.
        loss: the loss.
        callbacks: further callbacks.
        settings: further arguments of the trainer.

    Returns:
        The job's result with the steps, losses and warnings of the training.

    Raises:
        TrainingError: if fewer steps were done than announced.
    """
    from transformers.trainer_callback import EarlyStoppingCallback, TrainerState

    from tilefold.recipes._watch import Watcher

    warn_unused_gpus()
    _prepare_logging(job)
    recipe = job.recipe
    reader = Reader(job.examples.columns, job.model, job.examples.digest())
    batches = _training_batches(job, reader)
    watcher = Watcher(job, batches)
    metric = ""
    if job.evaluator:
        metric = f"eval_{job.evaluator.name}_{job.model.similarity_fn_name}_ndcg@10"
    trainer = _create_trainer(
        job,
        trainer_class,
        arguments_class,
        loss,
        [*callbacks, *_recipe_callbacks(job), watcher],
        reader,
        {**_settings(job), **settings, "metric_for_best_model": metric or None},
    )
    trainer.get_batch_sampler = lambda *_, **__: batches
    graphs = _prepare_loading(trainer, job, reader)
    checkpoint = job.run.checkpoint
    record = (read_json(checkpoint / COMPLETE_FILE) if checkpoint else None) or {}
    watcher.counts = PairCounts.from_json(record.get("pairs"))
    ended = bool(record.get("ended"))
    if checkpoint and ended:  # the stock trainer would train on
        trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        _load_best(trainer, job.run)
    else:
        try:
            with watcher.handle_interrupts():
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            if graphs is not None:
                graphs.use_bucket_gradients({})  # the model outlives DDP's buckets
    # A resumed trainer has another callback object than the one that was passed to it.
    out_of_patience = any(
        callback.early_stopping_patience_counter >= callback.early_stopping_patience
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, EarlyStoppingCallback)
    )
    _check_all_steps(
        trainer.state.global_step,
        job.result.steps,
        stopped_early=out_of_patience or (ended and recipe.patience is not None),
    )
    _record_history(trainer, job, metric)
    return _with_outcome(trainer, job, watcher)


def _prepare_logging(job: TrainingJob) -> None:
    """Set the folder of TensorBoard's logs, and an example for the model card."""
    card = job.model.model_card_data
    if not card.widget:  # else the card draws examples with a progress bar
        card.widget = [{"text": job.examples.columns["query"][0]}]
    # This folder outlives the checkpoints.
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", f"{job.run.output_dir}.logs")


def _recipe_callbacks(job: TrainingJob) -> list[TrainerCallback]:
    """Create the callbacks for a rising alpha of entmax and for early stopping.

    Args:
        job: the training. Its recipe enables each callback by ``anneal_alpha`` and ``patience``.
    """
    from transformers.trainer_callback import EarlyStoppingCallback

    from tilefold.integrations.transformers import AlphaSchedule

    recipe = job.recipe
    callbacks: list[TrainerCallback] = []
    if recipe.anneal_alpha:
        # Alpha rises from 1 (softmax) to its final value over a share of the steps.
        share_of_steps = float(recipe.anneal_alpha)
        callbacks.append(AlphaSchedule(recipe.alpha or 1.5, until=share_of_steps))
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
    """Create the stock trainer of a job, over a data set whose texts are read batch by batch.

    The data set holds positions of texts. The reader replaces them by texts when a batch needs
    them.

    Args:
        job: the training: its model, training rows and evaluator.
        trainer_class: trainer of the kind of model.
        arguments_class: class of the trainer's arguments.
        loss: the loss.
        callbacks: callbacks of the trainer.
        reader: function from positions of texts to texts.
        settings: the trainer's arguments.
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
    # The stock method only logs when it fails.
    trainer._load_best_model = functools.partial(_load_best, trainer, job.run)
    return trainer


def _prepare_loading(trainer: Trainer, job: TrainingJob, reader: Reader) -> Any:
    """Replace how a trainer loads batches and, with several ranks, averages gradients.

    A thread tokenizes the next batches while the model trains. Gradients are averaged in buckets.
    All ranks share each batch.

    Args:
        trainer: the trainer, changed in place.
        job: the training.
        reader: reads the texts of a batch.

    Returns:
        The CUDA graphs of the encoder, or ``None``.
    """
    from tilefold.integrations.sentence_transformers import collate_ahead

    collate_ahead(trainer, graphs=job.recipe.graphs)
    graphs = getattr(job.model[0].forward, "graphs", None)
    n_weights = sum(parameter.numel() for parameter in job.model.parameters())
    trainer.accelerator.ddp_handler = _ddp_options(graphs, n_weights)
    trainer.get_train_dataloader = functools.partial(
        _batches_by_epoch,
        trainer.get_train_dataloader,
        reader,
        job.world,
    )
    return graphs


def _check_all_steps(done: int, announced: int, *, stopped_early: bool) -> None:
    """Raise a ``TrainingError`` unless all steps were done, or patience stopped the training."""
    if done < announced and not stopped_early:
        raise TrainingError(
            f"the training ended after {done:,} of {announced:,} steps, because the batches of the "
            "data ran out; no model was saved. Train with a smaller batch_size.",
        )


def _record_history(trainer: Trainer, job: TrainingJob, metric: str) -> None:
    """Add the trainer's logs to the run's history, and the best evaluation to the model card.

    Args:
        trainer: the trainer, after training.
        job: its job, which has the run and the model.
        metric: name of nDCG@10 in the trainer's logs; empty without evaluations.
    """
    from tilefold.recipes._watch import LOG_NAMES

    best_step = trainer.state.best_global_step
    for row in trainer.state.log_history:
        if "loss" in row:
            renamed = {LOG_NAMES.get(name, name): value for name, value in row.items()}
            job.run.history.append(renamed)
        elif metric in row:
            job.run.history.append(
                {"step": row["step"], NDCG: row[metric], "kept": row["step"] == best_step},
            )
            if row["step"] == best_step:
                # The trainer has put the last evaluation there. Measures have names such as
                # "eval_dev_dot_ndcg@10".
                job.model.model_card_data.eval_results_dict[job.evaluator] = {
                    name.removeprefix("eval_"): row[name] for name in row if "@" in name
                }


def _with_outcome(trainer: Trainer, job: TrainingJob, watcher: Watcher) -> TrainResult:
    """Return the job's result with the steps, pairs, losses and warnings of its training.

    All ranks call this, because they gather how many texts each of them has truncated.

    Args:
        trainer: trainer of the finished training.
        job: the training, with a result that has what was known before it.
        watcher: counted the pairs of each step, and stored the last losses.
    """
    recipe = job.recipe
    counts = watcher.counts
    trained_weights, weights = count_weights(job.model)
    warnings = job.result.warnings
    graphs = getattr(trainer.model[0].forward, "graphs", None)
    if getattr(graphs, "failed", False):
        warnings += (
            "the training ran without CUDA graphs, which could not be captured; leave --graphs "
            "out.",
        )
    n_rows = len(job.examples.columns["query"])
    warnings += step_warnings(
        counts,
        announced=announced_pairs(counts.steps, n_rows, recipe.batch_size),
        n_pairs=job.examples.pairs,
        batch_size=recipe.batch_size,
        negatives_among=recipe.negatives_among,
    )
    tally = Tally()  # of the texts that were truncated on any rank
    tally_of_rank = getattr(trainer.data_collator, "cut", Tally())
    for truncations in job.world.gather(list(tally_of_rank.counts.values())):
        for truncation in truncations:
            tally.add("text", truncation.texts, truncation.count, truncation.max_length)
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
        truncated=tuple(
            {
                "texts": truncation.texts,
                "count": truncation.count,
                "max_length": truncation.max_length,
            }
            for truncation in tally.counts.values()
        ),
    )


def _load_best(trainer: Trainer, run: TrainingRun) -> None:
    """Load the best checkpoint of a run, or the last one of a run without evaluations.

    The folder of the run may have moved since the checkpoint was written.
    """
    step = trainer.state.best_global_step or trainer.state.global_step
    trainer.model.model_card_data.set_best_model_step(step)
    trainer._load_from_checkpoint(str(run.work_dir / f"checkpoint-{step}"))


def _training_batches(job: TrainingJob, reader: Reader) -> TrainingBatches:
    """Create the batches of row numbers of a job, which are the same on all ranks.

    Args:
        job: the training, whose recipe has the batch size and the seed.
        reader: returns keys and lengths of the texts of rows.
    """
    from tilefold.recipes._batches import TrainingBatches

    recipe = job.recipe
    group_by_length = getattr(recipe, "group_by_length", False)  # a field of some recipes
    return TrainingBatches(
        reader.text_keys if recipe.distinct_texts else None,
        len(reader),
        recipe.batch_size,
        drop_last=job.run.full_batches,
        seed=recipe.seed,
        lengths=reader.document_lengths() if group_by_length else None,
    )


def _batches_by_epoch(
    create_loader: Callable[[], Any],
    reader: Reader,
    world: World,
) -> Any:
    """Create the trainer's data loader, with a new order in each epoch and a share for each rank.

    Args:
        create_loader: the trainer's ``get_train_dataloader``.
        reader: reads the rows of a batch.
        world: all ranks.
    """
    loader = create_loader()
    # With several ranks, accelerate's sampler wraps the sampler of the trainer.
    outer_sampler = loader.batch_sampler
    sampler: Any = getattr(outer_sampler, "batch_sampler", outer_sampler)
    if hasattr(sampler, "set_epoch") and not hasattr(outer_sampler, "set_epoch"):
        outer_sampler.set_epoch = sampler.set_epoch
    if world.size > 1:
        outer_sampler.batch_sampler = BalancedBatches(sampler, reader, world.size)
    if hasattr(loader.collate_fn, "read"):
        # The data set returns numbers of rows, which the collator reads in its own thread.
        loader.dataset.__getitems__ = list
        loader.collate_fn.read = reader.rows
    return loader


def _settings(job: TrainingJob) -> dict[str, object]:
    """Return the arguments of the stock trainer that all kinds of models share.

    Args:
        job: the training: its recipe, number of steps, run and ranks.

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
        "batch_sampler": "no_duplicates" if recipe.distinct_texts else "batch_sampler",
        "dataloader_drop_last": job.run.full_batches,
        "output_dir": str(job.run.work_dir),
        "max_steps": steps,
        "per_device_train_batch_size": recipe.batch_size,  # split_batches shares it among ranks
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": int(recipe.warmup_ratio * steps),
        "weight_decay": 0.0,
        "bf16": job.result.bf16,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "eval_strategy": "steps" if job.evaluator else "no",
        "eval_steps": recipe.evaluate_steps,
        "eval_delay": math.ceil(recipe.anneal_alpha * steps),  # compare models of the same alpha
        "load_best_model_at_end": job.evaluator is not None,
        "restore_callback_states_from_checkpoint": True,  # the count of patience
        "save_strategy": "steps",
        # the watcher requests checkpoints by time
        "save_steps": recipe.evaluate_steps or recipe.save_steps or NEVER,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "logging_steps": max(1, min(recipe.log_steps, steps)),
        "report_to": job.call.report_to,
        "disable_tqdm": not job.call.verbose,
        "seed": recipe.seed,
    }


def warn_unused_gpus() -> None:
    """Warn if several GPUs are visible, because a process trains on one of them only."""
    import torch

    n_gpus = torch.cuda.device_count()
    if n_gpus > 1 and not has_other_ranks():
        _logger.warning(
            "%d GPUs are visible and one is used, cuda:0. For all of them: tilefold train "
            "--devices all, or torchrun --nproc-per-node %d SCRIPT",
            n_gpus,
            n_gpus,
        )
