"""Draw where the time of encoding and of a training step goes.

    python -m benchmarks.jobs_plot RESULTS PICTURE.png

RESULTS is a folder with the files ``encode.csv`` and ``train.csv`` of ``benchmarks.encode`` and
``benchmarks.train``. A bar is the time of 1,000 documents, or of a pair in a training step. Its
dark part is the time in which a kernel ran on the GPU, where that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.paths import given_paths
from benchmarks.results_plot import machine
from tilefold._internal.figures import new_figure, save_figure
from tilefold.bench.results import read_csv, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# labels of the rows of encode.csv, by the column "what"
_ENCODE_LABELS = {
    "stock encode_document": "stock",
    "encode_document, accelerated": "accelerated",
    "encode_collection, to Parquet": "to Parquet",
    "encoder and head alone": "encoder and head alone",
}
# labels of the rows of train.csv, by the column "side"
_TRAIN_LABELS = {
    "stock": "stock",
    "padded": "padded, fused",
    "packed": "packed",
    "graphs": "packed, graphs",
    "compiled": "packed, compiled graphs",
}


class Bar(NamedTuple):
    """A bar of the picture.

    Attributes:
        label: case and way.
        ms: the time in milliseconds.
        busy: the share of the time in which the GPU was busy, or None if it was not measured.
    """

    label: str
    ms: float
    busy: float | None


def plot_jobs(results: str | Path, picture: str | Path) -> Path:
    """Draw the rows that passed their gates.

    Args:
        results: the folder with encode.csv and train.csv.
        picture: the PNG to write.

    Returns:
        The path of the picture.

    Raises:
        ValueError: if a file holds no such row.
        ImportError: if matplotlib is not installed.
    """
    encode_rows = _passed_rows(Path(results) / "encode.csv")
    train_rows = _passed_rows(Path(results) / "train.csv")
    encode_bars = _bars(
        encode_rows,
        _ENCODE_LABELS,
        label_column="what",
        rate_column="docs_per_s",
        busy_column="gpu_busy",
        count=1000,
    )
    train_bars = _bars(
        train_rows,
        _TRAIN_LABELS,
        label_column="side",
        rate_column="pairs_per_s",
        busy_column="busy",
        count=1,
    )
    panels = (
        ("1,000 documents, ms", encode_bars),
        ("a pair of a training step, ms", train_bars),
    )
    figure = new_figure((11, 0.9 + 0.19 * max(len(bars) for _, bars in panels)))
    for axes, (title, bars) in zip(figure.subplots(1, 2), panels, strict=True):
        _draw(axes, bars, title)
    figure.suptitle(
        f"{machine(encode_rows)}; dark: a kernel ran on the GPU (not measured where all is light)",
        fontsize=8,
    )
    return save_figure(figure, picture)


def _passed_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows that passed their gate, or raise ``ValueError`` if there are none."""
    rows = [row for row in read_csv(path) if row["gate"] == "ok"]
    if not rows:
        raise ValueError(f"{path} must hold rows that passed their gate, got none.")
    return rows


def _bars(
    rows: Sequence[Mapping[str, str]],
    labels: Mapping[str, str],
    *,
    label_column: str,
    rate_column: str,
    busy_column: str,
    count: int,
) -> list[Bar]:
    """Return the bars of all cases that have several rows.

    Args:
        rows: the rows of the results.
        labels: the labels of the rows that are drawn, in their order.
        label_column: the column with the keys of ``labels``.
        rate_column: the column with a rate per second.
        busy_column: the column with the share of the time in which the GPU was busy.
        count: the number of documents or pairs whose time a bar shows.
    """
    bars = []
    for case in dict.fromkeys(row["case"] for row in rows):
        case_rows = {row[label_column]: row for row in rows if row["case"] == case}
        if len(case_rows) < 2:
            continue
        for name, label in labels.items():
            if name not in case_rows:
                continue
            row = case_rows[name]
            milliseconds = 1e3 * count / float(row[rate_column])
            busy = float(row[busy_column]) if row[busy_column] else None
            bars.append(Bar(f"{case}: {label}", milliseconds, busy))
    return bars


def _draw(axes: Axes, bars: Sequence[Bar], title: str) -> None:
    """Draw the bars of a panel, with their times at the ends.

    Args:
        axes: the panel.
        bars: the bars, from top to bottom.
        title: the title of the panel.
    """
    positions = range(len(bars))
    drawn_bars = axes.barh(positions, [bar.ms for bar in bars], color="#9ecae1")
    axes.barh(positions, [bar.ms * (bar.busy or 0) for bar in bars], color="#2171b5")
    axes.bar_label(drawn_bars, [short_number(bar.ms) for bar in bars], padding=2, fontsize=7)
    axes.set_yticks(positions, [bar.label for bar in bars], fontsize=7)
    axes.set_xlim(0, 1.15 * max(bar.ms for bar in bars))
    axes.tick_params(axis="x", labelsize=7)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)


if __name__ == "__main__":
    plot_jobs(*given_paths(__doc__, "results", "picture"))
