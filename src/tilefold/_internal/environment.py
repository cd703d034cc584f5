"""The device and the libraries on which the bits of computed vectors depend."""

from __future__ import annotations

import contextlib
import functools
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from tilefold._internal.lazy import package_version

if TYPE_CHECKING:
    import torch

# Distributions that have held cuBLAS, the newest first.
_CUBLAS_DISTRIBUTIONS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")


def computing_environment(device: torch.device) -> dict[str, str]:
    """Return the name of a device, and the releases of the libraries that compute on it.

    Args:
        device: the device of a model.

    Returns:
        ``device`` and ``torch``; on a GPU also ``triton`` and ``cublas``, on a CPU also
        ``instructions``, the vector instructions that torch uses.
    """
    import torch

    environment = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        environment["device"] = torch.cuda.get_device_name(device)
        environment["triton"] = package_version("triton")
        environment["cublas"] = _cublas_version()
    else:
        environment["device"] = cpu_name()
        environment["instructions"] = torch.backends.cpu.get_cpu_capability()
    return dict(sorted(environment.items()))


def _cublas_version() -> str:
    """Return the release of cuBLAS, or that of the CUDA toolkit which torch was built with."""
    import torch

    releases = [package_version(distribution) for distribution in _CUBLAS_DISTRIBUTIONS]
    installed = [release for release in releases if release]
    return installed[0] if installed else f"of CUDA {torch.version.cuda}"


@functools.cache
def cpu_name() -> str:
    """Return the model name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
