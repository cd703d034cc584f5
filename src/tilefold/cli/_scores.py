"""Runs from files, checks of runs and output files, measures, and tables of scores."""

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
    from tilefold.retrieval.evaluation.significance import Difference, Mean, Table
    from tilefold.retrieval.search.searcher import Ranking, Searcher, SearchRequest

MEASURE_HELP = "Measure in the notation of ir-measures, such as nDCG@10; may be repeated."
SPLIT_HELP = "Split of the judgements, by default test; may be repeated."
SAVE_RUN_HELP = "Write the run as a TREC file."
IDENTICAL_IDS_HELP = (
    "Hits with the id of the query: ignore them, as BEIR does where queries are documents, or "
    "count them; by default ignore, unless judgements call one relevant."
)
IDENTICAL_IDS = "ignore|count"
FOLDER_MANIFESTS = ("index.json", "manifest.json")  # of an index, and of a folder of vectors
SMALLEST = 1 << 20  # bytes of a file whose documents are read one by one instead of all at once


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
    """A run with its origin.

    Attributes:
        name: the run in messages, such as ``"--run bm25.trec"``.
        run: query id -> document id -> score.
        provenance: fingerprints of the documents and of the model that made it.
    """

    name: str
    run: Run
    provenance: Provenance


def check_measures(measures: Sequence[str] | None) -> tuple[Sequence[str], int]:
    """Check the measures of ``--measure``.

    Args:
        measures: names of measures, such as ``"nDCG@10"``; None takes the default ones.

    Returns:
        The measures to compute, and the number of documents per query that they need.

    Raises:
        UsageError: for an unknown measure.
    """
    from tilefold.retrieval.evaluation import measures as evaluation

    chosen = measures or evaluation.DEFAULT_MEASURES
    try:
        deepest = evaluation.check_measures(chosen)
    except ValueError as error:
        raise UsageError(f"--measure: {error}") from error
    return chosen, deepest


def note_unused_depth(k: int | None, deepest: int, consumer: object) -> None:
    """Print a note if ``--k`` changes nothing, because the measures need as many documents anyway.

    Args:
        k: value of ``--k``.
        deepest: documents per query that the measures need.
        consumer: value of an option that makes use of `k`; None if there is none.
    """
    if k is not None and consumer is None and k <= deepest:
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
    """Refuse an output file, before any work, if writing it would fail or destroy other data.

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
    if path.resolve() in [other.resolve() for other in inputs if other is not None]:
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
    """Raise ``UsageError`` for a file inside an index or a folder of vectors.

    The file could replace a part of them. A command that replaces such a folder would remove it.

    Args:
        path: the file.
        option: the option that names it.
    """
    for folder in path.resolve().parents:
        for manifest in FOLDER_MANIFESTS:
            # Files of other programs may have these names, but no version of our schema.
            if "schema_version" in (read_json(folder / manifest) or {}):
                raise UsageError(
                    f"{option}: expected a file outside indexes and folders of vectors, got {path} "
                    f"in {folder}, which holds {manifest}. Choose another folder.",
                )


def files_of_collection(data: str) -> list[Path]:
    """Return the files of ``--data``, which no command may replace."""
    path = Path(data)
    if not path.is_dir():
        return [path]
    return [path, *path.rglob("*")]


def read_run(path: Path, option: str) -> NamedRun:
    """Read a TREC run; a run of passages becomes one of their documents.

    Args:
        path: the file.
        option: the option that names it, for messages.

    Raises:
        UsageError: if there is no such file.
    """
    from tilefold.retrieval.evaluation import measures as evaluation

    if not path.is_file():
        raise UsageError(
            f"{option}: there is no file {path}; tilefold evaluate --save-run writes one.",
        )
    run = evaluation.read_trec_run(path)
    provenance = evaluation.read_trec_provenance(path)
    if provenance.passages is not None:
        note(f"{option}: {path} ranks passages; documents count by their best one")
        run, _ = retrieval.best_passages(run)
        provenance = replace(provenance, passages=None)
    return NamedRun(f"{option} {path}", run, provenance)


def load_splits(
    data: str,
    split: Sequence[str] | None,
    drop_unknown: bool,
    also: Sequence[str] | None = None,
) -> tuple[Collection, list[str]]:
    """Load a collection with the judgements of some splits.

    Args:
        data: value of ``--data``.
        split: values of ``--split``; None is the split ``test``.
        drop_unknown: leave out judgements of unknown queries and documents.
        also: splits of ``--tune``, which are loaded too; None loads all splits.

    Returns:
        The collection, and the splits of ``--split``, each once.

    Raises:
        UsageError: for a split that the collection does not have.
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
        qrels = collection.qrels[name]
        n_without_relevant = sum(
            all(grade <= 0 for grade in grades.values()) for grades in qrels.values()
        )
        if n_without_relevant:
            note(
                f"{n_without_relevant} of the {len(qrels)} queries of {name} have no relevant "
                "document and count as 0",
            )
    return collection, splits


def ignores_identical_ids(
    choice: str | None,
    collection: Collection,
    splits: Sequence[str],
) -> bool:
    """Return whether hits with the query's own id are left out, the same for all splits.

    Such a hit is the query itself in collections whose queries are documents. By default they are
    left out if the judgements of all splits leave them out.

    Args:
        choice: value of ``--identical-ids``; None lets the judgements decide.
        collection: with the judgements.
        splits: the splits that are evaluated.
    """
    from tilefold.retrieval.common import identical_ids

    if choice is not None:
        return choice == "ignore"
    return all(identical_ids.ignores_identical_ids(collection.qrels[name]) for name in splits)


def without_identical_ids(named: NamedRun) -> tuple[NamedRun, set[str]]:
    """Return a run without hits that have the query's own id, and the queries that had one."""
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
    """Write the best documents of a run as a TREC file, whose tag holds its provenance.

    Args:
        named: the run, with the fingerprint and the precision of the model that made it.
        texts: provenance of the documents.
        path: of ``--save-run``; None writes nothing.
        k: documents per query; None for all.
        overwrite: replace a file that exists.
    """
    if path is None:
        return
    shortened_run = {
        query: dict(itertools.islice(scores.items(), k)) for query, scores in named.run.items()
    }
    provenance = replace(
        texts,
        model_fingerprint=named.provenance.model_fingerprint,
        precision=named.provenance.precision,
    )
    retrieval.write_trec_run(shortened_run, path, tag=provenance.tag, overwrite=overwrite)


def check_savable(path: Path | None, documents: Iterable[str], queries: Iterable[str]) -> None:
    """Raise ``UsageError``, before any work, for ids that a TREC run cannot hold.

    Args:
        path: of ``--save-run``; None checks nothing.
        documents: ids of documents.
        queries: ids of queries.
    """
    from tilefold.retrieval.evaluation.measures import check_word

    if path is None:
        return
    try:
        for query_id in queries:
            check_word("query id", query_id)
        for document_id in documents:
            check_word("document id", document_id)
    except ValueError as error:
        raise UsageError(f"--save-run: {error}") from error


def texts_of(collection: Collection) -> Provenance:
    """Return a provenance with the fingerprint of a collection's documents."""
    return Provenance(texts_sha256=texts_digest(collection.contents()))


def check_texts(
    name: str,
    provenance: Provenance,
    collection: Collection,
    texts: Provenance,
) -> None:
    """Raise ``CommandError`` for a file or folder that was made from other documents.

    Args:
        name: the file or folder with its option, such as ``"--run bm25.trec"``.
        provenance: of the file or folder.
        collection: the documents that it must have been made from.
        texts: fingerprint of these documents.
    """
    if texts.differing_fields(provenance):
        raise CommandError(
            f"{name} was made from other documents than those of {collection.name}: another "
            "collection, or one that has changed since. Give its own with --data, or make it again "
            "(tilefold encode, tilefold index, evaluate --save-run).",
        )


def open_documents(data: str, index: Path, provenance: Provenance) -> Mapping[str, Document]:
    """Open the documents of an index, and check that the index was made from them.

    Documents of a large file are read when they are needed, one by one.

    Args:
        data: value of ``--data``.
        index: folder of the index.
        provenance: of the index.

    Raises:
        CommandError: if the index was made from other documents.
    """
    collection = _common.load_data(data, documents_only=True, stored=SMALLEST)
    check_texts(f"--index {index}", provenance, collection, texts_of(collection))
    return collection.documents


def check_runs(
    named: Sequence[NamedRun],
    collection: Collection | None,
    splits: Sequence[str],
) -> None:
    """Raise ``CommandError`` for runs that do not belong together or to the collection.

    Args:
        named: the runs.
        collection: with judgements; None compares the runs with one another only.
        splits: splits in which each run must have results.
    """
    for first, other in itertools.combinations(named, 2):
        if "texts_sha256" in first.provenance.differing_fields(other.provenance):
            raise CommandError(
                f"{first.name} and {other.name} were made from different collections.",
            )
    if collection is None:
        return
    texts = texts_of(collection)
    for run in named:
        check_texts(run.name, run.provenance, collection, texts)
        check_answers(run, collection, splits)


def check_answers(named: NamedRun, collection: Collection, splits: Sequence[str]) -> None:
    """Check that a run has results for judged queries, with documents of the collection.

    A note says how many judged queries have none.

    Args:
        named: the run.
        collection: documents, and judgements of the splits.
        splits: splits in which the run must have results.

    Raises:
        CommandError: if no judged query of a split has a result, or no result is a document of the
            collection.
    """
    for split in splits:
        judged = collection.qrels[split]
        answered = [query for query in judged if named.run.get(query)]  # queries with results
        if not answered:
            raise _no_results_error(named, collection, split)
        documents = (document for query in answered for document in named.run[query])
        if not any(document in collection.documents for document in documents):
            example = next(iter(named.run[answered[0]]))
            raise CommandError(
                f"{named.name}: none of its documents is in {collection.name} (it names "
                f"{example!r}). Give the collection that it was made from with --data.",
            )
        if len(answered) < len(judged):
            note(
                f"{named.name}: results for {len(answered)} of the {len(judged)} judged queries of "
                f"{split}; the others count as 0",
            )


def _no_results_error(named: NamedRun, collection: Collection, split: str) -> CommandError:
    """Return the error for a run that has no result for any judged query of a split.

    Args:
        named: the run.
        collection: with the judgements.
        split: the split.
    """
    judged = collection.qrels[split]
    remedy = "Give the collection and the split that it was made for: --data, --split."
    if not judged.keys().isdisjoint(named.run):
        reason = "they have no hit"
        remedy = "Look whether documents match --where, and queries have terms."
    elif named.run:
        first_query = next(iter(named.run))
        first_judged = next(iter(judged))
        reason = f"its first query is {first_query!r}, that of the split {first_judged!r}"
    else:
        reason = "it is empty"
    return CommandError(
        f"{named.name}: no result for any of the {len(judged)} judged queries of "
        f"{collection.name}, {split} ({reason}). {remedy}",
    )


@dataclass(frozen=True)
class Scores:
    """Measures of a run.

    Attributes:
        tables: split -> query -> measure -> value.
        conventions: split -> counts of documents and judgements that the conventions of the
            measures affect, such as judgements below 0.
    """

    tables: dict[str, Table]
    conventions: dict[str, dict[str, float]]

    @property
    def measures(self) -> list[str]:
        """Names of the measures."""
        first_table = next(iter(self.tables.values()))
        return list(next(iter(first_table.values())))

    def means(self) -> dict[str, dict[str, Mean]]:
        """Return split -> measure -> mean over the queries."""
        means: dict[str, dict[str, Mean]] = {}
        for split, table in self.tables.items():
            means[split] = {
                measure: retrieval.mean_of(values[measure] for values in table.values())
                for measure in self.measures
            }
        return means

    def write(self, path: Path | None) -> None:
        """Write the measures of each query as a line of tab-separated columns, with a header.

        Args:
            path: of ``--per-query``; None writes nothing.
        """
        if path is None:
            return
        with (
            atomic_file(path) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as stream,
        ):
            writer = csv.writer(stream, "excel-tab", lineterminator="\n")
            writer.writerow(["split", "query_id", *self.measures])
            for split, table in self.tables.items():
                for query, values in table.items():
                    # `repr` writes all digits of a number.
                    writer.writerow([split, query, *map(repr, values.values())])


def score(
    named: NamedRun,
    collection: Collection,
    splits: Sequence[str],
    measures: Sequence[str],
    deepest: int,
    ignore_identical_ids: bool,
    ignored: Set[str] = frozenset(),
) -> Scores:
    """Compute the measures of a run on some splits.

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

    longest = max(map(len, named.run.values()))
    if longest < min(deepest, len(collection.documents)):
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
    """Compare the first measure with and without feedback, and print a note for each split.

    The queries are searched again without feedback. A split of a single query is left out, because
    a test of significance needs several.

    Args:
        scores: of the ranking with feedback.
        searcher: what searched.
        queries: query id -> text.
        request: the search with feedback.
        ranking: the ranking with feedback.
        collection: with the judgements.

    Returns:
        The comparison by split, for ``--json``; without splits of a single query.
    """
    plain_run = searcher.rank_plainly(queries, request, ranking)
    measure = scores.measures[0]
    comparisons: dict[str, object] = {}
    for split, table in scores.tables.items():
        if len(table) < 2:
            continue
        plain_table = retrieval.evaluate_per_query(
            plain_run,
            collection.qrels[split],
            [measure],
            ignore_identical_ids=request.ignore_identical_ids,
        )
        (difference,) = retrieval.compare({"without": plain_table, "feedback": table}, [measure])
        note(_describe_change(split, difference, len(table)))
        comparisons[split] = difference.to_dict()
    return comparisons


def _describe_change(split: str, difference: Difference, n_queries: int) -> str:
    """Return in words by how much feedback changes a measure of a split, and whether by chance.

    Args:
        split: name of the split.
        difference: of the measure with feedback and without, with a paired test of randomisation.
        n_queries: number of judged queries.
    """
    mean = difference.difference.mean
    if not difference.different:
        verdict = "no more than chance"
    elif mean > 0:
        verdict = "it helps here"
    else:
        verdict = "it does harm here: leave out --prf, or give --prf-beta less"
    p = difference.p_randomisation
    shown_p = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
    return (
        f"{split}: feedback changes {difference.measure} by {mean:+.4f} ({shown_p}, {n_queries} "
        f"queries), {verdict}"
    )


def facts(collection: Collection, scores: Scores) -> dict[str, Any]:
    """Return scores as ``--json`` prints them.

    Args:
        collection: collection of the run, for its name.
        scores: measures of the run on some splits.

    Returns:
        A dictionary for JSON. ``measures`` holds the means of the first split, ``splits`` the means
        of each split, and ``errors`` the means with their standard errors and intervals.
    """
    means = scores.means()
    first_split = next(iter(means))
    mean_values: dict[str, dict[str, float]] = {}
    means_with_errors: dict[str, dict[str, object]] = {}
    for split, means_of_split in means.items():
        mean_values[split] = {name: mean.mean for name, mean in means_of_split.items()}
        means_with_errors[split] = {name: asdict(mean) for name, mean in means_of_split.items()}
    return {
        "collection": collection.name,
        "split": first_split,
        "measures": mean_values[first_split],
        "splits": mean_values,
        "errors": means_with_errors,
        "conventions": scores.conventions,
    }


def print_scores(collection: Collection, scores: Scores) -> None:
    """Print a table with a row per measure and a column per split, and the conventions.

    A single split gets a second column with 95% intervals.

    Args:
        collection: collection of the run, for the title.
        scores: measures of the run on some splits.
    """
    means = scores.means()
    sizes = ", ".join(f"{split}: {len(table)} queries" for split, table in scores.tables.items())
    if len(means) == 1:
        (means_of_split,) = means.values()
        columns = ["measure", "value>", "95% interval"]
        rows = [[name, cell(mean), interval(mean)] for name, mean in means_of_split.items()]
    else:
        columns = ["measure", *(f"{split}>" for split in means)]
        rows = [
            [name, *(cell(means_of_split[name]) for means_of_split in means.values())]
            for name in scores.measures
        ]
    _common.print_table(columns, rows, f"{collection.name}, {sizes}")
    for split, conventions in scores.conventions.items():
        description = describe_conventions(conventions)
        if description:
            typer.echo(f"{split}: {description}")


def cell(mean: Mean, sign: str = "") -> str:
    """Return a mean and its standard error as text.

    Args:
        mean: the mean; without a standard error for a single query.
        sign: ``"+"`` shows the sign of positive means too.
    """
    error = "" if mean.standard_error is None else f" ± {mean.standard_error:.4f}"
    return f"{mean.mean:{sign}.4f}{error}"


def interval(mean: Mean) -> str:
    """Return the ends of the interval of a mean as text; empty without an interval."""
    if mean.low is None:
        return ""
    return f"{mean.low:.4f} to {mean.high:.4f}"


def describe_conventions(conventions: Mapping[str, float]) -> str:
    """Return in words which conventions affect the measures; empty if none does.

    Args:
        conventions: of one split, see :class:`Scores`.
    """
    parts = []
    if conventions["judged@10"] < 1:
        parts.append(
            f"{conventions['judged@10']:.0%} of the first 10 documents are judged, others count as "
            "not relevant",
        )
    if conventions["negative"]:
        parts.append(f"grades below 0 count as not relevant: {conventions['negative']:.0f}")
    if conventions["tied"]:
        parts.append(f"queries with equal scores, ranked by document id: {conventions['tied']:.0f}")
    n_ignored = conventions["ignored_identical_ids"]
    if n_ignored:
        parts.append(f"hits with the query's own id, ignored as by BEIR: {n_ignored:.0f}")
    n_counted = conventions["counted_identical_ids"]
    if n_counted:
        parts.append(f"hits with the query's own id, which count as any other: {n_counted:.0f}")
    return "; ".join(parts)
