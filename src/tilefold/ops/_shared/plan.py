"""Plans: what one pass of an operator allocates and launches, as data without values or addresses.

A :class:`PlanBuilder` records a plan from the layouts of tensors and from options, so that no GPU
is needed to record it or to test it. A :class:`~tilefold.ops._shared._triton.program.Program` runs
a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.fallback import KernelFallback
from tilefold.ops._shared.internals import Grid, Tma

Values = tuple[Any, ...]  # tensors, addresses or numbers; a position always holds the same kind
Selector = Callable[[Any], Values]  # selects values of a sequence
Constants = dict[str, Any]  # ``constexpr`` parameters, and Triton's options
# Options of a kernel's compilation. Triton chooses those that a launch does not name.
TRITON_OPTIONS = ("num_warps", "num_stages", "maxnreg", "ptx_options")


class Setting(NamedTuple):
    """Facts that plans depend on, apart from the layouts of tensors and the options.

    Attributes:
        capability: compute capability of the device, ``(0, 0)`` if kernels are interpreted.
        multiprocessors: number of multiprocessors of the device.
        tf32: whether products of fp32 may run in TF32.
        aligned: whether all tensors begin at multiples of 16 bytes, as TMA descriptors need.
        failed_kernels: names of the kernels that failed to build on the device
            (:attr:`KernelFallback.kernel`).
        accumulated: names of tensors whose gradient is added to a buffer. The buffer of ``x`` is an
            input of the plan, ``dx``.
    """

    capability: tuple[int, int]
    multiprocessors: int
    tf32: bool
    aligned: bool
    failed_kernels: frozenset[str]
    accumulated: frozenset[str] = frozenset()

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels, on the CPU."""
        return self.capability == (0, 0)


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


class Launch(NamedTuple):
    """Launch of a Triton kernel, whose parameters are tensors, then numbers, then constants.

    Attributes:
        kernel: the ``triton.jit`` function.
        grid: number of program instances in three dimensions.
        tensors: names of the tensors, in the order of the kernel's parameters.
        numbers: values of the parameters after the tensors.
        constants: ``constexpr`` parameters and Triton's options, by name.
        tma: the TMA description of a tensor, by the tensor's name. The first parameter that gets
            this tensor is a TMA descriptor, later ones are pointers.
        fallback: what runs if the kernel cannot be built. Without one, the tiled path does.
    """

    kernel: Any
    grid: Grid
    tensors: tuple[str, ...]
    numbers: tuple[int | float, ...]
    constants: Constants
    tma: Mapping[str, Tma] = {}
    fallback: KernelFallback | None = None


class TorchStep(NamedTuple):
    """Call of a torch function, ``output = function(*tensors)``, between the launches of a plan.

    Attributes:
        function: function of tensors. It may return ``None``; later steps then get ``None``.
        tensors: names of the arguments.
        output: name of the result. If another tensor has this name, the result replaces it in all
            later steps.
    """

    function: Callable[..., Tensor | None]
    tensors: tuple[str, ...]
    output: str


class Plan(NamedTuple):
    """Memory, kernel launches and torch calls of one pass of an operator.

    Steps refer to tensors by name: the inputs and results of the pass, buffers, and outputs of
    torch steps. A step gets ``None`` for a name that no tensor has.

    Attributes:
        steps: launches and torch steps, in the order in which they run.
        buffers: memory that is allocated in addition to the results, by name. A result that a torch
            step updates in place needs a buffer of its name.
        fills: numbers that results and buffers are filled with before the steps, by name.
        skipped_results: names of the results that are not computed. They are ``None``.
        one_block: whether all scratch is allocated at once, however much it is.
    """

    steps: tuple[Launch | TorchStep, ...] = ()
    buffers: Mapping[str, Buffer] = {}
    fills: Mapping[str, float] = {}
    skipped_results: frozenset[str] = frozenset()
    one_block: bool = False


def cdiv(a: int, b: int) -> int:
    """Return ``ceil(a / b)``. Triton's own function takes microseconds per call on the CPU."""
    return -(-a // b)


def power_of_two(n: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least ``n`` and at least ``least``."""
    return max(least, 1 << (n - 1).bit_length())


def one_byte(mask: Tensor) -> Tensor:
    """Return a contiguous mask (nonzero = keep) with one byte per entry.

    Kernels are then compiled for few mask dtypes.
    """
    if mask.dtype.itemsize != 1:
        mask = mask != 0
    return mask.contiguous()


def contiguous_steps(
    tensors: Mapping[str, Tensor | None],
    dtype: torch.dtype | None = None,
) -> list[TorchStep]:
    """Return the steps that copy tensors which are not contiguous, or have another dtype.

    Each copy replaces its tensor in later steps.

    Args:
        tensors: layouts of the tensors, by name. ``None`` is skipped.
        dtype: dtype that the tensors must have; ``None`` accepts every dtype.
    """
    steps = []
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        function: Callable[..., Tensor]
        if dtype is not None and tensor.dtype != dtype:
            function = partial(Tensor.to, dtype=dtype, memory_format=torch.contiguous_format)
        elif not tensor.is_contiguous():
            function = Tensor.contiguous
        else:
            continue
        steps.append(TorchStep(function, (name,), output=name))
    return steps


def selector(positions: list[int]) -> Selector:
    """Return a fast function that selects some values of a sequence, as a tuple.

    Args:
        positions: positions of the values: any number of them, or consecutive ones if there are
            fewer than two.
    """
    if len(positions) > 1:
        return itemgetter(*positions)
    # Of a single position, itemgetter returns the value itself. Of a slice, it returns a sequence.
    first = positions[0] if positions else 0
    return itemgetter(slice(first, first + len(positions)))


class PlanBuilder:
    """Recorder of a :class:`Plan`: the list of what one pass of an operator does on the GPU.

    A plan is recorded once for all calls of the same shapes, dtypes and options, before any tensor
    has values, and is replayed in each of these calls. It refers to tensors by name: the inputs and
    the results of the pass have names from the start. A *launch* runs a Triton kernel. A *torch
    step* calls a torch function, and gives its result a name. A *buffer* is memory that the pass
    allocates for itself, usually as scratch that one kernel writes and a later one reads. Launches
    and torch steps run in the order in which they are added.

    A launch finds the arguments of its kernel by the names of the kernel's parameters:

    - A parameter whose name ends in ``_ptr``, ``_src`` or ``_desc`` gets a tensor, whose name is
      the rest of the parameter's name.
    - Any other parameter gets a number or, if it is annotated ``tl.constexpr``, a constant. Its
      value comes from the arguments of :meth:`add_launch`, or from :meth:`set_parameters`.

    For example::

        @triton.jit
        def scale_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr): ...


        builder = PlanBuilder()
        builder.set_parameters(n=x.numel(), num_warps=4)
        builder.add_launch(
            scale_kernel,
            grid=(cdiv(x.numel(), 256),),
            parameters={"BLOCK": 256},
        )
        builder.build().steps[0]
        # Launch(scale_kernel, (4, 1, 1), tensors=("x", "out"), numbers=(1000,),
        #        constants={"num_warps": 4, "BLOCK": 256})

    Args:
        parameters: numbers and constants of all launches; see :meth:`set_parameters`.
        tensors: names of tensors by the names of kernels' parameters, for parameters that do not
            have the names of their tensors.

    Attributes:
        parameters: numbers and constants of later launches.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any] = {},
        tensors: Mapping[str, str] = {},
    ) -> None:
        """Start a plan without buffers and steps.

        Args:
            parameters: values by the names of kernels' parameters.
            tensors: tensors of the call by name.
        """
        self.parameters = dict(parameters)
        self._tensors = tensors
        self._replacements: dict[str, str] = {}
        self._steps: list[Launch | TorchStep] = []
        self._buffers: dict[str, Buffer] = {}
        self._fills: dict[str, float] = {}
        self._skipped_results: set[str] = set()
        self._one_block = False

    def set_parameters(self, **parameters: Any) -> None:
        """Set numbers and constants for all later launches.

        A launch passes them to its kernel if the kernel has parameters of these names.

        Args:
            **parameters: values by the names of kernels' parameters, or of Triton's options.
        """
        self.parameters |= parameters

    def add_buffer(
        self,
        name: str,
        shape: Iterable[int],
        dtype: torch.dtype = torch.float32,
    ) -> str:
        """Add a contiguous tensor that is allocated when the plan runs, and return its name.

        Args:
            name: name by which the steps of the plan read and write the buffer.
            shape: shape of the buffer.
            dtype: dtype of the buffer.
        """
        self._buffers[name] = Buffer(tuple(shape), dtype)
        return name

    def fill(self, name: str, number: float) -> None:
        """Fill a result or a buffer with a number before the first step that uses it."""
        self._fills[name] = number

    def allocate_scratch_at_once(self) -> None:
        """Allocate all scratch in one block, which costs less CPU time than many buffers.

        It is for plans whose last step uses most of the scratch. Other plans would hold memory that
        later steps could use again.
        """
        self._one_block = True

    def skip_result(self, name: str) -> None:
        """Do not compute a result: it is ``None``, and so it is for the steps."""
        self._skipped_results.add(name)

    def replace_tensor(self, name: str, by: str) -> None:
        """Let all later steps read and write one tensor where they name another.

        Args:
            name: name of the tensor that is replaced.
            by: name of the tensor that later steps get. If no tensor has it, they get ``None``.
        """
        self._replacements[name] = by

    def make_contiguous(
        self,
        tensors: Mapping[str, Tensor | None],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Copy the tensors which are not contiguous, or have another dtype.

        Each copy replaces its tensor in later steps.

        Args:
            tensors: layouts of the tensors, by name. ``None`` is skipped.
            dtype: dtype that the tensors must have; ``None`` accepts every dtype.
        """
        self._steps += contiguous_steps(tensors, dtype)

    def add_torch_step(
        self,
        function: Callable[..., Tensor | None],
        tensors: Sequence[str],
        output: str,
    ) -> None:
        """Add the call ``output = function(*tensors)``.

        Args:
            function: function of tensors.
            tensors: names of the function's arguments.
            output: name of the result, which replaces another tensor of this name in later steps.
        """
        arguments = tuple(self._replacements.get(name, name) for name in tensors)
        self._steps.append(TorchStep(function, arguments, output))

    def add_launch(
        self,
        kernel: Any,
        *,
        grid: Sequence[int],
        parameters: Mapping[str, Any] = {},
        tensors: Mapping[str, str] = {},
        tma: Mapping[str, Tma] = {},
        fallback: KernelFallback | None = None,
    ) -> None:
        """Add the launch of a kernel.

        Args:
            kernel: the ``triton.jit`` function.
            grid: number of program instances, in one to three dimensions.
            parameters: numbers and constants of this launch, in addition to those of
                :meth:`set_parameters`.
            tensors: the name of a tensor, by the name of the kernel's parameter that takes it.
                Other parameters take the tensor of their own name: ``out_ptr`` takes ``"out"``.
            tma: the TMA description of a tensor, by the tensor's name.
            fallback: what runs if a kernel with TMA descriptors cannot be built. A launch without
                descriptors ignores it.
        """
        tensors = {**self._tensors, **tensors}
        parameters = {**self.parameters, **parameters}
        constants = {
            option: parameters[option]
            for option in TRITON_OPTIONS
            if parameters.get(option) is not None
        }
        tensor_names: list[str] = []
        numbers: list[int | float] = []
        for parameter in kernel.arg_names:
            # A parameter that ends in _ptr, _src or _desc takes a tensor. Other parameters are
            # constants (``tl.constexpr``) if they are annotated, and numbers if they are not.
            stem, _, ending = parameter.rpartition("_")
            if parameter in tensors or ending in ("ptr", "src", "desc"):
                name = tensors.get(parameter, stem)
                tensor_names.append(self._replacements.get(name, name))
            elif parameter in kernel.fn.__annotations__:
                constants[parameter] = parameters[parameter]
            else:
                numbers.append(parameters[parameter])
        x, y, z = (*grid, 1, 1)[:3]
        self._steps.append(
            Launch(
                kernel=kernel,
                grid=(x, y, z),
                tensors=tuple(tensor_names),
                numbers=tuple(numbers),
                constants=constants,
                tma={self._replacements.get(name, name): tma[name] for name in tma},
                fallback=fallback if tma else None,
            ),
        )

    def build(self) -> Plan:
        """Return the plan of everything that was added."""
        return Plan(
            steps=tuple(self._steps),
            buffers=self._buffers,
            fills=self._fills,
            skipped_results=frozenset(self._skipped_results),
            one_block=self._one_block,
        )
