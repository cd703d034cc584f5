"""``tilefold search``: ranked documents, and the terms that contribute to their scores."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tilefold import retrieval
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import DocumentFieldOptions, argument, option, positive, refuse_options
from tilefold.cli._retrievers import SearcherParts
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.tables import check_queries_have_ids
from tilefold.retrieval.errors import DataError

if TYPE_CHECKING:
    from tilefold.retrieval.search.searcher import Searcher, SearchRequest

SHOWN_TERMS = 6
SHOWN_CELLS = 80


@dataclass(frozen=True, kw_only=True)
class SearchCommandRequest(
    _retrievers.IndexOptions,
    _retrievers.RerankOptions,
    _retrievers.FeedbackOptions,
    DocumentFieldOptions,
):
    """Options of ``tilefold search``."""

    query: Annotated[
        str | None,
        argument(
            "The query; - reads one per line from standard input; without it, a prompt.",
        ),
    ] = None
    queries: Annotated[
        Path | None,
        option(
            "A file of queries: .jsonl, .parquet, TREC topics (.trec), or a text or id, tab, text "
            "per line.",
        ),
    ] = None
    demo: Annotated[
        Path,
        option(
            "Folder of tilefold demo, used without --index.",
        ),
    ] = _common.DEMO_DIR
    index: Annotated[
        Path | None,
        option(
            "Index to search, with the --model that made it; BM25 has none.",
        ),
    ] = None
    model: Annotated[
        str | None,
        option(
            _retrievers.MODEL_HELP,
        ),
    ] = None
    data: Annotated[
        str | None,
        option(
            "The collection, to show titles.",
        ),
    ] = None
    vectors: Annotated[
        Path | None,
        option(
            "The encoded documents, to show which terms matched.",
        ),
    ] = None
    k: Annotated[
        int,
        positive(
            "Documents to show.",
        ),
    ] = 10
    by: Annotated[
        Literal["document", "passage"],
        option(
            "An index of passages: documents by their best one, or passages.",
        ),
    ] = "document"
    where: Annotated[list[str] | None, _retrievers.WHERE] = None
    save_run: Annotated[
        Path | None,
        option(
            "With several queries: write their documents as a TREC run, and print none.",
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
    ignore_identical_ids: Annotated[
        bool,
        option(
            "With --save-run: leave out documents that have the query's id, also of feedback.",
            "--ignore-identical-ids",
            panel="Output",
        ),
    ] = False
    as_json: Annotated[
        bool,
        option(
            "The hits as JSON on stdout.",
            "--json",
            panel="Output",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        if self.query is not None:
            if not self.query.strip():
                raise UsageError("query: expected some words, got an empty text.")
            refuse_options({"--queries": self.queries}, "goes without a query")
        if self.index is None:
            refuse_options(
                {"--model": self.model, "--data": self.data, "--vectors": self.vectors},
                "goes with --index",
            )
        else:
            refuse_options(
                {"--demo": self.demo != _common.DEMO_DIR},
                "does nothing with --index: leave it out",
            )
        if self.prf_with is not None and not self.prf_with.is_dir():
            got = "the file" if self.prf_with.exists() else "nothing at"
            raise UsageError(
                f"--prf-with: search takes a BM25 index, evaluate also a run; got {got} "
                f"{self.prf_with}.",
            )
        if self.rerank_depth is not None and self.rerank_depth < self.k:
            raise UsageError(
                f"--rerank-depth: expected at least --k ({self.k}), got {self.rerank_depth}.",
            )
        self._check_save_run()

    def _check_save_run(self) -> None:
        """Refuse ``--save-run`` for queries without ids, and options that go with it."""
        if self.save_run is None:
            refuse_options({"--overwrite": self.overwrite}, "goes with --save-run")
            refuse_options(
                {"--ignore-identical-ids": self.ignore_identical_ids},
                "goes with --save-run, whose queries have ids",
            )
        elif self.has_one_query:
            raise UsageError(
                "--save-run: goes with --queries, or with queries on standard input (-), which "
                "have ids.",
            )

    @property
    def has_one_query(self) -> bool:
        """Whether the query is an argument, and not read from a file, a pipe or a prompt."""
        return self.query is not None and self.query != "-"


def search(request: SearchCommandRequest) -> None:
    """Search an index; without options, the index of the demo.

    With --rerank, the best candidates of the index are reordered by late interaction, and scores
    are MaxSim. With --prf, terms that feedback added to the query are marked +.

    Example:
        tilefold search "how to sort a list" --index INDEX --model MODEL
    """
    feedback = request.feedback()
    interpolation = request.interpolation()
    reranking = request.reranking()
    if request.index is None:
        request = _with_index_of_demo(request)
    _models.find_models({"--model": request.model, "--rerank": request.rerank})
    if request.save_run is not None:
        _scores.check_output_file(
            request.save_run,
            "--save-run",
            _scores.RUN,
            request.queries,
            *([] if request.data is None else _scores.files_of_collection(request.data)),
            overwrite=request.overwrite,
        )
    searcher = _open_searcher(request)
    search_request = retrieval.SearchRequest(
        k=request.k,
        feedback=feedback,
        interpolation=interpolation,
        reranking=reranking,
        by=request.by,
        where=_retrievers.parse_filter(request.where, searcher),
        ignore_identical_ids=request.ignore_identical_ids,
    )
    if request.save_run is not None:
        _save_run(searcher, request, search_request, request.save_run)
    else:
        _print_hits_of_queries(searcher, request, search_request)


def _with_index_of_demo(request: SearchCommandRequest) -> SearchCommandRequest:
    """Return the request with the index, the model and the data of ``tilefold demo``.

    The demo records its folder and its number of query terms in ``demo.json``.

    Raises:
        CommandError: if there is no finished demo, or its record is damaged.
    """
    record_file = request.demo / "demo.json"
    if not record_file.is_file():
        raise CommandError(
            f"no finished demo in {request.demo}: run tilefold demo first, or name --model and "
            "--index.",
        )
    try:
        record = json.loads(record_file.read_text(encoding="utf-8"))
        folder = request.demo / record["folder"]
        query_top_k = int(record["query_terms"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CommandError(f"{record_file} is damaged: run tilefold demo again.") from error
    return replace(
        request,
        demo=_common.DEMO_DIR,
        index=folder / "index",
        model=str(folder / "model"),
        data=str(folder / "data"),
        vectors=folder / "vectors",
        query_top_k=query_top_k,
    )


def _open_searcher(request: SearchCommandRequest) -> Searcher:
    """Open the index of a command, with its model and the optional parts that options name.

    Args:
        request: options of the command: the index, its model and data, and how it is searched.

    Raises:
        UsageError: for ``--by passage`` with an index of whole documents.
    """
    searcher = _retrievers.open_searcher(
        request,
        _common.texts_of(request.data),
        functools.partial(_load_searcher_parts, request),
    )
    if request.by == "passage" and searcher.passages is None:
        raise UsageError(
            "--by passage goes with an index of passages: tilefold encode, or index, with "
            "--passages.",
        )
    return searcher


def _load_searcher_parts(request: SearchCommandRequest, made_by: Provenance) -> SearcherParts:
    """Load what a searcher has besides the index: documents, second ranking and reranker.

    Args:
        request: options that name the parts: ``--data``, ``--vectors``, ``--prf-with`` and
            ``--rerank``.
        made_by: provenance of the index, which was made from the documents of ``--data``.
    """
    documents = None
    if request.data is not None:
        index_folder = Path(str(request.index))
        documents = _scores.open_documents(request.data, index_folder, made_by)
    reranker = None
    token_store = None
    if request.rerank is not None:
        reranker, token_store = _retrievers.load_late(
            request.rerank,
            request.rerank_model,
            has_texts=request.data is not None,
        )
    # The second ranking is a BM25 index, which needs no queries in advance. The searcher compares
    # its documents with those of the index.
    second = _retrievers.second_ranking(
        request.prf_with,
        queries={},
        texts=Provenance(),
    )
    return SearcherParts(
        documents=documents,
        vectors=request.vectors,
        second=second,
        late=reranker,
        tokens=token_store,
    )


def _save_run(
    searcher: Searcher,
    request: SearchCommandRequest,
    search_request: SearchRequest,
    path: Path,
) -> None:
    """Rank all queries, write their run to `path`, and print a summary.

    Ids of queries and documents are checked before the first search.

    Args:
        searcher: searches the index.
        request: options of the command.
        search_request: options of the search.
        path: file of ``--save-run``.
    """
    queries = _read_queries_with_ids(request)
    index = getattr(searcher.retriever, "index", None)
    _scores.check_savable(path, getattr(index, "ids", ()), queries)
    ignored_identical_ids: set[str] = set()
    with _options.option_errors(documents="--data", tokens="--rerank"):
        run = {
            query: dict(scores)
            for query, scores in _retrievers.ranked(
                searcher,
                queries,
                search_request,
                ignored_identical_ids,
            )
        }
    provenance = searcher.provenance
    if search_request.by == "document":
        # Passages were ranked, but the run names their documents.
        provenance = replace(provenance, passages=None)
    _scores.save(
        _scores.NamedRun("the run", run, searcher.provenance),
        provenance,
        path,
        overwrite=request.overwrite,
    )
    n_empty = sum(not scores for scores in run.values())
    if n_empty:
        note(f"{n_empty} of {len(run)} queries found no document, and have no line in the run")
    if request.ignore_identical_ids:
        note(f"hits with the query's own id, ignored: {len(ignored_identical_ids)}")
    n_documents = sum(len(scores) for scores in run.values())
    result = {
        "output": str(path),
        "queries": len(run),
        "documents": n_documents,
        "empty": n_empty,
        "ignored_identical_ids": len(ignored_identical_ids),
    }
    _common.print_result(
        result,
        request.as_json,
        f"{len(run)} queries, {n_documents} documents: {path}",
    )


def _read_queries_with_ids(request: SearchCommandRequest) -> dict[str, str]:
    """Read all queries by their ids, which a run needs to tell them apart.

    Raises:
        CommandError: for an id that occurs twice, or no query.
    """
    queries: dict[str, str] = {}
    for query, text in _read_queries(request):
        if query in queries:
            raise CommandError(
                f"queries: the id {query!r} was given before; a run needs one for each query.",
            )
        queries[query] = text
    if not queries:
        raise CommandError("queries: expected at least one for --save-run, got none.")
    return queries


def _print_hits_of_queries(
    searcher: Searcher,
    request: SearchCommandRequest,
    search_request: SearchRequest,
) -> None:
    """Search each query when it is read, and print its hits.

    With ``--json``, a single query is printed as an object over several lines. Several queries are
    printed as one object per line.

    Args:
        searcher: searches the index.
        request: options of the command.
        search_request: options of the search.
    """
    for query, text in _read_queries(request):
        with _options.option_errors(documents="--data", tokens="--rerank", queries="--model"):
            hits = searcher.search(text, search_request)
        if request.as_json and request.has_one_query:
            _common.print_json({"query": text, "hits": hits})
        elif request.as_json:
            typer.echo(json.dumps({"id": query, "query": text, "hits": hits}, ensure_ascii=False))
        elif hits:
            _print_hits(text, hits)
        else:
            reason = _retrievers.reason_without_hits(searcher, search_request.where)
            typer.echo(reason if request.has_one_query else f"{reason}: {text}")


def _read_queries(request: SearchCommandRequest) -> Iterator[tuple[str, str]]:
    """Yield ids and texts of the queries: the argument, a file, standard input, or a prompt.

    Lines of standard input are searched as they arrive. Their ids are the text before a tab, or the
    number of the line.

    Raises:
        UsageError: with ``--ignore-identical-ids``, for queries without ids.
    """
    if request.has_one_query:
        yield "query", str(request.query)
        return
    if request.queries is not None:
        queries = retrieval.load_queries(request.queries)
        if request.ignore_identical_ids:
            _check_queries_have_ids(request.queries)
        yield from queries.items()
        return
    read_line = sys.stdin.readline
    if request.query is None and sys.stdin.isatty():
        note("a query per line; Ctrl-D ends")
        read_line = _read_line_at_prompt
    lines = iter(read_line, "")  # an empty string ends the input
    for number, line in enumerate(lines, 1):
        if line.strip():
            if request.ignore_identical_ids and "\t" not in line:
                raise _queries_without_ids(f"line {number} is a text without a tab")
            yield retrieval.query_of_line(line, number)


def _check_queries_have_ids(path: Path) -> None:
    """Raise ``UsageError`` for a file with a query whose id would be the number of its line."""
    try:
        check_queries_have_ids(path)
    except DataError as error:
        raise _queries_without_ids(str(error)) from error


def _queries_without_ids(reason: str) -> UsageError:
    """Return the error for ``--ignore-identical-ids`` with queries that have no ids."""
    return UsageError(
        "--ignore-identical-ids: expected queries with ids (id, tab, text), as the number of a "
        f"line may be the id of another document; {reason}",
    )


def _read_line_at_prompt() -> str:
    """Return the next line that is typed, and the empty string at the end."""
    try:
        return input("search> ") + "\n"
    except EOFError:
        return ""


def _print_hits(query: str, hits: list[dict[str, Any]]) -> None:
    """Print a table of the hits of a query, without columns that are empty.

    Args:
        query: text of the query.
        hits: hits as dictionaries, as the searcher returns them. After reranking, ``first`` has the
            rank and the score before it.
    """
    is_reranked = "first" in hits[0]
    terms_title = "matched terms, share of the score"
    if is_reranked:
        terms_title += " before"
    # A title that ends in > aligns its column right.
    columns: dict[str, list[str]] = {
        "#>": [str(hit["rank"]) for hit in hits],
        "id": [hit["id"] for hit in hits],
        "document": [_common.shorten(hit["title"], SHOWN_CELLS) for hit in hits],
        "passage": [_format_passage(hit.get("passage")) for hit in hits],
        "score>": [f"{hit['score']:.2f}" for hit in hits],
        "before: #, score>": [_format_first_ranking(hit.get("first")) for hit in hits],
        terms_title: [_format_terms(hit["terms"]) for hit in hits],
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    rows = zip(*shown.values(), strict=True)
    _common.print_table(shown, rows, query, ("id", "document", "passage"), title_justify="left")


def _format_passage(passage: dict[str, Any] | None) -> str:
    """Return the number and the beginning of the passage that a document was found by."""
    if not passage:
        return ""
    return _common.shorten(f"{passage['number']}: {passage.get('text', '')}", SHOWN_CELLS)


def _format_first_ranking(first_ranking: dict[str, Any] | None) -> str:
    """Return rank and score of a hit before reranking; empty if it was not reranked."""
    if first_ranking is None:
        return ""
    return f"{first_ranking['rank']}, {first_ranking['score']:.2f}"


def _format_terms(terms: list[dict[str, Any]]) -> str:
    """Return the matched terms of a hit; ``+`` marks those that feedback added."""
    cells = []
    for term in terms[:SHOWN_TERMS]:
        mark = "+" if term.get("feedback") else ""
        cells.append(f"{mark}{term['term']} {term['share']:.0%}")
    return "  ".join(cells)
