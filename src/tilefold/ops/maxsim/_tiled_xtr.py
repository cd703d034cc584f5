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
from tilefold.ops.maxsim import _tiled
from tilefold.ops.maxsim._blocks import Side, blocks, column_limit, sides
from tilefold.ops.maxsim._parts import parts
from tilefold.ops.maxsim._problem import (
    MaxSimTensors,
    Problem,
    XtrOptions,
    XtrSaved,
    check_values,
    wide_dtype,
    winner_bits,
)

# query tokens of a tile, and its similarities, on the CPU and elsewhere: long rows keep the searches of the largest few
CPU_TILE = (1024, 1 << 22)
DEVICE_TILE = (4096, 1 << 26)
MAXIMA = 1 << 21  # (query token, document) maxima held at a time on the CPU


def forward(tensors: MaxSimTensors, options: XtrOptions, training: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scores ``[Nq, Nd]``; winners that count where ``training``, and what the sums were divided by."""
    if host_may_read(tensors.queries.device, "tiled"):
        check_values(tensors)
    problem, (top_k, impute, _) = Problem.of(tensors, options.maximum), options
    if problem.empty:
        zeros = torch.zeros(problem.score_shape, dtype=wide_dtype(problem.queries.dtype), device=problem.queries.device)
        return zeros, None, torch.ones_like(zeros)
    queries, documents = sides(problem)
    device, dtype = problem.queries.device, wide_dtype(problem.queries.dtype)
    scores, counts = (torch.zeros(problem.score_shape, dtype=dtype, device=device) for _ in range(2))
    bits = torch.int16 if problem.saved_dtype == torch.uint16 else problem.saved_dtype
    saved = torch.full(problem.saved_shape if training else (0, 0), -1, dtype=bits, device=device)
    has_tokens = documents.counts > 0
    width, elements = DEVICE_TILE
    if device.type == "cpu":
        width, elements = CPU_TILE
        width = min(width, column_limit(queries.rows.size(1)), max(1, MAXIMA // max(problem.n_documents, 1)))
    for part in parts(queries, width):
        best, winner, threshold = _maxima(part.tokens(), documents, top_k, elements)
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


def _maxima(tokens: Tensor, documents: Side, top_k: int, elements: int) -> tuple[Tensor, Tensor, Tensor]:
    """``[C, Nd]`` maxima and winners of ``[C, D]`` query tokens, and ``[C, 1]`` the ``top_k``-th similarity."""
    device, count = tokens.device, tokens.size(0)
    best = tokens.new_full((count, documents.starts.numel()), -math.inf)
    winner = torch.zeros(best.shape, dtype=torch.int32, device=device)
    largest = tokens.new_empty(count, 0)
    every = torch.arange(documents.starts.numel(), device=device)
    for block in blocks(documents, every, count, elements):
        for turn, tile in enumerate(block.tiles()):
            sims = tokens @ tile.tokens.flatten(0, 1).T  # [C, n * L]
            if tile.exists is not None:
                sims.masked_fill_(~tile.exists.view(1, -1), -math.inf)
            top = sims.topk(min(top_k, sims.size(1)), dim=1).values  # NaN is the largest
            if largest.size(1) == 0:
                largest = top
            else:
                largest = torch.cat([largest, top], dim=1)
                if largest.size(1) >= top_k:  # the last of them is to be the threshold
                    largest = largest.topk(top_k, dim=1).values
            value, place = sims.view(count, *tile.rows.shape).max(dim=2)
            position = tile.rows.gather(1, place.T) - documents.starts[block.documents][:, None]
            position = position.T.int()
            if turn:  # of one long document
                before = best[:, block.items]
                better = (value > before) | (value.isnan() & ~before.isnan())
                value = torch.where(better, value, before)
                position = torch.where(better, position, winner[:, block.items])
            best[:, block.items] = value
            winner[:, block.items] = position
    enough = largest.size(1) >= top_k
    threshold = largest[:, top_k - 1 : top_k] if enough else tokens.new_full((count, 1), -math.inf)
    return best, winner, threshold
