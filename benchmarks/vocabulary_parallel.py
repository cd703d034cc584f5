"""Time of a step of the LSR head: the whole vocabulary on one device, and shared by the ranks of a
torchrun.

On two GPUs::

    torchrun --standalone --nproc-per-node 2 -m benchmarks.vocabulary_parallel

Every rank times the whole problem on its own device first, then all ranks time the shared one; a
row shows, over the iterations, the 20th, 50th and 80th percentile of the slowest rank. Nothing is
printed unless the shared scores and gradients agree with the whole ones within the budgets of
tilefold.testing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.ranks import Row, joined, memory_now, of_all_ranks, print_table
from tilefold.losses import flops
from tilefold.ops import lsr_head
from tilefold.testing import budget, relative_error
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs

CALLS = 5


def main() -> None:
    """Parse arguments, join the world, gate, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="16,512,768,250002", help="B,S,D,V")
    parser.add_argument("--density", default="sparse", choices=("sparse", "mixed", "dense"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--iterations", type=int, default=30)
    options = parser.parse_args()
    shape = [int(size) for size in options.shape.split(",")]
    with joined() as device:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        inputs = lsr_head_inputs(
            *shape,
            dtype=getattr(torch, options.dtype),
            device=device,
            density=options.density,
            layout="full",
        )
        rows = measure(inputs, mesh, options.iterations)
        title = f"LSR head at B,S,D,V = {options.shape}, {options.dtype}, {options.density} scores"
        print_table(f"{title}; {options.iterations} iterations", "what", rows, device)


def measure(inputs: LSRHeadInputs, mesh: DeviceMesh, iterations: int) -> list[Row]:
    """Rows of (name, milliseconds of the slowest rank by iteration, peak extra MB of the largest
    rank).
    """
    whole = [t for t in (inputs.hidden, inputs.weight, inputs.bias) if t is not None]
    hidden, *head = whole
    shared: list[Tensor] = [DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)]
    shared += [distribute_tensor(t, mesh, [Shard(0)]) for t in head]
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
    for name, expected, got in zip(
        ("scores", "dhidden", "dweight", "dbias"),
        whole,
        shared,
        strict=True,
    ):
        # both sides are within their budget of the truth
        allowed = 2 * budget(expected.dtype, "forward" if name == "scores" else "gradient")
        error = relative_error(got.full_tensor() if isinstance(got, DTensor) else got, expected)
        if error > allowed:
            raise RuntimeError(
                f"{name} of the shared head must be within {allowed:.1e} of the whole one, got "
                f"{error:.1e}.",
            )


def timed(
    call: Callable[[], object],
    mesh: DeviceMesh,
    iterations: int,
) -> tuple[list[float], float]:
    """Milliseconds of a call in each iteration and peak extra MB, of the slowest and the largest
    rank.

    A GPU gets CALLS calls at a time, as in training, where the host runs ahead of it.
    """
    device, group = torch.device(mesh.device_type), mesh.get_group()
    for _ in range(5 if device.type == "cuda" else 1):
        call()
    new_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    before, mine = memory_now(device), []
    for _ in range(iterations):
        dist.barrier(group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, end = (new_event() for _ in range(2))
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
    return of_all_ranks(mine, before, device, group)


if __name__ == "__main__":
    main()
