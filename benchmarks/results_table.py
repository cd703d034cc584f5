"""Print a CSV file of ``tilefold bench`` as a Markdown table.

python -m benchmarks.results_table FILE.csv
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
    """Return the rows of a results file as a Markdown table, followed by their conditions.

    Raises:
        ValueError: if the file has no rows of ``tilefold bench``.
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
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _cells(row: Mapping[str, str], case: str) -> list[str]:
    """Return the cells of a row. ``case`` is empty if it is that of the row before."""
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
    """Format the number in a CSV field, or ``-`` for an empty one."""
    return short_number(float(text) if text else None)


def _share(row: Mapping[str, str]) -> str:
    """Format the floor as a share of the time of a forward pass."""
    floor_ms = row["forward_floor_ms"]
    time_ms = row["forward_p50_ms"]
    if not floor_ms or not time_ms:
        return "-"
    return f"{100 * float(floor_ms) / float(time_ms):.0f}%"


def _conditions(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each distinct set of conditions, since rows may be of several runs."""
    distinct: dict[str, None] = {}
    for row in rows:
        machine = row["device"]
        if row["cuda"]:
            machine += f", driver {row['driver']}, CUDA {row['cuda']}, triton {row['triton']}"
        else:
            machine += f", {row['threads']} threads"
        dirty = " with local changes" if row["dirty"] == "yes" else ""
        distinct[
            f"{machine}; torch {row['torch']}, Python {row['python']}; commit "
            f"{row['commit']}{dirty}; {row['date']}; ceilings {_short(row['ceiling_tflops'])} "
            f"TFLOP/s ({row['dtype']}), {_short(row['ceiling_tbps'])} TB/s."
        ] = None
    return [f"Medians. {text}" for text in distinct]


if __name__ == "__main__":
    print(markdown_table(*given_paths(__doc__, "csv")), end="")
