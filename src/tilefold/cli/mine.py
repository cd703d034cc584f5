"""``tilefold mine``, hard negatives for training, and ``tilefold score``, teachers' scores for
them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold import retrieval
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import Asked, CommandError, UsageError, Values, note
from tilefold.cli._options import (
    Count,
    Number,
    Place,
    Text,
    Words,
    argument,
    flag,
    option,
    positive,
    preset,
    required,
)
from tilefold.retrieval.common.provenance import texts_digest

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.training_data.mining import FalseNegatives, Mined, Window
    from tilefold.retrieval.training_data.rows import TrainingRows
    from tilefold.retrieval.training_data.teachers import Teacher

RANKS, PER_QUERY = "1-100", 16
FILTER_DEPTH = 1000  # a relevant document is looked for that deep
MARGIN_HELP = (
    "Leave out negatives that score within this margin of the query's best relevant document."
)
_LEFT_OUT = {
    "queries_without": "queries have no negative and are left out",
    "queries_short": "queries have fewer negatives than asked for",
    "left_out_by_score": "candidates were left out as possible false negatives",
    "left_out_by_id": "candidates were left out because they have the query's id",
    "left_out_by_text": "candidates were left out because their text is the query's or a relevant document's",
}
SHARE_HELP = "Leave out negatives above this share, such as 0.95, of the score of the query's best relevant document."


@_options.with_options(_retrievers.of_index)
def mine(
    output: Path = required(
        "File to write, NAME.parquet; tilefold score adds teachers' scores.",
    ),
    data: str = required(_common.DATA_HELP),
    split: str = preset("train", "Split whose queries get negatives."),
    drop_unknown: bool = flag(_common.DROP_UNKNOWN_HELP, "--drop-unknown"),
    run: Place = option("A TREC run to draw from."),
    index: Place = option("Index to draw from, with the --model that made it; BM25 has none."),
    vectors: Place = option(
        "Encoded documents to search exactly, with the --model that made them.",
    ),
    model: Text = option(
        "The SparseEncoder of --index or --vectors; or alone, a dense model such as minilm.",
    ),
    ranks: Words = option(
        f"Ranks to draw from, such as 1-50; by default {RANKS}. May be repeated with --per-query.",
    ),
    per_query: list[int] | None = option(
        f"Negatives per query, by default {PER_QUERY}; one for each --ranks.",
    ),
    margin: Number = option(MARGIN_HELP),
    max_score_share: Number = option(SHARE_HELP),
    seed: int = preset(0, "Of the draws where ranks hold more than --per-query.", min=0),
    max_length: Count = _retrievers.DENSE_LENGTH,
    overwrite: bool = flag(_common.OVERWRITE_HELP, "--overwrite"),
    as_json: bool = flag("What was mined as JSON on stdout.", "--json"),
    **more: Any,
) -> None:
    """Draw hard negatives for the judged queries of a split, into a Parquet file that training
    reads.

    Documents judged relevant, and ones with the same text, are never negatives. --ranks 1-50
    --per-query 50 --ranks 1-1000 --per-query 50 takes the best 50 and 50 more of the best 1,000.
    """
    asked = locals() | more
    windows = _windows(ranks, per_query)
    false_negatives = check_filter(margin, max_score_share)
    sources = {"--run": run, "--index": index, "--vectors": vectors}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1 or (not given and model is None) or (run is not None and model is not None):
        ways = (
            "--run FILE, --index FOLDER (with --model, but for BM25), --vectors FOLDER with --model"
        )
        raise UsageError(
            f"give one of {ways}, or a dense --model such as {_models.PACKAGED}, which needs no download.",
        )
    _scores.check_output_file(
        output,
        "--output",
        _scores.TRAINING_ROWS,
        run,
        *_scores.files_of_collection(data),
        overwrite=overwrite,
    )
    _models.find_models({"--model": model})
    collection, _ = _scores.load_splits(data, [split], drop_unknown)
    depth = max(window.last for window in windows)
    depth = depth if false_negatives is None else max(depth, FILTER_DEPTH)
    source, rankings = _open(asked, collection, split, depth)

    mined = retrieval.mine_negatives(
        rankings,
        collection,
        split,
        windows,
        seed=seed,
        false_negatives=false_negatives,
    )
    made_by: Values = {"kind": "mined", "collection": collection.name, "retriever": source.name}
    made_by |= {name: asked[name] for name in ("split", "seed", "margin", "max_score_share")}
    made_by["model_fingerprint"] = source.provenance.model_fingerprint
    if source.provenance.precision is not None:
        made_by["precision"] = source.provenance.precision
    made_by["windows"] = [[window.first, window.last, window.count] for window in windows]
    _write(mined, made_by, collection, asked)


def _windows(ranks: list[str] | None, per_query: list[int] | None) -> list[Window]:
    """Each --ranks with its --per-query."""
    spans, counts = ranks or [RANKS], per_query or [PER_QUERY]
    if len(counts) == 1:
        counts = counts * len(spans)
    if len(spans) != len(counts):
        raise UsageError(
            f"--per-query: expected one for each of {len(spans)} --ranks, got {len(counts)}.",
        )
    windows = []
    for span, count in zip(spans, counts, strict=True):
        if (parts := re.fullmatch(r"(\d+)-(\d+)", span)) is None:
            raise UsageError(f"--ranks: expected FIRST-LAST such as 1-50, got {span!r}.")
        with _options.as_options("ranks", count="--per-query"):
            windows.append(retrieval.Window(int(parts[1]), int(parts[2]), count))
    return windows


def check_filter(margin: float | None, max_score_share: float | None) -> FalseNegatives | None:
    """The filter of --margin and --max-score-share, None without them."""
    from tilefold.retrieval.training_data.mining import FalseNegatives

    if margin is None and max_score_share is None:
        return None
    with _options.as_options("margin", "max_score_share"):
        return FalseNegatives(margin, max_score_share)


def _open(
    asked: Asked,
    collection: Collection,
    split: str,
    depth: int,
) -> tuple[_scores.NamedRun, Iterator[tuple[str, Mapping[str, float]]]]:
    """The source of the draws (its run is empty unless it is --run), and its rankings query by
    query.
    """
    texts, model = _scores.texts_of(collection), asked["model"]
    if asked["run"] is not None:
        named = _scores.read_run(asked["run"], "--run")
        _scores.check_texts(named.name, named.provenance, collection, texts)
        _scores.check_answers(named, collection, [split])
        return named, iter(named.run.items())
    if (
        source := next((name for name in ("index", "vectors") if asked[name] is not None), None)
    ) is None:
        searcher = _retrievers.open_dense(asked, collection.contents())
    elif model is None and source == "vectors":
        raise UsageError(f"--vectors: name the model that made {asked['vectors']} with --model.")
    else:
        searcher = _retrievers.open_searcher(asked, collection.contents, lambda _: {})
    name = f"--model {model}" if source is None else f"--{source} {asked[source]}"
    _scores.check_texts(name, searcher.provenance, collection, texts)
    ranked = _retrievers.ranked(
        searcher,
        collection.split_queries(split),
        retrieval.SearchRequest(depth),
    )
    return _scores.NamedRun(name, {}, searcher.provenance), ranked


def _write(mined: Mined, made_by: Values, collection: Collection, asked: Asked) -> None:
    if not mined.queries:
        why = f"{mined.filtered} candidates were left out as possible false negatives"
        raise CommandError(
            f"no negative was found for any query ({why}): draw from more --ranks, or filter less.",
        )
    rows, output = mined.rows(made_by), asked["output"]
    _stamp(rows, collection)
    retrieval.write_training_rows(rows, output)
    negatives = len(rows) - int(rows.relevant.sum())
    result = {
        "output": str(output),
        "queries": len(rows.queries),
        "relevant": len(rows) - negatives,
    }
    result |= {
        "negatives": negatives,
        "queries_without": mined.without,
        "queries_short": mined.short,
    }
    result |= {
        "left_out_by_score": mined.filtered,
        "left_out_by_id": mined.same_id,
        "left_out_by_text": mined.same_text,
    }
    for name, what in _LEFT_OUT.items():
        if result[name] and not asked["as_json"]:
            note(f"{result[name]} {what}")
    teachers = ["--teacher", _models.PACKAGED, "--teacher", BM25]
    following = _common.next_command(
        "score",
        output,
        *teachers,
        "--data",
        asked["data"],
        "--output",
        "scored.parquet",
    )
    stronger = (
        f"a cross-encoder is a stronger teacher: a folder, or a Hugging Face name{_models.cached()}"
    )
    said = f"{negatives} negatives for {len(rows.queries)} queries: {output}"
    _common.print_result(result, asked["as_json"], said, following, stronger)


BM25 = "bm25"
_TEACHER_HELP = (
    "A cross-encoder, dense, sparse or multi-vector model (folder or Hugging Face name), minilm, bm25, or the folder "
    "of a BM25 index; may be repeated."
)


def score(
    mined: Path = argument(
        "Parquet file of tilefold mine, or one that was scored before.",
        default=...,
    ),
    output: Path = required("File to write, NAME.parquet."),
    teacher: list[str] = required(_TEACHER_HELP),
    data: str = required(_common.DATA_HELP),
    split: Text = option(
        "Split whose relevant documents are scored too; by default that of the file.",
    ),
    drop_unknown: bool = flag(_common.DROP_UNKNOWN_HELP, "--drop-unknown"),
    normalization: str = preset(
        "min_max",
        "Of a teacher's scores of a query before the mean.",
        metavar="min_max|none",
    ),
    scale: Number = option("Factor of the mean; by default 30, and 1 with --normalization none."),
    like: Text = option(
        "Map the mean to the mean and deviation of this --teacher, in place of --scale.",
    ),
    margin: Number = option(MARGIN_HELP + " By the ensemble's score."),
    max_score_share: Number = option(SHARE_HELP + " By the ensemble's score."),
    batch_size: int = positive("Texts, or pairs of a cross-encoder, per batch.", default=32),
    max_length: Count = positive(
        "Tokens that a model reads of a text or pair; by default its own limit.",
    ),
    resume: bool = preset(True, "Keep what an interrupted run has scored.", "--resume/--fresh"),
    overwrite: bool = flag(_common.OVERWRITE_HELP, "--overwrite"),
    as_json: bool = flag("What was scored as JSON on stdout.", "--json"),
) -> None:
    """Score mined negatives and relevant documents with one teacher or several; training reads the
    result.

    A column score:TEACHER for each, and score, their ensemble. After an interruption the same
    command goes on: 2,048 pairs of a cross-encoder at a time, shards of vectors of a sparse or
    multi-vector model, and whole columns are kept; the unfinished encoding of a dense model is
    repeated.
    """
    if scale is not None and not 0 < scale < float("inf"):
        raise UsageError(f"--scale: expected a finite number above 0, got {scale:g}.")
    false_negatives = check_filter(margin, max_score_share)
    names = _names(teacher)
    _scores.check_output_file(
        output,
        "--output",
        _scores.TRAINING_ROWS,
        mined,
        *_scores.files_of_collection(data),
        overwrite=overwrite,
    )
    if not (models := [name for name in teacher if name != BM25 and not _is_index(name)]):
        _options.refuse_useless(
            ("batch_size", "max_length"),
            "with teachers that read words, of BM25",
        )
    for name in models:
        _models.find_model(name, "--teacher")

    from tilefold.retrieval.training_data.teachers import with_relevant

    rows = retrieval.read_training_rows(mined)
    if like is not None and names.get(like, like) not in {*names.values(), *rows.teachers}:
        raise UsageError(f"--like: expected one of --teacher, got {like!r}.")
    split = split or str(rows.made_by.get("split", "train"))
    collection = _common.load_data(data, drop_unknown=drop_unknown, splits=[split])
    _common.check_split(collection, split)
    rows.check_collection(collection)
    rows = with_relevant(rows, collection, split)
    work = output.with_name(f".{output.name}.scoring")
    if not resume:
        shutil.rmtree(work, ignore_errors=True)
    _common.kept.append(lambda: any(work.rglob("*.npy")) or any(work.rglob("part-*")))
    for given, name in names.items():
        loaded = _load(given, name, collection, max_length)
        with _common.progress_bar(f"scoring ({name})", resumes=_common.FRESH) as update:
            scores = retrieval.score_rows(
                loaded,
                rows,
                collection,
                work,
                batch_size=batch_size,
                progress=update,
            )
        rows.teachers[name] = scores
        made_by = {"kind": loaded.kind, "fingerprint": loaded.fingerprint}
        if loaded.precision is not None:
            made_by["precision"] = loaded.precision
            note(f"{name} computes in {loaded.precision}{_last_layers(loaded)}")
        rows.made_by["teachers"] = rows.made_by.get("teachers", {}) | {name: made_by}
    column = None if like is None else names.get(like, like)
    rows.target = retrieval.ensemble(
        rows,
        rows.teachers,
        normalization=normalization,
        scale=scale,
        like=column,
    )
    rows.made_by |= {"kind": "scored", "normalization": normalization, "scale": scale, "like": like}
    before = len(rows)
    if false_negatives is not None:
        with _options.as_options("margin", "max_score_share"):
            rows = retrieval.drop_false_negatives(rows, false_negatives)
        rows.made_by |= {"score_margin": margin, "score_max_share": max_score_share}
    _stamp(rows, collection)
    retrieval.write_training_rows(rows, output)
    shutil.rmtree(work, ignore_errors=True)
    for warning in rows.narrow_teacher_warnings():
        note(f"warning: {warning}")
    _report(rows, output, before - len(rows), as_json)


def _last_layers(teacher: Teacher) -> str:
    """Words on the layers of a cross-encoder that compute in fp32 where the others do not."""
    in_fp32 = teacher.kind == "cross-encoder" and teacher.precision != "fp32"
    return ", its scores in fp32" if in_fp32 else ""


def _names(teachers: list[str]) -> dict[str, str]:
    """Each --teacher and the name of its column: what was given, of a folder its name."""
    names = {
        given: Path(given).resolve().name if Path(given).is_dir() else given for given in teachers
    }
    if len(names) != len(teachers) or len(set(names.values())) != len(names):
        raise UsageError(
            f"--teacher: expected teachers of different names, got {', '.join(teachers)}.",
        )
    return names


def _is_index(name: str) -> bool:
    return (Path(name) / "index.json").is_file()


def _load(given: str, name: str, collection: Collection, max_length: int | None) -> Teacher:
    from tilefold.retrieval.training_data.teachers import Teacher

    if given == BM25:
        return Teacher(name, BM25, retrieval.BM25Index.build(collection.contents()))
    if _is_index(given):
        index = retrieval.BM25Index.load(given)
        _scores.check_texts(
            f"--teacher {given}",
            index.provenance,
            collection,
            _scores.texts_of(collection),
        )
        model, kind = index, BM25
    else:
        model, kind = _models.load_model(
            given,
            "--teacher",
            ("cross-encoder", "dense", "sparse", "multi-vector"),
        )
        if max_length is not None and kind == "multi-vector":
            raise UsageError(
                f"--max-length: {given} is a multi-vector model, which has lengths of its own.",
            )
        _models.limit_length(model, max_length)
    try:
        return Teacher(name, kind, model)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def _stamp(rows: TrainingRows, collection: Collection) -> None:
    """Put fingerprints of the texts into rows, also into those of another program."""
    from tilefold.retrieval.training_data.rows import queries_of

    rows.made_by["texts_sha256"] = texts_digest(collection.contents())
    rows.made_by["queries_sha256"] = texts_digest(queries_of(rows, collection))


def _report(rows: TrainingRows, output: Path, dropped: int, as_json: bool) -> None:
    best = 0  # queries of which no negative scores higher than the best relevant document
    for group in rows.groups():
        if group.target is not None and group.relevant.any():
            best += bool(group.target[group.relevant].max() >= group.target.max())
    result = {
        "output": str(output),
        "queries": len(rows.queries),
        "rows": len(rows),
        "teachers": list(rows.teachers),
    }
    result |= {"left_out_by_score": dropped, "relevant_first": best / len(rows.queries)}
    if dropped and not as_json:
        note(
            f"{dropped} rows were left out, as possible false negatives or of queries without another negative",
        )
    said = f"{len(rows)} rows scored by {', '.join(rows.teachers)}: {output}"
    first = f"{best / len(rows.queries):.0%} of {len(rows.queries)} queries have a relevant document first"
    _common.print_result(result, as_json, said, first)
