"""Exact search on GPUs: the postings of an exact index in the memory of one or more devices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilefold._internal.arguments import ArgumentError, check_k
from tilefold.ops.sparse_search import BlockedPostings, sparse_topk, sparse_topk_of_dense
from tilefold.pipeline.rows import SparseRows, repeat_interleave
from tilefold.retrieval.data.metadata import Mask, Where, allowed_by
from tilefold.retrieval.errors import ArgumentDataError
from tilefold.retrieval.index.devices import Devices, device_list
from tilefold.retrieval.index.divided_postings import DividedPostings
from tilefold.retrieval.index.protocol import Hit, SparseIndex, hits_of
from tilefold.retrieval.index.query_graphs import GraphPool, QueryGraph
from tilefold.retrieval.vectors.sparse import SparseVectors, check_search

# Queries are padded to a multiple of this number of terms, so that batches of different widths
# share launch plans.
_WIDTH_STEP = 16
# Largest number of terms of a query that is searched by a CUDA graph.
_GRAPH_TERMS = 256


Ints = npt.NDArray[np.int32]


class DeviceIndex:
    """An exact index of sparse vectors on one or several devices, which sums in fixed point.

    Every run gives the same bits, with any number of devices. The error of a score is at most 2^-30
    of the highest score that any document could have, times the number of terms of the query. Equal
    scores are in document order. The device stores 6 bytes per weight, 8 bytes per term and 8,192
    documents, and scores of 4 bytes per document and query, of at most 2 GB at a time. After the
    first few searches with one query, up to four CUDA graphs hold the scores of one query each.

    Several devices divide the documents, and search their parts at the same time, without graphs.
    Queries, masks and results are on the first device.
    """

    backend: ClassVar[str] = "exact"

    def __init__(
        self,
        ids: Sequence[str],
        postings: Any,
        index: SparseIndex,
        device: Devices = "cuda",
        present: Mask | None = None,
    ) -> None:
        """Copy postings to devices.

        Args:
            ids: ids of the N documents, in the order of their positions in the postings.
            postings: postings of all terms, which the caller has checked
                (:class:`tilefold.retrieval.index.exact.Postings`).
            index: the index on the CPU, which provides the metadata, sizes and provenance.
            device: the device that the postings are copied to, or several among which the
                documents are divided.
            present: bool ``[N]``, False for removed documents; None if no document was removed.
        """
        self.ids = ids
        self.metadata = index.metadata
        self.n_documents = index.n_documents
        self.vocab_size = index.vocab_size
        self.fingerprint = index.fingerprint
        self.provenance = index.provenance
        devices = device_list(device)
        # Mask of the documents that were not removed, uint8 [N]; None if all are present.
        self._present: Tensor | None = None
        if present is not None and not present.all():
            self._present = torch.from_numpy(present.view(np.uint8)).to(devices[0])
        # Terms by the length of their postings, longest first, and the rank of each term in this
        # order.
        terms_by_length = np.argsort(-np.diff(postings.offsets), kind="stable")
        self._rank_of_term = terms_by_length.argsort()
        # Queries are padded with the rank V, which is no term's rank. It is mapped to term 0, whose
        # weight in padding is 0.
        self._term_of_rank = np.append(terms_by_length, 0).astype(np.int32)
        self.postings: BlockedPostings | DividedPostings
        if len(devices) == 1:
            self.postings = _copy_postings(postings, len(ids), devices[0])
        else:
            self.postings = DividedPostings.of(postings, devices)
        # A CUDA graph can launch kernels on one device only.
        self._graphs: GraphPool[QueryGraph] = GraphPool(self.device, is_enabled=len(devices) == 1)

    @property
    def device(self) -> torch.device:
        """The device of queries, masks and results."""
        return self.postings.counts.device

    @property
    def gpus(self) -> list[torch.device]:
        """The GPUs whose memory has the postings."""
        devices = [self.device]
        if isinstance(self.postings, DividedPostings):
            devices = self.postings.devices
        return [device for device in devices if device.type == "cuda"]

    def search(
        self,
        queries: SparseVectors,
        k: int,
        among: Tensor | None = None,
        *,
        where: Where = None,
    ) -> list[list[Hit]]:
        """Return at most `k` documents for each query, best first.

        If both `among` and `where` are passed, documents must match both.

        Args:
            queries: sparse vectors on the CPU.
            k: number of documents per query.
            among: uint8 ``[N]`` from :meth:`mask`, 1 for documents that may be returned. None
                allows all.
            where: filter of the documents' metadata.
        """
        check_search(self, queries, k)
        matching = allowed_by(self.metadata, where)
        if matching is not None:
            matching_mask = torch.from_numpy(matching.view(np.uint8)).to(self.device)
            among = matching_mask if among is None else matching_mask * among
        # A CUDA graph launches a whole search by one call. It is captured without a mask.
        if len(queries) == 1 and among is None and queries.indices.size <= _GRAPH_TERMS:
            graph_key = ("terms", k)
            graph = self._graphs.take(graph_key, lambda: self._capture_terms(k))
            if graph is not None:
                terms_on_cpu, weight_bits = self._terms_by_length(queries)
                scores_on_cpu, positions_on_cpu = _search_by_graph(graph, terms_on_cpu, weight_bits)
                self._graphs.give_back(graph_key, graph)
                return hits_of(self.ids, positions_on_cpu, scores_on_cpu)
        terms, weights = self._pad_on_cpu(queries)
        scores, positions = self._search_padded(terms, weights, k, among)
        scores = scores.to("cpu", non_blocking=True)
        positions = positions.to("cpu", non_blocking=True)
        if self.device.type == "cuda":
            # One wait for both copies.
            torch.cuda.current_stream(self.device).synchronize()
        return hits_of(self.ids, positions.numpy(), scores.numpy())

    def _capture_terms(self, k: int) -> QueryGraph:
        """Capture the search with one query that is on the CPU as a CUDA graph.

        The input of the graph is int32 ``[2, 1, T]`` in pinned memory: the query's terms, and the
        bits of their weights. Zeros are padding.

        Args:
            k: number of documents.
        """
        padded = torch.zeros(2, 1, _GRAPH_TERMS, dtype=torch.int32, pin_memory=True)
        on_device = torch.zeros_like(padded, device=self.device)

        def search() -> tuple[Tensor, Tensor]:
            on_device.copy_(padded, non_blocking=True)
            terms, bits = on_device
            return self._search_padded(terms, bits.view(torch.float32), k, None)

        return QueryGraph(self.device, [padded], search)

    def _terms_by_length(self, query: SparseVectors) -> tuple[Ints, Ints]:
        """Sort the terms of one query by the length of their postings, longest first.

        Returns:
            Terms, and the bits of their weights, both int32 ``[n]``.
        """
        order = self._rank_of_term[query.indices].argsort()
        return query.indices[order], query.data.view(np.int32)[order]

    @torch.no_grad()
    def search_tensor(
        self,
        queries: Tensor | SparseRows,
        k: int,
        among: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Search with queries that are on the device, and leave the results there.

        With several queries, the CPU waits for the device only to check the weights and, for
        tensors, to read the number of terms of the longest query. One query is checked by the
        kernels, and the CPU waits until the search has finished.

        Args:
            queries: ``[Nq, V]`` on the index's device, as an encoder returns them: a dense, CSR or
                COO tensor, or the ``SparseRows`` of an encoding stream.
            k: number of documents per query.
            among: uint8 ``[N]`` from :meth:`mask`, 1 for documents that may be returned. None
                allows all.

        Returns:
            Scores and positions of documents, both ``[Nq, k]``, on the device. If fewer than `k`
            documents share a term with a query, its row ends with scores of 0 and positions of -1.

        Raises:
            ValueError: if the vocabularies of queries and index differ, or `k` is invalid.
            DataError: if a weight is NaN, infinite in float32, or negative.
        """
        check_k(k)
        self._check_shape(queries)
        if _n_queries(queries) == 1:
            return self._search_one(queries, k, among)
        entries = _extract_entries(queries)
        _check_weights(entries)
        terms, weights = self._pad_on_device(entries)
        return self._search_padded(terms, weights, k, among)

    def _search_one(
        self,
        query: Tensor | SparseRows,
        k: int,
        among: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Search with one query that is on the device.

        The kernels of the search list and check the terms of the query. With torch, this would take
        several times as long as the search, and would wait twice for the device. The CPU waits
        once, for the result of the check.

        Args:
            query: ``[1, V]`` in any layout of :meth:`search_tensor`.
            k: number of documents.
            among: uint8 ``[N]``, 1 for documents that may be returned. None allows all.

        Raises:
            DataError: if a weight is NaN, infinite in float32, or negative.
        """
        graph_key = ("row", k)
        graph = None
        # A graph would copy a query from another device, which the search without a graph refuses.
        if among is None and _device_of(query) == self.device:
            graph = self._graphs.take(graph_key, lambda: self._capture_row(k))
        if graph is None:
            scores, positions, term_counts = self._search_row(_to_dense_row(query), k, among)
            n_terms = term_counts.item()
        else:
            _to_dense_row(query, out=graph.inputs[0])
            graph.launch()
            scores, positions = (result.clone() for result in graph.device_results[:2])
            graph.wait()
            n_terms = graph.host_results[0].item()
            self._graphs.give_back(graph_key, graph)
        has_invalid_weight = n_terms < 0  # how the kernels report one
        if has_invalid_weight:
            _refuse_weights(_extract_entries(query))
        return scores, positions

    def _search_row(
        self,
        row: Tensor,
        k: int,
        among: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Search with one dense query, float32 ``[1, V]``, and leave out removed documents.

        Returns:
            Scores and positions, both ``[1, k]``, and the number of the query's terms, ``[1]``,
            which is negative if a weight is invalid.
        """
        allowed = self._combine_with_removed(among)
        if isinstance(self.postings, DividedPostings):
            return self.postings.topk_of_dense(row, k, allowed=allowed)
        return sparse_topk_of_dense(self.postings, row, k, allowed=allowed)

    def _capture_row(self, k: int) -> QueryGraph:
        """Capture the search with one dense query as a CUDA graph.

        Only the number of its terms is copied to the CPU, because the results stay on the device.

        Args:
            k: number of documents.
        """
        row = torch.zeros(1, self.vocab_size, device=self.device)
        return QueryGraph(
            self.device,
            [row],
            lambda: self._search_row(row, k, None),
            n_device_only=2,
        )

    def _check_shape(self, queries: Tensor | SparseRows) -> None:
        """Raise ``ArgumentError`` if queries are not rows over the vocabulary of the index."""
        if isinstance(queries, SparseRows):
            shape = [len(queries.counts), queries.vocab_size]
        else:
            shape = list(queries.shape)
        if len(shape) != 2 or shape[1] != self.vocab_size:
            raise ArgumentError("queries", f"expected [.., {self.vocab_size}], got {shape}.")

    def _pad_on_device(self, entries: _Entries) -> tuple[Tensor, Tensor]:
        """Convert sparse queries to two padded matrices on the device: terms and weights.

        The terms of each query are sorted by the length of their postings lists, longest first. A
        Triton program that scores several queries then reads lists of similar length together.

        Args:
            entries: non-zero weights of Nq queries, row after row.

        Returns:
            Terms, int32, and weights, float32, both ``[Nq, T]``, padded with zeros. T is the number
            of terms of the longest query, rounded up.
        """
        rows = entries.rows
        n_entries = entries.terms.numel()
        device = rows.device
        offsets = torch.searchsorted(
            rows.contiguous(),
            torch.arange(entries.n_rows + 1, device=device),
        )
        longest = entries.longest
        if longest is None:
            longest = int(offsets.diff().max()) if n_entries else 0
        width = _padded_width(longest)
        # One sort orders by row, and within a row by descending length of the postings list. A
        # list has at most n_documents entries, so all keys of a row are below those of the next.
        n_documents = len(self.ids)
        list_lengths = self.postings.counts[entries.terms]
        sort_keys = rows * (n_documents + 1) + (n_documents - list_lengths)
        order = sort_keys.argsort()
        # Entries were ordered by row before, so the sort moves them within their row only, and
        # `rows` and `offsets` still apply.
        columns = torch.arange(n_entries, device=device) - offsets[rows]
        positions = rows * width + columns
        padded_terms = torch.zeros(entries.n_rows, width, dtype=torch.int32, device=device)
        padded_weights = torch.zeros(entries.n_rows, width, device=device)
        padded_terms.view(-1)[positions] = entries.terms[order].int()
        padded_weights.view(-1)[positions] = entries.weights[order]
        return padded_terms, padded_weights

    def _search_padded(
        self,
        terms: Tensor,
        weights: Tensor,
        k: int,
        among: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Search with padded queries, and leave out removed documents.

        Args:
            terms: int32 ``[Nq, T]``.
            weights: float32 ``[Nq, T]``, 0 for padding.
            k: number of documents per query.
            among: uint8 ``[N]``, 1 for documents that may be returned. None allows all.

        Returns:
            Scores and positions of the best documents, both ``[Nq, k]``.
        """
        allowed = self._combine_with_removed(among)
        if isinstance(self.postings, DividedPostings):
            return self.postings.topk(terms, weights, k, allowed=allowed)
        return sparse_topk(self.postings, terms, weights, k, allowed=allowed)

    def _combine_with_removed(self, among: Tensor | None) -> Tensor | None:
        """Return the mask of the documents that may be returned and were not removed.

        Args:
            among: uint8 ``[N]``, 1 for documents that may be returned. None allows all.

        Returns:
            uint8 ``[N]``, 1 for documents that both masks allow; None for all documents.
        """
        if self._present is None:
            return among
        return self._present if among is None else self._present * among

    @cached_property
    def _position_of(self) -> dict[str, int]:
        """Id -> position of each document that was not removed."""
        positions = {document_id: position for position, document_id in enumerate(self.ids)}
        if self._present is None:
            return positions
        present = self._present.tolist()
        return {name: position for name, position in positions.items() if present[position]}

    def mask(self, ids: Iterable[str]) -> Tensor:
        """Return a mask of documents, for the argument `among` of a search.

        Args:
            ids: ids of the documents that the search may return.

        Returns:
            uint8 ``[N]`` on the index's device, 1 for these documents. Kernels read it as bytes.

        Raises:
            ValueError: if an id is not in the index, or its document was removed.
        """
        mask = torch.zeros(len(self.ids), dtype=torch.uint8)
        for document_id in ids:
            if document_id not in self._position_of:
                raise ArgumentError(
                    "ids",
                    f"expected ids of documents in the index, got {document_id!r}, which is not in "
                    "it or was removed.",
                )
            mask[self._position_of[document_id]] = 1
        return mask.to(self.device)

    def _pad_on_cpu(self, queries: SparseVectors) -> tuple[Tensor, Tensor]:
        """Pad queries on the CPU to one number of terms, T, and copy them to the device.

        The terms of each query are sorted by the length of their postings, longest first. A Triton
        program that scores several queries then reads postings of similar length together.

        Args:
            queries: Nq queries.

        Returns:
            Terms, int32, and weights, float32, both ``[Nq, T]`` on the device. Padding has the term
            0 and the weight 0.
        """
        lengths = np.diff(queries.indptr)
        columns = np.arange(_padded_width(int(lengths.max(initial=1))))
        is_term = columns < lengths[:, None]
        # The rank of a term (by the length of its postings) and its weight are packed into one
        # int64, because a sort of integers is several times faster than an argsort. The rank is the
        # high half. The low half is the bits of the weight.
        padding_rank = self._rank_of_term.size
        packed = np.full(is_term.shape, padding_rank << 32)
        ranks = self._rank_of_term[queries.indices]
        packed[is_term] = (ranks << 32) | queries.data.view(np.uint32)
        packed.sort(axis=1)
        terms = self._term_of_rank[packed >> 32]
        weight_bits = packed.astype(np.int32)  # keeps the low half
        # Both arrays are copied at once. The source is not pinned memory, so it has been read when
        # the call returns, and may be freed.
        device_terms, device_bits = torch.from_numpy(np.stack([terms, weight_bits])).to(
            self.device,
            non_blocking=True,
        )
        return device_terms, device_bits.view(torch.float32)


def _copy_postings(postings: Any, n_documents: int, device: torch.device) -> BlockedPostings:
    """Copy the postings of all documents to one device.

    Args:
        postings: postings of all terms, which the caller has checked.
        n_documents: number of documents.
        device: the device.
    """
    with warnings.catch_warnings():
        # Mapped arrays are read-only, which is fine, because nothing writes to them.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return BlockedPostings.of(
            torch.from_numpy(postings.offsets),
            torch.from_numpy(postings.documents),
            torch.from_numpy(postings.weights),
            n_documents,
            device,
        )


def _search_by_graph(
    graph: QueryGraph,
    terms: Ints,
    weight_bits: Ints,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Search by a graph of :meth:`DeviceIndex._capture_terms`.

    Args:
        graph: the graph, which no other thread uses. Its input is int32 ``[2, 1, T]``: the terms
            of a query, and the bits of their float32 weights, both padded with 0.
        terms: ``[n]``, terms of the query, at most T.
        weight_bits: ``[n]``, bits of their weights.

    Returns:
        Scores and positions, both ``[1, k]``.
    """
    graph_input = graph.inputs[0].numpy()  # shares its memory with the graph
    graph_input.fill(0)
    padded_terms, padded_bits = graph_input[:, 0]
    padded_terms[: terms.size] = terms
    padded_bits[: weight_bits.size] = weight_bits
    graph.launch()
    graph.wait()
    scores, positions = graph.host_results
    # The next search overwrites the results of the graph.
    return scores.numpy().copy(), positions.numpy().copy()


class _Entries(NamedTuple):
    """Non-zero weights of queries, row after row.

    Attributes:
        rows: int64 ``[n]``, row of the query of each weight, ascending.
        terms: int64 ``[n]``, term of each weight.
        weights: float32 ``[n]``.
        n_rows: number of queries.
        longest: number of terms of the longest query; None if it has to be computed on the device.
    """

    rows: Tensor
    terms: Tensor
    weights: Tensor
    n_rows: int
    longest: int | None


def _n_queries(queries: Tensor | SparseRows) -> int:
    """Return the number of queries of a batch in any layout."""
    return len(queries.counts) if isinstance(queries, SparseRows) else queries.shape[0]


def _device_of(queries: Tensor | SparseRows) -> torch.device:
    """Return the device that the weights of queries are on."""
    return queries.values.device if isinstance(queries, SparseRows) else queries.device


def _to_dense_row(query: Tensor | SparseRows, out: Tensor | None = None) -> Tensor:
    """Return the weights of one query as a dense float32 tensor ``[1, V]`` on its device.

    Args:
        query: ``[1, V]``, a dense, CSR or COO tensor, or the ``SparseRows`` of an encoding stream.
        out: float32 ``[1, V]`` that the weights are written to; None returns another tensor.
    """
    if not isinstance(query, SparseRows) and query.layout == torch.strided:
        return query.float() if out is None else out.copy_(query)
    vocab_size = query.vocab_size if isinstance(query, SparseRows) else query.shape[1]
    if isinstance(query, SparseRows):
        terms = query.columns
        weights = query.values
    elif query.layout == torch.sparse_csr:
        terms = query.col_indices()
        weights = query.values()
    else:
        entries = _extract_entries(query)
        terms = entries.terms
        weights = entries.weights
    dense = torch.zeros(1, vocab_size, device=weights.device) if out is None else out.zero_()
    return dense.index_add_(1, terms, weights.float()[None])


def _extract_entries(queries: Tensor | SparseRows) -> _Entries:
    """Return the non-zero weights of queries.

    Args:
        queries: ``[Nq, V]``, a dense, CSR or COO tensor, or the ``SparseRows`` of an encoding
            stream.
    """
    longest = None
    if isinstance(queries, SparseRows):
        # The number of terms of each row is on the CPU.
        n_rows = len(queries.counts)
        longest = max(queries.counts.tolist(), default=0)
        terms = queries.columns.long()
        rows = repeat_interleave(torch.arange(n_rows), queries.counts, terms.device)
        weights = queries.values
    else:
        n_rows = queries.shape[0]
        if queries.layout == torch.strided:
            rows, terms = queries.nonzero(as_tuple=True)
            weights = queries[rows, terms]
        else:
            coordinates = queries.to_sparse().coalesce()
            rows, terms = coordinates.indices()
            weights = coordinates.values()
    return _Entries(rows, terms, weights.float(), n_rows, longest)


def _padded_width(longest: int) -> int:
    """Return the number of terms that queries of at most `longest` terms are padded to."""
    return math.ceil(max(1, longest) / _WIDTH_STEP) * _WIDTH_STEP


def _check_weights(entries: _Entries) -> None:
    """Raise ``DataError`` if a weight is negative, infinite or NaN.

    The CPU waits here for the device. On an H200 with several queries, this wait takes less time
    than to launch a check before the search and to read its result afterwards.
    """
    if not bool(_are_valid(entries.weights).all()):
        _refuse_weights(entries)


def _are_valid(weights: Tensor) -> Tensor:
    """Return which weights are finite and not negative."""
    return (weights >= 0) & (weights < math.inf)  # False for NaN


def _refuse_weights(entries: _Entries) -> NoReturn:
    """Raise ``ArgumentDataError`` that names the first negative, infinite or NaN weight."""
    position = int((~_are_valid(entries.weights)).int().argmax())
    raise ArgumentDataError(
        "queries",
        f"expected finite weights of at least 0, got {entries.weights[position].item()} for query "
        f"{int(entries.rows[position])}. Check the model's output and its activation.",
    )
