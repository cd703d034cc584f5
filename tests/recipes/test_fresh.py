"""A masked language model from nothing: untrained, it matches words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from sentence_transformers import SparseEncoder

from tests.modules.tiny import QUERIES, TEXTS, tiny_masked_lm
from tilefold.recipes.fresh import fresh_masked_lm


@pytest.fixture(scope="module")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_masked_lm(tmp_path_factory.mktemp("tiny-lm")))


def tokenizer_of(folder: str) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_untrained_vectors_are_the_tokens_of_the_text_with_nearly_equal_weights(tiny_lm: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tiny_lm)
    folder = fresh_masked_lm(tokenizer, tmp_path / "fresh", width=192, layers=2, heads=4, max_length=64)
    model = SparseEncoder(str(folder), device="cpu")
    rows = model.encode([*TEXTS, *QUERIES], convert_to_sparse_tensor=False)
    for text, row in zip([*TEXTS, *QUERIES], rows, strict=True):
        assert set(row.nonzero().flatten().tolist()) == set(tokenizer(text)["input_ids"])
        found = row[row > 0]
        assert float(found.std() / found.mean()) < 0.1
    expected = torch.log1p(torch.tensor(0.02 * 192 / 2))  # half of a token's own logit is above the bias
    assert float(rows[rows > 0].mean()) == pytest.approx(float(expected), rel=0.05)


def test_equal_seeds_make_equal_models_and_the_random_state_is_left_alone(tiny_lm: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    made = [fresh_masked_lm(tokenizer_of(tiny_lm), tmp_path / name, width=16, layers=1, heads=2) for name in "ab"]
    assert torch.equal(torch.random.get_rng_state(), state)
    first, second = (path / "model.safetensors" for path in made)
    assert first.read_bytes() == second.read_bytes()


def test_every_weight_gets_a_gradient(tiny_lm: str, tmp_path: Path) -> None:
    folder = fresh_masked_lm(tokenizer_of(tiny_lm), tmp_path / "fresh", width=64, layers=2, heads=2)
    model = SparseEncoder(str(folder), device="cpu").train()
    model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert not [name for name in without if "key.bias" not in name]  # softmax does not see a shift of all keys


def test_sizes_that_do_not_fit_are_refused(tiny_lm: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"width must be a multiple of heads \(5\), got 16"):
        fresh_masked_lm(tokenizer_of(tiny_lm), tmp_path, width=16, heads=5)
    with pytest.raises(ValueError, match="layers must be a whole number of at least 1, got 0"):
        fresh_masked_lm(tokenizer_of(tiny_lm), tmp_path, layers=0)
    bare = tokenizer_of(tiny_lm)
    bare.mask_token = None
    with pytest.raises(ValueError, match="tokenizer must have a padding and a mask token"):
        fresh_masked_lm(bare, tmp_path)
