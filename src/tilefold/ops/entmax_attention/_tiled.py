"""Alpha-entmax attention in torch operations on blocks of queries: the CPU and fallback path.

The scores of a block are held for all heads of one sequence, or of several short ones. Backward
computes them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import (
    GENERIC,
    SOFTMAX,
    alpha_formula,
    probabilities,
    row_gradients,
    row_weights,
)
from tilefold.ops._shared.philox import keep_mask
from tilefold.ops.entmax_attention._problem import (
    AttentionOptions,
    AttentionSaved,
    AttentionTensors,
    SequenceGroup,
    check_values,
    exponents,
    group_sequences,
    result_like,
    visible_pairs,
)

# Scores of a block: 1 MiB in fp32, so that its few temporaries stay in the cache.
TILE_ELEMENTS = 1 << 18


def forward(
    tensors: AttentionTensors,
    options: AttentionOptions,
    training: bool,
) -> tuple[Tensor, None, Tensor | None, None]:
    """Compute the attention output, and statistics of its rows if something reads them.

    A row is one query of one head. With its scores ``s_j = scale * (q . k_j)`` for the keys that it
    may attend to, the output is ``sum over j of entmax(s)_j * v_j``. Dropout multiplies the
    probabilities by factors before the sum.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: whether a backward pass may follow, which reads the statistics.

    Returns:
        The output, shaped like ``q``, and as third result statistics ``[4, B, H, Nq]``: largest
        score, root of the equation that makes the probabilities sum to 1, their sum before it was
        divided out, and number of positive probabilities of every row. Only kernels have the
        second and the fourth result, which are ``None`` here.
    """
    check_values(tensors, options)
    q = tensors.q
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = result_like(q).on(q.device).zero_()
    stats = torch.zeros(4, *tensors.stats_shape, dtype=dtype, device=q.device)
    stats[0] = -math.inf  # the largest score of a row without keys
    formula = alpha_formula(tensors.alpha, options.alpha_value)
    alpha_minus_1 = exponents(tensors.alpha, options, stats)
    for group in group_sequences(tensors, TILE_ELEMENTS):
        # Writes to these views change `out` and `stats`.
        group_out = group.queries(out)
        group_peak, group_root, group_mass, group_support = stats[group.stats_index]
        for block in _blocks(group, tensors, options, dtype):
            *row_shape, n_keys = block.scores.shape
            result = row_weights(
                block.scores.view(-1, n_keys),
                alpha_minus_1.expand(*row_shape, 1).reshape(-1, 1),
                formula,
            )
            probabilities = result.probabilities.view(block.scores.shape)
            group_peak[:, :, block.rows] = result.peak.view(row_shape)
            group_root[:, :, block.rows] = result.root.view(row_shape)
            group_mass[:, :, block.rows] = result.mass.view(row_shape)
            group_support[:, :, block.rows] = (probabilities > 0).sum(dim=-1)
            weights = probabilities
            if tensors.seed is not None:
                weights = weights * _dropout_factors(tensors.seed, group, block, options).to(dtype)
            block_out = _group_by_key_head(weights, block.values) @ block.values
            group_out[:, :, block.rows] = block_out.reshape(*row_shape, -1)
    returned_stats = stats if training or options.support else None
    return out, None, returned_stats, None


def backward(
    dout: Tensor,
    saved: AttentionSaved,
    options: AttentionOptions,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k, v and alpha from the gradient of the output.

    The probabilities are computed again from the scores and the saved statistics. Gradients are
    added up over blocks of queries in fp32 (fp64 for fp64 tensors).

    Args:
        dout: gradient of the output, shaped like ``q``.
        saved: tensors of the call, and statistics of its rows.
        options: checked options.
        needs: whether the gradients of q, k, v and alpha are needed, in this order.

    Returns:
        Gradients of q, k, v and alpha, with the dtypes and layouts of these tensors. A gradient
        that is not needed is ``None``.
    """
    tensors = saved.tensors
    q = tensors.q
    alpha = tensors.alpha
    need_q, need_k, need_v, need_alpha = needs
    dtype = saved.stats.dtype
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk = torch.zeros(tensors.k.shape, dtype=dtype, device=q.device)
    dv = torch.zeros(tensors.v.shape, dtype=dtype, device=q.device)
    dalpha = torch.zeros(q.size(1), dtype=dtype, device=q.device)
    formula = alpha_formula(alpha, options.alpha_value)
    alpha_minus_1 = exponents(alpha, options, saved.stats)
    for group in group_sequences(tensors, TILE_ELEMENTS):
        # Additions to these views change `dq`, `dk` and `dv`.
        group_dq = group.queries(dq)
        group_dk = group.keys(dk)
        group_dv = group.keys(dv)
        group_dout = group.queries(dout)
        group_stats = saved.stats[group.stats_index]
        for block in _blocks(group, tensors, options, dtype):
            keys = block.keys
            values = block.values
            peak, root, mass, _ = group_stats[:, :, :, block.rows, None]  # [b, H, n, 1] each
            probabilities = _recompute_probabilities(
                block.scores,
                peak,
                root,
                mass,
                alpha_minus_1,
                formula,
            )
            # Forward computed weights = probabilities * dropout factors, out = weights @ values.
            grouped_dout = _group_by_key_head(group_dout[:, :, block.rows].to(dtype), values)
            dweights = (grouped_dout @ values.mT).reshape(probabilities.shape)
            weights = probabilities
            dprobabilities = dweights
            if tensors.seed is not None:
                factors = _dropout_factors(tensors.seed, group, block, options).to(dtype)
                weights = probabilities * factors
                dprobabilities = dweights * factors
            dscores, row_dalpha = row_gradients(
                probabilities,
                dprobabilities,
                alpha_minus_1,
                formula,
                need_alpha,
            )
            dscores *= options.scale  # from now on the gradient of q @ k.T, before its scaling
            if need_q:
                block_dq = _group_by_key_head(dscores, keys) @ keys
                group_dq[:, :, block.rows] = block_dq.reshape(*probabilities.shape[:3], -1)
            if need_k:
                grouped_queries = _group_by_key_head(block.queries, keys)
                group_dk.add_(_group_by_key_head(dscores, keys).mT @ grouped_queries)
            if need_v:
                group_dv.add_(_group_by_key_head(weights, values).mT @ grouped_dout)
            if row_dalpha is not None:
                dalpha += row_dalpha.sum(dim=(0, -1))  # over sequences and queries: [H]
    return (
        _as_result(dq, q) if need_q else None,
        _as_result(dk, tensors.k) if need_k else None,
        _as_result(dv, tensors.v) if need_v else None,
        _as_result(dalpha, dalpha if alpha is None else alpha) if need_alpha else None,
    )


def _as_result(grad: Tensor, tensor: Tensor) -> Tensor:
    """Return the gradient of ``tensor`` in the dtype and layout that the operator promises."""
    if grad.dtype == tensor.dtype and tensor.is_contiguous():
        return grad
    return result_like(tensor).on(tensor.device).copy_(grad)


def _recompute_probabilities(
    scores: Tensor,
    peak: Tensor,
    root: Tensor,
    mass: Tensor,
    alpha_minus_1: Tensor,
    formula: str,
) -> Tensor:
    """Compute the probabilities of the forward pass from scores and saved statistics of their rows.

    Args:
        scores: ``[b, H, n, Nk]``, minus infinity for pairs that may not attend.
        peak: ``[b, H, n, 1]`` largest score of the row, minus infinity if it has no key.
        root: ``[b, H, n, 1]`` solution of the row's equation: ``log p_max``, or for alpha 1.5 and 2
            the power ``p_max^(alpha - 1)``, of its largest probability ``p_max``.
        mass: ``[b, H, n, 1]`` sum of the unnormalized probabilities of this root, nearly 1.
        alpha_minus_1: ``[H, 1, 1]`` or ``[1, 1, 1]``.
        formula: closed form for alpha = 1, 1.5 or 2, or :data:`GENERIC`.

    Returns:
        ``[b, H, n, Nk]`` probabilities, all 0 in a row without keys.
    """
    # minus infinity minus itself would be NaN
    is_empty = peak == -math.inf
    distances = torch.where(is_empty, 0.0, peak - scores)
    if formula == SOFTMAX:
        formula = GENERIC  # it also holds at alpha = 1, where the root is log p_max, too
    unnormalized = probabilities(distances, root, alpha_minus_1, formula)
    return torch.where(is_empty, 0.0, unnormalized / mass)


class _Block(NamedTuple):
    """Consecutive queries of a group of sequences, with all keys.

    Attributes:
        rows: positions of the ``n`` queries.
        scores: ``[b, H, n, Nk]``, minus infinity for pairs that may not attend.
        queries: ``[b, H, n, D]``.
        keys: ``[b, Hkv, Nk, D]``, 0 for masked keys.
        values: ``[b, Hkv, Nk, D]``, 0 for masked keys.
    """

    rows: slice
    scores: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


def _blocks(
    group: SequenceGroup,
    tensors: AttentionTensors,
    options: AttentionOptions,
    dtype: torch.dtype,
) -> Iterator[_Block]:
    """Divide the queries of some sequences into blocks, and compute their scores with all keys.

    A block has about ``TILE_ELEMENTS`` scores over all sequences and heads of the group. A group
    without keys has no blocks.

    Args:
        group: the sequences.
        tensors: tensors of the call.
        options: checked options.
        dtype: dtype of the blocks' tensors.
    """
    keys = group.keys(tensors.k).to(dtype)
    values = group.keys(tensors.v).to(dtype)
    n_keys = keys.size(2)
    if n_keys == 0:
        return
    if group.keep is not None:
        # A NaN of a masked key must not reach a product: 0 * NaN is NaN.
        masked = ~group.keep[:, None, :, None]
        keys = keys.masked_fill(masked, 0)
        values = values.masked_fill(masked, 0)
    group_queries = group.queries(tensors.q)  # [b, H, Nq, D]
    batch, n_heads, n_queries, _ = group_queries.shape
    block_size = max(1, TILE_ELEMENTS // (batch * n_heads * n_keys))
    for start in range(0, n_queries, block_size):
        rows = slice(start, min(start + block_size, n_queries))
        queries = group_queries[:, :, rows].to(dtype)
        yield _Block(
            rows=rows,
            scores=_masked_scores(queries, keys, n_queries, rows, group.keep, options),
            queries=queries,
            keys=keys,
            values=values,
        )


def _masked_scores(
    queries: Tensor,
    keys: Tensor,
    n_queries: int,
    rows: slice,
    keep: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Compute the scores of some queries with all keys, minus infinity for pairs that are hidden.

    Args:
        queries: ``[b, H, n, D]``.
        keys: ``[b, Hkv, Nk, D]``.
        n_queries: number of queries ``Nq`` of a sequence.
        rows: positions of the ``n`` queries.
        keep: ``[b, Nk]`` bools, false for masked keys, or ``None``.
        options: checked options.

    Returns:
        ``[b, H, n, Nk]``.
    """
    n_keys = keys.size(2)
    products = _group_by_key_head(queries, keys) @ keys.mT
    scores = products.reshape(*queries.shape[:3], n_keys) * options.scale
    visible = visible_pairs(
        n_queries,
        n_keys,
        rows.start,
        rows.stop,
        options,
        keep=None,  # sequences have different masks
        device=keys.device,
    )
    if keep is not None:
        visible = visible & keep[:, None, None]
    return scores.masked_fill_(~visible, -math.inf)


def _group_by_key_head(tensor: Tensor, keys: Tensor) -> Tensor:
    """View the ``H`` query heads of a tensor as ``Hkv`` groups that share a key head.

    The ``G = H / Hkv`` heads of a group become rows of one matrix, so that one product with the
    key head serves them all.

    Args:
        tensor: ``[b, H, n, x]``.
        keys: ``[b, Hkv, Nk, D]`` keys or values, of which only the first two sizes are used.

    Returns:
        ``[b, Hkv, G n, x]``.
    """
    return tensor.reshape(keys.size(0), keys.size(1), -1, tensor.size(-1))


def _dropout_factors(
    seed: Tensor,
    group: SequenceGroup,
    block: _Block,
    options: AttentionOptions,
) -> Tensor:
    """Return the factors by which dropout multiplies the probabilities of a block.

    A factor depends only on the seed and on the positions of sequence, head, query and key.
    Forward, backward and the kernels therefore use the same factors.

    Args:
        seed: ``[1]`` int64 seed.
        group: the sequences of the block.
        block: the queries of the block.
        options: checked options, with the probability of dropout.

    Returns:
        ``[b, H, n, Nk]`` fp64: 0 for a dropped weight, else ``1 / (1 - dropout_p)``.
    """
    device = block.scores.device
    batch, n_heads, _, n_keys = block.scores.shape
    # A plane is one head of one sequence. Planes are numbered across the batch.
    first_plane = group.first_sequence * n_heads
    planes = first_plane + torch.arange(batch * n_heads, device=device)
    queries = torch.arange(block.rows.start, block.rows.stop, device=device)[:, None]
    keys = torch.arange(n_keys, device=device)
    keep = keep_mask(seed, queries, keys, planes.view(batch, n_heads, 1, 1), options.dropout_p)
    return keep.double() / (1 - options.dropout_p)
