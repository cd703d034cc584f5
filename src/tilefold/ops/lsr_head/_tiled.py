"""The LSR head in torch operations on tiles: the CPU path, and the fallback on any device.

Forward reduces one ``[tokens, BLOCK_V]`` tile of logits at a time. Backward of max pooling reads
winners only. Products are computed in at least fp32, whatever the input's dtype: ``compute_dtype``,
which is for tensor cores, is not used.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tilefold.ops._shared.activation import (
    activate,
    activate_in_place,
    gradient_from_logit_in_place,
    gradient_from_score,
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
    pack_rows,
    update_maximum,
    vocabulary_tiles,
    wide_dtype,
)

SLAB_ENTRIES = 1 << 22  # (sequence, vocabulary) pairs whose gradients are sorted at a time
# Largest number of vocabulary columns of a slab, whose weight gradient exists twice for a moment.
SLAB_V = 16384


def forward(
    tensors: HeadTensors,
    options: HeadOptions,
    training: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the scores of the head, and the winners that backward reads.

    Args:
        tensors: tensors of the call.
        options: the checked options.
        training: whether backward may follow.

    Returns:
        ``[B, V]`` scores in ``out_dtype``, and winners: positions of the tokens that determine the
        scores, uint16 or int32. They are ``[B, V]`` for max pooling, ``[B, 1]`` for one-token
        poolings with a mask, and empty or ``None`` if backward does not read them.
    """
    # Values are checked unless a CUDA graph is captured, which cannot contain a synchronisation.
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
    """Compute the gradients of hidden, weight and bias, each in its parameter's dtype.

    Args:
        dscores: ``[B, V]`` gradient of the scores.
        saved: tensors that forward saved.
        options: the checked options.
        needs: which gradients are computed. The others are ``None``.
        main_grad: fp32 ``[V, D]`` buffer to which max pooling adds the weight's gradient, which is
            then returned as ``None``. Other poolings do not support it.
    """
    needed = Needs(*needs)
    if options.pooling == "max":
        dhidden, dweight, dbias = _max_backward(dscores, saved, options, needed, main_grad)
    elif options.pooling in ("sum", "mean"):
        dhidden, dweight, dbias = _sum_backward(dscores, saved, options, needed)
    else:
        dhidden, dweight, dbias = _one_token_backward(dscores, saved, options, needed)
    # The bias itself is not saved, so only here is its dtype known.
    if dbias is not None:
        dbias = dbias.to(options.bias_dtype)
    return dhidden, dweight, dbias


def _quantized_forward(tensors: HeadTensors, scale: Tensor, options: HeadOptions) -> Tensor:
    """Compute scores with an fp8 weight, and with token states that are rounded to fp8 too.

    The products of the rounded numbers are computed in fp32, one slab of the vocabulary at a time.

    Args:
        tensors: tensors of the call. The weight holds fp8 values.
        scale: ``[V]`` factors of the rows of the weight.
        options: the checked options.
    """
    # From here on the states and each slab of the weight are fp32, holding rounded values.
    rounded = tensors._replace(hidden=fake_quantized(tensors.hidden), weight_scale=None)
    values = tensors.weight
    bias = tensors.bias
    scores = []
    for first_column in range(0, values.size(0), SLAB_V):
        slab = slice(first_column, first_column + SLAB_V)
        slab_tensors = rounded._replace(
            weight=QuantizedWeight(values[slab], scale[slab]).dequantize(),
            bias=None if bias is None else bias[slab].float(),
        )
        slab_scores, _ = _max_forward(slab_tensors, options, with_winners=False)
        scores.append(slab_scores)
    return torch.cat(scores, dim=1)


# Max pooling


def _max_forward(
    tensors: HeadTensors,
    options: HeadOptions,
    with_winners: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the scores of max pooling, and for backward the tokens that have the maxima.

    Args:
        tensors: tensors of the call.
        options: the checked options.
        with_winners: whether backward needs the tokens with the largest logits, the winners.

    Returns:
        ``[B, V]`` scores in ``out_dtype``, and ``[B, V]`` winners, or ``[0, V]`` without them.
    """
    tokens = tensors.tokens
    packed = pack_rows(tokens)
    vocab = tensors.weight.size(0)
    logits = packed.rows.new_zeros(tokens.batch, vocab)
    # positions among the valid tokens of a sequence, without the masked ones
    winners = torch.zeros(
        tokens.batch if with_winners else 0,
        vocab,
        dtype=torch.int32,
        device=logits.device,
    )
    for tile in vocabulary_tiles(
        packed,
        tensors.weight,
        options.logit_scale,
        by_onednn=True,
    ):
        for run in tile.runs:  # sequences of equal length, or a part of a long sequence
            sequences = slice(run.first_sequence, run.end_sequence)
            update_maximum(
                logits[sequences, tile.columns],
                winners[sequences, tile.columns] if with_winners else None,
                run.logits,
                run.n_before,
            )
    # Activation and bias commute with the maximum, and so are applied once, to the maxima.
    if tensors.bias is not None:
        logits = logits + tensors.bias.to(logits.dtype)
    scores = activate(logits, options.activation)
    is_empty = torch.tensor(packed.offsets, device=scores.device).diff() == 0
    scores[is_empty] = 0
    if with_winners:
        winners = _positions_in_sequence(winners, packed, tokens)
    else:
        winners = winners.to(winner_dtype(tokens.length_bound))
    return scores.to(options.out_dtype), winners


def _positions_in_sequence(winners: Tensor, packed: PackedRows, tokens: Tokens) -> Tensor:
    """Convert each winner, the token with the largest logit, to its position in the padded input.

    Args:
        winners: ``[B, V]``; a winner is counted among the unmasked tokens of its sequence only.
        packed: the unmasked tokens of all sequences, one after another.
        tokens: all tokens, masked ones included.

    Returns:
        ``[B, V]`` positions among all tokens of a sequence, and the mark :func:`no_winner` for a
        sequence without unmasked tokens.
    """
    # The lengths may be on a GPU, so their bound chooses between uint16 and int32.
    dtype = winner_dtype(tokens.length_bound)
    offsets = torch.tensor(packed.offsets, device=winners.device)
    if packed.positions is not None and packed.positions.numel():
        # packed.positions are rows of the input [B * S, D]: the remainder is the position below S.
        position_in_sequence = packed.positions % tokens.length
        packed_winners = winners + offsets[:-1, None]
        # Empty sequences at the end of the batch would read past the last token.
        packed_winners.clamp_(max=position_in_sequence.numel() - 1)
        winners = position_in_sequence[packed_winners]
    is_empty = (offsets.diff() == 0)[:, None]
    # uint16 supports few operations, so the cast comes last.
    return winners.int().masked_fill(is_empty, no_winner(dtype)).to(dtype)


def _max_backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: Needs,
    main_grad: Tensor | None,
) -> Gradients:
    """Compute the gradients of max pooling as weighted sums of gathered rows.

    With the gradients ``g`` of the largest logits, and ``winner[b, v]`` the token that has the
    largest one, row ``v`` of ``dweight`` sums ``g[b, v] * hidden[b, winner[b, v]]`` over the
    sequences b. A row of ``dhidden`` sums ``g[b, v] * weight[v]`` over the scores whose winner is
    its token. Columns are processed in slabs, to bound the memory.

    Args:
        dscores: gradient of the scores, ``[B, V]``.
        saved: what the forward pass saved.
        options: the checked options.
        needs: which gradients are needed.
        main_grad: buffer to which the gradient of the weight is added, or ``None``.
    """
    tokens = saved.tokens
    hidden = saved.hidden
    weight = saved.weight
    scores = cast(Tensor, saved.scores)
    winners = cast(Tensor, saved.winners)
    dtype = wide_dtype(hidden.dtype)
    rows = hidden.reshape(-1, hidden.size(-1))
    batch, vocab = scores.shape
    if saved.cu_seqlens is not None:
        starts = saved.cu_seqlens[:-1].long()
    else:
        starts = torch.arange(batch, device=hidden.device) * tokens.length
    dhidden = rows.new_zeros(rows.shape, dtype=dtype) if needs.hidden else None
    dweight = weight.new_zeros(weight.shape) if needs.weight and main_grad is None else None
    dbias = rows.new_zeros(vocab, dtype=dtype) if needs.bias else None
    wide_rows = rows.to(dtype) if needs.weight else rows
    slab_width = max(1, min(SLAB_V, SLAB_ENTRIES // max(batch, 1)))
    for first_column in range(0, vocab, slab_width):
        slab = slice(first_column, min(first_column + slab_width, vocab))
        grad, winner_rows = _logit_gradient(  # [Vs, B]
            dscores[:, slab],
            scores[:, slab],
            winners[:, slab],
            starts,
            options.activation,
            dtype,
        )
        if dbias is not None:
            dbias[slab] = grad.sum(dim=1)
        # Entries, the scores with a gradient, are sorted by column, then by sequence.
        entry_v, entry_b = grad.nonzero(as_tuple=True)
        entry_grad = grad[entry_v, entry_b] * options.logit_scale
        entry_row = winner_rows[entry_v, entry_b]
        if main_grad is not None or dweight is not None:
            slab_dweight = _sum_of_rows(wide_rows, entry_row, entry_v, entry_grad, grad.size(0))
            if main_grad is not None:
                main_grad[slab].add_(slab_dweight)
            elif dweight is not None:
                dweight[slab].copy_(slab_dweight)
        if dhidden is not None:
            entry_row, order = entry_row.sort(stable=True)
            dhidden += _sum_of_rows(
                weight[slab].to(dtype),
                entry_v[order],
                entry_row,
                entry_grad[order],
                rows.size(0),
            )
    if dhidden is not None:
        dhidden = dhidden.to(hidden.dtype).view(hidden.shape)
    return dhidden, dweight, dbias


def _logit_gradient(
    dscores: Tensor,
    scores: Tensor,
    winners: Tensor,
    starts: Tensor,
    activation: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of each score's largest logit, and the row of hidden of its token.

    Args:
        dscores: ``[B, Vs]`` gradient of the scores of Vs columns of the vocabulary.
        scores: ``[B, Vs]``.
        winners: ``[B, Vs]`` positions of the tokens with the largest logits, in their sequences.
        starts: ``[B]`` first rows of the sequences.
        activation: function applied to the logits.
        dtype: dtype of the gradients.

    Returns:
        ``[Vs, B]`` gradients, 0 for a sequence without valid tokens, and ``[Vs, B]`` rows of
        ``hidden``.
    """
    positions = winners.to(torch.int32)
    has_winner = positions != no_winner(winners.dtype)
    grad = gradient_from_score(dscores.to(dtype), scores.to(dtype), activation)
    winner_rows = torch.where(has_winner, positions, 0) + starts[:, None]
    return torch.where(has_winner, grad, torch.zeros_like(grad)).T, winner_rows.T


def _sum_of_rows(
    table: Tensor,
    row: Tensor,
    target: Tensor,
    coefficient: Tensor,
    n_targets: int,
) -> Tensor:
    """Return weighted sums of rows of a table, one for each target.

    ``out[t]`` is the sum of ``coefficient[e] * table[row[e]]`` over the entries e with
    ``target[e] == t``.

    Args:
        table: ``[N, D]``.
        row: ``[E]`` rows of the table.
        target: ``[E]`` targets, sorted.
        coefficient: ``[E]``.
        n_targets: number of targets.
    """
    counts = torch.bincount(target, minlength=n_targets)
    offsets = counts.cumsum(0) - counts
    if row.numel() == 0:
        return table.new_zeros(n_targets, table.size(1))
    return embedding_bag(row, table, offsets, mode="sum", per_sample_weights=coefficient)


# Sums and means: every token counts, so backward computes each tile of logits again


def _sum_forward(tensors: HeadTensors, options: HeadOptions) -> Tensor:
    """Compute the scores ``[B, V]`` of sum and mean pooling, one tile of logits at a time.

    Args:
        tensors: tensors of the call.
        options: checked options.
    """
    packed = pack_rows(tensors.tokens)
    bias = tensors.bias
    scores = packed.rows.new_zeros(tensors.tokens.batch, tensors.weight.size(0))
    for tile in vocabulary_tiles(packed, tensors.weight, options.logit_scale):
        for run in tile.runs:  # sequences of equal length, or a part of a long sequence
            if bias is not None:
                run.logits.add_(bias[tile.columns].to(scores.dtype))
            pooled = activate_in_place(run.logits, options.activation).sum(dim=1)
            scores[run.first_sequence : run.end_sequence, tile.columns] += pooled
    if options.pooling == "mean":
        scores /= packed.lengths()[:, None]
    return scores.to(options.out_dtype)


def _sum_backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: Needs,
) -> Gradients:
    """Compute the gradients of sum and mean pooling, from logits that are computed again.

    The gradient of the logit of token ``t`` of sequence ``b`` is ``dscores[b, v]``, for a mean
    divided by the sequence's length, times the slope of the activation.

    Args:
        dscores: ``[B, V]`` gradient of the scores.
        saved: tensors that forward saved.
        options: the checked options.
        needs: which gradients are computed.
    """
    hidden = saved.hidden
    weight = saved.weight
    bias = saved.bias
    packed = pack_rows(saved.tokens)
    rows = packed.rows
    scale = options.logit_scale
    grad = dscores.to(rows.dtype)
    if options.pooling == "mean":
        grad = grad / packed.lengths()[:, None]
    drows = torch.zeros_like(rows) if needs.hidden else None
    dweight = weight.new_zeros(weight.shape) if needs.weight else None
    dbias = rows.new_zeros(weight.size(0)) if needs.bias else None
    for tile in vocabulary_tiles(packed, weight, scale):
        tile_dweight = torch.zeros_like(tile.weight)
        for run in tile.runs:  # sequences of equal length, or a part of a long sequence
            if bias is not None:
                run.logits.add_(bias[tile.columns].to(rows.dtype))
            run_grad = grad[run.first_sequence : run.end_sequence, None, tile.columns]
            dlogits = gradient_from_logit_in_place(run_grad, run.logits, options.activation)
            dlogits = dlogits.flatten(0, 1)
            run_rows = slice(run.start_row, run.start_row + dlogits.size(0))
            if dbias is not None:
                dbias[tile.columns] += dlogits.sum(dim=0)
            if drows is not None:
                drows[run_rows].addmm_(dlogits, tile.weight, alpha=scale)
            if dweight is not None:
                tile_dweight.addmm_(dlogits.T, rows[run_rows], alpha=scale)
        if dweight is not None:
            dweight[tile.columns] = tile_dweight
    if drows is None:
        return None, dweight, dbias
    dhidden = drows.to(hidden.dtype)
    if packed.positions is not None:
        padded = dhidden.new_zeros(hidden.shape).view(-1, hidden.size(-1))
        dhidden = padded.index_copy_(0, packed.positions, dhidden)
    return dhidden.view(hidden.shape), dweight, dbias


# Poolings of one token per sequence, cls and last: a gather and a plain product


def _one_token_forward(
    tensors: HeadTensors,
    options: HeadOptions,
    training: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the scores of poolings that select the first or the last valid token.

    Args:
        tensors: tensors of the call.
        options: the checked options.
        training: whether backward may follow.

    Returns:
        ``[B, V]`` scores, and ``[B, 1]`` positions of the tokens for backward; ``None`` without
        training or without a mask.
    """
    tokens = tensors.tokens
    positions = None
    if tokens.attention_mask is not None:
        positions = _masked_positions(tokens, tokens.attention_mask, options.pooling)
    selected = _select_tokens(tokens, positions, options.pooling)
    logits = selected.states @ tensors.weight.to(selected.states.dtype).T
    if options.logit_scale != 1.0:
        logits *= options.logit_scale
    if tensors.bias is not None:
        logits += tensors.bias
    scores = activate(logits, options.activation).masked_fill_(~selected.has_token[:, None], 0)
    return scores.to(options.out_dtype), positions if training else None


def _one_token_backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: Needs,
) -> Gradients:
    """Compute the gradients of poolings that select the first or the last valid token.

    Args:
        dscores: ``[B, V]`` gradient of the scores.
        saved: tensors that forward saved.
        options: the checked options.
        needs: which gradients are computed.
    """
    tokens = saved.tokens
    hidden = saved.hidden
    positions = saved.winners
    if positions is not None and positions.size(0) == 0:
        positions = None  # the registered operator saves an empty tensor instead of None
    selected = _select_tokens(tokens, positions, options.pooling)
    has_token = selected.has_token
    dtype = selected.states.dtype
    scores = cast(Tensor, saved.scores).to(dtype)
    grad = gradient_from_score(dscores.to(dtype), scores, options.activation)
    grad = grad.masked_fill(~has_token[:, None], 0)
    dbias = grad.sum(dim=0) if needs.bias else None
    grad = grad * options.logit_scale
    dhidden = None
    dweight = None
    if needs.hidden:
        dstates = (grad @ saved.weight.to(dtype)).to(hidden.dtype)
        drows = hidden.new_zeros(tokens.n_rows, hidden.size(-1))
        drows[selected.row_of_token[has_token]] = dstates[has_token]
        dhidden = drows.view(hidden.shape)
    if needs.weight:
        dweight = (grad.T @ selected.states).to(saved.weight.dtype)
    return dhidden, dweight, dbias


def _masked_positions(tokens: Tokens, mask: Tensor, pooling: str) -> Tensor:
    """Return the position of the first or the last valid token of each sequence.

    Args:
        tokens: the token states.
        mask: ``[B, S]``, nonzero = valid.
        pooling: ``"cls"`` for the first tokens, ``"last"`` for the last ones.

    Returns:
        ``[B, 1]`` positions, and :func:`no_winner` for a sequence without valid tokens.
    """
    dtype = winner_dtype(tokens.length_bound)
    valid = mask != 0
    token_positions = torch.arange(mask.size(1), device=mask.device)
    if mask.size(1) == 0:  # a maximum over no tokens is an error
        selected = torch.zeros(mask.size(0), 1, dtype=torch.long, device=mask.device)
    elif pooling == "last":
        selected = torch.where(valid, token_positions, -1).amax(dim=1, keepdim=True)
    else:
        selected = torch.where(valid, token_positions, mask.size(1)).amin(dim=1, keepdim=True)
    has_token = valid.any(dim=1, keepdim=True)
    # Torch casts int64 to uint16 only by way of int32 on some devices.
    return torch.where(has_token, selected, no_winner(dtype)).int().to(dtype)


class _SelectedTokens(NamedTuple):
    """One token of each sequence.

    Attributes:
        states: ``[B, D]`` token states in the accumulators' dtype, zeros without a valid token.
        row_of_token: ``[B]`` row of hidden of the token, 0 without a valid token.
        has_token: ``[B]`` whether the sequence has a valid token.
    """

    states: Tensor
    row_of_token: Tensor
    has_token: Tensor


def _select_tokens(tokens: Tokens, positions: Tensor | None, pooling: str) -> _SelectedTokens:
    """Gather the first or last valid token of each sequence.

    Args:
        tokens: the token states.
        positions: ``[B, 1]`` positions of the tokens, if a mask determines them.
        pooling: ``"cls"`` or ``"last"``.
    """
    hidden = tokens.hidden
    rows, has_token = _selected_rows(tokens, positions, is_last=pooling == "last")
    rows = torch.where(has_token, rows, 0)
    dtype = wide_dtype(hidden.dtype)
    if tokens.n_rows == 0:
        states = hidden.new_zeros(tokens.batch, hidden.size(-1), dtype=dtype)
    else:
        states = hidden.reshape(-1, hidden.size(-1))[rows]
        states = states.masked_fill(~has_token[:, None], 0).to(dtype)
    return _SelectedTokens(states, rows, has_token)


def _selected_rows(
    tokens: Tokens,
    positions: Tensor | None,
    is_last: bool,
) -> tuple[Tensor, Tensor]:
    """Return the ``[B]`` rows of hidden that are selected, and ``[B]`` whether there is one.

    Args:
        tokens: the token states.
        positions: ``[B, 1]`` positions of the tokens, if a mask determines them.
        is_last: whether the last token is selected, and not the first.
    """
    if tokens.cu_seqlens is not None:
        offsets = tokens.cu_seqlens.long()
        rows = offsets[1:] - 1 if is_last else offsets[:-1]
        return rows, offsets.diff() > 0
    first_rows = torch.arange(tokens.batch, device=tokens.hidden.device) * tokens.length
    if positions is not None:
        selected = positions[:, 0].int()
        return first_rows + selected, selected != no_winner(positions.dtype)
    rows = first_rows + (tokens.length - 1 if is_last else 0)
    return rows, torch.full_like(first_rows, tokens.length > 0, dtype=torch.bool)
