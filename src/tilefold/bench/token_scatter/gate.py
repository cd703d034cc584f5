"""Ground truth of the token scatter in fp64, on whole sequences with only the entries that occur in them."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.bench.gate import GateResult, budget_of, check_phases, is_complete, relative_error
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import BenchCase
from tilefold.bench.token_scatter.inputs import TokenScatterBenchInputs
from tilefold.ops import token_scatter


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
        found = token_scatter(leaf, place[None], entries.numel(), attention_mask=valid[None], impl="reference")
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
        poison = (inputs.weights, inputs.grad_output)
        errors = check_phases(runnable, poison, self._output_errors, self._gradient_errors)
        return GateResult(errors, budget_of(kind, self._case.dtype))

    def _output_errors(self, out: Tensor, prefix: str) -> dict[str, float]:
        dense = out.to_dense() if out.layout == torch.sparse_csr else out
        return {f"{prefix}out": self._error(dense, self._inputs.grad_output, 0)}

    def _gradient_errors(self, gradients: tuple[Tensor, ...]) -> dict[str, float]:
        (dweights,) = gradients
        return {"dweights": self._error(dweights, self._inputs.weights, 1)}

    def _error(self, found: Tensor, like: Tensor, part: int) -> float:
        if not is_complete(found, like):
            return float("inf")
        return relative_error(found[self._sequences], torch.stack([pair[part] for pair in self._truth]))
