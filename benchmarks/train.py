"""Time the steps of the stock trainers, data loader included, on packed batches and on stock ones.

On one H200, about eight minutes:

    PYTHONPATH=src python -m benchmarks.train --device cuda --output DIR

``--shape ragged-128`` and the like choose cases, ``--tokenizer FOLDER`` the tokenizer of the model
with V = 250,002 (by default it uses the small one), ``--device cpu --quick`` runs a tiny model.

Timed: steps with the trainer's default arguments, after steps that warm up, under bf16 autocast on
a GPU. Some more steps run under a profiler, which measures for how much of the time the GPU was
busy. If a batch does not fit, half of it is run.

Baseline: the first side of a case, ``stock`` where it fits. Ratios are those of pairs per second.
The time of a side is its mean step, with all captures of graphs. That of the baseline is the
median where it is shorter than the mean, so that a step that the CPU delayed does not count.

Gate: all sides train from the same weights on the same batches. Before anything else, each runs
three small steps in fp32 without dropout, and their losses must agree. (Layers are compiled in 16
bits only. Tests compare their gradients with those in fp32.) Losses of the first steps in bf16 can
be compared between sides with the same number of steps, because SpladeLoss raises its regularizers
over the run.

| side | what it is |
|---|---|
| stock | sentence-transformers without changes |
| padded | ``accelerate(model, packed=False)``: the fused head or scores on padded batches |
| model | ``accelerate(model)`` |
| trainer | ``accelerate(trainer)``, with compiled layers for these numbers of steps |
| packed | ``accelerate(model, graphs=False)`` and ``collate_ahead(trainer)`` |
| graphs | the same with ``collate_ahead(trainer, graphs=True)`` |
| compiled | the same with ``collate_ahead(trainer, graphs=True, compiled=True)`` |
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.job import Job, JobCase, JobOptions, Row, main
from benchmarks.train_data import (
    BASE,
    FULL_LENGTH,
    MAX_LENGTH,
    TINY,
    load_tokenizer,
    made_pairs,
    make_encoder,
    valid_share,
)
from benchmarks.train_run import (
    GATE_STEPS,
    GRAPH_WARM_STEPS,
    PROFILED_STEPS,
    Measured,
    exact_losses,
    train,
)

LARGE = 250_002
# pairs per step of the gate, which is in fp32, and the smallest batch that is timed
GATE_BATCH = 16
# allowed difference of fp32 losses: gradients differ by rounding, and where they are near zero the
# first steps of Adam use their sign only
EXACT_BUDGET = 5e-4
# allowed difference of the first loss in bf16, before any update
ROUNDED_BUDGET = 2e-3


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Train all sides of a case, and yield their rows.

    The first side is the baseline of the others, and always runs.
    """
    numbers = case.numbers
    kind, batch, vocab = numbers["kind"], numbers["batch"], numbers["vocab"]
    is_tiny = "tiny" in numbers
    uses_own_tokenizer = vocab == LARGE or is_tiny
    tokenizer = load_tokenizer(options.tokenizer if uses_own_tokenizer else None)
    is_ragged = numbers["documents"] != "full"
    length = MAX_LENGTH if is_ragged else FULL_LENGTH
    most_timed_steps = max(numbers["steps"].values())
    n_steps = GATE_STEPS + GRAPH_WARM_STEPS + most_timed_steps + PROFILED_STEPS
    pairs = made_pairs(tokenizer, batch * n_steps, is_ragged)
    model = make_encoder(kind, vocab, TINY if is_tiny else BASE, tokenizer, length)
    case_cells = {
        "case": case.name,
        "batch": batch,
        "vocab": vocab,
        "tokenizer": len(tokenizer),
        "valid": valid_share(tokenizer, pairs["document"], batch, length),
    }
    baseline: Outcome | None = None
    for side, timed_steps in numbers["steps"].items():
        is_chosen = options.impls is None or side in options.impls
        if baseline is not None and not is_chosen:
            continue
        outcome = _outcome(kind, model, side, pairs, batch, timed_steps, options.device)
        side_cells = {**case_cells, "side": side, "steps": timed_steps}
        if outcome is None:
            yield {**side_cells, "gate": "out of memory"}
            continue
        if baseline is None:
            baseline = outcome
        yield {**side_cells, **row(outcome, baseline)}


@dataclass(frozen=True)
class Outcome:
    """The training of one side.

    Attributes:
        exact: the losses of the gate, in fp32.
        measured: measurements of the timed steps.
        batch: the pairs per step that fitted into memory.
    """

    exact: list[float]
    measured: Measured
    batch: int

    @property
    def pairs_per_s(self) -> float:
        """Pairs per second."""
        return 1e3 * self.batch / self.measured.step_ms

    def times(self, baseline: Outcome) -> float:
        """Return the ratio of pairs per second to those of the baseline.

        The baseline's step is its mean or its median, whichever is shorter.
        """
        if self is baseline:
            return 1.0
        baseline_ms = min(baseline.measured.step_ms, baseline.measured.median_ms)
        return self.pairs_per_s / (1e3 * baseline.batch / baseline_ms)


def _outcome(
    kind: str,
    model: Any,
    side: str,
    pairs: dict[str, list[str]],
    batch: int,
    timed_steps: int,
    device: torch.device,
) -> Outcome | None:
    """Train one side with the largest batch that fits.

    Args:
        kind: ``"splade"`` or ``"colbert"``.
        model: the model, of which a copy is trained.
        side: how the model is trained.
        pairs: queries and documents.
        batch: the pairs per step, which are halved until they fit.
        timed_steps: the number of timed steps.
        device: the device.

    Returns:
        The outcome, or None if not even the batch of the gate fits.
    """
    gate_batch = min(batch, GATE_BATCH)
    n_gate_pairs = 2 * GATE_STEPS * gate_batch
    gate_pairs = {name: texts[:n_gate_pairs] for name, texts in pairs.items()}
    exact = exact_losses(kind, model, side, gate_pairs, gate_batch, device)
    while True:
        try:
            measured = train(kind, model, side, pairs, batch, timed_steps, device)
            return Outcome(exact, measured, batch)
        except torch.cuda.OutOfMemoryError:
            # memory that the error refers to is free only after this block
            pass
        gc.collect()
        torch.cuda.empty_cache()
        batch //= 2
        if batch < GATE_BATCH:
            return None


def row(outcome: Outcome, baseline: Outcome) -> dict[str, Any]:
    """Return the cells of a side: the gate, and if it passed, times and rates.

    Args:
        outcome: the side.
        baseline: the side that it is compared with.
    """
    exact_error = _largest_difference(outcome.exact, baseline.exact)
    rounded_error = _largest_difference(
        outcome.measured.losses[:1],
        baseline.measured.losses[:1],
    )
    cells: dict[str, Any] = {
        "batch": outcome.batch,
        "losses": " ".join(f"{loss:.6g}" for loss in outcome.exact),
        "losses_bf16": " ".join(f"{loss:.6g}" for loss in outcome.measured.losses),
        "loss_error": exact_error,
        "gate": "ok",
    }
    # a NaN is not within a budget
    if not exact_error <= EXACT_BUDGET:
        return {**cells, "gate": f"losses differ by {exact_error:.2g}"}
    # losses of another batch are others
    if outcome.batch == baseline.batch and not rounded_error <= ROUNDED_BUDGET:
        return {**cells, "gate": f"the first loss differs by {rounded_error:.2g}"}
    measured = asdict(outcome.measured)
    del measured["losses"]
    if measured["busy"] is None:
        measured["busy"] = ""
    return {
        **cells,
        **measured,
        "pairs_per_s": outcome.pairs_per_s,
        "ratio": outcome.times(baseline),
    }


def _largest_difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(
        abs(loss - expected_loss) / abs(expected_loss)
        for loss, expected_loss in zip(losses, expected, strict=True)
    )


def _case(
    name: str,
    kind: str,
    batch: int,
    vocab: int,
    documents: str,
    steps: dict[str, int],
    tiny: bool = False,
) -> JobCase:
    """Return a case of the training benchmark.

    Args:
        name: the name of the case.
        kind: ``"splade"`` or ``"colbert"``.
        batch: the pairs per step.
        vocab: the size of the model's vocabulary.
        documents: ``"ragged"`` or ``"full"`` length.
        steps: the number of timed steps by side, in their order.
        tiny: whether it is a tiny model for a CPU. Others are for GPUs.
    """
    numbers: dict[str, Any] = {
        "kind": kind,
        "batch": batch,
        "vocab": vocab,
        "documents": documents,
        "steps": steps,
    }
    if tiny:
        numbers["tiny"] = True
    return JobCase(name, ("cpu",) if tiny else ("cuda",), quick=tiny, numbers=numbers)


JOB = Job(
    name="train",
    cases=(
        _case(
            "ragged-128",
            "splade",
            128,
            30_522,
            "ragged",
            {
                "stock": 30,
                "model": 60,
                "trainer": 120,
                "padded": 15,
                "packed": 40,
                "graphs": 300,
                "compiled": 300,
            },
        ),
        _case(
            "ragged-32",
            "splade",
            32,
            30_522,
            "ragged",
            {"stock": 30, "model": 60, "trainer": 120},
        ),
        _case(
            "ragged-128-large",
            "splade",
            128,
            LARGE,
            "ragged",
            {"stock": 5, "packed": 30, "graphs": 60, "compiled": 60},
        ),
        _case(
            "ragged-512",
            "splade",
            512,
            30_522,
            "ragged",
            {"padded": 8, "packed": 20, "graphs": 40, "compiled": 40},
        ),
        _case(
            "full-128",
            "splade",
            128,
            30_522,
            "full",
            {"stock": 20, "model": 40, "trainer": 60, "packed": 20, "graphs": 40, "compiled": 40},
        ),
        _case(
            "colbert-128",
            "colbert",
            128,
            30_522,
            "ragged",
            {
                "stock": 30,
                "model": 60,
                "trainer": 120,
                "packed": 40,
                "graphs": 100,
                "compiled": 100,
            },
        ),
        _case(
            "tiny",
            "splade",
            8,
            30_522,
            "ragged",
            {"stock": 4, "model": 4, "trainer": 4, "padded": 4, "packed": 4},
            tiny=True,
        ),
        _case(
            "tiny-colbert",
            "colbert",
            8,
            30_522,
            "ragged",
            {"stock": 4, "trainer": 4, "packed": 4},
            tiny=True,
        ),
    ),
    key=("case", "side"),
    shown=(
        "case",
        "side",
        "valid",
        "step_ms",
        "median_ms",
        "slowest_ms",
        "pairs_per_s",
        "ratio",
        "peak_gib",
        "reserved_gib",
        "busy",
        "loss_error",
        "gate",
    ),
    run=run,
)

if __name__ == "__main__":
    sys.exit(main(JOB, __doc__))
