"""CUDA graphs of an accelerated model for few texts: token ids go in, rows come out.

The work of a query is some 300 launches, which take the CPU ten times as long as the GPU. A graph
repeats them by one launch, for tensors of the sizes and addresses that it was captured with: packed
tokens are copied into the smallest of a few sizes, whose unused tokens form a text with discarded
results. A graph reads weights from their memory, and so follows changes in place. All other changes
of the model are detected by a comparison while the GPU computes.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tilefold._internal.typing import Model
from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers._pooling import (
    StockPooling,
    fused_forwards,
    sparse_scores,
)
from tilefold.integrations.sentence_transformers.graphs.capture import (
    GraphCache,
    NumericSettings,
    capture_lock,
    numeric_settings,
    uncached_autocast,
    warn_slower,
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
from tilefold.integrations.sentence_transformers.packing.inputs import (
    EXPANDED,
    PACKED,
    packed_inputs,
    texts_to,
)
from tilefold.integrations.transformers.packed import LONGEST_NAMES, OFFSETS
from tilefold.modules.fused_pooling import Features, SparseOptions
from tilefold.ops.implementations import switched_off
from tilefold.ops.lsr_head import CapacityRows, rows_of_scores
from tilefold.pipeline.rows import RowCapacityError, SparseRows, packed_rows, unpack_capacity_rows

# Numbers of texts and of tokens of all texts that graphs are captured for. A batch takes the
# smallest sizes into which it fits.
TEXT_COUNTS = (1, 4, 16, 64)
TOKEN_COUNTS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Name of the model's attribute with its graphs.
GRAPHS = "encoding_graphs"
# Graphs of a model. The least recently used one is dropped.
MAX_GRAPHS = 64
# Entries that a sparse row may have, at first and at most.
CAPACITY = 1024
MAX_CAPACITY = 1 << 14
# Up to this number of texts, rows may have more entries by a factor: they take no more memory then
# than the rows of the largest number of texts.
_FEW_TEXTS = TEXT_COUNTS[-1] // 4
_FEW_TEXTS_CAPACITY_FACTOR = 4
# Token vectors, with padding, above which texts are encoded without a graph.
_MAX_PADDED_TOKENS = 1 << 17
# The second attempt has a new graph, if the model has changed since the capture.
_MAX_ATTEMPTS = 2
# Tokens that a tokenizer adds to a synthetic text.
SPECIAL_TOKENS = 2

R = TypeVar("R")


class CapturedEncoding(NamedTuple):
    """A captured graph with its inputs."""

    inputs: InputBuffers
    graph: Any


@dataclass
class _Encoding(ABC, Generic[R]):
    """A kind of encoding that graphs are captured for.

    Attributes:
        graphs: the model's graphs.
        task: argument ``task`` of the model's forward; ``None`` for none.
        pads_tokens: whether padded token vectors are computed, whose number is limited.
    """

    graphs: EncodingGraphs
    task: str | None
    pads_tokens: ClassVar[bool] = False

    @abstractmethod
    def key(self) -> tuple[Hashable, ...]:
        """Return the kind and the options, which are captured in a graph."""

    @abstractmethod
    def compute(self, features: Features, size: GraphSize) -> Sequence[Tensor]:
        """Run the model on static inputs; this is captured.

        Args:
            features: features of the model.
            size: size of the graph.

        Returns:
            The results on the device.
        """

    @abstractmethod
    def read(self, captured: CapturedEncoding, n_texts: int) -> R:
        """Convert the results of a finished replay.

        Args:
            captured: the graph.
            n_texts: number of texts of the batch.
        """


@dataclass
class _SparseEncoding(_Encoding[SparseRows]):
    """Encoding to sparse rows.

    Attributes:
        options: which entries of a row are kept.
        to_host: whether entries are copied to the CPU. Otherwise the entries of a single text stay
            on the GPU.
    """

    options: SparseOptions
    to_host: bool

    def key(self) -> tuple[Hashable, ...]:
        return ("sparse", *self.options)

    def compute(self, features: Features, size: GraphSize) -> Sequence[Tensor]:
        """Run the model and return its sparse rows, stored with a fixed capacity.

        Args:
            features: static inputs of the model.
            size: size of the graph. Its last text, which holds the unused tokens, is left out.

        Returns:
            Numbers of entries of the rows, numbers of stored entries, columns and values.
        """
        rows = self.graphs.sparse_rows(features, self.task, self.options, size)
        results = (rows.counts, rows.n_stored, rows.columns, rows.values)
        return [result[: size.texts] for result in results]

    def read(self, captured: CapturedEncoding, n_texts: int) -> SparseRows:
        """Return the rows of a batch after a replay.

        Args:
            captured: the graph.
            n_texts: number of texts of the batch.

        Raises:
            RowCapacityError: if a row has more entries than the graph can store.
        """
        graph = captured.graph
        counts, n_stored, columns, values = graph.host_results
        # A single row is not packed, so that its entries need not be moved on the GPU.
        on_gpu = not self.to_host and n_texts == 1 and self.graphs.device.type == "cuda"
        if on_gpu:
            _, _, columns, values = graph.device_results
        rows = unpack_capacity_rows(
            counts[:n_texts],
            n_stored[:n_texts],
            columns[:n_texts],
            values[:n_texts],
            capacity=self.graphs.row_capacity(captured.inputs.size),
            vocab_size=self.graphs.vocab_size,
        )
        if on_gpu:
            graph.record_read()  # the next replay overwrites the entries only after this copy
        return rows


@dataclass
class _VectorEncoding(_Encoding[list[Tensor]]):
    """Encoding to token vectors.

    Attributes:
        normalize: whether vectors are scaled to length 1.
        to_host: whether vectors are copied to the CPU. Otherwise they stay on the GPU.
    """

    normalize: bool
    to_host: bool
    pads_tokens: ClassVar[bool] = True

    def key(self) -> tuple[Hashable, ...]:
        return ("vectors", self.normalize)

    def compute(self, features: Features, size: GraphSize) -> Sequence[Tensor]:
        """Run the model and return its token vectors without padding.

        Args:
            features: static inputs of the model.
            size: size of the graph. Its last text, which holds the unused tokens, is left out.

        Returns:
            The number of vectors of each text, and the vectors of all texts.
        """
        outputs = self.graphs.run_model(features, self.task)
        vectors = outputs["token_embeddings"][: size.texts]
        mask = outputs["attention_mask"][: size.texts].bool()
        if self.normalize:
            vectors = nn.functional.normalize(vectors, p=2, dim=-1)
        return [mask.sum(1), packed_rows(vectors, mask)[: size.tokens]]

    def read(self, captured: CapturedEncoding, n_texts: int) -> list[Tensor]:
        """Return vectors ``[n, D]`` of each text after a replay, as views of one copy.

        Args:
            captured: the graph.
            n_texts: number of texts of the batch.
        """
        graph = captured.graph
        all_counts, host_vectors = graph.host_results
        _, device_vectors = graph.device_results
        counts = all_counts[:n_texts].tolist()
        all_vectors = host_vectors if self.to_host else device_vectors
        vectors = all_vectors[: sum(counts)].clone()
        if vectors.is_cuda:
            graph.record_read()  # the next replay overwrites the vectors only after this copy
        return list(torch.split(vectors, counts))


class _GraphKey(NamedTuple):
    """Key of a captured graph: properties of the batches that it encodes.

    Attributes:
        size: numbers of texts and tokens.
        encoding: kind and options of the encoding.
        task: task of the model, if a module reads it.
        constants: names and values of features that are no tensors.
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
    """Encodes up to 64 texts of an accelerated model at once by one of at most 64 CUDA graphs.

    Each method returns None where the model must run without a graph: on a CPU, in training mode,
    with hooks on its modules, with sharded or offloaded parameters, for more texts or tokens than
    there are graphs for, for networks that run padded (except for ColBERT's expanded queries), once
    a row had more than 16,384 entries, and where a capture failed, which one warning reports.

    Graphs are captured when they are first needed, and again after the model has changed. A call
    holds the model's lock, and models do not wait for one another.

    Args:
        owner: the accelerated model.
        capture: creates a graph, with the arguments of :class:`EncodingGraph`.

    Attributes:
        failed: whether no graph can be used.
        capacity: number of entries that a sparse row may have, unless a size of graphs needs more.
        device: device of the graphs.
        graphs: the captured graphs.
        vocab_size: number of columns V of sparse rows, once a graph was captured for them.
    """

    def __init__(self, owner: Model, capture: Callable[..., Any] = EncodingGraph) -> None:
        super().__init__(owner)
        self._graph_factory = capture
        self._initialize()

    def _initialize(self) -> None:
        """Set the attributes that are not pickled."""
        self._lock = threading.RLock()
        self.failed = False
        self.capacity = CAPACITY
        self._raised_capacities: dict[GraphSize, int] = {}
        self.device = torch.device("cpu")
        self.vocab_size = 0
        self._forget()

    def _forget(self) -> None:
        """Drop all graphs and the recorded state of the model."""
        self.graphs: GraphCache[_GraphKey, CapturedEncoding] = GraphCache(MAX_GRAPHS)
        self._memory: EncodingMemory | None = None
        self._state: ModelState | None = None
        self._reads_task: bool | None = None  # whether a module reads the task, None if unknown

    def __getstate__(self) -> Features:
        return {"owner": self.owner, "_graph_factory": self._graph_factory}

    def __setstate__(self, state: Features) -> None:
        vars(self).update(state)
        self._initialize()

    def may_run(self, texts: Sequence[str]) -> bool:
        """Whether a graph could encode texts, as far as this is known without tokenising them.

        Args:
            texts: the texts. Only their number matters.
        """
        if self.failed or switched_off() or torch.compiler.is_compiling():
            return False
        if not 0 < len(texts) <= TEXT_COUNTS[-1]:
            return False
        if self._state is not None:
            return not any(self._state.training_modes())
        return not self._needs_gpu() or torch.device(self.owner.device).type == "cuda"

    def _needs_gpu(self) -> bool:
        """Whether graphs are CUDA graphs. Tests on a CPU replace them."""
        return self._graph_factory is EncodingGraph

    @property
    def splade(self) -> bool:
        """Whether the model ends in stock SpladePooling modules."""
        state = ModelState(self.owner) if self._state is None else self._state
        return state.splade

    def sparse(
        self,
        texts: Sequence[str],
        *,
        task: str | None,
        prompt: str | None,
        options: SparseOptions,
        to_host: bool = True,
    ) -> SparseRows | None:
        """Encode texts to sparse rows by a CUDA graph.

        The rows of a graph have a fixed capacity. If a row exceeds it, the texts are encoded again
        by a graph of twice the capacity or more.

        Args:
            texts: the texts.
            task: argument ``task`` of the model's forward, if any.
            prompt: text that is put before every text.
            options: which entries of a row are kept.
            to_host: whether entries are copied to the CPU. Otherwise the entries of a single text
                stay on the GPU.

        Returns:
            The rows, or None if the model must run without a graph.
        """
        encoding = _SparseEncoding(self, task, options, to_host)
        while self.may_run(texts):
            try:
                return self._encode(texts, prompt, encoding)
            except RowCapacityError:
                continue  # the next graph has a larger capacity, or graphs are turned off
        return None

    def vectors(
        self,
        texts: Sequence[str],
        *,
        task: str | None,
        prompt: str | None,
        normalize: bool,
        to_host: bool,
    ) -> list[Tensor] | None:
        """Encode texts to token vectors.

        Args:
            texts: the texts.
            task: argument ``task`` of the model's forward, if any.
            prompt: text that is put before every text.
            normalize: whether vectors are scaled to length 1.
            to_host: whether vectors are copied to the CPU. Otherwise they stay on the GPU.

        Returns:
            Vectors ``[n, D]`` of each text, or None if the model must run without a graph.
        """
        if not self.may_run(texts):
            return None
        return self._encode(texts, prompt, _VectorEncoding(self, task, normalize, to_host))

    def warm(self, encode: Callable[[list[str]], object], longest: int = 64) -> None:
        """Capture graphs of all sizes for texts of up to `longest` tokens.

        Args:
            encode: encodes synthetic texts by these graphs.
            longest: number of tokens of the longest text.
        """
        for n_texts in TEXT_COUNTS:
            for n_tokens in TOKEN_COUNTS:
                # One token less than the share of a text, so that the batch surely fits this size.
                n_words = n_tokens // n_texts - SPECIAL_TOKENS - 1
                if n_words < 1 or n_tokens > longest * n_texts:
                    continue
                if self.may_run([""] * n_texts):
                    encode(["a " * n_words] * n_texts)

    def row_capacity(self, size: GraphSize) -> int:
        """Return the number of entries that a sparse row may have in graphs of a size.

        Args:
            size: size of the graphs.
        """
        raised = self._raised_capacities.get(size)
        if raised is not None:
            return raised
        if size.texts <= _FEW_TEXTS:
            return self.capacity * _FEW_TEXTS_CAPACITY_FACTOR
        return self.capacity

    def _raise_row_capacity(self, size: GraphSize, max_entries: int) -> None:
        """Drop the graphs of a size, and raise the row capacity of new ones to a sufficient one.

        All graphs are turned off if a row exceeds the largest capacity. An untrained model would
        need larger ones in every call.

        Args:
            size: size of the graphs.
            max_entries: number of entries of the longest row.
        """
        if max_entries > MAX_CAPACITY:
            self.failed = True
        capacity = self.row_capacity(size)
        while capacity < max_entries:
            capacity *= 2
        self._raised_capacities[size] = capacity
        for key in [key for key in self.graphs if key.size == size]:
            del self.graphs[key]

    def _encode(self, texts: Sequence[str], prompt: str | None, encoding: _Encoding[R]) -> R | None:
        """Tokenise texts, replay the graph of their size, and read its results.

        If the model has changed since the capture, all graphs are dropped and the texts are encoded
        again by a new one.

        Args:
            texts: the texts.
            prompt: text that is put before every text.
            encoding: kind of the encoding, which reads the results.

        Returns:
            The result of the encoding, or None if the model must run without a graph.

        Raises:
            RowCapacityError: if a row has more entries than the graph can store. Graphs of this
                size have been dropped.
        """
        with packed_inputs():
            features = self._tokenize(texts, prompt, encoding.task)
        size = _graph_size(features, len(texts), encoding.pads_tokens)
        if size is None:
            return None
        with self._lock:
            if self._state is not None and not self._state.has_same_memory():
                self._forget()
            for _ in range(_MAX_ATTEMPTS):
                captured = self._graph_for(size, features, encoding)
                if captured is None:
                    return None
                captured.inputs.fill(features)
                captured.graph.launch()
                # The CPU compares the model with its state at the capture while the GPU computes.
                is_valid = self._state is not None and self._state.is_unchanged()
                captured.graph.wait()
                if is_valid:
                    try:
                        return encoding.read(captured, len(texts))
                    except RowCapacityError as error:
                        self._raise_row_capacity(captured.inputs.size, error.max_entries)
                        raise
                self._forget()
        return None

    def _tokenize(self, texts: Sequence[str], prompt: str | None, task: str | None) -> Features:
        """Return the features of texts.

        The Transformer tokenises them directly if that gives the same features. This is faster than
        the model's own ``preprocess``.

        Args:
            texts: the texts.
            prompt: text that is put before every text.
            task: argument ``task`` of ``preprocess``, if any.
        """
        task_kwargs = {} if task is None else {"task": task}
        preprocess = texts_to(self.owner)
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
        """Return the graph for a batch from the cache, or capture it.

        Args:
            size: size of the graph.
            features: features of the batch on the CPU.
            encoding: kind of the encoding.

        Returns:
            The graph, or None if the model must run without one.
        """
        key = self._key(size, features, encoding)
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

    def _key(self, size: GraphSize, features: Features, encoding: _Encoding[R]) -> _GraphKey:
        """Return the key under which the graph for a batch is cached.

        It holds all that a graph cannot follow: sizes, shapes, options, features that are no
        tensors, and settings of torch.

        Args:
            size: size of the graph.
            features: features of the batch.
            encoding: kind of the encoding.
        """
        constants: list[tuple[str, Any]] = []
        shapes: list[tuple[str, torch.Size, torch.dtype]] = []
        is_packed = OFFSETS in features
        for name, value in features.items():
            if not isinstance(value, Tensor):
                if name not in LONGEST_NAMES:
                    constants.append((name, value))
            elif not is_packed:
                shapes.append((name, value.shape, value.dtype))
        if self._reads_task is None:
            self._reads_task = "task" in self.owner.get_model_kwargs()
        return _GraphKey(
            size=size,
            encoding=encoding.key(),
            task=encoding.task if self._reads_task else None,
            constants=tuple(sorted(constants)),
            shapes=tuple(sorted(shapes)),
            settings=numeric_settings("cuda"),
        )

    def _can_capture(self) -> bool:
        """Whether graphs of the model can be captured in its current state."""
        model = self.owner
        if self._needs_gpu() and torch.device(model.device).type != "cuda":
            return False
        if any(module.training for module in model.modules()):
            return False
        return can_be_captured(model)

    def _capture_graph(
        self,
        size: GraphSize,
        features: Features,
        encoding: _Encoding[R],
    ) -> CapturedEncoding | None:
        """Capture the encoding of a batch as a CUDA graph.

        If that fails, a warning is issued, and all graphs of the model are turned off.

        Args:
            size: size of the graph.
            features: features of a batch on the CPU.
            encoding: kind of the encoding.

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
                # Tensors created in inference mode could not be written to outside of it later.
                with torch.inference_mode(False):
                    inputs = InputBuffers(features, size, device)
                inputs.fill(features)
                graph = self._graph_factory(
                    lambda: encoding.compute(inputs.features(), size),
                    self._memory,
                )
        except Exception as error:  # too little memory, or an operation that graphs do not allow
            self._forget()
            self.failed = True
            limitation = "encodes few texts without CUDA graphs, which could not be captured"
            warn_slower(model, limitation, error, "Single texts")
            return None
        self.device = device
        if self._state is None:
            # After a forward pass, in which some modules set attributes.
            self._state = ModelState(model)
        return CapturedEncoding(inputs, graph)

    def run_model(self, features: Features, task: str | None) -> Features:
        """Run the model on static inputs so that the pass can be captured.

        Args:
            features: features of the model, which are changed.
            task: argument ``task`` of the model's forward, if any.

        Returns:
            The features with the outputs of all modules.
        """
        task_kwargs = {} if task is None else {"task": task}
        device_type = features["input_ids"].device.type
        with uncached_autocast(device_type), _IsinByComparison():
            outputs: Features = self.owner(features, **task_kwargs)
        return outputs

    def sparse_rows(
        self,
        features: Features,
        task: str | None,
        options: SparseOptions,
        size: GraphSize,
    ) -> CapacityRows:
        """Run the model on static inputs and return sparse rows of fixed capacity.

        A graph needs a fixed capacity, because the shapes of its results cannot change. Stock
        poolings compute such rows themselves. Scores of other poolings are converted.

        Args:
            features: features of the model.
            task: argument ``task`` of the model's forward, if any.
            options: which entries of a row are kept.
            size: size of the graph.
        """
        capacity = self.row_capacity(size)
        forwards = fused_forwards(self.owner)
        has_stock_poolings = all(isinstance(forward.pooling, StockPooling) for forward in forwards)
        with sparse_scores(options, capacity) if has_stock_poolings else contextlib.nullcontext():
            scores = self.run_model(features, task)["sentence_embedding"]
        if not isinstance(scores, CapacityRows):
            scores = rows_of_scores(scores.to_dense(), capacity, options.top_k, options.min_weight)
        self.vocab_size = scores.vocab_size
        return scores


def graphs_of(model: Model) -> EncodingGraphs | None:
    """Return the graphs of an accelerated model, None for another model."""
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
        """Call a function of torch, except for ``torch.isin`` of two tensors without options.

        Args:
            func: the function of torch that was called.
            types: classes of its arguments; not used.
            args: its positional arguments.
            kwargs: its arguments by name.
        """
        if func is torch.isin and not kwargs and all(isinstance(arg, Tensor) for arg in args):
            elements, test_elements = args
            return (elements[..., None] == test_elements.flatten()).any(-1)
        return func(*args, **(kwargs or {}))


def _graph_size(features: Features, n_texts: int, pads_tokens: bool) -> GraphSize | None:
    """Return the size of the graph for a batch: the smallest one into which it fits.

    Args:
        features: features of the batch on the CPU, packed or of expanded ColBERT queries.
        n_texts: number of its texts.
        pads_tokens: whether the model computes padded token vectors, whose number is limited.

    Returns:
        The size, or None if no graph can run the batch.
    """
    ids = features.get("input_ids")
    if not isinstance(ids, Tensor) or ids.device.type != "cpu":
        return None
    if not 0 < ids.numel() <= TOKEN_COUNTS[-1]:
        return None
    tensor_names = {name for name, value in features.items() if isinstance(value, Tensor)}
    if tensor_names != PACKED:
        if EXPANDED not in tensor_names:
            return None
        # Expanded queries all have one length, so that few graphs suffice for their exact sizes.
        return GraphSize(n_texts, ids.numel())
    size = GraphSize(
        texts=next(count for count in TEXT_COUNTS if count >= n_texts),
        tokens=next(count for count in TOKEN_COUNTS if count >= ids.size(1)),
    )
    n_padded_tokens = (size.texts + 1) * size.tokens  # with the text that holds the unused tokens
    if pads_tokens and n_padded_tokens > _MAX_PADDED_TOKENS:
        return None
    return size
