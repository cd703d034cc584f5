"""MaxSim of one query with many documents on the CPU, beside the package maxsim-cpu, call by call
in turn.

maxsim-cpu (Rust and libxsmm) is no dependency; install it where this runs, or the table has
tilefold's rows only::

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.maxsim_on_cpu --threads 2

Without that variable, OpenMP's threads go on spinning between calls, and take the processor from
the other side.

Both read the same fp32 tokens of norm 1. Nothing is printed unless both agree with fp64 within the
budget of tilefold.testing. The ratio is the median over iterations of maxsim-cpu's time divided by
tilefold's in that iteration.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

import tilefold
from tilefold.ops import maxsim
from tilefold.testing import assert_within_budget


def main() -> None:
    """Parse arguments, gate, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument(
        "--case",
        action="append",
        help="tokens of the query x documents x tokens (300, or 50-300 for any length)",
    )
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    print(
        f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}, tilefold "
        f"{tilefold.__version__}, fp32, D = 128, {options.iterations} iterations, "
        f"load {os.getloadavg()[0]:.1f}, OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY')}\n",
    )
    print(
        "| query tokens x documents x tokens | who | median ms | p20 | p80 | ratio |\n|---|---|---|---|---|---|",
    )
    for case in options.case or ["32x100x300", "32x1000x300", "32x1000x50-300"]:
        calls = prepare(case)
        times = timed(calls, options.iterations)
        for name, values in times.items():
            p20, *_, p80 = statistics.quantiles(values, n=5)
            ratio = statistics.median(
                theirs / ours for theirs, ours in zip(values, times["tilefold"], strict=True)
            )
            print(
                f"| {case} | {name} | {statistics.median(values):.2f} | {p20:.2f} | {p80:.2f} | {ratio:.2f} |",
            )


def prepare(case: str) -> dict[str, Callable[[], object]]:
    """What to call, by name, each checked once."""
    lq, count, length = case.split("x")
    shortest, _, longest = length.partition("-")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(
        int(shortest),
        int(longest or shortest) + 1,
        (int(count),),
        generator=generator,
    )
    query, rows = (
        torch.nn.functional.normalize(torch.randn(size, 128, generator=generator), dim=-1)
        for size in (int(lq), int(lengths.sum()))
    )
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    calls: dict[str, Callable[[], object]] = {}
    if longest:
        calls["tilefold"] = lambda: maxsim(query[None], rows, cu_seqlens_d=offsets)
    else:
        documents = rows.view(int(count), -1, 128)
        calls["tilefold"] = lambda: maxsim(query[None], documents)
    if importlib.util.find_spec("maxsim_cpu"):
        peer = importlib.import_module("maxsim_cpu")
        parts = [part.numpy() for part in torch.split(rows, lengths.tolist())]
        calls["maxsim-cpu"] = (
            (lambda: peer.maxsim_scores_variable(query.numpy(), parts))
            if longest
            else (lambda: peer.maxsim_scores(query.numpy(), documents.numpy()))
        )
    truth = maxsim(query[None].double(), rows.double(), cu_seqlens_d=offsets, impl="tiled")[0]
    for name, call in calls.items():
        assert_within_budget(torch.as_tensor(call()).view(-1), truth, name=f"{name} at {case}")
    return calls


def timed(calls: dict[str, Callable[[], object]], iterations: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each iteration, one call of each in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(iterations + 2):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: values[2:] for name, values in times.items()}


if __name__ == "__main__":
    main()
