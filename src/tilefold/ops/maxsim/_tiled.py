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
    pair_sequences,
    saved_positions,
    wide_dtype,
    winner_bits,
)
from tilefold.ops.maxsim._tiled_winners import (
    add_rows,
    all_pairs_gradients,
    listed_pairs_gradients,
)
from tilefold.ops.maxsim._walk import (
    Block,
    PairBlock,
    QueryBlock,
    Tile,
    blocks_of,
    cross_index,
)
from tilefold.ops.maxsim.quantized import quantize_rows
from tilefold.ops.maxsim.tiles import (
    SequenceTokens,
    inverse_norms,
    row_limit,
    sequence_tokens,
)


def forward(
    tensors: MaxSimTensors,
    options: MaxSimOptions,
    training: bool,
) -> tuple[Tensor | None, ...]:
    """Compute the scores, and if ``training`` the winners or smooth maxima for backward.

    Returns:
        One entry for each of :data:`RESULTS`.
    """
    if host_may_read(tensors.queries.device, "tiled"):
        check_values(tensors)
    problem = Problem.of(tensors, options)
    scores = problem.queries.new_zeros(problem.score_shape, dtype=wide_dtype(problem.queries.dtype))
    if problem.empty:
        return scores, None, None, None, None
    if problem.documents.dtype == torch.int8:
        problem = _with_int8_queries(problem)
    queries, documents = sequence_tokens(problem)
    saved = no_winners(problem, queries.rows, training)
    masked_counts = documents.masked_counts() if problem.mask_zero else None
    first_masked = None
    if training and not problem.temperature and masked_counts is not None:
        first_masked = documents.first_masked_positions()[:, None]
    for block in blocks_of(problem, queries, documents):
        n_masked = None if masked_counts is None else masked_counts[block.documents]
        if problem.temperature:
            sums = _smooth_sums(block, problem.temperature, n_masked)
            maxima = sums.peak + problem.temperature * sums.total.log()
            state = maxima if training else None
        else:
            maxima, state = _block_maxima(
                problem,
                documents,
                block,
                training,
                n_masked,
                first_masked,
            )
        if isinstance(block.source, QueryBlock):
            block.source.add_sums(maxima, scores, block.items)
            if state is not None:
                saved[cross_index(block.items, block.query_rows)] = state
        else:
            _add_pairs(
                problem,
                queries,
                block.source,
                block.query_exists,
                maxima,
                state,
                scores,
                saved,
            )
    if problem.temperature and problem.mask_zero:
        _add_fully_masked_documents(problem, queries, documents, scores)
    if options.mean:
        scores.div_(problem.divisor)
    return scores, saved.view(problem.saved_dtype) if training else None, None, None, None


def _with_int8_queries(problem: Problem) -> Problem:
    """Round the queries to int8, like the documents."""
    slabs = [
        quantize_rows(rows, torch.int8)
        for rows in torch.split(problem.queries, row_limit(problem.queries.size(1)))
    ]
    values, scales = slabs[0]
    if len(slabs) > 1:
        values = torch.cat([slab_values for slab_values, _ in slabs])
        scales = torch.cat([slab_scales for _, slab_scales in slabs])
    return replace(problem, queries=values, query_scale=scales)


def _add_pairs(
    problem: Problem,
    queries: SequenceTokens,
    pairs: PairBlock,
    exists: Tensor | None,
    maxima: Tensor,
    state: Tensor | None,
    scores: Tensor,
    saved: Tensor,
) -> None:
    """Add the maxima of aligned, grouped or listed pairs to their scores, and save their state.

    Args:
        problem: the problem.
        queries: all queries.
        pairs: the pairs.
        exists: ``[n, C]`` bools, false past the end of a query, or ``None`` if all tokens exist.
        maxima: ``[n, C]``.
        state: ``[n, C]`` what is saved for backward, or ``None``.
        scores: the scores of all pairs.
        saved: the saved matrix of all pairs.
    """
    if exists is not None:
        maxima = maxima.masked_fill(~exists, 0)
    scores.view(-1)[pairs.pairs] += maxima.sum(dim=1)
    if state is not None:
        positions = saved_positions(
            problem,
            pairs.pairs[:, None],
            pairs.query_rows,
            queries.starts[pairs.queries][:, None],
        )
        if exists is not None:
            positions = positions[exists]
            state = state[exists]
        saved.view(-1)[positions] = state


def backward(
    dscores: Tensor,
    saved: MaxSimSaved,
    options: MaxSimOptions,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of queries and documents, in their shapes and dtypes.

    Args:
        dscores: gradient of the scores.
        saved: what the forward pass saved.
        options: checked options.
        needs: whether the gradients of queries and of documents are needed.
    """
    problem = Problem.of(saved.tensors, options)
    dtype = wide_dtype(problem.queries.dtype)
    need_queries, need_documents = needs
    dqueries = None
    ddocuments = None
    if need_queries:
        dqueries = torch.zeros(problem.queries.shape, dtype=dtype, device=dscores.device)
    if need_documents:
        ddocuments = torch.zeros(problem.documents.shape, dtype=dtype, device=dscores.device)
    if not problem.empty and saved.saved is not None:
        queries, documents = sequence_tokens(problem)
        grad = (dscores / problem.divisor if options.mean else dscores).to(dtype)
        if problem.temperature:
            _add_smooth_gradients(problem, queries, documents, grad, dqueries, ddocuments)
        elif problem.pairing == "all":
            all_pairs_gradients(queries, documents, grad, saved.saved, dqueries, ddocuments)
        else:
            listed_pairs_gradients(
                problem,
                queries,
                documents,
                grad,
                saved.saved,
                dqueries,
                ddocuments,
            )
        if problem.normalize:
            if dqueries is not None:
                _project(queries, dqueries)
            if ddocuments is not None:
                _project(documents, ddocuments)
    if dqueries is not None:
        dqueries = dqueries.reshape(saved.queries.shape).to(saved.queries.dtype)
    if ddocuments is not None:
        ddocuments = ddocuments.reshape(saved.documents.shape).to(saved.documents.dtype)
    return dqueries, ddocuments


def _project(tokens: SequenceTokens, grad: Tensor) -> None:
    """Turn gradients of unit vectors into gradients of the rows, in place.

    Masked rows have no gradient, and are left out.
    """
    step = row_limit(grad.size(1))
    unmasked_rows = tokens.unmasked_rows
    n_rows = grad.size(0) if unmasked_rows is None else unmasked_rows.numel()
    for start in range(0, n_rows, step):
        selected: slice | Tensor = slice(start, start + step)
        if unmasked_rows is not None:
            selected = unmasked_rows[start : start + step]
        rows = tokens.rows[selected]
        unit_grad = grad[selected]
        scale = inverse_norms(rows)
        unit = rows.to(grad.dtype) * scale
        along_unit = (unit * unit_grad).sum(dim=1, keepdim=True)
        grad[selected] = scale * (unit_grad - unit * along_unit)


def _add_fully_masked_documents(
    problem: Problem,
    queries: SequenceTokens,
    documents: SequenceTokens,
    scores: Tensor,
) -> None:
    """Add the smooth maxima of documents that have masked tokens only, in mode "zero".

    Each of their tokens takes part with a similarity of 0.
    """
    maxima = problem.temperature * documents.sizes.clamp(min=1).to(scores.dtype).log()
    maxima = torch.where(documents.counts == 0, maxima, 0)
    n_query_tokens = queries.counts.to(scores.dtype)
    if problem.pairing == "all":
        scores.addr_(n_query_tokens, maxima)
    else:
        query_of_pair, document_of_pair = pair_sequences(problem)
        scores.view(-1).add_(n_query_tokens[query_of_pair] * maxima[document_of_pair])


# Maximum


def _block_maxima(
    problem: Problem,
    documents: SequenceTokens,
    block: Block,
    saving: bool,
    n_masked: Tensor | None,
    first_masked: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the maxima of a block over its documents' tokens.

    Args:
        problem: the problem.
        documents: all documents.
        block: the block.
        saving: whether winners are needed.
        n_masked: ``[n, 1]`` masked tokens of each document that score 0, or ``None``.
        first_masked: ``[Nd, 1]`` position of the first masked token of each document, or ``None``
            if no winners are needed.

    Returns:
        ``[n, C]`` maxima, and ``[n, C]`` winners in the dtype in which they are saved, or ``None``.
    """
    maxima, winner_rows = _maxima_over_tiles(block, saving)
    if not saving:
        if n_masked is not None:
            maxima = torch.where((n_masked > 0) & (maxima < 0), 0, maxima)
        return maxima, None
    positions = winner_rows - documents.starts[block.documents][:, None]
    winners = winner_bits(positions, problem.saved_dtype)
    if n_masked is None or first_masked is None:
        return maxima, winners
    masked_is_earlier = first_masked[block.documents] < positions
    masked_wins = (n_masked > 0) & ((maxima < 0) | ((maxima == 0) & masked_is_earlier))
    return maxima.masked_fill(masked_wins, 0), winners.masked_fill_(masked_wins, -1)


def _maxima_over_tiles(block: Block, with_winners: bool) -> tuple[Tensor, Tensor]:
    """Compute maxima over the tokens of each document, and the first row that has each of them.

    NaN is the largest. The last token of a document is repeated past its end, which changes neither
    the maximum nor the winner's row.

    Returns:
        ``[n, C]`` maxima, and ``[n, C]`` rows, or anything without winners.
    """
    maxima = []
    winner_rows = []
    for tile in block.tiles():
        tile_maxima, positions = max_over_tokens(tile.similarities, with_winners)
        maxima.append(tile_maxima)
        winner_rows.append(tile.rows.gather(1, positions) if with_winners else positions)
    if not block.is_split:
        if len(maxima) == 1:
            return maxima[0], winner_rows[0]
        return torch.cat(maxima), torch.cat(winner_rows)
    total_maxima = maxima[0]
    total_rows = winner_rows[0]
    for tile_maxima, tile_rows in zip(maxima[1:], winner_rows[1:], strict=True):
        if with_winners:
            total_maxima, total_rows = merge_maxima(
                total_maxima,
                total_rows,
                tile_maxima,
                tile_rows,
            )
        else:
            total_maxima = torch.maximum(total_maxima, tile_maxima)
    return total_maxima, total_rows


def merge_maxima(
    maxima: Tensor,
    winners: Tensor,
    later_maxima: Tensor,
    later_winners: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merge maxima and winners of tokens with those of later tokens, which lose among equals."""
    later_wins = (later_maxima > maxima) | (later_maxima.isnan() & ~maxima.isnan())
    return (
        torch.where(later_wins, later_maxima, maxima),
        torch.where(later_wins, later_winners, winners),
    )


# Smooth maximum: peaks and sums of exponentials over a document's tokens, and the gradient


class _SmoothSums(NamedTuple):
    """Sums ``total = sum_j exp((s_j - peak) / temperature)`` over the tokens of each document.

    Attributes:
        peak: ``[n, C]``.
        total: ``[n, C]``.
        tiles: tiles, each with its addends ``[n, L, C]``; empty if the document is split.
    """

    peak: Tensor
    total: Tensor
    tiles: list[tuple[Tile, Tensor]]


class _TileSums(NamedTuple):
    """Sums of one tile, with the largest similarity, which may be infinite."""

    largest: Tensor
    peak: Tensor
    total: Tensor


def _smooth_sums(block: Block, temperature: float, n_masked: Tensor | None) -> _SmoothSums:
    """Compute the sums of exponentials of a block.

    The peak is subtracted before anything is divided, so that no temperature is too small.

    Args:
        block: the block.
        temperature: temperature of the smooth maximum.
        n_masked: ``[n, 1]`` masked tokens of each document, which take part with a similarity of 0,
            or ``None``.
    """
    temperature = _usable_temperature(temperature, block.query_vectors.dtype)
    tile_sums: list[_TileSums] = []
    tiles: list[tuple[Tile, Tensor]] = []
    first_document = 0
    for tile in block.tiles():
        n_masked_of_tile = None
        counted_already = block.is_split and bool(tile_sums)
        if n_masked is not None and not counted_already:
            n_masked_of_tile = n_masked[first_document : first_document + tile.rows.size(0)]
        similarities = _similarities(tile)
        largest = similarities.amax(dim=1)
        if n_masked_of_tile is not None:
            largest = torch.where(n_masked_of_tile > 0, largest.clamp_min(0), largest)
        peak = _finite(largest)
        exponentials = _exponentials(similarities, peak, temperature)
        total = exponentials.sum(dim=1)
        if n_masked_of_tile is not None:
            # Where a token is masked, the peak is at least 0.
            exponent = torch.where(n_masked_of_tile > 0, -peak, float("-inf"))
            total = total + n_masked_of_tile * (exponent / temperature).exp_()
        tile_sums.append(_TileSums(largest, peak, total))
        if not block.is_split:
            tiles.append((tile, exponentials))
            first_document += tile.rows.size(0)
    if not block.is_split:
        peaks = torch.cat([sums.peak for sums in tile_sums])
        totals = torch.cat([sums.total for sums in tile_sums])
        return _SmoothSums(peaks, totals, tiles)
    largest, peak, total = tile_sums[0]
    for sums in tile_sums[1:]:
        largest = torch.maximum(largest, sums.largest)
        joint_peak = _finite(largest)
        total = _rescaled(total, peak, joint_peak, temperature) + _rescaled(
            sums.total,
            sums.peak,
            joint_peak,
            temperature,
        )
        peak = joint_peak
    return _SmoothSums(peak, total, [])


def _similarities(tile: Tile) -> Tensor:
    """Return the similarities ``[n, L, C]``, minus infinity past the end of a document."""
    if tile.exists is None:
        return tile.similarities
    return tile.similarities.masked_fill_(~tile.exists[:, :, None], float("-inf"))


def _usable_temperature(temperature: float, dtype: torch.dtype) -> float:
    """Return a temperature that is a normal number of ``dtype``."""
    return max(temperature, torch.finfo(dtype).tiny)


def _finite(largest: Tensor) -> Tensor:
    """Replace infinities and NaN by 0."""
    return torch.where(largest.isfinite(), largest, 0)


def _exponentials(similarities: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """Compute ``exp((similarities - peak) / temperature)`` in place, and 0 for subnormal results.

    A subnormal number changes nothing in a sum of at least 1, and takes very long to compute.
    """
    exponents = similarities.sub_(peak[:, None]).div_(temperature)
    smallest_exponent = math.log(torch.finfo(similarities.dtype).tiny)
    return torch.threshold_(exponents, smallest_exponent, float("-inf")).exp_()


def _rescaled(total: Tensor, peak: Tensor, new_peak: Tensor, temperature: float) -> Tensor:
    """Convert a sum of exponentials to another peak."""
    return torch.where(total == 0, 0, total * ((peak - new_peak) / temperature).exp())


def _add_smooth_gradients(
    problem: Problem,
    queries: SequenceTokens,
    documents: SequenceTokens,
    grad: Tensor,
    dqueries: Tensor | None,
    ddocuments: Tensor | None,
) -> None:
    """Add the gradients of smooth maxima to ``dqueries`` and ``ddocuments``.

    Softmax weights are computed again for each tile. The saved maxima cannot serve: their rounding
    error, divided by a small temperature, would be part of an exponent.

    Args:
        problem: the problem.
        queries: all queries.
        documents: all documents.
        grad: gradient of the scores, in fp32 (fp64).
        dqueries: ``[Tq, D]``, or ``None`` if it is not needed.
        ddocuments: ``[Td, D]``, or ``None`` if it is not needed.
    """
    masked_counts = documents.masked_counts() if problem.mask_zero else None
    query_of_row = torch.arange(problem.n_queries, device=grad.device).repeat_interleave(
        queries.sizes,
    )
    for block in blocks_of(problem, queries, documents):
        n_masked = None if masked_counts is None else masked_counts[block.documents]
        sums = _smooth_sums(block, problem.temperature, n_masked)
        nonzero_total = torch.where(sums.total == 0, 1, sums.total)
        dmaxima = _gradient_of_maxima(block, grad, query_of_row)
        scale = (dmaxima / nonzero_total)[:, None]
        if block.is_split:
            tiles = _tiles_with_exponentials(block.tiles(), sums.peak, problem.temperature)
        else:
            tiles = iter(sums.tiles)
        first_document = 0
        for tile, exponentials in tiles:
            n_documents = tile.rows.size(0)
            dsimilarities = exponentials.mul_(scale[first_document : first_document + n_documents])
            if dqueries is not None:
                _add_query_gradient(dqueries, documents, block, tile, dsimilarities)
            if ddocuments is not None:
                document_grads = dsimilarities @ block.query_vectors
                if tile.span is not None:
                    ddocuments[tile.span] += document_grads.flatten(0, 1)
                else:
                    _add_existing(
                        ddocuments,
                        tile.rows,
                        tile.exists,
                        document_grads,
                        rows_differ=problem.index is None,
                    )
            if not block.is_split:
                first_document += n_documents


def _gradient_of_maxima(block: Block, grad: Tensor, query_of_row: Tensor) -> Tensor:
    """Return the ``[n, C]`` gradient of a block's maxima: that of their scores."""
    if isinstance(block.source, QueryBlock):
        return grad.T[block.items][:, query_of_row[block.query_rows]]
    pairs = block.source
    dmaxima = grad.reshape(-1)[pairs.pairs][:, None].expand(pairs.query_rows.shape)
    if block.query_exists is not None:
        dmaxima = dmaxima.masked_fill(~block.query_exists, 0)
    return dmaxima


def _add_query_gradient(
    dqueries: Tensor,
    documents: SequenceTokens,
    block: Block,
    tile: Tile,
    dsimilarities: Tensor,
) -> None:
    """Add the gradient of the query tokens from one tile.

    Args:
        dqueries: ``[Tq, D]``.
        documents: all documents.
        block: the block of the tile.
        tile: the tile.
        dsimilarities: ``[n, L, C]`` gradient of its similarities.
    """
    document_vectors = tile.vectors
    if document_vectors is None:
        if tile.span is None:
            document_vectors = documents.gather(tile.rows)
        else:
            span_vectors = documents.vectors(tile.span.start, tile.span.stop)
            document_vectors = span_vectors.view(*tile.rows.shape, -1)
    if block.query_vectors.dim() == 2:  # all documents of the block share the query tokens
        if isinstance(block.source, QueryBlock):
            rows = block.query_rows
        else:
            rows = block.source.query_rows[0]
        dqueries[rows] += dsimilarities.flatten(0, 1).T @ document_vectors.flatten(0, 1)
    elif not isinstance(block.source, QueryBlock):
        _add_existing(
            dqueries,
            block.source.query_rows,
            block.query_exists,
            dsimilarities.mT @ document_vectors,
            rows_differ=False,
        )


def _tiles_with_exponentials(
    tiles: Iterator[Tile],
    peak: Tensor,
    temperature: float,
) -> Iterator[tuple[Tile, Tensor]]:
    """Yield the tiles of a document that is split, each with its exponentials ``[n, L, C]``."""
    usable = _usable_temperature(temperature, peak.dtype)
    for tile in tiles:
        yield tile, _exponentials(_similarities(tile), peak, usable)


def _add_existing(
    out: Tensor,
    rows: Tensor,
    exists: Tensor | None,
    values: Tensor,
    *,
    rows_differ: bool,
) -> None:
    """Compute ``out[rows] += values`` for the tokens that exist.

    Args:
        out: ``[T, D]``.
        rows: ``[n, L]`` rows of ``out``.
        exists: ``[n, L]`` bools, or ``None`` if all tokens exist.
        values: ``[n, L, D]``.
        rows_differ: whether no row occurs twice.
    """
    if exists is None:
        rows = rows.view(-1)
        values = values.flatten(0, 1)
    else:
        rows = rows[exists]
        values = values[exists]
    if rows_differ:
        out[rows] += values
    else:
        add_rows(out, values, rows)
