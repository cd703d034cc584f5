"""XTR scores: MaxSim of the document tokens that each query token retrieves from the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops.maxsim import _reference, _torch_ops_xtr
from tilefold.ops.maxsim._arguments import prepare, zeros
from tilefold.ops.maxsim._problem import Problem
from tilefold.ops.maxsim._torch_ops import check_values
from tilefold.ops.maxsim.quantized import QuantizedTokens


def xtr_scores(
    queries: Tensor,
    documents: Tensor,
    *,
    top_k: int,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    impute: bool = False,
    normalize: bool = False,
    impl: str = "auto",
) -> Tensor:
    """XTR scores (Lee et al. 2023, arXiv 2304.01982) without the similarities ``[Nq, Nd, Lq, Ld]``.

    Query token i retrieves the document tokens whose similarity ``s_ij = q_i . d_j`` is at least its ``top_k``-th
    largest over the kept tokens of **all** documents. A document scores the maxima over its retrieved tokens, averaged
    over the ``Z`` kept query tokens that retrieved any of them::

        score[q, d] = 1/Z sum_i max_{j in d, retrieved by i} s_ij                              (0 where Z = 0)
        score[q, d] = 1/n sum_i (the same maximum, or the top_k-th similarity of i)            (impute=True)

    with ``n`` kept query tokens: the training score, and what a search imputes for tokens that were not retrieved (the
    paper's ``m_i``). Products accumulate in fp32 (fp64 for fp64 input), and the scores are fp32 (fp64).

    All similarities equal to the ``top_k``-th are retrieved, so ties never depend on an order; among equal maxima of a
    document the lowest token takes the gradient. ``top_k`` from the number of kept tokens on retrieves everything:
    ``maxsim(..., reduction="mean")``. A document without a kept token scores 0 with no gradient, and so does an empty
    query. A NaN similarity is larger than any number: it is retrieved, its score is NaN, and it takes one of the
    ``top_k`` places. Retrieval itself and ``Z`` have no gradient. Backward is bitwise deterministic and touches winners
    only; kept for it are 2 bytes (4 from 65,536 document tokens on) per query token and document. Forward holds tiles
    of similarities, ``top_k`` numbers per query token of the tile, and 9 bytes per query token and document.

    Args:
        queries: ``[Nq, Lq, D]``, or ``[T, D]`` packed with ``cu_seqlens_q``; fp16, bf16, fp32 or fp64.
        documents: ``[Nd, Ld, D]``, or ``[T, D]`` packed with ``cu_seqlens_d``; dtype of ``queries``.
        top_k: the paper's k', 1 or more: document tokens that a query token retrieves from the batch.
        query_mask: the tokens' shape, without D; nonzero = keep, in any pattern.
        document_mask: likewise; a masked token is never retrieved, and takes no place.
        cu_seqlens_q: as in :func:`tilefold.ops.maxsim`; values are checked on every device.
        cu_seqlens_d: likewise.
        impute: score like a search; for inference, without gradients.
        normalize: divide every token vector by its Euclidean norm; a zero vector stays zero and has no gradient.
        impl: as in :func:`tilefold.ops.maxsim`. ``"triton"`` takes the kernels for backward; forward is made of torch
            operations for both ``"tiled"`` and ``"triton"``, and looks at masks and offsets on the host.

    Returns:
        ``[Nq, Nd]`` scores.

    Raises:
        TypeError: for arguments that are no tensors, or of a dtype that is not supported.
        ValueError: for shapes, devices, offsets or options that do not fit together, or a gradient with ``impute``.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    if isinstance(top_k, bool) or (isinstance(top_k, int) and top_k < 1) or not isinstance(top_k, (int, torch.SymInt)):
        raise ValueError(f"top_k must be a positive integer, got {top_k!r}.")
    given: object = documents
    if isinstance(given, QuantizedTokens):
        raise TypeError("documents must be a torch.Tensor, got QuantizedTokens; give documents.dequantize().")
    operands, call = prepare(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_d=cu_seqlens_d,
        normalize=normalize,
        impl=impl,
    )
    if impute and torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad):
        raise ValueError(
            "impute must be False where a gradient is asked for, got True; train without it, score under "
            "torch.no_grad()."
        )
    if call.empty:
        return zeros(operands, call)
    if call.impl == "reference":
        problem = Problem.of(operands, call.options)
        with torch.autocast(problem.queries.device.type, enabled=False):
            check_values(problem, call.impl)
            return _reference.xtr(problem, top_k, bool(impute))
    return _torch_ops_xtr.scores(operands, call, top_k, bool(impute))
