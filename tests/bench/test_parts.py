"""Parts of a benchmark: names, CSV files and where they lie, timers and memory probes, estimates of
``info plan``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.refusals import refused
from tilefold._internal import memory as _memory
from tilefold.bench import results
from tilefold.bench.runner import CSV_KEY, BenchRow, measure_peaks
from tilefold.bench.spec import OPERATORS, BenchCase, Ceilings, Work, get_spec, parse_dtype
from tilefold.bench.timing import TimeBudget, Timing, in_fresh_process, resident_peak_mib, time_cpu
from tilefold.cli._plan import Shape, texts_per_second, training


@pytest.mark.parametrize("op", OPERATORS)
def test_every_spec_has_unique_names_and_a_baseline_that_exists(op: str) -> None:
    spec = get_spec(op)
    assert len({case.name for case in spec.cases}) == len(spec.cases)
    assert spec.implementation(spec.baseline)
    assert {case.device for case in spec.cases} == {"cpu", "cuda"}


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    refused(ValueError, "op must be one of lsr_head", get_spec, "softmax")
    refused(
        ValueError,
        r"shape must be one of '32x512.*got 'huge'",
        get_spec("lsr_head").case,
        "huge",
    )
    refused(ValueError, "dtype must be one of bfloat16", parse_dtype, "int8")
    assert parse_dtype("bf16") == "bfloat16"


CPU = torch.device("cpu")


def test_rows_of_a_csv_are_replaced_by_key_and_a_csv_of_something_else_stays(
    tmp_path: Path,
) -> None:
    stamp = results.collect(CPU)
    path = tmp_path / "device" / "lsr_head.csv"
    first = [
        BenchRow("lsr_head", "a", "float32", impl, forward_p50_ms=1.0).record()
        for impl in ("x", "y")
    ]
    results.write_csv(path, first, stamp, CSV_KEY)
    results.write_csv(
        path,
        [BenchRow("lsr_head", "a", "float32", "y", forward_p50_ms=2.0).record()],
        stamp,
        CSV_KEY,
    )
    rows = {row["impl"]: row for row in results.read_csv(path)}
    assert {impl: row["forward_p50_ms"] for impl, row in rows.items()} == {"x": "1", "y": "2"}
    assert rows["y"]["torch"] == torch.__version__
    assert rows["y"]["commit"]
    assert [entry.name for entry in path.parent.iterdir()] == ["lsr_head.csv"], (
        "a temporary file was left behind"
    )
    (notes := tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    message = r"notes\.csv must have the columns op, case, dtype, impl"
    refused(ValueError, message, results.write_csv, notes, first, stamp, CSV_KEY)
    assert notes.read_text() == "a,b\n1,2\n"
    notes.write_text("a,b\n1,2,3\n")
    refused(
        ValueError,
        r"notes\.csv must have rows no longer than its header",
        results.read_csv,
        notes,
    )


def test_results_go_to_the_repository_unless_told_otherwise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert results.results_folder(None, quick=False) is None, "not inside a repository"
    (tmp_path / "benchmarks").mkdir()
    assert results.results_folder(None, quick=False) == Path("benchmarks/results")
    assert results.results_folder(None, quick=True) is None
    assert results.results_folder(tmp_path, quick=True) == tmp_path
    stamp = replace(results.collect(CPU), device="Intel(R) Xeon(R) CPU @ 2.20GHz", threads=2)
    assert results.device_slug(stamp) == "cpu-intel-xeon-cpu-2-20ghz-2-threads"
    assert results.device_slug(replace(stamp, device="NVIDIA H200", cuda="13.0")) == "nvidia-h200"


SMALL = BenchCase("small", "cpu", "float32", {"B": 2, "S": 128, "D": 64, "V": 30522}, "dense")


def test_cpu_timing_takes_turns_so_that_noise_hits_all_alike() -> None:
    calls: list[str] = []
    runs = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    timings = time_cpu(runs, TimeBudget(seconds=0, min_reps=4, max_reps=4, warmup=1))
    assert calls == ["a", "b"] * 5
    assert {name: timing.reps for name, timing in timings.items()} == {"a": 4, "b": 4}
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 0.0]) == Timing(1.0, 2.5, 4.0, 6)


def test_a_peak_is_seen_even_when_the_memory_is_gone_again() -> None:
    """A block of this size is mapped anew, whatever was freed before. Linux counts pages per CPU
    and adds them up in batches of max(32, 2 CPUs): what it says before and at the peak may be off
    by 8 MiB each where there are 32 CPUs.
    """
    assert abs(resident_peak_mib(lambda: torch.ones(256 * 2**18).sum()) - 256) < 32


@pytest.mark.slow
def test_a_fresh_process_weighs_the_plain_head_by_its_logits_and_ours_without_them() -> None:
    logits_mib = 2 * 128 * 30522 * 4 / 2**20
    plain = measure_peaks("lsr_head", SMALL, "eager")
    ours = measure_peaks("lsr_head", SMALL, "tilefold")
    assert plain["forward"] > logits_mib
    assert plain["forward_backward"] > 2 * logits_mib
    assert ours["forward_backward"] < plain["forward_backward"] / 2


def test_a_measuring_process_that_dies_says_so() -> None:
    impossible = replace(SMALL, dims={"B": 1, "S": 1, "D": -1, "V": 8})
    refused(RuntimeError, "negative dimension", measure_peaks, "lsr_head", impossible, "eager")
    refused(
        RuntimeError,
        "was killed, most likely for lack of memory",
        in_fresh_process,
        os._exit,
        1,
    )


def test_the_floor_is_the_slower_of_arithmetic_and_traffic() -> None:
    ceilings = Ceilings(flops=1e12, bandwidth=1e9)
    assert Work(flops=2e9, bytes=1e6).floor_ms(ceilings) == pytest.approx(2.0)
    assert Work(flops=2e9, bytes=1e7).floor_ms(ceilings) == pytest.approx(10.0)


MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "nvidia-h200"
BERT = Shape(768, 12, 3072, 30522)


TRAINED = [
    row for row in results.read_csv(MEASURED / "train_splade.csv") if row["side"] == "tilefold"
]
assert len(TRAINED) == 12


@pytest.mark.parametrize(
    "row",
    TRAINED,
    ids=lambda row: "-".join(row[k] for k in ("model", "length", "checkpointing")),
)
def test_batch_and_memory_are_within_a_tenth_of_the_measured_ones(row: dict[str, str]) -> None:
    shape = Shape(int(row["hidden"]), int(row["layers"]), 4 * int(row["hidden"]), int(row["vocab"]))
    lengths, checkpointing = (
        (int(row["length"]), int(row["query_length"])),
        row["checkpointing"] == "yes",
    )
    plan = training(shape, *lengths, float(row["memory_gib"]), 512, checkpointing=checkpointing)
    assert plan.mib_a_pair == pytest.approx(float(row["mib_a_pair"]), rel=0.1)
    assert plan.largest_batch == pytest.approx(int(row["largest_batch"]), rel=0.1)
    assert plan.fixed_gib + int(row["largest_batch"]) * plan.mib_a_pair / 1024 == pytest.approx(
        float(row["largest_peak_gib"]),
        rel=0.1,
    )


def test_the_rate_of_encoding_is_that_of_the_row_it_was_fitted_to() -> None:
    what = ("bert-base", "encode_collection, to Parquet")
    (row,) = (
        row
        for row in results.read_csv(MEASURED / "encode.csv")
        if (row["case"], row["what"]) == what
    )
    assert texts_per_second(BERT, round(float(row["tokens"]))) == pytest.approx(
        float(row["docs_per_s"]),
        rel=0.02,
    )
    # a small model is not faster than its tokenizer
    assert texts_per_second(Shape(32, 1, 32, 30522), 230) == pytest.approx(21096, rel=0.01)
    assert training(BERT, 256, 24, 1.0, 512, checkpointing=False).largest_batch == 0, (
        "a model that does not fit"
    )


def test_memory_that_is_left_is_that_of_the_tightest_group(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cgroup").write_text("1:cpu:/elsewhere\n0::/job/step\n")
    for place, limit in (("job/step", "max"), ("job", "1000")):
        (group := tmp_path / "fs" / place).mkdir(parents=True, exist_ok=True)
        for name, text in {
            "max": limit,
            "current": "700",
            "stat": "anon 400\ninactive_file 250\n",
        }.items():
            (group / f"memory.{name}").write_text(text)
    monkeypatch.setattr(_memory, "_CGROUPS_OF_PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr(_memory, "_CGROUP_MOUNT", tmp_path / "fs")
    assert _memory.memory_left() == 1000 - 700 + 250
