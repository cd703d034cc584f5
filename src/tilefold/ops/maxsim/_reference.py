"""MaxSim in plain PyTorch: the specification the other implementations are held to.

It builds every similarity ``[.., Lq, Ld]``, in at least fp32, on any device, with autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops.maxsim._problem import Problem, wide_dtype


def padded(
    rows: Tensor,
    mask: Tensor | None,
    cu: Tensor | None,
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences ``[N, L, D]``, and ``[N, L]`` bools: the token exists, and it is not masked."""
    kept = (
        torch.ones(rows.size(0), dtype=torch.bool, device=rows.device)
        if mask is None
        else mask != 0
    )
    rows = rows.masked_fill(~kept[:, None], 0)  # a masked NaN must not reach a product
    if cu is None:
        kept = kept.view(-1, length)
        return rows.view(*kept.shape, -1), torch.ones_like(kept), kept
    lengths = cu.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    exists = torch.arange(max(longest, 1), device=rows.device) < lengths[:, None]
    place = exists.nonzero(as_tuple=True)
    tokens = rows.new_zeros(*exists.shape, rows.size(1)).index_put(place, rows)
    return tokens, exists, torch.zeros_like(exists).index_put(place, kept)


def unit(x: Tensor) -> Tensor:
    """Rows divided by their norm; a zero row stays zero and has no gradient."""
    # divided by the largest entry first, a constant: squares then neither overflow nor vanish
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    zero = largest == 0
    x = x / torch.where(zero, 1, largest)
    square = x.square().sum(dim=-1, keepdim=True)
    return torch.where(zero, 0, x * torch.where(zero, 1, square).rsqrt())


def first_largest(x: Tensor, allowed: Tensor) -> Tensor:
    """Index of the largest allowed entry along the last dim, the lowest among equals, the first NaN
    if there is one.
    """
    masked = x.masked_fill(~allowed, float("-inf"))
    best = masked.amax(dim=-1, keepdim=True)
    return (
        (((masked == best) | (masked.isnan() & best.isnan())) & allowed)
        .to(torch.uint8)
        .argmax(dim=-1)
    )


def sides(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries ``[Nq, Lq, D]`` and which tokens are kept; documents ``[Nd, Ld, D]``, which tokens
    exist and are kept.
    """
    dtype = wide_dtype(problem.queries.dtype)
    q, _, q_kept = padded(
        problem.queries.to(dtype),
        problem.query_mask,
        problem.cu_queries,
        problem.query_length,
    )
    d, exists, d_kept = padded(
        problem.documents.to(dtype),
        problem.document_mask,
        problem.cu_documents,
        problem.document_length,
    )
    if problem.normalize:
        q, d = unit(q), unit(d)
    return q, q_kept, d, exists, d_kept


def maxsim(problem: Problem) -> Tensor:
    """Scores, in the shape of the pairing."""
    q, q_kept, d, exists, d_kept = sides(problem)
    if problem.pairing == "all":
        sims = torch.einsum("qid,njd->qnij", q, d)  # [Nq, Nd, Lq, Ld]
        q_kept, d_kept, exists = q_kept[:, None], d_kept[None], exists[None]
    else:
        document = torch.arange(problem.n_documents, device=d.device)
        which = (
            (document // max(problem.group, 1), document)
            if problem.index is None
            else problem.index.long().unbind(1)
        )
        q_kept, d_kept, exists = q_kept[which[0]], d_kept[which[1]], exists[which[1]]
        sims = torch.einsum("pid,pjd->pij", q[which[0]], d[which[1]])  # [P, Lq, Ld]
    allowed = (exists if problem.mask_zero else d_kept).unsqueeze(-2)  # [.., 1, Ld]
    sims = torch.where(d_kept.unsqueeze(-2), sims, 0)
    some = allowed.any(dim=-1)  # [.., 1]
    if problem.temperature:
        inside = sims.masked_fill(~allowed & some[..., None], float("-inf"))
        peak = inside.detach().amax(dim=-1)
        peak = torch.where(peak.isfinite(), peak, 0)
        # the difference first: a similarity divided by a small temperature may be no number of the
        # dtype any more
        temperature = max(problem.temperature, torch.finfo(sims.dtype).tiny)
        best = peak + temperature * ((inside - peak.unsqueeze(-1)) / temperature).logsumexp(dim=-1)
    else:
        winner = first_largest(sims, allowed.expand(sims.shape))
        best = sims.gather(-1, winner.unsqueeze(-1)).squeeze(-1)  # [.., Lq]
    return torch.where(some & q_kept, best, 0).sum(dim=-1)


def xtr(problem: Problem, top_k: int, impute: bool) -> Tensor:
    """XTR scores ``[Nq, Nd]``: of the maxima of :func:`maxsim`, those among the ``top_k`` of each
    query token.
    """
    q, q_kept, d, _, d_kept = sides(problem)
    sims = torch.einsum("qid,njd->qinj", q, d)  # [Nq, Lq, Nd, Ld]
    kept = d_kept.expand(sims.shape)
    ordered = (
        sims.detach()
        .masked_fill(~kept, float("-inf"))
        .flatten(2)
        .sort(dim=-1, descending=True)
        .values
    )
    if ordered.size(-1) < top_k:
        threshold = torch.full_like(ordered[..., :1], float("-inf"))
    else:
        threshold = ordered[..., top_k - 1, None]  # NaN counts as larger than any number
    winner = first_largest(sims, kept)
    best = sims.gather(-1, winner.unsqueeze(-1)).squeeze(-1)  # [Nq, Lq, Nd]
    possible = q_kept[..., None] & d_kept.any(dim=-1)
    found = possible & ((best >= threshold) | best.isnan())
    if impute:
        total = torch.where(found, best, torch.where(possible, threshold, 0)).sum(dim=1)
        return total / q_kept.sum(dim=1).clamp(min=1)[:, None]
    return torch.where(found, best, 0).sum(dim=1) / found.sum(dim=1).clamp(min=1)
