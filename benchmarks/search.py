"""Time indexes and plain products over made SPLADE vectors: build, size, memory, latency, recall.

    python -m benchmarks.search --shape splade-100k

Timed: each engine in a process of its own that loads what was saved. The columns are the time to
load, the first query, the memory of that process beyond its modules, and the latency of one query
at a time. All queries run once before they are timed, by the wall clock and by the CPU time of the
process, which other programs on the machine change less. A slow engine has fewer queries (a column
has their number). Seismic's first query is cold in the first of its rows only.

Baseline: a product of scipy's sparse matrices, and an inverted index in numba.

Gate: the exact index is the truth, once its scores for some queries were compared with a sum over
all vectors in float64. Recall is the share of the exact ten best documents, in which tied documents
are equal. Exact engines must have recall 1 and the same scores, up to the order of summation.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.job import Job, JobCase, JobOptions, Row, main
from benchmarks.search_baselines import BASELINES
from benchmarks.search_data import make_documents, make_queries
from tilefold.bench.timing import in_fresh_process, resident_mib
from tilefold.retrieval import SparseVectors, build_index, load_index

# documents of a query
K = 10
SEED = 0
# queries of a run and of a quick one
QUERIES = 200
QUICK_QUERIES = 40
# an engine gets no more queries after this time, but at least a few
WARMUP_SECONDS = 10.0
FEWEST_QUERIES = 20
# queries that are compared with a sum over all vectors
SUMMED_QUERIES = 3
# relative rounding of Seismic's 16-bit weights
SEISMIC_ROUNDING = 1e-3
# relative difference of two sums of up to 64 products in float32
SUMMATION_ERROR = 2**-17
# Seismic's options of search, from the most accurate to the fastest
SEISMIC_SEARCHES: tuple[dict[str, Any], ...] = (
    {"query_cut": 20, "heap_factor": 0.7},
    {"query_cut": 10, "heap_factor": 0.8},
    {"query_cut": 5, "heap_factor": 0.9},
)
ENGINES = (*BASELINES, "seismic")
MIB = 2**20
# ids and scores of the best documents of a query, and of all queries
Hits = list[tuple[str, float]]
AllHits = list[Hits]


@dataclass(frozen=True)
class Measured:
    """Measurements of an engine in its process.

    Attributes:
        load_s: the seconds to load the index.
        first_ms: the milliseconds of the first query.
        resident_mib: the memory of the process beyond its modules, in MiB.
        wall_ms: the milliseconds of each query by the wall clock.
        cpu_ms: the milliseconds of each query by the CPU time of the process.
        hits: the best documents of each query.
    """

    load_s: float
    first_ms: float
    resident_mib: float
    wall_ms: Sequence[float]
    cpu_ms: Sequence[float]
    hits: AllHits


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Measure all engines on a number of documents.

    Args:
        case: the number of documents and the engines.
        options: the options of the command line.

    Yields:
        The rows. The exact index is first, since it gives the truth.
    """
    documents = make_documents(case.numbers["documents"], SEED)
    queries = make_queries(documents, QUICK_QUERIES if options.quick else QUERIES, SEED)
    collection_cells = {
        "documents": len(documents),
        "terms": len(documents.indices) / len(documents),
    }
    with tempfile.TemporaryDirectory(prefix="tilefold-search-") as name:
        exact_folder = Path(name) / "exact"
        exact_cells = build_and_save("exact", documents, exact_folder)
        (exact,) = in_fresh_process(measure, "exact", exact_folder, queries)
        truth = exact.hits
        exact_row = {
            **labels(collection_cells, "exact"),
            **exact_cells,
            **row("exact", exact, truth),
        }
        error = against_a_sum(documents, queries, truth)
        if error:
            exact_row["gate"] = error
        yield exact_row
        for engine in ENGINES:
            if options.impls is not None and engine not in options.impls:
                continue
            if engine == "seismic":
                seismic_folder = Path(name) / "seismic"
                yield from seismic_rows(collection_cells, documents, queries, seismic_folder, truth)
            elif find_spec(engine) is None:
                note = f"pip install {engine} to see it"
                yield {**labels(collection_cells, engine), "gate": "ok", "note": note}
            else:
                # a baseline reads the files of the exact index
                (measured,) = in_fresh_process(measure, engine, exact_folder, queries)
                yield {
                    **labels(collection_cells, engine),
                    "disk_mib": exact_cells["disk_mib"],
                    **row(engine, measured, truth),
                }


def labels(
    collection_cells: Mapping[str, object],
    engine: str,
    **options: Any,
) -> dict[str, object]:
    """Return the cells that identify a row.

    Args:
        collection_cells: cells of the collection.
        engine: the name of the engine.
        options: its options. Cells of other options are empty.
    """
    no_options = {"n_postings": "", "query_cut": "", "heap_factor": ""}
    return {**collection_cells, "engine": engine, **no_options, **options}


def seismic_rows(
    collection_cells: Mapping[str, object],
    documents: SparseVectors,
    queries: SparseVectors,
    folder: Path,
    truth: AllHits,
) -> Iterator[Row]:
    """Build Seismic with its own choices for the collection, and search it in several ways.

    Args:
        collection_cells: cells of the collection.
        documents: the documents.
        queries: the queries.
        folder: the folder for the index.
        truth: the hits of the exact index.

    Yields:
        A row for each way to search.
    """
    build_cells = build_and_save("seismic", documents, folder)
    n_postings = build_cells.pop("n_postings")
    measurements = in_fresh_process(measure, "seismic", folder, queries, SEISMIC_SEARCHES)
    for options, measured in zip(SEISMIC_SEARCHES, measurements, strict=True):
        yield {
            **labels(collection_cells, "seismic", n_postings=n_postings, **options),
            **build_cells,
            **row("seismic", measured, truth),
        }


def build_and_save(engine: str, documents: SparseVectors, folder: Path) -> dict[str, float]:
    """Build an index and save it.

    Args:
        engine: name of the engine.
        documents: vectors of the documents.
        folder: folder for the index, which is replaced.

    Returns:
        Cells: seconds of both by the wall clock and of the CPU, MiB on disk, and for Seismic the
        number of postings that it chose.
    """
    wall_start = time.perf_counter()
    cpu_start = time.process_time()
    index: Any = build_index(documents, engine)
    index.save(folder, overwrite=True)
    wall_seconds = time.perf_counter() - wall_start
    cpu_seconds = time.process_time() - cpu_start
    n_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    cells = {"build_s": wall_seconds, "build_cpu_s": cpu_seconds, "disk_mib": n_bytes / MIB}
    if engine == "seismic":
        cells["n_postings"] = index.options.n_postings
    return cells


def measure(
    engine: str,
    folder: Path,
    queries: SparseVectors,
    searches: Sequence[dict[str, Any]] = ({},),
) -> list[Measured]:
    """Load an engine and time its queries.

    Args:
        engine: the name of the engine.
        folder: its files.
        queries: the queries.
        searches: the options of search, for each of which all queries are timed.

    Returns:
        The measurements for each of the options.
    """
    memory_before = resident_mib()
    start = time.perf_counter()
    search = load_engine(engine, folder, queries)
    load_seconds = time.perf_counter() - start
    measurements = []
    for options in searches:
        search_with_options = partial(search, **options)
        first_ms, n_queries = warm_up(search_with_options, len(queries))
        wall_ms, cpu_ms, hits = time_queries(search_with_options, n_queries)
        measurements.append(
            Measured(
                load_s=load_seconds,
                first_ms=first_ms,
                resident_mib=resident_mib() - memory_before,
                wall_ms=wall_ms,
                cpu_ms=cpu_ms,
                hits=hits,
            ),
        )
    return measurements


def warm_up(search: Callable[[int], Hits], n_queries: int) -> tuple[float, int]:
    """Search with every query once, as far as there is time.

    Args:
        search: a function that returns the hits of a query by its position.
        n_queries: the number of queries.

    Returns:
        Milliseconds of the first query, and the number of queries that there was time for.
    """
    start = time.perf_counter()
    search(0)
    first_ms = 1e3 * (time.perf_counter() - start)
    count = 1
    while count < n_queries:
        is_late = time.perf_counter() - start >= WARMUP_SECONDS
        if is_late and count >= FEWEST_QUERIES:
            break
        search(count)
        count += 1
    return first_ms, count


def time_queries(
    search: Callable[[int], Hits],
    n_queries: int,
) -> tuple[list[float], list[float], AllHits]:
    """Time queries one by one.

    Args:
        search: a function that returns the hits of a query by its position.
        n_queries: the number of queries.

    Returns:
        For each query, milliseconds by the wall clock, milliseconds of the CPU, and hits.
    """
    wall_ms, cpu_ms, all_hits = [], [], []
    for position in range(n_queries):
        wall_start = time.perf_counter()
        cpu_start = time.process_time()
        hits = search(position)
        cpu_ms.append(1e3 * (time.process_time() - cpu_start))
        wall_ms.append(1e3 * (time.perf_counter() - wall_start))
        all_hits.append(hits)
    return wall_ms, cpu_ms, all_hits


def load_engine(engine: str, folder: Path, queries: SparseVectors) -> Callable[..., Hits]:
    """Load an engine, and return a function that searches with one of the queries.

    Args:
        engine: the name of the engine.
        folder: its files.
        queries: the queries.

    Returns:
        A function of the position of a query and, for engines of tilefold, of options of the
        search.
    """
    if engine in BASELINES:
        search_baseline = BASELINES[engine](folder)

        def search(position: int) -> Hits:
            terms, weights = queries.row(position)
            return [
                (f"d{document}", score) for document, score in search_baseline(terms, weights, K)
            ]

        return search
    index: Any = load_index(folder)
    singles = [queries.take([position]) for position in range(len(queries))]

    def search_index(position: int, **options: Any) -> Hits:
        (hits,) = index.search(singles[position], K, **options)
        return [(hit.id, hit.score) for hit in hits]

    return search_index


def row(engine: str, measured: Measured, truth: AllHits) -> dict[str, object]:
    """Return the cells of an engine: percentiles of its latency, recall, and whether it is exact.

    Args:
        engine: the name of the engine. Seismic is approximate, and is not checked.
        measured: its measurements.
        truth: the hits of the exact index.
    """
    expected = truth[: len(measured.hits)]
    recall_at_10 = recall(expected, measured.hits)
    p20_ms, p50_ms, p80_ms, p99_ms = np.percentile(measured.wall_ms, [20, 50, 80, 99]).tolist()
    gate = "ok"
    if engine != "seismic":
        gate = check_exact(expected, measured.hits, recall_at_10)
    return {
        "queries": len(measured.hits),
        "load_s": measured.load_s,
        "first_ms": measured.first_ms,
        "resident_mib": measured.resident_mib,
        "p20_ms": p20_ms,
        "p50_ms": p50_ms,
        "p80_ms": p80_ms,
        "p99_ms": p99_ms,
        "p50_cpu_ms": statistics.median(measured.cpu_ms),
        "recall_at_10": recall_at_10,
        "gate": gate,
    }


def check_exact(expected: AllHits, actual: AllHits, recall_at_10: float) -> str:
    """Check that an exact search returned all best documents, with their scores.

    Args:
        expected: hits of the exact index, for each query.
        actual: hits of the engine.
        recall_at_10: recall of the expected hits.

    Returns:
        ``"ok"``, or the difference.
    """
    if recall_at_10 < 1.0:
        return f"recall {recall_at_10:.4f} of an exact search"
    largest_error = 0.0
    for expected_hits, hits in zip(expected, actual, strict=True):
        for (_, expected_score), (_, score) in zip(expected_hits, hits, strict=True):
            error = abs(expected_score - score) / expected_score
            largest_error = max(largest_error, error)
    if largest_error <= SUMMATION_ERROR:
        return "ok"
    return f"scores differ by {largest_error:.1e} of their size"


def against_a_sum(documents: SparseVectors, queries: SparseVectors, truth: AllHits) -> str:
    """Compare the first queries of the truth with products of all vectors in float64.

    Args:
        documents: the documents.
        queries: the queries.
        truth: the hits of the exact index.

    Returns:
        The difference, or ``""`` if there is none.
    """
    summed: AllHits = []
    for position in range(min(SUMMED_QUERIES, len(queries))):
        terms, values = queries.row(position)
        query_weights = np.zeros(queries.vocab_size)
        query_weights[terms] = values
        # the score of a document is the difference of the running sum at its ends
        products = query_weights[documents.indices] * documents.data
        running_sum = np.concatenate([np.zeros(1), np.cumsum(products)])
        scores = np.diff(running_sum[documents.indptr])
        best = np.lexsort((np.arange(len(scores)), -scores))[:K]
        summed.append([(documents.ids[i], float(scores[i])) for i in best])
    indexed = truth[: len(summed)]
    gate = check_exact(summed, indexed, recall(summed, indexed))
    return "" if gate == "ok" else f"compared with a sum over all vectors: {gate}"


def recall(truth: AllHits, actual: AllHits) -> float:
    """Return the mean share of the best documents that were found.

    A document that is not among them counts if its score is at least that of the last of them, up
    to the rounding of 16-bit weights: tied documents are equal.

    Args:
        truth: the best documents of each query.
        actual: the hits of each query.
    """
    shares = []
    for best, hits in zip(truth, actual, strict=True):
        _, last_score = best[-1]
        lowest_score = last_score * (1 - SEISMIC_ROUNDING)
        names = {name for name, _ in best}
        n_found = sum(name in names or score >= lowest_score for name, score in hits)
        shares.append(n_found / len(best))
    return statistics.mean(shares)


JOB = Job(
    name="search",
    cases=(
        JobCase("splade-1k", ("cpu",), quick=True, numbers={"documents": 1_000}),
        JobCase("splade-10k", ("cpu",), quick=True, numbers={"documents": 10_000}),
        JobCase("splade-100k", ("cpu",), numbers={"documents": 100_000}),
        JobCase("splade-1m", ("cpu",), numbers={"documents": 1_000_000}),
    ),
    key=("engine", "documents", "query_cut", "heap_factor"),
    shown=(
        "engine",
        "query_cut",
        "heap_factor",
        "build_s",
        "disk_mib",
        "load_s",
        "first_ms",
        "resident_mib",
        "p50_ms",
        "p99_ms",
        "p50_cpu_ms",
        "recall_at_10",
        "gate",
    ),
    run=run,
)

if __name__ == "__main__":
    sys.exit(main(JOB, __doc__))
