"""Queries and documents in the forms of sentence-transformers, and their MaxSim scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.integrations._token_vectors import as_tensor, as_tokens, pack, token_vectors
from tilefold.ops import maxsim

EMPTY_DOCUMENT_SCORE = -1e9  # the score of a document without tokens in sentence-transformers
# The largest number of elements of queries or documents that are packed or moved at once.
CHUNK_ELEMENTS = 100_000_000


class TokenVectors(NamedTuple):
    """Token vectors of queries or documents on one device, padded or packed.

    Attributes:
        vectors: the vectors, padded ``[..., L, D]`` or packed ``[T, D]``.
        mask: which padded vectors count, bool ``[..., L]``; ``None`` if they are packed.
        cu_seqlens: the offsets of packed sequences, ``[B + 1]``; ``None`` if they are padded.
    """

    vectors: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None

    def counts(self) -> Tensor:
        """Return the number of vectors of each sequence that count, ``[...]``."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff()
        is_counted: Tensor = self.vectors.any(dim=-1) if self.mask is None else self.mask
        return is_counted.sum(dim=-1)


class Side:
    """All queries, or all documents, of a call that scores them.

    Attributes:
        vectors: the token vectors: one padded tensor ``[N, L, D]``, or a list of ``[L_i, D]``.
        mask: which vectors count, ``[N, L]``, or ``None``.
        device: the device of the token vectors; ``None`` for NumPy arrays.
        count: the number of sequences N.
    """

    def __init__(self, name: str, embeddings: object, mask: object, weighted: bool = False) -> None:
        """Convert the token vectors of queries or documents, and their mask, to tensors.

        Args:
            name: the name of the argument, for error messages.
            embeddings: the token vectors, ``[N, L, D]``, ``[L, D]`` or a list of ``[L_i, D]``.
            mask: which vectors count, ``[N, L]`` or a list. If it is None, zero rows of a padded
                tensor are padding, and all other vectors count.
            weighted: whether a floating mask multiplies the vectors.
        """
        self.vectors: Tensor | list[Tensor]
        if isinstance(embeddings, (list, tuple)):
            self.vectors = token_vectors(name, embeddings)
            longest = max((sequence.size(0) for sequence in self.vectors), default=0)
            source = embeddings[0] if embeddings else None  # shows the device
        else:
            tensor = as_tensor(embeddings)
            batch = tensor[None] if tensor.dim() == 2 else tensor  # a single sequence is a batch
            self.vectors = as_tokens(name, batch, dims=3)
            longest = self.vectors.size(1)
            source = embeddings
        # NumPy arrays have no device. They are moved to the device of the queries or documents that
        # they are scored with.
        self.device = source.device if isinstance(source, Tensor) else None
        self.count = len(self.vectors)
        self.mask: Tensor | None = None
        if mask is not None:
            mask_name = f"{name.removesuffix('_embeddings')}_mask"
            self.mask = _batch_mask(mask_name, mask, self.count, longest)
            if weighted and self.mask.is_floating_point():
                self._multiply(self.mask)

    def _multiply(self, weights: Tensor) -> None:
        """Multiply the vectors by weights ``[N, L]``."""
        if isinstance(self.vectors, Tensor):
            self.vectors = self.vectors * weights.to(self.vectors)[..., None]
            return
        self.vectors = [
            vectors * vector_weights[: len(vectors), None].to(vectors)
            for vectors, vector_weights in zip(self.vectors, weights, strict=True)
        ]

    def slices(self, device: torch.device, max_elements: int) -> list[slice]:
        """Divide the sequences into parts that are moved to a device one after another.

        The size of a part includes padding, except for lists without a mask, which need none.

        Args:
            device: the device.
            max_elements: the largest number of elements of a part. A longer sequence is a part by
                itself.

        Returns:
            Slices of the sequences; a single slice if they are padded and already on the device.
        """
        if isinstance(self.vectors, Tensor) and self.vectors.device == device:
            return [slice(0, self.count)]
        is_packed = isinstance(self.vectors, list) and self.mask is None
        slices: list[slice] = []
        # The current part: its first sequence, longest sequence and number of vectors.
        start = 0
        longest = 0
        n_vectors = 0
        for position, vectors in enumerate(self.vectors):
            length, dim = vectors.shape
            longest = max(longest, length)
            n_vectors += length
            n_sequences = position + 1 - start
            n_padded_vectors = n_sequences * longest
            n_elements = (n_vectors if is_packed else n_padded_vectors) * dim
            if position > start and n_elements > max_elements:
                # The part ends before this sequence, which begins the next part.
                slices.append(slice(start, position))
                start = position
                longest = length
                n_vectors = length
        slices.append(slice(start, self.count))
        return slices

    def select(self, sequences: slice, device: torch.device) -> TokenVectors:
        """Return consecutive sequences on a device.

        A list without a mask is packed, and a list with a mask is padded.

        Args:
            sequences: the slice of the sequences. It must not be empty if ``vectors`` is a list.
            device: the device.
        """
        selected = self.vectors[sequences]
        if isinstance(selected, list) and self.mask is None:
            packed, offsets = pack(selected)
            return TokenVectors(packed.to(device), mask=None, cu_seqlens=offsets.to(device))
        if isinstance(selected, list):
            selected = torch.nn.utils.rnn.pad_sequence(selected, batch_first=True)
        vectors = selected.to(device)
        if self.mask is None:
            is_counted = vectors.any(dim=-1)  # zero rows are padding
        else:
            is_counted = self.mask[sequences, : vectors.size(1)].to(device) != 0
        return TokenVectors(vectors, mask=is_counted, cu_seqlens=None)

    def to(self, device: torch.device) -> TokenVectors:
        """Return all sequences on a device. A list must have at least one."""
        return self.select(slice(0, self.count), device)


def scores_of_sides(
    queries: Side,
    documents: Side,
    pairing: str,
    length_normalize: bool,
    impl: str,
    chunk_elements: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Compute MaxSim of queries and documents in parts that fit into the memory of a device.

    Args:
        queries: Nq queries.
        documents: Nd documents.
        pairing: ``"all"`` scores every query with every document, ``"aligned"`` query ``i`` with
            document ``i``.
        length_normalize: whether scores are divided by the number of query tokens.
        impl: the implementation of ``maxsim``.
        chunk_elements: the largest number of elements of a part; by default ``CHUNK_ELEMENTS``.
        device: the device that computes; by default that of the result.

    Returns:
        fp32 scores ``[Nq, Nd]`` or ``[N]`` on the device of the documents. If the documents are
        NumPy arrays, they are on the device of the queries.
    """
    output_device = documents.device or queries.device or torch.device("cpu")
    compute_device = output_device if device is None else torch.device(device)
    max_elements = CHUNK_ELEMENTS if chunk_elements is None else chunk_elements
    if pairing == "aligned" and queries.count != documents.count:
        raise ValueError(
            f"there must be one document for each of the {queries.count} queries, "
            f"got {documents.count} documents.",
        )
    if queries.count == 0 or documents.count == 0:
        shape = (queries.count, documents.count) if pairing == "all" else (0,)
        return torch.zeros(shape, device=output_device)

    def score_part(query_part: TokenVectors, document_slice: slice) -> Tensor:
        """Score queries with some of the documents, and move the scores to the output device."""
        document_part = documents.select(document_slice, compute_device)
        scores = maxsim_scores(query_part, document_part, pairing, length_normalize, impl)
        return scores.to(output_device)

    document_slices = documents.slices(compute_device, max_elements)
    if pairing == "aligned":
        parts = [
            score_part(queries.select(sequences, compute_device), sequences)
            for sequences in document_slices
        ]
        return _concatenate(parts, 0)
    rows = []
    for query_slice in queries.slices(compute_device, max_elements):
        query_part = queries.select(query_slice, compute_device)
        columns = [score_part(query_part, sequences) for sequences in document_slices]
        rows.append(_concatenate(columns, 1))
    return _concatenate(rows, 0)


def maxsim_scores(
    queries: TokenVectors,
    documents: TokenVectors,
    pairing: str,
    length_normalize: bool,
    impl: str,
) -> Tensor:
    """Compute MaxSim as sentence-transformers does: in fp32, with -1e9 for empty documents.

    Args:
        queries: the token vectors of queries.
        documents: the token vectors of documents.
        pairing: ``"all"`` scores every query with every document, ``"aligned"`` query ``i`` with
            document ``i``, ``"grouped"`` each query with its N documents.
        length_normalize: whether scores are divided by the number of query tokens.
        impl: the implementation of ``maxsim``.
    """
    scores: Tensor = maxsim(
        queries.vectors,
        documents.vectors,
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


class GroupedDocuments(NamedTuple):
    """Padded token vectors of N documents for each of B queries.

    Attributes:
        vectors: the vectors ``[B, N, Ld, D]``.
        mask: which vectors count, bool ``[B, N, Ld]``.
    """

    vectors: Tensor
    mask: Tensor


def as_grouped_documents(embeddings: object, mask: object) -> GroupedDocuments:
    """Convert documents that are grouped by query, and their mask, to tensors.

    Args:
        embeddings: the token vectors of N documents for each of B queries, ``[B, N, Ld, D]``.
        mask: which vectors count, ``[B, N, Ld]``. If it is None, zero rows are padding.

    Raises:
        ValueError: if the vectors or the mask have another shape.
    """
    vectors = as_tokens("documents_embeddings", embeddings, dims=4)
    if mask is None:
        return GroupedDocuments(vectors, vectors.any(dim=-1))
    shape = list(vectors.shape[:-1])
    mask_tensor = _as_mask("documents_mask", mask, shape)
    if list(mask_tensor.shape) != shape:
        raise ValueError(
            f"documents_mask must have shape {shape}, one entry per token, "
            f"got {list(mask_tensor.shape)}.",
        )
    return GroupedDocuments(vectors, mask_tensor.to(vectors.device) != 0)


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _batch_mask(name: str, mask: object, count: int, longest: int) -> Tensor:
    """Convert the mask of a batch of sequences to a tensor ``[count, longest]``.

    Args:
        name: the name of the argument, for error messages.
        mask: a tensor or an array ``[count, longest]``, a list of masks, or ``[longest]``, which
            all sequences share.
        count: the number of sequences.
        longest: the number of vectors of the longest sequence.
    """
    if isinstance(mask, (list, tuple)):
        sequence_masks = [_as_mask(name, sequence_mask, ["L"]) for sequence_mask in mask]
        if sequence_masks:
            mask = torch.nn.utils.rnn.pad_sequence(sequence_masks, batch_first=True)
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


def _as_mask(name: str, mask: object, expected_shape: Sequence[object]) -> Tensor:
    """Convert a mask to a tensor, without checking its shape.

    Args:
        name: the name of the argument, for the error message.
        mask: a tensor or an array.
        expected_shape: the shape that the error message names.

    Raises:
        TypeError: if the mask is not an array of numbers.
    """
    try:
        return torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(mask).__name__
        raise TypeError(
            f"{name} must be a tensor or an array of numbers of shape {expected_shape}, got {got}.",
        ) from error
