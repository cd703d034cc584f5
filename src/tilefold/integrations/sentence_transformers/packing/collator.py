"""Batches of a stock trainer made in a thread, and one forward for all columns of a batch, whose
tokens are joined.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from tilefold._internal.typing import Model, Transformer
from tilefold.distributed.ranks import has_other_ranks
from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers.graphs.training import (
    StepGraphs,
    autocast_dtype,
)
from tilefold.integrations.sentence_transformers.packing import inputs as packing
from tilefold.integrations.sentence_transformers.packing.inputs import (
    pack_features,
    packed_features,
    packed_inputs,
)
from tilefold.integrations.transformers.packed import (
    LONGEST,
    LONGEST_NAMES,
    OFFSET_NAMES,
    OFFSETS,
    TOKEN_NAMES,
    padding_position,
)
from tilefold.losses.base_splade import JOINED
from tilefold.modules.fused_pooling import Features
from tilefold.ops.implementations import switched_off
from tilefold.pipeline.rows import to_device
from tilefold.pipeline.truncation import Tally, Truncation, counting_truncation


class Columns:
    """The packed columns of one batch: features of all tokens, ``input_ids`` of each column,
    offsets on the host.
    """

    def __init__(self, features: Features, parts: list[Tensor], offsets: Tensor) -> None:
        self.features, self.parts, self.offsets = features, parts, offsets
        self._waiting: dict[tuple[object, ...], Tensor] = {}

    def rows(self, columns: list[Features]) -> Features | None:
        """All texts, row by row, with offsets on the host; None where `columns` are not these, or
        not of one kind.
        """
        kinds = [
            {key: found[key] for key in found.keys() - self.features.keys() - {JOINED}}
            for found in columns
        ]
        joined = [(self, place) for place in range(len(self.parts))]
        if [found.get(JOINED) for found in columns] != joined or any(
            kind != kinds[0] for kind in kinds
        ):
            return None
        of_texts = self.offsets[:-1], self.offsets.diff()
        starts, lengths = (numbers.view(len(columns), -1).T.flatten() for numbers in of_texts)
        offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        places = torch.repeat_interleave(starts - offsets[:-1], lengths) + torch.arange(
            int(offsets[-1]),
        )
        there = to_device(places.numpy(), self.parts[0].device)
        tokens = {
            name: self.features[name][:, there] for name in TOKEN_NAMES if name in self.features
        }
        return self.features | kinds[0] | tokens | dict.fromkeys(OFFSET_NAMES, offsets)

    def embeddings(
        self,
        index: int,
        transformer: Transformer,
        graphs: StepGraphs | None = None,
    ) -> Tensor:
        """The embeddings of a column, from the forward of the column before it or from one of all
        columns.
        """
        autocasts = autocast_dtype(self.parts[0].device.type)
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        mode = (id(transformer), transformer.training, *grad, autocasts)
        found = self._waiting.pop((index, *mode), None)
        if found is None:
            output = None if graphs is None else graphs(self.features)
            if output is None:
                output = type(transformer).forward(transformer, dict(self.features))[
                    transformer.module_output_name
                ]
            parts = output.split([part.size(1) for part in self.parts], dim=1)
            self._waiting = {(i, *mode): part for i, part in enumerate(parts) if i != index}
            found = parts[index]
        return found


class PackedForward(Replacement):
    """Replaces the forward of one Transformer: it sees no padding, and joined columns go through it
    together.
    """

    graphs: StepGraphs | None = None  # runs joined columns in training, if it can

    def __call__(self, features: Features, **kwargs: object) -> Features:
        """The features with the output of the module, packed unless :func:`padded_inputs` is in
        force.
        """
        transformer = self.owner
        columns, index = features.pop(JOINED, (None, 0))
        # a part of a column is another tensor, and has a backward of its own
        whole = columns is not None and not kwargs and features["input_ids"] is columns.parts[index]
        if not whole or getattr(transformer.model.config, "output_hidden_states", False):
            return self._alone(features, kwargs)
        features[transformer.module_output_name] = columns.embeddings(
            index,
            transformer,
            self.graphs,
        )
        return features

    def _alone(self, features: Features, kwargs: Features) -> Features:
        transformer = self.owner
        if OFFSETS not in features and not packing.pads_inputs() and not _is_recorded():
            packed = pack_features(features, padding_position(transformer.model))
            if packed is not features:
                features.clear()
                features.update(packed)
        if (
            OFFSETS in features
            and (offsets := features[OFFSETS]).device != features["input_ids"].device
        ):
            features |= dict.fromkeys(
                OFFSET_NAMES,
                to_device(offsets.numpy(), features["input_ids"].device),
            )
        found: Features
        if OFFSETS not in features or features["input_ids"].size(1):
            _check_whole(features)
            found = type(transformer).forward(transformer, features, **kwargs)
            return found
        # no token at all, which encoders cannot reshape: one that nobody reads gives shape, dtype
        # and gradients of 0
        ids, offsets = features["input_ids"], features[OFFSETS]
        one = packed_features(
            ids.new_zeros(1),
            offsets.new_ones(1).long(),
            padding_position(transformer.model),
            1,
        )
        name = transformer.module_output_name
        found = type(transformer).forward(transformer, {**features, **one}, **kwargs)
        features[name] = found[name][:, :0]
        if (layers := found.get("all_layer_embeddings")) is not None:
            features["all_layer_embeddings"] = tuple(layer[:, :0] for layer in layers)
        return features


def _is_recorded() -> bool:
    """Whether what runs is traced, or captured in a CUDA graph: then nobody knows yet how many
    tokens there are.
    """
    if torch.compiler.is_compiling():
        return True
    known = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return known and torch.cuda.is_current_stream_capturing()


def _check_whole(features: Features) -> None:
    """Raise if packed features were cut by their first dimension; by sizes that the host knows,
    without waiting.
    """
    if OFFSETS not in features or (longest := features.get(LONGEST)) is None:
        return
    tokens, sequences = features["input_ids"].size(1), features[OFFSETS].numel() - 1
    if tokens > sequences * longest:
        remedy = "Leave batches whole (dispatch_batches=False), or preprocess texts outside of packed_inputs()."
        got = f"{sequences} sequences of up to {longest} tokens for {tokens} tokens: the batch was cut by its first dim"
        raise ValueError(
            f"packed features must hold all offsets of their sequences, got {got}. {remedy}",
        )


class Batch(NamedTuple):
    """A batch of a collator, with packed columns joined."""

    features: Features  # all columns; those that are joined have no tensors of tokens
    joined: Features | None = None  # of all their tokens, None if there is nothing to join
    prefixes: Sequence[str] = ()  # of the columns that are joined, of as many texts each
    offsets: Any = None  # of the joined tokens, on the host

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with each tensor elsewhere; what occurs twice is moved once."""
        known: dict[int, Tensor] = {}

        def each(features: Features) -> Features:
            tensors = {key: value for key, value in features.items() if isinstance(value, Tensor)}
            for value in tensors.values():
                if id(value) not in known:
                    known[id(value)] = move(value)
            return features | {key: known[id(value)] for key, value in tensors.items()}

        return self._replace(features=each(self.features), joined=self.joined and each(self.joined))

    def columns(self) -> Features:
        """The features as losses take them: the tokens of each column are views of all tokens."""
        if self.joined is None:
            return self.features
        found = dict(self.features)
        bounds = itertools.pairwise(
            self.offsets[:: (len(self.offsets) - 1) // len(self.prefixes)].tolist(),
        )
        for prefix, (start, end) in zip(self.prefixes, bounds, strict=True):
            found |= {
                prefix + name: self.joined[name][:, start:end]
                for name in TOKEN_NAMES
                if name in self.joined
            }
        together = Columns(
            self.joined,
            [found[prefix + "input_ids"] for prefix in self.prefixes],
            self.offsets,
        )
        for index, prefix in enumerate(self.prefixes):
            found[prefix + JOINED] = (together, index)
        return found


def join_columns(batch: Features) -> Batch:
    """Join the packed columns of a batch on the host, if there are several of the same kind."""
    prefixes = [key.removesuffix(OFFSETS) for key in batch if key.endswith("_" + OFFSETS)]
    names = [name for name in TOKEN_NAMES if any(prefix + name in batch for prefix in prefixes)]
    if len(prefixes) < 2 or any(
        prefix + name not in batch for prefix in prefixes for name in names
    ):
        return Batch(batch)
    lengths = [batch[prefix + OFFSETS].diff() for prefix in prefixes]
    if (
        not batch[prefixes[0] + "input_ids"].size(1) or len(set(map(len, lengths))) > 1
    ):  # an empty first column
        return Batch(batch)
    cu_seqlens = torch.nn.functional.pad(torch.cat(lengths).cumsum(0, dtype=torch.int32), (1, 0))
    longest = max(batch[prefix + LONGEST] for prefix in prefixes)
    joined: Features = {
        name: torch.cat([batch[prefix + name] for prefix in prefixes], dim=1) for name in names
    }
    joined |= (
        dict.fromkeys(OFFSET_NAMES, cu_seqlens)
        | dict.fromkeys(LONGEST_NAMES, longest)
        | {"modality": "text"}
    )
    views = {prefix + name for prefix in prefixes for name in names}
    # the keys stay in their order, by which trainers tell queries from documents
    return Batch(
        {key: None if key in views else value for key, value in batch.items()},
        joined,
        prefixes,
        cu_seqlens,
    )


def collate_ahead(
    trainer: Any,
    *,
    join: bool = True,
    graphs: bool = False,
    compiled: bool = False,
) -> None:
    """Let a stock trainer of sentence-transformers tokenise its next batch while the step before it
    runs.

    The trainer's own data collator then works in a thread, into pinned memory; samplers, order,
    random numbers and batches stay the same. Nothing changes with ``dataloader_num_workers`` above
    0 or ``TILEFOLD_DISABLE=1`` in the environment. The trainer's ``logging_nan_inf_filter``, for
    which the host waits for the loss, is turned off: NaN is logged as NaN.

    If ``accelerate`` lets the only encoder of the model run on packed tokens, the thread packs all
    columns of a batch, and they go through the encoder in one forward: the same numbers but for
    those of dropout. Losses that cut columns into mini-batches (cached ones) run each part by
    itself, but for :class:`tilefold.losses.base_splade.JoinedSpladeLoss`.

    With ``graphs``, the forward and backward pass of the encoder are captured as CUDA graphs and
    replayed. Unused sequences pad batches to a few total sizes (at most a tenth more tokens); a new
    size runs eagerly the first time and is captured the second time. Gradients are copied (memory
    of the weights once more; recipes on several GPUs have them written where DDP keeps them) and
    come all at the end of the backward pass; with several ranks those of most layers come before
    those of the lowest ones, and are added up meanwhile. Steps that a graph cannot repeat run as
    usual: see :class:`tilefold.integrations.sentence_transformers.graphs.training.StepGraphs`. Dropout draws
    other numbers.

    With ``compiled``, too, what is captured in 16 bits (bf16 or fp16 weights or autocast) are
    layers that ``torch.compile`` made, for any length: about a seventh less work for the GPU, fewer
    results rounded on the way, and some ten seconds more at the start. fp32 layers, whose packed
    attention torch cannot compile, are captured as they are; where compiling fails, a warning says
    so.

    Args:
        trainer: a ``SparseEncoderTrainer``, ``MultiVectorEncoderTrainer`` or another trainer of
            sentence-transformers.
        join: one forward for all columns; False for a loss that calls ``backward`` once for each
            column.
        graphs: capture and replay the encoder as CUDA graphs.
        compiled: capture layers that ``torch.compile`` made; no effect in fp32.

    Raises:
        TypeError: if ``trainer`` has no data collator.
        ValueError: for an iterable dataset or ``dispatch_batches``, whose batches one process cuts
            for all others; for ``graphs`` without ``join`` or with other than one packed encoder;
            for ``compiled`` without ``graphs``.
    """
    collator = getattr(trainer, "data_collator", None)
    if collator is None:
        got = f"{type(trainer).__name__} without a data collator."
        raise TypeError(f"trainer must be a trainer of sentence-transformers, got {got}")
    for name in ("train_dataset", "eval_dataset"):
        if isinstance(getattr(trainer, name, None), IterableDataset):
            raise ValueError(
                f"{name} must not be iterable to be collated ahead, got one; use a Dataset with a "
                "length.",
            )
    if getattr(getattr(trainer, "accelerator", None), "dispatch_batches", None):
        remedy = "leave it out of the trainer's accelerator_config, so that each process makes its own batches."
        raise ValueError(
            "dispatch_batches must not be True for batches that are collated ahead, got True; "
            f"{remedy}",
        )
    if switched_off():
        return
    model = (
        trainer.model
    )  # whose columns may all go through one Transformer, which takes them packed
    one = isinstance(model, nn.Sequential) and isinstance(
        vars(model[0]).get("forward"),
        PackedForward,
    )
    if graphs and not (one and join):
        remedy = "call accelerate(model) first and leave join=True; in a recipe leave --graphs out."
        columns = "a model of several encoders, or columns that are not joined or stay padded"
        raise ValueError(f"graphs must be False for {columns}, got True; {remedy}")
    if compiled and not graphs:
        raise ValueError("compiled must be False without graphs, got True; pass graphs=True, too.")
    trainer.args.logging_nan_inf_filter = False
    if one:
        model[0].forward.graphs = (
            StepGraphs(model[0], compiled=compiled, halved=has_other_ranks()) if graphs else None
        )
    if not isinstance(collator, AheadCollator):
        collator = _without_detours(collator, model) if one else collator
        trainer.data_collator = AheadCollator(collator, join and one)


class AheadCollator:
    """A data collator that returns at once and works in a thread of its own; it has the attributes
    of the stock one.
    """

    read: Callable[[list[Any]], list[Features]] = (
        list  # in the thread: the rows of what a dataset gives
    )

    def __init__(self, collator: Callable[[list[Features]], Features], join: bool = False) -> None:
        self.collator, self.join = collator, join
        self.cut = Tally()  # texts of the batches that were taken, and how many of them were cut
        self._thread: ThreadPoolExecutor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "collator":
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __getstate__(self) -> Features:
        return vars(self) | {"_thread": None}

    def __call__(self, features: list[Any]) -> Any:
        """A :class:`PendingBatch`; in a worker process of a data loader, the batch itself."""
        if get_worker_info() is not None:
            return self.collator(self.read(features))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tilefold-collate")
        seen = Truncation()

        def taken() -> None:
            for call in seen.calls:
                if call.n_texts >= len(features):  # else it was a prompt alone, for its length
                    self.cut.add("text", call.n_texts, len(call.cut), call.max_length)

        return PendingBatch(self._thread, self._thread.submit(self._made, features, seen), taken)

    def _made(self, features: list[Any], seen: Truncation) -> Batch:
        features = self.read(features)
        with counting_truncation(seen):
            if not self.join:
                return Batch(self.collator(features))
            with packed_inputs():
                return join_columns(self.collator(features))


class PendingBatch:
    """A batch that a thread is making; `taken` is called when it is taken: the last one that was
    begun may never be.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        made: Future[Batch],
        taken: Callable[[], None],
    ) -> None:
        self._thread, self._made, self._taken = thread, made, taken

    def pin_memory(self) -> PendingBatch:
        """This batch, which the thread copies to pinned memory when it has made it."""
        made = self._made
        pinned = self._thread.submit(lambda: made.result().moved(Tensor.pin_memory))
        return PendingBatch(self._thread, pinned, self._taken)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Features:
        """The batch on ``device``; errors of the collator are raised here."""

        def move(tensor: Tensor) -> Tensor:
            # what is pinned may be copied while others work: its memory is not used again before
            # the copy is done
            return tensor.to(device, non_blocking=non_blocking or tensor.is_pinned())

        batch = self._made.result().moved(move).columns()
        self._taken()
        return batch


def _without_detours(collator: Any, model: Model) -> Any:
    """A copy of a collator, whose texts go to the Transformer without being looked at one by one
    for their modality.
    """
    given = getattr(collator, "preprocess_fn", None)
    owner, function = getattr(given, "__self__", None), getattr(given, "__func__", None)
    if owner is not model or function is not getattr(type(model), "preprocess", None):
        return collator
    found = copy.copy(collator)
    found.preprocess_fn = functools.partial(_preprocess, model)
    return found


def _preprocess(model: Any, inputs: list[object], **kwargs: object) -> Features:
    """``model.preprocess``, by the shortest way for texts."""
    found: Features = (model[0] if {*map(type, inputs)} == {str} else model).preprocess(
        inputs,
        **kwargs,
    )
    return found
