"""Launcher of the backward kernels: what they are told, the memory that they write, and which of them run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step, aligned
from tilefold.ops._shared._triton.tensors import Scratch, cdiv
from tilefold.ops.entmax_attention._problem import AttentionTensors, Options
from tilefold.ops.entmax_attention._triton.backward import dkv_kernel, dq_kernel, key_lists_kernel, query_lists_kernel
from tilefold.ops.entmax_attention._triton.layout import (
    empty_like_writable,
    is_readable,
    layout_of,
    outline,
    packed_densely,
    read_strides,
    readable,
    write_strides,
)
from tilefold.ops.entmax_attention._triton.packing import Tables
from tilefold.ops.entmax_attention.configs import AttentionConfig, attention_config, caps, row_tiles

Needs = tuple[bool, bool, bool, bool]
Saved = tuple[Tensor, Tensor, Tensor | None]  # what delta is made from, statistics, map of live blocks
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Lists = tuple[Scratch, Scratch, Step]  # their memory, that of their lengths, and what fills them


@dataclass(frozen=True)
class BackwardPlan:
    """How gradients are launched, but for the tensors.

    Attributes:
        needs: which of q, k, v and alpha want a gradient.
        rows: memory of one number per row.
        copies: whether an operand must be copied for the kernels, or a gradient for its layout.
        tables: of a packed batch.
        key_lists: memory of the lists of live blocks of keys for each tile of queries and of their lengths, and the
            kernel that fills them, where there is a map.
        dq: the kernel of dq, dalpha and what dk needs of every row; ``None`` where there is no query or no key.
        query_lists: as ``key_lists``, of the tiles of queries for each tile of keys.
        dkv: the kernel of dk and dv.
    """

    needs: Needs
    rows: Scratch
    copies: bool = False
    tables: Tables | None = None
    key_lists: Lists | None = None
    dq: Step | None = None
    query_lists: Lists | None = None
    dkv: Step | None = None


def backward(plan: BackwardPlan, dout: Tensor, tensors: AttentionTensors, saved: Saved) -> Gradients:
    """Gradients of q, k, v (in their dtypes, laid out as ``empty_like`` does) and alpha ``[H]``; ``None`` where not
    needed. The tensors are like those that the plan was made for.
    """
    q, k, v, alpha, mask, cu_q, cu_k, seed = tensors
    out2, stats, live = saved
    need_q, need_k, need_v, need_alpha = plan.needs
    if plan.dq is None:
        dq, dk, dv = (torch.zeros_like(t) if n else None for t, n in zip((q, k, v), plan.needs[:3], strict=True))
        return dq, dk, dv, q.new_zeros(q.size(1), dtype=torch.float32) if need_alpha else None
    like = empty_like_writable if plan.copies else torch.empty_like
    dq = like(q) if need_q else None
    dk = like(k) if need_k else None
    dv = like(v) if need_v else None
    if plan.copies:
        q, k, v, dout, out2 = (readable(t) for t in (q, k, v, dout, out2))
    if alpha is not None or mask is not None or cu_q is not None:
        alpha, mask, cu_q, cu_k = packed_densely(alpha, mask, cu_q, cu_k)
    delta = plan.rows()
    dalpha = None
    if need_alpha:  # a packed batch may have rows of no sequence, should its offsets be broken
        dalpha = torch.empty_like(delta) if cu_q is None else torch.zeros_like(delta)
    same = aligned(dout, q, k, v, alpha, mask, cu_q, cu_k, seed, out2, stats, live)
    q_batch = q_start = k_batch = k_start = None
    if plan.tables is not None:
        q_batch, q_start, k_batch, k_start = plan.tables(same, cu_q, cu_k)
    tables = (alpha, mask, cu_q, cu_k)
    key_list = key_count = query_list = query_count = None
    if plan.key_lists is not None:
        key_list, key_count = _filled(plan.key_lists, same, live)
    plan.dq(same, q, k, v, dout, out2, dq, delta, dalpha, stats, key_list, key_count, *tables, q_batch, q_start, seed)
    if plan.dkv is not None:
        if plan.query_lists is not None:
            query_list, query_count = _filled(plan.query_lists, same, live, cu_q, cu_k, q_start, k_batch, k_start)
        plan.dkv(same, q, k, v, dout, dk, dv, delta, stats, query_list, query_count, *tables, k_batch, k_start, seed)
    if plan.copies:
        laid_out = zip((dq, dk, dv), tensors[:3], strict=True)
        dq, dk, dv = (None if grad is None else _laid_out(grad, tensor) for grad, tensor in laid_out)
    return dq, dk, dv, None if dalpha is None else dalpha.sum(dim=(0, 2))


def _filled(lists: Lists, same: bool, live: Tensor | None, *tables: Tensor | None) -> tuple[Tensor, Tensor]:
    """Lists of live blocks or tiles, and their lengths."""
    memory, lengths, step = lists
    listed, count = memory(), lengths()
    step(same, live, listed, count, *tables)
    return listed, count


def _laid_out(grad: Tensor, like: Tensor) -> Tensor:
    wanted = torch.empty_like(like)
    return grad if grad.stride() == wanted.stride() else wanted.copy_(grad)


def plan_backward(
    dout: Tensor, tensors: AttentionTensors, saved: Saved, options: Options, needs: Needs
) -> BackwardPlan:
    """How gradients for tensors like these are launched."""
    (q, k, v), (out2, _, live), (need_q, need_k, need_v, need_alpha) = tensors[:3], saved, needs
    rows = Scratch(tensors.stats_shape, torch.float32, q.device)
    if q.numel() == 0 or k.numel() == 0:
        return BackwardPlan(needs, rows)
    if live is not None and live.numel() == 0:  # of a registered operator, which returns tensors only
        live = None
    config = attention_config(q, tensors.seed is not None)
    layout = layout_of(tensors, options)
    packed, heads = tensors.packed, q.size(1)
    q_tiles, k_tiles = row_tiles(q, config.rows, tensors), row_tiles(k, config.dkv_keys, tensors)
    q_per, k_per = (0, 0) if packed else (q_tiles // layout.batch, k_tiles // layout.batch)
    list_length = q_tiles if packed else q_per
    blocks = 0 if live is None else cdiv(options.max_seqlen_k, config.keys)
    operands = (*read_strides(q, packed), *read_strides(k, packed), *read_strides(v, packed))
    sizes = (*layout.sizes, q_per)
    shared = {**layout.flags, "BLOCK_M": config.rows, "LISTS": live is not None, "PRECISION": config.precision}
    capped = caps(config, layout.flags["KIND"], tensors.seed is not None)
    dq = Step(
        dq_kernel,
        (q_tiles, heads, 1),
        (
            *operands, *read_strides(out2, packed), *read_strides(dout, packed), *write_strides(q, packed),
            *sizes, *layout.scalars, q_tiles, blocks,
        ),
        shared
        | {"BLOCK_N": config.keys, "NEED_Q": need_q, "NEED_ALPHA": need_alpha}
        | {"num_warps": config.num_warps, "num_stages": config.num_stages}
        | {"maxnreg": capped.wide_registers if need_alpha else capped.registers},
    )  # fmt: skip
    dkv = None
    if need_k or need_v:
        dkv = Step(
            dkv_kernel,
            (k_tiles, k.size(1), 1),
            (
                *operands, *read_strides(dout, packed), *write_strides(k, packed), *write_strides(v, packed),
                *sizes, k_per, *layout.scalars, list_length,
            ),
            shared
            | {"KEYS": config.dkv_keys, "QUERIES": config.dkv_queries, "NEED_K": need_k, "NEED_V": need_v}
            | {"num_warps": config.dkv_warps, "num_stages": config.dkv_stages, "maxnreg": capped.dkv_registers},
        )  # fmt: skip
    key_lists = query_lists = None
    if live is not None:
        key_lists = _lists((heads, q_tiles, blocks), _key_lists(live, blocks), q.device)
        if dkv is not None:
            shape = (heads, k_tiles, list_length)
            query_lists = _lists(shape, _query_lists(live, config, packed, (*sizes, k_per), shape), q.device)
    grads = (t for t, needed in zip((q, k, v), needs[:3], strict=True) if needed)
    copies = not all(is_readable(t) for t in (q, k, v, dout, out2)) or any(outline(t).stride(-1) != 1 for t in grads)
    tables = Tables(layout.batch, q_tiles, config.rows, k_tiles, config.dkv_keys) if packed else None
    return BackwardPlan(needs, rows, copies, tables, key_lists, dq, query_lists, dkv)


def _lists(shape: tuple[int, int, int], step: Step, device: torch.device) -> Lists:
    return Scratch(shape, torch.int32, device), Scratch(shape[:2], torch.int32, device), step


def _key_lists(live: Tensor, blocks: int) -> Step:
    """For every tile of queries the live blocks of keys, and their number."""
    heads, tiles, words = live.shape
    return Step(key_lists_kernel, (tiles, heads, 1), (tiles, words, blocks), {"num_warps": 1, "num_stages": 1})


def _query_lists(
    live: Tensor, config: AttentionConfig, packed: bool, sizes: tuple[int, ...], shape: tuple[int, int, int]
) -> Step:
    """For every tile of keys the tiles of queries that one of its blocks is live in, and their number."""
    heads, q_tiles, words = live.shape
    constants = {"BLOCK_M": config.rows, "BLOCK_N": config.keys, "KEYS": config.dkv_keys, "PACKED": packed}
    return Step(
        query_lists_kernel,
        (shape[1], heads, 1),
        (*sizes, q_tiles, words, shape[2]),
        constants | {"num_warps": 4, "num_stages": 1},
    )
