"""The token scatter straight to CSR: the valid tokens sorted by (sequence, id), and what is kept of their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold._csr import csr_tensor
from tilefold.ops._shared.activation import activate
from tilefold.ops.token_scatter._problem import ScatterOptions, ScatterTensors, counted_tokens
from tilefold.ops.token_scatter._segments import group_by_entry


def scatter(tensors: ScatterTensors, options: ScatterOptions, top_k: int | None, min_weight: float) -> Tensor:
    """``[B, V]`` CSR tensor of the scores above ``min_weight``, at most ``top_k`` of each row."""
    tokens, batch, vocab_size = counted_tokens(tensors, options), tensors.batch, options.vocab_size
    groups = group_by_entry(tokens.entry)
    scores = groups.reduce(activate(tokens.weights, options.activation), options.reduce)
    if options.reduce == "max":
        scores = scores.clamp(min=0)  # as against an entry that no token holds; NaN stays
    kept = ~(scores <= min_weight)
    rows, columns = groups.entry[kept] // vocab_size, groups.entry[kept] % vocab_size
    scores = scores[kept]
    if top_k is not None:
        best = _best_of_rows(rows, scores, batch, top_k)
        rows, columns, scores = rows[best], columns[best], scores[best]
    counts = torch.bincount(rows, minlength=batch)
    row_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return csr_tensor(row_starts, columns, scores.to(options.out_dtype), (batch, vocab_size))


def _best_of_rows(rows: Tensor, scores: Tensor, batch: int, top_k: int) -> Tensor:
    """Places of the ``top_k`` largest scores of each row, rising; among equal ones the first, NaN before all."""
    order = scores.sort(descending=True, stable=True).indices
    order = order[rows[order].sort(stable=True).indices]  # by row, then by score
    counts = torch.bincount(rows, minlength=batch)
    starts = counts.cumsum(0) - counts
    rank = torch.arange(order.numel(), device=rows.device) - starts[rows[order]]
    return order[rank < top_k].sort().values
