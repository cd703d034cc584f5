"""`benchmarks.train` on a tiny model: every side trains the same model, and a wrong loss gets no times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("sentence_transformers")

from benchmarks import train as train_job
from benchmarks.job import JobOptions
from benchmarks.train_data import TINY, load_tokenizer, made_pairs, make_encoder, valid_share
from benchmarks.train_run import GATE_STEPS, Measured, run
from tests.distributed.models import VOCABULARY, save_tiny_splade

JOB = train_job.JOB


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_splade("bert", folder)
    return folder


@pytest.mark.parametrize("name", ["tiny", "tiny-colbert"])
def test_all_sides_train_the_same_model(name: str, tokenizer_folder: Path) -> None:
    (case,) = JOB.chosen([name], "cpu", True)
    case = replace(case, numbers={**case.numbers, "vocab": VOCABULARY})
    rows = list(JOB.run(case, JobOptions(torch.device("cpu"), tokenizer=tokenizer_folder)))
    assert [row["side"] for row in rows] == list(case.numbers["steps"])
    for row in rows:
        assert row["gate"] == "ok", row
        assert len(str(row["losses"]).split()) == GATE_STEPS
        assert float(str(row["step_ms"])) > 0 and set(JOB.key) <= set(row)
    assert rows[0]["ratio"] == 1 and rows[0]["loss_error"] == 0


def test_ragged_texts_have_the_stated_share_of_tokens(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    ragged = made_pairs(tokenizer, 512, ragged=True)["document"]
    assert 0.22 < valid_share(tokenizer, ragged, 128, 256) < 0.34
    assert valid_share(tokenizer, made_pairs(tokenizer, 64, ragged=False)["document"], 64, 240) == 1


def test_other_losses_get_no_times() -> None:
    right = train_job.Outcome([1.0, 2.0], Measured([1.0], 5.0, 4.0, 5.0, 5.5, 6.0, 0.0, 0.0, None), 4)
    wrong: dict[str, Any] = train_job.row(replace(right, exact=[1.0, 2.1]), right)
    assert "losses differ by" in wrong["gate"] and "step_ms" not in wrong
    rounded = replace(right, measured=replace(right.measured, losses=[1.1]))
    assert "the first loss differs" in train_job.row(rounded, right)["gate"]
    assert train_job.row(right, right)["pairs_per_s"] == 800
    half = replace(right, batch=2)
    assert train_job.row(right, half)["ratio"] == 2
    held_up = replace(right, measured=replace(right.measured, step_ms=50.0))  # one step, by the host
    assert train_job.row(right, held_up)["ratio"] == 1 and train_job.row(held_up, right)["ratio"] == 0.1


def test_half_of_a_batch_is_run_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1, 1)
    measured = Measured([1.0], 5.0, 4.0, 5.0, 5.5, 6.0, 0.0, 0.0, None)

    def fits_32(kind: str, model: Any, side: str, rows: Any, batch: int, steps: int, device: torch.device) -> Measured:
        if batch > 32:
            raise torch.cuda.OutOfMemoryError
        return measured

    monkeypatch.setattr(train_job, "train", fits_32)
    monkeypatch.setattr(train_job, "exact_losses", lambda *_: [1.0])
    found = train_job._outcome("splade", model, "stock", {"query": []}, 128, 3, torch.device("cpu"))
    assert found == train_job.Outcome([1.0], measured, 32)


@pytest.mark.parametrize("side", ["stock", "packed"])
def test_every_run_multiplies_in_its_own_precision(side: str, tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    model = make_encoder("splade", VOCABULARY, TINY, tokenizer, 32)
    rows = made_pairs(tokenizer, 2 * GATE_STEPS, ragged=True)
    for bf16 in (False, True):
        assert run("splade", model, side, rows, 2, 0, torch.device("cpu"), bf16).bf16 == bf16
