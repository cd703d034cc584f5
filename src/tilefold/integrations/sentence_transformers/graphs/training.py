"""CUDA graphs of an encoder's forward and backward for packs of one size, and which batch of a
training takes which.

A graph repeats the some 1,500 launches of an encoder of 12 layers at once, but only with tensors of
the sizes and addresses that it was captured with. So packed tokens are copied into tensors of a few
sizes, whose rest is filled by sequences that nobody reads: their gradients are zero.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilefold._internal.typing import Transformer
from tilefold.integrations.sentence_transformers.graphs.backward import (
    backward_parts,
    cut,
    prepared,
    write_gradients,
)
from tilefold.integrations.sentence_transformers.graphs.captured_state import Structure
from tilefold.integrations.transformers.packed import (
    LONGEST,
    LONGEST_NAMES,
    OFFSET_NAMES,
    OFFSETS,
    TOKEN_NAMES,
)
from tilefold.modules.fused_pooling import Features
from tilefold.ops.implementations import copy_each, tf32_allowed

LIMIT = 16  # graphs that are kept; each has its inputs and outputs to itself and shares all other memory
_SMALLEST = 64  # tokens; sizes are multiples of this
_HEADROOM = 1 / 32  # tokens that a graph holds above those of the batch that it is captured with
_WASTE = (
    1 / 10
)  # of the tokens of a batch, which a graph may compute for nothing, with some more of small ones
_WARM_RUNS = (
    2  # before the first capture, in which libraries set themselves up; one before the others
)
_KIND = attrgetter("requires_grad", "dtype")
KNOWN = {*TOKEN_NAMES, *OFFSET_NAMES, *LONGEST_NAMES, "modality"}  # of the features of a batch

Run = Callable[
    [Features],
    tuple[Tensor, list[Tensor]],
]  # features to ``[1, T, D]``, and where it was cut


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast, None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def uncached_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast as it is, but for the copies of weights that it keeps: they would be older than the
    next replay.
    """
    dtype = autocast_dtype(device)
    return torch.autocast(device, dtype, cache_enabled=False) if dtype else contextlib.nullcontext()


def warn_slower(module: object, what: str, error: Exception, slower: str) -> None:
    """Say once what a module does without, why, and what takes longer for it."""
    why = " ".join([line for line in str(error).splitlines() if line.strip()][:2])
    said = f"{type(module).__name__} {what}: {type(error).__name__}: {why}. {slower} take longer; nothing else changes."
    warnings.warn(said, UserWarning, stacklevel=3)


class Sizes(NamedTuple):
    """Sizes of a graph: T tokens in ``sequences``, ``extra`` more that hold the rest, none above
    ``longest`` tokens.
    """

    tokens: int
    sequences: int
    extra: int
    longest: int

    def hold(self, tokens: int, sequences: int, longest: int) -> bool:
        """Whether a pack fits, with few tokens computed for nothing."""
        if self.sequences != sequences or self.longest < longest or self.tokens < tokens:
            return False
        rest = self.tokens - tokens
        return rest <= max_rest(tokens) and rest <= self.extra * self.longest


def max_rest(tokens: int) -> int:
    """How many tokens more than those of a batch a graph may compute for nothing."""
    return max(2 * _SMALLEST, _SMALLEST + math.ceil(tokens * _WASTE))


def sizes_for(tokens: int, sequences: int, longest: int) -> Sizes:
    """Sizes of a graph for a pack and for those that are a little larger or smaller."""
    tokens, longest = (
        math.ceil(max(1, n) / _SMALLEST) * _SMALLEST for n in (tokens * (1 + _HEADROOM), longest)
    )
    return Sizes(tokens, sequences, math.ceil(max_rest(tokens) / longest), longest)


class StaticInputs:
    """Features of one size, into which those of a batch are copied."""

    def __init__(self, features: Features, sizes: Sizes) -> None:
        self.sizes = sizes
        ids: Tensor = features["input_ids"]
        self.tokens = {
            name: features[name][:, :1].expand(1, sizes.tokens).contiguous()
            for name in TOKEN_NAMES
            if name in features
        }
        self.offsets = torch.zeros(
            sizes.sequences + sizes.extra + 1,
            dtype=torch.int32,
            device=ids.device,
        )
        self.ends = (
            torch.arange(1, sizes.extra + 1, dtype=torch.int32, device=ids.device) * sizes.longest
        )

    def features(self) -> Features:
        return {
            **self.tokens,
            **dict.fromkeys(OFFSET_NAMES, self.offsets),
            **dict.fromkeys(LONGEST_NAMES, self.sizes.longest),
        }

    def fill(self, features: Features) -> None:
        """Copy a batch; behind it stay tokens of others, in sequences of their own."""
        count = features["input_ids"].size(1)
        for name, tensor in self.tokens.items():
            tensor[:, :count].copy_(features[name])
        self.offsets[: self.sizes.sequences + 1].copy_(features[OFFSETS])
        torch.clamp(
            self.ends + count,
            max=self.sizes.tokens,
            out=self.offsets[self.sizes.sequences + 1 :],
        )


class Captured:
    """Forward and backward of one size; all graphs share a pool and a stream, so that one's memory
    serves the next.

    Attributes:
        late: numbers of the parameters whose gradients come in the second part of the backward
            pass, if there is one.
    """

    def __init__(
        self,
        run: Run,  # the encoder
        inputs: StaticInputs,
        parameters: list[Tensor],  # leaves that get gradients, while the graph is made
        gradients: list[
            Tensor | None
        ],  # where these are written, None for parameters that the encoder does not use
        pool: object,
        stream: torch.cuda.Stream,
    ) -> None:
        self.inputs = inputs
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(1 if any(known is not None for known in gradients) else _WARM_RUNS):
                warm, noted = run(inputs.features())
                self.output_gradient = torch.zeros_like(warm)
                parts = backward_parts(warm, noted, parameters, self.output_gradient)
                self.late = prepared(gradients, parameters, parts)
            del warm, noted, parts
        torch.cuda.current_stream().wait_stream(stream)
        how: Features = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.late_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward_graph, **how):
            output, noted = run(inputs.features())
        parts = backward_parts(output, noted, parameters, self.output_gradient)
        with torch.cuda.graph(self.backward_graph, **how):
            write_gradients(gradients, next(parts), {*range(len(parameters))} - self.late)
        if self.late:
            with torch.cuda.graph(self.late_graph, **how):
                write_gradients(gradients, next(parts), self.late)
        self.output = output.detach()

    def forward(self) -> Tensor:
        """Output ``[1, T, D]`` for what was filled in; the next call overwrites it."""
        self.forward_graph.replay()
        return self.output

    def backward(self, gradient: Tensor) -> None:
        """Write the gradients of the last forward, for those of its first tokens, but for late
        ones.
        """
        count = gradient.size(1)
        self.output_gradient[:, :count].copy_(gradient)
        self.output_gradient[:, count:].zero_()
        self.backward_graph.replay()

    def backward_late(self) -> None:
        """Write the late gradients, after all others."""
        self.late_graph.replay()


@contextlib.contextmanager
def fresh_leaves(
    model: nn.Module,
    parameters: list[Tensor],
    gradients: dict[int, Tensor],
) -> Iterator[list[Tensor]]:
    """Within it, the model computes with other leaves of the same memory, which no other stream and
    no DDP knows.

    They have the `gradients` of tensors of these ids.
    """
    leaves = {id(tensor): nn.Parameter(tensor.detach()) for tensor in parameters}
    for known, leaf in leaves.items():
        leaf.grad = gradients.get(known)
    every = [
        (module, name, tensor)
        for module in model.modules()
        for name, tensor in module._parameters.items()
    ]
    places = [place for place in every if id(place[2]) in leaves]
    for module, name, tensor in places:
        module._parameters[name] = leaves[id(tensor)]
    try:
        yield [leaves[id(tensor)] for tensor in parameters]
    finally:
        for module, name, tensor in places:
            module._parameters[name] = tensor


@contextlib.contextmanager
def compiled_layers(model: nn.Module) -> Iterator[None]:
    """Within it, layers of a ``ModuleList`` of one class run as ``torch.compile`` makes them, of
    any length.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    found = [
        layer for stack in lists if len({type(layer) for layer in stack}) == 1 for layer in stack
    ]
    # one may stand twice, or have a forward of its own
    layers: list[nn.Module] = [
        layer for layer in dict.fromkeys(found) if "forward" not in vars(layer)
    ]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def copies_of(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in one piece of memory, by a launch or two; what nobody else holds autograd keeps
    without a copy more.
    """
    if len({tensor.dtype for tensor in tensors}) > 1 or not all(
        tensor.is_contiguous() for tensor in tensors
    ):
        return [tensor.clone() for tensor in tensors]
    parts = torch.split(
        torch.cat([tensor.view(-1) for tensor in tensors]),
        [tensor.numel() for tensor in tensors],
    )
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


class StepGraphs:
    """Runs packed batches of one Transformer in training as CUDA graphs, where that changes
    nothing.

    A batch runs without a graph if its size is new, if an output of a graph still waits for its
    backward pass, without gradients, with gradient checkpointing, with hooks on the network's
    modules, on a CPU, and with sharded parameters. Where parameters, buffers, modes, dropout rates,
    autocast, TF32 or deterministic algorithms change, new graphs are captured. ``compiled``: see
    :func:`collate_ahead`. ``halved``: gradients of most layers are handed out before those of the
    lowest are computed, so that DDP sends them meanwhile.
    """

    failed = False
    serial = (
        0  # of the last forward; never begins anew, so that no backward takes another one's numbers
    )

    def __init__(
        self,
        transformer: Transformer,
        capture: Callable[..., Any] = Captured,
        *,
        compiled: bool = False,
        halved: bool = False,
    ) -> None:
        self.transformer, self.compiled, self.halved, self._capture = (
            transformer,
            compiled,
            halved,
            capture,
        )
        self.places: dict[
            int,
            Tensor,
        ] = {}  # by the id of a parameter, where DDP keeps its gradient
        self._forget()

    def _forget(self) -> None:
        self.graphs: OrderedDict[Sizes, Any] = OrderedDict()
        self._seen: Counter[Sizes] = Counter()
        self._state: object = None
        self._model = Structure(self.transformer.model)
        every = [(module, *item) for module in self._model.modules for item in vars(module).items()]
        self._rates = [
            (module, name) for module, name, value in every if isinstance(value, float)
        ]  # of dropout too
        self._pool: object = None
        self._stream: torch.cuda.Stream | None = None
        self.parameters: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self._pending: Callable[[], object] = lambda: None

    def __getstate__(self) -> Features:
        return {
            name: vars(self)[name] for name in ("transformer", "compiled", "halved", "_capture")
        }

    def __setstate__(self, state: Features) -> None:
        vars(self).update(state, places={})
        self._forget()

    def __call__(self, features: Features) -> Tensor | None:
        """``[1, T, D]`` with its gradients, or None if the batch must run without a graph."""
        ids = features["input_ids"]
        if (
            self.failed
            or not torch.is_grad_enabled()
            or features.keys() - KNOWN
            or not self._may_run(ids)
        ):
            return None
        if self._pending() is not None:
            return None
        state = self._state_now(ids.device.type)
        if state != self._state:
            self._forget()
            self._state = state
        needed = ids.size(1), features[OFFSETS].numel() - 1, features[LONGEST]
        sizes = min((sizes for sizes in self.graphs if sizes.hold(*needed)), default=None)
        if sizes is None and (sizes := self._captured(needed, features)) is None:
            return None
        graph = self.graphs[sizes]
        self.graphs.move_to_end(sizes)
        graph.inputs.fill(features)
        self.serial += 1
        return self._replayed(graph, ids.size(1))

    def _replayed(self, graph: Any, count: int) -> Tensor:  # a frame that no traceback keeps
        waits, first = _Waits(), None
        self._pending = weakref.ref(waits)
        late, early = (
            self._used(graph.late),
            self._used({*range(len(self.parameters))} - graph.late),
        )
        if late:
            first = _Late.apply(self, graph, waits, [*late], *late.values())  # type: ignore[no-untyped-call]
        given = self, graph, count, waits, [*early], first
        output: Tensor = _Replay.apply(*given, *early.values())  # type: ignore[no-untyped-call]
        return output

    def _used(self, numbers: set[int]) -> dict[int, Tensor]:
        """Parameters of these numbers that get gradients: DDP takes part in all that are handed
        out, be it None.
        """
        return {
            number: self.parameters[number]
            for number in sorted(numbers)
            if self.gradients[number] is not None
        }

    def write_to(self, places: dict[int, Tensor]) -> None:
        """Have the gradients of parameters of these ids written there, from the next batch on by
        new graphs.
        """
        self.places, self._state = places, None

    def set_aside(self) -> None:
        """Take gradients of earlier batches from where this one's are written."""
        for tensor, place in zip(self.parameters, self.gradients, strict=True):
            if (
                tensor.grad is not None
                and place is not None
                and tensor.grad.data_ptr() == place.data_ptr()
            ):
                tensor.grad = tensor.grad.clone()

    def handed_out(self, numbers: list[int]) -> list[Tensor]:
        """The gradients, for autograd to keep: where DDP has them, if nothing is there to be added
        to, else copies.
        """
        found = [known for number in numbers if (known := self.gradients[number]) is not None]
        used = [self.parameters[number] for number in numbers]
        there = [self.places.get(id(tensor)) for tensor in used]
        if any(
            place is None or tensor.grad is not None
            for place, tensor in zip(there, used, strict=True)
        ):
            return copies_of(found)
        kept = [place.view_as(place) for place in there if place is not None]
        moved = [
            pair
            for pair in zip(kept, found, strict=True)
            if pair[0].data_ptr() != pair[1].data_ptr()
        ]
        if moved:
            copy_each(*map(list, zip(*moved, strict=True)))
        return kept

    def _may_run(self, ids: Tensor) -> bool:
        if ids.numel() == 0 or (self._capture is Captured and not ids.is_cuda):
            return False
        if self._model.modules[0] is not self.transformer.model or not self._model.stands():
            self._model = Structure(self.transformer.model)
        return not self._model.runs_more()

    def _state_now(self, device: str) -> object:
        """The settings that a graph was captured with and cannot follow."""
        tensors = self._model.tensors
        memory = [*map(Tensor.data_ptr, tensors), *map(_KIND, tensors)]
        rates = [getattr(module, name, None) for module, name in self._rates]
        switches = tf32_allowed(torch.float32), torch.are_deterministic_algorithms_enabled()
        return memory, self._model.modes(), rates, autocast_dtype(device), switches

    def _captured(self, needed: tuple[int, int, int], features: Features) -> Sizes | None:
        """Sizes of a new graph, when a pack of about these is met for the second time."""
        sizes = sizes_for(*needed)
        alike = next((seen for seen in self._seen if seen.hold(*needed)), sizes)
        self._seen[alike] += 1
        if self._seen[alike] < 2:
            return None
        if not self.parameters:
            self.parameters = [
                tensor for tensor in self.transformer.model.parameters() if tensor.requires_grad
            ]
            self.gradients = [None] * len(self.parameters)
        if not self.parameters or any(
            type(tensor) is not nn.Parameter for tensor in self.parameters
        ):
            self.failed = True  # frozen, or sharded
            return None
        inputs = StaticInputs(features, sizes)
        inputs.fill(features)
        if self._pool is None and self._capture is Captured:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if len(self.graphs) >= LIMIT:
            self.graphs.popitem(last=False)
        made = self._made(inputs)
        if made is None:
            return None
        self.graphs[sizes] = made
        return sizes

    def _made(self, inputs: StaticInputs) -> Any:
        """A graph, or None; with a warning of each thing that it does without."""
        dtype = autocast_dtype(inputs.offsets.device.type) or self.parameters[0].dtype
        while not self.failed:
            compiled = self.compiled and dtype.itemsize == 2
            try:
                with (
                    compiled_layers(self.transformer.model)
                    if compiled
                    else contextlib.nullcontext()
                ):
                    return self._graph(inputs)
            except (
                RuntimeError
            ) as error:  # no memory, no compiler, or what cannot be compiled, captured or cut
                warn_slower(self.transformer.model, self._without(compiled), error, "Steps")
        return None

    def _without(self, compiled: bool) -> str:
        if self.halved:
            self.halved = False
            return "hands out all gradients at once, after its whole backward pass"
        if compiled:
            self.compiled = False
            return "captures its layers as they are, without torch.compile"
        self._forget()
        self.failed = True
        return "trains without CUDA graphs, which could not be captured"

    def _graph(self, inputs: StaticInputs) -> Any:
        with fresh_leaves(self.transformer.model, self.parameters, self.places) as leaves:
            return self._capture(
                self._run,
                inputs,
                leaves,
                self.gradients,
                self._pool,
                self._stream,
            )

    def _run(self, features: Features) -> tuple[Tensor, list[Tensor]]:
        transformer = self.transformer
        once = cut(transformer.model) if self.halved else contextlib.nullcontext(list[Tensor]())
        with uncached_autocast(features["input_ids"].device.type), once as noted:
            output: Tensor = type(transformer).forward(transformer, features)[
                transformer.module_output_name
            ]
        return output, noted


class _Waits:
    """Lives as long as a forward may still be followed by its backward pass."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        owner: StepGraphs,
        graph: Any,
        count: int,
        waits: _Waits,
        used: list[int],
        _: object,
        *__: Tensor,
    ) -> Tensor:
        ctx.owner, ctx.graph, ctx.waits, ctx.used, ctx.serial = (
            owner,
            graph,
            waits,
            used,
            owner.serial,
        )
        output: Tensor = graph.forward()
        return output[:, :count].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[object, ...]:
        owner: StepGraphs = ctx.owner
        if ctx.serial != owner.serial:
            got = "and once, got it after another batch or again; use graphs=False for a loss that needs it."
            raise RuntimeError(
                f"backward must come before the next batch with collate_ahead(graphs=True), {got}",
            )
        owner.set_aside()
        ctx.graph.backward(gradient)
        ctx.waits = ctx.serial = None  # what it read is overwritten
        first = gradient.new_empty(0) if ctx.needs_input_grad[5] else None  # for _Late
        return *[None] * 5, first, *owner.handed_out(ctx.used)


class _Late(torch.autograd.Function):
    """An empty tensor that :class:`_Replay` is given, so that the late gradients come after its
    own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        owner: StepGraphs,
        graph: Any,
        waits: _Waits,
        used: list[int],
        *late: Tensor,
    ) -> Tensor:
        ctx.owner, ctx.graph, ctx.waits, ctx.used = owner, graph, waits, used
        return late[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[object, ...]:
        ctx.graph.backward_late()
        ctx.waits = None
        return *[None] * 4, *ctx.owner.handed_out(ctx.used)
