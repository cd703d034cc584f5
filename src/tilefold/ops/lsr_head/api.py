"""The fused language-model head of learned sparse retrieval, public functions: arguments, checks
and dispatch.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType

import torch
from torch import Tensor

from tilefold.ops._shared import impl as shared
from tilefold.ops._shared.fallback import KernelUnavailableError, give_up, given_up, try_kernels
from tilefold.ops._shared.operator import Operator
from tilefold.ops.lsr_head import _parallel, _quantized, _reference, _tiled
from tilefold.ops.lsr_head._arguments import check_head, checked
from tilefold.ops.lsr_head._parallel import PLAIN_TYPES, Options
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
from tilefold.ops.lsr_head._sparse import CapacityRows, best_of, kept_rows

# Vocabulary columns that lsr_head_sparse holds in dense form at a time, for the whole batch.
SPARSE_BLOCK_V = 16384
COMPACTION = "lsr_head's compaction of rows"
ROWS_BLOCK_SCORES = (
    1 << 25
)  # scores of a block of the vocabulary that lsr_head_rows holds, for the whole batch
ALIGNMENT = 1024  # columns, so that blocks of the weight begin at multiples of its tiles
OPTIONS = ("pooling", "activation", "logit_scale", "out_dtype", "screen")


def _plans() -> ModuleType:
    from tilefold.ops.lsr_head import plans  # needs Triton

    return plans


def _choose(tensors: HeadTensors, impl: str) -> tuple[str, str]:
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
    """Implementation of ``lsr_head(hidden, ..., impl=impl)``: ``"reference"``, ``"tiled"`` or
    ``"triton"``.

    ``"auto"`` takes ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that has it, else
    ``"tiled"``.

    Raises:
        ValueError: for an unknown name.
        RuntimeError, TypeError: for ``"triton"`` on a device, or with a dtype, that it does not
            support.
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
    """Score every vocabulary entry for every sequence, without the ``[B, S, V]`` logits (Sparton,
    arXiv 2603.25011).

    With ``logit[b, s, v] = logit_scale * hidden[b, s] . weight[v] + bias[v]`` over the valid tokens
    s of sequence b::

        max:       out[b, v] = act(max_s logit[b, s, v])
        sum, mean: out[b, v] = sum_s or mean_s act(logit[b, s, v])
        cls, last: out[b, v] = act(logit[b, s*, v]), s* the first or the last valid token

    Products accumulate in fp32 (fp64 for fp64 input) and the maximum is taken on those values;
    among equal logits the lowest token wins and takes the whole gradient. A sequence without a
    valid token scores 0, with no gradient. A NaN in a valid token gives NaN; whatever a masked
    token holds is never read into a result. Backward is bitwise deterministic. Under
    ``torch.autocast`` products take autocast's dtype and gradients keep their parameter's.

    A DTensor ``weight`` (and ``bias``) that is ``Shard(0)`` over one mesh dimension makes the head
    vocabulary-parallel: ``hidden`` is then a ``Replicate()`` DTensor, the scores are a ``Shard(1)``
    one, and only ``dhidden`` is summed over the ranks, in fp32.

    Args:
        hidden: ``[B, S, D]`` token states, or ``[T, D]`` packed ones with ``cu_seqlens``; fp16,
            bf16, fp32 or fp64.
        weight: ``[V, D]`` decoder weight, dtype of ``hidden`` (any floating dtype under autocast);
            or, for max pooling without gradients, a :class:`QuantizedWeight`: token states are then
            rounded to fp8 too.
        bias: ``[V]`` decoder bias, or ``None``.
        attention_mask: ``[B, S]``, nonzero = valid, in any pattern (padding on either side, holes).
            Values are not weights: any nonzero value means "valid".
        cu_seqlens: ``[B + 1]`` int32, ``0 = cu_seqlens[0] <= ... <= cu_seqlens[B] = T``. On the CPU
            other values raise; on a GPU, where checking costs a synchronisation, they make every
            score NaN.
        pooling: ``"max"``, ``"sum"``, ``"mean"``, ``"cls"`` or ``"last"``.
        activation: ``"log1p_relu"`` (SPLADE), ``"log1p_log1p_relu"`` (OpenSearch l0), ``"relu"``,
            ``"softplus"`` or ``"none"``.
        logit_scale: a number that multiplies the products before the bias is added.
        out_dtype: dtype of the scores; by default that of ``hidden``, or autocast's.
        weight_main_grad: ``[V, D]`` fp32, contiguous: backward adds the weight's gradient to it, in
            fp32, and leaves ``weight.grad`` alone (Megatron's ``main_grad``). For max pooling in
            eager mode.
        screen: whether an 8-bit product with a proven bound first finds the scores that can be
            positive, so that only their logits are computed: the same scores and winners. On
            compute capability 9.0, of fp16 and bf16, for max pooling with an activation of the relu
            family; elsewhere, for little work, and where much is positive (a model that is not
            trained) all logits are computed. It takes ``V D + 5 B V + T D`` bytes.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see :func:`chosen_impl`.

    Returns:
        ``[B, V]`` scores.

    Raises:
        TypeError: for arguments that are not tensors, or of a dtype that is not supported.
        ValueError: for shapes, devices, masks, ``cu_seqlens`` or options that do not fit together.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    asked = (pooling, activation, logit_scale, out_dtype, screen)
    if isinstance(weight, QuantizedWeight):
        tensors = HeadTensors(hidden, attention_mask, cu_seqlens, weight.values, weight.scale, bias)
    else:
        tensors = HeadTensors(hidden, attention_mask, cu_seqlens, weight, None, bias)
        plain = (
            type(hidden) in PLAIN_TYPES
            and type(weight) in PLAIN_TYPES
            and type(bias) in PLAIN_TYPES
        )
        if not plain and _parallel.is_distributed(hidden, weight, bias):
            named = {
                **dict(zip(OPTIONS, asked, strict=True)),
                "impl": impl,
                "weight_main_grad": weight_main_grad,
            }
            return _parallel.parallel_head(lsr_head, tensors.tokens, weight, bias, named)
    if weight_main_grad is None:
        return HEAD(tensors, asked, impl, checked)[0]  # type: ignore[no-any-return]
    into = {"weight": weight_main_grad}
    # what may be added to depends on what needs a gradient, of which a key knows only that
    # something does
    wanted = tuple([getattr(each, "requires_grad", False) for each in (weight, weight_main_grad)])
    return HEAD(tensors, (*asked, impl, wanted), impl, checked, into)[0]  # type: ignore[no-any-return]


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
    """:func:`lsr_head` for encoding: scores above ``min_weight`` as a sparse CSR tensor; ``[B, V]``
    never exists.

    The vocabulary is walked in blocks; of each, only what is kept survives. Selection is made on
    fp32 scores (fp64 for fp64 input). Not differentiable: the result carries no graph.

    Args:
        top_k: keep at most this many entries per row, the largest; among equal ones the lowest
            vocabulary index. ``None`` keeps all.
        min_weight: keep entries strictly greater than this; NaN is always kept, so that it is seen.

    The other arguments and errors are those of :func:`lsr_head`.

    Returns:
        ``[B, V]`` ``torch.sparse_csr`` tensor with int64 indices, sorted within each row; with DTensor arguments the
        plain, whole tensor on every rank.
    """
    tokens, asked = (
        Tokens(hidden, attention_mask, cu_seqlens),
        (pooling, activation, logit_scale, out_dtype),
    )
    named: Options = {
        **dict(zip(OPTIONS, asked, strict=False)),
        "impl": impl,
    }  # a block is too small for a screen
    values, scale = (
        (weight.values, weight.scale) if isinstance(weight, QuantizedWeight) else (weight, None)
    )
    if scale is None and _parallel.is_distributed(hidden, weight, bias):
        named |= {"top_k": top_k, "min_weight": min_weight}
        return _parallel.parallel_head_sparse(lsr_head_sparse, tokens, values, bias, named)
    _, out_dtype = check_head(HeadTensors(*tokens, values, scale, bias), *asked)
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k must be a positive integer or None, got {top_k!r}.")
    if not isinstance(min_weight, (int, float)) or math.isnan(min_weight):
        raise ValueError(
            f"min_weight must be a Python number, got {min_weight!r}; -inf keeps every entry.",
        )
    named["out_dtype"] = torch.promote_types(hidden.dtype, torch.float32)

    def scores_from(v0: int) -> Tensor:
        part = slice(v0, v0 + SPARSE_BLOCK_V)
        return lsr_head(
            weight=weight[part],
            bias=None if bias is None else bias[part],
            **tokens._asdict(),
            **named,
        )

    shape = tokens.batch, weight.size(0)
    with torch.no_grad():
        blocks = ((v0, scores_from(v0)) for v0 in range(0, shape[1], SPARSE_BLOCK_V))
        return kept_rows(blocks, shape, top_k, min_weight, out_dtype)


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
    """:func:`lsr_head_sparse` whose rows have room for ``capacity`` entries each, made without
    waiting for the GPU.

    A row with more entries is incomplete, which its count says; who reads it must encode it again
    with more room. ``top_k`` chooses among the entries that fit, so it too holds only for rows
    whose count is at most ``capacity``.

    None where Triton's kernels do not run: :func:`lsr_head_sparse` serves there, which explains the
    other arguments.
    """
    if capacity < 1 or math.isnan(min_weight) or (top_k is not None and top_k < 1):
        raise ValueError(
            f"capacity and top_k must be at least 1 and min_weight a number, got capacity={capacity}, top_k={top_k}, "
            f"min_weight={min_weight}.",
        )
    if shared.chosen_impl("lsr_head", "hidden", hidden, impl) != "triton" or given_up(
        COMPACTION,
        hidden.device,
    ):
        return None
    from tilefold.ops.lsr_head._triton.compact import append_rows  # triton may be missing

    batch = hidden.size(0) if cu_seqlens is None else cu_seqlens.numel() - 1
    vocab, device = weight.size(0), hidden.device
    block = max(ALIGNMENT, ROWS_BLOCK_SCORES // max(1, batch) // ALIGNMENT * ALIGNMENT)
    counts = torch.zeros(batch, dtype=torch.int32, device=device)
    columns = torch.empty(batch, capacity, dtype=torch.int32, device=device)
    values = torch.empty(batch, capacity, dtype=torch.float32, device=device)
    call = functools.partial(
        lsr_head,
        hidden,
        attention_mask=attention_mask,
        cu_seqlens=cu_seqlens,
        pooling=pooling,
    )
    call = functools.partial(
        call,
        activation=activation,
        out_dtype=torch.float32,
        screen=screen,
        impl=impl,
    )
    with torch.no_grad():
        for v0 in range(0, vocab, block):
            whole, part = v0 == 0 and block >= vocab, slice(v0, v0 + block)
            some = bias if whole or bias is None else bias[part]
            rows = weight if whole else weight[part]
            scores = call(rows, some)
            failed = try_kernels(append_rows, scores, v0, min_weight, counts, columns, values)
            if isinstance(failed, KernelUnavailableError):
                give_up(
                    COMPACTION,
                    device,
                    str(failed),
                    "lsr_head_sparse runs instead, which waits for the GPU.",
                )
                return None
        found = best_of(
            CapacityRows(counts, counts.clamp(max=capacity), columns, values, vocab),
            top_k,
        )
    return found._replace(values=found.values.to(hidden.dtype if out_dtype is None else out_dtype))
