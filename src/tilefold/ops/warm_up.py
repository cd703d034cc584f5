"""Kernels built ahead of their first call, several at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilefold.ops._shared.fallback import KernelUnavailableError, try_kernels
from tilefold.ops._shared.internals import triton_cache

__all__ = ["Built", "build_kernels", "check_kernels_can_be_built"]


@dataclass(frozen=True)
class Built:
    """Result of :func:`build_kernels`.

    Attributes:
        kernels: the kernels that the calls launch, by name, and how many builds of each: one per
            kind of arguments.
        failed: what could not be built, and why.
        seconds: for listing, building and one run of each call.
        first_calls: seconds of that run of each call alone.
        cache: the folder where Triton keeps them for later processes.
    """

    kernels: dict[str, int]
    failed: tuple[str, ...]
    seconds: float
    first_calls: tuple[float, ...]
    cache: Path

    @property
    def count(self) -> int:
        """Builds of all kernels."""
        return sum(self.kernels.values())


def check_kernels_can_be_built() -> None:
    """Refuse a machine on which Triton builds no kernels.

    Raises:
        RuntimeError: there is no CUDA device, no Triton, or kernels are interpreted.
    """
    from tilefold.ops._shared.impl import triton_installed, triton_interpreted

    if not torch.cuda.is_available():
        raise RuntimeError(
            "kernels are built for the GPU that runs them, and torch sees none here; on a CPU nothing is built.",
        )
    if not triton_installed():
        raise RuntimeError(
            "kernels are built by Triton, which is not installed; pip install triton.",
        )
    if triton_interpreted():
        raise RuntimeError(
            "kernels are interpreted with TRITON_INTERPRET=1 and never built; unset it.",
        )


def build_kernels(calls: Iterable[Callable[[], object]], workers: int | None = None) -> Built:
    """Build what the calls launch, in ``workers`` threads, then run each call once.

    Every call first runs without launching anything, so nothing on the host may depend on what
    kernels write. Triton keeps what it builds on the disk, so that later processes on this machine
    load it.

    Args:
        calls: functions of no argument on the current CUDA device; what they return is dropped.
        workers: threads; by default one per core, at most 16.

    Raises:
        RuntimeError: nothing can be built here.
        ValueError: for fewer than one worker.
    """
    check_kernels_can_be_built()
    from tilefold.ops._shared._triton.launch import Build, recorded_builds

    workers = min(16, os.cpu_count() or 1) if workers is None else workers
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    begin, calls, device = time.perf_counter(), list(calls), torch.cuda.current_device()
    with recorded_builds() as launches:
        for call in calls:
            call()
    torch.cuda.synchronize()

    def build(launch: Build) -> str | None:
        torch.cuda.set_device(device)
        failed: Any = try_kernels(launch.__call__)
        return str(failed) if isinstance(failed, KernelUnavailableError) else None

    with ThreadPoolExecutor(workers) as pool:
        failed = tuple(
            message for message in pool.map(build, launches.values()) if message is not None
        )
    kernels: dict[str, int] = {}
    for launch in launches.values():
        kernels[launch.kernel.__name__] = kernels.get(launch.kernel.__name__, 0) + 1
    first_calls = []
    for call in calls:
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        first_calls.append(time.perf_counter() - start)
    return Built(
        kernels,
        failed,
        time.perf_counter() - begin,
        tuple(first_calls),
        Path(triton_cache()),
    )
