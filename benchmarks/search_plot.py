"""Draw how long a query takes by number of documents.

    python -m benchmarks.search_plot SEARCH.csv PICTURE.png

SEARCH.csv is a file of ``benchmarks.search``. On the left, lines are medians, and bands extend from
the 20th to the 99th percentile. On the right is the time to build each index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.paths import given_paths
from benchmarks.results_plot import machine
from tilefold._internal.figures import new_figure, save_figure
from tilefold.bench.results import read_csv

_COLORS = {"exact": "#2171b5", "seismic": "#d94801", "numba": "#6a51a3", "scipy": "#969696"}
# line styles of the settings of an engine
_STYLES = ("-", "--", ":", "-.")


def plot_search(results: str | Path, picture: str | Path) -> Path:
    """Draw the rows that passed their gates.

    Args:
        results: a CSV file of ``benchmarks.search``.
        picture: the PNG to write.

    Returns:
        The path of the picture.

    Raises:
        ValueError: if the file has no such row.
        ImportError: if matplotlib is not installed.
    """
    rows = [row for row in read_csv(Path(results)) if row["gate"] == "ok"]
    if not rows:
        raise ValueError(f"{results} must hold rows that passed their gate, got none.")
    figure = new_figure((11, 3.6))
    times, builds = figure.subplots(1, 2)
    drawn_engines: list[str] = []
    for name, line in _lines(rows).items():
        documents = [int(row["documents"]) for row in line]
        p20 = [float(row["p20_ms"]) for row in line]
        p50 = [float(row["p50_ms"]) for row in line]
        p99 = [float(row["p99_ms"]) for row in line]
        engine = line[0]["engine"]
        color = _COLORS.get(engine, "#252525")
        style = _STYLES[drawn_engines.count(engine)]
        drawn_engines.append(engine)
        times.plot(documents, p50, style, marker="o", markersize=3, color=color, label=name)
        times.fill_between(documents, p20, p99, color=color, alpha=0.12, linewidth=0)
        if style == "-" and all(row["build_s"] for row in line):
            builds.plot(
                documents,
                [float(row["build_s"]) for row in line],
                marker="o",
                markersize=3,
                color=color,
            )
    for axes, title in ((times, "one query, ms"), (builds, "building the index, s")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("documents", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.2)
    times.legend(fontsize=7)
    figure.suptitle(
        f"{machine(rows)}, one query at a time; bands: 20th to 99th percentile",
        fontsize=8,
    )
    return save_figure(figure, picture)


def _lines(rows: Sequence[Mapping[str, str]]) -> dict[str, list[Mapping[str, str]]]:
    """Return the rows of each engine and its settings, in the order of the number of documents."""
    lines: dict[str, list[Mapping[str, str]]] = {}
    for row in sorted(rows, key=lambda row: int(row["documents"])):
        name = row["engine"]
        if row["query_cut"]:
            name += f", query_cut {row['query_cut']}, heap_factor {row['heap_factor']}"
        lines.setdefault(name, []).append(row)
    return lines


if __name__ == "__main__":
    plot_search(*given_paths(__doc__, "csv", "picture"))
