"""``tilefold compare``: which of several runs differ, by how much, and on which queries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilefold import retrieval
from tilefold.cli import _common, _options, _scores
from tilefold.cli._common import UsageError
from tilefold.cli._options import DocumentFieldOptions, argument, option, refuse_options

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.evaluation.significance import Difference, Table

SHOWN_CELLS = 60


@dataclass(frozen=True, kw_only=True)
class CompareRequest(DocumentFieldOptions):
    """Options of ``tilefold compare``."""

    run: Annotated[
        list[Path],
        argument(
            "TREC run files, at least two; the first is the baseline of all others.",
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
            "Split of the judgements.",
        ),
    ] = "test"
    drop_unknown: Annotated[
        bool,
        option(
            _common.DROP_UNKNOWN_HELP,
            "--drop-unknown",
        ),
    ] = False
    measure: Annotated[
        list[str] | None,
        option(
            "Measure in the notation of ir-measures, by default nDCG@10; may be repeated.",
        ),
    ] = None
    all_pairs: Annotated[
        bool,
        option(
            "Compare every pair of runs.",
            "--all-pairs",
        ),
    ] = False
    alpha: Annotated[
        float,
        option(
            "Significance level: the chance of finding any difference between equal runs.",
        ),
    ] = 0.05
    resamples: Annotated[
        int,
        option(
            "Sign flips of the randomisation test, and samples of the bootstrap.",
        ),
    ] = 9999
    worst: Annotated[
        int,
        option(
            "Number of queries with the largest losses to show, with their texts.",
            min=0,
        ),
    ] = 10
    seed: Annotated[
        int,
        option(
            "Equal seeds give equal numbers.",
            min=0,
        ),
    ] = 0
    identical_ids: Annotated[
        Literal["ignore", "count"] | None,
        option(
            _scores.IDENTICAL_IDS_HELP,
        ),
    ] = None
    plot: Annotated[
        Path | None,
        option(
            "PNG file for a plot of the first measure of each query, run against run.",
        ),
    ] = None
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
            "Everything as JSON on stdout.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for options without effect."""
        super().validate()
        if self.plot is None:
            refuse_options({"--overwrite": self.overwrite}, "requires --plot")


def compare(request: CompareRequest) -> None:
    """Compare runs over the same queries: differences, paired tests, and the largest losses.

    A difference is marked * if it is significant by the paired randomisation test, after Holm's
    correction over all comparisons of the table.

    Example:
        tilefold compare bm25.trec splade.trec --data DATA
    """
    measures = _scores.requested_measures(request.measure or ["nDCG@10"])
    _scores.check_output_file(
        request.plot,
        "--plot",
        _scores.PICTURE,
        *request.run,
        *_scores.files_of_collection(request.data),
        overwrite=request.overwrite,
    )
    if request.plot is not None:
        from tilefold._internal.figures import new_figure

        new_figure((1, 1))  # raises an error before any work if matplotlib is not installed
    labels = _label_runs(request.run)
    runs = [_scores.read_run(path, "run") for path in request.run]
    collection = _scores.load_evaluated_collection(
        request.data,
        [request.split],
        drop_unknown=request.drop_unknown,
    )
    _scores.check_runs(runs, collection, [request.split])
    ignores_identical_ids = _scores.ignores_identical_ids(
        request.identical_ids,
        collection,
        [request.split],
    )
    scores = {
        label: _scores.score(
            run,
            collection,
            [request.split],
            measures,
            ignore_identical_ids=ignores_identical_ids,
        )
        for label, run in zip(labels, runs, strict=True)
    }
    tables = {label: run_scores.tables[request.split] for label, run_scores in scores.items()}
    with _options.errors_name_options(tables="--split"):
        differences = retrieval.compare(
            tables,
            measures.names,
            all_pairs=request.all_pairs,
            alpha=request.alpha,
            resamples=request.resamples,
            seed=request.seed,
        )
    if request.plot is not None:
        _draw(differences, tables, request.plot)
    worst_queries = [
        _find_worst_queries(difference, tables, collection, request.worst)
        for difference in differences
    ]
    if request.as_json:
        _print_json(request, collection, scores, differences, worst_queries)
    else:
        _print_report(request, collection, scores, differences, worst_queries)


def _print_json(
    request: CompareRequest,
    collection: Collection,
    scores: Mapping[str, _scores.Scores],
    differences: Sequence[Difference],
    worst_queries: Sequence[Sequence[WorstQuery]],
) -> None:
    """Print the means of runs, and the differences between them, as JSON.

    Args:
        request: the options of the command.
        collection: the queries and judgements.
        scores: label of a run -> its scores.
        differences: the differences, each between two runs in one measure.
        worst_queries: the queries with the largest losses, for each difference.
    """
    runs = {}
    for label, run_scores in scores.items():
        means = run_scores.means()[request.split]
        runs[label] = {
            "measures": {measure: asdict(mean) for measure, mean in means.items()},
            "conventions": run_scores.conventions[request.split],
        }
    comparisons = []
    for difference, queries in zip(differences, worst_queries, strict=True):
        comparison = difference.to_dict()
        comparison["worst"] = [asdict(query) for query in queries]
        comparisons.append(comparison)
    _common.print_json(
        {
            "collection": collection.name,
            "split": request.split,
            "queries": len(collection.qrels[request.split]),
            "alpha": request.alpha,
            "runs": runs,
            "comparisons": comparisons,
        },
    )


def _print_report(
    request: CompareRequest,
    collection: Collection,
    scores: Mapping[str, _scores.Scores],
    differences: Sequence[Difference],
    worst_queries: Sequence[Sequence[WorstQuery]],
) -> None:
    """Print the means of runs, the differences between them, and the largest losses as text.

    Lines between them say which rules of evaluation affect a run, such as judgements below 0.

    Args:
        request: the options of the command.
        collection: the queries and judgements.
        scores: label of a run -> its scores.
        differences: the differences, each between two runs in one measure.
        worst_queries: the queries with the largest losses, for each difference. Those of the first
            measure are printed.
    """
    _print_tables(collection, request.split, scores, differences)
    comparisons = "1 comparison" if len(differences) == 1 else f"{len(differences)} comparisons"
    typer.echo(
        f"* significant at {request.alpha:g} (paired randomisation test of {request.resamples:,} "
        f"sign flips, Holm-corrected over {comparisons})",
    )
    for label, run_scores in scores.items():
        conventions = _scores.describe_conventions(
            run_scores.conventions[request.split],
            run_scores.depth,
        )
        if conventions:
            typer.echo(f"{label}: {conventions}")
    for difference, queries in zip(differences, worst_queries, strict=True):
        if difference.measure == differences[0].measure and queries:
            _print_worst_queries(difference, queries)
    if request.plot is not None:
        typer.echo(f"plot: {request.plot}")


def _label_runs(paths: Sequence[Path]) -> list[str]:
    """Return the names of run files without extensions, or their paths if the names repeat.

    Raises:
        UsageError: if there are fewer than two files, or a file is repeated.
    """
    if len(paths) < 2 or len(set(paths)) < len(paths):
        raise UsageError(
            f"run: expected two files or more, each once, got {', '.join(map(str, paths))}.",
        )
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def _print_tables(
    collection: Collection,
    split: str,
    scores: Mapping[str, _scores.Scores],
    differences: Sequence[Difference],
) -> None:
    """Print a table of the runs' means, and a table of differences for each measure.

    Args:
        collection: the collection of the runs, for the title.
        split: the evaluated split.
        scores: label of a run -> its scores.
        differences: the differences, each between two runs in one measure.
    """
    means = {label: run_scores.means()[split] for label, run_scores in scores.items()}
    measures = list(next(iter(means.values())))
    rows = [
        [label, *(_scores.cell(run_means[measure]) for measure in measures)]
        for label, run_means in means.items()
    ]
    title = f"{collection.name}, {split}: {len(collection.qrels[split])} queries"
    _common.print_table(["run", *measures], rows, title, right_aligned=measures)
    runs = ("run", "over")
    values = ("difference", "wins", "losses", "p", "p (t-test)", "p (Holm)")
    for measure in measures:
        rows = [
            _format_difference(difference)
            for difference in differences
            if difference.measure == measure
        ]
        _common.print_table(
            runs + values,
            rows,
            f"differences in {measure}",
            right_aligned=values,
            wrapped=runs,
        )


def _format_difference(difference: Difference) -> list[str]:
    """Return the cells of a table row for a difference between two runs.

    The p-value after Holm's correction ends in ``*`` if the difference is significant.

    Args:
        difference: the mean difference in a measure, with wins and losses, and p-values.
    """
    mark = "*" if difference.different else " "  # the columns of numbers stay aligned
    return [
        difference.run,
        difference.over,
        _scores.cell(difference.difference, "+"),
        str(difference.wins),
        str(difference.losses),
        f"{difference.p_randomisation:.4f}",
        f"{difference.p_t:.4f}",
        f"{difference.p_holm:.4f}{mark}",
    ]


@dataclass(frozen=True)
class WorstQuery:
    """A query for which a run has a lower value of a measure than its baseline.

    Attributes:
        query: the id of the query.
        text: the text of the query.
        difference: the value of the run minus the value of the baseline.
        values: label of a run -> its value, with the baseline first.
    """

    query: str
    text: str
    difference: float
    values: dict[str, float]


def _find_worst_queries(
    difference: Difference,
    tables: Mapping[str, Table],
    collection: Collection,
    count: int,
) -> list[WorstQuery]:
    """Return the queries for which a run loses most to its baseline, in one measure.

    Args:
        difference: the comparison of the runs, with its queries in ascending order of difference.
        tables: label of a run -> its measures by query.
        collection: the collection with the texts of the queries.
        count: the maximum number of queries. Queries without a loss are left out.
    """
    losing_queries = [query for query, value in difference.by_query.items() if value < 0]
    return [
        WorstQuery(
            query=query,
            text=collection.queries[query],
            difference=difference.by_query[query],
            values={
                label: tables[label][query][difference.measure]
                for label in (difference.over, difference.run)
            },
        )
        for query in losing_queries[:count]
    ]


def _print_worst_queries(difference: Difference, queries: Sequence[WorstQuery]) -> None:
    """Print the queries with the largest losses of a run, with the values of both runs.

    Args:
        difference: the comparison of the runs in one measure.
        queries: the queries, with the largest loss first.
    """
    baseline = difference.over
    rows = [
        [
            query.query,
            _common.shorten(query.text, SHOWN_CELLS),
            f"{query.values[baseline]:.4f}",
            f"{query.values[difference.run]:.4f}",
            f"{query.difference:+.4f}",
        ]
        for query in queries
    ]
    texts = ("query", "text")
    values = (baseline, difference.run, "difference")
    _common.print_table(
        texts + values,
        rows,
        f"{difference.measure}: largest losses of {difference.run} to {baseline}",
        right_aligned=values,
        wrapped=texts,
    )


def _draw(differences: Sequence[Difference], tables: Mapping[str, Table], path: Path) -> None:
    """Draw a PNG of the first measure: a panel for each pair of runs, a point for each query.

    Points below the diagonal are queries for which the run loses to its baseline.

    Args:
        differences: the differences, each between two runs in one measure.
        tables: label of a run -> its measures by query.
        path: the file of the figure.
    """
    from tilefold._internal.figures import new_figure, save_figure

    measure = differences[0].measure
    panels = [difference for difference in differences if difference.measure == measure]
    n_columns = min(3, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    figure = new_figure((4 * n_columns, 4 * n_rows))
    all_axes = figure.subplots(n_rows, n_columns, squeeze=False).flat
    for axes, difference in zip(all_axes, panels, strict=False):
        baseline_table = tables[difference.over]
        run_table = tables[difference.run]
        x = [baseline_table[query][measure] for query in difference.by_query]
        y = [run_table[query][measure] for query in difference.by_query]
        # The runs are equal on the diagonal of the panel, because both axes have the same limits.
        axes.plot([0, 1], [0, 1], transform=axes.transAxes, color="0.7", linewidth=1)
        axes.scatter(x, y, s=12, alpha=0.5, linewidths=0)
        low = min(0, *x, *y)
        high = max(1, *x, *y)
        margin = 0.03 * (high - low)
        limits = (low - margin, high + margin)
        axes.set(xlabel=difference.over, ylabel=difference.run, xlim=limits, ylim=limits)
        mark = "*" if difference.different else ""
        axes.set_title(
            f"{measure}: {difference.difference.mean:+.4f}{mark}, {difference.wins} wins, "
            f"{difference.losses} losses",
        )
    for unused_axes in list(figure.axes)[len(panels) :]:
        unused_axes.remove()
    save_figure(figure, path)
