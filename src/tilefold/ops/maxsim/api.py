"""Late-interaction scores, public functions: arguments, checks and dispatch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilefold.ops._shared.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    dtype_name,
)
from tilefold.ops._shared.impl import IMPLS
from tilefold.ops.maxsim import _library, _reference
from tilefold.ops.maxsim._choice import chosen_impl
from tilefold.ops.maxsim._problem import Problem, wide_dtype
from tilefold.ops.maxsim.quantized import QuantizedTokens, quantize_rows

PAIRINGS = ("all", "aligned", "grouped")
REDUCTIONS = ("sum", "mean")
MASK_MODES = ("exclude", "zero")
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)


def maxsim(
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
) -> Tensor:
    """Late-interaction scores (ColBERT, arXiv 2004.12832) without the similarities ``[Nq, Nd, Lq, Ld]``.

    For a query with token vectors ``q_i`` and a document with token vectors ``d_j``, over the kept tokens::

        score = sum_i max_j q_i . d_j                                   (reduction="mean": divided by the count of i)
        score = sum_i temperature * log sum_j exp(q_i . d_j / temperature)              (with a temperature)

    Products accumulate in fp32 (fp64 for fp64 input), maxima and sums are taken on those values, and the scores are
    fp32 (fp64). Among equal similarities the lowest document token wins and takes the whole gradient. A document
    without a token that takes part scores 0 with every query, with no gradient, and so does an empty query. NaN in a
    kept token gives NaN; what a masked token holds is never read into a result. Backward is bitwise deterministic and
    keeps 2 bytes (4 from 65,536 document tokens on, and with a temperature) a query token and pair.

    Args:
        queries: ``[Nq, Lq, D]``, or ``[T, D]`` packed with ``cu_seqlens_q``; fp16, bf16, fp32 or fp64.
        documents: ``[Nd, Ld, D]`` (``[B, N, Ld, D]`` for ``"grouped"``), or ``[T, D]`` packed with ``cu_seqlens_d``;
            dtype of ``queries`` (any floating dtype under autocast, whose dtype both then take). Or the same in
            :class:`QuantizedTokens`, for inference: with int8 the queries are rounded to int8 too, products are exact
            integers; with fp8 they stay as they are.
        query_mask, document_mask: their tokens' shape, without D; nonzero = keep, in any pattern.
        cu_seqlens_q, cu_seqlens_d: ``[N + 1]`` int32 first rows of packed sequences, from 0 to T. On the CPU other
            values raise; on a GPU, where looking costs a synchronisation, the pairs concerned score NaN.
        pairing: which pairs are scored. ``"all"``; ``"aligned"`` (query b with document b); ``"grouped"`` (query b
            with its own N documents; packed documents follow each other group by group); or a ``[P, 2]`` integer
            tensor of (query, document) pairs, which are scored in place, without a gathered copy.
        reduction: ``"sum"``, or ``"mean"`` over the query's kept tokens.
        mask_mode: what becomes of a masked document token: ``"exclude"`` leaves it out; ``"zero"`` lets it take part
            with a similarity of 0, as libraries do that multiply similarities by the mask. A masked query token
            counts 0 in both.
        temperature: positive number for the smooth maximum, ``None`` for the maximum.
        normalize: divide every token vector by its Euclidean norm; a zero vector stays zero and has no gradient.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see :func:`chosen_impl`.

    Returns:
        Scores: ``[Nq, Nd]`` for ``"all"``, ``[B]`` for ``"aligned"``, ``[B, N]`` for ``"grouped"``, ``[P]`` for pairs.

    With packed queries, an index and a gradient asked for, the longest query is read from the device once.

    Raises:
        TypeError: for arguments that are no tensors, or of a dtype that is not supported.
        ValueError: for shapes, devices, offsets, indices or options that do not fit together.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    index, mode = _check_options(pairing, reduction, mask_mode, temperature)
    scales = None
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
        impl = chosen_impl(queries, impl)
    n_queries = queries.size(0) if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    n_documents = documents.shape[:-2].numel() if cu_seqlens_d is None else cu_seqlens_d.numel() - 1
    _check_counts(mode, n_queries, n_documents, documents, cu_seqlens_d)
    shape = _score_shape(mode, index, n_queries, n_documents)
    if queries.numel() == 0 or documents.numel() == 0:
        nothing = (queries[..., :0].sum() + documents[..., :0].sum()).to(
            wide_dtype(queries.dtype)
        )  # 0 that keeps the graph
        return nothing.expand(shape).contiguous()
    problem = Problem(
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
    if impl == "reference":
        with torch.autocast(queries.device.type, enabled=False):
            _library.check_values(problem, impl)
            scores = _reference.maxsim(problem if scales is None else _dequantized(problem, scales))
    elif scales is not None:
        scores = _library.quantized_scores(problem, scales, impl)
    else:
        scores = _library.scores(problem, impl)
    if reduction == "mean":
        scores = scores / _kept_tokens(problem)
    return scores.view(shape)


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


def _dequantized(problem: Problem, scales: Tensor) -> Problem:
    """What the quantized operator stands for, in fp64."""

    def int8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows(rows, torch.int8)

    p = problem
    rest = (
        p.query_mask, p.document_mask, p.cu_queries, p.cu_documents, p.query_length, p.document_length, p.index,
        p.pairing, p.mask_zero, p.temperature,
    )  # fmt: skip
    q = _library.quantized_problem(p.queries, p.documents, scales, *rest, int8_rows=int8_rows)
    if q.query_scale is None or q.document_scale is None:
        raise ValueError("documents must come with their scales, got none; make them with quantize_tokens.")
    queries = q.queries.double() * q.query_scale.double()[:, None]
    documents = q.documents.float().double() * q.document_scale.double()[:, None]
    return Problem(queries, documents, *rest, False, 0)


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


def _score_shape(mode: str, index: Tensor | None, n_queries: int, n_documents: int) -> tuple[int, ...]:
    if index is not None:
        return (index.size(0),)
    if mode == "all":
        return (n_queries, n_documents)
    return (n_queries,) if mode == "aligned" else (n_queries, n_documents // max(n_queries, 1))


def _longest_query(queries: Tensor, documents: Tensor, cu_seqlens_q: Tensor | None, index: Tensor | None) -> int:
    if index is None:
        return 0
    if cu_seqlens_q is None:
        return queries.size(-2)
    if torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad) and cu_seqlens_q.numel() > 1:
        return int(cu_seqlens_q.diff().max())
    return 0


def _kept_tokens(problem: Problem) -> Tensor | float:
    """Kept tokens of each score's query, at least 1."""
    if problem.query_mask is None and problem.cu_queries is None:
        return float(problem.query_length)
    if problem.cu_queries is None:
        kept = (problem.query_mask != 0).view(-1, problem.query_length).sum(dim=1)  # type: ignore[union-attr]
    elif problem.query_mask is None:
        kept = problem.cu_queries.diff()
    else:
        before = torch.nn.functional.pad((problem.query_mask != 0).cumsum(0), (1, 0))
        kept = before[problem.cu_queries.long().clamp(0, problem.queries.size(0))].diff()
    kept = kept.clamp(min=1).to(torch.float32)
    if problem.pairing == "all":
        return kept[:, None]
    return (
        kept.repeat_interleave(problem.group)
        if problem.index is None
        else kept[problem.index[:, 0].clamp(0, kept.numel() - 1)]
    )
