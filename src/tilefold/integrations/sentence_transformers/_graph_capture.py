"""CUDA graphs of an encoder's forward and backward for packs of one size: the host launches them with two calls.

An encoder of 12 layers takes some 1,500 launches forward and backward, and on many machines the host needs longer for
them than the GPU for the work. A graph repeats all of them at once, but only with tensors of the sizes and addresses
that it was captured with. So packed tokens are copied into tensors of a few sizes, whose rest is filled by sequences
that nobody reads: their gradients are zero.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilefold.modules.fused_pooling import Features
from tilefold.ops.implementations import copy_each

_SMALLEST = 64  # tokens; sizes are multiples of this
_HEADROOM = 1 / 16  # tokens that a graph holds above those of the batch that it is captured with
_WASTE = 1 / 5  # of the tokens of a batch that a graph may compute for nothing
_WARM_RUNS = 2  # before the first capture, in which libraries set themselves up; one before the others
_TOKENS = ("input_ids", "position_ids", "token_type_ids")
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")
KNOWN = {*_TOKENS, *OFFSETS, *LONGEST, "modality"}  # of the features of a batch

Run = Callable[[dict[str, Any]], Tensor]


class Sizes(NamedTuple):
    """Sizes of a graph: T tokens in ``sequences``, ``extra`` more that hold the rest, none above ``longest`` tokens."""

    tokens: int
    sequences: int
    extra: int
    longest: int

    def hold(self, tokens: int, sequences: int, longest: int) -> bool:
        """Whether a pack fits, with few tokens computed for nothing."""
        if self.sequences != sequences or self.longest < longest or self.tokens < tokens:
            return False
        rest = self.tokens - tokens
        return rest <= max(2 * _SMALLEST, tokens * _WASTE) and rest <= self.extra * self.longest


def sizes_for(tokens: int, sequences: int, longest: int) -> Sizes:
    """Sizes of a graph for a pack and for those that are a little larger or smaller."""
    tokens, longest = (math.ceil(max(1, n) / _SMALLEST) * _SMALLEST for n in (tokens * (1 + _HEADROOM), longest))
    rest = max(2 * _SMALLEST, math.ceil(tokens * _WASTE))
    return Sizes(tokens, sequences, math.ceil(rest / longest), longest)


class StaticInputs:
    """Features of one size, into which those of a batch are copied.

    Args:
        features: of the first batch.
        sizes: those of the tensors.
    """

    def __init__(self, features: Features, sizes: Sizes) -> None:
        self.sizes = sizes
        ids: Tensor = features["input_ids"]
        self.tokens = {
            name: features[name][:, :1].expand(1, sizes.tokens).contiguous() for name in _TOKENS if name in features
        }
        self.offsets = torch.zeros(sizes.sequences + sizes.extra + 1, dtype=torch.int32, device=ids.device)
        self.ends = torch.arange(1, sizes.extra + 1, dtype=torch.int32, device=ids.device) * sizes.longest

    def features(self) -> dict[str, Any]:
        """The arguments of the encoder."""
        return {**self.tokens, **dict.fromkeys(OFFSETS, self.offsets), **dict.fromkeys(LONGEST, self.sizes.longest)}

    def fill(self, features: Features) -> None:
        """Copy a batch; behind it stay tokens of others, in sequences of their own."""
        count = features["input_ids"].size(1)
        for name, tensor in self.tokens.items():
            tensor[:, :count].copy_(features[name])
        self.offsets[: self.sizes.sequences + 1].copy_(features[OFFSETS[0]])
        torch.clamp(self.ends + count, max=self.sizes.tokens, out=self.offsets[self.sizes.sequences + 1 :])


class Captured:
    """Forward and backward of one size.

    Args:
        run: the encoder; features to ``[1, T, D]``.
        inputs: what the graph reads.
        parameters: leaves that get gradients, while the graph is made.
        gradients: where these are written, None for parameters that the encoder does not use.
        pool: memory that all graphs share.
        stream: where all of them are captured; memory that one leaves serves the next.
    """

    def __init__(
        self,
        run: Run,
        inputs: StaticInputs,
        parameters: list[Tensor],
        gradients: list[Tensor | None],
        pool: Any,
        stream: Any,
    ) -> None:
        self.inputs = inputs
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(1 if any(known is not None for known in gradients) else _WARM_RUNS):
                warm = run(inputs.features())
                found = torch.autograd.grad(warm, parameters, torch.zeros_like(warm), allow_unused=True)
            for i, gradient in enumerate(found):
                if gradient is not None and gradients[i] is None:
                    gradients[i] = torch.zeros_like(parameters[i])
            self.output_gradient = torch.zeros_like(warm)
            del warm, found
        torch.cuda.current_stream().wait_stream(stream)
        how: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward_graph, **how):
            output = run(inputs.features())
        with torch.cuda.graph(self.backward_graph, **how):
            found = torch.autograd.grad(output, parameters, self.output_gradient, allow_unused=True)
            write_gradients(gradients, found)
        self.output = output.detach()

    def forward(self) -> Tensor:
        """Output ``[1, T, D]`` for what was filled in; the next call overwrites it."""
        self.forward_graph.replay()
        return self.output

    def backward(self, gradient: Tensor) -> None:
        """Write the gradients of the last forward, for those of its first tokens."""
        count = gradient.size(1)
        self.output_gradient[:, :count].copy_(gradient)
        self.output_gradient[:, count:].zero_()
        self.backward_graph.replay()


@contextlib.contextmanager
def fresh_leaves(model: nn.Module, parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Within it, the model computes with other leaves of the same memory, which no other stream and no DDP knows."""
    leaves = {id(tensor): nn.Parameter(tensor.detach()) for tensor in parameters}
    places = [
        (module, name, tensor)
        for module in model.modules()
        for name, tensor in module._parameters.items()
        if id(tensor) in leaves
    ]
    for module, name, tensor in places:
        module._parameters[name] = leaves[id(tensor)]
    try:
        yield [leaves[id(tensor)] for tensor in parameters]
    finally:
        for module, name, tensor in places:
            module._parameters[name] = tensor


@contextlib.contextmanager
def compiled_layers(model: nn.Module) -> Iterator[None]:
    """Within it, layers of a ``ModuleList`` of one class run as ``torch.compile`` makes them, of any length."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    found = [layer for stack in lists if len({type(layer) for layer in stack}) == 1 for layer in stack]
    layers: list[Any] = [layer for layer in dict.fromkeys(found) if not own(layer)]  # one may stand twice
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def own(layer: nn.Module) -> bool:
    """Whether somebody gave this layer a forward of its own."""
    return "forward" in vars(layer)


def write_gradients(to: list[Tensor | None], found: tuple[Tensor | None, ...]) -> None:
    """Copy what was found, and 0 where this time there is none."""
    pairs = [(kept, new) for kept, new in zip(to, found, strict=True) if kept is not None]
    copy_each([kept for kept, new in pairs if new is not None], [new for _, new in pairs if new is not None])
    for kept, new in pairs:
        if new is None:
            kept.zero_()
