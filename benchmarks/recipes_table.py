"""Print the table of docs/recipes.md from the CSV of `benchmarks.recipes`, means over the seeds.

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


def main(argv: Sequence[str]) -> int:
    """Print one line per recipe and number of steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("csv")
    parser.add_argument("--data", default="scifact")
    options = parser.parse_args(argv)
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in read_csv(options.csv):
        if row["data"] == options.data:
            groups.setdefault((row["recipe"], row["base"], row["steps"]), []).append(row)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * 2}{'---:|' * (len(COLUMNS) - 2)}")
    for (recipe, _, steps), rows in groups.items():
        print(f"| {' | '.join([f'`{recipe}`', f'{steps}, {len(rows)}', *figures(rows)])} |")
    return 0


def figures(rows: Sequence[dict[str, str]]) -> list[str]:
    """The cells of one line; a measure of several seeds carries their standard deviation."""
    cells = [cell(rows, name, 3) for name in ("start_nDCG@10", "nDCG@10", "start_R@100", "R@100")]
    return (
        cells
        + [cell(rows, name, 0) for name in ("query_terms", "document_terms")]
        + [cell(rows, "search_ms", 2)]
    )


def cell(rows: Sequence[dict[str, str]], name: str, digits: int) -> str:
    """Mean, and ``±`` standard deviation of a measure over seeds; empty without a value."""
    values = [float(row[name]) for row in rows if row.get(name)]
    if not values:
        return ""
    text = f"{statistics.fmean(values):.{digits}f}".replace("0.", ".", 1 if digits == 3 else 0)
    spread = len(values) > 1 and digits == 3
    return text + (f" ± {statistics.stdev(values):.3f}".replace("0.", ".") if spread else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
