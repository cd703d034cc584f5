"""Alpha-entmax attention, public functions: dispatch and statistics."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared import impl as implementations
from tilefold.ops._shared.checks import check_same_device, check_shape, check_tensor
from tilefold.ops._shared.impl import capability_of, triton_interpreted
from tilefold.ops._shared.operator import Operator
from tilefold.ops._shared.plan import Buffer, cdiv
from tilefold.ops.entmax_attention import _reference, _tiled
from tilefold.ops.entmax_attention._arguments import check_arguments, prepare_tensors
from tilefold.ops.entmax_attention._problem import (
    ALPHA_IS_TENSOR,
    AttentionOptions,
    AttentionSaved,
    AttentionTensors,
    check_values,
    result_like,
)
from tilefold.ops.entmax_attention._stats import (
    SPARSITY_BLOCK,
    EntmaxStats,
    RowStats,
    complete_stats,
    convert_row_stats,
    count_blocks,
)
from tilefold.ops.entmax_attention.configs import (
    LISTS,
    WORD_BITS,
    choose_row_strategy,
    config_of_call,
    row_tiles,
)


def live_shape(
    tensors: AttentionTensors,
    options: AttentionOptions,
    capability: tuple[int, int],
) -> tuple[int, int, int]:
    """Return the shape of the map of live blocks.

    The map has one bit per head, tile of queries and block of keys: whether any weight in it is
    positive. Only the strategy ``LISTS``, for many keys, uses the map to skip the other blocks. For
    other strategies it has no elements.

    Args:
        tensors: tensors of the call.
        options: checked options.
        capability: compute capability, ``(0, 0)`` if kernels run in the interpreter.

    Returns:
        ``(heads, tiles of queries, int32 words)``, or zeros if there is no map.
    """
    if choose_row_strategy(tensors, options, capability) != LISTS:
        return 0, 0, 0
    config = config_of_call(tensors, options, capability)
    n_query_tiles = row_tiles(tensors.q, config["rows"], tensors)
    n_key_blocks = cdiv(options.max_seqlen_k, config["keys"])
    return tensors.q.size(1), n_query_tiles, cdiv(n_key_blocks, WORD_BITS)


class AttentionResults(NamedTuple):
    """Shapes and dtypes of the operator's results.

    Attributes:
        out: the output, like ``q``.
        out2: the second output, like ``q``: the mean of the values with the weights
            ``u = p^(2 - alpha)``. Kernels subtract ``delta = dout . out2`` in backward.
        stats: ``[4, B, H, Nq]`` statistics of the rows.
        live: map of live blocks: one bit for each head, tile of queries and block of keys, set if
            a weight in the block is positive.
    """

    out: Buffer
    out2: Buffer
    stats: Buffer
    live: Buffer


def outputs(
    tensors: AttentionTensors,
    options: AttentionOptions,
    training: bool,
) -> AttentionResults:
    """Return the shape and dtype of each result. A result that a call does not have is empty.

    Only kernels have a second output and a map of live blocks. They are not empty if kernels can
    run, even if the tiled path runs instead and returns neither: a graph is compiled before that is
    known.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: whether backward may follow.
    """
    q = tensors.q
    out = result_like(q)
    out2 = Buffer((0,), q.dtype)
    live = Buffer((0,), torch.int32)
    if triton_interpreted() or implementations.chosen_impl("", "q", q) == "triton":
        live = Buffer(live_shape(tensors, options, capability_of(q.device)), torch.int32)
        if training:
            out2 = out
    stats_shape = (4, *tensors.stats_shape) if training or options.support else (0,)
    stats = Buffer(stats_shape, torch.promote_types(q.dtype, torch.float32))
    return AttentionResults(out, out2, stats, live)


def _gradient_like(name: str, saved: AttentionSaved, options: AttentionOptions) -> Buffer:
    """Return the shape, dtype and strides of the gradient of q, k or v."""
    return result_like(getattr(saved, name))


ATTENTION = Operator(
    "entmax_attention",
    AttentionTensors,
    AttentionOptions,
    AttentionSaved,
    results=("out", "out2", "stats", "live"),
    outputs=outputs,
    gradients={
        "q": partial(_gradient_like, "q"),
        "k": partial(_gradient_like, "k"),
        "v": partial(_gradient_like, "v"),
        "alpha": "alpha",
    },
    plans=partial(importlib.import_module, "tilefold.ops.entmax_attention.plans"),  # needs Triton
    tiled=_tiled,
    reference=_reference.attention,
    check_values=check_values,
)


def chosen_impl(q: Tensor, impl: str = "auto") -> str:
    """Return the implementation of ``entmax_attention(q, ..., impl=impl)``.

    ``"auto"`` chooses ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that can run the
    kernels, and else ``"tiled"``.
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
    """Compute attention whose weights are the alpha-entmax of the scores, with exact zeros.

    The operator is that of AdaSplash (arXiv 2502.12082): ``out_i = sum_j p_ij v_j`` with
    ``p_i = entmax_alpha(scale * q_i . k_j)`` over the keys j that query i may attend to. The scores
    are never written to memory, and blocks whose weights are proved to be 0 are skipped.

    The root of every row is found to a residual of 1e-6 of its mass (on a GPU 1e-5 for 16-bit
    input), for any scores, and the output is divided by the remaining mass. Scores are scaled in
    fp32, and backward computes them from the same operands. Backward is bitwise deterministic. Only
    ``impl="reference"`` can be differentiated twice.

    Query i has position ``i + Nk - Nq`` among the keys: causal attention and windows are aligned to
    the end, as decoding with a cache needs. A row without a key to attend to is 0, without a
    gradient. NaN in a query, or in a key that a row may attend to, makes the row NaN. Keys and
    values that ``key_padding_mask`` masks have no influence. Values that causality or a window
    hides must be finite, because their weight is 0, and 0 times NaN is NaN.

    Args:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]`` with ``cu_seqlens_q``; any strides; fp16,
            bf16, fp32 or fp64.
        k, v: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]`` with ``cu_seqlens_k``; ``H`` is a
            multiple of ``Hkv``.
        alpha: a number in [1, 2] (1 is softmax, 2 is sparsemax), or a differentiable tensor of one
            number or ``[H]``. On a GPU, a tensor's value outside [1, 2] makes its head NaN instead
            of raising an error.
        causal: whether a query attends to no key after its own position.
        window: a query attends to keys at most this far from its position; 2^30 and more is no
            window.
        cu_seqlens_q: ``[B + 1]`` int32 or int64 offsets of packed queries. Offsets that do not
            describe the rows raise an error on the CPU. In kernels, where a check would
            synchronise, they make every output NaN.
        cu_seqlens_k: offsets of packed keys. A packed batch needs both.
        max_seqlen_k: upper bound of the length of packed key sequences, which saves work; by
            default the length of k. A longer sequence has the effect of wrong offsets.
        key_padding_mask: ``[B, Nk]``, nonzero for keys that count, in any pattern; not for packed
            input.
        scale: multiplies the products; by default ``D ** -0.5``.
        dropout_p: probability in [0, 1) that a weight is dropped. The remaining weights are
            multiplied by ``1 / (1 - dropout_p)``.
        generator: generator of the seed of dropout, on the device of ``q``; by default torch's. The
            same seed drops the same weights in every implementation.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see
            :func:`tilefold.ops.entmax_attention.chosen_impl`.
        return_stats: also return :class:`EntmaxStats`. ``"blocks"`` also counts live blocks, which
            computes the scores once more, in fp32. The CPU does not wait for the device.

    Returns:
        A tensor shaped like ``q``. With ``return_stats`` also the statistics.

    Raises:
        TypeError: for arguments that are not tensors, or have a dtype that is not supported.
        ValueError: for shapes, devices, masks, offsets or options that do not fit together.
        RuntimeError: if ``impl="triton"`` cannot run here.

    Examples:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 4, 32, 16).unbind()  # 1 text, 4 heads, 32 tokens
        >>> entmax_attention(q, k, v, alpha=1.5).shape
        torch.Size([1, 4, 32, 16])
        >>> padding = torch.ones(1, 32)
        >>> padding[:, 20:] = 0
        >>> entmax_attention(q, k, v, key_padding_mask=padding, causal=True).shape
        torch.Size([1, 4, 32, 16])
    """
    seed = None
    if type(dropout_p) is not float or dropout_p != 0:
        seed = _seed(q, dropout_p, generator)
    alpha_tensor: Tensor | None = None
    alpha_number = ALPHA_IS_TENSOR
    if isinstance(alpha, Tensor):
        alpha_tensor = alpha
    else:
        alpha_number = alpha
    tensors = AttentionTensors(
        q=q,
        k=k,
        v=v,
        alpha=alpha_tensor,
        key_padding_mask=key_padding_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seed=seed,
    )
    raw_options = (
        alpha_number,
        causal,
        window,
        scale,
        dropout_p,
        max_seqlen_k,
        return_stats,
    )
    out, _, stats, _ = ATTENTION(tensors, raw_options, impl, check_arguments)
    if not return_stats:
        result: Tensor = out
        return result
    options, prepare = check_arguments(tensors, *raw_options)
    if prepare is not None:
        tensors = prepare(tensors)
    if stats is None:  # the reference has no statistics
        with torch.no_grad():
            _, tau, support = _reference.attention_with_rows(tensors, options)
        rows = RowStats(tau, support, torch.zeros_like(tau))
    else:
        rows = convert_row_stats(stats, tensors.alpha, options)
    return out, complete_stats(rows, tensors, options, with_blocks=return_stats == "blocks")


def _seed(q: object, dropout_p: object, generator: torch.Generator | None) -> Tensor | None:
    """Draw the seed of dropout; ``None`` without dropout, and for arguments that checks refuse."""
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
    """Count the blocks of an :func:`entmax_attention` that hold a positive weight.

    A block is ``block`` queries by ``block`` keys of one sequence and head (AdaSplash, arXiv
    2502.12082). It is live if a weight in it is positive, ``(alpha - 1) s > tau`` (for alpha = 1,
    if ``exp(s - tau)`` is), up to the rounding of scores that are computed once more in fp32. It is
    visible if any of its pairs may attend. Nothing synchronises with the device.

    Args:
        q, k, alpha, causal, window, cu_seqlens_q, cu_seqlens_k, key_padding_mask, scale: as in
            :func:`entmax_attention`.
        tau: ``[B, H, Nq]`` (packed ``[1, H, Tq]``), from :class:`EntmaxStats`.
        query_padding_mask: ``[B, Nq]`` (packed ``[Tq]``), nonzero = count this row.
        block: side of a block.

    Returns:
        int32 ``[B, H]`` (packed ``[1, H]``): live blocks, and visible ones.

    Raises:
        TypeError, ValueError: for arguments that do not fit together.
    """
    tensors = AttentionTensors(
        q=q,
        k=k,
        v=k,
        alpha=alpha if isinstance(alpha, Tensor) else None,
        key_padding_mask=key_padding_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seed=None,
    )
    options, _ = check_arguments(
        tensors,
        alpha=0.0 if isinstance(alpha, Tensor) else alpha,
        causal=causal,
        window=window,
        scale=scale,
        dropout_p=0.0,
        max_seqlen_k=None,
        return_stats=False,
    )
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be an integer of at least 1, got {block!r}.")
    check_tensor("tau", tau)
    batch, n_heads, n_rows = tensors.stats_shape
    check_shape("tau", tau, "B H Nq", B=batch, H=n_heads, Nq=n_rows)
    if query_padding_mask is not None:
        check_tensor("query_padding_mask", query_padding_mask)
        if tensors.packed:
            check_shape("query_padding_mask", query_padding_mask, "Tq", Tq=q.size(0))
        else:
            check_shape(
                "query_padding_mask",
                query_padding_mask,
                "B Nq",
                B=q.size(0),
                Nq=q.size(2),
            )
    check_same_device("q", q, {"tau": tau, "query_padding_mask": query_padding_mask})
    prepared = prepare_tensors(None, tensors)
    return count_blocks(prepared, options, tau, query_padding_mask, block)
