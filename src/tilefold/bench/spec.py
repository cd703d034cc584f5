"""What a benchmark is made of: named cases, implementations, a correctness gate and a floor, one spec per operator."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch

from tilefold.bench.gate import Gate
from tilefold.bench.runnables import Runnable

_Named = TypeVar("_Named")
Phase = Literal["forward", "forward_backward"]
PHASES: tuple[Phase, ...] = ("forward", "forward_backward")


@dataclass(frozen=True)
class BenchCase:
    """One named shape of one operator.

    Attributes:
        name: what ``--shape`` takes.
        device: ``"cpu"`` or ``"cuda"``, where the case makes sense.
        dtype: a key of ``dtypes.DTYPES``.
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

    @property
    def shape_key(self) -> tuple[int, ...]:
        """The dimensions alone: cases that share it share a compilation."""
        return tuple(self.dims.values())


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


def gpu_if_installed(module: str) -> tuple[str, ...]:
    """Where a peer runs by default: on GPUs, if its package is there."""
    return ("cuda",) if importlib.util.find_spec(module) is not None else ()


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
        make_gate: ``(case, inputs)`` -> the gate of that case.
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
    make_gate: Callable[[BenchCase, Any], Gate]
    probe_dims: Mapping[str, int]
    work: Callable[[BenchCase, Any, Phase], Work]
    needs_bytes: Callable[[BenchCase, str], int]
    requirements: Sequence[Requirement] = field(default_factory=tuple)

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
