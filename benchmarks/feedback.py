"""Does feedback help, and is interpolation before and after it the best, as arXiv 2205.00235 found?

    python -m benchmarks.feedback --data FOLDER --data pydocs [--sparse MODEL] [--by-title] [--output FOLDER]

For each collection and each of BM25, dense MiniLM and a sparse model: no feedback, average (k = 3),
Rocchio as published (alpha .4, beta .6, k = 5) and by the defaults (equal lengths), each alone and
interpolated with another retriever (of BM25 dense MiniLM, of the others BM25) before feedback,
after it, and both ("after" without feedback is the plain fusion). With ``--by-title`` every
document with the title of a judged one is relevant, too: a collection of many relevant documents.
Scores are normalised (min-max) over 1,000 documents per ranking. The weight of the other retriever
is, for each row, the one with the best nDCG@10 on up to 200 queries of the split `--tune` (where
that is `--split`, every other query chooses, and the rest is measured). Differences are means over
queries of nDCG@10, with their standard errors. Each text is encoded once, up to `--max-length`
tokens.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tilefold.bench.results import collect, results_file, write_csv
from tilefold.recipes.backbone import minilm_path
from tilefold.recipes.loading import load_saved
from tilefold.retrieval import (
    BM25Index,
    Collection,
    Feedback,
    Interpolation,
    Run,
    SparseVectors,
    build_index,
    encode_collection,
    encode_dense,
    encode_queries,
    encoded_index,
    evaluate_per_query,
    expand_dense,
    expand_sparse,
    hits_to_run,
    load_collection,
    read_vectors,
    with_feedback,
)

MEASURES = ("nDCG@10", "R@100", "AP")
DEPTH = 1000
WEIGHTS = (0.1, 0.3, 0.5, 0.7, 0.9)
TUNED_ON = 200
CSV_KEY = ("collection", "split", "retriever", "method", "place")
METHODS = {
    "none": None,
    "average": Feedback("average"),
    "rocchio": Feedback("rocchio", alpha=0.4, beta=0.6),
    "rocchio_default": Feedback("rocchio"),
}
OTHER = {"bm25": "dense", "dense": "bm25", "sparse": "bm25"}
PLACES = ("none", "before", "after", "both")

Again = Callable[[Run, Feedback], Run]


@dataclass(frozen=True)
class Ranked:
    """Rankings of some queries by both retrievers, and how each searches again."""

    first: dict[str, Run]
    again: dict[str, Again]

    def run(self, retriever: str, method: str, place: str, weight: float) -> Run:
        """One row's ranking; without feedback every place is a plain interpolation."""
        other, first, feedback = OTHER[retriever], self.first[retriever], METHODS[method]
        mix = None if place == "none" else Interpolation(place, weight)
        if feedback is None:
            return first if mix is None else mix.mix(first, self.first[other], DEPTH)
        second = None if mix is None else self.first[other]
        return with_feedback(
            first,
            lambda basis: self.again[retriever](basis, feedback),
            DEPTH,
            second,
            mix,
        )


def main(argv: Sequence[str]) -> int:
    """Measure every row of every collection; print and save them."""
    options = parse(argv)
    provenance = collect(torch.device("cpu"))
    file = results_file(options.output, "feedback", provenance)
    for name in options.data:
        collection = load_collection(name)
        if options.by_title:
            collection = by_title(collection)
        rows = measure(collection, options.split, options.tune, options.max_length, options.sparse)
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


def by_title(collection: Collection) -> Collection:
    """The collection where every document with the title of a judged one is relevant, too."""
    titles: dict[str, list[str]] = {}
    for name, document in collection.documents.items():
        titles.setdefault(document.title, []).append(name)
    qrels = {
        split: {
            query: {name: 1 for good in judged for name in titles[collection.documents[good].title]}
            for query, judged in table.items()
        }
        for split, table in collection.qrels.items()
    }
    return replace(collection, name=f"{collection.name}-by-title", qrels=qrels)


def measure(
    collection: Collection,
    split: str,
    tune: str,
    max_length: int,
    sparse: str | None = None,
) -> list[dict[str, Any]]:
    """The rows of a collection."""
    begin = time.perf_counter()
    judged = dict(collection.split_qrels(split))
    if tune == split:  # every other query chooses the weights
        tuned = {query: judged.pop(query) for query in [*judged][::2]}
    else:
        tuned = dict(collection.split_qrels(tune))
    tuned = dict(itertools.islice(tuned.items(), TUNED_ON))
    if shared := judged.keys() & tuned.keys():
        raise ValueError(
            f"--tune: {len(shared)} of the queries of {tune} are measured, in {split}. Tune on others.",
        )
    ranked = rank(collection, [*judged, *tuned], max_length, sparse)
    print(
        f"{collection.name}: encoded and ranked in {time.perf_counter() - begin:.0f} s",
        file=sys.stderr,
    )
    rows: list[dict[str, Any]] = []
    for retriever in ranked.first:
        tables: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
        weights: dict[tuple[str, str], float] = {}
        for key in itertools.product(METHODS, PLACES):
            if key in (("none", "before"), ("none", "both")):
                continue
            weights[key] = (
                math.nan if key[1] == "none" else best_weight(ranked, retriever, *key, tuned)
            )
            run = Ranked(
                {name: {q: first[q] for q in judged} for name, first in ranked.first.items()},
                ranked.again,
            )
            tables[key] = evaluate_per_query(
                run.run(retriever, *key, weights[key]),
                judged,
                MEASURES,
            )
        for (method, place), table in tables.items():
            row = {
                "collection": collection.name,
                "split": split,
                "queries": len(judged),
                "tuned_on": len(tuned),
            }
            row["max_length"] = max_length
            row |= {"retriever": retriever, "method": method, "place": place}
            row |= {"weight_of_other": weights[method, place]}
            for column, measure in zip(("ndcg10", "r100", "ap"), MEASURES, strict=True):
                row[column] = statistics.fmean(values[measure] for values in table.values())
            row |= difference("over_plain", table, tables["none", "none"])
            rows.append(row | difference("over_fusion", table, tables["none", "after"]))
    return rows


def difference(name: str, table: dict[str, Any], beside: dict[str, Any]) -> dict[str, float]:
    """Mean of the paired differences in nDCG@10, and its standard error."""
    gaps = [values[MEASURES[0]] - beside[query][MEASURES[0]] for query, values in table.items()]
    return {
        name: statistics.fmean(gaps),
        f"{name}_se": statistics.stdev(gaps) / math.sqrt(len(gaps)),
    }


def best_weight(
    ranked: Ranked,
    retriever: str,
    method: str,
    place: str,
    judged: dict[str, dict[str, int]],
) -> float:
    """The weight of the other retriever with the best nDCG@10 on `judged`; of equal ones the
    lowest.
    """
    part = Ranked(
        {name: {query: run[query] for query in judged} for name, run in ranked.first.items()},
        ranked.again,
    )
    other = part.first[OTHER[retriever]]
    alone = part.run(retriever, method, "none", math.nan) if place == "after" else {}
    scores = {}
    for weight in WEIGHTS:
        if place == "after":  # feedback does not depend on the weight
            run = Interpolation("after", weight).mix(alone, other, DEPTH)
        else:
            run = part.run(retriever, method, place, weight)
        table = evaluate_per_query(run, judged, MEASURES[:1])
        scores[weight] = statistics.fmean(values[MEASURES[0]] for values in table.values())
    return max(scores, key=lambda weight: (scores[weight], -weight))


def rank(
    collection: Collection,
    names: Sequence[str],
    max_length: int,
    sparse: str | None,
) -> Ranked:
    """The first rankings of both retrievers, every text encoded once."""
    texts, queries = collection.contents(), {query: collection.queries[query] for query in names}
    words = BM25Index.build(texts, identifiers=collection.name == "pydocs")
    row_of = {query: row for row, query in enumerate(queries)}
    first: dict[str, Run] = {}
    again: dict[str, Again] = {}

    def add(name: str, documents: SparseVectors, asked: SparseVectors) -> None:
        index = build_index(documents)
        first[name] = hits_to_run(asked, index.search(asked, DEPTH))

        def expanded(basis: Run, feedback: Feedback) -> Run:
            part = asked.take([row_of[query] for query in basis])
            moved = expand_sparse(part, documents, basis, feedback)
            return hits_to_run(moved, index.search(moved, DEPTH))

        again[name] = expanded

    add("bm25", words.document_vectors(), words.query_vectors(queries))
    if sparse is not None:
        encoder = load_saved(sparse, "sparse")
        encoder.max_seq_length = max_length
        with tempfile.TemporaryDirectory() as folder:
            encode_collection(encoder, texts, folder, progress=report)
            add("sparse", read_vectors(folder), encode_queries(encoder, queries))
    model = load_saved(
        str(minilm_path()),
        "dense",
    )  # in bf16 where the hardware has it, as every command
    model.max_seq_length = max_length
    index = encoded_index(model, texts, progress=report)
    dense = index.vectors(texts)
    asked_dense = encode_dense(model, queries, kind="query").float()

    def search(vectors: torch.Tensor, query_ids: Sequence[str]) -> Run:
        found = zip(query_ids, index.search(vectors, DEPTH), strict=True)
        return {query: {hit.id: hit.score for hit in hits} for query, hits in found}

    def dense_again(basis: Run, feedback: Feedback) -> Run:
        part = asked_dense[[row_of[query] for query in basis]]
        return search(
            expand_dense(part, list(basis), dense, list(texts), basis, feedback),
            list(basis),
        )

    return Ranked(
        first | {"dense": search(asked_dense, list(queries))},
        again | {"dense": dense_again},
    )


def report(done: int, total: int) -> None:
    """One line for each part that is encoded."""
    print(f"encoded {done} of {total}", file=sys.stderr)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.feedback",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument(
        "--data",
        action="append",
        required=True,
        help="BEIR folder, or pydocs; may be repeated",
    )
    parser.add_argument("--split", default="test", help="the queries that are measured")
    parser.add_argument("--tune", default="train", help="the queries that choose the weights")
    parser.add_argument("--sparse", help="a SparseEncoder, as a third retriever")
    parser.add_argument(
        "--by-title",
        action="store_true",
        help="documents of one title are relevant together",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=256,
        help="tokens that the dense model reads of a text",
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
