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
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        if (self.run is None) == (self.model is None and self.index is None):
            raise UsageError(
                "give either --run FILE, or --index (with --model, but for BM25), or a dense "
                "--model.",
            )
        if self.index is None:
            self.refuse_index_options("goes with --index")
            refuse_options({"--where": self.where}, "goes with --index")
        if self.index is not None or self.run is not None:
            refuse_options(
                {"--max-length": self.max_length},
                "goes with a dense --model, without --index",
            )
        if self.run is not None:
            refuse_options(
                {"--k": self.k},
                "goes with --index or a dense --model; for --rerank there is --rerank-depth",
            )
            refuse_options(
                {"--prf": self.prf},
                "goes with --index or a dense --model: a run has no vectors",
            )
        if self.prf is None:
            refuse_options({"--vectors": self.vectors}, "goes together with --prf")
        if self.save_run is None and self.per_query is None:
            refuse_options({"--overwrite": self.overwrite}, "goes with --save-run and --per-query")
        if self.rerank is None:
            refuse_options({"--rerank-tail": self.rerank_tail}, "goes together with --rerank")
        if self.rerank_weight is not None:
            refuse_options(
                {"--rerank-tail": self.rerank_tail},
                "goes without --rerank-weight, under which every candidate keeps its share",
            )


def evaluate(request: EvaluateRequest) -> None:
    """Evaluate a TREC run, an index (with its model, or of BM25), or a dense model; with --rerank,
    after reranking.

    Means over queries have standard errors (±) and bootstrap intervals; tilefold compare tests
    differences.

    Example:
        tilefold evaluate --data DATA --index INDEX --model MODEL
    """
    depth = None if request.run is not None else request.k or DEPTH
    reranking = request.reranking(depth, request.rerank_tail)
    feedback = request.feedback()
    interpolation = request.interpolation()
    measures, deepest = _scores.check_measures(request.measure)
    _scores.note_unused_depth(request.k, deepest, request.save_run or request.rerank)
    _check_output_files(request)
    _models.find_models({"--model": request.model, "--rerank": request.rerank})
    collection, splits = _scores.load_splits(
        request.data,
        request.split,
        request.drop_unknown,
        also=(),
    )
    ignores_identical_ids = _scores.ignores_identical_ids(request.identical_ids, collection, splits)
    queries = _queries_of_splits(collection, splits)
    if request.run is None:
        _scores.check_savable(request.save_run, collection.documents, queries)
    texts = _scores.texts_of(collection)
    reranker = None
    if request.rerank is not None:
        reranker = _retrievers.load_reranker(
            request.rerank,
            request.rerank_model,
            collection.documents,
            texts,
        )
    search: _Search | None = None
    if request.run is not None:
        run = _scores.read_run(request.run, "--run")
        ignored: set[str] = set()
        if ignores_identical_ids:
            run, ignored = _scores.without_identical_ids(run)
        _scores.check_texts(run.name, run.provenance, collection, texts)
    else:
        shares_ids = any(query in collection.documents for query in queries)
        search_request = retrieval.SearchRequest(
            k=max(request.k or DEPTH, deepest, request.rerank_depth or 0),
            feedback=feedback,
            interpolation=interpolation,
            ignore_identical_ids=ignores_identical_ids and shares_ids,
        )
        search = _search(request, search_request, collection, queries, texts)
        source = f"--model {request.model}" if request.index is None else f"--index {request.index}"
        run = _scores.NamedRun(source, search.ranking.run, search.searcher.provenance)
        ignored = search.ranking.ignored_identical_ids
    _scores.check_answers(run, collection, splits)
    if reranker is not None and reranking is not None:
        candidates = {query: scores for query, scores in run.run.items() if query in queries}
        passages = None if search is None else search.passages
        with _options.option_errors(documents="--rerank", tokens="--rerank"):
            _, reranked, _ = reranker(queries, candidates, reranking, passages=passages)
        run = _scores.NamedRun(run.name, reranked, texts)
    scores = _scores.score(
        run,
        collection,
        splits,
        measures,
        deepest,
        ignores_identical_ids,
        ignored,
    )
    _scores.save(run, texts, request.save_run, depth, overwrite=request.overwrite)
    scores.write(request.per_query)
    changes = None
    if search is not None and feedback is not None and reranking is None:
        changes = _scores.changed_by_feedback(
            scores,
            search.searcher,
            queries,
            search.request,
            search.ranking,
            collection,
        )
    _print_scores(request, collection, scores, changes)


def _print_scores(
    request: EvaluateRequest,
    collection: Collection,
    scores: _scores.Scores,
    changes: dict[str, Any] | None,
) -> None:
    """Print the measures as a table, or as JSON with what feedback changed.

    Args:
        request: options of the command.
        collection: collection of the run.
        scores: measures of the run.
        changes: comparison with the ranking without feedback, by split; None without feedback.
    """
    if not request.as_json:
        _scores.print_scores(collection, scores)
        return
    facts = _scores.facts(collection, scores)
    if request.rerank is not None:
        facts["rerank"] = request.rerank
    if changes is not None:
        facts["feedback"] = changes
    _common.print_json(facts)


def _queries_of_splits(collection: Collection, splits: Sequence[str]) -> dict[str, str]:
    """Return the texts of the queries of all splits by id."""
    queries: dict[str, str] = {}
    for split in splits:
        queries |= collection.split_queries(split)
    return queries


def _check_output_files(request: EvaluateRequest) -> None:
    """Refuse output files that cannot be written, or that this command reads.

    The files are those of ``--save-run`` and ``--per-query``, which must differ.

    Args:
        request: options of the command.
    """
    inputs = (request.run, request.prf_with, *_scores.files_of_collection(request.data))
    _scores.check_output_file(
        request.save_run,
        "--save-run",
        _scores.RUN,
        *inputs,
        overwrite=request.overwrite,
    )
    _scores.check_output_file(
        request.per_query,
        "--per-query",
        _scores.MEASURES,
        *inputs,
        request.save_run,
        overwrite=request.overwrite,
    )


@dataclass(frozen=True)
class _Search:
    """A search of all queries.

    Attributes:
        searcher: what searched.
        request: options of the search.
        ranking: rankings of the queries.
    """

    searcher: Searcher
    request: SearchRequest
    ranking: Ranking

    @property
    def passages(self) -> BestPassages | None:
        """Best passages of the documents, or None for an index of whole documents."""
        return self.ranking.best_passages if self.searcher.passages else None


def _search(
    request: EvaluateRequest,
    search_request: SearchRequest,
    collection: Collection,
    queries: dict[str, str],
    texts: Provenance,
) -> _Search:
    """Search the queries in the index, or in documents that a dense model encodes now.

    Args:
        request: names the index or the model.
        search_request: the search without the conditions of ``--where``.
        collection: the documents.
        queries: texts of the queries by id.
        texts: provenance of the documents.
    """
    second = _retrievers.second_ranking(request.prf_with, queries, texts)
    if request.index is None:
        searcher = _retrievers.open_dense(
            request,
            collection.contents(),
            request.max_length,
            second,
        )
    else:
        parts = SearcherParts(vectors=request.vectors, second=second)
        searcher = _retrievers.open_searcher(
            request,
            collection.contents,
            lambda provenance: parts,  # they do not depend on the provenance of the index
        )
        _scores.check_texts(f"--index {request.index}", searcher.provenance, collection, texts)
    where = _retrievers.parse_filter(request.where, searcher)
    search_request = replace(search_request, where=where)
    with _options.option_errors(queries="--model"):
        ranking = searcher.rank(queries, search_request)
    return _Search(searcher, search_request, ranking)


@dataclass(frozen=True, kw_only=True)
class FuseRequest(DocumentFieldOptions):
    """Options of ``tilefold fuse``."""

    run: Annotated[
        list[Path],
        option(
            "A TREC run file, such as evaluate --save-run writes; twice or more.",
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
            "interpolation: one per run, in their order; by default equal ones.",
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
            "Report queries that --tune chose the weights on, too, and say so.",
            "--in-sample",
        ),
    ] = False
    normalization: Annotated[
        Literal["min_max", "z_score", "none"] | None,
        option(
            "interpolation: per query; by default min_max.",
        ),
    ] = None
    rrf_k: Annotated[
        int | None,
        positive(
            "rrf: the constant of 1 / (k + rank); by default 60.",
        ),
    ] = None
    k: Annotated[
        int | None,
        positive(
            "Documents to keep per query, by default 100; as many as the measures need at least.",
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
        """Raise ``UsageError`` for options that exclude one another."""
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
                "goes with --method interpolation",
            )
        else:
            refuse_options({"--rrf-k": self.rrf_k}, "goes with --method rrf")
        if self.weight is not None:
            refuse_options({"--tune": self.tune}, "chooses the weights, and goes without --weight")
            if len(self.weight) != len(self.run) or not any(self.weight):
                raise UsageError(
                    f"--weight: expected one for each of {len(self.run)} runs, not all of them 0, "
                    f"got {self.weight}.",
                )
        if self.tune is None:
            refuse_options({"--in-sample": self.in_sample}, "goes with --tune")
        if self.data is None:
            refuse_options(
                {
                    "--split": self.split,
                    "--drop-unknown": self.drop_unknown,
                    "--measure": self.measure,
                    "--tune": self.tune,
                },
                "goes with --data",
            )
        if self.save_run is None:
            refuse_options({"--overwrite": self.overwrite}, "goes with --save-run")
        if self.data is None and self.save_run is None:
            raise UsageError("give --data to measure the fusion, or --save-run to write it.")


def fuse(request: FuseRequest) -> None:
    """Fuse runs: measure the fusion with --data, write it with --save-run.

    To choose weights, make the runs with --split dev --split test, and give --method interpolation
    --tune dev.

    Example:
        tilefold fuse --run bm25.trec --run splade.trec --data DATA
    """
    measures, deepest = _scores.check_measures(request.measure)
    _scores.note_unused_depth(request.k, deepest, request.save_run)
    _scores.check_output_file(
        request.save_run,
        "--save-run",
        _scores.RUN,
        *request.run,
        *([] if request.data is None else _scores.files_of_collection(request.data)),
        overwrite=request.overwrite,
    )
    runs = [_scores.read_run(path, "--run") for path in request.run]
    tuning_splits = [] if request.tune is None else [request.tune]
    collection: Collection | None = None
    splits: list[str] = []
    if request.data is not None:
        collection, splits = _scores.load_splits(
            request.data,
            request.split,
            request.drop_unknown,
            tuning_splits,
        )
    _scores.check_runs(runs, collection, [*splits, *tuning_splits])
    runs, ignores_identical_ids, ignored = _without_identical_ids(
        runs,
        request.identical_ids,
        collection,
        [*splits, *tuning_splits],
    )
    depth = max(request.k or DEPTH, deepest)
    weights = request.weight
    tuning: dict[str, Any] = {}
    if request.tune is not None and collection is not None:
        shared_queries = _shared_queries(collection, request.tune, splits, request.in_sample)
        tuning = {"tuned_on": request.tune, "in_sample": shared_queries}
        weights = _tune_weights(
            [run.run for run in runs],
            collection.qrels[request.tune],
            measures[0],
            request.normalization or "min_max",
            depth,
            ignores_identical_ids,
        )
    fused = _fuse(request, runs, weights, depth)
    _scores.save(fused, fused.provenance, request.save_run, overwrite=request.overwrite)
    result: dict[str, Any] = {
        "method": request.method,
        "runs": [str(path) for path in request.run],
        "weights": weights,
        **tuning,
    }
    scores = None
    if collection is not None:
        scores = _scores.score(
            fused,
            collection,
            splits,
            measures,
            deepest,
            ignores_identical_ids,
            ignored,
        )
    if request.as_json:
        if collection is not None and scores is not None:
            result.update(_scores.facts(collection, scores))
        _common.print_json(result)
        return
    if weights is not None:
        weights_of_runs = [
            f"{path} {weight:g}" for path, weight in zip(request.run, weights, strict=True)
        ]
        typer.echo(f"weights: {', '.join(weights_of_runs)}")
    if collection is not None and scores is not None:
        _scores.print_scores(collection, scores)
        for split, n_shared in tuning.get("in_sample", {}).items():
            typer.echo(
                f"in sample: the weights were chosen on {n_shared} of the "
                f"{len(collection.qrels[split])} queries of {split}",
            )
    if request.save_run is not None:
        typer.echo(f"{len(fused.run)} queries: {request.save_run}")


def _fuse(
    request: FuseRequest,
    runs: Sequence[_scores.NamedRun],
    weights: Sequence[float] | None,
    depth: int,
) -> _scores.NamedRun:
    """Fuse runs by reciprocal ranks (``rrf``), or by interpolation of their scores.

    Args:
        request: names the method and its options.
        runs: the runs.
        weights: one per run, for interpolation; None takes equal ones.
        depth: documents per query of the fusion.

    Returns:
        The fused run, with the fingerprint of the documents that all runs share.
    """
    rankings = [run.run for run in runs]
    if request.method == "rrf":
        full_run = retrieval.reciprocal_rank_fusion(rankings, request.rrf_k or RRF_K)
        fused_run = {
            query: dict(itertools.islice(scores.items(), depth))
            for query, scores in full_run.items()
        }
    else:
        with _options.option_errors(normalization="--normalization", weights="--weight"):
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
    named: list[_scores.NamedRun],
    choice: str | None,
    collection: Collection | None,
    splits: Sequence[str],
) -> tuple[list[_scores.NamedRun], bool, set[str]]:
    """Leave hits with the query's own id out of runs, before their scores are normalised.

    Such a hit is the query itself in collections whose queries are documents. Its high score would
    change the normalisation.

    Args:
        named: the runs.
        choice: value of ``--identical-ids``; without a collection, None counts these hits.
        collection: whose judgements decide by default.
        splits: of these judgements.

    Returns:
        The runs, whether such hits are left out, and the queries that had one.
    """
    leaves_out = choice == "ignore"
    if collection is not None:
        leaves_out = _scores.ignores_identical_ids(choice, collection, splits)
    if not leaves_out:
        return named, leaves_out, set()
    remaining_runs = []
    queries_with_hit = set[str]()
    for run in named:
        remaining_run, queries = _scores.without_identical_ids(run)
        remaining_runs.append(remaining_run)
        queries_with_hit.update(queries)
    return remaining_runs, leaves_out, queries_with_hit


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
        qrels: judgements of the split of ``--tune``.
        measure: what the weights maximise.
        normalization: of the scores of a query.
        k: documents per query of the fusion.
        ignore_identical_ids: leave out hits with the query's own id.

    Returns:
        One weight per run.

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


def _shared_queries(
    collection: Collection,
    tune: str,
    splits: list[str],
    in_sample: bool,
) -> dict[str, int]:
    """Count the queries that weights are chosen on and that are reported too.

    Measures on such queries are too optimistic, so that they need ``--in-sample``.

    Args:
        collection: with the judgements.
        tune: split on which the weights are chosen.
        splits: splits that are reported.
        in_sample: whether shared queries are allowed.

    Returns:
        Split -> number of its queries that `tune` has too, without splits that share none.

    Raises:
        UsageError: for shared queries without `in_sample`.
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
            f"{len(collection.qrels[split])} queries of {split}, whose numbers are reported "
            "(--split): better than on new queries. Tune on a split of other queries, or give "
            "--in-sample.",
        )
    return shared
