"""SPLADE with an XLM-R-sized vocabulary (V = 250,002) on one GPU: Japanese questions and
paragraphs, from nothing.

    python -m benchmarks.multilingual --tokenizer FOLDER --data FOLDER [--split dev] [--output benchmarks/results]
    python -m benchmarks.multilingual --tokenizer FOLDER --data FOLDER --seconds 180 --output benchmarks/results

No pretrained weights are needed: the start is :func:`benchmarks.fresh_lm.fresh_masked_lm`, which
matches tokens. An optional warm-up predicts masked tokens of the documents (`--warm-up-steps`),
then the pairs of the train split are learned with in-batch negatives and FLOPS penalties. Prints
nDCG@10 and recall@100 of the untrained start, after the warm-up, and after training, each with the
active terms of queries and documents, the time of the phase and the peak memory of the GPU. Rows
are saved as they are measured. The command exits with 1 if training does not beat the start.

With `--seconds`, the training has as many steps, up to those of `--epochs`, as fit into the time
that is left once the start was measured, some steps were timed, and the last evaluation is counted
as long as the first one. The learning rate falls to zero within these steps.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from benchmarks.fresh_lm import fresh_masked_lm
from benchmarks.masked_lm import predict_masked
from tilefold.bench.results import collect, results_file, write_csv
from tilefold.recipes import LsrRecipe, train
from tilefold.recipes._training import total_steps
from tilefold.recipes.lsr import RegularizerSpec
from tilefold.retrieval import (
    Collection,
    build_index,
    encode_collection,
    encode_queries,
    evaluate,
    hits_to_run,
    load_collection,
    read_vectors,
)
from tilefold.retrieval.evaluation import active_terms

MEASURES = ("nDCG@10", "R@100")
CSV_KEY = ("collection", "split", "vocabulary", "phase", "seed")
TIMED_STEPS, UNTIMED_STEPS = (
    30,
    10,
)  # of the training that measures the rate; kernels are built in the first ones
RESERVE = 0.85  # share of the time left that is planned with


def main(argv: Sequence[str]) -> int:
    """Start, warm-up, training; the exit code."""
    began = time.perf_counter()
    options = parse(argv)
    collection = shortened(load_collection(options.data), options.documents, options.split)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, local_files_only=True)
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row | {"command": command(argv)})
        print(
            f"{row['phase']:>8} nDCG@10 {row['ndcg10']:.4f} R@100 {row['recall100']:.4f}, terms of a query "
            f"{row['query_terms']:.0f}, of a document {row['document_terms']:.0f}, {row['steps']} steps, "
            f"{row['seconds']:.0f} s, peak {row['peak_mb']:.0f} MB",
            flush=True,
        )
        if options.output is not None:
            provenance = collect(torch.device(options.device))
            path = results_file(options.output, "multilingual", provenance)
            write_csv(path, rows, provenance, CSV_KEY)
            print(f"results: {path}", flush=True)

    with tempfile.TemporaryDirectory(prefix="tilefold-multilingual-") as name:
        work = Path(name)
        sizes = {"width": options.width, "layers": options.layers, "heads": options.heads}
        base = fresh_masked_lm(tokenizer, work / "start", seed=options.seed, **sizes)
        begin = time.perf_counter()
        keep(measured("start", options, collection, base, work, steps=0))
        again = time.perf_counter() - begin  # what loading, saving and evaluating take once more
        if options.warm_up_steps:
            begin = time.perf_counter()
            base = warm_up(base, work / "warm", collection, options)
            seconds = time.perf_counter() - begin
            keep(
                measured("warm-up", options, collection, base, work, steps=0)
                | {"seconds": seconds},
            )
        steps = options.steps
        if options.seconds is not None:
            steps = affordable_steps(
                options,
                collection,
                base,
                work,
                began + options.seconds - again,
            )
        keep(measured("trained", options, collection, base, work, steps=steps))
    return 0 if rows[-1]["ndcg10"] > rows[0]["ndcg10"] else 1


def command(argv: Sequence[str]) -> str:
    """What measures the same rows, wherever they are written."""
    at = argv.index("--output") if "--output" in argv else len(argv)
    return shlex.join(["python", "-m", "benchmarks.multilingual", *argv[:at], *argv[at + 2 :]])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "--tokenizer",
        required=True,
        help="folder of a tokenizer with a mask token, as that of XLM-R",
    )
    add("--data", required=True, help="a BEIR folder with a train split")
    add("--split", default="dev", help="judgements that are evaluated")
    add("--steps", type=int, help="training steps; by default --epochs decides")
    add("--epochs", type=float, default=2.0)
    add("--seconds", type=float, help="time of the whole command; steps are chosen to keep it")
    add("--warm-up-steps", type=int, default=0, help="steps of masked-token prediction before")
    add("--batch-size", type=int, default=64)
    add("--learning-rate", type=float, default=2e-4)
    add("--penalty", type=float, default=3e-3, help="weight of the FLOPS terms")
    add("--width", type=int, default=384)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=6)
    add("--max-length", type=int, default=384)
    add("--documents", type=int, help="this many documents alone, and the queries they answer")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=Path, help="folder for <device>/multilingual.csv")
    options = parser.parse_args(argv)
    if options.seconds is not None and options.steps is not None:
        parser.error("--steps and --seconds both say how long to train; give one of them")
    return options


def shortened(collection: Collection, count: int | None, split: str) -> Collection:
    """Half of so many documents from the answers of either split, with the judgements of those; all
    for None.
    """
    if count is None:
        return collection
    splits = {name: collection.split_qrels(name) for name in ("train", split)}
    names = set()
    for qrels in splits.values():
        names |= set(
            list(dict.fromkeys(name for row in qrels.values() for name in row))[: count // 2],
        )
    documents = {name: collection.documents[name] for name in sorted(names)}
    kept = {
        name: {query: row for query, row in qrels.items() if set(row) <= set(documents)}
        for name, qrels in splits.items()
    }
    queries = {query: collection.queries[query] for qrels in kept.values() for query in qrels}
    return Collection(collection.name, documents, queries, kept)


def recipe_of(options: argparse.Namespace, base: Path, steps: int | None) -> LsrRecipe:
    """SPLADE from `base` as the arguments say; without `steps`, the epochs decide."""
    penalty = RegularizerSpec(weight=options.penalty)
    return LsrRecipe(
        "multilingual",
        base_model=str(base),
        max_steps=steps,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        query_regularizer=penalty,
        document_regularizer=penalty,
        max_length=options.max_length,
        save_steps=1_000_000,
        save_minutes=1e6,
        seed=options.seed,
    )


def affordable_steps(
    options: argparse.Namespace,
    collection: Collection,
    base: Path,
    work: Path,
    deadline: float,
) -> int:
    """Steps that end by `deadline`, a value of ``time.perf_counter()``, at the rate of some steps
    that are timed here.

    Raises:
        ValueError: if not even one fits.
    """
    stamps: list[float] = []
    few = shortened(collection, 2 * TIMED_STEPS * options.batch_size, options.split)
    timed = recipe_of(options, base, TIMED_STEPS)
    train(timed, few, work / "model-timed", progress=lambda *_: stamps.append(time.perf_counter()))
    rate = (stamps[-1] - stamps[UNTIMED_STEPS - 1]) / (TIMED_STEPS - UNTIMED_STEPS)
    left = RESERVE * (deadline - time.perf_counter())  # kernels are built by now
    whole = total_steps(recipe_of(options, base, None), len(collection.pairs("train")))
    steps = min(whole, int(left / rate))
    if steps < 1:
        raise ValueError(
            f"--seconds: expected time for a step of {rate:.2f} s, got {left:.0f} s beside measuring and loading; "
            "give more, or smaller sizes.",
        )
    print(f"{rate * 1e3:.0f} ms a step: {steps} of {whole} steps fit into {left:.0f} s", flush=True)
    return steps


def measured(
    phase: str,
    options: argparse.Namespace,
    collection: Collection,
    base: Path,
    work: Path,
    steps: int | None,
) -> dict[str, Any]:
    """Train so many steps from `base`, encode, search exactly, evaluate; a row of the results."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()

    def progress(step: int, total: int, loss: float | None) -> None:
        if step % 50 == 0:
            print(f"{phase}: step {step} of {total}, loss {loss}", file=sys.stderr)

    result = train(
        recipe_of(options, base, steps),
        collection,
        work / f"model-{phase}",
        progress=progress,
    )
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else float("nan")
    return {
        "collection": collection.name,
        "split": options.split,
        "vocabulary": AutoTokenizer.from_pretrained(str(base), local_files_only=True).vocab_size,
        "phase": phase,
        "seed": options.seed,
        "steps": result.steps,
        "batch_size": options.batch_size,
        "max_length": options.max_length,
        "bf16": result.bf16,
        **scores(work / f"model-{phase}", collection, options, work / f"vectors-{phase}"),
        "seconds": seconds,
        "peak_mb": peak,
    }


def scores(
    folder: Path,
    collection: Collection,
    options: argparse.Namespace,
    vectors: Path,
) -> dict[str, float]:
    """Effectiveness and sparsity of a saved model."""
    from sentence_transformers import SparseEncoder

    from tilefold.integrations.sentence_transformers import accelerate

    model = SparseEncoder(str(folder), device=options.device, local_files_only=True)
    accelerate(model)
    encode_collection(model, collection.contents(), vectors)
    documents = read_vectors(vectors)
    queries = encode_queries(model, collection.split_queries(options.split))
    found = hits_to_run(queries, build_index(documents, "exact").search(queries, k=100))
    values = evaluate(found, collection.split_qrels(options.split), MEASURES)
    return {
        "ndcg10": values["nDCG@10"],
        "recall100": values["R@100"],
        "query_terms": active_terms(queries),
        "document_terms": active_terms(documents),
    }


def warm_up(base: Path, output: Path, collection: Collection, options: argparse.Namespace) -> Path:
    """Predict masked tokens of the documents."""
    tokenizer = AutoTokenizer.from_pretrained(str(base), local_files_only=True)
    model = AutoModelForMaskedLM.from_pretrained(str(base), local_files_only=True)
    predict_masked(
        model,
        tokenizer,
        list(collection.contents().values()),
        steps=options.warm_up_steps,
        batch_size=options.batch_size,
        max_length=options.max_length,
        learning_rate=options.learning_rate,
        device=options.device,
        seed=options.seed,
    )
    model.save_pretrained(str(output))
    tokenizer.save_pretrained(str(output))
    return output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
