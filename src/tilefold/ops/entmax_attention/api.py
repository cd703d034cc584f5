"""Alpha-entmax attention, public functions: dispatch, statistics."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from tilefold.ops._shared import impl as implementations
from tilefold.ops._shared.checks import check_same_device, check_shape, check_tensor
from tilefold.ops._shared.impl import capability_of, triton_interpreted
from tilefold.ops._shared.operator import Operator
from tilefold.ops._shared.plan import Buffer
from tilefold.ops.entmax_attention import _reference, _tiled
from tilefold.ops.entmax_attention._arguments import checked, ready
from tilefold.ops.entmax_attention._problem import (
    AttentionSaved,
    AttentionTensors,
    Options,
    check_values,
    result_like,
)
from tilefold.ops.entmax_attention._stats import (
    SPARSITY_BLOCK,
    EntmaxStats,
    count_blocks,
    described,
    of_rows,
)
from tilefold.ops.entmax_attention.configs import LISTS, config_of, row_tiles, way_of


def live_shape(
    tensors: AttentionTensors,
    options: Options,
    capability: tuple[int, int],
) -> tuple[int, int, int]:
    """``[H, row tiles, words]`` of the map of live blocks, one bit per block; empty where nothing
    reads it.
    """
    if way_of(tensors, options, capability) != LISTS:
        return 0, 0, 0
    q, config = tensors.q, config_of(tensors, options, capability)
    blocks = -(-options.max_seqlen_k // config["keys"])
    return q.size(1), row_tiles(q, config["rows"], tensors), -(-blocks // 32)


def outputs(
    tensors: AttentionTensors,
    options: Options,
    training: bool,
) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    """Output, what delta is made from, statistics ``[4, B, H, Nq]`` and the map of live blocks.

    Their shapes are those of the kernels where kernels may run: a graph is compiled for these,
    before or after the tiled path takes over, which makes neither the second nor the last.
    """
    q = tensors.q
    rows = (4, *tensors.stats_shape) if training or options.support else (0,)
    stats = Buffer(rows, torch.promote_types(q.dtype, torch.float32))
    nothing = Buffer((0,), q.dtype)
    if not triton_interpreted() and implementations.chosen_impl("", "q", q) != "triton":
        return result_like(q), nothing, stats, Buffer((0,), torch.int32)
    live = live_shape(tensors, options, capability_of(q.device))
    return result_like(q), result_like(q) if training else nothing, stats, Buffer(live, torch.int32)


def _like(name: str, saved: AttentionSaved, options: Options) -> Buffer:
    return result_like(getattr(saved, name))


ATTENTION = Operator(
    "entmax_attention",
    AttentionTensors,
    Options,
    AttentionSaved,
    results=("out", "out2", "stats", "live"),
    outputs=outputs,
    gradients={name: partial(_like, name) for name in "qkv"} | {"alpha": "alpha"},
    plans=partial(importlib.import_module, "tilefold.ops.entmax_attention.plans"),  # needs Triton
    tiled=_tiled,
    reference=_reference.attention,
    check_values=check_values,
)


def chosen_impl(q: Tensor, impl: str = "auto") -> str:
    """Implementation of ``entmax_attention(q, ..., impl=impl)``; see
    :func:`tilefold.ops.lsr_head.chosen_impl`.
    """
    return ATTENTION.chosen_impl(q, impl)


def entmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    alpha: float | Tensor = 1.5,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    impl: str = "auto",
    return_stats: bool | Literal["blocks"] = False,
) -> Tensor | tuple[Tensor, EntmaxStats]:
    """Attention whose weights are alpha-entmax of the scores, exact zeros included (AdaSplash,
    arXiv 2502.12082).

    ``out_i = sum_j p_ij v_j`` with ``p_i = entmax_alpha(scale * q_i . k_j)`` over the keys j that
    query i may see. The scores are never written to memory. The root of every row is found to a
    residual of 1e-6 of its mass (on a GPU 1e-5 for 16-bit input), for any scores, and the output is
    divided by the mass that is left; where only live blocks are visited, what is skipped is proved
    to be zero. Scores are scaled in fp32 (q is never rounded a second time), and backward makes
    them from the same operands. Backward is bitwise deterministic; one derivative, except for
    ``impl="reference"``.

    Query i has position ``i + Nk - Nq`` among the keys: causal attention and windows are aligned to
    the end, as decoding with a cache needs. A row with nothing to attend to is 0 and passes no
    gradient. NaN in a query, or in a key that a row may see, makes the row NaN; what a key masked
    by ``key_padding_mask`` holds is never read. Values hidden by causality or a window must be
    finite: their weight is 0, and 0 times NaN is NaN.

    Args:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]`` with ``cu_seqlens_q``; any strides; fp16,
            bf16, fp32 or fp64.
        k, v: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]`` with ``cu_seqlens_k``; ``H`` is a
            multiple of ``Hkv``.
        alpha: a number in [1, 2] (1 softmax, 2 sparsemax), or a tensor of one or ``[H]``,
            differentiable. On a GPU a tensor's value outside [1, 2] makes its head NaN instead of
            raising.
        causal: a query attends to no key after its own position.
        window: a query attends to keys at most this far from its position; 2^30 and more is no
            window.
        cu_seqlens_q: ``[B + 1]`` int32 or int64 offsets of packed queries. Offsets that do not
            describe the rows raise on the CPU, and make every output NaN in the kernels, where
            checking would cost a synchronisation.
        cu_seqlens_k: the same of packed keys; both or neither.
        max_seqlen_k: a bound of the length of packed key sequences, which spares work; a longer one
            is as broken offsets are. By default all of k.
        key_padding_mask: ``[B, Nk]``, nonzero = keep, in any pattern; not for packed input.
        scale: multiplies the products; by default ``D ** -0.5``.
        dropout_p: probability in [0, 1) that a weight is dropped; the others grow by ``1 / (1 -
            dropout_p)``.
        generator: of the seed that dropout draws, on the device of ``q``; by default torch's own.
            The same seed drops the same weights in every implementation.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see
            :func:`tilefold.ops.entmax_attention.chosen_impl`.
        return_stats: also return :class:`EntmaxStats`; ``"blocks"`` also counts live blocks, which
            computes the scores once more, in fp32. Nothing synchronises with the device.

    Returns:
        A tensor shaped like ``q``; with ``return_stats`` also the statistics.

    Raises:
        TypeError: for arguments that are not tensors, or of a dtype that is not supported.
        ValueError: for shapes, devices, masks, offsets or options that do not fit together.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    learned, number = (alpha, 0.0) if isinstance(alpha, Tensor) else (None, alpha)
    seed = None if type(dropout_p) is float and dropout_p == 0 else _seed(q, dropout_p, generator)
    tensors = AttentionTensors(q, k, v, learned, key_padding_mask, cu_seqlens_q, cu_seqlens_k, seed)
    asked = (number, causal, window, scale, dropout_p, max_seqlen_k, return_stats)
    found = ATTENTION(tensors, asked, impl, checked)
    out: Tensor = found[0]
    if not return_stats:
        return out
    options, as_computed = checked(tensors, *asked)
    if as_computed is not None:
        tensors = as_computed(tensors)
    if (stats := found[2]) is None:
        with torch.no_grad():
            _, tau, support = _reference.with_rows(tensors, options)
        rows = tau, support, torch.zeros_like(tau)
    else:
        rows = of_rows(stats, tensors.alpha, options)
    return out, described(rows, tensors, options, return_stats)


def _seed(q: object, dropout_p: object, generator: torch.Generator | None) -> Tensor | None:
    """``None`` without dropout, and for what the checks refuse."""
    if isinstance(dropout_p, (int, float)) and 0 < dropout_p < 1 and isinstance(q, Tensor):
        return torch.randint(1 << 62, (1,), dtype=torch.int64, device=q.device, generator=generator)
    return None


def live_blocks(
    q: Tensor,
    k: Tensor,
    tau: Tensor,
    *,
    alpha: float | Tensor = 1.5,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    scale: float | None = None,
    block: int = SPARSITY_BLOCK,
) -> tuple[Tensor, Tensor]:
    """Count the blocks of an :func:`entmax_attention` that hold a positive weight (AdaSplash, arXiv
    2502.12082).

    A block is ``block`` queries by ``block`` keys of one sequence and head. It is live if a weight
    in it is positive, ``(alpha - 1) s > tau`` (for alpha = 1, if ``exp(s - tau)`` is), up to the
    rounding of scores that are computed once more in fp32; it is visible if any of its pairs may
    attend. Nothing synchronises with the device.

    Args:
        tau: ``[B, H, Nq]`` (packed ``[1, H, Tq]``), from :class:`EntmaxStats`.
        query_padding_mask: ``[B, Nq]`` (packed ``[Tq]``), nonzero = count this row.
        block: side of a block.

    The other arguments are those of :func:`entmax_attention`.

    Returns:
        int32 ``[B, H]`` (packed ``[1, H]``): live blocks, and visible ones.

    Raises:
        TypeError, ValueError: for arguments that do not fit together.
    """
    learned, number = (alpha, 0.0) if isinstance(alpha, Tensor) else (None, alpha)
    tensors = AttentionTensors(q, k, k, learned, key_padding_mask, cu_seqlens_q, cu_seqlens_k, None)
    options, _ = checked(tensors, number, causal, window, scale, 0.0, None, False)
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be an integer of at least 1, got {block!r}.")
    check_tensor("tau", tau)
    shape = tensors.stats_shape
    check_shape("tau", tau, "B H Nq", B=shape[0], H=shape[1], Nq=shape[2])
    if query_padding_mask is not None:
        check_tensor("query_padding_mask", query_padding_mask)
        sizes = {"Tq": q.size(0)} if tensors.packed else {"B": q.size(0), "Nq": q.size(2)}
        check_shape("query_padding_mask", query_padding_mask, " ".join(sizes), **sizes)
    check_same_device("q", q, {"tau": tau, "query_padding_mask": query_padding_mask})
    return count_blocks(ready(None, tensors), options, tau, query_padding_mask, block)
