"""XTR scores in torch operations on tiles of similarities, on any device.

For a part of the query tokens the documents stream by twice reduced: into the largest similarities of every query token
so far, whose last is the threshold in the end, and into the maximum and winner of every document. Gradients are those
of the maximum, of the winners that passed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops.maxsim._blocks import Side, blocks, sides
from tilefold.ops.maxsim._problem import Problem, no_winner, wide_dtype

# query tokens of a tile, and its similarities, on the CPU and elsewhere: long rows keep the searches of the largest few
CPU_TILE = (1024, 1 << 23)
DEVICE_TILE = (4096, 1 << 26)


def forward(problem: Problem, top_k: int, impute: bool, with_saved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scores ``[Nq, Nd]``; winners that count (empty unless asked for), and what the sums were divided by."""
    queries, documents = sides(problem)
    device, dtype = problem.queries.device, wide_dtype(problem.queries.dtype)
    n_queries, n_documents, rows = problem.n_queries, problem.n_documents, queries.rows.size(0)
    columns = torch.arange(rows, device=device) if queries.index is None else queries.index
    value = torch.zeros(n_documents, rows, dtype=dtype, device=device)
    found = torch.zeros(n_documents, rows, dtype=torch.bool, device=device)
    nothing = no_winner(problem.saved_dtype)
    saved = torch.full(problem.saved_shape if with_saved else (0, 0), nothing, dtype=torch.int32, device=device)
    width, elements = CPU_TILE if device.type == "cpu" else DEVICE_TILE
    for c0 in range(0, columns.numel(), width):
        chosen = columns[c0 : c0 + width]
        best, winner, threshold = _maxima(queries.take(chosen), documents, top_k, elements)
        retrieved = ((best >= threshold) | best.isnan()) & (documents.counts > 0)
        imputed = torch.where(documents.counts > 0, threshold, 0) if impute else threshold.new_zeros(())
        value[:, chosen] = torch.where(retrieved, best, imputed).T
        found[:, chosen] = retrieved.T
        if with_saved:
            saved[:, chosen] = winner.masked_fill_(~retrieved, nothing).T
    scores, counts = _sums(queries, value, found, n_queries)
    divisor = queries.counts.to(dtype)[:, None].expand_as(counts) if impute else counts
    divisor = divisor.clamp(min=1)
    return scores / divisor, saved.to(problem.saved_dtype), divisor.contiguous()


def _maxima(tokens: Tensor, documents: Side, top_k: int, elements: int) -> tuple[Tensor, Tensor, Tensor]:
    """``[C, Nd]`` maxima and winners of ``[C, D]`` query tokens, and ``[C, 1]`` the ``top_k``-th similarity."""
    device, count = tokens.device, tokens.size(0)
    best = tokens.new_full((count, documents.starts.numel()), -math.inf)
    winner = torch.zeros(best.shape, dtype=torch.int32, device=device)
    largest = tokens.new_empty(count, 0)
    every = torch.arange(documents.starts.numel(), device=device)
    for block in blocks(documents, every, count, False, elements):
        sims = tokens @ block.tokens.flatten(0, 1).T  # [C, n * L]
        if block.exists is not None:
            sims.masked_fill_(~block.exists.view(1, -1), -math.inf)
        top = sims.topk(min(top_k, sims.size(1)), dim=1).values  # NaN is the largest
        largest = top if largest.size(1) == 0 else torch.cat([largest, top], dim=1)
        if largest.size(1) > top_k:
            largest = largest.topk(top_k, dim=1).values
        value, place = sims.view(count, *block.rows.shape).max(dim=2)
        best[:, block.items] = value
        position = block.rows.gather(1, place.T) - documents.starts[block.documents][:, None]
        winner[:, block.items] = position.T.int()
    enough = largest.size(1) >= top_k
    threshold = largest[:, top_k - 1 : top_k] if enough else tokens.new_full((count, 1), -math.inf)
    return best, winner, threshold


def _sums(queries: Side, value: Tensor, found: Tensor, n_queries: int) -> tuple[Tensor, Tensor]:
    """``[Nq, Nd]`` sums over each query's kept tokens of ``[Nd, Tq]`` values, and how many were found."""
    every = torch.arange(n_queries, device=value.device)
    member, exists = queries.kept_rows(every, int(queries.counts.max()) if n_queries else 0)  # [Nq, longest]
    step = max(1, (1 << 24) // max(member.numel(), 1))
    sums, counts = [], []
    for start in range(0, value.size(0), step):
        part = slice(start, start + step)
        sums.append(torch.where(exists, value[part, member], 0).sum(dim=2).T)
        counts.append((found[part, member] & exists).sum(dim=2).T)
    return torch.cat(sums, dim=1), torch.cat(counts, dim=1).to(value.dtype)
