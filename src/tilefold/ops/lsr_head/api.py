"""Public functions of the fused head of learned sparse retrieval: checks and dispatch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

from tilefold.ops._shared import impl as shared
from tilefold.ops._shared.fallback import (
    KernelUnavailableError,
    failure_of,
    warn_and_record_failure,
)
from tilefold.ops._shared.operator import Operator
from tilefold.ops.lsr_head import _parallel, _quantized, _reference, _tiled
from tilefold.ops.lsr_head._arguments import check_arguments, check_head
from tilefold.ops.lsr_head._parallel import PLAIN_TYPES
from tilefold.ops.lsr_head._problem import (
    HeadOptions,
    HeadSaved,
    HeadTensors,
    Tokens,
    bias_gradient,
    check_values,
    outputs,
    reads,
)
from tilefold.ops.lsr_head._quantized import QuantizedWeight
from tilefold.ops.lsr_head._sparse import CapacityRows, largest_entries, select_rows

# Vocabulary columns of a block, whose scores lsr_head_sparse has in dense form for all sequences.
SPARSE_BLOCK_V = 16384
# Scores of a block of the vocabulary, for all sequences, that lsr_head_rows has at a time.
ROWS_BLOCK_SCORES = 1 << 25
# Columns of which a block of lsr_head_rows is a multiple, so that blocks begin with a tile.
ROWS_BLOCK_ALIGNMENT = 1024
COMPACTION = "lsr_head's compaction of rows"  # name under which a failure is recorded


def _plans() -> ModuleType:
    from tilefold.ops.lsr_head import plans  # needs Triton

    return plans


def _choose(tensors: HeadTensors, impl: str) -> tuple[str, str]:
    """Return the name under which failures of kernels are recorded, and the implementation."""
    if tensors.weight_scale is None:
        return HEAD.name, HEAD.chosen_impl(tensors.hidden, impl)
    return _quantized.QUANTIZED_HEAD, _quantized.chosen_quantized_impl(tensors.hidden, impl)


HEAD = Operator(
    "lsr_head",
    HeadTensors,
    HeadOptions,
    HeadSaved,
    results=("scores", "winners"),
    outputs=outputs,
    gradients={"hidden": "hidden", "weight": "weight", "bias": bias_gradient},
    plans=_plans,
    tiled=_tiled,
    reference=_reference.lsr_head,
    check_values=check_values,
    reads=reads,
    choose=_choose,
)


def chosen_impl(hidden: Tensor, impl: str = "auto") -> str:
    """Return the implementation that ``lsr_head(hidden, ..., impl=impl)`` runs.

    ``"auto"`` chooses ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that can run the
    kernels, and else ``"tiled"``.

    Returns:
        ``"reference"``, ``"tiled"`` or ``"triton"``.

    Raises:
        ValueError: if the name is unknown.
        RuntimeError: if the device cannot run ``"triton"``.
        TypeError: if ``"triton"`` does not support the dtype.
    """
    return HEAD.chosen_impl(hidden, impl)


def lsr_head(
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    pooling: str = "max",
    activation: str = "log1p_relu",
    logit_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    weight_main_grad: Tensor | None = None,
    screen: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Score every vocabulary entry for every sequence, without the ``[B, S, V]`` logits.

    This is the head of Sparton (arXiv 2603.25011). With
    ``logit[b, s, v] = logit_scale * hidden[b, s] . weight[v] + bias[v]`` over the valid tokens s of
    sequence b::

        max:       out[b, v] = act(max_s logit[b, s, v])
        sum, mean: out[b, v] = sum_s or mean_s act(logit[b, s, v])
        cls, last: out[b, v] = act(logit[b, s*, v]), s* the first or the last valid token

    Products accumulate in fp32 (fp64 for fp64 input), and the maximum is taken over these values.
    Among equal logits the lowest token wins and gets the gradient. A sequence without a valid token
    scores 0, without a gradient. A NaN in a valid token gives NaN. The values of masked tokens have
    no influence. Backward is bitwise deterministic. Under ``torch.autocast``, products are computed
    in autocast's dtype, and gradients have the dtype of their parameter.

    A DTensor ``weight`` (and ``bias``) that is ``Shard(0)`` over one mesh dimension makes the head
    vocabulary-parallel. ``hidden`` is then a ``Replicate()`` DTensor, the scores are a ``Shard(1)``
    DTensor, and only ``dhidden`` is summed over the ranks, in fp32.

    Args:
        hidden: ``[B, S, D]`` token states, or packed ``[T, D]`` with ``cu_seqlens``; fp16, bf16,
            fp32 or fp64.
        weight: ``[V, D]`` decoder weight in the dtype of ``hidden`` (any floating dtype under
            autocast). For max pooling without gradients, also a :class:`QuantizedWeight`, with
            which token states are rounded to fp8 too.
        bias: ``[V]`` decoder bias, or ``None``.
        attention_mask: ``[B, S]``, nonzero for valid tokens, in any pattern (padding on either
            side, holes). Its values are not weights.
        cu_seqlens: ``[B + 1]`` int32, ``0 = cu_seqlens[0] <= ... <= cu_seqlens[B] = T``. Other
            values raise an error on the CPU. On a GPU, where a check would synchronise, they make
            every score NaN.
        pooling: ``"max"``, ``"sum"``, ``"mean"``, ``"cls"`` or ``"last"``.
        activation: ``"log1p_relu"`` (SPLADE), ``"log1p_log1p_relu"`` (OpenSearch l0), ``"relu"``,
            ``"softplus"`` or ``"none"``.
        logit_scale: a number that multiplies the products before the bias is added.
        out_dtype: dtype of the scores; by default that of ``hidden``, or autocast's.
        weight_main_grad: ``[V, D]`` fp32, contiguous. Backward adds the weight's gradient to it, in
            fp32, and does not change ``weight.grad`` (Megatron's ``main_grad``). For max pooling in
            eager mode.
        screen: whether an 8-bit product with a proven error bound first determines which scores can
            be positive. Only their logits are then computed, with the same scores and winners. This
            works on compute capability 9.0, in fp16 and bf16, for max pooling with an activation of
            the relu family. All logits are computed otherwise, for small inputs, and if many scores
            are positive, as in an untrained model. The screen needs ``V D + 5 B V + T D`` bytes.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see :func:`chosen_impl`.

    Returns:
        ``[B, V]`` scores.

    Raises:
        TypeError: if an argument is not a tensor, or has an unsupported dtype.
        ValueError: if shapes, devices, masks, ``cu_seqlens`` or options are inconsistent.
        RuntimeError: if ``impl="triton"`` cannot run here.

    Examples:
        >>> import torch
        >>> hidden = torch.randn(2, 5, 16, requires_grad=True)  # token states of 2 texts
        >>> decoder = torch.randn(100, 16)  # one row per vocabulary entry
        >>> mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
        >>> scores = lsr_head(hidden, decoder, attention_mask=mask)
        >>> scores.shape
        torch.Size([2, 100])
        >>> scores.sum().backward()
        >>> hidden.grad[1, 3:].any().item()  # padding has no gradient
        False
    """
    options = (pooling, activation, logit_scale, out_dtype, screen)
    if isinstance(weight, QuantizedWeight):
        tensors = HeadTensors(hidden, attention_mask, cu_seqlens, weight.values, weight.scale, bias)
    else:
        tensors = HeadTensors(hidden, attention_mask, cu_seqlens, weight, None, bias)
        is_plain = (
            type(hidden) in PLAIN_TYPES
            and type(weight) in PLAIN_TYPES
            and type(bias) in PLAIN_TYPES
        )
        if not is_plain and _parallel.is_distributed(hidden, weight, bias):
            head = functools.partial(
                lsr_head,
                pooling=pooling,
                activation=activation,
                logit_scale=logit_scale,
                out_dtype=out_dtype,
                screen=screen,
                impl=impl,
            )
            return _parallel.parallel_head(
                head,
                tensors.tokens,
                weight,
                bias,
                weight_main_grad,
                out_dtype,
            )
    if weight_main_grad is None:
        return HEAD(tensors, options, impl, check_arguments)[0]  # type: ignore[no-any-return]
    # The checks of the buffer depend on which of the two tensors needs a gradient. The key of a
    # call only holds whether any tensor does.
    require_grad = (
        getattr(weight, "requires_grad", False),
        getattr(weight_main_grad, "requires_grad", False),
    )
    return HEAD(  # type: ignore[no-any-return]
        tensors,
        (*options, impl, require_grad),
        impl,
        check_arguments,
        {"weight": weight_main_grad},
    )[0]


def lsr_head_sparse(
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    pooling: str = "max",
    activation: str = "log1p_relu",
    logit_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    top_k: int | None = None,
    min_weight: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Compute the scores above ``min_weight`` as a sparse CSR tensor, without a dense ``[B, V]``.

    This is :func:`lsr_head` for encoding. Scores are computed in blocks of the vocabulary, and only
    the selected ones are stored. They are selected in fp32 (fp64 for fp64 input). The result is not
    differentiable.

    Args:
        hidden, weight, bias, attention_mask, cu_seqlens, pooling, activation, logit_scale,
            out_dtype, impl: as in :func:`lsr_head`.
        top_k: largest number of entries per row. The largest scores are selected, and among equal
            ones those with the lowest vocabulary index. ``None`` selects all.
        min_weight: only entries strictly greater than this are selected. NaN always is, so that it
            is noticed.

    Returns:
        ``[B, V]`` ``torch.sparse_csr`` tensor with int64 indices, sorted within each row. With
        DTensor arguments it is a plain tensor with all columns, equal on every rank.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`lsr_head`.

    Examples:
        >>> import torch
        >>> hidden, decoder = torch.randn(2, 5, 16), torch.randn(100, 16)
        >>> rows = lsr_head_sparse(hidden, decoder, top_k=8)
        >>> rows.layout, rows.shape
        (torch.sparse_csr, torch.Size([2, 100]))
        >>> rows.crow_indices().tolist()
        [0, 8, 16]
    """
    tokens = Tokens(hidden, attention_mask, cu_seqlens)
    if isinstance(weight, QuantizedWeight):
        tensors = HeadTensors(*tokens, weight.values, weight.scale, bias)
    else:
        if _parallel.is_distributed(hidden, weight, bias):
            sparse_head = functools.partial(
                lsr_head_sparse,
                pooling=pooling,
                activation=activation,
                logit_scale=logit_scale,
                top_k=top_k,
                min_weight=min_weight,
                impl=impl,
            )
            return _parallel.parallel_head_sparse(
                sparse_head,
                tokens,
                weight,
                bias,
                out_dtype,
                top_k,
            )
        tensors = HeadTensors(*tokens, weight, None, bias)
    _, out_dtype = check_head(tensors, pooling, activation, logit_scale, out_dtype)
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k must be a positive integer or None, got {top_k!r}.")
    if not isinstance(min_weight, (int, float)) or math.isnan(min_weight):
        raise ValueError(
            f"min_weight must be a Python number, got {min_weight!r}; -inf keeps every entry.",
        )
    score = functools.partial(
        lsr_head,
        hidden,
        attention_mask=attention_mask,
        cu_seqlens=cu_seqlens,
        pooling=pooling,
        activation=activation,
        logit_scale=logit_scale,
        out_dtype=torch.promote_types(hidden.dtype, torch.float32),
        impl=impl,
    )
    with torch.no_grad():
        return select_rows(
            _scored_blocks(score, weight, bias, SPARSE_BLOCK_V),
            (tokens.batch, weight.size(0)),
            top_k,
            min_weight,
            out_dtype,
        )


def _scored_blocks(
    score: Callable[..., Tensor],
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    block_size: int,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first column and the scores of each block of the vocabulary.

    Args:
        score: ``score(block_weight, block_bias)``.
        weight: ``[V, D]``.
        bias: ``[V]``, or ``None``.
        block_size: columns of a block.
    """
    vocab = weight.size(0)
    if vocab <= block_size:
        yield 0, score(weight, bias)
        return
    for first_column in range(0, vocab, block_size):
        block = slice(first_column, first_column + block_size)
        yield first_column, score(weight[block], None if bias is None else bias[block])


def rows_block_size(batch: int) -> int:
    """Return the columns of a block of :func:`lsr_head_rows`, for ``batch`` sequences."""
    block_size = ROWS_BLOCK_SCORES // max(1, batch) // ROWS_BLOCK_ALIGNMENT * ROWS_BLOCK_ALIGNMENT
    return max(ROWS_BLOCK_ALIGNMENT, block_size)


def lsr_head_rows(
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    capacity: int,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    pooling: str = "max",
    activation: str = "log1p_relu",
    out_dtype: torch.dtype | None = None,
    top_k: int | None = None,
    min_weight: float = 0.0,
    screen: bool = False,
    impl: str = "auto",
) -> CapacityRows | None:
    """Compute sparse rows with memory for ``capacity`` entries each, without waiting for the GPU.

    Args:
        hidden, weight, bias, attention_mask, cu_seqlens, pooling, activation, out_dtype,
            min_weight, screen, impl: as in :func:`lsr_head_sparse` and :func:`lsr_head`.
        capacity: entries that a row can hold. A row with more is incomplete, which its count shows,
            and the caller must encode it again with a larger capacity.
        top_k: largest number of entries per row. They are chosen among the entries that fit, so
            that the choice is only right for rows whose count is at most ``capacity``.

    Returns:
        The rows, or ``None`` if Triton's kernels do not run.

    Raises:
        ValueError: if the capacity or ``top_k`` is below 1, or ``min_weight`` is NaN.
    """
    if capacity < 1 or math.isnan(min_weight) or (top_k is not None and top_k < 1):
        raise ValueError(
            "capacity and top_k must be at least 1 and min_weight a number, got "
            f"capacity={capacity}, top_k={top_k}, min_weight={min_weight}.",
        )
    device = hidden.device
    if shared.chosen_impl("lsr_head", "hidden", hidden, impl) != "triton":
        return None
    if failure_of(COMPACTION, device):
        return None
    from tilefold.ops.lsr_head._triton.compact import append_rows  # triton may be missing

    batch = hidden.size(0) if cu_seqlens is None else cu_seqlens.numel() - 1
    vocab = weight.size(0)
    block_size = rows_block_size(batch)
    counts = torch.zeros(batch, dtype=torch.int32, device=device)
    columns = torch.empty(batch, capacity, dtype=torch.int32, device=device)
    values = torch.empty(batch, capacity, dtype=torch.float32, device=device)
    score = functools.partial(
        lsr_head,
        hidden,
        attention_mask=attention_mask,
        cu_seqlens=cu_seqlens,
        pooling=pooling,
        activation=activation,
        out_dtype=torch.float32,
        screen=screen,
        impl=impl,
    )
    with torch.no_grad():
        for first_column, scores in _scored_blocks(score, weight, bias, block_size):
            try:
                append_rows(scores, first_column, min_weight, counts, columns, values)
            except KernelUnavailableError as error:
                warn_and_record_failure(
                    COMPACTION,
                    device,
                    str(error),
                    "lsr_head_sparse runs instead, which synchronises with the GPU.",
                )
                return None
        rows = CapacityRows(counts, counts.clamp(max=capacity), columns, values, vocab)
        rows = largest_entries(rows, top_k)
    if out_dtype is None:
        out_dtype = hidden.dtype
    return rows._replace(values=rows.values.to(out_dtype))
