"""Devices that search an index: one, or several among which its documents are divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from tilefold._internal.arguments import ArgumentError

Device: TypeAlias = str | torch.device
Devices: TypeAlias = Device | Sequence[Device]
"""One device, or several that search together. A device may be listed more than once."""


def device_list(device: Devices) -> list[torch.device]:
    """Return the devices of a search as a list.

    Args:
        device: one device, or several that search together.

    Raises:
        ValueError: if there is no device.
    """
    if isinstance(device, str | torch.device):
        return [torch.device(device)]
    devices = [torch.device(name) for name in device]
    if not devices:
        raise ArgumentError(
            "device",
            "expected a device or a list of at least one, got an empty list. Pass 'cpu', 'cuda' or "
            "names of GPUs such as ['cuda:0', 'cuda:1'].",
        )
    return devices


def check_devices(devices: Sequence[torch.device]) -> None:
    """Raise torch's error for a device that does not exist."""
    for device in devices:
        torch.empty(1, device=device)
