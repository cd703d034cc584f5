"""The results of ``tilefold demo``: their figures, their tables, and the commands that repeat them one by one."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.cli import _common, _demo_steps
from tilefold.cli._demo_data import DEV, EXAMPLE, TEST, Size

if TYPE_CHECKING:
    from tilefold.retrieval.fusion import Run

SYSTEMS = (
    "BM25",
    "dense zero-shot (all-MiniLM-L6-v2)",
    "SPLADE (trained here)",
    "fusion",
    "SPLADE + late interaction",
)
BY_HAND = Path("by-hand")
ERRORS = 2.0  # a difference of fewer standard errors may be chance


def figures(runs: dict[str, Run], qrels: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Means with standard errors of every system, and the paired differences that the demo reports."""
    from tilefold.retrieval.evaluation import evaluate_per_query

    tables = {
        name: evaluate_per_query(run, qrels, (_demo_steps.NDCG, _demo_steps.RECALL)) for name, run in runs.items()
    }
    systems = {}
    for name, table in tables.items():
        mean, error = mean_and_error([row[_demo_steps.NDCG] for row in table.values()])
        recall = statistics.fmean(row[_demo_steps.RECALL] for row in table.values())
        systems[name] = {_demo_steps.NDCG: mean, "standard_error": error, _demo_steps.RECALL: recall}
    bm25, dense, splade, fusion, late = runs
    best = max((bm25, dense, splade), key=lambda name: systems[name][_demo_steps.NDCG])
    comparisons = []
    for system, over in ((splade, bm25), (splade, dense), (fusion, best), (late, splade)):
        mine, theirs = tables[system], tables[over]
        mean, error = mean_and_error([mine[q][_demo_steps.NDCG] - theirs[q][_demo_steps.NDCG] for q in mine])
        row = {"system": system, "over": over, "difference": mean, "standard_error": error, "queries": len(mine)}
        comparisons.append(row)
    return {"queries": len(qrels), "systems": systems, "comparisons": comparisons}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, from the sample standard deviation."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def difference_line(row: dict[str, Any]) -> str:
    """The line that the user reads about a paired difference."""
    difference, error = row["difference"], row["standard_error"]
    line = f"{row['system']} over {row['over']}: {difference:+.3f} ± {error:.3f}"
    if abs(difference) <= ERRORS * error:
        return f"{line} (no more than {ERRORS:.0f} standard errors: it may be chance)"
    return f"{line} ({abs(difference) / error:.1f} standard errors)" if error else line


def print_report(results: dict[str, Any]) -> None:
    """Print the tables, and commands to try next, on stdout."""
    console = _common.stdout()
    console.print(_systems_table(results))
    lines = [f"Differences in {_demo_steps.NDCG}, mean ± standard error over the same {results['queries']} queries:"]
    lines += [f"  {difference_line(row)}" for row in results["comparisons"]]
    if "seismic_overlap_at_10" in results:
        lines.append(f"Seismic's top 10 holds {results['seismic_overlap_at_10']:.1%} of the exact top 10.")
    lines += [f"model: {results['model']}", "the rows of the first table by hand:"]
    lines += [f"  {line}" for line in results["commands"]]
    search = f'  tilefold search "{EXAMPLE}"'
    lines += [f"done in {results['seconds'] / 60:.1f} minutes; now try:", search]
    lines.append(f"{search} --rerank {results['late_interaction']['tokens']}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _systems_table(results: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        title=f"pydocs, {results['documents']} documents, {results['queries']} test queries that training never saw"
    )
    for name in ("system", "nDCG@10", "recall@100", "terms per query", "terms per document"):
        table.add_column(name, justify="left" if name == "system" else "right")
    active = results["active_terms"]
    for name, scores in results["systems"].items():
        sparse = name == SYSTEMS[2]
        table.add_row(
            _labels(results).get(name, name),
            f"{scores[_demo_steps.NDCG]:.3f} ± {scores['standard_error']:.3f}",
            f"{scores[_demo_steps.RECALL]:.3f}",
            f"{active['queries']:.0f}" if sparse else "",
            f"{active['documents']:.0f}" if sparse else "",
        )
    return table


def _labels(results: dict[str, Any]) -> dict[str, str]:
    """Names of the systems, with the chosen weights."""
    fusion = ", ".join(f"{weight:.1f}" for weight in results["fusion_weights"].values())
    late = results["late_interaction"]
    weights = ", ".join(f"{weight:.1f}" for weight in late["weights"].values())
    return {
        SYSTEMS[3]: f"fusion ({fusion})",
        SYSTEMS[4]: f"SPLADE + late interaction on its top {late['candidates']}, zero-shot MiniLM tokens ({weights})",
    }


def commands(folder: Path, size: Size, seed: int, late_weight: float) -> list[str]:
    """Shell lines, the first of which changes into the demo's `folder`.

    Args:
        folder: of the demo; its collection is in ``data``.
        size: of the demo.
        seed: of its training.
        late_weight: of MaxSim in the row of late interaction.
    """
    bm25, model, vectors, index, late, tokens = (
        str(BY_HAND / name) for name in ("bm25", "model", "vectors", "index", "late", "tokens")
    )
    runs = {name: str(BY_HAND / f"{name}.trec") for name in ("bm25", "dense", "splade")}
    data = ["--data", "data"]
    both = [*data, "--split", TEST, "--split", DEV]
    searched = ["--index", index, "--model", model, "--query-top-k", str(_demo_steps.QUERY_TERMS)]
    fused = [part for run in runs.values() for part in ("--run", run)]
    reranked = ["--rerank", tokens, "--rerank-depth", str(_demo_steps.RERANKED), "--rerank-weight", f"{late_weight:g}"]
    steps: list[Sequence[str]] = [
        ["index", "--backend", "bm25", *data, "--identifiers", "--output", bm25],
        ["evaluate", *both, "--index", bm25, "--save-run", runs["bm25"]],
        ["evaluate", *both, "--model", "minilm", "--max-length", str(size.dense_length), "--save-run", runs["dense"]],
        ["train", *data, *_training(size, seed), "--output", model],
        ["encode", *data, "--model", model, "--top-k", str(_demo_steps.DOCUMENT_TERMS), "--output", vectors],
        ["index", "--vectors", vectors, "--output", index],
        ["evaluate", *both, *searched, "--save-run", runs["splade"]],
        ["fuse", *data, *fused, "--method", "interpolation", "--tune", DEV],
        ["train", *data, *_token_states(size), "--output", late],
        ["encode", *data, "--model", late, "--storage", "int8", "--output", tokens],
        ["evaluate", *data, *searched, *reranked],
    ]
    return [shlex.join(["cd", str(folder)]), *(shlex.join(["tilefold", *step]) for step in steps)]


def _training(size: Size, seed: int) -> list[str]:
    """The options of ``train`` that give the recipe of the demo."""
    recipe = _demo_steps.make_recipe(size, seed)
    options = {
        "--model": recipe.base_model,
        "--steps": size.steps,
        "--batch-size": recipe.batch_size,
        "--lr": f"{recipe.learning_rate:g}",
        "--max-length": recipe.max_length,
        "--train-max-length": recipe.train_max_length,
        "--seed": seed,
    }
    named = [str(part) for option in options.items() for part in option]
    return [*named, *(["--group-by-length"] if recipe.group_by_length else [])]


def _token_states(size: Size) -> list[str]:
    """The options of ``train`` that save MiniLM's own token states as a late-interaction model."""
    length = str(size.dense_length)
    untrained = ["--recipe", "colbert", "--model", "minilm", "--steps", "0", "--dimension", "0", "--keep-punctuation"]
    return [*untrained, "--max-length", length, "--query-length", length]
