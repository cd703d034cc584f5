"""``tilefold search``: ranked documents, and the terms that contribute to their scores."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tilefold import retrieval
from tilefold._internal.files import atomic_file
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import DocumentFieldOptions, argument, option, positive, refuse_options
from tilefold.cli._retrievers import SearcherParts
from tilefold.retrieval.common.files import is_unicode, json_line
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.tables import check_queries_have_ids
from tilefold.retrieval.errors import DataError

if TYPE_CHECKING:
    from tilefold.retrieval.data.documents import Document
    from tilefold.retrieval.search.searcher import Searcher, SearchRequest

SHOWN_TERMS = 6
SHOWN_CELLS = 80
# Characters of ids that are replaced in the names of files.
_NOT_IN_FILE_NAMES = re.compile(r"[^\w.-]+")
_MAX_NAME_BYTES = 90  # of the name of a query, and of a page; file systems allow 255 in all
_DIGEST_DIGITS = 12


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
            "A file of queries: .jsonl, .parquet, TREC topics (.trec), or lines with a text, or "
            "with id, tab and text.",
        ),
    ] = None
    demo: Annotated[
        Path,
        option(
            "Folder of tilefold demo, whose index is searched without --index.",
        ),
    ] = _common.DEMO_DIR
    index: Annotated[
        Path | None,
        option(
            "Index to search, with the --model that encoded it; BM25 needs no model.",
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
            "For an index of passages: rank documents by their best passage, or rank passages.",
        ),
    ] = "document"
    where: Annotated[list[str] | None, _retrievers.WHERE] = None
    explain: Annotated[
        bool,
        option(
            "For late interaction: show the document token that matched each token of the query.",
            "--explain",
        ),
    ] = False
    heat_maps: Annotated[
        Path | None,
        option(
            "For page images: write each hit with the patches that the query matched into this "
            "folder.",
            panel="Output",
        ),
    ] = None
    save_run: Annotated[
        Path | None,
        option(
            "With several queries: write the hits as a TREC run instead of printing them.",
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
            "With --save-run: leave out documents with the query's id, from feedback, too.",
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
        """Raise ``UsageError`` for conflicting options, and for options without effect."""
        super().validate()
        if self.query is not None:
            if not self.query.strip():
                raise UsageError("query: expected some words, got an empty text.")
            _check_is_unicode(self.query, "query")
            refuse_options({"--queries": self.queries}, "cannot be combined with a query")
        if self.index is None:
            refuse_options(
                {"--model": self.model, "--data": self.data, "--vectors": self.vectors},
                "requires --index",
            )
        else:
            refuse_options(
                {"--demo": self.demo != _common.DEMO_DIR},
                "has no effect with --index: leave it out",
            )
        if self.data is None:
            refuse_options({"--heat-maps": self.heat_maps}, "requires --data")
        if self.prf_with is not None and not self.prf_with.is_dir():
            got = "the file" if self.prf_with.exists() else "nothing at"
            raise UsageError(
                "--prf-with: expected a BM25 index (only evaluate also takes a run), got "
                f"{got} {self.prf_with}.",
            )
        if self.rerank_depth is not None and self.rerank_depth < self.k:
            raise UsageError(
                f"--rerank-depth: expected at least --k ({self.k}), got {self.rerank_depth}.",
            )
        self._check_save_run()

    def _check_save_run(self) -> None:
        """Raise ``UsageError`` if ``--save-run`` conflicts with other options, or they need it.

        ``--ignore-identical-ids`` requires ``--save-run``, which requires queries with ids.
        ``--overwrite`` requires an option that writes a file or folder.
        """
        if self.save_run is None:
            refuse_options(
                {"--ignore-identical-ids": self.ignore_identical_ids},
                "requires --save-run",
            )
            if self.heat_maps is None:
                refuse_options(
                    {"--overwrite": self.overwrite},
                    "requires --save-run or --heat-maps",
                )
        elif self.has_one_query:
            raise UsageError(
                "--save-run requires queries with ids: give --queries, or - for standard input.",
            )
        else:
            refuse_options(
                {"--explain": self.explain, "--heat-maps": self.heat_maps},
                "cannot be combined with --save-run",
            )

    @property
    def has_one_query(self) -> bool:
        """Whether the query is an argument, instead of read from a file, a pipe or a prompt."""
        return self.query is not None and self.query != "-"


def search(request: SearchCommandRequest) -> None:
    """Search an index; by default the index of the demo.

    With --rerank, late interaction reorders the best hits of the index, and their scores are
    MaxSim. With --explain, these scores are explained token by token. With --prf, + marks the
    terms that feedback added to the query.

    Example:
        tilefold search "how to sort a list" --index INDEX --model MODEL
    """
    # All options are checked before the first file is read.
    feedback = request.feedback()
    interpolation = request.interpolation()
    reranking = request.reranking()
    if request.index is None:
        request = _use_index_of_demo(request)
    _models.check_model_names({"--model": request.model, "--rerank": request.rerank})
    _scores.check_output_file(
        request.save_run,
        "--save-run",
        _scores.RUN,
        request.queries,
        *_scores.files_of_collection(request.data),
        overwrite=request.overwrite,
    )
    if request.heat_maps is not None:
        _check_heat_map_folder(request.heat_maps, overwrite=request.overwrite)
    searcher = _open_searcher(request)
    search_request = retrieval.SearchRequest(
        k=request.k,
        feedback=feedback,
        interpolation=interpolation,
        reranking=reranking,
        by=request.by,
        where=_retrievers.parse_filter(request.where, searcher),
        ignore_identical_ids=request.ignore_identical_ids,
        explain=request.explain,
    )
    if request.save_run is not None:
        _save_run(searcher, request, search_request, request.save_run)
    else:
        _print_hits_of_queries(searcher, request, search_request)


def _use_index_of_demo(request: SearchCommandRequest) -> SearchCommandRequest:
    """Return a request with the index, the model and the data of ``tilefold demo``.

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
        demo=_common.DEMO_DIR,  # the default: a request with an index accepts no other value
        index=folder / "index",
        model=str(folder / "model"),
        data=str(folder / "data"),
        vectors=folder / "vectors",
        query_top_k=query_top_k,
    )


def _open_searcher(request: SearchCommandRequest) -> Searcher:
    """Open the index of a command, with its model and the reranker or feedback of its options.

    Args:
        request: the options that name the index, its model and data, and how it is searched.

    Raises:
        UsageError: if ``--by passage`` is given for an index of whole documents.
    """
    searcher = _retrievers.open_searcher(
        request,
        functools.partial(_load_searcher_parts, request),
    )
    if request.by == "passage" and searcher.passages is None:
        raise UsageError(
            "--by passage requires an index of passages: run tilefold encode, or tilefold index "
            "for BM25, with --passages.",
        )
    return searcher


def _load_searcher_parts(
    request: SearchCommandRequest,
    index_provenance: Provenance,
) -> SearcherParts:
    """Load what a searcher may have besides its index: documents, a second ranking, a reranker.

    Args:
        request: the options that name the parts: ``--data``, ``--vectors``, ``--prf-with`` and
            ``--rerank``.
        index_provenance: the fingerprints of the model and of the documents of the index, which
            must be those of ``--data``.
    """
    documents = None
    if request.data is not None:
        index_folder = Path(str(request.index))
        documents = _scores.open_documents(request.data, index_folder, index_provenance)
        documents = _update_by_server_log(documents, index_folder)
    second_index = None  # whose scores are interpolated with those of the index
    if request.prf_with is not None:
        # The searcher checks that both indexes were made from the same documents.
        second_index = _retrievers.load_second_index(request.prf_with)
    reranking_model = None
    token_store = None
    if request.rerank is not None:
        reranking_model, token_store = _retrievers.load_reranking_model(
            request.rerank,
            request.rerank_model,
            request.dtype,
            has_texts=request.data is not None,
        )
    return SearcherParts(
        documents=documents,
        vectors=request.vectors,
        second=second_index,
        late=reranking_model,
        tokens=token_store,
    )


def _update_by_server_log(
    documents: Mapping[str, Document],
    index: Path,
) -> Mapping[str, Document]:
    """Return the documents of a collection, with those that a server has put into the index.

    Args:
        documents: id -> document, those that the index was made from.
        index: the folder of the index.

    Raises:
        DataError: if the server's log of documents is damaged.
    """
    from tilefold.retrieval.index.generations import open_current
    from tilefold.retrieval.index.publishing import documents_folder
    from tilefold.serve.document_log import DocumentLog

    if not documents_folder(index).exists():
        return documents
    return open_current(
        index,
        lambda generation: DocumentLog(index).documents(documents, generation.id),
    )


def _save_run(
    searcher: Searcher,
    request: SearchCommandRequest,
    search_request: SearchRequest,
    path: Path,
) -> None:
    """Rank all queries, write their run to `path`, and print a summary.

    The ids of queries and documents are checked before the first search.

    Args:
        searcher: the searcher.
        request: the options of the command.
        search_request: the options of the search.
        path: the file of ``--save-run``.
    """
    queries = _read_queries_with_ids(request)
    retriever: Any = searcher.retriever
    document_ids = getattr(retriever.index, "ids", ())  # an index of Qdrant does not list its ids
    _scores.check_ids_of_run(queries, document_ids)
    run: dict[str, dict[str, float]] = {}
    n_ignored = 0
    with _options.errors_name_options(documents="--data", tokens="--rerank"):
        for ranking in _retrievers.iterate_rankings(searcher, queries, search_request):
            run[ranking.query] = ranking.scores
            n_ignored += ranking.ignored_identical_id
    provenance = searcher.provenance
    if search_request.by == "document":
        # Passages were ranked, but the run names their documents.
        provenance = replace(provenance, passages=None)
    _scores.save_run(
        _scores.NamedRun("the run", run, searcher.provenance),
        provenance,
        path,
        overwrite=request.overwrite,
    )
    n_empty = sum(not scores for scores in run.values())
    if n_empty:
        note(f"{n_empty} of {len(run)} queries have no hit, and no line in the run")
    if request.ignore_identical_ids:
        note(f"hits with the query's own id, ignored: {n_ignored}")
    n_documents = sum(len(scores) for scores in run.values())
    result = {
        "output": str(path),
        "queries": len(run),
        "documents": n_documents,
        "empty": n_empty,
        "ignored_identical_ids": n_ignored,
        "precision": searcher.precisions,
    }
    _common.print_result(
        result,
        request.as_json,
        f"{len(run)} queries, {n_documents} documents: {path}",
    )


def _read_queries_with_ids(request: SearchCommandRequest) -> dict[str, str]:
    """Read all queries by their ids, which must be unique in a run.

    Raises:
        CommandError: if an id occurs twice, or there is no query.
    """
    queries: dict[str, str] = {}
    for query_id, text in _read_queries(request):
        if query_id in queries:
            raise CommandError(
                f"queries: the id {query_id!r} occurs twice; each query of a run needs its own id.",
            )
        queries[query_id] = text
    if not queries:
        raise CommandError("queries: expected at least one for --save-run, got none.")
    return queries


@dataclass
class _IncompleteHits:
    """Hits of all queries of a command whose title or matched terms cannot be shown.

    After an update of the index, ``--data`` or ``--vectors`` may lack the new documents.

    Attributes:
        n_hits: number of all hits.
        without_document: ids of hits that are not in ``--data``.
        without_vector: ids of hits that are not in ``--vectors``.
    """

    n_hits: int = 0
    without_document: list[str] = field(default_factory=list)
    without_vector: list[str] = field(default_factory=list)

    def count(
        self,
        hits: list[dict[str, Any]],
        searcher: Searcher,
        request: SearchCommandRequest,
    ) -> None:
        """Add the hits of a query to the counts.

        Args:
            hits: the hits, as the searcher returns them.
            searcher: the searcher.
            request: the options of the command.
        """
        self.n_hits += len(hits)
        # Documents that only the index of --prf-with finds have no terms either.
        all_hits_have_terms = request.vectors is not None and request.prf_with is None
        for hit in hits:
            if request.data is not None and hit["id"] not in searcher.documents:
                self.without_document.append(hit["id"])
            if all_hits_have_terms and hit["terms"] is None:
                self.without_vector.append(hit["id"])

    def print_notes(self) -> None:
        """Print a note for each option that lacks documents of the hits."""
        if self.without_document:
            note(
                f"--data: lacks {len(self.without_document)} of the {self.n_hits} hits (the first "
                f"is {self.without_document[0]}), so their titles are not shown: append the "
                "documents that were added to the index",
            )
        if self.without_vector:
            note(
                f"--vectors: lacks {len(self.without_vector)} of the {self.n_hits} hits (the first "
                f"is {self.without_vector[0]}), so their terms are not shown: merge the folders "
                "of vectors (tilefold merge)",
            )


def _print_hits_of_queries(
    searcher: Searcher,
    request: SearchCommandRequest,
    search_request: SearchRequest,
) -> None:
    """Search each query as it is read, and print its hits as a table or as JSON.

    JSON of a single query is one object over several lines. Several queries are printed as one
    object per line.

    Args:
        searcher: the searcher.
        request: the options of the command.
        search_request: the options of the search.
    """
    incomplete_hits = _IncompleteHits()
    heat_map_paths = None
    if request.heat_maps is not None:
        request.heat_maps.mkdir(parents=True, exist_ok=True)
        heat_map_paths = _HeatMapPaths(request.heat_maps)
    for query_id, text in _read_queries(request):
        with _options.errors_name_options(
            documents="--data",
            explain="--explain",
            tokens="--rerank",
            queries="--model",
        ):
            hits = searcher.search(text, search_request)
            if heat_map_paths is not None:
                _write_heat_maps(searcher, request, heat_map_paths, query_id, text, hits)
        incomplete_hits.count(hits, searcher, request)
        if request.as_json and request.has_one_query:
            precision = searcher.precisions
            _common.print_json({"query": text, "precision": precision, "hits": hits})
        elif request.as_json:
            record = {
                "id": query_id,
                "query": text,
                "precision": searcher.precisions,
                "hits": hits,
            }
            typer.echo(json_line(record), nl=False)
        elif hits:
            _print_hits(text, hits)
        else:
            reason = _retrievers.reason_without_hits(searcher, search_request.where)
            typer.echo(reason if request.has_one_query else _common.printable(f"{reason}: {text}"))
    incomplete_hits.print_notes()


def _check_heat_map_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise ``CommandError`` if a folder of heat maps has files that may not be replaced.

    Args:
        folder: the folder of ``--heat-maps``, which may not exist.
        overwrite: whether files may be replaced.
    """
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"--heat-maps: expected a folder, got the file {folder}.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise CommandError(
            f"--heat-maps: expected a new or empty folder, got {folder} with files in it; name "
            "another one, or replace images of the same names with --overwrite.",
        )


def _write_heat_maps(
    searcher: Searcher,
    request: SearchCommandRequest,
    paths: _HeatMapPaths,
    query_id: str,
    query: str,
    hits: list[dict[str, Any]],
) -> None:
    """Write an image of each hit that is a page, with the patches that the query has matched.

    The path of the image (heat map) is added to the hit.

    Args:
        searcher: the searcher.
        request: the options of the command.
        paths: paths of the heat maps of all queries.
        query_id: id of the query, which the names of the files have if there are several queries.
        query: text of the query.
        hits: the hits, as the searcher returns them. A page gets its ``heat_map``.
    """
    pages = []
    for hit in hits:
        document = searcher.documents.get(hit["id"])
        if document is not None and document.page is not None:
            pages.append(hit)
    if hits and not pages:
        note(f"--heat-maps: none of the {len(hits)} hits is a page image")
    is_reranked = request.rerank is not None  # the reranker, or else the index, has page vectors
    for hit in pages:
        image: Any = searcher.encoded_item(hit["id"], with_reranker=is_reranked)
        explanations = searcher.explain_items(
            query,
            {hit["id"]: image},
            with_reranker=is_reranked,
        )
        path = paths.path_of(
            query_id=None if request.has_one_query else query_id,
            rank=hit["rank"],
            n_hits=len(hits),
            page_id=hit["id"],
        )
        with atomic_file(path) as temporary:
            explanations[hit["id"]].draw(image).save(temporary, "PNG")
        hit["heat_map"] = str(path)


class _HeatMapPaths:
    """Paths of heat maps, which differ for different hits.

    Characters that are not for file names are replaced, and long names are shortened. The ranks
    tell the pages of a query apart. The id of a query gets a digest if it was changed, because
    another id may become the same name.

    Args:
        folder: folder of the heat maps.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: set[str] = set()  # in lower case, as some file systems compare names

    def path_of(self, *, query_id: str | None, rank: int, n_hits: int, page_id: str) -> Path:
        """Return the path of a heat map, such as ``query-q7-rank-02-menu.png`` in the folder.

        Args:
            query_id: id of the query; None for the only query.
            rank: rank of the page.
            n_hits: number of hits. Ranks get leading zeros to as many digits, so that file names
                are sorted by rank.
            page_id: id of the page.
        """
        from tilefold.retrieval.data.pages import IMAGE_SUFFIXES

        page_name = page_id
        if Path(page_id).suffix.lower() in IMAGE_SUFFIXES:
            page_name = str(Path(page_id).with_suffix(""))
        n_digits = len(str(n_hits))
        name = f"rank-{rank:0{n_digits}d}-{_file_name(page_name)}"
        if query_id is not None:
            name = f"query-{_distinct_file_name(query_id)}-{name}"
        unused_name = name
        number = 2
        while unused_name.lower() in self._names:
            unused_name = f"{name}-{number}"
            number += 1
        self._names.add(unused_name.lower())
        return self._folder / f"{unused_name}.png"


def _file_name(text: str) -> str:
    """Return a short file name that resembles a text."""
    name = _NOT_IN_FILE_NAMES.sub("_", text)
    # The last character may be cut within its bytes, and is then left out.
    return name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")


def _distinct_file_name(text: str) -> str:
    """Return a file name that differs for different texts: with a digest if it is not the text."""
    name = _file_name(text)
    if name == text:
        return name
    # A line of standard input may have bytes that are not UTF-8, which are surrogates in the text.
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name}-{digest[:_DIGEST_DIGITS]}"


def _read_queries(request: SearchCommandRequest) -> Iterator[tuple[str, str]]:
    """Yield the ids and texts of the queries: an argument, a file, standard input or a prompt.

    A line of standard input is yielded as it arrives. Its id is the text before a tab, or the
    number of the line.

    Raises:
        UsageError: if ``--ignore-identical-ids`` is given, and a query has no id.
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
        note("one query per line; press Ctrl-D to finish")
        read_line = _read_line_at_prompt
    lines = iter(read_line, "")  # an empty string ends the input
    for number, line in enumerate(lines, 1):
        if line.strip():
            if request.ignore_identical_ids and "\t" not in line:
                raise _missing_ids_error(f"line {number} is a text without a tab")
            _check_is_unicode(line, f"line {number} of standard input")
            yield retrieval.query_of_line(line, number)


def _check_is_unicode(query: str, source: str) -> None:
    """Raise ``UsageError`` if a query has bytes that are not UTF-8.

    Python reads such bytes of a command line, and of standard input in some locales, as halves of
    surrogate pairs.

    Args:
        query: the query, or its line.
        source: where the query comes from, for the error.
    """
    if not is_unicode(query):
        raise UsageError(
            f"{source}: expected UTF-8 text, got {query.strip()!r}. Use a "
            "terminal with UTF-8, or convert the queries with iconv.",
        )


def _check_queries_have_ids(path: Path) -> None:
    """Raise ``UsageError`` if the queries of a file have no ids.

    The numbers of their lines would become their ids, and may be the ids of unrelated documents.
    """
    try:
        check_queries_have_ids(path)
    except DataError as error:
        raise _missing_ids_error(str(error)) from error


def _missing_ids_error(reason: str) -> UsageError:
    """Return the error for ``--ignore-identical-ids`` with a query that has no id."""
    return UsageError(
        "--ignore-identical-ids: expected queries with ids (id, tab, text), because the number of "
        f"a line may be the id of an unrelated document; {reason}",
    )


def _read_line_at_prompt() -> str:
    """Return the next line that the user types, or the empty string at the end."""
    try:
        return input("search> ") + "\n"
    except EOFError:
        return ""


def _print_hits(query: str, hits: list[dict[str, Any]]) -> None:
    """Print a table of the hits of a query, without empty columns.

    Args:
        query: the text of the query.
        hits: the hits as dictionaries, as the searcher returns them. After reranking, ``first``
            holds the rank and the score before reranking.
    """
    is_reranked = "first" in hits[0]
    first_title = "before reranking: #, score"
    terms_title = "matched terms, share of the score"
    if is_reranked:
        terms_title += " before reranking"
    columns: dict[str, list[str]] = {
        "#": [str(hit["rank"]) for hit in hits],
        "id": [hit["id"] for hit in hits],
        "document": [_common.shorten(hit["title"], SHOWN_CELLS) for hit in hits],
        "passage": [_format_passage(hit.get("passage")) for hit in hits],
        "score": [f"{hit['score']:.2f}" for hit in hits],
        first_title: [_format_first_ranking(hit.get("first")) for hit in hits],
        terms_title: [_format_terms(hit["terms"] or []) for hit in hits],
        "query token: matched token, similarity": [
            _format_matches(hit.get("matches") or []) for hit in hits
        ],
        "heat map": [hit.get("heat_map", "") for hit in hits],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    _common.print_table(
        columns,
        zip(*columns.values(), strict=True),
        query,
        right_aligned=("#", "score", first_title),
        wrapped=("id", "document", "passage", "heat map"),
        title_justify="left",
    )


def _format_passage(passage: dict[str, Any] | None) -> str:
    """Format the number and the beginning of the best passage of a hit."""
    if not passage:
        return ""
    return _common.shorten(f"{passage['number']}: {passage.get('text', '')}", SHOWN_CELLS)


def _format_first_ranking(first_ranking: dict[str, Any] | None) -> str:
    """Format the rank and the score of a hit before reranking; empty if it was not reranked."""
    if first_ranking is None:
        return ""
    return f"{first_ranking['rank']}, {first_ranking['score']:.2f}"


def _format_terms(terms: list[dict[str, Any]]) -> str:
    """Format the matched terms of a hit; ``+`` marks terms that feedback added to the query."""
    cells = []
    for term in terms[:SHOWN_TERMS]:
        mark = "+" if term.get("feedback") else ""
        cells.append(f"{mark}{term['term']} {term['share']:.0%}")
    return "  ".join(cells)


def _format_matches(matches: list[dict[str, Any]]) -> str:
    """Format the best match of each word of a query, in the order of the query.

    A match on a page image is the left and the upper edge of the patch, in percent of the page, or
    a word of the model's prompt.
    """
    content_matches = [match for match in matches if match["content"]]  # no special tokens
    cells = []
    for match in content_matches or matches:
        matched = match["document_token"]
        if "box" in match:
            left, top, _, _ = match["box"]
            matched = f"at {left:.0%} {top:.0%}"
        elif match.get("prompt"):
            matched += " (prompt)"
        cells.append(f"{match['query_token']}: {matched} {match['similarity']:.2f}")
    return "  ".join(cells)
