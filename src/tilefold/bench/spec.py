"""The parts of a benchmark: named cases, inputs, implementations bound to them, least work; one spec per operator."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

_Named = TypeVar("_Named")
Phase = Literal["forward", "forward_backward"]
PHASES: tuple[Phase, ...] = ("forward", "forward_backward")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


def parse_dtype(name: str) -> str:
    """``"bf16"`` or ``"bfloat16"`` -> ``"bfloat16"``; ``ValueError`` for an unknown name."""
    full = _DTYPE_ALIASES.get(name, name)
    if full not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}.")
    return full


@dataclass(frozen=True)
class BenchCase:
    """One named shape of one operator.

    Attributes:
        name: what ``--shape`` takes.
        device: ``"cpu"`` or ``"cuda"``, where the case makes sense.
        dtype: a key of ``DTYPES``.
        dims: the operator's dimensions, for instance ``{"B": 32, "S": 512, "D": 768, "V": 30522}``.
        variant: what the numbers look like, for instance ``"dense"`` or ``"2pct"``.
        quick: whether ``--quick`` keeps the case.
    """

    name: str
    device: str
    dtype: str
    dims: Mapping[str, int]
    variant: str = "dense"
    quick: bool = False


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


@dataclass(frozen=True)
class Inputs:
    """Inputs of one case, on one device.

    Attributes:
        leaves: tensors whose gradients are taken, the first arguments of every implementation.
        others: the arguments after them.
        grad_output: gradient of the result, of its shape.
        valid_tokens: number of tokens that are not padding.
        active: share of positive scores, where scores have signs.
    """

    leaves: tuple[Tensor, ...]
    others: tuple[Any, ...]
    grad_output: Tensor
    valid_tokens: int = 0
    active: float | None = None

    def bind(self, call: Callable[..., Tensor], label: str, train: Callable[..., Tensor] | None = None) -> Runnable:
        """``call(*leaves, *others)``, or ``train`` of them where gradients are asked for."""

        def forward() -> Tensor:
            with torch.no_grad():
                return call(*self.leaves, *self.others)

        def forward_backward() -> tuple[Tensor, tuple[Tensor, ...]]:
            out = (train or call)(*self.leaves, *self.others)
            return out.detach(), torch.autograd.grad(out, self.leaves, self.grad_output.to(out.dtype))

        return Runnable(forward, forward_backward, label)


def random_tensors(device: torch.device, seed: int) -> tuple[Callable[..., Tensor], torch.Generator]:
    """A function of normal numbers in fp32 by shape, and its generator."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return functools.partial(torch.randn, generator=generator, device=device), generator


def ragged_lengths(batch: int, longest: int, device: torch.device) -> Tensor:
    """Lengths ``[batch]`` spread evenly between 2% and 64% of the longest: 33% of the tokens are valid."""
    return (torch.linspace(0.02, 0.64, batch, device=device) * longest).round().long()


@functools.cache
def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``call`` under ``torch.compile``: one object per function, for all cases."""
    return torch.compile(call, dynamic=False)


def captured(eager: Runnable) -> Runnable:
    """Both phases of ``eager``, each captured once as a CUDA graph, to time kernels without the host's part."""
    both = None if eager.forward_backward is None else _replay(eager.forward_backward)
    return Runnable(_replay(eager.forward), both, f"{eager.label}, CUDA graph")


def _replay(run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` as a graph that replays into the tensors that the capture returned."""
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


@dataclass(frozen=True)
class Implementation:
    """A way to compute the operator.

    Attributes:
        name: what ``--impl`` takes.
        build: inputs -> ``Runnable``.
        kind: ``"ours"``; ``"baseline"`` (gated with the budget of rounded intermediates); ``"bare"`` (the unavoidable
            matrix product alone: not gated, has no output to check).
        default_on: the devices on which it runs unless ``--impl`` says otherwise.
        slow: whether it compiles or tunes for long before its first answer: it then runs after all others.
    """

    name: str
    build: Callable[[Any], Runnable]
    kind: Literal["ours", "baseline", "bare"]
    default_on: tuple[str, ...] = ("cpu", "cuda")
    slow: bool = False


def bound(call: Callable[..., Tensor], label: str = "torch") -> Callable[[Inputs], Runnable]:
    """``build`` of an implementation that is one function of the inputs."""
    return lambda inputs: inputs.bind(call, label)


def peer(
    package: str, builds: Mapping[str, Callable[[Any], Runnable]], slow: bool = False
) -> tuple[Implementation, ...]:
    """Kernels that a package publishes, by name: baselines on GPUs, by default where the package is installed."""
    where = ("cuda",) if importlib.util.find_spec(package) is not None else ()
    return tuple(Implementation(name, build, "baseline", where, slow) for name, build in builds.items())


def ours(
    build: Callable[[str], Callable[[Any], Runnable]], tiled_on: tuple[str, ...] = ()
) -> tuple[Implementation, ...]:
    """An operator's own implementations; ``build`` takes its ``impl=``, ``tiled_on`` is where the tiled one runs."""
    return (
        Implementation("tilefold", build("auto"), "ours"),
        Implementation("tiled", build("tiled"), "ours", default_on=tiled_on),
        Implementation("reference", build("reference"), "ours", default_on=()),
    )


class NotApplicable(Exception):  # noqa: N818
    """Raised by an implementation's ``build`` for a case that it cannot compute: its row is skipped, not failed."""


@dataclass(frozen=True)
class Ceilings:
    """Rates measured in the same run, the denominators of every floor.

    Attributes:
        flops: floating-point operations per second of a large library matrix product in the case's dtype.
        bandwidth: bytes per second of a large copy, read plus write.
    """

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """The fewest operations and bytes that a phase can do: each input read once, each output written once."""

    flops: float
    bytes: float

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Milliseconds below which no implementation goes: the slower of arithmetic and traffic."""
        return 1e3 * max(self.flops / ceilings.flops, self.bytes / ceilings.bandwidth)


@dataclass(frozen=True)
class Requirement:
    """A claim about two rows of one case that every run checks and prints with both sides.

    Attributes:
        case: name of the case.
        claim: what must hold, for people.
        left, right: ``(implementation, row attribute)``; the claim is ``left <= limit * right``.
        limit: the factor.
    """

    case: str
    claim: str
    left: tuple[str, str]
    right: tuple[str, str]
    limit: float


@dataclass(frozen=True)
class BenchSpec:
    """Everything the runner needs to know about one operator.

    Attributes:
        op: the operator's name.
        cases: the named shapes.
        implementations: what can run, in the order of the table.
        baseline: the implementation that ratios are taken against.
        make_inputs: ``(case, device, seed)`` -> inputs, on that device.
        make_gate: ``(case, inputs)`` -> the ``Gate`` of that case.
        probe_dims: dimensions too small to matter, which load libraries and thread pools before memory is read.
        work: ``(case, inputs, phase)`` -> the least work of that phase.
        needs_bytes: ``(case, implementation name)`` -> a low estimate of its extra memory, to skip what cannot fit.
        requirements: claims checked after the run.
    """

    op: str
    cases: Sequence[BenchCase]
    implementations: Sequence[Implementation]
    baseline: str
    make_inputs: Callable[[BenchCase, torch.device, int], Any]
    make_gate: Callable[[BenchCase, Any], Any]
    probe_dims: Mapping[str, int]
    work: Callable[[BenchCase, Any, Phase], Work]
    needs_bytes: Callable[[BenchCase, str], int]
    requirements: Sequence[Requirement] = ()

    def case(self, name: str) -> BenchCase:
        """The case called ``name``; ``ValueError`` with the known names otherwise."""
        return _by_name("shape", name, {case.name: case for case in self.cases})

    def probe(self, case: BenchCase) -> BenchCase:
        """``case`` with tiny dimensions."""
        return replace(case, name="probe", dims={**case.dims, **self.probe_dims})

    def implementation(self, name: str) -> Implementation:
        """The implementation called ``name``; ``ValueError`` with the known names otherwise."""
        return _by_name("impl", name, {impl.name: impl for impl in self.implementations})


def _by_name(argument: str, name: str, items: Mapping[str, _Named]) -> _Named:
    if name in items:
        return items[name]
    listed = ", ".join(repr(known) for known in items)
    raise ValueError(f"{argument} must be one of {listed}, got {name!r}; see `tilefold bench --list`.")
