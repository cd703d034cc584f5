"""Time of a step of the LSR head: the whole vocabulary on one device, and shared by the ranks of a torchrun.

On two GPUs::

    torchrun --standalone --nproc-per-node 2 benchmarks/vocabulary_parallel.py

Every rank times the whole problem on its own device first, then all ranks time the shared one; a row shows, over the
iterations, the 20th, 50th and 80th percentile of the slowest rank. Nothing is printed unless the shared scores and
gradients agree with the whole ones within the budgets of tilefold.testing.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilefold
from tilefold.losses import flops
from tilefold.ops import lsr_head
from tilefold.testing import budget, relative_error
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs

CALLS = 5


def main() -> None:
    """Parse arguments, join the world, gate, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="16,512,768,250002", help="B,S,D,V")
    parser.add_argument("--density", default="sparse", choices=("sparse", "mixed", "dense"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--iterations", type=int, default=30)
    options = parser.parse_args()
    shape = [int(size) for size in options.shape.split(",")]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        inputs = lsr_head_inputs(
            *shape, dtype=getattr(torch, options.dtype), device=device, density=options.density, layout="full"
        )
        rows = measure(inputs, mesh, options.iterations)
        if dist.get_rank() == 0:
            report(options, rows, device)
    finally:
        dist.destroy_process_group()


def measure(inputs: LSRHeadInputs, mesh: DeviceMesh, iterations: int) -> list[tuple[str, list[float], float]]:
    """Rows of (name, milliseconds of the slowest rank by iteration, peak extra MB of the largest rank)."""
    whole = [inputs.hidden, inputs.weight, inputs.bias]
    placements = ([Replicate()], [Shard(0)], [Shard(0)])
    shared = [
        DTensor.from_local(t, mesh, p, run_check=False) if p == [Replicate()] else distribute_tensor(t, mesh, p)
        for t, p in zip(whole, placements, strict=True)
    ]
    dscores = distribute_tensor(inputs.dscores, mesh, [Shard(1)])
    for leaf in (*whole, *shared):
        leaf.requires_grad_()
    gate(step(whole, inputs.dscores), step(shared, dscores))
    dhidden = torch.zeros(inputs.hidden.shape, device=inputs.hidden.device)
    scores = torch.rand(inputs.dscores.shape, device=inputs.hidden.device)
    names: dict[str, Callable[[], object]] = {
        "whole, forward": lambda: lsr_head(*whole),
        "whole, forward + backward": lambda: step(whole, inputs.dscores),
        "shared, forward": lambda: lsr_head(*shared),
        "shared, forward + backward": lambda: step(shared, dscores),
        "all-reduce of dhidden (fp32)": lambda: dist.all_reduce(dhidden, group=mesh.get_group()),
        "global FLOPS of [B, V], forward": lambda: flops(scores, group=mesh.get_group()),
    }
    return [(name, *timed(call, mesh, iterations)) for name, call in names.items()]


def step(leaves: list[Tensor], dscores: Tensor) -> list[Tensor]:
    """Scores and the three gradients."""
    scores = lsr_head(*leaves)
    return [scores.detach(), *torch.autograd.grad(scores, leaves, dscores)]


def gate(whole: list[Tensor], shared: list[Tensor]) -> None:
    """Refuse to time a head that is wrong."""
    for name, expected, got in zip(("scores", "dhidden", "dweight", "dbias"), whole, shared, strict=True):
        # both sides are within their budget of the truth
        allowed = 2 * budget(expected.dtype, "forward" if name == "scores" else "gradient")
        error = relative_error(got.full_tensor(), expected)
        if error > allowed:
            raise RuntimeError(
                f"{name} of the shared head must be within {allowed:.1e} of the whole one, got {error:.1e}."
            )


def timed(call: Callable[[], object], mesh: DeviceMesh, iterations: int) -> tuple[list[float], float]:
    """Milliseconds of a call in each iteration and peak extra MB, of the slowest and the largest rank.

    A GPU gets CALLS calls at a time, as in training, where the host runs ahead of it.
    """
    cuda = mesh.device_type == "cuda"
    for _ in range(5 if cuda else 1):
        call()
    base = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    mine = []
    for _ in range(iterations):
        dist.barrier(group=mesh.get_group())
        if cuda:
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            mine.append(start.elapsed_time(end) / CALLS)
        else:
            begin = time.perf_counter()
            call()
            mine.append(1e3 * (time.perf_counter() - begin))
    peak = (torch.cuda.max_memory_allocated() - base) / 1e6 if cuda else float("nan")
    times = torch.tensor([*mine, peak], dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=mesh.get_group())
    return times[:-1].tolist(), times[-1].item()


def report(options: argparse.Namespace, rows: list[tuple[str, list[float], float]], device: torch.device) -> None:
    """One Markdown table with its provenance."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    print(
        f"LSR head at B,S,D,V = {options.shape}, {options.dtype}, {options.density} scores; {dist.get_world_size()} x "
        f"{name}; torch {torch.__version__}, tilefold {tilefold.__version__}; {options.iterations} iterations\n"
    )
    print("| what | median ms | p20 | p80 | peak extra MB |\n|---|---|---|---|---|")
    for what, times, peak in rows:
        p20, *_, p80 = statistics.quantiles(times, n=5)
        print(f"| {what} | {statistics.median(times):.3f} | {p20:.3f} | {p80:.3f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
