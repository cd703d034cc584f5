"""Tests of the benchmark of decoders: its model, its texts and its gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.decoders import (
    CASES,
    MAX_TOKENS,
    MEDIAN_TOKENS,
    PACKED,
    PARQUET,
    check_packed,
    make_abstracts,
    make_decoder,
    measure,
)
from benchmarks.encode_data import ACTIVE_TERMS
from benchmarks.job import JobOptions
from benchmarks.train_data import load_tokenizer
from tilefold.integrations.transformers import packed

CPU = torch.device("cpu")
TINY = next(case for case in CASES if case.name == "tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer of MiniLM."""
    tokenizer = load_tokenizer(None)
    tokenizer.model_max_length = MAX_TOKENS
    return tokenizer


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """A tiny decoder, which is not accelerated."""
    return make_decoder(TINY, tokenizer, CPU)


def test_texts_have_the_lengths_of_abstracts(tokenizer: Any) -> None:
    texts = make_abstracts(tokenizer, 200)
    lengths = [len(ids) for ids in tokenizer(texts, truncation=True)["input_ids"]]
    assert sorted(lengths)[100] == pytest.approx(MEDIAN_TOKENS, rel=0.1)


def test_texts_have_the_chosen_number_of_active_terms(model: Any, tokenizer: Any) -> None:
    rows = model.encode(make_abstracts(tokenizer, 8)).to_dense()
    n_active = float((rows > 0).sum(1).float().mean())
    assert n_active == pytest.approx(ACTIVE_TERMS, rel=0.3)


def test_the_gate_accepts_packed_texts(model: Any) -> None:
    assert check_packed(model, CPU)["gate"] == "ok"


def test_the_gate_refuses_attention_to_later_tokens(
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed, "_is_causal_call", lambda module, is_causal: False)
    monkeypatch.setattr(packed, "_compare_packed_and_padded", lambda model: None)
    assert "packed texts have an error" in str(check_packed(model, CPU)["gate"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "works"),
    [
        pytest.param("tiny-lora", {"step of 4 pairs"}, id="LoRA"),
        pytest.param("tiny-echo", {"encode", "step of 4 pairs"}, id="echo"),
        pytest.param("tiny-cached", {"step of 8 pairs"}, id="mini-batches"),
    ],
)
def test_other_trainings_pass_the_gate(
    name: str,
    works: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.decoders.MANY_STEPS", 4)
    monkeypatch.setattr("benchmarks.decoders.FEW_STEPS", 4)
    case = next(case for case in CASES if case.name == name)
    rows = list(measure(case, JobOptions(CPU)))
    assert [row["gate"] for row in rows] == ["ok"] * len(rows)
    assert {row["work"] for row in rows} == works
    ways = {row["way"] for row in rows}
    assert PACKED in ways
    assert (PARQUET in ways) == ("encode" in works)
