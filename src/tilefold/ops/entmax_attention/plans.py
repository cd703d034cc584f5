"""Launch plans of alpha-entmax attention and its gradients, for tensors of these layouts."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.tensors import cdiv, one_byte, power_of_two
from tilefold.ops._shared.entmax_root import kernel_kind, tolerance
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.philox import dropout_threshold
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, TorchStep, View, contiguous
from tilefold.ops.entmax_attention._problem import AttentionSaved, AttentionTensors, Options
from tilefold.ops.entmax_attention._triton.backward import dkv_kernel, dq_kernel, key_lists_kernel, query_lists_kernel
from tilefold.ops.entmax_attention._triton.forward import output_kernel, resident_kernel
from tilefold.ops.entmax_attention._triton.packing import (
    CHECK_BLOCK,
    TABLE_BLOCK,
    WRITERS,
    nan_if_broken_kernel,
    tables_kernel,
)
from tilefold.ops.entmax_attention._triton.roots import roots_kernel
from tilefold.ops.entmax_attention.configs import (
    LISTS,
    RESIDENT,
    SHORT,
    AttentionConfig,
    config_of,
    live_shape,
    nearness,
    row_tiles,
    span,
    way_of,
)

Buffers = dict[str, Buffer | View | None]
GIVEN = "alpha key_padding_mask cu_seqlens_q cu_seqlens_k"


def forward(tensors: AttentionTensors, options: Options, training: bool, setting: Setting) -> Plan:
    """One kernel for rows whose scores stay on chip, else one for the roots and one for the output."""
    q, packed = tensors.q, tensors.packed
    if setting.capability == (0, 0):
        check_interpreted("triton", torch.device("cpu"), q.dtype)
    way = way_of(tensors, options, setting.capability)
    config = config_of(tensors, options, setting.capability, way, tf32=setting.tf32, training=training)
    buffers, stats = _results(tensors, options, training, way)
    if q.numel() == 0:
        return Plan((), buffers)
    given = _readable(q=q, k=tensors.k, v=tensors.v)
    (out, *out2), after = _written({"out": q, "out2": q} if training else {"out": q}, buffers)
    rows = config.resident_rows if way == RESIDENT else config.rows
    tiles = row_tiles(q, rows, tensors)
    told = _told(tensors, options, config, rows)
    numbers = (*told.sizes, 0 if packed else tiles // tensors.batch, *told.scalars)
    strides = (*given.strides(packed), *_strides(_writable(q), packed))
    made = {"GRADIENT": training, "SUPPORT": options.support}
    root = {"TOLERANCE": tolerance(q.dtype), "NEAR": nearness(q.dtype)}
    outputs = f"{out} {(out2 or [out])[0]}"
    steps: list[Launch | TorchStep] = [*given.copies, *_copies(tensors), *_tables(tensors, buffers, (tiles, rows))]
    if way == RESIDENT:
        names = f"q k v {outputs} {stats} {GIVEN} q_batch q_start seed"
        own = {"BLOCK_N": power_of_two(span(rows, options)), "num_warps": config.resident_warps, "num_stages": 1}
        constants = told.flags | made | root | own
        steps.append(Launch(resident_kernel, (tiles, q.size(1), 1), names, (*strides, *numbers), constants))
    else:
        blocks = span(rows, options) // config.keys + 2
        live = live_shape(tensors, options, setting.capability)
        programs = tiles * q.size(1)
        buffers |= dict.fromkeys(("maxima", "lists", "counts"))
        if way == LISTS:
            programs = min(programs, config.programs * _turns(blocks) * setting.multiprocessors)
            buffers["maxima"] = Buffer((programs, blocks, rows), torch.float32)
            buffers["lists"] = Buffer((q.size(1), tiles, blocks), torch.int32)
            buffers["counts"] = Buffer((q.size(1), tiles), torch.int32)
        flags = told.flags | {"LISTS": way == LISTS, "BLOCK_N": config.keys}
        flags |= {"num_stages": config.forward_stages, "num_warps": config.num_warps}
        roots = flags | root | {"WIDTH": 16 if blocks <= 18 else 32, "maxnreg": config.registers}
        names = f"q k {stats} live maxima lists counts {GIVEN} q_batch q_start"
        numbers = (*numbers, tiles, blocks)
        steps.append(Launch(roots_kernel, (programs, 1, 1), names, (*strides[:6], *numbers, live[2]), roots))
        output = flags | made | {"maxnreg": config.wide_registers if training else config.registers}
        names = f"q k v {outputs} {stats} lists counts {GIVEN} q_batch q_start seed"
        steps.append(Launch(output_kernel, (tiles, q.size(1), 1), names, (*strides, *numbers), output))
    steps += after
    if packed:
        steps.append(_nan_if_broken(tensors, options, interpreted=setting.capability == (0, 0)))
    return Plan(tuple(steps), buffers)


def backward(dout: Tensor, saved: AttentionSaved, options: Options, needs: tuple[bool, ...], setting: Setting) -> Plan:
    """A kernel for dq, dalpha and what dk needs of every row, then one for dk and dv, each with its lists."""
    tensors, live = saved.tensors, saved.live
    (q, k, v), packed = tensors[:3], tensors.packed
    if q.numel() == 0 or k.numel() == 0:
        return Plan(fills={"dq": 0, "dk": 0, "dv": 0, "dalpha": 0})
    if live is not None and live.numel() == 0:  # of a registered operator, which returns tensors only
        live = None
    need_q, need_k, need_v, need_alpha = needs
    config = config_of(tensors, options, setting.capability, SHORT if live is None else LISTS, tf32=setting.tf32)
    rows = Buffer(tensors.stats_shape, torch.float32)
    buffers: Buffers = {"delta": rows, "terms": rows if need_alpha else None}
    given = _readable(q=q, k=k, v=v, dout=dout, out2=saved.out2)
    wanted = {f"d{name}": t for name, t, need in zip("qkv", (q, k, v), needs[:3], strict=True) if need}
    written, after = _written(wanted, buffers)
    names = {"dq": "dq", "dk": "dk", "dv": "dv"} | dict(zip(wanted, written, strict=True))
    q_tiles, k_tiles = row_tiles(q, config.rows, tensors), row_tiles(k, config.dkv_keys, tensors)
    q_per, k_per = (0, 0) if packed else (q_tiles // tensors.batch, k_tiles // tensors.batch)
    list_length = q_tiles if packed else q_per
    blocks = 0 if live is None else cdiv(options.max_seqlen_k, config.keys)
    told = _told(tensors, options, config, config.rows)
    sizes, flags = (*told.sizes, q_per), told.flags | {"LISTS": live is not None}
    steps: list[Launch | TorchStep] = [*given.copies, *_copies(tensors)]
    if need_alpha and packed:  # there may be rows of no sequence, should the offsets be broken
        steps.append(TorchStep("terms", Tensor.zero_, "terms"))
    steps += _tables(tensors, buffers, (q_tiles, config.rows), (k_tiles, config.dkv_keys))
    steps += _key_lists(live, blocks, buffers)
    constants = flags | {"BLOCK_N": config.keys, "NEED_Q": need_q, "NEED_ALPHA": need_alpha}
    constants |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    constants |= {"maxnreg": config.wide_registers if need_alpha else config.registers}
    strides = (*given.strides(packed, "q", "k", "v", "out2", "dout"), *_strides(_writable(q), packed))
    numbers = (*strides, *sizes, *told.scalars, q_tiles, blocks)
    tensors_of_dq = f"q k v dout out2 {names['dq']} delta terms stats key_list key_count {GIVEN} q_batch q_start seed"
    steps.append(Launch(dq_kernel, (q_tiles, q.size(1), 1), tensors_of_dq, numbers, constants))
    if need_k or need_v:
        steps += _query_lists(live, config, packed, (*sizes, k_per), (k_tiles, list_length), buffers)
        constants = flags | {"KEYS": config.dkv_keys, "QUERIES": config.dkv_queries, "NEED_K": need_k, "NEED_V": need_v}
        constants |= {"num_warps": config.dkv_warps, "num_stages": config.dkv_stages, "maxnreg": config.dkv_registers}
        strides = given.strides(packed, "q", "k", "v", "dout")
        numbers = (*strides, *_strides(_writable(k), packed), *_strides(_writable(v), packed), *sizes, k_per)
        numbers = (*numbers, *told.scalars, list_length)
        tensors_of_dkv = f"q k v dout {names['dk']} {names['dv']} delta stats query_list query_count {GIVEN}"
        grid = (k_tiles, k.size(1), 1)
        steps.append(Launch(dkv_kernel, grid, f"{tensors_of_dkv} k_batch k_start seed", numbers, constants))
    steps += after
    if need_alpha:
        dtype = torch.float32 if tensors.alpha is None else tensors.alpha.dtype
        steps.append(TorchStep("dalpha", partial(_sum_of_rows, dtype), "terms"))
    return Plan(tuple(steps), buffers)


def _key_lists(live: Tensor | None, blocks: int, buffers: Buffers) -> tuple[Launch, ...]:
    """For every tile of queries the live blocks of keys, and their number."""
    if live is None:
        buffers |= {"key_list": None, "key_count": None}
        return ()
    heads, tiles, words = live.shape
    buffers |= {
        "key_list": Buffer((heads, tiles, blocks), torch.int32),
        "key_count": Buffer((heads, tiles), torch.int32),
    }
    constants, numbers = {"num_warps": 1, "num_stages": 1}, (tiles, words, blocks)
    return (Launch(key_lists_kernel, (tiles, heads, 1), "live key_list key_count", numbers, constants),)


def _query_lists(
    live: Tensor | None,
    config: AttentionConfig,
    packed: bool,
    sizes: tuple[int, ...],
    shape: tuple[int, int],
    buffers: Buffers,
) -> tuple[Launch, ...]:
    """For every tile of keys the tiles of queries that one of its blocks is live in, and their number."""
    if live is None:
        buffers |= {"query_list": None, "query_count": None}
        return ()
    heads, q_tiles, words = live.shape
    buffers["query_list"], buffers["query_count"] = (Buffer((heads, *s), torch.int32) for s in (shape, shape[:1]))
    constants = {"BLOCK_M": config.rows, "BLOCK_N": config.keys, "KEYS": config.dkv_keys, "PACKED": packed}
    names = "live query_list query_count cu_seqlens_q cu_seqlens_k q_start k_batch k_start"
    numbers = (*sizes, q_tiles, words, shape[1])
    constants |= {"num_warps": 4, "num_stages": 1}
    return (Launch(query_lists_kernel, (shape[0], heads, 1), names, numbers, constants),)


class _Told(NamedTuple):
    """Arguments of every kernel of a call but tensors: numbers by the order of the kernels' parameters."""

    sizes: tuple[int, ...]
    scalars: tuple[int | float, ...]
    flags: dict[str, Any]


def _told(tensors: AttentionTensors, options: Options, config: AttentionConfig, rows: int) -> _Told:
    q, k, alpha, packed, batch = tensors.q, tensors.k, tensors.alpha, tensors.packed, tensors.batch
    heads, dim, p, scale = q.size(1), q.size(-1), options.dropout_p, options.scale
    flags = {
        "H": heads, "GROUP": heads // k.size(1), "D": dim, "BLOCK_D": power_of_two(dim), "BLOCK_M": rows,
        "KIND": kernel_kind(q.dtype, alpha, options.alpha_value), "HAS_ALPHA": alpha is not None,
        "CAUSAL": options.causal, "WINDOW": options.window >= 0, "HAS_MASK": tensors.key_padding_mask is not None,
        "PACKED": packed, "DROPOUT": tensors.seed is not None,
        "EXACT": scale > 0 and math.frexp(scale)[0] == 0.5,  # multiplying never rounds and keeps the order of scores
        "PRECISION": config.precision,
    }  # fmt: skip
    sizes = (0, 0, q.size(0), k.size(0), batch) if packed else (q.size(2), k.size(2), 0, 0, batch)
    stat_size = math.prod(tensors.stats_shape)
    scalars = (options.window, scale, options.alpha_value, dropout_threshold(p), 1 / (1 - p), stat_size)
    return _Told(sizes, scalars, flags)


def _results(tensors: AttentionTensors, options: Options, training: bool, way: str) -> tuple[Buffers, str]:
    """The results that are not made, and what the kernels write statistics to."""
    buffers: Buffers = {} if training else {"out2": None}
    if way != LISTS:
        buffers["live"] = None
    if training or options.support:
        return buffers, "stats"
    buffers["stats"] = None
    if way == RESIDENT:
        return buffers, "stats"
    buffers["rows"] = Buffer((4, *tensors.stats_shape), torch.float32)
    return buffers, "rows"


def _turns(blocks: int) -> int:
    """Persistent programs that follow each other in one place: more balance what tiles cost, and take scratch."""
    return max(1, min(4, 264 // blocks))


def _sum_of_rows(dtype: torch.dtype, terms: Tensor) -> Tensor:
    return terms.sum(dim=(0, 2)).to(dtype)


# ---- layouts


def _is_readable(tensor: Tensor) -> bool:
    """The kernels take any strides but of the last dimension, which they read and write in one piece."""
    return tensor.stride(-1) == 1 or tensor.size(-1) == 1


class _Readable(NamedTuple):
    """Operands as the kernels read them, and the steps that copy some of them for it."""

    tensors: dict[str, Tensor]
    copies: tuple[TorchStep, ...]

    def strides(self, packed: bool, *names: str) -> tuple[int, ...]:
        """Strides of sequence, head and token of the named tensors, by default all."""
        return tuple(stride for name in names or self.tensors for stride in _strides(self.tensors[name], packed))


def _readable(**tensors: Tensor | None) -> _Readable:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    strange = {name: tensor for name, tensor in given.items() if not _is_readable(tensor)}
    return _Readable(
        given | {name: tensor.contiguous() for name, tensor in strange.items()},
        tuple(TorchStep(name, Tensor.contiguous, name) for name in strange),
    )


def _strides(tensor: Tensor, packed: bool) -> tuple[int, int, int]:
    return (0, tensor.stride(1), tensor.stride(0)) if packed else (tensor.stride(0), tensor.stride(1), tensor.stride(2))


def _writable(like: Tensor) -> Tensor:
    """Buffer that the kernels write for a result laid out as ``torch.empty_like(like)``."""
    made = torch.empty_like(like)
    return made if _is_readable(made) else torch.empty_like(like, memory_format=torch.contiguous_format)


def _written(results: dict[str, Tensor], buffers: Buffers) -> tuple[list[str], list[TorchStep]]:
    """The names that kernels write results by, each like a tensor, and the steps that lay them out after that."""
    names, steps = [], []
    for name, like in results.items():
        layout = torch.empty_like(like)
        if _is_readable(layout):
            names.append(name)
            continue
        buffers[f"dense_{name}"] = Buffer(layout.shape, layout.dtype)
        names.append(f"dense_{name}")
        steps.append(TorchStep(name, partial(_laid_out, layout.stride()), f"dense_{name}"))
    return names, steps


def _laid_out(strides: tuple[int, ...], tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _copies(tensors: AttentionTensors) -> tuple[TorchStep, ...]:
    """Alphas and offsets as the kernels read them: contiguous, and the mask in bytes."""
    mask = tensors.key_padding_mask
    steps = contiguous(alpha=tensors.alpha, cu_seqlens_q=tensors.cu_seqlens_q, cu_seqlens_k=tensors.cu_seqlens_k)
    if mask is None or (mask.is_contiguous() and mask.dtype.itemsize == 1):
        return steps
    return (*steps, TorchStep("key_padding_mask", one_byte, "key_padding_mask"))


# ---- packed batches


def _tables(
    tensors: AttentionTensors, buffers: Buffers, queries: tuple[int, int], keys: tuple[int, int] = (0, 0)
) -> tuple[Launch, ...]:
    """The sequence of every tile, and the first tile of every sequence, for so many tiles of so many rows.

    A tile past the last one belongs to sequence ``batch``.
    """
    buffers |= dict.fromkeys(("q_batch", "q_start", "k_batch", "k_start"))
    if not tensors.packed:
        return ()
    batch, (q_tiles, rows), (k_tiles, columns) = tensors.batch, queries, keys
    buffers |= {"q_batch": Buffer((q_tiles,), torch.int32), "q_start": Buffer((batch + 1,), torch.int32)}
    if columns:
        buffers |= {"k_batch": Buffer((k_tiles,), torch.int32), "k_start": Buffer((batch + 1,), torch.int32)}
    grid = (max(cdiv(max(q_tiles, k_tiles), TABLE_BLOCK), 1), 2 if columns else 1, 1)
    constants = {"ROWS": rows, "KEYS": columns, "BLOCK": TABLE_BLOCK, "num_warps": 4, "num_stages": 1}
    names = "cu_seqlens_q cu_seqlens_k q_batch q_start k_batch k_start"
    return (Launch(tables_kernel, grid, names, (batch, q_tiles, k_tiles), constants),)


def _nan_if_broken(tensors: AttentionTensors, options: Options, interpreted: bool) -> Launch:
    """NaN in all elements of the output if offsets do not describe the rows, or a sequence has more keys than it may:
    the host cannot look without waiting.
    """
    q, k = tensors.q, tensors.k
    constants = {"BLOCK": CHECK_BLOCK, "num_warps": 4, "num_stages": 1}
    programs = 1 if interpreted else WRITERS  # programs that are interpreted run one after the other
    numbers = (tensors.batch, q.size(0), k.size(0), options.max_seqlen_k, q.numel())
    return Launch(nan_if_broken_kernel, (programs, 1, 1), "cu_seqlens_q cu_seqlens_k out", numbers, constants)
