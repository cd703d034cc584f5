"""Encoding of a few texts by an accelerated model with CUDA graphs.

A query needs some 300 launches, which take the CPU ten times as long as the GPU. A graph repeats
them by one launch, for tensors of the sizes and addresses of its capture. So packed tokens are
copied into input tensors of the smallest of a few sizes. Unused tokens form a filler text, whose
results are discarded. A graph reads the weights from their memory, so it sees weights that are
changed in place. All other changes of the model are detected by a comparison while the GPU
computes.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilefold._internal.cuda_graphs import capture_lock, warn_capture_failed
from tilefold._internal.precision import autocast_of
from tilefold._internal.typing import Model
from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers._pooling import (
    StockPooling,
    fused_forwards,
    sparse_scores,
)
from tilefold.integrations.sentence_transformers._unit_vectors import (
    is_batch_invariant,
    unit_vectors,
)
from tilefold.integrations.sentence_transformers.graphs.capture import (
    GraphCache,
    NumericSettings,
    numeric_settings,
    uncached_autocast,
)
from tilefold.integrations.sentence_transformers.graphs.captured_state import (
    ModelState,
    can_be_captured,
)
from tilefold.integrations.sentence_transformers.graphs.encoding_graph import (
    EncodingGraph,
    EncodingMemory,
    GraphSize,
    InputBuffers,
)
from tilefold.integrations.sentence_transformers.packing.accelerate import (
    PackedForward,
    packed_forwards,
)
from tilefold.integrations.sentence_transformers.packing.inputs import (
    EXPANDED,
    PACKED,
    direct_preprocess_of,
    packed_inputs,
)
from tilefold.integrations.transformers.packed import LONGEST_NAMES, OFFSETS
from tilefold.modules.fused_pooling import Features, SparseOptions
from tilefold.ops.implementations import switched_off
from tilefold.ops.lsr_head import CapacityRows, rows_of_scores
from tilefold.pipeline.rows import RowCapacityError, SparseRows, packed_rows, unpack_capacity_rows

# Graphs are captured for these numbers of texts of a batch, and of tokens of all its texts. A batch
# uses the graph of the smallest numbers into which it fits.
GRAPH_TEXT_COUNTS = (1, 4, 16, 64)
GRAPH_TOKEN_COUNTS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Name of the model's attribute with its graphs.
GRAPHS = "encoding_graphs"
# Graphs of a model. The least recently used one is dropped.
MAX_GRAPHS = 64
# The number of entries that a sparse row may have, at first and at most.
CAPACITY = 1024
MAX_CAPACITY = 1 << 14
# Graphs of up to this number of texts have a larger row capacity, by the factor below. Their rows
# take no more memory than those of the largest number of texts.
_FEW_TEXTS = GRAPH_TEXT_COUNTS[-1] // 4
_FEW_TEXTS_CAPACITY_FACTOR = 4
# The largest number of token vectors, with padding, that a graph may compute.
_MAX_PADDED_TOKENS = 1 << 17
# The largest number of values of the padded token vectors that a Pooling reads: 512 MB in fp32. It
# computes a few tensors of this size, which the graphs of a model keep.
_MAX_POOLED_VALUES = 1 << 27
# Characters of a token of usual texts, at most. Whether texts with more of them fit into a graph is
# not examined.
_CHARACTERS_PER_TOKEN = 8
# If the model has changed since the capture, a second attempt uses a new graph.
_MAX_ATTEMPTS = 2
# The number of tokens that a tokenizer adds to a synthetic text.
SPECIAL_TOKENS = 2

R = TypeVar("R")


class CapturedEncoding(NamedTuple):
    """A captured graph with its inputs.

    Attributes:
        inputs: the static inputs.
        graph: an :class:`EncodingGraph`, or what tests replace it with.
    """

    inputs: InputBuffers
    graph: Any


class _SparseResults(NamedTuple):
    """Results of a graph that computes sparse rows, on the device or on the CPU.

    Attributes:
        counts: the number of nonzeros of each row, ``[n]``.
        n_stored: how many of them fit the capacity and are stored, ``[n]``.
        columns: the columns of the stored entries, ``[n, capacity]``.
        values: the values of the stored entries, ``[n, capacity]``.
    """

    counts: Tensor
    n_stored: Tensor
    columns: Tensor
    values: Tensor


class _VectorResults(NamedTuple):
    """Results of a graph that computes token vectors, on the device or on the CPU.

    Attributes:
        counts: the number of vectors of each text, ``[n]``.
        vectors: the vectors of all texts one after another, ``[T, D]``.
    """

    counts: Tensor
    vectors: Tensor


@dataclass
class _Encoding(ABC, Generic[R]):
    """A kind of encoding that graphs are captured for.

    Attributes:
        graphs: the graphs of the model.
        task: the argument ``task`` of the model's forward, or ``None``.
    """

    graphs: EncodingGraphs
    task: str | None

    @property
    def max_padded_tokens(self) -> int | None:
        """The largest number of padded token vectors of a graph, or None if it pads none."""
        return None

    @abstractmethod
    def key(self) -> tuple[Hashable, ...]:
        """Return what identifies this kind of encoding and its options in the key of a graph."""

    def can_be_captured(self, prompt: str | None) -> bool:
        """Whether the modules of the model, as they are now, allow a capture of this encoding.

        Args:
            prompt: text that is put before every text.
        """
        return True

    @abstractmethod
    def compute(self, features: Features, size: GraphSize) -> Sequence[Tensor]:
        """Run the model on the input tensors of a graph, for the capture.

        Args:
            features: the input tensors of the graph, whose addresses stay the same.
            size: the size of the graph.

        Returns:
            The results on the device.
        """

    @abstractmethod
    def read(self, captured: CapturedEncoding, n_texts: int) -> R:
        """Return the encoded texts from the results of a finished replay.

        Args:
            captured: the graph.
            n_texts: the number of texts of the batch.
        """


@dataclass
class _SparseEncoding(_Encoding[SparseRows]):
    """Encoding to sparse rows.

    Attributes:
        options: which entries of a row are kept.
        to_host: whether the entries of a single text are copied to the CPU instead of staying on
            the GPU. Those of several texts are always on the CPU.
    """

    options: SparseOptions
    to_host: bool

    def key(self) -> tuple[Hashable, ...]:
        return ("sparse", *self.options)

    def compute(self, features: Features, size: GraphSize) -> _SparseResults:
        """Run the model and return its sparse rows, stored with a fixed capacity.

        Args:
            features: the input tensors of the graph, whose addresses stay the same.
            size: the size of the graph. The model computes one more row: unused tokens form a
                filler text, whose row is dropped.
        """
        rows = self.graphs.fixed_capacity_rows(features, self.task, self.options, size)
        return _SparseResults(
            counts=rows.counts[: size.texts],
            n_stored=rows.n_stored[: size.texts],
            columns=rows.columns[: size.texts],
            values=rows.values[: size.texts],
        )

    def read(self, captured: CapturedEncoding, n_texts: int) -> SparseRows:
        """Return the rows of a batch after a replay.

        Args:
            captured: the graph, whose results are on the CPU and on the GPU.
            n_texts: the number of texts of the batch.

        Raises:
            RowCapacityError: if a row has more entries than the graph reserves for it.
        """
        graph = captured.graph
        cpu_results = _SparseResults(*graph.host_results)
        gpu_results = _SparseResults(*graph.device_results)
        # Entries of several rows must be gathered, which is done on the CPU. Those of a single row
        # are contiguous, so a slice of the results on the GPU suffices.
        stays_on_gpu = not self.to_host and n_texts == 1 and self.graphs.device.type == "cuda"
        entries = gpu_results if stays_on_gpu else cpu_results
        rows = unpack_capacity_rows(
            cpu_results.counts[:n_texts],
            cpu_results.n_stored[:n_texts],
            entries.columns[:n_texts],
            entries.values[:n_texts],
            capacity=self.graphs.row_capacity(captured.inputs.size),
            vocab_size=self.graphs.vocab_size,
        )
        if stays_on_gpu:
            graph.record_read()  # makes the next replay wait for the copy in `rows`
        return rows


@dataclass
class _VectorEncoding(_Encoding[list[Tensor]]):
    """Encoding to token vectors.

    Attributes:
        normalize: whether vectors are scaled to length 1.
        to_host: whether vectors are copied to the CPU instead of staying on the GPU.
    """

    normalize: bool
    to_host: bool

    @property
    def max_padded_tokens(self) -> int:
        """The largest number of padded token vectors of a graph."""
        return _MAX_PADDED_TOKENS

    def key(self) -> tuple[Hashable, ...]:
        return ("vectors", self.normalize)

    def compute(self, features: Features, size: GraphSize) -> _VectorResults:
        """Run the model and return its token vectors without padding.

        Args:
            features: the input tensors of the graph, whose addresses stay the same.
            size: the size of the graph. The model encodes one more text: unused tokens form a
                filler text, whose vectors are dropped.
        """
        outputs = self.graphs.run_model(features, self.task)
        vectors = outputs["token_embeddings"][: size.texts]
        mask = outputs["attention_mask"][: size.texts].bool()
        if self.normalize:
            vectors = unit_vectors(vectors, self.graphs.owner)
        return _VectorResults(
            counts=mask.sum(1),
            vectors=packed_rows(vectors, mask)[: size.tokens],
        )

    def read(self, captured: CapturedEncoding, n_texts: int) -> list[Tensor]:
        """Return the vectors ``[n, D]`` of each text after a replay, as views of one copy.

        Args:
            captured: the graph.
            n_texts: the number of texts of the batch.
        """
        graph = captured.graph
        cpu_results = _VectorResults(*graph.host_results)
        gpu_results = _VectorResults(*graph.device_results)
        counts = cpu_results.counts[:n_texts].tolist()
        all_vectors = cpu_results.vectors if self.to_host else gpu_results.vectors
        vectors = all_vectors[: sum(counts)].clone()
        if vectors.is_cuda:
            graph.record_read()  # makes the next replay wait for this copy
        return list(torch.split(vectors, counts))


class _DenseResults(NamedTuple):
    """Results of a graph that computes dense vectors, on the device or on the CPU.

    Attributes:
        vectors: a vector for each text, ``[n, D]``.
    """

    vectors: Tensor


@dataclass
class _DenseEncoding(_Encoding[Tensor]):
    """Encoding to dense vectors.

    Attributes:
        normalize: whether vectors are scaled to length 1, after other entries were dropped.
        dimension: the number of leading entries of a vector that are kept; ``None`` for all.
        to_host: whether vectors are copied to the CPU instead of staying on the GPU.
    """

    normalize: bool
    dimension: int | None
    to_host: bool

    @property
    def max_padded_tokens(self) -> int:
        """The largest number of padded token vectors that a Pooling of a graph reads."""
        return self.graphs.max_pooled_tokens()

    def key(self) -> tuple[Hashable, ...]:
        return ("dense", self.normalize, self.dimension)

    def can_be_captured(self, prompt: str | None) -> bool:
        """Whether no Pooling leaves out the tokens of the prompt.

        Args:
            prompt: text that is put before every text; it may be empty.
        """
        return not prompt or not self.graphs.leaves_out_prompts()

    def compute(self, features: Features, size: GraphSize) -> _DenseResults:
        """Run the model and return its dense vectors.

        Args:
            features: the input tensors of the graph, whose addresses stay the same.
            size: the size of the graph. The model encodes one more text: unused tokens form a
                filler text, whose vector is dropped.
        """
        outputs = self.graphs.run_model(features, self.task)
        vectors = outputs["sentence_embedding"][: size.texts, : self.dimension]
        if self.normalize:
            vectors = unit_vectors(vectors, self.graphs.owner)
        return _DenseResults(vectors)

    def read(self, captured: CapturedEncoding, n_texts: int) -> Tensor:
        """Return a copy ``[n, D]`` of the vectors of a batch after a replay.

        Args:
            captured: the graph.
            n_texts: the number of texts of the batch.
        """
        graph = captured.graph
        results = _DenseResults(*(graph.host_results if self.to_host else graph.device_results))
        vectors = results.vectors[:n_texts].clone()
        if vectors.is_cuda:
            graph.record_read()  # makes the next replay wait for this copy
        return vectors


class _GraphKey(NamedTuple):
    """Key of a captured graph: the properties of the batches that it can encode.

    Attributes:
        size: the numbers of texts and tokens.
        encoding: the kind and the options of the encoding.
        task: the task of the model, if a module reads it.
        constants: names and values of the features that are not tensors.
        shapes: names, shapes and dtypes of padded features; empty for packed ones.
        settings: settings of torch.
    """

    size: GraphSize
    encoding: tuple[Hashable, ...]
    task: str | None
    constants: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[str, torch.Size, torch.dtype], ...]
    settings: NumericSettings


class EncodingGraphs(Replacement):
    """Encodes up to 64 texts of an accelerated model at once with one of at most 64 CUDA graphs.

    The methods that encode return None if the model must run without a graph: on a CPU, in training
    mode, with hooks on its modules, with sharded or offloaded parameters, for more texts or tokens
    than the largest graph has room for, for networks that run padded (except for ColBERT's expanded
    queries), for a Pooling that leaves out the tokens of a prompt, within :meth:`paused`, after a
    row had more than 16,384 entries, or after a failed capture, which issued a warning.

    Graphs are captured when they are first needed, and again after the model has changed. A call
    locks the graphs of its model only.

    Attributes:
        failed: whether no graph can be used.
        capacity: the number of entries that a sparse row may have in most graphs, see
            :meth:`row_capacity`.
        device: the device of the graphs.
        graphs: the captured graphs.
        vocab_size: the number of columns V of sparse rows, once a graph was captured for them.
    """

    def __init__(self, owner: Model, graph_factory: Callable[..., Any] = EncodingGraph) -> None:
        """Prepare to capture graphs, the first time that they are needed.

        Args:
            owner: the accelerated model.
            graph_factory: creates a graph, with the arguments of :class:`EncodingGraph`. Tests on a
                CPU pass another class.
        """
        super().__init__(owner)
        self._graph_factory = graph_factory
        self._initialize()

    def _initialize(self) -> None:
        """Set the attributes that are not pickled."""
        self._lock = threading.RLock()
        self._is_paused = False
        self.failed = False
        self.capacity = CAPACITY
        # Capacities that were raised after a row overflowed, by the size of the graphs.
        self._raised_capacities: dict[GraphSize, int] = {}
        self.device = torch.device("cpu")
        self.vocab_size = 0
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        """Drop all graphs and the recorded state of the model."""
        self.graphs: GraphCache[_GraphKey, CapturedEncoding] = GraphCache(MAX_GRAPHS)
        self._memory: EncodingMemory | None = None
        self._state: ModelState | None = None
        self._reads_task: bool | None = None  # whether a module reads the task, None if unknown
        # Whether a Pooling leaves out the tokens of the prompt, None if unknown.
        self._pools_without_prompts: bool | None = None
        self._max_pooled_tokens: int | None = None  # see max_pooled_tokens(), None if unknown
        self._packed_forwards: list[PackedForward] | None = None  # of the model, None if unknown

    def __getstate__(self) -> Features:
        return {"owner": self.owner, "_graph_factory": self._graph_factory}

    def __setstate__(self, state: Features) -> None:
        vars(self).update(state)
        self._initialize()

    def may_run(self, texts: Sequence[str]) -> bool:
        """Whether a graph might encode texts, judging by their number and the state of the model.

        Args:
            texts: the texts.
        """
        if self.failed or self._is_paused or switched_off() or torch.compiler.is_compiling():
            return False
        if not 0 < len(texts) <= GRAPH_TEXT_COUNTS[-1]:
            return False
        if self._state is not None:  # a graph was captured
            return not any(self._state.training_modes())
        return self._is_on_required_device()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model run without graphs while the context is open, and keep the graphs.

        The caller may change the model within the context, if it undoes the change before the end.
        Without this context, the first text after the change would drop all graphs.
        """
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _needs_gpu(self) -> bool:
        """Whether graphs are CUDA graphs. Tests on a CPU replace them."""
        return self._graph_factory is EncodingGraph

    def _is_on_required_device(self) -> bool:
        """Whether the model is on a device on which its graphs can be captured."""
        if not self._needs_gpu():
            return True
        return torch.device(self.owner.device).type == "cuda"

    @property
    def ends_in_splade(self) -> bool:
        """Whether the last modules of the model are SpladePooling of sentence-transformers."""
        state = ModelState(self.owner) if self._state is None else self._state
        return state.ends_in_splade

    def encode_sparse(
        self,
        texts: Sequence[str],
        *,
        task: str | None,
        prompt: str | None,
        options: SparseOptions,
        to_host: bool = True,
    ) -> SparseRows | None:
        """Encode texts to sparse rows with a CUDA graph, if possible.

        The rows of a graph have a fixed capacity. If a row exceeds it, the texts are encoded again
        with a graph of at least twice the capacity.

        Args:
            texts: the texts.
            task: the argument ``task`` of the model's forward, or None.
            prompt: text that is put before every text.
            options: which entries of a row are kept.
            to_host: whether the entries of a single text are copied to the CPU instead of staying
                on the GPU. Those of several texts are always copied.

        Returns:
            The rows, or None if the model must run without a graph.
        """
        encoding = _SparseEncoding(self, task, options, to_host)
        while self.may_run(texts):
            try:
                return self._encode(texts, prompt, encoding)
            except RowCapacityError:
                # The next graph has a larger capacity. If that was the largest one, graphs are
                # turned off and the loop ends.
                continue
        return None

    def encode_vectors(
        self,
        texts: Sequence[str],
        *,
        task: str | None,
        prompt: str | None,
        normalize: bool,
        to_host: bool,
    ) -> list[Tensor] | None:
        """Encode texts to token vectors with a CUDA graph, if possible.

        Args:
            texts: the texts.
            task: the argument ``task`` of the model's forward, or None.
            prompt: text that is put before every text.
            normalize: whether vectors are scaled to length 1.
            to_host: whether vectors are copied to the CPU instead of staying on the GPU.

        Returns:
            The vectors ``[n, D]`` of each text, or None if the model must run without a graph.
        """
        if not self.may_run(texts):
            return None
        return self._encode(texts, prompt, _VectorEncoding(self, task, normalize, to_host))

    def encode_dense(
        self,
        texts: Sequence[str],
        *,
        task: str | None,
        prompt: str | None,
        normalize: bool,
        dimension: int | None,
        to_host: bool,
    ) -> Tensor | None:
        """Encode texts to dense vectors with a CUDA graph, if possible.

        Args:
            texts: the texts.
            task: the argument ``task`` of the model's forward, or None.
            prompt: text that is put before every text.
            normalize: whether vectors are scaled to length 1, after other entries were dropped.
            dimension: the number of leading entries of a vector that are kept; None for all.
            to_host: whether vectors are copied to the CPU instead of staying on the GPU.

        Returns:
            The vectors ``[n, D]``, or None if the model must run without a graph.
        """
        if not self.may_run(texts) or not self._may_fit(texts):
            return None
        encoding = _DenseEncoding(self, task, normalize, dimension, to_host)
        if not encoding.can_be_captured(prompt):  # saves the tokenisation
            return None
        return self._encode(texts, prompt, encoding)

    def capture_all_sizes(self, encode: Callable[[list[str]], object], longest: int = 64) -> None:
        """Capture the graphs for all numbers of texts of up to ``longest`` tokens.

        Encoding synthetic texts of each size captures its graph.

        Args:
            encode: encodes texts with the model of these graphs, for example its ``encode``.
            longest: the number of tokens of the longest text. The default suits queries.
        """
        for n_texts in GRAPH_TEXT_COUNTS:
            for n_tokens in GRAPH_TOKEN_COUNTS:
                # The largest number of words of one token, such as "a", per text. One token per
                # text stays free, so that the batch surely fits this size.
                n_words = n_tokens // n_texts - SPECIAL_TOKENS - 1
                if n_words < 1 or n_tokens > longest * n_texts:
                    continue
                texts = ["a " * n_words] * n_texts
                if self.may_run(texts):
                    encode(texts)

    def row_capacity(self, size: GraphSize) -> int:
        """Return the number of entries that a sparse row may have in graphs of a size.

        Args:
            size: the size of the graphs.
        """
        raised_capacity = self._raised_capacities.get(size)
        if raised_capacity is not None:
            return raised_capacity
        if size.texts <= _FEW_TEXTS:
            return self.capacity * _FEW_TEXTS_CAPACITY_FACTOR
        return self.capacity

    def _raise_row_capacity(self, size: GraphSize, max_entries: int) -> None:
        """Raise the number of entries that graphs of a size reserve for each sparse row.

        The graphs of this size are dropped, so that new ones are captured. Beyond the largest
        capacity, all graphs are turned off. Otherwise an untrained model, whose rows have almost no
        zeros, would be captured again and again.

        Args:
            size: the size of the graphs.
            max_entries: the number of entries of the longest row.
        """
        if max_entries > MAX_CAPACITY:
            self.failed = True
            return
        capacity = self.row_capacity(size)
        while capacity < max_entries:
            capacity *= 2
        self._raised_capacities[size] = capacity
        for key in [key for key in self.graphs if key.size == size]:
            del self.graphs[key]

    def _encode(self, texts: Sequence[str], prompt: str | None, encoding: _Encoding[R]) -> R | None:
        """Tokenise texts, replay the graph of their size and read its results.

        If the model has changed since the capture, all graphs are dropped and the texts are encoded
        again with a new one.

        Args:
            texts: the texts.
            prompt: text that is put before every text.
            encoding: whether sparse rows, token vectors or dense vectors are computed; it reads
                them from the results of a graph.

        Returns:
            The encoded texts, or None if the model must run without a graph.

        Raises:
            RowCapacityError: if a row has more entries than the graph can store. The next graph of
                this size has a larger capacity.
        """
        with packed_inputs():
            features = self._tokenize(texts, prompt, encoding.task)
        size = _choose_graph_size(
            features,
            len(texts),
            encoding.max_padded_tokens,
            self._padded_token_count,
        )
        if size is None:
            return None
        with self._lock:
            # A replay that reads freed memory may fail. Other changes are detected after a replay.
            if self._state is not None and not self._state.has_same_memory():
                self._drop_graphs()
            for _ in range(_MAX_ATTEMPTS):
                if not encoding.can_be_captured(prompt):  # the model has changed since the capture
                    return None
                captured = self._graph_for(size, features, encoding)
                if captured is None:
                    return None
                is_valid = self._replay(captured, features)
                if not is_valid:  # the model has changed since the capture
                    self._drop_graphs()
                    continue
                try:
                    return encoding.read(captured, len(texts))
                except RowCapacityError as error:
                    self._raise_row_capacity(captured.inputs.size, error.max_entries)
                    raise
        return None

    def _padded_token_count(self, n_tokens: int) -> int:
        """Return the least number of tokens of a graph for a batch of packed texts.

        It is the number of tokens of the batch, except for a small batch of a batch-invariant
        model: each of its layers would pad the rows, for equal bits in every batch.

        Args:
            n_tokens: the number of tokens of the batch.
        """
        if not is_batch_invariant(self.owner):
            return n_tokens
        forwards = self._packed_forwards
        if forwards is None:
            forwards = packed_forwards(self.owner)
            self._packed_forwards = forwards
        with autocast_of(self.owner):  # the dtype decides which numbers of rows give equal bits
            counts = [forward.padded_token_count(n_tokens) for forward in forwards]
        return max(counts, default=n_tokens)

    def _replay(self, captured: CapturedEncoding, features: Features) -> bool:
        """Replay a graph on a batch, and return whether its results are valid.

        They are valid if the model is in its state at the capture. The CPU checks that while the
        GPU computes.

        Args:
            captured: the graph.
            features: the features of the batch on the CPU.
        """
        captured.inputs.fill(features)
        captured.graph.launch()
        is_valid = self._state is not None and self._state.is_unchanged()
        captured.graph.wait()
        return is_valid

    def _tokenize(self, texts: Sequence[str], prompt: str | None, task: str | None) -> Features:
        """Tokenise texts, without the type checks of the model's ``preprocess`` if possible.

        Args:
            texts: the texts.
            prompt: text that is put before every text.
            task: the argument ``task`` of ``preprocess``, or None.
        """
        task_kwargs = {} if task is None else {"task": task}
        preprocess = direct_preprocess_of(self.owner)
        if preprocess is not None:
            return preprocess(texts, prompt=prompt, **task_kwargs)
        features: Features = self.owner.preprocess(list(texts), prompt=prompt, **task_kwargs)
        return features

    def _graph_for(
        self,
        size: GraphSize,
        features: Features,
        encoding: _Encoding[R],
    ) -> CapturedEncoding | None:
        """Return the cached graph for a batch, or capture it.

        Args:
            size: the size of the graph.
            features: the features of the batch on the CPU.
            encoding: whether sparse rows, token vectors or dense vectors are computed, and how.

        Returns:
            The graph, or None if the model must run without one.
        """
        key = self._make_key(size, features, encoding)
        try:
            captured = self.graphs.use(key)
        except TypeError:  # a feature is not hashable
            return None
        if captured is None and self._can_capture():
            captured = self._capture_graph(size, features, encoding)
            if captured is not None:
                self.graphs.make_space()
                self.graphs[key] = captured
        return captured

    def _make_key(self, size: GraphSize, features: Features, encoding: _Encoding[R]) -> _GraphKey:
        """Return the key under which the graph for a batch is cached.

        Batches with different keys need different graphs.

        Args:
            size: the size of the graph.
            features: the features of the batch.
            encoding: whether sparse rows, token vectors or dense vectors are computed, and how.
        """
        tensors = {name: value for name, value in features.items() if isinstance(value, Tensor)}
        constants = [  # such as the modality
            (name, value)
            for name, value in features.items()
            if name not in tensors and name not in LONGEST_NAMES
        ]
        shapes = []
        if OFFSETS not in features:  # packed tensors have shapes that follow from the size
            shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        return _GraphKey(
            size=size,
            encoding=encoding.key(),
            task=encoding.task if self._model_reads_task() else None,
            constants=tuple(sorted(constants)),
            shapes=tuple(sorted(shapes)),
            settings=numeric_settings("cuda"),
        )

    def _model_reads_task(self) -> bool:
        """Whether a module of the model reads the argument ``task``."""
        if self._reads_task is None:
            self._reads_task = "task" in self.owner.get_model_kwargs()
        return self._reads_task

    def _may_fit(self, texts: Sequence[str]) -> bool:
        """Whether a graph may have room for texts, judging by their numbers of characters.

        Without this estimate, long texts would be tokenised twice: here, only to learn that they do
        not fit into a graph, and again by the slower way.

        Args:
            texts: at most as many texts as the largest graph has room for. Their token vectors are
                padded to the number of tokens of the graph.
        """
        # A graph has a filler text for unused tokens, besides its texts.
        n_sequences = next(count for count in GRAPH_TEXT_COUNTS if count >= len(texts)) + 1
        max_padded_tokens = self.max_pooled_tokens()
        fitting_counts = (
            count for count in GRAPH_TOKEN_COUNTS if n_sequences * count <= max_padded_tokens
        )
        max_tokens = max(fitting_counts, default=0)  # of all texts of a graph
        max_length = self.owner.max_seq_length
        tokens_per_text = max_tokens if max_length is None else max_length  # texts are truncated
        n_tokens = sum(min(len(text) // _CHARACTERS_PER_TOKEN, tokens_per_text) for text in texts)
        return n_tokens <= max_tokens

    def max_pooled_tokens(self) -> int:
        """Return the largest number of padded tokens of a batch whose graph contains a Pooling.

        A Pooling reads a vector for each of them, so that wide vectors permit fewer tokens.
        """
        if self._max_pooled_tokens is None:
            widths = [
                module.embedding_dimension
                for module in self.owner.modules()
                if isinstance(module, Pooling)
            ]
            max_tokens = _MAX_POOLED_VALUES // max(widths, default=1)
            self._max_pooled_tokens = min(_MAX_PADDED_TOKENS, max_tokens)
        return self._max_pooled_tokens

    def leaves_out_prompts(self) -> bool:
        """Whether a Pooling of the model leaves out the tokens of the prompt.

        Such a Pooling looks for padding before the prompt, for which the CPU waits for the GPU. A
        CUDA graph cannot capture that.
        """
        if self._pools_without_prompts is None:
            self._pools_without_prompts = any(
                isinstance(module, Pooling) and not module.include_prompt
                for module in self.owner.modules()
            )
        return self._pools_without_prompts

    def _can_capture(self) -> bool:
        """Whether graphs of the model can be captured in its current state."""
        model = self.owner
        if not self._is_on_required_device() or any(module.training for module in model.modules()):
            return False
        return can_be_captured(model)

    def _capture_graph(
        self,
        size: GraphSize,
        features: Features,
        encoding: _Encoding[R],
    ) -> CapturedEncoding | None:
        """Capture the encoding of a batch as a CUDA graph.

        If that fails, a warning is issued and all graphs of the model are turned off.

        Args:
            size: the size of the graph.
            features: the features of a batch on the CPU.
            encoding: whether sparse rows, token vectors or dense vectors are computed, and how.

        Returns:
            The graph with its inputs, or None if the capture failed.
        """
        model = self.owner
        device = torch.device(model.device)
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        try:
            with capture_lock, torch.inference_mode(), on_device:
                if self._memory is None and self._needs_gpu():
                    self._memory = EncodingMemory()
                # Tensors that are created in inference mode cannot be written outside of it.
                with torch.inference_mode(False):
                    inputs = InputBuffers(features, size, device)
                inputs.fill(features)
                graph = self._graph_factory(
                    lambda: encoding.compute(inputs.copy_to_device(), size),
                    self._memory,
                )
        except Exception as error:  # too little memory, or an operation that graphs do not allow
            self._drop_graphs()
            self.failed = True
            warn_capture_failed(
                f"{type(model).__name__} encodes few texts without CUDA graphs, which could not be "
                "captured",
                error,
            )
            return None
        self.device = device
        if self._state is None:
            # Only now: some modules set attributes in their first forward pass.
            self._state = ModelState(model)
        return CapturedEncoding(inputs, graph)

    def run_model(self, features: Features, task: str | None) -> Features:
        """Run the model on the input tensors of a graph, for the capture.

        Autocast's cache of weights and ``torch.isin`` are replaced, since they cannot be captured.

        Args:
            features: the features of the model, which are changed in place.
            task: the argument ``task`` of the model's forward, or None.

        Returns:
            The features with the outputs of all modules.
        """
        task_kwargs = {} if task is None else {"task": task}
        device_type = features["input_ids"].device.type
        with uncached_autocast(device_type), _IsinByComparison():
            outputs: Features = self.owner(features, **task_kwargs)
        return outputs

    def fixed_capacity_rows(
        self,
        features: Features,
        task: str | None,
        options: SparseOptions,
        size: GraphSize,
    ) -> CapacityRows:
        """Run the model on the input tensors of a graph; return sparse rows of a fixed capacity.

        The capacity is the number of entries that are reserved for each row: the shapes of a
        graph's results cannot change. A SpladePooling of sentence-transformers is asked for such
        rows. The scores of other poolings are converted.

        Args:
            features: the features of the model.
            task: the argument ``task`` of the model's forward, or None.
            options: which entries of a row are kept.
            size: the size of the graph.
        """
        capacity = self.row_capacity(size)
        forwards = fused_forwards(self.owner)
        # Poolings of sentence-transformers can return such rows themselves.
        has_splade_poolings = all(isinstance(forward.pooling, StockPooling) for forward in forwards)
        output_context: AbstractContextManager[None] = contextlib.nullcontext()
        if has_splade_poolings:
            output_context = sparse_scores(options, capacity)
        with output_context:
            scores = self.run_model(features, task)["sentence_embedding"]
        if isinstance(scores, CapacityRows):
            rows = scores
        else:
            rows = rows_of_scores(scores.to_dense(), capacity, options.top_k, options.min_weight)
        self.vocab_size = rows.vocab_size
        return rows


def graphs_of(model: Model) -> EncodingGraphs | None:
    """Return the graphs of an accelerated model, or None for other models."""
    graphs: EncodingGraphs | None = vars(model).get(GRAPHS)
    return graphs


class _IsinByComparison(TorchFunctionMode):
    """Computes ``torch.isin`` by comparing all pairs of elements.

    Otherwise torch sorts the elements if they are many, which cannot be captured.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace ``torch.isin(elements, test_elements)``, and call any other function unchanged.

        Args:
            func: the function of torch that was called.
            types: the classes of its arguments; not used.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        is_plain_isin = func is torch.isin and not kwargs
        if is_plain_isin and all(isinstance(arg, Tensor) for arg in args):
            elements, test_elements = args
            return (elements[..., None] == test_elements.flatten()).any(-1)
        return func(*args, **(kwargs or {}))


def _choose_graph_size(
    features: Features,
    n_texts: int,
    max_padded_tokens: int | None,
    padded_token_count: Callable[[int], int],
) -> GraphSize | None:
    """Return the size of the graph that runs a batch: its numbers of texts and of tokens.

    Args:
        features: the features of the batch.
        n_texts: the number of texts of the batch.
        max_padded_tokens: the largest number of token vectors of a graph after padding; None if it
            does not pad them.
        padded_token_count: returns the least number of tokens of the graph, for the number of
            tokens of a packed batch.

    Returns:
        The size, or None if no graph can run the batch.
    """
    ids = features.get("input_ids")
    if not isinstance(ids, Tensor) or ids.device.type != "cpu":
        return None
    if not 0 < ids.numel() <= GRAPH_TOKEN_COUNTS[-1]:
        return None
    tensor_names = {name for name, value in features.items() if isinstance(value, Tensor)}
    if tensor_names == PACKED:
        return _choose_packed_graph_size(
            n_texts,
            padded_token_count(ids.size(1)),
            max_padded_tokens,
        )
    if EXPANDED in tensor_names:
        # ColBERT queries are expanded to one length, so that exact sizes need few graphs.
        return GraphSize(n_texts, ids.numel())
    return None


def _choose_packed_graph_size(
    n_texts: int,
    n_tokens: int,
    max_padded_tokens: int | None,
) -> GraphSize | None:
    """Return the smallest size of graphs into which a packed batch fits.

    Args:
        n_texts: the number of texts of the batch.
        n_tokens: the number of tokens that the graph must have room for.
        max_padded_tokens: the largest number of padded token vectors of a graph; None if it pads
            none.

    Returns:
        The size, or None if padding would take too much memory.
    """
    size = GraphSize(
        texts=next(count for count in GRAPH_TEXT_COUNTS if count >= n_texts),
        tokens=next(count for count in GRAPH_TOKEN_COUNTS if count >= n_tokens),
    )
    n_padded_tokens = (size.texts + 1) * size.tokens  # with the filler text
    if max_padded_tokens is not None and n_padded_tokens > max_padded_tokens:
        return None
    return size
