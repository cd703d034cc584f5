"""The CUDA context of the thread that launches, without which the driver makes no TMA descriptor.

A thread that Python started has none until it first asks the runtime for something that needs one. Launching a kernel
does; choosing the device that is chosen already, or memory that the caching allocator has, does not. A descriptor is
made before its launch, so the launchers see to the context first.
"""

from __future__ import annotations

import threading

import torch


class _Entered(threading.local):
    """The devices whose context has been current in this thread."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_ENTERED = _Entered()


def enter_context(index: int) -> None:
    """Make the context of device ``index``, the current one, that of this thread too, once for each thread."""
    if index not in _ENTERED.devices:
        # a launch: nothing waits for it, and a stream that is being captured may hold it
        torch.zeros(1, dtype=torch.uint8, device=torch.device("cuda", index))
        _ENTERED.devices.add(index)
