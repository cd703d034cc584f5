"""Turn a results file into a picture: ``python -m tilefold.bench.plots results.csv picture.png``."""

from __future__ import annotations

import csv
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilefold.bench.markdown import short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = ("eager", "compile", "compile-max-first", "tilefold")
_SHOWN_OF = {
    "entmax_attention": ("adasplash-v1-no-mask", "softmax-fa2", "softmax-cudnn", "tilefold", "tilefold-graph"),
    "maxsim": ("eager", "compile", "late-interaction-kernels", "flash-maxsim", "tilefold"),
}
_SHAPES_OF = {"entmax_attention": "BxN, H=12, D=64", "maxsim": "queries and documents x tokens, D=128"}
_PANELS = (
    ("forward_backward_p50_ms", "forward + backward, median ms"),
    ("forward_backward_peak_mib", "peak memory above the inputs, MiB"),
)
_PANELS_OF = {"entmax_attention": (("forward_p50_ms", "forward, median ms"), _PANELS[0])}


def plot_results(results: str | Path, picture: str | Path) -> Path:
    """Draw time and peak memory of every case in a CSV of ``tilefold bench``, ours beside the baselines.

    Args:
        results: the CSV.
        picture: the PNG to write; replaced atomically.

    Returns:
        The path written.

    Raises:
        ValueError: if the file holds no measured row.
        ImportError: if matplotlib is not installed.
    """
    with Path(results).open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("status") == "ok" and row.get("impl") in _shown(row)]
    if not rows:
        raise ValueError(f"{results} must hold measured rows of `tilefold bench`, got none.")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    panels = _PANELS_OF.get(rows[0].get("op", ""), _PANELS)
    figure = new_figure((11, 1.2 + 0.75 * len(cases)))
    for axes, (column, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        _bars(axes, rows, cases, column, title)
    names = sum(1 for impl in _shown(rows[0]) if any(row["impl"] == impl for row in rows))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=names, fontsize=8)
    figure.suptitle(_conditions(rows), fontsize=8)
    return save_figure(figure, picture)


def _shown(row: Mapping[str, str]) -> tuple[str, ...]:
    return _SHOWN_OF.get(row.get("op", ""), _SHOWN)


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure on the Agg canvas, outside pyplot's global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("plots need matplotlib; install it with: pip install 'tilefold[plot]'") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, picture: str | os.PathLike[str]) -> Path:
    """Write ``figure`` as a PNG, atomically; the folder is made."""
    target = Path(picture)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".png")
    os.close(handle)
    try:
        figure.savefig(temporary, dpi=150)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _bars(axes: Axes, rows: Sequence[Mapping[str, str]], cases: Sequence[str], column: str, title: str) -> None:
    """Bars relative to each case's largest value, on an axis that starts at zero, with the values at their ends."""
    shown = [impl for impl in _shown(rows[0]) if any(row["impl"] == impl for row in rows)]
    height = 0.8 / len(shown)
    values = {(row["case"], row["impl"]): float(row[column]) for row in rows if row[column] and float(row[column]) > 0}
    largest = {case: max((v for (c, _), v in values.items() if c == case), default=1.0) for case in cases}
    for place, impl in enumerate(shown):
        present = [case for case in cases if (case, impl) in values]
        positions = [cases.index(case) + (place - (len(shown) - 1) / 2) * height for case in present]
        shares = [values[case, impl] / largest[case] for case in present]
        bars = axes.barh(positions, shares, height, label=impl)
        axes.bar_label(bars, [short_number(values[case, impl]) for case in present], padding=2, fontsize=7)
    axes.set_xlim(0, 1.15)
    axes.set_xticks([])
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_title(title, fontsize=9)


def _conditions(rows: Sequence[Mapping[str, str]]) -> str:
    def values(column: str) -> str:
        return "/".join(dict.fromkeys(row[column] for row in rows if row[column]))

    gpu = f", driver {values('driver')}, CUDA {values('cuda')}, triton {values('triton')}" if values("cuda") else ""
    shapes = _SHAPES_OF.get(values("op"), "BxSxDxV")
    commits = "/".join(commit[:7] for commit in values("commit").split("/"))
    return (
        f"{values('op')} on {values('device')}{gpu}, torch {values('torch')}, {values('dtype')};\n"
        f"shapes {shapes}; commit {commits}; bars relative to each shape's largest"
    )


if __name__ == "__main__":
    plot_results(sys.argv[1], sys.argv[2])
