"""Training steps of one encoder as CUDA graphs: the choice of a graph and its use by autograd.

A graph launches all kernels of an encoder at once, some 1,500 for 12 layers, but only for tensors
of the sizes and addresses of its capture. So packed tokens are copied into input tensors of a few
sizes. Unused tokens form filler sequences, whose outputs are discarded.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilefold._internal.cuda_graphs import GraphMemory, capture_lock, warn_capture_failed
from tilefold._internal.typing import Transformer
from tilefold.distributed.ranks import has_other_ranks
from tilefold.integrations.sentence_transformers.graphs.backward import LayerCut, cut_layers
from tilefold.integrations.sentence_transformers.graphs.capture import (
    GraphCache,
    autocast_dtype,
    numeric_settings,
    uncached_autocast,
)
from tilefold.integrations.sentence_transformers.graphs.captured_state import ModelStructure
from tilefold.integrations.sentence_transformers.graphs.step_graph import (
    EncoderPass,
    PackSize,
    StaticInputs,
    StepGraph,
    StepGraphSize,
    compiled_layers,
    graph_size_for,
    temporary_parameters,
)
from tilefold.integrations.sentence_transformers.packing.forward import original_forward
from tilefold.integrations.transformers.packed import (
    LONGEST,
    LONGEST_NAMES,
    OFFSET_NAMES,
    OFFSETS,
    TOKEN_NAMES,
)
from tilefold.modules.fused_pooling import Features
from tilefold.ops.implementations import copy_each

# Graphs of an encoder. Each has inputs and outputs of its own and shares all other memory.
MAX_GRAPHS = 16
# The second batch of similar size is captured, since a capture takes longer than a step.
_BATCHES_BEFORE_CAPTURE = 2
# A graph keeps its activations. So a capture needs free memory for them, for those of a batch of
# another size that runs without a graph, and for what the rest of the step needs.
_FREE_MEMORY_PER_ACTIVATIONS = 3
# Columns of a batch that may wait for their backward passes at the same time: queries, and all
# documents, which sentence-transformers puts into one forward.
_MAX_COLUMNS = 2
GIB = 2**30
# Features of a batch that a graph can process.
_SUPPORTED_FEATURES = frozenset({*TOKEN_NAMES, *OFFSET_NAMES, *LONGEST_NAMES, "modality"})
_grad_and_dtype = attrgetter("requires_grad", "dtype")


class StepGraphs:
    """Runs packed batches of one Transformer in training as CUDA graphs.

    A batch runs without a graph if its size is new, if an earlier output of a graph still waits for
    its backward pass, without gradients, with gradient checkpointing, with hooks on the network's
    modules, on a CPU, or with sharded parameters. New graphs are captured when parameters, buffers,
    training modes, dropout rates, autocast, TF32 or deterministic algorithms change.

    Attributes:
        transformer: the Transformer module whose batches are run.
        compiled: whether layers run through ``torch.compile`` in a capture.
        divides_backward: whether autograd gets the gradients of most layers before the lowest
            layers are differentiated, so that DDP can send them in the meantime.
        failed: whether no graph can be captured.
        graphs: the captured graphs by their size.
        serial: the number of replayed forward passes. Each overwrites the activations of the one
            before, so a backward pass whose forward pass has an older number repeats it first.
        lacks_memory: whether the last capture was put off, because too little memory was free.
        bucket_gradients: the gradients in DDP's buckets, by the id of the parameter.
        parameters: the parameters of the encoder that require gradients.
        gradients: the buffer into which graphs write the gradient of each parameter; ``None`` for a
            parameter that the encoder does not use.
    """

    def __init__(
        self,
        transformer: Transformer,
        graph_factory: Callable[..., Any] = StepGraph,
        *,
        compiled: bool = False,
        divides_backward: bool = False,
    ) -> None:
        """Prepare to capture graphs; the first one is captured when a batch size occurs again.

        Args:
            transformer: the Transformer module whose batches are run.
            graph_factory: creates a graph, with the arguments of :class:`StepGraph`. Tests on a CPU
                pass another class.
            compiled: whether layers run through ``torch.compile`` in a capture, see
                :func:`collate_ahead`.
            divides_backward: whether the backward pass is divided into upper and lower layers.
        """
        self.transformer = transformer
        self.compiled = compiled
        self.divides_backward = divides_backward
        self._graph_factory = graph_factory
        self._initialize()

    def _initialize(self) -> None:
        """Set the attributes that are not pickled."""
        self.failed = False
        self.lacks_memory = False
        self.serial = 0
        # Activations of the encoder per token in steps without a graph, in bytes.
        self._bytes_per_token = 0.0
        self.bucket_gradients: dict[int, Tensor] = {}
        self._reset()

    def _reset(self) -> None:
        """Drop all graphs and the counts of earlier batches, and inspect the model again."""
        model = self.transformer.model
        self.graphs: GraphCache[StepGraphSize, Any] = GraphCache(MAX_GRAPHS)
        self.parameters: list[Tensor] = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)
        self._memory: GraphMemory | None = None
        self._batches_seen: Counter[StepGraphSize] = Counter()
        self._settings: object = None
        self._structure = ModelStructure(model)
        # Dropout rates are float attributes, whatever their names. Watch all of these.
        self._float_attributes = [
            (module, name)
            for module in self._structure.modules
            for name, value in vars(module).items()
            if isinstance(value, float)
        ]
        # Refers to the marker of the last forward pass, which dies when the backward pass has run
        # or can no longer run.
        self._pending_backward: weakref.ref[_BackwardMarker] | None = None

    def __getstate__(self) -> Features:
        names = ("transformer", "compiled", "divides_backward", "_graph_factory")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: Features) -> None:
        vars(self).update(state)
        self._initialize()

    def __call__(self, features: Features) -> Tensor | None:
        """Run the encoder on a packed batch by replaying a CUDA graph, if possible.

        Args:
            features: the packed batch.

        Returns:
            The output ``[1, T, D]``, through which autograd can run the backward pass. None if the
            batch must run without a CUDA graph.
        """
        if not self._may_run(features) or self.awaits_backward():
            return None
        ids: Tensor = features["input_ids"]
        settings = self._current_settings(ids.device.type)
        if settings != self._settings:
            self._reset()
            self._settings = settings
        pack = PackSize(
            tokens=ids.size(1),
            sequences=features[OFFSETS].numel() - 1,
            longest=features[LONGEST],
        )
        graph = self._graph_for(pack, features)
        if graph is None:
            return None
        graph.inputs.fill(features)
        self.serial += 1
        return self._replay(graph, features)

    def run_without_graph(self, features: Features, **kwargs: object) -> Features:
        """Run the original forward of the Transformer, and measure the memory of its activations.

        A later capture needs to know whether the GPU has room for them.

        Args:
            features: the packed batch, to which the output is added.
            **kwargs: other arguments of the forward.
        """
        transformer = self.transformer
        device = features["input_ids"].device
        is_measured = device.type == "cuda" and torch.is_grad_enabled()
        bytes_before = torch.cuda.memory_allocated(device) if is_measured else 0
        outputs = original_forward(transformer, features, **kwargs)
        if is_measured:
            n_bytes = torch.cuda.memory_allocated(device) - bytes_before
            n_tokens = features["input_ids"].numel()
            self._bytes_per_token = max(self._bytes_per_token, n_bytes / max(1, n_tokens))
        return outputs

    def _may_run(self, features: Features) -> bool:
        """Whether a graph could run a batch, with the same results as the model has.

        Args:
            features: the packed batch.
        """
        if self.failed or not torch.is_grad_enabled():
            return False
        has_unsupported_features = bool(features.keys() - _SUPPORTED_FEATURES)
        if has_unsupported_features:
            return False
        ids: Tensor = features["input_ids"]
        if ids.numel() == 0 or (self._needs_gpu() and not ids.is_cuda):
            return False
        self._update_structure()
        return not self._structure.has_hooks_or_checkpointing()

    def _needs_gpu(self) -> bool:
        """Whether graphs are CUDA graphs. Tests on a CPU replace them."""
        return self._graph_factory is StepGraph

    def _update_structure(self) -> None:
        """Record the structure of the model again if it has changed."""
        model = self.transformer.model
        is_same_model = self._structure.modules[0] is model
        if not is_same_model or not self._structure.has_same_members():
            self._structure = ModelStructure(model)

    def awaits_backward(self) -> bool:
        """Whether the backward pass of the last replayed batch may still run.

        Another replay would overwrite its activations.
        """
        return self._pending_backward is not None and self._pending_backward() is not None

    def _current_settings(self, device_type: str) -> object:
        """Return the state of the model and of torch whose changes invalidate captured graphs.

        Args:
            device_type: the type of the device that computes, such as ``"cuda"``.

        Returns:
            A value to compare: addresses, gradient flags and dtypes of all parameters and buffers,
            training modes and float attributes of all modules, and torch's numeric settings.
        """
        tensors = self._structure.tensors
        addresses = list(map(Tensor.data_ptr, tensors))
        gradient_flags_and_dtypes = list(map(_grad_and_dtype, tensors))
        float_values = [getattr(module, name, None) for module, name in self._float_attributes]
        return (
            addresses,
            gradient_flags_and_dtypes,
            self._structure.training_modes(),
            float_values,
            numeric_settings(device_type),
        )

    def _graph_for(self, pack: PackSize, features: Features) -> Any:
        """Return the smallest cached graph that fits a batch, or capture one for a repeated size.

        Args:
            pack: the size of the batch.
            features: the batch.

        Returns:
            The graph, or None if the batch must run without one.
        """
        fitting_sizes = [size for size in self.graphs if size.fits(pack)]
        if fitting_sizes:
            return self.graphs.use(min(fitting_sizes))
        if self._count_batch(pack) < _BATCHES_BEFORE_CAPTURE:
            return None
        return self._new_graph(pack, features)

    def _count_batch(self, pack: PackSize) -> int:
        """Count a batch that fits no graph, and return how many batches had a similar size.

        Args:
            pack: the size of the batch.
        """
        similar_sizes = (size for size in self._batches_seen if size.fits(pack))
        size = next(similar_sizes, None) or graph_size_for(pack)
        self._batches_seen[size] += 1
        return self._batches_seen[size]

    def _new_graph(self, pack: PackSize, features: Features) -> Any:
        """Capture a graph for batches of similar size, and put it into the cache.

        Args:
            pack: the size of the batch.
            features: the batch with which the graph is captured.

        Returns:
            The graph, or None if no graph can be captured.
        """
        # FSDP replaces parameters by DTensors or by parameters of a class of its own.
        is_sharded = any(type(parameter) is not nn.Parameter for parameter in self.parameters)
        if not self.parameters or is_sharded:
            self.failed = True
            return None
        size = graph_size_for(pack)
        if self._needs_gpu() and not self._has_memory_for(size, features["input_ids"].device):
            return None
        inputs = StaticInputs(features, size)
        inputs.fill(features)
        if self._memory is None and self._needs_gpu():
            self._memory = GraphMemory()
        self.graphs.make_space()
        graph = self._capture_or_fall_back(inputs)
        if graph is not None:
            self.graphs[size] = graph
        return graph

    def _has_memory_for(self, size: StepGraphSize, device: torch.device) -> bool:
        """Whether the GPU has enough free memory to capture a graph; warn once if it has not.

        Args:
            size: the size of the graph.
            device: the GPU.
        """
        activation_bytes = size.tokens * self._bytes_per_token
        gradient_bytes = sum(
            parameter.nbytes
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True)
            if gradient is None
        )
        # Besides the activations of the graph, those of a batch without a graph must fit, and the
        # rest of the step.
        needed_bytes = _FREE_MEMORY_PER_ACTIVATIONS * activation_bytes + gradient_bytes
        if torch.cuda.mem_get_info(device)[0] < needed_bytes:
            # Graphs have memory of their own, and cannot use what torch has cached for others.
            torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info(device)[0]
        if free_bytes >= needed_bytes:
            self.lacks_memory = False
            return True
        if not self.lacks_memory:
            self.lacks_memory = True
            warnings.warn(
                f"{type(self.transformer.model).__name__} trains batches of {size.tokens:,} tokens "
                f"without CUDA graphs, which need {needed_bytes / GIB:.1f} GiB of free memory, got "
                f"{free_bytes / GIB:.1f} GiB. This is slower; results do not change.",
                UserWarning,
                stacklevel=2,
            )
        return False

    def _capture_or_fall_back(self, inputs: StaticInputs) -> Any:
        """Capture a graph, and try again with fewer options after each failure.

        The options are the divided backward pass and the compiled layers. Each failure issues a
        warning and turns one option off for all later graphs. A failure without options disables
        graphs altogether.

        Args:
            inputs: the input tensors of the graph, which hold a batch.

        Returns:
            The graph, or None if no graph can be captured.
        """
        dtype = autocast_dtype(inputs.offsets.device.type) or self.parameters[0].dtype
        is_half_precision = dtype.itemsize == 2
        while not self.failed:
            # torch cannot compile the packed attention of fp32 layers.
            compiled = self.compiled and is_half_precision
            try:
                return self._capture_graph(inputs, compiled)
            except RuntimeError as error:
                # Too little memory, no compiler, or an operation that cannot be divided, compiled
                # or captured.
                limitation = self._turn_off_next_option(compiled)
                model_name = type(self.transformer.model).__name__
                warn_capture_failed(f"{model_name} {limitation}", error)
        return None

    def _turn_off_next_option(self, compiled: bool) -> str:
        """Turn off the first option that is on: the divided backward pass, compiled layers, graphs.

        Args:
            compiled: whether layers were compiled for the failed capture.

        Returns:
            A verb phrase for a warning, which says how the model works from now on.
        """
        if self.divides_backward:
            self.divides_backward = False
            return "hands out all gradients at once, after its whole backward pass"
        if compiled:
            self.compiled = False
            return "captures its layers as they are, without torch.compile"
        self._reset()
        self.failed = True
        return "trains without CUDA graphs, which could not be captured"

    def _capture_graph(self, inputs: StaticInputs, compiled: bool) -> Any:
        """Capture the encoder's forward and backward pass as CUDA graphs.

        Temporary parameters replace the model's during the capture. They share its memory, but have
        none of the hooks by which DDP would start communication.

        Args:
            inputs: the input tensors, which hold a batch. Replays read the same tensors.
            compiled: whether layers run through ``torch.compile``.

        Returns:
            The graph. Its backward pass writes into the buffers :attr:`gradients`; missing buffers
            are added.
        """
        model = self.transformer.model
        bucket_gradients = [
            self.bucket_gradients.get(id(parameter)) for parameter in self.parameters
        ]
        layers_context = compiled_layers(model) if compiled else contextlib.nullcontext()
        parameters_context = temporary_parameters(model, self.parameters, bucket_gradients)
        with capture_lock, layers_context, parameters_context as captured_parameters:
            return self._graph_factory(
                run_encoder=self._run_encoder,
                inputs=inputs,
                parameters=captured_parameters,
                gradients=self.gradients,
                memory=self._memory,
            )

    def _run_encoder(self, features: Features) -> EncoderPass:
        """Run the encoder's forward pass, for capture in a CUDA graph.

        Args:
            features: the input tensors of the graph, whose addresses stay the same.
        """
        transformer = self.transformer
        # The cut holds the hidden states at which the backward pass is divided into upper and lower
        # layers. An empty cut means that it is not divided.
        cut_context: AbstractContextManager[LayerCut] = contextlib.nullcontext(LayerCut())
        if self.divides_backward:
            cut_context = cut_layers(transformer.model)
        with uncached_autocast(features["input_ids"].device.type), cut_context as cut:
            # Not the forward of the instance, which may call these graphs.
            outputs = original_forward(transformer, features)
        return EncoderPass(outputs[transformer.module_output_name], cut)

    def _replay(self, graph: Any, features: Features) -> Tensor:
        """Replay a graph on the batch in its input tensors, and connect its output to autograd.

        A divided backward pass has two autograd functions: one for the upper layers, which runs
        first, and one for the lower layers.

        Args:
            graph: the graph, whose inputs hold the batch.
            features: the batch, with n tokens.

        Returns:
            The output ``[1, n, D]``, through which autograd can run the backward pass.
        """
        forward_pass = _ForwardPass(
            features=features,
            gradients=self.gradients,
            parameter_versions=self._parameter_versions(),
            random_state=_random_state(features["input_ids"].device),
        )
        # Only the two autograd contexts may keep this marker. If this object or a stored traceback
        # did, a backward pass would seem pending forever, and no graph would run any more.
        marker = _BackwardMarker()
        self._pending_backward = weakref.ref(marker)
        # Parameters of the lower and of the upper layers, by their positions in ``parameters``.
        lower = self._used_parameters(graph.lower_positions)
        upper = self._used_parameters(set(range(len(self.parameters))) - graph.lower_positions)
        lower_done = None
        if lower:
            # An empty tensor: its only purpose is that autograd runs the lower layers last.
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
            forward_pass,
            marker,
            list(upper),
            lower_done,
            *upper.values(),
        )
        return output

    def _parameter_versions(self) -> list[int]:
        """Return torch's counts of the changes of each parameter."""
        return [parameter._version for parameter in self.parameters]

    def repeat_forward(self, graph: Any, forward_pass: _ForwardPass) -> None:
        """Run a forward pass again, because a later pass has overwritten its activations.

        A backward pass also uses them up. Dropout draws the same numbers again.

        Args:
            graph: the graph that has run the forward pass.
            forward_pass: the forward pass.

        Raises:
            RuntimeError: if the weights, the model or settings of torch have changed since.
        """
        # The list of buffers is replaced together with all graphs.
        has_same_graphs = self.gradients is forward_pass.gradients
        if not has_same_graphs or self._parameter_versions() != forward_pass.parameter_versions:
            raise RuntimeError(
                "backward must run before the weights, the model or torch's settings change, got "
                "a second backward pass, or one after another batch, that must repeat a forward "
                "pass of other weights or settings; call accelerate(model, graphs=False) for a "
                "loop that needs this.",
            )
        device = forward_pass.features["input_ids"].device
        graph.inputs.fill(forward_pass.features)
        self.serial += 1
        current_state = _random_state(device)
        _set_random_state(forward_pass.random_state, device)
        try:
            graph.forward()
        finally:
            _set_random_state(current_state, device)

    def _used_parameters(self, positions: set[int]) -> dict[int, Tensor]:
        """Return the parameters at some positions, without those that the encoder does not use.

        The encoder uses a parameter if the capture has allocated a gradient buffer for it. Others
        must not be inputs of an autograd function, because DDP waits for every parameter that
        autograd visits, even if its gradient is None.

        Args:
            positions: positions in :attr:`parameters`.

        Returns:
            The parameters by their positions, in ascending order.
        """
        return {
            position: self.parameters[position]
            for position in sorted(positions)
            if self.gradients[position] is not None
        }

    def use_bucket_gradients(self, bucket_gradients: dict[int, Tensor]) -> None:
        """Let new graphs, from the next batch on, write gradients into DDP's buckets.

        Args:
            bucket_gradients: the gradients in the buckets, by the id of the parameter.
        """
        self.bucket_gradients = bucket_gradients
        self._settings = None  # drops the current graphs at the next batch

    def copy_accumulated_gradients(self) -> None:
        """Copy gradients of earlier backward passes out of buffers that the next one overwrites.

        With gradient accumulation, ``grad`` of a parameter may share memory with the buffer into
        which graphs write, for example in a DDP bucket.
        """
        for parameter, buffer in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is None or buffer is None:
                continue
            if parameter.grad.data_ptr() == buffer.data_ptr():
                parameter.grad = parameter.grad.clone()

    def gradients_for_autograd(self, positions: list[int]) -> list[Tensor]:
        """Return the gradients that a graph has computed, as tensors that autograd can store.

        They are views of DDP's buckets if that is possible for all of these parameters, otherwise
        copies of the graph's buffers.

        Args:
            positions: the positions of parameters that the encoder uses.
        """
        computed = [
            buffer for position in positions if (buffer := self.gradients[position]) is not None
        ]
        bucket_views = self._bucket_views(positions)
        if bucket_views is None:
            return copies_of(computed)
        # Graphs write directly into DDP's buckets. Only graphs that were captured before the
        # buckets existed have other buffers, which are copied to the buckets.
        outdated = [
            (view, buffer)
            for view, buffer in zip(bucket_views, computed, strict=True)
            if view.data_ptr() != buffer.data_ptr()
        ]
        if outdated:
            copy_each(
                [view for view, _ in outdated],
                [buffer for _, buffer in outdated],
            )
        return bucket_views

    def _bucket_views(self, positions: list[int]) -> list[Tensor] | None:
        """Return a view of each parameter's gradient in the buckets that DDP sends to other ranks.

        The views are new tensor objects: autograd stores a gradient without a copy only if nothing
        else refers to the object.

        Args:
            positions: the positions of parameters.

        Returns:
            The views, or None if a parameter has no bucket or an accumulated gradient.
        """
        views: list[Tensor] = []
        for position in positions:
            parameter = self.parameters[position]
            bucket_gradient = self.bucket_gradients.get(id(parameter))
            if bucket_gradient is None or parameter.grad is not None:
                return None
            views.append(bucket_gradient.view_as(bucket_gradient))
        return views


class ColumnGraphs:
    """Runs the columns of training batches (queries, documents), one by one, as CUDA graphs.

    All columns of a batch run forward before the first one runs backward. So each column has graphs
    with memory of their own. If ``_MAX_COLUMNS`` columns wait for their backward passes,
    the next one runs without a graph.

    Columns run without graphs on a CPU, and with several ranks, whose gradients DDP sends during
    the backward pass. They also do after a forward pass without gradients in training mode: losses
    that cache gradients compute embeddings in such a pass, and the pass with gradients must repeat
    its dropout. A graph draws other random numbers than a pass without one.

    Attributes:
        transformer: the Transformer module whose batches are run.
        graphs: the graphs of each column that may wait for its backward pass.
        compiled: whether layers of new graphs run through ``torch.compile``.
        repeats_dropout: whether dropout must be repeated, so that no graph may run.
    """

    def __init__(
        self,
        transformer: Transformer,
        graph_factory: Callable[..., Any] = StepGraph,
    ) -> None:
        """Prepare to capture graphs; none is captured yet.

        Args:
            transformer: the Transformer module whose batches are run.
            graph_factory: creates a graph, with the arguments of :class:`StepGraph`. Tests on a CPU
                pass another class.
        """
        self.transformer = transformer
        self.graphs: list[StepGraphs] = []
        self.compiled = False
        self.repeats_dropout = False
        self._graph_factory = graph_factory

    def __getstate__(self) -> Features:
        return {"transformer": self.transformer, "_graph_factory": self._graph_factory}

    def __setstate__(self, state: Features) -> None:
        vars(self).update(state, graphs=[], compiled=False, repeats_dropout=False)

    def __call__(self, features: Features, **kwargs: object) -> Features:
        """Run a packed column, by replaying a CUDA graph if possible.

        Args:
            features: the packed column, to which the output is added.
            **kwargs: other arguments of the forward.
        """
        is_training = self.transformer.training
        has_gradients = torch.is_grad_enabled()
        # A loss that caches gradients will run the same texts again, with the same dropout.
        if is_training and not has_gradients:
            self.repeats_dropout = True
        if self.repeats_dropout or not has_gradients or not self._is_supported(features, kwargs):
            return original_forward(self.transformer, features, **kwargs)
        graphs = self._next_graphs()
        tensors = {name: features[name] for name in features.keys() & _SUPPORTED_FEATURES}
        output = None if graphs is None else graphs(tensors)
        if output is not None:
            features[self.transformer.module_output_name] = output
            return features
        return self.graphs[0].run_without_graph(features, **kwargs)

    def _is_supported(self, features: Features, kwargs: Features) -> bool:
        """Whether graphs can run a column with the same results as the Transformer.

        Args:
            features: the packed column.
            kwargs: other arguments of the forward.
        """
        config = self.transformer.model.config
        if kwargs or getattr(config, "output_hidden_states", False) or has_other_ranks():
            return False
        if self._graph_factory is StepGraph and not features["input_ids"].is_cuda:
            return False
        # The Transformer ignores features that are not tensors, such as the length of a prompt.
        return not any(
            isinstance(value, Tensor) and name not in _SUPPORTED_FEATURES
            for name, value in features.items()
        )

    def _next_graphs(self) -> StepGraphs | None:
        """Return graphs whose last output needs no backward pass any more, or None if all wait."""
        for graphs in self.graphs:
            if not graphs.awaits_backward():
                return graphs
        if len(self.graphs) == _MAX_COLUMNS:
            return None
        graphs = StepGraphs(self.transformer, self._graph_factory, compiled=self.compiled)
        self.graphs.append(graphs)
        return graphs


def copies_of(tensors: list[Tensor]) -> list[Tensor]:
    """Copy contiguous tensors of one dtype by one concatenation, and other tensors one by one.

    Args:
        tensors: the tensors, of any shapes, such as the gradients of all parameters.

    Returns:
        A copy of each tensor. Nothing else refers to these tensor objects, so autograd can keep
        them as gradients without cloning them.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.clone() for tensor in tensors]
    flat_copies = torch.split(
        torch.cat([tensor.view(-1) for tensor in tensors]),
        [tensor.numel() for tensor in tensors],
    )
    return [copy.view_as(tensor) for copy, tensor in zip(flat_copies, tensors, strict=True)]


# Position of ``lower_done`` among the arguments of ``_GraphedEncoder.apply``.
_LOWER_DONE_ARGUMENT = 5


class _ForwardPass(NamedTuple):
    """State from which a forward pass can be repeated, if its activations are overwritten.

    Attributes:
        features: the packed batch.
        gradients: the list of buffers into which the graph writes gradients. A list of another
            identity belongs to later graphs.
        parameter_versions: torch's counts of the changes of each parameter.
        random_state: the state of the device's random generator before the pass.
    """

    features: Features
    gradients: list[Tensor | None]
    parameter_versions: list[int]
    random_state: Tensor


def _random_state(device: torch.device) -> Tensor:
    """Return the state of a device's random generator, without waiting for the device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of a device's random generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class _BackwardMarker:
    """Object that lives until the backward pass of a forward pass has run or can no longer run.

    Only autograd's contexts refer to it. They die with the output of the forward pass.
    """


class _GraphedEncoder(torch.autograd.Function):
    """Forward pass of an encoder and backward pass of its upper layers, by a CUDA graph.

    The upper layers are all layers if the backward pass is not divided.
    """

    @staticmethod
    def forward(
        ctx: Any,
        graphs: StepGraphs,
        graph: Any,
        forward_pass: _ForwardPass,
        marker: _BackwardMarker,
        positions: list[int],
        lower_done: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        """Replay the forward pass of a graph on the batch in its input tensors.

        Args:
            ctx: the context of autograd.
            graphs: the graphs of the encoder.
            graph: the captured step to replay.
            forward_pass: the state from which the step can be replayed again. Its batch has n
                tokens.
            marker: is kept alive until the backward pass has run.
            positions: the positions of ``parameters`` in ``graphs.parameters``.
            lower_done: the output of :class:`_LowerLayers`, or None. Its value is not used: as it
                is an input, autograd runs the backward pass of the lower layers after this one.
            *parameters: the parameters whose gradients the upper layers complete. Their values are
                not used: as inputs, they get the gradients that :meth:`backward` returns.

        Returns:
            The output ``[1, n, D]``, as a copy, since the next replay overwrites the graph's.
        """
        ctx.graphs = graphs
        ctx.graph = graph
        ctx.forward_pass = forward_pass
        ctx.marker = marker
        ctx.positions = positions
        ctx.serial = graphs.serial  # tells backward whether a newer batch was replayed since
        output: Tensor = graph.forward()
        n_tokens = forward_pass.features["input_ids"].size(1)
        return output[:, :n_tokens].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[object, ...]:
        """Replay the backward pass of the upper layers and return the gradients it completes.

        Args:
            ctx: the context of autograd.
            output_gradient: the gradient of the output, ``[1, n, D]``.

        Returns:
            One gradient per argument of :meth:`forward`: None for the arguments before
            ``lower_done``, an empty tensor for ``lower_done``, which has no elements, and the
            gradients of the parameters.

        Raises:
            RuntimeError: if the activations are used up or overwritten, and weights have changed
                since the forward pass.
        """
        graphs: StepGraphs = ctx.graphs
        if ctx.serial != graphs.serial:
            # The activations are gone: this backward pass was run before, or another batch was.
            graphs.repeat_forward(ctx.graph, ctx.forward_pass)
        graphs.copy_accumulated_gradients()
        ctx.graph.backward(output_gradient)
        # The activations are used up. Without a serial number, a second backward pass repeats the
        # forward pass.
        ctx.marker = None
        ctx.serial = None
        lower_done_gradient = None
        if ctx.needs_input_grad[_LOWER_DONE_ARGUMENT]:
            lower_done_gradient = output_gradient.new_empty(0)
        gradients = graphs.gradients_for_autograd(ctx.positions)
        no_gradients = [None] * _LOWER_DONE_ARGUMENT
        return *no_gradients, lower_done_gradient, *gradients


class _LowerLayers(torch.autograd.Function):
    """Backward pass of an encoder's lower layers, by a CUDA graph.

    The output is an empty input of :class:`_GraphedEncoder`. So autograd runs this backward pass
    after that of the upper layers, and DDP can send their gradients in the meantime.
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
        """Return an empty tensor; :meth:`backward` runs once autograd has a gradient for it.

        Args:
            ctx: the context of autograd.
            graphs: the graphs of the encoder.
            graph: the captured step, whose lower layers the backward pass replays.
            marker: is kept alive until the backward pass has run.
            positions: the positions of ``parameters`` in ``graphs.parameters``.
            *parameters: the parameters whose gradients the lower layers complete.
        """
        ctx.graphs = graphs
        ctx.graph = graph
        ctx.marker = marker
        ctx.positions = positions
        return parameters[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[object, ...]:
        """Replay the backward pass of the lower layers and return the gradients it completes."""
        ctx.graph.backward_lower()
        ctx.marker = None
        gradients = ctx.graphs.gradients_for_autograd(ctx.positions)
        return None, None, None, None, *gradients
