"""``tilefold mine``, hard negatives for training, and ``tilefold score``, teachers' scores for
them.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tilefold import retrieval
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import DocumentFieldOptions, argument, option, positive, refuse_options
from tilefold.cli._retrievers import SearcherParts
from tilefold.retrieval.common.provenance import texts_digest

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.training_data.mining import FalseNegatives, Mined, Window
    from tilefold.retrieval.training_data.rows import TrainingRows
    from tilefold.retrieval.training_data.teachers import Teacher

RANKS = "1-100"
PER_QUERY = 16
FILTER_DEPTH = 1000  # ranks in which filters look for the query's relevant documents
MARGIN_HELP = (
    "Leave out negatives that score within this margin of the query's best relevant document."
)
_LEFT_OUT = {
    "queries_without": "queries have no negative and are left out",
    "queries_short": "queries have fewer negatives than asked for",
    "left_out_by_score": "candidates were left out as possible false negatives",
    "left_out_by_id": "candidates were left out because they have the query's id",
    "left_out_by_text": (
        "candidates were left out because their text is the query's or a relevant document's"
    ),
}
SHARE_HELP = (
    "Leave out negatives above this share, such as 0.95, of the score of the query's best relevant "
    "document."
)


@dataclass(frozen=True, kw_only=True)
class MineRequest(_retrievers.IndexOptions, DocumentFieldOptions):
    """Options of ``tilefold mine``."""

    output: Annotated[
        Path,
        option(
            "File to write, NAME.parquet; tilefold score adds teachers' scores.",
        ),
    ]
    data: Annotated[
        str,
        option(
            _common.DATA_HELP,
        ),
    ]
    split: Annotated[
        str,
        option(
            "Split whose queries get negatives.",
        ),
    ] = "train"
    drop_unknown: Annotated[
        bool,
        option(
            _common.DROP_UNKNOWN_HELP,
            "--drop-unknown",
        ),
    ] = False
    run: Annotated[
        Path | None,
        option(
            "A TREC run to draw from.",
        ),
    ] = None
    index: Annotated[
        Path | None,
        option(
            "Index to draw from, with the --model that made it; BM25 has none.",
        ),
    ] = None
    vectors: Annotated[
        Path | None,
        option(
            "Encoded documents to search exactly, with the --model that made them.",
        ),
    ] = None
    model: Annotated[
        str | None,
        option(
            "The SparseEncoder of --index or --vectors; or alone, a dense model such as minilm.",
        ),
    ] = None
    ranks: Annotated[
        list[str] | None,
        option(
            f"Ranks to draw from, such as 1-50; by default {RANKS}. May be repeated with "
            "--per-query.",
        ),
    ] = None
    per_query: Annotated[
        list[int] | None,
        option(
            f"Negatives per query, by default {PER_QUERY}; one for each --ranks.",
        ),
    ] = None
    margin: Annotated[
        float | None,
        option(
            MARGIN_HELP,
        ),
    ] = None
    max_score_share: Annotated[
        float | None,
        option(
            SHARE_HELP,
        ),
    ] = None
    seed: Annotated[
        int,
        option(
            "Of the draws where ranks hold more than --per-query.",
            min=0,
        ),
    ] = 0
    max_length: Annotated[int | None, _retrievers.DENSE_LENGTH] = None
    overwrite: Annotated[
        bool,
        option(
            _common.OVERWRITE_HELP,
            "--overwrite",
        ),
    ] = False
    as_json: Annotated[
        bool,
        option(
            "What was mined as JSON on stdout.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        if self.index is None and self.vectors is None:
            self.refuse_index_options("goes with --index or --vectors")
        if self.run is not None or self.index is not None or self.vectors is not None:
            refuse_options(
                {"--max-length": self.max_length},
                "goes with a dense --model alone",
            )
        sources = [self.run, self.index, self.vectors]
        n_sources = sum(source is not None for source in sources)
        if (
            n_sources > 1
            or (n_sources == 0 and self.model is None)
            or (self.run is not None and self.model is not None)
        ):
            ways = (
                "--run FILE, --index FOLDER (with --model, but for BM25), "
                "--vectors FOLDER with --model"
            )
            raise UsageError(
                f"give one of {ways}, or a dense --model such as {_models.PACKAGED}, which needs "
                "no download.",
            )

    def source(self) -> str:
        """Return the option that names what negatives are drawn from, with its value."""
        if self.run is not None:
            return f"--run {self.run}"
        if self.index is not None:
            return f"--index {self.index}"
        if self.vectors is not None:
            return f"--vectors {self.vectors}"
        return f"--model {self.model}"


def mine(request: MineRequest) -> None:
    """Draw hard negatives for the judged queries of a split, into a Parquet file that training
    reads.

    Documents judged relevant, and ones with the same text, are never negatives. --ranks 1-50
    --per-query 50 --ranks 1-1000 --per-query 50 takes the best 50 and 50 more of the best 1,000.

    Example:
        tilefold mine --data DATA --index INDEX --output mined.parquet
    """
    windows = _windows(request.ranks, request.per_query)
    false_negatives = check_filter(request.margin, request.max_score_share)
    _scores.check_output_file(
        request.output,
        "--output",
        _scores.TRAINING_ROWS,
        request.run,
        *_scores.files_of_collection(request.data),
        overwrite=request.overwrite,
    )
    _models.find_models({"--model": request.model})
    collection, _ = _scores.load_splits(request.data, [request.split], request.drop_unknown)
    depth = max(window.last for window in windows)
    if false_negatives is not None:
        depth = max(depth, FILTER_DEPTH)
    source, rankings = _open(request, collection, request.split, depth)

    mined = retrieval.mine_negatives(
        rankings,
        collection,
        request.split,
        windows,
        seed=request.seed,
        false_negatives=false_negatives,
    )
    made_by: dict[str, Any] = {
        "kind": "mined",
        "collection": collection.name,
        "retriever": source.name,
        "split": request.split,
        "seed": request.seed,
        "margin": request.margin,
        "max_score_share": request.max_score_share,
        "model_fingerprint": source.provenance.model_fingerprint,
    }
    if source.provenance.precision is not None:
        made_by["precision"] = source.provenance.precision
    made_by["windows"] = [[window.first, window.last, window.count] for window in windows]
    _write(mined, made_by, collection, request)


def _windows(ranks: list[str] | None, per_query: list[int] | None) -> list[Window]:
    """Return the ranges of ranks from which negatives are drawn, with the number from each.

    Args:
        ranks: values of ``--ranks``, such as ``"1-50"``; None takes the default range.
        per_query: values of ``--per-query``, one for all ranges or one each; None takes the
            default.

    Raises:
        UsageError: for another number of values, or a text that is not a range.
    """
    ranges = ranks or [RANKS]
    counts = per_query or [PER_QUERY]
    if len(counts) == 1:
        counts = counts * len(ranges)
    if len(ranges) != len(counts):
        raise UsageError(
            f"--per-query: expected one for each of {len(ranges)} --ranks, got {len(counts)}.",
        )
    windows = []
    for text, count in zip(ranges, counts, strict=True):
        match = re.fullmatch(r"(\d+)-(\d+)", text)
        if match is None:
            raise UsageError(f"--ranks: expected FIRST-LAST such as 1-50, got {text!r}.")
        first, last = match.groups()
        with _options.option_errors(ranks="--ranks", count="--per-query"):
            windows.append(retrieval.Window(int(first), int(last), count))
    return windows


def check_filter(margin: float | None, max_score_share: float | None) -> FalseNegatives | None:
    """Return the filter of ``--margin`` and ``--max-score-share``, or None without both."""
    from tilefold.retrieval.training_data.mining import FalseNegatives

    if margin is None and max_score_share is None:
        return None
    with _options.option_errors(margin="--margin", max_share="--max-score-share"):
        return FalseNegatives(margin, max_score_share)


def _open(
    request: MineRequest,
    collection: Collection,
    split: str,
    depth: int,
) -> tuple[_scores.NamedRun, Iterator[tuple[str, Mapping[str, float]]]]:
    """Open the rankings from which negatives are drawn: a run, or the results of a search.

    Args:
        request: names a run, an index, vectors or a dense model.
        collection: with the queries of the split.
        split: split of the judgements.
        depth: documents per query.

    Returns:
        A description of what ranks: its name, its provenance, and its run if that is a file. And an
        iterator of query ids with their rankings, document id -> score.

    Raises:
        CommandError: if it was made from other documents.
    """
    texts = _scores.texts_of(collection)
    if request.run is not None:
        named = _scores.read_run(request.run, "--run")
        _scores.check_texts(named.name, named.provenance, collection, texts)
        _scores.check_answers(named, collection, [split])
        return named, iter(named.run.items())
    if request.index is None and request.vectors is None:
        searcher = _retrievers.open_dense(request, collection.contents(), request.max_length)
    elif request.model is None and request.vectors is not None:
        raise UsageError(f"--vectors: name the model that made {request.vectors} with --model.")
    else:
        searcher = _retrievers.open_searcher(
            request,
            collection.contents,
            lambda provenance: SearcherParts(),  # only the index and its model
        )
    name = request.source()
    _scores.check_texts(name, searcher.provenance, collection, texts)
    ranked = _retrievers.ranked(
        searcher,
        collection.split_queries(split),
        retrieval.SearchRequest(depth),
    )
    return _scores.NamedRun(name, {}, searcher.provenance), ranked


def _write(
    mined: Mined,
    provenance: dict[str, Any],
    collection: Collection,
    request: MineRequest,
) -> None:
    """Write mined negatives as training rows, and print how many there are.

    Args:
        mined: the negatives.
        provenance: what the file says about its origin.
        collection: with the texts, whose fingerprints are written too.
        request: names the file.

    Raises:
        CommandError: if there is no negative for any query.
    """
    if not mined.queries:
        raise CommandError(
            f"no negative was found for any query ({mined.filtered} candidates were left out as "
            "possible false negatives): draw from more --ranks, or filter less.",
        )
    rows = mined.rows(provenance)
    _record_fingerprints(rows, collection)
    retrieval.write_training_rows(rows, request.output, overwrite=request.overwrite)
    n_relevant = int(rows.relevant.sum())
    n_negatives = len(rows) - n_relevant
    result = {
        "output": str(request.output),
        "queries": len(rows.queries),
        "relevant": n_relevant,
        "negatives": n_negatives,
        "queries_without": mined.without,
        "queries_short": mined.short,
        "left_out_by_score": mined.filtered,
        "left_out_by_id": mined.same_id,
        "left_out_by_text": mined.same_text,
    }
    if not request.as_json:
        for name, description in _LEFT_OUT.items():
            if result[name]:
                note(f"{result[name]} {description}")
    score_command = _common.next_command(
        "score",
        request.output,
        "--teacher",
        _models.PACKAGED,
        "--teacher",
        BM25,
        "--data",
        request.data,
        "--output",
        "scored.parquet",
    )
    _common.print_result(
        result,
        request.as_json,
        f"{n_negatives} negatives for {len(rows.queries)} queries: {request.output}",
        score_command,
        "a cross-encoder is a stronger teacher: a folder, or a Hugging Face name"
        f"{_models.cached_models()}",
    )


BM25 = "bm25"
BATCH_SIZE = 32
_TEACHER_HELP = (
    "A cross-encoder, dense, sparse or multi-vector model (folder or Hugging Face name), minilm, "
    "bm25, or the folder of a BM25 index; may be repeated."
)


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(DocumentFieldOptions):
    """Options of ``tilefold score``."""

    mined: Annotated[
        Path,
        argument(
            "Parquet file of tilefold mine, or one that was scored before.",
        ),
    ]
    output: Annotated[
        Path,
        option(
            "File to write, NAME.parquet.",
        ),
    ]
    teacher: Annotated[
        list[str],
        option(
            _TEACHER_HELP,
        ),
    ]
    data: Annotated[
        str,
        option(
            _common.DATA_HELP,
        ),
    ]
    split: Annotated[
        str | None,
        option(
            "Split whose relevant documents are scored too; by default that of the file.",
        ),
    ] = None
    drop_unknown: Annotated[
        bool,
        option(
            _common.DROP_UNKNOWN_HELP,
            "--drop-unknown",
        ),
    ] = False
    normalization: Annotated[
        Literal["min_max", "none"],
        option(
            "Of a teacher's scores of a query before the mean.",
        ),
    ] = "min_max"
    scale: Annotated[
        float | None,
        option(
            "Factor of the mean; by default 30, and 1 with --normalization none.",
        ),
    ] = None
    language: Annotated[
        str | None,
        option(
            "Of Snowball stemmer and stop words of --teacher bm25, or none for neither; by default "
            "english.",
        ),
    ] = None
    like: Annotated[
        str | None,
        option(
            "Map the mean to the mean and deviation of this --teacher, in place of --scale.",
        ),
    ] = None
    margin: Annotated[
        float | None,
        option(
            MARGIN_HELP + " By the ensemble's score.",
        ),
    ] = None
    max_score_share: Annotated[
        float | None,
        option(
            SHARE_HELP + " By the ensemble's score.",
        ),
    ] = None
    batch_size: Annotated[
        int,
        positive(
            "Texts, or pairs of a cross-encoder, per batch.",
        ),
    ] = BATCH_SIZE
    max_length: Annotated[
        int | None,
        positive(
            "Tokens that a model reads of a text or pair; by default its own limit.",
        ),
    ] = None
    resume: Annotated[
        bool,
        option(
            "Keep what an interrupted run has scored.",
            "--resume/--fresh",
        ),
    ] = True
    overwrite: Annotated[
        bool,
        option(
            _common.OVERWRITE_HELP,
            "--overwrite",
        ),
    ] = False
    as_json: Annotated[
        bool,
        option(
            "What was scored as JSON on stdout.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        if BM25 not in self.teacher:
            refuse_options(
                {"--language": self.language},
                "goes with --teacher bm25; the folder of an index has its own language",
            )
        if self.like is not None:
            refuse_options(
                {"--scale": self.scale},
                "goes without --like, which sets mean and deviation",
            )
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise UsageError(f"--scale: expected a finite number above 0, got {self.scale:g}.")


def score(request: ScoreRequest) -> None:
    """Score mined negatives and relevant documents with one teacher or several; training reads the
    result.

    A column score:TEACHER for each, and score, their ensemble. After an interruption the same
    command goes on: 2,048 pairs of a cross-encoder at a time, shards of vectors of a sparse or
    multi-vector model, and whole columns are kept; the unfinished encoding of a dense model is
    repeated.

    Example:
        tilefold score mined.parquet --teacher minilm --data DATA \\
            --output scored.parquet
    """
    false_negatives = check_filter(request.margin, request.max_score_share)
    columns = _column_names(request.teacher)
    if BM25 in request.teacher:
        _options.bm25_language(request.language)  # checked before anything is loaded
    _scores.check_output_file(
        request.output,
        "--output",
        _scores.TRAINING_ROWS,
        request.mined,
        *_scores.files_of_collection(request.data),
        overwrite=request.overwrite,
    )
    models = [name for name in request.teacher if name != BM25 and not _is_index(name)]
    if not models:
        refuse_options(
            {
                "--batch-size": request.batch_size != BATCH_SIZE,
                "--max-length": request.max_length,
            },
            "does nothing with teachers that read words, of BM25: leave it out",
        )
    for name in models:
        _models.find_model(name, "--teacher")

    from tilefold.retrieval.training_data.teachers import applied_scale, with_relevant

    rows = retrieval.read_training_rows(request.mined)
    like_column = None
    if request.like is not None:
        like_column = columns.get(request.like, request.like)
        if like_column not in {*columns.values(), *rows.teachers}:
            raise UsageError(f"--like: expected one of --teacher, got {request.like!r}.")
    split = request.split or str(rows.made_by.get("split", "train"))
    collection = _common.load_data(request.data, drop_unknown=request.drop_unknown, splits=[split])
    _common.check_split(collection, split)
    rows.check_collection(collection)
    rows = with_relevant(rows, collection, split)
    work_folder = request.output.with_name(f".{request.output.name}.scoring")
    if not request.resume:
        shutil.rmtree(work_folder, ignore_errors=True)
    _common.finished_work_checks.append(
        lambda: any(work_folder.rglob("*.npy")) or any(work_folder.rglob("part-*")),
    )
    for source, column in columns.items():
        _score_with_teacher(request, source, column, rows, collection, work_folder)
    rows.target = retrieval.ensemble(
        rows,
        rows.teachers,
        normalization=request.normalization,
        scale=request.scale,
        like=like_column,
    )
    rows.made_by["kind"] = "scored"
    rows.made_by["normalization"] = request.normalization
    rows.made_by["scale"] = applied_scale(
        request.normalization,
        request.scale,
        request.like,
    )
    rows.made_by["like"] = request.like
    n_scored = len(rows)
    if false_negatives is not None:
        with _options.option_errors(margin="--margin", max_share="--max-score-share"):
            rows = retrieval.drop_false_negatives(rows, false_negatives)
        rows.made_by["score_margin"] = request.margin
        rows.made_by["score_max_share"] = request.max_score_share
    _record_fingerprints(rows, collection)
    retrieval.write_training_rows(rows, request.output, overwrite=request.overwrite)
    shutil.rmtree(work_folder, ignore_errors=True)
    for warning in rows.narrow_teacher_warnings():
        note(f"warning: {warning}")
    _print_scored(rows, request.output, n_scored - len(rows), request.as_json)


def _score_with_teacher(
    request: ScoreRequest,
    source: str,
    column: str,
    rows: TrainingRows,
    collection: Collection,
    work_folder: Path,
) -> None:
    """Load a teacher, score the rows with it, and add its column and its provenance to them.

    Args:
        request: options of the scoring.
        source: value of ``--teacher``.
        column: name of the teacher's column.
        rows: training rows, which are changed.
        collection: the texts.
        work_folder: where unfinished scores are stored.
    """
    teacher = _load_teacher(source, column, collection, request.max_length, request.language)
    with _common.progress_bar(f"scoring ({column})", resumes=_common.FRESH) as update:
        rows.teachers[column] = retrieval.score_rows(
            teacher,
            rows,
            collection,
            work_folder,
            batch_size=request.batch_size,
            progress=update,
        )
    provenance = {"kind": teacher.kind, "fingerprint": teacher.fingerprint}
    if teacher.language is not None:
        provenance["language"] = teacher.language
        note(f"{column} reads words: stop words and stemmer of --language {teacher.language}")
    if teacher.precision is not None:
        provenance["precision"] = teacher.precision
        has_fp32_scores = teacher.kind == "cross-encoder" and teacher.precision != "fp32"
        suffix = ", its scores in fp32" if has_fp32_scores else ""
        note(f"{column} computes in {teacher.precision}{suffix}")
    teachers = rows.made_by.get("teachers", {})
    rows.made_by["teachers"] = {**teachers, column: provenance}


def _column_names(teachers: list[str]) -> dict[str, str]:
    """Return the name of the column of each ``--teacher``: its value, or the name of a folder.

    Args:
        teachers: values of ``--teacher``.

    Returns:
        Value of the option -> name of the column, in the order of the options.

    Raises:
        UsageError: if two teachers have one name.
    """
    columns = {}
    for teacher in teachers:
        path = Path(teacher)
        columns[teacher] = path.resolve().name if path.is_dir() else teacher
    if len(columns) != len(teachers) or len(set(columns.values())) != len(columns):
        raise UsageError(
            f"--teacher: expected teachers of different names, got {', '.join(teachers)}.",
        )
    return columns


def _is_index(name: str) -> bool:
    """Return whether a teacher is the folder of an index."""
    return (Path(name) / "index.json").is_file()


def _load_teacher(
    source: str,
    column: str,
    collection: Collection,
    max_length: int | None,
    language: str | None,
) -> Teacher:
    """Load a teacher: BM25 of the collection, an index of BM25, or a model.

    Args:
        source: value of ``--teacher``.
        column: name of its column.
        collection: the documents.
        max_length: tokens that a model reads of a text or pair; None takes its own limit.
        language: language of BM25 of the collection; None takes the default.

    Raises:
        UsageError: for a model that is no teacher, or a length that it cannot have.
        CommandError: for an index of other documents.
    """
    from tilefold.retrieval.training_data.teachers import Teacher

    if source == BM25:
        index = retrieval.BM25Index.build(
            collection.contents(),
            language=_options.bm25_language(language),
        )
        return Teacher(column, BM25, index)
    model: Any
    if _is_index(source):
        model = retrieval.BM25Index.load(source)
        kind = BM25
        _scores.check_texts(
            f"--teacher {source}",
            model.provenance,
            collection,
            _scores.texts_of(collection),
        )
    else:
        model, kind = _models.load_model(
            source,
            "--teacher",
            ("cross-encoder", "dense", "sparse", "multi-vector"),
        )
        if max_length is not None and kind == "multi-vector":
            raise UsageError(
                f"--max-length: {source} is a multi-vector model, which has lengths of its own.",
            )
        _models.limit_length(model, max_length)
    try:
        return Teacher(column, kind, model)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def _record_fingerprints(rows: TrainingRows, collection: Collection) -> None:
    """Record the fingerprints of the texts in rows, also in those of another program."""
    from tilefold.retrieval.training_data.rows import queries_of

    rows.made_by["texts_sha256"] = texts_digest(collection.contents())
    rows.made_by["queries_sha256"] = texts_digest(queries_of(rows, collection))


def _print_scored(rows: TrainingRows, output: Path, n_dropped: int, as_json: bool) -> None:
    """Print how many rows were scored, and how often a relevant document has the best score.

    Args:
        rows: the scored rows.
        output: the file.
        n_dropped: rows that were left out as possible false negatives.
        as_json: print JSON.
    """
    n_relevant_first = 0
    for group in rows.groups():  # the rows of one query
        if group.target is None or not group.relevant.any():
            continue
        best_relevant_score = group.target[group.relevant].max()
        if best_relevant_score >= group.target.max():
            n_relevant_first += 1
    share_relevant_first = n_relevant_first / len(rows.queries)
    languages = {
        name: provenance["language"]
        for name, provenance in rows.made_by["teachers"].items()
        if "language" in provenance
    }
    result = {
        "output": str(output),
        "queries": len(rows.queries),
        "rows": len(rows),
        "teachers": list(rows.teachers),
        "languages": languages,
        "normalization": rows.made_by["normalization"],
        "scale": rows.made_by["scale"],
        "like": rows.made_by["like"],
        "left_out_by_score": n_dropped,
        "relevant_first": share_relevant_first,
    }
    if n_dropped and not as_json:
        note(
            f"{n_dropped} rows were left out, as possible false negatives or of queries without "
            "another negative",
        )
    _common.print_result(
        result,
        as_json,
        f"{len(rows)} rows scored by {', '.join(rows.teachers)}: {output}",
        f"{share_relevant_first:.0%} of {len(rows.queries)} queries have a relevant document first",
    )
