"""``tilefold bench``: its table, its CSV, its exit code and its answers to wrong arguments."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tilefold.bench import gate, runner
from tilefold.bench import lsr_head as spec
from tilefold.bench.spec import BenchCase
from tilefold.cli.bench import bench


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(bench)
    return app


@pytest.fixture
def tiny_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BenchCase("tiny", "cpu", "float32", {"B": 2, "S": 9, "D": 16, "V": 131}, "dense", quick=True)
    tiny = replace(spec.SPEC, cases=(case,), requirements=())
    monkeypatch.setattr(spec, "SPEC", tiny)
    monkeypatch.setattr(runner, "measure_peaks", lambda *args: {"forward": 1.0, "forward_backward": 2.0})


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
    monkeypatch.setattr(gate, "BUDGETS", {"float32": gate.Budget(forward=0.0, gradient=0.0)})
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
        (["serch"], "op must be one of lsr_head, maxsim, token_scatter, entmax, entmax_attention, got 'serch'"),
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
    for name in (*(case.name for case in spec.SPEC.cases), *(each.name for each in spec.SPEC.implementations)):
        assert name in result.output


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_every_default_implementation_passes_on_the_gpu(app: typer.Typer, tmp_path: Path) -> None:
    arguments = ["lsr_head", "--device", "cuda", "--quick", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--shape", "64x32x768x30522-2pct"])
    assert result.exit_code == 0, result.output
