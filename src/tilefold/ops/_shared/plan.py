"""Plans: what one pass of an operator allocates and launches, as data.

A function of a room's ``plans.py`` makes a plan of shapes, strides, dtypes, options and a :class:`Setting`; it sees no
values and no addresses, and its tensors may lie on the meta device. ``_triton/program.py`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.internals import Grid, Tma


class Setting(NamedTuple):
    """Facts behind plans besides the tensors' layouts and the options.

    Attributes:
        capability: compute capability of the GPU; ``(0, 0)`` where kernels are interpreted.
        multiprocessors: of the GPU.
        tf32: whether fp32 products may run in TF32.
        aligned: whether all tensors that are given begin at multiples of 16 bytes, as TMA descriptors ask.
        given_up: names of the kernels that cannot be built there; see :class:`Instead`.
        added: of backward, names of the tensors whose gradient is added to a buffer, which is given as ``d<tensor>``.
    """

    capability: tuple[int, int]
    multiprocessors: int
    tf32: bool
    aligned: bool
    given_up: frozenset[str]
    added: frozenset[str] = frozenset()


class Buffer(NamedTuple):
    """Memory of a result, or of scratch, from the first step that names it to the last one.

    Results are allocated one by one. Scratch is allocated in blocks: of what lives at the same time, and of what
    follows on little. A result is contiguous, unless it has ``strides``; scratch always is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @classmethod
    def like(cls, tensor: Tensor) -> Buffer:
        """Describe ``torch.empty_like(tensor)``."""
        return cls(tensor.shape, tensor.dtype, torch.empty_like(tensor, device="meta").stride())


class View(NamedTuple):
    """The memory of the result ``of``, in another dtype."""

    of: str
    dtype: torch.dtype


class Instead(NamedTuple):
    """A kernel that has another one behind it: where it cannot be built, the pass is planned again without it.

    Attributes:
        kernel: what :attr:`Setting.given_up` then has, the operator and which of its kernels, as people call them.
        sentence: what runs in its place, and what that costs.
    """

    kernel: str
    sentence: str


class Launch(NamedTuple):
    """A kernel's launch.

    Attributes:
        kernel: a Triton kernel.
        grid: its programs.
        tensors: names of its first arguments.
        numbers: the arguments after the tensors.
        constants: ``constexpr`` parameters, warps and stages.
        tma: by name, how a tensor is read through a TMA descriptor, which its first argument then is; others are plain.
        instead: what stands behind the kernel, besides the tiled path.
    """

    kernel: Any
    grid: Grid
    tensors: str
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]
    tma: Mapping[str, Tma] = {}
    instead: Instead | None = None


class TorchStep(NamedTuple):
    """``makes = function(*tensors)`` by torch, by names.

    A name that exists already stands for the new tensor from then on, and a result that a step makes is not allocated.
    """

    makes: str
    function: Callable[..., Tensor]
    tensors: str


class Plan(NamedTuple):
    """One pass, forward or backward.

    Its names are those of the tensors that are given, of the results, of ``buffers``, and what torch steps make.

    Attributes:
        steps: in order.
        buffers: scratch and views; ``None`` for what launches get ``None`` for, which may be a result that is not made.
        fills: by result, the number that all its entries have before the steps; kernels write all others whole.
    """

    steps: tuple[Launch | TorchStep, ...] = ()
    buffers: Mapping[str, Buffer | View | None] = {}
    fills: Mapping[str, float] = {}


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


def taker(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Fast getter of the values at these places of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])
