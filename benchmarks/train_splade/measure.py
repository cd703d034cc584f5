"""Measure the largest batch and the time of a SPLADE training step, with both heads in one run.

The claims measured are those of Sparton (arXiv 2603.25011): batch and speed of a training step at V
= 30,522 and V = 250,002. A step is that of sentence-transformers' own trainer; the two sides differ
in ``accelerate(model)`` alone.
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

_GATE_TOKENS = (96, 61, 33, 8)  # valid tokens of the documents that both sides are compared on
_ROUNDS = 2
_SHRINK = 0.97


@dataclass
class _Cell:
    """One length, with or without checkpointing, of one prepared model."""

    encoder: Any
    step: TrainingStep
    batches: Batches
    meter: Meter
    options: TrainOptions

    def run(self, batch: int) -> Tensor:
        return self.step(self.batches.inputs(batch))

    def peak(self, batch: int) -> int | None:
        found = self.meter.peak(partial(self.run, batch))
        self.step.forget()
        return found


def run(
    options: TrainOptions,
    on_rows: Callable[[list[TrainRow]], None] = lambda rows: None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[TrainRow]:
    """Measure every cell; ``on_rows`` sees the two rows of each cell as it ends.

    Raises:
        ValueError: for an unknown model, or a length, batch, limit or tokenizer that cannot be.
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
        for found in _model_rows(size, tokenizer, source, pairs, options, progress):
            rows += found
            on_rows(found)
    return rows


def _model_rows(
    size: ModelSize,
    tokenizer: Any,
    source: str,
    pairs: Mapping[int, list[tuple[str, str]]],
    options: TrainOptions,
    progress: Callable[[str], None],
) -> Iterator[list[TrainRow]]:
    """The rows of each cell of one model, which is gone when this ends."""
    with _prepared(size, tokenizer, pairs, options, progress) as (cells, gate):
        for length, cell in cells:
            for checkpointing in options.checkpointing:
                set_checkpointing(cell.encoder, checkpointing)
                found = [
                    _row(size, cell, length, checkpointing, side, source, gate) for side in SIDES
                ]
                if not gate.failures:
                    mode = "with" if checkpointing else "no"
                    name = f"{size.name}, S={length}, {mode} checkpointing"
                    _measure(cell, found, partial(_prefixed, progress, name))
                yield found


def _prefixed(progress: Callable[[str], None], name: str, text: str) -> None:
    progress(f"{name}: {text}")


@contextmanager
def _prepared(
    size: ModelSize,
    tokenizer: Any,
    pairs: Mapping[int, list[tuple[str, str]]],
    options: TrainOptions,
    progress: Callable[[str], None],
) -> Iterator[tuple[Iterator[tuple[int, _Cell]], GateOutcome]]:
    """A model with its trainer, checked; its cells, one length at a time."""
    from tilefold.recipes.loading import quiet_libraries

    device = options.device
    release(device, collect=True)  # the model before this one
    meter = Meter(device, options.memory_gib)
    steps: list[TrainingStep] = []
    try:
        with quiet_libraries():
            encoder = build_encoder(size, tokenizer, device, max(options.lengths))
            progress(f"{size.name}: comparing the heads")
            first = Batches(
                encoder,
                next(iter(pairs.values()))[: len(_GATE_TOKENS)],
                max(_GATE_TOKENS),
                device,
            )

            def make_step() -> TrainingStep:
                steps.append(TrainingStep(encoder, bf16=options.autocasts))
                return steps[0]

            gate = check_sides(encoder, _ragged(first.inputs(len(_GATE_TOKENS))), make_step)
            cells = (
                (
                    length,
                    _Cell(
                        encoder,
                        steps[0],
                        Batches(encoder, texts, length, device),
                        meter,
                        options,
                    ),
                )
                for length, texts in pairs.items()
            )
            yield cells, gate
    finally:
        for step in steps:
            step.close()
        meter.close()


def _ragged(inputs: dict[str, Any]) -> dict[str, Any]:
    """Documents cut to lengths that differ, so that padding counts."""
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
    """Fill in both rows of one cell."""
    found: dict[str, LargestBatch] = {}
    for side, row in zip(SIDES, rows, strict=True):
        progress(f"largest batch, {side}")
        with head_of(cell.encoder, side):
            cell.peak(1)  # libraries and compiled kernels are loaded, the optimiser's state is made
            found[side] = largest_batch(
                cell.peak,
                cell.meter.limit_bytes,
                max_batch=cell.options.max_batch,
            )
        row.largest_capped = "yes" if found[side].capped else "no"
        row.mib_a_pair = _scaled(found[side].bytes_per_pair, 2**20)
        progress(f"throughput, {side}, batch {found[side].batch}")
        _time_largest(cell, side, row, found[side])
    batch = cell.options.batch or _power_of_two(min(row.largest_batch or 0 for row in rows))
    progress(f"both sides, batch {batch}")
    _time_common(cell, rows, batch)
    _compare_losses(rows)


def _time_largest(cell: _Cell, side: Side, row: TrainRow, found: LargestBatch) -> None:
    """Throughput at the largest batch; a batch that ran once and does not run again is not the
    largest.
    """
    batch, peak = found.batch, found.peak_bytes or None
    with head_of(cell.encoder, side):
        while batch:
            samples: list[float] = []
            if peak is not None and fits(partial(_sample, cell, batch, samples, 5)):
                timing = Timing.of(samples)
                row.largest_peak_gib, row.largest_reps = _scaled(peak, 2**30), timing.reps
                row.largest_step_p50_ms, row.pairs_per_second = timing.p50, 1e3 * batch / timing.p50
                break
            cell.step.forget()
            release(cell.options.device, collect=True)
            batch = min(batch - 1, int(batch * _SHRINK))
            peak = cell.peak(batch) if batch else None
    row.largest_batch = batch
    if batch == 0:
        row.status, row.note = "OOM", "not even one pair fits"
    cell.step.forget()
    release(cell.options.device)


def _sample(cell: _Cell, batch: int, samples: list[float], most: int) -> None:
    """Append the times of at least two steps, of as many as the budget allows, at most ``most``."""
    run_one = partial(cell.run, batch)
    device = cell.options.device
    first = time_steps(run_one, device, 1, warmup=1)
    wanted = int(1e3 * cell.options.seconds / _ROUNDS / max(first[0], 1e-3))
    samples += first + time_steps(run_one, device, min(max(wanted - 1, 1), most - 1), warmup=0)


def _time_common(cell: _Cell, rows: Sequence[TrainRow], batch: int) -> None:
    """Both sides at one batch, in turns, so that a clock that drifts touches both alike."""
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(_ROUNDS):
        for side, row in zip(SIDES, rows, strict=True):
            if row.status != "ok" or batch < 1:
                continue
            with head_of(cell.encoder, side):
                if turn == 0:
                    torch.manual_seed(cell.options.seed)
                    losses: list[Tensor] = []
                    peak = cell.meter.peak(lambda into=losses: into.append(cell.run(batch)))  # type: ignore[misc]
                    row.loss = float(losses[0]) if peak is not None and losses else None
                    row.peak_gib = _scaled(peak, 2**30)
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
            row.batch, row.step_reps = batch, timing.reps
            row.step_p20_ms, row.step_p50_ms, row.step_p80_ms = timing.p20, timing.p50, timing.p80


def _compare_losses(rows: Sequence[TrainRow]) -> None:
    """Refuse a cell whose two sides, with the same dropout, did not compute the same loss."""
    stock, ours = (row.loss for row in rows)
    if stock is None or ours is None:
        return
    error = abs(ours - stock) / max(abs(stock), 1e-12)
    if not error <= BF16_LOSS_BUDGET:
        for row in rows:
            row.status, row.note = (
                "FAILED",
                f"losses at the common batch differ by {error:.1e} > {BF16_LOSS_BUDGET}",
            )


def _power_of_two(largest: int) -> int:
    return 1 << (largest.bit_length() - 1) if largest else 0


def _scaled(value: float | None, unit: int) -> float | None:
    return None if value is None else value / unit
