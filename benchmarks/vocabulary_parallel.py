"""Time a step of the LSR head with its vocabulary divided among the ranks of torchrun.

On two GPUs::

    torchrun --standalone --nproc-per-node 2 -m benchmarks.vocabulary_parallel

Timed: forward, and forward with backward, of all ranks together. A row has the 20th, 50th and 80th
percentile over the iterations, of the slowest rank.

Baseline: the undivided head, which every rank times on its own device first.

Gate: scores and gradients of the divided head must agree with those of the undivided one within the
budgets of tilefold.testing. Otherwise nothing is printed.
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

from benchmarks.ranks import (
    RankRow,
    join_torchrun,
    print_table,
    reset_peak_memory,
    slowest_rank,
)
from tilefold.losses import flops
from tilefold.ops import lsr_head
from tilefold.testing import budget, relative_error
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs

# calls of a sample on a GPU, which the CPU runs ahead of, as in training
CALLS_PER_SAMPLE = 5
GPU_WARMUP_CALLS = 5


def main() -> None:
    """Check the divided head, time both, and print the table."""
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
    with join_torchrun() as device:
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


def measure(inputs: LSRHeadInputs, mesh: DeviceMesh, iterations: int) -> list[RankRow]:
    """Check the divided head, and time it, the undivided head and the communication.

    Args:
        inputs: the problem, equal on all ranks.
        mesh: the ranks.
        iterations: the number of samples of each row.
    """
    operands = (inputs.hidden, inputs.weight, inputs.bias)
    whole = [operand for operand in operands if operand is not None]
    hidden, *head = whole
    divided: list[Tensor] = [DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)]
    divided += [distribute_tensor(parameter, mesh, [Shard(0)]) for parameter in head]
    dscores = distribute_tensor(inputs.dscores, mesh, [Shard(1)])
    for leaf in (*whole, *divided):
        leaf.requires_grad_()
    check(step(whole, inputs.dscores), step(divided, dscores))
    dhidden = torch.zeros(inputs.hidden.shape, device=inputs.hidden.device)
    scores = torch.rand(inputs.dscores.shape, device=inputs.hidden.device)
    calls: dict[str, Callable[[], object]] = {
        "whole, forward": lambda: lsr_head(*whole),
        "whole, forward + backward": lambda: step(whole, inputs.dscores),
        "shared, forward": lambda: lsr_head(*divided),
        "shared, forward + backward": lambda: step(divided, dscores),
        "all-reduce of dhidden (fp32)": lambda: dist.all_reduce(dhidden, group=mesh.get_group()),
        "global FLOPS of [B, V], forward": lambda: flops(scores, group=mesh.get_group()),
    }
    return [time_call(name, call, mesh, iterations) for name, call in calls.items()]


def step(leaves: list[Tensor], dscores: Tensor) -> list[Tensor]:
    """Return the scores, and the gradients of hidden states, weight and bias."""
    scores = lsr_head(*leaves)
    return [scores.detach(), *torch.autograd.grad(scores, leaves, dscores)]


def check(whole: list[Tensor], divided: list[Tensor]) -> None:
    """Compare the results of :func:`step` of both heads.

    Args:
        whole: results of the head on one rank.
        divided: results of the divided head.

    Raises:
        RuntimeError: if they differ by more than their budget.
    """
    names = ("scores", "dhidden", "dweight", "dbias")
    for name, expected, result in zip(names, whole, divided, strict=True):
        kind = "forward" if name == "scores" else "gradient"
        # both are within their budget of the truth
        allowed = 2 * budget(expected.dtype, kind)
        gathered = result.full_tensor() if isinstance(result, DTensor) else result
        error = relative_error(gathered, expected)
        if error > allowed:
            raise RuntimeError(
                f"{name} of the shared head must be within {allowed:.1e} of the whole one, got "
                f"{error:.1e}.",
            )


def time_call(
    name: str,
    call: Callable[[], object],
    mesh: DeviceMesh,
    iterations: int,
) -> RankRow:
    """Time a call on all ranks.

    Args:
        name: the name of the row.
        call: the call, which may communicate.
        mesh: the ranks.
        iterations: the number of samples. The ranks wait for one another before each.

    Returns:
        The row of the slowest rank.
    """
    device = torch.device(mesh.device_type)
    group = mesh.get_group()
    for _ in range(GPU_WARMUP_CALLS if device.type == "cuda" else 1):
        call()
    bytes_before = reset_peak_memory(device)
    times_ms = []
    for _ in range(iterations):
        dist.barrier(group=group)
        times_ms.append(_sample_ms(call, device))
    return slowest_rank(name, times_ms, bytes_before, device, group)


def _sample_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a call, on a GPU the mean of several in a row."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    new_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    start = new_event()
    end = new_event()
    torch.cuda.synchronize()
    start.record()
    for _ in range(CALLS_PER_SAMPLE):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end) / CALLS_PER_SAMPLE
    return milliseconds


if __name__ == "__main__":
    main()
