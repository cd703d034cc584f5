"""Test problems of MaxSim and XTR."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tilefold.testing import padding

PAIRINGS = ("all", "aligned", "grouped", "index")


@dataclasses.dataclass(frozen=True)
class MaxSimInputs(padding.Problem):
    """A test problem of :func:`tilefold.ops.maxsim`, with the gradient of its scores.

    Attributes:
        queries: ``[Nq, Lq, D]``, or packed ``[T, D]``.
        documents: ``[Nd, Ld, D]``, ``[B, N, Ld, D]``, or packed ``[T, D]``.
        query_mask: ``[Nq, Lq]``, nonzero for valid tokens, or None.
        document_mask: the same for documents, ``[Nd, Ld]`` or ``[B, N, Ld]``, or None.
        cu_seqlens_q: offsets of packed queries ``[Nq + 1]``, or None.
        cu_seqlens_d: offsets of packed documents ``[Nd + 1]``, or None.
        pairing: the name of a pairing, or positions of queries and documents ``[P, 2]``.
        dscores: gradient of the scores, with their shape; fp32, or fp64 for fp64 token vectors.
    """

    queries: Tensor
    documents: Tensor
    query_mask: Tensor | None
    document_mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_d: Tensor | None
    pairing: str | Tensor
    dscores: Tensor

    @property
    def layout(self) -> dict[str, Any]:
        """Masks, offsets and pairing, as keyword arguments of the operator."""
        names = ("query_mask", "document_mask", "cu_seqlens_q", "cu_seqlens_d", "pairing")
        return {name: getattr(self, name) for name in names}

    def cast(self, dtype: torch.dtype) -> MaxSimInputs:
        """Return a copy with token vectors in ``dtype``, and ``dscores`` in the scores' dtype."""
        return dataclasses.replace(
            self,
            queries=self.queries.to(dtype),
            documents=self.documents.to(dtype),
            dscores=self.dscores.to(torch.promote_types(dtype, torch.float32)),
        )

    def packed(self, sides: str = "qd") -> MaxSimInputs:
        """Return a copy in which the tokens of queries, documents or both are packed.

        Masked tokens are dropped, and offsets replace the mask.

        Args:
            sides: ``"q"`` for queries, ``"d"`` for documents, ``"qd"`` for both.
        """
        problem = self
        if "q" in sides:
            tokens, cu_seqlens = _pack(self.queries, self.query_mask)
            problem = dataclasses.replace(
                problem,
                queries=tokens,
                query_mask=None,
                cu_seqlens_q=cu_seqlens,
            )
        if "d" in sides:
            tokens, cu_seqlens = _pack(self.documents, self.document_mask)
            problem = dataclasses.replace(
                problem,
                documents=tokens,
                document_mask=None,
                cu_seqlens_d=cu_seqlens,
            )
        return problem


def _pack(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pack padded sequences one after another, without masked tokens.

    Args:
        tokens: token vectors ``[..., L, D]`` of n sequences.
        mask: ``[..., L]``, nonzero for valid tokens, or None if all are valid.

    Returns:
        The tokens ``[T, D]``, and the offsets ``[n + 1]`` of the sequences.
    """
    if mask is None:
        mask = tokens.new_ones(tokens.shape[:-1], dtype=torch.bool)
    is_valid = mask != 0
    lengths = is_valid.reshape(-1, is_valid.size(-1)).sum(dim=1)
    return tokens[is_valid], padding.offsets(lengths)


def maxsim_inputs(
    n_queries: int,
    n_documents: int,
    query_length: int,
    document_length: int,
    dim: int,
    *,
    pairing: str = "all",
    layout: str = "full",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> MaxSimInputs:
    """Create random inputs with similarities of standard deviation about 1, equal on every device.

    Args:
        n_queries: number of queries.
        n_documents: number of documents; for ``"grouped"``, the number of each query's documents.
            ``"aligned"`` has as many documents as queries, and ignores it.
        query_length: number of tokens of the longest query.
        document_length: number of tokens of the longest document.
        dim: width D of a token vector.
        pairing: ``"all"``, ``"aligned"``, ``"grouped"``, or ``"index"`` for random pairs, some of
            which may be equal.
        layout: padding, one of :data:`tilefold.testing.padding.LAYOUTS`. With two or more queries,
            all layouts but ``"full"`` have an empty query; the same holds for documents.
        dtype: dtype of the token vectors.
        device: the device of all tensors.
        seed: seed of the random numbers.

    Raises:
        ValueError: for an unknown layout or pairing.
    """
    padding.check_layout(layout)
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing must be one of {PAIRINGS}, got {pairing!r}.")
    generator = torch.Generator().manual_seed(seed)
    n_pairs = n_queries + n_documents
    documents_shape: tuple[int, ...]
    scores_shape: tuple[int, ...]
    if pairing == "all":
        documents_shape = (n_documents,)
        scores_shape = (n_queries, n_documents)
    elif pairing == "aligned":
        documents_shape = (n_queries,)
        scores_shape = (n_queries,)
    elif pairing == "grouped":
        documents_shape = (n_queries, n_documents)
        scores_shape = (n_queries, n_documents)
    else:
        documents_shape = (n_documents,)
        scores_shape = (n_pairs,)
    # A similarity is a sum of D products. With factors of variance D^-0.5, it has variance 1.
    scale = dim**-0.25
    queries = torch.randn(n_queries, query_length, dim, generator=generator) * scale
    documents = torch.randn(*documents_shape, document_length, dim, generator=generator) * scale
    pairs: str | Tensor = pairing
    if pairing == "index":
        query_positions = torch.randint(n_queries, (n_pairs, 1), generator=generator)
        document_positions = torch.randint(n_documents, (n_pairs, 1), generator=generator)
        pairs = torch.cat([query_positions, document_positions], dim=1)
    inputs = MaxSimInputs(
        queries=queries,
        documents=documents,
        query_mask=_random_mask(layout, queries, generator),
        document_mask=_random_mask(layout, documents, generator),
        cu_seqlens_q=None,
        cu_seqlens_d=None,
        pairing=pairs,
        dscores=torch.randn(scores_shape, generator=generator),
    )
    if layout == "packed":
        inputs = inputs.packed()
    return inputs.cast(dtype).to(device)


def _random_mask(layout: str, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
    """Draw a mask with a full sequence and, if there are two or more, an empty sequence.

    Args:
        layout: one of :data:`tilefold.testing.padding.LAYOUTS`.
        tokens: token vectors ``[..., L, D]``.
        generator: source of the random numbers.

    Returns:
        A mask ``[..., L]``, True for valid tokens; None for the layout ``"full"``.
    """
    if layout == "full":
        return None
    n_sequences = tokens.shape[:-2].numel()
    mask = padding.random_mask(layout, n_sequences, tokens.size(-2), generator)
    # a slice also works for a batch without sequences
    mask[:1] = True
    if n_sequences >= 2:
        mask[n_sequences // 2] = False
    return mask.view(tokens.shape[:-1])
