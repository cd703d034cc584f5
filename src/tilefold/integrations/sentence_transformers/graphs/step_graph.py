"""One CUDA graph of an encoder's forward and backward pass, and its static inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilefold._internal.cuda_graphs import WARM_UP_RUNS, GraphMemory
from tilefold.integrations.sentence_transformers.graphs.backward import (
    LayerCut,
    allocate_buffers,
    backward_parts,
    lower_positions,
    write_gradients,
)
from tilefold.integrations.transformers.packed import (
    LONGEST_NAMES,
    OFFSET_NAMES,
    OFFSETS,
    TOKEN_NAMES,
)
from tilefold.modules.fused_pooling import Features

# Tokens and lengths of graphs are multiples of this.
_SIZE_STEP = 64
# Additional tokens that a graph has room for, as a fraction of the tokens of its first batch.
_HEADROOM = 1 / 32
# Unused tokens that a graph may compute, as a fraction of the tokens of the batch.
_MAX_WASTE = 1 / 10


class EncoderPass(NamedTuple):
    """A forward pass of an encoder.

    Attributes:
        output: the output ``[1, T, D]``.
        cut: where the pass was divided into lower and upper layers.
    """

    output: Tensor
    cut: LayerCut


EncoderRun = Callable[[Features], EncoderPass]


class PackSize(NamedTuple):
    """Size of a packed batch.

    Attributes:
        tokens: the number of tokens T of all sequences.
        sequences: the number of sequences.
        longest: the number of tokens of the longest sequence.
    """

    tokens: int
    sequences: int
    longest: int


class StepGraphSize(NamedTuple):
    """Size of a graph, which batches of similar sizes can use.

    A batch rarely fills a graph. The unused tokens are put into filler sequences, whose outputs are
    discarded. Sizes are ordered by their number of tokens.

    Attributes:
        tokens: the number of tokens T, with those of filler sequences.
        sequences: the number of sequences of a batch.
        fillers: the number of filler sequences.
        max_length: the largest number of tokens of a sequence.
    """

    tokens: int
    sequences: int
    fillers: int
    max_length: int

    def fits(self, pack: PackSize) -> bool:
        """Whether the graph can run a batch without computing many unused tokens.

        Args:
            pack: the size of the batch.
        """
        if self.sequences != pack.sequences:
            return False
        if self.max_length < pack.longest or self.tokens < pack.tokens:
            return False
        # Unused tokens form filler sequences, none of them longer than ``max_length``.
        n_unused = self.tokens - pack.tokens
        max_filler_tokens = self.fillers * self.max_length
        return n_unused <= min(max_unused_tokens(pack.tokens), max_filler_tokens)


def max_unused_tokens(tokens: int) -> int:
    """Return how many unused tokens a graph may compute with a batch of ``tokens`` tokens."""
    return max(2 * _SIZE_STEP, _SIZE_STEP + math.ceil(tokens * _MAX_WASTE))


def graph_size_for(pack: PackSize) -> StepGraphSize:
    """Return the size of a new graph for a batch and for slightly smaller or larger ones."""
    tokens = _round_up(pack.tokens * (1 + _HEADROOM))
    max_length = _round_up(pack.longest)
    return StepGraphSize(
        tokens=tokens,
        sequences=pack.sequences,
        fillers=math.ceil(max_unused_tokens(tokens) / max_length),
        max_length=max_length,
    )


def _round_up(size: float) -> int:
    """Round a size of at least 1 up to a multiple of the step."""
    return math.ceil(max(1, size) / _SIZE_STEP) * _SIZE_STEP


class StaticInputs:
    """Input tensors of a CUDA graph, into which packed batches are copied.

    Unused tokens keep their old values and form filler sequences, whose outputs are discarded and
    get zero gradients.

    Attributes:
        size: the size of the graph.
        tokens: the features with one value per token, ``[1, T]``, by name.
        offsets: the offsets of all sequences, int32 ``[sequences + fillers + 1]``.
    """

    def __init__(self, features: Features, size: StepGraphSize) -> None:
        """Allocate the input tensors.

        Args:
            features: a packed batch. Its first token fills the tensors, so that unused tokens have
                valid ids.
            size: the size of the graph.
        """
        self.size = size
        device = features["input_ids"].device
        self.tokens: dict[str, Tensor] = {
            name: features[name][:, :1].expand(1, size.tokens).contiguous()
            for name in TOKEN_NAMES
            if name in features
        }
        self.offsets = torch.zeros(
            size.sequences + size.fillers + 1,
            dtype=torch.int32,
            device=device,
        )
        # The end of each filler sequence, counted from the end of the batch, if all of them have
        # the largest length.
        self._filler_ends = (
            torch.arange(1, size.fillers + 1, dtype=torch.int32, device=device) * size.max_length
        )

    def features(self) -> Features:
        """Return the features that the encoder reads."""
        features: Features = dict(self.tokens)
        for name in OFFSET_NAMES:
            features[name] = self.offsets
        for name in LONGEST_NAMES:
            features[name] = self.size.max_length
        return features

    def fill(self, features: Features) -> None:
        """Copy a packed batch into the input tensors; unused tokens form filler sequences.

        Each filler sequence has the largest length, until the unused tokens run out. The remaining
        ones are empty.

        Args:
            features: the batch, which must fit the size of the graph.
        """
        n_tokens = features["input_ids"].size(1)
        n_offsets = self.size.sequences + 1
        for name, tensor in self.tokens.items():
            tensor[:, :n_tokens].copy_(features[name])
        self.offsets[:n_offsets].copy_(features[OFFSETS])
        torch.clamp(
            self._filler_ends + n_tokens,
            max=self.size.tokens,
            out=self.offsets[n_offsets:],
        )


class StepGraph:
    """Captured forward and backward pass of an encoder for batches of one size.

    If the forward pass was divided, the backward pass has two graphs. The gradients of the upper
    layers can then be sent to other ranks before the lower layers are differentiated.

    Attributes:
        inputs: the static inputs.
        lower_positions: the positions of the parameters whose gradients :meth:`backward_lower`
            writes; empty if the backward pass is not divided.
    """

    def __init__(
        self,
        run_encoder: EncoderRun,
        inputs: StaticInputs,
        parameters: list[Tensor],
        gradients: list[Tensor | None],
        memory: GraphMemory,
    ) -> None:
        """Run the encoder a few times to warm up, then capture its forward and backward pass.

        If the backward pass is divided, each of its two parts is captured by itself.

        Args:
            run_encoder: runs the forward pass.
            inputs: the static inputs, which hold a batch.
            parameters: the leaf tensors that get gradients.
            gradients: the buffer of each parameter, into which the backward pass writes. Missing
                buffers are added; they stay ``None`` for parameters that the encoder does not use.
            memory: the memory pool and the CUDA stream that the encoder's graphs share.
        """
        self.inputs = inputs
        is_first_graph = all(gradient is None for gradient in gradients)
        # One run suffices for later graphs, since libraries are initialised already.
        n_warm_up_runs = WARM_UP_RUNS if is_first_graph else 1
        with memory.warming_up():
            for _ in range(n_warm_up_runs):
                self._warm_up(run_encoder, parameters, gradients)
        # Activations take most of the GPU's memory. torch has cached the memory of those of the
        # warm-up, which a capture cannot use. So the cache is released.
        self._forward_graph = torch.cuda.CUDAGraph()
        with memory.capturing(self._forward_graph, releases_cache=True):
            output, cut = run_encoder(inputs.features())
        # Each ``next`` of this generator runs one part of the backward pass, within the capture
        # around it.
        parts = backward_parts(output, cut, parameters, self._output_gradient)
        upper_positions = set(range(len(parameters))) - self.lower_positions
        self._upper_graph = torch.cuda.CUDAGraph()
        with memory.capturing(self._upper_graph, releases_cache=True):
            write_gradients(gradients, next(parts), upper_positions)
        self._lower_graph: torch.cuda.CUDAGraph | None = None
        if self.lower_positions:
            self._lower_graph = torch.cuda.CUDAGraph()
            with memory.capturing(self._lower_graph, releases_cache=True):
                write_gradients(gradients, next(parts), self.lower_positions)
        self._output = output.detach()

    def _warm_up(
        self,
        run_encoder: EncoderRun,
        parameters: list[Tensor],
        gradients: list[Tensor | None],
    ) -> None:
        """Run the forward and backward pass once, and allocate the buffers of the gradients.

        All activations are freed on return.

        Args:
            run_encoder: runs the forward pass.
            parameters: the leaf tensors that get gradients.
            gradients: the buffer of each parameter. Missing buffers are added.
        """
        # `cut` has the hidden states at which the backward pass is divided into two parts.
        output, cut = run_encoder(self.inputs.features())
        self._output_gradient = torch.zeros_like(output)
        gradients_after_parts = list(
            backward_parts(output, cut, parameters, self._output_gradient),
        )
        allocate_buffers(gradients, parameters, gradients_after_parts[-1])
        self.lower_positions = lower_positions(gradients_after_parts)

    def forward(self) -> Tensor:
        """Run the encoder on the static inputs.

        Returns:
            Output ``[1, T, D]``, which the next call overwrites.
        """
        self._forward_graph.replay()
        return self._output

    def backward(self, output_gradient: Tensor) -> None:
        """Differentiate the upper layers and write the gradients that are then complete.

        Args:
            output_gradient: the gradient of the outputs of the batch's n tokens, ``[1, n, D]``.
        """
        n_tokens = output_gradient.size(1)
        self._output_gradient[:, :n_tokens].copy_(output_gradient)
        self._output_gradient[:, n_tokens:].zero_()
        self._upper_graph.replay()

    def backward_lower(self) -> None:
        """Differentiate the lower layers, after :meth:`backward`, and write their gradients."""
        if self._lower_graph is not None:
            self._lower_graph.replay()


@contextlib.contextmanager
def temporary_parameters(
    model: nn.Module,
    parameters: list[Tensor],
    gradients: list[Tensor | None],
) -> Iterator[list[Tensor]]:
    """Temporarily replace a model's parameters with new ones that share their memory.

    A capture needs parameters without DDP's hooks, and without a gradient accumulator that belongs
    to another CUDA stream.

    Args:
        model: the model.
        parameters: the parameters to replace, in every module that shares them.
        gradients: the ``grad`` of each temporary parameter, in the order of the parameters.

    Yields:
        The temporary parameters in the order of the originals.
    """
    temporaries: list[Tensor] = []
    temporary_of: dict[int, nn.Parameter] = {}  # by the id of the original
    for parameter, gradient in zip(parameters, gradients, strict=True):
        temporary = nn.Parameter(parameter.detach())
        temporary.grad = gradient
        temporaries.append(temporary)
        temporary_of[id(parameter)] = temporary
    # A module, the name of a parameter in it, and the original.
    replaced = [
        (module, name, original)
        for module in model.modules()
        for name, original in module._parameters.items()
        if id(original) in temporary_of
    ]
    for module, name, original in replaced:
        module._parameters[name] = temporary_of[id(original)]
    try:
        yield temporaries
    finally:
        for module, name, original in replaced:
            module._parameters[name] = original


@contextlib.contextmanager
def compiled_layers(model: nn.Module) -> Iterator[None]:
    """Compile the layers of a model within a context, for sequences of any length.

    Layers are the items of each ``ModuleList`` whose items all have the same class. A layer whose
    ``forward`` was replaced on the instance is not compiled.

    Args:
        model: the model. Afterwards its layers run uncompiled again.
    """
    layers: dict[nn.Module, None] = {}  # an ordered set
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len({type(item) for item in module}) != 1:
            continue
        for layer in module:
            if "forward" not in vars(layer):
                layers[layer] = None
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # uncovers the method of the class
