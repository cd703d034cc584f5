"""Launch plans of sum and mean pooling, with torch's products between, and of poolings of one token per sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.tensors import cdiv, power_of_two
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, TorchStep, contiguous, in_dtype
from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head._problem import HeadOptions, HeadSaved, HeadTensors, Needs, Tokens
from tilefold.ops.lsr_head._triton.one_token import (
    _find_kernel,
    _forward_kernel,
    _split_gradient_kernel,
    _store_rows_kernel,
    _weight_gradient_kernel,
)
from tilefold.ops.lsr_head._triton.sum_pooling import (
    _check_offsets_kernel,
    _dlogits_kernel,
    _store_gradients_kernel,
    _sum_forward_kernel,
)
from tilefold.ops.lsr_head.configs import ONE_TOKEN, ONE_TOKEN_GRADIENTS, SUM, constants_of

CHECK_BLOCK = 256  # sequences whose offsets are looked at a time
STORE_BLOCK = 2048  # numbers that a program takes to another dtype
STORE_BIAS = 32, 64  # sequences and columns of sums that one adds up
FIND_BLOCK, SHORT_FIND_BLOCK = 1024, 64  # entries of a mask that are looked at a time
MAX_MASK = 1024  # entries that each program of forward looks at itself; more cost the device more than a launch
CLEAR_BLOCK = 1024  # of the gradient of hidden that are zeroed at a time
WEIGHT_WARPS, HIDDEN_WARPS = 8, 4  # of the gradients of one token
# A row of zeros divides by nothing smaller. Times these and their inverses, numbers stay within fp32.
MIN_POWER, MAX_POWER = 2.0**-100, 2.0**100
HEADROOM = 2.0**14  # the largest number becomes less than twice that, below fp16's 65504
EXPONENT = 0x7F800000  # the bits of fp32 that say which power of two


def sum_forward(tensors: HeadTensors, options: HeadOptions, setting: Setting) -> Plan:
    """Scores; NaN where ``cu_seqlens`` is broken."""
    tokens, batch, vocab = tensors.tokens, tensors.tokens.batch, tensors.weight.size(0)
    steps, packed = _operands(tensors, options), tokens.cu_seqlens is not None
    constants, _, _ = _sum_constants(tensors, options, setting)
    if packed:
        numbers, block = (batch, tokens.n_rows), {"BLOCK": CHECK_BLOCK}
        steps.append(Launch(_check_offsets_kernel, (1, 1, 1), "cu_seqlens ok", numbers, block))
    grid = batch, cdiv(vocab, constants["BLOCK_V"]), 1
    names = "weight hidden bias attention_mask cu_seqlens ok scores"
    sizes = (vocab, tokens.n_rows, tokens.length, options.logit_scale)
    steps.append(Launch(_sum_forward_kernel, grid, names, sizes, constants))
    return Plan(tuple(steps), {"ok": Buffer((1,), torch.int32) if packed else None, "winners": None})


def _operands(tensors: HeadTensors | HeadSaved, options: HeadOptions) -> list[Launch | TorchStep]:
    return [
        *in_dtype(options.compute_dtype, hidden=tensors.hidden, weight=tensors.weight),
        *contiguous(attention_mask=tensors.attention_mask, cu_seqlens=tensors.cu_seqlens, bias=tensors.bias),
    ]


def _sum_constants(
    tensors: HeadTensors | HeadSaved, options: HeadOptions, setting: Setting
) -> tuple[dict[str, Any], int, int]:
    """Constants of the kernels, the most elements of a slab, and the most rows that are few."""
    config = constants_of(SUM, options.compute_dtype, setting)
    slab, few = config.pop("SLAB_ELEMENTS"), config.pop("FEW_ROWS")
    flags = {
        "D": tensors.hidden.size(-1), "ACTIVATION": options.activation, "HAS_BIAS": tensors.bias is not None,
        "HAS_MASK": tensors.attention_mask is not None, "UNIFORM": tensors.cu_seqlens is None,
        "MEAN": options.pooling == "mean",
    }  # fmt: skip
    return config | flags, slab, few


def sum_backward(dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: Needs, setting: Setting) -> Plan:
    """A slab of the vocabulary at a time: its logits are computed again, and their gradients multiplied by torch."""
    tokens, (vocab, dim), dtype = saved.tokens, saved.weight.shape, options.compute_dtype
    batch, n_rows, given = tokens.batch, tokens.n_rows, (tokens.hidden.dtype, saved.weight.dtype)
    constants, slab, few = _sum_constants(saved, options, setting)
    scaled, block_v = dtype == torch.float16, constants["BLOCK_V"]
    width = min(max(block_v, slab // max(n_rows, 1) // block_v * block_v), cdiv(vocab, 8) * 8)
    # products in fp32 are the gradients where nothing is left to be done to them
    stored = [each != torch.float32 or scaled or options.logit_scale != 1.0 for each in given]
    stored = [stored[0] and needs.hidden, (stored[1] or width < vocab) and needs.weight]
    clean = tokens.attention_mask is not None and needs.weight  # a copy of rows without what is masked
    steps = _operands(saved, options)
    if n_rows <= few and not scaled and given == (dtype, dtype):
        launches, buffers = _few_rows(dscores, saved, options, needs, constants, setting)
        return Plan((*steps, *launches), buffers)
    if scaled:
        # dlogits in units that fp16 holds; whatever is made of them is fp32 until it is taken back
        # in fp16 those of a mean, not yet divided by the length, would not fit
        unit = partial(_unit_of_dlogits, mean=options.pooling == "mean", length=tokens.length)
        steps.append(TorchStep("dscores", _wide, "dscores"))
        steps.append(TorchStep("unit", unit, "dscores attention_mask cu_seqlens"))
        steps.append(TorchStep("dscores", torch.div, "dscores unit"))
    constants |= {"NEED_BIAS": needs.bias}
    strides, names = (vocab, 1) if scaled else dscores.stride(), "weight hidden bias attention_mask cu_seqlens"
    for v0 in range(0, vocab, width):
        v1 = min(v0 + width, vocab)
        numbers = (v0, v1, vocab, n_rows, tokens.length, options.logit_scale, *strides, width)
        grid, flags = (batch, cdiv(v1 - v0, block_v), 1), {"CLEAN": clean and v0 == 0}
        dlogits = Launch(_dlogits_kernel, grid, f"dscores {names} dlogits clean sums", numbers, constants | flags)
        steps.append(dlogits)
        if needs.hidden:
            product = partial(_hidden_product, entries=slice(v0, v1))
            steps.append(TorchStep("drows", product, "dlogits weight drows" if v0 else "dlogits weight"))
        if needs.weight:
            product = partial(_weight_product, entries=v1 - v0)
            steps.append(TorchStep("dproduct", product, "dlogits clean" if clean else "dlogits hidden"))
        counts = (n_rows * dim if stored[0] and v1 == vocab else 0, (v1 - v0) * dim if stored[1] else 0)
        counted = (*counts, v1 - v0 if needs.bias else 0)
        if any(counted):
            dhidden = "dhidden" if v1 == vocab else "nothing"
            steps.append(_store(counted, v0, dim, batch, width, options, dhidden))
    if needs.hidden and not stored[0]:
        steps.append(TorchStep("dhidden", partial(torch.reshape, shape=tuple(tokens.hidden.shape)), "drows"))
    if needs.weight and not stored[1]:
        steps.append(TorchStep("dweight", lambda product: product, "dproduct"))
    buffers = dict.fromkeys(("drows", "dproduct", "unit", "nothing")) | {
        "dlogits": Buffer((n_rows, width), dtype), "clean": Buffer((n_rows, dim), dtype) if clean else None,
        "sums": Buffer((batch if needs.bias else 0, width), torch.float32),  # of each sequence's dlogits
    }  # fmt: skip
    return Plan(tuple(steps), buffers)


def _store(
    counts: tuple[int, int, int], first: int, dim: int, batch: int, width: int, options: HeadOptions, dhidden: str
) -> Launch:
    """The launch that stores so many numbers of hidden, weight and bias, of a slab from entry ``first`` on."""
    programs = sum(cdiv(n, block) for n, block in zip(counts, (STORE_BLOCK, STORE_BLOCK, STORE_BIAS[1]), strict=True))
    constants = {
        "D": dim, "NEED_HIDDEN": counts[0] > 0, "NEED_WEIGHT": counts[1] > 0, "NEED_BIAS": counts[2] > 0,
        "HAS_UNIT": options.compute_dtype == torch.float16, "BLOCK": STORE_BLOCK, "BLOCK_B": STORE_BIAS[0],
        "BLOCK_V": STORE_BIAS[1],
    }  # fmt: skip
    names = f"drows {dhidden} dproduct dweight sums dbias unit"
    numbers = (*counts, first, batch, width, options.logit_scale)
    return Launch(_store_gradients_kernel, (programs, 1, 1), names, numbers, constants)


def _few_rows(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: Needs,
    constants: dict[str, Any],
    setting: Setting,
) -> tuple[list[Launch], dict[str, Buffer | None]]:
    """Gradients of logits, then the kernels of one token per sequence, which each row stands for: slopes are in them.

    Library products of few rows are bound by the weight's gradient, stored in fp32 and then in its dtype, and the host.
    """
    tokens, (vocab, dim), dtype = saved.tokens, saved.weight.shape, options.compute_dtype
    n_rows, clean = tokens.n_rows, tokens.attention_mask is not None and needs.weight
    numbers = (0, vocab, vocab, n_rows, tokens.length, options.logit_scale, *dscores.stride(), vocab)
    grid = tokens.batch, cdiv(vocab, constants["BLOCK_V"]), 1
    names = "dscores weight hidden bias attention_mask cu_seqlens dlogits clean sums"
    dlogits = Launch(_dlogits_kernel, grid, names, numbers, constants | {"CLEAN": clean, "NEED_BIAS": False})
    flags = {"PACKED": False, "MASKED": False, "LAST": False, "NO_WINNER": -1, "ACTIVATION": "none"}
    sizes, read = (n_rows, vocab, dim, n_rows, 1), ("dlogits", "dlogits", "clean" if clean else "hidden")
    launches, parts = _row_gradients(sizes, (vocab, 1), flags, options, needs, read, setting)
    return [dlogits, *launches], {
        "dlogits": Buffer((n_rows, vocab), dtype), "clean": Buffer((n_rows, dim), dtype) if clean else None,
        "sums": None, "parts": parts,
    }  # fmt: skip


def _wide(dscores: Tensor) -> Tensor:
    return dscores.to(torch.float32, memory_format=torch.contiguous_format)


def _unit_of_dlogits(
    dscores: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, mean: bool, length: int
) -> Tensor:
    """Power of two by which fp16 divides the gradients of all logits, none steeper than 1; fp32, on the device."""
    largest = dscores.nan_to_num(0.0, 0.0, 0.0).abs_().amax(1, keepdim=True)  # [B, 1], of what is finite
    if mean and cu_seqlens is not None:
        largest /= cu_seqlens.diff().clamp(min=1)[:, None]
    elif mean and attention_mask is not None:
        largest /= (attention_mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    elif mean:
        largest /= max(length, 1)
    power = (largest.amax().view(torch.int32) & EXPONENT).view(torch.float32)
    return power.clamp_(MIN_POWER, MAX_POWER).div_(HEADROOM)


def _hidden_product(dlogits: Tensor, weight: Tensor, drows: Tensor | None = None, *, entries: slice) -> Tensor:
    """The gradient of rows by these entries of the vocabulary, added to that of the entries before."""
    found = _wide_product(dlogits[:, : entries.stop - entries.start], weight[entries])
    return found if drows is None else drows.add_(found)


def _weight_product(dlogits: Tensor, rows: Tensor, *, entries: int) -> Tensor:
    return _wide_product(dlogits[:, :entries].t(), rows.view(-1, rows.size(-1)))


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` handed out in fp32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def one_token_forward(tensors: HeadTensors, options: HeadOptions, training: bool, setting: Setting) -> Plan:
    """Winners are the places of the tokens, kept where a mask hides them."""
    tokens, (vocab, dim), batch = tensors.tokens, tensors.weight.shape, tensors.tokens.batch
    masked, flags = tokens.attention_mask is not None, _flags(tokens, options)
    constants = flags | constants_of(ONE_TOKEN, options.compute_dtype, setting)
    block_b = constants["BLOCK_B"] = min(constants["BLOCK_B"], power_of_two(batch))
    finds = masked and block_b * tokens.length <= MAX_MASK
    places = "winners" if training or finds or not masked else "places"  # what no backward reads is scratch
    steps: list[Launch | TorchStep] = [*_operands(tensors, options)]
    if masked and not finds:
        found = {"LAST": flags["LAST"], "NO_WINNER": flags["NO_WINNER"], "BLOCK": FIND_BLOCK}
        names = f"attention_mask {places}"
        steps.append(Launch(_find_kernel, (batch, 1, 1), names, (tokens.length,), found))
    constants |= {
        "D": dim, "FIND": SHORT_FIND_BLOCK if finds else 0, "WITH_WINNERS": finds and training,
        "HAS_BIAS": tensors.bias is not None,
    }  # fmt: skip
    grid = cdiv(vocab, constants["BLOCK_V"]), cdiv(batch, block_b), 1
    numbers = batch, vocab, tokens.n_rows, tokens.length, options.logit_scale
    names = f"weight hidden bias attention_mask {places} cu_seqlens scores"
    steps.append(Launch(_forward_kernel, grid, names, numbers, constants))
    buffers: dict[str, Buffer | None] = {} if masked and training else {"winners": None}
    if places == "places":
        buffers["places"] = Buffer((batch, 1), winner_dtype(tokens.length_bound))
    return Plan(tuple(steps), buffers)


def _flags(tokens: Tokens, options: HeadOptions) -> dict[str, Any]:
    """Kernel flags for the row that a sequence takes."""
    return {
        "PACKED": tokens.cu_seqlens is not None, "MASKED": tokens.attention_mask is not None,
        "LAST": options.pooling == "last", "NO_WINNER": no_winner(winner_dtype(tokens.length_bound)),
        "ACTIVATION": options.activation,
    }  # fmt: skip


def one_token_backward(dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: Needs, setting: Setting) -> Plan:
    """Gradients, ``dhidden`` zero where no token was taken."""
    tokens, (vocab, dim), winners = saved.tokens, saved.weight.shape, saved.winners
    flags = _flags(tokens, options) | {"MASKED": winners is not None and winners.size(0) > 0}
    sizes, names = (tokens.batch, vocab, dim, tokens.n_rows, tokens.length), ("dscores", "scores", "hidden")
    launches, parts = _row_gradients(sizes, dscores.stride(), flags, options, needs, names, setting)
    steps = contiguous(scores=saved.scores, winners=winners, cu_seqlens=tokens.cu_seqlens)
    if needs.weight or needs.bias:
        steps += in_dtype(options.compute_dtype, hidden=tokens.hidden)
    if needs.hidden:
        steps += in_dtype(options.compute_dtype, weight=saved.weight)
    return Plan((*steps, *launches), {"parts": parts})


def _row_gradients(
    sizes: tuple[int, int, int, int, int],
    strides: tuple[int, ...],
    flags: dict[str, Any],
    options: HeadOptions,
    needs: Needs,
    names: tuple[str, str, str],
    setting: Setting,
) -> tuple[list[Launch], Buffer]:
    """Launches of the gradients of rows of hidden, one a sequence, and their scratch ``parts``.

    Args:
        sizes: sequences, V, D, rows of hidden, and length of the sequences.
        strides: of the gradient of scores.
        flags: which rows, and whose slope is still to be multiplied; see :func:`_flags`.
        names: of the gradient of scores, scores and rows.
    """
    (batch, vocab, dim, *rest), (dscores, scores, rows), dtype = sizes, names, options.compute_dtype
    config = constants_of(ONE_TOKEN_GRADIENTS, dtype, setting)
    programs, block_b, block_v = config.pop("PROGRAMS"), config["BLOCK_B"], config["BLOCK_V"]
    constants = flags | config | {"D": dim, "SCALED": dtype == torch.float16}
    tiles, width = cdiv(vocab, block_v), cdiv(dim, config["BLOCK_D"])
    # splits of the vocabulary that keep the device busy, whole tiles long
    wanted = cdiv(programs * setting.multiprocessors, width * cdiv(batch, block_b))
    split_v = cdiv(tiles, max(1, min(tiles, wanted))) * block_v
    splits, launches = cdiv(vocab, split_v), []
    if needs.hidden:
        grid, numbers = (width, splits, cdiv(batch, block_b)), (batch, vocab, *rest, split_v, *strides)
        of_hidden = constants | {"num_warps": HIDDEN_WARPS, "CLEAR": CLEAR_BLOCK}
        read = f"{dscores} {scores} winners weight cu_seqlens parts dhidden"
        launches.append(Launch(_split_gradient_kernel, grid, read, numbers, of_hidden))
        block = {"D": dim, "BLOCK_B": 4, "BLOCK_D": min(256, power_of_two(dim))} | flags
        del block["ACTIVATION"]
        grid, stored = (cdiv(batch, 4), cdiv(dim, block["BLOCK_D"]), 1), (batch, *rest, splits, options.logit_scale)
        launches.append(Launch(_store_rows_kernel, grid, "winners cu_seqlens parts dhidden", stored, block))
    if needs.weight or needs.bias:
        grid, needed = (
            (tiles * (width if needs.weight else 1), 1, 1),
            {"NEED_WEIGHT": needs.weight, "NEED_BIAS": needs.bias},
        )
        weighed = (batch, vocab, *rest, options.logit_scale, *strides)
        read = f"{dscores} {scores} winners {rows} cu_seqlens dweight dbias"
        of_weight = constants | needed | {"num_warps": WEIGHT_WARPS}
        launches.append(Launch(_weight_gradient_kernel, grid, read, weighed, of_weight))
    return launches, Buffer((splits, batch, dim), torch.float32)
