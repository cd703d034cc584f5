"""Indexes and plain products over made SPLADE vectors: build, size, memory, latency, recall (`tilefold bench search`).

Every engine is built, saved, and measured in a process of its own that loads it: the time to load, what that process
holds beyond its modules, and the latency of one query at a time, after all have been asked once, by the wall clock and
by the CPU time of the process, which other programs on the machine change less. Recall is the share of the exact ten
best documents, ties counted for either; the gate asks 1 of what is exact.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from tilefold.bench.jobs import Job, JobCase, JobOptions, Row
from tilefold.bench.search.baselines import BASELINES, save_postings
from tilefold.bench.search.inputs import made_documents, made_queries
from tilefold.bench.timing import resident_mib
from tilefold.retrieval import SparseVectors, build_index, load_index

K = 10
SEED = 0
ROUNDING = 1e-3  # of Seismic's 16-bit weights
HEAP_FACTORS = (0.7, 0.9)
Found = list[list[tuple[str, float]]]  # ids and scores of each query's best documents


@dataclass(frozen=True)
class Measured:
    """What one engine took in its process: its load, memory beyond that of the modules, and latencies."""

    load_s: float
    resident_mib: float
    wall_ms: Sequence[float]
    cpu_ms: Sequence[float]
    found: Found


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Rows of one number of documents: exact search first, which gives the truth."""
    documents = made_documents(case.numbers["documents"], SEED)
    queries = made_queries(documents, 40 if options.quick else 200, SEED)
    shape = {"documents": len(documents), "terms": len(documents.indices) / len(documents), "queries": len(queries)}
    truth: Found | None = None
    for engine in ("exact", "seismic", "scipy", "numba"):
        if engine != "exact" and options.impls is not None and engine not in options.impls:
            continue
        if engine in BASELINES and find_spec(engine) is None:
            yield shape | {"engine": engine, "heap_factor": "", "gate": "ok", "note": f"pip install {engine} to see it"}
            continue
        with tempfile.TemporaryDirectory(prefix="tilefold-search-") as name:
            folder = Path(name) / "index"
            facts = built(engine, documents, folder)
            for factor in HEAP_FACTORS if engine == "seismic" else ("",):
                measured = in_a_process(engine, folder, queries, {"heap_factor": factor} if factor else {})
                truth = measured.found if truth is None else truth
                yield shape | {"engine": engine, "heap_factor": factor} | facts | row(engine, measured, truth)


def built(engine: str, documents: SparseVectors, folder: Path) -> dict[str, float]:
    """Build and save; the seconds of both and the MiB on disk."""
    wall, cpu = time.perf_counter(), time.process_time()
    if engine in BASELINES:
        folder.mkdir()
        save_postings(documents, folder)
    else:
        build_index(documents, engine).save(folder)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"build_s": wall, "build_cpu_s": cpu, "disk_mib": size / 2**20}


def in_a_process(engine: str, folder: Path, queries: SparseVectors, options: dict[str, Any]) -> Measured:
    """``measure`` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, engine, folder, queries, options).result()


def measure(engine: str, folder: Path, queries: SparseVectors, options: dict[str, Any]) -> Measured:
    """Load the engine and ask it every query, twice; the second time counts."""
    before, begin = resident_mib(), time.perf_counter()
    ask = asker(engine, folder, queries, options)
    load = time.perf_counter() - begin
    wall, cpu, found = [], [], []
    for repeat in range(2):
        for at in range(len(queries)):
            begin, used = time.perf_counter(), time.process_time()
            best = ask(at)
            if repeat:
                cpu.append(1e3 * (time.process_time() - used))
                wall.append(1e3 * (time.perf_counter() - begin))
                found.append(best)
    return Measured(load, resident_mib() - before, wall, cpu, found)


def asker(
    engine: str, folder: Path, queries: SparseVectors, options: dict[str, Any]
) -> Callable[[int], list[tuple[str, float]]]:
    """A function that answers query number `at`."""
    if engine in BASELINES:
        search = BASELINES[engine](folder)

        def answer(at: int) -> list[tuple[str, float]]:
            terms, weights = queries.row(at)
            return [(f"d{i}", score) for i, score in search(terms, weights, K)]

        return answer
    index: Any = load_index(folder)
    singles = [queries.take([at]) for at in range(len(queries))]
    return lambda at: [(hit.id, hit.score) for hit in index.search(singles[at], K, **options)[0]]


def row(engine: str, measured: Measured, truth: Found) -> dict[str, object]:
    """Quantiles, recall, and the gate."""
    share = recall(truth, measured.found)
    exact = engine != "seismic"
    wall = np.percentile(measured.wall_ms, [20, 50, 80, 99])
    return {
        "load_s": measured.load_s,
        "resident_mib": measured.resident_mib,
        **dict(zip(("p20_ms", "p50_ms", "p80_ms", "p99_ms"), map(float, wall), strict=True)),
        "p50_cpu_ms": statistics.median(measured.cpu_ms),
        "recall_at_10": share,
        "gate": "ok" if share == 1.0 or not exact else f"recall {share:.4f} of an exact search",
    }


def recall(truth: Found, found: Found) -> float:
    """Mean share of what was found that scores at least as the last of the truth, to the rounding of 16-bit weights."""
    shares = []
    for best, hits in zip(truth, found, strict=True):
        floor = best[-1][1] * (1 - ROUNDING)
        names = {name for name, _ in best}
        shares.append(sum(name in names or score >= floor for name, score in hits) / len(best))
    return statistics.mean(shares)


JOB = Job(
    "search",
    (
        JobCase("made-1k", ("cpu",), quick=True, numbers={"documents": 1_000}),
        JobCase("made-10k", ("cpu",), quick=True, numbers={"documents": 10_000}),
        JobCase("made-100k", ("cpu",), numbers={"documents": 100_000}),
        JobCase("made-1m", ("cpu",), numbers={"documents": 1_000_000}),
    ),
    ("engine", "documents", "heap_factor"),
    ("engine", "heap_factor", "build_s", "disk_mib", "load_s", "resident_mib", "p50_ms", "p99_ms", "p50_cpu_ms",
     "recall_at_10", "gate"),
    run,
)  # fmt: skip
