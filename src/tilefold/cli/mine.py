"""``tilefold mine``: hard negatives for training, from an index, from vectors, from a dense model or from a run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tilefold.cli import _common, _models, _retrievers, _scores
from tilefold.cli._common import Number, Place, Text, option

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.mining import FalseNegatives, Mined, Window
    from tilefold.retrieval.searcher import Searcher

RANKS, PER_QUERY = "1-100", 16
FILTER_DEPTH = 1000  # a relevant document is looked for that deep
CHUNK = 1024  # queries searched at a time
MARGIN_HELP = "Leave out negatives that score within this margin of the query's best relevant document."
_LEFT_OUT = {
    "queries_without": "queries have no negative and are left out",
    "queries_short": "queries have fewer negatives than asked for",
    "left_out_by_score": "candidates were left out as possible false negatives",
    "left_out_by_text": "candidates were left out because their text is the query's or a relevant document's",
}
SHARE_HELP = "Leave out negatives above this share, such as 0.95, of the score of the query's best relevant document."


def mine(
    output: Annotated[Path, option("Parquet file to write; tilefold score adds teachers' scores.")],
    data: Annotated[str, option(_common.DATA_HELP)] = "pydocs",
    split: Annotated[str, option("Split whose queries get negatives.")] = "train",
    drop_unknown: Annotated[bool, option(_common.DROP_UNKNOWN_HELP, "--drop-unknown")] = False,
    run: Annotated[Place, option("A TREC run to draw from.")] = None,
    index: Annotated[Place, option("Index to draw from, with the --model that made it; BM25 has none.")] = None,
    vectors: Annotated[Place, option("Encoded documents to search exactly, with the --model that made them.")] = None,
    model: Annotated[
        Text, option("The SparseEncoder of --index or --vectors; or alone, a dense model such as minilm.")
    ] = None,
    ranks: Annotated[
        list[str] | None,
        option(f"Ranks to draw from, such as 1-50; by default {RANKS}. May be repeated with --per-query."),
    ] = None,
    per_query: Annotated[
        list[int] | None, option(f"Negatives per query, by default {PER_QUERY}; one for each --ranks.")
    ] = None,
    margin: Annotated[Number, option(MARGIN_HELP)] = None,
    max_score_share: Annotated[Number, option(SHARE_HELP)] = None,
    seed: Annotated[int, option("Of the draws where ranks hold more than --per-query.", min=0)] = 0,
    query_top_k: _retrievers.QUERY_TOP_K = None,
    query_cut: _retrievers.QUERY_CUT = None,
    heap_factor: _retrievers.HEAP_FACTOR = None,
    other_model: _retrievers.OTHER_MODEL = False,
    max_length: _retrievers.DENSE_LENGTH = None,
    as_json: Annotated[bool, option("What was mined as JSON on stdout.", "--json")] = False,
) -> None:
    """Draw hard negatives for the judged queries of a split, into a Parquet file that training reads.

    Documents judged relevant, and ones with the same text, are never negatives. --ranks 1-50 --per-query 50
    --ranks 1-1000 --per-query 50 takes the best 50 and 50 more of the best 1,000.
    """
    asked = locals()
    windows = _windows(ranks, per_query)
    false_negatives = check_filter(margin, max_score_share)
    sources = {"--run": run, "--index": index, "--vectors": vectors}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1 or (not given and model is None) or (run is not None and model is not None):
        raise _common.UsageError(
            "give one of --run FILE, --index FOLDER (with --model, but for BM25), --vectors FOLDER with --model, or a "
            "dense --model."
        )
    _common.check_at_least_one(query_top_k=query_top_k, max_length=max_length)
    _scores.check_writable(output, "--output")
    _models.find_models({"--model": model})
    collection, _ = _scores.load_splits(data, [split], drop_unknown)
    depth = max(window.last for window in windows)
    depth = depth if false_negatives is None else max(depth, FILTER_DEPTH)
    source, rankings = _open(asked, collection, split, depth)

    from tilefold.retrieval.mining import mine_negatives

    mined = mine_negatives(rankings, collection, split, windows, seed=seed, false_negatives=false_negatives)
    made_by: dict[str, Any] = {"kind": "mined", "collection": collection.name, "retriever": source.name}
    made_by |= {name: asked[name] for name in ("split", "seed", "margin", "max_score_share")}
    made_by["model_fingerprint"] = source.provenance.model_fingerprint
    made_by["windows"] = [[window.first, window.last, window.count] for window in windows]
    _write(mined, made_by, collection, asked)


def _windows(ranks: list[str] | None, per_query: list[int] | None) -> list[Window]:
    """Each --ranks with its --per-query."""
    from tilefold.retrieval.mining import Window

    spans, counts = ranks or [RANKS], per_query or [PER_QUERY]
    if len(counts) == 1:
        counts = counts * len(spans)
    if len(spans) != len(counts):
        raise _common.UsageError(f"--per-query: expected one for each of {len(spans)} --ranks, got {len(counts)}.")
    windows = []
    for span, count in zip(spans, counts, strict=True):
        parts = re.fullmatch(r"(\d+)-(\d+)", span)
        if parts is None:
            raise _common.UsageError(f"--ranks: expected FIRST-LAST such as 1-50, got {span!r}.")
        with _common.as_options("ranks", count="--per-query"):
            windows.append(Window(int(parts[1]), int(parts[2]), count))
    return windows


def check_filter(margin: float | None, max_score_share: float | None) -> FalseNegatives | None:
    """The filter of --margin and --max-score-share, None without them."""
    from tilefold.retrieval.mining import FalseNegatives

    if margin is None and max_score_share is None:
        return None
    with _common.as_options("margin", "max_score_share"):
        return FalseNegatives(margin, max_score_share)


def _open(
    asked: Mapping[str, Any], collection: Collection, split: str, depth: int
) -> tuple[_scores.NamedRun, Iterator[tuple[str, Mapping[str, float]]]]:
    """The source of the draws (its run is empty unless it is --run), and its rankings query by query."""
    texts, model = _scores.texts_of(collection), asked["model"]
    if asked["run"] is not None:
        named = _scores.read_run(asked["run"], "--run")
        _scores.check_texts(named.name, named.provenance, collection, texts)
        _scores.check_answers(named, collection, [split])
        return named, iter(named.run.items())
    source = next((name for name in ("index", "vectors") if asked[name] is not None), None)
    if source is None:
        searcher = _retrievers.open_dense(asked, collection.contents(), texts.texts_sha256)
    elif model is None and source == "vectors":
        raise _common.UsageError(f"--vectors: name the model that made {asked['vectors']} with --model.")
    else:
        searcher = _retrievers.open_searcher(asked, collection.contents, lambda _: {})
    name = f"--model {model}" if source is None else f"--{source} {asked[source]}"
    _scores.check_texts(name, searcher.provenance, collection, texts)
    queries = collection.split_queries(split)
    return _scores.NamedRun(name, {}, searcher.provenance), _searched(searcher, queries, depth)


def _searched(searcher: Searcher, queries: Mapping[str, str], depth: int) -> Iterator[tuple[str, Mapping[str, float]]]:
    """The rankings of `queries`, some at a time."""
    from tilefold.retrieval.searcher import SearchRequest

    left, done = iter(queries.items()), 0
    with _common.progress_bar("searching") as update:
        while chunk := dict(itertools.islice(left, CHUNK)):
            yield from searcher.rank(chunk, SearchRequest(depth)).run.items()
            done += len(chunk)
            update(done, len(queries), "")


def _write(mined: Mined, made_by: dict[str, Any], collection: Collection, asked: Mapping[str, Any]) -> None:
    from tilefold.retrieval.provenance import texts_digest
    from tilefold.retrieval.training_rows import queries_of, write_training_rows

    if not mined.queries:
        raise _common.CommandError(
            f"no negative was found for any query ({mined.filtered} candidates were left out as possible false "
            "negatives): draw from more --ranks, or filter less."
        )
    rows = mined.rows(made_by)
    digests = {"texts_sha256": texts_digest(collection.contents())}
    rows.made_by |= digests | {"queries_sha256": texts_digest(queries_of(rows, collection))}
    output = asked["output"]
    write_training_rows(rows, output)
    negatives = len(rows) - int(rows.relevant.sum())
    result = {
        "output": str(output),
        "queries": len(rows.queries),
        "relevant": len(rows) - negatives,
        "negatives": negatives,
        "queries_without": mined.without,
        "queries_short": mined.short,
        "left_out_by_score": mined.filtered,
        "left_out_by_text": mined.same_text,
    }
    for name, what in _LEFT_OUT.items():
        if result[name] and not asked["as_json"]:
            _common.note(f"{result[name]} {what}")
    following = f"next: tilefold score {output} --teacher CROSS_ENCODER --data {asked['data']} --output SCORED"
    said = f"{negatives} negatives for {len(rows.queries)} queries: {output}"
    _common.print_result(result, asked["as_json"], said, following)
