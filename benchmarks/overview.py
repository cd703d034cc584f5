"""Draw the picture of the README from the committed results.

python -m benchmarks.overview PICTURE.png
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.paths import given_paths
from tilefold._internal.figures import new_figure, save_figure
from tilefold.bench.results import read_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results" / "nvidia-h200"
TILEFOLD_COLOR = "tab:blue"
BASELINE_COLOR = "lightgray"
# file, case, title, and the label of each implementation that is drawn
PANELS = (
    (
        "lsr_head.csv",
        "16x512x768x250002-dense",
        "SPLADE head of XLM-R\n16 texts x 512 tokens, V = 250,002",
        {
            "eager": "eager",
            "compile-max-first": "torch.compile,\nmax first",
            "tilefold": "tilefold",
        },
    ),
    (
        "maxsim.csv",
        "in-batch-64x1024-64x1024",
        "MaxSim, all pairs in batch\n64 x 64 texts x 1,024 tokens, D = 128",
        {
            "eager": "eager",
            "compile": "torch.compile",
            "late-interaction-kernels": "late-interaction-\nkernels",
            "tilefold": "tilefold",
        },
    ),
    (
        "entmax_attention.csv",
        "4x16384-correlated-causal",
        "Entmax attention, causal, 1.6% of blocks non-zero\n4 texts x 16,384 tokens, 12 heads of "
        "64",
        {
            "softmax-fa2": "softmax,\nFlashAttention-2",
            "softmax-cudnn": "softmax, cuDNN",
            "adasplash-v2": "AdaSplash 0.2.2",
            "tilefold": "tilefold",
        },
    ),
)


def draw(picture: str) -> None:
    """Draw time and memory of forward and backward, with a panel for each operator.

    Args:
        picture: the PNG to write.
    """
    figure = new_figure((12, 2.6))
    conditions: dict[str, None] = {}
    panels = zip(figure.subplots(1, len(PANELS)), PANELS, strict=True)
    for axes, (file, case, title, labels) in panels:
        rows = {
            row["impl"]: row
            for row in read_csv(RESULTS / file)
            if row["case"] == case and row["status"] == "ok"
        }
        drawn_rows = [rows[impl] for impl in labels]
        for row in drawn_rows:
            versions = f"torch {row['torch']}, Triton {row['triton']}"
            conditions[f"{row['device']}, {versions}, {row['dtype']}"] = None
        _draw_panel(axes, drawn_rows, list(labels.values()))
        axes.set_title(title, fontsize=9)
    figure.supxlabel(
        "forward + backward, median time and peak memory above the inputs; "
        + "; ".join(conditions),
        fontsize=8,
    )
    save_figure(figure, picture)


def _draw_panel(axes: Axes, rows: Sequence[Mapping[str, str]], labels: Sequence[str]) -> None:
    """Draw a bar for each row, with its time and memory at the end.

    Args:
        axes: the axes of the panel.
        rows: the rows of the results.
        labels: the label of each row.
    """
    times_ms = [float(row["forward_backward_p50_ms"]) for row in rows]
    colors = [TILEFOLD_COLOR if row["impl"] == "tilefold" else BASELINE_COLOR for row in rows]
    bars = axes.barh(list(labels), times_ms, color=colors)
    bar_labels = []
    for time_ms, row in zip(times_ms, rows, strict=True):
        memory_mib = row["forward_backward_peak_mib"]
        memory = f", {float(memory_mib):,.0f} MiB" if memory_mib else ""
        bar_labels.append(f"{time_ms:#.3g} ms{memory}")
    axes.bar_label(bars, bar_labels, padding=3, fontsize=8)
    # labels need space to the right of the longest bar
    axes.set_xlim(0, 1.75 * max(times_ms))
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.invert_yaxis()


if __name__ == "__main__":
    draw(*given_paths(__doc__, "picture"))
