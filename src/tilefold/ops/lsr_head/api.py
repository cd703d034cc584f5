"""The fused language-model head of learned sparse retrieval, public functions: arguments, checks and dispatch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_choice
from tilefold.ops._shared.impl import IMPLS, check_interpreted, settled
from tilefold.ops.lsr_head import _library, _parallel, _reference
from tilefold.ops.lsr_head._arguments import check_head, check_main_grad, check_out_dtype, check_quantized_head
from tilefold.ops.lsr_head._calls import Signature, call_signature, new_plans, plans_of
from tilefold.ops.lsr_head._choice import chosen_impl
from tilefold.ops.lsr_head._layout import batch_size, sequence_mask
from tilefold.ops.lsr_head._quantized import QuantizedWeight
from tilefold.ops.lsr_head._sparse import SparseRows

# Vocabulary columns that lsr_head_sparse holds in dense form at a time, for the whole batch.
SPARSE_BLOCK_V = 16384


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
    impl: str = "auto",
) -> Tensor:
    """Score every vocabulary entry for every sequence, without the ``[B, S, V]`` logits (Sparton, arXiv 2603.25011).

    With ``logit[b, s, v] = logit_scale * hidden[b, s] . weight[v] + bias[v]`` over the valid tokens s of sequence b::

        max:       out[b, v] = act(max_s logit[b, s, v])
        sum, mean: out[b, v] = sum_s or mean_s act(logit[b, s, v])
        cls, last: out[b, v] = act(logit[b, s*, v]), s* the first or the last valid token

    Products accumulate in fp32 (fp64 for fp64 input) and the maximum is taken on those values; among equal logits
    the lowest token wins and takes the whole gradient. A sequence without a valid token scores 0, with no gradient.
    A NaN in a valid token gives NaN; whatever a masked token holds is never read into a result. Backward is bitwise
    deterministic. Under ``torch.autocast`` products take autocast's dtype and gradients keep their parameter's.

    A DTensor ``weight`` (and ``bias``) that is ``Shard(0)`` over one mesh dimension makes the head vocabulary-parallel:
    ``hidden`` is then a ``Replicate()`` DTensor, the scores are a ``Shard(1)`` one, and only ``dhidden`` is summed over
    the ranks, in fp32.

    Args:
        hidden: ``[B, S, D]`` token states, or ``[T, D]`` packed ones with ``cu_seqlens``; fp16, bf16, fp32 or fp64.
        weight: ``[V, D]`` decoder weight, dtype of ``hidden`` (any floating dtype under autocast); or, for max pooling
            without gradients, a :class:`QuantizedWeight`: token states are then rounded to fp8 too, with a scale each.
        bias: ``[V]`` decoder bias, or ``None``.
        attention_mask: ``[B, S]``, nonzero = valid, in any pattern (padding on either side, holes). Real-valued
            term weights are not part of this contract: a nonzero value only says "valid".
        cu_seqlens: ``[B + 1]`` int32, ``0 = cu_seqlens[0] <= ... <= cu_seqlens[B] = T``. On the CPU other values
            raise; on a GPU, where looking costs a synchronisation, they make every score NaN.
        pooling: ``"max"``, ``"sum"``, ``"mean"``, ``"cls"`` or ``"last"``.
        activation: ``"log1p_relu"`` (SPLADE), ``"log1p_log1p_relu"`` (OpenSearch l0), ``"relu"``, ``"softplus"`` or
            ``"none"``.
        logit_scale: a number that multiplies the products before the bias is added.
        out_dtype: dtype of the scores; by default that of ``hidden``, or autocast's.
        weight_main_grad: ``[V, D]`` fp32, contiguous: backward adds the weight's gradient to it, in fp32, and leaves
            ``weight.grad`` alone (Megatron's ``main_grad``). For max pooling in eager mode.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see :func:`chosen_impl`.

    Returns:
        ``[B, V]`` scores.

    Raises:
        TypeError: for arguments that are no tensors, or of a dtype that is not supported.
        ValueError: for shapes, devices, masks, ``cu_seqlens`` or options that do not fit together.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    given = (pooling, activation, type(logit_scale), logit_scale, out_dtype, impl)
    tensors = (hidden, weight, bias, attention_mask, cu_seqlens, weight_main_grad)
    signature = call_signature(*tensors, given)
    plans = plans_of(signature)
    if plans is not None and (known := _library.scores_again(plans, *tensors)) is not None:
        return known
    if isinstance(weight, QuantizedWeight):
        out_dtype, impl = check_quantized_head(
            hidden, weight, bias, attention_mask, cu_seqlens, pooling, activation, logit_scale, out_dtype, impl
        )
        if weight_main_grad is not None:
            raise ValueError(
                "weight_main_grad must be None with a QuantizedWeight, which has no gradient; leave it out."
            )
        plans = new_plans(signature)
        return _library.quantized_max_head(
            hidden, weight, bias, attention_mask, cu_seqlens, activation, float(logit_scale), out_dtype, impl, plans
        )
    if _parallel.is_distributed(hidden, weight, bias):
        layout = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens}
        named = {"pooling": pooling, "activation": activation, "logit_scale": logit_scale, "out_dtype": out_dtype}
        named |= {"weight_main_grad": weight_main_grad, "impl": impl}
        return _parallel.parallel_head(lsr_head, hidden, weight, bias, layout, named)
    compute_dtype = check_head(hidden, weight, bias, attention_mask, cu_seqlens, pooling, activation, logit_scale)
    out_dtype = check_out_dtype(out_dtype, compute_dtype)
    if weight_main_grad is not None:
        check_main_grad(weight_main_grad, weight, pooling, impl)
    if torch.compiler.is_compiling():
        check_choice("impl", impl, IMPLS)  # the operators choose when they run: a device cannot be asked in a trace
    else:
        impl = settled(impl, chosen_impl(hidden, impl))
        check_interpreted(impl, hidden.device, compute_dtype, out_dtype)
    if impl == "reference":
        return _run_reference(
            hidden, weight, bias, attention_mask, cu_seqlens, pooling, activation, logit_scale, out_dtype
        )
    inputs = (hidden, weight, bias, attention_mask, cu_seqlens)
    options = (activation, float(logit_scale), out_dtype, compute_dtype)
    return _pooled(pooling, inputs, options, impl, weight_main_grad, signature)


def _pooled(
    pooling: str,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    options: tuple[str, float, torch.dtype, torch.dtype],
    impl: str,
    weight_main_grad: Tensor | None,
    signature: Signature | None,
) -> Tensor:
    """The scores of a checked call, by its pooling."""
    plans = new_plans(signature)
    if pooling == "max":
        return _library.max_head(*inputs, *options, impl, weight_main_grad, plans)
    if pooling in ("cls", "last"):
        hidden, weight, bias, attention_mask, cu_seqlens = inputs
        token, valid = _pooled_token(hidden, attention_mask, cu_seqlens, last=pooling == "last")
        scores = _library.token_head(token, weight, bias, *options)
        return scores.masked_fill(~valid[:, None], 0)
    return _library.sum_head(*inputs, *options, pooling == "mean", impl, plans)


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
    """:func:`lsr_head` for encoding: scores above ``min_weight`` as a sparse CSR tensor; ``[B, V]`` never exists.

    The vocabulary is walked in blocks; of each, only what is kept survives. Selection is made on fp32 scores (fp64
    for fp64 input). Not differentiable: the result carries no graph.

    Args:
        top_k: keep at most this many entries a row, the largest; among equal ones the lowest vocabulary index.
            ``None`` keeps all.
        min_weight: keep entries strictly greater than this; NaN is always kept, so that it is seen.

    The other arguments and errors are those of :func:`lsr_head`.

    Returns:
        ``[B, V]`` ``torch.sparse_csr`` tensor with int64 indices, sorted within each row; with DTensor arguments the
        plain, whole tensor on every rank.
    """
    if not isinstance(weight, QuantizedWeight) and _parallel.is_distributed(hidden, weight, bias):
        layout = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens}
        options = {"pooling": pooling, "activation": activation, "logit_scale": logit_scale, "out_dtype": out_dtype}
        options |= {"top_k": top_k, "min_weight": min_weight, "impl": impl}
        return _parallel.parallel_head_sparse(lsr_head_sparse, hidden, weight, bias, layout, options)
    inputs = (attention_mask, cu_seqlens, pooling, activation, logit_scale)
    if isinstance(weight, QuantizedWeight):
        out_dtype, _ = check_quantized_head(hidden, weight, bias, *inputs, out_dtype, impl)
    else:
        out_dtype = check_out_dtype(out_dtype, check_head(hidden, weight, bias, *inputs))
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k must be a positive integer or None, got {top_k!r}.")
    if not isinstance(min_weight, (int, float)) or math.isnan(min_weight):
        raise ValueError(f"min_weight must be a Python number, got {min_weight!r}; -inf keeps every entry.")
    vocab = weight.size(0)
    rows = SparseRows(batch_size(hidden, cu_seqlens), vocab, top_k, min_weight, hidden.device)
    with torch.no_grad():
        for v0 in range(0, vocab, SPARSE_BLOCK_V):
            v1 = min(v0 + SPARSE_BLOCK_V, vocab)
            scores = lsr_head(
                hidden,
                weight[v0:v1],
                None if bias is None else bias[v0:v1],
                attention_mask=attention_mask,
                cu_seqlens=cu_seqlens,
                pooling=pooling,
                activation=activation,
                logit_scale=logit_scale,
                out_dtype=torch.promote_types(hidden.dtype, torch.float32),
                impl=impl,
            )
            rows.add(scores, v0)
        return rows.to_csr(out_dtype)


def _run_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    pooling: str,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        if cu_seqlens is not None:
            _library.check_cu_seqlens(cu_seqlens, hidden.size(0))
            lengths = cu_seqlens[1:] - cu_seqlens[:-1]
            longest = int(lengths.max()) if lengths.numel() else 0
            valid = sequence_mask(cu_seqlens, longest)
            padded = hidden.new_zeros(*valid.shape, hidden.size(1))
            hidden = padded.index_put(valid.nonzero(as_tuple=True), hidden)
        elif attention_mask is None:
            valid = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        else:
            valid = attention_mask != 0
        if hidden.size(1) == 0:
            return (hidden.sum() + weight.sum()).to(out_dtype) * hidden.new_zeros(
                hidden.size(0), weight.size(0), dtype=out_dtype
            )
        return _reference.lsr_head(hidden, weight, bias, valid, pooling, activation, float(logit_scale), out_dtype)


def _pooled_token(
    hidden: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, *, last: bool
) -> tuple[Tensor, Tensor]:
    """The first or last valid token of each sequence ``[B, D]``, zeros where there is none, and ``[B]`` valid."""
    broken = None
    if cu_seqlens is not None:
        cu_seqlens, rows = _library.checked_cu_seqlens(cu_seqlens, hidden.size(0)), hidden.size(0)
        broken = _library.broken_cu_seqlens(cu_seqlens, rows)
        valid = (cu_seqlens.diff() > 0) | broken
        row = (cu_seqlens[1:] - 1 if last else cu_seqlens[:-1]).clamp(0, max(rows - 1, 0))
        flat = hidden
    else:
        batch, length, dim = hidden.shape
        flat = hidden.reshape(batch * length, dim)
        mask = hidden.new_ones(batch, length) if attention_mask is None else attention_mask
        places = torch.arange(length, device=hidden.device)
        if last:
            place = torch.where(mask != 0, places, -1).amax(dim=1) if length else mask.new_full((batch,), -1)
        else:
            place = torch.where(mask != 0, places, length).amin(dim=1) if length else mask.new_zeros(batch)
        valid = (place >= 0) & (place < length)
        row = place.long() + torch.arange(batch, device=hidden.device) * length
    if flat.size(0) == 0:
        nothing = hidden.sum(dim=tuple(range(hidden.dim() - 1)))  # zeros [D] that keep the graph
        token = nothing.expand(valid.numel(), -1)
        valid = torch.zeros_like(valid) if broken is None else valid & broken
    else:
        token = flat[torch.where(valid, row, 0)]
    token = token.masked_fill(~valid[:, None], 0)
    if broken is not None:
        token = token.masked_fill(broken, math.nan)
    return token, valid
