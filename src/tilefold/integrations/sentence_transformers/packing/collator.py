"""Batches of sentence-transformers' trainers, collated in a thread and joined for one forward."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from tilefold._internal.typing import Model, Transformer
from tilefold.distributed.ranks import has_other_ranks
from tilefold.integrations.sentence_transformers._ahead import prepare_training
from tilefold.integrations.sentence_transformers.graphs.capture import autocast_dtype
from tilefold.integrations.sentence_transformers.graphs.training import StepGraphs
from tilefold.integrations.sentence_transformers.packing.accelerate import PackedForward
from tilefold.integrations.sentence_transformers.packing.forward import original_forward
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


class _ForwardMode(NamedTuple):
    """Settings that decide the output of a forward, besides weights and inputs.

    Attributes:
        transformer_id: the id of the Transformer.
        is_training: whether it is in training mode.
        has_gradients: whether torch records gradients.
        is_inference: whether torch is in inference mode.
        autocast: the dtype of autocast, or ``None``.
    """

    transformer_id: int
    is_training: bool
    has_gradients: bool
    is_inference: bool
    autocast: torch.dtype | None


def _current_forward_mode(transformer: Transformer, device_type: str) -> _ForwardMode:
    """Return the mode in which a forward of a Transformer would run now.

    Args:
        transformer: the Transformer.
        device_type: the type of its device, such as ``"cuda"``.
    """
    return _ForwardMode(
        transformer_id=id(transformer),
        is_training=transformer.training,
        has_gradients=torch.is_grad_enabled(),
        is_inference=torch.is_inference_mode_enabled(),
        autocast=autocast_dtype(device_type),
    )


@dataclass(frozen=True)
class ColumnLink:
    """Link from the features of one column to the concatenated tokens of all columns of a batch.

    The features hold it under the name ``JOINED``. It is not a tuple, because trainers move the
    items of tuples to a device.

    Attributes:
        columns: all columns of the batch, concatenated.
        position: the position of this column among them.
    """

    columns: ConcatenatedColumns
    position: int


class ConcatenatedColumns:
    """The packed columns of one training batch, concatenated, so that one forward runs all of them.

    A column holds the texts of one column of the data set, such as the queries or the documents.

    Attributes:
        features: packed features of all tokens, one column after another.
        input_ids: the ids of each column, ``[1, T_i]``, as views of those in ``features``.
        offsets: the offsets of all texts, int32 ``[N + 1]`` on the CPU.
    """

    def __init__(self, features: Features, input_ids: list[Tensor], offsets: Tensor) -> None:
        """Store the features of a batch, whose columns were tokenised together.

        Args:
            features: the packed features of all columns.
            input_ids: the token ids of each column, as views of those in ``features``.
            offsets: the offsets of all texts, int32 ``[N + 1]`` on the CPU.
        """
        self.features = features
        self.input_ids = input_ids
        self.offsets = offsets
        # Outputs of the last forward that were not returned yet, by the position of the column, and
        # the mode of that forward.
        self._outputs: dict[int, Tensor] = {}
        self._mode: _ForwardMode | None = None

    def rows(self, columns: list[Features]) -> Features | None:
        """Return packed features of all texts, ordered by the rows of the data set.

        The texts of the first row come first (its query, then its documents), then those of the
        second row.

        Args:
            columns: the features of the columns, as a loss receives them.

        Returns:
            Features with offsets int32 ``[N + 1]`` on the CPU. None if ``columns`` are not all
            columns of this batch, or if they differ in a feature that is not concatenated.
        """
        if not self._are_all_columns(columns):
            return None
        concatenated_names = {*self.features, JOINED}
        other_features = [
            {name: value for name, value in features.items() if name not in concatenated_names}
            for features in columns
        ]
        if any(isinstance(value, Tensor) for value in other_features[0].values()):
            return None
        if any(features != other_features[0] for features in other_features):
            return None
        # The texts are stored column by column, [columns, rows]. Transposed, they are in row order.
        n_columns = len(columns)
        starts = self.offsets[:-1].view(n_columns, -1).T.flatten()
        lengths = self.offsets.diff().view(n_columns, -1).T.flatten()
        offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        # Tokens move together with their text: each comes from its new position plus this shift.
        shifts = torch.repeat_interleave(starts - offsets[:-1], lengths)
        sources = shifts + torch.arange(int(offsets[-1]))
        device_sources = to_device(sources.numpy(), self.input_ids[0].device)
        row_features = {**self.features, **other_features[0]}
        for name in TOKEN_NAMES:
            if name in self.features:
                row_features[name] = self.features[name][:, device_sources]
        row_features.update(dict.fromkeys(OFFSET_NAMES, offsets))
        return row_features

    def _are_all_columns(self, columns: list[Features]) -> bool:
        """Whether features are those of all columns of this batch, in order."""
        entries = [features.get(JOINED) for features in columns]
        return entries == [ColumnLink(self, position) for position in range(len(self.input_ids))]

    def run_column(
        self,
        position: int,
        transformer: Transformer,
        graphs: StepGraphs | None = None,
    ) -> Tensor:
        """Return the token embeddings of a column, ``[1, T_i, D]``, in one forward for all columns.

        The first call runs the Transformer on all columns and stores their outputs. A later call
        for another column returns its output, if the modes of the Transformer and of torch (such as
        training and autocast) have not changed.

        Args:
            position: the position of the column.
            transformer: the Transformer.
            graphs: runs the forward as a CUDA graph if it can.
        """
        mode = _current_forward_mode(transformer, self.input_ids[0].device.type)
        if mode != self._mode or position not in self._outputs:
            self._outputs = dict(enumerate(self._run(transformer, graphs)))
            self._mode = mode
        return self._outputs.pop(position)

    def _run(self, transformer: Transformer, graphs: StepGraphs | None) -> Sequence[Tensor]:
        """Run a Transformer on all columns, and return the output of each column."""
        all_outputs = None if graphs is None else graphs(self.features)
        if all_outputs is None:  # no graph can run these features
            features = dict(self.features)
            if graphs is None:
                features = original_forward(transformer, features)
            else:
                features = graphs.run_without_graph(features)
            all_outputs = features[transformer.module_output_name]
        column_lengths = [ids.size(1) for ids in self.input_ids]
        outputs: Sequence[Tensor] = all_outputs.split(column_lengths, dim=1)
        return outputs


class CollatedBatch(NamedTuple):
    """A batch of a collator, with the tokens of packed columns joined, that is, concatenated.

    Attributes:
        features: the features of all columns, whose names begin with the column's prefix, such as
            ``"query_"``. The token tensors of joined columns are replaced by ``None``.
        joined: packed features of all tokens of the joined columns; ``None`` if no columns are
            joined.
        prefixes: the prefixes of the joined columns, which have the same number of texts.
        offsets: the offsets of the texts in the joined tokens, int32 ``[N + 1]`` on the CPU;
            ``None`` if no columns are joined.
    """

    features: Features
    joined: Features | None = None
    prefixes: Sequence[str] = ()
    offsets: Any = None

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> CollatedBatch:
        """Return the batch with a function applied to its tensors, such as a copy to a GPU.

        A tensor that occurs several times is converted once, so that it stays a single tensor.

        Args:
            function: returns the new tensor for an old one.
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
        """Return the features of each column (queries, documents), as a loss expects them.

        The tokens of the columns were concatenated, so that one forward can run all of them. Each
        column gets its part of the tensors as views, and a :class:`ColumnLink` by which its forward
        reaches the whole tensors.
        """
        if self.joined is None:
            return self.features
        features = dict(self.features)
        # ``offsets`` has an entry for each text, one column after another, and one for the end. All
        # columns have equally many texts, so every n-th entry is the offset of a column.
        n_texts = len(self.offsets) - 1
        n_texts_per_column = n_texts // len(self.prefixes)
        column_offsets = self.offsets[::n_texts_per_column].tolist()
        column_ranges = itertools.pairwise(column_offsets)
        for prefix, (start, end) in zip(self.prefixes, column_ranges, strict=True):
            for name in TOKEN_NAMES:
                if name in self.joined:
                    features[prefix + name] = self.joined[name][:, start:end]
        input_ids = [features[prefix + "input_ids"] for prefix in self.prefixes]
        columns = ConcatenatedColumns(self.joined, input_ids, self.offsets)
        for position, prefix in enumerate(self.prefixes):
            features[prefix + JOINED] = ColumnLink(columns, position)
        return features


def join_columns(features: Features) -> CollatedBatch:
    """Concatenate the packed columns of a batch on the CPU, so that one forward can run them all.

    A column holds, for example, the queries or the documents. The columns stay separate if they do
    not have the same tensors and the same number of texts.

    Args:
        features: the output of a data collator, whose names begin with the column's prefix.
    """
    # A prefix ends in "_", such as "sentence_0_".
    prefixes = [name.removesuffix(OFFSETS) for name in features if name.endswith(f"_{OFFSETS}")]
    names = [name for name in TOKEN_NAMES if any(prefix + name in features for prefix in prefixes)]
    if not _can_be_joined(features, prefixes, names):
        return CollatedBatch(features)
    text_lengths = torch.cat([features[prefix + OFFSETS].diff() for prefix in prefixes])
    text_ends = text_lengths.cumsum(0, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(text_ends, (1, 0))
    longest = max(features[prefix + LONGEST] for prefix in prefixes)
    joined: Features = {
        name: torch.cat([features[prefix + name] for prefix in prefixes], dim=1) for name in names
    }
    joined.update(dict.fromkeys(OFFSET_NAMES, cu_seqlens))
    joined.update(dict.fromkeys(LONGEST_NAMES, longest))
    joined["modality"] = "text"
    # Trainers tell queries from documents by the order of the names. So the names stay. The tensors
    # are removed, since ``joined`` has copies of them.
    emptied_features = dict(features)
    for prefix in prefixes:
        for name in names:
            emptied_features[prefix + name] = None
    return CollatedBatch(
        features=emptied_features,
        joined=joined,
        prefixes=prefixes,
        offsets=cu_seqlens,
    )


def _can_be_joined(features: Features, prefixes: Sequence[str], names: Sequence[str]) -> bool:
    """Whether packed columns of a batch can go through the encoder in one forward.

    There must be two columns or more, with the same token tensors and the same number of texts. The
    first column must have a token.

    Args:
        features: the features of a batch.
        prefixes: the prefixes of the packed columns.
        names: the names of their token tensors.
    """
    if len(prefixes) < 2:
        return False
    if any(prefix + name not in features for prefix in prefixes for name in names):
        return False
    text_counts = {features[prefix + OFFSETS].numel() - 1 for prefix in prefixes}
    n_first_tokens = features[prefixes[0] + "input_ids"].size(1)  # of a packed tensor [1, T]
    return len(text_counts) == 1 and n_first_tokens > 0


def collate_ahead(
    trainer: Any,
    *,
    join: bool = True,
    graphs: bool = False,
    compiled: bool = False,
) -> None:
    """Let a trainer tokenise its next batch while the current step runs.

    The trainer's data collator then works in a thread and writes to pinned memory. Samplers, order,
    random numbers and batches stay the same. Nothing changes with ``dataloader_num_workers`` above
    0 or ``TILEFOLD_DISABLE=1`` in the environment. The trainer's ``logging_nan_inf_filter``, for
    which the CPU waits for the loss, is turned off: NaN is logged as NaN.

    If ``accelerate`` lets the only encoder of the model run on packed tokens, the thread packs all
    columns of a batch (queries, documents), which then go through the encoder in one forward. The
    numbers are the same except for dropout. Losses that divide columns into mini-batches (cached
    ones) run each part by itself, except for :class:`tilefold.losses.base_splade.JoinedSpladeLoss`.

    With ``graphs``, the forward and backward pass of the encoder are captured as CUDA graphs and
    replayed. Filler sequences pad batches to a few total sizes (at most a tenth more tokens). A new
    size runs eagerly the first time and is captured the second time. Gradients are copied, which
    takes the memory of the weights once more; recipes on several GPUs let the graphs write into
    DDP's buckets instead. All gradients are available at the end of the backward pass. With several
    ranks, those of most layers are available earlier and are summed while the lowest layers are
    differentiated. Steps that a graph cannot repeat run as usual: see
    :class:`tilefold.integrations.sentence_transformers.graphs.training.StepGraphs`. Dropout draws
    different numbers.

    With ``compiled``, ``torch.compile`` compiles the layers for any length before the capture, if
    they compute in 16 bits (bf16 or fp16 weights or autocast). The GPU then has about a seventh
    less work and rounds fewer intermediate results, and training starts some ten seconds later.
    fp32 layers, whose packed attention torch cannot compile, are captured as they are. So are
    layers that fail to compile, with a warning.

    Args:
        trainer: a ``SparseEncoderTrainer``, ``MultiVectorEncoderTrainer`` or another trainer of
            sentence-transformers.
        join: whether one forward runs all columns; False for a loss that calls ``backward`` once
            for each column.
        graphs: whether to capture and replay the encoder as CUDA graphs.
        compiled: whether to compile the layers with ``torch.compile``; no effect in fp32.

    Raises:
        TypeError: if ``trainer`` has no data collator.
        ValueError: if a dataset is iterable; if ``dispatch_batches`` lets one process make the
            batches of all processes; if ``graphs`` is used without ``join`` or without exactly one
            packed encoder; if ``compiled`` is used without ``graphs``.

    Examples:
        >>> from datasets import Dataset
        >>> from sentence_transformers import SparseEncoder, SparseEncoderTrainer
        >>> from sentence_transformers.sparse_encoder import losses
        >>> model = SparseEncoder("splade-model", device="cpu")
        >>> pairs = Dataset.from_dict({"query": ["lost card"], "answer": ["Block a lost card."]})
        >>> ranking = losses.SparseMultipleNegativesRankingLoss(model)
        >>> loss = losses.SpladeLoss(model, ranking, document_regularizer_weight=1e-4)
        >>> trainer = SparseEncoderTrainer(model, train_dataset=pairs, loss=loss)
        >>> collate_ahead(trainer)  # then trainer.train()
    """
    _check_trainer(trainer)
    if switched_off():
        return
    model = trainer.model
    has_one_encoder = has_one_packed_encoder(model)
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
            step_graphs = StepGraphs(
                model[0],
                compiled=compiled,
                divides_backward=has_other_ranks(),
            )
        model[0].forward.graphs = step_graphs
        prepare_training(trainer, compiled)
    collate_in_thread(trainer, join)


def has_one_packed_encoder(model: Model) -> bool:
    """Whether all columns of a batch go through one Transformer, which runs on packed tokens."""
    return isinstance(model, nn.Sequential) and isinstance(
        vars(model[0]).get("forward"),
        PackedForward,
    )


def collate_in_thread(trainer: Any, join: bool) -> None:
    """Replace the data collator of a trainer by one that works in a thread.

    Args:
        trainer: the trainer. A collator that works in a thread already stays.
        join: whether one forward runs all columns, if they go through one packed encoder.
    """
    collator = trainer.data_collator
    if isinstance(collator, AheadCollator):
        return
    has_one_encoder = has_one_packed_encoder(trainer.model)
    if has_one_encoder:
        collator = _with_direct_preprocess(collator, trainer.model)
    trainer.data_collator = AheadCollator(collator, join and has_one_encoder)


def _check_trainer(trainer: Any) -> None:
    """Check that the batches of a trainer can be collated in a thread, ahead of their steps.

    Args:
        trainer: the trainer.

    Raises:
        TypeError: if there is no data collator.
        ValueError: if a dataset is iterable, or ``dispatch_batches`` is on.
    """
    if getattr(trainer, "data_collator", None) is None:
        raise TypeError(
            "trainer must be a trainer of sentence-transformers, got "
            f"{type(trainer).__name__} without a data collator.",
        )
    for name in ("train_dataset", "eval_dataset"):
        if isinstance(getattr(trainer, name, None), IterableDataset):
            raise ValueError(
                f"{name} must be a Dataset with a length, because its batches are collated ahead "
                "of their steps, got an IterableDataset; load it without streaming.",
            )
    if getattr(getattr(trainer, "accelerator", None), "dispatch_batches", None):
        raise ValueError(
            "dispatch_batches must not be True for batches that are collated ahead, got True; "
            "leave it out of the trainer's accelerator_config, so that each process makes its own "
            "batches.",
        )


class AheadCollator:
    """A data collator that returns immediately and collates in a thread.

    It has the attributes of the collator that it wraps.

    Attributes:
        collator: the data collator of the trainer.
        join: whether the packed columns of a batch are concatenated for one forward.
        cut: counts the texts, and the truncated texts, of the batches that were used.
        read: converts the items of the dataset to rows, in the thread.
    """

    read: Callable[[list[Any]], list[Features]] = list

    def __init__(self, collator: Callable[[list[Features]], Features], join: bool = False) -> None:
        """Wrap a data collator. The first batch starts the thread.

        Args:
            collator: the data collator of the trainer.
            join: whether the packed columns of a batch are concatenated for one forward.
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
        """Start collating a batch.

        Args:
            features: items of the dataset: rows, or what ``read`` converts to rows.

        Returns:
            A :class:`PendingBatch`, whose ``to`` waits for the thread. In a worker process of a
            data loader, which works ahead of the steps by itself, the collated features.
        """
        is_worker = get_worker_info() is not None
        if is_worker:
            return self.collator(self.read(features))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tilefold-collate")
        truncation = Truncation()  # the thread counts truncated texts in it
        return PendingBatch(
            thread=self._thread,
            batch=self._thread.submit(self._collate, features, truncation),
            on_use=functools.partial(self._count_truncated, truncation, len(features)),
        )

    def close(self) -> None:
        """End the thread after the batches that it has begun. A later batch starts a new one."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    def _collate(self, features: list[Any], truncation: Truncation) -> CollatedBatch:
        """Collate a batch; this runs in the thread.

        Args:
            features: items of the dataset: rows, or what ``read`` converts to rows.
            truncation: the object that records the texts that the tokenizer truncates.
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
            truncation: the recorded calls of the tokenizer for this batch.
            n_rows: the number of rows of the batch.
        """
        for call in truncation.calls:
            # Besides columns of texts, the collator tokenises prompts, to learn their lengths. Such
            # a call has fewer texts than the batch has rows, and is not counted.
            if call.n_texts >= n_rows:
                self.cut.add("text", call.n_texts, len(call.truncated), call.max_length)


class PendingBatch:
    """A batch that a thread collates.

    Args:
        thread: the thread.
        batch: the batch that it collates.
        on_use: is called when the batch is moved to its device. A loader may drop its last batch,
            which then is not used.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        batch: Future[CollatedBatch],
        on_use: Callable[[], None],
    ) -> None:
        """Describe a batch that a thread collates.

        Args:
            thread: the thread.
            batch: the future of the batch.
            on_use: function that is called when the batch is used.
        """
        self._thread = thread
        self._batch = batch
        self._on_use = on_use

    def pin_memory(self) -> PendingBatch:
        """Return this batch in pinned memory, to which the thread copies it after collating."""
        pinned = self._thread.submit(_pin_memory, self._batch)
        return PendingBatch(self._thread, pinned, self._on_use)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Features:
        """Wait until the batch is collated, and return its features on a device.

        Errors of the collator are raised here.

        Args:
            device: the device.
            non_blocking: whether copies may overlap with other work. Copies from pinned memory
                always do, since torch does not reuse that memory before the copy is done.
        """

        def move(tensor: Tensor) -> Tensor:
            """Copy a tensor to the device."""
            return tensor.to(device, non_blocking=non_blocking or tensor.is_pinned())

        features = self._batch.result().map_tensors(move).split_columns()
        self._on_use()
        return features


def _pin_memory(batch: Future[CollatedBatch]) -> CollatedBatch:
    return batch.result().map_tensors(Tensor.pin_memory)


def _with_direct_preprocess(collator: Any, model: Model) -> Any:
    """Return a copy of a collator that passes texts directly to the model's Transformer.

    This skips the model's ``preprocess``, which examines the modality of every input. A collator
    that calls another function is returned as it is.

    Args:
        collator: a data collator of sentence-transformers.
        model: the model of the trainer.
    """
    preprocess = getattr(collator, "preprocess_fn", None)
    # Whether it is the method of the model's class, bound to this model. A function that the user
    # has put on the instance must run as it is.
    is_own_method = getattr(preprocess, "__self__", None) is model and getattr(
        preprocess, "__func__", None
    ) is getattr(type(model), "preprocess", None)
    if not is_own_method:
        return collator
    direct_collator = copy.copy(collator)
    direct_collator.preprocess_fn = functools.partial(_preprocess, model)
    return direct_collator


def _preprocess(model: Any, inputs: list[object], **kwargs: object) -> Features:
    """Preprocess inputs with the model's Transformer if all are texts, otherwise with the model."""
    are_texts = {*map(type, inputs)} == {str}
    preprocess = model[0].preprocess if are_texts else model.preprocess
    features: Features = preprocess(inputs, **kwargs)
    return features
