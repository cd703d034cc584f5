"""The adaptation phase: next tokens from activated logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.recipes.decoder_models import TEXTS, tiny_causal_lm
from tilefold.recipes.adaptation import AdaptationRecipe, adapt, pack_texts

SMALL: dict[str, Any] = {"batch_size": 2, "length": 16, "warmup_steps": 0, "chunk": 8, "bf16": False}


def load(folder: Path) -> tuple[Any, Any]:
    return (
        transformers.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True),
        transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True),
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_causal_lm(tmp_path_factory.mktemp("causal"))


def test_texts_are_packed_with_an_end_token_between_them(base: Path) -> None:
    tokenizer = load(base)[1]
    blocks = pack_texts(tokenizer, TEXTS, 8)
    assert all(len(block) == 8 for block in blocks)
    stream = [token for block in blocks for token in block]
    first = tokenizer(TEXTS[0])["input_ids"]
    assert stream[: len(first) + 1] == [*first, tokenizer.eos_token_id]
    with pytest.raises(ValueError, match="texts must fill at least one block of 4096 tokens"):
        pack_texts(tokenizer, TEXTS, 4096)


def test_a_dying_head_comes_back_to_life(base: Path) -> None:
    network, tokenizer = load(base)
    # a head whose bias is far below 0: all logits are negative
    head = torch.nn.Linear(32, network.config.vocab_size, bias=True)
    torch.nn.init.normal_(head.weight, std=0.01)
    torch.nn.init.constant_(head.bias, -1.0)
    network.config.tie_word_embeddings = False
    network.lm_head = head
    recipe = AdaptationRecipe(steps=12, learning_rate=2e-2, **SMALL)
    seen: list[tuple[int, int]] = []
    result = adapt(network, tokenizer, TEXTS * 4, recipe, progress=lambda step, steps, loss: seen.append((step, steps)))
    assert result.first_alive == 0.0 and not result.dying and result.alive > 0.9
    assert result.plain < result.first_plain and result.activated < result.first_activated
    assert seen == [(step, 12) for step in range(1, 13)]
    assert result.to_dict()["steps"] == 12


def test_a_bidirectional_or_capped_model_is_refused(base: Path, tmp_path: Path) -> None:
    network, tokenizer = load(base)
    network.config.is_causal = False
    with pytest.raises(ValueError, match="network must be causal for next-token prediction"):
        adapt(network, tokenizer, TEXTS, AdaptationRecipe(steps=1, **SMALL))
    capped = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, intermediate_size=48, final_logit_softcapping=0.05,
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="logits must be those of the LM head, got changed ones in Gemma2ForCausalLM"):
        adapt(capped, tokenizer, TEXTS, AdaptationRecipe(steps=1, **SMALL))
    with pytest.raises(ValueError, match="steps must be a whole number"):
        AdaptationRecipe(steps=0)
