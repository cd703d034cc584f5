"""Training steps of one encoder as CUDA graphs: which batch takes which graph, and its gradients.

A graph repeats the some 1,500 launches of an encoder of 12 layers at once, but only with tensors of
the sizes and addresses that it was captured with. So packed tokens are copied into tensors of a few
sizes, whose unused tokens form sequences with discarded outputs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilefold._internal.typing import Transformer
from tilefold.integrations.sentence_transformers.graphs.backward import LayerCut, cut_layers
from tilefold.integrations.sentence_transformers.graphs.capture import (
    GraphCache,
    GraphMemory,
    autocast_dtype,
    capture_lock,
    numeric_settings,
    uncached_autocast,
    warn_slower,
)
from tilefold.integrations.sentence_transformers.graphs.captured_state import ModelStructure
from tilefold.integrations.sentence_transformers.graphs.step_graph import (
    PackSize,
    StaticInputs,
    StepGraph,
    StepGraphSize,
    compiled_layers,
    graph_size_for,
    temporary_parameters,
)
from tilefold.integrations.transformers.packed import (
    LONGEST,
    LONGEST_NAMES,
    OFFSET_NAMES,
    OFFSETS,
    TOKEN_NAMES,
)
from tilefold.modules.fused_pooling import Features
from tilefold.ops.implementations import copy_each

# Graphs of an encoder. Each has its own inputs and outputs, and shares all other memory.
MAX_GRAPHS = 16
# Batches of about one size that are met before a graph is captured for them.
_BATCHES_BEFORE_CAPTURE = 2
# Features of a batch that a graph takes.
_SUPPORTED_FEATURES = frozenset({*TOKEN_NAMES, *OFFSET_NAMES, *LONGEST_NAMES, "modality"})
_grad_and_dtype = attrgetter("requires_grad", "dtype")


class StepGraphs:
    """Runs packed batches of one Transformer in training as CUDA graphs.

    A batch runs without a graph if its size is new, if an output of a graph still waits for its
    backward pass, without gradients, with gradient checkpointing, with hooks on the network's
    modules, on a CPU, and with sharded parameters. New graphs are captured when parameters,
    buffers, modes, dropout rates, autocast, TF32 or deterministic algorithms change.

    Args:
        transformer: the Transformer module.
        capture: creates a graph, with the arguments of :class:`StepGraph`.
        compiled: whether layers are compiled before the capture, see :func:`collate_ahead`.
        halved: whether autograd gets the gradients of most layers before the lowest layers are
            differentiated, so that DDP can send them meanwhile.

    Attributes:
        failed: whether no graph can be captured.
        graphs: the captured graphs by their size.
        serial: number of the last forward pass. It increases for the life of this object, so that
            no backward pass takes activations of another batch.
        bucket_gradients: gradient in DDP's buckets by the id of its parameter.
        parameters: parameters of the encoder that get gradients.
        gradients: buffer that the graphs write for each of them; ``None`` for a parameter that the
            encoder does not use.
    """

    def __init__(
        self,
        transformer: Transformer,
        capture: Callable[..., Any] = StepGraph,
        *,
        compiled: bool = False,
        halved: bool = False,
    ) -> None:
        """Prepare for graphs; the first one is captured when a size of batches recurs.

        Args:
            transformer: the Transformer module whose batches are run.
            capture: creates a graph, with the arguments of :class:`StepGraph`. Tests on a CPU pass
                another class.
            compiled: whether layers run through ``torch.compile`` before the capture.
            halved: whether the backward pass is divided into upper and lower layers.
        """
        self.transformer = transformer
        self.compiled = compiled
        self.halved = halved
        self._graph_factory = capture
        self._initialize()

    def _initialize(self) -> None:
        """Set the attributes that are not pickled."""
        self.failed = False
        self.serial = 0
        self.bucket_gradients: dict[int, Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        """Drop all graphs, and record the structure of the model again."""
        self.graphs: GraphCache[StepGraphSize, Any] = GraphCache(MAX_GRAPHS)
        self.parameters: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self._memory: GraphMemory | None = None
        self._batches_met: Counter[StepGraphSize] = Counter()
        self._settings: object = None
        self._structure = ModelStructure(self.transformer.model)
        # Names of all float attributes, since rates of dropout are among them.
        self._rates = [
            (module, name)
            for module in self._structure.modules
            for name, value in vars(module).items()
            if isinstance(value, float)
        ]
        # Returns the marker of the last forward pass until its backward pass can no longer come.
        self._pending_backward: Callable[[], _BackwardMarker | None] = lambda: None

    def __getstate__(self) -> Features:
        names = ("transformer", "compiled", "halved", "_graph_factory")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: Features) -> None:
        vars(self).update(state)
        self._initialize()

    def __call__(self, features: Features) -> Tensor | None:
        """Run the encoder on a packed batch.

        Args:
            features: the packed batch.

        Returns:
            Output ``[1, T, D]`` with a gradient, or None if the batch must run without a graph.
        """
        if not self._may_run(features) or self._pending_backward() is not None:
            return None
        ids: Tensor = features["input_ids"]
        settings = self._current_settings(ids.device.type)
        if settings != self._settings:
            self._forget()
            self._settings = settings
        pack = PackSize(
            tokens=ids.size(1),
            sequences=features[OFFSETS].numel() - 1,
            longest=features[LONGEST],
        )
        fitting_sizes = [size for size in self.graphs if size.fits(pack)]
        graph = None
        if fitting_sizes:
            graph = self.graphs.use(min(fitting_sizes))
        elif self._is_due(pack):
            graph = self._new_graph(pack, features)
        if graph is None:
            return None
        graph.inputs.fill(features)
        self.serial += 1
        return self._replay(graph, pack.tokens)

    def _may_run(self, features: Features) -> bool:
        """Whether a graph could run a batch, and would do the same as the model.

        Args:
            features: the packed batch.
        """
        if self.failed or not torch.is_grad_enabled():
            return False
        has_unsupported_features = bool(features.keys() - _SUPPORTED_FEATURES)
        if has_unsupported_features:
            return False
        ids: Tensor = features["input_ids"]
        needs_gpu = self._graph_factory is StepGraph
        if ids.numel() == 0 or (needs_gpu and not ids.is_cuda):
            return False
        model = self.transformer.model
        is_same_model = self._structure.modules[0] is model
        if not is_same_model or not self._structure.has_same_members():
            self._structure = ModelStructure(model)
        return not self._structure.has_hooks_or_checkpointing()

    def _current_settings(self, device_type: str) -> object:
        """Return the settings that a captured graph cannot follow, to be compared with later ones.

        Args:
            device_type: type of the device that computes, such as ``"cuda"``.

        Returns:
            Addresses, gradient flags and dtypes of all parameters and buffers, modes and float
            attributes of all modules, and torch's numeric settings.
        """
        tensors = self._structure.tensors
        addresses = list(map(Tensor.data_ptr, tensors))
        gradient_flags_and_dtypes = list(map(_grad_and_dtype, tensors))
        dropout_rates = [getattr(module, name, None) for module, name in self._rates]
        return (
            addresses,
            gradient_flags_and_dtypes,
            self._structure.training_modes(),
            dropout_rates,
            numeric_settings(device_type),
        )

    def _is_due(self, pack: PackSize) -> bool:
        """Count a batch that fits no graph, and return whether a graph should be captured for it.

        A graph is due at the second batch of about one size, since a capture takes longer than a
        step.

        Args:
            pack: size of the batch.
        """
        size = graph_size_for(pack)
        # Sizes that differ little are counted as one.
        for known_size in self._batches_met:
            if known_size.fits(pack):
                size = known_size
                break
        self._batches_met[size] += 1
        return self._batches_met[size] >= _BATCHES_BEFORE_CAPTURE

    def _new_graph(self, pack: PackSize, features: Features) -> Any:
        """Capture a graph for batches of about one size, and put it into the cache.

        Args:
            pack: size of the batch.
            features: the batch, with which the graph is captured.

        Returns:
            The graph, or None if nothing can be captured.
        """
        if not self.parameters:
            self.parameters = [
                parameter
                for parameter in self.transformer.model.parameters()
                if parameter.requires_grad
            ]
            self.gradients = [None] * len(self.parameters)
        # Sharded parameters are of another class, such as DTensor.
        # FSDP replaces parameters by DTensors or by parameters of a class of its own.
        is_sharded = any(type(parameter) is not nn.Parameter for parameter in self.parameters)
        if not self.parameters or is_sharded:
            self.failed = True
            return None
        size = graph_size_for(pack)
        inputs = StaticInputs(features, size)
        inputs.fill(features)
        if self._memory is None and self._graph_factory is StepGraph:
            self._memory = GraphMemory()
        self.graphs.make_space()
        graph = self._capture_or_fall_back(inputs)
        if graph is not None:
            self.graphs[size] = graph
        return graph

    def _capture_or_fall_back(self, inputs: StaticInputs) -> Any:
        """Capture a graph, and try again with fewer options after each failure.

        The options are the divided backward pass and the compiled layers. Each failure issues a
        warning and turns one of them off for all later graphs, at last all graphs.

        Args:
            inputs: input tensors that hold a batch.

        Returns:
            The graph, or None if nothing can be captured.
        """
        dtype = autocast_dtype(inputs.offsets.device.type) or self.parameters[0].dtype
        is_half_precision = dtype.itemsize == 2
        while not self.failed:
            compiled = self.compiled and is_half_precision
            try:
                return self._capture_graph(inputs, compiled)
            except RuntimeError as error:
                # Too little memory, no compiler, or an operation that the cut, the compiler or a
                # capture does not allow.
                limitation = self._turn_off_failed_option(compiled)
                warn_slower(self.transformer.model, limitation, error, "Steps")
        return None

    def _turn_off_failed_option(self, compiled: bool) -> str:
        """Turn off the option that a capture most likely failed at.

        The order is: the divided backward pass, compiled layers, all graphs.

        Args:
            compiled: whether layers were compiled for the failed capture.

        Returns:
            Verb phrase for a warning, which says how the model works from now on.
        """
        if self.halved:
            self.halved = False
            return "hands out all gradients at once, after its whole backward pass"
        if compiled:
            self.compiled = False
            return "captures its layers as they are, without torch.compile"
        self._forget()
        self.failed = True
        return "trains without CUDA graphs, which could not be captured"

    def _capture_graph(self, inputs: StaticInputs, compiled: bool) -> Any:
        """Capture the encoder's forward and backward pass on static inputs as CUDA graphs.

        Temporary parameters stand in for the model's during the capture. They share its memory, and
        have none of the hooks by which DDP would start communication.

        Args:
            inputs: input tensors that hold a batch. Replays read the same tensors.
            compiled: whether layers run through ``torch.compile``.

        Returns:
            The graph. Its backward pass writes the buffers :attr:`gradients`, which the capture
            allocates where they are missing.
        """
        model = self.transformer.model
        layers_context = compiled_layers(model) if compiled else contextlib.nullcontext()
        parameters_context = temporary_parameters(model, self.parameters, self.bucket_gradients)
        with capture_lock, layers_context, parameters_context as captured_parameters:
            return self._graph_factory(
                self._run_encoder,
                inputs,
                captured_parameters,
                self.gradients,
                self._memory,
            )

    def _run_encoder(self, features: Features) -> tuple[Tensor, LayerCut]:
        """Run the encoder's forward pass, which a graph captures.

        Args:
            features: static inputs of the encoder.

        Returns:
            Output ``[1, T, D]``, and where the pass was divided into lower and upper layers. The
            second one is an empty ``LayerCut`` if it is not divided.
        """
        transformer = self.transformer
        cut_context = (
            cut_layers(transformer.model) if self.halved else contextlib.nullcontext(LayerCut())
        )
        with uncached_autocast(features["input_ids"].device.type), cut_context as cut:
            outputs = type(transformer).forward(transformer, features)
        output: Tensor = outputs[transformer.module_output_name]
        return output, cut

    def _replay(self, graph: Any, n_tokens: int) -> Tensor:
        """Replay a graph on its static inputs, and connect its output to autograd.

        With a divided backward pass, two autograd functions hand out the gradients: first that of
        the upper layers, then that of the lower ones.

        Args:
            graph: the graph, whose inputs hold the batch.
            n_tokens: number of tokens n of the batch.

        Returns:
            Output ``[1, n, D]`` with a gradient.
        """
        # No batch may overwrite the activations before the backward pass. The marker dies when that
        # has run, or can no longer come. No other frame may hold it: one that a traceback keeps
        # would stop all graphs.
        marker = _BackwardMarker()
        self._pending_backward = weakref.ref(marker)
        lower = self._used_parameters(graph.lower)
        upper = self._used_parameters(set(range(len(self.parameters))) - graph.lower)
        lower_done = None  # an empty tensor, by which autograd runs the lower layers last
        if lower:
            lower_done = _LowerLayers.apply(  # type: ignore[no-untyped-call]
                self,
                graph,
                marker,
                list(lower),
                *lower.values(),
            )
        output: Tensor = _GraphedEncoder.apply(  # type: ignore[no-untyped-call]
            self,
            graph,
            n_tokens,
            marker,
            list(upper),
            lower_done,
            *upper.values(),
        )
        return output

    def _used_parameters(self, positions: set[int]) -> dict[int, Tensor]:
        """Return the parameters at some positions, except for those that the encoder does not use.

        Unused ones must not be inputs of an autograd function. DDP waits for every parameter that
        autograd visits, even if its gradient is None.

        Args:
            positions: positions in :attr:`parameters`.

        Returns:
            Parameters by their position.
        """
        return {
            position: self.parameters[position]
            for position in sorted(positions)
            if self.gradients[position] is not None
        }

    def use_bucket_gradients(self, bucket_gradients: dict[int, Tensor]) -> None:
        """Write gradients into DDP's buckets, from the next batch on, by new graphs.

        Args:
            bucket_gradients: gradient in a bucket, by the id of its parameter.
        """
        self.bucket_gradients = bucket_gradients
        self._settings = None

    def copy_accumulated_gradients(self) -> None:
        """Copy accumulated gradients out of the buffers that a backward pass will overwrite.

        ``grad`` of a parameter may be in the memory of its buffer, such as in a bucket of DDP.
        """
        for parameter, buffer in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is None or buffer is None:
                continue
            if parameter.grad.data_ptr() == buffer.data_ptr():
                parameter.grad = parameter.grad.clone()

    def gradients_for_autograd(self, positions: list[int]) -> list[Tensor]:
        """Return the gradients that a graph has computed for some parameters.

        Autograd stores them as ``grad`` of the parameters. They are views of DDP's buckets if all
        of these parameters have a bucket and no accumulated gradient. Otherwise they are copies of
        the graph's buffers.

        Args:
            positions: positions of the parameters. The encoder uses all of them.
        """
        computed: list[Tensor] = []  # buffers that the graph has written
        bucketed: list[Tensor] = []  # views of the buckets, of the same shapes
        for position in positions:
            parameter = self.parameters[position]
            buffer = self.gradients[position]
            if buffer is None:
                continue
            computed.append(buffer)
            bucket_gradient = self.bucket_gradients.get(id(parameter))
            if bucket_gradient is not None and parameter.grad is None:
                # A new view: autograd stores a gradient without a copy only if nothing else refers
                # to the tensor object.
                bucketed.append(bucket_gradient.view_as(bucket_gradient))
        if len(bucketed) < len(computed):
            return copies_of(computed)
        # Gradients that the graph has written into the buckets itself need no copy.
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for target, source in zip(bucketed, computed, strict=True):
            if target.data_ptr() != source.data_ptr():
                targets.append(target)
                sources.append(source)
        if targets:
            copy_each(targets, sources)
        return bucketed


def copies_of(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors into one piece of memory, by one concatenation instead of a copy for each.

    Tensors of several dtypes, and tensors that are not contiguous, are copied one by one.

    Args:
        tensors: tensors of any shapes, such as the gradients of all parameters.

    Returns:
        A copy of each tensor in its shape, which nothing else refers to. Autograd therefore stores
        it without copying it once more.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.clone() for tensor in tensors]
    flat_copies = torch.split(
        torch.cat([tensor.view(-1) for tensor in tensors]),
        [tensor.numel() for tensor in tensors],
    )
    return [copy.view_as(tensor) for copy, tensor in zip(flat_copies, tensors, strict=True)]


class _BackwardMarker:
    """Object that lives as long as a forward pass may be followed by its backward pass.

    Only autograd's contexts refer to it, and they die with the output of the forward pass.
    """


class _GraphedEncoder(torch.autograd.Function):
    """Output of an encoder by a graph; its backward pass replays the upper layers.

    The upper layers are all layers if the backward pass is not divided.
    """

    @staticmethod
    def forward(
        ctx: Any,
        graphs: StepGraphs,
        graph: Any,
        n_tokens: int,
        marker: _BackwardMarker,
        positions: list[int],
        lower_done: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        """Replay the forward pass on the static inputs of a graph.

        Args:
            ctx: context of autograd.
            graphs: the graphs of the encoder.
            graph: the graph.
            n_tokens: number of tokens n of the batch.
            marker: marker of this forward pass.
            positions: positions of the parameters.
            lower_done: output of :class:`_LowerLayers`; ``None`` if the backward pass is not
                divided.
            *parameters: parameters whose gradients the upper layers complete.

        Returns:
            Output ``[1, n, D]``, a copy, since the next replay overwrites that of the graph.
        """
        ctx.graphs = graphs
        ctx.graph = graph
        ctx.marker = marker
        ctx.positions = positions
        ctx.serial = graphs.serial
        output: Tensor = graph.forward()
        return output[:, :n_tokens].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[object, ...]:
        """Replay the backward pass of the upper layers, and return the parameters' gradients.

        Args:
            ctx: context of autograd.
            output_gradient: gradient of the output, ``[1, n, D]``.

        Returns:
            One gradient per argument of :meth:`forward`: ``None`` for the first five, an empty one
            for ``lower_done``, then those of the parameters.

        Raises:
            RuntimeError: if another batch has overwritten the activations, or the backward pass was
                run before.
        """
        graphs: StepGraphs = ctx.graphs
        if ctx.serial != graphs.serial:
            raise RuntimeError(
                "backward must come before the next batch with collate_ahead(graphs=True), and "
                "once, got it after another batch or again; use graphs=False for a loss that "
                "needs it.",
            )
        graphs.copy_accumulated_gradients()
        ctx.graph.backward(output_gradient)
        # The activations are used up: a second backward pass is refused.
        ctx.marker = None
        ctx.serial = None
        has_lower_layers = ctx.needs_input_grad[5]  # of the sixth argument, lower_done
        lower_done_gradient = output_gradient.new_empty(0) if has_lower_layers else None
        gradients = graphs.gradients_for_autograd(ctx.positions)
        return None, None, None, None, None, lower_done_gradient, *gradients


class _LowerLayers(torch.autograd.Function):
    """Empty input of :class:`_GraphedEncoder`, whose backward pass replays the lower layers.

    Autograd runs it after that of the upper layers, whose gradients DDP can send meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any,
        graphs: StepGraphs,
        graph: Any,
        marker: _BackwardMarker,
        positions: list[int],
        *parameters: Tensor,
    ) -> Tensor:
        """Return an empty tensor, whose gradient makes autograd call :meth:`backward`.

        Args:
            ctx: context of autograd.
            graphs: the graphs of the encoder.
            graph: the graph.
            marker: marker of this forward pass.
            positions: positions of the parameters.
            *parameters: parameters whose gradients the lower layers complete.
        """
        ctx.graphs = graphs
        ctx.graph = graph
        ctx.marker = marker
        ctx.positions = positions
        return parameters[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[object, ...]:
        """Replay the backward pass of the lower layers, and return the parameters' gradients."""
        ctx.graph.backward_lower()
        ctx.marker = None
        gradients = ctx.graphs.gradients_for_autograd(ctx.positions)
        return None, None, None, None, *gradients
