"""Exact search on a GPU: the postings of an exact index in the memory of a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilefold.ops.sparse_search import BlockedPostings, sparse_topk
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval._checks import check_k
from tilefold.retrieval._sparse import SparseVectors
from tilefold.retrieval.index.protocol import Hit, SparseIndex, check_search
from tilefold.retrieval.metadata import Mask, Where, allowed_by


class TermLists(Protocol):
    """Arrays of an inverted index: documents, rising, and positive weights of term `t` from ``offsets[t]`` on."""

    offsets: npt.NDArray[np.int64]  # [V + 1]
    documents: npt.NDArray[np.int32]  # [nnz]
    weights: npt.NDArray[np.float32]  # [nnz]


class DeviceIndex:
    """An exact index on a device: :meth:`ExactIndex.search` with sums in fixed point, the same bits in every run.

    Scores are off by at most one part in 2^30 of the highest score that any document could have, per term of the query;
    equal ones are in document order. The device holds 6 bytes per weight, 8 per term and 8,192 documents, and scores of
    4 bytes per document and query, of at most 2 GB at a time.
    """

    backend: ClassVar[str] = "exact"

    def __init__(
        self,
        ids: Sequence[str],
        lists: TermLists,
        described: SparseIndex,
        device: torch.device | str = "cuda",
        there: Mask | None = None,
    ) -> None:
        """Copy `lists`, which were checked, to `device`; see :meth:`ExactIndex.on`. Documents not `there` are gone."""
        self.ids, self._places, self.metadata = ids, dict[str, int](), described.metadata
        self._there = None if there is None or there.all() else torch.from_numpy(there.view(np.uint8)).to(device)
        self.n_documents, self.vocab_size = described.n_documents, described.vocab_size
        self.fingerprint, self.provenance = described.fingerprint, described.provenance
        self._lengths = np.diff(lists.offsets)
        with warnings.catch_warnings():  # nobody writes to arrays that are mapped for reading
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            offsets, *others = map(torch.from_numpy, (lists.offsets, lists.documents, lists.weights))
        self.postings = BlockedPostings.of(offsets, others[0], others[1], len(ids), device)

    @property
    def device(self) -> torch.device:
        return self.postings.weights.device

    def search(
        self, queries: SparseVectors, k: int, among: Tensor | None = None, *, where: Where = None
    ) -> list[list[Hit]]:
        """See :class:`SparseIndex`; with `among`, a mask of :meth:`mask`, only those documents are found."""
        check_search(self, queries, k)
        if (matching := allowed_by(self.metadata, where)) is not None:
            mask = torch.from_numpy(matching).to(self.device, torch.uint8)
            among = mask if among is None else mask * among
        terms, weights = (part.to(self.device) for part in self._padded(queries))
        scores, documents = (part.tolist() for part in self._best(terms, weights, k, among))
        return [
            [Hit(self.ids[at], score) for at, score in zip(*row, strict=True) if at >= 0]
            for row in zip(documents, scores, strict=True)
        ]

    def search_tensor(self, queries: Tensor, k: int, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores and positions ``[Nq, k]`` of the best documents, on the device; 0 and -1 where there are no more.

        `queries` are ``[Nq, V]`` on the index's device, dense, CSR or COO, as an encoder returns them: of sparse ones
        nothing but the number of terms of the longest goes to the host.
        """
        check_k(k)
        if queries.dim() != 2 or queries.size(1) != self.vocab_size:
            raise ValueError(f"queries: expected [.., {self.vocab_size}], got {list(queries.shape)}.")
        if queries.layout == torch.strided:
            owner, found = queries.nonzero(as_tuple=True)
            values = queries[owner, found]
        else:
            rows = queries.to_sparse().coalesce()
            (owner, found), values = rows.indices(), rows.values()
        counts = torch.searchsorted(owner, torch.arange(queries.size(0) + 1, device=owner.device)).diff()
        longest = int(counts.max()) if found.numel() else 1
        order = (owner * (len(self.ids) + 1) + len(self.ids) - self.postings.counts[found]).argsort()
        place = torch.arange(found.numel(), device=found.device) - (counts.cumsum(0) - counts)[owner]
        terms = torch.zeros(counts.numel(), longest, dtype=torch.int32, device=found.device)
        weights = torch.zeros(counts.numel(), longest, device=found.device)
        terms[owner, place] = found[order].to(torch.int32)
        weights[owner, place] = values.detach()[order].float()
        return self._best(terms, weights, k, among)

    def _best(self, terms: Tensor, weights: Tensor, k: int, among: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._there is not None:
            among = self._there if among is None else self._there * among
        return sparse_topk(self.postings, terms, weights, k, allowed=among)

    def mask(self, ids: Iterable[str]) -> Tensor:
        """Mask ``[N]`` of the documents with these ids, for `among`; ``ValueError`` for an id that is not there."""
        if not self._places:
            there = [True] * len(self.ids) if self._there is None else self._there.tolist()
            self._places = {name: place for place, name in enumerate(self.ids) if there[place]}
        found = torch.zeros(len(self.ids), dtype=torch.uint8)
        for name in ids:
            if name not in self._places:
                raise ValueError(f"ids: expected ids of documents of the index, got {name!r}. Is it in the collection?")
            found[self._places[name]] = 1
        return found.to(self.device)

    def _padded(self, queries: SparseVectors) -> tuple[Tensor, Tensor]:
        """Terms and weights ``[Nq, T]``, those of the longest lists first, which programs then read together."""
        lengths = np.diff(queries.indptr)
        owner = np.repeat(np.arange(len(queries)), lengths)
        order = np.lexsort((-self._lengths[queries.indices], owner))
        place = np.arange(owner.size) - offsets_of(lengths)[:-1][owner]
        shape = len(queries), max(1, int(lengths.max(initial=1)))
        terms, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        terms[owner, place], weights[owner, place] = queries.indices[order], queries.data[order]
        return torch.from_numpy(terms), torch.from_numpy(weights)
