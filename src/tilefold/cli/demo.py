"""``tilefold demo``: train, index, search and evaluate a sparse retriever on this machine, with no download."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold.cli import _common, _demo_steps

if TYPE_CHECKING:
    from tilefold.bench.head_comparison import HeadMeasurement
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.fusion import Run

EXAMPLE = "how do I read a csv file"
NAMES = ("BM25", "dense zero-shot (all-MiniLM-L6-v2)", "SPLADE (trained here)")


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Train fewer steps: under four minutes on 2 cores.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for everything that is made.")] = _common.DEMO_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="The results as JSON on stdout.")] = False,
) -> None:
    """Train, index, search and evaluate a sparse retriever on the documentation of this Python.

    Runs offline on a CPU. A second run reuses what the first one made; an interrupted one goes on.
    """
    from tilefold.recipes._run import write_json
    from tilefold.retrieval.errors import MissingPackageError

    started = time.monotonic()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise _common.UsageError(f"--output: expected a folder, got the file {output}.") from error
    try:
        results, rows, plot, folder = _run(quick, output)
    except MissingPackageError as error:
        raise _common.CommandError(f'{_common.first_line(error)} (everything: pip install "tilefold[demo]")') from error
    results["seconds"] = time.monotonic() - started
    record = {"folder": folder.name, "query_terms": _demo_steps.QUERY_TERMS, "results": results}
    write_json(output / "demo.json", record)
    if as_json:
        _common.print_json(results)
        return
    _report(results, rows, plot)


def _run(quick: bool, output: Path) -> tuple[dict[str, Any], list[HeadMeasurement], Path | None, Path]:
    with _step("collection: the documentation of this Python") as done:
        full = _common.load_data("pydocs", output / "data")
        collection = _demo_steps.hold_out(full)
        digest = _demo_steps.collection_digest(full)
        pairs = {split: len(grades) for split, grades in collection.qrels.items()}
        done(f"{len(collection.documents)} documents; queries: {', '.join(f'{n} {s}' for s, n in pairs.items())}")
    plan = _demo_steps.make_plan(output, quick, digest)
    with _step("training SPLADE with the fused head") as done, _common.progress_bar("  training") as tick:
        trained = _demo_steps.train_model(plan, collection, tick)
        precision = "bf16" if trained.bf16 else "fp32"
        done(f"{trained.steps} steps, {precision}" + (", reused" if trained.reused else ""))
    encoder = _common.load_encoder(str(plan.folder / "model"))
    with _step("encoding the documents") as done, _common.progress_bar("  encoding") as tick:
        vectors = _demo_steps.encode_documents(plan, encoder, collection, tick)
        done(f"{len(vectors)} vectors")
    with _step("indexing") as done:
        indexes = _demo_steps.build_indexes(plan, vectors)
        done(" and ".join(indexes))
    results = _evaluate(plan, collection, encoder, vectors, indexes, digest)
    with _step("comparing the plain head with the fused head"):
        rows = _demo_steps.compare_heads(plan)
        plot = _plot(rows, plan.folder / "heads.png")
    results["heads"] = [vars(row) for row in rows]
    results["model"] = str(plan.folder / "model")
    return results, rows, plot, plan.folder


def _evaluate(
    plan: _demo_steps.DemoPlan, collection: Collection, encoder: Any, vectors: Any, indexes: Any, digest: str
) -> dict[str, Any]:
    from tilefold.retrieval import BM25Index, active_terms, encode_queries, evaluate, hits_to_run, interpolate

    queries = collection.split_queries("test") | collection.split_queries("dev")
    depth = _demo_steps.DEPTH
    with _step("searching: BM25"):
        bm25 = BM25Index.build(_demo_steps.contents(collection)).search(queries, depth)
    with _step("searching: dense zero-shot, and token vectors from the same pass") as done:
        dense, tokens, query_tokens = _demo_steps.zero_shot_baselines(plan, collection, queries, digest)
        done(f"{tokens.manifest.n_tokens} token vectors in {tokens.manifest.storage}")
    with _step("searching: SPLADE"):
        with _common.fast_inference():
            encoded = encode_queries(encoder, queries, top_k=_demo_steps.QUERY_TERMS)
        found = {name: hits_to_run(encoded, index.search(encoded, depth)) for name, index in indexes.items()}
    runs = (bm25, dense, found["exact"])
    with _step("choosing fusion weights on held-out training queries"):
        weights, _ = _demo_steps.pick_weights(runs, collection.qrels["dev"])
        fused = interpolate(runs, weights, k=depth)
    with _step("reranking by late interaction; its weight is chosen on the same queries"):
        late_weights, reranked = _demo_steps.rerank_candidates(
            found["exact"], query_tokens, tokens, collection.qrels["dev"]
        )
    test = collection.qrels["test"]
    measures = (_demo_steps.NDCG, _demo_steps.RECALL)
    label = "fusion (" + ", ".join(f"{weight:.1f}" for weight in weights) + ")"
    table = {name: evaluate(_only(run, test), test, measures) for name, run in zip(NAMES, runs, strict=True)}
    table[label] = evaluate(_only(fused, test), test, measures)
    late_label = f"SPLADE + late interaction on its top {_demo_steps.RERANKED}, zero-shot MiniLM tokens ("
    late_label += ", ".join(f"{weight:.1f}" for weight in late_weights) + ")"
    table[late_label] = evaluate(_only(reranked, test), test, measures)
    results: dict[str, Any] = {
        "queries": len(test),
        "systems": table,
        "active_terms": {"queries": active_terms(encoded), "documents": active_terms(vectors)},
        "fusion_weights": dict(zip(("bm25", "dense", "splade"), weights, strict=True)),
        "late_interaction": {
            "candidates": _demo_steps.RERANKED,
            "weights": dict(zip(("splade", "maxsim"), late_weights, strict=True)),
            "tokens": str(tokens.folder),
        },
    }
    if "seismic" in found:
        results["seismic_overlap_at_10"] = _demo_steps.overlap(found["exact"], found["seismic"])
    return results


def _only(run: Run, qrels: dict[str, dict[str, int]]) -> Run:
    return {query: scores for query, scores in run.items() if query in qrels}


def _plot(rows: list[HeadMeasurement], path: Path) -> Path | None:
    from tilefold.bench.head_comparison import plot_heads

    try:
        return plot_heads(rows, path)
    except ImportError as error:
        _common.note(f"  no plot: {_common.first_line(error)}")
    except ValueError as error:
        _common.note(f"  no plot: {_common.first_line(error)}")
    return None


def _report(results: dict[str, Any], rows: list[HeadMeasurement], plot: Path | None) -> None:
    console = _common.stdout()
    console.print(_systems_table(results))
    if "seismic_overlap_at_10" in results:
        share = results["seismic_overlap_at_10"]
        console.print(f"Seismic's top 10 holds {share:.1%} of the exact top 10.", highlight=False)
    console.print(_heads_table(rows))
    if plot is not None:
        console.print(f"plot: {plot}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"model: {results['model']}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"done in {results['seconds'] / 60:.1f} minutes; now try:", highlight=False)
    console.print(f'  tilefold search "{EXAMPLE}"', markup=False, highlight=False)
    tokens = results["late_interaction"]["tokens"]
    console.print(f'  tilefold search "{EXAMPLE}" --rerank {tokens}', markup=False, highlight=False, soft_wrap=True)


def _systems_table(results: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"pydocs, {results['queries']} test queries that training never saw")
    for name in ("system", "nDCG@10", "recall@100", "terms a query", "terms a document"):
        table.add_column(name, justify="left" if name == "system" else "right")
    active = results["active_terms"]
    for name, scores in results["systems"].items():
        sparse = name == NAMES[2]
        table.add_row(
            name,
            f"{scores[_demo_steps.NDCG]:.3f}",
            f"{scores[_demo_steps.RECALL]:.3f}",
            f"{active['queries']:.0f}" if sparse else "",
            f"{active['documents']:.0f}" if sparse else "",
        )
    return table


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


@contextmanager
def _step(text: str) -> Iterator[Any]:
    """Say on stderr what begins, and what came of it and how long it took."""
    started = time.monotonic()
    _common.note(f"{text} ...")
    said: list[str] = []
    yield said.append
    detail = f"{said[0]}, " if said else ""
    _common.note(f"  {detail}{time.monotonic() - started:.1f} s")
