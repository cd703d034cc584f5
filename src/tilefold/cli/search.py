"""``tilefold search``: ranked documents, and the terms that contribute to their scores."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold.cli import _common, _models, _rerank, _retrievers, _scores

if TYPE_CHECKING:
    from tilefold.cli._retrievers import SparseRetriever
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.vectors import SparseVectors

SHOWN_TERMS = 6
RERANK_DEPTH = 100


@dataclass(frozen=True)
class SearchPaths:
    """What a search reads, and how many terms it keeps of a query."""

    model: str | None
    index: Path
    data: str | None
    vectors: Path | None
    query_top_k: int | None = None


def search(
    query: Annotated[str, typer.Argument(help="The query.")],
    demo: Annotated[Path, typer.Option(help="Folder of tilefold demo, used without --index.")] = _common.DEMO_DIR,
    index: Annotated[
        Path | None, typer.Option(help="Index to search, with the --model that made it; BM25 has none.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The SparseEncoder that made --index.")] = None,
    data: Annotated[str | None, typer.Option(help="The collection, to show titles.")] = None,
    vectors: Annotated[Path | None, typer.Option(help="The encoded documents, to show which terms matched.")] = None,
    k: Annotated[int, typer.Option(help="Documents to show.")] = 10,
    query_top_k: Annotated[int | None, typer.Option(help=_retrievers.QUERY_TOP_K_HELP)] = None,
    query_cut: Annotated[int | None, typer.Option(help=_retrievers.QUERY_CUT_HELP)] = None,
    heap_factor: Annotated[float | None, typer.Option(help=_retrievers.HEAP_FACTOR_HELP)] = None,
    other_model: Annotated[bool, typer.Option("--other-model", help=_retrievers.OTHER_MODEL_HELP)] = False,
    rerank: Annotated[str | None, typer.Option(help=_rerank.HELP)] = None,
    rerank_model: Annotated[str | None, typer.Option(help=_rerank.MODEL_HELP)] = None,
    rerank_depth: Annotated[int | None, typer.Option(help=_rerank.DEPTH_HELP + " By default 100.")] = None,
    rerank_weight: Annotated[float | None, typer.Option(help=_rerank.WEIGHT_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The hits as JSON on stdout.")] = False,
) -> None:
    """Search an index; without options, the index of the demo.

    With --rerank, the best candidates of the index are reordered by late interaction, and scores are MaxSim.
    """
    if not query.strip():
        raise _common.UsageError("query: expected some words, got an empty text.")
    _common.check_at_least_one(k=k, query_top_k=query_top_k)
    reranking = _rerank.options(rerank, rerank_model, rerank_depth, None, rerank_weight)
    if rerank_depth is not None and rerank_depth < k:
        raise _common.UsageError(f"--rerank-depth: expected at least --k ({k}), got {rerank_depth}.")
    if index is None:
        for name, value in (("--model", model), ("--data", data), ("--vectors", vectors)):
            _common.refuse(name, value, "goes with --index")
        paths = _demo_paths(demo)
    else:
        paths = SearchPaths(model, index, data, vectors)
    _models.find_models({"--model": model, "--rerank": rerank})
    options = _retrievers.IndexOptions(query_top_k or paths.query_top_k, query_cut, heap_factor, other_model)
    retriever = _retrievers.open_index(paths.index, paths.model, options)
    hits = _hits(query, paths, retriever, k, reranking)
    if as_json:
        _common.print_json({"query": query, "hits": hits})
        return
    if not hits:
        typer.echo("no document shares a term with this query")
        return
    _common.stdout().print(_table(query, hits))


def _demo_paths(folder: Path) -> SearchPaths:
    record = folder / "demo.json"
    if not record.is_file():
        raise _common.CommandError(
            f"there is no finished demo in {folder}: run tilefold demo first, or name --model and --index."
        )
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        at = folder / found["folder"]
        query_top_k = int(found["query_terms"])
    except (ValueError, KeyError, TypeError) as error:
        raise _common.CommandError(f"{record} is damaged: run tilefold demo again.") from error
    if not (at / "data").is_dir():
        raise _common.CommandError(f"the demo in {folder} is of an earlier version: run tilefold demo again.")
    return SearchPaths(str(at / "model"), at / "index", str(at / "data"), at / "vectors", query_top_k)


def _hits(
    query: str,
    paths: SearchPaths,
    retriever: SparseRetriever | BM25Index,
    k: int,
    reranking: _rerank.RerankOptions | None,
) -> list[dict[str, Any]]:
    collection = _common.load_data(paths.data, documents_only=True) if paths.data else None
    if collection is not None:
        _scores.check_texts(f"--index {paths.index}", retriever.provenance, collection, _scores.texts_of(collection))
    documents = collection.documents if collection else {}
    reranker = _rerank.load_reranker(reranking, collection, retriever.provenance) if reranking else None
    queries = {"query": query}
    depth = (reranking.depth or max(k, RERANK_DEPTH)) if reranking else k
    encoded = None
    if isinstance(retriever, _retrievers.SparseRetriever):
        encoded = retriever.encode(queries)
        first = retriever.search_vectors(encoded, depth)["query"]
    else:
        first = retriever.search(queries, depth)["query"]
    if documents and first and not first.keys() & documents.keys():
        raise _common.CommandError(
            f"--data: none of the documents found is in {paths.data} (the first is {next(iter(first))!r}); give the "
            f"collection that the index {paths.index} was made from."
        )
    found = first
    if reranker is not None and first:
        found = reranker(queries, {"query": first})["query"]
    first_ranks = {name: rank for rank, name in enumerate(first, start=1)}
    shown = dict(list(found.items())[:k])
    matched = _matched(paths, retriever, encoded, shown)
    hits = []
    for rank, (name, score) in enumerate(shown.items(), start=1):
        document = documents.get(name)
        title = document.title or document.text[:80] if document else ""
        hit = {"rank": rank, "id": name, "score": score, "title": title, "terms": matched.get(name, [])}
        if reranking is not None:
            hit["first"] = {"rank": first_ranks[name], "score": first[name]}
        hits.append(hit)
    return hits


def _matched(
    paths: SearchPaths, retriever: SparseRetriever | BM25Index, encoded: SparseVectors | None, shown: dict[str, float]
) -> dict[str, list[dict[str, Any]]]:
    """The terms that each document shares with the query, where --vectors holds its vector."""
    from tilefold.retrieval.vectors import read_manifest, read_rows

    if paths.vectors is None:
        return {}
    if encoded is None or not isinstance(retriever, _retrievers.SparseRetriever):
        raise _common.UsageError(f"--vectors: {paths.index} is a BM25 index, which has none: leave it out.")
    if retriever.provenance.differs(read_manifest(paths.vectors).provenance):
        raise _common.CommandError(
            f"--vectors: {paths.vectors} holds vectors of another model or of other documents than the index "
            f"{paths.index}. Give those that it was built from, or build it again: tilefold index --vectors "
            f"{paths.vectors}"
        )
    stored = read_rows(paths.vectors, shown)
    return {name: _terms(encoded, stored, row, retriever.encoder.tokenizer) for row, name in enumerate(stored.ids)}


def _terms(encoded: SparseVectors, stored: SparseVectors, row: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Query terms that the document contains, by their share of the score, largest first."""
    query = dict(zip(*(part.tolist() for part in encoded.row(0)), strict=True))
    document = dict(zip(*(part.tolist() for part in stored.row(row)), strict=True))
    shares = {term: weight * document[term] for term, weight in query.items() if term in document}
    ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    tokens = tokenizer.convert_ids_to_tokens([term for term, _ in ordered])
    return [{"term": token, "contribution": share} for token, (_, share) in zip(tokens, ordered, strict=True)]


def _table(query: str, hits: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(query), title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("document")
    table.add_column("score", justify="right")
    late = "first" in hits[0]
    if late:
        table.add_column("before: #, score", justify="right")
    table.add_column("matched terms (share of the score)")
    for hit in hits:
        terms = "  ".join(f"{term['term']} {term['contribution']:.2f}" for term in hit["terms"][:SHOWN_TERMS])
        name = hit["title"] or hit["id"]
        before = [f"{hit['first']['rank']}, {hit['first']['score']:.2f}"] if late else []
        table.add_row(str(hit["rank"]), Text(name), f"{hit['score']:.2f}", *before, Text(terms))
    return table
