"""Training with the stock trainer, data loader included: packed batches beside stock ones (`tilefold bench train`).

On one H200, about two minutes:

    PYTHONPATH=src python -m tilefold.cli bench train --device cuda --output DIR

``--shape ragged-128`` and its like choose cases, ``--tokenizer FOLDER`` the tokenizer of the model with V = 250,002
(by default the small one serves it), ``--device cpu --quick`` runs a tiny model. Each side trains from the same weights
on the same batches: three steps without dropout, whose losses must agree (the gate), some that warm up, and those that
are timed, under bf16 autocast on a GPU, with the trainer's default arguments. A few more steps run under a profiler,
which tells for how much of the time the GPU was busy.

| side | what it is |
|---|---|
| stock | sentence-transformers as it comes |
| padded | ``accelerate(model, packed=False)``: the fused head or scores on padded batches |
| packed | ``accelerate(model)`` and ``collate_ahead(trainer)`` |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tilefold.bench.jobs import Job, JobCase, JobOptions, Row
from tilefold.bench.train.inputs import FULL_LENGTH, MAX_LENGTH, load_tokenizer, made_pairs, make_encoder, valid_share
from tilefold.bench.train.run import GATE_STEPS, PROFILED_STEPS, WARM_STEPS, Measured, train

LARGE = 250_002
# bf16: the encoder alone rounds 12 layers of sums to 8 bits, and each step hands the difference on to the next
BUDGET = {"cuda": 1e-2, "cpu": 1e-4}


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Rows of the sides of one case, the one that the others are compared with first."""
    numbers = case.numbers
    kind, batch, vocab = numbers["kind"], numbers["batch"], numbers["vocab"]
    tokenizer = load_tokenizer(options.tokenizer if vocab == LARGE or "tiny" in numbers else None)
    length = FULL_LENGTH if numbers["documents"] == "full" else MAX_LENGTH
    steps = max(numbers["steps"].values())
    rows = made_pairs(tokenizer, batch * (GATE_STEPS + WARM_STEPS + steps + PROFILED_STEPS), length == MAX_LENGTH)
    model = make_encoder(kind, vocab, numbers.get("tiny", False), tokenizer, options.device, length)
    weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    shape = {
        "case": case.name,
        "batch": batch,
        "vocab": vocab,
        "tokenizer": len(tokenizer),
        "valid": valid_share(tokenizer, rows["document"], batch, length),
    }
    reference: Measured | None = None
    for side, timed in numbers["steps"].items():
        if options.impls is not None and reference is not None and side not in options.impls:
            continue
        model.load_state_dict(weights)
        try:
            found = train(kind, model, side, rows, batch, timed)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            yield shape | {"side": side, "steps": timed, "gate": "out of memory"}
            continue
        reference = reference or found
        yield shape | {"side": side, "steps": timed} | row(found, reference, batch, options.device.type)
    del model
    if options.device.type == "cuda":
        torch.cuda.empty_cache()


def row(found: Measured, reference: Measured, batch: int, device: str) -> dict[str, Any]:
    """Times, rates and the gate: the losses of the first steps, beside those of the first side."""
    error = max(abs(a - b) / abs(b) for a, b in zip(found.losses, reference.losses, strict=True))
    facts = {
        "losses": " ".join(f"{loss:.6g}" for loss in found.losses),
        "loss_error": error,
        "gate": "ok" if error <= BUDGET[device] else f"losses differ by {error:.2g}",
    }
    if facts["gate"] != "ok":
        return facts
    return facts | {
        "step_ms": found.step_ms,
        "slowest_ms": found.slowest_ms,
        "pairs_per_s": 1e3 * batch / found.step_ms,
        "ratio": reference.step_ms / found.step_ms,
        "peak_gib": found.peak_gib,
        "busy": "" if found.busy is None else found.busy,
    }


def _case(name: str, kind: str, batch: int, vocab: int, documents: str, steps: dict[str, int], **more: Any) -> JobCase:
    numbers = {"kind": kind, "batch": batch, "vocab": vocab, "documents": documents, "steps": steps, **more}
    tiny = bool(more)
    return JobCase(name, ("cpu",) if tiny else ("cuda",), quick=tiny, numbers=numbers)


JOB = Job(
    "train",
    (
        _case("ragged-128", "splade", 128, 30_522, "ragged", {"stock": 10, "padded": 15, "packed": 40}),
        _case("ragged-128-large", "splade", 128, LARGE, "ragged", {"stock": 5, "packed": 30}),
        _case("ragged-512", "splade", 512, 30_522, "ragged", {"padded": 8, "packed": 20}),
        _case("full-128", "splade", 128, 30_522, "full", {"stock": 10, "packed": 20}),
        _case("colbert-128", "colbert", 128, 30_522, "ragged", {"stock": 15, "packed": 40}),
        _case("tiny", "splade", 8, 30_522, "ragged", {"stock": 4, "padded": 4, "packed": 4}, tiny=True),
        _case("tiny-colbert", "colbert", 8, 30_522, "ragged", {"stock": 4, "packed": 4}, tiny=True),
    ),
    ("case", "side"),
    (
        "case",
        "side",
        "valid",
        "step_ms",
        "slowest_ms",
        "pairs_per_s",
        "ratio",
        "peak_gib",
        "busy",
        "loss_error",
        "gate",
    ),
    run,
)
