"""``tilefold search``: ranked documents, and the terms that contribute to their scores."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tilefold.cli import _common, _feedback, _models, _rerank, _retrievers
from tilefold.cli._searcher import Searcher, SearchPaths

SHOWN_TERMS = 6
SHOWN_CHARACTERS = 80


@_feedback.takes_feedback
def search(
    query: Annotated[
        str | None, typer.Argument(help="The query; - reads one per line from standard input; without it, a prompt.")
    ] = None,
    queries: Annotated[
        Path | None,
        typer.Option(
            help="A file of queries: .jsonl, .parquet, TREC topics (.trec), or a text or id, tab, text per line."
        ),
    ] = None,
    demo: Annotated[Path, typer.Option(help="Folder of tilefold demo, used without --index.")] = _common.DEMO_DIR,
    index: Annotated[
        Path | None, typer.Option(help="Index to search, with the --model that made it; BM25 has none.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=_retrievers.MODEL_HELP)] = None,
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
    feedback: _feedback.FeedbackOptions | None = None,
    as_json: Annotated[bool, typer.Option("--json", help="The hits as JSON on stdout.")] = False,
) -> None:
    """Search an index; without options, the index of the demo.

    With --rerank, the best candidates of the index are reordered by late interaction, and scores are MaxSim. With
    --prf, terms that feedback added to the query are marked +.
    """
    if query is not None:
        _common.refuse("--queries", queries, "goes without a query")
        if not query.strip():
            raise _common.UsageError("query: expected some words, got an empty text.")
    _common.check_at_least_one(k=k, query_top_k=query_top_k)
    reranking = _rerank.options(rerank, rerank_model, rerank_depth, None, rerank_weight)
    if rerank_depth is not None and rerank_depth < k:
        raise _common.UsageError(f"--rerank-depth: expected at least --k ({k}), got {rerank_depth}.")
    if feedback is not None and feedback.second is not None and feedback.second.is_file():
        raise _common.UsageError(
            f"--prf-with: {feedback.second} is a file; search takes a BM25 index, evaluate also a run."
        )
    if index is None:
        for name, value in (("--model", model), ("--data", data), ("--vectors", vectors)):
            _common.refuse(name, value, "goes with --index")
        paths = _demo_paths(demo)
    else:
        _common.refuse_useless(["demo"], "with --index")
        paths = SearchPaths(model, index, data, vectors)
    _models.find_models({"--model": model, "--rerank": rerank})
    options = _retrievers.IndexOptions(query_top_k or paths.query_top_k, query_cut, heap_factor, other_model)
    retriever = _retrievers.open_index(paths.index, paths.model, options, _texts(paths.data))
    searcher = Searcher(paths, retriever, k, reranking, feedback)
    single = query is not None and query != "-"
    for name, text in [("query", str(query))] if single else _many(query, queries):
        hits = searcher.answer(text)
        if as_json and single:
            _common.print_json({"query": text, "hits": hits})
        elif as_json:
            typer.echo(json.dumps({"id": name, "query": text, "hits": hits}, ensure_ascii=False))
        elif hits:
            _common.stdout().print(_table(text, hits))
        else:
            typer.echo("no document shares a term with this query" + ("" if single else f": {text}"))


def _texts(data: str | None) -> Callable[[], Mapping[str, str]] | None:
    """What gives the documents of --data, where they are needed."""
    return None if data is None else lambda: _common.load_data(data, documents_only=True).contents()


def _many(query: str | None, queries: Path | None) -> Iterator[tuple[str, str]]:
    """Ids and texts of the queries in a file, on standard input, or typed at a prompt."""
    from tilefold.retrieval import load_queries, query_of_line

    if queries is not None:
        yield from load_queries(queries).items()
        return
    prompted = query is None and sys.stdin.isatty()
    if prompted:
        _common.note("a query per line; Ctrl-D ends")
    number = 0
    while line := _line(prompted):
        number += 1
        if line.strip():
            yield query_of_line(line, number)


def _line(prompted: bool) -> str:
    """The next line of standard input, the empty string at its end."""
    if not prompted:
        return sys.stdin.readline()
    try:
        return input("search> ") + "\n"
    except EOFError:
        return ""


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
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _common.CommandError(f"{record} is damaged: run tilefold demo again.") from error
    if not (at / "data").is_dir():
        raise _common.CommandError(f"the demo in {folder} is of an earlier version: run tilefold demo again.")
    return SearchPaths(str(at / "model"), at / "index", str(at / "data"), at / "vectors", query_top_k)


def _table(query: str, hits: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(query), title_justify="left")
    late, titled, explained = "first" in hits[0], any(hit["title"] for hit in hits), any(hit["terms"] for hit in hits)
    table.add_column("#", justify="right")
    table.add_column("id", overflow="fold")
    if titled:
        table.add_column("document")
    table.add_column("score", justify="right")
    if late:
        table.add_column("before: #, score", justify="right")
    if explained:
        table.add_column("matched terms, share of the score" + (" before" if late else ""))
    for hit in hits:
        row = [Text(str(hit["rank"])), Text(hit["id"])]
        row += [Text(textwrap.shorten(hit["title"], SHOWN_CHARACTERS, placeholder=" ..."))] if titled else []
        row += [Text(f"{hit['score']:.2f}")]
        row += [Text(f"{hit['first']['rank']}, {hit['first']['score']:.2f}")] if late else []
        terms = "  ".join(
            f"{'+' * term.get('feedback', False)}{term['term']} {term['share']:.0%}"
            for term in hit["terms"][:SHOWN_TERMS]
        )
        table.add_row(*row, *([Text(terms)] if explained else []))
    return table
