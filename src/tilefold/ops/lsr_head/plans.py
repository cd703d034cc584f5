"""Launch plans of the LSR head for tensors of these layouts; max pooling is here, other poolings in files beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.launch import rows_fit_descriptor
from tilefold.ops._shared._triton.tensors import cdiv, power_of_two
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.internals import Tma
from tilefold.ops._shared.plan import Buffer, Instead, Launch, Plan, Setting, TorchStep, contiguous, in_dtype
from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head import _plans_one_token as one_token
from tilefold.ops.lsr_head import _plans_sum as sums
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
from tilefold.ops.lsr_head.configs import (
    HOPPER_16BIT,
    NEXT_BEST,
    MaxBackwardConfig,
    MaxForwardConfig,
    instead_of,
    kernel_name,
    max_backward_config,
    max_forward_config,
    without_tma,
)

MAX_SPLITS = 32
MAX_RAGGED_SPLITS = 8  # where sequences differ, each split looks for its first one
RAGGED_SHARES = (0.25, 0.33, 0.5, 0.75, 1.0)  # of valid rows, that a split of ragged rows is chosen for
LONG_SEQUENCE_TILES = 16  # longer sequences are rather cut than kept in one split
COMBINE_BLOCK = 1024
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
        return sums.forward(tensors, options, setting)
    return one_token.forward(tensors, options, training, setting)


def backward(
    dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: tuple[bool, ...], setting: Setting
) -> Plan:
    """Gradients of hidden, weight and bias, where they are needed."""
    wanted = Needs(*needs)
    if saved.tokens.batch == 0 or saved.tokens.n_rows == 0:
        return Plan(fills={"dhidden": 0, "dweight": 0, "dbias": 0})
    if options.pooling == "max":
        return _max_backward(dscores, saved, options, wanted, setting)
    if options.pooling in ("sum", "mean"):
        return sums.backward(dscores, saved, options, wanted, setting)
    return one_token.backward(dscores, saved, options, wanted, setting)


def _max_forward(tensors: HeadTensors, options: HeadOptions, training: bool, setting: Setting) -> Plan:
    tokens, weight, quantized = tensors.tokens, tensors.weight, tensors.weight_scale is not None
    (vocab, dim), batch = weight.shape, tokens.batch
    given = tokens.hidden.dtype if quantized else options.compute_dtype  # of rows before they are quantised
    dtype = weight.dtype if quantized else given
    _refuse_missing(dtype, setting)
    config = max_forward_config(dtype, setting)
    packing = _packing(tokens, vocab, given, training, config.group)
    if config.use_tma and not (setting.aligned and rows_fit_descriptor(weight.to(dtype))):
        config = without_tma(config)
    total, length = (tokens.n_rows, tokens.length) if packing is None else (packing.total, 0)
    splits, multiple = plan_splits(total, vocab, length, config.block_v, config.block_t, setting.multiprocessors)
    cuts = splits > 1 and (packing is not None or multiple * config.block_t % length != 0)
    steps: list[Launch | TorchStep] = [*in_dtype(given, hidden=tokens.hidden), *in_dtype(dtype, weight=weight)]
    others = tensors._asdict().items()
    steps += contiguous(**{name: tensor for name, tensor in others if name not in ("hidden", "weight")})
    steps += [] if packing is None else packing.launches
    buffers: dict[str, Buffer | None] = dict.fromkeys(("offsets", "positions", "scales"))
    buffers |= {} if packing is None else packing.buffers
    buffers |= {} if training else {"winners": None}
    rows = "hidden" if packing is None else "rows"
    if quantized:
        grid = cdiv(total, BLOCK_ROWS), 1, 1
        steps.append(Launch(_quantize_rows_kernel, grid, f"{rows} values scales", (total,), row_constants(dim)))
        # whole tiles of scales, as the kernel reads them
        scales = Buffer((cdiv(total, config.block_t) * config.block_t,), torch.float32)
        buffers, rows = buffers | {"values": Buffer((total, dim), dtype), "scales": scales}, "values"
    flags = {
        "ACTIVATION": options.activation, "HAS_BIAS": tensors.bias is not None,
        "HAS_POSITIONS": packing is not None and training, "WITH_WINNERS": training,
        "UNIFORM": packing is None, "QUANTIZED": quantized, "BLOCK_T": config.block_t,
    }  # fmt: skip
    sizes = (batch, vocab, total, length, splits, multiple)
    folded = "weight_scale bias offsets positions scores winners parts part_winners"
    steps.append(_folding(config, f"{rows} scales {folded}", dtype, (*sizes, options.logit_scale), dim, flags, setting))
    parts = (2 * splits * vocab if cuts else 0,)  # without a cut nothing is partial
    buffers["parts"] = Buffer(parts, torch.float32)
    buffers["part_winners"] = Buffer(parts if training else (0,), torch.int32)
    if cuts:
        grid = batch, cdiv(vocab, COMBINE_BLOCK), 1
        steps.append(Launch(_combine_kernel, grid, folded, sizes, flags | {"BLOCK": COMBINE_BLOCK}))
    return Plan(tuple(steps), buffers)


def _refuse_missing(dtype: torch.dtype, setting: Setting) -> None:
    """Give up the kernel that the GPU would run in ``dtype`` if this release of Triton had it."""
    why, missing = releases.why_no_warp_roles(), Instead(kernel_name(HOPPER_16BIT), instead_of(HOPPER_16BIT))
    on_hopper = setting.capability == (9, 0) and dtype != torch.float32
    if on_hopper and why is not None and missing.kernel not in setting.given_up:
        raise KernelUnavailableError("max_forward_hopper_kernel", why, missing)


def _folding(
    config: MaxForwardConfig,
    names: str,
    dtype: torch.dtype,
    numbers: tuple[int | float, ...],
    dim: int,
    flags: dict[str, Any],
    setting: Setting,
) -> Launch:
    """The persistent kernel; ``names`` are those of what it reads and writes besides the weight, rows first."""
    kernel: Any = _max_forward_kernel
    make: Callable[..., Any] = tma_descriptor
    block_v = config.block_v
    constants = flags | {
        "D": dim, "BLOCK_K": config.block_k, "GROUP": config.group, "HAS_SCALE": numbers[-1] != 1.0,
        "num_warps": config.num_warps,
    }  # fmt: skip
    if config.warp_roles:
        from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper  # needs Gluon

        kernel, make, block_v = hopper.max_forward_hopper_kernel, hopper.hopper_descriptor, hopper.HALF_V.value
        constants |= {"STAGES": config.num_stages, "LEAN_PLACES": releases.lean_places()}
    else:
        constants |= {"BLOCK_V": block_v, "USE_TMA": config.use_tma, "PRECISION": config.precision}
        constants |= {"num_stages": config.num_stages}
    tma: dict[str, Tma] = {}
    if config.use_tma:
        _, vocab, rows, *_ = map(int, numbers)
        tma = {
            "weight": Tma(vocab, dim, make(block_v, config.block_k, dtype)),
            names.split(maxsplit=1)[0]: Tma(rows, dim, make(config.block_t, config.block_k, dtype)),
        }
    instead = Instead(kernel_name(config), instead_of(config)) if config in NEXT_BEST else None
    grid = setting.multiprocessors, 1, 1
    return Launch(kernel, grid, f"weight {names}", numbers, constants, tma, instead)


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


class _Packing(NamedTuple):
    """Launches that write the rows that the forward kernel reads, and the scores of empty sequences.

    Attributes:
        launches: of what counts valid tokens, where a kernel of its own does, and of what copies rows.
        buffers: ``rows`` ``[total, D]``, of which the first ``offsets[B]`` are meant; ``offsets`` ``[B + 1]`` int32,
            multiples of the group; where winners are kept, ``positions`` of rows in their sequences, ``[total]`` int32;
            ``counts`` and ``firsts``, ``[B]`` int32 that are counted.
        total: rows, at most.
    """

    launches: list[Launch]
    buffers: dict[str, Buffer | None]
    total: int


def _packing(tokens: Tokens, vocab: int, dtype: torch.dtype, training: bool, group: int) -> _Packing | None:
    """Packing of valid tokens; ``None`` for unmasked input whose length is a multiple of ``group``."""
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
    buffers = {
        "rows": Buffer((total, dim), dtype), "offsets": Buffer((batch + 1,), torch.int32),
        "positions": Buffer((total,), torch.int32) if training else None, "counts": counted, "firsts": counted,
    }  # fmt: skip
    return _Packing(launches, buffers, total)


def _max_backward(dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: Needs, setting: Setting) -> Plan:
    tokens, (vocab, dim), dtype = saved.tokens, saved.weight.shape, options.compute_dtype
    if vocab > MAX_VOCAB:
        raise ValueError(f"weight must have at most {MAX_VOCAB} rows for the Triton backward, got {vocab}.")
    config = max_backward_config(setting.capability, dtype, tokens.batch)
    flags = {
        "ALWAYS_ACTIVE": options.activation in {"softplus", "none"},
        "NO_WINNER": no_winner(winner_dtype(tokens.length_bound)),
        "UNIFORM": tokens.cu_seqlens is None,
    }
    sizes, strides = (tokens.batch, vocab, tokens.n_rows, tokens.length), dscores.stride()
    steps: list[Launch | TorchStep] = []
    steps += contiguous(scores=saved.scores, winners=saved.winners, cu_seqlens=tokens.cu_seqlens)
    buffers: dict[str, Buffer | None] = {}
    if needs.hidden:
        steps += in_dtype(dtype, weight=saved.weight)
    if needs.weight or needs.bias:
        steps += in_dtype(dtype, hidden=tokens.hidden)
    if needs.hidden:
        launches, scratch = _hidden_gradient(sizes, dim, strides, options, flags, config)
        steps, buffers = [*steps, *launches], scratch
    if needs.weight or needs.bias:
        # its programs list entries of their own
        items = cdiv(vocab, config.dweight_block_v) * (cdiv(dim, config.dweight_block_d) if needs.weight else 1)
        programs = min(items, setting.multiprocessors * config.dweight_programs)
        constants = {
            "D": dim, "BLOCK_B": config.dweight_block_b, "BLOCK_V": config.dweight_block_v,
            "BLOCK_D": config.dweight_block_d, "BLOCK_E": config.dweight_block_e, "ACTIVATION": options.activation,
            "NEED_WEIGHT": needs.weight, "NEED_BIAS": needs.bias, "ACCUMULATE": "weight" in setting.added,
            "SCALED": dtype == torch.float16, "PRECISION": config.precision,
            "num_warps": config.dweight_warps, "num_stages": config.dweight_stages, **flags,
        }  # fmt: skip
        if config.dweight_registers is not None:
            constants["maxnreg"] = config.dweight_registers
        entries = (programs * config.dweight_block_b * config.dweight_block_v,)
        buffers |= {"own_codes": Buffer(entries, torch.int64), "own_grads": Buffer(entries, dtype)}
        names = "dscores scores winners hidden cu_seqlens own_codes own_grads dweight dbias"
        numbers = (*sizes, options.logit_scale, *strides)
        steps.append(Launch(_dweight_kernel, (programs, 1, 1), names, numbers, constants))
    return Plan(tuple(steps), buffers)


def _hidden_gradient(
    sizes: tuple[int, int, int, int],
    dim: int,
    strides: tuple[int, ...],
    options: HeadOptions,
    flags: dict[str, Any],
    config: MaxBackwardConfig,
) -> tuple[list[Launch | TorchStep], dict[str, Buffer | None]]:
    """Launches that count and list what each tile of rows won, and multiply; ``sizes`` are B, V, rows, length."""
    batch, vocab, n_rows, _ = sizes
    splits, tiles = cdiv(vocab, config.split_v), cdiv(n_rows, config.block_r)
    slots, scaled = tiles * splits, options.compute_dtype == torch.float16
    many = slots > MAX_ADDED  # then torch adds up the counts
    block = {"BLOCK_R": config.block_r, "BLOCK": config.scan_block, "num_warps": config.scan_warps, **flags}
    lists, added_up = (*sizes, splits, config.split_v), {"ADDED_UP": many}
    count = Launch(_count_kernel, (tiles, splits, 1), "scores winners cu_seqlens counts", lists, block)
    added = [TorchStep("places", lambda counts: counts.cumsum(0), "counts")] if many else []
    filled = {"ACTIVATION": options.activation, **added_up}
    names = "dscores scores winners cu_seqlens places counts codes grads"
    fill = Launch(_list_kernel, (tiles, splits, 1), names, (*lists, *strides), block | filled)
    constants = {
        "D": dim, "BLOCK_R": config.block_r, "BLOCK_D": config.dhidden_block_d, "BLOCK_E": config.block_e,
        "SCALED": scaled, "PRECISION": config.precision, "num_warps": config.dhidden_warps,
        "num_stages": config.dhidden_stages, **added_up,
    }  # fmt: skip
    grid, numbers = (tiles, cdiv(dim, config.dhidden_block_d), 1), (n_rows, splits, options.logit_scale)
    names = "weight places counts codes grads dhidden"
    product = Launch(_dhidden_kernel, grid, names, numbers, constants)
    entries = (batch * vocab,)
    buffers = {
        "places": None, "counts": Buffer((slots,), torch.int32), "codes": Buffer(entries, torch.int32),
        "grads": Buffer(entries, torch.float32 if scaled else options.compute_dtype),
    }  # fmt: skip
    return [count, *added, fill, product], buffers
