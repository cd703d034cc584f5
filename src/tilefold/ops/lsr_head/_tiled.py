"""The LSR head in torch operations on tiles: the CPU path, and the fallback on any device.

Forward folds one ``[tokens, BLOCK_V]`` tile of logits at a time; backward of max pooling touches
winners only. Products are taken in at least fp32, whatever the input's dtype: ``compute_dtype``,
for tensor cores, is not used.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tilefold.ops._shared.activation import (
    activate,
    activate_in_place,
    slope_from_score,
    slope_in_place,
)
from tilefold.ops._shared.impl import host_may_read
from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head._problem import (
    Gradients,
    HeadOptions,
    HeadSaved,
    HeadTensors,
    Needs,
    Tokens,
    check_values,
)
from tilefold.ops.lsr_head._quantized import QuantizedWeight, fake_quantized
from tilefold.ops.lsr_head._tiles import (
    PackedRows,
    keep_maximum,
    pack_rows,
    vocabulary_tiles,
    wide_dtype,
)

SLAB_ENTRIES = 1 << 22  # (sequence, vocabulary) pairs whose gradients are sorted at a time
SLAB_V = (
    16384  # vocabulary entries of a slab at most: its weight gradient exists twice for a moment
)


def forward(
    tensors: HeadTensors,
    options: HeadOptions,
    training: bool,
) -> tuple[Tensor, Tensor | None]:
    """Scores ``[B, V]`` in ``out_dtype``, and winners (uint16 or int32; empty, or none, where none
    are kept).
    """
    if host_may_read(tensors.hidden.device, "tiled"):
        check_values(tensors, options)
    if tensors.weight_scale is not None:
        return _quantized_forward(tensors, tensors.weight_scale, options), None
    if options.pooling == "max":
        return _max_forward(tensors, options, training)
    if options.pooling in ("sum", "mean"):
        return _sum_forward(tensors, options), None
    return _one_token_forward(tensors, options, training)


def backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: tuple[bool, ...],
    main_grad: Tensor | None = None,
) -> Gradients:
    """Gradients of hidden, weight and bias (``None`` where not needed), each in its parameter's
    dtype.

    With ``main_grad``, fp32 ``[V, D]``, the weight's gradient is added to it and not returned.
    """
    wanted = Needs(*needs)
    if options.pooling == "max":
        gradients = _max_backward(dscores, saved, options, wanted, main_grad)
    elif options.pooling in ("sum", "mean"):
        gradients = _sum_backward(dscores, saved, options, wanted)
    else:
        gradients = _one_token_backward(dscores, saved, options, wanted)
    dhidden, dweight, dbias = gradients
    return dhidden, dweight, dbias if dbias is None else dbias.to(options.bias_dtype)


def _quantized_forward(tensors: HeadTensors, scale: Tensor, options: HeadOptions) -> Tensor:
    """Scores of the rounded operands, multiplied in fp32, a slab of the vocabulary at a time."""
    rounded = tensors._replace(hidden=fake_quantized(tensors.hidden), weight_scale=None)
    values, bias, slabs = tensors.weight, tensors.bias, []
    for v0 in range(0, values.size(0), SLAB_V):
        part = slice(v0, v0 + SLAB_V)
        weight = QuantizedWeight(values[part], scale[part]).dequantize()
        slab = rounded._replace(weight=weight, bias=None if bias is None else bias[part].float())
        slabs.append(_max_forward(slab, options, with_winners=False)[0])
    return torch.cat(slabs, dim=1)


# Max pooling


def _max_forward(
    tensors: HeadTensors,
    options: HeadOptions,
    with_winners: bool,
) -> tuple[Tensor, Tensor]:
    tokens, weight, bias = tensors.tokens, tensors.weight, tensors.bias
    packed = pack_rows(tokens)
    scores = packed.rows.new_zeros(tokens.batch, weight.size(0))
    winners = torch.zeros(
        tokens.batch if with_winners else 0,
        scores.size(1),
        dtype=torch.int32,
        device=scores.device,
    )
    for columns, _, runs in vocabulary_tiles(packed, weight, options.logit_scale, by_onednn=True):
        for run in runs:
            part = slice(run.first, run.last), columns
            keep_maximum(
                scores[part],
                winners[part] if with_winners else None,
                run.tokens,
                run.before,
            )
    # the activation and the bias commute with the maximum, so they wait for all of it
    scores = activate(
        scores if bias is None else scores + bias.to(scores.dtype),
        options.activation,
    )
    scores[torch.tensor(packed.offsets, device=scores.device).diff() == 0] = 0
    dtype = winner_dtype(tokens.length_bound)
    winners = _positions_in_sequence(winners, packed, tokens) if with_winners else winners.to(dtype)
    return scores.to(options.out_dtype), winners


def _positions_in_sequence(winners: Tensor, packed: PackedRows, tokens: Tokens) -> Tensor:
    """Turn the count of valid tokens before the winner into its position, and mark empty sequences."""
    dtype = winner_dtype(tokens.length_bound)
    offsets = torch.tensor(packed.offsets, device=winners.device)
    if packed.places is not None and packed.places.numel():
        position = packed.places % tokens.length
        winners = position[(winners + offsets[:-1, None]).clamp_(max=position.numel() - 1)]
    return winners.int().masked_fill((offsets.diff() == 0)[:, None], no_winner(dtype)).to(dtype)


def _max_backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: Needs,
    main_grad: Tensor | None,
) -> Gradients:
    """Both matrix gradients are weighted sums of gathered rows, one owner each.

    The weight's row ``v`` sums ``g[b, v] * hidden[b, winner[b, v]]`` over b, the hidden row sums
    ``g[b, v] * weight[v]`` over what it won.
    """
    tokens, hidden, weight = saved.tokens, saved.hidden, saved.weight
    scores, winners = cast(Tensor, saved.scores), cast(Tensor, saved.winners)
    dtype = wide_dtype(hidden.dtype)
    rows = hidden.reshape(-1, hidden.size(-1))
    batch, vocab = scores.shape
    starts = torch.arange(batch, device=hidden.device) * tokens.length
    if saved.cu_seqlens is not None:
        starts = saved.cu_seqlens[:-1].long()
    dhidden = rows.new_zeros(rows.shape, dtype=dtype) if needs.hidden else None
    dweight = weight.new_zeros(weight.shape) if needs.weight and main_grad is None else None
    dbias = rows.new_zeros(vocab, dtype=dtype) if needs.bias else None
    target, store = (dweight, Tensor.copy_) if main_grad is None else (main_grad, Tensor.add_)
    compute_rows = rows.to(dtype) if needs.weight else rows
    slab = max(1, min(SLAB_V, SLAB_ENTRIES // max(batch, 1)))
    for v0 in range(0, vocab, slab):
        part = slice(v0, min(v0 + slab, vocab))
        columns = dscores[:, part], scores[:, part], winners[:, part]
        grad, row = _logit_gradient(*columns, starts, options.activation, dtype)  # [Vs, B]
        if dbias is not None:
            dbias[part] = grad.sum(dim=1)
        entry_v, entry_b = grad.nonzero(
            as_tuple=True,
        )  # sorted by vocabulary entry, then by sequence
        entry_grad = grad[entry_v, entry_b] * options.logit_scale
        entry_row = row[entry_v, entry_b]
        if target is not None:
            store(
                target[part],
                _sum_of_rows(compute_rows, entry_row, entry_v, entry_grad, grad.size(0)),
            )
        if dhidden is not None:
            entry_row, order = entry_row.sort(stable=True)
            dhidden += _sum_of_rows(
                weight[part].to(dtype),
                entry_v[order],
                entry_row,
                entry_grad[order],
                rows.size(0),
            )
    return None if dhidden is None else dhidden.to(hidden.dtype).view(hidden.shape), dweight, dbias


def _logit_gradient(
    dscores: Tensor,
    scores: Tensor,
    winners: Tensor,
    starts: Tensor,
    activation: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``[Vs, B]`` gradient of the winning logits of a slab, and the row of hidden that holds each
    winner.
    """
    winner = winners.to(torch.int32)
    has_winner = winner != no_winner(winners.dtype)
    grad = dscores.to(dtype) * slope_from_score(scores.to(dtype), activation)
    row = torch.where(has_winner, winner, 0) + starts[:, None]
    return torch.where(has_winner, grad, torch.zeros_like(grad)).T, row.T


def _sum_of_rows(
    table: Tensor,
    row: Tensor,
    owner: Tensor,
    coefficient: Tensor,
    owners: int,
) -> Tensor:
    """``out[o] = sum over entries e with owner[e] == o of coefficient[e] * table[row[e]]``;
    ``owner`` is sorted.
    """
    counts = torch.bincount(owner, minlength=owners)
    offsets = counts.cumsum(0) - counts
    if row.numel() == 0:
        return table.new_zeros(owners, table.size(1))
    return embedding_bag(row, table, offsets, mode="sum", per_sample_weights=coefficient)


# Sums and means: every token counts, so backward computes each tile of logits again


def _sum_forward(tensors: HeadTensors, options: HeadOptions) -> Tensor:
    packed, bias = pack_rows(tensors.tokens), tensors.bias
    scores = packed.rows.new_zeros(tensors.tokens.batch, tensors.weight.size(0))
    for columns, _, runs in vocabulary_tiles(packed, tensors.weight, options.logit_scale):
        for run in runs:
            if bias is not None:
                run.tokens.add_(bias[columns].to(scores.dtype))
            pooled = activate_in_place(run.tokens, options.activation).sum(dim=1)
            scores[run.first : run.last, columns] += pooled
    if options.pooling == "mean":
        scores /= packed.lengths()[:, None]
    return scores.to(options.out_dtype)


def _sum_backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: Needs,
) -> Gradients:
    hidden, weight, bias, packed = saved.hidden, saved.weight, saved.bias, pack_rows(saved.tokens)
    rows, scale = packed.rows, options.logit_scale
    grad = dscores.to(rows.dtype)
    if options.pooling == "mean":
        grad = grad / packed.lengths()[:, None]
    drows = torch.zeros_like(rows) if needs.hidden else None
    dweight = weight.new_zeros(weight.shape) if needs.weight else None
    dbias = rows.new_zeros(weight.size(0)) if needs.bias else None
    for columns, tile_weight, runs in vocabulary_tiles(packed, weight, scale):
        tile_dweight = torch.zeros_like(tile_weight)
        for run in runs:
            if bias is not None:
                run.tokens.add_(bias[columns].to(rows.dtype))
            tile_grad = grad[run.first : run.last, None, columns]
            dlogits = slope_in_place(run.tokens, options.activation).mul_(tile_grad).flatten(0, 1)
            part = slice(run.start, run.start + dlogits.size(0))
            if dbias is not None:
                dbias[columns] += dlogits.sum(dim=0)
            if drows is not None:
                drows[part].addmm_(dlogits, tile_weight, alpha=scale)
            if dweight is not None:
                tile_dweight.addmm_(dlogits.T, rows[part], alpha=scale)
        if dweight is not None:
            dweight[columns] = tile_dweight
    if drows is None:
        return None, dweight, dbias
    dhidden = drows.to(hidden.dtype)
    if packed.places is not None:
        dhidden = (
            dhidden.new_zeros(hidden.shape)
            .view(-1, hidden.size(-1))
            .index_copy_(0, packed.places, dhidden)
        )
    return dhidden.view(hidden.shape), dweight, dbias


# Poolings of one token per sequence, cls and last: a gather and a plain product


def _one_token_forward(
    tensors: HeadTensors,
    options: HeadOptions,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """Scores ``[B, V]``, and for backward the positions of the tokens, ``[B, 1]`` where a mask
    hides them.
    """
    tokens, weight, bias = tensors.tokens, tensors.weight, tensors.bias
    winners = _one_winner(tokens, options.pooling)
    token, _, valid = _taken(tokens, winners, options.pooling)
    logits = token @ weight.to(token.dtype).T
    if options.logit_scale != 1.0:
        logits *= options.logit_scale
    if bias is not None:
        logits += bias
    scores = activate(logits, options.activation).masked_fill_(~valid[:, None], 0)
    return scores.to(options.out_dtype), winners if training else winners[:0]


def _one_token_backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: Needs,
) -> Gradients:
    tokens, hidden, scores, winners = (
        saved.tokens,
        saved.hidden,
        cast(Tensor, saved.scores),
        saved.winners,
    )
    winners = (
        _one_winner(tokens, options.pooling) if winners is None else winners
    )  # kernels keep none without a mask
    token, row, valid = _taken(tokens, winners, options.pooling)
    grad = dscores.to(token.dtype) * slope_from_score(scores.to(token.dtype), options.activation)
    grad = grad.masked_fill(~valid[:, None], 0)
    dbias = grad.sum(dim=0) if needs.bias else None
    grad = grad * options.logit_scale
    dhidden = dweight = None
    if needs.hidden:
        drows = hidden.new_zeros(tokens.n_rows, hidden.size(-1))
        drows[row[valid]] = (grad @ saved.weight.to(grad.dtype)).to(hidden.dtype)[valid]
        dhidden = drows.view(hidden.shape)
    if needs.weight:
        dweight = (grad.T @ token).to(saved.weight.dtype)
    return dhidden, dweight, dbias


def _one_winner(tokens: Tokens, pooling: str) -> Tensor:
    """Positions of the first or last valid tokens ``[B, 1]`` under a mask, ``[0, 1]`` without."""
    hidden, mask, _ = tokens
    dtype = winner_dtype(tokens.length_bound)
    if mask is None:
        return torch.empty(0, 1, dtype=dtype, device=hidden.device)
    if mask.size(1) == 0:
        return torch.full(
            (mask.size(0), 1),
            no_winner(dtype),
            dtype=torch.int32,
            device=hidden.device,
        ).to(dtype)
    valid = mask != 0
    places = torch.arange(mask.size(1), device=hidden.device)
    if pooling == "last":
        place = torch.where(valid, places, -1).amax(dim=1, keepdim=True)
    else:
        place = torch.where(valid, places, mask.size(1)).amin(dim=1, keepdim=True)
    return torch.where(valid.any(dim=1, keepdim=True), place, no_winner(dtype)).int().to(dtype)


def _taken(tokens: Tokens, winners: Tensor, pooling: str) -> tuple[Tensor, Tensor, Tensor]:
    """The token that each sequence takes ``[B, D]`` in the wide dtype, its row ``[B]``, and whether
    there is one.

    Where there is none, the token is zeros and the row 0.
    """
    hidden, mask, cu_seqlens = tokens
    if cu_seqlens is not None:
        valid = cu_seqlens.diff() > 0
        row = cu_seqlens[1:].long() - 1 if pooling == "last" else cu_seqlens[:-1].long()
    else:
        row = torch.arange(tokens.batch, device=hidden.device) * tokens.length
        if mask is not None or winners.size(0):
            place = winners[:, 0].int()
            valid = place != no_winner(winners.dtype)
            row = row + place
        else:
            valid = torch.full_like(row, tokens.length > 0, dtype=torch.bool)
            row = row + (tokens.length - 1 if pooling == "last" else 0)
    row, wide = torch.where(valid, row, 0), wide_dtype(hidden.dtype)
    if tokens.n_rows == 0:
        return hidden.new_zeros(tokens.batch, hidden.size(-1), dtype=wide), row, valid
    return (
        hidden.reshape(-1, hidden.size(-1))[row].masked_fill(~valid[:, None], 0).to(wide),
        row,
        valid,
    )
