"""The benchmark of ``tilefold.ops.entmax``: shapes, implementations and least work."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tilefold.bench.dtypes import DTYPES
from tilefold.bench.entmax.baselines import BASELINES
from tilefold.bench.entmax.gate import EntmaxGate
from tilefold.bench.entmax.inputs import ALPHA, EntmaxBenchInputs, make_inputs
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import BenchCase, BenchSpec, Phase, Work, ours
from tilefold.ops import entmax
from tilefold.ops.entmax import chosen_impl


def work(case: BenchCase, inputs: EntmaxBenchInputs, phase: Phase) -> Work:
    """Least work: scores read and probabilities written once; backward reads those and a gradient, and writes one."""
    operand = float(inputs.x.numel() * inputs.x.element_size())
    return Work(3.0 * inputs.x.numel(), operand * (2 if phase == "forward" else 5))


def needs_bytes(case: BenchCase, impl: str) -> int:
    """A low estimate of the extra memory of ``impl`` in training, in bytes."""
    entries = case.dims["R"] * case.dims["N"]
    return entries * (2 * DTYPES[case.dtype].itemsize + {"sort": 24, "reference": 64}.get(impl, 0))


def _ours(impl: str) -> Callable[[EntmaxBenchInputs], Runnable]:
    def build(inputs: EntmaxBenchInputs) -> Runnable:
        def rows(x: Tensor) -> Tensor:
            p = entmax(x, ALPHA, impl=impl)
            return p if isinstance(p, Tensor) else p[0]

        return inputs.bind(rows, chosen_impl(inputs.x, impl))

    return build


def _case(R: int, N: int, device: str = "cuda", dtype: str = "bfloat16", *, quick: bool = False) -> BenchCase:
    name = f"{'cpu-' if device == 'cpu' else ''}{R}x{N}{'-fp32' if (device, dtype) == ('cuda', 'float32') else ''}"
    return BenchCase(name, device, dtype, {"R": R, "N": N}, "normal", quick)


CASES = (
    _case(262144, 128, quick=True),
    _case(32768, 1024),
    _case(8192, 4096, quick=True),
    _case(8192, 4096, dtype="float32"),
    _case(2048, 30522),
    _case(256, 250002, quick=True),
    _case(16, 250002),
    _case(2048, 128, "cpu", "float32", quick=True),
    _case(64, 8192, "cpu", "float32"),
)

SPEC = BenchSpec(
    op="entmax",
    cases=CASES,
    implementations=(
        *ours(_ours, tiled_on=("cuda",)),
        *BASELINES,
    ),
    baseline="sort",
    make_inputs=make_inputs,
    make_gate=EntmaxGate,
    probe_dims={"R": 4, "N": 32},
    work=work,
    needs_bytes=needs_bytes,
)
