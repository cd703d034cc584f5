"""``tilefold evaluate``: evaluates a run, an index, or a dense model against relevance judgements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilefold.cli import _common, _feedback, _models, _rerank, _retrievers, _scores

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.provenance import Provenance
    from tilefold.retrieval.reranking import Reranker

DEPTH = 100


def evaluate(
    data: Annotated[str, typer.Option(help=_common.DATA_HELP)] = "pydocs",
    split: Annotated[list[str] | None, typer.Option(help=_scores.SPLIT_HELP)] = None,
    drop_unknown: Annotated[bool, typer.Option("--drop-unknown", help=_common.DROP_UNKNOWN_HELP)] = False,
    run: Annotated[Path | None, typer.Option(help="A TREC run file to score.")] = None,
    index: Annotated[
        Path | None, typer.Option(help="Index to search, with the --model that made it; BM25 has none.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=_retrievers.MODEL_HELP + " Without --index, a dense model; minilm is all-MiniLM-L6-v2."),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option(help="Documents per query to rerank and to save, by default 100; measures see what they need."),
    ] = None,
    measure: Annotated[list[str] | None, typer.Option(help=_scores.MEASURE_HELP)] = None,
    query_top_k: _retrievers.QUERY_TOP_K = None,
    query_cut: _retrievers.QUERY_CUT = None,
    heap_factor: _retrievers.HEAP_FACTOR = None,
    max_length: _retrievers.DENSE_LENGTH = None,
    other_model: _retrievers.OTHER_MODEL = False,
    rerank: _rerank.RERANK = None,
    rerank_model: _rerank.MODEL = None,
    rerank_depth: Annotated[
        int | None, typer.Option(help=_rerank.DEPTH_HELP + " By default --k, or a whole run.")
    ] = None,
    rerank_tail: Annotated[
        str | None,
        typer.Option(help="Candidates that were not reranked: keep them after the others (default), or drop them."),
    ] = None,
    rerank_weight: _rerank.WEIGHT = None,
    vectors: Annotated[Path | None, typer.Option(help="The encoded documents of --index, for --prf.")] = None,
    prf: _feedback.METHOD = None,
    prf_depth: _feedback.DEPTH = None,
    prf_terms: _feedback.TERMS = None,
    prf_alpha: _feedback.ALPHA = None,
    prf_beta: _feedback.BETA = None,
    prf_gamma: _feedback.GAMMA = None,
    prf_bottom: _feedback.BOTTOM = None,
    prf_with: _feedback.WITH = None,
    prf_place: _feedback.PLACE = None,
    prf_weight: _feedback.WEIGHT = None,
    prf_normalization: _feedback.NORMALIZATION = None,
    save_run: Annotated[Path | None, typer.Option(help=_scores.SAVE_RUN_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The measures as JSON on stdout.")] = False,
) -> None:
    """Evaluate a TREC run, an index (with its model, or of BM25), or a dense model; with --rerank, after reranking."""
    asked = locals()
    if (run is None) == (model is None and index is None):
        raise _common.UsageError("give either --run FILE, or --index (with --model, but for BM25), or a dense --model.")
    depth = None if run is not None else k or DEPTH
    _common.check_at_least_one(k=k, query_top_k=query_top_k, max_length=max_length)
    reranking, (feedback, mix) = _rerank.request(asked, depth), _feedback.request(asked)
    measures, deepest = _scores.check_measures(measure)
    _scores.say_depth(k, deepest, save_run or rerank)
    _scores.check_writable(save_run, "--save-run")
    _models.find_models({"--model": model, "--rerank": rerank})
    collection, splits = _scores.load_splits(data, split, drop_unknown, also=())
    queries = {query: text for name in splits for query, text in collection.split_queries(name).items()}
    if run is None:
        _scores.check_savable(save_run, collection, queries)
    texts = _scores.texts_of(collection)
    reranker = None if rerank is None else _reranker(rerank, rerank_model, collection, texts)
    if run is not None:
        found = _scores.read_run(run, "--run")
        _scores.check_texts(found.name, found.provenance, collection, texts)
    else:
        from tilefold.retrieval.searcher import SearchRequest

        parts = {"vectors": vectors, "second": _feedback.second(asked, queries, texts)}
        if index is None:
            searcher = _retrievers.open_dense(asked, collection.contents(), texts.texts_sha256, **parts)
        else:
            searcher = _retrievers.open_searcher(asked, collection.contents, lambda _: parts)
        name = f"--model {model}" if index is None else f"--index {index}"
        _scores.check_texts(name, searcher.provenance, collection, texts)
        request = SearchRequest(max(k or DEPTH, deepest, rerank_depth or 0), feedback, mix)
        found = _scores.NamedRun(name, searcher.rank(queries, request).run, searcher.provenance)
    _scores.check_answers(found, collection, splits)
    if reranker is not None and reranking is not None:
        judged = {query: results for query, results in found.run.items() if query in queries}
        with _common.as_options(documents="--rerank", tokens="--rerank"):
            found = _scores.NamedRun(found.name, reranker(queries, judged, reranking)[1], texts)
    scores = _scores.score(found, collection, splits, measures, deepest)
    _scores.save(found, texts, save_run, depth)
    if as_json:
        result = _scores.facts(collection, scores)
        _common.print_json(result if rerank is None else result | {"rerank": rerank})
        return
    _scores.print_table(collection, scores)


def _reranker(source: str, model: str | None, collection: Collection, texts: Provenance) -> Reranker:
    from tilefold.retrieval.reranking import Reranker

    late, tokens = _rerank.load_late(source, model, texts=True)
    with _common.as_options(tokens="--rerank", model="--rerank-model"):
        return Reranker(late, tokens, collection.documents, texts)
