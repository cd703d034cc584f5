"""Helpers of scripts under torchrun: joining the ranks, and the table of the slowest one."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import tilefold
from tilefold._internal.environment import cpu_name

MB = 1e6


@dataclass(frozen=True)
class RankRow:
    """A row of the table.

    Attributes:
        name: description of what was timed.
        times_ms: the milliseconds of each iteration on the slowest rank.
        peak_mb: memory above that before, in MB, on the rank with the most. NaN on CPUs.
    """

    name: str
    times_ms: Sequence[float]
    peak_mb: float


@contextmanager
def join_torchrun() -> Iterator[torch.device]:
    """Join the ranks of torchrun, and yield the device of this rank."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def reset_peak_memory(device: torch.device) -> int:
    """Reset the peak of allocated memory, and return the bytes of tensors now (0 on a CPU)."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def slowest_rank(
    name: str,
    times_ms: Sequence[float],
    bytes_before: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> RankRow:
    """Return the row of the slowest rank in each iteration. All ranks must call this.

    Args:
        name: description of what was timed.
        times_ms: the milliseconds of each iteration on this rank.
        bytes_before: allocated memory before, from :func:`reset_peak_memory`.
        device: the device of this rank.
        group: the ranks. By default all.
    """
    peak_mb = float("nan")
    if device.type == "cuda":
        peak_mb = (torch.cuda.max_memory_allocated() - bytes_before) / MB
    values = torch.tensor([*times_ms, peak_mb], dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    *slowest_ms, largest_peak_mb = values.tolist()
    return RankRow(name, slowest_ms, largest_peak_mb)


def print_table(
    title: str,
    first_column: str,
    rows: Sequence[RankRow],
    device: torch.device,
) -> None:
    """Print a Markdown table with its provenance, on rank 0 only.

    Args:
        title: title of the table.
        first_column: header of the first column.
        rows: the measurements.
        device: device of this rank.
    """
    if dist.get_rank() != 0:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    print(
        f"{title}; {dist.get_world_size()} x {name}; torch {torch.__version__}, tilefold "
        f"{tilefold.__version__}\n",
    )
    print(f"| {first_column} | median ms | p20 | p80 | peak extra MB |\n|---|---|---|---|---|")
    for row in rows:
        p20, *_, p80 = statistics.quantiles(row.times_ms, n=5)
        median = statistics.median(row.times_ms)
        print(f"| {row.name} | {median:.3f} | {p20:.3f} | {p80:.3f} | {row.peak_mb:.0f} |")
