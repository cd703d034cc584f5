"""A command on several devices: started once more for each of them."""

from __future__ import annotations

import os
import sys

from tilefold._ranks import MEET, run_ranks, started
from tilefold.cli._common import UsageError, arguments

HELP = "GPUs to use, a number or all: a process for each shares the work. Without GPUs, processes."


def run_on(devices: str | None) -> int | None:
    """Run the command on so many devices; its exit code, or None where this process is to run it."""
    if devices is None or MEET in os.environ:
        return None
    if started():
        raise UsageError("--devices: torchrun has started the ranks already; leave --devices out.")
    import torch

    gpus = torch.cuda.device_count()
    count = max(1, gpus) if devices == "all" else int(devices) if devices.isdecimal() else 0
    if count < 1 or (gpus and count > gpus):
        most = f"from 1 to {gpus}, the GPUs of this machine" if gpus else "1 or more"
        raise UsageError(f"--devices: expected 'all' or a whole number, {most}, got {devices!r}.")
    if count == 1:
        return None
    return run_ranks([sys.executable, "-m", "tilefold.cli", *arguments], count)
