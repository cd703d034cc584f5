"""One enormous text costs what a model reads of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilefold.retrieval import encode_queries
from tilefold.retrieval.truncation import cut_texts

WORDS = ["cats", "sleep", "on", "warm", "trees,", "and", "dogs", "don't", ""]


def test_an_enormous_text_is_cut_and_read_as_before(splade: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    long = " ".join(WORDS * 20_000)
    (cut,) = cut_texts(splade, [long])
    assert long.startswith(cut) and len(cut) < 40 * splade.max_seq_length
    fast = encode_queries(splade, {"q": long}, top_k=30)
    monkeypatch.setattr("tilefold.retrieval.encoding.cut_texts", lambda model, texts: texts)
    whole = encode_queries(splade, {"q": long}, top_k=30)
    assert np.array_equal(fast.indices, whole.indices) and np.array_equal(fast.data, whole.data)


def test_a_text_is_cut_behind_as_many_tokens_as_the_model_reads(splade: Any) -> None:
    limit = splade.max_seq_length
    for text in (" " * 100_000 + "cats " * 100_000, "q" * 50_000 + " cats" * 100_000, "猫が眠る " * 50_000):
        (cut,) = cut_texts(splade, [text])
        assert len(cut) < len(text)
        settings: dict[str, Any] = {"truncation": True, "max_length": limit}
        assert splade.tokenizer(cut, **settings)["input_ids"] == splade.tokenizer(text, **settings)["input_ids"]


def test_what_cannot_be_cut_safely_is_left_whole(splade: Any) -> None:
    texts = ["cats", "q" * 200_000, " ".join(WORDS * 100)[: 30 * splade.max_seq_length]]
    assert cut_texts(splade, texts) == texts
    splade.tokenizer.truncation_side = "left"
    try:
        assert cut_texts(splade, ["cats " * 100_000]) == ["cats " * 100_000]
    finally:
        splade.tokenizer.truncation_side = "right"
