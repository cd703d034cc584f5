"""Memory of a training step, and the largest batch that fits: measured, predicted, then verified by
real steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tilefold.bench.timing import free_memory_bytes, resident_peak_mib

RESERVE_BYTES = 2 * 2**30  # of a GPU: what libraries and kernels allocate beside torch
CPU_LIMIT_GIB = 4.0
RESOLUTION = 1.05  # a batch this much larger than the one reported was seen not to fit
_LEAP = 8  # a prediction from tiny batches is followed at most this far
_MEASURED_SHARE = 4  # a prediction is checked at this fraction of itself first
_MAX_PROBES = 24
_OUT_OF_MEMORY = (
    "out of memory",
    "alloc_failed",
)  # cuBLAS and the driver do not raise torch's own class


@dataclass(frozen=True)
class LargestBatch:
    """The outcome of :func:`largest_batch`.

    Attributes:
        batch: the largest that fitted, 0 if not even one pair did.
        peak_bytes: what it took.
        capped: whether ``max_batch`` ended the search, so that more would fit.
        bytes_per_pair: what one more pair takes; ``None`` if fewer than two batches fitted.
        probes: every ``(batch, peak bytes or None)`` in the order tried.
    """

    batch: int
    peak_bytes: int
    capped: bool
    bytes_per_pair: float | None
    probes: tuple[tuple[int, int | None], ...] = field(default_factory=tuple)


def largest_batch(
    peak: Callable[[int], int | None],
    limit: int,
    *,
    start: int = 2,
    max_batch: int = 8192,
) -> LargestBatch:
    """The largest batch that fits, within ``RESOLUTION``, from as few steps as possible.

    Peaks grow linearly with the batch: two small batches give the line, a quarter of what it
    predicts corrects it, the prediction itself and a batch 5% beyond the last success are then
    really run.

    Args:
        peak: runs a step of a batch; bytes at its peak, or ``None`` if it ran out of memory.
        limit: bytes that a step may take, which is what predictions aim at.
        start: the first batch tried.
        max_batch: never tried beyond.
    """
    probes: list[tuple[int, int | None]] = []
    batch: int | None = min(start, max_batch)
    while batch is not None and len(probes) < _MAX_PROBES:
        probes.append((batch, peak(batch)))
        batch = _next_probe(dict(probes), limit, max_batch)
    fitted = sorted((size, bytes_) for size, bytes_ in probes if bytes_ is not None)
    if not fitted:
        return LargestBatch(0, 0, False, None, tuple(probes))
    largest, bytes_ = fitted[-1]
    return LargestBatch(largest, bytes_, largest >= max_batch, _slope(fitted), tuple(probes))


def _next_probe(found: dict[int, int | None], limit: int, max_batch: int) -> int | None:
    """The batch to try next, or ``None`` when the answer is known to ``RESOLUTION``."""
    fitted = sorted((size, bytes_) for size, bytes_ in found.items() if bytes_ is not None)
    failed = min((size for size, bytes_ in found.items() if bytes_ is None), default=None)
    if not fitted:
        return failed // 2 if failed is not None and failed > 1 else None
    low = fitted[-1][0]
    above = _step_up(low)
    if low >= max_batch or (failed is not None and failed <= above):
        return None
    wanted = _predict(fitted, limit)
    if wanted > _MEASURED_SHARE * low:
        wanted = max(wanted // _MEASURED_SHARE, 2 * low)
    wanted = max(above, min(wanted, _LEAP * low, max_batch))
    if failed is not None and wanted >= failed:
        wanted = min(failed - 1, max(above, int(failed / RESOLUTION)))
    return min(wanted, max_batch)


def _predict(fitted: list[tuple[int, int]], limit: int) -> int:
    slope = _slope(fitted)
    low, bytes_ = fitted[-1]
    if slope is None:
        return 2 * low
    return low + int((limit - bytes_) / slope) if slope > 0 else _LEAP * low


def _slope(fitted: list[tuple[int, int]]) -> float | None:
    """Bytes per pair, between the largest batch and the largest one of at most half its size: far
    enough apart.
    """
    if len(fitted) < 2:
        return None
    large, more = fitted[-1]
    small, less = max((point for point in fitted if 2 * point[0] <= large), default=fitted[-2])
    return (more - less) / (large - small)


def _step_up(batch: int) -> int:
    return max(batch + 1, int(batch * RESOLUTION))


class Meter:
    """Runs steps under a memory limit and says what they took at their peak.

    On CUDA the limit holds for torch's allocator (``set_per_process_memory_fraction``), model,
    optimiser and cached blocks included, and running into it is an out-of-memory error as on a
    smaller card. A CPU has no such limit: there the peak of resident memory above the model counts,
    and a step over the limit is called one that does not fit.

    Args:
        device: where the steps run.
        limit_gib: GiB; by default all of a GPU that is free, less 2 GiB for libraries, and 4 GiB on
            a CPU.

    Raises:
        ValueError: for a limit that is not positive or is more than the device has.
    """

    def __init__(self, device: torch.device, limit_gib: float | None = None) -> None:
        self.device = device
        free = free_memory_bytes(device)
        if device.type == "cuda":
            available = free_memory_bytes(device) or 0
            largest = available + torch.cuda.memory_reserved(device) - RESERVE_BYTES
        else:
            largest = free if free is not None else 2**62
        if limit_gib is None:
            self.limit_bytes = (
                largest if device.type == "cuda" else int(min(CPU_LIMIT_GIB * 2**30, largest))
            )
        else:
            self.limit_bytes = int(limit_gib * 2**30)
        if not 0 < self.limit_bytes <= largest:
            raise ValueError(
                f"memory-gib must be greater than 0 and at most {largest / 2**30:.1f} on this "
                "device now, "
                f"got {limit_gib}.",
            )
        self._set_fraction(self.limit_bytes)

    @property
    def limit_gib(self) -> float:
        """The limit in GiB."""
        return self.limit_bytes / 2**30

    def close(self) -> None:
        """Take the limit off again."""
        release(self.device, collect=True)
        self._set_fraction(None)

    def peak(self, run: Callable[[], Any]) -> int | None:
        """Bytes at the peak of ``run``, or ``None`` if it does not fit."""
        release(self.device)
        if self.device.type != "cuda":
            bytes_ = int(resident_peak_mib(run) * 2**20)
            return bytes_ if bytes_ <= self.limit_bytes else None
        torch.cuda.reset_peak_memory_stats(self.device)
        if not fits(run):
            release(self.device, collect=True)  # frames of the error hold tensors
            return None
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def _set_fraction(self, limit: int | None) -> None:
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            share = 1.0 if limit is None else min(1.0, limit / total)
            torch.cuda.set_per_process_memory_fraction(
                share,
                self.device.index,
            )  # None: the current one


def fits(run: Callable[[], Any]) -> bool:
    """Whether ``run`` ends without running out of memory; other errors are raised."""
    try:
        run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, in torch, in a library or in the driver."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in text for words in _OUT_OF_MEMORY
    )


def release(device: torch.device, *, collect: bool = False) -> None:
    """Give cached blocks back; ``collect`` first frees what only cycles hold (half a second in a
    large process).
    """
    if collect:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
