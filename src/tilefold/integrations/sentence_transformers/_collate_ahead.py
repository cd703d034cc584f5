"""Batches of a stock trainer that are made in a thread while the step before them runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info


def collate_ahead(trainer: Any) -> None:
    """Let a stock trainer of sentence-transformers tokenise its next batch while the step before it runs.

    The trainer's own data collator then works in a thread, into pinned memory, and tensors are copied to the GPU
    without waiting for them. Samplers, order, random numbers and batches stay the same: the trainer already asks for a
    batch one step before it uses it. With ``dataloader_num_workers`` above 0 nothing changes, because the collator
    works in other processes then. A second call does nothing.

    Args:
        trainer: a ``SparseEncoderTrainer``, ``MultiVectorEncoderTrainer`` or another trainer of sentence-transformers.

    Raises:
        TypeError: if ``trainer`` has no data collator.
        ValueError: for an iterable dataset, whose batches one process cuts for all others.
    """
    collator = getattr(trainer, "data_collator", None)
    if collator is None:
        raise TypeError(
            f"trainer must be a trainer of sentence-transformers, got {type(trainer).__name__} without a data collator."
        )
    for name in ("train_dataset", "eval_dataset"):
        if isinstance(getattr(trainer, name, None), IterableDataset):
            raise ValueError(f"{name} must not be iterable to be collated ahead, got one; use a Dataset with a length.")
    if not isinstance(collator, AheadCollator):
        trainer.data_collator = AheadCollator(collator)


class AheadCollator:
    """A data collator that returns at once and works in a thread of its own; see :func:`collate_ahead`.

    Args:
        collator: a data collator of sentence-transformers, whose attributes this one has, too.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        self.collator = collator
        self._thread: ThreadPoolExecutor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "collator":
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"collator": self.collator, "_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        """A :class:`PendingBatch`; in a worker process of a data loader, the batch itself."""
        if get_worker_info() is not None:
            return self.collator(features)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tilefold-collate")
        return PendingBatch(self._thread, self._thread.submit(self.collator, features))


class PendingBatch:
    """A batch that a thread is making. ``to`` waits for it and gives the ``dict``.

    Args:
        thread: where it is made, and then pinned.
        made: the batch to be.
    """

    def __init__(self, thread: ThreadPoolExecutor, made: Future[dict[str, Any]]) -> None:
        self._thread = thread
        self._made = made

    def pin_memory(self) -> PendingBatch:
        """The same batch, which the thread copies to pinned memory when it has made it."""
        made = self._made
        return PendingBatch(self._thread, self._thread.submit(lambda: _pinned(made.result())))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> dict[str, Any]:
        """The batch on ``device``; errors of the collator are raised here."""
        # what is pinned may be copied while others work: its memory is not used again before the copy is done
        return {
            key: value.to(device, non_blocking=non_blocking or value.is_pinned())
            if isinstance(value, Tensor)
            else value
            for key, value in self._made.result().items()
        }


def _pinned(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.pin_memory() if isinstance(value, Tensor) else value for key, value in batch.items()}
