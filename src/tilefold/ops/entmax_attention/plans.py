"""Launch plans of alpha-entmax attention and its gradients, for tensors of these layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

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
from tilefold.ops.entmax_attention._triton.roots import roots_kernel
from tilefold.ops.entmax_attention._triton.tiles import nan_if_broken_kernel, tables_kernel
from tilefold.ops.entmax_attention.configs import (
    LISTS,
    RESIDENT,
    SHORT,
    AttentionConfig,
    config_of,
    row_tiles,
    span,
    way_of,
)

Buffers = dict[str, Buffer | View | None]
Values = dict[str, object]  # numbers and constants by the kernels' names
Steps = list[Launch | TorchStep]
PLACES = {  # of tensors, by their kernels' names
    "mask_ptr": "key_padding_mask", "cu_q_ptr": "cu_seqlens_q", "cu_k_ptr": "cu_seqlens_k", "batch_ptr": "q_batch",
    "start_ptr": "q_start", "key_batch_ptr": "k_batch", "key_start_ptr": "k_start", "dalpha_ptr": "terms",
}  # fmt: skip
SMALL = {"num_warps": 4, "num_stages": 1}
TABLE_BLOCK = 64  # tiles of a program, and sequences that it looks at together
CHECK_BLOCK = 512  # offsets that are looked at together, and elements that are written
WRITERS = 128


def _launch(kernel: object, grid: Grid, values: Mapping[str, object], places: Mapping[str, str] = {}) -> Launch:
    named, numbers, constants = arguments_of(kernel, PLACES | dict(places), values)
    return Launch(kernel, grid, " ".join(named), numbers, constants)


def forward(tensors: AttentionTensors, options: Options, training: bool, setting: Setting) -> Plan:
    """One kernel for rows whose scores stay on chip, else one for the roots and one for the output."""
    q, packed, interpreted = tensors.q, tensors.packed, setting.capability == (0, 0)
    if interpreted:
        check_interpreted("triton", torch.device("cpu"), q.dtype)
    way = way_of(tensors, options, setting.capability)
    config = config_of(tensors, options, setting.capability, way, tf32=setting.tf32, training=training)
    rows = config.resident_rows if way == RESIDENT else config.rows
    buffers: Buffers = {} if training else {"out2": None}
    buffers |= {} if way == LISTS else {"live": None}
    stats = "stats"
    if not training and not options.support:
        buffers["stats"] = None
        if way != RESIDENT:  # one kernel writes what the next reads
            stats, buffers["rows"] = "rows", Buffer((4, *tensors.stats_shape), torch.float32)
    if q.numel() == 0:
        return Plan((), buffers)
    given, steps = _operands(tensors)
    places, after = _written(buffers, out=q, **({"out2": q} if training else {}))
    tiles = row_tiles(q, rows, tensors)
    told = _told(tensors, options, config, rows) | _strides(given | {"o": _result(q)}, packed)
    told |= {"tiles_per": 0 if packed else tiles // tensors.batch, "GRADIENT": training, "SUPPORT": options.support}
    # NEAR is the share of a row's weights that the last step of its root may leave out: a quarter of an ulp
    near = 0.0 if q.dtype == torch.float32 else torch.finfo(q.dtype).eps / 4
    told |= {"TOLERANCE": tolerance(q.dtype), "NEAR": near}
    places = {"out2_ptr": places["out_ptr"], "stats_ptr": stats} | places
    places |= {"list_ptr": "lists", "count_ptr": "counts"}
    steps += _tables(tensors, buffers, (tiles, rows))
    grid = tiles, q.size(1), 1
    if way == RESIDENT:
        own = {"BLOCK_N": power_of_two(span(rows, options)), "num_warps": config.resident_warps, "num_stages": 1}
        steps.append(_launch(resident_kernel, grid, told | own, places))
    else:
        blocks = span(rows, options) // config.keys + 2
        programs, words = tiles * q.size(1), 0
        buffers |= dict.fromkeys(("maxima", "lists", "counts"))
        if way == LISTS:
            # persistent programs that follow each other in one place: more balance what tiles cost, and take scratch
            turns = max(1, min(4, 264 // blocks))
            programs = min(programs, config.programs * turns * setting.multiprocessors)
            words = cdiv(options.max_seqlen_k, 32 * config.keys)
            buffers["maxima"] = Buffer((programs, blocks, rows), torch.float32)
            buffers["lists"] = Buffer((q.size(1), tiles, blocks), torch.int32)
            buffers["counts"] = Buffer((q.size(1), tiles), torch.int32)
        told |= {"LISTS": way == LISTS, "BLOCK_N": config.keys, "tiles": tiles, "blocks": blocks, "words": words}
        told |= {"num_stages": config.forward_stages, "num_warps": config.num_warps, "maxnreg": config.registers}
        roots = told | {"WIDTH": 16 if blocks <= 18 else 32}
        steps.append(_launch(roots_kernel, (programs, 1, 1), roots, places))
        told["maxnreg"] = config.wide_registers if training else config.registers
        steps.append(_launch(output_kernel, grid, told, places))
    steps += after
    if packed:
        steps.append(_nan_if_broken(tensors, options, interpreted))
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
    given, steps = _operands(tensors, dout=dout, out2=saved.out2)
    wanted = {f"d{name}": t for name, t, need in zip("qkv", (q, k, v), needs[:3], strict=True) if need}
    places, after = _written(buffers, **wanted)
    q_tiles, k_tiles = row_tiles(q, config.rows, tensors), row_tiles(k, config.dkv_keys, tensors)
    q_per, k_per = (0, 0) if packed else (q_tiles // tensors.batch, k_tiles // tensors.batch)
    listed = q_tiles if packed else q_per  # at most, for a tile of keys
    blocks, words = (0, 0) if live is None else (cdiv(options.max_seqlen_k, config.keys), live.size(2))
    told = _told(tensors, options, config, config.rows) | {
        "tiles_per": q_per, "key_tiles_per": k_per, "tiles": q_tiles, "list_length": listed, "blocks": blocks,
        "LISTS": live is not None, "words": words, "BLOCK_N": config.keys, "KEYS": config.dkv_keys,
        "QUERIES": config.dkv_queries, "NEED_Q": need_q, "NEED_K": need_k, "NEED_V": need_v, "NEED_ALPHA": need_alpha,
    }  # fmt: skip
    if need_alpha and packed:  # there may be rows of no sequence, should the offsets be broken
        steps.append(TorchStep("terms", Tensor.zero_, "terms"))
    steps += _tables(tensors, buffers, (q_tiles, config.rows), (k_tiles, config.dkv_keys))
    # for every tile of queries the live blocks of keys, and their number
    places |= _lists("key", live, (q_tiles, blocks), buffers)
    if live is not None:
        small = told | {"num_warps": 1, "num_stages": 1}
        steps.append(_launch(key_lists_kernel, (q_tiles, live.size(0), 1), small, places))
    own: Values = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    own["maxnreg"] = config.wide_registers if need_alpha else config.registers
    values = told | own | _strides(given | {"g": _result(q)}, packed)
    steps.append(_launch(dq_kernel, (q_tiles, q.size(1), 1), values, places))
    if need_k or need_v:
        # for every tile of keys the tiles of queries that one of its blocks is live in, and their number
        places |= _lists("query", live, (k_tiles, listed), buffers)
        if live is not None:
            steps.append(_launch(query_lists_kernel, (k_tiles, live.size(0), 1), told | SMALL, places))
        own = {"num_warps": config.dkv_warps, "num_stages": config.dkv_stages, "maxnreg": config.dkv_registers}
        values = told | own | _strides(given | {"g": _result(k), "w": _result(v)}, packed)
        places |= {"batch_ptr": "k_batch", "start_ptr": "k_start"}
        steps.append(_launch(dkv_kernel, (k_tiles, k.size(1), 1), values, places))
    steps += after
    if need_alpha:
        dtype = torch.float32 if tensors.alpha is None else tensors.alpha.dtype
        steps.append(TorchStep("dalpha", lambda terms: terms.sum(dim=(0, 2)).to(dtype), "terms"))
    return Plan(tuple(steps), buffers)


def _lists(name: str, live: Tensor | None, shape: tuple[int, int], buffers: Buffers) -> dict[str, str]:
    """Buffers of lists of live blocks and their lengths, by the kernels' names for them."""
    for place, size in ((f"{name}_list", shape), (f"{name}_count", shape[:1])):
        buffers[place] = None if live is None else Buffer((live.size(0), *size), torch.int32)
    return {"list_ptr": f"{name}_list", "count_ptr": f"{name}_count"}


def _told(tensors: AttentionTensors, options: Options, config: AttentionConfig, rows: int) -> Values:
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
        "PRECISION": config.precision, "ptx_options": config.ptx_options,
    }  # fmt: skip


def _tables(
    tensors: AttentionTensors, buffers: Buffers, queries: tuple[int, int], keys: tuple[int, int] = (0, 0)
) -> tuple[Launch, ...]:
    """The sequence of every tile of a packed batch, and the first tile of every sequence, for so many tiles of so many
    rows. A tile past the last one belongs to sequence ``batch``.
    """
    buffers |= dict.fromkeys(("q_batch", "q_start", "k_batch", "k_start"))
    if not tensors.packed:
        return ()
    batch, (q_tiles, rows), (k_tiles, columns) = tensors.batch, queries, keys
    for name, tiles in (("q", q_tiles), ("k", k_tiles)) if columns else (("q", q_tiles),):
        buffers |= {f"{name}_batch": Buffer((tiles,), torch.int32), f"{name}_start": Buffer((batch + 1,), torch.int32)}
    grid = (max(cdiv(max(q_tiles, k_tiles), TABLE_BLOCK), 1), 2 if columns else 1, 1)
    values = {"B": batch, "q_tiles": q_tiles, "k_tiles": k_tiles, "ROWS": rows, "KEYS": columns, "BLOCK": TABLE_BLOCK}
    return (_launch(tables_kernel, grid, values | SMALL),)


def _nan_if_broken(tensors: AttentionTensors, options: Options, interpreted: bool) -> Launch:
    """NaN in all of the output where offsets do not describe the rows, or a sequence has more keys than it may: the
    host cannot look without waiting.
    """
    q_rows, k_rows, size = tensors.q.size(0), tensors.k.size(0), tensors.q.numel()
    values = {"B": tensors.batch, "q_rows": q_rows, "k_rows": k_rows, "longest": options.max_seqlen_k, "size": size}
    # programs that are interpreted run one after the other
    grid = 1 if interpreted else WRITERS, 1, 1
    return _launch(nan_if_broken_kernel, grid, values | {"BLOCK": CHECK_BLOCK} | SMALL)


# ---- layouts: the kernels take any strides but of the last dimension, which they read and write in one piece


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.size(-1) == 1 else tensor.contiguous()


def _operands(tensors: AttentionTensors, **others: Tensor | None) -> tuple[dict[str, Tensor], Steps]:
    """q, k, v and others as the kernels read them, and the steps that copy what they do not read as it is."""
    q, k, v, alpha, mask, cu_q, cu_k, _ = tensors
    given = {name: t for name, t in {"q": q, "k": k, "v": v, **others}.items() if t is not None}
    dense = {name: _dense(t) for name, t in given.items()}
    copied = {name: t for name, t in given.items() if dense[name] is not t}
    steps: Steps = [*contiguous(**copied, alpha=alpha, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)]
    if mask is not None and not (mask.is_contiguous() and mask.dtype.itemsize == 1):
        steps.append(TorchStep("key_padding_mask", one_byte, "key_padding_mask"))
    return dense, steps


def _result(like: Tensor) -> Tensor:
    """Layout in which kernels write a result laid out as ``torch.empty_like(like)``."""
    return _dense(torch.empty_like(like))


def _written(buffers: Buffers, **results: Tensor) -> tuple[dict[str, str], Steps]:
    """Places of results like these tensors, and the steps that lay out what the kernels write elsewhere."""
    places: dict[str, str] = {}
    steps: Steps = []
    for name, like in results.items():
        layout = torch.empty_like(like)
        places[f"{name}_ptr"] = name
        if _dense(layout) is not layout:
            places[f"{name}_ptr"], buffers[f"dense_{name}"] = f"dense_{name}", Buffer(layout.shape, layout.dtype)
            steps.append(TorchStep(name, partial(_laid_out, layout.stride()), f"dense_{name}"))
    return places, steps


def _laid_out(strides: tuple[int, ...], tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _strides(tensors: Mapping[str, Tensor], packed: bool) -> Values:
    """Strides of sequence, head and token, by the first letters of the tensors' names."""
    strides: Values = {}
    for name, t in tensors.items():
        strides |= {f"s{name[0]}_b": 0 if packed else t.stride(0), f"s{name[0]}_h": t.stride(1)}
        strides[f"s{name[0]}_n"] = t.stride(0 if packed else 2)
    return strides
