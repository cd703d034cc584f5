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

from tilefold.ops._shared.activation import activate, activate_in_place, slope_from_score, slope_in_place
from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head import _one_token
from tilefold.ops.lsr_head._problem import (
    Gradients,
    HeadOptions,
    HeadSaved,
    HeadTensors,
    Needs,
    PackedRows,
    Tokens,
    pack_rows,
)
from tilefold.ops.lsr_head._tiles import keep_maximum, max_tiles, sequence_tiles, vocabulary_tiles

SLAB_ENTRIES = 1 << 22  # (sequence, vocabulary) pairs whose gradients are sorted at a time
SLAB_V = 16384  # vocabulary entries of a slab at most: its weight gradient exists twice for a moment


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products accumulate in: fp32, or fp64 for fp64 input."""
    return torch.promote_types(dtype, torch.float32)


def forward(tensors: HeadTensors, options: HeadOptions, training: bool) -> tuple[Tensor, Tensor | None]:
    """Scores ``[B, V]`` in ``out_dtype``, and winners (uint16 or int32; empty, or none, where none are kept)."""
    if options.pooling == "max":
        return _max_forward(tensors, options, training)
    if options.pooling in ("sum", "mean"):
        return _sum_forward(tensors, options), None
    return _one_token.forward(tensors, options, training)


def backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: tuple[bool, ...],
    main_grad: Tensor | None = None,
) -> Gradients:
    """Gradients of hidden, weight and bias (``None`` where not needed), each in its parameter's dtype.

    With ``main_grad``, fp32 ``[V, D]``, the weight's gradient is added to it and not returned.
    """
    wanted = Needs(*needs)
    if options.pooling == "max":
        gradients = _max_backward(dscores, saved, options, wanted, main_grad)
    elif options.pooling in ("sum", "mean"):
        gradients = _sum_backward(dscores, saved, options, wanted)
    else:
        gradients = _one_token.backward(dscores, saved, options, wanted)
    dhidden, dweight, dbias = gradients
    return dhidden, dweight, dbias if dbias is None else dbias.to(options.bias_dtype)


def _max_forward(tensors: HeadTensors, options: HeadOptions, with_winners: bool) -> tuple[Tensor, Tensor]:
    tokens, hidden, weight, bias = tensors.tokens, tensors.hidden, tensors.weight, tensors.bias
    bound = tokens.length_bound
    packed = _packed_in_compute_dtype(tokens)
    batch, vocab = len(packed.offsets) - 1, weight.size(0)
    scores = torch.zeros(batch, vocab, dtype=packed.rows.dtype, device=hidden.device)
    winners = torch.zeros(batch if with_winners else 0, vocab, dtype=torch.int32, device=hidden.device)
    for v0, v1, i, j, before, logits in max_tiles(packed, weight, options.logit_scale):
        keep_maximum(scores[i:j, v0:v1], winners[i:j, v0:v1] if with_winners else None, logits, before)
    # the activation and the bias commute with the maximum, so they wait for all of it
    scores = activate(scores if bias is None else scores + bias.to(scores.dtype), options.activation)
    empty = [b for b, (i, j) in enumerate(zip(packed.offsets[:-1], packed.offsets[1:], strict=True)) if i == j]
    scores[empty] = 0
    winners = _positions_in_sequence(winners, packed, tokens) if with_winners else winners.to(winner_dtype(bound))
    return scores.to(options.out_dtype), winners


def _max_backward(
    dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: Needs, main_grad: Tensor | None
) -> Gradients:
    """Both matrix gradients are weighted sums of gathered rows, one owner each.

    The weight's row ``v`` sums ``g[b, v] * hidden[b, winner[b, v]]`` over b, the hidden row sums
    ``g[b, v] * weight[v]`` over what it won.
    """
    tokens, hidden, cu_seqlens, weight = saved.tokens, saved.hidden, saved.cu_seqlens, saved.weight
    scores, winners = saved.scores, saved.winners
    if scores is None or winners is None:
        raise ValueError("scores and winners must be tensors in the backward pass of max pooling, got None.")
    dtype = wide_dtype(hidden.dtype)
    rows = hidden.reshape(-1, hidden.size(-1))
    batch, vocab = scores.shape
    starts = torch.arange(batch, device=hidden.device) * tokens.length
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1].long()
    dhidden = torch.zeros(rows.shape, dtype=dtype, device=hidden.device) if needs.hidden else None
    dweight = (
        torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        if needs.weight and main_grad is None
        else None
    )
    dbias = torch.zeros(vocab, dtype=dtype, device=hidden.device) if needs.bias else None
    compute_rows = rows.to(dtype) if needs.weight else rows
    slab = max(1, min(SLAB_V, SLAB_ENTRIES // max(batch, 1)))
    for v0 in range(0, vocab, slab):
        v1 = min(v0 + slab, vocab)
        columns = dscores[:, v0:v1], scores[:, v0:v1], winners[:, v0:v1]
        grad, row = _logit_gradient(*columns, starts, options.activation, dtype)  # [Vs, B]
        if dbias is not None:
            dbias[v0:v1] = grad.sum(dim=1)
        entry_v, entry_b = grad.nonzero(as_tuple=True)  # sorted by vocabulary entry, then by sequence
        entry_grad = grad[entry_v, entry_b] * options.logit_scale
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


def _sum_forward(tensors: HeadTensors, options: HeadOptions) -> Tensor:
    """``[B, V]`` sum or mean over valid tokens of the activated logits."""
    hidden, weight, bias = tensors.hidden, tensors.weight, tensors.bias
    packed = _packed_in_compute_dtype(tensors.tokens)
    batch, vocab = len(packed.offsets) - 1, weight.size(0)
    scores = torch.zeros(batch, vocab, dtype=packed.rows.dtype, device=hidden.device)
    for v0, v1, tile_weight, tile_bias in vocabulary_tiles(weight, bias, packed.rows.dtype):
        for piece, logits in sequence_tiles(packed, tile_weight, options.logit_scale):
            if tile_bias is not None:
                logits.add_(tile_bias)
            scores[piece.first : piece.last, v0:v1] += activate_in_place(logits, options.activation).sum(dim=1)
    if options.pooling == "mean":
        scores /= _lengths(packed, scores)[:, None]
    return scores.to(options.out_dtype)


def _sum_backward(dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: Needs) -> Gradients:
    """Gradients of sum and mean pooling: every token counts, so each tile of logits is computed again."""
    hidden, weight, bias = saved.hidden, saved.weight, saved.bias
    packed = _packed_in_compute_dtype(saved.tokens)
    rows = packed.rows
    grad = dscores.to(rows.dtype)
    if options.pooling == "mean":
        grad = grad / _lengths(packed, grad)[:, None]
    drows = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device) if needs.hidden else None
    dweight = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device) if needs.weight else None
    dbias = torch.zeros(weight.size(0), dtype=rows.dtype, device=rows.device) if needs.bias else None
    for v0, v1, tile_weight, tile_bias in vocabulary_tiles(weight, bias, rows.dtype):
        tile_dweight = torch.zeros_like(tile_weight)
        for piece, logits in sequence_tiles(packed, tile_weight, options.logit_scale):
            if tile_bias is not None:
                logits.add_(tile_bias)
            tile_grad = grad[piece.first : piece.last, None, v0:v1]
            dlogits = slope_in_place(logits, options.activation).mul_(tile_grad).flatten(0, 1)
            if dbias is not None:
                dbias[v0:v1] += dlogits.sum(dim=0)
            if drows is not None:
                drows[piece.start : piece.end].addmm_(dlogits, tile_weight, alpha=options.logit_scale)
            tile_dweight.addmm_(dlogits.T, rows[piece.start : piece.end], alpha=options.logit_scale)
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


def _packed_in_compute_dtype(tokens: Tokens) -> PackedRows:
    packed = pack_rows(tokens)
    return PackedRows(packed.rows.to(wide_dtype(tokens.hidden.dtype)), packed.offsets, packed.index)


def _positions_in_sequence(winners: Tensor, packed: PackedRows, tokens: Tokens) -> Tensor:
    """Turn the count of valid tokens before the winner into its position, and mark empty sequences."""
    dtype = winner_dtype(tokens.length_bound)
    offsets = torch.tensor(packed.offsets, device=winners.device)
    if packed.index is not None:
        position = packed.index % tokens.length
        last_row = max(position.numel() - 1, 0)
        if position.numel():
            winners = position[(winners + offsets[:-1, None]).clamp_(max=last_row)]
    empty = (offsets[1:] == offsets[:-1])[:, None]
    return winners.int().masked_fill(empty, no_winner(dtype)).to(dtype)


def _logit_gradient(
    dscores: Tensor, scores: Tensor, winners: Tensor, starts: Tensor, activation: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``[Vs, B]`` gradient of the winning logits of a slab, and the row of hidden that holds each winner."""
    winner = winners.to(torch.int32)
    has_winner = winner != no_winner(winners.dtype)
    grad = dscores.to(dtype) * slope_from_score(scores.to(dtype), activation)
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
