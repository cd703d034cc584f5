"""``tilefold demo``: train, index, search and evaluate a sparse retriever without a download."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold import retrieval
from tilefold._internal.files import write_json
from tilefold._internal.typing import Model
from tilefold.cli import _common, _models
from tilefold.cli import _demo_steps as steps
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._demo_steps import (
    DEPTH,
    DOCUMENT_TERMS,
    EXAMPLE,
    NDCG,
    RECALL,
    Size,
    UntrainedResults,
)
from tilefold.cli._options import Options, option
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.errors import MissingPackageError
from tilefold.retrieval.vectors.sparse import SparseVectors

if TYPE_CHECKING:
    from tilefold.retrieval.evaluation.significance import Mean

ANSWERS = 3  # documents that are shown for the example query
# Names of the systems that the demo compares.
SPLADE = "SPLADE (trained here)"
FUSION = "fusion"
RERANKED = "SPLADE + late interaction"
SYSTEMS = ("BM25", "dense zero-shot (all-MiniLM-L6-v2)", SPLADE, FUSION, RERANKED)
DEFAULT_MINUTES = 3.0
ERRORS = 2.0  # a difference of fewer standard errors may be chance


@dataclass(frozen=True, kw_only=True)
class DemoRequest(Options):
    """Options of ``tilefold demo``."""

    minutes: Annotated[
        float | None,
        option(
            "Time limit on two cores, which chooses the largest of the sizes for 3, 5, 10 and 15 "
            "minutes; by default 3.",
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
            "The same as --minutes 3, the default.",
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
        tilefold demo --minutes 5
    """
    size = _choose_size(request.minutes, request.full, request.quick)
    if not 0 <= request.seed < 2**32:
        raise UsageError(
            f"--seed: expected a whole number of at least 0 and below 2^32, got {request.seed}.",
        )
    if request.output.is_file():
        raise UsageError(f"--output: expected a folder, got the file {request.output}.")
    request.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    stages = Stages()
    try:
        results = _run(size, request.seed, request.output, stages)
    except MissingPackageError as error:
        raise CommandError(
            f'{_common.first_line(error)} (everything: pip install "tilefold[demo]")',
        ) from error
    results["seconds"] = time.monotonic() - started
    results["stages"] = stages.records
    results["seed"] = request.seed
    _write_record(request.output, results)
    if request.as_json:
        _common.print_json(results)
    else:
        print_report(results)


def _write_record(output: Path, results: dict[str, Any]) -> None:
    """Write ``demo.json``, from which ``tilefold search`` finds the index of the demo.

    Args:
        output: the folder of all demos.
        results: the results of the demo, with the folder of its model.
    """
    record = {
        "folder": Path(results["model"]).parent.name,
        "query_terms": steps.QUERY_TERMS,  # the same search as that of the demo
        "results": results,
    }
    write_json(output / "demo.json", record)


def _choose_size(minutes: float | None, full: bool, quick: bool) -> Size:
    """Return the largest size of the demo that fits into the minutes, or the smallest size.

    Args:
        minutes: the value of ``--minutes``; 3 by default.
        full: whether the full size is chosen, which has no limit.
        quick: whether the default size is chosen by ``--quick``.

    Raises:
        UsageError: if several of these options are given, or the minutes are not above 0.
    """
    if sum((minutes is not None, full, quick)) > 1:
        raise UsageError("--minutes, --full and --quick cannot be combined: give one of them.")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UsageError(f"--minutes: expected a number above 0, got {minutes:g}.")
    if full:
        return steps.FULL
    if minutes is None:
        minutes = DEFAULT_MINUTES
    # The sizes are keyed by their minutes.
    smallest = min(steps.SIZES)
    if minutes < smallest:
        _common.note(f"--minutes {minutes:g}: the smallest size takes about {smallest:g} minutes")
    fitting_minutes = [size_minutes for size_minutes in steps.SIZES if size_minutes <= minutes]
    return steps.SIZES[max(fitting_minutes, default=smallest)]


@dataclass
class Outcome:
    """Outcome of a stage of the demo, which the stage fills in.

    Attributes:
        text: a description of the results, such as ``"3000 vectors"``.
        reused: whether the results are those of an earlier run.
    """

    text: str = ""
    reused: bool = False


class Stages:
    """Runs the stages of the demo: prints their titles on stderr and records their times.

    Attributes:
        records: stage -> its ``seconds``, and whether its results were ``reused``.
    """

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}

    @contextmanager
    def stage(self, name: str, title: str) -> Iterator[Outcome]:
        """Print the title of a stage, and afterwards its outcome and its time.

        Args:
            name: the key of the stage in :attr:`records`.
            title: the title to print.

        Yields:
            The outcome, which the stage fills in.
        """
        started = time.monotonic()
        note(f"{title} ...")
        outcome = Outcome()
        yield outcome
        seconds = time.monotonic() - started
        self.records[name] = {"seconds": seconds, "reused": outcome.reused}
        time_text = "reused" if outcome.reused else f"{seconds:.1f} s"
        note(f"  {outcome.text}, {time_text}" if outcome.text else f"  {time_text}")


def _note_answers(system: str, collection: Collection, run: Run) -> None:
    """Print the titles of the documents that a system ranks first for the example query."""
    documents = list(run[steps.EXAMPLE_ID])[:ANSWERS]
    titles = [collection.documents[document_id].title or document_id for document_id in documents]
    note(f'  {system} answers "{EXAMPLE}": {", ".join(titles) or "nothing"}')


def _run(size: Size, seed: int, output: Path, stages: Stages) -> dict[str, Any]:
    """Run all stages of the demo.

    Args:
        size: the size of the demo.
        seed: the seed of the training.
        output: the folder of all demos.
        stages: prints the title of each step, and records its time.

    Returns:
        The results, as ``--json`` prints them.
    """
    from tilefold.recipes import train

    _common.finished_work_checks.append(lambda: any(output.glob("*/data")))
    with stages.stage("collection", "collection: the documentation of this Python") as outcome:
        full_collection = _common.load_data("pydocs", output / "data")
        collection = steps.sample_documents(steps.split(full_collection, size), size.documents)
        pairs = ", ".join(f"{len(grades)} {split}" for split, grades in collection.qrels.items())
        outcome.text = (
            f"{len(collection.documents)} of {len(full_collection.documents)} documents; "
            f"queries: {pairs}"
        )
    texts = {**full_collection.contents(), **full_collection.queries}
    folder = steps.folder_of(output, size, seed, texts_digest(texts))
    if (folder / "data").is_dir():
        note(f"resuming an earlier run in {folder} (delete that folder to start over)")
    collection.save_beir(folder / "data", overwrite=True)
    queries = {
        **collection.split_queries("test"),
        **collection.split_queries("dev"),
        steps.EXAMPLE_ID: EXAMPLE,
    }
    with stages.stage("bm25", "searching: BM25"):
        bm25_index = retrieval.BM25Index.build(collection.contents(), identifiers=True)
        bm25 = bm25_index.search(queries, DEPTH)
    _note_answers("BM25", collection, bm25)
    dense_title = f"dense zero-shot, and token vectors: {len(collection.documents)} documents"
    with stages.stage("dense", dense_title) as outcome:
        untrained = steps.search_untrained(output, collection, queries, size.dense_length)
        outcome.reused = untrained.reused
        manifest = untrained.document_tokens.manifest
        outcome.text = f"{manifest.n_tokens:,} token vectors in {manifest.storage}"
    _note_answers("dense", collection, untrained.dense_run)
    training_title = (
        f"training SPLADE with the fused head: {size.steps} steps of {size.batch_size} pairs"
    )
    with (
        stages.stage("training", training_title) as outcome,
        _common.progress_bar("  training") as update,
    ):
        recipe = steps.make_recipe(size, seed)
        trained = train(recipe, collection, folder / "model", progress=update)
        outcome.text = f"{trained.steps} steps, {'bf16' if trained.bf16 else 'fp32'}"
        if trained.resumed_from and not trained.reused:
            outcome.text += f", from step {trained.resumed_from}"
        outcome.reused = trained.reused
    results = _evaluate(folder, collection, queries, bm25, untrained, stages)
    late_weight = results["late_interaction"]["weights"]["maxsim"]
    results["model"] = str(folder / "model")
    results["commands"] = commands(folder, size, seed, late_weight)
    return results


def _evaluate(
    folder: Path,
    collection: Collection,
    queries: dict[str, str],
    bm25: Run,
    untrained: UntrainedResults,
    stages: Stages,
) -> dict[str, Any]:
    """Search with the trained model, fuse and rerank, and compute the measures of all systems.

    The weights of fusion and reranking are chosen on queries of the split ``dev``. The measures are
    computed on the split ``test``.

    Args:
        folder: the folder of the demo, with the trained model.
        collection: the documents and judgements.
        queries: query id -> text, for both splits.
        bm25: the run of BM25.
        untrained: the dense run and the token vectors of all-MiniLM-L6-v2.
        stages: prints the title of each step, and records its time.

    Returns:
        The results for ``--json``: the measures and differences of the systems, mean numbers of
        active terms, and weights.
    """
    encoder = _models.load_encoder(str(folder / "model"))
    vectors = _encode_documents(encoder, collection, folder, stages)
    indexes = _build_indexes(vectors, folder, stages)
    with stages.stage("searching", "searching: SPLADE"):
        encoded = retrieval.encode_queries(encoder, queries, top_k=steps.QUERY_TERMS)
        run_by_backend = {
            backend: retrieval.hits_to_run(encoded, index.search(encoded, DEPTH))
            for backend, index in indexes.items()
        }
    splade = run_by_backend["exact"]
    _note_answers("SPLADE", collection, splade)
    dev = collection.qrels["dev"]
    with stages.stage("fusion", "choosing fusion weights on held-out training queries"):
        fused, fusion_weights = _interpolate_best((bm25, untrained.dense_run, splade), dev)
    with stages.stage(
        "reranking",
        "reranking by late interaction; its weight is chosen on the same queries",
    ):
        late = retrieval.rerank(
            splade,
            untrained.query_tokens,
            untrained.document_tokens,
            depth=steps.RERANKED,
            tail="drop",
        )
        reranked, late_weights = _interpolate_best((splade, late), dev)
    all_runs = (bm25, untrained.dense_run, splade, fused, reranked)
    run_by_system = dict(zip(SYSTEMS, all_runs, strict=True))
    results = compute_figures(run_by_system, collection.qrels["test"])
    results["active_terms"] = {
        "queries": retrieval.active_terms(encoded),
        "documents": retrieval.active_terms(vectors),
    }
    results["documents"] = len(collection.documents)
    results["fusion_weights"] = dict(
        zip(("bm25", "dense", "splade"), fusion_weights, strict=True),
    )
    results["late_interaction"] = {
        "candidates": steps.RERANKED,
        "weights": dict(zip(("splade", "maxsim"), late_weights, strict=True)),
        "tokens": str(untrained.document_tokens.folder),
    }
    if "seismic" in run_by_backend:
        results["seismic_overlap_at_10"] = steps.overlap(splade, run_by_backend["seismic"])
    return results


def _interpolate_best(
    runs: Sequence[Run],
    qrels: dict[str, dict[str, int]],
) -> tuple[Run, Sequence[float]]:
    """Interpolate the scores of runs, with the weights that have the highest nDCG@10.

    Args:
        runs: the runs.
        qrels: query id -> document id -> grade, for the queries that weights are chosen on.

    Returns:
        The interpolated run of all queries, and the weight of each run.
    """
    from tilefold.retrieval.evaluation.measures import choose_weights

    weights, _ = choose_weights(runs, qrels, measure=NDCG, k=DEPTH)
    return retrieval.interpolate(runs, weights, k=DEPTH), weights


def _encode_documents(
    encoder: Model,
    collection: Collection,
    folder: Path,
    stages: Stages,
) -> SparseVectors:
    """Encode the documents with the trained model, or reuse the vectors of an earlier demo.

    Args:
        encoder: the trained model.
        collection: the documents.
        folder: the folder of the demo.
        stages: prints the title of this step, and records its time.
    """
    title = f"encoding the documents: {len(collection.documents)} documents"
    with stages.stage("encoding", title) as outcome:
        outcome.reused = steps.encode(
            retrieval.encode_collection,
            encoder,
            collection,
            folder / "vectors",
            top_k=DOCUMENT_TERMS,
        )
        vectors: SparseVectors = retrieval.read_vectors(folder / "vectors")
        outcome.text = f"{len(vectors)} vectors"
    return vectors


def _build_indexes(vectors: SparseVectors, folder: Path, stages: Stages) -> dict[str, Any]:
    """Build and save an exact index and, if its package is installed, a Seismic index.

    Args:
        vectors: the vectors of the documents.
        folder: the folder of the demo.
        stages: prints the title of this step, and records its time.

    Returns:
        ``"exact"`` or ``"seismic"`` -> index.
    """
    indexes: dict[str, Any] = {}
    with stages.stage("indexing", "indexing") as outcome:
        for backend, name in (("exact", "index"), ("seismic", "index-seismic")):
            try:
                indexes[backend] = retrieval.build_index(vectors, backend)
                indexes[backend].save(folder / name, overwrite=True)
            except MissingPackageError as error:
                note(f"  {backend} index left out: {_common.first_line(error)}")
        outcome.text = " and ".join(indexes)
    return indexes


def _mean_over_queries(values: list[float]) -> Mean:
    """Return the mean of a value per query, with its standard error.

    The demo does not show the bootstrap interval, so few resamples suffice.
    """
    mean: Mean = retrieval.mean_of(values, resamples=99)
    return mean


def compute_figures(runs: dict[str, Run], qrels: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Compute the mean measures of each system, and the paired differences that the demo reports.

    Args:
        runs: system -> run, in the order of ``SYSTEMS``.
        qrels: the judgements of the test queries.

    Returns:
        A dictionary for JSON: ``queries``, the number of queries; ``systems``, the means of each
        system; ``comparisons``, mean differences in nDCG@10, each between two systems.
    """
    measures = (NDCG, RECALL)
    tables = {
        system: retrieval.evaluate_per_query(run, qrels, measures) for system, run in runs.items()
    }
    systems: dict[str, dict[str, Any]] = {}
    for system, table in tables.items():
        ndcg = _mean_over_queries([values[NDCG] for values in table.values()])
        recall = _mean_over_queries([values[RECALL] for values in table.values()])
        systems[system] = {
            NDCG: ndcg.mean,
            RECALL: recall.mean,
            "standard_error": ndcg.standard_error or 0.0,
        }
    bm25, dense, splade, fusion, late = runs  # names of the systems
    best_single = max((bm25, dense, splade), key=lambda system: systems[system][NDCG])
    comparisons = []
    for system, baseline in (
        (splade, bm25),
        (splade, dense),
        (fusion, best_single),
        (late, splade),
    ):
        pairs = zip(tables[system].values(), tables[baseline].values(), strict=True)
        difference = _mean_over_queries(
            [values[NDCG] - baseline_values[NDCG] for values, baseline_values in pairs],
        )
        comparisons.append(
            {
                "system": system,
                "over": baseline,
                "difference": difference.mean,
                "queries": len(qrels),
                "standard_error": difference.standard_error or 0.0,
            },
        )
    return {"queries": len(qrels), "systems": systems, "comparisons": comparisons}


def difference_line(comparison: dict[str, Any]) -> str:
    """Format the difference between two systems in nDCG@10, with its standard error.

    Args:
        comparison: the names of both systems (``system``, ``over``), the mean ``difference`` over
            queries and its ``standard_error``.
    """
    difference = comparison["difference"]
    error = comparison["standard_error"]
    line = f"{comparison['system']} over {comparison['over']}: {difference:+.3f} ± {error:.3f}"
    if abs(difference) <= ERRORS * error:
        return f"{line} (at most {ERRORS:.0f} standard errors: it may be chance)"
    if not error:
        return line
    return f"{line} ({abs(difference) / error:.1f} standard errors)"


def print_report(results: dict[str, Any]) -> None:
    """Print the tables of a demo, and commands to try next, on stdout.

    Args:
        results: the results of the demo, as ``--json`` prints them.
    """
    _print_systems(results)
    folder_of_tokens = results["late_interaction"]["tokens"]
    search_command = f'  tilefold search "{EXAMPLE}"'
    lines = [
        f"Differences in {NDCG}, mean ± standard error over the same {results['queries']} queries:",
        *(f"  {difference_line(comparison)}" for comparison in results["comparisons"]),
    ]
    if "seismic_overlap_at_10" in results:
        lines.append(
            f"Seismic's top 10 holds {results['seismic_overlap_at_10']:.1%} of the exact top 10.",
        )
    lines += [
        f"model: {results['model']}",
        "commands that reproduce the rows of the first table:",
        *(f"  {line}" for line in results["commands"]),
        f"done in {results['seconds'] / 60:.1f} minutes; now try:",
        search_command,
        f"{search_command} --rerank {folder_of_tokens}",
    ]
    typer.echo("\n".join(lines))


def _print_systems(results: dict[str, Any]) -> None:
    """Print a table with a row of measures for each system.

    The systems are BM25, a dense model, SPLADE, a fusion of these three, and SPLADE whose first
    documents are reranked by late interaction.

    Args:
        results: the results of the demo, as ``--json`` prints them.
    """
    reranking = results["late_interaction"]
    mean_active_terms = results["active_terms"]  # nonzero entries of the vectors of SPLADE
    labels = {
        FUSION: f"fusion of these three ({_format_weights(results['fusion_weights'])})",
        RERANKED: (
            f"SPLADE + late interaction on its top {reranking['candidates']}, zero-shot MiniLM "
            f"tokens ({_format_weights(reranking['weights'])})"
        ),
    }
    rows = []
    for system, scores in results["systems"].items():
        query_terms = ""
        document_terms = ""
        if system == SPLADE:  # the only system that encodes texts to weights of terms
            query_terms = f"{mean_active_terms['queries']:.0f}"
            document_terms = f"{mean_active_terms['documents']:.0f}"
        rows.append(
            (
                labels.get(system, system),
                f"{scores[NDCG]:.3f} ± {scores['standard_error']:.3f}",
                f"{scores[RECALL]:.3f}",
                query_terms,
                document_terms,
            ),
        )
    title = (
        f"pydocs, {results['documents']} documents, {results['queries']} test queries that "
        "training never saw"
    )
    columns = ("system", "nDCG@10", "recall@100", "terms per query", "terms per document")
    _common.print_table(columns, rows, title, right_aligned=columns[1:])


def _format_weights(weights: dict[str, float]) -> str:
    """Format the values of weights, such as ``0.2, 0.3, 0.5``."""
    return ", ".join(f"{weight:.1f}" for weight in weights.values())


def commands(folder: Path, size: Size, seed: int, weight: float) -> list[str]:
    """Return shell lines that reproduce the demo's table step by step.

    Args:
        folder: the folder of the demo, which the first line changes to.
        size: the size of the demo.
        seed: the seed of the training.
        weight: the weight of late interaction in the last row, where it reranks.
    """
    recipe = steps.make_recipe(size, seed)
    both_splits = "--data data --split test --split dev"
    length = size.dense_length
    search = f"--index by-hand/index --model by-hand/model --query-top-k {steps.QUERY_TERMS}"
    group_by_length = " --group-by-length" if recipe.group_by_length else ""
    lines = [
        # The runs of BM25 and of the dense model.
        "index --backend bm25 --data data --identifiers --output by-hand/bm25",
        f"evaluate {both_splits} --index by-hand/bm25 --save-run by-hand/bm25.trec",
        f"evaluate {both_splits} --model minilm --max-length {length} "
        "--save-run by-hand/dense.trec",
        # The run of SPLADE.
        f"train --data data --model {shlex.quote(recipe.base_model)} --steps {size.steps} "
        f"--batch-size {recipe.batch_size} --lr {recipe.learning_rate:g} "
        f"--max-length {recipe.max_length} --train-max-length {recipe.train_max_length} "
        f"--seed {seed}{group_by_length} --output by-hand/model",
        f"encode --data data --model by-hand/model --top-k {DOCUMENT_TERMS} "
        "--output by-hand/vectors",
        "index --vectors by-hand/vectors --output by-hand/index",
        f"evaluate {both_splits} {search} --save-run by-hand/splade.trec",
        # The fusion of the three runs.
        "fuse --data data --run by-hand/bm25.trec --run by-hand/dense.trec "
        "--run by-hand/splade.trec --method interpolation --tune dev",
        # SPLADE, reranked by the token states of MiniLM.
        "train --data data --recipe colbert --model minilm --steps 0 --dimension 0 "
        f"--keep-punctuation --max-length {length} --query-length {length} --output by-hand/late",
        "encode --data data --model by-hand/late --storage int8 --output by-hand/tokens",
        f"evaluate --data data {search} --rerank by-hand/tokens "
        f"--rerank-depth {steps.RERANKED} --rerank-weight {weight:g}",
    ]
    change_folder = shlex.join(["cd", str(folder)])
    return [change_folder, *(f"tilefold {line}" for line in lines)]
