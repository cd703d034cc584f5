"""Callbacks of a training: what it reports and saves, Ctrl-C, penalties that rise, vectors that die
or fill up.
"""

from __future__ import annotations

import math
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
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
from tilefold.recipes._run import WHOLE, Losses, OutOfTimeError, TrainingError, complete_checkpoints
from tilefold.recipes._steps import PairCounts
from tilefold.recipes._training import TrainingJob

SIDES = ("query", "document")
# names of sentence-transformers -> those in the log of a run
NAMES = {"base_loss": "ranking_loss"} | {
    f"{side}_regularizer_loss": f"{side}_penalty" for side in SIDES
}
FULL = 0.25  # share of the vocabulary above which vectors count as nearly dense
DEAD_ROWS = 0.5  # share of rows without a term above which a warning is due
PATIENCE = 2  # logs in a row
SAVE_STEPS, SAVE_SHARE = 25, 0.05  # where a recipe names no steps; of the time, for checkpoints
REMEDY = (
    "Train again with a smaller learning rate or a smaller weight of the penalties; a masked-LM head with large logits "
    "(ModernBERT, Ettin) needs document.logit_scale=0.0625"
)


class Watcher(TrainerCallback):
    """Reports steps, keeps losses, stops where one is not finite or after Ctrl-C, and asks for
    checkpoints by time.
    """

    def __init__(self, job: TrainingJob, batches: TrainingBatches) -> None:
        self.batches = batches
        self.counts = PairCounts()  # of all steps, those before an interruption too
        self.progress, self.run, self.recipe, self.world = (
            job.progress,
            job.run,
            job.recipe,
            job.world,
        )
        self.ndcg: float | None = None  # of the last evaluation
        self.losses: Losses | None = None
        self.first_ranking_loss: float | None = None  # without regularisers
        self.ranking_loss: float | None = None
        self.interrupted = False
        self.saved = self.began = self.ended = time.monotonic()
        self.cost = 0.0  # seconds of the last checkpoint
        self.hours, self.over = job.call.hours, False

    def on_train_begin(self, args: Any, state: TrainerState, control: object, **_: object) -> None:
        state.logging_steps = args.logging_steps  # a checkpoint brings back those of its run

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: object,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        self.ndcg = (logs or {}).get(str(args.metric_for_best_model), self.ndcg)
        if logs and "loss" in logs:
            loss = float(logs["loss"])
            if not math.isfinite(loss):
                remedy = "Train with a smaller learning_rate, from the start (resume=False)."
                after = f"after {state.global_step} steps: the training has diverged"
                raise TrainingError(f"the loss is {loss} {after}. {remedy}")
            self.ranking_loss = float(logs.get("base_loss", loss))
            penalties = [
                float(logs[name]) for name in NAMES if name in logs and name != "base_loss"
            ]
            self.losses = Losses(loss, self.ranking_loss, sum(penalties) if penalties else None)
            state.log_history[-1].update(logs)  # which other callbacks have added to
            if self.first_ranking_loss is None:
                self.first_ranking_loss = self.ranking_loss

    def on_step_end(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
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
        self.ended = now = time.monotonic()
        steps, since, asked = self.recipe.save_steps, now - self.saved, 0
        seldom = (
            steps is None
            and state.global_step % SAVE_STEPS == 0
            and since * SAVE_SHARE >= self.cost
        )
        if self.world.rank == 0 and (seldom or since >= 60 * self.recipe.save_minutes):
            self.saved, asked = now, 1
        if (
            self.world.rank == 0
            and self.hours is not None
            and now - self.began >= 3600 * self.hours
        ):
            asked = 2
        found = self.world.max_over_ranks(asked)
        control.should_save = (
            control.should_save or found > 0 or bool(steps and state.global_step % steps == 0)
        )
        self.over = self.over or (found == 2 and state.global_step < state.max_steps)

    def on_save(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
        folder = self.run.work_dir / f"checkpoint-{state.global_step}"
        self.world.gather(None)  # every rank has left its part
        if folder.is_dir() and self.world.rank == 0:
            write_json(
                folder / WHOLE,
                {
                    "step": state.global_step,
                    "ended": control.should_training_stop,
                    "pairs": asdict(self.counts),
                },
            )
            for step, old in complete_checkpoints(
                self.run.work_dir,
            ).items():  # not before: the stock limit does
                if step not in (state.global_step, state.best_global_step):
                    shutil.rmtree(old)
        self.saved = time.monotonic()
        self.cost = self.saved - self.ended
        if self.over and not control.should_training_stop:
            at = f"step {state.global_step} of {state.max_steps}"
            raise OutOfTimeError(
                f"the {self.hours:g} hours are over, at {at}; run the same again to go on from there.",
            )

    @contextmanager
    def heeding_interrupts(self) -> Iterator[None]:
        """Let Ctrl-C stop training at the next step: Python drops what a destructor or a callback
        from C raises.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self.interrupted = True
            signal.default_int_handler(number, frame)

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class _Seen(NamedTuple):
    """The vectors of a side since the last log."""

    active: float  # mean number of terms of a row
    empty: float  # share of rows without a term
    width: int  # of the vocabulary


class _Counting:
    """Counts the terms of every row that a penalty sees; nothing waits for the device."""

    def __init__(self, penalty: Module) -> None:
        self.penalty, self._stock = penalty, penalty.compute_loss_from_embeddings
        self.steps: list[Tensor] = []
        self.width = 0
        penalty.compute_loss_from_embeddings = (
            self  # of this object alone, which keeps its class for the card
        )

    def __call__(self, embeddings: Tensor) -> Tensor:
        if self.penalty.training and torch.is_grad_enabled():
            active = (embeddings.detach() != 0).sum(dim=1)
            self.steps.append(torch.stack([active.float().mean(), (active == 0).float().mean()]))
            self.width = embeddings.size(1)
        value: Tensor = self._stock(embeddings)
        return value

    def take(self, world: World) -> _Seen | None:
        """The means since the last call, over all ranks."""
        if not self.steps:
            return None
        means = world.gather(torch.stack(self.steps).mean(dim=0).tolist())
        active, empty = (sum(column) / world.size for column in zip(*means, strict=True))
        self.steps = []
        return _Seen(active, empty, self.width)


class SparseWatch(SpladeRegularizerWeightSchedulerCallback):
    """Raises the weights of a ``SpladeLoss``, with a warm-up (share of the steps) for each side,
    and counts terms.

    The counts are added to the logs, and a training that cannot recover is stopped. A `bounded`
    model keeps so many terms when it encodes, and may have any number while it trains.
    """

    def __init__(
        self,
        loss: SpladeLoss,
        warmups: Mapping[str, float],
        bounded: bool = False,
        world: World | None = None,
    ) -> None:
        super().__init__(loss)
        self.warmups, self.bounded, self.world = warmups, bounded, world or World()
        self.counters = {side: _Counting(getattr(loss, f"{side}_regularizer")) for side in SIDES}
        self.first: dict[str, _Seen] = {}
        self.last: dict[str, _Seen] = {}
        self.dead = dict.fromkeys((*SIDES, "gradient"), 0)

    def on_step_begin(
        self,
        args: object,
        state: TrainerState,
        control: object,
        **_: object,
    ) -> None:
        for side, ratio in self.warmups.items() if self.total_steps is not None else ():
            risen = float(min(1.0, state.global_step / max(1, int(self.total_steps * ratio)))) ** 2
            weight = getattr(self, f"max_{side}_regularizer_weight") * risen
            setattr(self, f"_current_{side}_regularizer_weight", weight)
            setattr(self.loss, f"{side}_regularizer_weight", weight)

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: object,
        logs: dict[str, float] | None = None,
        **more: object,
    ) -> None:
        super().on_log(args, state, control, logs=logs, **more)
        if not logs or "loss" not in logs:
            return
        for side, counter in self.counters.items():
            if (seen := counter.take(self.world)) is None:
                continue
            self.first.setdefault(side, seen)
            self.last[side] = seen
            logs[f"{side}_active_terms"] = seen.active
            self._count(side, seen.empty == 1.0)
        if "grad_norm" in logs:
            self._count("gradient", float(logs["grad_norm"]) == 0.0)
        step = state.global_step
        for side in SIDES:
            if self.dead[side] >= PATIENCE:
                dead = f"every {side} vector is zero after {step} steps"
                raise TrainingError(
                    f"{dead}: the model is dead, and no gradient revives it. {REMEDY}.",
                )
        if self.dead["gradient"] >= PATIENCE:
            raise TrainingError(
                f"the gradient is zero after {step} steps: nothing is learnt any more. {REMEDY}.",
            )

    def _count(self, what: str, bad: bool) -> None:
        self.dead[what] = self.dead[what] + 1 if bad else 0

    def warnings(self) -> tuple[str, ...]:
        """Warnings about the end of the training."""
        found = []
        for side, seen in self.last.items():
            if seen.empty > DEAD_ROWS:
                found.append(f"{seen.empty:.0%} of the {side} vectors have no term. {REMEDY}.")
            if seen.active > FULL * seen.width and not self.bounded:
                start = self.first[side].active
                found.append(
                    f"{side} vectors have {seen.active:.0f} of {seen.width} terms ({start:.0f} at the start), too "
                    "many for an index: train longer, or with a larger weight of the penalties.",
                )
        return tuple(found)
