"""Callbacks of a training run: progress, checkpoints, interrupts, penalties and dead models."""

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
from tilefold.recipes._settings import TrainingSettings
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
MAX_ACTIVE_SHARE = 0.25  # vectors with more active terms, relative to the vocabulary, are a warning
MAX_EMPTY_SHARE = 0.5  # more vectors without a term are a warning
DEAD_AFTER_LOGS = 2  # consecutive logs of zeros after which the model is dead
DEFAULT_SAVE_STEPS = 25  # steps between checkpoints of a recipe without save_steps
MAX_SAVE_SHARE = 0.05  # largest share of the time for saving checkpoints every few steps
SECONDS_PER_MINUTE = 60
SECONDS_PER_HOUR = 3600
REMEDY = (
    "Train again with a smaller learning rate or a smaller weight of the penalties; a masked-LM "
    "head with large logits (ModernBERT, Ettin) needs document.logit_scale=0.0625"
)


class _SaveRequest(IntEnum):
    """Request of rank 0 after a step. The highest request of all ranks applies."""

    NONE = 0
    SAVE = 1
    SAVE_AND_STOP = 2


class _SaveClock:
    """Clock that decides when a training run saves a checkpoint, and when its time is up.

    Args:
        recipe: the recipe, with the fields ``save_steps`` and ``save_minutes``.
        hours: time limit of the call; ``None`` for no limit.
    """

    def __init__(self, recipe: TrainingSettings, hours: float | None) -> None:
        self._recipe = recipe
        self._hours = hours
        self._started = time.monotonic()
        self._step_ended = self._started
        self._last_save = self._started  # when the last checkpoint was requested or written
        self._save_seconds = 0.0  # duration of the last checkpoint

    def request_after(self, step: int) -> _SaveRequest:
        """Return whether to save a checkpoint after a step, and whether to stop.

        Args:
            step: number of the step that has just ended.
        """
        now = time.monotonic()
        self._step_ended = now
        is_due = self._is_save_due(step)
        if is_due:
            self._last_save = now
        if self._hours is not None and now - self._started >= SECONDS_PER_HOUR * self._hours:
            return _SaveRequest.SAVE_AND_STOP
        return _SaveRequest.SAVE if is_due else _SaveRequest.NONE

    def _is_save_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step.

        One is due every ``save_minutes`` minutes. A recipe without ``save_steps`` also saves every
        25 steps, unless that would take more than a twentieth of the time.

        Args:
            step: number of the step that has just ended.
        """
        seconds_since_save = self._step_ended - self._last_save
        if seconds_since_save >= SECONDS_PER_MINUTE * self._recipe.save_minutes:
            return True
        return (
            self._recipe.save_steps is None
            and step % DEFAULT_SAVE_STEPS == 0
            and seconds_since_save * MAX_SAVE_SHARE >= self._save_seconds
        )

    def record_save(self) -> None:
        """Record that the checkpoint after the last step has been written."""
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - self._step_ended


class Watcher(TrainerCallback):
    """Callback that reports steps, stores losses and requests checkpoints.

    It stops a training run whose loss is not finite, after Ctrl-C, and when its time is up.

    Args:
        job: the training job.
        batches: the batch sampler of the job.

    Attributes:
        counts: numbers of pairs of all steps, including the steps before an interruption.
        ndcg: nDCG@10 of the last evaluation.
        losses: the last logged losses.
        first_ranking_loss: ranking loss of the first log, without penalties.
        ranking_loss: ranking loss of the last log.
        interrupted: whether Ctrl-C was pressed, or SIGTERM received.
        out_of_time: whether the time limit was reached before the last step.
    """

    def __init__(self, job: TrainingJob, batches: TrainingBatches) -> None:
        """Create the callback, and start the clock of the time limit.

        Args:
            job: the training job: its recipe, run, ranks, time limit and progress function.
            batches: the batch sampler of the job, which knows the number of pairs of each step.
        """
        self.counts = PairCounts()
        self.ndcg: float | None = None
        self.losses: Losses | None = None
        self.first_ranking_loss: float | None = None
        self.ranking_loss: float | None = None
        self.interrupted = False
        self.out_of_time = False
        self._job = job
        self._batches = batches
        self._clock = _SaveClock(job.recipe, job.call.hours)

    def on_train_begin(self, args: Any, state: TrainerState, control: object, **_: object) -> None:
        """Use the number of steps between logs of this call's recipe.

        The state may be restored from a checkpoint, with the number of an interrupted call.
        """
        state.logging_steps = args.logging_steps

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: object,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        """Store the logged losses or nDCG@10, and stop training if the loss has diverged.

        The trainer calls this method with either the losses of the last steps or the measures of
        an evaluation.

        Args:
            args: the trainer's arguments. ``metric_for_best_model`` is the name of nDCG@10.
            state: the trainer's state. The values of `logs` are added to its last log.
            control: not used.
            logs: name -> logged value.

        Raises:
            TrainingError: if the loss is infinite or NaN.
        """
        if not logs:
            return
        # The progress of later steps shows the last nDCG@10.
        self.ndcg = logs.get(str(args.metric_for_best_model), self.ndcg)
        if "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} after {state.global_step} steps: the training has diverged. "
                "Train with a smaller learning_rate, from the start (--fresh, or resume=False in "
                "Python).",
            )
        # Losses with penalties also log their parts. Any other loss is a ranking loss.
        self.ranking_loss = float(logs.get(RANKING_LOSS, loss))
        penalties = [float(logs[name]) for name in PENALTIES if name in logs]
        sum_of_penalties = sum(penalties) if penalties else None
        self.losses = Losses(loss, self.ranking_loss, sum_of_penalties)
        # The trainer has stored a copy of `logs` before other callbacks added values.
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
            state: the trainer's state, with the number of the step.
            control: the trainer's control. ``should_save`` makes it write a checkpoint.

        Raises:
            KeyboardInterrupt: after Ctrl-C, or a SIGTERM that the program handles.
        """
        if self.interrupted:
            raise KeyboardInterrupt
        self.counts = self.counts.add_step(self._batches.pairs_of_step(state.global_step))
        self._report(state)
        request = _SaveRequest.NONE
        if self._job.world.rank == 0:  # one clock decides for all ranks
            request = self._clock.request_after(state.global_step)
        # With several ranks, this is the request after the previous step, so that no step waits
        # for rank 0.
        request_of_all = self._job.world.previous_max_over_ranks(int(request))
        save_steps = self._job.recipe.save_steps
        if request_of_all != _SaveRequest.NONE:
            control.should_save = True
        if save_steps is not None and state.global_step % save_steps == 0:
            control.should_save = True
        if request_of_all == _SaveRequest.SAVE_AND_STOP and state.global_step < state.max_steps:
            self.out_of_time = True  # on_save raises OutOfTimeError after the checkpoint

    def _report(self, state: TrainerState) -> None:
        """Call the progress function with the step, the last losses and the evaluations.

        Args:
            state: the trainer's state, with the number of the step and the best evaluation.
        """
        if self.losses is not None and self.ndcg is not None:
            best_evaluation = (state.best_metric, state.best_global_step)
            self.losses = self.losses._replace(ndcg=self.ndcg, best=best_evaluation)
        if self._job.progress is not None:
            self._job.progress(state.global_step, state.max_steps, self.losses)

    def on_save(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
        """Mark the checkpoint that the trainer has written as complete, and remove older ones.

        A run resumes only from complete checkpoints. The checkpoint with the best evaluation stays.

        Args:
            args: not used.
            state: the trainer's state, with the steps of this and of the best evaluation.
            control: the trainer's control, which says whether training stops after this step.

        Raises:
            OutOfTimeError: if the time limit is reached.
        """
        work_dir = self._job.run.work_dir
        folder = work_dir / f"checkpoint-{state.global_step}"
        self._job.world.gather(None)  # waits until every rank has written its part
        if folder.is_dir() and self._job.world.rank == 0:
            record = {
                "step": state.global_step,
                "ended": control.should_training_stop,
                "pairs": asdict(self.counts),
            }
            write_json(folder / COMPLETE_FILE, record)
            # save_total_limit would remove older checkpoints before this one is complete.
            for step, checkpoint in complete_checkpoints(work_dir).items():
                if step not in (state.global_step, state.best_global_step):
                    shutil.rmtree(checkpoint)
        self._clock.record_save()
        if self.out_of_time and not control.should_training_stop:
            raise OutOfTimeError(
                f"the {self._job.call.hours:g} hours are over, at step {state.global_step} of "
                f"{state.max_steps}; run the same command again to continue.",
            )

    @contextmanager
    def handle_interrupts(self) -> Iterator[None]:
        """Stop at the next step if Ctrl-C or SIGTERM interrupts the program in this context.

        Both signals usually raise a ``KeyboardInterrupt`` at once, from Python's default handler of
        SIGINT or the program's handler of SIGTERM. But Python drops an exception that is raised in
        a destructor or in a callback from C. The flag ``interrupted`` is therefore set as well.
        Without a handler of the program, SIGTERM keeps its default action.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can set handlers
            return

        called_handlers: dict[int, Callable[[int, FrameType | None], object]] = {
            signal.SIGINT: signal.default_int_handler,
        }
        sigterm_handler = signal.getsignal(signal.SIGTERM)
        if callable(sigterm_handler):
            called_handlers[signal.SIGTERM] = sigterm_handler

        def handle(number: int, frame: FrameType | None) -> None:
            """Set the flag, and call the handler that raises the exception."""
            self.interrupted = True
            called_handlers[number](number, frame)

        previous_handlers = {number: signal.signal(number, handle) for number in called_handlers}
        try:
            yield
        finally:
            for number, previous_handler in previous_handlers.items():
                signal.signal(number, previous_handler)


class _TermCounts(NamedTuple):
    """Active terms of the query vectors, or of the document vectors, since the last log.

    Attributes:
        active: mean number of active terms of a vector.
        empty_share: share of vectors without a term.
        vocab_size: size of the vocabulary.
    """

    active: float
    empty_share: float
    vocab_size: int


class _TermCounter:
    """Counts active terms of the vectors that a penalty reads, without waiting for the GPU.

    It replaces the penalty's method ``compute_loss_from_embeddings``. A subclass of the penalty
    would appear in the model card.

    Args:
        penalty: penalty of a ``SpladeLoss``.
    """

    def __init__(self, penalty: Module) -> None:
        self.penalty = penalty
        self._compute_loss = penalty.compute_loss_from_embeddings
        # mean number of active terms and share of empty vectors of each step, `[2]`
        self._means: list[Tensor] = []
        self._vocab_size = 0
        penalty.compute_loss_from_embeddings = self

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Count the terms of ``embeddings`` ``[B, V]``, and return their penalty."""
        if self.penalty.training and torch.is_grad_enabled():
            active = (embeddings.detach() != 0).sum(dim=1)
            is_empty = active == 0
            self._means.append(torch.stack([active.float().mean(), is_empty.float().mean()]))
            self._vocab_size = embeddings.size(1)
        penalty: Tensor = self._compute_loss(embeddings)
        return penalty

    def take(self, world: World) -> _TermCounts | None:
        """Return the means over all ranks and all steps since the last call.

        Args:
            world: all ranks of the training run.

        Returns:
            The means; ``None`` if no step has run since the last call.
        """
        if not self._means:
            return None
        means_by_rank = world.gather(torch.stack(self._means).mean(dim=0).tolist())
        active = sum(mean_active for mean_active, _ in means_by_rank) / world.size
        empty_share = sum(mean_empty for _, mean_empty in means_by_rank) / world.size
        self._means = []
        return _TermCounts(active, empty_share, self._vocab_size)


class SparseWatch(SpladeRegularizerWeightSchedulerCallback):
    """Callback that raises the weights of penalties, and watches the number of active terms.

    Active terms are added to the logs. Training stops if the model is dead, which means that its
    vectors or gradients are all zero.

    Args:
        loss: the ``SpladeLoss``.
        warmups: side -> share of the steps over which the weight of its penalty rises.
        has_term_limit: whether encoding keeps a limited number of terms per text.
        world: all ranks of the training run.
    """

    def __init__(
        self,
        loss: SpladeLoss,
        warmups: Mapping[str, float],
        has_term_limit: bool = False,
        world: World | None = None,
    ) -> None:
        """Create the callback, and count the active terms that the penalties of a loss read.

        Args:
            loss: a loss with penalties of queries and of documents.
            warmups: side (``"query"`` or ``"document"``) -> share of the steps over which the
                weight of its penalty rises.
            has_term_limit: whether encoding keeps a limited number of terms per text. If so, nearly
                dense vectors in training are not a problem.
            world: all ranks of the training run; default: the current process group.
        """
        super().__init__(loss)
        self.warmups = warmups
        self.has_term_limit = has_term_limit
        self.world = World() if world is None else world
        self.counters = {side: _TermCounter(getattr(loss, f"{side}_regularizer")) for side in SIDES}
        # side -> counts at the first and at the last log, for the warnings after training
        self.first_counts: dict[str, _TermCounts] = {}
        self.last_counts: dict[str, _TermCounts] = {}
        # number of consecutive logs in which the vectors of a side, or the gradient, were zero
        self.zero_log_counts = dict.fromkeys((*SIDES, "gradient"), 0)

    def on_step_begin(
        self,
        args: object,
        state: TrainerState,
        control: object,
        **_: object,
    ) -> None:
        """Set the weight of each penalty for the next step.

        The weight rises quadratically during the warm-up, from 0 to its maximum.

        Args:
            args: not used.
            state: the trainer's state, with the number of completed steps.
            control: not used.
        """
        if self.total_steps is None:  # training has not begun
            return
        for side, warmup_ratio in self.warmups.items():
            warmup_steps = max(1, int(self.total_steps * warmup_ratio))
            progress = float(min(1.0, state.global_step / warmup_steps))
            weight = getattr(self, f"max_{side}_regularizer_weight") * progress**2
            setattr(self.loss, f"{side}_regularizer_weight", weight)
            # The base class logs this attribute.
            setattr(self, f"_current_{side}_regularizer_weight", weight)

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: object,
        logs: dict[str, float] | None = None,
        **options: object,
    ) -> None:
        """Add the mean number of active terms to the logs, and detect a dead model.

        A model is dead if all its vectors or gradients are zero.

        Args:
            args: the trainer's arguments.
            state: the trainer's state, with the number of completed steps.
            control: the trainer's control.
            logs: name -> logged value. The active terms of queries and of documents are added.
            options: keyword arguments of the base class.

        Raises:
            TrainingError: if the model is dead.
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
            self._count_zero_log(side, is_zero=counts.empty_share == 1.0)
        if "grad_norm" in logs:
            self._count_zero_log("gradient", is_zero=float(logs["grad_norm"]) == 0.0)
        self._check_alive(state.global_step)

    def _count_zero_log(self, quantity: str, is_zero: bool) -> None:
        """Increment the count of consecutive logs in which a quantity is zero, or reset it."""
        self.zero_log_counts[quantity] = self.zero_log_counts[quantity] + 1 if is_zero else 0

    def _check_alive(self, step: int) -> None:
        """Stop training once the model no longer learns.

        Args:
            step: number of completed steps, for the message.

        Raises:
            TrainingError: if all query vectors, all document vectors or the gradient were zero in
                the last ``DEAD_AFTER_LOGS`` logs.
        """
        for side in SIDES:
            if self.zero_log_counts[side] >= DEAD_AFTER_LOGS:
                raise TrainingError(
                    f"every {side} vector is zero after {step} steps: the model is dead, and no "
                    f"gradient revives it. {REMEDY}.",
                )
        if self.zero_log_counts["gradient"] >= DEAD_AFTER_LOGS:
            raise TrainingError(
                f"the gradient is zero after {step} steps: the model no longer learns. {REMEDY}.",
            )

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about empty or nearly dense vectors at the last log.

        Nearly dense vectors are fine if encoding keeps a limited number of terms.
        """
        messages = []
        for side, counts in self.last_counts.items():  # queries and documents
            if counts.empty_share > MAX_EMPTY_SHARE:
                messages.append(
                    f"{counts.empty_share:.0%} of the {side} vectors have no term. {REMEDY}.",
                )
            is_nearly_dense = counts.active > MAX_ACTIVE_SHARE * counts.vocab_size
            if is_nearly_dense and not self.has_term_limit:
                initial = self.first_counts[side].active
                messages.append(
                    f"{side} vectors have {counts.active:.0f} of {counts.vocab_size} terms "
                    f"({initial:.0f} at the start), too many for an index: train longer, or with a "
                    "larger weight of the penalties.",
                )
        return tuple(messages)
