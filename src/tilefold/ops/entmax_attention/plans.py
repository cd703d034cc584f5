"""Launch plans of alpha-entmax attention and its gradients, for tensors of these layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.tensors import cdiv, one_byte, power_of_two
from tilefold.ops._shared.entmax_root import kernel_kind, tolerance
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.internals import Grid
from tilefold.ops._shared.philox import dropout_threshold
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, TorchStep, View, arguments_of, contiguous
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
PLACES = {  # of tensors, by their kernels' names
    "mask_ptr": "key_padding_mask", "cu_q_ptr": "cu_seqlens_q", "cu_k_ptr": "cu_seqlens_k", "batch_ptr": "q_batch",
    "start_ptr": "q_start", "key_batch_ptr": "k_batch", "key_start_ptr": "k_start", "dalpha_ptr": "terms",
}  # fmt: skip
SMALL = {"num_warps": 4, "num_stages": 1}


def _launch(kernel: Any, grid: Grid, values: Mapping[str, Any], places: Mapping[str, str] = {}) -> Launch:
    named, numbers, constants = arguments_of(kernel, PLACES | dict(places), values)
    return Launch(kernel, grid, " ".join(named), numbers, constants)


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
    given, copies = _readable(q=q, k=tensors.k, v=tensors.v)
    (out, *out2), after = _written({"out": q, "out2": q} if training else {"out": q}, buffers)
    rows = config.resident_rows if way == RESIDENT else config.rows
    tiles = row_tiles(q, rows, tensors)
    told = _told(tensors, options, config, rows) | _strides(given | {"o": _writable(q)}, packed)
    told |= {"tiles_per": 0 if packed else tiles // tensors.batch, "GRADIENT": training, "SUPPORT": options.support}
    told |= {"TOLERANCE": tolerance(q.dtype), "NEAR": nearness(q.dtype)}
    places = {"out_ptr": out, "out2_ptr": (out2 or [out])[0], "stats_ptr": stats}
    places |= {"list_ptr": "lists", "count_ptr": "counts"}
    steps: list[Launch | TorchStep] = [*copies, *_copies(tensors), *_tables(tensors, buffers, (tiles, rows))]
    grid = tiles, q.size(1), 1
    if way == RESIDENT:
        own = {"BLOCK_N": power_of_two(span(rows, options)), "num_warps": config.resident_warps, "num_stages": 1}
        steps.append(_launch(resident_kernel, grid, told | own, places))
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
        told |= {"LISTS": way == LISTS, "BLOCK_N": config.keys, "tiles": tiles, "blocks": blocks, "words": live[2]}
        told |= {"num_stages": config.forward_stages, "num_warps": config.num_warps, "maxnreg": config.registers}
        roots = told | {"WIDTH": 16 if blocks <= 18 else 32}
        steps.append(_launch(roots_kernel, (programs, 1, 1), roots, places))
        told["maxnreg"] = config.wide_registers if training else config.registers
        steps.append(_launch(output_kernel, grid, told, places))
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
    given, copies = _readable(q=q, k=k, v=v, dout=dout, out2=saved.out2)
    given |= {"d": given.pop("dout"), "o": given.pop("out2")} if saved.out2 is not None else {"d": given.pop("dout")}
    wanted = {f"d{name}": t for name, t, need in zip("qkv", (q, k, v), needs[:3], strict=True) if need}
    written, after = _written(wanted, buffers)
    places = {f"{name}_ptr": place for name, place in zip(wanted, written, strict=True)}
    q_tiles, k_tiles = row_tiles(q, config.rows, tensors), row_tiles(k, config.dkv_keys, tensors)
    q_per, k_per = (0, 0) if packed else (q_tiles // tensors.batch, k_tiles // tensors.batch)
    told = _told(tensors, options, config, config.rows) | {
        "tiles_per": q_per, "key_tiles_per": k_per, "tiles": q_tiles, "list_length": q_tiles if packed else q_per,
        "blocks": 0 if live is None else cdiv(options.max_seqlen_k, config.keys), "LISTS": live is not None,
        "words": 0 if live is None else live.size(2), "BLOCK_N": config.keys, "KEYS": config.dkv_keys,
        "QUERIES": config.dkv_queries, "NEED_Q": need_q, "NEED_K": need_k, "NEED_V": need_v, "NEED_ALPHA": need_alpha,
    }  # fmt: skip
    steps: list[Launch | TorchStep] = [*copies, *_copies(tensors)]
    if need_alpha and packed:  # there may be rows of no sequence, should the offsets be broken
        steps.append(TorchStep("terms", Tensor.zero_, "terms"))
    steps += _tables(tensors, buffers, (q_tiles, config.rows), (k_tiles, config.dkv_keys))
    # for every tile of queries the live blocks of keys, and their number
    places |= _lists("key", live, (q_tiles, told["blocks"]), buffers)
    if live is not None:
        small = told | {"num_warps": 1, "num_stages": 1}
        steps.append(_launch(key_lists_kernel, (q_tiles, live.size(0), 1), small, places))
    own: dict[str, int | None] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    own["maxnreg"] = config.wide_registers if need_alpha else config.registers
    values = told | own | _strides(given | {"g": _writable(q)}, packed)
    steps.append(_launch(dq_kernel, (q_tiles, q.size(1), 1), values, places))
    if need_k or need_v:
        # for every tile of keys the tiles of queries that one of its blocks is live in, and their number
        places |= _lists("query", live, (k_tiles, told["list_length"]), buffers)
        if live is not None:
            steps.append(_launch(query_lists_kernel, (k_tiles, live.size(0), 1), told | SMALL, places))
        own = {"num_warps": config.dkv_warps, "num_stages": config.dkv_stages, "maxnreg": config.dkv_registers}
        values = told | own | _strides(given | {"g": _writable(k), "w": _writable(v)}, packed)
        places |= {"batch_ptr": "k_batch", "start_ptr": "k_start"}
        steps.append(_launch(dkv_kernel, (k_tiles, k.size(1), 1), values, places))
    steps += after
    if need_alpha:
        dtype = torch.float32 if tensors.alpha is None else tensors.alpha.dtype
        steps.append(TorchStep("dalpha", partial(_sum_of_rows, dtype), "terms"))
    return Plan(tuple(steps), buffers)


def _lists(name: str, live: Tensor | None, shape: tuple[int, int], buffers: Buffers) -> dict[str, str]:
    """Buffers of lists of live blocks and their lengths, by the kernels' names for them."""
    for place, size in ((f"{name}_list", shape), (f"{name}_count", shape[:1])):
        buffers[place] = None if live is None else Buffer((live.size(0), *size), torch.int32)
    return {"list_ptr": f"{name}_list", "count_ptr": f"{name}_count"}


def _told(tensors: AttentionTensors, options: Options, config: AttentionConfig, rows: int) -> dict[str, Any]:
    """Numbers and constants of a call's kernels, by their names."""
    q, k, alpha, packed = tensors.q, tensors.k, tensors.alpha, tensors.packed
    heads, dim, p, scale = q.size(1), q.size(-1), options.dropout_p, options.scale
    return {
        "Nq": 0 if packed else q.size(2), "Nk": 0 if packed else k.size(2), "Tq": q.size(0) if packed else 0,
        "Tk": k.size(0) if packed else 0, "B": tensors.batch, "window": options.window, "scale": scale,
        "alpha_value": options.alpha_value, "threshold": dropout_threshold(p), "keep_scale": 1 / (1 - p),
        "stat_size": math.prod(tensors.stats_shape),
        "H": heads, "GROUP": heads // k.size(1), "D": dim, "BLOCK_D": power_of_two(dim), "BLOCK_M": rows,
        "KIND": kernel_kind(q.dtype, alpha, options.alpha_value), "HAS_ALPHA": alpha is not None,
        "CAUSAL": options.causal, "WINDOW": options.window >= 0, "HAS_MASK": tensors.key_padding_mask is not None,
        "PACKED": packed, "DROPOUT": tensors.seed is not None,
        "EXACT": scale > 0 and math.frexp(scale)[0] == 0.5,  # multiplying never rounds and keeps the order of scores
        "PRECISION": config.precision,
    }  # fmt: skip


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


def _readable(**tensors: Tensor | None) -> tuple[dict[str, Tensor], tuple[TorchStep, ...]]:
    """Operands as the kernels read them, and the steps that copy some of them for it."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    strange = {name: tensor for name, tensor in given.items() if not _is_readable(tensor)}
    copied = {name: tensor.contiguous() for name, tensor in strange.items()}
    return given | copied, tuple(TorchStep(name, Tensor.contiguous, name) for name in strange)


def _strides(tensors: Mapping[str, Tensor], packed: bool) -> dict[str, int]:
    """Strides of sequence, head and token, by the kernels' names for them."""
    strides: dict[str, int] = {}
    for name, tensor in tensors.items():
        strides |= {
            f"s{name}_b": 0 if packed else tensor.stride(0), f"s{name}_h": tensor.stride(1),
            f"s{name}_n": tensor.stride(0 if packed else 2),
        }  # fmt: skip
    return strides


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
    values = {"B": batch, "q_tiles": q_tiles, "k_tiles": k_tiles, "ROWS": rows, "KEYS": columns, "BLOCK": TABLE_BLOCK}
    return (_launch(tables_kernel, grid, values | SMALL),)


def _nan_if_broken(tensors: AttentionTensors, options: Options, interpreted: bool) -> Launch:
    """NaN in all elements of the output if offsets do not describe the rows, or a sequence has more keys than it may:
    the host cannot look without waiting.
    """
    q, k = tensors.q, tensors.k
    values = {"B": tensors.batch, "q_rows": q.size(0), "k_rows": k.size(0), "longest": options.max_seqlen_k}
    values |= {"size": q.numel(), "BLOCK": CHECK_BLOCK} | SMALL
    # programs that are interpreted run one after the other
    return _launch(nan_if_broken_kernel, (1 if interpreted else WRITERS, 1, 1), values)
