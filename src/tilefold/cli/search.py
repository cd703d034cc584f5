"""``tilefold search``: ranked documents, and the terms that contribute to their scores."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold.cli import _common, _rerank

if TYPE_CHECKING:
    from tilefold.retrieval.vectors import SparseVectors

SHOWN_TERMS = 6
RERANK_DEPTH = 100


@dataclass(frozen=True)
class SearchPaths:
    """What a search reads, and how many terms it keeps of a query."""

    model: str
    index: Path
    data: str | None
    cache: Path | None
    vectors: Path | None
    query_terms: int | None = None


@dataclass(frozen=True)
class RerankOptions:
    """What to rerank with, and how many candidates."""

    rerank: str
    model: str | None
    depth: int


def search(
    query: Annotated[str, typer.Argument(help="The query.")],
    demo: Annotated[Path, typer.Option(help="Folder of tilefold demo, used without --index.")] = _common.DEMO_DIR,
    model: Annotated[str | None, typer.Option(help="Folder or name of a SparseEncoder; with --index.")] = None,
    index: Annotated[Path | None, typer.Option(help="Index to search; with --model.")] = None,
    data: Annotated[str | None, typer.Option(help="The collection, to show titles.")] = None,
    vectors: Annotated[Path | None, typer.Option(help="The encoded documents, to show which terms matched.")] = None,
    k: Annotated[int, typer.Option(help="Documents to show.")] = 10,
    rerank: Annotated[str | None, typer.Option(help=_rerank.HELP)] = None,
    rerank_model: Annotated[str | None, typer.Option(help=_rerank.MODEL_HELP)] = None,
    rerank_depth: Annotated[int | None, typer.Option(help=_rerank.DEPTH_HELP + " By default 100.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The hits as JSON on stdout.")] = False,
) -> None:
    """Search an index; without options, the index of the demo.

    With --rerank, the best candidates of the index are reordered by late interaction, and scores are MaxSim.
    """
    if not query.strip():
        raise _common.UsageError("query: expected some words, got an empty text.")
    _common.check_at_least_one(k=k)
    _rerank.check(rerank, rerank_model, rerank_depth)
    if rerank_depth is not None and rerank_depth < k:
        raise _common.UsageError(f"--rerank-depth: expected at least --k ({k}), got {rerank_depth}.")
    if (model is None) != (index is None):
        raise _common.UsageError("--model and --index go together.")
    if model is not None and index is not None:
        paths = SearchPaths(model, index, data, None, vectors)
    else:
        paths = _demo_paths(demo)
    reranking = None if rerank is None else RerankOptions(rerank, rerank_model, rerank_depth or max(k, RERANK_DEPTH))
    hits = _hits(query, paths, k, reranking)
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
        query_terms = int(found["query_terms"])
    except (ValueError, KeyError, TypeError) as error:
        raise _common.CommandError(f"{record} is damaged: run tilefold demo again.") from error
    return SearchPaths(str(at / "model"), at / "index", "pydocs", folder / "data", at / "vectors", query_terms)


def _hits(query: str, paths: SearchPaths, k: int, reranking: RerankOptions | None) -> list[dict[str, Any]]:
    from tilefold.retrieval import encode_queries, load_index, read_rows

    loaded = load_index(paths.index)
    collection = _common.load_data(paths.data, paths.cache) if paths.data else None
    documents = collection.documents if collection else {}
    reranker = _rerank.load_reranker(reranking.rerank, reranking.model, collection) if reranking else None
    encoder = _common.load_encoder(paths.model)
    encoded = encode_queries(encoder, {"query": query}, top_k=paths.query_terms)
    first = {hit.id: float(hit.score) for hit in loaded.search(encoded, reranking.depth if reranking else k)[0]}
    found = first
    if reranker is not None and first:
        found = reranker({"query": query}, {"query": first}, None)["query"]
    first_ranks = {name: rank for rank, name in enumerate(first, start=1)}
    shown = dict(list(found.items())[:k])
    stored = read_rows(paths.vectors, shown) if paths.vectors else None
    rows = {name: row for row, name in enumerate(stored.ids)} if stored is not None else {}
    hits = []
    for rank, (name, score) in enumerate(shown.items(), start=1):
        document = documents.get(name)
        terms = _terms(encoded, stored, rows[name], encoder.tokenizer) if stored and name in rows else []
        title = document.title or document.text[:80] if document else ""
        hit = {"rank": rank, "id": name, "score": score, "title": title, "terms": terms}
        if reranking is not None:
            hit["first"] = {"rank": first_ranks[name], "score": first[name]}
        hits.append(hit)
    return hits


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
