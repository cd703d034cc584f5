"""CUDA graphs of an accelerated model for few texts: tokens go in, rows come out, and the host
launches once.

The work of a query is some 300 launches, which take the host ten times what they take the GPU. A
graph repeats them at once, for tensors of the sizes and addresses that it was captured with: packed
tokens are copied into the smallest of a few sizes, whose rest is a text that nobody reads. Weights
are read where they lie, so that a graph sees every change that is made in place; all else that it
cannot follow is compared with what it was, while the GPU computes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

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
from tilefold.integrations.sentence_transformers.graphs.captured_state import State, may_be_captured
from tilefold.integrations.sentence_transformers.graphs.training import (
    autocast_dtype,
    uncached_autocast,
    warn_slower,
)
from tilefold.integrations.sentence_transformers.packing.inputs import (
    EXPANDED,
    PACKED,
    packed_inputs,
    texts_to,
)
from tilefold.integrations.transformers.packed import LONGEST_NAMES
from tilefold.modules.fused_pooling import Features, SparseOptions
from tilefold.ops.implementations import switched_off, tf32_allowed
from tilefold.ops.lsr_head import CapacityRows, rows_of_scores
from tilefold.pipeline.rows import RowCapacityError, SparseRows, packed_rows, unpack_capacity_rows

TEXTS = (1, 4, 16, 64)  # that graphs are made for; the next larger one takes a batch
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # of all texts of a batch
GRAPHS = "encoding_graphs"  # the attribute of the model
LIMIT = 64  # graphs of a model, of which the one that was not used for longest goes first
CAPACITY, MAX_CAPACITY = (
    1024,
    1 << 14,
)  # entries of a row at first, and at most; doubled where a row has more
_MORE_ROOM = 4  # times as many entries, for up to a fourth of the most texts
_PLACES = 1 << 17  # of padded token vectors, above which texts are encoded without a graph
_WARM_RUNS = 2  # before a capture: libraries set themselves up, kernels are built
_capturing = threading.Lock()  # one model at a time

Body = Callable[[], Sequence[Tensor]]
R = TypeVar("R")


class Inputs:
    """Tensors of fixed sizes on the device, copied at once from one buffer on the host.

    Packed features are put into room for `texts` and `tokens`, and one text more that holds what is
    left; features that are padded keep their shapes.
    """

    def __init__(self, features: Features, texts: int, tokens: int, device: torch.device) -> None:
        self.others = {
            name: value for name, value in features.items() if not isinstance(value, Tensor)
        }
        self.packed = "cu_seq_lens_q" in features
        self.sizes = self.texts, self.tokens = texts, tokens
        shapes = {
            name: (tensor.shape, tensor.dtype)
            for name, tensor in features.items()
            if isinstance(tensor, Tensor)
        }
        if self.packed:
            self.others |= dict.fromkeys(LONGEST_NAMES, tokens)
            row = torch.Size([1, tokens])
            shapes = dict.fromkeys(("input_ids", "position_ids"), (row, torch.int64))
            shapes["cu_seq_lens_q"] = torch.Size([texts + 2]), torch.int32
        sizes = [shape.numel() for shape, _ in shapes.values()]
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = zip(
            shapes.items(),
            torch.split(self._host, sizes),
            torch.split(self._device, sizes),
            strict=True,
        )
        self._parts = {
            name: (host.view(shape).numpy(), there.view(shape), kind)
            for (name, (shape, kind)), host, there in parts
        }

    def fill(self, features: Features) -> None:
        """Put features into the buffer on the host; the rest keeps tokens of others."""
        for name, (host, _, _) in self._parts.items():
            given = features[name].numpy()
            if not self.packed:
                host[:] = given
            elif given.ndim == 2:
                host[:, : given.shape[1]] = given
            else:
                host[: given.size] = given
                host[given.size : -1] = given[-1]
                host[-1] = self.tokens

    def features(self) -> Features:
        """Features for the model, copied to the device."""
        self._device.copy_(self._host, non_blocking=True)
        found: Features = {name: there.to(kind) for name, (_, there, kind) in self._parts.items()}
        if self.packed:
            found["cu_seq_lens_k"] = found["cu_seq_lens_q"]
        return found | self.others


class Turns:
    """Memory that all graphs of a model share, so that each comes after the one before it, on
    whatever stream.
    """

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = (
            None  # where one ran, and when it was read
        )


class Captured:
    """Graph of a function of static tensors: its results on the device, and their copies on the
    host.
    """

    def __init__(self, body: Body, turns: Turns) -> None:
        self._turns, stream = turns, turns.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_RUNS):
                found = body()
        stream.synchronize()
        self.host = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in found
        ]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self._graph,
            pool=turns.pool,
            stream=stream,
            capture_error_mode="thread_local",
        ):
            self.device = list(body())
            for host, tensor in zip(self.host, self.device, strict=True):
                host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def launch(self) -> None:
        """Begin, after what the current stream was given before, such as changes of weights."""
        stream = torch.cuda.current_stream(self._turns.stream.device)
        last, self._turns.last = self._turns.last, (stream, self._done)
        if last is not None and last[0] != stream:
            stream.wait_event(last[1])
        self._graph.replay()
        self._done.record(stream)

    def wait(self) -> None:
        self._done.synchronize()

    def lent(self) -> None:
        """Let the next launch, of whatever thread, come after what this one's stream was given to
        read results.
        """
        if self._turns.last is not None:
            self._done.record(self._turns.last[0])


class _Asked(NamedTuple):
    """A kind of work; each has graphs of its own."""

    body: Callable[[Features, int], Sequence[Tensor]]  # of static features and the number of texts
    kind: tuple[Hashable, ...]
    task: str | None


class EncodingGraphs(Replacement):
    """Encodes up to 64 texts of an accelerated model at once, as one of at most 64 CUDA graphs.

    Each method gives None where the model must run as it is: on a CPU, in training mode, with hooks
    on its modules, with sharded or offloaded parameters, for more texts or tokens than there are
    graphs for, for networks that run padded (but for ColBERT's expanded queries), once a row had
    more than 16,384 entries, and where a capture failed, which is told once. Graphs are captured
    when they are first needed, and anew after the model has changed. A call holds the model's lock;
    models do not wait for one another. `capture` makes a graph of a function.
    """

    def __init__(self, owner: Model, capture: Callable[..., Any] = Captured) -> None:
        super().__init__(owner)
        self._capture = capture
        self._set_up()

    def _set_up(self) -> None:
        self._lock = threading.RLock()
        self.failed, self.capacity = False, CAPACITY
        self._rooms: dict[tuple[int, int], int] = {}  # where a row had more entries
        self.device = torch.device("cpu")
        self._forget()

    def _forget(self) -> None:
        self.graphs: OrderedDict[tuple[Any, ...], tuple[Inputs, Any]] = OrderedDict()
        self._turns: Turns | None = None
        self._state: State | None = None
        self._by_task: bool | None = None  # whether a module reads the task

    def __getstate__(self) -> Features:
        return {"owner": self.owner, "_capture": self._capture}

    def __setstate__(self, state: Features) -> None:
        vars(self).update(state)
        self._set_up()

    def may_run(self, texts: Sequence[str]) -> bool:
        """Whether a graph could serve these texts, as far as can be told at no cost."""
        if (
            self.failed
            or switched_off()
            or not 0 < len(texts) <= TEXTS[-1]
            or torch.compiler.is_compiling()
        ):
            return False
        if self._state is None:
            return self._capture is not Captured or torch.device(self.owner.device).type == "cuda"
        return not any(self._state.modes())

    @property
    def splade(self) -> bool:
        """Whether stock SpladePoolings end the model."""
        return (State(self.owner) if self._state is None else self._state).splade

    def sparse(
        self,
        texts: Sequence[str],
        *,
        task: str | None,
        prompt: str | None,
        options: SparseOptions,
        to_host: bool = True,
    ) -> SparseRows | None:
        """Rows on the host; entries on the device where they are asked for there, and there is one
        row.
        """

        def body(features: Features, count: int) -> Sequence[Tensor]:
            rows = self._scores(
                features,
                task,
                options,
                self._room(count, features["input_ids"].numel()),
            )
            return [part[:count] for part in rows[:4]]

        def read(inputs: Inputs, graph: Any, count: int) -> SparseRows:
            parts = [part[:count] for part in graph.host]
            there = not to_host and count == 1 and self.device.type == "cuda"
            if there:
                parts[2:] = graph.device[2:]
            counts, stored_counts, columns, values = parts
            rows = unpack_capacity_rows(
                counts,
                stored_counts,
                columns,
                values,
                capacity=self._room(*inputs.sizes),
                vocab_size=self._vocab_size,
            )
            if there:
                graph.lent()
            return rows

        while self.may_run(texts):
            try:
                return self._run(texts, prompt, _Asked(body, ("sparse", *options), task), read)
            except RowCapacityError:
                continue
        return None

    def _room(self, texts: int, tokens: int) -> int:
        """Entries of a row, for which graphs of such sizes have room."""
        return self._rooms.get(
            (texts, tokens),
            self.capacity * (_MORE_ROOM if texts <= TEXTS[-1] // _MORE_ROOM else 1),
        )

    def _widen(self, sizes: tuple[int, int], most: int) -> None:
        """Make room for more in graphs of these sizes."""
        self.failed = most > MAX_CAPACITY  # an untrained model: every call would capture anew
        room = self._room(*sizes)
        while room < most:
            room *= 2
        self._rooms[sizes] = room
        for key in [key for key in self.graphs if key[:2] == sizes]:
            del self.graphs[key]

    def vectors(
        self,
        texts: Sequence[str],
        *,
        task: str | None,
        prompt: str | None,
        normalize: bool,
        to_host: bool,
    ) -> list[Tensor] | None:
        """Token vectors ``[n, D]`` of each text."""
        if not self.may_run(texts):
            return None

        def body(features: Features, count: int) -> Sequence[Tensor]:
            tokens = features["input_ids"].numel()
            found = self._forward(features, task)
            rows, keep = found["token_embeddings"][:count], found["attention_mask"][:count].bool()
            if normalize:
                rows = nn.functional.normalize(rows, p=2, dim=-1)
            return [keep.sum(1), packed_rows(rows, keep)[:tokens]]

        def read(_: Inputs, graph: Any, count: int) -> list[Tensor]:
            counts = graph.host[0][:count].tolist()
            rows: Tensor = (graph.host if to_host else graph.device)[1][: sum(counts)].clone()
            if rows.is_cuda:
                graph.lent()
            return list(torch.split(rows, counts))

        return self._run(texts, prompt, _Asked(body, ("vectors", normalize), task), read)

    def warm(self, run: Callable[[list[str]], object], longest: int = 64) -> None:
        """Capture graphs for texts of up to `longest` tokens, by calls of `run` with made ones."""
        for texts in TEXTS:
            for tokens in (size for size in TOKENS if 4 * texts <= size <= longest * texts):
                if self.may_run([""] * texts):
                    run(["a " * (tokens // texts - 3)] * texts)  # two special tokens

    def _run(
        self,
        texts: Sequence[str],
        prompt: str | None,
        asked: _Asked,
        read: Callable[[Inputs, Any, int], R],
    ) -> R | None:
        with packed_inputs():
            features = self._tokenised(texts, prompt, asked.task)
        sizes = _sizes_of(features, len(texts), padded="vectors" in asked.kind)
        if sizes is None:
            return None
        with self._lock:
            if self._state is not None and not self._state.in_place():
                self._forget()
            for _ in range(2):  # once more where the model has changed meanwhile
                found = self._graph(sizes, features, asked)
                if found is None:
                    return None
                inputs, graph = found
                inputs.fill(features)
                graph.launch()
                held = self._state is not None and self._state.holds()
                graph.wait()
                if held:
                    try:
                        return read(inputs, graph, len(texts))
                    except RowCapacityError as error:
                        self._widen(inputs.sizes, error.max_entries)
                        raise
                self._forget()
        return None

    def _tokenised(self, texts: Sequence[str], prompt: str | None, task: str | None) -> Features:
        model, named = self.owner, {} if task is None else {"task": task}
        if (shortcut := texts_to(model)) is not None:
            return shortcut(texts, prompt=prompt, **named)
        found: Features = model.preprocess(list(texts), prompt=prompt, **named)
        return found

    def _graph(
        self,
        sizes: tuple[int, int],
        features: Features,
        asked: _Asked,
    ) -> tuple[Inputs, Any] | None:
        others = tuple(
            sorted(
                (k, v)
                for k, v in features.items()
                if not isinstance(v, Tensor) and k not in LONGEST_NAMES
            ),
        )
        shapes = (
            ()
            if "cu_seq_lens_q" in features
            else tuple(
                sorted(
                    (name, value.shape, value.dtype)
                    for name, value in features.items()
                    if isinstance(value, Tensor)
                ),
            )
        )
        switches = (
            autocast_dtype("cuda"),
            tf32_allowed(torch.float32),
            torch.are_deterministic_algorithms_enabled(),
        )
        if self._by_task is None:
            self._by_task = "task" in self.owner.get_model_kwargs()
        key = (*sizes, asked.kind, asked.task if self._by_task else None, others, shapes, switches)
        try:
            found = self.graphs.get(key)
        except TypeError:  # features that are no keys
            return None
        if found is None:
            found = self._made(sizes, features, asked)
            if found is None:
                return None
            if len(self.graphs) >= LIMIT:
                self.graphs.popitem(last=False)
            self.graphs[key] = found
        self.graphs.move_to_end(key)
        return found

    def _made(
        self,
        sizes: tuple[int, int],
        features: Features,
        asked: _Asked,
    ) -> tuple[Inputs, Any] | None:
        model = self.owner
        device = torch.device(model.device)
        if self._capture is Captured and device.type != "cuda":
            return None
        if any(module.training for module in model.modules()) or not may_be_captured(model):
            return None
        there: Any = (
            torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        )
        try:
            with _capturing, torch.inference_mode(), there:
                if self._turns is None and self._capture is Captured:
                    self._turns = Turns()
                with torch.inference_mode(False):  # or nobody could write to them later
                    inputs = Inputs(features, *sizes, device)
                inputs.fill(features)
                graph = self._capture(lambda: asked.body(inputs.features(), sizes[0]), self._turns)
        except Exception as error:  # out of memory, or an operation that cannot be captured
            self._forget()
            self.failed = True
            said = "encodes few texts without CUDA graphs, which could not be captured"
            warn_slower(model, said, error, "Single texts")
            return None
        self.device = device
        if self._state is None:
            self._state = State(model)  # after a run, which sets what modules learn from it
        return inputs, graph

    def _forward(self, features: Features, task: str | None) -> Features:
        with uncached_autocast(features["input_ids"].device.type), _Compared():
            found: Features = self.owner(features, **({} if task is None else {"task": task}))
        return found

    def _scores(
        self,
        features: Features,
        task: str | None,
        options: SparseOptions,
        capacity: int,
    ) -> CapacityRows:
        stock = all(
            isinstance(forward.pooling, StockPooling) for forward in fused_forwards(self.owner)
        )
        with sparse_scores(options, capacity) if stock else contextlib.nullcontext():
            scores = self._forward(features, task)["sentence_embedding"]
        if not isinstance(scores, CapacityRows):
            scores = rows_of_scores(scores.to_dense(), capacity, options.top_k, options.min_weight)
        self._vocab_size = scores.vocab_size
        return scores


def graphs_of(model: Model) -> EncodingGraphs | None:
    """The graphs that an accelerated model carries."""
    found: EncodingGraphs | None = vars(model).get(GRAPHS)
    return found


class _Compared(TorchFunctionMode):
    """Within it, ``torch.isin`` compares with every element: for some it would sort them, which no
    capture allows.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.isin and not kwargs and all(isinstance(each, Tensor) for each in args):
            return (args[0][..., None] == args[1].flatten()).any(-1)
        return func(*args, **kwargs or {})


def _sizes_of(features: Features, texts: int, padded: bool) -> tuple[int, int] | None:
    """Texts and tokens of the graph for features, None where there is none."""
    ids = features.get("input_ids")
    tensors = {name for name, value in features.items() if isinstance(value, Tensor)}
    if not isinstance(ids, Tensor) or ids.device.type != "cpu" or not 0 < ids.numel() <= TOKENS[-1]:
        return None
    if tensors != PACKED:
        return (texts, ids.numel()) if EXPANDED in tensors else None
    sizes = (
        next(size for size in TEXTS if size >= texts),
        next(size for size in TOKENS if size >= ids.size(1)),
    )
    return None if padded and (sizes[0] + 1) * sizes[1] > _PLACES else sizes
