"""Asynchronous copies between host and device: pinned memory, and an event after the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A numpy array on `device`, in the order of the current stream."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Fetched:
    """Tensors on their way to the host.

    Args:
        tensors: on a GPU they are copied to pinned memory in the order of its current stream; on the CPU kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: Any = None
        self._host = list(tensors)
        device = tensors[0].device
        if device.type == "cuda":
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        elif device.type != "cpu":
            self._host = [tensor.cpu() for tensor in tensors]

    def get(self) -> list[Tensor]:
        """The tensors on the CPU; waits for the copies, and for nothing after them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
