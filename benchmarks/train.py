"""Training with the stock trainer, data loader included: packed batches beside stock ones.

On one H200, about eight minutes:

    PYTHONPATH=src python -m benchmarks.train --device cuda --output DIR

``--shape ragged-128`` and its like choose cases, ``--tokenizer FOLDER`` the tokenizer of the model
with V = 250,002 (by default the small one serves it), ``--device cpu --quick`` runs a tiny model.
Each side trains from the same weights on the same batches: first three small steps in fp32 without
dropout, whose losses must agree (the gate; layers are compiled in 16 bits alone, whose gradients
the tests compare with those in fp32); then steps that warm up, and those that are timed, under bf16
autocast on a GPU, with the trainer's default arguments. Losses of the first steps in bf16 can be
compared between sides of as many steps: SpladeLoss raises its regularizers over the run. A few more
steps run under a profiler, which tells for how much of the time the GPU was busy. Where a batch
does not fit, half of it is run, and ratios are those of pairs per second: of the mean step,
captures and all, to the median of the reference where that is shorter than its mean.

| side | what it is |
|---|---|
| stock | sentence-transformers as it comes |
| padded | ``accelerate(model, packed=False)``: the fused head or scores on padded batches |
| packed | ``accelerate(model)`` and ``collate_ahead(trainer)`` |
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
GATE_BATCH = 16  # pairs of a step of the gate, which is in fp32
# fp32: gradients differ by rounding, of which the first steps of Adam keep the sign alone where
# they are near zero
EXACT_BUDGET = 5e-4
ROUNDED_BUDGET = 2e-3  # of the first loss in bf16, before any step


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Rows of the sides of one case, the one that the others are compared with first."""
    numbers = case.numbers
    kind, batch, vocab = numbers["kind"], numbers["batch"], numbers["vocab"]
    tokenizer = load_tokenizer(options.tokenizer if vocab == LARGE or "tiny" in numbers else None)
    length = FULL_LENGTH if numbers["documents"] == "full" else MAX_LENGTH
    steps = max(numbers["steps"].values())
    total = GATE_STEPS + GRAPH_WARM_STEPS + steps + PROFILED_STEPS
    rows = made_pairs(tokenizer, batch * total, length == MAX_LENGTH)
    model = make_encoder(kind, vocab, TINY if "tiny" in numbers else BASE, tokenizer, length)
    shape = {
        "case": case.name,
        "batch": batch,
        "vocab": vocab,
        "tokenizer": len(tokenizer),
        "valid": valid_share(tokenizer, rows["document"], batch, length),
    }
    reference: Outcome | None = None
    for side, timed in numbers["steps"].items():
        if options.impls is not None and reference is not None and side not in options.impls:
            continue
        found = _outcome(kind, model, side, rows, batch, timed, options.device)
        if found is None:
            yield shape | {"side": side, "steps": timed, "gate": "out of memory"}
            continue
        reference = reference or found
        yield shape | {"side": side, "steps": timed} | row(found, reference)


@dataclass(frozen=True)
class Outcome:
    """One side: losses in fp32, what was measured, and the pairs per step that fitted."""

    exact: list[float]
    measured: Measured
    batch: int

    @property
    def pairs_per_s(self) -> float:
        """Pairs per second."""
        return 1e3 * self.batch / self.measured.step_ms

    def times(self, reference: Outcome) -> float:
        """Ratio of pairs per second, where a step that the host held up does not count against the
        reference.
        """
        if self is reference:
            return 1.0
        base = reference.measured
        return self.pairs_per_s / (1e3 * reference.batch / min(base.step_ms, base.median_ms))


def _outcome(
    kind: str,
    model: Any,
    side: str,
    rows: dict[str, list[str]],
    batch: int,
    timed: int,
    device: torch.device,
) -> Outcome | None:
    """The largest batch that fits of ``batch``, half of it and so on; None if none does."""
    gate = min(batch, GATE_BATCH)
    few = {name: texts[: 2 * GATE_STEPS * gate] for name, texts in rows.items()}
    exact = exact_losses(kind, model, side, few, gate, device)
    while True:
        try:
            return Outcome(exact, train(kind, model, side, rows, batch, timed, device), batch)
        except torch.cuda.OutOfMemoryError:
            pass  # what the error holds is free after this
        gc.collect()
        torch.cuda.empty_cache()
        batch //= 2
        if batch < GATE_BATCH:
            return None


def row(found: Outcome, reference: Outcome) -> dict[str, Any]:
    """Times, rates and the gate: the losses of the first steps, beside those of the first side."""
    error = _error(found.exact, reference.exact)
    rounded = _error(found.measured.losses[:1], reference.measured.losses[:1])
    facts: dict[str, Any] = {
        "batch": found.batch,
        "losses": " ".join(f"{loss:.6g}" for loss in found.exact),
        "losses_bf16": " ".join(f"{loss:.6g}" for loss in found.measured.losses),
        "loss_error": error,
        "gate": "ok",
    }
    if not error <= EXACT_BUDGET:
        return facts | {"gate": f"losses differ by {error:.2g}"}
    if found.batch == reference.batch and not rounded <= ROUNDED_BUDGET:
        return facts | {"gate": f"the first loss differs by {rounded:.2g}"}
    measured = asdict(found.measured) | {
        "pairs_per_s": found.pairs_per_s,
        "ratio": found.times(reference),
    }
    del measured["losses"]
    return facts | measured | {"busy": "" if measured["busy"] is None else measured["busy"]}


def _error(losses: list[float], right: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, right, strict=True))


def _case(
    name: str,
    kind: str,
    batch: int,
    vocab: int,
    documents: str,
    steps: dict[str, int],
    **more: Any,
) -> JobCase:
    numbers = {
        "kind": kind,
        "batch": batch,
        "vocab": vocab,
        "documents": documents,
        "steps": steps,
        **more,
    }
    tiny = bool(more)
    return JobCase(name, ("cpu",) if tiny else ("cuda",), quick=tiny, numbers=numbers)


JOB = Job(
    "train",
    (
        _case(
            "ragged-128",
            "splade",
            128,
            30_522,
            "ragged",
            {"stock": 10, "padded": 15, "packed": 40, "graphs": 300, "compiled": 300},
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
            {"stock": 10, "packed": 20, "graphs": 40, "compiled": 40},
        ),
        _case(
            "colbert-128",
            "colbert",
            128,
            30_522,
            "ragged",
            {"stock": 15, "packed": 40, "graphs": 100, "compiled": 100},
        ),
        _case(
            "tiny",
            "splade",
            8,
            30_522,
            "ragged",
            {"stock": 4, "padded": 4, "packed": 4, "graphs": 4},
            tiny=True,
        ),
        _case("tiny-colbert", "colbert", 8, 30_522, "ragged", {"stock": 4, "packed": 4}, tiny=True),
    ),
    ("case", "side"),
    (
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
    run,
)

if __name__ == "__main__":
    sys.exit(main(JOB, __doc__))
