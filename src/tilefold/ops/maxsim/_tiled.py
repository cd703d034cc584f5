"""MaxSim in torch operations on tiles: the CPU path, and the fallback on any device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.impl import host_may_read
from tilefold.ops._shared.winners import max_over_tokens
from tilefold.ops.maxsim._problem import (
    MaxSimOptions,
    MaxSimSaved,
    MaxSimTensors,
    Problem,
    check_values,
    no_winners,
    saved_place,
    wide_dtype,
    winner_bits,
)
from tilefold.ops.maxsim._tiled_winners import add_rows, all_pairs, some_pairs
from tilefold.ops.maxsim._walk import Meeting, Part, Tile, crossed, walk
from tilefold.ops.maxsim.quantized import quantize_rows
from tilefold.ops.maxsim.tiles import Side, inverse_norms, pairs, row_limit, sides


def forward(
    tensors: MaxSimTensors,
    options: MaxSimOptions,
    training: bool,
) -> tuple[Tensor | None, ...]:
    """Scores, and winners or smooth maxima where ``training``."""
    if host_may_read(tensors.queries.device, "tiled"):
        check_values(tensors)
    problem = Problem.of(tensors, options)
    scores = problem.queries.new_zeros(problem.score_shape, dtype=wide_dtype(problem.queries.dtype))
    if problem.empty:
        return scores, None, None, None, None
    if problem.documents.dtype == torch.int8:
        found = [
            quantize_rows(x, torch.int8)
            for x in torch.split(problem.queries, row_limit(problem.queries.size(1)))
        ]
        rows, scales = (
            torch.cat(each) if len(found) > 1 else each[0] for each in zip(*found, strict=True)
        )
        problem = replace(problem, queries=rows, query_scale=scales)
    queries, documents = sides(problem)
    saved = no_winners(problem, queries.rows, training)
    zeros = documents.masked(problem.mask_zero)
    saves_winners = training and not problem.temperature
    first_masked = (
        documents.first_masked()[:, None] if saves_winners and zeros is not None else None
    )
    for meeting in walk(problem, queries, documents):
        masked = None if zeros is None else zeros[meeting.documents]
        if problem.temperature:
            sums = _smooth_sums(meeting, problem.temperature, masked)
            value = sums.peak + problem.temperature * sums.total.log()
            state = value if training else None
        else:
            value, state = _maximum(problem, documents, meeting, training, masked, first_masked)
        owner, exists = meeting.owner, meeting.exists
        if isinstance(owner, Part):
            owner.add_sums(value, scores, meeting.items)
            if state is not None:
                saved[crossed(meeting.items, meeting.rows)] = state
            continue
        scores.view(-1)[owner.items] += (
            value if exists is None else value.masked_fill_(~exists, 0)
        ).sum(dim=1)
        if state is not None:
            place = saved_place(
                problem,
                owner.items[:, None],
                owner.rows,
                queries.starts[owner.query][:, None],
            )
            if exists is not None:
                place, state = place[exists], state[exists]
            saved.view(-1)[place] = state
    if problem.temperature and problem.mask_zero:
        _add_zeros_alone(problem, queries, documents, scores)
    if options.mean:
        scores.div_(problem.divisor)
    return scores, saved.view(problem.saved_dtype) if training else None, None, None, None


def backward(
    dscores: Tensor,
    saved: MaxSimSaved,
    options: MaxSimOptions,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, in their shapes and dtypes."""
    problem, given = Problem.of(saved.tensors, options), (saved.queries, saved.documents)
    dtype = wide_dtype(problem.queries.dtype)
    sums = [
        torch.zeros(rows.shape, dtype=dtype, device=dscores.device) if need else None
        for rows, need in zip((problem.queries, problem.documents), needs, strict=True)
    ]
    if not problem.empty and saved.saved is not None:
        both = sides(problem)
        grad = (dscores / problem.divisor if options.mean else dscores).to(dtype)
        if problem.temperature:
            _add_smooth(problem, *both, grad, *sums)
        elif problem.pairing == "all":
            all_pairs(*both, grad, saved.saved, *sums)
        else:
            some_pairs(problem, *both, grad, saved.saved, *sums)
        if problem.normalize:
            for side, total in zip(both, sums, strict=True):
                if total is not None:
                    _project(side, total)
    found = [
        None if x is None else x.reshape(rows.shape).to(rows.dtype)
        for x, rows in zip(sums, given, strict=True)
    ]
    return found[0], found[1]


def _project(side: Side, grad: Tensor) -> None:
    """Make the gradients of rows of those of unit vectors. Masked rows have none."""
    step = row_limit(grad.size(1))
    for start in range(0, grad.size(0) if side.index is None else side.index.numel(), step):
        here = (
            slice(start, start + step) if side.index is None else side.index[start : start + step]
        )
        rows, found = side.rows[here], grad[here]
        scale = inverse_norms(rows)
        unit = rows.to(grad.dtype) * scale
        grad[here] = scale * (found - unit * (unit * found).sum(dim=1, keepdim=True))


def _add_zeros_alone(problem: Problem, queries: Side, documents: Side, scores: Tensor) -> None:
    """The smooth maxima of documents with masked tokens only, each of which takes part with a
    similarity of 0.
    """
    value = problem.temperature * documents.sizes.clamp(min=1).to(scores.dtype).log()
    value = torch.where(documents.counts == 0, value, 0)
    count = queries.counts.to(scores.dtype)
    if problem.pairing == "all":
        scores.addr_(count, value)
    else:
        query_of, document_of = pairs(problem)
        scores.view(-1).add_(count[query_of] * value[document_of])


def _maximum(
    problem: Problem,
    documents: Side,
    meeting: Meeting,
    saving: bool,
    masked: Tensor | None,
    masked_from: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """``[n, C]`` maxima of a meeting over its documents' tokens, and their winners where
    ``saving``.
    """
    best, winner = _maxima(meeting, saving)
    if not saving:
        return (best if masked is None else torch.where((masked > 0) & (best < 0), 0, best)), None
    position = winner - documents.starts[meeting.documents][:, None]
    state = winner_bits(position, problem.saved_dtype)
    if masked is None or masked_from is None:
        return best, state
    earlier = masked_from[meeting.documents] < position
    lost = (masked > 0) & ((best < 0) | ((best == 0) & earlier))
    return best.masked_fill(lost, 0), state.masked_fill_(lost, -1)


def _maxima(meeting: Meeting, with_winners: bool) -> tuple[Tensor, Tensor]:
    """``[n, C]`` maxima over the tokens of each document, and the row of the first that holds them;
    NaN is the largest.

    A place past a document's end is its last token again: neither the maximum nor the winner's row
    can differ.
    """
    values, rows = [], []
    for tile in meeting.tiles():
        value, row = max_over_tokens(tile.similarities, with_winners)
        values.append(value)
        rows.append(tile.rows.gather(1, row) if with_winners else row)
    if not meeting.cut:
        return (values[0], rows[0]) if len(values) == 1 else (torch.cat(values), torch.cat(rows))
    best, winner = values[0], rows[0]
    for value, row in zip(values[1:], rows[1:], strict=True):
        best, winner = (
            merged(best, winner, value, row)
            if with_winners
            else (torch.maximum(best, value), winner)
        )
    return best, winner


def merged(best: Tensor, winner: Tensor, value: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Maxima and winners of tokens, and of those that follow on them."""
    better = (value > best) | (value.isnan() & ~best.isnan())
    return torch.where(better, value, best), torch.where(better, row, winner)


# ---- the smooth maximum: peaks and sums of exponentials over a document's tokens, and its gradient


class _Sums(NamedTuple):
    """``total = sum_j exp((s_j - peak) / temperature)`` over a document's tokens."""

    peak: Tensor  # [n, C]
    total: Tensor
    tiles: list[
        tuple[Tile, Tensor]
    ]  # of documents that are not cut, each with its addends [n, L, C]


def _smooth_sums(meeting: Meeting, temperature: float, masked: Tensor | None) -> _Sums:
    """The sums of a meeting; ``masked`` ``[n, 1]`` tokens of each document take part with a
    similarity of 0.

    Differences to the peak are taken before anything is divided, so that no temperature is too
    small.
    """
    temperature = _usable(temperature, meeting.queries.dtype)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    tiles: list[tuple[Tile, Tensor]] = []
    first = 0
    for tile in meeting.tiles():
        zeros = (
            None
            if masked is None or (meeting.cut and found)
            else masked[first : first + tile.rows.size(0)]
        )
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
        return _Sums(torch.cat(peaks), torch.cat(totals), tiles)
    top, joint, total = found[0]
    for highest, peak, more in found[1:]:
        top, before = torch.maximum(top, highest), joint
        joint = _finite(top)
        total = _moved(total, before, joint, temperature) + _moved(more, peak, joint, temperature)
    return _Sums(joint, total, [])


def _similarities(tile: Tile) -> Tensor:
    """``[n, L, C]``, minus infinity at places past a document's end."""
    sims = tile.similarities
    return (
        sims if tile.exists is None else sims.masked_fill_(~tile.exists[:, :, None], float("-inf"))
    )


def _usable(temperature: float, dtype: torch.dtype) -> float:
    return max(temperature, torch.finfo(dtype).tiny)


def _finite(top: Tensor) -> Tensor:
    return torch.where(top.isfinite(), top, 0)


def _weights(sims: Tensor, peak: Tensor, temperature: float) -> Tensor:
    scaled = sims.sub_(peak[:, None]).div_(temperature)
    # beside a sum of at least 1, what exp() has no normal number for is nothing, and subnormal ones
    # are very slow
    return torch.threshold_(scaled, math.log(torch.finfo(sims.dtype).tiny), float("-inf")).exp_()


def _moved(total: Tensor, peak: Tensor, joint: Tensor, temperature: float) -> Tensor:
    """A sum measured from another peak."""
    return torch.where(total == 0, 0, total * ((peak - joint) / temperature).exp())


def _add_smooth(
    problem: Problem,
    queries: Side,
    documents: Side,
    grad: Tensor,
    dqueries: Tensor | None,
    ddocuments: Tensor | None,
) -> None:
    """Add the gradients of both sides to ``dqueries`` and ``ddocuments``, from softmax weights of
    each tile made again.

    The saved maxima are rounded, and their rounding, divided by a small temperature, would be an
    exponent.
    """
    masked, temperature = documents.masked(problem.mask_zero), problem.temperature
    query_of_row = torch.arange(problem.n_queries, device=grad.device).repeat_interleave(
        queries.sizes,
    )
    for meeting in walk(problem, queries, documents):
        owner, exists, vectors = meeting.owner, meeting.exists, meeting.queries
        if isinstance(owner, Part):
            weight = grad.T[meeting.items][:, query_of_row[meeting.rows]]
        else:
            weight = grad.reshape(-1)[owner.items][:, None].expand(owner.rows.shape)
            weight = weight if exists is None else weight.masked_fill(~exists, 0)
        sums = _smooth_sums(
            meeting,
            temperature,
            None if masked is None else masked[meeting.documents],
        )
        scale = (weight / torch.where(sums.total == 0, 1, sums.total))[:, None]
        first = 0
        for tile, share in (
            _again(meeting.tiles(), sums.peak, temperature) if meeting.cut else sums.tiles
        ):
            share.mul_(scale[first : first + tile.rows.size(0)])
            if dqueries is not None:
                tokens = tile.tokens
                if tokens is None and tile.span is not None:
                    tokens = documents.kept(tile.span.start, tile.span.stop).view(
                        *tile.rows.shape,
                        -1,
                    )
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


def _again(
    tiles: Iterator[Tile],
    peak: Tensor,
    temperature: float,
) -> Iterator[tuple[Tile, Tensor]]:
    for tile in tiles:
        yield tile, _weights(_similarities(tile), peak, _usable(temperature, peak.dtype))


def _add(out: Tensor, rows: Tensor, exists: Tensor | None, values: Tensor, differ: bool) -> None:
    """``out[rows] += values`` where they exist; ``differ`` says that no row comes twice."""
    rows, values = (
        (rows.view(-1), values.flatten(0, 1)) if exists is None else (rows[exists], values[exists])
    )
    if differ:
        out[rows] += values
    else:
        add_rows(out, values, rows)
