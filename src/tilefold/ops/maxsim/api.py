"""Late-interaction scores, public functions: what they compute, and dispatch."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from tilefold.ops._shared.checks import FLOAT_DTYPES, check_tensor
from tilefold.ops._shared.fallback import TILED_PATH_NOTE, warn_and_record_failure
from tilefold.ops._shared.operator import Operator
from tilefold.ops.maxsim import _reference, _tiled, tiles
from tilefold.ops.maxsim._arguments import check_arguments, operator_takes_mean
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

# `maxsim_topk` selects groups of documents first if there are at least GROUPS_PER_RESULT groups for
# each of the k results. With fewer groups that takes longer.
GROUPS_PER_RESULT = 32


def _plans() -> ModuleType:
    from tilefold.ops.maxsim import plans  # needs Triton

    return plans


def by_reference(tensors: MaxSimTensors, options: MaxSimOptions) -> Tensor:
    """Compute the scores by the reference, whose operations autograd records.

    Args:
        tensors: tensors of the call.
        options: checked options.
    """
    problem = Problem.of(tensors, options)
    scale = problem.document_scale
    with torch.autocast(problem.queries.device.type, enabled=False):
        check_values(tensors)
        if problem.empty:
            return empty_scores(problem)
        scores = _reference.maxsim(problem if scale is None else _dequantized(problem, scale))
    scores = scores.to(wide_dtype(problem.queries.dtype)).view(problem.score_shape)
    return scores / problem.divisor if options.mean else scores


def empty_scores(problem: Problem) -> Tensor:
    """Return the scores of an empty problem: zeros with gradients that are zero, too."""
    zero = problem.queries[..., :0].sum()
    if problem.documents.dtype in FLOAT_DTYPES:
        zero = zero + problem.documents[..., :0].sum()
    return zero.to(wide_dtype(problem.queries.dtype)).expand(problem.score_shape).contiguous()


def _choose(tensors: MaxSimTensors, impl: str) -> tuple[str, str]:
    """Choose the implementation, and the name under which failures of its kernels are recorded."""
    if tensors.documents.dtype == torch.float8_e4m3fn and tensors.documents.is_cuda:
        return "maxsim", _choose_impl_for_fp8(tensors.queries, impl)
    return "maxsim", MAXSIM.chosen_impl(tensors.queries, impl)


def _choose_impl_for_fp8(queries: Tensor, impl: str) -> str:
    """Choose the implementation for fp8 documents.

    Triton's kernels need a GPU of compute capability 8.9 or higher to multiply fp8. On an older
    GPU, ``"auto"`` chooses ``"tiled"``, with a warning the first time.

    Args:
        queries: the queries.
        impl: the implementation that the caller requested, such as ``"auto"``.

    Raises:
        TypeError: if ``"triton"`` is requested on an older GPU.
    """
    impl_without_fp8 = MAXSIM.chosen_impl(queries, impl)
    if impl_without_fp8 != "triton":
        return impl_without_fp8
    if torch.cuda.get_device_capability(queries.device) >= (8, 9):
        return "triton"
    if impl == "triton":
        raise TypeError(
            "documents must be quantized with dtype='int8' for impl='triton' below compute "
            "capability 8.9, got fp8; use int8 or impl='tiled'.",
        )
    warn_and_record_failure(
        "maxsim with fp8 documents",
        queries.device,
        "the GPU does not support fp8 matrix products",
        TILED_PATH_NOTE,
    )
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
    """Compute late-interaction scores (ColBERT, arXiv 2004.12832) without storing all similarities.

    For a query with token vectors ``q_i`` and a document with token vectors ``d_j``, over the
    tokens that are not masked::

        score = sum_i max_j q_i . d_j
        score = sum_i temperature * log sum_j exp(q_i . d_j / temperature)    (with a temperature)

    With ``reduction="mean"`` scores are divided by the number of ``q_i``. The similarities
    ``[Nq, Nd, Lq, Ld]`` are computed tile by tile.

    Products accumulate in fp32 (fp64 for fp64 input), and scores are fp32 (fp64). Among equal
    similarities the first document token gets the whole gradient. An empty query, and a document
    without an unmasked token, score 0 without a gradient (but see ``mask_mode``). NaN in an
    unmasked token gives NaN. The values of masked tokens have no influence.

    Backward is bitwise deterministic. Forward saves 2 bytes per query token and pair for it (4 from
    65,536 document tokens on, and with a temperature). Kernels also save 4 bytes per normalized
    token and per packed query token.

    Args:
        queries: ``[Nq, Lq, D]``, or ``[T, D]`` packed with ``cu_seqlens_q``; fp16, bf16, fp32 or
            fp64.
        documents: ``[Nd, Ld, D]`` (``[B, N, Ld, D]`` for ``"grouped"``), or ``[T, D]`` packed with
            ``cu_seqlens_d``. The dtype is that of ``queries``, or any floating dtype under
            autocast, which casts both. For inference, also :class:`QuantizedTokens` of these
            shapes. With int8, queries are rounded to int8 too, and products are exact integers.
            With fp8, queries are not rounded.
        query_mask, document_mask: the shape of the tokens, without D; nonzero for tokens that
            count, in any pattern.
        cu_seqlens_q, cu_seqlens_d: ``[N + 1]`` int32 offsets of packed sequences, from 0 to T.
            Other values raise an error on the CPU. On a GPU, where a check would synchronise, the
            affected pairs score NaN.
        pairing: which pairs are scored. ``"all"``; ``"aligned"`` (query b with document b);
            ``"grouped"`` (query b with its own N documents; packed documents follow each other
            group by group); or a ``[P, 2]`` integer tensor of (query, document) pairs, whose
            vectors are not copied.
        reduction: ``"sum"``, or ``"mean"`` over the unmasked tokens of the query.
        mask_mode: how masked document tokens count. ``"exclude"`` leaves them out. ``"zero"`` gives
            them a similarity of 0, like libraries that multiply by the mask. With a temperature,
            a document of L masked tokens then scores ``temperature * log L`` per query token. A
            masked query token adds 0 in both.
        temperature: positive number for the smooth maximum, ``None`` for the maximum.
        normalize: divide every token vector by its Euclidean norm. A zero vector remains zero and
            has no gradient.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see :func:`chosen_impl`.

    Returns:
        Scores: ``[Nq, Nd]`` for ``"all"``, ``[B]`` for ``"aligned"``, ``[B, N]`` for ``"grouped"``,
        ``[P]`` for pairs. With packed queries, listed pairs and a gradient, the length of the
        longest query is read from the device once.

    Raises:
        TypeError: for arguments that are not tensors, or of a dtype that is not supported.
        ValueError: for shapes, devices, offsets, indices or options that do not fit together.
        RuntimeError: if ``impl="triton"`` cannot run here.

    Examples:
        >>> import torch
        >>> queries = torch.tensor([[[1.0, 0, 0, 0, 0, 0, 0, 0], [0, 1.0, 0, 0, 0, 0, 0, 0]]])
        >>> documents = torch.stack([queries[0], queries[0].roll(1, -1)])
        >>> maxsim(queries, documents)  # every query with every document
        tensor([[2., 1.]])
        >>> maxsim(queries, documents[None], pairing="grouped")  # each query with its own documents
        tensor([[2., 1.]])
    """
    document_rows: Tensor
    document_scale: Tensor | None
    if isinstance(documents, QuantizedTokens):
        document_rows = documents.values
        document_scale = documents.scales
    else:
        document_rows = documents
        document_scale = None
    pairs = pairing if isinstance(pairing, Tensor) else None
    tensors = MaxSimTensors(
        queries=queries,
        documents=document_rows,
        query_mask=query_mask,
        document_mask=document_mask,
        cu_queries=cu_seqlens_q,
        cu_documents=cu_seqlens_d,
        pairs=pairs,
        document_scale=document_scale,
    )
    raw_options = (
        pairing if pairs is None else None,
        reduction,
        mask_mode,
        temperature,
        normalize,
        _longest_query(tensors),
    )
    scores: Tensor = MAXSIM(tensors, raw_options, impl, check_arguments)[0]
    if reduction == "sum" or operator_takes_mean(tensors) or queries.numel() == 0:
        return scores
    n_tokens = query_token_counts(tensors, scores.dim())
    if scores.requires_grad:
        return scores / n_tokens
    return scores.div_(n_tokens)  # nothing else refers to these scores


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
    """Return the ``k`` documents with the highest :func:`maxsim` score for each query.

    Padded documents are scored in blocks, so that at most ``[Nq, 65536]`` or 2^24 scores are in
    memory. Packed documents are scored at once. The result is not differentiable.

    Args:
        queries, documents, query_mask, document_mask, cu_seqlens_q, cu_seqlens_d, reduction,
            mask_mode, impl: as in :func:`maxsim` for ``pairing="all"``.
        k: number of documents; all documents if there are fewer.

    Returns:
        ``[Nq, min(k, Nd)]`` scores, the highest first, and the int64 numbers of their documents.
        Equal scores are in any order, and NaN is before any number, as with ``torch.topk``. A
        document without an unmasked token scores 0.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`maxsim`; ``ValueError`` for a ``k`` below 1.

    Examples:
        >>> import torch
        >>> documents = torch.nn.functional.normalize(torch.randn(50, 12, 16), dim=-1)
        >>> scores, best = maxsim_topk(documents[7:8], documents, k=3)
        >>> best[0, 0].item()
        7
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
    if isinstance(documents, QuantizedTokens):
        rows = documents.values
    else:
        rows = check_tensor("documents", documents)
    if isinstance(cu_seqlens_q, Tensor):
        n_queries = _first_size(cu_seqlens_q)
    else:
        n_queries = _first_size(check_tensor("queries", queries))
    block_size = max(tiles.TOPK_DOCUMENTS, tiles.TOPK_SCORES // max(n_queries, 1))
    with torch.no_grad():
        if cu_seqlens_d is not None or rows.dim() != 3 or rows.size(0) <= block_size:
            scores = score(documents, document_mask=document_mask, cu_seqlens_d=cu_seqlens_d)
            return _grouped_topk(scores, k)
        block_values = []
        block_documents = []
        for start in range(0, rows.size(0), block_size):
            selected = slice(start, start + block_size)
            block: Tensor | QuantizedTokens
            if isinstance(documents, QuantizedTokens):
                block = QuantizedTokens(documents.values[selected], documents.scales[selected])
            else:
                block = rows[selected]
            block_mask = None if document_mask is None else document_mask[selected]
            values, documents_in_block = _grouped_topk(score(block, document_mask=block_mask), k)
            block_values.append(values)
            block_documents.append(documents_in_block + start)
        values, order = torch.cat(block_values, dim=1).topk(min(k, rows.size(0)), dim=1)
        return values, torch.cat(block_documents, dim=1).gather(1, order)


def _first_size(tensor: Tensor) -> int:
    """Return the size of the first dimension, 0 for a tensor without dimensions."""
    return tensor.size(0) if tensor.dim() else 0


def _grouped_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` highest scores of each query, and their documents.

    If there are many documents, the best groups of documents are selected first, so that only the
    documents in these are compared.

    Args:
        scores: ``[Nq, Nd]``.
        k: number of documents for each query.

    Returns:
        ``[Nq, k]`` scores, and ``[Nq, k]`` int64 documents; fewer if there are fewer documents.
    """
    n_documents = scores.size(1)
    if n_documents < GROUPS_PER_RESULT * k * tiles.TOPK_GROUP:
        values, documents = scores.topk(min(k, n_documents), dim=1)
        return values, documents
    candidates = _topk_candidates(scores, k)
    values, positions = scores.gather(1, candidates).topk(k, dim=1)
    return values, candidates.gather(1, positions)


def _topk_candidates(scores: Tensor, k: int) -> Tensor:
    """Return documents among which are the ``k`` with the highest scores of each query.

    Consecutive documents form groups. The candidates are the documents of the ``k`` groups with the
    highest maxima. These maxima are ``k`` documents, and no document of another group scores higher
    than any of them. The documents after the last complete group are also candidates.

    Args:
        scores: ``[Nq, Nd]``, with at least ``k`` groups.
        k: number of documents for each query.

    Returns:
        Columns of ``scores``: ``[Nq, n]`` int64, where n is the number of candidates.
    """
    n_queries, n_documents = scores.shape
    group_size = tiles.TOPK_GROUP
    n_groups = n_documents // group_size
    n_grouped = n_groups * group_size
    group_maxima = scores[:, :n_grouped].reshape(n_queries, n_groups, group_size).amax(dim=2)
    best_groups = group_maxima.topk(k, dim=1).indices
    offsets_in_group = torch.arange(group_size, device=scores.device)
    grouped = (best_groups[..., None] * group_size + offsets_in_group).flatten(1)
    after_last_group = torch.arange(n_grouped, n_documents, device=scores.device)
    return torch.cat([grouped, after_last_group.expand(n_queries, -1)], dim=1)


def chosen_impl(queries: Tensor, impl: str = "auto") -> str:
    """Return the implementation of ``maxsim(queries, ..., impl=impl)``.

    ``"auto"`` chooses ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that supports it, and
    ``"tiled"`` otherwise.

    Returns:
        ``"reference"``, ``"tiled"`` or ``"triton"``.

    Raises:
        ValueError: for an unknown name.
        RuntimeError, TypeError: for ``"triton"`` on a device, or with a dtype, that it does not
            support.
    """
    return MAXSIM.chosen_impl(queries, impl)


def _dequantized(problem: Problem, scale: Tensor) -> Problem:
    """Dequantize documents in fp64, and round queries in the same way if the documents are int8."""
    queries = problem.queries.double()
    if problem.documents.dtype == torch.int8:
        values, query_scale = quantize_rows(problem.queries, torch.int8)
        queries = values.double() * query_scale.double()[:, None]
    documents = problem.documents.float().double() * scale.double()[:, None]
    return replace(problem, queries=queries, documents=documents, document_scale=None)


def query_token_counts(tensors: MaxSimTensors, dims: int) -> Tensor | float:
    """Return the number of unmasked query tokens by which each score is divided, at least 1.

    Args:
        tensors: tensors of the call.
        dims: number of dimensions of the scores.

    Returns:
        A number, or a tensor that broadcasts to the scores.
    """
    mask = tensors.query_mask
    offsets = tensors.cu_queries
    if offsets is None:
        if mask is None:
            return float(tensors.queries.size(-2))
        counts = (mask != 0).sum(dim=1)
    elif mask is None:
        counts = offsets.diff()
    else:
        n_unmasked_before = torch.nn.functional.pad((mask != 0).cumsum(0), (1, 0))
        # values of offsets may be unchecked, and must not be out of range
        counts = n_unmasked_before[offsets.long().clamp(0, mask.size(0))].diff()
    counts = counts.clamp(min=1).to(torch.float32)
    if tensors.pairs is not None:
        # so may those of pairs
        return counts[tensors.pairs[:, 0].clamp(0, counts.numel() - 1)]
    return counts[:, None] if dims == 2 else counts


def _longest_query(tensors: MaxSimTensors) -> int:
    """Return the number of columns of the matrix of winners of listed pairs of packed queries.

    It is the length of the longest query. Reading the offsets waits for a GPU, so that it is 0 for
    calls that save no such matrix. The tensors are not checked yet. It is 0 for wrong ones, too,
    and the checks then raise the error.

    Args:
        tensors: the arguments of the call.
    """
    offsets = tensors.cu_queries
    if tensors.pairs is None or not isinstance(offsets, Tensor) or not _may_need_gradient(tensors):
        return 0
    are_offsets = (
        offsets.dtype in (torch.int32, torch.int64) and offsets.dim() == 1 and offsets.numel() > 1
    )
    return int(offsets.diff().max()) if are_offsets else 0


def _may_need_gradient(tensors: MaxSimTensors) -> bool:
    """Return whether queries or documents require a gradient.

    The arguments may be anything, since they are not checked yet.
    """
    return torch.is_grad_enabled() and any(
        isinstance(tokens, Tensor) and tokens.requires_grad
        for tokens in (tensors.queries, tensors.documents)
    )
