"""Draw the picture of the README from the committed results: ``python -m benchmarks.overview
PICTURE.png``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.paths import given_paths
from tilefold._internal.figures import new_figure, save_figure
from tilefold.bench.results import read_csv

RESULTS = Path(__file__).parent / "results" / "nvidia-h200"
OURS, OTHERS = "tab:blue", "lightgray"
# file, case, title, and the implementations shown with their names
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
    figure = new_figure((12, 2.6))
    devices = set()
    for axes, (file, case, title, names) in zip(
        figure.subplots(1, len(PANELS)),
        PANELS,
        strict=True,
    ):
        found = (
            row for row in read_csv(RESULTS / file) if row["case"] == case and row["status"] == "ok"
        )
        rows = {row["impl"]: row for row in found}
        shown = [rows[impl] for impl in names]
        devices |= {
            f"{row['device']}, torch {row['torch']}, Triton {row['triton']}, {row['dtype']}"
            for row in shown
        }
        times = [float(row["forward_backward_p50_ms"]) for row in shown]
        colors = [OURS if impl == "tilefold" else OTHERS for impl in names]
        bars = axes.barh(list(names.values()), times, color=colors)
        memory = [
            f", {float(m):,.0f} MiB" if (m := row["forward_backward_peak_mib"]) else ""
            for row in shown
        ]
        axes.bar_label(
            bars,
            [f"{t:#.3g} ms{m}" for t, m in zip(times, memory, strict=True)],
            padding=3,
            fontsize=8,
        )
        axes.set_xlim(0, 1.75 * max(times))
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
    figure.supxlabel(
        "forward + backward, median time and peak memory above the inputs; " + "; ".join(devices),
        fontsize=8,
    )
    save_figure(figure, picture)


if __name__ == "__main__":
    draw(*given_paths(__doc__, "picture"))
