"""Measure the largest batch and the time of a SPLADE training step, with both heads in one run.

Sparton (arXiv 2603.25011) claims larger batches and faster steps at V = 30,522 and V = 250,002. The
step measured here is the one of sentence-transformers' trainer. The two sides differ in
``accelerate(model)`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.train_data import load_tokenizer
from benchmarks.train_splade.memory import LargestBatch, Meter, fits, largest_batch, release
from benchmarks.train_splade.options import TrainOptions, TrainRow
from benchmarks.train_splade.setting import (
    Batches,
    ModelSize,
    build_encoder,
    model_size,
    text_pairs,
)
from benchmarks.train_splade.step import (
    BF16_LOSS_BUDGET,
    SIDES,
    GateOutcome,
    Side,
    TrainingStep,
    check_sides,
    head_of,
    set_checkpointing,
    time_steps,
)
from tilefold.bench.timing import Timing

# valid tokens of the documents that both sides are compared with
_GATE_TOKENS = (96, 61, 33, 8)
# turns of each side at the common batch
_ROUNDS = 2
# the next batch to try where the largest does not fit again, relative to it
_SHRINK = 0.97


@dataclass
class _Cell:
    """A prepared model with the texts of one length.

    Attributes:
        encoder: a SparseEncoder, with or without checkpointing.
        step: training step of the encoder.
        batches: batches of the texts.
        meter: the meter of the memory of a step.
        options: the options of the run.
    """

    encoder: Any
    step: TrainingStep
    batches: Batches
    meter: Meter
    options: TrainOptions

    def run(self, batch: int) -> Tensor:
        """Train on a batch of ``batch`` pairs, and return the loss."""
        return self.step(self.batches.inputs(batch))

    def peak(self, batch: int) -> int | None:
        """Return the peak memory of a step in bytes, or None if it does not fit."""
        peak_bytes = self.meter.peak(partial(self.run, batch))
        self.step.forget()
        return peak_bytes

    def peak_and_loss(self, batch: int) -> tuple[int | None, float | None]:
        """Return the peak memory of a step in bytes, and its loss. Both are None if it fails."""
        losses: list[Tensor] = []
        peak_bytes = self.meter.peak(lambda: losses.append(self.run(batch)))
        if peak_bytes is None or not losses:
            return peak_bytes, None
        return peak_bytes, float(losses[0])


def run(
    options: TrainOptions,
    on_rows: Callable[[list[TrainRow]], None] = lambda rows: None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[TrainRow]:
    """Measure every cell: each model, length and choice of checkpointing.

    Args:
        options: the options of the run.
        on_rows: a function that is called with the two rows of a finished cell.
        progress: a function that is called with a line about the running measurement.

    Returns:
        The rows of all cells: one of the stock head and one of the fused head for each.

    Raises:
        ValueError: if the model is unknown, or a length, batch, limit or tokenizer is invalid.
    """
    from tilefold.retrieval.data.datasets import load_collection

    sizes = [model_size(name) for name in options.models]
    options.check()
    collection = load_collection(options.data)
    tokenizer = load_tokenizer(None if options.tokenizer is None else Path(options.tokenizer))
    source = "MiniLM" if options.tokenizer is None else Path(options.tokenizer).name
    pairs = {
        length: text_pairs(collection, length, natural=options.natural)
        for length in options.lengths
    }
    rows: list[TrainRow] = []
    for size in sizes:
        progress(f"{size.name}: making the model")
        for cell_rows in _model_rows(size, tokenizer, source, pairs, options, progress):
            rows += cell_rows
            on_rows(cell_rows)
    return rows


def _model_rows(
    size: ModelSize,
    tokenizer: Any,
    source: str,
    pairs: Mapping[int, list[tuple[str, str]]],
    options: TrainOptions,
    progress: Callable[[str], None],
) -> Iterator[list[TrainRow]]:
    """Measure each cell of one model, which is freed at the end.

    Args:
        size: the model's size.
        tokenizer: the tokenizer of the model.
        source: the name of the tokenizer, for the rows.
        pairs: (query, document) texts by the length of documents.
        options: the options of the run.
        progress: a function that is called with a line about the running measurement.

    Yields:
        The two rows of each cell. They have no numbers if the heads differ.
    """
    with _prepared(size, tokenizer, pairs, options, progress) as (cells, gate):
        for length, cell in cells:
            for checkpointing in options.checkpointing:
                set_checkpointing(cell.encoder, checkpointing)
                rows = [
                    _row(size, cell, length, checkpointing, side, source, gate) for side in SIDES
                ]
                if not gate.failures:
                    mode = "with" if checkpointing else "no"
                    name = f"{size.name}, S={length}, {mode} checkpointing"
                    _measure(cell, rows, partial(_report_progress, progress, name))
                yield rows


def _report_progress(progress: Callable[[str], None], name: str, text: str) -> None:
    """Report the running measurement of a cell.

    Args:
        progress: the function that shows a line.
        name: the name of the cell.
        text: the running measurement.
    """
    progress(f"{name}: {text}")


@contextmanager
def _prepared(
    size: ModelSize,
    tokenizer: Any,
    pairs: Mapping[int, list[tuple[str, str]]],
    options: TrainOptions,
    progress: Callable[[str], None],
) -> Iterator[tuple[Iterator[tuple[int, _Cell]], GateOutcome]]:
    """Build a model and its trainer, and compare the stock head with the fused one.

    Args:
        size: the model's size.
        tokenizer: the tokenizer of the model.
        pairs: (query, document) texts by the length of documents.
        options: the options of the run.
        progress: a function that is called with a line about the running measurement.

    Yields:
        Lengths with their cells, which are prepared one at a time, and the outcome of the
        comparison.
    """
    from tilefold.recipes.loading import quiet_libraries

    device = options.device
    release(device, collect=True)  # the model before this one
    meter = Meter(device, options.memory_gib)
    steps: list[TrainingStep] = []
    try:
        with quiet_libraries():
            encoder = build_encoder(size, tokenizer, device, max(options.lengths))

            def make_step() -> TrainingStep:
                """Create the trainer, which is closed at the end."""
                steps.append(TrainingStep(encoder, bf16=options.autocasts))
                return steps[0]

            progress(f"{size.name}: comparing the heads")
            n_compared = len(_GATE_TOKENS)
            shortest_pairs = next(iter(pairs.values()))[:n_compared]
            compared = Batches(encoder, shortest_pairs, max(_GATE_TOKENS), device)
            gate = check_sides(encoder, _ragged(compared.inputs(n_compared)), make_step)
            yield _cells(encoder, steps[0], pairs, meter, options), gate
    finally:
        for step in steps:
            step.close()
        meter.close()


def _cells(
    encoder: Any,
    step: TrainingStep,
    pairs: Mapping[int, list[tuple[str, str]]],
    meter: Meter,
    options: TrainOptions,
) -> Iterator[tuple[int, _Cell]]:
    """Yield each length of documents with its cell, prepared when it is asked for.

    Args:
        encoder: the model.
        step: its training step.
        pairs: (query, document) texts by the length of documents.
        meter: measures the memory of a step.
        options: the options of the run.
    """
    for length, texts in pairs.items():
        batches = Batches(encoder, texts, length, options.device)
        yield length, _Cell(encoder, step, batches, meter, options)


def _ragged(inputs: dict[str, Any]) -> dict[str, Any]:
    """Truncate documents to different lengths, so that heads are compared with padding."""
    mask = inputs["document_attention_mask"].clone()
    for row, valid in enumerate(_GATE_TOKENS[: mask.size(0)]):
        mask[row, valid:] = 0
    return {**inputs, "document_attention_mask": mask}


def _row(
    size: ModelSize,
    cell: _Cell,
    length: int,
    checkpointing: bool,
    side: Side,
    source: str,
    gate: GateOutcome,
) -> TrainRow:
    """Return the row of one side of a cell, without measured numbers.

    Args:
        size: the model's size.
        cell: the cell.
        length: the tokens of a document.
        checkpointing: whether gradient checkpointing is on.
        side: the head.
        source: the name of the tokenizer.
        gate: outcome of the comparison of both heads.
    """
    return TrainRow(
        model=size.name,
        vocab=size.vocab,
        hidden=size.hidden,
        layers=size.layers,
        length=length,
        query_length=cell.batches.shape[0],
        checkpointing="yes" if checkpointing else "no",
        documents="natural" if cell.options.natural else "full",
        dtype="bf16 autocast" if cell.options.autocasts else "fp32",
        memory_gib=round(cell.meter.limit_gib, 1),
        side=side,
        valid_tokens=round(cell.batches.valid, 3),
        tokenizer=source,
        data=cell.options.data if cell.options.data == "pydocs" else Path(cell.options.data).name,
        status="FAILED" if gate.failures else "ok",
        note="; ".join(gate.failures),
        gate_loss_error=gate.loss[f"{side} step"],
        gate_gradient_error=gate.gradient[f"{side} step"],
    )


def _measure(cell: _Cell, rows: Sequence[TrainRow], progress: Callable[[str], None]) -> None:
    """Fill in both rows of one cell.

    Args:
        cell: the cell.
        rows: the rows of the sides, in the order of :data:`SIDES`.
        progress: a function that is called with a line about the running measurement.
    """
    for side, row in zip(SIDES, rows, strict=True):
        progress(f"largest batch, {side}")
        with head_of(cell.encoder, side):
            # loads libraries and compiled kernels, and creates the optimizer's state
            cell.peak(1)
            largest = largest_batch(
                cell.peak,
                cell.meter.limit_bytes,
                max_batch=cell.options.max_batch,
            )
        row.largest_capped = "yes" if largest.capped else "no"
        row.mib_a_pair = _scaled(largest.bytes_per_pair, 2**20)
        progress(f"throughput, {side}, batch {largest.batch}")
        _time_largest(cell, side, row, largest)
    batch = cell.options.batch or _power_of_two(min(row.largest_batch or 0 for row in rows))
    progress(f"both sides, batch {batch}")
    _time_common(cell, rows, batch)
    _compare_losses(rows)


def _time_largest(cell: _Cell, side: Side, row: TrainRow, largest: LargestBatch) -> None:
    """Measure the throughput at the largest batch, and fill in the row.

    A batch that fitted once may not fit again. Smaller ones are then tried.

    Args:
        cell: the cell.
        side: the head.
        row: the row of the side.
        largest: the result of the search for the largest batch.
    """
    batch = largest.batch
    peak = largest.peak_bytes or None
    with head_of(cell.encoder, side):
        while batch:
            samples: list[float] = []
            if peak is not None and fits(partial(_sample, cell, batch, samples, 5)):
                timing = Timing.of(samples)
                row.largest_peak_gib = _scaled(peak, 2**30)
                row.largest_reps = timing.reps
                row.largest_step_p50_ms = timing.p50
                row.pairs_per_second = 1e3 * batch / timing.p50
                break
            cell.step.forget()
            release(cell.options.device, collect=True)
            batch = min(batch - 1, int(batch * _SHRINK))
            peak = cell.peak(batch) if batch else None
    row.largest_batch = batch
    if batch == 0:
        row.status = "OOM"
        row.note = "not even one pair fits"
    cell.step.forget()
    release(cell.options.device)


def _sample(cell: _Cell, batch: int, samples: list[float], max_steps: int) -> None:
    """Time steps within the budget, at least two.

    Args:
        cell: the cell.
        batch: the pairs of a step.
        samples: the milliseconds of the steps are appended to it.
        max_steps: the largest number of steps.
    """
    run_one = partial(cell.run, batch)
    device = cell.options.device
    first = time_steps(run_one, device, 1, warmup=1)
    n_steps = int(1e3 * cell.options.seconds / _ROUNDS / max(first[0], 1e-3))
    n_further = min(max(n_steps - 1, 1), max_steps - 1)
    samples += first + time_steps(run_one, device, n_further, warmup=0)


def _time_common(cell: _Cell, rows: Sequence[TrainRow], batch: int) -> None:
    """Time steps of both sides with the same batch, and fill in the rows.

    The sides take turns, so that a change of the clock rate affects both. A side has no times if
    the batch does not fit in its memory.

    Args:
        cell: the cell.
        rows: the rows of the sides, in the order of :data:`SIDES`.
        batch: the pairs of a step; 0 if no batch fits.
    """
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(_ROUNDS):
        for side, row in zip(SIDES, rows, strict=True):
            if row.status != "ok" or batch < 1:
                continue
            with head_of(cell.encoder, side):
                if turn == 0:
                    torch.manual_seed(cell.options.seed)
                    peak_bytes, row.loss = cell.peak_and_loss(batch)
                    row.peak_gib = _scaled(peak_bytes, 2**30)
                if row.peak_gib is None or not fits(
                    partial(_sample, cell, batch, samples[side], 10),
                ):
                    row.note = f"batch {batch} does not fit"
                    samples[side] = []
                    cell.step.forget()
                    release(cell.options.device, collect=True)
            release(cell.options.device)
    for side, row in zip(SIDES, rows, strict=True):
        if samples[side]:
            timing = Timing.of(samples[side])
            row.batch = batch
            row.step_reps = timing.reps
            row.step_p20_ms = timing.p20
            row.step_p50_ms = timing.p50
            row.step_p80_ms = timing.p80


def _compare_losses(rows: Sequence[TrainRow]) -> None:
    """Let a cell fail whose sides computed different losses with the same dropout."""
    stock, ours = (row.loss for row in rows)
    if stock is None or ours is None:
        return
    error = abs(ours - stock) / max(abs(stock), 1e-12)
    if not error <= BF16_LOSS_BUDGET:
        for row in rows:
            row.status = "FAILED"
            row.note = f"losses at the common batch differ by {error:.1e} > {BF16_LOSS_BUDGET}"


def _power_of_two(largest: int) -> int:
    """Return the largest power of two up to a number, or 0 for 0."""
    return 1 << (largest.bit_length() - 1) if largest else 0


def _scaled(value: float | None, unit: int) -> float | None:
    """Return a value in a larger unit, or None for None."""
    return None if value is None else value / unit
