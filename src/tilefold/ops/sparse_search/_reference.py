"""Specification of exact sparse search in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops.sparse_search._problem import SearchOptions, SearchTensors
from tilefold.ops.sparse_search.postings import BLOCK


def scores(tensors: SearchTensors, options: SearchOptions) -> Tensor:
    """Scores ``[Nq, N]`` fp32, sums of products in fixed point; 0 where no term is shared."""
    weights, terms, offsets, places, postings, largest, _ = tensors
    _, n_documents, n_terms = options
    n_blocks = -(-n_documents // BLOCK)
    found = weights.new_zeros(terms.size(0), n_documents)
    shifts = torch.arange(n_blocks, device=terms.device)[:, None] * n_terms
    for row, (asked, given) in enumerate(zip(terms.long(), weights, strict=True)):
        known = (asked >= 0) & (asked < n_terms) & (given > 0)
        own, values = asked[known], given[known]
        exponent = torch.frexp(
            (values * largest[own]).sum(),
        ).exponent  # the bound is below two to this
        up = (31 - exponent).clamp(-126, 126)
        keys = (shifts + own).flatten()
        starts, counts = offsets[keys], offsets[keys + 1] - offsets[keys]
        first = torch.repeat_interleave(starts - counts.cumsum(0) + counts, counts)
        at = first + torch.arange(first.numel(), device=first.device)
        blocks = torch.repeat_interleave(keys // n_terms, counts)
        products = torch.repeat_interleave(values.repeat(n_blocks), counts) * postings[at]
        factor = torch.ldexp(torch.ones((), device=terms.device), up)
        whole = torch.where(products > 0, (products * factor + 0.5).floor().clamp(min=1), 0).long()
        sums = torch.zeros(n_documents, dtype=torch.int64, device=terms.device)
        sums.index_add_(0, blocks * BLOCK + places[at].long(), whole)
        found[row] = sums.float() * torch.ldexp(torch.ones((), device=terms.device), -up)
    return found


def topk(tensors: SearchTensors, options: SearchOptions) -> tuple[Tensor, Tensor]:
    """Bits of the ``k`` highest positive scores of each query, and their documents; equal ones by
    document.

    0 and -1 stand behind them.
    """
    weights, terms, *_, allowed = tensors
    each = [
        tensors._replace(weights=weights[i : i + 1], terms=terms[i : i + 1])
        for i in range(terms.size(0))
    ]
    kept = [scores(one, options) * (1 if allowed is None else allowed != 0) for one in each]
    best = [row.sort(dim=1, descending=True, stable=True) for row in kept]
    values, documents = (torch.cat([part[at][:, : options.k] for part in best]) for at in (0, 1))
    return values.view(torch.int32), torch.where(values > 0, documents, -1)
