"""Callbacks of a training: progress, checkpoints, interrupts, penalties and dead models."""

from __future__ import annotations

import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from enum import IntEnum
from types import FrameType
from typing import Any, NamedTuple

import torch
from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import (
    SpladeRegularizerWeightSchedulerCallback,
)
from sentence_transformers.sparse_encoder.losses import SpladeLoss
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from tilefold._internal.files import write_json
from tilefold._internal.typing import Module
from tilefold.distributed.world import World
from tilefold.recipes._batches import TrainingBatches
from tilefold.recipes._run import (
    COMPLETE_FILE,
    Losses,
    OutOfTimeError,
    TrainingError,
    complete_checkpoints,
)
from tilefold.recipes._steps import PairCounts
from tilefold.recipes._training import TrainingJob

SIDES = ("query", "document")
RANKING_LOSS = "base_loss"
PENALTIES = tuple(f"{side}_regularizer_loss" for side in SIDES)
LOG_NAMES = {
    RANKING_LOSS: "ranking_loss",
    "query_regularizer_loss": "query_penalty",
    "document_regularizer_loss": "document_penalty",
}
"""Names of losses in sentence-transformers' logs -> names in the log of a run."""
DENSE_SHARE = 0.25  # share of the vocabulary above which vectors count as nearly dense
EMPTY_SHARE = 0.5  # share of rows without a term above which the result has a warning
PATIENCE = 2  # consecutive logs of zeros after which a model is dead
DEFAULT_SAVE_STEPS = 25  # steps between checkpoints of a recipe without save_steps
MAX_SAVE_SHARE = 0.05  # share of the time that these checkpoints may take
REMEDY = (
    "Train again with a smaller learning rate or a smaller weight of the penalties; a masked-LM "
    "head with large logits (ModernBERT, Ettin) needs document.logit_scale=0.0625"
)


class _SaveRequest(IntEnum):
    """Checkpoint that rank 0 requests after a step; the highest request of all ranks applies."""

    NONE = 0
    SAVE = 1
    SAVE_AND_STOP = 2


class Watcher(TrainerCallback):
    """Callback that reports steps, keeps losses and requests checkpoints by time.

    It stops a training whose loss is not finite, after Ctrl-C, and when its time is over.

    Args:
        job: the training.
        batches: its batches.

    Attributes:
        counts: pairs of all steps, including the steps before an interruption.
        ndcg: nDCG@10 of the last evaluation.
        losses: the last logged losses.
        first_ranking_loss: ranking loss of the first log, without penalties.
        ranking_loss: ranking loss of the last log.
        interrupted: whether Ctrl-C was pressed, or SIGTERM received.
        out_of_time: whether the call's time is over before the last step.
    """

    def __init__(self, job: TrainingJob, batches: TrainingBatches) -> None:
        """Start the clock of the call, which limits its time and spaces its checkpoints.

        Args:
            job: the training: its recipe, run, ranks, time limit and progress function.
            batches: its batches, which know the number of pairs of each step.
        """
        self.batches = batches
        self.counts = PairCounts()
        self.progress = job.progress
        self.run = job.run
        self.recipe = job.recipe
        self.world = job.world
        self.ndcg: float | None = None
        self.losses: Losses | None = None
        self.first_ranking_loss: float | None = None
        self.ranking_loss: float | None = None
        self.interrupted = False
        self.hours = job.call.hours
        self.out_of_time = False
        now = time.monotonic()
        self._started = now
        self._last_saved = now
        self._step_ended = now
        self._save_seconds = 0.0  # duration of the last checkpoint

    def on_train_begin(self, args: Any, state: TrainerState, control: object, **_: object) -> None:
        """Use this call's log steps: a checkpoint restores those of its run."""
        state.logging_steps = args.logging_steps

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: object,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        """Store the losses and nDCG@10 of a log, and stop a training that has diverged.

        The trainer calls this method after each log. A log holds either losses of the last steps
        or measures of an evaluation.

        Args:
            args: the trainer's arguments. ``metric_for_best_model`` is the name of nDCG@10.
            state: steps and log of the training. The values of `logs` are added to its last log.
            control: not used.
            logs: name -> value of what is logged.

        Raises:
            TrainingError: if the loss is infinite or NaN.
        """
        if not logs:
            return
        # An evaluation logs nDCG@10. The last value is kept for the progress of later steps.
        self.ndcg = logs.get(str(args.metric_for_best_model), self.ndcg)
        if "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} after {state.global_step} steps: the training has diverged. "
                "Train with a smaller learning_rate, from the start (resume=False or --fresh).",
            )
        # A loss with penalties logs its parts, too. Any other loss is a ranking loss.
        self.ranking_loss = float(logs.get(RANKING_LOSS, loss))
        penalties = [float(logs[name]) for name in PENALTIES if name in logs]
        sum_of_penalties = sum(penalties) if penalties else None
        self.losses = Losses(loss, self.ranking_loss, sum_of_penalties)
        # Other callbacks have added values to `logs` after the trainer had stored a copy.
        state.log_history[-1].update(logs)
        if self.first_ranking_loss is None:
            self.first_ranking_loss = self.ranking_loss

    def on_step_end(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
        """Count and report the step that has ended, and request a checkpoint if one is due.

        Args:
            args: not used.
            state: number of the step and of all steps, best evaluation.
            control: its ``should_save`` makes the trainer write a checkpoint.

        Raises:
            KeyboardInterrupt: after Ctrl-C, or a SIGTERM that the program handles.
        """
        if self.interrupted:
            raise KeyboardInterrupt
        self.counts = self.counts.add_step(self.batches.pairs_of_step(state.global_step))
        if self.losses is not None and self.ndcg is not None:
            self.losses = self.losses._replace(
                ndcg=self.ndcg,
                best=(state.best_metric, state.best_global_step),
            )
        if self.progress is not None:
            self.progress(state.global_step, state.max_steps, self.losses)
        self._step_ended = time.monotonic()
        # Only rank 0 requests anything, and its request is the largest. Several ranks learn of it
        # one step later, so that no step waits for the exchange.
        save_request = self.world.max_over_ranks(self._save_request(state.global_step))
        save_steps = self.recipe.save_steps
        if save_request != _SaveRequest.NONE:
            control.should_save = True
        if save_steps is not None and state.global_step % save_steps == 0:
            control.should_save = True
        if save_request == _SaveRequest.SAVE_AND_STOP and state.global_step < state.max_steps:
            self.out_of_time = True  # on_save raises OutOfTimeError after the checkpoint

    def _save_request(self, step: int) -> int:
        """Return whether a checkpoint is due by the clock of rank 0, and whether time is over.

        A recipe without ``save_steps`` saves every 25 steps, unless writing checkpoints would take
        more than a twentieth of the time.

        Args:
            step: number of the step that has ended.

        Returns:
            A :class:`_SaveRequest`; ``NONE`` on all ranks but 0.
        """
        if self.world.rank != 0:
            return _SaveRequest.NONE
        now = self._step_ended
        request = _SaveRequest.NONE
        seconds_since_save = now - self._last_saved
        is_due_by_steps = (
            self.recipe.save_steps is None
            and step % DEFAULT_SAVE_STEPS == 0
            and seconds_since_save * MAX_SAVE_SHARE >= self._save_seconds
        )
        is_due_by_time = seconds_since_save >= 60 * self.recipe.save_minutes
        if is_due_by_steps or is_due_by_time:
            self._last_saved = now
            request = _SaveRequest.SAVE
        if self.hours is not None and now - self._started >= 3600 * self.hours:
            request = _SaveRequest.SAVE_AND_STOP
        return int(request)

    def on_save(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
        """Mark the checkpoint that the trainer has written as complete, and remove older ones.

        A run resumes from complete checkpoints only. The best one is retained.

        Args:
            args: not used.
            state: number of the step, and of the step of the best evaluation.
            control: says whether the training stops after this step.

        Raises:
            OutOfTimeError: if the call's time is over.
        """
        folder = self.run.work_dir / f"checkpoint-{state.global_step}"
        self.world.gather(None)  # waits until every rank has written its part
        if folder.is_dir() and self.world.rank == 0:
            record = {
                "step": state.global_step,
                "ended": control.should_training_stop,
                "pairs": asdict(self.counts),
            }
            write_json(folder / COMPLETE_FILE, record)
            # The stock limit of checkpoints would remove them before this one is complete.
            for step, checkpoint in complete_checkpoints(self.run.work_dir).items():
                if step not in (state.global_step, state.best_global_step):
                    shutil.rmtree(checkpoint)
        self._last_saved = time.monotonic()
        self._save_seconds = self._last_saved - self._step_ended
        if self.out_of_time and not control.should_training_stop:
            raise OutOfTimeError(
                f"the {self.hours:g} hours are over, at step {state.global_step} of "
                f"{state.max_steps}; run the same again to go on from there.",
            )

    @contextmanager
    def handle_interrupts(self) -> Iterator[None]:
        """Record Ctrl-C and a handled SIGTERM in this context, so that the next step stops.

        The handlers of the program run, too, and usually raise a ``KeyboardInterrupt``. Python
        ignores it where a destructor or a callback from C is running. The record is for that case.
        SIGTERM keeps its default action if the program has no handler.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # other threads cannot set handlers
            return

        previous_handlers: dict[int, Callable[[int, FrameType | None], object]] = {
            signal.SIGINT: signal.default_int_handler,
        }
        handler_of_program = signal.getsignal(signal.SIGTERM)
        if callable(handler_of_program):
            previous_handlers[signal.SIGTERM] = handler_of_program

        def handle(number: int, frame: FrameType | None) -> None:
            """Record the signal, and call the handler of the program."""
            self.interrupted = True
            previous_handlers[number](number, frame)

        replaced = {number: signal.signal(number, handle) for number in previous_handlers}
        try:
            yield
        finally:
            for number, previous_handler in replaced.items():
                signal.signal(number, previous_handler)


class _TermCounts(NamedTuple):
    """Means over the vectors of a side since the last log.

    Attributes:
        active: mean number of active terms of a row.
        empty: share of rows without a term.
        width: size of the vocabulary.
    """

    active: float
    empty: float
    width: int


class _TermCounter:
    """Counts active terms of the rows that a penalty reads, without waiting for the device.

    It replaces the penalty's ``compute_loss_from_embeddings``. The penalty keeps its class, whose
    name the model card shows.

    Args:
        penalty: penalty of a ``SpladeLoss``.
    """

    def __init__(self, penalty: Module) -> None:
        self.penalty = penalty
        self._compute_loss = penalty.compute_loss_from_embeddings
        self._steps: list[Tensor] = []
        self._width = 0
        penalty.compute_loss_from_embeddings = self

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Count the terms of ``embeddings`` ``[B, V]``, and return their penalty."""
        if self.penalty.training and torch.is_grad_enabled():
            active = (embeddings.detach() != 0).sum(dim=1)
            is_empty = active == 0
            self._steps.append(torch.stack([active.float().mean(), is_empty.float().mean()]))
            self._width = embeddings.size(1)
        penalty: Tensor = self._compute_loss(embeddings)
        return penalty

    def take(self, world: World) -> _TermCounts | None:
        """Return the means since the last call over all ranks; ``None`` without a step."""
        if not self._steps:
            return None
        means_by_rank = world.gather(torch.stack(self._steps).mean(dim=0).tolist())
        active = sum(mean_active for mean_active, _ in means_by_rank) / world.size
        empty = sum(mean_empty for _, mean_empty in means_by_rank) / world.size
        self._steps = []
        return _TermCounts(active, empty, self._width)


class SparseWatch(SpladeRegularizerWeightSchedulerCallback):
    """Callback that raises the weights of penalties, and detects dead and dense models.

    Active terms are added to the logs. A training that cannot recover is stopped.

    Args:
        loss: the ``SpladeLoss``.
        warmups: share of the steps over which the weight of a side's penalty rises.
        bounded: whether encoding keeps a limited number of terms; then any number is allowed while
            training.
        world: all ranks of the training.
    """

    def __init__(
        self,
        loss: SpladeLoss,
        warmups: Mapping[str, float],
        bounded: bool = False,
        world: World | None = None,
    ) -> None:
        """Attach a counter of active terms to the penalty of each side.

        Args:
            loss: a loss with penalties of both sides, queries and documents.
            warmups: side -> share of the steps over which the weight of its penalty rises.
            bounded: whether encoding keeps a limited number of terms, so that vectors may be dense
                while training.
            world: all ranks of the training.
        """
        super().__init__(loss)
        self.warmups = warmups
        self.bounded = bounded
        self.world = World() if world is None else world
        self.counters = {side: _TermCounter(getattr(loss, f"{side}_regularizer")) for side in SIDES}
        self.first_counts: dict[str, _TermCounts] = {}  # of the first log, by side
        self.last_counts: dict[str, _TermCounts] = {}  # of the last log, by side
        # consecutive logs in which the vectors of a side, or the gradient, were zero
        self.zero_logs = dict.fromkeys((*SIDES, "gradient"), 0)

    def on_step_begin(
        self,
        args: object,
        state: TrainerState,
        control: object,
        **_: object,
    ) -> None:
        """Set the weight of each penalty for the next step.

        The weight rises quadratically during the warm-up, from 0 to its maximum. Attributes of the
        stock base class have the current and the maximum weights.

        Args:
            args: not used.
            state: number of steps that were done.
            control: not used.
        """
        if self.total_steps is None:  # the training has not begun
            return
        for side, warmup_ratio in self.warmups.items():
            warmup_steps = max(1, int(self.total_steps * warmup_ratio))
            progress = float(min(1.0, state.global_step / warmup_steps))
            weight = getattr(self, f"max_{side}_regularizer_weight") * progress**2
            setattr(self, f"_current_{side}_regularizer_weight", weight)
            setattr(self.loss, f"{side}_regularizer_weight", weight)

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: object,
        logs: dict[str, float] | None = None,
        **options: object,
    ) -> None:
        """Add the mean number of active terms of each side to the logs, and detect a dead model.

        Args:
            args: the trainer's arguments.
            state: number of steps that were done.
            control: passed to the stock callback.
            logs: names and values that are logged; active terms are added.
            options: passed to the stock callback.

        Raises:
            TrainingError: if all vectors of a side, or the gradient, were zero in several logs.
        """
        super().on_log(args, state, control, logs=logs, **options)
        if not logs or "loss" not in logs:
            return
        for side, counter in self.counters.items():
            counts = counter.take(self.world)
            if counts is None:
                continue
            self.first_counts.setdefault(side, counts)
            self.last_counts[side] = counts
            logs[f"{side}_active_terms"] = counts.active
            self._note_zero(side, is_zero=counts.empty == 1.0)
        if "grad_norm" in logs:
            self._note_zero("gradient", is_zero=float(logs["grad_norm"]) == 0.0)
        self._check_alive(state.global_step)

    def _note_zero(self, quantity: str, is_zero: bool) -> None:
        """Count a log in which a quantity is zero; another log resets the count."""
        self.zero_logs[quantity] = self.zero_logs[quantity] + 1 if is_zero else 0

    def _check_alive(self, step: int) -> None:
        """Stop a training that learns nothing any more.

        Args:
            step: number of steps that were done, for the message.

        Raises:
            TrainingError: if all vectors of a side, or the gradient, were zero in the last logs.
        """
        for side in SIDES:
            if self.zero_logs[side] >= PATIENCE:
                raise TrainingError(
                    f"every {side} vector is zero after {step} steps: the model is dead, and no "
                    f"gradient revives it. {REMEDY}.",
                )
        if self.zero_logs["gradient"] >= PATIENCE:
            raise TrainingError(
                f"the gradient is zero after {step} steps: nothing is learnt any more. {REMEDY}.",
            )

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about empty or nearly dense vectors at the end of the training.

        Vectors are judged by the last log. Nearly dense ones are no problem if encoding keeps a
        limited number of terms.
        """
        messages = []
        for side, counts in self.last_counts.items():  # queries and documents
            if counts.empty > EMPTY_SHARE:
                messages.append(f"{counts.empty:.0%} of the {side} vectors have no term. {REMEDY}.")
            is_nearly_dense = counts.active > DENSE_SHARE * counts.width
            if is_nearly_dense and not self.bounded:
                initial = self.first_counts[side].active
                messages.append(
                    f"{side} vectors have {counts.active:.0f} of {counts.width} terms "
                    f"({initial:.0f} at the start), too many for an index: train longer, or with a "
                    "larger weight of the penalties.",
                )
        return tuple(messages)
