"""Claims of published systems and of the README, each with both sides, their ratio, and whether it holds.

A claim names two rows of a file of results, a column, and how many times better ours must be. Its rows are measured
anew in one run where an operator's benchmark makes them (:func:`measured_by`), else they are the committed ones, with
the command that repeats them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

H200, CPU = "nvidia-h200", "cpu-amd-epyc-2-threads"
TIME, TRAIN, MEMORY = "forward_p50_ms", "forward_backward_p50_ms", "forward_backward_peak_mib"
FORWARD_MEMORY = "forward_peak_mib"
BATCH, RATE = "largest_batch", "pairs_per_second"  # of which more is better
COLUMNS = {
    TIME: ("forward", "ms"), TRAIN: ("forward + backward", "ms"), MEMORY: ("memory, forward + backward", "MiB"),
    FORWARD_MEMORY: ("memory, forward", "MiB"), BATCH: ("largest batch", "pairs"), RATE: ("training", "pairs/s"),
    "p50_ms": ("query", "ms"),
}  # fmt: skip
Row = Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Claim:
    """One claim: in `column`, our row is at least `times` better than the other's, lower being better or higher."""

    system: str
    claim: str
    device: str  # folder of its results
    file: str  # without .csv
    where: Mapping[str, str]  # cells that both rows share
    other: str
    column: str
    times: float
    ours: str = "tilefold"
    side: str = "impl"  # column that names the side
    shown: tuple[str, str] = ("", "")  # as the README has them: the other's, ours

    @property
    def command(self) -> str:
        """The command that measures both rows in one run."""
        if self.side == "impl":
            return f"tilefold bench {self.file} --shape {self.where['case']} --impl {self.ours} --impl {self.other}"
        return f"python -m benchmarks.{self.file}"


def _op(
    system: str, claim: str, op: str, case: str, other: str, column: str, times: float,
    device: str = H200, shown: tuple[str, str] = ("", ""),
) -> Claim:  # fmt: skip
    return Claim(system, claim, device, op, {"case": case}, other, column, times, shown=shown)


def _training(
    system: str, claim: str, model: str, column: str, times: float,
    shown: tuple[str, str] = ("", ""), checkpointing: str = "no",
) -> Claim:  # fmt: skip
    where = {"model": model, "length": "256", "memory_gib": "40", "checkpointing": checkpointing}
    return Claim(system, claim, H200, "train_splade", where, "stock", column, times, side="side", shown=shown)


def _index(claim: str, other: str) -> Claim:
    where = {"documents": "1000000"}
    return Claim("Seismic", claim, CPU, "search", where, other, "p50_ms", 10, ours="seismic", side="engine")


_HEAD, _WIDE = "32x512x768x30522-dense", "16x512x768x250002-dense"
_BATCH, _LONG, _CAUSAL = "in-batch-64x1024-64x1024", "rerank-1024x1000x1024", "4x16384-correlated-causal"
SPARTON, MAXSIM, ADASPLASH = "Sparton (2603.25011)", "Flash-MaxSim", "AdaSplash (2502.12082)"
README = "tilefold's README"
_CPU_HEAD, _CPU_BATCH = "cpu-8x256x384x30522-dense", "cpu-in-batch-16x32-16x300"
CLAIMS = (
    _op(SPARTON, "up to 4.8 times as fast as PyTorch", "lsr_head", _HEAD, "eager", TRAIN, 4.8),
    _op(SPARTON, "10 times less memory", "lsr_head", _HEAD, "eager", MEMORY, 10),
    _training(SPARTON, "V = 30k: batches a third larger", "bert-base", BATCH, 1.33),
    _training(SPARTON, "V = 30k: training 14% faster", "bert-base", RATE, 1.14),
    _training(SPARTON, "V = 250k: batches 26 times as large", "xlmr-base", BATCH, 26),
    _training(SPARTON, "the same, both with checkpointing", "xlmr-base", BATCH, 26, checkpointing="yes"),
    _training(SPARTON, "V = 250k: training 2.5 times as fast", "xlmr-base", RATE, 2.5),
    _op(MAXSIM, "up to 9 times less memory in inference", "maxsim", _LONG, "eager", FORWARD_MEMORY, 9),
    _op(MAXSIM, "training memory a hundredth", "maxsim", _BATCH, "eager", MEMORY, 100),
    _op(MAXSIM, "beside flash-maxsim itself", "maxsim", "in-batch-128x32-128x300", "flash-maxsim", TRAIN, 1),
    _op(MAXSIM, "beside flash-maxsim itself", "maxsim", "rerank-24x10000x1030", "flash-maxsim", TIME, 1),
    _op(ADASPLASH, "near FlashAttention-2 or better", "entmax_attention", _CAUSAL, "softmax-fa2", TRAIN, 1),
    _op(ADASPLASH, "the same without zero blocks", "entmax_attention", "8x2048-iid", "softmax-fa2", TRAIN, 1),
    _op(ADASPLASH, "beside AdaSplash itself", "entmax_attention", "8x2048-iid", "adasplash-v1-no-mask", TRAIN, 1),
    _index("ten times as fast as inverted indexes (scipy's product)", "scipy"),
    _index("the same, beside our exact index", "exact"),
    _op(README, "head", "lsr_head", _WIDE, "eager", TRAIN, 1, shown=("64.2", "7.25")),
    _op(README, "head", "lsr_head", _WIDE, "eager", MEMORY, 1, shown=("15,633", "397")),
    _op(README, "head", "lsr_head", _WIDE, "compile-max-first", TRAIN, 1, shown=("27.1", "7.25")),
    _op(README, "MaxSim", "maxsim", _BATCH, "eager", TRAIN, 1, shown=("72.9", "2.84")),
    _op(README, "MaxSim", "maxsim", _BATCH, "eager", MEMORY, 1, shown=("45,104", "40")),
    _op(README, "MaxSim", "maxsim", _BATCH, "late-interaction-kernels", TRAIN, 1, shown=("4.40", "2.84")),
    _op(README, "attention", "entmax_attention", _CAUSAL, "adasplash-v2", TRAIN, 1, shown=("11.9", "3.82")),
    _training(README, "largest batch", "xlmr-base", BATCH, 1, ("26", "306")),
    _training(README, "training", "xlmr-base", RATE, 1, ("211", "834")),
    _op(SPARTON, "faster than PyTorch, on a CPU", "lsr_head", _CPU_HEAD, "eager", TRAIN, 1, "cpu"),
    _op(SPARTON, "8 times less memory, on a CPU", "lsr_head", _CPU_HEAD, "eager", MEMORY, 8, "cpu"),
    _op(MAXSIM, "faster than PyTorch, on a CPU", "maxsim", _CPU_BATCH, "eager", TRAIN, 1, "cpu"),
    _op(MAXSIM, "less memory, on a CPU", "maxsim", _CPU_BATCH, "eager", MEMORY, 1, "cpu"),
    _op("entmax (1905.05702)", "faster than sorting", "entmax", "cpu-64x8192", "sort", TRAIN, 1, "cpu"),
    _op("scatter", "faster than torch's", "token_scatter", "cpu-16x32x30522-max", "scatter-reduce", TRAIN, 1, "cpu"),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """A claim with both sides; NaN for what was not measured."""

    claim: Claim
    ours: float
    other: float
    conditions: str  # device, versions and date of our row, and whether it is a committed one

    @property
    def times(self) -> float:
        """How many times better ours is."""
        more = self.claim.column in (BATCH, RATE)
        return self.ours / self.other if more else self.other / self.ours

    @property
    def outcome(self) -> str:
        """``"pass"``, ``"miss"`` or ``"not measured"``."""
        if math.isnan(self.times):
            return "not measured"
        return "pass" if self.times >= self.claim.times else "miss"


def measured_by(device: str) -> dict[str, tuple[set[str], set[str]]]:
    """The operators whose claims a run on ``"cuda"`` or ``"cpu"`` measures, with their cases and implementations."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for claim in CLAIMS:
        if claim.side == "impl" and (claim.device == "cpu") == (device == "cpu"):
            cases, impls = found.setdefault(claim.file, (set(), set()))
            cases.add(claim.where["case"])
            impls.update((claim.ours, claim.other))
    return found


def judge(claim: Claim, rows: Sequence[Row], note: str = "") -> Verdict:
    """A claim by the rows of its file: of several of a side, the best."""
    more = claim.column in (BATCH, RATE)
    values: dict[str, float] = {}
    for row in rows:
        side, text = row.get(claim.side, ""), row.get(claim.column, "")
        if text and all(row.get(name) == value for name, value in claim.where.items()):
            values[side] = (max if more else min)(values.get(side, float(text)), float(text))
    conditions = ""
    for row in rows:
        if row.get(claim.side) == claim.ours and all(row.get(name) == value for name, value in claim.where.items()):
            versions = f"torch {row['torch']}" + (f", Triton {row['triton']}" if row.get("triton") else "")
            threads = "" if row.get("cuda") else f", {row['threads']} threads"
            conditions = f"{row['device']}{threads}, {versions}, {row['date'][:10]}{note}"
    return Verdict(claim, values.get(claim.ours, math.nan), values.get(claim.other, math.nan), conditions)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of results; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


HEAD = (
    "| system | claim | baseline | measured: baseline, ours | times better (claimed) | outcome | conditions | command |"
)


def line(verdict: Verdict) -> str:
    """The row of a claim in a Markdown table under ``HEAD``."""
    claim, (what, unit) = verdict.claim, COLUMNS[verdict.claim.column]
    digits = [",.0f" if value >= 1000 else ".4g" for value in (verdict.other, verdict.ours)]
    sides = ", ".join(format(value, spec) for value, spec in zip((verdict.other, verdict.ours), digits, strict=True))
    times = "-" if math.isnan(verdict.times) else f"{verdict.times:.3g}"
    cells = [claim.system, f"{claim.claim} ({what})", claim.other, f"{sides} {unit}", f"{times} ({claim.times:g})"]
    return f"| {' | '.join([*cells, verdict.outcome, verdict.conditions, f'`{claim.command}`'])} |"
