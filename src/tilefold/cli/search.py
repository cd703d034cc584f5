"""``tilefold search``: ranked documents, and the terms that contribute to their scores."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilefold import retrieval
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import Asked, CommandError, UsageError, Values, note
from tilefold.cli._options import Place, Text, Words, argument, flag, option, positive, preset
from tilefold.retrieval.common.provenance import Provenance

if TYPE_CHECKING:
    from tilefold.retrieval.search.searcher import Searcher, SearchRequest

SHOWN_TERMS = 6
SHOWN_CELLS = 80


@_options.with_options(_retrievers.of_index, _retrievers.of_reranking, _retrievers.of_feedback)
def search(
    query: Text = argument(
        "The query; - reads one per line from standard input; without it, a prompt.",
    ),
    queries: Place = option(
        "A file of queries: .jsonl, .parquet, TREC topics (.trec), or a text or id, tab, text per line.",
    ),
    demo: Path = preset(_common.DEMO_DIR, "Folder of tilefold demo, used without --index."),
    index: Place = option("Index to search, with the --model that made it; BM25 has none."),
    model: Text = option(_retrievers.MODEL_HELP),
    data: Text = option("The collection, to show titles."),
    vectors: Place = option("The encoded documents, to show which terms matched."),
    k: int = positive("Documents to show.", default=10),
    by: str = preset(
        "document",
        "An index of passages: documents by their best one, or passages.",
        metavar="document|passage",
    ),
    where: Words = _retrievers.WHERE,
    save_run: Place = option(
        "With several queries: write their documents as a TREC run, and print none.",
    ),
    overwrite: bool = flag(_common.OVERWRITE_HELP, "--overwrite"),
    ignore_identical_ids: bool = flag(
        "With --save-run: leave out documents that have the query's id, also of feedback.",
        "--ignore-identical-ids",
    ),
    as_json: bool = flag("The hits as JSON on stdout.", "--json"),
    **more: Any,
) -> None:
    """Search an index; without options, the index of the demo.

    With --rerank, the best candidates of the index are reordered by late interaction, and scores
    are MaxSim. With --prf, terms that feedback added to the query are marked +.
    """
    asked = locals() | more
    if query is not None and not query.strip():
        raise UsageError("query: expected some words, got an empty text.")
    if (second := asked["prf_with"]) is not None and not second.is_dir():
        got = "the file" if second.exists() else "nothing at"
        raise UsageError(
            f"--prf-with: search takes a BM25 index, evaluate also a run; got {got} {second}.",
        )
    feedback, mix = _retrievers.feedback_request(asked)
    reranking = _retrievers.rerank_request(asked)
    if (depth := asked["rerank_depth"]) is not None and depth < k:
        raise UsageError(f"--rerank-depth: expected at least --k ({k}), got {depth}.")
    if index is None:
        asked |= _demo_paths(demo)
    _models.find_models({"--model": model, "--rerank": asked["rerank"]})
    single = query is not None and query != "-"
    _check_save_run(asked, single)
    searcher = _open(asked)
    request = retrieval.SearchRequest(
        k,
        feedback,
        mix,
        None,
        reranking,
        by,
        _retrievers.where_of(asked, searcher),
        ignore_identical_ids,
    )
    if save_run is not None:
        found = _save(searcher, _many(query, queries), request, save_run)
        _common.print_result(
            found,
            as_json,
            f"{found['queries']} queries, {found['documents']} documents: {save_run}",
        )
        return
    for name, text in [("query", str(query))] if single else _many(query, queries):
        with _options.as_options(documents="--data", tokens="--rerank", queries="--model"):
            hits = searcher.search(text, request)
        if as_json and single:
            _common.print_json({"query": text, "hits": hits})
        elif as_json:
            typer.echo(json.dumps({"id": name, "query": text, "hits": hits}, ensure_ascii=False))
        elif hits:
            _print(text, hits)
        else:
            reason = _retrievers.reason_without_hits(searcher, request.where)
            typer.echo(reason if single else f"{reason}: {text}")


def _check_save_run(asked: Asked, single: bool) -> None:
    """Refuse, before any work, a run that cannot be written, and an option that goes with one."""
    save_run, data = asked["save_run"], asked["data"]
    if save_run is None:
        if asked["ignore_identical_ids"]:
            raise UsageError(
                "--ignore-identical-ids: goes with --save-run, whose queries have ids."
            )
        return
    if single:
        raise UsageError(
            "--save-run: goes with --queries, or with queries on standard input (-), which have ids.",
        )
    _scores.check_output_file(
        save_run,
        "--save-run",
        _scores.RUN,
        asked["queries"],
        *([] if data is None else _scores.files_of_collection(data)),
        overwrite=asked["overwrite"],
    )


def _open(asked: Asked) -> Searcher:
    """The index, with the documents, vectors, second ranking and reranker that the options name."""
    data, rerank = asked["data"], asked["rerank"]

    def load(made_by: Provenance) -> Values:
        parts = {
            "vectors": asked["vectors"],
            "second": _retrievers.second_ranking(asked, {}, Provenance()),
        }
        if data is not None:
            parts["documents"] = _scores.open_documents(data, asked["index"], made_by)
        if rerank is not None:
            parts["late"], parts["tokens"] = _retrievers.load_late(
                rerank,
                asked["rerank_model"],
                data is not None,
            )
        return parts

    searcher = _retrievers.open_searcher(asked, _common.texts_of(data), load)
    if asked["by"] == "passage" and searcher.passages is None:
        raise UsageError(
            "--by passage goes with an index of passages: tilefold encode, or index, with --passages.",
        )
    return searcher


def _save(
    searcher: Searcher,
    asked: Iterator[tuple[str, str]],
    request: SearchRequest,
    path: Path,
) -> Values:
    """Write the run of all queries, whose ids and those of the documents are checked before the
    first one.
    """
    queries: dict[str, str] = {}
    for name, text in asked:
        if name in queries:
            raise CommandError(
                f"queries: the id {name!r} was given before; a run needs one for each query.",
            )
        queries[name] = text
    if not queries:
        raise CommandError("queries: expected at least one for --save-run, got none.")
    _scores.check_savable(
        path,
        getattr(getattr(searcher.retriever, "index", None), "ids", ()),
        queries,
    )
    with _options.as_options(documents="--data", tokens="--rerank"):
        run = {
            name: dict(scores) for name, scores in _retrievers.ranked(searcher, queries, request)
        }
    made_of = (
        searcher.provenance
        if request.by == "passage"
        else replace(searcher.provenance, passages=None)
    )
    _scores.save(_scores.NamedRun("the run", run, searcher.provenance), made_of, path)
    if empty := sum(not scores for scores in run.values()):
        note(f"{empty} of {len(run)} queries found no document, and have no line in the run")
    return {
        "output": str(path),
        "queries": len(run),
        "documents": sum(map(len, run.values())),
        "empty": empty,
    }


def _many(query: str | None, queries: Path | None) -> Iterator[tuple[str, str]]:
    """Ids and texts of the queries in a file, on standard input, or typed at a prompt."""
    if queries is not None:
        yield from retrieval.load_queries(queries).items()
        return
    prompted = query is None and sys.stdin.isatty()
    if prompted:
        note("a query per line; Ctrl-D ends")
    for number, line in enumerate(iter(_typed if prompted else sys.stdin.readline, ""), 1):
        if line.strip():
            yield retrieval.query_of_line(line, number)


def _typed() -> str:
    """The next line of a prompt, the empty string at its end."""
    try:
        return input("search> ") + "\n"
    except EOFError:
        return ""


def _demo_paths(folder: Path) -> Values:
    """The options that search what the demo left."""
    record = folder / "demo.json"
    if not record.is_file():
        raise CommandError(
            f"no finished demo in {folder}: run tilefold demo first, or name --model and --index.",
        )
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        at = folder / found["folder"]
        query_top_k = int(found["query_terms"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CommandError(f"{record} is damaged: run tilefold demo again.") from error
    paths = {
        "model": str(at / "model"),
        "index": at / "index",
        "data": str(at / "data"),
        "vectors": at / "vectors",
    }
    return paths | {"query_top_k": query_top_k}


def _print(query: str, hits: list[Values]) -> None:
    late, found = "first" in hits[0], [hit.get("passage") for hit in hits]
    passages = [f"{each['number']}: {each.get('text', '')}" if each else "" for each in found]
    terms = [hit["terms"][:SHOWN_TERMS] for hit in hits]
    said = [
        [f"{'+' * each.get('feedback', False)}{each['term']} {each['share']:.0%}" for each in row]
        for row in terms
    ]
    columns = {
        "#>": [str(hit["rank"]) for hit in hits],
        "id": [hit["id"] for hit in hits],
        "document": [_common.shorten(hit["title"], SHOWN_CELLS) for hit in hits],
        "passage": [_common.shorten(part, SHOWN_CELLS) for part in passages],
        "score>": [f"{hit['score']:.2f}" for hit in hits],
        "before: #, score>": [
            f"{hit['first']['rank']}, {hit['first']['score']:.2f}" if late else "" for hit in hits
        ],
        "matched terms, share of the score" + " before" * late: ["  ".join(row) for row in said],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = zip(*shown.values(), strict=True)
    _common.print_table(shown, rows, query, ("id", "document", "passage"), title_justify="left")
