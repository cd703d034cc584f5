"""Turn a CSV file of ``tilefold bench`` into a Markdown table: ``python -m benchmarks.results_table
FILE.csv``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.paths import given_paths
from tilefold.bench.results import read_csv, short_number

_HEADER = (
    "case",
    "implementation",
    "forward, ms",
    "forward + backward, ms",
    "extra peak, MiB",
    "of floor",
    "status",
)


def markdown_table(path: str | Path) -> str:
    """The rows of a results file as a Markdown table, followed by the conditions they were measured
    under.

    Raises:
        ValueError: if the file holds no rows of ``tilefold bench``.
    """
    rows = read_csv(path)
    if not rows or "forward_p50_ms" not in rows[0]:
        raise ValueError(
            f"{path} must be a file that `tilefold bench` wrote, got {len(rows)} rows of another "
            "kind.",
        )
    lines = [_line(_HEADER), _line(["---", "---", *["---:"] * 4, "---"])]
    previous = ""
    for row in rows:
        case = f"{row['case']}, {row['dtype']}"
        lines.append(_line(_cells(row, case if case != previous else "")))
        previous = case
    return "\n".join([*lines, "", *_conditions(rows)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Mapping[str, str], case: str) -> list[str]:
    return [
        case,
        row["impl"],
        _short(row["forward_p50_ms"]),
        _short(row["forward_backward_p50_ms"]),
        _short(row["forward_backward_peak_mib"]),
        _share(row),
        "" if row["status"] == "ok" else row["status"],
    ]


def _short(text: str) -> str:
    return short_number(float(text) if text else None)


def _share(row: Mapping[str, str]) -> str:
    floor, time = row["forward_floor_ms"], row["forward_p50_ms"]
    return f"{100 * float(floor) / float(time):.0f}%" if floor and time else "-"


def _conditions(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for each distinct set of conditions, so that rows of different runs are not taken
    for one.
    """
    distinct: dict[str, None] = {}
    for row in rows:
        gpu = (
            f", driver {row['driver']}, CUDA {row['cuda']}, triton {row['triton']}"
            if row["cuda"]
            else ""
        )
        where = f"{row['device']}{gpu}" if gpu else f"{row['device']}, {row['threads']} threads"
        dirty = " with local changes" if row["dirty"] == "yes" else ""
        distinct[
            f"{where}; torch {row['torch']}, Python {row['python']}; commit "
            f"{row['commit']}{dirty}; {row['date']}; "
            f"ceilings {_short(row['ceiling_tflops'])} TFLOP/s ({row['dtype']}), "
            f"{_short(row['ceiling_tbps'])} TB/s."
        ] = None
    return [f"Medians. {text}" for text in distinct]


if __name__ == "__main__":
    print(markdown_table(*given_paths(__doc__, "csv")), end="")
