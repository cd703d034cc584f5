"""Plans: what one pass of an operator allocates and launches, as data that holds no values and no
addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.internals import Grid, Tma

Values = tuple[Any, ...]  # tensors, addresses or numbers, of which each place has its own kind
Take = Callable[[Any], Values]  # selects values of a sequence
Constants = dict[str, Any]  # ``constexpr`` parameters, warps and stages
ASKED = (
    "num_warps",
    "num_stages",
    "maxnreg",
    "ptx_options",
)  # of Triton, which chooses where there is none


class Setting(NamedTuple):
    """Facts behind plans besides the tensors' layouts and the options."""

    capability: tuple[int, int]  # (0, 0) where kernels are interpreted
    multiprocessors: int
    tf32: bool  # whether fp32 products may run in it
    aligned: (
        bool  # all tensors that are given begin at multiples of 16 bytes, as TMA descriptors ask
    )
    given_up: frozenset[str]  # names of the kernels that cannot be built there; see Instead
    added: frozenset[str] = (
        frozenset()
    )  # tensors whose gradient is added to a buffer, which is given as d<tensor>


class Buffer(NamedTuple):
    """Memory of a result, contiguous without ``strides``, or of scratch, between the steps that
    name it.
    """

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


class Instead(NamedTuple):
    """A kernel that has another one behind it: where it cannot be built, the pass is planned again
    without it.
    """

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
    """``makes = function(*tensors)`` by torch, by names, of which one that exists then stands for
    the new tensor.
    """

    makes: str
    function: Callable[..., Tensor | None]
    tensors: str


class Plan(NamedTuple):
    """One pass; its names are those of given tensors, of results, of ``buffers``, and what torch
    steps make.
    """

    steps: tuple[Launch | TorchStep, ...] = ()
    # scratch; None for a result that is not made. Launches get None for names that nothing has
    buffers: Mapping[str, Buffer | None] = {}
    fills: Mapping[str, float] = {}  # the number that all entries of a result have before the steps


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)``; Triton's own costs microseconds per call on the host."""
    return -(-a // b)


def power_of_two(n: int, least: int = 16) -> int:
    """The first power of two that is no less than ``n``."""
    return max(least, 1 << (n - 1).bit_length())


def one_byte(mask: Tensor) -> Tensor:
    """A mask, nonzero = keep, contiguous and in one byte per entry, so that kernels are compiled
    for few dtypes.
    """
    return (mask if mask.dtype.itemsize == 1 else mask != 0).contiguous()


def contiguous(
    dtype: torch.dtype | None = None,
    /,
    **tensors: Tensor | None,
) -> tuple[TorchStep, ...]:
    """Steps that copy those tensors which are not contiguous, or not in ``dtype``, by name."""
    cast = partial(Tensor.to, dtype=dtype, memory_format=torch.contiguous_format)
    return tuple(
        TorchStep(name, Tensor.contiguous if dtype in (None, tensor.dtype) else cast, name)
        for name, tensor in tensors.items()
        if tensor is not None and not (tensor.is_contiguous() and dtype in (None, tensor.dtype))
    )


def taker(places: list[int]) -> Take:
    """Fast getter of the values at these places of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    first = places[0] if places else 0
    return itemgetter(slice(first, first + len(places)))


class Steps:
    """The steps of a plan in the making; launches take their arguments by their kernels' own names.

    Attributes:
        places: names of tensors by the kernels' for them; else ``<name>_ptr``, ``_src`` and
            ``_desc`` are ``name``.
        stands: by such a name the one that the plan has for it at this point.
        values: numbers and constants by the kernels' names, of which each takes its own.
    """

    def __init__(self, values: Mapping[str, Any], places: Mapping[str, str] = {}) -> None:
        self.places, self.values = places, dict(values)
        self.stands: dict[str, str] = {}
        self.steps: list[Launch | TorchStep] = []
        self.buffers: dict[str, Buffer | None] = {}
        self.fills: dict[str, float] = {}

    def buffer(self, name: str, shape: Iterable[int], dtype: torch.dtype = torch.float32) -> str:
        """Scratch, by its name."""
        self.buffers[name] = Buffer(tuple(shape), dtype)
        return name

    def torch(self, makes: str, function: Callable[..., Tensor | None], tensors: str) -> None:
        """A step of torch."""
        self.steps.append(
            TorchStep(makes, function, " ".join(self.stands.get(x, x) for x in tensors.split())),
        )

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        own: Mapping[str, Any] = {},
        places: Mapping[str, str] = {},
        tma: Mapping[str, Tma] = {},
        instead: Instead | None = None,
    ) -> None:
        """A launch with values and places of its ``own``; ``instead`` is for one that takes
        descriptors.
        """
        places, values, named = {**self.places, **places}, {**self.values, **own}, list[str]()
        numbers: list[int | float] = []
        constants = {name: values[name] for name in ASKED if values.get(name) is not None}
        for name in kernel.arg_names:
            stem, _, kind = name.rpartition("_")
            if name in places or kind in ("ptr", "src", "desc"):
                place = places.get(name, stem)
                named.append(self.stands.get(place, place))
            elif name in kernel.fn.__annotations__:
                constants[name] = values[name]
            else:
                numbers.append(values[name])
        (x, y, z), instead = (*grid, 1, 1)[:3], instead if tma else None
        self.steps.append(
            Launch(kernel, (x, y, z), " ".join(named), tuple(numbers), constants, tma, instead),
        )

    def plan(self) -> Plan:
        """All of them."""
        return Plan(tuple(self.steps), self.buffers, self.fills)
