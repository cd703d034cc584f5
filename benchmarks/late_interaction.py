"""Late interaction over a collection of real passages on a CPU: build, size, memory, latency,
recall and nDCG.

    tilefold train --recipe colbert --data DATA --output MODEL
    tilefold encode --model MODEL --data DATA --passages 48 --output TOKENS
    python -m benchmarks.late_interaction --tokens TOKENS --model MODEL --data DATA

An index is built in a process of its own for each storage; its peak is that of the process, less
what it held before, and less the files, which are mapped. Then one query at a time is asked: every
document, candidates of the centroids, or those of BM25 over the same passages. Recall is the share
of the ten best of all documents of the same index; nDCG@10 is of documents by their best passage.
Times are medians over the queries, of the wall clock and of the CPU, which other programs on the
machine change less.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tilefold import retrieval as r
from tilefold.bench.results import collect, results_file, write_csv
from tilefold.bench.timing import in_fresh_process, resident_mib
from tilefold.retrieval.passages import document_of

CSV_KEY = ("passages", "storage", "pool_factor", "candidates")
Hits = Sequence[tuple[str, float]]


def built(
    tokens: Path,
    folder: Path,
    storage: str,
    pool_factor: int,
    threads: int,
) -> dict[str, object]:
    """Build an index; seconds, MiB of its vectors, MiB of memory above them, and what it chose."""
    torch.set_num_threads(threads)
    before, wall, cpu = resident_mib(), time.perf_counter(), time.process_time()
    index = r.LateIndex.build(
        r.open_tokens(tokens),
        folder,
        storage=storage,
        pool_factor=pool_factor,
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size, peak = (
        index.files.nbytes / 2**20,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    facts = {
        "build_s": wall,
        "build_cpu_s": cpu,
        "vectors_mib": size,
        "above_mib": peak - before - size,
    }
    return facts | {"told_candidates": index.n_candidates, "told_recall": index.recall}


def asked(ask: Callable[[int], Hits], count: int) -> tuple[list[Hits], float, float]:
    """Answers, and the medians of wall and CPU milliseconds, when all were asked once before."""
    found: list[Hits] = []
    for again in (False, True):
        walls, cpus, found = [], [], []
        for at in range(count):
            wall, cpu = time.perf_counter(), time.process_time()
            found.append(ask(at))
            walls.append(1e3 * (time.perf_counter() - wall))
            cpus.append(1e3 * (time.process_time() - cpu))
        if not again and statistics.median(walls) > 500:
            break
    return found, statistics.median(walls), statistics.median(cpus)


def searched(index: Any, singles: Sequence[Any], candidates: int | None, at: int) -> Hits:
    """The best passages of query number `at`."""
    hits: Hits = index.search(singles[at], 20, candidates=candidates)[0]
    return hits


def by_document(hits: Hits) -> dict[str, float]:
    """Documents by their best passage."""
    best: dict[str, float] = {}
    for name, score in hits:
        best.setdefault(document_of(name), score)
    return best


def measure(options: argparse.Namespace, storage: str, pool_factor: int) -> list[dict[str, object]]:
    """Rows of one index."""
    from sentence_transformers import MultiVectorEncoder

    collection = r.load_collection(options.data)
    texts = collection.split_queries("test")
    chosen = dict(list(texts.items())[:: max(1, len(texts) // options.queries)])
    queries = r.encode_texts(MultiVectorEncoder(options.model, device="cpu"), chosen, kind="query")
    singles = [queries.take([at]) for at in range(len(queries))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "index"
        facts = in_fresh_process(
            built,
            options.tokens,
            folder,
            storage,
            pool_factor,
            options.threads,
        )
        torch.set_num_threads(options.threads)
        index = r.LateIndex.load(folder)
        shape = {"passages": index.n_documents, "tokens": index.files.n_tokens, "storage": storage}
        ways: dict[str, Callable[[int], Hits]] = {
            "all": functools.partial(searched, index, singles, 0),
        }
        for count in options.candidates:
            ways[str(count)] = functools.partial(searched, index, singles, count)
        ways[f"{index.n_candidates}, default"] = functools.partial(searched, index, singles, None)
        if options.bm25 and storage == "int8" and pool_factor == 1:
            ways["1000 of BM25"] = by_words(
                options,
                collection,
                index,
                singles,
                list(chosen.values()),
            )
        rows: list[dict[str, object]] = []
        truth: list[set[str]] = []
        for way, ask in ways.items():
            found, wall, cpu = asked(ask, len(singles))
            truth = truth or [{name for name, _ in hits[:10]} for hits in found]
            shares = [
                len(best & {name for name, _ in hits[:10]}) / 10
                for best, hits in zip(truth, found, strict=True)
            ]
            run = {query: by_document(hits) for query, hits in zip(queries.ids, found, strict=True)}
            judged = {
                query: row for query, row in collection.split_qrels("test").items() if query in run
            }
            row = shape | {"pool_factor": pool_factor, "candidates": way, "queries": len(singles)}
            row |= {"p50_ms": wall, "p50_cpu_ms": cpu, "recall_at_10": statistics.fmean(shares)}
            rows.append(
                row | r.evaluate(run, judged, ["nDCG@10"]) | facts | {"threads": options.threads},
            )
            print(
                " ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in rows[-1].values()),
                flush=True,
            )
        return rows


def by_words(
    options: argparse.Namespace,
    collection: r.Collection,
    index: Any,
    singles: Sequence[Any],
    queries: Sequence[str],
) -> Callable[[int], Hits]:
    """A search whose candidates are those of BM25 over the same passages, scored in the same index."""
    cut = r.Passages.parse(str(index.provenance.passages))
    held = {name: row for row, name in enumerate(index.ids)}
    passages = cut.of(collection.documents)
    words = r.BM25Index.build(
        {name: passages[name] for name in passages if name in held},
        identifiers=True,
    )

    def ask(at: int) -> Hits:
        allowed = torch.zeros(len(held), dtype=torch.bool).numpy()
        allowed[[held[name] for name in words.search({"q": queries[at]}, 1000)["q"]]] = True
        hits: Hits = index.search(singles[at], 20, allowed=allowed)[0]
        return hits

    return ask


def main(argv: Sequence[str]) -> int:
    """Measure every index; print and save the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tokens",
        type=Path,
        required=True,
        help="folder of tilefold encode, of passages",
    )
    parser.add_argument("--model", required=True, help="the MultiVectorEncoder that made them")
    parser.add_argument("--data", required=True, help="BEIR folder with a test split")
    parser.add_argument(
        "--index",
        action="append",
        help="storage, or storage/pool_factor; may be repeated",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        action="append",
        help="of the centroids; may be repeated",
    )
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bm25", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    options.candidates = options.candidates or [250, 500, 1000, 2000]
    provenance = collect(torch.device("cpu"))
    file = results_file(options.output, "late_interaction", provenance)
    for each in options.index or ["int8", "fp16", "int4", "int8/2"]:
        storage, _, pool_factor = each.partition("/")
        write_csv(file, measure(options, storage, int(pool_factor or 1)), provenance, CSV_KEY)
    print(f"wrote {file}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
