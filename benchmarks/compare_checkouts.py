"""Time two checkouts of tilefold alternately on one device, to find rows that became slower.

    python -m benchmarks.compare_checkouts ../before . --output results.csv

Each checkout runs in a process of its own, which builds the inputs of a case, passes its
correctness gate and then times when it is told to; the two take turns (before, after, after,
before, ...), so that a clock that drifts touches both alike. A row is the ratio of the medians,
after over before, with the 20th and 80th percentile of the ratios of single rounds. The exit code
is 1 if a gate failed or a ratio lies above ``--limit``.

One checkout with two releases of Triton, of which one lies in a folder:

    python -m benchmarks.compare_checkouts . . --after-path triton-3.9
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

OPERATORS = ("lsr_head", "maxsim", "entmax_attention", "entmax", "token_scatter")
OURS = (
    "tilefold",
    "tilefold-csr",
    "tilefold-graph",
    "tilefold-int8",
    "tilefold-int8-graph",
    "tilefold-fp8",
)
PHASES = ("forward", "forward_backward")
EMPTY = dict.fromkeys(
    (
        "op",
        "case",
        "impl",
        "phase",
        "before_ms",
        "after_ms",
        "ratio",
        "ratio_p20",
        "ratio_p80",
        "rounds",
        "note",
    ),
    "",
)


def main() -> int:
    """Parse arguments, compare every case, print and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, help="the checkout to compare with")
    parser.add_argument("after", type=Path)
    for side in ("before", "after"):
        parser.add_argument(
            f"--{side}-path",
            type=Path,
            help="folder of packages that only this side imports",
        )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--op",
        action="append",
        default=[],
        choices=OPERATORS,
        help="by default the first three",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        help="names of cases; all of the device's by default",
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of each checkout")
    parser.add_argument("--seconds", type=float, default=0.05, help="of timing a turn")
    parser.add_argument(
        "--limit",
        type=float,
        default=1.03,
        help="largest ratio that is not called slower",
    )
    parser.add_argument("--output", type=Path, help="CSV file to write")
    options = parser.parse_args()
    sides = [
        Side(options.before, options.before_path, options.device),
        Side(options.after, options.after_path, options.device),
    ]
    rows: list[dict[str, Any]] = []
    print(
        f"{'case':34s} {'implementation':20s} {'phase':16s} {'before ms':>9s} {'after ms':>9s} "
        f"{'ratio':>6s}  p20-p80",
    )
    for op in options.op or OPERATORS[:3]:
        for case in sides[0].ask("cases", op):
            if options.shape and case not in options.shape:
                continue
            found = compare(sides, op, case, options.rounds, options.seconds)
            rows += found
            for row in found:
                show(row, options.limit)
            if options.output is not None:
                write(options.output, rows, options.device, [side.ask("triton") for side in sides])
    return int(not rows or any(row["note"] or row["ratio"] > options.limit for row in rows))


class Side:
    """A process that runs one checkout and answers one request per line."""

    def __init__(self, checkout: Path, packages: Path | None, device: str) -> None:
        own = [str(path.resolve()) for path in (packages, checkout / "src") if path is not None]
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([*own, *inherited]))
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__, "--serve", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def send(self, *request: object) -> None:
        """Begin a request; :meth:`answer` waits for its end."""
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """The answer to the oldest unanswered request."""
        for line in self._process.stdout or ():
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError("a checkout's process ended; its error is above")

    def ask(self, *request: object) -> Any:
        """Send and wait."""
        self.send(*request)
        return self.answer()


def compare(
    sides: list[Side],
    op: str,
    case: str,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """One row for each implementation and phase that both checkouts have."""
    for side in sides:  # both compile at once
        side.send("build", op, case)
    built = [side.answer() for side in sides]
    rows: list[dict[str, Any]] = []
    for name, found in zip(("before", "after"), built, strict=True):
        rows += [
            EMPTY | {"op": op, "case": case, "note": f"{name}: {note}"} for note in found["failed"]
        ]
    for impl, phase in (pair for pair in built[0]["runs"] if pair in built[1]["runs"]):
        medians: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                medians[which].append(sides[which].ask("time", impl, phase, seconds))
        before, after = (statistics.median(values) for values in medians)
        ratios = sorted(b / a for a, b in zip(*medians, strict=True))
        p20, _, _, p80 = statistics.quantiles(ratios, n=5, method="inclusive")
        row = {"op": op, "case": case, "impl": impl, "phase": phase, "rounds": rounds}
        numbers = {
            "before_ms": before,
            "after_ms": after,
            "ratio": after / before,
            "ratio_p20": p20,
            "ratio_p80": p80,
        }
        rows.append(EMPTY | row | {name: round(number, 5) for name, number in numbers.items()})
    for side in sides:
        side.ask("drop")
    return rows


def show(row: dict[str, Any], limit: float) -> None:
    """Print a row."""
    if row["note"]:
        print(f"{row['case']:34s} {row['note']}", flush=True)
        return
    mark = "  SLOWER" if row["ratio"] > limit else ""
    print(
        f"{row['case']:34s} {row['impl']:20s} {row['phase']:16s} {row['before_ms']:9.4f} "
        f"{row['after_ms']:9.4f} "
        f"{row['ratio']:6.3f}  {row['ratio_p20']:.3f}-{row['ratio_p80']:.3f}{mark}",
        flush=True,
    )


def write(path: Path, rows: list[dict[str, Any]], device: str, tritons: list[str]) -> None:
    """Write all rows with where, and with which releases of Triton, they were measured."""
    import torch  # the parent loads no GPU library before its children ran

    from tilefold.bench.results import collect, write_csv

    provenance = replace(collect(torch.device(device)), triton=" to ".join(dict.fromkeys(tritons)))
    write_csv(path, rows, provenance, ("op", "case", "impl", "phase"))


def serve(device_type: str) -> None:
    """Answer requests of the parent process with this process's tilefold."""
    import torch

    from tilefold.bench.timing import TimeBudget, time_all

    device = torch.device(device_type)
    runs: dict[tuple[str, str], Any] = {}
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answer: Any = None
        if verb == "cases":
            answer = [
                case.name for case in spec_of(arguments[0]).cases if case.device == device_type
            ]
        elif verb == "triton":
            answer = next((each.version for each in metadata.distributions(name="triton")), "")
        elif verb == "build":
            answer, runs = build(spec_of(arguments[0]), arguments[1], device)
        elif verb == "time":
            impl, phase, seconds = arguments
            budget = TimeBudget(seconds=seconds, min_reps=5, max_reps=200, rounds=1, warmup=2)
            answer = time_all({impl: runs[impl, phase]}, device, budget)[impl].p50
        elif verb == "drop":
            runs = {}
            if device.type == "cuda":
                torch.cuda.empty_cache()
        print("answer " + json.dumps(answer), flush=True)


def spec_of(op: str) -> Any:
    """The benchmark of an operator in any checkout."""
    return importlib.import_module(f"tilefold.bench.{op}").SPEC


def build(
    spec: Any,
    case_name: str,
    device: Any,
) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    """The calls to time of every implementation of ours whose gate passed, and what failed."""
    case = next(case for case in spec.cases if case.name == case_name)
    inputs = spec.make_inputs(case, device, 0)
    gate = spec.make_gate(case, inputs)
    runs: dict[tuple[str, str], Any] = {}
    failed: list[str] = []
    for implementation in spec.implementations:
        if implementation.name not in OURS or device.type not in implementation.default_on:
            continue
        try:
            runnable = implementation.build(inputs)
            result = gate.check(runnable, implementation.kind)
        except Exception as error:
            if type(error).__name__ != "NotApplicable":
                failed.append(
                    f"{implementation.name}: {type(error).__name__}: {error}".splitlines()[0][:200],
                )
            continue
        failed += (
            []
            if result.passed
            else [f"{implementation.name}: {failure}" for failure in result.failures]
        )
        for phase in PHASES:
            if result.passed and getattr(runnable, phase) is not None:
                runs[implementation.name, phase] = getattr(runnable, phase)
    return {"runs": list(runs), "failed": failed}, runs


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        sys.exit(main())
