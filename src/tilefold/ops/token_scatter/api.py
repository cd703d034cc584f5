"""Public functions of the token scatter: checks and dispatch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from tilefold.ops._shared.activation import ACTIVATIONS
from tilefold.ops._shared.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_out_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    check_tokens,
)
from tilefold.ops._shared.operator import Checked, Operator
from tilefold.ops.token_scatter import _reference, _tiled
from tilefold.ops.token_scatter._problem import (
    ScatterOptions,
    ScatterSaved,
    ScatterTensors,
    checked_valid_tokens,
    outputs,
)

REDUCTIONS = ("max", "sum")
MAX_IGNORED = 64  # ids, each of which is a comparison in the kernels


SCATTER = Operator(
    "token_scatter",
    ScatterTensors,
    ScatterOptions,
    ScatterSaved,
    results=("scores", "counted"),
    outputs=outputs,
    gradients={"weights": "weights"},
    plans=partial(importlib.import_module, "tilefold.ops.token_scatter.plans"),  # needs Triton
    tiled=_tiled,
    reference=_reference.token_scatter,
    check_values=checked_valid_tokens,
)


def chosen_impl(weights: Tensor, impl: str = "auto") -> str:
    """Return the implementation that ``token_scatter(weights, ..., impl=impl)`` runs.

    ``"auto"`` chooses ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that can run the
    kernels, and else ``"tiled"``.
    """
    return SCATTER.chosen_impl(weights, impl)


def token_scatter(
    weights: Tensor,
    input_ids: Tensor,
    vocab_size: int,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reduce: str = "max",
    activation: str = "relu",
    ignore_ids: Iterable[int] | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> Tensor:
    """Score every vocabulary entry by the weights of the tokens with its id, without ``[B, S, V]``.

    This is the lexical head of uniCOIL (arXiv 2106.14807), DeepImpact (arXiv 2104.12016) and BGE-M3
    (arXiv 2402.03216). Over the valid tokens s of sequence b with ``input_ids[b, s] == v``::

        max: out[b, v] = max(0, max_s act(weights[b, s]))
        sum: out[b, v] = sum_s act(weights[b, s])

    An entry that no token has scores 0. Only ``activation="none"`` has negative values: with
    ``"max"`` they give 0 without a gradient, and with ``"sum"`` they keep their sign. The winner is
    chosen by the weights, before they are rounded to scores. Among equal weights the lowest token
    wins, and gets the gradient. A masked or ignored token does not count and has a gradient of 0,
    for any weight and id. A NaN weight makes its entry NaN.

    Results and gradients have the same bits in every run. On a GPU, the sum of an entry is computed
    in fixed point, in a unit that follows from its largest value. In a sequence of 8,192 tokens,
    values below ``2^-47`` of the largest one add nothing (``2^(k - 61)`` for fewer than ``2^k``
    tokens). So a sum of values of one sign is 0 only if all values are 0, and its logarithm is
    finite otherwise, with ``"softplus"`` down to weights of about -87 (fp32's smallest number).

    Args:
        weights: ``[B, S]`` or ``[B, S, 1]`` (the output of a linear layer with one feature), or
            packed ``[T]`` or ``[T, 1]`` with ``cu_seqlens``; fp16, bf16, fp32 or fp64.
        input_ids: ``[B, S]`` or packed ``[T]``, int32 or int64, in ``0 .. vocab_size - 1`` for
            tokens that are neither masked nor ignored. Another id raises an error on the CPU. On a
            GPU, where a check would synchronise, it makes its sequence's scores NaN.
        vocab_size: V, the number of columns.
        attention_mask: ``[B, S]``, nonzero for valid tokens, in any pattern.
        cu_seqlens: ``[B + 1]`` int32 or int64, ``0 = cu_seqlens[0] <= ... <= cu_seqlens[B] = T``.
            Other values raise an error on the CPU, and make every score NaN on a GPU.
        reduce: ``"max"`` or ``"sum"``.
        activation: ``"relu"``, ``"log1p_relu"``, ``"log1p_log1p_relu"``, ``"softplus"`` or
            ``"none"``.
        ignore_ids: ids whose tokens get no score, at most 64, such as CLS, SEP, PAD and UNK. They
            may be outside of the vocabulary.
        out_dtype: dtype of the scores; by default that of ``weights``.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see :func:`chosen_impl`.

    Returns:
        ``[B, V]`` scores.

    Raises:
        TypeError: if an argument is not a tensor, or has an unsupported dtype.
        ValueError: if shapes, devices, ids, ``cu_seqlens`` or options are inconsistent.
        RuntimeError: if ``impl="triton"`` cannot run here.

    Examples:
        >>> import torch
        >>> weights = torch.tensor([[0.5, 2.0, 1.0]])  # one weight per token
        >>> input_ids = torch.tensor([[3, 1, 3]])
        >>> token_scatter(weights, input_ids, vocab_size=5)
        tensor([[0., 2., 0., 1., 0.]])
        >>> token_scatter(weights, input_ids, vocab_size=5, reduce="sum", ignore_ids=[1])
        tensor([[0.0000, 0.0000, 0.0000, 1.5000, 0.0000]])
    """
    tensors = ScatterTensors(weights, input_ids, attention_mask, cu_seqlens)
    ignored = () if ignore_ids is None else _as_tuple(ignore_ids)
    options = (vocab_size, reduce, activation, ignored, out_dtype)
    scores: Tensor = SCATTER(tensors, options, impl, _check_arguments)[0]
    return scores


def token_scatter_sparse(
    weights: Tensor,
    input_ids: Tensor,
    vocab_size: int,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reduce: str = "max",
    activation: str = "relu",
    ignore_ids: Iterable[int] | None = None,
    out_dtype: torch.dtype | None = None,
    top_k: int | None = None,
    min_weight: float = 0.0,
) -> Tensor:
    """Compute the scores above ``min_weight`` as a sparse CSR tensor, without a dense ``[B, V]``.

    This is :func:`token_scatter` for encoding. It sorts the valid tokens by sequence and id, in
    torch on all devices. Scores are selected in fp32 (fp64 for fp64 input). The result is not
    differentiable. The CPU reads values to determine the number of entries, so that invalid ids or
    offsets raise an error on every device.

    Args:
        weights, input_ids, vocab_size, attention_mask, cu_seqlens, reduce, activation, ignore_ids,
            out_dtype: those of :func:`token_scatter`.
        top_k: largest number of entries per row. The largest scores are selected, and among equal
            ones those with the lowest vocabulary index. ``None`` selects all.
        min_weight: only entries strictly greater than this are selected. NaN always is, so that it
            is noticed. If it is negative, scores of 0 are also selected for terms that occur.

    Returns:
        ``[B, V]`` ``torch.sparse_csr`` tensor with int64 indices, sorted within each row.

    Raises:
        TypeError, ValueError: as :func:`token_scatter`.

    Examples:
        >>> import torch
        >>> weights = torch.tensor([[0.5, 2.0, 1.0]])
        >>> rows = token_scatter_sparse(weights, torch.tensor([[3, 1, 3]]), vocab_size=5)
        >>> rows.col_indices().tolist(), rows.values().tolist()
        ([1, 3], [2.0, 1.0])
    """
    tensors = ScatterTensors(weights, input_ids, attention_mask, cu_seqlens)
    ignored = () if ignore_ids is None else _as_tuple(ignore_ids)
    checked = _check_arguments(tensors, vocab_size, reduce, activation, ignored, out_dtype)
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k must be a positive integer or None, got {top_k!r}.")
    if not isinstance(min_weight, (int, float)) or math.isnan(min_weight):
        raise ValueError(
            f"min_weight must be a Python number, got {min_weight!r}; -inf keeps every entry.",
        )
    with torch.no_grad():
        if checked.prepare is not None:
            tensors = checked.prepare(tensors)
        return _tiled.to_csr(tensors, checked.options, top_k, min_weight)


def _check_arguments(
    tensors: ScatterTensors,
    vocab_size: int,
    reduce: str,
    activation: str,
    ignored: tuple[int, ...],
    out_dtype: torch.dtype | None,
) -> Checked:
    """Check the arguments of a call, without reading a value of a tensor.

    The operator's weights have the shape of ``input_ids``, so a last dimension of 1 is removed.

    Args:
        tensors: tensors of the call.
        vocab_size: V.
        reduce: name of the reduction.
        activation: name of the activation.
        ignored: ids of tokens that do not count.
        out_dtype: dtype of the scores; ``None`` for that of the weights.

    Returns:
        The options of the operator and, if weights have a last dimension of 1, the function that
        removes it.
    """
    weights, input_ids, attention_mask, cu_seqlens = tensors
    if out_dtype is None:
        out_dtype = check_tensor("weights", weights).dtype
    else:
        check_out_dtype(out_dtype)
    if len({*ignored}) > MAX_IGNORED:
        raise ValueError(
            f"ignore_ids must be at most {MAX_IGNORED} ids, got {len({*ignored})}; "
            "mask more of them: attention_mask = mask * ~torch.isin(input_ids, ids).",
        )
    check_choice("reduce", reduce, REDUCTIONS)
    check_choice("activation", activation, ACTIVATIONS)
    if (
        isinstance(vocab_size, bool)
        or not isinstance(vocab_size, (int, torch.SymInt))
        or vocab_size < 1
    ):
        raise ValueError(f"vocab_size must be a positive integer, got {vocab_size!r}.")
    check_tensor("weights", weights)
    check_tensor("input_ids", input_ids)
    check_dtype(
        "weights",
        weights,
        FLOAT_DTYPES,
        "cast it with .to(torch.float32) or another of these.",
    )
    check_dtype("input_ids", input_ids, (torch.int32, torch.int64), "use input_ids.long().")
    layout = "B S" if cu_seqlens is None else "T"
    check_shape("input_ids", input_ids, layout)
    has_feature_dim = weights.dim() == input_ids.dim() + 1 and weights.size(-1) == 1
    if has_feature_dim:
        weights = weights.squeeze(-1)
    sizes = dict(zip(layout.split(), input_ids.shape, strict=True))
    check_shape("weights", weights, layout, **sizes)
    check_tokens(attention_mask, cu_seqlens, batch=input_ids.size(0), length=input_ids.size(-1))
    others = {"input_ids": input_ids, "attention_mask": attention_mask, "cu_seqlens": cu_seqlens}
    check_same_device("weights", weights, others)
    # An id outside int64 occurs in no token.
    int64_ids = tuple(i for i in sorted({*ignored}) if -(1 << 63) <= i < 1 << 63)
    options = ScatterOptions(vocab_size, reduce, activation, int64_ids, out_dtype)
    return Checked(options, _squeeze_weights if has_feature_dim else None)


def _squeeze_weights(tensors: ScatterTensors) -> ScatterTensors:
    """Remove the last dimension of the weights."""
    return tensors._replace(weights=tensors.weights.squeeze(-1))


def _as_tuple(ignore_ids: Iterable[int]) -> tuple[int, ...]:
    """Check ``ignore_ids``, and return them as a tuple, which a cache key can contain.

    The cache of calls cannot distinguish ``True`` from 1, which are equal as keys, so every call
    checks the types.

    Raises:
        TypeError: if an id is not an integer.
    """
    if isinstance(ignore_ids, Tensor):
        raise TypeError(
            "ignore_ids must be Python integers, got a Tensor; use ignore_ids.tolist().",
        )
    try:
        ids = tuple(ignore_ids)
    except TypeError:
        raise TypeError(
            f"ignore_ids must be integers in a list, got {ignore_ids!r}; write [{ignore_ids!r}].",
        ) from None
    if {int}.issuperset(map(type, ids)):  # faster than a loop in Python
        return ids
    for i in ids:  # names the first bad id; subclasses of int are integers too
        if isinstance(i, bool) or not isinstance(i, int):
            raise TypeError(
                f"ignore_ids must be integers, got {i!r} among them; remove None for special "
                "tokens that the tokenizer does not have.",
            )
    return ids
