"""Timing, memory, provenance, the CSV and the command line of the benchmarks."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from tilefold.bench import child, provenance
from tilefold.bench import lsr_head as bench_lsr_head
from tilefold.bench.markdown import markdown_table
from tilefold.bench.plots import plot_results
from tilefold.bench.registry import BenchCase, Ceilings, Work, get_spec, operators, parse_dtype
from tilefold.bench.runner import CSV_KEY, BenchRow, verdicts
from tilefold.bench.timing import TimeBudget, Timing, resident_peak_mib, time_cpu
from tilefold.cli.bench import bench

CPU = torch.device("cpu")
SMALL = BenchCase("small", "cpu", "float32", {"B": 2, "S": 128, "D": 64, "V": 30522}, "dense")


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(bench)
    return app


@pytest.fixture
def tiny_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BenchCase("tiny", "cpu", "float32", {"B": 2, "S": 9, "D": 16, "V": 131}, "dense", quick=True)
    spec = replace(bench_lsr_head.SPEC, cases=(case,), requirements=())
    monkeypatch.setattr(bench_lsr_head, "SPEC", spec)
    monkeypatch.setattr(child, "measure_peaks", lambda *args: {"forward": 1.0, "forward_backward": 2.0})


def test_cpu_timing_takes_turns_so_that_noise_hits_all_alike() -> None:
    calls: list[str] = []
    runs = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    timings = time_cpu(runs, TimeBudget(seconds=0, min_reps=4, max_reps=4, warmup=1))
    assert calls == ["a", "b"] * 5
    assert {name: timing.reps for name, timing in timings.items()} == {"a": 4, "b": 4}


def test_percentiles_are_those_of_the_samples() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 0.0]) == Timing(1.0, 2.5, 4.0, 6)


def test_a_peak_is_seen_even_when_the_memory_is_gone_again() -> None:
    peak = resident_peak_mib(lambda: torch.ones(64 * 2**18).sum())
    assert 60 < peak < 90


def test_a_fresh_process_weighs_the_plain_head_by_its_logits_and_ours_without_them() -> None:
    logits_mib = 2 * 128 * 30522 * 4 / 2**20
    plain = child.measure_peaks("lsr_head", SMALL, "eager", 0)
    ours = child.measure_peaks("lsr_head", SMALL, "tilefold", 0)
    assert plain["forward"] > logits_mib
    assert plain["forward_backward"] > 2 * logits_mib
    assert ours["forward_backward"] < plain["forward_backward"] / 2


def test_a_measuring_process_that_dies_says_so() -> None:
    impossible = replace(SMALL, dims={"B": 1, "S": 1, "D": -1, "V": 8})
    with pytest.raises(child.ChildError, match="ended with code 1: RuntimeError"):
        list(child.stream("lsr_head", [impossible], "eager"))


def test_the_floor_is_the_slower_of_arithmetic_and_traffic() -> None:
    ceilings = Ceilings(flops=1e12, bandwidth=1e9)
    assert Work(flops=2e9, bytes=1e6).floor_ms(ceilings) == pytest.approx(2.0)
    assert Work(flops=2e9, bytes=1e7).floor_ms(ceilings) == pytest.approx(10.0)


def test_padding_does_not_count_as_work() -> None:
    dims = {"B": 4, "S": 50, "D": 16, "V": 100}
    full, ragged = (
        bench_lsr_head.work(case, bench_lsr_head.make_inputs(case, CPU), "forward")
        for case in (BenchCase("c", "cpu", "float32", dims, variant) for variant in ("dense", "ragged"))
    )
    assert ragged.flops / full.flops == pytest.approx(0.33, abs=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_2pct_inputs_have_about_two_percent_positive_scores(dtype: str) -> None:
    case = BenchCase("c", "cpu", dtype, {"B": 8, "S": 40, "D": 32, "V": 5000}, "2pct")
    inputs = bench_lsr_head.make_inputs(case, CPU)
    scores = torch.nn.functional.linear(inputs.hidden, inputs.weight, inputs.bias).amax(dim=1)
    assert 0.012 < (scores > 0).float().mean().item() < 0.03
    assert inputs.active == pytest.approx(0.02, abs=0.005)


def test_rows_of_a_csv_are_replaced_by_key_and_others_stay(tmp_path: Path) -> None:
    stamp = provenance.collect(CPU)
    path = tmp_path / "device" / "lsr_head.csv"
    first = [BenchRow("lsr_head", "a", "float32", impl, forward_p50_ms=1.0).record() for impl in ("x", "y")]
    provenance.write_csv(path, first, stamp, CSV_KEY)
    provenance.write_csv(path, [BenchRow("lsr_head", "a", "float32", "y", forward_p50_ms=2.0).record()], stamp, CSV_KEY)
    with path.open(newline="") as file:
        rows = {row["impl"]: row for row in csv.DictReader(file)}
    assert {impl: row["forward_p50_ms"] for impl, row in rows.items()} == {"x": "1", "y": "2"}
    assert rows["y"]["torch"] == torch.__version__
    assert rows["y"]["commit"]
    assert [entry.name for entry in path.parent.iterdir()] == ["lsr_head.csv"], "a temporary file was left behind"


def test_a_csv_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("a,b\n1,2\n")
    row = BenchRow("lsr_head", "a", "float32", "x").record()
    with pytest.raises(ValueError, match=r"notes\.csv must have the columns op, case, dtype, impl"):
        provenance.write_csv(path, [row], provenance.collect(CPU), CSV_KEY)
    assert path.read_text() == "a,b\n1,2\n"


def test_device_folders_have_plain_names() -> None:
    stamp = provenance.collect(CPU)
    gpu = replace(stamp, device="NVIDIA H200", cuda="13.0")
    cpu = replace(stamp, device="Intel(R) Xeon(R) CPU @ 2.20GHz", threads=2)
    assert provenance.device_slug(gpu) == "nvidia-h200"
    assert provenance.device_slug(cpu) == "cpu-intel-xeon-cpu-2-20ghz-2-threads"


def test_requirements_show_both_sides_and_whether_they_held() -> None:
    case = bench_lsr_head.CPU_TRAIN.name

    def row(impl: str, ms: float, mib: float) -> BenchRow:
        return BenchRow("lsr_head", case, "float32", impl, forward_p50_ms=ms, forward_backward_peak_mib=mib)

    rows = [row("tilefold", 1.1, 100.0), row("eager", 4.0, 700.0), row("gemm-full", 1.0, 0.0)]
    time, memory = verdicts(bench_lsr_head.SPEC, rows)
    assert (time.left, time.right, time.held) == (1.1, 1.0, True)
    assert (memory.left, memory.right, memory.held) == (100.0, 700.0, False)
    assert verdicts(bench_lsr_head.SPEC, rows[:1])[0].held is None
    assert verdicts(bench_lsr_head.SPEC, []) == []


@pytest.mark.parametrize("op", operators())
def test_every_spec_has_unique_names_a_baseline_and_requirements_that_exist(op: str) -> None:
    spec = get_spec(op)
    assert len({case.name for case in spec.cases}) == len(spec.cases)
    assert spec.implementation(spec.baseline)
    assert {case.device for case in spec.cases} == {"cpu", "cuda"}
    for requirement in spec.requirements:
        assert spec.case(requirement.case)
        for impl, attribute in (requirement.left, requirement.right):
            assert spec.implementation(impl)
            assert hasattr(BenchRow("o", "c", "d", "i"), attribute)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="op must be one of lsr_head"):
        get_spec("softmax")
    with pytest.raises(ValueError, match=r"shape must be one of '32x512.*got 'huge'"):
        get_spec("lsr_head").case("huge")
    with pytest.raises(ValueError, match="dtype must be one of bfloat16"):
        parse_dtype("int8")
    assert parse_dtype("bf16") == "bfloat16"


@pytest.mark.usefixtures("tiny_spec")
def test_the_command_prints_a_table_and_writes_the_csv(app: typer.Typer, tmp_path: Path) -> None:
    arguments = ["lsr_head", "--device", "cpu", "--quick", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "tilefold (tiled)" in result.output
    assert "of floor" in result.output
    (path,) = tmp_path.glob("cpu-*/lsr_head.csv")
    with path.open(newline="") as file:
        rows = {row["impl"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"tilefold", "eager", "gemm", "gemm-full"}
    assert float(rows["tilefold"]["forward_backward_p50_ms"]) > 0
    assert float(rows["tilefold"]["forward_backward_peak_mib"]) == 2.0


@pytest.mark.usefixtures("tiny_spec")
def test_a_failed_gate_makes_the_command_exit_with_one(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilefold.bench import _lsr_head_gate
    from tilefold.bench.gate import Budget

    monkeypatch.setattr(_lsr_head_gate, "BUDGETS", {"float32": Budget(forward=0.0, gradient=0.0)})
    arguments = ["lsr_head", "--device", "cpu", "--output", str(tmp_path), "--seconds", "0.001"]
    result = CliRunner().invoke(app, [*arguments, "--impl", "tilefold"])
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output
    (path,) = tmp_path.glob("cpu-*/lsr_head.csv")
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["status"], row["forward_p50_ms"]) == ("FAILED", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmax"], "op must be one of lsr_head, "),
        ([], "op must be given"),
        (["lsr_head", "--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["lsr_head", "--device", "cpu", "--shape", "huge"], "shape must be one of"),
        (["lsr_head", "--device", "cpu", "--shape", "4x8192x768x50368-dense"], "belongs to another device"),
    ],
)
def test_a_wrong_argument_is_named_without_a_traceback(app: typer.Typer, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_list_names_every_shape_and_implementation(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["--list"])
    assert result.exit_code == 0
    spec = get_spec("lsr_head")
    for item in (*spec.cases, *spec.implementations):
        assert item.name in result.output


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_every_default_implementation_passes_on_the_gpu(app: typer.Typer, tmp_path: Path) -> None:
    arguments = ["lsr_head", "--device", "cuda", "--quick", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--shape", "64x32x768x30522-2pct"])
    assert result.exit_code == 0, result.output


def test_a_results_file_becomes_a_table_with_its_conditions(tmp_path: Path) -> None:
    path = tmp_path / "lsr_head.csv"
    rows = [
        BenchRow("lsr_head", "a", "float32", "tilefold", forward_p50_ms=1.25, forward_floor_ms=1.0).record(),
        BenchRow("lsr_head", "a", "float32", "eager", status="OOM").record(),
    ]
    provenance.write_csv(path, rows, provenance.collect(CPU), CSV_KEY)
    lines = markdown_table(path).splitlines()
    assert lines[2] == "| a, float32 | tilefold | 1.25 | - | - | 80% |  |"
    assert lines[3] == "|  | eager | - | - | - | - | OOM |"
    assert f"torch {torch.__version__}" in lines[-1]
    (tmp_path / "other.csv").write_text("a\n1\n")
    with pytest.raises(ValueError, match="must be a file that `tilefold bench` wrote"):
        markdown_table(tmp_path / "other.csv")


def test_a_results_file_becomes_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "lsr_head.csv"
    rows = [
        BenchRow(
            "lsr_head", "a", "float32", impl, forward_backward_p50_ms=ms, forward_backward_peak_mib=10 * ms
        ).record()
        for impl, ms in (("tilefold", 1.0), ("eager", 4.0))
    ]
    provenance.write_csv(path, rows, provenance.collect(CPU), CSV_KEY)
    picture = plot_results(path, tmp_path / "lsr_head.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    path.write_text("status,impl\nFAILED,tilefold\n")
    with pytest.raises(ValueError, match="must hold measured rows"):
        plot_results(path, picture)
