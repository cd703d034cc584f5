"""Memory of a training step, and the largest batch that fits.

The largest batch is predicted from measured steps, and confirmed by running it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tilefold.bench.timing import free_memory_bytes, resident_peak_mib

# memory of a GPU that libraries and kernels allocate outside of torch
RESERVE_BYTES = 2 * 2**30
CPU_LIMIT_GIB = 4.0
# a batch that is larger than the reported one by this factor did not fit
RESOLUTION = 1.05
# the next batch is at most larger by this factor, since predictions from tiny batches are rough
_MAX_GROWTH = 8
# a prediction that is larger by more than this factor is first corrected at this fraction of it
_CORRECTION_FACTOR = 4
_MAX_PROBES = 24
# in messages of cuBLAS and the driver, which do not raise torch's class
_OUT_OF_MEMORY = ("out of memory", "alloc_failed")


@dataclass(frozen=True)
class LargestBatch:
    """The outcome of :func:`largest_batch`.

    Attributes:
        batch: the largest batch that fitted. 0 if not even one pair did.
        peak_bytes: its peak memory.
        capped: whether the search ended at ``max_batch``, so that a larger one may fit.
        bytes_per_pair: the memory of one more pair. None if fewer than two batches fitted.
        probes: every ``(batch, peak bytes or None)``, in the order tried.
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
    """Find the largest batch that fits, within ``RESOLUTION``, from as few steps as possible.

    Peak memory grows linearly with the batch. Two small batches give the line, and a quarter of the
    predicted batch corrects it. Then the predicted batch is run, and one that is 5% larger than the
    last success.

    Args:
        peak: a function that runs a step of a batch. It returns the peak memory in bytes, or None
            if memory ran out.
        limit: the bytes that a step may take, for the predictions.
        start: the first batch to try.
        max_batch: the largest batch to try.
    """
    probes: list[tuple[int, int | None]] = []
    batch: int | None = min(start, max_batch)
    while batch is not None and len(probes) < _MAX_PROBES:
        probes.append((batch, peak(batch)))
        batch = _next_probe(dict(probes), limit, max_batch)
    fitted = sorted((size, n_bytes) for size, n_bytes in probes if n_bytes is not None)
    if not fitted:
        return LargestBatch(0, 0, False, None, tuple(probes))
    largest, peak_bytes = fitted[-1]
    return LargestBatch(
        batch=largest,
        peak_bytes=peak_bytes,
        capped=largest >= max_batch,
        bytes_per_pair=_bytes_per_pair(fitted),
        probes=tuple(probes),
    )


def _next_probe(peaks: dict[int, int | None], limit: int, max_batch: int) -> int | None:
    """Choose the batch to try next.

    Args:
        peaks: peak bytes of the batches that were tried. None for those that did not fit.
        limit: the bytes that a step may take.
        max_batch: the largest batch to try.

    Returns:
        The batch, or None if the largest one is known within ``RESOLUTION``.
    """
    fitted = sorted((size, n_bytes) for size, n_bytes in peaks.items() if n_bytes is not None)
    smallest_failed = min(
        (size for size, n_bytes in peaks.items() if n_bytes is None), default=None
    )
    if not fitted:
        if smallest_failed is None or smallest_failed == 1:
            return None
        return smallest_failed // 2
    largest, _ = fitted[-1]
    slightly_larger = _slightly_larger(largest)
    if largest >= max_batch:
        return None
    if smallest_failed is not None and smallest_failed <= slightly_larger:
        return None
    batch = _predict_largest(fitted, limit)
    if batch > _CORRECTION_FACTOR * largest:
        batch = max(batch // _CORRECTION_FACTOR, 2 * largest)
    batch = max(slightly_larger, min(batch, _MAX_GROWTH * largest, max_batch))
    if smallest_failed is not None and batch >= smallest_failed:
        slightly_smaller = int(smallest_failed / RESOLUTION)
        batch = min(smallest_failed - 1, max(slightly_larger, slightly_smaller))
    return min(batch, max_batch)


def _predict_largest(fitted: list[tuple[int, int]], limit: int) -> int:
    """Predict the largest batch within a limit of bytes.

    Args:
        fitted: sorted batches with their peak bytes.
        limit: the bytes that a step may take.
    """
    slope = _bytes_per_pair(fitted)
    largest, peak_bytes = fitted[-1]
    if slope is None:
        return 2 * largest
    if slope <= 0:
        return _MAX_GROWTH * largest
    return largest + int((limit - peak_bytes) / slope)


def _bytes_per_pair(fitted: list[tuple[int, int]]) -> float | None:
    """Return the memory of one more pair, or None for fewer than two batches.

    The largest batch is compared with the largest one of at most half its size, so that rounding
    of allocations matters little.

    Args:
        fitted: sorted batches with their peak bytes.
    """
    if len(fitted) < 2:
        return None
    large, large_bytes = fitted[-1]
    small, small_bytes = max(
        (point for point in fitted if 2 * point[0] <= large),
        default=fitted[-2],
    )
    return (large_bytes - small_bytes) / (large - small)


def _slightly_larger(batch: int) -> int:
    """Return the next batch at ``RESOLUTION``."""
    return max(batch + 1, int(batch * RESOLUTION))


class Meter:
    """Runs steps under a memory limit, and measures their peak memory.

    On CUDA the limit is that of torch's allocator (``set_per_process_memory_fraction``), for the
    model, the optimizer and cached blocks. A step over the limit fails as on a smaller GPU. A
    CPU has no such limit. There the peak of resident memory above the model is compared with it
    after the step.

    Args:
        device: the device of the steps.
        limit_gib: the limit in GiB. By default it is 4 GiB on a CPU, and the free memory of a GPU
            without 2 GiB for libraries.

    Raises:
        ValueError: if the limit is not positive, or exceeds the memory of the device.
    """

    def __init__(self, device: torch.device, limit_gib: float | None = None) -> None:
        """Limit the memory of a device.

        Args:
            device: the device.
            limit_gib: the limit in GiB; by default nearly all memory of a GPU, or
                ``CPU_LIMIT_GIB``.

        Raises:
            ValueError: if the device has less memory than the limit.
        """
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
                f"device now, got {limit_gib}.",
            )
        self._set_fraction(self.limit_bytes)

    @property
    def limit_gib(self) -> float:
        """The limit in GiB."""
        return self.limit_bytes / 2**30

    def close(self) -> None:
        """Remove the limit."""
        release(self.device, collect=True)
        self._set_fraction(None)

    def peak(self, run: Callable[[], Any]) -> int | None:
        """Return the peak memory of ``run`` in bytes, or None if it does not fit."""
        release(self.device)
        if self.device.type != "cuda":
            peak_bytes = int(resident_peak_mib(run) * 2**20)
            return peak_bytes if peak_bytes <= self.limit_bytes else None
        torch.cuda.reset_peak_memory_stats(self.device)
        if not fits(run):
            # frames of the error hold tensors
            release(self.device, collect=True)
            return None
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def _set_fraction(self, limit: int | None) -> None:
        """Limit torch's allocator to a number of bytes, or remove its limit for None."""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            share = 1.0 if limit is None else min(1.0, limit / total)
            # without an index, the current GPU is meant
            torch.cuda.set_per_process_memory_fraction(share, self.device.index)


def fits(run: Callable[[], Any]) -> bool:
    """Return whether ``run`` ends without running out of memory. Other errors are raised."""
    try:
        run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, according to torch, a library or the driver."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    message = str(error).lower()
    return any(words in message for words in _OUT_OF_MEMORY)


def release(device: torch.device, *, collect: bool = False) -> None:
    """Free the cached blocks of torch's allocator.

    Args:
        device: the device.
        collect: whether to collect reference cycles first, which takes half a second in a large
            process.
    """
    if collect:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
