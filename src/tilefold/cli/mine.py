"""``tilefold mine`` and ``tilefold score``: hard negatives for training, and scores of teachers."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from tilefold import retrieval
from tilefold._internal.precision import precision_of
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import (
    DocumentFieldOptions,
    DtypeOptions,
    argument,
    option,
    positive,
    refuse_options,
)
from tilefold.cli._retrievers import SearcherParts
from tilefold.retrieval.common.provenance import Provenance, texts_digest

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.training_data.mining import FalseNegatives, Mined, Window
    from tilefold.retrieval.training_data.rows import TrainingRows
    from tilefold.retrieval.training_data.teachers import Teacher

RANKS = "1-100"
PER_QUERY = 16
FILTER_DEPTH = 1000  # documents per query among which filters look for the relevant ones
MARGIN_HELP = (
    "Leave out negatives that score within this margin of the query's best relevant document."
)
# Counts of the result -> what the number counts.
_COUNT_DESCRIPTIONS = {
    "queries_without": "queries have no negative and are left out",
    "queries_short": "queries have fewer negatives than requested",
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
            "File to write, NAME.parquet; tilefold score adds the scores of teachers.",
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
            "A TREC run to draw negatives from.",
        ),
    ] = None
    index: Annotated[
        Path | None,
        option(
            "Index to draw negatives from, with the --model that encoded it; BM25 needs no model.",
        ),
    ] = None
    vectors: Annotated[
        Path | None,
        option(
            "Encoded documents to search exactly, with the --model that encoded them.",
        ),
    ] = None
    model: Annotated[
        str | None,
        option(
            "The model of --index or --vectors; without them, a dense model such as minilm.",
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
            "Seed of the random choice if --ranks hold more documents than --per-query.",
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
            "The result as JSON on stdout.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` unless one source of negatives is given, with its options."""
        super().validate()
        if self.index is None and self.vectors is None:
            self.refuse_index_options("requires --index or --vectors")
        sources = [self.run, self.index, self.vectors]
        n_sources = sum(source is not None for source in sources)
        if n_sources > 0:
            refuse_options(
                {"--max-length": self.max_length},
                "can only be used with a dense --model, without --run, --index and --vectors",
            )
        if n_sources > 1:
            raise UsageError("give only one of --run, --index and --vectors.")
        if self.run is not None and self.model is not None:
            raise UsageError("give only one of --run and --model: a run needs no model.")
        if self.run is not None:
            self.refuse_dtype("cannot be used with --run, because a run needs no model")
        if n_sources == 0 and self.model is None:
            raise UsageError(
                "give one of --run FILE, --index FOLDER (with --model unless it is BM25), "
                f"--vectors FOLDER with --model, or a dense --model such as {_models.PACKAGED}, "
                "which needs no download.",
            )
        if self.vectors is not None and self.model is None:
            raise UsageError(f"--vectors: name the model that made {self.vectors} with --model.")

    def source(self) -> str:
        """Return the option that names the source of the negatives, with its value."""
        if self.run is not None:
            return f"--run {self.run}"
        if self.index is not None:
            return f"--index {self.index}"
        if self.vectors is not None:
            return f"--vectors {self.vectors}"
        return f"--model {self.model}"


def mine(request: MineRequest) -> None:
    """Draw hard negatives for the judged queries of a split, and write a Parquet file for training.

    Documents that are judged relevant, or have the text of one that is, are never negatives.
    --ranks 1-50 --per-query 50 --ranks 1-1000 --per-query 50 takes the best 50, and 50 more of the
    best 1,000.

    Example:
        tilefold mine --data DATA --index INDEX --output mined.parquet
    """
    windows = _parse_windows(request.ranks, request.per_query)
    false_negatives = create_filter(request.margin, request.max_score_share)
    _scores.check_output_file(
        request.output,
        "--output",
        _scores.TRAINING_ROWS,
        request.run,
        *_scores.files_of_collection(request.data),
        overwrite=request.overwrite,
    )
    _models.check_model_names({"--model": request.model})
    collection = _common.load_data(request.data, drop_unknown=request.drop_unknown)
    _common.check_split(collection, request.split)
    depth = max(window.last for window in windows)  # documents per query
    if false_negatives is not None:
        depth = max(depth, FILTER_DEPTH)  # the filter compares with relevant documents further down
    source = _open_source(request, collection, depth)

    mined = retrieval.mine_negatives(
        source.rankings,
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


def _parse_windows(ranks: list[str] | None, per_query: list[int] | None) -> list[Window]:
    """Parse ``--ranks`` and ``--per-query``: ranges of ranks, and the negatives to draw from each.

    Args:
        ranks: the values of ``--ranks``, such as ``"1-50"``; None takes the default range.
        per_query: the numbers of negatives of ``--per-query``, one per range or a single one for
            all ranges; None takes the default number.

    Returns:
        A window (first rank, last rank, number of negatives) for each range.

    Raises:
        UsageError: if the numbers do not match the ranges, or a text is not a range.
    """
    ranges = ranks or [RANKS]
    counts = per_query or [PER_QUERY]
    if len(counts) == 1:
        counts = counts * len(ranges)
    if len(ranges) != len(counts):
        raise UsageError(
            f"--per-query: expected a number for each of {len(ranges)} --ranks, got {len(counts)}.",
        )
    windows = []
    for text, count in zip(ranges, counts, strict=True):
        match = re.fullmatch(r"(\d+)-(\d+)", text)
        if match is None:
            raise UsageError(f"--ranks: expected FIRST-LAST such as 1-50, got {text!r}.")
        first, last = match.groups()
        with _options.errors_name_options(ranks="--ranks", count="--per-query"):
            windows.append(retrieval.Window(int(first), int(last), count))
    return windows


def create_filter(margin: float | None, max_score_share: float | None) -> FalseNegatives | None:
    """Return the filter that leaves out documents which may be relevant although not judged.

    Args:
        margin: the value of ``--margin``.
        max_score_share: the value of ``--max-score-share``.

    Returns:
        The filter; None if neither option was given.
    """
    from tilefold.retrieval.training_data.mining import FalseNegatives

    if margin is None and max_score_share is None:
        return None
    with _options.errors_name_options(margin="--margin", max_share="--max-score-share"):
        return FalseNegatives(margin, max_score_share)


class NegativeSource(NamedTuple):
    """The ranked documents from which negatives are drawn.

    Attributes:
        name: the option that names the source, with its value.
        provenance: the fingerprints of the documents and the model.
        rankings: pairs of a query id and its ranking, document id -> score.
    """

    name: str
    provenance: Provenance
    rankings: Iterable[tuple[str, Mapping[str, float]]]


def _open_source(request: MineRequest, collection: Collection, depth: int) -> NegativeSource:
    """Open the rankings from which negatives are drawn: those of a run, or of a search.

    Args:
        request: the options that name a run, an index, vectors or a dense model.
        collection: the collection with the queries of the split.
        depth: the number of documents per query.

    Raises:
        CommandError: if the run or the index was made from other documents.
    """
    if request.run is not None:
        named_run = _scores.read_run(request.run, "--run")
        _scores.check_made_from(collection, named_run.name, named_run.provenance)
        _scores.check_has_results(named_run, collection, [request.split])
        return NegativeSource(named_run.name, named_run.provenance, named_run.run.items())
    if request.index is None and request.vectors is None:
        searcher = _retrievers.open_dense(request, collection.contents(), request.max_length)
    else:
        searcher = _retrievers.open_searcher(
            request,
            load_parts=lambda _provenance_of_index: SearcherParts(),  # mining needs none
        )
    name = request.source()
    _scores.check_made_from(collection, name, searcher.provenance)
    rankings = _retrievers.iterate_rankings(
        searcher,
        collection.split_queries(request.split),
        retrieval.SearchRequest(depth),
    )
    query_scores = ((ranking.query, ranking.scores) for ranking in rankings)
    return NegativeSource(name, searcher.provenance, query_scores)


def _write(
    mined: Mined,
    provenance: dict[str, Any],
    collection: Collection,
    request: MineRequest,
) -> None:
    """Write mined negatives to ``--output``, and print how many there are.

    Args:
        mined: the negatives.
        provenance: the origin of the negatives, such as the retriever and the seed, which is
            recorded in the file.
        collection: the collection with the texts, whose fingerprints are recorded, too.
        request: the options of the command.

    Raises:
        CommandError: if there is no negative for any query.
    """
    if not mined.queries:
        raise CommandError(
            f"there is no negative for any query ({mined.filtered} candidates were left out as "
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
        "precision": rows.made_by.get("precision"),
    }
    if not request.as_json:
        for name, description in _COUNT_DESCRIPTIONS.items():
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
        f"{_models.list_cached_models()}",
    )


BM25 = "bm25"
BATCH_SIZE = 32
_TEACHER_HELP = (
    "A cross-encoder, dense, sparse or multi-vector model (folder or Hugging Face name), minilm, "
    "bm25, or the folder of a BM25 index; may be repeated."
)


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(DocumentFieldOptions, DtypeOptions):
    """Options of ``tilefold score``."""

    mined: Annotated[
        Path,
        argument(
            "Parquet file of tilefold mine or tilefold score.",
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
            "Split whose relevant documents are scored, too; by default the split of the file.",
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
            "Normalisation of a teacher's scores per query, before the mean over teachers.",
        ),
    ] = "min_max"
    scale: Annotated[
        float | None,
        option(
            "Factor that multiplies the mean; by default 30, or 1 with --normalization none.",
        ),
    ] = None
    language: Annotated[
        str | None,
        option(
            "Language of the Snowball stemmer and stop words of --teacher bm25, or none for "
            "neither; by default english.",
        ),
    ] = None
    like: Annotated[
        str | None,
        option(
            "Instead of --scale: shift and scale the mean to the mean and deviation of the scores "
            "of this --teacher.",
        ),
    ] = None
    margin: Annotated[
        float | None,
        option(
            MARGIN_HELP + " The scores are those of the ensemble.",
        ),
    ] = None
    max_score_share: Annotated[
        float | None,
        option(
            SHARE_HELP + " The scores are those of the ensemble.",
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
            "Maximum tokens per text or pair; by default the maximum of the model.",
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
            "The result as JSON on stdout.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for options without effect, or a scale that is not above 0."""
        super().validate()
        if BM25 not in self.teacher:
            refuse_options(
                {"--language": self.language},
                "requires --teacher bm25; a BM25 index has its own language",
            )
        if self.like is not None:
            refuse_options(
                {"--scale": self.scale},
                "cannot be combined with --like, which sets the scale, too",
            )
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise UsageError(f"--scale: expected a finite number above 0, got {self.scale:g}.")


def score(request: ScoreRequest) -> None:
    """Score mined negatives and relevant documents with one or more teachers, for training.

    The file gets a column score:TEACHER for each teacher, and a column score for their ensemble.
    The same command resumes an interrupted run: it keeps finished columns, the pairs of a
    cross-encoder in steps of 2,048, and the shards of a sparse or multi-vector model; only a dense
    model encodes all texts again.

    Example:
        tilefold score mined.parquet --teacher minilm --data DATA \\
            --output scored.parquet
    """
    # All options are checked before any work.
    false_negatives = create_filter(request.margin, request.max_score_share)
    columns = _column_names(request.teacher)
    if BM25 in request.teacher:
        _options.checked_bm25_language(request.language)
    _scores.check_output_file(
        request.output,
        "--output",
        _scores.TRAINING_ROWS,
        request.mined,
        *_scores.files_of_collection(request.data),
        overwrite=request.overwrite,
    )
    _check_teachers(request)

    mined_rows = retrieval.read_training_rows(request.mined)
    like_column = _find_column_to_imitate(request.like, columns, mined_rows)
    rows, collection = _with_relevant_documents(request, mined_rows)
    work_folder = request.output.with_name(f".{request.output.name}.scoring")
    if not request.resume:
        shutil.rmtree(work_folder, ignore_errors=True)
    # After an interruption, the user is told whether scores or vectors were saved.
    _common.finished_work_checks.append(
        lambda: any(work_folder.rglob("*.npy")) or any(work_folder.rglob("part-*")),
    )
    for source, column in columns.items():
        _score_with_teacher(request, source, column, rows, collection, work_folder)
    _add_ensemble(request, rows, like_column)
    n_scored = len(rows)
    if false_negatives is not None:
        rows = _without_false_negatives(request, rows, false_negatives)
    _record_fingerprints(rows, collection)
    retrieval.write_training_rows(rows, request.output, overwrite=request.overwrite)
    shutil.rmtree(work_folder, ignore_errors=True)
    for warning in rows.narrow_teacher_warnings():
        note(f"warning: {warning}")
    _print_scored(rows, request.output, n_scored - len(rows), request.as_json)


def _with_relevant_documents(
    request: ScoreRequest,
    mined_rows: TrainingRows,
) -> tuple[TrainingRows, Collection]:
    """Load the collection of mined rows, and add the judged relevant documents that they lack.

    A row is a query, a document, and whether it is relevant.

    Args:
        request: the options of the command. ``--split`` overrides the split of the rows.
        mined_rows: the rows of the file of ``tilefold mine``.

    Returns:
        The completed rows, and the collection.
    """
    from tilefold.retrieval.training_data.teachers import with_relevant

    split = request.split or str(mined_rows.made_by.get("split", "train"))
    collection = _common.load_data(request.data, drop_unknown=request.drop_unknown, splits=[split])
    _common.check_split(collection, split)
    mined_rows.check_collection(collection)
    return with_relevant(mined_rows, collection, split), collection


def _without_false_negatives(
    request: ScoreRequest,
    rows: TrainingRows,
    false_negatives: FalseNegatives,
) -> TrainingRows:
    """Drop negatives whose scores are so high that they may be relevant, and record the filter.

    Args:
        request: the options of the command, with ``--margin`` and ``--max-score-share``.
        rows: the scored rows.
        false_negatives: the filter of these options.
    """
    with _options.errors_name_options(margin="--margin", max_share="--max-score-share"):
        filtered_rows: TrainingRows = retrieval.drop_false_negatives(rows, false_negatives)
    filtered_rows.made_by["score_margin"] = request.margin
    filtered_rows.made_by["score_max_share"] = request.max_score_share
    return filtered_rows


def _check_teachers(request: ScoreRequest) -> None:
    """Raise ``UsageError`` for models that do not exist, and options that no teacher uses."""
    models = [name for name in request.teacher if name != BM25 and not _is_index(name)]
    if not models:
        refuse_options(
            {
                "--batch-size": request.batch_size != BATCH_SIZE,
                "--max-length": request.max_length,
                "--dtype": request.dtype != "auto",
            },
            "has no effect if all teachers are BM25: leave it out",
        )
    for name in models:
        _models.checked_model_name(name, "--teacher")


def _find_column_to_imitate(
    like: str | None,
    columns: Mapping[str, str],
    rows: TrainingRows,
) -> str | None:
    """Return the column of the teacher of ``--like``, whose mean and deviation the ensemble gets.

    Args:
        like: the value of ``--like``: a value of ``--teacher``, or a column of the rows.
        columns: value of ``--teacher`` -> name of its column.
        rows: the training rows, which may have columns of earlier teachers.

    Returns:
        The name of the column; None without ``--like``.

    Raises:
        UsageError: if there is no such teacher.
    """
    if like is None:
        return None
    column = columns.get(like, like)
    if column not in {*columns.values(), *rows.teachers}:
        raise UsageError(f"--like: expected one of --teacher, got {like!r}.")
    return column


def _add_ensemble(request: ScoreRequest, rows: TrainingRows, like_column: str | None) -> None:
    """Set the scores to train with to the mean of all teachers (the ensemble), and record how.

    Args:
        request: the options of the command.
        rows: the training rows with the scores of the teachers, which are changed in place.
        like_column: the column of the teacher whose mean and deviation the ensemble gets; None
            multiplies it by ``--scale`` instead.
    """
    from tilefold.retrieval.training_data.teachers import applied_scale

    rows.target = retrieval.ensemble(
        rows,
        rows.teachers,
        normalization=request.normalization,
        scale=request.scale,
        like=like_column,
    )
    rows.made_by["kind"] = "scored"
    rows.made_by["normalization"] = request.normalization
    rows.made_by["scale"] = applied_scale(request.normalization, request.scale, request.like)
    rows.made_by["like"] = request.like


def _score_with_teacher(
    request: ScoreRequest,
    source: str,
    column: str,
    rows: TrainingRows,
    collection: Collection,
    work_folder: Path,
) -> None:
    """Load a teacher, score training rows with it, and add a column with its scores to them.

    The kind, the fingerprint and the precision of the teacher are recorded with the rows.

    Args:
        request: the options of the command.
        source: the value of ``--teacher``.
        column: the name of the teacher's column.
        rows: the training rows, which are changed in place.
        collection: the collection with the texts.
        work_folder: the folder of unfinished scores, from which a later run resumes.
    """
    teacher = _load_teacher(source, column, collection, request)
    _note_teacher(teacher, column)
    with _common.resumable_progress_bar(f"scoring ({column})", _common.FRESH_HINT) as update:
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
    if teacher.precision is not None:
        provenance["precision"] = teacher.precision
    teachers = rows.made_by.get("teachers", {})
    rows.made_by["teachers"] = {**teachers, column: provenance}


def _note_teacher(teacher: Teacher, column: str) -> None:
    """Print notes with the language and the precision of a teacher, if it has them.

    Args:
        teacher: the teacher.
        column: the name of the teacher's column.
    """
    if teacher.language is not None:
        note(f"{column} uses the stop words and the stemmer of --language {teacher.language}")
    if teacher.precision is not None:
        # The last layers of a cross-encoder, which compute its scores, always use fp32.
        has_fp32_scores = teacher.kind == "cross-encoder" and teacher.precision != "fp32"
        suffix = ", its scores in fp32" if has_fp32_scores else ""
        note(f"{column} computes in {precision_of(teacher.model)}{suffix}")


def _column_names(teachers: list[str]) -> dict[str, str]:
    """Return the name of each teacher's column: the value of ``--teacher``, or its folder name.

    Args:
        teachers: the values of ``--teacher``.

    Returns:
        Value of the option -> name of the column, in the order of the options.

    Raises:
        UsageError: if two teachers share a name.
    """
    columns = {}
    for teacher in teachers:
        path = Path(teacher)
        columns[teacher] = path.resolve().name if path.is_dir() else teacher
    unique_names = set(columns.values())
    if len(unique_names) < len(teachers):
        raise UsageError(
            f"--teacher: expected teachers with different names, got {', '.join(teachers)}.",
        )
    return columns


def _is_index(name: str) -> bool:
    """Return whether a value of ``--teacher`` is the folder of an index."""
    return (Path(name) / "index.json").is_file()


def _load_teacher(
    source: str,
    column: str,
    collection: Collection,
    request: ScoreRequest,
) -> Teacher:
    """Load a teacher: BM25 over the collection, a BM25 index, or a model.

    Args:
        source: the value of ``--teacher``.
        column: the name of the teacher's column.
        collection: the collection with the documents.
        request: the options of the command: the dtype and the maximum length of models, and the
            language of BM25 over the collection.

    Raises:
        UsageError: if the model cannot be a teacher, or does not support the length.
        CommandError: if the index was made from other documents.
    """
    from tilefold.retrieval.training_data.teachers import Teacher

    if source == BM25:
        index = retrieval.BM25Index.build(
            collection.contents(),
            language=_options.checked_bm25_language(request.language),
        )
        return Teacher(column, BM25, index)
    model: Any
    if _is_index(source):
        model = retrieval.BM25Index.load(source)
        kind = BM25
        _scores.check_made_from(collection, f"--teacher {source}", model.provenance)
    else:
        model, kind = _models.load_model(
            source,
            "--teacher",
            ("cross-encoder", "dense", "sparse", "multi-vector"),
            dtype=request.dtype,
        )
        if request.max_length is not None and kind == "multi-vector":
            raise UsageError(
                f"--max-length cannot be used with {source}, because a multi-vector model has its "
                "own maximum lengths of queries and documents.",
            )
        _models.limit_length(model, request.max_length)
    try:
        return Teacher(column, kind, model)
    except ValueError as error:
        raise UsageError(f"--{error}") from error  # the text begins with "teacher"


def _record_fingerprints(rows: TrainingRows, collection: Collection) -> None:
    """Record in training rows the fingerprints of the collection's documents and of its queries."""
    from tilefold.retrieval.training_data.rows import queries_of

    rows.made_by["texts_sha256"] = texts_digest(collection.contents())
    rows.made_by["queries_sha256"] = texts_digest(queries_of(rows, collection))


def _print_scored(rows: TrainingRows, output: Path, n_dropped: int, as_json: bool) -> None:
    """Print how many rows were scored, and how often a relevant document has the best score.

    Args:
        rows: the scored rows.
        output: the file of the rows.
        n_dropped: the number of rows that were dropped as possible false negatives.
        as_json: whether the result is printed as JSON.
    """
    share_relevant_first = _share_of_queries_with_relevant_first(rows)
    languages = {
        name: provenance["language"]
        for name, provenance in rows.made_by["teachers"].items()
        if "language" in provenance
    }
    precisions = {
        name: provenance["precision"]
        for name, provenance in rows.made_by["teachers"].items()
        if "precision" in provenance
    }
    result = {
        "output": str(output),
        "queries": len(rows.queries),
        "rows": len(rows),
        "teachers": list(rows.teachers),
        "languages": languages,
        "precision": precisions,
        "normalization": rows.made_by["normalization"],
        "scale": rows.made_by["scale"],
        "like": rows.made_by["like"],
        "left_out_by_score": n_dropped,
        "relevant_first": share_relevant_first,
    }
    if n_dropped and not as_json:
        note(
            f"{n_dropped} rows were dropped: possible false negatives, and queries left without "
            "negatives",
        )
    _common.print_result(
        result,
        as_json,
        f"{len(rows)} rows scored by {', '.join(rows.teachers)}: {output}",
        f"{share_relevant_first:.0%} of {len(rows.queries)} queries have a relevant document first",
    )


def _share_of_queries_with_relevant_first(rows: TrainingRows) -> float:
    """Return the share of queries for which no document scores above the best relevant one."""
    n_relevant_first = 0
    for query_rows in rows.groups():
        scores = query_rows.target  # of the ensemble
        if scores is None or not query_rows.relevant.any():
            continue
        best_relevant_score = scores[query_rows.relevant].max()
        if best_relevant_score >= scores.max():
            n_relevant_first += 1
    return n_relevant_first / len(rows.queries)
