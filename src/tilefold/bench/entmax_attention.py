"""The benchmark of ``tilefold.ops.entmax_attention``: shapes, inputs, floor and gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.bench._entmax_attention_peers import PEERS, attention_runnable
from tilefold.bench.capture import captured
from tilefold.bench.gate import BASELINE_BUDGETS, Budget, GateResult, relative_error
from tilefold.bench.registry import DTYPES, BenchCase, BenchSpec, Implementation, Phase, Runnable, Work
from tilefold.ops.entmax_attention import chosen_impl, entmax_attention
from tilefold.testing import budget
from tilefold.testing.entmax_attention import entmax_attention_inputs

ALPHA = 1.5
_SHARPNESS = {"iid": 1.0, "iid4": 4.0, "correlated": 2.0}
_GATE_ROWS = 1024  # queries of one head that are held against the reference
_GATE_MARGIN = 1.5  # of the error that unavoidable roundings make
_MOST_PAIRS = 1 << 22  # scores in fp64 of the gate's head on the CPU


@dataclass(frozen=True)
class EntmaxAttentionBenchInputs:
    """Inputs of one case: q, k and v ``[B, H, N, D]`` want gradients, ``dout`` comes back."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool


def make_inputs(case: BenchCase, device: torch.device, seed: int = 0) -> EntmaxAttentionBenchInputs:
    """Random inputs of ``case``: independent scores, or ones that are alike along the sequence."""
    batch, heads, n, dim = (case.dims[name] for name in "BHND")
    kind, _, causal = case.variant.partition("-")
    made = entmax_attention_inputs(
        batch,
        heads,
        n,
        dim,
        correlated=kind == "correlated",
        sharpness=_SHARPNESS[kind],
        dtype=DTYPES[case.dtype],
        device=device,
        seed=seed,
    )
    q, k, v = (t.requires_grad_() for t in (made.q, made.k, made.v))
    return EntmaxAttentionBenchInputs(q, k, v, made.dout, causal == "causal")


def make_probe(case: BenchCase, device: torch.device, seed: int = 0) -> EntmaxAttentionBenchInputs:
    """The case with tiny dimensions: loads libraries and thread pools, allocates next to nothing."""
    dims = {"B": 1, "H": 1, "N": 32, "D": case.dims["D"]}
    return make_inputs(BenchCase("probe", case.device, case.dtype, dims, case.variant), device, seed)


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


def _rounded_dq(head: Sequence[Tensor], dtype: torch.dtype, causal: bool) -> Tensor:
    """``[rows, D]`` dq of one head in fp64, but for what products in ``dtype`` must round: weights, O2 and dS."""
    q, k, v, dout, tau = head

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).double()

    scale = q.size(-1) ** -0.5
    u = ((ALPHA - 1) * scale * (q @ k.T) - tau.double()[:, None]).clamp_min(0)
    if causal:
        places = torch.arange(k.size(0), device=k.device)
        u = u.masked_fill(places > places[k.size(0) - q.size(0) :, None], 0)
    second = rounded(rounded(u) @ v / u.sum(dim=1, keepdim=True))
    ds = u * (dout @ v.T - (dout * second).sum(dim=1, keepdim=True))
    dq: Tensor = rounded(ds) @ k * scale
    return dq


class EntmaxAttentionGate:
    """Holds the last queries of the first head, and, where that is all of them, dk and dv, to the fp64 reference.

    Keys that are nearly alike cancel in dq, whose terms sum to nothing in every row, and what is left shows the
    rounding of the weights and of dS that any kernel with 16-bit products makes. Where those roundings alone, applied
    to exact numbers, lead further away than the budget, the gate allows half as much again as they do.
    """

    def __init__(self, case: BenchCase, inputs: EntmaxAttentionBenchInputs) -> None:
        n = inputs.q.size(2)
        rows = min(n, _GATE_ROWS if inputs.q.is_cuda else max(1, _MOST_PAIRS // n))
        self._first = n - rows
        q, k, v = (t.detach()[:1, :1].double() for t in (inputs.q, inputs.k, inputs.v))
        leaves = [q[:, :, self._first :].clone().requires_grad_(), k.requires_grad_(), v.requires_grad_()]
        found = entmax_attention(
            leaves[0], leaves[1], leaves[2], alpha=ALPHA, causal=inputs.causal, impl="reference", return_stats=True
        )
        if isinstance(found, Tensor):
            raise TypeError("entmax_attention returned no statistics.")
        out, stats = found
        dout = inputs.dout[:1, :1, self._first :].double()
        grads = torch.autograd.grad(out, leaves, dout)
        self._truth = {"out": out.detach(), "dq": grads[0]}
        if self._first == 0:
            self._truth |= {"dk": grads[1], "dv": grads[2]}
        dtype = inputs.q.dtype
        head = [t.detach()[0, 0] for t in (*leaves, dout, stats.tau)]
        rounded = _rounded_dq(head, dtype, inputs.causal)
        unavoidable = relative_error(rounded, grads[0][0, 0])
        self._budget = Budget(
            budget(dtype, "gradient"), max(budget(dtype, "gradient_bound"), _GATE_MARGIN * unavoidable)
        )
        self._baseline = BASELINE_BUDGETS[case.dtype]

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Errors of output and gradients."""
        allowed = self._budget if kind == "ours" else self._baseline
        found: dict[str, Tensor] = {}
        if runnable.forward_backward is None:
            out = runnable.forward()
            if out is not None:
                found["out"] = out[:1, :1, self._first :]
        else:
            out, grads = runnable.forward_backward()
            found = {"out": out[:1, :1, self._first :], "dq": grads[0][:1, :1, self._first :]}
            found |= {"dk": grads[1][:1, :1], "dv": grads[2][:1, :1]}
        errors = {name: relative_error(found[name], truth) for name, truth in self._truth.items() if name in found}
        return GateResult(errors, allowed)


def _ours(impl: str) -> Callable[[EntmaxAttentionBenchInputs], Runnable]:
    def build(inputs: EntmaxAttentionBenchInputs) -> Runnable:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = entmax_attention(q, k, v, alpha=ALPHA, causal=inputs.causal, impl=impl)
            return out if isinstance(out, Tensor) else out[0]

        return attention_runnable(attend, inputs, chosen_impl(inputs.q, impl) if impl != "reference" else impl)

    return build


def _graph(inputs: EntmaxAttentionBenchInputs) -> Runnable:
    """The same calls, captured once as a CUDA graph and replayed: without the host's part."""
    eager = _ours("triton")(inputs)
    if eager.forward_backward is None:
        raise ValueError("the graph must have a backward to capture, got none.")
    forward, both = (captured(run) for run in (eager.forward, eager.forward_backward))
    return Runnable(forward, both, "triton, CUDA graph")


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
        Implementation("tilefold", _ours("auto"), "ours"),
        Implementation("tilefold-graph", _graph, "ours", default_on=("cuda",)),
        Implementation("tiled", _ours("tiled"), "ours", default_on=()),
        Implementation("reference", _ours("reference"), "ours", default_on=()),
        *PEERS,
    ),
    baseline="softmax-fa2",
    make_inputs=make_inputs,
    make_gate=EntmaxAttentionGate,
    make_probe=make_probe,
    work=work,
    needs_bytes=needs_bytes,
)
