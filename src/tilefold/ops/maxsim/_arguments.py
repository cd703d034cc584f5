"""Checks of MaxSim's arguments, and the problem that they describe."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilefold.ops._shared.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_offsets,
    check_same_device,
    check_shape,
    check_tensor,
    dtype_name,
)
from tilefold.ops._shared.impl import IMPLS, check_interpreted
from tilefold.ops._shared.library import is_plain
from tilefold.ops.maxsim._problem import Operands, Options, Problem, wide_dtype
from tilefold.ops.maxsim._torch_ops import Call, check_values_of, impl_of
from tilefold.ops.maxsim.quantized import QuantizedTokens

PAIRINGS = ("all", "aligned", "grouped")
REDUCTIONS = ("sum", "mean")
MASK_MODES = ("exclude", "zero")
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)


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
) -> tuple[Operands, Call]:
    """Check the arguments of :func:`tilefold.ops.maxsim` and say what they ask for.

    Returns:
        The tensors, in the dtype of autocast, and everything else.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`tilefold.ops.maxsim`.
    """
    index, mode = _check_options(pairing, reduction, mask_mode, temperature)
    scales: Tensor | None = None
    if isinstance(documents, QuantizedTokens):
        _check_quantized(queries, normalize)
        scales, documents = documents.scales, documents.values
    dtypes = FLOAT_DTYPES if scales is None else QUANTIZED_DTYPES
    _check_side("queries", queries, query_mask, cu_seqlens_q, False, FLOAT_DTYPES)
    _check_side("documents", documents, document_mask, cu_seqlens_d, mode == "grouped", dtypes)
    operands = Operands(queries, documents, query_mask, document_mask, cu_seqlens_q, cu_seqlens_d, index, scales)
    _check_together(operands)
    cast = None if scales is not None else _autocast_dtype(queries, documents)
    operands = cast_to(operands, cast)
    queries, documents = operands.queries, operands.documents
    if torch.compiler.is_compiling():
        check_choice("impl", impl, IMPLS)  # the operators choose when they run: a device cannot be asked in a trace
    else:
        impl = impl_of(queries, documents, impl)
        check_interpreted(impl, queries.device, queries.dtype)
    n_queries = queries.size(0) if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    n_documents = documents.shape[:-2].numel() if cu_seqlens_d is None else cu_seqlens_d.numel() - 1
    _check_counts(mode, n_queries, n_documents, documents, cu_seqlens_d)
    group = documents.size(1) if documents.dim() == 4 else n_documents // max(n_queries, 1)
    options = Options(
        0 if cu_seqlens_q is not None else queries.size(-2),
        0 if cu_seqlens_d is not None else documents.size(-2),
        "grouped" if mode == "aligned" else mode,
        mask_mode == "zero",
        0.0 if temperature is None else float(temperature),
        normalize,
        _longest_query(operands),
    )
    empty = queries.numel() == 0 or documents.numel() == 0
    if empty and queries.device.type == "cpu" and is_plain(queries, documents, cu_seqlens_q, cu_seqlens_d, index):
        check_values_of(Problem.of(operands, options), n_queries, n_documents)  # no implementation will
    return operands, Call(options, _score_shape(mode, index, n_queries, n_documents, group), impl, empty, cast)


def zeros(operands: Operands, call: Call) -> Tensor:
    """The scores of an ``empty`` call, part of the graph."""
    nothing = operands.queries[..., :0].sum()
    if operands.documents.dtype in FLOAT_DTYPES:
        nothing = nothing + operands.documents[..., :0].sum()
    return nothing.to(wide_dtype(operands.queries.dtype)).expand(call.shape).contiguous()


def cast_to(operands: Operands, dtype: torch.dtype | None) -> Operands:
    """Operands with both sides in ``dtype``, if one is given."""
    if dtype is None:
        return operands
    return operands._replace(queries=operands.queries.to(dtype), documents=operands.documents.to(dtype))


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
        check_offsets(cu_name, cu_seqlens, "[N + 1]")


def _check_together(operands: Operands) -> None:
    queries, documents, query_mask, document_mask, cu_seqlens_q, cu_seqlens_d, index, _ = operands
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


def _autocast_dtype(queries: Tensor, documents: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for, if it asks."""
    device_type = queries.device.type
    if (
        torch.float64 not in (queries.dtype, documents.dtype)
        and device_type != "meta"  # has no autocast state to ask for
        and torch.is_autocast_enabled(device_type)
    ):
        return torch.get_autocast_dtype(device_type)
    if documents.dtype != queries.dtype:
        raise TypeError(
            f"documents must have the dtype of queries ({dtype_name(queries.dtype)}), got "
            f"{dtype_name(documents.dtype)}; cast one of them, or run under torch.autocast."
        )
    return None


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


def _longest_query(operands: Operands) -> int:
    queries, documents, offsets = operands.queries, operands.documents, operands.cu_queries
    if operands.pairs is None:
        return 0
    if offsets is None:
        return queries.size(-2)
    if torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad) and offsets.numel() > 1:
        return int(offsets.diff().max())
    return 0
