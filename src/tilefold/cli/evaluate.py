"""``tilefold evaluate``: evaluates a run, an index, or a dense model against relevance judgements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilefold.cli import _common, _feedback, _models, _rerank, _retrievers, _scores

DEPTH = 100


@_feedback.takes_feedback
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
    query_top_k: Annotated[int | None, typer.Option(help=_retrievers.QUERY_TOP_K_HELP)] = None,
    query_cut: Annotated[int | None, typer.Option(help=_retrievers.QUERY_CUT_HELP)] = None,
    heap_factor: Annotated[float | None, typer.Option(help=_retrievers.HEAP_FACTOR_HELP)] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Dense: tokens read of a text; by default the model's.")
    ] = None,
    other_model: Annotated[bool, typer.Option("--other-model", help=_retrievers.OTHER_MODEL_HELP)] = False,
    rerank: Annotated[str | None, typer.Option(help=_rerank.HELP)] = None,
    rerank_model: Annotated[str | None, typer.Option(help=_rerank.MODEL_HELP)] = None,
    rerank_depth: Annotated[
        int | None, typer.Option(help=_rerank.DEPTH_HELP + " By default --k, or a whole run.")
    ] = None,
    rerank_tail: Annotated[str | None, typer.Option(help=_rerank.TAIL_HELP)] = None,
    rerank_weight: Annotated[float | None, typer.Option(help=_rerank.WEIGHT_HELP)] = None,
    vectors: Annotated[Path | None, typer.Option(help="The encoded documents of --index, for --prf.")] = None,
    feedback: _feedback.FeedbackOptions | None = None,
    save_run: Annotated[Path | None, typer.Option(help=_scores.SAVE_RUN_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The measures as JSON on stdout.")] = False,
) -> None:
    """Evaluate a TREC run, an index (with its model, or of BM25), or a dense model; with --rerank, after reranking."""
    if (run is None) == (model is None and index is None):
        raise _common.UsageError("give either --run FILE, or --index (with --model, but for BM25), or a dense --model.")
    options = _retrievers.IndexOptions(query_top_k, query_cut, heap_factor, other_model)
    if index is None:
        for option in options.given():
            raise _common.UsageError(f"{option} goes with --index.")
    if index is not None or run is not None:
        _common.refuse("--max-length", max_length, "goes with a dense --model, without --index")
    if run is not None:
        _common.refuse("--k", k, "goes with --index or a dense --model; for --rerank there is --rerank-depth")
    depth = None if run is not None else k or DEPTH
    _common.check_at_least_one(k=k, query_top_k=query_top_k, max_length=max_length)
    reranking = _rerank.options(rerank, rerank_model, rerank_depth, rerank_tail, rerank_weight)
    if feedback is None:
        _common.refuse("--vectors", vectors, "goes together with --prf")
    elif run is not None:
        raise _common.UsageError("--prf goes with --index or a dense --model: a run has no vectors.")
    measures, deepest = _scores.check_measures(measure)
    _scores.say_depth(k, deepest, save_run or rerank)
    _scores.check_writable(save_run, "--save-run")
    _models.find_models({"--model": model, "--rerank": rerank})
    collection, splits = _scores.load_splits(data, split, drop_unknown, also=())
    queries = {query: text for name in splits for query, text in collection.split_queries(name).items()}
    if run is None:
        _scores.check_savable(save_run, collection, queries)
    texts = _scores.texts_of(collection)
    reranker = None if reranking is None else _rerank.load_reranker(reranking, collection, texts)
    if run is not None:
        found = _scores.read_run(run, "--run")
        _scores.check_texts(found.name, found.provenance, collection, texts)
    else:
        opened = (
            _retrievers.open_index(index, model, options, collection.contents)
            if index is not None
            else _retrievers.load_dense(str(model), collection.contents(), texts, max_length)
        )
        retriever = opened if feedback is None else _feedback.with_options(feedback, opened, vectors)
        name = f"--model {model}" if index is None else f"--index {index}"
        _scores.check_texts(name, retriever.provenance, collection, texts)
        found = _scores.NamedRun(
            name, retriever.search(queries, max(k or DEPTH, deepest, rerank_depth or 0)), retriever.provenance
        )
    _scores.check_answers(found, collection, splits)
    if reranker is not None:
        judged = {query: results for query, results in found.run.items() if query in queries}
        found = _scores.NamedRun(found.name, reranker(queries, judged, depth), texts)
    scores = _scores.score(found, collection, splits, measures, deepest)
    _scores.save(found, texts, save_run, depth)
    if as_json:
        result = _scores.facts(collection, scores)
        _common.print_json(result if rerank is None else result | {"rerank": rerank})
        return
    _scores.print_table(collection, scores)
