"""Checks of MaxSim's arguments, and the problem that they describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import cross_entropy

from tilefold.ops._shared.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    dtype_name,
)
from tilefold.ops._shared.impl import IMPLS, check_interpreted, settled
from tilefold.ops._shared.internals import no_dispatch_mode
from tilefold.ops._shared.library import PLAIN, is_plain
from tilefold.ops._shared.tf32 import tf32_allowed
from tilefold.ops.maxsim._choice import chosen_impl
from tilefold.ops.maxsim._library import check_values_of
from tilefold.ops.maxsim._problem import IMPL, Problem, wide_dtype
from tilefold.ops.maxsim.quantized import QuantizedTokens

PAIRINGS = ("all", "aligned", "grouped")
REDUCTIONS = ("sum", "mean")
MASK_MODES = ("exclude", "zero")
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)


class Request(NamedTuple):
    """What a call asks for, checked.

    Attributes:
        problem: rows, layout and options; not to be computed where ``empty``.
        scales: ``[Td]`` of quantized documents, or ``None``.
        shape: of the scores.
        impl: the implementation that runs.
        empty: whether one side has no element, so that every score is 0.
    """

    problem: Problem
    scales: Tensor | None
    shape: tuple[int, ...]
    impl: str
    empty: bool


def prepare(
    queries: Tensor,
    documents: Tensor | QuantizedTokens,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    pairing: str | Tensor = "all",
    reduction: str = "sum",
    mask_mode: str = "exclude",
    temperature: float | None = None,
    normalize: bool = False,
    impl: str = "auto",
    signature: tuple[Any, ...] | None = None,
) -> Request:
    """Check the arguments of :func:`tilefold.ops.maxsim` and say what they ask for.

    ``signature`` is the call's :func:`call_signature`, if it has one.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`tilefold.ops.maxsim`.
    """
    if signature is not None and not no_dispatch_mode():  # a transform's call is checked anew: some are refused
        signature = None
    seen = None if signature is None else _SEEN.get(signature)
    scales: Tensor | None = None
    if seen is not None:
        if isinstance(documents, QuantizedTokens):
            scales, documents = documents.scales.reshape(-1).contiguous(), documents.values
        rest = (cu_seqlens_q, cu_seqlens_d, seen.mode, mask_mode, temperature, normalize)
        problem = _problem(queries, documents, query_mask, document_mask, None, *rest)
        problem.plans, problem.final_shape = seen.plans, seen.shape
        return Request(problem, scales, seen.shape, seen.impl, seen.empty)
    index, mode = _check_options(pairing, reduction, mask_mode, temperature)
    if isinstance(documents, QuantizedTokens):
        _check_quantized(queries, normalize)
        scales = documents.scales.reshape(-1).contiguous()
        documents = documents.values
    _check_side("queries", queries, query_mask, cu_seqlens_q, False, FLOAT_DTYPES)
    _check_side(
        "documents",
        documents,
        document_mask,
        cu_seqlens_d,
        mode == "grouped",
        FLOAT_DTYPES if scales is None else QUANTIZED_DTYPES,
    )
    _check_together(queries, documents, query_mask, document_mask, cu_seqlens_q, cu_seqlens_d, index)
    if scales is None:
        queries, documents = _cast(queries, documents)
    if torch.compiler.is_compiling():
        check_choice("impl", impl, IMPLS)  # the operators choose when they run: a device cannot be asked in a trace
    else:
        impl = settled(impl, chosen_impl(queries, impl))
        check_interpreted(impl, queries.device, queries.dtype)
    n_queries = queries.size(0) if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    n_documents = documents.shape[:-2].numel() if cu_seqlens_d is None else cu_seqlens_d.numel() - 1
    _check_counts(mode, n_queries, n_documents, documents, cu_seqlens_d)
    group = documents.size(1) if documents.dim() == 4 else n_documents // max(n_queries, 1)
    shape = _score_shape(mode, index, n_queries, n_documents, group)
    rest = (cu_seqlens_q, cu_seqlens_d, mode, mask_mode, temperature, normalize)
    problem = _problem(queries, documents, query_mask, document_mask, index, *rest)
    empty = queries.numel() == 0 or documents.numel() == 0
    if empty and queries.device.type == "cpu" and is_plain(queries, documents, cu_seqlens_q, cu_seqlens_d, index):
        check_values_of(problem, n_queries, n_documents)  # no implementation will
    if signature is not None:
        if len(_SEEN) >= MOST_SEEN:
            _SEEN.clear()
        problem.plans, problem.final_shape = {IMPL: impl}, shape
        _SEEN[signature] = _Seen(mode, shape, impl, empty, problem.plans)
    return Request(problem, scales, shape, impl, empty)


def _problem(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    index: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_d: Tensor | None,
    mode: str,
    mask_mode: str,
    temperature: float | None,
    normalize: bool,
) -> Problem:
    return Problem(
        queries.reshape(-1, queries.size(-1)),
        documents.reshape(-1, documents.size(-1)),
        None if query_mask is None else query_mask.reshape(-1),
        None if document_mask is None else document_mask.reshape(-1),
        cu_seqlens_q,
        cu_seqlens_d,
        0 if cu_seqlens_q is not None else queries.size(-2),
        0 if cu_seqlens_d is not None else documents.size(-2),
        index,
        "grouped" if mode == "aligned" else mode,
        mask_mode == "zero",
        0.0 if temperature is None else float(temperature),
        normalize,
        _longest_query(queries, documents, cu_seqlens_q, index),
    )


class _Seen(NamedTuple):
    """What was found about a call that passed the checks."""

    mode: str
    shape: tuple[int, ...]
    impl: str
    empty: bool
    plans: dict[Any, Any]


# Checks take longer than a small kernel. On a GPU they look at nothing but what makes a signature, so a call like one
# that passed passes.
_SEEN: dict[tuple[Any, ...], _Seen] = {}
MOST_SEEN = 4096


def plans_of(signature: tuple[Any, ...]) -> dict[Any, Any] | None:
    """What calls of this signature worked out, if there were any."""
    seen = _SEEN.get(signature)
    return None if seen is None else seen.plans


def call_signature(
    queries: Tensor,
    documents: Tensor | QuantizedTokens,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_d: Tensor | None,
    options: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """Shapes, dtypes, device and options of a call, or ``None`` where the checks depend on more.

    ``options`` begin with the pairing. Written out, without loops: a third of a small call was spent here.
    """
    if torch.compiler.is_compiling() or type(queries) not in PLAIN or not queries.is_cuda:
        return None
    if forward_ad._current_level >= 0:  # to be refused
        return None
    quantized = type(documents) is QuantizedTokens
    rows: Any = documents.values if quantized else documents
    if type(rows) not in PLAIN or not rows.is_cuda or type(options[0]) is not str:
        return None
    device, dtype = queries.get_device(), queries.dtype
    masks = offsets = None
    if query_mask is not None or document_mask is not None:
        masks = _facts(query_mask, device), _facts(document_mask, device)
    if cu_seqlens_q is not None or cu_seqlens_d is not None:
        offsets = _facts(cu_seqlens_q, device), _facts(cu_seqlens_d, device)
    if (
        rows.get_device() != device
        or (quantized and queries.requires_grad and torch.is_grad_enabled())
        or (masks is not None and False in masks)
        or (offsets is not None and False in offsets)
        # autocast must have nothing to cast
        or (torch.is_autocast_enabled("cuda") and not dtype == rows.dtype == torch.get_autocast_dtype("cuda"))
    ):
        return None
    tf32 = tf32_allowed(dtype)
    return queries.shape, dtype, rows.shape, rows.dtype, device, quantized, masks, offsets, tf32, options


def _facts(tensor: Tensor | None, device: int) -> tuple[Any, ...] | bool | None:
    """Shape and dtype of a mask or offsets on the ``device``, and ``False`` for anything else but ``None``."""
    if tensor is None:
        return None
    if type(tensor) not in PLAIN or not tensor.is_cuda or tensor.get_device() != device:
        return False
    return tensor.shape, tensor.dtype


def zeros(request: Request) -> Tensor:
    """The scores of an ``empty`` request, part of the graph."""
    problem = request.problem
    nothing = problem.queries[..., :0].sum()
    if problem.documents.dtype in FLOAT_DTYPES:
        nothing = nothing + problem.documents[..., :0].sum()
    return nothing.to(wide_dtype(problem.queries.dtype)).expand(request.shape).contiguous()


def _check_options(
    pairing: object, reduction: object, mask_mode: object, temperature: object
) -> tuple[Tensor | None, str]:
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("mask_mode", mask_mode, MASK_MODES)
    if temperature is not None and (
        isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf
    ):
        raise ValueError(f"temperature must be a positive Python number or None, got {temperature!r}.")
    if isinstance(pairing, Tensor):
        if pairing.dim() != 2 or pairing.size(1) != 2:
            raise ValueError(f"pairing must have shape [P, 2], got {list(pairing.shape)}.")
        check_dtype("pairing", pairing, (torch.int32, torch.int64), "use pairing.long().")
        return pairing, "index"
    if pairing not in PAIRINGS:
        listed = ", ".join(repr(name) for name in PAIRINGS)
        raise ValueError(f"pairing must be one of {listed}, or an integer tensor [P, 2], got {pairing!r}.")
    return None, str(pairing)


def _check_quantized(queries: object, normalize: bool) -> None:
    if isinstance(queries, Tensor) and queries.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "documents must be a floating tensor where a gradient is asked for, got QuantizedTokens; score under "
            "torch.no_grad(), or give documents.dequantize()."
        )
    if normalize:
        raise ValueError(
            "normalize must be False with quantized documents, got True; normalize the vectors before quantize_tokens, "
            "and the queries."
        )


def _check_side(
    name: str,
    rows: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    grouped: bool,
    dtypes: Sequence[torch.dtype],
) -> None:
    mask_name, cu_name = ("query_mask", "cu_seqlens_q") if name == "queries" else ("document_mask", "cu_seqlens_d")
    check_tensor(name, rows)
    spec = "T D" if cu_seqlens is not None else "B N L D" if grouped else "N L D"
    check_shape(name, rows, spec)
    check_dtype(name, rows, dtypes, "cast it with .to(torch.bfloat16) or another of these.")
    if rows.size(-1) == 0:
        raise ValueError(f"{name} must have D of at least 1, got D=0 in shape {list(rows.shape)}.")
    if mask is not None:
        check_tensor(mask_name, mask)
        if mask.is_complex():
            raise TypeError(f"{mask_name} must be bool, integer or floating, got {mask.dtype}.")
        if mask.shape != rows.shape[:-1]:
            raise ValueError(f"{mask_name} must have shape {list(rows.shape[:-1])}, got {list(mask.shape)}.")
    if cu_seqlens is not None:
        check_tensor(cu_name, cu_seqlens)
        check_dtype(cu_name, cu_seqlens, (torch.int32, torch.int64), f"use {cu_name}.int().")
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
            raise ValueError(f"{cu_name} must have shape [N + 1], got {list(cu_seqlens.shape)}.")


def _check_together(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_d: Tensor | None,
    index: Tensor | None,
) -> None:
    if documents.size(-1) != queries.size(-1):
        raise ValueError(
            f"documents must have the D of queries ({queries.size(-1)}), got {documents.size(-1)} in shape "
            f"{list(documents.shape)}."
        )
    others = {
        "documents": documents,
        "query_mask": query_mask,
        "document_mask": document_mask,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_d": cu_seqlens_d,
        "pairing": index,
    }
    check_same_device("queries", queries, others)


def _cast(queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    device_type = queries.device.type
    if (
        torch.float64 not in (queries.dtype, documents.dtype)
        and device_type != "meta"  # has no autocast state to ask for
        and torch.is_autocast_enabled(device_type)
    ):
        dtype = torch.get_autocast_dtype(device_type)
        return queries.to(dtype), documents.to(dtype)
    if documents.dtype != queries.dtype:
        raise TypeError(
            f"documents must have the dtype of queries ({dtype_name(queries.dtype)}), got "
            f"{dtype_name(documents.dtype)}; cast one of them, or run under torch.autocast."
        )
    return queries, documents


def _check_counts(mode: str, n_queries: int, n_documents: int, documents: Tensor, cu_seqlens_d: Tensor | None) -> None:
    if mode == "aligned" and n_queries != n_documents:
        raise ValueError(
            f"documents must be as many as queries ({n_queries}) for pairing='aligned', got {n_documents}."
        )
    if mode == "grouped":
        fits = n_documents % max(n_queries, 1) == 0 if cu_seqlens_d is not None else documents.size(0) == n_queries
        if not fits:
            raise ValueError(
                f"documents must come in one group of equal size for each of the {n_queries} queries for "
                f"pairing='grouped', got {n_documents} documents in shape {list(documents.shape)}."
            )


def _score_shape(mode: str, index: Tensor | None, n_queries: int, n_documents: int, group: int) -> tuple[int, ...]:
    if index is not None:
        return (index.size(0),)
    if mode == "all":
        return (n_queries, n_documents)
    return (n_queries,) if mode == "aligned" else (n_queries, group)


def _longest_query(queries: Tensor, documents: Tensor, cu_seqlens_q: Tensor | None, index: Tensor | None) -> int:
    if index is None:
        return 0
    if cu_seqlens_q is None:
        return queries.size(-2)
    if torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad) and cu_seqlens_q.numel() > 1:
        return int(cu_seqlens_q.diff().max())
    return 0


def check_scale(scale: object) -> None:
    """Raise ``ValueError`` unless ``scale`` is a finite number."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite Python number, got {scale!r}; multiply queries to learn one.")


def check_labels(labels: Tensor | None, n_queries: int, n_documents: int, device: torch.device) -> Tensor:
    """The document of each query, checked as far as the host can see without waiting; see :func:`labelled_loss`."""
    if labels is None:
        if n_documents < n_queries:
            raise ValueError(
                f"documents must be at least as many as queries ({n_queries}) without labels, got {n_documents}."
            )
        return torch.arange(n_queries, device=device)
    check_tensor("labels", labels)
    check_dtype("labels", labels, (torch.int64,), "use labels.long().")
    if labels.shape != (n_queries,):
        raise ValueError(f"labels must have shape [{n_queries}], got {list(labels.shape)}.")
    if labels.device != device:
        raise ValueError(f"labels must be on the device of queries ({device}), got {labels.device}; move it there.")
    if n_queries and not n_documents:
        raise ValueError("documents must be at least one with labels, got none; leave such batches out.")
    if device.type == "cpu" and n_queries and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= n_documents:
            raise ValueError(
                f"labels must be at least 0 and below the number of documents ({n_documents}), got "
                f"{low if low < 0 else high}."
            )
    return labels


def labelled_loss(
    scores: Tensor, labels: Tensor | None, checked: Tensor, n_documents: int, first: int = 0, reduction: str = "mean"
) -> Tensor:
    """Cross entropy of ``scores`` at the ``checked`` labels plus ``first``, NaN with a label out of range.

    Where the host does not look at the ``labels`` (a GPU, a compiled function), one out of range would be an assertion
    in a kernel, after which nothing runs on the device any more, or another rank's document.
    """
    if labels is None or (labels.device.type == "cpu" and not torch.compiler.is_compiling()):
        return cross_entropy(scores, checked + first if first else checked, reduction=reduction)
    within = checked.clamp(0, max(n_documents - 1, 0))
    # a factor, so that gradients are NaN too
    factor = torch.where((within == checked).all(), 1.0, math.nan)
    return cross_entropy(scores, within + first if first else within, reduction=reduction) * factor
