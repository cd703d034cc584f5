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


def maxsim_results(inputs: MaxSimInputs, *, needs: str = "qd", **options: Any) -> dict[str, Tensor]:
    """Run forward and backward; return ``scores`` and the gradients ``dqueries`` and ``ddocuments``
    asked for.

    ``needs`` is ``"q"``, ``"d"``, both or neither: what wants a gradient; options are the
    operator's.
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
    return _results(
        xtr_scores,
        inputs,
        needs,
        padding.without(inputs.layout, "pairing") | options | {"top_k": top_k},
    )


def _results(
    operator: Callable[..., Tensor],
    inputs: MaxSimInputs,
    needs: str,
    options: Mapping[str, Any],
) -> dict[str, Tensor]:
    sides = {"queries": inputs.queries, "documents": inputs.documents}
    leaves = {name: side.detach().requires_grad_(name[0] in needs) for name, side in sides.items()}
    scores = operator(leaves["queries"], leaves["documents"], **options)
    return {"scores": scores.detach(), **padding.gradients(scores, leaves, inputs.dscores)}


def with_one_answer(inputs: MaxSimInputs, **options: Any) -> MaxSimInputs:
    """Zero ``dscores`` where floating point does not decide a winner, so that a tight budget can
    hold.

    That is where for some query token the two largest similarities differ by less than the order of
    evaluation may (2e-5 of the largest similarity). Builds every similarity in fp64: for small
    problems.
    """
    if options.get("temperature") is not None:
        return inputs
    exact = inputs.cast(torch.float64)
    sides = ((exact.queries, exact.query_mask), (exact.documents, exact.document_mask))
    kept = [_kept(tokens, mask).reshape(-1) for tokens, mask in sides]
    queries, documents = (t.reshape(-1, t.size(-1)) for t in (exact.queries, exact.documents))
    if options.get("normalize"):
        queries, documents = (
            torch.nn.functional.normalize(t, dim=-1) for t in (queries, documents)
        )
    ends = [
        _offsets(exact.queries, exact.cu_seqlens_q),
        _offsets(exact.documents, exact.cu_seqlens_d),
    ]
    dscores = inputs.dscores.clone()
    flat = dscores.view(-1)
    for place, (q, d) in enumerate(_pairs(inputs, len(ends[0]) - 1, len(ends[1]) - 1)):
        rows, columns = slice(ends[0][q], ends[0][q + 1]), slice(ends[1][d], ends[1][d + 1])
        mine, theirs = queries[rows][kept[0][rows]], documents[columns]
        if options.get("mask_mode") == "zero":
            theirs = theirs.masked_fill(~kept[1][columns][:, None], 0)
        else:
            theirs = theirs[kept[1][columns]]
        sims = (mine @ theirs.T).nan_to_num()
        if sims.numel() and sims.size(1) > 1:
            best = sims.topk(2, dim=1).values
            if bool((best[:, 0] - best[:, 1] < 2e-5 * max(1.0, float(sims.abs().max()))).any()):
                flat[place] = 0
    return dataclasses.replace(inputs, dscores=dscores)


def _kept(tokens: Tensor, mask: Tensor | None) -> Tensor:
    return (
        torch.ones(tokens.shape[:-1], dtype=torch.bool, device=tokens.device)
        if mask is None
        else mask != 0
    )


def _offsets(tokens: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    if cu_seqlens is not None:
        return [int(value) for value in cu_seqlens.tolist()]
    return [i * tokens.size(-2) for i in range(tokens.shape[:-2].numel() + 1)]


def _pairs(inputs: MaxSimInputs, n_queries: int, n_documents: int) -> list[tuple[int, int]]:
    if isinstance(inputs.pairing, Tensor):
        return [(q, d) for q, d in inputs.pairing.tolist()]
    if inputs.pairing == "all":
        return [(q, d) for q in range(n_queries) for d in range(n_documents)]
    return [(d // max(n_documents // n_queries, 1), d) for d in range(n_documents)]


def assert_maxsim_matches(
    inputs: MaxSimInputs,
    *,
    kind: str = "gradient",
    needs: str = "qd",
    **options: Any,
) -> dict[str, Tensor]:
    """Run an implementation and hold its scores and gradients to their budgets; return its results.

    Pairs without one answer are taken out by :func:`with_one_answer`. ``kind`` is the budget of the
    gradients that ``needs`` asks for; options are the operator's, with ``impl``.
    """
    choices: dict[str, Any] = padding.without(options, "impl")
    inputs = with_one_answer(inputs, **choices)
    results = maxsim_results(inputs, needs=needs, **options)
    truth = maxsim_results(inputs.cast(torch.float64), needs=needs, impl="reference", **choices)
    return held_to_budgets(results, truth, kind)


def clear_retrievals(inputs: MaxSimInputs, top_k: int, *, normalize: bool = False) -> Tensor:
    """``[Nq]``: whether every kept token of the query retrieves the same, whatever the order of
    evaluation.

    That is where its ``top_k``-th and its next similarity are equal, or differ by more than 4e-6 of
    the largest.
    """
    exact = inputs.cast(torch.float64)
    rows, kept = [], []
    for tokens, mask in ((exact.queries, exact.query_mask), (exact.documents, exact.document_mask)):
        flat = tokens.reshape(-1, tokens.size(-1)).nan_to_num()
        rows.append(torch.nn.functional.normalize(flat, dim=-1) if normalize else flat)
        kept.append(_kept(tokens, mask).reshape(-1))
    sims = rows[0] @ rows[1][kept[1]].T  # [Tq, kept]
    clear = torch.ones(sims.size(0), dtype=torch.bool, device=sims.device)
    if sims.size(1) > top_k and sims.numel():
        best = sims.topk(top_k + 1, dim=1).values
        gap = best[:, top_k - 1] - best[:, top_k]
        clear = (gap == 0) | (gap > 4e-6 * max(1.0, float(sims.abs().max()))) | ~kept[0]
    ends = _offsets(exact.queries, exact.cu_seqlens_q)
    return torch.stack([clear[a:b].all() for a, b in itertools.pairwise(ends)])


def assert_xtr_matches(
    inputs: MaxSimInputs,
    top_k: int,
    *,
    kind: str = "gradient",
    needs: str = "qd",
    **options: Any,
) -> dict[str, Tensor]:
    """Like :func:`assert_maxsim_matches` for :func:`tilefold.ops.xtr_scores`; queries without one
    answer are left out.

    Raises:
        ValueError: where that leaves no query.
    """
    choices: dict[str, Any] = padding.without(options, "impl")
    clear = clear_retrievals(inputs, top_k, normalize=bool(options.get("normalize")))
    if not bool(clear.any()):
        raise ValueError(
            f"inputs must have a query with one answer, got 0 of {len(clear)}; take another seed.",
        )
    inputs = with_one_answer(inputs, normalize=options.get("normalize"))
    inputs = dataclasses.replace(inputs, dscores=inputs.dscores * clear[:, None])
    results = xtr_results(inputs, top_k, needs=needs, **options)
    truth = xtr_results(inputs.cast(torch.float64), top_k, needs=needs, impl="reference", **choices)
    judged, exact = ({**found, "scores": found["scores"][clear]} for found in (results, truth))
    held_to_budgets(judged, exact, kind)
    return results
