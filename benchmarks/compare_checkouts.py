"""Time two checkouts of tilefold alternately on one device, to find rows that became slower.

    python -m benchmarks.compare_checkouts ../before . --output results.csv

Timed: each phase of each tilefold implementation, by the timer of `tilefold bench`. A clock that
drifts affects both checkouts alike, because they take turns (before, after, after, before, ...).
Each runs in a process of its own, which keeps the inputs of a case between turns.

Baseline: the checkout BEFORE. A row is the ratio of the medians, after over before, with the 20th
and 80th percentile of the ratios of single rounds.

Gate: an implementation is timed only if it passes the correctness check of its own checkout. The
exit code is 1 if a check failed or a ratio is above ``--limit``.

One checkout with two releases of Triton, one of them in a folder:

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

OPERATORS = ("lsr_head", "maxsim", "entmax_attention", "entmax", "token_scatter")
DEFAULT_OPERATORS = OPERATORS[:3]
# names of tilefold's implementations in the benchmarks of both checkouts
TILEFOLD_IMPLEMENTATIONS = (
    "tilefold",
    "tilefold-csr",
    "tilefold-graph",
    "tilefold-int8",
    "tilefold-int8-graph",
    "tilefold-fp8",
)
PHASES = ("forward", "forward_backward")
SIDES = ("before", "after")
# seed of the random inputs
SEED = 0
MAX_NOTE_LENGTH = 200
# a line of a checkout's process that begins so is an answer; its libraries may print others
ANSWER_PREFIX = "answer "


@dataclass(frozen=True)
class Comparison:
    """A row of the results: one phase of one implementation, or an error.

    Attributes:
        op: the name of the operator.
        case: the name of the case.
        impl: the name of the implementation.
        phase: one of :data:`PHASES`.
        before_ms: median over the rounds, of the checkout BEFORE.
        after_ms: median over the rounds, of the checkout AFTER.
        ratio: ``after_ms / before_ms``.
        ratio_p20: 20th percentile of the ratios of single rounds.
        ratio_p80: 80th percentile of them.
        rounds: the number of turns of each checkout.
        note: the error of a failed check. The row then has no times.
    """

    op: str
    case: str
    impl: str = ""
    phase: str = ""
    before_ms: float | None = None
    after_ms: float | None = None
    ratio: float | None = None
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    rounds: int | None = None
    note: str = ""

    def is_worse(self, limit: float) -> bool:
        """Return whether the check failed or the ratio is above a limit."""
        return self.ratio is None or self.ratio > limit

    def cells(self) -> dict[str, object]:
        """Return the fields of the CSV file, with five decimals of numbers."""
        cells: dict[str, object] = {}
        for name, value in asdict(self).items():
            if value is None:
                cells[name] = ""
            else:
                cells[name] = round(value, 5) if isinstance(value, float) else value
        return cells


def main() -> int:
    """Compare every case, print and write the rows.

    Returns:
        The exit code: 1 if a check failed, a row became slower or nothing was measured.
    """
    options = parse_arguments()
    sides = [
        CheckoutProcess(options.before, options.before_path, options.device),
        CheckoutProcess(options.after, options.after_path, options.device),
    ]
    rows: list[Comparison] = []
    print(
        f"{'case':34s} {'implementation':20s} {'phase':16s} {'before ms':>9s} {'after ms':>9s} "
        f"{'ratio':>6s}  p20-p80",
    )
    for op in options.op or DEFAULT_OPERATORS:
        for case in sides[0].request("cases", op):
            if options.shape and case not in options.shape:
                continue
            case_rows = compare_case(sides, op, case, options.rounds, options.seconds)
            rows += case_rows
            for row in case_rows:
                print_row(row, options.limit)
            if options.output is not None:
                triton_versions = [side.request("triton") for side in sides]
                write_rows(options.output, rows, options.device, triton_versions)
    failed = not rows or any(row.is_worse(options.limit) for row in rows)
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, help="the checkout to compare with")
    parser.add_argument("after", type=Path)
    for side in SIDES:
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
    return parser.parse_args()


class CheckoutProcess:
    """A process that runs one checkout and answers one request per line.

    Args:
        checkout: root of the checkout.
        packages: the folder of packages that the process imports before installed ones, or None.
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, checkout: Path, packages: Path | None, device: str) -> None:
        """Start the process.

        Args:
            checkout: the root of the checkout.
            packages: folder of packages that only this side imports, or ``None``.
            device: ``"cuda"`` or ``"cpu"``.
        """
        import_paths = [] if packages is None else [str(packages.resolve())]
        import_paths.append(str((checkout / "src").resolve()))
        inherited_path = os.environ.get("PYTHONPATH")
        if inherited_path:
            import_paths.append(inherited_path)
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__, "--serve", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(import_paths)),
        )

    def send(self, *request: object) -> None:
        """Begin a request. :meth:`receive` waits for its end."""
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def receive(self) -> Any:
        """Return the answer to the oldest request that has none.

        Raises:
            RuntimeError: if the process ended.
        """
        for line in self._process.stdout or ():
            if line.startswith(ANSWER_PREFIX):
                return json.loads(line.removeprefix(ANSWER_PREFIX))
        raise RuntimeError("a checkout's process ended; its error is above")

    def request(self, *request: object) -> Any:
        """Send a request, and return its answer."""
        self.send(*request)
        return self.receive()


def compare_case(
    sides: Sequence[CheckoutProcess],
    op: str,
    case: str,
    rounds: int,
    seconds: float,
) -> list[Comparison]:
    """Compare all implementations and phases that both checkouts have.

    Args:
        sides: the processes of the two checkouts, before and after.
        op: the name of the operator.
        case: the name of the case.
        rounds: turns of each checkout.
        seconds: the time to spend on a turn.

    Returns:
        A row for each failed check, then one for each implementation and phase.
    """
    # both compile at the same time
    for side in sides:
        side.send("build", op, case)
    before, after = (side.receive() for side in sides)
    rows = []
    for name, built in zip(SIDES, (before, after), strict=True):
        rows += [Comparison(op, case, note=f"{name}: {error}") for error in built["failed"]]
    for impl, phase in before["runs"]:
        if [impl, phase] in after["runs"]:
            before_ms, after_ms = time_in_turns(sides, impl, phase, rounds, seconds)
            rows.append(compare_times(Comparison(op, case, impl, phase), before_ms, after_ms))
    for side in sides:
        side.request("drop")
    return rows


def time_in_turns(
    sides: Sequence[CheckoutProcess],
    impl: str,
    phase: str,
    rounds: int,
    seconds: float,
) -> tuple[list[float], list[float]]:
    """Time one phase of an implementation in both checkouts, which alternate in going first.

    Args:
        sides: the processes of both checkouts, before and after the change.
        impl: name of the implementation.
        phase: ``"forward"`` or ``"forward_backward"``.
        rounds: number of rounds.
        seconds: time of a measurement.

    Returns:
        The median milliseconds of each round, before and after.
    """
    before, after = sides
    before_ms: list[float] = []
    after_ms: list[float] = []
    for turn in range(rounds):
        order = [(before, before_ms), (after, after_ms)]
        if turn % 2 == 1:
            order.reverse()
        for side, medians in order:
            medians.append(side.request("time", impl, phase, seconds))
    return before_ms, after_ms


def compare_times(
    row: Comparison,
    before_ms: Sequence[float],
    after_ms: Sequence[float],
) -> Comparison:
    """Return a row with the times and ratios of its rounds.

    Args:
        row: a row that only names what was measured.
        before_ms: the median of each round of the checkout BEFORE.
        after_ms: the median of each round of the checkout AFTER.
    """
    ratios = [after / before for before, after in zip(before_ms, after_ms, strict=True)]
    ratio_p20, _, _, ratio_p80 = statistics.quantiles(ratios, n=5, method="inclusive")
    before_median = statistics.median(before_ms)
    after_median = statistics.median(after_ms)
    return replace(
        row,
        before_ms=before_median,
        after_ms=after_median,
        ratio=after_median / before_median,
        ratio_p20=ratio_p20,
        ratio_p80=ratio_p80,
        rounds=len(ratios),
    )


def print_row(row: Comparison, limit: float) -> None:
    """Print a row, and mark it if its ratio is above the limit."""
    if row.ratio is None:
        print(f"{row.case:34s} {row.note}", flush=True)
        return
    mark = "  SLOWER" if row.is_worse(limit) else ""
    print(
        f"{row.case:34s} {row.impl:20s} {row.phase:16s} {row.before_ms:9.4f} {row.after_ms:9.4f} "
        f"{row.ratio:6.3f}  {row.ratio_p20:.3f}-{row.ratio_p80:.3f}{mark}",
        flush=True,
    )


def write_rows(
    path: Path,
    rows: Sequence[Comparison],
    device: str,
    triton_versions: Sequence[str],
) -> None:
    """Write all rows with their provenance.

    Args:
        path: the CSV file.
        rows: the rows.
        device: ``"cuda"`` or ``"cpu"``.
        triton_versions: the release of Triton of each side.
    """
    # this process loads no GPU library before its children did
    import torch

    from tilefold.bench.results import collect, write_csv

    triton = " to ".join(dict.fromkeys(triton_versions))
    provenance = replace(collect(torch.device(device)), triton=triton)
    write_csv(path, [row.cells() for row in rows], provenance, ("op", "case", "impl", "phase"))


# What follows runs in the process of a checkout, with the tilefold of that checkout.


@dataclass(frozen=True)
class BuiltCase:
    """The calls of a case that passed their check.

    Attributes:
        runs: the calls to time, by the name of the implementation and the phase.
        failed: a line for each failed check or error.
    """

    runs: Mapping[tuple[str, str], Callable[[], object]]
    failed: Sequence[str]


def serve(device_type: str) -> None:
    """Answer requests of the parent process.

    A request is a line of JSON: a verb, and its arguments. The verbs are ``cases`` (operator),
    ``triton``, ``build`` (operator, case), ``time`` (implementation, phase, seconds) and ``drop``.
    """
    import torch

    from tilefold.bench.timing import TimeBudget, time_all

    device = torch.device(device_type)
    built = BuiltCase(runs={}, failed=())
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answer: Any = None
        if verb == "cases":
            (op,) = arguments
            answer = [case.name for case in import_spec(op).cases if case.device == device_type]
        elif verb == "triton":
            answer = installed_triton()
        elif verb == "build":
            op, case_name = arguments
            built = build_case(import_spec(op), case_name, device)
            answer = {"runs": list(built.runs), "failed": list(built.failed)}
        elif verb == "time":
            impl, phase, seconds = arguments
            budget = TimeBudget(seconds=seconds, min_reps=5, max_reps=200, rounds=1, warmup=2)
            answer = time_all({impl: built.runs[impl, phase]}, device, budget)[impl].p50
        elif verb == "drop":
            built = BuiltCase(runs={}, failed=())
            if device.type == "cuda":
                torch.cuda.empty_cache()
        print(ANSWER_PREFIX + json.dumps(answer), flush=True)


def installed_triton() -> str:
    """Return the version of Triton that this process imports, or ``""``."""
    for distribution in metadata.distributions(name="triton"):
        return distribution.version
    return ""


def import_spec(op: str) -> Any:
    """Import the benchmark of an operator, whatever checkout this process has."""
    return importlib.import_module(f"tilefold.bench.{op}").SPEC


def build_case(spec: Any, case_name: str, device: Any) -> BuiltCase:
    """Check every implementation of tilefold in a case.

    Args:
        spec: the operator's benchmark in this checkout.
        case_name: the name of the case.
        device: the torch device.
    """
    case = next(case for case in spec.cases if case.name == case_name)
    inputs = spec.make_inputs(case, device, SEED)
    gate = spec.make_gate(case, inputs)
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    failed: list[str] = []
    for implementation in spec.implementations:
        name = implementation.name
        if name not in TILEFOLD_IMPLEMENTATIONS or device.type not in implementation.default_on:
            continue
        try:
            runnable = implementation.build(inputs)
            result = gate.check(runnable, implementation.kind)
        except Exception as error:
            # the class differs from checkout to checkout
            if type(error).__name__ != "NotApplicable":
                message = f"{name}: {type(error).__name__}: {error}"
                failed.append(message.splitlines()[0][:MAX_NOTE_LENGTH])
            continue
        if not result.passed:
            failed += [f"{name}: {failure}" for failure in result.failures]
            continue
        for phase in PHASES:
            run = getattr(runnable, phase)
            if run is not None:
                runs[name, phase] = run
    return BuiltCase(runs, failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        sys.exit(main())
