"""Compare nDCG@10 of SPLADE models trained with the stock and with the fused head, with equal seeds
and data.

    python -m benchmarks.effectiveness --prepare small --data scifact=PATH --data jaquad=PATH --tokenizer PATH
    python -m benchmarks.effectiveness --data scifact=small/scifact --data jaquad=small/jaquad \
        --tokenizer small/tokenizer --seeds 0 1 2 --jobs 4 --output results

Each run trains a SPLADE encoder with `tilefold.recipes.splade` (the stock trainer, loss and data
order of sentence-transformers), encodes the whole corpus with the head that it was trained with,
searches exactly and evaluates. The two runs of a seed differ in `accelerate(model)` alone. Two
starts are known:

* `minilm`: all-MiniLM-L6-v2 with a pass-through head over V = 30,522 (`recipes.backbone`);
* `xlmr-small`: a small XLM-R with random weights over the vocabulary of `--tokenizer` (V =
  250,002). Random token embeddings are nearly orthogonal, so a tied head scores a text's own tokens
  and little else: lexical matching with equal weights, from which training has to learn which
  tokens count.

The command exits with 1 if a run failed or the mean difference in nDCG@10 is over the tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.effectiveness_data import evaluation_split, prepare, with_splits
from benchmarks.runs import run_all, take_named
from benchmarks.small_xlmr import small_xlmr
from tilefold.recipes.splade import SpladeRecipe
from tilefold.retrieval.collection import Collection
from tilefold.retrieval.datasets import load_collection

TOLERANCE = 0.005  # of nDCG@10, on the mean over the seeds
MEASURES = ("nDCG@10", "R@100")
SIDES = ("stock", "fused")
EXTRA = (
    "start",
    "control",
)  # the model before training; stock once more, whose difference is the machine's own noise
CSV_KEY = ("dataset", "backbone", "precision", "steps", "seed", "side")
DEPTH = 100


@dataclass(frozen=True)
class Setting:
    """How a start is trained and encoded; the same for both sides."""

    recipe: SpladeRecipe
    encode_batch: int


SETTINGS: dict[str, Setting] = {
    "minilm": Setting(
        SpladeRecipe(
            max_steps=150,
            batch_size=32,
            learning_rate=5e-5,
            max_length=256,
            train_max_length=192,
        ),
        32,
    ),
    "xlmr-small": Setting(
        SpladeRecipe(
            max_steps=200,
            batch_size=24,
            learning_rate=2e-4,
            max_length=192,
            train_max_length=128,
        ),
        32,
    ),
}


@dataclass(frozen=True)
class Job:
    """One training run and its evaluation; `side` is one of `SIDES` or `EXTRA`."""

    dataset: str
    path: str
    backbone: str
    tokenizer: str | None
    seed: int
    side: str
    precision: str
    device: str
    steps: int
    batch_size: int
    limit: int | None

    @property
    def name(self) -> str:
        """The run's name in progress lines."""
        return f"{self.dataset}, seed {self.seed}, {self.side}, {self.precision}"


def run_job(job: Job) -> dict[str, Any]:
    """Train, encode, search and evaluate; a row of the CSV, with nDCG@10 of every query under
    ``"per_query"``.
    """
    from tilefold.recipes.loading import quiet_libraries
    from tilefold.recipes.splade import train

    started = time.monotonic()
    collection = with_splits(load_collection(job.path), job.limit)
    setting = SETTINGS[job.backbone]
    with tempfile.TemporaryDirectory(prefix="tilefold-effectiveness-") as folder:
        base = "minilm"
        if job.backbone == "xlmr-small":
            base = str(
                small_xlmr(
                    Path(folder) / "start",
                    str(job.tokenizer),
                    setting.recipe.max_length,
                    job.seed,
                ),
            )
        recipe = replace(
            setting.recipe,
            base_model=base,
            max_steps=max(job.steps, 1),
            batch_size=job.batch_size,
            bf16=job.precision == "bf16",
            fused=job.side == "fused",
            save_steps=10**6,
            seed=job.seed,
        )
        loss: float | None = None
        with quiet_libraries():
            if job.side == "start":
                model = recipe.start(list(collection.contents().values()))
            else:
                result = train(recipe, collection, Path(folder) / "model")
                loss = result.loss
                model = replace(recipe, base_model=result.model_dir).start([])
        trained = time.monotonic()
        measured = evaluate_model(model, collection, job, setting, Path(folder) / "vectors")
    return {
        **{
            name: value
            for name, value in asdict(job).items()
            if name not in ("path", "tokenizer", "limit")
        },
        "documents": len(collection.documents),
        "queries": len(measured["per_query"]),
        "pairs": len(collection.pairs("train")),
        "loss": loss,
        **measured,
        "train_seconds": trained - started,
        "seconds": time.monotonic() - started,
    }


def evaluate_model(
    model: Any,
    collection: Collection,
    job: Job,
    setting: Setting,
    folder: Path,
) -> dict[str, Any]:
    """nDCG@10, recall and active terms of `model` on the evaluation split, encoded with the head of
    the job's side.
    """
    import torch

    from tilefold.integrations.sentence_transformers import accelerate
    from tilefold.retrieval.encoding import encode_collection, encode_queries
    from tilefold.retrieval.evaluation import active_terms, evaluate, evaluate_per_query
    from tilefold.retrieval.index import build_index, hits_to_run
    from tilefold.retrieval.vectors import read_vectors

    split = evaluation_split(collection)
    queries = collection.split_queries(split)
    autocast = torch.autocast(job.device, torch.bfloat16, enabled=job.precision == "bf16")
    with accelerate(model) if job.side == "fused" else nullcontext(), autocast:
        encode_collection(
            model,
            collection.contents(),
            folder,
            batch_size=setting.encode_batch,
            top_k=512,
        )
        encoded = encode_queries(model, queries, batch_size=setting.encode_batch)
    documents = read_vectors(folder)
    hits = build_index(documents).search(encoded, DEPTH)
    run = hits_to_run(encoded, hits)
    qrels = collection.split_qrels(split)
    per_query = {
        name: row[MEASURES[0]] for name, row in evaluate_per_query(run, qrels, MEASURES[:1]).items()
    }
    return {
        **evaluate(run, qrels, MEASURES),
        "document_terms": active_terms(documents),
        "query_terms": active_terms(encoded),
        "per_query": per_query,
    }


def plan(arguments: argparse.Namespace) -> list[Job]:
    """Every run that the arguments ask for, the longest ones first."""
    sides = [*SIDES, *(side for side in EXTRA if getattr(arguments, side))]
    jobs = []
    for dataset, path in arguments.data.items():
        backbone = arguments.backbone.get(
            dataset,
            "xlmr-small" if dataset == "jaquad" else "minilm",
        )
        if backbone not in SETTINGS:
            raise ValueError(
                f"--backbone must be one of {', '.join(SETTINGS)}, got {backbone!r} for {dataset}.",
            )
        if backbone == "xlmr-small" and arguments.tokenizer is None:
            raise ValueError(
                f"--tokenizer must name a folder for {dataset}, whose backbone is xlmr-small.",
            )
        recipe = SETTINGS[backbone].recipe
        jobs += [
            Job(
                dataset,
                path,
                backbone,
                arguments.tokenizer,
                seed,
                side,
                precision,
                arguments.device,
                arguments.steps or recipe.max_steps or 1,
                arguments.batch_size or recipe.batch_size,
                arguments.limit,
            )
            for precision in arguments.precision
            for seed in arguments.seeds
            for side in sides
        ]
    return sorted(jobs, key=lambda job: job.backbone != "xlmr-small")


def paired(
    rows: Sequence[Mapping[str, Any]],
    left: str = "fused",
    right: str = "stock",
) -> list[dict[str, Any]]:
    """One line for each dataset, precision and seed that has both sides: values, difference and its
    standard error.
    """
    by_key = {(row["dataset"], row["precision"], row["seed"], row["side"]): row for row in rows}
    lines = []
    for dataset, precision, seed, side in sorted(by_key):
        other = by_key.get((dataset, precision, seed, left))
        if side != right or other is None:
            continue
        base = by_key[dataset, precision, seed, right]
        differences = [
            other["per_query"][query] - value for query, value in base["per_query"].items()
        ]
        spread = (
            statistics.stdev(differences) / math.sqrt(len(differences))
            if len(differences) > 1
            else math.nan
        )
        lines.append(
            {
                "dataset": dataset,
                "precision": precision,
                "seed": seed,
                "stock": base[MEASURES[0]],
                "other": other[MEASURES[0]],
                "difference": other[MEASURES[0]] - base[MEASURES[0]],
                "standard_error": spread,
                "recall": (base[MEASURES[1]], other[MEASURES[1]]),
                "terms": (base["document_terms"], other["document_terms"]),
            },
        )
    return lines


def report(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Print every seed and the means; whether all means of fused against stock are within the
    tolerance.
    """
    held = True
    for name in ("fused", "control"):
        lines = paired(rows, name)
        for dataset, precision in sorted({(line["dataset"], line["precision"]) for line in lines}):
            mine = [
                line
                for line in lines
                if (line["dataset"], line["precision"]) == (dataset, precision)
            ]
            print(
                f"\n{dataset}, {precision}: nDCG@10 stock, {name}, difference (standard error over queries)",
            )
            for line in mine:
                print(
                    f"  seed {line['seed']}: {line['stock']:.4f} {line['other']:.4f} {line['difference']:+.4f} "
                    f"({line['standard_error']:.4f}); R@100 {line['recall'][0]:.4f} {line['recall'][1]:.4f}; terms per "
                    f"document {line['terms'][0]:.0f} {line['terms'][1]:.0f}",
                )
            mean = statistics.fmean(line["difference"] for line in mine)
            within = abs(mean) <= TOLERANCE
            verdict = "within" if within else "OVER"
            print(f"  mean difference over {len(mine)} seed(s): {mean:+.4f}, {verdict} {TOLERANCE}")
            held &= within or name == "control"
    for row in rows:
        if row["side"] == "start":
            print(
                f"{row['dataset']}, seed {row['seed']}: before training nDCG@10 {row[MEASURES[0]]:.4f}",
            )
    return held


def save(rows: Sequence[Mapping[str, Any]], output: Path, device: str) -> Path:
    """Merge the rows into ``<output>/<device>/effectiveness.csv``; nDCG@10 of every query goes to a
    JSON beside it.
    """
    import torch

    from tilefold.bench.results import collect, results_file, write_csv

    provenance = collect(torch.device(device))
    path = results_file(output, "effectiveness", provenance)
    write_csv(
        path,
        [{k: v for k, v in row.items() if k != "per_query"} for row in rows],
        provenance,
        CSV_KEY,
    )
    kept = [
        {k: row[k] for k in ("dataset", "precision", "seed", "side", "per_query")} for row in rows
    ]
    path.with_suffix(".json").write_text(json.dumps(kept), encoding="utf-8")
    return path


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; ``SystemExit`` with a usage line for wrong ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "--data",
        action="append",
        required=True,
        metavar="NAME=PATH",
        help="a BEIR folder; may be repeated",
    )
    add("--tokenizer", help="folder of the tokenizer of xlmr-small")
    add(
        "--backbone",
        action="append",
        default=[],
        metavar="NAME=BACKBONE",
        help="minilm, or xlmr-small (for jaquad)",
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add(
        "--precision",
        nargs="+",
        choices=("bf16", "fp32"),
        help="by default bf16 on cuda, fp32 on the CPU",
    )
    add("--device", choices=("cpu", "cuda"), help="by default the GPU if there is one")
    add("--steps", type=int, help="training steps, in place of those of the setting")
    add("--batch-size", type=int, help="pairs in a step, in place of those of the setting")
    add("--limit", type=int, help="cut collections to this many documents and queries, for a look")
    add(
        "--jobs",
        type=int,
        default=1,
        help="runs at a time, each in a process of its own on the one device",
    )
    add("--start", action="store_true", help="evaluate the models before training too")
    add(
        "--control",
        action="store_true",
        help="train the stock side twice, to see what the machine alone changes",
    )
    add("--output", type=Path, help="folder for <device>/effectiveness.csv")
    add(
        "--prepare",
        type=Path,
        metavar="FOLDER",
        help="write small copies of the data there, and stop",
    )
    add("--documents", type=int, default=3000, help="of a large collection that --prepare keeps")
    add(
        "--queries",
        type=int,
        default=2000,
        help="evaluation queries that --prepare keeps of a large collection",
    )
    arguments = parser.parse_args(argv)
    take_named(parser, arguments, ("data", "backbone"))
    return arguments


def main(argv: Sequence[str]) -> int:
    """Run as the arguments say; the exit code."""
    arguments = parse(argv)
    if arguments.prepare is not None:
        prepare(
            arguments.prepare,
            arguments.data,
            arguments.tokenizer,
            arguments.documents,
            arguments.queries,
        )
        return 0
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device not in (None, found):
        print(
            f"Error: --device {arguments.device}: torch trains on {found} here (see CUDA_VISIBLE_DEVICES).",
            file=sys.stderr,
        )
        return 2
    arguments.device = found
    arguments.precision = arguments.precision or ["bf16" if arguments.device == "cuda" else "fp32"]
    try:
        jobs = plan(arguments)
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    for job, row, reason in run_all(jobs, run_job, arguments.jobs):
        value = (
            f"nDCG@10 {row[MEASURES[0]]:.4f} in {row['seconds']:.0f} s"
            if row is not None
            else reason
        )
        print(f"[{time.monotonic() - started:5.0f} s] {job.name}: {value}", flush=True)
        if row is not None:
            rows.append(row)
            if (
                arguments.output is not None
            ):  # saved after every run, so that an interrupt keeps the finished ones
                path = save(rows, arguments.output, arguments.device)
    held = report(rows)
    if rows and arguments.output is not None:
        print(f"results: {path}")
    return 0 if held and len(rows) == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
