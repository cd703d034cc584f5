"""Statistics of the rows of an attention: thresholds, supports, residuals and block counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilefold.ops._shared.offsets import sequences_of_rows
from tilefold.ops._shared.plan import cdiv
from tilefold.ops.entmax_attention._problem import AttentionOptions, AttentionTensors, exponents

SPARSITY_BLOCK = 64
TILE_ELEMENTS = 1 << 22  # largest number of scores in memory


class EntmaxStats(NamedTuple):
    """Statistics of the rows of an attention, ``[B, H, Nq]`` (packed ``[1, H, Tq]``).

    Attributes:
        tau: fp32 threshold: ``p = [(alpha - 1) s - tau]_+^(1 / (alpha - 1))`` of the scaled scores
            s. For alpha = 1 it is the log of softmax's denominator. It is NaN for a row with
            nothing to attend to.
        support: int32 number of keys with a positive probability, before dropout.
        residual: fp32 ``|mass - 1|`` of the root, before the mass was divided out.
        visible: int32 number of keys that the row may attend to.
        live_blocks: int32 ``[B, H]`` (packed ``[1, H]``), with ``return_stats="blocks"``: blocks of
            64 queries by 64 keys with a positive probability, else ``None``.
        visible_blocks: int32, like ``live_blocks``: blocks with a pair that may attend. Pairs that
            a mask, causality or a window hides do not count as sparsity.
    """

    tau: Tensor
    support: Tensor
    residual: Tensor
    visible: Tensor
    live_blocks: Tensor | None = None
    visible_blocks: Tensor | None = None

    def nonzero_share(self) -> Tensor:
        """Return the share of visible pairs with a positive probability, by head.

        Returns:
            ``[H]`` fp32, NaN for a head without visible pairs.
        """
        return _ratio(
            self.support.sum(dim=(0, 2)),
            self.visible.expand_as(self.support).sum(dim=(0, 2)),
        )

    def mean_support(self) -> Tensor:
        """Return the mean number of positive probabilities of rows that see a key, by head.

        Returns:
            ``[H]`` fp32.
        """
        return _ratio(
            self.support.sum(dim=(0, 2)),
            (self.visible.expand_as(self.support) > 0).sum(dim=(0, 2)),
        )

    def live_share(self) -> Tensor:
        """Return the share of unmasked blocks that have a positive probability, by head.

        Returns:
            ``[H]`` fp32.

        Raises:
            ValueError: if blocks were not counted.
        """
        if self.live_blocks is None or self.visible_blocks is None:
            raise ValueError(
                "live_blocks must be a tensor, got None, since blocks were not counted; call with "
                "return_stats='blocks'.",
            )
        return _ratio(self.live_blocks.sum(dim=0), self.visible_blocks.sum(dim=0))


class RowStats(NamedTuple):
    """Thresholds, support sizes and residuals of rows, as :class:`EntmaxStats` defines them."""

    tau: Tensor
    support: Tensor
    residual: Tensor


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide integers in fp32; torch would divide them in its default dtype."""
    return numerator.float() / denominator.float()


def convert_row_stats(stats: Tensor, alpha: Tensor | None, options: AttentionOptions) -> RowStats:
    """Convert the statistics that the forward pass saved into those that callers see.

    With ``e = alpha - 1``, entmax is ``p = [e s - tau]_+^(1/e)``. The largest score of a row, its
    peak, therefore gives ``tau = e peak - p_max^e``. For alpha = 1 it is ``peak - log p_max``.

    Args:
        stats: ``[4, B, H, Nq]`` of each row: peak; root, which is ``p_max^e`` or ``log p_max``;
            mass, the sum of the probabilities before it was divided out; and support size.
        alpha: ``[H]`` alpha of each head, or ``None``.
        options: checked options.
    """
    peak, root, mass, support = stats.detach().unbind(0)  # [B, H, Nq] each
    e = exponents(None if alpha is None else alpha.detach(), options, stats)  # [H or 1, 1, 1]
    e = e.transpose(0, 1)
    if alpha is None and options.alpha_value in (1.5, 2.0):  # closed forms, whose root is p_max^e
        tau = e * peak - root
    else:  # the root is log p_max
        tau = torch.where(e == 0, peak - root, e * peak - torch.exp(e * root))
    is_empty = peak == -math.inf
    return RowStats(
        tau=torch.where(is_empty, math.nan, tau).float(),
        support=support.int(),
        residual=torch.where(is_empty, 0.0, (mass - 1).abs()).float(),
    )


def complete_stats(
    rows: RowStats,
    tensors: AttentionTensors,
    options: AttentionOptions,
    *,
    with_blocks: bool,
) -> EntmaxStats:
    """Add to the statistics of rows the numbers of keys and, optionally, of blocks that they see.

    Args:
        rows: thresholds, support sizes and residuals.
        tensors: tensors of the call.
        options: checked options.
        with_blocks: whether to count blocks of queries and keys with a positive probability.
    """
    live_blocks = None
    visible_blocks = None
    if with_blocks:
        live_blocks, visible_blocks = count_blocks(
            tensors,
            options,
            rows.tau,
            query_padding_mask=None,
            block=SPARSITY_BLOCK,
        )
    return EntmaxStats(
        tau=rows.tau,
        support=rows.support,
        residual=rows.residual,
        visible=count_visible_keys(tensors, options).expand_as(rows.support),
        live_blocks=live_blocks,
        visible_blocks=visible_blocks,
    )


def count_visible_keys(tensors: AttentionTensors, options: AttentionOptions) -> Tensor:
    """Count the keys that each row may attend to.

    Causality and a window leave each query a range of keys. The count is the length of this range,
    or with a mask the number of unmasked keys in it.

    Args:
        tensors: tensors of the call.
        options: checked options.

    Returns:
        int32 ``[B, 1, Nq]`` (packed ``[1, 1, Tq]``).
    """
    q = tensors.q
    mask = tensors.key_padding_mask
    cu_q = tensors.cu_seqlens_q
    cu_k = tensors.cu_seqlens_k
    n_queries: Tensor | int
    n_keys: Tensor | int
    if cu_q is not None and cu_k is not None:
        sequences, queries = _sequence_positions(cu_q, q.size(0))
        n_queries = cu_q.diff()[sequences]
        n_keys = cu_k.diff()[sequences]
    else:
        n_queries = q.size(2)
        n_keys = tensors.k.size(2)
        queries = torch.arange(q.size(-2), device=q.device)
    positions = queries + (n_keys - n_queries)  # of the queries among the keys
    # each query may attend to the keys `start` to `stop` of its sequence
    start = torch.zeros_like(positions)
    stop = torch.zeros_like(positions) + n_keys
    if options.causal:
        stop = torch.minimum(stop, positions + 1)
    if options.has_window:
        start = torch.maximum(start, positions - options.window)
        stop = torch.minimum(stop, positions + options.window + 1)
    stop = torch.maximum(start, stop)
    if cu_q is not None:
        return (stop - start).to(torch.int32).view(1, 1, -1)
    padded_keys = tensors.k.size(2)
    if mask is None:
        keep = torch.ones(1, padded_keys, dtype=torch.bool, device=q.device)
    else:
        keep = mask != 0
    # With more queries than keys, the range of a query may lie outside of the keys.
    n_kept_before = pad(keep.cumsum(dim=1), (1, 0))  # [B, Nk + 1]
    counts = (
        n_kept_before[:, stop.clamp(0, padded_keys)]
        - n_kept_before[:, start.clamp(max=padded_keys)]
    )
    return counts.clamp_min(0).to(torch.int32)[:, None].expand(q.size(0), 1, -1)


class _Tokens(NamedTuple):
    """Queries or keys of a matrix of scores that is divided into blocks.

    Attributes:
        vectors: ``[H, n, D]``, or ``[Hkv, n, D]``.
        sequences: ``[n]`` sequence of each token.
        positions: ``[n]`` position of each token among the keys of its sequence.
        blocks: ``[n]`` block of each token.
        n_blocks: number of blocks, or an upper bound.
        unmasked: ``[n]`` bools, false for tokens that a padding mask hides, or ``None``.
    """

    vectors: Tensor
    sequences: Tensor
    positions: Tensor
    blocks: Tensor
    n_blocks: int
    unmasked: Tensor | None


def count_blocks(
    tensors: AttentionTensors,
    options: AttentionOptions,
    tau: Tensor,
    query_padding_mask: Tensor | None,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Count live blocks, which have a positive weight, and visible ones, which have a visible pair.

    A pair of a query and a key is visible if no mask, causality or window hides it. Scores are
    computed again, in fp32, a tile at a time. Nothing waits for the device.

    Args:
        tensors: tensors of the call.
        options: checked options.
        tau: ``[B, H, Nq]`` (packed ``[1, H, Tq]``) thresholds of the rows.
        query_padding_mask: ``[B, Nq]`` (packed ``[Tq]``), nonzero for queries that are counted, or
            ``None``.
        block: number of queries, and of keys, of a block.

    Returns:
        int32 ``[B, H]`` (packed ``[1, H]``) numbers of live blocks, and of visible blocks.
    """
    q = tensors.q
    counts = torch.zeros(2, tau.size(0), q.size(1), dtype=torch.int32, device=q.device)
    with torch.autocast(q.device.type, enabled=False), torch.no_grad():
        tau = tau.float()
        alpha_minus_1 = exponents(tensors.alpha, options, tau)
        matrices = _score_matrices(tensors, query_padding_mask, block)
        for index, (queries, keys) in enumerate(matrices):
            counts[:, index] = _count_blocks_of_matrix(
                queries,
                keys,
                tau[index],
                alpha_minus_1,
                options,
            )
    return counts[0], counts[1]


def _count_blocks_of_matrix(
    queries: _Tokens,
    keys: _Tokens,
    tau: Tensor,
    e: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Count the live and the visible blocks of a matrix of scores.

    A block is visible if one of its pairs is visible, and live if the weight of such a pair is
    positive: ``e * score > tau``, or for alpha = 1 ``exp(score - tau) > 0``.

    Args:
        queries: ``n`` queries.
        keys: ``m`` keys.
        tau: ``[H, n]`` thresholds.
        e: ``alpha - 1``, ``[H, 1, 1]`` or ``[1, 1, 1]``.
        options: checked options.

    Returns:
        ``[2, H]`` numbers of live and of visible blocks.
    """
    n_heads, n_queries, _ = queries.vectors.shape
    n_keys = keys.vectors.size(1)
    # For each head and block the number of rows with a pair of positive weight, and in the last
    # plane the number of rows with a visible pair. They are counted by products of zeros and ones,
    # which are exact and deterministic, and whose shapes do not depend on values.
    row_counts = torch.zeros(n_heads + 1, queries.n_blocks, keys.n_blocks, device=tau.device)
    key_blocks = _one_hot(keys.blocks, keys.n_blocks)
    key_vectors = keys.vectors.float()
    if keys.unmasked is not None:  # a masked NaN must not reach a product
        key_vectors = key_vectors.masked_fill(~keys.unmasked[:, None], 0)
    n_key_heads, _, dim = key_vectors.shape
    step = max(1, TILE_ELEMENTS // max(1, n_heads * n_keys))
    for first in range(0, n_queries, step):
        rows = slice(first, min(first + step, n_queries))
        visible = _visible_pairs(queries, keys, rows, options)
        row_vectors = queries.vectors[:, rows].float().reshape(n_key_heads, -1, dim)
        products = row_vectors @ key_vectors.mT
        scores = products.view(n_heads, rows.stop - rows.start, n_keys) * options.scale
        threshold = tau[:, rows, None]
        is_positive = torch.where(e == 0, torch.exp(scores - threshold) > 0, e * scores > threshold)
        pairs = torch.cat([is_positive & visible, visible[None]])  # [H + 1, rows, m]
        # For each row whether it has a pair in each block of keys, then summed by block of rows.
        in_key_block = (pairs.float() @ key_blocks) > 0
        row_blocks = _one_hot(queries.blocks[rows], queries.n_blocks).T
        row_counts += row_blocks @ in_key_block.float()
    n_blocks = (row_counts > 0).sum(dim=(1, 2))
    return torch.stack([n_blocks[:-1], n_blocks[-1:].expand(n_heads)])


def _visible_pairs(
    queries: _Tokens,
    keys: _Tokens,
    rows: slice,
    options: AttentionOptions,
) -> Tensor:
    """Return which pairs of some queries and all keys are visible.

    Args:
        queries: all queries.
        keys: all keys, ``m`` tokens.
        rows: the selected queries.
        options: checked options.

    Returns:
        ``[rows, m]`` bools.
    """
    query_positions = queries.positions[rows, None]
    visible = queries.sequences[rows, None] == keys.sequences
    if options.causal:
        visible &= keys.positions <= query_positions
    if options.has_window:
        visible &= (keys.positions - query_positions).abs() <= options.window
    if keys.unmasked is not None:
        visible = visible & keys.unmasked
    if queries.unmasked is not None:
        visible = visible & queries.unmasked[rows, None]
    return visible


def _score_matrices(
    tensors: AttentionTensors,
    query_padding_mask: Tensor | None,
    block: int,
) -> Iterator[tuple[_Tokens, _Tokens]]:
    """Yield the queries and keys of each matrix of scores, divided into blocks.

    A padded batch has one matrix for each sequence, a packed batch one for all sequences.

    Args:
        tensors: tensors of the call.
        query_padding_mask: ``[B, Nq]`` (packed ``[Tq]``), nonzero for queries that are counted, or
            ``None``.
        block: number of queries, and of keys, of a block.
    """
    q = tensors.q
    k = tensors.k
    mask = tensors.key_padding_mask
    cu_q = tensors.cu_seqlens_q
    cu_k = tensors.cu_seqlens_k
    if cu_q is not None and cu_k is not None:
        query_sequences, queries = _sequence_positions(cu_q, q.size(0))
        key_sequences, keys = _sequence_positions(cu_k, k.size(0))
        # The last query of a sequence has the position of its last key.
        shift = (cu_k.diff() - cu_q.diff())[query_sequences]
        unmasked = None if query_padding_mask is None else query_padding_mask.reshape(-1) != 0
        # Lengths stay on the device, so the numbers of blocks are upper bounds.
        yield (
            _Tokens(
                vectors=q.transpose(0, 1),
                sequences=query_sequences,
                positions=queries + shift,
                blocks=_first_blocks(cu_q, block)[query_sequences] + queries // block,
                n_blocks=q.size(0) // block + tensors.batch,
                unmasked=unmasked,
            ),
            _Tokens(
                vectors=k.transpose(0, 1),
                sequences=key_sequences,
                positions=keys,
                blocks=_first_blocks(cu_k, block)[key_sequences] + keys // block,
                n_blocks=k.size(0) // block + tensors.batch,
                unmasked=None,
            ),
        )
        return
    queries = torch.arange(q.size(2), device=q.device)
    keys = torch.arange(k.size(2), device=q.device)
    for sequence in range(q.size(0)):
        yield (
            _Tokens(
                vectors=q[sequence],
                sequences=torch.zeros_like(queries),
                positions=queries + k.size(2) - q.size(2),
                blocks=queries // block,
                n_blocks=cdiv(q.size(2), block),
                unmasked=None if query_padding_mask is None else query_padding_mask[sequence] != 0,
            ),
            _Tokens(
                vectors=k[sequence],
                sequences=torch.zeros_like(keys),
                positions=keys,
                blocks=keys // block,
                n_blocks=cdiv(k.size(2), block),
                unmasked=None if mask is None else mask[sequence] != 0,
            ),
        )


def _one_hot(positions: Tensor, size: int) -> Tensor:
    """Return ``[n, size]`` fp32 rows that are 1 at these positions."""
    return (positions[:, None] == torch.arange(size, device=positions.device)).float()


def _sequence_positions(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of every packed token, and its position in the sequence."""
    last_sequence = max(offsets.numel() - 2, 0)
    sequences = sequences_of_rows(offsets, total).clamp(max=last_sequence)
    token_numbers = torch.arange(total, device=offsets.device)
    return sequences, token_numbers - offsets.long()[sequences]


def _first_blocks(offsets: Tensor, block: int) -> Tensor:
    """Return the number of the first block of every packed sequence."""
    n_blocks = (offsets.long().diff() + (block - 1)) // block
    return pad(n_blocks.cumsum(0), (1, 0))[:-1]
