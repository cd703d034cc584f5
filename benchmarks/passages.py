"""Long documents searched whole and by their best passage: BM25, and the packaged SPLADE without
training.

    python -m benchmarks.passages --data FOLDER --data pydocs [--join 10] [--judged-of 100] [--output FOLDER]

Long documents are made of what a collection has: paragraphs of one title (an article of Wikipedia)
are joined, the docstrings of pydocs by the first word of their dotted name (a module), and where
titles differ, every `--join` consecutive documents. A query is for the long document that holds its
relevant one. `--judged-of` M takes the relevant documents of the split and M others per hundred of
them, in corpus order. Differences to whole documents are means over queries of nDCG@10, with their
standard errors.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tilefold import retrieval as r
from tilefold.bench.results import collect, results_file, write_csv
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes.splade import untrained_splade
from tilefold.retrieval.provenance import texts_digest

CUTS = (None, r.Passages(64), r.Passages(64, 32), r.Passages(64, 32, "words"))
MEASURES = ("nDCG@10", "R@100")
CSV_KEY = ("collection", "retriever", "cut")


def joined(collection: r.Collection, split: str, join: int, judged_of: int | None) -> r.Collection:
    """The collection with long documents, and the judgements of one split."""
    documents = list(collection.documents.values())
    judged = {
        name
        for grades in collection.split_qrels(split).values()
        for name, grade in grades.items()
        if grade > 0
    }
    if judged_of is not None:
        others = len(judged) * judged_of // 100
        left = [document.id for document in documents if document.id not in judged][:others]
        documents = [document for document in documents if document.id in judged.union(left)]
    titles = {document.title for document in documents}
    owner: dict[str, str] = {}
    parts: dict[str, list[r.Document]] = {}
    for number, document in enumerate(documents):
        if collection.name == "pydocs":
            key = document.id.partition(".")[0]
        else:
            key = document.title if len(titles) < len(documents) / 2 else str(number // join)
        owner[document.id] = key
        parts.setdefault(key, []).append(document)
    by_title = collection.name != "pydocs" and len(titles) < len(documents) / 2
    long = {
        key: r.Document(
            key,
            key if by_title else "",
            "\n\n".join(p.text if by_title else p.contents for p in group),
        )
        for key, group in parts.items()
    }
    qrels = {
        query: {owner[name]: 1 for name, grade in grades.items() if grade > 0}
        for query, grades in collection.split_qrels(split).items()
    }
    return r.Collection(collection.name, long, collection.queries, {split: qrels})


def runs(
    collection: r.Collection,
    queries: dict[str, str],
    cut: r.Passages | None,
    model: Any,
) -> dict[str, Any]:
    """Retriever -> its ranking, number of texts, and how many the model read the beginning of."""
    texts = collection.contents() if cut is None else cut.of(collection.documents)
    words = r.Searcher(r.BM25Index.build(texts, identifiers=collection.name == "pydocs"))
    found: dict[str, Any] = {"bm25": (words.rank(queries, r.SearchRequest(100)).run, len(texts), 0)}
    if model is None or (cut is not None and cut.cut == "words"):
        return found
    with tempfile.TemporaryDirectory() as folder:
        manifest = r.encode_collection(model, texts, folder, top_k=128)
        splade = r.Searcher(r.build_index(r.read_vectors(folder)), model)
    run = splade.rank(queries, r.SearchRequest(100)).run
    return found | {"splade, untrained": (run, len(texts), manifest.truncated["count"])}


def measure(collection: r.Collection, split: str, sparse: bool) -> list[dict[str, Any]]:
    """The rows of a collection of long documents."""
    queries, judged, contents = (
        collection.split_queries(split),
        collection.qrels[split],
        collection.contents(),
    )
    model = None
    if sparse:
        model = untrained_splade(texts_digest(contents), lambda: contents)
        accelerate(model)
    length = statistics.fmean(len(text.split()) for text in contents.values())
    rows: list[dict[str, Any]] = []
    whole: dict[str, dict[str, dict[str, float]]] = {}
    for cut in CUTS:
        begin = time.perf_counter()
        for retriever, (run, texts, truncated) in runs(collection, queries, cut, model).items():
            table = r.evaluate_per_query(run, judged, MEASURES)
            before = whole.setdefault(retriever, table)
            over = [values["nDCG@10"] - before[query]["nDCG@10"] for query, values in table.items()]
            row = {
                "collection": collection.name,
                "queries": len(judged),
                "documents": len(contents),
            }
            row |= {
                "words_per_document": round(length),
                "retriever": retriever,
                "cut": str(cut or "whole"),
            }
            row |= {"texts": texts, "truncated": truncated}
            for column, name in zip(("ndcg10", "r100"), MEASURES, strict=True):
                row[column] = statistics.fmean(values[name] for values in table.values())
            error = statistics.stdev(over) / math.sqrt(len(over)) if len(over) > 1 else 0.0
            rows.append(row | {"over_whole": statistics.fmean(over), "over_whole_se": error})
        print(
            f"{collection.name}, {cut or 'whole'}: {time.perf_counter() - begin:.0f} s",
            file=sys.stderr,
        )
    return rows


def main(argv: Sequence[str]) -> int:
    """Measure every row of every collection; print and save them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        action="append",
        required=True,
        help="pydocs, or a BEIR folder; may be repeated",
    )
    parser.add_argument("--split", default="test")
    parser.add_argument("--join", type=int, default=10)
    parser.add_argument("--judged-of", type=int)
    parser.add_argument(
        "--words-only",
        action="store_true",
        help="without the model, which reads English",
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    provenance = collect(torch.device("cpu"))
    file = results_file(options.output, "passages", provenance)
    for name in options.data:
        long = joined(r.load_collection(name), options.split, options.join, options.judged_of)
        rows = measure(long, options.split, not options.words_only)
        for row in rows:
            print(
                " ".join(
                    f"{value:.4f}" if isinstance(value, float) else str(value)
                    for value in row.values()
                ),
            )
        write_csv(file, rows, provenance, CSV_KEY)
    print(f"wrote {file}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
