"""Ground truth of entmax attention in fp64, on the last queries of the first head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilefold.bench.entmax_attention.inputs import ALPHA, EntmaxAttentionBenchInputs
from tilefold.bench.gate import Budget, GateResult, budget_of, check_phases, part_error, relative_error
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import BenchCase
from tilefold.ops.entmax_attention import entmax_attention
from tilefold.testing import budget

_GATE_ROWS = 1024  # queries of one head that are held against the reference
_GATE_MARGIN = 1.5  # of the error that unavoidable roundings make
_MAX_PAIRS = 1 << 22  # scores in fp64 of the gate's head on the CPU


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
        self._case, self._inputs = case, inputs
        n = inputs.q.size(2)
        rows = min(n, _GATE_ROWS if inputs.q.is_cuda else max(1, _MAX_PAIRS // n))
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
        unavoidable = relative_error(_rounded_dq(head, dtype, inputs.causal), grads[0][0, 0])
        gradient = max(budget(dtype, "gradient_bound"), _GATE_MARGIN * unavoidable)
        self._budget = Budget(budget(dtype, "gradient"), gradient)

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Run both phases once over poisoned memory and compare."""
        inputs = self._inputs
        poison = (inputs.q, inputs.k, inputs.v, inputs.dout)
        errors = check_phases(runnable, poison, self._output_errors, self._gradient_errors)
        return GateResult(errors, self._budget if kind == "ours" else budget_of(kind, self._case.dtype))

    def _output_errors(self, out: Tensor, prefix: str) -> dict[str, float]:
        return {f"{prefix}out": self._error("out", out)}

    def _gradient_errors(self, gradients: tuple[Tensor, ...]) -> dict[str, float]:
        named = zip(("dq", "dk", "dv"), gradients, strict=True)
        return {name: self._error(name, whole) for name, whole in named if name in self._truth}

    def _error(self, name: str, whole: Tensor) -> float:
        first = self._first if name in ("out", "dq") else 0
        return part_error(whole, whole[:1, :1, first:], self._truth[name])
