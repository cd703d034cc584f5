"""Postings whose documents are divided among several devices, which search together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilefold._internal.arguments import ArgumentError
from tilefold.ops.sparse_search import BlockedPostings, sparse_topk, sparse_topk_of_dense


class _Part(NamedTuple):
    """The documents of one device.

    Attributes:
        first_document: number of the first document in the index.
        postings: postings of the documents, which are counted from 0.
    """

    first_document: int
    postings: BlockedPostings

    @property
    def device(self) -> torch.device:
        """The device of the postings."""
        return self.postings.weights.device

    @property
    def end_document(self) -> int:
        """Number after that of the last document in the index."""
        return self.first_document + self.postings.n_documents


class DividedPostings:
    """Postings whose documents are divided among devices.

    A search returns the same bits as on one device: the largest weights of terms, from which
    scores get their fixed point, are those of all documents, and equal scores are in document
    order.

    Attributes:
        n_documents: number of documents on all devices.
        counts: ``[V]`` int64 number of documents of each term, on the first device.
        largest: ``[V]`` fp32 largest weight of each term, on the first device.
    """

    def __init__(self, parts: Sequence[_Part]) -> None:
        """Let parts search together.

        Args:
            parts: consecutive documents of each device, in order. Queries, masks and results are
                on the first device.
        """
        self.n_documents = parts[-1].end_document
        first_device = parts[0].device
        self.counts = torch.stack([part.postings.counts.to(first_device) for part in parts]).sum(0)
        largest_of_parts = [part.postings.largest.to(first_device) for part in parts]
        self.largest = torch.stack(largest_of_parts).amax(0)
        # Scores are integers times a factor that depends on the largest weights. All parts need the
        # same factor.
        self._parts = [
            part._replace(
                postings=replace(part.postings, largest=self.largest.to(part.device)),
            )
            for part in parts
        ]

    @classmethod
    def of(cls, postings: Any, devices: Sequence[torch.device]) -> DividedPostings:
        """Divide the documents of an index evenly, and copy their postings to the devices.

        Args:
            postings: postings of all documents, which the caller has checked
                (:class:`tilefold.retrieval.index.exact.Postings`).
            devices: the devices. If there are fewer documents, the last devices get none.
        """
        # An index without documents has one part without documents.
        n_parts = max(1, min(len(devices), postings.n_documents))
        bounds = np.linspace(0, postings.n_documents, n_parts + 1).round().astype(np.int64).tolist()
        parts = []
        divided = postings.divide(bounds)
        for first_document, device, part in zip(bounds, devices, divided, strict=False):
            blocked = BlockedPostings.of(
                torch.from_numpy(part.offsets),
                torch.from_numpy(part.documents),
                torch.from_numpy(part.weights),
                part.n_documents,
                device,
            )
            parts.append(_Part(first_document, blocked))
        return cls(parts)

    @property
    def device(self) -> torch.device:
        """The first device, which has queries, masks and results."""
        return self._parts[0].device

    @property
    def devices(self) -> list[torch.device]:
        """The devices that have documents."""
        return [part.device for part in self._parts]

    @property
    def nbytes(self) -> int:
        """Bytes on all devices."""
        return sum(part.postings.nbytes for part in self._parts)

    def topk(
        self,
        terms: Tensor,
        weights: Tensor,
        k: int,
        *,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Search like :func:`~tilefold.ops.sparse_search.sparse_topk`, on all devices together.

        No call waits for a GPU, so that all GPUs search at the same time. The CPU may be one of the
        devices, and waits for the tensors that it reads.

        Args:
            terms: ``[Nq, T]`` int32 on the first device.
            weights: ``[Nq, T]`` fp32 on the first device.
            k: number of documents.
            allowed: ``[N]`` bool or uint8 on the first device; ``None`` allows all documents.

        Returns:
            ``[Nq, min(k, N)]`` scores and documents, on the first device.
        """
        results = [
            sparse_topk(part.postings, part_terms, part_weights, k, allowed=part_allowed)
            for part, (part_terms, part_weights), part_allowed in zip(
                self._parts,
                self._copy_to_parts([terms, weights]),
                self._divide_mask(allowed),
                strict=True,
            )
        ]
        return self._merge(results, k)

    def topk_of_dense(
        self,
        queries: Tensor,
        k: int,
        *,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Search like :func:`~tilefold.ops.sparse_search.sparse_topk_of_dense`, on all devices.

        Args:
            queries: ``[Nq, V]`` fp32 on the first device.
            k: number of documents.
            allowed: ``[N]`` bool or uint8 on the first device; ``None`` allows all documents.

        Returns:
            ``[Nq, min(k, N)]`` scores and documents, and ``[Nq]`` numbers of terms, on the first
            device.
        """
        results = [
            sparse_topk_of_dense(part.postings, part_queries, k, allowed=part_allowed)
            for part, (part_queries,), part_allowed in zip(
                self._parts,
                self._copy_to_parts([queries]),
                self._divide_mask(allowed),
                strict=True,
            )
        ]
        # Every device has counted the terms of the whole queries.
        _, _, term_counts = results[0]
        scores, documents = self._merge(
            [(part_scores, part_documents) for part_scores, part_documents, _ in results],
            k,
        )
        return scores, documents, term_counts

    def _copy_to_parts(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Start to copy the tensors of queries to every device, before any device searches.

        Copies run on the CUDA stream of the first device, where they would wait for its search.

        Args:
            tensors: tensors on the first device. The search there refuses tensors of other devices.

        Returns:
            The tensors for each part.
        """
        copies = [list(tensors)]
        for part in self._parts[1:]:
            copies.append([_copy_to(part.device, tensor) for tensor in tensors])
        return copies

    def _divide_mask(self, allowed: Tensor | None) -> list[Tensor | None]:
        """Divide a mask of documents among the devices, as the documents are divided.

        Args:
            allowed: ``[N]`` bool or uint8 on the first device; ``None`` allows all documents.

        Returns:
            The mask for each part, on its device.

        Raises:
            ArgumentError: if the mask has another shape.
        """
        if allowed is None:
            return [None] * len(self._parts)
        if list(allowed.shape) != [self.n_documents]:
            raise ArgumentError(
                "allowed",
                f"expected [{self.n_documents}], got {list(allowed.shape)}.",
            )
        masks: list[Tensor | None] = [allowed[: self._parts[0].end_document]]
        for part in self._parts[1:]:
            mask = allowed[part.first_document : part.end_document]
            masks.append(_copy_to(part.device, mask))
        return masks

    def _merge(self, results: Sequence[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
        """Return the best documents of all parts, on the first device.

        Args:
            results: scores and documents of each part, both ``[Nq, k of the part]``. Rows end with
                documents of -1 if fewer documents share a term with the query.
            k: number of documents.
        """
        all_scores = []
        all_documents = []
        for part, (scores, documents) in zip(self._parts, results, strict=True):
            numbers = torch.where(documents < 0, -1, documents + part.first_document)
            all_scores.append(_copy_to(self.device, scores))
            all_documents.append(_copy_to(self.device, numbers))
        scores = torch.cat(all_scores, dim=1)
        documents = torch.cat(all_documents, dim=1)
        # Parts are in document order, which a stable sort preserves among equal scores. Scores of
        # missing documents are below all others, even below scores that are rounded to 0.
        sort_keys = torch.where(documents < 0, -1.0, scores)
        order = sort_keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
        return scores.gather(1, order), documents.gather(1, order)


def _copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a tensor to a device. Only a copy to the CPU is waited for.

    The CPU could otherwise read the copy before a GPU has written it.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")
