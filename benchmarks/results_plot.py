"""Draw a CSV file of ``tilefold bench``: ``python -m benchmarks.results_plot FILE.csv
PICTURE.png``.
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

_SHOWN = ("eager", "compile", "compile-max-first", "tilefold")
_SHOWN_OF = {
    "entmax_attention": (
        "adasplash-v1-no-mask",
        "softmax-fa2",
        "softmax-cudnn",
        "tilefold",
        "tilefold-graph",
    ),
    "maxsim": ("eager", "compile", "late-interaction-kernels", "flash-maxsim", "tilefold"),
}
_SHAPES_OF = {
    "entmax_attention": "BxN, H=12, D=64",
    "maxsim": "queries and documents x tokens, D=128",
}
_PANELS = (
    ("forward_backward_p50_ms", "forward + backward, median ms"),
    ("forward_backward_peak_mib", "peak memory above the inputs, MiB"),
)
_PANELS_OF = {"entmax_attention": (("forward_p50_ms", "forward, median ms"), _PANELS[0])}


def plot_results(results: str | Path, picture: str | Path) -> Path:
    """Draw time and peak memory of every case in a CSV of ``tilefold bench``, ours beside the
    baselines.

    Args:
        results: the CSV.
        picture: the PNG to write; replaced atomically.

    Returns:
        The path written.

    Raises:
        ValueError: if the file holds no measured row.
        ImportError: if matplotlib is not installed.
    """
    rows = [
        row
        for row in read_csv(results)
        if row.get("status") == "ok" and row.get("impl") in _shown(row)
    ]
    if not rows:
        raise ValueError(f"{results} must hold measured rows of `tilefold bench`, got none.")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    shown = {impl: impl for impl in _shown(rows[0]) if any(row["impl"] == impl for row in rows)}
    figure = new_figure((11, 1.2 + 0.75 * len(cases)))
    panels = _PANELS_OF.get(rows[0].get("op", ""), _PANELS)
    for axes, (column, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        values = {(row["case"], row["impl"]): float(row[column]) for row in rows if row[column]}
        relative_bars(
            axes,
            {key: value for key, value in values.items() if value > 0},
            cases,
            shown,
            title,
        )
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(shown), fontsize=8)
    figure.suptitle(_conditions(rows), fontsize=8)
    return save_figure(figure, picture)


def _shown(row: Mapping[str, str]) -> tuple[str, ...]:
    return _SHOWN_OF.get(row.get("op", ""), _SHOWN)


def relative_bars(
    axes: Axes,
    values: Mapping[tuple[str, str], float],
    groups: Sequence[str],
    series: Mapping[str, str],
    title: str,
) -> None:
    """Bars of each group relative to its largest value, on an axis that starts at zero, with the
    values at their ends.

    Args:
        axes: where.
        values: by group and by series.
        groups: from top to bottom.
        series: the name of each in the legend.
        title: of the panel.
    """
    height = 0.8 / len(series)
    largest = {
        group: max((v for (g, _), v in values.items() if g == group), default=1.0)
        for group in groups
    }
    for place, (one, label) in enumerate(series.items()):
        present = [group for group in groups if (group, one) in values]
        positions = [
            groups.index(group) + (place - (len(series) - 1) / 2) * height for group in present
        ]
        bars = axes.barh(
            positions,
            [values[group, one] / largest[group] for group in present],
            height,
            label=label,
        )
        axes.bar_label(
            bars,
            [short_number(values[group, one]) for group in present],
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
    """The values of a column, each once."""
    return "/".join(dict.fromkeys(row[column] for row in rows if row[column]))


def machine(rows: Sequence[Mapping[str, str]]) -> str:
    """Device, driver and versions that the rows were measured with."""
    device, driver, cuda, triton, torch = (
        distinct(rows, c) for c in ("device", "driver", "cuda", "triton", "torch")
    )
    return f"{device}{f', driver {driver}, CUDA {cuda}, triton {triton}' if cuda else ''}, torch {torch}"


def _conditions(rows: Sequence[Mapping[str, str]]) -> str:
    op = distinct(rows, "op")
    commits = "/".join(commit[:7] for commit in distinct(rows, "commit").split("/"))
    return (
        f"{op} on {machine(rows)}, {distinct(rows, 'dtype')};\n"
        f"shapes {_SHAPES_OF.get(op, 'BxSxDxV')}; commit {commits}; bars relative to each shape's "
        "largest"
    )


if __name__ == "__main__":
    plot_results(*given_paths(__doc__, "csv", "picture"))
