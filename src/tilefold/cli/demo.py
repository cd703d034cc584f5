"""``tilefold demo``: train, index, search and evaluate a sparse retriever on this machine, with no download."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold._files import write_json
from tilefold.cli import _common, _demo_commands, _demo_data, _demo_plan, _demo_report, _demo_steps, _models
from tilefold.cli._demo_progress import Stages

if TYPE_CHECKING:
    from tilefold.bench.head_comparison import HeadMeasurement
    from tilefold.cli._demo_plan import Plan
    from tilefold.cli._demo_steps import Workspace, ZeroShot
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.fusion import Run

MINUTES = 5.0
QUICK_MINUTES = 3.0


def demo(
    minutes: Annotated[
        float | None, typer.Option(help="Time to plan for; by default 5. The demo measures this machine first.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Everything at full size: 6 to 30 minutes on 2 cores, depending on the CPU.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The same as --minutes 3.")] = False,
    seed: Annotated[int, typer.Option(help="Equal seeds and plans give equal models.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for all files of the demo.")] = _common.DEMO_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="The results as JSON on stdout.")] = False,
) -> None:
    """Train, index, search and evaluate a sparse retriever on the documentation of this Python.

    Runs offline on a CPU. A second run reuses the results of the first; an interrupted run is resumed.
    """
    from tilefold.retrieval.errors import MissingPackageError

    asked = _asked(minutes, full, quick)
    if not 0 <= seed < 2**32:
        raise _common.UsageError(f"--seed: expected a whole number of at least 0 and below 2^32, got {seed}.")
    stages = Stages()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise _common.UsageError(f"--output: expected a folder, got the file {output}.") from error
    try:
        results, rows, plot, folder = _run(asked, seed, output, stages)
    except MissingPackageError as error:
        raise _common.CommandError(f'{_common.first_line(error)} (everything: pip install "tilefold[demo]")') from error
    results |= {"seconds": stages.elapsed, "stages": stages.record, "seed": seed}
    record = {"folder": folder.name, "query_terms": _demo_steps.QUERY_TERMS, "results": results}
    write_json(output / "demo.json", record)
    if as_json:
        _common.print_json(results)
        return
    _demo_report.print_report(results, rows, plot)


def _asked(minutes: float | None, full: bool, quick: bool) -> float | str:
    if sum((minutes is not None, full, quick)) > 1:
        raise _common.UsageError("--minutes, --full and --quick exclude one another: give one of them.")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise _common.UsageError(f"--minutes: expected a number above 0, got {minutes:g}.")
    if full:
        return _demo_plan.FULL
    return float(minutes or (QUICK_MINUTES if quick else MINUTES))


def _run(
    asked: float | str, seed: int, output: Path, stages: Stages
) -> tuple[dict[str, Any], list[HeadMeasurement], Path | None, Path]:
    _common.keeps(lambda: any(output.glob("*/plan.json")))
    with stages.step("collection: the documentation of this Python") as done:
        everything = _common.load_data("pydocs", output / "data")
        whole = asked == _demo_plan.FULL
        collection = _demo_data.hold_out(everything) if whole else _demo_data.more_test_queries(everything)
        pairs = {split: len(grades) for split, grades in collection.qrels.items()}
        done(f"{len(collection.documents)} documents; queries: {', '.join(f'{n} {s}' for s, n in pairs.items())}")
    where = _demo_steps.Workspace.open(output, asked, seed, _demo_data.collection_digest(everything))
    plan, order = _plan(where, asked, seed, collection, stages)
    part = _demo_data.take(collection, order[: plan.documents])
    part.save_beir(where.folder / "data")
    queries = part.split_queries("test") | part.split_queries("dev") | {_demo_data.EXAMPLE_ID: _demo_data.EXAMPLE}
    bm25 = _bm25(part, queries, stages)
    first, plan = _zero_shot(where, plan, part, queries, stages)
    plan = _train(where, plan, seed, part, stages)
    results, plan = _splade(where, plan, part, queries, (bm25, first), stages)
    rows = _compare_heads(where, plan, stages)
    plot = _demo_report.draw(rows, where.folder / "heads.png")
    results["heads"] = [vars(row) for row in rows]
    results["model"] = str(where.folder / "model")
    late_weight = results["late_interaction"]["weights"]["maxsim"]
    results["commands"] = _demo_commands.commands(where.folder, plan, seed, late_weight)
    results["plan"] = plan.to_dict() | {"operations": plan.operations}
    return results, rows, plot, where.folder


def _plan(
    where: Workspace, asked: float | str, seed: int, collection: Collection, stages: Stages
) -> tuple[Plan, list[str]]:
    """The plan of an earlier run of this demo, or a new one, and the documents in the order in which it takes them."""
    from tilefold.cli import _demo_speed

    order, judged = _demo_data.sampling_order(collection)
    kept = _demo_steps.read_plan(where)
    if kept is not None:
        _common.note(f"resuming an earlier run in {where.folder} (delete that folder to start over)")
        stages.announce(kept)
        return kept, order
    size = _demo_plan.FULL_SIZE if isinstance(asked, str) else _demo_plan.SIZES[0]
    with stages.step("measuring this machine: encoding and training on a few batches") as done:
        recipe = _demo_steps.make_recipe(size, size.fewest, seed)
        speed, work, texts = _demo_speed.measure(recipe, collection, order, judged)
        training = speed.training / work.training
        done(f"tokens/s: {speed.encoding / work.encoding:,.0f} forward, {training:,.0f} forward + backward")
    if isinstance(asked, str):
        plan = _demo_plan.size_plan(asked, size, speed, work, texts)
    else:
        plan = _demo_plan.make_plan(asked, speed, work, texts, spent=stages.elapsed)
    _demo_steps.write_plan(where, plan)
    stages.announce(plan)
    return plan, order


def _bm25(part: Collection, queries: dict[str, str], stages: Stages) -> Run:
    from tilefold.retrieval import BM25Index

    with stages.step("searching: BM25"):
        found: Run = BM25Index.build(_demo_data.contents(part), identifiers=True).search(queries, _demo_steps.DEPTH)
    stages.answers("BM25", part, found)
    return found


def _zero_shot(
    where: Workspace, plan: Plan, part: Collection, queries: dict[str, str], stages: Stages
) -> tuple[ZeroShot, Plan]:
    texts = f"{plan.documents} documents, {plan.dense_tokens:,} tokens"
    title = f"dense zero-shot, and token vectors from the same pass: {texts}"
    with stages.model_step("dense", title, plan) as done, _common.progress_bar("  encoding") as tick:
        found = _demo_steps.zero_shot(where, part, queries, plan.size.dense_length, tick)
        stored = found.documents.manifest
        done(f"{stored.n_tokens:,} token vectors in {stored.storage}", found.reused)
    stages.answers("dense", part, found.run)
    return found, _replanned(where, plan, ("dense",), stages)


def _train(where: Workspace, plan: Plan, seed: int, part: Collection, stages: Stages) -> Plan:
    title = (
        f"training SPLADE with the fused head: {plan.steps} steps of {plan.size.batch_size} pairs, "
        f"{plan.steps * plan.step_tokens:,.0f} tokens"
    )
    recipe = _demo_steps.make_recipe(plan.size, plan.steps, seed)
    with stages.model_step("training", title, plan) as done, _common.progress_bar("  training") as tick:
        trained = _demo_steps.train_model(where, recipe, part, tick)
        resumed = f", from step {trained.resumed_from}" if trained.resumed_from and not trained.reused else ""
        done(
            f"{trained.steps} steps, {'bf16' if trained.bf16 else 'fp32'}{resumed}",
            trained.reused,
            share=1 - trained.resumed_from / trained.steps,
        )
    return _replanned(where, plan, ("dense", "training"), stages)


def _replanned(where: Workspace, plan: Plan, done: tuple[str, ...], stages: Stages) -> Plan:
    """The plan for the remaining stages, adjusted to the time of the last one."""
    slowdown = stages.slowdown(done[-1])
    if slowdown is None or isinstance(plan.minutes, str):
        return plan
    new = _demo_plan.refit(plan, 60 * plan.minutes - stages.elapsed, done, slowdown)
    _demo_steps.write_plan(where, new)
    stages.say_change(plan, new, done)
    return new


def _splade(
    where: Workspace,
    plan: Plan,
    part: Collection,
    queries: dict[str, str],
    baselines: tuple[Run, ZeroShot],
    stages: Stages,
) -> tuple[dict[str, Any], Plan]:
    from tilefold.retrieval import active_terms, encode_queries, hits_to_run

    encoder = _models.load_encoder(str(where.folder / "model"))
    title = f"encoding the documents: {plan.documents} documents, {plan.tokens:,} tokens"
    with stages.model_step("encoding", title, plan) as done, _common.progress_bar("  encoding", resumes="") as tick:
        vectors, reused = _demo_steps.encode_documents(where, encoder, part, tick)
        done(f"{len(vectors)} vectors", reused)
    plan = _replanned(where, plan, ("dense", "training", "encoding"), stages)
    with stages.step("indexing") as done:
        indexes = _demo_steps.build_indexes(where, vectors)
        done(" and ".join(indexes))
    with stages.step("searching: SPLADE"):
        encoded = encode_queries(encoder, queries, top_k=_demo_steps.QUERY_TERMS)
        found = {
            name: hits_to_run(encoded, index.search(encoded, _demo_steps.DEPTH)) for name, index in indexes.items()
        }
    stages.answers("SPLADE", part, found["exact"])
    bm25, first = baselines
    results = _evaluate(part, (bm25, first.run, found["exact"]), first, stages)
    results["active_terms"] = {"queries": active_terms(encoded), "documents": active_terms(vectors)}
    if "seismic" in found:
        results["seismic_overlap_at_10"] = _demo_steps.overlap(found["exact"], found["seismic"])
    return results, plan


def _evaluate(part: Collection, runs: tuple[Run, Run, Run], first: ZeroShot, stages: Stages) -> dict[str, Any]:
    from tilefold.retrieval import interpolate
    from tilefold.retrieval.tuning import choose_weights

    judged = part.qrels["dev"] | part.qrels["test"]
    runs = tuple({query: scores for query, scores in run.items() if query in judged} for run in runs)  # type: ignore[assignment]
    with stages.step("choosing fusion weights on held-out training queries"):
        weights, _ = choose_weights(runs, part.qrels["dev"], measure=_demo_steps.NDCG, k=_demo_steps.DEPTH)
        fused = interpolate(runs, weights, k=_demo_steps.DEPTH)
    with stages.step("reranking by late interaction; its weight is chosen on the same queries"):
        late_weights, reranked = _demo_steps.rerank_candidates(
            runs[2], first.queries, first.documents, part.qrels["dev"]
        )
    systems = dict(zip(_demo_report.SYSTEMS, (*runs, fused, reranked), strict=True))
    return _demo_report.figures(systems, part.qrels["test"]) | {
        "documents": len(part.documents),
        "fusion_weights": dict(zip(("bm25", "dense", "splade"), weights, strict=True)),
        "late_interaction": {
            "candidates": _demo_steps.RERANKED,
            "weights": dict(zip(("splade", "maxsim"), late_weights, strict=True)),
            "tokens": str(first.documents.folder),
        },
    }


def _compare_heads(where: Workspace, plan: Plan, stages: Stages) -> list[HeadMeasurement]:
    shapes = ", ".join(str(shape[0]) for shape in _demo_steps.head_shapes(plan.head_shapes))
    with stages.model_step("heads", f"comparing the plain head with the fused head: batch {shapes}", plan) as done:
        rows, reused = _demo_steps.compare_heads(where, plan.head_shapes)
        done(f"{len(rows)} measurements", reused)
    return rows
