"""Queries and documents in the forms of sentence-transformers, divided into parts for calls of
``maxsim``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.integrations._ragged import as_tensor, as_tokens, pack, token_vectors
from tilefold.ops import maxsim

EMPTY_DOCUMENT_SCORE = -1e9  # score of a document without a token in sentence-transformers
CHUNK_ELEMENTS = (
    100_000_000  # numbers of one side that are packed, or moved to another device, at a time
)


class Part(NamedTuple):
    """Some sequences of a side: ``[.., L, D]`` with a bool mask, or ``[T, D]`` with the offsets of
    its sequences.
    """

    rows: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None

    def counts(self) -> Tensor:
        """``[..]`` tokens of each sequence that take part."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff()
        kept: Tensor = self.rows.any(dim=-1) if self.mask is None else self.mask
        return kept.sum(dim=-1)


class Side:
    """All queries or documents: ``[n, L, D]``, ``[L, D]`` or a list of ``[L_i, D]``; a floating
    mask may weigh them.
    """

    def __init__(self, name: str, embeddings: object, mask: object, weighted: bool = False) -> None:
        self.rows: Tensor | list[Tensor]
        if isinstance(embeddings, (list, tuple)):
            self.rows = token_vectors(name, embeddings)
            longest = max((item.size(0) for item in self.rows), default=0)
            first = embeddings[0] if embeddings else None
        else:
            rows, first = as_tensor(embeddings), embeddings
            self.rows = as_tokens(name, rows[None] if rows.dim() == 2 else rows, 3)
            longest = self.rows.size(1)
        self.device = (
            first.device if isinstance(first, Tensor) else None
        )  # arrays go to the device of the other side
        self.count = len(self.rows)
        name = f"{name.removesuffix('_embeddings')}_mask"
        self.mask = None if mask is None else _mask(name, mask, self.count, longest)
        if weighted and self.mask is not None and self.mask.is_floating_point():
            weights = self.mask
            if isinstance(self.rows, Tensor):
                self.rows = self.rows * weights.to(self.rows)[..., None]
            else:
                pairs = zip(self.rows, weights, strict=True)
                self.rows = [row * weight[: len(row), None].to(row) for row, weight in pairs]

    def parts(self, device: torch.device, budget: int) -> list[slice]:
        """The whole side if it is padded and on ``device``, else parts of up to ``budget`` numbers."""
        if isinstance(self.rows, Tensor) and self.rows.device == device:
            return [slice(0, self.count)]
        packed = isinstance(self.rows, list) and self.mask is None
        found: list[slice] = []
        start, width, total = 0, 0, 0
        for i, item in enumerate(self.rows):
            size, dim = item.shape
            width, total = max(width, size), total + size
            if i > start and (total if packed else width * (i + 1 - start)) * dim > budget:
                found.append(slice(start, i))
                start, width, total = i, size, size
        return [*found, slice(start, self.count)]

    def part(self, where: slice, device: torch.device) -> Part:
        """Some of the sequences, on ``device``; at least one if the side is a list."""
        chosen = self.rows[where]
        if isinstance(chosen, list):
            if self.mask is None:
                rows, offsets = pack(chosen)
                return Part(rows.to(device), None, offsets.to(device))
            chosen = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        chosen = chosen.to(device)
        if self.mask is None:
            return Part(chosen, chosen.any(dim=-1), None)
        return Part(chosen, self.mask[where, : chosen.size(1)].to(device) != 0, None)


def scores_of_sides(
    queries: Side,
    documents: Side,
    pairing: str,
    length_normalize: bool,
    impl: str,
    chunk_elements: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """fp32 scores ``[Nq, Nd]`` (``pairing="all"``) or ``[N]`` (``"aligned"``) on the device of the
    documents.
    """
    home = documents.device or queries.device or torch.device("cpu")
    place = home if device is None else torch.device(device)
    budget = CHUNK_ELEMENTS if chunk_elements is None else chunk_elements
    if pairing == "aligned" and queries.count != documents.count:
        expected = f"there must be one document for each of the {queries.count} queries"
        raise ValueError(f"{expected}, got {documents.count} documents.")
    if queries.count == 0 or documents.count == 0:
        return torch.zeros(
            (queries.count, documents.count) if pairing == "all" else (0,),
            device=home,
        )

    def scored(query: Part, where: slice) -> Tensor:
        return score(query, documents.part(where, place), pairing, length_normalize, impl).to(home)

    columns = documents.parts(place, budget)
    if pairing == "aligned":
        return _joined([scored(queries.part(where, place), where) for where in columns], 0)
    rows = []
    for part in queries.parts(place, budget):
        query = queries.part(part, place)
        rows.append(_joined([scored(query, where) for where in columns], 1))
    return _joined(rows, 0)


def score(
    queries: Part,
    documents: Part,
    pairing: str,
    length_normalize: bool,
    impl: str,
) -> Tensor:
    """Scores of sentence-transformers from sums: fp32, -1e9 for empty documents, then the mean over
    query tokens.
    """
    layout: dict[str, Any] = {"query_mask": queries.mask, "document_mask": documents.mask}
    layout |= {"cu_seqlens_q": queries.cu_seqlens, "cu_seqlens_d": documents.cu_seqlens}
    scores: Tensor = maxsim(queries.rows, documents.rows, **layout, pairing=pairing, impl=impl)
    scores = scores.float().masked_fill(documents.counts() == 0, EMPTY_DOCUMENT_SCORE)
    if not length_normalize:
        return scores
    kept = queries.counts().clamp(min=1)
    return scores / (kept if pairing == "aligned" else kept[:, None])


def groups(embeddings: object, mask: object) -> tuple[Tensor, Tensor]:
    """Documents ``[B, N, Ld, D]`` and their mask ``[B, N, Ld]``; without one, rows of zeros are
    padding.
    """
    rows = as_tokens("documents_embeddings", embeddings, 4)
    if mask is None:
        return rows, rows.any(dim=-1)
    shape = list(rows.shape[:-1])
    found = _as_mask("documents_mask", mask, shape)
    if list(found.shape) != shape:
        raise ValueError(
            f"documents_mask must have shape {shape}, one entry per token, got {list(found.shape)}.",
        )
    return rows, found.to(rows.device) != 0


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _mask(name: str, mask: object, count: int, longest: int) -> Tensor:
    """``[count, longest]``."""
    if isinstance(mask, (list, tuple)):
        rows = [_as_mask(name, item, ["L"]) for item in mask]
        mask = (
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            if rows
            else torch.zeros(0, longest)
        )
    found = _as_mask(name, mask, [count, longest])
    found = found[None] if found.dim() == 1 else found
    if found.dim() != 2 or found.size(0) not in (1, count) or found.size(1) != longest:
        raise ValueError(
            f"{name} must have shape {[count, longest]}, one entry per token, got {list(found.shape)}.",
        )
    return found.expand(count, -1)


def _as_mask(name: str, mask: object, shape: Sequence[object]) -> Tensor:
    try:
        return torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(mask).__name__
        raise TypeError(
            f"{name} must be a tensor or an array of numbers of shape {shape}, got {got}.",
        ) from error
