"""A backward pass that is captured: in one part, or in two, so that ranks add up the first's
gradients meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilefold.ops.implementations import copy_each

LOW = 12  # one layer in so many is below the cut: what it has is sent when all is done
Found = Sequence[Tensor | None]


@contextlib.contextmanager
def cut(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within it, one forward notes what a low layer is given, and the leaf that this layer reads
    instead.

    Nothing is noted of a model without a ``ModuleList`` of at least two layers that read a tensor
    with a gradient.
    """
    noted: list[Tensor] = []

    def divide(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if noted or not (given and isinstance(given[0], Tensor) and given[0].requires_grad):
            return None
        noted[:] = given[0], given[0].detach().requires_grad_()
        return noted[1], *given[1:]

    stacks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    ]
    with contextlib.ExitStack() as stack:
        if stacks:
            layers = max(stacks, key=len)
            stack.callback(
                layers[max(1, len(layers) // LOW)].register_forward_pre_hook(divide).remove,
            )
        yield noted


def backward_parts(
    output: Tensor,
    noted: list[Tensor],
    parameters: list[Tensor],
    gradient: Tensor,
) -> Iterator[Found]:
    """The gradients of all parameters as they are after each part, None where there is none yet.

    Raises ``RuntimeError`` for a layer above the cut that reads something else of what is below it:
    activations are not kept for a second pass.
    """
    found = torch.autograd.grad(output, noted[1:] + parameters, gradient, allow_unused=True)
    above: Found = found[len(noted) // 2 :]
    yield above
    if noted:
        below: Found = torch.autograd.grad(noted[0], parameters, found[0], allow_unused=True)
        pairs = zip(above, below, strict=True)  # both of weights that layers share
        yield [one if two is None else two if one is None else one + two for one, two in pairs]


def prepared(
    places: list[Tensor | None],
    parameters: list[Tensor],
    parts: Iterator[Found],
) -> set[int]:
    """Give gradients that lack one a place: the ``grad`` of their parameter, or zeros like it where
    that is None.

    Returns:
        The numbers of the parameters whose gradients come in a second part.
    """
    early = next(parts)
    whole = next(parts, early)
    for number, (parameter, new) in enumerate(zip(parameters, whole, strict=True)):
        if new is not None and places[number] is None:
            places[number] = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    return {
        number for number, (one, two) in enumerate(zip(early, whole, strict=True)) if one is not two
    }


def write_gradients(to: list[Tensor | None], found: Found, numbers: Collection[int]) -> None:
    """Copy what was found of some parameters, and 0 where this time there is none."""
    pairs = [(kept, found[number]) for number in numbers if (kept := to[number]) is not None]
    if some := [(kept, new) for kept, new in pairs if new is not None]:
        copy_each(*map(list, zip(*some, strict=True)))
    for kept, new in pairs:
        if new is None:
            kept.zero_()
