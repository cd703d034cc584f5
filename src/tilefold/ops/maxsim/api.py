"""Late-interaction scores, public functions: what they compute, and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops.maxsim import _library, _reference
from tilefold.ops.maxsim._arguments import call_signature, plans_of, prepare, zeros
from tilefold.ops.maxsim._problem import Problem, wide_dtype
from tilefold.ops.maxsim.quantized import QuantizedTokens, quantize_rows


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
    tensors = (queries, documents, query_mask, document_mask, cu_seqlens_q, cu_seqlens_d)
    options = (pairing, reduction, mask_mode, type(temperature), temperature, normalize, impl)
    signature = call_signature(*tensors, options)
    if signature is not None:
        try:
            plans = plans_of(signature)
        except TypeError:  # an option that no option can be
            signature = plans = None
        if plans is not None and (known := _library.scores_again(plans, *tensors)) is not None:
            return known if reduction == "sum" else known / _kept_by(known, queries, query_mask, cu_seqlens_q)
    request = prepare(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_d=cu_seqlens_d,
        pairing=pairing,
        reduction=reduction,
        mask_mode=mask_mode,
        temperature=temperature,
        normalize=normalize,
        impl=impl,
        signature=signature,
    )
    problem, scales = request.problem, request.scales
    if request.empty:
        return zeros(request)
    if request.impl == "reference":
        with torch.autocast(problem.queries.device.type, enabled=False):
            _library.check_values(problem, request.impl)
            if scales is None:
                scores = _reference.maxsim(problem)
            else:
                scores = _reference.maxsim(_dequantized(problem, scales)).to(wide_dtype(problem.queries.dtype))
    elif scales is not None:
        scores = _library.quantized_scores(problem, scales, request.impl)
    else:
        scores = _library.scores(problem, request.impl)
    if reduction == "mean":
        scores = scores / kept_tokens(problem)
    return scores.view(request.shape)


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


def kept_tokens(problem: Problem) -> Tensor | float:
    """Kept tokens of each score's query, at least 1."""
    kept = _kept(problem.query_mask, problem.cu_queries, problem.query_length, problem.queries.size(0))
    if isinstance(kept, float):
        return kept
    if problem.pairing == "all":
        return kept[:, None]
    return (
        kept.repeat_interleave(problem.group)
        if problem.index is None
        else kept[problem.index[:, 0].clamp(0, kept.numel() - 1)]
    )


def _kept_by(scores: Tensor, queries: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor | float:
    """Kept tokens of the query of each of these ``scores``, whose first dimension is that of the queries."""
    length = 0 if offsets is not None else queries.size(-2)
    kept = _kept(mask if mask is None else mask.view(-1), offsets, length, queries.size(0))
    return kept if isinstance(kept, float) or scores.dim() == 1 else kept[:, None]


def _kept(mask: Tensor | None, offsets: Tensor | None, length: int, rows: int) -> Tensor | float:
    """Kept tokens ``[Nq]`` of each query, or of all of them alike, at least 1."""
    if mask is None and offsets is None:
        return float(length)
    if offsets is None:
        kept = (mask != 0).view(-1, length).sum(dim=1)  # type: ignore[union-attr]
    elif mask is None:
        kept = offsets.diff()
    else:
        before = torch.nn.functional.pad((mask != 0).cumsum(0), (1, 0))
        kept = before[offsets.long().clamp(0, rows)].diff()
    return kept.clamp(min=1).to(torch.float32)
