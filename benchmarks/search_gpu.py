"""Time searches of large collections on one GPU.

    python -m benchmarks.search_gpu [--only sparse-1m] [--output benchmarks/results]

Timed are searches of three kinds:

- late interaction with documents in memory, in 4 bits, and streamed from mapped files
- learned sparse vectors, one query at a time and in batches
- from texts to hits

Times are by the wall clock until the device has finished, so they include the CPU's part. Methods
of a comparison run in turns. Collections are random, and are drawn on the device by
:mod:`benchmarks.search_data`.

Baselines are products of torch, torch's CSR matrix, copies from pinned memory, or int8 for int4.
The column `goal` is the value that an H200 should reach. It has milliseconds, queries per second,
or a value for the column `share`. `share` is relative to the rate of copies from pinned memory, to
the bytes of int8, or to the whole time, for the part in which the GPU is busy.

Gate: scores of some documents, and of the best ones, are compared with fp64, within the budget of
fp32. Sparse scores may differ by the rounding of their integer sums. Single queries must return the
same documents as in the batch.

`--device cpu --tiny` shows that all of it runs.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.encode import Truth, busy_share
from benchmarks.encode_data import CASES, make_model
from benchmarks.job import Job, JobCase, JobOptions, Row, SearchMethod, main, time_methods
from benchmarks.queries import queries_of
from benchmarks.search_data import (
    DeviceRows,
    TopK,
    check_maxsim_top_k,
    make_device_rows,
    make_late_index,
    make_queries,
    make_query_tokens,
    make_tokens,
)
from tilefold._internal.csr import to_csr
from tilefold.bench.spec import Runnable, captured
from tilefold.bench.timing import TimeBudget
from tilefold.ops import QuantizedTokens, maxsim, maxsim_topk
from tilefold.ops.sparse_search import sparse_topk
from tilefold.pipeline.rows import Batch, SparseRows, Window, repeat_interleave
from tilefold.pipeline.threads import Prefetcher
from tilefold.retrieval import LateIndex, SparseVectors, TokenVectors
from tilefold.retrieval.index import late, token_blocks
from tilefold.retrieval.index.divided_postings import DividedPostings
from tilefold.retrieval.index.on_device import DeviceIndex

# number of hits, dimensions of token vectors, and tokens of a query and of a document
K = 100
DIMS = 128
QUERY_TOKENS = 32
DOCUMENT_TOKENS = 64
# documents of each collection with --tiny
TINY_DOCUMENTS = 2000

# queries that a late-interaction search takes together
SEVERAL_QUERIES = 16
# queries of a batch of sparse vectors or texts
BATCH_QUERIES = 512
# single sparse queries that are timed in turn, so that no result is of one query
SINGLE_QUERIES = 64
# documents from which the terms of sparse queries are drawn
QUERIED_DOCUMENTS = 20_000
# batches of texts, and batches that one call encodes together
TEXT_BATCHES = 96
BATCHES_PER_CALL = 4

# bytes of one copy from pinned memory
COPY_BYTES = 1 << 28
# documents that torch's MaxSim scores at a time
TORCH_DOCUMENTS = 1 << 16

BUDGET = TimeBudget(seconds=0.8, min_reps=7, max_reps=30)
TEXT_BUDGET = TimeBudget(seconds=2.0, min_reps=3, max_reps=7)
ONCE = TimeBudget(seconds=0.0, min_reps=1, max_reps=1)


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Measure a case. An error becomes a row, so that the other cases still run.

    Raises:
        ValueError: if the device is a CPU, without ``--tiny``.
    """
    if options.device.type == "cpu" and not options.quick:
        raise ValueError("device: expected a GPU, or --tiny, got cpu.")
    n_documents = case.numbers["documents"]
    if options.quick:
        n_documents = min(n_documents, TINY_DOCUMENTS)
    try:
        for row in case.numbers["measure"](case, n_documents, options.device):
            yield {"case": case.name, "documents": n_documents, "share": "", **row}
    except Exception as error:
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())
        yield {"case": case.name, "way": "error", "gate": message[:300]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measure_maxsim(
    case: JobCase,
    n_documents: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Time MaxSim over all documents in memory, padded and packed.

    If the case has ``peer``, torch's products and maxima in bf16 are timed too.

    Args:
        case: the case.
        n_documents: the number of documents.
        device: the device.
    """
    length = case.numbers["length"]
    documents = make_tokens(n_documents, length, DIMS, 0, device)
    packed = QuantizedTokens(documents.values.flatten(0, 1), documents.scales.flatten())
    offsets = torch.arange(n_documents + 1, dtype=torch.int32, device=device) * length
    all_queries = make_query_tokens(SEVERAL_QUERIES, QUERY_TOKENS, DIMS, device)
    for n_queries, goal in zip((1, SEVERAL_QUERIES), case.numbers["goals"], strict=True):
        queries = all_queries[:n_queries]
        name = f"maxsim_topk, {n_queries}"
        methods = {
            name: _maxsim_method(queries, documents, None, documents, goal),
            f"{name}, packed": _maxsim_method(queries, packed, offsets, documents),
        }
        yield from time_methods(methods, device, BUDGET)
    if case.numbers["peer"]:
        search = partial(_torch_maxsim_topk, all_queries[0], documents)
        method = SearchMethod(search, 1, documents.nbytes)
        yield from time_methods({"torch, 1": method}, device, ONCE)


def _maxsim_method(
    queries: Tensor,
    documents: QuantizedTokens,
    offsets: Tensor | None,
    padded_documents: QuantizedTokens,
    goal: object = "",
) -> SearchMethod:
    """Return a search by ``maxsim_topk``, checked with the reference implementation.

    Args:
        queries: ``[Q, L, D]``.
        documents: padded ``[N, S, D]``, or packed ``[N * S, D]``.
        offsets: ``[N + 1]`` of packed documents. None for padded ones.
        padded_documents: ``[N, S, D]``, for the check.
        goal: the milliseconds that a GPU should reach.
    """
    search = partial(maxsim_topk, queries, documents, K, cu_seqlens_d=offsets)

    def exact_scores(positions: Tensor) -> Tensor:
        """Score documents with the reference implementation."""
        return maxsim(queries, _select(padded_documents, positions), impl="reference")

    n_bytes = padded_documents.nbytes
    return SearchMethod(
        search,
        queries=len(queries),
        stored_bytes=n_bytes,
        read_bytes=n_bytes,
        goal=goal,
        gate=check_maxsim_top_k(
            search(),
            maxsim(queries, documents, cu_seqlens_d=offsets),
            exact_scores,
        ),
    )


def _select(documents: QuantizedTokens, selection: Tensor | slice) -> QuantizedTokens:
    """Return some of padded documents."""
    return QuantizedTokens(documents.values[selection], documents.scales[selection])


def _torch_maxsim_topk(query: Tensor, documents: QuantizedTokens) -> TopK:
    """Search with torch's products and maxima in bf16.

    Args:
        query: ``[L, D]``.
        documents: padded, ``[N, S, D]``.

    Returns:
        Scores ``[K]`` and documents ``[K]``.
    """
    n_documents = len(documents.values)
    scores = torch.empty(n_documents, device=query.device)
    for start in range(0, n_documents, TORCH_DOCUMENTS):
        block = slice(start, start + TORCH_DOCUMENTS)
        tokens = _select(documents, block).dequantize(torch.bfloat16)
        products = tokens @ query.bfloat16().T
        scores[block] = products.amax(1).float().sum(1)
    return scores.topk(K)


@functools.cache
def _work_folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of the indexes, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="tilefold-search-gpu-")


@functools.cache
def _stored_index(storage: str, n_documents: int, device: torch.device) -> LateIndex:
    """Write an index once, for all cases that search it.

    Args:
        storage: the storage of token vectors, ``int8`` or ``int4``.
        n_documents: the number of documents.
        device: the device that draws the vectors.
    """
    return make_late_index(
        Path(_work_folder().name) / storage,
        storage,
        n_documents,
        DOCUMENT_TOKENS,
        DIMS,
        device,
    )


def _late_methods(
    storage: str,
    n_documents: int,
    device: torch.device,
    goal: object = "",
    streamed: bool = False,
) -> dict[str, SearchMethod]:
    """Return searches of a late-interaction index with one query and with several.

    The index is opened anew, so that its first search, for the gate, reads and checks the files.

    Args:
        storage: the storage of token vectors, ``int8`` or ``int4``.
        n_documents: the number of documents.
        device: the device that searches.
        goal: the value that a GPU should reach.
        streamed: whether every search must read the documents from the files.
    """
    stored = _stored_index(storage, n_documents, device)
    index = LateIndex(stored.ids, stored.files, None, stored.options, stored.provenance)
    index = index.on(str(device))
    all_queries = make_query_tokens(SEVERAL_QUERIES, QUERY_TOKENS, DIMS, device)
    methods: dict[str, SearchMethod] = {}
    for n_queries in (1, SEVERAL_QUERIES):
        vectors = all_queries[:n_queries]
        queries = TokenVectors.pack(
            [f"q{position}" for position in range(n_queries)],
            list(vectors.cpu()),
            DIMS,
            "fp32",
        )
        n_bytes = index.files.nbytes
        methods[f"{storage}, {n_queries}"] = SearchMethod(
            partial(index.search, queries, K),
            queries=n_queries,
            stored_bytes=n_bytes,
            read_bytes=n_bytes if streamed else 0,
            goal=goal,
            gate=_check_late_search(index, queries, vectors, streamed),
        )
    return methods


def _check_late_search(
    index: LateIndex,
    queries: TokenVectors,
    query_vectors: Tensor,
    streamed: bool,
) -> str:
    """Compare the hits of a late-interaction index with exact scores.

    Args:
        index: an index on one device.
        queries: the queries.
        query_vectors: ``[Q, L, D]`` of the same queries, on the device of the index.
        streamed: whether the device must not hold the documents.

    Returns:
        ``"ok"``, or the reason why the check failed.
    """
    device = query_vectors.device
    hits = index.search(queries, K)
    scores = torch.tensor([[score for _, score in row] for row in hits], device=device)
    # ids are "d" and the position
    documents = torch.tensor([[int(name[1:]) for name, _ in row] for row in hits], device=device)
    (device_documents,) = index._documents_on(index._choose_devices(device))
    if streamed and device_documents.resident is not None:
        return "the GPU holds the documents"
    batch = token_blocks.QueryBatch(query_vectors, None)
    block_scores = [
        token_blocks.maxsim_scores(batch, block.vectors, block.offsets, "sum")
        for block in device_documents.blocks()
    ]

    def exact_scores(positions: Tensor) -> Tensor:
        """Score documents from the files with the reference implementation."""
        packed, offsets = index.files.take(positions.cpu().numpy())
        return maxsim(
            query_vectors.cpu(),
            packed.for_maxsim(),
            cu_seqlens_d=offsets,
            impl="reference",
        ).to(device)

    return check_maxsim_top_k((scores, documents), torch.cat(block_scores, 1), exact_scores)


def measure_four_bits(
    case: JobCase,
    n_documents: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Time a late-interaction index in memory, in 8 and in 4 bits.

    The column ``share`` of 4 bits is the size relative to 8 bits.

    Args:
        case: the case, with the goal of the times.
        n_documents: size of the index.
        device: the device.
    """
    int8_methods = _late_methods("int8", n_documents, device)
    int4_methods = _late_methods("int4", n_documents, device, case.numbers["goal"])
    int8_bytes = int8_methods["int8, 1"].stored_bytes
    for row in time_methods({**int8_methods, **int4_methods}, device, BUDGET):
        method = int4_methods.get(row["way"])
        if method is not None:
            row["share"] = method.stored_bytes / int8_bytes
        yield row


def measure_streamed(
    case: JobCase,
    n_documents: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Time an index in mapped files, and copies of the same size from pinned memory.

    The GPU is not allowed to hold any document. The column ``share`` is the rate of reading,
    relative to the copies.

    Args:
        case: the case, with the goal of the times.
        n_documents: size of the index.
        device: the device.
    """
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    n_copies = 1 + _stored_index("int8", n_documents, device).files.nbytes // COPY_BYTES

    def copy() -> None:
        """Copy at least as many bytes as the index has."""
        for _ in range(n_copies):
            target.copy_(source, non_blocking=True)

    copied_bytes = n_copies * COPY_BYTES
    with mock.patch.object(late, "_MEMORY_FRACTION", 0.0):
        methods = {
            "pinned": SearchMethod(copy, 0, copied_bytes, copied_bytes),
            **_late_methods("int8", n_documents, device, case.numbers["goal"], streamed=True),
        }
        rows = list(time_methods(methods, device, BUDGET))
    copy_rate = rows[0]["tb_s"]
    for row in rows:
        if row["gate"] == "ok":
            row["share"] = row["tb_s"] / copy_rate
        yield row


@dataclass(frozen=True)
class _SparseSearch:
    """A sparse collection on a device and a batch of queries, in the forms that searches take.

    Attributes:
        rows: the documents.
        index: the index of the documents.
        queries: the queries on the CPU.
        terms: ``[Q, T]``, terms of the queries on the device, padded.
        weights: ``[Q, T]``, weights of the terms. Padding has 0.
    """

    rows: DeviceRows
    index: DeviceIndex
    queries: SparseVectors
    terms: Tensor
    weights: Tensor

    @classmethod
    def make(cls, n_documents: int, device: torch.device) -> _SparseSearch:
        """Draw the documents and the queries."""
        rows = make_device_rows(n_documents, 0, device)
        index = rows.on_device()
        n_queries = BATCH_QUERIES if n_documents > TINY_DOCUMENTS else SEVERAL_QUERIES
        queries = make_queries(rows.first(min(n_documents, QUERIED_DOCUMENTS)), n_queries, 0)
        terms, weights = index._pad_on_cpu(queries)
        return cls(rows, index, queries, terms.to(device), weights.to(device))

    @property
    def n_bytes(self) -> int:
        """Bytes of the index on the device."""
        return self.index.postings.nbytes

    @cached_property
    def dense_queries(self) -> Tensor:
        """Queries ``[Q, V]`` on the device."""
        dense = torch.zeros(
            len(self.terms),
            self.index.vocab_size,
            device=self.terms.device,
        )
        return dense.scatter_add_(1, self.terms.long(), self.weights)

    @cached_property
    def matrix(self) -> Tensor:
        """Documents ``[N, V]`` as torch's CSR matrix."""
        return self.rows.matrix()

    @cached_property
    def top_k(self) -> TopK:
        """Scores and documents ``[Q, K]`` of the whole batch."""
        return self.search(self.terms, self.weights)

    @cached_property
    def gate(self) -> str:
        """Result of the check of :attr:`top_k`: ``"ok"``, or the reason why it failed."""
        return self.rows.check_top_k(self.top_k, self.index, self.terms, self.weights)

    def search(self, terms: Tensor, weights: Tensor) -> TopK:
        """Search with terms and weights ``[Q, T]`` that are on the device."""
        postings = self.index.postings
        if isinstance(postings, DividedPostings):
            return postings.topk(terms, weights, K)
        return sparse_topk(postings, terms, weights, K)


def measure_sparse(
    case: JobCase,
    n_documents: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Time searches of sparse vectors with one query and with a batch.

    Queries are on the device or on the CPU. The baseline is torch's CSR matrix.

    Args:
        case: the case.
        n_documents: the number of documents.
        device: the device.
    """
    search = _SparseSearch.make(n_documents, device)
    single_goal, batch_goal = case.numbers["goals"]
    yield from time_methods(_single_query_methods(search, single_goal), device, BUDGET)
    yield from time_methods(_batch_methods(search, batch_goal), device, BUDGET)


def _single_query_methods(search: _SparseSearch, goal: float) -> dict[str, SearchMethod]:
    """Return searches with one query at a time.

    Args:
        search: the collection and the queries.
        goal: the milliseconds that ``sparse_topk`` should reach.
    """
    device = search.terms.device
    index = search.index
    n_queries = min(SINGLE_QUERIES, len(search.queries))
    singles = [search.queries.take([position]) for position in range(n_queries)]
    # without the padding of the batch
    padded_singles: list[tuple[Tensor, Tensor]] = []
    for single in singles:
        terms, weights = index._pad_on_cpu(single)
        padded_singles.append((terms.to(device), weights.to(device)))
    dense = search.dense_queries
    csr_singles = [to_csr(dense[query : query + 1]) for query in range(n_queries)]
    matrix = search.matrix

    def search_tensors(query: int) -> TopK:
        """Search with one query that is on the device."""
        terms, weights = padded_singles[query]
        return search.search(terms, weights)

    methods = {
        "sparse_topk, 1": _single_query_method(search, search_tensors, n_queries, goal),
        "DeviceIndex.search, 1": _single_query_method(
            search,
            lambda query: index.search(singles[query], K),
            n_queries,
        ),
        "search_tensor, 1": _single_query_method(
            search,
            lambda query: index.search_tensor(dense[query : query + 1], K),
            n_queries,
        ),
        "search_tensor, 1, CSR": _single_query_method(
            search,
            lambda query: index.search_tensor(csr_singles[query], K),
            n_queries,
        ),
        "torch CSR and topk, 1": _single_query_method(
            search,
            lambda query: (matrix @ dense[query]).topk(K),
            n_queries,
            is_baseline=True,
        ),
    }
    if device.type == "cuda":
        methods["sparse_topk, 1, as a CUDA graph"] = _single_query_method(
            search,
            _graph_search(search),
            n_queries,
        )
    return methods


def _single_query_method(
    search: _SparseSearch,
    search_query: Callable[[int], Any],
    n_queries: int,
    goal: object = "",
    is_baseline: bool = False,
) -> SearchMethod:
    """Return a search that takes the next query at each call.

    Args:
        search: the collection and the queries.
        search_query: the function that searches with the query at a position.
        n_queries: the number of queries that take turns.
        goal: the milliseconds that a GPU should reach.
        is_baseline: whether results are not compared with those of the batch.
    """
    gate = search.gate
    if not is_baseline:
        batch_documents = search.top_k[1]
        n_different = 0
        for query in range(n_queries):
            row = batch_documents[query]
            expected = row[row >= 0].tolist()
            n_different += _returned_documents(search_query(query)) != expected
        if n_different:
            gate = f"{n_different} queries find others than in the batch"
    turns = itertools.cycle(range(n_queries))
    return SearchMethod(
        lambda: search_query(next(turns)),
        queries=1,
        stored_bytes=search.n_bytes,
        goal=goal,
        gate=gate,
    )


def _graph_search(search: _SparseSearch) -> Callable[[int], object]:
    """Capture a search with one query as a CUDA graph.

    Returns:
        A function that copies the query at a position into the graph's input, and replays it.
    """
    input_terms = search.terms[:1].clone()
    input_weights = search.weights[:1].clone()
    # a Runnable returns tensors in whatever form its function does
    forward: Any = partial(search.search, input_terms, input_weights)
    graph = captured(Runnable(forward, None, "")).forward

    def replay(query: int) -> object:
        """Search with one query of the batch."""
        input_terms.copy_(search.terms[query : query + 1])
        input_weights.copy_(search.weights[query : query + 1])
        return graph()

    return replay


def _batch_methods(search: _SparseSearch, goal: int) -> dict[str, SearchMethod]:
    """Return searches with all queries at once.

    Args:
        search: the collection and the queries.
        goal: the queries per second that ``sparse_topk`` should reach.
    """
    csr_queries = search.dense_queries.to_sparse_csr()
    dense_queries = search.dense_queries
    matrix = search.matrix
    index = search.index
    searches: dict[str, Callable[[], object]] = {
        "sparse_topk, batch": partial(search.search, search.terms, search.weights),
        "search_tensor, batch": partial(index.search_tensor, csr_queries, K),
        "DeviceIndex.search, batch": partial(index.search, search.queries, K),
        "torch CSR, batch": lambda: matrix @ dense_queries.T,
    }
    goals = {"sparse_topk, batch": f"{goal} a second"}
    return {
        name: SearchMethod(
            search_batch,
            queries=len(search.queries),
            stored_bytes=search.n_bytes,
            goal=goals.get(name, ""),
            gate=search.gate,
        )
        for name, search_batch in searches.items()
    }


def _returned_documents(result: Any) -> list[int]:
    """Return the positions of the documents in the result of a single query.

    Args:
        result: the hits of each query, as of ``DeviceIndex.search``, or :data:`TopK`.
    """
    if isinstance(result[0], list):
        (hits,) = result
        # ids are "d" and the position
        return [int(name[1:]) for name, _ in hits]
    _, documents = result
    return [position for position in documents[0].tolist() if position >= 0]


class _TextSearch:
    """Ways from texts to hits, with an accelerated sparse encoder and an index on the device.

    Args:
        n_documents: the number of documents of the index.
        device: the device that encodes and searches.
    """

    def __init__(self, n_documents: int, device: torch.device) -> None:
        """Create an index with random documents, a model, and the texts of queries.

        Args:
            n_documents: the size of the index.
            device: the device of the index and of the model.
        """
        from tilefold.integrations.sentence_transformers import accelerate

        is_tiny = n_documents <= TINY_DOCUMENTS
        self.device = device
        self.rows = make_device_rows(n_documents, 0, device)
        self.index = self.rows.on_device()
        n_batches = BATCHES_PER_CALL if is_tiny else TEXT_BATCHES
        self.texts = queries_of(BATCH_QUERIES * n_batches)
        model_name = "tiny-cpu" if is_tiny else "bert-base"
        (model_case,) = (case for case in CASES if case.name == model_name)
        with tempfile.TemporaryDirectory() as folder:
            self.model = make_model(model_case, self.texts, Path(folder), device)
        first_texts = self.texts[:BATCH_QUERIES]
        self.truth = Truth(
            self.model,
            {str(position): text for position, text in enumerate(first_texts)},
        )
        accelerate(self.model)

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Encode queries as a sparse tensor ``[Q, V]``."""
        rows: Tensor = self.model.encode_query(texts, show_progress_bar=False)
        return rows

    def in_turn(self) -> None:
        """Encode a batch, search with it, and go to the next one."""
        for texts in self._batches(BATCH_QUERIES):
            self.index.search_tensor(self.encode(texts), K)

    def encoded_in_thread(self, batch_size: int) -> None:
        """Encode in a thread, while batches before are searched."""
        with ThreadPoolExecutor(1) as pool:
            for rows in pool.map(self.encode, self._batches(batch_size)):
                self.index.search_tensor(rows, K)

    def streamed(self, batch_size: int) -> None:
        """Encode as a stream in a thread, while batches before are searched."""
        # The first batches are small, because the GPU waits until they are tokenized.
        n_first = 3 * BATCH_QUERIES
        windows = [
            self.texts[:BATCH_QUERIES],
            self.texts[BATCH_QUERIES:n_first],
            *self._batches(batch_size, start=n_first),
        ]
        encoded = self._stream(windows)
        with (
            torch.inference_mode(),
            Prefetcher(encoded, BATCHES_PER_CALL, "encoded") as batches,
        ):
            for batch in batches:
                self.index.search_tensor(batch.rows, K)

    def check(self) -> str:
        """Compare rows with the stock encoder's, and searches with exact scores.

        Returns:
            ``"ok"``, or the reason why a check failed.
        """
        texts = self.texts[:BATCH_QUERIES]
        queries = self.encode(texts)
        gate = self._check_search(queries, queries.to_dense())
        if gate != "ok":
            return gate
        for batch in self._stream([texts]):
            dense = self._dense_rows(batch.rows)
            if self._largest_error(batch.positions, dense) > self.truth.allowed:
                return "rows of the stream differ from those of the stock encoder"
            gate = self._check_search(batch.rows, dense)
            if gate != "ok":
                return gate
        return "ok"

    def _batches(self, size: int, start: int = 0) -> list[list[str]]:
        """Split the texts from a position on into batches."""
        return [
            self.texts[position : position + size]
            for position in range(start, len(self.texts), size)
        ]

    def _stream(self, windows: Sequence[list[str]]) -> Iterator[Batch]:
        """Encode windows of texts as batches of rows that stay on the device."""
        items = self.model.encode_sparse_batch.stream(
            map(Window, windows),
            task="query",
            to_host=False,
        )
        return (item for item in items if isinstance(item, Batch))

    def _check_search(self, queries: Tensor | SparseRows, dense: Tensor) -> str:
        """Compare a search with exact scores.

        Args:
            queries: the rows in the form that is searched with.
            dense: the same rows, ``[Q, V]``.
        """
        n_terms = int((dense > 0).sum(1).max())
        weights, terms = dense.float().topk(n_terms, dim=1)
        top_k = self.index.search_tensor(queries, K)
        return self.rows.check_top_k(top_k, self.index, terms.int(), weights)

    def _dense_rows(self, rows: SparseRows) -> Tensor:
        """Return rows of a stream as ``[Q, V]``."""
        counts, columns, values, size = rows
        row_of_entry = repeat_interleave(torch.arange(len(counts)), counts, self.device)
        dense = torch.zeros(len(counts), size, dtype=values.dtype, device=self.device)
        dense[row_of_entry, columns.long()] = values
        return dense

    def _largest_error(self, positions: Sequence[int], dense: Tensor) -> float:
        """Return the largest difference from rows of the stock encoder.

        Args:
            positions: position of the text of each row. Only the first texts have stock rows.
            dense: ``[Q, V]``.
        """
        largest = 0.0
        for row, position in enumerate(positions):
            if position < len(self.truth.rows):
                difference = dense[row].float().cpu() - self.truth.rows[position]
                largest = max(largest, float(difference.abs().max()))
        return largest


def measure_text_search(
    case: JobCase,
    n_documents: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Time the whole path from texts to hits, in several ways.

    The ways are: encoding and search one after the other, and both at the same time. The column
    ``share`` is the part of the time in which the GPU is busy.

    Args:
        case: the case, with the goal of the times.
        n_documents: size of the index.
        device: the device.
    """
    search = _TextSearch(n_documents, device)
    gate = search.check()
    together = f"{BATCHES_PER_CALL} batches together"
    large_batch = BATCHES_PER_CALL * BATCH_QUERIES
    searches: dict[str, Callable[[], None]] = {
        "one after the other": search.in_turn,
        "encoded in a thread": partial(search.encoded_in_thread, BATCH_QUERIES),
        f"encoded in a thread, {together}": partial(search.encoded_in_thread, large_batch),
        "a stream in a thread, 2 batches together": partial(search.streamed, 2 * BATCH_QUERIES),
        f"a stream in a thread, {together}": partial(search.streamed, large_batch),
    }
    methods = {
        name: SearchMethod(
            search_all,
            queries=len(search.texts),
            stored_bytes=search.index.postings.nbytes,
            goal=case.numbers["goal"],
            gate=gate,
        )
        for name, search_all in searches.items()
    }
    for row in time_methods(methods, device, TEXT_BUDGET):
        shares = [busy_share(searches[row["way"]], device) or 0.0 for _ in range(3)]
        # empty on a CPU, whose shares are 0
        row["share"] = statistics.median(shares) or ""
        yield row


Measure = Callable[[JobCase, int, torch.device], Iterator[dict[str, Any]]]


def _case(name: str, measure: Measure, documents: int, **numbers: Any) -> JobCase:
    """Return a case.

    Args:
        name: the name of the case.
        measure: a function that yields the rows of a case, for a number of documents on a device.
        documents: the number of documents.
        numbers: goals and sizes that ``measure`` reads.
    """
    return JobCase(
        name,
        quick=True,
        numbers={"measure": measure, "documents": documents, **numbers},
    )


JOB = Job(
    name="search_gpu",
    cases=(
        _case(
            "maxsim-1m",
            measure_maxsim,
            1_000_000,
            length=DOCUMENT_TOKENS,
            goals=(2.3, 9),
            peer=True,
        ),
        _case("maxsim-8.8m", measure_maxsim, 8_800_000, length=67, goals=(23, 80), peer=False),
        _case("maxsim-4bit", measure_four_bits, 1_000_000, goal="half"),
        _case("streamed", measure_streamed, 1_000_000, goal="80%"),
        _case("sparse-1m", measure_sparse, 1_000_000, goals=(0.12, 25_000)),
        _case("sparse-8.8m", measure_sparse, 8_800_000, goals=(0.4, 8_000)),
        _case("encode-search", measure_text_search, 1_000_000, goal="85%"),
    ),
    key=("case", "way"),
    shown=(
        "way",
        "queries",
        "gb",
        "p50_ms",
        "p20_ms",
        "p80_ms",
        "queries_s",
        "tb_s",
        "share",
        "goal",
        "gate",
    ),
    run=run,
)

if __name__ == "__main__":
    sys.exit(main(JOB, __doc__))
