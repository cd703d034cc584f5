"""Retrieval quality by ``tilefold`` commands alone: BM25, dense, SPLADE, feedback, fusion and
reranking.

    python -m benchmarks.quality_table --data FOLDER:SPLIT --data pydocs:test --splade MODEL --work FOLDER

Each collection is sampled first: `--queries` judged ones of the split, and `--documents`, which
hold all that is judged for them; both with seed 0. Fewer documents than the collection has make
numbers higher than those of the whole. The commands are those of :func:`commands`, one process
each; a row is what its ``--json`` prints, and its p-value what ``compare`` finds beside BM25
(paired randomisation, after Holm's correction over the rows and measures).
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tilefold.bench.results import collect, results_file, write_csv
from tilefold.retrieval import Collection, load_collection

CSV_KEY = ("collection", "row")
MEASURES = {"ndcg10": "nDCG@10", "r100": "R@100"}
ALL = "--run bm25.trec --run dense.trec --run splade.trec"


def commands(split: str, splade: str, length: int, bm25: str) -> tuple[list[str], dict[str, str]]:
    """Commands that encode and index, and those of the rows, by name; `data` and all outputs are in
    one folder.
    """
    encode = f"encode --data data --max-length {length} --model"
    first = [
        f"index --backend bm25 --data data --output bm25{bm25}",
        f"{encode} minilm --kind dense --output dense-vectors",
        "index --vectors dense-vectors --output dense",
        f"{encode} {splade} --output splade-vectors",
        "index --vectors splade-vectors --output splade",
        "index --vectors splade-vectors --backend seismic --output seismic",
        f"{encode} minilm --kind tokens --output tokens",
    ]
    score = f"evaluate --data data --split {split}"
    sparse = f"--model {splade} --index"
    fuse = f"fuse --data data --split {split} {ALL}"
    published = "--prf rocchio --prf-alpha 0.4 --prf-beta 0.6"
    rows = {
        "bm25": f"{score} --index bm25",
        "dense": f"{score} --index dense --model minilm",
        "splade": f"{score} {sparse} splade",
        "splade, seismic": f"{score} {sparse} seismic",
        "rrf of all": f"{fuse} --method rrf",
        "interpolation of all": f"{fuse} --method interpolation",
        "bm25, reranked": f"{score} --run bm25.trec --rerank tokens",
        "splade, reranked": f"{score} --run splade.trec --rerank tokens",
        "rrf of all, reranked": f"{score} --run rrf-of-all.trec --rerank tokens",
        "bm25, prf rocchio .4 .6": f"{score} --index bm25 {published}",
        "dense, prf rocchio .4 .6": f"{score} --index dense --model minilm {published}",
        "splade, prf rocchio .4 .6": f"{score} {sparse} splade --vectors splade-vectors {published}",
        "splade, prf average": f"{score} {sparse} splade --vectors splade-vectors --prf average",
    }
    measures = " ".join(f"--measure {measure}" for measure in MEASURES.values())
    return first, {
        n: f"{line} {measures} --save-run {run_file(n)} --json" for n, line in rows.items()
    }


def run_file(name: str) -> str:
    """The TREC file of a row."""
    return name.replace(",", "").replace(" ", "-") + ".trec"


def sample(collection: Collection, split: str, queries: int, documents: int) -> Collection:
    """`queries` judged ones of a split, and `documents` with all that are judged for them; both
    with seed 0.
    """
    judged = collection.split_qrels(split)
    draw = random.Random(0)  # noqa: S311 - a reproducible sample, no secret
    names = set(draw.sample(sorted(judged), min(queries, len(judged))))
    qrels = {query: grades for query, grades in judged.items() if query in names}
    kept = {name for grades in qrels.values() for name in grades}
    others = sorted(collection.documents.keys() - kept)
    kept.update(draw.sample(others, min(len(others), max(0, documents - len(kept)))))
    taken = {name: document for name, document in collection.documents.items() if name in kept}
    texts = {query: collection.queries[query] for query in qrels}
    return Collection(collection.name, taken, texts, {split: qrels})


def tilefold(line: str, folder: Path) -> Any:
    """What a command prints as JSON, or nothing; a command that fails ends all."""
    print(f"tilefold {line}", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    command = [sys.executable, "-m", "tilefold.cli", *shlex.split(line)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    print(f"  {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return json.loads(done.stdout) if "--json" in line else None


def measure(
    collection: Collection,
    split: str,
    splade: str,
    length: int,
    folder: Path,
) -> list[dict[str, Any]]:
    """The rows of a collection, whose commands run in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    collection.save_beir(folder / "data")
    first, scored = commands(
        split,
        splade,
        length,
        " --identifiers" if collection.name == "pydocs" else "",
    )
    for line in first:
        tilefold(line, folder)
    facts = {name: tilefold(line, folder) for name, line in scored.items()}
    runs = " ".join(map(run_file, scored))
    measures = " ".join(f"--measure {measure}" for measure in MEASURES.values())
    found = tilefold(
        f"compare {runs} --data data --split {split} {measures} --worst 0 --json",
        folder,
    )["comparisons"]
    beside = {(f"{each['run']}.trec", each["measure"]): each for each in found}
    rows: list[dict[str, Any]] = []
    for name, fact in facts.items():
        row: dict[str, Any] = {
            "collection": collection.name,
            "split": split,
            "documents": len(collection.documents),
        }
        row |= {"queries": len(collection.qrels[split]), "max_length": length, "row": name}
        for column, wanted in MEASURES.items():
            mean = fact["errors"][split][wanted]
            row |= {column: mean["mean"], f"{column}_se": mean["standard_error"]}
            row |= {f"{column}_low": mean["low"], f"{column}_high": mean["high"]}
            row[f"{column}_p_holm"] = beside.get((run_file(name), wanted), {}).get("p_holm", "")
        rows.append(row | {"command": f"tilefold {scored[name]}".replace(splade, "SPLADE")})
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
        help="FOLDER:SPLIT or pydocs:SPLIT; may be repeated",
    )
    parser.add_argument(
        "--splade",
        type=Path,
        required=True,
        help="folder of a trained SPLADE model",
    )
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--documents", type=int, default=1500)
    parser.add_argument(
        "--max-length",
        type=int,
        default=128,
        help="tokens that models read of a text",
    )
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder for vectors, indexes and runs",
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    provenance = collect(torch.device("cpu"))
    file = results_file(options.output, "quality_table", provenance)
    for data in options.data:
        name, _, split = data.rpartition(":")
        collection = sample(load_collection(name), split, options.queries, options.documents)
        splade, folder = str(options.splade.resolve()), options.work.resolve() / collection.name
        rows = measure(collection, split, splade, options.max_length, folder)
        for row in rows:
            print(
                f"{collection.name} {row['row']}: {row['ndcg10']:.4f} ± {row['ndcg10_se']:.4f}, {row['r100']:.4f}",
            )
        write_csv(file, rows, provenance, CSV_KEY)
    print(f"wrote {file}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
