"""Indexes and plain products over made SPLADE vectors: build, size, memory, latency, recall.

Every engine is measured in a process of its own that loads what was saved: the time to load, the
first query, what that process holds beyond its modules, and the latency of one query at a time,
after all have been asked once, by the wall clock and by the CPU time of the process, which other
programs on the machine change less. An engine that is slow is asked fewer queries (the column says
how many). Seismic's first query is cold in the first of its rows only.

The exact index is the truth, once its scores for some queries were compared with a sum over all
vectors in float64. Recall is the share of the exact ten best documents, ties counted for either;
the gate asks 1 of what is exact, and the same scores, but for the order of summation.
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
from benchmarks.search_data import made_documents, made_queries
from tilefold.bench.timing import in_fresh_process, resident_mib
from tilefold.retrieval import SparseVectors, build_index, load_index

K = 10
SEED = 0
QUERIES, QUICK_QUERIES, FEWEST = 200, 40, 20
SECONDS = 10.0  # for all queries of an engine, asked once
SUMMED = 3  # queries that are compared with a sum over all vectors
ROUNDING = 1e-3  # of Seismic's 16-bit weights
SUMMATION = 2**-17  # two sums of up to 64 products in float32
SEARCHES: tuple[dict[str, Any], ...] = (
    {"query_cut": 20, "heap_factor": 0.7},
    {"query_cut": 10, "heap_factor": 0.8},
    {"query_cut": 5, "heap_factor": 0.9},
)
Found = list[list[tuple[str, float]]]  # ids and scores of each query's best documents


@dataclass(frozen=True)
class Measured:
    """Measurements of one engine in its process: its load, memory beyond that of the modules, and
    latencies.
    """

    load_s: float
    first_ms: float
    resident_mib: float
    wall_ms: Sequence[float]
    cpu_ms: Sequence[float]
    found: Found


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Rows of one number of documents: exact search first, which gives the truth."""
    documents = made_documents(case.numbers["documents"], SEED)
    queries = made_queries(documents, QUICK_QUERIES if options.quick else QUERIES, SEED)
    shape = {"documents": len(documents), "terms": len(documents.indices) / len(documents)}
    wanted = [
        name
        for name in ("scipy", "numba", "seismic")
        if options.impls is None or name in options.impls
    ]
    with tempfile.TemporaryDirectory(prefix="tilefold-search-") as name:
        folder = Path(name) / "exact"
        facts = built("exact", documents, folder)
        (measured,) = in_fresh_process(measure, "exact", folder, queries)
        truth = measured.found
        wrong = against_a_sum(documents, queries, truth)
        yield (
            labels(shape, "exact")
            | facts
            | row("exact", measured, truth)
            | ({"gate": wrong} if wrong else {})
        )
        for engine in wanted:
            if engine in BASELINES and find_spec(engine) is None:
                yield labels(shape, engine) | {
                    "gate": "ok",
                    "note": f"pip install {engine} to see it",
                }
            elif engine in BASELINES:
                (measured,) = in_fresh_process(measure, engine, folder, queries)
                yield (
                    labels(shape, engine)
                    | {"disk_mib": facts["disk_mib"]}
                    | row(engine, measured, truth)
                )
            else:
                yield from seismic_rows(shape, documents, queries, Path(name) / "seismic", truth)


def labels(shape: Mapping[str, object], engine: str, **options: Any) -> dict[str, object]:
    """The columns that name a row."""
    return {
        **shape,
        "engine": engine,
        **dict.fromkeys(("n_postings", "query_cut", "heap_factor"), ""),
        **options,
    }


def seismic_rows(
    shape: Mapping[str, object],
    documents: SparseVectors,
    queries: SparseVectors,
    folder: Path,
    truth: Found,
) -> Iterator[Row]:
    """Seismic, built with what it chooses for the collection and searched in several ways."""
    facts = built("seismic", documents, folder)
    n_postings = facts.pop("n_postings")
    for options, measured in zip(
        SEARCHES,
        in_fresh_process(measure, "seismic", folder, queries, SEARCHES),
        strict=True,
    ):
        named = labels(shape, "seismic", n_postings=n_postings, **options)
        yield named | facts | row("seismic", measured, truth)


def built(engine: str, documents: SparseVectors, folder: Path) -> dict[str, float]:
    """Build and save; the seconds of both and the MiB on disk."""
    wall, cpu = time.perf_counter(), time.process_time()
    index: Any = build_index(documents, engine)
    index.save(folder, overwrite=True)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    facts = {"build_s": wall, "build_cpu_s": cpu, "disk_mib": size / 2**20}
    return facts | ({"n_postings": index.options.n_postings} if engine == "seismic" else {})


def measure(
    engine: str,
    folder: Path,
    queries: SparseVectors,
    searches: Sequence[dict[str, Any]] = ({},),
) -> list[Measured]:
    """Load the engine and ask it in each of these ways."""
    before, begin = resident_mib(), time.perf_counter()
    answer = asker(engine, folder, queries)
    load = time.perf_counter() - begin
    measured = []
    for options in searches:
        first, wall, cpu, found = asked_twice(partial(answer, **options), len(queries))
        measured.append(Measured(load, first, resident_mib() - before, wall, cpu, found))
    return measured


def asked_twice(
    ask: Callable[[int], list[tuple[str, float]]],
    most: int,
) -> tuple[float, list[float], list[float], Found]:
    """Milliseconds of the first query, wall and CPU milliseconds and answers of each, when all are
    asked again.

    They are `most` queries, or as many as there is time for.
    """
    begin, count = time.perf_counter(), 0
    while count < most and (count < FEWEST or time.perf_counter() - begin < SECONDS):
        ask(count)
        count += 1
        if count == 1:
            first = 1e3 * (time.perf_counter() - begin)
    wall, cpu, found = [], [], []
    for at in range(count):
        begin, used = time.perf_counter(), time.process_time()
        found.append(ask(at))
        cpu.append(1e3 * (time.process_time() - used))
        wall.append(1e3 * (time.perf_counter() - begin))
    return first, wall, cpu, found


def asker(
    engine: str,
    folder: Path,
    queries: SparseVectors,
) -> Callable[..., list[tuple[str, float]]]:
    """A function that answers query number `at`."""
    if engine in BASELINES:
        search = BASELINES[engine](folder)

        def answer(at: int) -> list[tuple[str, float]]:
            terms, weights = queries.row(at)
            return [(f"d{i}", score) for i, score in search(terms, weights, K)]

        return answer
    index: Any = load_index(folder)
    singles = [queries.take([at]) for at in range(len(queries))]
    return lambda at, **options: [
        (hit.id, hit.score) for hit in index.search(singles[at], K, **options)[0]
    ]


def row(engine: str, measured: Measured, truth: Found) -> dict[str, object]:
    """Quantiles, recall, and the gate."""
    asked = truth[: len(measured.found)]
    share = recall(asked, measured.found)
    wall = np.percentile(measured.wall_ms, [20, 50, 80, 99])
    return {
        "queries": len(measured.found),
        "load_s": measured.load_s,
        "first_ms": measured.first_ms,
        "resident_mib": measured.resident_mib,
        **dict(zip(("p20_ms", "p50_ms", "p80_ms", "p99_ms"), map(float, wall), strict=True)),
        "p50_cpu_ms": statistics.median(measured.cpu_ms),
        "recall_at_10": share,
        "gate": "ok" if engine == "seismic" else exactness(asked, measured.found, share),
    }


def exactness(truth: Found, found: Found, share: float) -> str:
    """The gate of what is exact: all of the best documents, with their scores."""
    if share < 1.0:
        return f"recall {share:.4f} of an exact search"
    pairs = [
        (a, b)
        for best, hits in zip(truth, found, strict=True)
        for (_, a), (_, b) in zip(best, hits, strict=True)
    ]
    off = max(abs(a - b) / a for a, b in pairs)
    return "ok" if off <= SUMMATION else f"scores differ by {off:.1e} of their size"


def against_a_sum(documents: SparseVectors, queries: SparseVectors, truth: Found) -> str:
    """Errors in the first answers of the truth, by products of all vectors in float64; empty if
    there are none.
    """
    found: Found = []
    for at in range(min(SUMMED, len(queries))):
        terms, values = queries.row(at)
        weights = np.zeros(queries.vocab_size)
        weights[terms] = values
        sums = np.concatenate([np.zeros(1), np.cumsum(weights[documents.indices] * documents.data)])
        scores = np.diff(sums[documents.indptr])
        best = np.lexsort((np.arange(len(scores)), -scores))[:K]
        found.append([(documents.ids[i], float(scores[i])) for i in best])
    asked = truth[: len(found)]
    gate = exactness(found, asked, recall(found, asked))
    return "" if gate == "ok" else f"beside a sum over all vectors: {gate}"


def recall(truth: Found, found: Found) -> float:
    """Mean share of what was found that scores at least as the last of the truth, to the rounding
    of 16-bit weights.
    """
    shares = []
    for best, hits in zip(truth, found, strict=True):
        floor = best[-1][1] * (1 - ROUNDING)
        names = {name for name, _ in best}
        shares.append(sum(name in names or score >= floor for name, score in hits) / len(best))
    return statistics.mean(shares)


JOB = Job(
    "search",
    (
        JobCase("splade-1k", ("cpu",), quick=True, numbers={"documents": 1_000}),
        JobCase("splade-10k", ("cpu",), quick=True, numbers={"documents": 10_000}),
        JobCase("splade-100k", ("cpu",), numbers={"documents": 100_000}),
        JobCase("splade-1m", ("cpu",), numbers={"documents": 1_000_000}),
    ),
    ("engine", "documents", "query_cut", "heap_factor"),
    (
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
    run,
)

if __name__ == "__main__":
    sys.exit(main(JOB, __doc__))
