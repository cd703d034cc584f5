"""Late-interaction scores, public functions: what they compute, and dispatch."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from tilefold.ops._shared.checks import FLOAT_DTYPES, check_tensor
from tilefold.ops._shared.fallback import TILED_PATH_RUNS, give_up
from tilefold.ops._shared.operator import Operator
from tilefold.ops.maxsim import _reference, _tiled, tiles
from tilefold.ops.maxsim._arguments import checked, divides_itself
from tilefold.ops.maxsim._problem import (
    RESULTS,
    MaxSimOptions,
    MaxSimSaved,
    MaxSimTensors,
    Problem,
    check_values,
    outputs,
    wide_dtype,
)
from tilefold.ops.maxsim.quantized import QuantizedTokens, quantize_rows


def _plans() -> ModuleType:
    from tilefold.ops.maxsim import plans  # needs Triton

    return plans


def by_reference(tensors: MaxSimTensors, options: MaxSimOptions) -> Tensor:
    """Scores by the specification, part of the graph."""
    problem = Problem.of(tensors, options)
    scale = problem.document_scale
    with torch.autocast(problem.queries.device.type, enabled=False):
        check_values(tensors)
        if problem.empty:
            return nothing(problem)
        scores = _reference.maxsim(problem if scale is None else _dequantized(problem, scale))
    scores = scores.to(wide_dtype(problem.queries.dtype)).view(problem.score_shape)
    return scores / problem.divisor if options.mean else scores


def nothing(problem: Problem) -> Tensor:
    """The scores of an empty problem, part of the graph."""
    zero = problem.queries[..., :0].sum()
    if problem.documents.dtype in FLOAT_DTYPES:
        zero = zero + problem.documents[..., :0].sum()
    return zero.to(wide_dtype(problem.queries.dtype)).expand(problem.score_shape).contiguous()


def _choose(tensors: MaxSimTensors, impl: str) -> tuple[str, str]:
    fp8 = tensors.documents.dtype == torch.float8_e4m3fn and tensors.documents.is_cuda
    return "maxsim", (_impl_of_fp8 if fp8 else MAXSIM.chosen_impl)(tensors.queries, impl)


def _impl_of_fp8(queries: Tensor, impl: str) -> str:
    """The implementation for fp8 documents: there are no kernels before compute capability 8.9."""
    chosen = MAXSIM.chosen_impl(queries, impl)
    if chosen != "triton" or torch.cuda.get_device_capability(queries.device) >= (8, 9):
        return chosen
    if impl == "triton":
        raise TypeError(
            "documents must be quantized with dtype='int8' for impl='triton' before compute capability 8.9, got "
            "fp8; use int8 or impl='tiled'.",
        )
    give_up("maxsim with fp8 documents", queries.device, "it has no fp8 products", TILED_PATH_RUNS)
    return "tiled"


MAXSIM = Operator(
    "maxsim",
    MaxSimTensors,
    MaxSimOptions,
    MaxSimSaved,
    results=RESULTS,
    outputs=outputs,
    gradients={"queries": "queries", "documents": "documents"},
    plans=_plans,
    tiled=_tiled,
    reference=by_reference,
    check_values=check_values,
    choose=_choose,
)


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
    """Late-interaction scores (ColBERT, arXiv 2004.12832) without the similarities ``[Nq, Nd, Lq,
    Ld]``.

    For a query with token vectors ``q_i`` and a document with token vectors ``d_j``, over the kept
    tokens::

        score = sum_i max_j q_i . d_j                                   (reduction="mean": divided by the count of i)
        score = sum_i temperature * log sum_j exp(q_i . d_j / temperature)              (with a temperature)

    Products accumulate in fp32 (fp64 for fp64 input), and the scores are fp32 (fp64). Among equal
    similarities the lowest document token takes the whole gradient. A document without a token that
    takes part, and an empty query, score 0 with no gradient. NaN in a kept token gives NaN; what a
    masked token holds is never read into a result. Backward is bitwise deterministic and keeps 2
    bytes (4 from 65,536 document tokens on, and with a temperature) per query token and pair, and
    in kernels 4 per normalised token and per packed query token.

    Args:
        queries: ``[Nq, Lq, D]``, or ``[T, D]`` packed with ``cu_seqlens_q``; fp16, bf16, fp32 or
            fp64.
        documents: ``[Nd, Ld, D]`` (``[B, N, Ld, D]`` for ``"grouped"``), or ``[T, D]`` packed with
            ``cu_seqlens_d``; dtype of ``queries`` (any floating dtype under autocast, whose dtype
            both then take). Or the same in :class:`QuantizedTokens`, for inference: with int8 the
            queries are rounded to int8 too, products are exact integers; with fp8 they stay as they
            are.
        query_mask, document_mask: their tokens' shape, without D; nonzero = keep, in any pattern.
        cu_seqlens_q, cu_seqlens_d: ``[N + 1]`` int32 first rows of packed sequences, from 0 to T.
            On the CPU other values raise; on a GPU, where checking costs a synchronisation, the
            pairs concerned score NaN.
        pairing: which pairs are scored. ``"all"``; ``"aligned"`` (query b with document b);
            ``"grouped"`` (query b with its own N documents; packed documents follow each other
            group by group); or a ``[P, 2]`` integer tensor of (query, document) pairs, which are
            scored in place, without a gathered copy.
        reduction: ``"sum"``, or ``"mean"`` over the query's kept tokens.
        mask_mode: for masked document tokens: ``"exclude"`` leaves them out; ``"zero"`` gives them
            a similarity of 0, as libraries do that multiply by the mask. A masked query token
            counts 0 in both.
        temperature: positive number for the smooth maximum, ``None`` for the maximum.
        normalize: divide every token vector by its Euclidean norm; a zero vector stays zero and has
            no gradient.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see :func:`chosen_impl`.

    Returns:
        Scores: ``[Nq, Nd]`` for ``"all"``, ``[B]`` for ``"aligned"``, ``[B, N]`` for ``"grouped"``,
            ``[P]`` for pairs.
        With packed queries, pairs and a gradient asked for, the longest query is read from the device once.

    Raises:
        TypeError: for arguments that are not tensors, or of a dtype that is not supported.
        ValueError: for shapes, devices, offsets, indices or options that do not fit together.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    rows, scale = (
        (documents.values, documents.scales)
        if isinstance(documents, QuantizedTokens)
        else (documents, None)
    )
    pairs = pairing if isinstance(pairing, Tensor) else None
    tensors = MaxSimTensors(
        queries,
        rows,
        query_mask,
        document_mask,
        cu_seqlens_q,
        cu_seqlens_d,
        pairs,
        scale,
    )
    named = None if pairs is not None else pairing
    asked = (named, reduction, mask_mode, temperature, normalize, _longest_query(tensors))
    scores: Tensor = MAXSIM(tensors, asked, impl, checked)[0]
    if reduction == "sum" or divides_itself(tensors) or queries.numel() == 0:
        return scores
    kept = kept_tokens(tensors, scores.dim())
    return scores / kept if scores.requires_grad else scores.div_(kept)  # nobody else has them


def maxsim_topk(
    queries: Tensor,
    documents: Tensor | QuantizedTokens,
    k: int,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    reduction: str = "sum",
    mask_mode: str = "exclude",
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The ``k`` documents with the highest :func:`maxsim` score for each query. Not differentiable.

    Padded documents are scored in blocks, so that the scores held are ``[Nq, 65536]`` or 2^24 at
    most; packed ones at once.

    Args:
        k: how many; all documents where there are fewer. Others are as in :func:`maxsim` for
            ``pairing="all"``.

    Returns:
        ``[Nq, min(k, Nd)]`` scores, falling, and the int64 numbers of their documents. Equal scores come in any order,
        as those of ``torch.topk``, which also puts NaN before any number; a document without a kept token ranks with
        its score of 0.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`maxsim`; ``ValueError`` for a ``k`` below 1.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a positive integer, got {k!r}.")
    score = functools.partial(
        maxsim,
        queries,
        query_mask=query_mask,
        cu_seqlens_q=cu_seqlens_q,
        reduction=reduction,
        mask_mode=mask_mode,
        impl=impl,
    )
    rows = (
        documents.values
        if isinstance(documents, QuantizedTokens)
        else check_tensor("documents", documents)
    )
    sequences = (
        cu_seqlens_q if isinstance(cu_seqlens_q, Tensor) else check_tensor("queries", queries)
    )
    step = max(tiles.TOPK_DOCUMENTS, tiles.TOPK_SCORES // max([*sequences.shape[:1], 1]))
    with torch.no_grad():
        if cu_seqlens_d is not None or rows.dim() != 3 or rows.size(0) <= step:
            return _best_of(
                score(documents, document_mask=document_mask, cu_seqlens_d=cu_seqlens_d),
                k,
            )
        values, places = [], []
        for start in range(0, rows.size(0), step):
            part = slice(start, start + step)
            block: Tensor | QuantizedTokens = rows[part]
            if isinstance(documents, QuantizedTokens):
                block = QuantizedTokens(documents.values[part], documents.scales[part])
            best, which = _best_of(
                score(block, document_mask=None if document_mask is None else document_mask[part]),
                k,
            )
            values.append(best)
            places.append(which + start)
        best, order = torch.cat(values, dim=1).topk(min(k, rows.size(0)), dim=1)
        return best, torch.cat(places, dim=1).gather(1, order)


def _best_of(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` highest of scores ``[Nq, Nd]``, which lie in the ``k`` groups with the highest best
    ones.
    """
    n, size = scores.size(1), tiles.TOPK_GROUP
    if n < 32 * k * size:  # where it would take longer
        best, which = scores.topk(min(k, n), dim=1)
        return best, which
    whole = n // size * size
    groups = (
        scores[:, :whole]
        .reshape(scores.size(0), whole // size, size)
        .amax(dim=2)
        .topk(k, dim=1)
        .indices
    )
    members = (groups[..., None] * size + torch.arange(size, device=scores.device)).flatten(1)
    members = torch.cat(
        [members, torch.arange(whole, n, device=scores.device).expand(scores.size(0), -1)],
        dim=1,
    )
    best, which = scores.gather(1, members).topk(k, dim=1)
    return best, members.gather(1, which)


def chosen_impl(queries: Tensor, impl: str = "auto") -> str:
    """Implementation of ``maxsim(queries, ..., impl=impl)``: ``"reference"``, ``"tiled"`` or
    ``"triton"``.

    ``"auto"`` takes ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that has it, else
    ``"tiled"``.

    Raises:
        ValueError: for an unknown name.
        RuntimeError, TypeError: for ``"triton"`` on a device, or with a dtype, that it does not
            support.
    """
    return MAXSIM.chosen_impl(queries, impl)


def _dequantized(problem: Problem, scale: Tensor) -> Problem:
    """Dequantize documents, and the queries that are rounded like them, in fp64."""
    queries = problem.queries.double()
    if problem.documents.dtype == torch.int8:
        values, query_scale = quantize_rows(problem.queries, torch.int8)
        queries = values.double() * query_scale.double()[:, None]
    documents = problem.documents.float().double() * scale.double()[:, None]
    return replace(problem, queries=queries, documents=documents, document_scale=None)


def kept_tokens(tensors: MaxSimTensors, dims: int) -> Tensor | float:
    """Kept tokens of the query of each score, at least 1, for scores of ``dims`` dimensions."""
    queries, mask, offsets, pairs = (
        tensors.queries,
        tensors.query_mask,
        tensors.cu_queries,
        tensors.pairs,
    )
    if offsets is None:
        if mask is None:
            return float(queries.size(-2))
        kept = (mask != 0).sum(dim=1)
    elif mask is None:
        kept = offsets.diff()
    else:
        before = torch.nn.functional.pad((mask != 0).cumsum(0), (1, 0))
        kept = before[offsets.long().clamp(0, mask.size(0))].diff()
    kept = kept.clamp(min=1).to(torch.float32)
    if pairs is not None:
        return kept[pairs[:, 0].clamp(0, kept.numel() - 1)]
    return kept[:, None] if dims == 2 else kept


def _longest_query(tensors: MaxSimTensors) -> int:
    """Tokens of the longest packed query, where the place of what is saved depends on them."""
    queries, documents, offsets = tensors.queries, tensors.documents, tensors.cu_queries
    if tensors.pairs is None or not isinstance(offsets, Tensor) or not torch.is_grad_enabled():
        return 0
    if not (getattr(queries, "requires_grad", False) or getattr(documents, "requires_grad", False)):
        return 0
    fits = (
        offsets.dtype in (torch.int32, torch.int64) and offsets.dim() == 1 and offsets.numel() > 1
    )
    return int(offsets.diff().max()) if fits else 0  # the checks refuse others
