"""Watches a sparse model while it trains: dead vectors, vectors that fill up, no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from tilefold.recipes._run import TrainingError

__all__ = ["Seen", "watch"]

FULL = 0.25  # share of the vocabulary above which vectors count as nearly dense
DEAD_ROWS = 0.5  # share of rows without a term above which a warning is due
PATIENCE = 2  # logs in a row
REMEDY = (
    "Train again with a smaller learning rate or a smaller weight of the penalties; a masked-LM head with large logits "
    "(ModernBERT, Ettin) needs document.logit_scale=0.0625"
)


@dataclass(frozen=True)
class Seen:
    """The vectors of a side since the last log.

    Attributes:
        active: mean number of terms of a row.
        empty: share of rows without a term.
        width: the size of the vocabulary.
    """

    active: float
    empty: float
    width: int


def watch(loss: Any, bounded: bool = False) -> Watch:
    """Let a ``SpladeLoss`` count terms, and return the trainer callback that reads them.

    The callback adds ``query_active_terms`` and ``document_active_terms`` to the logs and stops a training that
    cannot recover; ``warnings()`` says what else went wrong. A ``bounded`` model keeps so many terms when it encodes,
    and may have any number while it trains.
    """
    counters = {side: Counting(getattr(loss, f"{side}_regularizer")) for side in ("query", "document")}
    for side, counter in counters.items():
        setattr(loss, f"{side}_regularizer", counter)
    return Watch(counters, bounded)


class Counting(nn.Module):
    """A penalty that also counts the terms of every row it sees; nothing waits for the device."""

    def __init__(self, penalty: Any) -> None:
        super().__init__()
        self.penalty = penalty
        self.steps: list[Tensor] = []
        self.width = 0

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """The value of the penalty."""
        if self.training and torch.is_grad_enabled():
            active = (embeddings.detach() != 0).sum(dim=1)
            self.steps.append(torch.stack([active.float().mean(), (active == 0).float().mean()]))
            self.width = embeddings.size(1)
        value: Tensor = self.penalty.compute_loss_from_embeddings(embeddings)
        return value

    def take(self) -> Seen | None:
        """The means since the last call."""
        if not self.steps:
            return None
        active, empty = torch.stack(self.steps).mean(dim=0).tolist()
        self.steps = []
        return Seen(active, empty, self.width)

    def get_config_dict(self) -> dict[str, Any]:
        """The penalty's entry of the model card."""
        config: dict[str, Any] = getattr(self.penalty, "get_config_dict", dict)()
        return config


class Watch(TrainerCallback):
    """Reads the counters at every log.

    Args:
        counters: by side.
        bounded: as in :func:`watch`.
    """

    def __init__(self, counters: dict[str, Counting], bounded: bool) -> None:
        self.counters, self.bounded = counters, bounded
        self.first: dict[str, Seen] = {}
        self.last: dict[str, Seen] = {}
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
        self._stop_the_dead(state.global_step)

    def _count(self, what: str, bad: bool) -> None:
        self.dead[what] = self.dead[what] + 1 if bad else 0

    def _stop_the_dead(self, step: int) -> None:
        for side in ("query", "document"):
            if self.dead[side] >= PATIENCE:
                raise TrainingError(
                    f"every {side} vector is zero after {step} steps: the model is dead, and no gradient revives "
                    f"it. {REMEDY}."
                )
        if self.dead["gradient"] >= PATIENCE:
            raise TrainingError(f"the gradient is zero after {step} steps: nothing is learnt any more. {REMEDY}.")

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
