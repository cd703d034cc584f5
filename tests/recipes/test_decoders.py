"""SPLADE on causal language models: causal, bidirectional, echo, with and without LoRA; the adaptation before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SparseEncoder

from tests.recipes.decoder_models import FAMILIES, TEXTS, dense, tiny_causal_lm
from tests.recipes.small import small_masked_lm
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes.adaptation import AdaptationRecipe, adapt, pack_texts
from tilefold.recipes.decoders import VARIANTS, add_lora, causal_splade, check_bidirectional, merge_adapters

SMALL: dict[str, Any] = {"batch_size": 2, "length": 16, "warmup_steps": 0, "chunk": 8, "bf16": False}


def load(folder: Path) -> tuple[Any, Any]:
    return (
        transformers.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True),
        transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True),
    )


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("causal")
    return {family: tiny_causal_lm(folder / family, family) for family in FAMILIES}


def reload(model: SparseEncoder, folder: Path) -> SparseEncoder:
    model.save_pretrained(str(folder))
    return SparseEncoder(str(folder), device="cpu", trust_remote_code=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_saving_and_fusing_change_nothing(
    bases: dict[str, Path], family: str, variant: str, tmp_path: Path
) -> None:
    model = causal_splade(bases[family], variant, max_length=64, device="cpu")
    vectors = dense(model, TEXTS)
    alone = torch.cat([dense(model, [text]) for text in TEXTS])
    torch.testing.assert_close(vectors, alone, rtol=0, atol=1e-6)
    assert (vectors > 0).any(dim=1).all()
    again = reload(model, tmp_path / "model")
    assert torch.equal(dense(again, TEXTS), vectors)
    with accelerate(again):
        torch.testing.assert_close(dense(again, TEXTS), vectors, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", ["causal", "bidirectional"])
def test_only_a_bidirectional_first_token_sees_the_last(
    bases: dict[str, Path], variant: str, attention: str, tmp_path: Path
) -> None:
    options = {"attn_implementation": attention}
    model = causal_splade(bases["qwen2"], variant, device="cpu", model_kwargs=options)
    model.save_pretrained(str(tmp_path))
    for one in (model, SparseEncoder(str(tmp_path), device="cpu", model_kwargs=options)):
        network: Any = one[0].model.eval()
        assert network.config._attn_implementation == attention
        ids = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 9, 0, 0], [5, 6, 7, 8, 4, 3]])
        mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]])
        first = network.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        assert torch.equal(first[0], first[1]) is (variant == "causal")
        assert torch.equal(first[0], first[2])  # what is masked is not seen


def test_tied_and_untied_heads_score_with_their_own_matrix(tmp_path: Path) -> None:
    for tied in (True, False):
        folder = tiny_causal_lm(tmp_path / str(tied), "qwen2", tie_word_embeddings=tied)
        model = causal_splade(folder, device="cpu")
        network = model[0].model
        assert (network.get_output_embeddings().weight is network.get_input_embeddings().weight) is tied
        features = model.preprocess(TEXTS[:1])
        hidden = network.base_model(input_ids=features["input_ids"]).last_hidden_state[0]
        expected = (hidden @ network.lm_head.weight.T).amax(0).relu().log1p()
        torch.testing.assert_close(dense(model, TEXTS[:1])[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_lora_trains_its_own_weights_and_is_merged_into_a_whole_checkpoint(
    bases: dict[str, Path], variant: str, tmp_path: Path
) -> None:
    model = causal_splade(bases["qwen2"], variant, max_length=64, device="cpu")
    assert add_lora(model[0], rank=4, alpha=8, dropout=0.0)[0] == "q_proj"
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name in trained:
            torch.nn.init.normal_(parameter, std=0.1)
    with accelerate(model):
        model.train()
        model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name in trained)
    model.eval()
    expected = dense(model, TEXTS)
    assert merge_adapters(model) == 14
    torch.testing.assert_close(dense(model, TEXTS), expected, rtol=0, atol=1e-5)
    assert all(p.requires_grad for p in model.parameters())
    again = reload(model, tmp_path / "merged")
    assert not any("lora" in name for name, _ in again.named_parameters())
    torch.testing.assert_close(dense(again, TEXTS), expected, rtol=0, atol=1e-5)
    if variant == "bidirectional":
        assert again[0].model.config.is_causal is False


def test_what_cannot_be_built_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="variant must be one of causal, bidirectional, echo, got 'both'"):
        causal_splade(bases["qwen2"], "both")
    masked = small_masked_lm(tmp_path / "masked")
    with pytest.raises(ValueError, match=r"base_model must have a causal LM head, got .*BertForMaskedLM"):
        causal_splade(masked)
    model = causal_splade(bases["llama"], "causal", device="cpu")
    with pytest.raises(ValueError, match=r"needs a model whose attention reads config\.is_causal, got LlamaForCausal"):
        check_bidirectional(model[0].model)


def test_texts_are_packed_with_an_end_token_between_them(bases: dict[str, Path]) -> None:
    tokenizer = load(bases["qwen2"])[1]
    blocks = pack_texts(tokenizer, TEXTS, 8)
    assert all(len(block) == 8 for block in blocks)
    stream = [token for block in blocks for token in block]
    first = tokenizer(TEXTS[0])["input_ids"]
    assert stream[: len(first) + 1] == [*first, tokenizer.eos_token_id]
    with pytest.raises(ValueError, match="texts must fill at least one block of 4096 tokens"):
        pack_texts(tokenizer, TEXTS, 4096)


def test_a_dying_head_comes_back_to_life(bases: dict[str, Path]) -> None:
    network, tokenizer = load(bases["qwen2"])
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


def test_a_bidirectional_or_capped_model_is_refused(bases: dict[str, Path]) -> None:
    network, tokenizer = load(bases["qwen2"])
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
