"""Fallback for kernels that cannot be built: another kernel, or the tiled path for ``"auto"``.

A process warns once of each kernel that it gives up on a device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from tilefold.ops._shared._triton import releases

T = TypeVar("T")

# why a kernel was given up in this process, by its name and device
GIVEN_UP: dict[tuple[str, torch.device], str] = {}
TILED_PATH_RUNS = (
    "The tiled torch path runs instead: the same results within rounding, several times slower."
)


class KernelUnavailableError(RuntimeError):
    """Triton cannot build a kernel, or the device cannot load or launch it.

    Args:
        kernel: name of the kernel's function.
        reason: what failed.
        fallback: name of the kernel for warnings, and a sentence that says what runs in its place;
            ``None`` if only the tiled path can.
    """

    def __init__(
        self,
        kernel: str,
        reason: str,
        fallback: tuple[str, str] | None = None,
    ) -> None:
        """Describe what cannot be built.

        Args:
            kernel: name of the kernel's function.
            reason: what failed.
            fallback: name of the kernel for warnings, and a sentence that says what runs in its
                place; ``None`` if only the tiled path can.
        """
        super().__init__(reason)
        self.kernel = kernel
        self.fallback = fallback

    def __str__(self) -> str:
        return f"{self.kernel} cannot be built ({super().__str__()})"


class FallbackWarning(UserWarning):
    """A slower kernel, or the tiled path, runs in place of a kernel that cannot be built."""


def try_kernels(run: Callable[..., T], *arguments: object) -> T | KernelUnavailableError:
    """Return ``run(*arguments)``, or the error if a kernel cannot be built.

    No other function catches :class:`KernelUnavailableError`.
    """
    try:
        return run(*arguments)
    except KernelUnavailableError as error:
        return error


def given_up(kernel: str, device: torch.device) -> str | None:
    """Why ``kernel`` was given up on ``device`` in this process, or ``None`` if it was not."""
    return GIVEN_UP.get((kernel, device))


def give_up(kernel: str, device: torch.device, reason: str, consequence: str) -> None:
    """Remember that ``kernel`` cannot run on ``device``, and warn the first time.

    Args:
        kernel: name of the operator and of the kernel.
        device: where the kernel cannot run.
        reason: what failed.
        consequence: sentence that says what runs in its place, and what that costs.
    """
    if (kernel, device) in GIVEN_UP:
        return
    GIVEN_UP[kernel, device] = reason
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    release = releases.release_name()
    warnings.warn(
        f"{kernel} cannot run on {device_name} with Triton {release}: {reason}. {consequence}",
        FallbackWarning,
        stacklevel=2,
    )


def refuse_capture(operator: str, device: torch.device) -> None:
    """Raise ``RuntimeError`` if an operator without kernels is called while a graph is captured.

    The tiled path would run in place of the kernels. It waits for the GPU, which a CUDA graph
    cannot contain.

    Args:
        operator: name of the operator, which may have been given up.
        device: where it runs.
    """
    if (operator, device) in GIVEN_UP and is_capturing(device):
        raise RuntimeError(
            f"{operator} cannot be captured in a CUDA graph here: {GIVEN_UP[operator, device]}, "
            "and the tiled torch path that takes its place waits for the GPU. Leave this call out "
            "of the graph; a call before the capture (a warm up) says whether the kernels can be "
            "built.",
        )


def is_capturing(device: torch.device) -> bool:
    """Whether launches on ``device`` go into a CUDA graph at the moment."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
