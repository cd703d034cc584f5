"""What scripts under torchrun share: joining the ranks, and the table of the slowest one."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

import tilefold
from tilefold.bench.results import cpu_name

Row = tuple[str, list[float], float]  # name, milliseconds of each iteration, peak extra MB


@contextmanager
def joined() -> Iterator[torch.device]:
    """Join the ranks of torchrun; this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def memory_now(device: torch.device) -> int:
    """Bytes that tensors take; the peak is counted from here. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def of_all_ranks(
    mine: Sequence[float],
    before: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[float], float]:
    """Milliseconds of each iteration on the slowest rank, and peak MB above ``before`` bytes on the
    largest.
    """
    peak = (
        (torch.cuda.max_memory_allocated() - before) / 1e6
        if device.type == "cuda"
        else float("nan")
    )
    times = torch.tensor([*mine, peak], dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    return times[:-1].tolist(), times[-1].item()


def print_table(title: str, first: str, rows: Sequence[Row], device: torch.device) -> None:
    """One Markdown table with its provenance, on the first rank."""
    if dist.get_rank() != 0:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    print(
        f"{title}; {dist.get_world_size()} x {name}; torch {torch.__version__}, tilefold "
        f"{tilefold.__version__}\n",
    )
    print(f"| {first} | median ms | p20 | p80 | peak extra MB |\n|---|---|---|---|---|")
    for what, times, peak in rows:
        p20, *_, p80 = statistics.quantiles(times, n=5)
        print(f"| {what} | {statistics.median(times):.3f} | {p20:.3f} | {p80:.3f} | {peak:.0f} |")
