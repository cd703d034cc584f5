"""Exact search on a GPU: the postings of an exact index in the memory of a device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilefold._internal.arguments import ArgumentError, check_k
from tilefold.ops.sparse_search import BlockedPostings, sparse_topk
from tilefold.pipeline.rows import SparseRows, repeat_interleave
from tilefold.retrieval.data.metadata import Mask, Where, allowed_by
from tilefold.retrieval.errors import ArgumentDataError
from tilefold.retrieval.index.protocol import Hit, SparseIndex, hits_of
from tilefold.retrieval.vectors.sparse import SparseVectors, check_search

# Queries on a device are padded to a multiple of this number of terms, so that the launches of
# different batches share few plans.
_WIDTH_STEP = 16


class DeviceIndex:
    """An exact index on a device: :meth:`ExactIndex.search` with sums in fixed point.

    Every run gives the same bits. Scores are off by at most one part in 2^30 of the highest score
    that any document could have, per term of the query. Equal scores are in document order. The
    device holds 6 bytes per weight, 8 bytes per term and 8,192 documents, and scores of 4 bytes per
    document and query, of at most 2 GB at a time.
    """

    backend: ClassVar[str] = "exact"

    def __init__(
        self,
        ids: Sequence[str],
        postings: Any,
        index: SparseIndex,
        device: torch.device | str = "cuda",
        present: Mask | None = None,
    ) -> None:
        """Copy postings to a device.

        Args:
            ids: ids of the documents, in the order of their positions in the postings.
            postings: ``Postings`` of all terms, whose values were checked before.
            index: index of the postings on the CPU. Metadata, sizes and provenance are taken from
                it.
            device: device that the postings are copied to.
            present: bool ``[N]``, False for documents that were removed; None if there are none.
        """
        self.ids = ids
        self.metadata = index.metadata
        self.n_documents = index.n_documents
        self.vocab_size = index.vocab_size
        self.fingerprint = index.fingerprint
        self.provenance = index.provenance
        self._position_of: dict[str, int] = {}  # filled by the first mask()
        self._present: Tensor | None = None  # uint8 [N]; None if all documents are
        if present is not None and not present.all():
            self._present = torch.from_numpy(present.view(np.uint8)).to(device)
        # Terms by the length of their postings, longest first. The last entry is the term 0, which
        # pads the terms of a query with a weight of 0.
        terms_by_length = np.argsort(-np.diff(postings.offsets), kind="stable")
        self._terms_by_length = np.append(terms_by_length, 0).astype(np.int32)
        # Position of each term in this order, [V].
        self._length_rank_of = terms_by_length.argsort()
        with warnings.catch_warnings():  # nobody writes to arrays that are mapped for reading
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            self.postings = BlockedPostings.of(
                torch.from_numpy(postings.offsets),
                torch.from_numpy(postings.documents),
                torch.from_numpy(postings.weights),
                len(ids),
                device,
            )

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
        """Search on the device, see :class:`SparseIndex`.

        Args:
            queries: sparse vectors on the CPU.
            k: documents per query.
            among: uint8 ``[N]`` from :meth:`mask`, 1 for documents that may be returned. None
                allows all.
            where: filter of the documents' metadata.
        """
        check_search(self, queries, k)
        matching = allowed_by(self.metadata, where)
        if matching is not None:
            mask = torch.from_numpy(matching.view(np.uint8)).to(self.device)
            among = mask if among is None else mask * among
        terms, weights = self._padded(queries)
        scores, positions = self._search_padded(terms, weights, k, among)
        scores = scores.to("cpu", non_blocking=True)
        positions = positions.to("cpu", non_blocking=True)
        if self.device.type == "cuda":  # waits once for both copies
            torch.cuda.current_stream(self.device).synchronize()
        return hits_of(self.ids, positions.numpy(), scores.numpy())

    @torch.no_grad()
    def search_tensor(
        self,
        queries: Tensor | SparseRows,
        k: int,
        among: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Search with queries that are on the device, and leave the results there.

        Only two values are copied to the CPU: whether all weights are valid, and how many terms the
        longest query has. For ``SparseRows``, the CPU knows the latter already.

        Args:
            queries: ``[Nq, V]`` on the index's device, as an encoder returns them: a dense, CSR or
                COO tensor, or the ``SparseRows`` of an encoding stream.
            k: documents per query.
            among: uint8 ``[N]`` from :meth:`mask`, 1 for documents that may be returned. None
                allows all.

        Returns:
            Scores and positions of documents, both ``[Nq, k]``, on the device. If fewer than `k`
            documents share a term with a query, its row ends with scores of 0 and positions of -1.

        Raises:
            ValueError: for queries over another vocabulary, or a wrong `k`.
            DataError: for a weight that is NaN, infinite in float32, or negative.
        """
        check_k(k)
        self._check_shape(queries)
        entries = _entries_of(queries)
        _check_weights(entries)
        if entries.n_rows == 1:
            # One query needs no padding. Its terms with the longest postings come first.
            lengths = self.postings.counts.take(entries.terms)
            order = lengths.argsort(descending=True)
            terms = entries.terms.take(order)[None].int()
            weights = entries.weights.take(order)[None]
        else:
            terms, weights = self._pad_entries(entries)
        return self._search_padded(terms, weights, k, among)

    def _check_shape(self, queries: Tensor | SparseRows) -> None:
        """Raise ``ValueError`` unless queries are rows over the vocabulary of the index."""
        if isinstance(queries, SparseRows):
            shape = [len(queries.counts), queries.vocab_size]
        else:
            shape = list(queries.shape)
        if len(shape) != 2 or shape[1] != self.vocab_size:
            raise ArgumentError("queries", f"expected [.., {self.vocab_size}], got {shape}.")

    def _pad_entries(self, entries: _Entries) -> tuple[Tensor, Tensor]:
        """Pad queries on the device to one number of terms, T.

        Terms with the longest postings come first in each row. Programs that work on several
        queries then read lists of about the same length together.

        Args:
            entries: non-zero weights of Nq queries, row after row.

        Returns:
            Terms, int32, and weights, float32, both ``[Nq, T]``, padded with zeros.
        """
        rows = entries.rows
        terms = entries.terms
        weights = entries.weights
        device = terms.device
        offsets = torch.searchsorted(
            rows.contiguous(),
            torch.arange(entries.n_rows + 1, device=device),
        )
        longest = entries.longest
        if longest is None:
            longest = int(offsets.diff().max()) if terms.numel() else 0
        width = _padded_width(longest)
        # One key sorts by row, then by falling length of the postings, which is at most N.
        n_documents = len(self.ids)
        lengths = self.postings.counts[terms]
        order = (rows * (n_documents + 1) + n_documents - lengths).argsort()
        # Position of each sorted entry in the padded rows.
        positions = rows * width + torch.arange(terms.numel(), device=device) - offsets[rows]
        padded_terms = torch.zeros(entries.n_rows, width, dtype=torch.int32, device=device)
        padded_weights = torch.zeros(entries.n_rows, width, device=device)
        padded_terms.view(-1)[positions] = terms[order].int()
        padded_weights.view(-1)[positions] = weights[order]
        return padded_terms, padded_weights

    def _search_padded(
        self,
        terms: Tensor,
        weights: Tensor,
        k: int,
        among: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and positions ``[Nq, k]`` of documents that were not removed and are `among`."""
        if self._present is not None:
            among = self._present if among is None else self._present * among
        return sparse_topk(self.postings, terms, weights, k, allowed=among)

    def mask(self, ids: Iterable[str]) -> Tensor:
        """Return a mask of documents, for the argument `among` of a search.

        Args:
            ids: ids of the documents that the search may return.

        Returns:
            uint8 ``[N]`` on the index's device, 1 for these documents.

        Raises:
            ValueError: for an id that the index does not have.
        """
        if not self._position_of:
            present = [True] * len(self.ids)
            if self._present is not None:
                present = self._present.tolist()
            self._position_of = {
                name: position for position, name in enumerate(self.ids) if present[position]
            }
        mask = torch.zeros(len(self.ids), dtype=torch.uint8)
        for name in ids:
            if name not in self._position_of:
                raise ArgumentError(
                    "ids",
                    f"expected ids of documents of the index, got {name!r}. "
                    "Is it in the collection?",
                )
            mask[self._position_of[name]] = 1
        return mask.to(self.device)

    def _padded(self, queries: SparseVectors) -> tuple[Tensor, Tensor]:
        """Pad queries on the CPU to one number of terms, T, and copy them to the device.

        Terms with the longest postings come first in each row. Programs that work on several
        queries then read lists of about the same length together.

        Args:
            queries: Nq queries.

        Returns:
            Terms, int32, and weights, float32, both ``[Nq, T]`` on the device. Padding has the term
            0 and the weight 0.
        """
        lengths = np.diff(queries.indptr)
        columns = np.arange(_padded_width(int(lengths.max(initial=1))))
        # One sort of int64 keys orders terms and weights. The high half of a key is the rank of the
        # term by the length of its postings, and the low half is the bits of its float32 weight.
        # The rank of padding is V, after all terms.
        padding_key = self._length_rank_of.size << 32
        keys = np.full((len(queries), len(columns)), padding_key)
        ranks = self._length_rank_of[queries.indices]
        keys[columns < lengths[:, None]] = ranks << 32 | queries.data.view(np.uint32)
        keys.sort(axis=1)
        terms = self._terms_by_length[keys >> 32]
        weight_bits = keys.astype(np.int32)  # keeps the low half
        # One copy for both. CUDA has read the array when the call returns, because the memory of
        # the array is not pinned. So the array may be freed then.
        copied = torch.from_numpy(np.stack([terms, weight_bits])).to(
            self.device,
            non_blocking=True,
        )
        device_terms, device_bits = copied.unbind()
        return device_terms, device_bits.view(torch.float32)


class _Entries(NamedTuple):
    """Non-zero weights of queries, row after row.

    Attributes:
        rows: int64 ``[n]``, position of the query.
        terms: int64 ``[n]``.
        weights: float32 ``[n]``.
        n_rows: number of queries.
        longest: number of terms of the longest query; None if only the device has it.
    """

    rows: Tensor
    terms: Tensor
    weights: Tensor
    n_rows: int
    longest: int | None = None


def _entries_of(queries: Tensor | SparseRows) -> _Entries:
    """Return the non-zero weights of queries.

    Args:
        queries: ``[Nq, V]``, a dense, CSR or COO tensor, or the ``SparseRows`` of an encoding
            stream.
    """
    if isinstance(queries, SparseRows):
        n_rows = len(queries.counts)
        terms = queries.columns.long()
        return _Entries(
            rows=repeat_interleave(torch.arange(n_rows), queries.counts, terms.device),
            terms=terms,
            weights=queries.values.float(),
            n_rows=n_rows,
            longest=max(queries.counts.tolist(), default=0),
        )
    if queries.layout == torch.strided:
        rows, terms = queries.nonzero(as_tuple=True)
        return _Entries(rows, terms, queries[rows, terms].float(), queries.shape[0])
    coordinates = queries.to_sparse().coalesce()
    rows, terms = coordinates.indices()
    return _Entries(rows, terms, coordinates.values().float(), queries.shape[0])


def _padded_width(longest: int) -> int:
    """Number of terms that queries of at most `longest` terms are padded to."""
    return math.ceil(max(1, longest) / _WIDTH_STEP) * _WIDTH_STEP


def _check_weights(entries: _Entries) -> None:
    """Raise ``DataError`` for the first weight that is negative, infinite or NaN.

    The CPU waits here for the device. Measured on an H200, that costs less than to launch a check
    before the search and to read its result afterwards.
    """
    weights = entries.weights
    valid = (weights >= 0) & (weights < math.inf)  # False for NaN
    if bool(valid.all()):
        return
    position = int((~valid).int().argmax())
    raise ArgumentDataError(
        "queries",
        f"expected finite weights of at least 0, got {weights[position].item()} for query "
        f"{int(entries.rows[position])}. Check the model's output and its activation.",
    )
