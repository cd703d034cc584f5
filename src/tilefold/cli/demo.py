"""``tilefold demo``: train, index, search and evaluate a sparse retriever on this machine, with no download."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold._files import write_json
from tilefold.cli import _common, _demo_data, _demo_report, _demo_steps, _models
from tilefold.cli._demo_data import EXAMPLE, EXAMPLE_ID, Size

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.fusion import Run

MINUTES, QUICK_MINUTES = 5.0, 3.0
ANSWERS = 3


def demo(
    minutes: Annotated[
        float | None,
        typer.Option(help="The largest of four sizes, meant for 3, 5, 10 and 15 minutes on two cores; by default 5."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Everything at full size: 6 to 30 minutes on 2 cores, depending on the CPU.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The same as --minutes 3.")] = False,
    seed: Annotated[int, typer.Option(help="Equal seeds and sizes give equal models.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for all files of the demo.")] = _common.DEMO_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="The results as JSON on stdout.")] = False,
) -> None:
    """Train, index, search and evaluate a sparse retriever on the documentation of this Python.

    Runs offline on a CPU. A second run reuses the results of the first; an interrupted run is resumed.
    """
    from tilefold.retrieval.errors import MissingPackageError

    size = _asked_size(minutes, full, quick)
    if not 0 <= seed < 2**32:
        raise _common.UsageError(f"--seed: expected a whole number of at least 0 and below 2^32, got {seed}.")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise _common.UsageError(f"--output: expected a folder, got the file {output}.") from error
    stages = Stages()
    try:
        results, folder = _run(size, seed, output, stages)
    except MissingPackageError as error:
        raise _common.CommandError(f'{_common.first_line(error)} (everything: pip install "tilefold[demo]")') from error
    results |= {"seconds": stages.elapsed, "stages": stages.record, "seed": seed}
    record = {"folder": folder.name, "query_terms": _demo_steps.QUERY_TERMS, "results": results}
    write_json(output / "demo.json", record)
    if as_json:
        _common.print_json(results)
        return
    _demo_report.print_report(results)


def _asked_size(minutes: float | None, full: bool, quick: bool) -> Size:
    if sum((minutes is not None, full, quick)) > 1:
        raise _common.UsageError("--minutes, --full and --quick exclude one another: give one of them.")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise _common.UsageError(f"--minutes: expected a number above 0, got {minutes:g}.")
    if full:
        return _demo_data.FULL
    return _demo_data.size_for(minutes or (QUICK_MINUTES if quick else MINUTES))


class Stages:
    """Reports stages on stderr, and measures their times."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.record: dict[str, dict[str, Any]] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._started

    @contextmanager
    def step(self, name: str, text: str) -> Iterator[Callable[..., None]]:
        """Print what begins, and afterwards its time; yields a function of its result and whether it was kept."""
        started = time.monotonic()
        _common.note(f"{text} ...")
        outcome, kept = "", False

        def done(text: str, reused: bool = False) -> None:
            nonlocal outcome, kept
            outcome, kept = f"{text}, ", reused

        yield done
        seconds = time.monotonic() - started
        self.record[name] = {"seconds": seconds, "reused": kept}
        _common.note(f"  {outcome}{'reused' if kept else f'{seconds:.1f} s'}")


def _answers(system: str, collection: Collection, run: Run) -> None:
    """Print the first documents for the example query."""
    best = sorted(run.get(EXAMPLE_ID, {}).items(), key=lambda item: -item[1])[:ANSWERS]
    titles = [collection.documents[name].title or name for name, _ in best]
    _common.note(f'  {system} answers "{EXAMPLE}": {", ".join(titles) or "nothing"}')


def _run(size: Size, seed: int, output: Path, stages: Stages) -> tuple[dict[str, Any], Path]:
    """All stages; the results, and the folder of this demo."""
    from tilefold.retrieval import BM25Index

    _common.keeps(lambda: any(output.glob("*/data")))
    with stages.step("collection", "collection: the documentation of this Python") as done:
        everything = _common.load_data("pydocs", output / "data")
        part = _demo_data.take(_demo_data.split(everything, size), size.documents)
        pairs = ", ".join(f"{len(grades)} {split}" for split, grades in part.qrels.items())
        done(f"{len(part.documents)} of {len(everything.documents)} documents; queries: {pairs}")
    folder = _demo_steps.folder_of(output, size, seed, _demo_data.collection_digest(everything))
    if (folder / "data").is_dir():
        _common.note(f"resuming an earlier run in {folder} (delete that folder to start over)")
    part.save_beir(folder / "data")
    queries = part.split_queries("test") | part.split_queries("dev") | {EXAMPLE_ID: EXAMPLE}
    with stages.step("bm25", "searching: BM25"):
        bm25: Run = BM25Index.build(part.contents(), identifiers=True).search(queries, _demo_steps.DEPTH)
    _answers("BM25", part, bm25)
    title = f"dense zero-shot, and token vectors from the same pass: {len(part.documents)} documents"
    with stages.step("dense", title) as done, _common.progress_bar("  encoding") as tick:
        first = _demo_steps.zero_shot(output, part, queries, size.dense_length, tick)
        stored = first.documents.manifest
        done(f"{stored.n_tokens:,} token vectors in {stored.storage}", first.reused)
    _answers("dense", part, first.run)
    title = f"training SPLADE with the fused head: {size.steps} steps of {size.batch_size} pairs"
    with stages.step("training", title) as done, _common.progress_bar("  training") as tick:
        trained = _demo_steps.train_model(folder, size, seed, part, tick)
        resumed = f", from step {trained.resumed_from}" if trained.resumed_from and not trained.reused else ""
        done(f"{trained.steps} steps, {'bf16' if trained.bf16 else 'fp32'}{resumed}", trained.reused)
    found, results = _splade(folder, part, queries, stages)
    _answers("SPLADE", part, found)
    results |= _evaluate(part, (bm25, first.run, found), first, stages)
    results["model"] = str(folder / "model")
    late_weight = results["late_interaction"]["weights"]["maxsim"]
    results["commands"] = _demo_report.commands(folder, size, seed, late_weight)
    return results, folder


def _splade(folder: Path, part: Collection, queries: dict[str, str], stages: Stages) -> tuple[Run, dict[str, Any]]:
    """The run of the trained model over the exact index, and what is known of its vectors and indexes."""
    from tilefold.retrieval import active_terms, encode_queries, hits_to_run

    encoder = _models.load_encoder(str(folder / "model"))
    title = f"encoding the documents: {len(part.documents)} documents"
    with stages.step("encoding", title) as done, _common.progress_bar("  encoding", resumes="") as tick:
        vectors, reused = _demo_steps.encode_documents(folder, encoder, part, tick)
        done(f"{len(vectors)} vectors", reused)
    with stages.step("indexing", "indexing") as done:
        indexes = _demo_steps.build_indexes(folder, vectors)
        done(" and ".join(indexes))
    with stages.step("searching", "searching: SPLADE"):
        encoded = encode_queries(encoder, queries, top_k=_demo_steps.QUERY_TERMS)
        found = {
            name: hits_to_run(encoded, index.search(encoded, _demo_steps.DEPTH)) for name, index in indexes.items()
        }
    results: dict[str, Any] = {"active_terms": {"queries": active_terms(encoded), "documents": active_terms(vectors)}}
    if "seismic" in found:
        results["seismic_overlap_at_10"] = _demo_steps.overlap(found["exact"], found["seismic"])
    return found["exact"], results


def _evaluate(
    part: Collection, runs: tuple[Run, Run, Run], first: _demo_steps.ZeroShot, stages: Stages
) -> dict[str, Any]:
    """Fusion and reranking, with weights chosen on held-out queries, and the figures of all five systems."""
    from tilefold.retrieval import interpolate
    from tilefold.retrieval.tuning import choose_weights

    dev = part.qrels["dev"]
    judged = dev | part.qrels["test"]
    runs = tuple({query: scores for query, scores in run.items() if query in judged} for run in runs)  # type: ignore[assignment]
    with stages.step("fusion", "choosing fusion weights on held-out training queries"):
        weights, _ = choose_weights(runs, dev, measure=_demo_steps.NDCG, k=_demo_steps.DEPTH)
        fused = interpolate(runs, weights, k=_demo_steps.DEPTH)
    with stages.step("reranking", "reranking by late interaction; its weight is chosen on the same queries"):
        late_weights, reranked = _demo_steps.rerank_candidates(runs[2], first.queries, first.documents, dev)
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
