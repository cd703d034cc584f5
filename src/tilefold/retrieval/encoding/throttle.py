"""Limit of the share of a machine that encoding takes, so that a server next to it stays fast."""

from __future__ import annotations

import os
import time

from tilefold._internal.arguments import ArgumentError, check_number
from tilefold.distributed.ranks import share_of_cores

__all__ = ["Throttle", "lower_priority"]

_LOWEST_PRIORITY = 19
# Longer pauses are shortened to this length, without a longer pause later.
_MAX_PAUSE_SECONDS = 60.0


class Throttle:
    """Pauses work so that it takes a limited share of the CPU cores, or of the GPU's time.

    The batches are not changed, so that the results keep their bits.

    Args:
        share: the share, above 0 and at most 1; 1 never pauses.
        on_gpu: whether the work is on a GPU. The time between two pauses then counts as its time.

    Raises:
        ValueError: if `share` is out of range.
    """

    def __init__(self, share: float, *, on_gpu: bool = False) -> None:
        check_number("share", share)
        if not 0 < share <= 1:
            raise ArgumentError("share", f"expected a number above 0 and up to 1, got {share:g}.")
        self.share = share
        self._on_gpu = on_gpu
        self._n_cores = share_of_cores(1)
        self._resume_measuring()

    def _resume_measuring(self) -> None:
        """Begin to measure the time of the work that follows."""
        self._wall_seconds = time.monotonic()
        self._cpu_seconds = time.process_time()

    def pause(self) -> None:
        """Sleep so long that the work since the last pause does not exceed its share.

        Call it after each batch.
        """
        elapsed = time.monotonic() - self._wall_seconds
        # The work stays within its share if it is spread over this wall time.
        if self._on_gpu:
            allowed_seconds = elapsed / self.share
        else:
            cpu_seconds = time.process_time() - self._cpu_seconds
            allowed_seconds = cpu_seconds / (self.share * self._n_cores)
        if self.share < 1 and allowed_seconds > elapsed:
            time.sleep(min(allowed_seconds - elapsed, _MAX_PAUSE_SECONDS))
        self._resume_measuring()


def lower_priority() -> None:
    """Give this process the lowest priority, where the system has priorities of this kind."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
