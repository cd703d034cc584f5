"""What is timed: a function bound to its inputs, as it is, compiled, or captured as a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Runnable:
    """An implementation bound to its inputs.

    Attributes:
        forward: inference, no autograd; returns the output, or ``None`` for a bare product.
        forward_backward: training, returns ``(output, gradients)``; ``None`` where there is no backward.
        label: what actually runs, for instance the kernel family that ``impl="auto"`` resolved to.
    """

    forward: Callable[[], Tensor | None]
    forward_backward: Callable[[], tuple[Tensor, tuple[Tensor, ...]]] | None = None
    label: str = ""


def bind(
    call: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    leaves: tuple[Tensor, ...],
    grad_output: Tensor,
    label: str,
    train: Callable[..., Tensor] | None = None,
) -> Runnable:
    """``call(*arguments)`` without autograd, and with the gradients of ``leaves``.

    Args:
        call: the function.
        arguments: what it is called with.
        leaves: those of its arguments whose gradients are taken.
        grad_output: gradient of its result.
        label: what actually runs.
        train: what runs where gradients are asked for, in place of ``call``.
    """

    def forward() -> Tensor:
        with torch.no_grad():
            return call(*arguments)

    def forward_backward() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = (train or call)(*arguments)
        return out.detach(), torch.autograd.grad(out, leaves, grad_output.to(out.dtype))

    return Runnable(forward, forward_backward, label)


@functools.cache
def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``call`` under ``torch.compile``: one object per function, for all cases."""
    return torch.compile(call, dynamic=False)


def captured(eager: Runnable) -> Runnable:
    """Both phases of ``eager``, each captured once as a CUDA graph, to time kernels without the host's part."""
    both = None if eager.forward_backward is None else _replay(eager.forward_backward)
    return Runnable(_replay(eager.forward), both, f"{eager.label}, CUDA graph")


def _replay(run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` as a graph that replays; what it returns is what the capture returned, with new numbers."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay(_held: object = run) -> Any:  # the graph reads the memory of the tensors that `run` holds
        graph.replay()
        return result

    return replay
