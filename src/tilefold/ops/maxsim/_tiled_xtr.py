"""XTR scores in torch operations on tiles of similarities, on any device.

For a part of the query tokens the documents stream by twice reduced: into the largest similarities of every query token
so far, whose last is the threshold in the end, and into the maximum and winner of every document. Gradients are those
of the maximum, of the winners that passed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops._shared.impl import host_may_read
from tilefold.ops.maxsim import _tiled, tiles
from tilefold.ops.maxsim._problem import (
    MaxSimTensors,
    Problem,
    XtrOptions,
    XtrSaved,
    check_values,
    wide_dtype,
    winner_bits,
)
from tilefold.ops.maxsim._sides import Side, sides
from tilefold.ops.maxsim._walk import Part, chunks, groups, parts


def forward(tensors: MaxSimTensors, options: XtrOptions, training: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scores ``[Nq, Nd]``; winners that count where ``training``, and what the sums were divided by."""
    if host_may_read(tensors.queries.device, "tiled"):
        check_values(tensors)
    problem, (top_k, impute, _) = Problem.of(tensors, options.maximum), options
    device, dtype = problem.queries.device, wide_dtype(problem.queries.dtype)
    scores, counts = (torch.zeros(problem.score_shape, dtype=dtype, device=device) for _ in range(2))
    if problem.empty:
        return scores, None, counts.fill_(1)
    queries, documents = sides(problem)
    bits = torch.int16 if problem.saved_dtype == torch.uint16 else problem.saved_dtype
    saved = torch.full(problem.saved_shape if training else (0, 0), -1, dtype=bits, device=device)
    has_tokens = documents.counts > 0
    width, elements = tiles.DEVICE_TILE
    if device.type == "cpu":
        width, elements = tiles.CPU_TILE
        width = min(
            width, tiles.column_limit(queries.rows.size(1)), max(1, tiles.MAXIMA // max(problem.n_documents, 1))
        )
    for part in parts(queries, width):
        best, winner, threshold = _maxima(part, documents, top_k, elements)
        retrieved = ((best >= threshold) | best.isnan()) & has_tokens
        imputed = torch.where(has_tokens, threshold, 0) if impute else threshold.new_zeros(())
        part.add_sums(torch.where(retrieved, best, imputed).T, scores, slice(None))
        if not impute:
            part.add_sums(retrieved.T.to(dtype), counts, slice(None))
        if training:
            saved[:, part.columns] = winner_bits(winner, problem.saved_dtype).masked_fill_(~retrieved, -1).T
    if impute:
        counts += queries.counts[:, None]
    divisor = counts.clamp_(min=1)
    return scores.div_(divisor), saved.view(problem.saved_dtype) if training else None, divisor


def backward(
    dscores: Tensor, saved: XtrSaved, options: XtrOptions, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents: those of the maximum."""
    return _tiled.backward(dscores / saved.divisor, saved.maximum, options.maximum, needs)


def _maxima(part: Part, documents: Side, top_k: int, elements: int) -> tuple[Tensor, Tensor, Tensor]:
    """``[C, Nd]`` maxima and winners of the query tokens of a part, and ``[C, 1]`` their ``top_k``-th similarities."""
    tokens = part.tokens()
    count, offsets = tokens.size(0), [*documents.offsets.tolist(), int(documents.counts.sum())]
    budget = max(1, min(documents.rows_at_a_time(), elements // count))
    best = tokens.new_full((count, len(offsets) - 1), -math.inf)
    winner = torch.zeros(best.shape, dtype=torch.int32, device=tokens.device)
    largest = tokens.new_empty(count, 0)
    slabs = (
        (first, last, range(start, min(start + budget, offsets[last])))
        for first, last in chunks(offsets, budget, budget)
        for start in range(offsets[first], offsets[last], budget)  # a long document is cut
    )
    for first, last, rows in slabs:
        sims = tokens @ documents.kept(rows.start, rows.stop).T  # [C, rows]
        top = sims.topk(min(top_k, len(rows)), dim=1).values  # NaN is the largest
        largest = torch.cat([largest, top], dim=1)
        if top.size(1) < largest.size(1) >= top_k:  # the last of them is to be the threshold
            largest = largest.topk(top_k, dim=1).values
        if len(rows) < offsets[last] - offsets[first]:
            value, place = sims.max(dim=1)
            position = (documents.at(place + rows.start) - documents.starts[first]).int()
            if rows.start > offsets[first]:
                value, position = _tiled.merged(best[:, first], winner[:, first], value, position)
            best[:, first], winner[:, first] = value, position
            continue
        for items, places, _, span in groups(documents, first, last, budget):
            found = (
                sims
                if span is not None and len(rows) == places.numel()
                else sims.index_select(1, (places - rows.start).view(-1))
            )
            value, at = found.view(count, *places.shape).max(dim=2)
            best[:, items] = value
            winner[:, items] = (documents.at(places).gather(1, at.T) - documents.starts[items][:, None]).T.int()
    enough = largest.size(1) >= top_k
    threshold = largest[:, top_k - 1 : top_k] if enough else tokens.new_full((count, 1), -math.inf)
    return best, winner, threshold
