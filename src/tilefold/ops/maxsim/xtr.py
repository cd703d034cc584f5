"""XTR scores: MaxSim of the document tokens that each query token retrieves from the batch."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from tilefold.ops._shared.operator import Checked, Operator
from tilefold.ops.maxsim import _reference, _tiled_xtr
from tilefold.ops.maxsim._arguments import checked
from tilefold.ops.maxsim._problem import MaxSimTensors, Problem, XtrOptions, XtrSaved, check_values, xtr_outputs
from tilefold.ops.maxsim.api import nothing
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
    tensors = MaxSimTensors(queries, documents, query_mask, document_mask, cu_seqlens_q, cu_seqlens_d, None, None)
    scores: Tensor = XTR(tensors, (top_k, impute, normalize), impl, _checked)[0]
    return scores


def _checked(tensors: MaxSimTensors, top_k: int, impute: bool, normalize: bool) -> Checked:
    ready = checked(tensors, "all", "sum", "exclude", None, normalize).ready
    if impute and torch.is_grad_enabled() and (tensors.queries.requires_grad or tensors.documents.requires_grad):
        raise ValueError(
            "impute must be False where a gradient is asked for, got True; train without it, score under "
            "torch.no_grad()."
        )
    return Checked(XtrOptions(top_k, bool(impute), normalize), ready)


def _by_reference(tensors: MaxSimTensors, options: XtrOptions) -> Tensor:
    problem = Problem.of(tensors, options.maximum)
    with torch.autocast(problem.queries.device.type, enabled=False):
        check_values(tensors)
        return nothing(problem) if problem.empty else _reference.xtr(problem, options.top_k, options.impute)


def _plans() -> SimpleNamespace:
    from tilefold.ops.maxsim import plans  # needs Triton

    return SimpleNamespace(forward=plans.xtr_forward, backward=plans.xtr_backward)


XTR = Operator(
    "xtr_scores",
    MaxSimTensors,
    XtrOptions,
    XtrSaved,
    results=("scores", "saved", "divisor"),
    outputs=xtr_outputs,
    gradients={"queries": "queries", "documents": "documents"},
    plans=_plans,
    tiled=_tiled_xtr,
    reference=_by_reference,
)
