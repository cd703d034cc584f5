"""Calls of an operator on random tensors, and what tests observe of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted

KERNEL_DEVICE = "cpu" if triton_interpreted() else "cuda"
Shape = tuple[int, ...]
FP32 = torch.float32
OFFSETS = [0, 11, 11, 32]  # three sequences, the second of them empty
TOKEN_POSITIONS = torch.arange(42).view(2, 21)
# Two sequences: the first has holes, the second has no token.
MASK = (TOKEN_POSITIONS % 3 * torch.tensor([[1], [0]])).tolist()
# Some ids occur more than once in a sequence.
TOKEN_IDS = (TOKEN_POSITIONS * 7 % 38).tolist()


def meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """Return a tensor without memory: plans look at shapes, strides and dtypes only."""
    return torch.empty(shape, dtype=dtype, device="meta")


def output_gradient(output: Tensor) -> Tensor:
    """Return a gradient for ``output`` that is the same in every call.

    It is computed on the device, so that a CUDA graph may be captured around it.
    """
    values = torch.linspace(-1, 1, output.numel(), device=output.device)
    return values.view(output.shape).to(output.dtype)


@dataclass(frozen=True)
class Sample:
    """One call of an operator.

    Attributes:
        name: What warnings call the operator.
        function: Called as ``function(*leaves, **arguments, impl=...)``.
        shapes: Shapes of the leaves, whose values are random.
        options: Keyword arguments. Lists become tensors on the device of the call.
        dtype: Data type of the leaves.
        inference: Whether no leaf needs a gradient.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = FP32
    inference: bool = False

    def leaves(self, device: str = KERNEL_DEVICE, seed: int = 0) -> list[Tensor]:
        """Return leaves whose values depend on the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=generator) for shape in self.shapes]
        return [value.to(device, self.dtype).requires_grad_(not self.inference) for value in values]

    def arguments(self, device: str = KERNEL_DEVICE) -> dict[str, Any]:
        """Return the options with their lists as tensors on ``device``."""
        arguments: dict[str, Any] = {}
        for name, value in self.options.items():
            if isinstance(value, list):
                dtype = torch.int32 if name.startswith("cu_seqlens") else None
                arguments[name] = torch.tensor(value, device=device, dtype=dtype)
            else:
                arguments[name] = value
        return arguments

    def results(
        self,
        leaves: Sequence[Tensor],
        arguments: Mapping[str, Any],
        gradient: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the output and, unless this is an inference call, the gradients of the leaves.

        Args:
            leaves: Tensors of :attr:`shapes`.
            arguments: Keyword arguments, ``impl`` among them if it matters.
            gradient: Gradient of the output, by default :func:`output_gradient`.
        """
        output = self.function(*leaves, **arguments)
        if self.inference:
            return [output.detach()]
        if gradient is None:
            gradient = output_gradient(output)
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]

    def __str__(self) -> str:
        return f"{self.name} {self.options}"

    def option_values(self) -> set[tuple[object, ...]]:
        """Return its options, each with its value, or with the fact that it is a tensor."""
        values: set[tuple[object, ...]] = {
            (self.function, "dtype", self.dtype),
            (self.function, "inference", self.inference),
        }
        for name, value in self.options.items():
            described = "a tensor" if isinstance(value, list | Tensor) else repr(value)
            values.add((self.function, name, described))
        return values


def further_combinations_slow(samples: Iterable[Sample]) -> list[Any]:
    """Mark as ``slow`` the samples all of whose options have values that earlier samples have.

    Args:
        samples: The samples.

    Returns:
        The same samples, as parameters of a test.
    """
    tested: set[tuple[object, ...]] = set()
    parameters = []
    for sample in samples:
        values = sample.option_values()
        marks = [pytest.mark.slow] if values <= tested else []
        parameters.append(pytest.param(sample, marks=marks))
        tested |= values
    return parameters


def assert_same_bits(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that all results are there, with the same bits."""
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert results[name].dtype == value.dtype and torch.equal(results[name], value), name


def allocations(call: Callable[[], Any]) -> list[int]:
    """Return the sizes of what ``call`` allocates on the CPU, in bytes and in order.

    Memory that is released counts as a negative size.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
    ) as profile:
        result = call()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    del result
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def saved_for_backward(call: Callable[[], Any]) -> list[Tensor]:
    """Return the tensors that autograd saves while ``call`` runs."""
    saved: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        call()
    return saved


def unaligned(tensor: Tensor) -> Tensor:
    """Return a copy whose memory begins one element after a multiple of 16 bytes."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].view(tensor.shape).copy_(tensor.detach())
