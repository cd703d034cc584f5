"""MaxSim in plain PyTorch: the specification that the other implementations are held to.

It computes every similarity ``[.., Lq, Ld]``, in at least fp32, on any device, with autograd.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops.maxsim._problem import Problem, pair_sequences, wide_dtype


class PaddedTokens(NamedTuple):
    """Queries or documents, padded to one length.

    Attributes:
        vectors: ``[N, L, D]``, 0 for masked tokens and past the end of a sequence.
        exists: ``[N, L]`` bools, false past the end of a packed sequence.
        unmasked: ``[N, L]`` bools, false for masked tokens and past the end of a sequence.
    """

    vectors: Tensor
    exists: Tensor
    unmasked: Tensor


def pad_sequences(
    rows: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    length: int,
) -> PaddedTokens:
    """Pad sequences to one length.

    Args:
        rows: ``[T, D]`` token vectors.
        mask: ``[T]``, nonzero = keep, or ``None``.
        cu_seqlens: ``[N + 1]`` offsets of packed sequences, or ``None``.
        length: number of rows of each padded sequence; ignored for packed ones.
    """
    if mask is None:
        unmasked = torch.ones(rows.size(0), dtype=torch.bool, device=rows.device)
    else:
        unmasked = mask != 0
    rows = rows.masked_fill(~unmasked[:, None], 0)  # a masked NaN must not reach a product
    if cu_seqlens is None:
        unmasked = unmasked.view(-1, length)
        return PaddedTokens(
            vectors=rows.view(*unmasked.shape, -1),
            exists=torch.ones_like(unmasked),
            unmasked=unmasked,
        )
    lengths = cu_seqlens.diff()
    # at least one column, since there is no maximum over none
    longest = max(int(lengths.max()), 1) if lengths.numel() else 1
    exists = torch.arange(longest, device=rows.device) < lengths[:, None]
    positions = exists.nonzero(as_tuple=True)
    return PaddedTokens(
        vectors=rows.new_zeros(*exists.shape, rows.size(1)).index_put(positions, rows),
        exists=exists,
        unmasked=torch.zeros_like(exists).index_put(positions, unmasked),
    )


def normalize_rows(x: Tensor) -> Tensor:
    """Divide vectors by their norm. A zero vector stays zero and has no gradient."""
    # The division by the largest entry, a constant, keeps squares from overflow and underflow.
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    is_zero = largest == 0
    x = x / torch.where(is_zero, 1, largest)
    square = x.square().sum(dim=-1, keepdim=True)
    return torch.where(is_zero, 0, x * torch.where(is_zero, 1, square).rsqrt())


def first_largest(x: Tensor, allowed: Tensor) -> Tensor:
    """Return the position of the largest allowed entry along the last dimension.

    Among equal entries it is the first one. If there is a NaN, it is the first NaN.

    Args:
        x: entries.
        allowed: bools in the shape of ``x``.
    """
    masked = x.masked_fill(~allowed, float("-inf"))
    largest = masked.amax(dim=-1, keepdim=True)
    is_largest = (masked == largest) | (masked.isnan() & largest.isnan())
    return (is_largest & allowed).to(torch.uint8).argmax(dim=-1)


def padded_sides(problem: Problem) -> tuple[PaddedTokens, PaddedTokens]:
    """Return the queries and the documents of a problem as padded tensors, in at least fp32.

    Args:
        problem: the tensors and options of a call. With ``problem.normalize``, token vectors are
            divided by their L2 norms.
    """
    dtype = wide_dtype(problem.queries.dtype)
    queries = pad_sequences(
        problem.queries.to(dtype),
        problem.query_mask,
        problem.cu_queries,
        problem.query_length,
    )
    documents = pad_sequences(
        problem.documents.to(dtype),
        problem.document_mask,
        problem.cu_documents,
        problem.document_length,
    )
    if problem.normalize:
        queries = queries._replace(vectors=normalize_rows(queries.vectors))
        documents = documents._replace(vectors=normalize_rows(documents.vectors))
    return queries, documents


def maxsim(problem: Problem) -> Tensor:
    """Compute MaxSim scores: ``score = sum_i max_j q_i . d_j``.

    The sum is over the unmasked tokens of the query. The maximum is over the tokens of the
    document, of which masked ones are left out, or in mode "zero" have the similarity 0. With a
    temperature, the maximum is a smooth one. A document without such tokens scores 0.

    Returns:
        ``[Nq, Nd]`` for all pairs, else ``[P]``.
    """
    queries, documents = padded_sides(problem)
    if problem.pairing == "all":
        similarities = torch.einsum(
            "qid,njd->qnij",
            queries.vectors,
            documents.vectors,
        )  # [Nq, Nd, Lq, Ld]
        query_unmasked = queries.unmasked[:, None]
        document_unmasked = documents.unmasked[None]
        document_exists = documents.exists[None]
    else:
        query_of_pair, document_of_pair = pair_sequences(problem)
        similarities = torch.einsum(
            "pid,pjd->pij",
            queries.vectors[query_of_pair],
            documents.vectors[document_of_pair],
        )  # [P, Lq, Ld]
        query_unmasked = queries.unmasked[query_of_pair]
        document_unmasked = documents.unmasked[document_of_pair]
        document_exists = documents.exists[document_of_pair]
    # in mode "zero", masked tokens count with the similarity 0
    is_counted = document_exists if problem.mask_zero else document_unmasked
    is_counted = is_counted.unsqueeze(-2)  # [.., 1, Ld]
    similarities = torch.where(document_unmasked.unsqueeze(-2), similarities, 0)
    has_tokens = is_counted.any(dim=-1)  # [.., 1]
    if problem.temperature:
        # without this condition, a row of minus infinity only would have the gradient NaN
        excluded = ~is_counted & has_tokens[..., None]
        maxima = _smooth_maxima(
            similarities.masked_fill(excluded, float("-inf")),
            problem.temperature,
        )
    else:
        winner = first_largest(similarities, is_counted.expand(similarities.shape))
        maxima = similarities.gather(-1, winner.unsqueeze(-1)).squeeze(-1)  # [.., Lq]
    return torch.where(has_tokens & query_unmasked, maxima, 0).sum(dim=-1)


def _smooth_maxima(similarities: Tensor, temperature: float) -> Tensor:
    """Compute ``temperature * log sum_j exp(s_j / temperature)`` over the last dimension."""
    peak = similarities.detach().amax(dim=-1)
    peak = torch.where(peak.isfinite(), peak, 0)
    # The peak is subtracted first: a similarity divided by a small temperature may overflow.
    temperature = max(temperature, torch.finfo(similarities.dtype).tiny)
    exponents = (similarities - peak.unsqueeze(-1)) / temperature
    return peak + temperature * exponents.logsumexp(dim=-1)


def xtr(problem: Problem, top_k: int, impute: bool) -> Tensor:
    """Compute XTR scores ``[Nq, Nd]``: the mean of the maxima that the query tokens retrieve.

    A query token retrieves the ``top_k`` document tokens of all documents that are most similar to
    it. The ``top_k``-th similarity is its threshold.

    Args:
        problem: tensors and options of the call, for all pairs.
        top_k: number of document tokens that each query token retrieves.
        impute: whether a query token that retrieved no token of a document scores its threshold,
            instead of being left out of the mean.
    """
    queries, documents = padded_sides(problem)
    similarities = torch.einsum(
        "qid,njd->qinj",
        queries.vectors,
        documents.vectors,
    )  # [Nq, Lq, Nd, Ld]
    allowed = documents.unmasked.expand(similarities.shape)
    # [Nq, Lq, Nd * Ld] similarities of each query token to all document tokens, largest first
    ordered = (
        similarities.detach()
        .masked_fill(~allowed, float("-inf"))
        .flatten(2)
        .sort(dim=-1, descending=True)
        .values
    )
    if ordered.size(-1) < top_k:
        threshold = torch.full_like(ordered[..., :1], float("-inf"))
    else:
        threshold = ordered[..., top_k - 1 : top_k]  # NaN counts as larger than any number
    winner = first_largest(similarities, allowed)
    maxima = similarities.gather(-1, winner.unsqueeze(-1)).squeeze(-1)  # [Nq, Lq, Nd]
    has_tokens = queries.unmasked[..., None] & documents.unmasked.any(dim=-1)
    retrieved = has_tokens & ((maxima >= threshold) | maxima.isnan())
    if impute:
        imputed = torch.where(has_tokens, threshold, 0)
        total = torch.where(retrieved, maxima, imputed).sum(dim=1)
        return total / queries.unmasked.sum(dim=1).clamp(min=1)[:, None]
    total = torch.where(retrieved, maxima, 0).sum(dim=1)
    return total / retrieved.sum(dim=1).clamp(min=1)
