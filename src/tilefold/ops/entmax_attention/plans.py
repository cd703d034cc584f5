"""Launch plans of alpha-entmax attention and its gradients, from the layouts of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import kernel_formula, tolerance
from tilefold.ops._shared.impl import check_interpreter_dtypes
from tilefold.ops._shared.philox import dropout_threshold
from tilefold.ops._shared.plan import Plan, PlanBuilder, Setting, cdiv, one_byte, power_of_two
from tilefold.ops.entmax_attention._problem import (
    AttentionOptions,
    AttentionSaved,
    AttentionTensors,
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
    WORD_BITS,
    choose_row_strategy,
    config_of_call,
    key_span,
    row_tiles,
)

FEW_WARPS = {"num_warps": 4, "num_stages": 1}
# Launch options of kernels without large tiles, whose registers need no limit.
UNTUNED_LAUNCH = {**FEW_WARPS, "maxnreg": None, "ptx_options": None}
TABLE_BLOCK = 64  # number of tiles of a program, and of sequences that it reads at a time
CHECK_BLOCK = 512  # number of offsets that are read at a time, and of elements that are written
WRITERS = 128  # number of programs that write NaN if offsets are broken

# The persistent kernel of the roots. With few blocks per row it gets up to four times as many
# programs, which balance the cost of tiles better and take more scratch.
BALANCED_BLOCKS = 264
MAX_BALANCE = 4
# Blocks of a row up to which a warp's narrow list serves.
NARROW_BLOCKS = 18


def forward(
    tensors: AttentionTensors,
    options: AttentionOptions,
    training: bool,
    setting: Setting,
) -> Plan:
    """Plan the kernels of the output, and of the results that backward reads.

    If the scores of a row stay on chip, a single kernel computes everything. Otherwise a first
    kernel finds the root of each row, from which its probabilities follow, and a second one
    computes the output.

    Args:
        tensors: shapes, strides and dtypes of the tensors, on the meta device.
        options: checked options.
        training: whether backward may follow.
        setting: facts about the device.
    """
    q = tensors.q
    packed = tensors.packed
    check_interpreter_dtypes(setting, q.dtype)
    strategy = choose_row_strategy(tensors, options, setting.capability)
    config = config_of_call(
        tensors,
        options,
        setting.capability,
        strategy,
        tf32=setting.tf32,
        training=training,
    )
    tile_rows = config["resident_rows"] if strategy == RESIDENT else config["rows"]
    builder = _plan_builder(tensors, options, config, tile_rows)
    _skip_unneeded_results(builder, tensors, options, strategy, training)
    if q.numel() == 0:
        return builder.build()
    operands = _add_copies_of_operands(builder, {"q": q, "k": tensors.k, "v": tensors.v}, tensors)
    if not training:  # the second output is for gradients: kernels get the output in its place
        builder.replace_tensor("out2", by="out")
    n_tiles = row_tiles(q, tile_rows, tensors)
    # NEAR is the share of a row's weights that the last step for its root may neglect: a quarter
    # of an ulp.
    near = 0.0 if q.dtype == torch.float32 else torch.finfo(q.dtype).eps / 4
    builder.set_parameters(**_strides({**operands, "o": result_like(q).on(q.device)}, packed))
    builder.set_parameters(
        tiles_per=0 if packed else n_tiles // tensors.batch,
        GRADIENT=training,
        SUPPORT=options.support,
        TOLERANCE=tolerance(q.dtype),
        NEAR=near,
    )
    _add_tables(builder, tensors, queries=_Tiling(n_tiles, tile_rows))
    if strategy == RESIDENT:
        builder.add_launch(
            resident_kernel,
            grid=(n_tiles, q.size(1)),
            parameters={
                "BLOCK_N": power_of_two(key_span(tile_rows, options)),
                "num_warps": config["resident_warps"],
                "num_stages": 1,
            },
        )
    else:
        _add_roots_and_output(builder, tensors, options, config, strategy, training, setting)
    if packed:
        _add_check_of_offsets(builder, tensors, options, setting)
    return builder.build()


def _skip_unneeded_results(
    builder: PlanBuilder,
    tensors: AttentionTensors,
    options: AttentionOptions,
    strategy: str,
    training: bool,
) -> None:
    """Leave out the results of the forward pass that neither the caller nor backward reads.

    Args:
        builder: the plan so far.
        tensors: shapes, strides and dtypes of the tensors, on the meta device.
        options: checked options.
        strategy: ``RESIDENT`` keeps the scores of a row on chip, ``LISTS`` lists the blocks with a
            positive weight, and ``SHORT`` visits all blocks.
        training: whether backward may follow.
    """
    if not training:
        builder.skip_result("out2")
    if strategy != LISTS:
        builder.skip_result("live")  # the map of blocks with a positive weight
    if not training and not options.support:
        builder.skip_result("stats")
        if strategy != RESIDENT:  # one kernel writes statistics that the next one reads
            builder.add_buffer("rows", (4, *tensors.stats_shape))
            builder.replace_tensor("stats", by="rows")


def _add_check_of_offsets(
    builder: PlanBuilder,
    tensors: AttentionTensors,
    options: AttentionOptions,
    setting: Setting,
) -> None:
    """Add the kernel that fills the output with NaN if the offsets of a packed batch are invalid.

    Valid offsets start at 0, do not decrease, and end at the number of rows, and no sequence has
    more keys than ``max_seqlen_k``. A check on the CPU would wait for the device.

    Args:
        builder: the plan so far.
        tensors: shapes, strides and dtypes of the tensors, on the meta device.
        options: checked options.
        setting: facts about the device.
    """
    # Triton's interpreter runs the programs of a grid one after another: one is enough there.
    n_programs = 1 if setting.is_interpreted else WRITERS
    builder.add_launch(
        nan_if_broken_kernel,
        grid=(n_programs,),
        parameters={
            "q_rows": tensors.q.size(0),
            "k_rows": tensors.k.size(0),
            "longest": options.max_seqlen_k,
            "size": tensors.q.numel(),
            "BLOCK": CHECK_BLOCK,
            **UNTUNED_LAUNCH,
        },
    )


def _add_roots_and_output(
    builder: PlanBuilder,
    tensors: AttentionTensors,
    options: AttentionOptions,
    config: Mapping[str, Any],
    strategy: str,
    training: bool,
    setting: Setting,
) -> None:
    """Add two kernels: the first finds the roots of rows, the second computes the output.

    The root of a row solves the equation that makes its probabilities sum to 1.

    Args:
        builder: the plan so far.
        tensors: tensors of the call.
        options: checked options.
        config: the configuration of the kernels.
        strategy: ``SHORT`` visits all blocks of keys. ``LISTS`` adds buffers for lists of live
            blocks, which have a positive weight, and visits only these.
        training: whether backward may follow.
        setting: facts about the device.
    """
    n_heads = tensors.q.size(1)
    tile_rows = config["rows"]
    n_tiles = row_tiles(tensors.q, tile_rows, tensors)
    # Blocks of keys that a tile can attend to. The first and the last one may be incomplete.
    n_blocks = key_span(tile_rows, options) // config["keys"] + 2
    n_programs = n_tiles * n_heads
    n_words = 0
    if strategy == LISTS:
        # The kernel is persistent: with few blocks per row, more programs balance their costs.
        balance = max(1, min(MAX_BALANCE, BALANCED_BLOCKS // n_blocks))
        n_programs = min(n_programs, config["programs"] * balance * setting.multiprocessors)
        n_words = cdiv(options.max_seqlen_k, WORD_BITS * config["keys"])
        builder.add_buffer("maxima", (n_programs, n_blocks, tile_rows))
        builder.add_buffer("key_list", (n_heads, n_tiles, n_blocks), torch.int32)
        builder.add_buffer("key_count", (n_heads, n_tiles), torch.int32)
    builder.set_parameters(
        LISTS=strategy == LISTS,
        BLOCK_N=config["keys"],
        tiles=n_tiles,
        blocks=n_blocks,
        words=n_words,
        num_stages=config["forward_stages"],
        num_warps=config["num_warps"],
        maxnreg=config["registers"],
    )
    builder.add_launch(
        roots_kernel,
        grid=(n_programs,),
        parameters={"WIDTH": 16 if n_blocks <= NARROW_BLOCKS else 32},
    )
    output_registers = config["wide_registers"] if training else config["registers"]
    builder.add_launch(
        output_kernel, grid=(n_tiles, n_heads), parameters={"maxnreg": output_registers}
    )


def backward(
    dout: Tensor,
    saved: AttentionSaved,
    options: AttentionOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Plan the kernels of the gradients of q, k, v and alpha.

    A first kernel computes dq, the addends of dalpha, and one number per row that dk needs, delta.
    A second kernel computes dk and dv. If the forward pass left a map of live blocks, which have a
    positive weight, both kernels skip the other blocks.

    Args:
        dout: layout of the gradient of the output.
        saved: what the forward pass saved, on the meta device.
        options: checked options.
        needs: whether the gradients of q, k, v and alpha are needed.
        setting: facts about the device.
    """
    tensors = saved.tensors
    q = tensors.q
    k = tensors.k
    packed = tensors.packed
    if q.numel() == 0 or k.numel() == 0:
        return Plan(fills={"dq": 0, "dk": 0, "dv": 0, "dalpha": 0})
    live = saved.live
    if live is not None and live.numel() == 0:  # a registered operator cannot return None
        live = None
    need_q, need_k, need_v, need_alpha = needs
    config = config_of_call(
        tensors,
        options,
        setting.capability,
        SHORT if live is None else LISTS,
        tf32=setting.tf32,
    )
    builder = _plan_builder(tensors, options, config, config["rows"])
    builder.add_buffer("delta", tensors.stats_shape)
    if need_alpha:
        builder.add_buffer("terms", tensors.stats_shape)
    operands = _add_copies_of_operands(
        builder,
        {"q": q, "k": k, "v": tensors.v, "dout": dout, "out2": saved.out2},
        tensors,
    )
    query_tiles = _Tiling(row_tiles(q, config["rows"], tensors), config["rows"])
    key_tiles = _Tiling(row_tiles(k, config["dkv_keys"], tensors), config["dkv_keys"])
    builder.set_parameters(
        tiles_per=0 if packed else query_tiles.n_tiles // tensors.batch,
        key_tiles_per=0 if packed else key_tiles.n_tiles // tensors.batch,
        tiles=query_tiles.n_tiles,
        spans=_max_key_tiles(tensors, options, key_tiles),
        blocks=0 if live is None else cdiv(options.max_seqlen_k, config["keys"]),
        LISTS=live is not None,
        words=0 if live is None else live.size(2),
        BLOCK_N=config["keys"],
        KEYS=config["dkv_keys"],
        QUERIES=config["dkv_queries"],
        NEED_Q=need_q,
        NEED_K=need_k,
        NEED_V=need_v,
        NEED_ALPHA=need_alpha,
    )
    if need_alpha and packed:  # with invalid offsets, some rows may belong to no sequence
        builder.add_torch_step(Tensor.zero_, ["terms"], output="terms")
    _add_tables(builder, tensors, query_tiles, key_tiles)
    if live is not None:
        _add_key_lists(builder, tensors, query_tiles.n_tiles)
    _add_query_gradient(
        builder,
        config,
        tensors,
        operands,
        query_tiles.n_tiles,
        with_alpha=need_alpha,
    )
    if need_k or need_v:
        if live is not None:
            _add_query_lists(builder, tensors, query_tiles.n_tiles, key_tiles.n_tiles)
        _add_key_gradients(builder, config, tensors, operands, key_tiles.n_tiles)
    if need_alpha:
        dtype = torch.float32 if tensors.alpha is None else tensors.alpha.dtype
        builder.add_torch_step(
            lambda terms: terms.sum(dim=(0, 2)).to(dtype),
            ["terms"],
            output="dalpha",
        )
    return builder.build()


def _add_key_lists(builder: PlanBuilder, tensors: AttentionTensors, n_query_tiles: int) -> None:
    """Add the kernel that lists the live blocks of keys for every tile of queries.

    A block is live if some weight in it is positive. The lists are read from the map of live blocks
    that the forward pass wrote.

    Args:
        builder: the plan so far.
        tensors: tensors of the call.
        n_query_tiles: number of tiles of queries.
    """
    n_heads = tensors.q.size(1)
    n_key_blocks = builder.parameters["blocks"]
    builder.add_buffer("key_list", (n_heads, n_query_tiles, n_key_blocks), torch.int32)
    builder.add_buffer("key_count", (n_heads, n_query_tiles), torch.int32)
    builder.add_launch(
        key_lists_kernel,
        grid=(n_query_tiles, n_heads),
        parameters={"num_warps": 1, "num_stages": 1},
    )


def _add_query_gradient(
    builder: PlanBuilder,
    config: Mapping[str, Any],
    tensors: AttentionTensors,
    operands: Mapping[str, Tensor],
    n_query_tiles: int,
    *,
    with_alpha: bool,
) -> None:
    """Add the kernel that computes dq, the addends of dalpha, and delta, which the dk kernel reads.

    Args:
        builder: the plan so far.
        config: the configuration of the kernels.
        tensors: tensors of the call.
        operands: layouts of the tensors that the kernel reads, by name.
        n_query_tiles: number of tiles of queries.
        with_alpha: whether the gradient of alpha is needed.
    """
    q = tensors.q
    dq = result_like(q).on(q.device)
    builder.add_launch(
        dq_kernel,
        grid=(n_query_tiles, q.size(1)),
        parameters={
            "num_warps": config["num_warps"],
            "num_stages": config["num_stages"],
            "maxnreg": config["wide_registers"] if with_alpha else config["registers"],
            # kernels call the strides of dq "g", like gradient
            **_strides({**operands, "g": dq}, tensors.packed),
        },
    )


def _add_query_lists(
    builder: PlanBuilder,
    tensors: AttentionTensors,
    n_query_tiles: int,
    n_key_tiles: int,
) -> None:
    """Add the kernel that lists the tiles of queries with a live block for every tile of keys.

    A block is live if some weight in it is positive.

    Args:
        builder: the plan so far.
        tensors: tensors of the call.
        n_query_tiles: number of tiles of queries.
        n_key_tiles: number of tiles of keys.
    """
    n_heads = tensors.q.size(1)
    max_key_tiles = builder.parameters["spans"]  # of a sequence
    builder.add_buffer("query_list", (n_heads, n_query_tiles, max_key_tiles), torch.int32)
    builder.add_buffer("query_count", (n_heads, n_key_tiles), torch.int32)
    builder.add_launch(query_lists_kernel, grid=(n_key_tiles, n_heads), parameters=FEW_WARPS)


def _add_key_gradients(
    builder: PlanBuilder,
    config: Mapping[str, Any],
    tensors: AttentionTensors,
    operands: Mapping[str, Tensor],
    n_key_tiles: int,
) -> None:
    """Add the kernel that computes dk and dv.

    Args:
        builder: the plan so far.
        config: the configuration of the kernels.
        tensors: tensors of the call.
        operands: layouts of the tensors that the kernel reads, by name.
        n_key_tiles: number of tiles of keys.
    """
    k = tensors.k
    dk = result_like(k).on(k.device)
    dv = result_like(tensors.v).on(k.device)
    builder.add_launch(
        dkv_kernel,
        grid=(n_key_tiles, k.size(1)),
        parameters={
            "num_warps": config["dkv_warps"],
            "num_stages": config["dkv_stages"],
            "maxnreg": config["dkv_registers"],
            # kernels call the strides of dk and dv "g" and "w"
            **_strides({**operands, "g": dk, "w": dv}, tensors.packed),
        },
    )


def _max_key_tiles(
    tensors: AttentionTensors,
    options: AttentionOptions,
    key_tiles: _Tiling,
) -> int:
    """Return the largest number of tiles of keys of one sequence.

    Args:
        tensors: shapes, strides and dtypes of the tensors, on the meta device.
        options: checked options.
        key_tiles: the tiles of keys of the batch.
    """
    if tensors.packed:
        return cdiv(options.max_seqlen_k, key_tiles.rows)
    return key_tiles.n_tiles // tensors.batch


def _plan_builder(
    tensors: AttentionTensors,
    options: AttentionOptions,
    config: Mapping[str, Any],
    tile_rows: int,
) -> PlanBuilder:
    """Return a plan builder with the parameters that the kernels of a call share.

    Args:
        tensors: shapes, strides and dtypes of the tensors, on the meta device.
        options: checked options.
        config: the configuration of the kernels.
        tile_rows: number of queries of a tile.
    """
    q = tensors.q
    k = tensors.k
    packed = tensors.packed
    n_heads = q.size(1)
    dim = q.size(-1)
    scale = options.scale
    # Multiplying by a positive power of two never rounds, and keeps the order of scores. Kernels
    # then multiply late, and still compute the same numbers.
    scale_is_power_of_two = scale > 0 and math.frexp(scale)[0] == 0.5
    numbers = {
        "Nq": 0 if packed else q.size(2),
        "Nk": 0 if packed else k.size(2),
        "Tq": q.size(0) if packed else 0,
        "Tk": k.size(0) if packed else 0,
        "B": tensors.batch,
        "window": options.window,
        "scale": scale,
        "alpha_value": options.alpha_value,
        # A random number below the threshold drops a weight.
        "threshold": dropout_threshold(options.dropout_p),
        "keep_scale": 1 / (1 - options.dropout_p),
        "stat_size": math.prod(tensors.stats_shape),  # of one statistic of all rows
    }
    constants = {
        "H": n_heads,
        "GROUP": n_heads // k.size(1),
        "D": dim,
        "BLOCK_D": power_of_two(dim),
        "BLOCK_M": tile_rows,
        "KIND": kernel_formula(q.dtype, tensors.alpha, options.alpha_value),  # formula of alpha
        "HAS_ALPHA": tensors.alpha is not None,
        "CAUSAL": options.causal,
        "WINDOW": options.has_window,
        "HAS_MASK": tensors.key_padding_mask is not None,
        "PACKED": packed,
        "DROPOUT": tensors.seed is not None,
        "EXACT": scale_is_power_of_two,
        "PRECISION": config["precision"],
        "ptx_options": config["ptx_options"],
    }
    return PlanBuilder({**numbers, **constants})


class _Tiling(NamedTuple):
    """Division of the queries, or of the keys, of all sequences into tiles.

    Attributes:
        n_tiles: number of tiles; an upper bound for a packed batch.
        rows: number of rows of a tile.
    """

    n_tiles: int
    rows: int


_NO_TILES = _Tiling(n_tiles=0, rows=0)


def _add_tables(
    builder: PlanBuilder,
    tensors: AttentionTensors,
    queries: _Tiling,
    keys: _Tiling = _NO_TILES,
) -> None:
    """Add the tables of a packed batch: each tile's sequence, and each sequence's first tile.

    Tiles past the end get the sequence number ``batch``. A padded batch needs no tables.

    Args:
        builder: the plan so far.
        tensors: tensors of the call.
        queries: tiles of queries.
        keys: tiles of keys, if kernels compute them.
    """
    if not tensors.packed:
        return
    builder.add_buffer("q_batch", (queries.n_tiles,), torch.int32)
    builder.add_buffer("q_start", (tensors.batch + 1,), torch.int32)
    has_keys = keys.rows > 0
    if has_keys:
        builder.add_buffer("k_batch", (keys.n_tiles,), torch.int32)
        builder.add_buffer("k_start", (tensors.batch + 1,), torch.int32)
    n_programs = max(cdiv(max(queries.n_tiles, keys.n_tiles), TABLE_BLOCK), 1)
    builder.add_launch(
        tables_kernel,
        grid=(n_programs, 2 if has_keys else 1),
        parameters={
            "q_tiles": queries.n_tiles,
            "k_tiles": keys.n_tiles,
            "ROWS": queries.rows,
            "KEYS": keys.rows,
            "BLOCK": TABLE_BLOCK,
            **UNTUNED_LAUNCH,
        },
    )


def _add_copies_of_operands(
    builder: PlanBuilder,
    operands: Mapping[str, Tensor | None],
    tensors: AttentionTensors,
) -> dict[str, Tensor]:
    """Add copies of the tensors that kernels cannot read, and return the layouts of the operands.

    The last dimension of an operand must have stride 1; its other strides are free. Alphas, offsets
    and the mask must be contiguous.

    Args:
        builder: the plan so far, to which the copies are added.
        operands: q-like and k-like tensors by name, or ``None``.
        tensors: tensors of the call, with alphas, offsets and mask.

    Returns:
        The layouts that kernels read, by name, without those that are ``None``.
    """
    layouts = {name: dense(tensor) for name, tensor in operands.items() if tensor is not None}
    copied = {
        name: operands[name] for name, layout in layouts.items() if layout is not operands[name]
    }
    builder.make_contiguous(
        {
            **copied,
            "alpha": tensors.alpha,
            "cu_seqlens_q": tensors.cu_seqlens_q,
            "cu_seqlens_k": tensors.cu_seqlens_k,
        },
    )
    mask = tensors.key_padding_mask
    if mask is not None and not (mask.is_contiguous() and mask.dtype.itemsize == 1):
        builder.add_torch_step(one_byte, ["key_padding_mask"], output="key_padding_mask")
    return layouts


def _strides(tensors: Mapping[str, Tensor], packed: bool) -> dict[str, int]:
    """Return the strides of tensors as parameters of kernels.

    Args:
        tensors: layouts by name. The first letter of the name is part of the parameters' names: the
            strides of ``dout`` are ``sd_b`` (sequence), ``sd_h`` (head) and ``sd_n`` (token).
        packed: whether the tensors are packed ``[T, H, D]``, or else padded ``[B, H, N, D]``.
    """
    strides: dict[str, int] = {}
    for name, tensor in tensors.items():
        letter = name[0]
        strides[f"s{letter}_b"] = 0 if packed else tensor.stride(0)
        strides[f"s{letter}_h"] = tensor.stride(1)
        strides[f"s{letter}_n"] = tensor.stride(0 if packed else 2)
    return strides
