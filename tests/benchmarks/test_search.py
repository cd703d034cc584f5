"""Made vectors, and the rows of `benchmarks.search`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import encode, search_data, train
from benchmarks import search as job
from benchmarks.job import main
from tilefold.bench.results import read_csv
from tilefold.retrieval import SparseVectors, build_index


def heaviest(vectors: SparseVectors, row: int, k: int) -> dict[int, float]:
    terms, weights = vectors.row(row)
    best = np.argsort(-weights)[:k]
    return dict(zip(terms[best].tolist(), weights[best].tolist(), strict=True))


def test_made_vectors_have_the_statistics_that_the_benchmark_states() -> None:
    documents = search_data.made_documents(5_000, 0)
    assert documents.vocab_size == 30_522 and 115 < np.diff(documents.indptr).mean() < 123
    assert all(np.all(np.diff(documents.row(row)[0]) > 0) for row in range(500))
    queries = search_data.made_queries(documents, 100, 0)
    assert 42 < np.diff(queries.indptr).mean() < 44
    for vectors, k in ((documents, 50), (queries, 10)):
        mass = [sum(heaviest(vectors, row, k).values()) / vectors.row(row)[1].sum() for row in range(100)]
        assert 0.72 < np.mean(mass) < 0.79
    kept = []
    for row, hits in enumerate(build_index(documents).search(queries, 10)):
        asked = heaviest(queries, row, 9)
        for hit in hits:
            document = heaviest(documents, int(hit.id[1:]), 20)
            kept.append(sum(asked[term] * document.get(term, 0.0) for term in asked) / hit.score)
    assert 0.8 < np.mean(kept) < 0.9


def test_the_command_measures_every_engine_and_writes_what_it_prints(tmp_path: Path) -> None:
    asked = ["--quick", "--shape", "splade-1k", "--device", "cpu", "--output", str(tmp_path)]
    assert main(job.JOB, job.__doc__, asked) == 0
    (path,) = tmp_path.rglob("search.csv")
    rows = read_csv(path)
    assert {row["engine"] for row in rows} == {"exact", "seismic", "scipy", "numba"}
    for row in rows:
        assert row["gate"] == "ok"
        if row["engine"] in ("exact", "scipy"):
            assert float(row["recall_at_10"]) == 1.0
            assert 0 < float(row["p50_ms"]) <= float(row["p99_ms"])
    searches = [(float(row["query_cut"]), float(row["recall_at_10"])) for row in rows if row["engine"] == "seismic"]
    assert len(searches) == 3 and all(recall >= 0.95 for cut, recall in searches if cut >= 10)


def test_an_unknown_shape_is_answered_with_the_known_ones() -> None:
    for each in (encode.JOB, job.JOB, train.JOB):
        with pytest.raises(ValueError, match="shape must be one of"):
            each.chosen(["huge"], "cpu", quick=False)


def test_a_mistyped_shape_ends_the_command_with_what_can_be_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(job.JOB, job.__doc__, ["--shape", "splade-1", "--device", "cpu"])
    assert leave.value.code == 2
    assert "got 'splade-1'" in capsys.readouterr().err


def test_recall_counts_ties_for_either_and_misses_for_none() -> None:
    best = [("a", 3.0), ("b", 2.0)]
    assert job.recall([best], [[("a", 3.0), ("c", 2.0)]]) == 1.0
    assert job.recall([best], [[("a", 3.0), ("c", 1.0)]]) == 0.5
    assert job.recall([best], [[]]) == 0.0


def test_wrong_answers_of_an_exact_search_fail_the_gate() -> None:
    truth = [[("a", 3.0)]]
    for found, gate in ((("b", 1.0), "recall 0.0000 of an exact search"), (("a", 3.001), "scores differ by 3.3e-04")):
        measured = job.Measured(0.0, 0.0, 0.0, [1.0], [1.0], [[found]])
        assert str(job.row("scipy", measured, truth)["gate"]).startswith(gate)
        assert job.row("seismic", measured, truth)["gate"] == "ok"


def test_the_truth_is_compared_with_a_sum_over_all_vectors() -> None:
    documents = search_data.made_documents(300, 0)
    queries = search_data.made_queries(documents, 4, 0)
    truth = [[(hit.id, hit.score) for hit in row] for row in build_index(documents).search(queries, 10)]
    assert job.against_a_sum(documents, queries, truth) == ""
    wrong = [[(name, 1.01 * score) for name, score in row] for row in truth]
    assert job.against_a_sum(documents, queries, wrong).startswith("beside a sum over all vectors: scores differ")
    assert "recall 0.0" in job.against_a_sum(documents, queries, [[("d0", 0.0)] * 10] * 4)
