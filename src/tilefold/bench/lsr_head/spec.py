"""The benchmark of ``tilefold.ops.lsr_head``: shapes, implementations, least work and claims."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tilefold.bench.dtypes import DTYPES
from tilefold.bench.lsr_head.baselines import BASELINES
from tilefold.bench.lsr_head.gate import LSRHeadGate
from tilefold.bench.lsr_head.inputs import LSRHeadInputs, make_inputs
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import BenchCase, BenchSpec, Phase, Requirement, Work, ours
from tilefold.ops.lsr_head import chosen_impl, lsr_head


def work(case: BenchCase, inputs: LSRHeadInputs, phase: Phase) -> Work:
    """Least work: forward multiplies valid tokens with the vocabulary; backward moves rows, once each.

    Backward reads the scores' gradient, the scores and a two-byte winner, the hidden rows and the weight rows that have
    an active score, and writes all of both gradients; its arithmetic is negligible.
    """
    B, D, V = case.dims["B"], case.dims["D"], case.dims["V"]
    item = inputs.hidden.element_size()
    tokens = inputs.valid_tokens
    flops = 2.0 * tokens * D * V
    nbytes = float(item * (tokens * D + V * D + V + B * V))
    if phase == "forward_backward":
        active_rows = V * (1 - (1 - inputs.active) ** B)
        nbytes += 2 * B * V  # the winners, written by forward
        nbytes += B * V * (2 * item + 2) + item * D * (tokens + active_rows)
        nbytes += item * (inputs.hidden.numel() + V * D + V)
    return Work(flops, nbytes)


def needs_bytes(case: BenchCase, impl: str) -> int:
    """A low estimate of the extra memory of ``impl`` in training, in bytes."""
    B, S, D, V = (case.dims[name] for name in "BSDV")
    item = DTYPES[case.dtype].itemsize
    logits = B * S * V * item
    gradients = (B * S * D + V * D) * item
    copies = {"eager": 3, "compile": 2, "compile-max-first": 2, "reference": 4, "gemm-full": 1}
    return copies.get(impl, 0) * logits + gradients


def _ours(impl: str) -> Callable[[LSRHeadInputs], Runnable]:
    def build(inputs: LSRHeadInputs) -> Runnable:
        def head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
            return lsr_head(hidden, weight, bias, attention_mask=attention_mask, impl=impl)

        return inputs.bind(head, chosen_impl(inputs.hidden, impl))

    return build


def _case(B: int, S: int, D: int, V: int, variant: str, device: str = "cuda", *, quick: bool = False) -> BenchCase:
    dtype = "bfloat16" if device == "cuda" else "float32"
    name = f"{'cpu-' if device == 'cpu' else ''}{B}x{S}x{D}x{V}-{variant}"
    return BenchCase(name, device, dtype, {"B": B, "S": S, "D": D, "V": V}, variant, quick)


CPU_TRAIN = _case(8, 256, 384, 30522, "dense", "cpu")

CASES = (
    _case(32, 512, 768, 30522, "dense", quick=True),
    _case(32, 512, 768, 30522, "2pct", quick=True),
    _case(32, 512, 768, 30522, "ragged", quick=True),
    _case(32, 512, 768, 30522, "ragged-2pct"),
    _case(16, 512, 768, 250002, "dense"),
    _case(16, 512, 768, 250002, "2pct"),
    _case(64, 256, 1024, 250002, "2pct"),
    _case(4, 8192, 768, 50368, "dense"),
    _case(64, 32, 768, 30522, "2pct", quick=True),
    CPU_TRAIN,
    _case(8, 256, 384, 30522, "2pct", "cpu"),
    _case(8, 256, 384, 30522, "ragged-2pct", "cpu"),
    _case(16, 32, 384, 30522, "2pct", "cpu", quick=True),
)

REQUIREMENTS = (
    Requirement(
        case=CPU_TRAIN.name,
        claim="forward takes at most 1.15x the time of the bare matrix product",
        left=("tilefold", "forward_p50_ms"),
        right=("gemm-full", "forward_p50_ms"),
        limit=1.15,
    ),
    Requirement(
        case=CPU_TRAIN.name,
        claim="peak memory of forward + backward is at least 8x below eager",
        left=("tilefold", "forward_backward_peak_mib"),
        right=("eager", "forward_backward_peak_mib"),
        limit=1 / 8,
    ),
)

SPEC = BenchSpec(
    op="lsr_head",
    cases=CASES,
    implementations=(
        *ours(_ours),
        *BASELINES,
    ),
    baseline="eager",
    make_inputs=make_inputs,
    make_gate=LSRHeadGate,
    probe_dims={"B": 2, "S": 8, "D": 32, "V": 96},
    work=work,
    needs_bytes=needs_bytes,
    requirements=REQUIREMENTS,
)
