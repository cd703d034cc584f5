"""Results of MaxSim and XTR, and their comparison with the reference in fp64."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.ops.matching import held_to_budgets
from tilefold.ops import maxsim, xtr_scores
from tilefold.testing import padding
from tilefold.testing.maxsim import MaxSimInputs

# Similarities that differ by less than this part of the largest one may be ordered either way.
UNDECIDED_WINNER = 2e-5
UNDECIDED_RETRIEVAL = 4e-6


def maxsim_results(inputs: MaxSimInputs, *, needs: str = "qd", **options: Any) -> dict[str, Tensor]:
    """Run MaxSim forward and backward.

    Args:
        inputs: The problem.
        needs: Operands that need a gradient: ``"q"``, ``"d"``, ``"qd"`` or ``""``.
        options: Keyword arguments of :func:`tilefold.ops.maxsim`.

    Returns:
        ``scores``, and ``dqueries`` and ``ddocuments`` as far as ``needs`` names them.
    """
    return _results(maxsim, inputs, needs, inputs.layout | options)


def xtr_results(
    inputs: MaxSimInputs,
    top_k: int,
    *,
    needs: str = "qd",
    **options: Any,
) -> dict[str, Tensor]:
    """Like :func:`maxsim_results` for :func:`tilefold.ops.xtr_scores`."""
    layout = padding.without(inputs.layout, "pairing")
    return _results(xtr_scores, inputs, needs, layout | options | {"top_k": top_k})


def _results(
    operator: Callable[..., Tensor],
    inputs: MaxSimInputs,
    needs: str,
    options: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Run ``operator`` forward and backward; see :func:`maxsim_results`."""
    leaves = {
        "queries": inputs.queries.detach().requires_grad_("q" in needs),
        "documents": inputs.documents.detach().requires_grad_("d" in needs),
    }
    scores = operator(leaves["queries"], leaves["documents"], **options)
    return {"scores": scores.detach(), **padding.gradients(scores, leaves, inputs.dscores)}


def with_one_answer(inputs: MaxSimInputs, **options: Any) -> MaxSimInputs:
    """Zero ``dscores`` of pairs whose winners depend on the order of evaluation.

    A pair is such a one if, for some query token, the two largest similarities differ by less than
    :data:`UNDECIDED_WINNER` of the largest similarity. Builds every similarity in fp64, which suits
    small problems only.

    Args:
        inputs: The problem.
        options: Keyword arguments of the operator that change its similarities.
    """
    if options.get("temperature") is not None:
        return inputs
    exact = inputs.cast(torch.float64)
    queries = _rows(exact.queries, normalize=bool(options.get("normalize")))
    documents = _rows(exact.documents, normalize=bool(options.get("normalize")))
    query_valid = _valid_tokens(exact.queries, exact.query_mask)
    document_valid = _valid_tokens(exact.documents, exact.document_mask)
    query_offsets = _offsets(exact.queries, exact.cu_seqlens_q)
    document_offsets = _offsets(exact.documents, exact.cu_seqlens_d)
    pairs = _pairs(inputs, len(query_offsets) - 1, len(document_offsets) - 1)
    dscores = inputs.dscores.clone()
    flat_dscores = dscores.view(-1)
    for index, (q, d) in enumerate(pairs):
        query_rows = slice(query_offsets[q], query_offsets[q + 1])
        document_rows = slice(document_offsets[d], document_offsets[d + 1])
        query = queries[query_rows][query_valid[query_rows]]
        document = documents[document_rows]
        valid = document_valid[document_rows]
        if options.get("mask_mode") == "zero":
            document = document.masked_fill(~valid[:, None], 0)
        else:
            document = document[valid]
        similarities = (query @ document.T).nan_to_num()
        if _has_undecided_winner(similarities):
            flat_dscores[index] = 0
    return dataclasses.replace(inputs, dscores=dscores)


def _has_undecided_winner(similarities: Tensor) -> bool:
    """Whether rounding may decide the largest entry of a row of ``[Lq, Ld]`` similarities."""
    if similarities.numel() == 0 or similarities.size(1) < 2:
        return False
    largest = similarities.topk(2, dim=1).values
    margin = UNDECIDED_WINNER * max(1.0, float(similarities.abs().max()))
    return bool((largest[:, 0] - largest[:, 1] < margin).any())


def _rows(tokens: Tensor, *, normalize: bool) -> Tensor:
    """Token vectors of any layout as ``[T, D]``."""
    rows = tokens.reshape(-1, tokens.size(-1))
    return torch.nn.functional.normalize(rows, dim=-1) if normalize else rows


def _valid_tokens(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """``[T]`` booleans: which token vectors the mask leaves."""
    if mask is None:
        return torch.ones(tokens.shape[:-1].numel(), dtype=torch.bool, device=tokens.device)
    return (mask != 0).reshape(-1)


def _offsets(tokens: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    """Where each sequence begins among the rows of :func:`_rows`, and where the last one ends."""
    if cu_seqlens is not None:
        return [int(value) for value in cu_seqlens.tolist()]
    return [i * tokens.size(-2) for i in range(tokens.shape[:-2].numel() + 1)]


def _pairs(inputs: MaxSimInputs, n_queries: int, n_documents: int) -> list[tuple[int, int]]:
    """Query and document of every score, in the order of the flattened scores."""
    if isinstance(inputs.pairing, Tensor):
        return [(q, d) for q, d in inputs.pairing.tolist()]
    if inputs.pairing == "all":
        return list(itertools.product(range(n_queries), range(n_documents)))
    documents_per_query = max(n_documents // n_queries, 1)
    return [(d // documents_per_query, d) for d in range(n_documents)]


def assert_maxsim_matches(
    inputs: MaxSimInputs,
    *,
    kind: str = "gradient",
    needs: str = "qd",
    **options: Any,
) -> dict[str, Tensor]:
    """Run an implementation of MaxSim and check its results against their budgets.

    Pairs without one answer are taken out by :func:`with_one_answer`.

    Args:
        inputs: The problem.
        kind: Budget of the gradients.
        needs: Operands that need a gradient.
        options: Keyword arguments of the operator, ``impl`` among them.

    Returns:
        The results of the implementation.
    """
    reference_options: dict[str, Any] = padding.without(options, "impl")
    inputs = with_one_answer(inputs, **reference_options)
    results = maxsim_results(inputs, needs=needs, **options)
    truth = maxsim_results(
        inputs.cast(torch.float64),
        needs=needs,
        impl="reference",
        **reference_options,
    )
    return held_to_budgets(results, truth, kind)


def clear_retrievals(inputs: MaxSimInputs, top_k: int, *, normalize: bool = False) -> Tensor:
    """Find the queries whose retrieved document tokens do not depend on the order of evaluation.

    A query token is clear if its ``top_k``-th and its next similarity are equal, or differ by more
    than :data:`UNDECIDED_RETRIEVAL` of the largest similarity.

    Args:
        inputs: The problem.
        top_k: Number of document tokens that a query token retrieves.
        normalize: Whether token vectors are normalised.

    Returns:
        ``[Nq]`` booleans: whether every valid token of the query is clear.
    """
    exact = inputs.cast(torch.float64)
    queries = _rows(exact.queries.nan_to_num(), normalize=normalize)
    documents = _rows(exact.documents.nan_to_num(), normalize=normalize)
    query_valid = _valid_tokens(exact.queries, exact.query_mask)
    document_valid = _valid_tokens(exact.documents, exact.document_mask)
    similarities = queries @ documents[document_valid].T  # [Tq, valid document tokens]
    clear = torch.ones(similarities.size(0), dtype=torch.bool, device=similarities.device)
    if similarities.size(1) > top_k and similarities.numel():
        largest = similarities.topk(top_k + 1, dim=1).values
        gap = largest[:, top_k - 1] - largest[:, top_k]
        margin = UNDECIDED_RETRIEVAL * max(1.0, float(similarities.abs().max()))
        clear = (gap == 0) | (gap > margin) | ~query_valid
    offsets = _offsets(exact.queries, exact.cu_seqlens_q)
    return torch.stack([clear[start:end].all() for start, end in itertools.pairwise(offsets)])


def assert_xtr_matches(
    inputs: MaxSimInputs,
    top_k: int,
    *,
    kind: str = "gradient",
    needs: str = "qd",
    **options: Any,
) -> dict[str, Tensor]:
    """Like :func:`assert_maxsim_matches` for :func:`tilefold.ops.xtr_scores`.

    Queries without one answer are left out of the comparison.

    Raises:
        ValueError: If that leaves no query.
    """
    reference_options: dict[str, Any] = padding.without(options, "impl")
    clear = clear_retrievals(inputs, top_k, normalize=bool(options.get("normalize")))
    if not bool(clear.any()):
        raise ValueError(
            f"inputs must have a query with one answer, got 0 of {len(clear)}; take another seed.",
        )
    inputs = with_one_answer(inputs, normalize=options.get("normalize"))
    inputs = dataclasses.replace(inputs, dscores=inputs.dscores * clear[:, None])
    results = xtr_results(inputs, top_k, needs=needs, **options)
    truth = xtr_results(
        inputs.cast(torch.float64),
        top_k,
        needs=needs,
        impl="reference",
        **reference_options,
    )
    held_to_budgets(
        results | {"scores": results["scores"][clear]},
        truth | {"scores": truth["scores"][clear]},
        kind,
    )
    return results
