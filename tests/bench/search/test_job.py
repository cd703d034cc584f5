"""Made vectors, and the rows of `tilefold bench search`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tilefold.bench.jobs import get_job, job_names
from tilefold.bench.results import read_csv
from tilefold.bench.search import inputs, job
from tilefold.cli import app


def test_made_vectors_have_the_statistics_that_the_benchmark_states() -> None:
    documents = inputs.made_documents(500, 0)
    terms = np.diff(documents.indptr)
    assert 100 < terms.mean() <= inputs.TERMS and documents.vocab_size == 30_522
    assert all(np.all(np.diff(documents.row(row)[0]) > 0) for row in range(500))
    queries = inputs.made_queries(documents, 20, 0)
    assert 25 < np.diff(queries.indptr).mean() <= inputs.QUERY_TERMS


def test_the_command_measures_every_engine_and_writes_what_it_prints(tmp_path: Path) -> None:
    asked = ["bench", "search", "--quick", "--shape", "made-1k", "--device", "cpu", "--output", str(tmp_path)]
    outcome = CliRunner().invoke(app, asked)
    assert outcome.exit_code == 0, outcome.output
    (path,) = tmp_path.rglob("search.csv")
    rows = read_csv(path)
    assert {row["engine"] for row in rows} == {"exact", "seismic", "scipy", "numba"}
    for row in rows:
        assert row["gate"] == "ok"
        if row["engine"] in ("exact", "scipy"):
            assert float(row["recall_at_10"]) == 1.0
            assert 0 < float(row["p50_ms"]) <= float(row["p99_ms"])


def test_an_unknown_shape_is_answered_with_the_known_ones() -> None:
    for name in job_names():
        with pytest.raises(ValueError, match="shape must be one of"):
            get_job(name).chosen(["huge"], "cpu", quick=False)


def test_a_mistyped_job_is_answered_with_all_that_can_be_timed() -> None:
    outcome = CliRunner().invoke(app, ["bench", "serch"])
    assert outcome.exit_code == 2
    assert all(name in outcome.output for name in ("lsr_head", *job_names(), "got 'serch'"))


def test_recall_counts_ties_for_either_and_misses_for_none() -> None:
    best = [("a", 3.0), ("b", 2.0)]
    assert job.recall([best], [[("a", 3.0), ("c", 2.0)]]) == 1.0
    assert job.recall([best], [[("a", 3.0), ("c", 1.0)]]) == 0.5
    assert job.recall([best], [[]]) == 0.0


def test_wrong_answers_of_an_exact_search_fail_the_gate() -> None:
    truth = [[("a", 3.0)]]
    measured = job.Measured(0.0, 0.0, [1.0], [1.0], [[("b", 1.0)]])
    assert job.row("scipy", measured, truth)["gate"] == "recall 0.0000 of an exact search"
    assert job.row("seismic", measured, truth)["gate"] == "ok"
