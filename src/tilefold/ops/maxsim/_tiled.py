"""MaxSim in torch operations on tiles: the CPU path, and the fallback on any device.

Forward multiplies a block of documents with the query tokens and reduces each tile of similarities at once; backward
of the maximum (:mod:`._tiled_winners`) touches winners only, backward of the smooth maximum (:mod:`._tiled_smooth`)
computes each tile again. Products are taken in at least fp32.

**Scratch.** Whatever the lengths, the layout and the pairing, a call holds at most SCRATCH_BYTES (twice that in fp64)
beyond its inputs and outputs and what backward saves, and BOOKKEEPING_BYTES per token, sequence and pair; gradients of
16-bit inputs also in fp32 before they are rounded, and queries in int8 where the documents are. Tiles and the rows that
are copied for them are bounded in :mod:`._blocks`; a row of more than two million numbers is not cut.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tilefold.ops._shared.impl import host_may_read
from tilefold.ops._shared.winners import max_over_tokens
from tilefold.ops.maxsim import _tiled_maxima, _tiled_smooth, _tiled_winners
from tilefold.ops.maxsim._blocks import Block, Side, blocks, column_limit, inverse_norms, own_queries, row_limit, sides
from tilefold.ops.maxsim._blocks import pairs as pairs_of
from tilefold.ops.maxsim._parts import Part, parts, widest
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
from tilefold.ops.maxsim.quantized import quantize_rows

SCRATCH_BYTES = 96 << 20
BOOKKEEPING_BYTES = 200


def forward(tensors: MaxSimTensors, options: MaxSimOptions, training: bool) -> tuple[Tensor | None, ...]:
    """Scores, and winners or smooth maxima where ``training``."""
    if host_may_read(tensors.queries.device, "tiled"):
        check_values(tensors)
    problem = Problem.of(tensors, options)
    dtype, device = wide_dtype(problem.queries.dtype), problem.queries.device
    if problem.empty:
        return torch.zeros(problem.score_shape, dtype=dtype, device=device), None, None, None, None
    if problem.documents.dtype == torch.int8:
        rows, scales = quantized_rows(problem.queries)
        problem = replace(problem, queries=rows, query_scale=scales)
    queries, documents = sides(problem)
    shape = problem.saved_shape if training else (0, 0)
    if problem.temperature:
        saved = torch.full(shape, float("inf"), dtype=dtype, device=device)
    else:  # few operations know uint16: its bits are written as int16, and -1 stands for "no winner" in any width
        bits = torch.int16 if problem.saved_dtype == torch.uint16 else problem.saved_dtype
        saved = torch.full(shape, -1, dtype=bits, device=device)
    scores = torch.zeros(problem.score_shape, dtype=dtype, device=device)
    reduce = _Reduction(problem, documents, training)
    if problem.pairing == "all":
        every = parts(queries, column_limit(queries.rows.size(1)))
        if training or problem.temperature:
            _all_pairs(problem, reduce, scores, saved, every)
        else:
            _tiled_maxima.scores(problem, documents, every, scores)
    else:
        _some_pairs(problem, queries, reduce, scores.view(-1), saved)
    if problem.temperature and problem.mask_zero:
        _add_zeros_alone(problem, queries, documents, scores if problem.pairing == "all" else scores.view(-1))
    if options.mean:
        scores.div_(problem.divisor)
    return scores, saved.view(problem.saved_dtype) if training else None, None, None, None


def quantized_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of rows ``[T, D]`` in int8, some rows at a time."""
    found = [quantize_rows(part, torch.int8) for part in torch.split(rows, row_limit(rows.size(1)))]
    values, scales = zip(*found, strict=True)
    return (values[0], scales[0]) if len(found) == 1 else (torch.cat(values), torch.cat(scales))


def backward(
    dscores: Tensor, saved: MaxSimSaved, options: MaxSimOptions, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, in their shapes and dtypes."""
    problem, given = Problem.of(saved.tensors, options), (saved.queries, saved.documents)
    dtype, device = wide_dtype(problem.queries.dtype), dscores.device
    dqueries, ddocuments = (
        torch.zeros(rows.shape, dtype=dtype, device=device) if need else None
        for rows, need in zip((problem.queries, problem.documents), needs, strict=True)
    )
    sums = dqueries, ddocuments
    if not problem.empty and saved.saved is not None:
        queries, documents = sides(problem)
        grad = (dscores / problem.divisor if options.mean else dscores).to(dtype)
        if problem.pairing != "all":
            grad = grad.reshape(-1)
        if problem.temperature:
            _tiled_smooth.backward(problem, queries, documents, grad, dqueries, ddocuments)
        else:
            _tiled_winners.backward(problem, queries, documents, grad, saved.saved, dqueries, ddocuments)
        sums = _finish(problem, queries, dqueries), _finish(problem, documents, ddocuments)
    found = [None if x is None else x.reshape(rows.shape).to(rows.dtype) for x, rows in zip(sums, given, strict=True)]
    return found[0], found[1]


def _finish(problem: Problem, side: Side, grad: Tensor | None) -> Tensor | None:
    """The gradient of a row from that of its unit vector. Masked rows have none."""
    if grad is not None and problem.normalize:
        step = row_limit(grad.size(1))
        for start in range(0, grad.size(0) if side.index is None else side.index.numel(), step):
            here = slice(start, start + step) if side.index is None else side.index[start : start + step]
            rows, found = side.rows[here], grad[here]
            scale = inverse_norms(rows)
            unit = rows.to(grad.dtype) * scale
            grad[here] = scale * (found - unit * (unit * found).sum(dim=1, keepdim=True))
    return grad


def _all_pairs(problem: Problem, reduce: _Reduction, scores: Tensor, saved: Tensor, queries: list[Part]) -> None:
    every = torch.arange(problem.n_documents, device=scores.device)
    for block in blocks(reduce.documents, every, widest(queries)):
        for part in queries:
            value, state = reduce(block, part.tokens())
            part.add_sums(value, scores, block.items)
            if state is not None:
                rows = block.items if isinstance(part.columns, slice) else block.items[:, None]
                saved[rows, part.columns] = state


def _some_pairs(problem: Problem, queries: Side, reduce: _Reduction, scores: Tensor, saved: Tensor) -> None:
    query_of, document_of = pairs_of(problem)
    for block in blocks(reduce.documents, document_of, queries.counts[query_of]):
        query = query_of[block.items]
        for rows, exists, tokens in own_queries(queries, query):
            value, state = reduce(block, tokens)
            scores[block.items] += (value if exists is None else value.masked_fill_(~exists, 0)).sum(dim=1)
            if state is not None:
                place = saved_place(problem, block.items[:, None], rows, queries.starts[query][:, None])
                if exists is None:
                    saved.view(-1)[place] = state
                else:
                    saved.view(-1)[place[exists]] = state[exists]


def _add_zeros_alone(problem: Problem, queries: Side, documents: Side, scores: Tensor) -> None:
    """The smooth maxima of documents with masked tokens only, each of which takes part with a similarity of 0."""
    value = problem.temperature * documents.sizes.clamp(min=1).to(scores.dtype).log()
    value = torch.where(documents.counts == 0, value, 0)
    count = queries.counts.to(scores.dtype)
    if problem.pairing == "all":
        scores.addr_(count, value)
    else:
        query_of, document_of = pairs_of(problem)
        scores += count[query_of] * value[document_of]


class _Reduction:
    """Reduces the similarities of a block over its documents' tokens.

    Args:
        problem: which maximum, and what masked tokens count.
        documents: the side whose tokens are reduced.
        with_saved: whether what backward needs is asked for.
    """

    def __init__(self, problem: Problem, documents: Side, with_saved: bool) -> None:
        self.documents, self.with_saved = documents, with_saved
        self.temperature = problem.temperature
        self.saved_dtype = problem.saved_dtype
        masked = problem.mask_zero and documents.index is not None
        self.masked = (documents.sizes - documents.counts)[:, None] if masked else None  # [N, 1]
        self.first_masked = (
            documents.first_masked()[:, None] if masked and with_saved and not self.temperature else None
        )

    def __call__(self, block: Block, queries: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[n, C]`` maxima for ``[C, D]`` or ``[n, C, D]`` query tokens, and what backward needs of each."""
        masked = None if self.masked is None else self.masked[block.documents]
        if self.temperature:
            sums = _tiled_smooth.smooth_sums(block, queries, self.temperature, masked)
            best = sums.peak + self.temperature * sums.total.log()
            return best, best if self.with_saved else None
        best, winner = _maxima(block, queries, self.with_saved)
        if winner is None:
            return (best if masked is None else torch.where((masked > 0) & (best < 0), 0, best)), None
        position = winner - self.documents.starts[block.documents][:, None]
        lost = None
        if masked is not None and self.first_masked is not None:
            earlier = self.first_masked[block.documents] < position
            lost = (masked > 0) & ((best < 0) | ((best == 0) & earlier))
            best = best.masked_fill(lost, 0)
        state = winner_bits(position, self.saved_dtype)
        return best, state if lost is None else state.masked_fill_(lost, -1)


def _maxima(block: Block, queries: Tensor, with_winners: bool) -> tuple[Tensor, Tensor | None]:
    """``[n, C]`` maxima over the tokens of each document, and the row of the first that holds them; NaN is the largest.

    A place past a document's end is its last token again: neither the maximum nor the winner's row can differ.
    """
    best = winner = None
    for tile in block.tiles():
        value, place = max_over_tokens(tile.tokens @ queries.mT, with_winners)
        row = tile.rows.gather(1, place) if with_winners else None
        if best is None:
            best, winner = value, row
        elif winner is None or row is None:
            best = torch.maximum(best, value)
        else:
            better = (value > best) | (value.isnan() & ~best.isnan())
            best, winner = torch.where(better, value, best), torch.where(better, row, winner)
    if best is None:
        raise RuntimeError(f"a block must hold a token, got documents of at most {block.longest}.")
    return best, winner
