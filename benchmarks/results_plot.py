"""Draw a CSV file of ``tilefold bench``.

python -m benchmarks.results_plot FILE.csv PICTURE.png
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.paths import given_paths
from tilefold._internal.figures import new_figure, save_figure
from tilefold.bench.results import read_csv, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# implementations that are drawn, for all operators without others
_IMPLEMENTATIONS = ("eager", "compile", "compile-max-first", "tilefold")
_IMPLEMENTATIONS_OF = {
    "entmax_attention": (
        "adasplash-v1-no-mask",
        "softmax-fa2",
        "softmax-cudnn",
        "tilefold",
        "tilefold-graph",
    ),
    "maxsim": ("eager", "compile", "late-interaction-kernels", "flash-maxsim", "tilefold"),
}
# meaning of the sizes in the name of a case
_SHAPES_OF = {
    "entmax_attention": "BxN, H=12, D=64",
    "maxsim": "queries and documents x tokens, D=128",
}
# columns of the two panels, and their titles
_PANELS = (
    ("forward_backward_p50_ms", "forward + backward, median ms"),
    ("forward_backward_peak_mib", "peak memory above the inputs, MiB"),
)
_PANELS_OF = {"entmax_attention": (("forward_p50_ms", "forward, median ms"), _PANELS[0])}


def plot_results(results: str | Path, picture: str | Path) -> Path:
    """Draw time and peak memory of every case, of tilefold and of the baselines.

    Args:
        results: a CSV file of ``tilefold bench``.
        picture: the PNG to write, which is replaced atomically.

    Returns:
        The path of the picture.

    Raises:
        ValueError: if the file has no measured row.
        ImportError: if matplotlib is not installed.
    """
    rows = [
        row
        for row in read_csv(results)
        if row.get("status") == "ok" and row.get("impl") in _implementations(row)
    ]
    if not rows:
        raise ValueError(f"{results} must hold measured rows of `tilefold bench`, got none.")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    measured = {row["impl"] for row in rows}
    labels = {impl: impl for impl in _implementations(rows[0]) if impl in measured}
    figure = new_figure((11, 1.2 + 0.75 * len(cases)))
    panels = _PANELS_OF.get(rows[0].get("op", ""), _PANELS)
    for axes, (column, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        values = {(row["case"], row["impl"]): float(row[column]) for row in rows if row[column]}
        relative_bars(
            axes,
            {key: value for key, value in values.items() if value > 0},
            cases,
            labels,
            title,
        )
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.suptitle(_conditions(rows), fontsize=8)
    return save_figure(figure, picture)


def _implementations(row: Mapping[str, str]) -> tuple[str, ...]:
    """Return the implementations that are drawn for the operator of a row."""
    return _IMPLEMENTATIONS_OF.get(row.get("op", ""), _IMPLEMENTATIONS)


def relative_bars(
    axes: Axes,
    values: Mapping[tuple[str, str], float],
    groups: Sequence[str],
    series: Mapping[str, str],
    title: str,
) -> None:
    """Draw groups of bars, relative to the largest of their group, with values at their ends.

    Args:
        axes: the axes of the panel.
        values: lengths by group and series.
        groups: the names of the groups, from top to bottom.
        series: the labels of the series in the legend.
        title: the title of the panel.
    """
    height = 0.8 / len(series)
    largest: dict[str, float] = {}
    for (group, _), value in values.items():
        largest[group] = max(largest.get(group, 0.0), value)
    for number, (name, label) in enumerate(series.items()):
        # the bars of a group are centred at its position
        shift = (number - (len(series) - 1) / 2) * height
        present = [group for group in groups if (group, name) in values]
        positions = [groups.index(group) + shift for group in present]
        bars = axes.barh(
            positions,
            [values[group, name] / largest[group] for group in present],
            height,
            label=label,
        )
        axes.bar_label(
            bars,
            [short_number(values[group, name]) for group in present],
            padding=2,
            fontsize=7,
        )
    axes.set_xlim(0, 1.2)
    axes.set_xticks([])
    axes.set_yticks(range(len(groups)), list(groups), fontsize=7)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_title(title, fontsize=9)


def distinct(rows: Sequence[Mapping[str, str]], column: str) -> str:
    """Return the values of a column, each once, with slashes between them."""
    return "/".join(dict.fromkeys(row[column] for row in rows if row[column]))


def machine(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the devices, drivers and versions of the rows in words."""
    text = distinct(rows, "device")
    cuda = distinct(rows, "cuda")
    if cuda:
        text += f", driver {distinct(rows, 'driver')}, CUDA {cuda}"
        text += f", triton {distinct(rows, 'triton')}"
    return f"{text}, torch {distinct(rows, 'torch')}"


def _conditions(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the title of the picture: operator, machine, dtype, shapes and commits."""
    op = distinct(rows, "op")
    commits = "/".join(commit[:7] for commit in distinct(rows, "commit").split("/"))
    return (
        f"{op} on {machine(rows)}, {distinct(rows, 'dtype')};\n"
        f"shapes {_SHAPES_OF.get(op, 'BxSxDxV')}; commit {commits}; bars relative to each shape's "
        "largest"
    )


if __name__ == "__main__":
    plot_results(*given_paths(__doc__, "csv", "picture"))
