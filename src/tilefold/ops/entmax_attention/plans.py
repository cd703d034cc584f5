"""Launch plans of alpha-entmax attention and its gradients, for tensors of these layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import kernel_kind, tolerance
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.philox import dropout_threshold
from tilefold.ops._shared.plan import Plan, Setting, Steps, cdiv, contiguous, one_byte, power_of_two
from tilefold.ops.entmax_attention._problem import (
    AttentionSaved,
    AttentionTensors,
    Options,
    dense,
    result_like,
)
from tilefold.ops.entmax_attention._triton.backward import (
    dkv_kernel,
    dq_kernel,
    key_lists_kernel,
    query_lists_kernel,
)
from tilefold.ops.entmax_attention._triton.forward import output_kernel, resident_kernel
from tilefold.ops.entmax_attention._triton.roots import roots_kernel
from tilefold.ops.entmax_attention._triton.tiles import nan_if_broken_kernel, tables_kernel
from tilefold.ops.entmax_attention.configs import (
    LISTS,
    RESIDENT,
    SHORT,
    config_of,
    row_tiles,
    span,
    way_of,
)

SMALL = {"num_warps": 4, "num_stages": 1}
SIMPLE = SMALL | {"maxnreg": None, "ptx_options": None}
TABLE_BLOCK = 64  # tiles of a program, and sequences that it looks at together
CHECK_BLOCK = 512  # offsets that are looked at together, and elements that are written
WRITERS = 128


def forward(tensors: AttentionTensors, options: Options, training: bool, setting: Setting) -> Plan:
    """One kernel for rows whose scores stay on chip, else one for the roots and one for the output."""
    q, packed = tensors.q, tensors.packed
    check_interpreted(setting, q.dtype)
    way = way_of(tensors, options, setting.capability)
    config = config_of(
        tensors,
        options,
        setting.capability,
        way,
        tf32=setting.tf32,
        training=training,
    )
    rows = config["resident_rows"] if way == RESIDENT else config["rows"]
    steps = _steps(tensors, options, config, rows)
    steps.buffers = dict.fromkeys(
        (*([] if training else ["out2"]), *([] if way == LISTS else ["live"])),
    )
    if not training and not options.support:
        steps.buffers["stats"] = None
        if way != RESIDENT:  # one kernel writes what the next reads
            steps.renamed["stats"] = steps.buffer("rows", (4, *tensors.stats_shape))
    if q.numel() == 0:
        return steps.plan()
    given = _operands(steps, tensors)
    if not training:
        steps.renamed["out2"] = "out"
    tiles = row_tiles(q, rows, tensors)
    # NEAR is the share of a row's weights that the last step of its root may leave out: a quarter
    # of an ulp
    near = 0.0 if q.dtype == torch.float32 else torch.finfo(q.dtype).eps / 4
    steps.values |= _strides(given | {"o": result_like(q).on(q.device)}, packed) | {
        "tiles_per": 0 if packed else tiles // tensors.batch,
        "GRADIENT": training,
        "SUPPORT": options.support,
        "TOLERANCE": tolerance(q.dtype),
        "NEAR": near,
    }
    _add_tables(steps, tensors, (tiles, rows))
    grid = tiles, q.size(1)
    if way == RESIDENT:
        own = {
            "BLOCK_N": power_of_two(span(rows, options)),
            "num_warps": config["resident_warps"],
            "num_stages": 1,
        }
        steps.launch(resident_kernel, grid, own)
    else:
        blocks = span(rows, options) // config["keys"] + 2
        programs, words = tiles * q.size(1), 0
        if way == LISTS:
            # persistent programs that follow each other in one place: more balance what tiles cost,
            # and take scratch
            programs = min(
                programs,
                config["programs"] * max(1, min(4, 264 // blocks)) * setting.multiprocessors,
            )
            words = cdiv(options.max_seqlen_k, 32 * config["keys"])
            steps.buffer("maxima", (programs, blocks, rows))
            steps.buffer("key_list", (q.size(1), tiles, blocks), torch.int32)
            steps.buffer("key_count", (q.size(1), tiles), torch.int32)
        steps.values |= {
            "LISTS": way == LISTS,
            "BLOCK_N": config["keys"],
            "tiles": tiles,
            "blocks": blocks,
            "words": words,
            "num_stages": config["forward_stages"],
            "num_warps": config["num_warps"],
            "maxnreg": config["registers"],
        }
        steps.launch(roots_kernel, (programs,), {"WIDTH": 16 if blocks <= 18 else 32})
        registers = config["wide_registers"] if training else config["registers"]
        steps.launch(output_kernel, grid, {"maxnreg": registers})
    if packed:
        # NaN in all of the output where offsets do not describe the rows, or a sequence has more
        # keys than it may: the host cannot look without waiting
        own = {
            "q_rows": q.size(0),
            "k_rows": tensors.k.size(0),
            "longest": options.max_seqlen_k,
            "size": q.numel(),
        }
        # programs that are interpreted run one after the other
        writers = 1 if setting.capability == (0, 0) else WRITERS
        steps.launch(nan_if_broken_kernel, (writers,), own | {"BLOCK": CHECK_BLOCK} | SIMPLE)
    return steps.plan()


def backward(
    dout: Tensor,
    saved: AttentionSaved,
    options: Options,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """A kernel for dq, dalpha and what dk needs of every row, then one for dk and dv, each with its
    lists.
    """
    tensors, live = saved.tensors, saved.live
    (q, k, v), packed = tensors[:3], tensors.packed
    if q.numel() == 0 or k.numel() == 0:
        return Plan(fills={"dq": 0, "dk": 0, "dv": 0, "dalpha": 0})
    if (
        live is not None and live.numel() == 0
    ):  # of a registered operator, which returns tensors only
        live = None
    need_q, need_k, need_v, need_alpha = needs
    config = config_of(
        tensors,
        options,
        setting.capability,
        SHORT if live is None else LISTS,
        tf32=setting.tf32,
    )
    steps = _steps(tensors, options, config, config["rows"])
    steps.buffer("delta", tensors.stats_shape)
    if need_alpha:
        steps.buffer("terms", tensors.stats_shape)
    given = _operands(steps, tensors, dout=dout, out2=saved.out2)
    q_tiles, k_tiles = (
        row_tiles(q, config["rows"], tensors),
        row_tiles(k, config["dkv_keys"], tensors),
    )
    q_per, k_per = (0, 0) if packed else (q_tiles // tensors.batch, k_tiles // tensors.batch)
    spans = (
        cdiv(options.max_seqlen_k, config["dkv_keys"]) if packed else k_per
    )  # tiles of a sequence's keys, at most
    blocks, words = (
        (0, 0) if live is None else (cdiv(options.max_seqlen_k, config["keys"]), live.size(2))
    )
    steps.values |= {
        "tiles_per": q_per,
        "key_tiles_per": k_per,
        "tiles": q_tiles,
        "spans": spans,
        "blocks": blocks,
        "LISTS": live is not None,
        "words": words,
        "BLOCK_N": config["keys"],
        "KEYS": config["dkv_keys"],
        "QUERIES": config["dkv_queries"],
        "NEED_Q": need_q,
        "NEED_K": need_k,
        "NEED_V": need_v,
        "NEED_ALPHA": need_alpha,
    }
    if need_alpha and packed:  # there may be rows of no sequence, should the offsets be broken
        steps.torch("terms", Tensor.zero_, "terms")
    _add_tables(steps, tensors, (q_tiles, config["rows"]), (k_tiles, config["dkv_keys"]))
    # for every tile of queries the live blocks of keys, and their number
    _add_lists(
        steps,
        "key",
        key_lists_kernel,
        live,
        q_tiles,
        (q_tiles, blocks),
        {"num_warps": 1, "num_stages": 1},
    )
    own: dict[str, object] = {"num_warps": config["num_warps"], "num_stages": config["num_stages"]}
    own["maxnreg"] = config["wide_registers"] if need_alpha else config["registers"]
    own |= _strides(given | {"g": result_like(q).on(q.device)}, packed)
    steps.launch(dq_kernel, (q_tiles, q.size(1)), own)
    if need_k or need_v:
        # for every tile of keys the tiles of queries that one of its blocks is live in, and their
        # number
        _add_lists(steps, "query", query_lists_kernel, live, k_tiles, (q_tiles, spans), SMALL)
        own = {
            "num_warps": config["dkv_warps"],
            "num_stages": config["dkv_stages"],
            "maxnreg": config["dkv_registers"],
        }
        own |= _strides(
            given | {"g": result_like(k).on(k.device), "w": result_like(v).on(v.device)},
            packed,
        )
        steps.launch(dkv_kernel, (k_tiles, k.size(1)), own)
    if need_alpha:
        dtype = torch.float32 if tensors.alpha is None else tensors.alpha.dtype
        steps.torch("dalpha", lambda terms: terms.sum(dim=(0, 2)).to(dtype), "terms")
    return steps.plan()


def _add_lists(
    steps: Steps,
    name: str,
    kernel: Any,
    live: Tensor | None,
    tiles: int,
    room: tuple[int, int],
    own: dict[str, int],
) -> None:
    """Lists of live blocks of so many tiles, in as much room for each head, and their lengths, if
    there is a map.
    """
    if live is not None:
        steps.buffer(f"{name}_list", (live.size(0), *room), torch.int32)
        steps.buffer(f"{name}_count", (live.size(0), tiles), torch.int32)
        steps.launch(kernel, (tiles, live.size(0)), own)


def _steps(
    tensors: AttentionTensors,
    options: Options,
    config: Mapping[str, Any],
    rows: int,
) -> Steps:
    """A plan in the making, with numbers and constants of a call's kernels."""
    q, k, alpha, packed = tensors.q, tensors.k, tensors.alpha, tensors.packed
    heads, dim, p, scale = q.size(1), q.size(-1), options.dropout_p, options.scale
    values = {
        "Nq": 0 if packed else q.size(2),
        "Nk": 0 if packed else k.size(2),
        "Tq": q.size(0) if packed else 0,
        "Tk": k.size(0) if packed else 0,
        "B": tensors.batch,
        "window": options.window,
        "scale": scale,
        "alpha_value": options.alpha_value,
        "threshold": dropout_threshold(p),
        "keep_scale": 1 / (1 - p),
        "stat_size": math.prod(tensors.stats_shape),
        "H": heads,
        "GROUP": heads // k.size(1),
        "D": dim,
        "BLOCK_D": power_of_two(dim),
        "BLOCK_M": rows,
        "KIND": kernel_kind(q.dtype, alpha, options.alpha_value),
        "HAS_ALPHA": alpha is not None,
        "CAUSAL": options.causal,
        "WINDOW": options.window >= 0,
        "HAS_MASK": tensors.key_padding_mask is not None,
        "PACKED": packed,
        "DROPOUT": tensors.seed is not None,
        "EXACT": scale > 0
        and math.frexp(scale)[0] == 0.5,  # multiplying never rounds and keeps the order of scores
        "PRECISION": config["precision"],
        "ptx_options": config["ptx_options"],
    }
    return Steps(values)


def _add_tables(
    steps: Steps,
    tensors: AttentionTensors,
    queries: tuple[int, int],
    keys: tuple[int, int] = (0, 0),
) -> None:
    """The sequence of every tile of a packed batch, and the first tile of every sequence, for so
    many tiles of so many rows. A tile past the last one belongs to sequence ``batch``.
    """
    if not tensors.packed:
        return
    batch, (q_tiles, rows), (k_tiles, columns) = tensors.batch, queries, keys
    for name, tiles in (("q", q_tiles), ("k", k_tiles)) if columns else (("q", q_tiles),):
        steps.buffer(f"{name}_batch", (tiles,), torch.int32)
        steps.buffer(f"{name}_start", (batch + 1,), torch.int32)
    grid = (max(cdiv(max(q_tiles, k_tiles), TABLE_BLOCK), 1), 2 if columns else 1)
    own = {
        "q_tiles": q_tiles,
        "k_tiles": k_tiles,
        "ROWS": rows,
        "KEYS": columns,
        "BLOCK": TABLE_BLOCK,
    }
    steps.launch(tables_kernel, grid, own | SIMPLE)


# ---- layouts: the kernels take any strides but of the last dimension


def _operands(
    steps: Steps,
    tensors: AttentionTensors,
    **others: Tensor | None,
) -> dict[str, Tensor]:
    """q, k, v and others as the kernels read them; what they do not read as it is is copied."""
    q, k, v, alpha, mask, cu_q, cu_k, _ = tensors
    given = {name: t for name, t in {"q": q, "k": k, "v": v, **others}.items() if t is not None}
    layouts = {name: dense(t) for name, t in given.items()}
    copied = {name: t for name, t in given.items() if layouts[name] is not t}
    steps.steps += contiguous(**copied, alpha=alpha, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    if mask is not None and not (mask.is_contiguous() and mask.dtype.itemsize == 1):
        steps.torch("key_padding_mask", one_byte, "key_padding_mask")
    return layouts


def _strides(tensors: Mapping[str, Tensor], packed: bool) -> dict[str, int]:
    """Strides of sequence, head and token, by the first letters of the tensors' names."""
    strides: dict[str, int] = {}
    for name, t in tensors.items():
        strides |= {f"s{name[0]}_b": 0 if packed else t.stride(0), f"s{name[0]}_h": t.stride(1)}
        strides[f"s{name[0]}_n"] = t.stride(0 if packed else 2)
    return strides
