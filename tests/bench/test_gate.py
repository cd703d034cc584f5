"""Benchmarks of operators: what their gates accept and catch, rows behind a gate, least work,
``tilefold bench``.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tests.cli.program import run_cli
from tests.ops.contracts import CONTRACTS
from tilefold.bench import claims, lsr_head, results, runner
from tilefold.bench import spec as parts
from tilefold.bench.runner import BenchRow, RunOptions, run_case
from tilefold.bench.spec import (
    OPERATORS,
    BenchCase,
    BenchSpec,
    Ceilings,
    Implementation,
    Inputs,
    Runnable,
    get_spec,
)
from tilefold.bench.timing import TimeBudget
from tilefold.bench.token_scatter import SPECIAL_IDS
from tilefold.ops import entmax, token_scatter
from tilefold.ops import lsr_head as head

CPU = torch.device("cpu")
OPTIONS = RunOptions(CPU, budget=TimeBudget(seconds=0.01, min_reps=2, max_reps=3), memory=False)
CEILINGS = Ceilings(flops=1e12, bandwidth=1e10)
CASES = {contract.name: contract.benchmarks for contract in CONTRACTS if contract.benchmarks}


def tiny(op: str, variant: str = "", dtype: str = "float32") -> BenchCase:
    usual, dims = CASES[op][0]
    return BenchCase("tiny", "cpu", dtype, dims, variant or usual)


def inputs_of(
    op: str,
    variant: str,
    dims: dict[str, int] | None = None,
    dtype: str = "float32",
) -> Inputs:
    return get_spec(op).make_inputs(
        BenchCase("c", "cpu", dtype, dims or CASES[op][0][1], variant),
        CPU,
        0,
    )


@dataclass
class Checked:
    """A gate with the implementation that it lets pass."""

    gate: Any
    right: Runnable

    def failures(self, wrong: Runnable) -> list[str]:
        return self.gate.check(wrong, "ours").failures


@pytest.fixture(
    params=[(op, *case) for op, cases in CASES.items() for case in cases],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def checked(request: pytest.FixtureRequest) -> Checked:
    op, variant, _ = request.param
    spec, case = get_spec(op), tiny(op, variant)
    inputs = spec.make_inputs(case, CPU, 0)
    return Checked(spec.make_gate(case, inputs), spec.implementation("tilefold").build(inputs))


Change = Callable[[Tensor], Tensor]


def in_forward(change: Change, right: Runnable) -> Runnable:
    return replace(right, forward=lambda: change(right.forward()))


def in_training(change: Change, right: Runnable, which: int | None = None) -> Runnable:
    """With the output changed, or one gradient."""

    def forward_backward() -> tuple[Tensor, tuple[Tensor, ...]]:
        out, gradients = right.forward_backward()
        changed = tuple(change(g) if i == which else g for i, g in enumerate(gradients))
        return (change(out) if which is None else out), changed

    return replace(right, forward_backward=forward_backward)


def with_nan(tensor: Tensor) -> Tensor:
    broken = tensor.clone()
    broken.flatten()[broken.numel() // 2] = float("nan")
    return broken


@pytest.mark.parametrize(
    "change",
    [lambda tensor: tensor * 1.01, with_nan],
    ids=["scaled", "with_nan"],
)
def test_ours_passes_and_wrong_outputs_and_gradients_of_either_phase_are_caught(
    checked: Checked,
    change: Change,
) -> None:
    assert set(CASES) == set(OPERATORS)
    result = checked.gate.check(checked.right, "ours")
    assert result.passed, result.failures
    assert result.worst(gradients=False) is not None and result.worst(gradients=True) is not None
    assert checked.failures(in_forward(change, checked.right))
    assert checked.failures(in_training(change, checked.right))
    for which in range(len(checked.right.forward_backward()[1])):
        assert checked.failures(in_training(change, checked.right, which)), f"gradient {which}"
    narrow = in_forward(lambda out: out[..., :-1], checked.right)
    assert any("inf" in failure for failure in checked.failures(narrow)), (
        "an output of another shape"
    )


def test_a_gate_that_checked_nothing_does_not_pass() -> None:
    assert not parts.GateResult({}, parts.Budget(1, 1)).passed
    assert not parts.GateResult({"out": float("nan")}, parts.Budget(1, 1)).passed
    assert parts.GateResult({"out": 0.5, "dweight": 0.5}, parts.Budget(1, 1)).passed


HEADS = [
    ("lsr_head", variant, ("tilefold", "reference"))
    for variant in ("dense", "2pct", "ragged", "ragged-2pct")
]
SCATTERS = ("tilefold", "reference", "scatter-reduce", "membership")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "variant", "impls"),
    [
        *HEADS,
        ("entmax", "normal", ("tilefold", "reference", "sort")),
        ("token_scatter", "max", SCATTERS),
        ("token_scatter", "ragged", SCATTERS),
        ("token_scatter", "csr", ("tilefold", "tilefold-csr", "scatter-reduce")),
    ],
)
def test_ours_and_the_baselines_compute_one_function(
    op: str,
    variant: str,
    impls: tuple[str, ...],
    dtype: str,
) -> None:
    rows = run_case(get_spec(op), tiny(op, variant, dtype), replace(OPTIONS, impls=impls), CEILINGS)
    assert {row.impl: row.status for row in rows} == dict.fromkeys(impls, "ok"), [
        row.note for row in rows
    ]
    assert all(row.forward_p50_ms > 0 for row in rows)
    assert all((row.forward_backward_p50_ms is None) is (variant == "csr") for row in rows)


@pytest.mark.parametrize(
    ("op", "impls"),
    [("maxsim", ("tilefold", "eager")), ("entmax", ("tilefold", "sort"))],
)
def test_fp64_is_held_to_the_errors_of_fp64(op: str, impls: tuple[str, ...]) -> None:
    rows = run_case(
        get_spec(op),
        tiny(op, dtype="float64"),
        replace(OPTIONS, impls=impls),
        CEILINGS,
    )
    assert [row.status for row in rows] == ["ok", "ok"], [row.note for row in rows]
    case = tiny(op, dtype="float64")
    gate = get_spec(op).make_gate(case, get_spec(op).make_inputs(case, CPU, 0))
    assert (gate.our_budget or parts.BUDGETS["float64"]).forward < 1e-12


def test_softmax_is_timed_but_another_function() -> None:
    (row,) = run_case(
        get_spec("entmax"),
        tiny("entmax"),
        replace(OPTIONS, impls=("softmax",)),
        CEILINGS,
    )
    assert row.status == "ok" and row.forward_error is None


def with_candidate(op: str, build: Callable[[Inputs], Runnable], kind: Any = "ours") -> BenchSpec:
    return replace(get_spec(op), implementations=(Implementation("candidate", build, kind),))


def gives_everyone_a_gradient(weights: Tensor, ids: Tensor, unused: Tensor, vocab: int) -> Tensor:
    right, everyone = (
        token_scatter(weights, ids, vocab, ignore_ids=SPECIAL_IDS, reduce=r) for r in ("max", "sum")
    )
    return right.detach() + everyone - everyone.detach()


WRONG: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "another alpha": ("entmax", "normal", lambda x: entmax(x, 1.6)),
    "slightly more": (
        "lsr_head",
        "ragged-2pct",
        lambda *tensors: 1.001 * lsr_head.stock_head(*tensors),
    ),
    "ignores padding": (
        "lsr_head",
        "ragged-2pct",
        lambda hidden, weight, bias, mask: head(hidden, weight, bias),
    ),
    "counts special tokens": (
        "token_scatter",
        "max",
        lambda w, ids, _, vocab: token_scatter(w, ids, vocab),
    ),
    "adds up": (
        "token_scatter",
        "max",
        lambda w, ids, _, vocab: token_scatter(w, ids, vocab, ignore_ids=SPECIAL_IDS, reduce="sum"),
    ),
    "gives everyone a gradient": ("token_scatter", "max", gives_everyone_a_gradient),
}


@pytest.mark.parametrize(("op", "variant", "wrong"), WRONG.values(), ids=WRONG)
def test_a_wrong_implementation_fails_and_shows_no_time(
    op: str,
    variant: str,
    wrong: Callable[..., Any],
) -> None:
    spec, case = with_candidate(op, lambda inputs: inputs.bind(wrong, "wrong")), tiny(op, variant)
    (row,) = run_case(spec, case, OPTIONS, CEILINGS)
    assert row.status == "FAILED" and row.failed_gate and row.note
    assert {value for name, value in row.record().items() if name.endswith("_ms")} == {None}
    results.print_case(Console(file=(file := io.StringIO()), width=200), spec, case, [row])
    printed = file.getvalue()
    assert "TFLOP/s" in printed.splitlines()[2]
    assert ".." not in printed.split("FAILED")[1].splitlines()[0], "a spread of times was printed"


def test_an_implementation_that_raises_or_does_not_fit_costs_only_its_own_row() -> None:
    def raising(inputs: Inputs) -> Runnable:
        raise ZeroDivisionError("no such kernel")

    def hungry(inputs: Inputs) -> Runnable:
        raise torch.OutOfMemoryError("CUDA out of memory")

    failing = (
        Implementation("broken", raising, "ours"),
        Implementation("hungry", hungry, "baseline"),
    )
    spec = replace(lsr_head.SPEC, implementations=(*failing, *lsr_head.SPEC.implementations[:1]))
    broken, oom, good = run_case(spec, tiny("lsr_head"), OPTIONS, CEILINGS)
    assert (broken.status, broken.note) == (
        "ERROR",
        "ZeroDivisionError: no such kernel",
    ) and broken.failed_gate
    assert (oom.status, oom.failed_gate, good.status) == ("OOM", False, "ok")
    calls = iter(range(100))

    def late(inputs: Inputs) -> Runnable:
        right = lsr_head.SPEC.implementations[0].build(inputs)
        return replace(
            right,
            forward=lambda: right.forward() if next(calls) < 1 else torch.zeros(2).view(3),
        )

    rows = (Implementation("late", late, "ours"), lsr_head.SPEC.implementations[0])
    late_row, good = run_case(
        replace(lsr_head.SPEC, implementations=rows),
        tiny("lsr_head"),
        OPTIONS,
        CEILINGS,
    )
    assert late_row.status == "ERROR" and late_row.failed_gate, "it raised while it was timed"
    assert good.status == "ok" and good.forward_p50_ms is not None
    large = replace(lsr_head.SPEC, min_bytes=lambda case, impl: 1 << 60)
    skipped = run_case(large, tiny("lsr_head"), OPTIONS, CEILINGS)[0]
    assert skipped.status == "skipped" and "GiB free" in skipped.note


def test_bf16_eager_is_shown_with_the_gradient_error_that_its_rounded_logits_cause() -> None:
    case = BenchCase("tiny", "cpu", "bfloat16", {"B": 4, "S": 64, "D": 32, "V": 500}, "dense")
    for kind, status in (("baseline", "ok"), ("ours", "FAILED")):
        spec = with_candidate("lsr_head", lambda inputs: inputs.bind(lsr_head.stock_head, ""), kind)
        (row,) = run_case(spec, case, OPTIONS, CEILINGS)
        assert row.status == status and row.gradient_error > 0.05


def test_padding_does_not_count_as_work_nor_as_scores() -> None:
    dims, spec = {"B": 4, "S": 50, "D": 16, "V": 100}, get_spec("lsr_head")
    full, ragged = (
        spec.work(
            BenchCase("c", "cpu", "float32", dims, variant),
            inputs_of("lsr_head", variant, dims),
            "forward",
        )
        for variant in ("dense", "ragged")
    )
    assert ragged.flops / full.flops == pytest.approx(0.33, abs=0.02)
    scattered = [inputs_of("token_scatter", variant) for variant in ("max", "ragged")]
    assert scattered[0].valid_tokens == 3 * 38 and scattered[1].valid_tokens < 3 * 19
    assert 0 < scattered[1].active < scattered[0].active < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_2pct_inputs_have_about_two_percent_positive_scores(dtype: str) -> None:
    inputs = inputs_of("lsr_head", "2pct", {"B": 8, "S": 40, "D": 32, "V": 5000}, dtype)
    scores = torch.nn.functional.linear(*inputs.leaves).amax(dim=1)
    assert 0.012 < (scores > 0).float().mean().item() < 0.03
    assert inputs.active == pytest.approx(0.02, abs=0.005)


def test_a_run_judges_the_claims_of_which_it_measured_both_sides() -> None:
    def row(impl: str, ms: float, mib: float) -> dict[str, str]:
        case = "cpu-8x256x384x30522-dense"
        made = BenchRow(
            "lsr_head",
            case,
            "float32",
            impl,
            forward_p50_ms=ms,
            forward_backward_peak_mib=mib,
        )
        return results.cells(made.record(), results.collect(CPU))

    rows = [row("tilefold", 1.1, 100.0), row("eager", 4.0, 700.0), row("gemm-full", 1.0, 0.0)]
    memory, time = claims.judged("lsr_head", rows)
    assert (time.ours, time.baseline, time.outcome) == (1.1, 1.0, "pass")
    assert (memory.ours, memory.baseline, memory.outcome) == (100.0, 700.0, "miss")
    assert "| 1, 1.1 ms | 0.909 (0.87) | pass |" in claims.table([time])[2]
    nothing = claims.judge(memory.claim, [row("tilefold", 1.1, 0.0), rows[1]])
    assert nothing.outcome == "not measured", "memory that was too little to be seen"
    assert claims.judged("lsr_head", rows[:1]) == claims.judged("lsr_head", []) == []


def csv_of(folder: Path) -> dict[str, dict[str, str]]:
    (path,) = folder.glob("cpu-*/lsr_head.csv")
    return {row["impl"]: row for row in results.read_csv(path)}


def test_the_command_prints_a_table_writes_the_csv_and_exits_with_one_where_a_gate_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = BenchCase(
        "tiny",
        "cpu",
        "float32",
        {"B": 2, "S": 9, "D": 16, "V": 131},
        "dense",
        quick=True,
    )
    monkeypatch.setitem(vars(lsr_head.SPEC), "cases", (case,))
    monkeypatch.setattr(
        runner,
        "measure_peaks",
        lambda *args: {"forward": 1.0, "forward_backward": 2.0},
    )
    command = ("bench", "lsr_head", "--device", "cpu", "--output")
    assert run_cli(*command, tmp_path / "right", "--quick") == 0
    printed, rows = capsys.readouterr().out, csv_of(tmp_path / "right")
    assert "tilefold (tiled)" in printed and "of floor" in printed
    assert set(rows) == {"tilefold", "eager", "gemm", "gemm-full"}
    assert float(rows["tilefold"]["forward_backward_p50_ms"]) > 0
    assert float(rows["tilefold"]["forward_backward_peak_mib"]) == 2.0
    monkeypatch.setattr(parts, "BUDGETS", {"float32": parts.Budget(forward=0.0, gradient=0.0)})
    assert run_cli(*command, tmp_path / "wrong", "--seconds", "0.001", "--impl", "tilefold") == 1
    (row,) = csv_of(tmp_path / "wrong").values()
    assert "FAILED" in capsys.readouterr().out
    assert (row["status"], row["forward_p50_ms"]) == ("FAILED", "")


def test_the_list_names_every_shape_and_implementation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("bench", "--list") == 0
    printed = capsys.readouterr().out
    for spec in map(get_spec, OPERATORS):
        names = [case.name for case in spec.cases] + [each.name for each in spec.implementations]
        assert all(name in printed for name in names)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_every_default_implementation_passes_on_the_gpu(tmp_path: Path) -> None:
    spec = get_spec("token_scatter")
    rows = run_case(
        spec,
        spec.case("64x32x30522-max"),
        replace(OPTIONS, device=torch.device("cuda")),
        CEILINGS,
    )
    expected = [
        "skipped" if row.impl == "tilefold-csr" else "ok" for row in rows
    ]  # which gives no dense scores
    assert [row.status for row in rows] == expected, [row.note for row in rows]
    command = (
        "bench",
        "lsr_head",
        "--device",
        "cuda",
        "--quick",
        "--shape",
        "64x32x768x30522-2pct",
    )
    assert run_cli(*command, "--output", tmp_path) == 0
