"""The smooth maximum on tiles: peaks and sums of exponentials over a document's tokens, and its gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops.maxsim._blocks import Block, Side, Tile, blocks, column_limit, own_queries, pairs
from tilefold.ops.maxsim._parts import parts, widest
from tilefold.ops.maxsim._problem import Problem
from tilefold.ops.maxsim._tiled_winners import add_rows


class Sums(NamedTuple):
    """``total = sum_j exp((s_j - peak) / temperature)`` over a document's tokens.

    Attributes:
        peak, total: ``[n, C]``.
        weights: ``[n, L, C]`` addends, where the block has one tile.
    """

    peak: Tensor
    total: Tensor
    weights: Tensor | None


def smooth_sums(block: Block, queries: Tensor, temperature: float, masked: Tensor | None) -> Sums:
    """The sums of a block; ``masked`` ``[n, 1]`` tokens of each document take part with a similarity of 0.

    Differences to the peak are taken before anything is divided, so that no temperature is too small.
    """
    temperature = _usable(temperature, queries.dtype)
    found: Sums | None = None
    top = torch.empty(0)
    for tile in block.tiles():
        sims = similarities(tile, queries)
        highest = sims.amax(dim=1)
        if masked is not None and found is None:
            highest = torch.where(masked > 0, highest.clamp_min(0), highest)
        peak = _finite(highest)
        weights = _weights(sims, peak, temperature)
        total = weights.sum(dim=1)
        if masked is not None and found is None:
            zeros = torch.where(masked > 0, -peak, float("-inf"))  # at most 0 where it counts
            total = total + masked * (zeros / temperature).exp_()
        if found is None:
            found, top = Sums(peak, total, weights), highest
            continue
        top = torch.maximum(top, highest)
        joint = _finite(top)
        total = _moved(found.total, found.peak, joint, temperature) + _moved(total, peak, joint, temperature)
        found = Sums(joint, total, None)
    if found is None:
        raise RuntimeError(f"a block must hold a token, got documents of at most {block.longest}.")
    return found


def similarities(tile: Tile, queries: Tensor) -> Tensor:
    """``[n, L, C]``, minus infinity at places past a document's end."""
    sims = tile.tokens @ queries.mT
    return sims if tile.exists is None else sims.masked_fill_(~tile.exists[:, :, None], float("-inf"))


def _usable(temperature: float, dtype: torch.dtype) -> float:
    return max(temperature, torch.finfo(dtype).tiny)


def _finite(top: Tensor) -> Tensor:
    return torch.where(top.isfinite(), top, 0)


def _weights(sims: Tensor, peak: Tensor, temperature: float) -> Tensor:
    scaled = sims.sub_(peak[:, None]).div_(temperature)
    # beside a sum of at least 1, what exp() has no normal number for is nothing, and subnormal ones are very slow
    lowest = math.log(torch.finfo(sims.dtype).tiny)
    return torch.threshold_(scaled, lowest, float("-inf")).exp_()


def _moved(total: Tensor, peak: Tensor, joint: Tensor, temperature: float) -> Tensor:
    """A sum measured from another peak."""
    return torch.where(total == 0, 0, total * ((peak - joint) / temperature).exp())


def backward(
    problem: Problem, queries: Side, documents: Side, grad: Tensor, dqueries: Tensor | None, ddocuments: Tensor | None
) -> None:
    """Add the gradients of both sides to ``dqueries`` and ``ddocuments``, from softmax weights of each tile made again.

    The saved maxima are rounded, and their rounding, divided by a small temperature, would be an exponent.
    """
    walk = _Walk(problem, documents, dqueries, ddocuments)
    if problem.pairing == "all":
        every = torch.arange(problem.n_documents, device=grad.device)
        query_of_row = torch.arange(problem.n_queries, device=grad.device).repeat_interleave(queries.sizes)
        whole = parts(queries, column_limit(queries.rows.size(1)))
        for block in blocks(documents, every, widest(whole)):
            for part in whole:
                weight = grad.T[block.items[:, None], query_of_row[part.columns]]
                walk.add(block, part.columns, None, part.tokens(), weight)
        return
    query_of, document_of = pairs(problem)
    for block in blocks(documents, document_of, queries.counts[query_of]):
        query = query_of[block.items]
        for rows, exists, tokens in own_queries(queries, query):
            weight = grad[block.items][:, None].expand(rows.shape)
            weight = weight if exists is None else weight.masked_fill(~exists, 0)
            walk.add(block, rows[0] if tokens.dim() == 2 else rows, exists, tokens, weight)


class _Walk:
    """Adds up the gradients of one block after the other."""

    def __init__(self, problem: Problem, documents: Side, dqueries: Tensor | None, ddocuments: Tensor | None) -> None:
        masked = problem.mask_zero and documents.index is not None
        self.masked = (documents.sizes - documents.counts)[:, None] if masked else None
        self.temperature = problem.temperature
        self.documents_differ = problem.index is None
        self.dqueries, self.ddocuments = dqueries, ddocuments

    def add(self, block: Block, rows: Tensor | slice, exists: Tensor | None, queries: Tensor, weight: Tensor) -> None:
        """One block and the query tokens ``[C, D]`` or ``[n, C, D]`` of these rows; ``[n, C]`` weights."""
        masked = None if self.masked is None else self.masked[block.documents]
        sums = smooth_sums(block, queries, self.temperature, masked)
        scale = (weight / torch.where(sums.total == 0, 1, sums.total))[:, None]
        for tile in block.tiles():
            share = sums.weights
            if share is None:
                share = _weights(similarities(tile, queries), sums.peak, _usable(self.temperature, queries.dtype))
            share.mul_(scale)
            if self.dqueries is not None:
                if queries.dim() == 2 or isinstance(rows, slice):
                    self.dqueries[rows] += share.flatten(0, 1).T @ tile.tokens.flatten(0, 1)
                else:
                    _add(self.dqueries, rows, exists, share.mT @ tile.tokens, False)
            if self.ddocuments is not None:
                found = share @ queries
                if tile.span is None:
                    _add(self.ddocuments, tile.rows, tile.exists, found, self.documents_differ)
                else:
                    self.ddocuments[tile.span] += found.flatten(0, 1)


def _add(out: Tensor, rows: Tensor, exists: Tensor | None, values: Tensor, differ: bool) -> None:
    """``out[rows] += values`` where they exist; ``differ`` says that no row comes twice."""
    rows, values = (rows.view(-1), values.flatten(0, 1)) if exists is None else (rows[exists], values[exists])
    if differ:
        out[rows] += values
    else:
        add_rows(out, rows, values)
