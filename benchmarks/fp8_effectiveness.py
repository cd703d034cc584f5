"""Compare nDCG@10 of one trained model, encoded with its own head and with its head in fp8.

    python -m benchmarks.fp8_effectiveness --model MODEL [--data pydocs] [--split test] [--device cuda]

The CPU multiplies the same rounded numbers as a GPU, in fp32, so the answer does not depend on the
device.
"""

from __future__ import annotations

import argparse
import sys
import time
from tempfile import TemporaryDirectory

import torch
from sentence_transformers import SparseEncoder

from tilefold.integrations.sentence_transformers import accelerate
from tilefold.retrieval import (
    build_index,
    encode_collection,
    encode_queries,
    evaluate_per_query,
    hits_to_run,
    load_collection,
    read_vectors,
)

MEASURE = "nDCG@10"


def main() -> None:
    """Parse arguments, encode twice, print both values and their paired difference."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder or name of a trained SparseEncoder")
    parser.add_argument("--data", default="pydocs", help="pydocs, or a BEIR folder")
    parser.add_argument("--split", default="test")
    parser.add_argument(
        "--top-k",
        type=int,
        default=128,
        help="heaviest terms of a document that are kept",
    )
    parser.add_argument("--query-top-k", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    values = {quantize or "plain": ndcg(options, quantize) for quantize in (None, "fp8")}
    plain, rounded = values["plain"], values["fp8"]
    differences = torch.tensor(
        [rounded[query] - plain[query] for query in plain],
        dtype=torch.float64,
    )
    mean, error = differences.mean().item(), (differences.std() / len(differences) ** 0.5).item()
    for name, by_query in values.items():
        print(
            f"{name}: {MEASURE} {sum(by_query.values()) / len(by_query):.4f} over {len(by_query)} queries",
        )
    print(f"fp8 - plain: {mean:+.4f} (standard error {error:.4f})")


def ndcg(options: argparse.Namespace, quantize: str | None) -> dict[str, float]:
    """nDCG@10 by query."""
    collection = load_collection(options.data)
    model = SparseEncoder(options.model, device=options.device)
    accelerate(model, quantize=quantize)
    begin = time.perf_counter()
    with TemporaryDirectory() as folder:
        encode_collection(model, collection.contents(), folder, top_k=options.top_k)
        queries = encode_queries(
            model,
            collection.split_queries(options.split),
            top_k=options.query_top_k,
        )
        hits = build_index(read_vectors(folder)).search(queries, 100)
    print(f"{quantize or 'plain'}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    rows = evaluate_per_query(
        hits_to_run(queries, hits),
        collection.split_qrels(options.split),
        [MEASURE],
    )
    return {name: row[MEASURE] for name, row in rows.items()}


if __name__ == "__main__":
    main()
