"""The benchmark of ``tilefold.ops.maxsim``: shapes, implementations and least work."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tilefold.bench.dtypes import DTYPES
from tilefold.bench.maxsim.baselines import BASELINES
from tilefold.bench.maxsim.gate import MaxSimGate
from tilefold.bench.maxsim.inputs import MaxSimBenchInputs, make_inputs
from tilefold.bench.maxsim.peers import PEERS
from tilefold.bench.runnables import Runnable, captured
from tilefold.bench.spec import BenchCase, BenchSpec, Implementation, Phase, Work, ours
from tilefold.ops.maxsim import chosen_impl, maxsim, quantize_tokens


def work(case: BenchCase, inputs: MaxSimBenchInputs, phase: Phase) -> Work:
    """Least work: forward multiplies all token pairs and reads each token once; backward moves rows, once each.

    Backward reads the tokens, the scores' gradient and a two-byte winner per query token and document, and writes both
    gradients; its arithmetic is negligible.
    """
    rows = case.dims["Nq"] * case.dims["Lq"]
    item = inputs.queries.element_size()
    flops = 2.0 * rows * inputs.document_tokens * case.dims["D"]
    tokens = float(item * (inputs.queries.numel() + inputs.documents.numel()))
    scores = 4.0 * inputs.grad_output.numel()
    if phase == "forward":
        return Work(flops, tokens + scores)
    return Work(flops, 3 * tokens + 2 * scores + 2 * 2.0 * rows * case.dims["Nd"])


def needs_bytes(case: BenchCase, impl: str) -> int:
    """A low estimate of the extra memory of ``impl``, in bytes."""
    d = case.dims
    item = DTYPES[case.dtype].itemsize
    similarities = d["Nq"] * d["Lq"] * d["Nd"] * d["Ld"] * item
    copies = {"eager": 1 if d["Nq"] == 1 else 2, "compile": 1, "reference": 8}
    return copies.get(impl, 0) * similarities + d["Nd"] * d["Ld"] * d["D"] * item


def _ours(impl: str) -> Callable[[MaxSimBenchInputs], Runnable]:
    def build(inputs: MaxSimBenchInputs) -> Runnable:
        def score(queries: Tensor, documents: Tensor) -> Tensor:
            return maxsim(queries, documents, cu_seqlens_d=inputs.cu_seqlens_d, impl=impl)

        return inputs.bind(score, chosen_impl(inputs.queries, impl))

    return build


def _quantized(dtype: str) -> Callable[[MaxSimBenchInputs], Runnable]:
    def build(inputs: MaxSimBenchInputs) -> Runnable:
        documents, queries = quantize_tokens(inputs.documents.detach(), dtype=dtype), inputs.queries.detach()

        def forward() -> Tensor:
            return maxsim(queries, documents, cu_seqlens_d=inputs.cu_seqlens_d)

        return Runnable(forward, None, dtype)

    return build


def _int8_graph(inputs: MaxSimBenchInputs) -> Runnable:
    return captured(_quantized("int8")(inputs))


def _graph(inputs: MaxSimBenchInputs) -> Runnable:
    return captured(_ours("triton")(inputs))


def _case(
    name: str, sizes: tuple[int, int, int, int], variant: str, device: str = "cuda", dtype: str = "float16",
    *, quick: bool = False,
) -> BenchCase:  # fmt: skip
    """A case of Nq queries of Lq tokens and Nd documents of Ld tokens."""
    dims = dict(zip(("Nq", "Lq", "Nd", "Ld"), sizes, strict=True)) | {"D": 128}
    return BenchCase(name, device, dtype, dims, variant, quick)


CASES = (
    _case("rerank-32x1000x300", (1, 32, 1000, 300), "rerank", quick=True),
    _case("rerank-32x10000x300", (1, 32, 10000, 300), "rerank", quick=True),
    _case("rerank-24x10000x1030", (1, 24, 10000, 1030), "rerank"),
    _case("rerank-1024x1000x1024", (1, 1024, 1000, 1024), "rerank"),
    _case("packed-32x10000x300", (1, 32, 10000, 300), "packed"),
    _case("in-batch-128x32-128x300", (128, 32, 128, 300), "in-batch", dtype="bfloat16", quick=True),
    _case("in-batch-64x32-64x1030", (64, 32, 64, 1030), "in-batch", dtype="bfloat16"),
    _case("in-batch-64x1024-64x1024", (64, 1024, 64, 1024), "in-batch", dtype="bfloat16"),
    _case("cpu-rerank-32x500x300", (1, 32, 500, 300), "rerank", "cpu", "float32", quick=True),
    _case("cpu-packed-32x500x300", (1, 32, 500, 300), "packed", "cpu", "float32"),
    _case("cpu-in-batch-16x32-16x300", (16, 32, 16, 300), "in-batch", "cpu", "float32", quick=True),
)

SPEC = BenchSpec(
    op="maxsim",
    cases=CASES,
    implementations=(
        *ours(_ours),
        Implementation("tilefold-graph", _graph, "ours", default_on=("cuda",)),
        Implementation("tilefold-int8", _quantized("int8"), "ours", default_on=("cuda",)),
        Implementation("tilefold-int8-graph", _int8_graph, "ours", default_on=("cuda",)),
        Implementation("tilefold-fp8", _quantized("fp8"), "ours", default_on=("cuda",)),
        *BASELINES,
        *PEERS,
    ),
    baseline="eager",
    make_inputs=make_inputs,
    make_gate=MaxSimGate,
    probe_dims={"Nq": 2, "Nd": 3, "Lq": 4, "Ld": 8, "D": 16},
    work=work,
    needs_bytes=needs_bytes,
)
