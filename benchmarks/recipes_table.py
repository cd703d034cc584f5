"""Print the CSV of `benchmarks.recipes` as the table of benchmarks/notes/recipes.md.

Numbers are means over the seeds.

python -m benchmarks.recipes_table benchmarks/results/nvidia-h200/recipes.csv [--data scifact]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from tilefold.bench.results import read_csv

COLUMNS = (
    "recipe",
    "steps, seeds",
    "nDCG@10: start",
    "end",
    "R@100: start",
    "end",
    "terms q",
    "terms d",
    "ms",
)
# the first columns are text, the others numbers
N_TEXT_COLUMNS = 2


def main(argv: Sequence[str]) -> int:
    """Print one line per recipe, base model and number of steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("csv")
    parser.add_argument("--data", default="scifact")
    options = parser.parse_args(argv)
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in read_csv(options.csv):
        if row["data"] == options.data:
            groups.setdefault((row["recipe"], row["base"], row["steps"]), []).append(row)
    alignment = "---|" * N_TEXT_COLUMNS + "---:|" * (len(COLUMNS) - N_TEXT_COLUMNS)
    print(f"| {' | '.join(COLUMNS)} |\n|{alignment}")
    for (recipe, _, steps), rows in groups.items():
        cells = [f"`{recipe}`", f"{steps}, {len(rows)}", *figures(rows)]
        print(f"| {' | '.join(cells)} |")
    return 0


def figures(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the numbers of a line from its rows, one for each seed."""
    return [
        measure_cell(rows, "start_nDCG@10"),
        measure_cell(rows, "nDCG@10"),
        measure_cell(rows, "start_R@100"),
        measure_cell(rows, "R@100"),
        mean_cell(rows, "query_terms", digits=0),
        mean_cell(rows, "document_terms", digits=0),
        mean_cell(rows, "search_ms", digits=2),
    ]


def _values(rows: Sequence[dict[str, str]], name: str) -> list[float]:
    """Return the values of a column, without empty cells."""
    return [float(row[name]) for row in rows if row.get(name)]


def mean_cell(rows: Sequence[dict[str, str]], name: str, digits: int) -> str:
    """Return the mean of a column over the seeds, or ``""`` without a value."""
    values = _values(rows, name)
    return f"{statistics.fmean(values):.{digits}f}" if values else ""


def measure_cell(rows: Sequence[dict[str, str]], name: str) -> str:
    """Return the mean of a measure, and ``±`` its standard deviation if there are several seeds.

    Numbers have three decimals and no zero before the point.

    Args:
        rows: the rows of all seeds.
        name: the column of the measure.
    """
    values = _values(rows, name)
    if not values:
        return ""
    cell = f"{statistics.fmean(values):.3f}".replace("0.", ".", 1)
    if len(values) > 1:
        cell += f" ± {statistics.stdev(values):.3f}".replace("0.", ".")
    return cell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
