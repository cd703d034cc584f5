"""Ground truth of the LSR head in fp64, on parts of the problem small enough to compute exactly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilefold.bench.gate import GateResult, budget_of, check_phases, is_complete, part_error, relative_error
from tilefold.bench.lsr_head.inputs import LSRHeadInputs
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import BenchCase
from tilefold.ops import lsr_head

COLUMNS = 256  # vocabulary entries that are checked for every sequence
SEQUENCES = 2  # sequences that are checked for the whole vocabulary
CHUNK_BYTES = 2**27  # fp64 logits held at a time
AMBIGUOUS = 2e-5  # fp32 evaluation order moves a logit by less than this


class LSRHeadGate:
    """Compare an implementation with the specification in fp64.

    Two slices are exact: some vocabulary entries over all sequences (scores, rows of dweight, dbias), and a few
    sequences over the whole vocabulary (scores, dhidden). Everything else must be finite.

    A winner is undefined in floating point where two logits, or a logit and zero, differ by less than evaluation order
    does. The gate sets ``inputs.grad_output`` to zero at such entries of the slices, so that what is left has one
    answer and the budget can be tight.
    """

    def __init__(self, case: BenchCase, inputs: LSRHeadInputs) -> None:
        self._case = case
        self._inputs = inputs
        B, V = inputs.grad_output.shape
        device = inputs.hidden.device
        spread = torch.linspace(0, V - 1, min(COLUMNS, V), dtype=torch.float64, device=device)
        self._columns = spread.round().long()
        self._sequences = torch.tensor(sorted({0, B - 1})[:SEQUENCES], device=device)
        self._valid = inputs.attention_mask.bool()
        every = torch.arange(B, device=device)
        for rows, columns in [(every, self._columns), *((self._sequences, c) for c in self._chunks())]:
            self._drop_ambiguous(rows, columns)
        self._truth = self._reference_columns() | self._reference_sequences()

    def _chunks(self) -> Iterator[Tensor]:
        tokens = self._sequences.numel() * self._inputs.hidden.size(1)
        width = max(1, CHUNK_BYTES // (8 * tokens))
        every = torch.arange(self._inputs.weight.size(0), device=self._inputs.weight.device)
        yield from torch.split(every, width)

    def _slice(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """fp64 leaves ``hidden[rows]``, ``weight[columns]``, ``bias[columns]`` and the mask of those rows."""
        inputs = self._inputs
        leaves = [t.detach() for t in (inputs.hidden[rows], inputs.weight[columns], inputs.bias[columns])]
        hidden, weight, bias = (leaf.double().requires_grad_() for leaf in leaves)
        return hidden, weight, bias, self._valid[rows]

    @torch.no_grad()
    def _drop_ambiguous(self, rows: Tensor, columns: Tensor) -> None:
        hidden, weight, bias, valid = self._slice(rows, columns)
        logits = (hidden @ weight.T + bias).masked_fill(~valid[:, :, None], float("-inf"))
        best = logits.topk(min(2, logits.size(1)), dim=1).values
        unclear = best[:, 0].abs() < AMBIGUOUS
        if best.size(1) == 2:
            unclear |= (best[:, 0] - best[:, 1]) < AMBIGUOUS
        grad = self._inputs.grad_output
        grad[rows[:, None], columns[None, :]] = grad[rows[:, None], columns[None, :]].masked_fill(unclear, 0)

    def _reference(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden, weight, bias, valid = self._slice(rows, columns)
        out = lsr_head(hidden, weight, bias, attention_mask=valid, impl="reference")
        grad = self._inputs.grad_output[rows[:, None], columns[None, :]].double()
        return out.detach(), torch.autograd.grad(out, (hidden, weight, bias), grad)

    def _reference_columns(self) -> dict[str, Tensor]:
        every = torch.arange(self._valid.size(0), device=self._valid.device)
        out, (_, dweight, dbias) = self._reference(every, self._columns)
        return {"out[:, v]": out, "dweight": dweight, "dbias": dbias}

    def _reference_sequences(self) -> dict[str, Tensor]:
        parts: list[Tensor] = []
        dhidden: Tensor | None = None
        for columns in self._chunks():
            out, (part, _, _) = self._reference(self._sequences, columns)
            parts.append(out)
            dhidden = part if dhidden is None else dhidden + part
        if dhidden is None:
            raise ValueError("weight must have at least one row to be checked, got shape [0, D].")
        return {"out[b, :]": torch.cat(parts, dim=1), "dhidden": dhidden}

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Run both phases once over poisoned memory and compare."""
        inputs = self._inputs
        poison = (inputs.hidden, inputs.weight, inputs.grad_output)
        errors = check_phases(runnable, poison, self._output_errors, self._gradient_errors)
        return GateResult(errors, budget_of(kind, self._case.dtype))

    def _output_errors(self, out: Tensor, prefix: str) -> dict[str, float]:
        if not is_complete(out, self._inputs.grad_output):
            return {f"{prefix}out": float("inf")}
        return {
            f"{prefix}out[:, v]": relative_error(out[:, self._columns], self._truth["out[:, v]"]),
            f"{prefix}out[b, :]": relative_error(out[self._sequences], self._truth["out[b, :]"]),
        }

    def _gradient_errors(self, gradients: tuple[Tensor, ...]) -> dict[str, float]:
        places = {"dhidden": self._sequences, "dweight": self._columns, "dbias": self._columns}
        return {
            name: part_error(whole, whole[place], self._truth[name])
            for (name, place), whole in zip(places.items(), gradients, strict=True)
        }
