"""Fallback for kernels that cannot be built: another kernel, or the tiled path for ``"auto"``.

A process warns once of each kernel that fails on a device, and does not try it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from tilefold.ops._shared._triton import releases

T = TypeVar("T")

# Kernels that failed to build in this process: the reason by name and device.
FAILURES: dict[tuple[str, torch.device], str] = {}
TILED_PATH_NOTE = (
    "The tiled torch path runs instead: the same results within rounding, several times slower."
)


class KernelFallback(NamedTuple):
    """Replacement of a kernel that cannot be built.

    Attributes:
        kernel: name of the operator and of the kernel that cannot be built, for warnings.
        sentence: what runs instead, and its cost, for warnings.
    """

    kernel: str
    sentence: str


class KernelUnavailableError(RuntimeError):
    """Triton cannot build a kernel, or the device cannot load or launch it.

    Args:
        kernel: name of the kernel's function.
        reason: what failed.
        fallback: what runs instead; ``None`` if only the tiled path can.
    """

    def __init__(
        self,
        kernel: str,
        reason: str,
        fallback: KernelFallback | None = None,
    ) -> None:
        """Create the error of a kernel that failed.

        Args:
            kernel: name of the kernel's function.
            reason: what failed; the message quotes it.
            fallback: what runs instead; ``None`` if only the tiled path can.
        """
        super().__init__(reason)
        self.kernel = kernel
        self.fallback = fallback

    def __str__(self) -> str:
        return f"{self.kernel} cannot be built ({super().__str__()})"


class FallbackWarning(UserWarning):
    """A slower kernel, or the tiled path, runs in place of a kernel that cannot be built."""


def run_or_record_failure(
    kernel: str,
    device: torch.device,
    run: Callable[..., T],
    *arguments: object,
) -> T | None:
    """Return ``run(*arguments)``, or ``None`` if a kernel cannot be built.

    The failure is then recorded, with a warning that the tiled path runs.

    Args:
        kernel: name under which a failure of the kernel is recorded.
        device: device of the kernel.
        run: function that launches the kernel.
        *arguments: its arguments.
    """
    try:
        return run(*arguments)
    except KernelUnavailableError as error:
        warn_and_record_failure(kernel, device, str(error), TILED_PATH_NOTE)
        return None


def failure_of(kernel: str, device: torch.device) -> str | None:
    """Return why a kernel failed on a device in this process, ``None`` if it did not."""
    return FAILURES.get((kernel, device))


def warn_and_record_failure(
    kernel: str,
    device: torch.device,
    reason: str,
    consequence: str,
) -> None:
    """Remember that a kernel cannot run on a device, and warn the first time.

    Args:
        kernel: name of the operator, or of one of its kernels, as the warning shows it, such as
            ``"lsr_head's portable kernel with TMA"``.
        device: the device on which the kernel cannot run.
        reason: what failed.
        consequence: sentence that says what runs instead, and its cost.
    """
    if (kernel, device) in FAILURES:
        return
    FAILURES[kernel, device] = reason
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    triton_release = releases.release_name()
    warnings.warn(
        f"{kernel} cannot run on {device_name} with Triton {triton_release}: {reason}. "
        f"{consequence}",
        FallbackWarning,
        stacklevel=2,
    )


def refuse_capture(operator: str, device: torch.device) -> None:
    """Raise ``RuntimeError`` if a CUDA graph captures an operator whose kernels failed to build.

    The tiled path would run instead of the kernels. It synchronises with the GPU, which a CUDA
    graph cannot contain.

    Args:
        operator: name of the operator.
        device: device of the operator's tensors.
    """
    if (operator, device) in FAILURES and is_capturing(device):
        raise RuntimeError(
            f"{operator} cannot be captured in a CUDA graph here: {FAILURES[operator, device]}, "
            "and the tiled torch path that runs instead synchronises with the GPU. Leave this call "
            "out of the graph; a call before the capture (a warm up) says whether the kernels can "
            "be built.",
        )


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph captures the launches on a device at the moment."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
