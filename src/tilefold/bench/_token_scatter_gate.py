"""Ground truth of the token scatter in fp64, on whole sequences with only the entries that occur in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilefold.bench.gate import BASELINE_BUDGETS, BUDGETS, GateResult, poison_allocator, relative_error
from tilefold.bench.registry import BenchCase, Runnable
from tilefold.ops.token_scatter import _reference

if TYPE_CHECKING:
    from tilefold.bench.token_scatter import TokenScatterBenchInputs


class TokenScatterGate:
    """Compare an implementation with the specification in fp64 on two sequences; everything else must be finite.

    Where two tokens of one id have the same weight, who takes the gradient is a convention, which baselines do not
    share: the gate sets ``inputs.grad_output`` to zero there.
    """

    def __init__(self, case: BenchCase, inputs: TokenScatterBenchInputs) -> None:
        self._case = case
        self._inputs = inputs
        batch = inputs.grad_output.size(0)
        self._sequences = sorted({0, batch - 1})
        self._truth = [self._sequence(b) for b in self._sequences]

    def _sequence(self, b: int) -> tuple[Tensor, Tensor]:
        """Scores ``[V]`` and the gradient of the weights ``[S]`` of sequence ``b``."""
        inputs = self._inputs
        ids = inputs.input_ids[b]
        valid = ~torch.isin(ids, inputs.unused)
        entries, place = torch.unique(ids, return_inverse=True)
        weights = inputs.weights.detach()[b].double()
        self._drop_ties(b, weights, place, valid, entries)
        leaf = weights[None].requires_grad_()
        found = _reference.token_scatter(leaf, place[None], valid[None], entries.numel(), "max", "relu", torch.float64)
        (grad,) = torch.autograd.grad(found, leaf, inputs.grad_output[b, entries].double()[None])
        scores = torch.zeros(inputs.grad_output.size(1), dtype=torch.float64, device=ids.device)
        scores[entries] = found.detach()[0]
        return scores, grad[0]

    def _drop_ties(self, b: int, weights: Tensor, place: Tensor, valid: Tensor, entries: Tensor) -> None:
        holds = (place[:, None] == torch.arange(entries.numel(), device=place.device)) & valid[:, None]
        best = torch.where(holds, weights[:, None], float("-inf")).topk(min(2, weights.numel()), dim=0).values
        if best.size(0) == 2:
            self._inputs.grad_output[b, entries[(best[0] == best[1]) & (best[0] > 0)]] = 0

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Run both phases once over poisoned memory and compare."""
        inputs = self._inputs
        budgets = BUDGETS if kind == "ours" else BASELINE_BUDGETS
        poison_allocator([inputs.weights, inputs.grad_output])
        inferred = runnable.forward()
        errors = {} if inferred is None else self._errors(inferred, 0, "inference out")
        del inferred
        if runnable.forward_backward is not None:
            poison_allocator([inputs.weights, inputs.grad_output])
            out, (dweights,) = runnable.forward_backward()
            errors |= self._errors(out, 0, "out")
            errors |= self._errors(dweights, 1, "dweights")
        return GateResult(errors, budgets[self._case.dtype])

    def _errors(self, found: Tensor, part: int, name: str) -> dict[str, float]:
        shape = (self._inputs.grad_output if part == 0 else self._inputs.weights).shape
        if found.shape != shape or not bool(found.isfinite().all()):
            return {name: float("inf")}
        truth = torch.stack([pair[part] for pair in self._truth])
        return {name: relative_error(found[self._sequences], truth)}
