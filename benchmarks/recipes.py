"""Train recipes of the catalogue, and measure each before and after: the table of docs/recipes.md.

    python -m benchmarks.recipes --data scifact=PATH --recipe all --processes 5 --output benchmarks/results
    python -m benchmarks.recipes --data scifact=PATH --recipe splade-v2 "splade-v2;learning_rate=1e-4" --seeds 0 1 2
    python -m benchmarks.recipes --data jaquad=PATH --base jaquad=xlmr-small --tokenizer PATH --recipe splade-v2

A recipe may carry fields of its own, ``name;field=value;field.field=value``. The start is the
untrained model of the same encoders; recipes that share it measure it once. Recipes that need
negatives or teachers get, in `--work`, the best documents of BM25 with the ensemble of BM25 and the
dense MiniLM. `--base` names the model of a collection or of a kind of recipe (`causal-lm`,
`multi-vector`); of `all`, recipes of causal models are left out without one. Rows are saved as they
end, each with its command.

`search_ms` is the time of one query on the exact index, one thread, without encoding; runs that
share a processor slow one another down. A multi-vector recipe reranks the 100 best documents of
BM25.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
DEPTH = 100
TERMS = (
    1024  # heaviest terms kept of a document, so that a model that is not sparse fits into memory
)


@dataclass(frozen=True)
class Job:
    """One run: ``"start"`` measures the untrained model, ``"train"`` trains and measures."""

    what: str
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
        """The recipe with the settings of the run."""
        name, *changes = self.recipe.split(";")
        fields: dict[str, Any] = {
            "max_steps": self.steps,
            "max_length": self.max_length,
            "seed": self.seed,
            "save_steps": 10**6,
            "save_minutes": 10**6,
        }
        if self.base:
            fields["base_model"] = self.base
        values = get_recipe(name, **fields).to_dict()
        for change in changes:
            _set(values, change)
        return type(RECIPES[name].recipe).from_dict(values)

    def start_key(self) -> str:
        """Equal for runs with the same untrained model."""
        values = self.config().to_dict()
        names = ("base_model", "max_length", "seed", "start_percentile", "dimension")
        key = {name: values.get(name) for name in names}
        sides = {"query": values.get("query"), "document": values.get("document")}
        return json.dumps({"data": self.data} | key | sides, sort_keys=True)

    def command(self) -> str:
        """What trains the same model by hand."""
        name, *changes = self.recipe.split(";")
        words = ["tilefold", "train", "--recipe", name, "--data", self.data, "--output", "MODEL"]
        words += [
            "--steps",
            str(self.steps),
            "--max-length",
            str(self.max_length),
            "--seed",
            str(self.seed),
        ]
        if self.base:
            words += ["--model", Path(self.base).name]
        if self.scores and _negatives(self.config()):
            words += ["--negatives", Path(self.scores).name]
        for change in changes:
            words += ["--set", change]
        return shlex.join(words)


def _set(values: dict[str, Any], change: str) -> None:
    path, _, word = change.partition("=")
    *parents, last = path.split(".")
    place = values
    for name in parents:
        place = place[name]
    try:
        place[last] = json.loads(word)
    except ValueError:
        place[last] = word


def _negatives(config: Config) -> int:
    return config.negatives if isinstance(config, LsrRecipe) else 0


def run_job(job: Job) -> dict[str, Any]:
    """Measures of one model; for a training also what the training took and said."""
    from tilefold.recipes import catalogue
    from tilefold.recipes.loading import quiet_libraries

    collection = with_splits(load_collection(job.path), job.limit)
    config = job.config()
    begin = time.monotonic()
    told: dict[str, Any] = {}
    with quiet_libraries():
        if job.what == "start":
            model = untrained(config, collection)
        else:
            folder = (
                Path(job.work) / "models" / f"{job.data}-{_slug(job.recipe)}-{job.steps}-{job.seed}"
            )
            negatives = job.scores if _negatives(config) else None
            result = catalogue.train(
                config,
                collection,
                folder,
                negatives=negatives,
                resume=False,
                overwrite=True,
            )
            told = {
                "loss": result.loss,
                "first_ranking_loss": result.first_ranking_loss,
                "ranking_loss": result.ranking_loss,
                "warnings": " ".join(result.warnings) + " ranking loss exploded" * result.exploded,
                "train_seconds": time.monotonic() - begin,
            }
            model = load(folder, config)
        measured = measure(model, config, collection)
    return measured | told


def untrained(config: Config, collection: Collection) -> Any:
    """The model that training starts from."""
    return config.start(list(collection.contents().values()))


def load(folder: Path, config: Config) -> Any:
    """A trained model as a user loads it."""
    if isinstance(config, ColbertRecipe):
        from sentence_transformers import MultiVectorEncoder

        return MultiVectorEncoder(str(folder), local_files_only=True)
    from tilefold.modules import load_encoder

    return load_encoder(str(folder), local_files_only=True)


def measure(model: Any, config: Config, collection: Collection) -> dict[str, Any]:
    """nDCG@10, recall, active terms and time per query on the evaluation split."""
    from tilefold.recipes.loading import fast_inference
    from tilefold.retrieval.evaluation.measures import evaluate

    split = evaluation_split(collection)
    queries, qrels = collection.split_queries(split), collection.split_qrels(split)
    with fast_inference():
        if isinstance(config, ColbertRecipe):
            run, extra = _late(model, collection, queries)
        else:
            run, extra = _sparse(model, collection, queries, config)
    return evaluate(run, qrels, MEASURES) | extra


def _sparse(
    model: Any,
    collection: Collection,
    queries: dict[str, str],
    config: Config,
) -> tuple[Any, dict[str, Any]]:
    import tempfile

    from tilefold.recipes.lsr import fused_head
    from tilefold.retrieval.encoding.sparse import encode_collection, encode_queries
    from tilefold.retrieval.evaluation.measures import active_terms
    from tilefold.retrieval.index import build_index, hits_to_run
    from tilefold.retrieval.vectors.sparse_files import read_vectors

    with fused_head(model, config.fused), tempfile.TemporaryDirectory() as folder:
        encode_collection(
            model,
            collection.contents(),
            folder,
            batch_size=64,
            shard_size=1 << 16,
            top_k=TERMS,
        )
        encoded = encode_queries(model, queries, batch_size=64)
        documents = read_vectors(folder)
    index = build_index(documents)
    begin = time.perf_counter()
    hits = index.search(encoded, DEPTH)
    milliseconds = 1e3 * (time.perf_counter() - begin) / len(queries)
    terms = {"query_terms": active_terms(encoded), "document_terms": active_terms(documents)}
    return hits_to_run(encoded, hits), terms | {"search_ms": milliseconds}


def _late(
    model: Any,
    collection: Collection,
    queries: dict[str, str],
) -> tuple[Any, dict[str, Any]]:
    from tilefold.retrieval.encoding.tokens import encode_texts
    from tilefold.retrieval.index.bm25 import BM25Index
    from tilefold.retrieval.search.reranking import rerank

    contents = collection.contents()
    candidates = BM25Index.build(contents).search(queries, DEPTH)
    wanted = {
        name: contents[name]
        for name in dict.fromkeys(name for row in candidates.values() for name in row)
    }
    asked = encode_texts(model, queries, kind="query", batch_size=64)
    tokens = encode_texts(model, wanted, kind="document", batch_size=64)
    begin = time.perf_counter()
    run = rerank(candidates, asked, tokens)
    return run, {"search_ms": 1e3 * (time.perf_counter() - begin) / len(queries)}


def _slug(recipe: str) -> str:
    return "".join(mark if mark.isalnum() or mark in "-." else "_" for mark in recipe)


def entry_of(recipe: str) -> Entry:
    """The entry of ``name;field=value``."""
    return RECIPES[recipe.partition(";")[0]]


def chosen(options: argparse.Namespace) -> list[str]:
    """The recipes that were asked for."""
    if options.recipe != ["all"]:
        return list(options.recipe)
    return [
        name
        for name, entry in RECIPES.items()
        if entry.base != "causal-lm" or entry.base in options.base
    ]


def plan(options: argparse.Namespace, scores: dict[str, str], bases: dict[str, str]) -> list[Job]:
    """Starts first, one for each distinct untrained model, then the trainings with the longest
    first.
    """
    trainings = [
        Job(
            "train",
            name,
            data,
            path,
            bases.get(entry_of(name).base, bases.get(data, "")),
            seed,
            options.steps,
            options.max_length,
            scores.get(data),
            str(options.work),
            options.limit,
        )
        for data, path in options.data.items()
        for name in chosen(options)
        for seed in options.seeds
    ]
    trainings.sort(key=lambda job: -_negatives(job.config()))
    starts = {job.start_key(): Job(**vars(job) | {"what": "start"}) for job in trainings}
    return [*starts.values(), *trainings]


def row_of(job: Job, end: dict[str, Any], start: dict[str, Any] | None) -> dict[str, Any]:
    """A line of the CSV."""
    entry = entry_of(job.recipe)
    shown = ("nDCG@10", "R@100", "query_terms", "document_terms")
    return {
        "data": job.data,
        "recipe": job.recipe,
        "base": Path(job.base).name or "minilm",
        "steps": job.steps,
        "seed": job.seed,
        **{f"start_{name}": (start or {}).get(name) for name in shown},
        **{name: end.get(name) for name in shown},
        "search_ms": end.get("search_ms"),
        **{
            name: end.get(name)
            for name in ("loss", "first_ranking_loss", "ranking_loss", "train_seconds")
        },
        "paper": entry.paper,
        "publishes": entry.publishes,
        "warnings": (end.get("warnings") or "").strip(),
        "command": job.command(),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; ``SystemExit`` with a usage line for wrong ones."""
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
    add("--teacher", default="minilm", help="dense model beside BM25; none for BM25 alone")
    add("--language", default="english", help="of BM25; none for scripts without spaces")
    add("--limit", type=int, help="cut collections to this many documents and queries, for a look")
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
    """Teacher scores where a recipe needs them, and the folders of the base models."""
    from benchmarks.recipes_data import make_scores
    from benchmarks.small_xlmr import small_xlmr

    need = any("negatives" in entry_of(name).needs for name in chosen(options))
    scores: dict[str, str] = {}
    bases: dict[str, str] = dict(options.base)
    for data, path in options.data.items():
        if bases.get(data) == "xlmr-small":
            folder = options.work / "xlmr-small"
            bases[data] = str(small_xlmr(folder, str(options.tokenizer), options.max_length, 0))
        file = options.work / f"{data}-scores.parquet"
        if need:
            collection = with_splits(load_collection(path), options.limit)
            scores[data] = str(
                make_scores(
                    collection,
                    file,
                    options.candidates,
                    options.language,
                    options.teacher,
                ),
            )
    return scores, bases


def main(argv: Sequence[str]) -> int:
    """Run as the arguments say; the exit code is 1 if a run failed."""
    options = parse(argv)
    begin = time.monotonic()
    scores, bases = prepare(options)
    print(f"[{time.monotonic() - begin:5.0f} s] prepared", flush=True)
    jobs = plan(options, scores, bases)
    starts: dict[str, dict[str, Any]] = {}
    ends: dict[Job, dict[str, Any]] = {}
    failed = 0
    for job, found, reason in run_all(jobs, run_job, options.processes):
        value = (
            reason
            if found is None
            else f"nDCG@10 {found['nDCG@10']:.4f}, R@100 {found['R@100']:.4f}"
        )
        if found is not None and "document_terms" in found:
            value += f", terms {found['query_terms']:.0f} and {found['document_terms']:.0f}"
        print(
            f"[{time.monotonic() - begin:5.0f} s] {job.data}, {job.recipe}, seed {job.seed}, "
            f"{job.what}: {value}",
        )
        sys.stdout.flush()
        if found is None:
            failed += 1
        elif job.what == "start":
            starts[job.start_key()] = found
        else:
            ends[job] = found
        if options.output is not None and ends:
            save(
                [row_of(job, end, starts.get(job.start_key())) for job, end in ends.items()],
                options.output,
            )
    return 1 if failed else 0


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
