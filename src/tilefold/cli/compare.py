"""``tilefold compare``: which of several runs differ, by how much, and on which queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilefold import retrieval
from tilefold.cli import _common, _options, _scores
from tilefold.cli._common import UsageError, Values
from tilefold.cli._options import Place, Text, Words, argument, flag, option, preset, required

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.evaluation.significance import Difference, Table

SHOWN_CELLS = 60


def compare(
    run: list[Path] = argument(
        "TREC run files, two or more; the others are compared with the first.",
        default=...,
    ),
    data: str = required(_common.DATA_HELP),
    split: str = preset("test", "Split of the judgements."),
    drop_unknown: bool = flag(_common.DROP_UNKNOWN_HELP, "--drop-unknown"),
    measure: Words = option(
        "Measure in the notation of ir-measures, by default nDCG@10; may be repeated.",
    ),
    all_pairs: bool = flag("Compare every two runs.", "--all-pairs"),
    alpha: float = preset(
        0.05,
        "Level of significance: the chance of calling any two equal runs different.",
    ),
    resamples: int = preset(
        9999,
        "Sign flips of the randomisation test, and samples of the bootstrap.",
    ),
    worst: int = preset(10, "Queries to show that lose most, with their texts.", min=0),
    seed: int = preset(0, "Equal seeds give equal numbers.", min=0),
    identical_ids: Text = option(
        _scores.IDENTICAL_IDS_HELP,
        metavar=_scores.IDENTICAL_IDS,
    ),
    plot: Place = option("PNG to draw: the first measure of each query, run against run."),
    overwrite: bool = flag(_common.OVERWRITE_HELP, "--overwrite"),
    as_json: bool = flag("Everything as JSON on stdout.", "--json"),
) -> None:
    """Compare runs over the same queries: differences, paired tests, wins and losses, and the
    queries that lose most.

    A difference is marked * if the paired randomisation test, after Holm's correction over all
    comparisons of the table, calls it significant.
    """
    measures, deepest = _scores.check_measures(measure or ["nDCG@10"])
    _scores.check_output_file(
        plot,
        "--plot",
        _scores.PICTURE,
        *run,
        *_scores.files_of_collection(data),
        overwrite=overwrite,
    )
    if plot is not None:
        from tilefold._internal.figures import new_figure

        new_figure((1, 1))  # says what to install
    named = dict(zip(_labels(run), (_scores.read_run(path, "run") for path in run), strict=True))
    collection, _ = _scores.load_splits(data, [split], drop_unknown, also=())
    _scores.check_runs(list(named.values()), collection, [split])
    ignores_identical_ids = _scores.ignores_identical_ids(identical_ids, collection, [split])
    scores = {
        name: _scores.score(each, collection, [split], measures, deepest, ignores_identical_ids)
        for name, each in named.items()
    }
    tables = {name: each.tables[split] for name, each in scores.items()}
    with _options.as_options(
        "alpha",
        "resamples",
        tables="--split",
        **{"queries to compare runs on": "--split"},
    ):
        found = retrieval.compare(
            tables,
            measures,
            all_pairs=all_pairs,
            alpha=alpha,
            resamples=resamples,
            seed=seed,
        )
    if plot is not None:
        _draw(found, tables, plot)
    lost = [_worst(each, tables, collection, worst) for each in found]
    if as_json:
        rows = [
            each.to_dict() | {"worst": queries} for each, queries in zip(found, lost, strict=True)
        ]
        known = {
            "collection": collection.name,
            "split": split,
            "queries": len(collection.qrels[split]),
            "alpha": alpha,
        }
        runs = {}
        for name, told in (
            (name, _scores.facts(collection, each)) for name, each in scores.items()
        ):
            runs[name] = {
                "measures": told["errors"][split],
                "conventions": told["conventions"][split],
            }
        _common.print_json(known | {"runs": runs, "comparisons": rows})
        return
    _print(collection, split, scores, found)
    typer.echo(
        f"* different at {alpha:g}: paired randomisation ({resamples:,} sign flips), Holm over {len(found)}",
    )
    for name, each in scores.items():
        if said := _scores.said_of(each.conventions[split]):
            typer.echo(f"{name}: {said}")
    for each, queries in zip(found, lost, strict=True):
        if each.measure == measures[0] and queries:
            _print_worst(each, queries)
    if plot is not None:
        typer.echo(f"plot: {plot}")


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
) -> list[Values]:
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


def _print_worst(found: Difference, queries: Sequence[Values]) -> None:
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
            f"{each.measure}: {each.difference.mean:+.4f}{mark}, {each.wins} wins, {each.losses} losses",
        )
    for axes in list(figure.axes)[len(shown) :]:
        axes.remove()
    save_figure(figure, path)
