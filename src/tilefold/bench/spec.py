"""The parts of a benchmark: cases, inputs, implementations, their gate, and the least work."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from tilefold import testing

OPERATORS = ("lsr_head", "maxsim", "token_scatter", "entmax", "entmax_attention")
Phase = Literal["forward", "forward_backward"]
PHASES: tuple[Phase, ...] = ("forward", "forward_backward")
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")
}
_DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp64": "float64",
}
# ragged sequences: their shortest and longest length as shares of the padded length
_SHORTEST_SHARE = 0.02
_LONGEST_SHARE = 0.64
# calls before a CUDA graph is captured, so that kernels are compiled and buffers exist
_CAPTURE_WARMUP_CALLS = 2
_Named = TypeVar("_Named")


def parse_dtype(name: str) -> str:
    """Return the full name of a dtype, such as ``"bfloat16"`` for ``"bf16"``.

    Raises:
        ValueError: for an unknown name.
    """
    full_name = _DTYPE_ALIASES.get(name, name)
    if full_name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}.")
    return full_name


@dataclass(frozen=True)
class BenchCase:
    """A named shape of an operator.

    Attributes:
        name: the name that ``--shape`` takes.
        device: ``"cpu"`` or ``"cuda"``, the device on which the case is measured.
        dtype: a key of :data:`DTYPES`.
        dims: sizes by dimension, such as ``{"B": 32, "S": 512, "D": 768, "V": 30522}``.
        variant: distribution of the input values and lengths. The operator defines it.
        quick: whether ``--quick`` measures the case.
    """

    name: str
    device: str
    dtype: str
    dims: Mapping[str, int]
    variant: str = "dense"
    quick: bool = False


@dataclass(frozen=True)
class Runnable:
    """An implementation that is bound to its inputs.

    Attributes:
        forward: computes the output without autograd. A bare product may return None.
        forward_backward: computes the output and the gradients of all leaves. None if the
            implementation has no gradient.
        label: what actually runs, such as the implementation that ``impl="auto"`` chose.
    """

    forward: Callable[[], Tensor | None]
    forward_backward: Callable[[], tuple[Tensor, tuple[Tensor, ...]]] | None = None
    label: str = ""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a case, on one device.

    Attributes:
        leaves: the tensors whose gradients are computed. They are the first arguments of every
            implementation.
        constants: the arguments after the leaves, which have no gradient.
        grad_output: gradient of the output, with its shape.
        valid_tokens: number of tokens that are not padding.
        active: share of the scores that are positive, or None if scores have no sign.
    """

    leaves: tuple[Tensor, ...]
    constants: tuple[Any, ...]
    grad_output: Tensor
    valid_tokens: int = 0
    active: float | None = None

    def bind(
        self,
        call: Callable[..., Tensor],
        label: str,
        train: Callable[..., Tensor] | None = None,
    ) -> Runnable:
        """Bind a function to these inputs.

        Args:
            call: a function of the leaves and the constants that returns the output.
            label: what actually runs.
            train: the function to use if gradients are needed. By default ``call``.
        """
        differentiable_call = call if train is None else train

        def forward() -> Tensor:
            with torch.no_grad():
                return call(*self.leaves, *self.constants)

        def forward_backward() -> tuple[Tensor, tuple[Tensor, ...]]:
            out = differentiable_call(*self.leaves, *self.constants)
            gradients = torch.autograd.grad(out, self.leaves, self.grad_output.to(out.dtype))
            return out.detach(), gradients

        return Runnable(forward, forward_backward, label)


@dataclass(frozen=True)
class Budget:
    """Largest allowed relative errors ``||out - ref|| / ||ref||``.

    Attributes:
        forward: of an output.
        gradient: of every gradient.
    """

    forward: float
    gradient: float


BUDGETS: Mapping[str, Budget] = {
    name: Budget(testing.budget(dtype), testing.budget(dtype, "gradient"))
    for name, dtype in DTYPES.items()
}

# Baselines that store logits in the input's dtype pick another winner where two round to the same
# value, so their gradients are far off by construction, and a bias that cancels most of a rounded
# logit magnifies its error. They must only be the same function, not as exact; the error is shown.
BASELINE_BUDGETS: Mapping[str, Budget] = {
    "bfloat16": Budget(forward=6e-2, gradient=0.5),
    "float16": Budget(forward=5e-3, gradient=0.2),
    "float32": Budget(forward=2e-5, gradient=5e-5),
    "float64": Budget(forward=1e-12, gradient=1e-11),
}


def _is_gradient(name: str) -> bool:
    """Return whether a checked quantity is a gradient, as names with the prefix ``d`` are."""
    return name.startswith("d")


@dataclass(frozen=True)
class GateResult:
    """Errors of an implementation, and the errors that it is allowed.

    Attributes:
        errors: relative errors by the name of the checked quantity. They are infinite where a
            value is not finite. Names that begin with ``"d"`` are gradients.
        budget: the largest allowed errors.
    """

    errors: Mapping[str, float]
    budget: Budget

    @property
    def failures(self) -> list[str]:
        """A readable line for each quantity over its budget."""
        lines = []
        for name, error in self.errors.items():
            limit = self.budget.gradient if _is_gradient(name) else self.budget.forward
            # a NaN is not within any limit
            if not error <= limit:
                lines.append(f"{name} error {error:.2e} > {limit:.0e}")
        return lines

    @property
    def passed(self) -> bool:
        """Whether something was checked and everything was within budget."""
        return bool(self.errors) and not self.failures

    def worst(self, gradients: bool) -> float | None:
        """Return the largest error of the gradients or of the outputs.

        Args:
            gradients: whether to look at the gradients, or else at the outputs.

        Returns:
            The error, or None if no such quantity was checked.
        """
        errors = [error for name, error in self.errors.items() if _is_gradient(name) is gradients]
        return max(errors, default=None)


@dataclass(frozen=True)
class CheckedSlice:
    """A part of a result that is small enough to be computed in fp64.

    Attributes:
        select: takes the part out of the result of an implementation.
        expected: the values of the part, in fp64.
    """

    select: Callable[[Tensor], Tensor]
    expected: Tensor


@dataclass(frozen=True)
class Gate:
    """The correctness check of a case, which an implementation passes before it is timed.

    Slices of the results are compared with their fp64 values. All other values must be finite.

    Attributes:
        inputs: the inputs of the case.
        dtype: name of their dtype.
        outputs: slices of the output by name.
        gradients: a slice of the gradient of each leaf, by names with the prefix ``d``. None for a
            gradient that is not checked.
        our_budget: errors that tilefold's implementations are allowed. By default those of the
            dtype in :data:`BUDGETS`.
    """

    inputs: Inputs
    dtype: str
    outputs: Mapping[str, CheckedSlice]
    gradients: Mapping[str, CheckedSlice | None]
    our_budget: Budget | None = None

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Run both phases of an implementation once, and compare their results with fp64.

        Before each phase, freed memory is filled with NaN, so that an element that is never
        written is not accidentally right.

        Args:
            runnable: the implementation, bound to ``inputs``.
            kind: kind of the implementation, which decides its budget.
        """
        poisoned_shapes = (*self.inputs.leaves, self.inputs.grad_output)
        errors: dict[str, float] = {}
        poison_allocator(poisoned_shapes)
        inference_output = runnable.forward()
        if inference_output is not None:
            errors.update(self._output_errors(inference_output, prefix="inference "))
        # its memory can be poisoned before the next phase
        del inference_output
        if runnable.forward_backward is not None:
            poison_allocator(poisoned_shapes)
            out, gradients = runnable.forward_backward()
            errors.update(self._output_errors(out, prefix=""))
            errors.update(self._gradient_errors(gradients))
        return GateResult(errors, self._budget(kind))

    def _budget(self, kind: str) -> Budget:
        """Return the errors that an implementation of a kind is allowed."""
        if kind != "ours":
            return BASELINE_BUDGETS[self.dtype]
        return BUDGETS[self.dtype] if self.our_budget is None else self.our_budget

    def _output_errors(self, out: Tensor, prefix: str) -> dict[str, float]:
        """Return the errors of the slices of an output, by the name of the slice with a prefix."""
        dense = out.to_dense() if out.layout == torch.sparse_csr else out
        shape = self.inputs.grad_output.shape
        return {
            f"{prefix}{name}": _slice_error(dense, shape, checked_slice)
            for name, checked_slice in self.outputs.items()
        }

    def _gradient_errors(self, gradients: Sequence[Tensor]) -> dict[str, float]:
        """Return the errors of the gradients of all leaves that are checked, by name."""
        checks = zip(self.gradients.items(), gradients, self.inputs.leaves, strict=True)
        return {
            name: _slice_error(gradient, leaf.shape, checked_slice)
            for (name, checked_slice), gradient, leaf in checks
            if checked_slice is not None
        }


def _slice_error(result: Tensor, shape: torch.Size, checked_slice: CheckedSlice) -> float:
    """Return the relative error of a slice of a result.

    The error is infinite if the result does not have the expected shape, or has a value anywhere
    that is not finite.
    """
    if result.shape != shape or not bool(result.isfinite().all()):
        return float("inf")
    return testing.relative_error(checked_slice.select(result), checked_slice.expected)


def poison_allocator(tensors: Sequence[Tensor]) -> None:
    """Fill memory with NaN and free it, so that CUDA's allocator hands it out again.

    An implementation that reads memory which it did not write then returns NaN, and fails its gate.

    Args:
        tensors: a block of the size of each one is filled. Integers are left out.
    """
    blocks = [
        torch.full_like(tensor, float("nan")) for tensor in tensors if tensor.is_floating_point()
    ]
    if blocks and blocks[0].is_cuda:
        torch.cuda.synchronize()
    del blocks


def random_tensors(
    device: torch.device,
    seed: int,
) -> tuple[Callable[..., Tensor], torch.Generator]:
    """Return a function that draws fp32 normal numbers of a shape, and its generator."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return functools.partial(torch.randn, generator=generator, device=device), generator


def ragged_lengths(batch: int, longest: int, device: torch.device) -> Tensor:
    """Return lengths that are evenly spread, so that a third of the padded tokens are valid.

    Args:
        batch: number of sequences.
        longest: the padded length. Lengths are 2% to 64% of it.
        device: of the result.

    Returns:
        int64 ``[batch]``, in ascending order.
    """
    shares = torch.linspace(_SHORTEST_SHARE, _LONGEST_SHARE, batch, device=device)
    return (shares * longest).round().long()


Build = Callable[[Inputs], Runnable]  # binds an implementation to inputs
Kind = Literal["ours", "baseline", "bare"]


@dataclass(frozen=True)
class Implementation:
    """A way to compute an operator.

    Attributes:
        name: the name that ``--impl`` takes.
        build: binds it to inputs.
        kind: ``"ours"`` for tilefold, with the tight budgets of the gate. ``"baseline"`` for other
            code that computes the same function, with budgets for rounded intermediates.
            ``"bare"`` for another function, such as a matrix product alone, which is not checked.
        default_on: devices on which it runs unless ``--impl`` is used.
        slow: whether it compiles or tunes for long before its first result. It then runs after all
            others.
    """

    name: str
    build: Build
    kind: Kind
    default_on: tuple[str, ...] = ("cpu", "cuda")
    slow: bool = False


@functools.cache
def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``call`` under ``torch.compile``, as one object for all cases."""
    return torch.compile(call, dynamic=False)


def bound(call: Callable[..., Tensor], label: str = "torch") -> Build:
    """Return the ``build`` of an implementation that is one function of the inputs."""
    return lambda inputs: inputs.bind(call, label)


def bound_compiled(call: Callable[..., Tensor]) -> Build:
    """Return the ``build`` of a function under ``torch.compile``.

    It is compiled when the inputs exist: ``torch.compile`` initialises CUDA, which an import must
    not, since no forked process can use CUDA after that.
    """
    return lambda inputs: inputs.bind(compiled(call), "torch.compile")


def captured(eager: Runnable) -> Runnable:
    """Capture both phases as CUDA graphs, to time kernels without the CPU's part of a call.

    Args:
        eager: the implementation to capture. Its label is kept, with ``CUDA graph``.
    """
    return Runnable(
        forward=_CapturedCall(eager.forward),
        forward_backward=(
            None if eager.forward_backward is None else _CapturedCall(eager.forward_backward)
        ),
        label=f"{eager.label}, CUDA graph",
    )


class _CapturedCall:
    """A call that is captured as a CUDA graph, and replayed into the tensors of the capture."""

    def __init__(self, run: Callable[[], Any]) -> None:
        """Call a function a few times on another stream, as capturing requires, and capture it.

        Args:
            run: the call.
        """
        # the graph reads the memory of the tensors that `run` holds
        self._run = run
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_CAPTURE_WARMUP_CALLS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph):
            self._result = run()

    def __call__(self) -> Any:
        self._graph.replay()
        return self._result


def gpu_implementation(name: str, build: Build, kind: Kind = "ours") -> Implementation:
    """Return an implementation that runs by default on GPUs only."""
    return Implementation(name, build, kind, default_on=("cuda",))


def published_implementations(
    package: str,
    builds: Mapping[str, Build],
    slow: bool = False,
) -> tuple[Implementation, ...]:
    """Return the kernels that another package publishes, as baselines.

    They run by default on GPUs if the package is installed.

    Args:
        package: name of the module to import.
        builds: ``build`` by the name of the implementation.
        slow: whether they compile or tune for long.
    """
    is_installed = importlib.util.find_spec(package) is not None
    return tuple(
        Implementation(
            name=name,
            build=build,
            kind="baseline",
            default_on=("cuda",) if is_installed else (),
            slow=slow,
        )
        for name, build in builds.items()
    )


def tilefold_implementations(
    call: Callable[..., Tensor],
    chosen_impl: Callable[[Tensor, str], str],
    tiled_on: tuple[str, ...] = (),
    *,
    graph: bool = False,
) -> tuple[Implementation, ...]:
    """Return the implementations of an operator of tilefold.

    They are ``tilefold`` (``impl="auto"``), ``tiled`` and ``reference``.

    Args:
        call: a function of the leaves, the constants and ``impl``.
        chosen_impl: returns the implementation that an ``impl`` means for a tensor.
        tiled_on: devices on which ``tiled`` runs by default. ``reference`` never does.
        graph: whether to add ``tilefold-graph``, the kernels as a CUDA graph.
    """

    def build_with(impl: str) -> Build:
        """Return the ``build`` of ``call`` with an ``impl``."""

        def build(inputs: Inputs) -> Runnable:
            label = chosen_impl(inputs.leaves[0], impl)
            return inputs.bind(functools.partial(call, impl=impl), label)

        return build

    implementations = [
        Implementation("tilefold", build_with("auto"), "ours"),
        Implementation("tiled", build_with("tiled"), "ours", default_on=tiled_on),
        Implementation("reference", build_with("reference"), "ours", default_on=()),
    ]
    if graph:
        build_kernels = build_with("triton")
        implementations.append(
            gpu_implementation("tilefold-graph", lambda inputs: captured(build_kernels(inputs))),
        )
    return tuple(implementations)


class NotApplicable(Exception):  # noqa: N818
    """A ``build`` raises this for a case that its implementation cannot compute.

    The row of the implementation is then skipped, and does not fail.
    """


@dataclass(frozen=True)
class Ceilings:
    """Rates of a device, measured in the same run as the times.

    Attributes:
        flops: operations per second of a large library matrix product in the dtype of the case.
        bandwidth: bytes per second of a large copy, read and written ones.
    """

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """The least work of a phase, with each input read once and each output written once.

    Attributes:
        flops: floating-point operations. A multiplication with its addition counts as two.
        bytes: bytes that are read from memory or written to it.
    """

    flops: float
    bytes: float

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Return the milliseconds of the arithmetic or of the traffic, whichever takes longer."""
        arithmetic_seconds = self.flops / ceilings.flops
        traffic_seconds = self.bytes / ceilings.bandwidth
        return 1e3 * max(arithmetic_seconds, traffic_seconds)


@dataclass(frozen=True)
class BenchSpec:
    """The benchmark of an operator.

    Attributes:
        op: name of the operator.
        implementations: in the order of the table.
        baseline: name of the implementation that speedups are relative to.
        make_inputs: creates the inputs of a case on a device from a seed.
        make_gate: creates the check of a case with its inputs.
        probe_dims: dimensions so small that a call only loads libraries and starts threads, which
            must happen before memory is measured.
        work: returns the least work of a phase.
        needs_bytes: a low estimate of the memory that an implementation needs in a case, by name.
            What cannot fit is skipped.
    """

    op: str
    implementations: Sequence[Implementation]
    baseline: str
    make_inputs: Callable[[BenchCase, torch.device, int], Inputs]
    make_gate: Callable[[BenchCase, Inputs], Gate]
    probe_dims: Mapping[str, int]
    work: Callable[[BenchCase, Inputs, Phase], Work]
    needs_bytes: Callable[[BenchCase, str], int]

    @functools.cached_property
    def cases(self) -> Sequence[BenchCase]:
        """The cases of the operator in ``cases.json``."""
        rows = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
        return [BenchCase(**row) for row in rows[self.op]]

    def case(self, name: str) -> BenchCase:
        """Return the case with a name.

        Raises:
            ValueError: for an unknown name.
        """
        return _by_name("shape", name, {case.name: case for case in self.cases})

    def probe(self, case: BenchCase) -> BenchCase:
        """Return ``case`` with the tiny dimensions."""
        return replace(case, name="probe", dims={**case.dims, **self.probe_dims})

    def implementation(self, name: str) -> Implementation:
        """Return the implementation with a name.

        Raises:
            ValueError: for an unknown name.
        """
        return _by_name("impl", name, {impl.name: impl for impl in self.implementations})


def _by_name(argument: str, name: str, items: Mapping[str, _Named]) -> _Named:
    """Return the item with a name, or raise ``ValueError`` with the names of all items."""
    if name in items:
        return items[name]
    names = ", ".join(repr(item_name) for item_name in items)
    raise ValueError(
        f"{argument} must be one of {names}, got {name!r}; see `tilefold bench --list`.",
    )


def get_spec(op: str) -> BenchSpec:
    """Import the benchmark of an operator.

    Raises:
        ValueError: for an operator that has no benchmark.
    """
    if op not in OPERATORS:
        raise ValueError(f"op must be one of {', '.join(OPERATORS)}, got {op!r}.")
    spec: BenchSpec = importlib.import_module(f"{__package__}.{op}").SPEC
    return spec
