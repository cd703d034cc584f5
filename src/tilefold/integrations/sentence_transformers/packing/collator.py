"""Batches of a stock trainer, collated in a thread, with columns joined for one forward."""

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
from tilefold.integrations.sentence_transformers.graphs.capture import autocast_dtype
from tilefold.integrations.sentence_transformers.graphs.training import StepGraphs
from tilefold.integrations.sentence_transformers.packing.accelerate import PackedForward
from tilefold.integrations.sentence_transformers.packing.inputs import packed_inputs
from tilefold.integrations.transformers.packed import (
    LONGEST,
    LONGEST_NAMES,
    OFFSET_NAMES,
    OFFSETS,
    TOKEN_NAMES,
)
from tilefold.losses.base_splade import JOINED
from tilefold.modules.fused_pooling import Features
from tilefold.ops.implementations import switched_off
from tilefold.pipeline.rows import to_device
from tilefold.pipeline.truncation import Tally, Truncation, counting_truncation


class JoinedColumns:
    """The packed columns of one training batch, whose tokens are joined.

    Args:
        features: packed features of all tokens, one column after another.
        input_ids: the ids of each column, ``[1, T_i]``, as views of those in `features`.
        offsets: offsets of all texts, int32 ``[N + 1]`` on the CPU.
    """

    def __init__(self, features: Features, input_ids: list[Tensor], offsets: Tensor) -> None:
        self.features = features
        self.input_ids = input_ids
        self.offsets = offsets
        # Outputs of columns that went through a forward, but were not yet returned. Keys are the
        # position of the column and the mode of the forward.
        self._outputs: dict[tuple[object, ...], Tensor] = {}

    def rows(self, columns: list[Features]) -> Features | None:
        """Return packed features of all texts in row order.

        The first row of every column comes first, then the second row of every column.

        Args:
            columns: features of the columns, as a loss receives them.

        Returns:
            Features with offsets int32 ``[N + 1]`` on the CPU. ``None`` unless `columns` are all
            columns of this batch, and agree in features that are not joined.
        """
        expected = [(self, position) for position in range(len(self.input_ids))]
        if [features.get(JOINED) for features in columns] != expected:
            return None
        joined_names = {*self.features, JOINED}
        other_features = [
            {name: value for name, value in features.items() if name not in joined_names}
            for features in columns
        ]
        if any(features != other_features[0] for features in other_features):
            return None
        # The texts are stored column by column. Transposed, they are in row order.
        n_columns = len(columns)
        starts = self.offsets[:-1].view(n_columns, -1).T.flatten()
        lengths = self.offsets.diff().view(n_columns, -1).T.flatten()
        offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        # Where each token of the result comes from: its position, shifted as its text is.
        shifts = torch.repeat_interleave(starts - offsets[:-1], lengths)
        sources = shifts + torch.arange(int(offsets[-1]))
        device_sources = to_device(sources.numpy(), self.input_ids[0].device)
        features = {**self.features, **other_features[0]}
        for name in TOKEN_NAMES:
            if name in self.features:
                features[name] = self.features[name][:, device_sources]
        features.update(dict.fromkeys(OFFSET_NAMES, offsets))
        return features

    def embeddings(
        self,
        position: int,
        transformer: Transformer,
        graphs: StepGraphs | None = None,
    ) -> Tensor:
        """Return the token embeddings of a column, ``[1, T_i, D]``.

        The first call runs the Transformer on all columns, and stores the outputs of the others.
        Their calls take them, if the modes of the model and of torch are still the same.

        Args:
            position: position of the column.
            transformer: the Transformer.
            graphs: runs the forward as a CUDA graph where it can.
        """
        mode = (
            id(transformer),
            transformer.training,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast_dtype(self.input_ids[0].device.type),
        )
        output = self._outputs.pop((position, *mode), None)
        if output is not None:
            return output
        joined_output = None if graphs is None else graphs(self.features)
        if joined_output is None:  # no graph can run these features
            features = type(transformer).forward(transformer, dict(self.features))
            joined_output = features[transformer.module_output_name]
        outputs: Sequence[Tensor] = joined_output.split(
            [ids.size(1) for ids in self.input_ids], dim=1
        )
        self._outputs = {
            (column, *mode): column_output
            for column, column_output in enumerate(outputs)
            if column != position
        }
        return outputs[position]


class CollatedBatch(NamedTuple):
    """A batch of a collator, with packed columns joined.

    Attributes:
        features: features of all columns, whose names begin with the column's prefix. Joined
            columns have ``None`` in place of their tensors of tokens.
        joined: packed features of all tokens of the joined columns; ``None`` without such columns.
        prefixes: prefixes of the joined columns, which have equally many texts.
        offsets: offsets of the texts in the joined tokens, int32 ``[N + 1]`` on the CPU; ``None``
            without joined columns.
    """

    features: Features
    joined: Features | None = None
    prefixes: Sequence[str] = ()
    offsets: Any = None

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> CollatedBatch:
        """Return the batch with a function applied to its tensors, such as a copy to a GPU.

        Features that are the same tensor stay the same tensor: the function is applied to it once.

        Args:
            function: the function.
        """
        results: dict[int, Tensor] = {}  # by the id of the tensor

        def map_features(features: Features) -> Features:
            mapped = dict(features)
            for name, value in features.items():
                if isinstance(value, Tensor):
                    if id(value) not in results:
                        results[id(value)] = function(value)
                    mapped[name] = results[id(value)]
            return mapped

        return self._replace(
            features=map_features(self.features),
            joined=None if self.joined is None else map_features(self.joined),
        )

    def split_columns(self) -> Features:
        """Return features of all columns, as a loss takes them.

        The tensors of tokens of a joined column are views of tensors that hold all columns. Each
        joined column also gets an entry that leads its forward to the joined ones.
        """
        if self.joined is None:
            return self.features
        features = dict(self.features)
        n_texts_per_column = (len(self.offsets) - 1) // len(self.prefixes)
        column_offsets = self.offsets[::n_texts_per_column].tolist()
        column_ranges = itertools.pairwise(column_offsets)
        for prefix, (start, end) in zip(self.prefixes, column_ranges, strict=True):
            for name in TOKEN_NAMES:
                if name in self.joined:
                    features[prefix + name] = self.joined[name][:, start:end]
        input_ids = [features[prefix + "input_ids"] for prefix in self.prefixes]
        columns = JoinedColumns(self.joined, input_ids, self.offsets)
        for position, prefix in enumerate(self.prefixes):
            features[prefix + JOINED] = (columns, position)
        return features


def join_columns(features: Features) -> CollatedBatch:
    """Join the packed columns of a batch on the CPU, so that one forward can run all of them.

    A batch without packed columns, or with columns of different tensors or numbers of texts, is
    returned unchanged.

    Args:
        features: output of a data collator, whose names begin with the column's prefix.
    """
    prefixes = [name.removesuffix(OFFSETS) for name in features if name.endswith(f"_{OFFSETS}")]
    names = [name for name in TOKEN_NAMES if any(prefix + name in features for prefix in prefixes)]
    if not _can_be_joined(features, prefixes, names):
        return CollatedBatch(features)
    lengths = [features[prefix + OFFSETS].diff() for prefix in prefixes]  # of the texts
    end_offsets = torch.cat(lengths).cumsum(0, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(end_offsets, (1, 0))
    longest = max(features[prefix + LONGEST] for prefix in prefixes)
    joined: Features = {
        name: torch.cat([features[prefix + name] for prefix in prefixes], dim=1) for name in names
    }
    joined.update(dict.fromkeys(OFFSET_NAMES, cu_seqlens))
    joined.update(dict.fromkeys(LONGEST_NAMES, longest))
    joined["modality"] = "text"
    # Trainers tell queries from documents by the order of the names, which therefore stay.
    joined_names = {prefix + name for prefix in prefixes for name in names}
    other_features = {
        name: None if name in joined_names else value for name, value in features.items()
    }
    return CollatedBatch(other_features, joined, prefixes, cu_seqlens)


def _can_be_joined(features: Features, prefixes: Sequence[str], names: Sequence[str]) -> bool:
    """Whether packed columns of a batch can go through the encoder in one forward.

    They need the same tensors and equally many texts, and the first one needs tokens.

    Args:
        features: features of a batch.
        prefixes: prefixes of the packed columns.
        names: names of their tensors of tokens.
    """
    if len(prefixes) < 2:
        return False
    if any(prefix + name not in features for prefix in prefixes for name in names):
        return False
    n_texts = {features[prefix + OFFSETS].numel() - 1 for prefix in prefixes}
    n_first_tokens = features[prefixes[0] + "input_ids"].size(1)
    return len(n_texts) == 1 and n_first_tokens > 0


def collate_ahead(
    trainer: Any,
    *,
    join: bool = True,
    graphs: bool = False,
    compiled: bool = False,
) -> None:
    """Let a stock trainer tokenise its next batch while the step before it runs.

    The trainer's own data collator then works in a thread, into pinned memory. Samplers, order,
    random numbers and batches stay the same. Nothing changes with ``dataloader_num_workers`` above
    0 or ``TILEFOLD_DISABLE=1`` in the environment. The trainer's ``logging_nan_inf_filter``, for
    which the CPU waits for the loss, is turned off: NaN is logged as NaN.

    If ``accelerate`` lets the only encoder of the model run on packed tokens, the thread packs all
    columns of a batch, and they go through the encoder in one forward. The numbers are the same
    except for dropout. Losses that divide columns into mini-batches (cached ones) run each part by
    itself, except for :class:`tilefold.losses.base_splade.JoinedSpladeLoss`.

    With ``graphs``, the forward and backward pass of the encoder are captured as CUDA graphs and
    replayed. Unused sequences pad batches to a few total sizes (at most a tenth more tokens). A new
    size runs eagerly the first time and is captured the second time. Gradients are copied, which
    takes the memory of the weights once more (recipes on several GPUs have them written where DDP
    keeps them). All come at the end of the backward pass. With several ranks, the gradients of most
    layers come before the ones of the lowest layers, and are added up meanwhile. Steps that a graph
    cannot repeat run as usual: see
    :class:`tilefold.integrations.sentence_transformers.graphs.training.StepGraphs`. Dropout draws
    other numbers.

    With ``compiled``, too, layers that ``torch.compile`` compiled for any length are captured, in
    16 bits (bf16 or fp16 weights or autocast). This is about a seventh less work for the GPU, with
    fewer results rounded on the way, and some ten seconds more at the start. fp32 layers, whose
    packed attention torch cannot compile, are captured without it. Where compiling fails, a warning
    is issued, and layers are captured without it.

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
    collator = _checked_collator(trainer)
    if switched_off():
        return
    model = trainer.model
    # Only then do all columns go through one Transformer, which takes them packed.
    has_one_encoder = isinstance(model, nn.Sequential) and isinstance(
        vars(model[0]).get("forward"),
        PackedForward,
    )
    if graphs and not (has_one_encoder and join):
        raise ValueError(
            "graphs must be False for a model of several encoders, or columns that are not joined "
            "or stay padded, got True; call accelerate(model) first and leave join=True; in a "
            "recipe leave --graphs out.",
        )
    if compiled and not graphs:
        raise ValueError("compiled must be False without graphs, got True; pass graphs=True, too.")
    trainer.args.logging_nan_inf_filter = False
    if has_one_encoder:
        step_graphs = None
        if graphs:
            step_graphs = StepGraphs(model[0], compiled=compiled, halved=has_other_ranks())
        model[0].forward.graphs = step_graphs
    if not isinstance(collator, AheadCollator):
        if has_one_encoder:
            collator = _with_direct_preprocess(collator, model)
        trainer.data_collator = AheadCollator(collator, join and has_one_encoder)


def _checked_collator(trainer: Any) -> Any:
    """Return the data collator of a trainer, after a check that its batches can be collated ahead.

    Args:
        trainer: the trainer.

    Raises:
        TypeError: if there is no data collator.
        ValueError: for an iterable dataset or ``dispatch_batches``.
    """
    collator = getattr(trainer, "data_collator", None)
    if collator is None:
        raise TypeError(
            "trainer must be a trainer of sentence-transformers, got "
            f"{type(trainer).__name__} without a data collator.",
        )
    for name in ("train_dataset", "eval_dataset"):
        if isinstance(getattr(trainer, name, None), IterableDataset):
            raise ValueError(
                f"{name} must not be iterable to be collated ahead, got one; use a Dataset with a "
                "length.",
            )
    if getattr(getattr(trainer, "accelerator", None), "dispatch_batches", None):
        raise ValueError(
            "dispatch_batches must not be True for batches that are collated ahead, got True; "
            "leave it out of the trainer's accelerator_config, so that each process makes its own "
            "batches.",
        )
    return collator


class AheadCollator:
    """A data collator that returns at once and collates in a thread.

    It has the attributes of the collator that it wraps.

    Args:
        collator: the stock data collator.
        join: whether packed columns of a batch are joined.

    Attributes:
        cut: counts of texts, and of truncated ones, of the batches that were used.
        read: converts what the dataset returns to rows, in the thread.
    """

    read: Callable[[list[Any]], list[Features]] = list

    def __init__(self, collator: Callable[[list[Features]], Features], join: bool = False) -> None:
        """Wrap a data collator; its thread is started by the first batch.

        Args:
            collator: the stock data collator.
            join: whether packed columns of a batch are joined.
        """
        self.collator = collator
        self.join = join
        self.cut = Tally()
        self._thread: ThreadPoolExecutor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "collator":
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __getstate__(self) -> Features:
        return {**vars(self), "_thread": None}

    def __call__(self, features: list[Any]) -> Any:
        """Start to collate a batch.

        Args:
            features: rows of the dataset, or what ``read`` makes rows of.

        Returns:
            A :class:`PendingBatch`; in a worker process of a data loader, the features themselves.
        """
        if get_worker_info() is not None:
            return self.collator(self.read(features))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tilefold-collate")
        truncation = Truncation()
        return PendingBatch(
            self._thread,
            self._thread.submit(self._collate, features, truncation),
            functools.partial(self._count_truncated, truncation, len(features)),
        )

    def _collate(self, features: list[Any], truncation: Truncation) -> CollatedBatch:
        """Collate a batch, and count the texts that the tokenizer truncates (in the thread).

        Args:
            features: rows of the dataset, or what ``read`` makes rows of.
            truncation: gets the counts.
        """
        rows = self.read(features)
        with counting_truncation(truncation):
            if not self.join:
                return CollatedBatch(self.collator(rows))
            with packed_inputs():
                return join_columns(self.collator(rows))

    def _count_truncated(self, truncation: Truncation, n_rows: int) -> None:
        """Add the truncated texts of a batch to the tally.

        Args:
            truncation: the tokenizer's calls for this batch.
            n_rows: number of rows of the batch.
        """
        for call in truncation.calls:
            # A call for fewer texts tokenises a prompt, for its length.
            if call.n_texts >= n_rows:
                self.cut.add("text", call.n_texts, len(call.truncated), call.max_length)


class PendingBatch:
    """A batch that a thread collates.

    Args:
        thread: the thread.
        batch: the batch that it collates.
        on_use: called when the batch is moved to its device, since a loader may drop its last one.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        batch: Future[CollatedBatch],
        on_use: Callable[[], None],
    ) -> None:
        self._thread = thread
        self._batch = batch
        self._on_use = on_use

    def pin_memory(self) -> PendingBatch:
        """Return this batch, which the thread copies to pinned memory once it is collated."""
        pinned = self._thread.submit(_pin_memory, self._batch)
        return PendingBatch(self._thread, pinned, self._on_use)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Features:
        """Wait for the batch and return its features on a device.

        Errors of the collator are raised here.

        Args:
            device: the device.
            non_blocking: whether copies may overlap with other work. Copies from pinned memory
                always may.
        """

        def move(tensor: Tensor) -> Tensor:
            """Copy a tensor to the device."""
            # A copy from pinned memory may overlap with other work: torch does not reuse the memory
            # before the copy is done.
            return tensor.to(device, non_blocking=non_blocking or tensor.is_pinned())

        features = self._batch.result().map_tensors(move).split_columns()
        self._on_use()
        return features


def _pin_memory(batch: Future[CollatedBatch]) -> CollatedBatch:
    return batch.result().map_tensors(Tensor.pin_memory)


def _with_direct_preprocess(collator: Any, model: Model) -> Any:
    """Return a copy of a collator that passes texts straight to the model's Transformer.

    The model's own ``preprocess`` would examine the modality of every text first. A collator whose
    ``preprocess_fn`` is another function is returned unchanged.

    Args:
        collator: a data collator of sentence-transformers.
        model: the model of the trainer.
    """
    preprocess = getattr(collator, "preprocess_fn", None)
    owner = getattr(preprocess, "__self__", None)
    function = getattr(preprocess, "__func__", None)
    if owner is not model or function is not getattr(type(model), "preprocess", None):
        return collator
    direct_collator = copy.copy(collator)
    direct_collator.preprocess_fn = functools.partial(_preprocess, model)
    return direct_collator


def _preprocess(model: Any, inputs: list[object], **kwargs: object) -> Features:
    """Preprocess inputs by the model's Transformer if all are texts, else by the model."""
    are_texts = {*map(type, inputs)} == {str}
    preprocess = model[0].preprocess if are_texts else model.preprocess
    features: Features = preprocess(inputs, **kwargs)
    return features
