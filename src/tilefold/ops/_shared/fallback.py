"""Fallback where a kernel cannot be built: another one, after one warning; no call dies of a missing fast path.

Triton may be too old or too new for a kernel, its assembler may fail, or a device may have less shared memory than a
tile wants. The launcher then raises :class:`KernelUnavailableError`. Who planned the launch remembers that with
:func:`give_up`, which warns, and plans the next best kernel. Behind all kernels stands the tiled torch path, for
``impl="auto"``; ``impl="triton"`` raises.
"""

from __future__ import annotations

import warnings

import torch

from tilefold.ops._shared._triton import releases


class KernelUnavailableError(RuntimeError):
    """Triton cannot build ``kernel`` here, or the device cannot hold it.

    Who plans and knows that beforehand says what stands behind it, an :class:`tilefold.ops._shared.plan.Instead`.
    """

    def __init__(self, kernel: str, why: str, instead: tuple[str, str] | None = None) -> None:
        super().__init__(why)
        self.kernel, self.instead = kernel, instead

    def __str__(self) -> str:
        return f"{self.kernel} cannot be built ({super().__str__()})"


class FallbackWarning(UserWarning):
    """A slower kernel, or none, runs in the place of one that cannot be built."""


SLOWER = "The tiled torch path runs instead: the same results within rounding, several times slower."
_GIVEN_UP: dict[tuple[str, torch.device], str] = {}


def given_up(kernel: str, device: torch.device) -> str | None:
    """Why ``kernel`` was given up on ``device`` in this process, or ``None`` if it was not."""
    return _GIVEN_UP.get((kernel, device))


def everything_given_up() -> tuple[tuple[str, torch.device], ...]:
    """All that was given up in this process, part of what a plan depends on."""
    return tuple(_GIVEN_UP)


def given_up_on(device: torch.device) -> frozenset[str]:
    """The kernels that were given up on ``device`` in this process."""
    return frozenset(kernel for kernel, where in _GIVEN_UP if where == device)


def give_up(kernel: str, device: torch.device, why: str, instead: str) -> None:
    """Remember that ``kernel`` cannot run on ``device``, and warn the first time.

    Args:
        kernel: the operator and which of its kernels, as people call them.
        why: the reason.
        instead: what runs in its place and what that costs, a sentence.
    """
    if (kernel, device) in _GIVEN_UP:
        return
    _GIVEN_UP[kernel, device] = why
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    text = f"{kernel} cannot run on {name} with Triton {releases.release_name()}: {why}. {instead}"
    warnings.warn(text, FallbackWarning, stacklevel=2)


def refuse_capture(operator: str, device: torch.device) -> None:
    """Raise ``RuntimeError`` where the tiled path would take the place of kernels in a CUDA graph being captured."""
    if (operator, device) in _GIVEN_UP and is_capturing(device):
        raise RuntimeError(
            f"{operator} cannot be captured in a CUDA graph here: {_GIVEN_UP[operator, device]}, and the tiled torch "
            "path that takes its place waits for the GPU. Leave this call out of the graph; a call before the capture "
            "(a warm up) says whether the kernels can be built."
        )


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on ``device`` now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
