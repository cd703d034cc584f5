"""``tilefold compare``: which of several runs differ, by how much, and on which queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
            "TREC run files, two or more; the others are compared with the first.",
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
            "Compare every two runs.",
            "--all-pairs",
        ),
    ] = False
    alpha: Annotated[
        float,
        option(
            "Level of significance: the chance of calling any two equal runs different.",
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
            "Queries to show that lose most, with their texts.",
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
            "PNG to draw: the first measure of each query, run against run.",
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
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        if self.plot is None:
            refuse_options({"--overwrite": self.overwrite}, "goes with --plot")


def compare(request: CompareRequest) -> None:
    """Compare runs over the same queries: differences, paired tests, wins and losses, and the
    queries that lose most.

    A difference is marked * if the paired randomisation test, after Holm's correction over all
    comparisons of the table, calls it significant.

    Example:
        tilefold compare bm25.trec splade.trec --data DATA
    """
    measures, deepest = _scores.check_measures(request.measure or ["nDCG@10"])
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

        new_figure((1, 1))  # says what to install
    named = dict(
        zip(
            _labels(request.run),
            (_scores.read_run(path, "run") for path in request.run),
            strict=True,
        )
    )
    collection, _ = _scores.load_splits(
        request.data, [request.split], request.drop_unknown, also=()
    )
    _scores.check_runs(list(named.values()), collection, [request.split])
    ignores_identical_ids = _scores.ignores_identical_ids(
        request.identical_ids, collection, [request.split]
    )
    scores = {
        name: _scores.score(
            each, collection, [request.split], measures, deepest, ignores_identical_ids
        )
        for name, each in named.items()
    }
    tables = {name: each.tables[request.split] for name, each in scores.items()}
    with _options.option_errors(
        alpha="--alpha",
        resamples="--resamples",
        tables="--split",
        **{"queries to compare runs on": "--split"},
    ):
        found = retrieval.compare(
            tables,
            measures,
            all_pairs=request.all_pairs,
            alpha=request.alpha,
            resamples=request.resamples,
            seed=request.seed,
        )
    if request.plot is not None:
        _draw(found, tables, request.plot)
    lost = [_worst(each, tables, collection, request.worst) for each in found]
    if request.as_json:
        rows = [
            each.to_dict() | {"worst": queries} for each, queries in zip(found, lost, strict=True)
        ]
        known = {
            "collection": collection.name,
            "split": request.split,
            "queries": len(collection.qrels[request.split]),
            "alpha": request.alpha,
        }
        runs = {}
        for name, told in (
            (name, _scores.facts(collection, each)) for name, each in scores.items()
        ):
            runs[name] = {
                "measures": told["errors"][request.split],
                "conventions": told["conventions"][request.split],
            }
        _common.print_json(known | {"runs": runs, "comparisons": rows})
        return
    _print(collection, request.split, scores, found)
    typer.echo(
        f"* different at {request.alpha:g}: paired randomisation ({request.resamples:,} sign "
        f"flips), Holm over {len(found)}",
    )
    for name, each in scores.items():
        if said := _scores.said_of(each.conventions[request.split]):
            typer.echo(f"{name}: {said}")
    for each, queries in zip(found, lost, strict=True):
        if each.measure == measures[0] and queries:
            _print_worst(each, queries)
    if request.plot is not None:
        typer.echo(f"plot: {request.plot}")


def _labels(paths: Sequence[Path]) -> list[str]:
    """Names of files without their endings, or whole paths where those are not unique."""
    if len(set(paths)) < max(2, len(paths)):
        raise UsageError(
            f"run: expected two files or more, each once, got {', '.join(map(str, paths))}.",
        )
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def _print(
    collection: Collection,
    split: str,
    scores: dict[str, _scores.Scores],
    found: Sequence[Difference],
) -> None:
    means = {name: each.means()[split] for name, each in scores.items()}
    measures = list(next(iter(means.values())))
    rows = [
        [name, *(_scores.cell(row[measure]) for measure in measures)] for name, row in means.items()
    ]
    title = f"{collection.name}, {split}: {len(collection.qrels[split])} queries"
    _common.print_table(["run", *(f"{name}>" for name in measures)], rows, title)
    columns = ["run", "over", "difference>", "wins>", "losses>", "p>", "p, t>", "p, Holm>"]
    for measure in measures:
        rows = []
        for each in (each for each in found if each.measure == measure):
            p_values = [f"{p:.4f}" for p in (each.p_randomisation, each.p_t, each.p_holm)]
            p_values[-1] += "*" if each.different else " "
            difference = _scores.cell(each.difference, "+")
            rows.append(
                [each.run, each.over, difference, str(each.wins), str(each.losses), *p_values],
            )
        _common.print_table(columns, rows, f"differences in {measure}", fold=("run", "over"))


def _worst(
    found: Difference,
    tables: Mapping[str, Table],
    collection: Collection,
    count: int,
) -> list[dict[str, Any]]:
    """The queries that lose most, with their texts and values; those that lose nothing are left
    out.
    """
    lost = [query for query, value in found.by_query.items() if value < 0][:count]
    return [
        {
            "query": query,
            "text": collection.queries[query],
            "difference": found.by_query[query],
            "values": {
                name: tables[name][query][found.measure] for name in (found.over, found.run)
            },
        }
        for query in lost
    ]


def _print_worst(found: Difference, queries: Sequence[dict[str, Any]]) -> None:
    rows = []
    for row in queries:
        values = [f"{value:.4f}" for value in row["values"].values()]
        rows.append(
            [
                row["query"],
                _common.shorten(row["text"], SHOWN_CELLS),
                *values,
                f"{row['difference']:+.4f}",
            ],
        )
    title = f"{found.measure}: where {found.run} loses most to {found.over}"
    columns = ("query", "text", f"{found.over}>", f"{found.run}>", "difference>")
    _common.print_table(columns, rows, title, fold=("query", "text"))


def _draw(found: Sequence[Difference], tables: Mapping[str, Table], path: Path) -> None:
    """Scatter of the first measure, a panel for each two runs and a point for each query."""
    from tilefold._internal.figures import new_figure, save_figure

    shown = [each for each in found if each.measure == found[0].measure]
    across = min(3, len(shown))
    down = -(-len(shown) // across)
    figure = new_figure((4 * across, 4 * down))
    for axes, each in zip(figure.subplots(down, across, squeeze=False).flat, shown, strict=False):
        x, y = (
            [tables[name][query][each.measure] for query in each.by_query]
            for name in (each.over, each.run)
        )
        axes.plot([0, 1], [0, 1], transform=axes.transAxes, color="0.7", linewidth=1)
        axes.scatter(x, y, s=12, alpha=0.5, linewidths=0)
        low, high = min(0, *x, *y), max(1, *x, *y)
        limits = low - 0.03 * (high - low), high + 0.03 * (high - low)
        axes.set(xlabel=each.over, ylabel=each.run, xlim=limits, ylim=limits)
        mark = "*" if each.different else ""
        axes.set_title(
            f"{each.measure}: {each.difference.mean:+.4f}{mark}, {each.wins} wins, {each.losses} "
            "losses",
        )
    for axes in list(figure.axes)[len(shown) :]:
        axes.remove()
    save_figure(figure, path)
