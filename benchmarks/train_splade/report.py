"""Table and picture of the training benchmark.

python -m benchmarks.train_splade.report FILE.csv [PNG]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.paths import given_paths
from benchmarks.results_plot import distinct, machine, relative_bars
from tilefold._internal.figures import new_figure, save_figure
from tilefold.bench.results import exponent, ratio, read_csv, short_number, spread

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from benchmarks.train_splade.options import TrainRow

# Sparton, arXiv 2603.25011: largest batch and speed of a step, relative to the plain head, by model
PAPER = {"bert-base": (1.33, 1.14), "xlmr-base": (26.0, 2.5)}
_COLUMNS = (
    "side",
    "batch",
    "step, ms",
    "x stock",
    "peak GiB",
    "largest batch",
    "x stock",
    "MiB/pair",
    "pairs/s",
    "x stock",
    "error loss / grad",
)
_PANELS = (
    ("largest_batch", "largest batch that fits"),
    ("step_p50_ms", "step at the common batch, median ms"),
    ("pairs_per_second", "pairs per second, each at its largest batch"),
)


def cell_title(row: TrainRow) -> str:
    """Return the title of a cell: the settings that its two rows share."""
    checkpointing = {"yes": "gradient checkpointing", "no": "no checkpointing"}[row.checkpointing]
    return (
        f"{row.model}, V={row.vocab}, D={row.hidden}, S={row.length} "
        f"({100 * row.valid_tokens:.0f}% valid), queries of "
        f"{row.query_length}, {checkpointing}, {row.dtype}, {row.memory_gib:g} GiB"
    )


def cell_table(rows: Sequence[TrainRow]) -> Table:
    """Create the table of a cell.

    Args:
        rows: the row of the stock head and the one of the fused head. They have no numbers if the
            heads differ.
    """
    from rich.table import Table

    table = Table(title=cell_title(rows[0]), title_justify="left", header_style="bold")
    for position, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if position == 0 else "right", no_wrap=True)
    stock = rows[0]
    for row in rows:
        error = f"{exponent(row.gate_loss_error)} / {exponent(row.gate_gradient_error)}"
        if row.status == "FAILED":
            table.add_row(row.side, row.status, *["-"] * (len(_COLUMNS) - 3), error, style="red")
            continue
        table.add_row(
            row.side,
            short_number(row.batch),
            spread(row.step_p50_ms, row.step_p20_ms, row.step_p80_ms),
            ratio(stock.step_p50_ms, row.step_p50_ms),
            short_number(row.peak_gib),
            f"{'>= ' if row.largest_capped == 'yes' else ''}{short_number(row.largest_batch)}",
            ratio(row.largest_batch, stock.largest_batch),
            short_number(row.mib_a_pair),
            short_number(row.pairs_per_second),
            ratio(row.pairs_per_second, stock.pairs_per_second),
            error,
        )
    return table


def print_cell(console: Console, rows: Sequence[TrainRow]) -> None:
    """Print the table of a cell, its notes, and a comparison with the paper's numbers.

    Args:
        console: the console that prints the lines.
        rows: the row of the stock head and the one of the fused head.
    """
    console.print(cell_table(rows))
    for row in rows:
        if row.note:
            console.print(f"  {row.side}: {row.status}: {row.note}", markup=False)
    claim = PAPER.get(rows[0].model)
    stock, fused = rows
    if claim is None or stock.status != "ok" or fused.status != "ok":
        return
    paper_batch, paper_speed = claim
    batch = _ratio(fused.largest_batch, stock.largest_batch)
    step_speed = _ratio(stock.step_p50_ms, fused.step_p50_ms)
    throughput = _ratio(fused.pairs_per_second, stock.pairs_per_second)
    for line in (
        _claim_line("batch", batch, paper_batch),
        _claim_line("speed of a step at the common batch", step_speed, paper_speed),
        _claim_line("pairs per second at the largest batches", throughput, paper_speed),
    ):
        console.print(line, markup=False)


def _claim_line(name: str, value: float | None, paper_value: float) -> str:
    """Compare a measured ratio with the paper's.

    Args:
        name: the name of the ratio.
        value: measured ratio of the fused head to the stock head. None if it was not measured.
        paper_value: the paper's ratio.
    """
    if value is None:
        result = "not measured"
    elif value > paper_value:
        result = "beaten"
    else:
        result = "MISSED"
    return f"  {name}: {short_number(value)} times stock; the paper has {paper_value:.3g}: {result}"


def plot_results(results: str | Path, picture: str | Path) -> Path:
    """Draw batch, step time and throughput of every cell as bars.

    Args:
        results: CSV of ``python -m benchmarks.train_splade``.
        picture: the PNG to write, which is replaced atomically.

    Returns:
        The path of the picture.

    Raises:
        ValueError: if the file holds no measured cell.
        ImportError: if matplotlib is not installed.
    """
    rows = [
        row
        for row in read_csv(results)
        if row.get("op") == "train-splade" and row["status"] == "ok"
    ]
    if not rows:
        raise ValueError(
            f"{results} must hold measured rows of `python -m benchmarks.train_splade`, got none.",
        )
    cells = list(dict.fromkeys(_cell_name(row) for row in rows))
    figure = new_figure((13, 1.4 + 0.6 * len(cells)))
    for axes, (column, panel_title) in zip(
        figure.subplots(1, len(_PANELS), sharey=True),
        _PANELS,
        strict=True,
    ):
        values = {(_cell_name(row), row["side"]): float(row[column]) for row in rows if row[column]}
        labels = {"stock": "plain head", "tilefold": "fused head"}
        relative_bars(axes, values, cells, labels, panel_title)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize=8,
    )
    title = f"training step of SPLADE on {machine(rows)}; commit {distinct(rows, 'commit')}"
    figure.suptitle(f"{title}; bars relative to each cell's larger value", fontsize=8)
    return save_figure(figure, picture)


def _cell_name(row: Mapping[str, str]) -> str:
    """Return the settings of a row's cell in two lines."""
    checkpointing = "checkpointing" if row["checkpointing"] == "yes" else "no checkpointing"
    kind = "" if row["documents"] == "full" else ", natural"
    memory = f"{float(row['memory_gib']):g} GiB"
    return f"{row['model']}, S={row['length']}{kind}\n{checkpointing}, {memory}, {row['dtype']}"


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Divide, or return None if a value is missing or the denominator is 0."""
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def markdown_table(results: str | Path) -> str:
    """Return the rows of a results file as a Markdown table.

    Args:
        results: CSV of ``python -m benchmarks.train_splade``.

    Raises:
        ValueError: if the file holds no rows of ``python -m benchmarks.train_splade``.
    """
    rows = [row for row in read_csv(results) if row.get("op") == "train-splade"]
    if not rows:
        raise ValueError(
            f"{results} must hold rows of `python -m benchmarks.train_splade`, got none.",
        )
    return "\n".join(_markdown_lines(rows)) + "\n"


def _markdown_lines(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table. A cell's name is only in its first row."""
    yield (
        "| cell | side | batch | step, ms | peak, GiB | largest batch | MiB per pair | pairs/s "
        "| status |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    previous = ""
    for row in rows:
        cell = _cell_name(row).replace("\n", ", ")
        numbers = [
            short_number(float(row[name]) if row[name] else None)
            for name in (
                "batch",
                "step_p50_ms",
                "peak_gib",
                "largest_batch",
                "mib_a_pair",
                "pairs_per_second",
            )
        ]
        status = "" if row["status"] == "ok" else row["status"]
        shown_cell = "" if cell == previous else cell
        yield f"| {' | '.join([shown_cell, row['side'], *numbers, status])} |"
        previous = cell


def main(arguments: Sequence[str]) -> None:
    """Print the Markdown table of a CSV, or draw its picture if a second path is given."""
    if len(arguments) > 1:
        plot_results(arguments[0], arguments[1])
    else:
        print(markdown_table(arguments[0]), end="")


if __name__ == "__main__":
    main(given_paths(__doc__, "csv", optional="picture"))
