"""Devices that search an index, alone or together, and the copies of its documents on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from tilefold._internal.arguments import ArgumentError

Device: TypeAlias = str | torch.device
Devices: TypeAlias = Device | Sequence[Device]
"""One device, or several that search together. A device may be listed more than once."""
# Bytes of a large copy to a GPU that are copied at a time. It takes less than a millisecond, for
# which the small copies of searches may wait.
_PIECE_BYTES = 4 << 20
CopyT = TypeVar("CopyT")


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


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without delaying the searches that other threads run there.

    A large tensor is copied from the CPU to a GPU in pieces, on a separate CUDA stream. Otherwise
    kernels that other threads launch meanwhile would wait for the whole copy. The copy is complete
    on return, so that kernels on any stream may read it.

    Args:
        tensor: the tensor, of any shape.
        device: the device.

    Returns:
        The copy; the tensor itself if it is on the device.
    """
    is_from_cpu_to_gpu = tensor.device.type == "cpu" and device.type == "cuda"
    if not is_from_cpu_to_gpu or tensor.nbytes <= _PIECE_BYTES:
        return tensor.to(device)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    source = _bytes_of(tensor.contiguous())
    target = _bytes_of(copy)
    # A GPU copies from pinned (page-locked) memory without the help of the CPU.
    pinned = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # torch may reuse freed memory for the copy while earlier kernels still read it.
    stream.wait_stream(torch.cuda.current_stream(device))
    for start in range(0, tensor.nbytes, _PIECE_BYTES):
        source_piece = source[start : start + _PIECE_BYTES]
        n_bytes = len(source_piece)
        # numpy copies in this thread, and torch would wake as many threads as there are cores.
        np.copyto(pinned[:n_bytes].numpy(), source_piece.numpy())
        with torch.cuda.stream(stream):
            target[start : start + n_bytes].copy_(pinned[:n_bytes], non_blocking=True)
        stream.synchronize()  # before the next bytes replace these
    return copy


def numbered(device: torch.device) -> torch.device:
    """Return a device with its number: ``cuda:0`` for ``cuda``, if that is the current GPU."""
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


class DeviceCopies(Generic[CopyT]):
    """Copies of an index's documents on devices, each made by the first search that needs it.

    Searches that other threads begin meanwhile wait for the copy, so that it is made once.

    Attributes:
        lock: lock that is held while a copy is made. Who holds it sees the free memory of a GPU
            before or after a copy, but not during it.
    """

    def __init__(self) -> None:
        """Begin without copies."""
        self.lock = threading.RLock()
        self._copies: dict[Hashable, CopyT] = {}

    def get(self, devices: Hashable, copy: Callable[[], CopyT]) -> CopyT:
        """Return the copy on a device, or the parts of a copy on several.

        Args:
            devices: the device, or the devices that have a part each.
            copy: function that makes the copy if there is none. If it raises an error, the next
                search tries again.
        """
        if devices not in self._copies:  # a search on a device that has a copy takes no lock
            with self.lock:
                if devices not in self._copies:
                    self._copies[devices] = copy()
        return self._copies[devices]

    def all(self) -> list[CopyT]:
        """Return all copies, in the order in which they were made."""
        return list(self._copies.values())

    def __contains__(self, devices: Hashable) -> bool:
        """Return whether the copy on a device, or on several, has been made."""
        return devices in self._copies

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without copies, whose devices another process may lack, and without the lock."""
        return DeviceCopies, ()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, uint8 ``[tensor.nbytes]``, in the same memory."""
    return tensor.view(-1).view(torch.uint8)
