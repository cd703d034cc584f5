"""Exact search on a GPU: the postings of an exact index in the memory of a device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tilefold._internal.arguments import check_k
from tilefold.ops.sparse_search import BlockedPostings, sparse_topk
from tilefold.pipeline.rows import SparseRows, repeat_interleave
from tilefold.retrieval.data.metadata import Mask, Where, allowed_by
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import Hit, SparseIndex, hits_of
from tilefold.retrieval.vectors.sparse import SparseVectors, check_search

_WIDTH = 16  # terms of queries on a device are a multiple of it, so that few launches need a plan


class DeviceIndex:
    """An exact index on a device: :meth:`ExactIndex.search` with sums in fixed point, the same bits
    in every run.

    Scores are off by at most one part in 2^30 of the highest score that any document could have,
    per term of the query; equal ones are in document order. The device holds 6 bytes per weight, 8
    per term and 8,192 documents, and scores of 4 bytes per document and query, of at most 2 GB at a
    time.
    """

    backend: ClassVar[str] = "exact"

    def __init__(
        self,
        ids: Sequence[str],
        lists: Any,
        described: SparseIndex,
        device: torch.device | str = "cuda",
        there: Mask | None = None,
    ) -> None:
        """Copy `lists`, checked ``Postings``, to `device` (:meth:`ExactIndex.on`). Documents not
        `there` are gone.
        """
        self.ids, self._places, self.metadata = ids, dict[str, int](), described.metadata
        self._there = (
            None
            if there is None or there.all()
            else torch.from_numpy(there.view(np.uint8)).to(device)
        )
        self.n_documents, self.vocab_size = described.n_documents, described.vocab_size
        self.fingerprint, self.provenance = described.fingerprint, described.provenance
        by_length = np.argsort(-np.diff(lists.offsets), kind="stable")
        self._by_length, self._ranks = np.append(by_length, 0).astype(np.int32), by_length.argsort()
        with warnings.catch_warnings():  # nobody writes to arrays that are mapped for reading
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            offsets, *others = map(
                torch.from_numpy,
                (lists.offsets, lists.documents, lists.weights),
            )
        self.postings = BlockedPostings.of(offsets, others[0], others[1], len(ids), device)

    @property
    def device(self) -> torch.device:
        return self.postings.weights.device

    def search(
        self,
        queries: SparseVectors,
        k: int,
        among: Tensor | None = None,
        *,
        where: Where = None,
    ) -> list[list[Hit]]:
        """See :class:`SparseIndex`; with `among`, a mask of :meth:`mask`, only those documents are
        found.
        """
        check_search(self, queries, k)
        if (matching := allowed_by(self.metadata, where)) is not None:
            mask = torch.from_numpy(matching.view(np.uint8)).to(self.device)
            among = mask if among is None else mask * among
        best = self._best(*self._padded(queries), k, among)
        scores, documents = (part.to("cpu", non_blocking=True) for part in best)
        if self.device.type == "cuda":  # is waited for once
            torch.cuda.current_stream(self.device).synchronize()
        return hits_of(self.ids, documents.numpy(), scores.numpy())

    @torch.no_grad()
    def search_tensor(
        self,
        queries: Tensor | SparseRows,
        k: int,
        among: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and positions ``[Nq, k]`` of the best documents, on the device; 0 and -1 where
        there are no more.

        `queries` are on the index's device, ``[Nq, V]`` dense, CSR or COO, as an encoder returns
        them, or rows of a stream. Nothing goes to the host but the number of terms of the longest,
        which such rows have there, and whether all weights are valid.

        Raises:
            ValueError: for queries over another vocabulary, or a wrong `k`.
            DataError: for a weight that is NaN, infinite in float32, or negative.
        """
        check_k(k)
        shape = (
            (len(queries.counts), queries.vocab_size)
            if isinstance(queries, SparseRows)
            else tuple(queries.shape)
        )
        if len(shape) != 2 or shape[1] != self.vocab_size:
            raise ValueError(f"queries: expected [.., {self.vocab_size}], got {list(shape)}.")
        most: int | None = None  # terms of the longest
        if isinstance(queries, SparseRows):
            counts, found, values = queries.counts, queries.columns.long(), queries.values
            owner, most = (
                repeat_interleave(torch.arange(shape[0]), counts, found.device),
                max(counts.tolist(), default=0),
            )
        elif queries.layout == torch.strided:
            owner, found = queries.nonzero(as_tuple=True)
            values = queries[owner, found]
        else:
            rows = queries.to_sparse().coalesce()
            (owner, found), values = rows.indices(), rows.values()
        values = values.float()
        _check_weights(values, owner)
        if shape[0] == 1:  # nothing to be padded
            order = self.postings.counts.take(found).argsort(descending=True)
            terms, weights = (part.take(order)[None] for part in (found, values))
            return self._best(terms.int(), weights, k, among)
        starts = torch.searchsorted(
            owner.contiguous(),
            torch.arange(shape[0] + 1, device=owner.device),
        )
        most = int(starts.diff().max()) if most is None and found.numel() else most or 1
        longest = -(-most // _WIDTH) * _WIDTH
        order = (
            owner * (len(self.ids) + 1) + len(self.ids) - self.postings.counts[found]
        ).argsort()
        place = owner * longest + torch.arange(found.numel(), device=found.device) - starts[owner]
        terms = torch.zeros(shape[0], longest, dtype=torch.int32, device=found.device)
        weights = torch.zeros(shape[0], longest, device=found.device)
        terms.view(-1)[place] = found[order].int()
        weights.view(-1)[place] = values[order]
        return self._best(terms, weights, k, among)

    def _best(
        self,
        terms: Tensor,
        weights: Tensor,
        k: int,
        among: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if self._there is not None:
            among = self._there if among is None else self._there * among
        return sparse_topk(self.postings, terms, weights, k, allowed=among)

    def mask(self, ids: Iterable[str]) -> Tensor:
        """Mask ``[N]`` of the documents with these ids, for `among`; ``ValueError`` for an id that
        is not there.
        """
        if not self._places:
            there = [True] * len(self.ids) if self._there is None else self._there.tolist()
            self._places = {name: place for place, name in enumerate(self.ids) if there[place]}
        found = torch.zeros(len(self.ids), dtype=torch.uint8)
        for name in ids:
            if name not in self._places:
                raise ValueError(
                    f"ids: expected ids of documents of the index, got {name!r}. Is it in the collection?",
                )
            found[self._places[name]] = 1
        return found.to(self.device)

    def _padded(self, queries: SparseVectors) -> tuple[Tensor, Tensor]:
        """Terms and weights ``[Nq, T]`` there, those of the longest lists first, which programs
        then read together.
        """
        lengths = np.diff(queries.indptr)
        width = np.arange(-(-max(1, int(lengths.max(initial=1))) // _WIDTH) * _WIDTH)
        keys = np.full(
            (len(queries), len(width)),
            self._ranks.size << 32,
        )  # ranks of terms above bits of weights
        keys[width < lengths[:, None]] = self._ranks[queries.indices] << 32 | queries.data.view(
            np.uint32,
        )
        keys.sort(axis=1)
        both = torch.from_numpy(np.stack([self._by_length[keys >> 32], keys.astype(np.int32)]))
        terms, weights = both.to(
            self.device,
            non_blocking=True,
        ).unbind()  # CUDA has read it when that returns
        return terms, weights.view(torch.float32)


def _check_weights(weights: Tensor, queries: Tensor) -> None:
    """Raise ``DataError`` for weights ``[n]`` of `queries` ``[n]`` that sparse vectors cannot have."""
    valid = (weights >= 0) & (weights < math.inf)  # False for NaN
    if bool(valid.all()):
        return
    first = int((~valid).int().argmax())
    raise DataError(
        f"queries: expected finite weights of at least 0, got {weights[first].item()} for query "
        f"{int(queries[first])}. Check the model's output and its activation.",
    )
