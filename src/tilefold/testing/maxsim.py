"""Inputs of MaxSim and XTR."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tilefold.testing import padding

PAIRINGS = ("all", "aligned", "grouped", "index")


@dataclasses.dataclass(frozen=True)
class MaxSimInputs(padding.Problem):
    """One problem for :func:`tilefold.ops.maxsim`, with the gradient that comes back.

    Attributes:
        queries: ``[Nq, Lq, D]``, or packed ``[T, D]``.
        documents: ``[Nd, Ld, D]``, ``[B, N, Ld, D]``, or packed ``[T, D]``.
        query_mask, document_mask, cu_seqlens_q, cu_seqlens_d: as in :func:`tilefold.ops.maxsim`, or
            ``None``.
        pairing: a name, or a ``[P, 2]`` index.
        dscores: of the scores' shape, fp32 (fp64).
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
        """Masks, offsets and pairing, as keyword arguments."""
        names = ("query_mask", "document_mask", "cu_seqlens_q", "cu_seqlens_d", "pairing")
        return {name: getattr(self, name) for name in names}

    def cast(self, dtype: torch.dtype) -> MaxSimInputs:
        """This problem with token vectors in ``dtype``, and the scores' gradient in what the scores
        then have.
        """
        wide = torch.promote_types(dtype, torch.float32)
        queries, documents = self.queries.to(dtype), self.documents.to(dtype)
        return dataclasses.replace(
            self,
            queries=queries,
            documents=documents,
            dscores=self.dscores.to(wide),
        )

    def packed(self, sides: str = "qd") -> MaxSimInputs:
        """This problem with the kept tokens of queries (``"q"``), documents (``"d"``) or both in
        packed rows.
        """
        changes: dict[str, Any] = {}
        for side, name, mask_name in (
            ("q", "queries", "query_mask"),
            ("d", "documents", "document_mask"),
        ):
            if side not in sides:
                continue
            tokens, mask = getattr(self, name), getattr(self, mask_name)
            kept = (
                tokens.new_ones(tokens.shape[:-1], dtype=torch.bool) if mask is None else mask != 0
            )
            lengths = kept.reshape(-1, kept.size(-1)).sum(dim=1)
            changes |= {
                name: tokens[kept],
                mask_name: None,
                f"cu_seqlens_{side}": padding.offsets(lengths),
            }
        return dataclasses.replace(self, **changes)


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
    """Random inputs with similarities of standard deviation about 1, the same on every device.

    Args:
        n_queries: Nq, or B.
        n_documents: Nd for ``"all"`` and ``"index"``, N for ``"grouped"``; not used for
            ``"aligned"``.
        query_length, document_length, dim: Lq, Ld (the longest of packed ones), D.
        pairing: ``"all"``, ``"aligned"``, ``"grouped"``, or ``"index"`` for some random pairs, some
            of them twice.
        layout: of both sides: ``"full"`` (no mask), ``"right"`` or ``"left"`` padding, ``"holes"``
            anywhere, or ``"packed"``; all but the first with an empty query and an empty document
            where there are two or more.

    ``ValueError`` for an unknown layout or pairing.
    """
    padding.check_layout(layout)
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing must be one of {PAIRINGS}, got {pairing!r}.")
    generator = torch.Generator().manual_seed(seed)
    outer = {"aligned": (n_queries,), "grouped": (n_queries, n_documents)}.get(
        pairing,
        (n_documents,),
    )
    queries = torch.randn(n_queries, query_length, dim, generator=generator) * dim**-0.25
    documents = torch.randn(*outer, document_length, dim, generator=generator) * dim**-0.25
    index: str | Tensor = pairing
    shape: tuple[int, ...] = {"all": (n_queries, n_documents), "grouped": outer}.get(
        pairing,
        (n_queries,),
    )
    if pairing == "index":
        count = n_queries + n_documents
        columns = [
            torch.randint(size, (count, 1), generator=generator)
            for size in (n_queries, n_documents)
        ]
        index, shape = torch.cat(columns, dim=1), (count,)
    masks = _mask(layout, queries, generator), _mask(layout, documents, generator)
    inputs = MaxSimInputs(
        queries,
        documents,
        *masks,
        None,
        None,
        index,
        torch.randn(shape, generator=generator),
    )
    return (inputs.packed() if layout == "packed" else inputs).cast(dtype).to(device)


def _mask(layout: str, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
    if layout == "full":
        return None
    count = tokens.shape[:-2].numel()
    mask = padding.drawn_mask(layout, count, tokens.size(-2), generator)
    mask[:1] = True  # one sequence of the full length
    if count >= 2:
        mask[count // 2] = False
    return mask.view(tokens.shape[:-1])
