"""The parts of a benchmark: cases, inputs, implementations bound to them, the gate that checks
them, least work.
"""

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
_Named = TypeVar("_Named")
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


def parse_dtype(name: str) -> str:
    """``"bf16"`` or ``"bfloat16"`` -> ``"bfloat16"``; ``ValueError`` for an unknown name."""
    if (full := _DTYPE_ALIASES.get(name, name)) not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}.")
    return full


@dataclass(frozen=True)
class BenchCase:
    """One named shape of one operator."""

    name: str  # what --shape takes
    device: str  # "cpu" or "cuda", where the case makes sense
    dtype: str  # a key of DTYPES
    dims: Mapping[
        str,
        int,
    ]  # of the operator, for instance {"B": 32, "S": 512, "D": 768, "V": 30522}
    variant: str = "dense"  # what the numbers look like
    quick: bool = False  # whether --quick keeps the case


@dataclass(frozen=True)
class Runnable:
    """An implementation bound to its inputs."""

    forward: Callable[[], Tensor | None]  # inference, no autograd; None for a bare product
    forward_backward: Callable[[], tuple[Tensor, tuple[Tensor, ...]]] | None = (
        None  # training: output and gradients
    )
    label: str = (
        ""  # what actually runs, for instance the implementation that impl="auto" resolved to
    )


@dataclass(frozen=True)
class Inputs:
    """Inputs of one case, on one device."""

    leaves: tuple[
        Tensor,
        ...,
    ]  # whose gradients are taken, the first arguments of every implementation
    others: tuple[Any, ...]  # the arguments after them
    grad_output: Tensor  # of the result's shape
    valid_tokens: int = 0  # that are not padding
    active: float | None = None  # share of positive scores, where scores have signs

    def bind(
        self,
        call: Callable[..., Tensor],
        label: str,
        train: Callable[..., Tensor] | None = None,
    ) -> Runnable:
        """``call(*leaves, *others)``, or ``train`` of them where gradients are asked for."""

        def forward() -> Tensor:
            with torch.no_grad():
                return call(*self.leaves, *self.others)

        def forward_backward() -> tuple[Tensor, tuple[Tensor, ...]]:
            out = (train or call)(*self.leaves, *self.others)
            return out.detach(), torch.autograd.grad(
                out,
                self.leaves,
                self.grad_output.to(out.dtype),
            )

        return Runnable(forward, forward_backward, label)


@dataclass(frozen=True)
class Budget:
    """Largest allowed relative errors ``||out - ref|| / ||ref||`` of the output and of every
    gradient.
    """

    forward: float
    gradient: float


BUDGETS: Mapping[str, Budget] = {
    name: Budget(testing.budget(dtype), testing.budget(dtype, "gradient"))
    for name, dtype in DTYPES.items()
}

# Baselines that keep logits in the input's dtype pick another winner where two round to the same
# value, so their gradients are far off by construction, and a bias that cancels most of a rounded
# logit magnifies its error. They must only be the same function, not as exact; the error is shown.
BASELINE_BUDGETS: Mapping[str, Budget] = {
    "bfloat16": Budget(forward=6e-2, gradient=0.5),
    "float16": Budget(forward=5e-3, gradient=0.2),
    "float32": Budget(forward=2e-5, gradient=5e-5),
    "float64": Budget(forward=1e-12, gradient=1e-11),
}


@dataclass(frozen=True)
class GateResult:
    """Errors of one implementation against what is allowed; names that start with ``"d"`` are
    gradients.
    """

    errors: Mapping[
        str,
        float,
    ]  # relative, of each checked quantity; infinite where a value is not finite
    budget: Budget

    @property
    def failures(self) -> list[str]:
        """One readable line for each quantity over its budget."""
        limits = {
            name: self.budget.gradient if name.startswith("d") else self.budget.forward
            for name in self.errors
        }
        wrong = [name for name, error in self.errors.items() if not error <= limits[name]]
        return [f"{name} error {self.errors[name]:.2e} > {limits[name]:.0e}" for name in wrong]

    @property
    def passed(self) -> bool:
        """Whether something was checked and everything stayed within budget."""
        return bool(self.errors) and not self.failures

    def worst(self, gradients: bool) -> float | None:
        """The largest error among gradients, or among outputs; ``None`` if none was checked."""
        return max(
            (error for name, error in self.errors.items() if name.startswith("d") is gradients),
            default=None,
        )


@dataclass(frozen=True)
class Part:
    """A slice of a result that is small enough to be known exactly: how it is taken, and its value
    in fp64.
    """

    take: Callable[[Tensor], Tensor]
    truth: Tensor


@dataclass(frozen=True)
class Gate:
    """The ground truth of one case: slices are held to their values in fp64, everything else must
    be finite.
    """

    inputs: Inputs
    dtype: str
    outputs: Mapping[str, Part]
    gradients: Mapping[
        str,
        Part | None,
    ]  # of each leaf, by a name with "d"; None for one that is not checked
    ours: Budget | None = None  # what our implementations are allowed, by default that of the dtype

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Run both phases of an implementation of ``kind`` once, over poisoned memory, and compare."""
        poison = (*self.inputs.leaves, self.inputs.grad_output)
        poison_allocator(poison)
        inferred = runnable.forward()
        errors = {} if inferred is None else self._output_errors(inferred, "inference ")
        del inferred
        if runnable.forward_backward is not None:
            poison_allocator(poison)
            out, gradients = runnable.forward_backward()
            errors |= self._output_errors(out, "")
            for (name, part), whole, leaf in zip(
                self.gradients.items(),
                gradients,
                self.inputs.leaves,
                strict=True,
            ):
                errors |= {} if part is None else {name: _part_error(whole, leaf, part)}
        allowed = (
            (self.ours or BUDGETS[self.dtype]) if kind == "ours" else BASELINE_BUDGETS[self.dtype]
        )
        return GateResult(errors, allowed)

    def _output_errors(self, out: Tensor, prefix: str) -> dict[str, float]:
        dense = out.to_dense() if out.layout == torch.sparse_csr else out
        like = self.inputs.grad_output
        return {
            f"{prefix}{name}": _part_error(dense, like, part) for name, part in self.outputs.items()
        }


def _part_error(whole: Tensor, like: Tensor, part: Part) -> float:
    """The relative error of a part, infinite if the whole has another shape than ``like`` or is not
    finite.
    """
    if whole.shape != like.shape or not bool(whole.isfinite().all()):
        return float("inf")
    return testing.relative_error(part.take(whole), part.truth)


def poison_allocator(like: Sequence[Tensor]) -> None:
    """Fill and free blocks of the sizes of ``like`` with NaN, which CUDA's allocator then hands out
    again.
    """
    blocks = [
        torch.full_like(tensor, float("nan")) for tensor in like if tensor.is_floating_point()
    ]
    if blocks and blocks[0].is_cuda:
        torch.cuda.synchronize()
    del blocks


def random_tensors(
    device: torch.device,
    seed: int,
) -> tuple[Callable[..., Tensor], torch.Generator]:
    """A function of normal numbers in fp32 by shape, and its generator."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return functools.partial(torch.randn, generator=generator, device=device), generator


def ragged_lengths(batch: int, longest: int, device: torch.device) -> Tensor:
    """Lengths ``[batch]`` spread evenly between 2% and 64% of the longest: 33% of the tokens are
    valid.
    """
    return (torch.linspace(0.02, 0.64, batch, device=device) * longest).round().long()


@functools.cache
def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``call`` under ``torch.compile``: one object per function, for all cases."""
    return torch.compile(call, dynamic=False)


def bound_compiled(call: Callable[..., Tensor]) -> Build:
    """Bind ``call`` under ``torch.compile`` to the inputs of a case.

    It is compiled once the inputs are there: ``torch.compile`` initialises CUDA, which an import
    must not, since no forked process can use CUDA after that.
    """
    return lambda inputs: inputs.bind(compiled(call), "torch.compile")


def captured(eager: Runnable) -> Runnable:
    """Both phases of ``eager``, each captured once as a CUDA graph, to time kernels without the
    host's part.
    """
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

    def replay(
        _held: object = run,
    ) -> Any:  # the graph reads the memory of the tensors that `run` holds
        graph.replay()
        return result

    return replay


Build = Callable[[Inputs], Runnable]  # of an implementation, from its inputs


@dataclass(frozen=True)
class Implementation:
    """A way to compute the operator; baselines are gated by budgets of rounded intermediates, what
    is bare is not.
    """

    name: str  # what --impl takes
    build: Build
    kind: Literal["ours", "baseline", "bare"]
    default_on: tuple[str, ...] = ("cpu", "cuda")  # where it runs unless --impl says otherwise
    slow: bool = (
        False  # it compiles or tunes for long before its first answer, and runs after all others
    )


def bound(call: Callable[..., Tensor], label: str = "torch") -> Build:
    """``build`` of an implementation that is one function of the inputs."""
    return lambda inputs: inputs.bind(call, label)


def peer(
    package: str,
    builds: Mapping[str, Build],
    slow: bool = False,
) -> tuple[Implementation, ...]:
    """Kernels that a package publishes, by name: baselines on GPUs, by default where the package is
    installed.
    """
    where = ("cuda",) if importlib.util.find_spec(package) is not None else ()
    return tuple(
        Implementation(name, build, "baseline", where, slow) for name, build in builds.items()
    )


def ours(
    call: Callable[..., Tensor],
    chosen_impl: Callable[[Tensor, str], str],
    tiled_on: tuple[str, ...] = (),
    *,
    graph: bool = False,
) -> tuple[Implementation, ...]:
    """An operator's own implementations, ``call`` with ``impl=``; the tiled one runs by default
    ``tiled_on``.
    """

    def build(impl: str) -> Build:
        return lambda inputs: inputs.bind(
            functools.partial(call, impl=impl),
            chosen_impl(inputs.leaves[0], impl),
        )

    made = (
        Implementation("tilefold", build("auto"), "ours"),
        Implementation("tiled", build("tiled"), "ours", default_on=tiled_on),
        Implementation("reference", build("reference"), "ours", default_on=()),
    )
    return (
        (*made, on_gpu("tilefold-graph", lambda inputs: captured(build("triton")(inputs))))
        if graph
        else made
    )


def on_gpu(
    name: str,
    build: Build,
    kind: Literal["ours", "baseline", "bare"] = "ours",
) -> Implementation:
    """An implementation that runs on GPUs by default."""
    return Implementation(name, build, kind, default_on=("cuda",))


class NotApplicable(Exception):  # noqa: N818
    """Raised by an implementation's ``build`` for a case that it cannot compute: its row is
    skipped, not failed.
    """


@dataclass(frozen=True)
class Ceilings:
    """Rates measured in the same run, the denominators of every floor."""

    flops: float  # per second, of a large library matrix product in the case's dtype
    bandwidth: float  # bytes per second of a large copy, read plus write


@dataclass(frozen=True)
class Work:
    """The fewest operations and bytes that a phase can do: each input read once, each output
    written once.
    """

    flops: float
    bytes: float

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Milliseconds below which no implementation goes: the slower of arithmetic and traffic."""
        return 1e3 * max(self.flops / ceilings.flops, self.bytes / ceilings.bandwidth)


@dataclass(frozen=True)
class BenchSpec:
    """Everything the runner needs to know about one operator."""

    op: str
    implementations: Sequence[Implementation]  # in the order of the table
    baseline: str  # the implementation that ratios are taken against
    make_inputs: Callable[[BenchCase, torch.device, int], Inputs]  # from a seed
    make_gate: Callable[[BenchCase, Inputs], Gate]
    probe_dims: Mapping[
        str,
        int,
    ]  # too small to matter: they load libraries and thread pools before memory is read
    work: Callable[[BenchCase, Inputs, Phase], Work]  # the least of that phase
    needs_bytes: Callable[
        [BenchCase, str],
        int,
    ]  # a low estimate of an implementation's, to skip what cannot fit

    @functools.cached_property
    def cases(self) -> Sequence[BenchCase]:
        """The shapes of the operator, of ``cases.json``."""
        rows = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
        return [BenchCase(**row) for row in rows[self.op]]

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
    raise ValueError(
        f"{argument} must be one of {listed}, got {name!r}; see `tilefold bench --list`.",
    )


def get_spec(op: str) -> BenchSpec:
    """The benchmark of an operator, whose module is imported; ``ValueError`` for one without."""
    if op not in OPERATORS:
        raise ValueError(f"op must be one of {', '.join(OPERATORS)}, got {op!r}.")
    spec: BenchSpec = importlib.import_module(f"{__package__}.{op}").SPEC
    return spec
