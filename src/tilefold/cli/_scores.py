"""Reading and writing runs, checking output files and provenance, and printing scores."""

from __future__ import annotations

import csv
import itertools
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    "Ignore hits with the id of the query, as BEIR does if queries are documents, or count them; "
    "by default they are ignored, unless a query is judged relevant to itself."
)
IDENTICAL_IDS = "ignore|count"
# Manifests of an index, and of a folder of vectors.
FOLDER_MANIFESTS = ("index.json", "manifest.json")
# Documents in a file of at least this size are read one by one when they are needed.
STREAMED_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class FileFormat:
    """A format of output files.

    Attributes:
        name: the format in messages, with its article.
        endings: the extensions of its files, the usual one first.
        required: whether the name must have one of the extensions, because readers check it.
    """

    name: str
    endings: tuple[str, ...]
    required: bool = False

    def check_name(self, path: Path, option: str) -> None:
        """Raise ``UsageError`` for a name with the extension of another format."""
        ending = path.suffix.lower()
        is_of_another_format = self.required or ending in _ENDINGS
        if ending in self.endings or not is_of_another_format:
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
# Extensions that say what a file holds.
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
    """A run with its name and its provenance.

    Attributes:
        name: the run in messages, such as ``"--run bm25.trec"``.
        run: query id -> document id -> score.
        provenance: the fingerprints of the searched documents and of the model.
    """

    name: str
    run: Run
    provenance: Provenance


class Measures(NamedTuple):
    """Measures to compute.

    Attributes:
        names: the names of the measures, such as ``"nDCG@10"``.
        depth: the number of documents per query that they need.
    """

    names: Sequence[str]
    depth: int


def requested_measures(names: Sequence[str] | None) -> Measures:
    """Return the measures of ``--measure`` with their usual names, or the default measures.

    Args:
        names: the names of the measures, in any case; None takes the default measures.

    Raises:
        UsageError: if a measure is unknown.
    """
    from tilefold.retrieval.evaluation.measures import (
        DEFAULT_MEASURES,
        check_measures,
        usual_names,
    )

    requested_names = names or DEFAULT_MEASURES
    try:
        depth = check_measures(requested_names)
        return Measures(usual_names(requested_names), depth)
    except ValueError as error:
        raise UsageError(f"--measure: {error}") from error


def note_unused_depth(k: int | None, depth: int) -> None:
    """Print a note if ``--k`` has no effect, because the measures need at least `k` documents.

    Args:
        k: the value of ``--k``, which limits only the documents of ``--save-run``.
        depth: the number of documents per query that the measures need.
    """
    if k is not None and k <= depth:
        note(
            f"--k {k} has no effect without --save-run: the measures need {depth} documents per "
            "query",
        )


def check_output_file(
    path: Path | None,
    option: str,
    file_format: FileFormat,
    *other_files: Path | None,
    overwrite: bool,
) -> None:
    """Check, before any work, that an output file can be written without destroying other data.

    The folder of the file is created.

    Args:
        path: the file to write; None if there is none.
        option: the option that names the file.
        file_format: the format of the file.
        other_files: the inputs and other outputs of the command, which the file must not replace
            even with `overwrite`.
        overwrite: whether an existing file is replaced.

    Raises:
        UsageError: if `path` is a folder, one of the other files, inside an index or a folder of
            vectors, cannot be written, or has the extension of another format.
        CommandError: if the file exists and `overwrite` is False.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option}: expected a file, got the folder {path}.")
    if path.resolve() in [other.resolve() for other in other_files if other is not None]:
        raise UsageError(
            f"{option}: expected a path of its own, got {path}, which is another input or output "
            "of this command.",
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

    Writing the file could overwrite a part of the folder, and replacing the folder would delete the
    file.

    Args:
        path: the file.
        option: the option that names the file.
    """
    for folder in path.resolve().parents:
        for manifest in FOLDER_MANIFESTS:
            # Other programs also write files with these names, but without `schema_version`.
            if "schema_version" in (read_json(folder / manifest) or {}):
                raise UsageError(
                    f"{option}: expected a file outside indexes and folders of vectors, got {path} "
                    f"in {folder}, which holds {manifest}. Choose another folder.",
                )


def files_of_collection(data: str | None) -> list[Path]:
    """Return the files of ``--data``, none of which a command may replace."""
    if data is None:
        return []
    path = Path(data)
    if not path.is_dir():
        return [path]
    return [path, *path.rglob("*")]


def read_run(path: Path, option: str) -> NamedRun:
    """Read a TREC run; a run of passages is converted to a run of documents.

    Args:
        path: the file.
        option: the option that names the file, for messages.

    Raises:
        UsageError: if there is no such file.
    """
    from tilefold.retrieval.evaluation.measures import read_trec_provenance, read_trec_run

    if not path.is_file():
        problem = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise UsageError(
            f"{option}: expected a run, but {problem}; tilefold evaluate --save-run writes one.",
        )
    run = read_trec_run(path)
    provenance = read_trec_provenance(path)
    if provenance.passages is not None:
        note(f"{option}: {path} ranks passages; each document is ranked by its best passage")
        run, _ = retrieval.best_passages(run)
        provenance = replace(provenance, passages=None)
    return NamedRun(f"{option} {path}", run, provenance)


def requested_splits(splits: Sequence[str] | None) -> list[str]:
    """Return the splits of ``--split`` without repetitions; ``test`` if none was given."""
    return list(dict.fromkeys(splits or ["test"]))


def load_evaluated_collection(
    data: str,
    splits: Sequence[str],
    *,
    tuning_splits: Sequence[str] = (),
    drop_unknown: bool,
) -> Collection:
    """Load a collection with the judgements of the splits that a command needs.

    A note is printed for queries without a relevant document.

    Args:
        data: the value of ``--data``.
        splits: the splits that are evaluated, of ``--split``.
        tuning_splits: the splits on which weights are chosen, of ``--tune``.
        drop_unknown: leave out judgements of unknown queries and documents.

    Raises:
        UsageError: if the collection does not have a split.
    """
    collection = _common.load_data(
        data,
        drop_unknown=drop_unknown,
        splits=[*splits, *tuning_splits],
    )
    for split in tuning_splits:
        _common.check_split(collection, split, "--tune")
    for split in splits:
        _common.check_split(collection, split)
        qrels = collection.qrels[split]
        n_without_relevant = sum(
            all(grade <= 0 for grade in grades.values()) for grades in qrels.values()
        )
        if n_without_relevant:
            note(
                f"{n_without_relevant} of the {len(qrels)} queries of {split} have no relevant "
                "document and count as 0",
            )
    return collection


def ignores_identical_ids(
    choice: str | None,
    collection: Collection,
    splits: Sequence[str],
) -> bool:
    """Return whether hits with the query's own id are ignored in all splits.

    Such a hit is the query itself in collections whose queries are documents. By default, these
    hits are ignored if no split judges a query relevant to itself.

    Args:
        choice: the value of ``--identical-ids``; None lets the judgements decide.
        collection: the collection with the judgements.
        splits: the splits that are evaluated.
    """
    from tilefold.retrieval.common import identical_ids

    if choice is not None:
        return choice == "ignore"
    return all(identical_ids.ignores_identical_ids(collection.qrels[split]) for split in splits)


def without_identical_ids(named_run: NamedRun) -> tuple[NamedRun, set[str]]:
    """Return a run without hits that have the query's own id, and the queries that had one."""
    from tilefold.retrieval.common import identical_ids

    queries = identical_ids.queries_with_identical_ids(named_run.run)
    remaining_run = identical_ids.without_identical_ids(named_run.run)
    return replace(named_run, run=remaining_run), queries


def save_run(
    named_run: NamedRun,
    documents_provenance: Provenance,
    path: Path,
    k: int | None = None,
    *,
    overwrite: bool,
) -> None:
    """Write the first `k` documents per query as a TREC file, whose last column has fingerprints.

    Args:
        named_run: the run, with the fingerprint of its model.
        documents_provenance: the fingerprint of the documents.
        path: the file to write.
        k: the number of documents per query; None for all.
        overwrite: whether an existing file is replaced.
    """
    shortened_run = {
        query: dict(itertools.islice(scores.items(), k)) for query, scores in named_run.run.items()
    }
    provenance = replace(
        documents_provenance,
        model_fingerprint=named_run.provenance.model_fingerprint,
        precision=named_run.provenance.precision,
    )
    retrieval.write_trec_run(shortened_run, path, tag=provenance.tag, overwrite=overwrite)


def check_ids_of_run(query_ids: Iterable[str], document_ids: Iterable[str]) -> None:
    """Raise ``UsageError``, before any work, for ids that the TREC file of a run cannot hold."""
    from tilefold.retrieval.evaluation.measures import check_word

    try:
        for query_id in query_ids:
            check_word("query id", query_id)
        for document_id in document_ids:
            check_word("document id", document_id)
    except ValueError as error:
        raise UsageError(f"--save-run: {error}") from error


def provenance_of_documents(collection: Collection) -> Provenance:
    """Return a provenance that holds only the fingerprint of a collection's documents."""
    return Provenance(texts_sha256=texts_digest(collection.content()))


def check_made_from(
    collection: Collection,
    name: str,
    provenance: Provenance,
    *,
    expected: Provenance | None = None,
) -> None:
    """Raise ``CommandError`` if a file or folder was not made from the documents of a collection.

    Args:
        collection: the collection.
        name: the file or folder with its option, such as ``"--run bm25.trec"``.
        provenance: what the file or folder was made from, with the fingerprint of its documents.
        expected: the fingerprint of the collection's documents, if the caller has it already.
    """
    if expected is None:
        expected = provenance_of_documents(collection)
    if expected.differing_fields(provenance):
        remedies = "make it again (tilefold encode, tilefold index, evaluate --save-run)"
        if name.startswith("--index"):
            remedies = f"add new documents to the index (tilefold index --update), or {remedies}"
        raise CommandError(
            f"{name} was made from other documents than those of {collection.name}: another "
            "collection, or one that has changed since. Give the original documents with --data, "
            f"or {remedies}.",
        )


def open_documents(data: str, index: Path, provenance: Provenance) -> Mapping[str, Document]:
    """Open the documents of an index, and check that the index was made from them.

    Documents in a large file are read one by one when they are needed.

    Args:
        data: the value of ``--data``.
        index: the folder of the index.
        provenance: what the index was made from, with the fingerprint of its documents.

    Raises:
        CommandError: if the index was made from other documents.
    """
    collection = _common.load_data(data, documents_only=True, stored=STREAMED_FILE_BYTES)
    check_made_from(collection, f"--index {index}", provenance)
    return collection.documents


def check_runs(
    runs: Sequence[NamedRun],
    collection: Collection | None,
    splits: Sequence[str],
) -> None:
    """Raise ``CommandError`` if runs were not all made from the same collection.

    Args:
        runs: the runs.
        collection: the collection that they must have been made from; None only compares the runs
            with one another.
        splits: the splits in which each run must have results.
    """
    for first, other in itertools.combinations(runs, 2):
        # `texts_sha256` is the digest of the documents that were searched.
        if "texts_sha256" in first.provenance.differing_fields(other.provenance):
            raise CommandError(
                f"{first.name} and {other.name} were made from different collections.",
            )
    if collection is None:
        return
    documents_provenance = provenance_of_documents(collection)
    for run in runs:
        check_made_from(collection, run.name, run.provenance, expected=documents_provenance)
        check_has_results(run, collection, splits)


def check_has_results(named_run: NamedRun, collection: Collection, splits: Sequence[str]) -> None:
    """Check that a run has results for judged queries, with documents of the collection.

    A note is printed with the number of judged queries without results.

    Args:
        named_run: the run.
        collection: the documents, and the judgements of the splits.
        splits: the splits in which the run must have results.

    Raises:
        CommandError: if no judged query of a split has a result, or no result is a document of the
            collection.
    """
    for split in splits:
        judged = collection.qrels[split]
        with_results = [query for query in judged if named_run.run.get(query)]
        if not with_results:
            raise _no_results_error(named_run, collection, split)
        documents = (document for query in with_results for document in named_run.run[query])
        if not any(document in collection.documents for document in documents):
            example = next(iter(named_run.run[with_results[0]]))
            raise CommandError(
                f"{named_run.name}: none of its documents is in {collection.name} (for example "
                f"{example!r}). Give the collection that it was made from with --data.",
            )
        if len(with_results) < len(judged):
            note(
                f"{named_run.name}: results for {len(with_results)} of the {len(judged)} judged "
                f"queries of {split}; the remaining ones count as 0",
            )


def _no_results_error(named_run: NamedRun, collection: Collection, split: str) -> CommandError:
    """Return the error for a run without results for any judged query of a split.

    Args:
        named_run: the run.
        collection: the collection with the judgements.
        split: the split.
    """
    judged = collection.qrels[split]
    remedy = "Give the collection and the split that the run was made for: --data, --split."
    if not named_run.run:
        reason = "it is empty"
    elif judged.keys().isdisjoint(named_run.run):
        first_query = next(iter(named_run.run))
        first_judged = next(iter(judged))
        reason = (
            f"its first query is {first_query!r}, and the first query of the split is "
            f"{first_judged!r}"
        )
        if first_query in collection.queries:
            # A new run with the missing split, and with the splits that this run already has.
            splits = [split, *_splits_with_results(named_run, collection)]
            options = " ".join(f"--split {name}" for name in splits)
            remedy = f"Make the run with evaluate {options} --save-run FILE."
    else:
        reason = "these queries have no hit"
        remedy = "Check that documents match --where and queries have terms."
    return CommandError(
        f"{named_run.name}: no result for any of the {len(judged)} judged queries of "
        f"{collection.name}, {split} ({reason}). {remedy}",
    )


def _splits_with_results(named_run: NamedRun, collection: Collection) -> list[str]:
    """Return the loaded splits of a collection that have queries of a run."""
    return [
        split
        for split, qrels in collection.qrels.items()
        if not qrels.keys().isdisjoint(named_run.run)
    ]


@dataclass(frozen=True)
class Scores:
    """The measures of a run.

    Attributes:
        tables: split -> query -> measure -> value.
        conventions: split -> convention of the measures -> number of documents or judgements that
            it affects, such as judgements below 0.
        depth: the number of documents per query that the measures use.
    """

    tables: dict[str, Table]
    conventions: dict[str, dict[str, float]]
    depth: int

    @property
    def measures(self) -> list[str]:
        """The names of the measures."""
        first_table = next(iter(self.tables.values()))
        return list(next(iter(first_table.values())))

    def means(self) -> dict[str, dict[str, Mean]]:
        """Return split -> measure -> mean over the queries of the split."""
        means: dict[str, dict[str, Mean]] = {}
        for split, table in self.tables.items():
            means[split] = {
                measure: retrieval.mean_of(values[measure] for values in table.values())
                for measure in self.measures
            }
        return means

    def write(self, path: Path) -> None:
        """Write the measures of each query as a line of tab-separated columns, with a header."""
        measures = self.measures
        with (
            atomic_file(path) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as stream,
        ):
            writer = csv.writer(stream, "excel-tab", lineterminator="\n")
            writer.writerow(["split", "query_id", *measures])
            for split, table in self.tables.items():
                for query, values in table.items():
                    # `repr` writes all digits of a number.
                    cells = [repr(values[measure]) for measure in measures]
                    writer.writerow([split, query, *cells])


def score(
    named_run: NamedRun,
    collection: Collection,
    splits: Sequence[str],
    measures: Measures,
    *,
    ignore_identical_ids: bool,
    queries_without_own_id: Set[str] = frozenset(),
) -> Scores:
    """Compute the measures of a run on some splits.

    Args:
        named_run: the run.
        collection: the collection with the documents and the judgements.
        splits: the splits to evaluate.
        measures: the measures to compute.
        ignore_identical_ids: whether hits with the query's own id are ignored.
        queries_without_own_id: the queries whose hit with their own id was removed before. They
            are added to those whose hit is ignored now.
    """
    from tilefold.retrieval.evaluation.measures import conventions as affected_by_conventions

    longest = max(map(len, named_run.run.values()))
    if longest < min(measures.depth, len(collection.documents)):
        note(
            f"{named_run.name}: at most {longest} documents per query, fewer than the "
            f"{measures.depth} that the measures use",
        )
    tables: dict[str, Table] = {}
    conventions: dict[str, dict[str, float]] = {}
    for split in splits:
        qrels = collection.qrels[split]
        tables[split] = retrieval.evaluate_per_query(
            named_run.run,
            qrels,
            measures.names,
            ignore_identical_ids=ignore_identical_ids,
        )
        conventions[split] = affected_by_conventions(
            named_run.run,
            qrels,
            measures.depth,
            ignore_identical_ids=ignore_identical_ids,
        )
        n_removed_before = len(queries_without_own_id & qrels.keys())
        conventions[split]["ignored_identical_ids"] += n_removed_before
    return Scores(tables, conventions, measures.depth)


def compare_feedback(
    scores: Scores,
    searcher: Searcher,
    queries: Mapping[str, str],
    request: SearchRequest,
    ranking: Ranking,
    collection: Collection,
) -> dict[str, Any]:
    """Compare the first measure with and without feedback, and print a note for each split.

    The queries are searched again without feedback. A split with a single query is left out,
    because a significance test needs several.

    Args:
        scores: the scores of the ranking with feedback.
        searcher: the searcher.
        queries: query id -> text.
        request: the search with feedback.
        ranking: the ranking with feedback, whose encoded queries are used again.
        collection: the collection with the judgements.

    Returns:
        Split -> comparison, for ``--json``.
    """
    plain_run = searcher.rank_without_feedback(queries, request, ranking)
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
    """Describe by how much feedback changes a measure, and whether the change is significant.

    Args:
        split: the name of the split.
        difference: the difference between the measure with and without feedback, with its paired
            randomisation test.
        n_queries: the number of judged queries.
    """
    mean = difference.difference.mean
    if not difference.different:
        verdict = "which is not significant"
    elif mean > 0:
        verdict = "which is significant"
    else:
        verdict = "which is significant: leave out --prf, or lower --prf-beta"
    p = difference.p_randomisation
    shown_p = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
    return (
        f"{split}: feedback changes {difference.measure} by {mean:+.4f} ({shown_p}, {n_queries} "
        f"queries), {verdict}"
    )


def scores_as_json(collection: Collection, scores: Scores) -> dict[str, Any]:
    """Return the scores of a run as a dictionary for ``--json``.

    Args:
        collection: the collection of the run, for its name.
        scores: the scores of the run on some splits.

    Returns:
        A dictionary. ``splits`` has the mean of each measure, by split. ``measures`` repeats those
        of the first split. ``errors`` adds standard errors and intervals. ``conventions`` counts
        what rules of evaluation affect, such as judgements below 0.
    """
    means_by_split = scores.means()
    first_split = next(iter(means_by_split))
    values_by_split: dict[str, dict[str, float]] = {}
    errors_by_split: dict[str, dict[str, object]] = {}
    for split, means in means_by_split.items():
        values_by_split[split] = {measure: mean.mean for measure, mean in means.items()}
        errors_by_split[split] = {measure: asdict(mean) for measure, mean in means.items()}
    return {
        "collection": collection.name,
        "split": first_split,
        "measures": values_by_split[first_split],
        "splits": values_by_split,
        "errors": errors_by_split,
        "conventions": scores.conventions,
    }


def print_scores(collection: Collection, scores: Scores) -> None:
    """Print a table with a row per measure, then which evaluation rules affect each split.

    The table has a column of means per split. A single split also has a column of 95% intervals.

    Args:
        collection: the collection of the run, for the title.
        scores: the scores of the run on some splits.
    """
    means = scores.means()
    sizes = ", ".join(f"{split}: {len(table)} queries" for split, table in scores.tables.items())
    title = f"{collection.name}, {sizes}"
    if len(means) == 1:
        (means_of_split,) = means.values()
        rows = [[name, cell(mean), interval(mean)] for name, mean in means_of_split.items()]
        columns = ("measure", "value", "95% interval")
        _common.print_table(columns, rows, title, right_aligned=("value",))
    else:
        rows = [
            [name, *(cell(means_of_split[name]) for means_of_split in means.values())]
            for name in scores.measures
        ]
        _common.print_table(["measure", *means], rows, title, right_aligned=means)
    for split, conventions in scores.conventions.items():
        description = describe_conventions(conventions, scores.depth)
        if description:
            typer.echo(f"{split}: {description}")


def cell(mean: Mean, sign: str = "") -> str:
    """Format a mean and its standard error for a cell of a table.

    Args:
        mean: the mean, which has no standard error for a single query.
        sign: ``"+"`` to show the sign of positive means, too.
    """
    error = "" if mean.standard_error is None else f" ± {mean.standard_error:.4f}"
    return f"{mean.mean:{sign}.4f}{error}"


def interval(mean: Mean) -> str:
    """Format the ends of the interval of a mean; empty if it has none."""
    if mean.low is None:
        return ""
    return f"{mean.low:.4f} to {mean.high:.4f}"


def describe_conventions(conventions: Mapping[str, float], depth: int) -> str:
    """Describe which rules of evaluation affect the measures of a split; empty if none does.

    Args:
        conventions: rule -> number of queries, documents or judgements that it affects, such as
            ``"negative"`` for judgements below 0.
        depth: the number of documents per query that the measures use. The next document counts
            for ties, too, because it could have been inside this depth.
    """
    parts = []
    if conventions["judged@10"] < 1:
        parts.append(
            f"{conventions['judged@10']:.0%} of the first 10 documents are judged, the remaining "
            "ones count as not relevant",
        )
    if conventions["negative"]:
        parts.append(f"grades below 0 count as not relevant: {conventions['negative']:.0f}")
    if conventions["tied"]:
        parts.append(
            f"queries with equal scores among their first {depth + 1} documents, ranked by "
            f"document id: {conventions['tied']:.0f}",
        )
    n_ignored = conventions["ignored_identical_ids"]
    if n_ignored:
        parts.append(f"hits with the query's own id, ignored, as BEIR does: {n_ignored:.0f}")
    n_counted = conventions["counted_identical_ids"]
    if n_counted:
        parts.append(f"hits with the query's own id, counted like any other hit: {n_counted:.0f}")
    return "; ".join(parts)
