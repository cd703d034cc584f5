"""``tilefold evaluate``, a run, an index or a dense model against judgements, and ``tilefold
fuse``, several runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tilefold import retrieval
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import UsageError
from tilefold.cli._options import DocumentFieldOptions, option, positive, refuse_options
from tilefold.cli._retrievers import SearcherParts
from tilefold.retrieval.common.provenance import Provenance

if TYPE_CHECKING:
    from tilefold.retrieval.common.runs import Run
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.search.fusion import Normalization
    from tilefold.retrieval.search.passages import BestPassages
    from tilefold.retrieval.search.reranking import Reranker, Reranking
    from tilefold.retrieval.search.searcher import Ranking, Searcher, SearchRequest

DEPTH = 100  # documents per query
RRF_K = 60


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(
    _retrievers.IndexOptions,
    _retrievers.RerankOptions,
    _retrievers.FeedbackOptions,
    DocumentFieldOptions,
):
    """Options of ``tilefold evaluate``."""

    data: Annotated[
        str,
        option(
            _common.DATA_HELP,
        ),
    ]
    split: Annotated[
        list[str] | None,
        option(
            _scores.SPLIT_HELP,
        ),
    ] = None
    drop_unknown: Annotated[
        bool,
        option(
            _common.DROP_UNKNOWN_HELP,
            "--drop-unknown",
        ),
    ] = False
    run: Annotated[
        Path | None,
        option(
            "A TREC run file to score.",
        ),
    ] = None
    index: Annotated[
        Path | None,
        option(
            "Index to search, with the --model that made it; BM25 has none.",
        ),
    ] = None
    model: Annotated[
        str | None,
        option(
            _retrievers.MODEL_HELP + " Without --index, a dense model; minilm is all-MiniLM-L6-v2.",
        ),
    ] = None
    k: Annotated[
        int | None,
        positive(
            "Documents per query to rerank and to save, by default 100; measures see what they "
            "need.",
        ),
    ] = None
    measure: Annotated[
        list[str] | None,
        option(
            _scores.MEASURE_HELP,
        ),
    ] = None
    where: Annotated[list[str] | None, _retrievers.WHERE] = None
    max_length: Annotated[int | None, _retrievers.DENSE_LENGTH] = None
    rerank_tail: Annotated[
        Literal["keep", "drop"] | None,
        option(
            "Candidates that were not reranked: by default kept, last.",
        ),
    ] = None
    vectors: Annotated[
        Path | None,
        option(
            "The encoded documents of --index, for --prf.",
        ),
    ] = None
    save_run: Annotated[
        Path | None,
        option(
            _scores.SAVE_RUN_HELP,
            panel="Output",
        ),
    ] = None
    per_query: Annotated[
        Path | None,
        option(
            "Write the measures of each query: tab-separated columns, named in the first line.",
            panel="Output",
        ),
    ] = None
    overwrite: Annotated[
        bool,
        option(
            _common.OVERWRITE_HELP,
            "--overwrite",
            panel="Output",
        ),
    ] = False
    identical_ids: Annotated[
        Literal["ignore", "count"] | None,
        option(
            _scores.IDENTICAL_IDS_HELP,
        ),
    ] = None
    as_json: Annotated[
        bool,
        option(
            "The measures as JSON on stdout.",
            "--json",
            panel="Output",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for conflicting options, and for options without effect."""
        super().validate()
        reads_run = self.run is not None
        searches = self.model is not None or self.index is not None
        if reads_run == searches:
            raise UsageError(
                "give either --run FILE, or --index (with --model unless it is BM25), or a dense "
                "--model.",
            )
        if self.index is None:
            self.refuse_index_options("requires --index")
            refuse_options({"--where": self.where}, "requires --index")
        encodes_documents = not reads_run and self.index is None
        if not encodes_documents:
            refuse_options(
                {"--max-length": self.max_length},
                "requires a dense --model, without --index",
            )
        if reads_run:
            refuse_options(
                {"--k": self.k},
                "requires --index or a dense --model; --rerank has --rerank-depth",
            )
            refuse_options(
                {"--prf": self.prf},
                "requires --index or a dense --model, because a run has no vectors",
            )
            if self.rerank is None:
                self.refuse_dtype("requires a model: --run is only scored")
        if self.prf is None:
            refuse_options({"--vectors": self.vectors}, "requires --prf")
        if self.save_run is None and self.per_query is None:
            refuse_options({"--overwrite": self.overwrite}, "requires --save-run or --per-query")
        if self.rerank is None:
            refuse_options({"--rerank-tail": self.rerank_tail}, "requires --rerank")
        if self.rerank_weight is not None:
            refuse_options(
                {"--rerank-tail": self.rerank_tail},
                "cannot be combined with --rerank-weight, which keeps all candidates",
            )


def evaluate(request: EvaluateRequest) -> None:
    """Evaluate a TREC run, an index or a dense model, with --rerank after reranking.

    Means over queries have standard errors (±) and bootstrap intervals; tilefold compare tests
    differences between runs.

    Example:
        tilefold evaluate --data DATA --index INDEX --model MODEL
    """
    # All options are checked before the collection is loaded.
    depth = None if request.run is not None else request.k or DEPTH
    reranking = request.reranking(depth, request.rerank_tail or "keep")
    measures = _scores.requested_measures(request.measure)
    search_request = retrieval.SearchRequest(
        k=max(request.k or DEPTH, measures.depth, request.rerank_depth or 0),
        feedback=request.feedback(),
        interpolation=request.interpolation(),
    )
    if request.save_run is None and request.rerank is None:
        _scores.note_unused_depth(request.k, measures.depth)
    _check_output_files(request)
    _models.check_model_names({"--model": request.model, "--rerank": request.rerank})

    task = _load_task(request)
    if request.run is None and request.save_run is not None:
        _scores.check_ids_of_run(task.queries, task.collection.documents)
    evaluated = _read_or_search(request, search_request, reranking, task)
    scores = _scores.score(
        evaluated.named_run,
        task.collection,
        task.splits,
        measures,
        ignore_identical_ids=task.ignores_identical_ids,
        queries_without_own_id=evaluated.queries_without_own_id,
    )
    if request.save_run is not None:
        _scores.save_run(
            evaluated.named_run,
            task.provenance,
            request.save_run,
            depth,
            overwrite=request.overwrite,
        )
    if request.per_query is not None:
        scores.write(request.per_query)
    feedback_changes = None
    if evaluated.search is not None and reranking is None:
        feedback_changes = _compare_feedback(evaluated.search, scores, task)
    _print_scores(request, task.collection, scores, evaluated.precisions, feedback_changes)


@dataclass(frozen=True)
class _EvaluatedRun:
    """The run that is measured.

    Attributes:
        named_run: the run, after reranking.
        queries_without_own_id: the queries whose hit with their own id was removed before.
        search: the search that gave the run; None if it was read from a file.
        precisions: the dtypes of the vectors that the search and the reranker have compared.
    """

    named_run: _scores.NamedRun
    queries_without_own_id: set[str]
    search: _Search | None
    precisions: dict[str, str | None]


def _read_or_search(
    request: EvaluateRequest,
    search_request: SearchRequest,
    reranking: Reranking | None,
    task: _Task,
) -> _EvaluatedRun:
    """Read the run of ``--run``, or search all queries, and rerank the results with ``--rerank``.

    Args:
        request: the options of the command.
        search_request: the options of the search, if there is no ``--run``.
        reranking: the options of reranking; None without ``--rerank``.
        task: the queries, documents and judgements.
    """
    reranker = _load_reranker(request, task)  # raises an error before the search, which takes long
    search: _Search | None = None
    precisions: dict[str, str | None] = {}
    if request.run is not None:
        named_run, queries_without_own_id = _read_run(request.run, task)
    else:
        search = _search(request, search_request, task)
        named_run = search.named_run
        queries_without_own_id = search.ranking.ignored_identical_ids
        precisions |= search.searcher.precisions
    _scores.check_has_results(named_run, task.collection, task.splits)
    if reranker is not None and reranking is not None:
        passages = None if search is None else search.passages
        named_run = _rerank(named_run, reranker, reranking, passages, task)
        precisions |= reranker.precisions
    return _EvaluatedRun(named_run, queries_without_own_id, search, precisions)


@dataclass(frozen=True)
class _Task:
    """The queries, documents and judgements of an evaluation.

    Attributes:
        collection: the collection with the documents and the judgements.
        provenance: the fingerprint of its documents.
        splits: the splits to evaluate.
        queries: query id -> text, for the queries of all splits.
        ignores_identical_ids: whether hits with the query's own id are ignored.
    """

    collection: Collection
    provenance: Provenance
    splits: Sequence[str]
    queries: dict[str, str]
    ignores_identical_ids: bool


def _load_task(request: EvaluateRequest) -> _Task:
    """Load the collection of ``--data``, and the queries of the splits to evaluate."""
    splits = _scores.requested_splits(request.split)
    collection = _scores.load_evaluated_collection(
        request.data,
        splits,
        drop_unknown=request.drop_unknown,
    )
    queries: dict[str, str] = {}
    for split in splits:
        queries |= collection.split_queries(split)
    return _Task(
        collection=collection,
        provenance=_scores.provenance_of_documents(collection),
        splits=splits,
        queries=queries,
        ignores_identical_ids=_scores.ignores_identical_ids(
            request.identical_ids,
            collection,
            splits,
        ),
    )


def _load_reranker(request: EvaluateRequest, task: _Task) -> Reranker | None:
    """Load the model or the token vectors of ``--rerank``; None without this option.

    Args:
        request: the options of the command.
        task: the documents that are reranked, and their fingerprint.
    """
    if request.rerank is None:
        return None
    return _retrievers.load_reranker(
        request.rerank,
        request.rerank_model,
        task.collection.documents,
        task.provenance,
        request.dtype,
    )


def _read_run(path: Path, task: _Task) -> tuple[_scores.NamedRun, set[str]]:
    """Read the run of ``--run``, without hits with the query's own id if they are ignored.

    Args:
        path: the file of the run.
        task: the queries and documents that it must have been made from.

    Returns:
        The run, and the queries whose hit with their own id was removed.
    """
    run = _scores.read_run(path, "--run")
    _scores.check_made_from(task.collection, run.name, run.provenance, expected=task.provenance)
    if not task.ignores_identical_ids:
        return run, set()
    return _scores.without_identical_ids(run)


def _rerank(
    run: _scores.NamedRun,
    reranker: Reranker,
    reranking: Reranking,
    passages: BestPassages | None,
    task: _Task,
) -> _scores.NamedRun:
    """Rerank the documents of a run.

    Args:
        run: the run.
        reranker: the model, or the token vectors, that reranks documents.
        reranking: the options of reranking, such as the number of documents.
        passages: the best passage of each document, which is reranked in its place; None reranks
            whole documents.
        task: the queries. Other queries of the run are left out.
    """
    candidates = {query: scores for query, scores in run.run.items() if query in task.queries}
    with _options.errors_name_options(documents="--rerank", tokens="--rerank"):
        _, reranked, _ = reranker(task.queries, candidates, reranking, passages=passages)
    return _scores.NamedRun(run.name, reranked, task.provenance)


def _compare_feedback(
    search: _Search, scores: _scores.Scores, task: _Task
) -> dict[str, Any] | None:
    """Compare the scores with those of a search without feedback; None without ``--prf``.

    Args:
        search: the search and its results.
        scores: the scores of the run.
        task: the queries and judgements.
    """
    if search.request.feedback is None:
        return None
    return _scores.compare_feedback(
        scores,
        search.searcher,
        task.queries,
        search.request,
        search.ranking,
        task.collection,
    )


def _print_scores(
    request: EvaluateRequest,
    collection: Collection,
    scores: _scores.Scores,
    precisions: dict[str, str | None],
    changes: dict[str, Any] | None,
) -> None:
    """Print the scores of a run as a table, or as JSON with the changes that feedback made.

    Args:
        request: the options of the command.
        collection: the collection of the run.
        scores: the scores of the run.
        precisions: the dtypes of the vectors that the search and the reranker have compared.
        changes: split -> comparison with the ranking without feedback; None without feedback.
    """
    if not request.as_json:
        _scores.print_scores(collection, scores)
        return
    result = _scores.scores_as_json(collection, scores)
    result["precision"] = precisions
    if request.rerank is not None:
        result["rerank"] = request.rerank
    if changes is not None:
        result["feedback"] = changes
    _common.print_json(result)


def _check_output_files(request: EvaluateRequest) -> None:
    """Check that both output files can be written, without replacing an input or one another.

    Args:
        request: the options of the command, with ``--save-run`` and ``--per-query``.
    """
    inputs = (
        request.run,
        request.prf_with,  # the second run of pseudo-relevance feedback
        *_scores.files_of_collection(request.data),
    )
    _scores.check_output_file(
        request.save_run,
        "--save-run",
        _scores.RUN,  # the format of the file
        *inputs,
        overwrite=request.overwrite,
    )
    _scores.check_output_file(
        request.per_query,
        "--per-query",
        _scores.MEASURES,  # the format of the file
        *inputs,
        request.save_run,  # another output of this command
        overwrite=request.overwrite,
    )


@dataclass(frozen=True)
class _Search:
    """A search of all queries, and its results.

    Attributes:
        source: the option that names the index or the model, with its value.
        searcher: the searcher.
        request: the options of the search.
        ranking: the rankings of the queries.
    """

    source: str
    searcher: Searcher
    request: SearchRequest
    ranking: Ranking

    @property
    def named_run(self) -> _scores.NamedRun:
        """The run of the queries."""
        return _scores.NamedRun(self.source, self.ranking.run, self.searcher.provenance)

    @property
    def passages(self) -> BestPassages | None:
        """The best passages of the documents; None for an index of whole documents."""
        return self.ranking.best_passages if self.searcher.passages else None


def _search(request: EvaluateRequest, search_request: SearchRequest, task: _Task) -> _Search:
    """Search the index of ``--index``, or documents that the dense model of ``--model`` encodes.

    Args:
        request: the options of the command.
        search_request: the options of the search. The filter of ``--where`` is added, and whether
            hits with the query's own id are ignored.
        task: the queries and documents.
    """
    second_ranking = None  # that of --prf-with
    if request.prf_with is not None:
        second_ranking = _retrievers.load_second_ranking(
            request.prf_with,
            task.queries,
            task.provenance,
        )
    if request.index is None:
        source = f"--model {request.model}"
        searcher = _retrievers.open_dense(
            request,
            task.collection.contents(),
            request.max_length,
            second_ranking,
        )
    else:
        source = f"--index {request.index}"
        parts = SearcherParts(vectors=request.vectors, second=second_ranking)
        searcher = _retrievers.open_searcher(
            request,
            load_parts=lambda _provenance_of_index: parts,
        )
        _scores.check_made_from(
            task.collection,
            source,
            searcher.provenance,
            expected=task.provenance,
        )
    # Without an id that queries and documents share, there is nothing to ignore.
    shares_ids = any(query in task.collection.documents for query in task.queries)
    search_request = replace(
        search_request,
        where=_retrievers.parse_filter(request.where, searcher),
        ignore_identical_ids=task.ignores_identical_ids and shares_ids,
    )
    with _options.errors_name_options(queries="--model"):
        ranking = searcher.rank(task.queries, search_request)
    return _Search(source, searcher, search_request, ranking)


@dataclass(frozen=True, kw_only=True)
class FuseRequest(DocumentFieldOptions):
    """Options of ``tilefold fuse``."""

    run: Annotated[
        list[Path],
        option(
            "A TREC run file, such as one of evaluate --save-run; at least two.",
        ),
    ]
    method: Annotated[
        Literal["rrf", "interpolation"],
        option(
            "Reciprocal rank fusion, or weighted sum of normalised scores.",
        ),
    ] = "rrf"
    weight: Annotated[
        list[float] | None,
        option(
            "interpolation: weight of a run, once per --run in the same order; by default equal "
            "weights.",
        ),
    ] = None
    tune: Annotated[
        str | None,
        option(
            "interpolation: choose the weights on this split of --data, by the first measure.",
        ),
    ] = None
    in_sample: Annotated[
        bool,
        option(
            "Allow measures on queries that --tune chose the weights on, and mark them.",
            "--in-sample",
        ),
    ] = False
    normalization: Annotated[
        Literal["min_max", "z_score", "none"] | None,
        option(
            "interpolation: normalisation of the scores of a query; by default min_max.",
        ),
    ] = None
    rrf_k: Annotated[
        int | None,
        positive(
            "rrf: the constant k of 1 / (k + rank); by default 60.",
        ),
    ] = None
    k: Annotated[
        int | None,
        positive(
            "Documents to keep per query, by default 100, and at least as many as the measures "
            "need.",
        ),
    ] = None
    data: Annotated[
        str | None,
        option(
            "The collection of the runs, to measure the fusion. " + _common.DATA_HELP,
        ),
    ] = None
    split: Annotated[
        list[str] | None,
        option(
            _scores.SPLIT_HELP,
        ),
    ] = None
    drop_unknown: Annotated[
        bool,
        option(
            _common.DROP_UNKNOWN_HELP,
            "--drop-unknown",
        ),
    ] = False
    measure: Annotated[
        list[str] | None,
        option(
            _scores.MEASURE_HELP,
        ),
    ] = None
    save_run: Annotated[
        Path | None,
        option(
            _scores.SAVE_RUN_HELP,
        ),
    ] = None
    overwrite: Annotated[
        bool,
        option(
            _common.OVERWRITE_HELP,
            "--overwrite",
        ),
    ] = False
    identical_ids: Annotated[
        Literal["ignore", "count"] | None,
        option(
            _scores.IDENTICAL_IDS_HELP,
        ),
    ] = None
    as_json: Annotated[
        bool,
        option(
            "Weights and measures as JSON on stdout.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for conflicting options, and for options without effect."""
        super().validate()
        if len(self.run) < 2:
            raise UsageError(f"--run: expected two runs or more, got {len(self.run)}.")
        if self.method == "rrf":
            refuse_options(
                {
                    "--weight": self.weight,
                    "--tune": self.tune,
                    "--normalization": self.normalization,
                },
                "requires --method interpolation",
            )
        else:
            refuse_options({"--rrf-k": self.rrf_k}, "requires --method rrf")
        if self.weight is not None:
            refuse_options(
                {"--tune": self.tune},
                "cannot be combined with --weight, because it chooses the weights",
            )
            if len(self.weight) != len(self.run) or not any(self.weight):
                raise UsageError(
                    f"--weight: expected one weight per run ({len(self.run)}), at least one of "
                    f"them nonzero, got {self.weight}.",
                )
        if self.tune is None:
            refuse_options({"--in-sample": self.in_sample}, "requires --tune")
        if self.data is None:
            refuse_options(
                {
                    "--split": self.split,
                    "--drop-unknown": self.drop_unknown,
                    "--measure": self.measure,
                    "--tune": self.tune,
                },
                "requires --data",
            )
        if self.save_run is None:
            refuse_options({"--overwrite": self.overwrite}, "requires --save-run")
        if self.data is None and self.save_run is None:
            raise UsageError("give --data to measure the fusion, or --save-run to write it.")


def fuse(request: FuseRequest) -> None:
    """Fuse runs: evaluate the fusion with --data, write it with --save-run.

    To choose weights, make the runs with --split dev --split test, and fuse them with --method
    interpolation --tune dev.

    Example:
        tilefold fuse --run bm25.trec --run splade.trec --data DATA
    """
    measures = _scores.requested_measures(request.measure)
    if request.save_run is None:
        _scores.note_unused_depth(request.k, measures.depth)
    _scores.check_output_file(
        request.save_run,
        "--save-run",
        _scores.RUN,
        *request.run,
        *_scores.files_of_collection(request.data),
        overwrite=request.overwrite,
    )
    runs = [_scores.read_run(path, "--run") for path in request.run]
    judgements = _load_judgements(request)
    _scores.check_runs(runs, judgements.collection, judgements.all_splits)
    queries_without_own_id: set[str] = set()
    if judgements.ignores_identical_ids:
        runs, queries_without_own_id = _without_identical_ids(runs)
    depth = max(request.k or DEPTH, measures.depth)
    weights = _choose_weights(request, runs, judgements, measures.names[0], depth)
    fused = _fuse(request, runs, weights.weights, depth)
    if request.save_run is not None:
        _scores.save_run(fused, fused.provenance, request.save_run, overwrite=request.overwrite)
    scores = None
    if judgements.collection is not None:
        scores = _scores.score(
            fused,
            judgements.collection,
            judgements.splits,
            measures,
            ignore_identical_ids=judgements.ignores_identical_ids,
            queries_without_own_id=queries_without_own_id,
        )
    if request.as_json:
        _print_fusion_as_json(request, weights, judgements.collection, scores)
    else:
        _print_fusion(request, weights, judgements.collection, scores)
        if request.save_run is not None:
            typer.echo(f"{len(fused.run)} queries: {request.save_run}")


@dataclass(frozen=True)
class _Judgements:
    """The judgements by which a fusion is evaluated and its weights are chosen.

    Attributes:
        collection: the collection of ``--data``; None without it.
        splits: the splits to evaluate; empty without a collection.
        tuning_splits: the split on which weights are chosen, if there is one.
        ignores_identical_ids: whether hits with the query's own id are ignored.
    """

    collection: Collection | None
    splits: list[str]
    tuning_splits: list[str]
    ignores_identical_ids: bool

    @property
    def all_splits(self) -> list[str]:
        """The splits to evaluate, and those on which weights are chosen."""
        return [*self.splits, *self.tuning_splits]


def _load_judgements(request: FuseRequest) -> _Judgements:
    """Load the judgements of ``--data``; without it, there are none."""
    if request.data is None:
        return _Judgements(
            collection=None,
            splits=[],
            tuning_splits=[],
            ignores_identical_ids=request.identical_ids == "ignore",
        )
    splits = _scores.requested_splits(request.split)
    tuning_splits = [] if request.tune is None else [request.tune]
    collection = _scores.load_evaluated_collection(
        request.data,
        splits,
        tuning_splits=tuning_splits,
        drop_unknown=request.drop_unknown,
    )
    ignores_identical_ids = _scores.ignores_identical_ids(
        request.identical_ids,
        collection,
        [*splits, *tuning_splits],
    )
    return _Judgements(collection, splits, tuning_splits, ignores_identical_ids)


@dataclass(frozen=True)
class _Weights:
    """The weights of the runs of a fusion.

    Attributes:
        weights: a weight per run; None for equal weights, and for reciprocal ranks.
        shared_queries: split -> number of its queries on which the weights were chosen.
    """

    weights: Sequence[float] | None
    shared_queries: Mapping[str, int]


def _choose_weights(
    request: FuseRequest,
    runs: Sequence[_scores.NamedRun],
    judgements: _Judgements,
    measure: str,
    depth: int,
) -> _Weights:
    """Return the weights of ``--weight``, or choose the best ones on the queries of ``--tune``.

    Args:
        request: the options of the command.
        runs: the runs to fuse.
        judgements: the judgements, with the split of ``--tune``.
        measure: the measure that the chosen weights maximise.
        depth: the number of documents per query in the fused run.
    """
    collection = judgements.collection
    if request.tune is None or collection is None:
        return _Weights(request.weight, {})
    # Raises an error before the weights are chosen, which takes long.
    shared_queries = _count_shared_queries(
        collection,
        request.tune,
        judgements.splits,
        request.in_sample,
    )
    weights = _tune_weights(
        [run.run for run in runs],
        collection.qrels[request.tune],
        measure,
        request.normalization or "min_max",
        depth,
        judgements.ignores_identical_ids,
    )
    return _Weights(weights, shared_queries)


def _print_fusion_as_json(
    request: FuseRequest,
    weights: _Weights,
    collection: Collection | None,
    scores: _scores.Scores | None,
) -> None:
    """Print the options, the weights and the measures of a fusion as JSON.

    Args:
        request: the options of the command.
        weights: the weights of the runs.
        collection: the collection with the judgements; None without ``--data``.
        scores: the measures of the fused run; None without ``--data``.
    """
    result: dict[str, Any] = {
        "method": request.method,
        "runs": [str(path) for path in request.run],
        "weights": weights.weights,
    }
    if request.tune is not None:
        result["tuned_on"] = request.tune
        result["in_sample"] = weights.shared_queries
    if collection is not None and scores is not None:
        result.update(_scores.scores_as_json(collection, scores))
    _common.print_json(result)


def _print_fusion(
    request: FuseRequest,
    weights: _Weights,
    collection: Collection | None,
    scores: _scores.Scores | None,
) -> None:
    """Print the weights and the measures of a fusion as text.

    Args:
        request: the options of the command.
        weights: the weights of the runs.
        collection: the collection with the judgements; None without ``--data``.
        scores: the measures of the fused run; None without ``--data``.
    """
    if weights.weights is not None:
        weights_of_runs = [
            f"{path} {weight:g}" for path, weight in zip(request.run, weights.weights, strict=True)
        ]
        typer.echo(f"weights: {', '.join(weights_of_runs)}")
    if collection is not None and scores is not None:
        _scores.print_scores(collection, scores)
        _print_shared_queries(collection, weights.shared_queries)


def _print_shared_queries(collection: Collection, shared_queries: Mapping[str, int]) -> None:
    """Print for each evaluated split on how many of its queries the weights were chosen.

    Args:
        collection: the collection with the judgements.
        shared_queries: split -> number of these queries.
    """
    for split, n_shared in shared_queries.items():
        typer.echo(
            f"in sample: the weights were chosen on {n_shared} of the "
            f"{len(collection.qrels[split])} queries of {split}",
        )


def _fuse(
    request: FuseRequest,
    runs: Sequence[_scores.NamedRun],
    weights: Sequence[float] | None,
    depth: int,
) -> _scores.NamedRun:
    """Fuse runs by reciprocal ranks (``rrf``), or by a weighted sum of their normalised scores.

    Args:
        request: the method of fusion, and its options.
        runs: the runs.
        weights: a weight per run for the sum; None for equal weights.
        depth: the number of documents per query in the fused run.

    Returns:
        The fused run, with the fingerprint of the documents if it is the same in all runs.
    """
    rankings = [run.run for run in runs]
    if request.method == "rrf":
        full_run = retrieval.reciprocal_rank_fusion(rankings, request.rrf_k or RRF_K)
        fused_run = {
            query: dict(itertools.islice(scores.items(), depth))
            for query, scores in full_run.items()
        }
    else:
        with _options.errors_name_options(normalization="--normalization", weights="--weight"):
            fused_run = retrieval.interpolate(
                rankings,
                weights,
                request.normalization or "min_max",
                k=depth,
            )
    shared = Provenance.shared(run.provenance for run in runs)
    return _scores.NamedRun(
        "the fusion",
        fused_run,
        Provenance(texts_sha256=shared.texts_sha256),
    )


def _without_identical_ids(
    runs: Sequence[_scores.NamedRun],
) -> tuple[list[_scores.NamedRun], set[str]]:
    """Remove the hits with the query's own id from runs, before scores are normalised and fused.

    Such a hit is the query itself in collections whose queries are documents. Its high score would
    change the normalisation of the other hits.

    Args:
        runs: the runs.

    Returns:
        The runs without these hits, and the queries that had one in any run.
    """
    remaining_runs = []
    queries_with_hit = set[str]()
    for run in runs:
        remaining_run, queries = _scores.without_identical_ids(run)
        remaining_runs.append(remaining_run)
        queries_with_hit.update(queries)
    return remaining_runs, queries_with_hit


def _tune_weights(
    runs: list[Run],
    qrels: Mapping[str, Mapping[str, int]],
    measure: str,
    normalization: Normalization,
    k: int,
    ignore_identical_ids: bool,
) -> list[float]:
    """Choose the weights of an interpolation that maximise a measure on judged queries.

    Args:
        runs: the runs.
        qrels: the judgements of the split of ``--tune``.
        measure: the measure to maximise.
        normalization: the normalisation of the scores of a query.
        k: the number of documents per query in the fused run.
        ignore_identical_ids: whether hits with the query's own id are ignored.

    Returns:
        A weight per run.

    Raises:
        UsageError: if no weights can be chosen.
    """
    from tilefold.retrieval.evaluation.measures import choose_weights

    try:
        weights, _ = choose_weights(
            runs,
            qrels,
            measure=measure,
            normalization=normalization,
            k=k,
            ignore_identical_ids=ignore_identical_ids,
        )
    except ValueError as error:
        raise UsageError(f"--tune: {error}") from error
    return list(weights)


def _count_shared_queries(
    collection: Collection,
    tune: str,
    splits: list[str],
    in_sample: bool,
) -> dict[str, int]:
    """Count the evaluated queries on which weights are also chosen.

    Measures on such queries are too optimistic, so they require ``--in-sample``.

    Args:
        collection: the collection with the judgements.
        tune: the split on which the weights are chosen.
        splits: the splits that are evaluated.
        in_sample: whether shared queries are allowed.

    Returns:
        Split -> number of its queries that are also in `tune`, for splits with shared queries.

    Raises:
        UsageError: if there are shared queries and `in_sample` is False.
    """
    tuning_queries = collection.qrels[tune].keys()
    shared: dict[str, int] = {}
    for split in splits:
        n_shared = len(collection.qrels[split].keys() & tuning_queries)
        if n_shared:
            shared[split] = n_shared
    if shared and not in_sample:
        split, n_shared = next(iter(shared.items()))
        raise UsageError(
            f"--tune: the weights would be chosen on {n_shared} of the "
            f"{len(collection.qrels[split])} queries of {split} and evaluated on them (--split), "
            "which overstates their quality. Tune on a split with different queries, or give "
            "--in-sample.",
        )
    return shared
