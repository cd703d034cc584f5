"""The stock trainer of a run: its arguments and batches, on this rank of several, and what it
tells.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilefold._internal.files import read_json
from tilefold._internal.typing import Module
from tilefold.distributed.ranks import has_other_ranks
from tilefold.distributed.world import World
from tilefold.recipes._rows import Column, Dealt, Reader
from tilefold.recipes._run import NDCG, WHOLE, TrainingError, TrainingRun
from tilefold.recipes._steps import PairCounts, announced_pairs, step_warnings
from tilefold.recipes._training import TrainingJob, TrainResult
from tilefold.recipes.adapters import count_weights
from tilefold.retrieval.encoding.truncation import Tally

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tilefold.recipes._batches import TrainingBatches
    from tilefold.recipes._watch import Watcher

BUCKETS = 16  # in which several ranks add up gradients, where graphs hand out many at once
_logger = logging.getLogger(__name__)


def _by_buckets(graphs: Any, weights: int) -> Any:
    """DDP's options: the same parameters get gradients in every step, so that nothing looks for
    those that do not.

    Whole buckets are averaged, not one gradient after the other. Those of `graphs` are written into
    the buckets, which hold a part of the fp32 `weights` each. Buffers are sent again only where
    training changes them.
    """
    import torch.distributed as dist
    from accelerate import DistributedDataParallelKwargs
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    class ByBuckets(DistributedDataParallelKwargs):
        def register_comm_hook(self, model: Any) -> None:
            seen: dict[int, int] = {}  # memory of buckets

            def reduced(group, bucket):  # type: ignore[no-untyped-def]  # DDP knows no annotation that is a string
                place, parameters = bucket.buffer().data_ptr(), bucket.parameters()
                if graphs is not None and (
                    seen.get(bucket.index()) != place or id(parameters[0]) not in graphs.places
                ):
                    seen[bucket.index()] = place
                    graphs.write_to(
                        graphs.places
                        | dict(zip(map(id, parameters), bucket.gradients(), strict=True)),
                    )
                if not (bucket.buffer().is_cuda and "nccl" in dist.get_backend_config(group)):
                    return allreduce_hook(group, bucket)
                done = dist.all_reduce(
                    bucket.buffer(),
                    dist.ReduceOp.AVG,
                    group,
                    async_op=True,
                ).get_future()
                return done.then(lambda future: future.value()[0])

            model.register_comm_hook(None, reduced)
            model.broadcast_buffers = any(
                hasattr(module, "running_mean") for module in model.modules()
            )

    # the trainer of transformers 5.0 to 5.2 sets its own, which looks for such parameters
    more: dict[str, Any] = (
        {} if graphs is None else {"bucket_cap_mb": max(1, 4 * weights // BUCKETS >> 20)}
    )
    return ByBuckets(static_graph=True, gradient_as_bucket_view=True, **more)


def run_trainer(
    job: TrainingJob,
    trainer_class: Callable[..., Trainer],
    arguments_class: Callable[..., TrainingArguments],
    loss: Module,
    callbacks: Sequence[TrainerCallback] = (),
    **settings: object,
) -> TrainResult:
    """Run a stock trainer over the job's model in place; `settings` are further arguments of the
    trainer.
    """
    from datasets import Dataset
    from transformers.trainer_callback import EarlyStoppingCallback, PrinterCallback, TrainerState

    from tilefold.integrations.sentence_transformers import collate_ahead
    from tilefold.integrations.transformers import AlphaSchedule, one_gpu
    from tilefold.recipes._watch import Watcher

    say_unused_gpus()
    recipe, read, world = job.recipe, job.examples.columns, job.world
    card = job.model.model_card_data
    card.widget = card.widget or [
        {"text": read["query"][0]},
    ]  # else the card draws examples with a progress bar
    os.environ.setdefault(
        "TENSORBOARD_LOGGING_DIR",
        f"{job.run.output_dir}.logs",
    )  # outlives the checkpoints
    reader = Reader(read, job.model, job.examples.digest())
    batches = _training_batches(job, reader)
    watcher = Watcher(job, batches)
    annealed = (
        [AlphaSchedule(recipe.alpha or 1.5, until=float(recipe.anneal_alpha))]
        if recipe.anneal_alpha
        else []
    )
    patient = [EarlyStoppingCallback(recipe.patience)] if recipe.patience else []
    metric = (
        f"eval_{job.evaluator.name}_{job.model.similarity_fn_name}_ndcg@10" if job.evaluator else ""
    )
    places = {
        name: column.places if isinstance(column, Column) else column
        for name, column in read.items()
    }
    dataset = Dataset.from_dict(places)
    dataset.set_transform(reader)
    trainer = trainer_class(
        model=job.model,
        args=one_gpu(arguments_class)(
            **_settings(job) | settings,
            metric_for_best_model=metric or None,
        ),
        train_dataset=dataset,
        evaluator=job.evaluator,
        loss=loss,
        callbacks=[*callbacks, *annealed, *patient, watcher],
    )
    trainer.get_batch_sampler = lambda *_, **__: batches
    trainer._load_best_model = functools.partial(
        _load,
        trainer,
        job.run,
    )  # the stock one only logs that it failed
    collate_ahead(trainer, graphs=recipe.graphs)
    graphs = getattr(job.model[0].forward, "graphs", None)
    trainer.accelerator.ddp_handler = _by_buckets(
        graphs,
        sum(tensor.numel() for tensor in job.model.parameters()),
    )
    trainer.get_train_dataloader = functools.partial(
        _batches_by_epoch,
        trainer.get_train_dataloader,
        reader,
        world,
    )
    if not job.call.verbose:
        trainer.remove_callback(PrinterCallback)
    checkpoint = job.run.checkpoint
    record = (read_json(checkpoint / WHOLE) if checkpoint else None) or {}
    watcher.counts = PairCounts.from_json(record.get("pairs"))
    ended = bool(record.get("ended"))
    if checkpoint and ended:  # the stock trainer would go on
        trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        _load(trainer, job.run)
    else:
        try:
            with watcher.heeding_interrupts():
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            if graphs is not None:
                graphs.write_to({})  # the model outlives DDP
    waited = any(  # a checkpoint puts another object in the place of the callback
        callback.early_stopping_patience_counter >= callback.early_stopping_patience
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, EarlyStoppingCallback)
    )
    _check_all_steps(
        trainer.state.global_step,
        job.result.steps,
        stopped_early=waited or (ended and recipe.patience is not None),
    )
    _keep_history(trainer, job, metric)
    return _with_outcome(trainer, job, watcher)


def _check_all_steps(done: int, announced: int, *, stopped_early: bool) -> None:
    """Raise a ``TrainingError`` unless all steps were done, or patience stopped the training."""
    if done < announced and not stopped_early:
        raise TrainingError(
            f"the training ended after {done:,} of {announced:,} steps, because the batches of the "
            "data ran out; no model was saved. Train with a smaller batch_size.",
        )


def _keep_history(trainer: Trainer, job: TrainingJob, metric: str) -> None:
    """Keep what the trainer logged for the run's own log, and the kept evaluation for the card.

    Args:
        trainer: the trainer, whose training is over.
        job: its job.
        metric: the trainer's name of nDCG@10.
    """
    from tilefold.recipes._watch import NAMES

    kept = trainer.state.best_global_step
    for row in trainer.state.log_history:
        if "loss" in row:
            job.run.history.append({NAMES.get(name, name): value for name, value in row.items()})
        elif metric in row:
            job.run.history.append(
                {"step": row["step"], NDCG: row[metric], "kept": row["step"] == kept},
            )
            if row["step"] == kept:  # the stock card has the last one
                job.model.model_card_data.eval_results_dict[job.evaluator] = {
                    name[5:]: row[name] for name in row if "@" in name
                }


def _with_outcome(trainer: Trainer, job: TrainingJob, watcher: Watcher) -> TrainResult:
    """The result of a job with the steps, pairs, losses and warnings of its training."""
    recipe, counts = job.recipe, watcher.counts
    trained_weights, weights = count_weights(job.model)
    warnings = job.result.warnings
    if getattr(getattr(trainer.model[0].forward, "graphs", None), "failed", False):
        warnings += (
            "the training ran without CUDA graphs, which could not be captured; leave --graphs out.",
        )
    n_rows = len(job.examples.columns["query"])
    warnings += step_warnings(
        counts,
        announced=announced_pairs(counts.steps, n_rows, recipe.batch_size),
        n_pairs=job.examples.pairs,
        batch_size=recipe.batch_size,
        negatives_among=recipe.negatives_among,
    )
    cuts = Tally()  # of all ranks, for each length
    own_cuts = getattr(trainer.data_collator, "cut", cuts).counts.values()
    for truncation in itertools.chain(*job.world.gather(list(own_cuts))):
        cuts.add("text", truncation.texts, truncation.count, truncation.max_length)
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
        loss=None if watcher.losses is None else watcher.losses.loss,
        first_ranking_loss=watcher.first_ranking_loss,
        ranking_loss=watcher.ranking_loss,
        penalties=None if watcher.losses is None else watcher.losses.penalties,
        warnings=warnings,
        truncated=tuple(
            {key: vars(cut)[key] for key in ("texts", "count", "max_length")}
            for cut in cuts.counts.values()
        ),
    )


def _load(trainer: Trainer, run: TrainingRun) -> None:
    """Load the best checkpoint of a run, which may have moved, or that of the last step without
    evaluations.
    """
    step = trainer.state.best_global_step or trainer.state.global_step
    trainer.model.model_card_data.set_best_model_step(step)
    trainer._load_from_checkpoint(str(run.work_dir / f"checkpoint-{step}"))


def _training_batches(job: TrainingJob, reader: Reader) -> TrainingBatches:
    """The batches of a job, which all ranks draw alike."""
    from tilefold.recipes._batches import TrainingBatches

    recipe = job.recipe
    return TrainingBatches(
        reader.text_keys if recipe.distinct_texts else None,
        len(reader),
        recipe.batch_size,
        drop_last=job.run.full_batches,
        seed=recipe.seed,
        lengths=reader.document_lengths() if getattr(recipe, "group_by_length", False) else None,
    )


def _batches_by_epoch(make: Callable[[], Any], reader: Reader, world: World) -> Any:
    """A loader of a trainer, whose sampler hears of every epoch, where a rank takes a part of each
    batch, too.
    """
    loader = make()
    inner: Any = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    if hasattr(inner, "set_epoch") and not hasattr(loader.batch_sampler, "set_epoch"):
        loader.batch_sampler.set_epoch = inner.set_epoch
    if world.size > 1:
        loader.batch_sampler.batch_sampler = Dealt(inner, reader, world.size)
    if hasattr(loader.collate_fn, "read"):  # rows by their numbers, in its thread
        loader.dataset.__getitems__, loader.collate_fn.read = list, reader.rows
    return loader


def _settings(job: TrainingJob) -> dict[str, object]:
    """The trainer's arguments, but for those of a kind of model."""
    import torch

    recipe, steps, on_gpu = job.recipe, job.result.steps, torch.cuda.is_available()
    shared = {
        "accelerator_config": {"split_batches": True},
        "ddp_backend": None if on_gpu else "gloo",
    }
    return {
        **(shared if job.world.size > 1 else {}),
        "batch_sampler": "no_duplicates" if recipe.distinct_texts else "batch_sampler",
        "dataloader_drop_last": job.run.full_batches,
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
        "eval_strategy": "steps" if job.evaluator else "no",
        "eval_steps": recipe.evaluate_steps,
        "eval_delay": math.ceil(recipe.anneal_alpha * steps),  # compare models of one alpha
        "load_best_model_at_end": job.evaluator is not None,
        "restore_callback_states_from_checkpoint": True,  # how long patience has waited
        "save_strategy": "steps",
        "save_steps": recipe.evaluate_steps
        or recipe.save_steps
        or 10**9,  # the watcher asks for others
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "logging_steps": max(1, min(recipe.log_steps, steps)),
        "report_to": job.call.report_to,
        "disable_tqdm": not job.call.verbose,
        "seed": recipe.seed,
    }


def say_unused_gpus() -> None:
    """Log one line if more GPUs are visible than the one that a recipe uses."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus > 1 and not has_other_ranks():
        remedy = (
            "For all of them: tilefold train --devices all, or torchrun --nproc-per-node %d SCRIPT"
        )
        _logger.warning("%d GPUs are visible and one is used, cuda:0. " + remedy, gpus, gpus)
