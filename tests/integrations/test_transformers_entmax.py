"""Stock transformers models with alpha-entmax attention: BERT, RoBERTa, ModernBERT and GPT-2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    ModernBertForSequenceClassification,
    StaticCache,
)

from tests.integrations.entmax_models import NAMES, batch, model, output, registered  # noqa: F401
from tilefold.integrations.transformers import learn_alpha, register, set_alpha, unregister


@pytest.mark.parametrize("name", NAMES)
def test_alpha_one_is_the_models_own_softmax(name: str) -> None:
    tokens, mask = batch()
    stock, mine = model(name, "eager"), model(name, entmax_alpha=1.0)
    mine.load_state_dict(stock.state_dict())
    kept = mask.bool()
    torch.testing.assert_close(
        output(mine, tokens, mask)[kept], output(stock, tokens, mask)[kept], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_not_attended_to_wherever_it_is_and_gradients_flow(name: str) -> None:
    tokens, mask = batch()
    made = model(name, entmax_alpha=2.0)
    alone = output(made, tokens[2:, :3], mask[2:, :3])
    torch.testing.assert_close(output(made, tokens, mask)[2:, :3], alone, rtol=1e-4, atol=1e-5)
    mask[0, :7] = 0  # left
    mask[1, 4:9] = 0  # a hole
    outputs = []
    for filler in (5, 7):
        changed = tokens.clone()
        changed[mask == 0] = filler
        outputs.append(output(made, changed, mask)[mask.bool()])
    assert torch.equal(*outputs) and bool(outputs[0].isfinite().all())
    made.train()
    output(made, tokens, mask)[mask.bool()].sum().backward()
    grads = [p.grad for n, p in made.named_parameters() if p.grad is not None]
    assert grads and all(g.isfinite().all() for g in grads)


def test_cross_attention_takes_the_mask_of_the_encoder() -> None:
    decoder: dict[str, Any] = {"is_decoder": True, "add_cross_attention": True}
    stock, mine = model("bert", "eager", **decoder), model("bert", entmax_alpha=1.0, **decoder)
    mine.load_state_dict(stock.state_dict())
    tokens, mask = batch()
    keep = torch.ones(3, 11)
    keep[1, 5:] = keep[2, :4] = 0
    states = torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(2))
    given = {"attention_mask": mask, "encoder_hidden_states": states, "encoder_attention_mask": keep}
    found, expected = (m(input_ids=tokens, **given).last_hidden_state[mask.bool()] for m in (mine, stock))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_alpha_reaches_models_with_a_head_and_is_not_replaced_by_a_default() -> None:
    tokens, mask = batch()
    logits = {}
    for alpha in (1.5, 2.0):
        config = model("modernbert", entmax_alpha=alpha).config
        torch.manual_seed(1)
        made = ModernBertForSequenceClassification._from_config(config, attn_implementation="entmax").eval()
        logits[alpha] = made(input_ids=tokens, attention_mask=mask).logits
    assert not torch.equal(logits[1.5], logits[2.0])
    set_alpha(made, 1.5)
    assert torch.equal(made(input_ids=tokens, attention_mask=mask).logits, logits[1.5])


def test_models_compile_whole() -> None:
    made = model("modernbert")
    tokens, mask = batch()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    kept = mask.bool()
    torch.testing.assert_close(output(compiled, tokens, mask)[kept], output(made, tokens, mask)[kept])
    torch._dynamo.reset()


@pytest.mark.parametrize("side", ["left", "none"])
def test_gpt2_generates_the_same_with_and_without_a_cache(side: str) -> None:
    made = model("gpt2")
    tokens, mask = batch()[0][:2, :6], torch.ones(2, 6, dtype=torch.long)
    if side == "left":
        mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    cached = made.generate(tokens, use_cache=True, **options)
    assert torch.equal(cached, made.generate(tokens, use_cache=False, **options))


def test_alphas_by_configuration_by_layer_and_learned() -> None:
    tokens, mask = batch()
    kept = mask.bool()
    by_config = output(model("bert", entmax_alpha=[1.2, 2.0]), tokens, mask)
    made = model("bert")
    plain = output(made, tokens, mask)
    set_alpha(made, [1.2, 2.0])
    assert torch.equal(output(made, tokens, mask)[kept], by_config[kept]) and not torch.equal(plain, by_config)
    alphas = learn_alpha(made, 1.5)
    torch.testing.assert_close(output(made, tokens, mask)[kept], plain[kept], rtol=1e-4, atol=1e-5)
    output(made, tokens, mask)[kept].square().sum().backward()
    assert len(alphas) == 2 and all(a.theta.grad is not None and (a.theta.grad != 0).all() for a in alphas)
    assert "encoder.layer.0.attention.self.entmax_alpha.theta" in made.state_dict()
    with pytest.raises(ValueError, match="alpha must be one number or 2"):
        set_alpha(made, [1.5])


def test_what_is_not_supported_is_said() -> None:
    made = model("bert")
    tokens, _ = batch()
    with pytest.raises(ValueError, match=r"attention_mask must be a padding mask \[B, Nk\]"):
        made(input_ids=tokens, attention_mask=torch.ones(3, 1, 20, 20))
    decoder = model("gpt2")
    with pytest.raises(ValueError, match="use a dynamic cache"):
        decoder(input_ids=tokens[:, :4], past_key_values=StaticCache(config=decoder.config, max_cache_len=16))
    packs = torch.cat([torch.arange(12), torch.arange(8)])[None].expand(3, -1)
    with pytest.raises(ValueError, match="pass cu_seq_lens_q and cu_seq_lens_k for packed sequences"):
        decoder(input_ids=tokens, position_ids=packs, use_cache=False)
    with pytest.raises(ValueError, match="must not contain 'flash'"):
        register("flash_entmax")
    unregister()
    with pytest.raises(ValueError, match="entmax"):
        model("bert")
