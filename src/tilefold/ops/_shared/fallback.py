"""Fallback where a kernel cannot be built: another one, after one warning; at last the tiled path,
for ``"auto"``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from tilefold.ops._shared._triton import releases


class KernelUnavailableError(RuntimeError):
    """Triton cannot build ``kernel`` here, or the device cannot hold it; plans may say what stands
    ``instead``.
    """

    def __init__(self, kernel: str, why: str, instead: tuple[str, str] | None = None) -> None:
        super().__init__(why)
        self.kernel, self.instead = kernel, instead

    def __str__(self) -> str:
        return f"{self.kernel} cannot be built ({super().__str__()})"


class FallbackWarning(UserWarning):
    """A slower kernel, or none, runs in the place of one that cannot be built."""


T = TypeVar("T")
SLOWER = (
    "The tiled torch path runs instead: the same results within rounding, several times slower."
)
GIVEN_UP: dict[tuple[str, torch.device], str] = {}


def attempt(run: Callable[..., T], *given: object) -> T | KernelUnavailableError:
    """``run(*given)``, or the error where a kernel cannot be built: the one place where such errors
    are caught.
    """
    try:
        return run(*given)
    except KernelUnavailableError as error:
        return error


def given_up(kernel: str, device: torch.device) -> str | None:
    """Why ``kernel`` was given up on ``device`` in this process, or ``None`` if it was not."""
    return GIVEN_UP.get((kernel, device))


def give_up(kernel: str, device: torch.device, why: str, instead: str) -> None:
    """Remember that ``kernel`` cannot run on ``device``, and warn the first time; ``instead`` is a
    sentence.
    """
    if (kernel, device) in GIVEN_UP:
        return
    GIVEN_UP[kernel, device] = why
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    text = f"{kernel} cannot run on {name} with Triton {releases.release_name()}: {why}. {instead}"
    warnings.warn(text, FallbackWarning, stacklevel=2)


def refuse_capture(operator: str, device: torch.device) -> None:
    """Raise ``RuntimeError`` where the tiled path would take the place of kernels in a CUDA graph
    being captured.
    """
    if (operator, device) in GIVEN_UP and is_capturing(device):
        raise RuntimeError(
            f"{operator} cannot be captured in a CUDA graph here: {GIVEN_UP[operator, device]}, and the tiled torch "
            "path that takes its place waits for the GPU. Leave this call out of the graph; a call before the capture "
            "(a warm up) says whether the kernels can be built.",
        )


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on ``device`` now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
