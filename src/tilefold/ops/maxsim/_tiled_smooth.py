"""The smooth maximum on tiles: peaks and sums of exponentials over a document's tokens, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops.maxsim._problem import Problem
from tilefold.ops.maxsim._sides import Side
from tilefold.ops.maxsim._tiled_winners import add_rows
from tilefold.ops.maxsim._walk import Meeting, Part, Tile, walk


class Sums(NamedTuple):
    """``total = sum_j exp((s_j - peak) / temperature)`` over a document's tokens."""

    peak: Tensor  # [n, C]
    total: Tensor
    tiles: list[tuple[Tile, Tensor]]  # of documents that are not cut, each with its addends [n, L, C]


def smooth_sums(meeting: Meeting, temperature: float, masked: Tensor | None) -> Sums:
    """The sums of a meeting; ``masked`` ``[n, 1]`` tokens of each document take part with a similarity of 0.

    Differences to the peak are taken before anything is divided, so that no temperature is too small.
    """
    temperature = _usable(temperature, meeting.queries.dtype)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    tiles: list[tuple[Tile, Tensor]] = []
    first = 0
    for tile in meeting.tiles():
        zeros = None if masked is None or (meeting.cut and found) else masked[first : first + tile.rows.size(0)]
        sims = _similarities(tile)
        highest = sims.amax(dim=1)
        if zeros is not None:
            highest = torch.where(zeros > 0, highest.clamp_min(0), highest)
        peak = _finite(highest)
        weights = _weights(sims, peak, temperature)
        total = weights.sum(dim=1)
        if zeros is not None:
            below = torch.where(zeros > 0, -peak, float("-inf"))  # at most 0 where it counts
            total = total + zeros * (below / temperature).exp_()
        found.append((highest, peak, total))
        if not meeting.cut:
            tiles.append((tile, weights))
            first += tile.rows.size(0)
    if not meeting.cut:
        _, peaks, totals = zip(*found, strict=True)
        return Sums(torch.cat(peaks), torch.cat(totals), tiles)
    top, joint, total = found[0]
    for highest, peak, more in found[1:]:
        top, before = torch.maximum(top, highest), joint
        joint = _finite(top)
        total = _moved(total, before, joint, temperature) + _moved(more, peak, joint, temperature)
    return Sums(joint, total, [])


def _similarities(tile: Tile) -> Tensor:
    """``[n, L, C]``, minus infinity at places past a document's end."""
    sims = tile.similarities
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
    masked, temperature = documents.masked(problem.mask_zero), problem.temperature
    query_of_row = torch.arange(problem.n_queries, device=grad.device).repeat_interleave(queries.sizes)
    for meeting in walk(problem, queries, documents):
        owner, exists, vectors = meeting.owner, meeting.exists, meeting.queries
        if isinstance(owner, Part):
            weight = grad.T[meeting.items][:, query_of_row[meeting.rows]]
        else:
            weight = grad.reshape(-1)[owner.items][:, None].expand(owner.rows.shape)
            weight = weight if exists is None else weight.masked_fill(~exists, 0)
        sums = smooth_sums(meeting, temperature, None if masked is None else masked[meeting.documents])
        scale = (weight / torch.where(sums.total == 0, 1, sums.total))[:, None]
        first = 0
        for tile, share in _again(meeting.tiles(), sums.peak, temperature) if meeting.cut else sums.tiles:
            share.mul_(scale[first : first + tile.rows.size(0)])
            if dqueries is not None:
                tokens = tile.tokens
                if tokens is None and tile.span is not None:
                    tokens = documents.kept(tile.span.start, tile.span.stop).view(*tile.rows.shape, -1)
                elif tokens is None:
                    tokens = documents.take(tile.rows)
                if vectors.dim() == 2:
                    rows = meeting.rows if isinstance(owner, Part) else owner.rows[0]
                    dqueries[rows] += share.flatten(0, 1).T @ tokens.flatten(0, 1)
                elif not isinstance(owner, Part):
                    _add(dqueries, owner.rows, exists, share.mT @ tokens, False)
            if ddocuments is not None:
                found = share @ vectors
                if tile.span is None:
                    _add(ddocuments, tile.rows, tile.exists, found, problem.index is None)
                else:
                    ddocuments[tile.span] += found.flatten(0, 1)
            first += 0 if meeting.cut else tile.rows.size(0)


def _again(tiles: Iterator[Tile], peak: Tensor, temperature: float) -> Iterator[tuple[Tile, Tensor]]:
    for tile in tiles:
        yield tile, _weights(_similarities(tile), peak, _usable(temperature, peak.dtype))


def _add(out: Tensor, rows: Tensor, exists: Tensor | None, values: Tensor, differ: bool) -> None:
    """``out[rows] += values`` where they exist; ``differ`` says that no row comes twice."""
    rows, values = (rows.view(-1), values.flatten(0, 1)) if exists is None else (rows[exists], values[exists])
    if differ:
        out[rows] += values
    else:
        add_rows(out, rows, values)
