"""Time exact searches of documents that are divided among several GPUs.

    python -m benchmarks.search_devices --devices 1 --devices 8 --output results

Timed: `search` of a late-interaction index with one query of 32 tokens, with as many documents per
GPU on any number of GPUs; `search_tensor` of one learned sparse index with a batch of queries that
are on the first GPU. Times are by the wall clock until all devices have finished.

Baselines: the late index of one GPU, at equal documents per GPU, and the sparse index on one GPU.
The column `share` is the late index's rate of bytes, relative to the number of GPUs times the rate
of the slowest of them alone. `x_one` is relative to one GPU.

Gate: the sparse index must return the bits of one GPU. Each GPU has one document that is a late
query, which must be the best hit with the score of its tokens, in fp64 within the budget of int8.

Documents are drawn on each GPU, so that neither disk nor CPU holds the token vectors of all. With
`--device cpu --tiny`, several CPU devices show that all of it runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from benchmarks.search_data import (
    DeviceRows,
    make_device_rows,
    make_queries,
    make_query_tokens,
)
from tilefold.bench.results import collect, write_csv
from tilefold.ops import quantize_tokens
from tilefold.pipeline.rows import SparseRows
from tilefold.retrieval import LateIndex, TokenVectors
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.index.token_blocks import DeviceDocuments, StoredTokens

FILE = "search_devices.csv"
K = 10
DIMENSION = 128
DOCUMENT_TOKENS = 64
QUERY_TOKENS = 32
# bytes of an int8 token and its fp32 scale
TOKEN_BYTES = DIMENSION + 4
# documents of the late index on each GPU: 30 million on 8 GPUs
LATE_DOCUMENTS = 3_750_000
SPARSE_DOCUMENTS = 8_800_000
SPARSE_QUERIES = 2048
# documents that sparse queries are drawn from
QUERIED_DOCUMENTS = 100_000
# the same with --tiny
TINY_LATE_DOCUMENTS = 200
TINY_SPARSE_DOCUMENTS = 2000
TINY_SPARSE_QUERIES = 16
# documents that are drawn together, to bound the memory
CHUNK_DOCUMENTS = 50_000
WARM_UP_SEARCHES = 5
TIMED_SEARCHES = 30
# relative error of a score: of int8 documents, and of queries that the kernels round to int8
SCORE_ERROR = 0.02


class NumberedIds(Sequence[str]):
    """Ids ``d0``, ``d1`` and so on, which take no memory.

    Args:
        count: the number of ids.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, position: int) -> str: ...
    @overload
    def __getitem__(self, position: slice) -> list[str]: ...
    def __getitem__(self, position: int | slice) -> str | list[str]:
        if isinstance(position, slice):
            return [f"d{number}" for number in range(*position.indices(self._count))]
        return f"d{position}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both kinds of index, print the rows, and write them.

    Returns:
        The exit code: 1 if a gate failed.
    """
    options = parse_arguments(arguments)
    passed = True
    for measure in (measure_late, measure_sparse):
        rows = measure(options)
        passed &= all(row["gate"] == "ok" for row in rows)
        # the rows of one kind are kept if the other kind fails
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            provenance = collect(torch.device(options.device))
            write_csv(options.output / FILE, rows, provenance, ("case", "devices"))
    return 0 if passed else 1


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help=f"folder for {FILE}")
    parser.add_argument(
        "--devices",
        type=int,
        action="append",
        required=True,
        help="a number of devices; repeat for several, ascending from 1",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="few documents and queries")
    return parser.parse_args(arguments)


def names_of(options: argparse.Namespace, n_devices: int) -> list[str]:
    """Return the names of the first devices."""
    if options.device == "cpu":
        return ["cpu"] * n_devices
    return [f"cuda:{number}" for number in range(n_devices)]


def median_seconds(search: Callable[[], Any], names: Sequence[str]) -> float:
    """Return the median time of a search until all devices have finished.

    Args:
        search: the search.
        names: names of the devices.
    """
    for _ in range(WARM_UP_SEARCHES):
        search()
    seconds = []
    for _ in range(TIMED_SEARCHES):
        wait_for(names)
        start = time.perf_counter()
        search()
        wait_for(names)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def wait_for(names: Sequence[str]) -> None:
    """Wait until GPUs have finished."""
    for name in names:
        if name != "cpu":
            torch.cuda.synchronize(name)


def measure_late(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time late-interaction searches, with equal numbers of documents on each device.

    Args:
        options: the options of the command line.
    """
    n_documents = TINY_LATE_DOCUMENTS if options.tiny else LATE_DOCUMENTS
    most_devices = max(options.devices)
    names = names_of(options, most_devices)
    queries = make_query_tokens(
        most_devices,
        QUERY_TOKENS,
        DIMENSION,
        torch.device("cpu"),
    )
    tokens_by_device = [
        make_device_tokens(n_documents, number, queries[number], torch.device(name))
        for number, name in enumerate(names)
    ]
    # Each device alone: the slowest of them limits a search by all.
    alone_seconds = [
        median_seconds(search_of(make_index([tokens], [name]), queries[0]), [name])
        for tokens, name in zip(tokens_by_device, names, strict=True)
    ]
    rows: list[dict[str, Any]] = []
    for n_devices in options.devices:
        index = make_index(tokens_by_device[:n_devices], names[:n_devices])
        seconds = median_seconds(search_of(index, queries[0]), names[:n_devices])
        n_bytes = n_devices * n_documents * DOCUMENT_TOKENS * TOKEN_BYTES
        slowest_seconds = max(alone_seconds[:n_devices])
        row = {
            "case": "late, 1 query",
            "devices": n_devices,
            "documents": n_devices * n_documents,
            "queries": 1,
            "gb": n_bytes / 1e9,
            "ms": 1e3 * seconds,
            "queries_s": 1 / seconds,
            "tb_s": n_bytes / seconds / 1e12,
            "slowest_alone_ms": 1e3 * slowest_seconds,
            "share": slowest_seconds / seconds,
            "gate": check_late(index, queries[:n_devices], n_documents),
        }
        rows.append(row)
        print_row(row)
    return rows


def make_device_tokens(
    n_documents: int,
    seed: int,
    query: Tensor,
    device: torch.device,
) -> StoredTokens:
    """Draw the token vectors of a device in int8, and put a query into its middle document.

    Args:
        n_documents: number of documents.
        seed: seed of the random numbers.
        query: fp32 ``[Lq, D]``, the first tokens of the middle document.
        device: the device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    n_tokens = n_documents * DOCUMENT_TOKENS
    values = torch.empty(n_tokens, DIMENSION, dtype=torch.int8, device=device)
    chunk_tokens = CHUNK_DOCUMENTS * DOCUMENT_TOKENS
    for start in range(0, n_tokens, chunk_tokens):
        chunk = values[start : start + chunk_tokens]
        chunk.random_(-127, 128, generator=generator)
    # Random integers have a root mean square of 73.3, and tokens a norm of about 1.
    scales = torch.full((n_tokens,), 1 / (73.3 * DIMENSION**0.5), device=device)
    quantized = quantize_tokens(query.to(device), "int8")
    first_token = n_documents // 2 * DOCUMENT_TOKENS
    values[first_token : first_token + len(query)] = quantized.values
    scales[first_token : first_token + len(query)] = quantized.scales
    return StoredTokens(values, scales)


def make_index(tokens_by_device: Sequence[StoredTokens], names: Sequence[str]) -> LateIndex:
    """Return an index of the documents on some devices, as :meth:`LateIndex.on` returns it.

    Args:
        tokens_by_device: token vectors of the documents of each device.
        names: names of the devices.
    """
    n_documents = sum(len(tokens.values) for tokens in tokens_by_device) // DOCUMENT_TOKENS
    # Stand-in for the files of an index on disk. All documents have the same number of tokens.
    files: Any = SimpleNamespace(
        offsets=np.arange(n_documents + 1) * DOCUMENT_TOKENS,
        lengths=np.full(n_documents, DOCUMENT_TOKENS),
        n_tokens=n_documents * DOCUMENT_TOKENS,
        nbytes=n_documents * DOCUMENT_TOKENS * TOKEN_BYTES,
        dimension=DIMENSION,
        storage="int8",
    )
    index = LateIndex(
        NumberedIds(n_documents),
        files,
        None,
        {"storage": "int8", "pool_factor": 1, "dimension": DIMENSION},
        Provenance(),
    ).on(names)
    parts = []
    first_document = 0
    for tokens, name in zip(tokens_by_device, names, strict=True):
        end_document = first_document + len(tokens.values) // DOCUMENT_TOKENS
        documents = DeviceDocuments(
            files,
            torch.device(name),
            first_document,
            end_document,
            copy=False,
        )
        documents.resident = tokens
        parts.append(documents)
        first_document = end_document
    index._device_documents[tuple(names)] = parts
    return index


def packed(queries: Tensor) -> TokenVectors:
    """Return queries ``[Nq, Lq, D]`` as an index takes them."""
    ids = [f"q{number}" for number in range(len(queries))]
    return TokenVectors.pack(ids, list(queries), DIMENSION, "fp32")


def search_of(index: LateIndex, query: Tensor) -> Callable[[], Any]:
    """Return a search with one query ``[Lq, D]``."""
    vectors = packed(query[None])
    return lambda: index.search(vectors, K)


def check_late(index: LateIndex, queries: Tensor, n_documents: int) -> str:
    """Check that each query finds the document that has its tokens, on any device.

    Args:
        index: the index.
        queries: ``[devices, Lq, D]``; the middle document of each device has one of them.
        n_documents: number of documents on each device.

    Returns:
        ``"ok"``, or the reason why the check failed.
    """
    # The score of a query and its own tokens.
    expected_scores = queries.double().square().sum((1, 2)).tolist()
    for device, hits in enumerate(index.search(packed(queries), K)):
        expected_id = f"d{device * n_documents + n_documents // 2}"
        if hits[0].id != expected_id:
            return f"query {device} found {hits[0].id} in place of {expected_id}"
        error = abs(hits[0].score / expected_scores[device] - 1)
        if not error <= SCORE_ERROR:
            return f"the score of query {device} is off by {error:.2g}"
    return "ok"


def measure_sparse(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time searches of one learned sparse index with a batch of queries on the first device.

    Args:
        options: the options of the command line.
    """
    n_documents = TINY_SPARSE_DOCUMENTS if options.tiny else SPARSE_DOCUMENTS
    n_queries = TINY_SPARSE_QUERIES if options.tiny else SPARSE_QUERIES
    first_device = torch.device(names_of(options, 1)[0])
    documents: DeviceRows = make_device_rows(n_documents, 0, first_device)
    queries = make_queries(documents.first(min(n_documents, QUERIED_DOCUMENTS)), n_queries, 0)
    # As the stream of an encoder yields queries.
    query_rows = SparseRows(
        torch.from_numpy(queries.indptr).diff(),
        torch.from_numpy(queries.indices).to(first_device),
        torch.from_numpy(queries.data).to(first_device),
        queries.vocab_size,
    )
    one_index = documents.on_device()
    expected = one_index.search_tensor(query_rows, K)
    rows: list[dict[str, Any]] = []
    for n_devices in options.devices:
        names = names_of(options, n_devices)
        start = time.perf_counter()
        index = one_index if n_devices == 1 else documents.on_device(names)
        build_seconds = time.perf_counter() - start
        search = partial(index.search_tensor, query_rows, K)
        is_equal = all(
            torch.equal(result, expected_result)
            for result, expected_result in zip(search(), expected, strict=True)
        )
        seconds = median_seconds(search, names)
        row = {
            "case": f"sparse, {n_queries} queries",
            "devices": n_devices,
            "documents": n_documents,
            "queries": n_queries,
            "gb": index.postings.nbytes / 1e9,
            "ms": 1e3 * seconds,
            "queries_s": n_queries / seconds,
            "build_s": build_seconds,
            "gate": "ok" if is_equal else "other bits than on one device",
        }
        rows.append(row)
        del search, index  # frees the memory of the devices
    one_rates = [row["queries_s"] for row in rows if row["devices"] == 1]
    for row in rows:
        if one_rates:
            row["x_one"] = row["queries_s"] / one_rates[0]
        print_row(row)
    return rows


def print_row(row: dict[str, Any]) -> None:
    """Print the cells of a row."""
    cells = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
    ]
    print(", ".join(cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
