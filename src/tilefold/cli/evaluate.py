"""``tilefold evaluate``: evaluates a run, or a model with its index, against relevance judgements."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilefold.cli import _common, _rerank

if TYPE_CHECKING:
    from tilefold.retrieval.fusion import Run


def evaluate(
    data: Annotated[str, typer.Option(help="pydocs, or a folder in the BEIR layout.")] = "pydocs",
    split: Annotated[str, typer.Option(help="Split of the judgements.")] = "test",
    run: Annotated[Path | None, typer.Option(help="A TREC run file to score.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or name of a SparseEncoder; with --index.")] = None,
    index: Annotated[Path | None, typer.Option(help="Index to search; with --model.")] = None,
    k: Annotated[int, typer.Option(help="Documents to retrieve per query.")] = 100,
    measure: Annotated[
        list[str] | None, typer.Option(help="Measure in the notation of ir-measures, such as nDCG@10; may be repeated.")
    ] = None,
    rerank: Annotated[str | None, typer.Option(help=_rerank.HELP)] = None,
    rerank_model: Annotated[str | None, typer.Option(help=_rerank.MODEL_HELP)] = None,
    rerank_depth: Annotated[
        int | None, typer.Option(help=_rerank.DEPTH_HELP + " By default all retrieved candidates.")
    ] = None,
    save_run: Annotated[Path | None, typer.Option(help="Write the run as a TREC file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The measures as JSON on stdout.")] = False,
) -> None:
    """Evaluate a TREC run, or a model with its index; with --rerank, after reranking the candidates."""
    if (run is None) == (model is None and index is None):
        raise _common.UsageError("give either --run FILE, or --model and --index.")
    if run is None and (model is None or index is None):
        raise _common.UsageError("--model and --index go together.")
    _common.check_at_least_one(k=k)
    _rerank.check(rerank, rerank_model, rerank_depth)
    from tilefold.retrieval import evaluation

    collection = _common.load_data(data)
    _common.check_split(collection, split)
    queries = collection.split_queries(split)
    reranker = None if rerank is None else _rerank.load_reranker(rerank, rerank_model, collection)
    scores = evaluation.read_trec_run(run) if run is not None else _search(str(model), Path(str(index)), queries, k)
    if reranker is not None:
        scores = reranker(queries, {name: found for name, found in scores.items() if name in queries}, rerank_depth)
    if save_run is not None:
        evaluation.write_trec_run(scores, save_run)
    measures = evaluation.evaluate(scores, collection.qrels[split], measure or evaluation.DEFAULT_MEASURES)
    if as_json:
        facts = {"collection": collection.name, "split": split, "measures": measures}
        _common.print_json(facts if rerank is None else facts | {"rerank": rerank})
        return
    from rich.table import Table

    table = Table(title=f"{collection.name}, {split}: {len(collection.qrels[split])} queries")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in measures.items():
        table.add_row(name, f"{value:.4f}")
    _common.stdout().print(table)


def _search(model: str, index: Path, queries: dict[str, str], k: int) -> Run:
    from tilefold.retrieval.encoding import encode_queries
    from tilefold.retrieval.index import hits_to_run, load_index

    loaded = load_index(index)
    encoder = _common.load_encoder(model)
    vectors = encode_queries(encoder, queries)
    return hits_to_run(vectors, loaded.search(vectors, k))
