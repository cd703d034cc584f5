"""Draw where the time of encoding and of a training step goes: ``python -m benchmarks.jobs_plot
RESULTS PICTURE.png``.

RESULTS is a folder with the files ``encode.csv`` and ``train.csv`` of ``benchmarks.encode`` and
``benchmarks.train``. Each bar is the time of 1,000 documents, or of a pair in a training step; its
dark part is the time in which a kernel ran on the GPU, where that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.paths import given_paths
from benchmarks.results_plot import machine
from tilefold._internal.figures import new_figure, save_figure
from tilefold.bench.results import read_csv, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ENCODE = {
    "stock encode_document": "stock",
    "encode_document, accelerated": "accelerated",
    "encode_collection, to Parquet": "to Parquet",
    "encoder and head alone": "encoder and head alone",
}
_TRAIN = {
    "stock": "stock",
    "padded": "padded, fused",
    "packed": "packed",
    "graphs": "packed, graphs",
    "compiled": "packed, compiled graphs",
}


class Bar(NamedTuple):
    """A time in ms, and the share of it in which the GPU was busy, if known."""

    label: str
    ms: float
    busy: float | None


def plot_jobs(results: str | Path, picture: str | Path) -> Path:
    """Draw the rows that passed their gates; the path written.

    Raises:
        ValueError: if a file holds no such row.
        ImportError: if matplotlib is not installed.
    """
    encode, train = (_passed(Path(results) / f"{name}.csv") for name in ("encode", "train"))
    panels = (
        (
            "1,000 documents, ms",
            _bars(encode, "what", _ENCODE, lambda row: 1e6 / float(row["docs_per_s"]), "gpu_busy"),
        ),
        (
            "a pair of a training step, ms",
            _bars(train, "side", _TRAIN, lambda row: 1e3 / float(row["pairs_per_s"]), "busy"),
        ),
    )
    figure = new_figure((11, 0.9 + 0.19 * max(len(bars) for _, bars in panels)))
    for axes, (title, bars) in zip(figure.subplots(1, 2), panels, strict=True):
        _draw(axes, bars, title)
    figure.suptitle(
        f"{machine(encode)}; dark: a kernel ran on the GPU (not measured where all is light)",
        fontsize=8,
    )
    return save_figure(figure, picture)


def _passed(path: Path) -> list[dict[str, str]]:
    rows = [row for row in read_csv(path) if row["gate"] == "ok"]
    if not rows:
        raise ValueError(f"{path} must hold rows that passed their gate, got none.")
    return rows


def _bars(
    rows: Sequence[Mapping[str, str]],
    by: str,
    names: Mapping[str, str],
    ms: Callable[[Mapping[str, str]], float],
    busy: str,
) -> list[Bar]:
    found = {(row["case"], row[by]): row for row in rows}
    several = [
        case
        for case in dict.fromkeys(row["case"] for row in rows)
        if sum(case == c for c, _ in found) > 1
    ]
    return [
        Bar(f"{case}: {label}", ms(row), float(row[busy]) if row[busy] else None)
        for case in several
        for name, label in names.items()
        if (row := found.get((case, name))) is not None
    ]


def _draw(axes: Axes, bars: Sequence[Bar], title: str) -> None:
    places = range(len(bars))
    drawn = axes.barh(places, [bar.ms for bar in bars], color="#9ecae1")
    axes.barh(places, [bar.ms * (bar.busy or 0) for bar in bars], color="#2171b5")
    axes.bar_label(drawn, [short_number(bar.ms) for bar in bars], padding=2, fontsize=7)
    axes.set_yticks(places, [bar.label for bar in bars], fontsize=7)
    axes.set_xlim(0, 1.15 * max(bar.ms for bar in bars))
    axes.tick_params(axis="x", labelsize=7)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)


if __name__ == "__main__":
    plot_jobs(*given_paths(__doc__, "results", "picture"))
