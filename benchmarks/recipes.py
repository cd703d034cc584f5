r"""Train recipes of the catalogue, and measure each before and after.

benchmarks/notes/recipes.md has the table.

    python -m benchmarks.recipes --data scifact=PATH --recipe all --processes 5 \
        --output benchmarks/results
    python -m benchmarks.recipes --data scifact=PATH --seeds 0 1 2 \
        --recipe splade-v2 "splade-v2;learning_rate=1e-4"
    python -m benchmarks.recipes --data jaquad=PATH --base jaquad=xlmr-small --tokenizer PATH \
        --recipe splade-v2

A recipe may have changed fields, ``name;field=value;field.field=value``. Recipes that need
negatives or teachers get the best documents of BM25 with the scores of BM25 and the dense MiniLM,
which are saved in `--work`. `--base` names the model of a collection or of a kind of recipe
(`causal-lm`, `multi-vector`). Without one, `all` leaves out recipes of causal models. Rows are
saved as they end,
each with its command.

Measured: nDCG@10 and recall at 100 on the evaluation split, active terms, and `search_ms`: the time
of one query on the exact index with one thread, without encoding. Runs that share a processor slow
one another down. A multi-vector recipe reranks the 100 best documents of BM25.

Baseline: the untrained model of the same encoders, measured once for all recipes that share it.

Gate: none. Warnings of the training are a column, and a run that fails has no row.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.collection_splits import evaluation_split, with_splits
from benchmarks.runs import run_all, take_named
from tilefold.recipes.catalogue import RECIPES, Config, Entry, get_recipe
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.lsr import LsrRecipe
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.data.datasets import load_collection

MEASURES = ("nDCG@10", "R@100")
CSV_KEY = ("data", "recipe", "base", "steps", "seed")
# documents of a run, and those that a multi-vector model reranks
DEPTH = 100
# heaviest terms of a document that are stored, so that a model that is not sparse fits into memory
MAX_TERMS = 1024
# more than any run has, so that nothing is saved before its end
NEVER = 10**6


@dataclass(frozen=True)
class Job:
    """One run of a recipe.

    Attributes:
        kind: ``"start"`` to measure the untrained model, ``"train"`` to train and measure.
        recipe: the name of the recipe, with ``;field=value`` for each changed field.
        data: the name of the collection.
        path: its BEIR folder.
        base: folder or name of the base model, or ``""`` for that of the recipe.
        seed: the seed of the training.
        steps: the number of steps.
        max_length: the tokens of a text that are read.
        scores: the file with negatives and teachers' scores, or None.
        work: the folder for trained models.
        limit: the number of documents and queries to reduce the collection to, or None.
    """

    kind: str
    recipe: str
    data: str
    path: str
    base: str
    seed: int
    steps: int
    max_length: int
    scores: str | None
    work: str
    limit: int | None

    def config(self) -> Config:
        """Return the recipe with the settings of the run."""
        name, *changes = self.recipe.split(";")
        fields: dict[str, Any] = {
            "max_steps": self.steps,
            "max_length": self.max_length,
            "seed": self.seed,
            "save_steps": NEVER,
            "save_minutes": NEVER,
        }
        if self.base:
            fields["base_model"] = self.base
        values = get_recipe(name, **fields).to_dict()
        for change in changes:
            _apply_change(values, change)
        return type(RECIPES[name].recipe).from_dict(values)

    def start_key(self) -> str:
        """Return a key that is equal for runs with the same untrained model."""
        values = self.config().to_dict()
        fields = ("base_model", "max_length", "seed", "start_percentile", "dimension")
        key = {name: values.get(name) for name in fields}
        key["data"] = self.data
        key["query"] = values.get("query")
        key["document"] = values.get("document")
        return json.dumps(key, sort_keys=True)

    def command(self) -> str:
        """Return the command line that trains the same model."""
        name, *changes = self.recipe.split(";")
        words = ["tilefold", "train", "--recipe", name, "--data", self.data, "--output", "MODEL"]
        words += ["--steps", str(self.steps)]
        words += ["--max-length", str(self.max_length)]
        words += ["--seed", str(self.seed)]
        if self.base:
            words += ["--model", Path(self.base).name]
        if self.scores and _n_negatives(self.config()):
            words += ["--negatives", Path(self.scores).name]
        for change in changes:
            words += ["--set", change]
        return shlex.join(words)


def _apply_change(values: dict[str, Any], change: str) -> None:
    """Set a field of a recipe.

    Args:
        values: the recipe as nested dictionaries.
        change: ``field=value`` or ``field.field=value``, with a JSON value or a string.
    """
    path, _, text = change.partition("=")
    *parents, field = path.split(".")
    for parent in parents:
        values = values[parent]
    try:
        values[field] = json.loads(text)
    except ValueError:
        values[field] = text


def _n_negatives(config: Config) -> int:
    """Return the number of negatives of a training row of a recipe."""
    return config.negatives if isinstance(config, LsrRecipe) else 0


def run_job(job: Job) -> dict[str, Any]:
    """Run a job, and return its measures, for a training also its losses, time and warnings."""
    from tilefold.recipes.loading import quiet_libraries

    collection = with_splits(load_collection(job.path), job.limit)
    config = job.config()
    with quiet_libraries():
        if job.kind == "start":
            model = config.build_model(list(collection.contents().values()))
            return measure(model, config, collection)
        folder = (
            Path(job.work) / "models" / f"{job.data}-{_slug(job.recipe)}-{job.steps}-{job.seed}"
        )
        training = train(job, config, collection, folder)
        return {**measure(load(folder, config), config, collection), **training}


def train(job: Job, config: Config, collection: Collection, folder: Path) -> dict[str, Any]:
    """Train a model, and return the losses, the warnings and the seconds.

    Args:
        job: the run.
        config: its recipe.
        collection: the collection.
        folder: the folder for the model.
    """
    from tilefold.recipes import catalogue

    begin = time.monotonic()
    result = catalogue.train(
        config,
        collection,
        folder,
        negatives=job.scores if _n_negatives(config) else None,
        resume=False,
        overwrite=True,
    )
    warnings = list(result.warnings)
    if result.exploded:
        warnings.append("ranking loss exploded")
    return {
        "loss": result.loss,
        "first_ranking_loss": result.first_ranking_loss,
        "ranking_loss": result.ranking_loss,
        "warnings": " ".join(warnings),
        "train_seconds": time.monotonic() - begin,
    }


def load(folder: Path, config: Config) -> Any:
    """Load a trained model as a user does.

    Args:
        folder: the folder of the model.
        config: the configuration of the recipe.
    """
    if isinstance(config, ColbertRecipe):
        from sentence_transformers import MultiVectorEncoder

        return MultiVectorEncoder(str(folder), local_files_only=True)
    from tilefold.modules import load_encoder

    return load_encoder(str(folder), local_files_only=True)


def measure(model: Any, config: Config, collection: Collection) -> dict[str, Any]:
    """Evaluate a model on the evaluation split.

    Args:
        model: the model.
        config: the configuration of the recipe.
        collection: the collection.

    Returns:
        nDCG@10, recall, milliseconds per query, and for sparse models active terms.
    """
    from tilefold._internal.precision import computing_in
    from tilefold.retrieval.evaluation.measures import evaluate

    split = evaluation_split(collection)
    queries = collection.split_queries(split)
    with computing_in(model, "auto"):
        if isinstance(config, ColbertRecipe):
            run, cells = _rerank(model, collection, queries)
        else:
            run, cells = _search_sparse(model, collection, queries, config)
    return {**evaluate(run, collection.split_qrels(split), MEASURES), **cells}


def _search_sparse(
    model: Any,
    collection: Collection,
    queries: dict[str, str],
    config: Config,
) -> tuple[Any, dict[str, Any]]:
    """Encode a collection and its queries, and search an exact index.

    Returns:
        The run, and cells with active terms and the time of a query.
    """
    import tempfile

    from tilefold.recipes.lsr import fused_head
    from tilefold.retrieval.encoding.sparse import encode_collection, encode_queries
    from tilefold.retrieval.evaluation.measures import active_terms
    from tilefold.retrieval.index import build_index, hits_to_run
    from tilefold.retrieval.vectors.sparse_files import read_vectors

    head = fused_head(model) if config.fused else nullcontext()
    with head, tempfile.TemporaryDirectory() as folder:
        encode_collection(
            model,
            collection.contents(),
            folder,
            batch_size=64,
            shard_size=1 << 16,
            top_k=MAX_TERMS,
        )
        query_vectors = encode_queries(model, queries, batch_size=64)
        document_vectors = read_vectors(folder)
    index = build_index(document_vectors)
    begin = time.perf_counter()
    hits = index.search(query_vectors, DEPTH)
    seconds = time.perf_counter() - begin
    cells = {
        "query_terms": active_terms(query_vectors),
        "document_terms": active_terms(document_vectors),
        "search_ms": 1e3 * seconds / len(queries),
    }
    return hits_to_run(query_vectors, hits), cells


def _rerank(
    model: Any,
    collection: Collection,
    queries: dict[str, str],
) -> tuple[Any, dict[str, Any]]:
    """Rerank the best documents of BM25 with a multi-vector model.

    Returns:
        The run, and a cell with the time of reranking for a query.
    """
    from tilefold.retrieval.encoding.tokens import encode_texts
    from tilefold.retrieval.index.bm25 import BM25Index
    from tilefold.retrieval.search.reranking import rerank

    contents = collection.contents()
    candidates = BM25Index.build(contents).search(queries, DEPTH)
    candidate_texts: dict[str, str] = {}
    for scores in candidates.values():
        for document in scores:
            candidate_texts[document] = contents[document]
    query_vectors = encode_texts(model, queries, kind="query", batch_size=64)
    document_vectors = encode_texts(model, candidate_texts, kind="document", batch_size=64)
    begin = time.perf_counter()
    run = rerank(candidates, query_vectors, document_vectors)
    seconds = time.perf_counter() - begin
    return run, {"search_ms": 1e3 * seconds / len(queries)}


def _slug(recipe: str) -> str:
    """Return a recipe as a part of a folder's name."""
    return "".join(mark if mark.isalnum() or mark in "-." else "_" for mark in recipe)


def entry_of(recipe: str) -> Entry:
    """Return the entry of the catalogue for ``name;field=value``."""
    name, *_ = recipe.split(";")
    return RECIPES[name]


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the recipes to run: those of `--recipe`, or all that have a base model."""
    if options.recipe != ["all"]:
        return list(options.recipe)
    return [
        name
        for name, entry in RECIPES.items()
        if entry.base != "causal-lm" or entry.base in options.base
    ]


def plan(options: argparse.Namespace, scores: dict[str, str], bases: dict[str, str]) -> list[Job]:
    """Return all jobs: first the evaluation of each untrained model, then the trainings.

    Jobs of kind ``start`` evaluate an untrained model, once for all trainings that begin with it.
    The trainings with most negatives are first, since they take longest.

    Args:
        options: the options of the command line.
        scores: the files with teachers' scores, by collection.
        bases: base models, by kind of recipe or by collection.
    """
    trainings = []
    for data, path in options.data.items():
        for recipe in chosen(options):
            base = bases.get(entry_of(recipe).base, bases.get(data, ""))
            for seed in options.seeds:
                job = Job(
                    kind="train",
                    recipe=recipe,
                    data=data,
                    path=path,
                    base=base,
                    seed=seed,
                    steps=options.steps,
                    max_length=options.max_length,
                    scores=scores.get(data),
                    work=str(options.work),
                    limit=options.limit,
                )
                trainings.append(job)
    trainings.sort(key=lambda job: -_n_negatives(job.config()))
    starts = {job.start_key(): replace(job, kind="start") for job in trainings}
    return [*starts.values(), *trainings]


def row_of(job: Job, end: dict[str, Any], start: dict[str, Any] | None) -> dict[str, Any]:
    """Return the row of a training.

    Args:
        job: the training.
        end: the results of the trained model.
        start: the results of the untrained model, or None if they are not there (yet).
    """
    entry = entry_of(job.recipe)
    compared = ("nDCG@10", "R@100", "query_terms", "document_terms")
    row: dict[str, Any] = {
        "data": job.data,
        "recipe": job.recipe,
        "base": Path(job.base).name or "minilm",
        "steps": job.steps,
        "seed": job.seed,
    }
    for name in compared:
        row[f"start_{name}"] = None if start is None else start.get(name)
    for name in (
        *compared,
        "search_ms",
        "loss",
        "first_ranking_loss",
        "ranking_loss",
        "train_seconds",
    ):
        row[name] = end.get(name)
    row["paper"] = entry.paper
    row["publishes"] = entry.publishes
    row["warnings"] = (end.get("warnings") or "").strip()
    row["command"] = job.command()
    return row


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; wrong arguments end the program with a usage line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--recipe", nargs="+", default=["all"], help="names, with ;field=value, or all")
    add(
        "--data",
        action="append",
        required=True,
        metavar="NAME=PATH",
        help="a BEIR folder; may be repeated",
    )
    add(
        "--base",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="folder of a model, or xlmr-small",
    )
    add("--tokenizer", help="folder of the tokenizer of xlmr-small")
    add("--seeds", nargs="+", type=int, default=[0])
    add("--steps", type=int, default=300)
    add("--max-length", type=int, default=256)
    add(
        "--candidates",
        type=int,
        default=50,
        help="documents that BM25 mines for each training query",
    )
    add("--teacher", default="minilm", help="dense model in addition to BM25; none for BM25 alone")
    add("--language", default="english", help="of BM25; none for scripts without spaces")
    add("--limit", type=int, help="reduce collections to this many documents and queries")
    add(
        "--processes",
        type=int,
        default=1,
        help="runs at a time, each in a process of its own on the one device",
    )
    add(
        "--work",
        type=Path,
        default=Path("recipes-work"),
        help="folder for teacher scores and models",
    )
    add("--output", type=Path, help="folder for <device>/recipes.csv")
    options = parser.parse_args(argv)
    take_named(parser, options, ("data", "base"))
    unknown = {name.partition(";")[0] for name in options.recipe} - {"all", *RECIPES}
    if unknown:
        parser.error(f"--recipe must be of {', '.join(RECIPES)}, got {', '.join(sorted(unknown))}")
    return options


def prepare(options: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Make teachers' scores, if a recipe needs them, and the model xlmr-small.

    Returns:
        Files with scores by collection, and base models by kind of recipe or collection.
    """
    from benchmarks.recipes_data import make_scores
    from benchmarks.small_xlmr import small_xlmr

    needs_scores = any("negatives" in entry_of(name).needs for name in chosen(options))
    scores: dict[str, str] = {}
    bases: dict[str, str] = dict(options.base)
    for data, path in options.data.items():
        if bases.get(data) == "xlmr-small":
            folder = options.work / "xlmr-small"
            bases[data] = str(small_xlmr(folder, str(options.tokenizer), options.max_length, 0))
        if needs_scores:
            file = make_scores(
                with_splits(load_collection(path), options.limit),
                options.work / f"{data}-scores.parquet",
                options.candidates,
                options.language,
                options.teacher,
            )
            scores[data] = str(file)
    return scores, bases


def main(argv: Sequence[str]) -> int:
    """Run all jobs, and save every row when it is measured.

    Returns:
        The exit code: 1 if a run failed.
    """
    options = parse(argv)
    begin = time.monotonic()
    scores, bases = prepare(options)
    print(f"[{time.monotonic() - begin:5.0f} s] prepared", flush=True)
    jobs = plan(options, scores, bases)
    starts: dict[str, dict[str, Any]] = {}
    ends: dict[Job, dict[str, Any]] = {}
    n_failed = 0
    for job, result, error in run_all(jobs, run_job, options.processes):
        print(
            f"[{time.monotonic() - begin:5.0f} s] {job.data}, {job.recipe}, seed {job.seed}, "
            f"{job.kind}: {describe(result, error)}",
            flush=True,
        )
        if result is None:
            n_failed += 1
        elif job.kind == "start":
            starts[job.start_key()] = result
        else:
            ends[job] = result
        if options.output is not None and ends:
            rows = [row_of(job, end, starts.get(job.start_key())) for job, end in ends.items()]
            save(rows, options.output)
    return 1 if n_failed else 0


def describe(result: dict[str, Any] | None, error: str) -> str:
    """Return the result of a job in words, or its error if it has no result."""
    if result is None:
        return error
    text = f"nDCG@10 {result['nDCG@10']:.4f}, R@100 {result['R@100']:.4f}"
    if "document_terms" in result:
        text += f", terms {result['query_terms']:.0f} and {result['document_terms']:.0f}"
    return text


def save(rows: Sequence[dict[str, Any]], output: Path) -> Path:
    """Merge the rows into ``<output>/<device>/recipes.csv``."""
    import torch

    from tilefold.bench.results import collect, results_file, write_csv

    provenance = collect(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    path = results_file(output, "recipes", provenance)
    write_csv(path, rows, provenance, CSV_KEY)
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
