"""Watches a sparse model while it trains: dead vectors, vectors that fill up, no gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from tilefold.recipes._run import TrainingError

FULL = 0.25  # share of the vocabulary above which vectors count as nearly dense
DEAD_ROWS = 0.5  # share of rows without a term above which a warning is due
PATIENCE = 2  # logs in a row
REMEDY = (
    "Train again with a smaller learning rate or a smaller weight of the penalties; a masked-LM head with large logits "
    "(ModernBERT, Ettin) needs document.logit_scale=0.0625"
)


class _Seen(NamedTuple):
    """The vectors of a side since the last log."""

    active: float  # mean number of terms of a row
    empty: float  # share of rows without a term
    width: int  # of the vocabulary


class _Counting(nn.Module):
    """A penalty that also counts the terms of every row it sees; nothing waits for the device."""

    def __init__(self, penalty: Any) -> None:
        super().__init__()
        self.penalty = penalty
        self.steps: list[Tensor] = []
        self.width = 0

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            active = (embeddings.detach() != 0).sum(dim=1)
            self.steps.append(torch.stack([active.float().mean(), (active == 0).float().mean()]))
            self.width = embeddings.size(1)
        value: Tensor = self.penalty.compute_loss_from_embeddings(embeddings)
        return value

    def take(self) -> _Seen | None:
        """The means since the last call."""
        if not self.steps:
            return None
        active, empty = torch.stack(self.steps).mean(dim=0).tolist()
        self.steps = []
        return _Seen(active, empty, self.width)

    def get_config_dict(self) -> dict[str, Any]:
        config: dict[str, Any] = getattr(self.penalty, "get_config_dict", dict)()
        return config


class Watch(TrainerCallback):
    """Trainer callback: has a ``SpladeLoss`` count terms, adds them to the logs, and stops what cannot recover.

    A `bounded` model keeps so many terms when it encodes, and may have any number while it trains.
    """

    def __init__(self, loss: Any, bounded: bool = False) -> None:
        self.bounded = bounded
        self.counters = {side: _Counting(getattr(loss, f"{side}_regularizer")) for side in ("query", "document")}
        for side, counter in self.counters.items():
            setattr(loss, f"{side}_regularizer", counter)
        self.first: dict[str, _Seen] = {}
        self.last: dict[str, _Seen] = {}
        self.dead = {"query": 0, "document": 0, "gradient": 0}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        for side, counter in self.counters.items():
            seen = counter.take()
            if seen is None:
                continue
            self.first.setdefault(side, seen)
            self.last[side] = seen
            logs[f"{side}_active_terms"] = seen.active
            self._count(side, seen.empty == 1.0)
        if "grad_norm" in logs:
            self._count("gradient", float(logs["grad_norm"]) == 0.0)
        step = state.global_step
        for side in ("query", "document"):
            if self.dead[side] >= PATIENCE:
                raise TrainingError(
                    f"every {side} vector is zero after {step} steps: the model is dead, and no gradient revives "
                    f"it. {REMEDY}."
                )
        if self.dead["gradient"] >= PATIENCE:
            raise TrainingError(f"the gradient is zero after {step} steps: nothing is learnt any more. {REMEDY}.")

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
                    "many for an index: train longer, or with a larger weight of the penalties."
                )
        return tuple(found)
