"""Ground truth of entmax in fp64, on the first and last rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.bench.entmax.inputs import ALPHA, EntmaxBenchInputs
from tilefold.bench.gate import GateResult, budget_of, check_phases, part_error
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import BenchCase
from tilefold.ops import entmax

_ROWS = 4  # held against the reference at either end


class EntmaxGate:
    """Hold some rows and their gradients to the specification in fp64; everything else must be finite."""

    def __init__(self, case: BenchCase, inputs: EntmaxBenchInputs) -> None:
        self._case, self._inputs = case, inputs
        leaf = self._part(inputs.x.detach()).double().requires_grad_()
        p = entmax(leaf, ALPHA, impl="reference")
        if not isinstance(p, Tensor):
            raise TypeError("entmax returned a pair without being asked for one.")
        (dx,) = torch.autograd.grad(p, leaf, self._part(inputs.dp).double())
        self._truth = p.detach(), dx

    @staticmethod
    def _part(rows: Tensor) -> Tensor:
        return torch.cat([rows[:_ROWS], rows[-_ROWS:]])

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Run both phases once over poisoned memory and compare."""
        inputs = self._inputs
        errors = check_phases(runnable, (inputs.x, inputs.dp), self._output_errors, self._gradient_errors)
        return GateResult(errors, budget_of(kind, self._case.dtype))

    def _output_errors(self, out: Tensor, prefix: str) -> dict[str, float]:
        return {f"{prefix}out": part_error(out, self._part(out), self._truth[0])}

    def _gradient_errors(self, gradients: tuple[Tensor, ...]) -> dict[str, float]:
        (dx,) = gradients
        return {"dx": part_error(dx, self._part(dx), self._truth[1])}
