"""Entmax attention and entmax at any alpha, beside alpha = 1.5 in the same run; needs one GPU.

    python -m benchmarks.any_alpha --output any_alpha

Compiles first, in parallel processes; then compares every alpha, and alphas that are learned, with
the reference in fp64; then times CUDA graphs in rotation. Prints ratios to alpha = 1.5 and the
times of the kernels, and writes CSV. The exit code is 1 if an error was over its budget.
``--variants`` takes other launch configurations (``VARIANTS``) along; those of short rows change N
= 768 without a gradient. ``--dtype fp32`` times the attention in fp32, which has not been done.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilefold.bench.spec import Runnable, captured
from tilefold.ops import entmax, entmax_attention
from tilefold.ops._shared.entmax_root import ENTMAX15, GENTLE, SOFTMAX, STEEP
from tilefold.ops._shared.tuning import Row
from tilefold.ops.entmax_attention.api import ATTENTION
from tilefold.ops.entmax_attention.configs import SHORT
from tilefold.testing import budget, relative_error
from tilefold.testing.entmax_attention import entmax_attention_inputs, entmax_attention_results

ALPHAS = (1.05, 1.1, 1.25, 1.3333, 1.5, 1.75, 1.9, 2.0)
LEARNED = -1.0  # stands for one alpha per head, with a gradient
FORMS = (1.25, 1.5, 1.75, 2.0, LEARNED)  # one alpha of each form that kernels are built for
FEW = (1.25, LEARNED)
SHAPES = ((4, 12, 768, 64), (4, 12, 4096, 64))
ROWS = ((36864, 768), (16384, 4096))
Result = dict[str, Any]
Change = dict[str, Any]
INFERENCE = {"way": SHORT, "training": False, "kind": frozenset({SOFTMAX, ENTMAX15})}
# Rows behind those of the table; "kind" instead is the form that kernels are built for.
VARIANTS: dict[str, tuple[Change, Change]] = {
    "default": ({}, {}),
    "three programs": ({}, {"registers": 168, "programs": 3}),
    "runtime form": ({}, {"kind": "generic16"}),
    "short rows of 64": (INFERENCE, {"rows": 64, "num_warps": 4}),
    "short rows, 168 registers": (INFERENCE, {"registers": 168}),
    "no short rows": ({}, {"short": 0}),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
used = {"dtype": "bf16"}  # of the attention


def main() -> int:
    """Parse arguments, compile, compare, time, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="folder of the CSV file")
    parser.add_argument(
        "--variants",
        nargs="*",
        default=list(VARIANTS)[1:],
        choices=list(VARIANTS),
        metavar="NAME",
    )
    parser.add_argument(
        "--few",
        type=float,
        nargs="+",
        default=FEW,
        help="alphas of the variants; -1 is learned",
    )
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of the attention")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    options = parser.parse_args()
    started = time.perf_counter()
    used["dtype"] = options.dtype
    compile_all(options.variants, options.few, options.processes)
    print(f"compiled by {time.perf_counter() - started:.0f} s", flush=True)
    failed = gate()
    print(f"compared by {time.perf_counter() - started:.0f} s", flush=True)
    rows = attention_rows(
        ["default"],
        (*ALPHAS, LEARNED),
        options.samples,
        (False, True),
    ) + operator_rows(options.samples)
    print_ratios(rows, "alpha = 1.5 of the same shape")
    rows += attention_rows(options.variants, options.few, options.samples, (False,))
    print_ratios(
        [row for row in rows if row["variant"] != "default"],
        "alpha = 1.5 of the same variant, if it is there",
    )
    print(f"timed by {time.perf_counter() - started:.0f} s", flush=True)
    print_kernels()
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        with (options.output / "any_alpha.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(f"done by {time.perf_counter() - started:.0f} s; {failed} errors over their budgets")
    return int(failed > 0)


# ---- configurations


@contextmanager
def variant(name: str) -> Iterator[None]:
    """General forms launched as the variant says; plans of other variants are forgotten."""
    modules = [
        importlib.import_module(f"tilefold.ops.entmax_attention.{name}")
        for name in ("configs", "plans")
    ]
    configs = vars(modules[0])
    where, change = VARIANTS[name][0], dict(VARIANTS[name][1])
    kind = change.pop("kind", None)
    table, kernel_kind = configs["TABLE"], configs["kernel_kind"]

    def forced(dtype: torch.dtype, alpha: Tensor | None, alpha_value: float) -> str:
        found = kernel_kind(dtype, alpha, alpha_value)
        return kind if kind and found in (GENTLE, STEEP) else str(found)

    forget()
    try:
        configs["TABLE"] = (*table, Row(where, change, name))
        for module in modules:
            vars(module)["kernel_kind"] = forced
        yield
    finally:
        configs["TABLE"] = table
        for module in modules:
            vars(module)["kernel_kind"] = kernel_kind
        forget()


def forget() -> None:
    """Drop plans."""
    ATTENTION.calls.clear()


# ---- calls


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention, ready to be called."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    alpha: float | Tensor
    causal: bool

    def forward(self) -> Any:
        """Inference."""
        with torch.no_grad():
            return entmax_attention(
                self.q,
                self.k,
                self.v,
                alpha=self.alpha,
                causal=self.causal,
                impl="triton",
            )

    def forward_backward(self, **options: Any) -> Any:
        """Training."""
        leaves = [self.q, self.k, self.v] + ([self.alpha] if isinstance(self.alpha, Tensor) else [])
        options |= {"alpha": self.alpha, "causal": self.causal, "impl": "triton"}
        out: Any = entmax_attention(self.q, self.k, self.v, **options)
        return torch.autograd.grad(out if isinstance(out, Tensor) else out[0], leaves, self.dout)


def problem(shape: tuple[int, ...], alpha: float, causal: bool) -> Problem:
    """Independent normal scores."""
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(shape, device="cuda", dtype=DTYPES[used["dtype"]]) for _ in range(4)
    )
    given: float | Tensor = alpha
    if alpha == LEARNED:
        given = torch.linspace(1.1, 1.9, shape[1], device="cuda").requires_grad_()
    return Problem(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, given, causal)


Job = tuple[str, tuple[int, ...], bool, float]
Compiled = tuple[Job, str]  # with a dtype


def compile_all(variants: list[str], few: Any, processes: int) -> None:
    """Call everything once in as many processes, which share Triton's cache on the disk."""
    one_head_each = (1, *SHAPES[0][1:2], 96, SHAPES[0][3])
    jobs: list[Job] = list(itertools.product(["default"], SHAPES, (False, True), FORMS))
    jobs += itertools.product(["default"], [one_head_each], (False, True), FORMS)
    jobs += itertools.product(["rows"], ((64, n) for _, n in ROWS), (False,), FORMS)
    jobs += itertools.product(variants, SHAPES, (False,), few)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for message in pool.map(compile_one, [(job, used["dtype"]) for job in jobs]):
            if message:
                print(message, flush=True)


def compile_one(asked: Compiled) -> str:
    """The calls of a job, with one sequence: kernels do not depend on the size of the batch."""
    job, used["dtype"] = asked
    name, shape, causal, alpha = job
    try:
        if name == "rows":
            for dtype in (torch.bfloat16, torch.float32):
                rows_call(shape, dtype, alpha)()
            return ""
        with variant(name):
            one = problem((1, *shape[1:]), alpha, causal)
            if shape[2] > 96:
                one.forward()
                one.forward_backward()
            if name == "default":
                one.forward_backward(return_stats=True)
    except Exception as error:  # a variant that cannot be built is told, and its times are missing
        return f"{job}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def rows_call(shape: tuple[int, ...], dtype: torch.dtype, alpha: float) -> Callable[[], Any]:
    """Forward and backward of the operator on rows."""
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()
    dp = torch.randn_like(x)
    given: float | Tensor = alpha
    if alpha == LEARNED:
        given = torch.linspace(1.1, 1.9, shape[0], device="cuda")[:, None].requires_grad_()
    leaves = [x] + ([given] if isinstance(given, Tensor) else [])

    def call() -> Any:
        p: Any = entmax(x, given, impl="triton")
        return torch.autograd.grad(p, leaves, dp)

    return call


# ---- correctness


def gate() -> int:
    """Print the worst share of each error budget by alpha; return how many are above 1."""
    failed = 0
    for alpha in (1.05, *FORMS):
        given: float | Tensor = (
            alpha if alpha != LEARNED else torch.linspace(1.001, 1.999, 12, device="cuda")
        )
        worst: dict[str, float] = {}
        for n, causal in ((300, False), (1200, True)):  # without a map of live blocks, and with one
            for name, share in shares(n, causal, given).items():
                worst[name] = max(worst.get(name, 0.0), share)
        failed += sum(share > 1 for share in worst.values())
        label = "per head" if isinstance(given, Tensor) else f"{given}"
        print(
            f"  alpha {label:9s}",
            *(f"{k} {v:.2f}{' OVER' if v > 1 else ''}" for k, v in worst.items()),
            flush=True,
        )
    return failed


def shares(n: int, causal: bool, alpha: float | Tensor) -> dict[str, float]:
    """Errors of one call as shares of what they may be."""
    dtype = DTYPES[used["dtype"]]
    inputs = entmax_attention_inputs(
        1,
        12,
        n,
        64,
        dtype=dtype,
        device="cuda",
        sharpness=1.0 + causal,
    )
    wide = alpha.double() if isinstance(alpha, Tensor) else alpha
    found, again = (
        entmax_attention_results(inputs, impl="triton", alpha=alpha, causal=causal)
        for _ in range(2)
    )
    truth = entmax_attention_results(
        inputs.cast(torch.float64),
        impl="reference",
        alpha=wide,
        causal=causal,
    )
    worst = {}
    for name in [name for name in truth if name == "out" or name.startswith("d")]:
        allowed = budget(dtype, "gradient" if name == "out" else "gradient_bound")
        worst[name] = (
            relative_error(found[name], truth[name]) / allowed / (10 if name == "dalpha" else 1)
        )
    worst["residual"] = float(found["residual"].max()) / 2e-5
    # weights so small that rounding decides whether they are positive are a share of a large
    # support
    moved = (found["support"] - truth["support"]).abs() / (2 + 0.02 * truth["support"])
    worst["support"] = float(moved.max())
    differs = any(not torch.equal(found[name], again[name]) for name in ("out", "dq", "dk", "dv"))
    return worst | {"repeats": 2.0 * differs}


# ---- time


def timed(calls: dict[Any, Callable[[], Any]], samples: int) -> dict[Any, list[float]]:
    """Milliseconds of every call at p20, p50 and p80, in rotation."""
    found: dict[Any, list[float]] = {key: [] for key in calls}
    each = 5
    for _ in range(-(-samples // each)):
        for key, call in calls.items():
            call()
            new_event: Callable[[], Any] = functools.partial(torch.cuda.Event, enable_timing=True)
            events = [(new_event(), new_event()) for _ in range(each)]
            for start, end in events:
                start.record()
                call()
                end.record()
            torch.cuda.synchronize()
            found[key] += [start.elapsed_time(end) for start, end in events]
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    return {
        k: torch.quantile(torch.tensor(v, dtype=torch.float64), quantiles).tolist()
        for k, v in found.items()
    }


def attention_rows(
    variants: list[str],
    alphas: Any,
    samples: int,
    causality: tuple[bool, ...],
) -> list[Result]:
    """Times of the attention, one row per variant, shape, phase and alpha."""
    rows = []
    for name, shape, causal in itertools.product(variants, SHAPES, causality):
        calls: dict[tuple[str, float], Callable[[], Any]] = {}
        with variant(name):
            for alpha in alphas:
                try:
                    one = problem(shape, alpha, causal)
                    graphs = captured(Runnable(one.forward, one.forward_backward, name))
                    calls[("forward", alpha)] = graphs.forward
                    calls[("f+b", alpha)] = graphs.forward_backward or graphs.forward
                except Exception as error:
                    print(f"{name}, {shape}, {alpha}: {type(error).__name__}: {str(error)[:120]}")
            times = timed(calls, samples)
        for (phase, alpha), quantiles in times.items():
            case = "x".join(map(str, shape)) + (" causal" if causal else "")
            case += "" if used["dtype"] == "bf16" else f" {used['dtype']}"
            rows.append(_row(name, case, phase, alpha, quantiles, times.get((phase, 1.5))))
    return rows


def operator_rows(samples: int) -> list[Result]:
    """Times of ``entmax`` of rows, forward and backward."""
    rows = []
    for shape, dtype in itertools.product(ROWS, (torch.bfloat16, torch.float32)):
        times = timed(
            {
                alpha: captured(Runnable(rows_call(shape, dtype, alpha), None, "")).forward
                for alpha in (*ALPHAS, LEARNED)
            },
            samples,
        )
        case = f"rows {shape[0]}x{shape[1]} {str(dtype)[6:]}"
        rows += [
            _row("default", case, "f+b", alpha, quantiles, times[1.5])
            for alpha, quantiles in times.items()
        ]
    return rows


def _row(
    name: str,
    case: str,
    phase: str,
    alpha: float,
    quantiles: list[float],
    base: list[float] | None,
) -> Result:
    p20, p50, p80 = quantiles
    label = "learned" if alpha == LEARNED else alpha
    ratio = float("nan") if base is None else p50 / base[1]
    times = {
        "ms_p20": round(p20, 5),
        "ms_p50": round(p50, 5),
        "ms_p80": round(p80, 5),
        "ratio": round(ratio, 3),
    }
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {"variant": name, "case": case, "phase": phase, "alpha": label, **times, **device}


def print_ratios(rows: list[Result], base: str) -> None:
    """One line per variant, case and phase: milliseconds, and in brackets the ratio."""
    print(f"milliseconds (ratio to {base}), median")
    keys = list(dict.fromkeys((row["variant"], row["case"], row["phase"]) for row in rows))
    for key in keys:
        mine = [row for row in rows if (row["variant"], row["case"], row["phase"]) == key]
        cells = (f"{row['alpha']}: {row['ms_p50']:.3f} ({row['ratio']:.2f})" for row in mine)
        print("  " + ", ".join(key), *cells, sep=" | ", flush=True)


def print_kernels() -> None:
    """Milliseconds of every kernel of one training step, by torch's profiler."""
    for shape, alpha in itertools.product(SHAPES, (1.25, 1.5, 1.75, LEARNED)):
        one = problem(shape, alpha, False)
        one.forward_backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                one.forward_backward()
            torch.cuda.synchronize()
        kernels: dict[str, float] = {
            e.key: e.self_device_time_total / 5e3
            for e in profile.key_averages()
            if e.key.endswith("_kernel")
        }
        print(
            f"  kernels of N = {shape[2]}, alpha {alpha}:",
            {k: round(v, 4) for k, v in kernels.items()},
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
