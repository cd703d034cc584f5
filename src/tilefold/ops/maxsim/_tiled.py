"""MaxSim in torch operations on tiles: the CPU path, and the fallback on any device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tilefold.ops._shared.impl import host_may_read
from tilefold.ops._shared.winners import max_over_tokens
from tilefold.ops.maxsim import _tiled_smooth, _tiled_winners
from tilefold.ops.maxsim._problem import (
    MaxSimOptions,
    MaxSimSaved,
    MaxSimTensors,
    Problem,
    check_values,
    saved_place,
    wide_dtype,
    winner_bits,
)
from tilefold.ops.maxsim._sides import Side, inverse_norms, pairs, sides
from tilefold.ops.maxsim._walk import Meeting, Part, crossed, walk
from tilefold.ops.maxsim.quantized import quantize_rows
from tilefold.ops.maxsim.tiles import row_limit


def forward(tensors: MaxSimTensors, options: MaxSimOptions, training: bool) -> tuple[Tensor | None, ...]:
    """Scores, and winners or smooth maxima where ``training``."""
    if host_may_read(tensors.queries.device, "tiled"):
        check_values(tensors)
    problem = Problem.of(tensors, options)
    dtype, device = wide_dtype(problem.queries.dtype), problem.queries.device
    scores = torch.zeros(problem.score_shape, dtype=dtype, device=device)
    if problem.empty:
        return scores, None, None, None, None
    if problem.documents.dtype == torch.int8:
        found = [quantize_rows(x, torch.int8) for x in torch.split(problem.queries, row_limit(problem.queries.size(1)))]
        rows, scales = (torch.cat(each) if len(found) > 1 else each[0] for each in zip(*found, strict=True))
        problem = replace(problem, queries=rows, query_scale=scales)
    queries, documents = sides(problem)
    shape = problem.saved_shape if training else (0, 0)
    if problem.temperature:
        saved = torch.full(shape, float("inf"), dtype=dtype, device=device)
    else:  # few operations know uint16: its bits are written as int16, and -1 stands for "no winner" in any width
        bits = torch.int16 if problem.saved_dtype == torch.uint16 else problem.saved_dtype
        saved = torch.full(shape, -1, dtype=bits, device=device)
    reduce = _Reduction(problem, documents, training)
    for meeting in walk(problem, queries, documents):
        value, state = reduce(meeting)
        owner, exists = meeting.owner, meeting.exists
        if isinstance(owner, Part):
            owner.add_sums(value, scores, meeting.items)
            if state is not None:
                saved[crossed(meeting.items, meeting.rows)] = state
            continue
        scores.view(-1)[owner.items] += (value if exists is None else value.masked_fill_(~exists, 0)).sum(dim=1)
        if state is not None:
            place = saved_place(problem, owner.items[:, None], owner.rows, queries.starts[owner.query][:, None])
            if exists is not None:
                place, state = place[exists], state[exists]
            saved.view(-1)[place] = state
    if problem.temperature and problem.mask_zero:
        _add_zeros_alone(problem, queries, documents, scores)
    if options.mean:
        scores.div_(problem.divisor)
    return scores, saved.view(problem.saved_dtype) if training else None, None, None, None


def backward(
    dscores: Tensor, saved: MaxSimSaved, options: MaxSimOptions, needs: tuple[bool, ...]
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
            _tiled_smooth.backward(problem, *both, grad, *sums)
        else:
            _tiled_winners.backward(problem, *both, grad, saved.saved, *sums)
        if problem.normalize:
            for side, total in zip(both, sums, strict=True):
                if total is not None:
                    _project(side, total)
    found = [None if x is None else x.reshape(rows.shape).to(rows.dtype) for x, rows in zip(sums, given, strict=True)]
    return found[0], found[1]


def _project(side: Side, grad: Tensor) -> None:
    """Make the gradients of rows of those of unit vectors. Masked rows have none."""
    step = row_limit(grad.size(1))
    for start in range(0, grad.size(0) if side.index is None else side.index.numel(), step):
        here = slice(start, start + step) if side.index is None else side.index[start : start + step]
        rows, found = side.rows[here], grad[here]
        scale = inverse_norms(rows)
        unit = rows.to(grad.dtype) * scale
        grad[here] = scale * (found - unit * (unit * found).sum(dim=1, keepdim=True))


def _add_zeros_alone(problem: Problem, queries: Side, documents: Side, scores: Tensor) -> None:
    """The smooth maxima of documents with masked tokens only, each of which takes part with a similarity of 0."""
    value = problem.temperature * documents.sizes.clamp(min=1).to(scores.dtype).log()
    value = torch.where(documents.counts == 0, value, 0)
    count = queries.counts.to(scores.dtype)
    if problem.pairing == "all":
        scores.addr_(count, value)
    else:
        query_of, document_of = pairs(problem)
        scores.view(-1).add_(count[query_of] * value[document_of])


class _Reduction:
    """``[n, C]`` maxima of a meeting over its documents' tokens, and what backward needs of each where ``saving``."""

    def __init__(self, problem: Problem, documents: Side, saving: bool) -> None:
        self.problem, self.documents, self.saving = problem, documents, saving
        self.masked = documents.masked(problem.mask_zero)
        winners = saving and not problem.temperature and self.masked is not None
        self.first_masked = documents.first_masked()[:, None] if winners else None

    def __call__(self, meeting: Meeting) -> tuple[Tensor, Tensor | None]:
        masked = None if self.masked is None else self.masked[meeting.documents]
        temperature = self.problem.temperature
        if temperature:
            sums = _tiled_smooth.smooth_sums(meeting, temperature, masked)
            best = sums.peak + temperature * sums.total.log()
            return best, best if self.saving else None
        best, winner = _maxima(meeting, self.saving)
        if not self.saving:
            return (best if masked is None else torch.where((masked > 0) & (best < 0), 0, best)), None
        position = winner - self.documents.starts[meeting.documents][:, None]
        state = winner_bits(position, self.problem.saved_dtype)
        if masked is None or self.first_masked is None:
            return best, state
        earlier = self.first_masked[meeting.documents] < position
        lost = (masked > 0) & ((best < 0) | ((best == 0) & earlier))
        return best.masked_fill(lost, 0), state.masked_fill_(lost, -1)


def _maxima(meeting: Meeting, with_winners: bool) -> tuple[Tensor, Tensor]:
    """``[n, C]`` maxima over the tokens of each document, and the row of the first that holds them; NaN is the largest.

    A place past a document's end is its last token again: neither the maximum nor the winner's row can differ.
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
        best, winner = merged(best, winner, value, row) if with_winners else (torch.maximum(best, value), winner)
    return best, winner


def merged(best: Tensor, winner: Tensor, value: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Maxima and winners of tokens, and of those that follow on them."""
    better = (value > best) | (value.isnan() & ~best.isnan())
    return torch.where(better, value, best), torch.where(better, row, winner)
