"""``tilefold score``: teachers' scores for mined negatives, and their ensemble."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold.cli import _common, _models, _scores
from tilefold.cli._common import Count, Number, Text, option
from tilefold.cli.mine import MARGIN_HELP, SHARE_HELP, check_filter

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.teachers import Teacher
    from tilefold.retrieval.training_rows import QueryRows, TrainingRows

BM25 = "bm25"
_TEACHER_HELP = (
    "A cross-encoder, dense, sparse or multi-vector model (folder or Hugging Face name), minilm, bm25, or the folder "
    "of a BM25 index; may be repeated."
)


def score(
    mined: Annotated[Path, typer.Argument(help="Parquet file of tilefold mine, or one that was scored before.")],
    output: Annotated[Path, option("Parquet file to write.")],
    teacher: Annotated[list[str], option(_TEACHER_HELP)],
    data: Annotated[str, option(_common.DATA_HELP)] = "pydocs",
    split: Annotated[
        Text, option("Split whose relevant documents are scored too; by default that of the file.")
    ] = None,
    drop_unknown: Annotated[bool, option(_common.DROP_UNKNOWN_HELP, "--drop-unknown")] = False,
    normalization: Annotated[
        str, option("Of each teacher's scores of a query before their mean: min_max, or none.")
    ] = "min_max",
    scale: Annotated[Number, option("Factor of the mean; by default 30, and 1 with --normalization none.")] = None,
    like: Annotated[
        Text, option("Map the mean to the mean and deviation of this --teacher, in place of --scale.")
    ] = None,
    margin: Annotated[Number, option(MARGIN_HELP + " By the ensemble's score.")] = None,
    max_score_share: Annotated[Number, option(SHARE_HELP + " By the ensemble's score.")] = None,
    batch_size: Annotated[int, option("Texts, or pairs of a cross-encoder, per batch.")] = 32,
    max_length: Annotated[
        Count, option("Tokens that a model reads of a text or pair; by default its own limit.")
    ] = None,
    resume: Annotated[bool, option("Keep what an interrupted run has scored.", "--resume/--fresh")] = True,
    as_json: Annotated[bool, option("What was scored as JSON on stdout.", "--json")] = False,
) -> None:
    """Score mined negatives and relevant documents with one teacher or several; training reads the result.

    A column score:TEACHER for each, and score, their ensemble. After an interruption the same command goes on: 2,048
    pairs of a cross-encoder at a time, shards of vectors of a sparse or multi-vector model, and whole columns are kept;
    the unfinished encoding of a dense model is repeated.
    """
    if normalization not in ("min_max", "none"):
        raise _common.UsageError(f"--normalization: expected min_max or none, got {normalization!r}.")
    if scale is not None and not 0 < scale < float("inf"):
        raise _common.UsageError(f"--scale: expected a finite number above 0, got {scale:g}.")
    false_negatives = check_filter(margin, max_score_share)
    _common.check_at_least_one(batch_size=batch_size, max_length=max_length)
    names = _names(teacher)
    _scores.check_writable(output, "--output")
    models = [name for name in teacher if name != BM25 and not _is_index(name)]
    if not models:
        _common.refuse_useless(("batch_size", "max_length"), "with teachers that read words, of BM25")
    for name in models:
        _models.find_model(name, "--teacher")

    from tilefold.retrieval.ensembles import ensemble
    from tilefold.retrieval.mining import drop_false_negatives
    from tilefold.retrieval.teachers import with_relevant
    from tilefold.retrieval.training_rows import read_training_rows, write_training_rows

    rows = read_training_rows(mined)
    if like is not None and names.get(like, like) not in {*names.values(), *rows.teachers}:
        raise _common.UsageError(f"--like: expected one of --teacher, got {like!r}.")
    collection = _common.load_data(data, drop_unknown=drop_unknown)
    split = split or str(rows.made_by.get("split", "train"))
    _common.check_split(collection, split)
    rows.check_collection(collection)
    rows = with_relevant(rows, collection, split)
    work = output.with_name(f".{output.name}.scoring")
    if not resume:
        shutil.rmtree(work, ignore_errors=True)
    _common.keeps(lambda: any(work.rglob("*.npy")) or any(work.rglob("part-*")))
    for given, name in names.items():
        _score(_load(given, name, collection, max_length), rows, collection, work, batch_size)
    column = None if like is None else names.get(like, like)
    rows.target = ensemble(rows, rows.teachers, normalization=normalization, scale=scale, like=column)
    rows.made_by |= {"kind": "scored", "normalization": normalization, "scale": scale, "like": like}
    before = len(rows)
    if false_negatives is not None:
        rows = drop_false_negatives(rows, false_negatives)
        rows.made_by |= {"score_margin": margin, "score_max_share": max_score_share}
    _stamp_queries(rows, collection)
    write_training_rows(rows, output)
    shutil.rmtree(work, ignore_errors=True)
    _report(rows, output, before - len(rows), as_json)


def _names(teachers: list[str]) -> dict[str, str]:
    """Each --teacher and the name of its column: what was given, of a folder its name."""
    names = {given: Path(given).resolve().name if Path(given).is_dir() else given for given in teachers}
    if len(names) != len(teachers) or len(set(names.values())) != len(names):
        raise _common.UsageError(f"--teacher: expected teachers of different names, got {', '.join(teachers)}.")
    return names


def _is_index(name: str) -> bool:
    return (Path(name) / "index.json").is_file()


def _load(given: str, name: str, collection: Collection, max_length: int | None) -> Teacher:
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.teachers import Teacher

    if given == BM25:
        return Teacher(name, BM25, BM25Index.build(collection.contents()))
    if _is_index(given):
        index = BM25Index.load(given)
        _scores.check_texts(f"--teacher {given}", index.provenance, collection, _scores.texts_of(collection))
        return Teacher(name, BM25, index)
    model, kind = _models.load_model(given, "--teacher", ("cross-encoder", "dense", "sparse", "multi-vector"))
    if max_length is not None:
        if kind == "multi-vector":
            raise _common.UsageError(f"--max-length: {given} is a multi-vector model, which has lengths of its own.")
        setattr(model, "max_seq_length" if hasattr(type(model), "max_seq_length") else "max_length", max_length)
    try:
        return Teacher(name, kind, model)
    except ValueError as error:
        raise _common.UsageError(f"--{error}") from error


def _score(teacher: Teacher, rows: TrainingRows, collection: Collection, work: Path, batch_size: int) -> None:
    """Put the teacher's column into `rows`."""
    from tilefold.retrieval.teachers import score_rows

    with _common.progress_bar(f"scoring ({teacher.name})", resumes=_common.FRESH) as update:
        rows.teachers[teacher.name] = score_rows(
            teacher, rows, collection, work, batch_size=batch_size, progress=update
        )
    known: dict[str, Any] = dict(rows.made_by.get("teachers", {}))
    rows.made_by["teachers"] = known | {teacher.name: {"kind": teacher.kind, "fingerprint": teacher.fingerprint}}


def _stamp_queries(rows: TrainingRows, collection: Collection) -> None:
    """Fingerprints of the texts that were scored, also for rows of another program."""
    from tilefold.retrieval.provenance import texts_digest
    from tilefold.retrieval.training_rows import queries_of

    rows.made_by["texts_sha256"] = texts_digest(collection.contents())
    rows.made_by["queries_sha256"] = texts_digest(queries_of(rows, collection))


def _report(rows: TrainingRows, output: Path, dropped: int, as_json: bool) -> None:
    best = sum(_relevant_first(group) for group in rows.groups())
    result = {
        "output": str(output),
        "queries": len(rows.queries),
        "rows": len(rows),
        "teachers": list(rows.teachers),
        "left_out_by_score": dropped,
        "relevant_first": best / len(rows.queries),
    }
    if dropped and not as_json:
        _common.note(
            f"{dropped} rows were left out, as possible false negatives or of queries without another negative"
        )
    said = f"{len(rows)} rows scored by {', '.join(rows.teachers)}: {output}"
    first = f"{best / len(rows.queries):.0%} of {len(rows.queries)} queries have a relevant document first"
    _common.print_result(result, as_json, said, first)


def _relevant_first(group: QueryRows) -> bool:
    """Whether no negative of the query scores higher than its best relevant document."""
    if group.target is None or not group.relevant.any():
        return False
    return bool(group.target[group.relevant].max() >= group.target.max())
