"""The parts of a benchmark: cases, inputs, implementations, accuracy gate, minimum work."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from tilefold import testing
from tilefold._internal.arguments import suggestion

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
        forward: computes the output without autograd. A bare matrix product may return None.
        forward_backward: computes the output and the gradients of all leaves. None if the
            implementation has no gradient.
        label: name of the function that runs, for reports, such as the implementation that
            ``impl="auto"`` chose.
        quantized_dtype: ``"int8"`` or ``"fp8"`` if the documents are quantized.
    """

    forward: Callable[[], Tensor | None]
    forward_backward: Callable[[], tuple[Tensor, tuple[Tensor, ...]]] | None = None
    label: str = ""
    quantized_dtype: str | None = None

    def phase(self, phase: Phase) -> Callable[[], object] | None:
        """Return the call that runs a phase, or None if the implementation has no gradient."""
        return self.forward if phase == "forward" else self.forward_backward


@dataclass(frozen=True, kw_only=True)
class Inputs(ABC):
    """The arguments of an operator in one case, on one device.

    A subclass has the arguments as fields. An implementation is a function of all of them:
    ``call(*inputs.leaves, *inputs.constants)``.

    Attributes:
        grad_output: gradient of the output, with its shape.
        valid_tokens: number of tokens that are not padding.
        active: share of the scores that are positive, or None if scores have no sign.
    """

    grad_output: Tensor
    valid_tokens: int = 0
    active: float | None = None

    @property
    @abstractmethod
    def leaves(self) -> tuple[Tensor, ...]:
        """The leading arguments: tensors whose gradients are computed."""

    @property
    @abstractmethod
    def constants(self) -> tuple[Any, ...]:
        """The remaining arguments, which have no gradient."""

    def bind(
        self,
        call: Callable[..., Tensor],
        label: str,
        train: Callable[..., Tensor] | None = None,
    ) -> Runnable:
        """Return calls that run a function on these inputs, without and with gradients.

        Args:
            call: a function that returns the output. Its arguments are ``(*leaves, *constants)``.
            label: name of the function that runs, for reports.
            train: a function of the same arguments to use if gradients are needed. By default
                ``call``.
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
        forward: the largest error of an output.
        gradient: the largest error of a gradient.
    """

    forward: float
    gradient: float


BUDGETS: Mapping[str, Budget] = {
    name: Budget(testing.budget(dtype), testing.budget(dtype, "gradient"))
    for name, dtype in DTYPES.items()
}

# Baselines that store logits in the input's dtype pick another winner if two logits round to the
# same value, so that their gradients differ by construction. A bias that cancels most of a rounded
# logit magnifies its error. These budgets only show that a baseline is the same function.
BASELINE_BUDGETS: Mapping[str, Budget] = {
    "bfloat16": Budget(forward=6e-2, gradient=0.5),
    "float16": Budget(forward=5e-3, gradient=0.2),
    "float32": Budget(forward=2e-5, gradient=5e-5),
    "float64": Budget(forward=1e-12, gradient=1e-11),
}


def _is_gradient(name: str) -> bool:
    """Return whether the name of a checked quantity has the prefix ``d`` of gradients."""
    return name.startswith("d")


@dataclass(frozen=True)
class GateResult:
    """Errors of an implementation, and the largest errors that it may have.

    Attributes:
        errors: relative errors by the name of the checked quantity. An error is infinite if any
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
            # unlike `error > limit`, this is true for NaN
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
            gradients: True for the gradients, False for the outputs.

        Returns:
            The error, or None if no such quantity was checked.
        """
        errors = [error for name, error in self.errors.items() if _is_gradient(name) is gradients]
        return max(errors, default=None)


@dataclass(frozen=True)
class CheckedSlice:
    """A part of a result that is small enough to be computed in fp64.

    Attributes:
        select: returns the part of an implementation's result.
        expected: the values of the part, in fp64.
    """

    select: Callable[[Tensor], Tensor]
    expected: Tensor


@dataclass(frozen=True)
class Gate:
    """The accuracy gate of a case, which an implementation must pass before it is timed.

    Slices of the results are compared with their fp64 values. All other values must be finite.

    Attributes:
        inputs: the inputs of the case.
        dtype: name of their dtype.
        outputs: slices of the output by name.
        gradients: a slice of the gradient of each leaf, by names with the prefix ``d``. None for a
            gradient that is not checked.
        our_budget: the error budget of tilefold's implementations. By default that of the dtype in
            :data:`BUDGETS`.
    """

    inputs: Inputs
    dtype: str
    outputs: Mapping[str, CheckedSlice]
    gradients: Mapping[str, CheckedSlice | None]
    our_budget: Budget | None = None

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Run inference and training of an implementation once, and compare the results with fp64.

        Free memory is filled with NaN before each run. An element that is never written would
        otherwise be right by accident.

        Args:
            runnable: the calls that run the implementation on ``inputs``.
            kind: ``"ours"`` or ``"baseline"``, which decides how large errors may be.
        """
        # gradients have the sizes of the leaves, and the output has that of its gradient
        result_like = (*self.inputs.leaves, self.inputs.grad_output)
        errors: dict[str, float] = {}
        poison_free_memory(result_like)
        inference_output = runnable.forward()
        if inference_output is not None:
            errors.update(self._output_errors(inference_output, prefix="inference "))
        # free its memory, to be poisoned before training
        del inference_output
        if runnable.forward_backward is not None:
            poison_free_memory(result_like)
            out, gradients = runnable.forward_backward()
            errors.update(self._output_errors(out, prefix=""))
            errors.update(self._gradient_errors(gradients))
        return GateResult(errors, self._error_budget(kind))

    def _error_budget(self, kind: str) -> Budget:
        """Return the largest errors that an implementation of a kind may have."""
        if kind != "ours":
            return BASELINE_BUDGETS[self.dtype]
        return BUDGETS[self.dtype] if self.our_budget is None else self.our_budget

    def _output_errors(self, out: Tensor, prefix: str) -> dict[str, float]:
        """Return the error of each checked slice of an output.

        Args:
            out: the output, dense or CSR.
            prefix: prefix of the names of the slices in the result.
        """
        dense = out.to_dense() if out.layout == torch.sparse_csr else out
        shape = self.inputs.grad_output.shape
        return {
            f"{prefix}{name}": _measure_error(dense, shape, checked_slice)
            for name, checked_slice in self.outputs.items()
        }

    def _gradient_errors(self, gradients: Sequence[Tensor]) -> dict[str, float]:
        """Return the error of each gradient that is checked, by its name.

        Args:
            gradients: a gradient for each leaf.
        """
        checks = zip(self.gradients.items(), gradients, self.inputs.leaves, strict=True)
        return {
            name: _measure_error(gradient, leaf.shape, checked_slice)
            for (name, checked_slice), gradient, leaf in checks
            if checked_slice is not None
        }


def _measure_error(result: Tensor, shape: torch.Size, checked_slice: CheckedSlice) -> float:
    """Return the relative error of the checked part of a result, against its values in fp64.

    The error is infinite if the result does not have the expected shape, or has a value anywhere
    that is not finite.

    Args:
        result: the output, or a gradient.
        shape: the shape that it must have.
        checked_slice: the part that is checked.
    """
    if result.shape != shape or not bool(result.isfinite().all()):
        return float("inf")
    return testing.relative_error(checked_slice.select(result), checked_slice.expected)


def poison_free_memory(tensors: Sequence[Tensor]) -> None:
    """Fill memory with NaN and free it, so that CUDA's allocator hands it out again.

    An implementation that reads an element which it never wrote then returns NaN, and fails the
    accuracy gate.

    Args:
        tensors: tensors like those that will be allocated. A block of the size of each is filled;
            integer tensors, which have no NaN, are ignored.
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
    """Return a function that draws fp32 tensors of standard normal numbers, and its generator.

    Args:
        device: the device of the tensors and of the generator.
        seed: the seed of the generator.

    Returns:
        A function that takes the sizes of a tensor, and the generator.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    return functools.partial(torch.randn, generator=generator, device=device), generator


def ragged_lengths(batch: int, longest: int, device: torch.device) -> Tensor:
    """Return evenly spaced lengths, from 2% to 64% of the padded length.

    About a third of the padded tokens are then valid.

    Args:
        batch: number of sequences.
        longest: the padded length.
        device: the device of the lengths.

    Returns:
        int64 ``[batch]``, in ascending order.
    """
    shares = torch.linspace(_SHORTEST_SHARE, _LONGEST_SHARE, batch, device=device)
    return (shares * longest).round().long()


# binds an implementation to the inputs of its operator, a subclass of Inputs
Build = Callable[[Any], Runnable]
Kind = Literal["ours", "baseline", "bare"]


@dataclass(frozen=True)
class Implementation:
    """A way to compute an operator.

    Attributes:
        name: the name that ``--impl`` takes.
        build: binds the implementation to the inputs of a case.
        kind: ``"ours"`` for tilefold, with tight error budgets. ``"baseline"`` for other code that
            computes the same function, with error budgets for rounded intermediate results.
            ``"bare"`` for another function, such as a bare matrix product, which is not checked.
        default_on: types of devices on which the implementation runs without ``--impl``.
        slow: whether the implementation compiles or tunes for long before its first result. Slow
            implementations run last.
    """

    name: str
    build: Build
    kind: Kind
    default_on: tuple[str, ...] = ("cpu", "cuda")
    slow: bool = False


@functools.cache
def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``call`` under ``torch.compile``. All cases share one compiled function."""
    return torch.compile(call, dynamic=False)


def bound(call: Callable[..., Tensor], label: str = "torch") -> Build:
    """Return the function that binds an implementation to the inputs of a case.

    Args:
        call: the implementation, a function of ``(*inputs.leaves, *inputs.constants)``.
        label: name of the function, for reports.
    """
    return lambda inputs: inputs.bind(call, label)


def bound_compiled(call: Callable[..., Tensor]) -> Build:
    """Return the function that binds an implementation under ``torch.compile`` to its inputs.

    ``torch.compile`` is called only when the implementation is bound. It initialises CUDA, and a
    process that is forked after that cannot use CUDA.

    Args:
        call: the implementation, a function of ``(*inputs.leaves, *inputs.constants)``.
    """
    return lambda inputs: inputs.bind(compiled(call), "torch.compile")


def captured(eager: Runnable) -> Runnable:
    """Capture an implementation as CUDA graphs, to time kernels without the CPU time of launches.

    Args:
        eager: the implementation to capture. ``CUDA graph`` is appended to its label.
    """
    return replace(
        eager,
        forward=_CapturedCall(eager.forward),
        forward_backward=(
            None if eager.forward_backward is None else _CapturedCall(eager.forward_backward)
        ),
        label=f"{eager.label}, CUDA graph",
    )


class _CapturedCall:
    """A function that is captured as a CUDA graph.

    A call replays the graph, and returns the tensors of the capture with new values.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        """Warm up a function on a side stream, as capturing requires, and capture it.

        Args:
            run: the function to capture. It takes no arguments.
        """
        # keep `run` alive: the graph reads the tensors that it refers to
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
    """Return an implementation that by default runs only on GPUs."""
    return Implementation(name, build, kind, default_on=("cuda",))


def published_implementations(
    package: str,
    builds: Mapping[str, Build],
    slow: bool = False,
) -> tuple[Implementation, ...]:
    """Return kernels that another package publishes, as baselines.

    By default they run on GPUs if the package is installed.

    Args:
        package: name of the module to import.
        builds: name of the implementation -> function that binds it to the inputs of a case.
        slow: whether the kernels compile or tune for long before their first result.
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
        call: the operator as a function ``call(*leaves, *constants, impl=...)``.
        chosen_impl: a function of a tensor and ``impl`` that returns which implementation runs,
            such as ``"triton"`` for ``"auto"``.
        tiled_on: types of devices on which ``tiled`` runs by default. ``reference`` never does.
        graph: whether to add ``tilefold-graph``, the kernels captured as a CUDA graph.
    """

    def build(inputs: Inputs, impl: str) -> Runnable:
        label = chosen_impl(inputs.leaves[0], impl)  # for reports
        return inputs.bind(functools.partial(call, impl=impl), label)

    def build_graph(inputs: Inputs) -> Runnable:
        return captured(build(inputs, impl="triton"))

    build_auto = functools.partial(build, impl="auto")
    build_tiled = functools.partial(build, impl="tiled")
    build_reference = functools.partial(build, impl="reference")
    implementations = [
        Implementation("tilefold", build_auto, "ours"),
        Implementation("tiled", build_tiled, "ours", default_on=tiled_on),
        Implementation("reference", build_reference, "ours", default_on=()),
    ]
    if graph:
        implementations.append(gpu_implementation("tilefold-graph", build_graph))
    return tuple(implementations)


class NotApplicable(Exception):  # noqa: N818
    """Raised by a ``build`` if its implementation cannot compute the case.

    The implementation is then skipped, which is not a failure.
    """


@dataclass(frozen=True)
class Ceilings:
    """Peak throughput of a device, measured in the same run as the times.

    Attributes:
        flops: floating-point operations per second of a large matrix product in the dtype of the
            case.
        bandwidth: bytes per second that a large copy reads and writes.
    """

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """The minimum work of a phase, with each input read once and each output written once.

    Attributes:
        flops: floating-point operations. A fused multiply-add counts as two.
        bytes: bytes that are read from memory and written to memory.
    """

    flops: float
    bytes: float

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Return the roofline time: that of the arithmetic or the traffic, whichever is longer.

        Args:
            ceilings: peak throughput of the device.

        Returns:
            Milliseconds.
        """
        arithmetic_seconds = self.flops / ceilings.flops
        traffic_seconds = self.bytes / ceilings.bandwidth
        return 1e3 * max(arithmetic_seconds, traffic_seconds)


@dataclass(frozen=True)
class BenchSpec:
    """The benchmark of an operator.

    Attributes:
        op: name of the operator.
        implementations: the implementations, in the order of the table.
        baseline: name of the implementation that speedups are relative to.
        make_inputs: creates the inputs of a case on a device from a seed.
        make_gate: creates the accuracy gate of a case and its inputs.
        probe_dims: dimensions so small that a call only loads libraries and starts threads, which
            must happen before memory is measured.
        work: returns the minimum work of a phase of a case.
        min_bytes: returns a lower bound of the memory that an implementation needs in a case. An
            implementation that cannot fit is skipped.
    """

    op: str
    implementations: Sequence[Implementation]
    baseline: str
    make_inputs: Callable[[BenchCase, torch.device, int], Inputs]
    make_gate: Callable[[BenchCase, Any], Gate]
    probe_dims: Mapping[str, int]
    work: Callable[[BenchCase, Any, Phase], Work]
    min_bytes: Callable[[BenchCase, str], int]

    @functools.cached_property
    def cases(self) -> Sequence[BenchCase]:
        """The cases of the operator in ``cases.json``."""
        rows = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
        return [BenchCase(**row) for row in rows[self.op]]

    def case(self, name: str) -> BenchCase:
        """Return the case with a name.

        Raises:
            ValueError: if no case has this name.
        """
        return _look_up("shape", name, {case.name: case for case in self.cases})

    def probe(self, case: BenchCase) -> BenchCase:
        """Return ``case`` with the tiny dimensions of ``probe_dims``."""
        return replace(case, name="probe", dims={**case.dims, **self.probe_dims})

    def implementation(self, name: str) -> Implementation:
        """Return the implementation with a name.

        Raises:
            ValueError: if no implementation has this name.
        """
        return _look_up("impl", name, {impl.name: impl for impl in self.implementations})


def _look_up(argument: str, name: str, items: Mapping[str, _Named]) -> _Named:
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
        raise ValueError(
            f"op must be one of {', '.join(OPERATORS)}, got {op!r}.{suggestion(op, OPERATORS)}",
        )
    spec: BenchSpec = importlib.import_module(f"{__package__}.{op}").SPEC
    return spec
