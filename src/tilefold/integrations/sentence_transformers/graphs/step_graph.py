"""One CUDA graph of an encoder's forward and backward pass, and its static inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilefold.integrations.sentence_transformers.graphs.backward import (
    LayerCut,
    allocate_gradients,
    backward_parts,
    write_gradients,
)
from tilefold.integrations.sentence_transformers.graphs.capture import WARM_UP_RUNS, GraphMemory
from tilefold.integrations.transformers.packed import (
    LONGEST_NAMES,
    OFFSET_NAMES,
    OFFSETS,
    TOKEN_NAMES,
)
from tilefold.modules.fused_pooling import Features

# Tokens and lengths of graphs are multiples of this.
_SIZE_STEP = 64
# Tokens that a graph holds above those of the batch that it is captured with.
_HEADROOM = 1 / 32
# Tokens that a graph may compute in vain, as a fraction of those of the batch.
_MAX_WASTE = 1 / 10

# Runs the encoder on features: its output [1, T, D], and where the forward pass was divided.
EncoderRun = Callable[[Features], tuple[Tensor, LayerCut]]


class PackSize(NamedTuple):
    """Size of a packed batch.

    Attributes:
        tokens: number of tokens T of all sequences.
        sequences: number of sequences.
        longest: number of tokens of the longest sequence.
    """

    tokens: int
    sequences: int
    longest: int


class StepGraphSize(NamedTuple):
    """Size of a graph, into which batches of about one size fit.

    Graphs are compared by these numbers in their order, so that the smallest one has the fewest
    tokens.

    Attributes:
        tokens: number of tokens T.
        sequences: number of sequences of a batch.
        extra: number of further sequences, which hold the unused tokens.
        longest: largest number of tokens of a sequence.
    """

    tokens: int
    sequences: int
    extra: int
    longest: int

    def fits(self, pack: PackSize) -> bool:
        """Whether the graph can run a batch without computing many unused tokens.

        Args:
            pack: size of the batch.
        """
        if self.sequences != pack.sequences:
            return False
        if self.longest < pack.longest or self.tokens < pack.tokens:
            return False
        unused_tokens = self.tokens - pack.tokens
        extra_sequences_capacity = self.extra * self.longest
        return (
            unused_tokens <= max_unused_tokens(pack.tokens)
            and unused_tokens <= extra_sequences_capacity
        )


def max_unused_tokens(tokens: int) -> int:
    """Return how many tokens a graph may compute in vain for a batch of ``tokens`` tokens."""
    return max(2 * _SIZE_STEP, _SIZE_STEP + math.ceil(tokens * _MAX_WASTE))


def graph_size_for(pack: PackSize) -> StepGraphSize:
    """Return the size of a new graph for a batch and for slightly smaller or larger ones."""
    tokens = _round_up(pack.tokens * (1 + _HEADROOM))
    longest = _round_up(pack.longest)
    n_extra = math.ceil(max_unused_tokens(tokens) / longest)
    return StepGraphSize(tokens, pack.sequences, n_extra, longest)


def _round_up(size: float) -> int:
    """Round a size of at least 1 up to a multiple of the step."""
    return math.ceil(max(1, size) / _SIZE_STEP) * _SIZE_STEP


class StaticInputs:
    """Input tensors of a graph, into which packed batches are copied.

    Unused tokens keep their old values. They form extra sequences, whose results are discarded and
    whose gradients are zero.

    Args:
        features: a packed batch, whose first token fills the tensors.
        size: size of the graph.

    Attributes:
        size: size of the graph.
        tokens: features with a value for each token, ``[1, T]``, by name.
        offsets: offsets of all sequences, int32 ``[sequences + extra + 1]``.
    """

    def __init__(self, features: Features, size: StepGraphSize) -> None:
        """Allocate the tensors.

        Args:
            features: a packed batch, whose first token fills the tensors, so that unused tokens
                have valid ids.
            size: size of the graph.
        """
        self.size = size
        device = features["input_ids"].device
        self.tokens: dict[str, Tensor] = {
            name: features[name][:, :1].expand(1, size.tokens).contiguous()
            for name in TOKEN_NAMES
            if name in features
        }
        self.offsets = torch.zeros(
            size.sequences + size.extra + 1,
            dtype=torch.int32,
            device=device,
        )
        # Ends of the extra sequences behind a batch without tokens, if all are as long as allowed.
        self._extra_ends = (
            torch.arange(1, size.extra + 1, dtype=torch.int32, device=device) * size.longest
        )

    def features(self) -> Features:
        """Return the features that the encoder reads."""
        features: Features = dict(self.tokens)
        for name in OFFSET_NAMES:
            features[name] = self.offsets
        for name in LONGEST_NAMES:
            features[name] = self.size.longest
        return features

    def fill(self, features: Features) -> None:
        """Copy a packed batch, and divide the unused tokens among the extra sequences.

        Each extra sequence is as long as allowed until no unused tokens are left. The others are
        empty.

        Args:
            features: the batch, which fits the size of the graph.
        """
        n_tokens = features["input_ids"].size(1)
        n_offsets = self.size.sequences + 1
        for name, tensor in self.tokens.items():
            tensor[:, :n_tokens].copy_(features[name])
        self.offsets[:n_offsets].copy_(features[OFFSETS])
        torch.clamp(
            self._extra_ends + n_tokens,
            max=self.size.tokens,
            out=self.offsets[n_offsets:],
        )


class StepGraph:
    """Captured forward and backward pass of an encoder for batches of one size.

    Args:
        run_encoder: the forward pass.
        inputs: inputs that hold a batch.
        parameters: leaves that get gradients during the capture.
        gradients: buffers that the backward pass writes, one per parameter. Missing ones are
            created; they stay ``None`` for parameters that the encoder does not use.
        memory: pool and stream of the encoder's graphs.

    Attributes:
        inputs: the static inputs.
        lower: positions of the parameters whose gradients :meth:`backward_lower` writes; empty if
            the backward pass is not divided.
    """

    def __init__(
        self,
        run_encoder: EncoderRun,
        inputs: StaticInputs,
        parameters: list[Tensor],
        gradients: list[Tensor | None],
        memory: GraphMemory,
    ) -> None:
        """Warm up, then capture the forward pass and each part of the backward pass.

        Args:
            run_encoder: the forward pass.
            inputs: inputs that hold a batch.
            parameters: leaves that get gradients during the capture.
            gradients: buffers of the parameters' gradients. Missing ones are created in place.
            memory: pool and stream of the encoder's graphs.
        """
        self.inputs = inputs
        is_first_graph = all(gradient is None for gradient in gradients)
        # One run suffices for later graphs, since libraries are set up already.
        n_warm_up_runs = WARM_UP_RUNS if is_first_graph else 1
        with memory.warming_up():
            for _ in range(n_warm_up_runs):
                output, cut = run_encoder(inputs.features())
                self._output_gradient = torch.zeros_like(output)
                parts = backward_parts(output, cut, parameters, self._output_gradient)
                self.lower = allocate_gradients(gradients, parameters, parts)
            del output, cut, parts  # frees the activations before the capture
        self._forward_graph = torch.cuda.CUDAGraph()
        with memory.capturing(self._forward_graph):
            output, cut = run_encoder(inputs.features())
        # A generator: each ``next`` runs one part, within the capture around it.
        parts = backward_parts(output, cut, parameters, self._output_gradient)
        upper = set(range(len(parameters))) - self.lower
        self._upper_graph = torch.cuda.CUDAGraph()
        with memory.capturing(self._upper_graph):
            write_gradients(gradients, next(parts), upper)
        self._lower_graph = torch.cuda.CUDAGraph()
        if self.lower:
            with memory.capturing(self._lower_graph):
                write_gradients(gradients, next(parts), self.lower)
        self._output = output.detach()

    def forward(self) -> Tensor:
        """Run the encoder on the static inputs.

        Returns:
            Output ``[1, T, D]``, which the next call overwrites.
        """
        self._forward_graph.replay()
        return self._output

    def backward(self, output_gradient: Tensor) -> None:
        """Write the gradients of the last forward pass, without the parameters in :attr:`lower`.

        Args:
            output_gradient: gradient of the outputs of the first n tokens, ``[1, n, D]``. That of
                the others is zero.
        """
        n_tokens = output_gradient.size(1)
        self._output_gradient[:, :n_tokens].copy_(output_gradient)
        self._output_gradient[:, n_tokens:].zero_()
        self._upper_graph.replay()

    def backward_lower(self) -> None:
        """Write the gradients of :attr:`lower`, after :meth:`backward`."""
        self._lower_graph.replay()


@contextlib.contextmanager
def temporary_parameters(
    model: nn.Module,
    parameters: list[Tensor],
    gradients: dict[int, Tensor],
) -> Iterator[list[Tensor]]:
    """Replace the parameters of a model within a context by new ones that share their memory.

    A capture needs parameters without DDP's hooks, and without a gradient accumulator that belongs
    to another CUDA stream.

    Args:
        model: the model.
        parameters: parameters that are replaced, in every module that shares them.
        gradients: ``grad`` of the temporary parameters, by the id of the original.

    Yields:
        The temporary parameters in the order of the originals.
    """
    temporary_by_id: dict[int, nn.Parameter] = {}  # keys are the ids of the originals
    for parameter in parameters:
        temporary = nn.Parameter(parameter.detach())
        temporary.grad = gradients.get(id(parameter))
        temporary_by_id[id(parameter)] = temporary
    # A module, the name of a parameter in it, and the original.
    replaced = [
        (module, name, original)
        for module in model.modules()
        for name, original in module._parameters.items()
        if id(original) in temporary_by_id
    ]
    for module, name, original in replaced:
        module._parameters[name] = temporary_by_id[id(original)]
    try:
        yield [temporary_by_id[id(parameter)] for parameter in parameters]
    finally:
        for module, name, original in replaced:
            module._parameters[name] = original


@contextlib.contextmanager
def compiled_layers(model: nn.Module) -> Iterator[None]:
    """Compile the layers of a model within a context, for sequences of any length.

    Layers are the modules of each ``ModuleList`` whose modules have one class. A layer whose
    ``forward`` was replaced on the instance is not compiled.

    Args:
        model: the model. Its layers run uncompiled again at the end.
    """
    layers: dict[nn.Module, None] = {}  # in their order, each once
    for stack in model.modules():
        if not isinstance(stack, nn.ModuleList) or len({type(layer) for layer in stack}) != 1:
            continue
        for layer in stack:
            if "forward" not in vars(layer):
                layers[layer] = None
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
