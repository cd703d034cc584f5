"""One query against int8 documents: the launch as it is, other configurations of it, and
flash-maxsim's int8x8.

    python -m benchmarks.int8_rerank --output DIR

Every program of the launch rounds the query itself. Floor: the bytes of the documents and their
scales, 132 per token at D = 128, at the 4.3 TB/s of a large copy. The prediction was written before
it ran on a GPU; milliseconds of a graph with a cold L2:

=====================  ======  ================  ===========================  ==========  =====
case                   floor   before            flash-maxsim, query rounded  prediction  after
=====================  ======  ================  ===========================  ==========  =====
48 x 2,000 x 512       .0314   .065              .057                         .041        .047
32 x 10,000 x 300      .0921   .107              -                            .099        .104
32 x 1,000 x 300       .0092   .024              .025 (a graph)               .017        .020
24 x 10,000 x 1,030    .316    .333              -                            .327        .327
32 x 10,000 x U(50,    .054    .083              -                            .072        .076
300)
=====================  ======  ================  ===========================  ==========  =====

Where the time went, from the machine code for 9.0: 4 microseconds in a launch that rounded the
query; for more than 32 query tokens 128 registers per thread, so that 4 programs fit a
multiprocessor where 6 were planned, and a fifth of them waited for the others to end; in every tile
a wait for the documents' scales from memory, which are now read one tile ahead. Rounding takes each
program about 12 instructions per entry of the query, 1 to 1.5 microseconds before the first tile;
``prefetch`` lets the first document travel to L2 meanwhile.

First compares: rounded queries with ``quantize_tokens`` bit by bit, scores with the reference,
variants with each other bit by bit. A variant is a change of the streaming kernel's configuration
(``VARIANTS``); the winner goes into the table ``STREAM`` of ``src/tilefold/ops/maxsim/configs.py``.
``flash_maxsim`` is timed where it is installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
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

from tilefold.bench.results import collect, write_csv
from tilefold.bench.spec import Runnable, captured
from tilefold.bench.timing import TimeBudget, time_cuda
from tilefold.ops import maxsim, quantize_tokens
from tilefold.ops.maxsim import QuantizedTokens
from tilefold.testing import assert_within_budget

Row = dict[str, object]
DIM = 128
# name: tokens of the query, documents, tokens of the shortest and the longest document
CASES: dict[str, tuple[int, int, int, int]] = {
    "48x2000x512": (48, 2000, 512, 512),
    "32x10000x300": (32, 10000, 300, 300),
    "32x1000x300": (32, 1000, 300, 300),
    "24x10000x1030": (24, 10000, 1030, 1030),
    "32x10000x50-300": (32, 10000, 50, 300),
    "48x10000x50-300": (48, 10000, 50, 300),
}
# Of the configuration; "stream": False is the kernel of batches after a launch that rounds the
# query.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no prefetch": {"PREFETCH": 0},
    "prefetch 512": {"PREFETCH": 512},
    "4 stages": {"num_stages": 4},
    "one program fewer": {"PROGRAMS": -1},
    "one program more": {"PROGRAMS": 1},
    "4 stages, one program fewer": {"num_stages": 4, "PROGRAMS": -1},
    "5 stages, two programs fewer": {"num_stages": 5, "PROGRAMS": -2},
    "tiles of 128, 8 warps, half the programs": {"BLOCK_T": 128, "num_warps": 8, "PROGRAMS": 0.5},
    "two launches": {"stream": False},
}


def main() -> int:
    """Parse arguments, compile, compare, time, print, write; 1 if something differs or there is no
    GPU.
    """
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="folder of the CSV file")
    parser.add_argument("--case", action="append", choices=list(CASES), help="all by default")
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="all by default")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.06,
        help="of timing one variant of one case",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=min(16, os.cpu_count() or 1),
        help="0 compiles on the way",
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("int8_rerank needs a CUDA device, and torch sees none here.", file=sys.stderr)
        return 1
    started = time.perf_counter()
    variants, cases = options.variant or list(VARIANTS), options.case or list(CASES)
    if options.processes:
        compile_all(variants, options.processes)
        print(f"compiled by {time.perf_counter() - started:.0f} s", flush=True)
    failed = differing_bits() + differing_scores()
    print(f"compared by {time.perf_counter() - started:.0f} s: {failed} differences", flush=True)
    print(
        f"{'case':18s} {'variant':42s} {'graph ms':>9s} {'p20':>7s} {'p80':>7s} {'eager ms':>9s} {'floor':>7s}",
    )
    for name in cases:
        rows, differing = timed(name, variants, options.seconds)
        failed += differing
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            write_csv(
                options.output / "int8_rerank.csv",
                rows,
                collect(torch.device("cuda")),
                ("case", "variant", "how"),
            )
    print(f"done in {time.perf_counter() - started:.0f} s; {failed} differences")
    return int(failed > 0)


# ---- configurations


@contextmanager
def variant(name: str) -> Iterator[None]:
    """The streaming kernel launched as the variant says; plans of others are forgotten."""
    plans = importlib.import_module("tilefold.ops.maxsim.plans")
    honest = vars(plans)["stream_config"]

    def changed(*arguments: Any) -> Any:
        found, change = honest(*arguments), dict(VARIANTS[name])
        if found is None or not change.pop("stream", True):
            return None
        programs = change.pop("PROGRAMS", 0)
        programs = (
            found["PROGRAMS"] + programs
            if isinstance(programs, int)
            else int(found["PROGRAMS"] * programs)
        )
        return found | change | {"PROGRAMS": max(programs, 1)}

    forget()
    try:
        vars(plans)["stream_config"] = changed
        yield
    finally:
        vars(plans)["stream_config"] = honest
        forget()


def forget() -> None:
    """Empty the cache of plans."""
    importlib.import_module("tilefold.ops.maxsim.api").MAXSIM.calls.clear()


def compile_all(variants: list[str], processes: int) -> None:
    """Call everything once, with few documents, in as many processes; they share Triton's cache on
    the disk.
    """
    jobs = list(
        itertools.product(
            variants,
            ((32, 2, 70, 70), (48, 2, 70, 70), (32, 2, 50, 70), (48, 2, 50, 70)),
        ),
    )
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for message in pool.map(compile_one, jobs):
            if message:
                print(message, flush=True)


def compile_one(job: tuple[str, tuple[int, int, int, int]]) -> str:
    """Both kinds of call of a job."""
    name, shape = job
    try:
        with variant(name):
            query, documents, offsets = inputs(*shape)
            for _ in range(3):
                maxsim(query, documents, cu_seqlens_d=offsets, impl="triton")
    except Exception as error:  # what cannot be built is told, and its times are missing
        return f"{job}: {type(error).__name__}: {str(error)[:200]}"
    return ""


# ---- calls


def inputs(
    rows: int,
    count: int,
    shortest: int,
    longest: int,
) -> tuple[Tensor, QuantizedTokens, Tensor | None]:
    """A query in bf16, documents in int8, and where packed ones begin."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    query = torch.randn(1, rows, DIM, device="cuda", generator=generator)
    query = torch.nn.functional.normalize(query, dim=-1).bfloat16()
    if shortest == longest:
        shape, offsets = (count, longest, DIM), None
    else:
        lengths = torch.randint(
            shortest,
            longest + 1,
            (count,),
            generator=torch.Generator().manual_seed(0),
        )
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
        shape = (int(lengths.sum()), DIM)  # type: ignore[assignment]
    values = torch.randint(-127, 128, shape, device="cuda", generator=generator, dtype=torch.int8)
    scales = torch.rand(shape[:-1], device="cuda", generator=generator) / 1000 + 1e-4
    return query, QuantizedTokens(values, scales), offsets


def differing_bits() -> int:
    """Cases in which a rounded query is not what ``quantize_tokens`` makes of it.

    A document is one entry of 127 with its scale; so a score is one rounded entry of a query of one
    token.
    """
    differing = 0
    documents = quantize_tokens(torch.eye(DIM, device="cuda")[:, None])
    for rows, dtype, exponent in itertools.product(
        (8, 32, 64),
        (torch.bfloat16, torch.float16, torch.float32),
        (0, 1),
    ):
        for seed in range(4):
            generator = torch.Generator(device="cuda").manual_seed(seed)
            queries = torch.randn(rows, DIM, device="cuda", generator=generator)
            if seed % 2:  # entries next to where the rounding changes
                steps = (
                    torch.randint(-127, 127, (rows, DIM - 1), device="cuda", generator=generator)
                    + 0.5
                )
                queries = torch.cat([steps * queries[:, -1:], 127 * queries[:, -1:]], dim=1)
            tiny = 2.0**-14 if dtype == torch.float16 else 2.0**-136
            queries = (queries * (tiny if exponent else 1.0)).to(dtype)
            rounded = quantize_tokens(queries)
            expected = rounded.values * 127.0 * documents.scales[:, 0] * rounded.scales[:, None]
            found = maxsim(queries[:, None], documents, impl="triton")
            same = torch.equal(found, expected)
            differing += not same
            if not same:
                print(
                    f"  {rows} rows, {dtype}, seed {seed}: {int((found != expected).sum())} entries differ",
                )
    return differing


def differing_scores() -> int:
    """Layouts in which scores are over their error budget."""
    differing = 0
    for rows, longest, padded in itertools.product((17, 48), (70, 300), (True, False)):
        query, documents, offsets = inputs(rows, 50, longest if padded else 1, longest)
        masks: dict[str, Any] = {}
        for masked in (False, True):
            if masked:
                masks["query_mask"] = torch.rand(1, rows, device="cuda") < 0.7
                masks["document_mask"] = torch.rand(documents.scales.shape, device="cuda") < 0.7
            for mode in ("exclude", "zero") if masked else ("exclude",):
                layout: dict[str, Any] = {"cu_seqlens_d": offsets, "mask_mode": mode, **masks}
                found = maxsim(query, documents, impl="triton", **layout)
                try:
                    assert_within_budget(
                        found,
                        maxsim(query, documents, impl="reference", **layout),
                    )
                except AssertionError as error:
                    differing += 1
                    print(
                        f"  {rows} rows, {longest} tokens, padded {padded}, {mode}: {str(error)[:150]}",
                    )
    return differing


# ---- time


def timed(case: str, variants: list[str], seconds: float) -> tuple[list[Row], int]:
    """Rows of a case, printed, and how many variants have other scores than the first."""
    query, documents, offsets = inputs(*CASES[case])
    floor = documents.nbytes / 4.3e9
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    first: Tensor | None = None
    differing = 0
    for name in variants:
        try:
            with variant(name):
                # a graph keeps its launches; an eager call keeps its plan, which the variant's end
                # would take away
                eager = _planned(query, documents, offsets)
                runs[name, "graph"] = captured(Runnable(eager)).forward
                runs[name, "eager"] = eager
                scores = eager()
        except Exception as error:
            print(f"{case:18s} {name:42s} {type(error).__name__}: {str(error)[:120]}")
            continue
        if first is None:
            first = scores
        same = (
            torch.equal(scores, first)
            if name != "two launches"
            else torch.allclose(scores, first, rtol=1e-5)
        )
        differing += not same
        if not same:
            print(f"{case:18s} {name:42s} differs by {float((scores - first).abs().max()):.2e}")
    runs |= _peers(query, documents, offsets, first)
    keys = {"|".join(key): key for key in runs}
    measured = time_cuda(
        {text: runs[key] for text, key in keys.items()},
        TimeBudget(seconds=seconds),
    )
    times = {keys[text]: found for text, found in measured.items()}
    rows: list[Row] = []
    for (name, how), found in times.items():
        row: Row = {"case": case, "variant": name, "how": how, "p20_ms": round(found.p20, 5)}
        rows.append(
            row
            | {
                "p50_ms": round(found.p50, 5),
                "p80_ms": round(found.p80, 5),
                "floor_ms": round(floor, 5),
            },
        )
    for name in dict.fromkeys(name for name, _ in times):
        graph, eager_time = times.get((name, "graph")), times.get((name, "eager"))
        shown = graph or eager_time
        if shown is None:
            continue
        print(
            f"{case:18s} {name:42s} {shown.p50 if graph else float('nan'):9.4f} {shown.p20:7.4f} {shown.p80:7.4f} "
            f"{eager_time.p50 if eager_time else float('nan'):9.4f} {floor:7.4f}",
            flush=True,
        )
    return rows, differing


def _planned(
    query: Tensor,
    documents: QuantizedTokens,
    offsets: Tensor | None,
) -> Callable[[], Tensor]:
    """The public call, which keeps finding the plan that it made under this variant."""
    calls = importlib.import_module("tilefold.ops.maxsim.api").MAXSIM.calls
    maxsim(query, documents, cu_seqlens_d=offsets, impl="triton")
    plans = dict(next(iter(vars(calls).values())))

    def call() -> Tensor:
        kept = next(iter(vars(calls).values()))
        if kept.keys() != plans.keys() or any(kept[key] is not plans[key] for key in plans):
            kept.clear()
            kept.update(plans)
        return maxsim(query, documents, cu_seqlens_d=offsets, impl="triton")

    return call


def _peers(
    query: Tensor,
    documents: QuantizedTokens,
    offsets: Tensor | None,
    scores: Tensor | None,
) -> dict[tuple[str, str], Callable[[], Any]]:
    """flash-maxsim's int8x8 with the query rounded before, and by itself, of padded documents."""
    if offsets is not None or importlib.util.find_spec("flash_maxsim") is None:
        return {}
    quant: Any = importlib.import_module("flash_maxsim.flash_maxsim_quant")
    single, scales = query[0].half(), documents.scales.half()
    rounded, query_scales = quant.quantize_query_int8(single)
    lengths = torch.full((scales.size(0),), scales.size(1), device="cuda", dtype=torch.int32)

    def before() -> Tensor:
        out: Tensor = quant.flash_maxsim_int8x8(
            single,
            documents.values,
            scales,
            rounded,
            query_scales,
            lengths,
        )
        return out

    def itself() -> Tensor:
        out: Tensor = quant.flash_maxsim_int8x8(
            single,
            documents.values,
            scales,
            doc_lengths=lengths,
        )
        return out

    found: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, call in (("flash-maxsim, query rounded before", before), ("flash-maxsim", itself)):
        try:
            off = 0.0 if scores is None else float((call() - scores[0]).norm() / scores.norm())
            found[name, "graph"], found[name, "eager"] = captured(Runnable(call)).forward, call
            print(f"  {name}: scores differ from ours by {off:.1e}", flush=True)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
