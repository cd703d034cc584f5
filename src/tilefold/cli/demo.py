"""``tilefold demo``: train, index, search and evaluate a sparse retriever on this machine, with no download."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilefold import retrieval
from tilefold._files import write_json
from tilefold.cli import _common, _demo_steps, _models
from tilefold.cli._common import CommandError, UsageError, Values, note
from tilefold.cli._demo_steps import EXAMPLE, EXAMPLE_ID, NDCG, RECALL, Size
from tilefold.cli._options import Number, flag, option, preset
from tilefold.retrieval.errors import MissingPackageError

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.fusion import Run

MINUTES, QUICK_MINUTES = 5.0, 3.0
ANSWERS = 3
SYSTEMS = ("BM25", "dense zero-shot (all-MiniLM-L6-v2)", "SPLADE (trained here)", "fusion", "SPLADE + late interaction")
ERRORS = 2.0  # a difference of fewer standard errors may be chance


def demo(
    minutes: Number = option(
        "The largest of four sizes, meant for 3, 5, 10 and 15 minutes on two cores; by default 5."
    ),
    full: bool = flag("Everything at full size: 6 to 30 minutes on 2 cores, depending on the CPU.", "--full"),
    quick: bool = flag("The same as --minutes 3.", "--quick"),
    seed: int = preset(0, "Equal seeds and sizes give equal models."),
    output: Path = preset(_common.DEMO_DIR, "Folder for all files of the demo."),
    as_json: bool = flag("The results as JSON on stdout.", "--json"),
) -> None:
    """Train, index, search and evaluate a sparse retriever on the documentation of this Python.

    Runs offline on a CPU. A second run reuses the results of the first; an interrupted run is resumed.
    """
    size = _asked_size(minutes, full, quick)
    if not 0 <= seed < 2**32:
        raise UsageError(f"--seed: expected a whole number of at least 0 and below 2^32, got {seed}.")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"--output: expected a folder, got the file {output}.") from error
    stages = Stages()
    try:
        results, folder = _run(size, seed, output, stages)
    except MissingPackageError as error:
        raise CommandError(f'{_common.first_line(error)} (everything: pip install "tilefold[demo]")') from error
    results |= {"seconds": time.monotonic() - stages.started, "stages": stages.record, "seed": seed}
    record = {"folder": folder.name, "query_terms": _demo_steps.QUERY_TERMS, "results": results}
    write_json(output / "demo.json", record)
    if as_json:
        _common.print_json(results)
    else:
        print_report(results)


def _asked_size(minutes: float | None, full: bool, quick: bool) -> Size:
    if sum((minutes is not None, full, quick)) > 1:
        raise UsageError("--minutes, --full and --quick exclude one another: give one of them.")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UsageError(f"--minutes: expected a number above 0, got {minutes:g}.")
    if full:
        return _demo_steps.FULL
    most, sizes = minutes or (QUICK_MINUTES if quick else MINUTES), _demo_steps.SIZES
    return sizes[max((limit for limit in sizes if limit <= most), default=min(sizes))]


class Stages:
    """Reports stages on stderr, and measures their times."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.record: dict[str, Values] = {}

    @contextmanager
    def step(self, name: str, text: str) -> Iterator[Callable[..., None]]:
        """Print what begins, and afterwards its time; yields a function of its result and whether it was kept."""
        started = time.monotonic()
        note(f"{text} ...")
        outcome, kept = "", False

        def done(text: str, reused: bool = False) -> None:
            nonlocal outcome, kept
            outcome, kept = f"{text}, ", reused

        yield done
        seconds = time.monotonic() - started
        self.record[name] = {"seconds": seconds, "reused": kept}
        note(f"  {outcome}{'reused' if kept else f'{seconds:.1f} s'}")


def _answers(system: str, collection: Collection, run: Run) -> None:
    """Print the first documents for the example query."""
    best = sorted(run.get(EXAMPLE_ID, {}).items(), key=lambda item: -item[1])[:ANSWERS]
    titles = [collection.documents[name].title or name for name, _ in best]
    note(f'  {system} answers "{EXAMPLE}": {", ".join(titles) or "nothing"}')


def _run(size: Size, seed: int, output: Path, stages: Stages) -> tuple[Values, Path]:
    """All stages; the results, and the folder of this demo."""
    from tilefold.recipes.splade import train

    _common.kept.append(lambda: any(output.glob("*/data")))
    with stages.step("collection", "collection: the documentation of this Python") as done:
        everything = _common.load_data("pydocs", output / "data")
        part = _demo_steps.take(_demo_steps.split(everything, size), size.documents)
        pairs = ", ".join(f"{len(grades)} {split}" for split, grades in part.qrels.items())
        done(f"{len(part.documents)} of {len(everything.documents)} documents; queries: {pairs}")
    folder = _demo_steps.folder_of(output, size, seed, _demo_steps.collection_digest(everything))
    if (folder / "data").is_dir():
        note(f"resuming an earlier run in {folder} (delete that folder to start over)")
    part.save_beir(folder / "data")
    queries = part.split_queries("test") | part.split_queries("dev") | {EXAMPLE_ID: EXAMPLE}
    with stages.step("bm25", "searching: BM25"):
        bm25: Run = retrieval.BM25Index.build(part.contents(), identifiers=True).search(queries, _demo_steps.DEPTH)
    _answers("BM25", part, bm25)
    title = f"dense zero-shot, and token vectors from the same pass: {len(part.documents)} documents"
    with stages.step("dense", title) as done, _common.progress_bar("  encoding") as tick:
        first = _demo_steps.zero_shot(output, part, queries, size.dense_length, tick)
        stored = first.documents.manifest
        done(f"{stored.n_tokens:,} token vectors in {stored.storage}", first.reused)
    _answers("dense", part, first.run)
    title = f"training SPLADE with the fused head: {size.steps} steps of {size.batch_size} pairs"
    with stages.step("training", title) as done, _common.progress_bar("  training") as tick:
        trained = train(_demo_steps.make_recipe(size, seed), part, folder / "model", progress=tick)
        resumed = f", from step {trained.resumed_from}" if trained.resumed_from and not trained.reused else ""
        done(f"{trained.steps} steps, {'bf16' if trained.bf16 else 'fp32'}{resumed}", trained.reused)
    found, results = _splade(folder, part, queries, stages)
    _answers("SPLADE", part, found)
    results |= _evaluate(part, (bm25, first.run, found), first, stages)
    results["model"] = str(folder / "model")
    late_weight = results["late_interaction"]["weights"]["maxsim"]
    results["commands"] = commands(folder, size, seed, late_weight)
    return results, folder


def _splade(folder: Path, part: Collection, queries: dict[str, str], stages: Stages) -> tuple[Run, Values]:
    """The run of the trained model over the exact index, and what is known of its vectors and indexes."""
    encoder = _models.load_encoder(str(folder / "model"))
    title = f"encoding the documents: {len(part.documents)} documents"
    with stages.step("encoding", title) as done, _common.progress_bar("  encoding", resumes="") as tick:
        vectors, reused = _demo_steps.encode_documents(folder, encoder, part, tick)
        done(f"{len(vectors)} vectors", reused)
    with stages.step("indexing", "indexing") as done:
        indexes = _demo_steps.build_indexes(folder, vectors)
        done(" and ".join(indexes))
    with stages.step("searching", "searching: SPLADE"):
        encoded = retrieval.encode_queries(encoder, queries, top_k=_demo_steps.QUERY_TERMS)
        found = {
            name: retrieval.hits_to_run(encoded, index.search(encoded, _demo_steps.DEPTH))
            for name, index in indexes.items()
        }
    active = {"queries": retrieval.active_terms(encoded), "documents": retrieval.active_terms(vectors)}
    results: Values = {"active_terms": active}
    if "seismic" in found:
        results["seismic_overlap_at_10"] = _demo_steps.overlap(found["exact"], found["seismic"])
    return found["exact"], results


def _evaluate(part: Collection, runs: tuple[Run, Run, Run], first: _demo_steps.ZeroShot, stages: Stages) -> Values:
    """Fusion and reranking, with weights chosen on held-out queries, and the figures of all five systems."""
    from tilefold.retrieval.evaluation import choose_weights

    dev = part.qrels["dev"]
    judged = dev | part.qrels["test"]
    kept = [{query: scores for query, scores in run.items() if query in judged} for run in runs]
    with stages.step("fusion", "choosing fusion weights on held-out training queries"):
        weights, _ = choose_weights(kept, dev, measure=_demo_steps.NDCG, k=_demo_steps.DEPTH)
        fused = retrieval.interpolate(kept, weights, k=_demo_steps.DEPTH)
    with stages.step("reranking", "reranking by late interaction; its weight is chosen on the same queries"):
        late_weights, reranked = _demo_steps.rerank_candidates(kept[2], first.queries, first.documents, dev)
    systems = dict(zip(SYSTEMS, (*kept, fused, reranked), strict=True))
    return figures(systems, part.qrels["test"]) | {
        "documents": len(part.documents),
        "fusion_weights": dict(zip(("bm25", "dense", "splade"), weights, strict=True)),
        "late_interaction": {
            "candidates": _demo_steps.RERANKED,
            "weights": dict(zip(("splade", "maxsim"), late_weights, strict=True)),
            "tokens": str(first.documents.folder),
        },
    }


def figures(runs: dict[str, Run], qrels: dict[str, dict[str, int]]) -> Values:
    """Means with standard errors of every system, and the paired differences that the demo reports."""
    tables = {name: retrieval.evaluate_per_query(run, qrels, (NDCG, RECALL)) for name, run in runs.items()}
    systems = {}
    for name, table in tables.items():
        found = retrieval.mean_of((row[NDCG] for row in table.values()), resamples=99)
        recall = statistics.fmean(row[RECALL] for row in table.values())
        systems[name] = {NDCG: found.mean, "standard_error": found.standard_error or 0.0, RECALL: recall}
    bm25, dense, splade, fusion, late = runs
    best = max((bm25, dense, splade), key=lambda name: systems[name][NDCG])
    comparisons = []
    for system, over in ((splade, bm25), (splade, dense), (fusion, best), (late, splade)):
        mine, theirs = tables[system], tables[over]
        found = retrieval.mean_of((mine[q][NDCG] - theirs[q][NDCG] for q in mine), resamples=99)
        row = {"system": system, "over": over, "difference": found.mean, "queries": len(mine)}
        comparisons.append(row | {"standard_error": found.standard_error or 0.0})
    return {"queries": len(qrels), "systems": systems, "comparisons": comparisons}


def difference_line(row: Values) -> str:
    """The line that the user reads about a paired difference."""
    difference, error = row["difference"], row["standard_error"]
    line = f"{row['system']} over {row['over']}: {difference:+.3f} ± {error:.3f}"
    if abs(difference) <= ERRORS * error:
        return f"{line} (no more than {ERRORS:.0f} standard errors: it may be chance)"
    return f"{line} ({abs(difference) / error:.1f} standard errors)" if error else line


def print_report(results: Values) -> None:
    """Print the tables, and commands to try next, on stdout."""
    _print_systems(results)
    lines = [f"Differences in {NDCG}, mean ± standard error over the same {results['queries']} queries:"]
    lines += [f"  {difference_line(row)}" for row in results["comparisons"]]
    if "seismic_overlap_at_10" in results:
        lines.append(f"Seismic's top 10 holds {results['seismic_overlap_at_10']:.1%} of the exact top 10.")
    lines += [f"model: {results['model']}", "the rows of the first table by hand:"]
    lines += [f"  {line}" for line in results["commands"]]
    search = f'  tilefold search "{EXAMPLE}"'
    lines += [f"done in {results['seconds'] / 60:.1f} minutes; now try:", search]
    lines.append(f"{search} --rerank {results['late_interaction']['tokens']}")
    typer.echo("\n".join(lines))


def _print_systems(results: Values) -> None:
    fusion = ", ".join(f"{weight:.1f}" for weight in results["fusion_weights"].values())
    late = results["late_interaction"]
    weights = ", ".join(f"{weight:.1f}" for weight in late["weights"].values())
    labels = {  # with the chosen weights
        SYSTEMS[3]: f"fusion ({fusion})",
        SYSTEMS[4]: f"SPLADE + late interaction on its top {late['candidates']}, zero-shot MiniLM tokens ({weights})",
    }
    active, rows = [f"{results['active_terms'][kind]:.0f}" for kind in ("queries", "documents")], []
    for name, scores in results["systems"].items():
        figures = (f"{scores[NDCG]:.3f} ± {scores['standard_error']:.3f}", f"{scores[RECALL]:.3f}")
        rows.append([labels.get(name, name), *figures, *(active if name == SYSTEMS[2] else ("", ""))])
    columns = ("system", "nDCG@10>", "recall@100>", "terms per query>", "terms per document>")
    title = f"pydocs, {results['documents']} documents, {results['queries']} test queries that training never saw"
    _common.print_table(columns, rows, title)


_BY_HAND = """\
index --backend bm25 --data data --identifiers --output by-hand/bm25
evaluate {both} --index by-hand/bm25 --save-run by-hand/bm25.trec
evaluate {both} --model minilm --max-length {size.dense_length} --save-run by-hand/dense.trec
train --data data --model {model} --steps {size.steps} --batch-size {recipe.batch_size} --lr {recipe.learning_rate:g} \
--max-length {recipe.max_length} --train-max-length {recipe.train_max_length} --seed {recipe.seed}{grouped} \
--output by-hand/model
encode --data data --model by-hand/model --top-k {steps.DOCUMENT_TERMS} --output by-hand/vectors
index --vectors by-hand/vectors --output by-hand/index
evaluate {both} {searched} --save-run by-hand/splade.trec
fuse --data data --run by-hand/bm25.trec --run by-hand/dense.trec --run by-hand/splade.trec --method interpolation \
--tune dev
train --data data --recipe colbert --model minilm --steps 0 --dimension 0 --keep-punctuation \
--max-length {size.dense_length} --query-length {size.dense_length} --output by-hand/late
encode --data data --model by-hand/late --storage int8 --output by-hand/tokens
evaluate --data data {searched} --rerank by-hand/tokens --rerank-depth {steps.RERANKED} --rerank-weight {weight:g}"""


def commands(folder: Path, size: Size, seed: int, late_weight: float) -> list[str]:
    """Shell lines that repeat the rows, the first of which changes into the demo's `folder`."""
    recipe = _demo_steps.make_recipe(size, seed)
    lines = _BY_HAND.format(
        both="--data data --split test --split dev",
        searched=f"--index by-hand/index --model by-hand/model --query-top-k {_demo_steps.QUERY_TERMS}",
        model=shlex.quote(recipe.base_model),
        grouped=" --group-by-length" if recipe.group_by_length else "",
        weight=late_weight,
        recipe=recipe,
        size=size,
        steps=_demo_steps,
    )
    return [shlex.join(["cd", str(folder)]), *(f"tilefold {line}" for line in lines.splitlines())]
