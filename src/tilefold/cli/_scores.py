"""Shared by evaluate, fuse and compare: runs from files, checks that they belong together,
measures, the table.
"""

from __future__ import annotations

import csv
import itertools
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilefold import retrieval
from tilefold._internal.files import atomic_file, read_json
from tilefold.cli import _common
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.retrieval.common.provenance import Provenance, texts_digest

if TYPE_CHECKING:
    from tilefold.retrieval.common.runs import Run
    from tilefold.retrieval.data.collection import Collection, Document
    from tilefold.retrieval.evaluation.significance import Mean, Table
    from tilefold.retrieval.search.searcher import Ranking, Searcher, SearchRequest

MEASURE_HELP = "Measure in the notation of ir-measures, such as nDCG@10; may be repeated."
SPLIT_HELP = "Split of the judgements, by default test; may be repeated."
SAVE_RUN_HELP = "Write the run as a TREC file."
IDENTICAL_IDS_HELP = (
    "Hits with the id of the query: ignore them, as BEIR does where queries are documents, or "
    "count "
    "them; by default ignore, unless judgements call one relevant."
)
IDENTICAL_IDS = "ignore|count"
FOLDER_MANIFESTS = ("index.json", "manifest.json")  # of an index, and of a folder of vectors
SMALLEST = 1 << 20  # bytes of a file of which single documents are read


@dataclass(frozen=True)
class FileFormat:
    """A format that commands write.

    Attributes:
        name: the format in an error, with its article.
        endings: endings of names for it, the usual one first.
        required: whether the name must have one of the endings, because readers look at it.
    """

    name: str
    endings: tuple[str, ...]
    required: bool = False

    def check_name(self, path: Path, option: str) -> None:
        """Raise UsageError for a name that ends like a file of another format."""
        ending = path.suffix.lower()
        if ending in self.endings or (not self.required and ending not in _ENDINGS):
            return
        raise UsageError(
            f"{option}: {self.name} is written, whose name ends in {' or '.join(self.endings)}, "
            f"got {path}.",
        )


RUN = FileFormat("a TREC run", (".trec", ".run", ".txt"))
TRAINING_ROWS = FileFormat("a Parquet file", (".parquet",), required=True)
MEASURES = FileFormat("a table of tab-separated columns", (".tsv", ".txt"))
VECTOR_LINES = FileFormat("a file of JSON lines", (".jsonl", ".json"))
PICTURE = FileFormat("a PNG picture", (".png",), required=True)
# endings that say what a file holds
_ENDINGS = frozenset(
    {
        ".csv",
        ".gz",
        ".jpeg",
        ".jpg",
        ".json",
        ".jsonl",
        ".npz",
        ".parquet",
        ".pdf",
        ".png",
        ".safetensors",
        ".svg",
        ".trec",
        ".tsv",
        ".zip",
    },
)


@dataclass(frozen=True)
class NamedRun:
    """A run, what it is called in messages, and what made it."""

    name: str
    run: Run
    provenance: Provenance


def check_measures(measures: Sequence[str] | None) -> tuple[Sequence[str], int]:
    """The measures asked for, or those by default, and their deepest cut-off."""
    from tilefold.retrieval.evaluation import measures as evaluation

    chosen = measures or evaluation.DEFAULT_MEASURES
    try:
        return chosen, evaluation.check_measures(chosen)
    except ValueError as error:
        raise UsageError(f"--measure: {error}") from error


def say_depth(k: int | None, deepest: int, used: object) -> None:
    """Say where --k changes nothing: it is `used` by no --save-run, and measures see the documents
    that they need.
    """
    if k is not None and used is None and k <= deepest:
        note(
            f"--k {k} changes nothing without --save-run: the measures see {deepest} documents of "
            "a query",
        )


def check_output_file(
    path: Path | None,
    option: str,
    file_format: FileFormat,
    *inputs: Path | None,
    overwrite: bool,
) -> None:
    """Refuse, before any work, a file that could not be written after it without a loss.

    Args:
        path: the file to write; ``None`` if there is none.
        option: the option that names it.
        file_format: what is written into it.
        inputs: other files of the command, which it must not replace even with `overwrite`.
        overwrite: replace a file that exists.

    Raises:
        UsageError: if `path` is a folder, one of the inputs, inside an index or a folder of
            vectors, cannot be written, or has the ending of another format.
        CommandError: if the file exists, without `overwrite`.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option}: expected a file, got the folder {path}.")
    if path.resolve() in [each.resolve() for each in inputs if each is not None]:
        raise UsageError(
            f"{option}: expected a file of its own, got {path}, which the command reads or writes "
            "too.",
        )
    _check_not_inside_index(path, option)
    file_format.check_name(path, option)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(
            f"{option}: {path} cannot be written ({error.strerror or error}).",
        ) from error
    if path.exists() and not overwrite:
        raise CommandError(
            f"{option}: {path} exists. Give --overwrite to replace it, or another name; "
            "nothing was overwritten.",
        )


def _check_not_inside_index(path: Path, option: str) -> None:
    """Raise UsageError for a file inside an index or a folder of vectors.

    It could replace a part of them; a command that replaces such a folder would remove it.
    """
    for folder in path.resolve().parents:
        for manifest in FOLDER_MANIFESTS:
            # a schema tells them from other programs' files of these names
            if "schema_version" in (read_json(folder / manifest) or {}):
                raise UsageError(
                    f"{option}: expected a file outside indexes and folders of vectors, got {path} "
                    f"in {folder}, which holds {manifest}. Choose another folder.",
                )


def files_of_collection(data: str) -> list[Path]:
    """The files that --data names, which no command may replace."""
    folder = Path(data)
    return [folder, *folder.rglob("*")] if folder.is_dir() else [folder]


def read_run(path: Path, option: str) -> NamedRun:
    """A TREC run file."""
    from tilefold.retrieval.evaluation import measures as evaluation

    if not path.is_file():
        raise UsageError(
            f"{option}: there is no file {path}; tilefold evaluate --save-run writes one.",
        )
    run, made_by = evaluation.read_trec_run(path), evaluation.read_trec_provenance(path)
    if made_by.passages is not None:
        note(f"{option}: {path} ranks passages; documents count by their best one")
        run, made_by = retrieval.best_passages(run)[0], replace(made_by, passages=None)
    return NamedRun(f"{option} {path}", run, made_by)


def load_splits(
    data: str,
    split: Sequence[str] | None,
    drop_unknown: bool,
    also: Sequence[str] | None = None,
) -> tuple[Collection, list[str]]:
    """The collection, with judgements of `also` too (None: all), and the splits asked for, test if
    none.
    """
    splits = list(dict.fromkeys(split or ["test"]))
    collection = _common.load_data(
        data,
        drop_unknown=drop_unknown,
        splits=None if also is None else [*splits, *also],
    )
    for name in also or ():
        _common.check_split(collection, name, "--tune")
    for name in splits:
        _common.check_split(collection, name)
        grades = collection.qrels[name].values()
        if hopeless := sum(not any(grade > 0 for grade in judged.values()) for judged in grades):
            note(
                f"{hopeless} of the {len(grades)} queries of {name} have no relevant document and "
                "count as 0",
            )
    return collection, splits


def ignores_identical_ids(
    choice: str | None,
    collection: Collection,
    splits: Sequence[str],
) -> bool:
    """Whether hits with the query's own id are left out, the same for all splits."""
    from tilefold.retrieval.common import identical_ids

    if choice is not None:
        return choice == "ignore"
    return all(identical_ids.ignores_identical_ids(collection.qrels[name]) for name in splits)


def without_identical_ids(named: NamedRun) -> tuple[NamedRun, set[str]]:
    """The run without hits that have the query's own id, and the queries that had one."""
    from tilefold.retrieval.common import identical_ids

    ignored = identical_ids.queries_with_identical_ids(named.run)
    return replace(named, run=identical_ids.without_identical_ids(named.run)), ignored


def save(
    named: NamedRun,
    texts: Provenance,
    path: Path | None,
    k: int | None = None,
    *,
    overwrite: bool,
) -> None:
    """Write the best documents of a run, with a tag that says what made it.

    Args:
        named: the run, and the model in its precision.
        texts: provenance of the documents.
        path: of ``--save-run``; None writes nothing.
        k: documents per query; None for all.
        overwrite: replace a file that exists.
    """
    if path is not None:
        best = {query: dict(list(scores.items())[:k]) for query, scores in named.run.items()}
        made_by = replace(
            texts,
            model_fingerprint=named.provenance.model_fingerprint,
            precision=named.provenance.precision,
        )
        retrieval.write_trec_run(best, path, tag=made_by.tag, overwrite=overwrite)


def check_savable(path: Path | None, documents: Iterable[str], queries: Iterable[str]) -> None:
    """Refuse, before any work, ids that --save-run could not write after it."""
    from tilefold.retrieval.evaluation.measures import check_word

    if path is None:
        return
    try:
        for what, ids in (("query id", queries), ("document id", documents)):
            for name in ids:
                check_word(what, name)
    except ValueError as error:
        raise UsageError(f"--save-run: {error}") from error


def texts_of(collection: Collection) -> Provenance:
    """The fingerprint of a collection's documents."""
    return Provenance(texts_sha256=texts_digest(collection.contents()))


def check_texts(name: str, made_by: Provenance, collection: Collection, texts: Provenance) -> None:
    """Refuse what was made from other documents than those of the collection; `name` says what,
    with its option.
    """
    if texts.differs(made_by):
        remedy = "Give its own with --data, or make it again (tilefold encode, tilefold index, evaluate --save-run)."
        other = f"other documents than those of {collection.name}: another collection, or one that has changed since"
        raise CommandError(f"{name} was made from {other}. {remedy}")


def open_documents(data: str, index: Path, made_by: Provenance) -> Mapping[str, Document]:
    """The documents that an index was made from, read from their file as they are asked for where
    that is possible.
    """
    collection = _common.load_data(data, documents_only=True, stored=SMALLEST)
    check_texts(f"--index {index}", made_by, collection, texts_of(collection))
    return collection.documents


def check_runs(
    named: Sequence[NamedRun],
    collection: Collection | None,
    splits: Sequence[str],
) -> None:
    """Refuse runs of different collections or of another one, or without results for one of the
    splits.
    """
    for first, other in itertools.combinations(named, 2):
        if "texts_sha256" in first.provenance.differs(other.provenance):
            raise CommandError(
                f"{first.name} and {other.name} were made from different collections.",
            )
    if collection is None:
        return
    texts = texts_of(collection)
    for each in named:
        check_texts(each.name, each.provenance, collection, texts)
        check_answers(each, collection, splits)


def check_answers(named: NamedRun, collection: Collection, splits: Sequence[str]) -> None:
    """Refuse a run that answers no judged query of one of the splits, or knows no document of the
    collection.
    """
    for split in splits:
        judged = collection.qrels[split]
        if not (answered := [query for query in judged if named.run.get(query)]):
            seen = next(iter(named.run), None)
            example = f"its first query is {seen!r}, that of the split {next(iter(judged))!r}"
            of = f"any of the {len(judged)} judged queries of {collection.name}, {split}"
            remedy = "Give the collection and the split that it was made for: --data, --split."
            got = "it is empty" if seen is None else example
            if not judged.keys().isdisjoint(named.run):
                got, remedy = (
                    "they have no hit",
                    "Look whether documents match --where, and queries have terms.",
                )
            raise CommandError(f"{named.name}: no result for {of} ({got}). {remedy}")
        if not any(
            document in collection.documents for query in answered for document in named.run[query]
        ):
            example = next(iter(named.run[answered[0]]))
            remedy = "Give the collection that it was made from with --data."
            got = f"none of its documents is in {collection.name} (it names {example!r})"
            raise CommandError(f"{named.name}: {got}. {remedy}")
        if len(answered) < len(judged):
            some = f"results for {len(answered)} of the {len(judged)} judged queries of {split}"
            note(f"{named.name}: {some}; the others count as 0")


@dataclass(frozen=True)
class Scores:
    """The measures of a run: split -> query -> measure -> value, and the conventions that they
    depend on.
    """

    tables: dict[str, Table]
    conventions: dict[str, dict[str, float]]

    def means(self) -> dict[str, dict[str, Mean]]:
        """Split -> measure -> mean."""
        return {
            split: {
                name: retrieval.mean_of(row[name] for row in table.values())
                for name in next(iter(table.values()))
            }
            for split, table in self.tables.items()
        }

    def write(self, path: Path | None) -> None:
        """Write a line per query, if --per-query is given: tab-separated columns, which the first
        line names.
        """
        if path is None:
            return
        with (
            atomic_file(path) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as stream,
        ):
            writer = csv.writer(stream, "excel-tab", lineterminator="\n")
            writer.writerow(
                ["split", "query_id", *next(iter(next(iter(self.tables.values())).values()))],
            )
            for split, table in self.tables.items():
                writer.writerows(
                    [split, query, *map(repr, row.values())] for query, row in table.items()
                )


def score(
    named: NamedRun,
    collection: Collection,
    splits: Sequence[str],
    measures: Sequence[str],
    deepest: int,
    ignore_identical_ids: bool,
    ignored: Set[str] = frozenset(),
) -> Scores:
    """The measures of a run on the splits.

    Args:
        named: the run.
        collection: its documents and judgements.
        splits: of the judgements.
        measures: names as of ir-measures.
        deepest: documents per query that the measures see.
        ignore_identical_ids: leave out hits with the query's own id.
        ignored: queries whose such hit was left out of the run before.
    """
    from tilefold.retrieval.evaluation import measures as evaluation

    if (longest := max(map(len, named.run.values()))) < min(deepest, len(collection.documents)):
        note(
            f"{named.name}: at most {longest} documents per query, so that a cut-off of {deepest} "
            "sees no more",
        )
    tables: dict[str, Table] = {}
    conventions: dict[str, dict[str, float]] = {}
    for split in splits:
        qrels = collection.qrels[split]
        tables[split] = evaluation.evaluate_per_query(
            named.run,
            qrels,
            measures,
            ignore_identical_ids=ignore_identical_ids,
        )
        conventions[split] = evaluation.conventions(
            named.run,
            qrels,
            deepest,
            ignore_identical_ids=ignore_identical_ids,
        )
        conventions[split]["ignored_identical_ids"] += len(ignored & qrels.keys())
    return Scores(tables, conventions)


def changed_by_feedback(
    scores: Scores,
    searcher: Searcher,
    queries: Mapping[str, str],
    request: SearchRequest,
    ranking: Ranking,
    collection: Collection,
) -> dict[str, Any]:
    """Say by split what feedback changes in the first measure, beside the ranking without it; as
    ``--json`` has it.
    """
    plain, found = searcher.rank_plainly(queries, request, ranking), dict[str, object]()
    for split, table in scores.tables.items():
        if len(table) < 2:
            continue
        measure = next(iter(next(iter(table.values()))))
        without = retrieval.evaluate_per_query(
            plain,
            collection.qrels[split],
            [measure],
            ignore_identical_ids=request.ignore_identical_ids,
        )
        (change,) = retrieval.compare({"without": without, "feedback": table}, [measure])
        mean, verdict = change.difference.mean, "no more than chance"
        if change.different:
            verdict = (
                "it helps here"
                if mean > 0
                else "it does harm here: leave out --prf, or give --prf-beta less"
            )
        p = f"p {'<' if change.p_randomisation < 0.001 else '='} {max(0.001, change.p_randomisation):.3f}"
        note(
            f"{split}: feedback changes {measure} by {mean:+.4f} ({p}, {len(table)} queries), "
            f"{verdict}",
        )
        found[split] = change.to_dict()
    return found


def facts(collection: Collection, scores: Scores) -> dict[str, Any]:
    """The scores as ``--json`` prints them: of the first split, and of each; errors; conventions."""
    means, first = scores.means(), next(iter(scores.tables))
    splits = {
        split: {name: found.mean for name, found in row.items()} for split, row in means.items()
    }
    errors = {
        split: {name: asdict(found) for name, found in row.items()} for split, row in means.items()
    }
    known: dict[str, Any] = {
        "collection": collection.name,
        "split": first,
        "measures": splits[first],
        "splits": splits,
    }
    return known | {"errors": errors, "conventions": scores.conventions}


def print_scores(collection: Collection, scores: Scores) -> None:
    """A row per measure, a column per split, with standard errors; what the numbers depend on
    below.
    """
    sizes = ", ".join(f"{split}: {len(table)} queries" for split, table in scores.tables.items())
    means = scores.means()
    columns = ["measure", *(f"{split}>" if len(means) > 1 else "value>" for split in means)]
    rows = [
        [name, *(cell(row[name]) for row in means.values())] for name in next(iter(means.values()))
    ]
    if len(means) == 1:
        columns.append("95% interval")
        (values,) = (row.values() for row in means.values())
        rows = [[*row, interval(found)] for row, found in zip(rows, values, strict=True)]
    _common.print_table(columns, rows, f"{collection.name}, {sizes}")
    for split, found in scores.conventions.items():
        if said := said_of(found):
            typer.echo(f"{split}: {said}")


def cell(found: Mean, sign: str = "") -> str:
    """A mean and its standard error."""
    error = "" if found.standard_error is None else f" ± {found.standard_error:.4f}"
    return f"{found.mean:{sign}.4f}{error}"


def interval(found: Mean) -> str:
    """The ends of an interval; empty where there is none."""
    return "" if found.low is None else f"{found.low:.4f} to {found.high:.4f}"


def said_of(found: Mapping[str, float]) -> str:
    """Conventions that some documents or judgements came under, as a sentence; empty without one."""
    parts = []
    if found["judged@10"] < 1:
        parts.append(
            f"{found['judged@10']:.0%} of the first 10 documents are judged, others count as not "
            "relevant",
        )
    if found["negative"]:
        parts.append(f"grades below 0 count as not relevant: {found['negative']:.0f}")
    if found["tied"]:
        parts.append(f"queries with equal scores, ranked by document id: {found['tied']:.0f}")
    if found["ignored_identical_ids"]:
        count = found["ignored_identical_ids"]
        parts.append(f"hits with the query's own id, ignored as by BEIR: {count:.0f}")
    if found["counted_identical_ids"]:
        count = found["counted_identical_ids"]
        parts.append(f"hits with the query's own id, which count as any other: {count:.0f}")
    return "; ".join(parts)
