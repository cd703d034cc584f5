"""Plans: what one pass of an operator allocates and launches, as data without values or addresses.

A plan is made from the layouts of tensors and from options, so it can be made, and tested, without
a GPU. A :class:`~tilefold.ops._shared._triton.program.Program` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.internals import Grid, Tma

Values = tuple[Any, ...]  # tensors, addresses or numbers; a position always holds the same kind
Selector = Callable[[Any], Values]  # selects values of a sequence
Constants = dict[str, Any]  # ``constexpr`` parameters, and Triton's options
# Options of a kernel's compilation. Triton chooses those that a launch does not name.
TRITON_OPTIONS = ("num_warps", "num_stages", "maxnreg", "ptx_options")


class Setting(NamedTuple):
    """Facts that plans depend on, apart from the layouts of tensors and the options.

    Attributes:
        capability: compute capability of the device, ``(0, 0)`` where kernels are interpreted.
        multiprocessors: number of multiprocessors of the device.
        tf32: whether products of fp32 may run in TF32.
        aligned: whether all tensors begin at multiples of 16 bytes, as TMA descriptors need.
        given_up: names of the kernels that cannot be built on the device
            (:attr:`KernelFallback.kernel`).
        accumulated: names of tensors whose gradient is added to a buffer. The buffer of ``x`` is an
            input of the plan, ``dx``.
    """

    capability: tuple[int, int]
    multiprocessors: int
    tf32: bool
    aligned: bool
    given_up: frozenset[str]
    accumulated: frozenset[str] = frozenset()


class Buffer(NamedTuple):
    """Shape, dtype and strides of a result or of scratch.

    Without ``strides`` it is contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @classmethod
    def like(cls, tensor: Tensor) -> Buffer:
        """Describe ``torch.empty_like(tensor)``."""
        return cls(tensor.shape, tensor.dtype, torch.empty_like(tensor, device="meta").stride())

    def on(self, device: torch.device) -> Tensor:
        """Allocate the buffer."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class KernelFallback(NamedTuple):
    """Replacement of a kernel that cannot be built.

    The pass is then planned again, with the kernel in :attr:`Setting.given_up`.

    Attributes:
        kernel: name of the operator and of the kernel, for warnings.
        sentence: what runs in its place, and what that costs, for warnings.
    """

    kernel: str
    sentence: str


class Launch(NamedTuple):
    """Launch of a kernel, whose parameters are tensors, then numbers, then constants.

    Attributes:
        kernel: the ``triton.jit`` function.
        grid: number of program instances in three dimensions.
        tensors: names of the tensors, separated by spaces, in the order of the parameters.
        numbers: values of the parameters after the tensors.
        constants: ``constexpr`` parameters and Triton's options, by name.
        tma: how a tensor is described to TMA, by its name. The first parameter with this name is a
            TMA descriptor, later ones are pointers.
        fallback: what runs if the kernel cannot be built. Without one, the tiled path does.
    """

    kernel: Any
    grid: Grid
    tensors: str
    numbers: tuple[int | float, ...]
    constants: Constants
    tma: Mapping[str, Tma] = {}
    fallback: KernelFallback | None = None


class TorchStep(NamedTuple):
    """Call of a torch function: ``makes = function(*tensors)``.

    Attributes:
        makes: name of the output. If a tensor has this name already, the name is bound to the
            output from here on.
        function: function of tensors. It may return ``None``, for a tensor that is not made.
        tensors: names of the arguments, separated by spaces.
    """

    makes: str
    function: Callable[..., Tensor | None]
    tensors: str


class Plan(NamedTuple):
    """Memory, launches and torch functions of one pass of an operator.

    Steps name inputs, results, scratch, and outputs of torch steps. A name that nothing has is
    ``None`` to them.

    Attributes:
        steps: launches and torch functions, in order.
        buffers: scratch by name, or ``None`` for a result that is not computed.
        fills: numbers that results are filled with before the steps, by name.
    """

    steps: tuple[Launch | TorchStep, ...] = ()
    buffers: Mapping[str, Buffer | None] = {}
    fills: Mapping[str, float] = {}


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)``. Triton's own costs microseconds per call on the CPU."""
    return -(-a // b)


def power_of_two(n: int, least: int = 16) -> int:
    """The first power of two that is no less than ``n``, and no less than ``least``."""
    return max(least, 1 << (n - 1).bit_length())


def one_byte(mask: Tensor) -> Tensor:
    """Make a mask (nonzero = keep) contiguous, with one byte per entry.

    Kernels are then compiled for few dtypes of masks.
    """
    if mask.dtype.itemsize != 1:
        mask = mask != 0
    return mask.contiguous()


def contiguous(
    dtype: torch.dtype | None = None,
    /,
    **tensors: Tensor | None,
) -> tuple[TorchStep, ...]:
    """Make steps that copy the tensors which are not contiguous, or not in ``dtype``.

    Args:
        dtype: dtype of the copies; ``None`` keeps the dtype of each tensor.
        **tensors: tensors by their names in the plan. The copies take over the names.
    """
    steps = []
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if dtype is not None and tensor.dtype != dtype:
            cast = partial(Tensor.to, dtype=dtype, memory_format=torch.contiguous_format)
            steps.append(TorchStep(name, cast, name))
        elif not tensor.is_contiguous():
            steps.append(TorchStep(name, Tensor.contiguous, name))
    return tuple(steps)


def selector(positions: list[int]) -> Selector:
    """Return a fast function that selects the values at these positions as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    # itemgetter of a single position returns the value itself, of a slice a sequence
    first = positions[0] if positions else 0
    return itemgetter(slice(first, first + len(positions)))


class Steps:
    """Builder of a plan, which matches the parameters of a kernel to tensors and values by name.

    A parameter whose name ends in ``_ptr``, ``_src`` or ``_desc`` is a tensor, and the rest of its
    name is the tensor's. A parameter that is annotated ``tl.constexpr`` is a constant. Any other
    one is a number. For example::

        @triton.jit
        def scale_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr): ...


        steps = Steps({"n": x.numel(), "BLOCK": 256, "num_warps": 4})
        steps.launch(scale_kernel, (cdiv(x.numel(), 256),))
        steps.plan().steps[0]
        # Launch(scale_kernel, (4, 1, 1), tensors="x out", numbers=(1000,),
        #        constants={"num_warps": 4, "BLOCK": 256})

    Two mappings change which tensor a parameter gets. ``steps.renamed["x"] = "rows"`` gives every
    later launch the tensor ``rows`` for its parameter ``x_ptr``.
    ``steps.launch(..., parameter_tensors={"x_ptr": "rows"})`` does so for one launch and one
    parameter, and is needed where the name of a parameter has no such ending.

    Args:
        values: numbers and constants, by the names of the kernels' parameters. A kernel takes those
            that it has parameters for.
        parameter_tensors: names of tensors, by the names of the kernels' parameters.

    Attributes:
        values: as the argument; later launches see changes.
        parameter_tensors: as the argument.
        renamed: by the name of a tensor, the name of the tensor that later steps get instead.
        steps: launches and torch functions, in order.
        buffers: scratch by name, or ``None`` for a result that is not computed.
        fills: numbers that results are filled with before the steps, by name.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        parameter_tensors: Mapping[str, str] = {},
    ) -> None:
        self.values = dict(values)
        self.parameter_tensors = parameter_tensors
        self.renamed: dict[str, str] = {}
        self.steps: list[Launch | TorchStep] = []
        self.buffers: dict[str, Buffer | None] = {}
        self.fills: dict[str, float] = {}

    def buffer(self, name: str, shape: Iterable[int], dtype: torch.dtype = torch.float32) -> str:
        """Add contiguous scratch, and return its name."""
        self.buffers[name] = Buffer(tuple(shape), dtype)
        return name

    def torch(self, makes: str, function: Callable[..., Tensor | None], tensors: str) -> None:
        """Add the call ``makes = function(*tensors)`` of a :class:`TorchStep`."""
        names = [self.renamed.get(name, name) for name in tensors.split()]
        self.steps.append(TorchStep(makes, function, " ".join(names)))

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        values: Mapping[str, Any] = {},
        parameter_tensors: Mapping[str, str] = {},
        tma: Mapping[str, Tma] = {},
        fallback: KernelFallback | None = None,
    ) -> None:
        """Add a launch.

        Args:
            kernel: the ``triton.jit`` function.
            grid: number of program instances, in one to three dimensions.
            values: numbers and constants of this launch only.
            parameter_tensors: names of tensors by the names of the kernel's parameters, for this
                launch only.
            tma: how a tensor is described to TMA, by its name.
            fallback: what runs if a kernel with TMA descriptors cannot be built. A launch without
                descriptors ignores it.
        """
        parameter_tensors = {**self.parameter_tensors, **parameter_tensors}
        values = {**self.values, **values}
        constants = {name: values[name] for name in TRITON_OPTIONS if values.get(name) is not None}
        tensors: list[str] = []
        numbers: list[int | float] = []
        for parameter in kernel.arg_names:
            stem, _, ending = parameter.rpartition("_")
            if parameter in parameter_tensors or ending in ("ptr", "src", "desc"):
                name = parameter_tensors.get(parameter, stem)
                tensors.append(self.renamed.get(name, name))
            elif parameter in kernel.fn.__annotations__:
                constants[parameter] = values[parameter]
            else:
                numbers.append(values[parameter])
        x, y, z = (*grid, 1, 1)[:3]
        self.steps.append(
            Launch(
                kernel=kernel,
                grid=(x, y, z),
                tensors=" ".join(tensors),
                numbers=tuple(numbers),
                constants=constants,
                tma=tma,
                fallback=fallback if tma else None,
            ),
        )

    def plan(self) -> Plan:
        """Return the plan of all steps."""
        return Plan(tuple(self.steps), self.buffers, self.fills)
