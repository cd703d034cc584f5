"""The LSR head in torch operations on tiles: the CPU path, and the fallback on any device.

Forward folds one ``[tokens, BLOCK_V]`` tile of logits at a time; backward of max pooling touches winners only.
A sequence whose logits fill more than a tile is cut along its tokens, so no layout makes memory grow with tokens times
vocabulary; the bound stands in ``README.md``. Products are taken in at least fp32, whatever the input's dtype:
``compute_dtype``, for tensor cores, is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tilefold.ops.lsr_head._activation import activate, activate_in_place, slope_from_score, slope_in_place
from tilefold.ops.lsr_head._layout import PackedRows, no_winner, pack_rows, winner_dtype
from tilefold.ops.lsr_head._tiles import keep_maximum, max_tiles, sequence_tiles, vocabulary_tiles

SLAB_ENTRIES = 1 << 22  # (sequence, vocabulary) pairs whose gradients are sorted at a time
SLAB_V = 16384  # vocabulary entries of a slab at most: its weight gradient exists twice for a moment


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products accumulate in: fp32, or fp64 for fp64 input."""
    return torch.promote_types(dtype, torch.float32)


def max_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    with_winners: bool,
    length_bound: int,
) -> tuple[Tensor, Tensor]:
    """Scores ``[B, V]`` in ``out_dtype``, and winners ``[B, V]`` (uint16 or int32; empty unless asked for)."""
    packed = _packed_in_compute_dtype(hidden, attention_mask, cu_seqlens)
    batch, vocab = len(packed.offsets) - 1, weight.size(0)
    scores = torch.zeros(batch, vocab, dtype=packed.rows.dtype, device=hidden.device)
    winners = torch.zeros(batch if with_winners else 0, vocab, dtype=torch.int32, device=hidden.device)
    for v0, v1, i, j, before, tokens in max_tiles(packed, weight, logit_scale):
        keep_maximum(scores[i:j, v0:v1], winners[i:j, v0:v1] if with_winners else None, tokens, before)
    # the activation and the bias commute with the maximum, so they wait for all of it
    scores = activate(scores if bias is None else scores + bias.to(scores.dtype), activation)
    empty = [b for b, (i, j) in enumerate(zip(packed.offsets[:-1], packed.offsets[1:], strict=True)) if i == j]
    scores[empty] = 0
    if with_winners:
        winners = _positions_in_sequence(winners, packed, attention_mask, length_bound)
    return scores.to(out_dtype), winners


def max_backward(
    dscores: Tensor,
    scores: Tensor,
    winners: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    needs: tuple[bool, bool, bool],
    main_grad: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias (``None`` where not needed), each in its parameter's dtype.

    With ``main_grad``, fp32 ``[V, D]``, the weight's gradient is added to it and not returned.

    Both matrix gradients are weighted sums of gathered rows, one owner each: the weight's row ``v`` sums
    ``g[b, v] * hidden[b, winner[b, v]]`` over b, the hidden row sums ``g[b, v] * weight[v]`` over what it won.
    """
    need_hidden, need_weight, need_bias = needs
    dtype = wide_dtype(hidden.dtype)
    rows = hidden.reshape(-1, hidden.size(-1))
    batch, vocab = scores.shape
    if cu_seqlens is None:
        starts = torch.arange(batch, device=hidden.device) * (hidden.size(1) if hidden.dim() == 3 else 0)
    else:
        starts = cu_seqlens[:-1].long()
    dhidden = torch.zeros(rows.shape, dtype=dtype, device=hidden.device) if need_hidden else None
    dweight = (
        torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        if need_weight and main_grad is None
        else None
    )
    dbias = torch.zeros(vocab, dtype=dtype, device=hidden.device) if need_bias else None
    compute_rows = rows.to(dtype) if need_weight else rows
    slab = max(1, min(SLAB_V, SLAB_ENTRIES // max(batch, 1)))
    for v0 in range(0, vocab, slab):
        v1 = min(v0 + slab, vocab)
        grad, row = _logit_gradient(dscores, scores, winners, starts, v0, v1, activation, dtype)  # [Vs, B]
        if dbias is not None:
            dbias[v0:v1] = grad.sum(dim=1)
        entry_v, entry_b = grad.nonzero(as_tuple=True)  # sorted by vocabulary entry, then by sequence
        entry_grad = grad[entry_v, entry_b] * logit_scale
        entry_row = row[entry_v, entry_b]
        target = main_grad if main_grad is not None else dweight
        if target is not None:
            _add_or_store(
                target[v0:v1],
                _sum_of_rows(compute_rows, entry_row, entry_v, entry_grad, v1 - v0),
                main_grad is not None,
            )
        if dhidden is not None:
            entry_row, order = entry_row.sort(stable=True)
            tile_weight = weight[v0:v1].to(dtype)
            dhidden += _sum_of_rows(tile_weight, entry_v[order], entry_row, entry_grad[order], rows.size(0))
    return (
        dhidden.to(hidden.dtype).view(hidden.shape) if dhidden is not None else None,
        dweight,
        dbias,
    )


def _add_or_store(target: Tensor, gradient: Tensor, add: bool) -> None:
    """A function of its own, so that the slab's gradient is gone before the next one is made."""
    if add:
        target += gradient
    else:
        target.copy_(gradient)


def sum_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    mean: bool,
) -> Tensor:
    """``[B, V]`` sum or mean over valid tokens of the activated logits."""
    packed = _packed_in_compute_dtype(hidden, attention_mask, cu_seqlens)
    batch, vocab = len(packed.offsets) - 1, weight.size(0)
    scores = torch.zeros(batch, vocab, dtype=packed.rows.dtype, device=hidden.device)
    for v0, v1, tile_weight, tile_bias in vocabulary_tiles(weight, bias, packed.rows.dtype):
        for piece, logits in sequence_tiles(packed, tile_weight, logit_scale):
            if tile_bias is not None:
                logits.add_(tile_bias)
            scores[piece.first : piece.last, v0:v1] += activate_in_place(logits, activation).sum(dim=1)
    if mean:
        scores /= _lengths(packed, scores)[:, None]
    return scores.to(out_dtype)


def sum_backward(
    dscores: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    mean: bool,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of sum and mean pooling: every token counts, so each tile of logits is computed again."""
    need_hidden, need_weight, need_bias = needs
    packed = _packed_in_compute_dtype(hidden, attention_mask, cu_seqlens)
    rows = packed.rows
    grad = dscores.to(rows.dtype)
    if mean:
        grad = grad / _lengths(packed, grad)[:, None]
    drows = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device) if need_hidden else None
    dweight = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device) if need_weight else None
    dbias = torch.zeros(weight.size(0), dtype=rows.dtype, device=rows.device) if need_bias else None
    for v0, v1, tile_weight, tile_bias in vocabulary_tiles(weight, bias, rows.dtype):
        tile_dweight = torch.zeros_like(tile_weight)
        for piece, logits in sequence_tiles(packed, tile_weight, logit_scale):
            if tile_bias is not None:
                logits.add_(tile_bias)
            tile_grad = grad[piece.first : piece.last, None, v0:v1]
            dlogits = slope_in_place(logits, activation).mul_(tile_grad).flatten(0, 1)
            if dbias is not None:
                dbias[v0:v1] += dlogits.sum(dim=0)
            if drows is not None:
                drows[piece.start : piece.end].addmm_(dlogits, tile_weight, alpha=logit_scale)
            tile_dweight.addmm_(dlogits.T, rows[piece.start : piece.end], alpha=logit_scale)
        if dweight is not None:
            dweight[v0:v1] = tile_dweight
    dhidden = None
    if drows is not None:
        dhidden = drows.to(hidden.dtype)
        if packed.index is not None:
            flat = dhidden.new_zeros(hidden.shape).view(-1, hidden.size(-1))
            dhidden = flat.index_copy_(0, packed.index, dhidden)
        dhidden = dhidden.view(hidden.shape)
    return dhidden, dweight, dbias


def _packed_in_compute_dtype(hidden: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> PackedRows:
    packed = pack_rows(hidden, mask, cu_seqlens)
    return PackedRows(packed.rows.to(wide_dtype(hidden.dtype)), packed.offsets, packed.index)


def _positions_in_sequence(
    winners: Tensor, packed: PackedRows, attention_mask: Tensor | None, length_bound: int
) -> Tensor:
    """Turn the count of valid tokens before the winner into its position, and mark empty sequences."""
    dtype = winner_dtype(length_bound)
    offsets = torch.tensor(packed.offsets, device=winners.device)
    if packed.index is not None and attention_mask is not None:
        position = packed.index % attention_mask.size(1)
        last_row = max(position.numel() - 1, 0)
        if position.numel():
            winners = position[(winners + offsets[:-1, None]).clamp_(max=last_row)]
    empty = (offsets[1:] == offsets[:-1])[:, None]
    return winners.int().masked_fill(empty, no_winner(dtype)).to(dtype)


def _logit_gradient(
    dscores: Tensor,
    scores: Tensor,
    winners: Tensor,
    starts: Tensor,
    v0: int,
    v1: int,
    activation: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``[Vs, B]`` gradient of the winning logits of a slab, and the row of hidden that holds each winner."""
    winner = winners[:, v0:v1].to(torch.int32)
    has_winner = winner != no_winner(winners.dtype)
    score = scores[:, v0:v1].to(dtype)
    grad = dscores[:, v0:v1].to(dtype) * slope_from_score(score, activation)
    grad = torch.where(has_winner, grad, torch.zeros_like(grad))
    row = torch.where(has_winner, winner, 0) + starts[:, None]
    return grad.T, row.T


def _sum_of_rows(table: Tensor, row: Tensor, owner: Tensor, coefficient: Tensor, owners: int) -> Tensor:
    """``out[o] = sum over entries e with owner[e] == o of coefficient[e] * table[row[e]]``; ``owner`` is sorted."""
    counts = torch.bincount(owner, minlength=owners)
    offsets = counts.cumsum(0) - counts
    if row.numel() == 0:
        return table.new_zeros(owners, table.size(1))
    return embedding_bag(row, table, offsets, mode="sum", per_sample_weights=coefficient)


def _lengths(packed: PackedRows, like: Tensor) -> Tensor:
    """``[B]`` sequence lengths, at least 1, in the dtype and on the device of ``like``."""
    offsets = torch.tensor(packed.offsets, device=like.device)
    return (offsets[1:] - offsets[:-1]).clamp_(min=1).to(like.dtype)
