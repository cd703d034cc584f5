"""``tilefold demo``: train, index, search and evaluate a sparse retriever on this machine, with no
download.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tilefold import retrieval
from tilefold._internal.files import write_json
from tilefold.cli import _common, _models
from tilefold.cli import _demo_steps as steps
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._demo_steps import DEPTH, DOCUMENT_TERMS, EXAMPLE, NDCG, RECALL, Size, Tokens
from tilefold.cli._options import Options, option
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.errors import MissingPackageError

ANSWERS = 3
SYSTEMS = (
    "BM25",
    "dense zero-shot (all-MiniLM-L6-v2)",
    "SPLADE (trained here)",
    "fusion",
    "SPLADE + late interaction",
)
ERRORS = 2.0  # a difference of fewer standard errors may be chance


@dataclass(frozen=True, kw_only=True)
class DemoRequest(Options):
    """Options of ``tilefold demo``."""

    minutes: Annotated[
        float | None,
        option(
            "The largest of four sizes, meant for 3, 5, 10 and 15 minutes on two cores; by default "
            "5.",
        ),
    ] = None
    full: Annotated[
        bool,
        option(
            "Everything at full size: 6 to 30 minutes on 2 cores, depending on the CPU.",
            "--full",
        ),
    ] = False
    quick: Annotated[
        bool,
        option(
            "The same as --minutes 3.",
            "--quick",
        ),
    ] = False
    seed: Annotated[
        int,
        option(
            "Equal seeds and sizes give equal models.",
        ),
    ] = 0
    output: Annotated[
        Path,
        option(
            "Folder for all files of the demo.",
        ),
    ] = _common.DEMO_DIR
    as_json: Annotated[
        bool,
        option(
            "The results as JSON on stdout.",
            "--json",
        ),
    ] = False


def demo(request: DemoRequest) -> None:
    """Train, index, search and evaluate a sparse retriever on the documentation of this Python.

    Runs offline on a CPU. A second run reuses the results of the first; an interrupted run is
    resumed.

    Example:
        tilefold demo --minutes 3
    """
    size = _asked_size(request.minutes, request.full, request.quick)
    if not 0 <= request.seed < 2**32:
        raise UsageError(
            f"--seed: expected a whole number of at least 0 and below 2^32, got {request.seed}.",
        )
    if request.output.is_file():
        raise UsageError(f"--output: expected a folder, got the file {request.output}.")
    request.output.mkdir(parents=True, exist_ok=True)
    started, stages = time.monotonic(), dict[str, dict[str, Any]]()
    try:
        results = _run(size, request.seed, request.output, stages)
    except MissingPackageError as error:
        raise CommandError(
            f'{_common.first_line(error)} (everything: pip install "tilefold[demo]")',
        ) from error
    results |= {"seconds": time.monotonic() - started, "stages": stages, "seed": request.seed}
    record = {
        "folder": Path(results["model"]).parent.name,
        "query_terms": steps.QUERY_TERMS,
        "results": results,
    }
    write_json(request.output / "demo.json", record)
    (_common.print_json if request.as_json else print_report)(results)


def _asked_size(minutes: float | None, full: bool, quick: bool) -> Size:
    if sum((minutes is not None, full, quick)) > 1:
        raise UsageError("--minutes, --full and --quick exclude one another: give one of them.")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UsageError(f"--minutes: expected a number above 0, got {minutes:g}.")
    if full:
        return steps.FULL
    most, sizes = minutes or (3.0 if quick else 5.0), steps.SIZES
    return sizes[max((limit for limit in sizes if limit <= most), default=min(sizes))]


@contextmanager
def _step(stages: dict[str, Any], name: str, text: str) -> Iterator[dict[str, Any]]:
    """Print what begins, and afterwards its time; yields a record that takes what it ``found``, and
    if it was kept.
    """
    started = time.monotonic()
    note(f"{text} ...")
    told: dict[str, Any] = {"found": "", "reused": False}
    yield told
    seconds = time.monotonic() - started
    stages[name] = {"seconds": seconds, "reused": told["reused"]}
    note(
        "  "
        f"{told['found']}{', ' * bool(told['found'])}{'reused' if told['reused'] else f'{seconds:.1f} s'}",
    )


def _answers(system: str, collection: Collection, run: Run) -> None:
    """Print the first documents for the example query."""
    titles = [
        collection.documents[name].title or name for name in list(run[steps.EXAMPLE_ID])[:ANSWERS]
    ]
    note(f'  {system} answers "{EXAMPLE}": {", ".join(titles) or "nothing"}')


def _run(size: Size, seed: int, output: Path, stages: dict[str, Any]) -> dict[str, Any]:
    """All stages; the results."""
    from tilefold.recipes import train

    _common.kept.append(lambda: any(output.glob("*/data")))
    with _step(stages, "collection", "collection: the documentation of this Python") as told:
        everything = _common.load_data("pydocs", output / "data")
        part = steps.take(steps.split(everything, size), size.documents)
        pairs = ", ".join(f"{len(grades)} {split}" for split, grades in part.qrels.items())
        told["found"] = (
            f"{len(part.documents)} of {len(everything.documents)} documents; queries: {pairs}"
        )
    folder = steps.folder_of(
        output,
        size,
        seed,
        texts_digest({**everything.contents(), **everything.queries}),
    )
    if (folder / "data").is_dir():
        note(f"resuming an earlier run in {folder} (delete that folder to start over)")
    part.save_beir(folder / "data", overwrite=True)
    queries = part.split_queries("test") | part.split_queries("dev") | {steps.EXAMPLE_ID: EXAMPLE}
    with _step(stages, "bm25", "searching: BM25"):
        bm25: Run = retrieval.BM25Index.build(part.contents(), identifiers=True).search(
            queries,
            DEPTH,
        )
    _answers("BM25", part, bm25)
    with _step(
        stages,
        "dense",
        f"dense zero-shot, and token vectors: {len(part.documents)} documents",
    ) as told:
        dense, tokens, told["reused"] = steps.zero_shot(output, part, queries, size.dense_length)
        told["found"] = (
            f"{tokens[1].manifest.n_tokens:,} token vectors in {tokens[1].manifest.storage}"
        )
    _answers("dense", part, dense)
    title = f"training SPLADE with the fused head: {size.steps} steps of {size.batch_size} pairs"
    with _step(stages, "training", title) as told, _common.progress_bar("  training") as tick:
        trained = train(steps.make_recipe(size, seed), part, folder / "model", progress=tick)
        resumed = (
            f", from step {trained.resumed_from}"
            if trained.resumed_from and not trained.reused
            else ""
        )
        told["found"] = f"{trained.steps} steps, {'bf16' if trained.bf16 else 'fp32'}{resumed}"
        told["reused"] = trained.reused
    results = _evaluate(folder, part, queries, (bm25, dense), tokens, stages)
    late_weight = results["late_interaction"]["weights"]["maxsim"]
    return results | {
        "model": str(folder / "model"),
        "commands": commands(folder, size, seed, late_weight),
    }


def _evaluate(
    folder: Path,
    part: Collection,
    queries: dict[str, str],
    first: tuple[Run, Run],
    tokens: Tokens,
    stages: dict[str, Any],
) -> dict[str, Any]:
    """Search with the trained model, fuse and rerank, with weights chosen on held-out queries; the
    figures.
    """
    from tilefold.retrieval.evaluation.measures import choose_weights

    encoder = _models.load_encoder(str(folder / "model"))
    with _step(
        stages,
        "encoding",
        f"encoding the documents: {len(part.documents)} documents",
    ) as told:
        stored = folder / "vectors"
        told["reused"] = steps.encode(
            retrieval.encode_collection,
            encoder,
            part,
            stored,
            top_k=DOCUMENT_TERMS,
        )
        vectors = retrieval.read_vectors(stored)
        told["found"] = f"{len(vectors)} vectors"
    indexes: dict[str, Any] = {}
    with _step(stages, "indexing", "indexing") as told:
        for backend, name in (("exact", "index"), ("seismic", "index-seismic")):
            try:
                indexes[backend] = retrieval.build_index(vectors, backend)
                indexes[backend].save(folder / name, overwrite=True)
            except MissingPackageError as error:
                note(f"  {backend} index left out: {_common.first_line(error)}")
        told["found"] = " and ".join(indexes)
    with _step(stages, "searching", "searching: SPLADE"):
        encoded = retrieval.encode_queries(encoder, queries, top_k=steps.QUERY_TERMS)
        found = {
            name: retrieval.hits_to_run(encoded, index.search(encoded, DEPTH))
            for name, index in indexes.items()
        }
    _answers("SPLADE", part, found["exact"])
    runs, splade, dev = (*first, found["exact"]), found["exact"], part.qrels["dev"]
    with _step(stages, "fusion", "choosing fusion weights on held-out training queries"):
        weights, _ = choose_weights(runs, dev, measure=NDCG, k=DEPTH)
        fused = retrieval.interpolate(runs, weights, k=DEPTH)
    with _step(
        stages,
        "reranking",
        "reranking by late interaction; its weight is chosen on the same queries",
    ):
        late = retrieval.rerank(splade, *tokens, depth=steps.RERANKED, tail="drop")
        late_weights, _ = choose_weights((splade, late), dev, measure=NDCG, k=DEPTH)
        reranked = retrieval.interpolate((splade, late), late_weights, k=DEPTH)
    mixed = dict(zip(("splade", "maxsim"), late_weights, strict=True))
    results = figures(
        dict(zip(SYSTEMS, (*runs, fused, reranked), strict=True)),
        part.qrels["test"],
    ) | {
        "active_terms": {
            "queries": retrieval.active_terms(encoded),
            "documents": retrieval.active_terms(vectors),
        },
        "documents": len(part.documents),
        "fusion_weights": dict(zip(("bm25", "dense", "splade"), weights, strict=True)),
        "late_interaction": {
            "candidates": steps.RERANKED,
            "weights": mixed,
            "tokens": str(tokens[1].folder),
        },
    }
    if "seismic" in found:
        results["seismic_overlap_at_10"] = steps.overlap(splade, found["seismic"])
    return results


def figures(runs: dict[str, Run], qrels: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Means with standard errors of every system, and the paired differences that the demo reports."""
    measures = (NDCG, RECALL)
    tables = {
        name: retrieval.evaluate_per_query(run, qrels, measures) for name, run in runs.items()
    }
    systems: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        means = {
            each: retrieval.mean_of([row[each] for row in table.values()], resamples=99)
            for each in measures
        }
        systems[name] = {each: found.mean for each, found in means.items()}
        systems[name]["standard_error"] = means[NDCG].standard_error or 0.0
    bm25, dense, splade, fusion, late = runs
    best = max((bm25, dense, splade), key=lambda name: systems[name][NDCG])
    comparisons = []
    for system, over in ((splade, bm25), (splade, dense), (fusion, best), (late, splade)):
        pairs = zip(tables[system].values(), tables[over].values(), strict=True)
        found = retrieval.mean_of(
            [mine[NDCG] - theirs[NDCG] for mine, theirs in pairs],
            resamples=99,
        )
        row = {"system": system, "over": over, "difference": found.mean, "queries": len(qrels)}
        comparisons.append(row | {"standard_error": found.standard_error or 0.0})
    return {"queries": len(qrels), "systems": systems, "comparisons": comparisons}


def difference_line(row: dict[str, Any]) -> str:
    """The line that the user reads about a paired difference."""
    difference, error = row["difference"], row["standard_error"]
    line = f"{row['system']} over {row['over']}: {difference:+.3f} ± {error:.3f}"
    if abs(difference) <= ERRORS * error:
        return f"{line} (no more than {ERRORS:.0f} standard errors: it may be chance)"
    return f"{line} ({abs(difference) / error:.1f} standard errors)" if error else line


def print_report(results: dict[str, Any]) -> None:
    """Print the tables, and commands to try next, on stdout."""
    late, active, rows = results["late_interaction"], results["active_terms"], []
    weights = (results["fusion_weights"], late["weights"])
    fusion, mixed = (", ".join(f"{weight:.1f}" for weight in of.values()) for of in weights)
    labels = {
        SYSTEMS[3]: f"fusion ({fusion})",
        SYSTEMS[
            4
        ]: f"SPLADE + late interaction on its top {late['candidates']}, zero-shot MiniLM tokens ({mixed})",
    }
    for name, scores in results["systems"].items():
        terms = [
            f"{active[kind]:.0f}" if name == SYSTEMS[2] else "" for kind in ("queries", "documents")
        ]
        ndcg = f"{scores[NDCG]:.3f} ± {scores['standard_error']:.3f}"
        rows.append([labels.get(name, name), ndcg, f"{scores[RECALL]:.3f}", *terms])
    title = f"pydocs, {results['documents']} documents, {results['queries']} test queries that training never saw"
    _common.print_table(
        ("system", "nDCG@10>", "recall@100>", "terms per query>", "terms per document>"),
        rows,
        title,
    )
    lines = [
        f"Differences in {NDCG}, mean ± standard error over the same {results['queries']} queries:",
    ]
    lines += [f"  {difference_line(row)}" for row in results["comparisons"]]
    if "seismic_overlap_at_10" in results:
        lines.append(
            f"Seismic's top 10 holds {results['seismic_overlap_at_10']:.1%} of the exact top 10.",
        )
    lines += [f"model: {results['model']}", "the rows of the first table by hand:"]
    lines += [f"  {line}" for line in results["commands"]]
    search = f'  tilefold search "{EXAMPLE}"'
    lines += [
        f"done in {results['seconds'] / 60:.1f} minutes; now try:",
        search,
        f"{search} --rerank {late['tokens']}",
    ]
    typer.echo("\n".join(lines))


def commands(folder: Path, size: Size, seed: int, weight: float) -> list[str]:
    """Shell lines that repeat the rows, the first of which changes into the demo's `folder`."""
    recipe = steps.make_recipe(size, seed)
    both = "--data data --split test --split dev"
    searched = f"--index by-hand/index --model by-hand/model --query-top-k {steps.QUERY_TERMS}"
    lines = f"""\
index --backend bm25 --data data --identifiers --output by-hand/bm25
evaluate {both} --index by-hand/bm25 --save-run by-hand/bm25.trec
evaluate {both} --model minilm --max-length {size.dense_length} --save-run by-hand/dense.trec
train --data data --model {shlex.quote(recipe.base_model)} --steps {size.steps} --batch-size {recipe.batch_size} \
--lr {recipe.learning_rate:g} --max-length {recipe.max_length} --train-max-length {recipe.train_max_length} \
--seed {seed}{" --group-by-length" * recipe.group_by_length} --output by-hand/model
encode --data data --model by-hand/model --top-k {DOCUMENT_TERMS} --output by-hand/vectors
index --vectors by-hand/vectors --output by-hand/index
evaluate {both} {searched} --save-run by-hand/splade.trec
fuse --data data --run by-hand/bm25.trec --run by-hand/dense.trec --run by-hand/splade.trec --method interpolation \
--tune dev
train --data data --recipe colbert --model minilm --steps 0 --dimension 0 --keep-punctuation \
--max-length {size.dense_length} --query-length {size.dense_length} --output by-hand/late
encode --data data --model by-hand/late --storage int8 --output by-hand/tokens
evaluate --data data {searched} --rerank by-hand/tokens --rerank-depth {steps.RERANKED} --rerank-weight {weight:g}"""
    return [shlex.join(["cd", str(folder)]), *(f"tilefold {line}" for line in lines.splitlines())]
