"""Exact and Seismic indexes of made vectors with the statistics of SPLADE: build time, size, latency and recall.

::

    python -m benchmarks.search_engines --documents 10000 --documents 50000

A document has about 120 terms of 30,522, half of them from one Zipf distribution, half from one of 400 topics; a query
has 30, of which 20 are among the heaviest of one document. Latencies are those of one query at a time, after all have
been asked once: the wall clock, and the CPU time of the process, which other programs on the machine change less.
Recall is the share of the exact ten best documents, ties counted for either. Made topics are harder for Seismic than
real texts. With several ``--heap-factor``, one build is searched with each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilefold.bench.provenance import collect
from tilefold.bench.results import RESULTS, results_file, write_csv
from tilefold.retrieval import SparseVectors, build_index
from tilefold.retrieval.index.protocol import Hit

VOCABULARY, TERMS, TOPICS, TOPIC_TERMS = 30_522, 120, 400, 1_500
QUERY_TERMS, FROM_DOCUMENT, K = 30, 20, 10
FINGERPRINT = "0" * 64
ENGINES = ("exact", "seismic")


def main() -> None:
    """Parse arguments, measure, print, and merge into the results after every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, action="append", help="may be repeated; 10,000 by default")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--heap-factor", type=float, action="append", help="of Seismic; 0.7 by default")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="may be repeated; both by default")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of results")
    options = parser.parse_args()
    provenance = collect(torch.device("cpu"))
    path = results_file(options.output, "search_engines", provenance)
    for count in options.documents or [10_000]:
        for row in measure(count, options.queries, options.heap_factor or [0.7], options.engine or ENGINES):
            print(
                ", ".join(
                    f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in row.items()
                )
            )
            write_csv(path, [row], provenance, ("engine", "documents", "heap_factor"))


def measure(
    count: int, queries: int, heap_factors: Sequence[float], engines: Sequence[str] = ENGINES
) -> Iterator[dict[str, Any]]:
    """The rows of one number of documents: of exact search always, which gives the truth, then of Seismic."""
    rng = np.random.default_rng(count)
    documents = made_documents(count, rng)
    asked = made_queries(documents, queries, rng)
    shape = {"documents": count, "terms": len(documents.indices) / count, "queries": queries}
    exact, facts = built(documents, "exact")
    truth, times = searched(exact, asked, {})
    yield shape | {"engine": "exact", "heap_factor": ""} | facts | times | {"recall_at_10": 1.0}
    if "seismic" not in engines:
        return
    seismic, facts = built(documents, "seismic")
    for factor in heap_factors:
        found, times = searched(seismic, asked, {"heap_factor": factor})
        share = recall(truth, found)
        yield shape | {"engine": "seismic", "heap_factor": factor} | facts | times | {"recall_at_10": share}


def made_documents(count: int, rng: np.random.Generator) -> SparseVectors:
    """`count` vectors of about 120 terms; a repeated term counts once."""
    half = TERMS // 2
    names = rng.permutation(VOCABULARY)
    topics = np.stack([rng.permutation(VOCABULARY)[:TOPIC_TERMS] for _ in range(TOPICS)])
    common = names[zipf(VOCABULARY, (count, half), rng)]
    own = topics[rng.integers(TOPICS, size=(count, 1)), zipf(TOPIC_TERMS, (count, half), rng)]
    terms = np.concatenate([own, common], axis=1).astype(np.int64)
    weights = np.log1p(rng.exponential(1.0, terms.shape)).astype(np.float32)
    weights[:, :half] *= 1.5
    flat, first = np.unique((np.arange(count)[:, None] * VOCABULARY + terms).ravel(), return_index=True)
    indptr = np.searchsorted(flat, np.arange(count + 1) * VOCABULARY)
    ids = [f"d{i}" for i in range(count)]
    return SparseVectors(
        ids, indptr, (flat % VOCABULARY).astype(np.int32), weights.ravel()[first], VOCABULARY, FINGERPRINT
    )


def made_queries(documents: SparseVectors, count: int, rng: np.random.Generator) -> SparseVectors:
    """Vectors of up to 30 terms, 20 of them among the 40 heaviest of a document."""
    rows: dict[str, dict[int, float]] = {}
    for at, document in enumerate(rng.integers(len(documents.ids), size=count)):
        terms, weights = documents.row(int(document))
        heavy = rng.permutation(terms[np.argsort(-weights)[: 2 * FROM_DOCUMENT]])[:FROM_DOCUMENT]
        other = rng.integers(VOCABULARY, size=QUERY_TERMS - FROM_DOCUMENT)
        values = np.log1p(rng.exponential(1.0, QUERY_TERMS)).tolist()
        rows[f"q{at}"] = dict(zip([*heavy.tolist(), *other.tolist()], values, strict=False))
    return SparseVectors.from_rows(rows, VOCABULARY, FINGERPRINT)


def zipf(size: int, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Ranks from 0, with probabilities that fall as 1 / (rank + 10)."""
    mass = np.cumsum(1 / (np.arange(size) + 10))
    ranks: npt.NDArray[np.int64] = np.minimum(np.searchsorted(mass, rng.random(shape) * mass[-1]), size - 1)
    return ranks


def built(documents: SparseVectors, backend: str) -> tuple[Any, dict[str, float]]:
    """An index, its time to build, and its size when it is saved."""
    wall, cpu = time.perf_counter(), time.process_time()
    index = build_index(documents, backend)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / "index")
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return index, {"build_s": wall, "build_cpu_s": cpu, "disk_mib": size / 2**20}


def searched(index: Any, queries: SparseVectors, options: dict[str, Any]) -> tuple[list[list[Hit]], dict[str, float]]:
    """The ten best of each query, and quantiles of the milliseconds of one."""
    singles = [queries.take([at]) for at in range(len(queries))]
    hits, wall, cpu = [], [], []
    for repeat in range(2):
        for single in singles:
            begin, used = time.perf_counter(), time.process_time()
            (found,) = index.search(single, K, **options)
            if repeat:
                cpu.append(1e3 * (time.process_time() - used))
                wall.append(1e3 * (time.perf_counter() - begin))
                hits.append(found)
    p20, *_, p80 = statistics.quantiles(wall, n=5)
    times = {"p20_ms": p20, "p50_ms": statistics.median(wall), "p80_ms": p80, "p50_cpu_ms": statistics.median(cpu)}
    return hits, times


def recall(truth: list[list[Hit]], found: list[list[Hit]]) -> float:
    """Mean share of what was found that scores at least as the last of the truth, to the rounding of 16-bit weights."""
    shares = []
    for best, hits in zip(truth, found, strict=True):
        floor = best[-1].score * (1 - 1e-3)
        names = {hit.id for hit in best}
        shares.append(sum(hit.id in names or hit.score >= floor for hit in hits) / len(best))
    return statistics.mean(shares)


if __name__ == "__main__":
    main()
