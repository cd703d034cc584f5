"""In-batch negatives of late interaction from all ranks: documents on a ring, beside documents
gathered on every rank.

On two GPUs::

    torchrun --standalone --nproc-per-node 2 -m benchmarks.maxsim_ring

Each rank holds as many queries and documents. A row shows forward and backward of the loss:
percentiles of the slowest rank over the iterations, and the peak memory of the largest above the
embeddings. Nothing is printed unless both ways agree in loss and gradients within the budgets of
tilefold.testing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor

from benchmarks.ranks import joined, memory_now, of_all_ranks, print_table
from tilefold.ops import maxsim, maxsim_contrastive_loss
from tilefold.testing import budget, relative_error

SCALE = 20.0


def main() -> None:
    """Parse arguments, join the world, gate, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shape",
        default="256,32,1024,300,128",
        help="of a rank: queries, Lq, documents, Ld, D",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    with joined() as device:
        queries, documents = embeddings(
            [int(size) for size in options.shape.split(",")],
            options.dtype,
            device,
        )
        ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"gathered": gathered, "ring": ring}
        gate(*(step(way, queries, documents) for way in ways.values()))
        rows = [
            (name, *timed(way, queries, documents, options.iterations))
            for name, way in ways.items()
        ]
        title = f"of a rank: queries, Lq, documents, Ld, D = {options.shape}, {options.dtype}"
        print_table(title, "forward + backward", rows, device)


def embeddings(shape: list[int], dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's queries and documents, each token of norm 1."""
    n_queries, lq, n_documents, ld, dim = shape
    generator = torch.Generator().manual_seed(dist.get_rank())
    sides = (
        torch.randn(*size, dim, generator=generator)
        for size in ((n_queries, lq), (n_documents, ld))
    )
    queries, documents = (
        torch.nn.functional.normalize(side, dim=-1)
        .to(device, getattr(torch, dtype))
        .requires_grad_()
        for side in sides
    )
    return queries, documents


def ring(queries: Tensor, documents: Tensor) -> Tensor:
    """The loss of all ranks, documents on the ring."""
    return maxsim_contrastive_loss(queries, documents, scale=SCALE, group="world")


def gathered(queries: Tensor, documents: Tensor) -> Tensor:
    """The loss of this rank's queries with the gathered documents."""
    everything = torch.cat(list(collectives.all_gather(documents)))  # type: ignore[no-untyped-call]
    labels = torch.arange(
        queries.size(0),
        device=queries.device,
    ) + dist.get_rank() * documents.size(0)
    return torch.nn.functional.cross_entropy(SCALE * maxsim(queries, everything), labels)


def step(
    way: Callable[[Tensor, Tensor], Tensor],
    queries: Tensor,
    documents: Tensor,
) -> list[Tensor]:
    """The loss and both gradients."""
    loss = way(queries, documents)
    return [loss.detach(), *torch.autograd.grad(loss, (queries, documents))]


def gate(one: list[Tensor], other: list[Tensor]) -> None:
    """Refuse to time ways that disagree."""
    dist.all_reduce(one[0])
    one[0] /= dist.get_world_size()  # ranks of equal size: the mean of their means
    for name, expected, got in zip(("loss", "dqueries", "ddocuments"), one, other, strict=True):
        allowed = 2 * budget(got.dtype, "forward" if name == "loss" else "gradient_bound")
        error = relative_error(got, expected)
        if error > allowed:
            raise RuntimeError(
                f"{name} of the ring must be within {allowed:.1e} of the gathered one, got {error:.1e}.",
            )


def timed(
    way: Callable[[Tensor, Tensor], Tensor],
    queries: Tensor,
    documents: Tensor,
    iterations: int,
) -> tuple[list[float], float]:
    """Milliseconds of each iteration on the slowest rank, and peak extra MB on the largest."""
    for _ in range(3):
        step(way, queries, documents)
    before, mine = memory_now(queries.device), []
    for _ in range(iterations):
        dist.barrier()
        begin = time.perf_counter()
        step(way, queries, documents)
        if queries.is_cuda:
            torch.cuda.synchronize()
        mine.append(1e3 * (time.perf_counter() - begin))
    return of_all_ranks(mine, before, queries.device)


if __name__ == "__main__":
    main()
