"""The results of ``tilefold demo``, and their tables."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.cli import _common, _demo_steps
from tilefold.cli._demo_claims import Comparison, compare, mean_and_error, per_query
from tilefold.cli._demo_data import EXAMPLE

if TYPE_CHECKING:
    from tilefold.bench.head_comparison import HeadMeasurement
    from tilefold.retrieval.fusion import Run

SYSTEMS = (
    "BM25",
    "dense zero-shot (all-MiniLM-L6-v2)",
    "SPLADE (trained here)",
    "fusion",
    "SPLADE + late interaction",
)


def figures(runs: dict[str, Run], qrels: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Means with standard errors of every system, and the paired differences that the demo reports."""
    scores = {name: per_query(run, qrels, _demo_steps.NDCG) for name, run in runs.items()}
    systems = {}
    for name, run in runs.items():
        mean, error = mean_and_error(scores[name])
        recall, _ = mean_and_error(per_query(run, qrels, _demo_steps.RECALL))
        systems[name] = {_demo_steps.NDCG: mean, "standard_error": error, _demo_steps.RECALL: recall}
    bm25, dense, splade, fusion, late = runs
    best = max((bm25, dense, splade), key=lambda name: systems[name][_demo_steps.NDCG])
    pairs = ((splade, bm25), (splade, dense), (fusion, best), (late, splade))
    comparisons = [compare(system, over, scores).to_dict() for system, over in pairs]
    return {"queries": len(qrels), "systems": systems, "comparisons": comparisons}


def draw(rows: list[HeadMeasurement], path: Path) -> Path | None:
    """Draw the comparison of the heads, or print why there is no plot."""
    from tilefold.bench.head_comparison import plot_heads

    try:
        return plot_heads(rows, path)
    except ImportError as error:
        _common.note(f"  no plot: {_common.first_line(error)}")
    except ValueError as error:
        _common.note(f"  no plot: {_common.first_line(error)}")
    return None


def print_report(results: dict[str, Any], rows: list[HeadMeasurement], plot: Path | None) -> None:
    """Print the tables, and commands to try next, on stdout."""
    console = _common.stdout()
    console.print(_systems_table(results))
    console.print(
        f"Differences in {_demo_steps.NDCG}, mean ± standard error over the same {results['queries']} queries:",
        highlight=False,
    )
    for values in results["comparisons"]:
        console.print(f"  {Comparison(**values).text}", markup=False, highlight=False)
    if "seismic_overlap_at_10" in results:
        share = results["seismic_overlap_at_10"]
        console.print(f"Seismic's top 10 holds {share:.1%} of the exact top 10.", highlight=False)
    console.print(_heads_table(rows))
    if plot is not None:
        console.print(f"plot: {plot}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"model: {results['model']}", markup=False, highlight=False, soft_wrap=True)
    console.print("the rows of the first table by hand:", highlight=False)
    for line in results["commands"]:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"done in {results['seconds'] / 60:.1f} minutes; now try:", highlight=False)
    console.print(f'  tilefold search "{EXAMPLE}"', markup=False, highlight=False)
    tokens = results["late_interaction"]["tokens"]
    console.print(f'  tilefold search "{EXAMPLE}" --rerank {tokens}', markup=False, highlight=False, soft_wrap=True)


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


def _heads_table(rows: list[HeadMeasurement]) -> Any:
    from rich.table import Table

    where = next((f"{row.device}, {row.dtype}" for row in rows if row.device), "")
    table = Table(title=f"LM head of SPLADE, plain and fused ({where})")
    for name in ("batch x tokens", "head", "forward", "forward + backward", "peak memory"):
        table.add_column(name, justify="left" if name == "head" else "right")
    for row in sorted(rows, key=lambda row: (row.batch * row.seq, row.impl)):
        name = "plain" if row.impl == "eager" else "fused"
        if row.skipped_reason is not None:
            table.add_row(f"{row.batch} x {row.seq}", name, row.skipped_reason)
            continue
        table.add_row(
            f"{row.batch} x {row.seq}",
            name,
            _number(row.forward_ms, "ms"),
            _number(row.forward_backward_ms, "ms"),
            _number(row.peak_mb, "MB"),
        )
    return table


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.0f} {unit}"
