"""Ground truth of MaxSim in fp64, on parts of the problem small enough to compute exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.bench.gate import (
    BUDGETS,
    Budget,
    GateResult,
    budget_of,
    check_phases,
    is_complete,
    part_error,
    relative_error,
)
from tilefold.bench.maxsim.inputs import MaxSimBenchInputs
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import BenchCase
from tilefold.ops.maxsim import maxsim, quantize_tokens

QUERIES = 2  # queries that are checked against every document
DOCUMENTS = 4  # documents that are checked against every query
CHUNK_BYTES = 2**27  # fp64 similarities held at a time
AMBIGUOUS = 2e-6  # fp32 evaluation order moves a similarity of unit vectors by less than this
QUANTIZED_BUDGET = Budget(forward=BUDGETS["float32"].forward, gradient=0.0)


class MaxSimGate:
    """Compare an implementation with the specification in fp64.

    Two slices are exact: a few queries with all documents (scores, gradients of those queries), and a few documents
    with all queries (scores, gradients of those documents). Everything else must be finite. Scores of int8
    and fp8 documents are compared with what the rounded numbers stand for.

    The gate sets ``inputs.grad_output`` to zero for pairs of the slices in which a query token has two best document
    tokens up to the order of evaluation, so that what is left has one answer.
    """

    def __init__(self, case: BenchCase, inputs: MaxSimBenchInputs) -> None:
        self._case, self._inputs = case, inputs
        n_queries, n_documents = inputs.grad_output.shape
        device = inputs.queries.device
        self._queries = torch.tensor(sorted({0, n_queries - 1})[:QUERIES], device=device)
        spread = torch.linspace(0, n_documents - 1, min(DOCUMENTS, n_documents), dtype=torch.float64)
        self._documents = spread.round().long().to(device)
        offsets = inputs.cu_seqlens_d
        length = 0 if offsets is not None else inputs.documents.size(1)
        self._starts = [i * length for i in range(n_documents + 1)] if offsets is None else offsets.tolist()
        self._truth = self._slice_truth()

    def _tokens(self, document: int) -> Tensor:
        rows = self._inputs.documents.detach().flatten(0, -2)
        return rows[self._starts[document] : self._starts[document + 1]].double()

    def _winners(self, queries: Tensor, document: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of some queries with a document, the winners, and which queries have a token with two best."""
        similarities = queries @ self._tokens(document).T  # [n, Lq, Ld]
        best, places = similarities.topk(min(2, similarities.size(-1)), dim=-1)
        unclear = torch.zeros(queries.size(0), dtype=torch.bool, device=queries.device)
        if best.size(-1) == 2:
            unclear = (best[..., 0] - best[..., 1] < AMBIGUOUS).any(dim=1)
        return best[..., 0].sum(dim=1), places[..., 0], unclear

    @torch.no_grad()
    def _slice_truth(self) -> dict[str, Tensor]:
        inputs, grad = self._inputs, self._inputs.grad_output
        some = inputs.queries.detach()[self._queries].double()
        scores = torch.zeros(grad.shape, dtype=torch.float64, device=grad.device)[self._queries]
        dqueries = torch.zeros_like(some)
        for document in range(grad.size(1)):
            value, winner, unclear = self._winners(some, document)
            grad[self._queries[unclear], document] = 0
            scores[:, document] = value
            dqueries += grad[self._queries, document, None, None].double() * self._tokens(document)[winner]
        truth = {"out[q, :]": scores, "dqueries": dqueries}
        columns, parts = [], []
        step = max(1, CHUNK_BYTES // (8 * inputs.queries.size(1) * self._case.dims["Ld"]))
        for document in self._documents.tolist():
            gradient = torch.zeros_like(self._tokens(document))
            values = []
            for q0 in range(0, grad.size(0), step):
                queries = inputs.queries.detach()[q0 : q0 + step].double()
                value, winner, unclear = self._winners(queries, document)
                every = torch.arange(q0, q0 + queries.size(0), device=grad.device)
                # those of the first slice were settled with the same margin
                grad[every[unclear], document] = 0
                values.append(value)
                weighted = grad[every, document, None, None].double() * queries
                gradient.index_add_(0, winner.flatten(), weighted.flatten(0, 1))
            columns.append(torch.cat(values))
            parts.append(gradient)
        return truth | {"out[:, d]": torch.stack(columns, dim=1), "ddocuments": torch.cat(parts)}

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Run both phases once over poisoned memory and compare."""
        inputs = self._inputs
        stored = runnable.label.partition(",")[0]
        if stored in ("int8", "fp8"):
            return GateResult({"out[:, d]": self._quantized_error(runnable, stored)}, QUANTIZED_BUDGET)
        budget = budget_of(kind, self._case.dtype)
        if kind == "ours":  # scores are fp32 whatever the input
            budget = Budget(BUDGETS["float32"].forward, budget.gradient)
        poison = (inputs.queries, inputs.documents, inputs.grad_output)
        return GateResult(check_phases(runnable, poison, self._output_errors, self._gradient_errors), budget)

    def _quantized_error(self, runnable: Runnable, dtype: str) -> float:
        out = runnable.forward()
        if out is None or not bool(out.isfinite().all()):
            return float("inf")
        starts, inputs = self._starts, self._inputs
        rows = inputs.documents.detach().flatten(0, -2)
        worst = 0.0
        for document in self._documents.tolist():
            tokens = quantize_tokens(rows[starts[document] : starts[document + 1]][None], dtype=dtype)
            truth = maxsim(inputs.queries.detach(), tokens, impl="reference")
            worst = max(worst, relative_error(out[:, document : document + 1], truth))
        return worst

    def _output_errors(self, out: Tensor, prefix: str) -> dict[str, float]:
        if not is_complete(out, self._inputs.grad_output):
            return {f"{prefix}out": float("inf")}
        return {
            f"{prefix}out[q, :]": relative_error(out[self._queries], self._truth["out[q, :]"]),
            f"{prefix}out[:, d]": relative_error(out[:, self._documents], self._truth["out[:, d]"]),
        }

    def _gradient_errors(self, gradients: tuple[Tensor, ...]) -> dict[str, float]:
        dqueries, ddocuments = gradients
        rows = ddocuments.flatten(0, -2)
        chosen = torch.cat([rows[self._starts[d] : self._starts[d + 1]] for d in self._documents.tolist()])
        return {
            "dqueries": part_error(dqueries, dqueries[self._queries], self._truth["dqueries"]),
            "ddocuments": part_error(ddocuments, chosen, self._truth["ddocuments"]),
        }
