"""Specification of exact sparse search in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops.sparse_search.postings import BLOCK, BlockedPostings


def scores(postings: BlockedPostings, terms: Tensor, weights: Tensor) -> Tensor:
    """Scores ``[Nq, N]`` fp32, sums of products in fixed point; 0 where no term is shared."""
    found = weights.new_zeros(terms.size(0), postings.n_documents)
    shifts = torch.arange(postings.n_blocks, device=terms.device)[:, None] * postings.n_terms
    for row, (asked, given) in enumerate(zip(terms.long(), weights, strict=True)):
        known = (asked >= 0) & (asked < postings.n_terms) & (given > 0)
        own, values = asked[known], given[known]
        exponent = torch.frexp((values * postings.largest[own]).sum()).exponent  # the bound is below two to this
        up = (31 - exponent).clamp(-126, 126)
        keys = (shifts + own).flatten()
        starts, counts = postings.offsets[keys], postings.offsets[keys + 1] - postings.offsets[keys]
        first = torch.repeat_interleave(starts - counts.cumsum(0) + counts, counts)
        at = first + torch.arange(first.numel(), device=first.device)
        blocks = torch.repeat_interleave(keys // postings.n_terms, counts)
        products = torch.repeat_interleave(values.repeat(postings.n_blocks), counts) * postings.weights[at]
        factor = torch.ldexp(torch.ones((), device=terms.device), up)
        whole = torch.where(products > 0, (products * factor + 0.5).floor().clamp(min=1), 0).long()
        sums = torch.zeros(postings.n_documents, dtype=torch.int64, device=terms.device)
        sums.index_add_(0, blocks * BLOCK + postings.places[at].long(), whole)
        found[row] = sums.float() * torch.ldexp(torch.ones((), device=terms.device), -up)
    return found


def topk(
    postings: BlockedPostings, terms: Tensor, weights: Tensor, k: int, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The ``k`` highest positive scores of each query, and their documents; equal ones by document, 0 and -1 behind."""
    found = [scores(postings, terms[i : i + 1], weights[i : i + 1]) for i in range(terms.size(0))]
    kept = [row if allowed is None else row * (allowed != 0) for row in found]
    best = [row.sort(dim=1, descending=True, stable=True) for row in kept]
    values, documents = (torch.cat([part[at][:, :k] for part in best]) for at in (0, 1))
    return values, torch.where(values > 0, documents, -1)
