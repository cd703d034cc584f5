"""Plans: what one pass of an operator allocates and launches, as data that holds no values and no addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.internals import Grid, Tma

Values = tuple[Any, ...]  # tensors, addresses or numbers, of which each place has its own kind
Take = Callable[[Any], Values]  # selects values of a sequence
Constants = dict[str, Any]  # ``constexpr`` parameters, warps and stages


class Setting(NamedTuple):
    """Facts behind plans besides the tensors' layouts and the options."""

    capability: tuple[int, int]  # (0, 0) where kernels are interpreted
    multiprocessors: int
    tf32: bool  # whether fp32 products may run in it
    aligned: bool  # all tensors that are given begin at multiples of 16 bytes, as TMA descriptors ask
    given_up: frozenset[str]  # names of the kernels that cannot be built there; see Instead
    added: frozenset[str] = frozenset()  # tensors whose gradient is added to a buffer, which is given as d<tensor>


class Buffer(NamedTuple):
    """Memory of a result, contiguous without ``strides``, or of scratch, between the steps that name it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @classmethod
    def like(cls, tensor: Tensor) -> Buffer:
        """Describe ``torch.empty_like(tensor)``."""
        return cls(tensor.shape, tensor.dtype, torch.empty_like(tensor, device="meta").stride())

    def on(self, device: torch.device) -> Tensor:
        """Such memory."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class View(NamedTuple):
    """The memory of the result ``of``, in another dtype."""

    of: str
    dtype: torch.dtype


class Instead(NamedTuple):
    """A kernel that has another one behind it: where it cannot be built, the pass is planned again without it."""

    kernel: str  # the operator and which of its kernels, as people call them; Setting.given_up then has it
    sentence: str  # what runs in its place, and what that costs


class Launch(NamedTuple):
    """A kernel's launch: its arguments are tensors, by name, then numbers, then constants."""

    kernel: Any
    grid: Grid
    tensors: str
    numbers: tuple[int | float, ...]
    constants: Constants
    tma: Mapping[str, Tma] = {}  # by name: its first argument is a TMA descriptor, others are plain
    instead: Instead | None = None  # besides the tiled path


class TorchStep(NamedTuple):
    """``makes = function(*tensors)`` by torch, by names, of which one that exists then stands for the new tensor."""

    makes: str
    function: Callable[..., Tensor | None]
    tensors: str


class Plan(NamedTuple):
    """One pass; its names are those of given tensors, of results, of ``buffers``, and what torch steps make."""

    steps: tuple[Launch | TorchStep, ...] = ()
    # scratch and views; None for what launches get None for, which may be a result that is not made
    buffers: Mapping[str, Buffer | View | None] = {}
    fills: Mapping[str, float] = {}  # the number that all entries of a result have before the steps


def contiguous(**tensors: Tensor | None) -> tuple[TorchStep, ...]:
    """Steps that copy those tensors which are not contiguous, by name."""
    return tuple(
        TorchStep(name, Tensor.contiguous, name)
        for name, tensor in tensors.items()
        if tensor is not None and not tensor.is_contiguous()
    )


def in_dtype(dtype: torch.dtype, **tensors: Tensor) -> tuple[TorchStep, ...]:
    """Steps that bring those tensors into contiguous memory and ``dtype`` which are not there, by name."""
    return tuple(
        TorchStep(name, lambda tensor: tensor.to(dtype).contiguous(), name)
        for name, tensor in tensors.items()
        if tensor.dtype != dtype or not tensor.is_contiguous()
    )


def taker(places: list[int]) -> Take:
    """Fast getter of the values at these places of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


def arguments_of(
    kernel: Any, places: Mapping[str, str], values: Mapping[str, Any]
) -> tuple[list[str], tuple[int | float, ...], Constants]:
    """Tensors by name, numbers and constants of a launch, by the names that the kernel has for them.

    ``places`` are the tensors by the kernel's names; one ``<name>_ptr`` that is not there is ``name``. ``values`` may
    have more than the kernel takes, besides warps, stages, the registers of a thread and options of the assembler.
    """
    named: list[str] = []
    numbers: list[int | float] = []
    asked = ("num_warps", "num_stages", "maxnreg", "ptx_options")  # None leaves it to Triton
    constants = {name: values[name] for name in asked if values.get(name) is not None}
    for name in kernel.arg_names:
        if name in places or name.endswith("_ptr"):
            named.append(places.get(name, name.removesuffix("_ptr")))
        elif name in kernel.fn.__annotations__:
            constants[name] = values[name]
        else:
            numbers.append(values[name])
    return named, tuple(numbers), constants
