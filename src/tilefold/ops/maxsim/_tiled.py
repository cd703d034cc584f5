"""MaxSim in torch operations on tiles: the CPU path, and the fallback on any device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tilefold.ops._shared.impl import host_may_read
from tilefold.ops._shared.winners import max_and_argmax_over_tokens, max_over_tokens
from tilefold.ops.maxsim._blocks import Block, Tile, TileTokens, add_existing_rows
from tilefold.ops.maxsim._problem import (
    NO_WINNER_BITS,
    MaxSimOptions,
    MaxSimSaved,
    MaxSimTensors,
    Problem,
    check_values,
    new_saved_values,
    pair_sequences,
    wide_dtype,
    winner_bits,
)
from tilefold.ops.maxsim._tiled_winners import (
    add_gradients_of_all_pairs,
    add_gradients_of_listed_pairs,
)
from tilefold.ops.maxsim._walk import divide_into_blocks
from tilefold.ops.maxsim.quantized import quantize_rows
from tilefold.ops.maxsim.tiles import (
    SequenceTokens,
    enumerate_unmasked_tokens,
    inverse_norms,
    row_limit,
)


def forward(
    tensors: MaxSimTensors,
    options: MaxSimOptions,
    training: bool,
) -> tuple[Tensor | None, ...]:
    """Compute the scores, and for training the winners or smooth maxima that backward reads.

    The winner of a query token in a document is the document token that is most similar to it.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: whether backward may follow.

    Returns:
        The operator's results: scores, winners or smooth maxima, and three results that only
        kernels have, which are ``None``.
    """
    if host_may_read(tensors.queries.device, "tiled"):
        check_values(tensors)
    problem = Problem.of(tensors, options)
    scores = problem.queries.new_zeros(problem.score_shape, dtype=wide_dtype(problem.queries.dtype))
    if problem.empty:
        return scores, None, None, None, None
    if problem.documents.dtype == torch.int8:
        problem = _with_int8_queries(problem)
    queries, documents = enumerate_unmasked_tokens(problem)
    saved = new_saved_values(problem, queries.rows, training)
    # In the mask mode "zero", masked document tokens count with a similarity of 0.
    masked_counts = documents.masked_counts() if problem.mask_zero else None
    first_masked = None
    if training and not problem.temperature and masked_counts is not None:
        first_masked = documents.first_masked_positions()[:, None]
    for block in divide_into_blocks(problem, queries, documents):
        n_masked = None if masked_counts is None else masked_counts[block.documents]
        if problem.temperature:
            sums = ExponentialSums(problem.temperature, n_masked, block.query_vectors.dtype)
            peak, exp_sum = sums.of_block(block)
            maxima = peak + problem.temperature * exp_sum.log()
            values_to_save = maxima if training else None
        else:
            maxima, values_to_save = _block_maxima(
                problem,
                documents,
                block,
                with_winners=training,
                n_masked=n_masked,
                first_masked=first_masked,
            )
        block.add_scores(maxima, scores)
        if values_to_save is not None:
            block.save(values_to_save, saved)
    if problem.temperature and problem.mask_zero:
        _add_fully_masked_documents(problem, queries, documents, scores)
    if options.mean:
        scores.div_(problem.divisor)
    returned_values = saved.view(problem.saved_dtype) if training else None  # uint16 from int16
    return scores, returned_values, None, None, None


def _with_int8_queries(problem: Problem) -> Problem:
    """Return the problem with queries rounded to int8, like the documents."""
    quantized = [
        quantize_rows(rows, torch.int8)
        for rows in torch.split(problem.queries, row_limit(problem.queries.size(1)))
    ]
    values, scales = quantized[0]
    if len(quantized) > 1:
        values = torch.cat([chunk_values for chunk_values, _ in quantized])
        scales = torch.cat([chunk_scales for _, chunk_scales in quantized])
    return replace(problem, queries=values, query_scale=scales)


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
        queries, documents = enumerate_unmasked_tokens(problem)
        grad = (dscores / problem.divisor if options.mean else dscores).to(dtype)
        if problem.temperature:
            _add_smooth_gradients(problem, queries, documents, grad, dqueries, ddocuments)
        elif problem.pairing == "all":
            add_gradients_of_all_pairs(queries, documents, grad, saved.saved, dqueries, ddocuments)
        else:
            add_gradients_of_listed_pairs(
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
                _backward_of_normalization(queries, dqueries)
            if ddocuments is not None:
                _backward_of_normalization(documents, ddocuments)
    if dqueries is not None:
        dqueries = dqueries.reshape(saved.queries.shape).to(saved.queries.dtype)
    if ddocuments is not None:
        ddocuments = ddocuments.reshape(saved.documents.shape).to(saved.documents.dtype)
    return dqueries, ddocuments


def _backward_of_normalization(tokens: SequenceTokens, grad: Tensor) -> None:
    """Turn gradients of unit vectors into gradients of the rows that were normalized, in place.

    For a row ``x`` with ``u = x / |x|``, the gradient ``g`` of ``u`` becomes
    ``(g - u (u . g)) / |x|``. Masked rows are skipped, because their gradient is 0.

    Args:
        tokens: the rows, and which of them are unmasked.
        grad: ``[T, D]`` gradients, which are overwritten.
    """
    chunk_rows = row_limit(grad.size(1))  # rows are converted in chunks, to bound memory
    unmasked_rows = tokens.unmasked_rows
    n_rows = grad.size(0) if unmasked_rows is None else unmasked_rows.numel()
    for start in range(0, n_rows, chunk_rows):
        chunk: slice | Tensor = slice(start, start + chunk_rows)
        if unmasked_rows is not None:
            chunk = unmasked_rows[start : start + chunk_rows]
        rows = tokens.rows[chunk]
        unit_grad = grad[chunk]
        inverse_norm = inverse_norms(rows)
        unit = rows.to(grad.dtype) * inverse_norm
        along_unit = (unit * unit_grad).sum(dim=1, keepdim=True)
        grad[chunk] = inverse_norm * (unit_grad - unit * along_unit)


def _add_fully_masked_documents(
    problem: Problem,
    queries: SequenceTokens,
    documents: SequenceTokens,
    scores: Tensor,
) -> None:
    """Add the scores of documents whose tokens are all masked, for smooth maxima in mode "zero".

    Each of the ``n`` tokens of such a document counts with a similarity of 0. The smooth maximum of
    a query token is therefore ``temperature * log(n)``. Blocks do not contain these documents.

    Args:
        problem: tensors and options of the call.
        queries: the tokens of all queries.
        documents: the tokens of all documents.
        scores: the scores, to which this is added.
    """
    n_tokens = documents.sizes.clamp(min=1).to(scores.dtype)  # an empty document scores log(1) = 0
    is_fully_masked = documents.counts == 0
    maxima = torch.where(is_fully_masked, problem.temperature * n_tokens.log(), 0)
    n_query_tokens = queries.counts.to(scores.dtype)
    if problem.pairing == "all":
        scores.addr_(n_query_tokens, maxima)  # adds the outer product
    else:
        query_of_pair, document_of_pair = pair_sequences(problem)
        scores.view(-1).add_(n_query_tokens[query_of_pair] * maxima[document_of_pair])


# Maximum


def _block_maxima(
    problem: Problem,
    documents: SequenceTokens,
    block: Block,
    with_winners: bool,
    n_masked: Tensor | None,
    first_masked: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the largest similarity of each query token to the tokens of each document of a block.

    In mode "zero", masked tokens count with a similarity of 0.

    Args:
        problem: tensors and options of the call.
        documents: the tokens of all documents.
        block: ``n`` documents and ``C`` query tokens, with their similarities.
        with_winners: whether the positions of the most similar tokens, the winners, are needed.
        n_masked: ``[n, 1]`` number of masked tokens of each document in mode "zero", else ``None``.
        first_masked: ``[Nd, 1]`` position of the first masked token of each document in mode
            "zero" with winners, else ``None``.

    Returns:
        ``[n, C]`` maxima, and ``[n, C]`` winners in the dtype in which they are saved, or ``None``.
        Winners are positions in the documents, or -1 for a masked token.
    """
    if not with_winners:
        (maxima,) = block.accumulate(Maximum())
        if n_masked is not None:
            maxima = torch.where((n_masked > 0) & (maxima < 0), 0, maxima)
        return maxima, None
    maxima, winner_rows = block.accumulate(MaximumAndWinner())
    positions = winner_rows - documents.starts[block.documents][:, None]
    winners = winner_bits(positions, problem.saved_dtype)
    if n_masked is None or first_masked is None:
        return maxima, winners
    # A similarity of 0 beats negative similarities, and a tie if it comes first.
    masked_is_earlier = first_masked[block.documents] < positions
    masked_wins = (n_masked > 0) & ((maxima < 0) | ((maxima == 0) & masked_is_earlier))
    return maxima.masked_fill(masked_wins, 0), winners.masked_fill_(masked_wins, NO_WINNER_BITS)


class Maximum:
    """Accumulates the maxima ``(maxima,)`` over the tokens of each document.

    NaN is the largest. The last token of a document is repeated past its end, which does not change
    its maximum.
    """

    def reduce(self, tile: Tile) -> tuple[Tensor, ...]:
        """Return the ``[n, C]`` maxima over the tokens of a tile."""
        return (max_over_tokens(tile.similarities),)

    def merge(
        self,
        earlier: tuple[Tensor, ...],
        later: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Return the larger maxima of two parts of the same documents."""
        (earlier_maxima,) = earlier
        (later_maxima,) = later
        return (torch.maximum(earlier_maxima, later_maxima),)


class MaximumAndWinner:
    """Accumulates the maxima and the first rows that have them, ``(maxima, winner_rows)``.

    NaN is the largest. The last token of a document is repeated past its end, with its row.
    """

    def reduce(self, tile: Tile) -> tuple[Tensor, ...]:
        """Return ``[n, C]`` maxima over the tokens of a tile, and their ``[n, C]`` rows."""
        maxima, positions = max_and_argmax_over_tokens(tile.similarities)
        return maxima, tile.tokens.rows.gather(1, positions)

    def merge(
        self,
        earlier: tuple[Tensor, ...],
        later: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Return the larger maxima of two parts of the same documents, and their rows."""
        maxima, winner_rows = earlier
        later_maxima, later_rows = later
        return merge_maxima(maxima, winner_rows, later_maxima, later_rows)


def merge_maxima(
    maxima: Tensor,
    winners: Tensor,
    later_maxima: Tensor,
    later_winners: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merge maxima and winners of some tokens with maxima and winners of later tokens.

    Among equal maxima the earlier token wins. NaN is larger than any number.

    Args:
        maxima: maxima over the earlier tokens.
        winners: winners among the earlier tokens.
        later_maxima: maxima over the later tokens.
        later_winners: winners among the later tokens.

    Returns:
        Maxima and winners, in the shape of the arguments.
    """
    is_first_nan = later_maxima.isnan() & ~maxima.isnan()
    later_wins = (later_maxima > maxima) | is_first_nan
    return (
        torch.where(later_wins, later_maxima, maxima),
        torch.where(later_wins, later_winners, winners),
    )


# Smooth maximum: a streaming log-sum-exp over a document's tokens, and its gradient


class ExponentialSums:
    """Accumulates the streaming log-sum-exp ``(largest, exp_sum)`` over a document's tokens.

    For similarities ``s_j``, ``exp_sum = sum_j exp((s_j - peak) / temperature)``. The peak is the
    largest similarity, or 0 if that is not finite. It is subtracted before the division, so that
    no exponent overflows for a small temperature.

    Args:
        temperature: temperature of the smooth maximum.
        n_masked: ``[n, 1]`` number of masked tokens of each document of the block, which count with
            a similarity of 0, or ``None``.
        dtype: dtype of the similarities.
        keep_exponentials: whether to keep the exponentials of every tile, which backward needs.

    Attributes:
        exponentials: tiles, each with its exponentials ``[n, L, C]``, if they are kept.
    """

    def __init__(
        self,
        temperature: float,
        n_masked: Tensor | None,
        dtype: torch.dtype,
        *,
        keep_exponentials: bool = False,
    ) -> None:
        """Start to accumulate the tiles of one block.

        Args:
            temperature: temperature of the smooth maximum.
            n_masked: ``[n, 1]`` number of masked tokens of each document, or ``None``.
            dtype: dtype of the similarities.
            keep_exponentials: whether to keep the exponentials of every tile, which backward needs.
        """
        # a subnormal number may count as 0, by which nothing can be divided
        self.temperature = max(temperature, torch.finfo(dtype).tiny)
        self.n_masked = n_masked
        self.keep_exponentials = keep_exponentials
        self.exponentials: list[tuple[Tile, Tensor]] = []

    def of_block(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return the peaks ``[n, C]`` and the sums of exponentials ``[n, C]`` of a block.

        A peak is the largest similarity, or 0 if that is not finite.
        """
        largest, exp_sum = block.accumulate(self)
        peak = _finite_or_zero(largest)
        if self.n_masked is not None:
            # `reduce` makes the peak of a document with masked tokens at least 0
            exponent = torch.where(self.n_masked > 0, -peak, float("-inf"))
            exp_sum = exp_sum + self.n_masked * (exponent / self.temperature).exp_()
        return peak, exp_sum

    def reduce(self, tile: Tile) -> tuple[Tensor, ...]:
        """Return the largest similarities ``[n, C]`` of a tile, and the sums of exponentials."""
        similarities = _mask_past_end(tile)
        largest = similarities.amax(dim=1)
        if self.n_masked is not None:
            has_masked = self.n_masked[tile.documents] > 0
            largest = torch.where(has_masked, largest.clamp_min(0), largest)
        exponentials = _exponentiate_in_place(
            similarities,
            _finite_or_zero(largest),
            self.temperature,
        )
        if self.keep_exponentials:
            self.exponentials.append((tile, exponentials))
        return largest, exponentials.sum(dim=1)

    def merge(
        self,
        earlier: tuple[Tensor, ...],
        later: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Return the largest similarities and the sums of two parts of the same documents.

        A sum of exponentials is relative to the peak of its part. Both sums are converted to the
        larger peak, and then added.
        """
        earlier_largest, earlier_exp_sum = earlier
        later_largest, later_exp_sum = later
        largest = torch.maximum(earlier_largest, later_largest)
        peak = _finite_or_zero(largest)
        earlier_exp_sum = self._rescale(peak, earlier_exp_sum, _finite_or_zero(earlier_largest))
        later_exp_sum = self._rescale(peak, later_exp_sum, _finite_or_zero(later_largest))
        return largest, earlier_exp_sum + later_exp_sum

    def _rescale(self, peak: Tensor, exp_sum: Tensor, old_peak: Tensor) -> Tensor:
        """Convert a sum of exponentials that is relative to ``old_peak`` to another peak."""
        factor = ((old_peak - peak) / self.temperature).exp()
        return torch.where(exp_sum == 0, 0, exp_sum * factor)

    def exponentials_of(self, tiles: Iterator[Tile], peak: Tensor) -> Iterator[tuple[Tile, Tensor]]:
        """Yield the tiles of a split document, each with its exponentials ``[n, L, C]``."""
        for tile in tiles:
            yield tile, _exponentiate_in_place(_mask_past_end(tile), peak, self.temperature)


def _mask_past_end(tile: Tile) -> Tensor:
    """Return the similarities ``[n, L, C]``, minus infinity past the end of a document."""
    exists = tile.tokens.exists
    if exists is None:
        return tile.similarities
    return tile.similarities.masked_fill_(~exists[:, :, None], float("-inf"))


def _finite_or_zero(largest: Tensor) -> Tensor:
    """Return the peak of the largest similarities: infinities and NaN are replaced by 0."""
    return torch.where(largest.isfinite(), largest, 0)


def _exponentiate_in_place(similarities: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """Compute ``exp((similarities - peak) / temperature)`` in place, and 0 for subnormal results.

    A subnormal number changes nothing in a sum of at least 1, and is very slow to compute.
    """
    exponents = similarities.sub_(peak[:, None]).div_(temperature)
    smallest_exponent = math.log(torch.finfo(similarities.dtype).tiny)
    return torch.threshold_(exponents, smallest_exponent, float("-inf")).exp_()


def _add_smooth_gradients(
    problem: Problem,
    queries: SequenceTokens,
    documents: SequenceTokens,
    grad: Tensor,
    dqueries: Tensor | None,
    ddocuments: Tensor | None,
) -> None:
    """Add the gradients of smooth maxima to ``dqueries`` and ``ddocuments``.

    Softmax weights are computed again for each tile. The saved maxima cannot be used: their
    rounding error, divided by a small temperature, would be part of an exponent.

    Args:
        problem: tensors and options of the call.
        queries: the tokens of all queries.
        documents: the tokens of all documents.
        grad: gradient of the scores, in fp32 (fp64).
        dqueries: ``[Tq, D]``, or ``None`` if it is not needed.
        ddocuments: ``[Td, D]``, or ``None`` if it is not needed.
    """
    masked_counts = documents.masked_counts() if problem.mask_zero else None
    for block in divide_into_blocks(problem, queries, documents):
        n_masked = None if masked_counts is None else masked_counts[block.documents]
        sums = ExponentialSums(
            problem.temperature,
            n_masked,
            block.query_vectors.dtype,
            keep_exponentials=not block.is_split,
        )
        peak, exp_sum = sums.of_block(block)
        nonzero_exp_sum = torch.where(exp_sum == 0, 1, exp_sum)
        scale = block.gradient_of_maxima(grad) / nonzero_exp_sum
        tiles: Iterable[tuple[Tile, Tensor]] = sums.exponentials
        if block.is_split:  # all exponentials of a long document would be too large to keep
            tiles = sums.exponentials_of(block.tiles(), peak)
        for tile, exponentials in tiles:
            dsimilarities = exponentials.mul_(scale[tile.documents, None])
            if dqueries is not None:
                document_vectors = tile.tokens.vectors_of(documents)
                block.add_query_gradient(dsimilarities, document_vectors, dqueries)
            if ddocuments is not None:
                _add_document_gradient(
                    dsimilarities @ block.query_vectors,
                    tile.tokens,
                    ddocuments,
                    documents_are_unique=problem.index is None,
                )


def _add_document_gradient(
    gradient: Tensor,
    tokens: TileTokens,
    ddocuments: Tensor,
    *,
    documents_are_unique: bool,
) -> None:
    """Add the gradient of the document tokens of one tile to ``ddocuments``.

    Args:
        gradient: ``[n, L, D]`` gradient of the tile's document tokens.
        tokens: the tile's document tokens.
        ddocuments: ``[Td, D]`` gradient of all document tokens.
        documents_are_unique: whether no document occurs twice in the tile.
    """
    if tokens.span is not None:  # consecutive rows
        ddocuments[tokens.span] += gradient.flatten(0, 1)
        return
    add_existing_rows(
        ddocuments,
        tokens.rows,
        tokens.exists,
        gradient,
        rows_are_unique=documents_are_unique,
    )
