"""Compilation of kernels before their first call, in several threads."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.internals import share_warning_filters, triton_cache

__all__ = ["Built", "build_kernels", "check_kernels_can_be_built"]


@dataclass(frozen=True)
class Built:
    """Result of :func:`build_kernels`.

    Attributes:
        kernels: number of builds of each kernel that the calls launch, by its name. There is one
            build per kind of arguments.
        failed: errors of kernels that could not be built.
        seconds: time to record, build and run all calls.
        first_calls: seconds of the run of each call.
        cache: folder in which Triton stores the kernels for later processes.
    """

    kernels: dict[str, int]
    failed: tuple[str, ...]
    seconds: float
    first_calls: tuple[float, ...]
    cache: Path

    @property
    def count(self) -> int:
        """Number of builds of all kernels."""
        return sum(self.kernels.values())


def check_kernels_can_be_built() -> None:
    """Raise an error on a machine on which Triton builds no kernels.

    Raises:
        RuntimeError: if there is no CUDA device or no Triton, or kernels are interpreted.
    """
    from tilefold.ops._shared.impl import triton_installed, triton_interpreted

    if not torch.cuda.is_available():
        raise RuntimeError(
            "kernels are built for the GPU that runs them, and torch sees none here; on a CPU "
            "nothing is built.",
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
    """Build the kernels that calls launch, in several threads, then run each call once.

    Every call first runs without launching anything, so nothing on the CPU may depend on what
    kernels write. Triton stores the kernels on disk, and later processes on this machine load them.

    Args:
        calls: functions without arguments, for the current CUDA device. Their results are dropped.
        workers: number of threads; by default one per core, at most 16.

    Raises:
        RuntimeError: if nothing can be built here.
        ValueError: if ``workers`` is below 1.
    """
    check_kernels_can_be_built()
    share_warning_filters()
    from tilefold.ops._shared._triton.launch import Build, recorded_builds

    if workers is None:
        workers = min(16, os.cpu_count() or 1)
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    begin = time.perf_counter()
    calls = list(calls)
    device = torch.cuda.current_device()
    with recorded_builds() as builds:
        for call in calls:
            call()
    torch.cuda.synchronize()

    def build_and_return_error(build: Build) -> str | None:
        """Build a kernel, and return the text of the error if that fails."""
        torch.cuda.set_device(device)
        try:
            build()
        except KernelUnavailableError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(workers) as pool:
        failures = list(pool.map(build_and_return_error, builds.values()))
    kernels = Counter(build.kernel.__name__ for build in builds.values())
    first_calls = []
    for call in calls:
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        first_calls.append(time.perf_counter() - start)
    return Built(
        kernels=dict(kernels),
        failed=tuple(failure for failure in failures if failure is not None),
        seconds=time.perf_counter() - begin,
        first_calls=tuple(first_calls),
        cache=Path(triton_cache()),
    )
