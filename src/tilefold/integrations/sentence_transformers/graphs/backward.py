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

# An encoder of 12 layers has one lower layer: few gradients are left for the second part, whose
# communication nothing overlaps.
_LAYERS_PER_LOWER_LAYER = 12

# Gradients in the order of their parameters; None for a parameter without a gradient.
Gradients = Sequence[Tensor | None]


@dataclass
class LayerCut:
    """The hidden states at which a forward pass was divided into lower and upper layers.

    Both attributes are ``None`` if the pass was not divided.

    Attributes:
        lower_output: the output of the lower layers.
        upper_input: a detached copy of it that requires a gradient, which the upper layers read.
    """

    lower_output: Tensor | None = None
    upper_input: Tensor | None = None


@contextlib.contextmanager
def cut_layers(model: nn.Module) -> Iterator[LayerCut]:
    """Divide the next forward pass into lower and upper layers, for a backward pass in two parts.

    DDP can then send the gradients of the upper layers while the lower ones are differentiated.
    The layers are the longest ``ModuleList`` of the model. The pass is not divided if no list has
    two layers, or if the hidden states at the cut require no gradient.

    Args:
        model: the encoder.

    Yields:
        The hidden states between lower and upper layers, which the forward pass fills in.
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

    layer_lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    ]
    if not layer_lists:
        yield cut
        return
    layers = max(layer_lists, key=len)
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
    """Run the backward pass of an encoder and yield its gradients after each part.

    Args:
        output: the output of the encoder.
        cut: the hidden states at which the forward pass was divided into lower and upper layers.
        parameters: the parameters of the encoder.
        output_gradient: the gradient of the output.

    Yields:
        The gradients of all parameters: once if the forward pass was not divided, otherwise after
        the upper layers and again after all layers. The second time, a parameter that the lower
        layers do not use has the same tensor object as the first time.

    Raises:
        RuntimeError: if the upper layers read a result of the lower layers besides the hidden
            states at the cut. The activations behind it are freed before the second part.
    """
    if cut.upper_input is None or cut.lower_output is None:
        yield torch.autograd.grad(output, parameters, output_gradient, allow_unused=True)
        return
    # Upper layers: from the output to the hidden states at the cut.
    cut_gradient, *upper_gradients = torch.autograd.grad(
        output,
        [cut.upper_input, *parameters],
        output_gradient,
        allow_unused=True,
    )
    yield upper_gradients
    # Lower layers: from the cut to the inputs.
    lower_gradients = torch.autograd.grad(
        cut.lower_output,
        parameters,
        cut_gradient,
        allow_unused=True,
    )
    yield [
        _sum_gradients(upper, lower)
        for upper, lower in zip(upper_gradients, lower_gradients, strict=True)
    ]


def _sum_gradients(upper: Tensor | None, lower: Tensor | None) -> Tensor | None:
    """Return the gradient of a parameter that upper layers, lower layers or both may use."""
    if lower is None:
        return upper
    if upper is None:
        return lower
    return upper + lower


def lower_positions(parts: Sequence[Gradients]) -> set[int]:
    """Return the positions of the parameters whose gradients the lower layers complete.

    Args:
        parts: the gradients of all parameters after each part of the backward pass, as
            :func:`backward_parts` yields them: after all layers, or after the upper and after all.
    """
    after_upper = parts[0]
    complete = parts[-1]
    # ``backward_parts`` yields the same tensor object again if the lower layers add nothing to it.
    return {
        position
        for position, (upper, total) in enumerate(zip(after_upper, complete, strict=True))
        if upper is not total
    }


def allocate_buffers(
    buffers: list[Tensor | None],
    parameters: list[Tensor],
    gradients: Gradients,
) -> None:
    """Add the missing gradient buffers of the parameters that have a gradient.

    The buffer of a parameter is its ``grad``, or a new tensor of zeros if that is None.

    Args:
        buffers: the buffer of each parameter, or ``None``. New buffers are written into this list.
        parameters: the parameters.
        gradients: the gradients of a complete backward pass.
    """
    for position, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is None or buffers[position] is not None:
            continue
        buffers[position] = (
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        )


def write_gradients(
    buffers: list[Tensor | None],
    gradients: Gradients,
    positions: Collection[int],
) -> None:
    """Copy the gradients that one part of a backward pass has completed to their buffers.

    A buffer is set to zero if its parameter has no gradient.

    Args:
        buffers: the buffer of each parameter; ``None`` for a parameter without one.
        gradients: the gradient of each parameter.
        positions: the positions of the parameters whose gradients are complete.
    """
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for position in positions:
        buffer = buffers[position]
        gradient = gradients[position]
        if buffer is None:
            continue
        if gradient is None:
            buffer.zero_()
        else:
            targets.append(buffer)
            sources.append(gradient)
    if targets:
        copy_each(targets, sources)
