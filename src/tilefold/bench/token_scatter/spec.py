"""The benchmark of ``tilefold.ops.token_scatter``: shapes, implementations, least work and claims."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tilefold.bench.dtypes import DTYPES
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import BenchCase, BenchSpec, Implementation, NotApplicable, Phase, Requirement, Work, ours
from tilefold.bench.token_scatter.baselines import BASELINES
from tilefold.bench.token_scatter.gate import TokenScatterGate
from tilefold.bench.token_scatter.inputs import SPECIAL_IDS, TokenScatterBenchInputs, make_inputs
from tilefold.ops.token_scatter import chosen_impl, token_scatter, token_scatter_sparse


def work(case: BenchCase, inputs: TokenScatterBenchInputs, phase: Phase) -> Work:
    """Least work: every id and every weight that counts is read, every score written; backward visits winners."""
    item, tokens = inputs.weights.element_size(), inputs.valid_tokens
    ids = inputs.input_ids.numel() * inputs.input_ids.element_size()
    scores = inputs.grad_output.numel()
    nbytes = float(ids + item * (tokens + scores))
    if inputs.csr:  # a value and an int64 index per positive score
        nbytes = float(ids + item * tokens + (item + 8) * inputs.active * scores)
    if phase == "forward_backward":
        # one byte per token that says who won, written and read; one gradient read per winner, one written per token
        winners = inputs.active * inputs.grad_output.numel()
        nbytes += 2 * inputs.weights.numel() + item * (winners + inputs.weights.numel())
    return Work(float(tokens), nbytes)


def needs_bytes(case: BenchCase, impl: str) -> int:
    """A low estimate of the extra memory of ``impl`` in training, in bytes."""
    batch, length, vocab = (case.dims[name] for name in "BSV")
    item = DTYPES[case.dtype].itemsize
    copies = {"membership": 3, "membership-compile": 2}
    members = 8 * batch * length * vocab if impl == "reference" else 0
    return copies.get(impl, 0) * batch * length * vocab * item + members + batch * vocab * item


def _ours(impl: str) -> Callable[[TokenScatterBenchInputs], Runnable]:
    def build(inputs: TokenScatterBenchInputs) -> Runnable:
        def scatter(weights: Tensor, input_ids: Tensor, unused: Tensor, vocab_size: int) -> Tensor:
            return token_scatter(weights, input_ids, vocab_size, ignore_ids=SPECIAL_IDS, impl=impl)

        return inputs.bind(scatter, chosen_impl(inputs.weights, impl))

    return build


def _csr(inputs: TokenScatterBenchInputs) -> Runnable:
    if not inputs.csr:
        raise NotApplicable("token_scatter_sparse returns CSR scores")
    vocab = inputs.grad_output.size(1)
    return inputs.bind_csr(
        lambda: token_scatter_sparse(inputs.weights, inputs.input_ids, vocab, ignore_ids=SPECIAL_IDS), "torch"
    )


def _case(B: int, S: int, V: int, variant: str = "max", device: str = "cuda", *, quick: bool = False) -> BenchCase:
    dtype = "bfloat16" if device == "cuda" else "float32"
    name = f"{'cpu-' if device == 'cpu' else ''}{B}x{S}x{V}-{variant}"
    return BenchCase(name, device, dtype, {"B": B, "S": S, "V": V}, variant, quick)


CPU_TRAIN = _case(8, 256, 30522, device="cpu")

CASES = (
    _case(32, 512, 250002, quick=True),
    _case(32, 512, 250002, "ragged"),
    _case(32, 512, 30522, quick=True),
    _case(256, 512, 30522),
    _case(4, 8192, 250002),
    _case(32, 8192, 250002),
    _case(8, 8192, 250002),
    _case(8, 8192, 30522),
    *(_case(B, S, V, "csr") for B, S in ((32, 512), (8, 8192)) for V in (250002, 30522)),
    _case(64, 32, 30522, quick=True),
    CPU_TRAIN,
    _case(8, 256, 30522, "ragged", "cpu"),
    _case(32, 512, 30522, device="cpu"),
    _case(4, 512, 250002, device="cpu"),
    _case(4, 512, 250002, "csr", "cpu"),
    _case(16, 32, 30522, device="cpu", quick=True),
)

REQUIREMENTS = (
    Requirement(
        case=CPU_TRAIN.name,
        claim="peak memory of forward + backward is at least 20x below the [B, S, V] membership",
        left=("tilefold", "forward_backward_peak_mib"),
        right=("membership", "forward_backward_peak_mib"),
        limit=1 / 20,
    ),
    Requirement(
        case=CPU_TRAIN.name,
        claim="forward + backward takes no longer than scatter_reduce",
        left=("tilefold", "forward_backward_p50_ms"),
        right=("scatter-reduce", "forward_backward_p50_ms"),
        limit=1.0,
    ),
)

SPEC = BenchSpec(
    op="token_scatter",
    cases=CASES,
    implementations=(
        *ours(_ours, tiled_on=("cuda",)),
        Implementation("tilefold-csr", _csr, "ours"),
        *BASELINES,
    ),
    baseline="scatter-reduce",
    make_inputs=make_inputs,
    make_gate=TokenScatterGate,
    probe_dims={"B": 2, "S": 8, "V": 96},
    work=work,
    needs_bytes=needs_bytes,
    requirements=REQUIREMENTS,
)
