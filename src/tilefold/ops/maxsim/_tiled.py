"""MaxSim in torch operations on tiles: the CPU path, and the fallback on any device.

Forward multiplies a block of documents with the query tokens and reduces each tile of similarities at once; backward
of the maximum touches winners only, backward of the smooth maximum computes each tile again. Products are taken in
at least fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tilefold.ops.maxsim import _tiled_maxima
from tilefold.ops.maxsim._blocks import BLOCK_COLUMNS, Block, Side, blocks, inverse_norms, pairs, sides
from tilefold.ops.maxsim._problem import Problem, no_winner, wide_dtype

BLOCK_WINNER = 16  # tokens among which the winner is looked for, once their block is known
SLAB_ENTRIES = 1 << 22  # (pair, query token) winners whose gradients are sorted at a time


def forward(problem: Problem, with_saved: bool) -> tuple[Tensor, Tensor]:
    """Scores, and what backward needs (empty unless asked for)."""
    queries, documents = sides(problem)
    dtype = wide_dtype(problem.queries.dtype)
    device = problem.queries.device
    if problem.pairing == "all" and not with_saved and not problem.temperature:
        nothing_saved = torch.empty((0, 0), dtype=problem.saved_dtype, device=device)
        return _tiled_maxima.scores(problem, queries, documents), nothing_saved
    shape = problem.saved_shape if with_saved else (0, 0)
    nothing = float("inf") if problem.temperature else no_winner(problem.saved_dtype)
    # few operations know uint16: winners are kept wide until the end
    kind = dtype if problem.temperature else torch.int32
    saved = torch.full(shape, nothing, dtype=kind, device=device)
    if problem.pairing == "all":
        scores = _all_pairs(problem, queries, documents, saved if with_saved else None)
    else:
        scores = _some_pairs(problem, queries, documents, saved if with_saved else None)
    return scores, saved.to(problem.saved_dtype)


def _all_pairs(problem: Problem, queries: Side, documents: Side, saved: Tensor | None) -> Tensor:
    dtype = wide_dtype(problem.queries.dtype)
    device = problem.queries.device
    columns = torch.arange(queries.rows.size(0), device=device) if queries.index is None else queries.index
    every = torch.arange(problem.n_queries, device=device)
    longest = int(queries.counts.max()) if every.numel() else 0
    member, exists = queries.kept_rows(every, longest)  # [Nq, longest]
    scores = torch.zeros(problem.n_documents, problem.n_queries, dtype=dtype, device=device)
    table = queries.take(columns) if queries.index is not None else None
    every_document = torch.arange(problem.n_documents, device=device)
    for block in blocks(documents, every_document, min(columns.numel(), BLOCK_COLUMNS), problem.mask_zero):
        best = torch.zeros(block.items.numel(), queries.rows.size(0), dtype=dtype, device=device)
        flat = block.tokens.flatten(0, 1)
        for c0 in range(0, columns.numel(), BLOCK_COLUMNS):
            chosen = columns[c0 : c0 + BLOCK_COLUMNS]
            part = queries.take(chosen) if table is None else table[c0 : c0 + BLOCK_COLUMNS]
            sims = (flat @ part.T).view(*block.rows.shape, -1)  # [n, L, C]
            value, state = _reduce(problem, documents, block, sims, saved is not None)
            best[:, chosen] = value
            if saved is not None:
                saved[block.items[:, None], chosen] = state
        scores[block.items] = torch.where(exists, best[:, member], 0).sum(dim=2)
    return scores.T.contiguous()


def _some_pairs(problem: Problem, queries: Side, documents: Side, saved: Tensor | None) -> Tensor:
    dtype = wide_dtype(problem.queries.dtype)
    device = problem.queries.device
    query_of, document_of = pairs(problem)
    scores = torch.zeros(document_of.numel(), dtype=dtype, device=device)
    longest = int(queries.counts.max()) if queries.counts.numel() else 0
    for block in blocks(documents, document_of, longest, problem.mask_zero):
        query = query_of[block.items]
        rows, exists = queries.kept_rows(query, longest)  # [n, Lq]
        sims = block.tokens @ queries.take(rows).mT  # [n, L, Lq]
        value, state = _reduce(problem, documents, block, sims, saved is not None)
        scores[block.items] = torch.where(exists, value, 0).sum(dim=1)
        if saved is not None:
            place = _places(problem, block.items[:, None], rows, queries.starts[query][:, None])
            saved.view(-1)[place[exists]] = state[exists]
    return scores


def _places(problem: Problem, item: Tensor, row: Tensor, start: Tensor) -> Tensor:
    """Where the flattened ``saved`` holds (pair, query row)."""
    if problem.index is not None:
        return item * problem.longest_query + row - start
    return item % problem.group * problem.queries.size(0) + row


def _reduce(problem: Problem, side: Side, block: Block, sims: Tensor, with_saved: bool) -> tuple[Tensor, Tensor]:
    """The maximum over document tokens of ``[n, L, C]``, and its winner or, of a smooth one, itself."""
    if block.exists is not None:
        sims.masked_fill_(~block.exists[:, :, None], float("-inf"))
    masked = _masked_tokens(problem, side, block)
    if problem.temperature:
        best = _smooth(sims, problem.temperature, masked)
        return best, best
    best, place = _max_over_tokens(sims, with_saved)
    first_masked = None
    if masked is not None:
        exists = torch.ones_like(block.rows, dtype=torch.bool) if block.exists is None else block.exists
        first_masked = side.first_masked(block.documents, block.rows, exists)[:, None]
    if not with_saved:
        return (best if masked is None else torch.where((masked > 0) & (best < 0), 0, best)), place
    position = block.rows.gather(1, place) - side.starts[block.documents][:, None]
    if masked is not None and first_masked is not None:
        zero_wins = (masked > 0) & ((best < 0) | ((best == 0) & (first_masked < position)))
        best = best.masked_fill(zero_wins, 0)
        position = position.masked_fill(zero_wins, no_winner(problem.saved_dtype))
    return best, position.int()


def _masked_tokens(problem: Problem, side: Side, block: Block) -> Tensor | None:
    """``[n, 1]``: how many tokens of each document take part with a similarity of 0."""
    if not problem.mask_zero or side.index is None:
        return None
    return (side.sizes - side.counts)[block.documents][:, None]


def _smooth(sims: Tensor, temperature: float, masked: Tensor | None) -> Tensor:
    _, peak, total = _smooth_weights(sims, temperature, masked)
    return peak + temperature * total.log()


def _smooth_weights(sims: Tensor, temperature: float, masked: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``exp((s - peak) / temperature)`` of ``[n, L, C]`` in place, the peaks and the sums over tokens ``[n, C]``.

    Differences to the peak are taken before anything is divided, so that no temperature is too small.
    """
    temperature = max(temperature, torch.finfo(sims.dtype).tiny)
    top = sims.amax(dim=1)
    if masked is not None:
        top = torch.where(masked > 0, top.clamp_min(0), top)
    peak = torch.where(top.isfinite(), top, 0)
    weights = sims.sub_(peak[:, None]).div_(temperature).exp_()
    total = weights.sum(dim=1)
    if masked is not None:
        total = total + masked * torch.exp(-peak / temperature)
    return weights, peak, total


def _max_over_tokens(sims: Tensor, with_winners: bool) -> tuple[Tensor, Tensor]:
    """Maximum over dim 1 of ``[n, L, C]`` and the lowest index that holds it; NaN if there is one.

    First the block of tokens, then the token: a maximum with indices over all tokens costs several times as much.
    """
    length = sims.size(1)
    if not with_winners:
        return sims.amax(dim=1), sims.new_empty(0)
    if length <= BLOCK_WINNER:
        best, winner = sims.max(dim=1)
        return best, winner
    whole = length // BLOCK_WINNER * BLOCK_WINNER
    maxima = sims[:, :whole].view(sims.size(0), -1, BLOCK_WINNER, sims.size(2)).amax(dim=2)
    if whole < length:
        maxima = torch.cat([maxima, sims[:, whole:].amax(dim=1, keepdim=True)], dim=1)
    block = maxima.max(dim=1).indices  # [n, C]
    places = torch.arange(BLOCK_WINNER, device=sims.device)[None, :, None]
    tokens = (block[:, None] * BLOCK_WINNER + places).clamp_(max=length - 1)  # [n, 16, C]
    best, place = sims.gather(1, tokens).max(dim=1)
    return best, (block * BLOCK_WINNER + place).clamp_(max=length - 1)


def backward(
    problem: Problem, dscores: Tensor, saved: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, in their dtypes."""
    dtype = wide_dtype(problem.queries.dtype)
    dqueries = torch.zeros(problem.queries.shape, dtype=dtype, device=dscores.device) if need_queries else None
    ddocuments = torch.zeros(problem.documents.shape, dtype=dtype, device=dscores.device) if need_documents else None
    grad = dscores.to(dtype)
    if problem.temperature:
        _smooth_backward(problem, grad, dqueries, ddocuments)
    else:
        _max_backward(problem, grad, saved, dqueries, ddocuments)
    return _finish(problem, problem.queries, dqueries), _finish(problem, problem.documents, ddocuments)


def _finish(problem: Problem, rows: Tensor, grad: Tensor | None) -> Tensor | None:
    """The gradient of a row from that of its unit vector, in the row's dtype."""
    if grad is not None and problem.normalize:
        scale = inverse_norms(rows)
        unit = rows.to(grad.dtype) * scale
        grad = scale * (grad - unit * (unit * grad).sum(dim=1, keepdim=True))
    return None if grad is None else grad.to(rows.dtype)


def _max_backward(
    problem: Problem, grad: Tensor, saved: Tensor, dqueries: Tensor | None, ddocuments: Tensor | None
) -> None:
    """Each gradient row is a weighted sum of rows of the other side, over the pairs in rising order."""
    queries, documents = sides(problem)
    every = torch.arange(problem.n_queries, device=grad.device)
    longest = int(queries.sizes.max()) if every.numel() else 0
    offset = torch.arange(longest, device=grad.device)
    if problem.pairing == "all":
        document_of = torch.arange(problem.n_documents, device=grad.device)
        query_of_row = every.repeat_interleave(queries.sizes)
        width = queries.rows.size(0)
    else:
        query_of, document_of = pairs(problem)
        width = longest
    step = max(1, SLAB_ENTRIES // max(width, 1))
    all_documents = None
    for i in range(0, document_of.numel(), step):
        chosen = document_of[i : i + step]
        items = torch.arange(i, i + chosen.numel(), device=grad.device)[:, None]
        if problem.pairing == "all":
            row = torch.arange(width, device=grad.device).expand(chosen.numel(), -1)
            winner = _positions(saved, slice(i, i + step))
            weight = grad.T[i : i + step, query_of_row]
        else:
            query = query_of[i : i + step]
            inside = offset < queries.sizes[query][:, None]
            row = torch.where(inside, queries.starts[query][:, None] + offset, 0)
            place = torch.where(inside, _places(problem, items, row, queries.starts[query][:, None]), 0)
            winner = _positions(saved.view(-1), place).masked_fill(~inside, no_winner(saved.dtype))
            weight = grad[i : i + step, None].expand(winner.shape)
        has = winner != no_winner(saved.dtype)
        target = torch.where(has, documents.starts[chosen][:, None] + winner, 0)
        weight = torch.where(has, weight, 0)
        if dqueries is not None:
            if all_documents is None:
                all_documents = documents.take(torch.arange(documents.rows.size(0), device=grad.device))
            if problem.pairing == "all":  # [width, n]: every row has n entries
                bags = embedding_bag(target.T.contiguous(), all_documents, mode="sum", per_sample_weights=weight.T)
                dqueries += bags
            else:
                _add_rows(dqueries, all_documents, row, target, weight, has)
        if ddocuments is not None:
            table = queries.take(torch.arange(queries.rows.size(0), device=grad.device))
            _add_rows(ddocuments, table, target, row, weight, has)


def _positions(saved: Tensor, where: Tensor | slice) -> Tensor:
    """Saved winners in int64. CUDA has no gather of uint16, so their bits are gathered as int16."""
    if saved.dtype != torch.uint16:
        return saved[where].to(torch.int64)
    return saved.view(torch.int16)[where].to(torch.int64).bitwise_and_(0xFFFF)


def _add_rows(out: Tensor, table: Tensor, owner: Tensor, row: Tensor, weight: Tensor, has: Tensor) -> None:
    """``out[owner] += weight * table[row]`` over the entries that exist, one owner after the other."""
    owner, order = owner[has].sort(stable=True)
    if owner.numel() == 0:
        return
    unique, counts = torch.unique_consecutive(owner, return_counts=True)
    starts = counts.cumsum(0) - counts
    row, weight = row[has][order], weight[has][order]
    out[unique] += embedding_bag(row, table, starts, mode="sum", per_sample_weights=weight)


def _smooth_backward(problem: Problem, grad: Tensor, dqueries: Tensor | None, ddocuments: Tensor | None) -> None:
    """Softmax weights of each tile, made again with their own sum.

    The saved maxima are rounded, and their rounding, divided by a small temperature, would be an exponent.
    """
    queries, documents = sides(problem)
    whole = problem.pairing == "all"
    longest = int(queries.counts.max()) if queries.counts.numel() else 0
    if whole:
        query_of = document_of = torch.arange(problem.n_documents, device=grad.device)
        every = torch.arange(problem.n_queries, device=grad.device)
        query_of_row = every.repeat_interleave(queries.sizes)
        rows = torch.arange(queries.rows.size(0), device=grad.device) if queries.index is None else queries.index
        parts = [rows[c0 : c0 + BLOCK_COLUMNS] for c0 in range(0, rows.numel(), BLOCK_COLUMNS)]
    else:
        query_of, document_of = pairs(problem)
    columns = min(BLOCK_COLUMNS, queries.rows.size(0)) if whole else longest
    for block in blocks(documents, document_of, columns, problem.mask_zero):
        query = query_of[block.items]
        masked = _masked_tokens(problem, documents, block)
        exists = torch.empty(0, dtype=torch.bool, device=grad.device)
        if not whole:
            part, exists = queries.kept_rows(query, longest)
            parts = [part]
        for part in parts:
            tokens = queries.take(part)  # [C, D] or [n, Lq, D]
            sims = block.tokens @ tokens.mT  # [n, L, C]
            if whole:
                weight = grad.T[block.items[:, None], query_of_row[part]]
            else:
                weight = grad[block.items][:, None].masked_fill(~exists, 0)
            if block.exists is not None:
                sims.masked_fill_(~block.exists[:, :, None], float("-inf"))
            share, _, total = _smooth_weights(sims, problem.temperature, masked)
            share.mul_((weight / torch.where(total == 0, 1, total))[:, None])
            if dqueries is not None:
                if whole:
                    dqueries[part] += share.flatten(0, 1).T @ block.tokens.flatten(0, 1)
                else:  # rows repeat: this sum is deterministic on every device
                    dqueries.index_put_((part,), share.mT @ block.tokens, accumulate=True)
            if ddocuments is not None:
                ddocuments.index_put_((block.rows,), share @ tokens, accumulate=True)
