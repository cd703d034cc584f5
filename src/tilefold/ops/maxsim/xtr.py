"""XTR scores: MaxSim of the document tokens that each query token retrieves from the batch.

The forward pass consists of torch operations on tiles of similarities, on any device. For a block
of query tokens, the similarities to all documents are computed tile by tile, and each tile is
reduced twice. The first reduction keeps the largest similarities of every query token so far, and
the last of them is the threshold in the end. The second one gives the maximum and the winner of
every document.

Gradients are those of the maximum, for the winners that were retrieved.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.impl import host_may_read
from tilefold.ops._shared.operator import Checked, Operator
from tilefold.ops.maxsim import _reference, _tiled, tiles
from tilefold.ops.maxsim._arguments import check_arguments
from tilefold.ops.maxsim._problem import (
    NO_WINNER_BITS,
    MaxSimTensors,
    Problem,
    XtrOptions,
    XtrSaved,
    check_values,
    new_saved_values,
    wide_dtype,
    winner_bits,
    xtr_outputs,
)
from tilefold.ops.maxsim._query_blocks import QueryBlock, divide_queries
from tilefold.ops.maxsim._walk import Slab, group_documents, split_into_slabs
from tilefold.ops.maxsim.api import empty_scores
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
    """Compute XTR scores (Lee et al. 2023, arXiv 2304.01982) without all similarities in memory.

    Each query token i retrieves document tokens: those whose similarity ``s_ij = q_i . d_j`` is at
    least its ``top_k``-th largest over the unmasked tokens of **all** documents. Only retrieved
    tokens count for the score of a document::

        score[q, d] = 1/Z sum_i max_{j in d, retrieved by i} s_ij                    (0 if Z = 0)
        score[q, d] = 1/n sum_i (the maximum above, or else the top_k-th s_ij of i)  (impute=True)

    ``Z`` is the number of unmasked query tokens that retrieved a token of the document, and ``n``
    the number of all unmasked query tokens. The first score is for training. The second is what a
    search computes: for a query token that retrieved nothing from a document, it imputes the
    ``top_k``-th similarity (the paper's ``m_i``).

    Products accumulate in fp32 (fp64 for fp64 input), and scores are fp32 (fp64). All similarities
    equal to the ``top_k``-th are retrieved, so that ties do not depend on an order. Among equal
    maxima of a document, the first token gets the gradient. A NaN similarity counts as larger than
    any number: it is one of the ``top_k``, and its score is NaN. The choice of retrieved tokens has
    no gradient. If ``top_k`` is at least the number of unmasked document tokens, the result is that
    of ``maxsim(..., reduction="mean")``, whose remarks on empty documents and on backward also
    apply.

    The similarities ``[Nq, Nd, Lq, Ld]`` are computed tile by tile. Forward stores ``top_k``
    numbers per query token of a tile, and 9 bytes per query token and document.

    Args:
        queries: ``[Nq, Lq, D]``, or ``[T, D]`` packed with ``cu_seqlens_q``; fp16, bf16, fp32 or
            fp64.
        documents: ``[Nd, Ld, D]``, or ``[T, D]`` packed with ``cu_seqlens_d``; dtype of
            ``queries``.
        top_k: the paper's k', 1 or more: document tokens that a query token retrieves from the
            batch.
        query_mask, document_mask, normalize: as in :func:`tilefold.ops.maxsim`. A masked token is
            never retrieved, and is none of the ``top_k``.
        cu_seqlens_q, cu_seqlens_d: as in :func:`tilefold.ops.maxsim`, but checked on every device.
        impute: score like a search; for inference, without gradients.
        impl: as in :func:`tilefold.ops.maxsim`. ``"triton"`` uses kernels for backward. Forward
            consists of torch operations for both ``"tiled"`` and ``"triton"``, and waits for the
            device to read masks and offsets.

    Returns:
        ``[Nq, Nd]`` scores.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`maxsim`; ``ValueError`` for a gradient with
            ``impute``.

    Examples:
        >>> import torch
        >>> queries, documents = torch.randn(2, 4, 16), torch.randn(3, 10, 16)
        >>> xtr_scores(queries, documents, top_k=8).shape
        torch.Size([2, 3])
    """
    if (
        isinstance(top_k, bool)
        or (isinstance(top_k, int) and top_k < 1)
        or not isinstance(top_k, (int, torch.SymInt))
    ):
        raise ValueError(f"top_k must be a positive integer, got {top_k!r}.")
    any_documents: object = documents
    if isinstance(any_documents, QuantizedTokens):
        raise TypeError(
            "documents must be a torch.Tensor, got QuantizedTokens; give documents.dequantize().",
        )
    tensors = MaxSimTensors(
        queries=queries,
        documents=documents,
        query_mask=query_mask,
        document_mask=document_mask,
        cu_queries=cu_seqlens_q,
        cu_documents=cu_seqlens_d,
        pairs=None,
        document_scale=None,
    )
    scores: Tensor = XTR(tensors, (top_k, impute, normalize), impl, _check_arguments)[0]
    return scores


def _check_arguments(
    tensors: MaxSimTensors,
    top_k: int,
    impute: bool,
    normalize: bool,
) -> Checked:
    """Check everything that can be checked without reading a value of a tensor.

    Args:
        tensors: tensors of the call.
        top_k: number of document tokens that each query token retrieves.
        impute: whether missing similarities are imputed.
        normalize: whether rows are normalised.

    Returns:
        The options of the operator and, under autocast, the function that casts queries and
        documents.
    """
    checked = check_arguments(
        tensors,
        pairing="all",
        reduction="sum",
        mask_mode="exclude",
        temperature=None,
        normalize=normalize,
    )
    if (
        impute
        and torch.is_grad_enabled()
        and (tensors.queries.requires_grad or tensors.documents.requires_grad)
    ):
        raise ValueError(
            "impute must be False if a gradient is needed, got True; call it under "
            "torch.no_grad(), or train with impute=False.",
        )
    return Checked(XtrOptions(top_k, bool(impute), normalize), checked.prepare)


def _by_reference(tensors: MaxSimTensors, options: XtrOptions) -> Tensor:
    """Compute the scores by the reference, whose operations autograd records."""
    problem = Problem.of(tensors, options.maxsim_options)
    with torch.autocast(problem.queries.device.type, enabled=False):
        check_values(tensors)
        if problem.empty:
            return empty_scores(problem)
        return _reference.xtr(problem, options.top_k, options.impute)


def _forward(
    tensors: MaxSimTensors,
    options: XtrOptions,
    training: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute the XTR scores, and what backward reads.

    A query token retrieves the document tokens whose similarity is at least its ``top_k``-th
    largest one, the threshold. The score of a document is the sum of the maxima that were
    retrieved, divided by their number. With ``impute`` the threshold replaces a maximum that was
    not retrieved, and the divisor is the number of query tokens. A winner is the document token
    that has a maximum.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: whether backward may follow.

    Returns:
        ``[Nq, Nd]`` scores; ``[Nd, Tq]`` winners that were retrieved, or ``None`` without
        ``training``; and ``[Nq, Nd]`` divisors of the sums.
    """
    if host_may_read(tensors.queries.device, "tiled"):
        check_values(tensors)
    problem = Problem.of(tensors, options.maxsim_options)
    device = problem.queries.device
    dtype = wide_dtype(problem.queries.dtype)
    scores = torch.zeros(problem.score_shape, dtype=dtype, device=device)
    counts = torch.zeros(problem.score_shape, dtype=dtype, device=device)
    if problem.empty:
        return scores, None, counts.fill_(1)
    queries, documents = tiles.enumerate_unmasked_tokens(problem)
    saved = new_saved_values(problem, queries.rows, training)
    has_tokens = documents.counts > 0
    width, tile_elements = tiles.DEVICE_TILE
    if device.type == "cpu":
        width, tile_elements = tiles.CPU_TILE
        width_of_maxima = max(1, tiles.MAXIMA // max(problem.n_documents, 1))
        width = min(width, tiles.column_limit(queries.rows.size(1)), width_of_maxima)
    for block in divide_queries(queries, max_tokens=width):
        maxima, winners, threshold = _maxima_and_thresholds(
            block,
            documents,
            options.top_k,
            tile_elements,
        )
        retrieved = ((maxima >= threshold) | maxima.isnan()) & has_tokens
        if options.impute:
            missing_value = torch.where(has_tokens, threshold, 0)
        else:
            missing_value = threshold.new_zeros(())
        all_documents = slice(None)
        counted_maxima = torch.where(retrieved, maxima, missing_value)  # [C, Nd]
        block.add_sums(counted_maxima.T, scores, all_documents)
        if not options.impute:
            block.add_sums(retrieved.T.to(dtype), counts, all_documents)
        if training:
            bits = winner_bits(winners, problem.saved_dtype)
            saved[:, block.rows] = bits.masked_fill_(~retrieved, NO_WINNER_BITS).T
    if options.impute:
        counts += queries.counts[:, None]
    divisor = counts.clamp_(min=1)
    returned_winners = saved.view(problem.saved_dtype) if training else None
    return scores.div_(divisor), returned_winners, divisor


def _backward(
    dscores: Tensor,
    saved: XtrSaved,
    options: XtrOptions,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of queries and documents with the backward pass of MaxSim.

    The forward pass has saved which document token is the maximum of each query token. A maximum
    that was not retrieved is saved as "no winner", and so has no gradient.

    Args:
        dscores: gradient of the scores, which are sums of maxima divided by ``saved.divisor``.
        saved: what the forward pass saved.
        options: checked options.
        needs: whether the gradients of queries and documents are needed.
    """
    return _tiled.backward(
        dscores / saved.divisor, saved.maxsim_saved, options.maxsim_options, needs
    )


class BlockMaxima(NamedTuple):
    """Maxima of the similarities of ``C`` query tokens, by document.

    Attributes:
        maxima: ``[C, Nd]`` largest similarity to a token of the document.
        winners: ``[C, Nd]`` int32 position of that token in its document.
        threshold: ``[C, 1]`` ``top_k``-th largest similarity to a token of any document; minus
            infinity if there are fewer tokens.
    """

    maxima: Tensor
    winners: Tensor
    threshold: Tensor


def _maxima_and_thresholds(
    block: QueryBlock,
    documents: tiles.SequenceTokens,
    top_k: int,
    tile_elements: int,
) -> BlockMaxima:
    """Compute the largest similarity of query tokens to each document, and their thresholds.

    The threshold of a query token is its ``top_k``-th largest similarity to any document token.
    Similarities are computed in slabs: several documents, or a part of one long document.

    Args:
        block: ``C`` query tokens.
        documents: the unmasked tokens of all documents.
        top_k: number of document tokens that a query token retrieves.
        tile_elements: largest number of similarities of a slab.
    """
    query_vectors = block.vectors()
    n_query_tokens = query_vectors.size(0)
    offsets = documents.all_offsets()
    max_tokens = max(1, min(documents.vectors_limit(), tile_elements // n_query_tokens))
    maxima = query_vectors.new_full((n_query_tokens, len(offsets) - 1), -math.inf)
    winners = torch.zeros(maxima.shape, dtype=torch.int32, device=query_vectors.device)
    largest = query_vectors.new_empty(n_query_tokens, 0)
    for slab in split_into_slabs(offsets, max_tokens=max_tokens, max_sequences=max_tokens):
        # [C, tokens]; the vectors, which may be a copy, are freed at once
        similarities = query_vectors @ documents.vectors(slab.start, slab.stop).T
        largest = _merge_largest(largest, similarities, top_k)
        if slab.part is not None:
            _merge_part(documents, slab, similarities, maxima, winners)
        else:
            _write_maxima(documents, slab, similarities, max_tokens, maxima, winners)
    if largest.size(1) < top_k:
        threshold = query_vectors.new_full((n_query_tokens, 1), -math.inf)
    else:
        threshold = largest[:, top_k - 1 : top_k]
    return BlockMaxima(maxima, winners, threshold)


def _merge_part(
    documents: tiles.SequenceTokens,
    slab: Slab,
    similarities: Tensor,
    maxima: Tensor,
    winners: Tensor,
) -> None:
    """Merge the maxima over a part of a long document with the maxima over its earlier parts.

    Args:
        documents: the unmasked tokens of all documents.
        slab: a part of one document.
        similarities: ``[C, tokens]`` similarities of ``C`` query tokens to the part.
        maxima: ``[C, Nd]`` maxima. The column of the document is updated.
        winners: ``[C, Nd]`` positions of the best tokens. The same column is updated.
    """
    document = slab.first_sequence
    part_maxima, positions = similarities.max(dim=1)
    rows = documents.rows_of(positions + slab.start)
    part_winners = (rows - documents.starts[document]).int()
    if slab.part != 0:
        part_maxima, part_winners = _tiled.merge_maxima(
            maxima[:, document],
            winners[:, document],
            part_maxima,
            part_winners,
        )
    maxima[:, document] = part_maxima
    winners[:, document] = part_winners


def _write_maxima(
    documents: tiles.SequenceTokens,
    slab: Slab,
    similarities: Tensor,
    max_tokens: int,
    maxima: Tensor,
    winners: Tensor,
) -> None:
    """Write the maxima over the tokens of each document of a slab.

    Documents of similar length are reduced together.

    Args:
        documents: the unmasked tokens of all documents.
        slab: consecutive documents.
        similarities: ``[C, tokens]`` similarities of ``C`` query tokens to the slab.
        max_tokens: largest number of tokens of a group.
        maxima: ``[C, Nd]`` maxima. The columns of the slab's documents are written.
        winners: ``[C, Nd]`` positions of the best tokens. The same columns are written.
    """
    n_query_tokens, n_tokens = similarities.shape
    for group in group_documents(documents, slab, max_tokens):
        token_numbers = group.token_numbers  # [n, L]
        group_similarities = similarities
        is_whole_slab = group.span is not None and token_numbers.numel() == n_tokens
        if not is_whole_slab:
            columns = (token_numbers - slab.start).view(-1)
            group_similarities = similarities.index_select(1, columns)
        document_similarities = group_similarities.view(n_query_tokens, *token_numbers.shape)
        # Both are [C, n]. Positions count the tokens of a document in the group.
        group_maxima, positions = document_similarities.max(dim=2)
        winner_rows = documents.rows_of(token_numbers).gather(1, positions.T)  # [n, C]
        group_winners = winner_rows - documents.starts[group.documents][:, None]
        maxima[:, group.documents] = group_maxima
        winners[:, group.documents] = group_winners.T.int()


def _merge_largest(largest: Tensor, similarities: Tensor, top_k: int) -> Tensor:
    """Merge the largest similarities of each query token with those to further document tokens.

    NaN counts as larger than any number.

    Args:
        largest: ``[C, n]`` largest similarities so far, with ``n <= top_k``.
        similarities: ``[C, tokens]`` similarities to the further tokens.
        top_k: number of similarities that are needed.

    Returns:
        ``[C, min(top_k, n + tokens)]``, the largest one first.
    """
    n_candidates = min(top_k, similarities.size(1))
    candidates = similarities.topk(n_candidates, dim=1).values
    has_no_earlier_tokens = largest.size(1) == 0
    if has_no_earlier_tokens:
        return candidates
    merged = torch.cat([largest, candidates], dim=1)
    return merged.topk(min(top_k, merged.size(1)), dim=1).values


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
