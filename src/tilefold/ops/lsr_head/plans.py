"""Launch plans of the LSR head for tensors of these layouts; poolings other than the maximum in a file beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.launch import rows_fit_descriptor
from tilefold.ops._shared._triton.tensors import cdiv, power_of_two
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.internals import Tma
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, TorchStep, contiguous, in_dtype
from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head import _plans_other as other
from tilefold.ops.lsr_head import configs
from tilefold.ops.lsr_head._problem import HeadOptions, HeadSaved, HeadTensors, Needs, Tokens
from tilefold.ops.lsr_head._triton import pack
from tilefold.ops.lsr_head._triton.max_backward import (
    MAX_VOCAB,
    _count_kernel,
    _dhidden_kernel,
    _dweight_kernel,
    _list_kernel,
)
from tilefold.ops.lsr_head._triton.max_forward import _combine_kernel, _max_forward_kernel
from tilefold.ops.lsr_head._triton.pack import _copy_packed_kernel, _copy_padded_kernel
from tilefold.ops.lsr_head._triton.pack import _count_kernel as _count_tokens_kernel
from tilefold.ops.lsr_head._triton.quantize import BLOCK_ROWS, _quantize_rows_kernel, row_constants

MAX_SPLITS = 32
MAX_RAGGED_SPLITS = 8  # where sequences differ, each split looks for its first one
RAGGED_SHARES = (0.25, 0.33, 0.5, 0.75, 1.0)  # of valid rows, that a split of ragged rows is chosen for
LONG_SEQUENCE_TILES = 16  # longer sequences are rather cut than kept in one split
COMBINE_BLOCK = 1024
Packing = tuple[list[Launch], dict[str, "Buffer | None"], int]
MAX_ADDED = 8192  # counts that every program adds up itself: more launches take the host longer


def forward(tensors: HeadTensors, options: HeadOptions, training: bool, setting: Setting) -> Plan:
    """Scores, and winners where a gradient may be asked for."""
    tokens = tensors.tokens
    if setting.capability == (0, 0):
        products = tokens.hidden.dtype if tensors.weight_scale is not None else options.compute_dtype
        check_interpreted("triton", torch.device("cpu"), products, options.out_dtype)
    if tokens.batch == 0 or (tokens.cu_seqlens is None and tokens.length == 0):
        return Plan(fills={"scores": 0, "winners": no_winner(winner_dtype(tokens.length_bound))})
    if options.pooling == "max":
        return _max_forward(tensors, options, training, setting)
    if options.pooling in ("sum", "mean"):
        return other.sum_forward(tensors, options, setting)
    return other.one_token_forward(tensors, options, training, setting)


def backward(
    dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: tuple[bool, ...], setting: Setting
) -> Plan:
    """Gradients of hidden, weight and bias, where they are needed."""
    wanted = Needs(*needs)
    if saved.tokens.batch == 0 or saved.tokens.n_rows == 0:
        return Plan(fills={"dhidden": 0, "dweight": 0, "dbias": 0})
    if options.pooling == "max":
        return _max_backward(dscores, saved, options, wanted, setting)
    make = other.sum_backward if options.pooling in ("sum", "mean") else other.one_token_backward
    return make(dscores, saved, options, wanted, setting)


def _max_forward(tensors: HeadTensors, options: HeadOptions, training: bool, setting: Setting) -> Plan:
    tokens, weight, quantized = tensors.tokens, tensors.weight, tensors.weight_scale is not None
    (vocab, dim), batch = weight.shape, tokens.batch
    given = tokens.hidden.dtype if quantized else options.compute_dtype  # of rows before they are quantised
    dtype = weight.dtype if quantized else given
    why, missing = releases.why_no_warp_roles(), configs.instead_of(configs.BY_ROLES)
    on_hopper = setting.capability == (9, 0) and dtype != torch.float32
    if on_hopper and why is not None and configs.BY_ROLES not in setting.given_up:
        raise KernelUnavailableError("max_forward_hopper_kernel", why, missing)
    config = configs.max_forward(dtype, setting, setting.aligned and rows_fit_descriptor(weight.to(dtype)))
    block_t, packing = config["BLOCK_T"], _packing(tokens, vocab, given, training, config["GROUP"])
    total, length = (tokens.n_rows, tokens.length) if packing is None else (packing[2], 0)
    splits, multiple = plan_splits(total, vocab, length, config["BLOCK_V"], block_t, setting.multiprocessors)
    cuts = splits > 1 and (packing is not None or multiple * block_t % length != 0)
    steps: list[Launch | TorchStep] = [*in_dtype(given, hidden=tokens.hidden), *in_dtype(dtype, weight=weight)]
    others = tensors._asdict().items()
    steps += contiguous(**{name: tensor for name, tensor in others if name not in ("hidden", "weight")})
    buffers: dict[str, Buffer | None] = dict.fromkeys(("offsets", "positions", "scales"))
    rows = "hidden"
    if packing is not None:
        steps, buffers, rows = [*steps, *packing[0]], buffers | packing[1], "rows"
    if not training:
        buffers["winners"] = None
    if quantized:
        grid = cdiv(total, BLOCK_ROWS), 1, 1
        steps.append(Launch(_quantize_rows_kernel, grid, f"{rows} values scales", (total,), row_constants(dim)))
        # whole tiles of scales, as the kernel reads them
        scales, rows = Buffer((cdiv(total, block_t) * block_t,), torch.float32), "values"
        buffers |= {"values": Buffer((total, dim), dtype), "scales": scales}
    flags = {
        "ACTIVATION": options.activation, "HAS_BIAS": tensors.bias is not None,
        "HAS_POSITIONS": packing is not None and training, "WITH_WINNERS": training,
        "UNIFORM": packing is None, "QUANTIZED": quantized, "BLOCK_T": block_t,
    }  # fmt: skip
    sizes = (batch, vocab, total, length, splits, multiple)
    folded = "weight_scale bias offsets positions scores winners parts part_winners"
    constants = config | flags | {"D": dim, "HAS_SCALE": options.logit_scale != 1.0}
    steps.append(_folding(f"weight {rows} scales {folded}", dtype, (*sizes, options.logit_scale), constants, setting))
    parts = (2 * splits * vocab if cuts else 0,)  # without a cut nothing is partial
    buffers["parts"] = Buffer(parts, torch.float32)
    buffers["part_winners"] = Buffer(parts if training else (0,), torch.int32)
    if cuts:
        grid = batch, cdiv(vocab, COMBINE_BLOCK), 1
        steps.append(Launch(_combine_kernel, grid, folded, sizes, flags | {"BLOCK": COMBINE_BLOCK}))
    return Plan(tuple(steps), buffers)


def _folding(
    names: str, dtype: torch.dtype, numbers: tuple[int | float, ...], constants: dict[str, Any], setting: Setting
) -> Launch:
    """The persistent kernel; ``names`` are those of weight and rows first."""
    name, block = configs.kernel_name(constants), (constants["BLOCK_V"], constants["BLOCK_K"])
    instead = None if setting.capability == (0, 0) else configs.instead_of(name)
    kernel: Any = _max_forward_kernel
    make: Callable[..., Any] = tma_descriptor
    if constants.pop("WARP_ROLES"):
        from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper  # needs Gluon

        kernel, make = hopper.max_forward_hopper_kernel, hopper.hopper_descriptor
        block = hopper.HALF_V.value, constants["BLOCK_K"]
        constants |= {"STAGES": constants.pop("num_stages"), "LEAN_PLACES": releases.lean_places()}
        for other_kernels in ("BLOCK_V", "USE_TMA", "PRECISION"):
            del constants[other_kernels]
    tma: dict[str, Tma] = {}
    if name != configs.PORTABLE:
        _, vocab, total, *_ = map(int, numbers)
        weight, rows, *_ = names.split()
        tma = {
            weight: Tma(vocab, constants["D"], make(*block, dtype)),
            rows: Tma(total, constants["D"], make(constants["BLOCK_T"], constants["BLOCK_K"], dtype)),
        }
    return Launch(kernel, (setting.multiprocessors, 1, 1), names, numbers, constants, tma, instead)


@functools.cache
def tma_descriptor(rows: int, columns: int, dtype: torch.dtype) -> Callable[[Tensor], TensorDescriptor]:
    """Factory of TMA descriptors of tiles of this size, of tensors of this dtype."""
    block = [rows, columns]
    return lambda tensor: TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


@functools.lru_cache(maxsize=4096)
def plan_splits(
    rows: int, vocab: int, uniform_length: int, block_v: int, block_t: int, programs: int
) -> tuple[int, int]:
    """Number of splits of the token tiles, and the number of tiles that a split's size is a multiple of.

    The choice that leaves the fewest tiles to the busiest program, at a price per item: 0.1 tile where all sequences
    have one length (``uniform_length``, else 0), 0.15 where the first one has to be looked for. Splits end with
    sequences if that length is a multiple of ``block_t``. How many of ragged ``rows`` are valid only the device knows:
    the choice is then the best on average over several shares.
    """
    tiles_per_sequence = uniform_length // block_t if uniform_length % block_t == 0 else 0
    multiple = tiles_per_sequence if 1 <= tiles_per_sequence <= LONG_SEQUENCE_TILES else 1
    shares, price = ((1.0,), 0.1) if uniform_length else (RAGGED_SHARES, 0.15)
    counts = [max(1, cdiv(int(rows * share), block_t)) for share in shares]
    n_vocab = cdiv(vocab, block_v)

    def busiest(splits: int) -> float:
        total = 0.0
        for n_tiles in counts:
            tiles = cdiv(cdiv(n_tiles, splits), multiple) * multiple
            total += cdiv(n_vocab * cdiv(n_tiles, tiles), programs) * (tiles + price) / n_tiles
        return total

    limit = MAX_SPLITS if uniform_length else MAX_RAGGED_SPLITS
    return min(range(1, min(counts[-1], limit) + 1), key=busiest), multiple


def _packing(tokens: Tokens, vocab: int, dtype: torch.dtype, training: bool, group: int) -> Packing | None:
    """Packing of valid tokens, scores of empty sequences; ``None`` for unmasked multiples of ``group``.

    Launches, buffers and total: of ``rows`` ``[total, D]`` the first ``offsets[B]`` are meant; ``positions`` are theirs
    within their sequences, where winners are kept.
    """
    hidden, mask, cu_seqlens = tokens
    dim, batch, length = hidden.size(-1), tokens.batch, tokens.length
    constants: dict[str, Any] = {
        "D": dim, "BLOCK_ROWS": pack.BLOCK_ROWS, "BLOCK_D": pack.BLOCK_D, "GROUP": group,
        "BLOCK_EMPTY": pack.BLOCK_EMPTY, "WITH_WINNERS": training,
        "NO_WINNER": no_winner(winner_dtype(tokens.length_bound)),
    }  # fmt: skip
    launches: list[Launch] = []
    counted = None
    if cu_seqlens is not None:
        n_rows = hidden.size(0)
        total = max(1, n_rows + batch * (group - 1))
        grid, numbers = (max(1, cdiv(n_rows, pack.BLOCK_ROWS)), 1, 1), (batch, n_rows, vocab)
        names = "hidden cu_seqlens offsets rows positions scores winners"
        launches.append(Launch(_copy_packed_kernel, grid, names, numbers, constants | {"SCAN_B": 64}))
    elif mask is None and length % group == 0:
        return None
    else:
        total = batch * cdiv(length, group) * group
        blocks = power_of_two(batch, 1), power_of_two(length)
        if mask is None or blocks[0] * blocks[1] > pack.MAX_MASK:
            blocks = 0, 0
        if mask is not None and blocks[0] == 0:
            counted = Buffer((batch,), torch.int32)
            count = "attention_mask counts firsts", (length,), {"SCAN": pack.SCAN}
            launches.append(Launch(_count_tokens_kernel, (batch, 1, 1), *count))
        constants |= {"SCAN": pack.SCAN, "HAS_MASK": mask is not None, "BLOCK_B": blocks[0], "BLOCK_S": blocks[1]}
        grid, numbers = (batch, cdiv(length, pack.BLOCK_ROWS), 1), (batch, length, vocab)
        names = "hidden attention_mask counts firsts offsets rows positions scores winners"
        launches.append(Launch(_copy_padded_kernel, grid, names, numbers, constants))
    buffers: dict[str, Buffer | None] = {
        "rows": Buffer((total, dim), dtype), "offsets": Buffer((batch + 1,), torch.int32),
        "positions": Buffer((total,), torch.int32) if training else None, "counts": counted, "firsts": counted,
    }  # fmt: skip
    return launches, buffers, total


def _max_backward(dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: Needs, setting: Setting) -> Plan:
    tokens, (vocab, dim), dtype = saved.tokens, saved.weight.shape, options.compute_dtype
    if vocab > MAX_VOCAB:
        raise ValueError(f"weight must have at most {MAX_VOCAB} rows for the Triton backward, got {vocab}.")
    flags = {
        "ALWAYS_ACTIVE": options.activation in {"softplus", "none"}, "UNIFORM": tokens.cu_seqlens is None,
        "NO_WINNER": no_winner(winner_dtype(tokens.length_bound)),
    }  # fmt: skip
    sizes, strides = (tokens.batch, vocab, tokens.n_rows, tokens.length), dscores.stride()
    steps: list[Launch | TorchStep] = []
    steps += contiguous(scores=saved.scores, winners=saved.winners, cu_seqlens=tokens.cu_seqlens)
    buffers: dict[str, Buffer | None] = {}
    if needs.hidden:
        steps += in_dtype(dtype, weight=saved.weight)
    if needs.weight or needs.bias:
        steps += in_dtype(dtype, hidden=tokens.hidden)
    if needs.hidden:
        listed, buffers = _hidden_gradient(sizes, dim, strides, options, flags, setting)
        steps += listed
    if needs.weight or needs.bias:
        config = configs.constants_of(configs.DWEIGHT, dtype, setting, batch=tokens.batch)
        items = cdiv(vocab, config["BLOCK_V"]) * (cdiv(dim, config["BLOCK_D"]) if needs.weight else 1)
        programs = min(items, setting.multiprocessors * config.pop("PROGRAMS"))
        entries = (programs * config["BLOCK_B"] * config["BLOCK_V"],)  # its programs list entries of their own
        buffers |= {"own_codes": Buffer(entries, torch.int64), "own_grads": Buffer(entries, dtype)}
        names = "dscores scores winners hidden cu_seqlens own_codes own_grads dweight dbias"
        constants = config | flags | {
            "D": dim, "ACTIVATION": options.activation, "NEED_WEIGHT": needs.weight, "NEED_BIAS": needs.bias,
            "ACCUMULATE": "weight" in setting.added, "SCALED": dtype == torch.float16,
        }  # fmt: skip
        numbers = (*sizes, options.logit_scale, *strides)
        steps.append(Launch(_dweight_kernel, (programs, 1, 1), names, numbers, constants))
    return Plan(tuple(steps), buffers)


def _hidden_gradient(
    sizes: tuple[int, int, int, int],
    dim: int,
    strides: tuple[int, ...],
    options: HeadOptions,
    flags: dict[str, Any],
    setting: Setting,
) -> tuple[list[Launch | TorchStep], dict[str, Buffer | None]]:
    """Count and list what each tile of rows won, and multiply; ``sizes`` are B, V, rows, length."""
    (batch, vocab, n_rows, _), dtype = sizes, options.compute_dtype
    scan = configs.constants_of(configs.SCAN, dtype, setting) | flags
    split_v, block_r, scaled = scan.pop("SPLIT_V"), scan["BLOCK_R"], dtype == torch.float16
    splits, tiles = cdiv(vocab, split_v), cdiv(n_rows, block_r)
    slots, lists = tiles * splits, (*sizes, splits, split_v)
    added_up = {"ADDED_UP": slots > MAX_ADDED}  # by torch
    filled = scan | added_up | {"ACTIVATION": options.activation}
    product = configs.constants_of(configs.DHIDDEN, dtype, setting) | added_up
    grid = tiles, cdiv(dim, product["BLOCK_D"]), 1
    product |= {"D": dim, "BLOCK_R": block_r, "SCALED": scaled}
    count = "scores winners cu_seqlens counts"
    fill, names = (
        "dscores scores winners cu_seqlens places counts codes grads",
        "weight places counts codes grads dhidden",
    )
    numbers = n_rows, splits, options.logit_scale
    steps: list[Launch | TorchStep] = [
        Launch(_count_kernel, (tiles, splits, 1), count, lists, scan),
        *([TorchStep("places", lambda counts: counts.cumsum(0), "counts")] if slots > MAX_ADDED else []),
        Launch(_list_kernel, (tiles, splits, 1), fill, (*lists, *strides), filled),
        Launch(_dhidden_kernel, grid, names, numbers, product),
    ]
    buffers: dict[str, Buffer | None] = {
        "places": None, "counts": Buffer((slots,), torch.int32), "codes": Buffer((batch * vocab,), torch.int32),
        "grads": Buffer((batch * vocab,), torch.float32 if scaled else dtype),
    }  # fmt: skip
    return steps, buffers
