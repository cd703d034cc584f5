"""``tilefold evaluate``, a run, an index or a dense model against judgements, and ``tilefold
fuse``, several runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from tilefold import retrieval
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import Asked, UsageError, Values
from tilefold.cli._options import (
    Count,
    Place,
    Text,
    Words,
    flag,
    option,
    positive,
    preset,
    required,
)
from tilefold.retrieval.common.provenance import Provenance

if TYPE_CHECKING:
    from tilefold.retrieval.common.runs import Run
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.search.fusion import Normalization
    from tilefold.retrieval.search.searcher import Ranking, Searcher, SearchRequest

DEPTH = 100


@_options.with_options(_retrievers.of_index, _retrievers.of_reranking, _retrievers.of_feedback)
def evaluate(
    data: str = required(_common.DATA_HELP),
    split: Words = option(_scores.SPLIT_HELP),
    drop_unknown: bool = flag(_common.DROP_UNKNOWN_HELP, "--drop-unknown"),
    run: Place = option("A TREC run file to score."),
    index: Place = option("Index to search, with the --model that made it; BM25 has none."),
    model: Text = option(
        _retrievers.MODEL_HELP + " Without --index, a dense model; minilm is all-MiniLM-L6-v2.",
    ),
    k: Count = positive(
        "Documents per query to rerank and to save, by default 100; measures see what they need.",
    ),
    measure: Words = option(_scores.MEASURE_HELP),
    where: Words = _retrievers.WHERE,
    max_length: Count = _retrievers.DENSE_LENGTH,
    rerank_tail: Text = option(
        "Candidates that were not reranked: by default kept, last.",
        metavar="keep|drop",
    ),
    vectors: Place = option("The encoded documents of --index, for --prf."),
    save_run: Place = option(_scores.SAVE_RUN_HELP),
    per_query: Place = option(
        "Write the measures of each query: tab-separated columns, named in the first line.",
    ),
    overwrite: bool = flag(_common.OVERWRITE_HELP, "--overwrite"),
    identical_ids: Text = option(
        _scores.IDENTICAL_IDS_HELP,
        metavar=_scores.IDENTICAL_IDS,
    ),
    as_json: bool = flag("The measures as JSON on stdout.", "--json"),
    **more: Any,
) -> None:
    """Evaluate a TREC run, an index (with its model, or of BM25), or a dense model; with --rerank,
    after reranking.

    Means over queries have standard errors (±) and bootstrap intervals; tilefold compare tests
    differences.
    """
    asked = locals() | more
    rerank = asked["rerank"]
    if (run is None) == (model is None and index is None):
        raise UsageError(
            "give either --run FILE, or --index (with --model, but for BM25), or a dense --model.",
        )
    depth = None if run is not None else k or DEPTH
    reranking, (feedback, mix) = (
        _retrievers.rerank_request(asked, depth),
        _retrievers.feedback_request(asked),
    )
    measures, deepest = _scores.check_measures(measure)
    _scores.say_depth(k, deepest, save_run or rerank)
    inputs = (run, asked["prf_with"], *_scores.files_of_collection(data))
    _scores.check_output_file(save_run, "--save-run", _scores.RUN, *inputs, overwrite=overwrite)
    _scores.check_output_file(
        per_query,
        "--per-query",
        _scores.MEASURES,
        *inputs,
        save_run,
        overwrite=overwrite,
    )
    _models.find_models({"--model": model, "--rerank": rerank})
    collection, splits = _scores.load_splits(data, split, drop_unknown, also=())
    ignores_identical_ids = _scores.ignores_identical_ids(identical_ids, collection, splits)
    queries = {
        query: text for name in splits for query, text in collection.split_queries(name).items()
    }
    if run is None:
        _scores.check_savable(save_run, collection.documents, queries)
    texts = _scores.texts_of(collection)
    reranker = (
        None if rerank is None else _retrievers.load_reranker(asked, collection.documents, texts)
    )
    passages, changed = None, None
    ignored: set[str] = set()
    if run is not None:
        found = _scores.read_run(run, "--run")
        if ignores_identical_ids:
            found, ignored = _scores.without_identical_ids(found)
        _scores.check_texts(found.name, found.provenance, collection, texts)
    else:
        request = retrieval.SearchRequest(
            max(k or DEPTH, deepest, asked["rerank_depth"] or 0),
            feedback,
            mix,
            ignore_identical_ids=ignores_identical_ids and _share_ids(queries, collection),
        )
        searcher, request, ranking = _searched(asked, collection, queries, texts, request)
        name = f"--model {model}" if index is None else f"--index {index}"
        found = _scores.NamedRun(name, ranking.run, searcher.provenance)
        passages = ranking.best_passages if searcher.passages else None
        ignored = ranking.ignored_identical_ids
    _scores.check_answers(found, collection, splits)
    if reranker is not None and reranking is not None:
        answers = {query: scores for query, scores in found.run.items() if query in queries}
        with _options.as_options(documents="--rerank", tokens="--rerank"):
            reranked = reranker(queries, answers, reranking, passages=passages)[1]
        found = _scores.NamedRun(found.name, reranked, texts)
    scores = _scores.score(
        found,
        collection,
        splits,
        measures,
        deepest,
        ignores_identical_ids,
        ignored,
    )
    _scores.save(found, texts, save_run, depth)
    scores.write(per_query)
    if feedback is not None and reranking is None:
        changed = _scores.changed_by_feedback(
            scores,
            searcher,
            queries,
            request,
            ranking,
            collection,
        )
    if as_json:
        _common.print_json(
            _scores.facts(collection, scores)
            | _common.known({"rerank": rerank, "feedback": changed}),
        )
    else:
        _scores.print_scores(collection, scores)


def _share_ids(queries: dict[str, str], collection: Collection) -> bool:
    """Whether a query has the id of a document."""
    return any(query in collection.documents for query in queries)


def _searched(
    asked: Asked,
    collection: Collection,
    queries: dict[str, str],
    texts: Provenance,
    request: SearchRequest,
) -> tuple[Searcher, SearchRequest, Ranking]:
    """The searcher of --index or --model, the request with --where, and the ranking of the queries."""
    parts = {
        "vectors": asked["vectors"],
        "second": _retrievers.second_ranking(asked, queries, texts),
    }
    if asked["index"] is None:
        searcher = _retrievers.open_dense(asked, collection.contents(), **parts)
    else:
        searcher = _retrievers.open_searcher(asked, collection.contents, lambda _: parts)
        _scores.check_texts(f"--index {asked['index']}", searcher.provenance, collection, texts)
    request = replace(request, where=_retrievers.where_of(asked, searcher))
    with _options.as_options(queries="--model"):
        return searcher, request, searcher.rank(queries, request)


def fuse(
    run: list[Path] = required(
        "A TREC run file, such as evaluate --save-run writes; twice or more.",
    ),
    method: str = preset(
        "rrf",
        "Reciprocal rank fusion, or weighted sum of normalised scores.",
        metavar="rrf|interpolation",
    ),
    weight: list[float] | None = option(
        "interpolation: one per run, in their order; by default equal ones.",
    ),
    tune: Text = option(
        "interpolation: choose the weights on this split of --data, by the first measure.",
    ),
    in_sample: bool = flag(
        "Report queries that --tune chose the weights on, too, and say so.",
        "--in-sample",
    ),
    normalization: Text = option(
        "interpolation: per query; by default min_max.",
        metavar="min_max|z_score|none",
    ),
    rrf_k: Count = positive("rrf: the constant of 1 / (k + rank); by default 60."),
    k: int = positive(
        "Documents to keep per query; as many as the measures need at least.",
        default=100,
    ),
    data: Text = option(
        "The collection of the runs, to measure the fusion. " + _common.DATA_HELP,
    ),
    split: Words = option(_scores.SPLIT_HELP),
    drop_unknown: bool = flag(_common.DROP_UNKNOWN_HELP, "--drop-unknown"),
    measure: Words = option(_scores.MEASURE_HELP),
    save_run: Place = option(_scores.SAVE_RUN_HELP),
    overwrite: bool = flag(_common.OVERWRITE_HELP, "--overwrite"),
    identical_ids: Text = option(
        _scores.IDENTICAL_IDS_HELP,
        metavar=_scores.IDENTICAL_IDS,
    ),
    as_json: bool = flag("Weights and measures as JSON on stdout.", "--json"),
) -> None:
    """Fuse runs: measure the fusion with --data, write it with --save-run.

    To choose weights, make the runs with --split dev --split test, and give --method interpolation
    --tune dev.
    """
    if len(run) < 2:
        raise UsageError(f"--run: expected two runs or more, got {len(run)}.")
    if weight is not None and (len(weight) != len(run) or not any(weight)):
        raise UsageError(
            f"--weight: expected one for each of {len(run)} runs, not all of them 0, got {weight}.",
        )
    if data is None and save_run is None:
        raise UsageError("give --data to measure the fusion, or --save-run to write it.")
    measures, deepest = _scores.check_measures(measure)
    _scores.say_depth(k if "k" in _options.given else None, deepest, save_run)
    _scores.check_output_file(
        save_run,
        "--save-run",
        _scores.RUN,
        *run,
        *([] if data is None else _scores.files_of_collection(data)),
        overwrite=overwrite,
    )
    named = [_scores.read_run(path, "--run") for path in run]
    also = [] if tune is None else [tune]
    collection, splits = (
        (None, []) if data is None else _scores.load_splits(data, split, drop_unknown, also)
    )
    _scores.check_runs(named, collection, [*splits, *also])
    named, ignores_identical_ids, ignored = _without_identical_ids(
        named,
        identical_ids,
        collection,
        [*splits, *also],
    )
    weights, runs, depth = weight, [each.run for each in named], max(k, deepest)
    chosen = cast("Normalization", normalization or "min_max")
    result: Values = {"method": method, "runs": [str(path) for path in run], "weights": weights}
    shared: dict[str, int] = {}
    if tune is not None and collection is not None:
        shared = _in_sample(collection, tune, splits, in_sample)
        result |= {"tuned_on": tune, "in_sample": shared}
        weights = _tuned(
            runs,
            collection.qrels[tune],
            measures[0],
            chosen,
            depth,
            ignores_identical_ids,
        )
    if method == "rrf":
        whole = retrieval.reciprocal_rank_fusion(runs, rrf_k or 60)
        found = {query: dict(list(scores.items())[:depth]) for query, scores in whole.items()}
    else:
        with _options.as_options("normalization", weights="--weight"):
            found = retrieval.interpolate(runs, weights, chosen, k=depth)
    made_of = Provenance(
        texts_sha256=Provenance.shared(each.provenance for each in named).texts_sha256,
    )
    fused = _scores.NamedRun("the fusion", found, made_of)
    _scores.save(fused, made_of, save_run)
    result["weights"] = weights
    scores = (
        None
        if collection is None
        else _scores.score(
            fused,
            collection,
            splits,
            measures,
            deepest,
            ignores_identical_ids,
            ignored,
        )
    )
    if as_json:
        _common.print_json(
            result | (_scores.facts(collection, scores) if collection and scores else {}),
        )
        return
    if weights is not None:
        typer.echo(
            "weights: "
            + ", ".join(f"{path} {value:g}" for path, value in zip(run, weights, strict=True)),
        )
    if collection is not None and scores is not None:
        _scores.print_scores(collection, scores)
        for name, count in shared.items():
            of = f"{count} of the {len(collection.qrels[name])} queries of {name}"
            typer.echo(f"in sample: the weights were chosen on {of}")
    if save_run is not None:
        typer.echo(f"{len(fused.run)} queries: {save_run}")


def _without_identical_ids(
    named: list[_scores.NamedRun],
    choice: str | None,
    collection: Collection | None,
    splits: Sequence[str],
) -> tuple[list[_scores.NamedRun], bool, set[str]]:
    """Leave hits with the query's own id out of runs, before their scores are normalised.

    Args:
        named: the runs.
        choice: of --identical-ids; without a collection, None counts these hits.
        collection: whose judgements decide by default.
        splits: of these judgements.

    Returns:
        The runs, whether such hits are left out, and the queries that had one.
    """
    ignores = choice == "ignore"
    if collection is not None:
        ignores = _scores.ignores_identical_ids(choice, collection, splits)
    if not ignores:
        return named, False, set()
    pairs = [_scores.without_identical_ids(each) for each in named]
    ignored = {query for _, queries in pairs for query in queries}
    return [each for each, _ in pairs], True, ignored


def _tuned(
    runs: list[Run],
    judged: Mapping[str, Mapping[str, int]],
    measure: str,
    normalization: Normalization,
    k: int,
    ignore_identical_ids: bool,
) -> list[float]:
    from tilefold.retrieval.evaluation.measures import choose_weights

    try:
        weights, _ = choose_weights(
            runs,
            judged,
            measure=measure,
            normalization=normalization,
            k=k,
            ignore_identical_ids=ignore_identical_ids,
        )
        return list(weights)
    except ValueError as error:
        raise UsageError(f"--tune: {error}") from error


def _in_sample(collection: Collection, tune: str, splits: list[str], asked: bool) -> dict[str, int]:
    """Split -> how many of its queries the weights are chosen on, of those that have any; refused
    unless asked for.
    """
    counts = {
        name: len(collection.qrels[name].keys() & collection.qrels[tune].keys()) for name in splits
    }
    if (shared := {name: count for name, count in counts.items() if count}) and not asked:
        name, count = next(iter(shared.items()))
        some = f"{count} of the {len(collection.qrels[name])} queries of {name}, whose numbers are reported (--split)"
        remedy = (
            "better than on new queries. Tune on a split of other queries, or give --in-sample."
        )
        raise UsageError(f"--tune: the weights would be chosen on {some}: {remedy}")
    return shared
