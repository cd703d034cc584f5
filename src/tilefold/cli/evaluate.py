"""``tilefold evaluate``: evaluates a run, an index, or a dense model against relevance judgements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from tilefold.cli import _common, _models, _retrievers, _scores
from tilefold.cli._common import Count, Place, Text, option

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.provenance import Provenance
    from tilefold.retrieval.reranking import Reranker

DEPTH = 100


def evaluate(
    data: Annotated[str, option(_common.DATA_HELP)] = "pydocs",
    split: Annotated[list[str] | None, option(_scores.SPLIT_HELP)] = None,
    drop_unknown: Annotated[bool, option(_common.DROP_UNKNOWN_HELP, "--drop-unknown")] = False,
    run: Annotated[Place, option("A TREC run file to score.")] = None,
    index: Annotated[Place, option("Index to search, with the --model that made it; BM25 has none.")] = None,
    model: Annotated[
        Text, option(_retrievers.MODEL_HELP + " Without --index, a dense model; minilm is all-MiniLM-L6-v2.")
    ] = None,
    k: Annotated[
        Count, option("Documents per query to rerank and to save, by default 100; measures see what they need.")
    ] = None,
    measure: Annotated[list[str] | None, option(_scores.MEASURE_HELP)] = None,
    query_top_k: _retrievers.QUERY_TOP_K = None,
    query_cut: _retrievers.QUERY_CUT = None,
    heap_factor: _retrievers.HEAP_FACTOR = None,
    max_length: _retrievers.DENSE_LENGTH = None,
    other_model: _retrievers.OTHER_MODEL = False,
    rerank: _retrievers.RERANK = None,
    rerank_model: _retrievers.RERANK_MODEL = None,
    rerank_depth: Annotated[Count, option(_retrievers.RERANK_DEPTH_HELP + " By default --k, or a whole run.")] = None,
    rerank_tail: Annotated[
        Text, option("Candidates that were not reranked: keep them after the others (default), or drop them.")
    ] = None,
    rerank_weight: _retrievers.RERANK_WEIGHT = None,
    vectors: Annotated[Place, option("The encoded documents of --index, for --prf.")] = None,
    prf: _retrievers.PRF = None,
    prf_depth: _retrievers.PRF_DEPTH = None,
    prf_terms: _retrievers.PRF_TERMS = None,
    prf_alpha: _retrievers.PRF_ALPHA = None,
    prf_beta: _retrievers.PRF_BETA = None,
    prf_gamma: _retrievers.PRF_GAMMA = None,
    prf_bottom: _retrievers.PRF_BOTTOM = None,
    prf_with: _retrievers.PRF_WITH = None,
    prf_place: _retrievers.PRF_PLACE = None,
    prf_weight: _retrievers.PRF_WEIGHT = None,
    prf_normalization: _retrievers.PRF_NORMALIZATION = None,
    save_run: Annotated[Place, option(_scores.SAVE_RUN_HELP)] = None,
    as_json: Annotated[bool, option("The measures as JSON on stdout.", "--json")] = False,
) -> None:
    """Evaluate a TREC run, an index (with its model, or of BM25), or a dense model; with --rerank, after reranking."""
    asked = locals()
    if (run is None) == (model is None and index is None):
        raise _common.UsageError("give either --run FILE, or --index (with --model, but for BM25), or a dense --model.")
    depth = None if run is not None else k or DEPTH
    _common.check_at_least_one(k=k, query_top_k=query_top_k, max_length=max_length)
    reranking, (feedback, mix) = _retrievers.rerank_request(asked, depth), _retrievers.feedback_request(asked)
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

        parts = {"vectors": vectors, "second": _retrievers.second_ranking(asked, queries, texts)}
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
        _common.print_json(_scores.facts(collection, scores) | _common.known({"rerank": rerank}))
    else:
        _scores.print_table(collection, scores)


def _reranker(source: str, model: str | None, collection: Collection, texts: Provenance) -> Reranker:
    from tilefold.retrieval.reranking import Reranker

    late, tokens = _retrievers.load_late(source, model, texts=True)
    with _common.as_options(tokens="--rerank", model="--rerank-model"):
        return Reranker(late, tokens, collection.documents, texts)
