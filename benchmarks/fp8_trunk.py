"""Compare nDCG@10 of a model whose trunk multiplies in bf16 and in fp8.

    python -m benchmarks.fp8_trunk --data scifact=PATH --model minilm --output benchmarks/results

Measured: nDCG@10 of each query of the evaluation split, with documents in fp8 and queries in bf16,
as of ``tilefold encode --fp8``. The row has the mean difference and its standard error over the
queries. A CPU multiplies the same rounded numbers as a GPU, in fp32, so the result hardly depends
on the device.

Baseline: the same model with documents in bf16.

Gate: the mean with fp8 is at least 99.5% of that in bf16, or below it by less than two standard
errors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.collection_splits import evaluation_split, with_splits
from benchmarks.runs import take_named
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.data.datasets import load_collection

MEASURE = "nDCG@10"
CSV_KEY = ("data", "model", "kind")
# documents of a run
DEPTH = 100
# share of the value in bf16 that fp8 must reach, and standard errors that may be missing
LEAST_SHARE = 0.995
N_STANDARD_ERRORS = 2.0
# texts per batch
BATCH = 64


def ndcg_by_query(model: Any, kind: str, collection: Collection, *, fp8: bool) -> dict[str, float]:
    """Return nDCG@10 of each query of the evaluation split.

    Args:
        model: a SparseEncoder or a dense SentenceTransformer.
        kind: ``"sparse"`` or ``"dense"``.
        collection: the collection.
        fp8: whether documents are encoded in fp8; queries are encoded in bf16.
    """
    from tilefold.integrations.sentence_transformers import accelerate
    from tilefold.retrieval import evaluate_per_query

    accelerate(model, fp8=fp8)
    split = evaluation_split(collection)
    search = _search_sparse if kind == "sparse" else _search_dense
    queries = collection.split_queries(split)
    hits = search(model, collection, queries)
    run = {
        query: {hit.id: hit.score for hit in query_hits}
        for query, query_hits in zip(queries, hits, strict=True)
    }
    rows = evaluate_per_query(run, collection.split_qrels(split), [MEASURE])
    return {query: row[MEASURE] for query, row in rows.items()}


def _search_sparse(model: Any, collection: Collection, queries: dict[str, str]) -> Any:
    """Encode documents as the model is accelerated, and queries in bf16; return the hits."""
    from tilefold.integrations.sentence_transformers import accelerate
    from tilefold.retrieval import build_index, encode_collection, encode_queries, read_vectors

    with TemporaryDirectory() as folder:
        encode_collection(model, collection.contents(), folder, dtype="bf16")
        index = build_index(read_vectors(folder))
    accelerate(model)
    query_vectors = encode_queries(model, queries, batch_size=BATCH, dtype="bf16")
    return index.search(query_vectors, DEPTH)


def _search_dense(model: Any, collection: Collection, queries: dict[str, str]) -> Any:
    """Encode documents as the model is accelerated, and queries in bf16; return the hits."""
    from tilefold._internal.precision import computing_in
    from tilefold.integrations.sentence_transformers import accelerate
    from tilefold.retrieval import encode_dense, encoded_index

    with computing_in(model, "bf16"):
        index = encoded_index(model, collection.contents(), batch_size=BATCH)
        accelerate(model)
        query_vectors = encode_dense(model, queries, kind="query", batch_size=BATCH)
    return index.search(query_vectors, DEPTH)


def compare(name: str, collection: Collection) -> dict[str, Any]:
    """Measure a model in bf16 and in fp8, and return the cells of its row.

    Args:
        name: a folder, the name of a model, or minilm.
        collection: the collection.
    """
    from tilefold.cli._models import load_kind

    kind_of_minilm = "dense" if name == "minilm" else None
    model, kind = load_kind(name, kind_of_minilm)
    begin = time.monotonic()
    bf16 = ndcg_by_query(model, kind, collection, fp8=False)
    fp8 = ndcg_by_query(model, kind, collection, fp8=True)
    differences = [fp8[query] - bf16[query] for query in bf16]
    bf16_mean = statistics.fmean(bf16.values())
    difference = statistics.fmean(differences)
    standard_error = statistics.stdev(differences) / len(differences) ** 0.5
    reached = 1 + difference / bf16_mean
    is_within = difference >= -N_STANDARD_ERRORS * standard_error
    return {
        "kind": kind,
        "documents": len(collection.documents),
        "queries": len(bf16),
        "bf16_ndcg10": bf16_mean,
        "fp8_ndcg10": statistics.fmean(fp8.values()),
        "mean_difference": difference,
        "standard_error": standard_error,
        "share_of_bf16": reached,
        "gate": "ok" if reached >= LEAST_SHARE or is_within else f"only {reached:.2%} of bf16",
        "seconds": time.monotonic() - begin,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; wrong arguments end the program with a usage line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", action="append", required=True, metavar="NAME=PATH", help="a BEIR folder")
    add("--model", required=True, help="a sparse or dense model, or minilm")
    add("--limit", type=int, help="reduce collections to this many documents and queries")
    add("--output", type=Path, help="folder for <device>/fp8_trunk.csv")
    options = parser.parse_args(argv)
    take_named(parser, options, ("data",))
    return options


def main(argv: Sequence[str]) -> int:
    """Measure a model on each collection, and save the rows.

    Returns:
        The exit code: 1 if fp8 costs too much.
    """
    import torch

    from tilefold.bench.results import collect, results_file, write_csv

    options = parse(argv)
    rows = []
    for data, path in options.data.items():
        collection = with_splits(load_collection(path), options.limit)
        cells = compare(options.model, collection)
        rows.append({"data": data, "model": Path(options.model).name, **cells})
        print(rows[-1], flush=True)
    if options.output is not None:
        provenance = collect(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        path = results_file(options.output, "fp8_trunk", provenance)
        write_csv(path, rows, provenance, CSV_KEY)
    return 0 if all(row["gate"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
