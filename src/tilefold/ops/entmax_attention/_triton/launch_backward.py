"""Launcher of the backward kernels: what they are told, the memory that they write, and which of them run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops.entmax_attention._geometry import Options
from tilefold.ops.entmax_attention._triton.backward import dkv_kernel, dq_kernel, key_lists_kernel, query_lists_kernel
from tilefold.ops.entmax_attention._triton.packing import Tables
from tilefold.ops.entmax_attention._triton.steps import (
    Layout,
    Step,
    are_settled,
    as_bytes,
    as_offsets,
    is_readable,
    layout_of,
    outline,
    read_strides,
    readable,
    room_for,
    room_strides,
)
from tilefold.ops.entmax_attention.configs import AttentionConfig, attention_config, caps, row_tiles

Needs = tuple[bool, bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class BackwardPlan:
    """How gradients of one kind are made, but for their tensors.

    Attributes:
        copies: whether an operand must be copied for the kernels, or a gradient for its layout.
        tables: of a packed batch.
        key_lists: shape of the lists of live blocks of keys for each tile of queries, and the kernel that fills them,
            where there is a map.
        dq: the kernel of dq, dalpha and what dk needs of every row.
        query_lists: as ``key_lists``, of the tiles of queries for each tile of keys.
        dkv: the kernel of dk and dv.
    """

    copies: bool
    tables: Tables | None
    key_lists: tuple[tuple[int, ...], Step] | None
    dq: Step
    query_lists: tuple[tuple[int, ...], Step] | None
    dkv: Step | None


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    out2: Tensor,
    stats: Tensor,
    live: Tensor | None,
    options: Options,
    needs: Needs,
    longest_k: int,
    plans: dict[Any, Any],
) -> Gradients:
    """Gradients of q, k, v (in their dtypes, laid out as ``empty_like`` does) and alpha ``[H]``; ``None`` where not
    needed.

    ``plans`` are those of forward. Saved tensors may have been packed away and come back with other strides.
    """
    need_q, need_k, need_v, need_alpha = needs
    if q.numel() == 0 or k.numel() == 0:
        dq, dk, dv = (torch.zeros_like(t) if n else None for t, n in zip((q, k, v), needs[:3], strict=True))
        return dq, dk, dv, q.new_zeros(q.size(1), dtype=torch.float32) if need_alpha else None
    listed = live is not None and live.numel() > 0
    key = (
        needs, listed, dout.dtype, dout.device, stats.device, dout.stride(), q.stride(), k.stride(), v.stride(),
        out2.stride(),
    )  # fmt: skip
    plan: BackwardPlan | None = plans.get(key)
    if plan is None:
        given = (dout, q, k, v, alpha, key_mask, cu_q, seed, out2, live if listed else None, options)
        plan = plans[key] = _plan(*given, needs, longest_k)
    like = q, k, v
    dq = dk = dv = dalpha = None
    if plan.copies:
        dq, dk, dv = (room_for(t) if n else None for t, n in zip(like, needs[:3], strict=True))
        q, k, v, dout, out2 = (readable(t) for t in (q, k, v, dout, out2))
    else:
        dq = torch.empty_like(q) if need_q else None
        dk = torch.empty_like(k) if need_k else None
        dv = torch.empty_like(v) if need_v else None
    alpha, mask = None if alpha is None else alpha.contiguous(), as_bytes(key_mask)
    cu_q, cu_k = as_offsets(cu_q), as_offsets(cu_k)
    delta = torch.empty_like(stats[0])
    if need_alpha:  # a packed batch may have rows of no sequence, should its offsets be broken
        dalpha = torch.empty_like(delta) if cu_q is None else torch.zeros_like(delta)
    settled = are_settled(dout, q, k, v, alpha, mask, cu_q, cu_k, seed, out2, stats, live)
    q_batch = q_start = k_batch = k_start = None
    if plan.tables is not None:
        q_batch, q_start, k_batch, k_start = plan.tables(settled, cu_q, cu_k)
    tables = (alpha, mask, cu_q, cu_k)
    key_list, key_count = _filled(plan.key_lists, settled, live)
    plan.dq(
        settled, q, k, v, dout, out2, dq, delta, dalpha, stats, key_list, key_count, *tables, q_batch, q_start, seed
    )
    if plan.dkv is not None:
        query_list, query_count = _filled(plan.query_lists, settled, live, cu_q, cu_k, q_start, k_batch, k_start)
        plan.dkv(settled, q, k, v, dout, dk, dv, delta, stats, query_list, query_count, *tables, k_batch, k_start, seed)
    if plan.copies:
        dq, dk, dv = (None if g is None else _laid_out(g, t) for g, t in zip((dq, dk, dv), like, strict=True))
    return dq, dk, dv, None if dalpha is None else dalpha.sum(dim=(0, 2))


def _filled(
    lists: tuple[tuple[int, ...], Step] | None, settled: bool, live: Tensor | None, *tables: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Lists of live blocks or tiles, and their lengths, if there is a map."""
    if lists is None or live is None:
        return None, None
    shape, step = lists
    listed = torch.empty(shape, dtype=torch.int32, device=live.device)
    count = torch.empty(shape[:2], dtype=torch.int32, device=live.device)
    step(settled, live, listed, count, *tables)
    return listed, count


def _laid_out(grad: Tensor, like: Tensor) -> Tensor:
    wanted = torch.empty_like(like)
    return grad if grad.stride() == wanted.stride() else wanted.copy_(grad)


def _plan(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    seed: Tensor | None,
    out2: Tensor,
    live: Tensor | None,
    options: Options,
    needs: Needs,
    longest_k: int,
) -> BackwardPlan:
    """What the kernels are told besides tensors, in the order of their parameters, and their constants."""
    need_q, need_k, need_v, need_alpha = needs
    config = attention_config(q, seed is not None)
    layout = layout_of(q, k, alpha, key_mask, cu_q, seed, options)
    packed, heads = layout.packed, q.size(1)
    q_tiles = row_tiles(q, config.rows, layout.batch, packed)
    k_tiles = row_tiles(k, config.dkv_keys, layout.batch, packed)
    q_per, k_per = (0, 0) if packed else (q_tiles // layout.batch, k_tiles // layout.batch)
    most = q_tiles if packed else q_per
    blocks = 0 if live is None else -(-longest_k // config.keys)
    operands = (*read_strides(q, packed), *read_strides(k, packed), *read_strides(v, packed))
    sizes = (*layout.sizes, q_per)
    shared = {**layout.flags, "BLOCK_M": config.rows, "LISTS": live is not None, "PRECISION": config.precision}
    capped = caps(config, layout.flags["KIND"], seed is not None)
    dq = Step(
        dq_kernel,
        (q_tiles, heads, 1),
        (
            *operands, *read_strides(out2, packed), *read_strides(dout, packed), *room_strides(q, packed),
            *sizes, *layout.scalars, q_tiles, blocks,
        ),
        shared
        | {"BLOCK_N": config.keys, "NEED_Q": need_q, "NEED_ALPHA": need_alpha}
        | {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": capped.registers},
    )  # fmt: skip
    dkv = None
    if need_k or need_v:
        dkv = Step(
            dkv_kernel,
            (k_tiles, k.size(1), 1),
            (
                *operands, *read_strides(dout, packed), *room_strides(k, packed), *room_strides(v, packed),
                *sizes, k_per, *layout.scalars, most,
            ),
            shared
            | {"KEYS": config.dkv_keys, "QUERIES": config.dkv_queries, "NEED_K": need_k, "NEED_V": need_v}
            | {"num_warps": config.dkv_warps, "num_stages": config.dkv_stages, "maxnreg": capped.dkv_registers},
        )  # fmt: skip
    key_lists = query_lists = None
    if live is not None:
        key_lists = (heads, q_tiles, blocks), _key_lists(live, blocks)
        if dkv is not None:
            query_lists = (heads, k_tiles, most), _query_lists(live, config, layout, sizes, k_tiles, k_per, most)
    grads = (t for t, needed in zip((q, k, v), needs[:3], strict=True) if needed)
    copies = not all(is_readable(t) for t in (q, k, v, dout, out2)) or any(outline(t).stride(-1) != 1 for t in grads)
    tables = Tables(layout.batch, q_tiles, config.rows, k_tiles, config.dkv_keys) if packed else None
    return BackwardPlan(copies, tables, key_lists, dq, query_lists, dkv)


def _key_lists(live: Tensor, blocks: int) -> Step:
    """For every tile of queries the live blocks of keys, and their number."""
    heads, tiles, words = live.shape
    return Step(key_lists_kernel, (tiles, heads, 1), (tiles, words, blocks), {"num_warps": 1, "num_stages": 1})


def _query_lists(
    live: Tensor,
    config: AttentionConfig,
    layout: Layout,
    sizes: tuple[int, ...],
    k_tiles: int,
    k_per: int,
    most: int,
) -> Step:
    """For every tile of keys the tiles of queries that one of its blocks is live in, and their number."""
    heads, q_tiles, words = live.shape
    constants = {"BLOCK_M": config.rows, "BLOCK_N": config.keys, "KEYS": config.dkv_keys, "PACKED": layout.packed}
    return Step(
        query_lists_kernel,
        (k_tiles, heads, 1),
        (*sizes, k_per, q_tiles, words, most),
        constants | {"num_warps": 4, "num_stages": 1},
    )
