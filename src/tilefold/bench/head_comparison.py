"""The stock LSR head beside the fused one, on the machine at hand: what a user sees before believing a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from tilefold.bench import child, timing
from tilefold.bench.figures import new_figure, save_figure
from tilefold.bench.provenance import cpu_name
from tilefold.bench.registry import get_spec
from tilefold.bench.spec import BenchCase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Side = Literal["eager", "fused"]
Shape = tuple[int, int, int, int]

CPU_SHAPES: tuple[Shape, ...] = tuple((batch, 128, 384, 30522) for batch in (2, 4, 8, 16))
GPU_SHAPES: tuple[Shape, ...] = tuple((batch, 256, 768, 30522) for batch in (8, 16, 32, 64, 128))
_SIDES: tuple[tuple[Side, str], ...] = (("eager", "eager"), ("fused", "tilefold"))
_NAMES = {"eager": "plain (linear, mask, relu, log1p, max)", "fused": "fused (tilefold)"}
_MEMORY_SHARE = 0.6  # of the free memory that the plain head may be expected to take
_MEBI_TO_MEGA = 2**20 / 1e6


@dataclass(frozen=True)
class HeadMeasurement:
    """One side at one shape.

    Attributes:
        impl: ``"eager"``, what stock sentence-transformers computes, or ``"fused"``, ``tilefold.ops.lsr_head``.
        batch, seq, dim, vocab: the shape.
        forward_ms: median of inference, ``None`` if not measured.
        forward_backward_ms: median of forward + backward.
        peak_mb: memory that forward + backward takes above its inputs at its peak, in MB (1e6 bytes).
        skipped_reason: why there are no numbers.
        device, dtype: where and in what.
    """

    impl: Side
    batch: int
    seq: int
    dim: int
    vocab: int
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    peak_mb: float | None = None
    skipped_reason: str | None = None
    device: str = ""
    dtype: str = ""


def compare_heads(
    shapes: Sequence[Shape] | None = None, progress: Callable[[str], None] | None = None
) -> list[HeadMeasurement]:
    """Measure both heads at each ``(batch, seq, dim, vocab)``, each side in a process of its own.

    Runs on the GPU if torch sees one (bf16), else on the CPU (fp32); every score is positive and no token is padding,
    the most expensive case of the backward pass. A shape whose logits would not fit in free memory is not tried.

    Args:
        shapes: what to measure; a few batch sizes of a MiniLM-sized head if ``None``.
        progress: called with a line of text before each step.

    Returns:
        One measurement for each shape and side, ordered by side, then by size.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = shapes if shapes is not None else (GPU_SHAPES if device == "cuda" else CPU_SHAPES)
    ordered = sorted(chosen, key=lambda shape: (shape[0] * shape[1] * shape[3], shape))
    cases = [_case(shape, device) for shape in ordered]
    rows: list[HeadMeasurement] = []
    for side, impl in _SIDES:
        rows += _measure_side(side, impl, cases, progress or (lambda text: None))
    return rows


def _case(shape: Shape, device: str) -> BenchCase:
    dtype = "bfloat16" if device == "cuda" else "float32"
    return BenchCase("x".join(map(str, shape)), device, dtype, dict(zip("BSDV", shape, strict=True)))


def _measure_side(
    side: Side, impl: str, cases: Sequence[BenchCase], progress: Callable[[str], None]
) -> list[HeadMeasurement]:
    reasons = {case.name: _does_not_fit(case, impl) for case in cases}
    fitting = [case for case in cases if reasons[case.name] is None]
    skipped = [replace(_row(side, case), skipped_reason=reasons[case.name]) for case in cases if case not in fitting]
    if not fitting:
        return skipped
    progress(f"{side}: {len(fitting)} shapes up to batch {fitting[-1].dims['B']}")
    rows: list[HeadMeasurement] = []
    try:
        for case, answer in zip(
            fitting, child.stream("lsr_head", fitting, impl, measure=("peak", "time")), strict=True
        ):
            rows.append(
                replace(
                    _row(side, case),
                    forward_ms=answer["time_ms"]["forward"],
                    forward_backward_ms=answer["time_ms"]["forward_backward"],
                    peak_mb=answer["peak_mib"]["forward_backward"] * _MEBI_TO_MEGA,
                )
            )
            progress(f"{side}: batch {case.dims['B']} done")
    except child.ChildError as error:
        rows += [replace(_row(side, case), skipped_reason=str(error)) for case in fitting[len(rows) :]]
    return rows + skipped


def _does_not_fit(case: BenchCase, impl: str) -> str | None:
    needed = get_spec("lsr_head").needs_bytes(case, impl)
    free = timing.free_memory_bytes(torch.device(case.device))
    if free is None or needed <= _MEMORY_SHARE * free:
        return None
    return f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory free"


def _row(side: Side, case: BenchCase) -> HeadMeasurement:
    batch, seq, dim, vocab = (case.dims[name] for name in "BSDV")
    return HeadMeasurement(side, batch, seq, dim, vocab, device=case.device, dtype=case.dtype)


def plot_heads(rows: Sequence[HeadMeasurement], path: str | os.PathLike[str]) -> Path:
    """Write a PNG with peak memory and time of forward + backward against batch size, plain beside fused.

    Args:
        rows: what ``compare_heads`` returned.
        path: the file; replaced atomically, its folder is made.

    Returns:
        The path written.

    Raises:
        ValueError: if no row holds a measurement.
        ImportError: if matplotlib is not installed.
    """
    if not any(row.peak_mb is not None for row in rows):
        raise ValueError(f"rows must hold at least one measurement, got {len(rows)} without any; see skipped_reason.")
    figure = new_figure((10, 4.2))
    memory, duration = figure.subplots(1, 2)
    _panel(memory, rows, "peak_mb", "peak memory above the inputs, MB")
    _panel(duration, rows, "forward_backward_ms", "median time, ms")
    figure.suptitle(_conditions(rows), fontsize=9)
    return save_figure(figure, path)


def _panel(axes: Axes, rows: Sequence[HeadMeasurement], attribute: str, label: str) -> None:
    for side, marker in (("eager", "o"), ("fused", "s")):
        points = [(row.batch, getattr(row, attribute)) for row in rows if row.impl == side]
        points = sorted((x, y) for x, y in points if y is not None)
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=_NAMES[side])
    axes.set_xscale("log", base=2)
    batches = sorted({row.batch for row in rows})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel(label)
    axes.set_title("forward + backward", fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)


def _conditions(rows: Sequence[HeadMeasurement]) -> str:
    row = rows[0]
    device = f"{cpu_name()}, {torch.get_num_threads()} threads"
    if row.device == "cuda":
        device = torch.cuda.get_device_name()
    left_out = sum(row.skipped_reason is not None for row in rows)
    text = (
        f"LSR head, {row.seq} tokens, dimension {row.dim}, vocabulary {row.vocab}, {row.dtype}, all scores positive\n"
        f"{device}, torch {torch.__version__}"
    )
    return f"{text}; {left_out} measurements left out" if left_out else text
