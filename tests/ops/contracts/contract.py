"""What a new operator must state, so that the shared tests can check it.

The tests in ``tests/ops/shared`` hold for every operator. Each takes its cases from the
:class:`OperatorContract` of every operator, so an operator is added to all of them in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.ops.samples import Sample
from tilefold.ops._shared.operator import Operator


@dataclass(frozen=True)
class RepeatedCall:
    """A call that is repeated until its launches are remembered.

    Attributes:
        sample: The call.
        launches: Kernels of the call and its gradients. Several numbers are allowed where the
            number of multiprocessors or the size of a tile decides.
        options: Keyword arguments that give different results, one set for each kind of call.
    """

    sample: Sample
    launches: tuple[int, ...]
    options: tuple[dict[str, Any], ...] = ({},)


@dataclass(frozen=True)
class KernelCase:
    """A call that launches a certain kernel.

    Attributes:
        sample: The call.
        hopper_only: Whether the kernel runs on Hopper only. Elsewhere, and if it cannot be built,
            another kernel replaces it.
        compiles: Whether the call can be part of a compiled function.
        tiled_equivalent: Whether the tiled path computes the same result. If not, the sample
            calls another function where the kernel cannot be built.
    """

    sample: Sample
    hopper_only: bool = False
    compiles: bool = True
    tiled_equivalent: bool = True


@dataclass(frozen=True)
class TypedCall:
    """A correct call, whose arguments are replaced by wrong ones in turn.

    Attributes:
        function: A public function.
        floats: Floating-point arguments. The first decides dtype and device of the others.
        others: Masks, ids, offsets and options.
        same_dtype: Those of ``floats`` that must have the dtype of the first.
    """

    function: Callable[..., Any]
    floats: dict[str, Tensor]
    others: dict[str, Any]
    same_dtype: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffsetCall:
    """A packed call over six tokens with given offsets.

    Attributes:
        name: The argument that holds the offsets.
        unit: What the offsets count: rows or tokens.
        tensor: The argument whose first dimension they divide.
        call: Called with the offsets and ``impl``.
    """

    name: str
    unit: str
    tensor: str
    call: Callable[[Tensor, str], Any]


@dataclass(frozen=True)
class GrowingCall:
    """Calls of growing sizes that share one compiled graph.

    Attributes:
        sample: Makes the call from a number of sequences and their length.
        compilations: Most compilations that are allowed.
    """

    sample: Callable[[int, int], Sample]
    compilations: int


@dataclass(frozen=True)
class OperatorContract:
    """The calls of one operator by which the shared tests check it.

    Attributes:
        name: Name of the operator.
        operator: The operator, whose remembered calls tests clear.
        repeated: Calls for ``test_launches.py``, by name.
        repeated_on_gpus: Calls for the same that take a minute each in Triton's interpreter.
        repeated_in_interpreter: Names of those of ``repeated`` for tests of what all calls of an
            operator share. The interpreter runs these only.
        kernels: For every kernel, ``folder/file.name``, a call that launches it
            (``test_unavailable_kernels.py``).
        typed_calls: Calls whose arguments are made wrong (``test_argument_corners.py``).
        offset_calls: Packed calls that get wrong offsets.
        unhashable_options: For public functions, options that must be hashable.
        calls: Calls as functions of a tensor ``[2, 3, 8]`` and ``impl``, by name. They are
            differentiable once.
        whole_calls: Where a call of ``calls`` takes a part of the tensor: a call of the tensor
            itself, which may be sparse or nested.
        default_calls: Calls as functions of a tensor ``[2, 3, 1]``; the results must not depend
            on torch's default device and dtype.
        bf16_calls: Calls that multiply bf16 with kernels, which Triton's interpreter cannot.
        finite_differences: fp64 calls whose gradients are compared with finite differences.
        strided: Calls that get tensors of other strides (``test_inputs.py``).
        tolerance: Allowed difference there, absolute and relative: sums in another order.
        masked: More calls that get masks, ids and offsets of other dtypes.
        masked_tolerance: For names of ``strided`` and ``masked``, the allowed difference.
        compiled: Calls that compile whole, with gradients (``test_compiled.py``).
        opchecked: More calls whose registered operators pass ``torch.library.opcheck``.
        elsewhere: More calls that run on a device of another kind (``test_other_devices.py``).
        growing: Calls of several sizes that share one compiled graph.
        threads: Calls that any thread may make first (``test_threads.py``).
        captured: Calls that are captured in CUDA graphs (``test_graph_memory.py``).
        exact_integers: Calls whose results are exact for small integers.
        benchmarks: Tiny cases of its benchmark: a variant and sizes (``tests/bench``).
        interpreted_files: Test files of ``tests/ops`` that Triton's interpreter runs.
        interpreted_least: How many of their tests must pass there at least.
    """

    name: str
    operator: Operator[Any, Any]
    repeated: Mapping[str, RepeatedCall] = field(default_factory=dict)
    repeated_on_gpus: Mapping[str, RepeatedCall] = field(default_factory=dict)
    repeated_in_interpreter: tuple[str, ...] = ()
    kernels: Mapping[str, KernelCase] = field(default_factory=dict)
    typed_calls: tuple[TypedCall, ...] = ()
    offset_calls: tuple[OffsetCall, ...] = ()
    unhashable_options: Mapping[Callable[..., Any], tuple[str, ...]] = field(default_factory=dict)
    calls: Mapping[str, Callable[[Tensor, str], Any]] = field(default_factory=dict)
    whole_calls: Mapping[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    default_calls: Mapping[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    bf16_calls: Mapping[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    finite_differences: tuple[Sample, ...] = ()
    strided: Mapping[str, Sample] = field(default_factory=dict)
    tolerance: float = 0.0
    masked: Mapping[str, Sample] = field(default_factory=dict)
    masked_tolerance: Mapping[str, float] = field(default_factory=dict)
    compiled: tuple[Sample, ...] = ()
    opchecked: tuple[Sample, ...] = ()
    elsewhere: tuple[Sample, ...] = ()
    growing: Mapping[str, GrowingCall] = field(default_factory=dict)
    threads: Mapping[str, Sample] = field(default_factory=dict)
    captured: tuple[Sample, ...] = ()
    exact_integers: Mapping[str, Sample] = field(default_factory=dict)
    benchmarks: tuple[tuple[str, dict[str, int]], ...] = ()
    interpreted_files: tuple[str, ...] = ()
    interpreted_least: int = 0
