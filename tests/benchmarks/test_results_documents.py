"""CSV files of results become tables and pictures of documents."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from benchmarks.jobs_plot import plot_jobs
from benchmarks.results_plot import plot_results
from benchmarks.results_table import markdown_table
from benchmarks.search_plot import plot_search
from tilefold.bench.results import collect, write_csv
from tilefold.bench.runner import CSV_KEY, BenchRow

CPU = torch.device("cpu")


def test_a_results_file_becomes_a_table_with_its_conditions(tmp_path: Path) -> None:
    path = tmp_path / "lsr_head.csv"
    rows = [
        BenchRow("lsr_head", "a", "float32", "tilefold", forward_p50_ms=1.25, forward_floor_ms=1.0).record(),
        BenchRow("lsr_head", "a", "float32", "eager", status="OOM").record(),
    ]
    write_csv(path, rows, collect(CPU), CSV_KEY)
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
    write_csv(path, rows, collect(CPU), CSV_KEY)
    picture = plot_results(path, tmp_path / "lsr_head.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    path.write_text("status,impl\nFAILED,tilefold\n")
    with pytest.raises(ValueError, match="must hold measured rows"):
        plot_results(path, picture)


def test_results_of_jobs_become_a_picture(tmp_path: Path) -> None:
    results = Path(__file__).resolve().parents[2] / "benchmarks/results/nvidia-h200"
    assert plot_jobs(results, tmp_path / "jobs.png").read_bytes().startswith(b"\x89PNG")
    for name in ("encode", "train"):
        (tmp_path / f"{name}.csv").write_text("case,gate\na,FAILED\n")
    with pytest.raises(ValueError, match=r"encode.csv must hold rows that passed their gate"):
        plot_jobs(tmp_path, tmp_path / "none.png")


def test_results_of_search_become_a_picture(tmp_path: Path) -> None:
    results = Path(__file__).resolve().parents[2] / "benchmarks/results/cpu-amd-epyc-2-threads/search.csv"
    assert plot_search(results, tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "search.csv").write_text("documents,gate\n1,FAILED\n")
    with pytest.raises(ValueError, match=r"search.csv must hold rows that passed"):
        plot_search(tmp_path / "search.csv", tmp_path / "none.png")


SCRIPTS = ("overview", "jobs_plot", "results_plot", "results_table", "search_plot", "train_splade.report")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_help_explains_a_script_and_draws_nothing(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{script}", run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage:")
    assert not list(tmp_path.iterdir())
