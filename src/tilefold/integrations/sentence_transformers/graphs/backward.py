"""Backward pass of an encoder in one part, or in two: first the upper layers, then the lower ones.

With two parts, the ranks of a distributed training average the gradients of most layers while those
of the lowest layers are still computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilefold.ops.implementations import copy_each

# One of this many layers is a lower layer, so that few gradients are left for the second part.
_LAYERS_PER_LOWER_LAYER = 12

# Gradients of parameters in their order; None for a parameter without a gradient.
Gradients = Sequence[Tensor | None]


@dataclass
class LayerCut:
    """Where a forward pass was divided into lower and upper layers.

    Attributes:
        lower_output: output of the lower layers; ``None`` if the pass was not divided.
        upper_input: the leaf with the same values that the upper layers read; ``None`` likewise.
    """

    lower_output: Tensor | None = None
    upper_input: Tensor | None = None


@contextlib.contextmanager
def cut_layers(model: nn.Module) -> Iterator[LayerCut]:
    """Divide the first forward pass within the context into lower and upper layers.

    The longest ``ModuleList`` of the model holds the layers. Without one of at least two layers, or
    if the input of the first upper layer has no gradient, the pass is not divided.

    Args:
        model: the encoder.

    Yields:
        The cut, which the forward pass fills in.
    """
    cut = LayerCut()

    def replace_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Detach the hidden states that the first upper layer reads (a forward pre-hook)."""
        if cut.upper_input is not None or not args:
            return None
        hidden = args[0]
        if not (isinstance(hidden, Tensor) and hidden.requires_grad):
            return None
        cut.lower_output = hidden
        cut.upper_input = hidden.detach().requires_grad_()
        return cut.upper_input, *args[1:]

    stacks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    ]
    if not stacks:
        yield cut
        return
    layers = max(stacks, key=len)
    n_lower = max(1, len(layers) // _LAYERS_PER_LOWER_LAYER)
    handle = layers[n_lower].register_forward_pre_hook(replace_input)
    try:
        yield cut
    finally:
        handle.remove()


def backward_parts(
    output: Tensor,
    cut: LayerCut,
    parameters: list[Tensor],
    output_gradient: Tensor,
) -> Iterator[Gradients]:
    """Compute the gradients of all parameters, part by part.

    Args:
        output: output of the encoder.
        cut: where its forward pass was divided.
        parameters: parameters of the encoder.
        output_gradient: gradient of the output.

    Yields:
        First the gradients after the backward pass of the upper layers, which are all layers if the
        forward pass was not divided. Otherwise a second item follows, with the gradients after the
        lower layers. In it, parameters that the lower layers do not use have the same tensor.

    Raises:
        RuntimeError: if an upper layer also reads another result of the lower layers than the
            hidden states at the cut. Its activations are freed before the second part.
    """
    if cut.upper_input is None or cut.lower_output is None:
        yield torch.autograd.grad(output, parameters, output_gradient, allow_unused=True)
        return
    # Upper layers: from the output to the hidden states at the cut.
    cut_gradient, *upper = torch.autograd.grad(
        output,
        [cut.upper_input, *parameters],
        output_gradient,
        allow_unused=True,
    )
    yield upper
    # Lower layers: from the cut to the inputs.
    lower = torch.autograd.grad(cut.lower_output, parameters, cut_gradient, allow_unused=True)
    yield [_sum_gradients(*gradients) for gradients in zip(upper, lower, strict=True)]


def _sum_gradients(upper: Tensor | None, lower: Tensor | None) -> Tensor | None:
    """Add the gradients of a parameter in upper and lower layers, which may share it."""
    if lower is None:
        return upper
    if upper is None:
        return lower
    return upper + lower


def allocate_gradients(
    buffers: list[Tensor | None],
    parameters: list[Tensor],
    parts: Iterator[Gradients],
) -> set[int]:
    """Run a backward pass, and create the missing gradient buffers of parameters that it reaches.

    A buffer is the ``grad`` of the parameter, or a new tensor of zeros if that is None.

    Args:
        buffers: gradient buffer of each parameter; ``None`` for a missing one. New buffers are
            written into this list.
        parameters: the parameters.
        parts: result of :func:`backward_parts`, whose iteration runs the backward pass.

    Returns:
        Positions of the parameters whose gradients are complete only after the second part.
    """
    upper = next(parts)
    complete = next(parts, upper)  # gradients after both parts, if there are two
    for position, (parameter, gradient) in enumerate(zip(parameters, complete, strict=True)):
        if gradient is None or buffers[position] is not None:
            continue
        buffers[position] = (
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        )
    # The second part leaves the gradients of other parameters as the same objects.
    return {
        position for position in range(len(parameters)) if upper[position] is not complete[position]
    }


def write_gradients(
    buffers: list[Tensor | None],
    gradients: Gradients,
    positions: Collection[int],
) -> None:
    """Copy gradients of a backward pass to their buffers.

    A buffer is set to zero if its parameter has no gradient in this pass.

    Args:
        buffers: gradient buffer of each parameter; ``None`` for a parameter without one.
        gradients: gradient of each parameter.
        positions: positions of the parameters whose gradients are written.
    """
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    unused: list[Tensor] = []
    for position in positions:
        buffer = buffers[position]
        gradient = gradients[position]
        if buffer is None:
            continue
        if gradient is None:
            unused.append(buffer)
        else:
            targets.append(buffer)
            sources.append(gradient)
    if targets:
        copy_each(targets, sources)
    for buffer in unused:
        buffer.zero_()
