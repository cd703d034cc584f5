"""Whether the rows that were written are those of the stock encoder, by error budget."""
# ruff: noqa: PLC0415 - sentence-transformers is imported when a case runs

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHECKED = 96  # texts of a case
_FACTOR = 2.0  # over the stock encoder's own error against fp32: products are summed in another order
_FP32 = 2e-4  # of the largest weight, where the stock encoder is the truth itself


@dataclass(frozen=True)
class Verdict:
    """Error of the written rows, what was allowed, and what is wrong otherwise."""

    error: float
    allowed: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the rows may be called equal."""
        return not self.problem and self.error <= self.allowed


class Truth:
    """Rows of the stock model for the first texts, in fp32 and in the model's dtype.

    Args:
        model: a stock SparseEncoder, not accelerated.
        texts: id -> text.
    """

    def __init__(self, model: Any, texts: Mapping[str, str]) -> None:
        self.ids = list(texts)[:CHECKED]
        chosen = [texts[name] for name in self.ids]
        self.half = next(model.parameters()).dtype != torch.float32
        stock = _dense(model, chosen)
        if self.half:
            exact = copy.deepcopy(model).float()
            self.rows = _dense(exact, chosen)
            self.allowed = _FACTOR * float((stock - self.rows).abs().max())
        else:
            self.rows = stock
            self.allowed = _FP32 * float(stock.abs().max())

    def check_written(self, folder: Any, ids: list[str]) -> Verdict:
        """Of a folder of vectors that should hold all `ids`, in this order."""
        from tilefold.retrieval import read_vectors

        vectors = read_vectors(folder)
        if vectors.ids != ids:
            return Verdict(float("nan"), self.allowed, f"expected {len(ids)} ids in their order, got others")
        rows = torch.zeros_like(self.rows)
        for i in range(len(self.ids)):
            terms, weights = vectors.row(i)
            rows[i, torch.from_numpy(terms).long()] = torch.from_numpy(weights)
        return self.check(rows)

    def check(self, rows: Tensor) -> Verdict:
        """Of dense rows ``[CHECKED, V]`` on the CPU."""
        return Verdict(float((rows - self.rows).abs().max()), self.allowed)


def _dense(model: Any, texts: list[str]) -> Tensor:
    """``[N, V]`` fp32 on the CPU."""
    found = model.encode_document(texts, batch_size=8, convert_to_sparse_tensor=False, show_progress_bar=False)
    rows: Tensor = found.float().cpu()
    return rows
