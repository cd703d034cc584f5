"""Copies of tokenizers give the same tokens, and share the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tilefold._internal.tokenizer_copies import copy_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "fold", "##ed", "tile", "##s", "é"]
TEXTS = ["The tiles folded <new> é", "", "fold [SEP] <image><image> tile", "unknown 文字"]


def word_piece() -> Tokenizer:
    """A tokenizer as BERT has it, with tokens that were added after its vocabulary."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.add_tokens(["<new>", AddedToken("<image>", lstrip=True, normalized=False)])
    tokenizer.add_special_tokens(["<last>"])
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def byte_pairs() -> Tokenizer:
    """A tokenizer as GPT-2 has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "th", "the"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def unigram() -> Tokenizer:
    """A tokenizer as XLM-RoBERTa has it."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -2.0), ("tile", -3.0), ("s", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TOKENIZERS = [word_piece, byte_pairs, unigram]


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer that truncates and pads."""
    tokenizer: Tokenizer = request.param()
    tokenizer.enable_truncation(6, stride=1, strategy="only_first", direction="left")
    tokenizer.enable_padding(direction="left", pad_to_multiple_of=4, length=None)
    return tokenizer


def tokens_of(tokenizer: Tokenizer) -> list[tuple[list[int], list[str], list[tuple[int, int]]]]:
    encodings = tokenizer.encode_batch(TEXTS)
    return [(encoding.ids, encoding.tokens, encoding.offsets) for encoding in encodings]


def test_a_copy_gives_the_same_tokens(tokenizer: Tokenizer) -> None:
    copy = copy_tokenizer(tokenizer)
    assert copy.to_str() == tokenizer.to_str()
    assert tokens_of(copy) == tokens_of(tokenizer)
    ids = tokenizer.encode(TEXTS[0]).ids
    assert copy.decode(ids) == tokenizer.decode(ids)


def test_a_change_of_the_copy_does_not_change_the_tokenizer(tokenizer: Tokenizer) -> None:
    serialized = tokenizer.to_str()
    tokens = tokens_of(tokenizer)
    copy = copy_tokenizer(tokenizer)
    copy.no_truncation()
    copy.no_padding()
    copy.add_tokens(["<another>"])
    assert tokens_of(copy) != tokens
    assert tokenizer.to_str() == serialized
    assert tokens_of(tokenizer) == tokens


def test_a_copy_shares_the_vocabulary() -> None:
    """Reading a large one takes long, and stops all threads of Python."""
    tokenizer = word_piece()
    copy = copy_tokenizer(tokenizer)
    copy.model.max_input_chars_per_word = 7
    assert tokenizer.model.max_input_chars_per_word == 7


class WithoutAddedTokens:
    """Tokenizer of a release of the package that does not list the added tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {}


def test_a_tokenizer_that_cannot_be_copied_part_by_part_is_read_again() -> None:
    tokenizer = word_piece()
    copy = copy_tokenizer(WithoutAddedTokens(tokenizer))
    assert copy.to_str() == tokenizer.to_str()
    assert tokens_of(copy) == tokens_of(tokenizer)
