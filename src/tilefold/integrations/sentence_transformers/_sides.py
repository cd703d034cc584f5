"""Queries and documents in the forms of sentence-transformers, scored by ``maxsim`` in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.integrations._token_vectors import as_tensor, as_tokens, pack, token_vectors
from tilefold.ops import maxsim

EMPTY_DOCUMENT_SCORE = -1e9  # score of a document without a token in sentence-transformers
# Number of elements of one side that are packed, or moved to another device, at a time.
CHUNK_ELEMENTS = 100_000_000


class SidePart(NamedTuple):
    """Some sequences of a side, padded or packed.

    Attributes:
        rows: token vectors: padded ``[..., L, D]``, or packed ``[T, D]``.
        mask: which padded vectors count, bool ``[..., L]``; ``None`` for packed ones.
        cu_seqlens: offsets of packed sequences, ``[B + 1]``; ``None`` for padded ones.
    """

    rows: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None

    def counts(self) -> Tensor:
        """Return the number of vectors of each sequence that count, ``[...]``."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff()
        is_counted: Tensor = self.rows.any(dim=-1) if self.mask is None else self.mask
        return is_counted.sum(dim=-1)


class Side:
    """All queries or all documents of a call.

    Args:
        name: name of the argument, for error messages.
        embeddings: ``[N, L, D]``, ``[L, D]`` or a list of ``[L_i, D]``.
        mask: which vectors count, ``[N, L]`` or a list; ``None`` if all of them do, except rows of
            zeros in a padded tensor.
        weighted: whether a floating mask multiplies the vectors.
    """

    def __init__(self, name: str, embeddings: object, mask: object, weighted: bool = False) -> None:
        """Convert token vectors and their mask to tensors.

        Args:
            name: name of the argument, for error messages.
            embeddings: ``[N, L, D]``, ``[L, D]`` or a list of ``[L_i, D]``.
            mask: which vectors count, ``[N, L]`` or a list; ``None`` if all of them do, except rows
                of zeros in a padded tensor.
            weighted: whether a floating mask multiplies the vectors.
        """
        self.rows: Tensor | list[Tensor]
        if isinstance(embeddings, (list, tuple)):
            self.rows = token_vectors(name, embeddings)
            longest = max((item.size(0) for item in self.rows), default=0)
            first_item = embeddings[0] if embeddings else None
        else:
            rows = as_tensor(embeddings)
            self.rows = as_tokens(name, rows[None] if rows.dim() == 2 else rows, 3)
            longest = self.rows.size(1)
            first_item = embeddings
        # Arrays have no device. They are moved to the device of the other side.
        self.device = first_item.device if isinstance(first_item, Tensor) else None
        self.count = len(self.rows)
        mask_name = f"{name.removesuffix('_embeddings')}_mask"
        self.mask = None if mask is None else _mask(mask_name, mask, self.count, longest)
        if weighted and self.mask is not None and self.mask.is_floating_point():
            self._multiply(self.mask)

    def _multiply(self, weights: Tensor) -> None:
        """Multiply the vectors by weights ``[N, L]``."""
        if isinstance(self.rows, Tensor):
            self.rows = self.rows * weights.to(self.rows)[..., None]
            return
        self.rows = [
            vectors * vector_weights[: len(vectors), None].to(vectors)
            for vectors, vector_weights in zip(self.rows, weights, strict=True)
        ]

    def slices(self, device: torch.device, budget: int) -> list[slice]:
        """Divide the sequences into parts that are moved to a device one after another.

        Args:
            device: the device.
            budget: largest number of elements of a part. A longer sequence is a part by itself.

        Returns:
            Slices of the sequences; one slice if they are padded and on the device already.
        """
        if isinstance(self.rows, Tensor) and self.rows.device == device:
            return [slice(0, self.count)]
        is_packed = isinstance(self.rows, list) and self.mask is None
        slices: list[slice] = []
        # The current part: its first sequence, longest sequence and number of vectors.
        start = 0
        longest = 0
        n_vectors = 0
        for position, vectors in enumerate(self.rows):
            length, dim = vectors.shape
            longest = max(longest, length)
            n_vectors += length
            n_sequences = position + 1 - start
            n_stored_vectors = n_vectors if is_packed else n_sequences * longest
            if position > start and n_stored_vectors * dim > budget:
                # The part ends before this sequence, which begins the next one.
                slices.append(slice(start, position))
                start = position
                longest = length
                n_vectors = length
        slices.append(slice(start, self.count))
        return slices

    def part(self, sequences: slice, device: torch.device) -> SidePart:
        """Return some of the sequences on a device.

        A list without a mask is packed, and a list with a mask is padded.

        Args:
            sequences: slice of the sequences; at least one if the side is a list.
            device: the device.
        """
        rows = self.rows[sequences]
        if isinstance(rows, list):
            if self.mask is None:
                packed, offsets = pack(rows)
                return SidePart(packed.to(device), mask=None, cu_seqlens=offsets.to(device))
            rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        rows = rows.to(device)
        if self.mask is None:
            is_counted = rows.any(dim=-1)  # rows of zeros are padding
        else:
            is_counted = self.mask[sequences, : rows.size(1)].to(device) != 0
        return SidePart(rows, mask=is_counted, cu_seqlens=None)


def scores_of_sides(
    queries: Side,
    documents: Side,
    pairing: str,
    length_normalize: bool,
    impl: str,
    chunk_elements: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Score queries and documents part by part.

    Args:
        queries: Nq queries.
        documents: Nd documents.
        pairing: ``"all"``, or ``"aligned"``: one document for each query.
        length_normalize: whether scores are divided by the number of query tokens.
        impl: implementation of ``maxsim``.
        chunk_elements: number of elements of a part; by default ``CHUNK_ELEMENTS``.
        device: device that computes; by default that of the documents.

    Returns:
        fp32 scores ``[Nq, Nd]`` or ``[N]`` on the device of the documents, else of the queries.
    """
    output_device = documents.device or queries.device or torch.device("cpu")
    compute_device = output_device if device is None else torch.device(device)
    budget = CHUNK_ELEMENTS if chunk_elements is None else chunk_elements
    if pairing == "aligned" and queries.count != documents.count:
        raise ValueError(
            f"there must be one document for each of the {queries.count} queries, "
            f"got {documents.count} documents.",
        )
    if queries.count == 0 or documents.count == 0:
        shape = (queries.count, documents.count) if pairing == "all" else (0,)
        return torch.zeros(shape, device=output_device)

    def score_part(query_part: SidePart, sequences: slice) -> Tensor:
        """Score queries with some of the documents, and move the scores to the output device."""
        document_part = documents.part(sequences, compute_device)
        scores = score(query_part, document_part, pairing, length_normalize, impl)
        return scores.to(output_device)

    document_slices = documents.slices(compute_device, budget)
    if pairing == "aligned":
        parts = [
            score_part(queries.part(sequences, compute_device), sequences)
            for sequences in document_slices
        ]
        return _concatenate(parts, 0)
    rows = []
    for query_slice in queries.slices(compute_device, budget):
        query_part = queries.part(query_slice, compute_device)
        columns = [score_part(query_part, sequences) for sequences in document_slices]
        rows.append(_concatenate(columns, 1))
    return _concatenate(rows, 0)


def score(
    queries: SidePart,
    documents: SidePart,
    pairing: str,
    length_normalize: bool,
    impl: str,
) -> Tensor:
    """Compute the scores of sentence-transformers: fp32, -1e9 for documents without a token.

    Args:
        queries: part of the queries.
        documents: part of the documents.
        pairing: see :func:`tilefold.ops.maxsim`.
        length_normalize: whether scores are divided by the number of query tokens.
        impl: implementation of ``maxsim``.
    """
    scores: Tensor = maxsim(
        queries.rows,
        documents.rows,
        query_mask=queries.mask,
        document_mask=documents.mask,
        cu_seqlens_q=queries.cu_seqlens,
        cu_seqlens_d=documents.cu_seqlens,
        pairing=pairing,
        impl=impl,
    )
    is_empty_document = documents.counts() == 0
    scores = scores.float().masked_fill(is_empty_document, EMPTY_DOCUMENT_SCORE)
    if not length_normalize:
        return scores
    n_query_tokens = queries.counts().clamp(min=1)
    if pairing == "aligned":
        return scores / n_query_tokens
    return scores / n_query_tokens[:, None]  # one row of scores per query


def groups(embeddings: object, mask: object) -> tuple[Tensor, Tensor]:
    """Convert documents that are grouped by query, and their mask, to tensors.

    Args:
        embeddings: token vectors of N documents for each of B queries, ``[B, N, Ld, D]``.
        mask: which vectors count, ``[B, N, Ld]``. Without one, rows of zeros are padding.

    Returns:
        Vectors ``[B, N, Ld, D]``, and a bool mask ``[B, N, Ld]``.

    Raises:
        ValueError: for another shape of the vectors or the mask.
    """
    rows = as_tokens("documents_embeddings", embeddings, 4)
    if mask is None:
        return rows, rows.any(dim=-1)
    shape = list(rows.shape[:-1])
    mask = _as_mask("documents_mask", mask, shape)
    if list(mask.shape) != shape:
        raise ValueError(
            f"documents_mask must have shape {shape}, one entry per token, got {list(mask.shape)}.",
        )
    return rows, mask.to(rows.device) != 0


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _mask(name: str, mask: object, count: int, longest: int) -> Tensor:
    """Convert a mask to a tensor ``[count, longest]``.

    Args:
        name: name of the argument, for error messages.
        mask: a tensor or an array ``[count, longest]`` or ``[longest]``, or a list of masks.
        count: number of sequences.
        longest: number of vectors of the longest sequence.
    """
    if isinstance(mask, (list, tuple)):
        rows = [_as_mask(name, item, ["L"]) for item in mask]
        if rows:
            mask = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        else:
            mask = torch.zeros(0, longest)
    tensor = _as_mask(name, mask, [count, longest])
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2 or tensor.size(0) not in (1, count) or tensor.size(1) != longest:
        raise ValueError(
            f"{name} must have shape {[count, longest]}, one entry per token, "
            f"got {list(tensor.shape)}.",
        )
    return tensor.expand(count, -1)


def _as_mask(name: str, mask: object, shape: Sequence[object]) -> Tensor:
    """Convert a mask to a tensor, of any shape.

    Args:
        name: name of the argument, for the error message.
        mask: a tensor or an array.
        shape: expected shape, for the error message.

    Raises:
        TypeError: for anything that is no array of numbers.
    """
    try:
        return torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(mask).__name__
        raise TypeError(
            f"{name} must be a tensor or an array of numbers of shape {shape}, got {got}.",
        ) from error
