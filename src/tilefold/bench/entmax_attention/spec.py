"""The benchmark of ``tilefold.ops.entmax_attention``: shapes, implementations and least work."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tilefold.bench.dtypes import DTYPES
from tilefold.bench.entmax_attention.baselines import BASELINES
from tilefold.bench.entmax_attention.gate import EntmaxAttentionGate
from tilefold.bench.entmax_attention.inputs import ALPHA, EntmaxAttentionBenchInputs, make_inputs
from tilefold.bench.entmax_attention.peers import PEERS
from tilefold.bench.runnables import Runnable, captured
from tilefold.bench.spec import BenchCase, BenchSpec, Implementation, Phase, Work, ours
from tilefold.ops.entmax_attention import chosen_impl, entmax_attention


def work(case: BenchCase, inputs: EntmaxAttentionBenchInputs, phase: Phase) -> Work:
    """Least work: every score once (their signs must be known); weights and gradients may all but vanish."""
    batch, heads, n, dim = (case.dims[name] for name in "BHND")
    pairs = batch * heads * n * n / (2 if inputs.causal else 1)
    operand = inputs.q.numel() * inputs.q.element_size()
    nbytes = 4.0 * operand if phase == "forward" else 12.0 * operand
    return Work(2.0 * dim * pairs, nbytes)


def needs_bytes(case: BenchCase, impl: str) -> int:
    """A low estimate of the extra memory of ``impl`` in training, in bytes."""
    batch, heads, n, dim = (case.dims[name] for name in "BHND")
    dense = 8 * batch * heads * n * n if impl == "reference" else 0
    return dense + 5 * batch * heads * n * dim * DTYPES[case.dtype].itemsize


def _ours(impl: str) -> Callable[[EntmaxAttentionBenchInputs], Runnable]:
    def build(inputs: EntmaxAttentionBenchInputs) -> Runnable:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = entmax_attention(q, k, v, alpha=ALPHA, causal=inputs.causal, impl=impl)
            return out if isinstance(out, Tensor) else out[0]

        return inputs.bind(attend, chosen_impl(inputs.q, impl))

    return build


def _graph(inputs: EntmaxAttentionBenchInputs) -> Runnable:
    """The same calls, captured once as a CUDA graph and replayed: without the host's part."""
    return captured(_ours("triton")(inputs))


def _case(B: int, N: int, variant: str, device: str = "cuda", *, quick: bool = False) -> BenchCase:
    dtype = "bfloat16" if device == "cuda" else "float32"
    name = f"{'cpu-' if device == 'cpu' else ''}{B}x{N}-{variant}"
    return BenchCase(name, device, dtype, {"B": B, "H": 12 if device == "cuda" else 4, "N": N, "D": 64}, variant, quick)


CASES = (
    _case(128, 128, "iid", quick=True),
    _case(64, 256, "iid"),
    _case(32, 512, "iid", quick=True),
    _case(8, 2048, "iid"),
    _case(2, 8192, "iid4"),
    _case(2, 8192, "correlated", quick=True),
    _case(4, 4096, "correlated-causal"),
    _case(4, 16384, "correlated-causal"),
    _case(2, 512, "iid", "cpu", quick=True),
    _case(1, 2048, "correlated", "cpu"),
)

SPEC = BenchSpec(
    op="entmax_attention",
    cases=CASES,
    implementations=(
        *ours(_ours),
        Implementation("tilefold-graph", _graph, "ours", default_on=("cuda",)),
        *BASELINES,
        *PEERS,
    ),
    baseline="softmax-fa2",
    make_inputs=make_inputs,
    make_gate=EntmaxAttentionGate,
    probe_dims={"B": 1, "H": 1, "N": 32},
    work=work,
    needs_bytes=needs_bytes,
)
