"""Tests of the benchmarks of whole jobs: data, gates, and tables and pictures of results."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import encode, search_data, search_gpu, train, train_scale
from benchmarks import search as job
from benchmarks import train as train_job
from benchmarks.job import JobOptions, main
from benchmarks.jobs_plot import plot_jobs
from benchmarks.results_plot import plot_results
from benchmarks.results_table import markdown_table
from benchmarks.search_plot import plot_search
from benchmarks.train_data import TINY, load_tokenizer, made_pairs, make_encoder, valid_share
from benchmarks.train_run import GATE_STEPS, Measured, run
from tests.distributed.ranks import TEXTS, VOCABULARY
from tests.recipes.small import tiny_masked_lm
from tests.refusals import refused
from tilefold.bench.results import collect, read_csv, write_csv
from tilefold.bench.runner import CSV_KEY, BenchRow
from tilefold.retrieval import SparseVectors, build_index

CPU = torch.device("cpu")
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def heaviest(vectors: SparseVectors, row: int, k: int) -> dict[int, float]:
    """Return the weights of the ``k`` heaviest terms of a row, by term."""
    terms, weights = vectors.row(row)
    best = np.argsort(-weights)[:k]
    return dict(zip(terms[best].tolist(), weights[best].tolist(), strict=True))


def heaviest_share(vectors: SparseVectors, k: int) -> float:
    """Return the share of the weights in the ``k`` heaviest terms, as a mean over 100 rows."""
    shares = []
    for row in range(100):
        _, weights = vectors.row(row)
        shares.append(sum(heaviest(vectors, row, k).values()) / weights.sum())
    return float(np.mean(shares))


@pytest.fixture(scope="module", params=["numpy", "torch"])
def documents(request: pytest.FixtureRequest) -> SparseVectors:
    """Documents that are drawn by NumPy, or by torch on a device."""
    if request.param == "numpy":
        return search_data.make_documents(5000, 0)
    return search_data.make_device_rows(5000, 0, CPU).first(5000)


@pytest.fixture(scope="module")
def queries(documents: SparseVectors) -> SparseVectors:
    return search_data.make_queries(documents, 100, 0)


def test_documents_have_the_published_number_of_terms(documents: SparseVectors) -> None:
    assert documents.vocab_size == 30_522
    assert 115 < np.diff(documents.indptr).mean() < 123


def test_terms_of_documents_increase(documents: SparseVectors) -> None:
    for row in range(500):
        terms, _ = documents.row(row)
        assert np.all(np.diff(terms) > 0)


def test_queries_have_the_published_number_of_terms(queries: SparseVectors) -> None:
    assert 42 < np.diff(queries.indptr).mean() < 44


def test_the_heaviest_terms_hold_the_published_share_of_the_weights(
    documents: SparseVectors,
    queries: SparseVectors,
) -> None:
    assert 0.72 < heaviest_share(documents, 50) < 0.79
    assert 0.72 < heaviest_share(queries, 10) < 0.79


def test_the_heaviest_terms_hold_the_published_share_of_the_scores(
    documents: SparseVectors,
    queries: SparseVectors,
) -> None:
    shares = []
    for row, hits in enumerate(build_index(documents).search(queries, 10)):
        query = heaviest(queries, row, 9)
        for hit in hits:
            document = heaviest(documents, int(hit.id[1:]), 20)
            score = sum(weight * document.get(term, 0.0) for term, weight in query.items())
            shares.append(score / hit.score)
    assert 0.8 < np.mean(shares) < 0.9


@pytest.mark.slow
def test_the_command_measures_every_engine_and_writes_what_it_prints(tmp_path: Path) -> None:
    pytest.importorskip("seismic")
    arguments = ["--quick", "--shape", "splade-1k", "--device", "cpu", "--output", str(tmp_path)]
    assert main(job.JOB, job.__doc__, arguments) == 0
    (path,) = tmp_path.rglob("search.csv")
    rows = read_csv(path)
    assert {row["engine"] for row in rows} == {"exact", "seismic", "scipy", "numba"}
    assert all(row["gate"] == "ok" for row in rows)
    for row in rows:
        if row["engine"] in ("exact", "scipy"):
            assert float(row["recall_at_10"]) == 1.0
            assert 0 < float(row["p50_ms"]) <= float(row["p99_ms"])
    seismic_rows = [row for row in rows if row["engine"] == "seismic"]
    assert len(seismic_rows) == 3
    for row in seismic_rows:
        if float(row["query_cut"]) >= 10:
            assert float(row["recall_at_10"]) >= 0.95


def test_searches_pass_their_gates_and_an_error_leaves_the_other_cases(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search_gpu, "TINY_DOCUMENTS", 300)
    monkeypatch.setattr(search_gpu, "BUDGET", search_gpu.ONCE)
    # the case of texts fails
    monkeypatch.setattr(search_gpu, "make_model", None)
    arguments = ["--tiny", "--device", "cpu", "--output", str(tmp_path)]
    for case in ("encode-search", "maxsim-1m", "maxsim-4bit", "streamed", "sparse-1m"):
        arguments.append(f"--only={case}")
    assert main(search_gpu.JOB, None, arguments) == 1
    failed, *rows = read_csv(next(tmp_path.rglob("search_gpu.csv")))
    assert failed["gate"] == "TypeError: 'NoneType' object is not callable"
    assert len(rows) == 21
    for row in rows:
        assert row["gate"] == "ok"
        assert float(row["p50_ms"]) > 0


def test_an_unknown_shape_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for benchmark in (encode.JOB, job.JOB, train.JOB):
        refused(ValueError, "shape must be one of", benchmark.chosen, ["huge"], "cpu", quick=False)
    with pytest.raises(SystemExit) as exit_info:
        main(job.JOB, job.__doc__, ["--shape", "splade-1", "--device", "cpu"])
    assert exit_info.value.code == 2
    assert "got 'splade-1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hits", "recall"),
    [
        pytest.param([("a", 3.0), ("c", 2.0)], 1.0, id="another document of the same score"),
        pytest.param([("a", 3.0), ("c", 1.0)], 0.5, id="one document is missing"),
        pytest.param([], 0.0, id="no hits"),
    ],
)
def test_recall_counts_documents_of_the_best_scores(
    hits: list[tuple[str, float]],
    recall: float,
) -> None:
    best = [("a", 3.0), ("b", 2.0)]
    assert job.recall([best], [hits]) == recall


@pytest.mark.parametrize(
    ("hit", "gate"),
    [
        pytest.param(("b", 1.0), "recall 0.0000 of an exact search", id="wrong document"),
        pytest.param(("a", 3.001), "scores differ by 3.3e-04", id="wrong score"),
    ],
)
def test_wrong_answers_fail_the_gate_of_an_exact_search_only(
    hit: tuple[str, float],
    gate: str,
) -> None:
    truth = [[("a", 3.0)]]
    measured = job.Measured(0.0, 0.0, 0.0, [1.0], [1.0], [[hit]])
    assert str(job.row("scipy", measured, truth)["gate"]).startswith(gate)
    assert job.row("seismic", measured, truth)["gate"] == "ok"


def test_the_truth_is_compared_with_a_sum_over_all_vectors() -> None:
    documents = search_data.make_documents(300, 0)
    queries = search_data.make_queries(documents, 4, 0)
    truth = [
        [(hit.id, hit.score) for hit in row] for row in build_index(documents).search(queries, 10)
    ]
    assert job.against_a_sum(documents, queries, truth) == ""
    wrong = [[(name, 1.01 * score) for name, score in row] for row in truth]
    assert job.against_a_sum(documents, queries, wrong).startswith(
        "compared with a sum over all vectors: scores differ",
    )
    assert "recall 0.0" in job.against_a_sum(documents, queries, [[("d0", 0.0)] * 10] * 4)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("datasets")
    pytest.importorskip("sentence_transformers")
    return tiny_masked_lm(tmp_path_factory.mktemp("tiny"), TEXTS)


@pytest.mark.parametrize(
    "name",
    ["tiny", pytest.param("tiny-colbert", marks=pytest.mark.slow)],
)
def test_all_sides_train_the_same_model(name: str, tokenizer_folder: Path) -> None:
    (case,) = train_job.JOB.chosen([name], "cpu", True)
    case = replace(case, numbers={**case.numbers, "vocab": VOCABULARY})
    rows = list(train_job.JOB.run(case, JobOptions(CPU, tokenizer=tokenizer_folder)))
    assert [row["side"] for row in rows] == list(case.numbers["steps"])
    for row in rows:
        assert row["gate"] == "ok" and len(str(row["losses"]).split()) == GATE_STEPS, row
        assert float(str(row["step_ms"])) > 0 and set(train_job.JOB.key) <= set(row)
    assert rows[0]["ratio"] == 1 and rows[0]["loss_error"] == 0


def save_tiny_base(folder: Path) -> Path:
    """Save a tiny base model instead of MiniLM, which takes half a minute to train."""
    return train_scale.make_base(folder, "splade", tiny=True)


@pytest.mark.slow
def test_a_curve_is_compared_with_that_of_one_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_scale, "make_minilm_without_dropout", save_tiny_base)
    one_device, compared = tmp_path / "one", tmp_path / "compared"
    options = ["--device", "cpu", "--tiny", "--run", "curve-0"]
    assert train_scale.main([*options, "--run", "curve-1", "--output", str(one_device)]) == 0
    assert train_scale.main([*options, "--output", str(compared), "--one", str(one_device)]) == 0
    (row,) = read_csv(compared / "train_scale.csv")
    assert (row["gate"], row["curve_error"], row["batch"]) == ("ok", "0", "8")
    assert float(row["spread_of_seeds"]) > 0
    assert float(row["pairs_per_s"]) == pytest.approx(8e3 / float(row["step_ms"]), rel=1e-3)


@pytest.mark.slow
def test_curves_train_minilm_without_dropout(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = train_scale.make_minilm_without_dropout(tmp_path / "minilm")
    network = sentence_transformers.SparseEncoder(str(folder), device="cpu")[0].model
    assert network.config.num_hidden_layers == 6
    dropouts = [layer for layer in network.modules() if isinstance(layer, torch.nn.Dropout)]
    assert dropouts
    assert all(layer.p == 0.0 for layer in dropouts)


def test_ragged_texts_have_the_stated_share_of_tokens(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    ragged = made_pairs(tokenizer, 512, ragged=True)["document"]
    assert 0.22 < valid_share(tokenizer, ragged, 128, 256) < 0.34
    assert valid_share(tokenizer, made_pairs(tokenizer, 64, ragged=False)["document"], 64, 240) == 1


def test_other_losses_get_no_times() -> None:
    right = train_job.Outcome(
        [1.0, 2.0],
        Measured([1.0], 5.0, 4.0, 5.0, 5.5, 6.0, 0.0, 0.0, None),
        4,
    )
    wrong: dict[str, Any] = train_job.row(replace(right, exact=[1.0, 2.1]), right)
    assert "losses differ by" in wrong["gate"] and "step_ms" not in wrong
    rounded = replace(right, measured=replace(right.measured, losses=[1.1]))
    assert "the first loss differs" in train_job.row(rounded, right)["gate"]
    assert train_job.row(right, right)["pairs_per_s"] == 800
    assert train_job.row(right, replace(right, batch=2))["ratio"] == 2
    held_up = replace(
        right,
        measured=replace(right.measured, step_ms=50.0),
    )  # one step, by the host
    assert (
        train_job.row(right, held_up)["ratio"] == 1
        and train_job.row(held_up, right)["ratio"] == 0.1
    )


def test_half_of_a_batch_is_run_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured([1.0], 5.0, 4.0, 5.0, 5.5, 6.0, 0.0, 0.0, None)

    def fits_32(
        kind: str,
        model: Any,
        side: str,
        rows: Any,
        batch: int,
        steps: int,
        device: torch.device,
    ) -> Measured:
        if batch > 32:
            raise torch.cuda.OutOfMemoryError
        return measured

    monkeypatch.setattr(train_job, "train", fits_32)
    monkeypatch.setattr(train_job, "exact_losses", lambda *_: [1.0])
    model = torch.nn.Linear(1, 1)
    outcome = train_job._outcome("splade", model, "stock", {"query": []}, 128, 3, CPU)
    assert outcome == train_job.Outcome([1.0], measured, 32)


@pytest.mark.parametrize("side", ["stock", "packed"])
def test_every_run_multiplies_in_its_own_precision(side: str, tokenizer_folder: Path) -> None:
    model = make_encoder(
        "splade",
        VOCABULARY,
        TINY,
        tokenizer := load_tokenizer(tokenizer_folder),
        32,
    )
    rows = made_pairs(tokenizer, 2 * GATE_STEPS, ragged=True)
    for bf16 in (False, True):
        assert run("splade", model, side, rows, 2, 0, CPU, bf16).bf16 == bf16


def test_a_results_file_becomes_a_table_with_its_conditions(tmp_path: Path) -> None:
    path = tmp_path / "lsr_head.csv"
    measured = BenchRow(
        "lsr_head",
        "a",
        "float32",
        "tilefold",
        forward_p50_ms=1.25,
        forward_floor_ms=1.0,
    )
    failed = BenchRow("lsr_head", "a", "float32", "eager", status="OOM")
    write_csv(path, [measured.record(), failed.record()], collect(CPU), CSV_KEY)
    lines = markdown_table(path).splitlines()
    assert lines[2:4] == [
        "| a, float32 | tilefold | 1.25 | - | - | 80% |  |",
        "|  | eager | - | - | - | - | OOM |",
    ]
    assert f"torch {torch.__version__}" in lines[-1]
    (tmp_path / "other.csv").write_text("a\n1\n")
    refused(
        ValueError,
        "must be a file that `tilefold bench` wrote",
        markdown_table,
        tmp_path / "other.csv",
    )


FAILED = "documents,gate\n1,FAILED\n"
PICTURES: list[tuple[Callable[[Path, Path], Path], str, dict[str, str], str]] = [
    (
        plot_results,
        "nvidia-h200/lsr_head.csv",
        {"a.csv": "status,impl\nFAILED,tilefold\n"},
        "must hold measured rows",
    ),
    (
        plot_search,
        "cpu-amd-epyc-2-threads/search.csv",
        {"search.csv": FAILED},
        "search.csv must hold rows that passed",
    ),
    (
        plot_jobs,
        "nvidia-h200",
        dict.fromkeys(["encode.csv", "train.csv"], "case,gate\na,FAILED\n"),
        r"encode.csv must hold rows that passed their gate",
    ),
]


@pytest.mark.parametrize(
    ("plot", "measured", "failed", "message"),
    PICTURES,
    ids=["operators", "search", "jobs"],
)
def test_results_become_pictures(
    plot: Callable[[Path, Path], Path],
    measured: str,
    failed: dict[str, str],
    message: str,
    tmp_path: Path,
) -> None:
    assert plot(RESULTS / measured, tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    for name, rows in failed.items():
        (tmp_path / name).write_text(rows)
    refused(
        ValueError,
        message,
        plot,
        tmp_path if len(failed) > 1 else tmp_path / name,
        tmp_path / "none.png",
    )


SCRIPTS = (
    "overview",
    "jobs_plot",
    "results_plot",
    "results_table",
    "search_plot",
    "train_splade.report",
)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_help_explains_a_script_and_draws_nothing(
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module(f"benchmarks.{script}", run_name="__main__")
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("usage:")
    assert not list(tmp_path.iterdir())
