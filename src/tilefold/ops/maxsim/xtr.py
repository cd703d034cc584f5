"""XTR scores: MaxSim of the document tokens that each query token retrieves from the batch.

Forward consists of torch operations on tiles of similarities, on any device: for a part of the
query tokens the documents stream by twice reduced, into the largest similarities of every query
token so far, whose last is the threshold in the end, and into the maximum and winner of every
document. Gradients are those of the maximum, of the winners that passed.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from tilefold.ops._shared.impl import host_may_read
from tilefold.ops._shared.operator import Checked, Operator
from tilefold.ops.maxsim import _reference, _tiled, tiles
from tilefold.ops.maxsim._arguments import checked
from tilefold.ops.maxsim._problem import (
    MaxSimTensors,
    Problem,
    XtrOptions,
    XtrSaved,
    check_values,
    no_winners,
    wide_dtype,
    winner_bits,
    xtr_outputs,
)
from tilefold.ops.maxsim._walk import Part, chunks, groups, parts
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

    Query token i retrieves the document tokens whose similarity ``s_ij = q_i . d_j`` is at least
    its ``top_k``-th largest over the kept tokens of **all** documents. A document scores the maxima
    over its retrieved tokens, averaged over the ``Z`` kept query tokens that retrieved any of
    them::

        score[q, d] = 1/Z sum_i max_{j in d, retrieved by i} s_ij                              (0 where Z = 0)
        score[q, d] = 1/n sum_i (the same maximum, or the top_k-th similarity of i)            (impute=True)

    with ``n`` kept query tokens: the training score, and what a search imputes for tokens that were
    not retrieved (the paper's ``m_i``). Products accumulate in fp32 (fp64 for fp64 input), and the
    scores are fp32 (fp64).

    All similarities equal to the ``top_k``-th are retrieved, so ties never depend on an order;
    among equal maxima of a document the lowest token takes the gradient. ``top_k`` from the number
    of kept tokens on retrieves everything: ``maxsim(..., reduction="mean")``, whose words on empty
    sides and on backward hold here too. A NaN similarity is larger than any number: it is
    retrieved, its score is NaN, and it takes one of the ``top_k`` places. Retrieval and ``Z`` have
    no gradient. Forward holds tiles of similarities, ``top_k`` numbers per query token of the tile,
    and 9 bytes per query token and document.

    Args:
        queries: ``[Nq, Lq, D]``, or ``[T, D]`` packed with ``cu_seqlens_q``; fp16, bf16, fp32 or
            fp64.
        documents: ``[Nd, Ld, D]``, or ``[T, D]`` packed with ``cu_seqlens_d``; dtype of
            ``queries``.
        top_k: the paper's k', 1 or more: document tokens that a query token retrieves from the
            batch.
        query_mask, document_mask, normalize: as in :func:`tilefold.ops.maxsim`; a masked token is
            never retrieved, and takes no place.
        cu_seqlens_q, cu_seqlens_d: as there; values are checked on every device.
        impute: score like a search; for inference, without gradients.
        impl: as in :func:`tilefold.ops.maxsim`. ``"triton"`` takes the kernels for backward;
            forward is made of torch operations for both ``"tiled"`` and ``"triton"``, and looks at
            masks and offsets on the host.

    Returns:
        ``[Nq, Nd]`` scores.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`tilefold.ops.maxsim`; for a gradient with
            ``impute``.
    """
    if (
        isinstance(top_k, bool)
        or (isinstance(top_k, int) and top_k < 1)
        or not isinstance(top_k, (int, torch.SymInt))
    ):
        raise ValueError(f"top_k must be a positive integer, got {top_k!r}.")
    given: object = documents
    if isinstance(given, QuantizedTokens):
        raise TypeError(
            "documents must be a torch.Tensor, got QuantizedTokens; give documents.dequantize().",
        )
    tensors = MaxSimTensors(
        queries,
        documents,
        query_mask,
        document_mask,
        cu_seqlens_q,
        cu_seqlens_d,
        None,
        None,
    )
    scores: Tensor = XTR(tensors, (top_k, impute, normalize), impl, _checked)[0]
    return scores


def _checked(tensors: MaxSimTensors, top_k: int, impute: bool, normalize: bool) -> Checked:
    ready = checked(tensors, "all", "sum", "exclude", None, normalize).prepare
    if (
        impute
        and torch.is_grad_enabled()
        and (tensors.queries.requires_grad or tensors.documents.requires_grad)
    ):
        raise ValueError(
            "impute must be False where a gradient is asked for, got True; train without it, score under "
            "torch.no_grad().",
        )
    return Checked(XtrOptions(top_k, bool(impute), normalize), ready)


def _by_reference(tensors: MaxSimTensors, options: XtrOptions) -> Tensor:
    problem = Problem.of(tensors, options.maximum)
    with torch.autocast(problem.queries.device.type, enabled=False):
        check_values(tensors)
        return (
            nothing(problem)
            if problem.empty
            else _reference.xtr(problem, options.top_k, options.impute)
        )


def _forward(
    tensors: MaxSimTensors,
    options: XtrOptions,
    training: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scores ``[Nq, Nd]``; winners that count where ``training``, and what the sums were divided
    by.
    """
    if host_may_read(tensors.queries.device, "tiled"):
        check_values(tensors)
    problem, (top_k, impute, _) = Problem.of(tensors, options.maximum), options
    device, dtype = problem.queries.device, wide_dtype(problem.queries.dtype)
    scores, counts = (
        torch.zeros(problem.score_shape, dtype=dtype, device=device) for _ in range(2)
    )
    if problem.empty:
        return scores, None, counts.fill_(1)
    queries, documents = tiles.sides(problem)
    saved = no_winners(problem, queries.rows, training)
    has_tokens = documents.counts > 0
    width, elements = tiles.DEVICE_TILE
    if device.type == "cpu":
        width, elements = tiles.CPU_TILE
        most = max(1, tiles.MAXIMA // max(problem.n_documents, 1))
        width = min(width, tiles.column_limit(queries.rows.size(1)), most)
    for part in parts(queries, width):
        best, winner, threshold = _maxima(part, documents, top_k, elements)
        retrieved = ((best >= threshold) | best.isnan()) & has_tokens
        imputed = torch.where(has_tokens, threshold, 0) if impute else threshold.new_zeros(())
        part.add_sums(torch.where(retrieved, best, imputed).T, scores, slice(None))
        if not impute:
            part.add_sums(retrieved.T.to(dtype), counts, slice(None))
        if training:
            saved[:, part.columns] = (
                winner_bits(winner, problem.saved_dtype).masked_fill_(~retrieved, -1).T
            )
    if impute:
        counts += queries.counts[:, None]
    divisor = counts.clamp_(min=1)
    return scores.div_(divisor), saved.view(problem.saved_dtype) if training else None, divisor


def _backward(
    dscores: Tensor,
    saved: XtrSaved,
    options: XtrOptions,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents: those of the maximum."""
    return _tiled.backward(dscores / saved.divisor, saved.maximum, options.maximum, needs)


def _maxima(
    part: Part,
    documents: tiles.Side,
    top_k: int,
    elements: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``[C, Nd]`` maxima and winners of the query tokens of a part, and ``[C, 1]`` their
    ``top_k``-th similarities.
    """
    tokens = part.tokens()
    count, offsets = tokens.size(0), [*documents.offsets.tolist(), int(documents.counts.sum())]
    budget = max(1, min(documents.rows_at_a_time(), elements // count))
    best = tokens.new_full((count, len(offsets) - 1), -math.inf)
    winner = torch.zeros(best.shape, dtype=torch.int32, device=tokens.device)
    largest = tokens.new_empty(count, 0)
    slabs = (
        (first, last, range(start, min(start + budget, offsets[last])))
        for first, last in chunks(offsets, budget, budget)
        for start in range(offsets[first], offsets[last], budget)  # a long document is cut
    )
    for first, last, rows in slabs:
        sims = tokens @ documents.kept(rows.start, rows.stop).T  # [C, rows]
        top = sims.topk(min(top_k, len(rows)), dim=1).values  # NaN is the largest
        largest = torch.cat([largest, top], dim=1)
        if top.size(1) < largest.size(1) >= top_k:  # the last of them is to be the threshold
            largest = largest.topk(top_k, dim=1).values
        if len(rows) < offsets[last] - offsets[first]:
            value, place = sims.max(dim=1)
            position = (documents.at(place + rows.start) - documents.starts[first]).int()
            if rows.start > offsets[first]:
                value, position = _tiled.merged(best[:, first], winner[:, first], value, position)
            best[:, first], winner[:, first] = value, position
            continue
        for items, places, _, span in groups(documents, first, last, budget):
            whole = span is not None and len(rows) == places.numel()
            found = sims if whole else sims.index_select(1, (places - rows.start).view(-1))
            value, at = found.view(count, *places.shape).max(dim=2)
            best[:, items] = value
            winner[:, items] = (
                documents.at(places).gather(1, at.T) - documents.starts[items][:, None]
            ).T.int()
    enough = largest.size(1) >= top_k
    threshold = largest[:, top_k - 1 : top_k] if enough else tokens.new_full((count, 1), -math.inf)
    return best, winner, threshold


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
    tiled=SimpleNamespace(forward=_forward, backward=_backward),
    reference=_by_reference,
)
