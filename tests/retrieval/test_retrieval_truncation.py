"""One enormous text costs what a model reads of it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tilefold.retrieval import encode_queries
from tilefold.retrieval.truncation import Beginnings, cut_texts

BASE64 = base64.b64encode(np.random.default_rng(0).bytes(60_000)).decode()
UNKNOWN: dict[str, Any] = {"unk_token": "<unk>"}
JAPANESE = "ねこがあたたかいきのうえでねむっている、いぬは走った。㍿カフェ１２３" * 2000
WORDS = ["cats", "sleep", "on", "warm", "trees,", "and", "dogs", "don't", ""]


def test_an_enormous_text_is_cut_and_read_as_before(splade: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    long = " ".join(WORDS * 20_000)
    (cut,) = cut_texts(splade, [long])
    assert long.startswith(cut) and len(cut) < 40 * splade.max_seq_length
    fast = encode_queries(splade, {"q": long}, top_k=30)
    for module in ("encoding", "_streamed"):
        monkeypatch.setattr(f"tilefold.retrieval.{module}.cut_texts", lambda model, texts: texts)
    whole = encode_queries(splade, {"q": long}, top_k=30)
    assert np.array_equal(fast.indices, whole.indices) and np.array_equal(fast.data, whole.data)


def test_a_text_is_cut_behind_as_many_tokens_as_the_model_reads(splade: Any) -> None:
    limit = splade.max_seq_length
    words = (" " * 100_000 + "cats " * 100_000, "q" * 50_000 + " cats" * 100_000, "猫が眠る " * 50_000)
    for text in (*words, BASE64, JAPANESE):  # without white space
        (cut,) = cut_texts(splade, [text])
        assert text.startswith(cut) and len(cut) < (len(text) if text in words else 32 * limit + 1)
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


def test_a_prompt_before_the_text_is_part_of_what_is_shown(splade: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splade, "prompts", {"query": "search_query: ", "document": "title[SEP]"})
    assert cut_texts(splade, [BASE64]) == [BASE64], "a prompt with a special token is not decided by pieces"
    monkeypatch.setattr(splade, "prompts", {"query": "search_query: ", "document": ""})
    (cut,) = cut_texts(splade, [BASE64])
    settings: dict[str, Any] = {"truncation": True, "max_length": splade.max_seq_length}
    one, other = (splade.tokenizer("search_query: " + text, **settings) for text in (cut, BASE64))
    assert len(cut) < len(BASE64) and one["input_ids"] == other["input_ids"]


def fast_tokenizer(kind: str) -> Any:
    """A Unigram tokenizer as SentencePiece makes them, or a byte-level BPE, trained on texts without white space."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trainer: Any
    if kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, **UNKNOWN, special_tokens=["<unk>"])
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    parts = [JAPANESE[i : i + 50] for i in range(0, 3000, 37)] + [BASE64[i : i + 50] for i in range(0, 3000, 37)]
    made.train_from_iterator(parts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, **UNKNOWN)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_beginnings_of_one_endless_piece_are_those_of_the_whole(kind: str) -> None:
    tokenizer = fast_tokenizer(kind)
    beginnings, source = Beginnings(tokenizer), np.random.default_rng(1)
    kana = [chr(code) for code in range(0x3042, 0x3092)]
    shown = 0
    for text in (
        *("".join(source.choice(kana, 6000)) for _ in range(4)),
        *(
            "".join(source.choice(["ねこ", "が", "きのうえ", "ab", "で", "走った", "☃", "カフェ"], 3000))
            for _ in range(4)
        ),
        JAPANESE[:6000].replace("。", "").replace("、", ""),
        BASE64[:8000].replace("+", "").replace("/", ""),
    ):
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        for size, count in ((900, 10), (1400, 64), (2600, 200)):
            first = beginnings.first(text[:size], count)
            shown += first is not None
            assert first in (None, whole[:count])
    assert shown >= 20, "most beginnings decide their first tokens"


def test_a_beginning_that_what_follows_changes_is_not_taken_for_the_whole() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pieces = [("<unk>", 0.0), ("a", -100.0), ("aa", -1.0), ("aaa", -1.4)]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces, 0)), **UNKNOWN)
    first = {tuple(tokenizer("a" * size, add_special_tokens=False)["input_ids"][:20]) for size in range(1000, 1006)}
    assert len(first) > 1, "the length of the whole decides the first tokens"
    assert Beginnings(tokenizer).first("a" * 1000, 20) is None


def test_combining_characters_at_the_end_decide_nothing(splade: Any) -> None:
    beginnings = Beginnings(splade.tokenizer)
    assert beginnings.first("cats sleep " * 40, 16) is not None
    assert beginnings.first("cats sleep " * 40 + "e" + "\u0301" * 100, 16) is None
    assert beginnings.first("cats [MASK] sleep " * 40, 16) is None, "special tokens are split off before anything else"
    assert beginnings.first("q" * 2000, 1) is None, "a word may go on, and be unknown then"
