"""Batches of a stock trainer that are made in a thread while the step before them runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from tilefold._typing import Model
from tilefold.integrations.sentence_transformers._columns import Batch, PackedForward, join_columns
from tilefold.integrations.sentence_transformers._packed_inputs import packed_inputs
from tilefold.integrations.sentence_transformers._step_graphs import StepGraphs
from tilefold.pipeline.truncated import Tally, Truncation, watching


def collate_ahead(trainer: Any, *, join: bool = True, graphs: bool = False, compiled: bool = False) -> None:
    """Let a stock trainer of sentence-transformers tokenise its next batch while the step before it runs.

    The trainer's own data collator then works in a thread, into pinned memory, and tensors are copied to the GPU
    without waiting for them. Samplers, order, random numbers and batches stay the same: the trainer already asks for a
    batch one step before it uses it. With ``dataloader_num_workers`` above 0 nothing changes, because the collator
    works in other processes then. A second call does nothing.

    The trainer's filter of NaN and infinity in what it logs (``logging_nan_inf_filter``) is turned off: for it the host
    waits for the loss after the forward pass and again after the backward pass of every step, while the GPU has nothing
    to do. A loss that is NaN is logged as NaN, and no longer as the mean of those before.

    If ``accelerate`` lets the only encoder of the model run on packed tokens, the thread packs all columns of a batch,
    so that no forward waits for the GPU to count tokens; they go through the encoder in one forward, and the loss takes
    the outputs column by column: less work for the host, the same numbers but for those of dropout. Losses that cut
    columns into mini-batches (cached ones) run each part by itself. Other models make the forwards of stock ones.

    With ``graphs``, the forward and backward pass of the encoder are captured as CUDA graphs and replayed, so that
    the host launches them with two calls. Unused sequences pad batches to a few total sizes (at most a fifth more
    tokens); batches of a new size run eagerly the first time and are captured the second time, which takes a fraction
    of a second. Gradients are written once and copied (memory of the weights once more), and come all at the end of the
    backward pass, so that several GPUs overlap nothing. Steps that a graph cannot repeat run as usual: see
    :class:`tilefold.integrations.sentence_transformers._step_graphs.StepGraphs`. Dropout draws other numbers.

    With ``compiled``, too, what is captured in 16 bits (bf16 or fp16 weights or autocast) are layers that
    ``torch.compile`` made, for any length, which fuses what lies between their products: about a seventh less work for
    the GPU, fewer results rounded on the way, and some ten seconds more at the start. In fp32 layers are captured as
    they are, since torch cannot compile its fp32 attention of packed sequences; where compiling fails, a warning says
    so.

    Args:
        trainer: a ``SparseEncoderTrainer``, ``MultiVectorEncoderTrainer`` or another trainer of sentence-transformers.
        join: one forward for all columns; False for a loss that calls ``backward`` once for each column.
        graphs: capture and replay the encoder as CUDA graphs.
        compiled: capture layers that ``torch.compile`` made; no effect in fp32.

    Raises:
        TypeError: if ``trainer`` has no data collator.
        ValueError: for an iterable dataset or ``dispatch_batches``, whose batches one process cuts for all others; or
            for ``graphs`` without ``join``, or of a model that is no sequence of modules whose first takes packed
            inputs; or for ``compiled`` without ``graphs``.
    """
    collator = getattr(trainer, "data_collator", None)
    if collator is None:
        raise TypeError(
            f"trainer must be a trainer of sentence-transformers, got {type(trainer).__name__} without a data collator."
        )
    for name in ("train_dataset", "eval_dataset"):
        if isinstance(getattr(trainer, name, None), IterableDataset):
            raise ValueError(f"{name} must not be iterable to be collated ahead, got one; use a Dataset with a length.")
    if getattr(getattr(trainer, "accelerator", None), "dispatch_batches", None):
        raise ValueError(
            "dispatch_batches must not be True for batches that are collated ahead, which nobody may cut, got True in "
            "the trainer's accelerator_config; leave it out, so that each process makes its own batches."
        )
    one = _one_packed_encoder(trainer.model)
    if graphs and not (one and join):
        raise ValueError(
            "graphs must be False for columns that are not joined or not packed, got True; call accelerate(model) "
            "first and leave join=True (a model with several encoders has no joined columns)."
        )
    if compiled and not graphs:
        raise ValueError("compiled must be False without graphs, got True; pass graphs=True, too.")
    trainer.args.logging_nan_inf_filter = False
    if one:
        encoder = trainer.model[0]
        encoder.forward.graphs = StepGraphs(encoder, compiled=compiled) if graphs else None
    if not isinstance(collator, AheadCollator):
        trainer.data_collator = AheadCollator(
            _without_detours(collator, trainer.model) if one else collator, join and one
        )


class AheadCollator:
    """A data collator that returns at once and works in a thread of its own; see :func:`collate_ahead`.

    Args:
        collator: a data collator of sentence-transformers, whose attributes this one has, too.
        join: join the packed columns of a batch.

    Attributes:
        cut: texts of the batches that were taken, and how many of them were cut at the model's lengths.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]], join: bool = False) -> None:
        self.collator = collator
        self.join = join
        self.cut = Tally()
        self._thread: ThreadPoolExecutor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "collator":
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"collator": self.collator, "join": self.join, "cut": self.cut, "_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        """A :class:`PendingBatch`; in a worker process of a data loader, the batch itself."""
        if get_worker_info() is not None:
            return self.collator(features)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tilefold-collate")
        seen = Truncation()

        def taken() -> None:
            for call in seen.calls:
                if call.texts >= len(features):  # else it was a prompt alone, for its length
                    self.cut.add("text", call.texts, len(call.cut), call.max_length)

        return PendingBatch(self._thread, self._thread.submit(self._made, features, seen), taken)

    def _made(self, features: list[dict[str, Any]], seen: Truncation) -> Batch:
        with watching(seen):
            if not self.join:
                return Batch(self.collator(features))
            with packed_inputs():
                return join_columns(self.collator(features))


class PendingBatch:
    """A batch that a thread is making. ``to`` waits for it and gives the ``dict``.

    Args:
        thread: where it is made, and then pinned.
        made: the batch to be.
        taken: called when it is taken: the last batch that was begun may never be.
    """

    def __init__(self, thread: ThreadPoolExecutor, made: Future[Batch], taken: Callable[[], None]) -> None:
        self._thread = thread
        self._made = made
        self._taken = taken

    def pin_memory(self) -> PendingBatch:
        """This batch, which the thread copies to pinned memory when it has made it."""
        made = self._made
        pinned = self._thread.submit(lambda: made.result().moved(Tensor.pin_memory))
        return PendingBatch(self._thread, pinned, self._taken)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> dict[str, Any]:
        """The batch on ``device``; errors of the collator are raised here."""

        def move(tensor: Tensor) -> Tensor:
            # what is pinned may be copied while others work: its memory is not used again before the copy is done
            return tensor.to(device, non_blocking=non_blocking or tensor.is_pinned())

        batch = self._made.result().moved(move).columns()
        self._taken()
        return batch


def _one_packed_encoder(model: Model) -> bool:
    """Whether all columns go through one Transformer, which takes them packed."""
    return isinstance(model, nn.Sequential) and isinstance(vars(model[0]).get("forward"), PackedForward)


def _without_detours(collator: Any, model: Model) -> Any:
    """A copy of a collator, whose texts go to the Transformer without being looked at one by one for their modality."""
    given = getattr(collator, "preprocess_fn", None)
    owner, function = getattr(given, "__self__", None), getattr(given, "__func__", None)
    if owner is not model or function is not getattr(type(model), "preprocess", None):
        return collator
    found = copy.copy(collator)
    found.preprocess_fn = _TextPreprocess(model)
    return found


class _TextPreprocess:
    """``model.preprocess``, by the shortest way for texts."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, inputs: list[Any], **kwargs: Any) -> dict[str, Any]:
        texts = bool(inputs) and all(type(text) is str for text in inputs)
        preprocess = self.model[0].preprocess if texts else self.model.preprocess
        found: dict[str, Any] = preprocess(inputs, **kwargs)
        return found
